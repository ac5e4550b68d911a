"""Several drafters in one: at each step the guesses that bring the most tokens for their time.

Look-ups cost next to nothing, so they are always asked. A drafter whose proposal costs time (it has a `forecast`) is
asked when that is expected to pay, by what look-ups have found, by what its guesses came to in this text, and by
costs that were stored: the clock has no say, so the same call drafts the same.

    cascade   while it drafts, what look-ups expect is read along (`Ask.ahead`): a drafter for the drafter
    merge     all guesses in one tree, of which the best are verified; under `coupled`, or when all are FIXED
    choice    else one tree is taken, and which one is settled before anything is drawn
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.draft.base import Ask, Drafter, Forecast, Step
from paceline.draft.budget import Gate, promise
from paceline.draft.costs import Costs, best_cut
from paceline.errors import BadRequest
from paceline.tree import Drawn, Rider, TokenTree

PRIOR = (2.4, 4.0)
"""Guesses kept and guesses tested that a drafter without scores starts with."""
MEMORY = 0.95
"""What a pass before counts of the present one."""


@dataclass(eq=False)
class Mix:
    """What is remembered of one sequence: the members' states, and what became of guesses that have no score."""

    states: list[Any]
    kept: list[float]
    tested: list[float]
    proposed: dict[int, TokenTree] = field(default_factory=dict)
    """Member -> its last proposal."""
    tokens: float = 1.0
    spent: float = 1.0
    """What passes have brought of late, and what they cost."""
    cost: float = 0.0
    """Of the present pass."""
    rides: int | None = None
    """The member whose rider goes along with the present pass."""
    gates: dict[int, Gate] = field(default_factory=dict)
    """Of members whose proposal costs something."""

    def chance(self, member: int) -> float:
        """How often a guess of a member came true where all above it had."""
        return self.kept[member] / self.tested[member]

    def learn(self, following: Sequence[int]) -> None:
        """Compare each member's proposal with what was kept."""
        for member, tree in self.proposed.items():
            node, kept = 0, 0
            for token in following:
                found = [kid for kid in tree.children[node] if tree.ids[kid] == token]
                if not found:
                    break
                node, kept = found[0], kept + 1
            tested = min(kept + bool(tree.children[node]), len(following))
            self.kept[member] = MEMORY * self.kept[member] + kept
            self.tested[member] = MEMORY * self.tested[member] + tested
        self.proposed = {}
        self.tokens = MEMORY * self.tokens + len(following)
        self.spent = MEMORY * self.spent + self.cost


