"""A verification rule, proved: every label, shape and adaptive length whose outcomes can be counted."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from paceline.decode import Request, run
from paceline.draft.base import Drafter
from paceline.errors import IncompatibleDrafter
from paceline.sampling import Draws, SamplingParams
from paceline.testing.chance import edges, once
from paceline.testing.exact import PlainLaw, Violation, exact_law, named
from paceline.testing.report import Report
from paceline.testing.scripted import ScriptedTree
from paceline.testing.toy import TableLaw, ToyDrafter, ToyTarget, random_law
from paceline.tree import Drawn, TokenTree
from paceline.verify import Rule

LIMIT = 1e-12
"""Total variation beyond which a law is not the target's; float64 rounding stays below 1e-15."""
SHAPES: dict[str, tuple[int, ...]] = {
    "chain of 1": (-1, 0),
    "chain of 2": (-1, 0, 1),
    "chain of 3": (-1, 0, 1, 2),
    "two siblings": (-1, 0, 0),
    "three siblings": (-1, 0, 0, 0),
    "a chain beside a leaf": (-1, 0, 1, 0),
    "two by two": (-1, 0, 0, 1, 1),
    "a twig under each": (-1, 0, 0, 1, 2),
}
ONCE = "no chance is used twice"


class Case(NamedTuple):
    """One thing to enumerate."""

    name: str
    vocab_size: int
    shape: tuple[int, ...]
    drawn: Drawn
    num_passes: int | None = 1
    adaptive: bool = False
    seeds: tuple[int, ...] = (1,)
    """One random target and draft for each; the second has tokens that are impossible."""


def cases(quick: bool = False) -> Iterator[Case]:
    """Shapes x labels x vocabularies of 2 to 5, one pass each; then adaptive lengths, and texts of many passes."""
    words = {Drawn.FIXED: "fixed", Drawn.IID: "drawn independently", Drawn.DISTINCT: "drawn without replacement"}
    sizes = (2, 3, 4) if quick else (2, 3, 4, 5)
    for (name, shape), drawn, size in itertools.product(SHAPES.items(), Drawn, sizes):
        nodes, widest = len(shape) - 1, max(shape.count(parent) for parent in shape)
        if drawn is Drawn.DISTINCT and (widest > size or widest == 1):
            continue  # one child is the same under both labels
        is_mixed = 1 < widest < nodes  # siblings and depth: three tokens show what there is to show
        if drawn is not Drawn.FIXED and (size**nodes > (30 if quick else 90) or (is_mixed and size > 3)):
            continue
        seeds = (1, 2) if size ** len(shape) < (20 if quick else 100) else (1,)
        yield Case(f"{name} {words[drawn]}, {size} tokens", size, shape, drawn, seeds=seeds)
    for name in ("chain of 3", "a twig under each", "two by two"):
        for drawn in (Drawn.IID, Drawn.DISTINCT)[: 1 if name == "chain of 3" else 2]:
            size = 3 if name == "chain of 3" else 2
            yield Case(f"{name} {words[drawn]}, cut short by what was drawn above", size, SHAPES[name], drawn, 1, True)
    for name, drawn in (("chain of 2", Drawn.IID), ("two siblings", Drawn.DISTINCT), ("chain of 2", Drawn.FIXED)):
        yield Case(f"{name} {words[drawn]}, pass after pass", 2, SHAPES[name], drawn, None)


def check_rule(rule: str | Rule, *, quick: bool = False, seeded: bool | None = None) -> Report:
    """Enumerate what a rule emits on small targets; the report's `verify()` raises when any law is not the target's.

    Args:
        rule: a name (`block`, `standard`, `coupled`) or a function like those of `paceline.verify`.
        quick: fewer shapes and vocabularies, a few seconds.
        seeded: whether the rule promises the ids of plain sampling with the same seed, as `coupled` does; its ids are
            then compared on many random laws, trees and seeds instead. By default only of `coupled`.
    """
    report = Report(f"rule {rule!r}" if isinstance(rule, str) else f"rule {getattr(rule, '__name__', 'candidate')!r}")
    if seeded if seeded is not None else rule == "coupled":
        for size in (2, 3, 5, 12):
            count = 50 if quick else 120
            report.run(f"the ids of plain sampling, {size} tokens", partial(_same_ids, rule, size, count))
        report.run(ONCE, lambda: once(rule))
        return report
    for case in cases(quick):
        report.run(case.name, partial(_exact, rule, case, report))
    report.run("a draft like the target is always kept", lambda: _equal_laws(rule))
    report.run("a draft unlike the target is never kept", lambda: _disjoint_laws(rule))
    report.run("a target that is certain", lambda: _certain(rule))
    report.run("a draft with a smaller vocabulary", lambda: _narrow(rule))
    report.run("q that is missing is refused", lambda: _no_q(rule))
    report.run("nothing impossible at the edges of chance", lambda: edges(rule, SHAPES.values()))
    report.run(ONCE, lambda: once(rule))
    return report


