"""A head's config.json, read key by key. What would change the forward and is not understood is refused by its name."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import CorruptWeights, UnsupportedModel

NO_EFFECT = {
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
    "auto_map", "bos_token_id", "dtype", "embed_requires_grad", "eos_token_id", "has_no_defaults_at_init",
    "initializer_range", "is_decoder", "max_window_layers", "model_type", "output_attentions", "output_hidden_states",
    "pad_token_id", "return_dict", "return_dict_in_generate", "sep_token_id", "torch_dtype", "transformers_version",
    "unk_token_id", "use_cache",
}  # fmt: skip
"""Keys that say nothing about what the head computes."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "clip_qkv": (),
    "compression_config": (),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mask_token_id": (),
    "mlp_bias": (False,),
    "mup_denominator": (),
    "no_rope_layers": (),
    "parallel_drafting": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (0, 1),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "scale_depth": (),
    "scale_emb": (1,),
    "skip_output_norm": (True,),
    "skip_prenorm": (True,),
    "sliding_window_non_causal": (False,),
    "use_mrope": (False,),
}
"""Keys that would change what is computed, with the values at which they do not; None always is one."""
_ROPE = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
"""Ways to scale rotary positions, with the numbers that each needs."""
_ROPE_MORE = {
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "factor", "truncate",
}  # fmt: skip
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


class Config:
    """The keys of an object in a config.json; those that nobody asked for are told of by `finish`.

    Args:
        values: the object.
        where: what messages call it.
        notes: what is doubtful is added here.
    """

    def __init__(self, values: Mapping[str, Any], where: str, notes: list[str]) -> None:
        self.values, self.where, self.notes = values, where, notes
        self._asked: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as it stands; None where it is null or missing."""
        self._asked.add(key)
        return self.values.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self._wrong(key, "is missing", "a whole number from 1 up")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, f"is {value!r}", "a whole number from 1 up")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, f"is {value!r}", "a positive number")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """True, False, or None where the config does not say."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, f"is {value!r}", "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, f"is {value!r}", "a text")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """An object inside; empty where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, f"is {value!r}", "an object")
        return value or {}

    def agrees(self, keys: Iterable[str], present: bool, what: str) -> bool:
        """Whether the file has something, where the config may say so under one of these keys.

        Raises:
            CorruptWeights: it says the opposite of what is there.
        """
        for key in keys:
            said = self.flag(key)
            if said is not None and said != present:
                raise CorruptWeights(
                    f"{self.where} says {key}: {str(said).lower()}, and the weights have "
                    f"{'' if present else 'no '}{what}; "
                    "fetch both again, or correct the config"
                )
        return present

    def same(self, key: str, found: int, what: str) -> None:
        """Passes where the config is silent about a count or says what the tensors say."""
        said = self.whole(key, found)
        if said != found:
            raise CorruptWeights(
                f"{self.where} says {key}: {said}, and the weights have {found} {what}; fetch both again, or correct "
                "the config"
            )

    def only(self, key: str, *values: Any) -> None:
        """Passes where a key is missing, null or one of these values.

        Raises:
            UnsupportedModel: it is another one, so the head computes something that is not here.
        """
        value = self.get(key)
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            return
        allowed = " or ".join(repr(one) for one in values) if values else "no such key"
        raise UnsupportedModel(
            f"{self.where} says {key}: {value!r}, which changes what the head computes and is not supported "
            f"({allowed} is)"
        )

    def finish(self, refused: Iterable[str] | None = None) -> None:
        """Refuses keys that would change the forward, all such keys or some; tells of those that are not known."""
        for key in _NEUTRAL if refused is None else refused:
            self.only(key, *_NEUTRAL[key])
        if unknown := sorted(set(self.values) - self._asked - NO_EFFECT):
            self.notes.append(f"keys of {self.where} that are not known and were not used: {', '.join(unknown)}")

    def _wrong(self, key: str, found: str, needed: str) -> CorruptWeights:
        return CorruptWeights(f"{key} in {self.where} {found}, and {needed} is needed; correct it, or fetch it again")


def rope(config: Config) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotary positions, from either of the two ways to write them."""
    newer, older = dict(config.table("rope_parameters")), config.table("rope_scaling")
    base = config.get("rope_theta")
    inner = newer.pop("rope_theta", None)
    if base is not None and inner is not None and base != inner:
        raise CorruptWeights(
            f"{config.where} says rope_theta: {base} and {inner} in rope_parameters; correct one of them"
        )
    if base is None and inner is None:
        config.notes.append(
            f"{config.where} has no rope_theta: 10000 is taken, as heads without it were trained, whatever the "
            f"target has"
        )
    theta = Config({"rope_theta": inner if base is None else base}, config.where, []).number("rope_theta", 10000.0)
    scalings = [_scaling(config, table) for table in (newer, older) if table]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise CorruptWeights(
            f"{config.where} says rope_parameters: {newer} and rope_scaling: {older}; they must agree, or one be "
            f"left out"
        )
    return theta, next(iter(scalings), None)


def _scaling(config: Config, table: Mapping[str, Any]) -> dict[str, Any] | None:
    """A scaling of rotary positions under one naming."""
    named = [table[key] for key in ("rope_type", "type") if table.get(key) is not None]
    if not named or any(name != named[0] for name in named):
        raise CorruptWeights(f"the rope scaling {dict(table)} in {config.where} needs one rope_type")
    rest = {k: v for k, v in table.items() if k not in ("rope_type", "type") and v is not None}
    if rest.get("partial_rotary_factor") == 1:
        del rest["partial_rotary_factor"]
    if named[0] == "default" and not rest:
        return None
    needed = _ROPE.get(named[0]) if isinstance(named[0], str) else None
    strange = sorted(set(rest) - (needed or set()) - _ROPE_MORE)
    if needed is None or strange:
        raise UnsupportedModel(
            f"the rope scaling {dict(table)} in {config.where} is not supported: the types are {', '.join(_ROPE)}"
            + (f", without {', '.join(strange)}" if needed is not None else "")
        )
    if lost := sorted(needed - set(rest)):
        raise CorruptWeights(f"the rope scaling {dict(table)} in {config.where} lacks {', '.join(lost)}")
    return {"rope_type": named[0], **rest}


def check_window(config: Config, longest: int) -> None:
    """Refuses a sliding window that would be felt."""
    use, window = config.flag("use_sliding_window"), config.get("sliding_window")
    if use is not False and window is not None and not (isinstance(window, int) and window >= longest):
        raise UnsupportedModel(
            f"{config.where} says sliding_window: {window!r}, which is not supported; a head that attends to "
            f"everything is"
        )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise UnsupportedModel(f"{config.where} says layer_types: {kinds!r}; only full_attention is supported")
