"""Observed counts against known probabilities: a test, its power, and a test that may be looked at at any time.

Cells are made from the probabilities alone, never from what was observed. What the probabilities do not list is one
cell more, "the rest". Probabilities and p-values are numbers from 0 to 1; total variation is half the sum of |q - p|.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from paceline.errors import BadRequest

K = TypeVar("K", bound=Hashable)
LEAST = 5.0
"""Expected count below which a cell is pooled: under it the G statistic is no longer close to a chi-square."""
RARE = 0.005
"""Probability below which an e-process pools a cell: rarer ones cost more to learn than they tell in 1,000 draws."""
NOTHING = 1e-12
"""Probability below which an outcome is impossible, rounding aside."""
SLACK = 1e-5
"""How far a sum of probabilities may lie above 1: laws come from float32."""


# -- the chi-square law ------------------------------------------------------------------------------------------------


def chi2_sf(x: float, df: int) -> float:
    """P(chi-square with df degrees of freedom is x or more), to 10 digits, also far out.

    Q(df/2, x/2), the regularised upper incomplete gamma function, by its power series on the left of the mean and by
    its continued fraction on the right (Abramowitz and Stegun 6.5.29 and 6.5.31). `torch.special.gammaincc` is off
    by up to 2e-9 of the value near the mean, and sums of many values would keep that. With df = 0 it is 1 at x = 0.
    """
    a, y = df / 2, x / 2
    if y <= 0:
        return 1.0
    if df == 0 or y == math.inf:
        return 0.0
    scale = math.exp(a * math.log(y) - y - math.lgamma(a))
    if y < a + 1:
        term = total = 1 / a
        n = 0
        while term > total * 1e-17:
            n += 1
            term *= y / (a + n)
            total += term
        return max(0.0, 1.0 - scale * total)
    return scale * _fraction(a, y)


def _fraction(a: float, y: float) -> float:
    """1/(y+1-a- 1(1-a)/(y+3-a- 2(2-a)/(y+5-a- ...))), by the method of Lentz; y >= a + 1 keeps it convergent."""
    b = y + 1 - a
    c, d = math.inf, 1 / b
    value, change, n = d, 2.0, 0
    while abs(change - 1) > 1e-15:
        n += 1
        b += 2
        factor = n * (a - n)
        d = 1 / (b + factor * d)
        c = b + factor / c
        change = c * d
        value *= change
    return value


def chi2_isf(alpha: float, df: int) -> float:
    """The x that a chi-square with df degrees of freedom exceeds with probability alpha, by bisection."""
    _check_alpha(alpha)
    return 0.0 if df == 0 else _first(lambda x: chi2_sf(x, df) <= alpha)


def chi2_power(noncentrality: float, df: int, alpha: float) -> float:
    """P(noncentral chi-square > the x that a central one exceeds with probability alpha).

    With J Poisson of mean noncentrality/2, a noncentral chi-square is a central one with df + 2 J degrees of freedom
    (Fisher 1928): the sum over j of P(J = j) Q(df/2 + j, x/2).
    """
    return 0.0 if df == 0 else _beyond(chi2_isf(alpha, df), noncentrality, df)


def _beyond(x: float, noncentrality: float, df: int) -> float:
    """P(noncentral chi-square > x); Q(a + 1, y) = Q(a, y) + y^a e^-y / a! walks up the sum, adding only."""
    mean, y = noncentrality / 2, x / 2
    if mean == 0:
        return chi2_sf(x, df)
    spread = int(12 * math.sqrt(mean + 1)) + 30  # what lies outside has less than 1e-15 of the mass
    first = max(0, int(mean) - spread)
    tail, found, mass = chi2_sf(x, df + 2 * first), 0.0, 0.0
    for j in range(first, int(mean) + spread):
        weight = math.exp(j * math.log(mean) - mean - math.lgamma(j + 1))
        found, mass = found + weight * tail, mass + weight
        a = df / 2 + j
        tail += math.exp(a * math.log(y) - y - math.lgamma(a + 1))
    return min(1.0, found / mass)


def smallest_detectable_tv(n: int, df: int, alpha: float, power: float = 0.9) -> float:
    """The total variation that a G-test of n draws at false-alarm rate alpha finds with probability `power`.

    A law q at distance TV from p has sum (q - p)^2 / p >= 4 TV^2 (Cauchy-Schwarz), so its noncentrality is at least
    4 n TV^2, wherever the difference lies between the cells. What moves inside a pooled cell is not seen. 1 means
    that nothing is sure to be found. Over several contexts n and df are the sums, TV the root of the mean square.
    """
    _check_alpha(alpha)
    if not alpha < power < 1:
        raise BadRequest(f"power is {power}; give a number between alpha ({alpha}) and 1")
    if n <= 0 or df == 0:
        return 1.0
    limit = chi2_isf(alpha, df)
    needed = _first(lambda value: _beyond(limit, value, df) >= power)
    return min(1.0, math.sqrt(needed / (4 * n)))


# -- cells and the G-test ----------------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """Outcomes sorted into cells, by their probabilities alone."""

    probs: list[float]
    """Probability of each cell; their sum is 1."""
    of: dict[Hashable, int | None]
    """Listed outcome -> its cell; None for an impossible one."""
    rest: int | None
    """The cell of everything that is not listed; None if that is impossible."""

    @classmethod
    def make(cls, probs: Mapping[K, float], smallest: float) -> "Cells":
        """One cell for each outcome, and one for all that are rarer than `smallest`, the rest among them.

        The pooled cell takes in the next rarest outcomes until it is not rarer itself.
        """
        shares = _checked(probs)
        shares.append(max(0.0, 1.0 - math.fsum(shares)))
        order = sorted((i for i, share in enumerate(shares) if share >= NOTHING), key=shares.__getitem__)
        pooled: list[int] = []
        mass = 0.0
        while len(pooled) < len(order) and (shares[order[len(pooled)]] < smallest or (pooled and mass < smallest)):
            pooled.append(order[len(pooled)])
            mass += shares[pooled[-1]]
        members = ([pooled] if pooled else []) + [[i] for i in order[len(pooled) :]]
        places = {i: cell for cell, inside in enumerate(members) for i in inside}
        total = math.fsum(shares[i] for i in order)
        masses = [math.fsum(shares[i] for i in inside) / total for inside in members]
        return cls(masses, {key: places.get(i) for i, key in enumerate(probs)}, places.get(len(probs)))

    def find(self, outcome: Hashable) -> int | None:
        """The cell of an outcome; None if it is impossible."""
        return self.of.get(outcome, self.rest)


class Pooled(NamedTuple):
    """Counts by cell."""

    counts: list[int]
    probs: list[float]
    impossible: int
    """Outcomes seen to which the law gives probability 0; they are in no cell."""


@dataclass(frozen=True)
class GTest:
    """The outcome of a G-test, or of several taken together."""

    statistic: float
    """2 sum O ln(O / E) over Williams' factor; infinite when an impossible outcome was seen."""
    df: int
    """Degrees of freedom: cells less one, summed over contexts."""
    p_value: float
    """Probability of a statistic as large or larger if the probabilities are right; 0 after an impossible outcome."""
    n: int
    """Draws."""
    impossible: int
    """Outcomes seen to which the law gives probability 0: one of them is a certain bug."""
    plug_in_tv: float
    """Total variation between the shares seen and the probabilities, cells as pooled; over contexts their mean."""
    tv_noise_floor: float
    """What `plug_in_tv` is on average if the probabilities are right."""


