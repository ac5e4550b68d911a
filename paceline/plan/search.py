"""Every choice predicted from one plain trace per prompt, the best one found, and the top ones run if asked.

    seconds of a prompt  =  reading it, as in the trace
                          + for every pass of the replay: the trace's own seconds per pass times cost(tokens) / cost(1)
                          + drafting, verifying and the rest, as the replay took them

What a replay takes is put in passes over a single token that are timed right before and behind it: machines drift.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from paceline.decode import Request, run
from paceline.draft import HEADS, SpeculativeConfig, method_of
from paceline.draft.costs import Costs
from paceline.draft.planned import place
from paceline.errors import BadRequest
from paceline.llm import LLM
from paceline.output import RequestOutput
from paceline.plan import curve as curves
from paceline.plan.curve import STEP, Measured
from paceline.plan.record import Choice, Plan
from paceline.plan.replay import Pass, Replay, can_replay, tapped, watched
from paceline.sampling import SamplingParams
from paceline.theory import step_seconds

WITH_MODEL = ("draft_model", *HEADS)
"""Methods that a model or a head is needed for."""
LEAST_TOKENS = 8
"""Answers must have this many tokens on average to say anything."""
USUAL = 23
"""Nodes per pass that are always tried: the default."""
SIZES = 3
"""Other sizes that are tried."""
DEPTHS = (2, 4, 8)
"""Depths of a draft model that are tried beside its own choice."""
LIVE = ("lookahead", "early_exit")
"""Methods that are run on a part of the prompts, and on all only where that is promising."""
PROMISING = 0.85
"""Of the best choice's speed-up."""
PAYS = 1.02
"""Speed-up from which speculation is worth it: below, plain decoding is simpler and no slower."""
SAME = 0.01
"""Speed-ups this close are the same; the simpler choice is taken."""


@dataclass
class Trace:
    """A prompt as plain decoding answered it."""

    ids: list[int]
    output: RequestOutput

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return self.ids + self.output.token_ids


class Outcome(NamedTuple):
    """What some prompts came to with a choice."""

    parts: list[float]
    """Seconds beside the target's passes, per prompt or batch: prompt, drafting, verifying, the rest."""
    drafting: float
    """Seconds of drafting among them."""
    passes: list[Pass]
    """Those that are priced by the curve."""
    counted: list[Pass]
    """All of them."""
    tokens: int


@dataclass
class Tried:
    """A setting while the search goes on."""

    method: str
    config: dict[str, Any]
    source: str
    tokens: int = 0
    passes: int = 0
    row_passes: int = 0
    """Passes times the rows in them."""
    drafting: float = 0.0
    seconds: float = 0.0
    speedup: float = 0.0
    ci95: tuple[float, float] = (0.0, 0.0)
    is_partial: bool = False
    measured: list[tuple[float, float]] = field(default_factory=list)
    """(plain seconds, seconds) of every prompt or batch, by `verify`."""

    @property
    def read(self) -> SpeculativeConfig:
        """The settings."""
        return SpeculativeConfig.read(self.config)


