"""The law of the coupled rule. Its noise is continuous, so it is proved by two steps instead of an enumeration:

    the walk over any tree emits the ids of the plain sampler        compared one by one
    the plain sampler draws from p, each time afresh                 chi-squares, of millions of draws

The last part is about speed: how often a coupled draft is kept, against the closed form and draw by draw.

Every statistical check goes through `Budget`: a right sampler fails one with a chance of 5e-9, and there may be at
most 200 of them, so this file raises a false alarm for one choice of seeds out of a million. The seeds are fixed.
Tails so thin are believed only where every cell expects 100 draws or more, which `chi_square` and `rate_tail` demand.
"""

import hashlib
import itertools
import math
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import config as shape_checks
from oracles import processors
from torch import Tensor

from paceline.draws import Draws
from paceline.laws import Law
from paceline.sampling import Sampler, SamplingParams
from paceline.tree import TokenTree
from paceline.verify import Chances, Rule, Verdict, coupled, standard

pytestmark = pytest.mark.slow

LEVEL = 5e-9
"""The chance that a right sampler fails one check."""
CHECKS = 200
"""Most checks in this file: together they stay within 1e-6."""


@pytest.fixture(autouse=True)
def _at_full_speed() -> Iterator[None]:
    """Without shape checks on every call; other tests make the same calls with them."""
    shape_checks.update("jaxtyping_disable", True)
    yield
    shape_checks.update("jaxtyping_disable", False)


class Budget:
    """Judges p-values, and counts how many it has judged."""

    def __init__(self) -> None:
        self.spent = 0

    def allows(self, p_value: float, what: object) -> None:
        self.spent += 1
        assert p_value > LEVEL, f"{what}: chance alone gives this once in {1 / max(p_value, 1e-300):.1e} trials"


@pytest.fixture(scope="module")
def budget() -> Iterator[Budget]:
    found = Budget()
    yield found
    assert found.spent <= CHECKS


# -- statistics --------------------------------------------------------------------------------------------------------


