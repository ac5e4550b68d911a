"""The object most users hold: a model, its tokenizer, and text from it."""

import copy
import os
import reprlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from paceline.decode import Request, run
from paceline.draft import Loaded, SpeculativeConfig, check_corpora
from paceline.draft.base import Drafter
from paceline.draft.compose import Compose
from paceline.draft.costs import Costs, Curve, typical
from paceline.draft.eagle import Eagle
from paceline.draft.medusa import Medusa
from paceline.draft.pieces import Dictionary
from paceline.draft.self_check import DoubtfulHead, self_check
from paceline.draft.tuning import TEXT, tune
from paceline.draft.vocabulary import check_vocabularies
from paceline.errors import BadRequest, IncompatibleDrafter, PacelineError, check_whole
from paceline.kernels.cpu import threads_available
from paceline.models import Source, load_model, load_tokenizer, resolve
from paceline.output import Logprob, Piece, RequestOutput
from paceline.prefix import Prefixes
from paceline.progress import meter
from paceline.sampling import SamplingParams, fresh_seed
from paceline.target import HFTarget
from paceline.text import Text, encode_bad_word, special_stops

Config = Mapping[str, Any] | SpeculativeConfig | None
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
AUTO = SpeculativeConfig()
LOOK = 256
"""Tokens of the text that a head is held against its target on."""
MOST_DRAFTERS = 8
"""Settings whose drafters are kept ready; the oldest goes first, the LLM's own stays."""


@dataclass
class _Job:
    """One prompt of a call: its samples, or why there are none."""

    prompt_ids: list[int]
    samples: list[Request]
    error: str | None = None


