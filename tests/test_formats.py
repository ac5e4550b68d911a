"""Published draft heads: every layout read and written, and each known way to get one wrong refused or told.

The heads are written by `heads`, with the names and shapes that others publish, not by the package.
"""

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from heads import BASE, DRAFT_IDS, EAGLE, EAGLE3, LAYER_IDS, LAYERS, MEDUSA, SPECULATORS, VLLM_MEDUSA, VOCAB, D, H, put
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import formats
from paceline.errors import (
    BadRequest,
    CorruptWeights,
    IncompatibleDrafter,
    ModelNotFound,
    PacelineError,
    UnsupportedModel,
)
from paceline.formats import (
    Eagle3Settings,
    EagleSettings,
    Head,
    Layout,
    MedusaSettings,
    check_fits,
    check_head,
    default_layer_ids,
    describe,
    description,
    read_head,
    with_layer_ids,
    write_head,
)

Tensors = dict[str, Tensor]


def a_medusa(folder: Path) -> Path:
    return put(folder, heads.medusa(), MEDUSA, heads.MEDUSA_FILE)


def a_vllm_medusa(folder: Path) -> Path:
    return put(folder, heads.vllm_medusa(), VLLM_MEDUSA)


def an_eagle(folder: Path) -> Path:
    return put(folder, heads.eagle(), EAGLE, "pytorch_model.bin")


def an_eagle3(folder: Path) -> Path:
    return put(folder, heads.eagle3(), EAGLE3)


def a_speculators(folder: Path) -> Path:
    return put(folder, heads.eagle3("layers.0.", dtype=torch.bfloat16), SPECULATORS)


Make = Callable[[Path], Path]
MAKERS: dict[str, Make] = {
    "medusa": a_medusa,
    "vllm-medusa": a_vllm_medusa,
    "eagle": an_eagle,
    "eagle3": an_eagle3,
    "speculators": a_speculators,
}
LAYOUTS: dict[str, list[Layout]] = {
    "medusa": ["medusa", "vllm-medusa"],
    "vllm-medusa": ["medusa", "vllm-medusa"],
    "eagle": ["eagle"],
    "eagle3": ["eagle", "speculators"],
    "speculators": ["eagle", "speculators"],
}


@pytest.fixture(autouse=True, scope="module")
def _hasty() -> Any:
    """Nobody pulls the plug here, and waiting for the disk takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


def weights_in(folder: Path) -> Path:
    (found,) = [file for file in folder.iterdir() if file.is_file() and file.suffix != ".json"]
    return found


def load(folder: Path) -> Tensors:
    """The tensors in a folder, read without the package."""
    file = weights_in(folder)
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """The same folder with other tensors."""
    tensors, file = load(folder), weights_in(folder)
    change(tensors)
    return put(folder, tensors, None, file.name)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same folder with another config."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    """Where a config holds the keys of its decoder layer."""
    return config.get("transformer_layer_config", config)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same(one: Head, other: Head) -> None:
    assert one.settings == other.settings
    assert sorted(one.tensors) == sorted(other.tensors)
    assert all(same(one.tensors[name], other.tensors[name]) for name in one.tensors)


def noted(head: Head, words: str) -> bool:
    return any(re.search(words, note) for note in head.notes)


# -- reading: Medusa ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "heads.pt"])
def test_medusa_of_its_authors(tmp_path: Path, name: str) -> None:
    tensors = heads.medusa()
    head = read_head(put(tmp_path, tensors, MEDUSA, name))
    assert head.kind == "medusa"
    assert head.settings == MedusaSettings(hidden_size=H, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=3)
    assert head.base_model == BASE
    assert head.source == formats.Source("medusa", tmp_path / name)
    assert head.notes == ()
    assert len(head.tensors) == len(tensors) == 9
    for i in range(3):
        assert same(head.tensors[f"heads.{i}.layers.0.weight"], tensors[f"{i}.0.linear.weight"])
        assert same(head.tensors[f"heads.{i}.layers.0.bias"], tensors[f"{i}.0.linear.bias"])
        assert same(head.tensors[f"heads.{i}.lm_head.weight"], tensors[f"{i}.1.weight"])
    assert head.dtype is torch.float16
    assert head.num_parameters == 3 * (H * H + H + VOCAB * H)
    assert head.target_ids is None


def test_a_file_is_read_with_the_config_beside_it(tmp_path: Path) -> None:
    put(tmp_path, heads.medusa(), MEDUSA, "medusa_lm_head.pt")
    assert read_head(tmp_path / "medusa_lm_head.pt").base_model == BASE
    assert read_head(str(tmp_path / "medusa_lm_head.pt")).notes == ()


def test_medusa_without_a_config_is_counted_in_the_weights(tmp_path: Path) -> None:
    head = read_head(put(tmp_path, heads.medusa(4), None, "medusa_lm_head.pt"))
    assert isinstance(head.settings, MedusaSettings)
    assert head.settings.num_heads == 4
    assert noted(head, r"there is no .*config\.json: heads and blocks were counted")


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads.", "model.medusa_head."])
def test_medusa_inside_of_a_whole_model(tmp_path: Path, prefix: str) -> None:
    own = heads.medusa()
    model = {"model.embed_tokens.weight": torch.zeros(VOCAB, H), "lm_head.weight": torch.full((VOCAB, H), torch.nan)}
    config = {"hidden_size": H, "vocab_size": VOCAB, "num_hidden_layers": 24, "medusa_num_heads": 3}
    head = read_head(put(tmp_path, {prefix + name: t for name, t in own.items()} | model, config))
    assert head.settings == MedusaSettings(hidden_size=H, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=3)
    assert same(head.tensors["heads.2.lm_head.weight"], own["2.1.weight"])
    assert "lm_head.weight" not in head.tensors
    assert noted(head, "^2 other tensors .* were not read")


def test_medusa_as_modelopt_names_it(tmp_path: Path) -> None:
    own = heads.medusa()
    renamed = {
        re.sub(r"^(\d)\.1\.", r"\1.lm_head.", re.sub(r"^(\d)\.0\.linear", r"\1.medusa_layers.0.linear", name)): t
        for name, t in own.items()
    }
    renamed = {"medusa_heads." + name: t for name, t in renamed.items()}
    config = {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}}
    head = read_head(put(tmp_path, renamed, config))
    assert head.notes == ()
    assert same(head.tensors["heads.1.layers.0.bias"], own["1.0.linear.bias"])
    edit(tmp_path, lambda config: config["medusa"].update(num_medusa_layers=2))
    with pytest.raises(CorruptWeights, match="num_medusa_layers: 2, and the weights have 1 blocks"):
        read_head(tmp_path)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_medusa_of_vllm(tmp_path: Path, prefix: str) -> None:
    tensors = heads.vllm_medusa()
    head = read_head(put(tmp_path, {prefix + name: t for name, t in tensors.items()}, VLLM_MEDUSA))
    assert head.settings == MedusaSettings(hidden_size=H, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=3)
    assert head.source is not None
    assert head.source.layout == "vllm-medusa"
    assert head.notes == ()
    assert same(head.tensors["heads.1.layers.0.weight"], tensors["blocks.1.layers.0.weight"])
    assert same(head.tensors["heads.1.lm_head.weight"], tensors["lm_heads.1.weight"])


@pytest.mark.parametrize("stored", [len(DRAFT_IDS), VOCAB])
def test_medusa_with_a_trimmed_vocabulary(tmp_path: Path, stored: int) -> None:
    """Ids in any order; matrices over the whole vocabulary are cut, as vLLM does."""
    ids = torch.tensor(DRAFT_IDS[::-1])
    tensors = heads.vllm_medusa(rows=stored, bias=False) | {"token_map": ids}
    config = VLLM_MEDUSA | {"truncated_vocab_size": len(ids), "medusa_fc_bias": False}
    head = read_head(put(tmp_path, tensors, config))
    assert isinstance(head.settings, MedusaSettings)
    assert (head.settings.vocab_size, head.settings.draft_vocab_size, head.settings.bias) == (VOCAB, len(ids), False)
    matrix = tensors["lm_heads.2.weight"]
    assert same(head.tensors["heads.2.lm_head.weight"], matrix[ids] if stored == VOCAB else matrix)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == DRAFT_IDS[::-1]
    assert noted(head, "rows of token_map were taken out") == (stored == VOCAB)


def test_medusa_with_one_matrix_for_all_heads(tmp_path: Path) -> None:
    tensors = {name: t for name, t in heads.vllm_medusa().items() if not re.match(r"lm_heads\.[12]", name)}
    head = read_head(put(tmp_path, tensors, VLLM_MEDUSA | {"original_lm_head": True}))
    assert isinstance(head.settings, MedusaSettings)
    assert head.settings.lm_head == "shared"
    assert same(head.tensors["lm_head.weight"], tensors["lm_heads.0.weight"])
    del tensors["lm_heads.0.weight"]
    head = read_head(put(tmp_path, tensors, None))
    assert isinstance(head.settings, MedusaSettings)
    assert head.settings.lm_head == "target"
    assert noted(head, "the target's is used")


def test_equal_blocks_are_told_apart_from_different_ones(tmp_path: Path) -> None:
    config = MEDUSA | {"medusa_num_layers": 2}
    head = read_head(put(tmp_path, heads.medusa(num_layers=2), config, heads.MEDUSA_FILE))
    assert isinstance(head.settings, MedusaSettings)
    assert (head.settings.num_layers, head.settings.tied_layers) == (2, True)
    assert head.num_parameters == 3 * (H * H + H + VOCAB * H)
    assert head.notes == ()
    rewrite(tmp_path, lambda tensors: tensors["1.1.linear.bias"].add_(1))
    head = read_head(tmp_path)
    assert isinstance(head.settings, MedusaSettings)
    assert not head.settings.tied_layers
    assert head.num_parameters == 3 * (2 * (H * H + H) + VOCAB * H)
    assert noted(head, "blocks of a head differ")


def test_heads_are_counted_in_the_weights(tmp_path: Path) -> None:
    """The best-known heads say two and have five."""
    head = read_head(put(tmp_path, heads.medusa(5), MEDUSA | {"medusa_num_heads": 2}, heads.MEDUSA_FILE))
    assert isinstance(head.settings, MedusaSettings)
    assert head.settings.num_heads == 5
    assert noted(head, "medusa_num_heads: 2, and the weights have 5 heads: all are used")
    edit(tmp_path, lambda config: config.update(medusa_num_heads=6))
    with pytest.raises(CorruptWeights, match="medusa_num_heads: 6, and the weights have 5 heads"):
        read_head(tmp_path)


@pytest.mark.parametrize("said", [2, 4])
def test_heads_of_vllm_are_as_many_as_it_says(tmp_path: Path, said: int) -> None:
    edit(a_vllm_medusa(tmp_path), lambda config: config.update(num_heads=said))
    with pytest.raises(CorruptWeights, match=f"num_heads: {said}, and the weights have 3 heads"):
        read_head(tmp_path)


def test_biases_that_vllm_would_drop(tmp_path: Path) -> None:
    edit(a_vllm_medusa(tmp_path), lambda config: config.pop("medusa_fc_bias"))
    head = read_head(tmp_path)
    assert isinstance(head.settings, MedusaSettings)
    assert head.settings.bias
    assert noted(head, "vLLM would drop the biases")
    edit(tmp_path, lambda config: config.update(medusa_fc_bias=False))
    with pytest.raises(CorruptWeights, match="medusa_fc_bias: false, and the weights have biases"):
        read_head(tmp_path)
    put(tmp_path, heads.vllm_medusa(bias=False), VLLM_MEDUSA)
    with pytest.raises(CorruptWeights, match="medusa_fc_bias: true, and the weights have no biases"):
        read_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({"token_map": torch.tensor([*DRAFT_IDS[:-1], VOCAB])}, {}, "different ids below 96"),
        ({"token_map": torch.tensor([*DRAFT_IDS[:-1], -1])}, {}, "different ids below 96"),
        ({"token_map": torch.tensor([*DRAFT_IDS[:-1], 0])}, {}, "15 of them different"),
        ({"token_map": torch.tensor(DRAFT_IDS).float()}, {}, "a list of target ids is needed"),
        ({"token_map": torch.tensor(DRAFT_IDS[:-1])}, {}, "truncated_vocab_size: 16, and the heads have 15 rows"),
        ({}, {"truncated_vocab_size": 17}, "truncated_vocab_size: 17, and the heads have 16 rows"),
        ({"token_map": None}, {}, "without a token_map"),
        ({"lm_heads.1.weight": None}, {}, "heads.1.lm_head.weight is missing"),
        ({}, {"original_lm_head": True}, "all heads share lm_heads.0.weight"),
    ],
)
def test_what_goes_wrong_with_trimmed_medusa_heads(
    tmp_path: Path, change: dict[str, Tensor | None], config: dict[str, Any], words: str
) -> None:
    tensors = heads.vllm_medusa(rows=len(DRAFT_IDS)) | {"token_map": torch.tensor(DRAFT_IDS)}
    base = VLLM_MEDUSA | {"truncated_vocab_size": len(DRAFT_IDS)}
    assert read_head(put(tmp_path / "right", tensors, base)).notes == ()
    changed = {name: t for name, t in (tensors | change).items() if t is not None}
    with pytest.raises(CorruptWeights, match=words):
        read_head(put(tmp_path / "wrong", changed, base | config))


# -- reading: EAGLE ----------------------------------------------------------------------------------------------------

SETTINGS = EagleSettings(
    hidden_size=H,
    vocab_size=VOCAB,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=D,
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=4096,
    fc_bias=True,
    lm_head="target",
)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("prefix", ["", "model.", "speculator.", "draft_model.model."])
def test_eagle(tmp_path: Path, name: str, prefix: str) -> None:
    tensors = heads.eagle()
    head = read_head(put(tmp_path, {prefix + key: t for key, t in tensors.items()}, EAGLE, name))
    assert (head.kind, head.settings, head.notes, head.base_model) == ("eagle", SETTINGS, (), None)
    assert sorted(head.tensors) == sorted(tensors)
    assert all(same(head.tensors[key], tensors[key]) for key in tensors)
    assert head.dtype is torch.float16
    assert head.config == EAGLE


def shards(folder: Path, tensors: Tensors, suffix: str = "safetensors", stem: str = "model") -> Path:
    """A head in two files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names, listed = sorted(tensors), {}
    for i, part in enumerate((names[:3], names[3:]), 1):
        file = f"{stem}-0000{i}-of-00002.{suffix}"
        put(folder, {name: tensors[name] for name in part}, None, file)
        listed |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    (folder / "config.json").write_text(json.dumps(EAGLE))
    return folder


