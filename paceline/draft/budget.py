"""How much of a draft is verified, and whether one is made: more where guesses land, nothing where they do not.

    cut     a node's score is its expected probability of being kept, set right by what became of this text's guesses;
            the nodes that do not pay for their part of the pass are left out, all of them where none does
    gate    a drafter whose proposal costs something (`Drafter.forecast`) is asked while that promises to pay

A gate that closed opens again. Drafters that cost nothing are asked in every pass, and what they would have guessed is
held against what was written, verified or not. The others, and riders, are tried again after a while, then after twice
as long, and so on.

All of it follows from stored costs and from what became of this request's own guesses. The clock has no say, and other
requests have none: the same call drafts the same and counts the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.draft.base import Ask, Forecast
from paceline.draft.costs import Costs, best_cut
from paceline.tree import Drawn, TokenTree

SHARE = 0.5
"""Probability that a guess without a score is kept where all above it were, before anything is known."""
MEMORY = 0.98
"""What a pass before counts of the present one: about fifty are remembered."""
WEIGHT, NO_WORD = 1.0, 0.25
"""What a drafter's scores are worth against outcomes, in guesses expected to be kept; and what having none is worth."""
MOST = 2.0
"""A score is made at most so many times better."""
DEPTHS = 6
"""Groups of depths that are told apart: 1, 2, 3 and 4, 5 to 8, 9 to 16, beyond."""
PAUSE = 16
"""Passes before what did not pay is tried again, at first."""
LONGEST = 64
"""At most so many."""
HORIZON = 256
"""Tokens to come that an expense is spread over at most: texts end before their limit."""
RIDE = 8
"""Passes that a rider is tried for: a window brings nothing before it is filled."""
HOPE = (10.0, 8.0)
"""Tokens that passes with a rider have brought, and what these cost, before anything is known."""
RIDE_MEMORY = 0.95


def promise(forecast: Forecast, costs: Costs, left: int, tokens: float | None = None) -> float:
    """Tokens in the time of a single pass of the target, if what was forecast is drafted.

    Args:
        left: tokens that may still be written; what is spent once is shared by the passes that takes.
        tokens: guesses kept, where others help.
    """
    tokens = 1.0 + (forecast.tokens if tokens is None else tokens)
    passes = max(1.0, min(left, HORIZON) / tokens)
    return tokens / (costs.verify(1 + forecast.nodes) + forecast.cost + forecast.once / passes)


@dataclass
class Gate:
    """Lets through what pays, and now and then what does not, to see whether it still does not."""

    trial: int = 1
    """Passes that one try lasts."""
    _pause: int = PAUSE
    _waited: int = 0

    def lets(self, pays: bool) -> bool:
        """Whether to go through in this pass; asked once per pass."""
        if pays:
            self._pause, self._waited = PAUSE, 0
            return True
        self._waited += 1
        if self._waited <= self._pause:
            return False
        if self._waited == self._pause + self.trial:
            self._pause, self._waited = min(2 * self._pause, LONGEST), 0
        return True