def chi_tail(statistic: float, degrees: int) -> float:
    """The chance of a chi-square this large or larger."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def normal_tail(z: float) -> float:
    """The chance of a standard normal number this far from 0, on either side."""
    return math.erfc(abs(z) / math.sqrt(2))


def chi_square(columns: Sequence[Tensor], law: Tensor) -> float:
    """The p-value of tokens that follow one law, whatever stands beside them in the other columns.

    All of their joint law is known beforehand, so no margin is estimated: k columns over m tokens have m^k - 1
    degrees of freedom. Each row must be a fresh draw: pairs that share a token are no chi-square.
    """
    cells, expected = torch.zeros_like(columns[0]), torch.ones(1, dtype=torch.float64)
    for column in columns:
        cells = cells * len(law) + column
        expected = torch.outer(expected, law.double()).flatten()
    expected = expected / expected.sum() * cells.numel()
    assert float(expected.min()) >= 100
    counts = torch.bincount(cells.flatten(), minlength=len(expected)).double()
    return chi_tail(float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """How often argmax(log p + g) = argmax(log q + g): sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), over the last axis.

    Both choose x when the exponential clock of x, at both rates, rings before all others (Daliri, Musco and Suresh).
    """
    larger = torch.maximum(p[..., None, :] / p[..., :, None], q[..., None, :] / q[..., :, None])
    return (1 / larger.sum(-1)).sum(-1)


def rate_tail(hits: int, trials: int, rate: float) -> float:
    """The p-value of so many hits in independent trials; asks for 100 expected on both sides."""
    variance = trials * rate * (1 - rate)
    assert variance >= 100
    return normal_tail((hits - trials * rate) / math.sqrt(variance))


# -- the noise once more, in numpy, from its description and not from the code -----------------------------------------


def reference_noise(streams: Sequence[tuple[int, int, int]], ids: Sequence[int]) -> np.ndarray:
    """Gumbel noise [streams, ids]; a stream is (seed, sample, position)."""
    digests = b"".join(
        hashlib.blake2b(
            struct.pack("<QQqq", seed % 2**64, sample, position, 0), digest_size=24, person=b"noise"
        ).digest()
        for seed, sample, position in streams
    )
    keys = np.frombuffer(digests, "<u4").reshape(len(streams), 6, 1)
    x = np.array(ids, np.uint32)
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    x = x ^ (x >> np.uint32(14))
    halves = []
    for first in (0, 3):
        part = _folded(x + keys[:, first], 16)
        part = _folded(part * np.uint32(0x21F0AAAD) + keys[:, first + 1], 15)
        halves.append(_folded(part * np.uint32(0xD35A2D97) + keys[:, first + 2], 15).astype(np.int64))
    words = (halves[0] << 22) | (halves[1] >> 9)
    return -np.log(-np.log1p(-np.minimum((words + 0.5) * 2.0**-53, 1 - 2.0**-53)))


def _folded(x: np.ndarray, shift: int) -> np.ndarray:
    signed = x.view(np.int32)
    return (signed ^ (signed >> shift)).view(np.uint32)


def reference_choice(law: Law, stream: tuple[int, int, int]) -> int:
    """argmax of all of a law plus all of its noise; the lowest id of a tie."""
    ids = list(range(law.vocab_size)) if law.ids is None else law.ids.tolist()
    return int(ids[int(np.argmax(law.logits.double().numpy() + reference_noise([stream], ids)[0]))])


# -- the walk over a tree is the plain sampler -------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8, "top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.5, "top_k": 4},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {0: -3.0, 1: 1.0}},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
]
KINDS = ("random", "zeros", "one-hot", "ties", "equal", "near ties", "far")
FILLINGS = ("coupled", "reversed", "repeated", "wrong", "mixed")
Path = tuple[int, ...]
Rows = Callable[[Path], Tensor]


def row_of(kind: str, size: int, seed: object) -> Tensor:
    """Float64 logits, without chance given the arguments."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    x = torch.randn(size, generator=generator, dtype=torch.float64) * 2
    if kind in ("zeros", "one-hot"):
        gone = torch.rand(size, generator=generator) < 0.4 if kind == "zeros" else torch.ones(size, dtype=torch.bool)
        gone[int(torch.randint(size, (1,), generator=generator))] = False
        return x.masked_fill(gone, -math.inf)
    if kind == "ties":
        return x.round()
    if kind == "near ties":
        return x.round() + x * 1e-9
    return x + 1e4 if kind == "far" else x * 0 if kind == "equal" else x


def rows_of(kind: str, size: int, case: int, dtype: torch.dtype, drift: float) -> tuple[Rows, Rows]:
    """The target's and a drafter's logits after each path; a drift of 0 makes them equal, infinity strangers."""

    @cache
    def target(path: Path) -> Tensor:
        return row_of(kind, size, (case, *path)).to(dtype)

    def draft(path: Path) -> Tensor:
        other = row_of("random", size, (-1 - case, *path))
        return other.to(dtype) if drift == math.inf else (target(path).double() + drift * other).to(dtype)

    return target, draft


def grown(pick: random.Random, sampler: Sampler, draft: Rows, position: int, filling: str) -> TokenTree:
    """A tree of random shape whose siblings are the drafter's best in coupled order, or are filled otherwise."""
    nodes = pick.randint(1, 9)
    parents = [-1] + [node - 1 if pick.random() < 0.4 else pick.randrange(node) for node in range(1, nodes)]
    tokens, paths, used = [0], [()], Counter[int]()
    best: dict[int, list[int]] = {}
    for parent in parents[1:]:
        path = paths[parent]
        if parent not in best and filling != "wrong":
            k = parents.count(parent)
            found = sampler.top(draft(path), path, position + len(path), k)
            best[parent] = [token for token, _ in found][:: -1 if filling == "reversed" else 1]
        if filling == "wrong" or (filling == "mixed" and pick.random() < 0.4):
            token = pick.randrange(sampler.vocab_size)
        else:  # more children than candidates, or "repeated": a token twice under one node
            place = used[parent] // 2 if filling == "repeated" else used[parent]
            token = best[parent][place % len(best[parent])]
        used[parent] += 1
        tokens.append(token)
        paths.append((*path, token))
    return TokenTree(torch.tensor(tokens), torch.tensor(parents))


