"""Building a corpus: files to token ids, and the order of their places, in memory that does not grow with the text.

    files ── pieces of text ── ids, appended to the file ── parts of the places, each sorted and appended

A part is all places behind a range of ids, `PART` of them at most; where one id alone has more, the ids before it tell
its places apart, and so on. A part is sorted by as many tokens as fit into 63 bits, then what is tied by as many more,
down to `DEPTH` tokens; what is tied even then stands in the order of the text.
"""

import codecs
import copy
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Integer

from paceline.draft.corpus import ALIGNED, DEPTH, MAGIC, About, Corpus, fingerprint, header_bytes, preamble
from paceline.errors import BadRequest, PacelineError
from paceline.files import whole

PIECE = 1 << 17
"""Characters that are encoded together, about; a file may have many such pieces."""
BATCH = 1 << 21
"""Characters handed to the tokenizer at once."""
PART = 1 << 24
"""Places that are sorted at once."""
BLOCK = 1 << 22
"""Tokens that are looked through at once."""


class Files(NamedTuple):
    """What a corpus is made of."""

    paths: list[Path]
    num_bytes: int


class Part(NamedTuple):
    """Places behind some tokens and an id before these."""

    behind: tuple[int, ...]
    """The nearest token first."""
    low: int
    high: int
    """The id is from `low` up and below `high`."""


def find_files(paths: "Sequence[str | os.PathLike[str]]") -> Files:
    """All files that are named or lie below a named folder, in order and once; hidden ones below it are left out.

    Raises:
        BadRequest: nothing has one of the names, or there is no file at all.
    """
    found: dict[tuple[int, int], Path] = {}
    num_bytes = 0
    for path in map(Path, paths):
        if not path.exists():
            raise BadRequest(f"there is no file or folder {str(path)!r}; name text files, or folders that hold some")
        for one in _below(path) if path.is_dir() else [path]:
            seen = _state(one)
            if seen is not None and stat.S_ISREG(seen.st_mode) and (seen.st_dev, seen.st_ino) not in found:
                found[seen.st_dev, seen.st_ino] = one
                num_bytes += seen.st_size
    if not found:
        names = ", ".join(repr(os.fspath(path)) for path in paths) or "nothing"
        raise BadRequest(f"{names} was given, and no file is there; name text files, or folders that hold some")
    return Files(list(found.values()), num_bytes)


def build(
    files: Files,
    tokenizer: Any,
    path: "str | os.PathLike[str]",
    *,
    name: str,
    tick: Callable[[int], None] = lambda done: None,
) -> Corpus:
    """Write a corpus of some files to `path`, which holds all of it or what it held before.

    Each file is a document. What looks like a special token in it is text like any other. Files that are not UTF-8
    text are left out, and counted.

    Args:
        name: the model that the tokenizer belongs to, for messages.
        tick: is told how many of the files' bytes are done.

    Raises:
        BadRequest: no file holds any text, or `path` cannot be a file.
        PacelineError: the file cannot be written, as when the disk is full.
    """
    output = Path(path)
    check_output(output)
    reader = _Reader(files, tokenizer, tick)

    def about(num_tokens: int, num_documents: int) -> About:
        if not num_tokens:
            raise BadRequest(f"{len(files.paths)} files were given, and none holds text in UTF-8; name some that do")
        sizes = num_tokens, num_documents, reader.num_skipped, reader.text_bytes
        return About(name, fingerprint(tokenizer), reader.border, *sizes)

    def sorted_so_far(share: float) -> None:
        tick(int(files.num_bytes * (1 + share) / 2))

    try:
        write(output, reader.pieces(), reader.border, about, sorted_so_far)
    except OSError as error:
        raise PacelineError(f"building the corpus {str(output)!r} failed: {error.strerror or error}") from error
    return Corpus(output)


def check_output(path: Path) -> None:
    """Passes when a file can be written there without losing anything but a corpus.

    Raises:
        BadRequest: it is a folder, or in none, or a file that is no corpus.
    """
    if path.is_dir():
        raise BadRequest(f"{str(path)!r} is a folder; a corpus is one file, such as {str(path / 'code.corpus')!r}")
    if not path.absolute().parent.is_dir():
        raise BadRequest(f"{str(path)!r}: there is no folder {str(path.absolute().parent)!r}")
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise BadRequest(
                    f"{str(path)!r} exists and is no corpus, so it is not replaced; name another file or delete it"
                )


