"""The sampling settings that a model's generation_config.json recommends, under the names they have here.

Nothing that would change the text is dropped: what has no like here is refused by its name.
"""

import math
import os
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from paceline.errors import BadRequest, ModelNotFound

GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token."""

_SAME = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",  # of vLLM, in some files
    "frequency_penalty": "frequency_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
}
_WHEN_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_DEFAULT_TOP_K = 50
"""What `transformers` samples with when a file has no top_k."""

_NOT_HERE: dict[str, Callable[[Any], bool]] = {
    "num_beams": lambda beams: beams > 1,
    "num_beam_groups": lambda groups: groups > 1,
    "diversity_penalty": bool,
    "constraints": bool,
    "force_words_ids": bool,
    "penalty_alpha": bool,
    "dola_layers": bool,
    "guidance_scale": lambda scale: scale != 1,
    "encoder_repetition_penalty": lambda penalty: penalty != 1,
    "encoder_no_repeat_ngram_size": bool,
    "forced_bos_token_id": lambda _: True,
    "forced_eos_token_id": lambda _: True,
    "begin_suppress_tokens": bool,
    "exponential_decay_length_penalty": lambda _: True,
    "remove_invalid_values": bool,
    "watermarking_config": lambda _: True,
    "token_healing": bool,
    "max_time": lambda _: True,
}
"""Settings that change the text and have no like here, and whether a value other than none makes them do so."""
_NOT_HERE_WHEN_SAMPLING: dict[str, Callable[[Any], bool]] = {
    "typical_p": lambda mass: mass < 1,
    "epsilon_cutoff": lambda cutoff: 0 < cutoff < 1,
    "eta_cutoff": lambda cutoff: 0 < cutoff < 1,
    "top_h": lambda _: True,
}


def generation_config(model: Any) -> Any:
    """The `transformers.GenerationConfig` of whatever stands for a model."""
    from transformers import GenerationConfig

    if isinstance(model, str | os.PathLike):
        try:
            return GenerationConfig.from_pretrained(os.fspath(model))
        except OSError as error:
            raise ModelNotFound(
                f"{os.fspath(model)!r} has no generation_config.json that can be read ({str(error).splitlines()[0]}); "
                "write SamplingParams(...) with settings of your own"
            ) from None
        except (ValueError, TypeError) as error:
            raise BadRequest(f"the generation_config.json of {os.fspath(model)!r} is not valid: {error}") from None
    config = model if isinstance(model, GenerationConfig) else getattr(model, "generation_config", None)
    if not isinstance(config, GenerationConfig):
        raise BadRequest(
            f"{type(model).__name__} has no generation_config; an LLM, a transformers model, a GenerationConfig, a "
            "folder or a hub id is needed"
        )
    return config


def recommended(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The file's settings under our names; refuses those that would be lost."""
    given = {key: value for key, value in vars(config).items() if value is not None}
    sampling = given.get("do_sample") is True
    if isinstance(changes.get("temperature"), Real):
        sampling = changes["temperature"] >= GREEDY_BELOW
    _refuse(given, _NOT_HERE | (_NOT_HERE_WHEN_SAMPLING if sampling else {}))
    names = _SAME | (_WHEN_SAMPLING if sampling else {})
    found = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
    if sampling:
        found.setdefault("top_k", _DEFAULT_TOP_K)
    else:
        found["temperature"] = 0.0
    for theirs, new, ours in (
        ("max_length", "max_new_tokens", "max_tokens"),
        ("min_length", "min_new_tokens", "min_tokens"),
    ):
        if given.get(theirs) and new not in given and ours not in changes:
            raise BadRequest(
                f"the model's generation_config has {theirs} {given[theirs]}, which counts the prompt too; say how "
                f"many tokens of output are meant: {ours}=..."
            )
    if "stop_strings" in given:
        found |= {"stop": given["stop_strings"], "include_stop_str_in_output": True}
    ends = given.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    # transformers drops a banned end id, which would leave a text without its end
    found["bad_words"] = [ids for ids in given.get("bad_words_ids", ()) if ids not in [[end] for end in ends]]
    found["logit_bias"] = _bias_of(given) or None
    return found


def _refuse(given: Mapping[str, Any], active: Mapping[str, Callable[[Any], bool]]) -> None:
    lost = [
        f"{name} {given[name]!r}"
        for name, changes_text in active.items()
        if name in given and changes_text(given[name])
    ]
    if lost:
        raise BadRequest(
            f"the model's generation_config has {', '.join(lost)}, which is not available here and would change the "
            "text; write SamplingParams(...) with settings of your own"
        )


def _bias_of(given: Mapping[str, Any]) -> dict[int, float]:
    """One-token sequence_bias and suppress_tokens as a logit_bias."""
    listed = given.get("sequence_bias") or {}
    bias: dict[int, float] = {}
    for ids, value in listed.items() if isinstance(listed, Mapping) else listed:
        if len(ids) != 1:
            raise BadRequest(
                f"the model's generation_config has a sequence_bias for {list(ids)}, and only that of single tokens is "
                "available here; write SamplingParams(...) with settings of your own"
            )
        bias[ids[0]] = value
    return bias | dict.fromkeys(given.get("suppress_tokens", ()), -math.inf)
