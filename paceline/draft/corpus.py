"""A corpus: text of the user's own that `suffix` copies from. One file, built once (see `corpus_build`), memory-mapped.

    magic, version, place of the header │ tokens │ order │ starts │ header (JSON)

    tokens   the documents one after the other, a border before, between and behind them: a value that is no token
    order    the places of tokens that stand behind another one, sorted by what stands before them, read backwards
    starts   where in `order` the places behind each id begin

    tokens   │ a b c │ x b c │ a b d │
    place    0 1 2 3 4 5 6 7 8 9 …
    order    2 10 │ 3 11 7 │ 6               behind "a"; behind "b", first "a b" and then "x b"; behind "x"

Sorted like this, the places behind a string stand together, and those behind its last tokens alone stand around them in
a wider range. So one binary search finds the longest suffix of a text, and shorter ones are found outwards from there.

The idea is REST's (He et al., 2311.08252). Opening reads the header; a look-up reads the few pages that it touches.
"""

import hashlib
import json
import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np
from jaxtyping import Integer

from paceline.errors import BadRequest, IncompatibleDrafter

DEPTH = 17
"""Tokens that places are sorted by: the longest match that is told from shorter ones."""
LEVELS = 3
"""Lengths of a match that are looked at: the longest one, and shorter ones that occur more often."""
WIDER = 2.0
"""How many times as often a shorter match must occur to be looked at as well."""
SAMPLES = 64
"""Occurrences of a match that are read, evenly spread over all of them."""
AHEAD = 24
"""Tokens that are read behind an occurrence: as many as a draft is deep, if nothing else is said."""
MAGIC = b"PaceCorp"
VERSION = 1
PREAMBLE = struct.Struct("<8sQQQ")
"""Magic, version, where the header begins, its bytes. Written last: without it the file is no corpus."""
ALIGNED = 64
"""Sections begin at multiples of so many bytes."""
MOST_HEADER = 1 << 20


@dataclass(frozen=True)
class About:
    """What a corpus says of itself."""

    tokenizer: str
    """The model whose tokenizer it was, as the user named it."""
    fingerprint: str
    """Of that tokenizer; see `fingerprint`."""
    vocab_size: int
    """Ids are below it; the border between documents is this number."""
    num_tokens: int
    """In documents, borders not counted."""
    num_documents: int
    num_skipped: int = 0
    """Files that were no text."""
    text_bytes: int = 0
    """Of the files that are in it."""


class Continuations:
    """What followed the longest suffixes of one text in a corpus, as states like those of an `Automaton`.

    A state stands for the occurrences of a string: a suffix of the text and tokens behind it. Its link is the next
    shorter string that was looked at and occurs more often. State 0 is the empty string; nothing is known behind it.
    """

    __slots__ = ("_behind", "_depth", "_next", "_rows", "_ways", "length", "link")

    def __init__(self, levels: Sequence[tuple[int, list[list[int]]]]) -> None:
        """From (tokens of the match, what followed each of its occurrences), the longest match first."""
        self.link: list[int] = [-1]
        """The state of the next shorter string; -1 for the empty one."""
        self.length: list[int] = [0]
        """Tokens in the string of a state."""
        self._rows: list[list[list[int]]] = [[]]
        self._depth: list[int] = [0]
        self._next: list[dict[int, int]] = [{}]
        self._ways: list[dict[int, list[list[int]]] | None] = [{}]
        for length, rows in reversed(levels):
            self._add(length, rows, 0, len(self.link) - 1)
        self._behind = len(self.link) - 1

    def match(self) -> tuple[int, int]:
        """The longest suffix of the text that occurs in the corpus, as state and length; (0, 0) if none does."""
        return self._behind, self.length[self._behind]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (a string of `length` tokens in `state`, then `token`) that is known here."""
        child = self._child(state, token)
        while child == 0:
            state = self.link[state]
            if state <= 0:
                return 0, 0
            length = self.length[state]
            child = self._child(state, token)
        return child, length + 1

    def shorten(self, state: int, length: int, most: int) -> tuple[int, int]:
        """The suffix with at most `most` tokens of a string in `state` that is one token longer at most."""
        if state and self.length[self.link[state]] >= most:
            state = self.link[state]
        return state, min(length, most)

    def followers(self, state: int, most: int) -> list[tuple[int, int]]:
        """Tokens that followed the occurrences of a state and how often, the most frequent one first."""
        return [(token, len(rows)) for token, rows in islice(self._split(state).items(), most)]

    def _add(self, length: int, rows: list[list[int]], depth: int, link: int) -> int:
        self.link.append(link)
        self.length.append(length)
        self._rows.append(rows)
        self._depth.append(depth)
        self._next.append({})
        self._ways.append(None)
        return len(self.link) - 1

    def _split(self, state: int) -> dict[int, list[list[int]]]:
        """A state's occurrences by the token that followed, the most frequent one first."""
        found = self._ways[state]
        if found is None:
            depth, ways = self._depth[state], dict[int, list[list[int]]]()
            for row in self._rows[state]:
                if depth < len(row):
                    ways.setdefault(row[depth], []).append(row)
            found = self._ways[state] = dict(sorted(ways.items(), key=lambda way: -len(way[1])))
        return found

    def _child(self, state: int, token: int) -> int:
        """The state behind `token`; 0 if no occurrence went on like that."""
        known = self._next[state].get(token)
        if known is None:
            rows = self._split(state).get(token)
            if rows is None:
                return 0
            # What a longer string is a suffix of need not be among the occurrences that were read of a shorter one.
            link, below = 0, self.link[state]
            while below > 0 and link == 0:
                link, below = self._child(below, token), self.link[below]
            known = self._next[state][token] = self._add(self.length[state] + 1, rows, self._depth[state] + 1, link)
        return known


