"""A smaller model of the same family drafts for the target.

The draft model has a key/value cache of its own. It is the target's kind of cache and follows the same rule: what is
known is committed, what is guessed is staged behind it, and what the target keeps of the guesses is committed too.

    between steps                | read …………………………………… | unread |
    between propose and observe  | read …………………………………… | staged: unread, pending, guesses pass by pass |

The invariant, for every live sequence, at all times:

    num_read(state) + len(state.unread)  ==  tokens of the text without the pending one

A text is read when it is first asked about, so one that look-ups serve alone costs the draft model nothing. From then
on what is unread is at most a few tokens: the last guess of a draft that was kept whole, or what look-ups brought.

Many sequences share one drafter: its cache is a pool with a row for each, and every pass is one over all rows. How a
tree grows is in `sketch.py`, how likely a guess is in `hits.py`, what passes cost in `costs.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.base import Ask, Drafter, Forecast, Step
from paceline.draft.costs import Costs
from paceline.draft.hits import Hits
from paceline.draft.sketch import Growth, Place, Sketch
from paceline.errors import BadRequest, nearest
from paceline.prefix import BUDGET, Prefixes
from paceline.target import Target
from paceline.tree import TokenTree

CHUNK = 512
"""Tokens of a text read per pass."""
MOST = 24
"""Deepest draft where the depth is left to what is accepted."""
FEW = 8
"""Unread tokens that are read together with the pending one; more would make rows of logits that nobody needs."""
SIBLINGS = 3
"""Children of a node where their number is left open."""
MOST_TOKENS = 16
"""Tokens of all rows together that a pass is made for."""
RULES = ("coupled", "block", "standard")


@dataclass(eq=False)
class Reading:
    """How far the draft model has read one text, and what it staged for it."""

    alone: KVCache | None
    """Its own cache until the text is first asked about; then it moves into the pool."""
    row: int | None = None
    """Its row in the pool."""
    unread: list[int] = field(default_factory=list)
    """Committed tokens that the draft model has not read."""
    text: list[int] = field(default_factory=list)
    """All committed tokens; the first of them are those that were read."""
    sketch: Sketch | None = None
    """What was proposed last and is not observed yet."""
    hits: Hits = field(default_factory=Hits)
    is_greedy: bool | None = None
    """Whether the request takes the likeliest token; known from the first proposal on."""

    @property
    def is_closed(self) -> bool:
        """Nothing will be drafted any more: the text has ended, outgrown the draft's context, or left its ids."""
        return self.alone is None and self.row is None


