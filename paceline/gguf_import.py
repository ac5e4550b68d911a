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
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedModel
from .gguf_file import Header, values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
SHARD_BYTES = 400_000_000
"""A shard ends before this many bytes (one tensor may be larger): a loader that drops layer by layer holds little."""

# What ends generation although the file names one id only: the tokens that llama.cpp ends at, by their text, for the
# architectures above. Only tokens that the file marks as control tokens count.
END_TOKENS = {
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>",
    "</s>", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>",
}  # fmt: skip
_CONTROL = 3  # tokenizer.ggml.token_type


# -- the model's settings ----------------------------------------------------------------------------------------------


def config_of(header: Header) -> "PreTrainedConfig":
    """The ``transformers`` config that the file's metadata describes, or `UnsupportedModel`."""
    from transformers import AutoConfig

    arch, tensors = header.architecture, header.tensors
    if arch not in ARCHITECTURES:
        raise _unsupported(header, f"its architecture is {arch!r}, not one of {', '.join(ARCHITECTURES)}")
    if header.metadata.get("split.count", 1) > 1:
        raise _unsupported(header, "it is one part of a split file (join it with llama-gguf-split --merge)")
    if header.get("expert_count", 0):
        raise _unsupported(header, "it is a mixture of experts")
    try:
        hidden, heads, context = (
            int(header.get(k)) for k in ("embedding_length", "attention.head_count", "context_length")
        )
        head_dim = int(header.get("attention.key_length", hidden // heads))
        settings: dict[str, Any] = {
            "vocab_size": tensors["token_embd.weight"].shape[0],
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
        raise _unsupported(header, f"its metadata lacks a size or gives one per layer ({error})") from error
    if (
        header.get("attention.value_length", head_dim) != head_dim
        or header.get("rope.dimension_count", head_dim) != head_dim
    ):
        raise _unsupported(header, "its heads have parts of different widths")
    if 0 < header.get("attention.sliding_window", 0) < context:
        raise _unsupported(header, "it uses a sliding window")
    settings["rope_parameters"] = _rope(header, head_dim)
    settings["tie_word_embeddings"] = "output.weight" not in tensors
    if arch != "qwen2":
        settings["attention_bias"] = "blk.0.attn_q.bias" in tensors
    ids = {k: header.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "padding")}
    return AutoConfig.for_model(
        arch,
        **settings,
        dtype="bfloat16",
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        pad_token_id=ids["padding"],
    )


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
            raise _unsupported(header, "its rotary factors are not those of Llama 3")
        llama3 = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return base | {"rope_type": "llama3", "original_max_position_embeddings": 8192} | llama3
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": float(header.get("rope.scaling.factor", 1.0))}
    if kind != "none" or header.get("rope.scale_linear", 1.0) != 1.0:
        raise _unsupported(header, f"its rotary scaling is {kind!r}")
    return base


def end_ids(header: Header) -> list[int]:
    """Ids that end generation: the file's own end ids first, then its control tokens with a text of `END_TOKENS`."""
    named = [header.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    tokens, kinds = (header.metadata.get(f"tokenizer.ggml.{k}", []) for k in ("tokens", "token_type"))
    by_text = [i for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind == _CONTROL and text in END_TOKENS]
    return list(dict.fromkeys([i for i in named if i is not None] + by_text))


def _unsupported(header: Header, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{header.path.name} cannot be converted: {why}; use the model's original safetensors folder or hub id"
    )


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
            raise _unsupported(header, f"{weight} {list(meta.shape)} has no tensor {stored} of that shape")
        matched[weight] = stored
    left = set(header.tensors) - set(matched.values()) - {"rope_freqs.weight"}
    if left:
        raise _unsupported(header, f"nothing is known about its tensors {', '.join(sorted(left)[:5])}")
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


def _write_weights(header: Header, config: "PreTrainedConfig", folder: Path, tick: Callable[[int], None]) -> None:
    """Bf16 safetensors shards and their index; ``tick`` hears the bytes written so far."""
    import torch

    matched = _matched(header, config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
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
                stored = matched[weight]
                paired = heads.get(stored.split(".")[-2]) if header.architecture == "llama" else None
                for piece in values(header, stored, paired):
                    file.write(torch.from_numpy(piece.copy()).to(torch.bfloat16).view(torch.uint8).numpy().data)
                    done += 2 * piece.size
                    tick(done)
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": header.bf16_bytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_tokenizer(header: Header, config: "PreTrainedConfig", folder: Path) -> None:
    from tokenizers.normalizers import NFC
    from transformers import PreTrainedTokenizerFast

    try:
        with TemporaryDirectory() as empty:  # beside the file there may be another model's tokenizer, which would win
            (Path(empty) / "model.gguf").symlink_to(header.path.absolute())
            tokenizer = PreTrainedTokenizerFast.from_pretrained(empty, gguf_file="model.gguf")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _unsupported(header, f"its tokenizer cannot be rebuilt ({error})") from error
    if config.model_type.startswith("qwen"):  # their text is normalised before it is split; the file does not say so
        tokenizer.backend_tokenizer.normalizer = NFC()
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


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
    _write_tokenizer(header, config, folder)
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
