"""Markup that escapes: every string that comes from outside passes through `el`, so it can never become markup."""

import html
from collections.abc import Iterable

from paceline.certify.words import printable


class Html(str):
    """Markup that may stand on the page as it is; `el` escapes every other string."""


def el(tag: str, *inside: str, **attributes: object) -> Html:
    """An element; ``class_`` is spelt ``class`` and ``stroke_width`` ``stroke-width``."""
    spelt = "".join(f' {name.rstrip("_").replace("_", "-")}="{escaped(str(v))}"' for name, v in attributes.items())
    return Html(f"<{tag}{spelt}>{join(inside)}</{tag}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other, those that are not markup escaped."""
    return Html("".join(part if isinstance(part, Html) else escaped(part) for part in parts))


def escaped(text: str) -> str:
    return html.escape(printable(text, keep="\n\t"))
