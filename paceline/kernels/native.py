"""The compiled kernel: built once with the machine's C compiler, kept in the cache folder, optional.

It links against the OpenMP runtime that the framework brings, so both share one pool of threads; two pools on the
same cores would wait for each other in every layer.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
NEEDED = {"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
MAX_ROWS = 64


class Thin(NamedTuple):
    """The kernel's entry point, or why there is none."""

    function: Any
    why: str = ""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, in] -> [rows, out] for 1 to 64 rows; `fits` must hold for the weight."""
        assert self.function is not None
        y = x.new_empty(x.shape[0], weight.shape[0])
        out, inner = weight.shape
        where = None if bias is None else bias.data_ptr()
        if self.function(weight.data_ptr(), where, x.data_ptr(), y.data_ptr(), out, inner, x.shape[0]):
            raise MemoryError(f"no memory to pack {x.shape[0]} rows of {inner} numbers")
        return y


def fits(weight: Tensor) -> bool:
    """Whether the kernel takes this weight: bf16 rows as they lie in memory, in whole tiles."""
    out, inner = weight.shape
    return weight.dtype == torch.bfloat16 and weight.is_contiguous() and out % 16 == 0 and inner % 32 == 0


@cache
def thin() -> Thin:
    """The compiled kernel of this machine; compiled when the cache folder has none."""
    try:
        missing = NEEDED - set(_cpu_flags())
        if missing:
            return Thin(None, f"the CPU lacks {', '.join(sorted(missing))}")
        runtime = next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)
        if runtime is None:
            return Thin(None, "this build of the framework brings no OpenMP runtime to share")
        library = ctypes.CDLL(str(_build(runtime)))
    except (OSError, subprocess.SubprocessError) as error:
        return Thin(None, f"the C kernel could not be built: {error}")
    if library.paceline_thin_init() != 0:
        return Thin(None, "the operating system does not grant the matrix tiles")
    function = library.paceline_thin
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3
    function.restype = ctypes.c_int
    return Thin(function)


def _cpu_flags() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []


def _build(runtime: Path) -> Path:
    """The shared library for this source and runtime, compiled into the cache folder by atomic rename."""
    from paceline.model_cache import home

    source = Path(__file__).with_name("thin.c")
    key = hashlib.sha256(source.read_bytes() + " ".join((*FLAGS, str(runtime))).encode()).hexdigest()[:16]
    built = home() / "kernels" / f"thin-{key}.so"
    if built.exists():
        return built
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise OSError("no C compiler found; install gcc or set CC")
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        obj, lib = f"{folder}/thin.o", f"{folder}/thin.so"
        # Linking without -fopenmp keeps the system's runtime out; the framework's is named instead.
        for command in (
            [compiler, *FLAGS, "-c", str(source), "-o", obj],
            [compiler, "-shared", "-o", lib, obj, str(runtime)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise OSError((done.stderr.strip().splitlines() or ["the compiler failed"])[0])
        os.replace(lib, built)
    return built
