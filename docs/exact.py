"""Claims of the theory pages that are counted out or played through, not only derived.

Counted out: every draft, every outcome of every test, with probabilities as fractions, so that "equal" means equal.
Played through: many passes with random numbers from a fixed seed; the standard error is given beside the mean.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline import theory

Law = tuple[Fraction, ...]
Text = tuple[int, ...]
Laws = Callable[[Text], Law]
"""The law of the next token behind a text."""
Survival = Callable[[Sequence[Fraction]], Fraction]
"""From the chances of so many tests in a row, the chance that all of them pass."""
Rest = Callable[[Law, Law], Law]

# -- the rule ----------------------------------------------------------------------------------------------------------


def residual(p: Law, q: Law) -> Law:
    """The law behind a rejection: (p - q)+ / TV."""
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return tuple(one / sum(left) for one in left) if any(left) else p


def distance(p: Law, q: Law) -> Fraction:
    """Total variation."""
    return sum((max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)), Fraction(0))


def independent(chances: Sequence[Fraction]) -> Fraction:
    """A new random number for each test."""
    return math.prod(chances, start=Fraction(1))


def shared(chances: Sequence[Fraction]) -> Fraction:
    """One random number for all tests of a pass, which is a mistake."""
    return min(chances, default=Fraction(1))


def emitted(
    p: Laws,
    q: Laws,
    num_drafted: int,
    *,
    stated: Laws | None = None,
    survive: Survival = independent,
    rest: Rest = residual,
) -> dict[Text, Fraction]:
    """The joint law of the K + 1 tokens that a pass of the standard rule begins, every branch counted.

    A pass that ends early is followed by tokens drawn from p, as later passes would.

    Args:
        q: what guesses are drawn from.
        stated: what the rule is told they were drawn from; q if left out.
        survive: how tests of one pass hang together.
        rest: the law that is drawn from behind a rejection.
    """
    stated, size, found = stated or q, num_drafted + 1, defaultdict[Text, Fraction](Fraction)

    def finish(text: Text, chance: Fraction) -> None:
        if not chance:
            return
        if len(text) == size:
            found[text] += chance
            return
        for y, share in enumerate(p(text)):
            finish((*text, y), chance * share)

    def drafted(text: Text, chance: Fraction, chances: tuple[Fraction, ...]) -> None:
        """All drafts that begin with a text; where it is kept as a whole, and where its next token is rejected."""
        if len(text) == num_drafted:
            finish(text, chance * survive(chances))
            return
        law, said = p(text), stated(text)
        for x, share in enumerate(q(text)):
            if not share:
                continue
            keep = min(Fraction(1), law[x] / said[x]) if said[x] else Fraction(1)
            lost = survive(chances) - survive((*chances, keep))
            for y, other in enumerate(rest(law, said)):
                finish((*text, y), chance * share * lost * other)
            drafted((*text, x), chance * share, (*chances, keep))

    drafted((), Fraction(1), ())
    return dict(found)


def plain(p: Laws, vocab: int, length: int) -> dict[Text, Fraction]:
    """The joint law of so many tokens drawn from p one by one."""
    found: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        found = {(*text, y): c * share for text, c in found.items() for y, share in enumerate(p(text))}
    return {text: chance for text, chance in found.items() if chance}


def joint_distance(one: dict[Text, Fraction], other: dict[Text, Fraction]) -> Fraction:
    """Total variation of two joint laws."""
    return sum((max(one.get(t, Fraction(0)) - other.get(t, Fraction(0)), Fraction(0)) for t in one), Fraction(0))


def all_laws(vocab: int, parts: int) -> Iterator[Law]:
    """Every law whose probabilities are multiples of 1 / parts."""
    for cuts in itertools.combinations_with_replacement(range(parts + 1), vocab - 1):
        edges = (0, *cuts, parts)
        yield tuple(Fraction(b - a, parts) for a, b in itertools.pairwise(edges))


def random_laws(seed: int, vocab: int) -> Laws:
    """A law for every text, by chance, zeros among its probabilities."""

    @cache
    def law(text: Text) -> Law:
        rng = random.Random(f"{seed} {text}")
        weights = [rng.choice((0, 1, 2, 3, 5)) for _ in range(vocab)]
        weights[rng.randrange(vocab)] += 1
        return tuple(Fraction(w, sum(weights)) for w in weights)

    return law


class Counted(NamedTuple):
    """How many cases there were, and in how many of them both sides were equal."""

    cases: int
    equal: int


@cache
def single_position(vocab: int = 3, parts: int = 6) -> tuple[Counted, Counted]:
    """All pairs of laws: the emitted law against p, and the chance of a rejection against TV."""
    laws = list(all_laws(vocab, parts))
    same = rejected = 0
    for p, q in itertools.product(laws, laws):
        kept = sum((b * min(Fraction(1), a / b) for a, b in zip(p, q, strict=True) if b), Fraction(0))
        found = emitted(lambda text, p=p: p, lambda text, q=q: q, 1)  # type: ignore[misc]
        first = tuple(sum((c for t, c in found.items() if t[0] == x), Fraction(0)) for x in range(vocab))
        same += first == p
        rejected += 1 - kept == distance(p, q)
    return Counted(len(laws) ** 2, same), Counted(len(laws) ** 2, rejected)


@cache
def whole_passes(cases: int = 40, vocab: int = 3, num_drafted: int = 2) -> Counted:
    """Joint laws of K + 1 tokens, where each token's law hangs on all before it."""
    same = 0
    for seed in range(cases):
        p, q = random_laws(2 * seed, vocab), random_laws(2 * seed + 1, vocab)
        same += emitted(p, q, num_drafted) == plain(p, vocab, num_drafted + 1)
    return Counted(cases, same)


