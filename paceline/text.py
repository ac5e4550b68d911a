"""Ids to text while they arrive: whole characters only, never a stall, and an end at the first stop string.

Detokenizer      ids -> text, piece by piece, a few decoded ids per token
Text             one answer: its text so far, what of it may be shown, and the stop string that ended it
special_stops    stop strings that are one special token, to be found by id
encode_bad_word  the token sequences by which a banned word is written
"""

import copy
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from paceline.errors import BadRequest

BROKEN = "\ufffd"
LONGEST = 4
"""Bytes of the longest UTF-8 character, hence most tokens a character can be spread over."""
_WINDOW = 2 * LONGEST
"""Most ids that are decoded together."""


class Detokenizer:
    """Turns ids into text one by one; the pieces joined are the text of all ids.

    A piece never ends inside a character: U+FFFD at the end of the text so far waits, for it may still become one, but
    only for `LONGEST` - 1 tokens more, which is all that a character can lack. Whole characters in front of it do not
    wait. The work per token does not grow with the text, because only a window of the last few ids is decoded. It
    begins with settled ids, since some tokenizers write a word differently at the beginning of a text; ids without any
    text, such as skipped special tokens, stay out of it, for they would look like the beginning of one.

    Tokenizers that fall back to byte tokens decode a run of these as a whole, and one bad byte turns all of it into
    U+FFFD, also characters that were whole and have been shown. Here these stay, and each bad byte is one U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._text = ""  # of the window
        self._settled = 0  # characters of that text that have come out
        self._ends: list[int] = []  # lengths of that text after each of the last tokens, while its end is broken
        self._values = self._byte_values()  # byte tokens only: id -> byte
        self._bytes: list[int] = []  # byte tokens of a character that is not whole yet, behind the window

    def push(self, token: int) -> str:
        """The text that is settled now that this token has come."""
        if token in self._values:
            self._bytes.append(token)
            return self._whole_bytes()
        if self._bytes and self._is_silent(token):
            return ""
        return self._give_up(len(self._bytes)) + self._add([token])

    def finish(self) -> str:
        """Whatever is still held back, as it is."""
        held = self._text[self._settled :] + BROKEN * len(self._bytes)
        self._settled, self._bytes = len(self._text), []
        return held

    def fork(self) -> "Detokenizer":
        """An independent copy; it costs a few numbers, whatever the length of the text."""
        other = copy.copy(self)
        other._window, other._ends, other._bytes = [*self._window], [*self._ends], [*self._bytes]
        return other

    def _add(self, tokens: list[int]) -> str:
        """What these tokens settle: one of any kind, or the byte tokens of one whole character."""
        text = self._decode([*self._window, *tokens])
        if text == self._text and self._is_silent(tokens[-1]):
            return ""
        self._window += tokens
        self._text = text
        self._ends = [*self._ends[1 - LONGEST :], len(text)]
        whole = len(text.rstrip(BROKEN))
        if len(self._ends) == LONGEST:
            # What was unfinished so many tokens ago is by now a character, or will never be one.
            whole = max(whole, self._ends[0])
        piece = text[self._settled : whole]
        self._settled = max(self._settled, whole)
        if self._settled == len(text):
            self._ends = []
            self._trim(len(tokens))
        if len(self._window) >= _WINDOW:
            self._trim(LONGEST)
        return piece

    def _trim(self, count: int) -> None:
        """Keep this many ids. A character that is cut by the window's beginning is settled: it shifts only counts."""
        self._window = self._window[-count:]
        text = self._decode(self._window)
        shift = len(text) - len(self._text)
        self._text = text
        self._settled += shift
        self._ends = [end + shift for end in self._ends]

    def _whole_bytes(self) -> str:
        """What the held byte tokens settle: the character they are, or U+FFFD for each that cannot begin one."""
        piece = ""
        while self._bytes:
            try:
                bytes(self._values[token] for token in self._bytes).decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                piece += self._give_up(1)
            else:
                whole, self._bytes = self._bytes, []
                piece += self._add(whole)
        return piece

    def _give_up(self, count: int) -> str:
        """U+FFFD for the first held byte tokens. A letter takes their place in the window, where they would spoil."""
        if not count:
            return ""
        piece = self._text[self._settled :] + BROKEN * count
        self._bytes = self._bytes[count:]
        self._window = [next(token for token, value in self._values.items() if value == ord("a"))]
        self._text = self._decode(self._window)
        self._settled, self._ends = len(self._text), []
        return piece

    def _byte_values(self) -> dict[int, int]:
        """The byte that each byte token stands for, if the tokenizer has such tokens and decodes them as bytes."""
        probe = self._tokenizer.convert_tokens_to_ids("<0x80>")
        if not isinstance(probe, int) or self._decode([probe]) != BROKEN:
            return {}
        names = [f"<0x{value:02X}>" for value in range(256)]
        ids = [self._tokenizer.convert_tokens_to_ids(name) for name in names]
        values = {token: value for value, token in enumerate(ids) if isinstance(token, int)}
        return values if len(values) == len(names) else {}

    def _is_silent(self, token: int) -> bool:
        """Whether a token has no text anywhere; twice, because a space alone is lost at the beginning of a text."""
        return not self._decode([token, token])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))


