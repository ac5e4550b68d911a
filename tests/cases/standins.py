"""What the tests in this folder share: a target whose text is written down, and a drafter of every kind."""

from collections.abc import Sequence
from typing import Any

import torch
from oracles import Known
from test_draft_model import near
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.base import Drafter
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.kernels import Kernel
from paceline.target import Seen

VARIED = {"temperature": 1.0, "seed": 3, "presence_penalty": 1000.0}
"""No token repeats, so each can be made the end."""
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
DRAFTERS = ("oracle", "anti", "mix", "wild", "ngram", "chain", "tree")
"""Everything right, everything wrong, right and wrong in turns, random trees, look-ups, a draft model's two shapes."""


def drafter(name: str, known: Known, depth: int) -> Drafter[Any]:
    """One of `DRAFTERS`; the draft model is the target with its weights a little disturbed."""
    if name == "ngram":
        return Ngram()
    if name in ("chain", "tree"):
        return DraftModel(near()[0], tree_top_k=1 if name == "chain" else 3, depth=depth)
    if name == "wild":
        return known.wild(depth, 3 * depth)
    return {"oracle": known.oracle, "anti": known.anti, "mix": known.mix}[name](depth)


class Says:
    """A target that writes one text, whatever is drafted: its logits depend on the position alone.

    Args:
        said: the ids it writes; the last one again when they are over.
        num_prompt: tokens of the prompts it is used with.
    """

    def __init__(self, said: Sequence[int], num_prompt: int, vocab_size: int) -> None:
        self.said, self.num_prompt, self.vocab_size = torch.tensor(list(said)), num_prompt, vocab_size
        self.hidden_size, self.max_positions, self.kernel = 0, 10_000, Kernel("plain")

    def new_cache(self, rows: int, size: int) -> KVCache:
        return KVCache(rows, self.max_positions)

    def forward(
        self,
        tokens: Tensor,
        offsets: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        logits: bool = True,
    ) -> Seen:
        coming = torch.tensor(cache.lengths)[:, None] + offsets + 1 - self.num_prompt
        cache.start(offsets)
        cache.finish()
        following = self.said[coming.clamp(0, len(self.said) - 1)]
        found = torch.zeros(*tokens.shape, self.vocab_size, dtype=torch.float64)
        return Seen(found.scatter_(2, following[:, :, None], 40.0), None)

    def embed(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def unembed(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError
