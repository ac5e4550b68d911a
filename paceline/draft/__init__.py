"""Drafters by name, and the settings of `speculative_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.draft.base import Drafter, NoDraft
from paceline.draft.ngram import Ngram
from paceline.errors import BadRequest, nearest

LATER = frozenset(
    [
        *("model", "tree_top_k", "tree_depth", "corpus", "exit_layer", "drafters", "medusa_choices", "plan"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
        *("window_size", "ngram_size", "guess_set_size"),
        *("draft_dtype", "draft_vocab_size", "draft_temperature"),
    ]
)
"""Keys whose methods are not in this version."""
METHODS = ("none", "ngram", "auto")
LATER_METHODS = frozenset(
    ["suffix", "lookahead", "recycle", "draft_model", "early_exit", "medusa", "eagle", "eagle3", "compose"]
)
RULE_NAMES = ("coupled", "block", "standard")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate. The keys of `speculative_config`, checked."""

    method: "str | Drafter[Any]" = "auto"
    """none, ngram, auto (ngram until a planner chooses), or a `Drafter` of your own."""
    num_speculative_tokens: int | None = None
    """Deepest draft, in tokens; 0 is plain decoding. None leaves it to the method: as deep as the budget."""
    num_draft_tokens: int = 23
    """Nodes verified per pass, the root not counted."""
    prompt_lookup_max: int = 5
    """Longest n-gram that ngram looks for."""
    prompt_lookup_min: int = 1
    """Shortest one."""
    rejection_sample_method: str = "coupled"
    """coupled (same seed, same text), block or standard (same distribution)."""

    @classmethod
    def read(cls, given: "Mapping[str, Any] | SpeculativeConfig | None") -> "SpeculativeConfig":
        """The settings in a mapping; None means plain decoding.

        Raises:
            BadRequest: unknown keys, with the nearest known one; values out of range.
        """
        if given is None:
            return cls(method="none")
        if isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise BadRequest(f"speculative_config is {given!r}; a dict such as {{'method': 'ngram'}} is needed")
        known = [field.name for field in fields(cls)]
        for key in given:
            if key in LATER:
                raise BadRequest(f"speculative_config key {key!r} is not available in this version; known: {known}")
            if key not in known:
                raise BadRequest(f"speculative_config has no key {key!r}{nearest(str(key), known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if not isinstance(self.method, Drafter):
            if not isinstance(self.method, str):
                raise BadRequest(f"method is {self.method!r}; choose from {METHODS}, or give a Drafter")
            if self.method in LATER_METHODS:
                raise BadRequest(f"method {self.method!r} is not available in this version; choose from {METHODS}")
            if self.method not in METHODS:
                raise BadRequest(
                    f"no method {self.method!r}{nearest(str(self.method), METHODS)}; choose from {METHODS}"
                )
        for name in ("num_speculative_tokens", "num_draft_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is None and name == "num_speculative_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise BadRequest(f"{name}={value!r} was given; a whole number from 0 up is needed")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise BadRequest(
                f"prompt_lookup_min={self.prompt_lookup_min} and prompt_lookup_max={self.prompt_lookup_max} were "
                "given; 1 <= min <= max is needed"
            )
        if self.rejection_sample_method not in RULE_NAMES:
            raise BadRequest(
                f"no rejection_sample_method {self.rejection_sample_method!r}"
                f"{nearest(str(self.rejection_sample_method), RULE_NAMES)}; choose from {RULE_NAMES}"
            )

    @property
    def depth(self) -> int:
        """Deepest draft in tokens."""
        return self.num_draft_tokens if self.num_speculative_tokens is None else self.num_speculative_tokens

    def drafter(self) -> Drafter[Any]:
        """A drafter with these settings."""
        if isinstance(self.method, Drafter):
            return self.method
        if self.method == "none" or self.depth == 0 or self.num_draft_tokens == 0:
            return NoDraft()
        return Ngram(self.prompt_lookup_max, self.prompt_lookup_min)
