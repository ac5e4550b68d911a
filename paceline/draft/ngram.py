"""Prompt lookup: what followed the last few tokens the last time they stood in this text.

The smallest real drafter, read as the example of the contract. For n from long to short, the n tokens that end in the
pending one are looked up among all n-grams before it; the most recent place wins, and what follows it is the draft.

    … a b c d e f …… b c      longest match "b c", most recent place    draft: d e f …

A dictionary per n keeps the most recent place of every n-gram, so a look-up costs the same at any context length
(Saxena 2023; also known as n-gram speculation).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.draft.base import Ask, Drafter, Step
from paceline.errors import BadRequest
from paceline.tree import TokenTree

CHANCE = 0.8
"""How likely a copied token is to be right if those before it were."""


@dataclass
class Text:
    """The committed tokens of one sequence and where each n-gram last ended."""

    ids: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class Ngram(Drafter[Text]):
    """Copies from prompt and output.

    Args:
        prompt_lookup_max: longest n-gram to look for.
        prompt_lookup_min: shortest one.
    """

    def __init__(self, prompt_lookup_max: int = 5, prompt_lookup_min: int = 1) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise BadRequest(
                f"prompt_lookup_min={prompt_lookup_min} and prompt_lookup_max={prompt_lookup_max} were given; "
                "1 <= min <= max is needed"
            )
        self.longest, self.shortest = prompt_lookup_max, prompt_lookup_min

    def begin(self, prompt: Step) -> Text:
        """Index the prompt's first chunk."""
        text = Text()
        self._extend(text, prompt.tokens)
        return text

    def propose(self, states: list[Text], asks: list[Ask]) -> list[TokenTree]:
        """A chain per sequence: what followed the longest, most recent match."""
        return [
            TokenTree.chain(ask.pending, self.lookup(text, [ask.pending], min(ask.budget, ask.depth)))
            for text, ask in zip(states, asks, strict=True)
        ]

    def observe(self, states: list[Text], steps: list[Step]) -> None:
        """Index what was kept."""
        for text, step in zip(states, steps, strict=True):
            self._extend(text, step.tokens)

    def ahead(self, state: Text, pending: int, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """What followed the longest match behind the guesses, each token as likely to be right as the one before."""
        found = self.lookup(state, [pending, *path], count)
        return [(token, CHANCE**i) for i, token in enumerate(found, 1)]

    def lookup(self, text: Text, last: list[int], count: int) -> list[int]:
        """At most `count` tokens that followed the last place of the longest n-gram that ends in the `last` tokens.

        Args:
            last: the pending token, and guesses behind it.
        """
        if count < 1:
            return []
        tail = (*text.ids[max(0, len(text.ids) - self.longest + 1) :], *last)[-self.longest :]
        for n in range(len(tail), self.shortest - 1, -1):
            end = text.ends.get(tail[-n:])
            if end is not None:
                # The last tokens are text too: they follow the committed ones.
                return [*text.ids[end + 1 : end + 1 + count], *last][:count]
        return []

    def _extend(self, text: Text, tokens: list[int]) -> None:
        ids, ends = text.ids, text.ends
        for token in tokens:
            ids.append(token)
            size = len(ids)
            for n in range(self.shortest, min(self.longest, size) + 1):
                ends[tuple(ids[size - n :])] = size - 1
