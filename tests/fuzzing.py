"""Random runs of the whole loop: how they are drawn, how they are played, and what they are held against.

A `Case` is plain data, so that a failure prints as something one can type in again. The oracles are those of
`oracles.py`: unmodified `transformers` models that read a whole text at once, with the processors of `transformers`.
"""

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import oracles
import torch
from hypothesis import strategies as st
from oracles import ARCHS, VOCAB
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import paceline.decode
import paceline.draft.model
import paceline.prefix
from paceline.cache import KVCache
from paceline.decode import Request, run
from paceline.draft.base import Drafter, NoDraft
from paceline.draft.early_exit import EarlyExit
from paceline.draft.lookahead import Lookahead
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.draft.recycle import Recycle
from paceline.draft.suffix import Suffix
from paceline.prefix import Prefixes
from paceline.sampling import Draws, SamplingParams
from paceline.target import HFTarget
from paceline.testing import ScriptedTree
from paceline.tree import Drawn, Rider, TokenTree

# -- what a case is ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """One drafter. Equal ones of a case are one object that serves several rows, scripts apart."""

    kind: str
    """none, empty, ngram, right, wrong, half, wild or model."""
    seed: int = 0
    depth: int = 1
    """How deep it drafts, whatever is asked for; for a model 0 means as deep as pays."""
    nodes: int = 1
    """Nodes of a wild tree."""
    label: str = "fixed"
    """How a wild tree says its siblings were drawn."""
    q: str = "law"
    """What a wild tree gives as q."""
    rider: bool = False
    """Whether a wild tree carries tokens that are never accepted."""
    model: str = "own"
    top_k: int = 1


@dataclass(frozen=True)
class Ticket:
    """One request."""

    prompt: tuple[int, ...]
    settings: tuple[tuple[str, Any], ...] = (("temperature", 0.0),)
    eos: tuple[int, ...] = ()
    sample: int = 0
    depth: int = 4
    budget: int = 4
    draft: Draft = Draft("none")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{name: oracles._thaw(value) for name, value in self.settings})


@dataclass(frozen=True)
class Case:
    """Requests that run together, and how."""

    arch: str
    tickets: tuple[Ticket, ...]
    rule: str = "coupled"
    limit: int = 256
    max_rows: int | None = None
    chunk: int = 512
    """Prompt tokens read per pass."""
    store: bool = False
    """Whether keys and values of earlier requests are reused."""
    aborts: tuple[int, ...] = ()
    """Before the run proper, one for each: given up after so many pieces."""


SHORT = 32
"""A context that requests reach the end of."""
TOKENS = st.integers(0, VOCAB - 1)
BAN = -math.inf


def boost(ids: list[int], logits: Tensor) -> Tensor:
    """A processor whose favourite token depends on every token before."""
    logits[(31 * sum(ids) + 7 * len(ids)) % VOCAB] += 6.0
    return logits


OWN = ("suffix", "recycle", "lookahead", "exit")
"""Drafters of the package that look at nothing but the text and the target."""
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from((1, 2, 5, 30, 500)),
    "top_p": st.sampled_from((0.9, 0.5, 0.05)),
    "min_p": st.sampled_from((0.02, 0.3, 1.0)),
    "repetition_penalty": st.sampled_from((1.3, 2.5, 0.7)),
    "presence_penalty": st.sampled_from((3.0, 1000.0, -2.0)),
    "frequency_penalty": st.sampled_from((2.0, -1.0)),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from((5.0, 20.0, -3.0, BAN)), min_size=1, max_size=5),
    "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=8),
    "allowed_token_ids": st.sets(TOKENS, min_size=1, max_size=12).map(sorted),
    "no_repeat_ngram_size": st.sampled_from((1, 2, 3)),
    "stop_token_ids": st.sets(TOKENS, min_size=1, max_size=12).map(sorted),
    "ignore_eos": st.just(True),
    "logprobs": st.sampled_from((0, 2, -1)),
    "prompt_logprobs": st.just(1),
    "logits_processors": st.just((boost,)),
}
KINDS = ("wild", "half", "model", "wild", "right", "ngram", "model", "wrong", "empty", "none", *OWN)
GREEDY, HOT = (0.0,), (1.0, 0.1, 2.0)


