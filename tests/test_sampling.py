"""Settings, laws and randomness: against `transformers`, against plain integers, and against chance."""

import hashlib
import itertools
import math
import pickle
import random
import struct
from dataclasses import replace

import pytest
import torch
from jaxtyping import config as shape_checks
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.errors import BadLogits, BadRequest
from paceline.sampling import Draws, Law, Sampler, SamplingParams

V = 151_936


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'; a number"),
        ({"temperature": True}, "temperature is True; a number"),
        ({"top_p": 0.0}, "top_p is 0.0; a finite number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2; -1 or more"),
        ({"top_k": 2.0}, "top_k is 2.0; a whole number"),
        ({"top_k": True}, "top_k is True; a whole number"),
        ({"min_p": -0.1}, "min_p is -0.1; a finite number of at least 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; a finite number is needed"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; a finite number above 0"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] is nan"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\] is inf; a finite number, or -inf"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias holds '1'; token ids are whole numbers"),
        ({"logit_bias": [1]}, "a mapping from token id"),
        ({"stop_token_ids": "12"}, "a list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"max_tokens": -1}, "max_tokens is -1; 0 or more"),
        ({"max_tokens": 1.0}, "a whole number"),
        ({"seed": 1.5}, "seed is 1.5; a whole number"),
        ({"temprature": 1.0}, "unknown sampling setting 'temprature'; did you mean 'temperature'"),
        ({"max_new_tokens": 5}, "did you mean 'max_tokens'"),
        ({"stop": ["x"]}, "'stop' is not available in this version"),
        ({"n": 2}, "'n' is not available"),
        ({"ignore_eos": True}, "'ignore_eos' is not available"),
    ],
)
def test_impossible_settings_are_refused_in_words(given: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        SamplingParams(**given)  # type: ignore[arg-type]


def test_settings_without_names_are_refused() -> None:
    with pytest.raises(BadRequest, match="without a name"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_settings_at_their_edges_are_taken() -> None:
    params = SamplingParams(
        temperature=0, top_k=-1, top_p=1, min_p=1, logit_bias={3: -math.inf, 4: 1}, max_tokens=0, seed=-1
    )
    assert params.is_greedy
    assert params.seed == 2**64 - 1
    assert params.logit_bias == {3: -math.inf, 4: 1.0}
    assert SamplingParams(seed=2**64 + 5).seed == 5
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=2e-5).is_greedy
    assert SamplingParams(presence_penalty=1e9).presence_penalty == 1e9
    assert pickle.loads(pickle.dumps(params)) == params
    assert replace(params, top_k=5).top_k == 5
    with pytest.raises(BadRequest):
        replace(params, top_p=2.0)


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    for params in (SamplingParams(logit_bias={10: 1.0}), SamplingParams(stop_token_ids=[10])):
        Sampler(params, 11, [0])
        with pytest.raises(BadRequest, match="token id 10; the vocabulary has ids 0 to 9"):
            Sampler(params, 10, [0])
    with pytest.raises(BadRequest, match="the prompt holds token id 10"):
        Sampler(SamplingParams(), 10, [10])
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


def test_log_law_and_rank_serve_drafters() -> None:
    row = ROWS["peaked"][:6000]
    for settings in ({}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 5000, "min_p": 0.001}, {"logit_bias": {1: -math.inf}}):
        sampler = Sampler(SamplingParams(seed=3, **settings), 6000, [0])  # type: ignore[arg-type]
        law = sampler.law(row, [4])
        dense = sampler.log_law(row.expand(2, 3, -1), [4])
        assert dense.shape == (2, 3, 6000)
        torch.testing.assert_close(dense[1, 2].double().exp(), law.probs(), rtol=1e-4, atol=1e-7)
        for position in range(20):
            keys = sampler.rank(row.expand(2, -1), [4], position)[1]
            assert int(keys.argmax()) == sampler.draws.choose(law, position)
            assert keys.isfinite().all()
            kept = law.probs() > 0
            if not kept.all():
                assert keys[kept].min() > keys[~kept].max()
    greedy = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={5: -math.inf}), 6000, [0])
    keys = greedy.rank(row[None], [], 3)[0]
    assert keys.isfinite().all()
    assert keys.argmin() == 5
    assert torch.equal(keys[10:], row[10:])


