"""What the site takes from the package itself when it is built: a page for each public name, and numbers.

reference/NAME.md   made from `paceline.__all__`, so that a public name without a page cannot exist
parameters.md       `<!-- measured -->` becomes a table of docs/data/parameters.json, which the test run writes
theory*.md          `<!-- computed -->` says that the page has marks for numbers, tables and drawings (figures.py), and
                    formulas (formulas.py)
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import paceline

ROOT = Path(__file__).parent.parent
MARK = "<!-- measured -->"
COMPUTED = "<!-- computed -->"
DATA = Path("data") / "parameters.json"
NARROW = "\u00a0"  # no line break inside a cell
HOW = (
    "The table of this page has not been measured in this copy. `make test` compares every setting with and without "
    "speculation, token by token, and writes the result to `docs/data/parameters.json`; `make docs` then shows it here."
)
COMPANIONS = {
    "LLM": ("paceline.llm.Stream", "paceline.draft.SpeculativeConfig"),
    "Drafter": ("paceline.draft.base.Ask", "paceline.draft.base.Step"),
    "TokenTree": ("paceline.tree.Rider",),
}
"""What one meets only together with a public name, shown on its page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation with a page for each public name."""
    reference = ["reference/index.md", *(f"reference/{name}.md" for name in paceline.__all__)]
    config.nav = [*(config.nav or []), {"Reference": reference}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages themselves, which exist in the build alone."""
    pages = {"index": overview()} | {name: reference(name) for name in paceline.__all__}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with the measured table where it asks for it, and with what is computed for it."""
    if COMPUTED in markdown:
        return computed(markdown.replace(COMPUTED, ""))
    if MARK not in markdown:
        return markdown
    path = Path(config.docs_dir) / DATA
    return markdown.replace(MARK, table(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else HOW)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The page with the language that its file name says."""
    return output.replace('<html lang="en"', '<html lang="ko"', 1) if page.file.src_uri.endswith(".ko.md") else output


def computed(markdown: str) -> str:
    """The page with its marks and formulas replaced; a mark or a formula that is none stops the build."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))
    import figures
    import formulas

    try:
        return formulas.render(figures.fill(markdown))
    except (figures.Unknown, formulas.Unreadable) as error:
        raise PluginError(str(error)) from error


def overview() -> str:
    """The list of all public names, each with the first line of its docstring."""
    package = griffe.load("paceline", search_paths=[ROOT])  # read, not imported: it takes no time
    lines = [f"| [`{name}`]({name}.md) | {_first_line(package[name].docstring)} |" for name in paceline.__all__]
    return "\n".join(["# Overview", "", "All of `import paceline`.", "", "| name | is |", "|---|---|", *lines, ""])


def reference(name: str) -> str:
    """The page of one public name."""
    more = [f"::: {path}\n    options: {{ heading_level: 2 }}\n" for path in COMPANIONS.get(name, ())]
    return "\n".join([f"---\ntitle: {name}\n---\n", f"::: paceline.{name}\n", *more])


def _first_line(docstring: griffe.Docstring | None) -> str:
    text = docstring.value if docstring else ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def table(data: Mapping[str, Any]) -> str:
    """The measured table: a row per setting, a column per mode and method, in each cell one number per batch size.

    Args:
        data: `columns`, such as "greedy none 1" (mode, method, rows); `rows`, of which each has its `parameter` and for
            every column the number of compared tokens that were equal, or false; `paceline`, the version.
    """
    try:
        groups = _groups(data["columns"])
        head = ["parameter", *(f"{mode}<br>{method.replace(' ', '<br>')}" for mode, method in groups)]
        lines = [
            [
                f"`{row['parameter']}`",
                *(_cell([row[column] for column in columns.values()]) for columns in groups.values()),
            ]
            for row in data["rows"]
        ]
        caption = _caption(str(data["paceline"]), [*next(iter(groups.values()))], data["rows"], data["columns"])
    except (KeyError, ValueError, StopIteration) as error:
        raise PluginError(f"{DATA} is not what the test run writes ({error!r}); run `make test` again") from error
    rows = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines]]
    return "\n".join([caption, "", *rows, ""])


def _groups(columns: Sequence[str]) -> dict[tuple[str, str], dict[str, str]]:
    """(mode, method) -> batch size -> column: "sampled draft_model tree 4" is ("sampled", "draft_model tree"), "4"."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for column in columns:
        mode, *method, size = column.split()
        if not method or not size.isdigit():
            raise ValueError(f"column {column!r} is not MODE METHOD ROWS")
        groups.setdefault((mode, " ".join(method)), {})[size] = column
    if len({tuple(sizes) for sizes in groups.values()}) > 1:
        raise ValueError("the columns do not have the same numbers of rows everywhere")
    return groups


def _cell(values: Sequence[object]) -> str:
    return f"{NARROW}·{NARROW}".join(
        "**differs**" if value is False else "equal" if value is True else f"{value}" for value in values
    )


def _caption(version: str, sizes: Sequence[str], rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    failed = sum(row[column] is False for row in rows for column in columns)
    verdict = "none differed" if not failed else f"**{failed} of {len(rows) * len(columns)} runs differed**"
    return (
        f"Paceline {version}. Each cell: tokens compared and equal, with {' · '.join(sizes)} rows at once; {verdict}. "
        "The numbers behind it: [parameters.json](data/parameters.json)."
    )
