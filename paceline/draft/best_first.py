"""Trees grown node by node: of all tokens that could be added, always the one that is likeliest to be kept.

The score of a node is the product of the shares on its path, so no node scores above the one before it, and the first n
nodes of such a tree are the best tree of n nodes. Then it is cut where one more costs more time than it saves.
"""

import heapq
from collections.abc import Callable, Iterable

import torch

from paceline.draft.base import Ask
from paceline.draft.costs import Costs, best_cut
from paceline.tree import TokenTree

__all__ = ["Growing", "grow"]


class Growing:
    """A tree while it grows; node 0 is the pending token."""

    def __init__(self, pending: int) -> None:
        self.tokens, self.parents, self.scores, self.depths = [pending], [-1], [1.0], [0]

    def add(self, parent: int, token: int, score: float) -> int:
        """A new node's number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1


Ways = Callable[[Growing, int], Iterable[tuple[int, float]]]
"""What may follow a node: tokens, each with P(kept | the node is kept)."""


def grow(ask: Ask, ways: Ways, *, depth: int, least: float, costs: Costs) -> TokenTree:
    """The best tree within the budget, its nodes best first.

    Args:
        ways: asked once for each node of the tree above the deepest level, parents before children.
        depth: the deepest level.
        least: the score below which a node is not worth a place in a pass.
        costs: what passes cost by their tokens.
    """
    tree, node, born = Growing(ask.pending), 0, 0
    heap: list[tuple[float, int, int, int]] = []
    while len(tree.tokens) <= ask.budget:
        if tree.depths[node] < depth:
            for token, share in ways(tree, node):
                score = tree.scores[node] * share
                born += 1  # of equally good nodes the one that was thought of first
                if score >= least:
                    heapq.heappush(heap, (-score, born, node, token))
        if not heap:
            break
        score, _, parent, token = heapq.heappop(heap)
        node = tree.add(parent, token, -score)
    size = 1 + best_cut(tree.scores[1:], costs.shared(ask.rows)).num_nodes  # best first: the others stand last
    tokens, parents, scores = tree.tokens[:size], tree.parents[:size], tree.scores[:size]
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), score=torch.tensor(scores))
