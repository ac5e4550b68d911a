"""The rules, proved by enumeration: every draft, every accept and every pick, with its probability."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from jaxtyping import config as shape_checks

from paceline.errors import BadLogits, IncompatibleDrafter
from paceline.sampling import Draws, Law, Sampler, SamplingParams
from paceline.tree import Drawn, TokenTree
from paceline.verify import RULES, Verdict, block, coupled, standard

Path = tuple[int, ...]
Table = Callable[[Path], torch.Tensor]
Laws = Callable[[int], Law]


@pytest.fixture
def at_full_speed() -> Iterator[None]:
    """Without shape checks on every call; other tests make the same calls with them."""
    shape_checks.update("jaxtyping_disable", True)
    yield
    shape_checks.update("jaxtyping_disable", False)


# -- the walker: a Draws that takes every branch -----------------------------------------------------------------------


class Scripted:
    """Stands for `Draws`: answers from a script, notes each branching point, and takes the first branch beyond it."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.open, self.weight = script, list[int](), list[int](), 1.0

    def _branch(self, weights: list[float]) -> int:
        live = [at for at, weight in enumerate(weights) if weight > 0.0]
        turn = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append(turn)
        self.open.append(len(live))
        self.weight *= weights[live[turn]]
        return live[turn]

    def accept(self, probability: float) -> bool:
        assert -1e-12 <= probability <= 1 + 1e-12
        return self._branch([probability, 1.0 - probability]) == 0

    def pick(self, law: torch.Tensor) -> int:
        assert float(law.sum()) == pytest.approx(1, abs=1e-12)
        return self._branch(law.tolist())

    def choose(self, law: Law, position: int) -> int:
        raise AssertionError("only the coupled rule chooses by noise")


def outcomes(walk: Callable[[Scripted], Verdict]) -> Iterator[tuple[float, Verdict]]:
    """Every way a walk can go, with its probability."""
    script: list[int] = []
    while True:
        draws = Scripted(script)
        verdict = walk(draws)
        yield draws.weight, verdict
        script = draws.taken
        while script and script[-1] + 1 == draws.open[len(script) - 1]:
            script = script[:-1]
        if not script:
            return
        script[-1] += 1


def drafts(shape: list[int], drawn: Drawn, q: Table) -> Iterator[tuple[float, list[int]]]:
    """Every filling of a tree's shape (parent of each node) with tokens, with its probability under the label."""
    tokens = [0] * len(shape)
    paths: list[Path] = [()] * len(shape)

    def fill(node: int, weight: float) -> Iterator[tuple[float, list[int]]]:
        if node == len(shape):
            yield weight, list(tokens)
            return
        parent = shape[node]
        law = q(paths[parent]).clone()
        older = [tokens[other] for other in range(1, node) if shape[other] == parent]
        if drawn is Drawn.FIXED:  # the likeliest ones that are left
            law[older] = -1.0
            law = torch.nn.functional.one_hot(law.argmax(), law.shape[0]).double()
        elif drawn is Drawn.DISTINCT:
            law[older] = 0.0
            law = law / law.sum()
        for token, share in enumerate(law.tolist()):
            if share > 0.0:
                tokens[node], paths[node] = token, (*paths[parent], token)
                yield from fill(node + 1, weight * share)

    yield from fill(1, 1.0)


def emitted(
    rule: Callable[..., Verdict], shape: list[int], drawn: Drawn, p: Table, q: Table, size: int
) -> tuple[dict[Path, float], float]:
    """The exact law of the next max-depth + 1 tokens when one pass is verified, and the mean number accepted."""
    starts: dict[Path, float] = defaultdict(float)
    accepted = 0.0
    length = 1 + max(TokenTree(torch.zeros(len(shape), dtype=torch.int64), torch.tensor(shape)).depth)
    for weight, tokens in drafts(shape, drawn, q):
        bare = TokenTree(torch.tensor(tokens), torch.tensor(shape))
        paths = [tuple(tokens[at] for at in bare.path(node)[1:]) for node in range(len(shape))]
        rows = None if drawn is Drawn.FIXED else torch.stack([q(path) for path in paths])
        tree = TokenTree(bare.tokens, bare.parents, drawn, rows)
        laws = [Law(None, p(path).log(), size) for path in paths]
        for share, verdict in outcomes(lambda draws, tree=tree, laws=laws: rule(laws.__getitem__, tree, draws, 0)):
            accepted += weight * share * len(verdict.path)
            starts[(*(tokens[node] for node in verdict.path), verdict.token)] += weight * share
    strings: dict[Path, float] = defaultdict(float)
    for start, weight in starts.items():  # completed as plain decoding would
        for rest in itertools.product(range(size), repeat=length - len(start)):
            strings[(*start, *rest)] += weight * plain(p, (*start, *rest), len(start))
    return strings, accepted


