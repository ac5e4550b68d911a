"""Lookahead decoding: the target runs ahead of itself on guessed text, and what it writes there is kept as guesses.

Beside the guesses to verify, a pass reads a *window* of tokens that are never emitted: the target's own attempts at the
text to come, N - 1 rows of W, each row one attempt later than the row above it (a Jacobi iteration seen over time).

    position behind the pending token    1    2    3    4    5
    row 0, the oldest                    a0   b0   c0                 W = 3, N = 4
    row 1                                     a1   b1   c1            b1 sees a0 b0 (row 0 up to its column), itself
    row 2, the newest                              a2   b2   c2       b2 sees a0 b0 b1, itself
    what the target writes                              a3   b3   c3  the next newest row; row 0 is dropped

Each column is an n-gram that the target has written by itself: a0 a1 a2 a3 goes into a *pool* behind a0, which holds up
to G of them for each first token, the latest first. Those behind the pending token are the guesses: G paths of N - 1
tokens, as one tree with common beginnings shared.

Window tokens are the likeliest ones at any temperature: they depend on the text so far and on nothing that was drawn,
so the guesses are fixed given the text (Fu et al., 2402.02057, algorithm 4).

A pass reads up to 1 + (W + G)(N - 1) tokens: 57 with the paper's W = G = 7 and N = 5 for 7B models on data-centre
GPUs. Where a pass of that width has its price, smaller sizes bring more; `fitting` takes them from costs.
"""

import random
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.costs import Costs
from paceline.errors import BadRequest, check_whole
from paceline.tree import Rider, TokenTree

SIZES = ((2, 3), (3, 3), (3, 4), (4, 4), (5, 4), (7, 4), (7, 5), (10, 5), (15, 5))
"""Pairs of W and N to choose from, G being W; the last three are the paper's for 33, 13 and 7 billion weights."""
GAIN, POWER = 0.14, 0.44
"""Measured on code, maths and stories: a window of M tokens brings about `GAIN` * M ** `POWER` more tokens per pass,
whether it is wide or high (0.35 with 7 tokens, 0.42 with 12, 0.61 with 28)."""
MOST = 1024
"""Tokens of a window at most."""
GUESSES = 3
"""Guesses that a pass verifies as a rule: few tokens have as many paths as they may."""


def fitting(costs: Costs) -> tuple[int, int, int]:
    """W, N and G that bring the most tokens for the time of a pass."""

    def rate(size: tuple[int, int]) -> float:
        window = size[0] * (size[1] - 1)
        return (1.0 + GAIN * float(window**POWER)) / costs.verify(1 + window + GUESSES)

    width, length = max(SIZES, key=rate)
    return width, length, width


@dataclass(eq=False)
class Trail:
    """The window and the pool of one sequence."""

    ids: list[int] = field(default_factory=list)
    """The prompt, while the window waits for its first tokens."""
    window: list[list[int]] = field(default_factory=list)
    """Rows of W tokens, the oldest first."""
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """First token -> what the target wrote behind it, the latest last."""
    is_riding: bool = False
    """Whether the window went along with the pass."""


class Lookahead(Drafter[Trail]):
    """Drafts from what the target writes when it runs ahead.

    Args:
        window_size: W, columns of the window. None takes what fits `costs`, as for the other two.
        ngram_size: N, tokens of an n-gram; guesses are N - 1 long, the window has as many rows.
        guess_set_size: G, n-grams that are kept behind a token and verified in a pass.
        costs: what passes of the target cost by their tokens.
    """

    def __init__(
        self,
        window_size: int | None = None,
        ngram_size: int | None = None,
        guess_set_size: int | None = None,
        *,
        costs: Costs | None = None,
    ) -> None:
        given = {"window_size": window_size, "ngram_size": ngram_size, "guess_set_size": guess_set_size}
        for name, value in given.items():
            if value is not None:
                check_whole(name, value, 2 if name == "ngram_size" else 1)
        sizes = zip(given.values(), fitting(costs or Costs()), strict=True)
        self.window_size, self.ngram_size, self.guess_set_size = (
            fits if value is None else value for value, fits in sizes
        )
        size = self.window_size * (self.ngram_size - 1)
        if size > MOST:
            raise BadRequest(
                f"window_size={self.window_size} and ngram_size={self.ngram_size} were given, which make a window of "
                f"{size} tokens in every pass; {MOST} at most"
            )
        columns = torch.arange(size) % self.window_size
        rows = torch.arange(size) // self.window_size
        self._offsets = 1 + rows + columns
        in_oldest = (rows == 0)[None] & (columns[None] <= columns[:, None])
        on_diagonal = (columns[None] == columns[:, None]) & (rows[None] <= rows[:, None])
        self._seen: Bool[Tensor, "M M"] = in_oldest | on_diagonal

    def begin(self, prompt: Step) -> Trail:
        """A sequence whose window is still empty."""
        return Trail([*prompt.tokens[:1], *prompt.following])

    def propose(self, states: list[Trail], asks: list[Ask]) -> list[TokenTree]:
        """The pooled paths behind the pending token as a tree, and the window as its rider."""
        return [self._tree(trail, ask) for trail, ask in zip(states, asks, strict=True)]

    def observe(self, states: list[Trail], steps: list[Step]) -> None:
        """Take in what the target wrote behind the window, and move the window on."""
        for trail, step in zip(states, steps, strict=True):
            if not trail.window:
                trail.ids += step.following
            if trail.is_riding and step.rider_logits is not None:
                self._advance(trail, step.rider_logits[-self.window_size :].argmax(-1).tolist())
            trail.is_riding = False

    def _tree(self, trail: Trail, ask: Ask) -> TokenTree:
        if not trail.window:
            self._fill(trail, ask)
        tree = TokenTree.from_paths(ask.pending, trail.pool.get(ask.pending, [])[::-1])
        # Window tokens behind the last one that may be written would have no position, and no use.
        trail.is_riding = int(self._offsets[-1]) <= ask.left
        if not trail.is_riding:
            return tree
        tokens = torch.tensor([token for row in trail.window for token in row])
        root = torch.zeros(len(tokens), tree.num_nodes, dtype=torch.bool)
        root[:, 0] = True
        rider = Rider(tokens, self._offsets, torch.cat([root, self._seen], dim=1))
        return TokenTree(tree.tokens, tree.parents, rider=rider)

    def _fill(self, trail: Trail, ask: Ask) -> None:
        """Begin with tokens of the prompt, in an order that is the same every time."""
        ids = trail.ids or [ask.pending]
        pick = random.Random(len(ids))
        trail.window = [[pick.choice(ids) for _ in range(self.window_size)] for _ in range(self.ngram_size - 1)]
        trail.ids = []

    def _advance(self, trail: Trail, newest: list[int]) -> None:
        for column in range(self.window_size):
            first, *others = (row[column] for row in [*trail.window, newest])
            paths = trail.pool.setdefault(first, [])
            if (path := tuple(others)) in paths:
                paths.remove(path)
            paths.append(path)
            del paths[: -self.guess_set_size]
        trail.window = [*trail.window[1:], newest]
