"""What passes cost, in single passes of the target: the other half of every decision about how much to draft.

Costs are numbers that were stored, never the clock of the moment: the same call drafts the same and counts the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

Curve = tuple[tuple[int, float], ...]
"""(tokens of a pass, cost), tokens increasing; straight lines between."""


@dataclass(frozen=True)
class Costs:
    """Passes of target and draft model by the number of tokens that they read.

    The defaults are round numbers for a model of half a billion weights that drafts for one of 1.5 billion.
    """

    target: Curve = ((1, 1.0), (24, 1.1), (32, 1.25), (64, 1.7))
    draft: Curve = ((1, 0.4), (16, 0.55), (32, 0.8))
    reading: float = 0.01
    """The draft model's cost of a token of a prompt."""

    def verify(self, tokens: int) -> float:
        """A pass of the target over so many tokens."""
        return _between(self.target, tokens)

    def guess(self, tokens: int) -> float:
        """A pass of the draft model over so many tokens."""
        return _between(self.draft, tokens)

    def on(self, target: Curve) -> "Costs":
        """The same draft model under a target whose passes were measured."""
        return Costs(target, self.draft, self.reading)

    def shared(self, rows: int) -> "Costs":
        """The same for each of some rows that are read side by side, by its own tokens; in passes over one token each.

        Rows fill a pass: where eight of them are read together, a guess for each is eight tokens more.
        """
        return self if rows <= 1 else _shared(self, rows)


@cache
def _shared(costs: Costs, rows: int) -> Costs:
    most = max(1, -(-max(costs.target[-1][0], costs.draft[-1][0]) // rows))
    plain = costs.verify(rows)
    return Costs(
        tuple((n, costs.verify(n * rows) / plain) for n in range(1, most + 2)),
        tuple((n, costs.guess(n * rows) / plain) for n in range(1, most + 2)),
        costs.reading / plain,
    )


TILES = Costs(target=((1, 1.0), (4, 1.1), (16, 1.15), (17, 1.4), (24, 1.45), (32, 1.6), (64, 2.5)))
"""Where linear layers run on matrix tiles, which are 16 tokens wide."""


def typical(kernel: str) -> Costs:
    """Costs where nothing was measured, by the kernel that the target runs on."""
    return TILES if kernel == "tiles" else Costs()


class Cut(NamedTuple):
    """How many nodes of a tree to verify, and what they bring."""

    num_nodes: int
    """Without the root."""
    tokens: float
    """Expected tokens of the pass: the kept nodes and the target's own one."""
    rate: float
    """Tokens in the time of a single pass of the target."""


def best_cut(scores: Sequence[float], costs: Costs, spent: float = 0.0, riders: int = 0) -> Cut:
    """The number of nodes at which a pass brings the most tokens for its time.

    A pass over n nodes brings 1 + the sum of their scores: a node's score is the probability that it is kept, and
    expectations add up whatever the tree. So the best tree of n nodes has the n best scores.

    Args:
        scores: of the drafted nodes, best first.
        spent: what the draft has cost already.
        riders: tokens that share the pass whatever is verified.
    """
    tokens = 1.0
    best = Cut(0, tokens, tokens / (costs.verify(1 + riders) + spent))
    for n, score in enumerate(scores, 1):
        tokens += score
        rate = tokens / (costs.verify(n + 1 + riders) + spent)
        if rate > best.rate:
            best = Cut(n, tokens, rate)
    return best


def _between(curve: Curve, n: int) -> float:
    """On the line between the neighbours of n; beyond the ends the line goes on, but not below the first point."""
    if n <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    last = next((i for i, (tokens, _) in enumerate(curve) if tokens >= n), len(curve) - 1)
    (a, low), (b, high) = curve[last - 1], curve[last]
    return low + (high - low) * (n - a) / (b - a)
