"""What a certification found: layers from the strongest proof to the weakest test, and one verdict over all of them."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.certify.judge import Difference

Verdict = Literal["lossless", "near_ties_only", "bug", "skipped"]
"""Of a layer, and of a certificate: the worst of its layers."""
Strength = Literal["proved", "equal", "tested", "measured"]
"""How a layer knows: every outcome enumerated, ids compared one by one, a statistical test, or a number reported."""


@dataclass(frozen=True)
class Layer:
    """One thing that was checked."""

    name: str
    """`rule`, `drafter`, `greedy`, `sampled`, `joint law` or `acceptance`."""
    strength: Strength
    verdict: Verdict
    detail: str
    """A sentence or two for the reader, with the numbers; why, if it was skipped."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The numbers behind the sentence, JSON-ready; `report` knows how to draw those of each layer."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Parted:
    """A prompt whose text with speculation parts from the text without, and the judge's word on it."""

    prompt: str
    """The prompt's name."""
    temperature: float
    difference: Difference
    expected: str
    """The text without speculation from a little before the difference on, as a reader sees it."""
    got: str


@dataclass
class Certificate:
    """The whole outcome."""

    model: str
    """Name of the target."""
    method: str
    """Name of the method, or module:Class of a plug-in."""
    rule: str
    """The `rejection_sample_method`."""
    mode: Literal["quick", "standard", "full"]
    environment: dict[str, str] = field(default_factory=dict)
    """What it ran on: note on the weights, forward, dtype, device, versions, date."""
    layers: list[Layer] = field(default_factory=list)
    parted: list[Parted] = field(default_factory=list)
    near_ties_per_1000: float | None = None
    """Differences judged near-ties per 1,000 tokens compared; None when nothing was compared."""
    mean_acceptance_length: float | None = None
    """Tokens per pass over the target, in all runs with speculation."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know besides, a sentence each."""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst of the layers; "skipped" where nothing was compared, since numbers alone prove nothing."""
        found = {layer.verdict for layer in self.layers if layer.strength != "measured" or layer.verdict == "bug"}
        order: tuple[Verdict, ...] = ("bug", "near_ties_only", "lossless", "skipped")
        return next((verdict for verdict in order if verdict in found), "skipped")

    def to_json(self) -> str:
        """The certificate as one JSON object; infinities and NaN become null."""
        return json.dumps(_finite({"verdict": self.verdict} | asdict(self)), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