def write(
    path: Path,
    pieces: Iterable[Integer[np.ndarray, "_"]],
    border: int,
    about: Callable[[int, int], About],
    tick: Callable[[float], None] = lambda share: None,
) -> None:
    """Write a corpus of ids.

    Args:
        pieces: ids below `border`, and `border` itself behind each document.
        about: makes what the corpus says of itself, from its number of tokens and of documents.
        tick: is told the share of the places that are sorted.
    """
    kind = "uint16" if border < 1 << 16 else "uint32"
    with whole(path) as file:
        begin = _aligned(file, ALIGNED)  # in front is room for the preamble
        count, num_tokens, num_documents = _append(file, pieces, border, kind)
        header = about(num_tokens, num_documents)
        file.flush()
        tokens = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kind, count, begin)
        wide = "uint32" if count < 1 << 32 else "uint64"
        counts = _counts(tokens, border, ())
        sections = {"tokens": (begin, count, kind), "order": (_aligned(file), int(counts.sum()), wide)}
        done = 0
        for places in ordered(tokens, border):
            file.write(places.astype(wide).tobytes())
            done += len(places)
            tick(done / sections["order"][1])
        sections["starts"] = (_aligned(file), border + 1, wide)
        file.write(np.cumsum([0, *counts[:border]]).astype(wide).tobytes())
        begin, written = file.tell(), file.write(header_bytes(header, sections))
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.write(preamble(begin, written))  # last, so that a file that was cut short by a dead disk is no corpus


# -- the order ---------------------------------------------------------------------------------------------------------


def ordered(tokens: Integer[np.ndarray, "N"], border: int) -> Iterator[Integer[np.ndarray, "_"]]:
    """All places that hold a token and stand behind one, by the `DEPTH` tokens before them; in parts."""
    for part in _parts(tokens, border):
        if len(part.behind) + 1 == DEPTH and part.high - part.low == 1:  # all tied, however many there are
            yield from _places(tokens, border, part)
        else:
            yield _sorted(tokens, border, np.concatenate([*_places(tokens, border, part)]), len(part.behind))


def _parts(tokens: Integer[np.ndarray, "N"], border: int, behind: tuple[int, ...] = ()) -> Iterator[Part]:
    """The places behind some tokens in parts, in order; none is empty."""
    ends = np.cumsum(_counts(tokens, border, behind))
    low = done = 0
    while low <= border:
        high = max(low + 1, int(np.searchsorted(ends, done + PART, "right")))
        count = int(ends[high - 1]) - done
        if count > PART and len(behind) + 1 < DEPTH:
            yield from _parts(tokens, border, (*behind, low))
        elif count:
            yield Part(behind, low, high)
        low, done = high, done + count


def _counts(tokens: Integer[np.ndarray, "N"], border: int, behind: tuple[int, ...]) -> Integer[np.ndarray, "_"]:
    """How many places behind some tokens have which id before these, the border included."""
    counts = np.zeros(border + 1, np.int64)
    for places in _places(tokens, border, Part(behind, 0, border + 1)):
        counts += np.bincount(tokens[places - 1 - len(behind)], minlength=border + 1)
    return counts


def _places(tokens: Integer[np.ndarray, "N"], border: int, part: Part) -> Iterator[Integer[np.ndarray, "_"]]:
    """The places of a part, in the order of the text."""
    behind, low, high = part
    high = high if behind else min(high, border)  # behind a border no place has a context
    for begin in range(DEPTH, len(tokens), BLOCK):
        end = min(begin + BLOCK, len(tokens))
        first = tokens[begin - 1 - len(behind) : end - 1 - len(behind)]
        found = (tokens[begin:end] != border) & (first >= low) & (first < high)
        for i, token in enumerate(behind, 1):
            found &= tokens[begin - i : end - i] == token
        yield begin + np.flatnonzero(found)