def _exact(rule: str | Rule, case: Case, report: Report) -> str:
    """The law of one case."""
    worst = accepted = 0.0
    count = 0
    depth = max(TokenTree(torch.zeros(len(case.shape), dtype=torch.int64), torch.tensor(case.shape)).depth)
    for seed in case.seeds:
        target = ToyTarget.random(case.vocab_size, seed, zeros=seed == 2 and case.vocab_size > 2)
        grow = (lambda path: sum(path) % 3 != 1) if case.adaptive else None
        drafter = ToyDrafter(random_law(case.vocab_size, 100 + seed), case.shape, case.drawn, grow=grow)
        found = exact_law(target, drafter, rule, depth + 1, num_passes=case.num_passes)
        worst, count = max(worst, found.total_variation), count + found.num_outcomes
        accepted += found.accepted / len(case.seeds)
    report.total_variations[case.name] = worst
    if worst > LIMIT:
        raise Violation(f"the emitted law is {worst:.3g} from the target's (total variation, exact)")
    return f"{count} outcomes, total variation {worst:.1e}, {accepted:.4f} guesses kept"


def _law(rule: str | Rule, target: TableLaw, draft: TableLaw, size: int, drawn: Drawn = Drawn.IID) -> float:
    shape = SHAPES["chain of 2"] if drawn is Drawn.IID else SHAPES["two siblings"]
    found = exact_law(ToyTarget(target, size), ToyDrafter(draft, shape, drawn), rule, 3, num_passes=1)
    if found.total_variation > LIMIT:
        raise Violation(f"the emitted law is {found.total_variation:.3g} from the target's")
    return found.accepted


def _equal_laws(rule: str | Rule) -> None:
    law = random_law(3, 5)
    accepted = _law(rule, law, law, 3)
    if abs(accepted - 2.0) > LIMIT:
        raise Violation(f"the draft's law is the target's, and only {accepted:.6f} of 2 guesses are kept")


def _disjoint_laws(rule: str | Rule) -> None:
    accepted = _law(rule, lambda _: [0.5, 0.5, 0.0, 0.0], lambda _: [0.0, 0.0, 0.3, 0.7], 4)
    if accepted > 0.0:
        raise Violation(f"the target never writes what was drafted, and {accepted:.6f} guesses are kept")


def _certain(rule: str | Rule) -> None:
    point: TableLaw = lambda text: [float(token == len(text) % 3) for token in range(3)]  # noqa: E731
    for drawn in (Drawn.IID, Drawn.DISTINCT):
        _law(rule, point, random_law(3, 6), 3, drawn)
        _law(rule, random_law(3, 6), point, 3, drawn)
        _law(rule, point, point, 3, drawn)


def _narrow(rule: str | Rule) -> None:
    _law(rule, random_law(4, 1), random_law(3, 2), 4)
    _law(rule, random_law(4, 1), random_law(3, 2), 4, Drawn.DISTINCT)


def _no_q(rule: str | Rule) -> None:
    for drawn in (Drawn.IID, Drawn.DISTINCT):
        tree = TokenTree(torch.tensor([0, 1]), torch.tensor([-1, 0]), drawn)
        try:
            exact_law(ToyTarget.random(2), ScriptedTree(partial(_always, tree)), rule, 2, num_passes=1)
        except IncompatibleDrafter:
            continue
        raise Violation(f"tokens labelled {drawn.name} came without q, and the rule used them")


def _same_ids(rule: str | Rule, size: int, count: int) -> str:
    """Random laws, trees, settings and seeds: what is emitted is what plain sampling writes."""
    chance = random.Random(size)
    accepted = 0
    with named(rule) as name:
        for trial in range(count):
            target = ToyTarget.random(size, trial % 40, zeros=trial % 2 == 1)
            settings = SamplingParams(
                temperature=chance.choice([0.0, 0.5, 1.0, 2.0]), top_k=chance.choice([0, 0, 2]),
                top_p=chance.choice([1.0, 0.8]), seed=trial, max_tokens=6,
            )  # fmt: skip
            drafter: Drafter[list[int]] = ScriptedTree(partial(_any_tree, chance, size))
            request = Request(
                [0, 1], settings, drafter, vocab_size=size, max_positions=99, rule=name, depth=5, budget=12
            )
            for _ in run(target, [request]):
                pass
            accepted += request.stats.num_accepted_tokens
            expected = PlainLaw(target, [0, 1], settings).ids(Draws(trial), 6)
            if request.output_ids != expected or request.error:
                raise Violation(
                    f"seed {trial}: {request.output_ids} was emitted, {expected} is what plain sampling writes"
                )
    if accepted < count // 2:
        raise Violation(f"{accepted} guesses were kept in {count} runs: the comparison says nothing")
    return f"{count} runs, {accepted} guesses kept, ids equal"


def _always(tree: TokenTree, ids: list[int]) -> TokenTree:
    return tree


def _any_tree(chance: random.Random, size: int, ids: list[int]) -> TokenTree:
    return random_tree(chance, ids[-1], size)


def random_tree(chance: random.Random, pending: int, vocab_size: int) -> TokenTree:
    """A tree of 1 to 12 nodes of any shape and any tokens, repeated siblings included."""
    nodes = chance.randint(1, 12)
    parents = [-1] + [chance.randrange(node) for node in range(1, nodes)]
    tokens = [pending] + [chance.randrange(vocab_size) for _ in range(1, nodes)]
    return TokenTree(torch.tensor(tokens), torch.tensor(parents))
