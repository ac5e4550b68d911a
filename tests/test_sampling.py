"""Laws and what drafters get of them: against `transformers`, against dense sums in float64."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import config as shape_checks
from oracles import processors
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.errors import BadLogits, BadRequest
from paceline.sampling import Draws, Sampler, SamplingParams, ranked

V = 151_936


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    for settings in (
        {"logit_bias": {10: 1.0}},
        {"stop_token_ids": [10]},
        {"allowed_token_ids": [3, 10]},
        {"bad_words": [[3, 10]]},
    ):
        params = SamplingParams(**settings)  # type: ignore[arg-type]
        Sampler(params, 11, [0])
        with pytest.raises(
            BadRequest, match=f"{next(iter(settings))} holds token id 10; the vocabulary has ids 0 to 9"
        ):
            Sampler(params, 10, [0])
    with pytest.raises(BadRequest, match="the prompt holds token id 10"):
        Sampler(SamplingParams(), 10, [10])
    for name in ("logprobs", "prompt_logprobs"):
        Sampler(SamplingParams(**{name: 10}), 10, [0])  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match=f"{name} is 11; the vocabulary has 10 tokens, and -1 asks for all"):
            Sampler(SamplingParams(**{name: 11}), 10, [0])  # type: ignore[arg-type]
    with shape_checks_off(), pytest.raises(BadRequest, match="one row of 10"):
        Sampler(SamplingParams(), 10, [0]).law(torch.zeros(11))


class shape_checks_off:
    """As users run the package: annotations unchecked, so that its own words come out (and loops run at full speed)."""

    def __enter__(self) -> None:
        shape_checks.update("jaxtyping_disable", True)

    def __exit__(self, *_: object) -> None:
        shape_checks.update("jaxtyping_disable", False)


# -- laws against transformers -----------------------------------------------------------------------------------------


def rows() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    flat = torch.randn(V, generator=generator)
    peaked = torch.randn(V, generator=generator) * 2.5
    peaked[torch.randperm(V, generator=generator)[:50]] += torch.rand(50, generator=generator) * 14 + 4
    middling = torch.randn(V, generator=generator) * 2
    return {
        "flat": flat,
        "peaked": peaked,
        "middling": middling,
        "flat bf16": flat.bfloat16(),
        "peaked bf16": peaked.bfloat16(),
        "float64": middling.double(),
    }


ROWS = rows()
SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 2000},
    {"top_k": 100_000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.6},
    {"temperature": 1.5, "top_k": 5000, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.97, "min_p": 0.001},
    {"repetition_penalty": 1.3, "top_p": 0.95},
]


def reference(params: SamplingParams, row: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """The processors of `transformers`, in its order and with its own code."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        chain.append(MinPLogitsWarper(params.min_p))
    x = row if row.dtype == torch.float64 else row.float()
    out: torch.Tensor = chain(torch.tensor([ids]), x[None].clone())[0]
    return out


@pytest.mark.parametrize("name", ROWS)
def test_laws_equal_those_of_transformers(name: str) -> None:
    """Same tokens kept and same logits; at the top-p border only tokens whose own mass decides may differ."""
    row, prompt = ROWS[name], list(range(0, 3000, 7))
    before = row.clone()
    for given in SETTINGS:
        params = SamplingParams(**given)  # type: ignore[arg-type]
        law = Sampler(params, V, prompt).law(row)
        want = reference(params, row, prompt)
        got = torch.full_like(want, -math.inf)
        got[slice(None) if law.ids is None else law.ids] = law.logits
        differs = (got.isneginf() != want.isneginf()).nonzero().flatten()
        if params.top_p == 1.0:
            assert differs.numel() == 0, given
        elif differs.numel():
            scaled = reference(replace(params, top_p=1.0, min_p=0.0), row, prompt).double()
            ordered = scaled.sort(descending=True).values.softmax(0).cumsum(0)
            border = scaled.sort(descending=True).values[int((ordered < params.top_p).sum())]
            share = scaled.softmax(0)
            for token in differs[scaled[differs] != border].tolist():  # so near that float32 sums decide
                above = float(share[scaled > scaled[token]].sum())
                tied = float(share[scaled == scaled[token]].sum())
                assert above - 1e-6 < params.top_p < above + tied + 1e-6, given
        both = ~(got.isneginf() | want.isneginf())
        assert torch.equal(got[both], want[both]), given
        assert law.ids is None or torch.equal(law.ids, law.ids.sort().values)
        assert float(law.probs().sum()) == pytest.approx(1, abs=1e-12)
    assert torch.equal(row, before)


