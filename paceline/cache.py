"""Keys and values of the tokens that were kept, and of those being tried.

Rollback is the absence of commit. A forward *stages* K/V behind a row's committed length; `commit` gathers the
accepted path's slots down to the front and advances the length; whatever was staged and not kept is overwritten:

    row b   | 0 … length[b]-1 | length[b] … +staged-1 | … capacity-1 |
              committed, slot   staged by forwards      zeros, or what
              = position        since the last commit   was not kept

Each row has its own length, so ragged acceptance needs no padding arithmetic. Sliding-window layers keep all their
tokens too, hidden by the mask, which is what lets them roll back across the window's edge. Every stored value is
finite: attention multiplies masked slots by zero, and zero times NaN would reach rows that never see the slot.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache

from paceline.errors import CacheFull

GROWTH = 512
"""Slots by which a cache grows at least: a multiple of the attention kernel's key block."""


class KVCache(Cache):
    """Staged and committed K/V of some rows, one pair of buffers [rows, heads, capacity, head_dim] per layer.

    Args:
        rows: number of sequences.
        limit: most positions a row may hold (the model's context).
        size: positions to make room for at once; the buffers grow by themselves after that.
        block: attention sees a multiple of this many slots (1 = exactly those in use).
    """

    def __init__(self, rows: int, limit: int, size: int = 0, block: int = 1) -> None:
        super().__init__(layers=[])
        self.rows, self.limit, self.block = rows, limit, block
        self.capacity = _up(max(size, 1), GROWTH)
        self.lengths = [0] * rows
        self.staged = 0
        self.num_bad_values = 0
        """How many staged values were not finite since this was last set to 0; counted when `watch` is on."""
        self.watch = False
        self.offsets: Int64[Tensor, "B S"] = torch.zeros(rows, 0, dtype=torch.int64)
        """Offsets of the staged slots, in slot order."""
        self._width = 0
        self._kv: list[tuple[Tensor, Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes held by the buffers."""
        return sum(k.nbytes + v.nbytes for k, v in self._kv)

    @property
    def visible(self) -> int:
        """Slots that attention reads in the pass being staged: in use, rounded up to the block."""
        return _up(max(self.lengths) + self.staged + self._width, self.block)

    def start(self, offsets: Int64[Tensor, "B N"]) -> None:
        """Open a pass of N slots per row behind what is staged; every layer's `update` then fills them.

        Args:
            offsets: position of each slot minus its row's committed length; kept for the masks of later passes.
        """
        self._width = offsets.shape[1]
        self.offsets = torch.cat([self.offsets[:, : self.staged], offsets], dim=1)
        if self.visible > self.capacity:
            self._grow(self.visible)

    def finish(self) -> None:
        """Close the pass: its slots count as staged."""
        self.staged += self._width
        self._width = 0

    def update(
        self,
        key_states: Float[Tensor, "B heads N head_dim"],
        value_states: Float[Tensor, "B heads N value_dim"],
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B heads S head_dim"], Float[Tensor, "B heads S value_dim"]]:
        """Stage one layer's K/V and return that layer's visible slots (called by the model's own attention)."""
        if layer_idx == len(self._kv):
            self._kv.append((self._zeros(key_states), self._zeros(value_states)))
        visible = self.visible
        found = []
        for buffer, new in zip(self._kv[layer_idx], (key_states, value_states), strict=True):
            if self.watch:
                self.num_bad_values += int((~torch.isfinite(new)).sum())
            new = torch.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0)
            if len(set(self.lengths)) == 1:
                begin = self.lengths[0] + self.staged
                buffer[:, :, begin : begin + self._width] = new
            else:
                for row, length in enumerate(self.lengths):
                    begin = length + self.staged
                    buffer[row, :, begin : begin + self._width] = new[row]
            found.append(buffer[:, :, :visible])
        return found[0], found[1]

    def buffers(self, layers: int, heads: int, dim: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Every layer's keys and values [rows, heads, capacity, dim], for a forward that stores them by itself.

        Row b's next slot is `lengths[b] + staged`; what is stored must be finite. Call it once the pass is open.
        """
        while len(self._kv) < layers:
            like = torch.empty(self.rows, heads, 0, dim, dtype=dtype)
            self._kv.append((self._zeros(like), self._zeros(like)))
        return self._kv

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, in each row, the staged slots of an accepted path (increasing), and drop the others.

        Raises:
            CacheFull: a row would grow beyond its limit; nothing is changed.
        """
        for row, path in enumerate(paths):
            if self.lengths[row] + len(path) > self.limit:
                raise CacheFull(
                    f"row {row} holds {self.lengths[row]} positions, {len(path)} more were accepted, the context has "
                    f"{self.limit}"
                )
        for row, path in enumerate(paths):
            begin = self.lengths[row]
            if list(path) != list(range(len(path))):
                source = torch.tensor(path) + begin
                for pair in self._kv:
                    for buffer in pair:
                        buffer[row, :, begin : begin + len(path)] = buffer[row].index_select(
                            1, source.to(buffer.device)
                        )
            self.lengths[row] += len(path)
        self.unstage()

    def unstage(self, num_slots: int | None = None) -> None:
        """Drop the last `num_slots` staged slots of every row (all of them when None)."""
        self.staged = 0 if num_slots is None else max(0, self.staged - num_slots)
        self._width = 0
        self.offsets = self.offsets[:, : self.staged]

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from position `length` on."""
        self.unstage()
        self.lengths[row] = min(self.lengths[row], length)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and free the others."""
        if list(rows) == list(range(self.rows)):
            return
        index = torch.tensor(list(rows), dtype=torch.int64)
        self._kv = [(k.index_select(0, index.to(k.device)), v.index_select(0, index.to(v.device))) for k, v in self._kv]
        self.lengths = [self.lengths[row] for row in rows]
        self.rows = len(self.lengths)
        self.offsets = self.offsets[index]

    @torch.inference_mode()
    def put(self, row: int, other: "KVCache") -> None:
        """Give a row's place to the only row of another cache; what it held is gone.

        Args:
            row: whose sequence has ended.
            other: a cache of one row, nothing staged.
        """
        self.unstage()
        length = other.lengths[0]
        if length > self.capacity:
            self._grow(length)
        if not self._kv:
            self._kv = [(self._zeros(k), self._zeros(v)) for k, v in other._kv]
        for mine, new in zip(self._kv, other._kv, strict=False):  # a row of length 0 may have no buffers yet
            for buffer, values in zip(mine, new, strict=True):
                buffer[row, :, :length] = values[0, :, :length]
        self.lengths[row] = length

    def row_bytes(self, length: int) -> int:
        """Bytes of the keys and values of `length` positions of one row."""
        return sum(t[0, :, 0].nbytes for pair in self._kv for t in pair) * length

    def copy_row(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of a row's first positions, per layer [1, heads, length, head_dim], as copies."""
        return [(k[row : row + 1, :, :length].clone(), v[row : row + 1, :, :length].clone()) for k, v in self._kv]

    def load(self, kv: Sequence[tuple[Tensor, Tensor]], length: int) -> None:
        """Begin an empty cache of one row with the first `length` positions of what `copy_row` gave."""
        if length > self.capacity:
            self._grow(length)
        self._kv = [(self._zeros(k), self._zeros(v)) for k, v in kv]
        for mine, known in zip(self._kv, kv, strict=True):
            for buffer, values in zip(mine, known, strict=True):
                buffer[:, :, :length] = values[:, :, :length]
        self.lengths = [length]

    def fit(self) -> None:
        """Give back what a longer row had needed: at most twice the room that the present rows use, and `GROWTH`."""
        needed = _up(max(self.lengths, default=0) + self.staged + 1, GROWTH)
        if self.capacity > 2 * needed + GROWTH:
            self._resize(needed)

    @classmethod
    def join(cls, caches: Sequence["KVCache"]) -> "KVCache":
        """One cache with the rows of all, in order; the parts give up their buffers one layer at a time.

        A single cache is returned as it is.
        """
        if len(caches) == 1:
            return caches[0]
        first = caches[0]
        capacity = max(cache.capacity for cache in caches)
        for cache in caches:
            if cache.capacity < capacity:
                cache._resize(capacity)
        joined = cls(sum(cache.rows for cache in caches), first.limit, capacity, first.block)
        joined.lengths = [length for cache in caches for length in cache.lengths]
        # A row without a prompt read yet (one-token prompts) has no buffers; zeros stand in for them.
        template = next((cache._kv for cache in caches if cache._kv), [])
        for layer, (k, v) in enumerate(list(template)):
            parts = [cache._kv[layer] if cache._kv else _blank(k, v, cache.rows) for cache in caches]
            joined._kv.append((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])))
            for cache in caches:
                if cache._kv:
                    cache._kv[layer] = (k[:0], v[:0])
        return joined

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest committed length; models ask only when they get no position ids, and ours always do."""
        return max(self.lengths)

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(self.rows, like.shape[1], self.capacity, like.shape[3], dtype=like.dtype, device=like.device)

    def _grow(self, needed: int) -> None:
        """Make room for `needed` slots, with at most a quarter to spare: copies cost O(1) per token in the long run."""
        self._resize(max(_up(needed, GROWTH), min(_up(self.capacity * 5 // 4, GROWTH), _up(self.limit, GROWTH))))

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        for layer, (k, v) in enumerate(self._kv):
            grown = []
            for old in (k, v):
                new = self._zeros(old)
                size = min(capacity, old.shape[2])
                new[:, :, :size] = old[:, :, :size]
                grown.append(new)
            self._kv[layer] = (grown[0], grown[1])


def _blank(k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return k.new_zeros(rows, *k.shape[1:]), v.new_zeros(rows, *v.shape[1:])


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
