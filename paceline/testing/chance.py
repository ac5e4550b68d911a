"""Where a rule's chance comes from: at the edges of its uniform numbers, and that none of them is used twice.

Enumeration answers a rule's questions by itself, so it cannot see what the real `Draws` do. Here they do it.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from paceline.decode import Request, run
from paceline.sampling import Draws, Law, SamplingParams
from paceline.testing.exact import Violation, named
from paceline.testing.toy import ToyDrafter, ToyTarget, random_law
from paceline.tree import Drawn
from paceline.verify import Rule


def edges(rule: str | Rule, shapes: Collection[Sequence[int]]) -> None:
    """Uniform numbers of exactly 0, and the largest below 1: what has no probability must not be written even then."""
    with named(rule) as name:
        for edge in (0.0, 1.0 - 2.0**-53):
            for seed, (shape, drawn) in enumerate(itertools.product(shapes, Drawn)):
                target = ToyTarget.random(3, seed, zeros=True)
                drafter = ToyDrafter(random_law(3, 50 + seed), shape, drawn)
                request = _OnEdge(
                    [0], SamplingParams(max_tokens=5, seed=0), drafter, 3, target.max_positions, rule=name
                )
                request.edge = edge
                for _ in run(target, [request]):
                    pass
                text = request.ids
                for at in range(1, len(text)):
                    if float(target.law(text[:at])[text[at]]) <= 0.0:
                        raise Violation(
                            f"with every uniform number {edge!r} the rule wrote {text[at]} after {text[:at]}, which "
                            "has probability 0"
                        )


class _OnEdge(Request):
    """A request whose uniform numbers are all the same."""

    edge = 0.0

    def start(self) -> None:
        super().start()
        self.sampler.draws = _Edge(self.edge)


class _Edge(Draws):
    def __init__(self, edge: float) -> None:
        super().__init__(0)
        self.edge = edge

    def _uniform(self, purpose: str) -> float:
        return self.edge


def once(rule: str | Rule) -> str:
    """Every uniform number and every key of noise in texts of many passes, of two seeds with two samples each."""
    count = 0
    with named(rule) as name:
        for shape, drawn in (((-1, 0, 1), Drawn.IID), ((-1, 0, 0), Drawn.DISTINCT), ((-1, 0, 1), Drawn.FIXED)):
            target = ToyTarget.random(5, 1)
            drafter = ToyDrafter(random_law(5, 2), shape, drawn)
            used: dict[Any, Any] = {}
            requests = []
            for seed, sample in itertools.product((3, 4), (0, 1)):
                params = SamplingParams(max_tokens=12, seed=seed)
                request = _Noted([0], params, drafter, 5, target.max_positions, rule=name, sample=sample)
                request.used = used
                requests.append(request)
            for _ in run(target, requests, max_rows=3):
                pass
            count += len(used)
    return f"{count} numbers and keys, all different"


class _Noted(Request):
    """A request whose chance is written down."""

    used: dict[Any, Any]

    def start(self) -> None:
        super().start()
        draws = self.sampler.draws
        self.sampler.draws = _Ledger(draws.seed, draws.sample, self.used)


class _Ledger(Draws):
    """Draws that refuse to be the same twice, except for the noise of one position in one text."""

    def __init__(self, seed: int, sample: int, used: dict[Any, Any]) -> None:
        super().__init__(seed, sample)
        self.used = used
        self.position = 0

    def choose(self, law: Law, position: int) -> int:
        self.position = position  # as it was asked for; what becomes of it further down is what is looked at
        return super().choose(law, position)

    def _uniform(self, purpose: str) -> float:
        value = super()._uniform(purpose)
        self._note(value, object(), purpose)
        return value

    def _keys(self, purpose: str, first: int, second: int = 0) -> tuple[int, ...]:
        keys = super()._keys(purpose, first, second)
        self._note(keys, (self, self.position) if purpose == "noise" else object(), purpose)
        return keys

    def _note(self, value: Any, owner: Any, purpose: str) -> None:
        if self.used.setdefault(value, owner) != owner:
            raise Violation(
                f"what was drawn for {purpose!r} (seed {self.seed}, sample {self.sample}) had been used before, at "
                "another position, in another pass or by another text: the tokens of a text are then not independent"
            )
