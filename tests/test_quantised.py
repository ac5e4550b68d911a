"""Weights in few bits: the packed layout read by numpy, and passes against float64 with the unpacked weights.

The oracle is the unmodified `transformers` model in float64, its weights being what a reader of the documented layout
finds in the packed bytes. Inputs of linear layers are rounded to 8 bits here and keys and values to bf16: these tiny
models then say what the oracle says to 2 or 3% of the logits' spread.
"""

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import oracles
import pytest
import torch
import transformers
from oracles import float64_softmax
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from paceline.cache import KVCache
from paceline.errors import UnsupportedModel
from paceline.kernels import native
from paceline.kernels.quantised import BITS, Quantised, why_not
from paceline.target import HFTarget, visible_slots

needs_tiles = pytest.mark.skipif(
    bool(native.tiles().why), reason=f"no tiles, so nothing in few bits: {native.tiles().why}"
)
GROUP = 32
SCORED = 192
"""Ids: 12 blocks of 16."""

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama with biases": (transformers.LlamaConfig, {"attention_bias": True, "num_key_value_heads": 1}),
    "llama with its rope": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    # The last 8 ids are no whole block: they get no logits, and the large passes run on another kernel.
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "vocab_size": SCORED + 8}),
    "qwen2": (transformers.Qwen2Config, {"hidden_size": 128}),
    "qwen2 with yarn": (
        transformers.Qwen2Config,
        {
            "hidden_size": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64, "tie_word_embeddings": True}),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_WIDTH = pytest.mark.parametrize("bits", BITS)


# -- models and oracles ------------------------------------------------------------------------------------------------


