"""Trees, what is derived from them, and how a batch of them lies in the slots of one pass."""

import random

import pytest
import torch

from paceline.errors import BadRequest
from paceline.tree import Drawn, Rider, TokenTree, stack


def bushy(score: list[float] | None = None) -> TokenTree:
    """0 ─┬─ 1 ── 3, 1 ── 4     and 2 ── 5."""
    return TokenTree(
        torch.tensor([10, 11, 12, 13, 14, 15]),
        torch.tensor([-1, 0, 0, 1, 1, 2]),
        score=None if score is None else torch.tensor(score),
    )


def random_tree(seed: int, nodes: int) -> TokenTree:
    pick = random.Random(seed)
    parents = [-1] + [pick.randrange(node) for node in range(1, nodes)]
    score = torch.tensor([pick.random() for _ in parents]) if seed % 2 else None
    return TokenTree(torch.tensor([pick.randrange(100) for _ in parents]), torch.tensor(parents), score=score)


def test_plain_decoding_is_the_tree_of_one_node() -> None:
    tree = TokenTree.root(7)
    assert tree.ids == [7]
    assert tree.num_nodes == 1
    assert tree.depth == [0]
    assert tree.children == [[]]
    assert tree.path(0) == [0]
    assert tree.is_chain
    assert torch.equal(tree.ancestors, torch.tensor([[True]]))


def test_chain() -> None:
    tree = TokenTree.chain(7, [8, 9])
    assert (tree.ids, tree.parents.tolist(), tree.depth) == ([7, 8, 9], [-1, 0, 1], [0, 1, 2])
    assert tree.is_chain
    assert tree.path(2) == [0, 1, 2]
    assert torch.equal(tree.ancestors, torch.ones(3, 3, dtype=torch.bool).tril())


def test_paths_share_their_beginnings_and_the_first_comes_first() -> None:
    tree = TokenTree.from_paths(0, [[1, 2, 3], [1, 4], [5], [1, 2], [], [5]])
    assert tree.ids == [0, 1, 2, 3, 4, 5]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1, 0]
    assert tree.children == [[1, 5], [2, 4], [3], [], [], []]
    assert not tree.is_chain
    assert TokenTree.from_paths(3, []).ids == [3]
    assert TokenTree.from_paths(3, [[1, 2]]).is_chain


@pytest.mark.parametrize("seed", range(20))
def test_derived_facts_agree_with_walking_up(seed: int) -> None:
    tree = random_tree(seed, 2 + seed)
    for node in range(tree.num_nodes):
        up = [node]
        while tree.parents[up[-1]] >= 0:
            up.append(int(tree.parents[up[-1]]))
        assert tree.path(node) == up[::-1]
        assert tree.depth[node] == len(up) - 1
        assert tree.ancestors[node].nonzero().flatten().tolist() == sorted(up)
        assert all(node in tree.children[parent] for parent in up[1:2])


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([1, 2], [-1], r"int64 \[1\]; one int64 parent for each of 2"),
        ([1, 2], [0, 0], "needs parent -1"),
        ([1, 2], [-1, 1], "node 1 has parent 1; a parent from 0 to 0"),
        ([1, 2, 3], [-1, 0, -1], "node 2 has parent -1"),
        ([], [], "node 0 is the pending token"),
        ([1, -2], [-1, 0], "hold -2; token ids are 0 or more"),
    ],
)
def test_trees_that_are_none_are_refused(tokens: list[int], parents: list[int], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        TokenTree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64))