P: Law = (Fraction(5, 10), Fraction(3, 10), Fraction(1, 10), Fraction(1, 10))
Q: Law = (Fraction(2, 10), Fraction(2, 10), Fraction(4, 10), Fraction(2, 10))
"""The pages' example; their distance is 2/5, so a guess is kept with 3/5, the article's own alpha."""


@cache
def mistakes() -> dict[str, Fraction]:
    """How far from p the example is after the usual slips: total variation of the first three tokens."""
    p: Laws = lambda text: P  # noqa: E731
    q: Laws = lambda text: Q  # noqa: E731
    likeliest = max(range(len(Q)), key=lambda x: Q[x])
    one_hot: Law = tuple(Fraction(int(x == likeliest)) for x in range(len(Q)))
    truth = plain(p, len(P), 3)
    return {
        "none": joint_distance(emitted(p, q, 2), truth),
        "from_p": joint_distance(emitted(p, q, 2, rest=lambda law, said: law), truth),
        "argmax": joint_distance(emitted(p, lambda text: one_hot, 2, stated=q), truth),
        "shared": joint_distance(emitted(p, q, 2, survive=shared), truth),
    }


PASSES, LENGTH = 200_000, 40
"""How many passes are played, and how long texts are."""

# -- played through ----------------------------------------------------------------------------------------------------


class Played(NamedTuple):
    """A mean with its standard error."""

    mean: float
    error: float


@cache
def played_tokens(num_drafted: int, passes: int = PASSES) -> Played:
    """Tokens per pass of the standard rule on the example laws: real drafts, real tests."""
    rng = np.random.default_rng(num_drafted)
    p, q = np.array(P, float), np.array(Q, float)
    if num_drafted == 0:
        return Played(1.0, 0.0)
    drafts = rng.choice(len(q), size=(passes, num_drafted), p=q)
    kept = rng.random(drafts.shape) < (p / q)[drafts]
    tokens = 1 + np.cumprod(kept, axis=1).sum(1)
    return Played(float(tokens.mean()), float(tokens.std() / math.sqrt(passes)))


