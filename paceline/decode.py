"""The loop: plain decoding, every drafter and every batch run through the same `step`.

    prefill   read the prompt but its last token, which is *pending*
    step      draft, read, verify, cut, commit, observe, emit
    run       steps until every row has ended; a waiting request takes the place of a row that has

Between steps a row's cache holds all of its tokens but the last one. The prefix that a pass keeps is decided once, at
the cut; ids, text, stream, log-probs, statistics, history and cache all use it.
"""

import reprlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cache import GROWTH, KVCache
from paceline.draft.base import Ask, Drafter, Scored, Step
from paceline.draft.budget import Budget
from paceline.draft.costs import Costs
from paceline.errors import BadLogits, BadRequest, IncompatibleDrafter
from paceline.output import FinishReason, Logprob, Stats
from paceline.prefix import Found, Prefixes, border_behind
from paceline.sampling import Draws, Law, Sampler, SamplingParams, fresh_seed, ranked
from paceline.target import Seen, Target
from paceline.text import Text
from paceline.tree import Stacked, TokenTree, stack
from paceline.verify import RULES

NODES_PER_PASS = 32
"""Slots that rows share in one pass: about as many as a CPU with matrix tiles reads in the time of one. A row alone
gets what its settings say."""


class End(NamedTuple):
    """What ended a text."""

    reason: int | str | None
    """The stop id or the stop string; None for an EOS."""
    by_id: bool
    """Whether the last token itself is the stop, so that it is no part of the text."""


