"""What passes cost, and the cut of a tree that pays best: against numpy's interpolation and by trying every cut."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.costs import TILES, Costs, Curve, best_cut, typical

POINTS: Curve = ((2, 1.0), (5, 1.6), (6, 3.0), (16, 3.5))


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Costs that never fall, at 1 to 6 numbers of tokens."""
    tokens = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=6)))
    rises = [draw(st.floats(0.0, 2.0)) for _ in tokens]
    return tuple((n, 0.25 + sum(rises[: i + 1])) for i, n in enumerate(tokens))


def straight(curve: Curve, n: int) -> float:
    """By numpy between the ends; beyond the last point by the slope of the last two."""
    numbers, costs = np.array(curve).T
    if n > numbers[-1] and len(curve) > 1:
        slope = (costs[-1] - costs[-2]) / (numbers[-1] - numbers[-2])
        return float(costs[-1] + slope * (n - numbers[-1]))
    return float(np.interp(n, numbers, costs))


@pytest.mark.parametrize(
    ("tokens", "cost"),
    [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.2), (4, 1.4), (5, 1.6), (6, 3.0), (11, 3.25), (16, 3.5), (36, 4.5)],
)
def test_costs_at_between_and_beyond_the_points(tokens: int, cost: float) -> None:
    costs = Costs(target=POINTS, draft=((1, 9.0),))
    assert costs.verify(tokens) == pytest.approx(cost, rel=1e-12)
    assert costs.guess(tokens) == 9.0
    other = Costs(target=((1, 9.0),), draft=POINTS)
    assert other.guess(tokens) == pytest.approx(cost, rel=1e-12)
    assert other.verify(tokens) == 9.0


@given(curves(), st.integers(0, 200))
def test_costs_lie_on_straight_lines(curve: Curve, n: int) -> None:
    assert Costs(target=curve).verify(n) == pytest.approx(straight(curve, n), rel=1e-9)


@given(curves())
def test_more_tokens_never_cost_less(curve: Curve) -> None:
    found = [Costs(draft=curve).guess(n) for n in range(80)]
    assert all(b >= a - 1e-9 for a, b in pairwise(found))


@pytest.mark.parametrize("kernel", ["tiles", "transposed", "plain"])
def test_typical_costs_are_in_passes_of_the_target(kernel: str) -> None:
    costs = typical(kernel)
    assert costs.verify(1) == 1.0
    assert 0 < costs.guess(1) < 1
    assert 0 < costs.reading < costs.guess(1)
    for curve in (costs.target, costs.draft):
        assert [n for n, _ in curve] == sorted({n for n, _ in curve})
        assert [cost for _, cost in curve] == sorted(cost for _, cost in curve)
    steps = [costs.verify(n + 1) - costs.verify(n) for n in range(1, 32)]
    # Tiles are 16 tokens wide: the 17th costs more than any other. Elsewhere there is no such step.
    assert (steps.index(max(steps)) == 15) == (kernel == "tiles") == (costs == TILES)


@given(
    st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda scores: sorted(scores, reverse=True)),
    curves(),
    st.floats(0.0, 3.0),
)
def test_the_best_cut_is_the_best_of_all(scores: list[float], curve: Curve, spent: float) -> None:
    tokens = [1.0 + math.fsum(scores[:n]) for n in range(len(scores) + 1)]
    rates = [tokens[n] / (straight(curve, n + 1) + spent) for n in range(len(scores) + 1)]
    cut = best_cut(scores, Costs(target=curve), spent)
    assert cut.rate == pytest.approx(max(rates), rel=1e-9)
    assert rates[cut.num_nodes] == pytest.approx(max(rates), rel=1e-9)
    assert cut.tokens == pytest.approx(tokens[cut.num_nodes], rel=1e-9)


@pytest.mark.parametrize(
    ("scores", "spent", "num_nodes"),
    [
        ([], 0.0, 0),
        ([0.0, 0.0], 0.0, 0),  # nothing gained at no cost: the smaller pass
        ([0.9, 0.8, 0.1], 0.0, 2),  # rates 1, 1.9/1.25, 2.7/1.5, 2.8/1.75
        ([0.9, 0.8, 0.1], 10.0, 3),  # once a draft was paid for, a small gain counts
        ([0.125, 0.125, 0.125], 0.0, 0),
        ([0.125, 0.125, 0.125], 1.0, 0),  # rates 1/2, 1.125/2.25, ...: all alike
        ([0.125, 0.125, 0.125], 1.25, 3),
    ],
)
def test_cuts_by_hand(scores: list[float], spent: float, num_nodes: int) -> None:
    costs = Costs(target=((1, 1.0), (5, 2.0)))
    cut = best_cut(scores, costs, spent)
    assert cut.num_nodes == num_nodes
    assert cut.tokens == pytest.approx(1 + sum(scores[:num_nodes]))
    assert cut.rate == pytest.approx(cut.tokens / (1 + num_nodes / 4 + spent))
