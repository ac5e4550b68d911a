"""The exact law of what speculation emits: every outcome of the real propose-and-verify code, with its probability.

A rule decides by `accept(probability)` and `pick(law)`, a drafter draws by `draft(law)` and `distinct(law, k)`. Here
all of them branch: the run is repeated until every combination of answers has been taken, through the same `step` that
serves users. No sampling, no tolerance but rounding: a bias of 0.0001 shows as 0.0001.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.decode import Request, prefill, step
from paceline.draft.base import Drafter
from paceline.draft.costs import Costs
from paceline.errors import BadRequest, IncompatibleDrafter, PacelineError
from paceline.prefix import CHUNK
from paceline.sampling import Draws, Sampler, SamplingParams
from paceline.target import Target
from paceline.testing.toy import ToyTarget
from paceline.verify import RULES, Rule

Text = tuple[int, ...]
R = TypeVar("R")
CANDIDATE = "candidate"
"""The name under which a rule that is a function is known while it is tried."""
SLACK = 1e-9
"""Rounding that is allowed where probabilities must sum to 1."""


class Violation(AssertionError):
    """A promise that a plug-in does not keep; the text says which, with the numbers."""


class TooManyOutcomes(PacelineError):
    """There is more to enumerate than `max_outcomes`: give a smaller vocabulary, length or tree, or a filter."""


@dataclass(frozen=True)
class ExactLaw:
    """What `exact_law` found; probabilities are exact up to float64 rounding."""

    law: dict[Text, float]
    """Emitted text -> its probability."""
    target_law: dict[Text, float]
    """The same for plain decoding, computed from the target's law by the chain rule."""
    accepted: float
    """Expected number of drafted tokens that the first pass keeps: the literature's acceptance figure."""
    tokens_per_pass: float
    """Expected emitted tokens over expected passes."""
    num_outcomes: int

    @property
    def total_variation(self) -> float:
        """Half the sum of differences; 0 up to rounding when nothing was changed, 1 when nothing is left."""
        texts = {*self.law, *self.target_law}
        return math.fsum(abs(self.law.get(text, 0.0) - self.target_law.get(text, 0.0)) for text in texts) / 2

    @property
    def worst(self) -> tuple[Text, float, float]:
        """The text whose probability is most wrong: (text, its probability, what it should be)."""
        texts = sorted({*self.law, *self.target_law})
        found = max(texts, key=lambda text: abs(self.law.get(text, 0.0) - self.target_law.get(text, 0.0)))
        return found, self.law.get(found, 0.0), self.target_law.get(found, 0.0)


def exact_law(
    target: Target,
    drafter: Drafter[Any],
    rule: str | Rule = "standard",
    length: int = 3,
    *,
    prompt: Sequence[int] = (0,),
    params: SamplingParams | None = None,
    depth: int = 23,
    budget: int = 23,
    costs: Costs | None = None,
    num_passes: int | None = None,
    eos_ids: frozenset[int] = frozenset(),
    max_outcomes: int = 100_000,
) -> ExactLaw:
    """The law of the first `length` tokens that this drafter and this rule emit on this target.

    Args:
        target: a `ToyTarget`, or any target whose law the settings make small (`top_k=2`).
        drafter: one that needs no binding, or is bound to the target already. It may draw by `ask.draws.draft` and
            `.distinct`; the noise it sees in `ask.top` is that of one fixed seed.
        rule: `standard`, `block`, or a function to try, like those of `paceline.verify`. `coupled` has continuous noise
            and is proved otherwise, see `check_drafter`.
        length: tokens to emit (fewer where the text ends), at least 1.
        params: sampling settings; by default the target's law as it is. `max_tokens` becomes `length`.
        depth, budget: deepest draft and most nodes, as in `speculative_config`.
        costs: what passes cost, to verify as much as pays; None verifies all that is drafted.
        num_passes: walk only so many passes and complete the text by the target's own law: much cheaper, and enough to
            prove a rule. None walks to the end of the text, which also shows what passes do to each other.

    Raises:
        Violation: a probability outside of 0 to 1, branches that do not sum to 1, a run that fails or cannot be
            repeated.
        TooManyOutcomes: more than `max_outcomes`.
    """
    if rule == "coupled":
        raise BadRequest("the coupled rule draws with continuous noise and cannot be enumerated; use check_drafter")
    if length < 1:
        raise BadRequest(f"length is {length}; at least 1 token is needed")
    settings = replace(params or SamplingParams(), max_tokens=length, seed=0)
    if settings.n != 1 or settings.temperature == 0.0:
        raise BadRequest("one sampled text is needed: n=1 and a temperature above 0")
    plain = PlainLaw(target, prompt, settings, eos_ids)
    emitted: dict[Text, float] = defaultdict(float)
    accepted = passes = tokens = 0.0
    count = 0
    with named(rule) as name:

        def walk(draws: Branching) -> _Walked:
            request = Request(
                list(prompt),
                settings,
                drafter,
                vocab_size=target.vocab_size,
                max_positions=target.max_positions,
                eos_ids=eos_ids,
                rule=name,
                depth=depth,
                budget=budget,
                costs=costs,
            )
            return _walked(target, request, draws, num_passes)

        for weight, walked in outcomes(walk, max_outcomes):
            emitted[walked.text] += weight
            accepted += weight * walked.accepted_first
            passes += weight * walked.num_passes
            tokens += weight * len(walked.text)
            count += 1
    total = math.fsum(emitted.values())
    if abs(total - 1.0) > SLACK:
        raise Violation(f"the outcomes of {name!r} have probability {total:.12g} in all: branches are lost or double")
    law: dict[Text, float] = defaultdict(float)
    for text, weight in emitted.items():
        for whole, share in plain.texts(text):
            law[whole] += weight * share
    return ExactLaw(dict(law), dict(plain.texts()), accepted, tokens / passes, count)


