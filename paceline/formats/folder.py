"""A folder that is there with all that it holds, or not at all."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import BadRequest
from paceline.files import write_atomically

from .weights import KNOWN

_SHARD = re.compile(r"^(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)$")


@contextmanager
def new_folder(folder: Path, replace: bool) -> Iterator[Path]:
    """A folder to write to, which takes the place of `folder` when the block ends, unless it ends by an error.

    Raises:
        BadRequest: there is something at that place that may not be replaced, or that cannot be written.
    """
    _check_free(folder, replace)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # left by a process of that number that was killed
        scratch.mkdir(parents=True)
        yield scratch
        _swap(scratch, folder)
    except OSError as error:
        raise BadRequest(
            f"cannot write the head to {folder}: {error.strerror or error}; give another folder"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_free(folder: Path, replace: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise BadRequest(f"{folder} is a file; a head is written to a folder: give another name")
    there = sorted(file.name for file in folder.iterdir())
    if there and not replace:
        raise BadRequest(f"{folder} is not empty; give another folder, or replace=True if it holds an older head")
    strange = [name for name in there if name not in (*KNOWN, "config.json") and not _SHARD.match(name)]
    if strange:
        raise BadRequest(
            f"{folder} holds more than a head ({', '.join(strange[:4])}), which would be lost; give another folder"
        )


def _swap(scratch: Path, folder: Path) -> None:
    """Puts a folder in the place of another, which is kept until the new one is there."""
    if not folder.exists() or not any(folder.iterdir()):
        os.replace(scratch, folder)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    os.replace(folder, old)
    try:
        os.replace(scratch, folder)
    except OSError:
        os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_files(folder: Path, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Weights under a name, and config.json."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        plain[key] = tensor.clone() if place in seen else tensor  # the format holds each tensor for itself
        seen.add(place)
    try:
        save_file(plain, folder / name, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with (folder / name).open("rb") as file:
        os.fsync(file.fileno())
    write_atomically(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