def plain(p: Table, string: Path, after: int = 0) -> float:
    return math.prod(float(p(string[:at])[string[at]]) for at in range(after, len(string)))


def table(seed: int, size: int, zeros: bool = False) -> Table:
    """Random laws for every path, some tokens impossible if asked."""
    rows: dict[Path, torch.Tensor] = {}

    def law(path: Path) -> torch.Tensor:
        if path not in rows:
            generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
            row = torch.rand(size, generator=generator, dtype=torch.float64) ** 2
            if zeros:
                row[int(torch.randint(size, (1,), generator=generator))] = 0.0
            rows[path] = row / row.sum()
        return rows[path]

    return law


def distance(strings: dict[Path, float], p: Table, size: int) -> float:
    """Total variation between an emitted law and the target's."""
    length = len(next(iter(strings)))
    every = itertools.product(range(size), repeat=length)
    return sum(abs(strings.get(string, 0.0) - plain(p, string)) for string in every) / 2


SHAPES = {
    "chain of 1": [-1, 0],
    "chain of 3": [-1, 0, 1, 2],
    "two children": [-1, 0, 0],
    "three children": [-1, 0, 0, 0],
    "a chain beside a leaf": [-1, 0, 1, 0],
    "two by two": [-1, 0, 0, 1, 1],
    "a twig under each": [-1, 0, 0, 1, 2],
}
CASES = [
    (shape, drawn, size)
    for shape in SHAPES
    for drawn in Drawn
    for size in (2, 3, 5)
    if not (drawn is Drawn.DISTINCT and size < max(SHAPES[shape].count(parent) for parent in SHAPES[shape]))
    if size < 5 or len(SHAPES[shape]) < 4
]


@pytest.mark.parametrize(("shape", "drawn", "size"), CASES)
@pytest.mark.parametrize("rule", ["block", "standard"])
def test_emitted_law_is_the_targets(rule: str, shape: str, drawn: Drawn, size: int) -> None:
    for seed, zeros in ((1, False), (2, size > 2))[: 1 if len(SHAPES[shape]) > 4 else 2]:
        p, q = table(seed, size, zeros), table(100 + seed, size)
        strings, _ = emitted(RULES[rule], SHAPES[shape], drawn, p, q, size)
        assert sum(strings.values()) == pytest.approx(1, abs=1e-12)
        assert distance(strings, p, size) < 1e-12


@pytest.mark.usefixtures("at_full_speed")
def test_vocabulary_of_four_and_a_point_mass() -> None:
    """One-hot p (temperature 0) and one-hot q are laws like any other."""
    p, q = table(5, 4), table(6, 4)
    point: Table = lambda path: torch.nn.functional.one_hot(torch.tensor(len(path) % 4), 4).double()  # noqa: E731
    for rule in (block, standard):
        for target, draft in ((point, q), (p, point), (point, point)):
            strings, _ = emitted(rule, SHAPES["a twig under each"], Drawn.IID, target, draft, 4)
            assert distance(strings, target, 4) < 1e-12


def test_toy_of_the_block_paper() -> None:
    """Sun et al., section 3: 10/9 tokens accepted token by token, 11/9 by block."""
    p: Table = lambda path: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)  # noqa: E731
    q: Table = lambda path: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)  # noqa: E731
    _, by_token = emitted(standard, [-1, 0, 1], Drawn.IID, p, q, 2)
    _, by_block = emitted(block, [-1, 0, 1], Drawn.IID, p, q, 2)
    assert by_token == pytest.approx(10 / 9, abs=1e-12)
    assert by_block == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.usefixtures("at_full_speed")