def test_extras_that_do_not_fit_are_refused() -> None:
    tokens, parents = torch.tensor([1, 2]), torch.tensor([-1, 0])
    with pytest.raises(BadRequest, match=r"q is float32 \[3, 4\]; one float row .* each of 2 nodes"):
        TokenTree(tokens, parents, Drawn.IID, torch.rand(3, 4))
    with pytest.raises(BadRequest, match=r"score is float32 \[3\]"):
        TokenTree(tokens, parents, score=torch.rand(3))
    rider = Rider(torch.tensor([3]), torch.tensor([2]), torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(BadRequest, match=r"rider mask is bool \[1, 5\]; 3 columns"):
        TokenTree(tokens, parents, rider=rider)
    with pytest.raises(BadRequest, match=r"repeat a token, \[5, 5\]; .* label the tree IID, or merge"):
        TokenTree(torch.tensor([1, 5, 5]), torch.tensor([-1, 0, 0]), Drawn.DISTINCT)
    assert TokenTree(torch.tensor([1, 5, 5]), torch.tensor([-1, 0, 0]), Drawn.IID).num_nodes == 3
    with pytest.raises(BadRequest, match="give 1 or more"):
        bushy().prefix(0)


def test_prefix_and_truncate_keep_the_first_nodes_and_what_belongs_to_them() -> None:
    rider = Rider(torch.tensor([3]), torch.tensor([2]), torch.tensor([[True, False, True, True]]))
    tree = TokenTree(
        torch.tensor([1, 2, 3]),
        torch.tensor([-1, 0, 0]),
        Drawn.IID,
        torch.arange(12.0).view(3, 4),
        torch.tensor([1.0, 0.5, 0.25]),
        rider,
    )
    cut = tree.prefix(2)
    assert (cut.ids, cut.parents.tolist(), cut.drawn) == ([1, 2], [-1, 0], Drawn.IID)
    assert cut.q is not None
    assert cut.score is not None
    assert cut.rider is not None
    assert cut.q.shape == (2, 4)
    assert cut.score.tolist() == [1.0, 0.5]
    assert cut.rider.mask.tolist() == [[True, False, True]]
    assert tree.truncate(1).ids == [1, 2]
    assert tree.truncate(0).ids == tree.truncate(-3).ids == [1]
    assert tree.truncate(2) is tree


def test_slots_put_the_likeliest_path_first() -> None:
    """Bit-exactness on CPU holds on the path that comes first in the pass."""
    assert TokenTree.chain(1, [2, 3]).slot_order == [0, 1, 2]
    assert bushy().slot_order == [0, 1, 3, 4, 2, 5]  # no scores: the first drawn child first
    assert bushy([1.0, 0.3, 0.6, 0.1, 0.2, 0.5]).slot_order == [0, 2, 5, 1, 4, 3]
    assert bushy([1.0, 0.5, 0.5, 0.2, 0.2, 0.2]).slot_order == [0, 1, 3, 4, 2, 5]


def test_stack_lays_out_nodes_riders_and_padding() -> None:
    rider = Rider(torch.tensor([70, 71]), torch.tensor([4, 5]), torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 1, 1]]).bool())
    tree = TokenTree(
        torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 0]), score=torch.tensor([1.0, 0.1, 0.9]), rider=rider
    )
    batch = stack([TokenTree.root(9), tree, TokenTree.chain(5, [6])])
    assert batch.tokens.tolist() == [[9, 0, 0, 0, 0], [1, 3, 2, 70, 71], [5, 6, 0, 0, 0]]
    assert batch.offsets.tolist() == [[0, 0, 0, 0, 0], [0, 1, 1, 4, 5], [0, 1, 0, 0, 0]]
    assert batch.slots == [[0], [0, 2, 1], [0, 1]]
    assert batch.mask[0].tolist() == torch.eye(5).bool().tolist()  # a padded slot sees itself alone
    assert batch.mask[1].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],  # slot 1 is node 2
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],  # the rider saw node 2, which lies in slot 1
        [1, 0, 1, 1, 1],
    ]
    assert batch.mask[2].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("seed", range(10))
def test_stacked_rows_say_what_the_trees_say(seed: int) -> None:
    trees = [random_tree(seed, 5), random_tree(seed + 1, 11), TokenTree.root(1)]
    batch = stack(trees)
    for row, tree in enumerate(trees):
        slots = batch.slots[row]
        assert sorted(slots) == list(range(tree.num_nodes))
        for node in range(tree.num_nodes):
            assert batch.tokens[row, slots[node]] == tree.ids[node]
            assert batch.offsets[row, slots[node]] == tree.depth[node]
            seen = {slots[other] for other in tree.path(node)}
            assert set(batch.mask[row, slots[node]].nonzero().flatten().tolist()) == seen
            parent = int(tree.parents[node])
            assert parent < 0 or slots[parent] < slots[node]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BadRequest, match="at least one row"):
        stack([])
