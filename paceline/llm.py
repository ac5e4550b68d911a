"""The object most users hold: a model, its tokenizer, and text from it."""

import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.decode import Request, run
from paceline.draft import SpeculativeConfig
from paceline.draft.base import Drafter
from paceline.errors import BadRequest
from paceline.kernels.cpu import threads_available
from paceline.models import Source, load_model, load_tokenizer, resolve
from paceline.output import Piece, RequestOutput
from paceline.sampling import SamplingParams
from paceline.target import HFTarget
from paceline.text import Detokenizer

Config = Mapping[str, Any] | SpeculativeConfig | None
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
AUTO = SpeculativeConfig()
MOST_DRAFTERS = 8
"""Settings whose drafters are kept ready; the oldest goes first, the LLM's own stays."""


class LLM:
    """A language model that writes the same text with speculation as without it, sooner.

    Args:
        model: a named model, a hub id, a folder, or a `.gguf` file.
        speculative_config: how to speculate, see `SpeculativeConfig`; every call may override it. Left out, the
            method is `auto`; None or `{"method": "none"}` is plain decoding.
        dtype: `auto` (the checkpoint's), `bfloat16`, `float16`, `float32` or `float64`.
        device: `auto`, `cpu`, `cuda`, `cuda:1` …
        max_model_len: most tokens of prompt and answer together; by default the model's own context.
        max_num_seqs: most prompts decoded at once.
        threads: CPU threads; by default the cores given to this process.
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
    ) -> None:
        self._config = SpeculativeConfig.read(speculative_config)
        _check_limits(max_model_len=max_model_len, max_num_seqs=max_num_seqs, threads=threads)
        torch.set_num_threads(threads or threads_available())
        self.source: Source = resolve(model, progress=True)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.source)
        self._own(load_model(self.source, dtype=dtype, device=device), max_model_len, max_num_seqs)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        speculative_config: Config = AUTO,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
    ) -> "LLM":
        """An LLM around a model and a tokenizer already loaded; the model is changed in place and belongs to it."""
        self = cls.__new__(cls)
        self._config = SpeculativeConfig.read(speculative_config)
        _check_limits(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        self.source = Source(type(model).__name__, Path(model.name_or_path or "."), "object", "given as an object")
        self.tokenizer = tokenizer
        self._own(model, max_model_len, max_num_seqs)
        return self

    def _own(self, model: PreTrainedModel, max_model_len: int | None, max_num_seqs: int) -> None:
        self.target = HFTarget(model)
        context = self.target.max_positions
        if max_model_len is not None and max_model_len > context:
            raise BadRequest(f"max_model_len={max_model_len} was given; the model's context is {context}")
        self.max_model_len, self.max_num_seqs = max_model_len or context, max_num_seqs
        self.eos_ids = _eos_ids(model, self.tokenizer)
        # One drafter per setting, bound once: weights live in it, text does not.
        self._drafters: dict[SpeculativeConfig, Drafter[Any]] = {}
        self._drafter(self._config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative_config: Config = AUTO,
    ) -> list[RequestOutput]:
        """One answer per prompt, in order.

        Args:
            prompts: raw text (no chat template), ids, or a list of either; a single one gives a list of one.
            params: for all prompts, or one per prompt; by default `SamplingParams()`.
            speculative_config: for this call only; left out, the LLM's own.

        Raises:
            BadRequest: before any work, if any prompt or setting cannot be honoured.
        """
        requests = self._requests(_listed(prompts), params, speculative_config)
        for begin in range(0, len(requests), self.max_num_seqs):
            for _ in run(self.target, requests[begin : begin + self.max_num_seqs]):
                pass
        return [self._output(request) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculative_config: Config = AUTO
    ) -> "Stream":
        """The answer to one prompt, piece by piece, as it is written."""
        (request,) = self._requests([prompt], params, speculative_config)
        return Stream(self, request)

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
        turns = [{str(key): str(value) for key, value in m.items()} for m in messages]
        ids = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return cast(list[int], ids)

    def _drafter(self, config: SpeculativeConfig) -> Drafter[Any]:
        if config not in self._drafters:
            drafter = config.drafter()
            drafter.bind(self.target)
            if len(self._drafters) == MOST_DRAFTERS:
                del self._drafters[next(name for name in self._drafters if name != self._config)]
            self._drafters[config] = drafter
        return self._drafters[config]

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        speculative_config: Config,
    ) -> list[Request]:
        """Every request of a call, checked before any of them runs."""
        config = self._config if speculative_config is AUTO else SpeculativeConfig.read(speculative_config)
        drafter = self._drafter(config)
        chosen = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if not all(isinstance(one, SamplingParams) for one in chosen):
            raise BadRequest(f"params are {reprlib.repr(params)}; SamplingParams, or a list of them, is needed")
        if len(chosen) != len(prompts):
            raise BadRequest(f"{len(chosen)} SamplingParams for {len(prompts)} prompts; give one, or one per prompt")
        return [
            Request(
                self._ids(prompt),
                one,
                drafter,
                vocab_size=self.target.vocab_size,
                max_positions=self.max_model_len,
                eos_ids=self.eos_ids,
                rule=config.rejection_sample_method,
                depth=config.depth,
                budget=config.num_draft_tokens,
            )
            for prompt, one in zip(prompts, chosen, strict=True)
        ]

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise BadRequest(f"the prompt {reprlib.repr(prompt)} is no text: {error.reason}") from error
            return list(self.tokenizer(prompt).input_ids) if prompt else []
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not listed or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in prompt):
            raise BadRequest(f"a prompt is {reprlib.repr(prompt)}; text or a list of token ids is needed")
        return [int(i) for i in prompt]

    def _output(self, request: Request, text: str | None = None) -> RequestOutput:
        if text is None:
            text = str(
                self.tokenizer.decode(request.output_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )
        return RequestOutput(
            prompt_token_ids=request.prompt_ids,
            text=text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason or "abort",
            stop_reason=request.stop_reason,
            error=request.error,
            seed=request.sampler.draws.seed,
            from_draft=request.from_draft,
            stats=request.stats,
        )


class Stream(Iterator[Piece]):
    """Pieces of one answer; `output` is the whole of it so far, complete once the stream has ended.

    `close()`, or leaving a `with` block, stops early and frees what the request held.
    """

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm, self._request = llm, request
        self._steps = run(llm.target, [request])
        self._text = Detokenizer(llm.tokenizer)
        self._shown = 0
        self._ended = False

    def __next__(self) -> Piece:
        if self._ended:
            raise StopIteration
        request = self._request
        if next(self._steps, None) is None and request.finish_reason is None:
            raise StopIteration
        ids = request.output_ids[self._shown :]
        flags = request.from_draft[self._shown :]
        self._shown += len(ids)
        text = self._text.add(ids)
        if request.finish_reason is not None:
            text += self._text.flush()
            self.close()
        return Piece(text, ids, flags, request.finish_reason)

    @property
    def output(self) -> RequestOutput:
        """What has been written so far; `finish_reason` is "abort" when it was stopped early."""
        return self._llm._output(self._request)

    def close(self) -> None:
        """Stop here; nothing more is computed."""
        self._ended = True
        self._steps.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_limits(**limits: object) -> None:
    for name, value in limits.items():
        if value is None and name != "max_num_seqs":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name}={value!r} was given; a whole number from 1 up is needed")


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts as a list: one text, or one list of ids, is a list of one."""
    if not isinstance(prompts, Sequence):
        raise BadRequest(
            f"prompts are {reprlib.repr(prompts)}; text, a list of token ids, or a list of either is needed"
        )
    if isinstance(prompts, str | bytes) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What ends a text: the generation config's ids, else the model's, else the tokenizer's; possibly none."""
    for holder in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
