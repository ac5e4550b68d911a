"""The model whose text is kept: one forward over stacked trees, with the mask and positions that trees need.

`Target` is the protocol the rest of the package speaks to. `HFTarget` serves it with a `transformers` causal model:
its own modelling code runs unchanged, with our K/V cache, our masks and our attention function put in.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from paceline.cache import KVCache
from paceline.errors import UnsupportedModel
from paceline.kernels import Kernel, native, prepare
from paceline.kernels.quantised import MOST_TOKENS, Quantised, why_not
from paceline.layers import decoder_layers, only

ATTENTION = "paceline"
"""Name of our attention function in the registry of `transformers`."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
TESTED = {"llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "phi"}
"""Model types whose tree logits the tests compare with path-by-path logits; others are tried when they are loaded."""


class Seen(NamedTuple):
    """What a forward saw: raw logits at every slot, and the tapped hidden states side by side."""

    logits: Float[Tensor, "B N V"]
    hidden: Float[Tensor, "B N TH"] | None


@runtime_checkable
class Target(Protocol):
    """What decoding needs from a model; a paged or graph-captured engine can stand behind the same methods."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    kernel: Kernel

    def new_cache(self, rows: int, size: int) -> KVCache:
        """An empty cache for `rows` sequences with room for `size` positions; it grows by itself."""

    def forward(
        self,
        tokens: Int64[Tensor, "B N"],
        offsets: Int64[Tensor, "B N"],
        mask: Bool[Tensor, "B N S_N"] | None,
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        logits: bool = True,
    ) -> Seen:
        """Read N slots per row behind the staged ones and stage their K/V.

        Args:
            tokens: ids; padding slots hold any id and see only themselves.
            offsets: position of each slot minus the row's committed length.
            mask: what each slot sees of the S staged slots and of this pass; all see the committed ones (as far
                as a sliding window reaches). None means causal, the cheap way to read a prompt.
            cache: staged in place.
            taps: `hidden_states` indices of `transformers` to return, side by side.
            logits: False skips the vocabulary product; logits then have N = 0.
        """

    def embed(self, tokens: Int64[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """The model's token embeddings."""

    def unembed(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... V"]:
        """The model's vocabulary product, without its final norm."""


class HFTarget:
    """A `transformers` causal language model as a target. The model is changed in place and belongs to the target.

    Raises:
        UnsupportedModel: recurrent or hybrid state, an encoder, or attention that cannot take a tree mask.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        refuse(model)
        self.model = model.eval()
        config = model.config.get_text_config()
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.hidden_size = int(config.hidden_size)
        self.max_positions = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        trial = None if config.model_type in TESTED else Trial(self.model)
        self.kernel = prepare(model)
        AttentionInterface.register(ATTENTION, attention)
        model.set_attn_implementation(ATTENTION)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self._types = layer_types(config)
        self._window: int = getattr(config, "sliding_window", None) or 0
        self._groups = int(config.num_attention_heads) // int(
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )

        self.few: Quantised | None = None
        """What reads passes over few tokens instead, see `quantise`."""
        if trial is not None:
            trial.judge(self)

    def quantise(self, bits: int, vocab_size: int | None = None) -> None:
        """From now on read passes over few tokens with weights in few bits: for a draft model, never for a target.

        Args:
            bits: 4 or 8.
            vocab_size: score only the first so many ids.
        """
        why = why_not(self.model)
        if why:
            raise UnsupportedModel(f"no weights in {bits} bits here: {why}; leave draft_dtype out")
        if self.few is None or self.few.bits != bits:
            self.few = Quantised(self.model, bits)
        self.few.score(vocab_size)

    @property
    def num_scored(self) -> int:
        """How many ids get logits, the first ones: all but where `quantise` was told otherwise."""
        return self.vocab_size if self.few is None else self.few.vocab_size

    @cached_property
    def _layers(self) -> nn.ModuleList:
        return decoder_layers(self.model)

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    def share(self, num_layers: int) -> float:
        """The part of a pass's weights that its first layers and its head make up."""
        head = self.model.get_output_embeddings().weight.nbytes
        own = [p.nbytes for layer in list(self._layers)[:num_layers] for p in layer.parameters()]
        return float(sum(own) + head) / self.weight_bytes

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return cast(torch.device, self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its activations."""
        return cast(torch.dtype, self.model.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads: all but the embedding rows, of which it looks up a few."""
        table = self.model.get_input_embeddings().weight
        tied = self.model.get_output_embeddings().weight is table
        total = sum(p.nbytes for p in {id(p): p for p in self.model.parameters()}.values())
        return int(total if tied else total - table.nbytes)

    def new_cache(self, rows: int, size: int) -> KVCache:
        """See `Target`."""
        return KVCache(rows, self.max_positions, min(size, self.max_positions), self.kernel.key_block)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int64[Tensor, "B N"],
        offsets: Int64[Tensor, "B N"],
        mask: Bool[Tensor, "B N S_N"] | None,
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        logits: bool = True,
        layers: tuple[int, int] | None = None,
        states: Float[Tensor, "B N H"] | None = None,
    ) -> Seen:
        """See `Target`.

        Args:
            layers: run only these, from the first one up to the second one, and stage K/V in these alone. `Seen.hidden`
                then has the states behind them (before the final norm), but where they end with the last layer.
            states: [B, N, H], what the layer before the first of them gave; needed unless that is layer 0.
        """
        device = self.device
        lengths = torch.tensor(cache.lengths)[:, None]
        if self.few is not None and logits and not taps and layers is None and tokens.numel() <= MOST_TOKENS:
            few = self.few.forward(tokens, offsets, lambda: visible_slots(lengths, offsets, mask, cache), cache)
            return Seen(few, None)
        cache.start(offsets)
        run = nullcontext() if layers is None else only(self._layers, *layers, states)
        with run as part:
            out: Any = self.model(
                input_ids=tokens.to(device),
                position_ids=(lengths + offsets).to(device),
                attention_mask=self._masks(lengths, offsets, mask, cache),
                cache=cache,
                use_cache=True,
                output_hidden_states=bool(taps),
                logits_to_keep=0 if logits else torch.empty(0, dtype=torch.int64, device=device),
            )
        cache.finish()
        if part is not None and layers is not None and layers[1] < self.num_layers:
            return Seen(out.logits, part.states)
        hidden = torch.cat([out.hidden_states[tap] for tap in taps], dim=-1) if taps else None
        return Seen(out.logits, hidden)

    def embed(self, tokens: Int64[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """See `Target`."""
        return cast(Tensor, self.model.get_input_embeddings()(tokens.to(self.device)))

    def unembed(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... V"]:
        """See `Target`."""
        return self.finish(cast(Tensor, self.model.get_output_embeddings()(hidden)))

    def finish(self, logits: Tensor) -> Tensor:
        """What some families do to the product of the vocabulary matrix before it is called logits."""
        config = self.model.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _masks(
        self, lengths: Int64[Tensor, "B 1"], offsets: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor | dict[str, Tensor]:
        """Additive masks, folded as `attention` wants them; a dict where layers of several types alternate."""
        allowed = visible_slots(lengths, offsets, mask, cache)
        made: dict[str, Tensor] = {}
        for kind in set(self._types):
            seen, open_keys = allowed, min(cache.lengths)
            if kind == "sliding_attention":
                seen, open_keys = allowed & within_window(self._window, lengths, offsets, cache), 0
            if not self.kernel.tile_attention:
                made[kind] = self._additive(seen)
                continue
            strays = None
            if mask is not None and offsets.shape[1] > 1:
                # Nodes off a tree's first path: their keys are summed in plain decoding's order, for its very bits.
                seen = seen.clone()
                strays = native.take_strays(seen, cache.lengths, cache.offsets)
            bits: Any = native.row_bits(seen, self._groups, open_keys // native.KEYS * native.KEYS)
            bits.strays = strays  # travels with the mask, the one thing that reaches attention untouched
            made[kind] = bits
        return made if len(made) > 1 else made[self._types[0]]

    def _additive(self, seen: Bool[Tensor, "B N S"]) -> Tensor:
        if folds(seen.shape[1]):
            seen = seen.repeat(1, self._groups, 1)
            rows = -(-seen.shape[1] // self.kernel.query_block) * self.kernel.query_block
            # Padding rows see everything: a row that sees nothing would divide zero by zero.
            seen = torch.nn.functional.pad(seen, (0, 0, 0, rows - seen.shape[1]), value=True)
        zero = torch.zeros((), dtype=self.dtype)
        return torch.where(seen, zero, zero - torch.inf)[:, None].to(self.device)


def folds(width: int) -> bool:
    """Whether a pass of this width folds each K/V head's queries into its rows (else heads stay apart)."""
    return width <= 64


def visible_slots(
    lengths: Int64[Tensor, "B 1"], offsets: Int64[Tensor, "B N"], mask: Tensor | None, cache: KVCache
) -> Bool[Tensor, "B N S"]:
    """Which slots each query sees, windows aside: the committed ones of its row, and what the tree mask adds."""
    batch, width = offsets.shape
    slots = torch.arange(cache.visible)
    seen = (slots < lengths)[:, None].repeat(1, width, 1)
    span = cache.staged + width
    if mask is None:
        causal = torch.arange(cache.staged, span)[:, None] >= torch.arange(span)
        mask = causal.expand(batch, -1, -1)
    for row, length in enumerate(cache.lengths):
        seen[row, :, length : length + span] = mask[row]
    return seen


def within_window(
    window: int, lengths: Int64[Tensor, "B 1"], offsets: Int64[Tensor, "B N"], cache: KVCache
) -> Bool[Tensor, "B N S"]:
    """Which slots lie inside each query's sliding window, by position: a committed slot's position is its index."""
    positions = torch.arange(cache.visible).repeat(len(cache.lengths), 1)
    for row, length in enumerate(cache.lengths):
        positions[row, length : length + cache.offsets.shape[1]] = length + cache.offsets[row]
    return (lengths + offsets)[:, :, None] - positions[:, None] < window


def attention(
    module: nn.Module,
    query: Float[Tensor, "B heads N head_dim"],
    key: Float[Tensor, "B kv_heads S head_dim"],
    value: Float[Tensor, "B kv_heads S value_dim"],
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B N heads value_dim"], None]:
    """Attention over the cache's slots, as `transformers` calls it, with the queries of a K/V head in one block.

    Folding the group into the rows reads each key once instead of once per query head, and gives the kernel row
    counts (multiples of 32) and key counts (multiples of 512) at which its blocking does not depend on the width.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} uses {name} in attention, which no tree-mask kernel offers"
            )
    batch, heads, width, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if attention_mask.dtype == torch.int16:
        # The compiled kernel trusts its pointers, so what it was prepared for is checked, layer by layer.
        row_tiles = -(-group * width // native.ROWS)
        same = {t.dtype for t in (query, key, value)} == {torch.bfloat16} and key.shape == value.shape
        if not same or not native.fits_heads(size) or attention_mask.shape[2] != row_tiles:
            raise UnsupportedModel(
                f"{type(module).__name__} has heads unlike what its config says (queries {list(query.shape)} "
                f"{query.dtype}, values {list(value.shape)} {value.dtype}); load the model with dtype='float32'"
            )
        scale, bits = size**-0.5 if scaling is None else scaling, cast(Any, attention_mask)
        return native.tiles().attention(query, key, value, bits, scale, bits.strays), None
    if folds(width):
        rows = query.reshape(batch, kv_heads, group * width, size)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, attention_mask.shape[2] - group * width))
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
        out = out[:, :, : group * width].reshape(batch, heads, width, -1)
    else:
        # Group members as heads of one sequence per K/V head: keys are shared by a stride of zero, not copied.
        k, v = (t.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for t in (key, value))
        seen = attention_mask.repeat_interleave(kv_heads, 0) if batch > 1 else attention_mask
        rows = query.reshape(batch * kv_heads, group, width, size)
        out = torch.nn.functional.scaled_dot_product_attention(rows, k, v, seen, scale=scaling)
        out = out.reshape(batch, heads, width, -1)
    return out.transpose(1, 2).contiguous(), None  # some models view it


class Trial:
    """A small tree read by a model of an untested type, against its own forward path by path, before it is trusted.

    What it catches: positions taken from the mask instead of `position_ids`, biases by distance (ALiBi), attention
    code that ignores the mask it is given. Siblings and a node behind another branch are enough to show each.
    """

    PREFIX, ROOT, CHILDREN = (1, 2, 3, 4, 5), 6, (7, 8)

    def __init__(self, model: PreTrainedModel) -> None:
        call: Any = model
        with torch.inference_mode():
            paths = torch.tensor([[*self.PREFIX, self.ROOT, child] for child in self.CHILDREN], device=model.device)
            self._expected = call(paths, use_cache=False).logits[:, -1].double()

    def judge(self, target: HFTarget) -> None:
        """Raises UnsupportedModel when the tree's logits are not those of the paths."""
        cache, size = target.new_cache(1, 16), len(self.PREFIX)
        target.forward(torch.tensor([self.PREFIX]), torch.arange(size)[None], None, cache, logits=False)
        cache.commit([range(size)])
        tokens = torch.tensor([[self.ROOT, *self.CHILDREN]])
        mask = torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]])
        seen = target.forward(tokens, torch.tensor([[0, 1, 1]]), mask, cache).logits[0, 1:].double()
        error, size_of = (seen - self._expected).abs().max(), self._expected.abs().max()
        # Rounding of bfloat16 stays within 3% of the largest logit; a wrong mask or position does not.
        if not error <= 0.05 * size_of:
            raise UnsupportedModel(
                f"{type(target.model).__name__}: logits of a small tree differ from those of its paths by {error:.3g} "
                f"(largest logit {size_of:.3g}), so guesses could not be verified; its attention or its positions do "
                "not follow the mask and position_ids it is given"
            )


def layer_types(config: Any) -> list[str]:
    """What each layer attends to, as the config says or, without a list, as its sliding window implies."""
    listed = getattr(config, "layer_types", None)
    if listed:
        return list(listed)
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return [kind] * int(config.num_hidden_layers)


def refuse(model: PreTrainedModel) -> None:
    """Refuse, by name and before any work, what cannot verify a tree without changing the text."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; Paceline needs a decoder-only causal language model")
    kinds = set(layer_types(config)) - LAYER_TYPES
    if getattr(model, "_is_stateful", False) or kinds:
        what = ", ".join(sorted(kinds)) or "recurrent"
        raise UnsupportedModel(
            f"{name} has {what} layers, whose state cannot be rolled back to an accepted prefix; "
            "use a model whose layers all attend to a key/value cache"
        )
    used = str(config._attn_implementation)
    if used not in ("sdpa", "eager", ATTENTION):
        raise UnsupportedModel(f"{name} was loaded with {used}, which takes no tree mask; load it with 'sdpa'")
    if not getattr(model, "_supports_attention_backend", False) and not getattr(model, "_supports_sdpa", False):
        raise UnsupportedModel(f"{name} brings attention code of its own that takes no tree mask")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{name} counts positions by itself, and siblings of a tree share theirs")
    if any(part == "sinks" for key, _ in model.named_parameters() for part in key.split(".")):
        raise UnsupportedModel(f"{name} has attention sinks, which no kernel with a tree mask offers")
    for setting in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, setting, None):
            raise UnsupportedModel(f"{name} sets {setting}, which no kernel with a tree mask offers")