@pytest.mark.parametrize("drawn", Drawn)
@pytest.mark.parametrize("shape", ["chain of 3", "two children", "two by two", "a chain beside a leaf"])
def test_block_never_accepts_less_than_standard(shape: str, drawn: Drawn) -> None:
    gains = []
    for seed in range(2):
        p, q = table(seed, 3), table(50 + seed, 3)
        _, by_token = emitted(standard, SHAPES[shape], drawn, p, q, 3)
        _, by_block = emitted(block, SHAPES[shape], drawn, p, q, 3)
        gains.append(by_block - by_token)
    assert min(gains) > -1e-12
    if drawn is not Drawn.FIXED and shape != "two children":
        assert max(gains) > 1e-3
    else:
        assert max(gains) < 1e-12  # a draft without chance has nothing to gain, nor has a single level


# -- planted bugs: each slip that others have shipped must show --------------------------------------------------------


def chain_rule(
    keep_share: Callable[[float, float], float] | None = None, ordinary_residual: bool = False, stop_early: bool = False
) -> Callable[..., Verdict]:
    """Block verification on a chain as the paper's text has it, with one of its known slips planted."""

    def rule(p: Laws, tree: TokenTree, draws: Scripted, position: int) -> Verdict:
        assert tree.q is not None
        depth = tree.num_nodes - 1
        laws = [p(node).probs() for node in range(depth + 1)]
        weights, left = [1.0], []
        for node in range(depth):
            token = tree.ids[node + 1]
            left.append((weights[node] * laws[node] - tree.q[node]).clamp(min=0))
            weights.append(min(1.0, weights[node] * float(laws[node][token] / tree.q[node][token])))
        best = 0
        for node in range(1, depth + 1):
            share = weights[node]
            if node < depth and keep_share is None:
                mass = float(left[node].sum())
                share = mass / (mass + 1 - share) if mass + 1 - share > 0 else 1.0
            if draws.accept(share):
                best = node
            elif stop_early:
                break
        if best == depth:
            return Verdict(list(range(1, depth + 1)), draws.pick(laws[depth]))
        rest = (laws[best] - tree.q[best]).clamp(min=0) if ordinary_residual else left[best]
        rest = rest / rest.sum() if float(rest.sum()) > 0 else laws[best]
        return Verdict(list(range(1, best + 1)), draws.pick(rest))

    return rule


def sibling_rule(
    residual: bool = True, renormalise_q: bool = True, soft_residual: bool = False, keep_mass: bool = False
) -> Callable[..., Verdict]:
    """Recursive rejection with one of its known slips planted; `keep_mass` is for children that are point masses."""

    def rule(p: Laws, tree: TokenTree, draws: Scripted, position: int) -> Verdict:
        path: list[int] = []
        while True:
            node = path[-1] if path else 0
            law = p(node).probs()
            q = None if tree.q is None else tree.q[node].clone()
            for child in tree.children[node]:
                token = tree.ids[child]
                if draws.accept(min(1.0, float(law[token] / (1.0 if q is None else q[token])))):
                    path.append(child)
                    break
                if q is None:
                    law = law.clone()
                    law[token] = law[token] if keep_mass else 0.0
                    law = law / law.sum()
                    continue
                if residual:
                    rest = (law - q).clamp(min=0)
                    law = rest / rest.sum() if float(rest.sum()) > 0 else law
                    law = rest.softmax(0) if soft_residual else law
                if tree.drawn is Drawn.DISTINCT:
                    q[token] = 0.0
                    q = q / q.sum() if renormalise_q and float(q.sum()) > 0 else q
            else:
                return Verdict(path, draws.pick(law))

    return rule


MUTANTS = {
    "block: stops at the first failure": (chain_rule(stop_early=True), "chain of 3", Drawn.IID),
    "block: h = w everywhere": (chain_rule(keep_share=lambda w, s: w), "chain of 3", Drawn.IID),
    "block: (p - q)+ in place of (w p - q)+": (chain_rule(ordinary_residual=True), "chain of 3", Drawn.IID),
    "no residual: p once more": (sibling_rule(residual=False), "chain of 1", Drawn.IID),
    "softmax of the residual": (sibling_rule(soft_residual=True), "chain of 1", Drawn.IID),
    "q not renormalised between siblings": (sibling_rule(renormalise_q=False), "three children", Drawn.DISTINCT),
    "a refused point mass left in p": (sibling_rule(keep_mass=True), "two children", Drawn.FIXED),
}


