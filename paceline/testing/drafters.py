"""The contract of a drafter, checked by running it: what may never happen to a text, whoever drafts."""

import gc
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.decode import Request, run
from paceline.draft.base import Ask, Drafter, Step
from paceline.errors import IncompatibleDrafter
from paceline.prefix import CHUNK
from paceline.sampling import Draws, SamplingParams
from paceline.target import Target
from paceline.testing.exact import PlainLaw, TooManyOutcomes, Violation, exact_law
from paceline.testing.report import NotApplicable, Report
from paceline.testing.rules import LIMIT
from paceline.testing.toy import ToyTarget
from paceline.tree import Drawn, TokenTree

MOST_OUTCOMES = 800
"""Outcomes counted for one text; where there are more, drafts are made shallower."""
REAL_LIMIT = 1e-6
"""Total variation allowed on a target that computes in float32 or less: its own rounding."""


def check_drafter(
    drafter: Drafter[Any] | Callable[[], Drafter[Any]],
    target: Target | None = None,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    rules: Sequence[str] = ("coupled", "block", "standard"),
    min_acceptance_length: float | None = None,
) -> Report:
    """Run a drafter under every rule, batch, stop, budget, abort and rollback, and report what held.

        from paceline.testing import check_drafter
        check_drafter(MyDrafter).verify()  # raises a Violation that names every check that failed

    Under `coupled` the ids must be those of plain sampling, computed without cache or loop. Under `block` and
    `standard` the law of what is emitted is enumerated, which only a truthful label and a truthful q survive. Besides:
    an end for every begin, nothing left behind, nothing global touched, the same call twice the same.

    Args:
        drafter: an instance, or what makes one without arguments (its class); bound here.
        target: what to draft for; by default a `ToyTarget`. One with a large vocabulary is enumerated under `top_k=2`.
        prompts: token ids; by default some that repeat themselves, so that look-ups find something.
        rules: those that the drafter is meant for.
        min_acceptance_length: tokens per pass it must reach in these runs: a drafter that never helps changes no text,
            so only a number can show it.
    """
    made = drafter if isinstance(drafter, Drafter) else drafter()
    report = Report(f"drafter {type(made).__name__}")
    suite = _Suite(made, target, prompts, report)
    report.run("it binds to the target", suite.bind)
    if report.failed:
        return report
    if "coupled" in rules:
        report.run("coupled, greedy: the ids of plain decoding", lambda: suite.same_ids({"temperature": 0.0}))
        report.run("coupled, sampled: the ids of plain sampling", lambda: suite.same_ids({"temperature": 1.0}))
        report.run("coupled, with filters and penalties", suite.settings)
        report.run("rows that join and leave", suite.rows)
        report.run("budgets of 0, 1 and 2 nodes, drafts one deep", suite.budgets)
        report.run("stops inside of a draft", suite.stops)
        report.run("a prompt that is read in chunks", suite.chunks)
    report.run("labels that its trees can have", suite.labels)
    for rule in [rule for rule in rules if rule != "coupled"]:
        report.run(f"truthful under {rule}: the exact law", partial(suite.exact, rule))
    report.run("the same call twice", lambda: suite.twice(rules))
    report.run("nothing global is touched", suite.global_state)
    report.run("what it is shown stays as it was", suite.shown)
    report.run("every begin has its end, also when a run is given up", suite.ends)
    report.run("nothing stays behind", suite.left_behind)
    report.mean_acceptance_length = suite.tokens / suite.passes if suite.passes else None
    if min_acceptance_length is not None:
        report.run("it helps", lambda: suite.helps(min_acceptance_length))
    return report


