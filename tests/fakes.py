"""Stand-ins for a loaded model: an LLM whose answers and seconds are scripted, on a clock that only it moves."""

import math
from collections.abc import Callable, Iterator
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from paceline.errors import BadRequest
from paceline.kernels import Kernel
from paceline.output import Logprob, Piece, RequestOutput


class FakeClock:
    """A clock that stands still until it is told how many seconds went by."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ByteTokenizer:
    """One id per byte, so that an id can end in the middle of a character."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i % 256 for i in token_ids).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class FakeStream:
    """Pieces, and the answer so far; `close` ends it early."""

    def __init__(self, pieces: Iterator[Piece], output: RequestOutput) -> None:
        self._pieces, self._output = pieces, output
        self.open = True

    @property
    def output(self) -> RequestOutput:
        return self._output

    def __iter__(self) -> Iterator[Piece]:
        yield from self._pieces
        self.open = False

    def close(self) -> None:
        if self.open:
            self._output.finish_reason = "abort"
        self.open = False


class FakeLLM:
    """Answers every prompt with ``answer``; method ``ngram`` accepts ``run`` guesses of ``run`` in every pass.

    A pass takes ``seconds[method]`` (a number, or a function of how many requests that method had), reading the prompt
    ``prefill`` seconds. ``answers`` may give a method its own text. The second of n samples ends in `` (2)``.
    ``errors`` maps a prompt to what its request fails with, and ``before_pass`` is called with the number of passes a
    request has had. With ``reuse``, prompt tokens that the last request began with, answer included, count as cached.
    """

    def __init__(
        self,
        answer: str = "one two three four five six",
        *,
        clock: FakeClock | None = None,
        seconds: dict[str, float | Callable[[int], float]] | None = None,
        prefill: float = 0.0,
        run: int = 2,
        answers: dict[str, str] | None = None,
        default: str = "ngram",
    ) -> None:
        self.answer, self.answers, self.run, self.prefill, self.default = answer, answers or {}, run, prefill, default
        self.clock = clock or FakeClock()
        self.seconds: dict[str, float | Callable[[int], float]] = {"none": 1.0, "ngram": 1.0, "auto": 1.0} | (
            seconds or {}
        )
        self.tokenizer = ByteTokenizer()
        self.source = SimpleNamespace(name="fake", path=None, note="made up")
        self.target = SimpleNamespace(kernel=Kernel("made up", width=32), weight_bytes=10**9)
        self.max_model_len = 4096
        self.eos_ids: frozenset[int] = frozenset()
        self.requests: list[tuple[str, int | None]] = []
        self.calls: dict[str, int] = {}
        self.has_template = True
        self.chats: list[list[dict[str, str]]] = []
        self.params: list[Any] = []
        self.progress: list[bool] = []
        self.errors: dict[str, str] = {}
        self.before_pass: Callable[[int], None] = lambda passes: None
        self.reuse = False
        self.last: list[int] = []

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.has_template:
            raise BadRequest("fake has no chat template; give the whole prompt to generate instead")
        self.chats.append(messages)
        return self.tokenizer.encode("|".join(m["content"] for m in messages))

    def generate(
        self, prompts: Any, params: Any = None, *, speculative_config: Any = None, progress: bool = False
    ) -> list[RequestOutput]:
        self.progress.append(progress)
        outputs = []
        for prompt in prompts:
            samples = []
            for i in range(params.n):
                stream = self.stream(prompt, params, speculative_config=speculative_config, sample=i)
                list(stream)
                samples.append(stream.output)
            outputs.append(samples[0])
            outputs[-1].others = samples[1:]
        return outputs

    def stream(self, prompt: Any, params: Any, *, speculative_config: Any = None, sample: int = 0) -> FakeStream:
        method = (speculative_config or {}).get("method", self.default)
        seed = 77 if params.seed is None else params.seed
        self.requests.append((method, params.seed))
        self.params.append(params)
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        text = self.answers.get(method, self.answer) + (f" ({sample + 1})" if sample else "")
        whole = self.tokenizer.encode(text)
        room = self.max_model_len - len(prompt_ids)
        ids = whole[: room if params.max_tokens is None else min(room, params.max_tokens)]
        output = RequestOutput(prompt_ids, "", [], "length" if len(ids) < len(whole) else "stop", seed=seed)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self.last if self.reuse else [], prompt_ids))
        output.stats.num_cached_tokens = len(list(same))
        if params.logprobs is not None:
            output.logprobs = [{i: Logprob(-0.5, 1), 7: Logprob(-math.inf, 2)} for i in ids]
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *({i: Logprob(-2.0, 3)} for i in prompt_ids[1:])]
        error = self.errors.get(self.tokenizer.decode(prompt_ids))
        if error is not None:
            ids, output.finish_reason, output.error = [], "error", error
        return FakeStream(self._pieces(method, ids, output), output)

    def _pieces(self, method: str, ids: list[int], output: RequestOutput) -> Iterator[Piece]:
        call = self.calls[method] = self.calls.get(method, 0) + 1
        pace = self.seconds[method]
        seconds = pace(call - 1) if callable(pace) else pace
        width = 1 if method == "none" else self.run + 1
        stats, shown = output.stats, 0
        self.clock.now += self.prefill
        stats.time["prefill"] += self.prefill
        for start in range(0, len(ids), width):
            self.before_pass(stats.num_target_passes)
            block = ids[start : start + width]
            self.clock.now += seconds
            stats.time["target"] += seconds
            drafted = len(block) - (1 if len(block) == width else 0) if width > 1 else 0
            stats.record(drafted, drafted, drafted)
            flags = [i < drafted for i in range(len(block))]
            output.token_ids += block
            output.from_draft += flags
            self.last = output.prompt_token_ids + output.token_ids
            text = output.text = bytes(output.token_ids).decode("utf-8", "ignore")
            yield Piece(text[shown:], block, flags)
            shown = len(text)
        output.text = bytes(ids).decode("utf-8", "replace")