def plain(sampler: Sampler, rows: Rows, stream: tuple[int, int, int], count: int) -> list[int]:
    """Plain decoding, token by token; each choice is compared with the dense sum in numpy."""
    ids: list[int] = []
    for at in range(count):
        law = sampler.law(rows(tuple(ids)))
        token = sampler.draws.choose(law, stream[2] + at)
        assert token == reference_choice(law, (*stream[:2], stream[2] + at))
        ids.append(token)
        sampler.extend([token])
    return ids


def walks(rule: Rule, settings: dict[str, Any], cases: int) -> Counter[str]:
    """What random cases came to: accepted tokens by the tree's filling, and `parted`, `lost` and `stopped` walks.

    The walk judges drafted tokens by their path, plain decoding by what it has emitted; neither may show in the ids.
    """
    pick, params, found = random.Random(str(settings)), SamplingParams(**settings), Counter[str]()
    for case in range(cases):
        size = 5000 if case % 33 == 32 else pick.randint(2, 12)
        filling, kind = FILLINGS[case % len(FILLINGS)], pick.choice(KINDS)
        drift = pick.choice((0.0, 0.7, 3.0, math.inf))
        rows, draft = rows_of(kind, size, case, pick.choice((torch.float64, torch.float32)), drift)
        stream = (pick.choice((case, pick.getrandbits(64))), pick.choice((0, 0, 1, 7)), pick.choice((1, 50, 100_000)))
        sampler = Sampler(params, size, [0], Draws(*stream[:2]))
        tree = grown(pick, sampler, draft, stream[2], filling)

        def law(node: int, sampler: Sampler = sampler, tree: TokenTree = tree, rows: Rows = rows) -> Law:
            path = tuple(tree.ids[at] for at in tree.path(node)[1:])
            return sampler.law(rows(path), path)

        verdict = rule(law, tree, sampler.draws, stream[2])
        ids = [*(tree.ids[node] for node in verdict.path), verdict.token]
        found["parted"] += ids != plain(Sampler(params, size, [0], Draws(*stream[:2])), rows, stream, len(ids))
        ends = [0, *verdict.path]
        found["parted"] += any(child not in tree.children[node] for node, child in itertools.pairwise(ends))
        found["lost"] += any(tree.ids[child] == verdict.token for child in tree.children[ends[-1]])
        if drift == 0.0 and filling == "coupled":  # the best sibling is the target's own choice, down to a leaf
            found["stopped"] += tree.children[ends[-1]] != []
        found[filling] += len(verdict.path)
        found["with twins"] += any(len({tree.ids[kid] for kid in kids}) < len(kids) for kids in tree.children)
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_walk_emits_the_ids_of_the_plain_sampler(settings: dict[str, Any]) -> None:
    """3,100 random cases in all: laws, drafters, trees, seeds, samples, positions; 2 to 12 tokens, or 5,000.

    Nothing that a tree has foreseen is lost, and a drafter that equals the target is kept down to a leaf.
    """
    found = walks(coupled, settings, 310)
    assert found["parted"] == found["lost"] == found["stopped"] == 0
    assert min(found[filling] for filling in FILLINGS) > 5  # trees of every kind took part
    assert sum(found[filling] for filling in FILLINGS) > 150
    assert found["with twins"] > 50


def stands_still(p: Callable[[int], Law], tree: TokenTree, draws: Chances, position: int) -> Verdict:
    """Every node is decided by the first position's noise."""
    found = Verdict([], draws.choose(p(0), position))
    while True:
        kids = tree.children[found.path[-1] if found.path else 0]
        child = next((kid for kid in kids if tree.ids[kid] == found.token), None)
        if child is None:
            return found
        found = Verdict([*found.path, child], draws.choose(p(child), position))