@functools.cache
def plain(kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A random model that nothing of the package touches; biases and norms are random too, so that each counts."""
    made, own = KINDS[kind]
    sizes: dict[str, Any] = {
        "vocab_size": SCORED,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "rms_norm_eps": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if made is not transformers.Qwen2Config:
        sizes["head_dim"] = 32
    config = made(**{**sizes, **own})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
    return model.to(torch.bfloat16).to(dtype)


def loaded(kind: str = "llama") -> HFTarget:
    """The same weights as the package runs them, not quantised yet."""
    return HFTarget(copy.deepcopy(plain(kind)))


@functools.cache
def few(kind: str = "llama", bits: int = 4) -> HFTarget:
    """The same weights, read in few bits where passes are small."""
    target = loaded(kind)
    target.quantise(bits)
    return target


@functools.cache
def exact(kind: str = "llama", bits: int = 16) -> PreTrainedModel:
    """The float64 model; with 4 or 8 bits its linear layers have the unpacked weights."""
    model = copy.deepcopy(plain(kind)).double()
    if bits == 16:
        return model
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            rows = module.weight.shape[0] // 16 * 16
            weight = module.weight.detach().clone()
            weight[:rows] = torch.from_numpy(unpacked(weight[:rows].bfloat16(), bits).weights)
            module.weight = nn.Parameter(weight, requires_grad=False)  # a tied table stays as it was
    return model


@torch.inference_mode()
def expected(kind: str, bits: int, ids: Sequence[int], num_exact: int = 0) -> Tensor:
    """[len(ids) - num_exact, SCORED]: what the oracle says; the first `num_exact` tokens are read in full."""
    cache = DynamicCache()
    call: Any = exact(kind, bits)
    with float64_softmax():
        if num_exact:
            full: Any = exact(kind)
            full(torch.tensor([list(ids[:num_exact])]), cache=cache, use_cache=True)
        rest = torch.tensor([list(ids[num_exact:])])
        return call(rest, cache=cache, use_cache=True).logits[0, :, :SCORED]


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(SCORED) for _ in range(length)]


def read(target: HFTarget, ids: Sequence[int], cache: KVCache, *, logits: bool = True) -> Tensor:
    """Reads a chain in one pass and commits it."""
    size = len(ids)
    seen = target.forward(torch.tensor([list(ids)]), torch.arange(size)[None], None, cache, logits=logits)
    cache.commit([range(size)])
    return seen.logits[0]


def assert_near(found: Tensor, said: Tensor, spread: Tensor) -> None:
    """Logits [N, V] are the oracle's but for rounding, in all, at each position and in what is likeliest."""
    assert found.shape == said.shape
    error = (found.double() - said) / spread.std()
    assert float(error.square().mean().sqrt()) < 0.04
    assert float(error.square().mean(-1).sqrt().max()) < 0.08, f"positions: {error.square().mean(-1).sqrt()}"
    best = found.argmax(-1, keepdim=True)
    # What is likeliest here is at most a little less likely there.
    assert float(((said.amax(-1, keepdim=True) - said.gather(-1, best)) / spread.std()).max()) < 0.3


# -- packing -----------------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """A weight matrix as the layout's documentation reads it, and what it stands for."""

    codes: np.ndarray[Any, Any]
    """[out, groups, 32]"""
    steps: np.ndarray[Any, Any]
    """[out, groups, 1], as `lows`."""
    lows: np.ndarray[Any, Any]
    num_bad: int

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        return (self.lows + self.steps * self.codes).reshape(self.codes.shape[0], -1)


def unpacked(weight: Tensor, bits: int) -> Packed:
    """Has a weight [out, in] packed, and reads the bytes by the description at the top of `draft.c`."""
    out, inner = weight.shape
    blocks, groups, size = out // 16, inner // GROUP, 16 * GROUP * bits // 8 + 2 * 32
    memory = np.full(blocks * groups * size + 256, 0xA5, dtype=np.uint8)
    weight = weight.contiguous()
    num_bad = native.tiles().pack_few(weight, memory.ctypes.data, bits)
    assert (memory[-256:] == 0xA5).all(), "packing wrote beyond the blocks"
    codes = np.zeros((out, groups, GROUP), dtype=np.int64)
    ends = np.zeros((2, out, groups, 1))
    for block in range(blocks):
        for group in range(groups):
            begin = (block * groups + group) * size
            held = memory[begin : begin + size]
            halves = held[-64:].copy().view(np.float16).astype(np.float64)
            lanes = slice(block * 16, block * 16 + 16)
            ends[0, lanes, group, 0], ends[1, lanes, group, 0] = halves[:16], halves[16:]
            lines = held[:-64].reshape(-1, 16, 4)
            for i, line in enumerate(lines):
                if bits == 4:
                    codes[lanes, group, 8 * i : 8 * i + 4] = line & 15
                    codes[lanes, group, 8 * i + 4 : 8 * i + 8] = line >> 4
                else:
                    codes[lanes, group, 4 * i : 4 * i + 4] = line
    return Packed(codes, ends[0], ends[1], num_bad)


def some_weights(name: str) -> Tensor:
    """[48, 160] of a distribution."""
    rng = np.random.default_rng(3)
    shape = (48, 160)
    made = {
        "normal": lambda: rng.normal(size=shape) * 0.03,
        "with outliers": lambda: rng.standard_t(2, size=shape) * 0.02,
        "all on one side": lambda: 1.0 + rng.random(shape) * 0.1,
        "large": lambda: rng.normal(size=shape) * 9000,
        "of many sizes": lambda: rng.normal(size=shape) * 10.0 ** rng.integers(-2, 4, size=(48, 1)),
    }
    return torch.from_numpy(made[name]()).clamp(-59000, 59000).bfloat16()


DISTRIBUTIONS = ("normal", "with outliers", "all on one side", "large", "of many sizes")


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_weight_is_within_half_a_step(name: str, bits: int) -> None:
    weight = some_weights(name)
    packed, exact_weights = unpacked(weight, bits), weight.double().numpy()
    assert packed.num_bad == 0
    assert packed.codes.max() < 2**bits
    error = np.abs(packed.weights - exact_weights).reshape(packed.codes.shape)
    # A bf16 number has 8 digits, half precision has 11: lows are exact, and a step is too short by 2^-11 of itself.
    assert (error <= packed.steps * 0.501).all()
    groups = exact_weights.reshape(packed.codes.shape)
    ranges = np.ptp(groups, axis=-1, keepdims=True)
    least, most = (9, 15) if bits == 4 else (255, 255)
    assert (packed.steps <= ranges / least * (1 + 2**-10)).all()
    assert (packed.steps >= ranges / most * (1 - 2**-10)).all()
    # The simple way: as many steps as there are codes.
    step = ranges / (2**bits - 1)
    simple = groups.min(-1, keepdims=True) + step * np.round((groups - groups.min(-1, keepdims=True)) / step)
    assert (error**2).sum() <= ((simple - groups) ** 2).sum() * (1.001 if bits == 4 else 1.01)  # steps are rounded


@needs_tiles
@pytest.mark.parametrize("levels", range(9, 16))
def test_weights_that_were_4_bits_wide_come_back(levels: int) -> None:
    """Grids of so many steps, not from code 0 to 15; the steps and the numbers on the grid are bf16 numbers."""
    rng = np.random.default_rng(levels)
    codes = rng.integers(0, levels + 1, size=(32, 4, GROUP))
    for row in codes.reshape(-1, GROUP):
        row[rng.choice(GROUP, 2, replace=False)] = 0, levels  # both ends of the grid occur
    steps = rng.choice([1.0, 3.0, 5.0], size=(32, 4, 1)) * 2.0 ** rng.integers(-9, -5, size=(32, 4, 1))
    grid = (codes - rng.integers(0, 16, size=(32, 4, 1))) * steps
    weight = torch.from_numpy(grid.reshape(32, -1)).bfloat16()
    assert (weight.double().numpy() == grid.reshape(32, -1)).all()
    packed = unpacked(weight, 4)
    # 2^-11 of a step is what half precision may take from the step; times up to 15 codes.
    assert (np.abs(packed.weights - grid.reshape(32, -1)).reshape(codes.shape) <= steps * 15 * 2**-11).all()
    assert (packed.codes == codes).mean() > 0.999


@needs_tiles
def test_a_grid_of_any_step_comes_back_to_bf16() -> None:
    """As weights of a 4-bit file do: their steps are any numbers, and loading rounded them to bf16."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, size=(32, 6, GROUP))
    steps = 0.002 * (1 + rng.random((32, 6, 1)))
    grid = ((codes - rng.integers(4, 12, size=(32, 6, 1))) * steps).reshape(32, -1)
    packed = unpacked(torch.from_numpy(grid).bfloat16(), 4)
    error = np.abs(packed.weights - grid).reshape(codes.shape) / steps
    assert error.max() < 0.15  # with another number of steps it is 0.5
    assert error.mean() < 0.02


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 57344.0, 2.0**-13])
def test_constant_groups_are_exact(value: float, bits: int) -> None:
    weight = torch.full((16, 64), value).bfloat16()
    assert (unpacked(weight, bits).weights == weight.double().numpy()).all()


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-30])
def test_small_weights_lose_what_half_precision_lacks_and_no_more(size: float, bits: int) -> None:
    weight = (torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * size).bfloat16()
    packed = unpacked(weight, bits)
    error = np.abs(packed.weights - weight.double().numpy()).reshape(packed.codes.shape)
    unit = 2.0**-24  # what numbers of half precision are multiples of; half of it may be lost in a step and in a low
    assert (error <= packed.steps * 0.501 + unit / 2 * 2**bits).all()


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 70000.0, -1e30])
@pytest.mark.parametrize("place", ["model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj", "lm_head"])
def test_a_weight_that_is_no_number_is_refused(place: str, bad: float, bits: int) -> None:
    model = copy.deepcopy(plain("qwen2"))
    with torch.no_grad():
        model.get_submodule(place).weight[17, 33] = bad
    with pytest.raises(ValueError, match="1 weights are not finite, or too large"):
        Quantised(model, bits)


# -- logits ------------------------------------------------------------------------------------------------------------


WIDTHS = (1, 16, 5, 9, 8, 2, 3, 13, 7, 15, 4, 6, 10, 14, 11, 12)
"""Every width of a pass, 136 tokens together."""


@functools.cache
def by_widths(kind: str, bits: int) -> tuple[list[int], Tensor]:
    """A text read from its first token on in passes of every width: ids and logits."""
    target, ids, found = few(kind, bits), text(sum(WIDTHS)), []
    cache = target.new_cache(1, 0)
    for width in WIDTHS:
        found.append(read(target, ids[cache.lengths[0] :][:width], cache))
    return ids, torch.cat(found)


@needs_tiles
@EACH_KIND
@EACH_WIDTH
def test_a_text_is_read_as_by_the_unpacked_weights(kind: str, bits: int) -> None:
    ids, found = by_widths(kind, bits)
    said = expected(kind, bits, ids)
    assert_near(found, said, said)
    assert float((found.argmax(-1) == said.argmax(-1)).double().mean()) > 0.9


@needs_tiles
@EACH_KIND
def test_8_bits_say_what_the_model_says(kind: str) -> None:
    ids, found = by_widths(kind, 8)
    said = expected(kind, 16, ids)
    assert_near(found, said, said)


@needs_tiles
@EACH_KIND
@EACH_WIDTH
def test_token_by_token_is_the_same_to_the_bit(kind: str, bits: int) -> None:
    """Also across the 64 keys that attention reads at a time."""
    ids, found = by_widths(kind, bits)
    target = few(kind, bits)
    cache = target.new_cache(1, 0)
    assert torch.equal(torch.cat([read(target, [token], cache) for token in ids]), found)


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_rows_of_different_lengths(kind: str, bits: int) -> None:
    """Rows say what they say alone, to the bit, and that is what the oracle says."""
    target, lengths, width = few(kind, bits), (0, 66, 3, 131), 4
    prompts = [text(length, 1) for length in lengths]
    following = [text(width, seed) for seed in range(len(lengths))]
    for rows in ([0, 1, 2, 3], [3, 1], [1, 2, 3]):
        cache = KVCache.join([committed(target, prompts[row]) for row in rows])
        found = target.forward(
            torch.tensor([following[row] for row in rows]), torch.arange(width).repeat(len(rows), 1), None, cache
        ).logits
        for row, logits in zip(rows, found, strict=True):
            assert torch.equal(logits, read(target, following[row], committed(target, prompts[row])))
            said = expected(kind, bits, [*prompts[row], *following[row]], num_exact=lengths[row])
            assert_near(logits, said, expected(kind, bits, text(64)))


def committed(target: HFTarget, prompt: Sequence[int]) -> KVCache:
    """A cache that the model itself has filled, with all its bits."""
    cache = target.new_cache(1, 0)
    if prompt:
        read(target, prompt, cache, logits=False)
    return cache


PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3, 3, 4, 7, 6]
LEVELS = (1, 3, 5, 7, 11, 12)
"""Ends of the passes in which the tree is read."""


def read_tree(target: HFTarget, tokens: list[list[int]], cache: KVCache, levels: Sequence[int] = LEVELS) -> Tensor:
    """The tree's logits [B, N, V], its nodes staged level by level."""
    size = len(PARENTS)
    sees = torch.eye(size, dtype=torch.bool)
    depth = [0] * size
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            sees[node] |= sees[parent]
            depth[node] = depth[parent] + 1
    found, begin = [], 0
    for end in levels:
        ids = torch.tensor([row[begin:end] for row in tokens])
        mask = sees[begin:end, :end].repeat(len(tokens), 1, 1)
        offsets = torch.tensor([depth[begin:end]] * len(tokens))
        found.append(target.forward(ids, offsets, mask, cache).logits)
        begin = end
    return torch.cat(found, 1)


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


@needs_tiles
@EACH_KIND
def test_trees_are_read_path_by_path(kind: str) -> None:
    """A tree staged in six passes behind two prompts: each node says what the oracle says at the end of its path."""
    bits, target, prompts = 8, few(kind, 8), [text(61, 2), text(120, 3)]
    tokens = [text(len(PARENTS), seed) for seed in (4, 5)]
    found = read_tree(target, tokens, KVCache.join([committed(target, prompt) for prompt in prompts]))
    spread = expected(kind, bits, text(64))
    for row, prompt in enumerate(prompts):
        for node in range(len(PARENTS)):
            path = [tokens[row][n] for n in path_to(node)]
            said = expected(kind, bits, [*prompt, *path], num_exact=len(prompt))[-1:]
            assert_near(found[row, node : node + 1], said, spread)


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("length", [0, 1, 57, 63, 64, 65, 127, 130])
def test_whom_nobody_sees_changes_nothing(length: int, bits: int) -> None:
    """Other tokens beside a path leave the bits of its logits alone, however the passes are cut."""
    target, prompt = few("llama", bits), text(length, 6)
    tokens, leaf = text(len(PARENTS), 7), 10
    path = path_to(leaf)
    whole = read_tree(target, [tokens], committed(target, prompt))[0, path]
    others = [token if node in path else (token + 1) % SCORED for node, token in enumerate(tokens)]
    for levels in (LEVELS, (12,), (2, 12), (5, 6, 12)):
        assert torch.equal(read_tree(target, [others], committed(target, prompt), levels)[0, path], whole)


@needs_tiles
def test_what_was_unstaged_leaves_no_trace() -> None:
    target, prompt, rest = few("qwen3", 4), text(62, 8), text(6, 9)
    cache = committed(target, prompt)
    target.forward(torch.tensor([text(9, 10)]), torch.arange(9)[None], None, cache)
    cache.unstage()
    assert torch.equal(read(target, rest, cache), read(target, rest, committed(target, prompt)))


@needs_tiles
def test_the_model_reads_on_from_what_was_read_in_few_bits() -> None:
    """Keys and values go where the model's own passes look for them, in rows of different lengths, too."""
    target, rows, width = few("llama", 8), (text(30, 1), text(75, 2)), 5
    cache = KVCache.join([committed(target, row) for row in rows])
    middle, rest = [text(width, seed) for seed in (3, 4)], [text(20, seed) for seed in (5, 6)]
    target.forward(torch.tensor(middle), torch.arange(width).repeat(2, 1), None, cache)
    cache.commit([range(width)] * 2)
    found = target.forward(torch.tensor(rest), torch.arange(20).repeat(2, 1), None, cache).logits
    for row, before in enumerate(rows):
        ids = [*before, *middle[row], *rest[row]]
        said = expected("llama", 16, ids)
        assert_near(found[row], said[-20:], said)


@needs_tiles
@pytest.mark.parametrize(("kind", "bits"), [("llama with biases", 4), ("qwen3", 8)])  # one head of keys; two heads
def test_any_number_of_threads_forms_the_same_bits(kind: str, bits: int) -> None:
    target, prompts = few(kind, bits), [text(70, 1), text(9, 2)]

    def passes() -> list[Tensor]:
        made = []
        for width in (1, 3, 16):
            made.append(read(target, text(width), committed(target, prompts[0])))
        cache = KVCache.join([committed(target, prompt) for prompt in prompts])
        made.append(
            target.forward(torch.tensor([text(8), text(8, 1)]), torch.arange(8).repeat(2, 1), None, cache).logits
        )
        return made

    alone = passes()
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        for found, said in zip(passes(), alone, strict=True):
            assert torch.equal(found, said)


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_an_embedding_that_is_no_number_stays_by_itself(bad: float, bits: int) -> None:
    """Whoever does not see the token keeps its bits, and the cache holds finite numbers only."""
    prompt, broken = text(20), 5
    tokens = [text(5, 1), text(5, 2)]
    sees = torch.eye(5, dtype=torch.bool)
    sees[:, 0] = True  # a star: leaves see the root and themselves
    target = loaded("qwen2")
    target.quantise(bits)
    found = []
    for row in (tokens[0], [*tokens[0][:2], broken, *tokens[0][3:]]):
        if row[2] == broken:
            with torch.no_grad():
                target.model.get_input_embeddings().weight[broken, 3:70] = bad
        cache = KVCache.join([committed(target, prompt), committed(target, prompt)])
        offsets = torch.tensor([[0, 1, 1, 1, 1]] * 2)
        found.append(target.forward(torch.tensor([row, tokens[1]]), offsets, sees.repeat(2, 1, 1), cache).logits)
        assert all(bool(buffer.isfinite().all()) for pair in cache.buffers(2, 2, 32, torch.bfloat16) for buffer in pair)
    unseen = [0, 1, 3, 4]
    assert broken not in [*prompt, *tokens[0], *tokens[1]]
    assert torch.equal(found[0][0, unseen], found[1][0, unseen])
    assert torch.equal(found[0][1], found[1][1])


# -- fewer ids ---------------------------------------------------------------------------------------------------------


@needs_tiles
@EACH_WIDTH
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_first_ids_alone(kind: str, bits: int) -> None:
    target, prompt = loaded(kind), text(30)
    target.quantise(bits)
    assert target.num_scored == SCORED
    ids = text(9, 1)
    whole = read(target, ids, committed(target, prompt))
    assert whole.shape == (9, SCORED)
    for wished, given in ((16, 16), (17, 16), (1, 16), (100, 96), (191, 176), (192, 192), (500, 192), (None, 192)):
        target.quantise(bits, wished)
        assert target.num_scored == given
        assert torch.equal(read(target, ids, committed(target, prompt)), whole[:, :given])


@needs_tiles
def test_bits_may_be_changed() -> None:
    target, ids = loaded("llama"), text(9)
    assert target.num_scored == target.vocab_size
    for bits in (4, 8, 4):
        target.quantise(bits, 64)
        assert torch.equal(
            read(target, ids, target.new_cache(1, 0)), read(few("llama", bits), ids, target.new_cache(1, 0))[:, :64]
        )


@needs_tiles
def test_4_bits_are_read_instead_of_8_and_of_16() -> None:
    """Bytes that a pass reads: 4.5 or 9 bits to a weight instead of 16... of all but the embeddings and norms."""
    weights = sum(m.weight.numel() for m in plain("qwen2").modules() if isinstance(m, nn.Linear))
    for bits in BITS:
        assert weights * (bits + 1) / 8 <= few("qwen2", bits).few.nbytes < weights * (bits + 1) / 8 + 60_000


# -- where it does not apply -------------------------------------------------------------------------------------------


def config_of(name: str) -> PreTrainedModel:
    """A model that cannot be copied in few bits."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made: dict[str, Any] = {
        "gelu": lambda: transformers.LlamaConfig(**sizes, hidden_act="gelu"),
        "biases": lambda: transformers.LlamaConfig(**sizes, mlp_bias=True),
        "small heads": lambda: transformers.LlamaConfig(**sizes, head_dim=16),
        "odd heads": lambda: transformers.LlamaConfig(**sizes, head_dim=48),
        "odd width": lambda: transformers.LlamaConfig(**{**sizes, "hidden_size": 80}, head_dim=32),
        "odd inner width": lambda: transformers.LlamaConfig(**{**sizes, "intermediate_size": 112}),
        "qwen2 windows": lambda: transformers.Qwen2Config(
            **sizes, use_sliding_window=True, sliding_window=8, max_window_layers=0
        ),
        "mistral windows": lambda: transformers.MistralConfig(**sizes, sliding_window=8),
        "fits": lambda: transformers.LlamaConfig(**sizes),
    }
    model = transformers.AutoModelForCausalLM.from_config(made[name](), attn_implementation="eager")
    return model.to(torch.bfloat16).eval()


@needs_tiles
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gelu", "its activation is gelu"),
        ("biases", "biases in other places"),
        ("small heads", "its heads have 16 numbers"),
        ("odd heads", "its heads have 48 numbers"),
        ("odd width", "not in whole groups of 32"),
        ("odd inner width", "not in whole groups of 32"),
        ("qwen2 windows", "sliding window"),
        ("mistral windows", "sliding window"),
    ],
)
def test_the_reason_is_named(name: str, reason: str) -> None:
    model = config_of(name)
    assert reason in why_not(model)
    target = HFTarget(model)
    with pytest.raises(UnsupportedModel, match=f"no weights in 4 bits here: .*{reason}.*leave draft_dtype out"):
        target.quantise(4)
    assert target.few is None


@needs_tiles
@pytest.mark.parametrize("arch", ["gemma3", "gpt2", "phi"])
def test_other_types_are_named(arch: str) -> None:
    model = oracles.tiny(arch, dtype=torch.bfloat16)
    assert f"model type {model.config.model_type!r} is none of llama" in why_not(model)
    with pytest.raises(UnsupportedModel, match="model type"):
        HFTarget(model).quantise(8)


@needs_tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_dtypes_are_named(dtype: torch.dtype) -> None:
    model = config_of("fits")
    assert why_not(model) == ""
    assert f"weights are {str(dtype)[6:]} on cpu, not bfloat16" in why_not(model.to(dtype))


def test_a_machine_without_the_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "tiles", lambda: native.Tiles(None, "the CPU lacks amx_tile"))
    model = config_of("fits")
    assert why_not(model) == "the CPU lacks amx_tile"
    with pytest.raises(UnsupportedModel, match="the CPU lacks amx_tile"):
        HFTarget(model).quantise(4)


@needs_tiles
@pytest.mark.parametrize("wide", [False, True], ids=["one row", "two rows"])
def test_only_few_tokens_are_read_in_few_bits(wide: bool) -> None:
    """Larger passes, taps and passes without logits are the model's, to the bit."""
    mine, whole = few("qwen2", 4), loaded("qwen2")
    rows, most = (2, 8) if wide else (1, 16)

    def both(width: int, taps: Sequence[int] = (), *, logits: bool = True) -> list[tuple[Any, KVCache]]:
        ids = torch.tensor([text(width, seed) for seed in range(rows)])
        made = []
        for target in (mine, whole):
            cache = KVCache.join([committed(target, text(20)) for _ in range(rows)])
            offsets = torch.arange(width).repeat(rows, 1)
            made.append((target.forward(ids, offsets, None, cache, taps, logits=logits), cache))
        return made

    def keys(cache: KVCache) -> Tensor:
        return torch.stack([torch.stack(pair) for pair in cache.buffers(2, 2, 32, torch.bfloat16)])

    (few_bits, _), (all_bits, _) = both(most)
    assert not torch.equal(few_bits.logits, all_bits.logits.float())
    assert few_bits.hidden is None
    for width, taps, logits in ((most + 1, (), True), (3, (1, 2), True), (3, (), False)):
        (found, cache), (said, other) = both(width, taps, logits=logits)
        assert torch.equal(found.logits, said.logits)
        assert torch.equal(keys(cache), keys(other))
        assert (found.hidden is None) == (not taps)
        if taps:
            assert torch.equal(found.hidden, said.hidden)


@needs_tiles
def test_a_pass_may_be_asked_for_by_itself() -> None:
    """`Quantised` needs no target: any cache that shows whole blocks of keys will do."""
    model, ids = copy.deepcopy(plain("qwen3")), text(9)
    cache, offsets = KVCache(1, 256, block=native.KEYS), torch.arange(9)[None]
    lengths = torch.zeros(1, 1, dtype=torch.int64)
    found = Quantised(model, 8).forward(
        torch.tensor([ids]), offsets, lambda: visible_slots(lengths, offsets, None, cache), cache
    )
    assert cache.staged == 9
    assert torch.equal(found[0], read(few("qwen3", 8), ids, few("qwen3", 8).new_cache(1, 0)))
