"""The compiled kernel: built once with the machine's C compiler, kept in the cache folder, optional.

It links against the OpenMP runtime that the framework brings, so both share one pool of threads; two pools on the
same cores would wait for each other in every layer.
"""

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int16, Int32, Int64
from torch import Tensor

FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vnni", "-mf16c", "-mfma"),
    *("-mamx-tile", "-mamx-bf16"),
)
NEEDED = {"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni", "f16c", "fma"}
SOURCES = ("tiles.h", "tiles.c", "draft.c")

ROWS = 16
"""Query rows of a tile."""
KEYS = 64
"""Keys that attention reads at a time: caches show a multiple of this many."""


class _Attention(ctypes.Structure):
    """The C structure `attention`, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "y")),
        *((name, ctypes.c_long) for name in ("q_batch", "q_head", "q_token", "kv_batch", "kv_head")),
        *((name, ctypes.c_long) for name in ("batch", "kv_heads", "group", "tokens", "dim", "keys", "open")),
        *((name, ctypes.c_void_p) for name in ("strays", "tokens_of", "order")),
        ("span", ctypes.c_long),
        ("scale", ctypes.c_float),
    )


class Strays(NamedTuple):
    """Tokens whose keys are put in order before they are summed, see `tiles.h`."""

    starts: Int32[Tensor, "rows"]
    """[B + 1]: where each row's strays begin."""
    tokens: Int32[Tensor, "M"]
    order: Int32[Tensor, "M span"]
    """The slots that stand for the keys from the staged ones' block on; -1 for those that are not seen."""


class Tiles(NamedTuple):
    """The compiled kernel's functions, or why there are none."""

    functions: Any
    why: str = ""

    def linear(
        self, x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None
    ) -> Float[Tensor, "rows out"]:
        """x·Wᵀ + bias for any number of rows; `fits` must hold for the weight, x be contiguous."""
        y = x.new_empty(x.shape[0], weight.shape[0])
        where = None if bias is None else bias.data_ptr()
        pointers = (weight.data_ptr(), where, x.data_ptr(), y.data_ptr())
        if self.functions.paceline_linear(*pointers, *weight.shape, x.shape[0]):
            raise MemoryError(f"no memory to pack {x.shape[0]} rows of {weight.shape[1]} numbers")
        return y

    def attention(
        self,
        query: Float[Tensor, "B heads N head_dim"],
        key: Float[Tensor, "B kv_heads S head_dim"],
        value: Float[Tensor, "B kv_heads S head_dim"],
        bits: Int16[Tensor, "B 1 row_tiles masked"],
        scale: float,
        strays: Strays | None = None,
    ) -> Float[Tensor, "B N heads head_dim"]:
        """softmax(scale · QKᵀ)·V where `bits`, made by `row_bits`, says what each row sees of the last `masked` keys.

        All rows see the keys before those. Keys and values are cache buffers: rows of head_dim, S a multiple of 64.
        """
        batch, heads, tokens, dim = query.shape
        kv_heads, keys = key.shape[1], key.shape[2]
        query = query if query.stride(3) == 1 else query.contiguous()
        y = query.new_empty(batch, tokens, heads, dim)
        pointers = (t.data_ptr() for t in (query, key, value, bits, y))
        strides = (query.stride(0), query.stride(1), query.stride(2), key.stride(0), key.stride(1))
        sizes = (batch, kv_heads, heads // kv_heads, tokens, dim, keys, keys - bits.shape[3])
        apart = (0, 0, 0, 0) if strays is None else (*(t.data_ptr() for t in strays), strays.order.shape[1])
        if self.functions.paceline_attention(
            ctypes.byref(_Attention(*pointers, *strides, *sizes, *apart, scale * math.log2(math.e)))
        ):
            raise MemoryError(f"no memory to attend with {heads} heads of {dim} numbers")
        return y

    def draft(self, task: ctypes.Structure) -> None:
        """One pass of a small model with weights in few bits: `draft_pass` of draft.c."""
        if self.functions.paceline_draft(ctypes.byref(task)):
            raise MemoryError("no memory for a pass of the draft model")

    def pack_few(self, weight: Tensor, where: int, bits: int) -> int:
        """Write a contiguous bf16 weight [out, in] in few bits to an address; returns how many groups cannot be."""
        return int(self.functions.paceline_draft_pack(weight.data_ptr(), where, *weight.shape, bits))


def row_bits(seen: Bool[Tensor, "B N S"], group: int, open_keys: int) -> Int16[Tensor, "B 1 row_tiles masked"]:
    """What `Tiles.attention` wants to know of a mask: 16 rows to a word, rows being tokens x group members."""
    rows = seen[:, :, open_keys:].repeat_interleave(group, 1)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % ROWS))
    words = rows.view(rows.shape[0], -1, ROWS, rows.shape[2]).to(torch.int32)
    shifts = torch.arange(ROWS, dtype=torch.int32)[:, None]
    return (words << shifts).sum(2).to(torch.int16)[:, None].contiguous()