def _sorted(
    tokens: Integer[np.ndarray, "N"], border: int, order: Integer[np.ndarray, "P"], depth: int
) -> Integer[np.ndarray, "P"]:
    """Places, given in the order of the text, by the tokens before them; the first `depth` of these are all alike."""
    bits = border.bit_length()
    tied = np.arange(len(order))
    group = np.zeros(len(order), np.int64)
    # Places of one number are alike so far; numbers rise along the order.
    while len(tied) and depth < DEPTH:
        width = min((63 - int(group[-1]).bit_length()) // bits, DEPTH - depth)
        keys = group
        for i in range(1 + depth, 1 + depth + width):
            keys = (keys << bits) | tokens[order[tied] - i]
        ranks = np.argsort(keys, kind="stable")
        order[tied], keys = order[tied][ranks], keys[ranks]
        differs = np.concatenate([[True], keys[1:] != keys[:-1]])
        is_tied = ~differs
        is_tied[:-1] |= ~differs[1:]
        tied, group = tied[is_tied], np.cumsum(differs[is_tied]) - 1
        depth += width
    return order


# -- the file ----------------------------------------------------------------------------------------------------------


def _append(file: BinaryIO, pieces: Iterable[Integer[np.ndarray, "_"]], border: int, kind: str) -> tuple[int, int, int]:
    """Write ids between borders; how many numbers that makes, how many of them are tokens, in how many documents."""
    edge = np.full(DEPTH, border, kind).tobytes()
    count, num_tokens, num_documents, last = DEPTH, 0, 0, border
    file.write(edge)
    for piece in pieces:
        if len(piece):
            is_token = piece != border
            num_tokens += int(is_token.sum())
            num_documents += int((is_token & (np.concatenate([[last], piece[:-1]]) == border)).sum())
            count, last = count + len(piece), int(piece[-1])
            file.write(piece.astype(kind).tobytes())
    file.write(edge)
    return count + DEPTH, num_tokens, num_documents


def _aligned(file: BinaryIO, least: int = 0) -> int:
    """Where the next part begins, the gap before it filled."""
    end = file.tell()
    begin = max(least, -(-end // ALIGNED) * ALIGNED)
    file.write(bytes(begin - end))
    return begin


# -- text --------------------------------------------------------------------------------------------------------------


class _Reader:
    """The ids of some files, and how far they have come."""

    def __init__(self, files: Files, tokenizer: Any, tick: Callable[[int], None]) -> None:
        self.files, self.tick = files, tick
        self.border = max(tokenizer.get_vocab().values()) + 1
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
        self.is_special = np.isin(np.arange(self.border + 1), list(special))
        self.encode = _encoder(tokenizer)
        self.num_skipped = self.text_bytes = 0

    def pieces(self) -> Iterator[Integer[np.ndarray, "_"]]:
        """Arrays of ids, a border behind each document."""
        texts: list[tuple[str, bool]] = []
        waiting = done = 0
        for path in self.files.paths:
            seen = _state(path)
            size = 0 if seen is None else seen.st_size
            if not _is_text(path):
                self.num_skipped += 1
                size, done = 0, done + size
            for piece in _pieces(path) if size else ():
                texts.append(piece)
                waiting += len(piece[0])
                if waiting >= BATCH:
                    yield self._encoded(texts)
                    texts, waiting = [], 0
            self.text_bytes += size
            done += size
            self.tick(done // 2)  # the other half of the time goes into sorting
        if texts:
            yield self._encoded(texts)

    def _encoded(self, texts: list[tuple[str, bool]]) -> Integer[np.ndarray, "_"]:
        found = []
        for ids, (_, is_end) in zip(self.encode([text for text, _ in texts]), texts, strict=True):
            found.append(np.array([*ids, self.border] if is_end else ids, dtype=np.int64))
        joined = np.concatenate(found)
        joined[self.is_special[joined]] = self.border  # from a tokenizer that knows no other way to spell them
        return joined


def _encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Texts to ids, as plain text: no special tokens are added, and none is seen in a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return lambda texts: [list(ids) for ids in tokenizer(texts, **plain).input_ids]
    own = copy.deepcopy(backend)  # the caller's keeps its settings
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True
    return lambda texts: [found.ids for found in own.encode_batch_fast(texts, add_special_tokens=False)]


def _below(folder: Path) -> Iterator[Path]:
    """The files below a folder, but for hidden ones; links to folders are not followed."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(where, name) for name in sorted(names) if not name.startswith("."))


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _is_text(path: Path) -> bool:
    """Whether a file can be read and is UTF-8 without zero bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                if b"\0" in block:
                    return False
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """A file's text in pieces, cut between lines where it can be, and whether each is the last one."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:  # it may have been written to meanwhile
        text = file.read(PIECE)
        while text:
            more = file.read(PIECE)
            cut = _cut(text) if more else len(text)
            yield text[:cut], not more
            text = text[cut:] + more


def _cut(text: str) -> int:
    """Where to cut a text: behind the last line that is followed by one without indentation; else at the end.

    Hardly any tokenizer joins what stands on both sides of such a place.
    """
    end = len(text) - 1
    while (end := text.rfind("\n", 0, end)) >= 0:
        if not text[end + 1].isspace():
            return end + 1
    return len(text)
