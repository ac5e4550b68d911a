"""How much is drafted and verified: against every possible cut, and where guesses land, fail, and land again."""

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from oracles import answer, decode, prompt_of, target
from test_draft_model import near

from paceline.decode import Request
from paceline.draft.base import Ask, Drafter, Forecast, NoDraft, Step
from paceline.draft.budget import HORIZON, LONGEST, PAUSE, Budget, Gate, promise
from paceline.draft.compose import Compose
from paceline.draft.costs import TILES, Costs
from paceline.draft.lookahead import Lookahead
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.draft.recycle import Recycle
from paceline.draft.suffix import Suffix
from paceline.testing import ToyTarget, exact_law
from paceline.testing.toy import ToyDrafter, random_law
from paceline.tree import Drawn, Rider, TokenTree

STEEP = Costs(target=((1, 1.0), (2, 1.5), (32, 20.0)))
"""Every further token costs half a pass or more."""


class Known(Drafter[None]):
    """Knows what the target writes, and says it only where `honest` says so; else it guesses the next id up.

    Args:
        text: what the target writes.
        honest: whether to tell the token at a position of it.
        score: of a node by its depth; None gives no scores.
        cost: of a proposal, forecast as sure to be kept; None is free.
    """

    def __init__(
        self,
        text: list[int],
        honest: Callable[[int], bool],
        *,
        score: Callable[[int], float] | None = None,
        cost: float | None = None,
    ) -> None:
        self.text, self.honest, self.score, self.cost = text, honest, score, cost
        self.asked: list[int] = []
        self.verdicts: list[bool] = []

    def begin(self, prompt: Step) -> None:
        """Nothing to remember: positions tell where the text stands."""

    def observe(self, states: list[None], steps: list[Step]) -> None:
        """Nothing to learn."""

    def forecast(self, state: None, ask: Ask) -> Forecast | None:
        if self.cost is None:
            return None
        kept = self.verdicts[-4:]
        return Forecast(4.0 * (sum(kept) + 0.2) / (len(kept) + 0.2), 4, self.cost)

    def propose(self, states: list[None], asks: list[Ask]) -> list[TokenTree]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Ask) -> TokenTree:
        at = ask.position  # the prompt is one token long
        self.asked.append(at)
        ids = self.text[at : at + min(ask.depth, ask.budget)]
        told = [token if self.honest(at + i) else (token + 1) % 8 for i, token in enumerate(ids)]
        self.verdicts.append(self.honest(at))
        tree = TokenTree.chain(ask.pending, told)
        if self.score is None:
            return tree
        return TokenTree(tree.tokens, tree.parents, score=torch.tensor([self.score(depth) for depth in tree.depth]))


TOY = ToyTarget.random(8, 5, max_positions=2048)


def written(count: int) -> list[int]:
    """What the toy target writes behind [0], by its table alone."""
    text = [0]
    for _ in range(count):
        text.append(int(TOY.law(text).argmax()))
    return text[1:]


TEXT = written(600)


def known(honest: Callable[[int], bool], costs: Costs = TILES, count: int = 400, **settings: Any) -> Request:
    """A run of the loop with such a drafter."""
    (row,) = decode(TOY, [[0]], Known(TEXT, honest, **settings), costs=costs, max_tokens=count)
    assert row.output_ids == TEXT[:count]
    return row


def nodes(row: Request) -> int:
    return row.stats.num_draft_tokens


# -- the cut -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_the_cut_is_the_best_of_all_that_hold_together(seed: int) -> None:
    """Expected tokens over cost, of every set of nodes that is closed under parents."""
    chance = random.Random(seed)
    size = chance.randint(2, 8)
    parents = [-1, *(chance.randrange(node) for node in range(1, size))]
    left, score = [1.0] * size, [1.0] * size
    for node in range(1, size):
        share = chance.random() * left[parents[node]]
        left[parents[node]] -= share
        score[node] = score[parents[node]] * share
    step = [0.0, *(chance.random() * 0.4 for _ in range(12))]
    costs = Costs(target=tuple((n, 1.0 + sum(step[:n])) for n in range(1, 12)))
    tree = TokenTree(torch.arange(size), torch.tensor(parents), score=torch.tensor(score, dtype=torch.float64))

    def rate(kept: tuple[int, ...]) -> float:
        return (1.0 + sum(score[node] for node in kept)) / costs.verify(1 + len(kept))

    closed = [
        kept
        for count in range(size)
        for kept in combinations(range(1, size), count)
        if all(parents[node] == 0 or parents[node] in kept for node in kept)
    ]
    kept = Budget(costs).cut(tree, 1)
    assert rate(tuple(kept.ids[1:])) == pytest.approx(max(map(rate, closed)), rel=1e-9)


