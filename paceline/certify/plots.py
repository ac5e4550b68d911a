"""Plots of a certificate as inline SVG, as wide as their column: marks are placed by percentages, lines stay sharp."""

import math
from collections.abc import Sequence
from typing import Any

from paceline.certify.certificate import Layer, Parted
from paceline.certify.markup import Html, el, join
from paceline.certify.statistics import wilson
from paceline.certify.words import ALLOWED, MOST_ROWS, WHAT, count, entries, number, parting, places, real


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
        said = [number(tv), *([places(case.get("accepted"))] if both else [])]
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
    reach = [(label, e, o, wilson(round(o * n), int(n), 0.05) if n else (o, o)) for label, e, o in shown]
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
        parts.append(
            f"Each of the two tests calls a bug where there is none with a probability of at most {number(alpha)}."
        )
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
