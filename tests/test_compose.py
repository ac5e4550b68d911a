"""Compositions against the loop without a cache, enumerated laws, and counts of what the members were asked to do."""

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracles import VOCAB, Spy, Table, decode, prompt_of, target
from test_draft_model import GREEDY, MODES, PROMPTS, SAMPLED, expected, near, other, texts, twin

from paceline import decode as loop
from paceline.draft import SpeculativeConfig
from paceline.draft.base import Ask, Drafter, Forecast, Step
from paceline.draft.compose import Compose, Mix, _merged
from paceline.draft.costs import Costs, best_cut
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.draft.suffix import Suffix
from paceline.errors import BadRequest
from paceline.sampling import Sampler, SamplingParams
from paceline.testing import ToyDrafter, ToyTarget, check_drafter, exact_law, random_law
from paceline.tree import Drawn, TokenTree

CHEAP = Costs(target=((1, 1.0), (64, 1.1)), draft=((1, 0.05), (16, 0.1)), reading=0.001)
DEAR = Costs(target=((1, 1.0), (64, 1.1)), draft=((1, 5.0), (16, 5.5)), reading=1.0)
REPEATS = [7, 8, 9, 10, 11] * 6


def cascade(model: Any = None, costs: Costs = CHEAP, **settings: Any) -> Compose:
    draft = DraftModel(model or near()[0], costs=costs, **settings)
    return Compose([Suffix(costs=costs), draft], rule=settings.get("rule", "coupled"), costs=costs)


# -- the text ----------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("model", [twin, other, lambda: near()[0]], ids=["identical", "other", "near"])
def test_the_text_is_the_reference(model: Any, top_k: int, settings: dict[str, Any]) -> None:
    drafter = cascade(model(), tree_top_k=top_k)
    prompts = [*PROMPTS, REPEATS]
    assert texts(decode(target(), prompts, drafter, max_tokens=30, **settings)) == expected(prompts, 30, settings)
    draft: Any = drafter.drafters[1]
    assert (draft._pool, draft._rows) == (None, [])


@MODES
def test_a_draft_that_is_the_target_descends_to_the_deepest_level(settings: dict[str, Any]) -> None:
    drafter = cascade(twin(), depth=6, tree_top_k=1)
    (row,) = decode(target(), [prompt_of(9)], drafter, max_tokens=43, **settings)
    assert row.output_ids == expected([prompt_of(9)], 43, settings)[0]
    assert row.stats.num_target_passes == 7  # 6 rounds of 6 guesses and a token, and the last token
    assert row.stats.num_accepted_tokens == 36


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
def test_look_ups_together_pass_every_check(rule: str) -> None:
    report = check_drafter(lambda: Compose([Ngram(), Suffix()], rule=rule), rules=(rule,))
    assert report.verify().mean_acceptance_length > 1.0


@pytest.mark.parametrize("drawn", [Drawn.IID, Drawn.DISTINCT])
@pytest.mark.parametrize("rule", ["block", "standard"])
@pytest.mark.parametrize("costly", [False, True])
def test_drafts_that_are_drawn_keep_the_exact_law(costly: bool, rule: str, drawn: Drawn) -> None:
    """A member that draws beside one that copies: which tree is taken may not depend on what was drawn."""

    class Costly(ToyDrafter):
        def forecast(self, state: list[int], ask: Ask) -> Forecast | None:
            return Forecast(0.9, 2, 0.1) if costly else None

    toy = ToyTarget.random(3, 1)
    shape = (-1, 0, 0, 1) if drawn is Drawn.DISTINCT else (-1, 0, 1)
    # It stops where it drew a 2: lawful by itself, and a trap for whoever compares the sizes of trees.
    draws = Costly(random_law(3, 5), shape, drawn, grow=lambda path: 2 not in path)
    found = exact_law(
        toy, Compose([Suffix(), draws], rule=rule, costs=CHEAP), rule, 3, prompt=[0, 1, 2, 0, 1], depth=2, budget=4
    )
    assert found.total_variation < 1e-12
    assert found.accepted > 0


def test_the_same_call_drafts_the_same_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    runs = []
    for _ in range(2):
        monkeypatch.setattr(loop, "perf_counter", lambda: chance.uniform(0, 1e6))
        rows = decode(target(), [REPEATS, prompt_of(17)], cascade(), max_tokens=40, **SAMPLED)
        runs.append([(row.output_ids, row.from_draft, row.stats.to_dict() | {"time": None}) for row in rows])
    assert runs[0] == runs[1]