@pytest.mark.parametrize(("suffix", "stem"), [("safetensors", "model"), ("bin", "pytorch_model")])
def test_a_head_in_several_files(tmp_path: Path, suffix: str, stem: str) -> None:
    tensors = heads.eagle()
    head = read_head(shards(tmp_path, tensors, suffix, stem))
    assert (head.settings, head.notes) == (SETTINGS, ())
    assert all(same(head.tensors[key], tensors[key]) for key in tensors)
    (tmp_path / f"{stem}-00002-of-00002.{suffix}").unlink()
    with pytest.raises(CorruptWeights, match=f"00002.{suffix} is missing"):
        read_head(tmp_path)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    shards(tmp_path, heads.eagle())
    index = tmp_path / "model.safetensors.index.json"
    right = json.loads(index.read_text())["weight_map"]
    for weight_map, words in [
        ({name: file for name, file in right.items() if name != "fc.bias"}, "do not hold the same tensors: fc.bias"),
        (right | {"fc.more": right["fc.bias"]}, "do not hold the same tensors: fc.more"),
        (right | {"fc.bias": "elsewhere/model.safetensors"}, "is no index"),
        ({}, "is no index"),
        ([], "is no index"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CorruptWeights, match=re.escape(words)):
            read_head(tmp_path)
    index.unlink()
    with pytest.raises(BadRequest, match="several files of weights and no index"):
        read_head(tmp_path)


def test_eagle_variants(tmp_path: Path) -> None:
    """Biases of attention, norms before fc, no embedding, a matrix of its own, rotary frequencies."""
    tensors = heads.eagle(bias=False)
    del tensors["embed_tokens.weight"]
    tensors |= {
        "layers.0.self_attn.q_proj.bias": heads.values(16, seed=1),
        "layers.0.self_attn.k_proj.bias": heads.values(8, seed=2),
        "layers.0.self_attn.v_proj.bias": heads.values(8, seed=3),
        "embedding_layernorm.weight": heads.values(H, seed=4),
        "hidden_states_layernorm.weight": heads.values(H, seed=5),
        "lm_head.weight": heads.values(VOCAB, H, seed=6),
        "layers.0.self_attn.rotary_emb.inv_freq": 500000.0 ** -(torch.arange(0, D, 2) / D),
    }
    head = read_head(put(tmp_path, tensors, EAGLE | {"bias": False, "qkv_bias": True, "add_para_norm": True}))
    assert head.settings == replace(
        SETTINGS, fc_bias=False, qkv_bias=True, para_norm=True, lm_head="own", embed_tokens="target"
    )
    assert noted(head, "inv_freq was left aside")
    assert noted(head, "float16 for .*float32 for|float32 for .*float16 for")
    renamed = {
        {"embedding_layernorm.weight": "enorm.weight", "hidden_states_layernorm.weight": "hnorm.weight"}.get(
            name, name
        ): t
        for name, t in tensors.items()
    }
    again = read_head(put(tmp_path / "vllm", renamed, EAGLE | {"bias": False}))
    assert_same(again, head)
    edit(tmp_path, lambda config: config.update(rope_theta=10000.0))
    with pytest.raises(CorruptWeights, match="other rotary frequencies than rope_theta: 10000"):
        read_head(tmp_path)


@pytest.mark.parametrize("first", ["midlayer.", "layers.0.", "model.midlayer.", "model.layers.0."])
def test_eagle3(tmp_path: Path, first: str) -> None:
    tensors = heads.eagle3(first)
    head = read_head(put(tmp_path, tensors, EAGLE3))
    assert head.settings == Eagle3Settings(
        **{**vars(SETTINGS), "fc_bias": False, "lm_head": "own", "max_position_embeddings": 2048},
        target_hidden_size=H,
        draft_vocab_size=len(DRAFT_IDS),
        layer_ids=tuple(LAYER_IDS),
    )
    assert (head.kind, head.notes) == ("eagle3", ())
    assert same(head.tensors["layers.0.hidden_norm.weight"], tensors[first + "hidden_norm.weight"])
    assert same(head.tensors["d2t"], tensors["d2t"])
    assert head.target_ids is not None
    assert head.target_ids.tolist() == DRAFT_IDS


def test_eagle3_inside_of_a_whole_model(tmp_path: Path) -> None:
    own = {f"eagle_module.{name}": t for name, t in heads.eagle3("layers.0.").items()}
    model = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(1), "lm_head.weight": torch.full((1,), torch.nan)}
    head = read_head(put(tmp_path, own | model, EAGLE3))
    assert noted(head, "^2 other tensors")
    assert same(head.tensors["lm_head.weight"], own["eagle_module.lm_head.weight"])


