"""Weight files of a head: which ones a folder has, their tensors by name, and what no head's tensors may be."""

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import BadRequest, CorruptWeights, ModelNotFound, UnsupportedModel

KNOWN = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Names of weights in published folders; the first that is there is read: no pickle where there is a choice."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_TRAINERS = ("optimizer", "scheduler", "rng_state", "training_args", "scaler")
"""Beginnings of what trainers leave beside a checkpoint."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Needed = Mapping[str, tuple[tuple[int, ...], str]]
"""By name: the shape that a tensor must have, and what it is made of, in words."""


class Place(NamedTuple):
    """What there is of a head on disk."""

    weights: Path
    """A weight file, or the index of several."""
    config: Path | None
    unread: tuple[str, ...] = ()
    """Other weights in the folder."""


def find(path: Path) -> Place:
    """The weights and the config of a head's folder, or those beside a weight file."""
    if not path.exists():
        raise ModelNotFound(f"there is no head at {str(path)!r}: give a folder, or a file of weights")
    if path.is_dir():
        return _in_folder(path)
    if not path.name.endswith((*SUFFIXES, ".index.json")):
        raise BadRequest(
            f"{path} is no file of weights ({', '.join(SUFFIXES)}); give the head's folder, or such a file"
        )
    config = path.parent / "config.json"
    return Place(path, config if config.is_file() else None)


def _in_folder(folder: Path) -> Place:
    there = [name for name in KNOWN if (folder / name).is_file()]
    others = sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix in SUFFIXES and file.name[0] != "." and not file.name.startswith(_TRAINERS)
    )
    if not there and len(others) > 1:
        raise BadRequest(
            f"{folder} has several files of weights and no index of them ({', '.join(others)}): if they are parts of "
            "one head, fetch the folder again; if not, name the one to read"
        )
    if not there and not others:
        half = (folder / "config.json").is_file()
        hint = "; it has a config.json, so it was not written or fetched to the end" if half else ""
        raise ModelNotFound(f"{folder} is no head's folder: it has none of {', '.join(KNOWN)}{hint}")
    chosen = there[0] if there else others[0]
    config = folder / "config.json"
    base = chosen.startswith("medusa")  # what lies beside such a file is the target itself
    unread = () if base else tuple(name for name in there[1:] if not name.endswith(".json"))
    return Place(folder / chosen, config if config.is_file() else None, unread)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorruptWeights(f"{path} is missing; fetch the head again") from error
    except (ValueError, RecursionError) as error:
        raise CorruptWeights(f"{path} is no readable JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise CorruptWeights(f"{path} holds a {type(found).__name__} where an object was expected; fetch it again")
    return found


class Weights:
    """The tensors of a file, or of the files that an index lists; only those that are asked for are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pickled: dict[str, Tensor] = {}
        self._file: dict[str, Path] = {}
        listed = _index(path) if path.name.endswith(".index.json") else None
        files = [path] if listed is None else sorted({path.parent / file for file in listed.values()})
        for file in files:
            for name in self._open(file):
                if name in self._file:
                    raise CorruptWeights(f"{name} is both in {self._file[name]} and in {file}; fetch the head again")
                self._file[name] = file
        if listed is not None and (wrong := sorted(set(listed) ^ set(self._file))):
            raise CorruptWeights(
                f"{path} and the files that it lists do not hold the same tensors: {_some(wrong)}; fetch the head again"
            )

    @property
    def names(self) -> list[str]:
        return list(self._file)

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, every value of them finite."""
        wanted = list(names)
        found: dict[str, Tensor] = {}
        for file in sorted({self._file[name] for name in wanted}):
            own = [name for name in wanted if self._file[name] == file]
            stored = file.suffix == ".safetensors"
            found |= _read_safetensors(file, own) if stored else {name: self._pickled[name] for name in own}
        check_values(found, str(self.path))
        return {name: found[name] for name in wanted}

    def _open(self, file: Path) -> list[str]:
        if file.suffix == ".safetensors":
            return list(_safetensors_names(file))
        tensors = _read_pickle(file)
        self._pickled |= tensors
        return list(tensors)


def _index(path: Path) -> dict[str, str]:
    listed = read_json(path).get("weight_map")
    plain = isinstance(listed, dict) and all(
        isinstance(file, str) and Path(file).name == file and file.endswith(SUFFIXES) for file in listed.values()
    )
    if not isinstance(listed, dict) or not plain or not listed:
        raise CorruptWeights(f"{path} is no index: it needs a weight_map from tensors to files beside it")
    return listed


def _safetensors_names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except FileNotFoundError as error:
        raise CorruptWeights(f"{file} is missing; fetch the head again") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptWeights(f"{file} is cut short or damaged: {error}; fetch it again") from error


def _read_safetensors(file: Path, names: Sequence[str]) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CorruptWeights(f"{file} is cut short or damaged: {error}; fetch it again") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of what `torch.save` wrote; nothing else in it is ever made, so that it can run no code."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CorruptWeights(f"{file} is missing; fetch the head again") from error
    except pickle.UnpicklingError as error:
        raise CorruptWeights(
            f"{file} was not read: it is damaged, or holds more than tensors, which could run code ({_line(error)}); "
            "take the head's safetensors file, or a copy of it from who made it"
        ) from error
    except Exception as error:  # a damaged file may fail in any way
        raise CorruptWeights(f"{file} is cut short or damaged: {_line(error)}; fetch it again") from error
    if not isinstance(found, dict):
        raise CorruptWeights(f"{file} holds a {type(found).__name__}; a dictionary of tensors is needed")
    strange = [str(name) for name, value in found.items() if not isinstance(value, Tensor) or not isinstance(name, str)]
    if strange:
        raise CorruptWeights(f"{file} holds more than tensors: {_some(strange)}; a dictionary of tensors is needed")
    return found


def check_values(tensors: Mapping[str, Tensor], where: str) -> None:
    """Passes for plain tensors without NaN and infinity; whole numbers are for maps.

    Raises:
        UnsupportedModel: some are quantised, or sparse.
        CorruptWeights: a value is no number.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
            raise UnsupportedModel(f"{name} in {where} is {tensor.layout} of {tensor.dtype}; a plain tensor is needed")
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModel(
                f"{name} in {where} is stored as {_dtype(tensor)}: quantised heads cannot be read; take the original "
                "in bfloat16, float16 or float32"
            )
        if not all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor)):  # without a copy of the tensor
            count = int((~torch.isfinite(tensor)).sum())
            raise CorruptWeights(
                f"{name} in {where} has {count:,} of {tensor.numel():,} values that are NaN or infinite; the head is "
                "damaged, or its training failed: take another copy"
            )


def check_shapes(tensors: Mapping[str, Tensor], needed: Needed, where: str) -> None:
    """Passes where there are exactly the tensors that are needed, with their shapes and as numbers of the right sort.

    Raises:
        CorruptWeights: tells everything that is missing, too much or otherwise.
    """
    wrong = [f"{name} is missing" for name in needed if name not in tensors]
    wrong += [f"{name} has no place in such a head" for name in tensors if name not in needed]
    for name, (shape, words) in needed.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            wrong.append(f"{name} is {list(tensor.shape)}, and {words} is {list(shape)}")
        sort = "bool" if name == "t2d" else "whole" if name in ("d2t", "token_map") else "float"
        if sort != _sort(tensor):
            needs = {"bool": "bool", "whole": "int64 or int32", "float": "floating-point numbers"}[sort]
            wrong.append(f"{name} is {_dtype(tensor)}, and {needs} is needed")
    if wrong:
        raise CorruptWeights(
            f"the tensors in {where} are not those of a head with such settings: {'; '.join(wrong[:8])}"
            f"{f'; and {len(wrong) - 8} more' if len(wrong) > 8 else ''}. Fetch it again, or correct its config.json"
        )


def dtype_note(tensors: Mapping[str, Tensor]) -> list[str]:
    """A note where the weights are not all of one dtype."""
    names: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            names.setdefault(_dtype(tensor), []).append(name)
    if len(names) < 2:
        return []
    return ["its weights have several dtypes: " + "; ".join(f"{d} for {_some(n)}" for d, n in sorted(names.items()))]


def _sort(tensor: Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    if tensor.is_floating_point():
        return "float"
    return "whole" if tensor.dtype in (torch.int64, torch.int32) else "other"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _line(error: BaseException) -> str:
    """What an exception says, in one short line."""
    words = " ".join(str(error).split())
    return (words[:160] + "…" if len(words) > 160 else words) or type(error).__name__


def _some(names: Sequence[str], most: int = 4) -> str:
    """A few names of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
