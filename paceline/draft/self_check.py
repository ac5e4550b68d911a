"""Whether a head says what its target says: a look at a short text when it is loaded.

A head that reads the wrong layers, lost a bias or was trained for another model still drafts, and nothing goes wrong
but the speed. Here its best guess is held against the target's own next token, place by place, beside what always
naming the commonest token would get. An EAGLE-3 head is also tried one layer up and down, where lists of layers that
are counted the other way would point.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.draft.eagle import Eagle, Unrolled, unrolled_mask
from paceline.draft.medusa import Medusa
from paceline.formats.head import Eagle3Settings

NEAR = 2.0
"""A head that is right less than so many times as often as the commonest token knows next to nothing."""
BETTER = 1.5
"""Another list of layers that is right so many times as often is likely the one that was meant."""


class DoubtfulHead(UserWarning):
    """A head that fits its target, and guesses as if it did not: slow, never wrong."""


@dataclass(frozen=True)
class SelfCheck:
    """Shares of places at which the target's next token was guessed."""

    right: float
    chance: float
    """By always naming the commonest one."""
    num_places: int
    shifted: dict[int, float]
    """EAGLE-3: with all layers one lower (-1) or higher (+1), where the target has them."""

    @property
    def warning(self) -> str | None:
        """What the user should know, if anything."""
        best = max(self.shifted, key=lambda by: self.shifted[by], default=0)
        if self.shifted and self.shifted[best] > max(BETTER * self.right, NEAR * self.chance):
            way = "what leaves each layer" if best > 0 else "what enters each layer"
            return (
                f"the head guesses {self.right:.0%} of {self.num_places} tokens, and {self.shifted[best]:.0%} when its "
                f"list of layers is read as {way}; its config counts layers the other way, give layer_ids"
            )
        if self.right < NEAR * self.chance:
            return (
                f"the head guesses {self.right:.0%} of {self.num_places} tokens, where the commonest one alone would "
                f"be right in {self.chance:.0%}: it was trained for another model, or on nothing like this text"
            )
        return None


@torch.inference_mode()
def self_check(target: Any, drafter: Any, ids: list[int]) -> SelfCheck:
    """Hold a bound head against its target on a text.

    Args:
        target: an `HFTarget`.
        drafter: a `Medusa` or `Eagle` that is bound to it.
        ids: the text, a hundred tokens or more.
    """
    settings = drafter.head.settings
    count = int(target.num_layers)
    shifts: dict[int, tuple[int, ...]] = {0: tuple(drafter.taps)}
    if isinstance(settings, Eagle3Settings):
        for by in (-1, 1):
            moved = tuple(tap + by for tap in drafter.taps)
            if min(moved) >= 0 and max(moved) <= count:
                shifts[by] = moved
    taps = sorted({tap for moved in shifts.values() for tap in moved})
    cache = target.new_cache(1, len(ids) + 1)
    seen = target.forward(torch.tensor([ids]), torch.arange(len(ids))[None], None, cache, taps)
    states = dict(zip(taps, seen.hidden[0].chunk(len(taps), dim=-1), strict=True))
    own = seen.logits[0].argmax(-1)[1:-1]  # behind token t + 1, for which the pair at t is asked
    tokens = torch.tensor(ids)

    def right(by: int) -> float:
        hidden = torch.cat([states[tap] for tap in shifts[by]], dim=-1)[:-2]
        guesses = _guesses(drafter, hidden, tokens[1:-1])
        return float((guesses.to(own.device) == own).float().mean())

    commonest = Counter(own.tolist()).most_common(1)[0][1]
    return SelfCheck(right(0), commonest / len(own), len(own), {by: right(by) for by in shifts if by})


def _guesses(drafter: Any, hidden: Tensor, following: Tensor) -> Tensor:
    """The likeliest target id behind each pair."""
    if isinstance(drafter, Medusa):
        assert drafter.heads is not None
        best, ids = drafter.heads(hidden, 1)[:, 0].argmax(-1), drafter.heads.ids
        return best if ids is None else ids[best]
    assert isinstance(drafter, Eagle)
    network = drafter.network
    assert network is not None
    size = len(following)
    out = network.read(
        following[None], network.fuse(hidden)[None], torch.arange(size)[None], unrolled_mask(size, 0)[None], Unrolled()
    )
    best = network.score(out[0]).argmax(-1)
    return best if network.ids is None else network.ids[best]