# -- what the members are asked to do ----------------------------------------------------------------------------------


def copying() -> Table:
    """A target that goes round in a circle of five."""
    rows = [[1e-9] * VOCAB for _ in range(VOCAB)]
    for token, row in enumerate(rows):
        row[(token - 7 + 1) % 5 + 7] = 1.0
    return Table(rows)


def test_a_text_that_look_ups_serve_costs_the_draft_model_nothing() -> None:
    spy = Spy(twin())
    (row,) = decode(copying(), [REPEATS], cascade(spy, DEAR), max_tokens=60, **GREEDY)
    assert row.output_ids == [REPEATS[i % 5] for i in range(60)]
    assert row.stats.num_target_passes <= 60 // 24 + 2
    assert spy.tokens == []


def test_a_draft_model_that_costs_too_much_is_not_asked() -> None:
    spy = Spy(twin())
    decode(target(), [prompt_of(9)], cascade(spy, DEAR), max_tokens=20, **GREEDY)
    assert spy.tokens == []
    decode(target(), [prompt_of(9)], cascade(spy, CHEAP), max_tokens=20, **GREEDY)
    assert spy.tokens != []


@MODES
@pytest.mark.parametrize("top_k", [1, 2])
def test_what_look_ups_expect_saves_passes_and_changes_no_guess(top_k: int, settings: dict[str, Any]) -> None:
    """Fixed depth: the same trees with and without tokens that are read along, in fewer passes of the draft model."""
    params = SamplingParams(max_tokens=99, **settings)
    prompt = prompt_of(12)
    sampler = Sampler(params, VOCAB, prompt)
    ask = Ask(prompt[-1], len(prompt) - 1, 20, 5, sampler.log_law, sampler.top, sampler.draws)
    draft = DraftModel(twin(), depth=5, tree_top_k=top_k)
    state = draft.begin(Step(prompt[:-1], prompt[1:]))
    (tree,) = draft.propose([state], [ask])
    best = max(range(tree.num_nodes), key=lambda node: (tree.depth[node], float(tree.score[node])))
    path = [tree.ids[node] for node in tree.path(best)[1:]]

    def oracle(above: Sequence[int], count: int) -> list[tuple[int, float]]:
        known = path[len(above) :] if list(above) == path[: len(above)] else []
        return [(token, 1.0) for token in known][:count]

    for ahead, passes in ((None, 5), (oracle, None), (lambda above, count: [(3, 1.0)] * count, 5)):
        spy = Spy(twin())
        draft = DraftModel(spy, depth=5, tree_top_k=top_k, costs=CHEAP)
        state = draft.begin(Step(prompt[:-1], prompt[1:]))
        (again,) = draft.propose([state], [ask._replace(ahead=ahead)])
        assert torch.equal(again.tokens, tree.tokens)
        assert torch.equal(again.parents, tree.parents)
        count = len(spy.tokens) - 1  # the prompt's
        # A chain that was foreseen takes one pass; the second-best nodes of a tree still have to be read.
        assert count == (passes or (1 if top_k == 1 else 5))
        # What was read along and is no part of the text must leave nothing behind.
        kept = [*path[:2], (path[2] + 1) % VOCAB]
        draft.observe([state], [Step([prompt[-1], *path[:2]], kept)])
        text = [*prompt, *path[:2]]
        assert draft.num_read(state) + len(state.unread) == len(text)
        later = Sampler(params, VOCAB, [*text, kept[-1]])
        asked = Ask(kept[-1], len(text), 9, 3, later.log_law, later.top, later.draws)
        (followed,) = draft.propose([state], [asked])
        fresh = DraftModel(twin(), depth=5, tree_top_k=top_k)
        (reference,) = fresh.propose([fresh.begin(Step(text, [*text[1:], kept[-1]]))], [asked])
        assert torch.equal(followed.tokens, reference.tokens)


