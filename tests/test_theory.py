"""Formulas against counted outcomes, simulation, and numbers worked out by hand."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import theory
from paceline.errors import BadRequest

RATES = st.floats(0.0, 1.0)


def laws(size: int) -> st.SearchStrategy[list[float]]:
    weights = st.lists(st.sampled_from((0.0, 0.1, 0.5, 1.0, 3.0)), min_size=size, max_size=size)
    return weights.filter(any).map(lambda ws: [w / sum(ws) for w in ws])


PAIRS = st.integers(1, 5).flatmap(lambda size: st.tuples(laws(size), laws(size)))


# -- the floor ---------------------------------------------------------------------------------------------------------


def test_a_model_of_seven_billion_weights_has_the_right_floor() -> None:
    """LLaMA-2-7B: 6.74e9 weights in 16 bits at 2 TB/s are 6.74 ms a token; the article's formula says 16.8 us."""
    assert float(theory.step_seconds(6.74e9 * 2, 2e12)) == pytest.approx(6.74e-3)
    assert float(theory.article.step_seconds(4096, 2e12)) == pytest.approx(16.8e-6, rel=0.01)
    assert float(theory.article.step_seconds(4096, 2e12)) * 32 == pytest.approx(0.54e-3, rel=0.01)  # what it prints


def test_intensity_counts_multiplications_and_additions() -> None:
    d, n = 512, 7
    flops, read = n * d * (2 * d), 2 * d * d  # each output of each token: d multiplications, d additions
    assert float(theory.arithmetic_intensity(n)) == pytest.approx(flops / read)
    assert float(theory.arithmetic_intensity(1)) == 1.0
    assert theory.article.arithmetic_intensity() == 2.0
    assert theory.arithmetic_intensity([1, 2, 4], 0.5).tolist() == [4.0, 8.0, 16.0]


def test_keys_and_values_of_known_models() -> None:
    assert float(theory.kv_bytes(1, 32, 32, 128)) == 524_288  # LLaMA-2-7B
    assert float(theory.kv_bytes(1, 32, 8, 128)) == 131_072  # LLaMA-3-8B
    assert float(theory.kv_bytes(1, 80, 8, 128)) == 327_680  # LLaMA-2-70B
    one, two = theory.kv_bytes([1000, 2000], 32, 8, 128)
    assert two == 2 * one  # linear


def test_a_pass_turns_at_the_ridge() -> None:
    """A100: 312 TFLOP/s and 2.039 TB/s meet at 153 tokens in 16 bits."""
    ridge = float(theory.ridge_tokens(312e12, 2.039e12))
    assert ridge == pytest.approx(153, abs=0.5)
    below, at, above = theory.pass_seconds([1, ridge, 2 * ridge], 13.5e9, 2.039e12, 312e12)
    assert below == at == pytest.approx(13.5e9 / 2.039e12)
    assert above == pytest.approx(2 * at)


# -- acceptance --------------------------------------------------------------------------------------------------------


@given(PAIRS)
def test_the_standard_rule_emits_p_and_rejects_by_the_distance(pair: tuple[list[float], list[float]]) -> None:
    """Every outcome counted: draft x by q, keep it with min(1, p/q), else draw from the residual."""
    p, q = pair
    rest = theory.residual(p, q)
    emitted, kept = [0.0] * len(p), 0.0
    for x, chance in enumerate(q):
        keep = min(1.0, p[x] / chance) if chance else 0.0
        kept += chance * keep
        for y in range(len(p)):
            emitted[y] += chance * (keep * (x == y) + (1.0 - keep) * float(rest[y]))
    assert emitted == pytest.approx(p, abs=1e-12)
    assert kept == pytest.approx(float(theory.acceptance(p, q)), abs=1e-12)
    assert 1.0 - kept == pytest.approx(float(theory.total_variation(p, q)), abs=1e-12)


@given(PAIRS)
def test_the_identity_behind_it(pair: tuple[list[float], list[float]]) -> None:
    for a, b in zip(*pair, strict=True):
        assert min(a, b) + max(a - b, 0.0) == pytest.approx(a, abs=1e-15)


@given(PAIRS)
def test_the_coupled_rule_lies_between_its_bounds(pair: tuple[list[float], list[float]]) -> None:
    found, tv = float(theory.coupled_acceptance(*pair)), float(theory.total_variation(*pair))
    assert float(theory.coupled_bound(tv)) - 1e-12 <= found <= 1.0 - tv + 1e-12


