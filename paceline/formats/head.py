"""What a draft head is, whatever layout it was published in: settings, tensors under one naming, where it came from.

    Medusa    heads.{i}.layers.{j}.weight [H, H], .bias [H]     h ← h + SiLU(W h + b)
              heads.{i}.lm_head.weight [Vd, H]                  a vocabulary matrix per head, or
              lm_head.weight [Vd, H]                            one for all of them, or none: the target's
              token_map [Vd]                                    target id of each draft id, when Vd < V

    EAGLE     embed_tokens.weight [V, H], lm_head.weight [Vd, H]
              fc.weight [H, in], fc.bias [H]
              layers.{k}.self_attn.{q,k,v,o}_proj.weight and .bias, layers.{k}.self_attn.{q,k}_norm.weight
              layers.{k}.mlp.{gate,up,down}_proj.weight, layers.{k}.post_attention_layernorm.weight
      -1 and -2  embedding_layernorm.weight, hidden_states_layernorm.weight [H]
      -3      layers.0.hidden_norm.weight, layers.{k}.input_layernorm.weight, norm.weight [H]
              input_norm.weight [taps · Ht] or fc_norm.{i}.weight [Ht]
              d2t [Vd]: target id − draft id;  t2d [V]: whether a target id is in the draft vocabulary

H is the head's width, Ht the target's, V the target's vocabulary, Vd the draft's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from paceline.errors import BadRequest, IncompatibleDrafter

Kind = Literal["medusa", "eagle", "eagle3"]
Layout = Literal["eagle", "speculators", "medusa", "vllm-medusa"]


@dataclass(frozen=True, kw_only=True)
class MedusaSettings:
    """Everything but the weights that Medusa's forward needs; head i predicts the token i + 2 places ahead."""

    hidden_size: int
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    """Rows of a vocabulary matrix."""
    num_heads: int
    num_layers: int = 1
    """Residual blocks of each head."""
    bias: bool = True
    tied_layers: bool = field(default=False, compare=False)
    """All blocks of a head are equal, as upstream's code makes them when there is more than one."""
    lm_head: Literal["own", "shared", "target"] = "own"
    """A vocabulary matrix per head, one for all heads, or the target's."""


@dataclass(frozen=True, kw_only=True)
class EagleSettings:
    """Everything but the weights that EAGLE-1's forward needs; EAGLE-2 is the same head under another tree."""

    hidden_size: int
    vocab_size: int
    """Of the target."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int = 1
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    """As in a model's config, under the key ``rope_type``; None where nothing is scaled."""
    max_position_embeddings: int = 2048
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    para_norm: bool = False
    """Embedding and feature are normalised before `fc` (HASS)."""
    embed_tokens: Literal["own", "target"] = "own"
    lm_head: Literal["own", "target", "embedding"] = "own"
    """Its own matrix, the target's, or the head's own embedding once more."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(EagleSettings):
    """Everything but the weights that EAGLE-3's forward needs."""

    target_hidden_size: int
    draft_vocab_size: int
    num_taps: int = 3
    """How many of the target's hidden states `fc` reads, side by side."""
    layer_ids: tuple[int, ...] | None = None
    """Which ones, as `transformers` counts `hidden_states` (k is what enters layer k), lowest first; None where the
    head does not say: see `default_layer_ids`."""
    layer_id_source: str = field(default="", compare=False)
    """The words of the config that `layer_ids` come from, and by which convention they were read."""
    layer_id_convention: Literal["inputs", "outputs", "default", "given"] = field(default="default", compare=False)
    """Whether the list meant what enters each layer, as in EAGLE, vLLM and speculators, or what leaves it, as in
    ModelOpt and SGLang."""
    norm_before_residual: bool = False
    """The residual of the first layer is the normalised state."""
    norm_output: bool = False
    """What is fed back is the state after the final norm."""
    norm_before_fc: bool = False
    """One norm over all of what `fc` reads."""
    fc_norm: bool = False
    """A norm for each hidden state that `fc` reads."""


@dataclass(frozen=True)
class Source:
    """Where a head was read from."""

    layout: Layout
    path: Path
    """Its weights: a file, or an index of several."""


@dataclass(frozen=True, eq=False)
class Head:
    """A draft head: what `read_head` found or a trainer made. `write_head` writes it in any layout that can hold it."""

    kind: Kind
    settings: MedusaSettings | EagleSettings
    tensors: Mapping[str, Tensor]
    """Under the names of this module, dtypes as they were stored."""
    base_model: str | None = None
    """The target that it was trained for, if that is known."""
    source: Source | None = None
    notes: tuple[str, ...] = ()
    """What was missing, doubtful or left aside, in words for the user."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The config as it was read."""

    @property
    def dtype(self) -> torch.dtype:
        """Of most of the weights."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            if tensor.is_floating_point():
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def num_parameters(self) -> int:
        """Weights, maps not counted; blocks that are repeated count once."""
        repeated = isinstance(self.settings, MedusaSettings) and self.settings.tied_layers
        return sum(
            tensor.numel()
            for name, tensor in self.tensors.items()
            if tensor.is_floating_point() and not (repeated and ".layers." in name and ".layers.0." not in name)
        )

    @property
    def target_ids(self) -> Int64[Tensor, "Vd"] | None:
        """The target's id of each draft id; None where they are the same."""
        if "token_map" in self.tensors:
            return self.tensors["token_map"].long()
        if "d2t" in self.tensors:
            return target_ids(self.tensors["d2t"])
        return None


def target_ids(d2t: Tensor) -> Int64[Tensor, "Vd"]:
    """The target's ids of a map that holds offsets."""
    return d2t.long() + torch.arange(len(d2t), device=d2t.device)


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that an EAGLE-3 head without a list reads: those that enter layers 2, L//2 and L-3.

    Raises:
        IncompatibleDrafter: in a target with so few layers two of them are the same, or in another order.
    """
    found = (2, num_layers // 2, num_layers - 3)
    if not found[0] < found[1] < found[2]:
        raise IncompatibleDrafter(
            f"the head has no list of layers, and the usual ones would be {list(found)} in a target of {num_layers} "
            "layers, where they must be three in ascending order; name them with layer_ids=(a, b, c)"
        )
    return found


def with_layer_ids(head: Head, layer_ids: Sequence[int]) -> Head:
    """The same EAGLE-3 head reading other hidden states, as `transformers` counts them.

    Raises:
        BadRequest: it is no EAGLE-3 head, or reads another number of them.
    """
    settings, ids = head.settings, tuple(layer_ids)
    if not isinstance(settings, Eagle3Settings):
        raise BadRequest(f"layer_ids={list(ids)} was given, and only EAGLE-3 heads read several layers; leave it out")
    whole = all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in ids)
    if len(ids) != settings.num_taps or len(set(ids)) != len(ids) or not whole:
        raise BadRequest(
            f"layer_ids={list(layer_ids)} was given; the head reads {settings.num_taps} different hidden states, "
            "counted from 0"
        )
    given = f"layer_ids={list(ids)}, given by the caller"
    return replace(head, settings=replace(settings, layer_ids=ids, layer_id_source=given, layer_id_convention="given"))