def fresh_last_token(p: Callable[[int], Law], tree: TokenTree, draws: Chances, position: int) -> Verdict:
    """The token after the path is drawn once more."""
    path = coupled(p, tree, draws, position).path
    return Verdict(path, draws.pick(p(path[-1] if path else 0).probs()))


def laws_of_the_root(p: Callable[[int], Law], tree: TokenTree, draws: Chances, position: int) -> Verdict:
    return coupled(lambda node: p(0), tree, draws, position)


@pytest.mark.parametrize("rule", [stands_still, fresh_last_token, laws_of_the_root, standard])
def test_planted_walk_shows(rule: Rule) -> None:
    """The last one follows the target's law exactly, and still writes another text: ids see more than laws do."""
    assert walks(rule, {}, 100)["parted"] > 5


# -- the plain sampler draws from p ------------------------------------------------------------------------------------

V = 151_936
IDS = (0, 1, 77, 1000, 31_999, 65_536, 128_000, V - 1)
SHARES = (0.06, 0.3, 0.02, 0.14, 0.04, 0.225, 0.005, 0.21)
FILTERS: list[dict[str, Any]] = [
    {"top_k": 8},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 1.6, "top_k": 4},
    {"temperature": 0.7, "top_k": 7, "top_p": 0.97, "min_p": 0.02},
]
SEEDS = [*range(50), *range(2**64 - 50, 2**64)]
GRID = (len(SEEDS), 10, 1000)
"""Neighbouring seeds, samples and positions: 1,000,000 draws."""


@pytest.fixture(scope="module")
def grid() -> Tensor:
    """The noise of `IDS` for every (seed, sample, position) of the grid, by the reference."""
    found = [
        reference_noise([(seed, sample, at) for sample in range(GRID[1]) for at in range(GRID[2])], IDS)
        for seed in SEEDS
    ]
    return torch.from_numpy(np.stack(found)).reshape(*GRID, len(IDS))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_plain_sampler_draws_from_the_filtered_law(budget: Budget, grid: Tensor, filters: dict[str, Any]) -> None:
    """A million draws at one row of float32 logits, against the law that `transformers` makes of them.

    `choose` itself makes every 59th of the million, which is 101,696 for all settings, because six million calls of it
    would take minutes; the reference makes them all, and where both draw they agree every time. Had they differed in
    one draw of 1,200, the 16,949 of one setting would have missed it with a chance of 1e-6.
    """
    params = SamplingParams(seed=0, **filters)
    row = torch.randn(V, generator=torch.Generator().manual_seed(3)) - 40
    row[list(IDS)] = torch.tensor(SHARES).log()
    law = Sampler(params, V, [0]).law(row)
    assert law.ids is not None
    assert law.logits.dtype == torch.float32
    kept = [IDS.index(token) for token in law.ids.tolist()]
    chosen = (grid[..., kept] + law.logits.double()).argmax(-1)

    some = range(FILTERS.index(filters), math.prod(GRID), 59)
    tokens = []
    for at in some:
        seed, sample, position = at // (GRID[1] * GRID[2]), at // GRID[2] % GRID[1], at % GRID[2]
        tokens.append(Draws(SEEDS[seed], sample).choose(law, position))
    assert torch.equal(torch.tensor(tokens), law.ids[chosen.flatten()[some.start :: some.step]])

    x = row[None]
    for processor in processors(params, 1):
        x = processor(torch.zeros(1, 1, dtype=torch.int64), x)
    want = x[0].double().softmax(0)
    assert float(want[law.ids].sum()) == pytest.approx(1, abs=1e-12)
    budget.allows(chi_square([chosen], want[law.ids]), filters)
    wrong = want[law.ids]
    wrong[wrong.argmax()] -= 0.005
    wrong[wrong.argmin()] += 0.005
    assert chi_square([chosen], wrong) < LEVEL  # what the test can see: one draw in 200 that went to another token