class Compose(Drafter[Mix]):
    """Drafts with several drafters.

    Args:
        drafters: two or more usually, each an instance of its own; no composition among them.
        rule: the verification rule to draft for.
        costs: what passes cost.
    """

    costs: Costs

    def __init__(self, drafters: Sequence[Drafter[Any]], *, rule: str = "coupled", costs: Costs | None = None) -> None:
        if not drafters:
            raise BadRequest("a composition of no drafters was given; name one or more, such as 'suffix'")
        for one in drafters:
            if isinstance(one, Compose):
                raise BadRequest("a composition holds a composition; list the drafters of both in one")
        if len({id(one) for one in drafters}) < len(drafters):
            raise BadRequest("the same drafter stands twice in a composition; each needs an instance of its own")
        self.drafters, self.rule, self.costs = tuple(drafters), rule, costs or Costs()
        self.taps = tuple(sorted({tap for one in drafters for tap in one.taps}))
        self.reads_logits = any(one.reads_logits for one in drafters)
        self.top_scored = max(one.top_scored for one in drafters)
        self.scores_prompt = any(one.scores_prompt for one in drafters)

    def bind(self, target: Any) -> None:
        """Binds every member; each says for itself what does not fit."""
        for drafter in self.drafters:
            drafter.bind(target)
        # Which states a head reads depends on the target.
        self.taps = tuple(sorted({tap for one in self.drafters for tap in one.taps}))

    def begin(self, prompt: Step) -> Mix:
        """A state of every member."""
        states = [one.begin(step) for one, step in zip(self.drafters, self._shares(prompt), strict=True)]
        count = len(states)
        return Mix(states, [PRIOR[0]] * count, [PRIOR[1]] * count)

    def propose(self, states: list[Mix], asks: list[Ask]) -> list[TokenTree]:
        """The look-ups' guesses, and those of a costly member where it is likely to pay."""
        count = len(states)
        found: list[dict[int, TokenTree]] = [{} for _ in range(count)]
        costly: list[dict[int, Forecast]] = [{} for _ in range(count)]
        for number, drafter in enumerate(self.drafters):
            free = []
            for i in range(count):
                forecast = drafter.forecast(states[i].states[number], asks[i])
                if forecast is None:
                    free.append(i)
                else:
                    costly[i][number] = forecast
            self._ask(number, free, states, asks, found)
        chosen = [self._worth_asking(states[i], asks[i], found[i], costly[i]) for i in range(count)]
        for number in sorted({member for member in chosen if member is not None}):
            places = [i for i in range(count) if chosen[i] == number]
            wanted = list(asks)
            for i in places:
                wanted[i] = asks[i]._replace(ahead=self._ahead(states[i], asks[i]))
            self._ask(number, places, states, wanted, found)
        trees = []
        for mix, ask, own, member, forecasts in zip(states, asks, found, chosen, costly, strict=True):
            spent = 0.0 if member is None else forecasts[member].cost
            trees.append(self._best(mix, ask, own, member, spent))
            mix.rides = None
            if (rider := trees[-1].rider) is not None:
                mix.rides = next(n for n, tree in own.items() if tree.rider and tree.rider.tokens is rider.tokens)
            mix.cost = self.costs.shared(ask.rows).verify(trees[-1].num_nodes) + spent
        return trees

    def observe(self, states: list[Mix], steps: list[Step]) -> None:
        """Every member learns what was kept, whoever guessed it."""
        for mix, step in zip(states, steps, strict=True):
            mix.learn(step.following)
        shares = [self._shares(step, mix.rides) for mix, step in zip(states, steps, strict=True)]
        for number, drafter in enumerate(self.drafters):
            drafter.observe([mix.states[number] for mix in states], [share[number] for share in shares])

    def end(self, state: Mix) -> None:
        """Every member frees what it holds, also when another one fails to."""
        errors = []
        for drafter, own in zip(self.drafters, state.states, strict=True):
            try:
                drafter.end(own)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _ask(
        self, number: int, places: list[int], states: list[Mix], asks: list[Ask], found: list[dict[int, TokenTree]]
    ) -> None:
        """Add one member's trees for some of the sequences, with scores."""
        if not places:
            return
        trees = self.drafters[number].propose([states[i].states[number] for i in places], [asks[i] for i in places])
        for i, tree in zip(places, trees, strict=True):
            states[i].proposed[number] = tree
            if tree.score is None:
                chance = states[i].chance(number)
                score = torch.tensor([chance**depth for depth in tree.depth])
                tree = TokenTree(tree.tokens, tree.parents, tree.drawn, tree.q, score, tree.rider)
            if tree.num_nodes > 1 or tree.rider is not None:
                found[i][number] = tree

    def _rate(self, mix: Mix, ask: Ask, number: int, tree: TokenTree, spent: float = 0.0) -> float:
        """What a tree promises; where it was drawn, what earlier ones came to: its own values have no say."""
        costs = self.costs.shared(ask.rows)
        if self.rule == "coupled" or tree.drawn is Drawn.FIXED:
            return best_cut(_ranked(tree), costs, spent).rate
        tokens = sum(mix.chance(number) ** depth for depth in range(ask.depth + 1))
        return tokens / (costs.verify(1 + ask.depth) + spent)

    def _worth_asking(
        self, mix: Mix, ask: Ask, found: dict[int, TokenTree], forecasts: dict[int, Forecast]
    ) -> int | None:
        """The costly member whose guesses, with the look-ups' own, promise more than the look-ups alone.

        Look-ups that draw are left out of the comparison: nothing may depend on what they drew.
        """
        costs = self.costs.shared(ask.rows)
        fixed = [tree for tree in found.values() if self.rule == "coupled" or tree.drawn is Drawn.FIXED]
        best = max((best_cut(_ranked(tree), costs).rate for tree in fixed), default=1.0 / costs.verify(1))
        expected = max((sum(_ranked(tree)) for tree in fixed), default=0.0)
        chosen = tried = None
        for number, forecast in forecasts.items():
            if not forecast.nodes:
                continue
            rate = promise(forecast, costs, ask.left, max(expected, forecast.tokens))
            # What is spent once must beat what the passes to come would bring without it.
            if rate > (best if forecast.once == 0.0 else max(best, mix.tokens / mix.spent)):
                best, chosen = rate, number
            # One that would not even pay by itself has had bad luck, or the text was hard; it may not be any more.
            pays = promise(forecast, costs, ask.left) > 1.0 / costs.verify(1)
            if mix.gates.setdefault(number, Gate()).lets(pays) and not pays and forecast.once == 0.0:
                tried = number
        return tried if chosen is None else chosen

    def _ahead(self, mix: Mix, ask: Ask) -> Callable[[Sequence[int], int], list[tuple[int, float]]]:
        """What the member that is surest of its next token expects behind some guesses."""

        def ahead(path: Sequence[int], count: int) -> list[tuple[int, float]]:
            guesses = [
                one.ahead(own, ask.pending, path, count) for one, own in zip(self.drafters, mix.states, strict=True)
            ]
            return max(guesses, key=lambda guess: guess[0][1] if guess else 0.0)

        return ahead

    def _best(self, mix: Mix, ask: Ask, found: dict[int, TokenTree], asked: int | None, spent: float) -> TokenTree:
        """One tree of all guesses, or the most promising one where they cannot be put together.

        A costly member that was asked comes first: it has seen what the others expect.
        """
        if not found:
            return TokenTree.root(ask.pending)
        order = sorted(found, key=lambda number: number != asked)
        is_apart = self.rule != "coupled" and any(tree.drawn is not Drawn.FIXED for tree in found.values())
        riders = [number for number in order if found[number].rider is not None]
        if is_apart or len(riders) > 1:
            if asked in found and is_apart:
                return found[asked]
            return found[max(order, key=lambda number: self._rate(mix, ask, number, found[number], spent))]
        tokens, parents, scores, places = _merged([found[number] for number in order])
        ranked = sorted(range(1, len(tokens)), key=lambda node: -scores[node])[: ask.budget]  # stable: the parent wins
        cut = best_cut([scores[node] for node in ranked], self.costs.shared(ask.rows), spent)
        kept = [0, *sorted(ranked[: cut.num_nodes])]
        place = {node: new for new, node in enumerate(kept)}
        rider = None
        for number, nodes in zip(order, places, strict=True):
            if (own := found[number].rider) is not None:
                rider = _moved(own, [place.get(node) for node in nodes], len(kept))
        return TokenTree(
            torch.tensor([tokens[node] for node in kept]),
            torch.tensor([-1, *(place[parents[node]] for node in kept[1:])]),
            score=torch.tensor([scores[node] for node in kept]),
            rider=rider,
        )

    def _shares(self, step: Step, rides: int | None = None) -> list[Step]:
        """A step as each member wants it: with the hidden states of its own taps, and what its own rider brought."""
        width = 0 if step.hidden is None else step.hidden.shape[-1] // len(self.taps)
        shares = []
        for number, one in enumerate(self.drafters):
            hidden = scored = None
            if step.hidden is not None and one.taps:
                hidden = torch.cat([step.hidden[:, self.taps.index(t) * width :][:, :width] for t in one.taps], dim=-1)
            if step.scored is not None and one.top_scored:
                count = one.top_scored
                scored = step.scored._replace(top=step.scored.top[:, :count], values=step.scored.values[:, :count])
            riders = step.rider_logits if number == rides else None
            shares.append(step._replace(hidden=hidden, scored=scored, rider_logits=riders))
        return shares


