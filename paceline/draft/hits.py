"""How likely a draft model's guess is to be kept: measured tables, and what a text's own outcomes make of them.

When sampling, the probability q(x) of a token says next to nothing about whether a guess coupled to the noise hits: the
guess is the argmax of log q + g, and what counts is how far the next one is behind. At temperature 0 it is q.
"""

import math
from bisect import bisect
from collections.abc import Sequence

from paceline.draft.base import Forecast
from paceline.draft.costs import Costs

EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Bounds of the distances between keys that the tables tell apart."""
FIRST = (0.35, 0.36, 0.46, 0.58, 0.66, 0.80, 0.88, 0.97, 0.99, 0.998)
"""P(the best candidate hits) by its lead over the second: measured with Qwen2.5-Coder 0.5B (4 bits) for 1.5B on code,
maths, summaries and stories at temperature 0.8, 6,112 positions."""
OTHERS = (
    (0.33, 0.33, 0.25, 0.20, 0.16, 0.09, 0.054, 0.009, 0.001, 0.001),
    (0.27, 0.22, 0.16, 0.10, 0.065, 0.05, 0.031, 0.013, 0.001, 0.001),
    (0.13, 0.12, 0.105, 0.077, 0.066, 0.06, 0.041, 0.009, 0.003, 0.001),
)
"""P(a further candidate hits) by rank and by how far it is behind the best one."""
SHARPER = 1.3
"""At temperature 0 the best candidate hits a little more often than its q says (0.77 where q is 0.65)."""
FIXED = (0.73, 0.12, 0.05, 0.03)
"""The same whatever the keys, by rank; further ones fall by `FALL`."""
FALL = 0.6
PRIOR = (3.6, 4.0)
"""Guesses kept and guesses tested that a text starts with: a little more than are kept on average, for a draft model
that is not asked never shows what it can do."""
MEMORY = 0.9
"""What a pass before counts of the present one: about ten passes are remembered."""
WEIGHT = 2.0
"""Expected misses that the tables' word is worth against a text's own outcomes."""


def fixed_share(rank: int) -> float:
    """The part of a node's score that its child of this rank gets where keys must have no say."""
    beyond = rank - len(FIXED) + 1
    return FIXED[rank] if beyond <= 0 else FIXED[-1] * FALL**beyond


class Hits:
    """What became of the guesses of one text."""

    def __init__(self) -> None:
        self._kept, self._tested = PRIOR
        self._missed = self._expected = WEIGHT
        self._levels = self._passes = 1.0

    @property
    def alpha(self) -> float:
        """The share of best guesses that were kept of late."""
        return self._kept / self._tested

    @property
    def per_pass(self) -> float:
        """Levels that a pass of the draft model adds, look-ups read along included."""
        return self._levels / self._passes

    def shares(self, keys: Sequence[float], count: int, greedy: bool) -> list[float]:
        """P(hit) of the `count` best candidates, of which `keys` has the keys, best first.

        Args:
            keys: log-law + noise when sampling, log-law when greedy; a few more than `count` make it sharper.
        """
        if greedy:
            raw = [math.exp(min(key, 0.0)) for key in keys[:count]]
            raw[:1] = [1.0 - (1.0 - q) ** SHARPER for q in raw[:1]]
        else:
            raw = []
            for rank, key in enumerate(keys[:count]):
                if rank == 0:
                    lead = key - keys[1] if len(keys) > 1 else math.inf
                    raw.append(FIRST[bisect(EDGES, lead)])
                else:
                    table = OTHERS[min(rank, len(OTHERS)) - 1]
                    raw.append(table[bisect(EDGES, keys[0] - key)] * FALL ** max(0, rank - len(OTHERS)))
        if not raw:
            return []
        first = 1.0 - min(0.98, (1.0 - raw[0]) * self._missed / self._expected)
        # What the best one loses or gains goes to the others.
        rest = sum(raw[1:])
        scale = min(2.0, (1.0 - first) / max(1e-9, 1.0 - raw[0])) if rest else 1.0
        return [first, *(share * scale for share in raw[1:])]

    def forecast(self, costs: Costs, depth: int, cost: float = 0.0) -> Forecast:
        """The depth, at most `depth`, at which a chain of best guesses is likely to bring the most for its time.

        Args:
            cost: of drafting anything at all.
        """
        best, tokens = Forecast(0.0, 0, 0.0), 0.0
        top = 1.0 / costs.verify(1)
        for deep in range(1, depth + 1):
            tokens += self.alpha**deep
            cost += costs.guess(1) / self.per_pass
            rate = (1.0 + tokens) / (costs.verify(1 + deep) + cost)
            if rate > top or deep == 1:
                best, top = Forecast(tokens, deep, cost), rate
        return best

    def learn(self, outcomes: Sequence[tuple[float, bool]], levels: int, passes: int) -> None:
        """Take note of a pass: (chance given to the best guess, whether it was kept) for each that was tested."""
        self._kept *= MEMORY
        self._tested *= MEMORY
        for chance, kept in outcomes:
            self._kept += kept
            self._tested += 1
            self._missed += not kept
            self._expected += 1.0 - chance
        if passes:
            self._levels, self._passes = MEMORY * self._levels + levels, MEMORY * self._passes + passes
