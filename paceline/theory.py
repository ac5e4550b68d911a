"""What speculation can bring, as formulas: pure functions of numbers or of arrays that broadcast, in float64.

    floor        bytes that must be read for a token, over the bandwidth they are read with
    acceptance   how often a guess survives, from the laws of target and draft
    length       tokens that a pass over the target brings, from acceptance
    speed-up     length over what the pass and its draft cost, and the draft length at which that is largest

Letters: p and q are the laws of target and draft, K the number of drafted tokens, alpha the probability that a draft
token is kept when all before it were, c the time of a draft step in passes of the target over one token. Sources:
Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318), Daliri et al. 2024 (2408.07978), Chen et al. 2024
(Sequoia, 2402.12374), Williams et al. 2009 (roofline).

`article` holds the formulas of the article that this project was begun from, as printed: some are wrong, and the
difference is worth seeing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import BadRequest

Numbers = float | int | Sequence[Any] | npt.NDArray[Any]
Array = npt.NDArray[np.float64]

# -- the floor ---------------------------------------------------------------------------------------------------------


def arithmetic_intensity(tokens: Numbers, bytes_per_weight: Numbers = 2.0) -> Array:
    """FLOPs per byte of a matrix product that reads its weights once for so many tokens: 2 n / bytes.

    Each weight is multiplied and added once per token, so a single token has 1 FLOP per byte in 16 bits, whatever the
    size of the matrix. Activations are left out: they are smaller by the width of the layer.

    Args:
        tokens: n, read in one pass.
        bytes_per_weight: 2 for 16 bits, 0.5 for 4 bits.
    """
    return np.asarray(2.0 * _positive("tokens", tokens) / _positive("bytes_per_weight", bytes_per_weight))


def ridge_tokens(flops: Numbers, bandwidth: Numbers, bytes_per_weight: Numbers = 2.0) -> Array:
    """Tokens of a pass at which computing takes as long as reading: F · bytes / (2 B), the roofline's ridge.

    Args:
        flops: F, FLOP/s that matrix products reach.
        bandwidth: B, bytes/s.
    """
    rate = _positive("flops", flops) / _positive("bandwidth", bandwidth)
    return np.asarray(rate * _positive("bytes_per_weight", bytes_per_weight) / 2.0)


def kv_bytes(
    tokens: Numbers, layers: Numbers, kv_heads: Numbers, head_dim: Numbers, bytes_per_value: Numbers = 2.0
) -> Array:
    """Bytes of the keys and values of a text of so many tokens: 2 · layers · heads · dim · bytes · T, linear in T.

    Args:
        kv_heads: heads of keys and values, which grouped-query attention has fewer of than of queries.
        head_dim: values per head.
    """
    parts = (layers, kv_heads, head_dim, bytes_per_value)
    product = np.asarray(2.0)
    for name, part in zip(("layers", "kv_heads", "head_dim", "bytes_per_value"), parts, strict=True):
        product = product * _positive(name, part)
    return np.asarray(product * _at_least_0("tokens", tokens))


def step_seconds(weight_bytes: Numbers, bandwidth: Numbers, kv_bytes: Numbers = 0.0) -> Array:
    """Least seconds of a decoding step: every weight is read, and all keys and values: (W + KV) / B.

    Args:
        weight_bytes: W, bytes of all weights that a pass reads.
        bandwidth: B, bytes/s of the memory that they lie in.
    """
    total = _positive("weight_bytes", weight_bytes) + _at_least_0("kv_bytes", kv_bytes)
    return np.asarray(total / _positive("bandwidth", bandwidth))


def pass_seconds(
    tokens: Numbers, weight_bytes: Numbers, bandwidth: Numbers, flops: Numbers, bytes_per_weight: Numbers = 2.0
) -> Array:
    """Roofline of a pass over n tokens: max(W / B, 2 n P / F), with P = W / bytes weights. Attention is left out.

    Real passes have steps where kernels change; `paceline` measures them instead (`Costs`).
    """
    weights = _positive("weight_bytes", weight_bytes) / _positive("bytes_per_weight", bytes_per_weight)
    computing = 2.0 * _positive("tokens", tokens) * weights / _positive("flops", flops)
    return np.asarray(np.maximum(step_seconds(weight_bytes, bandwidth), computing))


# -- acceptance --------------------------------------------------------------------------------------------------------


def total_variation(p: Numbers, q: Numbers) -> Array:
    """TV(p, q) = sum over x of (p(x) - q(x))+, along the last axis: the probability that a rejection rule rejects.

    Args:
        p, q: [..., V], laws: not negative, adding up to 1.
    """
    return np.asarray(np.maximum(_laws("p", p) - _laws("q", q), 0.0).sum(-1))


def acceptance(p: Numbers, q: Numbers) -> Array:
    """Probability that a token drawn from q is kept by the standard rule: sum of min(p, q) = 1 - TV(p, q).

    No rule that keeps the law does better with one independent draft token: it is the maximal coupling of p and q.
    """
    return np.asarray(np.minimum(_laws("p", p), _laws("q", q)).sum(-1))


def residual(p: Numbers, q: Numbers) -> Array:
    """The law that a token is drawn from after a rejection: (p - q)+ / TV(p, q), [..., V].

    With it the standard rule emits p exactly, since min(p, q) + (p - q)+ = p at every token. Where p equals q nothing
    is ever rejected, and the residual is given as p.
    """
    p, rest = _laws("p", p), np.maximum(_laws("p", p) - _laws("q", q), 0.0)
    mass = rest.sum(-1, keepdims=True)
    return np.where(mass > 0.0, rest / np.where(mass > 0.0, mass, 1.0), p)


def coupled_acceptance(p: Numbers, q: Numbers) -> Array:
    """Probability that target and draft choose the same token with the same Gumbel noise, [..., V] -> [...].

    Formula: sum over x of 1 / (sum over y of max(p(y) / p(x), q(y) / q(x))), over the x that both laws have (Daliri et
    al. 2024): the chance that x wins both races at once.
    """
    p, q = np.broadcast_arrays(_laws("p", p), _laws("q", q))
    found = np.zeros(p.shape[:-1])
    for x in range(p.shape[-1]):
        both = (p[..., x] > 0.0) & (q[..., x] > 0.0)
        own_p, own_q = np.where(both, p[..., x], 1.0), np.where(both, q[..., x], 1.0)
        total = np.maximum(p / own_p[..., None], q / own_q[..., None]).sum(-1)
        found = found + np.where(both, 1.0 / total, 0.0)
    return np.asarray(found)


def coupled_bound(tv: Numbers) -> Array:
    """Least acceptance of the coupled rule at a distance of the laws: (1 - TV) / (1 + TV) (Daliri et al. 2024)."""
    distance = _probability("tv", tv)
    return np.asarray((1.0 - distance) / (1.0 + distance))


# -- tokens per pass ---------------------------------------------------------------------------------------------------


def tokens_per_pass(alpha: Numbers, num_drafted: Numbers) -> Array:
    """Expected tokens of a pass with K guesses, each kept with alpha if all before it were.

    Formula: (1 - alpha^(K+1)) / (1 - alpha). The target's own token that ends every pass is counted (Leviathan et al.
    2023, equation 1).
    """
    a, k = np.broadcast_arrays(_probability("alpha", alpha), _at_least_0("num_drafted", num_drafted))
    safe = np.where(a < 1.0, a, 0.5)
    return np.where(a < 1.0, (1.0 - safe ** (k + 1.0)) / (1.0 - safe), k + 1.0)


def tokens_by_position(alphas: Numbers) -> Array:
    """The same with a rate for each position, [..., K]: 1 + sum over k of the product of the first k rates."""
    rates = _probability("alphas", alphas)
    return np.asarray(1.0 + np.cumprod(rates, axis=-1).sum(-1))


def tokens_of_tree(parents: Sequence[int], shares: Sequence[float]) -> float:
    """Expected tokens of a pass over a tree: 1 + sum over nodes of the product of the shares on their paths.

    Args:
        parents: of each drafted node; -1 is the pending token, and a parent comes before its children.
        shares: probability that the target goes on to each node from its parent. Siblings exclude each other, so
            theirs add up to 1 at most.
    """
    _probability("shares", shares)
    reached, taken, total = dict[int, float](), dict[int, float](), 1.0
    for node, (parent, share) in enumerate(zip(parents, shares, strict=True)):
        if not -1 <= parent < node:
            raise BadRequest(f"node {node} has parent {parent}; a parent from -1 to {node - 1} is needed")
        taken[parent] = taken.get(parent, 0.0) + share
        if taken[parent] > 1.0 + 1e-9:
            raise BadRequest(f"the children of node {parent} have shares of {taken[parent]:g} together; at most 1 is")
        reached[node] = share * (1.0 if parent < 0 else reached[parent])
        total += reached[node]
    return total


def equivalent_alpha(tokens: float, num_drafted: int) -> float:
    """The alpha at which K guesses bring so many tokens per pass: what makes published lengths comparable."""
    if not 1.0 <= tokens <= num_drafted + 1.0:
        raise BadRequest(f"{tokens} tokens per pass with {num_drafted} guesses; 1 to {num_drafted + 1} are possible")
    low, high = 0.0, 1.0
    for _ in range(60):  # the length grows with alpha, so halving finds it to the last bit
        middle = (low + high) / 2.0
        low, high = (middle, high) if float(tokens_per_pass(middle, num_drafted)) < tokens else (low, middle)
    return (low + high) / 2.0


# -- speed-up ----------------------------------------------------------------------------------------------------------


def speedup(alpha: Numbers, num_drafted: Numbers, c: Numbers, verify: Numbers = 1.0) -> Array:
    """Tokens of a pass in the time of plain decoding steps: tokens_per_pass / (verify + c K).

    Args:
        c: time of a draft step.
        verify: time of the target's pass over the K + 1 tokens. Leviathan et al. 2023, theorem 3.8, have 1.
    """
    cost = _positive("verify", verify) + _at_least_0("c", c) * _at_least_0("num_drafted", num_drafted)
    return np.asarray(tokens_per_pass(alpha, num_drafted) / cost)


class Best(NamedTuple):
    """The draft length that pays most."""

    num_drafted: int
    """0 is plain decoding: nothing pays."""
    speedup: float


def best_length(
    alpha: float | Sequence[float],
    c: float,
    verify: Callable[[int], float] = lambda tokens: 1.0,
    most: int = 256,
) -> Best:
    """The K with the largest speed-up, by trying every one: costs have steps, so there is no formula for it.

    Args:
        alpha: the same at every position, or one for each.
        c: time of a draft step, in plain decoding steps.
        verify: time of the target's pass over so many tokens, in the same unit.
        most: largest K that is tried.
    """
    rates = np.full(most, float(alpha)) if isinstance(alpha, int | float) else np.asarray(alpha, float)[:most]
    _probability("alpha", rates)
    _at_least_0("c", c)
    best, tokens, kept = Best(0, 1.0), 1.0, 1.0
    plain = verify(1)
    for k, rate in enumerate(rates.tolist(), 1):
        kept *= rate
        tokens += kept
        found = tokens * plain / (verify(k + 1) + c * k)
        if found > best.speedup:
            best = Best(k, found)
    return best


class article:
    """The article's own formulas, as printed."""

    @staticmethod
    def arithmetic_intensity() -> float:
        """4 d² FLOPs on 2 d² bytes: twice the real number, 1."""
        return 2.0

    @staticmethod
    def step_seconds(hidden: Numbers, bandwidth: Numbers) -> Array:
        """2 N² / B with N the hidden width: the time of one square matrix, not of a model."""
        return np.asarray(2.0 * np.asarray(hidden, float) ** 2 / np.asarray(bandwidth, float))

    @staticmethod
    def speedup(alpha: Numbers, num_drafted: Numbers, c: Numbers) -> Array:
        """(1 + K alpha) / (1 + K c): counts every guess by itself, also behind one that was rejected."""
        k = np.asarray(num_drafted, float)
        return np.asarray((1.0 + k * np.asarray(alpha, float)) / (1.0 + k * np.asarray(c, float)))

    @staticmethod
    def best_length(alpha: Numbers, c: Numbers) -> Array:
        """sqrt(alpha / c): the maximum of neither formula; the one above has none, it rises or falls for ever."""
        return np.asarray(np.sqrt(np.asarray(alpha, float) / np.asarray(c, float)))


# -- checks ------------------------------------------------------------------------------------------------------------


def _laws(name: str, law: Numbers) -> Array:
    array = np.asarray(law, float)
    if array.ndim == 0 or not (array >= 0.0).all() or not np.allclose(array.sum(-1), 1.0, rtol=0.0, atol=1e-6):
        raise BadRequest(f"{name} is no law: probabilities along the last axis, not negative and adding up to 1, are")
    return array


def _probability(name: str, value: Numbers) -> Array:
    array = np.asarray(value, float)
    if not ((array >= 0.0) & (array <= 1.0)).all():
        raise BadRequest(f"{name} is {value!r}; numbers from 0 to 1 are needed")
    return array


def _at_least_0(name: str, value: Numbers) -> Array:
    array = np.asarray(value, float)
    if not (array >= 0.0).all():
        raise BadRequest(f"{name} is {value!r}; numbers of 0 or more are needed")
    return array


def _positive(name: str, value: Numbers) -> Array:
    array = np.asarray(value, float)
    if not (array > 0.0).all():
        raise BadRequest(f"{name} is {value!r}; numbers above 0 are needed")
    return array
