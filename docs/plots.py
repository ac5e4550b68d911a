"""Drawings of the theory pages: SVG inside the page, in the page's own text colour and font, so light and dark both do.

Labels are symbols and English words on every page: the page's caption says in its language what is to be seen.
"""

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt

INK = "#010203"
"""Stands for the text colour of the page, which is not known yet."""
TEAL, ORANGE, VIOLET, BLUE = "#0d9e8f", "#e8731a", "#9065d6", "#3f8ae0"
"""Legible on white and on the dark grey of the theme."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}


def plot(width: float = 6.6, height: float = 3.4) -> tuple[Any, Any]:
    """A figure and its axes in the pages' style; `svg` ends it."""
    with mpl.rc_context(STYLE):
        return plt.subplots(figsize=(width, height), layout="constrained")


def svg(figure: Any, caption: str) -> str:
    """The drawing as a figure of HTML with its caption, in one piece: Markdown lets it pass as it is."""
    held = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(held, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = held.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--md-text-font-family, sans-serif)", text)
    text = text.replace(INK, "currentColor")
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img" aria-label="@">', text, count=1)
    words = re.sub(r"[$*`\\{}]", "", caption)
    text = text.replace('aria-label="@"', f'aria-label="{escape(words)}"')
    text = re.sub(r"\s*\n\s*", " ", text.replace("xlink:href", "href")).strip()
    return f'<figure class="plot">{text}<figcaption>{caption}</figcaption></figure>'


def named_end(axes: Any, x: float, y: float, name: str, color: str, dx: float = 4, dy: float = 0) -> None:
    """A curve's name at its end, in its colour: no legend to look up."""
    axes.annotate(name, (x, y), (dx, dy), textcoords="offset points", color=color, va="center", annotation_clip=False)


# -- 1: bandwidth ------------------------------------------------------------------------------------------------------


def roofline(curves: Sequence[tuple[str, Any, float]], measured: Sequence[tuple[int, float]], caption: str) -> str:
    """Time of a pass over its number of tokens, in passes over one token."""
    figure, axes = plot()
    tokens = np.geomspace(1, 1024, 200)
    for (name, seconds, ridge), color in zip(curves, (TEAL, VIOLET), strict=True):
        times = np.array([seconds(n) for n in tokens]) / seconds(1)
        axes.plot(tokens, times, color=color)
        axes.plot([ridge], [1.0], "o", color=color, ms=6)
        named_end(axes, tokens[-1], times[-1], name, color)
        axes.annotate(f"{ridge:.0f}", (ridge, 1.0), (0, -13), textcoords="offset points", color=color, ha="center")
    if measured:
        axes.plot(*zip(*measured, strict=True), "D", color=ORANGE, ms=5)
        highest = max(measured, key=lambda point: point[1])
        named_end(axes, highest[0], highest[1], "measured, 2 CPU cores", ORANGE, dx=-6, dy=12)
        axes.texts[-1].set_ha("right")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([2**i for i in range(11)], [str(2**i) for i in range(11)])
    axes.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_ylim(0.7, 40)
    axes.set(xlabel="n, tokens read by one pass", ylabel="t(n) / t(1)")
    return svg(figure, caption)


def keys_and_values(held: Any, read: Any, caption: str) -> str:
    """What is held, and what has been read in all, over the length of the text."""
    figure, axes = plot(height=3.1)
    tokens = np.geomspace(128, 131_072, 60)
    for name, f, color in (("held", held, TEAL), ("read in all", read, ORANGE)):
        axes.plot(tokens, [f(t) / 1e9 for t in tokens], color=color)
        named_end(axes, tokens[-1], f(tokens[-1]) / 1e9, name, color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2**i for i in range(7, 18, 2)], [f"{2**i:,}" for i in range(7, 18, 2)])
    axes.set_yticks([10**i for i in (-1, 1, 3, 5, 7)], ["0.1", "10", "1,000", "100,000", "10 million"])
    axes.set(xlabel="T, tokens of the text", ylabel="GB")
    return svg(figure, caption)


# -- 2, 3: speed-up ----------------------------------------------------------------------------------------------------


def speedups(
    theirs: Any, right: Any, steps: Any, played: Sequence[tuple[int, float]], limit: float, caption: str
) -> str:
    """The article's formula, the right one, the same with measured passes, and what was played through."""
    figure, axes = plot(height=3.7)
    lengths = np.arange(0, 21)
    for name, f, color in (
        ("article", theirs, ORANGE),
        ("right", right, TEAL),
        ("right, passes\nas measured", steps, VIOLET),
    ):
        axes.plot(lengths, [f(int(k)) for k in lengths], color=color)
        named_end(axes, 20, f(20), name, color, dy=8 if name == "right" else -14 if "passes" in name else 0)
    axes.plot(*zip(*played, strict=True), "o", color=TEAL, ms=5, mfc="none")
    axes.axhline(limit, color=ORANGE, lw=1, ls=":")
    axes.annotate("article's limit α/c", (0, limit), (3, -9), textcoords="offset points", color=ORANGE)
    axes.axhline(1, color=INK, lw=0.8, ls=":")
    axes.set_xticks(range(0, 21, 2))
    axes.set_ylim(0, limit + 0.4)
    axes.set(xlabel="K, drafted tokens", ylabel="speed-up")
    return svg(figure, caption)


