"""A certificate in words: what was checked, how strongly, and how numbers are written for people."""

import math
from typing import Any

from paceline.certify.certificate import Certificate, Layer, Parted, Strength, Verdict

WORDS: dict[Verdict, str] = {
    "lossless": "lossless",
    "near_ties_only": "near-ties only",
    "bug": "bug",
    "skipped": "skipped",
}
STYLES = {"lossless": "green", "near-ties only": "yellow", "bug": "red", "near-tie": "yellow"}
HOW: dict[Strength, str] = {
    "proved": "every outcome enumerated",
    "equal": "ids compared one by one",
    "tested": "a statistical test",
    "measured": "a number reported, not a check",
}
WHAT = {
    "rule": "the rule that accepts or rejects guesses, on small models",
    "drafter": "this drafter's own guesses, put through that rule",
    "greedy": "texts at temperature 0, with and without speculation",
    "sampled": "texts drawn with the same seed, with and without speculation",
    "joint law": "how often each text of a few tokens comes up, against the model's own probabilities",
    "acceptance": "how many guesses the model accepted",
}
ALLOWED = 1e-12
"""Total variation up to which a law that was enumerated in float64 is equal."""
MOST_ROWS = 24
"""Rows of a plot; what does not fit is counted in its caption, and the worst always fits."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with what cannot be seen spelt as an escape: control and bidi characters, lone surrogates, newlines."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def number(value: Any) -> str:
    """A number as people write it, or ``-`` for none."""
    if real(value) is None:
        return "-"
    if isinstance(value, int) or (abs(value) >= 1e3 and float(value).is_integer()):
        return f"{int(value):,}"
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.4g}"


def real(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fits else None


def duration(seconds: float | int) -> str:
    """``42 s``, ``3 min 20 s`` or ``1 h 12 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def count(amount: int, word: str) -> str:
    """``1 text`` or ``2,000 texts``."""
    return f"{amount:,} {word}" if amount == 1 else f"{amount:,} {word}s"


def word_of(layer: Layer) -> str:
    """A layer's verdict in words; a number that only was reported has passed no check."""
    return "reported" if layer.strength == "measured" and layer.verdict == "lossless" else WORDS[layer.verdict]


def headline(certificate: Certificate) -> tuple[str, str]:
    """The verdict, and what it means in one sentence."""
    verdict, method, layers = certificate.verdict, certificate.method, certificate.layers
    skipped = [layer.name for layer in layers if layer.verdict == "skipped"]
    if verdict == "bug":
        failed = ", ".join(layer.name for layer in layers if layer.verdict == "bug")
        return "bug", f"speculation with {method} changes what {certificate.model} writes (failed: {failed})"
    if verdict == "near_ties_only":
        return "near-ties only", (
            f"with {method}, {certificate.model} writes other text only where two tokens are closer than its own "
            "rounding"
        )
    if not any(word_of(layer) == "lossless" for layer in layers):
        return "no verdict", f"nothing was checked for {method} on {certificate.model}"
    passed = f"every check that ran passed (skipped: {', '.join(skipped)})" if skipped else "every check passed"
    return "lossless", f"{passed}; speculation with {method} does not change what {certificate.model} writes"


def figures_in_short(certificate: Certificate) -> list[tuple[str, str]]:
    """The few numbers that sum it up, each with what it counts."""
    texts = [p for layer in certificate.layers for p in entries(layer.figures, "prompts")]
    tokens = sum(int(real(p.get("tokens")) or 0) for p in texts)
    contexts = [c for layer in certificate.layers for c in entries(layer.figures, "contexts")]
    draws = sum(int(real(c.get("n")) or 0) for c in contexts)
    found = [
        (number(tokens) if tokens else "-", f"tokens compared in {count(len(texts), 'text')}"),
        (number(draws) if draws else "-", "draws tested"),
        (number(certificate.near_ties_per_1000), "near-ties per 1,000 tokens"),
        (places(certificate.mean_acceptance_length), "tokens per pass over the model"),
        (duration(certificate.seconds) if certificate.seconds else "-", "to check all this"),
    ]
    return [(value, name) for value, name in found if value != "-"]


def places(value: Any) -> str:
    return "-" if real(value) is None else f"{value:.2f}"


def entries(figures: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects in a list of figures, or none."""
    found = figures.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list | tuple) else []


def parting(one: Parted) -> tuple[str, str]:
    """Near-tie or bug, and the reason in a sentence."""
    d = one.difference
    word = "near-tie" if d.near_tie else "bug"
    if d.expected < 0 or d.got < 0:
        return word, "one text ended where the other went on, which rounding cannot do"
    gap = number(abs(d.logit_expected - d.logit_got))
    if gap == "-":
        return (
            word,
            f"one of the logits is not a finite number; floor, what rounding moves a logit by: {number(d.floor)}",
        )
    return word, f"the logits are {gap} apart; floor, what rounding moves a logit by: {number(d.floor)}"


def sides(one: Parted) -> list[tuple[str, str, str, str]]:
    """Without and with speculation: name, token, logit, text."""
    d = one.difference
    rows = [("without", d.expected, d.logit_expected, one.expected), ("with", d.got, d.logit_got, one.got)]
    return [
        (side, "ended" if token < 0 else f"id {token}", "-" if real(logit) is None else f"{logit:.6g}", text)
        for side, token, logit, text in rows
    ]