class Corpus:
    """A corpus file, opened: nothing but its header is read until something is looked up.

    Args:
        path: what `paceline corpus build` wrote.

    Raises:
        BadRequest: there is no such file, or it is no corpus, of another version, cut short or damaged.
    """

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                header = _header(file.read(PREAMBLE.size), self.path, self.num_bytes, file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # the latter where the path is none: a zero byte, half a character
            raise BadRequest(
                f"cannot open the corpus {str(self.path)!r}: {getattr(error, 'strerror', None) or error}; make one "
                "with: paceline corpus build FILES -o X"
            ) from error
        try:
            self.about = About(**header["about"])
            _check_about(self.about)
            self._border = self.about.vocab_size
            sections = {name: self._section(*header[name]) for name in ("tokens", "order", "starts")}
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self.path, f"its header does not fit the file ({error})") from None
        self.tokens: np.ndarray = sections["tokens"]
        """[N]: the documents, `about.vocab_size` as the border between them; `DEPTH` borders stand at the beginning."""
        self.order: np.ndarray = sections["order"]
        """[M]: places of `tokens`, sorted by the tokens before them."""
        self.starts: np.ndarray = sections["starts"]
        """[V + 1]: the places behind id i are order[starts[i] : starts[i + 1]]."""
        if len(self.starts) != self._border + 1 or len(self.order) > len(self.tokens) or len(self.tokens) <= DEPTH:
            raise _damaged(self.path, "its parts do not fit each other")

    def check(self, tokenizer: Any, name: str) -> None:
        """Passes when `tokenizer`, that of the model `name`, is the one that the corpus was built with.

        Raises:
            IncompatibleDrafter: its ids would be other words.
        """
        own, other = self.about.fingerprint, fingerprint(tokenizer)
        if own != other:
            raise IncompatibleDrafter(
                f"the corpus {str(self.path)!r} was built with the tokenizer of {self.about.tokenizer} "
                f"({own[:12]}…, {self.about.vocab_size} ids); {name} has another one ({other[:12]}…, "
                f"{len(tokenizer)} ids): build it again with paceline corpus build FILES -o X --model {name}"
            )

    def find(self, text: Sequence[int]) -> Continuations:
        """What followed the longest suffix of `text` that occurs, and shorter ones that occur more often."""
        return Continuations([(length, self._behind(low, high)) for length, low, high in self.matches(text)])

    def matches(self, text: Sequence[int]) -> list[tuple[int, int, int]]:
        """Suffixes of `text`: (tokens, begin, end in `order`), the longest that occurs first, `LEVELS` at most.

        Only the last `DEPTH` tokens count. Each shorter one is the longest that occurs `WIDER` times as often.
        """
        # Ids that the corpus' tokenizer does not have may occur in a text; one of them has the number of the border.
        wanted = list(takewhile(lambda token: 0 <= token < self._border, text[: -DEPTH - 1 : -1]))
        if not wanted:
            return []
        first = min(int(self.starts[wanted[0]]), len(self.order))
        last = min(int(self.starts[wanted[0] + 1]), len(self.order))
        if first >= last:
            return []
        low = high = bisect_left(self.order, wanted, first, last, key=self._before)
        found: list[tuple[int, int, int]] = []
        length = self._common(wanted, low, high, first, last)
        while True:
            if length > 1:
                low, high = self._widened(wanted[:length], low, high, first, last)
            else:
                low, high = first, last
            if not found or high - low >= WIDER * (found[-1][2] - found[-1][1]):
                found.append((length, low, high))
            if length <= 1 or len(found) == LEVELS:
                return found
            length = min(self._common(wanted, low, high, first, last), length - 1)

    def _common(self, wanted: list[int], low: int, high: int, first: int, last: int) -> int:
        """Tokens that the neighbours outside of a range of `order` share with `wanted`: one at least, the last one."""
        return max(
            _shared(wanted, self._before(self.order[low - 1])) if low > first else 1,
            _shared(wanted, self._before(self.order[high])) if high < last else 1,
        )

    def _widened(self, wanted: list[int], low: int, high: int, first: int, last: int) -> tuple[int, int]:
        """The places behind `wanted`: a range of `order` from first to last, around the range from low to high.

        In growing steps outwards, then by halves: what is near lies on the same pages.
        """
        length = len(wanted)

        def before(place: SupportsInt) -> list[int]:
            return self._before(place)[:length]

        step, edge = 1, low
        while edge > first and before(self.order[edge - 1]) == wanted:
            edge, step = max(first, edge - step), 2 * step
        low = bisect_left(self.order, wanted, max(first, edge), low, key=before)
        step, edge = 1, high
        while edge < last and before(self.order[edge]) == wanted:
            edge, step = min(last, edge + step), 2 * step
        high = bisect_right(self.order, wanted, high, max(high, edge), key=before)
        return low, high

    def _before(self, place: SupportsInt) -> list[int]:
        """The tokens before a place, the nearest one first."""
        end = int(place)
        found: list[int] = self.tokens[end - DEPTH : end][::-1].tolist()  # fewer, or none, where a damaged file points
        return found

    def _behind(self, low: int, high: int) -> list[list[int]]:
        """What stands at some places of `order` from low to high and goes on from there, to the document's end."""
        count = high - low
        picked = np.arange(low, high) if count <= SAMPLES else low + np.arange(SAMPLES) * count // SAMPLES
        places = self.order[picked].astype(np.int64)
        wanted = np.minimum(places[:, None] + np.arange(AHEAD), len(self.tokens) - 1)
        found = self.tokens[np.maximum(wanted, 0)]
        ends = np.where(found >= self._border, np.arange(AHEAD), AHEAD).min(axis=1)
        return [row[:end] for row, end in zip(found.tolist(), ends.tolist(), strict=True)]

    def _section(self, offset: Any, count: Any, kind: Any) -> Integer[np.ndarray, "_"]:
        """A part of the file as the header describes it."""
        if kind not in ("uint16", "uint32", "uint64"):
            raise ValueError(f"numbers of kind {kind!r}")
        dtype = np.dtype(kind).newbyteorder("<")
        if not all(type(value) is int and value >= 0 for value in (offset, count)) or offset % ALIGNED:
            raise ValueError(f"a part of {count!r} numbers at byte {offset!r}")
        if offset + count * dtype.itemsize > self.num_bytes:
            raise ValueError(f"a part that ends at byte {offset + count * dtype.itemsize} of {self.num_bytes}")
        return np.frombuffer(self._map, dtype, count, offset)


