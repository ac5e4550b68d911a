"""Everything the target reads in one pass is a tree whose node 0 is the pending token.

A chain is a tree with one child per node; plain decoding is the tree with one node. Two numberings live here:

    nodes   the drafter's own order, parents before children; paths, laws and verdicts speak of nodes
    slots   where the nodes lie in the pass: the likeliest path first, because the CPU forward is bit-exact there

    nodes         0 ─┬─ 1 ── 3        slots, if node 2 scores best     0 2 1 3
                     └─ 2                   a chain                    0 1 2 3 …
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from paceline.errors import BadRequest


class Drawn(Enum):
    """How the children of every node were chosen: the one thing a rule must know about a drafter, besides q."""

    FIXED = "fixed"
    """Without chance given the path (look-up, top-k), or coupled to the request's noise: needs no q."""
    IID = "iid"
    """Independently from q, repeats allowed."""
    DISTINCT = "distinct"
    """From q without replacement, in the order of the node numbers."""


@dataclass(frozen=True, eq=False)
class Rider:
    """Extra tokens that share a tree's pass and are never accepted (Lookahead's window)."""

    tokens: Int64[Tensor, "M"]
    offsets: Int64[Tensor, "M"]
    """Position of each rider token minus the pending token's position."""
    mask: Bool[Tensor, "M _"]
    """[M, N + M]: what each rider token sees of the tree's nodes (in node order), then of the riders."""
    __no_type_check__: ClassVar[bool] = True  # checked below, in the test run too, with words

    def __post_init__(self) -> None:
        size = len(_check_ids("rider tokens", self.tokens))
        if not _is_int64(self.offsets, (size,)):
            raise BadRequest(
                f"rider offsets are {_say(self.offsets)}; one int64 offset for each of {size} tokens is needed"
            )
        mask = self.mask
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2 or mask.shape[0] != size:
            raise BadRequest(f"rider mask is {_say(self.mask)}; bool [{size}, nodes + {size}] is needed")