def pool(counts: Mapping[K, int], probs: Mapping[K, float], least: float = LEAST) -> Pooled:
    """Counts by cell, where outcomes expected less than `least` times share one cell, the rarest first.

    Args:
        counts: outcome -> how often it was seen.
        probs: outcome -> its probability, with sum 1 or less; unlisted outcomes are one cell with what is left.
        least: expected count.
    """
    for outcome, count in counts.items():
        if count < 0:
            raise BadRequest(f"outcome {outcome!r} was seen {count} times; counts are 0 or more")
    n = sum(counts.values())
    cells = Cells.make(probs, least / n if n else math.inf)
    found, impossible = [0] * len(cells.probs), 0
    for outcome, count in counts.items():
        cell = cells.find(outcome)
        if cell is None:
            impossible += count
        else:
            found[cell] += count
    return Pooled(found, cells.probs, impossible)


def g_test(counts: Mapping[K, int], probs: Mapping[K, float]) -> GTest:
    """Whether the counts can come from the probabilities; the arguments are those of `pool`.

    G = 2 sum O ln(O / E) is a chi-square with cells - 1 degrees of freedom for large n. Divided by Williams' factor
    1 + (sum 1/p - 1) / (6 n (cells - 1)) (Biometrika 63, 1976) it is one from expected counts of 5 on: false alarms
    at rates of 0.05 to 1e-4 are then within about 1.6 times the rate stated, without it 4 times.
    """
    n = sum(counts.values())
    seen, probs_, impossible = pool(counts, probs)
    df = len(probs_) - 1
    gap = sum(abs(o / n - p) for o, p in zip(seen, probs_)) + impossible / n if n else 0.0
    floor = sum(_mean_deviation(n, p) for p in probs_) / (2 * n) if n else 0.0
    if impossible:
        return GTest(math.inf, df, 0.0, n, impossible, gap / 2, floor)
    if df == 0:  # one cell: whatever was seen agrees
        return GTest(0.0, 0, 1.0, n, 0, 0.0, 0.0)
    g = 2 * math.fsum(o * math.log(o / (n * p)) for o, p in zip(seen, probs_) if o)
    williams = 1 + (math.fsum(1 / p for p in probs_) - 1) / (6 * n * df)
    statistic = max(0.0, g) / williams
    return GTest(statistic, df, chi2_sf(statistic, df), n, 0, gap / 2, floor)


