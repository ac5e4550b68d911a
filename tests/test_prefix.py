"""Reuse of keys and values: what is reused, that its bits are those of a fresh reading, and that no text changes."""

import random
from typing import Any

import oracles
import pytest
import torch
from oracles import Spy, answer, prompt_of

import paceline.prefix
from paceline import LLM, SamplingParams
from paceline.cache import KVCache
from paceline.decode import Request, prefill, run
from paceline.draft.base import NoDraft
from paceline.prefix import Prefixes
from paceline.target import HFTarget

CHUNK = 8


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.prefix, "CHUNK", CHUNK)


def cache_of(length: int) -> KVCache:
    """A row whose keys and values are their positions."""
    cache = KVCache(1, 10_000)
    cache.start(torch.arange(length)[None])
    values = torch.arange(length, dtype=torch.float64)[None, None, :, None]
    cache.update(values, -values, 0)
    cache.finish()
    cache.commit([range(length)])
    return cache


def store(*entries: tuple[list[int], int, int], budget: int = 1 << 20) -> Prefixes:
    prefixes = Prefixes(budget)
    for ids, prompt, exact in entries:
        prefixes.keep(ids, prompt, exact, cache_of(len(ids)), 0)
    return prefixes


A = list(range(100, 130))


@pytest.mark.parametrize(
    ("wanted", "length", "exact"),
    [
        ([*A[:20], 0], 20, 20),  # the very same prompt (the pending token is never looked for)
        ([*A[:20], 0, 0], 16, 16),  # the same 20 tokens, but a longer prompt: up to a border
        ([*A[:19], 0], 16, 16),
        (A[:17] + [0] * 9, 16, 16),
        ([*A[:16], 0], 16, 16),
        (A[:15] + [0] * 9, 8, 8),
        (A[:7] + [0] * 9, 0, 0),
        (A[:25] + [0] * 9, 25, 16),  # goes on in the answer: all of it, of which the whole chunks are exact
        ([*A, 0], 30, 16),
        ([0] * 30, 0, 0),
        ([5], 0, 0),
    ],
)
def test_what_is_reused(wanted: list[int], length: int, exact: int) -> None:
    """An entry of a prompt with 20 tokens read, and 10 decoded behind them."""
    found = store((A, 20, 20)).find(wanted)
    assert (0, 0) if found is None else (found.length, found.exact) == (length, exact)
    if found is not None:
        assert found.kv[0][0][0, 0, :length, 0].tolist() == list(range(length))


def test_the_most_useful_entry_wins_and_the_longest_unused_goes() -> None:
    size = cache_of(1).row_bytes(10)
    prefixes = store((A[:10], 10, 10), (A[10:20], 10, 10), (A[20:30], 10, 10), budget=3 * size)
    assert prefixes.nbytes == 3 * size
    assert prefixes.find([*A[:9], 0]) is not None  # used: now the youngest
    prefixes.keep([*A[:9], 1], 10, 10, cache_of(10), 0)
    assert prefixes.nbytes == 3 * size
    assert prefixes.find(A[10:30]) is None
    assert prefixes.find(A[20:]) is not None
    assert prefixes.find(A[:11]) is not None
    prefixes.keep(A, 30, 30, cache_of(31), 0)
    assert prefixes.nbytes == 3 * size
    prefixes.keep([7] * 31, 31, 31, cache_of(31), 0)  # larger than the budget: not kept, and nothing lost for it
    assert prefixes.nbytes == 3 * size
    prefixes.clear()
    assert prefixes.nbytes == 0


def test_an_entry_gives_way_to_one_that_can_do_all_it_could() -> None:
    prefixes = store((A[:10], 8, 8), (A[:20], 8, 8))
    assert prefixes.nbytes == cache_of(1).row_bytes(20)
    kept = store((A[:12], 12, 12), (A[:20], 15, 8))  # the second has fewer exact bits
    assert kept.nbytes == cache_of(1).row_bytes(32)


@pytest.fixture(scope="module")
def float32() -> HFTarget:
    """Rounding shows in this one: another chunking gives other bits."""
    return HFTarget(oracles.tiny("llama", dtype=torch.float32))


def request(target: Any, prompt: list[int], **settings: Any) -> Request:
    return oracles.requests(target, [prompt], **{"max_tokens": 6, **settings})[0]


def finished(target: Any, prompt: list[int], prefixes: Prefixes | None, **settings: Any) -> Request:
    row = request(target, prompt, **settings)
    for _ in run(target, [row], prefixes=prefixes):
        pass
    return row


@pytest.mark.parametrize("first", [17, 30, 33, 41])
@pytest.mark.parametrize("common", [7, 8, 15, 16, 30])
@pytest.mark.parametrize("second", [17, 32, 33, 40])
def test_the_same_request_has_the_same_bits_with_or_without(
    float32: HFTarget, first: int, common: int, second: int
) -> None:
    common = min(common, first - 1)  # a text that goes on behind a prompt is another case
    one, two = prompt_of(first, 1), prompt_of(second, 2)
    two = [*one[:common], (one[common] + 1) % oracles.VOCAB, *two[common + 1 :]][:second]
    prefixes = Prefixes()
    finished(float32, one, prefixes)
    fresh, again = request(float32, two), request(float32, two)
    expected, found = prefill(float32, fresh), prefill(float32, again, prefixes)
    assert again.stats.num_cached_tokens == min(common, first - 1, second - 1) // CHUNK * CHUNK
    assert again.num_exact == second - 1
    assert expected.lengths == found.lengths
    for layer in range(2):
        for a, b in zip(expected._kv[layer], found._kv[layer], strict=True):
            assert torch.equal(a[:, :, : second - 1], b[:, :, : second - 1])