class _Suite:
    """One drafter, its target, and the runs that several checks make."""

    def __init__(
        self, drafter: Drafter[Any], target: Target | None, prompts: Sequence[Sequence[int]] | None, report: Report
    ) -> None:
        self.drafter, self.report = drafter, report
        self.is_toy = target is None
        self.target: Target = target or ToyTarget.random(7, 3)
        words = min(7, self.target.vocab_size)
        chance = random.Random(0)
        self.prompts = [list(p) for p in prompts or ()] or [
            [0],
            [1, 2, 3, 1, 2, 3, 1, 2],
            [chance.randrange(words) for _ in range(12)],
            [3, 4] * 6,
        ]
        self.tokens = self.passes = 0

    def bind(self) -> None:
        """`bind` accepts the target."""
        self.drafter.bind(self.target)

    def requests(
        self, settings: Sequence[dict[str, Any]], drafter: Drafter[Any] | None = None, **more: Any
    ) -> list[Request]:
        """A request per settings, prompts in turn."""
        return [
            Request(
                self.prompts[i % len(self.prompts)],
                SamplingParams(**{"max_tokens": 10, "seed": 7 + i, **one}),
                drafter or self.drafter,
                vocab_size=self.target.vocab_size,
                max_positions=self.target.max_positions,
                **{"depth": 6, "budget": 12, **more},
            )
            for i, one in enumerate(settings)
        ]

    def finish(self, requests: list[Request], max_rows: int | None = None) -> list[Request]:
        """The requests, run to their ends."""
        for _ in run(self.target, requests, max_rows=max_rows):
            pass
        for request in requests:
            if request.finish_reason == "error":
                raise Violation(f"a request failed: {request.error}")
            self.tokens += len(request.output_ids)
            self.passes += request.stats.num_target_passes
        return requests

    def equal(self, requests: list[Request]) -> str:
        """Every request has written what plain sampling writes."""
        for request in requests:
            plain = PlainLaw(self.target, request.prompt_ids, request.params)
            expected = plain.ids(Draws(request.params.seed or 0), request.max_tokens)
            if request.output_ids != expected:
                raise Violation(
                    f"prompt {request.prompt_ids[-12:]}, T={request.params.temperature:g}, seed {request.seed}: "
                    f"{request.output_ids} was emitted, plain decoding writes {expected}"
                )
        drafted = sum(request.stats.num_draft_tokens for request in requests)
        kept = sum(request.stats.num_accepted_tokens for request in requests)
        return f"{len(requests)} texts equal, {kept} of {drafted} drafted tokens kept"

    def same_ids(self, settings: dict[str, Any]) -> str:
        """Each prompt alone and all together."""
        many = [settings] * len(self.prompts)
        alone = [one for request in self.requests(many) for one in self.finish([request])]
        return self.equal(alone + self.finish(self.requests(many)))

    def settings(self) -> str:
        """Filters, penalties and bans, whose laws depend on the drafted path."""
        kinds: list[dict[str, Any]] = [
            {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"repetition_penalty": 1.4, "temperature": 0.0},
            {"frequency_penalty": 0.8, "presence_penalty": 0.5}, {"logit_bias": {1: 2.0, 2: -3.0}},
            {"no_repeat_ngram_size": 2, "temperature": 0.0}, {"temperature": 1.7},
        ]  # fmt: skip
        return self.equal(self.finish(self.requests(kinds)))

    def rows(self) -> str:
        """More requests than rows, of different lengths: their places change hands."""
        mixed = [{"max_tokens": 2 + 3 * i % 11, "temperature": float(i % 2)} for i in range(7)]
        return self.equal(self.finish(self.requests(mixed), max_rows=3))

    def budgets(self) -> str:
        """Small budgets and shallow drafts."""
        done: list[Request] = []
        for depth, budget in ((6, 0), (6, 1), (6, 2), (1, 12), (0, 12)):
            done += self.finish(self.requests([{"temperature": 1.0}] * 2, depth=depth, budget=budget))
        return self.equal(done)

    def stops(self) -> str:
        """Stop ids that come early, so that drafts reach beyond the end."""
        count = 0
        for request in self.finish(self.requests([{"max_tokens": 14}] * len(self.prompts))):
            ids = request.output_ids
            for stop in set(ids):
                own = {"max_tokens": 14, "seed": request.params.seed, "stop_token_ids": [stop]}
                (again,) = self.finish(
                    [r for r in self.requests([own] * len(self.prompts)) if r.prompt_ids == request.prompt_ids][:1]
                )
                if again.output_ids != ids[: ids.index(stop) + 1] or again.finish_reason != "stop":
                    raise Violation(
                        f"stop id {stop}: {again.output_ids} was emitted ({again.finish_reason}), text {ids}"
                    )
                count += 1
        return f"{count} stops"

    def chunks(self) -> str:
        """`begin` sees the first chunk of a prompt, `observe` the others."""
        length = 2 * CHUNK + 7
        if self.target.max_positions < length + 4:
            raise NotApplicable(f"the context holds {self.target.max_positions} positions, {length} are needed")
        prompt = [token % min(5, self.target.vocab_size) for token in range(length)]
        target = ToyTarget([[1 / 7] * 7] * 7) if self.is_toy else self.target
        params = SamplingParams(max_tokens=6, seed=1)
        request = Request(
            prompt,
            params,
            self.drafter,
            vocab_size=target.vocab_size,
            max_positions=target.max_positions,
            depth=4,
            budget=4,
        )
        for _ in run(target, [request]):
            pass
        expected = PlainLaw(target, prompt, params).ids(Draws(1), 6)
        if request.output_ids != expected:
            raise Violation(f"{request.output_ids} was emitted, plain decoding writes {expected}")
        return f"{length} tokens"

    def labels(self) -> str:
        """What every tree must hold for its label to be believed."""
        watch = _Watched(self.drafter)
        for settings in ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"temperature": 0.0}):
            for rule in ("coupled", "standard"):
                try:
                    self.finish(self.requests([settings] * len(self.prompts), watch, rule=rule))
                except IncompatibleDrafter as error:
                    if rule == "coupled":
                        raise
                    raise NotApplicable(f"refused by the rules that need q: {error}") from None
        kinds: Counter[str] = Counter()
        for tree in watch.trees:
            _check_label(tree)
            kinds[tree.drawn.name] += tree.num_nodes > 1
        return ", ".join(f"{count} trees {name}" for name, count in kinds.items() if count) or "no tree had a guess"

    def exact(self, rule: str) -> str:
        """The law of short texts, enumerated; on a large vocabulary under top_k=2."""
        if self.is_toy:
            target: Target = ToyTarget.random(3, 5)
            trials: list[dict[str, Any]] = [
                {"length": 3, "prompt": [0, 1, 2, 0, 1]},
                {"length": 3, "prompt": [0]},
                {"length": 3, "prompt": [0, 1, 0], "params": SamplingParams(temperature=0.5, top_k=2)},
                {"length": 3, "prompt": [2, 1], "params": SamplingParams(repetition_penalty=1.5, presence_penalty=1)},
            ]
        else:
            target = self.target
            small = SamplingParams(top_k=2)
            trials = [{"length": 3, "prompt": prompt, "params": small} for prompt in self.prompts[:2]]
        self.drafter.bind(target)
        worst, done, reason = 0.0, 0, ""
        try:
            for trial in trials:
                for depth, budget in ((2, 4), (2, 2), (1, 2), (1, 1)):
                    try:
                        found = exact_law(
                            target, self.drafter, rule, depth=depth, budget=budget, max_outcomes=MOST_OUTCOMES, **trial
                        )
                    except TooManyOutcomes as error:
                        reason = str(error)
                        continue
                    except IncompatibleDrafter as error:
                        raise NotApplicable(f"refused: {error}") from None
                    done += found.num_outcomes
                    worst = max(worst, found.total_variation)
                    where = f"{rule}, prompt {trial['prompt'][-4:]}, {depth} deep"
                    self.report.total_variations[where] = found.total_variation
                    if worst > (LIMIT if self.is_toy else REAL_LIMIT):
                        text, got, expected = found.worst
                        raise Violation(
                            f"the emitted law is {worst:.3g} from the target's (total variation, exact): text "
                            f"{list(text)} has probability {got:.6f}, not {expected:.6f}. Is every child drawn "
                            "by ask.draws from exactly the q that is reported, and no node dropped for its own value?"
                        )
                    break
        finally:
            self.drafter.bind(self.target)
        if not done:
            raise NotApplicable(reason)
        return f"{done} outcomes, total variation {worst:.1e}"

    def twice(self, rules: Sequence[str]) -> str:
        """Ids and statistics are a function of the call, whatever other calls come in between."""
        for rule in rules:

            def call(seed: int, rule: str = rule) -> list[Any]:
                settings = [{"temperature": 1.0, "seed": seed + i} for i in range(len(self.prompts))]
                done = self.finish(self.requests(settings, rule=rule))
                return [(r.output_ids, r.stats.num_draft_tokens, r.stats.num_accepted_tokens) for r in done]

            try:
                first = call(7)
                for other in (100, 200):
                    call(other)
                    again = call(7)
                    if first != again:
                        raise Violation(f"under {rule} a call gave {first} and the same call then {again}")
            except IncompatibleDrafter:
                if rule == "coupled":
                    raise
        return ""

    def global_state(self) -> None:
        """The global generators and the default settings of torch."""

        def state() -> tuple[Any, ...]:
            return (
                torch.get_rng_state().tolist(), random.getstate(), torch.get_default_dtype(), torch.get_num_threads(),
                torch.is_grad_enabled(),
            )  # fmt: skip

        before = state()
        self.finish(self.requests([{"temperature": 1.0}] * 2))
        if state() != before:
            raise Violation(
                "a run changed the global random state, the default dtype, the threads or the gradient mode; draw by "
                "ask.draws, which is the request's own"
            )

    def shown(self) -> None:
        """Logits and hidden states that the target gave, and the prompt, are only read."""
        given: list[tuple[Tensor, Tensor]] = []
        watch = _Watched(self.drafter, given)
        requests = self.requests([{"temperature": 1.0}] * len(self.prompts), watch)
        prompts = [list(request.prompt_ids) for request in requests]
        self.finish(requests)
        if not all(_unchanged(now, before) for now, before in given):
            raise Violation("the drafter wrote into the logits or hidden states of a Step")
        if [request.prompt_ids for request in requests] != prompts:
            raise Violation("the drafter changed the prompt")

    def ends(self) -> str:
        """Runs closed after 0 to 3 steps, and one that breaks: every state that began has ended, once."""
        count = 0
        for steps in range(4):
            watch = _Watched(self.drafter)
            running = run(self.target, self.requests([{}] * 3, watch), max_rows=2)
            for _ in range(steps):
                next(running)
            running.close()
            if watch.begun != watch.ended:
                raise Violation(f"{watch.begun} states were begun and {watch.ended} ended")
            count += watch.begun
        return f"{count} states; a run afterwards is as before: {self.same_ids({'temperature': 1.0})}"

    def left_behind(self) -> str:
        """Objects alive after 16 calls and after 32, some of them given up."""
        watch = _Watched(self.drafter)

        def calls(count: int) -> tuple[int, int]:
            for call in range(count):
                running = run(self.target, self.requests([{"temperature": 1.0}] * 3, watch), max_rows=2)
                for _, _ in zip(range(2 + call % 5), running):
                    pass
                running.close()
            watch.trees.clear()
            gc.collect()
            # The collector does not list what holds plain numbers alone. Such a state is in no cycle: who holds it
            # besides the list it is in, the loop that looks at it and the question itself keeps it alive.
            hidden = {id(state) for state in watch.plain if sys.getrefcount(state) > 3}
            return len(gc.get_objects()), len(hidden)

        calls(8)
        first, second = calls(8), calls(16)
        if any(later > sooner + 8 for sooner, later in zip(first, second)):
            raise Violation(
                f"{sum(first)} objects were alive after 16 calls and {sum(second)} after 32: states are kept somewhere"
            )
        return f"{sum(second) - sum(first)} objects more after 16 more calls"

    def helps(self, least: float) -> str:
        """The mean acceptance length of everything that ran."""
        found = self.report.mean_acceptance_length or 1.0
        if found < least:
            raise Violation(f"{found:.3f} tokens per pass over the target, and at least {least} was expected")
        return f"{found:.3f} tokens per pass"


