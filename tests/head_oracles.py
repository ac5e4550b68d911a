"""Draft heads of random weights for the tiny models of the tests, and their forwards, written from the formulas.

Nothing here comes from the package but the container that a head is held in.
"""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.formats import Head
from paceline.formats.head import Eagle3Settings, EagleSettings, MedusaSettings

F64 = torch.float64


def randn(generator: torch.Generator, *shape: int, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(*shape, generator=generator, dtype=F64)


def medusa(
    hidden: int, vocab: int, num_heads: int = 3, num_layers: int = 1, seed: int = 0, lm_head: str = "own"
) -> Head:
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for i in range(num_heads):
        for j in range(num_layers):
            tensors[f"heads.{i}.layers.{j}.weight"] = randn(g, hidden, hidden)
            tensors[f"heads.{i}.layers.{j}.bias"] = randn(g, hidden)
        if lm_head == "own":
            tensors[f"heads.{i}.lm_head.weight"] = randn(g, vocab, hidden)
    if lm_head == "shared":
        tensors["lm_head.weight"] = randn(g, vocab, hidden)
    settings = MedusaSettings(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        num_heads=num_heads,
        num_layers=num_layers,
        lm_head=lm_head,  # type: ignore[arg-type]
    )
    return Head("medusa", settings, tensors)


def medusa_forward(head: Head, h: Tensor, target_matrix: Tensor | None = None) -> Tensor:
    """[K, V] from the state of one token."""
    t, rows = head.tensors, []
    for i in range(head.settings.num_heads):  # type: ignore[union-attr]
        x = h
        for j in range(head.settings.num_layers):
            z = t[f"heads.{i}.layers.{j}.weight"] @ x + t[f"heads.{i}.layers.{j}.bias"]
            x = x + z / (1 + torch.exp(-z))
        matrix = t.get(f"heads.{i}.lm_head.weight", t.get("lm_head.weight", target_matrix))
        assert matrix is not None
        rows.append(matrix @ x)
    return torch.stack(rows)


def _layer(g: torch.Generator, width: int, hidden: int) -> dict[str, Tensor]:
    """Four heads of 8 values, two of keys and values, and an inner width of 24."""
    return {
        "self_attn.q_proj.weight": randn(g, 32, width),
        "self_attn.k_proj.weight": randn(g, 16, width),
        "self_attn.v_proj.weight": randn(g, 16, width),
        "self_attn.o_proj.weight": randn(g, hidden, 32),
        "mlp.gate_proj.weight": randn(g, 24, hidden),
        "mlp.up_proj.weight": randn(g, 24, hidden),
        "mlp.down_proj.weight": randn(g, hidden, 24),
        "post_attention_layernorm.weight": 1 + randn(g, hidden),
    }


def eagle(hidden: int, vocab: int, seed: int = 0, *, fc_bias: bool = True, **more: Any) -> Head:
    """EAGLE-1 with the target's own embedding and vocabulary matrix."""
    g = torch.Generator().manual_seed(seed)
    tensors = {"fc.weight": randn(g, hidden, 2 * hidden)}
    if fc_bias:
        tensors["fc.bias"] = randn(g, hidden)
    tensors |= {f"layers.0.{k}": v for k, v in _layer(g, hidden, hidden).items()}
    settings = EagleSettings(
        hidden_size=hidden,
        vocab_size=vocab,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        fc_bias=fc_bias,
        embed_tokens="target",
        lm_head="target",
        max_position_embeddings=512,
        **more,
    )
    return Head("eagle", settings, tensors)


def eagle3(
    hidden: int,
    vocab: int,
    seed: int = 0,
    *,
    layer_ids: tuple[int, ...] = (0, 1, 2),
    ids: Tensor | None = None,
    **more: Any,
) -> Head:
    """EAGLE-3 with a vocabulary of its own where `ids` are given, and the target's embedding."""
    g = torch.Generator().manual_seed(seed)
    size = vocab if ids is None else len(ids)
    tensors = {
        "fc.weight": randn(g, hidden, len(layer_ids) * hidden),
        "norm.weight": 1 + randn(g, hidden),
        "lm_head.weight": randn(g, size, hidden),
        "layers.0.hidden_norm.weight": 1 + randn(g, hidden),
        "layers.0.input_layernorm.weight": 1 + randn(g, hidden),
    }
    tensors |= {f"layers.0.{k}": v for k, v in _layer(g, 2 * hidden, hidden).items()}
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][ids[ids < vocab]] = True
    if more.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + randn(g, len(layer_ids) * hidden)
    if more.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": 1 + randn(g, hidden) for i in range(len(layer_ids))}
    settings = Eagle3Settings(
        hidden_size=hidden,
        target_hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        num_taps=len(layer_ids),
        layer_ids=layer_ids,
        layer_id_convention="given",
        embed_tokens="target",
        max_position_embeddings=512,
        **more,
    )
    return Head("eagle3", settings, tensors)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """[heads, dim] turned by its position: the halves are the two parts of each pair."""
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half, dtype=F64) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def _attend(t: Any, s: Any, inputs: list[Tensor], at: int, visible: list[int]) -> Tensor:
    """Attention of pair `at` over the pairs that it sees, all read from scratch."""
    heads, groups, dim = s.num_attention_heads, s.num_attention_heads // s.num_key_value_heads, s.head_dim

    def project(name: str, x: Tensor) -> Tensor:
        return (t[f"layers.0.self_attn.{name}_proj.weight"] @ x).view(-1, dim)

    q = rotated(project("q", inputs[at]), at, s.rope_theta)
    keys = [rotated(project("k", inputs[j]), j, s.rope_theta) for j in visible]
    values = [project("v", inputs[j]) for j in visible]
    out = []
    for head in range(heads):
        scores = torch.stack([q[head] @ key[head // groups] for key in keys]) / math.sqrt(dim)
        weights = scores.softmax(0)
        out.append(sum(w * value[head // groups] for w, value in zip(weights, values, strict=True)))
    found: Tensor = t["layers.0.self_attn.o_proj.weight"] @ torch.cat(out)  # type: ignore[arg-type]
    return found


def _mlp(t: Any, x: Tensor) -> Tensor:
    gate = t["layers.0.mlp.gate_proj.weight"] @ x
    up = t["layers.0.mlp.up_proj.weight"] @ x
    found: Tensor = t["layers.0.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return found


class Reference:
    """A head that reads a text of pairs from scratch, pair by pair, without any cache.

    Args:
        embedding, matrix: the target's.
    """

    def __init__(self, head: Head, embedding: Tensor, matrix: Tensor) -> None:
        self.head, self.t, self.s = head, head.tensors, head.settings
        self.embedding, self.matrix = embedding, matrix

    def fuse(self, hidden: Tensor) -> Tensor:
        """The state of a pair from the target's tapped states of one token."""
        s: Any = self.s
        if self.head.kind == "eagle":
            return hidden
        if s.norm_before_fc:
            hidden = rms(hidden, self.t["input_norm.weight"])
        if s.fc_norm:
            parts = hidden.chunk(s.num_taps)
            hidden = torch.cat([rms(part, self.t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        return self.t["fc.weight"] @ hidden

    def states(self, pairs: list[tuple[Tensor, int]]) -> list[Tensor]:
        """What the head gives behind each (state, token), every pair seeing those before it."""
        s: Any = self.s
        inputs, residuals = [], []
        for state, token in pairs:
            e = self.embedding[token]
            if self.head.kind == "eagle":
                z = self.t["fc.weight"] @ torch.cat([e, state]) + self.t.get("fc.bias", torch.tensor(0.0))
                inputs.append(z)
                residuals.append(z)
            else:
                normed = rms(state, self.t["layers.0.hidden_norm.weight"])
                inputs.append(torch.cat([rms(e, self.t["layers.0.input_layernorm.weight"]), normed]))
                residuals.append(normed if s.norm_before_residual else state)
        found = []
        for at in range(len(pairs)):
            y = residuals[at] + _attend(self.t, s, inputs, at, list(range(at + 1)))
            found.append(y + _mlp(self.t, rms(y, self.t["layers.0.post_attention_layernorm.weight"])))
        return found

    def logits(self, state: Tensor) -> Tensor:
        """Over the ids that the head scores."""
        if self.head.kind == "eagle":
            return self.matrix @ state
        return self.t["lm_head.weight"] @ rms(state, self.t["norm.weight"])

    def fed_back(self, state: Tensor) -> Tensor:
        s: Any = self.s
        return rms(state, self.t["norm.weight"]) if self.head.kind == "eagle3" and s.norm_output else state

    def on_target_ids(self, logits: Tensor) -> Tensor:
        """[V], with nothing on ids that the head has not."""
        ids = self.head.target_ids
        if ids is None:
            return logits
        whole = torch.full((len(self.matrix),), -math.inf, dtype=F64)
        whole[ids] = logits
        return whole

    def chain(self, pairs: list[tuple[Tensor, int]], depth: int) -> list[int]:
        """The likeliest guess behind the last pair, the likeliest behind that, and so on: a draft at temperature 0."""
        pairs, guesses = list(pairs), list[int]()
        for _ in range(depth):
            state = self.states(pairs)[-1]
            guesses.append(int(self.on_target_ids(self.logits(state)).argmax()))
            pairs.append((self.fed_back(state), guesses[-1]))
        return guesses