@st.composite
def drafts(draw: st.DrawFn, rule: str) -> Draft:
    kind = draw(st.sampled_from(KINDS))
    seed, depth = draw(st.integers(0, 999)), draw(st.sampled_from((4, 7, 2, 10, 1)))
    if kind == "wild":
        label = draw(st.sampled_from(("fixed", "iid", "distinct")))
        # Labels without a law, and laws over more tokens than there are, are refused where q is read.
        laws = ("law", "sharp", "nan", "negative", "zero", "narrow", "infinite")
        q = draw(st.sampled_from(laws if rule != "coupled" else (*laws, "wide", "missing")))
        return Draft(kind, seed, depth, draw(st.sampled_from((9, 16, 30, 4, 1))), label, q, draw(st.booleans()))
    if kind == "model":
        model = draw(st.sampled_from(("own", "own", "other", "narrow", "short", "padded")))
        return Draft(kind, depth=draw(st.integers(0, 6)), model=model, top_k=draw(st.integers(1, 4)))
    if kind == "ngram":
        return Draft(kind, depth=draw(st.integers(1, 5)))
    return Draft(kind) if kind in ("empty", "none") else Draft(kind, seed, depth)


@st.composite
def tickets(
    draw: st.DrawFn, rule: str, temperatures: Sequence[float], limit: int, begin: tuple[int, ...] = ()
) -> Ticket:
    """One request; its prompt may begin like those of others."""
    ends_early = limit == SHORT
    length = draw(st.integers(SHORT - 12, SHORT) if ends_early else st.integers(1, 40))
    alphabet = draw(st.sampled_from((VOCAB, 5)))
    rng = random.Random(draw(st.integers(0, 999)))
    shared = begin[: draw(st.sampled_from((0, 0, 40)))]
    prompt = (*shared, *(rng.randrange(alphabet) for _ in range(length)))[:length]
    settings = {"temperature": draw(st.sampled_from(temperatures)), "seed": draw(st.sampled_from((0, 7, -1, 2**63)))}
    names = set(SETTINGS) - ({"logits_processors"} if rule == "block" else set())
    for name in sorted(draw(st.sets(st.sampled_from(sorted(names)), max_size=4))):
        settings[name] = draw(SETTINGS[name])
    if settings.get("no_repeat_ngram_size") == 1:  # until none is left
        settings["allowed_token_ids"] = sorted(draw(st.sets(TOKENS, min_size=1, max_size=4)))
    settings["max_tokens"] = most = None if ends_early else draw(st.sampled_from((12, 8, 5, 10, 3, 7, 1, 0)))
    settings["min_tokens"] = draw(st.sampled_from((0, 0, 2, 6)).filter(lambda least: most is None or least <= most))
    return Ticket(
        prompt,
        tuple((name, oracles._frozen(value)) for name, value in settings.items()),
        tuple(sorted(draw(st.sets(TOKENS, max_size=8)))),
        draw(st.integers(0, 2)),
        draw(st.sampled_from((4, 8, 2, 6, 1, 3, 5, 0))),
        draw(st.sampled_from((12, 6, 9, 3, 8, 1, 2, 0))),
        draw(drafts(rule)),
    )


@st.composite
def cases(
    draw: st.DrawFn, rules: Sequence[str] = ("coupled",), temperatures: Sequence[float] = (*GREEDY, *HOT, 1e-6)
) -> Case:
    rule, limit = draw(st.sampled_from(rules)), draw(st.sampled_from((256, 256, 256, SHORT)))
    rng, count = random.Random(draw(st.integers(0, 999))), draw(st.sampled_from((2, 1, 3, 4)))
    begin = tuple(rng.randrange(VOCAB) for _ in range(draw(st.integers(1, 30))))
    some = st.lists(tickets(rule, temperatures, limit, begin), min_size=count, max_size=count)
    return Case(
        draw(st.sampled_from(ARCHS)),
        tuple(draw(some)),
        rule,
        limit,
        draw(st.sampled_from((None, 1, 2, 3))),
        draw(st.sampled_from((512, 8))),
        draw(st.booleans()),
        tuple(draw(st.lists(st.integers(0, 12), max_size=2))),
    )


