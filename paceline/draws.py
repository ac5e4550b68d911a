"""All randomness of a request: noise by position for what is emitted, streams for drafts and for the other rules."""

import hashlib
import math
import os
import struct
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor

from paceline.errors import BadRequest
from paceline.laws import Law, Row, likeliest

_FEW = 24
"""Up to this many, plain Python numbers are faster than tensors."""
_SURPLUS = 8
"""Places tried beyond those asked for, so that the bound for the rest is tight."""


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

    def choose(self, law: Law, position: int) -> int:
        """argmax over v of law.logits[v] + noise(position)[v] in float64, the lowest id on an exact tie.

        This is an exact draw from the law (Gumbel-max), and the same token whoever asks.
        """
        ids, x = law.ids, law.logits
        if x.shape[0] == 1:
            return 0 if ids is None else int(ids[0])
        tokens, scores = self._scored(law, position, 1)
        return tokens[scores.index(max(scores))]

    def best(self, law: Law, position: int, count: int) -> list[tuple[int, float]]:
        """The `count` tokens with the largest law.logits + noise, best first, and these sums; the first is `choose`'s.

        Exact in float64, the lowest id first on an exact tie, and never a token at -inf: there may be fewer.
        """
        tokens, scores = self._scored(law, position, count)
        ranked = sorted(zip(tokens, scores, strict=True), key=lambda pair: -pair[1])  # stable: the lower id first
        return [(token, score) for token, score in ranked[:count] if score > -math.inf]

    def _scored(self, law: Law, position: int, count: int) -> tuple[list[int], list[float]]:
        """Some ids of a law, ascending, with logit + noise; the `count` best of the law are among them."""
        ids, x, keys = law.ids, law.logits, self._keys("noise", position)
        if x.shape[0] > _FEW:
            places = _contenders(law, keys, count)
            x, ids = x[places], places if ids is None else ids[places]
        tokens = list(range(x.shape[0])) if ids is None else [int(token) for token in ids.tolist()]
        return tokens, [logit + _gumbel_of(_word_of(token, keys)) for token, logit in zip(tokens, x.tolist())]

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

    def distinct(self, law: Float[Tensor, "V"], count: int) -> list[int]:
        """`count` token ids drawn from a law without replacement, in the order drawn; fewer if fewer have any mass.

        The k largest of log law + Gumbel noise are such draws (Efraimidis and Spirakis; Kool et al. 1903.06059).
        """
        keys = law.double().log() + self.draft_noise(law.shape[0], law.device)
        best = keys.topk(min(count, law.shape[0]))
        drawn = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [int(token) for token, key in drawn if key > -math.inf]

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


def _contenders(law: Law, keys: Sequence[int], count: int) -> Int64[Tensor, "_"]:
    """Places in a law, ascending, with the `count` largest law.logits + noise among them, found without all the noise.

    The first 31 bits h of a word bound its Gumbel: u >= h/2^31 and -log1p(-u) >= u give g <= 31 log 2 - log h.
    The bits of float32(h), read as an integer, are 2^23 (127 + a chord of log2 h), and a chord lies below its curve.
    So x - bits * log(2)/2^23 bounds the score up to a constant. The `count` best of any places reach their own scores;
    every place whose bound stays below the last of these is out. Places at -inf may be left out.
    """
    ids, x = law.ids, law.logits
    hashed = _hashed(None, law.vocab_size, x.device)
    high = _mixed(hashed if ids is None else hashed[ids], keys[:3])
    bits = high.float().view(torch.int32)
    bound = high.view(torch.float32).copy_(bits)  # in place throughout: one more buffer would not fit the L2 cache
    row = Row(torch.add(x.float(), bound, alpha=-math.log(2) / 2**23, out=bound))
    tried = [row.argmax()] if count == 1 else likeliest(bound, count + _SURPLUS)
    if count > len(tried) or float(bound[tried[count - 1]]) == -math.inf:
        return (x > -math.inf).nonzero().flatten()  # fewer tokens than that, or beyond float32
    tokens = tried if ids is None else ids[tried].tolist()
    scores = [logit + _gumbel_of(_word_of(token, keys)) for token, logit in zip(tokens, x[tried].tolist(), strict=True)]
    reached = sorted(scores, reverse=True)[count - 1]
    constant = (127 + 31) * math.log(2)
    # float32 rounding of the bound, of h and of a float64 x: 2^-20 of the numbers involved is several times too much
    slack = 2.0**-20 * (abs(reached) + abs(reached - constant) + 4 * constant)
    return row.above(reached - constant - slack)
