"""Drafters by name, and the settings of `speculative_config`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.draft.base import Drafter, NoDraft
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.errors import BadRequest, nearest
from paceline.target import HFTarget

LATER = frozenset(
    [
        *("corpus", "exit_layer", "drafters", "medusa_choices", "plan"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
        *("window_size", "ngram_size", "guess_set_size"),
        *("draft_dtype", "draft_vocab_size", "draft_temperature"),
    ]
)
"""Keys whose methods are not in this version."""
METHODS = ("none", "ngram", "draft_model", "auto")
LATER_METHODS = frozenset(["suffix", "lookahead", "recycle", "early_exit", "medusa", "eagle", "eagle3", "compose"])
RULE_NAMES = ("coupled", "block", "standard")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate. The keys of `speculative_config`, checked."""

    method: "str | Drafter[Any]" = "auto"
    """none, ngram, draft_model, auto, or a `Drafter` of your own. auto is draft_model when a model is given, else
    ngram."""
    model: Any = None
    """The draft model of draft_model: a named model, a hub id, a folder, a GGUF file, or a `transformers` model."""
    num_speculative_tokens: int | None = None
    """Deepest draft, in tokens; 0 is plain decoding. None leaves it to the method: ngram drafts as deep as the budget
    lets it, a draft model as deep as pays by what was accepted so far."""
    num_draft_tokens: int = 23
    """Most nodes verified per pass for a row alone, the root not counted; several rows share a pass of 32."""
    tree_top_k: int | None = None
    """Candidates that a draft model offers after each token; None or 1 is a chain."""
    tree_depth: int | None = None
    """Deepest draft of a tree: another name for num_speculative_tokens."""
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
            _whole(name, value, 0)
        self._check_model()
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

    def _check_model(self) -> None:
        """A setting of a draft model without one, or one that is named twice, would be ignored: refused."""
        if self.method == "auto" and self.model is not None:
            object.__setattr__(self, "method", "draft_model")
        for name in ("model", "tree_top_k", "tree_depth"):
            if getattr(self, name) is not None and self.method != "draft_model":
                raise BadRequest(f"{name} is for method 'draft_model'; the method is {self.method!r}")
        if self.method != "draft_model":
            return
        if self.model is None:
            raise BadRequest("method 'draft_model' needs the draft model: add {'model': NAME or FOLDER}")
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if self.tree_top_k is not None:
            _whole("tree_top_k", self.tree_top_k, 1)
        if self.tree_depth is not None:
            _whole("tree_depth", self.tree_depth, 1)
            if self.num_speculative_tokens not in (None, self.tree_depth):
                raise BadRequest(
                    f"tree_depth={self.tree_depth} and num_speculative_tokens={self.num_speculative_tokens} were "
                    "given, and both mean the deepest draft; give one"
                )
            object.__setattr__(self, "num_speculative_tokens", self.tree_depth)

    @property
    def depth(self) -> int:
        """Deepest draft in tokens."""
        return self.num_draft_tokens if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted with these settings."""
        return self.method == "none" or self.depth == 0 or self.num_draft_tokens == 0

    def drafter(self, draft: HFTarget | None = None, reuse_prefix: bool = True) -> Drafter[Any]:
        """A drafter with these settings.

        Args:
            draft: the loaded draft model, for draft_model.
            reuse_prefix: whether it may keep what it read of recent texts.
        """
        if isinstance(self.method, Drafter):
            return self.method
        if self.is_plain:
            return NoDraft()
        if self.method == "draft_model":
            assert draft is not None, "whoever resolves names loads the draft model"
            return DraftModel(
                draft,
                tree_top_k=self.tree_top_k or 1,
                depth=self.num_speculative_tokens,
                rule=self.rejection_sample_method,
                reuse_prefix=reuse_prefix,
            )
        return Ngram(self.prompt_lookup_max, self.prompt_lookup_min)


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadRequest(f"{name}={value!r} was given; a whole number from {least} up is needed")
