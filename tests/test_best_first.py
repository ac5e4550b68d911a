"""Growing the best tree, against all nodes of a whole tree ranked by their products."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.base import Ask
from paceline.draft.best_first import Growing, grow
from paceline.draft.costs import Costs

FREE = Costs(target=((1, 1.0), (64, 1.0)))
"""Passes that cost the same whatever they read."""


def ask(budget: int) -> Ask:
    return Ask(7, 3, budget, 9, None, None, None)  # type: ignore[arg-type]


@given(
    st.lists(st.lists(st.floats(0.01, 0.6), min_size=0, max_size=3), min_size=1, max_size=3),
    st.integers(0, 12),
    st.floats(0.001, 0.2),
)
def test_the_tree_has_the_largest_products(levels: list[list[float]], budget: int, least: float) -> None:
    """Children of a node depend on its depth alone here, so every node is a choice of ranks."""
    asked: list[int] = []

    def ways(tree: Growing, node: int) -> list[tuple[int, float]]:
        asked.append(node)
        return list(enumerate(levels[tree.depths[node]]))

    tree = grow(ask(budget), ways, depth=len(levels), least=least, costs=FREE)
    products = sorted(
        (
            math.prod(levels[i][rank] for i, rank in enumerate(ranks))
            for deep in range(1, len(levels) + 1)
            for ranks in itertools.product(*(range(len(level)) for level in levels[:deep]))
        ),
        reverse=True,
    )
    found = [] if tree.score is None else tree.score[1:].tolist()
    assert found == pytest.approx(products[: len(found)], rel=1e-6)
    surely, perhaps = (sum(value >= least * edge for value in products) for edge in (1 + 1e-12, 1 - 1e-12))
    assert min(budget, surely) <= len(found) <= min(budget, perhaps)
    assert tree.ids[0] == 7
    assert asked == sorted(set(asked))  # each node once, parents first


def test_nodes_that_do_not_pay_are_left_out() -> None:
    dear = Costs(target=((1, 1.0), (2, 1.0), (3, 100.0)))
    tree = grow(ask(9), lambda tree, node: [(1, 0.5), (2, 0.4)], depth=3, least=0.01, costs=dear)
    assert tree.num_nodes == 2