@dataclass
class Request:
    """One request while it runs: its text so far, its settings, its drafter's state, and why it ended."""

    prompt_ids: list[int]
    params: SamplingParams
    drafter: Drafter[Any]
    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int] = frozenset()
    rule: str = "coupled"
    depth: int = 23
    """Deepest draft."""
    budget: int = 23
    """Most drafted nodes per pass."""
    costs: Costs | None = None
    """What passes cost: as much is drafted and verified as pays by that. None verifies all that is drafted."""
    text: Text | None = None
    """The answer as text; stop strings need it."""
    stop_ids: dict[int, str] = field(default_factory=dict)
    """Special tokens that are stop strings."""
    encode: Callable[[str], list[list[int]]] | None = None
    """Token sequences of a banned word."""
    sample: int = 0
    """Which of the `n` samples this is: each has noise of its own."""
    seed: int | None = None
    """The seed to use; None takes that of the params, else a fresh one."""
    ids: list[int] = field(init=False)
    """Prompt and emitted tokens; the last one is pending, the others are in the cache."""
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    state: Any = None
    begun: bool = False
    """Whether the drafter holds a state of it."""
    stats: Stats = field(default_factory=Stats)
    num_exact: int = 0
    """Leading positions of the cache that hold the bits of a fresh reading of the prompt."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        params = self.params
        if not self.prompt_ids:
            raise BadRequest("the prompt is empty; at least one token is needed")
        if len(self.prompt_ids) > self.max_positions:
            raise BadRequest(
                f"the prompt has {len(self.prompt_ids)} tokens, the context holds {self.max_positions}; shorten it"
            )
        if params.logits_processors and self.rule == "block":
            raise BadRequest(
                "rejection_sample_method='block' reads laws of positions that may not be kept, and logits_processors "
                "are called for kept ones alone; use 'coupled' or 'standard'"
            )
        if params.stop and self.text is None:
            raise BadRequest(f"stop is {params.stop!r} and the request has no tokenizer to find it with; give text=")
        self._ends = frozenset() if params.ignore_eos else self.eos_ids
        self._stops = self._ends | frozenset(params.stop_token_ids) | frozenset(self.stop_ids)
        if self.seed is None:
            self.seed = fresh_seed() if params.seed is None else params.seed
        # Made once to check the settings against the vocabulary, and again in `start`: a queue of requests stays small.
        self._make_sampler()
        self.ids = list(self.prompt_ids)
        room = self.max_positions - len(self.prompt_ids)
        self.max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        if self.max_tokens == 0:
            self.finish_reason = "length"

    def _make_sampler(self) -> Sampler:
        assert self.seed is not None
        draws = Draws(self.seed, self.sample)
        return Sampler(self.params, self.vocab_size, self.prompt_ids, draws, ends=self._stops, encode=self.encode)

    def start(self) -> None:
        """Make what the running request needs."""
        self.sampler = self._make_sampler()
        self.worth = None if self.costs is None else Budget(self.costs, self.rule)

    @property
    def output_ids(self) -> list[int]:
        """The emitted tokens."""
        return self.ids[len(self.prompt_ids) :]

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - (len(self.ids) - len(self.prompt_ids))

    def ask(self, most_nodes: int) -> Ask:
        """What to draft now, at most so many nodes: one token of those left is always the target's own."""
        depth = min(self.depth, self.num_left - 1)
        sampler = self.sampler
        return Ask(
            self.ids[-1],
            len(self.ids) - 1,
            min(self.budget, most_nodes) if depth else 0,
            depth,
            sampler.log_law,
            sampler.top,
            sampler.draws,
            self.num_left,
        )

    def end_at(self, token: int, text: Text | None) -> End | None:
        """What ends the text at this token, if anything does; `text` is the text before it, and gets the token."""
        if token in self._stops:
            special = self.stop_ids.get(token)
            return End(None if token in self._ends else token if special is None else special, True)
        found = text.push(token) if text is not None else None
        return None if found is None else End(found, False)

    def look_ahead(self) -> Text | None:
        """A copy of the text to try tokens on; None when no stop string is searched for."""
        return self.text.fork() if self.text is not None and self.params.stop else None

    def emit(self, ids: list[int], num_drafted: int, end: End | None) -> None:
        """Add the tokens a pass kept, of which the first `num_drafted` were guessed; `end` is what stops the last."""
        self.ids += ids
        self.sampler.extend(ids)
        self.from_draft += [i < num_drafted for i in range(len(ids))]
        if self.text is not None:
            unseen = end is not None and end.by_id and not self.params.include_stop_str_in_output
            for token in ids[:-1] if unseen else ids:
                self.text.push(token)
        if end is not None:
            self.finish("stop")
            self.stop_reason = end.reason
        elif self.num_left == 0:
            self.finish("length")

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Nothing more will come."""
        self.finish_reason, self.error = reason, error
        if self.text is not None:
            self.text.finish()

    def cut(self, ids: list[int]) -> tuple[list[int], End | None]:
        """The tokens up to the first stop or the length limit, and the stop if that is what ended them."""
        text = self.look_ahead()
        for i, token in enumerate(ids[: self.num_left]):
            end = self.end_at(token, text)
            if end is not None:
                return ids[: i + 1], end
        return ids[: self.num_left], None


def prefill(target: Target, sequence: Request, prefixes: Prefixes | None = None) -> KVCache:
    """Read the prompt but its last token, in chunks, into a cache of one row; the drafter sees every chunk.

    Args:
        prefixes: where recent requests' keys and values are; what they share with this prompt is not read again,
            unless a drafter needs its hidden states or the request its log-probs.

    Raises:
        BadLogits: the prompt itself drives the model to values that are not numbers.
    """
    started = perf_counter()
    tokens, drafter = sequence.prompt_ids, sequence.drafter
    count = sequence.params.prompt_logprobs
    sequence.start()
    cache = target.new_cache(1, len(tokens) + min(sequence.max_tokens, 4 * GROWTH))
    last = len(tokens) - 1
    found = Found(0, 0, [])
    if prefixes is not None and not (drafter.taps or drafter.scores_prompt) and count is None:
        found = prefixes.find(tokens) or found
    if found.length:
        cache.load(found.kv, found.length)
    sequence.stats.num_cached_tokens = found.length
    sequence.num_exact = last if found.exact == found.length else found.exact
    begin, end = 0, found.length
    if count is not None:
        sequence.prompt_logprobs = [None]
    cache.watch = True
    while True:
        hidden = scored = None
        if end > cache.lengths[0]:
            logits = count is not None or drafter.scores_prompt
            seen = _read(target, cache, tokens[begin:end], begin, drafter.taps, logits)
            hidden = seen.hidden[0] if seen.hidden is not None else None
            if drafter.scores_prompt:
                scored = _scored(drafter, tokens[begin:end], list(range(-1, end - begin - 1)), seen.logits[0])
            if count is not None:
                rows = zip(seen.logits[0], tokens[begin + 1 : end + 1], strict=True)
                sequence.prompt_logprobs += [ranked(row, token, count) for row, token in rows]
        if end or last == 0:
            step = Step(tokens[begin:end], tokens[begin + 1 : end + 1], hidden=hidden, scored=scored)
            if begin == 0:
                sequence.state, sequence.begun = drafter.begin(step), True
            else:
                drafter.observe([sequence.state], [step])
        if end == last:
            break
        begin, end = end, min(border_behind(end), last)
    cache.watch = False
    sequence.stats.time["prefill"] += perf_counter() - started
    return cache


def _read(target: Target, cache: KVCache, tokens: list[int], begin: int, taps: Sequence[int], logits: bool) -> Seen:
    """One chunk of a prompt, read and committed."""
    size = len(tokens)
    seen = target.forward(torch.tensor([tokens]), torch.arange(size)[None], None, cache, taps, logits=logits)
    if cache.num_bad_values:
        raise BadLogits(
            f"the model's state is not finite while reading prompt positions {begin} to {begin + size - 1}; "
            "a dtype of wider range (bfloat16 or float32) may help"
        )
    cache.commit([range(size)])
    return seen


class Kept(NamedTuple):
    """What a row keeps of a pass: node ids whose slots are committed, and the tokens to emit."""

    nodes: list[int]
    ids: list[int]
    num_drafted: int
    end: End | None
    error: str | None
    logprobs: list[dict[int, Logprob]]


def step(target: Target, cache: KVCache, rows: Sequence[Request]) -> None:
    """One pass over the running rows, row i of the cache being `rows[i]`: draft, read, verify, cut, commit, observe."""
    clock = _Clock(rows)
    # 1 draft: a tree per row, rooted at its pending token
    trees = _propose(rows, cache)
    clock.mark("draft")
    # 2 read: one forward of the target over all trees, keys and values staged
    taps = sorted({tap for row in rows for tap in row.drafter.taps})
    stacked, seen = _read_trees(target, cache, trees, taps)
    clock.mark("target")
    # 3 verify, 4 cut: walk each tree by the target's own laws; keep what comes before the first stop
    kept = [_verify(row, trees[b], seen.logits[b], stacked.slots[b]) for b, row in enumerate(rows)]
    clock.mark("verify")
    # 5 commit: the slots of the kept path move up, the others are dropped
    paths = [[stacked.slots[b][node] for node in k.nodes] for b, k in enumerate(kept)]
    steps = [_gained(rows[b], trees[b], kept[b], seen, b, stacked, taps) for b in range(len(rows))]
    cache.commit(paths)
    # 6 emit
    for row, k in zip(rows, kept, strict=True):
        row.logprobs += k.logprobs
        if row.worth is not None:
            row.worth.learn(k.ids)
        row.emit(k.ids, k.num_drafted, k.end)
        if k.error is not None:
            row.finish("error", k.error)
    clock.mark("other")
    # 7 observe: drafters learn what was kept
    for drafter, members in _by_drafter(rows):
        drafter.observe([rows[b].state for b in members], [steps[b] for b in members])
    clock.mark("draft")


def run(
    target: Target,
    sequences: Iterable[Request],
    *,
    max_rows: int | None = None,
    prefixes: Prefixes | None = None,
) -> Generator[Request, None, None]:
    """Decode requests to their ends, yielding each row after every step that gave it something, ended rows included.

    Requests start in their order; when a row ends the next one takes its place. Closing the generator, or an
    exception from inside, ends the running rows as aborted; what was read and kept so far stays of use to others.

    Args:
        max_rows: most rows at once; None runs all together.
        prefixes: where keys and values of recent requests are found and kept.
    """
    waiting, batch = deque(sequences), Batch(target, prefixes)
    try:
        while waiting or batch.rows:
            while waiting and (max_rows is None or batch.num_running < max_rows):
                row = waiting.popleft()
                if row.finish_reason is None:
                    batch.admit(row)
                elif row.params.prompt_logprobs is not None:
                    batch.score(row)
                if row.finish_reason is not None:
                    yield row
            batch.arrange()
            if batch.rows:
                step(target, batch.cache, batch.rows)
                for row in list(batch.rows):
                    yield row
                batch.release()
    finally:
        batch.close()


class Batch:
    """The running rows and their cache; who comes and who leaves."""

    def __init__(self, target: Target, prefixes: Prefixes | None) -> None:
        self.target, self.prefixes = target, prefixes
        self.rows: list[Request] = []
        """Row i of the cache is `rows[i]`; between `release` and `arrange` some of them have ended."""
        self.cache = target.new_cache(0, 0)
        self._new: list[tuple[Request, KVCache]] = []

    @property
    def num_running(self) -> int:
        return sum(row.finish_reason is None for row in self.rows) + len(self._new)

    def admit(self, row: Request) -> None:
        """Read a request's prompt; one that the model cannot read ends with an error."""
        try:
            cache = prefill(self.target, row, self.prefixes)
            self._new.append((row, cache))
            read = len(row.prompt_ids) - 1
            if self.prefixes is not None and (row.params.n > 1 or border_behind(0) <= read):
                # Not only when it leaves: those who start beside it may begin with the same words.
                self.prefixes.keep(row.prompt_ids[:-1], read, row.num_exact, cache, 0)
        except BadLogits as error:
            self._forget(row)
            row.finish("error", str(error))
        except BaseException:
            self._forget(row)
            row.finish("abort")
            raise

    def score(self, row: Request) -> None:
        """Read the prompt of a request that is to write nothing, for its log-probs."""
        try:
            prefill(self.target, row, self.prefixes)
        except BadLogits as error:
            row.finish("error", str(error))
        finally:
            self._forget(row)

    def arrange(self) -> None:
        """Put the newly read rows where others have ended, close the gaps that are left, add what is more."""
        gaps = [b for b, row in enumerate(self.rows) if row.finish_reason is not None]
        for b in gaps[: len(self._new)]:
            self.rows[b], cache = self._new.pop(0)
            self.cache.put(b, cache)
        running = [b for b, row in enumerate(self.rows) if row.finish_reason is None]
        if len(running) < len(self.rows):
            self.cache.keep(running)
            self.rows = [self.rows[b] for b in running]
        if self._new:
            self.cache = KVCache.join([*([self.cache] if self.rows else []), *(cache for _, cache in self._new)])
            self.rows += [row for row, _ in self._new]
            self._new = []
        self.cache.fit()

    def release(self) -> None:
        """Take leave of the rows that have ended: their keys and values may serve others, their drafts go."""
        for b, row in enumerate(self.rows):
            if row.finish_reason is not None:
                self._leave(row, b)

    def close(self) -> None:
        """End what is still running, and free it."""
        with ExitStack() as everything:  # one row's trouble does not keep the others from being freed
            for b, row in enumerate(self.rows):
                everything.callback(self._leave, row, b)
            for row, _ in self._new:
                everything.callback(self._leave, row, None)
        self.rows, self._new, self.cache = [], [], self.target.new_cache(0, 0)

    def _leave(self, row: Request, b: int | None) -> None:
        if not row.begun:
            return  # has left before
        if row.finish_reason is None:
            row.finish("abort")
        if b is not None and self.prefixes is not None:
            # An exception may have come between the commit and the emission of a pass.
            length = min(self.cache.lengths[b], len(row.ids) - 1)
            if row.finish_reason == "error":  # what it computed last is not to be trusted; the prompt was watched
                length = min(length, len(row.prompt_ids) - 1)
            exact = min(row.num_exact, length)
            self.prefixes.keep(row.ids[:length], len(row.prompt_ids) - 1, exact, self.cache, b)
        self._forget(row)

    def _forget(self, row: Request) -> None:
        if row.begun:
            state, row.state, row.begun = row.state, None, False
            row.drafter.end(state)