def take_strays(
    seen: Bool[Tensor, "B N S"], lengths: Sequence[int], offsets: Int64[Tensor, "B staged"]
) -> Strays | None:
    """Find the tokens that see staged keys elsewhere than where plain decoding has them, and end their rows of `seen`.

    Args:
        seen: which slots each token sees; from a stray's block of staged keys on it is made blank.
        lengths: committed tokens of each row.
        offsets: position of each staged slot behind the committed ones; the last N are this pass's.
    """
    staged = offsets.shape[1]
    own = torch.arange(staged)
    starts, tokens, orders = [0], [], []
    for row, length in enumerate(lengths):
        tail = seen[row, :, length : length + staged]
        astray = (tail & (offsets[row] != own)).any(1) & (tail.sum(1) > 1)  # padding sees itself alone
        for token in astray.nonzero()[:, 0].tolist():
            slots = tail[token].nonzero()[:, 0]
            places = offsets[row, slots]
            if len(set(places.tolist())) < len(places) or int(places.min()) < 0:
                continue  # no path: two of its keys stand at one position
            begin = length // KEYS * KEYS
            order = torch.full((-(-(length - begin + int(places.max()) + 1) // KEYS) * KEYS,), -1, dtype=torch.int32)
            before = seen[row, token, begin:length].nonzero()[:, 0]
            order[before] = (before + begin).to(torch.int32)
            order[length - begin + places] = (slots + length).to(torch.int32)
            seen[row, token, begin:] = False
            tokens.append(token)
            orders.append(order)
        starts.append(len(tokens))
    if not tokens:
        return None
    span = max(len(order) for order in orders)
    padded = [torch.nn.functional.pad(order, (0, span - len(order)), value=-1) for order in orders]
    return Strays(torch.tensor(starts, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32), torch.stack(padded))


def fits(weight: Tensor) -> bool:
    """Whether the linear kernel takes this weight: bf16 rows as they lie in memory, in whole tiles."""
    out, inner = weight.shape
    return weight.dtype == torch.bfloat16 and weight.is_contiguous() and out % 16 == 0 and inner % 32 == 0


def fits_heads(head_dim: int) -> bool:
    """Whether the attention kernel takes heads of this size."""
    return head_dim % 32 == 0 and head_dim <= 256


@cache
def tiles() -> Tiles:
    """The compiled kernel of this machine; compiled when the cache folder has none."""
    try:
        missing = NEEDED - set(_cpu_flags())
        if missing:
            return Tiles(None, f"the CPU lacks {', '.join(sorted(missing))}")
        runtime = next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)
        if runtime is None:
            return Tiles(None, "this build of the framework brings no OpenMP runtime to share")
        library = ctypes.CDLL(str(_build(runtime)))
    except (OSError, subprocess.SubprocessError) as error:
        return Tiles(None, f"the C kernel could not be built: {error}")
    if library.paceline_tiles_init() != 0:
        return Tiles(None, "the operating system does not grant the matrix tiles")
    library.paceline_linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3
    library.paceline_attention.argtypes = [ctypes.c_void_p]
    library.paceline_draft.argtypes = [ctypes.c_void_p]
    library.paceline_draft_pack.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 3
    library.paceline_draft_pack.restype = ctypes.c_long
    return Tiles(library)


def _cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []


def _build(runtime: Path) -> Path:
    """The shared library for this source and runtime, compiled into the cache folder by atomic rename."""
    from paceline.model_cache import home

    sources = [Path(__file__).with_name(name) for name in SOURCES]
    text = b"".join(source.read_bytes() for source in sources) + " ".join((*FLAGS, str(runtime))).encode()
    key = hashlib.sha256(text).hexdigest()[:16]
    built = home() / "kernels" / f"tiles-{key}.so"
    if built.exists():
        return built
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise OSError("no C compiler found; install gcc or set CC")
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        lib, units = f"{folder}/tiles.so", [source for source in sources if source.suffix == ".c"]
        objects = [f"{folder}/{unit.stem}.o" for unit in units]
        # Linking without -fopenmp keeps the system's runtime out; the framework's is named instead.
        for command in (
            *([compiler, *FLAGS, "-c", str(unit), "-o", made] for unit, made in zip(units, objects, strict=True)),
            [compiler, "-shared", "-o", lib, *objects, str(runtime)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise OSError((done.stderr.strip().splitlines() or ["the compiler failed"])[0])
        os.replace(lib, built)
    return built