class _Walked(NamedTuple):
    text: Text
    accepted_first: int
    num_passes: int


def _walked(target: Target, request: Request, draws: "Branching", num_passes: int | None) -> _Walked:
    """One run by the real code, its draws answered by the walker."""
    cache = prefill(target, request)
    request.sampler.draws = draws
    first = None
    try:
        while request.finish_reason is None and request.stats.num_target_passes != num_passes:
            step(target, cache, [request])
            first = request.stats.num_accepted_tokens if first is None else first
    finally:
        request.drafter.end(request.state)
    if request.error is not None:
        raise Violation(f"the run failed after {request.output_ids}: {request.error}")
    return _Walked(tuple(request.output_ids), first or 0, request.stats.num_target_passes)


@contextmanager
def named(rule: str | Rule) -> Iterator[str]:
    """The name under which requests find a rule; a function has one for as long as this lasts."""
    if isinstance(rule, str):
        if rule not in RULES:
            raise BadRequest(f"no rule {rule!r}; choose from {list(RULES)}, or give a function")
        yield rule
        return
    RULES[CANDIDATE] = rule
    try:
        yield CANDIDATE
    finally:
        del RULES[CANDIDATE]


# -- the walker --------------------------------------------------------------------------------------------------------


class Branching(Draws):
    """Draws that answer from a script and write down where there was a choice; beyond it they take the first branch.

    Branches of probability 0 do not exist. Noise by position is that of seed 0: it is no choice.
    """

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(0)
        self.script = list(script)
        self.taken: list[int] = []
        self.open: list[int] = []
        """How many branches there were at each choice."""
        self.weight = 1.0
        """The probability of all answers so far."""

    def accept(self, probability: float) -> bool:
        """Yes with this probability, else no."""
        if not -SLACK <= probability <= 1.0 + SLACK:
            raise Violation(f"a rule asked to accept with probability {probability}")
        probability = min(max(probability, 0.0), 1.0)
        return self._branch([probability, 1.0 - probability]) == 0

    def pick(self, law: Float[Tensor, "V"]) -> int:
        """Any token of the law."""
        return self._token(law)

    def draft(self, law: Float[Tensor, "V"]) -> int:
        """Any token of the law."""
        return self._token(law)

    def distinct(self, law: Float[Tensor, "V"], count: int) -> list[int]:
        """Any tokens of the law, one after the other, each without those before it."""
        left, found = law.double().clone(), list[int]()
        while len(found) < count and float(left.sum()) > 0.0:
            found.append(self._token(left))
            left[found[-1]] = 0.0
        return found

    def draft_noise(self, vocab_size: int, device: torch.device | str | None = None) -> Float[Tensor, "V"]:
        """Refused: noise has no outcomes to count."""
        raise IncompatibleDrafter(
            "the drafter draws with draft_noise, which cannot be enumerated; let it use draws.draft(law) or "
            "draws.distinct(law, k)"
        )

    def _token(self, law: Float[Tensor, "V"]) -> int:
        shares: list[float] = law.double().tolist()
        total = sum(shares)
        if not (min(shares, default=0.0) >= 0.0 and 0.0 < total < math.inf):
            raise Violation(f"a token was drawn from {shares[:8]}, which is no law")
        return self._branch([share / total for share in shares])

    def _branch(self, weights: list[float]) -> int:
        live = [at for at, weight in enumerate(weights) if weight > 0.0]
        turn = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append(turn)
        self.open.append(len(live))
        if turn >= len(live):
            raise Violation(
                "the same answers led to another choice: the drafter or the rule depends on something besides the "
                "text and the draws (global randomness, the clock, earlier runs)"
            )
        self.weight *= weights[live[turn]]
        return live[turn]