def _by_drafter(rows: Sequence[Request]) -> list[tuple[Drafter[Any], list[int]]]:
    """Rows that share a drafter, so that a drafter which can batch sees them together."""
    groups: dict[int, tuple[Drafter[Any], list[int]]] = {}
    for b, row in enumerate(rows):
        groups.setdefault(id(row.drafter), (row.drafter, []))[1].append(b)
    return list(groups.values())


def _propose(rows: Sequence[Request], cache: KVCache) -> list[TokenTree]:
    # Rows are read side by side, as wide as the widest: an equal share each is all that the pass has.
    most = max(NODES_PER_PASS, 1 + max(row.budget for row in rows)) // len(rows) - 1
    asks = [row.ask(max(0, most))._replace(cache=cache, row=b, rows=len(rows)) for b, row in enumerate(rows)]
    trees: list[TokenTree] = [TokenTree.root(ask.pending) for ask in asks]
    for drafter, members in _by_drafter(rows):
        wanted = [b for b in members if asks[b].budget and _wants(rows[b], asks[b])]
        proposed = drafter.propose([rows[b].state for b in wanted], [asks[b] for b in wanted]) if wanted else []
        if not isinstance(proposed, list) or not all(isinstance(tree, TokenTree) for tree in proposed):
            raise IncompatibleDrafter(
                f"{type(drafter).__name__}.propose returned {reprlib.repr(proposed)}; a list of TokenTree is needed"
            )
        if len(proposed) != len(wanted):
            raise IncompatibleDrafter(
                f"{type(drafter).__name__}.propose returned {len(proposed)} trees for {len(wanted)} sequences"
            )
        for b, tree in zip(wanted, proposed, strict=True):
            tree, worth = _within(tree, rows[b], asks[b], drafter), rows[b].worth
            trees[b] = tree if worth is None else worth.cut(tree, len(rows))
    return trees


