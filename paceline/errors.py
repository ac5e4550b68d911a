"""What can go wrong, in words a user can act on.

    PacelineError
    ├── BadRequest (also ValueError)      a setting, a prompt or a key that cannot be honoured
    ├── ModelNotFound                     no such folder, file, named model or hub id, or a hub that does not answer
    ├── CorruptWeights                    bytes that are not what they should be: wrong hash, cut file, bad header
    ├── UnsupportedModel                  a model class, a cache or an attention kernel that cannot verify a tree
    ├── IncompatibleDrafter               vocabulary or width of the drafter does not fit the target
    ├── CacheFull                         the context is used up, or memory for the key/value cache is
    └── BadLogits                         a law that is NaN or empty at a position that was reached

Every message says what was given, what was needed, and what to type instead.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PacelineError(Exception):
    """Base of everything this package raises on purpose."""


class BadRequest(PacelineError, ValueError):
    """A setting, a prompt or a key that cannot be honoured; raised before any work starts."""


class ModelNotFound(PacelineError):
    """No such folder, file, named model or hub id, or the hub cannot be reached."""


class CorruptWeights(PacelineError):
    """A weight file that is cut short, has the wrong hash, or does not parse."""


class UnsupportedModel(PacelineError):
    """A target that cannot verify a tree: recurrent state, encoder-decoder, or a kernel without a mask."""


class IncompatibleDrafter(PacelineError):
    """A drafter whose vocabulary, width or labels do not fit the target or the rule."""


class CacheFull(PacelineError):
    """More positions were asked for than the context or the memory has."""


class BadLogits(PacelineError):
    """The target's logits at a position that was reached are NaN, or no token is left."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest known word, or nothing when none is close."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_whole(name: str, value: object, least: int) -> None:
    """Passes for a whole number from `least` up; anything else is a BadRequest that says so."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadRequest(f"{name}={value!r} was given; a whole number from {least} up is needed")
