"""The loop: plain decoding, every drafter and every batch run through the same `step`.

    prefill   read the prompt but its last token, which is *pending*
    step      draft, read, verify, cut, commit, observe, emit
    run       steps until every row has ended

Between steps a row's cache holds all of its tokens but the last one. The prefix that a pass keeps is decided once, at
the cut; ids, text, stream, statistics, history and cache all use it.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.base import Ask, Drafter, Step
from paceline.errors import BadLogits, BadRequest, IncompatibleDrafter
from paceline.output import FinishReason, Stats
from paceline.sampling import Law, Sampler, SamplingParams
from paceline.target import Seen, Target
from paceline.tree import TokenTree, stack
from paceline.verify import RULES

CHUNK = 512
"""Prompt tokens read per pass, on a grid of absolute positions: the same prompt is always cut at the same places."""


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
    ids: list[int] = field(init=False)
    """Prompt and emitted tokens; the last one is pending, the others are in the cache."""
    from_draft: list[bool] = field(default_factory=list)
    state: Any = None
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise BadRequest("the prompt is empty; at least one token is needed")
        if len(self.prompt_ids) > self.max_positions:
            raise BadRequest(
                f"the prompt has {len(self.prompt_ids)} tokens, the context holds {self.max_positions}; shorten it"
            )
        self.sampler = Sampler(self.params, self.vocab_size, self.prompt_ids)
        self.ids = list(self.prompt_ids)
        self._stops = self.eos_ids | frozenset(self.params.stop_token_ids)
        room = self.max_positions - len(self.prompt_ids)
        self.max_tokens = room if self.params.max_tokens is None else min(room, self.params.max_tokens)
        if self.max_tokens == 0:
            self.finish_reason = "length"

    @property
    def output_ids(self) -> list[int]:
        """The emitted tokens."""
        return self.ids[len(self.prompt_ids) :]

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - (len(self.ids) - len(self.prompt_ids))

    def ask(self) -> Ask:
        """What to draft now: one token of those left is always the target's own."""
        depth = min(self.depth, self.num_left - 1)
        sampler = self.sampler
        return Ask(
            self.ids[-1],
            len(self.ids) - 1,
            self.budget if depth else 0,
            depth,
            sampler.log_law,
            sampler.rank,
            sampler.draws,
        )

    def emit(self, ids: list[int], num_drafted: int, stop: int | None) -> None:
        """Add the tokens a pass kept, of which the first `num_drafted` were guessed; `stop` is the id that ends it."""
        self.ids += ids
        self.sampler.extend(ids)
        self.from_draft += [i < num_drafted for i in range(len(ids))]
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", None if stop in self.eos_ids else stop
        elif self.num_left == 0:
            self.finish_reason = "length"

    def cut(self, ids: list[int]) -> tuple[list[int], int | None]:
        """The tokens up to the first stop or the length limit, and the stop id if that is what ended them."""
        for i, token in enumerate(ids[: self.num_left]):
            if token in self._stops:
                return ids[: i + 1], token
        return ids[: self.num_left], None


def prefill(target: Target, sequence: Request) -> KVCache:
    """Read the prompt but its last token, in chunks, into a cache of one row; the drafter sees every chunk.

    Raises:
        BadLogits: the prompt itself drives the model to values that are not numbers.
    """
    started = perf_counter()
    tokens, drafter = sequence.prompt_ids, sequence.drafter
    cache = target.new_cache(1, len(tokens) + min(sequence.max_tokens, 4 * CHUNK))
    cache.watch = True
    last = len(tokens) - 1
    for begin in range(0, max(last, 1), CHUNK):
        end = min(begin + CHUNK, last)
        hidden = None
        if end > begin:
            chunk = torch.tensor([tokens[begin:end]])
            seen = target.forward(chunk, torch.arange(end - begin)[None], None, cache, drafter.taps, logits=False)
            if cache.num_bad_values:
                raise BadLogits(
                    f"the model's state is not finite while reading prompt positions {begin} to {end - 1}; "
                    "a dtype of wider range (bfloat16 or float32) may help"
                )
            cache.commit([range(end - begin)])
            hidden = seen.hidden[0] if seen.hidden is not None else None
        step = Step(tokens[begin:end], tokens[begin + 1 : end + 1], hidden=hidden)
        if begin == 0:
            sequence.state = drafter.begin(step)
        else:
            drafter.observe([sequence.state], [step])
    cache.watch = False
    sequence.stats.time["prefill"] += perf_counter() - started
    return cache


class Kept(NamedTuple):
    """What a row keeps of a pass: node ids whose slots are committed, and the tokens to emit."""

    nodes: list[int]
    ids: list[int]
    num_drafted: int
    stop: int | None
    error: str | None


