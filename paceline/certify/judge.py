"""Near-tie or bug: the judge for texts that should be the same and are not.

Two forwards that add the same numbers in another order differ in the last bits, and where two tokens are almost equally
good the last bits decide. That is a *near-tie*; anything else is a bug. The judge measures instead of assuming: the
floor is how much the unmodified `transformers` forward differs from itself on the very same prefix when the last token
is read alone and when the prefix is read at once (no cache, mask or kernel of ours is involved). A difference passes
only if logits within that floor, put through the request's whole sampler, filters and noise included, yield the other
token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from paceline.errors import BadLogits
from paceline.sampling import Draws, Sampler, SamplingParams


@dataclass(frozen=True)
class Difference:
    """Two runs of one request part at a token."""

    index: int
    """Which emitted token, from 0."""
    expected: int
    """The id without speculation, or -1 when that text had ended."""
    got: int
    """The id with it, or -1."""
    logit_expected: float
    logit_got: float
    floor: float
    """Largest difference of a logit between the two widths of the unmodified forward, at this position."""
    near_tie: bool
    """Whether logits within the floor yield either id; False is a bug."""


def floor(model: PreTrainedModel, prefix: Sequence[int]) -> tuple[Float[Tensor, "V"], float]:
    """The next token's logits by the unmodified forward, and by how much its two widths differ there.

    Args:
        model: as `transformers` loads it, not one that became a target.
        prefix: at least one id.
    """
    ids = torch.tensor([list(prefix)], device=model.device)
    call: Any = model
    with torch.inference_mode():
        whole = call(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        alone = whole
        if ids.shape[1] > 1:
            before = call(ids[:, :-1], use_cache=True, logits_to_keep=1)
            alone = call(ids[:, -1:], cache=before.cache, use_cache=True).logits[0, -1]
    return alone, float((alone.double() - whole.double()).abs().max())


def reachable(
    logits: Float[Tensor, "V"], size: float, token: int, sampler: Sampler, path: Sequence[int], position: int
) -> bool:
    """Whether some logits within `size` of these make the whole sampler choose `token`.

    The logits tried are the extreme ones that favour it: it up and all others down; it up and the present winner
    down; and, since a filter may have to lose the winner, it up, those above the winner up, the rest down.
    """
    x = logits.to(torch.float64)

    def choice(shift: Tensor) -> int:
        try:
            return sampler.draws.choose(sampler.law(x + size * shift, path), position)
        except BadLogits:
            return -1

    winner = choice(torch.zeros_like(x))
    if winner == token:
        return True
    down, mixed, above = -torch.ones_like(x), torch.zeros_like(x), torch.where(x > x[winner], 1.0, -1.0).to(x)
    mixed[winner] = -1.0
    for shift in (down, mixed, above):
        shift[token] = 1.0
        if choice(shift) == token:
            return True
    return False


def judge(
    model: PreTrainedModel,
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    params: SamplingParams,
    *,
    ends: frozenset[int] = frozenset(),
    encode: Callable[[str], list[list[int]]] | None = None,
) -> Difference | None:
    """The first difference of two outputs of one request and what it is; None when they are equal.

    Args:
        model: the target as `transformers` loads it, unmodified.
        params: with the seed that both runs had, unless greedy.
        ends: ids that end the text, for `min_tokens`.
        encode: reads the words of `bad_words`.
    """
    if list(expected) == list(got):
        return None
    index = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if index is None:
        # One text goes on where the other ended, though all its ids agree: rounding cannot do that.
        index = min(len(expected), len(got))
        ids = [text[index] if index < len(text) else -1 for text in (expected, got)]
        return Difference(index, ids[0], ids[1], float("nan"), float("nan"), 0.0, False)
    logits, size = floor(model, [*prompt, *expected[:index]])
    draws = None if params.seed is None else Draws(params.seed)
    sampler = Sampler(params, logits.shape[0], prompt, draws, ends=ends, encode=encode)
    sampler.extend(expected[:index])
    a, b, position = expected[index], got[index], len(prompt) + index
    near = all(reachable(logits, size, token, sampler, (), position) for token in (a, b))
    return Difference(index, a, b, float(logits[a]), float(logits[b]), size, near)


def differences(
    model: PreTrainedModel,
    generate: Callable[[list[int], int], Sequence[int]],
    prompt: Sequence[int],
    expected: Sequence[int],
    params: SamplingParams,
) -> Iterator[Difference]:
    """Every difference along one expected text: after each, generation starts again behind the expected token.

    Args:
        generate: (prompt ids, most tokens) -> ids with speculation, under the same params.
        params: without penalties, which would count a restart's prompt as output.
    """
    done = 0
    while done < len(expected):
        rest = list(expected[done:])
        found = judge(
            model, [*prompt, *expected[:done]], rest, generate([*prompt, *expected[:done]], len(rest)), params
        )
        if found is None:
            return
        yield found
        done += found.index + 1
