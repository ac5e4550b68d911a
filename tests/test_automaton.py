"""The suffix automaton against searches of the whole text, and what it costs counted in states and look-ups."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.automaton import REACH, Automaton


def automaton_of(ids: Sequence[int]) -> Automaton:
    automaton = Automaton()
    for token in ids:
        automaton.add(token)
    return automaton


def places(ids: Sequence[int], string: Sequence[int]) -> list[int]:
    """Where a string ends, by looking at every place; an empty one ends nowhere here."""
    n = len(string)
    return [end for end in range(n, len(ids) + 1) if n and list(ids[end - n : end]) == list(string)]


def longest_earlier(ids: Sequence[int]) -> int:
    """Length of the longest suffix that ends before the end too."""
    return max(n for n in range(len(ids)) if n == 0 or len(places(ids, ids[-n:])) > 1) if ids else 0


def longest_found(ids: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the longest suffix of `tokens` that occurs in the text."""
    return max(n for n in range(len(tokens) + 1) if n == 0 or places(ids, tokens[-n:]))


def followed(ids: Sequence[int], string: Sequence[int]) -> tuple[list[int], Counter[int]]:
    """What followed a string, most recent first, and how often."""
    tokens = [ids[end] for end in places(ids, string) if end < len(ids)]
    return list(dict.fromkeys(reversed(tokens))), Counter(tokens)


def random_texts(count: int) -> list[list[int]]:
    """Short texts over few tokens: all at random, with copied parts, and with a period."""
    chance, texts = random.Random(1), []
    for i in range(count):
        words = chance.randint(1, 4)
        text = [chance.randrange(words) for _ in range(chance.randint(1, 24))]
        if i % 3 == 1:
            begin = chance.randrange(len(text))
            text += text[begin : begin + 12]
        elif i % 3 == 2:
            text = (text[: chance.randint(1, 4)] * 30)[: len(text) + 8]
        texts.append(text)
    return texts


def check_text(ids: list[int]) -> None:
    """The match at the end, and count and followers of every suffix in the chain of links."""
    automaton = automaton_of(ids)
    state, length = automaton.match()
    assert length == longest_earlier(ids)
    while state:
        string = ids[len(ids) - length :]
        order, counts = followed(ids, string)
        number = len(places(ids, string))
        assert min(automaton.count[state], REACH) == min(number, REACH)
        assert automaton.count[state] <= number
        found = automaton.followers(state, 100)
        assert {token: min(n, REACH) for token, n in found} == {t: min(n, REACH) for t, n in counts.items()}
        if number <= REACH:
            assert [token for token, _ in found] == order
        assert automaton.followers(state, 1) == found[:1]
        state = automaton.link[state]
        length = automaton.length[state]


def test_example_of_the_docstring() -> None:
    automaton = automaton_of(b"abcabdab")
    state, length = automaton.match()
    assert length == 2
    assert automaton.followers(state, 9) == [(ord("d"), 1), (ord("c"), 1)]
    assert automaton.link[state] == 0
    assert automaton.count[state] == 3


@pytest.mark.usefixtures("unchecked")
def test_matches_counts_and_followers_of_thousands_of_texts() -> None:
    for ids in random_texts(2000):
        check_text(ids)


@given(st.lists(st.integers(0, 2), max_size=30))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_matches_counts_and_followers(ids: list[int]) -> None:
    check_text(ids)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("ids", [[7] * 90, [1, 2] * 45, [1, 2, 3, 9] * 20, [0, 5] * 40 + [0, 6] + [0, 5] * 3])
def test_counts_beyond_the_reach_are_lower_bounds(ids: list[int]) -> None:
    check_text(ids)


@pytest.mark.usefixtures("unchecked")
def test_every_string_is_found_and_counted() -> None:
    for ids in random_texts(120):
        automaton = automaton_of(ids)
        for begin in range(len(ids)):
            for end in range(begin + 1, len(ids) + 1):
                state, length = automaton.find(ids[begin:end])
                assert length == end - begin
                assert automaton.link[state] >= 0
                assert automaton.length[automaton.link[state]] < length <= automaton.length[state]
                assert min(automaton.count[state], REACH) == min(len(places(ids, ids[begin:end])), REACH)


@given(st.lists(st.integers(0, 2), max_size=25), st.lists(st.integers(0, 3), max_size=12))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_find_in_another_text(ids: list[int], tokens: list[int]) -> None:
    state, length = automaton_of(ids).find(tokens)
    assert length == longest_found(ids, tokens)
    if length:
        order, counts = followed(ids, tokens[-length:])
        found = automaton_of(ids).followers(state, 100)
        assert dict(found) == counts
        assert [token for token, _ in found] == order


@given(st.lists(st.integers(0, 1), min_size=2, max_size=25), st.integers(1, 6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_shortened_walks_stay_at_the_longest_suffix_allowed(ids: list[int], most: int) -> None:
    automaton = automaton_of(ids)
    state = length = 0
    for at, token in enumerate(ids):
        state, length = automaton.shorten(*automaton.step(state, length, token), most)
        assert length == min(most, at + 1)
        assert (state, length) == automaton.find(ids[at + 1 - length : at + 1])


@pytest.mark.usefixtures("unchecked")
def test_states_at_every_length() -> None:
    """At most two states per token, and three transitions."""
    for ids in random_texts(300):
        automaton = automaton_of(ids)
        assert len(automaton.next) <= max(2, 2 * len(ids))
        assert sum(map(len, automaton.next)) <= 3 * len(ids)
        assert {len(automaton.link), len(automaton.length), len(automaton.count)} == {len(automaton.next)}


class _Counting(list[Any]):
    """A list that counts how often an entry is read."""

    read = 0

    def __getitem__(self, where: Any) -> Any:
        self.read += 1
        return super().__getitem__(where)


def long_texts(length: int) -> dict[str, list[int]]:
    """Texts on which a careless automaton is slow."""
    chance = random.Random(3)
    word, longer = [1], [1, 2]
    while len(longer) < length:
        word, longer = longer, longer + word
    return {
        "one token": [1] * length,
        "period 2": [1, 2] * (length // 2),
        "many followers": [token for i in range(length // 2) for token in (1, i + 5)],
        "random": [chance.randrange(50_000) for _ in range(length)],
        "few tokens": [chance.randrange(3) for _ in range(length)],
        "Fibonacci": longer[:length],
        "copies": [chance.randrange(500) for _ in range(length // 4)] * 4,
    }


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", list(long_texts(4)))
def test_a_token_costs_the_same_at_any_length(name: str) -> None:
    costs = []
    for length in (500, 16_000):
        ids = long_texts(length)[name]
        automaton = automaton_of(ids)
        assert len(automaton.next) <= 2 * len(ids)
        watched = Automaton()
        for slot in ("next", "link", "length", "count"):
            setattr(watched, slot, _Counting(getattr(watched, slot)))
        for token in ids:
            watched.add(token)
        costs.append(sum(getattr(watched, slot).read for slot in ("next", "link", "length", "count")) / len(ids))
    assert max(costs) <= 4 * REACH + 20