def combine(tests: Sequence[GTest]) -> GTest:
    """One test from tests of independent contexts: a sum of chi-squares is chi-square, its df the sum of theirs.

    The total variation is that of (context, outcome) together: the mean, each context weighted by its draws.
    """
    statistic, df = math.fsum(test.statistic for test in tests), sum(test.df for test in tests)
    n, impossible = sum(test.n for test in tests), sum(test.impossible for test in tests)
    gap = sum(test.n * test.plug_in_tv for test in tests) / n if n else 0.0
    floor = sum(test.n * test.tv_noise_floor for test in tests) / n if n else 0.0
    return GTest(statistic, df, 0.0 if impossible else chi2_sf(statistic, df), n, impossible, gap, floor)


def _mean_deviation(n: int, p: float) -> float:
    """E|X - n p| of a binomial X: 2 m C(n, m) p^m (1 - p)^(n - m + 1) with m = floor(n p) + 1 (De Moivre 1730)."""
    m = math.floor(n * p) + 1
    if m > n:  # p is 1
        return 0.0
    ways = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
    return 2 * m * math.exp(ways + m * math.log(p) + (n - m + 1) * math.log1p(-p))


# -- the e-process -----------------------------------------------------------------------------------------------------


class EProcess:
    """A bet against the probabilities, settled after every draw: E = product of guess(x) / p(x).

    The guess is made before x is seen: (times x's cell was seen + 1/2) / (draws + cells/2), the predictive of
    Krichevsky and Trofimov (1981). If the probabilities are right the mean of E stays 1, and E ever reaches 1/alpha
    with probability alpha at most (Ville 1939): stop, look and go on at will. If they are wrong, log E grows by
    KL(q, p) >= 2 TV^2 a draw, less (cells - 1)/2 ln(draws) in all, which is what learning q costs.

    Args:
        probs: outcome -> probability, with sum 1 or less; everything else is one cell.
        after: a process of an independent context: this one bets what that one has won, and E is their product.
        rare: probability below which outcomes share a cell.
    """

    def __init__(self, probs: Mapping[K, float], *, after: "EProcess | None" = None, rare: float = RARE) -> None:
        self.cells = Cells.make(probs, rare)
        self.log_e: float = after.log_e if after else 0.0
        """Natural logarithm of E; infinite once an impossible outcome was seen."""
        self.max_log_e: float = after.max_log_e if after else 0.0
        """The largest it has been."""
        self._counts = [0.5] * len(self.cells.probs)
        self._total = len(self._counts) / 2

    def update(self, outcome: Hashable) -> float:
        """Take one draw into account, and return log E; every outcome that is not listed is the same."""
        cell = self.cells.find(outcome)
        if cell is None:
            self.log_e = math.inf
        else:
            self.log_e += math.log(self._counts[cell] / self._total / self.cells.probs[cell])
            self._counts[cell] += 1
            self._total += 1
        self.max_log_e = max(self.max_log_e, self.log_e)
        return self.log_e

    @property
    def e_value(self) -> float:
        """E now; infinite where a float cannot hold it."""
        return _exp(self.log_e)

    @property
    def max_e_value(self) -> float:
        """The largest that E has been."""
        return _exp(self.max_log_e)

    def rejects(self, alpha: float) -> bool:
        """Whether E has reached 1/alpha at any time: if the probabilities are right, so with probability <= alpha."""
        _check_alpha(alpha)
        return self.max_log_e >= -math.log(alpha)


