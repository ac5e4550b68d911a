"""What a row of logits says: a law over the tokens that the filters leave, the likeliest tokens, their log-probs.

    Law        a node's target law after every setting, sparse where a filter has made it so
    filtered   top-k, top-p and min-p
    ranked     the log-probs that a request may ask for

One position costs less than a millisecond at a vocabulary of 151,936 because nothing here sorts or masks the whole
vocabulary: a row is looked at through the maxima of its blocks of 64, and only the few blocks that matter are opened.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import threshold

from paceline.errors import BadLogits
from paceline.output import Logprob
from paceline.params import SamplingParams

BLOCK = 64
SMALL = 4096
"""Up to this many entries everything is done directly; above it a row is opened block by block."""


class Law(NamedTuple):
    """One node's law after all settings: unnormalised logs over the ids that are left, in ascending order."""

    ids: Int64[Tensor, "M"] | None
    """The ids that `logits` speaks about; none means the whole vocabulary (removed tokens then hold -inf)."""
    logits: Float[Tensor, "M"]
    vocab_size: int

    def probs(self) -> Float64[Tensor, "V"]:
        """The law as probabilities over the whole vocabulary."""
        share = torch.softmax(self.logits.double(), 0)
        return share if self.ids is None else share.new_zeros(self.vocab_size).index_put_((self.ids,), share)

    def log_probs(self) -> Float[Tensor, "V"]:
        """Log-probabilities over the whole vocabulary, -inf for what the settings removed."""
        logs = torch.log_softmax(self.logits, 0)
        if self.ids is None:
            return logs
        return logs.new_full((self.vocab_size,), -math.inf).index_put_((self.ids,), logs)


class Row:
    """A row seen through its block maxima, so that few of its entries need be touched.

    Masks and compaction over a whole vocabulary cost as much as everything else together (0.5 ms); the maxima
    cost 0.03 ms.
    """

    def __init__(self, values: Float[Tensor, "V"]) -> None:
        self.values = values
        blocks = values.shape[0] // BLOCK
        whole = blocks * BLOCK
        maxima = values[:whole].reshape(blocks, BLOCK).amax(1)
        if whole < values.shape[0]:
            maxima = torch.cat([maxima, values[whole:].amax(0, keepdim=True)])
        self.maxima = maxima

    def inside(self, blocks: Int64[Tensor, "M"]) -> Int64[Tensor, "_"]:
        """The ids of all entries of these blocks."""
        ids = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten()
        return ids if self.values.shape[0] % BLOCK == 0 else ids[ids < self.values.shape[0]]

    def above(self, floor: float) -> Int64[Tensor, "M"]:
        """The ids of all entries of at least `floor`, ascending."""
        blocks = (self.maxima >= floor).nonzero().flatten()
        if blocks.shape[0] > 8 * SMALL // BLOCK:  # most of the row is open: one mask is cheaper than that many
            return (self.values >= floor).nonzero().flatten()
        ids = self.inside(blocks)
        return ids[self.values[ids] >= floor]

    def kth(self, k: int) -> float:
        """The k-th largest value. The k largest block maxima are k entries, so no smaller entry can be it."""
        if k >= self.values.shape[0]:
            return -math.inf
        pool = self.values
        if k < self.maxima.shape[0] // 2:
            pool = pool[self.above(self.maxima.topk(k).values[-1].item())]
        return pool.topk(k).values[-1].item()

    def argmax(self) -> int:
        """The lowest id among the largest entries (torch's argmax is the first one too, and ten times slower)."""
        start = int(self.maxima.argmax()) * BLOCK
        return start + int(self.values[start : start + BLOCK].argmax())


def _keep_above(law: Law, floor: float, row: Row) -> Law:
    """The law without entries below `floor`: sparse if few are left, else whole with -inf in the gaps."""
    if floor == -math.inf:
        return law
    ids, x, size = law
    if ids is not None:
        kept = x >= floor
        return Law(ids[kept], x[kept], size)
    if int((row.maxima >= floor).sum()) * BLOCK <= 8 * SMALL:
        few = row.above(floor)
        few = few[x[few] >= floor]  # the row may be from before the last filter
        if few.shape[0] <= SMALL:
            return Law(few, x[few], size)
    return Law(None, threshold(x, _below(floor, x), -math.inf), size)


