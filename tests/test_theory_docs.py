"""The theory pages: every mark stands for something, both languages show the same, and the numbers are right.

Numbers are compared with arithmetic that is written out here and shares no code with `paceline.theory`.
"""

import importlib.util
import itertools
import json
import math
import re
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from mkdocs.exceptions import PluginError
from oracles import VOCAB, tiny

from paceline import theory
from paceline.errors import BadRequest
from paceline.target import HFTarget

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("theory.md", "theory.ko.md")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
MARK = re.compile(r"\{\{ (\w+)(: [^\n]*?)? \}\}")
MEASURED = {"table_truncated", "plot_truncated", "with_truncated"}
"""Nothing where benchmarks/truncated.py was not run."""


def _module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    module = _module(DOCS / "hooks.py", "theory_hooks")
    module.computed("")  # puts the folder on the path
    return module


@pytest.fixture(scope="module")
def figures(hooks: ModuleType) -> ModuleType:
    return sys.modules["figures"]


@pytest.fixture(scope="module")
def numbers(figures: ModuleType) -> dict[str, str]:
    found: dict[str, str] = figures.numbers()
    return found


@pytest.fixture(scope="module")
def truncated() -> ModuleType:
    return _module(ROOT / "benchmarks" / "truncated.py", "truncated")


@pytest.fixture(scope="module")
def shown(hooks: ModuleType) -> dict[str, str]:
    """The pages as mkdocs gets them."""
    config = SimpleNamespace(docs_dir=str(DOCS))
    return {page: hooks.on_page_markdown(_source(page), None, config, None) for page in PAGES}