def test_the_official_eagle3_config_says_little(tmp_path: Path) -> None:
    """Without rope_theta (10000 then, whatever the target has), list of layers and target_hidden_size."""
    config = {**EAGLE3}
    for key in ("rope_theta", "rope_scaling", "eagle_aux_hidden_state_layer_ids", "target_hidden_size"):
        del config[key]
    head = read_head(put(tmp_path, heads.eagle3(embed=False), config, "pytorch_model.bin"))
    assert isinstance(head.settings, Eagle3Settings)
    assert head.settings.rope_theta == 10000.0
    assert head.settings.layer_ids is None
    assert head.settings.layer_id_convention == "default"
    assert head.settings.embed_tokens == "target"
    assert head.settings.target_hidden_size == H
    assert len(head.notes) == 1
    assert noted(head, "no rope_theta: 10000 is taken")


def test_eagle3_without_a_trimmed_vocabulary(tmp_path: Path) -> None:
    config = {key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"}
    head = read_head(put(tmp_path, heads.eagle3(trimmed=False), config))
    assert isinstance(head.settings, Eagle3Settings)
    assert head.settings.draft_vocab_size == VOCAB
    assert head.target_ids is None
    assert head.notes == ()


def test_eagle3_for_a_wider_target(tmp_path: Path) -> None:
    put(tmp_path, heads.eagle3(target=20), EAGLE3 | {"target_hidden_size": 20})
    head = read_head(tmp_path)
    assert isinstance(head.settings, Eagle3Settings)
    assert (head.settings.target_hidden_size, head.notes) == (20, ())
    edit(tmp_path, lambda config: config.pop("target_hidden_size"))
    head = read_head(tmp_path)
    assert isinstance(head.settings, Eagle3Settings)
    assert head.settings.target_hidden_size == 20
    assert noted(head, "no target_hidden_size: 20 is taken")
    edit(tmp_path, lambda config: config.update(target_hidden_size=H))
    with pytest.raises(CorruptWeights, match="target_hidden_size: 16, and the weights have 20 columns"):
        read_head(tmp_path)
    put(tmp_path, heads.eagle3(target=20, embed=False), EAGLE3 | {"target_hidden_size": 20})
    with pytest.raises(CorruptWeights, match="hidden_size 16, the target 20"):
        read_head(tmp_path)


def test_speculators(tmp_path: Path) -> None:
    head = read_head(a_speculators(tmp_path))
    assert head.settings == Eagle3Settings(
        **{**vars(SETTINGS), "fc_bias": False, "lm_head": "own"}
        | {"rope_scaling": SPECULATORS["transformer_layer_config"]["rope_scaling"]},
        target_hidden_size=H,
        draft_vocab_size=len(DRAFT_IDS),
        layer_ids=tuple(LAYER_IDS),
        norm_before_residual=True,
    )
    assert (head.base_model, head.notes) == (BASE, ())
    assert head.source == formats.Source("speculators", tmp_path / "model.safetensors")


def test_speculators_with_all_that_there_is(tmp_path: Path) -> None:
    """Two layers of Qwen3's kind, a norm before fc, what is fed back normalised."""
    tensors = heads.eagle3("layers.0.")
    more = heads.layer() | {"input_layernorm.weight": (H,)}
    tensors |= heads.filled({f"layers.1.{name}": shape for name, shape in more.items()})
    tensors |= heads.filled({f"layers.{k}.self_attn.{x}_norm.weight": (D,) for k in (0, 1) for x in "qk"})
    tensors["input_norm.weight"] = heads.values(3 * H, seed=7)
    config = SPECULATORS | {"norm_before_fc": True, "norm_output": True}
    config["transformer_layer_config"] = layer_of(SPECULATORS) | {"model_type": "qwen3", "num_hidden_layers": 2}
    head = read_head(put(tmp_path, tensors, config))
    settings = head.settings
    assert isinstance(settings, Eagle3Settings)
    assert (settings.num_layers, settings.qk_norm, settings.norm_before_fc, settings.norm_output) == (
        2,
        True,
        True,
        True,
    )
    assert not settings.fc_norm
    write_head(head, tmp_path / "again", "speculators")
    assert_same(read_head(tmp_path / "again"), head)
    assert layer_of(json.loads((tmp_path / "again" / "config.json").read_text()))["model_type"] == "qwen3"
    rewrite(
        tmp_path, lambda tensors: [tensors.pop(f"layers.{k}.self_attn.{x}_norm.weight") for k in (0, 1) for x in "qk"]
    )
    with pytest.raises(CorruptWeights, match=r"layers\.0\.self_attn\.q_norm\.weight is missing"):
        read_head(tmp_path)


def test_a_norm_for_each_hidden_state(tmp_path: Path) -> None:
    tensors = heads.eagle3() | heads.filled({f"fc_norm.{i}.weight": (H,) for i in range(3)}, torch.float16)
    head = read_head(put(tmp_path, tensors, EAGLE3))
    assert isinstance(head.settings, Eagle3Settings)
    assert head.settings.fc_norm
    assert noted(head, "does not say fc_norm")
    assert read_head(put(tmp_path, tensors, EAGLE3 | {"fc_norm": True})).notes == ()
    rewrite(tmp_path, lambda tensors: tensors.pop("fc_norm.1.weight"))
    with pytest.raises(CorruptWeights, match=r"fc_norm\.1\.weight is missing"):
        read_head(tmp_path)
    tensors["input_norm.weight"] = heads.values(3 * H, seed=7)
    with pytest.raises(CorruptWeights, match="exclude each other"):
        read_head(put(tmp_path, tensors, EAGLE3))


def test_speculators_leaves_out_what_llama_has_by_default(tmp_path: Path) -> None:
    """Its configs hold the difference to a Llama's; 32 heads of head_dim 4 here."""
    wide = {"num_attention_heads": 32}
    tensors = heads.eagle3("layers.0.")
    tensors["layers.0.self_attn.q_proj.weight"] = heads.values(32 * D, 2 * H, seed=1)
    tensors["layers.0.self_attn.o_proj.weight"] = heads.values(H, 32 * D, seed=2)
    config = SPECULATORS | {"transformer_layer_config": layer_of(SPECULATORS) | wide}
    told = read_head(put(tmp_path, tensors, config))
    edit(tmp_path, lambda config: layer_of(config).pop("num_attention_heads"))
    head = read_head(tmp_path)
    assert head.settings == told.settings
    assert noted(head, "no num_attention_heads: 32 is taken")


# -- layers ------------------------------------------------------------------------------------------------------------


def test_the_convention_of_a_list_of_layers_is_recorded(tmp_path: Path) -> None:
    """The same numbers mean other states at the top of a config than in ModelOpt's and SGLang's object."""
    key = "eagle_aux_hidden_state_layer_ids"
    top = read_head(an_eagle3(tmp_path)).settings
    edit(tmp_path, lambda config: config.update(eagle_config={key: config.pop(key), "use_aux_hidden_state": True}))
    inner = read_head(tmp_path).settings
    assert isinstance(top, Eagle3Settings)
    assert isinstance(inner, Eagle3Settings)
    assert (top.layer_ids, top.layer_id_convention) == (tuple(LAYER_IDS), "inputs")
    assert (inner.layer_ids, inner.layer_id_convention) == (tuple(k + 1 for k in LAYER_IDS), "outputs")
    assert "read as what enters these layers" in top.layer_id_source
    assert "read as what leaves these layers" in inner.layer_id_source
    edit(tmp_path, lambda config: config.update({key: [k + 1 for k in LAYER_IDS]}))
    both = read_head(tmp_path).settings
    assert isinstance(both, Eagle3Settings)
    assert both.layer_ids == inner.layer_ids
    edit(tmp_path, lambda config: config.update({key: LAYER_IDS}))
    with pytest.raises(CorruptWeights, match=r"hidden_states \[2, 4, 5\] against \[3, 5, 6\]"):
        read_head(tmp_path)


@pytest.mark.parametrize("ids", [[2, 2, 5], [-1, 4, 5], [2, 4.0, 5], [True, 4, 5], "2,4,5", [2, 4], [1, 2, 4, 5]])
def test_lists_of_layers_that_are_none(tmp_path: Path, ids: Any) -> None:
    edit(an_eagle3(tmp_path), lambda config: config.update(eagle_aux_hidden_state_layer_ids=ids))
    with pytest.raises(CorruptWeights, match=r"eagle_aux_hidden_state_layer_ids|target_hidden_size"):
        read_head(tmp_path)


def test_layers_in_another_order_are_told(tmp_path: Path) -> None:
    edit(an_eagle3(tmp_path), lambda config: config.update(eagle_aux_hidden_state_layer_ids=[5, 2, 4]))
    head = read_head(tmp_path)
    assert isinstance(head.settings, Eagle3Settings)
    assert head.settings.layer_ids == (5, 2, 4)
    assert noted(head, "not in ascending order")


@pytest.mark.parametrize("num_layers", range(1, 80))
def test_the_usual_layers(num_layers: int) -> None:
    ids = [2, num_layers // 2, num_layers - 3]
    if sorted(set(ids)) == ids:
        assert default_layer_ids(num_layers) == tuple(ids)
    else:
        assert num_layers < 7
        with pytest.raises(IncompatibleDrafter, match=f"a target of {num_layers} layers"):
            default_layer_ids(num_layers)


def test_other_layers_for_a_head(tmp_path: Path) -> None:
    head = read_head(an_eagle3(tmp_path))
    other = with_layer_ids(head, [1, 3, 4])
    assert isinstance(other.settings, Eagle3Settings)
    assert (other.settings.layer_ids, other.settings.layer_id_convention) == ((1, 3, 4), "given")
    for layout in LAYOUTS["eagle3"]:
        again = read_head(write_head(other, tmp_path / layout, layout))
        assert again.settings == other.settings
    zero = read_head(write_head(with_layer_ids(other, [0, 3, 4]), tmp_path / "zero", "eagle"))
    assert isinstance(zero.settings, Eagle3Settings)
    assert zero.settings.layer_ids == (0, 3, 4)
    for ids in ([1, 2], [1, 1, 2], [-1, 2, 3], [1, 2, True]):
        with pytest.raises(BadRequest, match="reads 3 different hidden states"):
            with_layer_ids(head, ids)
    with pytest.raises(BadRequest, match="only EAGLE-3"):
        with_layer_ids(read_head(an_eagle(tmp_path / "one")), [1, 2, 3])


# -- writing -----------------------------------------------------------------------------------------------------------

CHAINS = [(source, first, second) for source in MAKERS for first in LAYOUTS[source] for second in LAYOUTS[source]]


@pytest.mark.parametrize(("source", "first", "second"), CHAINS)
def test_round_trips_are_exact(tmp_path: Path, source: str, first: Layout, second: Layout) -> None:
    head = read_head(MAKERS[source](tmp_path / "source"))
    middle = read_head(write_head(head, tmp_path / "middle", first))
    assert_same(middle, head)
    assert not middle.notes
    assert_same(read_head(write_head(middle, tmp_path / "end", second)), head)
    assert middle.base_model == head.base_model


@pytest.mark.parametrize(
    ("source", "layout"), [("medusa", "medusa"), ("vllm-medusa", "vllm-medusa"), ("eagle3", "eagle")]
)
def test_what_is_written_has_the_published_names(tmp_path: Path, source: str, layout: Layout) -> None:
    """The names and values of the file that was read, found without the package, and all keys of its config."""
    folder = MAKERS[source](tmp_path / "source")
    write_head(read_head(folder), tmp_path / "again", layout)
    before, after = load(folder), load(tmp_path / "again")
    assert sorted(before) == sorted(after)
    assert all(same(before[name], after[name]) for name in before)
    old, new = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "again"))
    assert {key: new[key] for key in old} == old


