"""From raw logits to one token: a request's settings, the law they make at a node, and all of its randomness.

    SamplingParams   what the user asked for, checked
    Sampler          those settings bound to one text: raw logits of a node -> Law
    Law              a node's target law after every setting, sparse where a filter has made it so
    Draws            every random number of the request: noise by position, streams for drafts and for rules

One position costs less than a millisecond at a vocabulary of 151,936 because nothing here sorts or masks the whole
vocabulary: a row is looked at through the maxima of its blocks of 64, and only the few blocks that matter are opened.
"""

import hashlib
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor
from torch.nn.functional import threshold

from paceline.errors import BadLogits, BadRequest, nearest

_BLOCK = 64
_SMALL = 4096
"""Up to this many entries everything is done directly; above it a row is opened block by block."""
_FEW = 24
"""Up to this many, plain Python numbers are faster than tensors."""
_GREEDY_BELOW = 1e-5
_NOT_YET = (
    "n", "stop", "bad_words", "allowed_token_ids", "no_repeat_ngram_size", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "logprobs", "prompt_logprobs", "logits_processors", "skip_special_tokens",
)  # fmt: skip


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request wants from its tokens; unknown and impossible values are refused here, before any work."""

    temperature: float = 1.0
    """Softmax temperature; below 1e-5 the likeliest token is taken."""
    top_k: int = 0
    """Keep the k likeliest tokens and whatever ties with the last of them; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this share of the mass; among equal tokens the lowest ids are kept first."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token that the output already holds."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time the output already holds it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; -inf bans one."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text, besides the model's own."""
    max_tokens: int | None = None
    """Most tokens to emit; none means the room left in the context."""
    seed: int | None = None
    """Same seed, same text, with or without speculation; none takes a fresh seed for each request."""
    __no_type_check__: ClassVar[bool] = True  # checked below, in the test run too, with words

    def __new__(cls, *args: object, **given: object) -> "SamplingParams":
        """Refuses what the generated __init__ would only answer with a TypeError."""
        if args:
            raise BadRequest(f"{len(args)} settings were given without a name; write SamplingParams(temperature=...)")
        known = [field.name for field in fields(cls)]
        for key in given:
            if key in _NOT_YET:
                raise BadRequest(f"{key!r} is not available in this version; leave it out")
            if key not in known:
                raise BadRequest(f"unknown sampling setting {key!r}{nearest(key, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._number("temperature", low=0.0)
        self._number("top_p", low=0.0, high=1.0, above=True)
        self._number("min_p", low=0.0, high=1.0)
        self._number("presence_penalty")
        self._number("frequency_penalty")
        self._number("repetition_penalty", low=0.0, above=True)
        self._whole("top_k", low=-1)
        if self.max_tokens is not None:
            self._whole("max_tokens", low=0)
        if self.seed is not None:
            self._whole("seed")
            object.__setattr__(self, "seed", self.seed % 2**64)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Iterable):
            raise BadRequest(f"stop_token_ids is {self.stop_token_ids!r}; a list of token ids is needed")
        stops = tuple(_token_id("stop_token_ids", token) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stops)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    def _number(self, name: str, low: float = -math.inf, high: float = math.inf, above: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise BadRequest(f"{name} is {value!r}; a number is needed")
        value = float(value)
        inside = low < value <= high if above else low <= value <= high
        if not inside or not math.isfinite(value):
            floor = "" if low == -math.inf else f" {'above' if above else 'of at least'} {low:g}"
            ceiling = "" if high == math.inf else f"{' and' if floor else ''} at most {high:g}"
            raise BadRequest(f"{name} is {value}; a finite number{floor}{ceiling} is needed")
        object.__setattr__(self, name, value)

    def _whole(self, name: str, low: int | None = None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise BadRequest(f"{name} is {value!r}; a whole number is needed")
        if low is not None and value < low:
            raise BadRequest(f"{name} is {value}; {low} or more is needed")
        object.__setattr__(self, name, int(value))


def _token_id(name: str, token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
        raise BadRequest(f"{name} holds {token!r}; token ids are whole numbers from 0")
    return int(token)


def _checked_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise BadRequest(f"logit_bias is {bias!r}; a mapping from token id to number is needed")
    checked = {}
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value == math.inf:
            raise BadRequest(f"logit_bias[{token!r}] is {value!r}; a finite number, or -inf for a ban, is needed")
        checked[_token_id("logit_bias", token)] = float(value)
    return checked


# -- laws --------------------------------------------------------------------------------------------------------------


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


class _Row:
    """A row seen through its block maxima, so that few of its entries need be touched.

    Masks and compaction over a whole vocabulary cost as much as everything else together (0.5 ms); the maxima
    cost 0.03 ms.
    """

    def __init__(self, values: Float[Tensor, "V"]) -> None:
        self.values = values
        blocks = values.shape[0] // _BLOCK
        whole = blocks * _BLOCK
        maxima = values[:whole].reshape(blocks, _BLOCK).amax(1)
        if whole < values.shape[0]:
            maxima = torch.cat([maxima, values[whole:].amax(0, keepdim=True)])
        self.maxima = maxima

    def inside(self, blocks: Int64[Tensor, "M"]) -> Int64[Tensor, "_"]:
        """The ids of all entries of these blocks."""
        ids = (blocks[:, None] * _BLOCK + torch.arange(_BLOCK, device=blocks.device)).flatten()
        return ids if self.values.shape[0] % _BLOCK == 0 else ids[ids < self.values.shape[0]]

    def above(self, floor: float) -> Int64[Tensor, "M"]:
        """The ids of all entries of at least `floor`, ascending."""
        blocks = (self.maxima >= floor).nonzero().flatten()
        if blocks.shape[0] > 8 * _SMALL // _BLOCK:  # most of the row is open: one mask is cheaper than that many
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
        start = int(self.maxima.argmax()) * _BLOCK
        return start + int(self.values[start : start + _BLOCK].argmax())


def _keep_above(law: Law, floor: float, row: _Row) -> Law:
    """The law without entries below `floor`: sparse if few are left, else whole with -inf in the gaps."""
    if floor == -math.inf:
        return law
    ids, x, size = law
    if ids is not None:
        kept = x >= floor
        return Law(ids[kept], x[kept], size)
    if int((row.maxima >= floor).sum()) * _BLOCK <= 8 * _SMALL:
        few = row.above(floor)
        few = few[x[few] >= floor]  # the row may be from before the last filter
        if few.shape[0] <= _SMALL:
            return Law(few, x[few], size)
    return Law(None, threshold(x, _below(floor, x), -math.inf), size)


def _below(value: float, like: Tensor) -> float:
    """The next smaller number of the tensor's type: `x >= value` is `x > _below(value)`."""
    return torch.nextafter(like.new_tensor(value), like.new_tensor(-math.inf)).item()


def _top_p(law: Law, top_p: float, row: _Row) -> Law:
    """The law cut to its nucleus: a token stays if the mass of those before it is less than `top_p`.

    Before means likelier, or as likely with a lower id. Three ways of finding the border, by how far down it lies:
    all of a small law, the upper tokens of a peaked one, a search by value in a flat one. None sorts a vocabulary.
    """
    ids, x, size = law
    if x.shape[0] <= _SMALL:
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
        if upper.shape[0] <= _SMALL and mass > goal * (1 + 1e-5):
            kept = upper[_nucleus(x[upper], weights[upper], goal)]
            return Law(kept if ids is None else ids[kept], x[kept], size)
    return Law(ids, _flat_nucleus(x, weights, total, goal), size)


def _nucleus(
    x: Float[Tensor, "M"], weights: Float[Tensor, "M"], goal: float, reached: float = 0.0
) -> Int64[Tensor, "_"]:
    """Indices, ascending, of the largest entries up to and with the one whose mass reaches the goal."""
    if x.shape[0] <= 4 * _BLOCK:  # ten tensor calls cost more than that many numbers
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
        near = _Row((w - middle).abs_().neg_()).above(-half - 1e-6 * (middle + half))  # and rounding
        weights = w[near]
        return near[(weights > self.low) & (weights <= self.high)]


def _filtered(x: Float[Tensor, "V"], params: SamplingParams) -> Law:
    """The law of scaled logits after top-k, top-p and min-p, in this order, each on what the one before left."""
    row = _Row(x)
    peak = _checked_peak(row)
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


def _checked_peak(row: _Row) -> float:
    """The row's largest value; refuses rows that are no law."""
    peak = float(row.maxima.amax())
    if math.isnan(peak):
        raise BadLogits(
            "the logits hold NaN at a position that was reached, and numbers are needed; check the weights, and the "
            "dtype: float16 overflows where bfloat16 does not"
        )
    if peak == -math.inf:
        raise BadLogits("no token is left at a position that was reached; loosen logit_bias or the penalties")
    return peak


# -- one request's settings, bound to its text -------------------------------------------------------------------------


class Sampler:
    """One request's settings bound to its text: what the target's logits at a node mean, given the path to it.

    The order is that of `transformers`: bias, repetition, presence and frequency penalty, temperature, top-k, top-p,
    min-p. Penalties see prompt + emitted text + path, so a drafted token is judged by the prefix it really has.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int], draws: "Draws | None" = None
    ) -> None:
        self.params, self.vocab_size = params, vocab_size
        self.draws = draws or Draws(fresh_seed() if params.seed is None else params.seed)
        bias = params.logit_bias or {}
        for name, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids), ("the prompt", prompt_ids)):
            self._check(name, ids)
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float64)
        self._counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._repeats = params.repetition_penalty != 1.0
        self._slot: dict[int, int] = {}
        self._seen = torch.zeros(64, dtype=torch.int64)
        self._count = torch.zeros(64, dtype=torch.float64)
        if self._repeats:
            for token in dict.fromkeys(prompt_ids):
                self._slot_of(token)

    def _check(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise BadRequest(f"{name} holds token id {token}; the vocabulary has ids 0 to {self.vocab_size - 1}")

    def _slot_of(self, token: int) -> int:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == self._seen.shape[0]:
            self._seen = torch.cat([self._seen, torch.zeros_like(self._seen)])
            self._count = torch.cat([self._count, torch.zeros_like(self._count)])
        self._seen[slot] = token
        return slot

    def extend(self, ids: Iterable[int]) -> None:
        """Takes note of tokens that were emitted."""
        if self._repeats or self._counts_output:
            for token in ids:
                self._count[self._slot_of(token)] += 1

    def law(self, logits: Float[Tensor, "V"], path: Sequence[int] = ()) -> Law:
        """The target's law at one node, from its raw logits and the drafted tokens between emitted text and node.

        Raises BadLogits when the row holds NaN or no token is left; one infinite logit is that token for certain.
        """
        if tuple(logits.shape) != (self.vocab_size,):
            raise BadRequest(f"logits are {list(logits.shape)}; one row of {self.vocab_size} is needed")
        return self._law(self._edited(logits, path))

    def log_law(self, logits: Float[Tensor, "*B V"], path: Sequence[int] = ()) -> Float[Tensor, "*B V"]:
        """The same settings on a drafter's logits: log-probabilities over all V, -inf where a token was removed."""
        rows = [self._law(self._edited(row, path)).log_probs() for row in logits.reshape(-1, logits.shape[-1])]
        return torch.stack(rows).view(logits.shape)

    def rank(self, logits: Float[Tensor, "*B V"], path: Sequence[int], position: int) -> Float[Tensor, "*B V"]:
        """Keys to sort drafted candidates by: log-law + noise of the position, or processed logits if greedy.

        Removed tokens come last but never at -inf, so that a top-k of the keys always finds candidates. The noise is
        rounded to float32 here: that may swap two nearly equal guesses, and no emitted token ever.
        """
        rows = [self._rank(row, path, position) for row in logits.reshape(-1, logits.shape[-1])]
        return torch.stack(rows).view(logits.shape)

    def _rank(self, logits: Float[Tensor, "V"], path: Sequence[int], position: int) -> Float[Tensor, "V"]:
        x = self._edited(logits, path)
        if not self.params.is_greedy:
            x = self._tempered(x)
            law = _filtered(x, self.params)
            noise = self.draws.rough_noise(position, x.shape[0], x.device)
            keys = x + noise
            if law.ids is not None:
                x = (keys - _LAST).index_copy_(0, law.ids, keys[law.ids])
            else:
                x = torch.where(law.logits == -math.inf, keys - _LAST, keys)
        return x.nan_to_num(nan=-_LAST * _LAST, posinf=_LAST * _LAST, neginf=-_LAST * _LAST)

    def _law(self, x: Float[Tensor, "V"]) -> Law:
        if not self.params.is_greedy:
            return _filtered(self._tempered(x), self.params)
        row = _Row(x)
        _checked_peak(row)
        best = torch.tensor([row.argmax()], device=x.device)
        return Law(best, torch.zeros(1, dtype=x.dtype, device=x.device), x.shape[0])

    def _tempered(self, x: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        return x if self.params.temperature == 1.0 else x / self.params.temperature

    def _edited(self, logits: Float[Tensor, "V"], path: Sequence[int]) -> Float[Tensor, "V"]:
        """The logits in float32 or float64 after bias and penalties; touches seen ids only, never its input."""
        x = logits.detach()
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        if not (self._repeats or self._counts_output or self._bias_ids.shape[0]):
            return x
        x = x.clone() if x.data_ptr() == logits.data_ptr() else x
        x.index_add_(0, *self._fit(self._bias_ids, self._bias, x))
        if self._repeats or self._counts_output:
            more = Counter(path)
            ids = torch.tensor(list(more), dtype=torch.int64)
            base = [self._count[self._slot[token]].item() if token in self._slot else 0.0 for token in more]
            count = torch.tensor([old + new for old, new in zip(base, more.values(), strict=True)], dtype=torch.float64)
            ids, count = self._fit(ids, count, x)
            drafted = self._penalised(x[ids], count)
            used = len(self._slot)
            seen, times = self._fit(self._seen[:used], self._count[:used], x)
            x[seen] = self._penalised(x[seen], times)
            x[ids] = drafted
        return x

    def _fit(
        self, ids: Int64[Tensor, "M"], values: Float64[Tensor, "M"], x: Float[Tensor, "V"]
    ) -> tuple[Int64[Tensor, "_"], Float[Tensor, "_"]]:
        """Ids and values on the row's device and of its type, without ids that a narrower draft vocabulary lacks."""
        if x.shape[0] < self.vocab_size:
            values = values[ids < x.shape[0]]
            ids = ids[ids < x.shape[0]]
        return ids.to(x.device), values.to(x)

    def _penalised(self, x: Float[Tensor, "M"], count: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
        """x/r or x*r for every seen token, then minus frequency * count and presence * [count > 0] (vLLM's formula)."""
        params, most = self.params, torch.finfo(x.dtype).max
        if self._repeats:
            x = torch.where(x < 0, x * params.repetition_penalty, x / params.repetition_penalty)
        if self._counts_output:
            x = x - count * min(max(params.frequency_penalty, -most), most)  # no 0 * inf, whatever was asked
            x = x - (count > 0).to(x) * min(max(params.presence_penalty, -most), most)
        return x


_LAST = 1e5
"""Pushes removed tokens behind all others in a ranking; float32 still tells them apart among themselves."""


# -- randomness --------------------------------------------------------------------------------------------------------


def fresh_seed() -> int:
    """64 bits from the operating system, for a request that gave no seed."""
    return int.from_bytes(os.urandom(8), "little")


class Draws:
    """The only source of randomness of one request: counter-based, so nothing depends on what was drawn before.

        noise   (seed, sample, position, token id)        what the coupled rule emits: Gumbel, one per token
        draft   (seed, sample, pass, index)               what IID and DISTINCT drafters draw with
        accept, pick   (seed, sample, pass, index)        what the block and standard rules draw with

    A Gumbel is g = -log(-log1p(-u)) with u = (word + 1/2) / 2^53, in float64, and finite for every word.
    """

    def __init__(self, seed: int, sample: int = 0) -> None:
        self.seed, self.sample = seed % 2**64, sample
        self._pass = 0
        self._index: Counter[str] = Counter()

    def next_pass(self) -> None:
        """Starts the draws of the next target pass."""
        self._pass += 1
        self._index.clear()

    # -- noise by position -------------------------------------------------------------------------------------

    def noise_words(
        self,
        position: int,
        ids: Int64[Tensor, "M"] | None = None,
        vocab_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> Int64[Tensor, "M"]:
        """53 random bits for each asked token id: exact integers, the same on every device and for every V."""
        return _words(_hashed(ids, vocab_size, device), self._keys("noise", position))

    def noise(
        self,
        position: int,
        ids: Int64[Tensor, "M"] | None = None,
        vocab_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> Float64[Tensor, "M"]:
        """Gumbel noise of a position for the asked token ids, or for all of them up to `vocab_size`.

        A drafter with its own vocabulary asks with *target* ids, or the coupling is lost unseen.
        """
        return _gumbel(self.noise_words(position, ids, vocab_size, device))

    def rough_noise(
        self, position: int, vocab_size: int, device: torch.device | str | None = None
    ) -> Float[Tensor, "V"]:
        """`noise` in float32 at a quarter of its cost, to 1e-5 where it is positive: good for ranking guesses."""
        high = _mixed(_hashed(None, vocab_size, device), self._keys("noise", position)[:3])
        return high.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-1 + 2.0**-24).log1p_().neg_().log_().neg_()

    def choose(self, law: Law, position: int) -> int:
        """argmax over v of law.logits[v] + noise(position)[v] in float64, the lowest id on an exact tie.

        This is an exact draw from the law (Gumbel-max), and the same token whoever asks.
        """
        ids, x = law.ids, law.logits
        if x.shape[0] == 1:
            return 0 if ids is None else int(ids[0])
        keys = self._keys("noise", position)
        if x.shape[0] > _FEW:
            places = _contenders(law, keys)
            x, ids = x[places], places if ids is None else ids[places]
        tokens = list(range(x.shape[0])) if ids is None else [int(token) for token in ids.tolist()]
        scores = [logit + _gumbel_of(_word_of(token, keys)) for token, logit in zip(tokens, x.tolist(), strict=True)]
        return tokens[scores.index(max(scores))]

    # -- streams -----------------------------------------------------------------------------------------------

    def accept(self, probability: float) -> bool:
        """True with this probability: always at 1, never at 0."""
        return self._uniform("accept") < probability

    def pick(self, law: Float[Tensor, "V"]) -> int:
        """A token id drawn from a law; the law need not be normalised."""
        return _inverse_cdf(law, self._uniform("pick"))

    def draft(self, law: Float[Tensor, "V"]) -> int:
        """A token id for a drafter, independent of the noise and of accept and pick."""
        return _inverse_cdf(law, self._uniform("draft"))

    def draft_noise(self, vocab_size: int, device: torch.device | str | None = None) -> Float64[Tensor, "V"]:
        """A Gumbel vector for a drafter: the k largest of log q + it are k draws from q without replacement."""
        keys = self._keys("draft noise", self._pass, self._next("draft noise"))
        return _gumbel(_words(_hashed(None, vocab_size, device), keys))

    def _next(self, purpose: str) -> int:
        self._index[purpose] += 1
        return self._index[purpose] - 1

    def _digest(self, purpose: str, first: int, second: int = 0) -> bytes:
        counter = struct.pack("<QQqq", self.seed, self.sample, first, second)
        return hashlib.blake2b(counter, digest_size=24, person=purpose.encode()).digest()

    def _uniform(self, purpose: str) -> float:
        digest = self._digest(purpose, self._pass, self._next(purpose))
        return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53

    def _keys(self, purpose: str, first: int, second: int = 0) -> tuple[int, ...]:
        return struct.unpack("<6i", self._digest(purpose, first, second))


def _inverse_cdf(law: Float[Tensor, "V"], uniform: float) -> int:
    mass = law.double().cumsum(0)
    at = int(torch.searchsorted(mass, uniform * float(mass[-1]), right=True))
    # uniform * total can round up to the total: the last token with any mass is meant
    return at if at < mass.shape[0] else int(torch.searchsorted(mass, float(mass[-1])))


def _hashed(
    ids: Int64[Tensor, "M"] | None, vocab_size: int | None, device: torch.device | str | None
) -> Int32[Tensor, "M"]:
    if ids is not None:
        return _hash(ids)
    if vocab_size is None:
        raise BadRequest("neither token ids nor vocab_size were given; noise needs one of them")
    return _hashed_vocabulary(vocab_size, str(device or "cpu"))


@lru_cache(maxsize=8)
def _hashed_vocabulary(vocab_size: int, device: str) -> Int32[Tensor, "V"]:
    return _hash(torch.arange(vocab_size, device=device))


def _hash(ids: Int64[Tensor, "M"]) -> Int32[Tensor, "M"]:
    scattered: Tensor = _scattered(ids)
    return scattered.to(torch.int32)


def _scattered(x: Any) -> Any:
    """A fixed bijection of 32-bit numbers (triple32), for a tensor or a number: neighbours stop being so."""
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 14)


_FACTORS = (0x21F0AAAD, 0xD35A2D97)


def _mixed(hashed: Int32[Tensor, "M"], keys: Sequence[int]) -> Int32[Tensor, "M"]:
    """31 random bits for each token under three keys: add a key, fold, multiply and so on, mod 2^32.

    Torch shifts are arithmetic, so x ^ (x >> s) folds x and ~x together and clears the sign: each value has exactly
    two sources, so uniform stays uniform, and the result is ready to be read as a number.
    """
    x = hashed + keys[0]
    spare = torch.empty_like(x)
    x ^= torch.bitwise_right_shift(x, 16, out=spare)
    for key, factor in zip(keys[1:], _FACTORS, strict=True):
        factor -= 2**32 * (factor >> 31)
        torch.add(torch.tensor(key, dtype=torch.int32), x, alpha=factor, out=x)  # key + factor * x in one pass
        x ^= torch.bitwise_right_shift(x, 15, out=spare)
    return x


def _words(hashed: Int32[Tensor, "M"], keys: Sequence[int]) -> Int64[Tensor, "M"]:
    """53 bits: 31 under the first three keys, 22 under the others."""
    upper, lower = _mixed(hashed, keys[:3]).long(), _mixed(hashed, keys[3:]).long()
    return upper.bitwise_left_shift_(22).bitwise_or_(lower.bitwise_right_shift_(9))


def _gumbel(words: Int64[Tensor, "M"]) -> Float64[Tensor, "M"]:
    u = words.double().add_(0.5).mul_(-(2.0**-53))
    u.clamp_(min=2.0**-53 - 1)  # the largest word plus a half rounds up to 1
    return u.log1p_().neg_().log_().neg_()


def _word_of(token: int, keys: Sequence[int]) -> int:
    """The word of one token; for the few that matter this is faster than thirty tensor calls."""
    hashed, halves = _scattered(token), []
    for first, *others in (keys[:3], keys[3:]):
        x = (hashed + first) & 0xFFFFFFFF
        x = min(x, x ^ 0xFFFFFFFF)
        x ^= x >> 16
        for key, factor in zip(others, _FACTORS, strict=True):
            x = (x * factor + key) & 0xFFFFFFFF
            x = min(x, x ^ 0xFFFFFFFF)
            x ^= x >> 15
        halves.append(x)
    return int(halves[0] << 22 | halves[1] >> 9)


def _gumbel_of(word: int) -> float:
    """The same as `_gumbel` to the last bit or next to it; whatever is emitted is decided by this one alone."""
    return -math.log(-math.log1p(-min((word + 0.5) * 2.0**-53, 1 - 2.0**-53)))


def _contenders(law: Law, keys: Sequence[int]) -> Int64[Tensor, "_"]:
    """The few places in a law, ascending, where law.logits + noise can be largest, found without making the noise.

    The first 31 bits h of a word bound its Gumbel: u >= h/2^31 and -log1p(-u) >= u give g <= 31 log 2 - log h.
    The bits of float32(h), read as an integer, are 2^23 (127 + a chord of log2 h), and a chord lies below its curve.
    So x - bits * log(2)/2^23 bounds the score up to a constant. The best bound's own score is reached; every place
    whose bound stays below that is out.
    """
    ids, x = law.ids, law.logits
    hashed = _hashed(None, law.vocab_size, x.device)
    high = _mixed(hashed if ids is None else hashed[ids], keys[:3])
    bits = high.float().view(torch.int32)
    bound = high.view(torch.float32).copy_(bits)  # in place throughout: one more buffer would not fit the L2 cache
    row = _Row(torch.add(x.float(), bound, alpha=-math.log(2) / 2**23, out=bound))
    best = row.argmax()
    reached = float(x[best]) + _gumbel_of(_word_of(best if ids is None else int(ids[best]), keys))
    constant = (127 + 31) * math.log(2)
    # float32 rounding of the bound, of h and of a float64 x: 2^-20 of the numbers involved is several times too much
    slack = 2.0**-20 * (abs(reached) + abs(float(bound[best])) + 4 * constant)
    return row.above(reached - constant - slack)
