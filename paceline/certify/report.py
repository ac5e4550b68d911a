"""A certificate for people: the table a terminal shows, and one HTML page that can be sent to anybody.

The page needs nothing but itself: its style and its plots are part of it, and it runs no script. Every string that
comes from outside, a model's text above all, passes through `printable` and is escaped by `el`, so it can neither steer
a terminal nor become markup.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.certify.certificate import Certificate, Layer, Parted, Strength, Verdict
from paceline.errors import BadRequest
from paceline.files import write_atomically

WORDS: dict[Verdict, str] = {
    "lossless": "lossless",
    "near_ties_only": "near-ties only",
    "bug": "bug",
    "skipped": "skipped",
}
STYLES = {"lossless": "green", "near-ties only": "yellow", "bug": "red", "near-tie": "yellow"}
HOW: dict[Strength, str] = {
    "proved": "every outcome enumerated",
    "equal": "ids compared one by one",
    "tested": "a statistical test",
    "measured": "a number reported, not a check",
}
WHAT = {
    "rule": "the rule that accepts or rejects guesses, on small models",
    "drafter": "this drafter's own guesses, put through that rule",
    "greedy": "texts at temperature 0, with and without speculation",
    "sampled": "texts drawn with the same seed, with and without speculation",
    "joint law": "how often each text of a few tokens comes up, against the model's own probabilities",
    "acceptance": "how many guesses the model accepted",
}
ALLOWED = 1e-12
"""Total variation up to which a law that was enumerated in float64 is equal."""
MOST_ROWS = 24
"""Rows of a plot; what does not fit is counted in its caption, and the worst always fits."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with what cannot be seen spelt as an escape: control and bidi characters, lone surrogates, newlines."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def number(value: Any) -> str:
    """A number as people write it, or ``-`` for none."""
    if real(value) is None:
        return "-"
    if isinstance(value, int) or (abs(value) >= 1e3 and float(value).is_integer()):
        return f"{int(value):,}"
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.4g}"