class LLM:
    """A language model that writes the same text with speculation as without it, sooner.

    Args:
        model: a named model, a hub id, a folder, or a `.gguf` file.
        speculative_config: how to speculate, see `SpeculativeConfig`; every call may override it. Left out, the
            method is `auto`; None or `{"method": "none"}` is plain decoding.
        dtype: `auto` (the checkpoint's), `bfloat16`, `float16`, `float32` or `float64`.
        device: `auto`, `cpu`, `cuda`, `cuda:1` …
        max_model_len: most tokens of prompt and answer together; by default the model's own context.
        max_num_seqs: most prompts decoded at once; the others wait their turn.
        threads: CPU threads; by default the cores given to this process.
        reuse_prefix: keep keys and values of recent requests (up to 512 MiB), so that a prompt which begins like one of
            them is read only from where it differs: the next turn of a chat reads what is new.
    """

    def __init__(
        self,
        model: "str | os.PathLike[str]",
        speculative_config: Config = AUTO,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        threads: int | None = None,
        reuse_prefix: bool = True,
    ) -> None:
        self._config = SpeculativeConfig.read(speculative_config)
        _check_limits(max_model_len=max_model_len, max_num_seqs=max_num_seqs, threads=threads)
        torch.set_num_threads(threads or threads_available())
        self.source: Source = resolve(model, progress=True)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.source)
        self._own(load_model(self.source, dtype=dtype, device=device), max_model_len, max_num_seqs, reuse_prefix)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        speculative_config: Config = AUTO,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        reuse_prefix: bool = True,
    ) -> "LLM":
        """An LLM around a model and a tokenizer already loaded; the model is changed in place and belongs to it."""
        self = cls.__new__(cls)
        self._config = SpeculativeConfig.read(speculative_config)
        _check_limits(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        self.source = Source(type(model).__name__, Path(model.name_or_path or "."), "object", "given as an object")
        self.tokenizer = tokenizer
        self._own(model, max_model_len, max_num_seqs, reuse_prefix)
        return self

    def _own(self, model: PreTrainedModel, max_model_len: int | None, max_num_seqs: int, reuse_prefix: bool) -> None:
        self.target = HFTarget(model)
        context = self.target.max_positions
        if max_model_len is not None and max_model_len > context:
            raise BadRequest(f"max_model_len={max_model_len} was given; the model's context is {context}")
        self.max_model_len, self.max_num_seqs = max_model_len or context, max_num_seqs
        self.eos_ids = _eos_ids(model, self.tokenizer)
        self._prefixes = Prefixes() if reuse_prefix else None
        # One drafter per setting, bound once: weights live in it, text does not.
        self._drafters: dict[SpeculativeConfig, Drafter[Any]] = {}
        self._drafts: dict[tuple[Any, ...], Loaded] = {}
        self._checked: set[str] = set()
        self.verify_all = False
        """Whether guesses are verified that do not pay, too: for those who look at the drafter, not at the time."""
        self._drafter(self._config)

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own: `SamplingParams.from_model` reads it."""
        return cast(GenerationConfig, self.target.model.generation_config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative_config: Config | Sequence[Config] = AUTO,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """One answer per prompt, in order; the further samples of a prompt are in its answer's `samples`.

        Any number of prompts may be given: `max_num_seqs` run at once, in order, and each that ends makes room for the
        next. A prompt that cannot be honoured fails alone: its answer has `finish_reason` "error" and the reason in
        `error`. Where none can be, the call raises.

        Args:
            prompts: raw text (no chat template), ids, or a list of either; a single one gives a list of one.
            params: for all prompts, or one per prompt; by default `SamplingParams()`.
            speculative_config: for this call only, for all prompts or one per prompt; left out, the LLM's own.
            progress: show a bar on standard error.

        Raises:
            BadRequest: before any work, if the call makes no sense or none of its prompts can be honoured.
        """
        jobs = self._jobs(_listed(prompts), params, speculative_config)
        rows = [sample for job in jobs for sample in job.samples]
        with meter("generating", len(rows), progress, unit="answers") as tick:
            done = 0
            tick(done)
            for row in run(self.target, rows, max_rows=self.max_num_seqs, prefixes=self._prefixes):
                done += row.finish_reason is not None
                tick(done)
        return [self._output(job) for job in jobs]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative_config: Config = AUTO
    ) -> "Stream":
        """The answer to one prompt, piece by piece, as it is written; with `n` above 1 the samples take turns."""
        (job,) = self._jobs([prompt], params, speculative_config)
        return Stream(self, job)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, speculative_config: Config = AUTO
    ) -> RequestOutput:
        """The model's next turn: the chat template is applied, then as `generate`."""
        return self.generate([self.chat_ids(messages)], params, speculative_config=speculative_config)[0]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation through the model's chat template, up to where the model's turn begins.

        Raises:
            BadRequest: the model has no chat template, or a message is not a dict with role and content.
        """
        if not messages or not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
            raise BadRequest(f"messages are {messages!r}; a list of {{'role': …, 'content': …}} is needed")
        if not self.tokenizer.chat_template:
            raise BadRequest(f"{self.source.name} has no chat template; give the whole prompt to generate instead")
        turns = [{str(key): _encodable(str(value), "a message") for key, value in m.items()} for m in messages]
        ids = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return cast(list[int], ids)

    def _drafter(self, config: SpeculativeConfig) -> Drafter[Any]:
        if config not in self._drafters:
            if config.planned is not None:
                config.planned.check(self.target)
            drafter = self.drafter_for(config, None if config.planned is None else config.planned.target)
            if len(self._drafters) == MOST_DRAFTERS:
                del self._drafters[next(name for name in self._drafters if name != self._config)]
            self._drafters[config] = drafter
            used = {key for one in self._drafters for key in one.draft_keys}
            self._drafts = {key: draft for key, draft in self._drafts.items() if key in used}
        return self._drafters[config]

    def drafter_for(self, config: SpeculativeConfig, curve: Curve | None = None) -> Drafter[Any]:
        """A new drafter with these settings, bound to the target.

        Args:
            curve: what passes of the target cost, if they were measured.
        """
        usual = typical(self.target.kernel.name)
        drafter = config.drafter(self._draft, self._prefixes is not None, usual, curve)
        check_corpora(drafter, self.tokenizer, self.source.name)
        drafter.bind(self.target)
        self._check_heads(drafter)
        return drafter

    def _check_heads(self, drafter: Drafter[Any]) -> None:
        """Hold heads against the target, each once, and say what looks wrong."""
        for one in drafter.drafters if isinstance(drafter, Compose) else (drafter,):
            if isinstance(one, Medusa | Eagle) and str(one.head.source) not in self._checked:
                self._checked.add(str(one.head.source))
                ids = list(self.tokenizer(TEXT).input_ids)[: min(LOOK, self.max_model_len)]
                if (warning := self_check(self.target, one, ids).warning) is not None:
                    warnings.warn(warning, DoubtfulHead, stacklevel=2)

    def _costs(self, config: SpeculativeConfig, drafter: Drafter[Any]) -> Costs | None:
        """What passes cost: as planned, as the drafter knows, or as they do as a rule; None verifies all guesses."""
        if self.verify_all:
            return None
        known = drafter.costs or typical(self.target.kernel.name)
        return known if config.planned is None else known.on(config.planned.target)

    def _draft(self, config: SpeculativeConfig) -> Loaded:
        """The draft model of a config, loaded and tuned once for all settings that use it."""
        (key,) = config.draft_keys
        if key not in self._drafts:
            model, words = config.model, None
            ids = list(self.tokenizer(TEXT).input_ids)
            if isinstance(model, PreTrainedModel):
                draft = HFTarget(model)
            else:
                source = resolve(model, progress=True)
                words = _dictionary(self.tokenizer, load_tokenizer(source))
                draft = HFTarget(load_model(source, device=str(self.target.device)))
            own = None if words is None else words.draft.encode(TEXT)
            tuning = tune(self.target, draft, ids, own, dtype=config.draft_dtype, vocab_size=config.draft_vocab_size)
            self._drafts[key] = Loaded(draft, None if tuning is None else tuning.costs, words)
        return self._drafts[key]

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        speculative_config: Config | Sequence[Config],
    ) -> list[_Job]:
        """Every request of a call, checked before any of them runs."""
        chosen = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if not all(isinstance(one, SamplingParams) for one in chosen):
            raise BadRequest(f"params are {reprlib.repr(params)}; SamplingParams, or a list of them, is needed")
        configs = (
            list(speculative_config)
            if isinstance(speculative_config, Sequence) and not isinstance(speculative_config, str)
            else [speculative_config] * len(prompts)
        )
        for what, given in (("SamplingParams", chosen), ("speculative_configs", configs)):
            if len(given) != len(prompts):
                raise BadRequest(f"{len(given)} {what} for {len(prompts)} prompts; give one, or one per prompt")
        read = [self._config if config is AUTO else SpeculativeConfig.read(config) for config in configs]
        drafters = [self._drafter(config) for config in read]
        own = _own_processors(chosen)
        jobs: list[_Job] = []
        errors: list[PacelineError] = []
        for prompt, one, processors, config, drafter in zip(prompts, chosen, own, read, drafters, strict=True):
            job = _Job([], [])
            try:
                job.prompt_ids = self._ids(prompt)
                costs = self._costs(config, drafter)
                job.samples = self._samples(job.prompt_ids, one, processors, config, drafter, costs)
            except PacelineError as error:
                errors.append(error)
                job.error = str(error)
            jobs.append(job)
        if errors and len(errors) == len(jobs):
            raise errors[0]
        return jobs

    def requests(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        config: SpeculativeConfig,
        drafter: Drafter[Any],
        costs: Costs | None,
    ) -> list[Request]:
        """Requests of one text each with a drafter and costs of one's own, as `paceline.decode.run` takes them.

        Args:
            costs: None verifies all guesses.
        """
        return [
            self._samples(ids, one, [()], config, drafter, costs)[0] for ids, one in zip(prompts, params, strict=True)
        ]

    def _samples(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        processors: list[tuple[Any, ...]],
        config: SpeculativeConfig,
        drafter: Drafter[Any],
        costs: Costs | None,
    ) -> list[Request]:
        seed = fresh_seed() if params.seed is None else params.seed
        return [
            Request(
                prompt_ids,
                replace(params, logits_processors=own) if own else params,
                drafter,
                vocab_size=self.target.vocab_size,
                max_positions=self.max_model_len,
                eos_ids=self.eos_ids,
                rule=config.rejection_sample_method,
                depth=config.depth,
                budget=config.num_draft_tokens,
                costs=costs,
                text=Text(
                    self.tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=params.stop,
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                ),
                stop_ids=special_stops(self.tokenizer, params.stop),
                encode=self._encode,
                sample=sample,
                seed=seed,
            )
            for sample, own in enumerate(processors)
        ]

    def _encode(self, word: str) -> list[list[int]]:
        return encode_bad_word(self.tokenizer, _encodable(word, "the bad word"))

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(_encodable(prompt, "the prompt")).input_ids) if prompt else []
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not listed or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in prompt):
            raise BadRequest(f"a prompt is {reprlib.repr(prompt)}; text or a list of token ids is needed")
        return [int(i) for i in prompt]

    def _output(self, job: _Job) -> RequestOutput:
        """What a prompt's samples came to."""
        if not job.samples:
            return RequestOutput(job.prompt_ids, "", [], "error", error=job.error)
        first, *others = [self._sample_output(sample) for sample in job.samples]
        first.others = others
        return first

    def _sample_output(self, request: Request) -> RequestOutput:
        assert request.text is not None
        assert request.seed is not None
        params = request.params
        return RequestOutput(
            prompt_token_ids=request.prompt_ids,
            text=request.text.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason or "abort",
            stop_reason=request.stop_reason,
            error=request.error,
            seed=request.seed,
            from_draft=request.from_draft,
            logprobs=None if params.logprobs is None else [self._named(one) for one in request.logprobs],
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else [None if one is None else self._named(one) for one in request.prompt_logprobs],
            stats=request.stats,
        )

    def _named(self, found: dict[int, Logprob]) -> dict[int, Logprob]:
        """Log-probs with their tokens as text."""
        return {i: replace(one, decoded_token=str(self.tokenizer.decode([i]))) for i, one in found.items()}


class Stream(Iterator[Piece]):
    """Pieces of one answer; `output` is the whole of it so far, complete once the stream has ended.

    `close()`, or leaving a `with` block, stops early and frees what the request held.
    """

    def __init__(self, llm: LLM, job: _Job) -> None:
        self._llm, self._job = llm, job
        self._steps = run(llm.target, job.samples, max_rows=llm.max_num_seqs, prefixes=llm._prefixes)
        self._shown = [0] * len(job.samples)

    def __next__(self) -> Piece:
        for row in self._steps:
            sample, ids = row.sample, row.output_ids[self._shown[row.sample] :]
            flags = row.from_draft[self._shown[sample] :]
            self._shown[sample] += len(ids)
            assert row.text is not None
            return Piece(row.text.take(), ids, flags, row.finish_reason, sample)
        raise StopIteration

    @property
    def output(self) -> RequestOutput:
        """What has been written so far; `finish_reason` is "abort" when it was stopped early."""
        return self._llm._output(self._job)

    def close(self) -> None:
        """Stop here; nothing more is computed."""
        self._steps.close()
        for row in self._job.samples:
            if row.finish_reason is None:  # not even begun
                row.finish("abort")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own_processors(params: Sequence[SamplingParams]) -> list[list[tuple[Any, ...]]]:
    """Logits processors for each sample of each prompt: one used by several rows is copied, since it may have state.

    Its `clone()` makes the copies if it has one; else a deep copy, modules that it refers to being shared.
    """
    uses = Counter(id(p) for one in params for p in one.logits_processors for _ in range(one.n))
    return [
        [tuple(_copied(p) if uses[id(p)] > 1 else p for p in one.logits_processors) for _ in range(one.n)]
        for one in params
    ]


def _copied(processor: Any) -> Any:
    try:
        if hasattr(processor, "clone"):
            return processor.clone()
        shared = {id(v): v for v in getattr(processor, "__dict__", {}).values() if isinstance(v, nn.Module)}
        return copy.deepcopy(processor, shared)
    except Exception as error:
        raise BadRequest(
            f"the logits processor {type(processor).__name__} serves several rows, each needs its own, and it cannot "
            f"be copied ({error}); give it a clone() method, or one SamplingParams per prompt"
        ) from error


def _check_limits(**limits: object) -> None:
    for name, value in limits.items():
        if value is not None or name == "max_num_seqs":
            check_whole(name, value, 1)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list: one text, or one list of ids, is a list of one."""
    if not isinstance(prompts, Sequence):
        raise BadRequest(
            f"prompts are {reprlib.repr(prompts)}; text, a list of token ids, or a list of either is needed"
        )
    if isinstance(prompts, str | bytes) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _encodable(text: str, what: str) -> str:
    """The text, if it has no half characters: tokenizers break on these."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{what} {reprlib.repr(text)} is no text: {error.reason}") from error
    return text


def _dictionary(target_tokenizer: Any, draft_tokenizer: Any) -> Dictionary | None:
    """What a draft's ids are for the target; None where they mean the same."""
    try:
        check_vocabularies(target_tokenizer, draft_tokenizer)
    except IncompatibleDrafter:
        words = Dictionary.of(target_tokenizer, draft_tokenizer)
        return None if words.is_same else words  # the same but for the token that ends texts
    return None


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What ends a text: the generation config's ids, else the model's, else the tokenizer's; possibly none."""
    for holder in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
