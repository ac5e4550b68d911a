"""EAGLE: one decoder layer drafts from the target's own states (Li et al., 2401.15077, 2406.16858, 2503.01840).

What it reads is not a text but pairs: (state of the target behind token i, token i + 1). From the pair at i it says
what token i + 2 will be, and gives a state of its own, which takes the place of the target's when it drafts on:

    text       x0   x1   x2   x3  pending           guesses
    states     s0   s1   s2   s3                    d    d'
    pairs      s0x1 s1x2 s2x3 s3·pending            d·guess …
               \\_ true states, committed _/          \\_ its own states, staged, dropped after the pass _/

EAGLE-1 and -2 read the last state and score with the target's vocabulary matrix; EAGLE-3 reads three states of
different depths through `fc` and has a vocabulary of its own. After a pass the kept tokens have true states, so their
pairs are read again: what was drafted leaves no trace.

How a tree grows is `sketch.py`'s business, as for draft models; rows that run together are read together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from paceline.cache import KVCache
from paceline.draft.base import Ask, Forecast, Step
from paceline.draft.costs import Costs
from paceline.draft.losses import USUAL, Batch, Mix, judge, places_among, within
from paceline.draft.medusa import check_layered
from paceline.draft.model import CHUNK, FEW, DraftModel, Reading, _row, is_greedy, usable
from paceline.draft.modules import Borrower, Linear, Norm, scored
from paceline.draft.sketch import Growth, Place, Sketch
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.formats import Head, default_layer_ids
from paceline.formats.head import Eagle3Settings, EagleSettings
from paceline.kernels import Kernel
from paceline.target import Seen, visible_slots

READING = 0.01
"""The cost of a token of a prompt, in passes over one token."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, its keys and values in a `KVCache`."""

    def __init__(self, settings: EagleSettings, tensors: dict[str, Tensor], number: int) -> None:
        super().__init__()
        self.settings, self.number = settings, number
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self.q_norm = Norm(tensors["q_norm.weight"], settings.rms_norm_eps) if settings.qk_norm else nn.Identity()
        self.k_norm = Norm(tensors["k_norm.weight"], settings.rms_norm_eps) if settings.qk_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "B N in"],
        turn: tuple[Tensor, Tensor],
        seen: Bool[Tensor, "B N S"],
        cache: "KVCache | Unrolled",
    ) -> Float[Tensor, "B N H"]:
        rows, size, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, size, -1, self.settings.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, size, -1, self.settings.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, size, -1, self.settings.head_dim).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *turn)
        keys, values = cache.update(k, v, self.number)
        out = functional.scaled_dot_product_attention(
            q, keys[:, :, : seen.shape[2]], values[:, :, : seen.shape[2]], attn_mask=seen[:, None], enable_gqa=True
        )
        found: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, size, -1))
        return found


