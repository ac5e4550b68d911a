"""A plan: what was measured, what every choice is expected to bring, and which one to take."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.draft import planned
from paceline.errors import BadRequest
from paceline.files import write_atomically


@dataclass
class Choice:
    """A way to decode, and what it is expected to bring."""

    method: str
    config: dict[str, Any]
    """The `speculative_config`."""
    num_draft_tokens: int
    """Most nodes verified per pass; 0 is plain decoding."""
    num_speculative_tokens: int | None
    """Deepest draft; None leaves it to the method."""
    predicted_speedup: float
    """Against plain decoding, the reading of the prompts included."""
    predicted_ci95: tuple[float, float]
    """Of the prediction, from the noise of what was timed."""
    tokens_per_second: float
    """Of all rows together."""
    tokens_per_pass: float
    draft_share: float
    """The part of the time that goes into drafting."""
    above_floor: float
    """Time over the least there is: every pass reading the weights and the keys and values once, at full bandwidth."""
    source: str
    """`replayed` on recorded texts, or `ran`."""
    measured_speedup: float | None = None
    """By `--verify`."""
    measured_ci95: tuple[float, float] | None = None


@dataclass
class Plan:
    """All of it."""

    model: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    """Temperature, batch, tokens, prompts, seed."""
    rows: int
    context: int
    """Tokens in the cache of each row while passes were timed."""
    cost_curve: list[tuple[int, float]]
    """(tokens of a row, seconds of a pass), measured."""
    drafting_curve: list[tuple[int, float]]
    """(tokens of all rows, cost in passes over a single one): what drafting goes by, in replays and with the plan."""
    single_seconds: float
    """A pass over one token of one row."""
    noise: float
    """Half the width of the widest 95% interval of a cost, as a part of it."""
    bandwidth: float
    """Bytes per second that memory is read with."""
    floor_seconds: float
    """The least that a pass can take: bytes of weights, keys and values over bandwidth."""
    choices: list[Choice]
    """Best first."""
    chosen: int
    reason: str
    notes: list[str] = field(default_factory=list)
    """What the reader should know about the measurement."""

    @property
    def choice(self) -> Choice:
        """The one to take."""
        return self.choices[self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        head = {"kind": planned.KIND, "format": planned.FORMAT}
        plain: dict[str, Any] = json.loads(json.dumps(head | asdict(self)))
        return plain

    def write(self, path: str | Path) -> None:
        """To a file, which must be none or an older plan."""
        check_output(path)
        write_atomically(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")


def check_output(path: str | Path) -> None:
    """Passes where a plan may be written: nothing but an older plan is ever replaced.

    Raises:
        BadRequest: there is no such folder, or something else has the name.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise BadRequest(f"{path}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise BadRequest(f"{path} is a folder; name a file to write the plan to")
    if path.exists() and path.stat().st_size:
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            is_plan = isinstance(held, dict) and held.get("kind") == planned.KIND
        except (OSError, ValueError):
            is_plan = False
        if not is_plan:
            raise BadRequest(f"{path} exists and is no plan; it is left as it is: name another file")
