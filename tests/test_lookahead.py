"""Lookahead against the loop without a cache: its text, and what the target writes behind every window token."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracles import VOCAB, Spy, Table, answer, decode, logits_of, plain, prompt_of, requests, target

from paceline.decode import run
from paceline.draft import SpeculativeConfig
from paceline.draft.base import Step
from paceline.draft.compose import Compose
from paceline.draft.costs import TILES, Costs
from paceline.draft.early_exit import EarlyExit
from paceline.draft.lookahead import Lookahead, Trail, fitting
from paceline.draft.suffix import Suffix
from paceline.errors import BadRequest
from paceline.testing import check_drafter

PROMPTS = [prompt_of(length) for length in (1, 2, 9, 30)]
SIZES = [(7, 5, 7), (3, 4, 2), (1, 2, 1), (5, 2, 3), (2, 6, 1)]
MODES = pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)


@MODES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_text_is_the_reference(sizes: tuple[int, int, int], settings: dict[str, Any]) -> None:
    rows = decode(target(), PROMPTS, Lookahead(*sizes), max_tokens=30, **settings)
    assert [row.output_ids for row in rows] == [answer(p, 30, **settings).ids for p in PROMPTS]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_every_check_passes(sizes: tuple[int, int, int]) -> None:
    check_drafter(lambda: Lookahead(*sizes)).verify()


class Watched(Lookahead):
    """Writes down each window, the text it went along with, and what the target said behind it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.text: list[int] = []
        self.seen: list[tuple[list[int], list[list[int]], torch.Tensor]] = []

    def observe(self, states: list[Trail], steps: list[Step]) -> None:
        (trail,), (step,) = states, steps
        if step.rider_logits is not None:
            self.seen.append((list(self.text), [list(row) for row in trail.window], step.rider_logits))
        self.text += step.following
        super().observe(states, steps)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_window_tokens_see_their_own_past_and_nothing_else(sizes: tuple[int, int, int]) -> None:
    """Each row of logits is what the target says behind the text, the oldest row up to the column, and the diagonal."""
    prompt, watched = prompt_of(11), Watched(*sizes)
    watched.text = list(prompt)
    decode(target(), [prompt], watched, max_tokens=12 + sizes[0] + sizes[1])
    width, rows = sizes[0], sizes[1] - 1
    assert len(watched.seen) > 4
    for text, window, found in watched.seen:
        for row, column in itertools.product(range(rows), range(width)):
            path = [*window[0][: column + 1], *(window[r][column] for r in range(1, row + 1))]
            expected = logits_of(plain(), [*text, *path])[-1]
            torch.testing.assert_close(found[row * width + column], expected, rtol=1e-9, atol=1e-9)


def test_the_pool_holds_what_the_target_wrote() -> None:
    """Every path of the pool comes from a column of three windows and the target's likeliest token behind it."""
    prompt, sizes = prompt_of(11), (4, 3, 2)
    watched = Watched(*sizes)
    watched.text = list(prompt)
    made = requests(target(), [prompt], watched, max_tokens=24)
    pool: dict[int, list[tuple[int, ...]]] = {}
    for row in run(target(), made):
        pool = dict(row.state.pool) if row.state is not None else pool
    expected: dict[int, list[tuple[int, ...]]] = {}
    for _, window, logits in watched.seen:
        newest = logits[-4:].argmax(-1).tolist()
        for column in range(4):
            first, path = window[0][column], (window[1][column], newest[column])
            kept = [one for one in expected.get(first, []) if one != path]
            expected[first] = [*kept, path][-2:]
    assert pool == expected
    assert len(pool) > 8


def test_a_text_that_goes_round_is_found_in_the_pool() -> None:
    rows = [[1e-9] * VOCAB for _ in range(VOCAB)]
    for token, row in enumerate(rows):
        row[(token + 1) % 12] = 1.0
    (done,) = decode(Table(rows), [[3]], Lookahead(4, 5, 3), max_tokens=80)
    assert done.output_ids == [(4 + i) % 12 for i in range(80)]
    assert done.stats.mean_acceptance_length > 3.0


