"""A smaller model of the same family drafts for the target.

The draft model has a key/value cache of its own. It is the target's kind of cache and follows the same rule: what is
known is committed, what is guessed is staged behind it, and what the target keeps of the guesses is committed too.

    between steps                | read …………………………………… | unread |
    between propose and observe  | read …………………………………… , unread, pending | staged nodes, level by level |

The invariant, for every live sequence and after every `begin` and `observe`:

    num_read(state) + len(state.unread)  ==  tokens of the text without the pending one

and one more between `propose` and `observe`, while `state.root` holds the pending token. What is unread is at most a
few tokens (the last guess of a draft that was kept whole) unless the sequence was not asked for a while.

A chain is a tree with one child per node. Trees grow by levels: every node read gives its `tree_top_k` best children,
the best few of them are read next, and in the end the best nodes by score are kept. A node's score is its parent's
times a share: the draft's probability when the likeliest token is taken, and a constant by rank when sampling. There
q(x) says nothing about whether a sibling coupled to the noise hits, and its rank does.

Many sequences share one drafter: its cache is a pool with a row for each, and every level is one pass over all rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.base import Ask, Drafter, Step
from paceline.errors import BadLogits, BadRequest, IncompatibleDrafter, nearest
from paceline.prefix import BUDGET, Prefixes
from paceline.target import Target
from paceline.tree import Drawn, TokenTree

CHUNK = 512
"""Tokens of a text read per pass."""
COST = 0.4
"""A pass of the draft model, in passes of the target: measured for models of 0.5 and 1.5 billion weights on a CPU."""
MOST = 10
"""Deepest draft where the depth is left to what is accepted."""
PRIOR = (3.2, 4.0)
"""Guesses kept and guesses tested that a text starts with."""
MEMORY = 0.9
"""What a pass before counts of the present one: about ten passes are remembered."""
FEW = 8
"""Unread tokens that are read together with the pending one; more would make rows of logits that nobody needs."""
SHARES = (0.73, 0.12, 0.05, 0.03)
"""Measured shares of the target's token among siblings coupled to its noise, by rank; further ones fall by `FALL`."""
FALL = 0.6
RULES = ("coupled", "block", "standard")


