"""Tests of counts: against printed tables, closed forms, every outcome of small experiments, and chance."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from jaxtyping import config as shape_checks

from paceline.certify.statistics import (
    Cells,
    EProcess,
    average,
    chi2_isf,
    chi2_power,
    chi2_sf,
    combine,
    count_test,
    g_test,
    pool,
    smallest_detectable_tv,
    wilson,
)
from paceline.errors import BadRequest

SKEWED = {"a": 0.4, "b": 0.2, "c": 0.12, "d": 0.08, "e": 0.05, "f": 0.03, "g": 0.01}
"""Seven listed outcomes; 0.11 is left for all others."""
EVEN = dict.fromkeys(range(16), 1 / 16)


@pytest.fixture(autouse=True)
def _full_speed() -> Iterator[None]:
    """As users run it: thousands of experiments, with shapes unchecked."""
    shape_checks.update("jaxtyping_disable", True)
    yield
    shape_checks.update("jaxtyping_disable", False)


def draws(probs: dict[str, float], n: int, rng: random.Random) -> list[str]:
    """Draws of a law, where what is left falls on two outcomes that the law does not list."""
    left = (1 - sum(probs.values())) / 2
    return rng.choices([*probs, "y", "z"], [*probs.values(), left, left], k=n)


def noise(rate: float, trials: int) -> float:
    """How far a share of so many trials lies from its rate at most, but for 1 in 15,000 cases."""
    return 4 * math.sqrt(rate * (1 - rate) / trials)


# -- the chi-square law ------------------------------------------------------------------------------------------------


def exact_tail(x: Fraction, df: int) -> Decimal:
    """P(chi-square > x) in 60 digits: a Poisson sum for even df; for odd ones half-integer steps from erfc."""
    with localcontext() as context:
        context.prec = 60
        y = Decimal(x.numerator) / Decimal(x.denominator) / 2
        term = (-y).exp()
        if df % 2 == 0:
            total = Decimal(0)
            for j in range(df // 2):
                total += term
                term *= y / (j + 1)
            return total
        total = Decimal(math.erfc(math.sqrt(float(y))))
        term *= 2 * (y / Decimal("3.14159265358979323846264338327950288419716939937510582097494")).sqrt()
        for j in range(df // 2):
            total += term
            term *= y / (Decimal(j) + Decimal("1.5"))
        return total


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 12, 31, 64, 255, 256, 1023, 4096, 31_998])
def test_chi2_sf_has_nine_digits_near_the_mean_and_far_out(df: int) -> None:
    for z in (-3, -1, 0, 1, 2, 4, 8, 20):
        x = Fraction(max(0.01, df + z * math.sqrt(2 * df))).limit_denominator(1000)
        exact = float(exact_tail(x, df))
        if exact > 1e-300:
            assert chi2_sf(float(x), df) == pytest.approx(exact, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("alpha", "df", "printed"),
    [
        (0.05, 1, 3.841), (0.05, 2, 5.991), (0.05, 3, 7.815), (0.05, 10, 18.307), (0.05, 30, 43.773),
        (0.05, 100, 124.342), (0.01, 1, 6.635), (0.01, 5, 15.086), (0.01, 50, 76.154), (0.001, 1, 10.828),
        (0.001, 2, 13.816), (0.001, 10, 29.588), (0.001, 100, 149.449), (0.95, 10, 3.940), (0.995, 20, 7.434),
    ],
)  # fmt: skip
def test_chi2_isf_is_the_printed_table(alpha: float, df: int, printed: float) -> None:
    assert chi2_isf(alpha, df) == pytest.approx(printed, abs=5.1e-4)
    assert chi2_sf(chi2_isf(alpha, df), df) == pytest.approx(alpha, rel=1e-9)


def test_chi2_at_its_ends() -> None:
    assert chi2_sf(0.0, 5) == chi2_sf(-1.0, 5) == chi2_sf(0.0, 0) == 1.0
    assert chi2_sf(math.inf, 5) == chi2_sf(1.0, 0) == chi2_sf(1e300, 3) == 0.0
    assert chi2_isf(0.01, 0) == 0.0
    for alpha in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(BadRequest, match="alpha"):
            chi2_isf(alpha, 3)


def above(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2


def density(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("noncentrality", [0.01, 0.5, 3.0, 20.0, 150.0])
@pytest.mark.parametrize("alpha", [0.2, 0.05, 1e-3, 1e-6])
def test_chi2_power_is_the_closed_form(noncentrality: float, alpha: float) -> None:
    """With one degree of freedom (z + s)^2; with three the radius of a shifted normal point in space."""
    s = math.sqrt(noncentrality)
    c = math.sqrt(chi2_isf(alpha, 1))
    assert chi2_power(noncentrality, 1, alpha) == pytest.approx(above(c - s) + above(c + s), rel=1e-9)
    c = math.sqrt(chi2_isf(alpha, 3))
    exact = above(c - s) + above(c + s) + (density(c - s) - density(c + s)) / s
    assert chi2_power(noncentrality, 3, alpha) == pytest.approx(exact, rel=1e-9)


def test_chi2_power_without_a_difference_is_alpha_and_rises_with_it() -> None:
    for df in (1, 2, 15, 500):
        assert chi2_power(0.0, df, 0.01) == pytest.approx(0.01, rel=1e-9)
        assert chi2_power(1e-9, df, 0.01) == pytest.approx(0.01, rel=1e-6)
        rising = [chi2_power(value, df, 0.01) for value in (0.0, 1.0, 5.0, 30.0, 200.0, 1e5)]
        assert rising == sorted(rising)
    assert chi2_power(5.0, 0, 0.01) == 0.0
    assert chi2_power(1e5, 500, 0.01) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("df", "printed"), [(1, 10.507), (2, 12.654), (3, 14.171), (4, 15.405), (5, 16.469), (6, 17.419), (10, 20.532)]
)
def test_smallest_detectable_tv_is_the_printed_noncentrality(df: int, printed: float) -> None:
    """Of power 0.9 at 0.05 (Haynam, Govindarajulu and Leone, tables of the cumulative noncentral chi-square)."""
    assert 4 * 10**6 * smallest_detectable_tv(10**6, df, 0.05) ** 2 == pytest.approx(printed, abs=1e-3)


@pytest.mark.parametrize(
    ("num_cells", "draws_needed"),
    [
        (2, [522, 2.1e3, 13e3, 52e3, 209e3, 5.2e6]),
        (16, [989, 4.0e3, 25e3, 99e3, 396e3, 9.9e6]),
        (64, [1.6e3, 6.5e3, 41e3, 162e3, 650e3, 16e6]),
        (256, [2.9e3, 11e3, 72e3, 287e3, 1.15e6, 29e6]),
        (1024, [5.4e3, 21e3, 134e3, 535e3, 2.1e6, 54e6]),
        (32_000, [28e3, 112e3, 702e3, 2.8e6, 11e6, 281e6]),
    ],
)
def test_smallest_detectable_tv_is_the_table_of_sample_sizes(num_cells: int, draws_needed: list[float]) -> None:
    """Draws that show a total variation in nine of ten runs, at one false alarm in a thousand."""
    for tv, n in zip((0.10, 0.05, 0.02, 0.01, 0.005, 0.001), draws_needed, strict=True):
        assert smallest_detectable_tv(int(n), num_cells - 1, 1e-3) == pytest.approx(tv, rel=0.03)


def test_smallest_detectable_tv_knows_when_nothing_is_sure() -> None:
    assert smallest_detectable_tv(0, 3, 0.01) == smallest_detectable_tv(3, 3, 0.01) == 1.0
    assert smallest_detectable_tv(10**6, 0, 0.01) == 1.0
    assert smallest_detectable_tv(10**4, 5, 0.01, power=0.5) < smallest_detectable_tv(10**4, 5, 0.01, power=0.99)
    for power in (0.005, 1.0):
        with pytest.raises(BadRequest, match="power"):
            smallest_detectable_tv(100, 3, 0.01, power=power)


# -- cells -------------------------------------------------------------------------------------------------------------


def test_pool_by_hand() -> None:
    """100 draws: what is expected less than 5 times goes together, and takes "f" in to be expected 5 times."""
    probs = {"a": 0.5, "b": 0.25, "f": 0.15, "g": 0.03, "h": 0.01, "i": 0.005}
    counts = {"a": 48, "b": 26, "f": 14, "g": 3, "h": 2, "?": 7}
    found = pool(counts, probs)
    assert found.impossible == 0
    assert sorted(zip(found.counts, found.probs)) == [
        (12, pytest.approx(0.1)),  # g, h, i and the 0.055 of all others: expected 4.5 and then 5.5
        (14, pytest.approx(0.15)),
        (26, pytest.approx(0.25)),
        (48, pytest.approx(0.5)),
    ]
    few = pool({"a": 60, "b": 40}, {"a": 0.9, "b": 0.07, "c": 0.03}, least=4.0)
    assert sorted(few.counts) == [40, 60]
    assert pool({"a": 6, "b": 4}, {"a": 0.9, "b": 0.07, "c": 0.03}).counts == [10]
    assert len(pool(counts, probs, least=0.0).counts) == 7


def test_pool_reports_impossible_outcomes_apart() -> None:
    listed = pool({"a": 50, "b": 47, "never": 3}, {"a": 0.5, "b": 0.5, "never": 0.0})
    assert (sorted(listed.counts), listed.impossible) == ([47, 50], 3)
    unlisted = pool({"a": 50, "b": 48, "never": 2}, {"a": 0.3 - 0.1, "b": 0.8 + 1e-14})
    assert (sorted(unlisted.counts), unlisted.impossible) == ([48, 50], 2)
    assert pool({"a": 99, "rare": 1}, {"a": 1 - 1e-9}).impossible == 0


def test_cells_depend_on_the_probabilities_alone() -> None:
    cells = Cells.make(SKEWED, 0.05)
    assert sum(cells.probs) == pytest.approx(1.0, abs=1e-15)
    assert cells.find("g") == cells.find("f") == cells.find("e")  # 0.01 + 0.03 is not 0.05 yet
    assert len({cells.find(key) for key in "abcd?"}) == len(cells.probs) - 1 == 5
    assert cells.find("?") == cells.find(None) == cells.rest
    assert Cells.make({"a": 0.999, "b": 0.001}, 0.01).probs == [pytest.approx(1.0)]


def test_unusable_probabilities_and_counts_are_refused() -> None:
    for bad in ({"a": 0.7, "b": 0.4}, {"a": -0.1}, {"a": math.nan}, {"a": 1.5}):
        with pytest.raises(BadRequest, match="probabilit"):
            g_test({"a": 1}, bad)
    with pytest.raises(BadRequest, match="seen -1 times"):
        g_test({"a": -1}, {"a": 0.5})
    assert g_test({"a": 500, "b": 500}, {"a": 0.5, "b": 0.500003}).p_value > 0.9  # as float32 sums


# -- the G-test --------------------------------------------------------------------------------------------------------


def test_g_test_by_hand() -> None:
    """60 heads and 40 tails: G = 2 (60 ln 1.2 + 40 ln 0.8), and Williams' factor 1 + (4 - 1) / 600."""
    found = g_test({"heads": 60, "tails": 40}, {"heads": 0.5})
    assert found.statistic == pytest.approx(4.027_103 / 1.005, abs=1e-6)
    assert found.p_value == pytest.approx(math.erfc(math.sqrt(found.statistic / 2)), rel=1e-9)
    assert (found.df, found.n, found.impossible) == (1, 100, 0)
    assert found.plug_in_tv == pytest.approx(0.1)
    # E|X - 50| of 100 coins is 50 C(100, 50) / 2^100
    assert found.tv_noise_floor == pytest.approx(50 * math.comb(100, 50) / 2**100 / 100, rel=1e-12)


