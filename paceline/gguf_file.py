"""Reads GGUF files: metadata, tensor table, dequantised values. A file that is cut short is found before it is used."""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CorruptWeights, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PIECE = 1 << 24
"""Values dequantised at a time: 64 MB in float32."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file: where it lies and how it is stored."""

    shape: tuple[int, ...]
    """Slowest dimension first, as in torch."""
    kind: int
    """ggml type id."""
    start: int
    """Byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Everything in a GGUF file but the weights."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's own prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def quantisation(self) -> str:
        """``Q4_K_M`` and the like, as the file calls its own mixture."""
        from gguf import LlamaFileType

        try:
            return (
                str(LlamaFileType(self.metadata["general.file_type"]).name).removeprefix("MOSTLY_").removeprefix("ALL_")
            )
        except (KeyError, ValueError):
            return "an unnamed quantisation"

    @property
    def bf16_bytes(self) -> int:
        return 2 * sum(math.prod(t.shape) for t in self.tensors.values())


class _Reader:
    """Little-endian values from a mapped file, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def values(self, code: str, count: int = 1) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return found

    def string(self) -> str:
        (length,) = self.values("Q")
        if length > len(self.data) - self.at:
            raise EOFError
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", errors="replace")

    def metadata(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.values(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"metadata type {kind}")
        inner, count = *self.values("I"), *self.values("Q")
        if count > len(self.data) - self.at:
            raise EOFError
        if inner in _SCALARS:
            return list(self.values(_SCALARS[inner], count))
        return [self.metadata(inner) for _ in range(count)]


def read_header(path: Path) -> Header:
    """Metadata and tensor table, checked against the file's size; `CorruptWeights` if the file is cut or no GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            size = len(data)
            metadata, tensors = _parse(_Reader(data))
    except (struct.error, EOFError, KeyError, ValueError, OverflowError, MemoryError) as error:
        why = str(error) or "it ends too early"
        raise CorruptWeights(f"{path} is not a readable GGUF file: {why}; fetch it again") from error
    for name, tensor in tensors.items():
        if tensor.start + tensor.nbytes > size:
            raise CorruptWeights(
                f"{path} is cut short: tensor {name} ends at byte {tensor.start + tensor.nbytes:,}, "
                f"the file has {size:,}; fetch it again"
            )
    return Header(path, metadata, tensors)


def _parse(reader: _Reader) -> tuple[dict[str, Any], dict[str, Tensor]]:
    magic, release = bytes(reader.values("B", 4)), *reader.values("I")
    if magic != b"GGUF":
        raise ValueError(f"it starts with {magic!r} instead of b'GGUF'")
    if release not in (2, 3):
        raise ValueError(f"GGUF version {release}, not 2 or 3")
    num_tensors, num_keys = reader.values("Q", 2)
    metadata = {}
    for _ in range(num_keys):
        key = reader.string()
        metadata[key] = reader.metadata(*reader.values("I"))
    table = {}
    for _ in range(num_tensors):
        name = reader.string()
        shape = tuple(reversed(reader.values("Q", *reader.values("I"))))
        kind, offset = *reader.values("I"), *reader.values("Q")
        table[name] = (shape, kind, offset)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    base = -(-reader.at // alignment) * alignment
    return metadata, {n: Tensor(s, kind, base + at, _nbytes(s, kind)) for n, (s, kind, at) in table.items()}


def _nbytes(shape: tuple[int, ...], kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return math.prod(shape) // block * block_bytes


def values(header: Header, name: str, heads: int | None = None) -> Iterator["np.ndarray[Any, Any]"]:
    """Float32 pieces of one tensor, in order; `NotImplementedError` for the few types that ``gguf`` cannot read.

    ``heads`` undoes llama.cpp's reordering of rotary rows.
    """
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = header.tensors[name]
    raw = np.memmap(header.path, np.uint8, "r", tensor.start, (tensor.nbytes,))
    rows = raw.reshape(tensor.shape[0] if len(tensor.shape) > 1 or heads else 1, -1)
    order = np.arange(len(rows))
    if heads:  # stored (heads, half, 2): each pair of a head side by side; transformers wants (heads, 2, half)
        order = order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    step = max(1, _PIECE * len(rows) // max(1, math.prod(tensor.shape)))
    for i in range(0, len(rows), step):
        yield dequantize(np.ascontiguousarray(rows[order[i : i + step]]), GGMLQuantizationType(tensor.kind))


def unsupported(header: Header, why: str) -> UnsupportedModel:
    """The refusal of a whole file that cannot become a model of ``transformers`` without a change of what it says."""
    return UnsupportedModel(
        f"{header.path.name} cannot be converted: {why}; use the model's original safetensors folder or hub id"
    )
