"""One sequence's tree while a draft model grows it.

Two trees grow side by side. *Nodes* are guesses: each has a token, a parent and a score, the probability that the
target keeps it. *Places* are what the draft model has read: the known tokens, and a trie below the pending one. A node
whose path stands in the trie can have children:

    places   … pending ─ a ─ b ─ c        read in one pass: "a b c" is what a look-up expected
    nodes        0 ─┬─ a ─┬─ b ─ d        the draft model agreed with a and b, so d needed no further pass
                    └─ x  └─ y

Where tokens are drawn from q (rules `block` and `standard`) the shape of the tree follows rank and depth alone; what
is read along saves passes there, too, and changes nothing else.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.draft.base import Ask
from paceline.draft.costs import Costs, best_cut
from paceline.draft.hits import Hits, fixed_share
from paceline.errors import BadLogits
from paceline.tree import Drawn, TokenTree

LEAST = 0.01
"""A guess that is less likely to be kept is not worth a place in a pass."""


class Place(NamedTuple):
    """A token that the draft model has read, or is about to."""

    token: int
    offset: int
    """Its position behind the committed ones."""
    above: tuple[int, ...]
    """Staged slots of the tokens above it, pending and known ones included."""
    slot: int


class Growth(NamedTuple):
    """How a tree is to grow."""

    depth: int
    """Deepest node."""
    top_k: int
    """Children of a node, and nodes read in a pass."""
    fixed: bool
    """Level by level down to `depth`; else as far as it pays."""
    draws: bool
    """Tokens are drawn from q."""
    greedy: bool
    """The request takes the likeliest token."""


class Sketch:
    """What grows for one sequence in one step.

    Args:
        known: what the draft model must read first: committed tokens, then the pending one.
    """

    def __init__(self, ask: Ask, known: list[int], growth: Growth, hits: Hits, costs: Costs) -> None:
        self.ask, self.growth, self.hits, self.costs = ask, growth, hits, costs
        self.num_known = len(known)
        self.tokens: list[int | None] = [ask.pending]
        """None is a void node: a sibling that q does not have. It takes its place in every comparison and is left out
        of the tree; else the place that one value frees would go to a node elsewhere."""
        self.parents, self.depths, self.scores, self.is_first = [-1], [0], [1.0], [True]
        self.children: dict[int, list[int]] = {}
        """Of the nodes that were given children; there may be none."""
        self.q: dict[int, Tensor] = {}
        """The law that a node's children were drawn from."""
        self.places: list[Place] = []
        self._known = known
        self._below: dict[tuple[int, int], int] = {}
        self._place_of: dict[int, int] = {}
        self._logits: dict[int, Tensor] = {}
        self._waiting: list[int] = [0]
        """Nodes that get children once their places are read."""
        self._level_done = 0
        self.passes, self.spent, self.num_levels = 0, 0.0, 0

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to `node`."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def drafted(self, node: int) -> list[int]:
        """The tokens from below the root to `node`."""
        return [token for one in self.path(node) if (token := self.tokens[one]) is not None]

    # -- what to read ------------------------------------------------------------------------------------------

    def plan(self, slot: int, most: int) -> list[Place]:
        """What to read next in slots from `slot` on; none at the end. At most `most` tokens where there is a choice."""
        begin = len(self.places)
        if not begin:
            for i, known in enumerate(self._known):
                self.places.append(Place(known, i, tuple(range(slot, slot + i)), slot + i))
            self._place_of[0] = len(self._known) - 1
            self._add_ahead(0, slot, len(self._known), most)
            return self.places[:]
        while chosen := self._frontier():
            unread = [node for node in chosen if not self._is_read(node)]
            if not unread:
                for node in chosen:
                    self._expand(node)
                continue
            for node in unread:
                token = self.tokens[node]
                assert token is not None
                self._place_of[node] = self._add(self._place_of[self.parents[node]], token, slot - begin)
            # All together and in their order, so that what happened to be read along changes no number of a node.
            self._waiting = chosen
            self._add_ahead(unread[0], slot - begin, len(unread), most)
            return self.places[begin:]
        return []

    def _is_read(self, node: int) -> bool:
        """Whether nothing must be read for a node's children; finds what was read along."""
        token, above = self.tokens[node], self._place_of.get(self.parents[node])
        if node not in self._place_of and token is not None and above is not None and (above, token) in self._below:
            self._place_of[node] = self._below[above, token]
        return token is None or node in self._place_of

    def _add(self, above: int, token: int, shift: int) -> int:
        """A new place below another one; its slot is its number plus `shift`."""
        parent, number = self.places[above], len(self.places)
        self.places.append(Place(token, parent.offset + 1, (*parent.above, parent.slot), number + shift))
        self._below[above, token] = number
        return number

    def _add_ahead(self, node: int, shift: int, width: int, most: int) -> None:
        """Read along what a look-up expects behind a node, as far as that costs less than the passes it may save.

        Args:
            width: tokens of the pass so far.
        """
        room = min(most - width, self.growth.depth - self.depths[node] - 1)
        if self.ask.ahead is None or room < 1:
            return
        place = self._place_of[node]
        for token, chance in self.ask.ahead(self.drafted(node), room):
            if chance * self.costs.guess(1) <= self.costs.guess(width + 1) - self.costs.guess(width):
                break
            known = self._below.get((place, token))
            place = self._add(place, token, shift) if known is None else known
            width += known is None

    def _frontier(self) -> list[int]:
        """The nodes to give children next, best first; none when the tree is grown."""
        if self.growth.fixed:
            return self._level()
        open_nodes = [
            n for n in range(1, len(self.tokens)) if n not in self.children and self.depths[n] < self.growth.depth
        ]
        return [node for node in open_nodes if self._is_read(node)] or self._worthwhile(open_nodes)

    def _level(self) -> list[int]:
        """The best nodes of the next level, without those whose children could not be kept in the end.

        The path of best children always goes on. Where both models agree on the best token the target takes that
        path, however unlikely the draft finds it.
        """
        self._level_done += 1
        fresh = [node for node, depth in enumerate(self.depths) if depth == self._level_done]
        if self._level_done >= self.growth.depth:
            return []
        rivals = sorted(self.scores[1:], reverse=True)
        floor = rivals[self.ask.budget - 1] if len(rivals) >= self.ask.budget else 0.0
        most = fixed_share(0) if self._is_drawn else 1.0
        worth = [node for node in fresh if self.scores[node] * most > floor]
        return sorted(worth, key=lambda node: (not self.is_first[node], -self.scores[node]))[: self.growth.top_k]

    def _worthwhile(self, open_nodes: list[int]) -> list[int]:
        """The most promising nodes, if another pass brings more for its time than the whole draft so far.

        Reading a node brings its score times what its best child is likely to get; each further one must pay for
        itself.
        """
        ranked = sorted(open_nodes, key=lambda node: -self.scores[node])
        beyond = [self.scores[ranked[0]] * chance for _, chance in self._expected(ranked[0])] if ranked else []
        scores = sorted([*self.scores[1:], *beyond], reverse=True)[: self.ask.budget]
        rate = best_cut(scores, self.costs, self.spent).rate
        floor = scores[-1] if len(scores) == self.ask.budget else LEAST
        chosen: list[int] = []
        gain = 0.0
        for node in ranked[: self.growth.top_k]:
            more = self.scores[node] * self.hits.alpha
            width = len(chosen)
            if more <= floor or (chosen and more < rate * (self.costs.guess(width + 1) - self.costs.guess(width))):
                break
            chosen.append(node)
            gain += more
        levels = max(1.0, self.hits.per_pass)
        return chosen if gain * levels > rate * self.costs.guess(max(1, len(chosen))) else []

    def _expected(self, node: int) -> list[tuple[int, float]]:
        """What a look-up expects behind a leaf: guesses that cost no pass of the draft model."""
        room = min(self.growth.depth, self.ask.budget) - self.depths[node]
        return self.ask.ahead(self.drafted(node), room) if self.ask.ahead is not None and room > 0 else []

    def extend(self) -> None:
        """Put what a look-up expects behind the likeliest leaf, once the draft model has had its say."""
        self.num_levels = max(self.depths)
        leaves = [n for n in range(len(self.tokens)) if n not in self.children]
        if self.growth.fixed or not leaves:
            return
        node = max(leaves, key=lambda leaf: self.scores[leaf])
        score = self.scores[node]
        for token, chance in self._expected(node):
            self._append(node, token, score * chance)
            node = len(self.tokens) - 1

    # -- what was read -----------------------------------------------------------------------------------------

    def learn(self, num_read: int, rows: Sequence[Float[Tensor, "V"] | None]) -> None:
        """Take in what the draft model says after each of the last `num_read` places; None where that is no law."""
        first = len(self.places) - num_read
        self._logits |= {first + i: row for i, row in enumerate(rows) if row is not None}
        self.passes += 1
        self.spent += self.costs.guess(num_read)
        for node in self._waiting:
            self._expand(node)
        self._waiting = []

    @property
    def _is_drawn(self) -> bool:
        return self.growth.draws and not self.growth.greedy

    def _expand(self, node: int) -> None:
        """Give a node its children; where nothing is said after it there are none that hold a token."""
        place = self._place_of.get(node)
        logits = None if place is None else self._logits.get(place)
        found = [] if logits is None else self._candidates(node, logits)
        if self._is_drawn:
            found += [(None, fixed_share(rank)) for rank in range(len(found), self.growth.top_k)]
        self.children[node] = list(range(len(self.tokens), len(self.tokens) + len(found)))
        for rank, (token, share) in enumerate(found):
            self._append(node, token, self.scores[node] * share, self.is_first[node] and rank == 0)

    def _append(self, parent: int, token: int | None, score: float, is_first: bool = False) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        self.is_first.append(is_first)

    def _candidates(self, node: int, logits: Float[Tensor, "V"]) -> list[tuple[int | None, float]]:
        """(token, share of the parent's score) of the children, best or first drawn first."""
        path, ask, count = self.drafted(node), self.ask, self.growth.top_k
        try:
            if self._is_drawn:
                q = ask.law(logits, path).exp().float()  # drawn from as it is reported, rounding included
                self.q[node] = q.cpu()
                drawn = [ask.draws.draft(q)] if count == 1 else ask.draws.distinct(q, count)
                return [(token, fixed_share(rank)) for rank, token in enumerate(drawn)]
            # One more than is wanted: how far it is behind tells how sure the best one is.
            found = ask.top(logits, path, ask.position + len(path) + 1, min(count + 1, logits.shape[0]))
        except BadLogits:
            return []  # bias and penalties left no token
        shares = self.hits.shares([key for _, key in found], count, self.growth.greedy)
        if not self.growth.fixed:
            shares = [share for share in shares if share * self.scores[node] > LEAST] or shares[:1]
        return [(token, share) for (token, _), share in zip(found, shares, strict=False) if share > 0.0]

    # -- the tree, and what became of it -----------------------------------------------------------------------

    def tree(self) -> TokenTree:
        """The best nodes within the budget. A score never grows along a path, so a parent is kept with its child."""
        kept = self._kept()
        place = {node: new for new, (node, _) in enumerate(kept)}
        drawn, q = Drawn.FIXED, None
        if self._is_drawn and len(kept) > 1:
            drawn = Drawn.IID if self.growth.top_k == 1 else Drawn.DISTINCT
            q = torch.zeros(len(kept), self.q[0].shape[0])
            for node, new in place.items():
                if node in self.q:
                    q[new] = self.q[node]
        return TokenTree(
            torch.tensor([token for _, token in kept]),
            torch.tensor([-1, *(place[self.parents[node]] for node, _ in kept[1:])]),
            drawn,
            q,
            torch.tensor([self.scores[node] for node, _ in kept]),
        )

    def read_slots(self) -> list[int]:
        """The staged slot of each node of `tree`; -1 for those that were not read."""
        places = [self._place_of.get(node) if self._is_read(node) else None for node, _ in self._kept()]
        return [-1 if place is None else self.places[place].slot for place in places]

    def _kept(self) -> list[tuple[int, int]]:
        """(node, token) of the nodes of `tree`, in their order."""
        ranked = sorted(range(1, len(self.tokens)), key=lambda node: -self.scores[node])  # stable: the parent wins
        ranked = ranked[: self.ask.budget]
        if not self.growth.fixed:
            ranked = ranked[: best_cut([self.scores[node] for node in ranked], self.costs, self.spent).num_nodes]
        return [(n, token) for n in [0, *sorted(ranked)] if (token := self.tokens[n]) is not None]

    def kept_slots(self, tokens: Sequence[int]) -> list[int]:
        """The staged slots of the known tokens and of as much of what became text below the pending one as was read."""
        place = self.num_known - 1
        slots = [place.slot for place in self.places[: self.num_known]]
        for token in tokens:
            below = self._below.get((place, token))
            if below is None:
                break
            place = below
            slots.append(self.places[place].slot)
        return slots

    def outcomes(self, following: Sequence[int]) -> list[tuple[float, bool]]:
        """(chance given to the best guess, whether it came) for each guess that the text decided."""
        node, found = 0, []
        for token in following:
            kids = self.children.get(node)
            if not kids:
                break
            best = kids[0]
            found.append((self.scores[best] / self.scores[node], self.tokens[best] == token))
            below = [kid for kid in kids if self.tokens[kid] == token]
            if not below:
                break
            node = below[0]
        return found
