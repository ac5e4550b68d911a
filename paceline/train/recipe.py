"""What a head is trained from and how. The same recipe on the same machine gives the same head, bit for bit."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.draft.losses import Mix
from paceline.errors import BadRequest, check_whole, nearest

__all__ = ["METHODS", "Recipe", "seed_of"]

METHODS = ("medusa", "eagle", "eagle3")
ANSWERS = ("target", "given")
WAY = 1
"""Of making data; another number where the same recipe gives other texts than it gave before."""
USUAL: dict[str, dict[str, Any]] = {
    "medusa": {"learning_rate": 1e-3, "decay": 0.8, "steps": 1},
    "eagle": {"learning_rate": 3e-4, "decay": 1.0, "steps": 1},
    "eagle3": {"learning_rate": 5e-4, "decay": 0.8, "steps": 3},
}
"""By method, where nothing is said. Rates are above published ones: there are thousands of times fewer steps."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a head depends on, but the target's own weights."""

    method: str
    """medusa, eagle or eagle3."""
    model: str
    """The target, as it was named."""
    data: str = "self"
    """`self`, where the target writes questions too, or the path of a JSONL file of messages or text."""
    data_sha256: str = ""
    """Of that file."""
    answers: str = "target"
    """Whose answers are learnt: those that the target writes, or those in the file."""
    num_samples: int = 1000
    """Questions that are asked or taken from the file; of those that are nearly the same one is kept."""
    max_tokens: int = 256
    """Longest answer."""
    max_question_tokens: int = 128
    """Longest question that the target writes itself."""
    temperature: float = 0.8
    """Of the answers. Questions are written at 0.8 and top_p 0.9."""
    seed: int = 0
    group_size: int = 64
    """Texts that are made together; one that was cut short in the middle of a group begins it again."""
    num_rows: int = 32
    """Texts that are written at once. Part of the recipe since a row's last bits can depend on those beside it."""
    held_out: int = 16
    """Texts that are made beside these and never learnt: drafting is measured on their questions after every epoch."""

    draft_vocab_size: int | None = 8192
    """Ids that the head scores: the commonest of the answers; None is all. EAGLE-1 scores all."""
    num_heads: int = 4
    """Medusa: tokens that are guessed."""
    intermediate_size: int | None = None
    """EAGLE: width of the layer's MLP; None is the target's own."""
    layer_ids: tuple[int, ...] | None = None
    """EAGLE-3: which of the target's hidden states it reads; None is the usual three."""
    init: str | None = None
    """The folder of a head to go on from; None begins with a fresh one."""

    epochs: int = 10
    batch_tokens: int = 2048
    """Tokens that go through the head together."""
    accumulate: int = 2
    """Such batches to a step."""
    learning_rate: float = -1.0
    """The highest; below 0 is what is usual for the method, and so with `steps` and `decay`."""
    warm_up: float = 0.04
    """Part of all steps."""
    weight_decay: float = 0.0
    clip: float = 0.5
    """Longest gradient."""
    loss: str = "kl"
    """See `paceline.draft.losses.Mix`."""
    steps: int = -1
    """EAGLE: how far it is unrolled over its own states."""
    decay: float = -1.0
    """Weight of a head, or of an unrolled step, over the one before."""
    noise: float = 0.2
    """EAGLE-1: uniform noise on the states that it reads, from -noise/2 to noise/2, so that it bears its own errors."""
    bfloat16: bool | None = None
    """Products in bfloat16, weights in float32; None is where target and hardware do so themselves."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BadRequest(
                f"no method {self.method!r} to train{nearest(self.method, METHODS)}; choose from {METHODS}"
            )
        for name, value in USUAL[self.method].items():
            if getattr(self, name) < 0:
                object.__setattr__(self, name, value)
        if isinstance(self.layer_ids, list):
            object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        if self.answers not in ANSWERS:
            raise BadRequest(f"answers={self.answers!r} was given; choose from {ANSWERS}")
        for name in ("num_samples", "max_tokens", "max_question_tokens", "group_size", "num_rows", "held_out"):
            check_whole(name, getattr(self, name), 1)
        for name in ("num_heads", "epochs", "batch_tokens", "accumulate", "steps"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        for name in ("draft_vocab_size", "intermediate_size"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 2)
        limits = {
            "temperature": (0.0, 10.0), "learning_rate": (1e-9, 10.0), "warm_up": (0.0, 1.0), "decay": (0.0, 1.0),
            "weight_decay": (0.0, 10.0), "clip": (1e-9, 1e9), "noise": (0.0, 10.0),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise BadRequest(f"{name}={value!r} was given; a number from {low:g} to {high:g} is needed")
        Mix.read(self.loss)
        if self.method == "eagle3" or self.layer_ids is None:
            return
        raise BadRequest(f"layer_ids={list(self.layer_ids)} was given; only an EAGLE-3 head reads several layers")

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        from paceline.files import write_atomically

        write_atomically(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """One that was written.

        Raises:
            BadRequest: it is no recipe.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            layers = found.get("layer_ids")
            return cls(**found | {"layer_ids": None if layers is None else tuple(layers)})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise BadRequest(f"{path} is no recipe of a training: {error}; take another folder") from error

    def different(self, other: "Recipe") -> list[str]:
        """What another recipe says otherwise, in words."""
        ours, theirs = self.to_dict(), other.to_dict()
        return [
            f"{field.name} is {theirs[field.name]!r} there, {ours[field.name]!r} was given"
            for field in fields(self)
            if ours[field.name] != theirs[field.name]
        ]

    def data_key(self) -> str:
        """What the data depend on, in short: data of one method's head serve another that reads the same states."""
        names = (
            "model", "data", "data_sha256", "answers", "num_samples", "max_tokens", "max_question_tokens",
            "temperature", "seed", "group_size", "num_rows", "held_out",
        )  # fmt: skip
        told = {name: getattr(self, name) for name in names}
        told["way"] = WAY
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def seed_of(*parts: object) -> int:
    """A seed for a place in a recipe: the same for the same parts, nothing like that of others."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