def test_speculators_from_eagle(tmp_path: Path) -> None:
    """Both maps are given there, and flags whose defaults differ are written out."""
    head = read_head(put(tmp_path / "source", {k: t for k, t in heads.eagle3().items() if k != "t2d"}, EAGLE3))
    folder = write_head(head, tmp_path / "speculators", "speculators")
    tensors, config = load(folder), json.loads((folder / "config.json").read_text())
    assert same(tensors["t2d"], heads.maps()["t2d"])
    assert "layers.0.hidden_norm.weight" in tensors
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYER_IDS
    assert config["speculators_config"]["proposal_methods"][0]["proposal_type"] == "greedy"


def test_eagle_for_both_conventions(tmp_path: Path) -> None:
    folder = write_head(read_head(a_speculators(tmp_path / "source")), tmp_path / "eagle", "eagle")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYER_IDS
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in LAYER_IDS]
    assert config["norm_before_residual"] is True
    assert config["rope_scaling"]["rope_type"] == config["rope_scaling"]["type"] == "llama3"
    assert "midlayer.hidden_norm.weight" in load(folder)


def test_a_trimmed_medusa_head_stays_one(tmp_path: Path) -> None:
    tensors = heads.vllm_medusa(rows=len(DRAFT_IDS)) | {"token_map": torch.tensor(DRAFT_IDS)}
    head = read_head(put(tmp_path / "source", tensors, VLLM_MEDUSA | {"truncated_vocab_size": len(DRAFT_IDS)}))
    assert_same(read_head(write_head(head, tmp_path / "again", "vllm-medusa")), head)
    with pytest.raises(BadRequest, match="a trimmed vocabulary, which that layout has no place for"):
        write_head(head, tmp_path / "authors", "medusa")
    assert not (tmp_path / "authors").exists()


def made(lm_head: Any, **changes: Any) -> Head:
    """A Medusa head as a trainer makes it, with blocks that still are zero."""
    settings = MedusaSettings(
        hidden_size=H, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=2, num_layers=2, lm_head=lm_head, **changes
    )
    tensors: Tensors = {}
    for i in range(2):
        for j in range(2):
            tensors[f"heads.{i}.layers.{j}.weight"] = torch.zeros(H, H)
            if settings.bias:
                tensors[f"heads.{i}.layers.{j}.bias"] = torch.zeros(H)
        if lm_head == "own":
            tensors[f"heads.{i}.lm_head.weight"] = heads.values(VOCAB, H, seed=i)
    if lm_head == "shared":
        tensors["lm_head.weight"] = heads.values(VOCAB, H, seed=5)
    return Head("medusa", settings, tensors, BASE)


@pytest.mark.parametrize("lm_head", ["own", "shared", "target"])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_of_a_trainer(tmp_path: Path, lm_head: str, bias: bool) -> None:
    head = made(lm_head, bias=bias)
    again = read_head(write_head(head, tmp_path / "vllm", "vllm-medusa"))
    assert_same(again, head)
    assert again.base_model == BASE
    if lm_head == "own" and bias:
        assert_same(read_head(write_head(head, tmp_path / "authors", "medusa")), head)
    else:
        with pytest.raises(BadRequest, match="layout='medusa' was given, and the head has"):
            write_head(head, tmp_path / "authors", "medusa")


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    head = made("own")
    one = torch.ones(H, H)
    tensors = {
        n: one.T if n.endswith(".layers.0.weight") else one if "layers.1.weight" in n else t
        for n, t in head.tensors.items()
    }
    again = read_head(write_head(replace(head, tensors=tensors), tmp_path / "head", "medusa"))
    assert torch.equal(again.tensors["heads.1.layers.1.weight"], one)


