"""How far a head's laws are from what the target wrote, over as many places as there are, in memory that stays flat.

    cross_entropy   -log q(the token of the text)
    kl              Σ p log(p / q)
    acceptance      1 - Σ min(p, q), the share of guesses that the target would turn down: total variation
    likelihood      -log Σ min(p, q), which has the same goal, and a slope where both laws hardly meet yet

p is the target's law over the ids that the head scores, q the head's own. Vocabularies are wide: a thousand places of
them are gigabytes, so laws are made for a few places at a time, and once more on the way back.
(Samarin et al., 2602.23881, compare these losses: total variation alone hardly moves a head that knows nothing.)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.errors import BadRequest, nearest

__all__ = ["LOSSES", "USUAL", "Batch", "Judged", "Mix", "judge", "places_among", "within"]

LOSSES = ("cross_entropy", "kl", "acceptance", "likelihood")
"""What a mix is made of."""
AT_ONCE = 1 << 24
"""Values of laws that are held at once: 64 MB in float32."""
TINY = 1e-9


class Batch(NamedTuple):
    """Texts with what the target thought of them; shorter ones are padded at their end."""

    tokens: Int64[Tensor, "B T"]
    learn: Bool[Tensor, "B T"]
    """The tokens to be guessed right: the answers, not the questions, and no padding."""
    hidden: Float[Tensor, "B T TH"]
    """The target's tapped states behind each token."""
    last: Float[Tensor, "B T Ht"]
    """Its last states, of which its laws are made."""
    best: Int64[Tensor, "B T"] | None = None
    """The id that it holds likeliest behind each token; None has it worked out where it is needed."""


@dataclass(frozen=True)
class Mix:
    """A sum of losses, each with its weight."""

    weights: tuple[tuple[str, float], ...] = (("kl", 1.0),)

    @classmethod
    def read(cls, text: str) -> "Mix":
        """`kl`, or several with weights: `kl:0.5,acceptance:0.5`.

        Raises:
            BadRequest: an unknown loss, one that is named twice, or a weight that is no positive number.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, weight = part.strip().partition(":")
            if name not in LOSSES:
                raise BadRequest(f"no loss {name!r}{nearest(name, LOSSES)}; choose from {', '.join(LOSSES)}")
            try:
                value = float(weight) if weight else 1.0
            except ValueError:
                value = math.nan
            if name in found or not 0.0 < value < math.inf:
                raise BadRequest(
                    f"the loss {text!r} was given; each of {', '.join(LOSSES)} may stand in it once, with a weight "
                    "above 0, such as kl:0.5,acceptance:0.5"
                )
            found[name] = value
        return cls(tuple(found.items()))

    def __str__(self) -> str:
        return ",".join(name if weight == 1.0 else f"{name}:{weight:g}" for name, weight in self.weights)

    def of(self, logits: Float[Tensor, "n Vd"], law: Float[Tensor, "n Vd"], token: Int64[Tensor, "n"]) -> Tensor:
        """The loss at each place; where the token is -100, cross-entropy says nothing."""
        q = functional.log_softmax(logits, -1)
        kept = torch.minimum(law, q.exp()).sum(-1)
        parts: Mapping[str, Callable[[], Tensor]] = {
            "cross_entropy": lambda: functional.nll_loss(q, token, ignore_index=-100, reduction="none"),
            "kl": lambda: (torch.xlogy(law, law) - law * q).sum(-1),
            "acceptance": lambda: 1.0 - kept,
            "likelihood": lambda: -kept.clamp(min=TINY).log(),
        }
        total: Tensor = sum((weight * parts[name]() for name, weight in self.weights), logits.new_zeros(()))
        return total


USUAL = Mix()


class Judged(NamedTuple):
    """Sums over places."""

    loss: Float[Tensor, ""]
    right: float
    """Where head and target hold the same token likeliest."""
    overlap: float
    """Of Σ min(p, q): guesses that would be kept."""
    number: int
    """Of places."""

    def notes(self, i: int, learnt: Tensor) -> dict[str, float]:
        """Sums for a reader, of the i-th guess in a row.

        Args:
            learnt: marks the places that were to be learnt, those without an id among them.
        """
        found = {"right": self.right, "kept": self.overlap, "places": self.number, "learnt": int(learnt.sum())}
        return {f"{name}_{i}": float(value) for name, value in found.items()}


Score = Callable[[Float[Tensor, "n H"]], Float[Tensor, "n Vd"]]
"""From states to logits."""


def judge(
    mix: Mix,
    states: Float[Tensor, "N H"],
    score: Score,
    last: Float[Tensor, "N Ht"],
    teach: Score,
    token: Int64[Tensor, "N"],
    vocab_size: int,
) -> Judged:
    """Hold the laws made of a head's states against those made of the target's, place by place.

    Args:
        score: the head's logits.
        teach: the target's over the same ids; nothing is learnt through them.
        token: the token of the text at each place among these ids, or -100.
        vocab_size: how many ids these are.
    """
    size = max(1, AT_ONCE // vocab_size)

    def part(own: Tensor, others: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            law = _wide(teach(others)).softmax(-1)
        logits = _wide(score(own))
        with torch.no_grad():
            right = (logits.argmax(-1) == law.argmax(-1)).sum()
            overlap = torch.minimum(law, logits.softmax(-1)).sum()
        return mix.of(logits, law, tokens).sum(), right, overlap

    total, right, overlap = _wide(states.new_zeros(())), 0.0, 0.0
    for begin in range(0, len(states), size):
        given = states[begin : begin + size], last[begin : begin + size], token[begin : begin + size]
        loss, agreed, common = checkpoint(part, *given, use_reentrant=False, preserve_rng_state=False)
        total, right, overlap = total + loss, right + float(agreed), overlap + float(common)
    return Judged(total, right, overlap, len(states))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def places_among(tokens: Int64[Tensor, "*B"], ids: Int64[Tensor, "Vd"] | None) -> Int64[Tensor, "*B"]:
    """The places of tokens among some ids, which all stand once; -100 for those that are not there."""
    if ids is None:
        return tokens
    order = ids.argsort()
    at = torch.searchsorted(ids[order], tokens.contiguous()).clamp(max=len(ids) - 1)
    place = order[at]
    return torch.where(ids[place] == tokens, place, -100)


@torch.no_grad()
def within(batch: Batch, ids: Int64[Tensor, "Vd"] | None, unembed: Score) -> Bool[Tensor, "B T"]:
    """Where the target's likeliest next token is one of some ids."""
    if ids is None:
        return torch.ones_like(batch.learn)
    best = batch.best
    if best is None:
        rows = max(1, AT_ONCE // int(unembed(batch.last[:1, :1]).shape[-1]))
        best = torch.cat([unembed(part).argmax(-1) for part in batch.last.flatten(0, 1).split(rows)])
        best = best.view(batch.tokens.shape)
    return torch.isin(best, ids)