@pytest.mark.usefixtures("at_full_speed")
def test_the_models_of_the_planted_bugs_are_right_without_them() -> None:
    p, q = table(3, 4), table(4, 4)
    for rule, shape, drawn in (
        (chain_rule(), "chain of 3", Drawn.IID),
        (sibling_rule(), "three children", Drawn.DISTINCT),
        (sibling_rule(), "two children", Drawn.FIXED),
    ):
        strings, accepted = emitted(rule, SHAPES[shape], drawn, p, q, 4)
        assert distance(strings, p, 4) < 1e-12
        ours = block if shape == "chain of 3" else standard
        assert accepted == pytest.approx(emitted(ours, SHAPES[shape], drawn, p, q, 4)[1], abs=1e-12)


@pytest.mark.usefixtures("at_full_speed")
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_shows(name: str) -> None:
    rule, shape, drawn = MUTANTS[name]
    found = [
        distance(emitted(rule, SHAPES[shape], drawn, table(seed, 3), table(70 + seed, 3), 3)[0], table(seed, 3), 3)
        for seed in range(5)
    ]
    assert max(found) > 1e-3


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_wrong_q_shows(rule: str) -> None:
    """The drafter draws at temperature 1/2 and reports its raw law: nothing but enumeration would see it this small."""
    p, q = table(8, 3), table(9, 3)
    sharp: Table = lambda path: q(path) ** 2 / (q(path) ** 2).sum()  # noqa: E731

    def misled(p: Laws, tree: TokenTree, draws: Scripted, position: int) -> Verdict:
        paths = [tuple(tree.ids[at] for at in tree.path(node)[1:]) for node in range(tree.num_nodes)]
        return RULES[rule](
            p, TokenTree(tree.tokens, tree.parents, tree.drawn, torch.stack([q(path) for path in paths])), draws, 0
        )

    strings, _ = emitted(misled, SHAPES["chain of 3"], Drawn.IID, p, sharp, 3)
    assert distance(strings, p, 3) > 1e-3


# -- edges -------------------------------------------------------------------------------------------------------------


def law_of(*probs: float) -> Law:
    return Law(None, torch.tensor(probs, dtype=torch.float64).log(), len(probs))


class Stubborn(Scripted):
    """Refuses whatever is not certain: the uniform draw is always 0.9999999."""

    def __init__(self) -> None:
        super().__init__([])

    def accept(self, probability: float) -> bool:
        return probability > 0.9999999


def tree_of(tokens: list[int], parents: list[int], drawn: Drawn, q: list[float] | None) -> TokenTree:
    rows = None if q is None else torch.tensor([q] * len(tokens), dtype=torch.float64)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), drawn, rows)


