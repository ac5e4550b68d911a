"""A copy of a small model whose weights have 4 or 8 bits, for passes over few tokens.

A draft model's guesses are checked by the target, so its weights need not be exact: in 4 bits a pass reads a third of
the bytes, and one C call per pass (`draft.c`) leaves out what stands between the products in the framework. The copy
lies beside the model, which still reads prompts; both write the same key/value cache.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from paceline.cache import KVCache
from paceline.kernels import native

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are what `draft.c` computes; each loaded model is tried all the same."""
MOST_TOKENS = 16
"""Tokens of all rows together that a pass may have; more are read faster in bf16."""
BITS = (4, 8)
_GROUP, _LANES = 32, 16


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "bias")),
        *((name, ctypes.c_long) for name in ("out", "in", "bits")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm_attention", "norm_mlp", "norm_q", "norm_k", "k", "v")),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("head", _Matrix),
        *((name, ctypes.c_void_p) for name in ("norm", "cos", "sin", "mask", "slots", "x", "logits", "work")),
        *((name, ctypes.c_long) for name in ("num_layers", "hidden", "inner", "heads", "kv_heads", "dim", "batch")),
        *((name, ctypes.c_long) for name in ("tokens", "kv_batch", "kv_head", "keys", "open")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


def why_not(model: Any) -> str:
    """Why a loaded model cannot have a copy in few bits here, in a few words; empty when it can."""
    config = model.config.get_text_config()
    if native.tiles().why:
        return native.tiles().why
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is none of {', '.join(FAMILIES)}"
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        return f"weights are {str(model.dtype).removeprefix('torch.')} on {model.device.type}, not bfloat16 on the CPU"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    windows = getattr(config, "layer_types", None) or (["window"] if getattr(config, "sliding_window", None) else [])
    if set(windows) - {"full_attention"}:
        return "its attention has a sliding window"
    if getattr(config, "mlp_bias", False):
        return "its products have biases in other places"
    if not native.fits_heads(_head_dim(config)):
        return f"its heads have {_head_dim(config)} numbers"
    if config.hidden_size % _GROUP or config.intermediate_size % _GROUP:
        return "its layers are not in whole groups of 32"
    if model.get_output_embeddings().weight.shape[0] < _LANES:
        return f"its vocabulary has fewer than {_LANES} ids"
    return ""


class Quantised:
    """The copy.

    Args:
        model: a loaded model of which `why_not` says nothing.
        bits: of a weight, 4 or 8.
    """

    def __init__(self, model: Any, bits: int = 4) -> None:
        self.model, self.bits = model, bits
        config = model.config.get_text_config()
        self._kept: list[Tensor] = []
        """What the C structures point to."""
        rows = model.get_output_embeddings().weight
        self._full = rows.shape[0] // _LANES * _LANES
        self.vocab_size = self._full
        self._layers = (_Layer * len(model.model.layers))(*(self._layer(layer) for layer in model.model.layers))
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = _head_dim(config)
        self._shape = _Pass(
            layers=ctypes.addressof(self._layers),
            head=self._matrix(rows[: self._full], None),
            norm=self._floats(model.model.norm.weight),
            num_layers=len(self._layers),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=self._heads,
            kv_heads=self._kv_heads,
            dim=self._dim,
            eps=config.rms_norm_eps,
            scale=self._dim**-0.5 * 1.4426950408889634,
        )

    def score(self, vocab_size: int | None) -> None:
        """Score only the first ids (in whole blocks of 16); the others have no logits. None scores all."""
        self.vocab_size = max(_LANES, min(vocab_size or self._full, self._full) // _LANES * _LANES)
        self._shape.head.out = self.vocab_size

    @property
    def nbytes(self) -> int:
        """Bytes that a pass reads."""
        return sum(t.nbytes for t in self._kept)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int64[Tensor, "B N"],
        offsets: Int64[Tensor, "B N"],
        seen: Callable[[], Bool[Tensor, "B N S"]],
        cache: KVCache,
    ) -> Float[Tensor, "B N V"]:
        """Stages K/V and gives logits, as a target's forward.

        Args:
            seen: which of the cache's visible slots each token sees; called once the pass is open.
        """
        batch, width = tokens.shape
        count = batch * width
        assert cache.block % native.KEYS == 0, "attention reads keys in blocks"
        cache.start(offsets)
        buffers = cache.buffers(len(self._layers), self._kv_heads, self._dim, torch.bfloat16)
        for layer, (k, v) in zip(self._layers, buffers, strict=True):
            layer.k, layer.v = k.data_ptr(), v.data_ptr()
        open_keys = min(cache.lengths)
        bits = native.row_bits(seen(), self._heads // self._kv_heads, open_keys)
        x = self.model.get_input_embeddings()(tokens).float().contiguous()
        positions = torch.tensor(cache.lengths)[:, None] + offsets
        cos, sin = self.model.model.rotary_emb(x, positions)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        slots = torch.tensor([length + cache.staged for length in cache.lengths])
        logits = torch.empty(batch, width, self.vocab_size)
        work = torch.empty(count * ((2 * self._heads + 2 * self._kv_heads) * self._dim + self._shape.inner) + 64)
        task = _Pass.from_buffer_copy(self._shape)
        task.cos, task.sin, task.mask, task.slots = (t.data_ptr() for t in (cos, sin, bits, slots))
        task.x, task.logits, task.work = x.data_ptr(), logits.data_ptr(), work.data_ptr()
        task.batch, task.tokens = batch, width
        first = buffers[0][0]
        task.kv_batch, task.kv_head = first.stride(0), first.stride(1)
        task.keys, task.open = cache.visible, open_keys
        native.tiles().draft(task)
        cache.finish()
        return logits

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [p.bias if p.bias is not None else torch.zeros(p.out_features, dtype=p.weight.dtype) for p in parts]
        bias = torch.cat(biases) if any(p.bias is not None for p in parts) else None
        # 16 rows of gate and 16 of up in turn, so that whoever has the one has the other.
        gate_up = torch.stack(
            [mlp.gate_proj.weight.unflatten(0, (-1, _LANES)), mlp.up_proj.weight.unflatten(0, (-1, _LANES))], 1
        )
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return _Layer(
            qkv=self._matrix(torch.cat([p.weight for p in parts]), bias),
            o=self._matrix(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=self._matrix(gate_up.flatten(0, 2), None),
            down=self._matrix(mlp.down_proj.weight, None),
            norm_attention=self._floats(layer.input_layernorm.weight),
            norm_mlp=self._floats(layer.post_attention_layernorm.weight),
            norm_q=None if q_norm is None else self._floats(q_norm.weight),
            norm_k=None if k_norm is None else self._floats(k_norm.weight),
        )

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> _Matrix:
        out, inner = weight.shape
        weight = weight.contiguous()
        packed = torch.empty(out * inner * self.bits // 8 + out * inner // _GROUP * 4 + 4096, dtype=torch.uint8)
        where = -(-packed.data_ptr() // 64) * 64  # lines of the cache; the rest is read ahead and never used
        bad = native.tiles().pack_few(weight, where, self.bits)
        if bad:
            raise ValueError(f"{bad} weights are not finite, or too large for half precision")
        self._kept.append(packed)
        return _Matrix(where, None if bias is None else self._floats(bias), out, inner, self.bits)

    def _floats(self, values: Tensor) -> int:
        kept = values.detach().float().contiguous().clone()
        self._kept.append(kept)
        return int(kept.data_ptr())


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
