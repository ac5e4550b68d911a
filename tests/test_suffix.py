"""Suffix look-up: trees by hand and by a search of the whole text, what it learns, what it keeps, what it gains."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import answer, prompt_of

from paceline.draft import automaton as automata
from paceline.draft.automaton import BETWEEN, Automaton, Store
from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.costs import Costs
from paceline.draft.ngram import Ngram
from paceline.draft.suffix import CONTEXTS, FOLLOWERS, HITS, LATER_HITS, Suffix, Text
from paceline.errors import BadRequest
from paceline.sampling import Draws
from paceline.testing import check_drafter
from paceline.tree import Drawn, TokenTree

ROOT = Path(__file__).resolve().parent.parent
FREE = Costs(target=((1, 1.0),))
"""Nodes cost nothing: the whole tree is seen."""


def ask(pending: int, budget: int = 23, depth: int = 23) -> Ask:
    return Ask(pending, 0, budget, depth, lambda logits, path: logits, lambda *_: [], Draws(0))


def state_of(drafter: Drafter[Any], ids: Sequence[int], pieces: Sequence[int] = ()) -> Any:
    """A text whose last token is pending, brought in pieces."""
    ids = list(ids)
    cuts = [0, *sorted({p for p in pieces if 0 < p < len(ids) - 1}), len(ids) - 1]
    state = drafter.begin(Step(ids[: cuts[1]], ids[1 : cuts[1] + 1]))
    for begin, end in itertools.pairwise(cuts[1:]):
        drafter.observe([state], [Step(ids[begin:end], ids[begin + 1 : end + 1])])
    return state


def drafted(drafter: Drafter[Any], ids: Sequence[int], budget: int = 23, depth: int = 23) -> TokenTree:
    (tree,) = drafter.propose([state_of(drafter, ids)], [ask(ids[-1], budget, depth)])
    return tree


def scores(tree: TokenTree) -> list[float]:
    assert tree.score is not None
    return [float(score) for score in tree.score]


def path_of(tree: TokenTree, node: int) -> list[int]:
    return [tree.ids[n] for n in tree.path(node)[1:]]


def shown(tree: TokenTree) -> tuple[list[int], list[int], list[float]]:
    return tree.ids, tree.parents.tolist(), scores(tree)


def check_tree(tree: TokenTree, pending: int, budget: int, depth: int, least: float) -> None:
    """What every tree must be: small and shallow enough, without chance, likeliest first, no sibling twice."""
    assert tree.ids[0] == pending
    assert tree.num_nodes <= 1 + budget
    assert max(tree.depth) <= depth
    assert tree.drawn is Drawn.FIXED
    assert tree.q is None
    found = scores(tree)
    assert found[0] == 1.0
    assert all(later <= sooner for sooner, later in itertools.pairwise(found))  # so parents are no worse than children
    assert all(least * (1 - 1e-6) <= score < 1.0 for score in found[1:])
    for children in tree.children:
        assert len({tree.ids[child] for child in children}) == len(children)


# -- a text by itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([4], []),
        ([4, 5], []),
        ([1, 2, 3, 4, 5], []),
        ([4, 4], [4] * 9),
        ([1, 2, 1], [2, 1] * 4 + [2]),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2, 3, 9, 1, 2, 3]),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2, 4, 7, 1, 2, 3]),  # "7 1 2" before the later "1 2"
        ([151643, 5, 151645, 6, 151643, 5], [151645, 6, 151643, 5] * 2 + [151645]),  # special tokens are tokens
    ],
)
def test_best_path(ids: list[int], expected: list[int]) -> None:
    """The longest match is continued, over the end of the text where it repeats."""
    tree = drafted(Suffix(min_score=1e-6, costs=FREE), ids, 400, 9)
    node, best = 0, []
    while tree.children[node]:
        node = tree.children[node][0]
        best.append(tree.ids[node])
    assert best == expected


def test_a_text_that_repeats_is_drafted_to_the_full_depth() -> None:
    for ids in ([5] * 40, [1, 2] * 30, [1, 2, 3] * 20):
        tree = drafted(Suffix(), ids)
        assert tree.is_chain
        assert tree.ids == (ids * 3)[len(ids) - 1 : len(ids) + 23]


def test_scores_by_hand() -> None:
    """The text ends in "1 2"; that was followed by 3 twice and by 4 last, and "2" alone by 6 too."""
    ids = [0, 1, 2, 3, 0, 1, 2, 3, 5, 2, 6, 7, 1, 2, 4, 9, 1, 2]
    tree = drafted(Suffix(min_score=1e-3, costs=FREE), ids, 200, 1)
    hit = HITS[1][2]  # two tokens long, several followers
    three, four = hit * 2 / 4, hit * (1 + 1) / 4  # having been the last counts one more
    six = (1 - hit) * LATER_HITS[0][0]  # one token long, one new follower: all of it
    assert {tree.ids[n]: scores(tree)[n] for n in (1, 2, 3)} == pytest.approx({4: four, 3: three, 6: six})
    assert tree.ids[1] == 4  # equally likely: the one that came last
    deeper = drafted(Suffix(min_score=1e-3, costs=FREE), ids, 200, 2)
    by_path = {tuple(path_of(deeper, n)): score for n, score in enumerate(scores(deeper))}
    assert by_path[4, 9] == pytest.approx(four * HITS[2][0])  # three tokens, seen once


def test_longer_matches_are_trusted_more() -> None:
    firsts = []
    for length in (1, 2, 3, 5, 8, 16, 30):
        match = list(range(100, 100 + length))
        firsts.append(scores(drafted(Suffix(), [*match, 1, 2, *match], 23, 1))[1])
    assert firsts == sorted(firsts)
    assert firsts[0] == pytest.approx(HITS[0][0])
    assert firsts[-1] == pytest.approx(HITS[-1][0])


def test_nodes_that_cost_more_than_they_bring_are_left_out() -> None:
    """A pass over two tokens takes twice as long here: what is right half of the time or less would be a loss."""
    dear = Costs(target=((1, 1.0), (2, 2.0)))
    unsure = [1, 2, 3, 9, 1, 2]
    assert drafted(Suffix(), unsure).num_nodes > 4
    assert drafted(Suffix(costs=dear), unsure).num_nodes == 1
    sure = [*range(80), 99, *range(30)]
    assert drafted(Suffix(costs=Costs(target=((1, 1.0), (24, 3.3)))), sure).num_nodes == 24  # a tenth of a pass each
    assert 1 < drafted(Suffix(costs=Costs(target=((1, 1.0), (24, 12.5)))), sure).num_nodes < 24  # half a pass each
    assert drafted(Suffix(costs=dear), sure).num_nodes == 1


def test_what_is_ahead_is_the_likeliest_path_and_changes_nothing() -> None:
    drafter = Suffix(costs=FREE)
    state = state_of(drafter, [*range(30), 99, *range(5)])
    before = shown(drafter.propose([state], [ask(4)])[0])
    found = drafter.ahead(state, 4, [], 6)
    assert [token for token, _ in found] == before[0][1:7]
    assert [chance for _, chance in found] == pytest.approx(before[2][1:7])
    assert [token for token, _ in drafter.ahead(state, 4, [5, 6], 4)] == [7, 8, 9, 10]
    assert [token for token, _ in drafter.ahead(state, 4, [12], 2)] == [13, 14]  # a guess of somebody else's
    assert drafter.ahead(state, 4, [77], 3) == []
    assert shown(drafter.propose([state], [ask(4)])[0]) == before
    assert drafter.ahead(drafter.begin(Step([], [])), 4, [], 3) == []


def test_a_sure_text_is_drafted_deep_and_an_unsure_one_wide() -> None:
    copied = list(range(50))
    deep = drafted(Suffix(), [*copied, 99, *copied[:20]])
    assert deep.is_chain
    assert deep.num_nodes == 24
    wide = drafted(Suffix(), [token for i in range(6) for token in (1, 10 + i)] + [1])
    assert len(wide.children[0]) == 6
    assert wide.ids[1] == 15  # all once: the most recent one


@given(
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    budget=st.integers(1, 30),
    depth=st.integers(0, 12),
    max_depth=st.none() | st.integers(1, 6),
    pieces=st.lists(st.integers(0, 60), max_size=3),
)
def test_every_tree_is_valid_and_stands_in_its_text(
    ids: list[int], budget: int, depth: int, max_depth: int | None, pieces: list[int]
) -> None:
    drafter = Suffix(max_depth=max_depth)
    state = state_of(drafter, ids, pieces)
    (tree,) = drafter.propose([state], [ask(ids[-1], budget, depth)])
    check_tree(tree, ids[-1], budget, min(depth, max_depth or depth), 0.005)
    assert shown(tree) == shown(drafted(Suffix(max_depth=max_depth), ids, budget, depth))  # chunks change nothing
    for node in range(1, tree.num_nodes):
        before = [*ids, *path_of(tree, node)][-2:]
        assert any(list(pair) == before for pair in itertools.pairwise(ids))


def longest_contexts(ids: list[int], path: list[int], most: int | None) -> list[tuple[int, Counter[int], int]]:
    """By search: suffixes of text and path that were followed by something in the text, one for every set of places.

    Of each: its length, what followed it and how often, and what followed it last.
    """
    whole, found, seen = [*ids, *path], [], set()
    for n in range(min(len(whole), most or len(whole)), 0, -1):
        ends = [end for end in range(n, len(ids) + 1) if ids[end - n : end] == whole[len(whole) - n :]]
        if not path and ends == [len(ids)]:
            continue  # the text itself is no place before its end
        if tuple(ends) not in seen and ends:
            seen.add(tuple(ends))
            followers = [ids[end] for end in ends if end < len(ids)]
            found.append((n, Counter(followers), followers[-1] if followers else -1))
    return found


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_depth=st.none() | st.integers(1, 5),
)
def test_scores_against_a_search_of_the_text(ids: list[int], max_depth: int | None) -> None:
    """Every score from counts found by looking at every place: at most 4 tokens here, so no follower is left out."""
    least = 0.02
    tree = drafted(Suffix(max_depth=max_depth, min_score=least, costs=FREE), ids, 10_000, 3)
    expected: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(min(3, max_depth or 3)):
        below: dict[tuple[int, ...], float] = {}
        for path, score in level.items():
            left, seen = 1.0, set[int]()
            for length, counts, last in longest_contexts(ids, list(path), max_depth)[:CONTEXTS]:
                new = {token: count for token, count in counts.items() if token not in seen}
                if not new:
                    continue
                row = max(i for i, least_length in enumerate((1, 2, 3, 4, 6, 9, 17)) if length >= least_length)
                several = len(new) > 1
                kind = 2 if several else int(sum(new.values()) > 1)
                hit = LATER_HITS[row][several] if seen else HITS[row][kind]
                order = sorted(new, key=lambda token: -max(i for i in _places(ids, list(path), length, token)))
                assert seen or order[0] == last
                total = sum(new.values()) + 1
                for token, count in new.items():
                    below[*path, token] = score * left * hit * (count + (token == order[0])) / total
                seen |= set(new)
                left *= 1 - hit
        level = {path: score for path, score in below.items() if score >= least}
        expected |= level
    found = {tuple(path_of(tree, n)): score for n, score in enumerate(scores(tree)) if n}
    sure = {path: score for path, score in expected.items() if score > least * 1.001}
    assert sure.keys() <= found.keys() <= expected.keys()
    assert found == pytest.approx({path: expected[path] for path in found}, rel=1e-5)


def _places(ids: list[int], path: list[int], length: int, token: int) -> list[int]:
    string = [*[*ids, *path][-length:], token]
    return [end for end in range(len(string), len(ids) + 1) if ids[end - len(string) : end] == string]


def test_depth_bound_on_drafts_and_on_contexts() -> None:
    """Of a context 3 tokens are looked at: the last "7 8 9" counts, not the longer match before it."""
    ids = [1, 7, 8, 9, 2, 5, 7, 8, 9, 3, 1, 7, 8, 9]
    assert drafted(Suffix(), ids, 1).ids == [9, 2]
    tree = drafted(Suffix(max_depth=3), ids)
    assert tree.ids[1] == 3
    assert max(tree.depth) <= 3
    assert max(drafted(Suffix(max_depth=3), [5] * 40).depth) == 3


@pytest.mark.usefixtures("unchecked")  # wrong types meet our own words
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_depth": 0}, "max_depth=0 was given; a whole number from 1 up"),
        ({"max_depth": 2.5}, "max_depth=2.5"),
        ({"max_depth": True}, "max_depth=True"),
        ({"cached_requests": -1}, "cached_requests=-1 was given; a whole number from 0 up"),
        ({"cached_requests": None}, "cached_requests=None"),
        ({"min_score": 0.0}, "min_score=0.0 was given; a number above 0 and up to 1"),
        ({"min_score": 1.5}, "min_score=1.5"),
        ({"min_score": float("nan")}, "min_score=nan"),
        ({"min_score": "a"}, "min_score='a'"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)):
        Suffix(**options)


# -- what it learns ----------------------------------------------------------------------------------------------------


def passes(drafter: Suffix, state: Text, outcomes: Iterable[Sequence[int]], budget: int = 23) -> None:
    """One pass after another: each proposal is answered by what the target kept and wrote."""
    for kept in outcomes:
        pending = state.ids[-1]
        if budget:
            drafter.propose([state], [ask(pending, budget)])
        drafter.observe([state], [Step([pending, *kept[:-1]], list(kept))])


PAIRS = [token for i in range(20) for token in (100 + i, 200 + i)]
"""Each token once: every match is one token long, with one follower."""


def first_score(drafter: Suffix, state: Text) -> float:
    (tree,) = drafter.propose([state], [ask(state.ids[-1])])
    return scores(tree)[1]


@pytest.mark.usefixtures("unchecked")
def test_it_trusts_matches_more_after_hits_and_less_after_misses() -> None:
    drafter = Suffix()
    fresh, right, wrong, unasked = (state_of(drafter, [*PAIRS, 100]) for _ in range(4))
    before = first_score(drafter, fresh)
    passes(drafter, right, [[200 + i, 300 + i, 101 + i] for i in range(6)])  # 100 -> 200 again, and on to 101
    passes(drafter, wrong, [[400 + i, 500 + i, 101 + i] for i in range(6)])
    passes(drafter, unasked, [[400 + i, 500 + i, 101 + i] for i in range(6)], budget=0)
    assert first_score(drafter, right) > before + 0.1
    assert first_score(drafter, wrong) < before - 0.1
    assert first_score(drafter, unasked) == before  # nothing was proposed, nothing was tested


@pytest.mark.usefixtures("unchecked")
def test_it_forgets_and_stays_a_probability() -> None:
    drafter = Suffix()
    state = state_of(drafter, [7] * 30)
    passes(drafter, state, [[7] * 24] * 60)
    assert 0.985 < first_score(drafter, state) < 1.0
    before = max(state.tests)
    passes(drafter, state, [[7] * 24] * 20)
    assert max(state.tests) == pytest.approx(before, rel=1e-3)  # what is remembered is bounded


def test_deeper_nodes_are_tests_too() -> None:
    """One kept chain tests as many contexts as it has nodes, and the token that broke it is the last test."""
    drafter = Suffix()
    state = state_of(drafter, [*range(30), 99, *range(10)])
    drafter.propose([state], [ask(9)])
    tests, hits = sum(state.tests), sum(state.hits)
    drafter.observe([state], [Step([9, 10, 11, 12], [10, 11, 12, 77])])
    assert sum(state.tests) == pytest.approx(tests + 4, rel=0.1)
    assert sum(state.hits) == pytest.approx(hits + 3, rel=0.1)


# -- sequences do not touch --------------------------------------------------------------------------------------------


def script(seed: int, length: int = 160) -> list[int]:
    """A text that copies parts of itself, now and then with a slip."""
    chance = random.Random(seed)
    ids = [chance.randrange(40) for _ in range(20)]
    while len(ids) < length:
        begin = chance.randrange(len(ids) - 8)
        ids += [*ids[begin : begin + chance.randint(3, 20)], chance.randrange(40)]
    return ids[:length]


def replay(
    drafter: Drafter[Any], prompt: Sequence[int], text: Sequence[int], budget: int = 23
) -> Iterable[tuple[Any, TokenTree]]:
    """The target writes `text`; each pass keeps what the tree has foreseen of it. Yields the state and each tree."""
    state, done, pending = state_of(drafter, prompt), 0, prompt[-1]
    while done < len(text):
        (tree,) = drafter.propose([state], [ask(pending, budget)])
        yield state, tree
        node, kept = 0, list[int]()
        while len(kept) < len(text) - done:
            token = text[done + len(kept)]
            kept.append(token)
            found = [child for child in tree.children[node] if tree.ids[child] == token]
            if not found:
                break
            node = found[0]
        drafter.observe([state], [Step([pending, *kept[:-1]], kept)])
        done, pending = done + len(kept), kept[-1]
    drafter.end(state)


@pytest.mark.usefixtures("unchecked")
def test_two_sequences_side_by_side_are_as_each_alone() -> None:
    texts = [script(1), script(2)]
    alone = [[shown(tree) for _, tree in replay(Suffix(), text[:30], text[30:])] for text in texts]
    shared = Suffix()
    runs = [replay(shared, text[:30], text[30:]) for text in texts]
    together: list[list[Any]] = [[], []]
    for trees in itertools.zip_longest(*runs):
        for mine, one in zip(together, trees):
            if one is not None:
                mine.append(shown(one[1]))
    assert together == alone
    again = [[shown(tree) for _, tree in replay(shared, text[:30], text[30:])] for text in texts]
    assert again == alone


def test_one_call_for_several_sequences() -> None:
    drafter, texts = Suffix(), [script(3), [5], script(4)]
    states = [state_of(drafter, text) for text in texts]
    trees = drafter.propose(states, [ask(text[-1], budget) for text, budget in zip(texts, (23, 4, 2))])
    for tree, text, budget in zip(trees, texts, (23, 4, 2)):
        assert shown(tree) == shown(drafted(Suffix(), text, budget))


@pytest.mark.usefixtures("unchecked")
def test_a_small_budget_takes_the_best_of_a_large_one() -> None:
    for seed in range(20):
        text = script(seed)
        large = shown(drafted(Suffix(), text, 23))
        for budget in (1, 3, 8):
            assert shown(drafted(Suffix(), text, budget)) == tuple(part[: budget + 1] for part in large)


def test_steps_without_a_proposal() -> None:
    """Prompts of one token, rows without budget, steps that were never proposed for: the text is the same."""
    text = [3, 1, 2, 3, 1, 2, 3, 1]
    drafter = Suffix()
    state = drafter.begin(Step([], []))
    drafter.observe([state], [Step([3], [1])])
    drafter.observe([state], [Step([1, 2], [2, 3])])
    drafter.propose([state], [ask(3)])
    drafter.observe([state], [Step([3, 1, 2, 3], [1, 2, 3, 1])])
    assert state.ids == text
    # What it has learned on the way may make it bolder or shier, no more.
    fresh, learned = drafted(Suffix(), text).ids, drafter.propose([state], [ask(1)])[0].ids
    assert min(len(fresh), len(learned)) > 6
    assert all(one == other for one, other in zip(fresh, learned))
    other = drafter.begin(Step([], []))
    assert drafter.propose([other], [ask(3)])[0].ids == [3]
    drafter.observe([other], [Step([3], [1])])
    assert other.ids == [3, 1]


# -- the text of a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[5], [5, 5], [5, 6], prompt_of(40)])
@pytest.mark.parametrize(
    "drafter", [Suffix(), Suffix(max_depth=2), Suffix(cached_requests=4)], ids=["default", "shallow", "with a store"]
)
def test_ids_are_those_of_plain_decoding(prompt: list[int], drafter: Suffix) -> None:
    for _ in range(2):  # the second time the store knows the answer
        (row,) = oracles.decode(oracles.target(), [prompt], drafter, depth=8, max_tokens=20)
        assert row.output_ids == answer(prompt, 20).ids


@pytest.mark.usefixtures("unchecked")  # the checks of annotations draw from the global generator
@pytest.mark.parametrize("drafter", [Suffix, lambda: Suffix(max_depth=3)], ids=["default", "shallow"])
def test_contract(drafter: Callable[[], Suffix]) -> None:
    check_drafter(drafter).verify()


def test_llamacpp_27852_nothing_leaks_from_one_request_to_the_next() -> None:
    drafter, long, short = Suffix(), prompt_of(60, 1), prompt_of(9, 2)
    runs = [
        oracles.decode(oracles.target(), [prompt], drafter, max_tokens=30) for prompt in (short, long, short, short)
    ]
    again = [(row.output_ids, {**row.stats.to_dict(), "time": None}) for (row,) in runs]
    assert again[0] == again[2] == again[3]
    assert runs[1][0].stats.num_accepted_tokens > 0


# -- the store ---------------------------------------------------------------------------------------------------------


def finish(drafter: Suffix, ids: Sequence[int]) -> None:
    drafter.end(state_of(drafter, ids))


def test_a_later_request_copies_from_an_earlier_one() -> None:
    drafter = Suffix(cached_requests=2)
    finish(drafter, range(100, 140))
    tree = drafted(drafter, [1, 110, 111, 112])
    assert tree.ids[:8] == list(range(112, 120))
    assert drafted(Suffix(), [1, 110, 111, 112]).num_nodes == 1  # off: nothing to copy from
    end = drafted(drafter, [1, 137, 138])
    assert end.ids == [138, 139]  # the stored text ends here, and what stands between texts is no token


def test_its_own_text_wins_unless_the_stored_match_is_longer() -> None:
    drafter = Suffix(cached_requests=2)
    finish(drafter, [7, 1, 2, 3, 50, 51])
    own = [1, 2, 3, 60, 61, 9, 1, 2, 3]
    assert drafted(drafter, own).ids[1] == 60  # both know "1 2 3"
    assert drafted(drafter, [*own[:6], 7, 1, 2, 3]).ids[1] == 50  # the store knows "7 1 2 3"


def test_an_aborted_request_and_a_chunked_prompt_are_stored_as_far_as_they_came() -> None:
    drafter = Suffix(cached_requests=2)
    state = drafter.begin(Step([10, 11, 12], [11, 12, 13]))
    drafter.observe([state], [Step([13, 14], [14, 15])])
    drafter.end(state)
    assert drafted(drafter, [1, 10, 11]).ids == [11, 12, 13, 14, 15]
    drafter.end(drafter.begin(Step([], [])))  # a prompt of one token, given up before anything came


def test_ids_that_a_target_does_not_have_are_not_proposed() -> None:
    drafter = Suffix(cached_requests=2)
    drafter.bind(SimpleNamespace(vocab_size=1000))
    finish(drafter, [1, 2, 3, 900, 4])
    assert drafted(drafter, [1, 2, 3]).ids[1] == 900
    drafter.bind(SimpleNamespace(vocab_size=500))
    assert drafted(drafter, [1, 2, 3]).ids == [3]


def text_number(i: int, length: int = 10) -> list[int]:
    return list(range(1000 * i, 1000 * i + length))


def stored(store: Store, string: Sequence[int]) -> bool:
    return any(generation.find(string)[1] == len(string) for generation in store.generations)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_the_store_holds_the_latest_texts_and_never_more_than_asked(most: int) -> None:
    store = Store(most)
    for i in range(1, 40):
        store.put(text_number(i))
        held = [stored(store, text_number(j)) for j in range(1, i + 1)]
        assert held == sorted(held)  # the oldest went first
        assert min(i, (most + 1) // 2) <= sum(held) <= most


@pytest.mark.usefixtures("unchecked")
def test_the_store_is_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automata, "STORED_TOKENS", 100)
    for most in (1, 2, 1000):
        store = Store(most)
        for i in range(1, 60):
            store.put(text_number(i, 1 + i * 7 % 90))
            assert sum(generation.length[generation.end] for generation in store.generations) <= 100
            assert sum(len(generation.next) for generation in store.generations) <= 200
            assert stored(store, text_number(i, 1 + i * 7 % 90)[-20:])  # the latest text, at least its end


@pytest.mark.usefixtures("unchecked")
def test_a_known_beginning_is_not_stored_twice() -> None:
    """A chat's next turn begins with all that was said; a repeated prompt brings nothing new."""
    store, said = Store(8), script(5, 400)
    sizes = []
    for length in (200, 300, 300, 400):
        store.put(said[:length])
        (generation,) = store.generations
        sizes.append(generation.length[generation.end])
    assert sizes == [201, 201 + 1 + 100 + 32, 201 + 1 + 100 + 32, 201 + 2 * (1 + 100 + 32)]
    for begin in range(0, 380, 7):
        assert stored(store, said[begin : begin + 20])
    alone = Store(1)
    for length in (200, 300):
        alone.put(said[:length])
    assert stored(alone, said[:300])  # where the text before goes, nothing of this one is left out