@dataclass(eq=False)
class Reading:
    """How far the draft model has read one text, and what it staged for it."""

    alone: KVCache | None
    """Its own cache while the prompt is read; the first proposal moves it into the pool."""
    row: int | None = None
    """Its row in the pool."""
    unread: list[int] = field(default_factory=list)
    """Committed tokens that the draft model has not read."""
    root: int | None = None
    """The pending token, once it was read for a proposal that is not yet observed."""
    nodes: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(parent, token) -> (node, staged slot) of the drafted nodes that were read."""
    text: list[int] = field(default_factory=list)
    """All committed tokens; the first of them are those that were read."""
    drafted: int = 0
    """Depth of the tree that was proposed last."""
    hits: float = PRIOR[0]
    tests: float = PRIOR[1]
    """How many guesses were kept, and how many came to be tested, of late."""
    is_greedy: bool | None = None
    """Whether the request takes the likeliest token; known from the first proposal on."""

    @property
    def is_closed(self) -> bool:
        """Nothing will be drafted any more: the text has ended, outgrown the draft's context, or left its ids."""
        return self.alone is None and self.row is None

    def count(self, kept: int) -> None:
        """Take note of how much of the last proposal was kept."""
        if self.drafted:
            self.hits = MEMORY * self.hits + kept
            self.tests = MEMORY * self.tests + min(kept + 1, self.drafted)

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The staged slots of the longest beginning of `tokens` that was drafted and read."""
        node, slots = 0, []
        for token in tokens:
            if (node, token) not in self.nodes:
                break
            node, slot = self.nodes[node, token]
            slots.append(slot)
        return slots


class DraftModel(Drafter[Reading]):
    """Drafts with a smaller causal model whose token ids mean the same as the target's.

    Args:
        model: the draft model; it may have another dtype, device, context and padded vocabulary than the target.
        tree_top_k: children per node; 1 drafts a chain.
        depth: deepest draft; None drafts as deep as pays by what was accepted so far, see `worth`.
        rule: the verification rule to draft for. Under `coupled` the best child is the target's own choice wherever
            both laws agree; under `block` and `standard` tokens are drawn from q and the trees bring q.
        reuse_prefix: keep keys and values of recent texts, so that one which begins like them is read from there on.
    """

    def __init__(
        self,
        model: Target,
        *,
        tree_top_k: int = 1,
        depth: int | None = None,
        rule: str = "coupled",
        reuse_prefix: bool = True,
    ) -> None:
        for name, value in (("tree_top_k", tree_top_k), ("depth", depth)):
            if value is not None and value < 1:
                raise BadRequest(f"{name}={value} was given; 1 or more is needed")
        if rule not in RULES:
            raise BadRequest(f"no rule {rule!r}{nearest(rule, RULES)}; choose from {RULES}")
        self.model, self.tree_top_k, self.depth, self.rule = model, tree_top_k, depth, rule
        self._vocab_size = model.vocab_size
        self._prefixes = Prefixes(BUDGET // 2 if reuse_prefix else 0)
        self._pool: KVCache | None = None
        self._rows: list[Reading] = []
        """The sequences in the pool; a state's `row` is its place here."""

    def bind(self, target: Any) -> None:
        """Takes note of the target's vocabulary: sizes may differ by padding, and only shared ids are proposed."""
        self._vocab_size = min(self.model.vocab_size, int(target.vocab_size))

    def begin(self, prompt: Step) -> Reading:
        """Read the prompt's first chunk, into a cache of its own."""
        cache = self.model.new_cache(1, len(prompt.tokens) + 1)
        state, known = Reading(cache), 0
        found = self._prefixes.find([*prompt.tokens, 0])  # the 0 stands for a pending token
        if found is not None:
            cache.load(found.kv, found.length)
            known = found.length
        state.text = prompt.tokens[:known]
        self._learn(state, prompt.tokens[known:])
        return state

    def propose(self, states: list[Reading], asks: list[Ask]) -> list[TokenTree]:
        """A tree per sequence, all of them grown side by side: one pass for what is known, one for each level."""
        self._unstage()
        for state in states:
            self._forget_root(state)
        sketches = [self._sketch(state, ask) for state, ask in zip(states, asks, strict=True)]
        growing = [sketch for sketch in sketches if sketch is not None]
        if growing:
            self._join([sketch.state for sketch in growing])
            self._read_known(growing)
            while self._read_level(growing):
                pass
        trees = [
            TokenTree.root(ask.pending) if sketch is None else sketch.tree()
            for sketch, ask in zip(sketches, asks, strict=True)
        ]
        for state, tree in zip(states, trees, strict=True):
            state.drafted = max(tree.depth)
        return trees

    def observe(self, states: list[Reading], steps: list[Step]) -> None:
        """Keep the staged slots of the drafted nodes that became text; what was never read is read later."""
        paths: list[list[int]] = [[] for _ in self._rows]
        rests = []
        for state, step in zip(states, steps, strict=True):
            rest = step.tokens
            state.count(len(rest) - 1)
            state.drafted = 0
            if state.row is not None and state.root is not None and rest[:1] == [state.root]:
                paths[state.row] = state.walk(rest[1:])
                rest = rest[1 + len(paths[state.row]) :]
                state.root = None
            rests.append(rest)
        if self._pool is not None:
            self._pool.commit(paths)
            self._unstage()
        for state, rest in zip(states, rests, strict=True):
            self._forget_root(state)
            self._learn(state, rest)

    def end(self, state: Reading) -> None:
        """Free the sequence's row; the other rows move up. What was read of it may serve the next text."""
        row = state.row
        cache = self._pool if state.alone is None else state.alone
        if cache is not None and not state.is_closed:
            read = min(self.num_read(state) - (state.root is not None), len(state.text))
            self._prefixes.keep(state.text[:read], 0, 0, cache, row or 0)
        state.alone, state.row, state.root = None, None, None
        state.unread, state.nodes, state.text = [], {}, []
        if row is None or self._pool is None:
            return
        del self._rows[row]
        for place, other in enumerate(self._rows):
            other.row = place
        if self._rows:
            self._pool.keep([place for place in range(self._pool.rows) if place != row])
            self._pool.fit()
        else:
            self._pool = None

    def num_read(self, state: Reading) -> int:
        """Tokens of the sequence that lie committed in the draft model's cache."""
        if state.alone is not None:
            return state.alone.lengths[0]
        return 0 if state.row is None or self._pool is None else self._pool.lengths[state.row]

    # -- the text ----------------------------------------------------------------------------------------------

    def _learn(self, state: Reading, tokens: list[int]) -> None:
        """Take committed tokens in; a text that the draft model can never read to its end is given up and freed."""
        if state.is_closed:
            return
        size = self.num_read(state) + len(state.unread) + len(tokens)
        # The pending token needs a position too. A text only grows, so there is no way back from either case.
        if size >= self.model.max_positions or max(tokens, default=0) >= self.model.vocab_size:
            self.end(state)
            return
        state.unread += tokens
        state.text += tokens
        while state.alone is not None and state.unread:
            self._read(state.alone, [state.unread[:CHUNK]], logits=False)
            del state.unread[:CHUNK]

    def _unstage(self) -> None:
        """Leave nothing of any proposal in the pool, also of one whose pass was broken off by an error."""
        if self._pool is not None:
            self._pool.unstage()
        for state in self._rows:
            state.nodes = {}

    def _forget_root(self, state: Reading) -> None:
        """Take the pending token of a proposal back out of the cache when no `observe` has made it text."""
        if state.root is not None and state.row is not None and self._pool is not None:
            self._pool.truncate(state.row, self._pool.lengths[state.row] - 1)
        state.root = None

    def _join(self, states: list[Reading]) -> None:
        """Move the sequences that are asked for the first time into the pool."""
        new = [state for state in states if state.alone is not None]
        if not new:
            return
        caches = [self._pool, *(state.alone for state in new)]
        self._pool = KVCache.join([cache for cache in caches if cache is not None])
        for state in new:
            state.alone, state.row = None, len(self._rows)
            self._rows.append(state)

    # -- passes ------------------------------------------------------------------------------------------------

    def _read(self, cache: KVCache, known: list[list[int]], *, logits: bool) -> Float[Tensor, "B N V"]:
        """Read and commit known tokens, a list for each row; the rows' ends are padded."""
        width = max(len(ids) for ids in known)
        tokens = torch.zeros(len(known), width, dtype=torch.int64)
        offsets = self._padding(cache, width)
        for row, ids in enumerate(known):
            tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            offsets[row, : len(ids)] = torch.arange(len(ids))
        # Causal is enough: padding comes last, so nobody sees it.
        seen = self.model.forward(tokens, offsets, None, cache, logits=logits)
        cache.commit([range(len(ids)) for ids in known])
        return seen.logits

    def _padding(self, cache: KVCache, width: int) -> Tensor:
        """Offsets of slots that hold nothing: any position that the model has."""
        last = self.model.max_positions - 1
        return torch.tensor([[min(0, last - length)] for length in cache.lengths]).repeat(1, width)

    def _read_known(self, growing: list["Sketch"]) -> None:
        """Read what became text since the last proposal and the pending token; its logits are the first level's."""
        pool = self._pool
        assert pool is not None
        states = [sketch.state for sketch in growing]
        while any(len(state.unread) > FEW for state in states):
            known: list[list[int]] = [[] for _ in self._rows]
            for state in states:
                known[_row(state)] = state.unread[:CHUNK]
            self._read(pool, known, logits=False)
            for state in states:
                del state.unread[:CHUNK]
        known = [[] for _ in self._rows]
        for sketch in growing:
            known[_row(sketch.state)] = [*sketch.state.unread, sketch.ask.pending]
        logits = self._read(pool, known, logits=True)
        for sketch in growing:
            sketch.state.unread, sketch.state.root = [], sketch.ask.pending
        for sketch in growing:
            row = _row(sketch.state)
            sketch.expand(0, self._usable(logits[row, len(known[row]) - 1]))

    def _read_level(self, growing: list["Sketch"]) -> bool:
        """Read the best new nodes of every tree in one pass and give them children; False when there are none."""
        pool = self._pool
        assert pool is not None
        levels = [(sketch, sketch.next_level()) for sketch in growing]
        width = max(len(sketch.real(level)) for sketch, level in levels)
        if width == 0:
            return False
        staged = pool.staged
        tokens = torch.zeros(pool.rows, width, dtype=torch.int64)
        offsets = self._padding(pool, width)
        mask = torch.zeros(pool.rows, width, staged + width, dtype=torch.bool)
        mask[:, :, staged:] = torch.eye(width, dtype=torch.bool)
        for sketch, level in levels:
            row = _row(sketch.state)
            for place, (node, token) in enumerate(sketch.real(level)):
                tokens[row, place] = token
                offsets[row, place] = sketch.depths[node] - 1  # the pending token is committed already
                mask[row, place, [sketch.slots[above] for above in sketch.path(node)[:-1]]] = True
                sketch.stage(node, token, staged + place)
        logits = self.model.forward(tokens, offsets, mask, pool).logits
        for sketch, level in levels:
            row = _row(sketch.state)
            for node in level:
                slot = sketch.slots.get(node)
                sketch.expand(node, None if slot is None else self._usable(logits[row, slot - staged]))
        return True

    def _usable(self, logits: Float[Tensor, "V"]) -> Float[Tensor, "_"] | None:
        """A row over the ids that the target has too; none where it is no law (NaN, nothing left)."""
        row = logits[: self._vocab_size]
        peak = float(row.amax())  # NaN if any entry is
        return None if math.isnan(peak) or peak == -math.inf else row

    # -- what to draft -----------------------------------------------------------------------------------------

    def _sketch(self, state: Reading, ask: Ask) -> "Sketch | None":
        """The tree to grow for one sequence; none when there is nothing to guess or the pending token has no id."""
        room = self.model.max_positions - self.num_read(state) - len(state.unread)
        wanted = worth(state.hits / state.tests) if self.depth is None else self.depth
        depth = min(wanted, ask.depth, ask.budget, room)
        if state.is_closed or depth < 1 or ask.pending >= self.model.vocab_size:
            return None
        return Sketch(state, ask, self.tree_top_k, depth, self.rule != "coupled")