@pytest.mark.parametrize("size", [1, 5, 63, 64, 200, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_top_p_keeps_the_fewest_tokens_that_reach_it(size: int, seed: int) -> None:
    """A plain full sort says which: likelier first, the lower id first among equals. Coarse rows tie a lot."""
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2
    for x in (row, (row * 4).round() / 4, torch.zeros(size)):
        for top_p in (0.1, 0.5, 0.9, 0.99):
            share = x.double().softmax(0)
            order = sorted(range(size), key=lambda at, x=x: (-float(x[at]), at))
            kept: list[int] = []
            mass = 0.0
            while mass < top_p * (1 - 1e-7) and len(kept) < size:
                mass += float(share[order[len(kept)]])
                kept.append(order[len(kept)])
            law = Sampler(SamplingParams(top_p=top_p), size, [0]).law(x)
            got = law.probs().nonzero().flatten().tolist()
            assert sorted(set(got) ^ set(kept)) == [] or abs(mass - top_p) < 1e-5


def test_ties_at_the_top_k_border_all_stay_and_ties_at_the_top_p_border_go_by_id() -> None:
    row = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert Sampler(SamplingParams(top_k=2), 5, [0]).law(row).ids.tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    uniform = torch.zeros(6000)
    law = Sampler(SamplingParams(top_p=0.25), 6000, [0]).law(uniform)
    assert law.probs().nonzero().flatten().tolist() == list(range(1500))
    coarse = torch.zeros(V)
    coarse[::2] = 1.0
    kept = Sampler(SamplingParams(top_p=0.5), V, [0]).law(coarse).probs().nonzero().flatten()
    assert torch.equal(kept, torch.arange(kept.shape[0]) * 2)


def test_penalties_follow_their_formulas_along_emitted_text_and_path() -> None:
    """Dense formulas over all counts, against the incremental ones that touch seen ids only."""
    pick = random.Random(3)
    for trial in range(30):
        size = 40
        params = SamplingParams(
            presence_penalty=pick.choice([0.0, 0.7, -0.3]),
            frequency_penalty=pick.choice([0.0, 0.4]),
            repetition_penalty=pick.choice([1.0, 1.3, 0.8]),
            logit_bias=pick.choice([None, {3: 2.0, 7: -math.inf}]),
        )
        prompt = [pick.randrange(size) for _ in range(10)]
        output = [pick.randrange(size) for _ in range(trial * 5)]  # past the first capacity
        path = [pick.randrange(size) for _ in range(pick.randrange(6))]
        sampler = Sampler(params, size, prompt)
        for at in range(0, len(output), 3):
            sampler.extend(output[at : at + 3])
        row = torch.randn(size, dtype=torch.float64)
        want = row.clone()
        for token, bias in (params.logit_bias or {}).items():
            want[token] += bias
        for token in range(size):
            times = (output + path).count(token)
            if times or token in prompt:
                want[token] *= params.repetition_penalty if want[token] < 0 else 1 / params.repetition_penalty
            want[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
        before = row.clone()
        torch.testing.assert_close(sampler.law(row, path).probs(), want.softmax(0), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sampler.log_law(row[None], path)[0].exp(), want.softmax(0), rtol=1e-12, atol=1e-14)
        assert torch.equal(row, before)


def test_penalties_of_any_finite_size_stay_numbers() -> None:
    for size in (1e9, 1e38, 1e300, -1e300):
        params = SamplingParams(presence_penalty=size, frequency_penalty=size, repetition_penalty=1.1, temperature=0)
        sampler = Sampler(params, 4, [0, 1])
        sampler.extend([2])
        token = int(sampler.law(torch.tensor([0.0, 1.0, 9.0, 0.5]), [2]).ids[0])  # type: ignore[index]
        assert token == (1 if size > 0 else 2)


def test_vllm_42744() -> None:
    """Bias, min-p and penalties act on every position, drafted ones included."""
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    law = Sampler(SamplingParams(min_p=0.4), 4, [0]).law(row)
    assert law.probs().tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=1e-7)
    banned = Sampler(SamplingParams(logit_bias={0: -100.0}, temperature=0), 4, [0])
    assert banned.law(row, [1, 1]).ids.tolist() == [1]  # type: ignore[union-attr]
    once = Sampler(SamplingParams(presence_penalty=1e9, temperature=0), 4, [0])
    assert once.law(row, []).ids.tolist() == [0]  # type: ignore[union-attr]
    assert once.law(row, [0]).ids.tolist() == [1]  # type: ignore[union-attr]
    once.extend([0, 1])
    assert once.law(row, [2]).ids.tolist() == [3]  # type: ignore[union-attr]
    biased = Sampler(SamplingParams(logit_bias={3: 100.0}), 4, [0])
    assert biased.law(row).probs()[3] > 0.999


@pytest.mark.parametrize("size", [4, 5000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle_69(size: int, temperature: float) -> None:
    """NaN is an error and never an argmax; one infinite logit is that token; a row without tokens is an error."""
    for settings in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"repetition_penalty": 1.2}):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1, **settings), size, [0])  # type: ignore[arg-type]
        row = torch.randn(size, generator=torch.Generator().manual_seed(1))
        for bad, words in ((math.nan, "NaN"), (-math.inf, "no token is left")):
            broken = row.clone()
            broken[2 if math.isnan(bad) else slice(None)] = bad
            with pytest.raises(BadLogits, match=words):
                sampler.law(broken)
        certain = row.clone()
        certain[size - 1] = math.inf
        for half in (torch.float32, torch.float16, torch.bfloat16):
            assert sampler.draws.choose(sampler.law(certain.to(half)), 5) == size - 1
            assert 0 <= sampler.draws.choose(sampler.law(row.to(half)), 5) < size


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, top_k=3, top_p=0.5), V, [0])
    row = torch.randn(V, generator=torch.Generator().manual_seed(2))
    for tied in ([70_000, 90_000], [63, 64], [V - 2, V - 1], [0, V - 1]):
        x = row.clone()
        x[tied] = 9.0
        for kind in (torch.float32, torch.bfloat16, torch.float64):
            law = sampler.law(x.to(kind))
            assert law.ids is not None
            assert law.ids.tolist() == [tied[0]]
            assert law.probs()[tied[0]] == 1.0


# -- what drafters get -------------------------------------------------------------------------------------------------

TOP_SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.8},
    {"top_k": 5000, "min_p": 0.001},
    {"temperature": 1.7, "top_p": 0.9, "min_p": 0.05},
    {"logit_bias": {1: -math.inf, 2: 3.0}},
    {"allowed_token_ids": [0, 2, 3], "top_k": 2},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 2, "bad_words": [[3], [4, 1]], "presence_penalty": 0.5},
]


def dense_top(params: SamplingParams, row: torch.Tensor, text: list[int], position: int) -> list[tuple[int, float]]:
    """Every key in float64: processors of `transformers`, a full log-softmax, all of the noise, a full sort."""
    without = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    plain = transformed(without, row, text)
    logs = plain.double() - plain.double().logsumexp(0)
    if params.is_greedy:
        keys = logs
    else:
        # the filters of `transformers` in the row's own type: which tokens they keep is what is asked here
        kept = transformed(params, row, text)
        keys = kept.double() - kept.double().logsumexp(0)
        keys = torch.where(kept > -math.inf, keys, logs - 1e5) + Draws(params.seed or 0).noise(
            position, vocab_size=len(row)
        )
    order = sorted(range(len(row)), key=lambda at: (-float(keys[at]), at))
    return [(at, float(keys[at])) for at in order if plain[at] > -math.inf]


def transformed(params: SamplingParams, row: torch.Tensor, text: list[int]) -> torch.Tensor:
    x = row[None].clone() if row.dtype == torch.float64 else row[None].float()
    for processor in processors(params, 1):  # a prompt of one token
        x = processor(torch.tensor([text]), x)
    return x[0]


@pytest.mark.parametrize("settings", TOP_SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("size", "kind"), [(5, torch.float64), (30, torch.float32), (97, torch.bfloat16), (5003, torch.float32)]
)
def test_top_is_the_best_of_all_keys(settings: dict[str, Any], size: int, kind: torch.dtype) -> None:
    params = SamplingParams(seed=3, **settings)
    path = [4, 1, 4]
    generator = torch.Generator().manual_seed(size)
    coarse = torch.randn(size, generator=generator).round()
    # of tokens tied at the top-p border transformers keeps any; ours are the lowest ids, which has tests above
    for row in (torch.randn(size, generator=generator) * 2, *([coarse] if params.top_p == 1.0 else [])):
        row = row.to(kind)
        sampler = Sampler(params, size, [3])
        before = row.clone()
        for position in (5, 6, 7) if size < 1000 else (5,):
            want = dense_top(params, row, [3, *path], position)
            for k in (1, 2, 8, size + 1):
                got = sampler.top(row, path, position, k)
                assert [token for token, _ in got] == [token for token, _ in want[:k]]
                keys = torch.tensor([[key for _, key in pairs] for pairs in (got, want[:k])], dtype=torch.float64)
                assert float((keys[0] - keys[1]).abs().max()) < 1e-9
            chosen = sampler.draws.choose(sampler.law(row, path), position)
            assert sampler.top(row, path, position, 1)[0][0] == chosen
        assert torch.equal(row, before)


def test_top_foresees_the_target_at_a_full_vocabulary() -> None:
    for settings in ({}, {"temperature": 0.7, "top_p": 0.95}, {"top_k": 50}, {"temperature": 0.0}):
        sampler = Sampler(SamplingParams(seed=3, **settings), V, [0])  # type: ignore[arg-type]
        for name, row in ROWS.items():
            law = sampler.law(row)
            for position in range(10):
                found = sampler.top(row, [], position, 8)
                assert found[0][0] == sampler.draws.choose(law, position), (settings, name)
                assert len(found) == len({token for token, _ in found}) == 8
                assert [key for _, key in found] == sorted((key for _, key in found), reverse=True)


def test_a_draft_vocabulary_may_be_narrower_or_wider() -> None:
    params = SamplingParams(seed=3, repetition_penalty=1.5, logit_bias={99: 5.0}, no_repeat_ngram_size=1)
    sampler = Sampler(params, 100, [3, 98])
    row = torch.randn(90, generator=torch.Generator().manual_seed(1))
    assert sampler.log_law(row[None], [97]).exp().sum() == pytest.approx(1, abs=1e-5)
    exact = torch.cat([row, torch.full((10,), -math.inf)])
    for position in range(30):
        narrow = sampler.top(row, [97], position, 5)
        assert [token for token, _ in narrow] == [token for token, _ in sampler.top(exact, [97], position, 5)]
        assert narrow[0][0] == sampler.draws.choose(sampler.law(exact, [97]), position)
        wide = sampler.top(torch.cat([exact, torch.full((30,), 50.0)]), [97], position, 200)
        assert wide == sampler.top(exact, [97], position, 200)
        assert len(wide) == 89  # all of the narrow ones but the one the text holds
    wide = sampler.log_law(torch.cat([exact, torch.full((30,), 50.0)]), [97])
    assert wide[100:].isneginf().all()
    torch.testing.assert_close(wide[:100], sampler.log_law(exact, [97]))
    only = Sampler(SamplingParams(allowed_token_ids=[95]), 100, [0])
    assert only.top(row, [], 1, 4) == []  # nothing of it is allowed
    assert only.log_law(row).isneginf().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_have_no_candidates(temperature: float) -> None:
    for settings in ({}, {"allowed_token_ids": [0, 1]}, {"bad_words": [[7]]}, {"top_k": 2}, {"top_p": 0.5}):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1, **settings), 200, [0])  # type: ignore[arg-type]
        row = torch.randn(200, generator=torch.Generator().manual_seed(4))
        row[7] = math.nan
        assert sampler.top(row, [], 3, 4) == []
        assert sampler.log_law(row).isneginf().all()
        with pytest.raises(BadLogits, match="NaN"):
            sampler.law(row)
        assert sampler.top(torch.full((200,), -math.inf), [], 3, 4) == []
        row[7] = 0.0
        assert sampler.top(row, [], 3, 0) == []
        row[1] = math.inf
        found = sampler.top(row, [], 3, 2)
        assert found[0][0] == 1
        assert all(not math.isnan(key) for _, key in found)


def test_log_law_is_the_law_for_many_rows() -> None:
    row = ROWS["peaked"][:6000]
    for settings in ({}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 5000, "min_p": 0.001}, {"logit_bias": {1: -math.inf}}):
        sampler = Sampler(SamplingParams(seed=3, **settings), 6000, [0])  # type: ignore[arg-type]
        law = sampler.law(row, [4])
        dense = sampler.log_law(row.expand(2, 3, -1), [4])
        assert dense.shape == (2, 3, 6000)
        torch.testing.assert_close(dense[1, 2].double().exp(), law.probs(), rtol=1e-4, atol=1e-7)
    assert sampler.log_law(row.bfloat16()).dtype == torch.float32
    assert sampler.log_law(row.double()).dtype == torch.float64


# -- log-probs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 97, 5003])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
def test_ranked_are_the_chosen_token_and_the_likeliest(size: int, kind: torch.dtype) -> None:
    """A plain sort of a full log-softmax; coarse rows tie a lot."""
    generator = torch.Generator().manual_seed(size)
    for row in (torch.randn(size, generator=generator) * 3, torch.randn(size, generator=generator).round()):
        x = row.to(kind)
        logs = torch.log_softmax(x if kind == torch.float64 else x.float(), 0).tolist()
        order = sorted(range(size), key=lambda at, logs=logs: (-logs[at], at))
        for token in {0, size // 2, order[0], order[-1]}:
            for count in (0, 1, 3, size, -1):
                best = order if count == -1 else order[:count]
                found = ranked(x, token, count)
                assert list(found) == [token, *(one for one in best if one != token)]
                for one, entry in found.items():
                    assert entry.logprob == logs[one]
                    assert entry.rank == 1 + sum(log > logs[one] for log in logs) if size < 1000 else entry.rank >= 1
                    assert entry.decoded_token is None


def test_ranked_speaks_of_certain_and_impossible_tokens() -> None:
    row = torch.tensor([0.0, -math.inf, 1.0])
    assert ranked(row, 1, 1)[1].logprob == -math.inf
    assert ranked(row, 1, 1)[1].rank == 3
    row[0] = math.inf
    found = ranked(row, 0, -1)
    assert [found[token].logprob for token in range(3)] == [0.0, -math.inf, -math.inf]
    assert [found[token].rank for token in range(3)] == [1, 2, 2]