class DraftModel(Drafter[Reading]):
    """Drafts with a smaller causal model whose token ids mean the same as the target's.

    Args:
        model: the draft model; it may have another dtype, device, context and padded vocabulary than the target.
        tree_top_k: children per node; 1 drafts a chain. None is 3 under `coupled`, else a chain.
        depth: deepest draft, grown level by level. None drafts on while another pass brings more for its time than the
            draft so far, by the likelihood of its guesses and by `costs`.
        rule: the verification rule to draft for. Under `coupled` the best child is the target's own choice wherever
            both laws agree; under `block` and `standard` tokens are drawn from q and the trees bring q.
        reuse_prefix: keep keys and values of recent texts, so that one which begins like them is read from there on.
        costs: what passes of this model and of the target cost.
    """

    costs: Costs

    def __init__(
        self,
        model: Target,
        *,
        tree_top_k: int | None = None,
        depth: int | None = None,
        rule: str = "coupled",
        reuse_prefix: bool = True,
        costs: Costs | None = None,
    ) -> None:
        for name, value in (("tree_top_k", tree_top_k), ("depth", depth)):
            if value is not None and value < 1:
                raise BadRequest(f"{name}={value} was given; 1 or more is needed")
        if rule not in RULES:
            raise BadRequest(f"no rule {rule!r}{nearest(rule, RULES)}; choose from {RULES}")
        self.model, self.depth, self.rule, self.costs = model, depth, rule, costs or Costs()
        self.tree_top_k = tree_top_k or (SIBLINGS if rule == "coupled" else 1)
        self._vocab_size = model.vocab_size
        self._prefixes = Prefixes(BUDGET // 2 if reuse_prefix else 0)
        self._pool: KVCache | None = None
        self._rows: list[Reading] = []
        """The sequences in the pool; a state's `row` is its place here."""

    def bind(self, target: Any) -> None:
        """Takes note of the target's vocabulary: sizes may differ by padding, and only shared ids are proposed."""
        self._vocab_size = min(self.model.vocab_size, int(target.vocab_size))

    def begin(self, prompt: Step) -> Reading:
        """Take the prompt's first chunk in, and what is known of a text that began like it."""
        state, known = Reading(self.model.new_cache(1, len(prompt.tokens) + 1)), 0
        found = self._prefixes.find([*prompt.tokens, 0])  # the 0 stands for a pending token
        if found is not None:
            assert state.alone is not None
            state.alone.load(found.kv, found.length)
            known = found.length
        state.text = prompt.tokens[:known]
        self._learn(state, prompt.tokens[known:])
        return state

    def forecast(self, state: Reading, ask: Ask) -> Forecast:
        """By what was kept of earlier drafts of this text: the depth at which a chain brings the most for its time."""
        lag, costs = len(state.unread), self.costs.shared(ask.rows)
        few = lag <= FEW and state.alone is None
        once = 0.0 if few else costs.reading * lag
        cost = costs.guess(1 + lag) - costs.guess(1) if few else 0.0
        return state.hits.forecast(costs, self._depth(state, ask), cost)._replace(once=once)

    def propose(self, states: list[Reading], asks: list[Ask]) -> list[TokenTree]:
        """A tree per sequence, all of them grown side by side: one pass for what is known, then as far as it pays."""
        self._unstage()
        for state in states:
            state.sketch = None
        wanted = [self._depth(state, ask) for state, ask in zip(states, asks, strict=True)]
        self._join([state for state, depth in zip(states, wanted, strict=True) if depth])
        for state, ask, depth in zip(states, asks, wanted, strict=True):
            if depth:
                state.sketch = self._sketch(state, ask, depth)
        growing = [state for state in states if state.sketch is not None]
        grown = growing
        while growing:
            growing = self._grow(growing)
        for state in grown:
            assert state.sketch is not None
            state.sketch.extend()
        return [
            TokenTree.root(ask.pending) if state.sketch is None else state.sketch.tree()
            for state, ask in zip(states, asks, strict=True)
        ]

    def observe(self, states: list[Reading], steps: list[Step]) -> None:
        """Keep the staged slots of what became text; what was never read is read later."""
        slots: list[list[int]] = [[] for _ in self._rows]
        rests = []
        for state, step in zip(states, steps, strict=True):
            rest, sketch = step.tokens, state.sketch
            if sketch is not None and rest[:1] == [sketch.ask.pending]:
                slots[_row(state)] = sketch.kept_slots(rest[1:])
                rest = rest[1 + len(slots[_row(state)]) - sketch.num_known :]
                state.unread = []
                state.text += step.tokens[: len(step.tokens) - len(rest)]
                state.hits.learn(sketch.outcomes(step.following), sketch.num_levels, sketch.passes)
            state.sketch = None
            rests.append(rest)
        if self._pool is not None:
            self._pool.commit(slots)
        self._unstage()
        for state, rest in zip(states, rests, strict=True):
            self._learn(state, rest)

    def end(self, state: Reading) -> None:
        """Free the sequence's row; the other rows move up. What was read of it may serve the next text."""
        row = state.row
        cache = self._pool if state.alone is None else state.alone
        if cache is not None and not state.is_closed:
            self._prefixes.keep(state.text[: self.num_read(state)], 0, 0, cache, row or 0)
        state.alone, state.row, state.sketch = None, None, None
        state.unread, state.text = [], []
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

    def _unstage(self) -> None:
        """Leave nothing of any proposal in the pool, also of one whose pass was broken off by an error."""
        if self._pool is not None:
            self._pool.unstage()

    def _join(self, states: list[Reading]) -> None:
        """Read the texts that are asked about for the first time, and move them into the pool."""
        new = [state for state in states if state.alone is not None]
        for state in new:
            assert state.alone is not None
            while state.unread:
                self._commit_known(state.alone, [state.unread[:CHUNK]])
                del state.unread[:CHUNK]
        if new:
            caches = [self._pool, *(state.alone for state in new)]
            self._pool = KVCache.join([cache for cache in caches if cache is not None])
        for state in new:
            state.alone, state.row = None, len(self._rows)
            self._rows.append(state)
        # A text that look-ups served for long has much to read; a few tokens are read with the pending one.
        while any(len(state.unread) > FEW for state in states):
            assert self._pool is not None
            known: list[list[int]] = [[] for _ in self._rows]
            for state in states:
                known[_row(state)] = state.unread[:CHUNK]
            self._commit_known(self._pool, known)
            for state in states:
                del state.unread[:CHUNK]

    # -- passes ------------------------------------------------------------------------------------------------

    def _commit_known(self, cache: KVCache, known: list[list[int]]) -> None:
        """Read and commit known tokens, a list for each row; the rows' ends are padded."""
        width = max(len(ids) for ids in known)
        tokens = torch.zeros(len(known), width, dtype=torch.int64)
        offsets = self._padding(cache, width)
        for row, ids in enumerate(known):
            tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            offsets[row, : len(ids)] = torch.arange(len(ids))
        # Causal is enough: padding comes last, so nobody sees it.
        self.model.forward(tokens, offsets, None, cache, logits=False)
        cache.commit([range(len(ids)) for ids in known])

    def _padding(self, cache: KVCache, width: int) -> Tensor:
        """Offsets of slots that hold nothing: any position that the model has."""
        last = self.model.max_positions - 1
        return torch.tensor([[min(0, last - length)] for length in cache.lengths]).repeat(1, width)

    def _grow(self, growing: list[Reading]) -> list[Reading]:
        """One pass over what the sketches want to read next; those that wanted something."""
        pool = self._pool
        assert pool is not None
        plans: list[tuple[Sketch, int, list[Place]]] = []
        for state in growing:
            assert state.sketch is not None
            plans.append((state.sketch, _row(state), state.sketch.plan(pool.staged, MOST_TOKENS // len(self._rows))))
        width = max(len(places) for _, _, places in plans)
        if width == 0:
            return []
        staged = pool.staged
        tokens = torch.zeros(pool.rows, width, dtype=torch.int64)
        offsets = self._padding(pool, width)
        mask = torch.zeros(pool.rows, width, staged + width, dtype=torch.bool)
        mask[:, :, staged:] = torch.eye(width, dtype=torch.bool)
        for _, row, places in plans:
            for i, place in enumerate(places):
                tokens[row, i], offsets[row, i] = place.token, place.offset
                mask[row, i, list(place.above)] = True
        logits = self._read(pool, tokens, offsets, mask, plans)
        for sketch, row, places in plans:
            if places:
                sketch.learn(len(places), [self._usable(logits[row, i]) for i in range(len(places))])
        return [state for state, (_, _, places) in zip(growing, plans, strict=True) if places]

    def _read(
        self, pool: KVCache, tokens: Tensor, offsets: Tensor, mask: Tensor, plans: list[tuple[Sketch, int, list[Place]]]
    ) -> Float[Tensor, "B N V"]:
        """One pass of the draft model: what it says behind each token."""
        return self.model.forward(tokens, offsets, mask, pool).logits

    def _usable(self, logits: Float[Tensor, "V"]) -> Float[Tensor, "_"] | None:
        """A row over the ids that the target has too."""
        return usable(logits[: self._vocab_size])

    # -- what to draft -----------------------------------------------------------------------------------------

    def _depth(self, state: Reading, ask: Ask) -> int:
        """The deepest node worth thinking of; 0 when there is nothing to guess or the pending token has no id."""
        if state.is_closed or ask.pending >= self.model.vocab_size:
            return 0
        room = self.model.max_positions - self.num_read(state) - len(state.unread)
        return max(0, min(MOST if self.depth is None else self.depth, ask.depth, ask.budget, room))

    def _sketch(self, state: Reading, ask: Ask, depth: int) -> Sketch:
        if state.is_greedy is None:
            state.is_greedy = is_greedy(ask, self._vocab_size)
        greedy, draws = bool(state.is_greedy), self.rule != "coupled"
        fixed = self.depth is not None or (draws and not greedy)
        if self.depth is None and fixed:
            # Where tokens are drawn the depth is settled before any of them.
            depth = min(depth, max(1, self.forecast(state, ask).nodes))
        growth = Growth(depth, self.tree_top_k, fixed, draws, greedy)
        return Sketch(ask, [*state.unread, ask.pending], growth, state.hits, self.costs.shared(ask.rows))


def is_greedy(ask: Ask, vocab_size: int) -> bool | None:
    """Whether the request takes the likeliest token: its keys then do not change with the position's noise.

    None when every token is banned; so it is for the target then.
    """
    flat = torch.zeros(vocab_size)
    one, other = (ask.top(flat, (), ask.position + ahead, 1) for ahead in (1, 2))
    return one == other if one else None


def usable(row: Float[Tensor, "V"]) -> Float[Tensor, "V"] | None:
    """Logits, or None where they are no law (NaN, nothing left)."""
    peak = float(row.amax())  # NaN if any entry is
    return None if math.isnan(peak) or peak == -math.inf else row


def _row(state: Reading) -> int:
    assert state.row is not None, "a sequence that is read has joined the pool"
    return state.row
