"""Measure methods and peers side by side: every prompt is answered by all of them before the next prompt begins.

The machine's speed drifts by more than many a speed-up is worth, so contenders are interleaved prompt by prompt with
their order rotated, and the baseline is method ``none`` through the same loop. What one request gave is a `Record`;
records are appended to ``FILE.partial.jsonl`` as they come, so a run that was interrupted goes on where it stopped.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.bench.prompts import Prompt
from paceline.bench.records import Record, Settings, Sidecar
from paceline.errors import BadRequest, PacelineError
from paceline.output import Piece, RequestOutput, Stats, combined

Clock = Callable[[], float]
ChatIds = Callable[[list[dict[str, str]]], list[int]]
BASELINE = "none"


@dataclass
class Answer:
    """What a contender gave for one turn. ``stats`` and the times inside are None where a peer does not tell."""

    token_ids: list[int]
    text: str
    seconds: float
    passes: int
    prefill_seconds: float | None = None
    first_token_seconds: float | None = None
    stats: Stats | None = None


@runtime_checkable
class Contender(Protocol):
    """A method of ours or a peer: something that answers ids with ids."""

    name: str
    kind: str

    def answer(self, prompt_ids: list[int], seed: int) -> Answer: ...


@runtime_checkable
class Stream(Protocol):
    """A stream of pieces that knows the whole answer once it is exhausted."""

    @property
    def output(self) -> RequestOutput | None: ...

    def __iter__(self) -> Iterator[Piece]: ...


@runtime_checkable
class Engine(Protocol):
    """The part of `LLM` that measuring and showing need; importing this costs nothing, importing `LLM` does."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def target(self) -> Any: ...

    @property
    def source(self) -> Any: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]: ...

    def generate(self, prompts: Any, params: Any = ..., *, speculative_config: Any = ...) -> list[RequestOutput]: ...

    def stream(self, prompt: Any, params: Any, *, speculative_config: Any = ...) -> Stream: ...


@dataclass
class Watched:
    """One request as it was watched: its answer, and the seconds spent waiting for it (printing not included)."""

    output: RequestOutput
    seconds: float
    first_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Written tokens per second, reading the prompt included."""
        return len(self.output.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Written tokens per second once the prompt was read."""
        seconds = self.seconds - self.output.stats.time.get("prefill", 0.0)
        return len(self.output.token_ids) / seconds if seconds > 0 else 0.0


def watch(
    begin: Callable[[], Stream], show: Callable[[Piece, bool], None] | None = None, clock: Clock = time.perf_counter
) -> Watched:
    """Begin a stream and exhaust it; the answer, with its times.

    ``show(piece, whether guesses were tested for it)`` is called for each piece, with the clock stopped.
    """
    start, first, tested = clock(), None, 0
    stream = begin()
    pieces, seconds = iter(stream), clock() - start
    while True:
        start = clock()
        piece = next(pieces, None)
        seconds += clock() - start
        if piece is None:
            break
        if first is None and piece.token_ids:
            first = seconds
        if show:
            before, tested = tested, stream.output.stats.num_draft_tokens if stream.output else tested
            show(piece, tested > before)
    assert stream.output is not None, "a stream that ended carries its output"
    return Watched(stream.output, seconds, seconds if first is None else first)


class Method:
    """One ``speculative_config`` on the loaded `LLM`; its wall time is the time spent waiting for pieces."""

    kind = "method"

    def __init__(
        self, llm: Engine, name: str, config: dict[str, Any], settings: Settings, clock: Clock = time.perf_counter
    ) -> None:
        self.llm, self.name, self.config, self.settings, self.clock = llm, name, config, settings, clock

    def answer(self, prompt_ids: list[int], seed: int) -> Answer:
        """Stream the answer and keep its ids, statistics and times."""
        from paceline.sampling import SamplingParams

        params = SamplingParams(temperature=self.settings.temperature, max_tokens=self.settings.max_tokens, seed=seed)
        run = watch(lambda: self.llm.stream(prompt_ids, params, speculative_config=self.config), clock=self.clock)
        out = run.output
        if out.finish_reason == "error":
            raise PacelineError(f"method {self.name!r} failed: {out.error}")
        stats, prefill = out.stats, out.stats.time.get("prefill")
        return Answer(out.token_ids, out.text, run.seconds, stats.num_target_passes, prefill, run.first_seconds, stats)