def best_lengths(curves: Sequence[tuple[float, Sequence[tuple[float, int]]]], root: Any, caption: str) -> str:
    """The best K over alpha, for several costs, and the root."""
    figure, axes = plot(height=3.7)
    for (c, points), color in zip(curves, (ORANGE, TEAL, VIOLET), strict=True):
        alphas = [a for a, _ in points]
        axes.step(alphas, [k for _, k in points], color=color, where="mid")
        axes.plot(alphas, [root(a, c) for a in alphas], color=color, lw=1.2, ls="--")
        named_end(axes, alphas[-1], points[-1][1], f"c = {c:g}", color)
        if color == ORANGE:
            named_end(axes, alphas[-1], root(alphas[-1], c), "√(α/c)", color)
    axes.set(xlabel="α", ylabel="K")
    axes.set_ylim(0, None)
    return svg(figure, caption)


# -- 4: laws -----------------------------------------------------------------------------------------------------------


def coupled(pairs: Any, bound: Any, caption: str) -> str:
    """How often the coupled rule keeps a guess, over the distance of the laws."""
    figure, axes = plot(height=3.6)
    axes.plot(pairs[:, 0], pairs[:, 1], "o", color=VIOLET, ms=2.8, alpha=0.75, mew=0)
    tv = np.linspace(0, 1, 60)
    axes.plot(tv, 1 - tv, color=TEAL)
    axes.plot(tv, bound(tv), color=ORANGE)
    axes.annotate("standard rule: 1 − TV", (0.42, 0.58), (8, 6), textcoords="offset points", color=TEAL)
    low = float(bound(0.3))
    axes.annotate(
        "(1 − TV)/(1 + TV)", (0.3, low), (-8, -8), textcoords="offset points", color=ORANGE, ha="right", va="top"
    )
    axes.set(xlabel="TV(p, q)", ylabel="share of guesses kept", xlim=(0, 1), ylim=(0, 1))
    return svg(figure, caption)


# -- 6: draft size -----------------------------------------------------------------------------------------------------


def costs_and_rates(curves: Sequence[tuple[float, Sequence[tuple[float, float]]]], caption: str) -> str:
    """Speed-up at the best K over the cost of a draft step, for several alphas."""
    figure, axes = plot()
    for (alpha, points), color in zip(curves, (BLUE, VIOLET, TEAL, ORANGE), strict=True):
        axes.plot(*zip(*points, strict=True), color=color)
        named_end(axes, points[0][0], points[0][1], f"α = {alpha:g}", color, dx=-4)
        axes.texts[-1].set_ha("right")
    axes.set_xscale("log")
    axes.set_xlim(0.0035, 1.05)
    axes.set_xticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"])
    axes.minorticks_off()
    axes.set(xlabel="c, a draft step in passes of the target", ylabel="speed-up at the best K")
    return svg(figure, caption)


def truncated(points: Sequence[dict[str, Any]], caption: str) -> str:
    """Acceptance and cost over the number of layers that draft."""
    figure, axes = plot(height=3.1)
    layers = [point["layers"] for point in points]
    for name, key, color in (("1 − TV", "acceptance", TEAL), ("c", "c", ORANGE)):
        values = [point[key] for point in points]
        axes.plot(layers, values, "o-", color=color, ms=4)
        named_end(axes, layers[-1], values[-1], name, color, dx=7)
    axes.set_xticks(layers)
    axes.set_ylim(0, 1)
    axes.set(xlabel="layers that draft")
    return svg(figure, caption)


def features(found: dict[str, Any], caption: str) -> str:
    """What is left of 1 - TV when states are moved, and what others have in common with them."""
    figure, axes = plot(height=3.2)
    at = [row["error"] for row in found["errors"]]
    for name, key, color, named in (
        ("random direction", "kept_random", TEAL, -1),
        ("towards another", "kept_towards", ORANGE, 6),
    ):
        values = [row[key] for row in found["errors"]]
        axes.plot(at, values, "o-", color=color, ms=4)
        named_end(axes, at[named], values[named], name, color, dx=9)
    near = found["nearest"]
    axes.plot(near["distance"], near["kept"], "D", color=BLUE, ms=6)
    named_end(axes, near["distance"], near["kept"], "nearest other", BLUE, dx=9)
    pairs = [(row["distance"], row["kept"]) for row in found["pairs"]]
    axes.plot(*zip(*pairs, strict=True), "s", color=VIOLET, ms=4)
    named_end(axes, *pairs[4], "pairs", VIOLET, dx=0, dy=10)
    axes.set_ylim(0, 1)
    axes.set(xlabel="distance, in lengths of a state", ylabel="1 − TV")
    return svg(figure, caption)