def test_a_head_that_does_not_fit_its_settings_is_not_written(tmp_path: Path) -> None:
    head = made("own")
    for change, words in [
        (
            {"heads.0.layers.0.weight": torch.zeros(H, H + 1)},
            r"heads\.0\.layers\.0\.weight is \[16, 17\], and .* is \[16, 16\]",
        ),
        ({"heads.0.layers.0.weight": torch.zeros(H, H, dtype=torch.int64)}, "int64, and floating-point numbers"),
        ({"heads.9.layers.0.weight": torch.zeros(H, H)}, "has no place"),
    ]:
        with pytest.raises(CorruptWeights, match=words):
            write_head(replace(head, tensors={**head.tensors, **change}), tmp_path / "head", "medusa")
    with pytest.raises(CorruptWeights, match="is missing"):
        check_head(replace(head, tensors={n: t for n, t in head.tensors.items() if n != "heads.1.layers.1.bias"}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unchecked")  # one layout is no layout
def test_layouts_for_other_kinds(tmp_path: Path) -> None:
    one, third = read_head(an_eagle(tmp_path / "1")), read_head(an_eagle3(tmp_path / "3"))
    target = tmp_path / "head"
    for head, layout in ((one, "speculators"), (one, "medusa"), (third, "vllm-medusa"), (made("own"), "eagle")):
        with pytest.raises(BadRequest, match="can be written as"):
            write_head(head, target, layout)
    with pytest.raises(BadRequest, match="did you mean 'speculators'"):
        write_head(third, target, "speculator")  # type: ignore[arg-type]
    for change, layout, words in [
        ({"lm_head": "target"}, "speculators", "no lm_head of its own"),
        ({"fc_bias": True}, "speculators", "a bias or a norm at fc"),
        ({"qkv_bias": True}, "speculators", "biases in a part of its attention"),
        ({"qk_norm": True}, "eagle", "norms of queries and keys"),
    ]:
        tensors = dict(third.tensors)
        if change == {"lm_head": "target"}:
            tensors = {n: t for n, t in tensors.items() if n not in ("lm_head.weight", "d2t", "t2d")}
            change = change | {"draft_vocab_size": VOCAB}
        if change == {"fc_bias": True}:
            tensors["fc.bias"] = torch.zeros(H)
        if change == {"qkv_bias": True}:
            tensors |= {f"layers.0.self_attn.{x}_proj.bias": torch.zeros(n) for x, n in (("q", 16), ("k", 8), ("v", 8))}
        if change == {"qk_norm": True}:
            tensors |= {f"layers.0.self_attn.{x}_norm.weight": torch.ones(D) for x in "qk"}
        head = replace(third, settings=replace(third.settings, **change), tensors=tensors)
        check_head(head)
        with pytest.raises(BadRequest, match=words):
            write_head(head, target, layout)
    assert not target.exists()


def test_a_changed_head_is_not_written_with_its_old_config(tmp_path: Path) -> None:
    """Keys of the config that was read stay where nothing changed, and only there."""
    edit(
        an_eagle3(tmp_path / "source"),
        lambda config: config.update(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
    )
    head = read_head(tmp_path / "source")
    scaled = replace(
        head, settings=replace(head.settings, rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 2.0})
    )
    again = read_head(write_head(scaled, tmp_path / "again", "eagle"))
    assert again.settings == scaled.settings
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == 2


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    head, other = read_head(a_medusa(tmp_path / "source")), made("own")
    target = tmp_path / "head"
    target.mkdir()
    write_head(head, target, "medusa")
    with pytest.raises(BadRequest, match="is not empty"):
        write_head(other, target, "medusa")
    assert_same(read_head(target), head)
    write_head(other, target, "vllm-medusa", replace=True)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(read_head(target), other)
    (target / "thesis.txt").write_text("the only copy")
    for again in (True, False):
        with pytest.raises(BadRequest, match=r"thesis\.txt|is not empty"):
            write_head(head, target, "medusa", replace=again)
    assert (target / "thesis.txt").read_text() == "the only copy"
    with pytest.raises(BadRequest, match="is a file"):
        write_head(head, target / "thesis.txt", "medusa", replace=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["head", "source"]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("broken", ["write_atomically", "save_file", "read_head"])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool, broken: str
) -> None:
    head, target = made("own"), tmp_path / "head"
    if old:
        write_head(made("shared"), target, "vllm-medusa")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    place = {"write_atomically": formats.folder, "save_file": sys.modules["safetensors.torch"], "read_head": formats}[
        broken
    ]
    with monkeypatch.context() as patch:
        patch.setattr(place, broken, fail)
        with pytest.raises(BadRequest, match="No space left on device"):
            write_head(head, target, "medusa", replace=True)
    assert [file.name for file in tmp_path.iterdir()] == (["head"] if old else [])
    if old:
        assert_same(read_head(target), made("shared"))


def test_a_replacement_that_fails_between_both_moves_brings_the_old_head_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, target, moves = read_head(a_medusa(tmp_path / "source")), tmp_path / "head", list[str]()
    write_head(head, target, "medusa")
    real = os.replace

    def second_fails(source: Any, place: Any) -> None:
        if Path(place) == target or Path(source) == target:
            moves.append(Path(source).name)
            if len(moves) == 2:
                raise OSError("gone")
        real(source, place)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(BadRequest, match=r"cannot write the head .* gone"):
        write_head(made("own"), target, "vllm-medusa", replace=True)
    assert len(moves) == 3  # away, failed, back
    assert_same(read_head(target), head)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["head", "source"]


def test_a_folder_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever something is written, the folder is not there yet, or still is the old one."""
    target = tmp_path / "head"
    seen: list[bool] = []
    real = formats.folder.write_atomically
    monkeypatch.setattr(formats.folder, "write_atomically", lambda *a: (seen.append(target.exists()), real(*a)))
    write_head(made("own"), target, "medusa")
    assert seen == [False]


# -- every tensor is used, every parameter filled ----------------------------------------------------------------------

OPTIONAL = {"embed_tokens.weight", "t2d"}
"""What a head may be without: the target's embedding is used, and the other map says the same."""


def every(change: str) -> list[tuple[str, str]]:
    """All tensors of all layouts, in a fixed order."""
    tensors = {
        "medusa": heads.medusa(),
        "vllm-medusa": heads.vllm_medusa(),
        "eagle": heads.eagle(),
        "eagle3": heads.eagle3(),
        "speculators": heads.eagle3("layers.0."),
    }
    return [
        (source, name)
        for source in tensors
        for name in tensors[source]
        if change != "nan" or name not in ("d2t", "t2d")
    ]


@pytest.mark.parametrize(("source", "name"), every("missing"))
def test_no_tensor_may_be_missing(tmp_path: Path, source: str, name: str) -> None:
    folder = MAKERS[source](tmp_path)
    assert read_head(folder).notes == ()
    rewrite(folder, lambda tensors: tensors.pop(name))
    if name in OPTIONAL:
        settings = read_head(folder).settings
        assert isinstance(settings, EagleSettings)
        assert (settings.embed_tokens == "target") == (name == "embed_tokens.weight")
        return
    nothing_to_know_it_by = (source, name) == ("eagle", "fc.weight")
    with pytest.raises(UnsupportedModel if nothing_to_know_it_by else CorruptWeights):
        read_head(folder)


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize(
    "name", ["extra.weight", "layers.7.mlp.up_proj.weight", "0.5.weight", "layers.0.self_attn.q_proj.scale"]
)
def test_no_tensor_may_be_too_much(tmp_path: Path, source: str, name: str) -> None:
    folder = MAKERS[source](tmp_path)
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(
        CorruptWeights, match=r"has no place in such a head|num_hidden_layers: 1, and the weights have 2"
    ):
        read_head(folder)


@pytest.mark.parametrize(("source", "name"), every("shape"))
def test_no_tensor_may_have_another_shape(tmp_path: Path, source: str, name: str) -> None:
    folder = MAKERS[source](tmp_path)
    rewrite(folder, lambda tensors: tensors.update({name: torch.cat([tensors[name], tensors[name][:1]])}))
    with pytest.raises(CorruptWeights):
        read_head(folder)


@pytest.mark.parametrize(("source", "name"), every("nan"))
def test_no_value_may_be_nan(tmp_path: Path, source: str, name: str) -> None:
    folder = MAKERS[source](tmp_path)
    rewrite(folder, lambda tensors: tensors[name].view(-1)[-1:].fill_(torch.nan))
    with pytest.raises(CorruptWeights, match=r"has 1 of [\d,]+ values that are NaN"):
        read_head(folder)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_no_value_may_be_infinite(tmp_path: Path, value: float) -> None:
    folder = an_eagle3(tmp_path)
    rewrite(folder, lambda tensors: tensors["fc.weight"][3, :2].fill_(value))
    with pytest.raises(CorruptWeights, match=r"fc\.weight .* has 2 of 768 values"):
        read_head(folder)


SIZES = {
    "vllm-medusa": ["hidden_size", "vocab_size", "num_heads", "num_hidden_layers"],
    "eagle": ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"],
    "eagle3": ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"],
    "speculators": [
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "head_dim",
    ],
}


@pytest.mark.parametrize(("source", "key"), [(source, key) for source, keys in SIZES.items() for key in keys])
@pytest.mark.parametrize("factor", [2, 0.5])
def test_no_size_may_differ(tmp_path: Path, source: str, key: str, factor: float) -> None:
    """Both numbers are in the message: the config's and the weights', or the shapes that they make."""
    folder = MAKERS[source](tmp_path)
    wrong = int(layer_of(json.loads((folder / "config.json").read_text()))[key] * factor) or 3
    edit(folder, lambda config: layer_of(config).update({key: wrong}))
    both = (
        r"is \[[\d, ]+\], and [^;]* is \[[\d, ]+\]",
        rf"{key}: {wrong}, and the weights have \d+",
        rf"vocab_size: {wrong} .* the heads have {VOCAB} rows",
    )
    with pytest.raises(CorruptWeights, match="|".join(both)):
        read_head(folder)


@pytest.mark.parametrize(("source", "key"), [("eagle3", "draft_vocab_size"), ("speculators", "draft_vocab_size")])
def test_the_draft_vocabulary_may_not_differ(tmp_path: Path, source: str, key: str) -> None:
    folder = MAKERS[source](tmp_path)
    edit(folder, lambda config: config.update({key: 17}))
    with pytest.raises(CorruptWeights, match=r"lm_head\.weight is \[16, 16\], and .* is \[17, 16\]"):
        read_head(folder)


@pytest.mark.parametrize("source", ["eagle", "eagle3"])
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"])
def test_no_size_may_be_missing(tmp_path: Path, source: str, key: str) -> None:
    folder = MAKERS[source](tmp_path)
    edit(folder, lambda config: config.pop(key))
    with pytest.raises(CorruptWeights, match=f"{key} in .* is missing"):
        read_head(folder)


@pytest.mark.parametrize("source", ["eagle", "eagle3", "speculators"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "max_position_embeddings"])
def test_what_is_taken_for_a_missing_key_is_told(tmp_path: Path, source: str, key: str) -> None:
    folder = MAKERS[source](tmp_path)
    edit(folder, lambda config: layer_of(config).pop(key))
    assert noted(read_head(folder), f"has no {key}: .* is taken")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "16", [16]])
