"""Public reports about many requests at once, and about those who leave in the middle."""

import gc
import itertools
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import Known, Spy, answer, prompt_of
from standins import SAMPLED, drafter
from transformers import AutoModelForCausalLM

import paceline.prefix
from paceline import LLM, SamplingParams
from paceline.decode import run
from paceline.draft.base import Drafter, NoDraft
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.prefix import Prefixes

# -- rows --------------------------------------------------------------------------------------------------------------


def test_lmdeploy_4671_rows_that_replace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike, stop ids of each row's own (the id of padding slots among them), mixed drafters, twice
    with one store of prefixes: every row is its solo run, and a row that has ended stays as it is."""
    monkeypatch.setattr(paceline.prefix, "CHUNK", 8)
    base = prompt_of(30)
    prompts = [base[:3], base[:7], [*base[:12], 5], base[:5], [*base[:20], 3, 4], base[:24], [*base[:16], 9], base[:12]]
    answers = [answer(prompt, 16, **SAMPLED) for prompt in prompts]
    k = Known(prompts, answers)
    texts = [one.ids for one in answers]
    stops: list[list[int]] = [
        [texts[0][4]], [texts[1][9]], [], [texts[0][4], texts[3][6]], [0], [texts[5][0]], [0, texts[6][11]], [95],
    ]  # fmt: skip
    ends = [next((i + 1 for i, token in enumerate(ids[:12]) if token in stop), 12) for ids, stop in zip(texts, stops)]
    assert len(set(ends)) > 3
    shared = drafter("tree", k, 3)
    drafters: list[Drafter[Any]] = [shared, k.wild(4, 10), Ngram(), k.mix(3), shared, NoDraft(), shared, k.oracle(5)]
    prefixes, spy = Prefixes(), Spy(oracles.target())
    for _ in range(2):
        rows = oracles.requests(
            spy, prompts, drafters, depth=5, settings=[{"stop_token_ids": stop} for stop in stops], max_tokens=12,
            **SAMPLED,
        )  # fmt: skip
        ended: set[int] = set()
        for row in run(spy, rows, max_rows=3, prefixes=prefixes):
            assert id(row) not in ended, "a row that had ended went on"
            ended |= {id(row)} if row.finish_reason else set()
        for row, ids, end, stop in zip(rows, texts, ends, stops, strict=True):
            assert row.output_ids == ids[:end]
            assert row.finish_reason == ("stop" if ids[end - 1] in stop else "length")
    assert sum(row.stats.num_cached_tokens for row in rows) >= sum(len(prompt) - 1 for prompt in prompts) // 2
    for positions, begins in zip(spy.positions, spy.begins, strict=True):
        assert all(row[0] == begin for row, begin in zip(positions, begins, strict=True))
    assert isinstance(shared, DraftModel)
    assert shared._rows == []


# -- leaving -----------------------------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "chain": {"method": "draft_model", "num_speculative_tokens": 2},
    "tree": {"method": "draft_model", "tree_top_k": 3, "num_speculative_tokens": 2},
}


def config_of(name: str, tiny_draft: Path) -> dict[str, Any]:
    return METHODS[name] | ({} if name == "ngram" else {"model": str(tiny_draft)})


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> list[int]:
    """The right text of `PROMPT`, by the unmodified model without a cache."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()
    return oracles.reference(model, PROMPT, 36).ids


PROMPT = [4, 5, 6, 4, 5]
PARAMS = SamplingParams(temperature=0.0, max_tokens=36)


@pytest.mark.parametrize(("name", "how"), [("ngram", "close"), ("tree", "close"), ("tree", "drop")])
def test_llamacpp_20_a_client_that_leaves(
    tiny_model: Path, tiny_draft: Path, whole: list[int], name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of the first ten pieces, by closing the stream or by forgetting it: no forward runs any more, the
    draft has let go of the row, and the next call has the full right text."""
    llm = LLM(tiny_model, config_of(name, tiny_draft), threads=1)
    used = llm._drafter(llm._config)
    models = [llm.target, *([used.model] if isinstance(used, DraftModel) else [])]
    forwards = 0
    for model in models:
        inner = model.forward

        def counted(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            nonlocal forwards
            forwards += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(model, "forward", counted)
    for taken in range(1, 11) if how == "close" else (1, 5):
        stream = llm.stream(PROMPT, PARAMS)
        shown = [token for piece in itertools.islice(stream, taken) for token in piece.token_ids]
        before, (sample,) = forwards, stream._job.samples
        if how == "close":
            stream.close()
            assert next(stream, None) is None
            assert stream.output.token_ids == shown
        else:
            del stream
            gc.collect()
        assert forwards == before
        assert shown == whole[: len(shown)]
        assert (sample.finish_reason, sample.begun) == ("abort", False)
        if isinstance(used, DraftModel):
            assert (used._rows, used._pool) == ([], None)
        if taken in (1, 10):
            assert llm.generate(PROMPT, PARAMS)[0].token_ids == whole


def test_llamacpp_20_fifty_mixed_aborts(tiny_model: Path, tiny_draft: Path, whole: list[int]) -> None:
    """Under every method, with samples, one row or several, beside a stream that goes on: same memory, same answers."""
    llm = LLM(tiny_model, threads=1, max_num_seqs=2, reuse_prefix=False)
    configs = [None, *(config_of(name, tiny_draft) for name in METHODS)]
    patient = llm.stream(PROMPT, PARAMS, speculative_config=configs[3])
    kept = [token for piece in itertools.islice(patient, 2) for token in piece.token_ids]
    short = SamplingParams(temperature=0.0, max_tokens=8)
    counts = []
    for call in range(50):
        config = configs[call % 4]
        many = SamplingParams(seed=call, max_tokens=20, n=1 + call % 3)
        stream = llm.stream([7 + call % 3, 8, 7], many, speculative_config=config)
        for _ in itertools.islice(stream, call % 4):
            pass
        stream.close()
        del stream
        if call % 12 == 11:
            outputs = llm.generate([PROMPT, [9, 8, 7, 6]], short, speculative_config=config)
            assert outputs[0].token_ids == whole[:8]
            kept += next(patient).token_ids
        if call in (23, 47):
            gc.collect()
            counts.append(sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects()))
    assert len(set(counts)) == 1
    kept += [token for piece in patient for token in piece.token_ids]
    assert kept == whole