def _unchanged(now: Tensor, before: Tensor) -> bool:
    """The same values, NaN in the same places."""
    return torch.equal(now.isnan(), before.isnan()) and torch.equal(now.nan_to_num(0.0), before.nan_to_num(0.0))


def _check_label(tree: TokenTree) -> None:
    """A label and a q that can be true."""
    if tree.drawn is Drawn.FIXED or tree.num_nodes == 1:
        return
    if tree.q is None:
        return  # refused by the rules that need it
    for node, children in enumerate(tree.children):
        if not children:
            continue
        row = tree.q[node].double()
        total = float(row.sum())
        if not (math.isfinite(total) and float(row.min()) >= 0.0 and abs(total - 1.0) < 0.02):
            raise Violation(f"q of node {node} sums to {total:.4g} with least {float(row.min()):.4g}; it is no law")
        for child in children:
            token = tree.ids[child]
            if token >= row.shape[0] or float(row[token]) <= 0.0:
                raise Violation(
                    f"node {child} is token {token}, to which the q of its parent gives probability 0: it was not "
                    f"drawn from that q, as its label {tree.drawn.name} says"
                )


class _Watched(Drafter[Any]):
    """A drafter that another one stands in front of: what it proposes, begins and ends is counted."""

    def __init__(self, inner: Drafter[Any], given: list[tuple[Tensor, Tensor]] | None = None) -> None:
        self.inner, self.taps, self.reads_logits = inner, inner.taps, inner.reads_logits
        self.trees: list[TokenTree] = []
        self.plain: list[Any] = []
        """States that have ended and hold plain numbers alone."""
        self.begun = self.ended = 0
        self.given = given

    def begin(self, prompt: Step) -> Any:
        self._note(prompt)
        state = self.inner.begin(prompt)
        self.begun += 1
        return state

    def propose(self, states: list[Any], asks: list[Ask]) -> list[TokenTree]:
        trees = self.inner.propose(states, asks)
        self.trees += trees
        return trees

    def observe(self, states: list[Any], steps: list[Step]) -> None:
        for step in steps:
            self._note(step)
        self.inner.observe(states, steps)

    def end(self, state: Any) -> None:
        self.ended += 1
        self.inner.end(state)
        if not gc.is_tracked(state):
            self.plain.append(state)

    def _note(self, step: Step) -> None:
        if self.given is not None:
            shown = [one for one in (step.logits, step.hidden, step.rider_logits) if one is not None]
            self.given += [(one, one.clone()) for one in shown]
