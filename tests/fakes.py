"""Stand-ins for a loaded model: an LLM whose answers and seconds are scripted, on a clock that only it moves."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from paceline.kernels import Kernel
from paceline.output import Piece, RequestOutput


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
    """Pieces, and the answer once they are exhausted."""

    def __init__(self, pieces: Iterator[Piece], output: RequestOutput) -> None:
        self._pieces, self._output = pieces, output

    @property
    def output(self) -> RequestOutput:
        return self._output

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces


class FakeLLM:
    """Answers every prompt with ``answer``; method ``ngram`` accepts ``run`` guesses of ``run`` in every pass.

    A pass takes ``seconds[method]`` (a number, or a function of how many requests that method had), reading the prompt
    ``prefill`` seconds. ``answers`` may give a method its own text.
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
        self.seconds: dict[str, float | Callable[[int], float]] = {"none": 1.0, "ngram": 1.0} | (seconds or {})
        self.tokenizer = ByteTokenizer()
        self.source = SimpleNamespace(name="fake", path=None, note="made up")
        self.target = SimpleNamespace(kernel=Kernel("made up", width=32), weight_bytes=10**9)
        self.max_model_len = 4096
        self.eos_ids: frozenset[int] = frozenset()
        self.requests: list[tuple[str, int | None]] = []
        self.calls: dict[str, int] = {}

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        return self.tokenizer.encode("|".join(m["content"] for m in messages))

    def generate(self, prompts: Any, params: Any = None, *, speculative_config: Any = None) -> list[RequestOutput]:
        outputs = []
        for prompt in prompts:
            stream = self.stream(prompt, params, speculative_config=speculative_config)
            list(stream)
            assert stream.output is not None
            outputs.append(stream.output)
        return outputs

    def stream(self, prompt: Any, params: Any, *, speculative_config: Any = None) -> FakeStream:
        method = (speculative_config or {}).get("method", self.default)
        seed = 77 if params.seed is None else params.seed
        self.requests.append((method, params.seed))
        ids = self.tokenizer.encode(self.answers.get(method, self.answer))[: params.max_tokens]
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        output = RequestOutput(prompt_ids, "", [], "stop", seed=seed)
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
            block = ids[start : start + width]
            self.clock.now += seconds
            stats.time["target"] += seconds
            drafted = len(block) - (1 if len(block) == width else 0) if width > 1 else 0
            stats.record(drafted, drafted, drafted)
            flags = [i < drafted for i in range(len(block))]
            output.token_ids += block
            output.from_draft += flags
            text = bytes(output.token_ids).decode("utf-8", "ignore")
            yield Piece(text[shown:], block, flags)
            shown = len(text)
        output.text = bytes(ids).decode("utf-8", "replace")
