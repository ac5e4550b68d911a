"""What a request returns: text, ids, why it ended, and what speculation did. Plain data, imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class Stats:
    """What happened during one request.

    A *pass* is one forward of the target after the prompt was read. Only drafted tokens that were tested count as
    drafted: a pass cut by a stop counts what lies before the cut.
    """

    num_cached_tokens: int = 0
    """Prompt tokens that were not read again, because a recent request had begun with them."""
    num_target_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    """``[a]`` = number of passes that accepted exactly ``a`` drafted tokens."""
    drafted_per_position: list[int] = field(default_factory=list)
    """``[i]`` = number of passes whose draft reached depth ``i + 1``."""
    tested_per_position: list[int] = field(default_factory=list)
    """``[i]`` = those of them that accepted ``i`` tokens above, so that depth ``i + 1`` was tested."""
    time: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "draft", "target", "verify", "other"), 0.0)
    )
    """Seconds in prefill, draft, target, verify and other; rows that share a pass share its time equally."""

    def record(self, drafted: int, depth: int, accepted: int) -> None:
        """Add one pass: ``drafted`` nodes tested, the deepest at ``depth``, of which ``accepted`` were kept."""
        self.num_target_passes += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[accepted] += 1
        self.drafted_per_position += [0] * (depth - len(self.drafted_per_position))
        self.tested_per_position += [0] * (depth - len(self.tested_per_position))
        for i in range(depth):
            self.drafted_per_position[i] += 1
            self.tested_per_position[i] += accepted >= i

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / target passes: tokens per pass. 1.0 means that drafting was no help."""
        return 1.0 + self.num_accepted_tokens / self.num_target_passes if self.num_target_passes else 1.0

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def _accepted_at(self, i: int) -> int:
        return sum(self.acceptance_histogram[i + 1 :])

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of drafting passes that accepted depth ``i + 1``: unconditional, as vLLM reports it."""
        drafts = self.drafted_per_position[0] if self.drafted_per_position else 0
        return [self._accepted_at(i) / drafts for i in range(len(self.drafted_per_position))] if drafts else []

    @property
    def acceptance_per_position_conditional(self) -> list[float | None]:
        """Share accepted at depth ``i + 1`` among passes that drafted it and accepted all above; None if none did."""
        return [self._accepted_at(i) / n if n else None for i, n in enumerate(self.tested_per_position)]

    def to_dict(self) -> dict[str, Any]:
        """The public figures, ready for JSON."""
        names = (
            "num_cached_tokens",
            "num_target_passes",
            "num_draft_tokens",
            "num_accepted_tokens",
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "acceptance_per_position",
            "acceptance_per_position_conditional",
            "acceptance_histogram",
            "time",
        )
        return {name: getattr(self, name) for name in names}


def combined(parts: Sequence[Stats]) -> Stats:
    """The statistics of several requests taken together."""
    whole = Stats()
    for part in parts:
        for one in fields(Stats):
            setattr(whole, one.name, _added(getattr(whole, one.name), getattr(part, one.name)))
    return whole


def _added(one: Any, two: Any) -> Any:
    """The sum of two counts, or of two lists or dicts of them, place by place."""
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, two, fillvalue=0)]
    if isinstance(one, dict):
        return {key: one.get(key, 0.0) + two.get(key, 0.0) for key in one | two}
    return one + two


@dataclass(frozen=True)
class Logprob:
    """How likely a token was by the model alone: log-softmax of its raw logits, before temperature and filters."""

    logprob: float
    rank: int
    """1 for the likeliest token; the number of strictly likelier ones, plus 1."""
    decoded_token: str | None = None


@dataclass
class Piece:
    """A piece of a stream: new text, the ids it came from, and for each id whether a drafter guessed it."""

    text: str
    token_ids: list[int]
    from_draft: list[bool]
    finish_reason: FinishReason | None = None
    sample: int = 0
    """Which of the request's `n` samples it belongs to."""


@dataclass
class RequestOutput:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """What ended the text when the reason is ``"stop"``: the stop string or the stop id; None if it was an EOS."""
    error: str | None = None
    """What went wrong and where, when the reason is ``"error"``."""
    seed: int = 0
    """The seed that repeats this text: the one given, or the one drawn when none was."""
    from_draft: list[bool] = field(default_factory=list)
    """For each id, whether a drafter guessed it (else the target's own token ended the pass)."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each id of the answer, if asked for: itself and the likeliest ones, by log-softmax of the raw logits."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """The same for the prompt's ids; nothing precedes the first, so it has None."""
    stats: Stats = field(default_factory=Stats)
    others: list["RequestOutput"] = field(default_factory=list)
    """The second and further samples of a request with ``n`` above 1."""

    @property
    def samples(self) -> list["RequestOutput"]:
        """All `n` samples in order, this one first."""
        return [self, *self.others]

    @property
    def usage(self) -> dict[str, int]:
        """Tokens read and written, as OpenAI names them."""
        return {"prompt_tokens": len(self.prompt_token_ids), "completion_tokens": len(self.token_ids)}