@st.composite
def crowded(draw: st.DrawFn) -> Case:
    """A case whose first text comes to hold more than 64 different tokens, all of them counted for its penalties."""
    case = draw(cases())
    own = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "repetition_penalty": draw(st.sampled_from((1.3, 2.5)))}
    own[draw(st.sampled_from(("presence_penalty", "frequency_penalty")))] = 3.0
    prompt = tuple(random.Random(draw(st.integers(0, 999))).sample(range(VOCAB), draw(st.sampled_from((60, 63, 64)))))
    first = replace(case.tickets[0], prompt=prompt, settings=tuple(own.items()), eos=())
    return replace(case, tickets=(first,), limit=256)


# -- what must come out ------------------------------------------------------------------------------------------------


class Plain(NamedTuple):
    """What plain decoding says."""

    ids: list[int]
    finish: str
    stop: int | None
    raw: list[Tensor]
    """Log-softmax of the model's own logits at each position."""


def laws(model: PreTrainedModel, ticket: Ticket, ids: Sequence[int]) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
    """The model's logits behind every token of prompt + ids, and (number of tokens before, logits) -> the law's."""
    text, params = [*ticket.prompt, *ids], ticket.params
    chain = oracles.processors(params, len(ticket.prompt), stops_of(ticket))

    def processed(size: int, logits: Tensor) -> Tensor:
        scores = logits[None]
        for processor in chain:
            scores = processor(torch.tensor([text[:size]]), scores)
        return scores[0]

    return oracles.logits_of(model, text), processed


def stops_of(ticket: Ticket) -> set[int]:
    """The ids that end a text."""
    params = ticket.params
    return {*(() if params.ignore_eos else ticket.eos), *params.stop_token_ids}


@functools.lru_cache(maxsize=512)
def plainly(arch: str, limit: int, ticket: Ticket) -> Plain:
    """`oracles.reference` with the reasons why texts end: the whole text is read again for every token."""
    return _plainly(arch, limit, replace(ticket, draft=Draft("none"), depth=0, budget=0))


