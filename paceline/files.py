"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, and read, which takes the place of `path` when the block ends, unless it ends by an error.

    So `path` holds either what it held before or all of it, and nothing else is left behind.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write text as UTF-8 so that `path` holds either what it held before or all of it; nothing else is left behind."""
    with whole(path) as file:
        file.write(text.encode())


def sweep(folder: Path, *names: str) -> None:
    """Take away what processes that were killed left half written of some files, named by patterns."""
    for name in names:
        for left in folder.glob(f".{name}.*"):
            number = left.suffix[1:]
            if number.isdigit() and left.is_file() and not _is_alive(int(number)):
                left.unlink(missing_ok=True)


def _is_alive(number: int) -> bool:
    """Whether a process of that number runs."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
