"""Heads as each published layout has them: what its tensors are called, and what its config says."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import BadRequest

from .eagle_config import LIST
from .head import Eagle3Settings, EagleSettings, Head, Layout, MedusaSettings, target_ids

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "medusa": ("medusa", "vllm-medusa"),
    "eagle": ("eagle",),
    "eagle3": ("eagle", "speculators"),
}
"""Which layouts there are for a kind of head."""
Written = tuple[dict[str, Tensor], dict[str, Any]]


def export(head: Head, layout: Layout) -> Written:
    """Tensors and config of a head in a layout.

    Raises:
        BadRequest: the layout is for another kind of head, or has no place for something that this one has.
    """
    allowed = LAYOUTS[head.kind]
    if layout not in allowed:
        raise BadRequest(
            f"layout={layout!r} was given; a head of kind {head.kind} can be written as {' or '.join(allowed)}"
        )
    settings = head.settings
    if isinstance(settings, MedusaSettings):
        tensors, config = (_medusa if layout == "medusa" else _vllm_medusa)(head, settings)
    elif layout == "speculators" and isinstance(settings, Eagle3Settings):
        tensors, config = _speculators(head, settings)
    else:
        tensors, config = _eagle(head, settings)
    own = head.source is not None and head.source.layout == layout
    return tensors, _over(head.config, config) if own else config


def _over(config: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The config that a head was read with, wherever ours says nothing, and what that called its kind of model."""
    found = {key: value for key, value in config.items() if key != "rope_parameters"}  # our own keys, written otherwise
    for key, value in ours.items():
        if key in found and key in ("architectures", "model_type"):
            continue
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _over(found[key], value) if both and key != "rope_scaling" else value
    return found


def _refuse(layout: Layout, what: str, instead: str) -> BadRequest:
    return BadRequest(
        f"layout={layout!r} was given, and the head has {what}, which that layout has no place for; {instead}"
    )


def _medusa(head: Head, settings: MedusaSettings) -> Written:
    instead = "layout='vllm-medusa' has one"
    if settings.lm_head != "own":
        whose = "one matrix for all heads" if settings.lm_head == "shared" else "the target's vocabulary matrix"
        raise _refuse("medusa", whose, instead)
    if "token_map" in head.tensors:
        raise _refuse("medusa", "a trimmed vocabulary", instead)
    if not settings.bias:
        raise _refuse("medusa", "blocks without a bias", instead)
    tensors = {}
    for name, tensor in head.tensors.items():
        _, i, part, *rest = name.split(".")
        block = part == "layers"
        tensors[f"{i}.{rest[0]}.linear.{rest[1]}" if block else f"{i}.{settings.num_layers}.weight"] = tensor
    config: dict[str, Any] = {
        "base_model_name_or_path": head.base_model,
        "medusa_num_heads": settings.num_heads,
        "medusa_num_layers": settings.num_layers,
    }
    return tensors, config


def _vllm_medusa(head: Head, settings: MedusaSettings) -> Written:
    tensors = {}
    for name, tensor in head.tensors.items():
        if name in ("token_map", "lm_head.weight"):
            tensors["lm_heads.0.weight" if name == "lm_head.weight" else name] = tensor
            continue
        _, i, part, *rest = name.split(".")
        tensors[f"blocks.{i}.layers.{'.'.join(rest)}" if part == "layers" else f"lm_heads.{i}.weight"] = tensor
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": head.base_model,
        "hidden_size": settings.hidden_size,
        "vocab_size": settings.vocab_size,
        "truncated_vocab_size": settings.draft_vocab_size if "token_map" in head.tensors else None,
        "num_heads": settings.num_heads,
        "num_hidden_layers": settings.num_layers,
        "medusa_fc_bias": settings.bias,
        "original_lm_head": settings.lm_head != "own",
    }
    return tensors, config