def test_sizes_are_whole_numbers(tmp_path: Path, value: Any) -> None:
    folder = an_eagle3(tmp_path)
    edit(folder, lambda config: config.update(hidden_size=value))
    with pytest.raises(CorruptWeights, match="a whole number from 1 up is needed"):
        read_head(folder)


@pytest.mark.parametrize("value", [0, -1.0, True, "1e-5", "NaN"])
def test_numbers_are_positive(tmp_path: Path, value: Any) -> None:
    folder = an_eagle3(tmp_path)
    edit(folder, lambda config: config.update(rms_norm_eps=float("nan") if value == "NaN" else value))
    with pytest.raises(CorruptWeights, match="a positive number is needed"):
        read_head(folder)


def test_a_head_dim_that_nothing_tells(tmp_path: Path) -> None:
    folder = an_eagle3(tmp_path)
    edit(folder, lambda config: config.update(num_attention_heads=5))
    with pytest.raises(CorruptWeights, match="hidden_size: 16 and num_attention_heads: 5 and has no head_dim"):
        read_head(folder)


# -- the traps of published heads --------------------------------------------------------------------------------------


def test_a_map_of_ids_instead_of_offsets(tmp_path: Path) -> None:
    """With t2d and without, and where it would pass for offsets that stay in the vocabulary."""
    for ids in (DRAFT_IDS, [*range(0, 30, 2), 31]):
        present = torch.zeros(VOCAB, dtype=torch.bool)
        present[ids] = True
        wrong = heads.eagle3() | {"d2t": torch.tensor(ids), "t2d": present}
        right = heads.eagle3() | {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": present}
        for left_out in ({"t2d"}, set()):
            put(tmp_path, {n: t for n, t in wrong.items() if n not in left_out}, EAGLE3)
            with pytest.raises(CorruptWeights, match=r"target ids where offsets .* belong.*index_map=True"):
                read_head(tmp_path)
            converted = read_head(tmp_path, index_map=True)
            assert noted(converted, "converted to offsets")
            assert converted.target_ids is not None
            assert converted.target_ids.tolist() == ids
        put(tmp_path, right, EAGLE3)
        assert read_head(tmp_path).notes == ()
        assert same(read_head(tmp_path).tensors["d2t"], right["d2t"])


def test_nothing_to_convert(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="index_map=True was given, and d2t is no ascending list"):
        read_head(an_eagle3(tmp_path / "3"), index_map=True)
    with pytest.raises(BadRequest, match="has no d2t"):
        read_head(an_eagle(tmp_path / "1"), index_map=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["d2t"].__setitem__(-1, 99), "no map into a vocabulary of 96"),
        (lambda t: t["d2t"].__setitem__(0, -1), "no map into a vocabulary of 96"),
        (lambda t: t["d2t"].__setitem__(4, 20), "no map into a vocabulary of 96"),
        (lambda t: t["t2d"].__setitem__(3, True), "16 target ids, t2d marks 17, and 16 are in both"),
        (lambda t: t["t2d"].__setitem__(0, False), "t2d marks 15, and 15 are in both"),
        (lambda t: t.update(t2d=t["t2d"].roll(1)), "disagree: d2t leads to 16 target ids, t2d marks 16"),
        (lambda t: t.update(t2d=t["t2d"].long()), "t2d is int64, and bool is needed"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t is float32, and int64 or int32 is needed"),
        (lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d is \[95\], and vocab_size is \[96\]"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
    ],
)
@pytest.mark.parametrize("source", ["eagle3", "speculators"])
def test_maps_that_are_wrong(tmp_path: Path, source: str, change: Callable[[Tensors], object], words: str) -> None:
    folder = rewrite(MAKERS[source](tmp_path), change)
    with pytest.raises(CorruptWeights, match=words):
        read_head(folder)


def test_t2d_alone_may_only_say_all(tmp_path: Path) -> None:
    config = EAGLE3 | {"draft_vocab_size": VOCAB}
    tensors = heads.eagle3(trimmed=False) | {"t2d": torch.ones(VOCAB, dtype=torch.bool)}
    assert read_head(put(tmp_path, tensors, config)).notes == ()
    tensors["t2d"][5] = False
    with pytest.raises(CorruptWeights, match="d2t, which says which are left, is missing"):
        read_head(put(tmp_path, tensors, config))


def test_a_lost_bias_of_fc(tmp_path: Path) -> None:
    """Explicit flags must be right; a missing one means true to EAGLE's code and nothing to others: told."""
    put(tmp_path, heads.eagle(bias=False), EAGLE)
    with pytest.raises(CorruptWeights, match=r"bias: true, and the weights have no fc\.bias"):
        read_head(tmp_path)
    edit(tmp_path, lambda config: config.pop("bias"))
    head = read_head(tmp_path)
    assert isinstance(head.settings, EagleSettings)
    assert not head.settings.fc_bias
    assert noted(head, r"does not say bias, which means true .* no fc\.bias: none is used")
    put(tmp_path, heads.eagle(), EAGLE | {"bias": False})
    with pytest.raises(CorruptWeights, match=r"bias: false, and the weights have fc\.bias"):
        read_head(tmp_path)
    edit(tmp_path, lambda config: config.pop("bias"))
    head = read_head(tmp_path)
    assert isinstance(head.settings, EagleSettings)
    assert head.settings.fc_bias
    assert same(head.tensors["fc.bias"], heads.eagle()["fc.bias"])
    assert head.notes == ()


@pytest.mark.parametrize("source", ["eagle", "eagle3", "speculators"])
@pytest.mark.parametrize("key", ["qkv_bias", "attention_bias"])
def test_a_lost_bias_of_attention(tmp_path: Path, source: str, key: str) -> None:
    folder = MAKERS[source](tmp_path)
    edit(folder, lambda config: layer_of(config).update({key: True}))
    with pytest.raises(CorruptWeights, match=f"{key}: true, and the weights have no bias"):
        read_head(folder)
    edit(folder, lambda config: layer_of(config).update({key: False}))
    first = "midlayer." if source == "eagle3" else "layers.0."
    sizes = {"q": 16, "k": 8, "v": 8} | ({"o": H} if key == "attention_bias" else {})
    biases = {f"{first}self_attn.{x}_proj.bias": heads.values(n, seed=n) for x, n in sizes.items()}
    rewrite(folder, lambda tensors: tensors.update(biases))
    with pytest.raises(CorruptWeights, match=f"{key}: false, and the weights have bias"):
        read_head(folder)
    edit(folder, lambda config: layer_of(config).update({key: True}))
    settings = read_head(folder).settings
    assert isinstance(settings, EagleSettings)
    assert (settings.qkv_bias, settings.o_bias) == (True, key == "attention_bias")
    rewrite(folder, lambda tensors: tensors.pop(f"{first}self_attn.k_proj.bias"))
    with pytest.raises(CorruptWeights, match=r"k_proj\.bias is missing"):
        read_head(folder)


LLAMA3 = SPECULATORS["transformer_layer_config"]["rope_scaling"]


@pytest.mark.parametrize("source", ["eagle", "eagle3", "speculators"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "factor": 4}},
            {"rope_type": "dynamic", "factor": 4},
        ),
        ({"rope_scaling": LLAMA3}, LLAMA3),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "rope_theta": None}, LLAMA3),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}, LLAMA3),
        ({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "default"}}, None),
    ],
)
def test_rope_scaling_is_kept(
    tmp_path: Path, source: str, written: dict[str, Any], meant: dict[str, Any] | None
) -> None:
    folder = MAKERS[source](tmp_path / "source")
    edit(folder, lambda config: layer_of(config).update({"rope_scaling": None} | written))
    head = read_head(folder)
    for layout in LAYOUTS[source]:
        for one in (head, read_head(write_head(head, tmp_path / layout, layout))):
            assert isinstance(one.settings, EagleSettings)
            assert (one.settings.rope_scaling, one.settings.rope_theta) == (meant, 500000.0)
            assert one.notes == ()


@pytest.mark.parametrize(
    ("written", "error", "words"),
    [
        ({"rope_scaling": {"factor": 2.0}}, CorruptWeights, "needs one rope_type"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
            CorruptWeights,
            "needs one rope_type",
        ),
        ({"rope_scaling": {"type": "linear"}}, CorruptWeights, "lacks factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, CorruptWeights, "lacks low_freq_factor"),
        ({"rope_scaling": "linear"}, CorruptWeights, "an object is needed"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, CorruptWeights, "must agree"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            CorruptWeights,
            "rope_theta: 500000.0 and 1000000.0",
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}},
            UnsupportedModel,
            "is not supported: the types are",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
            UnsupportedModel,
            "without mrope_section",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, CorruptWeights, "needs one rope_type"),
        ({"rope_theta": "10000"}, CorruptWeights, "a positive number is needed"),
    ],
)
def test_rope_scaling_that_is_lost_or_strange(
    tmp_path: Path, written: dict[str, Any], error: type[PacelineError], words: str
) -> None:
    folder = edit(an_eagle3(tmp_path), lambda config: config.update(written))
    with pytest.raises(error, match=words):
        read_head(folder)