def test_draws_of_the_sampler_do_not_know_of_their_neighbours(budget: Budget, grid: Tensor) -> None:
    """Pairs and triples of neighbouring seeds, samples and positions, each draw in one pair and one triple."""
    law = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1], dtype=torch.float64)
    chosen = (grid[..., 1:6] + law.log()).argmax(-1)
    for axis, name in enumerate(("seeds", "samples", "positions")):
        for width in (2, 3):
            whole = chosen.movedim(axis, 0)[: GRID[axis] // width * width]
            columns = [whole[at::width].flatten() for at in range(width)]
            budget.allows(chi_square(columns, law), (name, width))


def test_noise_of_a_position_draws_from_the_law_at_every_id(budget: Budget) -> None:
    """The package's vectorised noise: 125 positions of 128,000 ids, cut into a million laws over 16 tokens.

    Once the 16 are neighbours, once they lie 8,000 ids apart. The rarest has 1 draw in 5,000.
    """
    shares = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.08, 0.07, 0.05, 0.04, 0.03, 0.015, 0.008, 0.004, 0.0015, 0.001])
    law = torch.cat([shares, torch.tensor([0.0003, 0.0002])]).double()
    near, far = [], []
    for position in range(125):
        noise = Draws(17).noise(position, vocab_size=16 * 8000)
        near.append((noise.view(-1, 16) + law.log()).argmax(1))
        far.append((noise.view(16, -1) + law.log()[:, None]).argmax(0))
    for name, chosen in (("near", near), ("far", far)):
        budget.allows(chi_square([torch.cat(chosen)], law), name)


# -- no two draws know of each other, and a planted reuse shows --------------------------------------------------------

TOKENS = torch.tensor([0.20, 0.19, 0.18, 0.16, 0.14, 0.13], dtype=torch.float64)
WIDTH = 6 * 4096
"""Token ids asked of each stream: 4,096 draws from a law over 6 tokens."""


def six_seeds(kind: type[Draws], base: int) -> list[Tensor]:
    return [kind(base + at).noise(5, vocab_size=WIDTH) for at in range(6)]


def six_samples(kind: type[Draws], base: int) -> list[Tensor]:
    return [kind(base, at).noise(5, vocab_size=WIDTH) for at in range(6)]


def six_positions(kind: type[Draws], base: int) -> list[Tensor]:
    return [kind(base).noise(5 + at, vocab_size=WIDTH) for at in range(6)]


def seeds_against_samples(kind: type[Draws], base: int) -> list[Tensor]:
    return [kind(base + at, 5 - at).noise(5, vocab_size=WIDTH) for at in range(6)]


def seeds_against_positions(kind: type[Draws], base: int) -> list[Tensor]:
    return [kind(base + at).noise(10 - at, vocab_size=WIDTH) for at in range(6)]


def six_ids(kind: type[Draws], base: int) -> list[Tensor]:
    return list(kind(base).noise(5, vocab_size=6 * WIDTH).view(-1, 6).T)


def noise_and_draft_noise(kind: type[Draws], base: int) -> list[Tensor]:
    """The noise of a position and two draft noises of the pass with the same number; then the next position's."""
    draws, found = kind(base), []
    for at in range(2):
        found.append(draws.noise(at, vocab_size=WIDTH))
        found += [draws.draft_noise(WIDTH) for _ in range(2)]
        draws.next_pass()
    return found


NEIGHBOURS: dict[str, Callable[[type[Draws], int], list[Tensor]]] = {
    "seeds": six_seeds,
    "samples": six_samples,
    "positions": six_positions,
    "seeds against samples": seeds_against_samples,
    "seeds against positions": seeds_against_positions,
    "ids": six_ids,
    "draft noise": noise_and_draft_noise,
}


