"""Tiny draft heads as others publish them: key names, shapes and configs, written down apart from the package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

H, HEADS, KV, D, INTER = 16, 4, 2, 4, 24
VOCAB = 96
DRAFT_IDS = [0, 1, 2, 5, 6, 9, 20, 21, 22, 23, 40, 41, 57, 58, 90, 95]
"""Target ids of a trimmed vocabulary; some are neighbours, as in every real one."""
LAYER_IDS = [2, 4, 5]
LAYERS = 8
BASE = "someone/Some-Model-1B"
MEDUSA_FILE = "medusa_lm_head.safetensors"


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same random tensor for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: values(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def put(folder: Path, tensors: Mapping[str, Any], config: Any, name: str = "model.safetensors") -> Path:
    """A head's folder. `config` is an object, a text as it stands, or None for no file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)  # tensors that were read from it still point into it
    if name.endswith(".safetensors"):
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / name)
    else:
        torch.save(dict(tensors), folder / name)
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


# -- Medusa ------------------------------------------------------------------------------------------------------------

MEDUSA: dict[str, Any] = {
    "base_model_name_or_path": BASE,
    "medusa_num_heads": 3,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
VLLM_MEDUSA: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": H,
    "vocab_size": VOCAB,
    "truncated_vocab_size": None,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "max_paths": 64,
    "topk": 10,
    "medusa_fc_bias": True,
    "transformers_version": "4.41.2",
}


def medusa(num_heads: int = 3, num_layers: int = 1, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """As the authors' trainer saves heads; their code repeats one block, so several blocks are equal."""
    found: dict[str, Tensor] = {}
    for i in range(num_heads):
        for j in range(num_layers):
            found[f"{i}.{j}.linear.weight"] = values(H, H, seed=10 * i, dtype=dtype)
            found[f"{i}.{j}.linear.bias"] = values(H, seed=10 * i + 1, dtype=dtype)
        found[f"{i}.{num_layers}.weight"] = values(VOCAB, H, seed=10 * i + 2, dtype=dtype)
    return found


def vllm_medusa(num_heads: int = 3, rows: int = VOCAB, bias: bool = True) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num_heads):
        shapes[f"blocks.{i}.layers.0.weight"] = (H, H)
        if bias:
            shapes[f"blocks.{i}.layers.0.bias"] = (H,)
        shapes[f"lm_heads.{i}.weight"] = (rows, H)
    return filled(shapes, torch.bfloat16)


# -- EAGLE -------------------------------------------------------------------------------------------------------------

EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": INTER,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": KV,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCAB,
}
EAGLE3: dict[str, Any] = {
    **{key: value for key, value in EAGLE.items() if key != "bias"},
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": len(DRAFT_IDS),
    "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
    "max_position_embeddings": 2048,
    "target_hidden_size": H,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": len(DRAFT_IDS),
    "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
    "embed_requires_grad": False,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": BASE},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": D,
        "hidden_act": "silu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": INTER,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 512,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "use_cache": True,
        "vocab_size": VOCAB,
    },
    "transformers_version": "4.55.0",
}


def layer(width: int = H) -> dict[str, tuple[int, ...]]:
    """A decoder layer without its input norm; attention reads `width` numbers."""
    return {
        "self_attn.q_proj.weight": (HEADS * D, width),
        "self_attn.k_proj.weight": (KV * D, width),
        "self_attn.v_proj.weight": (KV * D, width),
        "self_attn.o_proj.weight": (H, HEADS * D),
        "mlp.gate_proj.weight": (INTER, H),
        "mlp.up_proj.weight": (INTER, H),
        "mlp.down_proj.weight": (H, INTER),
        "post_attention_layernorm.weight": (H,),
    }


def eagle(bias: bool = True, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """EAGLE-1: no input norm, no final norm, no vocabulary matrix."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, H), "fc.weight": (H, 2 * H)}
    if bias:
        shapes["fc.bias"] = (H,)
    return filled(shapes | {f"layers.0.{name}": shape for name, shape in layer().items()}, dtype)


def maps() -> dict[str, Tensor]:
    """Offsets from draft ids to target ids, and which target ids there are."""
    ids = torch.tensor(DRAFT_IDS)
    present = torch.zeros(VOCAB, dtype=torch.bool)
    present[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": present}


def eagle3(
    first: str = "midlayer.",
    embed: bool = True,
    trimmed: bool = True,
    target: int = H,
    dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:
    """EAGLE-3. `first` is what its only layer is called: ``midlayer.`` by the authors, ``layers.0.`` by others."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, H)} if embed else {}
    shapes |= {"fc.weight": (H, 3 * target), "norm.weight": (H,)}
    shapes["lm_head.weight"] = (len(DRAFT_IDS) if trimmed else VOCAB, H)
    inside = layer(2 * H) | {"hidden_norm.weight": (H,), "input_layernorm.weight": (H,)}
    found = filled(shapes | {first + name: shape for name, shape in inside.items()}, dtype)
    return found | maps() if trimmed else found