def test_tied_flags(tmp_path: Path) -> None:
    """A flag that says one thing where the weights say another is told; what is missing is never made up."""
    put(tmp_path, heads.eagle3(), EAGLE3 | {"tie_word_embeddings": True})
    head = read_head(tmp_path)
    assert isinstance(head.settings, Eagle3Settings)
    assert head.settings.lm_head == "own"
    assert noted(head, r"tie_word_embeddings: true, and the weights have an lm_head\.weight of their own")
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(
        CorruptWeights, match=r"lm_head\.weight is missing, and with a draft vocabulary of 16 out of 96"
    ):
        read_head(tmp_path)
    whole = {name: t for name, t in heads.eagle3(trimmed=False).items() if name != "lm_head.weight"}
    for tied, expected in ((True, "embedding"), (False, "target")):
        config = EAGLE3 | {"tie_word_embeddings": tied, "draft_vocab_size": VOCAB}
        head = read_head(put(tmp_path, whole, config))
        assert isinstance(head.settings, Eagle3Settings)
        assert head.settings.lm_head == expected
        assert noted(head, r"no lm_head\.weight")
        assert read_head(write_head(head, tmp_path / expected, "eagle")).settings == head.settings
    equal = whole | {"lm_head.weight": whole["embed_tokens.weight"]}
    assert (
        read_head(put(tmp_path, equal, EAGLE3 | {"tie_word_embeddings": True, "draft_vocab_size": VOCAB})).notes == ()
    )


def test_norm_before_residual_has_another_default_in_each_source(tmp_path: Path) -> None:
    """False to EAGLE and to speculators, true to vLLM's reading of the latter: told there, and always written out."""
    folder = edit(a_speculators(tmp_path / "s"), lambda config: config.pop("norm_before_residual"))
    head = read_head(folder)
    assert isinstance(head.settings, Eagle3Settings)
    assert not head.settings.norm_before_residual
    assert noted(head, "no norm_before_residual: false is taken, .* vLLM takes true")
    again = write_head(head, tmp_path / "again", "speculators")
    assert json.loads((again / "config.json").read_text())["norm_before_residual"] is False
    assert read_head(again).notes == ()
    plain = read_head(an_eagle3(tmp_path / "e"))
    assert isinstance(plain.settings, Eagle3Settings)
    assert (plain.settings.norm_before_residual, plain.notes) == (False, ())
    edit(tmp_path / "e", lambda config: config.update(norm_before_residual="yes"))
    with pytest.raises(CorruptWeights, match="true or false is needed"):
        read_head(tmp_path / "e")


@pytest.mark.parametrize(
    ("key", "what"), [("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm"), ("add_para_norm", "norms")]
)
def test_norms_that_the_config_promises(tmp_path: Path, key: str, what: str) -> None:
    folder = edit(an_eagle3(tmp_path), lambda config: config.update({key: True}))
    with pytest.raises(CorruptWeights, match=f"{key}: true, and the weights have no {what}"):
        read_head(folder)


@pytest.mark.parametrize(
    ("source", "key", "value", "words"),
    [
        ("medusa", "logit_scale", 0.5, "logit_scale: 0.5"),
        ("vllm-medusa", "logit_scale", 2.0, "logit_scale: 2.0"),
        ("eagle", "num_hidden_layers", 2, "num_hidden_layers: 2"),
        ("eagle", "skip_prenorm", False, "skip_prenorm: False"),
        ("eagle", "model", {"hidden_size": H}, "model: {"),
        ("eagle", "eagle_aux_hidden_state_layer_ids", [1], "eagle_aux_hidden_state_layer_ids: [1]"),
        ("eagle", "sliding_window", 128, "sliding_window: 128"),
        ("eagle3", "mlp_bias", True, "mlp_bias: True"),
        ("eagle3", "partial_rotary_factor", 0.5, "partial_rotary_factor: 0.5"),
        ("eagle3", "layer_types", ["sliding_attention"], "layer_types"),
        ("eagle3", "mask_token_id", 3, "mask_token_id: 3"),
        ("eagle3", "quantization_config", {"bits": 4}, "quantization_config: {'bits': 4}"),
        ("eagle3", "hidden_act", "mish", "hidden_act: 'mish'"),
        ("eagle3", "eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state: False"),
        ("eagle3", "eagle_config", {"use_input_layernorm_in_first_layer": False}, "use_input_layernorm_in_first_layer"),
        ("eagle3", "eagle_config", {"parallel_draft_step": 4}, "parallel_draft_step: 4"),
        ("eagle3", "eagle_config", {"use_mtp_layernorm": True}, "use_mtp_layernorm: True"),
        ("speculators", "speculators_model_type", "peagle", "this is a P-EAGLE head"),
        ("speculators", "speculators_model_type", "dflash", "this is a DFlash head"),
        ("speculators", "speculators_model_type", "something", "this is a head of kind 'something'"),
        ("eagle", "model_type", "mlp_speculator", "this is an MLP speculator"),
        ("eagle3", "architectures", ["DFlashDraftModel"], "this is a DFlash head"),
    ],
)
def test_what_would_change_the_forward_is_refused_by_name(
    tmp_path: Path, source: str, key: str, value: Any, words: str
) -> None:
    folder = edit(MAKERS[source](tmp_path), lambda config: config.update({key: value}))
    with pytest.raises(UnsupportedModel, match=re.escape(words)):
        read_head(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mlp_bias", False),
        ("pretraining_tp", 1),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention"]),
        ("logit_scale", 1.0),
    ],
)
def test_keys_at_values_that_change_nothing(tmp_path: Path, key: str, value: Any) -> None:
    folder = edit(an_eagle3(tmp_path), lambda config: config.update({key: value}))
    assert read_head(folder).notes == ()


def test_a_window_that_is_not_used(tmp_path: Path) -> None:
    folder = edit(an_eagle(tmp_path), lambda config: config.update(sliding_window=128, use_sliding_window=False))
    assert read_head(folder).notes == ()


@pytest.mark.parametrize("source", MAKERS)
def test_unknown_keys_are_told(tmp_path: Path, source: str) -> None:
    folder = edit(MAKERS[source](tmp_path), lambda config: config.update(frobnicate=2))
    assert noted(read_head(folder), "not known and were not used: frobnicate")


def test_one_size_in_two_places(tmp_path: Path) -> None:
    folder = edit(a_speculators(tmp_path), lambda config: config.update(hidden_size=32))
    with pytest.raises(CorruptWeights, match="hidden_size: 32, and 16 in transformer_layer_config"):
        read_head(folder)
    edit(folder, lambda config: config.update(transformer_layer_config=None))
    with pytest.raises(CorruptWeights, match=r"transformer_layer_config in .* an object is needed"):
        read_head(folder)


def test_an_eagle_head_that_calls_itself_speculators(tmp_path: Path) -> None:
    with pytest.raises(CorruptWeights, match="has the tensors of EAGLE-1"):
        read_head(put(tmp_path, heads.eagle(), SPECULATORS))


def test_the_same_tensor_under_two_names(tmp_path: Path) -> None:
    folder = rewrite(an_eagle3(tmp_path / "e"), lambda t: t.update({"model.fc.weight": t["fc.weight"]}))
    with pytest.raises(CorruptWeights, match=r"fc\.weight and model\.fc\.weight|model\.fc\.weight and fc\.weight"):
        read_head(folder)
    twice = {f"{prefix}.{name}": t for prefix in ("medusa_head", "medusa_heads") for name, t in heads.medusa().items()}
    with pytest.raises(CorruptWeights, match="there twice"):
        read_head(put(tmp_path / "m", twice, MEDUSA))


def test_p_eagle(tmp_path: Path) -> None:
    folder = rewrite(a_speculators(tmp_path), lambda tensors: tensors.update(mask_hidden=torch.ones(1, 3 * H)))
    with pytest.raises(UnsupportedModel, match="P-EAGLE"):
        read_head(folder)


# -- files -------------------------------------------------------------------------------------------------------------


