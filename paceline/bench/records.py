"""What a measurement is made of: its settings, one record per request, and the file that keeps an unfinished run."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.files import write_atomically


@dataclass(frozen=True)
class Settings:
    """What a result depends on besides the machine; two results compare only when these agree."""

    model: str
    methods: dict[str, dict[str, Any]]
    """Name of each method and its ``speculative_config``; ``none`` is always among them."""
    peers: tuple[str, ...] = ()
    set: str = ""
    prompts: tuple[str, ...] = ()
    """Ids of the prompts, in order."""
    prompts_sha256: str = ""
    """Hash of what the prompts say, so that an edited prompt file is another run."""
    repeats: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    """Prompt i is sampled with seed + i, by every contender and in every repeat."""
    warmup: int = 1
    """Prompts answered by all contenders before the measurement."""
    load: dict[str, Any] = field(default_factory=dict)
    """How the model was loaded: dtype, device, threads and so on, where given."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as they come back from a file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def fingerprint(value: Any) -> str:
    """The sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass
class Record:
    """All turns of one prompt, answered by one contender in one repeat."""

    contender: str
    repeat: int
    prompt: str
    token_ids: list[int]
    seconds: float
    passes: int
    prefill_seconds: float | None
    first_token_seconds: float | None
    stats: dict[str, Any] | None
    peak_rss_mb: float | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time, reading the prompt included, as Spec-Bench counts."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


class Sidecar:
    """The records of an unfinished run, one JSON line each, under a line that says which run they belong to."""

    def __init__(self, result: Path, header: dict[str, Any]) -> None:
        self.path = result.with_name(result.name + ".partial.jsonl")
        self.header = header

    def resume(self, contenders: Sequence[str]) -> list[Record]:
        """Records of the rounds that every contender finished; the file then holds exactly those."""
        records: list[Record] = []
        if self.path.exists():
            header, *lines = [_json_line(line) for line in self.path.read_text().splitlines()] or [None]
            if header is not None:
                self._check(header)
            records = whole_rounds([Record(**line) for line in lines if line is not None], contenders)
        text = "".join(json.dumps(line) + "\n" for line in [self.header, *map(asdict, records)])
        write_atomically(self.path, text)
        return records

    def _check(self, header: dict[str, Any]) -> None:
        changed = differences(header, self.header)
        if changed:
            raise BadRequest(
                f"{self.path} holds part of another run: {'; '.join(changed)}. "
                "Give the same options to go on with it, delete it, or name another --json FILE"
            )

    def append(self, record: Record) -> None:
        """Write one record and make sure that it stays."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Forget the records: the result is written."""
        self.path.unlink(missing_ok=True)


def _json_line(line: str) -> dict[str, Any] | None:
    """The object of one line, or None for a line cut by an interruption."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def whole_rounds(records: list[Record], contenders: Sequence[str]) -> list[Record]:
    """The records of those (repeat, prompt) rounds in which every contender answered, so rounds stay interleaved."""
    seen: dict[tuple[int, str], set[str]] = {}
    for r in records:
        seen.setdefault((r.repeat, r.prompt), set()).add(r.contender)
    return [r for r in records if seen[r.repeat, r.prompt] >= set(contenders)]


def differences(one: dict[str, Any], two: dict[str, Any], prefix: str = "") -> list[str]:
    """``key: a, now b`` for every leaf at which two nested dicts differ."""
    found = []
    for key in sorted(one.keys() | two.keys()):
        a, b = one.get(key), two.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} was {_short(a)}, now {_short(b)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