class _Stop(NamedTuple):
    """A stop string with its table for Knuth, Morris and Pratt's search (SIAM J. Comput. 6, 1977).

    The state of a search is the length of the longest beginning of the string that the text ends with. `back[state]`
    is the longest shorter one that goes on differently, so even a single step takes only logarithmically many of them.
    """

    string: str
    back: list[int]

    @classmethod
    def of(cls, string: str) -> "_Stop":
        back, border = [-1], 0
        for length in range(1, len(string)):
            back.append(back[border] if string[length] == string[border] else border)
            while border >= 0 and string[length] != string[border]:
                border = back[border]
            border += 1
        return cls(string, back)

    def step(self, state: int, char: str) -> int:
        while state >= 0 and self.string[state] != char:
            state = self.back[state]
        return state + 1


class Text:
    """The text of one answer, token by token, up to the first stop string in it.

    Of several stop strings the one whose end comes first in the text counts, at the same end the longest. Only text
    that came out with tokens of index `min_tokens` and later is searched; U+FFFD that may still become a character is
    searched when it has been given up. `found` is the stop string that ended the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop, str) or not all(stop):
            raise BadRequest(f"stop is {stop!r}; a list of strings that are not empty is needed")
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stops = [_Stop.of(string) for string in dict.fromkeys(stop)]
        self._states = [0] * len(self._stops)
        self._include_stop = include_stop
        self._unsearched = min_tokens  # tokens to come whose text is not searched
        self._taken: list[str] = []
        self._waiting: deque[str] = deque()  # settled, not taken
        self._num_waiting = 0  # characters
        self._finished = False
        self.found: str | None = None

    def push(self, token: int) -> str | None:
        """Add one token; the stop string that is complete now, after which nothing more may be pushed."""
        assert self.found is None, "a stop string has ended the text"
        assert not self._finished, "the text is finished"
        piece = self._detokenizer.push(token)
        if self._unsearched > 0:
            self._unsearched -= 1
            self._append(piece)
            return None
        end = self._search(piece)
        self._append(piece[:end])
        if self.found is not None and not self._include_stop:
            self._cut(len(self.found))
        return self.found

    def take(self) -> str:
        """The text that is safe to show and was not taken yet: all but the longest end that may begin a stop string.

        All pieces taken, the last one after the end, are `text`.
        """
        ended = self._finished or self.found is not None
        held = 0 if ended else max(self._states, default=0)
        pieces = []
        while self._waiting and self._num_waiting > held:
            piece = self._waiting.popleft()
            safe = min(len(piece), self._num_waiting - held)
            if safe < len(piece):
                self._waiting.appendleft(piece[safe:])
            pieces.append(piece[:safe])
            self._num_waiting -= safe
        self._taken += pieces
        return "".join(pieces)

    def finish(self) -> None:
        """No more tokens will come: release what is held back, unless a stop string ended the text."""
        if self.found is None and not self._finished:
            self._append(self._detokenizer.finish())
        self._finished = True

    @property
    def text(self) -> str:
        """All settled text, also what may begin a stop string, without what a found one took. Joined on each call."""
        return "".join([*self._taken, *self._waiting])

    def fork(self) -> "Text":
        """An independent copy for looking ahead; it costs as much for a long text as for a short one.

        It finds the stop strings that this text would find, also those begun before. Its own `text` and what can be
        taken from it hold only what comes after the fork.
        """
        other = copy.copy(self)
        other._detokenizer, other._states = self._detokenizer.fork(), [*self._states]
        other._taken, other._waiting, other._num_waiting = [], deque(), 0
        return other

    def _search(self, piece: str) -> int:
        """Where in the piece the first stop string ends, which becomes `found`; else the piece's length."""
        if not self._stops:
            return len(piece)
        for end, char in enumerate(piece, 1):
            self._states = [stop.step(state, char) for stop, state in zip(self._stops, self._states)]
            ended = [stop.string for stop, state in zip(self._stops, self._states) if state == len(stop.string)]
            if ended:
                self.found = max(ended, key=len)
                return end
        return len(piece)

    def _append(self, piece: str) -> None:
        if piece:
            self._waiting.append(piece)
            self._num_waiting += len(piece)

    def _cut(self, count: int) -> None:
        """Take characters off the end; none of them was taken, for what may begin a stop string is held back."""
        while count and self._waiting:
            piece = self._waiting.pop()
            kept = piece[: max(0, len(piece) - count)]
            count -= len(piece) - len(kept)
            self._num_waiting -= len(piece)
            self._append(kept)


def special_stops(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> dict[int, str]:
    """Ids of special and other added tokens whose exact text is a stop string, with that string.

    A skipped special token leaves no text to be searched, so a request has to end on its id.
    """
    added = tokenizer.added_tokens_decoder.items() if stop else ()
    return {token: str(entry) for token, entry in added if str(entry) in stop}


def encode_bad_word(tokenizer: PreTrainedTokenizerBase, word: str) -> list[list[int]]:
    """The token sequences by which a word is written, without special tokens: bare, and with a space in front.

    The second is listed only if it is as long as the first and begins with another id: the space is then part of a
    token, and where it is not, the first sequence finds the word behind a space too. Space in front of a word that was
    given is dropped; a word that is nothing else is taken as it is.
    """
    word = word.lstrip() or word
    bare, spaced = (tokenizer.encode(space + word, add_special_tokens=False) for space in ("", " "))
    if not word or not bare:
        raise BadRequest(f"the bad word {word!r} has no tokens; give a word with at least one character that has some")
    return [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]