def _source(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def _parts(html: str, tag: str) -> list[ElementTree.Element]:
    """The elements of a kind, read as XML: a tag that is not closed fails here."""
    return [ElementTree.fromstring(text) for text in re.findall(rf"<{tag}[ >].*?</{tag}>", html, re.S)]


# -- the pages ---------------------------------------------------------------------------------------------------------


def test_both_languages_show_the_same() -> None:
    """The same marks, the same formulas, the same sections."""
    english, korean = (_source(page) for page in PAGES)
    assert {m[1] for m in MARK.finditer(english)} == {m[1] for m in MARK.finditer(korean)}
    assert re.findall(r"\{ (#\w+) \}", english) == re.findall(r"\{ (#\w+) \}", korean)
    blocks = [re.findall(r"\$\$(.+?)\$\$", text) for text in (english, korean)]
    assert blocks[0] == blocks[1]
    inline = [set(re.findall(r"\$([^$\n]+)\$", re.sub(r"\$\$.+?\$\$", "", text))) for text in (english, korean)]
    assert inline[0] ^ inline[1] <= {"n", "TV"}, inline[0] ^ inline[1]
    claims = [re.findall(r"^\| (\d+) \| .*\]\((#\w+)\) \| ", text, re.M) for text in (english, korean)]
    assert claims[0] == claims[1]
    assert [int(number) for number, _ in claims[0]] == list(range(1, 25))


@pytest.mark.parametrize("page", PAGES)
def test_no_mark_and_no_formula_is_left(page: str, hooks: ModuleType, shown: dict[str, str]) -> None:
    text = CODE.sub("", shown[page])
    assert "{{" not in shown[page]
    assert "}}" not in shown[page]
    assert "$" not in text
    assert hooks.COMPUTED not in shown[page]
    assert "nan" not in re.findall(r"\w+", text)
    assert len(_parts(text, "math")) > 60


@pytest.mark.parametrize("page", PAGES)
def test_numbers_that_are_computed_are_not_typed(page: str, numbers: dict[str, str]) -> None:
    own = "\n".join(line for line in _source(page).splitlines() if not line.startswith("|") or "Spec-Bench" not in line)
    typed = re.sub(r"Spec-Bench\S* 1\.65", "", MARK.sub("", CODE.sub("", own)))
    for name in {m[1] for m in MARK.finditer(_source(page))} & set(numbers):
        value = numbers[name].strip("×%")
        if len(re.sub(r"\D", "", value)) >= 3:
            assert not re.search(rf"(?<![\d.,]){re.escape(value)}(?![\d,]|\.\d)", typed), (name, value)


@pytest.mark.parametrize("page", PAGES)
def test_drawings_take_the_colour_of_the_page(page: str, shown: dict[str, str]) -> None:
    drawings = _parts(shown[page], "svg")
    assert len(drawings) >= 6
    ids = [e.get("id") for drawing in drawings for e in drawing.iter() if e.get("id")]
    for drawing in drawings:
        text = ElementTree.tostring(drawing, encoding="unicode")
        assert "currentColor" in text
        assert "#010203" not in text
        assert "DejaVu" not in text
        assert drawing.get("viewBox")
        assert drawing.get("width") is None
        assert len(drawing.get("aria-label", "")) > 20
    assert not [name for name in ids if name and name.startswith(("figure", "axes", "patch"))]


def test_a_mark_that_stands_for_nothing_stops_the_build(hooks: ModuleType) -> None:
    for text in (
        "{{ no_such_number }}",
        "{{ no_such_table: a | b }}",
        "{{ plot_speedup }}",
        r"$\unknown$",
        "$a_$",
        "$}$",
    ):
        with pytest.raises(PluginError):
            hooks.computed(text)


def test_the_korean_page_says_that_it_is_korean(hooks: ModuleType) -> None:
    html = '<!doctype html><html lang="en" class="no-js"><body>'
    pages = {uri: SimpleNamespace(file=SimpleNamespace(src_uri=uri)) for uri in PAGES}
    assert 'lang="ko"' in hooks.on_post_page(html, pages["theory.ko.md"], None)
    assert hooks.on_post_page(html, pages["theory.md"], None) == html


# -- formulas ----------------------------------------------------------------------------------------------------------


def test_formulas_become_mathml(hooks: ModuleType) -> None:
    shown = hooks.computed(r"of $p_i$를 and `$5` and $$\frac{1}{2} = \sum_{x} q(x)^2 \text{ at last}$$")
    one, two = _parts(shown, "math")
    assert [e.tag for e in one.iter()] == ["math", "mrow", "msub", "mi", "mi"]
    assert "".join(two.itertext()) == "12=∑xq(x)2\u00a0at\u00a0last"
    assert two.find(".//mfrac") is not None
    assert two.find(".//munder") is not None
    assert "`$5`" in shown
    assert "</math>를</span> and" in shown  # a particle stays with its noun


# -- the numbers -------------------------------------------------------------------------------------------------------


def test_the_floor(numbers: dict[str, str]) -> None:
    inner, d, layers, vocab = 11008, 4096, 32, 32000
    weights = layers * (4 * d * d + 3 * d * inner + 2 * d) + d + 2 * vocab * d
    assert numbers["seven_weights"] == f"{weights:,}" == "6,738,415,616"
    assert numbers["floor_ms"] == f"{weights * 2 / 2e12 * 1000:.2f}" == "6.74"
    assert numbers["square_us"] == f"{2 * d * d / 2e12 * 1e6:.1f}" == "16.8"
    assert numbers["article_ms"] == f"{32 * 2 * d * d / 2e12 * 1e3:.2f}" == "0.54"
    assert numbers["kv_token"] == f"{2 * 32 * 32 * 128 * 2:,}" == "524,288"
    assert numbers["kv_read_1000_gb"] == f"{sum(t * 524_288 for t in range(1, 1001)) / 1e9:.0f}"
    assert numbers["kv_even"] == f"{weights * 2 / 524_288:,.0f}"
    assert (numbers["intensity"], numbers["article_intensity"], numbers["ridge"]) == ("1", "2", "153")


def test_the_speed_up(numbers: dict[str, str]) -> None:
    assert numbers["tokens"] == f"{1 + 0.6 + 0.6**2 + 0.6**3:.3f}" == "2.176"
    assert numbers["speedup_right"] == f"{2.176 / 1.3:.2f}×" == "1.67×"
    assert numbers["speedup_article"] == f"{(1 + 3 * 0.6) / (1 + 3 * 0.1):.2f}×" == "2.15×"
    assert (numbers["passes_article"], numbers["passes_right"], numbers["passes_best"]) == ("333", "460", "250")
    mean, error = map(float, numbers["played_speedup"].split(" ± "))
    assert abs(mean - 2.176 / 1.3) < 4 * error
    assert error < 0.005


def test_the_best_length(numbers: dict[str, str], figures: ModuleType) -> None:
    def right(a: float, c: float, k: int) -> float:
        return sum(a**i for i in range(k + 1)) / (1 + c * k)

    assert numbers["root"] == f"{math.sqrt(6):.2f}"
    lines = figures.drawings()["table_best"]("a|c|d|e|f|g|h|i|j").splitlines()[2:]
    assert len(lines) == 8
    for line in lines:
        a, c, root, best, factor, at_root, *_ = (cell.strip(" *") for cell in line.strip("|").split("|"))
        found = max(range(60), key=lambda k: right(float(a), float(c), k))
        assert (best, factor) == (str(found), f"{right(float(a), float(c), found):.2f}×")
        assert root == f"{math.sqrt(float(a) / float(c)):.1f}"
        assert at_root.startswith(f"{right(float(a), float(c), round(math.sqrt(float(a) / float(c)))):.2f}×")


def test_what_was_counted_is_equal(numbers: dict[str, str]) -> None:
    assert numbers["pairs"] == numbers["pairs_equal"] == numbers["pairs_tv"] == str(28**2)
    assert numbers["joint_cases"] == numbers["joint_equal"]
    assert numbers["slip_none"] == "0"
    assert numbers["random_pairs"] == numbers["random_inside"]
    assert numbers["same_texts"] == numbers["same_equal"]


def test_slips_are_found() -> None:
    """The counting sees what is wrong: by hand, for one guess and one place."""
    exact = sys.modules["exact"]
    p, q = exact.P, exact.Q
    half = Fraction(1, 2)
    found = exact.emitted(lambda text: p, lambda text: q, 1, rest=lambda law, said: law)
    first = [sum(chance for text, chance in found.items() if text[0] == x) for x in range(4)]
    kept = [min(a, b) for a, b in zip(p, q, strict=True)]
    assert first == [k + (1 - sum(kept)) * a for k, a in zip(kept, p, strict=True)]
    assert exact.shared([half, half]) == half
    assert exact.independent([half, half]) == Fraction(1, 4)
    assert all(0 < exact.mistakes()[name] < 1 for name in ("from_p", "argmax", "shared"))


def test_expected_tokens_are_those_of_the_formula() -> None:
    """Counted for the example laws: both guesses of a pass are kept with the product of what one is."""
    exact = sys.modules["exact"]
    kept = sum(min(a, b) for a, b in zip(exact.P, exact.Q, strict=True))
    assert kept == Fraction(3, 5)
    assert float(theory.tokens_per_pass(0.6, 2)) == pytest.approx(float(1 + kept + kept**2))
    played = exact.played_tokens(2)
    assert abs(played.mean - float(1 + kept + kept**2)) < 4 * played.error


def test_trees_against_all_trees() -> None:
    exact = sys.modules["exact"]
    for size in range(1, 8):
        nodes = exact.best_first(size)
        assert all(len(name) == 1 or name[:-1] in nodes for name in nodes)
        assert exact.tokens_of(nodes) == pytest.approx(exact.best_of_all(size)[0])
    for parent in ["", *exact.TREE]:
        assert sum(share for name, share in exact.TREE.items() if name[:-1] == parent) <= 1 + 1e-9


def test_what_was_measured_is_what_the_files_say(numbers: dict[str, str]) -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "drafters.json").read_text(encoding="utf-8"))
    runs = [run for result in data["results"] for run in result["runs"]]
    greedy = [run for run in runs if run["temperature"] == 0 and run["method"] == "draft_model"]
    code = next(run for run in greedy if run["set"] == "humaneval")
    assert numbers["draft_model_code_tokens"] == f"{code['mean_acceptance_length']:.2f}"
    assert numbers["draft_model_code_speedup"] == f"{code['speedup']:.2f}×"
    lengths = [run["mean_acceptance_length"] for run in greedy]
    assert numbers["draft_model_tokens"] == f"{min(lengths):.2f}–{max(lengths):.2f}"
    assert numbers["lookahead_width"] == str(1 + 14 * 4)