def test_the_coupled_rule_is_what_the_same_noise_does() -> None:
    """A hundred thousand races of Gumbel noise: within four standard errors."""
    rng = np.random.default_rng(7)
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.2, 0.4, 0.1, 0.3])
    noise = rng.gumbel(size=(100_000, 4))
    same = float(((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean())
    expected = float(theory.coupled_acceptance(p, q))
    assert same == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 100_000))
    assert expected < float(theory.acceptance(p, q))


def test_laws_may_come_in_batches() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet([0.5] * 6, size=(3, 2)), rng.dirichlet([0.5] * 6, size=(3, 2))
    for name in ("total_variation", "acceptance", "residual", "coupled_acceptance"):
        whole = getattr(theory, name)(p, q)
        for i, j in itertools.product(range(3), range(2)):
            np.testing.assert_allclose(whole[i, j], getattr(theory, name)(p[i, j], q[i, j]))


# -- tokens per pass ---------------------------------------------------------------------------------------------------


def counted(rates: list[float]) -> float:
    """Every pattern of right and wrong guesses, with its probability and the tokens it brings."""
    total = 0.0
    for pattern in itertools.product((True, False), repeat=len(rates)):
        chance = math.prod(rate if right else 1.0 - rate for rate, right in zip(rates, pattern, strict=True))
        total += chance * (1 + len(list(itertools.takewhile(bool, pattern))))
    return total


@given(st.lists(RATES, max_size=6))
def test_length_by_position_is_counted(rates: list[float]) -> None:
    assert float(theory.tokens_by_position(rates)) == pytest.approx(counted(rates))


@given(RATES, st.integers(0, 7))
def test_length_with_one_alpha_is_counted(alpha: float, k: int) -> None:
    assert float(theory.tokens_per_pass(alpha, k)) == pytest.approx(counted([alpha] * k))


def test_length_of_a_tree_is_simulated() -> None:
    parents, shares = [-1, -1, 0, 0, 1, 2], [0.5, 0.3, 0.6, 0.2, 0.9, 0.7]
    rng, total, runs = random.Random(3), 0, 40_000
    for _ in range(runs):
        node, kept = -1, 1
        while True:
            point = rng.random()
            for child, parent in enumerate(parents):
                if parent == node:
                    point -= shares[child]
                    if point < 0.0:
                        node, kept = child, kept + 1
                        break
            else:
                break
        total += kept
    assert theory.tokens_of_tree(parents, shares) == pytest.approx(total / runs, abs=0.03)


def test_a_chain_is_a_tree() -> None:
    assert theory.tokens_of_tree([-1, 0, 1], [0.6] * 3) == pytest.approx(float(theory.tokens_per_pass(0.6, 3)))


@given(st.floats(0.0, 1.0), st.integers(1, 10))
def test_alpha_is_found_again(alpha: float, k: int) -> None:
    assert theory.equivalent_alpha(float(theory.tokens_per_pass(alpha, k)), k) == pytest.approx(alpha, abs=1e-6)


def test_the_alpha_of_lookahead_as_published() -> None:
    assert theory.equivalent_alpha(1.65, 4) == pytest.approx(0.40, abs=0.01)


# -- speed-up ----------------------------------------------------------------------------------------------------------


def test_the_articles_example() -> None:
    """alpha .6, c .1, K 3: it says 2.15; right is 1.67, by formula and by simulation."""
    assert float(theory.article.speedup(0.6, 3, 0.1)) == pytest.approx(2.15, abs=0.005)
    assert float(theory.speedup(0.6, 3, 0.1)) == pytest.approx(1.674, abs=0.0005)
    rng, tokens, seconds = random.Random(1), 0, 0.0
    for _ in range(50_000):
        kept = 0
        while kept < 3 and rng.random() < 0.6:
            kept += 1
        tokens, seconds = tokens + kept + 1, seconds + 1.0 + 3 * 0.1
    assert tokens / seconds == pytest.approx(1.674, abs=0.015)
    assert theory.best_length(0.6, 0.1) == (3, pytest.approx(1.674, abs=0.0005))


