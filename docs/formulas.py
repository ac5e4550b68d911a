"""Formulas of the pages: `$…$` and `$$…$$` become MathML, which browsers draw by themselves, with no script or font.

A small part of TeX is read: letters, numbers, `^`, `_`, braces, `\\frac`, `\\sqrt`, `\\text`, and the names below.
Anything else is an error that stops the build.
"""

import re
from html import escape

SIGNS = {
    "cdot": "·",
    "times": "×",
    "le": "≤",
    "ge": "≥",
    "ne": "≠",
    "approx": "≈",
    "to": "→",
    "sim": "∼",
    "propto": "∝",
    "in": "∈",
    "infty": "∞",
    "ldots": "…",
    "mid": "∣",
    "iff": "⟺",
    "{": "{",
    "}": "}",
}
LETTERS = {"alpha": "α", "gamma": "γ", "tau": "τ", "pi": "π"}
SUMS = {"sum": "∑", "prod": "∏"}
WORDS = ("min", "max", "ln", "log", "Pr", "TV", "arg")
SPACES = {",": "0.17em", ";": "0.28em", "quad": "1em"}
NARROW = "\u00a0"  # MathML drops plain spaces at the ends of words
TOKEN = re.compile(r"\\([A-Za-z]+|[,;{}])|(\d+(?:\.\d+)?)|([A-Za-z])|([\^_{}])|(\s+)|(.)", re.S)
CODE_OR_FORMULA = re.compile(
    r"(?P<code>```.*?```|`[^`\n]*`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$(?P<tail>[가-힣]*[,.;:)]*)", re.S
)
"""The tail stays on the formula's line: a comma, or a particle that Korean hangs on its noun."""


class Unreadable(ValueError):
    """A formula with something in it that is not read here."""


def render(markdown: str) -> str:
    """The text with its formulas as MathML; code stays as it is."""

    def replaced(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match["code"]
        if match["block"] is not None:
            return f'<div class="formula">{mathml(match["block"], block=True)}</div>'
        return f'<span class="formula">{mathml(match["inline"])}{match["tail"]}</span>'

    return CODE_OR_FORMULA.sub(replaced, markdown)


def mathml(tex: str, block: bool = False) -> str:
    """One formula."""
    parts = [match for match in TOKEN.finditer(tex.strip()) if match[5] is None]
    reader = _Reader(parts, tex)
    inside = reader.row("")
    display = ' display="block"' if block else ""
    return f"<math{display}><mrow>{inside}</mrow></math>"


class _Reader:
    def __init__(self, parts: list[re.Match[str]], tex: str) -> None:
        self.parts, self.tex, self.place = parts, tex, 0

    def row(self, end: str) -> str:
        """Everything up to a closing brace, or up to the end."""
        found: list[str] = []
        while self.place < len(self.parts):
            if end and self.parts[self.place][4] == end:
                self.place += 1
                return "".join(found)
            found.append(self.scripted())
        if end:
            raise Unreadable(f"no {end} in the formula {self.tex!r}")
        return "".join(found)

    def scripted(self) -> str:
        """Something with what hangs on it below and above."""
        big = self.parts[self.place][1] in SUMS
        base, below, above = self.one(), "", ""
        while self.place < len(self.parts) and self.parts[self.place][4] in ("^", "_"):
            kind = self.parts[self.place][4]
            self.place += 1
            hung = self.one()
            below, above = (hung, above) if kind == "_" else (below, hung)
        if below and above:
            name = "munderover" if big else "msubsup"
            return f"<{name}>{base}{below}{above}</{name}>"
        if below:
            name = "munder" if big else "msub"
            return f"<{name}>{base}{below}</{name}>"
        return f"<msup>{base}{above}</msup>" if above else base

    def one(self) -> str:
        """A single thing: a letter, a number, a group, a fraction …"""
        if self.place == len(self.parts):
            raise Unreadable(f"the formula {self.tex!r} ends too early")
        _, name, number, letter, mark, _, other = (self.parts[self.place][i] for i in range(7))
        self.place += 1
        if number is not None:
            return f"<mn>{number}</mn>"
        if letter is not None:
            return f"<mi>{letter}</mi>"
        if mark == "{":
            return f"<mrow>{self.row('}')}</mrow>"
        if mark is not None:
            raise Unreadable(f"a {mark} too many in the formula {self.tex!r}")
        if other is not None:
            return _sign(other)
        return self.named(name)

    def named(self, name: str) -> str:
        if name in LETTERS:
            return f"<mi>{LETTERS[name]}</mi>"
        if name in SIGNS:
            return _sign(SIGNS[name])
        if name in SUMS:
            return f"<mo>{SUMS[name]}</mo>"
        if name in WORDS:
            space = '<mspace width="0.17em"/>' if name in ("ln", "log") else ""
            return f"<mi>{name}</mi>{space}"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name == "frac":
            return f"<mfrac>{self.one()}{self.one()}</mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self.one()}</msqrt>"
        if name == "text":
            return f"<mtext>{escape(self.words(), quote=False).replace(' ', NARROW)}</mtext>"
        raise Unreadable(f"\\{name} in the formula {self.tex!r} is not read")

    def words(self) -> str:
        """The letters in braces, with their spaces, as they stand in the text."""
        begin = self.parts[self.place].end() if self.place < len(self.parts) else 0
        end = self.tex.strip().find("}", begin)
        if not begin or self.parts[self.place][4] != "{" or end < 0:
            raise Unreadable(f"\\text without braces in the formula {self.tex!r}")
        while self.parts[self.place].start() < end:
            self.place += 1
        self.place += 1
        return self.tex.strip()[begin:end]


def _sign(sign: str) -> str:
    sign = {"-": "−", "*": "∗"}.get(sign, sign)
    fixed = ' stretchy="false"' if sign in "()[]{}|∣" else ""
    return f"<mo{fixed}>{escape(sign, quote=False)}</mo>"
