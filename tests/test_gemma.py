"""Gemma-3 from GGUF files: settings, weights, SentencePiece's rule; and the real 270M model as a target.

Oracles: a `transformers` model that the test itself writes as llama.cpp's converter does, SentencePiece's rule as a
loop over scores, path-by-path logits without a cache, and `transformers.generate`.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from oracles import assert_close, logits_of
from torch import Tensor

from paceline import LLM, SamplingParams, models
from paceline.cache import KVCache
from paceline.errors import UnsupportedModel
from paceline.gguf_file import Header, read_header
from paceline.gguf_import import config_of, end_ids
from paceline.gguf_tokenizer import sentencepiece, write_tokenizer
from paceline.kernels import native
from paceline.target import HFTarget
from paceline.tree import TokenTree, stack

WINDOW = 4
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


# -- SentencePiece's rule ----------------------------------------------------------------------------------------------


class Vocabulary(NamedTuple):
    """The three lists that a GGUF file holds."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]


def vocabulary(seed: int = 0, num_pieces: int = 60, letters: str = "ab\u00e9\u2581") -> Vocabulary:
    """Gemma's order: control tokens, user-defined ones, bytes, then pieces, which are joined at random from others."""
    chance = random.Random(seed)
    pieces = list(letters)
    while len(pieces) < num_pieces:
        joined = chance.choice(pieces) + chance.choice(pieces)
        if joined not in pieces and len(joined) < 7 and joined.strip("\u2581"):
            pieces.append(joined)
    chance.shuffle(pieces)
    rows = [(t, -1000.0, CONTROL) for t in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")]
    rows[3] = ("<unk>", -1000.0, UNKNOWN)
    rows += [(t, -1000.0, USER) for t in ("\n", "\n\n", "\n\n\n", "  ", "   ", "<table>")]
    rows += [(f"<0x{byte:02X}>", -1000.0, BYTE) for byte in range(256)]
    ranks = chance.sample(range(2 * len(pieces)), len(pieces))
    rows += [(piece, float(-rank), NORMAL) for piece, rank in zip(pieces, ranks, strict=True)]
    return Vocabulary(*(list(column) for column in zip(*rows, strict=True)))  # type: ignore[arg-type]


class ByScores:
    """SentencePiece's BPE as it is described: join the best neighbours, the leftmost of equals, until none are left."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        spelled = [token.replace(" ", "\u2581") for token in vocabulary.tokens]
        self.ids = {token: i for i, token in enumerate(spelled)}
        self.scores = {t: s for t, s, kind in zip(spelled, *vocabulary[1:], strict=True) if kind == NORMAL}
        user = [token for token, kind in zip(spelled, vocabulary.kinds, strict=True) if kind == USER]
        self.whole = sorted(user, key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        text, found, loose = text.replace(" ", "\u2581"), [], ""
        while text:
            whole = next((token for token in self.whole if text.startswith(token)), "")
            if whole:
                found += [*self.join(loose), self.ids[whole]]
                loose = ""
            else:
                loose += text[0]
            text = text[max(1, len(whole)) :]
        return found + self.join(loose)

    def join(self, text: str) -> list[int]:
        parts = list(text)
        while True:
            pairs = [(a + b, i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in self.scores]
            if not pairs:
                break
            best, at = min(pairs, key=lambda pair: (-self.scores[pair[0]], pair[1]))
            parts[at : at + 2] = [best]
        known = [[part] if part in self.scores else [f"<0x{b:02X}>" for b in part.encode()] for part in parts]
        return [self.ids[part] for spelled in known for part in spelled]


def texts(seed: int, count: int, alphabet: str, longest: int = 40) -> Iterable[str]:
    chance = random.Random(seed)
    for _ in range(count):
        yield "".join(chance.choice(alphabet) for _ in range(chance.randint(1, longest)))


# -- a small model and its file ----------------------------------------------------------------------------------------

STORED = {  # llama.cpp's names, by hand
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
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
    if module.startswith("model.layers."):
        _, _, layer, inside = module.split(".", 3)
        return f"blk.{layer}.{STORED[inside]}.{leaf}"
    return f"{STORED[module]}.{leaf}"


def tiny(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Seven layers, so that one sees everything; one K/V head, heads wider than hidden / heads; values of bf16."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary().tokens),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "bos_token_id": 2,
        "eos_token_id": 5,
    }
    with torch.random.fork_rng():
        config = Gemma3TextConfig(**settings | changes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
        torch.manual_seed(3)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_((torch.randn(weight.shape) * 0.3).bfloat16())
    return model


def write_gguf(path: Path, model: Any, extra: Callable[[Any], None] = lambda writer: None) -> None:
    """The model as llama.cpp's converter writes it."""
    import gguf

    config, found = model.config, vocabulary()
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(found.tokens)
    writer.add_token_scores(found.scores)
    writer.add_token_types(found.kinds)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(5)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    extra(writer)
    for weight, tensor in model.state_dict().items():
        if weight != "lm_head.weight":
            raised = "norm" in weight  # the converter folds the 1 of Gemma's norms in
            writer.add_tensor(stored_name(weight), tensor.numpy() + np.float32(raised))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gemma") / "tiny.gguf"
    write_gguf(path, tiny())
    return path


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_HOME", str(tmp_path_factory.mktemp("home")))
        return models.resolve(file).path


# -- settings and weights ----------------------------------------------------------------------------------------------


def linear(writer: Any) -> None:
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "global layers scaled"])
def test_gguf_gives_back_the_model_it_was_written_from(
    scaled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    everywhere: dict[str, Any] = {"rope_type": "default", "rope_theta": 1_000_000.0}
    if scaled:
        everywhere |= {"rope_type": "linear", "factor": 8.0}
    window = {"rope_type": "default", "rope_theta": 10_000.0}
    original = tiny(rope_parameters={"full_attention": everywhere, "sliding_attention": window})
    write_gguf(tmp_path / "m.gguf", original, linear if scaled else lambda writer: None)
    loaded = models.load_model(tmp_path / "m.gguf", dtype="float32")
    assert loaded.state_dict().keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert loaded.config.layer_types == original.config.layer_types
    assert loaded.config.layer_types.index("full_attention") == 5
    assert loaded.config.rope_parameters == original.config.rope_parameters
    loaded.set_attn_implementation("eager")  # as the original
    ids = torch.arange(40)[None]
    assert torch.equal(loaded(ids).logits, original(ids).logits)


def changed(header: Header, **settings: Any) -> Header:
    """The header with other settings; underscores stand for dots, and None takes a setting out."""
    metadata = header.metadata | {key.replace("__", "."): value for key, value in settings.items()}
    return replace(header, metadata={key: value for key, value in metadata.items() if value is not None})


def test_queries_of_the_27b_model_are_scaled_by_their_share_of_the_width(file: Path) -> None:
    header = read_header(file)
    assert config_of(header).query_pre_attn_scalar == 16
    assert config_of(changed(header, gemma3__block_count=62)).query_pre_attn_scalar == 32 // 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gemma3__attention__sliding_window": None}, "sliding window is 0"),
        ({"gemma3__attention__sliding_window": 0}, "sliding window is 0"),
        ({"gemma3__attention__sliding_window_pattern": 4}, "with pattern 4, not with pattern 6"),
        ({"gemma3__final_logit_softcapping": 30.0}, "caps its logits"),
        ({"gemma3__attn_logit_softcapping": 50.0}, "caps its logits"),
        ({"gemma3__rope__freq_base": None}, "rotary settings"),
        ({"gemma3__rope__scaling__type": "yarn"}, "rotary scaling is 'yarn'"),
        ({"gemma3__attention__value_length": 8}, "parts of different widths"),
        ({"gemma3__attention__key_length": None}, "parts of different widths"),
        ({"gemma3__vision__block_count": 27}, r"nothing is known about its settings vision\.block_count"),
        ({"gemma3__attention__scale": 0.5}, r"nothing is known about its settings attention\.scale"),
        ({"gemma3__attention__head_count": 5, "gemma3__attention__head_count_kv": 1}, "do not fit together"),
        ({"gemma3__feed_forward_length": [64] * 7}, "gives one per layer"),
        ({"gemma3__expert_count": 8}, "mixture of experts"),
    ],
)
def test_settings_that_change_the_forward_are_refused(settings: dict[str, Any], said: str, file: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"tiny.gguf cannot be converted.*{said}.*safetensors folder or hub id"):
        config_of(changed(read_header(file), **settings))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_sinks.weight", "v.patch_embd.weight"])
