"""The settings that change logits by the text before them, each on its own: bias, penalties and bans.

An edit holds what it needs of prompt and emitted text, grown token by token; the drafted tokens of a path are laid
over it for one call. So a drafted token is judged by the text it really follows, and no call reads the whole text.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from paceline.params import SamplingParams


class Edit(ABC):
    """One setting, bound to one text."""

    name: str
    """The setting, or settings, as users know them."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> None:
        """Change a row in place, for the position behind the text and a path; V may be a drafter's, and narrower."""

    def extend(self, ids: Sequence[int]) -> None:  # noqa: B027 - most have nothing to note
        """Take note of tokens that were emitted."""


def edits_of(
    params: SamplingParams,
    vocab_size: int,
    prompt_ids: Sequence[int],
    ends: Iterable[int],
    bad_words: Sequence[Sequence[int]],
) -> list[Edit]:
    """The active settings, in the order in which they act."""
    edits: list[Edit] = []
    if params.logit_bias:
        edits.append(Bias(params.logit_bias))
    if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        edits.append(Penalties(params, vocab_size, prompt_ids))
    if params.no_repeat_ngram_size:
        edits.append(NGrams(params.no_repeat_ngram_size, prompt_ids))
    if bad_words:
        edits.append(BadWords(bad_words, prompt_ids))
    if params.allowed_token_ids is not None:
        edits.append(Allowed(params.allowed_token_ids))
    if params.min_tokens:
        edits.append(MinTokens(params.min_tokens, ends))
    return edits


class Bias(Edit):
    """Adds to the logits of some tokens."""

    name = "logit_bias"

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.ids = torch.tensor(list(bias), dtype=torch.int64)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float64)

    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> None:
        inside = self.ids < x.shape[0]
        x.index_add_(0, self.ids[inside].to(x.device), self.values[inside].to(x))


class Penalties(Edit):
    """Repetition penalty over prompt, text and path; presence and frequency penalty over text and path."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int]) -> None:
        self.params, self.vocab_size = params, vocab_size
        self.repeats = params.repetition_penalty != 1.0
        self.counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        self.name = " and ".join(n for n in names if getattr(params, n) != (1.0 if n == names[0] else 0.0))
        self._slot: dict[int, int] = {}
        self._seen = torch.zeros(64, dtype=torch.int64)
        self._count = torch.zeros(64, dtype=torch.float64)
        if self.repeats:
            for token in dict.fromkeys(prompt_ids):
                self._slot_of(token)

    def _slot_of(self, token: int) -> int:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == self._seen.shape[0]:
            self._seen = torch.cat([self._seen, torch.zeros_like(self._seen)])
            self._count = torch.cat([self._count, torch.zeros_like(self._count)])
        self._seen[slot] = token
        return slot

    def extend(self, ids: Sequence[int]) -> None:
        for token in ids:
            slot = self._slot_of(token)  # first: it may give the counts a larger tensor
            self._count[slot] += 1

    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> None:
        """Touches seen ids only."""
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
        if self.repeats:
            x = torch.where(x < 0, x * params.repetition_penalty, x / params.repetition_penalty)
        if self.counts:
            x = x - count * min(max(params.frequency_penalty, -most), most)  # no 0 * inf, whatever was asked
            x = x - (count > 0).to(x) * min(max(params.presence_penalty, -most), most)
        return x


class NGrams(Edit):
    """Bans every token that would complete an n-gram the text already has, as `transformers` does."""

    name = "no_repeat_ngram_size"

    def __init__(self, size: int, prompt_ids: Sequence[int]) -> None:
        self.before = size - 1
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._tail: list[int] = []
        """The last n - 1 tokens of the text."""
        self.extend(prompt_ids)

    def extend(self, ids: Sequence[int]) -> None:
        text = [*self._tail, *ids]
        for start, token in zip(range(len(text) - self.before), text[self.before :]):
            self._next.setdefault(tuple(text[start : start + self.before]), set()).add(token)
        self._tail = text[max(0, len(text) - self.before) :]

    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> None:
        text = [*self._tail, *path]
        if len(text) < self.before:
            return
        now = text[len(text) - self.before :]
        # n-grams that end on the path: those are not indexed
        drafted = {
            token
            for start, token in zip(range(len(text) - self.before), text[self.before :])
            if text[start : start + self.before] == now
        }
        _ban(x, drafted | self._next.get(tuple(now), set()))


class BadWords(Edit):
    """Bans the last token of every banned sequence where the ones before it stand, as `transformers` does."""

    name = "bad_words"

    def __init__(self, words: Sequence[Sequence[int]], prompt_ids: Sequence[int]) -> None:
        self._last: dict[int, dict[tuple[int, ...], set[int]]] = {}
        """Length of what comes before -> what comes before -> last tokens."""
        for *before, last in words:
            self._last.setdefault(len(before), {}).setdefault(tuple(before), set()).add(last)
        self._longest = max(self._last)
        self._tail: list[int] = []
        self.extend(prompt_ids)

    def extend(self, ids: Sequence[int]) -> None:
        text = [*self._tail, *ids]
        self._tail = text[max(0, len(text) - self._longest) :]

    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> None:
        text = [*self._tail, *path]
        found = [
            self._last[length].get(tuple(text[len(text) - length :]), ())
            for length in self._last
            if length <= len(text)
        ]
        _ban(x, chain.from_iterable(found))


class Allowed(Edit):
    """Bans all tokens but some."""

    name = "allowed_token_ids"

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = torch.tensor(sorted(set(ids)), dtype=torch.int64)

    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> None:
        ids = self.ids[self.ids < x.shape[0]].to(x.device)
        kept = x[ids]
        x.masked_fill_(x == x, -math.inf)  # not NaN
        x[ids] = kept


class MinTokens(Edit):
    """Bans what ends the text until enough of it is there."""

    name = "min_tokens"

    def __init__(self, left: int, ends: Iterable[int]) -> None:
        self.left, self.ends = left, sorted(ends)

    def extend(self, ids: Sequence[int]) -> None:
        self.left -= len(ids)

    def __call__(self, x: Float[Tensor, "V"], path: Sequence[int]) -> None:
        if len(path) < self.left:
            _ban(x, self.ends)


def _ban(x: Float[Tensor, "V"], ids: Iterable[int]) -> None:
    """-inf for these tokens; NaN stays, or a broken row would pass for a law."""
    inside = torch.tensor([token for token in ids if token < x.shape[0]], dtype=torch.int64, device=x.device)
    values = x[inside]
    x[inside] = values.masked_fill_(values == values, -math.inf)