def test_what_stands_between_texts_is_never_drafted() -> None:
    drafter = Suffix(cached_requests=8, min_score=1e-3, costs=FREE)
    for i in range(8):
        finish(drafter, [1, 2, 3 + i])
    for ids in ([1, 2], [2, 5], [9, 1], [4, 4]):
        assert BETWEEN not in drafted(drafter, ids, 200).ids


# -- cost --------------------------------------------------------------------------------------------------------------


class _Counting(list[Any]):
    """A list that counts how often an entry is read."""

    read = 0

    def __getitem__(self, where: Any) -> Any:
        self.read += 1
        return super().__getitem__(where)


def watched(automaton: Automaton) -> Callable[[], int]:
    """Counts what is read of an automaton from now on."""
    slots = ("next", "link", "length", "count")
    for slot in slots:
        setattr(automaton, slot, _Counting(getattr(automaton, slot)))
    return lambda: sum(getattr(automaton, slot).read for slot in slots)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "text",
    [
        lambda n: [1] * n,
        lambda n: [1, 2] * (n // 2),
        lambda n: [token for i in range(n // 2) for token in (1, i + 5)] + [1],
        lambda n: [random.Random(1).randrange(3) for _ in range(n)],
        lambda n: script(6, n // 4) * 4,
    ],
    ids=["one token", "period 2", "many followers", "few tokens", "copies"],
)
@pytest.mark.parametrize("max_depth", [None, 24])
def test_a_proposal_costs_the_same_at_any_length(text: Callable[[int], list[int]], max_depth: int | None) -> None:
    """Per node a few contexts with a few followers each, and the store is a few look-ups more."""
    for length in (400, 16_000):
        ids = text(length)
        drafter = Suffix(max_depth=max_depth, cached_requests=2)
        finish(drafter, ids[: length // 2])
        state = state_of(drafter, ids)
        assert drafter._store is not None
        reads = [watched(a) for a in (state.automaton, *drafter._store.generations)]
        drafter.propose([state], [ask(ids[-1])])
        assert sum(read() for read in reads) <= 24 * (CONTEXTS * (FOLLOWERS + 4) + 3 * 8) + 2 * 4 * 32


# -- what it gains -----------------------------------------------------------------------------------------------------


def words(text: str, ids: dict[str, int]) -> list[int]:
    """Words, runs of spaces and single signs, numbered as they come."""
    return [ids.setdefault(word, len(ids)) for word in re.findall(r"\w+|[^\S\n]+|.|\n", text)]


def tokens_per_pass(drafter: Drafter[Any], prompt: Sequence[int], text: Sequence[int], budget: int) -> float:
    return len(text) / sum(1 for _ in replay(drafter, prompt, text, budget))


def edited(text: str) -> str:
    """What an editing model writes: the same with one word changed here and there."""
    lines = text.splitlines()
    return "\n".join(re.sub(r"\w+", "changed", line, count=1) if i % 5 == 3 else line for i, line in enumerate(lines))


def examples() -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and text: ordinary text going on, code going on, code written again with changes."""
    ids: dict[str, int] = {}
    data = ROOT / "paceline" / "bench" / "data"

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (data / name).read_text(encoding="utf-8").splitlines()]

    licence = words((ROOT / "LICENSE").read_text(encoding="utf-8"), ids)
    questions = [words("\n".join(row["turns"]), ids) for row in rows("mt_bench.jsonl")[:40]]
    sums = [words("\n".join(row["turns"]), ids) for row in rows("gsm8k.jsonl")[:30]]
    code = [row["prompt"] for row in rows("humaneval.jsonl")[:12]]
    module = rows("long.jsonl")[0]["turns"][0]
    return {
        "licence": (licence[:400], licence[400:1600]),
        "questions": (questions[0], list(itertools.chain(*questions[1:]))),
        "sums": (sums[0], list(itertools.chain(*sums[1:]))),
        "code": (words(code[0], ids), words("\n".join(code[1:]), ids)),
        "copied": (words(code[0], ids), words(code[0], ids) * 2),
        "edited": (words(module, ids), words(edited(module), ids)),
    }


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("budget", [3, 7, 23])
def test_it_is_never_behind_ngram(budget: int) -> None:
    gains = {}
    for name, (prompt, text) in examples().items():
        ngram, suffix = (tokens_per_pass(drafter, prompt, text, budget) for drafter in (Ngram(5, 1), Suffix()))
        gains[name] = suffix / ngram
        assert suffix >= ngram, name
    assert sum(gains.values()) / len(gains) > 1.03


@pytest.mark.usefixtures("unchecked")
def test_it_is_ahead_on_the_package_itself() -> None:
    ids: dict[str, int] = {}
    passes = Counter[str]()
    for path in sorted((ROOT / "paceline").glob("*.py"))[:6]:
        text = words(path.read_text(encoding="utf-8"), ids)[:1500]
        for name, drafter in (("ngram", Ngram(5, 1)), ("suffix", Suffix())):
            passes[name] += sum(1 for _ in replay(drafter, text[:200], text[200:]))
    assert passes["suffix"] < passes["ngram"]


@pytest.mark.usefixtures("unchecked")
def test_scores_say_how_much_is_kept() -> None:
    """Over texts of several kinds, what the scores promise and what is kept are close."""
    promised = kept = 0.0
    for name, (prompt, text) in examples().items():
        if name == "copied":
            continue
        for _, tree in replay(Suffix(), prompt, text):
            promised += sum(scores(tree)[1:])
        kept += len(text) - sum(1 for _ in replay(Suffix(), prompt, text))
    assert 0.75 < kept / promised < 1.35