@functools.lru_cache(maxsize=512)
def _plainly(arch: str, limit: int, ticket: Ticket) -> Plain:
    params, ids, raw = ticket.params, [], []
    room = limit - len(ticket.prompt)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    ends = {token: None if token in ticket.eos and not params.ignore_eos else token for token in stops_of(ticket)}
    while len(ids) < most:
        logits, processed = laws(oracles.plain(arch, limit=limit), ticket, ids)
        position = len(ticket.prompt) + len(ids)
        keys = processed(position, logits[-1])
        if not bool((keys > -math.inf).any()):
            return Plain(ids, "error", None, raw)
        if params.temperature > 0.0:
            assert params.seed is not None
            noise = Draws(params.seed, ticket.sample).noise(position, vocab_size=VOCAB)
            keys = torch.log_softmax(keys, 0) + noise
        ids.append(int((keys == keys.max()).nonzero()[0]))
        raw.append(torch.log_softmax(logits[-1], 0))
        if ids[-1] in ends:
            return Plain(ids, "stop", ends[ids[-1]], raw)
    return Plain(ids, "length", None, raw)


Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [heads, length, head_dim]."""


@functools.lru_cache(maxsize=256)
@torch.inference_mode()
def read(model: PreTrainedModel, ids: tuple[int, ...]) -> Pairs:
    """What `transformers`' own cache holds after one fresh forward over a text, windowed layers in full."""
    cache = DynamicCache()
    with oracles.float64_softmax():
        model(torch.tensor([ids]), cache=cache, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


# -- models and drafters -----------------------------------------------------------------------------------------------


def _sizes(name: str, arch: str, limit: int) -> tuple[str, int, dict[str, Any]]:
    """Architecture, seed and sizes of a draft model."""
    return {
        "own": (arch, 0, oracles._limit(arch, limit)),
        "other": ("llama", 1, {"num_hidden_layers": 1}),
        "narrow": ("qwen2", 2, {"vocab_size": 60}),
        "short": ("mistral", 1, {"max_position_embeddings": 24}),
        "padded": ("gpt2", 3, {"vocab_size": VOCAB + 15}),
    }[name]


@functools.cache
def draft_plain(name: str, arch: str, limit: int) -> PreTrainedModel:
    """A draft model that nothing of the package touches."""
    kind, seed, sizes = _sizes(name, arch, limit)
    return oracles.tiny(kind, seed, **sizes)


@functools.cache
def draft_target(name: str, arch: str, limit: int) -> HFTarget:
    """The same weights for the package."""
    kind, seed, sizes = _sizes(name, arch, limit)
    return HFTarget(oracles.tiny(kind, seed, **sizes))


def script(case: Case, ticket: Ticket) -> Callable[[list[int]], TokenTree]:
    """What a scripted draft says after a text: a function of the text alone, so that a second run hears the same."""
    draft, size = ticket.draft, len(ticket.prompt)
    is_known = case.rule == "coupled" or ticket.params.temperature == 0.0
    model = oracles.plain(case.arch, limit=case.limit)
    answer = plainly(case.arch, case.limit, ticket).ids if is_known else []

    def propose(ids: list[int]) -> TokenTree:
        rng = random.Random(f"{len(ids)} {draft.seed}")
        coming = answer[len(ids) - size :] if ids == [*ticket.prompt, *answer][: len(ids)] else []
        logits = None
        if draft.kind == "empty":
            return TokenTree.root(ids[-1])
        if not is_known:  # the text is not known beforehand, but what is likely is
            logits = oracles.logits_of(model, ids)[-1]
            coming = [rng.choice(logits.topk(4).indices.tolist())]
            for _ in range(min(2, case.limit - len(ids) - 1)):
                likely = oracles.logits_of(model, [*ids, *coming])[-1].topk(3).indices.tolist()
                coming.append(rng.choice(likely))
        if draft.kind == "wild":
            return _wild(draft, ids, coming, rng, case.limit, logits)
        right = {"right": 1.0, "half": 0.7, "wrong": 0.0}[draft.kind]
        chain = [
            coming[i] if i < len(coming) and rng.random() < right else rng.randrange(VOCAB) for i in range(draft.depth)
        ]
        return TokenTree.chain(ids[-1], chain)

    return propose


def _wild(
    draft: Draft, ids: list[int], coming: list[int], rng: random.Random, limit: int, logits: Tensor | None
) -> TokenTree:
    """Right and wrong tokens at every depth, repeated siblings, wide here and deep there, labels true or false."""
    tokens, parents, depths = [ids[-1]], [-1], [0]
    for _ in range(4 * draft.nodes):
        recent = len(tokens) - 1 - rng.randrange(min(3, len(tokens)))
        parent = recent if rng.random() < 0.6 else rng.randrange(len(tokens))
        at = depths[parent]
        if at == draft.depth or len(tokens) > draft.nodes:
            continue
        token = rng.choice([*coming[at : at + 1] * 4, *tokens[-2:], rng.randrange(VOCAB)])
        twins = [node for node in range(1, len(tokens)) if parents[node] == parent and tokens[node] == token]
        if twins and draft.label == "distinct":
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(at + 1)
    score = None
    if rng.random() < 0.5:
        score = torch.tensor([rng.choice((rng.random(), rng.random(), math.nan)) for _ in tokens])
    drawn = {"fixed": Drawn.FIXED, "iid": Drawn.IID, "distinct": Drawn.DISTINCT}[draft.label]
    q = _q(draft.q, tokens, parents, rng)
    if draft.q == "law" and q is not None and logits is not None:
        q[0] = torch.softmax(logits, 0)  # near the law at hand, so that either outcome of a test has a chance
    return TokenTree(
        torch.tensor(tokens),
        torch.tensor(parents),
        drawn,
        None if drawn is Drawn.FIXED and rng.random() < 0.5 else q,
        score,
        _rider(len(tokens), len(ids), rng, limit) if draft.rider else None,
    )


def _q(kind: str, tokens: list[int], parents: list[int], rng: random.Random) -> Tensor | None:
    width = {"narrow": rng.randrange(max(tokens) + 1, VOCAB + 1), "wide": VOCAB + 5}.get(kind, VOCAB)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    q = torch.softmax(3 * torch.randn(len(tokens), width, generator=generator), 1)
    spoilt = rng.randrange(len(tokens))
    if kind == "sharp":  # certain of the last child of each node
        q = torch.zeros_like(q)
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            q[parent] = 0.0
            q[parent, token] = 1.0
    elif kind == "nan":
        q[spoilt, rng.randrange(width)] = math.nan
    elif kind == "infinite":
        q[spoilt, rng.randrange(width)] = math.inf
    elif kind == "negative":
        q[spoilt] -= 0.1
    elif kind == "zero":
        q[spoilt] = 0.0
    return None if kind == "missing" else q


def _rider(nodes: int, text: int, rng: random.Random, limit: int) -> Rider:
    count = rng.randrange(1, 5)
    offsets = [rng.randrange(-min(2, text - 1), min(5, limit - text + 1)) for _ in range(count)]
    mask = [[rng.random() < 0.5 for _ in range(nodes + count)] for _ in range(count)]
    return Rider(torch.tensor([rng.randrange(VOCAB) for _ in range(count)]), torch.tensor(offsets), torch.tensor(mask))


def drafters(case: Case, shared: dict[Draft, Drafter[Any]] | None = None) -> list[Drafter[Any]]:
    """One for each ticket; `shared` are those of earlier cases, where they can serve again."""
    shared = {} if shared is None else shared
    made: list[Drafter[Any]] = []
    for ticket in case.tickets:
        draft = ticket.draft
        if draft.kind in ("none", "ngram", "model", *OWN):
            if draft not in shared:
                shared[draft] = _unscripted(draft, case)
            made.append(shared[draft])
        else:
            made.append(ScriptedTree(script(case, ticket)))
    return made


def _unscripted(draft: Draft, case: Case) -> Drafter[Any]:
    if draft.kind == "none":
        return NoDraft()
    if draft.kind == "ngram":
        return Ngram(draft.depth, max(1, draft.depth - 2))
    if draft.kind in OWN:
        return _own(draft, case)
    model = draft_target(draft.model, case.arch, case.limit)
    made = DraftModel(model, tree_top_k=draft.top_k, depth=draft.depth or None, rule=case.rule, reuse_prefix=case.store)
    made.bind(oracles.target(case.arch, limit=case.limit))
    return made


def _own(draft: Draft, case: Case) -> Drafter[Any]:
    made: Drafter[Any]
    if draft.kind == "exit":
        made = EarlyExit(1, depth=draft.depth % 4 or None, tree_top_k=1 + draft.seed % 3, rule=case.rule)
    elif draft.kind == "lookahead":
        made = Lookahead(1 + draft.seed % 5, 2 + draft.depth % 4, 1 + draft.seed % 3)
    else:
        made = Suffix() if draft.kind == "suffix" else Recycle(width=1 + draft.seed % 9)
    made.bind(oracles.target(case.arch, limit=case.limit))
    return made


# -- playing a case ----------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What a cache held of a text at a step boundary."""

    model: PreTrainedModel
    ids: list[int]
    kv: Pairs


@dataclass
class Watch:
    """Looks at the caches of a run before and after its steps: at all when a row is alone, else at some."""

    case: Case
    looks: list[Look] = field(default_factory=list)
    drafters: list[Drafter[Any]] = field(default_factory=list)
    """Those of the case's tickets, in their order."""

    def __post_init__(self) -> None:
        self.rng, self.inner = random.Random(0), paceline.decode.step

    def step(self, target: Any, cache: KVCache, rows: Sequence[Request]) -> None:
        """In the place of `decode.step`."""
        self.look(cache, rows)
        self.inner(target, cache, rows)
        self.look(cache, rows)

    def look(self, cache: KVCache, rows: Sequence[Request]) -> None:
        assert (cache.staged, cache.rows, cache.num_bad_values) == (0, len(rows), 0)
        assert cache.lengths == [len(row.ids) - 1 for row in rows]
        for b, row in enumerate(rows):
            if len(rows) == 1 or self.rng.random() < 0.3:
                model = oracles.plain(self.case.arch, limit=self.case.limit)
                self.looks.append(Look(model, row.ids[:-1], _pairs(cache, b, len(row.ids) - 1)))
                if isinstance(row.drafter, DraftModel):
                    self.look_at_draft(row.drafter, row)

    def look_at_draft(self, drafter: DraftModel, row: Request) -> None:
        """A draft model's cache is read by the same rule: what it holds is what the draft reads in the text."""
        state = row.state
        if state.is_closed:
            return
        size, cache = drafter.num_read(state), drafter._pool if state.alone is None else state.alone
        assert cache is not None
        assert cache.staged == 0
        assert [*row.ids[:size], *state.unread] == row.ids[:-1]
        (name,) = {t.draft.model for t, d in zip(self.case.tickets, self.drafters, strict=True) if d is drafter}
        model = draft_plain(name, self.case.arch, self.case.limit)
        self.looks.append(Look(model, row.ids[:size], _pairs(cache, state.row or 0, size)))


def _pairs(cache: KVCache, row: int, length: int) -> Pairs:
    return [(k[0], v[0]) for k, v in cache.copy_row(row, length)] if length else []


@contextmanager
def chunks(case: Case) -> Iterator[None]:
    """Prompts are read in pieces of the case's size."""
    with ExitStack() as stack:
        for module in (paceline.prefix, paceline.draft.model):
            stack.enter_context(patch.object(module, "CHUNK", case.chunk))
        yield


def request(case: Case, ticket: Ticket, drafter: Drafter[Any]) -> Request:
    return Request(
        list(ticket.prompt),
        ticket.params,
        drafter,
        vocab_size=VOCAB,
        max_positions=case.limit,
        eos_ids=frozenset(ticket.eos),
        rule=case.rule,
        depth=ticket.depth,
        budget=ticket.budget,
        sample=ticket.sample,
    )


def play(
    case: Case,
    drafters: list[Drafter[Any]],
    store: Prefixes | None = None,
    taken: int | None = None,
    watch: Watch | None = None,
    rows: list[Request] | None = None,
) -> list[Request]:
    """The case's requests, new if none are given, run to their ends or given up when so many pieces were taken."""
    if rows is None:
        rows = [request(case, ticket, drafter) for ticket, drafter in zip(case.tickets, drafters, strict=True)]
    steps = run(oracles.target(case.arch, limit=case.limit), rows, max_rows=case.max_rows, prefixes=store)
    with ExitStack() as stack:
        stack.enter_context(chunks(case))
        stack.callback(steps.close)
        if watch is not None:
            watch.drafters = drafters
            stack.enter_context(patch.object(paceline.decode, "step", watch.step))
        for pieces, _ in enumerate(steps):
            if pieces == taken:
                break
    return rows


def later(case: Case, rows: Sequence[Request]) -> Case:
    """The case's requests as they may come again: the same, or, every second one, going on in the answer it got."""
    tickets = []
    for i, (ticket, row) in enumerate(zip(case.tickets, rows, strict=True)):
        taken = len(ticket.prompt) + 3 * len(row.output_ids) // 4
        prompt = ticket.prompt if i % 2 else (*row.ids[:taken], 3, 4)[: case.limit]
        tickets.append(replace(ticket, prompt=prompt))
    return replace(case, tickets=tuple(tickets), aborts=())


# -- what is compared --------------------------------------------------------------------------------------------------


def check_text(case: Case, rows: Sequence[Request]) -> None:
    """Every row that was not given up is plain decoding's answer; one that was is a beginning of it."""
    for ticket, row in zip(case.tickets, rows, strict=True):
        expected = plainly(case.arch, case.limit, ticket)
        assert row.ids[: len(ticket.prompt)] == list(ticket.prompt)
        if row.finish_reason in ("abort", None):
            assert row.output_ids == expected.ids[: len(row.output_ids)]
            continue
        assert (row.output_ids, row.finish_reason, row.stop_reason) == (expected.ids, expected.finish, expected.stop)
        assert (row.error is not None) == (expected.finish == "error")
        if row.error is not None:
            assert row.error.startswith(f"position {len(row.ids)}: ")
        check_notes(row, expected)


def check_notes(row: Request, expected: Plain) -> None:
    """What is told about the tokens: which were drafted, and their log-probs."""
    assert len(row.from_draft) == len(row.output_ids)
    assert row.stats.num_accepted_tokens == sum(row.from_draft) <= row.stats.num_draft_tokens
    if row.params.logprobs is not None:
        assert len(row.logprobs) == len(row.output_ids)
        for token, found, raw in zip(row.output_ids, row.logprobs, expected.raw, strict=True):
            assert abs(found[token].logprob - float(raw[token])) < 1e-6


def check_caches(watch: Watch, rows: Sequence[Request]) -> None:
    """Whatever was in a cache at a step boundary is what a fresh forward over the same text computes."""
    texts = [row.ids for row in rows]
    for look in watch.looks:
        if not look.ids:
            continue
        # One forward serves all looks at a text: keys and values depend on nothing behind them.
        whole = max((text for text in texts if text[: len(look.ids)] == look.ids), key=len)
        limit = min(len(whole), getattr(look.model.config, "max_position_embeddings", len(whole)))
        vocab = look.model.config.vocab_size
        whole = whole[: next((i for i, token in enumerate(whole) if token >= vocab), limit)][:limit]
        expected = read(look.model, tuple(whole))
        assert len(look.kv) == len(expected)
        flat = [torch.cat([t.flatten() for pair in side for t in pair]) for side in (look.kv, _begin(expected, look))]
        oracles.assert_close(*flat)


def _begin(pairs: Pairs, look: Look) -> Pairs:
    return [(k[:, : len(look.ids)], v[:, : len(look.ids)]) for k, v in pairs]


def check_lawful(case: Case, rows: Sequence[Request]) -> None:
    """Every token has a chance under the law that plain decoding has there, and the text ends where it must."""
    for ticket, row in zip(case.tickets, rows, strict=True):
        ids, stops = row.output_ids, stops_of(ticket)
        logits, processed = laws(oracles.plain(case.arch, limit=case.limit), ticket, ids)
        for i, token in enumerate(ids):
            size = len(ticket.prompt) + i
            assert float(processed(size, logits[size - 1])[token]) > -math.inf, f"token {i}, {token}, has no chance"
        assert not stops & set(ids[:-1])
        reason = "stop" if stops & set(ids[-1:]) else "length" if row.num_left == 0 else "error"
        assert row.finish_reason == reason
        if reason == "stop":
            is_eos = ids[-1] in ticket.eos and not row.params.ignore_eos
            assert row.stop_reason == (None if is_eos else ids[-1])


def check_greedy(case: Case, rows: Sequence[Request]) -> None:
    """The rules that reject by chance have nothing to choose at temperature 0.

    They decide only at the end of a pass, so that one which meets an empty law gives nothing of that pass.
    """
    for ticket, row in zip(case.tickets, rows, strict=True):
        expected = plainly(case.arch, case.limit, ticket)
        assert (row.finish_reason, row.stop_reason) == (expected.finish, expected.stop)
        size = len(row.output_ids) if expected.finish == "error" else len(expected.ids)
        assert row.output_ids == expected.ids[:size]


def check_left(drafters: Sequence[Drafter[Any]], rows: Sequence[Request]) -> None:
    """Nothing is held once a run is over."""
    assert not any(row.begun for row in rows)
    for drafter in drafters:
        if isinstance(drafter, DraftModel):
            assert (drafter._rows, drafter._pool) == ([], None)