def _ranked(tree: TokenTree) -> list[float]:
    assert tree.score is not None, "trees are given scores when they are proposed"
    return sorted((float(score) for score in tree.score[1:].tolist()), reverse=True)


def _moved(rider: Rider, nodes: list[int | None], num_nodes: int) -> Rider:
    """A rider in another tree, where node i of its own one is `nodes[i]`, or is not at all."""
    seen = torch.zeros(len(rider.tokens), num_nodes, dtype=torch.bool)
    for column, node in enumerate(nodes):
        if node is not None:
            seen[:, node] = rider.mask[:, column]
    return Rider(rider.tokens, rider.offsets, torch.cat([seen, rider.mask[:, len(nodes) :]], dim=1))


def _merged(trees: list[TokenTree]) -> tuple[list[int], list[int], list[float], list[list[int]]]:
    """Tokens, parents and scores of the trees as one, and where each tree's nodes are in it.

    The first tree's word on a branching counts for more.

    Where two trees have a node it gets the better score. A node that only a later tree has shares what the others
    leave of its parent's score: the target takes one child at most.
    """
    tokens, parents, scores = [trees[0].ids[0]], [-1], [1.0]
    place: dict[tuple[int, int], int] = {}
    taken = [0.0]
    """What the children of each node have of its score."""
    places: list[list[int]] = []
    for tree in trees:
        assert tree.score is not None
        given = tree.score.tolist()
        where = [0]
        for node, parent in enumerate(tree.parents.tolist()[1:], 1):
            above, token = where[parent], tree.ids[node]
            score = min(float(given[node]), scores[above])
            known = place.get((above, token))
            if known is None:
                known = place[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
                taken.append(0.0)
                scores.append(max(0.0, min(score, scores[above] - taken[above])) if tree is not trees[0] else score)
                taken[above] += scores[known]
            elif score > scores[known]:
                taken[above] += score - scores[known]
                scores[known] = score
            where.append(known)
        places.append(where)
    return tokens, parents, scores, places