@dataclass(frozen=True, eq=False)
class Read:
    """How far the target has read a tree's nodes already: through its first layers, for a draft from there."""

    layer: int
    """The first layer that has not seen them."""
    slots: list[int]
    """The staged slot of each node; -1 for a node that was not read."""
    states: Float[Tensor, "S H"]
    """What the layer before gave for every staged slot."""
    __no_type_check__: ClassVar[bool] = True  # made by the package itself


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Drafted tokens under the pending token, with a truthful label of how siblings were drawn.

    `tokens[0]` is the pending token and `parents[0]` is -1; a parent comes before its children, and siblings are
    numbered in the order in which they were drawn.
    """

    tokens: Int64[Tensor, "N"]
    parents: Int64[Tensor, "N"]
    drawn: Drawn = Drawn.FIXED
    q: Float[Tensor, "N V"] | None = None
    """q[i] is the law that the children of node i were drawn from; rows of leaves are never read."""
    score: Float[Tensor, "N"] | None = None
    """Expected acceptance of each node: for budgets, for slots, and for choosing between drafters."""
    rider: Rider | None = None
    read: Read | None = None
    __no_type_check__: ClassVar[bool] = True  # checked below, in the test run too, with words

    def __post_init__(self) -> None:
        ids = _check_ids("tree tokens", self.tokens)
        size = len(ids)
        if not _is_int64(self.parents, (size,)):
            raise BadRequest(
                f"tree parents are {_say(self.parents)}; one int64 parent for each of {size} nodes is needed"
            )
        parents = self._parents
        if size == 0 or parents[0] != -1:
            raise BadRequest(f"tree parents are {parents}; node 0 is the pending token and needs parent -1")
        for node in range(1, size):
            if not 0 <= parents[node] < node:
                raise BadRequest(f"node {node} has parent {parents[node]}; a parent from 0 to {node - 1} is needed")
        if self.q is not None or self.score is not None or self.rider is not None or self.drawn is Drawn.DISTINCT:
            self._check_extras(ids)

    def _check_extras(self, ids: list[int]) -> None:
        size = len(ids)
        if self.q is not None and (not _is_float(self.q, 2) or self.q.shape[0] != size):
            raise BadRequest(f"tree q is {_say(self.q)}; one float row over the vocabulary for each of {size} nodes")
        if self.score is not None and (not _is_float(self.score, 1) or self.score.shape[0] != size):
            raise BadRequest(f"tree score is {_say(self.score)}; one float for each of {size} nodes is needed")
        if self.rider is not None and self.rider.mask.shape[1] != size + self.rider.tokens.shape[0]:
            needed = size + self.rider.tokens.shape[0]
            raise BadRequest(f"rider mask is {_say(self.rider.mask)}; {needed} columns, nodes then riders, are needed")
        if self.drawn is Drawn.DISTINCT:
            for node, kids in enumerate(self.children):
                if len({ids[kid] for kid in kids}) < len(kids):
                    raise BadRequest(
                        f"children of node {node} repeat a token, {[ids[kid] for kid in kids]}; siblings drawn "
                        "without replacement differ: label the tree IID, or merge them"
                    )

    # -- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def root(cls, pending: int) -> "TokenTree":
        """Plain decoding's tree: the pending token alone."""
        return cls.chain(pending, ())

    @classmethod
    def chain(cls, pending: int, tokens: Sequence[int]) -> "TokenTree":
        """One path below the pending token."""
        ids = [pending, *tokens]
        return cls(_ids(ids), torch.arange(-1, len(ids) - 1))

    @classmethod
    def from_paths(cls, pending: int, paths: Sequence[Sequence[int]]) -> "TokenTree":
        """The paths as one trie: common beginnings are shared, the first path's nodes come first."""
        ids, parents = [pending], [-1]
        seen: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                child = seen.get((node, token))
                if child is None:
                    child = seen[node, token] = len(ids)
                    ids.append(token)
                    parents.append(node)
                node = child
        return cls(_ids(ids), _ids(parents))

    def prefix(self, num_nodes: int) -> "TokenTree":
        """The first `num_nodes` nodes, the root counted.

        Cutting by number keeps IID and DISTINCT drafts exact as long as the order of the nodes was settled
        without looking at the values drawn (see the rule for plug-in authors).
        """
        if num_nodes < 1:
            raise BadRequest(f"{num_nodes} nodes were asked for; the pending token always stays: give 1 or more")
        if num_nodes >= self.num_nodes:
            return self
        rider = self.rider
        if rider is not None:
            seen = torch.cat([rider.mask[:, :num_nodes], rider.mask[:, self.num_nodes :]], dim=1)
            rider = Rider(rider.tokens, rider.offsets, seen)
        return TokenTree(
            self.tokens[:num_nodes],
            self.parents[:num_nodes],
            self.drawn,
            None if self.q is None else self.q[:num_nodes],
            None if self.score is None else self.score[:num_nodes],
            rider,
            None if self.read is None else replace(self.read, slots=self.read.slots[:num_nodes]),
        )

    def truncate(self, budget: int) -> "TokenTree":
        """At most `budget` drafted nodes, the root not counted: a budget of 0 leaves plain decoding."""
        return self.prefix(max(budget, 0) + 1)

    def shallow(self, depth: int) -> "TokenTree":
        """The nodes at most `depth` below the root, in their order. A cut by depth looks at no drawn value."""
        return self.keep([node for node, deep in enumerate(self.depth) if deep <= depth])

    def keep(self, nodes: Sequence[int]) -> "TokenTree":
        """Some of the nodes, increasing, the root and the parent of each among them."""
        kept = list(nodes)
        if len(kept) == self.num_nodes:
            return self
        place = {node: new for new, node in enumerate(kept)}
        rider = self.rider
        if rider is not None:
            seen = torch.cat([rider.mask[:, kept], rider.mask[:, self.num_nodes :]], dim=1)
            rider = Rider(rider.tokens, rider.offsets, seen)
        return TokenTree(
            self.tokens[kept],
            _ids([-1, *(place[self._parents[node]] for node in kept[1:])]),
            self.drawn,
            None if self.q is None else self.q[kept],
            None if self.score is None else self.score[kept],
            rider,
            None if self.read is None else replace(self.read, slots=[self.read.slots[node] for node in kept]),
        )

    def without_rider(self) -> "TokenTree":
        """The nodes alone."""
        return replace(self, rider=None)

    # -- derived -----------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[0])

    @cached_property
    def ids(self) -> list[int]:
        """The token of each node, as plain integers."""
        return [int(token) for token in self.tokens.tolist()]

    @cached_property
    def _parents(self) -> list[int]:
        return [int(parent) for parent in self.parents.tolist()]

    @cached_property
    def depth(self) -> list[int]:
        """Steps from the root to each node; the root has 0."""
        depth = [0]
        for parent in self._parents[1:]:
            depth.append(depth[parent] + 1)
        return depth

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of each node, in the order drawn."""
        children: list[list[int]] = [[] for _ in self._parents]
        for node, parent in enumerate(self._parents[1:], start=1):
            children[parent].append(node)
        return children

    @cached_property
    def is_chain(self) -> bool:
        return self._parents == list(range(-1, self.num_nodes - 1))

    @cached_property
    def ancestors(self) -> Bool[Tensor, "N N"]:
        """Row i marks what node i may attend to in the tree: its ancestors and itself."""
        if self.is_chain:
            order = torch.arange(self.num_nodes)
            return order[:, None] >= order  # tril_ starts every thread, whatever the size
        rows: list[list[bool]] = []
        for node, parent in enumerate(self._parents):
            row = rows[parent].copy() if node else [False] * self.num_nodes
            row[node] = True
            rows.append(row)
        return torch.tensor(rows)

    @cached_property
    def slot_order(self) -> list[int]:
        """The nodes in the order of their slots: depth first, a node's best child before its siblings.

        Best is the highest score, or the first drawn where there is none; a chain keeps its order.
        """
        if self.is_chain:
            return list(range(self.num_nodes))
        score = None if self.score is None else self.score.tolist()
        order: list[int] = []
        open_nodes = [0]
        while open_nodes:
            node = open_nodes.pop()
            order.append(node)
            kids = self.children[node]
            if score is not None and len(kids) > 1:
                kids = sorted(kids, key=lambda kid: -score[kid])  # stable: the first drawn wins a tie
            open_nodes.extend(reversed(kids))
        return order

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self._parents[node]
        return path[::-1]


class Stacked(NamedTuple):
    """A batch of trees as one pass reads it: a row's nodes in slot order, then its riders, then padding.

    A padding slot holds token 0 at offset 0, sees itself alone and is seen by nobody.
    """

    tokens: Int64[Tensor, "B N"]
    offsets: Int64[Tensor, "B N"]
    """Position of each slot minus the position of the row's pending token."""
    mask: Bool[Tensor, "B N N"]
    """Whether a slot (row) sees a slot (column) of the same tree."""
    slots: list[list[int]]
    """slots[b][node] is the slot of a node."""
    riders: list[int]
    """Where the riders of each row begin."""


