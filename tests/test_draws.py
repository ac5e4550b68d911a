"""Randomness: against plain integers, against dense sums, and against chance."""

import hashlib
import itertools
import math
import struct

import pytest
import torch
from jaxtyping import config as shape_checks

from paceline.draws import Draws
from paceline.errors import BadRequest
from paceline.laws import Law
from paceline.sampling import Sampler, SamplingParams

V = 151_936


class shape_checks_off:
    """As users run the package: annotations unchecked, so that loops run at full speed."""

    def __enter__(self) -> None:
        shape_checks.update("jaxtyping_disable", True)

    def __exit__(self, *_: object) -> None:
        shape_checks.update("jaxtyping_disable", False)


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
    from paceline import draws

    words = torch.tensor([0, 1, 2**52, 2**53 - 2, 2**53 - 1])
    gumbel = draws._gumbel(words)
    assert gumbel.isfinite().all()
    assert torch.equal(gumbel, gumbel.sort(descending=True).values)
    assert gumbel[0] == pytest.approx(54 * math.log(2), rel=1e-15) or gumbel[0] == pytest.approx(37.43, abs=0.01)
    assert [draws._gumbel_of(int(word)) for word in words] == pytest.approx(gumbel.tolist(), rel=1e-15)


def test_choose_is_the_argmax_of_law_and_noise() -> None:
    """The pruned search finds exactly what scoring every token finds, on laws made to be hard for it."""
    generator = torch.Generator().manual_seed(5)
    flat = torch.randn(V, generator=generator)
    steep = torch.linspace(0, 60, V)
    hard = {
        "flat": flat,
        "equal": torch.zeros(V),
        "peaked": torch.where(torch.rand(V, generator=generator) < 3e-4, flat + 12, flat * 2.5),
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


@pytest.mark.parametrize("size", [1, 5, 24, 25, 63, 64, 200, 5003])
def test_best_are_the_largest_sums_of_law_and_noise(size: int) -> None:
    """A dense float64 sum of everything, sorted; coarse rows and rows with few tokens left tie and run out."""
    generator = torch.Generator().manual_seed(size)
    flat = torch.randn(size, generator=generator)
    rows = {
        "flat": flat,
        "peaked": flat * 8,
        "equal": torch.zeros(size),
        "float64": flat.double() * 3,
        "mostly banned": torch.where(torch.arange(size) % 7 == 3, flat, -math.inf),
        "far": flat * 1e4 - 1e8,
        "beyond float32": torch.full((size,), -1e300, dtype=torch.float64),
    }
    with shape_checks_off():
        for name, x in rows.items():
            for sparse in (False, True):
                ids = torch.arange(size)
                if sparse:
                    ids = torch.randperm(size, generator=generator)[: size // 2 + 1].sort().values
                law = Law(ids if sparse else None, x[ids], size)
                for position in range(4 if size < 1000 else 1):
                    draws = Draws(9)
                    sums = x[ids].double() + draws.noise(position, ids)
                    order = sorted(range(len(ids)), key=lambda at, sums=sums: (-float(sums[at]), at))
                    want = [int(ids[at]) for at in order if sums[at] > -math.inf]
                    for count in (1, 2, 4, 17, size + 3):
                        got = draws.best(law, position, count)
                        assert [token for token, _ in got] == want[:count], (name, sparse, count)
                        for token, score in got[:20]:
                            assert score == pytest.approx(
                                float(sums[(ids == token).nonzero()[0, 0]]), abs=1e-12, rel=1e-13
                            )
                    if want:
                        assert draws.best(law, position, 1)[0][0] == draws.choose(law, position)


def test_best_opens_few_places_of_a_large_row() -> None:
    from paceline.draws import _contenders

    x = torch.randn(V, generator=torch.Generator().manual_seed(8))
    draws = Draws(4)
    for position in range(20):
        for count in (1, 8, 64):
            places = _contenders(Law(None, x, V), draws._keys("noise", position), count)
            assert places.shape[0] <= 2 * count + 32


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
    from paceline import draws

    law = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    assert draws._inverse_cdf(law, 0.0) == 1
    assert draws._inverse_cdf(law, 1 - 2**-53) == 3
    assert draws._inverse_cdf(law.double() * 1e-300, 1 - 2**-53) == 3  # unnormalised


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