def fingerprint(tokenizer: Any) -> str:
    """What a tokenizer's ids mean and how it joins them, as a hash: equal wherever its files may lie."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else []
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([vocabulary, merges, scores]).encode()).hexdigest()


def preamble(begin: int, length: int) -> bytes:
    """The first bytes of a corpus whose header lies there."""
    return PREAMBLE.pack(MAGIC, VERSION, begin, length)


def header_bytes(about: About, sections: dict[str, tuple[int, int, str]]) -> bytes:
    """The header of a corpus: what it says of itself, and (offset, count, kind of numbers) of each part."""
    return json.dumps({"about": asdict(about)} | sections).encode()


def _header(first: bytes, path: Path, size: int, file: Any) -> dict[str, Any]:
    """The header of an open file, as far as it can be judged by itself."""
    if len(first) < PREAMBLE.size or not first.startswith(MAGIC):
        raise BadRequest(f"{str(path)!r} is no corpus; make one with: paceline corpus build FILES -o X")
    _, version, begin, length = PREAMBLE.unpack(first)
    if version != VERSION:
        raise BadRequest(
            f"the corpus {str(path)!r} is of version {version}; this one reads version {VERSION}: build it again with "
            "paceline corpus build"
        )
    if length > MOST_HEADER or begin + length != size:
        raise _damaged(path, f"it has {size} bytes and should have {begin + length}")
    file.seek(begin)
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is no JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no object")
    return header


def _check_about(about: About) -> None:
    """What is read from a file may be anything."""
    if not isinstance(about.tokenizer, str) or not isinstance(about.fingerprint, str):
        raise ValueError(f"tokenizer {about.tokenizer!r} with fingerprint {about.fingerprint!r}")
    for name in ("vocab_size", "num_tokens", "num_documents", "num_skipped", "text_bytes"):
        value = getattr(about, name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} {value!r}")


def _damaged(path: Path, how: str) -> BadRequest:
    return BadRequest(f"the corpus {str(path)!r} is damaged: {how}; build it again with paceline corpus build")


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two lists begin with alike."""
    for i, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return i
    return min(len(one), len(other))