def test_one_draft_less_where_nothing_pays() -> None:
    tree = TokenTree(torch.tensor([5, 6]), torch.tensor([-1, 0]), score=torch.tensor([1.0, 0.4]))
    assert Budget(STEEP).cut(tree, 1).num_nodes == 1
    assert Budget(TILES).cut(tree, 1).num_nodes == 2


def test_what_was_drawn_has_no_say_in_what_is_verified() -> None:
    """Under rules that need q, the same shape is verified whatever was drawn."""
    for drawn in (Drawn.IID, Drawn.DISTINCT):
        q = torch.full((3, 8), 1 / 8)
        tree = TokenTree(
            torch.tensor([5, 6, 7]), torch.tensor([-1, 0, 0]), drawn, q, score=torch.tensor([1.0, 0.1, 0.0])
        )
        assert Budget(STEEP, "standard").cut(tree, 1) is tree


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("drawn", list(Drawn))
def test_the_law_is_the_targets_own_with_costs(rule: str, drawn: Drawn) -> None:
    """Every outcome counted: a budget that learns from outcomes leaves the law as it is."""
    toy, draft = ToyTarget.random(3, 1), random_law(3, 2)
    for costs in (STEEP, TILES):
        found = exact_law(toy, ToyDrafter(draft, (-1, 0), drawn), rule, 3, costs=costs)
        assert max(abs(found.law.get(text, 0.0) - p) for text, p in found.target_law.items()) < 1e-12


# -- outcomes ----------------------------------------------------------------------------------------------------------


def spent(row: Request, costs: Costs) -> float:
    """Passes over one token that a run would cost at most: no guess costs more than the first of a pass."""
    return row.stats.num_target_passes + nodes(row) * (costs.verify(2) - costs.verify(1))


@pytest.mark.parametrize("score", [None, lambda depth: 0.9**depth], ids=["no scores", "boasting scores"])
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(score: Callable[[int], float] | None) -> None:
    row = known(lambda at: False, score=score)
    assert row.stats.num_target_passes == 400
    assert spent(row, TILES) < 1.02 * 400
    assert known(lambda at: False, STEEP, score=score).stats.num_draft_tokens <= 4


def test_a_drafter_that_is_always_right_gets_the_whole_budget() -> None:
    row = known(lambda at: True)
    assert row.stats.mean_acceptance_length > 12.0


@pytest.mark.parametrize("cost", [None, 0.3], ids=["free", "costly"])
def test_a_gate_that_closed_opens_again(cost: float | None) -> None:
    """Wrong for 250 tokens, then right: what is left is written in few passes."""
    row = known(lambda at: at >= 250, cost=cost)
    left = row.stats.num_target_passes - 250
    assert left < (30 if cost is None else LONGEST + 30)
    never = known(lambda at: False, cost=cost)
    assert never.stats.num_target_passes == 400
    assert nodes(never) < 60


def test_boasting_scores_are_set_right() -> None:
    """Every second guess is wrong, which the scores deny: what is verified comes down to what that is worth."""
    honest = known(lambda at: at % 2 == 0, score=lambda depth: 0.5**depth)
    boasting = known(lambda at: at % 2 == 0, score=lambda depth: 0.99**depth)
    assert nodes(boasting) < 1.6 * nodes(honest)
    assert boasting.stats.num_target_passes <= honest.stats.num_target_passes


def test_a_costly_drafter_that_does_not_pay_is_seldom_asked() -> None:
    drafter = Known(TEXT, lambda at: False, cost=0.5)
    (row,) = decode(TOY, [[0]], drafter, costs=TILES, max_tokens=400)
    assert row.output_ids == TEXT[:400]
    assert len(drafter.asked) < 16


def test_the_gate_waits_twice_as_long_each_time() -> None:
    gate, passes = Gate(), []
    for number in range(2000):
        if gate.lets(False):
            passes.append(number)
    waits = [b - a - 1 for a, b in zip([-1, *passes], passes, strict=False)]
    assert waits[:3] == [PAUSE, 2 * PAUSE, 4 * PAUSE]
    assert max(waits) == LONGEST
    assert gate.lets(True)
    assert [gate.lets(False) for _ in range(PAUSE + 1)] == [False] * PAUSE + [True]


def test_a_try_lasts_as_long_as_it_is_said_to() -> None:
    gate = Gate(trial=3)
    assert [gate.lets(False) for _ in range(PAUSE + 5)] == [False] * PAUSE + [True] * 3 + [False] * 2


def test_what_is_spent_once_is_shared_by_the_passes_to_come() -> None:
    costs = Costs(target=((1, 1.0), (8, 1.0)))
    assert promise(Forecast(3.0, 3, 1.0), costs, 100) == pytest.approx(4.0 / 2.0)
    assert promise(Forecast(3.0, 3, 1.0, once=10.0), costs, 100) == pytest.approx(4.0 / (2.0 + 10.0 / 25.0))
    assert promise(Forecast(3.0, 3, 1.0, once=10.0), costs, 2) == pytest.approx(4.0 / 12.0)
    far = promise(Forecast(3.0, 3, 1.0, once=10.0), costs, 10_000)
    assert far == promise(Forecast(3.0, 3, 1.0, once=10.0), costs, HORIZON)


