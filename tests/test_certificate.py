"""What people see of a certificate: the terminal's table and the page, on certificates as real runs give them."""

import io
import math
import os
import random
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.certify import Certificate, Difference, Layer, Parted
from paceline.certify.page import page, write_page
from paceline.certify.plots import figure, steps
from paceline.certify.report import table
from paceline.certify.words import duration, number
from paceline.errors import BadRequest

VOID = {"meta", "br", "hr", "img", "link", "input"}
PROMPTS = ["humaneval/0", "humaneval/1", "gsm8k/12", "mt-bench/writing-81", "repeat-a-table", "한국어 요약"]


def rule() -> Layer:
    depths = [(k, law) for law in ("peaked", "flat", "disjoint") for k in (1, 2, 3, 4)]
    sizes = [1.1e-16, 0.0, 2.2e-16, 4.4e-16, 1.7e-16, 3.3e-16, 0.0, 8.3e-16, 0.0, 0.0, 1.1e-16, 5.5e-17]
    cases = [
        {"name": f"{law} laws, {k} drafted", "total_variation": size, "accepted": 1 + 0.31 * k}
        for (k, law), size in zip(depths, sizes)
    ]
    detail = "12 pairs of laws over 4 tokens, up to 4 drafted: the largest total variation is 8.3e-16."
    return Layer("rule", "proved", "lossless", detail, {"cases": cases}, 1.4)


def drafter(bug: bool = False) -> Layer:
    names = ["repeating prompt", "free text", "alternating", "one token left", "empty context"]
    sizes = [0.0, 1.1e-16, 2.2e-16, 0.0231 if bug else 0.0, 0.0]
    cases = [{"name": n, "total_variation": tv, "accepted": 1.2 + i / 3} for i, (n, tv) in enumerate(zip(names, sizes))]
    detail = "5 texts of up to 4 tokens; " + ("one case is off by 0.0231." if bug else "all laws are equal.")
    return Layer("drafter", "proved", "bug" if bug else "lossless", detail, {"cases": cases}, 0.8)


def texts(name: str, partings: dict[str, int], verdict: Any = "lossless") -> Layer:
    prompts = [
        {"name": p, "tokens": t, "equal_tokens": partings.get(p, t), "parted": p in partings}
        for p, t in zip(PROMPTS, (128, 128, 97, 128, 64, 128))
    ]
    total = sum(int(p["tokens"]) for p in prompts)
    detail = f"{total} tokens of 6 prompts: " + (f"{len(partings)} texts part." if partings else "all ids are equal.")
    gap, size = (0.0039, 0.0312) if partings else (None, 0.0312)
    return Layer(name, "equal", verdict, detail, {"prompts": prompts, "worst_gap": gap, "floor": size}, 61.0)


def joint_law(bug: bool = False) -> Layer:
    rng = random.Random(5)
    contexts = []
    for name, size in (("def add(a, b):", 6), ("The capital of France", 9), ("1, 2, 3,", 30)):
        weights = [rng.random() ** 3 + 0.002 for _ in range(size)]
        law = [w / sum(weights) for w in weights]
        drawn = rng.choices(range(size), [w * (1.6 if bug and i == 0 else 1) for i, w in enumerate(law)], k=4000)
        outcomes = [
            {"label": f" tok{i} <b>", "expected": q, "observed": drawn.count(i) / 4000, "count": drawn.count(i)}
            for i, q in enumerate(law)
        ]
        contexts.append({"name": name, "outcomes": outcomes, "p_value": 1e-9 if bug else 0.41, "n": 4000})
    path = [0.0]
    for _ in range(1199):
        path.append(path[-1] + rng.gauss(0.006 if bug else -0.002, 0.05))
    figures = {
        "contexts": contexts,
        "p_value": 3.1e-11 if bug else 0.41,
        "alpha": 1e-3,
        "log10_e": path,
        "smallest_tv": 0.031,
    }
    detail = "12,000 draws of 3 tokens in 3 contexts: " + ("p = 3.1e-11." if bug else "p = 0.41, nothing to see.")
    return Layer("joint law", "tested", "bug" if bug else "lossless", detail, figures, 88.0)


