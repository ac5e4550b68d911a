"""The compiled kernel: a row's bits are the same in any company, and its numbers are the right ones."""

import functools
import random
from typing import Any

import pytest
import torch
from oracles import requests, tiny
from torch import Tensor

from paceline.cache import KVCache
from paceline.decode import run
from paceline.draft.model import DraftModel
from paceline.kernels import native
from paceline.target import HFTarget
from paceline.testing import ScriptedTree
from paceline.tree import TokenTree, stack

ROWS = (1, 15, 16, 17, 31, 33, 64, 65, 100, 129, 255, 257, 300, 512)
SHAPES = {
    "a block": (32, 32),
    "half a block more": (80, 96),
    "several parts from 256 rows on": (48, 2080),
    "several parts from 128 rows on": (112, 4160),
}

pytestmark = pytest.mark.skipif(bool(native.tiles().why), reason=f"no tiles: {native.tiles().why}")


def a_layer(out: int, inner: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight, bias."""
    generator = torch.Generator().manual_seed(out)
    shapes = (rows, inner), (out, inner), (out,)
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_has_the_same_bits_at_any_width(shape: tuple[int, int], biased: bool) -> None:
    x, weight, bias = a_layer(*shape, 513)
    tiles, add = native.tiles(), bias if biased else None
    whole = tiles.linear(x, weight, add)
    for rows in ROWS:
        assert torch.equal(tiles.linear(x[:rows], weight, add), whole[:rows])
        assert torch.equal(tiles.linear(x[-rows:], weight, add), whole[-rows:])


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_whoever_takes_a_block_forms_the_same_bits(threads: int) -> None:
    x, weight, bias = a_layer(272, 4160, 300)
    alone = native.tiles().linear(x, weight, bias)
    torch.set_num_threads(threads)
    for rows in (1, 24, 64, 129, 300) * 4:
        assert torch.equal(native.tiles().linear(x[:rows], weight, bias), alone[:rows])


@pytest.mark.parametrize("rows", [1, 17, 64, 129, 300])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_numbers_are_those_of_float64(shape: tuple[int, int], rows: int) -> None:
    x, weight, bias = a_layer(*shape, rows)
    exact = x.double() @ weight.double().t() + bias.double()
    scale = shape[1] ** 0.5
    torch.testing.assert_close(native.tiles().linear(x, weight, bias).double(), exact, rtol=2**-8, atol=scale * 1e-5)


def test_no_rows_are_no_work() -> None:
    x, weight, bias = a_layer(32, 64, 0)
    assert native.tiles().linear(x, weight, bias).shape == (0, 32)


# -- trees -------------------------------------------------------------------------------------------------------------


WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "vocab_size": 96}
"""Sizes in whole tiles."""


@functools.cache
def bf16(arch: str, **more: Any) -> HFTarget:
    target = HFTarget(tiny(arch, 0, torch.bfloat16, **WIDE, **dict(more)))
    assert target.kernel.tile_attention
    assert target.kernel.width == 64
    return target


def one_by_one(target: HFTarget, cache: KVCache, row: int, path: list[int]) -> Tensor:
    """Logits after a path that is read token by token behind what a row holds."""
    length = cache.lengths[row]
    alone = target.new_cache(1, length + len(path))
    alone.load(cache.copy_row(row, length), length)
    for token in path:
        logits = target.forward(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64), None, alone).logits[0, 0]
        alone.commit([[0]])
    return logits


@pytest.mark.parametrize(
    ("arch", "more"),
    [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 5}), ("llama", {"num_key_value_heads": 4})],
    ids=["llama", "qwen3", "window of 5", "no groups"],
)
@pytest.mark.parametrize("length", [1, 30, 60, 63, 64, 100, 190])
def test_every_node_of_a_tree_has_the_bits_of_plain_decoding(length: int, arch: str, more: dict[str, int]) -> None:
    """Also beside another row that is shorter, behind blocks of 64 keys, and in rows of several tiles."""
    target, chance = bf16(arch, **more), random.Random(f"{arch} {length}")
    prompt = [chance.randrange(96) for _ in range(length)]
    cache = target.new_cache(2, 256)
    target.forward(torch.tensor([prompt, prompt]), torch.arange(length).repeat(2, 1), None, cache, logits=False)
    cache.commit([range(length), range(max(1, length - 7))])
    trees = []
    for size in (3, 9):
        spine = [chance.randrange(96) for _ in range(5)]
        paths = [
            spine[: chance.randrange(6)] + [chance.randrange(96) for _ in range(chance.randint(1, 3))]
            for _ in range(size)
        ]
        trees.append(TokenTree.from_paths(7, [spine, *paths]).truncate(31))
    assert not any(tree.is_chain for tree in trees)
    stacked = stack(trees)
    logits = target.forward(stacked.tokens, stacked.offsets, stacked.mask, cache).logits
    cache.unstage()
    for row, tree in enumerate(trees):
        for node in range(tree.num_nodes):
            path = [tree.ids[above] for above in tree.path(node)]
            assert torch.equal(logits[row, stacked.slots[row][node]], one_by_one(target, cache, row, path))


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_trees_write_what_plain_decoding_writes_in_bfloat16(settings: dict[str, Any]) -> None:
    target, chance = bf16("llama"), random.Random(5)
    prompts = [[chance.randrange(96) for _ in range(n)] for n in (1, 9, 58, 120)]
    wild = ScriptedTree(lambda ids: [[(ids[-1] * k + d) % 96 for d in range(4)] for k in range(1, 6)])

    def texts(drafter: Any) -> list[list[int]]:
        rows = requests(target, prompts, drafter, max_tokens=40, budget=15, **settings)
        for _ in run(target, rows):
            pass
        return [row.output_ids for row in rows]

    drafted = texts(DraftModel(bf16("qwen3"), tree_top_k=3, depth=3))
    assert texts(None) == texts(wild) == drafted
