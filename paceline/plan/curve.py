"""What a pass costs by the tokens that it reads, measured: a staircase, of which the points are kept.

Machines drift, so all widths are timed in turns, and what counts is the ratio to a pass over one token of the same
turn. Turns are repeated until the ratios are known well enough, or until it is clear that they will not be.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.draft.costs import Curve

COARSE = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Tokens of a pass that are timed first."""
STEP = 1.08
"""Neighbours further apart than this get a point between them, until they stand side by side."""
MOST_POINTS = 18
LEAST_TURNS, MOST_TURNS = 5, 9
"""Turns before drafters are tried."""
ALL_TURNS = 21
"""With those that are taken meanwhile: what a pass costs changes with the minutes, not only with the moment."""
TOLERANCE = 0.05
"""Half the width of a 95% interval, of the ratio itself."""
BLOCK, WIDE = 512 << 20, 2048
"""Bytes that are read to measure the bandwidth, more than any cache holds, and the length of a row."""


@dataclass(frozen=True)
class Measured:
    """Times of passes over B rows of so many tokens each, a turn per row."""

    rows: int
    widths: tuple[int, ...]
    """Tokens of each row."""
    seconds: tuple[tuple[float, ...], ...]
    """seconds[turn][i] is what a pass of `widths[i]` took."""
    single: float
    """Median seconds of a pass over one token of one row."""
    context: int
    """Tokens in the cache of each row."""

    def ratios(self) -> npt.NDArray[np.float64]:
        """[turns, widths]: in passes over one token per row, of the same turn."""
        times = np.asarray(self.seconds)
        return np.asarray(times / times[:, :1])

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(tokens of a row, seconds), median over the turns."""
        base = statistics.median(turn[0] for turn in self.seconds)
        return [(n, base * float(r)) for n, r in zip(self.widths, np.median(self.ratios(), axis=0), strict=True)]

    def with_turn(self, probe: "Probe") -> "Measured":
        """The same with one more turn, unless there are enough."""
        if len(self.seconds) >= ALL_TURNS:
            return self
        return replace(self, seconds=(*self.seconds, tuple(probe(n) for n in self.widths)))

    @property
    def noise(self) -> float:
        """Half the width of the widest 95% interval of a ratio, as a part of it."""
        return float(max(interval(column) for column in self.ratios().T))

    @property
    def cost(self) -> Curve:
        """The curve as drafting goes by: (tokens of all rows together, cost in passes over a single one), rising."""
        seconds = rising([seconds for _, seconds in self.curve])
        points = [(self.rows * n, cost / self.single) for n, cost in zip(self.widths, seconds, strict=True)]
        return tuple(points) if self.rows == 1 else ((1, 1.0), *points)


def rising(values: Sequence[float]) -> list[float]:
    """The closest numbers, by squares, that never fall: neighbours in the wrong order get their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in blocks for _ in range(count)]


def interval(values: Sequence[float] | npt.NDArray[np.float64], draws: int = 400) -> float:
    """Half the width of the 95% interval of a median, as a part of it, by resampling."""
    values = np.asarray(values, float)
    chance = np.random.default_rng(0)
    medians = np.median(values[chance.integers(0, len(values), (draws, len(values)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float((high - low) / 2 / np.median(values))


def measure(
    target: Any,
    ids: Sequence[int],
    *,
    rows: int = 1,
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = perf_counter,
) -> "tuple[Measured, Probe]":
    """Time passes of a target behind a text; what was measured, and what it was measured with.

    Args:
        ids: the text; its length is the context that the passes see.
        rows: rows of a pass, all with this text.
        tick: called after every turn.
    """
    most = max(2, COARSE[-1] // rows)
    widths = [n for n in COARSE if n <= most]
    if widths[-1] != most:
        widths.append(most)
    probe = Probe(target, ids, rows, max(widths), clock)
    known: dict[int, list[float]] = {n: [] for n in widths}
    for _ in range(3):
        for n in widths:
            known[n].append(probe(n))
        tick()
    while len(known) < MOST_POINTS and (between := _gap({n: statistics.median(t) for n, t in known.items()})):
        known[between] = [probe(between) for _ in range(3)]
        tick()
    widths = sorted(known)
    turns: list[tuple[float, ...]] = []
    while len(turns) < MOST_TURNS:
        turns.append(tuple(probe(n) for n in widths))
        tick()
        found = Measured(rows, tuple(widths), tuple(turns), 0.0, len(ids))
        if len(turns) >= LEAST_TURNS and found.noise < TOLERANCE:
            break
    single = statistics.median(turn[0] for turn in turns)
    if rows > 1:
        one = Probe(target, ids, 1, 1, clock)
        single = statistics.median(one(1) for _ in range(2 * LEAST_TURNS))
    return Measured(rows, tuple(widths), tuple(turns), single, len(ids)), probe


def _gap(seconds: dict[int, float]) -> int | None:
    """The middle of the first step up between neighbours that are not side by side: low ones matter more."""
    steps = (a + b for a, b in pairwise(sorted(seconds)) if b - a > 1 and seconds[b] > STEP * seconds[a])
    first = next(steps, None)
    return None if first is None else first // 2


class Probe:
    """Times one pass at a time; nothing of it stays."""

    def __init__(self, target: Any, ids: Sequence[int], rows: int, most: int, clock: Callable[[], float]) -> None:
        self.target, self.rows, self.clock = target, rows, clock
        self.ids = list(ids)
        self.cache = target.new_cache(rows, len(ids) + most + 1)
        text = torch.tensor([self.ids] * rows)
        target.forward(text, torch.arange(len(ids)).repeat(rows, 1), None, self.cache, logits=False)
        self.cache.commit([range(len(ids))] * rows)

    def __call__(self, tokens: int) -> float:
        read = (self.ids * (1 + tokens // len(self.ids)))[:tokens]
        offsets = torch.arange(tokens).repeat(self.rows, 1)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril().repeat(self.rows, 1, 1)
        begun = self.clock()
        logits = self.target.forward(torch.tensor([read] * self.rows), offsets, mask, self.cache).logits
        float(logits[0, -1, 0])  # waits for a device that computes behind our back
        seconds = self.clock() - begun
        self.cache.unstage()
        return seconds


def bandwidth(device: torch.device, clock: Callable[[], float] = perf_counter) -> float:
    """Bytes per second that memory is read with: the best of a few products of a large matrix and a vector."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32  # the one that gets most out of a CPU
    block = torch.ones(BLOCK // dtype.itemsize // WIDE, WIDE, dtype=dtype, device=device)
    vector, best = block[0].clone(), 0.0
    for _ in range(6):
        begun = clock()
        float((block @ vector)[0])
        best = max(best, BLOCK / (clock() - begun))
    return best
