"""`paceline.testing` itself: its laws against another enumerator and against numbers worked out by hand."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from oracles import ARCHS, logits_of, target, tiny
from test_planted import EXACT, EXACT_BLOCK, LABELS, LEFT, TWICE, LastSuccessor, at_full_speed, edited, only  # noqa: F401
from test_verify import SHAPES, emitted, table

from paceline import Drafter, SamplingParams, TokenTree
from paceline.draft.base import Ask, NoDraft
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.draws import Draws
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.target import HFTarget
from paceline.testing import (
    Check,
    ExactLaw,
    Report,
    ScriptedTree,
    TooManyOutcomes,
    ToyDrafter,
    ToyTarget,
    Violation,
    check_drafter,
    check_rule,
    check_target,
    exact_law,
    random_law,
)
from paceline.testing.exact import Branching
from paceline.testing.report import NotApplicable
from paceline.tree import Drawn, stack
from paceline.verify import RULES, Verdict

pytestmark = pytest.mark.usefixtures("at_full_speed")

Text = tuple[int, ...]
Law = Callable[[Text], Sequence[float]]


def same(found: dict[Text, float], expected: dict[Text, float]) -> None:
    for text in {*found, *expected}:
        assert found.get(text, 0.0) == pytest.approx(expected.get(text, 0.0), abs=1e-12), text


def lossless(found: ExactLaw) -> None:
    assert found.total_variation < 1e-12
    same(found.law, found.target_law)
    assert math.fsum(found.law.values()) == pytest.approx(1.0, abs=1e-12)


# -- exact_law: against the enumerator of test_verify, which shares none of its code -----------------------------------


@pytest.mark.parametrize("drawn", Drawn)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["block", "standard"])
def test_same_law_as_another_enumerator(rule: str, shape: str, drawn: Drawn) -> None:
    for size in (2, 3):
        parents, widest = SHAPES[shape], max(SHAPES[shape].count(parent) for parent in SHAPES[shape])
        if size ** len(parents) > 100 or (drawn is Drawn.DISTINCT and widest > size):
            continue
        p, q = table(size, size, zeros=size > 2), table(40 + size, size)
        strings, accepted = emitted(RULES[rule], parents, drawn, p, q, size)
        found = exact_law(
            ToyTarget(lambda text, p=p: p(text[1:]).tolist(), size),
            ToyDrafter(lambda text, q=q: q(text[1:]).tolist(), parents, drawn),
            rule,
            len(next(iter(strings))),
            num_passes=1,
        )
        same(found.law, strings)
        lossless(found)
        assert found.accepted == pytest.approx(accepted, abs=1e-12)


def test_a_wrong_law_is_found_as_wrong_as_it_is() -> None:
    """A drafter that lies about q: the same law, wrong in the same way, as the other enumerator finds."""
    p, q, said = table(1, 3), table(2, 3), table(3, 3)

    def misled(laws: Any, tree: TokenTree, draws: Any, position: int) -> Verdict:
        paths = [tuple(tree.ids[at] for at in tree.path(node)[1:]) for node in range(tree.num_nodes)]
        rows = torch.stack([said(path) for path in paths])
        return RULES["standard"](laws, TokenTree(tree.tokens, tree.parents, tree.drawn, rows), draws, position)

    strings, _ = emitted(misled, [-1, 0, 1], Drawn.IID, p, q, 3)
    drafter = ToyDrafter(
        lambda text: q(text[1:]).tolist(), (-1, 0, 1), Drawn.IID, says=lambda text: said(text[1:]).tolist()
    )
    found = exact_law(ToyTarget(lambda text: p(text[1:]).tolist(), 3), drafter, "standard", 3, num_passes=1)
    same(found.law, strings)
    assert found.total_variation > 0.01
    text, got, wanted = found.worst
    assert abs(got - wanted) == max(abs(found.law[one] - found.target_law[one]) for one in found.law)
    assert got == found.law[text]


# -- exact_law: against numbers worked out by hand ---------------------------------------------------------------------


def fixed(*row: float) -> Law:
    return lambda text: row


@pytest.mark.parametrize(("rule", "accepted"), [("standard", 10 / 9), ("block", 11 / 9)])
def test_toy_of_the_block_paper(rule: str, accepted: float) -> None:
    """Sun et al., section 3."""
    target, drafter = ToyTarget(fixed(1 / 3, 2 / 3), 2), ToyDrafter(fixed(2 / 3, 1 / 3), (-1, 0, 1))
    found = exact_law(target, drafter, rule, 3)
    lossless(found)
    assert found.accepted == pytest.approx(accepted, abs=1e-12)
    assert found.law[0, 0, 0] == pytest.approx(1 / 27, abs=1e-12)
    assert found.law[1, 1, 0] == pytest.approx(4 / 27, abs=1e-12)
    assert len(found.law) == 8


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_one_independent_draft_is_kept_as_often_as_the_laws_overlap(rule: str) -> None:
    for seed in range(6):
        p, q = random_law(4, seed), random_law(4, 50 + seed)
        found = exact_law(ToyTarget(p, 4), ToyDrafter(q, (-1, 0)), rule, 2)
        overlap = sum(min(one, other) for one, other in zip(p((0,)), q((0,))))
        assert found.accepted == pytest.approx(overlap, abs=1e-12)
        # Two tokens are one pass when the guess is kept, else two.
        assert found.tokens_per_pass == pytest.approx(2 / (2 - overlap), abs=1e-12)


def test_two_siblings_by_hand() -> None:
    """p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2). With replacement the residual after token 2 is p, after 0 or 1 never
    needed: kept 1/2 + 1/2 * 1/2. Without replacement the second is 0 or 1 for certain."""
    target = ToyTarget(fixed(0.5, 0.5, 0.0), 3)
    for drawn, expected in ((Drawn.IID, 0.75), (Drawn.DISTINCT, 1.0)):
        found = exact_law(target, ToyDrafter(fixed(0.25, 0.25, 0.5), (-1, 0, 0), drawn), "standard", 2, num_passes=1)
        lossless(found)
        assert found.accepted == pytest.approx(expected, abs=1e-12)


def test_a_fixed_draft_is_kept_with_the_probability_of_its_token() -> None:
    found = exact_law(ToyTarget(fixed(0.2, 0.5, 0.3), 3), ScriptedTree(lambda ids: [[2], [0]]), "standard", 2)
    assert found.accepted == pytest.approx(0.5, abs=1e-12)
    found = exact_law(ToyTarget(fixed(0.2, 0.5, 0.3), 3), ScriptedTree(lambda ids: [[2, 2]]), "block", 3)
    assert found.accepted == pytest.approx(0.3 + 0.09, abs=1e-12)
    lossless(found)


def test_no_draft_is_plain_decoding() -> None:
    found = exact_law(ToyTarget.random(3, 1), NoDraft(), "standard", 3)
    lossless(found)
    assert (found.accepted, found.tokens_per_pass, found.num_outcomes) == (0.0, pytest.approx(1.0), 27)


@pytest.mark.parametrize("drawn", Drawn)
@pytest.mark.parametrize("shape", SHAPES)
def test_block_never_keeps_less_than_standard(shape: str, drawn: Drawn) -> None:
    parents, size = SHAPES[shape], 3 if len(SHAPES[shape]) < 5 else 2
    if drawn is Drawn.DISTINCT and max(parents.count(parent) for parent in parents) > size:
        return
    length = 1 + max(TokenTree(torch.zeros(len(parents), dtype=torch.int64), torch.tensor(parents)).depth)
    for seed in range(2):
        kept = {}
        for rule in ("block", "standard"):
            drafter = ToyDrafter(random_law(size, 30 + seed), parents, drawn)
            kept[rule] = exact_law(ToyTarget.random(size, seed), drafter, rule, length, num_passes=1).accepted
        assert kept["block"] > kept["standard"] - 1e-12


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_one_pass_completed_by_the_target_is_the_law_of_all_passes(rule: str) -> None:
    for shape, drawn in (((-1, 0, 1), Drawn.IID), ((-1, 0, 0), Drawn.DISTINCT), ((-1, 0, 1, 0), Drawn.FIXED)):
        drafter = ToyDrafter(random_law(2, 9), shape, drawn)
        one = exact_law(ToyTarget.random(2, 4), drafter, rule, 4, num_passes=1)
        whole = exact_law(ToyTarget.random(2, 4), drafter, rule, 4)
        same(one.law, whole.law)
        lossless(whole)
        assert one.accepted == pytest.approx(whole.accepted, abs=1e-12)
        assert whole.num_outcomes > one.num_outcomes


def by_hand(law: Law, length: int, ends: set[int], begin: Text = ()) -> dict[Text, float]:
    """Plain enumeration: every text up to its end, `law` being of the text without its prompt."""
    if len(begin) == length or ends & set(begin[-1:]):
        return {begin: 1.0}
    found: dict[Text, float] = {}
    for token, share in enumerate(law(begin)):
        if share > 0.0:
            for text, rest in by_hand(law, length, ends, (*begin, token)).items():
                found[text] = share * rest
    return found


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_texts_end_at_eos_and_at_stops(rule: str) -> None:
    p = random_law(3, 2)
    drafter, toy = ToyDrafter(random_law(3, 7), (-1, 0, 1)), ToyTarget(p, 3)
    law: Law = lambda text: p((0, *text))  # noqa: E731
    for more, ends in (
        ({"eos_ids": frozenset({2})}, {2}),
        ({"params": SamplingParams(stop_token_ids=[1])}, {1}),
        ({"params": SamplingParams(stop_token_ids=[1]), "eos_ids": frozenset({2})}, {1, 2}),
        ({"params": SamplingParams(ignore_eos=True), "eos_ids": frozenset({2})}, set()),
    ):
        found = exact_law(toy, drafter, rule, 3, num_passes=2, **more)
        same(found.law, by_hand(law, 3, ends))
        lossless(found)
        assert all(not ends & set(text[:-1]) for text in found.law)

    def banned(text: Text) -> list[float]:
        row = list(p((0, *text)))
        if len(text) < 2:
            row[2] = 0.0
        return [share / sum(row) for share in row]

    found = exact_law(toy, drafter, rule, 3, params=SamplingParams(min_tokens=2), eos_ids=frozenset({2}), num_passes=1)
    same(found.law, by_hand(banned, 3, {2}))


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_settings_are_applied_with_the_path_to_each_node(rule: str) -> None:
    """Each as a formula on probabilities; a logit is a logarithm of one, so never above 0."""
    p = random_law(3, 6)

    def normal(row: Sequence[float]) -> list[float]:
        return [share / sum(row) for share in row]

    def top_k(text: Text) -> list[float]:
        row = p((1, *text))
        return normal([share if share > min(row) else 0.0 for share in row])

    kinds: list[tuple[dict[str, Any], Law]] = [
        ({"temperature": 0.5}, lambda text: normal([share**2 for share in p((1, *text))])),
        ({"top_k": 2}, top_k),
        ({"top_k": 1}, lambda text: [float(share == max(p((1, *text)))) for share in p((1, *text))]),
        ({"logit_bias": {2: 1.0}}, lambda text: normal([s * math.exp(i == 2) for i, s in enumerate(p((1, *text)))])),
        (
            {"repetition_penalty": 1.5},
            lambda text: normal([s**1.5 if i in (1, *text) else s for i, s in enumerate(p((1, *text)))]),
        ),
        (
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
            lambda text: normal(
                [s * math.exp(-0.7 * (i in text) - 0.4 * text.count(i)) for i, s in enumerate(p((1, *text)))]
            ),
        ),
    ]
    for settings, law in kinds:
        drafter = ToyDrafter(random_law(3, 8), (-1, 0, 1))
        found = exact_law(
            ToyTarget(p, 3), drafter, rule, 3, prompt=[1], params=SamplingParams(**settings), num_passes=1
        )
        same(found.law, by_hand(law, 3, set()))
        lossless(found)


def test_a_target_that_is_no_table() -> None:
    """A small model under top_k=2, against laws from unmodified `transformers`."""
    plain = tiny("qwen2", num_hidden_layers=1)
    prompt = [5, 6, 7]

    def law(text: Text) -> list[float]:
        row = logits_of(plain, [*prompt, *text])[-1]
        best = row.topk(2)
        return row.new_zeros(row.shape[0]).index_put_((best.indices,), best.values.softmax(0)).tolist()

    script = ScriptedTree(lambda ids: [[int(logits_of(plain, ids)[-1].argmax()), 3], [4]])
    hf = HFTarget(tiny("qwen2", num_hidden_layers=1))
    found = exact_law(hf, script, "standard", 3, prompt=prompt, params=SamplingParams(top_k=2))
    expected = by_hand(law, 3, set())
    assert len(expected) == 8
    assert set(found.law) == set(expected)
    for text, share in expected.items():
        assert found.law[text] == pytest.approx(share, abs=1e-9)
    assert found.accepted > 0.5
    assert found.total_variation < 1e-9


# -- exact_law: an enumeration that is wrong says so -------------------------------------------------------------------


def ask_for_it(rule: Any = "standard", drafter: Any = None, **more: Any) -> ExactLaw:
    return exact_law(
        ToyTarget.random(3, 1), drafter or ToyDrafter(random_law(3, 2), (-1, 0)), rule, 2, num_passes=1, **more
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            ("self.open.append(len(live))", "self.open.append(max(1, len(live) - 1))"), "lost or double", id="lost"
        ),
        pytest.param(("turn = self", "live += live[-1:]\n    turn = self"), "lost or double", id="doubled"),
        pytest.param(
            ("self.open.append(len(live))", "self.open.append(len(live) + 1)"), "another choice", id="one too many"
        ),
        pytest.param(("weights[live[turn]]", "weights[live[turn]] ** 0.9"), "lost or double", id="wrong weight"),
        pytest.param(
            ("turn = self", "live = live[:: 1 - 2 * (sum(self.script) % 2)]\n    turn = self"),
            "another choice",
            id="order changes between replays",
        ),
    ],
)
def test_a_wrong_walk_is_a_violation(change: tuple[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for_it()
    monkeypatch.setattr(Branching, "_branch", edited(Branching._branch, change))
    with pytest.raises(Violation, match=words):
        ask_for_it()


def test_weights_that_are_wrong_and_sum_to_1_make_a_wrong_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Branching, "_branch", edited(Branching._branch, ("*= weights[live[turn]]", "/= len(live)")))
    assert ask_for_it().total_variation > 0.01


def test_a_run_that_cannot_be_repeated_is_a_violation() -> None:
    turns = itertools.count()
    changing: Law = lambda text: [[0.2, 0.3, 0.5], [0.6, 0.4, 0.0]][next(turns) // 2 % 2]  # noqa: E731
    for drafter in (ScriptedTree(lambda ids: [[next(turns) % 3]]), ToyDrafter(changing, (-1, 0))):
        with pytest.raises(Violation, match="depends on something besides the text and the draws"):
            ask_for_it(drafter=drafter)


def test_a_rule_that_asks_for_the_impossible() -> None:
    def accepts(p: Any, tree: TokenTree, draws: Any, position: int) -> Verdict:
        return Verdict([], int(draws.accept(1.5)))

    def picks(p: Any, tree: TokenTree, draws: Any, position: int) -> Verdict:
        return Verdict([], draws.pick(torch.tensor([0.7, 0.5, -0.2])))

    def nothing(p: Any, tree: TokenTree, draws: Any, position: int) -> Verdict:
        return Verdict([], draws.pick(torch.zeros(3)))

    with pytest.raises(Violation, match=r"accept with probability 1\.5"):
        ask_for_it(accepts)
    for rule in (picks, nothing):
        with pytest.raises(Violation, match="is no law"):
            ask_for_it(rule)
    assert set(RULES) == {"coupled", "block", "standard"}


def test_a_run_that_fails_is_a_violation() -> None:
    with pytest.raises(Violation, match=r"the run failed after \[\]: position 1: the logits hold NaN"):
        exact_law(_Broken.random(3), NoDraft(), "standard", 2)


class _Broken(ToyTarget):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen = super().forward(*args, **kwargs)
        return seen._replace(logits=seen.logits * math.nan)


class _Noisy(NoDraft):
    def propose(self, states: list[None], asks: list[Ask]) -> list[TokenTree]:
        return [TokenTree.chain(ask.pending, [int(ask.draws.draft_noise(3).argmax())]) for ask in asks]


def test_what_cannot_be_enumerated_is_refused_with_advice() -> None:
    with pytest.raises(TooManyOutcomes, match="more than 20 outcomes; give a smaller vocabulary"):
        ask_for_it(drafter=ToyDrafter(random_law(3, 2), (-1, 0, 0)), max_outcomes=20)
    with pytest.raises(IncompatibleDrafter, match=r"draft_noise.* let it use draws\.draft\(law\)"):
        ask_for_it(drafter=_Noisy())
    with pytest.raises(BadRequest, match="use check_drafter"):
        ask_for_it("coupled")
    with pytest.raises(BadRequest, match="choose from"):
        ask_for_it("blocks")
    for params in (SamplingParams(temperature=0.0), SamplingParams(n=2)):
        with pytest.raises(BadRequest, match="temperature above 0"):
            ask_for_it(params=params)
    with pytest.raises(BadRequest, match="length is 0"):
        exact_law(ToyTarget.random(2), NoDraft(), length=0)


# -- the toys ----------------------------------------------------------------------------------------------------------


def test_toy_target_says_what_its_table_says() -> None:
    p = random_law(4, 3)
    toy = ToyTarget(p, 4)
    text = [0, 3, 1, 1, 2]
    seen = toy.forward(torch.tensor([text]), torch.arange(5)[None], None, toy.new_cache(1, 8), (0, 1))
    for end in range(1, 6):
        expected = torch.tensor(p(tuple(text[:end])), dtype=torch.float64)
        torch.testing.assert_close(seen.logits[0, end - 1].softmax(0), expected)
        torch.testing.assert_close(toy.law(text[:end]), expected)
    assert seen.hidden is not None
    assert torch.equal(seen.hidden, torch.cat([seen.logits, seen.logits], dim=-1))
    rows = [[0.1, 0.9], [0.5, 0.5]]
    assert ToyTarget(rows).law([0, 1, 0]).tolist() == pytest.approx(rows[0])
    assert torch.equal(toy.embed(torch.tensor([2])), torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64))
    assert toy.law((0, 1)).tolist() != toy.law((1, 1)).tolist()


def test_a_context_that_no_text_has_gives_nan() -> None:
    toy = ToyTarget.random(3, 1)

    def row(offsets: list[int], mask: list[list[bool]]) -> torch.Tensor:
        size = len(offsets)
        cache = toy.new_cache(1, 8)
        tokens = torch.tensor([[0, 1, 2][:size]])
        return toy.forward(tokens, torch.tensor([offsets]), torch.tensor([mask]), cache).logits[0, -1]

    sees = [[True, False, False], [True, True, False], [True, True, True]]
    assert not row([0, 1, 2], sees).isnan().any()
    assert row([0, 1, 3], sees).isnan().all()  # a hole
    assert row([0, 1, 1], sees).isnan().all()  # a sibling in sight
    assert row([0, 1, 2], [*sees[:2], [False, True, True]]).isnan().all()  # the root out of sight
    assert not row([0, 1, 1], [*sees[:2], [True, False, True]]).isnan().any()
    tree = TokenTree.from_paths(0, [[1, 2], [2]])
    stacked, cache = stack([tree]), toy.new_cache(1, 8)
    seen = toy.forward(stacked.tokens, stacked.offsets, stacked.mask, cache)
    for node, slot in enumerate(stacked.slots[0]):
        torch.testing.assert_close(seen.logits[0, slot].softmax(0), toy.law([tree.ids[at] for at in tree.path(node)]))
    with pytest.raises(BadRequest):
        toy.law((0, 1)).sum() and ToyTarget(lambda text: [0.5, 0.4], 2).law((0,))


@pytest.mark.parametrize(
    "rows", [[[0.5, 0.4], [0.5, 0.5]], [[1.5, -0.5], [0.5, 0.5]], [[1.0], [1.0]], [[math.nan, 1.0], [0.5, 0.5]]]
)
def test_tables_that_are_no_laws_are_refused(rows: list[list[float]]) -> None:
    with pytest.raises(BadRequest, match=r"the law after \[0\] is .*; 2 probabilities with sum 1 are needed"):
        ToyTarget(rows).law([0])


def test_a_function_needs_its_vocabulary() -> None:
    with pytest.raises(BadRequest, match="give vocab_size"):
        ToyTarget(lambda text: [1.0])


def ask_of(seed: int, pending: int = 0) -> Ask:
    return Ask(pending, 0, 9, 9, lambda logits, path: logits, lambda *_: [], Draws(seed))


def test_toy_drafter_of_each_label() -> None:
    q = random_law(4, 5)
    shape = (-1, 0, 0, 1)
    trees = {
        drawn: [ToyDrafter(q, shape, drawn).propose([[3]], [ask_of(seed)])[0] for seed in range(40)] for drawn in Drawn
    }
    for drawn, many in trees.items():
        for tree in many:
            assert tree.drawn is drawn
            assert tree.parents.tolist() == [-1, 0, 0, 1]
            if drawn is Drawn.FIXED:
                assert tree.q is None
            else:
                assert tree.q is not None
                for node in (0, 1):
                    path = tuple(tree.ids[at] for at in tree.path(node))
                    assert tree.q[node].tolist() == pytest.approx(q((3, *path)))
    assert len({tuple(tree.ids) for tree in trees[Drawn.FIXED]}) == 1
    best = sorted(range(4), key=lambda token: -q((3, 0))[token])
    assert trees[Drawn.FIXED][0].ids[1:3] == best[:2]
    assert all(tree.ids[1] != tree.ids[2] for tree in trees[Drawn.DISTINCT])
    assert any(tree.ids[1] == tree.ids[2] for tree in trees[Drawn.IID])


def test_toy_drafter_that_grows_by_what_was_drawn_and_that_knows_fewer_tokens() -> None:
    narrow = ToyDrafter(random_law(2, 5), (-1, 0, 1, 2), grow=lambda path: path[-1:] != (0,))
    lengths = set()
    for seed in range(30):
        (tree,) = narrow.propose([[1]], [ask_of(seed)])
        assert 0 not in tree.ids[1:-1]
        assert max(tree.ids) < 2
        lengths.add(tree.num_nodes)
    assert lengths == {2, 3, 4}
    lossless(exact_law(ToyTarget.random(3, 2), narrow, "block", 4, num_passes=1))


# -- draws without replacement -----------------------------------------------------------------------------------------


def test_distinct_draws_follow_their_law() -> None:
    """Plackett-Luce: the second token follows the law without the first. Chi-square over the 12 ordered pairs."""
    law = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1], dtype=torch.float64)
    count, draws = 6000, Draws(3)
    found = Counter(tuple(draws.distinct(law, 2)) for _ in range(count))
    statistic = 0.0
    for first, second in itertools.permutations((0, 2, 3, 4), 2):
        expected = count * float(law[first] * law[second] / (1 - law[first]))
        statistic += (found.pop((first, second), 0) - expected) ** 2 / expected
    assert not found  # never a token without mass
    assert statistic < 11 + 4 * math.sqrt(22)
    for asked, mass in ((9, law), (3, torch.tensor([0.0, 1.0, 0.0]))):
        assert sorted(Draws(1).distinct(mass, asked)) == mass.nonzero().flatten().tolist()


def test_enumerated_distinct_draws_follow_the_same_law() -> None:
    law = torch.tensor([0.5, 0.0, 0.3, 0.2])
    for first, second in itertools.permutations((0, 2, 3), 2):
        script = [sorted((0, 2, 3)).index(first), sorted({0, 2, 3} - {first}).index(second)]
        walker = Branching(script)
        assert walker.distinct(law, 2) == [first, second]
        assert walker.weight == pytest.approx(float(law[first] * law[second] / (1 - law[first])))
    assert len(Branching([]).distinct(law, 4)) == 3


# -- the suites on what is right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_the_package(rule: str) -> None:
    report = check_rule(rule).verify()
    assert not any(check.skipped for check in report.checks)
    assert all(found < 1e-12 for found in report.total_variations.values())
    assert len(report.total_variations) > 70 or rule == "coupled"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [NoDraft, Ngram, LastSuccessor])
def test_drafters_without_weights(drafter: type[Drafter[Any]]) -> None:
    report = check_drafter(drafter).verify()
    assert not any(check.skipped for check in report.checks)
    assert report.mean_acceptance_length is not None
    assert (report.mean_acceptance_length > 1.0) == (drafter is not NoDraft)


@cache
def pair() -> tuple[HFTarget, HFTarget]:
    """A small model and one that is nearly the same, so that many guesses are kept."""
    model, near = (tiny("llama", num_hidden_layers=1) for _ in range(2))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in near.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    return HFTarget(model), HFTarget(near)


@pytest.mark.slow
def test_draft_model_with_trees() -> None:
    """Coupled to the noise; what is so drafted is FIXED to the other rules."""
    model, near = pair()
    report = check_drafter(
        lambda: DraftModel(near, tree_top_k=2), model, rules=("coupled", "standard"), min_acceptance_length=1.5
    ).verify()
    # The model's context is too short for a prompt of several chunks.
    assert {check.name for check in report.checks if check.skipped} == {"a prompt that is read in chunks"}


@pytest.mark.slow
def test_draft_model_with_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "coupled, ", "rows that", "budgets", TWICE, "every begin has its end", "it helps")
    model, near = pair()
    check_drafter(lambda: DraftModel(near), model, rules=("coupled",), min_acceptance_length=1.5).verify()


@pytest.mark.parametrize(("tree_top_k", "rule", "label"), [(1, "block", "IID"), (2, "standard", "DISTINCT")])
def test_draft_model_that_draws(tree_top_k: int, rule: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, LABELS, EXACT, EXACT_BLOCK, "every begin has its end")
    model, near = pair()
    report = check_drafter(lambda: DraftModel(near, tree_top_k=tree_top_k, rule=rule), model, rules=(rule,)).verify()
    assert len(report.checks) == 4
    (detail,) = (check.detail for check in report.checks if check.name == LABELS)
    assert f"trees {label}" in detail


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_targets(arch: str) -> None:
    report = check_target(target(arch)).verify()
    assert not any(check.skipped for check in report.checks)


def test_toy_target_passes() -> None:
    report = check_target(ToyTarget.random(7, 3)).verify()
    assert "bit for bit" in {check.detail for check in report.checks}
    check_target(ToyTarget.random(3, 1, zeros=True)).verify()


def test_a_target_in_bfloat16_is_not_asked_for_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "a tree reads", "the whole loop")
    report = check_target(HFTarget(tiny("llama", dtype=torch.bfloat16, num_hidden_layers=1))).verify()
    assert [check.name for check in report.checks if check.skipped] == ["the whole loop: ids of plain decoding"]


# -- reports -----------------------------------------------------------------------------------------------------------


def test_report() -> None:
    report = Report("drafter Mine")

    def fails() -> None:
        raise Violation("1 is not 2")

    def breaks() -> None:
        raise KeyError("nothing")

    def does_not_apply() -> None:
        raise NotApplicable("no such thing here")

    report.run("first", lambda: "12 cases")
    report.run("second", lambda: None)
    report.run("third", does_not_apply)
    assert report.verify() is report
    assert str(report).splitlines() == [
        "drafter Mine: 3 checks passed",
        "  ok      first: 12 cases",
        "  ok      second",
        "  skipped third: no such thing here",
    ]
    report.run("fourth", fails)
    report.run("fifth", breaks)
    assert report.failed == ["fourth", "fifth"]
    assert report.checks[3] == Check("fourth", False, "1 is not 2")
    with pytest.raises(Violation) as caught:
        report.verify()
    assert str(caught.value).splitlines()[0] == "drafter Mine: 2 of 5 checks failed"
    assert str(caught.value).splitlines()[-2:] == [
        "  FAILED  fourth: 1 is not 2",
        "  FAILED  fifth: KeyError: 'nothing'",
    ]


class _Fits(NoDraft):
    def bind(self, target: Any) -> None:
        raise IncompatibleDrafter("its vocabulary has 5 tokens, 7 are needed")


def test_a_drafter_that_does_not_bind_is_not_run() -> None:
    report = check_drafter(_Fits)
    assert report.failed == ["it binds to the target"]
    assert len(report.checks) == 1
    with pytest.raises(Violation, match="drafter _Fits: 1 of 1 checks failed"):
        report.verify()


def test_a_drafter_that_never_helps_is_found_when_help_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "coupled, greedy", "it helps")
    report = check_drafter(NoDraft, rules=("coupled",), min_acceptance_length=1.1)
    assert report.failed == ["it helps"]
    assert report.mean_acceptance_length == 1.0