def make_plan(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    draft_model: Any = None,
    methods: Sequence[str] | None = None,
    temperature: float = 0.0,
    batch: int = 1,
    max_tokens: int = 64,
    seed: int = 0,
    verify: bool = False,
    names: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Plan:
    """Measure, predict, choose.

    Args:
        llm: the target, loaded with `reuse_prefix=False`, so that every run reads its prompt.
        prompts: ids to answer, chat template applied.
        draft_model: a name, a folder or a model; None plans without one.
        methods: which to consider; None is all that can be.
        batch: prompts answered side by side.
        max_tokens: of each answer.
        seed: prompt i is sampled with seed + i.
        verify: run the best choices beside plain decoding afterwards.
        names: of the prompts, for the record.
        progress: told (stage, steps done, steps in all).

    Raises:
        BadRequest: no prompts, prompts or answers too short to measure, or methods that cannot be planned.
    """
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    _check(llm, prompts, draft_model, methods, batch, max_tokens)
    search = _Search(llm, [list(ids) for ids in prompts], params, batch, seed, progress)
    search.draft_model, search.methods = draft_model, None if methods is None else list(methods)
    return search.run(verify, list(names or ()))


def _check(
    llm: LLM, prompts: Sequence[Sequence[int]], draft_model: Any, methods: Sequence[str] | None, batch: int, most: int
) -> None:
    if not prompts:
        raise BadRequest("there are no prompts to plan for; give at least one")
    for number, ids in enumerate(prompts, 1):
        if len(ids) < 2:
            raise BadRequest(f"prompt {number} has {len(ids)} token(s), too few to measure with; 2 or more are needed")
        if len(ids) + most > llm.max_model_len:
            raise BadRequest(
                f"prompt {number} and its answer may take {len(ids) + most} tokens, the context holds "
                f"{llm.max_model_len}; give shorter prompts or fewer tokens"
            )
    for name, value in (("batch", batch), ("max_tokens", most)):
        if value < 1:
            raise BadRequest(f"{name}={value} was given; 1 or more is needed")
    if batch > len(prompts):
        raise BadRequest(f"batch={batch} and {len(prompts)} prompts were given; as many prompts as rows are needed")
    if batch > llm.max_num_seqs:
        raise BadRequest(f"batch={batch} was given, and the LLM runs {llm.max_num_seqs} at once: raise max_num_seqs")
    if llm._prefixes is not None:
        raise BadRequest("a plan measures how prompts are read; load the model with reuse_prefix=False")
    check_methods(methods, draft_model)


def check_methods(methods: Sequence[str] | None, draft_model: Any) -> None:
    """Passes when all of these can be planned.

    Raises:
        BadRequest: a name that is none, or one that needs a draft model where there is none.
    """
    for method in methods or ():
        if method == "compose" and draft_model is None:
            raise BadRequest("method 'compose' puts a draft model beside suffix; give the draft model")
        if method != "compose":
            own = {"model": draft_model} if method in WITH_MODEL and draft_model is not None else {}
            SpeculativeConfig.read({"method": method} | own)


class _Search:
    """The state of one planning."""

    draft_model: Any
    methods: list[str] | None

    def __init__(
        self,
        llm: LLM,
        prompts: list[list[int]],
        params: SamplingParams,
        batch: int,
        seed: int,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.llm, self.prompts, self.params, self.batch, self.seed = llm, prompts, params, batch, seed
        self.progress = progress
        self.traces: list[Trace] = []
        self.measured: Measured
        self.notes: list[str] = []
        self._tapped: dict[tuple[int, tuple[int, ...]], Any] = {}

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self, verify: bool, names: list[str]) -> Plan:
        """All of it, in order."""
        llm = self.llm
        self._record()
        context = int(statistics.median(len(trace.text) for trace in self.traces))
        text = next(t.text for t in sorted(self.traces, key=lambda t: -len(t.text)) if len(t.text) >= 1)[:context]
        self._measure(text)
        tried = [Tried("none", {"method": "none"}, "ran"), *self._settings()]
        outcomes = {id(tried[0]): self._plain()}
        total, whole = len(tried) - 1, len(self._batches())
        for done, one in enumerate(tried[1:]):
            self.progress(f"trying {one.method}", done, total)
            if one.source == "replayed":
                outcomes[id(one)] = self._replayed(one)
            else:
                part = max(1, whole // 2) if one.method in LIVE else whole
                one.is_partial = part < whole
                outcomes[id(one)] = self._ran(one, part)
            if done % 2:
                self.measured = self.measured.with_turn(self.probe)
        self._judge_all(tried, outcomes)
        best = max(one.speedup for one in tried if not one.is_partial)
        for one in tried:
            if one.is_partial and one.speedup > PROMISING * best:
                one.is_partial, outcomes[id(one)] = False, self._ran(one, whole)
        while self.measured.noise > curves.TOLERANCE and len(self.measured.seconds) < curves.ALL_TURNS:
            self.measured = self.measured.with_turn(self.probe)
        self._judge_all(tried, outcomes)
        self.progress("trying", total, total)
        if self.measured.noise > curves.TOLERANCE:
            self.notes.append(
                f"the machine is noisy: after {len(self.measured.seconds)} turns a pass's cost is known to "
                f"±{self.measured.noise:.0%} only; stop other work and plan again for a narrower interval"
            )
        chosen, reason = self._choose(tried)
        if verify:
            self._verify(tried, chosen)
        ranked = sorted(tried, key=lambda one: -one.speedup)
        return Plan(
            model=llm.source.name,
            machine=place(llm.target),
            settings={
                "temperature": self.params.temperature,
                "batch": self.batch,
                "max_tokens": self.params.max_tokens,
                "seed": self.seed,
                "draft_model": None if self.draft_model is None else str(self.draft_model),
                "prompts": names or [str(i) for i in range(len(self.prompts))],
                "prompts_sha256": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest(),
            },
            rows=self.batch,
            context=self.measured.context,
            cost_curve=self.measured.curve,
            drafting_curve=list(self.curve),
            single_seconds=self.measured.single,
            noise=self.measured.noise,
            bandwidth=self.bandwidth,
            floor_seconds=self.floor,
            choices=[self._choice(one) for one in ranked],
            chosen=ranked.index(chosen),
            reason=reason,
            notes=self.notes,
        )

    def _batches(self) -> list[list[int]]:
        """Numbers of the prompts that are answered side by side."""
        return [
            list(range(begin, min(begin + self.batch, len(self.prompts))))
            for begin in range(0, len(self.prompts), self.batch)
        ]

    def _params(self, numbers: Iterable[int]) -> list[SamplingParams]:
        return [replace(self.params, seed=self.seed + number) for number in numbers]

    def _requests(self, numbers: Sequence[int], config: SpeculativeConfig, drafter: Any) -> list[Request]:
        prompts = [self.prompts[number] for number in numbers]
        return self.llm.requests(prompts, self._params(numbers), config, drafter, self.costs(drafter))

    def _record(self) -> None:
        """One plain answer per prompt."""
        self.llm.generate([self.prompts[0]], replace(self.params, max_tokens=2), speculative_config=None)  # warm up
        found: list[RequestOutput] = []
        for numbers in self._batches():
            self.progress("writing plain answers", len(found), len(self.prompts))
            asked = [self.prompts[number] for number in numbers]
            found += self.llm.generate(asked, self._params(numbers), speculative_config=None)
        self.progress("writing plain answers", len(found), len(self.prompts))
        for number, (ids, output) in enumerate(zip(self.prompts, found, strict=True), 1):
            if output.finish_reason == "error":
                raise BadRequest(f"prompt {number} cannot be answered: {output.error}")
            self.traces.append(Trace(ids, output))
        lengths = [len(trace.output.token_ids) for trace in self.traces]
        if sum(lengths) < LEAST_TOKENS * len(lengths):
            raise BadRequest(
                f"the answers have {', '.join(map(str, lengths))} tokens, too few to measure with; give prompts with "
                f"answers of {LEAST_TOKENS} tokens or more, or a larger max_tokens"
            )

    def _measure(self, text: list[int]) -> None:
        turns = 0

        def tick() -> None:
            nonlocal turns
            turns += 1
            self.progress("timing passes", min(turns, 20), 20)

        self.measured, self.probe = curves.measure(
            self.llm.target, text, rows=self.batch, tick=tick, clock=perf_counter
        )
        self.progress("timing passes", 20, 20)
        self.curve = self.measured.cost
        target = self.llm.target
        self.bandwidth = curves.bandwidth(target.device)
        kv = self.probe.cache.row_bytes(self.measured.context) * self.batch
        self.floor = float(step_seconds(target.weight_bytes, self.bandwidth, kv))

    def costs(self, drafter: Any) -> Costs:
        """What drafting goes by while planning, and with the plan."""
        return (drafter.costs or Costs()).on(self.curve)

    # -- what to try -------------------------------------------------------------------------------------------

    def _sizes(self) -> list[int]:
        """Nodes per pass worth trying: the last ones before the curve steps up, lowest first, and the default."""
        points = self.measured.curve
        steps = [n - 1 for (n, low), (m, high) in pairwise(points) if n > 2 and m == n + 1 and high > STEP * low]
        sizes = set(steps[:SIZES])
        room = points[-1][0] - 1
        most = room if self.batch == 1 else max(1, 32 // self.batch - 1)
        return sorted({min(size, most) for size in sizes | {USUAL}})

    def _settings(self) -> list[Tried]:
        """Every choice to predict, as far as it can be made here."""
        sizes, made = self._sizes(), list[Tried]()

        def add(method: str, **config: Any) -> None:
            if self.methods is not None and method not in self.methods:
                return
            settings = {"method": method} | config
            drafter = self._drafter(SpeculativeConfig.read(settings))
            if drafter is not None:
                source = "replayed" if can_replay(drafter) else "ran"
                made.append(Tried(method, settings, source))

        for size in sizes:
            add("ngram", num_draft_tokens=size)
        for size in sizes:
            add("suffix", num_draft_tokens=size)
        if self.draft_model is not None:
            method, model = method_of(self.draft_model), self.draft_model
            for size in sizes:
                add(method, model=model, num_draft_tokens=size)
            for depth in DEPTHS if method != "medusa" else ():
                add(method, model=model, num_draft_tokens=max(USUAL, depth), num_speculative_tokens=depth)
            for size in sizes:
                add("compose", drafters=["suffix", {"method": method, "model": model}], num_draft_tokens=size)
        best = min(sizes, key=lambda size: (abs(size - USUAL), size))
        add("recycle", num_draft_tokens=best)
        for size in {sizes[0], best} if self.batch == 1 else {best}:
            add("auto", num_draft_tokens=size)
        add("lookahead")
        add("early_exit")
        return made

    def _drafter(self, config: SpeculativeConfig) -> Any:
        """A drafter that goes by the measured costs; None, with a note, where the model cannot have it."""
        try:
            return self.llm.drafter_for(config, self.curve)
        except Exception as error:
            if self.methods is not None:
                raise
            note = f"{config.method} is left out: {error}"
            if note not in self.notes:
                self.notes.append(note)
            return None

    # -- what a choice comes to --------------------------------------------------------------------------------

    def _plain(self) -> list[Outcome]:
        """The traces themselves."""
        found = []
        for numbers in self._batches():
            outputs = [self.traces[n].output for n in numbers]
            found.append(self._outcome(outputs, _turns([output.stats.num_target_passes for output in outputs])))
        return found

    def _outcome(self, outputs: list[RequestOutput], passes: list[Pass]) -> Outcome:
        """Rows that share passes share their time, so adding the rows up gives the time of the batch."""
        times = [output.stats.time for output in outputs]
        parts = [sum(time[name] for time in times) for name in ("prefill", "draft", "verify", "other")]
        return Outcome(parts, parts[1], passes, passes, sum(len(output.token_ids) for output in outputs))

    def _replayed(self, one: Tried) -> list[Outcome]:
        """The drafter on the recorded texts; its seconds in those of the trace."""
        config, found = one.read, []
        drafter = self._drafter(config)
        for numbers in self._batches():
            texts = [self.traces[number].text for number in numbers]
            states = [self._states(number, drafter.taps) for number in numbers] if drafter.taps else []
            target = Replay(self.llm.target, texts, states)
            rows = self.llm.requests(
                [self.prompts[number] for number in numbers],
                self._params(numbers),
                config,
                drafter,
                self.costs(drafter),
            )
            before = self.probe(1)
            for _ in run(target, rows, max_rows=self.batch):
                pass
            scale = self._base(numbers) / statistics.mean((before, self.probe(1)))
            outputs = [self.llm._sample_output(row) for row in rows]
            for number, output in zip(numbers, outputs, strict=True):
                if output.token_ids != self.traces[number].output.token_ids:
                    raise AssertionError(f"a replay of {config.method} left the recorded text of prompt {number}")
            outcome = self._outcome(outputs, target.passes)
            read = sum(self.traces[number].output.stats.time["prefill"] for number in numbers)
            parts = [read + scale * outcome.parts[0], *(scale * part for part in outcome.parts[1:])]
            found.append(outcome._replace(parts=parts, drafting=scale * outcome.drafting))
        return found

    def _states(self, number: int, taps: Sequence[int]) -> Any:
        """The target's states behind a recorded text, found once."""
        key = (number, tuple(taps))
        if key not in self._tapped:
            self._tapped[key] = tapped(self.llm.target, self.traces[number].text, taps)
        return self._tapped[key]

    def _ran(self, one: Tried, count: int) -> list[Outcome]:
        """The drafter with the target itself; its passes are priced as those of replays are."""
        config, found = one.read, []
        drafter = self._drafter(config)
        for numbers in self._batches()[:count]:
            rows = self.llm.requests(
                [self.prompts[number] for number in numbers],
                self._params(numbers),
                config,
                drafter,
                self.costs(drafter),
            )
            before = self.probe(1)
            with watched(self.llm.target) as passes:
                for _ in run(self.llm.target, rows, max_rows=self.batch):
                    pass
            scale = self._base(numbers) / statistics.mean((before, self.probe(1)))
            outputs = [self.llm._sample_output(row) for row in rows]
            outcome = self._outcome(outputs, list(passes))
            if config.method == "early_exit":  # passes that go on behind the first layers are no whole ones
                own = sum(output.stats.time["target"] for output in outputs)
                counted = _turns([output.stats.num_target_passes for output in outputs])
                outcome = outcome._replace(passes=[], counted=counted, parts=[*outcome.parts, own])
            read = sum(self.traces[number].output.stats.time["prefill"] for number in numbers)
            parts = [read, *(scale * part for part in outcome.parts[1:])]
            found.append(outcome._replace(parts=parts, drafting=scale * outcome.drafting))
        return found

    def _judge_all(self, tried: list[Tried], outcomes: dict[int, list[Outcome]]) -> None:
        for one in tried:
            self._judge(one, outcomes[id(one)])

    def _judge(self, one: Tried, outcomes: list[Outcome]) -> None:
        """Speed-up over the plain answers of the same prompts; its interval over what prompts and turns might be."""
        ratios, plain, count = self.measured.ratios(), self._plain()[: len(outcomes)], len(outcomes)
        chance = np.random.default_rng(0)

        def speedup(numbers: Sequence[int], drawn: Any) -> float:
            own = sum(self._seconds(outcomes[number], number, drawn) for number in numbers)
            base = sum(self._seconds(plain[number], number, drawn) for number in numbers)
            tokens = sum(outcomes[number].tokens for number in numbers) / sum(
                plain[number].tokens for number in numbers
            )
            one.seconds = own
            return float(tokens * base / own)

        found = []
        for _ in range(200):
            numbers, turns = chance.integers(0, count, count), chance.integers(0, len(ratios), len(ratios))
            found.append(speedup(numbers.tolist(), np.median(ratios[turns], axis=0)))
        one.speedup = speedup(range(count), np.median(ratios, axis=0))
        low, high = np.percentile(found, [2.5, 97.5])
        one.ci95 = (min(float(low), one.speedup), max(float(high), one.speedup))
        one.tokens = sum(outcome.tokens for outcome in outcomes)
        one.drafting = sum(outcome.drafting for outcome in outcomes)
        one.passes = sum(len(outcome.counted) for outcome in outcomes)
        one.row_passes = sum(each.rows for outcome in outcomes for each in outcome.counted)

    def _seconds(self, outcome: Outcome, number: int, ratios: Any) -> float:
        """Of a batch: its passes at what they cost on the curve, in the trace's own seconds, and everything beside."""
        base = self._base(self._batches()[number], ratios)
        return base * self._price(outcome.passes, ratios) + sum(outcome.parts)

    def _base(self, numbers: Sequence[int], ratios: Any = None) -> float:
        """Seconds of a pass over one token of each row of a full batch, when these prompts were answered."""
        stats = [self.traces[number].output.stats for number in numbers]
        turns = _turns([one.num_target_passes for one in stats])
        known = np.median(self.measured.ratios(), axis=0) if ratios is None else ratios
        return sum(one.time["target"] for one in stats) / self._price(turns, known)

    def _price(self, passes: list[Pass], ratios: Any) -> float:
        """In passes over one token of each row of a full batch."""
        tokens, costs = [self.batch * n for n in self.measured.widths], list(ratios)
        if self.batch > 1:
            tokens, costs = [1, *tokens], [self.measured.single / self.measured.curve[0][1], *costs]
        return float(np.interp([each.rows * each.tokens for each in passes], tokens, costs).sum())

    # -- which one ---------------------------------------------------------------------------------------------

    def _choose(self, tried: list[Tried]) -> tuple[Tried, str]:
        """The fastest; of those that are as fast, the first, for simple ones are tried first."""
        whole = [one for one in tried if not one.is_partial]
        best = max(whole, key=lambda one: one.speedup)
        first = next(one for one in whole if one.speedup >= best.speedup * (1.0 - SAME))
        if first.method == "none" or first.speedup < PAYS:
            rest, curve = [one for one in whole if one.method != "none"], self.measured.curve
            most = max(rest, key=lambda one: one.speedup, default=None)
            if most is None:
                return tried[0], "nothing but plain decoding was considered"
            return tried[0], (
                f"do not speculate here: the best of {len(rest)} choices is {most.method}, which is expected to bring "
                f"{_per_pass(most):.2f} tokens per pass and {most.speedup:.2f}x of plain decoding; a pass over "
                f"{curve[-1][0]} tokens costs {curve[-1][1] / curve[0][1]:.2f} of one"
            )
        return first, (
            f"{_per_pass(first):.2f} tokens per pass; drafting takes {first.drafting / first.seconds:.0%} of the time"
        )

    def _verify(self, tried: list[Tried], chosen: Tried) -> None:
        """The chosen one and the best of other methods beside plain decoding, prompt by prompt, in turns."""
        others = sorted((one for one in tried if one.method != "none"), key=lambda one: -one.speedup)
        top = [chosen] if chosen.method != "none" else []
        for one in others:
            if len(top) < 4 and one.method not in [other.method for other in top]:
                top.append(one)
        self.measure_choices(tried[0], top)

    def measure_choices(self, plain: Tried, top: list[Tried]) -> None:
        """Time choices beside plain decoding."""
        contenders = [plain, *top]
        for done, numbers in enumerate(self._batches()):
            self.progress("verifying", done, len(self._batches()))
            seconds: dict[int, float] = {}
            first = done % len(contenders)
            for one in [*contenders[first:], *contenders[:first]]:
                rows = self._requests(numbers, one.read, self._drafter(one.read))
                begun = perf_counter()
                for _ in run(self.llm.target, rows, max_rows=self.batch):
                    pass
                seconds[id(one)] = perf_counter() - begun
            for one in contenders:
                one.measured.append((seconds[id(plain)], seconds[id(one)]))
        self.progress("verifying", len(self._batches()), len(self._batches()))

    def _choice(self, one: Tried) -> Choice:
        read = one.read
        plain = one.method == "none"
        measured = ci95 = None
        if one.measured:
            pairs = np.asarray(one.measured)
            measured = float(pairs[:, 0].sum() / pairs[:, 1].sum())
            chance = np.random.default_rng(0)
            drawn = [pairs[chance.integers(0, len(pairs), len(pairs))].sum(0) for _ in range(400)]
            low, high = np.percentile([a / b for a, b in drawn], [2.5, 97.5])
            ci95 = (float(low), float(high))
        passes = max(1, one.passes)
        return Choice(
            method=one.method,
            config=_plain_json(one.config),
            num_draft_tokens=0 if plain else read.num_draft_tokens,
            num_speculative_tokens=0 if plain else read.num_speculative_tokens,
            predicted_speedup=one.speedup,
            predicted_ci95=one.ci95,
            tokens_per_second=one.tokens / one.seconds,
            tokens_per_pass=_per_pass(one),
            draft_share=one.drafting / one.seconds,
            above_floor=one.seconds / (passes * self.floor),
            source=one.source + (" on a part" if one.is_partial else ""),
            measured_speedup=measured,
            measured_ci95=ci95,
        )


def _per_pass(one: Tried) -> float:
    """Tokens of a row."""
    return one.tokens / max(1, one.row_passes)


def _turns(passes: Sequence[int]) -> list[Pass]:
    """Passes over one token per row, where rows leave after so many."""
    return [Pass(sum(count > turn for count in passes), 1) for turn in range(max(passes, default=0))]


def _plain_json(config: dict[str, Any]) -> dict[str, Any]:
    """The settings without objects: a plan is a file."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain
