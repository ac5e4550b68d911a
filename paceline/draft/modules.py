"""Parts of heads, made around weights that were read: nothing is initialised, so no random number is drawn."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int64
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


def unembedding(target: Any, ids: Int64[Tensor, "Vd"] | None) -> Callable[[Tensor], Tensor]:
    """The target's logits over some ids, from a copy of these rows of its matrix; over all if None."""
    if ids is None:
        found: Callable[[Tensor], Tensor] = target.unembed
        return found
    weight, bias = _vocabulary(target)
    at = ids.to(weight.device)
    rows = Linear(weight[at], None if bias is None else bias[at]).requires_grad_(False)
    return lambda states: target.finish(rows(states))


def scored(target: Any, states: Float[Tensor, "*B H"]) -> Float[Tensor, "*B V"]:
    """The target's vocabulary product of a head's states: its own way of it, or one that slopes are known of."""
    states = states.to(target.dtype)
    if states.requires_grad:
        product: Tensor = target.finish(functional.linear(states, *_vocabulary(target)))
        return product
    found: Tensor = target.unembed(states)
    return found


def _vocabulary(target: Any) -> tuple[Tensor, Tensor | None]:
    """The target's vocabulary matrix, and its bias if there is one."""
    layer = target.model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    return layer.weight.detach(), None if bias is None else bias.detach()


class Borrower(nn.Module):
    """A head that borrows from its target, which is no part of it: kept in a list, out of its parameters' sight."""

    _target: list[Any]
    ids: Int64[Tensor, "Vd"] | None
    """The target's ids that it scores; None where these are all."""

    @property
    def target(self) -> Any:
        """Whom it drafts for."""
        return self._target[0]

    @cached_property
    def teach(self) -> Any:
        """The target's own logits over the ids that it scores."""
        return unembedding(self.target, self.ids)
