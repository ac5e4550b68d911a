"""The documentation: built strictly, complete, in agreement with the package, and its Python runs.

Every Python block of a page is run, in order, in an empty folder, with the tiny model in place of the named ones; the
blocks of a page share their names. A block after ``<!-- not run: reason -->`` is only compiled.
"""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jaxtyping import config as shape_checks
from mkdocs.exceptions import PluginError
from test_readme import NAMED, blocks

import paceline
from paceline import SamplingParams
from paceline.draft import SpeculativeConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def _text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


# -- the built site ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a page that is left out, a broken link or a wrong docstring fails here."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetched(HTMLParser):
    """What a browser loads by itself when it shows a page; links that a reader may follow are not among it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "link" and named.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(named.get("href") or "")
        self.found += [value or "" for name, value in attrs if name in ("src", "srcset", "data")]


@pytest.mark.parametrize("name", paceline.__all__)
def test_public_object_has_a_page_and_is_in_the_navigation(name: str, site: Path) -> None:
    page = (site / "reference" / name / "index.html").read_text(encoding="utf-8")
    home = getattr(paceline, name).__module__
    assert f'id="{home}.{name}"' in page or f'id="paceline.{name}"' in page
    first_words = getattr(paceline, name).__doc__.split("\n")[0].split("`")[0][:40]
    assert first_words.replace("'", "&#39;") in page or first_words in page
    assert f'href="reference/{name}/"' in (site / "index.html").read_text(encoding="utf-8")


def test_every_page_is_built(site: Path) -> None:
    for page in PAGES:
        where = site / "index.html" if page.stem == "index" else site / page.stem / "index.html"
        assert where.exists(), page.name


def test_nothing_comes_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = Fetched(page.read_text(encoding="utf-8")).found
        assert loaded, page
        assert not [where for where in loaded if re.match(r"(https?:)?//", where)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_fetched_things_are_found() -> None:
    html = '<link rel="stylesheet" href="//a"><script src="https://huggingface.co/x.js"></script><a href="https://arxiv.org">b</a>'
    assert Fetched(html).found == ["//a", "https://huggingface.co/x.js"]


# -- agreement with the package ----------------------------------------------------------------------------------------


def _rows(page: str) -> dict[str, list[str]]:
    """Table rows of a page that begin with one or several `names`: for each name the other cells."""
    found = {}
    for line in _text(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| `") else []
        for name in re.findall(r"`(\w+)`", cells[0]) if cells else []:
            found[name] = cells[1:]
    return found


def test_every_sampling_parameter_is_described_with_its_default() -> None:
    described = _rows("parameters.md")
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert set(described) == set(fields)
    for name, default in fields.items():
        shown, meaning, with_speculation = described[name]
        assert shown == f"`{default!r}`", name
        assert len(meaning) > 10, name
        assert len(with_speculation) > 5, name


def test_every_key_of_speculative_config_is_described() -> None:
    methods, drafts = _rows("methods.md"), _rows("draft-models.md")
    for field in dataclasses.fields(SpeculativeConfig):
        if not field.init:
            continue  # made of the others
        assert field.name in methods, field.name
        if methods[field.name][0]:
            assert methods[field.name][0] == f"`{json.dumps(field.default)}`".replace("null", "None"), field.name
        else:
            assert field.name in drafts, field.name


def test_every_error_is_described() -> None:
    errors = {name for name in paceline.__all__ if issubclass(getattr(paceline, name), paceline.PacelineError)}
    page = _text("errors.md")
    assert not [name for name in errors if f"[`{name}`](reference/{name}.md)" not in page]


# -- the code ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_on_the_page_runs(page: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # As users run it: the checks on shapes draw from the global generator, which the page's suites watch.
    monkeypatch.setattr(shape_checks, "jaxtyping_disable", True)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(_text(page.name)):
        if block.language != "python":
            continue
        code = "\n" * (block.line - 1) + NAMED.sub(str(tiny_model), block.code)
        compiled = compile(code, str(page), "exec")
        if not block.skipped:
            exec(compiled, names)


def test_pages_have_code_that_runs() -> None:
    """A fence written in another way would not be found, and so not be run."""
    for page in PAGES:
        fences = len(re.findall(r"^\s*```python", _text(page.name), re.M))
        python = [block for block in blocks(_text(page.name)) if block.language == "python"]
        assert len(python) == fences, page.name
        assert fences or page.stem == "guarantees", page.name
        assert not [block for block in python if block.skipped], page.name


# -- the measured table ------------------------------------------------------------------------------------------------

METHODS = ("none", "ngram", "draft_model chain", "draft_model tree")
COLUMNS = [f"{mode} {method} {rows}" for mode in ("greedy", "sampled") for method in METHODS for rows in (1, 4)]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sample() -> dict[str, Any]:
    top_k = {column: 96 if column.endswith("1") else 384 for column in COLUMNS}
    stop = top_k | {"sampled ngram 4": False}
    return {
        "paceline": "1.2.3",
        "columns": COLUMNS,
        "rows": [{"parameter": "top_k"} | top_k, {"parameter": "stop"} | stop],
    }


def test_table_has_a_cell_for_each_mode_and_method(hooks: ModuleType) -> None:
    caption, blank, *lines = hooks.table(_sample()).replace("\u00a0", " ").splitlines()
    assert "Paceline 1.2.3" in caption
    assert "1 · 4 rows" in caption
    assert "**1 of 32 runs differed**" in caption
    assert blank == ""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:3] == ["parameter", "greedy<br>none", "greedy<br>ngram"]
    assert cells[0][-1] == "sampled<br>draft_model<br>tree"
    assert [len(row) for row in cells] == [9] * 4
    assert cells[2] == ["`top_k`", *["96 · 384"] * 8]
    assert cells[3] == ["`stop`", *["96 · 384"] * 5, "96 · **differs**", *["96 · 384"] * 2]


def test_table_without_a_difference_says_so(hooks: ModuleType) -> None:
    data = _sample()
    del data["rows"][1]
    assert "none differed" in hooks.table(data).splitlines()[0]


@pytest.mark.parametrize(
    "change",
    [
        {"columns": ["greedy 1"]},
        {"columns": [*COLUMNS, "greedy ngram 8"]},
        {"columns": []},
        {"rows": [{"parameter": "top_k"}]},
        {"rows": [{}]},
    ],
)
def test_broken_data_stops_the_build(hooks: ModuleType, change: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="make test"):
        hooks.table(_sample() | change)


def test_page_shows_the_table_or_how_to_make_it(hooks: ModuleType, tmp_path: Path) -> None:
    page = _text("parameters.md")
    assert page.count(hooks.MARK) == 1
    config = SimpleNamespace(docs_dir=str(tmp_path))
    assert "`make test`" in hooks.on_page_markdown(page, None, config, None).split("## Measured")[1]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "parameters.json").write_text(json.dumps(_sample()))
    shown = hooks.on_page_markdown(page, None, config, None)
    assert "| `top_k` | 96\u00a0·\u00a0384 |" in shown
    assert hooks.MARK not in shown