def _wants(row: Request, ask: Ask) -> bool:
    return row.worth is None or row.worth.wants(row.drafter.forecast(row.state, ask), ask)


def _read_trees(target: Target, cache: KVCache, trees: list[TokenTree], taps: Sequence[int]) -> tuple[Stacked, Seen]:
    """Read the trees; where nodes have been through the first layers already, go on from there."""
    staged = cache.staged
    begun = {(tree.read.layer, len(tree.read.states)) for tree in trees if tree.read is not None}
    if begun != {(layer := max(begun, default=(0, 0))[0], staged)} or taps:
        # Nobody began; or rows began in different ways, or hidden states of all layers are wanted: from the start then.
        cache.unstage()
        stacked = stack([replace(tree, read=None) for tree in trees] if begun else trees)
        return stacked, target.forward(stacked.tokens, stacked.offsets, stacked.mask, cache, taps)
    model: Any = target  # whoever reads through layers has seen to it that the target can
    stacked = stack(trees, staged)
    tokens, offsets, mask = stacked.tokens, stacked.offsets, stacked.mask
    known = next(tree.read.states for tree in trees if tree.read is not None)
    states = known.new_zeros(*tokens.shape, known.shape[-1])
    for b, tree in enumerate(trees):
        if tree.read is not None:
            states[b, :staged] = tree.read.states
    if tokens.shape[1] > staged:
        rest = model.forward(
            tokens[:, staged:], offsets[:, staged:], mask[:, staged:], cache, logits=False, layers=(0, layer)
        )
        states[:, staged:] = rest.hidden
    cache.unstage()  # the same slots again, in the other layers
    return stacked, model.forward(tokens, offsets, mask, cache, layers=(layer, model.num_layers), states=states)


