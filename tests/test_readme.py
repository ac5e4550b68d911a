"""The README is run as it stands: every Python, bash and console block, in order, in an empty folder, on real models.

Python blocks share their names. In a console block, lines after ``$`` are commands, and the others must appear in what
they print, in that order. A block after ``<!-- not run: reason -->`` is left out. PACELINE_README_MODEL replaces the
named models (for a quick look on the smaller one).
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
NAMED = re.compile(r"qwen2\.5-coder-[\d.]+b-instruct-q4_k_m")
FENCE = re.compile(r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
RUN = {"python", "bash", "console"}


class Block(NamedTuple):
    line: int
    language: str
    code: str
    skipped: str | None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text that name a language that can be run."""
    found = [
        (text.count("\n", 0, m.start("code")) + 1, m["language"], m["code"], m["why"]) for m in FENCE.finditer(text)
    ]
    return [Block(*block) for block in found if block[1] in RUN]


def run_shell(code: str, folder: Path) -> str:
    """What a bash script prints, with the commands of this interpreter's environment first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{code}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_console(code: str, folder: Path) -> None:
    """Run the lines after ``$ `` together; what is shown between them must be printed, in that order."""
    lines = code.splitlines()
    out = run_shell("\n".join(line[2:] for line in lines if line.startswith("$ ")), folder)
    position = 0
    for shown in (line.strip() for line in lines if line.strip() and not line.startswith("$ ")):
        position = out.find(shown, position)
        assert position >= 0, f"the README shows {shown!r}, which was not printed:\n{out}"
        position += len(shown)


@pytest.mark.real
def test_readme_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_05b: Path) -> None:
    text = README.read_text(encoding="utf-8")
    if model := os.environ.get("PACELINE_README_MODEL"):
        text = NAMED.sub(model, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # the only files of the repository that the README may use
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.skipped:
            continue
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.code, str(README), "exec"), names)
        elif block.language == "bash":
            run_shell(block.code, tmp_path)
        else:
            run_console(block.code, tmp_path)


def test_few_blocks_are_left_out_and_each_says_why() -> None:
    all_blocks = blocks(README.read_text(encoding="utf-8"))
    skipped = [block for block in all_blocks if block.skipped]
    assert len(skipped) <= 4
    assert len(all_blocks) - len(skipped) >= 4
    assert not [block for block in all_blocks if "make " in block.code and not block.skipped]


def test_first_example_has_eight_lines() -> None:
    first = next(block for block in blocks(README.read_text(encoding="utf-8")) if block.language == "python")
    assert len(first.code.splitlines()) <= 8


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", README.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_options_in_the_readme_exist() -> None:
    """Every ``--option`` of a ``paceline`` line, run or not, is one that the command knows."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in (line.strip().removeprefix("$ ") for block in blocks(text) for line in block.code.splitlines()):
        if not line.startswith("paceline "):
            continue
        words = shlex.split(line, comments=True)
        helped = subprocess.run(
            [sys.executable, "-m", "paceline", words[1], "--help"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
        ).stdout
        unknown = [word.split("=")[0] for word in words if word.startswith("--") and word.split("=")[0] not in helped]
        assert not unknown, f"{line}: no such option {unknown}"


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run: slow -->\n```bash\nls\n```\n```text\nno\n```\n"
    text += "```console\n$ ls\nb\n```\n"
    assert blocks(text) == [
        Block(3, "python", "x = 1\n", None),
        Block(7, "bash", "ls\n", "slow"),
        Block(13, "console", "$ ls\nb\n", None),
    ]


def test_console_output_is_compared(tmp_path: Path) -> None:
    run_console("$ echo one; echo two\none\ntwo\n", tmp_path)
    with pytest.raises(AssertionError, match="shows 'one'"):
        run_console("$ echo one; echo two\ntwo\none\n", tmp_path)
    with pytest.raises(AssertionError, match="exit code 3"):
        run_console("$ exit 3\n", tmp_path)
