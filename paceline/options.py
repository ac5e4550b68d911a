"""Command-line options: each has the name of its Python key with dashes, and one that is not given is not passed on.

So defaults live in one place, with the key. An option is written down once, in the table of its panel; `takes` gives
whole tables to a command. Values that a shell cannot spell (ids, biases, objects, prompts) are parsed here.
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.errors import BadRequest, nearest

if TYPE_CHECKING:
    from paceline.draft.base import Drafter

Command = TypeVar("Command", bound=Callable[..., None])


def _panel(title: str, **options: tuple[Any, ...]) -> dict[str, Parameter]:
    """Options by name, each given as (type, help, and its spelling where that is not the name with dashes).

    A flag that is spelled ``--no-...`` makes what it is named after False.
    """
    table = {}
    for name, (kind, text, *spelling) in options.items():
        names = spelling or [f"--{name.replace('_', '-')}"]
        info = typer.Option(
            None,
            *names,
            help=text,
            rich_help_panel=title,
            show_default=False,
            metavar="<text>" if kind == list[str] else None,
            callback=_negated if kind is bool and names[0].startswith("--no-") else None,
        )
        table[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=info, annotation=kind | None)
    return table


def _negated(given: bool | None) -> bool | None:
    return None if given is None else not given


SAMPLING = _panel(
    "Sampling",
    n=(int, "texts to write for the prompt, each with its own noise", "-n", "--n"),
    temperature=(float, "0 is greedy"),
    top_k=(int, "keep the k likeliest tokens"),
    top_p=(float, "keep the likeliest tokens that make up p"),
    min_p=(float, "keep tokens this many times as likely as the likeliest"),
    presence_penalty=(float, "subtracted from tokens written before"),
    frequency_penalty=(float, "subtracted per time a token was written"),
    repetition_penalty=(float, "divides the logits of tokens seen before"),
    no_repeat_ngram_size=(int, "no n tokens in a row occur twice"),
    logit_bias=(list[str], "ID=VALUE, repeated, or a JSON object"),
    bad_words=(list[str], "a word that is never written; repeated for more"),
    allowed_token_ids=(list[str], "the only ids that may be written: repeated, or with commas"),
    stop=(list[str], r"text that ends the answer; \n, \t and \\ are understood; repeated for more"),
    stop_token_ids=(list[str], "ids that end the text: repeated, or with commas"),
    include_stop_str_in_output=(bool, "keep the stop string in the text", "--include-stop-str-in-output"),
    ignore_eos=(bool, "write on past the model's own end", "--ignore-eos"),
    min_tokens=(int, "tokens to write before anything may end the text"),
    max_tokens=(int, "most tokens to write; else what the context has room for"),
    seed=(int, "the same seed gives the same text"),
    skip_special_tokens=(bool, "show special tokens in the text", "--no-skip-special-tokens"),
    logprobs=(int, "with --json: log-probabilities of each token and of the N likeliest"),
    prompt_logprobs=(int, "with --json: the same for the prompt's tokens"),
)
SPECULATION = _panel(
    "Speculation",
    method=(str, "auto (the default), none, ngram, suffix, recycle, lookahead, early_exit, draft_model or compose"),
    draft_model=(str, "a smaller model that guesses, named as MODEL is, or the folder of a head"),
    drafters=(list[str], "compose: its members, repeated or with commas: suffix, recycle, draft_model, ..."),
    num_speculative_tokens=(int, "depth: most tokens guessed in a row"),
    num_draft_tokens=(int, "most guesses verified in one pass"),
    prompt_lookup_max=(int, "ngram: longest n-gram looked up"),
    prompt_lookup_min=(int, "ngram: shortest n-gram looked up"),
    suffix_decoding_max_tree_depth=(int, "suffix: longest match and deepest guess"),
    suffix_decoding_max_cached_requests=(int, "suffix: earlier texts that it may copy from, else none"),
    corpus=(str, "suffix: a file made by paceline corpus build, to copy from"),
    window_size=(int, "lookahead: columns of the window; else what fits, as for the next two"),
    ngram_size=(int, "lookahead: tokens of an n-gram"),
    guess_set_size=(int, "lookahead: n-grams verified in a pass"),
    exit_layer=(int, "early_exit: how many of the model's layers guess; else half of them"),
    tree_top_k=(int, "draft_model, heads, early_exit: guesses tried side by side at each place"),
    tree_depth=(int, "draft_model, heads, early_exit: how deep the tree of guesses goes"),
    medusa_choices=(str, "medusa: a fixed tree as JSON, such as [[0], [0, 0], [1]]; else the best one"),
    draft_dtype=(str, "draft_model: weights of bfloat16, int8 or int4; else what pays here"),
    draft_vocab_size=(int, "draft_model: score only the first so many ids; else what pays here"),
    rejection_sample_method=(str, "coupled (same seed, same text), block or standard"),
    plan=(str, "auto: a file made by paceline plan, FILE.json"),
    speculative_config=(str, "all of these as one JSON object; options win"),
)
SETTINGS = {name: option for name, option in SPECULATION.items() if name != "method"}
"""What applies where the methods are named by another option."""
LOAD = _panel(
    "Model",
    dtype=(str, "auto, bfloat16, float32, ..."),
    device=(str, "auto, cpu, cuda, ..."),
    max_model_len=(int, "longest context, prompt included"),
    threads=(int, "CPU threads"),
)
REUSE = _panel("Model", reuse_prefix=(bool, "read every prompt anew", "--no-reuse-prefix"))
BATCH = _panel("Model", max_num_seqs=(int, "most texts written at once"))
ONE_TEXT = {name: option for name, option in SAMPLING.items() if name not in ("n", "logprobs", "prompt_logprobs")}
"""What applies where one text is written for a reader, as in a chat."""

Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="a named model, a hub id, a folder or a GGUF file")]
FromModel = Annotated[
    bool,
    typer.Option(
        "--from-model", help="start from the sampling values that the model comes with", rich_help_panel="Sampling"
    ),
]


def takes(*tables: Mapping[str, Parameter]) -> Callable[[Command], Command]:
    """Gives a command that ends in ``**asked`` the options of these tables; it finds them there by name."""

    def add(command: Command) -> Command:
        own = [p for p in signature(command).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        plain = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own]
        seen: Any = command
        seen.__signature__ = signature(command).replace(
            parameters=[*plain, *(option for table in tables for option in table.values())]
        )
        return command

    return add


def given(params: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The named options that were given."""
    return {name: params[name] for name in names if params.get(name) not in (None, [], ())}


