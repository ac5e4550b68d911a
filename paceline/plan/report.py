"""A plan to look at: the table and the curve in the terminal, and a picture of both."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.errors import BadRequest
from paceline.plan.record import Choice, Plan

SHOWN = 12
"""Choices in the table; the file has all of them."""
BAR = 24
WIDE = 100
"""Columns of a terminal from which bars have room."""
EIGHTHS = " ▏▎▍▌▋▊▉█"


def name(choice: Choice) -> str:
    """The method and what was set about it."""
    said = [f"{choice.num_draft_tokens} nodes"] if choice.num_draft_tokens else []
    if choice.num_speculative_tokens:
        said.append(f"depth {choice.num_speculative_tokens}")
    return choice.method + (f" ({', '.join(said)})" if said else "")


def table(plan: Plan, console: Console) -> RenderableType:
    """What a pass costs, what each choice is expected to bring, and which one to take."""
    parts: list[RenderableType] = [_costs(plan), Text()]
    shown = [i for i in range(len(plan.choices)) if i < SHOWN or i == plan.chosen or plan.choices[i].method == "none"]
    top = max(one.predicted_speedup for one in plan.choices)
    has_room = console.width >= WIDE
    grid = Table(box=None, pad_edge=False, padding=(0, 2 if has_room else 1, 0, 0))
    grid.add_column("choice", no_wrap=True)
    grid.add_column("nodes", justify="right", no_wrap=True)
    if has_depths := any(one.num_speculative_tokens for one in plan.choices):
        grid.add_column("depth", justify="right", no_wrap=True)
    is_verified = any(one.measured_speedup is not None for one in plan.choices)
    for title in ("speed-up", "95%", *(["measured"] if is_verified else []), "tokens/s", "per pass", "floor"):
        grid.add_column(title, justify="right", no_wrap=True)
    if has_room:
        grid.add_column("")
    for i in shown:
        one = plan.choices[i]
        low, high = one.predicted_ci95
        measured = [] if not is_verified else [_times(one.measured_speedup) if one.measured_speedup else ""]
        grid.add_row(
            one.method,
            str(one.num_draft_tokens),
            *([str(one.num_speculative_tokens or "")] if has_depths else []),
            _times(one.predicted_speedup),
            f"{low:.2f}-{high:.2f}",
            *measured,
            f"{one.tokens_per_second:.1f}",
            f"{one.tokens_per_pass:.2f}",
            f"{one.above_floor:.2f}x",
            *([bar(one.predicted_speedup / top)] if has_room else []),
            style="bold green" if i == plan.chosen else "",
        )
    parts += [grid, Text("floor: time over the least that its passes can take", style="dim")]
    if len(shown) < len(plan.choices):
        parts.append(Text(f"and {len(plan.choices) - len(shown)} slower ones", style="dim"))
    chosen = plan.choice
    word = "plain decoding" if chosen.method == "none" else name(chosen)
    parts += [Text(), Text.assemble(("take ", "bold"), (word, "bold green"), f": {plan.reason}")]
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Group(*parts)


def _costs(plan: Plan) -> RenderableType:
    """The curve at a few widths as figures and bars, and the floor."""
    base, top = plan.cost_curve[0][1], max(seconds for _, seconds in plan.cost_curve)
    points = plan.cost_curve
    steps = sorted(range(1, len(points)), key=lambda i: -points[i][1] / points[i - 1][1])[:3]
    shown = {i for i, (n, _) in enumerate(points) if n & (n - 1) == 0} | {i - 1 for i in steps} | set(steps)
    few = [points[i] for i in sorted(shown)]
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    grid.add_row("tokens", *(str(n) for n, _ in few), style="dim")
    grid.add_row("cost", *(f"{seconds / base:.2f}" for _, seconds in few))
    grid.add_row("", *("▁▂▃▄▅▆▇█"[min(7, int(8 * seconds / top))] for _, seconds in few), style="cyan")
    rows = f"{plan.rows} rows, " if plan.rows > 1 else ""
    return Group(
        Text(
            f"{plan.model}: a pass over one token{' of each row' if plan.rows > 1 else ''} takes "
            f"{1000 * base:.0f} ms ({rows}{plan.context} tokens of context); the least is "
            f"{1000 * plan.floor_seconds:.0f} ms, at {plan.bandwidth / 1e9:.1f} GB/s. In such passes, by tokens read:"
        ),
        grid,
    )


def bar(share: float) -> str:
    """A bar as long as a share of the room, to the eighth of a character."""
    eighths = round(8 * BAR * share)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _times(speedup: float) -> str:
    return f"{speedup:.2f}x"


def check_plot(path: Path) -> None:
    """Passes where a picture can be drawn and put.

    Raises:
        BadRequest: matplotlib is missing, there is no such folder, or the name does not end in .png.
    """
    if path.suffix != ".png":
        raise BadRequest(f"--plot {path}: a name that ends in .png is needed")
    if not path.absolute().parent.is_dir():
        raise BadRequest(f"--plot {path}: there is no folder {path.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadRequest("--plot needs matplotlib, which is not installed: pip install 'paceline[plots]'") from None


def plot(plan: Plan, path: Path) -> None:
    """The cost curve and the choices as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = plan.choices[:SHOWN]
    if plan.choice not in shown:
        shown = [*shown, plan.choice]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2), width_ratios=(1, 1.25), layout="constrained")
    _plot_curve(plan, left)
    _plot_choices(plan, shown, right)
    figure.suptitle(
        f"{plan.model}, temperature {plan.settings['temperature']:g}, "
        f"{plan.rows} row{'s' if plan.rows > 1 else ''}, {len(plan.settings['prompts'])} prompts",
        fontsize=12,
    )
    temporary = path.with_name(f".{path.name}.part")
    figure.savefig(temporary, format="png", dpi=130)
    plt.close(figure)
    temporary.replace(path)