def test_g_test_at_its_ends() -> None:
    none = g_test({}, {"a": 0.5})
    assert (none.statistic, none.df, none.p_value, none.n) == (0.0, 0, 1.0, 0)
    certain = g_test({"a": 7}, {"a": 1.0})
    assert (certain.df, certain.p_value, certain.plug_in_tv) == (0, 1.0, 0.0)
    for share in (0.7, 0.9999, 1 - 1e-9, 1 - 1e-16):  # one cell in the end, whose probabilities may not quite sum to 1
        assert g_test({"a": 9}, {"a": share, "b": (1 - share) / 3}).p_value == 1.0
    exact = g_test({"a": 50, "b": 30, "c": 20}, {"a": 0.5, "b": 0.3, "c": 0.2})
    assert (exact.df, exact.statistic, exact.p_value) == (2, pytest.approx(0.0, abs=1e-12), pytest.approx(1.0))
    bug = g_test({"a": 99, "never": 1}, {"a": 0.5, "b": 0.5})
    assert (bug.p_value, bug.impossible, bug.statistic, bug.n) == (0.0, 1, math.inf, 100)
    assert bug.plug_in_tv == pytest.approx(0.5)


def outcomes(n: int, probs: Sequence[float]) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Every count of three outcomes in n draws, with its multinomial probability."""
    for a in range(n + 1):
        for b in range(n + 1 - a):
            c = n - a - b
            ways = math.comb(n, a) * math.comb(n - a, b)
            yield (a, b, c), ways * probs[0] ** a * probs[1] ** b * probs[2] ** c


def test_false_alarms_and_noise_floor_counted_over_every_outcome() -> None:
    """90 draws of three outcomes, one expected 5 times: the exact size of the test, and the exact mean distance."""
    probs = [0.6, 1 - 0.6 - 0.056, 0.056]
    listed = {"a": probs[0], "b": probs[1]}
    sizes, gap = Counter[float](), 0.0
    for (a, b, c), weight in outcomes(90, probs):
        found = g_test({"a": a, "b": b, "?": c}, listed)
        assert found.df == 2
        gap += weight * found.plug_in_tv
        for alpha in (0.1, 0.05, 0.01, 1e-3, 1e-4):
            sizes[alpha] += weight * (found.p_value <= alpha)
    assert found.tv_noise_floor == pytest.approx(gap, rel=1e-9)
    for alpha, size in sizes.items():
        assert size <= 1.6 * alpha
    assert sizes[0.05] == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize(("n", "floor"), [(10**4, 0.064), (10**5, 0.020), (10**6, 0.0064)])
def test_noise_floor_of_256_equal_outcomes(n: int, floor: float) -> None:
    """sqrt(k / (2 pi n)) for many draws."""
    found = g_test({0: n}, dict.fromkeys(range(256), 1 / 256))
    assert found.tv_noise_floor == pytest.approx(floor, rel=0.01)
    assert found.tv_noise_floor == pytest.approx(math.sqrt(256 / (2 * math.pi * n)), rel=0.005)


def test_false_alarms_of_several_contexts_at_the_rate_stated() -> None:
    """Three contexts of different laws and sizes, one test: 3,000 null runs."""
    rng = random.Random(1)
    laws = [(SKEWED, 400), ({"a": 0.9, "b": 0.05}, 200), (dict.fromkeys("abcdefghij", 0.03), 300)]
    tests = [combine([g_test(Counter(draws(probs, n, rng)), probs) for probs, n in laws]) for _ in range(3000)]
    assert {test.df for test in tests} == {6 + 2 + 10}  # "f" and "g" share a cell
    assert {test.n for test in tests} == {900}
    for alpha in (0.5, 0.1, 0.02):
        rate = sum(test.p_value <= alpha for test in tests) / len(tests)
        assert abs(rate - alpha) <= noise(alpha, len(tests)) + 0.05 * alpha
    seen, foreseen = (sum(values) / len(tests) for values in zip(*((t.plug_in_tv, t.tv_noise_floor) for t in tests)))
    assert seen == pytest.approx(foreseen, rel=0.02)


def test_combine_adds_and_one_impossible_outcome_is_enough() -> None:
    fair = g_test({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5})
    both = combine([fair, fair])
    assert both.statistic == pytest.approx(2 * fair.statistic)
    assert both.p_value == pytest.approx(math.exp(-both.statistic / 2), rel=1e-9)  # two degrees of freedom
    assert (both.df, both.n, both.plug_in_tv) == (2, 200, pytest.approx(0.1))
    bug = combine([fair, g_test({"never": 1}, {"a": 1.0})])
    assert (bug.p_value, bug.impossible, bug.statistic) == (0.0, 1, math.inf)
    assert combine([]).p_value == 1.0


def test_power_is_what_smallest_detectable_tv_promises() -> None:
    """Equal outcomes, half of them a little likelier than they should be: where the bound is an equality."""
    n, alpha, runs = 4000, 1e-3, 600
    tv = smallest_detectable_tv(n, 15, alpha)
    wrong = [(1 + 2 * tv * (-1) ** token) / 16 for token in EVEN]
    assert sum(abs(q - 1 / 16) for q in wrong) / 2 == pytest.approx(tv)
    rng = random.Random(2)
    found = sum(g_test(Counter(rng.choices(range(16), wrong, k=n)), EVEN).p_value <= alpha for _ in range(runs))
    assert found / runs == pytest.approx(0.9, abs=noise(0.9, runs))


def test_power_is_no_less_where_the_difference_lies_on_rare_outcomes() -> None:
    n, alpha, runs = 4000, 1e-3, 400
    tv = smallest_detectable_tv(n, 7, alpha)
    wrong = SKEWED | {"a": SKEWED["a"] - tv, "e": SKEWED["e"] + tv}
    rng = random.Random(3)
    found = sum(g_test(Counter(draws(wrong, n, rng)), SKEWED).p_value <= alpha for _ in range(runs))
    assert found / runs >= 0.9


# -- the e-process -----------------------------------------------------------------------------------------------------


def test_e_value_is_the_closed_form_of_its_bets() -> None:
    """The product of the guesses has a closed form in the counts: Dirichlet-multinomial with parameters 1/2."""
    probs = {"a": 0.5, "b": 0.3}
    process = EProcess(probs)
    for outcome in "aab?bbaaaa?z":
        process.update(outcome)
    counts, shares = (6, 3, 3), (0.5, 0.3, 0.2)
    log_guess = math.lgamma(1.5) - math.lgamma(12 + 1.5)
    log_guess += sum(math.lgamma(count + 0.5) - math.lgamma(0.5) for count in counts)
    log_p = sum(count * math.log(share) for count, share in zip(counts, shares))
    assert process.log_e == pytest.approx(log_guess - log_p, rel=1e-12)
    assert process.e_value == pytest.approx(math.exp(log_guess - log_p), rel=1e-12)


def test_mean_is_one_and_ville_holds_over_every_sequence() -> None:
    """All 3^8 texts of eight draws, each with its probability: the mean of E, and how often E was ever 1/alpha."""
    probs = {"a": 0.62, "b": 0.3, "c": 0.08}
    mean, crossed = 0.0, Counter[float]()
    for text in itertools.product(probs, repeat=8):
        process = EProcess(probs)
        for outcome in text:
            process.update(outcome)
        weight = math.prod(probs[outcome] for outcome in text)
        mean += weight * process.e_value
        for alpha in (0.5, 0.2, 0.05, 0.01):
            crossed[alpha] += weight * process.rejects(alpha)
    assert mean == pytest.approx(1.0, abs=1e-12)
    assert all(0 < rate <= alpha for alpha, rate in crossed.items())


def test_long_null_runs_cross_at_most_alpha() -> None:
    """Looked at after each of 400 draws, in 1,500 runs, over two contexts one after the other."""
    rng = random.Random(4)
    runs, crossed = 1500, Counter[float]()
    coin = {"a": 0.7}
    for _ in range(runs):
        process = EProcess(coin)
        for outcome in draws(coin, 200, rng):
            process.update(outcome)
        process = EProcess(SKEWED, after=process)
        for outcome in draws(SKEWED, 200, rng):
            process.update(outcome)
        for alpha in (0.5, 0.1, 0.05):
            crossed[alpha] += process.rejects(alpha)
    for alpha, count in crossed.items():
        assert 0 < count / runs <= alpha + noise(alpha, runs)


def test_a_wrong_law_is_found_in_the_draws_foreseen() -> None:
    """16 outcomes, total variation 0.05: log E grows by KL a draw, less 15/2 ln n, and 1/alpha is reached by 16,000."""
    wrong = [(1 + 0.1 * (-1) ** token) / 16 for token in EVEN]
    divergence = sum(q * math.log(16 * q) for q in wrong)
    assert divergence == pytest.approx(2 * 0.05**2, rel=0.01)
    rng = random.Random(5)
    found, final = 0, 0.0
    for _ in range(20):
        process = EProcess(EVEN)
        for outcome in rng.choices(range(16), wrong, k=16_000):
            process.update(outcome)
        found += process.rejects(1e-3)
        final += process.log_e / 20
    assert found >= 18
    # KT's regret: (k-1)/2 ln(n/2pi) + ln(Gamma(1/2)^k / Gamma(k/2)) + (k-1)/2, whose last term is the chi-square's mean
    cost = 7.5 * math.log(16_000 / (2 * math.pi)) + 8 * math.log(math.pi) - math.lgamma(8) - 7.5
    assert final == pytest.approx(16_000 * divergence - cost, abs=6.0)


def test_an_impossible_outcome_settles_it_for_ever() -> None:
    for probs in ({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5, "never": 0.0}):
        process = EProcess(probs)
        assert not process.rejects(0.999)
        process.update("a")
        assert process.update("never") == math.inf
        process.update("b")
        assert process.e_value == process.max_e_value == math.inf
        assert process.rejects(1e-300)


def test_a_rejection_stays_when_e_falls_again() -> None:
    process = EProcess({"a": 0.5})
    for outcome in "a" * 12 + "b" * 14:
        process.update(outcome)
    assert process.e_value < 1.0
    assert process.max_e_value > 100
    assert process.rejects(0.01)
    assert EProcess({"c": 0.1}, after=process).rejects(0.01)
    process.log_e = 800.0
    assert process.e_value == math.inf  # more than a float holds


def test_rare_outcomes_share_a_cell_fixed_beforehand() -> None:
    probs = {"a": 0.6, "b": 0.394} | dict.fromkeys("cde", 0.001)
    process = EProcess(probs)
    for outcome in "cde?":
        process.update(outcome)
    same = EProcess({"a": 0.6, "b": 0.394})
    for _ in range(4):
        same.update(None)
    assert process.log_e == pytest.approx(same.log_e, rel=1e-9)
    assert len(EProcess(probs, rare=0.0).cells.probs) == 6


def test_average_is_the_mean_of_e_values() -> None:
    assert average([math.log(4), math.log(1), math.log(1)]) == pytest.approx(math.log(2))
    assert average([2000.0, 0.0]) == pytest.approx(2000 - math.log(2))
    assert average([math.inf, 0.0]) == math.inf
    assert average([-math.inf, -math.inf]) == -math.inf


# -- counts of successes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_the_printed_interval(successes: int, n: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    assert wilson(successes, n, 0.05) == pytest.approx((low, high), abs=5.1e-5)
    mirrored = wilson(n - successes, n, 0.05)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5.1e-5)


def test_wilson_at_its_ends() -> None:
    assert wilson(0, 0, 0.05) == (0.0, 1.0)
    assert wilson(20, 20, 0.05)[1] == 1.0
    assert wilson(0, 20, 0.05)[0] == 0.0
    narrow, wide = wilson(30, 100, 0.5), wilson(30, 100, 1e-6)
    assert wide[0] < narrow[0] < 0.3 < narrow[1] < wide[1]
    with pytest.raises(BadRequest, match="21 successes of 20"):
        wilson(21, 20, 0.05)


def test_count_test_is_r_where_all_rates_are_equal() -> None:
    """`binom.test(682, 925, p = 0.75)` in R's manual, and 51 sixes in 235 throws."""
    assert count_test(682, [0.75] * 925) == pytest.approx(0.3825, abs=5e-5)
    assert count_test(51, [1 / 6] * 235) == pytest.approx(0.0437, abs=1e-4)
    assert count_test(5, [0.5] * 10) == pytest.approx(1.0)
    assert count_test(0, [0.5] * 10) == pytest.approx(2 / 1024, rel=1e-12)  # its mirror is equally likely