def acceptance() -> Layer:
    by_position = [0.81, 0.69, 0.6, 0.52, 0.47, 0.41, 0.37, 0.33, 0.3, 0.27, 0.25, 0.23, 0.2, 0.19, 0.17, 0.16]
    figures = {"by_position": by_position, "mean_acceptance_length": 3.42, "accepted": 4210, "drafted": 9874}
    return Layer("acceptance", "measured", "lossless", "4,210 of 9,874 guesses accepted.", figures)


def parted(near_tie: bool, prompt: str = "gsm8k/12", index: int = 41, temperature: float = 0.0) -> Parted:
    gap = 0.0039 if near_tie else 2.75
    difference = Difference(index, 1140, 312, 17.25, 17.25 - gap, 0.0312, near_tie)
    before = "so she sells 16 - 3 - 4 = 9 eggs.\nShe makes "
    return Parted(
        prompt, temperature, difference, before + "9 * 2 = $18 every day", before + "$18, because 9 * 2 is 18"
    )


def ended() -> Parted:
    difference = Difference(64, -1, 220, math.nan, math.nan, 0.0, False)
    return Parted(
        "repeat-a-table", 0.8, difference, "| 7 | 49 |", "| 7 | 49 |\n| 8 | <script>alert('x')</script>\x1b[31m"
    )


def certificate(*layers: Layer, **more: Any) -> Certificate:
    environment = {
        "weights": "pinned Q4_K_M file, dequantised to bfloat16",
        "forward": "CPU with matrix tiles, width-invariant up to 64 tokens",
        "dtype": "bfloat16",
        "device": "cpu, 2 threads",
        "versions": "paceline 0.1.0, torch 2.13.0, transformers 5.20.0",
        "date": "2026-11-03",
    }
    more = {"near_ties_per_1000": 0.0, "mean_acceptance_length": 3.42, "seconds": 212.4} | more
    model = "qwen2.5-coder-1.5b-instruct-q4_k_m"
    return Certificate(model, more.pop("method", "ngram"), "coupled", "standard", environment, list(layers), **more)


def lossless() -> Certificate:
    layers = [rule(), drafter(), texts("greedy", {}), texts("sampled", {}), joint_law(), acceptance()]
    return certificate(*layers, notes=["The prompts are the 6 that come with the command."])


def near_ties() -> Certificate:
    found = [parted(True), parted(True, "humaneval/1", 96, 0.8)]
    return certificate(
        rule(),
        drafter(),
        texts("greedy", {"gsm8k/12": 41}, "near_ties_only"),
        texts("sampled", {"humaneval/1": 96}, "near_ties_only"),
        joint_law(),
        acceptance(),
        parted=found,
        near_ties_per_1000=1.486,
        notes=["float32 on this machine rounds differently for one token than for many; see `forward`."],
    )


def bug() -> Certificate:
    return certificate(
        rule(),
        drafter(bug=True),
        texts("greedy", {"gsm8k/12": 41, "humaneval/0": 3}, "bug"),
        texts("sampled", {"repeat-a-table": 64}, "bug"),
        joint_law(bug=True),
        acceptance(),
        method="my_package.drafters:Shortcut",
        parted=[parted(False), parted(True, "humaneval/0", 3), ended()],
        near_ties_per_1000=0.743,
    )


def skipped() -> Certificate:
    why = "The rule `coupled` takes no drafter's law, so there is nothing to enumerate."
    no_time = "Left out in quick mode; --full runs it."
    layers = [
        Layer("drafter", "proved", "skipped", why),
        texts("greedy", {}),
        Layer("joint law", "tested", "skipped", no_time),
    ]
    return certificate(rule(), *layers, near_ties_per_1000=None, mean_acceptance_length=None)


EXAMPLES = {"lossless": lossless, "near-ties": near_ties, "bug": bug, "skipped": skipped}