def test_the_window_stays_inside_the_context() -> None:
    small = target(limit=64)
    spy, prompt = Spy(small), prompt_of(40)
    (row,) = decode(spy, [prompt], Lookahead(7, 5, 7))
    assert row.output_ids == answer(prompt, 24, limit=64).ids
    assert spy.furthest < 64


def test_the_same_call_drafts_the_same() -> None:
    runs = [
        [row.stats.to_dict() | {"time": None} for row in decode(target(), PROMPTS, Lookahead(3, 4, 3), max_tokens=25)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@MODES
def test_in_a_composition_the_window_rides_along(settings: dict[str, Any]) -> None:
    """Guesses of both are verified in one pass, and the window's logits reach the member whose window it is."""
    watched = Watched(3, 4, 2)
    prompt = prompt_of(30)
    watched.text = list(prompt)
    (row,) = decode(target(), [prompt], Compose([Suffix(), watched]), max_tokens=30, **settings)
    assert row.output_ids == answer(prompt, 30, **settings).ids
    assert len(watched.seen) > 4
    for text, window, found in watched.seen:
        expected = logits_of(plain(), [*text, window[0][0], window[1][0]])[-1]
        torch.testing.assert_close(found[3], expected, rtol=1e-9, atol=1e-9)


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_sizes_follow_what_passes_cost() -> None:
    free = fitting(Costs(target=((1, 1.0), (512, 1.0))))
    tiles = fitting(TILES)
    dear = fitting(Costs(target=((1, 1.0), (2, 2.0), (512, 512.0))))

    def window(sizes: Sequence[int]) -> int:
        return sizes[0] * (sizes[1] - 1)

    assert free == (15, 5, 15)
    assert window(tiles) <= 12  # tiles are 16 wide: the pending token, the window and three guesses
    assert dear == (2, 3, 2)
    assert (Lookahead(costs=TILES).window_size, Lookahead(9, costs=TILES).window_size) == (tiles[0], 9)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["window_size", "ngram_size", "guess_set_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_impossible_sizes_are_refused(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=name):
        Lookahead(**{name: value})


@pytest.mark.parametrize("sizes", [(2**70, 2, 1), (10**6, 5, 7), (7, 10**6, 7)])
def test_windows_beyond_all_measure_are_refused_before_they_are_made(sizes: tuple[int, int, int]) -> None:
    names = ("window_size", "ngram_size", "guess_set_size")
    for make in (
        lambda: Lookahead(*sizes),
        lambda: SpeculativeConfig.read({"method": "lookahead"} | dict(zip(names, sizes, strict=True))),
    ):
        with pytest.raises(BadRequest, match="1024 at most"):
            make()


@MODES
def test_beside_a_row_that_began_in_the_first_layers(settings: dict[str, Any]) -> None:
    """There slots are staged already, and the window lies behind them."""
    prompts, watched = [prompt_of(11), prompt_of(9)], Watched(3, 3, 3)
    watched.text = list(prompts[0])
    early = EarlyExit(1, depth=5, tree_top_k=2)
    early.bind(target())
    rows = decode(target(), prompts, [watched, early], max_tokens=24, **settings)
    assert [row.output_ids for row in rows] == [answer(p, 24, **settings).ids for p in prompts]
    assert len(watched.seen) > 4
    for text, window, found in watched.seen:
        for column in range(3):
            expected = logits_of(plain(), [*text, *window[0][: column + 1], window[1][column]])[-1]
            torch.testing.assert_close(found[3 + column], expected, rtol=1e-9, atol=1e-9)


def test_an_ngram_of_one_token_is_refused() -> None:
    with pytest.raises(BadRequest, match="ngram_size"):
        Lookahead(ngram_size=1)