def test_a_narrower_draft_vocabulary_is_ranked_with_the_same_noise_and_settings() -> None:
    sampler = Sampler(SamplingParams(seed=3, repetition_penalty=1.5, logit_bias={99: 5.0}), 100, [3, 98])
    row = torch.randn(90)
    assert sampler.rank(row[None], [97], 4).shape == (1, 90)
    assert sampler.log_law(row[None], [97]).exp().sum() == pytest.approx(1, abs=1e-5)
    wide = torch.cat([row, torch.full((10,), -math.inf)])
    assert int(sampler.rank(row[None], [], 4).argmax()) == sampler.draws.choose(sampler.law(wide), 4)


# -- noise -------------------------------------------------------------------------------------------------------------

M32 = 2**32 - 1


def integer_word(seed: int, sample: int, position: int, token: int) -> int:
    """The 53-bit word of a token in plain integers, written from the description and not from the code."""
    digest = hashlib.blake2b(struct.pack("<QQqq", seed, sample, position, 0), digest_size=24, person=b"noise").digest()
    keys = struct.unpack("<6I", digest)
    x = token
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x ^= x >> shift
        x = x * factor % 2**32
    x ^= x >> 14

    def fold(number: int, shift: int) -> int:
        signed = number - 2**32 if number >= 2**31 else number
        return (signed ^ (signed >> shift)) & M32

    parts = []
    for a, b, c in (keys[:3], keys[3:]):
        part = fold((x + a) % 2**32, 16)
        part = fold((part * 0x21F0AAAD + b) % 2**32, 15)
        part = fold((part * 0xD35A2D97 + c) % 2**32, 15)
        assert part < 2**31
        parts.append(part)
    return (parts[0] * 2**31 + parts[1]) >> 9


KNOWN_WORDS = {  # (seed, sample, position, token id): a change here changes every seeded text
    (0, 0, 0, 0): 305_221_584_072_338,
    (0, 0, 0, 1): 2_568_708_835_736_841,
    (7, 0, 12, 151_935): 4_173_889_845_214_346,
    (2**64 - 1, 3, 100_000, 42): 5_057_520_497_655_706,
}


def test_noise_words_are_known() -> None:
    """Fixed numbers, and an independent implementation; whatever ids are asked, in any order, at any V."""
    for (seed, sample, position, token), word in KNOWN_WORDS.items():
        assert integer_word(seed, sample, position, token) == word
        assert Draws(seed, sample).noise_words(position, torch.tensor([token])).tolist() == [word]
    ids = torch.tensor([V - 1, 0, 1, 2, 77, 31_999, 128_000, 2**31 - 1])
    for seed, sample, position in ((0, 0, 0), (7, 0, 12), (2**64 - 1, 3, 100_000)):
        draws = Draws(seed, sample)
        want = [integer_word(seed, sample, position, token) for token in ids.tolist()]
        assert draws.noise_words(position, ids).tolist() == want
        whole = draws.noise_words(position, vocab_size=V)
        assert whole[ids[:-1]].tolist() == want[:-1]
        assert torch.equal(draws.noise_words(position, vocab_size=1003), whole[:1003])
        assert int(whole.min()) >= 0
        assert int(whole.max()) < 2**53
        gumbel = draws.noise(position, ids)
        for word, g in zip(want, gumbel.tolist(), strict=True):
            assert g == pytest.approx(-math.log(-math.log1p(-(word + 0.5) / 2**53)), rel=1e-14)


def test_every_word_makes_a_finite_gumbel() -> None:
    from paceline import sampling

    words = torch.tensor([0, 1, 2**52, 2**53 - 2, 2**53 - 1])
    gumbel = sampling._gumbel(words)
    assert gumbel.isfinite().all()
    assert torch.equal(gumbel, gumbel.sort(descending=True).values)
    assert gumbel[0] == pytest.approx(54 * math.log(2), rel=1e-15) or gumbel[0] == pytest.approx(37.43, abs=0.01)
    assert [sampling._gumbel_of(int(word)) for word in words] == pytest.approx(gumbel.tolist(), rel=1e-15)


