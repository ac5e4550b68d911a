"""Prompt lookup against a search of the whole text, and what it costs counted in look-ups."""

import itertools
from collections.abc import Sequence
from typing import Any

import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import answer, prompt_of

from paceline.draft.base import Step
from paceline.draft.ngram import Ngram, Text
from paceline.errors import BadRequest
from paceline.tree import TokenTree


def proposed(drafter: Ngram, ids: Sequence[int], count: int, pieces: Sequence[int] = ()) -> list[int]:
    """What it drafts behind a text whose last token is pending, the text brought in pieces."""
    tokens = list(ids[:-1])
    cuts = [0, *sorted({min(p, len(tokens)) for p in pieces}), len(tokens)]
    text = drafter.begin(Step(tokens[: cuts[1]], tokens[1 : cuts[1] + 1]))
    for begin, end in itertools.pairwise(cuts[1:]):
        drafter.observe([text], [Step(tokens[begin:end], list(ids[begin + 1 : end + 1]))])
    return drafter.lookup(text, [ids[-1]], count)


def searched(ids: Sequence[int], longest: int, shortest: int, count: int) -> list[int]:
    """The same by looking at every place of the text: longest first, most recent first."""
    ids = list(ids)
    for n in range(longest, shortest - 1, -1):
        if n > len(ids):
            continue
        for end in range(len(ids) - 2, n - 2, -1):
            if ids[end - n + 1 : end + 1] == ids[-n:]:
                return ids[end + 1 : end + 1 + count]
    return []


STORY = [1, 2, 3, 9, 2, 3, 7, 1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "longest", "count", "expected"),
    [
        (STORY, 3, 2, [9, 2]),
        (STORY, 2, 2, [7, 1]),
        (STORY, 3, 100, [9, 2, 3, 7, 1, 2, 3]),  # all there is, the pending token included, and not one more
        ([5, 5, 5], 2, 2, [5]),
        ([4], 3, 2, []),
        ([4, 5], 3, 2, []),
        ([4, 4], 3, 2, [4]),
        ([1, 2, 1], 5, 2, [2, 1]),  # shorter than the longest n-gram
        (STORY, 3, 0, []),
    ],
)
def test_vllm_15348(ids: list[int], longest: int, count: int, expected: list[int]) -> None:
    assert proposed(Ngram(longest, 1), ids, count) == expected


def test_shortest_length_is_honoured() -> None:
    assert proposed(Ngram(5, 2), [1, 2, 3, 9, 3], 2) == []
    assert proposed(Ngram(5, 1), [1, 2, 3, 9, 3], 2) == [9, 3]
    assert proposed(Ngram(3, 3), STORY, 2) == [9, 2]
    assert proposed(Ngram(2, 2), STORY, 2) == [7, 1]


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (3, 0), (0, 0), (2, -1)])
def test_impossible_lengths_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(BadRequest, match=rf"{shortest}.*{longest}.*1 <= min <= max"):
        Ngram(longest, shortest)


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    longest=st.integers(1, 6),
    shortest=st.integers(1, 6),
    count=st.integers(0, 8),
    pieces=st.lists(st.integers(0, 40), max_size=3),
)
def test_longest_then_most_recent(ids: list[int], longest: int, shortest: int, count: int, pieces: list[int]) -> None:
    longest, shortest = max(longest, shortest), min(longest, shortest)
    found = proposed(Ngram(longest, shortest), ids, count, pieces)
    assert found == searched(ids, longest, shortest, count)


class _CountingDict(dict[Any, Any]):
    touched = 0

    def get(self, *args: Any) -> Any:
        self.touched += 1
        return super().get(*args)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.touched += 1
        super().__setitem__(key, value)


class _CountingList(list[Any]):
    touched = 0

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        self.touched += len(found) if isinstance(where, slice) else 1
        return found


@pytest.mark.parametrize("shape", ["hit", "miss"])
def test_vllm_16258_cost_does_not_grow_with_the_text(shape: str) -> None:
    """Per look-up and per new token a handful of dictionary accesses and of copied ids, at 500 and at 32,000 ids."""
    drafter, costs = Ngram(5, 1), []
    for length in (500, 32_000):
        tokens = [i * 7919 % 30_011 for i in range(length)]
        text = Text(_CountingList(), _CountingDict())
        drafter.observe([text], [Step(tokens, tokens)])
        text.ids.touched = text.ends.touched = 0  # type: ignore[attr-defined]
        pending = tokens[3] if shape == "hit" else 40_000
        assert len(drafter.lookup(text, [pending], 8)) == (8 if shape == "hit" else 0)
        drafter.observe([text], [Step([pending], [1])])
        costs.append((text.ids.touched, text.ends.touched))  # type: ignore[attr-defined]
    assert costs[0] == costs[1]
    assert max(costs[1]) <= 30


@pytest.mark.parametrize("prompt", [[5], [5, 5], [5, 6]])
@pytest.mark.parametrize("K", [1, 4, 8])
def test_short_prompts(prompt: list[int], K: int) -> None:
    (row,) = oracles.decode(oracles.target(), [prompt], Ngram(), depth=K, max_tokens=20)
    assert row.output_ids == answer(prompt, 20).ids


class Watched(Ngram):
    """Keeps every text it drafted for and what it drafted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, states: list[Text], asks: list[Any]) -> list[TokenTree]:
        trees = super().propose(states, asks)
        for text, tree in zip(states, trees, strict=True):
            self.seen.append(([*text.ids, tree.ids[0]], tree.ids[1:]))
        return trees


def test_llamacpp_27852_nothing_leaks_from_one_request_to_the_next() -> None:
    drafter, long, short = Watched(), prompt_of(60, 1), prompt_of(9, 2)
    runs = [
        oracles.decode(oracles.target(), [prompt], drafter, max_tokens=30) for prompt in (short, long, short, short)
    ]
    again = [(row.output_ids, {**row.stats.to_dict(), "time": None}) for (row,) in runs]
    assert again[0] == again[2] == again[3]
    assert runs[1][0].stats.num_accepted_tokens > 0
    for ids, drafted in drafter.seen:
        assert drafted == searched(ids, 5, 1, len(drafted))  # every guess stands in its own text
