"""Heads before the first step. What the target knows already they need not learn: they begin near its own words.

Medusa    h + SiLU(0) = h: each head says what the target says next
EAGLE-1   the fused state is the target's state as it stands, and the layer adds nothing yet
EAGLE-3   the fused state is the last of those that it reads; final norm and vocabulary matrix are the target's
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from paceline.errors import BadRequest
from paceline.formats import Head, check_head, default_layer_ids, read_head
from paceline.formats.head import Eagle3Settings, EagleSettings, MedusaSettings
from paceline.train.recipe import Recipe, seed_of

SMALL = 0.02
"""Standard deviation of weights that begin as noise."""
ROPE = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def taps_of(recipe: Recipe, target: Any) -> tuple[int, ...]:
    """The states of the target that a head reads, as `transformers` counts them."""
    last = int(target.num_layers)
    if recipe.method != "eagle3":
        return (last,)
    found = recipe.layer_ids or default_layer_ids(last)
    if len(set(found)) != len(found) or not all(0 <= k < last for k in found):
        # The last one is behind the final norm here, and before it in other engines.
        raise BadRequest(f"layer_ids={list(found)} was given; different numbers from 0 to {last - 1} are needed")
    return tuple(found)


def fresh(recipe: Recipe, target: Any, ids: Int64[Tensor, "Vd"] | None, dtype: torch.dtype) -> Head:
    """A head that has learnt nothing, or the one that the recipe begins with.

    Args:
        ids: what it is to score; None is all.
        dtype: of its weights.

    Raises:
        BadRequest: the head to begin with is of another kind, or has another shape than the recipe asks for.
    """
    made = _medusa(recipe, target, ids, dtype) if recipe.method == "medusa" else _eagle(recipe, target, ids, dtype)
    if recipe.init is None:
        check_head(made)
        return made
    given = read_head(recipe.init)
    own, other = (
        {field.name: getattr(one.settings, field.name) for field in fields(one.settings) if field.compare}
        for one in (made, given)
    )
    if given.kind != made.kind or own != other:
        different = [f"{key} {other.get(key)!r}, here {own[key]!r}" for key in own if other.get(key) != own[key]]
        raise BadRequest(
            f"init={recipe.init!r} was given, which is not the {made.kind} head that this recipe makes "
            f"({'; '.join(different[:4]) or given.kind}); take one that was trained by the same sizes"
        )
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.tensors.items()}
    return Head(made.kind, made.settings, _on(tensors, target), recipe.model)


def _on(tensors: Mapping[str, Tensor], target: Any) -> dict[str, Tensor]:
    return {name: t.to(target.device).clone() for name, t in tensors.items()}


def _rows(target: Any, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
    weight: Tensor = target.model.get_output_embeddings().weight.detach()
    return (weight if ids is None else weight[ids.to(weight.device)]).to(dtype)


def _medusa(recipe: Recipe, target: Any, ids: Tensor | None, dtype: torch.dtype) -> Head:
    width, tensors = int(target.hidden_size), dict[str, Tensor]()
    for i in range(recipe.num_heads):
        tensors[f"heads.{i}.layers.0.weight"] = torch.zeros(width, width, dtype=dtype)
        tensors[f"heads.{i}.layers.0.bias"] = torch.zeros(width, dtype=dtype)
    if ids is not None:
        tensors["token_map"] = ids
    settings = MedusaSettings(
        hidden_size=width,
        vocab_size=int(target.vocab_size),
        draft_vocab_size=int(target.vocab_size) if ids is None else len(ids),
        num_heads=recipe.num_heads,
        lm_head="target",
    )
    return Head("medusa", settings, _on(tensors, target), recipe.model)


def _eagle(recipe: Recipe, target: Any, ids: Tensor | None, dtype: torch.dtype) -> Head:
    config, width = target.model.config.get_text_config(), int(target.hidden_size)
    heads = int(config.num_attention_heads)
    kv, size = (
        int(getattr(config, "num_key_value_heads", None) or heads),
        int(getattr(config, "head_dim", None) or width // heads),
    )
    inner = recipe.intermediate_size or int(getattr(config, "intermediate_size", None) or 4 * width)
    third, taps = recipe.method == "eagle3", taps_of(recipe, target)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    scaling = {key: rope[key] for key in ROPE if key in rope} if rope.get("rope_type", "default") != "default" else None
    noise = torch.Generator().manual_seed(seed_of(recipe.seed, "weights"))

    def random(*shape: int) -> Tensor:
        return (SMALL * torch.randn(shape, generator=noise, dtype=torch.float64)).to(dtype)

    # The state as it stands, the embedding left aside: the last of the states that are read, or the only one.
    fc = torch.zeros(width, (len(taps) if third else 2) * width, dtype=dtype)
    fc[:, -width:] = torch.eye(width, dtype=dtype)
    tensors: dict[str, Tensor] = {"fc.weight": fc + random(*fc.shape) / width**0.5}
    for name, shape in {
        "self_attn.q_proj": (heads * size, 2 * width if third else width),
        "self_attn.k_proj": (kv * size, 2 * width if third else width),
        "self_attn.v_proj": (kv * size, 2 * width if third else width),
        "self_attn.o_proj": (width, heads * size),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }.items():
        tensors[f"layers.0.{name}.weight"] = random(*shape)
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(width, dtype=dtype)
    eps = float(getattr(config, "rms_norm_eps", 1e-6))
    common: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": int(target.vocab_size),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": size,
        "intermediate_size": inner,
        "rms_norm_eps": eps,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rope_scaling": scaling,
        "max_position_embeddings": int(min(target.max_positions, 1 << 24)),
        "embed_tokens": "target",
    }
    if not third:
        settings = EagleSettings(**common, lm_head="target")
        return Head("eagle", settings, _on(tensors, target), recipe.model)
    tensors["layers.0.input_layernorm.weight"] = torch.ones(width, dtype=dtype)
    tensors["layers.0.hidden_norm.weight"] = torch.ones(width, dtype=dtype)
    norm = getattr(target.model.base_model, "norm", None)
    tensors["norm.weight"] = torch.ones(width, dtype=dtype)
    if norm is not None and "Gemma" not in type(norm).__name__:  # Gemma's adds one to its weight
        tensors["norm.weight"] = norm.weight.detach().to(dtype)
    tensors["lm_head.weight"] = _rows(target, ids, dtype)
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(int(target.vocab_size), dtype=torch.bool)
        tensors["t2d"][ids] = True
    count = int(target.vocab_size) if ids is None else len(ids)
    settings3 = Eagle3Settings(
        **common, target_hidden_size=width, draft_vocab_size=count, num_taps=len(taps), layer_ids=taps
    )
    return Head("eagle3", settings3, _on(tensors, target), recipe.model)
