"""Which tensors an EAGLE head has, how large they are, and what the maps of a trimmed vocabulary must say."""

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.errors import BadRequest, CorruptWeights

from .head import Eagle3Settings, EagleSettings, target_ids
from .weights import Needed


def needed(settings: EagleSettings, tensors: Mapping[str, Tensor]) -> Needed:
    """The tensors of a head with such settings."""
    h = settings.hidden_size
    third = isinstance(settings, Eagle3Settings)
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    if settings.embed_tokens == "own":
        found["embed_tokens.weight"] = (settings.vocab_size, h), "vocab_size × hidden_size"
    if settings.fc_bias:
        found["fc.bias"] = (h,), "hidden_size"
    if settings.para_norm:
        found["embedding_layernorm.weight"] = (h,), "hidden_size"
        found["hidden_states_layernorm.weight"] = (h,), "hidden_size"
    for k in range(settings.num_layers):
        found |= _layer(settings, k, third)
    if isinstance(settings, Eagle3Settings):
        return found | _third(settings, tensors)
    found["fc.weight"] = (h, 2 * h), "hidden_size × 2 · hidden_size"
    if settings.lm_head == "own":
        found["lm_head.weight"] = (settings.vocab_size, h), "vocab_size × hidden_size"
    return found


def _layer(settings: EagleSettings, k: int, third: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """A decoder layer. The first one of EAGLE-3 reads embedding and state side by side; that of EAGLE-1 has no norm."""
    h, inter, d = settings.hidden_size, settings.intermediate_size, settings.head_dim
    q, kv = settings.num_attention_heads * d, settings.num_key_value_heads * d
    width, words = (2 * h, "2 · hidden_size") if third and k == 0 else (h, "hidden_size")
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    attention = f"layers.{k}.self_attn."
    for part, rows, said in (
        ("q_proj", q, "num_attention_heads · head_dim"),
        ("k_proj", kv, "num_key_value_heads · head_dim"),
        ("v_proj", kv, "num_key_value_heads · head_dim"),
    ):
        found[f"{attention}{part}.weight"] = (rows, width), f"{said} × {words}"
        if settings.qkv_bias:
            found[f"{attention}{part}.bias"] = (rows,), said
    found[f"{attention}o_proj.weight"] = (h, q), "hidden_size × num_attention_heads · head_dim"
    if settings.o_bias:
        found[f"{attention}o_proj.bias"] = (h,), "hidden_size"
    if settings.qk_norm:
        found[f"{attention}q_norm.weight"] = (d,), "head_dim"
        found[f"{attention}k_norm.weight"] = (d,), "head_dim"
    found[f"layers.{k}.mlp.gate_proj.weight"] = (inter, h), "intermediate_size × hidden_size"
    found[f"layers.{k}.mlp.up_proj.weight"] = (inter, h), "intermediate_size × hidden_size"
    found[f"layers.{k}.mlp.down_proj.weight"] = (h, inter), "hidden_size × intermediate_size"
    found[f"layers.{k}.post_attention_layernorm.weight"] = (h,), "hidden_size"
    if third:
        found[f"layers.{k}.input_layernorm.weight"] = (h,), "hidden_size"
    return found


def _third(settings: Eagle3Settings, tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    h, target, taps = settings.hidden_size, settings.target_hidden_size, settings.num_taps
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "fc.weight": ((h, taps * target), f"hidden_size × {taps} · target_hidden_size"),
        "layers.0.hidden_norm.weight": ((h,), "hidden_size"),
        "norm.weight": ((h,), "hidden_size"),
    }
    if settings.norm_before_fc:
        found["input_norm.weight"] = (taps * target,), f"{taps} · target_hidden_size"
    if settings.fc_norm:
        for i in range(taps):
            found[f"fc_norm.{i}.weight"] = (target,), "target_hidden_size"
    if settings.lm_head == "own":
        found["lm_head.weight"] = (settings.draft_vocab_size, h), "draft_vocab_size × hidden_size"
    if settings.draft_vocab_size != settings.vocab_size or "d2t" in tensors:
        found["d2t"] = (settings.draft_vocab_size,), "draft_vocab_size"
    if "t2d" in tensors:
        found["t2d"] = (settings.vocab_size,), "vocab_size"
    return found


def check(settings: EagleSettings, tensors: Mapping[str, Tensor]) -> None:
    """Passes where the maps of a trimmed vocabulary mean one thing, and what is the target's has the head's width.

    Raises:
        CorruptWeights: a map is out of range or out of order, holds ids instead of offsets, or the two disagree.
    """
    if not isinstance(settings, Eagle3Settings):
        return
    borrowed = [name for name in ("embed_tokens", "lm_head") if getattr(settings, name) == "target"]
    if borrowed and settings.hidden_size != settings.target_hidden_size:
        raise CorruptWeights(
            f"{borrowed[0]}.weight is missing, and the target's cannot be used: the head has hidden_size "
            f"{settings.hidden_size}, the target {settings.target_hidden_size}; fetch the head again"
        )
    if "d2t" in tensors:
        _check_maps(tensors["d2t"], tensors.get("t2d"), settings.vocab_size)
    elif "t2d" in tensors and not bool(tensors["t2d"].all()):
        raise CorruptWeights(
            "t2d leaves target ids out, and d2t, which says which are left, is missing; fetch the head again"
        )


def _ascending(ids: Tensor, limit: int) -> bool:
    return int(ids[0]) >= 0 and int(ids[-1]) < limit and bool((ids[1:] > ids[:-1]).all())


def _check_maps(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> None:
    ids = target_ids(d2t)
    marked = None if t2d is None else t2d.nonzero()[:, 0]
    # Offsets repeat wherever two neighbouring ids are both in the draft vocabulary; a list of ids never repeats.
    as_ids = len(d2t) > 1 and _ascending(d2t, vocab_size) and (marked is None or torch.equal(d2t.long(), marked))
    if as_ids and (marked is None or not torch.equal(ids, marked)):
        raise CorruptWeights(
            "d2t holds target ids where offsets (target id minus draft id) belong, so that guesses would be the wrong "
            "tokens; read the head with index_map=True to have it converted"
        )
    if not _ascending(ids, vocab_size):
        raise CorruptWeights(
            f"d2t is no map into a vocabulary of {vocab_size}: draft id plus offset must ascend and stay in it, and "
            f"goes from "
            f"{int(ids[0])} to {int(ids[-1])}, {int(ids.min())} at least and {int(ids.max())} at most; fetch the "
            f"head again"
        )
    if marked is not None and not torch.equal(ids, marked):
        both = len(set(ids.tolist()) & set(marked.tolist()))
        raise CorruptWeights(
            f"d2t and t2d disagree: d2t leads to {len(ids)} target ids, t2d marks {len(marked)}, and {both} are in "
            "both; fetch the head again"
        )


def converted(d2t: Tensor, vocab_size: int, notes: list[str]) -> dict[str, Tensor]:
    """Both maps as they should have been, from a d2t that holds target ids in ascending order.

    Raises:
        BadRequest: it holds something else.
    """
    if d2t.ndim != 1 or not len(d2t) or not _ascending(d2t, vocab_size):
        raise BadRequest(
            f"index_map=True was given, and d2t is no ascending list of target ids below {vocab_size}; leave it out"
        )
    notes.append("d2t held target ids; it was converted to offsets")
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[d2t.long()] = True
    return {"d2t": d2t - torch.arange(len(d2t), dtype=d2t.dtype), "t2d": t2d}