def dependence(kind: type[Draws], neighbours: str, rounds: int) -> dict[str, float]:
    """The p-values of six neighbouring streams: drawn tokens in pairs and in triples, and serial correlation.

    The rounds differ in their seeds, 1000 apart. The correlation is that of the uniforms behind the noise, at the
    distances 1, 2 and 3: three independent normal numbers, squared and added.
    """
    noise = torch.stack([torch.stack(NEIGHBOURS[neighbours](kind, 1000 * at)) for at in range(rounds)], 1)
    chosen = (noise.view(6, rounds, -1, 6) + TOKENS.log()).argmax(-1)
    uniform = (-(-noise).exp()).exp().sub_(0.5).mul_(math.sqrt(12))
    products = [(uniform[:-far] * uniform[far:]).flatten() for far in (1, 2, 3)]
    return {
        "pairs": chi_square([chosen[0::2].flatten(), chosen[1::2].flatten()], TOKENS),
        "triples": chi_square([chosen[at::3].flatten() for at in range(3)], TOKENS),
        "serial": chi_tail(sum(float(one.sum()) ** 2 / one.numel() for one in products), 3),
    }


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_streams_are_independent(budget: Budget, neighbours: str) -> None:
    """196,608 triples, 294,912 pairs and millions of uniforms for each kind of neighbour."""
    for name, p_value in dependence(Draws, neighbours, 24).items():
        budget.allows(p_value, (neighbours, name))


class OnePosition(Draws):
    """Noise that forgets the position: every token of a text is drawn with the same numbers."""

    def noise(self, position: int, *args: Any, **kwargs: Any) -> Tensor:
        return super().noise(0, *args, **kwargs)


class OneSample(Draws):
    """Noise that forgets the sample: all texts of a request are the same."""

    def __init__(self, seed: int, sample: int = 0) -> None:
        super().__init__(seed)