# -- drafts of a few layers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(truncated: ModuleType) -> dict[str, Any]:
    """Two models with the same weights: all layers of one say what the other says."""
    target, draft = (HFTarget(tiny("qwen2", num_hidden_layers=4)) for _ in range(2))
    ids = [i * 7 % VOCAB for i in range(40)]
    found: dict[str, Any] = truncated.measure(target, draft, ids, [1, 3, 4], repeats=1)
    return found


def test_first_layers_are_measured(measured: dict[str, Any], truncated: ModuleType) -> None:
    points = [point for point in measured["points"] if point["bits"] == 16]
    assert [point["layers"] for point in points] == [1, 3, 4]
    assert points[-1]["acceptance"] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < points[0]["acceptance"] < points[-1]["acceptance"]
    for one, two in itertools.pairwise(points):
        assert one["share_of_weights"] < two["share_of_weights"]
    for point in measured["points"]:
        assert point["c"] > 0.0
        assert point["speedup"] >= 1.0
    assert len(truncated.table(measured).splitlines()) == 1 + len(measured["points"])
    assert truncated.sizes(24) == [2, 4, 8, 12, 16, 20, 22, 24]
    assert truncated.sizes(2) == [1, 2]


def test_layers_that_are_none_are_refused(truncated: ModuleType) -> None:
    model = HFTarget(tiny("qwen2", num_hidden_layers=2))
    with pytest.raises(BadRequest, match="has 2"):
        truncated.measure(model, model, [1, 2, 3], [0, 1])


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_measurement_or_how_to_make_it(
    page: str, figures: ModuleType, measured: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("drafters.json", "more-drafters.json", "forward.json", "features.json"):
        shutil.copy(ROOT / "benchmarks" / "results" / name, tmp_path)
    without = figures.fill(_source(page), tmp_path)
    assert "python benchmarks/truncated.py" in without
    figures.drawings.cache_clear()
    (tmp_path / "truncated.json").write_text(json.dumps(measured), encoding="utf-8")
    shown = figures.fill(_source(page), tmp_path)
    figures.drawings.cache_clear()
    assert "python benchmarks/truncated.py" not in shown
    assert "| 3 / 4 | 16 |" in shown
    assert len(_parts(shown, "svg")) == len(_parts(without, "svg")) + 1
    assert {m[1] for m in MARK.finditer(_source(page))} >= MEASURED


def test_the_planners_table_is_the_recorded_one() -> None:
    planner = _module(ROOT / "benchmarks" / "planner.py", "planner_benchmark")
    recorded = json.loads((ROOT / "benchmarks" / "results" / "planner.json").read_text(encoding="utf-8"))
    page = (DOCS / "which.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- table:planner:start -->\n")[2].partition("<!-- table:planner:end -->")[0]
    assert shown.strip() == planner.tables(recorded)


@pytest.fixture(scope="module")
def near() -> ModuleType:
    return _module(ROOT / "benchmarks" / "features.py", "features_benchmark")


def test_states_and_what_they_say(near: ModuleType) -> None:
    """On states whose laws are known: the same everywhere, and one token each."""
    texts = [torch.randn(40, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    flat = near.measure(texts, lambda states: torch.zeros(len(states), 5))
    assert flat["num_states"] == 80
    assert all(row["kept_random"] == pytest.approx(1.0) for row in flat["errors"])
    assert flat["steps"]["kept"] == pytest.approx(1.0)
    assert flat["largest_error"]["towards"] == near.PARTS[-1]
    sharp = near.measure(texts, lambda states: 1000.0 * states)
    kept = [row["kept_random"] for row in sharp["errors"]]
    same = [row["same_random"] for row in sharp["errors"]]
    assert kept[0] > 0.9 > kept[-1]
    assert kept == pytest.approx(same, abs=0.06)  # a law on one token is kept where the token is
    assert sharp["rank_correlation"] < -0.1
    assert 0.0 < sharp["largest_error"]["random"] < 1.0
    distances = [row["distance"] for row in sharp["pairs"]]
    assert distances == sorted(distances)
    assert sharp["nearest"]["distance"] < distances[5]