class Layer(nn.Module):
    """A decoder layer. The first one's attention reads what its kind of head puts before it."""

    def __init__(self, settings: EagleSettings, tensors: dict[str, Tensor], number: int) -> None:
        super().__init__()
        own = {name.removeprefix("self_attn."): t for name, t in tensors.items() if name.startswith("self_attn.")}
        self.attention = Attention(settings, own, number)
        self.gate_proj, self.up_proj, self.down_proj = (
            Linear(tensors[f"mlp.{name}.weight"], tensors.get(f"mlp.{name}.bias"))
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        self.act = ACT2FN[settings.hidden_act]
        eps = settings.rms_norm_eps
        self.before_mlp = Norm(tensors["post_attention_layernorm.weight"], eps)
        before = tensors.get("input_layernorm.weight")
        self.before_attention = None if before is None else Norm(before, eps)

    def forward(self, given: Tensor, residual: Tensor, *rest: Any) -> Tensor:
        """Args: given: what attention reads; residual: what its outcome is added to."""
        y: Tensor = residual + self.attention(given, *rest)
        z = self.before_mlp(y)
        found: Tensor = y + self.down_proj(self.act(self.gate_proj(z)) * self.up_proj(z))
        return found


class Network(Borrower):
    """An EAGLE head as a model that reads pairs.

    Args:
        head: as `read_head` found it.
        target: whose embedding and vocabulary matrix it uses where it has none.
        dtype: of the weights; None is the target's. Where dtypes and devices agree, the head's tensors are the
            parameters, not copies.
    """

    def __init__(self, head: Head, target: Any, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        settings = head.settings
        if not isinstance(settings, EagleSettings):
            raise BadRequest(f"a head of kind {head.kind!r} was given; an EAGLE head is needed")
        self.settings, self.is_3, self._target = settings, isinstance(settings, Eagle3Settings), [target]
        self.vocab_size, self.max_positions = int(target.vocab_size), int(target.max_positions)
        dtype, device = dtype or target.dtype, target.device
        self.ids: Int64[Tensor, Vd] | None
        ids = head.target_ids
        self.register_buffer("ids", None if ids is None else ids.to(device), persistent=False)
        given = {
            name: t.to(device=device, dtype=dtype) if t.is_floating_point() else t for name, t in head.tensors.items()
        }
        eps = settings.rms_norm_eps

        def norm(name: str) -> Norm | None:
            return Norm(given[name], eps) if name in given else None

        self.embedding = (
            nn.Embedding.from_pretrained(given["embed_tokens.weight"]) if "embed_tokens.weight" in given else None
        )
        self.fc = Linear(given["fc.weight"], given.get("fc.bias"))
        self.layers = nn.ModuleList()
        for number in range(settings.num_layers):
            prefix = f"layers.{number}."
            own = {name.removeprefix(prefix): t for name, t in given.items() if name.startswith(prefix)}
            self.layers.append(Layer(settings, own, number))
        self.embedding_norm, self.hidden_norm = (
            norm("embedding_layernorm.weight"),
            norm("hidden_states_layernorm.weight"),
        )
        if self.is_3:
            self.hidden_norm = norm("layers.0.hidden_norm.weight")
        self.before_fc = norm("input_norm.weight")
        self.fc_norms = nn.ModuleList()
        while (each := norm(f"fc_norm.{len(self.fc_norms)}.weight")) is not None:
            self.fc_norms.append(each)
        self.norm = norm("norm.weight")
        self.lm_head = None
        if settings.lm_head == "own" and "lm_head.weight" in given:
            self.lm_head = Linear(given["lm_head.weight"])
        elif settings.lm_head == "embedding":
            self.lm_head = Linear(given["embed_tokens.weight"])
        self.rotary = LlamaRotaryEmbedding(_rotary_config(settings)).to(device)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    @property
    def num_ids(self) -> int:
        """How many ids it scores."""
        return self.vocab_size if self.ids is None else len(self.ids)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads: layers and vocabulary matrix, borrowed ones too, but not embeddings."""
        own = sum(p.nbytes for part in (self.layers, self.fc) for p in part.parameters())
        head = self.target.model.get_output_embeddings() if self.lm_head is None else self.lm_head
        return int(own + head.weight.nbytes)

    def new_cache(self, rows: int, size: int) -> KVCache:
        """Keys and values of pairs."""
        return KVCache(rows, self.max_positions, min(size, self.max_positions))

    def embed(self, tokens: Int64[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """Token embeddings, its own or the target's."""
        found: Tensor = (
            self.target.embed(tokens) if self.embedding is None else self.embedding(tokens.to(self.fc.weight.device))
        )
        return found

    def fuse(self, hidden: Float[Tensor, "*B TH"]) -> Float[Tensor, "*B H"]:
        """The target's tapped states as the state of a pair: EAGLE-3's go through `fc`, EAGLE-1's stay as they are."""
        hidden = hidden.to(self.fc.weight.dtype)
        if not self.is_3:
            return hidden
        if self.before_fc is not None:
            hidden = self.before_fc(hidden)
        if len(self.fc_norms):
            parts = hidden.chunk(len(self.fc_norms), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(hidden)
        return fused

    def read(
        self,
        tokens: Int64[Tensor, "B N"],
        states: Float[Tensor, "B N H"],
        positions: Int64[Tensor, "B N"],
        seen: Bool[Tensor, "B N S"],
        cache: "KVCache | Unrolled",
    ) -> Float[Tensor, "B N H"]:
        """The states behind pairs, before any final norm; keys and values go into the cache."""
        e = self.embed(tokens).to(states.dtype)
        turn = self.rotary(e, positions.to(e.device))
        seen = seen.to(e.device)
        if self.is_3:
            assert self.hidden_norm is not None
            first: Any = self.layers[0]
            normed = self.hidden_norm(states)
            residual = normed if getattr(self.settings, "norm_before_residual", False) else states
            y = first(torch.cat([first.before_attention(e), normed], dim=-1), residual, turn, seen, cache)
        else:
            if self.embedding_norm is not None and self.hidden_norm is not None:
                e, states = self.embedding_norm(e), self.hidden_norm(states)
            z = self.fc(torch.cat([e, states], dim=-1))
            first = self.layers[0]
            y = first(z if first.before_attention is None else first.before_attention(z), z, turn, seen, cache)
        for layer in list(self.layers)[1:]:
            before: Any = layer
            y = before(before.before_attention(y), y, turn, seen, cache)
        found: Tensor = y
        return found

    def score(self, states: Float[Tensor, "*B H"]) -> Float[Tensor, "*B Vd"]:
        """Logits over the ids that the head scores."""
        if self.norm is not None:
            states = self.norm(states)
        if self.lm_head is None:
            return scored(self.target, states)
        found: Tensor = self.lm_head(states)
        return found

    def fed_back(self, states: Float[Tensor, "*B H"]) -> Float[Tensor, "*B H"]:
        """What takes the place of the target's state when it drafts on."""
        if getattr(self.settings, "norm_output", False) and self.norm is not None:
            normed: Tensor = self.norm(states)
            return normed
        return states

    def on_target_ids(self, row: Float[Tensor, "Vd"]) -> Float[Tensor, "V"]:
        """Logits where the target has the ids; no others."""
        if self.ids is None and row.shape[0] == self.vocab_size:
            return row
        whole = row.new_full((self.vocab_size,), -torch.inf)
        if self.ids is None:
            whole[: row.shape[0]] = row[: self.vocab_size]
        else:
            whole[self.ids] = row
        return whole


def _rotary_config(settings: EagleSettings) -> LlamaConfig:
    scaling = {"rope_type": "default"} if settings.rope_scaling is None else dict(settings.rope_scaling)
    return LlamaConfig(
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={"rope_theta": settings.rope_theta, **scaling},
    )


class Unrolled:
    """Keys and values of a training text, unrolled step by step; nothing is committed.

    What step s sees at position t: all of step 0 up to t - s, then what the later steps had at t - s + 1, …, t.
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Take a step's keys and values of a layer, and give those of all its steps, side by side."""
        if number in self._steps:
            before = self._steps[number]
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        self._steps[number] = keys, values
        return keys, values


@dataclass(eq=False)
class Pairs(Reading):
    """How far the head has read one text. `unread` holds the tokens of pairs, the last one being the pending token."""

    states: Float[Tensor, "n H"] | None = None
    """The target's states of the unread pairs."""
    length: int = 0
    """Pairs of the text, read or not."""
    outputs: list[Float[Tensor, "m H"]] = field(default_factory=list)
    """What the head gave at the staged slots."""


class Eagle(DraftModel):
    """Drafts with an EAGLE head of any generation.

    Args:
        head: as `paceline.formats.read_head` gives it.
        tree_top_k, depth, rule: as for `DraftModel`.
        costs: what passes of the target cost; what a pass of the head costs of one is worked out.
    """

    def __init__(
        self,
        head: Head,
        *,
        tree_top_k: int | None = None,
        depth: int | None = None,
        rule: str = "coupled",
        costs: Costs | None = None,
    ) -> None:
        super().__init__(_Unbound(head), tree_top_k=tree_top_k, depth=depth, rule=rule, reuse_prefix=False, costs=costs)
        self.head, self._asked = head, self.costs
        self.network: Network | None = None

    def bind(self, target: Any) -> None:
        """Takes the target's states, and its embedding and vocabulary matrix where the head has none of its own."""
        settings = self.head.settings
        assert isinstance(settings, EagleSettings), "checked with the head"
        check_layered(target)
        width = settings.target_hidden_size if isinstance(settings, Eagle3Settings) else settings.hidden_size
        if width != target.hidden_size:
            raise IncompatibleDrafter(
                f"the head reads states of {width} values, the target has {target.hidden_size}; it was trained for "
                f"another model ({self.head.base_model or 'which it does not name'})"
            )
        ids = self.head.target_ids
        if ids is not None and int(ids.max()) >= target.vocab_size:
            raise IncompatibleDrafter(
                f"the head scores id {int(ids.max())}, the target has ids 0 to {target.vocab_size - 1}; it was trained "
                "for another model"
            )
        self.taps = self._layer_ids(settings, int(target.num_layers))
        self.network = Network(self.head, target)
        self.model: Any = self.network
        self._vocab_size = int(target.vocab_size)
        share = self.network.weight_bytes / target.weight_bytes
        passes = self._asked.target
        self.costs = Costs(passes, tuple((n, cost * share) for n, cost in passes), READING * share)

    @staticmethod
    def _layer_ids(settings: EagleSettings, num_layers: int) -> tuple[int, ...]:
        """Which `hidden_states` of the target the head reads."""
        if not isinstance(settings, Eagle3Settings):
            return (num_layers,)
        ids = settings.layer_ids or default_layer_ids(num_layers)
        if max(ids) > num_layers:
            raise IncompatibleDrafter(
                f"the head reads what enters layer {max(ids)}, the target has {num_layers} layers; it was trained for "
                "another model"
            )
        return tuple(ids)

    # -- the text ----------------------------------------------------------------------------------------------

    def begin(self, prompt: Step) -> Pairs:
        """Take the prompt's first pairs in; they are read when the text is first asked about."""
        state = Pairs(self.model.new_cache(1, len(prompt.tokens) + 1))
        self._take(state, prompt)
        return state

    def forecast(self, state: Reading, ask: Ask) -> Forecast:
        """As for draft models; the pending token is among the unread ones here."""
        assert isinstance(state, Pairs)
        lag, costs = max(0, len(state.unread) - 1), self.costs.shared(ask.rows)
        few = lag <= FEW and state.alone is None
        once = 0.0 if few else costs.reading * lag
        cost = costs.guess(1 + lag) - costs.guess(1) if few else 0.0
        return state.hits.forecast(costs, self._depth(state, ask), cost)._replace(once=once)

    def observe(self, states: list[Reading], steps: list[Step]) -> None:
        """Commit the pairs that had true states, drop what was drafted, and take in what was kept."""
        slots: list[list[int]] = [[] for _ in self._rows]
        for state, step in zip(states, steps, strict=True):
            assert isinstance(state, Pairs)
            sketch = state.sketch
            if sketch is not None and step.tokens[:1] == [sketch.ask.pending]:
                slots[_row(state)] = list(range(sketch.num_known))
                state.unread, state.states = [], None
                state.hits.learn(sketch.outcomes(step.following), sketch.num_levels, sketch.passes)
            state.sketch = None
        if self._pool is not None:
            self._pool.commit(slots)
        self._unstage()
        for state, step in zip(states, steps, strict=True):
            assert isinstance(state, Pairs)
            self._take(state, step)

    def _take(self, state: Pairs, step: Step) -> None:
        """New pairs of a text; one that outgrows the context is given up."""
        if state.is_closed or not step.tokens:
            return
        state.length += len(step.tokens)
        if state.length >= self.model.max_positions:
            self.end(state)
            return
        assert self.network is not None, "a drafter is bound before it drafts"
        assert step.hidden is not None, "the loop brings the states that were tapped"
        with torch.inference_mode():
            fused = self.network.fuse(step.hidden)
        state.states = fused if state.states is None else torch.cat([state.states, fused])
        state.unread += step.following

    def end(self, state: Reading) -> None:
        """Free the sequence's row; the other rows move up."""
        super().end(state)
        assert isinstance(state, Pairs)
        state.states, state.outputs = None, []

    # -- passes ------------------------------------------------------------------------------------------------

    def _unstage(self) -> None:
        super()._unstage()
        for state in self._rows:
            assert isinstance(state, Pairs)
            state.outputs = []

    def _join(self, states: list[Reading]) -> None:
        """Read all but the last few pairs of each text, and move new texts into the pool."""
        for state in states:
            assert isinstance(state, Pairs)
            cache = state.alone
            while cache is not None and len(state.unread) > FEW:
                self._commit_pairs(cache, [state], [min(CHUNK, len(state.unread) - 1)])
        new = [state for state in states if state.alone is not None]
        if new:
            caches = [self._pool, *(state.alone for state in new)]
            self._pool = KVCache.join([cache for cache in caches if cache is not None])
        for state in new:
            state.alone, state.row = None, len(self._rows)
            self._rows.append(state)
        while any(len(state.unread) > FEW for state in states):
            assert self._pool is not None
            wanted = {id(state) for state in states}
            rows = [state for state in self._rows if isinstance(state, Pairs)]
            sizes = [max(0, min(CHUNK, len(row.unread) - 1)) if id(row) in wanted else 0 for row in rows]
            self._commit_pairs(self._pool, rows, sizes)

    @torch.inference_mode()
    def _commit_pairs(self, cache: KVCache, rows: Sequence[Pairs], sizes: Sequence[int]) -> None:
        """Read and commit the first unread pairs of each row."""
        assert self.network is not None
        width = max(sizes)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        offsets = self._padding(cache, width)
        weight = self.network.fc.weight
        states = torch.zeros(
            len(rows), width, self.network.settings.hidden_size, dtype=weight.dtype, device=weight.device
        )
        for row, (state, size) in enumerate(zip(rows, sizes, strict=True)):
            if size:
                assert state.states is not None
                tokens[row, :size] = torch.tensor(state.unread[:size])
                offsets[row, :size] = torch.arange(size)
                states[row, :size] = state.states[:size]
                del state.unread[:size]
                state.states = state.states[size:]
        causal = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
        self._run(cache, tokens, offsets, causal, states)
        cache.commit([range(size) for size in sizes])

    def _run(self, cache: KVCache, tokens: Tensor, offsets: Tensor, mask: Tensor, states: Tensor) -> Tensor:
        """One pass over pairs, staged."""
        assert self.network is not None
        lengths = torch.tensor(cache.lengths)[:, None]
        cache.start(offsets)
        seen = visible_slots(lengths, offsets, mask, cache)
        out = self.network.read(tokens, states, (lengths + offsets).clamp(min=0), seen, cache)
        cache.finish()
        return out

    @torch.inference_mode()
    def _read(
        self, pool: KVCache, tokens: Tensor, offsets: Tensor, mask: Tensor, plans: list[tuple[Sketch, int, list[Place]]]
    ) -> Float[Tensor, "B N V"]:
        """Pairs with true states first, then guesses with the states that the head gave above them."""
        assert self.network is not None
        weight = self.network.fc.weight
        shape = (*tokens.shape, self.network.settings.hidden_size)
        states = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        for sketch, row, places in plans:
            state = self._rows[row]
            assert isinstance(state, Pairs)
            known = torch.cat(state.outputs) if state.outputs else None
            first = len(sketch.places) - len(places)
            for i, place in enumerate(places):
                if first + i < sketch.num_known:
                    assert state.states is not None
                    states[row, i] = state.states[first + i]
                else:
                    assert known is not None, "guesses stand behind pairs that were read in passes before"
                    states[row, i] = known[place.above[-1]]
        out = self._run(pool, tokens, offsets, mask, states)
        back = self.network.fed_back(out)
        for row, other in enumerate(self._rows):
            assert isinstance(other, Pairs)
            other.outputs.append(back[row])
        return self.network.score(out)

    def _usable(self, logits: Float[Tensor, "Vd"]) -> Float[Tensor, "_"] | None:
        assert self.network is not None
        return usable(self.network.on_target_ids(logits))

    # -- what to draft -----------------------------------------------------------------------------------------

    def _depth(self, state: Reading, ask: Ask) -> int:
        """As for draft models; nothing behind a prompt of one token, which has no pair."""
        if not state.unread:
            return 0
        return super()._depth(state, ask)

    def _sketch(self, state: Reading, ask: Ask, depth: int) -> Sketch:
        if state.is_greedy is None:
            state.is_greedy = is_greedy(ask, self._vocab_size)
        greedy, draws = bool(state.is_greedy), self.rule != "coupled"
        fixed = self.depth is not None or (draws and not greedy)
        if self.depth is None and fixed:
            depth = min(depth, max(1, self.forecast(state, ask).nodes))
        growth = Growth(depth, self.tree_top_k, fixed, draws, greedy)
        # Without a look ahead: a guess that is read along would have to wait for the state of the one above it.
        alone = ask._replace(ahead=None)
        return Sketch(alone, [*state.unread], growth, state.hits, self.costs.shared(ask.rows))

    # -- training ----------------------------------------------------------------------------------------------

    def loss(
        self,
        batch: Batch,
        *,
        mix: Mix = USUAL,
        steps: int | None = None,
        decay: float = 0.8,
        soft: float = 0.1,
    ) -> tuple[Tensor, dict[str, float]]:
        """What texts say about the head, to be made small.

        EAGLE-3 is unrolled: in step s it reads its own states of step s - 1, one place on, and sees of earlier steps
        what it would see when it drafts. Each step is held against the target's law over the head's own ids; places
        where the target's likeliest token is none of these do not count. EAGLE-1 has one step as published, and is held
        against the target's next state (smooth L1) and, with the weight `soft`, its law.

        Args:
            mix: how laws are compared.
            steps: None is 7 for EAGLE-3 and 1 for EAGLE-1; with more, EAGLE-1 too learns to go on from its own states.
            decay: weight of a step over the one before.

        Returns:
            The weighted sum over the places of all steps by the number of the first one's, and for each step s sums
            over its places: `places_s`, their number; `learnt_s`, with those that did not count; `right_s`, where its
            best guess is the target's; `kept_s`, of its guesses that would be kept under sampling.
        """
        assert self.network is not None, "a drafter is bound before it is trained"
        network, size = self.network, batch.tokens.shape[1] - 2  # the last pair: what follows the last token but one
        if size < 1:
            raise BadRequest(f"texts of {size + 2} tokens were given; three or more are needed to learn from")
        following, last, learn = batch.tokens[:, 1 : size + 1], batch.last[:, 1 : size + 1], batch.learn[:, 2:]
        known = within(batch, network.ids, network.target.unembed)[:, 1 : size + 1]
        states, seen = network.fuse(batch.hidden[:, :size]), Unrolled()
        total, notes, places = states.new_zeros((), dtype=torch.float32), dict[str, float](), 0
        for step in range(min(steps or (7 if network.is_3 else 1), size)):
            out = self._step(states, following, seen, step)
            reached = learn & (torch.arange(size, device=learn.device) >= step)
            valid = reached & known
            token = places_among(batch.tokens[:, 2:][valid], network.ids)
            found = judge(mix, out[valid], network.score, last[valid], network.teach, token, network.num_ids)
            loss = found.loss
            if not network.is_3:
                near = functional.smooth_l1_loss(out[valid].float(), last[valid].float(), reduction="none")
                loss = soft * loss + near.mean(-1).sum()
            places = places or found.number
            total = total + decay**step * loss
            notes |= found.notes(step, reached)
            states = functional.pad(network.fed_back(out)[:, :-1], (0, 0, 1, 0))
        return total / max(1, places), notes

    def _step(self, states: Tensor, tokens: Tensor, cache: Unrolled, step: int) -> Tensor:
        assert self.network is not None
        size = tokens.shape[1]
        positions = torch.arange(size, device=states.device).expand(tokens.shape[0], -1)
        mask = unrolled_mask(size, step).to(states.device).expand(tokens.shape[0], -1, -1)
        return self.network.read(tokens, states, positions, mask, cache)


def unrolled_mask(size: int, step: int) -> Bool[Tensor, "T S"]:
    """What each place sees in step `step`, of the keys of step 0, then of step 1, and so on.

    Place t stands for a draft of `step` tokens behind place t - step: up to there it sees what was read with true
    states, and of step r the one place that such a draft had reached in it, t - step + r.
    """
    at = torch.arange(size)
    parts = [at[None, :] <= at[:, None] - step]
    parts += [at[None, :] == at[:, None] - (step - r) for r in range(1, step + 1)]
    mask = torch.cat(parts, dim=1)
    # Places before `step` stand for no draft and count for nothing; each must see something all the same.
    mask[:step, 0] = True
    return mask


class _Unbound:
    """What a head is until its target is known."""

    def __init__(self, head: Head) -> None:
        settings = head.settings
        if not isinstance(settings, EagleSettings):
            raise BadRequest(f"a head of kind {head.kind!r} was given; an EAGLE head is needed")
        self.vocab_size, self.max_positions = settings.vocab_size, settings.max_position_embeddings
        self.hidden_size, self.kernel = settings.hidden_size, Kernel("unbound")

    def new_cache(self, rows: int, size: int) -> KVCache:
        """There is none yet, nor any of the following."""
        raise AssertionError("a drafter is bound before it drafts")

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
        """See `new_cache`."""
        raise AssertionError("a drafter is bound before it drafts")

    def embed(self, tokens: Int64[Tensor, "..."]) -> Float[Tensor, "... H"]:
        """See `new_cache`."""
        raise AssertionError("a drafter is bound before it drafts")

    def unembed(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... V"]:
        """See `new_cache`."""
        raise AssertionError("a drafter is bound before it drafts")