def test_the_same_prompt_is_not_read_again(float32: HFTarget) -> None:
    prompt, prefixes, spy = prompt_of(29), Prefixes(), Spy(float32)
    first = finished(spy, prompt, prefixes)
    read = len(spy.tokens)
    second = finished(spy, prompt, prefixes)
    assert second.stats.num_cached_tokens == 28
    assert len(spy.tokens) - read == 6  # the passes of the answer alone
    assert second.output_ids == first.output_ids


def test_rows_that_run_together_share_what_they_begin_with() -> None:
    target, shared = Spy(oracles.target()), prompt_of(30)
    prompts = [[*shared, i, i + 1] for i in range(4)]
    rows = oracles.requests(target, prompts, max_tokens=3)
    list(run(target, rows, prefixes=Prefixes()))
    assert [row.stats.num_cached_tokens for row in rows] == [0, 24, 24, 24]
    assert [row.output_ids for row in rows] == [answer(prompt, 3).ids for prompt in prompts]


def test_samples_read_their_prompt_once(tiny_model: Any) -> None:
    llm = LLM(tiny_model, threads=1)
    (output,) = llm.generate([[3, 4, 5]], SamplingParams(n=4, seed=1, max_tokens=8))
    assert [sample.stats.num_cached_tokens for sample in output.samples] == [0, 2, 2, 2]
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 4


def test_the_next_turn_reads_what_is_new() -> None:
    target, prefixes = Spy(oracles.target()), Prefixes()
    first = finished(target, prompt_of(21), prefixes)
    turn = [*first.ids, 9, 8, 7]
    read = len(target.positions)
    second = finished(target, turn, prefixes)
    assert second.stats.num_cached_tokens == len(first.ids) - 1
    assert second.num_exact == 16
    assert target.positions[read][0][0] == len(first.ids) - 1
    assert second.output_ids == answer(turn, 6).ids
    third = finished(target, [*second.ids, 3], prefixes)  # and so on, whatever the bits came from
    assert third.stats.num_cached_tokens == len(second.ids) - 1
    assert third.num_exact == 16


@pytest.mark.parametrize("seed", range(12))
def test_no_text_changes(seed: int) -> None:
    """Conversations that branch, go on, stop in the middle of a block, are aborted or fail, under any settings."""
    rng = random.Random(seed)
    prefixes, target, texts = Prefixes(60_000), oracles.target(), [prompt_of(20, seed)]
    reused = 0
    for turn in range(14):
        base = rng.choice(texts)
        prompt = [*base[: rng.randrange(1, len(base) + 1)], *prompt_of(rng.randrange(1, 9), turn)][-120:]
        settings: dict[str, Any] = rng.choice([{}, {"temperature": 1.0, "seed": turn}])
        known = answer(prompt, 12, **settings)
        k = oracles.Known([prompt], [known])
        stops = [known.ids[rng.randrange(12)]] if rng.random() < 0.4 else []
        drafter = rng.choice([k.mix(4), k.wild(4, 12), k.oracle(6), NoDraft()])
        row = oracles.requests(target, [prompt], drafter, max_tokens=12, stop_token_ids=stops, **settings)[0]
        steps = run(target, [row], prefixes=prefixes)
        leave = rng.randrange(1, 4) if rng.random() < 0.3 else 99
        for count, _ in enumerate(steps, 1):
            if count == leave:
                break
        steps.close()
        assert row.output_ids == known.ids[: len(row.output_ids)]
        if row.finish_reason == "length":
            assert len(row.output_ids) == 12
        reused += row.stats.num_cached_tokens
        texts.append(row.ids)
        assert prefixes.nbytes <= 60_000
    assert reused > 15


def test_drafters_that_need_hidden_states_and_prompt_logprobs_read_everything() -> None:
    class Taps(NoDraft):
        taps = (1,)
        seen = 0

        def begin(self, prompt: Any) -> None:
            Taps.seen += prompt.hidden.shape[0]

        def observe(self, states: Any, steps: Any) -> None:
            Taps.seen += sum(step.hidden.shape[0] for step in steps)

    prompt, prefixes, target = prompt_of(20), Prefixes(), oracles.target()
    finished(target, prompt, prefixes)
    row = oracles.requests(target, [prompt], Taps(), max_tokens=1)[0]
    list(run(target, [row], prefixes=prefixes))
    assert (Taps.seen, row.stats.num_cached_tokens) == (20, 0)
    assert finished(target, prompt, prefixes, prompt_logprobs=0).stats.num_cached_tokens == 0


def test_the_drafter_sees_every_prompt_token() -> None:
    class Reader(NoDraft):
        def __init__(self) -> None:
            self.read: list[int] = []

        def begin(self, prompt: Any) -> None:
            self.read += prompt.tokens

        def observe(self, states: Any, steps: Any) -> None:
            self.read += [token for step in steps for token in step.tokens]

    prompt, prefixes, target = prompt_of(29), Prefixes(), oracles.target()
    for _ in range(2):
        reader = Reader()
        row = oracles.requests(target, [prompt], reader, max_tokens=3)[0]
        list(run(target, [row], prefixes=prefixes))
        assert reader.read == row.ids[:-1]


def test_switched_off(tiny_model: Any) -> None:
    on, off = (LLM(tiny_model, threads=1, reuse_prefix=reuse) for reuse in (True, False))
    params = SamplingParams(temperature=0.0, max_tokens=5)
    prompt = list(range(3, 60))
    for llm, reused in ((on, 56), (off, 0)):
        first = llm.generate(prompt, params)[0]
        second = llm.generate(prompt, params)[0]
        assert first.stats.num_cached_tokens == 0
        assert second.stats.num_cached_tokens == second.stats.to_dict()["num_cached_tokens"] == reused
        assert second.token_ids == first.token_ids
