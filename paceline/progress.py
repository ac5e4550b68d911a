"""Progress on standard error: a bar on a terminal, a few plain lines elsewhere, nothing when not asked for."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def human(num_bytes: int) -> str:
    """``1.1 GB``: decimal units, as download pages use them."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def note(text: str, progress: bool) -> None:
    """One line for the reader."""
    if progress:
        print(f"paceline: {text}", file=sys.stderr, flush=True)


@contextmanager
def meter(
    label: str, total: int, progress: bool, unit: str | None = None, late: bool = False
) -> Iterator[Callable[[int], None]]:
    """A function that takes how much is done so far and shows it with the time left: bytes, or the ``unit`` named.

    Args:
        late: it begins when something is done already, which took a time that nobody measured.
    """
    if not progress:
        yield lambda done: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        size = TextColumn(f"{{task.completed:.0f}} of {{task.total:.0f}} {unit}") if unit else DownloadColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), size, TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=min(done, total))
    else:
        yield _lines(label, total, unit, late)


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A function that takes (stage, steps done, steps in all) and shows a meter for each stage."""
    open_one: list[tuple[str, ExitStack, Callable[[int], None]]] = []

    def tick(stage: str, done: int, total: int) -> None:
        if open_one and open_one[0][0] != stage.split()[0]:
            open_one.pop()[1].close()
        if not open_one:
            stack = ExitStack()
            open_one.append((stage.split()[0], stack, stack.enter_context(meter(stage, total, True, "steps", True))))
        open_one[0][2](done)

    try:
        yield tick
    finally:
        if open_one:
            open_one.pop()[1].close()


def _lines(label: str, total: int, unit: str | None, late: bool) -> Callable[[int], None]:
    """A line at the start and at every quarter."""
    begun, shown = time.monotonic(), -1
    # What was there at the first tick, as of an earlier download, does not count towards the speed.
    first = 0 if unit and not late else -1

    def tick(done: int) -> None:
        nonlocal first, shown
        first = done if first < 0 else first
        quarter = 4 * min(done, total) // max(1, total)
        if quarter <= shown:
            return
        shown = quarter
        left = ""
        if first < done < total:
            left = f", about {(time.monotonic() - begun) * (total - done) / (done - first):.0f} s left"
        size = f"{min(done, total)} of {total} {unit}" if unit else f"{human(min(done, total))} of {human(total)}"
        note(f"{label}: {size}{left}", True)

    return tick


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; files may come and go meanwhile."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return size


@contextmanager
def watching(folder: Path, tick: Callable[[int], None]) -> Iterator[None]:
    """Reports the bytes below a folder twice a second, for downloaders that say nothing themselves."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.5):
            with suppress(OSError):
                tick(size_of(folder))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