def test_transformers_28508() -> None:
    """Rejected drafts: the residual is divided by its sum, and a residual without mass falls back to p."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]], dtype=torch.float64)
    for rule, expected in ((block, p), (standard, p), (sibling_rule(soft_residual=True), [0.321, 0.390, 0.290])):
        strings, _ = emitted(rule, [-1, 0], Drawn.IID, lambda _: p, lambda _: q, 3)
        first = [sum(share for string, share in strings.items() if string[0] == token) for token in range(3)]
        assert first == pytest.approx([float(share) for share in expected], abs=1e-12 if expected is p else 1e-3)
    for rule in (block, standard):
        for same in ([0.5, 0.3, 0.2], [0.0, 1.0, 0.0]):
            for drawn in (Drawn.IID, Drawn.DISTINCT):
                near = [share + (1e-9 if at == 0 else -1e-9 if at == 1 else 0) for at, share in enumerate(same)]
                for draft in (same, [max(share, 0.0) for share in near]):
                    tree = tree_of([0, 1, 0], [-1, 0, 1], drawn, draft)
                    verdict = rule(lambda _, same=same: law_of(*same), tree, Stubborn(), 0)
                    assert same[verdict.token] > 0
                    assert all(same[tree.ids[node]] > 0 for node in verdict.path)


def test_transformers_47932() -> None:
    """q is the law the draft was drawn from, after its own top-k: with that, any q gives p, even a disjoint one."""
    filtered = torch.tensor([0.0, 0.0, 3 / 7, 4 / 7], dtype=torch.float64)
    raw = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for p in ([0.4, 0.3, 0.2, 0.1], [4 / 7, 3 / 7, 0.0, 0.0]):
        target = torch.tensor(p, dtype=torch.float64)
        for rule in (block, standard):
            for q in (filtered, filtered.bfloat16(), (raw**2 / (raw**2).sum()).bfloat16()):
                draft = q.double() / q.double().sum()
                strings, accepted = emitted(rule, [-1, 0], Drawn.IID, lambda _, t=target: t, lambda _, d=draft: d, 4)
                first = [sum(share for string, share in strings.items() if string[0] == at) for at in range(4)]
                assert first == pytest.approx(p, abs=1e-12)
                if p[2] == 0.0 and q is filtered:
                    assert accepted == 0.0


def test_openvino_2331() -> None:
    """A looked-up token is a point mass: kept with p(x), and the target's row is left as it was."""
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    for rule in (block, standard):
        shares = [0.0] * 4
        for share, verdict in outcomes(
            lambda draws, rule=rule: rule(lambda _: law_of(*uniform.tolist()), TokenTree.chain(0, [2]), draws, 0)
        ):
            shares[2 if verdict.path else verdict.token] += share
        assert shares == pytest.approx([0.25] * 4, abs=1e-12)
    row = torch.randn(4, dtype=torch.float64)
    before = row.clone()
    sampler = Sampler(SamplingParams(seed=1), 4, [0])
    for rule in RULES.values():
        rule(lambda _: sampler.law(row), TokenTree.chain(0, [2]), sampler.draws, 1)
        rule(lambda _: sampler.law(row), tree_of([0, 2, 1], [-1, 0, 0], Drawn.FIXED, None), sampler.draws, 1)
    assert torch.equal(row, before)


def test_eagle_183() -> None:
    """Top-k siblings are point masses, tried in turn; a token listed twice changes nothing."""
    p = [0.5, 0.3, 0.15, 0.05]
    for tokens in ([9, 0, 1], [9, 0, 0, 1]):
        tree = tree_of(tokens, [-1] + [0] * (len(tokens) - 1), Drawn.FIXED, None)
        for rule in (block, standard):
            shares = [0.0] * 4
            for share, verdict in outcomes(lambda draws, r=rule, t=tree: r(lambda _: law_of(*p), t, draws, 0)):
                shares[tree.ids[verdict.path[0]] if verdict.path else verdict.token] += share
            assert shares == pytest.approx(p, abs=1e-12)
    left_in: list[float] = [0.0] * 4
    tree = tree_of([9, 0, 1], [-1, 0, 0], Drawn.FIXED, None)
    slip = sibling_rule(keep_mass=True)
    for share, verdict in outcomes(lambda draws: slip(lambda _: law_of(*p), tree, draws, 0)):
        left_in[tree.ids[verdict.path[0]] if verdict.path else verdict.token] += share
    assert left_in == pytest.approx([0.675, 0.255, 0.0525, 0.0175], abs=1e-9)


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_q_that_is_missing_or_no_law(rule: str) -> None:
    for drawn in (Drawn.IID, Drawn.DISTINCT):
        with pytest.raises(IncompatibleDrafter, match="gives no q"):
            RULES[rule](lambda _: law_of(0.5, 0.5), tree_of([0, 1], [-1, 0], drawn, None), Draws(1), 0)
        bare = TokenTree(torch.tensor([0]), torch.tensor([-1]), drawn)
        assert RULES[rule](lambda _: law_of(0.5, 0.5), bare, Draws(1), 0).path == []
        for broken in ([math.nan, 0.5], [0.0, 0.0], [-0.1, 1.1], [math.inf, 0.0]):
            tree = tree_of([0, 1], [-1, 0], drawn, broken)
            shares = [0.0, 0.0]
            for share, verdict in outcomes(lambda d, t=tree: RULES[rule](lambda _: law_of(0.9, 0.1), t, d, 0)):
                assert verdict.path == []  # as if nothing had been proposed
                shares[verdict.token] += share
            assert shares == pytest.approx([0.9, 0.1], abs=1e-12)
        with pytest.raises(IncompatibleDrafter, match="target has 2"):
            RULES[rule](lambda _: law_of(0.5, 0.5), tree_of([0, 1], [-1, 0], drawn, [0.2, 0.3, 0.5]), Draws(1), 0)