def _within(tree: TokenTree, row: Request, ask: Ask, drafter: Drafter[Any]) -> TokenTree:
    """The tree inside the budget and the depth asked for; refuses one that is not rooted in this text."""
    name = type(drafter).__name__
    if tree.ids[0] != ask.pending:
        raise IncompatibleDrafter(f"{name} rooted its tree at id {tree.ids[0]}; the pending token is {ask.pending}")
    if max(tree.ids) >= row.vocab_size:
        raise IncompatibleDrafter(f"{name} drafted id {max(tree.ids)}; the target has ids 0 to {row.vocab_size - 1}")
    if tree.rider is not None and len(tree.rider.tokens):
        largest, offsets = int(tree.rider.tokens.max()), tree.rider.offsets
        if largest >= row.vocab_size:
            raise IncompatibleDrafter(f"{name} has rider id {largest}; the target has ids 0 to {row.vocab_size - 1}")
        first, last = ask.position + int(offsets.min()), ask.position + int(offsets.max())
        if first < 0 or last >= row.max_positions:
            raise IncompatibleDrafter(
                f"{name} has riders at positions {first} to {last}; the context has 0 to {row.max_positions - 1}"
            )
    if max(tree.depth) > ask.depth:
        tree = tree.shallow(ask.depth)
    return tree.truncate(ask.budget)