def test_tensors_that_are_no_part_of_the_model_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    write_gguf(tmp_path / "m.gguf", tiny(), lambda writer: writer.add_tensor(name, np.ones(8, np.float32)))
    with pytest.raises(UnsupportedModel, match="rotary settings" if name.startswith("rope") else name):
        models.resolve(tmp_path / "m.gguf")


def test_what_ends_generation(file: Path) -> None:
    """The file names the end of a turn; the end of a text, by its name, counts too."""
    assert end_ids(read_header(file)) == [5, 1]


# -- the tokenizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_those_of_the_best_joins(seed: int, file: Path) -> None:
    """Spaces, line ends, user-defined runs of both, and characters that are no piece among the letters."""
    found = vocabulary(seed)
    keys = ("tokens", "scores", "token_type")
    header = changed(read_header(file), **{f"tokenizer__ggml__{k}": v for k, v in zip(keys, found, strict=True)})
    tokenizer, oracle = sentencepiece(header), ByScores(found)
    joined = 0
    for text in texts(seed, 60, "aaabbb\u00e9  \n\u00e8\U0001f600"):
        ids = oracle.encode(text)
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == text
        joined += sum(found.kinds[i] == NORMAL and len(found.tokens[i]) > 1 for i in ids)
    assert joined > 20