def test_choose_is_the_argmax_of_law_and_noise() -> None:
    """The pruned search finds exactly what scoring every token finds, on laws made to be hard for it."""
    generator = torch.Generator().manual_seed(5)
    flat = torch.randn(V, generator=generator)
    steep = torch.linspace(0, 60, V)
    hard = {
        "flat": flat,
        "equal": torch.zeros(V),
        "peaked": ROWS["peaked"],
        "steep": steep,
        "far from zero": flat + 3e4,
        "far below": flat - 3e4,
        "mostly banned": torch.where(torch.arange(V) % 5000 == 3, flat, -math.inf),
        "one token": torch.where(torch.arange(V) == 7777, flat, -math.inf),
        "float64": flat.double() * 1e-9,
        "odd size": flat[: V - 37],
        "small": flat[:30],
        "middle": flat[:3000],
    }
    with shape_checks_off():
        for trial, (name, x) in enumerate(hard.items()):
            for position in range(6):
                draws = Draws(trial)
                noise = draws.noise(position, vocab_size=x.shape[0])
                want = int((x.double() + noise).argmax())
                assert draws.choose(Law(None, x, x.shape[0]), position) == want, name
                some = torch.randperm(x.shape[0], generator=generator)[: x.shape[0] // 3 + 1].sort().values
                want = int(some[(x[some].double() + noise[some]).argmax()])
                if not x[some].isneginf().all():
                    assert draws.choose(Law(some, x[some], x.shape[0]), position) == want, name
        assert Draws(1).choose(Law(None, torch.full((5000,), 1e30), 5000), 0) == 0  # all equal: the lowest id
        assert Draws(1).choose(Law(torch.tensor([9]), torch.zeros(1), 5000), 0) == 9


def test_noise_is_fair_to_every_token_and_independent_of_its_neighbours() -> None:
    """Chi-squares of 1e5 and more draws at fixed seeds; each bound is passed by chance once in about 1e6 trials.

    Rows of noise are cut into groups of 16 neighbouring ids, each one draw from a law over 16 tokens.
    """
    p = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.05, 0.05, 0.04, 0.04, 0.03, 0.03, 0.02, 0.02, 0.01, 0.005, 0.003, 0.002])
    law = p.double().log()
    with shape_checks_off():
        for seed in (0, 1, 2**63):
            groups = torch.stack([Draws(seed).noise(at, vocab_size=16 * 5000).view(-1, 16) for at in range(40)])
            chosen = (groups + law).argmax(-1)
            counts = torch.bincount(chosen.flatten(), minlength=16).double()
            expected = p.double() / p.double().sum() * counts.sum()
            assert float(((counts - expected) ** 2 / expected).sum()) < 60  # 15 degrees of freedom, 200,000 draws
            # the same group at the next position, and the next group at the same position: 5 x 5 tables, 16 degrees
            merged = chosen.clamp(max=4)
            for first, second in ((merged[:-1], merged[1:]), (merged[:, :-1], merged[:, 1:])):
                assert table_chi_square(first, second, 5) < 65
            words = torch.stack([Draws(seed).noise_words(at, vocab_size=4096) for at in range(100)])
            for bit in range(53):
                ones = int((words >> bit & 1).sum())
                assert abs(ones - words.numel() / 2) < 5 * math.sqrt(words.numel()) / 2
        close = [
            torch.cat([Draws(seed, sample).noise_words(at, vocab_size=4096) >> 50 for at in range(40)])
            for seed, sample in ((0, 0), (1, 0), (0, 1), (2**63, 0))
        ]
        for first, second in itertools.combinations(close, 2):
            assert table_chi_square(first, second, 8) < 120  # 49 degrees


def table_chi_square(first: torch.Tensor, second: torch.Tensor, size: int) -> float:
    """Chi-square of independence."""
    table = torch.bincount((first * size + second).flatten(), minlength=size * size).double().view(size, size)
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


