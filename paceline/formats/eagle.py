"""Reads EAGLE heads, as their authors, SpecForge and ModelOpt write them, and EAGLE-3 in a folder of speculators."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import CorruptWeights, UnsupportedModel

from .config import NO_EFFECT, Config
from .eagle_config import LIST, drop_frequencies, layer_settings, tap_settings
from .eagle_tensors import converted
from .head import Eagle3Settings, EagleSettings, Head, Kind
from .weights import Weights

_OWNERS = ("draft_model.", "eagle_module.", "speculator.")
"""Prefixes under which a head lies inside of a larger checkpoint."""
_PREFIXES = (*_OWNERS, "model.")
_OTHER_NAMES = {
    "enorm.weight": "embedding_layernorm.weight",
    "hnorm.weight": "hidden_states_layernorm.weight",
}


@dataclass
class Named:
    """A file's tensors that belong to an EAGLE head."""

    kind: Kind
    names: dict[str, str]
    """Name in the file by our name."""
    inside: int
    """Tensors beside them, those of the model that the head is part of."""


def recognise(names: Sequence[str]) -> Named | None:
    """The sort of an EAGLE head and its tensors; None if it is none.

    Raises:
        CorruptWeights: two names of the file mean the same tensor.
    """
    owned = [name for name in names if name.startswith(_OWNERS) or name in ("d2t", "t2d")]
    if not any(name.startswith(_OWNERS) for name in owned):
        owned = list(names)
    ours: dict[str, str] = {}
    for name in owned:
        own = _ours(name)
        if own in ours:
            raise CorruptWeights(
                f"the weights have both {ours[own]} and {name}, which are the same tensor; take one out"
            )
        ours[own] = name
    beside = len(names) - len(owned)
    if "layers.0.hidden_norm.weight" in ours or "d2t" in ours or any("midlayer." in name for name in owned):
        return Named("eagle3", ours, beside)
    return Named("eagle", ours, beside) if "fc.weight" in ours else None


def _ours(name: str) -> str:
    """Our name for a tensor of any of the layouts."""
    while name.startswith(_PREFIXES):
        name = name[name.index(".") + 1 :]
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return _OTHER_NAMES.get(name, name)


def read(
    named: Named, weights: Weights, values: Mapping[str, Any], where: str, notes: list[str], index_map: bool = False
) -> Head:
    """A head from its tensors and its config.

    Args:
        index_map: convert a d2t of target ids, where offsets belong.

    Raises:
        CorruptWeights: the config does not fit the tensors, or itself.
        UnsupportedModel: the config asks for something that changes the forward and is not here.
    """
    speculators = values.get("speculators_model_type") is not None
    config = Config(_flat(values, where) if speculators else values, where, notes)
    tensors = dict(zip(named.names, weights.take(named.names.values()).values()))
    if "mask_hidden" in tensors:
        raise UnsupportedModel(
            f"{weights.path} has mask_hidden, as P-EAGLE heads do; only EAGLE-1, -2 and -3 are supported"
        )
    if named.inside:
        notes.append(f"{named.inside} other tensors in {weights.path} are those of the model itself and were not read")
    common = layer_settings(named.kind, tensors, config, speculators)
    drop_frequencies(tensors, common, notes)
    settings: EagleSettings
    if named.kind == "eagle3":
        settings = _third(tensors, config, common, speculators)
        if index_map and "d2t" in tensors:
            maps = converted(tensors["d2t"], settings.vocab_size, notes)
            tensors["d2t"] = maps["d2t"]
            tensors.setdefault("t2d", maps["t2d"])
    else:
        config.only("num_hidden_layers", 1)
        config.get("tie_word_embeddings")  # the target's: its matrix is used, or the head's own if there is one
        settings = EagleSettings(**common, lm_head="own" if "lm_head.weight" in tensors else "target")
    _check_flags(config, named.kind)
    base = config.text("base_model_name_or_path") or _verifier(config)
    config.finish()
    return Head(named.kind, settings, tensors, base, None, (), values)


def _flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of a folder of speculators with those of its decoder layer, which lie in an object of their own."""
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CorruptWeights(
            f"transformer_layer_config in {where} is {layer!r}, and an object is needed; fetch it again"
        )
    for key in sorted(set(layer) & set(values) - NO_EFFECT - {"tie_word_embeddings"}):
        if layer[key] != values[key]:
            raise CorruptWeights(
                f"{where} says {key}: {values[key]!r}, and {layer[key]!r} in transformer_layer_config; correct one "
                f"of them"
            )
    return {**values, **layer}


def _verifier(config: Config) -> str | None:
    """The target's name in a folder of speculators."""
    inner = Config(config.table("speculators_config"), f"speculators_config in {config.where}", config.notes)
    return Config(inner.table("verifier"), f"verifier in {config.where}", config.notes).text("name_or_path")


