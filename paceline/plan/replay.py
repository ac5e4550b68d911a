"""Recorded texts instead of a target: what a drafter would have brought, without running the model again.

The same `step` runs with the same drafter, sampler and rule. Only the target's pass is replaced: behind every token of
a recorded text, all probability lies on the token that the target wrote next. Under the coupled rule a text does not
depend on its drafter, so the walk, the budgets and the number of passes are those of a real run, and what a pass costs
is read off the measured curve.

Heads that read the target's hidden states get those of the recorded text. Drafters that look into its logits or run its
layers see nothing here, and are run instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.base import Drafter
from paceline.draft.compose import Compose
from paceline.draft.early_exit import EarlyExit
from paceline.draft.lookahead import Lookahead
from paceline.errors import IncompatibleDrafter
from paceline.target import Seen


class Pass(NamedTuple):
    """What was read in one pass."""

    rows: int
    tokens: int
    """Of a row."""


def can_replay(drafter: Drafter[Any]) -> bool:
    """Whether a drafter needs nothing of the target but the tokens it writes and the states behind them."""
    members = drafter.drafters if isinstance(drafter, Compose) else (drafter,)
    return not any(
        one.reads_logits
        or list(one.taps) != sorted(one.taps)
        or one.top_scored
        or isinstance(one, Lookahead | EarlyExit)
        for one in members
    )


class Replay:
    """A `Target` that reads nothing and says what the recorded texts say.

    Requests are told apart by their order: the n-th cache of one row is for the n-th text.

    Args:
        like: the target that wrote the texts.
        texts: prompt and answer of each, at least two tokens of prompt.
        states: what `tapped` found of each text, for drafters with taps.
    """

    def __init__(self, like: Any, texts: Sequence[Sequence[int]], states: Sequence[Tensor] = ()) -> None:
        self.vocab_size, self.hidden_size = like.vocab_size, like.hidden_size
        self.max_positions, self.kernel = like.max_positions, like.kernel
        self.texts, self.states = [list(text) for text in texts], list(states)
        self.passes: list[Pass] = []
        """All that was read behind prompts, in order."""
        self._begun = 0

    def new_cache(self, rows: int, size: int) -> KVCache:
        """See `Target`."""
        cache = KVCache(rows, self.max_positions, min(size, self.max_positions))
        if rows == 1:
            cache.number = self._begun  # type: ignore[attr-defined]
            self._begun += 1
        return cache

    def forward(
        self,
        tokens: Int64[Tensor, "B N"],
        offsets: Int64[Tensor, "B N"],
        mask: Bool[Tensor, "B N S_N"] | None,
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        logits: bool = True,
    ) -> Seen:
        """See `Target`. Every slot of the cache holds the number of its row's text."""
        rows, size = tokens.shape
        cache.start(offsets)
        number = getattr(cache, "number", None) if mask is None else None
        held = cache._kv[0][0][:, 0, 0, 0].tolist() if number is None else [number] * rows
        numbers = torch.tensor(held, dtype=torch.float64)[:, None, None, None].expand(rows, 1, size, 1)
        cache.update(numbers, numbers, 0)
        cache.finish()
        if mask is not None:
            self.passes.append(Pass(rows, size))
        hidden = None
        if taps:
            places = (torch.tensor(cache.lengths)[:, None] + offsets).clamp(min=0)
            known = [self.states[int(number)] for number in held]
            hidden = torch.stack([own[at.clamp(max=len(own) - 1)] for own, at in zip(known, places, strict=True)])
        if not logits:
            return Seen(torch.zeros(rows, 0, self.vocab_size), hidden)
        found = torch.full((rows, size, self.vocab_size), -torch.inf)
        for row in range(rows):
            text, length = self.texts[int(held[row])], cache.lengths[row]
            for slot, offset in enumerate(offsets[row].tolist()):
                behind = length + offset + 1
                found[row, slot, text[behind] if behind < len(text) else 0] = 0.0
        return Seen(found, hidden)

    def embed(self, tokens: Int64[Tensor, "..."]) -> Tensor:
        """There is nothing to embed with."""
        raise IncompatibleDrafter("a replay has no weights to embed tokens with; run this drafter on the model itself")

    def unembed(self, hidden: Tensor) -> Tensor:
        """Nor to score with."""
        raise IncompatibleDrafter("a replay has no weights to score states with; run this drafter on the model itself")


def tapped(target: Any, ids: Sequence[int], taps: Sequence[int], chunk: int = 512) -> Float[Tensor, "N TH"]:
    """The target's hidden states behind each token of a text but the last, those of all taps side by side."""
    cache, parts = target.new_cache(1, len(ids)), []
    for begin in range(0, len(ids) - 1, chunk):
        part = torch.tensor([list(ids[begin : min(begin + chunk, len(ids) - 1)])])
        size = part.shape[1]
        parts.append(target.forward(part, torch.arange(size)[None], None, cache, taps, logits=False).hidden[0])
        cache.commit([range(size)])
    return torch.cat(parts)


@contextmanager
def watched(target: Any) -> Iterator[list[Pass]]:
    """The passes of a real target while this lasts, whole ones behind prompts."""
    passes: list[Pass] = []
    forward = target.forward

    def noting(tokens: Tensor, offsets: Tensor, mask: Tensor | None, *rest: Any, **more: Any) -> Any:
        layers = more.get("layers")
        if mask is not None and (layers is None or (layers[0] == 0 and layers[1] == target.num_layers)):
            passes.append(Pass(*tokens.shape))
        return forward(tokens, offsets, mask, *rest, **more)

    own = vars(target).get("forward")
    target.forward = noting
    try:
        yield passes
    finally:
        if own is None:
            del target.forward
        else:
            target.forward = own