def test_sampled_tokens_follow_the_law_across_positions_and_seeds() -> None:
    """30,000 calls of the sampler itself, over positions and over seeds."""
    p = torch.tensor([0.45, 0.3, 0.15, 0.1], dtype=torch.float64)
    law = Law(None, p.log(), 4)
    with shape_checks_off():
        by_position = torch.tensor([Draws(5).choose(law, at) for at in range(15_000)])
        by_seed = torch.tensor([Draws(seed).choose(law, 5) for seed in range(15_000)])
    for tokens in (by_position, by_seed):
        counts = torch.bincount(tokens, minlength=4).double()
        assert float(((counts - p * 15_000) ** 2 / (p * 15_000)).sum()) < 31  # 3 degrees, 1e-6
        assert table_chi_square(tokens[:-1], tokens[1:], 4) < 47  # 9 degrees, 1e-6 and below


def test_rough_noise_is_the_noise() -> None:
    exact, rough = Draws(3).noise(9, vocab_size=V), Draws(3).rough_noise(9, V)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.double(), exact, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(rough[exact > 0].double(), exact[exact > 0], rtol=1e-5, atol=1e-5)


def test_noise_needs_ids_or_a_size() -> None:
    with pytest.raises(BadRequest, match="neither token ids nor vocab_size"):
        Draws(1).noise(0)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_streams_repeat_and_do_not_touch_each_other() -> None:
    law = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def story(drafts: int, picks: int) -> list[object]:
        draws = Draws(9)
        told: list[object] = []
        for _ in range(5):
            for _ in range(drafts):
                draws.draft(law)
                draws.draft_noise(4)
            for _ in range(picks):
                draws.pick(law)
            told += [draws.accept(0.5) for _ in range(20)]
            draws.next_pass()
        return told

    assert story(0, 0) == story(3, 2)
    first, again, other = Draws(9), Draws(9), Draws(10)
    for draws in (first, again, other):
        draws.noise(3, vocab_size=10)
    values = [[draws.draft_noise(50).tolist() for _ in range(2)] for draws in (first, again, other)]
    assert values[0] == values[1] != values[2]
    assert values[0][0] != values[0][1] != first.noise(0, vocab_size=50).tolist()
    assert Draws(1, 0).noise(0, vocab_size=5).tolist() != Draws(1, 1).noise(0, vocab_size=5).tolist()


def test_accept_pick_and_draft_have_their_probabilities() -> None:
    law = torch.tensor([0.1, 0.0, 0.6, 0.3, 0.0])
    draws = Draws(2)
    with shape_checks_off():
        for draw in (draws.pick, draws.draft):
            counts = torch.bincount(torch.tensor([draw(law) for _ in range(8000)]), minlength=5).double()
            assert counts[1] == counts[4] == 0
            expected = law[[0, 2, 3]].double() * 8000
            assert float(((counts[[0, 2, 3]] - expected) ** 2 / expected).sum()) < 28  # 2 degrees, 1e-6
        kept = sum(draws.accept(0.3) for _ in range(8000))
        assert abs(kept - 2400) < 5 * math.sqrt(8000 * 0.21)
        assert all(draws.accept(1.0) for _ in range(1000))
        assert not any(draws.accept(0.0) for _ in range(1000))
        orders = [tuple(draws.draft_noise(3).add(law[[0, 2, 3]].log()).topk(2).indices.tolist()) for _ in range(3000)]
        q = [0.1, 0.6, 0.3]
        for a, b in itertools.permutations(range(3), 2):  # without replacement
            want = q[a] * q[b] / (1 - q[a])
            assert orders.count((a, b)) / 3000 == pytest.approx(want, abs=5 * math.sqrt(want / 3000))


def test_pick_stays_inside_the_law_at_both_ends() -> None:
    from paceline import sampling

    law = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    assert sampling._inverse_cdf(law, 0.0) == 1
    assert sampling._inverse_cdf(law, 1 - 2**-53) == 3
    assert sampling._inverse_cdf(law.double() * 1e-300, 1 - 2**-53) == 3  # unnormalised


def test_vllm_6038() -> None:
    """Seeds: the same one repeats, others differ, none is fresh each time, and the global generator is left alone."""
    state = torch.get_rng_state()

    def text(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed), 1000, [0])
        row = torch.zeros(1000)
        return [sampler.draws.choose(sampler.law(row), at) for at in range(8)]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(None) != text(None)
    assert torch.equal(state, torch.get_rng_state())