def _below(value: float, like: Tensor) -> float:
    """The next smaller number of the tensor's type: `x >= value` is `x > _below(value)`."""
    return torch.nextafter(like.new_tensor(value), like.new_tensor(-math.inf)).item()


def _top_p(law: Law, top_p: float, row: Row) -> Law:
    """The law cut to its nucleus: a token stays if the mass of those before it is less than `top_p`.

    Before means likelier, or as likely with a lower id. Three ways of finding the border, by how far down it lies:
    all of a small law, the upper tokens of a peaked one, a search by value in a flat one. None sorts a vocabulary.
    """
    ids, x, size = law
    if x.shape[0] <= SMALL:
        weights = (x - x.max()).double().exp_()
        kept = _nucleus(x, weights, top_p * float(weights.sum()))
        return Law(kept if ids is None else ids[kept], x[kept], size)
    # exp of what float32 cannot hold is twenty times slower; e^-80 is nothing already
    weights = (x - row.maxima.max()).clamp_(min=-80.0).exp_()
    total = float(weights.sum())
    goal, mass = total * top_p, 0.0
    for k in (32, 256):
        if mass * 2 < goal and k > 32:
            break  # flat: several times as many tokens will not do either
        upper = row.above(float(row.maxima.topk(min(k, row.maxima.shape[0])).values[-1]))
        mass = float(weights[upper].double().sum())
        # a hair more than the goal: the border is then inside for certain
        if upper.shape[0] <= SMALL and mass > goal * (1 + 1e-5):
            kept = upper[_nucleus(x[upper], weights[upper], goal)]
            return Law(kept if ids is None else ids[kept], x[kept], size)
    return Law(ids, _flat_nucleus(x, weights, total, goal), size)


def _nucleus(
    x: Float[Tensor, "M"], weights: Float[Tensor, "M"], goal: float, reached: float = 0.0
) -> Int64[Tensor, "_"]:
    """Indices, ascending, of the largest entries up to and with the one whose mass reaches the goal."""
    if x.shape[0] <= 4 * BLOCK:  # ten tensor calls cost more than that many numbers
        values, masses, count = x.tolist(), weights.tolist(), 0
        ranked = sorted(range(len(values)), key=values.__getitem__, reverse=True)  # stable: the lower id first
        while count < len(ranked) and (reached < goal or count == 0):
            reached += masses[ranked[count]]
            count += 1
        return torch.tensor(sorted(ranked[:count]), device=x.device)
    order = x.sort(descending=True, stable=True).indices
    mass = weights[order].double().cumsum(0) + reached
    return order[: 1 + int((mass < goal).sum())].sort().values


def _flat_nucleus(x: Float[Tensor, "V"], weights: Float[Tensor, "V"], total: float, goal: float) -> Float[Tensor, "V"]:
    """The row with -inf outside its nucleus, where that is thousands of tokens.

    Only a band around its border is sorted: bracketed by looks at the mass above a weight, guessed first from a
    sample of the row and then by interpolation.
    """
    band = _Band(weights, total, goal)
    sample = weights[:: weights.shape[0] // 1024].sort(descending=True).values
    mass = sample.cumsum(0)
    for aim in (1.03, 0.97):
        place = int(torch.searchsorted(mass, float(mass[-1]) * goal / total * aim))
        band.look(float(sample[min(place, sample.shape[0] - 1)]))
    for side in (0.1, -0.1, 0.01, -0.01):
        band.interpolate(side)
    ids = band.ids()
    kept = _nucleus(x[ids], weights[ids], goal, band.mass_high)
    border = float(x[ids[kept]].min())
    law = threshold(x, _below(border, x), -math.inf)
    beyond = ids[torch.ones_like(ids, dtype=torch.bool).index_fill_(0, kept, False)]
    law[beyond[x[beyond] == border]] = -math.inf  # ties with the border and has a higher id
    return law


class _Band:
    """The weights low < w <= high among which a nucleus ends: mass(w > high) < goal <= mass(w > low)."""

    def __init__(self, weights: Float[Tensor, "V"], total: float, goal: float) -> None:
        self.weights, self.goal = weights, goal
        self.high, self.mass_high = 1.0, 0.0  # the largest weight is 1
        self.low, self.mass_low = 0.0, total

    def look(self, weight: float) -> None:
        """Narrows the band to one side of `weight`: two passes over the row, where a sort would be a thousand."""
        if self.low < weight < self.high:
            mass = float(threshold(self.weights, weight, 0.0).sum())
            if mass >= self.goal:
                self.low, self.mass_low = weight, mass
            else:
                self.high, self.mass_high = weight, mass

    def interpolate(self, side: float) -> None:
        """Looks a little below (side > 0) or above the place where a straight line reaches the goal."""
        share = (self.goal - self.mass_high) / (self.mass_low - self.mass_high) + side
        self.look(self.high - (self.high - self.low) * min(max(share, 0.005), 0.995))

    def ids(self) -> Int64[Tensor, "M"]:
        """The ids in the band, ascending."""
        w, middle, half = self.weights, (self.low + self.high) / 2, (self.high - self.low) / 2
        near = Row((w - middle).abs_().neg_()).above(-half - 1e-6 * (middle + half))  # and rounding
        weights = w[near]
        return near[(weights > self.low) & (weights <= self.high)]


def filtered(x: Float[Tensor, "V"], params: SamplingParams) -> Law:
    """The law of scaled logits after top-k, top-p and min-p, in this order, each on what the one before left."""
    row = Row(x)
    peak = checked_peak(row)
    if peak == math.inf:
        certain = row.above(peak)
        return Law(certain, x.new_zeros(certain.shape[0]), x.shape[0])
    law = Law(None, x, x.shape[0])
    if params.top_k > 0:
        law = _keep_above(law, row.kth(params.top_k), row)
    if params.top_p < 1.0:
        law = _top_p(law, params.top_p, row)
    if params.min_p > 0.0:
        law = _keep_above(law, peak + math.log(params.min_p), row)
    return law


def checked_peak(row: Row) -> float:
    """The row's largest value; refuses rows that are no law."""
    peak = float(row.maxima.amax())
    if math.isnan(peak):
        raise BadLogits(
            "the logits hold NaN at a position that was reached, and numbers are needed; check the weights, and the "
            "dtype: float16 overflows where bfloat16 does not"
        )
    if peak == -math.inf:
        raise BadLogits("no token is left at a position that was reached")
    return peak


# -- the likeliest tokens ----------------------------------------------------------------------------------------------


def likeliest(x: Float[Tensor, "V"], count: int) -> list[int]:
    """The ids of the `count` largest entries, the largest first and the lowest id first among equals."""
    row = Row(x)
    ids = row.above(row.kth(count)) if count > 0 else torch.empty(0, dtype=torch.int64, device=x.device)
    order = x[ids].sort(descending=True, stable=True).indices[:count]
    found: list[int] = ids[order].tolist()
    return found


def log_mass(x: Float[Tensor, "M"]) -> float:
    """log of the sum of exp, in float64: taken from an entry it gives its log-probability."""
    return float(x.double().logsumexp(0))


def ranked(logits: Float[Tensor, "V"], token: int, count: int) -> dict[int, Logprob]:
    """Log-probs by log-softmax of raw logits: the chosen token first, then the `count` likeliest; -1 means all.

    Equally likely tokens share a rank and stand by their ids. Infinite logits are certain, as they are in a law.
    """
    x = logits.detach()
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if float(x.max()) == math.inf:
        x = torch.zeros_like(x).masked_fill_(x != math.inf, -math.inf)
    logs = torch.log_softmax(x, 0)
    best = likeliest(x, x.shape[0] if count < 0 else min(count, x.shape[0]))
    found = {token: Logprob(float(logs[token]), 1 + int((x > x[token]).sum()))}
    rank, last = 0, math.nan
    for place, (one, value, log) in enumerate(zip(best, x[best].tolist(), logs[best].tolist(), strict=True), 1):
        if value != last:
            rank, last = place, value
        found.setdefault(one, Logprob(log, rank))
    return found