def test_count_test_is_the_enumeration_of_every_success() -> None:
    rng = random.Random(6)
    for trial in range(6):
        rates = [Fraction(rng.randrange(0 if trial % 2 else 1, 20), 20) for _ in range(9)]
        law = Counter[int]()
        for text in itertools.product((0, 1), repeat=len(rates)):
            law[sum(text)] += math.prod((rate if hit else 1 - rate) for hit, rate in zip(text, rates, strict=True))
        for seen in range(len(rates) + 1):
            want = sum(weight for weight in law.values() if weight <= law[seen]) if law[seen] else 0
            assert count_test(seen, [float(rate) for rate in rates]) == pytest.approx(float(want), rel=1e-9, abs=0)


def test_count_test_of_thousands_is_the_inverted_characteristic_function() -> None:
    """The law as a Fourier transform of the product of (1 - p + p e^it) over the trials (Hong 2013)."""
    rng = random.Random(7)
    rates = torch.tensor([rng.random() for _ in range(2000)], dtype=torch.float64)
    turns = torch.exp(2j * math.pi * torch.arange(2001, dtype=torch.float64) / 2001)
    product = torch.ones_like(turns)
    for rate in rates:
        product *= 1 - rate + rate * turns
    law = torch.fft.fft(product).real / 2001
    mean, spread = float(rates.sum()), math.sqrt(float((rates * (1 - rates)).sum()))
    for z in (-4.0, -1.0, 0.5, 2.0, 5.0):
        seen = round(mean + z * spread)
        want = float(law[law <= law[seen]].sum())
        assert count_test(seen, rates.tolist()) == pytest.approx(want, rel=1e-6)
        assert want == pytest.approx(math.erfc(abs(z) / math.sqrt(2)), rel=0.25)  # nearly normal