def _plot_curve(plan: Plan, axes: Any) -> None:
    widths = [n for n, _ in plan.cost_curve]
    times = [1000 * seconds for _, seconds in plan.cost_curve]
    axes.plot(widths, times, "o-", color="#0b7a75", label="measured")
    axes.axhline(1000 * plan.floor_seconds, color="#b1443c", linestyle="--", label="least: weights read once")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := [2**k for k in range(int(math.log2(widths[-1])) + 1)], [str(t) for t in ticks])
    axes.set_ylim(0, 1.1 * max(times))
    axes.set_xlabel("tokens of a pass" + (" for each row" if plan.rows > 1 else ""))
    axes.set_ylabel("milliseconds")
    axes.set_title("what a pass costs", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    steps = [(b, high / low) for (a, low), (b, high) in pairwise(zip(widths, times, strict=True)) if b == a + 1]
    for width, ratio in steps:
        if ratio > 1.08:
            axes.annotate(f"{width}: x{ratio:.2f}", (width, times[widths.index(width)]), fontsize=8, va="bottom")


def _plot_choices(plan: Plan, shown: list[Choice], axes: Any) -> None:
    places = range(len(shown))
    speeds = [one.predicted_speedup for one in shown]
    errors = [
        [one.predicted_speedup - one.predicted_ci95[0] for one in shown],
        [one.predicted_ci95[1] - one.predicted_speedup for one in shown],
    ]
    colours = ["#0b7a75" if one is plan.choice else "#9db8b6" for one in shown]
    axes.barh(places, speeds, xerr=errors, color=colours, height=0.62, error_kw={"ecolor": "#555", "capsize": 2})
    measured = [(i, one.measured_speedup) for i, one in enumerate(shown) if one.measured_speedup is not None]
    if measured:
        axes.plot([speed for _, speed in measured], [i for i, _ in measured], "D", color="#e0a100", label="measured")
        axes.legend(frameon=False, loc="lower right")
    axes.set_yticks(places, [name(one) for one in shown])
    axes.invert_yaxis()
    axes.axvline(1.0, color="#555", linewidth=1)
    axes.set_xlabel("speed-up over plain decoding, the reading of the prompts included")
    axes.set_title("what each choice is expected to bring", fontsize=11)
    axes.grid(axis="x", alpha=0.25)
    for i, one in enumerate(shown):
        axes.text(0.02 * max(speeds), i, f"{one.predicted_speedup:.2f}x", va="center", color="white", fontsize=9)
