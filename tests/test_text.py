"""Ids to pieces of text: whole characters, no stall, and in the end what decoding everything at once gives."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.text import Detokenizer

TEXT = "né 🎉🔥 漢字 ∑ done"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """Byte-level BPE: what is no common English piece becomes one token per byte."""
    return AutoTokenizer.from_pretrained(tiny_model)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte, through the byte-level decoder of real tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@cache
def ids_of_bytes() -> dict[int, int]:
    """The id of each byte: found through characters of one or two bytes that contain it."""
    made, found = byte_tokenizer(), {}
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000 or (code > 0x800 and code % 0x1000):
            continue
        raw = chr(code).encode()
        found.update(zip(raw, made(chr(code), add_special_tokens=False).input_ids, strict=True))
    return found


def as_ids(raw: bytes) -> list[int]:
    """Bytes that need not be text; those that no text holds (0xC0, 0xF8 …) get the id of a continuation byte."""
    known = ids_of_bytes()
    return [known.get(byte, known[0x80]) for byte in raw]


class Counting(PreTrainedTokenizerFast):
    """Counts the ids it is asked to decode."""

    num_decoded = 0

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, *args, **options)


def pieces_of(tokenizer: Any, ids: Sequence[int], blocks: Sequence[int], **options: Any) -> list[str]:
    """What comes out when ids arrive in blocks of these sizes, again and again; the last piece is the flush."""
    detokenizer, pieces, at, turn = Detokenizer(tokenizer, **options), [], 0, 0
    while at < len(ids):
        size = blocks[turn % len(blocks)]
        pieces.append(detokenizer.add(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("blocks", [[1], [2], [3], [4], [5], [1, 5], [3, 1, 1], [40]], ids=str)
@pytest.mark.parametrize("text", [TEXT, "🎉", "def add(a, b): ∑🔥", "漢字かな交じり文", "a\ufffdb\ufffd"])
def test_sglang_34740_whole_characters_in_every_split(tokenizer: Any, text: str, blocks: list[int]) -> None:
    ids = tokenizer(text).input_ids
    assert len(ids) > len(text) / 2
    pieces = pieces_of(tokenizer, ids, blocks)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == "" or text.endswith("\ufffd")  # whole text leaves nothing to flush


def test_sglang_34740_a_bad_byte_does_not_stall() -> None:
    """A byte that begins a character which never comes, then 500 letters: three tokens later it is given up."""
    ids = as_ids(b"ok \xe2" + bytes(random.Random(0).choices(range(97, 123), k=500)))
    counting = Counting(tokenizer_object=byte_tokenizer().backend_tokenizer)
    detokenizer, pieces = Detokenizer(counting), []
    for at, token in enumerate(ids):
        pieces.append(detokenizer.add([token]))
        assert at + 1 - len("".join(pieces)) <= 3
    assert "".join(pieces) + detokenizer.flush() == byte_tokenizer().decode(ids)
    assert "".join(pieces).count("\ufffd") == 1
    assert counting.num_decoded < 20 * len(ids)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_work_does_not_grow_with_the_text(size: int) -> None:
    raw = (TEXT * 60).encode()
    counting = Counting(tokenizer_object=byte_tokenizer().backend_tokenizer)
    ids = as_ids(raw)
    assert "".join(pieces_of(counting, ids, [size])) == TEXT * 60
    assert counting.num_decoded < 20 * len(ids)


@given(
    raw=st.lists(st.sampled_from(b"ab\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), max_size=24),
    blocks=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_any_bytes_in_any_blocks(raw: list[int], blocks: list[int]) -> None:
    """Cut, doubled and lone parts of characters: the pieces are the text of all ids."""
    ids = as_ids(bytes(raw))
    assert "".join(pieces_of(byte_tokenizer(), ids, blocks)) == byte_tokenizer().decode(ids)


@given(
    chars=st.lists(st.sampled_from("ab é€漢🎉😀"), max_size=12),
    blocks=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_any_text_in_any_blocks(chars: list[str], blocks: list[int]) -> None:
    text = "".join(chars)
    pieces = pieces_of(byte_tokenizer(), as_ids(text.encode()), blocks)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_flush_gives_up_what_is_held_back() -> None:
    ids = as_ids("né🎉".encode()[:-1])
    detokenizer = Detokenizer(byte_tokenizer())
    assert detokenizer.add(ids) == "né"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.add([]) == ""


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with the space in front, the kind whose first word is written without it."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<s>", "</s>", "▁the", "▁old", "▁cat", "s", "▁", "."]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="</s>"))
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@given(ids=st.lists(st.integers(0, 7), max_size=16), blocks=st.lists(st.integers(1, 4), min_size=1, max_size=3))
@pytest.mark.parametrize("skip", [True, False])
def test_words_keep_their_spaces(skip: bool, ids: list[int], blocks: list[int]) -> None:
    """Special tokens among the words, shown or skipped."""
    made = word_tokenizer()
    assert made.decode([2, 3, 4, 5]) == "the old cats"
    pieces = pieces_of(made, ids, blocks, skip_special_tokens=skip)
    assert "".join(pieces) == made.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
