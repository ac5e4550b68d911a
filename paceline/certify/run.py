"""`certify`: layers of proof on one model, one method and this machine, from the strongest to the weakest.

rule         every outcome of the installed rule on small targets, with its probability
drafter      the same for the drafter in use: on small targets, or on the model's own laws cut to a few tokens
greedy       texts with speculation against texts without, at temperature 0; differences go to the judge
sampled      the same with a seed at temperature 0.8, where the rule promises the same text
joint law    the first three tokens of many samples against the model's own laws, at temperature 1
acceptance   how many guesses were kept: a drafter that never helps cannot be seen in any text
"""

import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from paceline.certify.certificate import Certificate, Layer, Parted, Strength, Verdict
from paceline.certify.judge import Difference, differences
from paceline.certify.own_laws import OwnLaws
from paceline.certify.statistics import EProcess, GTest, combine, g_test, smallest_detectable_tv
from paceline.decode import run
from paceline.draft import SpeculativeConfig
from paceline.errors import BadRequest, IncompatibleDrafter, PacelineError
from paceline.llm import LLM
from paceline.models import load_model, resolve
from paceline.output import RequestOutput
from paceline.progress import meter
from paceline.sampling import SamplingParams
from paceline.testing.drafters import check_drafter
from paceline.testing.exact import PlainLaw, TooManyOutcomes, Violation, exact_law
from paceline.testing.report import Report
from paceline.testing.rules import check_rule

Mode = Literal["quick", "standard", "full"]
ALPHA = 1e-4
"""Chance that the joint-law layer calls a bug where there is none: half of it for each of its two tests."""
SAMPLED = 0.8
"""Temperature of the sampled texts."""
OPENINGS = ("import numpy as", "Once upon a time", "Question: How are you?\nAnswer:", "for i in range(")
"""Where the joint law is sampled: beginnings after which a dozen texts share most of the probability, none too much."""
OWN_LIMIT = 1e-4
"""Total variation that float32 laws of a real model may show in an enumeration."""
ROWS = 16
"""Rows at a time when many short samples are drawn."""
MISSED = 0.9
"""Share of the guesses that an independent reading of the draft model has right which must be kept at least."""


class Size(NamedTuple):
    """How much a mode does."""

    num_prompts: int
    max_tokens: int
    num_samples: int
    """Samples of the joint law per opening."""
    num_openings: int
    own_length: int
    """Tokens enumerated on the model's own laws."""


SIZES: dict[Mode, Size] = {
    "quick": Size(6, 32, 512, 2, 2),
    "standard": Size(12, 64, 2048, 3, 2),
    "full": Size(40, 128, 8192, 4, 3),
}


class Named(NamedTuple):
    """A prompt and what to call it."""

    name: str
    ids: list[int]


def certify(
    llm: LLM,
    config: Mapping[str, Any] | SpeculativeConfig,
    prompts: Sequence[Named],
    *,
    mode: Mode = "standard",
    method: str | None = None,
    reference: PreTrainedModel | None = None,
    progress: bool = False,
) -> Certificate:
    """Whether what this method writes is the model's own, as far as this machine can tell.

    Args:
        llm: the model; its own method does not matter.
        config: the method to certify.
        prompts: what is written on in the greedy and sampled layers; `mode` says how many are used.
        mode: `quick` (two minutes for half a billion weights on two cores), `standard` or `full`.
        method: what to call the method; by default the config's name for it.
        reference: the model as `transformers` loads it, for the judge of differences; by default loaded again.
        progress: show what is being done, and the time left, on standard error.

    Raises:
        BadRequest: plain decoding was named, or there are no prompts.
    """
    settings = SpeculativeConfig.read(config)
    if settings.is_plain:
        raise BadRequest("plain decoding is what others are compared with; name a method, such as --method ngram")
    if not prompts:
        raise BadRequest("there are no prompts to write on; give at least one")
    work = _Work(llm, settings, list(prompts), SIZES[mode], mode, reference, progress)
    begun = time.monotonic()
    certificate = Certificate(
        llm.source.name, method or work.method, settings.rejection_sample_method, mode, environment=_environment(llm)
    )
    usual, llm.verify_all = llm.verify_all, True  # a guess that is not verified proves nothing
    try:
        for layer in (work.rule, work.drafter, work.greedy, work.sampled, work.joint_law, work.acceptance):
            started = time.monotonic()
            found = layer()
            certificate.layers.append(replace(found, seconds=time.monotonic() - started))
    finally:
        llm.verify_all = usual
    certificate.parted = work.parted
    certificate.notes = work.notes
    if work.num_compared:
        near = sum(one.near_tie for one in work.differences)
        certificate.near_ties_per_1000 = 1000 * near / work.num_compared
    certificate.mean_acceptance_length = work.mean_acceptance_length
    certificate.seconds = time.monotonic() - begun
    return certificate


