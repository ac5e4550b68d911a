"""A result for people: the table of one run, the comparison of two, and the progress line while one is measured."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from paceline.bench.measure import BASELINE
from paceline.bench.records import differences
from paceline.bench.summary import interval, ratio_of_means
from paceline.errors import BadRequest

TIMES = ("prefill", "draft", "target", "verify", "other")
FREE = ("methods", "peers")
"""Settings in which two results may differ: only contenders that both have are compared."""


def table(result: dict[str, Any]) -> RenderableType:
    """Speeds of all contenders, where our methods' time went, and what one must know to trust it; fits 80 columns."""
    speeds = columns("tokens/s", "speed-up", "95%", "per pass", "same text")
    for run in result["runs"]:
        speeds.add_row(*_speed_row(run))
    shares = columns("passes", "GB/s", *TIMES, "outside")
    for run in (run for run in result["runs"] if run["time_share"]):
        shares.add_row(*_share_row(run))
    notes = Text("\n".join(footnotes(result)), style="bright_black")
    return Group(Text(title_of(result), style="bold"), "", speeds, "", shares, "", notes)


def columns(*titles: str) -> Table:
    """A table of methods with figures to their right."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("method", no_wrap=True)
    for title in titles:
        grid.add_column(title, justify="right", no_wrap=True)
    return grid


def title_of(result: dict[str, Any]) -> str:
    """What was run, in one line."""
    s = result["settings"]
    sampling = "greedy" if s["temperature"] < 1e-5 else f"temperature {s['temperature']:g}"
    prompts, repeats = _count(len(s["prompts"]), "prompt"), _count(s["repeats"], "repeat")
    return f"{s['model']} on {s['set']}: {prompts}, {repeats}, {s['max_tokens']} tokens, {sampling}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _speed_row(run: dict[str, Any]) -> list[RenderableType]:
    baseline, ci = run["method"] == BASELINE, run["speedup_ci95"]
    speedup = Text(_number(run["speedup"], "{:.2f}x"), style="yellow" if run["within_drift"] else "bold")
    return [
        run["method"],
        f"{run['tokens_per_second']:.2f}",
        "" if baseline else speedup.append("?") if run["within_drift"] else speedup,
        "" if baseline else _interval(ci),
        _number(run["mean_acceptance_length"], "{:.2f}"),
        "" if baseline else _same(run),
    ]


def _share_row(run: dict[str, Any]) -> list[RenderableType]:
    return [
        run["method"],
        str(run["target_passes"]),
        _number(run["gigabytes_per_second"], "{:.1f}"),
        *(f"{run['time_share'][name]:.1%}" for name in TIMES),
        _number(run["share_outside_forwards"], "{:.1%}"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _same(run: dict[str, Any]) -> Text:
    if run["outputs_identical"] is None:
        return Text("-", style="bright_black")
    if run["outputs_identical"]:
        return Text("yes", style="green")
    return Text(f"{run['num_different']} differ", style="yellow" if run["note"] else "red")


def footnotes(result: dict[str, Any]) -> list[str]:
    """Drift, flags, where texts part, what the peers are, and the machine."""
    env, spread, runs = result["environment"], result["drift"]["spread"], result["runs"]
    lines = [
        "speed-up: mean tokens/s over that of 'none', 95% interval over prompts",
        "per pass: tokens per target pass; outside: neither prompt nor target pass",
    ]
    if spread is None:
        lines.append("drift of 'none': not measured, it takes two repeats")
    else:
        lines.append(f"drift of 'none' between repeats: {spread:.2f}x from slowest to fastest")
    flagged = [run["method"] for run in runs if run["within_drift"]]
    if flagged:
        lines.append(f"?  {', '.join(flagged)}: no further from 1 than that drift, so not a finding")
    for run in runs:
        if run["first_differences"]:
            prompt, at = min(run["first_differences"].items(), key=lambda item: int(item[1]))
            why = f"; {run['note']}" if run["note"] else ""
            lines.append(f"{run['method']} parts from 'none' at token {at} of {prompt}{why}")
        if run["repeatable"] is False:
            lines.append(f"{run['method']} did not repeat its own text")
    lines.append(f"machine: {env.get('gpu') or env.get('cpu')}, {env.get('threads')} threads")
    lines.append(f"forward: {env.get('kernel')}")
    if env.get("model_source"):
        lines.append(f"weights: {env['model_source']}")
    return lines


def compare(a: dict[str, Any], b: dict[str, Any], force: bool = False) -> RenderableType:
    """B against A for every contender both have: tokens/s, and speed-ups, in which the machine's drift cancels.

    Raises BadRequest when the settings differ, naming what does, unless ``force``.
    """
    changed = changed_settings(a, b)
    if changed and not force:
        raise BadRequest(f"the settings differ: {'; '.join(changed)}. Measure with the same ones, or give --force")
    paired = a["settings"]["prompts"] == b["settings"]["prompts"]
    speeds, ups = columns("A", "B", "B/A", "95%"), columns("A", "B", "B/A", "95%")
    for row in compared(a, b, paired):
        for grid, key, form in ((speeds, "tokens_per_second", "{:.2f}"), (ups, "speedup", "{:.2f}x")):
            if grid is speeds or row["method"] != BASELINE:
                sides = (_number(row[side][key], form) for side in ("a", "b"))
                grid.add_row(row["method"], *sides, _number(row[key], "{:.2f}"), _interval(row[f"{key}_ci95"]))
    notes = [f"settings differ: {text}" for text in changed]
    notes += [f"environment: {text}" for text in differences(a["environment"], b["environment"]) if "date" not in text]
    notes += [f"only in A: {name}" for name in alone(a, b)] + [f"only in B: {name}" for name in alone(b, a)]
    if not paired:
        notes.append("no intervals: the prompts are not the same")
    titles = [Text(title, style="bold") for title in ("tokens/s", "speed-up over 'none', in which drift cancels")]
    return Group(titles[0], speeds, "", titles[1], ups, "", Text("\n".join(notes), style="bright_black"))


def alone(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The contenders of ``a`` that ``b`` has not."""
    known = {run["method"] for run in b["runs"]}
    return [run["method"] for run in a["runs"] if run["method"] not in known]