def average(log_es: Sequence[float]) -> float:
    """Log of the mean of e-values given by their logs: an e-value again, however they depend on each other.

    Take values at times chosen beforehand, not the largest of each; products are for independent ones (`after`).
    """
    top = max(log_es)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(one - top) for one in log_es) / len(log_es))


# -- counts of successes -----------------------------------------------------------------------------------------------


def wilson(successes: int, n: int, alpha: float) -> tuple[float, float]:
    """The interval of a success rate at confidence 1 - alpha, from n trials with one rate (Wilson 1927).

    All p with |successes/n - p| <= z sqrt(p (1 - p) / n), where z^2 is what a chi-square with one degree of freedom
    exceeds with probability alpha. It is (0, 1) without trials.
    """
    if not 0 <= successes <= n:
        raise BadRequest(f"{successes} successes of {n} trials; give a number from 0 to the number of trials")
    z2 = chi2_isf(alpha, 1)
    if n == 0:
        return 0.0, 1.0
    share, reach = successes / n, z2 / n
    middle, spread = share + reach / 2, math.sqrt(reach * (share * (1 - share) + reach / 4))
    low = 0.0 if successes == 0 else max(0.0, (middle - spread) / (1 + reach))
    return low, 1.0 if successes == n else min(1.0, (middle + spread) / (1 + reach))


def count_test(successes: int, rates: Sequence[float]) -> float:
    """The two-sided p-value of a number of successes in independent trials, each with a known rate of its own.

    The sum of the probabilities of all numbers that are no likelier than the one seen, as in R's `binom.test`. Their
    law, the Poisson-binomial, is exact: one trial is added at a time. Each trial takes time in proportion to how many
    there are, so some thousands are a fraction of a second.
    """
    for rate in rates:
        if not 0 <= rate <= 1:
            raise BadRequest(f"a success rate is {rate}; rates are numbers from 0 to 1")
    if not 0 <= successes <= len(rates):
        raise BadRequest(f"{successes} successes of {len(rates)} trials; give a number from 0 to that of the rates")
    law = torch.zeros(len(rates) + 1, dtype=torch.float64)
    law[0] = 1.0
    for num_before, rate in enumerate(rates):
        known = law[: num_before + 1] * rate
        law[: num_before + 1] *= 1 - rate
        law[1 : num_before + 2] += known
    seen = law[successes]
    # Equal probabilities may differ in rounding; both count.
    return min(1.0, float(law[law <= seen * (1 + 1e-7)].sum())) if float(seen) > 0 else 0.0


# -- shared ------------------------------------------------------------------------------------------------------------


def _checked(probs: Mapping[K, float]) -> list[float]:
    for outcome, share in probs.items():
        if not -NOTHING <= share <= 1 + SLACK:
            raise BadRequest(f"outcome {outcome!r} has probability {share}; probabilities are numbers from 0 to 1")
    total = math.fsum(probs.values())
    if total > 1 + SLACK:
        raise BadRequest(f"the probabilities sum to {total}; give 1 or less, what is left is for unlisted outcomes")
    return [max(0.0, share) for share in probs.values()]


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise BadRequest(f"alpha is {alpha}; a false-alarm rate lies between 0 and 1, as 0.001")


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _first(enough: Callable[[float], bool]) -> float:
    """The smallest positive number that is enough, to the last digits: what is above it is enough too."""
    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, high * 2
    while low < (middle := (low + high) / 2) < high and high - low > 1e-15 * high:
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
