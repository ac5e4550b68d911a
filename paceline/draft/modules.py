"""Parts of heads, made around weights that were read: nothing is initialised, so no random number is drawn."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """A matrix, and a bias if there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return functional.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """Root mean square norm, computed in float32 or better."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        """Along the last axis."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
