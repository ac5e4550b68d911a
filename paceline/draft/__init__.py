"""Drafters by name, and the settings of `speculative_config`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from paceline.draft.base import Drafter, NoDraft
from paceline.draft.compose import Compose
from paceline.draft.corpus import Corpus
from paceline.draft.costs import Costs, Curve
from paceline.draft.eagle import Eagle
from paceline.draft.early_exit import EarlyExit
from paceline.draft.lookahead import Lookahead
from paceline.draft.medusa import Medusa, checked_choices
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.draft.pieces import Dictionary
from paceline.draft.planned import Planned
from paceline.draft.planned import read as read_plan
from paceline.draft.recycle import Recycle
from paceline.draft.suffix import Suffix
from paceline.draft.translate import Translated
from paceline.draft.tuning import DTYPES
from paceline.errors import BadRequest, IncompatibleDrafter, check_whole, nearest
from paceline.formats import Head, kind_of, read_head
from paceline.target import HFTarget

LATER = frozenset(["draft_temperature"])
"""Keys whose methods are not in this version."""
METHODS = (
    *("none", "ngram", "suffix", "lookahead", "recycle", "early_exit"),
    *("draft_model", "medusa", "eagle", "eagle3", "compose", "auto"),
)
HEADS = ("medusa", "eagle", "eagle3")
"""Methods whose model is a head that was trained for the target."""
RULE_NAMES = ("coupled", "block", "standard")
OWNERS = {
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "corpus": ("suffix",),
    "window_size": ("lookahead",),
    "ngram_size": ("lookahead",),
    "guess_set_size": ("lookahead",),
    "exit_layer": ("early_exit",),
    "model": ("draft_model", *HEADS),
    "tree_top_k": ("draft_model", "early_exit", *HEADS),
    "tree_depth": ("draft_model", "early_exit", *HEADS),
    "medusa_choices": ("medusa",),
    "draft_dtype": ("draft_model",),
    "draft_vocab_size": ("draft_model",),
    "drafters": ("compose",),
}
"""Keys that these methods alone have a use for: given to others they would be ignored, so they are refused."""


class Loaded(NamedTuple):
    """A draft model that is ready for its target."""

    model: HFTarget
    costs: Costs | None
    """What passes cost, where that was measured."""
    words: Dictionary | None
    """What its ids are for the target, where they do not mean the same."""


Load = Callable[["SpeculativeConfig"], Loaded]
"""Loads the draft model of a config."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate. The keys of `speculative_config`, checked."""

    method: "str | Drafter[Any]" = "auto"
    """One of `METHODS`, or a `Drafter` of your own. auto composes suffix with draft_model when a model is given, else
    with recycle."""
    model: Any = None
    """The draft model of draft_model: a named model, a hub id, a folder, a GGUF file, or a `transformers` model. Of
    medusa, eagle and eagle3 the head: a folder, or a file of weights."""
    num_speculative_tokens: int | None = None
    """Deepest draft, in tokens; 0 is plain decoding. None leaves it to the method: look-ups draft as deep as the budget
    lets them, a draft model reads on while another pass of it is likely to pay."""
    num_draft_tokens: int = 23
    """Most nodes verified per pass for a row alone, the root not counted; several rows share a pass of 32."""
    tree_top_k: int | None = None
    """Candidates that are offered after each token; 1 is a chain. None is 3 under coupled, 10 for medusa, else 1."""
    tree_depth: int | None = None
    """Deepest draft of a tree: another name for num_speculative_tokens."""
    medusa_choices: Any = None
    """A fixed tree for medusa: paths of ranks, such as [[0], [0, 0], [1]]. None grows the best one."""
    draft_dtype: str = "auto"
    """Weights that a draft model reads single tokens with: bfloat16, int8 or int4. auto measures once what pays."""
    draft_vocab_size: int | None = None
    """Score only the first so many ids in a draft model of int8 or int4 weights. None measures once what pays."""
    prompt_lookup_max: int = 5
    """Longest n-gram that ngram looks for."""
    prompt_lookup_min: int = 1
    """Shortest one."""
    suffix_decoding_max_tree_depth: int | None = None
    """Longest match and deepest draft of suffix; None sets no bound."""
    suffix_decoding_max_cached_requests: int = 0
    """Finished texts of this process that suffix may copy from; 0 keeps none."""
    corpus: Any = None
    """A file made by `paceline corpus build` that suffix may copy from, or a `Corpus` that is open."""
    window_size: int | None = None
    """W of lookahead: columns of its window. None takes what fits what passes cost, as for the next two."""
    ngram_size: int | None = None
    """N of lookahead: tokens of an n-gram, the first of which is the pending one."""
    guess_set_size: int | None = None
    """G of lookahead: n-grams verified per pass."""
    exit_layer: int | None = None
    """Layers of the target that draft in early_exit; None is half of them."""
    drafters: "tuple[SpeculativeConfig, ...]" = ()
    """The members of compose: method names, dicts of settings, or `Drafter` objects."""
    rejection_sample_method: str = "coupled"
    """coupled (same seed, same text), block or standard (same distribution)."""
    plan: Any = None
    """A file made by `paceline plan`, for method auto: what was measured to be best for this model on this machine.
    num_speculative_tokens and num_draft_tokens cap it."""
    planned: Planned | None = field(default=None, init=False, repr=False)
    """What the plan says."""

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
            wish = given if isinstance(given, str) and given in METHODS else "suffix"
            raise BadRequest(f"speculative_config is {given!r}; a dict such as {{'method': {wish!r}}} is needed")
        known = [f.name for f in fields(cls) if f.init]
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
            if self.method not in METHODS:
                raise BadRequest(
                    f"no method {self.method!r}{nearest(str(self.method), METHODS)}; choose from {METHODS}"
                )
        for name in ("num_speculative_tokens", "num_draft_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is None and name == "num_speculative_tokens":
                continue
            check_whole(name, value, 0)
        if self.rejection_sample_method not in RULE_NAMES:
            raise BadRequest(
                f"no rejection_sample_method {self.rejection_sample_method!r}"
                f"{nearest(str(self.rejection_sample_method), RULE_NAMES)}; choose from {RULE_NAMES}"
            )
        asked = self.method
        if self.plan is not None:
            self._follow_plan()
        if self.method == "auto":
            self._resolve_auto()
        if self.method == "compose":
            self._check_drafters()
        self._check_owners(asked)
        if self.method == "draft_model":
            self._check_model()
        if self.method in HEADS:
            self._check_head()
        if self.corpus is not None and not isinstance(self.corpus, Corpus):
            if not isinstance(self.corpus, str | os.PathLike):
                raise BadRequest(f"corpus={self.corpus!r} was given; the path of a corpus file is needed")
            self._set(corpus=os.fspath(self.corpus))
            Corpus(self.corpus)  # what is wrong with the file is told before a model is loaded
        self._check_tree()
        for name, least in (("window_size", 1), ("ngram_size", 2), ("guess_set_size", 1), ("exit_layer", 1)):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least)
        if self.method == "lookahead":
            Lookahead(self.window_size, self.ngram_size, self.guess_set_size)  # sizes that do not go together
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise BadRequest(
                f"prompt_lookup_min={self.prompt_lookup_min} and prompt_lookup_max={self.prompt_lookup_max} were "
                "given; 1 <= min <= max is needed"
            )
        check_whole("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        if self.suffix_decoding_max_tree_depth is not None:
            check_whole("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _resolve_auto(self) -> None:
        """What is at hand: suffix with a draft model or a head if one is given, else with recycle."""
        other = "recycle" if self.model is None else method_of(self.model)
        self._set(method="compose", drafters=("suffix", other))

    def _follow_plan(self) -> None:
        """The settings of a plan; lengths that are given beside it are the most there may be."""
        if self.method != "auto":
            raise BadRequest(f"plan says what method auto is to do; the method is {self.method!r}: leave one out")
        if not isinstance(self.plan, str | os.PathLike):
            raise BadRequest(f"plan={self.plan!r} was given; the path of a plan file is needed")
        own = ("method", "plan", "planned", "num_speculative_tokens", "num_draft_tokens", "tree_depth")
        beside = [f.name for f in fields(self) if f.name not in own and getattr(self, f.name) != f.default]
        if beside:
            raise BadRequest(f"{', '.join(beside)} given beside plan, which says that itself; leave one out")
        planned = read_plan(os.fspath(self.plan))
        unknown = [name for name in planned.settings if name not in {f.name for f in fields(self)}]
        method = planned.settings.get("method")
        if unknown or method not in METHODS:
            what = f"the key {unknown[0]!r}" if unknown else "no method" if method is None else f"the method {method!r}"
            raise BadRequest(f"plan {planned.path} has {what} and is no plan of this version; make one again")
        for name, value in planned.settings.items():
            cap = getattr(self, name)
            self._set(**{name: value if cap == _default(name) or name not in own[3:] else min(cap, value)})
        self._set(plan=planned.path, planned=planned)

    def _check_owners(self, asked: object) -> None:
        """No key that the method has no use for."""
        for name, owners in OWNERS.items():
            if getattr(self, name) != _default(name) and self.method not in owners:
                raise BadRequest(f"{name} is for method {_either(owners)}; the method is {asked!r}")

    def _check_model(self) -> None:
        """What a draft model needs."""
        if self.model is None:
            raise BadRequest("method 'draft_model' needs the draft model: add {'model': NAME or FOLDER}")
        try:
            hash(self.model)
        except TypeError:
            raise BadRequest(f"model={self.model!r} was given; a name, a path or a model object is needed") from None
        if isinstance(self.model, os.PathLike):
            self._set(model=os.fspath(self.model))
        if self.draft_vocab_size is not None:
            check_whole("draft_vocab_size", self.draft_vocab_size, 1)
        if self.draft_dtype not in DTYPES:
            raise BadRequest(
                f"no draft_dtype {self.draft_dtype!r}{nearest(str(self.draft_dtype), DTYPES)}; choose from {DTYPES}"
            )

    def _check_head(self) -> None:
        """That there is a head, of the kind that the method is for."""
        if self.model is None:
            raise BadRequest(f"method {self.method!r} needs the head: add {{'model': FOLDER}}")
        if isinstance(self.model, os.PathLike):
            self._set(model=os.fspath(self.model))
        if not isinstance(self.model, str):
            raise BadRequest(f"model={self.model!r} was given; the folder of a head, or its weights file, is needed")
        if self.medusa_choices is not None:
            self._set(medusa_choices=checked_choices(self.medusa_choices))

    def _check_tree(self) -> None:
        """The shape of a grown tree, and what is named twice."""
        if self.tree_top_k is not None:
            check_whole("tree_top_k", self.tree_top_k, 1)
        if self.tree_depth is not None:
            check_whole("tree_depth", self.tree_depth, 1)
            if self.num_speculative_tokens not in (None, self.tree_depth):
                raise BadRequest(
                    f"tree_depth={self.tree_depth} and num_speculative_tokens={self.num_speculative_tokens} were "
                    "given, and both mean the deepest draft; give one"
                )
            self._set(num_speculative_tokens=self.tree_depth)

    def _check_drafters(self) -> None:
        """The members as configs of their own; keys that stand beside `drafters` go to the members they are for."""
        given = self.drafters
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise BadRequest(
                f"method 'compose' needs drafters, such as ['suffix', {{'method': 'draft_model', 'model': NAME}}]; "
                f"{given!r} was given"
            )
        members = [_member(one) for one in given]
        for name, owners in OWNERS.items():
            value = getattr(self, name)
            if "compose" not in owners and value != _default(name):
                users = [one for one in members if one["method"] in owners]
                if not users:
                    raise BadRequest(f"{name} is for method {_either(owners)}, which is none of the drafters")
                for one in users:
                    one.setdefault(name, value)
                self._set(**{name: _default(name)})
        rule = self.rejection_sample_method
        for one in members:
            if one.setdefault("rejection_sample_method", rule) != rule:
                raise BadRequest("rejection_sample_method is the whole composition's: give it beside drafters")
        read = tuple(SpeculativeConfig.read(one) for one in members)
        if len(set(read)) < len(read):
            raise BadRequest("drafters names the same settings twice; a second copy guesses what the first one does")
        self._set(drafters=read)

    @property
    def depth(self) -> int:
        """Deepest draft in tokens."""
        return self.num_draft_tokens if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted with these settings."""
        return self.method == "none" or self.depth == 0 or self.num_draft_tokens == 0

    @property
    def draft_keys(self) -> tuple[tuple[Any, ...], ...]:
        """Which draft models are needed, and how they are run."""
        if self.is_plain:
            return ()
        own = ((self.model, self.draft_dtype, self.draft_vocab_size),) if self.method == "draft_model" else ()
        return own + tuple(key for member in self.drafters for key in member.draft_keys)

    def drafter(
        self,
        load: Load | None = None,
        reuse_prefix: bool = True,
        costs: Costs | None = None,
        curve: Curve | None = None,
    ) -> Drafter[Any]:
        """A drafter with these settings.

        Args:
            load: loads draft models; needed for draft_model.
            reuse_prefix: whether it may keep what it read of recent texts.
            costs: what passes cost where no draft model was measured.
            curve: what passes of the target cost, if they were measured by themselves.
        """
        if isinstance(self.method, Drafter):
            return self.method
        if self.is_plain:
            return NoDraft()
        if self.method == "ngram":
            return Ngram(self.prompt_lookup_max, self.prompt_lookup_min)
        known = [load(one).costs for one in (self, *self.drafters) if load is not None and one.method == "draft_model"]
        costs = next((one for one in known if one is not None), costs)
        if curve is not None:
            costs = (costs or Costs()).on(curve)
        if self.method == "suffix":
            depth, cached = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
            return Suffix(max_depth=depth, cached_requests=cached, corpus=self.corpus, costs=costs)
        if self.method == "lookahead":
            return Lookahead(self.window_size, self.ngram_size, self.guess_set_size, costs=costs)
        if self.method == "recycle":
            return Recycle(costs=costs)
        if self.method == "early_exit":
            return EarlyExit(
                self.exit_layer,
                tree_top_k=self.tree_top_k,
                depth=self.num_speculative_tokens,
                rule=self.rejection_sample_method,
                costs=costs,
            )
        if self.method == "compose":
            members = [one.drafter(load, reuse_prefix, costs, curve) for one in self.drafters]
            return Compose(members, rule=self.rejection_sample_method, costs=costs)
        if self.method in HEADS:
            head = read_head(self.model)
            check_kind(head, str(self.method))
            settings: dict[str, Any] = {"tree_top_k": self.tree_top_k, "depth": self.num_speculative_tokens}
            settings |= {"rule": self.rejection_sample_method, "costs": costs}
            if self.method == "medusa":
                return Medusa(head, choices=self.medusa_choices, **settings)
            return Eagle(head, **settings)
        assert load is not None, "whoever resolves names loads the draft model"
        draft = load(self)
        settings = {
            "tree_top_k": self.tree_top_k,
            "depth": self.num_speculative_tokens,
            "rule": self.rejection_sample_method,
            "reuse_prefix": reuse_prefix,
            "costs": costs,
        }
        if draft.words is not None:
            return Translated(draft.model, draft.words, **settings)
        return DraftModel(draft.model, **settings)


def method_of(model: Any) -> str:
    """The method that drafts with a model: that of a head by its kind, `draft_model` for all else."""
    kind = kind_of(model) if isinstance(model, str | os.PathLike) else None
    return kind or "draft_model"


def check_kind(head: Head, method: str) -> None:
    """Passes when a head is of the kind that a method is for.

    Raises:
        IncompatibleDrafter: it is of another; with the method that it is for.
    """
    if head.kind != method:
        raise IncompatibleDrafter(f"the head is one for method {head.kind!r}, and the method is {method!r}: name that")


def check_corpora(drafter: Drafter[Any], tokenizer: Any, name: str) -> None:
    """Passes when every corpus that a drafter copies from was built with the tokenizer of the model `name`.

    Raises:
        IncompatibleDrafter: one was not.
    """
    for one in drafter.drafters if isinstance(drafter, Compose) else (drafter,):
        if isinstance(one, Suffix) and one.corpus is not None:
            one.corpus.check(tokenizer, name)


def _either(methods: tuple[str, ...]) -> str:
    return " or ".join(map(repr, methods))


def _member(given: Any) -> dict[str, Any]:
    """The settings of one member of a composition."""
    if isinstance(given, SpeculativeConfig):
        changed = ((f.name, getattr(given, f.name)) for f in fields(given) if f.init)
        settings = {name: value for name, value in changed if value != _default(name)} | {"method": given.method}
    else:
        settings = dict(given) if isinstance(given, Mapping) else {"method": given}
    method = settings.get("method")
    if method in ("none", "auto", "compose", None) or isinstance(method, Compose):
        named = repr(method) if isinstance(method, str | None) else "of a composition"
        raise BadRequest(
            f"a member of drafters has method {named}; each needs one that drafts by itself, such as 'suffix'"
        )
    return settings


def _default(name: str) -> Any:
    return next(f.default for f in fields(SpeculativeConfig) if f.name == name)