def _verify(row: Request, tree: TokenTree, logits: Tensor, slots: list[int]) -> Kept:
    """Walk one row's tree and cut the outcome at the first stop, before anything is committed or shown."""
    position, reached = len(row.ids), 0
    ended: dict[int, bool] = {0: False}
    texts = {0: row.look_ahead()}

    def law(node: int) -> Law:
        nonlocal reached
        reached = node
        path = tree.path(node)
        if node:
            above = path[-2]
            before = texts[above]
            texts[node] = before.fork() if before is not None and not ended[above] else None
            ended[node] = ended[above] or row.end_at(tree.ids[node], texts[node]) is not None
        if ended[node]:
            # Nothing is decided behind the end of a text: what the rule does from here on is cut off.
            return Law(torch.zeros(1, dtype=torch.int64, device=logits.device), logits.new_zeros(1), row.vocab_size)
        return row.sampler.law(logits[slots[node]], [tree.ids[n] for n in path[1:]])

    error = None
    try:
        verdict = RULES[row.rule](law, tree, row.sampler.draws, position)
        path, ids = verdict.path, [*(tree.ids[node] for node in verdict.path), verdict.token]
    except BadLogits as bad:
        # What the walk accepted on its way is the target's own text; the other rules decide only at their end.
        path = tree.path(reached)[1:] if row.rule == "coupled" else []
        ids = [tree.ids[node] for node in path]
        error = f"position {position + len(path)}: {bad}"
    row.sampler.draws.next_pass()
    kept, end = row.cut(ids)
    if end is not None or len(kept) < len(ids):
        error = None
    accepted = min(len(path), len(kept))
    tested = [depth for depth in tree.depth[1:] if len(kept) == len(ids) or depth <= len(kept)]
    row.stats.record(len(tested), max(tested, default=0), accepted)
    count = row.params.logprobs
    logprobs = []
    if count is not None:
        at = [0, *path][: len(kept)]
        logprobs = [ranked(logits[slots[node]], token, count) for node, token in zip(at, kept, strict=True)]
    # The last kept token becomes pending: it is not committed, whether it was drafted or not.
    committed = [0, *path[: len(kept) - 1]] if kept else []
    return Kept(committed, kept, accepted, end, error, logprobs)


def _gained(
    row: Request, tree: TokenTree, kept: Kept, seen: Seen, b: int, stacked: Stacked, taps: Sequence[int]
) -> Step:
    """What the drafter is told: the committed nodes, what follows each, and what it taps."""
    drafter, slots = row.drafter, stacked.slots[b]
    where = [slots[node] for node in kept.nodes]
    hidden = None
    if drafter.taps and seen.hidden is not None:
        width = seen.hidden.shape[-1] // len(taps)
        parts = [seen.hidden[b, where, taps.index(t) * width : (taps.index(t) + 1) * width] for t in drafter.taps]
        hidden = torch.cat(parts, dim=-1)
    riders = None
    if tree.rider is not None:
        begin = stacked.riders[b]
        riders = seen.logits[b, begin : begin + tree.rider.tokens.shape[0]]
    logits = seen.logits[b, where] if drafter.reads_logits else None
    scored = None
    if drafter.top_scored:
        scored = _scored(drafter, tree.ids, tree.parents.tolist(), seen.logits[b, slots])
    return Step([tree.ids[node] for node in kept.nodes], kept.ids, logits, hidden, riders, scored)


def _scored(drafter: Drafter[Any], tokens: list[int], parents: list[int], logits: Tensor) -> Scored:
    """What the target would write after each token that it read."""
    best = logits.topk(min(drafter.top_scored, logits.shape[-1]), dim=-1)
    return Scored(tokens, parents, best.indices, best.values.float())


class _Clock:
    """Adds the seconds between marks to the rows' statistics, shared equally among them."""

    def __init__(self, rows: Sequence[Request]) -> None:
        self._stats = [row.stats for row in rows]
        self._last = perf_counter()

    def mark(self, stage: str) -> None:
        now = perf_counter()
        for stats in self._stats:
            stats.time[stage] += (now - self._last) / len(self._stats)
        self._last = now
