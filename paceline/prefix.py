"""Keys and values of recent requests, so that the next one reads only what is new.

What may be reused without a change of bits? A prompt is read in chunks whose borders are absolute positions (`CHUNK`,
2 * `CHUNK` …), so whole chunks of a common beginning hold what reading them again would give, and so does the whole
prompt when it is the very same one. That much is *exact*. Keys and values of tokens that were decoded (the answer of an
earlier chat turn) came out of passes of other widths: reusing them can change last bits where the forward is not
width-invariant, so they are used only by a text that goes on where that answer ended.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch import Tensor

from paceline.cache import KVCache

CHUNK = 512
"""Prompt tokens read per pass, on a grid of absolute positions: the same prompt is always cut at the same places."""
BUDGET = 512 * 2**20
"""Bytes of keys and values that are kept by default; for a 1.5B model with grouped heads about 18,000 tokens."""
MOST = 256
"""Most entries: every prompt is held against each of them."""


class Found(NamedTuple):
    """How much of a prompt is already known."""

    length: int
    """Leading positions that need not be read."""
    exact: int
    """How many of them hold the bits that reading the prompt would give."""
    kv: list[tuple[Tensor, Tensor]]


@dataclass
class _Entry:
    ids: list[int]
    """The tokens whose keys and values are held."""
    prompt: int
    """How many of them a fresh reading of that request's prompt would have read."""
    exact: int
    """Leading positions whose bits are those of a fresh reading."""
    kv: list[tuple[Tensor, Tensor]]
    nbytes: int


class Prefixes:
    """A store of recent requests' keys and values within a memory budget, the longest unused out first.

    Args:
        budget: most bytes to hold; 0 keeps nothing.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._names = count()
        self.nbytes = 0
        """Bytes held."""

    def find(self, prompt_ids: Sequence[int]) -> Found | None:
        """The entry that saves a prompt the most reading; its last token is never looked for, it stays pending."""
        wanted, best, chosen = list(prompt_ids[:-1]), Found(0, 0, []), -1
        for name, entry in self._entries.items():
            common = _common(entry.ids, wanted)
            if common == len(wanted) == entry.prompt == entry.exact:
                length, exact = common, common
            elif common > entry.exact:
                length, exact = common, border_before(entry.exact)
            else:
                length = exact = border_before(common)
            if (length, exact) > best[:2]:
                best, chosen = Found(length, exact, entry.kv), name
        if not best.length:
            return None
        self._entries.move_to_end(chosen)
        return best

    def keep(self, ids: Sequence[int], prompt: int, exact: int, cache: KVCache, row: int) -> None:
        """Remember a row: copies its keys and values.

        Args:
            ids: the tokens to remember; the row holds at least as many positions.
            prompt: positions that a fresh reading of its prompt reads.
            exact: leading positions that hold the bits of such a reading.
        """
        size = cache.row_bytes(len(ids))
        if not ids or not 0 < size <= self.budget:
            return
        for name, entry in list(self._entries.items()):
            if entry.exact <= exact and entry.ids == list(ids[: len(entry.ids)]):
                self.nbytes -= self._entries.pop(name).nbytes  # the new one can do all that it could
        while self.nbytes + size > self.budget or len(self._entries) == MOST:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes
        self._entries[next(self._names)] = _Entry(list(ids), prompt, exact, cache.copy_row(row, len(ids)), size)
        self.nbytes += size

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.nbytes = 0


def border_before(position: int) -> int:
    """The last chunk border at or before a position."""
    return position // CHUNK * CHUNK


def border_behind(position: int) -> int:
    """The next chunk border behind a position."""
    return border_before(position) + CHUNK


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning: whole slices are compared first, because lists do that in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