def test_count_test_counts_equal_probabilities_on_both_sides_whatever_their_rounding() -> None:
    """Rates that mirror each other make a mirrored law, but for the last digits."""
    rates = [0.1, 0.9, 0.3, 0.7, 0.23, 0.77, 0.41, 0.59, 0.05, 0.95]
    for seen in range(5):
        assert count_test(seen, rates) == pytest.approx(count_test(10 - seen, rates), rel=1e-12)


def test_count_test_alarms_at_most_at_the_rate_stated() -> None:
    """Over its own law, exactly: P(p-value <= alpha) <= alpha."""
    rates = [0.1, 0.35, 0.8, 0.5, 0.95, 0.2, 0.6]
    law = [1.0]
    for rate in rates:
        law = [a * (1 - rate) + b * rate for a, b in zip([*law, 0.0], [0.0, *law], strict=True)]
    for alpha in (0.5, 0.1, 0.05, 0.01):
        assert sum(weight for seen, weight in enumerate(law) if count_test(seen, rates) <= alpha) <= alpha


def test_count_test_at_its_ends() -> None:
    assert count_test(0, []) == 1.0
    assert count_test(2, [1.0, 1.0]) == 1.0
    assert count_test(1, [1.0, 1.0]) == 0.0
    with pytest.raises(BadRequest, match="3 successes of 2"):
        count_test(3, [0.5, 0.5])
    with pytest.raises(BadRequest, match=r"rate is 1\.5"):
        count_test(1, [1.5])