class Sketch:
    """One sequence's tree while it grows, nodes numbered as they come: level by level, siblings in their order.

    Where tokens are drawn from q the shape follows rank and depth alone, as the rules `block` and `standard` need: a
    sibling that q does not have leaves a *void* node (no token), which takes its place in every comparison, is never
    read and is left out of the tree. Else the place that one value frees would go to a node elsewhere.
    """

    def __init__(self, state: Reading, ask: Ask, top_k: int, depth: int, draws: bool) -> None:
        self.state, self.ask, self.top_k, self.depth, self.draws = state, ask, top_k, depth, draws
        self.tokens: list[int | None] = [ask.pending]
        self.parents, self.depths, self.scores = [-1], [0], [1.0]
        self.is_first = [True]
        """Whether a node is the best child of the best child of … the root."""
        self.slots: dict[int, int] = {}
        """The staged slots of the nodes that were read."""
        self.q: dict[int, Tensor] = {}
        """The law that a node's children were drawn from."""
        self.fresh: list[int] = []
        """Nodes of the deepest level."""

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to `node`."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def real(self, nodes: list[int]) -> list[tuple[int, int]]:
        """The nodes that hold a token, with it."""
        return [(node, token) for node in nodes if (token := self.tokens[node]) is not None]

    def stage(self, node: int, token: int, slot: int) -> None:
        """Note where a node is read."""
        self.slots[node] = slot
        self.state.nodes[self.parents[node], token] = (node, slot)

    def expand(self, node: int, logits: Float[Tensor, "V"] | None) -> None:
        """Give a node its children; without logits it has none that hold a token."""
        children = [] if logits is None else list(self._children(node, logits))
        if self.draws and not self.state.is_greedy:
            children += [(None, share(rank)) for rank in range(len(children), self.top_k)]
        for rank, (token, part) in enumerate(children):
            self.fresh.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.scores.append(self.scores[node] * part)
            self.is_first.append(self.is_first[node] and rank == 0)

    def next_level(self) -> list[int]:
        """The nodes to read next: the best new ones, without those whose children could not be kept in the end.

        The path of best children always goes on. Where both models agree on the best token the target takes that
        path, however unlikely the draft finds it; it is also the one that the CPU forward reads bit for bit.
        """
        fresh, self.fresh = self.fresh, []
        if not fresh or self.depths[fresh[0]] >= self.depth:
            return []
        rivals = sorted(self.scores[1:], reverse=True)
        floor = rivals[self.ask.budget - 1] if len(rivals) >= self.ask.budget else 0.0
        most = 1.0 if self.state.is_greedy else share(0)
        worth = [node for node in fresh if self.scores[node] * most > floor]
        return sorted(worth, key=lambda node: (not self.is_first[node], -self.scores[node]))[: self.top_k]

    def tree(self) -> TokenTree:
        """The best nodes within the budget. A score never grows along a path, so a parent is kept with its child."""
        ranked = sorted(range(1, len(self.tokens)), key=lambda node: -self.scores[node])  # stable: the parent wins
        kept = self.real([0, *sorted(ranked[: self.ask.budget])])
        place = {node: new for new, (node, _) in enumerate(kept)}
        drawn, q = Drawn.FIXED, None
        if self.draws and not self.state.is_greedy and len(kept) > 1:
            drawn = Drawn.IID if self.top_k == 1 else Drawn.DISTINCT
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

    def _children(self, node: int, logits: Float[Tensor, "V"]) -> Sequence[tuple[int | None, float]]:
        """(token, share of the parent's score) of the children, best or first drawn first."""
        path = [token for _, token in self.real(self.path(node))]
        try:
            greedy = self._is_greedy(logits)
            if self.draws and not greedy:
                return [(token, share(rank)) for rank, token in enumerate(self._draw(node, logits, path))]
            found = self.ask.top(logits, path, self.ask.position + len(path) + 1, min(self.top_k, logits.shape[0]))
        except BadLogits:
            return []  # bias and penalties left no token
        if not greedy:
            return [(token, share(rank)) for rank, (token, _) in enumerate(found)]
        likely = [(token, math.exp(min(key, 0.0))) for token, key in found]
        return [(token, part) for token, part in likely if part > 0.0]

    def _draw(self, node: int, logits: Float[Tensor, "V"], path: list[int]) -> list[int]:
        """Tokens drawn from q: one, or `top_k` without replacement (those that have a probability)."""
        q = self.ask.law(logits, path).exp().float()  # drawn from as it is reported, rounding included
        self.q[node] = q.cpu()
        return [self.ask.draws.draft(q)] if self.top_k == 1 else self.ask.draws.distinct(q, self.top_k)

    def _is_greedy(self, logits: Float[Tensor, "V"]) -> bool:
        """Whether the request takes the likeliest token: its keys then do not change with the position's noise."""
        if self.state.is_greedy is None:
            flat, position = torch.zeros_like(logits), self.ask.position
            one, other = (self.ask.top(flat, (), position + ahead, 1) for ahead in (1, 2))
            if not one:
                return False  # every token is banned, and so it is for the target
            self.state.is_greedy = one == other
        return self.state.is_greedy


