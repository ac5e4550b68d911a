"""The cache on disk: where it is, one process at a time, room before work, and folders that are whole or absent."""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CorruptWeights, ModelNotFound, PacelineError
from .progress import human, note

if TYPE_CHECKING:
    import torch

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def home() -> Path:
    """``PACELINE_HOME``, else ``paceline`` in the user's cache folder."""
    if chosen := os.environ.get("PACELINE_HOME"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "paceline"


@contextmanager
def lock(name: str, progress: bool) -> Iterator[None]:
    """One process at a time fetches or converts one file; the others wait and then find it done."""
    from filelock import FileLock, Timeout

    (home() / "locks").mkdir(parents=True, exist_ok=True)
    held = FileLock(home() / "locks" / f"{name}.lock")
    try:
        held.acquire(timeout=0)
    except Timeout:
        note(f"waiting for another process that prepares {name}", progress)
        held.acquire()
    try:
        yield
    finally:
        held.release()


# -- room --------------------------------------------------------------------------------------------------------------


def need_space(folder: Path, needed: int, what: str) -> None:
    """Refuse to start what would not fit on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PacelineError(
            f"not enough disk space for {what}: {human(needed)} needed, {human(free)} free in {folder}; "
            "free some, or set PACELINE_HOME to a folder on another disk"
        )


@contextmanager
def disk_full_explained(folder: Path, what: str) -> Iterator[None]:
    """Turns a full disk into an error that says where and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise PacelineError(
            f"the disk became full while {what} in {folder}; free some space or set PACELINE_HOME to a folder on "
            "another disk, and run the same command again"
        ) from error


# -- hashes ------------------------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256_of(path: Path) -> str:
    """The file's sha256, computed once for its path, size and time of change."""
    stat = path.stat()
    key = [str(path), stat.st_size, stat.st_mtime_ns]
    record = home() / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(record.read_text())
        if known["key"] == key:
            return str(known["sha256"])
    digest = sha256_of(path)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(record, json.dumps({"key": key, "sha256": digest}))
    return digest


def write_whole(path: Path, text: str) -> None:
    """A small file that is there with all of its text or not at all."""
    new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    new.write_text(text)
    os.replace(new, path)


# -- checks that read no weights ---------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Refuse a folder without a model in it, and one whose weight files are missing or cut."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(f.name for f in folder.glob("*.gguf"))
        hint = f"; did you mean {folder / ggufs[0]}?" if ggufs else ""
        raise ModelNotFound(f"{folder} is no model folder: it has no config.json{hint}")
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptWeights(f"{index} is not a readable index ({error!r}); fetch the folder again") from error
    elif not (folder / names[0]).is_file():
        raise ModelNotFound(
            f"{folder} has no safetensors weights; load it with transformers and save it again, which writes them"
        )
    for name in names:
        _check_safetensors(folder / name)


def stored_dtype(folder: Path) -> "torch.dtype":
    """What most of the weights are stored in, for a config that does not say."""
    import torch

    names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    sizes = dict.fromkeys(names, 0)
    for path in folder.glob("*.safetensors"):
        for entry in _safetensors_header(path)[1].values():
            if entry["dtype"] in names:
                sizes[entry["dtype"]] += entry["data_offsets"][1] - entry["data_offsets"][0]
    return names[max(sizes, key=lambda name: sizes[name])]


def _safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the table of tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"its header should take {length:,} bytes, the file has {size:,}")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def _check_safetensors(path: Path) -> None:
    """The header must parse and promise exactly the bytes that are there."""
    try:
        size = path.stat().st_size
        begin, header = _safetensors_header(path)
        end = begin + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"its header promises {end:,} bytes, the file has {size:,}")
    except FileNotFoundError as error:
        raise CorruptWeights(f"{path} is missing; fetch the model folder again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptWeights(f"{path} is cut short or damaged: {error}; fetch it again") from error
