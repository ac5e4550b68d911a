"""bf16 on CPU: linear layers that stream their weights once per pass, for few rows, the same at every width.

A decode pass has 1 to some tens of rows. The framework's product is built for many: it leaves a third to a half of the
memory bandwidth unused, and its blocking, hence its rounding, changes with the number of rows. Two routes mend both:

    tiles       a small C kernel on the CPU's matrix tiles (`tiles.c`), 1 to 64 rows
    transposed  without a compiler: W·xᵀ by the framework, with xᵀ padded to 16, 24 or 32 columns

Both read the weights where they lie: nothing is packed or held twice, names and `state_dict` stay as they are, and
more rows than that (reading a prompt) take the framework's own route, which is the right one there.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.kernels import Kernel, native

MAX_WIDTH = 64
"""Rows up to which a pass is promised to be the same at every width; the tiles would go further, attention is tried to
this many."""
WIDTHS = (16, 24, 32)
"""Numbers of columns the transposed route pads to."""


class TileLinear(nn.Linear):
    """`nn.Linear` on matrix tiles. A loaded layer becomes one by `prepare`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], as `nn.Linear`."""
        rows = input.numel() // self.in_features
        if rows == 0 or input.dtype != torch.bfloat16:
            return F.linear(input, self.weight, self.bias)
        out = native.tiles().linear(input.reshape(rows, -1).contiguous(), self.weight, self.bias)
        return out.view(*input.shape[:-1], -1)


class TransposedLinear(nn.Linear):
    """`nn.Linear` as W·xᵀ for up to 32 rows. A loaded layer becomes one by `prepare`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], as `nn.Linear`."""
        rows = input.numel() // self.in_features
        if not 0 < rows <= WIDTHS[-1]:
            return F.linear(input, self.weight, self.bias)
        flat = F.pad(input.reshape(rows, -1), (0, 0, 0, next(w for w in WIDTHS if rows <= w) - rows))
        out = torch.mm(self.weight, flat.t())
        if self.bias is not None:
            out += self.bias[:, None]
        return out.t()[:rows].contiguous().view(*input.shape[:-1], -1)


def prepare(model: PreTrainedModel) -> Kernel:
    """Give the model's linear layers the best route this machine has, in place."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return Kernel("plain", note="no bf16 matrix kernels on this CPU")
    linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.bfloat16]
    why = native.tiles().why or ("" if all(native.fits(m.weight) for m in linears) else "layers not in whole tiles")
    for linear in linears:
        linear.__class__ = TransposedLinear if why else TileLinear
    route, width = ("transposed", WIDTHS[-1]) if why else ("tiles", MAX_WIDTH)
    same, close = _try(linears, width)
    if not close:
        for linear in linears:
            linear.__class__ = nn.Linear
        return Kernel("plain", note=f"the {route} route computed something else than the framework")
    # Layers of other kinds (GPT-2's Conv1D) keep the framework's kernel, so nothing can be promised for them.
    whole = len(linears) > 0 and not any(type(m).__name__ == "Conv1D" for m in model.modules())
    if not same:
        why = "; ".join(filter(None, (why, "this route rounds differently at different widths here")))
    config = model.config.get_text_config()
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if route == "tiles" and native.fits_heads(head_dim):
        return Kernel(route, key_block=native.KEYS, width=width if same and whole else 0, note=why, tile_attention=True)
    return Kernel(route, query_block=32, key_block=512, width=width if same and whole else 0, note=why)


def _try(linears: list[nn.Linear], width: int) -> tuple[bool, bool]:
    """(bits equal at every width, close to the framework's product), tried on each distinct shape of the model."""
    generator = torch.Generator().manual_seed(0)
    same = close = True
    for linear in {tuple(m.weight.shape): m for m in linears}.values():
        x = torch.randn(width, linear.in_features, generator=generator).bfloat16()
        with torch.no_grad():
            wide = linear(x)
            plain = F.linear(x[:2], linear.weight, linear.bias).float()
            same = same and all(torch.equal(linear(x[:rows]), wide[:rows]) for rows in (1, 16, 17, width // 2))
        close = close and bool((wide[:2].float() - plain).abs().max() <= 0.02 * plain.abs().max() + 1e-6)
    return same, close


def threads_available() -> int:
    """Cores given to this process (affinity and container quota), not those of the machine; at most OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if wished.isdecimal() and int(wished) > 0:
        cores = min(cores, int(wished))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
