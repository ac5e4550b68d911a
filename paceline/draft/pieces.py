"""What the ids of a tokenizer stand for, as bytes: the language that two tokenizers have in common.

Pieces(tokenizer)   id -> bytes, text -> ids
Dictionary          which ids of two tokenizers stand for the same, and how one's text is spelt by the other
"""

import json
import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

from paceline.errors import IncompatibleDrafter

PROBE = 'Two spaces  and a tab\t"quoted", naïve café, 東京 😀\n    return x_1 + 42\n'
"""A text on which it is checked that the pieces of a tokenizer are what it decodes to."""
LEADS = ("", "\n", "a", ".", "0")
"""What a text is put behind to be spelt as inside of another one: the first of them that does not grow into it."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BAD = re.compile("([\udc80-\udcff]+)")
"""Bytes that are no character, as `surrogateescape` writes them."""


class Pieces:
    """The bytes that each id of a tokenizer stands for, and the ids by which it spells a text.

    Args:
        tokenizer: a fast one, whose tokens are pieces of text: byte-level ones, or those of sentencepiece with `▁` for
            a space and `<0x0A>` for a byte.
        owner: whose it is, for messages.

    Raises:
        IncompatibleDrafter: its tokens are no pieces of text, so that nothing can be said about single ones.
    """

    def __init__(self, tokenizer: Any, owner: str) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else backend.decoder
        steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        if not steps or not _are_understood(steps):
            found = " and ".join(dict.fromkeys(kinds)) if kinds else "no decoder"
            raise IncompatibleDrafter(
                f"the {owner}'s tokenizer {type(tokenizer).__name__} joins its tokens by rules of its own ({found}): "
                "they are no pieces of text that another tokenizer could share; a byte-level or a sentencepiece one is "
                "needed: use a draft model of the target's own family, or a look-up such as 'suffix'"
            )
        names = tokenizer.get_vocab()
        special = {i for i, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        self.names: list[str | None] = [None] * (max(names.values(), default=-1) + 1)
        self.values: list[bytes | None] = [None] * len(self.names)
        """By id; None for special tokens, which are no text, and for ids without a token."""
        self.byte_tokens: set[int] = set()
        """Those to which characters without a token of their own are spelt."""
        for name, i in names.items():
            self.names[i] = name
            self.values[i] = None if i in special else _bytes_of(name, steps)
            if "ByteFallback" in kinds and name.startswith("<0x") and _BYTE.fullmatch(name):
                self.byte_tokens.add(i)
        told = b"".join(self.values[i] or b"" for i in self.encode(PROBE)).decode(errors="replace")
        decoded = self._decode(self.encode(PROBE))
        if told.strip(" ") != decoded.strip(" "):
            raise IncompatibleDrafter(
                f"the {owner}'s tokenizer {type(tokenizer).__name__} decodes a text to {decoded!r}, and its tokens one "
                f"by one are {told!r}; use a draft model of the target's own family"
            )

    def value(self, token: int) -> bytes | None:
        """The bytes of an id; None for special tokens and for ids beyond the vocabulary."""
        return self.values[token] if 0 <= token < len(self.values) else None

    @cached_property
    def drops_space(self) -> bool:
        """Whether a space in front of the whole text is the tokenizer's own, and not part of the text."""
        spaced = (i for i, value in enumerate(self.values) if value and value[:1] == b" " and value[1:].isalpha())
        first = next(spaced, None)
        return first is not None and not self._decode([first]).startswith(" ")

    @cached_property
    def opening(self) -> list[int]:
        """The special tokens that every text begins with."""
        bare, whole = self.encode("a"), list(self._tokenizer.encode("a"))
        return next((whole[:n] for n in range(len(whole)) if whole[n : n + len(bare)] == bare), [])

    @cached_property
    def _single(self) -> dict[int, int]:
        """The ids that stand for one byte, byte tokens first."""
        ids = [(value[0], i) for i, value in enumerate(self.values) if value and len(value) == 1]
        return dict(sorted(ids, key=lambda pair: pair[1] in self.byte_tokens))  # the last one of a byte counts

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text that begins here; names of special tokens in it are plain text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False))

    def behind(self, text: str, before: str = "") -> list[int] | None:
        """The ids of a text that stands behind another one, byte for byte; None where the tokenizer cannot say it.

        Where the two would grow together the text is spelt as if it stood alone.
        """
        wanted = text.encode()
        for lead in dict.fromkeys((before, *LEADS)):
            found = self._ending(self.encode(lead + text), wanted)
            if found is not None:
                return found
        return None

    def spell(self, data: bytes, *, opens: bool = False) -> list[int]:
        """Ids for any bytes; as near as the tokenizer gets to them, where it changes what it reads.

        Args:
            opens: the text begins with them.
        """
        found: list[int] = []
        for part in _BAD.split(data.decode(errors="surrogateescape")):
            if _BAD.match(part):
                single = [self._single.get(byte) for byte in part.encode(errors="surrogateescape")]
                known = [i for i in single if i is not None]
                found += known if len(known) == len(single) else self.encode("\ufffd")
            elif part:
                inside = None if opens and not found else self.behind(part)
                found += self.encode(part) if inside is None else inside
        return found

    def _ending(self, ids: list[int], wanted: bytes) -> list[int] | None:
        """The last ids, if these are the wanted bytes."""
        left = wanted
        for place in range(len(ids) - 1, -1, -1):
            if not left:
                return ids[place + 1 :]
            value = self.value(ids[place])
            if not value or not left.endswith(value):
                return None
            left = left[: -len(value)]
        return None if left else ids

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Dictionary:
    """Which ids of a target and of a draft model stand for the same.

    Ids correspond if they stand for the same bytes, special ones if they have the same name. No id has two
    counterparts: of several with the same bytes the one counts by which the tokenizer spells them.
    """

    def __init__(self, target: Pieces, draft: Pieces) -> None:
        self.target, self.draft = target, draft
        self.to_draft: dict[int, int] = {}
        self.to_target: dict[int, int] = {}
        theirs = {name: i for i, name in enumerate(draft.names) if name is not None}
        for i, name in enumerate(target.names):
            other = None if name is None else theirs.get(name)
            if other is not None and target.values[i] == draft.values[other]:
                self._pair(i, other)
        # Byte tokens beside byte tokens: they stand for what has no token, and "a" is one already.
        for are_bytes in ({False}, {True}, {False, True}):
            ours, others = self._open(target, are_bytes), self._open(draft, are_bytes)
            for value in ours.keys() & others.keys():
                self._pair(ours[value], others[value])

    @classmethod
    def of(cls, target_tokenizer: Any, draft_tokenizer: Any) -> "Dictionary":
        """The dictionary of two tokenizers.

        Raises:
            IncompatibleDrafter: the tokens of one of them are no pieces of text.
        """
        return cls(Pieces(target_tokenizer, "target"), Pieces(draft_tokenizer, "draft"))

    @property
    def is_same(self) -> bool:
        """Whether every id that both tokenizers have is its own counterpart: nothing is to be translated then."""
        names = zip(self.target.names, self.draft.names, strict=False)
        return all(self.to_draft.get(i) == i for i, (ours, theirs) in enumerate(names) if ours or theirs)

    def share(self, text: str) -> float:
        """The part of the target's tokens of a text that the draft has too."""
        ids = self.target.encode(text)
        return sum(i in self.to_draft for i in ids) / max(1, len(ids))

    def _pair(self, ours: int, theirs: int) -> None:
        self.to_draft[ours], self.to_target[theirs] = theirs, ours

    def _open(self, pieces: Pieces, are_bytes: set[bool]) -> dict[bytes, int]:
        """Ids without a counterpart by what they stand for; byte tokens, others, or both."""
        taken: Mapping[int, int] = self.to_draft if pieces is self.target else self.to_target
        found: dict[bytes, int] = {}
        several: dict[bytes, list[int]] = {}
        for i, value in enumerate(pieces.values):
            if value and i not in taken and (i in pieces.byte_tokens) in are_bytes:
                first = found.setdefault(value, i)
                if first != i:
                    several.setdefault(value, [first]).append(i)
        return found | {value: _usual(pieces, value, ids) for value, ids in several.items()}


