"""Command-line options: each has the name of its Python key with dashes, and one that is not given is not passed on.

So defaults live in one place, with the key. Values that a shell cannot spell (ids, biases, objects) are parsed here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from paceline.errors import BadRequest

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "max_tokens",
    "seed",
)
SPECULATION = (
    "method",
    "num_speculative_tokens",
    "num_draft_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "rejection_sample_method",
)
LOAD = ("dtype", "device", "max_model_len", "threads")


def _option(panel: str, text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, show_default=False)


Temperature = Annotated[float | None, _option("Sampling", "0 is greedy")]
TopK = Annotated[int | None, _option("Sampling", "keep the k likeliest tokens")]
TopP = Annotated[float | None, _option("Sampling", "keep the likeliest tokens that make up p")]
MinP = Annotated[float | None, _option("Sampling", "keep tokens this many times as likely as the likeliest")]
PresencePenalty = Annotated[float | None, _option("Sampling", "subtracted from tokens written before")]
FrequencyPenalty = Annotated[float | None, _option("Sampling", "subtracted per time a token was written")]
RepetitionPenalty = Annotated[float | None, _option("Sampling", "divides the logits of tokens seen before")]
LogitBias = Annotated[list[str] | None, _option("Sampling", "ID=VALUE, repeated, or a JSON object")]
StopTokenIds = Annotated[list[str] | None, _option("Sampling", "ids that end the text: repeated, or with commas")]
MaxTokens = Annotated[int | None, _option("Sampling", "most tokens to write; else what the context has room for")]
Seed = Annotated[int | None, _option("Sampling", "the same seed gives the same text")]
MethodName = Annotated[str | None, _option("Speculation", "none or ngram; else the library chooses")]
NumSpeculativeTokens = Annotated[int | None, _option("Speculation", "depth: most tokens guessed in a row")]
NumDraftTokens = Annotated[int | None, _option("Speculation", "most guesses verified in one pass")]
PromptLookupMax = Annotated[int | None, _option("Speculation", "longest n-gram looked up")]
PromptLookupMin = Annotated[int | None, _option("Speculation", "shortest n-gram looked up")]
RejectionSampleMethod = Annotated[
    str | None, _option("Speculation", "coupled (same seed, same text), block or standard")
]
SpeculativeConfig = Annotated[str | None, _option("Speculation", "all of these as one JSON object; options win")]
Dtype = Annotated[str | None, _option("Model", "auto, bfloat16, float32, ...")]
Device = Annotated[str | None, _option("Model", "auto, cpu, cuda, ...")]
MaxModelLen = Annotated[int | None, _option("Model", "longest context, prompt included")]
Threads = Annotated[int | None, _option("Model", "CPU threads")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="a named model, a hub id, a folder or a GGUF file")]


def given(params: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named options that were given."""
    return {name: params[name] for name in names if params.get(name) not in (None, [], ())}


def sampling_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options, ready for `SamplingParams`."""
    values = given(params, SAMPLING)
    if "logit_bias" in values:
        values["logit_bias"] = parse_bias(values["logit_bias"])
    if "stop_token_ids" in values:
        words = [word for text in values["stop_token_ids"] for word in listed(text)]
        values["stop_token_ids"] = [whole_number(word, "--stop-token-ids") for word in words]
    return values


def speculation(params: Mapping[str, Any]) -> dict[str, Any]:
    """The speculative_config that the options describe; empty when none was given."""
    text = params.get("speculative_config")
    return (json_object(text, "--speculative-config") if text else {}) | given(params, SPECULATION)


def parse_bias(words: Sequence[str]) -> dict[int, float]:
    """``["12=-5", '{"13": 2}']`` as ``{12: -5.0, 13: 2.0}``."""
    bias: dict[int, float] = {}
    for word in words:
        is_json = word.lstrip().startswith("{")
        pairs = json_object(word, "--logit-bias") if is_json else dict([word.partition("=")[::2]])
        try:
            bias |= {int(key): float(value) for key, value in pairs.items()}
        except (TypeError, ValueError):
            raise BadRequest(
                f"--logit-bias {word!r} is neither ID=VALUE, such as 12=-5, nor a JSON object of such pairs"
            ) from None
    return bias


def whole_number(word: str, name: str) -> int:
    """``word`` as an integer."""
    try:
        return int(word)
    except ValueError:
        raise BadRequest(f"{name} needs whole numbers, not {word!r}") from None


def json_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object that option ``name`` was given."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRequest(f"""{name} {text!r} is not JSON ({error}); quote it like this: '{{"key": 1}}'""") from None
    if not isinstance(value, dict):
        raise BadRequest(f"{name} needs a JSON object, not {text!r}")
    return value


def listed(text: str) -> list[str]:
    """Words separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