class Fixed(Drafter[list[int]]):
    """Proposes given paths with a given score each."""

    def __init__(self, paths: Sequence[Sequence[int]], taps: tuple[int, ...] = (), fails: str = "") -> None:
        self.paths, self.taps, self.fails, self.seen, self.ended = paths, taps, fails, [], 0

    def begin(self, prompt: Step) -> list[int]:
        self.seen.append(prompt.hidden)
        return []

    def propose(self, states: list[Any], asks: list[Ask]) -> list[TokenTree]:
        return [TokenTree.from_paths(ask.pending, self.paths) for ask in asks]

    def observe(self, states: list[Any], steps: list[Step]) -> None:
        self.seen += [step.hidden for step in steps]

    def end(self, state: Any) -> None:
        self.ended += 1
        if self.fails:
            raise RuntimeError(self.fails)


def test_members_see_the_hidden_states_that_they_tap() -> None:
    both, first, last = Fixed([], (1, 2)), Fixed([], (1,)), Fixed([], (2,))
    decode(target(), [prompt_of(9)], Compose([last, both, first, Ngram()]), max_tokens=6, **GREEDY)
    assert len(both.seen) > 3
    for whole, one, two in zip(both.seen, first.seen, last.seen, strict=True):
        assert torch.equal(whole, torch.cat([one, two], -1))
        assert not torch.equal(one, two)


def test_every_member_is_ended_also_when_one_fails() -> None:
    members = [Fixed([]), Fixed([], fails="first"), Fixed([], fails="second"), Fixed([])]
    with pytest.raises(RuntimeError, match="first"):
        decode(target(), [prompt_of(9)], Compose(members), max_tokens=3, **GREEDY)
    assert [one.ended for one in members] == [1, 1, 1, 1]


def test_a_member_without_scores_is_believed_as_far_as_it_was_right() -> None:
    right, wrong = Fixed([[8, 9, 10, 11]]), Fixed([[1, 2], [3, 4]])
    drafter = Compose([right, wrong])
    states: list[Any] = []
    begin = drafter.begin
    drafter.begin = lambda prompt: states.append(begin(prompt)) or states[-1]  # type: ignore[method-assign]
    decode(copying(), [REPEATS[:-4]], drafter, max_tokens=26, **GREEDY)
    assert states[0].chance(0) > 0.6 > 0.3 > states[0].chance(1)


# -- trees of several --------------------------------------------------------------------------------------------------


def random_tree(chance: random.Random, size: int) -> TokenTree:
    paths = [[chance.randrange(3) for _ in range(chance.randint(1, 4))] for _ in range(size)]
    tree = TokenTree.from_paths(0, paths)
    scores = [1.0]
    for parent in tree.parents.tolist()[1:]:
        scores.append(scores[parent] * chance.random())
    return TokenTree(tree.tokens, tree.parents, score=torch.tensor(scores))