def test_special_tokens_are_one_id_and_bytes_are_text(folder: Path) -> None:
    tokenizer = models.load_tokenizer(folder)
    oracle = ByScores(vocabulary())
    text = "<start_of_turn>a  b<table><end_of_turn>"
    assert tokenizer(text).input_ids == [2, 4, *oracle.encode("a  b<table>"), 5]
    assert oracle.encode("<table>") == [11]
    literal = "<0x41>"  # the text of a byte token is no byte
    assert tokenizer(literal).input_ids == [2, *oracle.encode(literal)]
    assert tokenizer.decode(tokenizer(literal).input_ids, skip_special_tokens=True) == literal
    assert tokenizer.convert_tokens_to_ids("A") is None or tokenizer.tokenize("A") == ["<0x41>"]


def test_a_chat_begins_once(folder: Path) -> None:
    tokenizer = models.load_tokenizer(folder)
    messages = [{"role": "user", "content": "ab"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    oracle = ByScores(vocabulary())
    said = [4, *oracle.encode("user\nab"), 5, *oracle.encode("\n"), 4, *oracle.encode("model\n")]
    assert ids == [2, *said]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 5, 0)


SAID = "tokenizer__ggml__"
FOUND = vocabulary()
SHORTER = {SAID + key: found[1:] for key, found in zip(("tokens", "scores", "token_type"), FOUND, strict=True)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({SAID + "model": "gpt2"}, "not SentencePiece's BPE"),
        ({SAID + "add_space_prefix": True}, "not SentencePiece's BPE"),
        ({SAID + "add_space_prefix": None}, "not SentencePiece's BPE"),
        ({SAID + "remove_extra_whitespaces": True}, "not SentencePiece's BPE"),
        ({SAID + "scores": None}, "lacks a text, a score or a kind"),
        ({SAID + "scores": FOUND.scores[1:]}, "lacks a text, a score or a kind"),
        ({SAID + "token_type": FOUND.kinds[1:]}, "lacks a text, a score or a kind"),
        (SHORTER, "its embedding has"),
        ({SAID + "tokens": [*FOUND.tokens[:-1], FOUND.tokens[-2]]}, "the same text"),
        ({SAID + "tokens": ["x" if t == "<0x41>" else t for t in FOUND.tokens]}, "one token for each byte"),
        ({SAID + "token_type": [*FOUND.kinds[:-1], 5]}, "tokens of kind 5"),
        ({SAID + "tokens": [*FOUND.tokens[:-1], "a\u00fc"]}, "characters that are no pieces"),
        ({SAID + "scores": [-1.0] * len(FOUND.scores)}, "two pieces the same score"),
        ({SAID + "scores": [*FOUND.scores[:-1], float("nan")]}, "the same score, or one none"),
        ({SAID + "bos_token_id": None}, "names no token that begins a text"),
        ({SAID + "eos_token_id": 100_000}, "cannot be rebuilt"),
    ],
)
def test_vocabularies_that_mean_something_else_are_refused(
    settings: dict[str, Any], said: str, file: Path, tmp_path: Path
) -> None:
    header = read_header(file)
    with pytest.raises(UnsupportedModel, match=f"tiny.gguf cannot be converted.*{said}"):
        write_tokenizer(changed(header, **settings), config_of(header), tmp_path)


