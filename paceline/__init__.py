"""Lossless speculative decoding: the same text, sooner. These are the public names; each loads when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.draft.base import Drafter
    from paceline.errors import (
        BadLogits,
        BadRequest,
        CacheFull,
        CorruptWeights,
        IncompatibleDrafter,
        ModelNotFound,
        PacelineError,
        UnsupportedModel,
    )
    from paceline.llm import LLM
    from paceline.output import Piece, RequestOutput, Stats
    from paceline.sampling import SamplingParams
    from paceline.tree import Drawn, TokenTree

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "SamplingParams",
    "RequestOutput",
    "Piece",
    "Stats",
    "Drafter",
    "TokenTree",
    "Drawn",
    "PacelineError",
    "BadRequest",
    "ModelNotFound",
    "CorruptWeights",
    "UnsupportedModel",
    "IncompatibleDrafter",
    "CacheFull",
    "BadLogits",
]

_HOME = {
    "LLM": "paceline.llm",
    "SamplingParams": "paceline.sampling",
    "RequestOutput": "paceline.output",
    "Piece": "paceline.output",
    "Stats": "paceline.output",
    "Drafter": "paceline.draft.base",
    "TokenTree": "paceline.tree",
    "Drawn": "paceline.tree",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562), so that ``import paceline`` costs nothing until it is used."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "paceline.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