class SameText(NamedTuple):
    """Texts written with the same noise, with and without drafts."""

    texts: int
    equal: int
    tokens_per_pass: float
    alpha: float
    """How often a guess that was tested was kept."""


@cache
def same_noise(texts: int = 200, length: int = LENGTH, num_drafted: int = 4, vocab: int = 8) -> SameText:
    """The coupled rule on laws that hang on the last token: is it the text of plain decoding?"""
    equal = passes = kept = tested = written = 0
    for seed in range(texts):
        rng = np.random.default_rng(seed)
        p = np.log(rng.dirichlet([0.5] * vocab, size=vocab))
        q = np.log(0.6 * np.exp(p) + 0.4 * rng.dirichlet([0.5] * vocab, size=vocab))
        noise = rng.gumbel(size=(length + num_drafted + 1, vocab))
        alone = [0]
        for t in range(length):
            alone.append(int((p[alone[-1]] + noise[t]).argmax()))
        text = [0]
        while len(text) <= length:
            here, guesses = len(text) - 1, [text[-1]]
            for k in range(num_drafted):
                guesses.append(int((q[guesses[-1]] + noise[here + k]).argmax()))
            passes += 1
            for k, guess in enumerate([*guesses[1:], -1]):
                text.append(int((p[text[-1]] + noise[here + k]).argmax()))
                tested += guess >= 0
                kept += guess == text[-1]
                if guess != text[-1]:
                    break
        equal += text[: length + 1] == alone
        written += len(text) - 1
    return SameText(texts, equal, written / passes, kept / tested)


@cache
def random_pairs(pairs: int = 500) -> npt.NDArray[np.float64]:
    """[pairs, 2]: distance of two random laws, and how often the coupled rule keeps a guess between them."""
    rng, found = np.random.default_rng(5), []
    for _ in range(pairs):
        size = int(rng.choice([2, 3, 5, 10, 40]))
        p, other = rng.dirichlet([float(rng.choice([0.1, 0.3, 1.0]))] * size, size=2)
        q = p + rng.random() * (other - p)
        found.append((float(theory.total_variation(p, q)), float(theory.coupled_acceptance(p, q))))
    return np.array(found)


# -- trees -------------------------------------------------------------------------------------------------------------

TREE: dict[str, float] = {
    "A": 0.55,
    "B": 0.35,
    "AA": 0.5,
    "AB": 0.3,
    "BA": 0.9,
    "BB": 0.1,
    "AAA": 0.6,
    "AAB": 0.3,
    "ABA": 0.5,
    "ABB": 0.2,
    "BAA": 0.8,
    "BAB": 0.1,
    "BBA": 0.5,
    "BBB": 0.5,
}
"""The pages' example: the chance that the target goes on to a node from its parent; a node's name is its path."""


def tokens_of(nodes: Sequence[str]) -> float:
    """Expected tokens of a pass over these nodes of the example."""
    order = sorted(nodes, key=len)
    parents = [order.index(name[:-1]) if len(name) > 1 else -1 for name in order]
    return theory.tokens_of_tree(parents, [TREE[name] for name in order])


def reached(node: str) -> float:
    """The chance that the target comes by a node: the product along its path."""
    return math.prod(TREE[node[: i + 1]] for i in range(len(node)))


def best_first(size: int) -> list[str]:
    """So many nodes, those with the largest products."""
    return sorted(TREE, key=lambda name: (-reached(name), len(name)))[:size]


def likeliest_chain(size: int) -> list[str]:
    """The chain that always goes on with the likeliest child."""
    chain = [""]
    for _ in range(size):
        chain.append(max((n for n in TREE if n[:-1] == chain[-1]), key=lambda n: TREE[n]))
    return chain[1:]


@cache
def best_of_all(size: int) -> tuple[float, int]:
    """The best of all trees with so many nodes, and how many there are."""
    whole = [s for s in itertools.combinations(TREE, size) if all(len(n) == 1 or n[:-1] in s for n in s)]
    return max(tokens_of(nodes) for nodes in whole), len(whole)