def unfinished(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character that is not whole yet."""
    for count in range(1, min(3, len(data)) + 1):
        try:
            data[-count:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return count
    return 0


def _usual(pieces: Pieces, value: bytes, ids: list[int]) -> int:
    """Of ids that stand for the same, the one that the tokenizer itself uses."""
    spelt = pieces.spell(value)
    return spelt[0] if len(spelt) == 1 and spelt[0] in ids else ids[0]


# -- decoders ----------------------------------------------------------------------------------------------------------


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A decoder as the list of its parts."""
    if decoder is None:
        return []
    return [part for one in decoder["decoders"] for part in _steps(one)] if "decoders" in decoder else [decoder]


def _are_understood(steps: list[dict[str, Any]]) -> bool:
    """Whether each token has bytes of its own, wherever it stands, but for a space in front of the whole text."""
    fused = False
    for step in steps:
        kind = step["type"]
        fused = fused or kind == "Fuse"
        if kind == "Strip" and not (fused and step["content"] == " "):
            return False
        if kind == "Replace" and "String" not in step["pattern"]:
            return False
        if kind not in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"):
            return False
    return True


def _bytes_of(name: str, steps: list[dict[str, Any]]) -> bytes:
    """What a token says."""
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            try:
                return name.translate(_letters()).encode("latin-1")
            except UnicodeEncodeError:
                return name.encode()  # an added token: its name is its text
        if kind == "ByteFallback" and name.startswith("<0x") and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        if kind == "Metaspace":
            name = name.replace(step["replacement"], " ")
        if kind == "Replace":
            name = name.replace(step["pattern"]["String"], step["content"])
    return name.encode()


@cache
def _letters() -> dict[int, str]:
    """The byte, as a character, that each letter of a byte-level token stands for; others become none."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {ord(letter): chr(byte) for byte, letter in bytes_to_unicode().items()}
    return dict.fromkeys(range(256), "\uffff") | letters
