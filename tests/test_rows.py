"""Many requests at once: order, replacement, shares of a pass, leaving, and memory."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import VOCAB, Known, Spy, Table, answer, decode, prompt_of

from paceline import LLM, BadRequest, SamplingParams
from paceline.cache import KVCache
from paceline.decode import NODES_PER_PASS, Request, run
from paceline.draft.base import Ask, Drafter, NoDraft, Step
from paceline.draft.ngram import Ngram
from paceline.prefix import Prefixes
from paceline.testing import ScriptedTree
from paceline.tree import TokenTree


class Ledger(Drafter[int]):
    """A drafter that writes down who comes and who leaves; it drafts the same wrong chain for all."""

    def __init__(self, depth: int = 3) -> None:
        self.depth = depth
        self.open: set[int] = set()
        self.begun = 0
        self.ended: list[int] = []

    def begin(self, prompt: Step) -> int:
        self.begun += 1
        self.open.add(self.begun)
        return self.begun

    def propose(self, states: list[int], asks: list[Ask]) -> list[TokenTree]:
        assert set(states) <= self.open
        return [TokenTree.chain(ask.pending, [5] * min(self.depth, ask.budget, ask.depth)) for ask in asks]

    def observe(self, states: list[int], steps: list[Step]) -> None:
        assert set(states) <= self.open

    def end(self, state: int) -> None:
        self.open.remove(state)
        self.ended.append(state)


def run_all(target: Any, rows: list[Request], **options: Any) -> list[Request]:
    """In the order in which they ended."""
    return [row for row in run(target, rows, **options) if row.finish_reason is not None]


# -- order and replacement ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 40, None])
def test_every_row_is_its_solo_run(max_rows: int | None, settings: dict[str, Any]) -> None:
    prompts = [prompt_of(length, length) for length in (1, 2, 17, 60, 3, 9, 1, 31, 5, 5, 12)]
    known = [answer(prompt, 20, **settings) for prompt in prompts]
    k = Known(prompts, known)
    drafters: list[Drafter[Any]] = [k.mix(4), NoDraft(), Ngram(), k.wild(5, 15), k.oracle(7)]
    chosen = [drafters[i % 5] for i in range(len(prompts))]
    lengths = [3, 20, 1, 9, 14, 7, 20, 2, 5, 11, 20]
    own = [{"max_tokens": n, "stop_token_ids": [known[i].ids[6]] if i % 3 == 1 else []} for i, n in enumerate(lengths)]
    rows = oracles.requests(oracles.target(), prompts, chosen, settings=own, **settings)
    for prefixes in (None, Prefixes()):
        rows = oracles.requests(oracles.target(), prompts, chosen, settings=own, **settings)
        run_all(oracles.target(), rows, max_rows=max_rows, prefixes=prefixes)
        for i, row in enumerate(rows):
            text = known[i].ids[: lengths[i]]
            if i % 3 == 1 and known[i].ids[6] in text:
                text = text[: text.index(known[i].ids[6]) + 1]
            assert row.output_ids == text


def test_a_row_that_ends_makes_room_at_once_and_the_order_is_kept() -> None:
    target, ledger = Spy(oracles.target()), Ledger()
    lengths = [2, 9, 4, 3, 6, 1, 8, 5]
    rows = oracles.requests(
        target, [[i + 1, 2] for i in range(8)], ledger, settings=[{"max_tokens": n} for n in lengths]
    )
    started: list[int] = []
    running = 0
    for row in run(target, rows, max_rows=3):
        running = max(running, len(ledger.open))
        started += [i for i, one in enumerate(rows) if one.output_ids and i not in started]
        assert row.output_ids
    assert started == list(range(8))
    assert running == 3
    decoding = [len(tokens) for tokens, begins in zip(target.tokens, target.begins, strict=True) if begins != [0]]
    assert set(decoding[:-8]) == {3}, "while others wait, no place is empty"


def test_rows_share_a_pass() -> None:
    target = Spy(oracles.target())
    for count in (1, 2, 3, 4, 8, 11, 16, 31, 40):
        target.tokens.clear()
        decode(target, [[i + 1, 2] for i in range(count)], Ledger(99), depth=23, max_tokens=9)
        slots = [len(tokens) * len(tokens[0]) for tokens in target.tokens]
        assert max(slots) <= max(NODES_PER_PASS, count)
        if 1 < count <= 16:
            assert max(slots) > NODES_PER_PASS // 2  # and the share is used


def test_a_row_alone_gets_what_it_asked_for() -> None:
    target = Spy(oracles.target())
    decode(target, [[1, 2]], Ledger(99), depth=60, budget=60, max_tokens=70)
    assert max(len(tokens[0]) for tokens in target.tokens) == 61


def test_the_cache_shrinks_when_a_long_row_has_left() -> None:
    target, rows = oracles.target(limit=4096), []
    rows = oracles.requests(target, [prompt_of(3000), [3, 4]], settings=[{"max_tokens": 2}, {"max_tokens": 9}])
    caches = []

    class Watch(Spy):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            caches.append(args[3].capacity)
            return super().forward(*args, **kwargs)

    run_all(Watch(target), rows)
    assert max(caches) > 3000
    assert caches[-1] <= 1024


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_every_state_is_ended_once() -> None:
    ledger = Ledger()
    rows = oracles.requests(oracles.target(), [[i + 1] for i in range(7)], ledger, max_tokens=4)
    run_all(oracles.target(), rows, max_rows=2)
    assert sorted(ledger.ended) == list(range(1, 8))
    assert not ledger.open


@pytest.mark.parametrize("leave", range(1, 11))
def test_llamacpp_20_leaving_early(leave: int) -> None:
    """Whoever leaves after any piece frees everything, and the next call gets the whole right text."""
    target, ledger, prefixes = Spy(oracles.target()), Ledger(), Prefixes()
    prompts = [prompt_of(9), prompt_of(4), prompt_of(17)]
    rows = oracles.requests(target, prompts, ledger, max_tokens=12)
    steps = run(target, rows, max_rows=2, prefixes=prefixes)
    for _ in range(leave):
        next(steps)
    steps.close()
    assert not ledger.open
    passes = len(target.tokens)
    assert next(steps, None) is None
    assert len(target.tokens) == passes
    for row in rows:
        assert row.finish_reason in ("length", "abort", None)
        assert (row.finish_reason == "abort") == (ledger.begun > 0 and row.ids != row.prompt_ids and row.num_left > 0)
    again = oracles.requests(target, prompts, ledger, max_tokens=12)
    run_all(target, again, max_rows=2, prefixes=prefixes)
    assert [row.output_ids for row in again] == [answer(prompt, 12).ids for prompt in prompts]


class Boom(RuntimeError):
    """Raised where a test wants it."""


def _after(count: int, error: type[BaseException]) -> Iterator[None]:
    for _ in range(count):
        yield
    raise error("now")


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["begin", "propose", "observe", "processor", "forward", "commit"])
@pytest.mark.parametrize("count", [0, 2, 5])
def test_an_exception_reaches_the_caller_and_leaves_everything_usable(
    where: str, count: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prefixes = Spy(oracles.target()), Prefixes()
    bomb = _after(min(count, 2) if where == "begin" else count, error)  # three prompts are begun
    prompts = [prompt_of(9), prompt_of(4), prompt_of(17)]

    def then(call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, and the bomb behind it."""

        def both(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            next(bomb)
            return found

        return both

    ledger, processors = Ledger(), []
    if where in ("begin", "propose", "observe"):
        setattr(ledger, where, then(getattr(ledger, where)))
    elif where == "processor":
        processors = [then(lambda ids, logits: logits)]
    elif where == "forward":
        monkeypatch.setattr(target, "forward", then(target.forward))
    else:
        monkeypatch.setattr(KVCache, "commit", then(KVCache.commit))
    settings: list[dict[str, Any]] = [{}, {"logits_processors": processors}, {}]
    rows = oracles.requests(target, prompts, ledger, settings=settings, max_tokens=12)
    with pytest.raises(error, match="now"):
        run_all(target, rows, max_rows=2, prefixes=prefixes)
    monkeypatch.undo()
    assert len(ledger.open) == (where == "begin")  # a state that begin never handed over cannot be handed back
    assert {row.finish_reason for row in rows} <= {"length", "abort", None}
    again = oracles.requests(target, prompts, Ledger(), max_tokens=12)
    run_all(target, again, max_rows=2, prefixes=prefixes)
    assert [row.output_ids for row in again] == [answer(prompt, 12).ids for prompt in prompts]


def test_one_row_with_bad_logits_fails_alone() -> None:
    def spoil(logits: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        if logits.shape[0] > 1:
            logits[1, :, 3] = torch.where(positions[1] >= 12, torch.nan, logits[1, :, 3])

    prompts = [prompt_of(9), prompt_of(10), prompt_of(4)]
    rows = decode(Spy(oracles.target(), spoil), prompts, Ledger(), max_tokens=8)
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.output_ids == answer(prompt, 8).ids[: len(row.output_ids)]
    assert len(rows[1].output_ids) == 3


def test_a_row_that_failed_leaves_only_its_prompt_behind() -> None:
    def spoil(logits: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        logits[positions >= 12] = torch.nan

    prompt, prefixes = prompt_of(9), Prefixes()
    (row,) = oracles.requests(oracles.target(), [prompt], max_tokens=8)
    run_all(Spy(oracles.target(), spoil), [row], prefixes=prefixes)
    assert row.finish_reason == "error"
    (again,) = oracles.requests(oracles.target(), [[*row.ids, 3]], max_tokens=8)
    run_all(oracles.target(), [again], prefixes=prefixes)
    assert again.stats.num_cached_tokens <= len(prompt) - 1
    assert again.output_ids == answer(again.prompt_ids, 8).ids


def test_a_prompt_can_be_scored_without_writing(tiny_model: Path) -> None:
    llm, prompt = LLM(tiny_model, threads=1), [3, 4, 5, 6, 7]
    written, scored = (llm.generate([prompt], SamplingParams(max_tokens=n, prompt_logprobs=2))[0] for n in (2, 0))
    assert scored.token_ids == []
    assert scored.finish_reason == "length"
    assert scored.prompt_logprobs == written.prompt_logprobs
    assert len(scored.prompt_logprobs or []) == 5


# -- memory ------------------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects() if type(thing).__module__ == "torch")


@pytest.mark.slow
def test_five_hundred_prompts_in_flat_memory(tiny_model: Path) -> None:
    llm = LLM(tiny_model, threads=1, max_num_seqs=8)
    llm._prefixes = Prefixes(100_000)  # full after a few rows
    prompts = [[3 + i % 90, 4 + i % 7, *range(5, 5 + i % 13)] for i in range(500)]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    seen: list[tuple[int, int]] = []
    inner, calls = llm.target.forward, 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 150 == 0:
            seen.append((live_tensors(), args[3].nbytes))
        return inner(*args, **kwargs)

    llm.target.forward = watched  # type: ignore[method-assign]
    outputs = llm.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == [4] * 500
    assert len(seen) > 3
    tensors, sizes = zip(*seen, strict=True)
    # eight running rows and a store within its budget, whatever waits or is done
    assert max(tensors) - min(tensors) < 100
    assert len(set(sizes)) <= 2
    solo = llm.generate(prompts[371], params)[0]
    assert solo.token_ids == outputs[371].token_ids


MIXED_CALLS = """
import gc, json, sys, tracemalloc
import torch
from paceline import LLM, SamplingParams

llm = LLM(sys.argv[1], threads=1, max_num_seqs=2)
params = SamplingParams(temperature=0.0, max_tokens=8)
configs = [None, {"method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 0}]
tracemalloc.start()
counts = []
for call in range(300):
    prompt = [3 + call % 3, 4, 3 + call % 3, 4 + call % 3]
    if call % 5 == 4:
        stream = llm.stream(prompt, params, speculative_config=configs[call % 3])
        for _ in range(call % 4):
            next(stream)
        stream.close()
        del stream
    else:
        llm.generate([prompt, [5], [6, 6]], params, speculative_config=configs[call % 3])
    if call % 50 == 49:
        gc.collect()
        tensors = sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects())
        counts.append((tensors, tracemalloc.get_traced_memory()[0]))
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_vllm_15506_three_hundred_mixed_calls(tiny_model: Path) -> None:
    """Nothing is held when a call is over: live tensors and traced memory stay flat, aborted calls included.

    The prompts come again and again, so that the store of prefixes has all of them after the first calls.
    """
    command = [sys.executable, "-c", MIXED_CALLS, str(tiny_model)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = json.loads(printed.splitlines()[-1])
    assert len({tensors for tensors, _ in counts[1:]}) == 1
    assert counts[-1][1] - counts[1][1] < 200 * 1024  # under 1 KB a call


# -- through the library -----------------------------------------------------------------------------------------------


def test_rows_have_their_own_methods_settings_and_failures(tiny_model: Path) -> None:
    llm = LLM(tiny_model, threads=1, max_num_seqs=3, max_model_len=64)
    script = ScriptedTree(lambda ids: [[5, 6], [7]])
    configs: list[Any] = [None, {"method": "ngram"}, {"method": script}, {"method": "ngram"}, None, None]
    prompts: list[Any] = [[3, 4, 3], "the quick", [7, 8], [1] * 65, [], [400]]
    params = [SamplingParams(temperature=t, seed=4, max_tokens=6) for t in (0.0, 1.0, 0.7, 0.0, 0.0, 0.0)]
    outputs = llm.generate(prompts, params, speculative_config=configs)
    for i in range(3):
        assert outputs[i].token_ids == llm.generate([prompts[i]], params[i], speculative_config=None)[0].token_ids
    assert [output.finish_reason for output in outputs] == ["length"] * 3 + ["error"] * 3
    errors = [output.error or "" for output in outputs[3:]]
    assert "65 tokens, the context holds 64" in errors[0]
    assert "the prompt is empty" in errors[1]
    assert "400" in errors[2]
    for bad in prompts[3:]:
        with pytest.raises(BadRequest):
            llm.generate([bad], params[0])
    with pytest.raises(BadRequest, match="2 speculative_configs for 3 prompts"):
        llm.generate([[3], [4], [5]], speculative_config=[None, None])


def test_progress(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(tiny_model, threads=1, max_num_seqs=2)
    llm.generate([[3], [4], [5], [6]], SamplingParams(max_tokens=2))
    assert capsys.readouterr().err == ""
    llm.generate([[3], [4], [5], [6]], SamplingParams(max_tokens=2), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("paceline: generating: 0 of 4 answers")
    assert lines[-1].startswith("paceline: generating: 4 of 4 answers")


def test_one_token_of_room(tiny_model: Path) -> None:
    llm = LLM(tiny_model, threads=1, max_model_len=8)
    for length, room in ((7, 1), (8, 0)):
        for config in (None, {"method": "ngram"}):
            (output,) = llm.generate([3] * length, SamplingParams(temperature=0.0), speculative_config=config)
            assert (len(output.token_ids), output.finish_reason) == (room, "length")


def test_a_table_that_says_one_thing() -> None:
    """Rows of a target without any buffers: nothing of the batch depends on keys and values."""
    table = Table([[0.5, 0.25, 0.25]] * 3)
    rows = oracles.requests(
        table,
        [[i % 3] for i in range(20)],
        Ngram(),
        settings=[{"seed": i} for i in range(20)],
        temperature=1.0,
        max_tokens=9,
    )
    run_all(table, rows, max_rows=4, prefixes=Prefixes())
    for i, row in enumerate(rows):
        alone = oracles.requests(table, [[i % 3]], seed=i, temperature=1.0, max_tokens=9)[0]
        run_all(table, [alone])
        assert alone.output_ids == row.output_ids
    assert VOCAB > 3
