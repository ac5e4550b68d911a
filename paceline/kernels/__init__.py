"""What makes a forward reach the memory bandwidth, and makes it say the same at every width.

`prepare(model)` picks what this machine can do and returns a `Kernel`: the promises the rest of the package builds
on. Where an operator is missing the model runs as `transformers` wrote it and the kernel says why.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Kernel:
    """How a target's forward runs here.

    `width` is the guarantee: passes of up to that many rows (all sequences of the batch together) give, for a
    token and its prefix, the same bits whatever else is in the pass. 0 means that nothing is promised.
    """

    name: str
    query_block: int = 1
    """Query rows of attention are padded to a multiple of this."""
    key_block: int = 1
    """Attention reads a multiple of this many slots."""
    width: int = 0
    tile_attention: bool = False
    """Whether attention runs on the compiled kernel too, which takes row bits for a mask."""
    note: str = ""
    """Why this kernel, in a few words; shown under --debug."""


def prepare(model: "PreTrainedModel") -> Kernel:
    """Rearrange a loaded model for the fastest forward this machine has, in place, holding the weights once."""
    import torch

    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        return Kernel("plain", note=f"weights on {parameter.device}")
    if parameter.dtype != torch.bfloat16:
        return Kernel("plain", note=f"{str(parameter.dtype).removeprefix('torch.')} weights")
    from paceline.kernels import cpu

    return cpu.prepare(model)
