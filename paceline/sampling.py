"""One request's settings bound to its text: what the logits at a node mean, for the target and for its drafters.

raw logits -> edits (bias, penalties, bans) -> the user's processors -> temperature, top-k, top-p, min-p -> Law
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.draws import Draws, fresh_seed
from paceline.edits import edits_of
from paceline.errors import BadLogits, BadRequest
from paceline.laws import Law, Row, checked_peak, filtered, likeliest, log_mass, ranked
from paceline.params import SamplingParams
from paceline.processors import Processors

__all__ = ["Draws", "Law", "Sampler", "SamplingParams", "fresh_seed", "ranked"]

_LAST = 1e5
"""Taken from the keys of filtered tokens, so that they stand behind all others wherever keys are compared."""


class Sampler:
    """One request's settings bound to its text: what the target's logits at a node mean, given the path to it.

    The order is that of `transformers`: bias, repetition penalty, presence and frequency penalty,
    no_repeat_ngram_size, bad_words, allowed_token_ids, min_tokens, logits_processors, temperature, top-k, top-p,
    min-p. All see prompt + emitted text + path, so a drafted token is judged by the prefix it really has.

    Args:
        draws: the request's randomness; by default made from the params' seed.
        ends: ids that end the text, banned until there are `min_tokens` tokens.
        encode: the token sequences of a banned word; needed when `bad_words` holds strings.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int],
        draws: Draws | None = None,
        *,
        ends: frozenset[int] = frozenset(),
        encode: Callable[[str], list[list[int]]] | None = None,
    ) -> None:
        self.params, self.vocab_size = params, vocab_size
        self.draws = draws or Draws(fresh_seed() if params.seed is None else params.seed)
        words = _sequences(params.bad_words, encode)
        self._check("logit_bias", params.logit_bias or ())
        self._check("stop_token_ids", params.stop_token_ids)
        self._check("allowed_token_ids", params.allowed_token_ids or ())
        self._check("bad_words", (token for word in words for token in word))
        self._check("the prompt", prompt_ids)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise BadRequest(
                    f"{name} is {getattr(params, name)}; the vocabulary has {vocab_size} tokens, and -1 asks for all"
                )
        self._edits = edits_of(params, vocab_size, prompt_ids, ends, words)
        self._processors = Processors(params.logits_processors, prompt_ids) if params.logits_processors else None

    def _check(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise BadRequest(f"{name} holds token id {token}; the vocabulary has ids 0 to {self.vocab_size - 1}")

    def extend(self, ids: Sequence[int]) -> None:
        """Takes note of tokens that were emitted."""
        for edit in self._edits:
            edit.extend(ids)
        if self._processors is not None:
            self._processors.extend(ids)

    def law(self, logits: Float[Tensor, "V"], path: Sequence[int] = ()) -> Law:
        """The target's law at one node, from its raw logits and the drafted tokens between emitted text and node.

        Ask once per position that is decided: processors may count on it. Raises BadLogits when the row holds NaN, no
        token is left or a processor went wrong; one infinite logit is that token for certain.
        """
        if tuple(logits.shape) != (self.vocab_size,):
            raise BadRequest(f"logits are {list(logits.shape)}; one row of {self.vocab_size} is needed")
        x = self._edited(logits, path)
        if self._processors is not None:
            x = self._processors(x, path)
        try:
            return self._law(x)
        except BadLogits as error:
            if bool((x == -math.inf).all()):
                raise BadLogits(f"{error}: {self._emptied_by(logits, path)}") from None
            raise

    def log_law(self, logits: Float[Tensor, "*B V"], path: Sequence[int] = ()) -> Float[Tensor, "*B V"]:
        """The same settings on a drafter's logits, without processors: log-probabilities, -inf for removed tokens.

        V may be narrower or wider than the vocabulary; ids outside of it are removed. A row that is no law, as one
        with NaN, is all -inf: nothing to draft.
        """
        given = logits.reshape(-1, logits.shape[-1])
        found = torch.full_like(given, -math.inf, dtype=torch.promote_types(given.dtype, torch.float32))
        for log_probs, row in zip(found, given[:, : self.vocab_size]):
            try:
                log_probs[: row.shape[0]] = self._law(self._edited(row, path)).log_probs()
            except BadLogits:
                continue
        return found.view(logits.shape)

    def top(self, logits: Float[Tensor, "V"], path: Sequence[int], position: int, k: int) -> list[tuple[int, float]]:
        """A drafter's k best candidates for a position, best first, each with its key; the lowest id first on ties.

        The key is log-law + noise of the position, in float64: where both laws agree the first one is the token that
        the target will choose. Filtered tokens follow, by the key they had without filters, less 1e5; banned ones
        never come. When greedy it is the log-softmax of the edited logits. V may be narrower or wider than the
        vocabulary; a row with NaN has no candidates.
        """
        x = self._edited(logits[: self.vocab_size], path)
        if k < 1:
            return []
        try:
            return self._greedy_top(x, k) if self.params.is_greedy else self._sampled_top(x, position, k)
        except BadLogits:
            return []

    def _greedy_top(self, x: Float[Tensor, "V"], k: int) -> list[tuple[int, float]]:
        peak = checked_peak(Row(x))
        ids = likeliest(x, k)
        values = x[ids].tolist()
        if peak == math.inf:  # certain, as in a law
            share = -math.log(int((x == peak).sum()))
            keys = [share if value == peak else -math.inf for value in values]
        else:
            mass = log_mass(x)
            keys = [value - mass for value in values]
        return [(token, key) for token, value, key in zip(ids, values, keys) if value > -math.inf]

    def _sampled_top(self, x: Float[Tensor, "V"], position: int, k: int) -> list[tuple[int, float]]:
        x = self._tempered(x)
        law = filtered(x, self.params)
        mass = log_mass(law.logits)
        found = [(token, score - mass) for token, score in self.draws.best(law, position, k)]
        if len(found) < k:  # these are all that the filters left
            rest = x.index_fill(0, torch.tensor([token for token, _ in found], device=x.device), -math.inf)
            mass = log_mass(x) + _LAST
            others = self.draws.best(Law(None, rest, x.shape[0]), position, k - len(found))
            found += [(token, score - mass) for token, score in others]
        return found

    def _law(self, x: Float[Tensor, "V"]) -> Law:
        if not self.params.is_greedy:
            return filtered(self._tempered(x), self.params)
        row = Row(x)
        checked_peak(row)
        best = torch.tensor([row.argmax()], device=x.device)
        return Law(best, torch.zeros(1, dtype=x.dtype, device=x.device), x.shape[0])

    def _tempered(self, x: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        return x if self.params.temperature == 1.0 else x / self.params.temperature

    def _edited(self, logits: Float[Tensor, "V"], path: Sequence[int]) -> Float[Tensor, "V"]:
        """The logits in float32 or float64 after bias, penalties and bans; never changes its input."""
        x = _precise(logits)
        if self._edits:
            x = x.clone() if x.data_ptr() == logits.data_ptr() else x
            for edit in self._edits:
                edit(x, path)
        return x

    def _emptied_by(self, logits: Float[Tensor, "V"], path: Sequence[int]) -> str:
        """Who removed every token of a row, and what to do."""
        raw = _precise(logits)
        left = raw > -math.inf
        if not bool(left.any()):
            return "the model's own row is -inf everywhere; check the weights and the dtype"
        names = []
        for edit in self._edits:
            x = raw.clone()
            edit(x, path)
            if bool((x[left] == -math.inf).any()):
                names.append(edit.name)
        names = names or [edit.name for edit in self._edits]
        listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
        return f"{listed} removed all of them; loosen one"


def _precise(logits: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    x = logits.detach()
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _sequences(
    words: Sequence[str | Sequence[int]], encode: Callable[[str], list[list[int]]] | None
) -> list[Sequence[int]]:
    """Banned words as token sequences."""
    found: list[Sequence[int]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        if encode is None:
            raise BadRequest(
                f"bad_words holds {word!r}, and there is no tokenizer to read it with; give token ids, such as [[5, 7]]"
            )
        spelled = encode(word)
        if not spelled or not all(spelled):
            raise BadRequest(f"bad_words holds {word!r}, which is no token to this tokenizer; leave it out")
        found += spelled
    return found
