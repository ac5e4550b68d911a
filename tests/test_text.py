"""Ids to text, token by token: against decoding everything at once, and against a search that starts over each time."""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.errors import BadRequest
from paceline.text import Detokenizer, Text, encode_bad_word, special_stops

TEXT = "né 🎉🔥 漢字 ∑ done"
BROKEN = "\ufffd"


# -- tokenizers of every kind ------------------------------------------------------------------------------------------


class Counting(PreTrainedTokenizerFast):
    """Counts the ids it is asked to decode."""

    num_decoded = 0

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, *args, **options)


def counting(made: PreTrainedTokenizerFast) -> Counting:
    return Counting(tokenizer_object=made.backend_tokenizer, bos_token=made.bos_token, eos_token=made.eos_token)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """Byte-level BPE: what is no common English piece becomes one token per byte."""
    return AutoTokenizer.from_pretrained(tiny_model)


def of_words(words: Sequence[str], decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=made, **options)


def byte_level(pieces: Iterable[bytes]) -> PreTrainedTokenizerFast:
    """Byte-level tokens of any bytes, so that characters can be cut anywhere; id 0 is <s>."""
    from tokenizers import decoders
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter = bytes_to_unicode()
    words = ["<s>", *("".join(letter[byte] for byte in piece) for piece in pieces)]
    return of_words(words, decoders.ByteLevel(), bos_token="<s>")


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte: the byte's value and one, through the byte-level decoder of real tokenizers."""
    return byte_level(bytes([value]) for value in range(256))


def as_ids(raw: bytes) -> list[int]:
    return [1 + byte for byte in raw]


PIECES = [b"a", b"b", b"}", b"ab}", "é".encode(), "€".encode(), b"\xe2", b"\x82", b"\xac", b"\x82\xac", b"\xac\xe2",
          b"}\xf0\x9f", b"}\xf0", b"\x98", b"\x9f\x98", b"\x98\x80", b"\x80a}", b"\x80\xc3", b"\xa9b", b"\xff",
          b"a\xe2", b"\x9f", b"\x80", "\ufffd".encode(), b"\x82\xac\xe2\x82", b"\xac}\xe2\x82"]  # fmt: skip