def _third(tensors: Mapping[str, Tensor], config: Config, common: dict[str, Any], speculators: bool) -> Eagle3Settings:
    """What EAGLE-3 adds."""
    rows = _rows(tensors, "lm_head.weight") or _rows(tensors, "d2t") or common["vocab_size"]
    draft = config.whole("draft_vocab_size", config.whole("truncated_vocab_size", rows))
    residual = config.flag("norm_before_residual")
    if residual is None and speculators:
        config.notes.append(
            f"{config.where} has no norm_before_residual: false is taken, as speculators means by that; vLLM takes true"
        )
    before = _told(config, "norm_before_fc", "input_norm.weight" in tensors, "input_norm.weight")
    each = _told(config, "fc_norm", any(name.startswith("fc_norm.") for name in tensors), "fc_norm.*.weight")
    if before and each:
        raise CorruptWeights(
            f"{config.where} has both norm_before_fc and fc_norm, which exclude each other; correct it"
        )
    layers = len({found[1] for name in tensors if (found := re.match(r"^layers\.(\d+)\.", name))})
    config.same("num_hidden_layers", layers, "decoder layers")
    return Eagle3Settings(
        **common,
        **tap_settings(tensors, config, common["hidden_size"]),
        num_layers=layers,
        lm_head=_matrix(tensors, config, draft, common["vocab_size"]),
        draft_vocab_size=draft,
        norm_before_residual=bool(residual),
        norm_output=bool(config.flag("norm_output")),
        norm_before_fc=before,
        fc_norm=each,
    )


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    return len(tensors[name]) if name in tensors and tensors[name].ndim else 0


def _told(config: Config, key: str, present: bool, what: str) -> bool:
    """Whether the file has a norm, told where the config does not say so."""
    if config.flag(key) is None and present:
        config.notes.append(f"{config.where} does not say {key}, and the weights have {what}: it is used")
    return config.agrees((key,), present, what)


def _matrix(
    tensors: Mapping[str, Tensor], config: Config, draft: int, vocab_size: int
) -> Literal["own", "target", "embedding"]:
    """Whose vocabulary matrix is used."""
    tied = config.flag("tie_word_embeddings")
    own, embedding = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if own is not None:
        if tied and not (embedding is not None and own.shape == embedding.shape and torch.equal(own, embedding)):
            config.notes.append(
                f"{config.where} says tie_word_embeddings: true, and the weights have an lm_head.weight of their "
                f"own: that is "
                "used"
            )
        return "own"
    if draft != vocab_size:
        raise CorruptWeights(
            f"lm_head.weight is missing, and with a draft vocabulary of {draft} out of {vocab_size} no other matrix "
            "can stand for it; fetch the head again"
        )
    if tied and embedding is not None:
        config.notes.append(
            "it has no lm_head.weight: its own embed_tokens.weight is used, as tie_word_embeddings says"
        )
        return "embedding"
    config.notes.append("it has no lm_head.weight: the target's is used")
    return "target"


def _check_flags(config: Config, kind: Kind) -> None:
    """Flags of ModelOpt and others that say how the layer is built: passes where they say what is built here."""
    third = kind == "eagle3"
    inner = Config(config.table("eagle_config"), f"eagle_config in {config.where}", config.notes)
    for place in (config, inner):
        place.only("use_aux_hidden_state", third)
        place.only("use_input_layernorm_in_first_layer", third)
        place.only("use_last_layernorm", third)
        place.only("use_mtp_layernorm", False)
        place.only("next_layer_regular", True)
        place.only("parallel_draft_step", 1)
        for key in ("parallel_draft_heads_num_layers", "has_lm_head"):  # of no effect so; seen from the tensors
            place.get(key)
    inner.get(LIST)
    inner.finish()
    for key in ("speculators_model_type", "speculators_version", "transformer_layer_config"):
        config.get(key)
    if not third:
        config.only(LIST)
        config.only("model")  # a config inside the config, as in vLLM's conversion, whose heads have other norms
        config.same("truncated_vocab_size", config.whole("vocab_size"), "target ids")
