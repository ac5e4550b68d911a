"""The compiled kernel: a row's bits are the same in any company, and its numbers are the right ones."""

import pytest
import torch
from torch import Tensor

from paceline.kernels import native

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
