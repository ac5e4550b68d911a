"""Ids to text while they arrive: whole characters only, and never a stall."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
LONGEST = 4
"""Bytes of the longest UTF-8 character, hence most tokens a character can be spread over."""


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece.

    The pieces joined are the text of all ids. A piece never ends inside a character: the last tokens are held back
    while they may still grow into one, which at most `LONGEST` - 1 tokens can; bytes that are no character at all come
    out as U+FFFD then. The work per token does not grow with the text, because only the last few ids are decoded, with
    some settled ones before them, since some tokenizers write a word differently at the beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._before: list[int] = []
        self._before_text = ""
        self._open: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """The text that is settled now that these ids have come."""
        self._open += ids
        for held in range(min(LONGEST, len(self._open))):
            text = self._text(len(self._open) - held)
            if not text.endswith(BROKEN) or held == LONGEST - 1:
                return self._settle(len(self._open) - held, text)
        return ""

    def flush(self) -> str:
        """Whatever is still held back, as it is."""
        return self._settle(len(self._open), self._text(len(self._open)))

    def _text(self, count: int) -> str:
        whole = self._decode([*self._before, *self._open[:count]])
        return whole[len(self._before_text) :]

    def _settle(self, count: int, text: str) -> str:
        if count:
            before = [*self._before, *self._open[:count]][-LONGEST:]
            before_text = self._decode(before)
            # Skipped special tokens alone would look like the beginning of a text.
            if before_text or not self._before_text:
                self._before, self._before_text = before, before_text
            self._open = self._open[count:]
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))