# -- riders ------------------------------------------------------------------------------------------------------------


def test_a_window_that_does_not_pay_stays_at_home() -> None:
    """Lookahead on a text without repetitions, where every token of a pass costs half of one."""
    prompt = prompt_of(9)
    drafter, counts, model = Lookahead(4, 3, 2), list[int](), target()
    forward = model.forward

    def counted(tokens: Any, *rest: Any, **more: Any) -> Any:
        counts.append(tokens.shape[1])
        return forward(tokens, *rest, **more)

    model.forward = counted  # type: ignore[method-assign]
    try:
        drafter.bind(model)
        (row,) = decode(model, [prompt], drafter, costs=STEEP, max_tokens=80)
    finally:
        del model.forward
    assert row.output_ids == answer(prompt, 80).ids
    wide = sum(width > 8 for width in counts[1:])
    assert 0 < wide < 30  # it was tried


def test_a_riders_tokens_are_part_of_the_price() -> None:
    """A pass that carries riders is long already, so a node is cheap on a curve that flattens."""
    curve = Costs(target=((1, 1.0), (5, 3.0), (64, 3.1)))
    rider = Rider(torch.tensor([1] * 4), torch.arange(1, 5), torch.ones(4, 6, dtype=torch.bool))
    score = torch.tensor([1.0, 0.1])
    alone = TokenTree(torch.tensor([5, 6]), torch.tensor([-1, 0]), score=score)
    ridden = TokenTree(torch.tensor([5, 6]), torch.tensor([-1, 0]), score=score, rider=rider)
    assert Budget(curve).cut(alone, 1).num_nodes == 1
    assert Budget(curve, _brought=100.0).cut(ridden, 1).num_nodes == 2


# -- the loop ----------------------------------------------------------------------------------------------------------


def drafters() -> dict[str, Drafter[Any]]:
    draft, _ = near()
    made = {
        "ngram": Ngram(),
        "suffix": Suffix(),
        "recycle": Recycle(width=4),
        "lookahead": Lookahead(3, 3, 3),
        "draft_model": DraftModel(draft),
        "compose": Compose([Suffix(), DraftModel(draft), Recycle(width=4)]),
    }
    for drafter in made.values():
        drafter.bind(target())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", list(drafters()))
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("costs", [TILES, STEEP], ids=["tiles", "steep"])
def test_texts_are_plain_decodings_own(name: str, settings: dict[str, Any], costs: Costs) -> None:
    """Whatever is verified, alone and four together; and the same call counts the same."""
    prompts = [prompt_of(length) for length in (1, 5, 9, 17)]
    for chosen in ([prompts[2]], prompts):
        rows = decode(target(), chosen, drafters()[name], costs=costs, max_tokens=40, **settings)
        again = decode(target(), chosen, drafters()[name], costs=costs, max_tokens=40, **settings)
        for prompt, row, other in zip(chosen, rows, again, strict=True):
            assert row.output_ids == answer(prompt, 40, **settings).ids
            assert row.stats.acceptance_histogram == other.stats.acceptance_histogram
            assert row.stats.drafted_per_position == other.stats.drafted_per_position


def test_rows_that_share_a_pass_share_its_price() -> None:
    """On a curve that is flat to 8 tokens, eight guesses are free for one row and dear for eight."""
    costs = Costs(target=((1, 1.0), (8, 1.0), (64, 8.0)), draft=((1, 0.5), (8, 0.5)), reading=0.1)
    eight = costs.shared(8)
    assert eight.verify(1) == pytest.approx(1.0)
    assert eight.verify(2) == pytest.approx(costs.verify(16))
    assert eight.guess(1) == pytest.approx(0.5)
    assert costs.shared(1) is costs
    four = Costs(target=((1, 1.0), (8, 2.0)), reading=0.1).shared(4)
    assert four.verify(2) == pytest.approx(2.0 / (1.0 + 3.0 / 7.0))
    assert four.reading == pytest.approx(0.1 / (1.0 + 3.0 / 7.0))
    tree = TokenTree(torch.tensor([5, 6]), torch.tensor([-1, 0]), score=torch.tensor([1.0, 0.4]))
    assert Budget(costs).cut(tree, 1).num_nodes == 2
    assert Budget(costs).cut(tree, 8).num_nodes == 1


def test_plain_decoding_has_no_budget_to_speak_of() -> None:
    rows = decode(target(), [prompt_of(5)], NoDraft(), costs=TILES, max_tokens=10)
    assert rows[0].stats.num_draft_tokens == 0
