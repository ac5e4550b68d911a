"""How likely a guess is to be kept: bounds, directions, and averages recomputed from all outcomes."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.hits import EDGES, FIRST, FIXED, OTHERS, Hits, fixed_share

Outcomes = list[tuple[float, bool]]
KEYS = st.lists(st.floats(-60.0, 10.0), min_size=1, max_size=8).map(lambda keys: sorted(keys, reverse=True))
PASSES = st.lists(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=6), max_size=12)


def after(passes: Sequence[Outcomes]) -> Hits:
    hits = Hits()
    for outcomes in passes:
        hits.learn(outcomes, 1, 1)
    return hits


def log_law(keys: Sequence[float]) -> list[float]:
    """A law over as many candidates as there are keys, and one more."""
    total = sum(math.exp(key) for key in [*keys, 0.0])
    return [key - math.log(total) for key in keys]


@given(KEYS, PASSES, st.integers(0, 8), st.booleans())
def test_shares_are_probabilities(keys: list[float], passes: list[Outcomes], count: int, greedy: bool) -> None:
    given_keys = log_law(keys) if greedy else keys
    shares = after(passes).shares(given_keys, count, greedy)
    assert len(shares) == min(count, len(keys))
    assert all(0.0 <= share <= 1.0 for share in shares)
    if shares:
        assert shares[0] > 0.0  # however often a text has missed, it is not given up


@pytest.mark.parametrize("keys", [[1.0, -math.inf], [-math.inf, -math.inf], [-math.inf], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("greedy", [False, True])
def test_candidates_without_a_law_are_no_trouble(keys: list[float], greedy: bool) -> None:
    shares = Hits().shares(keys, 3, greedy)
    assert all(0.0 <= share <= 1.0 for share in shares)


@given(KEYS, PASSES, st.booleans())
def test_a_miss_lowers_and_a_hit_raises_the_first(keys: list[float], passes: list[Outcomes], greedy: bool) -> None:
    given_keys = log_law(keys) if greedy else keys
    first = [
        after([*passes, *more]).shares(given_keys, 1, greedy)[0] for more in ([[(0.7, False)]], [], [[(0.7, True)]])
    ]
    assert first[0] <= first[1] <= first[2]
    if 0.05 < first[1] < 0.95:
        assert first[0] < first[1] < first[2]


@pytest.mark.parametrize("greedy", [False, True])
def test_a_text_that_hits_as_expected_stays_as_the_tables_say(greedy: bool) -> None:
    """Four of five guesses at 0.8 were kept, again and again."""
    keys = log_law([2.0, 1.0]) if greedy else [2.0, 1.0]
    found = after([[(0.8, True)] * 4 + [(0.8, False)]] * 9)
    assert found.shares(keys, 2, greedy) == pytest.approx(Hits().shares(keys, 2, greedy))


@pytest.mark.parametrize("truth", [0.2, 0.5, 0.9])
def test_a_text_that_differs_is_learnt(truth: float) -> None:
    """Where the tables say 0.6 and outcomes say otherwise, the first share comes near the outcomes."""
    rng, hits = random.Random(1), Hits()
    lead = next(lead for lead, first in zip((0.0, *EDGES), FIRST, strict=True) if first > 0.55)
    keys = [lead + 1e-9, 0.0]
    said = Hits().shares(keys, 1, False)[0]
    for _ in range(500):
        hits.learn([(said, rng.random() < truth)], 1, 1)
    assert hits.shares(keys, 1, False)[0] == pytest.approx(truth, abs=0.08)


@pytest.mark.parametrize("best", [0.1, 0.3, 0.5, 0.65, 0.9, 0.999])
def test_greedy_shares_follow_q(best: float) -> None:
    rest = [(1 - best) * part for part in (0.5, 0.25, 0.15)]
    found = Hits().shares([math.log(q) for q in (best, *rest)], 4, True)
    # At temperature 0 the best one hits a little more often than q says, and never less often.
    assert best <= found[0] <= min(1.0, best + 0.13)
    assert found[1:] == pytest.approx(rest)


def test_greedy_shares_rise_with_q() -> None:
    firsts = [Hits().shares([math.log(q)], 1, True)[0] for q in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)]
    assert firsts == sorted(firsts)
    assert firsts[-1] == 1.0
    assert Hits().shares([1e-7], 1, True)[0] == 1.0  # rounding may put a log-law above 0


def test_sampled_shares_are_the_tables_at_first() -> None:
    """The place in the table is counted by hand: how many bounds the distance has reached."""
    for lead in (*EDGES, 0.0, 0.1, 0.7, 1.2, 2.5, 5.0, 7.9, 30.0):
        place = sum(lead >= edge for edge in EDGES)
        found = Hits().shares([lead, 0.0, 0.0, 0.0, 0.0], 5, False)
        assert found[:4] == pytest.approx([FIRST[place], *(table[place] for table in OTHERS)])
        assert 0 < found[4] < found[3]  # beyond the tables they fall on
    assert Hits().shares([0.3], 1, False) == pytest.approx([FIRST[-1]])  # nothing else is a candidate


def test_tables_are_whole_and_never_turn_back() -> None:
    assert list(EDGES) == sorted(EDGES)
    for table in (FIRST, *OTHERS):
        assert len(table) == len(EDGES) + 1
        assert all(0 <= p <= 1 for p in table)
    assert list(FIRST) == sorted(FIRST)
    for table in OTHERS:
        assert list(table) == sorted(table, reverse=True)


def test_a_candidate_further_behind_gets_less() -> None:
    near = Hits().shares([1.0, 0.9, 0.8], 3, False)
    far = Hits().shares([1.0, 0.9, -6.0], 3, False)
    assert near[:2] == far[:2]
    assert far[2] < near[2] / 10


def test_what_the_first_loses_goes_to_the_others() -> None:
    keys = log_law([1.0, 0.0, 0.0])
    before, missed, kept = (after(p).shares(keys, 3, True) for p in ([], [[(0.9, False)] * 2], [[(0.5, True)] * 8]))
    assert missed[0] < before[0] < kept[0]
    assert all(a > b > c for a, b, c in zip(missed[1:], before[1:], kept[1:], strict=True))
    assert missed[1] / missed[2] == pytest.approx(before[1] / before[2])  # their proportions stay


@given(PASSES)
def test_alpha_is_a_fading_average_of_all_outcomes(passes: list[Outcomes]) -> None:
    """A pass that is n passes old counts 0.9^n; the start is 4 guesses of which 3.6 were kept."""
    ages = range(len(passes) - 1, -1, -1)
    kept = 3.6 * 0.9 ** len(passes) + sum(
        0.9**age * sum(hit for _, hit in outcomes) for age, outcomes in zip(ages, passes, strict=True)
    )
    tested = 4.0 * 0.9 ** len(passes) + sum(
        0.9**age * len(outcomes) for age, outcomes in zip(ages, passes, strict=True)
    )
    assert after(passes).alpha == pytest.approx(kept / tested)


def test_alpha_by_hand() -> None:
    hits = Hits()
    assert hits.alpha == 0.9
    hits.learn([(0.9, True), (0.5, False)], 2, 2)
    assert hits.alpha == pytest.approx(4.24 / 5.6)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_levels_to_a_pass_fade_too(rounds: list[tuple[int, int]]) -> None:
    hits = Hits()
    for levels, passes in rounds:
        hits.learn([], levels, passes)
    counted = [(levels, passes) for levels, passes in rounds if passes]  # look-ups alone say nothing of passes
    ages = range(len(counted) - 1, -1, -1)
    start = 0.9 ** len(counted)
    levels = start + sum(0.9**age * levels for age, (levels, _) in zip(ages, counted, strict=True))
    passes = start + sum(0.9**age * passes for age, (_, passes) in zip(ages, counted, strict=True))
    assert hits.per_pass == pytest.approx(levels / passes)


def test_fixed_shares_fall_and_leave_room() -> None:
    shares = [fixed_share(rank) for rank in range(60)]
    assert shares[: len(FIXED)] == list(FIXED)
    assert all(a > b > 0 for a, b in pairwise(shares))
    assert sum(shares) < 1.0
    for a, b in pairwise(shares[len(FIXED) - 1 :]):
        assert b / a == pytest.approx(0.6)
