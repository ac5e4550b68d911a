"""The whole loop on random requests: the text of plain decoding, its caches, its laws, its refusals, its memory.

`PACELINE_FUZZ=20` tries twenty times as many. That each property can fail is shown by faults planted in the package,
which the same search must find.
"""

import gc
import itertools
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fuzzing
import pytest
import torch
from fuzzing import Case, Draft, Ticket, Watch, cases, check_caches, check_lawful, check_left, check_text, play
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jaxtyping import config as shape_checks
from oracles import VOCAB

import paceline.decode
import paceline.prefix
import paceline.sampling
import paceline.verify
from paceline.cache import KVCache
from paceline.decode import Request
from paceline.draft.base import Ask, Drafter
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.laws import Law
from paceline.prefix import Prefixes
from paceline.sampling import Draws, Sampler, SamplingParams
from paceline.testing import ScriptedTree
from paceline.tree import Drawn, Stacked, TokenTree

pytestmark = pytest.mark.slow

TIMES = int(os.environ.get("PACELINE_FUZZ", "1"))

Bug = Callable[[], AbstractContextManager[Any]]


@contextmanager
def as_users_run_it() -> Iterator[None]:
    """Annotations of shapes are not checked, so that there is time for more cases."""
    shape_checks.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        shape_checks.update("jaxtyping_disable", False)