@pytest.mark.usefixtures("at_full_speed")
def test_draft_vocabulary_narrower_than_the_targets() -> None:
    p, q = table(1, 4), table(2, 3)
    strings, _ = emitted(block, SHAPES["two by two"], Drawn.IID, lambda path: p(path), lambda path: q(path), 4)
    assert distance(strings, p, 4) < 1e-12


# -- coupled -----------------------------------------------------------------------------------------------------------


def random_tree(generator: random.Random, size: int) -> TokenTree:
    nodes = generator.randint(1, 12)
    parents = [-1] + [generator.randrange(node) for node in range(1, nodes)]
    return TokenTree(torch.tensor([generator.randrange(size) for _ in parents]), torch.tensor(parents))


@pytest.mark.usefixtures("at_full_speed")
def test_coupled_emits_what_plain_decoding_emits() -> None:
    """Thousands of random laws, trees and seeds: the same ids as with no tree at all."""
    generator = random.Random(0)
    accepted = 0
    for trial in range(600):
        size = 2 + trial % 4
        p = table(trial % 50, size, zeros=size > 2)

        def law(path: Path, p: Table = p, size: int = size) -> Law:
            return Law(None, p(path).log(), size)

        want: list[int] = []
        plain_draws = Draws(trial)
        while len(want) < 6:
            want.append(plain_draws.choose(law(tuple(want)), 3 + len(want)))
        got: list[int] = []
        draws = Draws(trial)
        while len(got) < 6:
            tree = random_tree(generator, size)
            before = tuple(got)
            names = [(*before, *(tree.ids[at] for at in tree.path(node)[1:])) for node in range(tree.num_nodes)]
            verdict = coupled(lambda node, names=names, law=law: law(names[node]), tree, draws, 3 + len(got))
            draws.next_pass()
            accepted += len(verdict.path)
            got += [*(tree.ids[node] for node in verdict.path), verdict.token]
        assert got[:6] == want
    assert accepted > 600  # the trees did take part


def test_laws_are_asked_only_where_the_walk_goes() -> None:
    """EAGLE 69: rows after the first rejection may hold anything; a reached one is an error."""
    tree = TokenTree.from_paths(0, [[1, 2], [3]])
    asked: list[int] = []

    def law(node: int) -> Law:
        asked.append(node)
        if node:
            raise BadLogits("NaN")
        return law_of(0.0, 0.0, 1.0, 0.0)

    for rule in RULES.values():
        assert rule(law, tree, Draws(1), 0) == Verdict([], 2)
    assert asked == [0, 0, 0]
    sampled = tree_of([0, 1, 1], [-1, 0, 1], Drawn.IID, [0.0, 1.0, 0.0, 0.0])
    for rule in (block, standard):
        assert rule(law, sampled, Draws(1), 0) == Verdict([], 2)
    with pytest.raises(BadLogits):
        coupled(lambda _: Sampler(SamplingParams(), 2, [0]).law(torch.tensor([math.nan, 0.0])), tree, Draws(1), 0)


@pytest.mark.usefixtures("at_full_speed")
def test_a_drafter_with_the_same_noise_is_accepted_more() -> None:
    """At least (1 - TV)/(1 + TV) for one coupled draft, and exactly 1 where p = q."""
    p, q = table(11, 5)(()), table(12, 5)(())
    overlap = float(torch.minimum(p, q).sum())
    hits = {"coupled": 0, "same": 0}
    for trial in range(1000):
        draws = Draws(trial)
        for name, draft in (("coupled", q), ("same", p)):
            token = draws.choose(Law(None, draft.log(), 5), 7)
            hits[name] += len(coupled(lambda _: Law(None, p.log(), 5), TokenTree.chain(0, [token]), draws, 7).path)
    assert hits["same"] == 1000
    assert hits["coupled"] / 1000 > overlap / (2 - overlap) - 0.03