class Reader(HTMLParser):
    """Checks that tags balance, and keeps every attribute and the text that a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def marks(self, kind: str) -> int:
        """Drawn marks of a class."""
        return sum(name == "class" and value == kind for _, name, value in self.attributes)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open, f"left open: {reader.open}"
    return reader


def shown(certificate: Certificate, width: int, encoding: str = "utf-8") -> str:
    """The table as a terminal without colours prints it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, no_color=True)
    console.print(table(certificate, console))
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode(encoding)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_parses_and_loads_nothing(name: str) -> None:
    text = page(EXAMPLES[name]())
    reader = read(text)
    assert text.startswith("<!DOCTYPE html>")
    assert {"html", "head", "body", "title", "svg", "h1"} <= set(reader.tags)
    assert not {"script", "link", "img", "iframe", "object", "base", "a", "form", "use", "image"} & set(reader.tags)
    fetching = {"src", "href", "xlink:href", "srcset", "action", "data", "style", "poster"}
    assert not [one for one in reader.attributes if one[1] in fetching or one[1].startswith("on")]
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text.replace("</", ""))
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text


HEADLINES = {
    "lossless": ("lossless:", "every check passed"),
    "near-ties": ("near-ties only:", "closer than its own rounding"),
    "bug": ("bug:", "failed: drafter, greedy, sampled, joint law"),
    "skipped": ("lossless:", "skipped: drafter, joint law"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_verdict_comes_first_in_words(name: str) -> None:
    example, (word, sentence) = EXAMPLES[name](), HEADLINES[name]
    printed = words(shown(example, 80))
    assert printed.startswith(word)
    assert sentence in printed
    seen = words(" ".join(read(page(example)).text))
    assert word.removesuffix(":").capitalize() in seen
    assert sentence in seen.replace("Every", "every")
    assert example.verdict == {"near-ties": "near_ties_only", "skipped": "lossless"}.get(name, name)


@pytest.mark.parametrize("layers", [[], [Layer("greedy", "equal", "skipped", "no prompts")], [acceptance()]])
def test_where_nothing_was_checked_nothing_is_claimed(layers: list[Layer]) -> None:
    example = certificate(*layers)
    assert shown(example, 80).startswith("no verdict: nothing was checked")
    assert "<h1>No verdict</h1>" in page(example)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_table_fits_and_says_everything_without_colour(name: str, width: int) -> None:
    example = EXAMPLES[name]()
    printed = shown(example, width)
    assert max(len(line) for line in printed.splitlines()) <= width
    assert "\x1b" not in printed
    if width < 80:
        return
    for layer in example.layers:
        row = next(line for line in printed.splitlines() if line.startswith(layer.name + " "))
        assert layer.strength in row
        assert any(word in row for word in ("lossless", "near-ties only", "bug", "skipped", "reported"))
    for one in example.parted:
        assert f"{one.prompt}, temperature {one.temperature:g}, after {one.difference.index} equal tokens" in printed
        assert f"id {one.difference.got}" in printed
    if any(one.difference.expected >= 0 for one in example.parted):
        assert "floor, what rounding moves a logit by: 0.0312" in printed
    assert printed.count("near-tie: ") == sum(one.difference.near_tie for one in example.parted)
    for note in example.notes:
        assert note in words(printed)


def test_a_text_that_ended_has_no_id_and_no_logit() -> None:
    printed = shown(certificate(texts("sampled", {}, "bug"), parted=[ended()]), 120)
    assert re.search(r"without +ended +- +\| 7 \| 49 \|", printed)
    assert "which rounding cannot do" in printed
    assert "nan" not in printed.lower() + " ".join(read(page(certificate(parted=[ended()]))).text).lower()


NASTY = "[bold]<img src=x onerror=alert(1)>&amp;\"'\x1b[2J\x00\u202e\ud800:smile:"


def nasty() -> Certificate:
    """Every string that comes from outside tries to become markup, and to steer a terminal."""
    difference = Difference(1, 2, 3, 0.5, 0.25, 0.1, False)
    prompts = {"prompts": [{"name": NASTY, "tokens": 3, "equal_tokens": 1, "parted": True}]}
    outcomes = [{"label": NASTY, "expected": 1.0, "observed": 1.0, "count": 5}]
    layers = [
        Layer("rule", "proved", "lossless", NASTY, {"cases": [{"name": NASTY, "total_variation": 0.0, "accepted": 1}]}),
        Layer("greedy", "equal", "bug", NASTY, prompts),
        Layer("joint law", "tested", "lossless", NASTY, {"contexts": [{"name": NASTY, "outcomes": outcomes, "n": 5}]}),
        Layer(NASTY, "tested", "lossless", NASTY, {"cases": 3}),
    ]
    parts = [Parted(NASTY, 0.0, difference, NASTY, NASTY + "x")]
    return Certificate(NASTY, NASTY, NASTY, "quick", {NASTY: NASTY}, layers, parts, notes=[NASTY])


def test_strings_from_outside_stay_strings(tmp_path: Path) -> None:
    text = page(nasty())
    reader = read(text)
    assert "img" not in reader.tags
    assert not [one for one in reader.attributes if "onerror" in one[1]]
    assert "<img src=x onerror=alert(1)>&amp;\"'" in "".join(reader.text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\ud800]", text)
    write_page(tmp_path / "page.html", nasty())
    printed = shown(nasty(), 120)
    assert "\x1b" not in printed
    assert "[bold]<img" in printed
    assert ":smile:" in printed


def test_a_terminal_without_unicode_gets_escapes() -> None:
    printed = shown(certificate(rule(), notes=["한국어"]), 80, encoding="ascii")
    assert "\\ud55c\\uad6d\\uc5b4" in printed


FIGURES: dict[str, tuple[Callable[[], Layer], dict[str, int]]] = {
    "rule": (rule, {"dot": 8, "zero": 4, "limit": 12}),
    "drafter": (lambda: drafter(bug=True), {"beyond": 1, "dot": 2, "zero": 2}),
    "greedy": (lambda: texts("greedy", {"gsm8k/12": 41, "humaneval/0": 3}), {"bar": 6, "rest": 2, "parts": 2}),
    "sampled": (lambda: texts("sampled", {}), {"bar": 6, "rest": 0}),
    "joint law": (joint_law, {"expected": 28, "observed": 28, "whisker": 84, "trace": 1, "limit": 1}),
    "acceptance": (acceptance, {"bar": 16}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_kind_of_figure_is_drawn(name: str) -> None:
    layer, expected = FIGURES[name]
    marks = read(figure(layer()))
    assert {kind: marks.marks(kind) for kind in expected} == expected


@pytest.mark.parametrize("name", FIGURES)
def test_missing_and_broken_figures_leave_the_plot_out(name: str) -> None:
    layer = FIGURES[name][0]()
    broken: list[Any] = [
        None,
        [],
        {},
        "x",
        3,
        [None],
        [{}],
        [math.nan],
        [math.inf, None],
        {"a": 1},
        [{"outcomes": [{}]}],
    ]
    for key in layer.figures:
        for value in [..., *broken]:
            figures = {k: v for k, v in layer.figures.items() if k != key} | ({} if value is ... else {key: value})
            reader = read(figure(Layer(layer.name, layer.strength, "lossless", "", figures)))
            assert "nan" not in " ".join(value for _, name, value in reader.attributes if name != "class")
    assert figure(Layer(layer.name, layer.strength, "lossless", "")) == ""
    assert "In figures" not in page(certificate(Layer(layer.name, layer.strength, "lossless", "")))


@pytest.mark.parametrize("name", FIGURES)
def test_entries_may_lack_any_of_their_fields(name: str) -> None:
    layer = FIGURES[name][0]()
    for key, listed in layer.figures.items():
        if not (isinstance(listed, list) and isinstance(listed[0], dict)):
            continue
        for missing in listed[0]:
            for put in ({}, {missing: None}, {missing: math.nan}):
                entries = [{k: v for k, v in one.items() if k != missing} | put for one in listed]
                read(figure(Layer(layer.name, layer.strength, "lossless", "", layer.figures | {key: entries})))


def test_places_of_dots_follow_the_log_axis() -> None:
    sizes = [1e-16, 1e-14, 1e-12, 1e-10]
    layer = Layer("rule", "proved", "bug", "", {"cases": [{"name": str(s), "total_variation": s} for s in sizes]})
    nested = [float(x) for x in re.findall(r'<svg x="([\d.]+)%" class="at"', figure(layer))]
    gaps = [b - a for a, b in pairwise(nested)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.02)
    limit = re.search(r'<line x1="([\d.]+)%"[^>]*class="limit"', figure(layer))
    assert limit
    assert float(limit[1]) == nested[2]


def test_the_worst_cases_are_shown_and_the_rest_counted() -> None:
    cases = [{"name": f"case {i}", "total_variation": i * 1e-17} for i in range(100)]
    drawn = figure(Layer("rule", "proved", "lossless", "", {"cases": cases}))
    assert "case 99<" in drawn
    assert "case 75<" not in drawn
    assert "76 cases more" in drawn
    prompts = [{"name": f"p{i}", "tokens": 9, "equal_tokens": 9 - (i == 99), "parted": i == 99} for i in range(100)]
    drawn = figure(Layer("greedy", "equal", "bug", "", {"prompts": prompts}))
    assert "parts after 8 of 9" in drawn
    assert "76 prompts more, all equal" in drawn


def test_a_long_path_keeps_its_only_crossing() -> None:
    path = [0.0] * 50_000
    path[31_337] = 5.0
    drawn = figure(Layer("joint law", "tested", "bug", "", {"log10_e": path, "alpha": 1e-3}))
    heights = [float(pair.split(",")[1]) for pair in re.findall(r'points="([^"]*)"', drawn)[0].split()]
    assert len(heights) <= 600
    assert min(heights) < max(heights) - 100
    assert "1/α = 1,000" in drawn


def test_the_mark_of_a_parting_tells_near_tie_from_bug() -> None:
    layer = texts("greedy", {"gsm8k/12": 41, "humaneval/0": 3})
    drawn = figure(layer, [parted(False), parted(True, "humaneval/0", 3), parted(True, "gsm8k/12", 41, 0.8)])
    assert "parts after 41 of 97: bug" in drawn
    assert "parts after 3 of 128: near-tie" in drawn


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0, "0"), (1346, "1,346"), (12000.0, "12,000"), (1.1e-16, "1.1e-16"), (1e-9, "1e-9"),
     (0.0312, "0.0312"), (2.5, "2.5"), (1e9 + 0.5, "1e9"), (1234.5, "1,234"),
     (None, "-"), (math.nan, "-"), (-math.inf, "-"), ("x", "-")],
)  # fmt: skip
def test_numbers_are_written_for_people(value: Any, text: str) -> None:
    assert number(value) == text


def test_times_and_steps() -> None:
    assert [duration(s) for s in (0.84, 42.3, 200, 4320, 59.7)] == [
        "0.8 s",
        "42 s",
        "3 min 20 s",
        "1 h 12 min",
        "1 min 0 s",
    ]
    assert steps(128, 2) == [0, 100]
    assert steps(0.3, 3) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert steps(1, 4) == pytest.approx([0, 0.5, 1])


def test_write_page_replaces_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "certificate.html"
    path.write_text("old")
    write_page(path, near_ties())
    assert path.read_bytes().decode("utf-8") == page(near_ties())
    assert "한국어 요약" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "certificate.html"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(BadRequest, match="No space left on device"):
        write_page(path, lossless())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_that_cannot_be_written_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="Give a file in a folder that exists"):
        write_page(tmp_path / "missing" / "page.html", lossless())
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadRequest, match="folder"):
        write_page(tmp_path / "folder", lossless())
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]
