"""A drafter that does what it is told, right or wrong."""

from collections.abc import Callable, Sequence

import torch

from paceline.draft.base import Ask, Drafter, Step
from paceline.tree import TokenTree

Script = Callable[[list[int]], TokenTree | Sequence[Sequence[int]]]
"""A text so far, its pending token last -> what to draft: a tree rooted there, or paths below it."""


class ScriptedTree(Drafter[list[int]]):
    """A drafter that proposes what a function of the text says, be it right, wrong or wild.

    `ScriptedTree(lambda ids: [[1, 2], [1, 3]])` drafts two continuations that share their first token, in every step.
    Paths become a trie, and are said to be sure; a `TokenTree` is handed over as it is, whatever it holds.

    Args:
        script: text so far, pending token included -> paths below it, or a whole tree.
    """

    def __init__(self, script: Script) -> None:
        self.script = script

    def begin(self, prompt: Step) -> list[int]:
        """The state is the committed text."""
        return list(prompt.tokens)

    def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
        """What the script says for each text."""
        return [self._tree([*text, ask.pending]) for text, ask in zip(states, asks, strict=True)]

    def observe(self, states: list[list[int]], steps: list[Step]) -> None:
        """The text grows."""
        for text, step in zip(states, steps, strict=True):
            text += step.tokens

    def _tree(self, ids: list[int]) -> TokenTree:
        drafted = self.script(ids)
        if isinstance(drafted, TokenTree):
            return drafted
        tree = TokenTree.from_paths(ids[-1], drafted)
        return TokenTree(tree.tokens, tree.parents, score=torch.ones(tree.num_nodes))