def _interval(ci: list[float] | None) -> str:
    return f"{ci[0]:.2f} to {ci[1]:.2f}" if ci else "-"


def changed_settings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The settings that keep two results from being compared; a method's options count where both have the method."""
    one, two = a["settings"], b["settings"]
    common = one["methods"].keys() & two["methods"].keys()

    def kept(settings: dict[str, Any]) -> dict[str, Any]:
        shared = {k: v for k, v in settings.items() if k not in FREE}
        return shared | {"methods": {name: settings["methods"][name] for name in common}}

    return differences(kept(one), kept(two))


def compared(a: dict[str, Any], b: dict[str, Any], paired: bool) -> Iterator[dict[str, Any]]:
    """For each contender of both: ratio of tokens/s and of speed-ups, with intervals over the prompts they share."""

    def speeds(result: dict[str, Any]) -> dict[str, list[float]]:
        return {run["method"]: run["tokens_per_second_by_prompt"] for run in result["runs"]}

    ours, theirs = speeds(a), speeds(b)
    for run in a["runs"]:
        name = run["method"]
        if name not in theirs:
            continue
        over, under = [theirs[name]], [ours[name]]
        wide_over, wide_under = [*over, ours[BASELINE]], [*under, theirs[BASELINE]]
        yield {
            "method": name,
            "a": run,
            "b": next(other for other in b["runs"] if other["method"] == name),
            "tokens_per_second": ratio_of_means(over, under),
            "tokens_per_second_ci95": interval(over, under) if paired else None,
            "speedup": ratio_of_means(wide_over, wide_under),
            "speedup_ci95": interval(wide_over, wide_under) if paired else None,
        }


def read(path: Path) -> dict[str, Any]:
    """A result file of ``bench --json``."""
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except json.JSONDecodeError:
        result = None
    if not isinstance(result, dict) or not {"environment", "settings", "runs"} <= result.keys():
        raise BadRequest(f"{path} is no bench result; make one with: paceline bench MODEL --json {path.name}")
    return result


@contextmanager
def progress(console: Console) -> Iterator[Callable[[int, int, float | None], None]]:
    """A progress line with the time left; where the output is no terminal, a plain line at every tenth."""
    if not console.is_terminal:
        yield plain_progress(console)
        return
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, left="warming up")

        def tick(done: int, total: int, left: float | None) -> None:
            bar.update(task, completed=done, total=total, left=duration(left))

        yield tick


def plain_progress(console: Console) -> Callable[[int, int, float | None], None]:
    """Print a line whenever another tenth of the requests is done."""
    printed = [0]

    def tick(done: int, total: int, left: float | None) -> None:
        if done * 10 // total > printed[0]:
            printed[0] = done * 10 // total
            console.print(f"{done}/{total} requests, {duration(left)}", highlight=False)

    return tick


def duration(seconds: float | None) -> str:
    """``about 3 min left``, in the unit that suits."""
    if seconds is None:
        return "time left unknown yet"
    if seconds < 90:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"