def stack(trees: list[TokenTree], staged: int = 0) -> Stacked:
    """The trees side by side, each node in its slot.

    Args:
        staged: slots that are staged already; nodes that were read (`TokenTree.read`) keep theirs, the others follow.
    """
    if not trees:
        raise BadRequest("no trees were given; a pass needs at least one row")
    slots = [_slots(tree, staged) for tree in trees]
    ends = [max(staged - 1, *own) + 1 for own in slots]
    riders = [0 if tree.rider is None else tree.rider.tokens.shape[0] for tree in trees]
    width = max(end + more for end, more in zip(ends, riders, strict=True))
    tokens = torch.zeros(len(trees), width, dtype=torch.int64)
    offsets = torch.zeros_like(tokens)
    mask = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
    for row, tree in enumerate(trees):
        where = torch.tensor(slots[row])
        tokens[row, where] = tree.tokens
        offsets[row, where] = torch.tensor(tree.depth)
        mask[row, where[:, None], where] = tree.ancestors
        if tree.rider is not None:
            begin, size = ends[row], tree.num_nodes
            end = begin + riders[row]
            tokens[row, begin:end] = tree.rider.tokens
            offsets[row, begin:end] = tree.rider.offsets
            mask[row, begin:end, where] = tree.rider.mask[:, :size]
            mask[row, begin:end, begin:end] = tree.rider.mask[:, size:]
    return Stacked(tokens, offsets, mask, slots, ends)


def _slots(tree: TokenTree, staged: int) -> list[int]:
    """The slot of each node: where it was read, else behind what is staged, the likeliest path first."""
    read = [-1] * tree.num_nodes if tree.read is None else list(tree.read.slots)
    new = staged
    for node in tree.slot_order:
        if read[node] < 0:
            read[node] = new
            new += 1
    return read


def _ids(ids: list[int]) -> Int64[Tensor, "N"]:
    try:
        return torch.tensor(ids, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadRequest(f"token ids are {ids!r}; plain integers are needed") from error


def _check_ids(what: str, tokens: object) -> list[int]:
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.ndim != 1:
        raise BadRequest(f"{what} are {_say(tokens)}; a flat int64 tensor is needed")
    ids: list[int] = tokens.tolist()
    if ids and min(ids) < 0:
        raise BadRequest(f"{what} hold {min(ids)}; token ids are 0 or more")
    return ids


def _is_int64(given: object, shape: tuple[int, ...]) -> bool:
    return isinstance(given, Tensor) and given.dtype == torch.int64 and tuple(given.shape) == shape


def _is_float(given: object, ndim: int) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.ndim == ndim


def _say(given: object) -> str:
    if not isinstance(given, Tensor):
        return f"a {type(given).__name__}"
    return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
