"""A plan on disk: what was found best for a model on a machine, and the costs that drafting goes by.

`paceline plan` writes it; `{"method": "auto", "plan": FILE}` reads it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline.draft.costs import Curve
from paceline.errors import BadRequest
from paceline.kernels.machine import identity, machine_name

KIND = "paceline plan"
MOST_ROWS = 4096
"""Rows that a plan can be for."""
FORMAT = 1
HOW = "paceline plan MODEL --json FILE"


@dataclass(frozen=True)
class Planned:
    """What a plan says about how to draft."""

    path: str
    config: tuple[tuple[str, Any], ...]
    """The chosen `speculative_config`, as pairs of which the lists are tuples."""
    target: Curve
    """What passes of the target cost."""
    model: str
    """The name of the target."""
    place: tuple[tuple[str, Any], ...]
    """What it was measured on."""

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen `speculative_config`."""
        return {key: _thawed(value) for key, value in self.config}

    def check(self, target: Any) -> None:
        """Passes when the target and the machine are those of the plan.

        Raises:
            BadRequest: they are others; with what differs, and what to type.
        """
        here = place(target)
        there = dict(self.place)
        for name, value in here.items():
            if there.get(name) != value:
                told = "another model" if name == "model" else f"{name} {there.get(name)!r}, and here it is {value!r}"
                raise BadRequest(
                    f"plan {self.path} was made for {self.model} with {told}; make one for here: "
                    f"paceline plan MODEL --json {self.path}"
                )


def place(target: Any) -> dict[str, Any]:
    """What times and acceptance depend on: versions, machine, threads, kernel, and the model itself."""
    return {
        "paceline": version("paceline"),
        "torch": torch.__version__,
        "processor": machine_name(),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "kernel": target.kernel.name,
        "model": identity(target),
    }


def read(path: Any) -> Planned:
    """The plan in a file.

    Raises:
        BadRequest: there is none, or the file is something else, or one of another version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRequest(
            f"cannot read plan {str(path)!r}: {reason}; make one: paceline plan MODEL --json FILE"
        ) from None
    try:
        held = json.loads(text)
        if not isinstance(held, Mapping) or held.get("kind") != KIND:
            raise ValueError("it is something else")
        if held["format"] != FORMAT:
            raise ValueError(f"its format is {held['format']}, this version reads {FORMAT}")
        chosen = held["choices"][held["chosen"]]
        single = float(held["single_seconds"])
        rows = int(held["rows"])
        points = [(rows * int(n), float(seconds) / single) for n, seconds in held["cost_curve"]]
        curve = tuple(points) if rows == 1 else ((1, 1.0), *points)
        if (
            not points
            or not 1 <= rows <= MOST_ROWS
            or not all(0.0 < cost < math.inf for _, cost in points)
            or [n for n, _ in curve] != sorted({n for n, _ in curve})
        ):
            raise ValueError("its cost curve is none")
        config = tuple((str(key), _frozen(value)) for key, value in chosen["config"].items())
        where = tuple((str(key), value) for key, value in held["machine"].items())
        return Planned(str(path), config, curve, str(held["model"]), where)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise BadRequest(f"{str(path)!r} is not a plan of this version ({why}); make one: {HOW}") from None


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(one) for one in value)
    if isinstance(value, dict):
        return ("dict", *((key, _frozen(one)) for key, one in value.items()))
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple) and value[:1] == ("dict",):
        return {key: _thawed(one) for key, one in value[1:]}
    return [_thawed(one) for one in value] if isinstance(value, tuple) else value