def worth(alpha: float, cost: float = COST, most: int = MOST) -> int:
    """The depth at which a draft brings the most tokens for its time, 1 to `most`.

    K guesses, each kept with probability alpha if those above it were, bring (1 - alpha^(K+1)) / (1 - alpha) tokens in
    the time of 1 + K * cost passes of the target (Leviathan et al. 2023, theorem 3.8).
    """
    tokens = [sum(alpha**i for i in range(depth + 1)) for depth in range(1, most + 1)]
    return max(range(1, most + 1), key=lambda depth: tokens[depth - 1] / (1 + depth * cost))


def share(rank: int) -> float:
    """The part of a node's score that its child of this rank gets when sampling."""
    beyond = rank - len(SHARES) + 1
    return SHARES[rank] if beyond <= 0 else SHARES[-1] * FALL**beyond


def _row(state: Reading) -> int:
    assert state.row is not None, "a sequence that is read has joined the pool"
    return state.row


# -- do ids mean the same words? ---------------------------------------------------------------------------------------


def check_vocabularies(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Passes when every id that both tokenizers have means the same; one may go on longer than the other.

    Args:
        target_tokenizer: anything with `get_vocab()`; `eos_token_id` is compared where both have one.

    Raises:
        IncompatibleDrafter: names the first id that differs, with both strings, or the end tokens.
    """
    target, draft = ({i: token for token, i in t.get_vocab().items()} for t in (target_tokenizer, draft_tokenizer))
    advice = "guesses would be other words than the target reads: use a draft model of the target's own family"
    if not target or not draft:
        raise IncompatibleDrafter(f"the vocabularies have {len(target)} and {len(draft)} tokens; both need some")
    for token_id in range(min(max(target), max(draft)) + 1):
        ours, theirs = target.get(token_id), draft.get(token_id)
        if ours != theirs:
            raise IncompatibleDrafter(
                f"token id {token_id} is {_quoted(ours)} for the target and {_quoted(theirs)} for the draft; {advice}"
            )
    end, other = (getattr(tokenizer, "eos_token_id", None) for tokenizer in (target_tokenizer, draft_tokenizer))
    if end is not None and other is not None and end != other:
        raise IncompatibleDrafter(
            f"texts end with id {end} ({_quoted(target.get(end))}) for the target and with id {other} "
            f"({_quoted(draft.get(other))}) for the draft; {advice}, trained for the same kind of text"
        )


def _quoted(token: str | None) -> str:
    return "no token" if token is None else repr(token)