@cache
def cut_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens that begin and end inside characters."""
    return byte_level(PIECES)


LETTERS = "ab cST O漢🎉}"


@cache
def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    from tokenizers import decoders

    return of_words(["<s>", *LETTERS], decoders.Fuse(), bos_token="<s>")


def spell(text: str) -> list[int]:
    return [1 + LETTERS.index(char) for char in text]


WORDS = ["<unk>", "<s>", "</s>", "▁the", "▁old", "▁cat", "s", "▁", ".", "漢", "▁▁"]


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with the space in front, the kind whose first word is written without it."""
    from tokenizers import decoders

    return of_words(WORDS, decoders.Metaspace(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


FIRST_BYTE = len(WORDS)


@cache
def fallback_tokenizer(kind: str = "llama") -> PreTrainedTokenizerFast:
    """The same with a token for each byte, decoded as Llama does it or as the newer kind does."""
    from tokenizers import decoders

    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    steps = llama if kind == "llama" else [decoders.ByteFallback(), decoders.Metaspace()]
    words = [*WORDS, *(f"<0x{value:02X}>" for value in range(256))]
    return of_words(words, decoders.Sequence(steps), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def fall_back(raw: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in raw]


# -- oracles -----------------------------------------------------------------------------------------------------------


def decoded(made: Any, ids: Sequence[int], skip: bool = True) -> str:
    return str(made.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def whole(made: Any, ids: Sequence[int], skip: bool = True) -> list[str]:
    """The text after each number of tokens, its unfinished end left out: everything decoded again each time."""
    return [decoded(made, ids[:count], skip).rstrip(BROKEN) for count in range(len(ids) + 1)]


def first_stop(
    texts: Sequence[str], stop: Sequence[str], include: bool = False, min_tokens: int = 0
) -> tuple[int, str, str] | None:
    """Index of the token that ends the text, the stop string, and the text: a search over everything for each token."""
    for i in range(min_tokens, len(texts) - 1):
        start = len(texts[min_tokens])
        found = [(texts[i + 1].find(string, start), string) for string in stop]
        hits = [(at + len(string), -len(string), string) for at, string in found if at >= 0]
        if hits:
            end, _, string = min(hits)
            return i, string, texts[i + 1][: end if include else end - len(string)]
    return None


@cache
def could_become(raw: bytes) -> bool:
    """Whether more bytes can make these text: all that can matter of the next three are tried."""
    tails = (bytes(tail) for size in range(4) for tail in product(b"\x80\x90\xa0", repeat=size))
    return any(is_text(raw + tail) for tail in tails)


def is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def characters(raw: bytes, ended: bool) -> str:
    """The whole characters in order, U+FFFD for each byte that is part of none; without an end that can grow."""
    text = ""
    while raw:
        size = next((n for n in range(1, min(4, len(raw)) + 1) if is_text(raw[:n])), 0)
        if not size and not ended and could_become(raw):
            break
        text += raw[:size].decode() if size else BROKEN
        raw = raw[size or 1 :]
    return text


def spelled(ids: Sequence[int], ended: bool = True) -> str:
    """What Llama-like ids say when a bad byte spoils nothing but itself; worked out from the words."""
    text, raw = "", b""
    for token in ids:
        if token < FIRST_BYTE:
            if token <= 2:  # special tokens are skipped, wherever they stand
                continue
            text, raw = text + characters(raw, True) + WORDS[token].replace("▁", " "), b""
        else:
            raw += bytes([token - FIRST_BYTE])
    return (text + characters(raw, ended)).removeprefix(" ")


def pieces_of(text: Text, ids: Iterable[int], every: int = 1) -> list[str]:
    """What can be taken after every so many tokens, and at the end."""
    pieces = []
    for count, token in enumerate(ids, 1):
        if text.push(token) is not None:
            break
        if count % every == 0:
            pieces.append(text.take())
    text.finish()
    return [*pieces, text.take()]


def check(made: Any, ids: Sequence[int], texts: Sequence[str], stop: Sequence[str], final: str, **options: Any) -> None:
    """One text against the search over everything; `final` is the text when no stop string is found."""
    expected = first_stop(texts, stop, options.get("include_stop", False), options.get("min_tokens", 0))
    text, pieces = Text(made, stop=stop, **options), []
    for i, token in enumerate(ids):
        found = text.push(token)
        pieces.append(text.take())
        assert (i, found) == expected[:2] if found else expected is None or i < expected[0]
        if found:
            break
    for _ in range(2):
        text.finish()
        pieces.append(text.take())
    assert text.found == (expected and expected[1])
    assert "".join(pieces) == text.text == (expected[2] if expected else final)
    assert BROKEN in text.text or not any(BROKEN in piece for piece in pieces)


def stops_in(draw: Any, text: str) -> list[str]:
    """One to four strings that are in the text or nearly so, among them beginnings and endings of one another."""
    source = text.replace(BROKEN, "") or "ab"
    stops: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(source) - 1))
        one = source[at : at + draw(st.integers(1, 5))]
        if stops and draw(st.booleans()):
            old = stops[0]
            one = draw(st.sampled_from([old[:1], old[:-1] or old, old[1:] or old, old + one, one + old]))
        stops.append(one)
    return stops


# -- whole characters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("said", [TEXT, "🎉", "def add(a, b): ∑🔥", "漢字かな交じり文", "a\ufffdb\ufffd"])
def test_sglang_34740_whole_characters_in_every_split(tokenizer: Any, said: str, every: int) -> None:
    ids = tokenizer(said).input_ids
    assert len(ids) > len(said) / 2
    pieces = pieces_of(Text(tokenizer), ids, every)
    assert "".join(pieces) == tokenizer.decode(ids) == said
    if BROKEN not in said:
        assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("bad", [b"\xe2", b"\xf0\x9f", b"\x80", b"\xff", b"\xe2\x82\xe2"])
def test_sglang_34740_a_bad_byte_does_not_stall(bad: bytes) -> None:
    """A character that never becomes one, then 500 letters: pieces keep coming."""
    letters = bytes(random.Random(0).choices(range(97, 123), k=500))
    made, ids = counting(byte_tokenizer()), as_ids(b"ok " + bad + letters)
    text, taken = Text(made), ""
    for count, token in enumerate(ids, 1):
        text.push(token)
        taken += text.take()
        assert count - len(taken) <= 2 + len(bad)
    text.finish()
    assert taken + text.take() == (b"ok " + bad + letters).decode(errors="replace") == decoded(made, ids)
    assert made.num_decoded < 20 * len(ids)


@pytest.mark.parametrize("made", [byte_tokenizer(), fallback_tokenizer()], ids=["byte-level", "fallback"])
def test_nothing_but_bad_bytes_waits_for_three_tokens_at_most(made: Any) -> None:
    ids = [made.convert_tokens_to_ids("<0x80>") if made is fallback_tokenizer() else 0x81] * 50
    text = Text(made)
    for count, token in enumerate(ids, 1):
        text.push(token)
        assert len(text.text) >= count - 3
    text.finish()
    assert text.text == BROKEN * 50 == decoded(made, ids)


def test_whole_characters_in_front_of_an_unfinished_one_do_not_wait() -> None:
    made = byte_level([b"}\xf0\x9f", b"\x98\x80}"])
    text = Text(made)
    text.push(1)
    assert text.take() == "}"
    text.push(2)
    assert text.take() == "😀}"
    stopping = Text(made, stop=["}"])
    assert stopping.push(1) == "}"
    stopping.finish()
    assert stopping.text == ""


def test_finish_gives_up_what_is_held_back() -> None:
    text = Text(byte_tokenizer())
    for token in as_ids("né🎉".encode()[:-1]):
        text.push(token)
    assert text.take() == "né"
    text.finish()
    assert text.take() == BROKEN
    text.finish()
    assert text.take() == ""


@given(ids=st.lists(st.integers(0, len(PIECES)), max_size=24), skip=st.booleans())
def test_tokens_that_cut_characters(ids: list[int], skip: bool) -> None:
    """Cut, doubled and lone parts of characters, and special tokens in between."""
    made = cut_tokenizer()
    text = Text(made, skip_special_tokens=skip)
    for count, token in enumerate(ids, 1):
        text.push(token)
        assert text.text.startswith(whole(made, ids[:count], skip)[-1])
    text.finish()
    assert text.text == decoded(made, ids, skip)


@given(raw=st.lists(st.sampled_from(b"ab\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff"), max_size=32))
def test_any_bytes(raw: list[int]) -> None:
    ids = as_ids(bytes(raw))
    assert "".join(pieces_of(Text(byte_tokenizer()), ids)) == bytes(raw).decode(errors="replace")


@given(ids=st.lists(st.integers(0, 330), max_size=40), skip=st.booleans())
def test_random_ids_of_a_model(tokenizer: Any, ids: list[int], skip: bool) -> None:
    """Also special tokens, and ids that a padded vocabulary has and the tokenizer does not know."""
    pieces = pieces_of(Text(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == decoded(tokenizer, ids, skip)


@given(silent=st.lists(st.sampled_from([0, 300]), max_size=6), data=st.data())
def test_tokens_without_text_inside_a_character(silent: list[int], data: Any) -> None:
    """Skipped special tokens and unknown ids neither end a character nor count against it."""
    ids = as_ids("a😀b".encode())
    for token in silent:
        ids.insert(data.draw(st.integers(0, len(ids))), token)
    assert "".join(pieces_of(Text(byte_tokenizer()), ids)) == "a😀b"
    ids = [token + FIRST_BYTE - 1 if 0 < token < 300 else token + 1 for token in ids]
    assert "".join(pieces_of(Text(fallback_tokenizer()), ids)) == "a😀b"


# -- words that are written differently at the beginning ---------------------------------------------------------------


@given(ids=st.lists(st.integers(0, len(WORDS)), max_size=16), skip=st.booleans())
@pytest.mark.parametrize("made", [word_tokenizer(), fallback_tokenizer(), fallback_tokenizer("metaspace")])
def test_words_keep_their_spaces(made: Any, ids: list[int], skip: bool) -> None:
    """Special tokens among the words, shown or skipped; spaces alone; an id without a word."""
    assert decoded(made, [3, 4, 5, 6]) == "the old cats"
    ids = [token if token < len(WORDS) else 99_999 for token in ids]
    assert "".join(pieces_of(Text(made, skip_special_tokens=skip), ids)) == decoded(made, ids, skip)


@given(
    parts=st.lists(
        st.one_of(st.integers(0, len(WORDS) - 1).map(lambda word: [word]), st.sampled_from("é€漢😀 a").map(str.encode)),
        max_size=12,
    ),
    skip=st.booleans(),
)
@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_characters_made_of_byte_tokens(kind: str, parts: list[Any], skip: bool) -> None:
    made = fallback_tokenizer(kind)
    ids = [token for part in parts for token in (fall_back(part) if isinstance(part, bytes) else part)]
    pieces = pieces_of(Text(made, skip_special_tokens=skip), ids)
    assert "".join(pieces) == decoded(made, ids, skip)
    assert not any(BROKEN in piece for piece in pieces)


TOKENS = st.one_of(
    st.integers(0, len(WORDS) - 1), st.sampled_from(fall_back(b" a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff\xed"))
)


@given(ids=st.lists(TOKENS, max_size=30))
def test_a_bad_byte_token_spoils_nothing_but_itself(ids: list[int]) -> None:
    """The decoder spoils the whole run of byte tokens; whole characters that have been shown cannot be taken back."""
    text = Text(fallback_tokenizer())
    for count, token in enumerate(ids, 1):
        text.push(token)
        assert text.text == spelled(ids[:count], ended=False)
    text.finish()
    assert text.text == spelled(ids)
    raw = [bytes([t - FIRST_BYTE]) if t >= FIRST_BYTE else b"" if t <= 2 else b"|" for t in ids]
    if could_become(b"".join(raw) + b"|"):  # the runs are text: then the decoder agrees with the words
        assert spelled(ids) == decoded(fallback_tokenizer(), ids)


def test_byte_names_without_a_byte_decoder_are_words() -> None:
    from tokenizers import decoders

    made = of_words(["<unk>", *(f"<0x{value:02X}>" for value in range(256))], decoders.Fuse())
    assert "".join(pieces_of(Text(made), [0x81, 0x82])) == decoded(made, [0x81, 0x82]) == "<0x80><0x81>"


# -- work --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "ids"),
    [
        (byte_tokenizer(), as_ids((TEXT * 60).encode())),
        (byte_tokenizer(), as_ids(b"\x80") * 500),
        (byte_tokenizer(), as_ids(b"\xf0") * 500),
        (byte_tokenizer(), [*as_ids(b"\xe2"), *[0] * 500]),
        (byte_tokenizer(), [0] * 500),
        (cut_tokenizer(), [1 + PIECES.index(b"\xac\xe2"), 1 + PIECES.index(b"\x82")] * 300),
        (cut_tokenizer(), [1 + PIECES.index("\ufffd".encode())] * 500),
        (fallback_tokenizer(), fall_back((TEXT * 60).encode())),
        (fallback_tokenizer(), fall_back(b"\xf0\x9f\x98") * 200),
        (fallback_tokenizer(), fall_back(b" ") * 500),
        (fallback_tokenizer(), [7] * 500),
        (fallback_tokenizer(), [*fall_back(b"\xe2"), *[1] * 500]),
    ],
)
def test_work_does_not_grow_with_the_text(made: Any, ids: list[int]) -> None:
    counted = counting(made)
    text, most = Text(counted), 0
    for token in ids:
        before = counted.num_decoded
        text.push(token)
        most = max(most, counted.num_decoded - before)
    text.finish()
    assert most < 20  # any single token, hence the mean as well
    assert text.text == (spelled(ids) if made is fallback_tokenizer() else decoded(made, ids))


class CountingString(str):
    """Counts the characters that are looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("unit", ["a", "ab", "aabaab"])
def test_a_long_stop_string_costs_the_same_for_every_token(unit: str) -> None:
    """Ten thousand characters that nearly match again and again: few steps per token, no rescan of what is held."""
    stop = CountingString((unit * 10_000)[:9_999] + "}")
    text = Text(char_tokenizer(), stop=[stop])
    assert stop.looks < 8 * len(stop)
    nearly, most = (unit * 10_000)[:10_500] + "c", 0
    for token in spell(nearly):
        before = stop.looks
        assert text.push(token) is None
        most = max(most, stop.looks - before)
    assert most <= 25  # the golden ratio's logarithm of 10,000 is 20
    assert text.take() == text.text == nearly

    said, stop.looks = nearly + str(stop) + "ab", 0
    text = Text(byte_level([said.encode()]), stop=[stop])
    table = stop.looks
    assert text.push(1) == stop
    assert stop.looks - table < 3 * len(said)
    assert text.text == said[: said.index(stop)]


def test_what_is_held_back_moves_along() -> None:
    """Held is exactly the beginning that has matched: a stop string of 1000, then a text that matches but its end."""
    text, taken = Text(char_tokenizer(), stop=["a" * 999 + "b"]), ""
    for count, token in enumerate(spell("a" * 3000), 1):
        text.push(token)
        taken += text.take()
        assert len(taken) == max(0, count - 999)
        assert len(text.text) == count
    assert text.push(spell("c")[0]) is None
    assert taken + text.take() == "a" * 3000 + "c"


# -- stop strings ------------------------------------------------------------------------------------------------------


def test_sglang_23802_stop_string_wherever_it_stands() -> None:
    text = Text(char_tokenizer(), stop=["STO"])
    assert [text.push(token) for token in spell("abcSTO")] == [None] * 5 + ["STO"]
    assert text.text == text.take() == "abc"
    assert text.found == "STO"


@pytest.mark.parametrize(
    ("said", "stop", "found", "left"),
    [
        ("abSTO", ["STO", "bS"], "bS", "a"),  # the earlier end, though listed later
        ("abSTO", ["abST", "bS"], "bS", "a"),  # the earlier end, though it begins later
        ("abSTO", ["T", "ST", "bST"], "bST", "a"),  # the same end: the longest
        ("abSTO", ["S", "ST"], "S", "ab"),
        ("aaaab", ["aab"], "aab", "aa"),
        ("abab", ["a"], "a", ""),
        ("ab", ["ab", "ab"], "ab", ""),
        ("ab", ["abc"], None, "ab"),
        ("🎉漢", ["漢"], "漢", "🎉"),
    ],
)
def test_which_stop_string(said: str, stop: list[str], found: str | None, left: str) -> None:
    for include in (False, True):
        text = Text(char_tokenizer(), stop=stop, include_stop=include)
        pieces_of(text, spell(said))
        assert text.found == found
        assert text.text == left + (found or "") * include


def test_stop_string_inside_one_token_cuts_what_follows() -> None:
    made = byte_level([b"x", b"a)b)c"])
    for include, left in ((False, "xa"), (True, "xa)")):
        text = Text(made, stop=[")"], include_stop=include)
        assert [text.push(1), text.push(2)] == [None, ")"]
        assert text.text == left


@pytest.mark.parametrize(("min_tokens", "left"), [(0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (5, "ababab")])
def test_min_tokens_counts_only_later_text(min_tokens: int, left: str) -> None:
    """A stop string has to lie wholly in the text of later tokens."""
    text = Text(char_tokenizer(), stop=["ab"], min_tokens=min_tokens)
    pieces_of(text, spell("ababab"))
    assert text.text == left


@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 8), skip=st.booleans())
def test_stop_strings_byte_level(tokenizer: Any, data: Any, include: bool, min_tokens: int, skip: bool) -> None:
    ids = data.draw(st.lists(st.one_of(st.integers(0, 322), st.integers(60, 90)), max_size=40))
    final = decoded(tokenizer, ids, skip)
    options = {"include_stop": include, "min_tokens": min_tokens, "skip_special_tokens": skip}
    check(tokenizer, ids, whole(tokenizer, ids, skip), stops_in(data.draw, final), final, **options)


@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 8))
def test_stop_strings_in_tokens_that_cut_characters(data: Any, include: bool, min_tokens: int) -> None:
    ids = data.draw(st.lists(st.integers(0, len(PIECES)), max_size=24))
    made, final = cut_tokenizer(), decoded(cut_tokenizer(), ids)
    stop = stops_in(data.draw, final)
    check(made, ids, whole(made, ids), stop, final, include_stop=include, min_tokens=min_tokens)


@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 8))
def test_stop_strings_byte_fallback(data: Any, include: bool, min_tokens: int) -> None:
    ids = data.draw(st.lists(TOKENS, max_size=30))
    texts = [spelled(ids[:count], ended=False) for count in range(len(ids) + 1)]
    stop = stops_in(data.draw, spelled(ids))
    check(fallback_tokenizer(), ids, texts, stop, spelled(ids), include_stop=include, min_tokens=min_tokens)


@given(
    ids=st.lists(st.integers(0, 4), max_size=40),
    stop=st.lists(st.text("ab c", min_size=1, max_size=6), min_size=1, max_size=4),
    min_tokens=st.integers(0, 8),
)
def test_what_may_be_shown(ids: list[int], stop: list[str], min_tokens: int) -> None:
    """After every token: the text, less its longest end that some stop string begins with."""
    made = char_tokenizer()
    check(made, ids, whole(made, ids), stop, decoded(made, ids), min_tokens=min_tokens)
    text, taken = Text(made, stop=stop, min_tokens=min_tokens), ""
    for count, token in enumerate(ids, 1):
        if text.push(token):
            break
        taken += text.take()
        searched = decoded(made, ids[min_tokens:count])
        begun = [n for string in stop for n in range(len(string)) if searched.endswith(string[:n])]
        said = decoded(made, ids[:count])
        assert text.text == said
        assert taken == said[: len(said) - max(begun, default=0)]


def test_stop_that_is_no_list_of_strings_is_refused() -> None:
    with pytest.raises(BadRequest, match="not empty"):
        Text(char_tokenizer(), stop=["a", ""])
    with pytest.raises(BadRequest, match="a list"):
        Text(char_tokenizer(), stop="ab")


def test_nothing_may_follow_the_end() -> None:
    stopped, finished = Text(char_tokenizer(), stop=["a"]), Text(char_tokenizer())
    stopped.push(1)
    finished.finish()
    for text in (stopped, finished):
        with pytest.raises(AssertionError):
            text.push(1)


# -- looking ahead -----------------------------------------------------------------------------------------------------


@given(data=st.data(), min_tokens=st.integers(0, 6))
@pytest.mark.parametrize(
    ("made", "tokens"),
    [
        (cut_tokenizer(), st.integers(0, len(PIECES))),
        (fallback_tokenizer(), TOKENS),
        (char_tokenizer(), st.integers(0, 4)),
    ],
    ids=["cut", "fallback", "characters"],
)
def test_forks_see_what_their_parent_would_and_leave_it_alone(
    made: Any, tokens: Any, data: Any, min_tokens: int
) -> None:
    ids, ahead = (data.draw(st.lists(tokens, max_size=12)) for _ in range(2))
    stop = stops_in(data.draw, decoded(made, [*ids, *ahead]))
    parent, alone = (Text(made, stop=stop, min_tokens=min_tokens) for _ in range(2))
    for count, token in enumerate(ids, 1):
        assert parent.push(token) == alone.push(token)
        assert parent.take() == alone.take()
        if parent.found:
            break
        fork, fresh = parent.fork(), Text(made, stop=stop, min_tokens=min_tokens)
        for token_before in ids[:count]:
            fresh.push(token_before)
        taken = ""
        for at, token_ahead in enumerate(ahead):
            second = fork.fork() if at % 2 else fork  # forks of forks, and one that goes on itself
            if at % 2:
                second.push(0)
            taken += fork.take()
            if fresh.push(token_ahead) != fork.push(token_ahead) or fresh.found:
                break
        assert fork.found == fresh.found
        fork.finish()
        fresh.finish()
        assert taken + fork.take() == fork.text == fresh.text[len(parent.text) :]
    parent.finish()
    alone.finish()
    assert parent.take() == alone.take()
    assert parent.text == alone.text


def test_forks_copy_nothing_that_grows() -> None:
    text = Text(char_tokenizer(), stop=["a" * 500 + "b"])
    for token in spell("ab" * 100 + "a" * 400):
        text.push(token)
    text.take()
    fork = text.fork()
    own = [vars(fork), vars(fork._detokenizer)]
    shared = [vars(text), vars(text._detokenizer)]
    for mine, theirs in zip(own, shared, strict=True):
        for name, value in mine.items():
            assert not isinstance(value, (list, deque, str)) or value is theirs[name] or len(value) < 20, name
    assert [fork.push(token) for token in spell("a" * 100 + "b")][-1] == "a" * 500 + "b"


def test_detokenizer_alone() -> None:
    one = Detokenizer(byte_tokenizer())
    assert [one.push(token) for token in as_ids("né".encode())] == ["n", "", "é"]
    assert one.finish() == ""


# -- what is given as text and found by id -----------------------------------------------------------------------------


def test_special_stops(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert special_stops(tokenizer, ["<|im_end|>", "the", "<|im", "d"]) == {end: "<|im_end|>"}
    assert special_stops(tokenizer, []) == {}
    # the reason for it: skipped, the token leaves nothing that could be found
    assert Text(tokenizer, stop=["<|im_end|>"]).push(end) is None
    assert Text(tokenizer, stop=["<|im_end|>"], skip_special_tokens=False).push(end) == "<|im_end|>"
    added = counting(char_tokenizer())
    added.add_tokens(["<user>"])
    assert special_stops(added, ["<user>", "a"]) == {added.convert_tokens_to_ids("<user>"): "<user>"}


def bpe() -> PreTrainedTokenizerFast:
    """a=0 b=1 c=2 space=3 newline=4 ab=5 space-ab=6, <s>=7 put in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {"a": 0, "b": 1, "c": 2, "Ġ": 3, "Ċ": 4, "ab": 5, "Ġab": 6, "<s>": 7}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "ab")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


@pytest.mark.parametrize(
    ("word", "sequences"),
    [
        ("ab", [[5], [6]]),  # the space is part of a token of its own
        ("abc", [[5, 2], [6, 2]]),
        (" ab", [[5], [6]]),  # spaces in front do not matter
        ("a", [[0]]),  # " a" is two tokens, and the second of them is already found
        ("ca", [[2, 0]]),
        ("\n", [[4]]),  # nothing but space: as it is
    ],
)
def test_bad_words_as_vllm_writes_them(word: str, sequences: list[list[int]]) -> None:
    assert bpe().encode("ab") == [7, 5]
    assert encode_bad_word(bpe(), word) == sequences


def test_bad_words_of_words_with_their_space() -> None:
    from tokenizers import normalizers

    made = fallback_tokenizer().backend_tokenizer
    copied = type(made).from_str(made.to_str())
    copied.normalizer = normalizers.Replace(" ", "▁")
    words = PreTrainedTokenizerFast(tokenizer_object=copied, unk_token="<unk>")
    assert encode_bad_word(words, "s") == [[6], [0]]  # "▁s" is no word here, but a token all the same


@pytest.mark.parametrize("word", ["", "z"])
def test_a_bad_word_without_tokens_is_refused(word: str) -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        encode_bad_word(bpe(), word)