# -- as a target -------------------------------------------------------------------------------------------------------


def a_tree(size: int, chance: random.Random, vocab: int) -> TokenTree:
    parents = [-1, *(chance.randrange(node) for node in range(1, size))]
    return TokenTree(torch.tensor([chance.randrange(vocab) for _ in parents]), torch.tensor(parents))


def read(target: HFTarget, cache: KVCache, tree: TokenTree) -> Tensor:
    """[nodes, V]: logits in the order of the nodes; the tree stays staged."""
    stacked = stack([tree])
    seen = target.forward(stacked.tokens, stacked.offsets, stacked.mask, cache).logits[0]
    return seen[stacked.slots[0]]


def filled(target: HFTarget, ids: Sequence[int]) -> KVCache:
    cache = target.new_cache(1, len(ids) + 64)
    target.forward(torch.tensor([list(ids)]), torch.arange(len(ids))[None], None, cache, logits=False)
    cache.commit([range(len(ids))])
    return cache


@pytest.mark.parametrize("length", [1, 3, 4, 5, 6, 30])  # on both sides of the window of 4
def test_trees_of_a_converted_model_are_its_paths(length: int, folder: Path) -> None:
    """Also after a rollback over the window's edge: a path is kept, the rest of the tree dropped, and a tree read."""
    target, plain, chance = (
        HFTarget(models.load_model(folder, dtype="float64")),
        tiny(torch.float64),
        random.Random(length),
    )
    vocab = target.vocab_size
    ids = [chance.randrange(vocab) for _ in range(length)]
    cache = filled(target, ids)
    for _ in range(2):
        tree = a_tree(12, chance, vocab)
        logits = read(target, cache, tree)
        for node in range(tree.num_nodes):
            assert_close(logits[node], logits_of(plain, [*ids, *(tree.ids[n] for n in tree.path(node))])[-1])
        kept = tree.path(tree.num_nodes - 1)[:-1]
        slots = stack([tree]).slots[0]
        cache.commit([[slots[node] for node in kept]])
        ids += [tree.ids[node] for node in kept]


@pytest.mark.skipif(bool(native.tiles().why), reason=f"no tiles: {native.tiles().why}")
@pytest.mark.parametrize("length", [40, 69, 130])  # before, at and behind the edge of a window of 70
def test_heads_of_256_on_tiles_have_the_same_bits_in_trees(length: int) -> None:
    """As in the real models: one K/V head of 256, windows that end inside a block of 64 keys."""
    wide = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 256, "query_pre_attn_scalar": 256}
    target = HFTarget(tiny(torch.bfloat16, **wide, vocab_size=320, sliding_window=70))
    assert target.kernel.tile_attention
    assert target.kernel.width >= 24
    chance = random.Random(length)
    ids = [chance.randrange(320) for _ in range(length)]
    cache = filled(target, ids)
    tree = a_tree(12, chance, 320)
    logits = read(target, cache, tree)
    for node in range(tree.num_nodes):
        cache.truncate(0, length)
        for token in (tree.ids[n] for n in tree.path(node)):
            alone = read(target, cache, TokenTree.chain(token, []))[0]
            cache.commit([[0]])
        assert torch.equal(logits[node], alone)


# -- the real 270M model -----------------------------------------------------------------------------------------------

