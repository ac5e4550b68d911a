"""A certificate as one HTML page that can be sent to anybody.

The page needs nothing but itself: its style and its plots are part of it, and it runs no script.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from paceline.certify.certificate import Certificate, Layer, Parted
from paceline.certify.markup import Html, el, join
from paceline.certify.plots import figure
from paceline.certify.words import HOW, WHAT, count, duration, figures_in_short, headline, parting, sides, word_of
from paceline.errors import BadRequest
from paceline.files import write_atomically


def write_page(path: Path, certificate: Certificate) -> None:
    """Write the page so that ``path`` holds either what it held before or all of it.

    Raises:
        BadRequest: when nothing can be written there.
    """
    content = page(certificate)
    try:
        write_atomically(path, content)
    except OSError as error:
        why = error.strerror or error
        raise BadRequest(
            f"cannot write {path}: {why}. Give a file in a folder that exists and can be written"
        ) from None


def page(certificate: Certificate) -> str:
    """One self-contained HTML page with all that the certificate holds, for readers who were not there."""
    word, sentence = headline(certificate)
    plots = [plot for layer in certificate.layers if (plot := figure(layer, certificate.parted))]
    parted = [_parted_card(one) for one in certificate.parted]
    about = [*certificate.environment.items(), ("mode", certificate.mode)]
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        el("title", f"{word.capitalize()}: {certificate.method} on {certificate.model}"),
        el("style", Html(STYLE)),
    ]
    body = [
        _banner(certificate, word, sentence),
        _section("What this says", *_explanation(certificate)),
        _section("What was checked", _layer_table(certificate.layers)),
        _section("In figures", *plots) if plots else "",
        _section("Where texts part", el("p", PARTING, class_="lead"), *parted) if parted else "",
        _section("Notes", el("ul", *(el("li", note) for note in certificate.notes))) if certificate.notes else "",
        _section("What it ran on", el("dl", *(join([el("dt", k), el("dd", v)]) for k, v in about), class_="about")),
        el("footer", "Written by paceline certify. This page is one file and loads nothing."),
    ]
    document = el("html", el("head", *head), el("body", el("main", *body)), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


PARTING = (
    "The floor is how much the unmodified model differs from itself on this very prefix when it reads the last token "
    "alone or the prefix at once. A difference is a near-tie only if logits within the floor yield the other token; "
    "anything else is a bug. What differs is underlined."
)


def _section(title: str, *inside: str) -> Html:
    return el("section", el("h2", title), *inside)


def _banner(certificate: Certificate, word: str, sentence: str) -> Html:
    """The verdict with its seal, what it is about, and the numbers that sum it up."""
    about = [("model", certificate.model), ("method", certificate.method), ("rule", certificate.rule)]
    facts = [el("div", el("dd", value), el("dt", name)) for value, name in figures_in_short(certificate)]
    seals = {
        "lossless": el("path", d="M21 33.5l8 8 15-18"),
        "near-ties only": el("path", d="M19 27c5-5 9-4 13-1s8 4 13-1M19 39c5-5 9-4 13-1s8 4 13-1"),
        "bug": el("path", d="M23 23l18 18M41 23l-18 18"),
    }
    seal = [
        el("circle", cx=32, cy=32, r=30),
        el("circle", cx=32, cy=32, r=25, class_="inner"),
        seals.get(word, el("path", d="M22 32h20")),
    ]
    return el(
        "header",
        el("p", "Certificate of losslessness", class_="over"),
        el(
            "div",
            el("svg", *seal, viewBox="0 0 64 64", class_="seal", aria_hidden="true"),
            el("div", el("h1", word.capitalize()), el("p", f"{sentence[0].upper()}{sentence[1:]}.")),
            class_="verdict",
        ),
        el("p", *(el("span", el("b", name), " ", value) for name, value in about), class_="chips"),
        el("dl", *facts, class_="facts") if facts else "",
        class_=word.split()[0],
    )


def _explanation(certificate: Certificate) -> list[Html]:
    """What speculation is and what was found, for somebody who has heard of neither."""
    first = [
        "Speculative decoding lets something quick, the drafter, guess the next few tokens of a text; the model then "
        "checks all the guesses in one pass. Done right, the text is what the model would have written alone, only "
        "sooner. This certificate says whether that holds for ",
        *(el("b", certificate.model), " with the method ", el("b", certificate.method), " under the rule "),
        *(el("b", certificate.rule), ". "),
    ]
    openings = {
        "proved": "Proved, every possible outcome added up",
        "equal": "Compared token by token and found equal",
        "tested": "Tested statistically, and no difference seen",
    }
    passed = [layer for layer in certificate.layers if word_of(layer) == "lossless"]
    rest = [layer for layer in certificate.layers if word_of(layer) not in ("lossless", "reported")]
    for strength, layers in groupby(passed, lambda layer: layer.strength):
        first += [el("b", openings.get(strength, "Passed")), f": {_named(layers)}. "]
    titles = {"bug": "Failed", "near_ties_only": "Equal but for near-ties", "skipped": "Not checked"}
    for verdict, title in titles.items():
        if those := [layer for layer in rest if layer.verdict == verdict]:
            first += [el("b", title), f": {_named(those)}. "]
    if certificate.parted:
        first.append(
            "A near-tie is a place where two tokens are so nearly equally good that the order in which a machine adds "
            "numbers decides; the model differs from itself there, without any speculation."
        )
    return [el("p", *first, class_="lead")]


def _named(layers: Iterable[Layer]) -> str:
    return "; ".join(WHAT.get(layer.name, layer.name) for layer in layers)


def _layer_table(layers: Sequence[Layer]) -> Html:
    """What was checked, how strongly, and what came of it."""
    rows = [
        el(
            "tr",
            el("th", layer.name, el("small", WHAT.get(layer.name, "")), scope="row"),
            el("td", el("b", layer.strength), el("small", HOW[layer.strength])),
            el("td", el("span", word_of(layer), class_=f"word {word_of(layer).split()[0]}")),
            el("td", layer.detail, el("small", duration(layer.seconds)) if layer.seconds else ""),
        )
        for layer in layers
    ]
    head = el("tr", *(el("th", title, scope="col") for title in ("Layer", "How", "Verdict", "Found")))
    return el("table", el("thead", head), el("tbody", *rows), class_="layers")


def _parted_card(one: Parted) -> Html:
    d, (word, why) = one.difference, parting(one)
    pairs = enumerate(zip(one.expected, one.got))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(one.expected), len(one.got)))
    rows = [
        el(
            "tr",
            el("th", f"{side} speculation", scope="row"),
            el("td", token, el("small", "" if logit == "-" else f"logit {logit}")),
            el("td", el("code", text[:shared], el("mark", text[shared:]) if text[shared:] else "")),
        )
        for side, token, logit, text in sides(one)
    ]
    place = f"temperature {one.temperature:g}, after {count(d.index, 'equal token')} (index {d.index})"
    return el(
        "article",
        el("h3", el("span", word, class_=f"word {word}"), " ", one.prompt, el("small", place)),
        el("p", f"{why[0].upper()}{why[1:]}."),
        el("table", el("tbody", *rows)),
        class_="parted",
    )


STYLE = """
:root{--page:#f6f5f1;--card:#fff;--ink:#1d2126;--soft:#5d6670;--line:#dcdad3;--grid:#e9e7e1;--bar:#3d6f9e;--pale:#d5e1ec;
--edge:#8aa6c1;--ok:#17704c;--near:#8a5a00;--bad:#b3261e;--okbg:#e3f1ea;--nearbg:#f8ecd2;--badbg:#fae3e0;--greybg:#ecebe6}
@media screen and (prefers-color-scheme:dark){:root{--page:#14171a;--card:#1c2024;--ink:#e6e8ea;--soft:#9aa4ae;
--line:#343a41;--grid:#2a2f35;--bar:#7fb0de;--pale:#2b3d4f;--edge:#57789a;--ok:#6fd0a3;--near:#e8b85a;--bad:#ff8a80;
--okbg:#17352a;--nearbg:#3a2d12;--badbg:#432220;--greybg:#2a2f35}}
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Liberation Sans",sans-serif}
main{max-width:920px;margin:0 auto;padding:40px 24px 48px}
h1,h2,h3,h4,p,dl,dd,figure{margin:0}
h2{font-size:1.2rem;margin:0 0 14px;letter-spacing:-.005em}
section{margin-top:44px}
small{display:block;color:var(--soft);font-size:.84rem;font-weight:400;line-height:1.4}
header{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:28px 32px;--tone:var(--soft)}
header.lossless{--tone:var(--ok)}header.near-ties{--tone:var(--near)}header.bug{--tone:var(--bad)}
.over{color:var(--soft);font-size:.84rem;letter-spacing:.02em}
.verdict{display:flex;gap:22px;align-items:center;margin:14px 0 20px}
.verdict h1{font-size:2.5rem;line-height:1.1;letter-spacing:-.025em;color:var(--tone)}
.verdict p{margin-top:6px;font-size:1.08rem;line-height:1.45;overflow-wrap:anywhere}
.seal{flex:none;width:84px;height:84px}
.seal *{fill:none;stroke:var(--tone);stroke-width:2}
.seal .inner{stroke-width:1;stroke-dasharray:1.5 2.5}
.seal path{stroke-width:4.5;stroke-linecap:round;stroke-linejoin:round}
.chips{display:flex;flex-wrap:wrap;gap:4px 22px;overflow-wrap:anywhere}
.chips b{font-weight:400;color:var(--soft)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(122px,1fr));gap:16px 24px;margin-top:22px;
padding-top:20px;border-top:1px solid var(--line)}
.facts dd{font-size:1.45rem;font-weight:600;letter-spacing:-.015em;line-height:1.25}
.facts dt{color:var(--soft);font-size:.84rem;line-height:1.35}
.lead{max-width:76ch}
p.lead{margin-bottom:14px}
table{border-collapse:collapse;width:100%}
th{text-align:left;font-weight:600;vertical-align:top}td{vertical-align:top}
.layers th,.layers td{padding:12px 18px 12px 0;border-top:1px solid var(--line)}
.layers thead th{color:var(--soft);font-size:.84rem;font-weight:400;padding-top:0;border:0}
.layers tbody th{width:27%}.layers td:nth-child(2){width:17%}.layers td:last-child{padding-right:0}
.layers td{overflow-wrap:anywhere}.layers td:nth-child(3),.layers td:nth-child(2){overflow-wrap:normal}
.word{display:inline-block;white-space:nowrap;border-radius:6px;padding:1px 9px;font-size:.9rem;font-weight:600;
background:var(--greybg);color:var(--soft)}
.word.lossless{background:var(--okbg);color:var(--ok)}
.word.near-ties,.word.near-tie{background:var(--nearbg);color:var(--near)}
.word.bug{background:var(--badbg);color:var(--bad)}
figure,.parted{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:22px 24px;margin-top:16px}
figcaption{margin-bottom:14px;color:var(--soft)}figcaption b{display:block;color:var(--ink);font-size:1.05rem}
svg{display:block;overflow:visible;font-size:12px}
svg text{fill:var(--soft)}
svg .strong{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px}
svg .inside{fill:var(--card);font-weight:600}
.rows{table-layout:fixed}
.rows th,.rows td{padding:3px 0;font-size:.88rem;line-height:1.25;vertical-align:middle;
font-variant-numeric:tabular-nums}
.rows th{font-weight:400;padding-right:14px;overflow-wrap:anywhere}
.rows th:first-child{width:26%}.of3 th:last-child{width:27%}.of4 th:nth-child(n+3){width:14%}
.rows td:nth-child(2){position:relative;height:22px;padding:0}
.rows tbody td:nth-child(2) svg:first-child{position:absolute;inset:0;height:100%}
.rows :is(td,th):nth-child(n+3){padding-left:14px;padding-right:0}.of4 :is(td,th):nth-child(n+3){text-align:right}
.of4 td:nth-child(n+3){white-space:nowrap}
.rows thead th{color:var(--soft);font-size:.8rem;padding:0 14px 5px 0;vertical-align:bottom}
.grid{stroke:var(--grid)}.limit{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:5 4}
.at{overflow:visible}
.dot{fill:var(--bar);stroke:var(--card);stroke-width:1}.zero{fill:var(--card);stroke:var(--bar);stroke-width:2}
.beyond{fill:none;stroke:var(--bad);stroke-width:2.5}
.bar{fill:var(--bar)}.rest{fill:none;stroke:var(--edge);stroke-dasharray:3 3}
path.near-tie{fill:var(--near);stroke:var(--card);stroke-width:1.5}path.parts{fill:var(--ink);stroke:var(--card)}
path.bug{fill:none;stroke:var(--bad);stroke-width:3}
.expected{fill:var(--pale);stroke:var(--edge)}.observed{fill:var(--bar)}.whisker{stroke:var(--ink);stroke-width:1.3}
.trace{fill:none;stroke:var(--bar);stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.key,.more{color:var(--soft);font-size:.88rem;margin-top:10px;max-width:84ch}
.swatch{display:inline-block;width:18px;height:11px;margin-right:6px;border:1px solid var(--edge);
background:var(--pale)}
.swatch.observed{height:6px;border:0;background:var(--bar);vertical-align:2px}
.laws{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:24px 36px;margin-top:16px}
.laws+.plane,.more+.plane{margin-top:28px}
h4{font-size:.95rem;margin-bottom:6px;overflow-wrap:anywhere}
.laws tbody th{font:.82rem/1.25 ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace}
.laws .rows th:nth-child(n+3){width:20%}
.plane{display:grid;grid-template-columns:40px 1fr;column-gap:10px}
.axis{grid-column:1/-1;color:var(--soft);font-size:.84rem;margin-bottom:6px}
.axis.below{grid-column:2;text-align:center;margin:2px 0 0}
.parted h3{font-size:1.02rem;overflow-wrap:anywhere}.parted h3 small{margin-top:4px}
.parted h3 .word{margin-right:8px}
.parted p{margin:8px 0 10px;color:var(--soft);font-size:.92rem}
.parted th,.parted td{border-top:1px solid var(--line);padding:9px 18px 9px 0;font-size:.92rem}
.parted th{font-weight:400;color:var(--soft);white-space:nowrap;width:1%}
.parted td:nth-child(2){white-space:nowrap;width:1%;font-variant-numeric:tabular-nums}
code{font:.86rem/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
mark{background:none;color:inherit;font-weight:700;text-decoration:underline;text-decoration-thickness:2px;
text-underline-offset:3px;text-decoration-skip-ink:none}
ul{margin:0;padding-left:1.2em;max-width:76ch}li+li{margin-top:4px}
.about{display:grid;grid-template-columns:max-content 1fr;gap:4px 22px}
.about dt{color:var(--soft)}.about dd{overflow-wrap:anywhere}
footer{margin-top:44px;padding-top:16px;border-top:1px solid var(--line);color:var(--soft);font-size:.88rem}
@media (max-width:640px){main{padding:16px 14px 32px}header{padding:20px 18px}section{margin-top:34px}
.verdict{gap:16px;align-items:flex-start}.verdict h1{font-size:1.9rem}.verdict p{font-size:1rem}
.seal{width:52px;height:52px}
.layers thead{display:none}.layers tr{display:grid;grid-template-columns:1fr auto;gap:4px 14px;padding:14px 0;
border-top:1px solid var(--line)}
.layers tbody th,.layers td,.layers td:nth-child(2){width:auto;padding:0;border:0}
.layers tbody th,.layers td:last-child{grid-column:1/-1}
figure,.parted{padding:18px 16px}.rows th{padding-right:8px}
.rows :is(td,th):nth-child(n+3){padding-left:8px}.rows th:first-child{width:29%}.of4 th:nth-child(n+3){width:19%}
.rows thead th{font-size:.74rem}.rows thead th:nth-child(n+3){padding-left:2px}
svg .wide{display:none}
.parted tr{display:grid;grid-template-columns:1fr 1fr;border-top:1px solid var(--line);padding:9px 0;gap:4px 12px}
.parted th,.parted td,.parted td:nth-child(2){border:0;padding:0;width:auto}
.parted td:last-child{grid-column:1/-1}
.about{grid-template-columns:1fr}.about dd+dt{margin-top:8px}}
@media print{html{font-size:12px}body{background:none;font-size:12px}main{max-width:none;padding:0}
section{margin-top:28px}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}.seal{width:64px;height:64px}
.laws{grid-template-columns:1fr 1fr}
svg{font-size:10px}figure{-webkit-box-decoration-break:clone;box-decoration-break:clone}
header,figcaption,.parted,.layers tr,.rows tr,.plane,.laws>div{break-inside:avoid}h2,h3,figcaption{break-after:avoid}}
"""