def real(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fits else None


def duration(seconds: float | int) -> str:
    """``42 s``, ``3 min 20 s`` or ``1 h 12 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def count(amount: int, word: str) -> str:
    """``1 text`` or ``2,000 texts``."""
    return f"{amount:,} {word}" if amount == 1 else f"{amount:,} {word}s"


def word_of(layer: Layer) -> str:
    """A layer's verdict in words; a number that only was reported has passed no check."""
    return "reported" if layer.strength == "measured" and layer.verdict == "lossless" else WORDS[layer.verdict]


def headline(certificate: Certificate) -> tuple[str, str]:
    """The verdict, and what it means in one sentence."""
    verdict, method, layers = certificate.verdict, certificate.method, certificate.layers
    skipped = [layer.name for layer in layers if layer.verdict == "skipped"]
    if verdict == "bug":
        failed = ", ".join(layer.name for layer in layers if layer.verdict == "bug")
        return "bug", f"speculation with {method} changes what {certificate.model} writes (failed: {failed})"
    if verdict == "near_ties_only":
        return "near-ties only", (
            f"with {method}, {certificate.model} writes other text only where two tokens are closer than its own "
            "rounding"
        )
    if not any(word_of(layer) == "lossless" for layer in layers):
        return "no verdict", f"nothing was checked for {method} on {certificate.model}"
    passed = f"every check that ran passed (skipped: {', '.join(skipped)})" if skipped else "every check passed"
    return "lossless", f"{passed}; speculation with {method} does not change what {certificate.model} writes"


def figures_in_short(certificate: Certificate) -> list[tuple[str, str]]:
    """The few numbers that sum it up, each with what it counts."""
    texts = [p for layer in certificate.layers for p in entries(layer.figures, "prompts")]
    tokens = sum(int(real(p.get("tokens")) or 0) for p in texts)
    contexts = [c for layer in certificate.layers for c in entries(layer.figures, "contexts")]
    draws = sum(int(real(c.get("n")) or 0) for c in contexts)
    found = [
        (number(tokens) if tokens else "-", f"tokens compared in {count(len(texts), 'text')}"),
        (number(draws) if draws else "-", "draws tested"),
        (number(certificate.near_ties_per_1000), "near-ties per 1,000 tokens"),
        (_places(certificate.mean_acceptance_length), "tokens per pass over the model"),
        (duration(certificate.seconds) if certificate.seconds else "-", "to check all this"),
    ]
    return [(value, name) for value, name in found if value != "-"]


def _places(value: Any) -> str:
    return "-" if real(value) is None else f"{value:.2f}"


def entries(figures: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects in a list of figures, or none."""
    found = figures.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list | tuple) else []


def parting(one: Parted) -> tuple[str, str]:
    """Near-tie or bug, and the reason in a sentence."""
    d = one.difference
    word = "near-tie" if d.near_tie else "bug"
    if d.expected < 0 or d.got < 0:
        return word, "one text ended where the other went on, which rounding cannot do"
    gap = number(abs(d.logit_expected - d.logit_got))
    if gap == "-":
        return (
            word,
            f"one of the logits is not a finite number; floor, what rounding moves a logit by: {number(d.floor)}",
        )
    return word, f"the logits are {gap} apart; floor, what rounding moves a logit by: {number(d.floor)}"


# The terminal


def table(certificate: Certificate, console: Console) -> RenderableType:
    """The verdict in plain words, a row for each layer, every place where texts part, the notes; fits 80 columns."""
    encoding = console.encoding

    def say(text: str, style: str = "") -> Text:
        shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        return Text(shown, style=style)

    word, sentence = headline(certificate)
    title = f"{certificate.model}, method {certificate.method}, rule {certificate.rule}, {certificate.mode} mode"
    blocks: list[RenderableType] = [
        say(word, f"bold {STYLES.get(word, '')}").append_text(say(f": {sentence}", "bold")),
        say(title, "bright_black"),
        "",
        _layer_rows(certificate.layers, say, wide=console.width >= 100),
    ]
    if certificate.parted:
        blocks += ["", say(f"where texts part ({len(certificate.parted)})", "bold")]
        blocks += [_parted_block(one, say) for one in certificate.parted]
    short = [f"{value} {name}" for value, name in figures_in_short(certificate)]
    ran_on = [f"{name}: {value}" for name, value in certificate.environment.items()]
    used = [f"{how}: {HOW[how]}" for how in HOW if any(layer.strength == how for layer in certificate.layers)]
    notes = [*certificate.notes, *(["; ".join(used)] if used else [])]
    notes += [*(["; ".join(short)] if short else []), *(["; ".join(ran_on)] if ran_on else [])]
    if notes:
        blocks += ["", *(say(note, "bright_black") for note in notes)]
    return Group(*blocks)


def _layer_rows(layers: Sequence[Layer], say: Callable[..., Text], wide: bool) -> Table:
    """One row per layer; where there is no room for its own column, what was checked stands above what was found."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=False)
    for title in ("layer", "how", "verdict"):
        grid.add_column(title, no_wrap=True)
    if wide:
        grid.add_column("what was checked", max_width=34)
    grid.add_column("what was found" if wide else "what was checked, what was found")
    for i, layer in enumerate(layers):
        what, word = WHAT.get(layer.name, ""), word_of(layer)
        cells = [say(layer.name, "bold"), say(layer.strength), say(word, STYLES.get(word, ""))]
        found = say(layer.detail)
        if wide:
            cells += [say(what, "bright_black"), found]
        else:
            cells.append(say(f"{what}:", "bright_black").append("\n").append_text(found) if what else found)
        grid.add_row(*cells)
        if i + 1 < len(layers):
            grid.add_row()
    return grid


def _parted_block(one: Parted, say: Callable[..., Text]) -> RenderableType:
    """Where one prompt's texts part, both tokens, and what each text goes on with."""
    d, (word, why) = one.difference, parting(one)
    head = say(word, f"bold {STYLES[word]}").append_text(
        say(f": {one.prompt}, temperature {one.temperature:g}, after {count(d.index, 'equal token')} (index {d.index})")
    )
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bright_black")
    grid.add_column("speculation", no_wrap=True)
    grid.add_column("token", justify="right", no_wrap=True)
    grid.add_column("logit", justify="right", no_wrap=True)
    grid.add_column("text from a little before")
    for side, token, logit, text in _sides(one):
        grid.add_row(say(side), say(token), say(logit), say(text))
    return Group("", head, Padding(Group(say(why), grid), (0, 0, 0, 2)))


def _sides(one: Parted) -> list[tuple[str, str, str, str]]:
    """Without and with speculation: name, token, logit, text."""
    d = one.difference
    rows = [("without", d.expected, d.logit_expected, one.expected), ("with", d.got, d.logit_got, one.got)]
    return [
        (side, "ended" if token < 0 else f"id {token}", "-" if real(logit) is None else f"{logit:.6g}", text)
        for side, token, logit, text in rows
    ]


# The page


class Html(str):
    """Markup that may stand on the page as it is; `el` escapes every other string."""


def el(tag: str, *inside: str, **attributes: object) -> Html:
    """An element; ``class_`` is spelt ``class`` and ``stroke_width`` ``stroke-width``."""
    spelt = "".join(f' {name.rstrip("_").replace("_", "-")}="{_escaped(str(v))}"' for name, v in attributes.items())
    return Html(f"<{tag}{spelt}>{join(inside)}</{tag}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other, those that are not markup escaped."""
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    return html.escape(printable(text, keep="\n\t"))


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
        for side, token, logit, text in _sides(one)
    ]
    place = f"temperature {one.temperature:g}, after {count(d.index, 'equal token')} (index {d.index})"
    return el(
        "article",
        el("h3", el("span", word, class_=f"word {word}"), " ", one.prompt, el("small", place)),
        el("p", f"{why[0].upper()}{why[1:]}."),
        el("table", el("tbody", *rows)),
        class_="parted",
    )


# Plots. An SVG as wide as its column places marks by percentages, so lines and letters keep their size on any screen.


def figure(layer: Layer, parted: Sequence[Parted] = ()) -> Html:
    """The plots of a layer's figures; empty where the figures are missing or not enough."""
    f = layer.figures
    plots: list[Html] = []
    if layer.name in ("rule", "drafter"):
        plots = [_dots(entries(f, "cases"))]
    elif layer.name in ("greedy", "sampled"):
        words = {one.prompt: parting(one)[0] for one in parted if (one.temperature < 1e-5) == (layer.name == "greedy")}
        plots = [_texts(entries(f, "prompts"), words), _gap(f)]
    elif layer.name == "joint law":
        plots = [_laws(entries(f, "contexts")), _evidence(f), _power(f)]
    elif layer.name == "acceptance":
        plots = [_positions(f)]
    drawn = [plot for plot in plots if plot]
    if not any("<svg" in plot for plot in drawn):
        return Html("")
    caption = el("figcaption", el("b", layer.name.capitalize()), WHAT.get(layer.name, ""))
    return el("figure", caption, *drawn)


CROSS, DIAMOND = "M-5-5L5 5M5-5L-5 5", "M0-7L7 0L0 7L-7 0Z"


def at(x: float | int, mark: Html) -> Html:
    """A mark of fixed size, drawn around its own origin, at a share of the width."""
    return el("svg", mark, x=pc(x), class_="at")


def svg(height: int, *inside: str, **attributes: object) -> Html:
    """A drawing as wide as the place it stands in."""
    return el("svg", *inside, width="100%", height=height, **attributes)


def pc(share: float | int) -> str:
    """A place along the width."""
    return f"{100 * share:.2f}%"


def power(exponent: int) -> str:
    """A power of ten as it is written."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def steps(top: float | int, most: int = 4) -> list[float]:
    """Round numbers from 0 to ``top``, which is above 0, no more than ``most`` steps apart."""
    rough = top / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * (1 - 1e-9))
    return [i * step for i in range(int(top / step * (1 + 1e-9)) + 1)]


Tick = tuple[float | int, str, bool]
"""A place along an axis, its name, and whether only wide screens have room for the name."""


def rows(
    titles: Sequence[str], body: Sequence[tuple[str, Html, list[str]]], axis: Sequence[Tick], limit: float | None = None
) -> Html:
    """A plot with a row for each thing: its name, its mark along a shared axis, and what there is to say in words.

    A mark's heights count from the middle of the row, which grows where a name takes several lines.
    """
    lines = [el("line", x1=pc(x), x2=pc(x), y1=0, y2="100%", class_="grid") for x, _, _ in axis]
    if limit is not None:
        lines.append(el("line", x1=pc(limit), x2=pc(limit), y1=0, y2="100%", class_="limit"))
    ticks = [
        el(
            "text",
            name,
            x=pc(x),
            y=13,
            text_anchor="start" if x < 0.02 else "middle",
            class_="wide" if wide else "tick",
        )
        for x, name, wide in axis
    ]
    filled = []
    for name, mark, said in body:
        drawing = svg(22, *lines, el("svg", mark, y="50%", class_="at"), aria_hidden="true")
        filled.append(el("tr", el("th", name, scope="row"), el("td", drawing), *(el("td", cell) for cell in said)))
    blank = [el("td")] * (len(titles) - 2)
    foot = el("tr", el("td"), el("td", svg(18, *ticks, aria_hidden="true")), *blank)
    head = el("tr", *(el("th", title, scope="col") for title in titles))
    return el("table", el("thead", head), el("tbody", *filled, foot), class_=f"rows of{len(titles)}")


def _more(hidden: int, word: str, why: str) -> Html:
    return el("p", f"{count(hidden, word)} more, {why}.", class_="more") if hidden > 0 else Html("")


def _dots(cases: list[dict[str, Any]]) -> Html:
    """Total variation of each case on a log axis, with the line up to which it is rounding."""
    known = [(case, tv) for case in cases if (tv := real(case.get("total_variation"))) is not None and tv >= 0]
    if not known:
        return Html("")
    logs = [math.log10(tv) for _, tv in known if tv > 0]
    low, high = math.floor(min([-17.0, *logs])), max(-10, math.ceil(max([-10.0, *logs])))

    def place(log: float | int) -> float:
        return 0.08 + 0.9 * (log - low) / (high - low)

    worst = sorted(range(len(known)), key=lambda i: -known[i][1])[:MOST_ROWS]
    both, body = any(real(case.get("accepted")) is not None for case, _ in known), []
    for case, tv in (known[i] for i in sorted(worst)):
        x = place(math.log10(tv)) if tv > 0 else 0.02
        dot = el("circle", r=4.5, class_="dot") if tv > 0 else el("circle", r=4, class_="zero")
        mark = el("path", d=CROSS, class_="beyond") if tv > ALLOWED else dot
        said = [number(tv), *([_places(case.get("accepted"))] if both else [])]
        body.append((str(case.get("name", "")), at(x, mark), said))
    axis: list[Tick] = [(0.02, "0", False)]
    apart = 4 if high - low > 10 else 2
    powers = [e for e in range(low + 1, high + 1) if (e + 12) % apart == 0]
    axis += [(place(e), power(e), e != -12 and (e != powers[-1] or e < -8)) for e in powers]
    titles = ["case", "total variation, log axis", "value", *(["accepted"] if both else [])]
    key = (
        "Total variation is the largest difference in probability that any set of outcomes has. Up to the dashed line, "
        f"{power(-12)}, it is the rounding of the arithmetic; a cross beyond it is a bug."
    )
    more = _more(len(known) - len(body), "case", "none further from 0 than these")
    return join([rows(titles, body, axis, place(-12)), el("p", key, class_="key"), more])


def _texts(prompts: list[dict[str, Any]], words: dict[str, str]) -> Html:
    """Tokens compared for each prompt, and where its texts part."""
    known = [(p, int(n)) for p in prompts if (n := real(p.get("tokens"))) is not None and n > 0]
    if not known:
        return Html("")
    parted = [i for i, (prompt, _) in enumerate(known) if prompt.get("parted")]
    whole = [i for i in range(len(known)) if i not in parted][: max(0, MOST_ROWS - len(parted))]
    shown = [known[i] for i in sorted(parted + whole)]
    ticks = steps(max(n for _, n in shown), 2)
    top = max(max(n for _, n in shown), ticks[-1]) / 0.97
    body = []
    for prompt, tokens in shown:
        name, equal = str(prompt.get("name", "")), real(prompt.get("equal_tokens"))
        same = tokens if equal is None or not prompt.get("parted") else max(0, min(int(equal), tokens))
        marks, said = [el("rect", x=0, y=-6, width=pc(same / top), height=12, class_="bar")], f"{tokens:,} equal"
        if prompt.get("parted"):
            word = words.get(name, "")
            mark = el("path", d=CROSS if word == "bug" else DIAMOND, class_=word or "parts")
            rest = {"x": pc(same / top), "y": -5.5, "width": pc((tokens - same) / top), "height": 11}
            marks += [el("rect", **rest, class_="rest"), at(same / top, mark)]
            said = f"parts after {same:,} of {tokens:,}{': ' + word if word else ''}"
        body.append((name, join(marks), [said]))
    axis: list[Tick] = [(tick / top, number(tick), False) for tick in ticks]
    key = [el("p", "A diamond or cross marks the place where a text parts; what follows it is outlined.", class_="key")]
    return join(
        [
            rows(("prompt", "tokens compared", "outcome"), body, axis),
            *(key if parted else []),
            _more(len(known) - len(shown), "prompt", "all equal to the end"),
        ]
    )


def _gap(figures: dict[str, Any]) -> Html:
    gap, size = real(figures.get("worst_gap")), real(figures.get("floor"))
    parts = [f"Worst gap between two tokens' logits: {number(gap)}."] if gap is not None else []
    if size is not None:
        parts.append(f"Floor, what the unmodified model's rounding moves a logit by: {number(size)}.")
    return el("p", " ".join(parts), class_="key") if parts else Html("")


def _laws(contexts: list[dict[str, Any]]) -> Html:
    """For each context, expected and observed share of every outcome."""
    known = [(p, card) for context in contexts if (card := _law(context)) for p in [real(context.get("p_value"))]]
    worst = sorted(range(len(known)), key=lambda i: 1.0 if (p := known[i][0]) is None else p)[:8]
    shown = [known[i][1] for i in sorted(worst)]
    if not shown:
        return Html("")
    key = el(
        "p",
        *(el("i", class_="swatch expected"), "expected: the model's own probability. "),
        *(el("i", class_="swatch observed"), "observed: share of the draws with speculation, "),
        "with its 95% interval. By chance alone, about one interval in twenty misses.",
        class_="key",
    )
    return join(
        [key, el("div", *shown, class_="laws"), _more(len(known) - len(shown), "context", "none with a smaller p")]
    )


def _law(context: dict[str, Any]) -> Html:
    outcomes = [
        (str(one.get("label", "")), max(0.0, expected), max(0.0, observed))
        for one in entries(context, "outcomes")
        if (expected := real(one.get("expected"))) is not None and (observed := real(one.get("observed"))) is not None
    ]
    if not outcomes:
        return Html("")
    n, p = real(context.get("n")), real(context.get("p_value"))
    shown = outcomes
    if len(outcomes) > 13:
        order = sorted(outcomes, key=lambda one: -one[1])
        rest = order[12:]
        shown = [*order[:12], (f"{len(rest)} others", sum(e for _, e, _ in rest), sum(o for _, _, o in rest))]
    reach = [(label, e, o, wilson(o, n) if n else (o, o)) for label, e, o in shown]
    ticks = steps(max([1e-9, *(max(e, high) for _, e, _, (_, high) in reach)]), 3)
    top = max([ticks[-1], *(max(e, high) for _, e, _, (_, high) in reach)]) / 0.97
    body = []
    for label, expected, observed, (low, high) in reach:
        a, b = pc(low / top), pc(high / top)
        marks = [
            el("rect", x=0, y=-7.5, width=pc(expected / top), height=15, class_="expected"),
            el("rect", x=0, y=-3, width=pc(observed / top), height=6, class_="observed"),
        ]
        if n:
            marks.append(el("line", x1=a, x2=b, y1=0, y2=0, class_="whisker"))
            marks += [el("line", x1=x, x2=x, y1=-4, y2=4, class_="whisker") for x in (a, b)]
        body.append((label, join(marks), [percent(expected), percent(observed)]))
    said = [f"{int(n):,} draws"] if n else []
    said += [f"p = {number(p)}"] if p is not None else []
    return el(
        "div",
        el("h4", str(context.get("name", "")), el("small", ", ".join(said))),
        rows(
            ("outcome", "share", "expected", "observed"),
            body,
            [(t / top, f"{100 * t:g}%", 0 < t < ticks[-1]) for t in ticks],
        ),
    )


def percent(share: float | int) -> str:
    """A share, with the digits it is worth."""
    return f"{share:.0%}" if share == 0 or share >= 0.9995 else f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def wilson(share: float | int, n: float | int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share of ``n`` draws by Wilson's formula, which holds near 0 and 1 too."""
    middle, spread = share + z * z / (2 * n), z * math.sqrt(max(0.0, share * (1 - share)) / n + z * z / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z * z / n)), min(1.0, (middle + spread) / (1 + z * z / n))


def plane(
    height: int,
    title: str,
    below: str,
    ticks: Sequence[tuple[float | int, str]],
    marks: Sequence[str],
    foot: Sequence[str],
) -> Html:
    """A plot with an upright axis; ``ticks`` are places from 0 at the bottom to 1 at the top."""

    def y(share: float | int) -> float:
        return round(8 + (height - 16) * (1.0 - share), 1)

    axis = [el("text", name, x="100%", y=y(share) + 4, text_anchor="end") for share, name in ticks]
    lines = [el("line", x1=0, x2="100%", y1=y(share), y2=y(share), class_="grid") for share, _ in ticks]
    return el(
        "div",
        el("p", title, class_="axis"),
        el("div", svg(height, *axis, aria_hidden="true"), class_="scale"),
        el("div", svg(height, *lines, *marks, role="img", aria_label=title), svg(16, *foot, aria_hidden="true")),
        el("p", below, class_="axis below"),
        class_="plane",
    )


def _evidence(figures: dict[str, Any]) -> Html:
    """The path of the e-process, and the line at which it would have shown a bug."""
    given = figures.get("log10_e")
    path = [float(x) for x in given if isinstance(x, int | float) and x == x] if isinstance(given, list | tuple) else []
    if not path:
        return Html("")
    alpha = real(figures.get("alpha"))
    line = -math.log10(alpha) if alpha and 0 < alpha < 1 else None
    finite = [x for x in path if math.isfinite(x)]
    top = max([1.0, *finite, *([line] if line else [])]) * 1.12
    low = min([0.0, *finite])
    height = 190

    def y(value: float) -> float:
        share = (min(max(value, low), top) - low) / (top - low)
        return round(8 + (height - 16) * (1.0 - share), 1)

    # At most about 600 points, each the highest of its stretch, so that no crossing of the line is lost.
    stride = -(-len(path) // 600)
    thinned = [max(path[i : i + stride]) for i in range(0, len(path), stride)]
    across = [1000 * i / max(1, len(thinned) - 1) for i in range(len(thinned))]
    points = " ".join(f"{x:.1f},{y(value)}" for x, value in zip(across, thinned))
    trace = el("polyline", points=points, class_="trace")
    marks = [
        el("svg", trace, viewBox=f"0 0 1000 {height}", preserveAspectRatio="none", width="100%", height=height),
        el("circle", cx="100%" if len(path) > 1 else 4, cy=y(path[-1]), r=4, class_="dot"),
    ]
    if line:
        label = f"1/α = {number(round(1 / alpha)) if alpha else ''}: from here on, a bug"
        marks += [
            el("line", x1=0, x2="100%", y1=y(line), y2=y(line), class_="limit"),
            el("text", label, x="100%", y=y(line) + 17, text_anchor="end", class_="strong"),
        ]
    step = max(1, round((top - low) / 4))
    whole = range(math.ceil(low / step) * step, math.floor(top) + 1, step)
    ticks = [((e - low) / (top - low), power(e) if e else "1") for e in whole]
    foot = [
        el("text", "first", x=0, y=12),
        el("text", f"last of {len(path):,}", x="100%", y=12, text_anchor="end"),
    ]
    title = "Evidence against equal laws (e-value, log axis)"
    return plane(height, title, "steps of the test", ticks, marks, foot)


def _power(figures: dict[str, Any]) -> Html:
    p, alpha, smallest = (real(figures.get(key)) for key in ("p_value", "alpha", "smallest_tv"))
    parts = [f"p-value of all contexts together: {number(p)}."] if p is not None else []
    if alpha is not None:
        parts.append(f"The test calls a bug where there is none with a probability of at most {number(alpha)}.")
    if smallest is not None:
        parts.append(f"A total variation of {number(smallest)} or more would have been seen.")
    return el("p", " ".join(parts), class_="key") if parts else Html("")


def _positions(figures: dict[str, Any]) -> Html:
    """Acceptance by position in the draft."""
    given = figures.get("by_position")
    shares = [real(x) or 0.0 for x in given] if isinstance(given, list | tuple) else []
    shares = [min(1.0, max(0.0, share)) for share in shares]
    if not shares:
        return Html("")
    height, marks, foot = 170, [], []
    wide = 1 / len(shares)
    for i, share in enumerate(shares):
        tall = (height - 16) * share
        x, middle = (i + 0.16) * wide, pc((i + 0.5) * wide)
        box = {"x": pc(x), "y": round(height - 8 - tall, 1), "width": pc(wide * 0.68), "height": round(tall, 1)}
        marks.append(el("rect", **box, class_="bar"))
        if len(shares) <= 8:
            # A number stands above its bar, or inside the top of one that leaves no room.
            inside = tall > height - 34
            kind = "inside" if inside else "strong"
            up = height - 8 - tall + (16 if inside else -5)
            marks.append(el("text", f"{share:.0%}", x=middle, y=round(up, 1), text_anchor="middle", class_=kind))
        if len(shares) <= 12 or i % 4 == 3 or i == 0:
            foot.append(el("text", str(i + 1), x=middle, y=12, text_anchor="middle"))
    ticks = [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    title = "Share of guesses accepted"
    accepted, drafted = real(figures.get("accepted")), real(figures.get("drafted"))
    mean = real(figures.get("mean_acceptance_length"))
    parts = [f"{int(accepted):,} of {int(drafted):,} guesses accepted."] if accepted is not None and drafted else []
    parts += [f"{mean:.2f} tokens per pass over the model; 1 would be no help."] if mean is not None else []
    said = el("p", " ".join(parts), class_="key") if parts else Html("")
    return join([plane(height, title, "position of the guess in its draft", ticks, marks, foot), said])


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