def step(target: Target, cache: KVCache, rows: Sequence[Request]) -> None:
    """One pass over the running rows, row i of the cache being `rows[i]`: draft, read, verify, cut, commit, observe."""
    clock = _Clock(rows)
    # 1 draft: a tree per row, rooted at its pending token
    trees = _propose(rows)
    clock.mark("draft")
    # 2 read: one forward of the target over all trees, keys and values staged
    stacked = stack(trees)
    taps = sorted({tap for row in rows for tap in row.drafter.taps})
    seen = target.forward(stacked.tokens, stacked.offsets, stacked.mask, cache, taps)
    clock.mark("target")
    # 3 verify, 4 cut: walk each tree by the target's own laws; keep what comes before the first stop
    kept = [_verify(row, trees[b], seen.logits[b], stacked.slots[b]) for b, row in enumerate(rows)]
    clock.mark("verify")
    # 5 commit: the slots of the kept path move up, the others are dropped
    paths = [[stacked.slots[b][node] for node in k.nodes] for b, k in enumerate(kept)]
    steps = [_gained(rows[b], trees[b], kept[b], seen, b, stacked.slots[b], taps) for b in range(len(rows))]
    cache.commit(paths)
    # 6 emit
    for row, k in zip(rows, kept, strict=True):
        row.emit(k.ids, k.num_drafted, k.stop)
        if k.error is not None:
            row.finish_reason, row.error = "error", k.error
    clock.mark("other")
    # 7 observe: drafters learn what was kept
    for drafter, members in _by_drafter(rows):
        drafter.observe([rows[b].state for b in members], [steps[b] for b in members])
    clock.mark("draft")


def run(target: Target, sequences: Sequence[Request]) -> Generator[Request, None, None]:
    """Decode a batch to its end, yielding each row after every step that gave it something, ended rows included."""
    live, caches = [], []
    for sequence in sequences:
        if sequence.finish_reason is None:
            try:
                caches.append(prefill(target, sequence))
                live.append(sequence)
            except BadLogits as error:
                sequence.finish_reason, sequence.error = "error", str(error)
        if sequence.finish_reason is not None:
            yield sequence
    if not live:
        return
    cache = KVCache.join(caches)
    del caches
    while live:
        step(target, cache, live)
        yield from live
        running = [b for b, row in enumerate(live) if row.finish_reason is None]
        if len(running) < len(live):
            cache.keep(running)
            live = [live[b] for b in running]


def _by_drafter(rows: Sequence[Request]) -> list[tuple[Drafter[Any], list[int]]]:
    """Rows that share a drafter, so that a drafter which can batch sees them together."""
    groups: dict[int, tuple[Drafter[Any], list[int]]] = {}
    for b, row in enumerate(rows):
        groups.setdefault(id(row.drafter), (row.drafter, []))[1].append(b)
    return list(groups.values())


def _propose(rows: Sequence[Request]) -> list[TokenTree]:
    asks = [row.ask() for row in rows]
    trees: list[TokenTree] = [TokenTree.root(ask.pending) for ask in asks]
    for drafter, members in _by_drafter(rows):
        wanted = [b for b in members if asks[b].budget]
        proposed = drafter.propose([rows[b].state for b in wanted], [asks[b] for b in wanted]) if wanted else []
        if len(proposed) != len(wanted):
            raise IncompatibleDrafter(
                f"{type(drafter).__name__}.propose returned {len(proposed)} trees for {len(wanted)} sequences"
            )
        for b, tree in zip(wanted, proposed, strict=True):
            trees[b] = _within(tree, rows[b], asks[b], drafter)
    return trees


def _within(tree: TokenTree, row: Request, ask: Ask, drafter: Drafter[Any]) -> TokenTree:
    """The tree inside the budget and the depth asked for; refuses one that is not rooted in this text."""
    name = type(drafter).__name__
    if tree.ids[0] != ask.pending:
        raise IncompatibleDrafter(f"{name} rooted its tree at id {tree.ids[0]}; the pending token is {ask.pending}")
    if max(tree.ids) >= row.vocab_size:
        raise IncompatibleDrafter(f"{name} drafted id {max(tree.ids)}; the target has ids 0 to {row.vocab_size - 1}")
    if max(tree.depth) > ask.depth:
        tree = tree.shallow(ask.depth)
    return tree.truncate(ask.budget)


def _verify(row: Request, tree: TokenTree, logits: Tensor, slots: list[int]) -> Kept:
    """Walk one row's tree and cut the outcome at the first stop, before anything is committed or shown."""
    position, reached = len(row.ids), 0

    def law(node: int) -> Law:
        nonlocal reached
        reached = node
        return row.sampler.law(logits[slots[node]], [tree.ids[n] for n in tree.path(node)[1:]])

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
    kept, stop = row.cut(ids)
    if stop is not None or len(kept) < len(ids):
        error = None
    accepted = min(len(path), len(kept))
    tested = [depth for depth in tree.depth[1:] if len(kept) == len(ids) or depth <= len(kept)]
    row.stats.record(len(tested), max(tested, default=0), accepted)
    # The last kept token becomes pending: it is not committed, whether it was drafted or not.
    committed = [0, *path[: len(kept) - 1]] if kept else []
    return Kept(committed, kept, accepted, stop, error)


def _gained(
    row: Request, tree: TokenTree, kept: Kept, seen: Seen, b: int, slots: list[int], taps: Sequence[int]
) -> Step:
    """What the drafter is told: the committed nodes, what follows each, and what it taps."""
    drafter = row.drafter
    where = [slots[node] for node in kept.nodes]
    hidden = None
    if drafter.taps and seen.hidden is not None:
        width = seen.hidden.shape[-1] // len(taps)
        parts = [seen.hidden[b, where, taps.index(t) * width : (taps.index(t) + 1) * width] for t in drafter.taps]
        hidden = torch.cat(parts, dim=-1)
    riders = None
    if tree.rider is not None:
        riders = seen.logits[b, tree.num_nodes : tree.num_nodes + tree.rider.tokens.shape[0]]
    logits = seen.logits[b, where] if drafter.reads_logits else None
    return Step([tree.ids[node] for node in kept.nodes], kept.ids, logits, hidden, riders)


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