class HalfTheSeeds(Draws):
    """The last bit of the seed is lost."""

    def __init__(self, seed: int, sample: int = 0) -> None:
        super().__init__(seed // 2, sample)


class SeedPlusSample(Draws):
    """The second sample of a seed is the first one of the next seed."""

    def __init__(self, seed: int, sample: int = 0) -> None:
        super().__init__(seed + sample)


class SeedPlusPosition(Draws):
    """The text of the next seed is this one's, moved by a token."""

    def noise(self, position: int, *args: Any, **kwargs: Any) -> Tensor:
        return Draws(self.seed + position, self.sample).noise(0, *args, **kwargs)


class OneNoise(Draws):
    """A drafter that is meant to be independent gets the noise which decides the text."""

    def draft_noise(self, vocab_size: int, device: Any = None) -> Tensor:
        return self.noise(self._pass, vocab_size=vocab_size)


class EveryOtherId(Draws):
    """Ids 2k and 2k + 1 share their noise."""

    def noise(self, position: int, ids: Any = None, vocab_size: int | None = None, device: Any = None) -> Tensor:
        assert vocab_size is not None
        return super().noise(position, torch.arange(vocab_size) // 2)


@pytest.mark.parametrize(
    ("planted", "shows"),
    [
        (OnePosition, ["positions", "draft noise"]),  # two positions are among the latter's streams, far apart
        (OneSample, ["samples"]),
        (HalfTheSeeds, ["seeds"]),
        (SeedPlusSample, ["seeds against samples"]),
        (SeedPlusPosition, ["seeds against positions"]),
        (OneNoise, ["draft noise"]),
        (EveryOtherId, ["ids"]),
    ],
)
def test_planted_reuse_shows(budget: Budget, planted: type[Draws], shows: list[str]) -> None:
    """Each reuse is seen where it is, by every statistic, and nowhere else: the test says which of them it was."""
    assert max(dependence(planted, shows[0], 6).values()) < 1e-30
    for neighbours in shows[1:]:
        assert min(dependence(planted, neighbours, 6).values()) < 1e-30
    if planted is not EveryOtherId:  # whose draws from a law are wrong everywhere
        for neighbours in NEIGHBOURS.keys() - shows:
            for name, p_value in dependence(planted, neighbours, 6).items():
                budget.allows(p_value, (planted, neighbours, name))


class OnePurpose(Draws):
    """accept, pick and draft read one stream, each from its beginning."""

    def _uniform(self, purpose: str) -> float:
        digest = self._digest("accept", self._pass, self._next(purpose))
        return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def purposes(kind: type[Draws]) -> dict[str, float]:
    """The p-values of 4,000 passes that accept, pick, draft and choose at the same counters, with even odds.

    All four in one table of 16 cells; and each stream with itself, one call later and one pass later.
    """
    draws, half = kind(23), torch.full((2,), 1 / 2, dtype=torch.float64)
    told = []
    for at in range(4000):
        streams = [(int(draws.accept(1 / 2)), draws.pick(half), draws.draft(half)) for _ in range(2)]
        told.append([*streams[0], draws.choose(Law(None, half.log(), 2), at), *streams[1]])
        draws.next_pass()
    columns = torch.tensor(told).T
    found = {"all": chi_square(list(columns[:4]), half)}
    for at, name in enumerate(("accept", "pick", "draft", "choose")):
        found[f"{name}, next pass"] = chi_square([columns[at, 0::2], columns[at, 1::2]], half)
        if name != "choose":
            found[f"{name}, next call"] = chi_square([columns[at], columns[4 + at]], half)
    return found


def test_streams_of_different_purposes_are_independent(budget: Budget) -> None:
    for name, p_value in purposes(Draws).items():
        budget.allows(p_value, name)
    assert purposes(OnePurpose)["all"] < 1e-30


# -- how often a draft is kept -----------------------------------------------------------------------------------------


def random_law(generator: torch.Generator, *shape: int) -> Tensor:
    law = torch.rand(*shape, generator=generator, dtype=torch.float64) ** 2 + 1e-9
    return law / law.sum(-1, keepdim=True)


def test_closed_form_of_acceptance_lies_between_its_bounds() -> None:
    """(1 - TV)/(1 + TV) <= acceptance <= 1 - TV, which no draft of one token can pass, for 30,000 pairs of laws."""
    generator = torch.Generator().manual_seed(1)
    for size in (2, 3, 5, 8, 12, 30):
        p, q = random_law(generator, 5000, size), random_law(generator, 5000, size)
        rate, overlap = acceptance(p, q), torch.minimum(p, q).sum(-1)
        assert bool((rate >= overlap / (2 - overlap) - 1e-12).all())
        assert bool((rate <= overlap + 1e-12).all())
        torch.testing.assert_close(acceptance(p, p), torch.ones(5000, dtype=torch.float64))
        if size == 2:  # one logistic number decides both, so that nothing is lost
            torch.testing.assert_close(rate, overlap)


def test_a_single_coupled_draft_is_kept_as_often_as_the_closed_form_says(budget: Budget) -> None:
    """60 random pairs of laws, 100,000 draws each: every rate within 0.01, and all of them together by a chi-square.

    0.01 is 6.3 standard deviations at the least, 3e-10 by chance: 2e-8 for all 60, the chance of four checks.
    """
    generator, pick = torch.Generator().manual_seed(2), random.Random(2)
    squares, pairs = 0.0, 0
    while pairs < 60:
        size = pick.randint(3, 7)
        p, q = random_law(generator, size), random_law(generator, size)
        rate, overlap = float(acceptance(p, q)), float(torch.minimum(p, q).sum())
        if not 0.1 < rate < 0.9:
            continue
        noise = Draws(pairs).noise(9, vocab_size=size * 100_000).view(-1, size)
        found = int(((noise + p.log()).argmax(-1) == (noise + q.log()).argmax(-1)).sum()) / 100_000
        assert found == pytest.approx(rate, abs=0.01)
        assert found > overlap / (2 - overlap) - 0.01
        squares += (found - rate) ** 2 * 100_000 / (rate * (1 - rate))
        pairs += 1
    budget.spent += 4
    budget.allows(chi_tail(squares, 60), "60 rates")


@pytest.mark.parametrize("siblings", [1, 2, 4])
def test_coupled_siblings_are_kept_draw_by_draw_as_in_plain_torch(budget: Budget, siblings: int) -> None:
    """Sampler, tree and rule against topk of log q + g and argmax of log p + g, with the reference's noise.

    Nothing differs in 1,000 draws, neither a sibling nor its place nor what is kept. One is kept as often as the
    closed form says, several more often.
    """
    generator, draws = torch.Generator().manual_seed(3), 50
    kept = expected = variance = 0.0
    for trial in range(20):
        p, q = random_law(generator, 8), random_law(generator, 8)
        streams = [(trial, at % 3, 40 + at) for at in range(draws)]
        noise = torch.from_numpy(reference_noise(streams, range(8)))
        best = (noise + q.log()).topk(siblings).indices
        token = (noise + p.log()).argmax(-1)
        for at, (seed, sample, position) in enumerate(streams):
            sampler = Sampler(SamplingParams(), 8, [0], Draws(seed, sample))
            drafted = [one for one, _ in sampler.top(q.log(), [], position, siblings)]
            assert drafted == best[at].tolist()
            tree = TokenTree.from_paths(0, [[one] for one in drafted])
            law = sampler.law(p.log())
            verdict = coupled(lambda _, law=law: law, tree, sampler.draws, position)
            if int(token[at]) in drafted:
                assert verdict.path == [1 + drafted.index(int(token[at]))]
                assert tree.ids[verdict.path[0]] == int(token[at])
            else:
                assert verdict == ([], int(token[at]))
            kept += len(verdict.path)
        rate = float(acceptance(p, q))
        expected, variance = expected + draws * rate, variance + draws * rate * (1 - rate)
    z = (kept - expected) / math.sqrt(variance)
    if siblings == 1:
        assert variance >= 100
        budget.allows(normal_tail(z), "one sibling, 20 pairs of laws")
    else:
        assert z > 7


def test_a_drafter_that_asks_with_its_own_ids_loses_the_coupling_and_is_found(budget: Budget) -> None:
    """Its tokens are 0 to 5 to itself and lie far apart in the target's vocabulary; 1,500 passes of the real rule.

    With target ids the closed form holds. With its own ids the draft is a stranger to the target's noise and is kept
    with sum_x p(x) q(x) only, and the very check that passed before refuses it. The text is the same either way.
    """
    ids = torch.tensor([900, 7000, 7001, 42_000, 99_999, 151_000])
    p = torch.tensor([0.35, 0.25, 0.15, 0.1, 0.1, 0.05], dtype=torch.float64)
    q = torch.tensor([0.3, 0.2, 0.25, 0.05, 0.05, 0.15], dtype=torch.float64)
    law, trials, hits, texts = Law(ids, p.log(), V), 1500, Counter[str](), Counter[str]()
    for seed in range(trials):
        draws = Draws(seed)
        told = set()
        for name, noise in (("target ids", draws.noise(3, ids)), ("own ids", draws.noise(3, vocab_size=6))):
            drafted = int(ids[int((q.log() + noise).argmax())])
            verdict = coupled(lambda node: law, TokenTree.chain(0, [drafted]), draws, 3)
            hits[name] += len(verdict.path)
            told.add(drafted if verdict.path else verdict.token)
        texts["same"] += len(told) == 1
    closed, chance = float(acceptance(p, q)), float((p * q).sum())
    budget.allows(rate_tail(hits["target ids"], trials, closed), "target ids")
    budget.allows(rate_tail(hits["own ids"], trials, chance), "own ids")
    assert rate_tail(hits["own ids"], trials, closed) < 1e-30
    assert closed > 0.6 > 0.3 > chance
    assert texts["same"] == trials