@dataclass
class Budget:
    """What drafting for one text is worth.

    Args:
        costs: what passes cost.
        rule: the verification rule.
    """

    costs: Costs
    rule: str = "coupled"
    _kept: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    _expected: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    _draft: Gate = field(default_factory=Gate)
    _rider: Gate = field(default_factory=lambda: Gate(RIDE))
    _brought: float = HOPE[0]
    _spent: float = HOPE[1]
    _tree: TokenTree | None = None
    """What was proposed for this pass and may be held against what is written."""
    _shares: list[float] = field(default_factory=list)
    """P(kept | the node above is kept) of each of its nodes, as the drafter says."""
    _rode: float | None = None
    """What this pass costs, if a rider goes along."""

    def wants(self, forecast: Forecast | None, ask: Ask) -> bool:
        """Whether to ask for a draft."""
        if forecast is None:
            return True
        costs = self.costs.shared(ask.rows)
        return self._draft.lets(forecast.nodes > 0 and promise(forecast, costs, ask.left) > 1.0 / costs.verify(1))

    def cut(self, tree: TokenTree, rows: int) -> TokenTree:
        """The nodes that pay, none being a tree of the pending token alone.

        Nodes that were drawn stay: which ones are verified must not depend on their values.
        """
        costs = self.costs.shared(rows)
        if tree.rider is not None:
            tree = self._with_rider(tree, costs)
        if tree.num_nodes == 1 or (self.rule != "coupled" and tree.drawn is not Drawn.FIXED):
            return tree
        self._tree, self._shares = tree, _shares(tree)
        right, scores = self._corrections(NO_WORD if tree.score is None else WEIGHT), [1.0]
        told = [max(1e-9, sum(self._shares[kid] for kid in kids)) for kids in tree.children]
        for node, parent in enumerate(tree.parents.tolist()[1:], 1):
            most = 1.0 / told[parent]  # siblings exclude each other
            scores.append(scores[parent] * min(1.0, self._shares[node] * min(most, right[_group(tree.depth[node])])))
        ranked = sorted(range(1, tree.num_nodes), key=lambda node: -scores[node])  # stable: the parent wins
        riders = 0 if tree.rider is None else tree.rider.tokens.shape[0]
        cut = best_cut([scores[node] for node in ranked], costs, riders=riders)
        return tree.keep([0, *sorted(ranked[: cut.num_nodes])])

    def learn(self, following: Sequence[int]) -> None:
        """Hold what was proposed against what was written.

        Args:
            following: the tokens that the pass emitted.
        """
        if self._rode is not None:
            self._brought = RIDE_MEMORY * self._brought + len(following)
            self._spent = RIDE_MEMORY * self._spent + self._rode
        node, tree = 0, self._tree
        self._tree = self._rode = None
        if tree is None:
            return
        for depth, token in enumerate(following):
            kids = tree.children[node]
            if not kids:
                break
            hit = next((kid for kid in kids if tree.ids[kid] == token), None)
            group = _group(depth + 1)
            if hit is not None and 2 * self._kept[group] < self._expected[group]:
                # What was expected and did not come belongs to a part of the text that may be over.
                self._kept[group], self._expected[group] = self._kept[group] / 2, self._expected[group] / 2
            self._kept[group] = MEMORY * self._kept[group] + (hit is not None)
            self._expected[group] = MEMORY * self._expected[group] + sum(self._shares[kid] for kid in kids)
            if hit is None:
                break
            node = hit

    def _corrections(self, weight: float) -> list[float]:
        """What scores are to be multiplied by at each depth; where little is known, what is known one depth up."""
        found, before = [], 1.0
        for kept, expected in zip(self._kept, self._expected, strict=True):
            found.append(min(MOST, (kept + weight * before) / (expected + weight)))
            before = min(1.0, found[-1])
        return found

    def _with_rider(self, tree: TokenTree, costs: Costs) -> TokenTree:
        """The tree with its rider while riders pay."""
        assert tree.rider is not None
        if not self._rider.lets(self._brought / self._spent > 1.0 / costs.verify(1)):
            return tree.without_rider()
        self._rode = costs.verify(tree.num_nodes + tree.rider.tokens.shape[0])
        return tree


def _group(depth: int) -> int:
    return min((depth - 1).bit_length(), DEPTHS - 1)


def _shares(tree: TokenTree) -> list[float]:
    """P(kept | the node above is kept) by the tree's scores; without these, siblings have an equal part of `SHARE`."""
    parents = tree.parents.tolist()
    if tree.score is None:
        return [1.0, *(SHARE / len(tree.children[parent]) for parent in parents[1:])]
    score = [min(1.0, max(0.0, float(one))) for one in tree.score.tolist()]
    return [1.0, *(min(1.0, score[n] / score[p]) if score[p] > 0.0 else 0.0 for n, p in enumerate(parents[1:], 1))]