def search(check: Callable[[Any], None], drawn: st.SearchStrategy[Any], examples: int, bug: Bug = nullcontext) -> None:
    """Try a property on so many cases, each with the bug planted anew; a bug is looked for only until it is found.

    Ten cases a time, because hypothesis goes on with variations of what it had, and cases should differ.
    """
    planted = bug is not nullcontext
    for turn in range(-(-examples // 10) * (1 if planted else TIMES)):

        @seed(turn)
        @settings(
            max_examples=min(examples, 10),
            derandomize=True,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate] if planted else [Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(drawn)
        def holds(case: Any) -> None:
            with bug(), as_users_run_it():
                check(case)

        holds()


# -- the properties ----------------------------------------------------------------------------------------------------


Runs = list[tuple[Case, list[Request]]]


def run_all(case: Case) -> tuple[Runs, Watch]:
    """The runs that are given up, the run proper, and one that finds in the store what the others left there."""
    shared: dict[Draft, Drafter[Any]] = {}
    drafters, store, watch = fuzzing.drafters(case, shared), Prefixes() if case.store else None, Watch(case)
    runs: Runs = []
    for taken in (*case.aborts, None):
        runs.append((case, play(case, drafters, store, taken, watch)))
        check_left(drafters, runs[-1][1])
    if store is not None:
        more = fuzzing.later(case, runs[-1][1])
        runs.append((more, play(more, fuzzing.drafters(more, shared), store, None, watch)))
    return runs, watch


def same_text(case: Case) -> None:
    for played, rows in run_all(case)[0]:
        check_text(played, rows)


def same_caches(case: Case) -> None:
    runs, watch = run_all(case)
    check_caches(watch, [row for _, rows in runs for row in rows])


def same_text_and_caches(case: Case) -> None:
    runs, watch = run_all(case)
    for played, rows in runs:
        check_text(played, rows)
    check_caches(watch, [row for _, rows in runs for row in rows])


def greedy_text(case: Case) -> None:
    runs, watch = run_all(case)
    for played, rows in runs[len(case.aborts) :]:
        fuzzing.check_greedy(played, rows)
    check_caches(watch, [row for _, rows in runs for row in rows])


def lawful_text(case: Case) -> None:
    """A run repeated says the same, whatever was given up before it."""
    runs, watch = run_all(case)
    whole = runs[len(case.aborts) :]
    for played, rows in whole:
        check_lawful(played, rows)
    again = play(case, fuzzing.drafters(case))
    assert [row.ids for row in again] == [row.ids for row in whole[0][1]]
    check_caches(watch, [row for _, rows in runs for row in rows])


OTHER = ("standard", "block")


def test_coupled_text_and_caches_are_those_of_plain_decoding() -> None:
    search(same_text_and_caches, cases(), 30)


def test_texts_of_many_different_tokens() -> None:
    search(same_text_and_caches, fuzzing.crowded(), 4)


@pytest.mark.parametrize("rule", OTHER)
def test_the_other_rules_are_greedy_when_they_must(rule: str) -> None:
    search(greedy_text, cases([rule], fuzzing.GREEDY), 10)


@pytest.mark.parametrize("rule", OTHER)
def test_the_other_rules_say_what_the_law_allows_and_say_it_again(rule: str) -> None:
    search(lawful_text, cases([rule], fuzzing.HOT), 10)


# -- each property finds what it is for --------------------------------------------------------------------------------


def replaced(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Bug:
    """A bug: a function of the package, changed."""
    return lambda: patch.object(owner, name, change(getattr(owner, name)))


def ignoring_the_path(law: Callable[..., Law]) -> Callable[..., Law]:
    return lambda self, logits, path=(): law(self, logits, ())


def showing_siblings(stack: Callable[..., Stacked]) -> Callable[..., Stacked]:
    """A mask that is causal in slot order, as for a chain."""

    def stacked(trees: list[TokenTree]) -> Stacked:
        right = stack(trees)
        return right._replace(mask=torch.ones_like(right.mask).tril() & right.mask.any(1, keepdim=True))

    return stacked


def placing_by_slot(stack: Callable[..., Stacked]) -> Callable[..., Stacked]:
    """Positions that count slots, not depths."""

    def stacked(trees: list[TokenTree]) -> Stacked:
        right = stack(trees)
        return right._replace(offsets=torch.arange(right.tokens.shape[1]).expand_as(right.tokens).clone())

    return stacked


def by_node(stack: Callable[..., Stacked]) -> Callable[..., Stacked]:
    """Nodes taken for their slots."""
    return lambda trees: stack(trees)._replace(slots=[list(range(tree.num_nodes)) for tree in trees])


def overrunning_stops(cut: Callable[..., Any]) -> Callable[..., Any]:
    """A stop is seen only as the last token of a pass."""

    def late(self: Request, ids: list[int]) -> Any:
        kept, end = cut(self, ids)
        return (kept, end) if len(kept) == len(ids) else (ids[: self.num_left], None)

    return late


def keeping_other_slots(commit: Callable[..., None]) -> Callable[..., None]:
    """The last slot of a path is taken from its neighbour."""

    def wrong(self: KVCache, paths: Any) -> None:
        commit(self, [[*path[:-1], path[-1] - 1] if len(path) > 2 else path for path in paths])

    return wrong


def keeping_what_comes_first(commit: Callable[..., None]) -> Callable[..., None]:
    return lambda self, paths: commit(self, [range(len(path)) for path in paths])


def forgetting_to_unstage(commit: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: KVCache, paths: Any) -> None:
        staged, offsets = self.staged, self.offsets
        commit(self, paths)
        self.staged, self.offsets = staged, offsets

    return wrong


def keeping_the_first_rows(keep: Callable[..., None]) -> Callable[..., None]:
    """When rows leave, those behind them do not move up."""

    def wrong(self: KVCache, rows: Any) -> None:
        right = [self.lengths[row] for row in rows]
        keep(self, range(len(rows)))
        self.lengths = right

    return wrong


def trusting_one_token_more(common: Callable[..., int]) -> Callable[..., int]:
    return lambda a, b: min(common(a, b) + 1, len(a), len(b))


def residual_of_the_draft(left: Callable[..., Any]) -> Callable[..., Any]:
    """What is left of the law after a rejection is the draft's law."""
    return lambda law, q, share: (q, left(law, q, share)[1])


def believing_the_draft(match: Callable[..., Any]) -> Callable[..., Any]:
    """The first child is always kept."""

    def wrong(law: Any, tree: TokenTree, draws: Any, node: int) -> Any:
        kids = tree.children[node]
        return (kids[0], tree.ids[kids[0]]) if kids else match(law, tree, draws, node)

    return wrong


def ungoverned_by_the_seed(pick: Callable[..., int]) -> Callable[..., int]:
    """Chance that goes on from one run of a case to the next."""
    calls = itertools.count()

    def wrong(self: Draws, law: torch.Tensor) -> int:
        return pick(Draws(next(calls)), law)

    return wrong


def without_filters(filtered: Callable[..., Law]) -> Callable[..., Law]:
    return lambda x, params: filtered(x, SamplingParams())


def forgetting_the_text(extend: Callable[..., None]) -> Callable[..., None]:
    return lambda self, ids: None


TEXT_BUGS = {
    "a sampler that ignores the path": replaced(Sampler, "law", ignoring_the_path),
    "a mask that shows siblings": replaced(paceline.decode, "stack", showing_siblings),
    "positions by slot": replaced(paceline.decode, "stack", placing_by_slot),
    "nodes for slots": replaced(paceline.decode, "stack", by_node),
    "a stop inside a pass overrun": replaced(Request, "cut", overrunning_stops),
    "a commit of other slots": replaced(KVCache, "commit", keeping_other_slots),
}
CACHE_BUGS = {
    "a commit of other slots": replaced(KVCache, "commit", keeping_other_slots),
    "a commit of the first slots": replaced(KVCache, "commit", keeping_what_comes_first),
    "slots left staged": replaced(KVCache, "commit", forgetting_to_unstage),
    "rows that do not move up": replaced(KVCache, "keep", keeping_the_first_rows),
    "one token too many from the store": replaced(paceline.prefix, "_common", trusting_one_token_more),
    "a mask that shows siblings": replaced(paceline.decode, "stack", showing_siblings),
}
LAW_BUGS = {
    "chance beyond the seed": replaced(Draws, "pick", ungoverned_by_the_seed),
    "filters left out": replaced(paceline.sampling, "filtered", without_filters),
    "settings that do not see the text": replaced(Sampler, "extend", forgetting_the_text),
}
GREEDY_BUGS = {
    "a draft that is believed": replaced(paceline.verify, "_match", believing_the_draft),
    "a residual of the draft": replaced(paceline.verify, "_left", residual_of_the_draft),
}


@pytest.mark.parametrize("bug", TEXT_BUGS)
def test_a_wrong_text_is_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        search(same_text, cases(), 60, TEXT_BUGS[bug])


@pytest.mark.parametrize("bug", CACHE_BUGS)
def test_a_wrong_cache_is_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        search(same_caches, cases(), 60, CACHE_BUGS[bug])


@pytest.mark.parametrize("bug", LAW_BUGS)
def test_a_wrong_law_is_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        search(lawful_text, cases(OTHER, fuzzing.HOT), 60, LAW_BUGS[bug])


@pytest.mark.parametrize("bug", GREEDY_BUGS)
def test_a_text_that_is_not_greedy_is_found(bug: str) -> None:
    with pytest.raises(AssertionError):
        search(greedy_text, cases(OTHER, fuzzing.GREEDY), 60, GREEDY_BUGS[bug])


# -- drafters that are refused -----------------------------------------------------------------------------------------


def labelled(ids: list[int], drawn: Drawn, q: torch.Tensor | None, children: int = 1) -> TokenTree:
    """A root with children."""
    tokens, parents = [ids[-1], *[5] * children], [-1, *[0] * children]
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), drawn, q)


EVIL: dict[str, tuple[Callable[[list[int]], Any], type[Exception], str]] = {
    "id": (lambda ids: [[3, VOCAB]], IncompatibleDrafter, f"ScriptedTree drafted id {VOCAB}; .* ids 0 to {VOCAB - 1}"),
    "far id": (lambda ids: [[2**40], [1]], IncompatibleDrafter, "drafted id 1099511627776"),
    "no id": (lambda ids: [[-1]], BadRequest, "tree tokens hold -1"),
    "no number": (lambda ids: [["a"]], BadRequest, "plain integers are needed"),
    "root": (lambda ids: TokenTree.chain((ids[-1] + 1) % VOCAB, [3]), IncompatibleDrafter, "rooted its tree at id"),
    "parent": (lambda ids: TokenTree(torch.tensor([ids[-1], 3]), torch.tensor([-1, 1])), BadRequest, "has parent 1"),
    "rows of q": (lambda ids: labelled(ids, Drawn.IID, torch.ones(3, VOCAB)), BadRequest, "tree q is float32 .3, 97."),
    "twins": (lambda ids: labelled(ids, Drawn.DISTINCT, torch.ones(3, VOCAB), 2), BadRequest, "repeat a token"),
}
"""What is proposed, and how it is refused, under every rule."""
EVIL_LAWS: dict[str, tuple[Callable[[list[int]], Any], type[Exception], str]] = {
    "wide q": (
        lambda ids: labelled(ids, Drawn.IID, torch.full((2, VOCAB + 1), 0.01)),
        IncompatibleDrafter,
        f"q speaks about {VOCAB + 1} tokens and the target has {VOCAB}",
    ),
    "no q": (lambda ids: labelled(ids, Drawn.DISTINCT, None), IncompatibleDrafter, "drawn DISTINCT and gives no q"),
}
"""The same where q is read."""


class Fewer(ScriptedTree):
    """Forgets a tree when its script says so."""

    def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
        trees = super().propose(states, asks)
        return trees if all(tree.num_nodes == 1 for tree in trees) else trees[:-1]


@st.composite
def refusals(draw: st.DrawFn) -> tuple[Case, int, int, str]:
    """A case, which of its tickets has the evil drafter, how many tokens it waits, and what it does then."""
    case = replace(draw(cases(("coupled", *OTHER), fuzzing.GREEDY)), aborts=())
    at, wait = draw(st.integers(0, len(case.tickets) - 1)), draw(st.sampled_from((0, 1, 4)))
    kinds = (*EVIL, "fewer", *(EVIL_LAWS if case.rule != "coupled" else ()))
    evil = Ticket(case.tickets[at].prompt[:20], (("temperature", 0.0), ("max_tokens", 9)), draft=Draft("empty"))
    tickets = [evil if i == at else ticket for i, ticket in enumerate(case.tickets)]
    return replace(case, tickets=tuple(tickets)), at, wait, draw(st.sampled_from(kinds))


def refused_by_name(drawn: tuple[Case, int, int, str]) -> None:
    """The run ends with the error that names the drafter's fault; nothing is held, and the others run afterwards."""
    case, at, wait, kind = drawn
    propose, error, words = {
        **EVIL,
        **EVIL_LAWS,
        "fewer": (lambda ids: [[3]], IncompatibleDrafter, "Fewer.propose returned 0 trees for 1 sequences"),
    }[kind]
    size = len(case.tickets[at].prompt)
    evil: Drafter[Any] = (Fewer if kind == "fewer" else ScriptedTree)(
        lambda ids: propose(ids) if len(ids) - size >= wait else []
    )
    drafters, store, watch = fuzzing.drafters(case), Prefixes() if case.store else None, Watch(case)
    given = [evil if i == at else drafter for i, drafter in enumerate(drafters)]
    rows = [fuzzing.request(case, t, d) for t, d in zip(case.tickets, given, strict=True)]
    with pytest.raises(error, match=words):
        play(case, given, store, None, watch, rows)
    check_left(drafters, rows)
    assert rows[at].finish_reason == "abort"
    for ticket, row in zip(case.tickets, rows, strict=True):  # also of the evil row what was said until then is right
        assert row.output_ids == fuzzing.plainly(case.arch, case.limit, ticket).ids[: len(row.output_ids)]
    again = play(case, drafters, store, None, watch)
    fuzzing.check_greedy(case, again)
    check_caches(watch, [*rows, *again])


def test_wrong_proposals_are_refused_by_name_and_harm_nobody_else() -> None:
    search(refused_by_name, refusals(), 10)


# -- memory ------------------------------------------------------------------------------------------------------------

CALLS, KINDS = 300, 20


def brief(case: Case) -> Case:
    """The first two requests, short, on a model with windows."""
    tickets = []
    for ticket in case.tickets[:2]:
        own = {**dict(ticket.settings), "max_tokens": 3, "min_tokens": 0}
        tickets.append(replace(ticket, settings=tuple(own.items()), depth=min(ticket.depth, 2)))
    return replace(case, arch="mistral", tickets=tuple(tickets))


def mixed_runs() -> list[tuple[int, int]]:
    """Live tensors and bytes of traced memory after every 60 of 300 runs.

    Whole runs, runs given up, and runs that end with an error, with drafters and stores that live on.
    """
    torch.set_num_threads(1)
    drawn: list[Case] = []
    search(drawn.append, cases() | cases(OTHER, fuzzing.GREEDY), KINDS)
    made: list[tuple[Case, list[Drafter[Any]], Prefixes | None]] = []
    for i, case in enumerate(map(brief, drawn[:KINDS])):
        drafters = fuzzing.drafters(case)
        if i % 5 == 4:
            drafters[-1] = ScriptedTree(list(EVIL.values())[i % len(EVIL)][0])
        made.append((case, drafters, Prefixes(50_000) if case.store else None))
    counts = []
    for call in range(CALLS):
        if call == 180:  # it doubles the time
            tracemalloc.start()
        case, drafters, store = made[call % KINDS]
        with suppress(BadRequest, IncompatibleDrafter):
            play(case, drafters, store, case.aborts[0] if case.aborts else None)
        if call % 60 == 59:
            gc.collect()
            tensors = sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects())
            counts.append((tensors, tracemalloc.get_traced_memory()[0]))
    return counts


def test_three_hundred_mixed_runs_in_flat_memory() -> None:
    """In a process without the test run's checks of types, which remember what they have seen."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_fuzz; print(json.dumps(test_fuzz.mixed_runs()))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = json.loads(printed.splitlines()[-1])
    assert len({tensors for tensors, _ in counts}) == 1
    # 60 runs: a request that is held takes kilobytes
    assert counts[-1][1] - counts[-2][1] < 50 * 1024, counts
