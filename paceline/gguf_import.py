"""GGUF files become ordinary model folders: header, checks, dequantisation to bf16, tokenizer, generation settings.

Every tensor is dequantised to float32 by the ``gguf`` package, rounded to bf16 once, and streamed in pieces. The loader
of ``transformers`` gives the same values, but it needs ``accelerate``, holds the whole model and the parsed vocabulary
several times over, and passes over settings that it does not know.

An architecture is accepted only when every tensor of the file and every weight of the model find each other with the
same shape, and every setting that changes the forward is understood. What is not is refused, never ignored.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .gguf_file import Header, unsupported, values
from .gguf_tokenizer import CONTROL, write_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
SHARD_BYTES = 400_000_000
"""A shard ends before this many bytes (one tensor may be larger): a loader that drops layer by layer holds little."""

# What ends generation although the file names one id only: the tokens that llama.cpp ends at, by their text, for the
# architectures above, and Gemma's end of a text beside its end of a turn. Only tokens that the file marks as control
# tokens count.
END_TOKENS = {
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>",
    "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>",
}  # fmt: skip

GEMMA3_SETTINGS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping",
    "expert_count", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor",
}  # fmt: skip
"""Settings of a Gemma-3 file that are understood. With others it may be a later model under the same name."""


# -- the model's settings ----------------------------------------------------------------------------------------------


def config_of(header: Header) -> "PreTrainedConfig":
    """The ``transformers`` config that the file's metadata describes, or `UnsupportedModel`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    arch, tensors = header.architecture, header.tensors
    if arch not in ARCHITECTURES:
        raise unsupported(header, f"its architecture is {arch!r}, not one of {', '.join(ARCHITECTURES)}")
    if header.metadata.get("split.count", 1) > 1:
        raise unsupported(header, "it is one part of a split file (join it with llama-gguf-split --merge)")
    if header.get("expert_count", 0):
        raise unsupported(header, "it is a mixture of experts")
    settings = _sizes(header)
    settings["rope_parameters"] = _rope(header, settings["head_dim"])
    settings["tie_word_embeddings"] = "output.weight" not in tensors
    if arch != "qwen2":
        settings["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if arch == "gemma3":
        settings |= _gemma3(header, settings)
    elif 0 < header.get("attention.sliding_window", 0) < settings["max_position_embeddings"]:
        raise unsupported(header, "it uses a sliding window")
    ids = {k: header.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "padding")}
    try:
        return AutoConfig.for_model(
            "gemma3_text" if arch == "gemma3" else arch,
            **settings,
            dtype="bfloat16",
            bos_token_id=ids["bos"],
            eos_token_id=ids["eos"],
            pad_token_id=ids["padding"],
        )
    except StrictDataclassError as error:
        raise unsupported(header, f"its settings do not fit together ({' '.join(str(error).split())})") from error