@pytest.mark.parametrize(
    ("alpha", "c", "root", "best", "factor", "at_root"),
    [
        (0.6, 0.10, 2.4, 3, 1.67, 1.63),
        (0.8, 0.10, 2.8, 6, 2.47, 2.27),
        (0.8, 0.05, 4.0, 8, 3.09, 2.80),
        (0.8, 0.02, 6.3, 11, 3.82, 3.53),
        (0.9, 0.05, 4.2, 13, 4.67, 3.41),
        (0.9, 0.02, 6.7, 19, 6.37, 5.00),
        (0.5, 0.05, 3.2, 3, 1.63, 1.63),
        (0.3, 0.05, 2.4, 2, 1.26, 1.26),
    ],
)
def test_the_root_is_no_optimum(alpha: float, c: float, root: float, best: int, factor: float, at_root: float) -> None:
    assert float(theory.article.best_length(alpha, c)) == pytest.approx(root, abs=0.06)
    found = theory.best_length(alpha, c)
    assert (found.num_drafted, round(found.speedup, 2)) == (best, factor)
    assert found.speedup == pytest.approx(max(float(theory.speedup(alpha, k, c)) for k in range(60)))
    near = round(float(theory.article.best_length(alpha, c)))
    assert round(float(theory.speedup(alpha, near, c)), 2) == at_root


def test_the_articles_formula_has_no_optimum() -> None:
    """Where alpha is above c it rises towards alpha / c for ever."""
    found = theory.article.speedup(0.6, np.arange(1, 2000), 0.1)
    assert (np.diff(found) > 0).all()
    assert float(found[-1]) == pytest.approx(6.0, rel=0.01)


def test_costs_with_steps_move_the_optimum() -> None:
    def tiles(tokens: int) -> float:
        return float(math.ceil(tokens / 8))

    assert theory.best_length(0.95, 0.02, tiles).num_drafted == 7  # one tile, and not one token more
    assert theory.best_length(0.05, 0.2) == (0, 1.0)  # nothing pays
    assert theory.best_length([0.9, 0.9, 0.0, 0.9], 0.1).num_drafted == 2


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_there_is_a_gain_only_where_alpha_is_above_c(alpha: float, c: float) -> None:
    found = theory.best_length(alpha, c)
    assert (found.num_drafted > 0) == (alpha > c)
    if alpha > c:
        assert found.speedup >= (1.0 + alpha) / (1.0 + c) - 1e-12


@given(RATES, st.floats(0.01, 0.99))
def test_the_articles_formula_has_no_best_length(alpha: float, c: float) -> None:
    """Its derivative, (alpha - c) / (1 + Kc)², has one sign: the formula rises, or it falls, up to any K."""
    values = theory.article.speedup(alpha, np.arange(0, 60), c)
    steps = np.diff(values) * (1 if alpha >= c else -1)
    assert (steps >= -1e-12).all()
    assert (values >= theory.speedup(alpha, np.arange(0, 60), c) - 1e-12).all()  # and is never below the right one


@given(st.floats(0.05, 0.95), st.floats(0.01, 0.9))
def test_the_best_length_is_next_to_the_zero_of_the_derivative(alpha: float, c: float) -> None:
    """-alpha^(K+1) ln alpha (1 + cK) = c (1 - alpha^(K+1)), K real: found by halving."""
    if alpha <= c:
        return

    def rising(k: float) -> bool:
        return -(alpha ** (k + 1)) * math.log(alpha) * (1 + c * k) > c * (1 - alpha ** (k + 1))

    low, high = 0.0, 256.0
    if not rising(low):
        high = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) else (low, middle)
    assert abs(theory.best_length(alpha, c).num_drafted - low) <= 1


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.acceptance([0.5, 0.6], [0.5, 0.5]), "p is no law"),
        (lambda: theory.acceptance([0.5, 0.5], [1.5, -0.5]), "q is no law"),
        (lambda: theory.coupled_acceptance([math.nan, 1.0], [0.5, 0.5]), "p is no law"),
        (lambda: theory.tokens_per_pass(1.2, 3), "alpha is 1.2"),
        (lambda: theory.tokens_per_pass(0.5, -1), "num_drafted is -1"),
        (lambda: theory.tokens_by_position([0.5, math.nan]), "alphas is"),
        (lambda: theory.tokens_of_tree([-1, 1], [0.5, 0.5]), "node 1 has parent 1"),
        (lambda: theory.tokens_of_tree([-1, -1], [0.7, 0.7]), "at most 1"),
        (lambda: theory.equivalent_alpha(5.0, 3), "1 to 4 are possible"),
        (lambda: theory.step_seconds(0, 1), "weight_bytes is 0"),
        (lambda: theory.speedup(0.5, 3, -0.1), "c is -0.1"),
        (lambda: theory.best_length(0.5, -1.0), "c is -1.0"),
    ],
)
def test_impossible_numbers_are_refused(call: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        call()  # type: ignore[operator]