def _layer(head: Head, settings: EagleSettings) -> dict[str, Any]:
    """The keys of the decoder layer, which all EAGLE layouts share, those that have a default elsewhere too."""
    scaling = settings.rope_scaling
    return {
        "hidden_size": settings.hidden_size,
        "vocab_size": settings.vocab_size,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "hidden_act": settings.hidden_act,
        "rms_norm_eps": settings.rms_norm_eps,
        "rope_theta": settings.rope_theta,
        # Readers look for one of both names.
        "rope_scaling": None if scaling is None else {**scaling, "type": scaling["rope_type"]},
        "max_position_embeddings": settings.max_position_embeddings,
        "attention_bias": settings.qkv_bias and settings.o_bias,
        "tie_word_embeddings": settings.lm_head == "embedding",
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }


def _eagle(head: Head, settings: EagleSettings) -> Written:
    third = isinstance(settings, Eagle3Settings)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama",
        "base_model_name_or_path": head.base_model,
        **_layer(head, settings),
        "bias": settings.fc_bias,
        "qkv_bias": settings.qkv_bias,
    }
    if settings.para_norm:
        config["add_para_norm"] = True
    if not isinstance(settings, Eagle3Settings):
        return dict(head.tensors), config
    if settings.num_layers > 1 or settings.qk_norm:
        what = f"{settings.num_layers} layers" if settings.num_layers > 1 else "norms of queries and keys"
        raise _refuse("eagle", what, "layout='speculators' has one")
    ids = settings.layer_ids
    inner: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    inner[LIST] = [k - 1 for k in ids] if ids and min(ids) > 0 else None  # here it means what leaves a layer
    config |= _third(settings) | {"eagle_config": inner}
    return {re_named(name): tensor for name, tensor in head.tensors.items()}, config


def re_named(name: str) -> str:
    """What a tensor of an EAGLE-3 head is called by its authors."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _third(settings: Eagle3Settings) -> dict[str, Any]:
    """The keys of EAGLE-3, every flag told: their defaults differ from reader to reader."""
    return {
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.target_hidden_size,
        LIST: None if settings.layer_ids is None else list(settings.layer_ids),
        "norm_before_residual": settings.norm_before_residual,
        "norm_output": settings.norm_output,
        "norm_before_fc": settings.norm_before_fc,
        "fc_norm": settings.fc_norm,
    }


def _speculators(head: Head, settings: Eagle3Settings) -> Written:
    instead = "layout='eagle' has one"
    if settings.lm_head != "own":
        raise _refuse("speculators", "no lm_head of its own", instead)
    if settings.fc_bias or settings.para_norm:
        raise _refuse("speculators", "a bias or a norm at fc that EAGLE-3 has not", instead)
    if settings.qkv_bias != settings.o_bias:
        raise _refuse("speculators", "biases in a part of its attention", instead)
    if settings.embed_tokens == "target" and (head.source is None or head.source.layout != "speculators"):
        # One that was read from there stays as it was.
        own = "formats.with_own(head, embed_tokens=...) brings it: that package would leave it unfilled"
        raise _refuse("speculators", "no embedding of its own", own)
    tensors = dict(head.tensors)
    if "d2t" in tensors and "t2d" not in tensors:  # here they are given together
        tensors["t2d"] = torch.zeros(settings.vocab_size, dtype=torch.bool)
        tensors["t2d"][target_ids(tensors["d2t"])] = True
    kind = "qwen3" if settings.qk_norm else "llama"
    method = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": head.base_model},
        },
        "transformer_layer_config": {"model_type": kind, "mlp_bias": False, **_layer(head, settings)},
        "tie_word_embeddings": False,
        **_third(settings),
    }
    if head.source is None or head.source.layout != "speculators":
        config["speculators_version"] = "0.3.0"
        config["speculators_config"] |= {"proposal_methods": [method]}
        config["speculators_config"]["verifier"] |= {"architectures": []}
    return tensors, config
