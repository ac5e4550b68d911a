"""What a request asks for: its sampling settings, checked before any work."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar

from paceline.errors import BadRequest, nearest
from paceline.recommended import GREEDY_BELOW, generation_config, recommended


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request wants from its tokens; unknown and impossible values are refused here, before any work."""

    n: int = 1
    """Number of texts for the prompt, each with noise of its own."""
    temperature: float = 1.0
    """Softmax temperature; below 1e-5 the likeliest token is taken."""
    top_k: int = 0
    """Keep the k likeliest tokens and whatever ties with the last of them; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this share of the mass; among equal tokens the lowest ids are kept first."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token that the output already holds."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time the output already holds it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; -inf bans one."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Words, as text or as token ids, whose last token is banned wherever the ones before it stand."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may come; none allows all."""
    no_repeat_ngram_size: int = 0
    """No sequence of so many tokens comes twice in prompt and output; 0 is off."""
    stop: str | Sequence[str] = ()
    """Strings that end the text."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text, besides the model's own."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    ignore_eos: bool = False
    """Whether the model's own end ids are tokens like any other."""
    min_tokens: int = 0
    """Until so many tokens are emitted, those that end the text are banned."""
    max_tokens: int | None = None
    """Most tokens to emit; none means the room left in the context."""
    logprobs: int | None = None
    """Log-probs of the chosen token and of so many likeliest ones, from the target's raw logits: before bias,
    temperature and filters. 0 is the chosen one alone, -1 the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""
    logits_processors: Sequence[Callable[..., Any]] = ()
    """Called in their order on the logits of each decided position: `transformers.LogitsProcessor`s, or functions
    (prompt and output ids, logits) -> logits."""
    skip_special_tokens: bool = True
    """Whether the text leaves out tokens such as <|im_end|>."""
    seed: int | None = None
    """Same seed, same text, with or without speculation; none takes a fresh seed for each request."""
    __no_type_check__: ClassVar[bool] = True  # checked below, in the test run too, with words

    def __new__(cls, *args: object, **given: object) -> "SamplingParams":
        """Refuses what the generated __init__ would only answer with a TypeError."""
        if args:
            raise BadRequest(f"{len(args)} settings were given without a name; write SamplingParams(temperature=...)")
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise BadRequest(f"unknown sampling setting {key!r}{nearest(key, known)}")
        return super().__new__(cls)

    @classmethod
    def from_model(cls, model: Any, **changes: Any) -> "SamplingParams":
        """The settings that a model's generation_config.json recommends, as `transformers` reads them.

        Sampling is off unless the file or a `temperature` among the changes turns it on.

        Args:
            model: an LLM, a `transformers` model or `GenerationConfig`, a folder, or a hub id.
            changes: settings by their names here; they win over the file's.

        Raises:
            BadRequest: the file asks for something that is not available here, named in the message.
            ModelNotFound: there is no such file.
        """
        return cls(**(recommended(generation_config(model), changes) | changes))

    def __post_init__(self) -> None:
        self._number("temperature", low=0.0)
        self._number("top_p", low=0.0, high=1.0, above=True)
        self._number("min_p", low=0.0, high=1.0)
        self._number("presence_penalty")
        self._number("frequency_penalty")
        self._number("repetition_penalty", low=0.0, above=True)
        for name, low in (("n", 1), ("top_k", -1), ("min_tokens", 0), ("no_repeat_ngram_size", 0)):
            self._whole(name, low)
        for name, least in (("max_tokens", 0), ("logprobs", -1), ("prompt_logprobs", -1), ("seed", None)):
            if getattr(self, name) is not None:
                self._whole(name, least)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} is {getattr(self, name)!r}; True or False is needed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}; lower it")
        self._set("seed", None if self.seed is None else self.seed % 2**64)
        self._set("logit_bias", _checked_bias(self.logit_bias))
        self._set("stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _checked_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise BadRequest("allowed_token_ids is empty, which leaves no token; None allows all")
        self._set("stop", _checked_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        self._set("bad_words", _checked_words(self.bad_words))
        self._set("logits_processors", _checked_processors(self.logits_processors))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _number(self, name: str, low: float = -math.inf, high: float = math.inf, above: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise BadRequest(f"{name} is {value!r}; a number is needed")
        value = float(value)
        inside = low < value <= high if above else low <= value <= high
        if not inside or not math.isfinite(value):
            floor = "" if low == -math.inf else f" {'above' if above else 'of at least'} {low:g}"
            ceiling = "" if high == math.inf else f"{' and' if floor else ''} at most {high:g}"
            raise BadRequest(f"{name} is {value}; a finite number{floor}{ceiling} is needed")
        self._set(name, value)

    def _whole(self, name: str, low: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise BadRequest(f"{name} is {value!r}; a whole number is needed")
        if low is not None and value < low:
            raise BadRequest(f"{name} is {value}; {low} or more is needed")
        self._set(name, int(value))


def _items(name: str, given: object, what: str) -> list[object]:
    """The entries of a list, none for None; a string, which is a list of characters to Python, is no list."""
    if given is None:
        return []
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise BadRequest(f"{name} is {given!r}; a list of {what} is needed")
    return list(given)


def _token_id(name: str, token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
        raise BadRequest(f"{name} holds {token!r}; token ids are whole numbers from 0")
    return int(token)


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    return tuple(_token_id(name, token) for token in _items(name, ids, "token ids"))


def _checked_strings(name: str, given: object) -> tuple[str, ...]:
    strings = []
    for text in _items(name, given, "strings"):
        if not isinstance(text, str) or not text:
            raise BadRequest(f"{name} holds {text!r}; strings of at least one character are needed")
        strings.append(text)
    return tuple(strings)


def _checked_words(given: object) -> tuple[str | tuple[int, ...], ...]:
    words: list[str | tuple[int, ...]] = []
    for word in _items("bad_words", given, "strings or of lists of token ids"):
        if isinstance(word, str):
            words += _checked_strings("bad_words", [word])
            continue
        if not isinstance(word, Iterable):
            raise BadRequest(
                f"bad_words holds {word!r}; strings or lists of token ids are needed, such as [[{word!r}]]"
            )
        words.append(_checked_ids("bad_words", word))
        if not words[-1]:
            raise BadRequest("bad_words holds a list without token ids; leave it out")
    return tuple(words)


def _checked_processors(given: object) -> tuple[Callable[..., Any], ...]:
    processors: list[Callable[..., Any]] = []
    for processor in _items("logits_processors", given, "functions"):
        if not callable(processor) or isinstance(processor, type):
            raise BadRequest(
                f"logits_processors holds {processor!r}; a transformers.LogitsProcessor object or a function "
                "(ids, logits) -> logits is needed"
            )
        processors.append(processor)
    return tuple(processors)


def _checked_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise BadRequest(f"logit_bias is {bias!r}; a mapping from token id to number is needed")
    checked = {}
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value == math.inf:
            raise BadRequest(f"logit_bias[{token!r}] is {value!r}; a finite number, or -inf for a ban, is needed")
        checked[_token_id("logit_bias", token)] = float(value)
    return checked
