"""The cache against lists of numbers, under any order of calls, and against what plain decoding leaves in it."""

import random
from unittest import mock

import oracles
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from oracles import Known, answer, assert_close, prompt_of
from torch import Tensor

import paceline.cache
from paceline.cache import KVCache
from paceline.decode import prefill, step
from paceline.errors import CacheFull

LAYERS, HEADS, DIM = 2, 2, 3


def keys_of(tokens: list[list[int]], layer: int) -> Tensor:
    """[rows, heads, width, dim]: every number says which token, layer, head and place it belongs to."""
    token = torch.tensor(tokens, dtype=torch.float64).reshape(len(tokens), 1, -1, 1)
    place = torch.arange(HEADS * DIM, dtype=torch.float64).reshape(1, HEADS, 1, DIM)
    return token * 1000 + layer * 100 + place


def stage(
    cache: KVCache, tokens: list[list[int]], offsets: list[list[int]] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """One pass: every layer stages its keys, and the values are their negatives."""
    width = len(tokens[0])
    where = torch.arange(cache.staged, cache.staged + width).repeat(len(tokens), 1)
    cache.start(where if offsets is None else torch.tensor(offsets))
    seen = [cache.update(keys_of(tokens, layer), -keys_of(tokens, layer), layer) for layer in range(LAYERS)]
    cache.finish()
    return seen


def held(cache: KVCache, row: int, begin: int, end: int) -> list[int]:
    """The tokens in a row's slots, which every layer, head and place must agree on."""
    found = []
    for slot in range(begin, end):
        tokens = set()
        for layer, (k, v) in enumerate(cache._kv):
            assert torch.equal(v[row, :, slot], -k[row, :, slot])
            tokens |= set(((k[row, :, slot] - keys_of([[0]], layer)[0, :, 0]) / 1000).flatten().tolist())
        assert len(tokens) == 1, f"row {row}, slot {slot}: {tokens}"
        found.append(int(tokens.pop()))
    return found


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls, on buffers that grow in steps of 4, against lists."""

    LIMIT = 40

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(paceline.cache, "GROWTH", 4)
        self.patch.start()
        self.block, self.count = 1, 0
        self.cache = KVCache(1, self.LIMIT)
        self.rows: list[list[int]] = [[]]
        self.staged: list[list[int]] = [[]]

    def teardown(self) -> None:
        self.patch.stop()

    def fresh(self, width: int, rows: int) -> list[list[int]]:
        self.count += width * rows
        first = self.count - width * rows + 1
        return [list(range(first + row * width, first + (row + 1) * width)) for row in range(rows)]

    @rule(width=st.integers(1, 6))
    def read(self, width: int) -> None:
        tokens = self.fresh(width, len(self.rows))
        seen = stage(self.cache, tokens)
        for mine, new in zip(self.staged, tokens, strict=True):
            mine += new
        longest = max(len(row) for row in self.rows) + len(self.staged[0])
        for layer, (k, v) in enumerate(seen):
            assert k.shape == v.shape == (len(self.rows), HEADS, -(-longest // self.block) * self.block, DIM)
            for row, (done, new) in enumerate(zip(self.rows, self.staged, strict=True)):
                text = [*done, *new]
                assert torch.equal(k[row, :, : len(text)], keys_of([text], layer)[0])

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        paths = []
        for new in self.staged:
            kept = data.draw(st.sets(st.integers(0, len(new) - 1))) if new else set()
            paths.append(sorted(kept))
        if any(len(row) + len(path) > self.LIMIT for row, path in zip(self.rows, paths, strict=True)):
            with pytest.raises(CacheFull, match=f"the context has {self.LIMIT}"):
                self.cache.commit(paths)
            return
        self.cache.commit(paths)
        for row, new, path in zip(self.rows, self.staged, paths, strict=True):
            row += [new[slot] for slot in path]
        self.staged = [[] for _ in self.rows]

    @rule(num=st.none() | st.integers(0, 8))
    def unstage(self, num: int | None) -> None:
        self.cache.unstage(num)
        self.staged = [[] if num is None else new[: max(0, len(new) - num)] for new in self.staged]

    @rule(data=st.data(), length=st.integers(0, 12))
    def truncate(self, data: st.DataObject, length: int) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache.truncate(row, length)
        self.rows[row] = self.rows[row][:length]
        self.staged = [[] for _ in self.rows]

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        kept = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3, unique=True))
        self.cache.keep(kept)
        self.rows = [list(self.rows[row]) for row in kept]
        self.staged = [list(self.staged[row]) for row in kept]

    @precondition(lambda self: len(self.rows) < 4 and not self.staged[0])
    @rule(length=st.integers(0, 9), size=st.integers(0, 30), first=st.booleans())
    def join(self, length: int, size: int, first: bool) -> None:
        other = KVCache(1, self.LIMIT, size)
        row: list[int] = []
        if length:
            (row,) = self.fresh(length, 1)
            stage(other, [row])
            other.commit([range(length)])
        self.cache = KVCache.join([other, self.cache] if first else [self.cache, other])
        self.rows = [row, *self.rows] if first else [*self.rows, row]
        self.staged = [[] for _ in self.rows]

    @invariant()
    def holds_what_the_lists_hold(self) -> None:
        cache = self.cache
        assert cache.rows == len(self.rows)
        assert cache.lengths == [len(row) for row in self.rows]
        assert cache.staged == len(self.staged[0]) == cache.offsets.shape[1]
        assert cache.offsets.shape[0] == cache.rows
        assert cache.get_seq_length() == max(cache.lengths)
        assert cache.visible <= cache.capacity
        for row, (done, new) in enumerate(zip(self.rows, self.staged, strict=True)):
            if cache._kv:
                assert held(cache, row, 0, len(done) + len(new)) == [*done, *new]
        for pair in cache._kv:
            for buffer in pair:
                assert buffer.shape == (cache.rows, HEADS, cache.capacity, DIM)
                assert bool(torch.isfinite(buffer).all())
        assert cache.nbytes == len(cache._kv) * 2 * cache.rows * HEADS * cache.capacity * DIM * 8


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)


@pytest.mark.parametrize("block", [1, 4, 512])
def test_visible_slots_are_whole_blocks(block: int) -> None:
    cache = KVCache(2, 2000, block=block)
    stage(cache, [[1, 2, 3], [4, 5, 6]])
    cache.commit([[0], [0, 1, 2]])
    (k, _), _ = stage(cache, [[7, 8], [9, 10]])
    assert k.shape[2] == {1: 5, 4: 8, 512: 512}[block]
    assert torch.equal(k[0, :, :3], keys_of([[1, 7, 8]], 0)[0])
    assert torch.equal(k[1, :, :5], keys_of([[4, 5, 6, 9, 10]], 0)[0])


def test_growth_spares_at_most_a_quarter_and_copies_rarely() -> None:
    cache, sizes = KVCache(1, 10_000), []
    for _ in range(0, 6000, 50):
        stage(cache, [list(range(1, 51))])
        cache.commit([range(50)])
        sizes.append(cache.capacity)
    assert all(size % 512 == 0 for size in sizes)
    assert all(size <= max(512, 1.25 * 50 * (i + 1) + 512) for i, size in enumerate(sizes))
    assert len(set(sizes)) <= 10
    assert held(cache, 0, 0, 6000) == [*range(1, 51)] * 120


def test_size_reserves_room_at_once() -> None:
    cache = KVCache(1, 4096, size=1300)
    assert cache.capacity == 1536
    stage(cache, [[1]])
    buffer = cache._kv[0][0]
    for token in range(2, 100):
        stage(cache, [[token] * 13])
    assert cache._kv[0][0] is buffer


def test_a_full_row_is_refused_and_nothing_changes() -> None:
    cache = KVCache(2, 4)
    stage(cache, [[1, 2, 3], [4, 5, 6]])
    cache.commit([[0, 1, 2], [0]])
    stage(cache, [[7, 8], [9, 10]])
    with pytest.raises(CacheFull, match=r"row 0 holds 3 positions, 2 more were accepted, the context has 4"):
        cache.commit([[0, 1], [1]])
    assert cache.lengths == [3, 1]
    cache.commit([[1], [1]])
    assert [held(cache, row, 0, cache.lengths[row]) for row in (0, 1)] == [[1, 2, 3, 8], [4, 10]]


def test_offsets_of_staged_slots_follow_every_call() -> None:
    cache = KVCache(2, 100)
    stage(cache, [[1, 2], [3, 4]], [[0, 1], [0, 1]])
    stage(cache, [[5, 6], [7, 8]], [[1, 2], [2, 2]])
    assert cache.offsets.tolist() == [[0, 1, 1, 2], [0, 1, 2, 2]]
    cache.unstage(1)
    assert cache.offsets.tolist() == [[0, 1, 1], [0, 1, 2]]
    cache.keep([1])
    assert cache.offsets.tolist() == [[0, 1, 2]]
    cache.commit([[0, 2]])
    assert cache.offsets.tolist() == [[]]
    assert held(cache, 0, 0, 2) == [3, 7]


def test_join_frees_the_parts_and_keep_frees_the_rest() -> None:
    parts = []
    for tokens in ([1, 2], [3], [4, 5, 6]):
        part = KVCache(1, 100)
        stage(part, [tokens])
        part.commit([range(len(tokens))])
        parts.append(part)
    single = parts[0].nbytes
    joined = KVCache.join(parts)
    assert joined.nbytes == 3 * single
    assert sum(part.nbytes for part in parts) == 0
    joined.keep([2])
    assert joined.nbytes == single
    assert held(joined, 0, 0, 3) == [4, 5, 6]


# -- what is not finite ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_bad_value_is_stored(bad: float) -> None:
    cache = KVCache(2, 100)
    cache.watch = True
    cache.start(torch.tensor([[0, 1], [0, 1]]))
    k, v = keys_of([[1, 2], [3, 4]], 0), -keys_of([[1, 2], [3, 4]], 0)
    k[0, 1, 1, 2] = v[1, 0, 0, 0] = bad
    found = cache.update(k, v, 0)
    assert all(bool(torch.isfinite(t).all()) for t in found)
    assert found[0][0, 1, 1, 2] == found[1][1, 0, 0, 0] == 0
    assert cache.num_bad_values == 2
    assert torch.equal(found[0][1, :, :2], k[1])


@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt2"])
def test_a_row_of_nan_reaches_no_other_row(arch: str) -> None:
    """Row 0 holds a token whose embedding is NaN; rows 1 and 2, and row 0's nodes off its path, read on as alone."""
    target = oracles.HFTarget(oracles.tiny(arch))
    with torch.no_grad():
        target.model.get_input_embeddings().weight[13] = float("nan")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    cache = KVCache.join([prefill(target, request) for request in oracles.requests(target, prompts)])
    # root, then NaN at slot 1, its child, and a sibling of it at slot 3
    tokens, offsets = torch.tensor([[3, 13, 5, 6], [8, 20, 21, 22], [9, 30, 31, 32]]), torch.tensor([[0, 1, 2, 1]] * 3)
    mask = torch.eye(4, dtype=torch.bool).repeat(3, 1, 1)
    mask[:, 1, 0] = mask[:, 2, :2] = mask[:, 3, 0] = True
    seen = target.forward(tokens, offsets, mask, cache).logits
    plain = oracles.plain(arch)
    assert_close(seen[1, 2], oracles.logits_of(plain, [*prompts[1], 20, 21])[-1])
    assert_close(seen[2, 2], oracles.logits_of(plain, [*prompts[2], 30, 31])[-1])
    assert_close(seen[0, 3], oracles.logits_of(plain, [*prompts[0], 6])[-1])
    assert bool(seen[0, 1].isnan().all())
    assert all(bool(torch.isfinite(t).all()) for pair in cache._kv for t in pair)
    cache.commit([[0, 3], [0, 1], [0]])
    after = target.forward(torch.tensor([[7], [7], [7]]), torch.zeros(3, 1, dtype=torch.int64), None, cache).logits
    for row, text in enumerate(([*prompts[0], 6, 7], [*prompts[1], 20, 7], [*prompts[2], 7])):
        assert_close(after[row, 0], oracles.logits_of(plain, text)[-1])


# -- what decoding leaves behind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", oracles.ARCHS)
def test_kept_keys_and_values_are_those_of_plain_decoding(arch: str) -> None:
    """Rows of a batch, through trees of right, wrong and repeated nodes: tensor by tensor what a lone row leaves."""
    prompts = [prompt_of(length) for length in (2, 13, 5)]
    known = Known(prompts, [answer(prompt, 30, arch) for prompt in prompts])
    target = oracles.target(arch)
    rows = oracles.requests(target, prompts, known.wild(4, 14), max_tokens=25)
    cache = KVCache.join([prefill(target, row) for row in rows])
    rng = random.Random(0)
    for _ in range(3):
        step(target, cache, rows)
    order = [2, 0, 1]
    rng.shuffle(order)
    cache.keep(order)
    rows = [rows[i] for i in order]
    step(target, cache, rows)
    assert cache.staged == 0
    for row, request in enumerate(rows):
        assert request.stats.num_accepted_tokens > 0
        length = len(request.ids) - 1
        assert cache.lengths[row] == length
        alone = target.new_cache(1, 0)
        for token in request.ids[:-1]:
            target.forward(torch.tensor([[token]]), torch.tensor([[0]]), None, alone, logits=False)
            alone.commit([[0]])
        for (k, v), (k_alone, v_alone) in zip(cache._kv, alone._kv, strict=True):
            assert_close(k[row, :, :length], k_alone[0, :, :length])
            assert_close(v[row, :, :length], v_alone[0, :, :length])
