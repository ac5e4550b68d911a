"""What the config of an EAGLE head says of its decoder layer and of the target's states, held against the tensors."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CorruptWeights, UnsupportedModel

from .config import ACTIVATIONS, Config, check_window, rope
from .head import Kind

LIST = "eagle_aux_hidden_state_layer_ids"
_FREQUENCIES = re.compile(r"^layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
"""What a Llama config inside a folder of speculators means by leaving a size out: it holds what is not the default."""
_INNER = ("q_proj", "k_proj", "v_proj")


def _size(config: Config, key: str, speculators: bool) -> int:
    """A size that must be there, but for those that speculators leaves out."""
    if speculators and config.values.get(key) is None:
        config.notes.append(f"{config.where} has no {key}: {_LLAMA[key]} is taken, as a Llama config means by that")
        return config.whole(key, _LLAMA[key])
    return config.whole(key)


def layer_settings(kind: Kind, tensors: Mapping[str, Tensor], config: Config, speculators: bool) -> dict[str, Any]:
    """What all EAGLE heads have: the sizes and the workings of their decoder layer."""
    hidden, heads = (_size(config, key, speculators) for key in ("hidden_size", "num_attention_heads"))
    if config.values.get("head_dim") is None and hidden % heads:
        raise CorruptWeights(
            f"{config.where} says hidden_size: {hidden} and num_attention_heads: {heads} and has no head_dim; one "
            "does not divide the other, so head_dim is needed"
        )
    act = config.text("hidden_act") or "silu"
    if act not in ACTIVATIONS:
        raise UnsupportedModel(f"{config.where} says hidden_act: {act!r}; {', '.join(ACTIVATIONS)} are supported")
    theta, scaling = rope(config)
    longest = _longest(config)
    check_window(config, longest)
    if config.values.get("rms_norm_eps") is None:
        config.notes.append(f"{config.where} has no rms_norm_eps: 1e-6 is taken, as a Llama config means by that")
    inner, outer = _attention_biases(tensors, config)
    norms = [name for name in ("embedding_layernorm.weight", "hidden_states_layernorm.weight") if name in tensors]
    qk_norm = "layers.0.self_attn.q_norm.weight" in tensors or (speculators and config.get("model_type") == "qwen3")
    return {
        "hidden_size": hidden,
        "vocab_size": _size(config, "vocab_size", speculators),
        "num_attention_heads": heads,
        "num_key_value_heads": config.whole("num_key_value_heads", heads),
        "head_dim": config.whole("head_dim", max(1, hidden // heads)),
        "intermediate_size": _size(config, "intermediate_size", speculators),
        "hidden_act": act,
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": longest,
        "fc_bias": _fc_bias(kind, tensors, config),
        "qkv_bias": inner,
        "o_bias": outer,
        "qk_norm": config.agrees(("use_qk_norm",), qk_norm, "norms of queries and keys"),
        "para_norm": config.agrees(("add_para_norm",), bool(norms), "norms before fc"),
        "embed_tokens": "own" if "embed_tokens.weight" in tensors else "target",
    }


def _longest(config: Config) -> int:
    """The positions that a head was trained for."""
    if config.values.get("max_position_embeddings") is None:
        config.notes.append(
            f"{config.where} has no max_position_embeddings: 2048 is taken, as a Llama config means by that"
        )
    return config.whole("max_position_embeddings", 2048)


def _fc_bias(kind: Kind, tensors: Mapping[str, Tensor], config: Config) -> bool:
    """Whether `fc` has a bias: the file decides, the config may not say otherwise."""
    keys = ("bias", "eagle_fc_bias") if kind == "eagle" else ("bias", "fc_bias")
    if kind == "eagle" and "fc.bias" not in tensors and all(config.values.get(key) is None for key in keys):
        config.notes.append(
            f"{config.where} does not say bias, which means true to EAGLE's own code, and the weights have no "
            "fc.bias: none is used"
        )
    return config.agrees(keys, "fc.bias" in tensors, "fc.bias")


def _attention_biases(tensors: Mapping[str, Tensor], config: Config) -> tuple[bool, bool]:
    """Whether queries, keys and values have biases, and whether the output has."""
    inner = any(f"layers.0.self_attn.{part}.bias" in tensors for part in _INNER)
    outer = "layers.0.self_attn.o_proj.bias" in tensors
    if config.flag("qkv_bias") is None:
        config.agrees(("attention_bias",), inner, "biases of queries, keys and values")
        config.agrees(("attention_bias",), outer, "bias of o_proj")
    config.agrees(("qkv_bias",), inner, "biases of queries, keys and values")
    config.get("attention_bias")  # a copy of the target's where the head has a key of its own
    return inner, outer


def drop_frequencies(tensors: dict[str, Tensor], common: Mapping[str, Any], notes: list[str]) -> None:
    """Takes out rotary frequencies, which old checkpoints store, once they are found to be those of `rope_theta`."""
    for name in [name for name in tensors if _FREQUENCIES.match(name)]:
        stored, d = tensors.pop(name).double(), common["head_dim"]
        own = common["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
        if common["rope_scaling"] is None and (stored.shape != own.shape or not torch.allclose(stored, own, rtol=1e-2)):
            raise CorruptWeights(
                f"{name} holds other rotary frequencies than rope_theta: {common['rope_theta']:g} makes; correct the "
                f"config"
            )
        notes.append(f"{name} was left aside: it follows from rope_theta")


def tap_settings(tensors: Mapping[str, Tensor], config: Config, hidden: int) -> dict[str, Any]:
    """The width of the target, how many of its hidden states are read, which, by which convention, and who said so."""
    found = _layer_ids(config)
    ids = found["layer_ids"]
    taps = len(ids) if ids else config.whole("num_aux_hidden_states", 3)
    config.same("num_aux_hidden_states", taps, "hidden states in their list")
    fc = tensors.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] % taps:
        shape = "missing" if fc is None else f"{list(fc.shape)}"
        raise CorruptWeights(
            f"fc.weight is {shape}; an EAGLE-3 head needs [{hidden}, {taps} × the target's hidden_size]; fetch it again"
        )
    width = fc.shape[1] // taps
    if config.values.get("target_hidden_size") is None and width != hidden:
        config.notes.append(
            f"{config.where} has no target_hidden_size: {width} is taken, as fc.weight reads {taps} states of that "
            f"width"
        )
    config.same("target_hidden_size", width, f"columns of fc.weight for each of {taps} hidden states")
    return {"target_hidden_size": width, "num_taps": taps, **found}


def _layer_ids(config: Config) -> dict[str, Any]:
    """The hidden states that the config lists. On top: what enters each layer. In `eagle_config`: what leaves it."""
    top = _ids(config)
    inner = _ids(Config(config.table("eagle_config"), f"eagle_config in {config.where}", config.notes))
    shifted = tuple(k + 1 for k in inner) if inner else None
    if top and inner and top != shifted:
        raise CorruptWeights(
            f"{config.where} says {LIST}: {list(top)}, which means what enters these layers, and {list(inner)} in "
            f"eagle_config, which means what leaves them: hidden_states {list(top)} against {list(shifted or ())}. "
            "Take the wrong one out"
        )
    if top:
        words = f"{LIST}: {list(top)}, read as what enters these layers (EAGLE, vLLM, speculators)"
        return {"layer_ids": top, "layer_id_convention": "inputs", "layer_id_source": words}
    if inner:
        words = f"eagle_config.{LIST}: {list(inner)}, read as what leaves these layers (ModelOpt, SGLang)"
        return {"layer_ids": shifted, "layer_id_convention": "outputs", "layer_id_source": words}
    words = "no list: what enters layers 2, L//2 and L-3 of a target with L layers"
    return {"layer_ids": None, "layer_id_convention": "default", "layer_id_source": words}


def _ids(config: Config) -> tuple[int, ...] | None:
    found = config.get(LIST)
    if found is None or found == []:
        return None
    if not isinstance(found, list) or any(isinstance(k, bool) or not isinstance(k, int) or k < 0 for k in found):
        raise CorruptWeights(f"{config.where} says {LIST}: {found!r}; a list of layers, counted from 0, is needed")
    if len(set(found)) < len(found):
        raise CorruptWeights(f"{config.where} says {LIST}: {found!r}, where a layer occurs twice; correct it")
    if found != sorted(found):
        config.notes.append(
            f"{config.where} says {LIST}: {found!r}, which is not in ascending order; it is used as it stands"
        )
    return tuple(found)