def outcomes(walk: Callable[[Branching], R], most: int = 100_000) -> Iterator[tuple[float, R]]:
    """Every way a run can go, with its probability: (weight, what the run returned).

    Raises:
        Violation: the run, repeated with the same answers, came to another choice.
        TooManyOutcomes: there are more than `most`.
    """
    script: list[int] = []
    choices: list[int] = []
    for _ in range(most):
        draws = Branching(script)
        result = walk(draws)
        shared = len(script)
        if draws.open[:shared] != choices[:shared] or len(draws.open) < shared:
            raise Violation(
                f"a run repeated with the same answers had {draws.open[:shared]} branches at its choices, and "
                f"{choices[:shared]} before: it depends on something besides the text and the draws"
            )
        yield draws.weight, result
        script, choices = draws.taken, draws.open
        while script and script[-1] + 1 == choices[len(script) - 1]:
            script = script[:-1]
        if not script:
            return
        script = [*script[:-1], script[-1] + 1]
    raise TooManyOutcomes(
        f"there are more than {most} outcomes; give a smaller vocabulary, length or tree, num_passes=1, or top_k=2"
    )


# -- plain decoding without the loop -----------------------------------------------------------------------------------


class PlainLaw:
    """What plain decoding says, from the target's laws alone: no tree, no rule, no loop, no reuse of a cache.

    A `ToyTarget` is asked for its table; any other target reads the whole text anew for every token, see `read`.
    """

    def __init__(
        self, target: Target, prompt: Sequence[int], params: SamplingParams, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        self.target, self.prompt, self.params = target, list(prompt), params
        self.stops = (frozenset() if params.ignore_eos else eos_ids) | frozenset(params.stop_token_ids)
        self._logits: dict[Text, Float[Tensor, V]] = {}

    def law(self, text: Text) -> Float[Tensor, "V"]:
        """[V], float64: the law of the token after prompt and text, every setting applied."""
        return self._sampler(text).law(self.logits(text)).probs()

    def texts(self, begin: Text = ()) -> Iterator[tuple[Text, float]]:
        """Every text that can follow a beginning, up to `max_tokens` or a stop, with its probability."""
        if len(begin) == self.params.max_tokens or self.stops & set(begin[-1:]):
            yield begin, 1.0
            return
        law = self.law(begin)
        for token in law.nonzero().flatten().tolist():
            share = float(law[token])
            for text, rest in self.texts((*begin, token)):
                yield text, share * rest

    def ids(self, draws: Draws, length: int) -> list[int]:
        """The text that plain sampling writes with this noise; greedy at temperature 0."""
        text: Text = ()
        while len(text) < length and not self.stops & set(text[-1:]):
            law = self._sampler(text).law(self.logits(text))
            text = (*text, draws.choose(law, len(self.prompt) + len(text)))
        return list(text)

    def logits(self, text: Text) -> Float[Tensor, "V"]:
        """[V]: the raw row after prompt and text."""
        if text not in self._logits:
            whole = (*self.prompt, *text)
            if isinstance(self.target, ToyTarget):
                self._logits[text] = self.target.law(whole).log()
            else:
                self._logits[text] = read(self.target, whole)
        return self._logits[text]

    def _sampler(self, text: Text) -> Sampler:
        sampler = Sampler(self.params, self.target.vocab_size, self.prompt, Draws(0), ends=self.stops)
        sampler.extend(text)
        return sampler


def read(target: Target, text: Sequence[int]) -> Float[Tensor, "V"]:
    """[V]: the raw row after a text as plain decoding reads it: in chunks, and the last token by itself."""
    cache, last = target.new_cache(1, len(text)), len(text) - 1
    for begin in range(0, last, CHUNK):
        part = torch.tensor([list(text[begin : min(begin + CHUNK, last)])])
        target.forward(part, torch.arange(part.shape[1])[None], None, cache, logits=False)
        cache.commit([range(part.shape[1])])
    return target.forward(torch.tensor([[text[-1]]]), torch.tensor([[0]]), None, cache).logits[0, 0].clone()