def check_room(llm: Engine, prompts: Sequence[Prompt], settings: Settings) -> None:
    """Refuse prompts that would fill the context, before the first is answered rather than an hour later."""
    for prompt in prompts:
        turns = len(prompt.turns)
        size = len(llm.chat_ids(prompt.messages([""] * (turns - 1)))) + turns * settings.max_tokens
        if size > llm.max_model_len:
            raise BadRequest(
                f"prompt {prompt.id} and its answers may take {size} tokens, the context holds {llm.max_model_len}; "
                "give a smaller --max-tokens or other prompts"
            )


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    chat_ids: ChatIds,
    *,
    sidecar: Sidecar | None = None,
    progress: Callable[[int, int, float | None], None] = lambda done, total, left: None,
) -> tuple[list[Record], int]:
    """All records of a run, and how many of them an earlier, interrupted run had measured.

    ``progress(requests done, requests in all, seconds left)`` is called after every request.
    """
    names = [c.name for c in contenders]
    records = sidecar.resume(names) if sidecar else []
    resumed, done = len(records), {(r.repeat, r.prompt) for r in records}
    total = settings.repeats * len(prompts) * len(contenders)
    rounds = [(r, i) for r in range(settings.repeats) for i in range(len(prompts)) if (r, prompts[i].id) not in done]
    for i in range(min(settings.warmup, len(prompts)) if rounds else 0):
        for contender in contenders:
            converse(contender, prompts[i], 0, settings.seed + i, chat_ids)
    fresh: list[Record] = []
    for repeat, i in rounds:
        first = (repeat * len(prompts) + i) % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            fresh.append(converse(contender, prompts[i], repeat, settings.seed + i, chat_ids))
            if sidecar:
                sidecar.append(fresh[-1])
            progress(resumed + len(fresh), total, seconds_left(fresh, names, len(rounds)))
    return records + fresh, resumed


def seconds_left(fresh: list[Record], names: Sequence[str], rounds: int) -> float | None:
    """Each contender's mean seconds so far times the rounds it still has to answer; None until each answered once."""
    left = 0.0
    for name in names:
        spent = [r.seconds for r in fresh if r.contender == name]
        if not spent:
            return None
        left += sum(spent) / len(spent) * (rounds - len(spent))
    return left


def converse(contender: Contender, prompt: Prompt, repeat: int, seed: int, chat_ids: ChatIds) -> Record:
    """Answer every turn of ``prompt``; later turns see the contender's own earlier answers."""
    answers: list[Answer] = []
    reset_peak_rss()
    for _ in prompt.turns:
        ids = chat_ids(prompt.messages([a.text for a in answers]))
        answers.append(contender.answer(ids, seed))
    prefills = [a.prefill_seconds for a in answers if a.prefill_seconds is not None]
    stats = [a.stats for a in answers if a.stats is not None]
    return Record(
        contender=contender.name,
        repeat=repeat,
        prompt=prompt.id,
        token_ids=[token for a in answers for token in a.token_ids],
        seconds=sum(a.seconds for a in answers),
        passes=sum(a.passes for a in answers),
        prefill_seconds=sum(prefills) if prefills else None,
        first_token_seconds=answers[0].first_token_seconds,
        stats=asdict(combined(stats)) if stats else None,
        peak_rss_mb=peak_rss_mb(),
    )


def first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """The first position at which two lists of ids part, or None when they are the same."""
    if list(one) == list(two):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


def peak_rss_mb() -> float | None:
    """The process's peak resident memory in MB since it was last reset; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def reset_peak_rss() -> None:
    """Let the peak start again from what is resident now, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def environment(llm: Engine) -> dict[str, Any]:
    """Versions, machine, kernel and the origin of the weights."""
    import torch
    import transformers

    import paceline

    return {
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": forward_in_use(llm.target.kernel),
        "weight_bytes": llm.target.weight_bytes,
        "model_source": llm.source.note,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def forward_in_use(kernel: Any) -> str:
    """The forward's name and what it promises, e.g. ``packed: same bits up to 32 rows a pass (AMX)``."""
    promise = f"same bits up to {kernel.width} rows a pass" if kernel.width else "bits may depend on a pass's width"
    return f"{kernel.name}: {promise}" + (f" ({kernel.note})" if kernel.note else "")


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