def paths_of(ids: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for node in range(len(ids)):
        path, at = [], node
        while at > 0:
            path.append(ids[at])
            at = parents[at]
        found[tuple(reversed(path))] = node
    return found


def test_a_merged_tree_has_all_paths_and_scores_that_can_be() -> None:
    chance = random.Random(4)
    for _ in range(200):
        trees = [random_tree(chance, chance.randint(1, 4)) for _ in range(chance.randint(1, 3))]
        tokens, parents, scores, places = _merged(trees)
        merged = paths_of(tokens, parents)
        assert len(merged) == len(tokens)
        assert set(merged) == set().union(*(paths_of(tree.ids, tree.parents.tolist()) for tree in trees))
        for tree, nodes in zip(trees, places, strict=True):
            for path, node in paths_of(tree.ids, tree.parents.tolist()).items():
                new = scores[merged[path]]
                assert nodes[node] == merged[path]
                if tree is trees[0]:
                    assert new >= float(tree.score[node]) - 1e-6
        for node in range(1, len(tokens)):
            assert 0 <= scores[node] <= scores[parents[node]] + 1e-9
        if len(trees) == 1:
            assert scores == pytest.approx(trees[0].score.tolist())


def test_the_verified_tree_is_the_best_that_fits() -> None:
    """Against every subtree of the merged one, for a few small ones."""
    chance = random.Random(2)
    costs = Costs(target=((1, 1.0), (2, 1.4), (8, 1.6)))
    for _ in range(40):
        trees = {0: random_tree(chance, 2), 1: random_tree(chance, 2)}
        tokens, parents, scores, _ = _merged(list(trees.values()))
        budget = chance.randint(1, 4)
        ask: Any = Ask(0, 0, budget, 9, None, None, None)  # type: ignore[arg-type]
        drafter = Compose([Ngram(), Suffix()], costs=costs)
        best = drafter._best(Mix([], [], []), ask, trees, None, 0.3)
        rates = []
        for kept in itertools.product([0, 1], repeat=len(tokens) - 1):
            nodes = [node for node, bit in enumerate(kept, 1) if bit]
            if len(nodes) <= budget and all(parents[node] in (0, *nodes) for node in nodes):
                rates.append((1 + sum(scores[n] for n in nodes)) / (costs.verify(1 + len(nodes)) + 0.3))
        rate = (1 + float(best.score[1:].sum())) / (costs.verify(best.num_nodes) + 0.3)
        assert rate == pytest.approx(max(rates), rel=1e-5)


def test_a_cut_is_the_best_number_of_nodes() -> None:
    costs = Costs(target=((1, 1.0), (4, 1.1), (5, 2.0), (9, 2.1)))
    assert best_cut([0.9, 0.8, 0.7, 0.6], costs).num_nodes == 3  # the fifth token of a pass costs too much
    assert best_cut([0.9] * 8, costs).num_nodes == 8  # eight of them are worth it
    assert best_cut([0.01], costs).num_nodes == 0


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Compose([]), "composition of no drafters"),
        (lambda: Compose([Ngram(), Compose([Suffix()])]), "a composition holds a composition"),
        (lambda: (lambda one: Compose([one, one]))(Ngram()), "same drafter stands twice"),
    ],
)
def test_impossible_compositions_are_refused(made: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        made()


def itself() -> dict[str, Any]:
    config: dict[str, Any] = {"method": "compose"}
    config["drafters"] = [config]
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "compose"}, "needs drafters"),
        ({"method": "compose", "drafters": []}, "needs drafters"),
        ({"method": "compose", "drafters": "suffix"}, "needs drafters"),
        (itself(), "a member of drafters has method 'compose'"),
        ({"method": "compose", "drafters": ["none"]}, "a member of drafters has method 'none'"),
        ({"method": "compose", "drafters": ["auto"]}, "a member of drafters has method 'auto'"),
        ({"method": "compose", "drafters": [Compose([Ngram()])]}, "a member of drafters has method of a composition"),
        ({"method": "compose", "drafters": ["sufix"]}, "did you mean 'suffix'"),
        ({"method": "compose", "drafters": ["suffix", "suffix"]}, "the same settings twice"),
        ({"method": "compose", "drafters": ["suffix", "draft_model"]}, "needs the draft model"),
        (
            {"method": "compose", "drafters": ["suffix"], "model": "m"},
            "model is for method 'draft_model' or 'medusa' or 'eagle' or 'eagle3', which is none",
        ),
        (
            {"method": "compose", "drafters": [{"method": "ngram", "promt_lookup_max": 3}]},
            "did you mean 'prompt_lookup_max'",
        ),
        (
            {"method": "compose", "drafters": [{"method": "ngram", "rejection_sample_method": "block"}]},
            "the whole composition's",
        ),
        ({"method": "ngram", "drafters": ["suffix"]}, "drafters is for method 'compose'"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max is for method 'ngram'"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth=0"),
        ({"method": "draft_model", "model": "m", "draft_dtype": "int5"}, "no draft_dtype 'int5'; did you mean"),
    ],
)
def test_impossible_settings_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        SpeculativeConfig.read(config)


def test_auto_is_what_is_at_hand() -> None:
    alone = SpeculativeConfig.read({})
    assert (alone.method, [one.method for one in alone.drafters]) == ("compose", ["suffix", "recycle"])
    assert alone.draft_keys == ()
    both = SpeculativeConfig.read({"model": "m", "tree_top_k": 2, "suffix_decoding_max_cached_requests": 5})
    assert both.method == "compose"
    assert [one.method for one in both.drafters] == ["suffix", "draft_model"]
    assert [one.suffix_decoding_max_cached_requests for one in both.drafters] == [5, 0]
    assert [(one.model, one.tree_top_k) for one in both.drafters] == [(None, None), ("m", 2)]
    assert both.draft_keys == (("m", "auto", None),)
    spelled = {"method": "compose", "drafters": ["suffix", {"method": "draft_model", "model": "m", "tree_top_k": 2}]}
    assert both == SpeculativeConfig.read(spelled | {"suffix_decoding_max_cached_requests": 5})
    assert json.loads(json.dumps(spelled)) == spelled
