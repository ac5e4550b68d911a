"""A user's own logits processors: called in their order, on copies, and judged by what they return."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.errors import BadLogits


class Processors:
    """The `logits_processors` of one request, bound to its text."""

    def __init__(self, processors: Sequence[Callable[..., Any]], prompt_ids: Sequence[int]) -> None:
        from transformers import LogitsProcessor, LogitsProcessorList

        kinds = (LogitsProcessor, LogitsProcessorList)
        self._calls = [(processor, isinstance(processor, kinds)) for processor in processors]
        self._text = list(prompt_ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Take note of tokens that were emitted."""
        self._text += ids

    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> Float[Tensor, "V"]:
        """What the processors make of a row, which stays as it is.

        Raises BadLogits when one returns something else than a row, NaN where there was none, or no token at all;
        exceptions of their own pass through.
        """
        peak = float(x.max())
        for processor, of_transformers in self._calls:
            ids = [*self._text, *path]
            if of_transformers:
                found = processor(torch.tensor([ids], device=x.device), x.clone()[None])
                x = _checked(processor, found, x, (1, x.shape[0]))[0]
            else:
                x = _checked(processor, processor(ids, x.clone()), x, (x.shape[0],))
            before, peak = peak, float(x.max())
            if math.isnan(peak) and not math.isnan(before):
                raise BadLogits(f"logits processor {_name(processor)} returned NaN, and numbers are needed")
            if peak == -math.inf and before != -math.inf:
                raise BadLogits(
                    f"no token is left at a position that was reached: logits processor {_name(processor)} removed "
                    "all of them"
                )
        return x


def _checked(processor: Any, found: Any, given: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of what a processor returned, of the row's type: the processor may go on using its own."""
    needed = f"a tensor of numbers of shape {list(shape)} is needed"
    if not isinstance(found, Tensor) or not found.is_floating_point():
        what = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise BadLogits(f"logits processor {_name(processor)} returned {what}; {needed}")
    if tuple(found.shape) != shape:
        raise BadLogits(f"logits processor {_name(processor)} returned shape {list(found.shape)}; {needed}")
    return found.detach().to(given, copy=True)


def _name(processor: Any) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))