def sampling_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options, ready for `SamplingParams`."""
    values = given(params, SAMPLING)
    if "logit_bias" in values:
        values["logit_bias"] = parse_bias(values["logit_bias"])
    for name in {"stop_token_ids", "allowed_token_ids"} & set(values):
        words = [word for text in values[name] for word in listed(text)]
        values[name] = [whole_number(word, f"--{name.replace('_', '-')}") for word in words]
    if "stop" in values:
        values["stop"] = [unescaped(text) for text in values["stop"]]
    return values


def setting(name: str, text: str) -> Any:
    """The value of one sampling setting typed as ``name=text``: JSON, or as its option takes it."""
    if name not in SAMPLING:
        raise BadRequest(f"no sampling setting {name!r}{nearest(name, SAMPLING)}")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if SAMPLING[name].annotation != list[str] | None or isinstance(value, list):
        return value
    return sampling_values({name: [text]})[name]


def speculation(params: Mapping[str, Any]) -> dict[str, Any]:
    """The speculative_config that the options describe; empty when none was given."""
    text = params.get("speculative_config")
    options = given(params, [name for name in SPECULATION if name != "speculative_config"])
    if "draft_model" in options:
        options["model"] = options.pop("draft_model")
    if "drafters" in options:
        options["drafters"] = [name for text in options["drafters"] for name in listed(text)]
    if "medusa_choices" in options:
        try:
            options["medusa_choices"] = json.loads(options["medusa_choices"])
        except json.JSONDecodeError as error:
            raise BadRequest(f"--medusa-choices {options['medusa_choices']!r} is not JSON ({error})") from None
    return (json_object(text, "--speculative-config") if text else {}) | options


def plugin(name: str) -> "Drafter[Any]":
    """The drafter that ``module:Class`` names, made without arguments; modules of this folder are found too."""
    from paceline.draft.base import Drafter

    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise BadRequest(f"--plugin {name!r}: MODULE:CLASS is needed, such as my_drafters:LastSuccessor")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadRequest(f"--plugin {name!r}: {error}") from error
    except Exception as error:  # the module is the user's own, and may fail in any way
        raise BadRequest(f"--plugin {name!r}: importing {module} raised {type(error).__name__}: {error}") from error
    drafter = found
    if callable(found) and not isinstance(found, Drafter):
        try:
            drafter = found()
        except Exception as error:
            raise BadRequest(
                f"--plugin {name!r}: {attribute}() raised {type(error).__name__}: {error}; give a class that is made "
                "without arguments, or an instance"
            ) from error
    if not isinstance(drafter, Drafter):
        raise BadRequest(f"--plugin {name!r} gives {type(drafter).__name__}; a paceline.Drafter is needed")
    return drafter


def unescaped(text: str) -> str:
    r"""``text`` with ``\n``, ``\t`` and ``\\`` as the characters they stand for."""
    return re.sub(r"\\[nt\\]", lambda found: {"n": "\n", "t": "\t", "\\": "\\"}[found[0][1]], text)


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


def prompt_text(prompt: str) -> str:
    """The prompt itself, what ``@file`` holds, or standard input for ``-``."""
    if prompt == "-":
        try:
            return sys.stdin.read()
        except UnicodeDecodeError as error:
            raise BadRequest(f"standard input is not UTF-8 text: {error}") from None
    return _file_text(Path(prompt[1:]), "the prompt file") if prompt.startswith("@") else prompt


def prompts_in(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file: one JSON object a line, or, in a .txt file, plain lines; blank ones are skipped.

    Each has ``prompt`` or ``messages``, and ``id`` if one was given.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise BadRequest(
            f"--prompts {str(path)!r}: FILE.jsonl, an object a line, or FILE.txt, a text a line, is needed"
        )
    text = _file_text(path, "the prompts of")
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise BadRequest(f"--prompts {str(path)!r} holds no prompts")
    return [_prompt(line, f"{path}:{n}") if path.suffix == ".jsonl" else {"prompt": line} for n, line in lines]


def _prompt(line: str, where: str) -> dict[str, Any]:
    """One object of a prompts file, with its place in every complaint."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRequest(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise BadRequest(f"{where}: an object with either 'prompt' or 'messages' is needed")
    strange = sorted(row.keys() - {"prompt", "messages", "id", "category"})
    if strange:
        raise BadRequest(
            f"{where}: {strange[0]!r} is no key of a prompt; settings are given as options, for all prompts"
        )
    if "prompt" in row and not (isinstance(row["prompt"], str) and row["prompt"]):
        raise BadRequest(f"{where}: 'prompt' must be a text that is not empty")
    if "messages" in row and not _are_messages(row["messages"]):
        raise BadRequest(f"{where}: 'messages' must be a list of objects with 'role' and 'content', both texts")
    return row


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


def _file_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRequest(f"cannot read {what} {str(path)!r}: {reason}") from None