def _sizes(header: Header) -> dict[str, Any]:
    """What every architecture has: how many layers, heads and ids there are, and how wide they are."""
    try:
        hidden, heads, context = (
            int(header.get(k)) for k in ("embedding_length", "attention.head_count", "context_length")
        )
        head_dim = int(header.get("attention.key_length", hidden // heads))
        settings: dict[str, Any] = {
            "vocab_size": header.tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": int(header.get("feed_forward_length")),
            "num_hidden_layers": int(header.get("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(header.get("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": float(header.get("attention.layer_norm_rms_epsilon")),
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise unsupported(header, f"its metadata lacks a size or gives one per layer ({error})") from error
    if (
        header.get("attention.value_length", head_dim) != head_dim
        or header.get("rope.dimension_count", head_dim) != head_dim
    ):
        raise unsupported(header, "its heads have parts of different widths")
    return settings


def _gemma3(header: Header, settings: dict[str, Any]) -> dict[str, Any]:
    """What Gemma-3 has besides. Its files leave much of it out: then it is what llama.cpp takes for this architecture.

    Of six layers five see a window, with a rotary base of their own that no scaling changes, and the sixth sees all.
    """
    prefix = f"{header.architecture}."
    strange = {k.removeprefix(prefix) for k in header.metadata if k.startswith(prefix)} - GEMMA3_SETTINGS
    if strange:
        raise unsupported(header, f"nothing is known about its settings {', '.join(sorted(strange)[:5])}")
    window, pattern = header.get("attention.sliding_window", 0), header.get("attention.sliding_window_pattern", 6)
    if not isinstance(window, int) or window < 1 or pattern != 6:
        raise unsupported(header, f"its sliding window is {window} tokens with pattern {pattern!r}, not with pattern 6")
    if header.get("attn_logit_softcapping", 0) or header.get("final_logit_softcapping", 0):
        raise unsupported(header, "it caps its logits")
    if "rope_freqs.weight" in header.tensors or header.get("rope.freq_base") is None:
        raise unsupported(header, "its rotary settings are not those of Gemma-3")
    layers, hidden, heads = (settings[k] for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    local = {"rope_type": "default", "rope_theta": float(header.get("rope.freq_base_swa", 10_000.0))}
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)],
        "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": local},
        # the 27B model, told by its depth, scales queries by another width than that of its heads
        "query_pre_attn_scalar": hidden // heads if layers == 62 else settings["head_dim"],
    }


def _rope(header: Header, head_dim: int) -> dict[str, Any]:
    """Rotary settings. Llama 3 files carry a tensor of factors instead of the four numbers it was made from."""
    theta = float(header.get("rope.freq_base", 10_000.0))
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = header.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        import numpy as np

        (found,) = values(header, "rope_freqs.weight")
        wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0, 1)  # 0 for long waves, 1 for short ones
        factor = round(float(found.max()), 6)
        if found.size != wavelength.size or not np.allclose(1 / ((1 - smooth) / factor + smooth), found, rtol=1e-3):
            raise unsupported(header, "its rotary factors are not those of Llama 3")
        llama3 = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return base | {"rope_type": "llama3", "original_max_position_embeddings": 8192} | llama3
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": float(header.get("rope.scaling.factor", 1.0))}
    if kind != "none" or header.get("rope.scale_linear", 1.0) != 1.0:
        raise unsupported(header, f"its rotary scaling is {kind!r}")
    return base


def end_ids(header: Header) -> list[int]:
    """Ids that end generation: the file's own end ids first, then its control tokens with a text of `END_TOKENS`."""
    named = [header.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    tokens, kinds = (header.metadata.get(f"tokenizer.ggml.{k}", []) for k in ("tokens", "token_type"))
    by_text = [i for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL and text in END_TOKENS]
    return list(dict.fromkeys([i for i in named if i is not None] + by_text))


# -- the weights -------------------------------------------------------------------------------------------------------


def _matched(header: Header, config: "PreTrainedConfig") -> dict[str, str]:
    """Model weight -> tensor of the file, in the model's order; refuses anything left over on either side."""
    import torch
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    names = get_tensor_name_map(MODEL_ARCH[header.architecture.upper()], config.num_hidden_layers)
    matched: dict[str, str] = {}
    for weight, meta in model.state_dict().items():
        if config.tie_word_embeddings and weight == "lm_head.weight":
            continue
        module, _, leaf = weight.rpartition(".")
        stored = f"{names.get_name(module)}.{leaf}"
        if stored not in header.tensors or header.tensors[stored].shape != tuple(meta.shape):
            raise unsupported(header, f"{weight} {list(meta.shape)} has no tensor {stored} of that shape")
        matched[weight] = stored
    left = set(header.tensors) - set(matched.values()) - {"rope_freqs.weight"}
    if left:
        raise unsupported(header, f"nothing is known about its tensors {', '.join(sorted(left)[:5])}")
    return matched


def _shards(header: Header, matched: dict[str, str]) -> list[list[str]]:
    """Weights in the model's order, cut into shards."""
    shards: list[list[str]] = [[]]
    used = 0
    for weight, stored in matched.items():
        nbytes = 2 * math.prod(header.tensors[stored].shape)
        if shards[-1] and used + nbytes > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(weight)
        used += nbytes
    return shards


def _values(header: Header, config: "PreTrainedConfig", weight: str, stored: str) -> Iterator["np.ndarray[Any, Any]"]:
    """Float32 pieces of a weight as the model holds it, with what llama.cpp's converter did to it undone."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    paired = heads.get(stored.split(".")[-2]) if header.architecture == "llama" else None
    # Gemma's norms multiply by 1 + w. The file holds that sum, in float32, so the difference has all bits of w.
    raised = header.architecture == "gemma3" and weight.endswith("norm.weight")
    for piece in values(header, stored, paired):
        yield piece - 1 if raised else piece


def _write_weights(header: Header, config: "PreTrainedConfig", folder: Path, tick: Callable[[int], None]) -> None:
    """Bf16 safetensors shards and their index; ``tick`` hears the bytes written so far."""
    import torch

    matched = _matched(header, config)
    shards = _shards(header, matched)
    where: dict[str, str] = {}
    done = 0
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for weight in shard:
            shape = list(header.tensors[matched[weight]].shape)
            table[weight] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * math.prod(shape)]}
            at += 2 * math.prod(shape)
        head = json.dumps(table).encode()
        head += b" " * (-len(head) % 8)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for weight in shard:
                for piece in _values(header, config, weight, matched[weight]):
                    file.write(torch.from_numpy(piece.copy()).to(torch.bfloat16).view(torch.uint8).numpy().data)
                    done += 2 * piece.size
                    tick(done)
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": header.bf16_bytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def convert(header: Header, folder: Path, origin: dict[str, Any], tick: Callable[[int], None]) -> None:
    """Write a folder that ``transformers`` loads: bf16 weights, config, tokenizer, end ids, and ``paceline.json``.

    Not atomic: the caller hands in a folder under a temporary name.
    """
    from gguf.constants import GGMLQuantizationType
    from transformers import GenerationConfig

    config = config_of(header)
    _write_weights(header, config, folder, tick)
    config.save_pretrained(folder)
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id, "eos_token_id": end_ids(header)}
    GenerationConfig(**ids).save_pretrained(folder)
    write_tokenizer(header, config, folder)
    kinds = Counter(GGMLQuantizationType(t.kind).name for t in header.tensors.values())
    versions = {}
    for package in ("paceline", "gguf", "torch", "transformers"):
        with suppress(PackageNotFoundError):  # a source tree that is not installed has no version
            versions[package] = version(package)
    record = origin | {
        "quantisation": header.quantisation,
        "tensor_types": dict(kinds),
        "dequantised_to": "bfloat16",
        "versions": versions,
    }
    (folder / "paceline.json").write_text(json.dumps(record, indent=2) + "\n")