NAME = "gemma-3-270m-q4_k_m"
STORY = "The lighthouse keeper wrote the same three lines in his book every evening: the wind, the ships, the lamp. "


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The named model, fetched on first use."""
    return Path(models.resolve(NAME).path)


@pytest.fixture(scope="module")
def tokenizer(gemma: Path) -> Any:
    return models.load_tokenizer(gemma)


@pytest.fixture(scope="module")
def story(tokenizer: Any) -> list[int]:
    """More than two windows of a text that does not repeat itself from the first line to the last."""
    ids = tokenizer("".join(f"{n}. {STORY.replace('three', str(n))}" for n in range(60))).input_ids
    assert len(ids) > 1200
    return list(ids)


@pytest.mark.real
def test_the_named_model_reads_text_as_gemma_does(tokenizer: Any) -> None:
    assert tokenizer("Hello, world!").input_ids == [2, 9259, 236764, 1902, 236888]
    assert tokenizer("<start_of_turn>user\n").input_ids == [2, 105, 2364, 107]
    assert tokenizer.chat_template is None  # the base model
    alphabet = "ab \u00e9\n\t\u0928\u092e\u4e16\u754c\U0001f600\U00010348\u200d\u0000\x7f<_>"
    for text in texts(0, 300, alphabet):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    rare = tokenizer("\U00010348\u0000", add_special_tokens=False)
    assert rare.tokens() == ["<0xF0>", "<0x90>", "<0x8D>", "<0x88>", "<0x00>"]


@pytest.mark.real
def test_the_real_vocabulary_gives_the_best_joins(tokenizer: Any, gemma: Path) -> None:
    file = gemma.parent.parent / "files" / f"{NAME}.gguf"
    if not file.is_file():
        pytest.skip("the GGUF file was deleted after its conversion")
    metadata = read_header(file).metadata
    oracle = ByScores(Vocabulary(*(metadata[f"tokenizer.ggml.{k}"] for k in ("tokens", "scores", "token_type"))))
    source = Path(__file__).read_text(encoding="utf-8")
    chance = random.Random(0)
    pieces = [source[at : at + 120] for at in (chance.randrange(len(source)) for _ in range(200))]
    runs = ["".join(letter * chance.randint(1, 9) for letter in chance.choices("ab-= \n\t0", k=12)) for _ in range(200)]
    for text in [*pieces, *runs]:
        if not any(token in text for token in ("<unk>", "<pad>", "<bos>", "<eos>", "_of_turn>")):
            assert tokenizer(text, add_special_tokens=False).input_ids == oracle.encode(text), text


@pytest.mark.real
def test_greedy_text_is_that_of_transformers_behind_the_window(gemma: Path, story: list[int]) -> None:
    """In float32, with and without speculation, over the window's edge and two windows on."""
    from transformers import AutoModelForCausalLM

    llm = LLM(gemma, dtype="float32")
    plain: Any = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for length in (505, 640, 1150):
        prompt = story[:length]
        with torch.inference_mode():
            expected = plain.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, length:].tolist()
        for config in (None, {"method": "suffix"}):
            (output,) = llm.generate([prompt], params, speculative_config=config)
            assert output.token_ids == expected
    assert llm.generate(["def add(a, b):\n    return"], params)[0].text.startswith(" a + b")


@pytest.mark.real
@pytest.mark.parametrize("length", [505, 700])  # across the window's edge, and behind it
def test_trees_have_the_bits_of_plain_decoding_in_bfloat16(length: int, gemma: Path, story: list[int]) -> None:
    target = HFTarget(models.load_model(gemma, dtype="bfloat16"))
    if target.kernel.width < 24:
        pytest.skip(f"no promise on this machine: {target.kernel.note or target.kernel.name}")
    cache = filled(target, story[:length])
    path = story[length : length + 12]
    others = [[*path[:at], (path[at] + 1) % 1000, 11] for at in range(2, 12, 3)]
    tree = TokenTree.from_paths(path[0], [path[1:], *(other[1:] for other in others)])
    logits = read(target, cache, tree)
    for ids in (path, *others):
        cache.truncate(0, length)
        node = next(n for n in range(tree.num_nodes) if [tree.ids[i] for i in tree.path(n)] == ids)
        for at in tree.path(node):
            alone = read(target, cache, TokenTree.chain(tree.ids[at], []))[0]
            cache.commit([[0]])
            assert torch.equal(logits[at], alone)