class Code:
    """What a pickle may hold: something that runs when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    trap = tmp_path / "trap"
    put(tmp_path / "head", heads.medusa() | {"more": Code(trap)}, MEDUSA, name)
    with pytest.raises(CorruptWeights, match="more than tensors, which could run code"):
        read_head(tmp_path / "head")
    assert not trap.exists()
    (tmp_path / "head" / name).write_bytes(pickle.dumps(Code(trap)))
    with pytest.raises(CorruptWeights, match=re.escape(name)):
        read_head(tmp_path / "head")
    assert not trap.exists()
    torch.load(put(tmp_path / "b", {"more": Code(trap)}, None, name) / name, weights_only=False)
    assert trap.exists()  # so the trap is one


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(2)], "holds a list"),
        ({"a": torch.ones(2), "step": 3}, "more than tensors: step"),
        ({"a": {}}, "tensors: a"),
    ],
)
def test_pickles_of_something_else(tmp_path: Path, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CorruptWeights, match=words):
        read_head(tmp_path)


@pytest.mark.parametrize("source", MAKERS)
def test_files_that_are_cut_short(tmp_path: Path, source: str) -> None:
    folder = MAKERS[source](tmp_path)
    file = weights_in(folder)
    whole = file.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptWeights, match=re.escape(file.name)):
            read_head(folder)


def test_a_folder_written_halfway(tmp_path: Path) -> None:
    folder = an_eagle3(tmp_path / "head")
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    with pytest.raises(CorruptWeights, match=r"config\.json is missing"):
        read_head(folder)
    for text, words in [(config[:-5], "no readable JSON"), ("", "no readable JSON"), ("[1]", "holds a list")]:
        (folder / "config.json").write_text(text)
        with pytest.raises(CorruptWeights, match=words):
            read_head(folder)
    (folder / "config.json").write_text(config)
    weights_in(folder).rename(folder / ".model.safetensors.123")
    with pytest.raises(ModelNotFound, match="not written or fetched to the end"):
        read_head(folder)


def test_places_without_a_head(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no head at"):
        read_head(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match="is no head's folder"):
        read_head(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(BadRequest, match="is no file of weights"):
        read_head(tmp_path / "README.md")


def test_what_trainers_leave_is_not_a_head(tmp_path: Path) -> None:
    put(tmp_path, heads.medusa(), MEDUSA, "heads.pt")
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth"):
        (tmp_path / name).write_bytes(b"not read")
    assert read_head(tmp_path).notes == ()


def test_no_pickle_is_read_where_there_is_a_choice(tmp_path: Path) -> None:
    put(tmp_path, heads.eagle(), EAGLE)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    head = read_head(tmp_path)
    assert head.settings == SETTINGS
    assert noted(head, r"pytorch_model\.bin beside model\.safetensors was not read")


def test_a_whole_model_is_no_head(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"is a whole model .* and no draft head"):
        read_head(tiny_model)
    with pytest.raises(UnsupportedModel, match="is no draft head that can be read"):
        read_head(put(tmp_path, {"bert.weight": torch.ones(1)}, {}))
    (tmp_path / "model.safetensors").unlink()
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="its tensors are none"):
        read_head(tmp_path)


def test_several_dtypes_are_told(tmp_path: Path) -> None:
    folder = rewrite(an_eagle3(tmp_path / "source"), lambda t: t.update({"norm.weight": t["norm.weight"].float()}))
    head = read_head(folder)
    assert noted(head, r"several dtypes: float16 for .*; float32 for norm\.weight")
    again = read_head(write_head(head, tmp_path / "again", "eagle"))
    assert again.tensors["norm.weight"].dtype is torch.float32
    assert head.dtype is torch.float16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_heads(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = rewrite(an_eagle3(tmp_path), lambda t: t.update({"fc.weight": t["fc.weight"].to(dtype)}))
    with pytest.raises((UnsupportedModel, CorruptWeights), match=r"fc\.weight"):
        read_head(folder)


def test_only_what_is_needed_is_imported() -> None:
    """The layer below drafters: no target, no transformers."""
    code = (
        "import sys, paceline.formats; print([m for m in sys.modules if m.startswith(('transformers', 'paceline.'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = {name.split(".")[1] for name in re.findall(r"'(paceline\.[\w.]+)'", found)}
    assert names <= {"errors", "files", "formats"}
    assert "transformers" not in found


# -- what a head is, and for whom --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", MAKERS)
def test_descriptions(tmp_path: Path, source: str) -> None:
    folder = MAKERS[source](tmp_path)
    head = read_head(folder)
    about = json.loads(json.dumps(describe(head)))
    sizes = {name: t.numel() for name, t in load(folder).items()}
    assert about["parameters"] == sum(n for name, n in sizes.items() if name not in ("d2t", "t2d"))
    assert about["bytes"] == sum(t.numel() * t.element_size() for t in load(folder).values())
    assert len(about["tensors"]) == len(sizes)
    assert sum(about["dtypes"].values()) == sum(sizes.values())
    assert about["settings"]["hidden_size"] == H
    text = description(head)
    assert f"{about['parameters']:,} parameters" in text
    assert f"hidden_size {H}" in text
    assert (BASE in text) == (head.base_model == BASE)


def test_descriptions_tell_what_is_taken_from_the_target(tmp_path: Path) -> None:
    assert describe(made("target"))["from_target"] == ["the last hidden state, after the final norm", "lm_head"]
    assert describe(read_head(an_eagle(tmp_path / "1")))["from_target"][1:] == ["lm_head"]
    assert describe(read_head(an_eagle3(tmp_path / "3")))["from_target"] == ["hidden_states 2, 4, 5"]
    text = description(read_head(edit(tmp_path / "3", lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))))
    assert "hidden_states 2, L//2 and L-3" in text
    assert "16 of 96 tokens" in text
    assert "note         " in description(read_head(edit(tmp_path / "1", lambda config: config.pop("rope_theta"))))


FITTING = {"hidden_size": H, "vocab_size": VOCAB, "num_layers": LAYERS}


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_a_target_of_another_size(tmp_path: Path, source: str, key: str) -> None:
    head = read_head(MAKERS[source](tmp_path))
    assert check_fits(head, **FITTING) == []
    for other in (FITTING[key] - 1, FITTING[key] + 1):
        with pytest.raises(IncompatibleDrafter, match=f"{key} {FITTING[key]}, and this one has {other}"):
            check_fits(head, **FITTING | {key: other})


def test_a_target_with_too_few_layers(tmp_path: Path) -> None:
    head = read_head(an_eagle3(tmp_path))
    assert check_fits(head, **FITTING | {"num_layers": 6}) == []
    with pytest.raises(IncompatibleDrafter, match="the target has 5 layers"):  # its hidden_states[5] is normalised
        check_fits(head, **FITTING | {"num_layers": 5})


def test_a_head_without_a_list_of_layers(tmp_path: Path) -> None:
    head = read_head(edit(an_eagle3(tmp_path), lambda config: config.pop("eagle_aux_hidden_state_layer_ids")))
    (told,) = check_fits(head, **FITTING)
    assert "[2, 4, 5] are taken" in told
    with pytest.raises(IncompatibleDrafter, match="a target of 6 layers"):
        check_fits(head, **FITTING | {"num_layers": 6})


def test_a_list_that_looks_like_one_by_the_other_convention(tmp_path: Path) -> None:
    """[1, 3, 4] at the top of a config is what ModelOpt would have written into its object, and the other way round."""
    key = "eagle_aux_hidden_state_layer_ids"
    folder = edit(an_eagle3(tmp_path), lambda config: config.update({key: [1, 3, 4]}))
    (told,) = check_fits(read_head(folder), **FITTING)
    assert "if it meant what leaves layers" in told
    assert "layer_ids=(2, 4, 5)" in told
    edit(folder, lambda config: config.update({key: None, "eagle_config": {key: [2, 4, 5]}}))
    (told,) = check_fits(read_head(folder), **FITTING)
    assert "if it meant what enters layers" in told
    edit(folder, lambda config: config.update({"eagle_config": {key: [1, 3, 4]}}))
    assert check_fits(read_head(folder), **FITTING) == []


def test_what_is_doubtful_about_a_pair(tmp_path: Path) -> None:
    head = read_head(a_speculators(tmp_path))
    right: dict[str, Any] = {
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
        "max_position_embeddings": 4096,
        "model": "else/Some-Model-1B",
    }
    assert check_fits(head, **FITTING, **right) == []
    for change, words in [
        ({"rope_theta": 10000.0}, "rope_theta is 500000, the target's 10000"),
        ({"rope_scaling": None}, "rope scaling is llama3, the target's default"),
        ({"max_position_embeddings": 8192}, "trained for 4,096 positions, the target for 8,192"),
        ({"model": "someone/Other-1B"}, f"trained for {BASE}, and the target is someone/Other-1B"),
    ]:
        (told,) = check_fits(head, **FITTING, **right | change)
        assert words in told


class Tokens:
    """As much of a tokenizer as is asked for."""

    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_tokens_of_another_model(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "c": 2}
    head = read_head(an_eagle3(tmp_path))
    assert check_fits(head, **FITTING, tokenizer=Tokens(vocab)) == []
    for model in ({"vocab": vocab}, {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
        assert check_fits(head, **FITTING, tokenizer=Tokens(vocab | {"<added>": 3})) == []
        with pytest.raises(IncompatibleDrafter, match="2 of 3 tokens have other ids, 'b'"):
            check_fits(head, **FITTING, tokenizer=Tokens({"a": 0, "b": 2, "c": 1}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptWeights, match="no tokenizer that can be read"):
        check_fits(head, **FITTING, tokenizer=Tokens(vocab))


def test_written_files_say_what_they_are(tmp_path: Path) -> None:
    """Loaders look for this word."""
    write_head(made("own"), tmp_path / "head", "medusa")
    with safe_open(tmp_path / "head" / heads.MEDUSA_FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