def _environment(llm: LLM) -> dict[str, str]:
    target = llm.target
    return {
        "weights": llm.source.note or str(llm.source.path),
        "forward": target.kernel.name
        + (f", same bits up to {target.kernel.width} rows" if target.kernel.width else ""),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": f"{target.device}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


class _Work:
    """One certification while it runs."""

    def __init__(
        self,
        llm: LLM,
        config: SpeculativeConfig,
        prompts: list[Named],
        size: Size,
        mode: Mode,
        reference: PreTrainedModel | None,
        progress: bool,
    ) -> None:
        self.llm, self.config, self.size, self.mode, self.progress = llm, config, size, mode, progress
        self.prompts = prompts[: size.num_prompts]
        self.rule_name = config.rejection_sample_method
        self.is_seeded = self.rule_name == "coupled"
        self.method = config.method if isinstance(config.method, str) else type(config.method).__name__
        self._reference = reference
        self.parted: list[Parted] = []
        self.differences: list[Difference] = []
        self.notes: list[str] = []
        self.num_compared = 0
        self.greedy_outputs: list[RequestOutput] = []
        self.outputs: list[RequestOutput] = []
        """Everything written with speculation, for the acceptance."""
        if self.is_seeded:
            self.notes.append(
                "The coupled rule uses neither labels nor q: what a drafter says about itself cannot matter. Under "
                "block and standard it does, so a drafter certified here is not thereby certified there."
            )

    @property
    def reference(self) -> PreTrainedModel:
        """The model as `transformers` runs it, loaded when a difference has to be judged."""
        if self._reference is None:
            source = self.llm.source
            if source.kind == "object":
                raise BadRequest("the model was given as an object; give certify(reference=) an unmodified copy of it")
            dtype = str(self.llm.target.dtype).removeprefix("torch.")
            self._reference = load_model(source, dtype=dtype, device=str(self.llm.target.device))
        return self._reference

    @contextmanager
    def shown(self, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        with meter(what, total, self.progress, unit=unit) as tick:
            tick(0)
            yield tick

    # -- proofs ----------------------------------------------------------------------------------------------------

    def rule(self) -> Layer:
        """The installed rule, enumerated."""
        with self.shown(f"rule {self.rule_name}: every outcome on small targets", 1, "proof") as tick:
            report = check_rule(self.rule_name, quick=self.mode == "quick")
            tick(1)
        cases = [{"name": name, "total_variation": tv} for name, tv in report.total_variations.items()]
        worst = max(report.total_variations.values(), default=0.0)
        if report.failed:
            return _failed("rule", "proved", report, {"cases": cases})
        if self.is_seeded:
            text = "; ".join(f"{check.name}: {check.detail}" for check in report.checks) + "."
            text = f"Random laws, trees, settings and seeds. {text[0].upper()}{text[1:]}"
            return Layer("rule", "equal", "lossless", text)
        return Layer(
            "rule",
            "proved",
            "lossless",
            f"The law of what is emitted is the target's in all {len(cases)} cases of label, shape and vocabulary: "
            f"largest total variation {worst:.1e}, every outcome counted.",
            {"cases": cases},
        )

    def drafter(self) -> Layer:
        """The drafter in use, on small targets if it can serve them, else on the model's own laws."""
        if not self.config.draft_keys:  # a draft model reads this vocabulary alone
            drafter = self.config.drafter()
            with self.shown(f"drafter {self.method}: every outcome on small targets", 1, "proof") as tick:
                report = check_drafter(drafter, rules=(self.rule_name,))
                tick(1)
            drafter.bind(self.llm.target)
            if not _is_for_other_targets(report):
                return self._drafter_layer(report)
        if self.is_seeded:
            return Layer(
                "drafter", "equal", "skipped", "It serves this model alone, and what it writes there is compared below."
            )
        return self._own_laws()

    def _drafter_layer(self, report: Report) -> Layer:
        cases = [{"name": name, "total_variation": tv} for name, tv in report.total_variations.items()]
        if report.failed:
            return _failed("drafter", "equal" if self.is_seeded else "proved", report, {"cases": cases})
        if self.is_seeded:
            text = f"{len(report.checks)} checks on small targets: the ids of plain sampling in every batch and budget."
            return Layer("drafter", "equal", "lossless", text)
        worst = max(report.total_variations.values(), default=0.0)
        skipped = [check.detail for check in report.checks if check.skipped and "truthful" in check.name]
        if skipped:
            return self._own_laws()
        text = (
            f"{len(report.checks)} checks on small targets; what the rule emits with it has the target's exact law: "
            f"largest total variation {worst:.1e}."
        )
        return Layer("drafter", "proved", "lossless", text, {"cases": cases})

    def _own_laws(self) -> Layer:
        """The exact law over the model's own next-token laws, cut to their two likeliest tokens."""
        laws, settings = OwnLaws(self.llm.target), SamplingParams(top_k=2, max_tokens=self.size.own_length)
        drafter = self.llm._drafter(self.config)
        cases: list[dict[str, Any]] = []
        worst, count = 0.0, 0
        openings = self.openings()[: self.size.num_openings]
        with self.shown("drafter: every outcome on the model's own laws", len(openings), "openings") as tick:
            for done, opening in enumerate(openings, 1):
                list(PlainLaw(laws, opening.ids, settings).texts())  # a model without a law is no fault of the drafter
                try:
                    found = exact_law(
                        laws,
                        drafter,
                        self.rule_name,
                        self.size.own_length,
                        prompt=opening.ids,
                        params=settings,
                        depth=self.size.own_length - 1,
                        budget=self.size.own_length - 1,
                    )
                except (IncompatibleDrafter, TooManyOutcomes) as error:
                    return Layer("drafter", "proved", "skipped", f"Not enumerable: {error}")
                except Violation as error:
                    return Layer("drafter", "proved", "bug", f"Behind {opening.name}: {error}", {"cases": cases})
                cases.append(
                    {"name": opening.name, "total_variation": found.total_variation, "accepted": found.accepted}
                )
                worst, count = max(worst, found.total_variation), count + found.num_outcomes
                tick(done)
        verdict: Verdict = "bug" if worst > OWN_LIMIT else "lossless"
        return Layer(
            "drafter",
            "proved",
            verdict,
            f"On the model's own laws cut to two tokens, {self.size.own_length} tokens deep, {count} outcomes counted: "
            f"largest total variation {worst:.1e}"
            + (": the drafter's label or q is not true." if verdict == "bug" else ".")
            + f" Of a pass's guesses {sum(case['accepted'] for case in cases) / len(cases):.2f} are kept on average.",
            {"cases": cases},
        )

    # -- the same ids ----------------------------------------------------------------------------------------------

    def greedy(self) -> Layer:
        """Texts at temperature 0."""
        layer = self._same_ids("greedy", SamplingParams(temperature=0.0, max_tokens=self.size.max_tokens))
        self.greedy_outputs = list(self.outputs)
        return layer

    def sampled(self) -> Layer:
        """Texts with a seed."""
        if not self.is_seeded:
            text = f"Under {self.rule_name} another text of the same law is written; the joint law below tests it."
            return Layer("sampled", "equal", "skipped", text)
        return self._same_ids("sampled", SamplingParams(temperature=SAMPLED, seed=7, max_tokens=self.size.max_tokens))

    def _same_ids(self, name: str, params: SamplingParams) -> Layer:
        ids = [prompt.ids for prompt in self.prompts]
        found: list[Difference] = []
        figures: list[dict[str, Any]] = []
        with self.shown(f"{name}: texts with and without", 2 * len(ids), "texts") as tick:
            # Plain decoding takes several rows at a time: that rows do not depend on each other is tried as well.
            # Every second sampled text is filtered, so that filters at drafted nodes are tried on the whole vocabulary.
            own = [replace(params, top_p=0.9) if i % 2 and not params.is_greedy else params for i in range(len(ids))]
            plain = _sound(self.llm.generate(ids, own, speculative_config={"method": "none"}))
            tick(len(ids))
            for done, (prompt, before, one) in enumerate(zip(self.prompts, plain, own, strict=True), 1):
                (after,) = _sound(self.llm.generate([prompt.ids], one, speculative_config=self.config))
                self.outputs.append(after)
                here = [] if after.token_ids == before.token_ids else self._judged(prompt, before, after, one)
                found += here
                same = here[0].index if here else len(before.token_ids)
                figures.append(
                    {
                        "name": prompt.name,
                        "tokens": len(before.token_ids),
                        "equal_tokens": same,
                        "parted": bool(here),
                    }
                )
                tick(len(ids) + done)
        tokens = sum(len(output.token_ids) for output in plain)
        self.num_compared += tokens
        self.differences += found
        bugs = [one for one in found if not one.near_tie]
        verdict: Verdict = "bug" if bugs else "near_ties_only" if found else "lossless"
        gaps = [abs(one.logit_expected - one.logit_got) for one in found]
        text = f"{len(plain)} texts, {tokens} tokens, T={params.temperature:g}: " + (
            "all ids equal."
            if not found
            else f"{len(found)} differences, {len(found) - len(bugs)} of them near-ties (largest gap {max(gaps):.3g}, "
            f"floor {max(one.floor for one in found):.3g}), {len(bugs)} bugs."
        )
        worst = {"worst_gap": max(gaps, default=None), "floor": max((one.floor for one in found), default=None)}
        return Layer(name, "equal", verdict, text, {"prompts": figures, **worst})

    def _judged(
        self, prompt: Named, before: RequestOutput, after: RequestOutput, params: SamplingParams
    ) -> list[Difference]:
        """Every difference of one text: after each, generation goes on behind the expected token."""

        def again(ids: list[int], most: int) -> list[int]:
            if ids == prompt.ids:
                return after.token_ids
            short = replace(params, max_tokens=most)
            (output,) = _sound(self.llm.generate([ids], short, speculative_config=self.config))
            return output.token_ids

        found: list[Difference] = []
        for one in differences(self.reference, again, prompt.ids, before.token_ids, params):
            # The judge counts from where generation started again: behind the difference before.
            found.append(replace(one, index=one.index + (found[-1].index + 1 if found else 0)))
        for number, one in enumerate(found):
            expected = before.token_ids[: one.index + 8]
            got = [
                *before.token_ids[: one.index],
                *(after.token_ids[one.index : one.index + 8] if not number else [one.got]),
            ]
            decode = self.llm.tokenizer.decode
            begin = max(0, one.index - 12)
            self.parted.append(
                Parted(
                    prompt.name, params.temperature, one, str(decode(expected[begin:])), str(decode(_real(got[begin:])))
                )
            )
        return found

    # -- the joint law ---------------------------------------------------------------------------------------------

    def openings(self) -> list[Named]:
        """Beginnings that leave the next tokens open."""
        read = self.llm.tokenizer
        return [Named(repr(text), list(read(text).input_ids)) for text in OPENINGS]

    def joint_law(self) -> Layer:
        """The first three tokens of many samples, at temperature 1."""
        openings, n = self.openings()[: self.size.num_openings], self.size.num_samples
        params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
        contexts: list[dict[str, Any]] = []
        tests: list[GTest] = []
        process, path = None, [0.0]
        with self.shown("joint law: samples", n * len(openings), "samples") as tick:
            for number, opening in enumerate(openings):
                probs = likeliest_texts(self.llm, opening.ids, params)
                texts = self._sample(opening.ids, params, n, number, tick)
                process = EProcess(probs, after=process)
                path += [process.update(text) / math.log(10) for text in texts]
                counts = Counter(texts)
                tests.append(g_test(counts, probs))
                contexts.append(self._context(opening, probs, counts, tests[-1].p_value, n))
        total = combine(tests)
        assert process is not None, "there is an opening in every mode"
        tv = smallest_detectable_tv(total.n, total.df, ALPHA / 2)
        bug = total.p_value < ALPHA / 2 or process.rejects(ALPHA / 2)
        text = (
            f"{total.n} samples of the first 3 tokens behind {len(openings)} openings: G-test p = {total.p_value:.3g}, "
            f"largest e-value {process.max_e_value:.3g}. A false alarm has probability {ALPHA:g}; a total variation of "
            f"{tv:.2g} or more would show in nine runs of ten."
        )
        figures = {
            "contexts": contexts,
            "p_value": total.p_value,
            "alpha": ALPHA / 2,
            "log10_e": path,
            "smallest_tv": tv,
        }
        if not total.df and not bug:
            text += " These laws are too flat for this many samples: no text was likely enough to be counted."
        return Layer("joint law", "tested", "bug" if bug else "lossless", text, figures)

    def _sample(
        self, ids: list[int], params: SamplingParams, count: int, seed: int, tick: Callable[[int], None]
    ) -> list[tuple[int, ...]]:
        """Samples of one opening, many rows at a time, by the method under test."""
        jobs = self.llm._jobs([ids], replace(params, n=count, seed=1000 + seed), self.config)
        rows = [sample for job in jobs for sample in job.samples]
        done = seed * count
        for row in run(self.llm.target, rows, max_rows=ROWS, prefixes=self.llm._prefixes):
            if row.finish_reason == "error":
                raise PacelineError(f"a sample failed: {row.error}")
            done += row.finish_reason is not None
            tick(done)
        return [tuple(row.output_ids) for row in rows]

    def _context(
        self, opening: Named, probs: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]], p: float, n: int
    ) -> dict[str, Any]:
        listed = sorted(probs, key=lambda text: -probs[text])
        rest = n - sum(counts[text] for text in listed)
        outcomes = [
            {
                "label": repr(str(self.llm.tokenizer.decode(list(text)))),
                "expected": probs[text],
                "observed": counts[text] / n,
                "count": counts[text],
            }
            for text in listed
        ]
        outcomes.append(
            {"label": "anything else", "expected": 1 - sum(probs.values()), "observed": rest / n, "count": rest}
        )
        return {"name": opening.name, "outcomes": outcomes, "p_value": p, "n": n}

    # -- acceptance ------------------------------------------------------------------------------------------------

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per pass in the texts that were compared."""
        passes = sum(output.stats.num_target_passes for output in self.outputs)
        tokens = sum(len(output.token_ids) for output in self.outputs)
        return tokens / passes if passes else None

    def acceptance(self) -> Layer:
        """What was kept of the guesses in the texts above."""
        stats = [output.stats for output in self.outputs]
        drafted = sum(one.num_draft_tokens for one in stats)
        accepted = sum(one.num_accepted_tokens for one in stats)
        depth = max((len(one.acceptance_histogram) for one in stats), default=0)
        histogram = [
            sum(one.acceptance_histogram[k] for one in stats if k < len(one.acceptance_histogram)) for k in range(depth)
        ]
        rounds = sum(histogram)
        by_position = [sum(histogram[k:]) / rounds for k in range(1, depth)] if rounds else []
        length = self.mean_acceptance_length
        text = (
            f"{length:.3f} tokens per pass; {accepted} of {drafted} guesses were kept."
            if length
            else "No text was written."
        )
        verdict: Verdict = "lossless"
        strength: Strength = "measured"
        foreseen = self._foreseen()
        if foreseen is not None:
            kept, expected = foreseen
            strength = "tested"
            text += f" An independent reading of the draft model foresees {expected} first guesses kept; {kept} were."
            if kept < MISSED * expected - 2:
                verdict = "bug"
                text += " The text is not affected, but the drafter does not read what it should."
        if drafted >= 50 and accepted == 0:
            self.notes.append(f"None of {drafted} guesses was kept: this drafter makes nothing faster.")
        figures = {
            "by_position": by_position,
            "mean_acceptance_length": length,
            "accepted": accepted,
            "drafted": drafted,
        }
        return Layer("acceptance", strength, verdict, text, figures)

    def _foreseen(self) -> tuple[int, int] | None:
        """First guesses kept in the greedy texts, and how many `transformers` finds the draft model to have right.

        None for other methods, and where the draft model was given as an object.
        """
        config = self.config
        if config.method != "draft_model" or isinstance(config.model, PreTrainedModel):
            return None
        draft: Any = load_model(resolve(config.model), device=str(self.llm.target.device))
        kept = expected = 0
        with self.shown("acceptance: reading with the draft model", len(self.greedy_outputs), "texts") as tick:
            for done, output in enumerate(self.greedy_outputs, 1):
                whole = [*output.prompt_token_ids, *output.token_ids]
                with torch.inference_mode():
                    logits = draft(torch.tensor([whole], device=draft.device), use_cache=False).logits[0]
                guesses = logits.topk(config.tree_top_k or 1).indices.tolist()
                flags = output.from_draft
                for i, token in enumerate(output.token_ids[:-1]):  # the last one is never drafted
                    if i == 0 or not flags[i - 1]:
                        kept += flags[i]
                        expected += token in guesses[len(output.prompt_token_ids) + i - 1]
                tick(done)
        return kept, expected


def likeliest_texts(llm: LLM, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The likeliest texts of three tokens with their probabilities: the cells of the test, fixed by the laws alone.

    Laws are those of plain decoding on this machine; `beam` texts at each place keep the reading to ten passes.
    """
    plain = PlainLaw(OwnLaws(llm.target), prompt, params)
    beams: dict[tuple[int, ...], float] = {(): 1.0}
    for beam in (4, 6, 12):
        longer: dict[tuple[int, ...], float] = {}
        for text, share in beams.items():
            law = plain.law(text)
            best = law.topk(beam)
            longer |= {(*text, int(t)): share * float(p) for p, t in zip(best.values, best.indices, strict=True)}
        beams = dict(sorted(longer.items(), key=lambda pair: -pair[1])[:beam])
    return beams


def _is_for_other_targets(report: Report) -> bool:
    """Whether a drafter cannot serve a small target at all, as one with a vocabulary of its own cannot."""
    return any(not check.passed and "IncompatibleDrafter" in check.detail for check in report.checks)


def _failed(name: str, strength: Any, report: Report, figures: dict[str, Any]) -> Layer:
    bad = [check for check in report.checks if not check.passed]
    text = f"{len(bad)} of {len(report.checks)} checks failed. {bad[0].name}: {bad[0].detail}"
    if bad[1:]:
        text += f" Also: {'; '.join(check.name for check in bad[1:])}."
    return Layer(name, strength, "bug", text, figures)


def _sound(outputs: list[RequestOutput]) -> list[RequestOutput]:
    for output in outputs:
        if output.finish_reason == "error":
            raise PacelineError(f"a text failed: {output.error}")
    return outputs


def _real(ids: list[int]) -> list[int]:
    return [token for token in ids if token >= 0]
