"""Files that are whole or not there."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write text as UTF-8 so that `path` holds either what it held before or all of it; nothing else is left behind."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
