"""How a plan looks, and the command that makes one."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import BadRequest
from paceline.plan import Choice, Plan, report

PNG = b"\x89PNG\r\n\x1a\n"


def choice(method: str, nodes: int, speed: float, **more: Any) -> Choice:
    return Choice(
        method=method,
        config={"method": method},
        num_draft_tokens=nodes,
        num_speculative_tokens=more.pop("depth", None),
        predicted_speedup=speed,
        predicted_ci95=(speed * 0.9, speed * 1.1),
        tokens_per_second=10.0 * speed,
        tokens_per_pass=1.5 * speed,
        draft_share=0.1,
        above_floor=1.3,
        source="replayed",
        **more,
    )


def plan(**more: Any) -> Plan:
    values: dict[str, Any] = {
        "model": "small",
        "machine": {},
        "settings": {"temperature": 0.0, "prompts": ["a", "b"]},
        "rows": 1,
        "context": 200,
        "cost_curve": [(1, 0.1), (2, 0.1), (16, 0.11), (17, 0.16), (32, 0.17), (64, 0.3)],
        "drafting_curve": [(1, 1.0), (64, 3.0)],
        "single_seconds": 0.1,
        "noise": 0.02,
        "bandwidth": 20e9,
        "floor_seconds": 0.08,
        "choices": [choice("suffix", 15, 2.5, measured_speedup=2.4), choice("draft_model", 23, 1.5, depth=4)]
        + [choice("ngram", n, 1.4 - n / 100) for n in range(14)]
        + [choice("none", 0, 1.0)],
        "chosen": 0,
        "reason": "3.75 tokens per pass",
    }
    return Plan(**values | more)


def shown(given: Plan, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(given, console))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_has_what_decides(width: int) -> None:
    text = shown(plan(), width)
    lines = text.splitlines()
    assert "a pass over one token takes 100 ms (200 tokens of context)" in text
    assert "the least is 80 ms, at 20.0 GB/s" in " ".join(text.split())
    assert next(line for line in lines if line.startswith(("tokens  ", "tokens 1"))).split()[1:] == [
        "1",
        "2",
        "16",
        "17",
        "32",
        "64",
    ]
    assert next(line for line in lines if line.startswith("cost ")).split()[1:4] == ["1.00", "1.00", "1.10"]
    row = next(line for line in lines if line.startswith("suffix"))
    assert row.split()[:5] == ["suffix", "15", "2.50x", "2.25-2.75", "2.40x"]
    assert next(line for line in lines if line.startswith("draft_model")).split()[:3] == ["draft_model", "23", "4"]
    assert any(line.startswith("none") for line in lines)
    assert "and 4 slower ones" in text
    assert "take suffix (15 nodes): 3.75 tokens per pass" in text
    assert "…" not in text


def test_a_plan_against_speculation_says_so() -> None:
    against = plan(chosen=16, reason="do not speculate here: it is slower", notes=["the machine is noisy: ±9%"])
    text = shown(against)
    assert "take plain decoding: do not speculate here" in text
    assert "note: the machine is noisy: ±9%" in text


def test_rows_are_named() -> None:
    assert "a pass over one token of each row takes 100 ms (8 rows, 200 tokens of context)" in shown(plan(rows=8))


def test_bars_are_as_long_as_what_they_show() -> None:
    assert report.bar(1.0) == "█" * report.BAR
    assert report.bar(0.5) == "█" * (report.BAR // 2)
    assert report.bar(0.0) == ""
    lengths = [len(report.bar(share / 100)) for share in range(101)]
    assert lengths == sorted(lengths)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    report.plot(plan(), path)
    assert path.read_bytes()[:8] == PNG
    assert [one.name for one in tmp_path.iterdir()] == ["plan.png"]


def test_where_a_picture_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"a name that ends in \.png"):
        report.check_plot(tmp_path / "plan.jpg")
    with pytest.raises(BadRequest, match="there is no folder"):
        report.check_plot(tmp_path / "no" / "plan.png")
    report.check_plot(tmp_path / "plan.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BadRequest, match=r"pip install 'paceline\[plots\]'"):
        report.check_plot(tmp_path / "plan.png")


# -- the command -------------------------------------------------------------------------------------------------------


def paceline(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"one two three one two {i}"}) + "\n" for i in range(3)))
    return path


def test_the_command_writes_a_plan_that_generate_follows(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    written, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--prompts", prompts, "--num-prompts", 2, "--max-tokens", 16, "--methods", "ngram,suffix"]
    result = paceline("plan", tiny_model, *options, "--json", written, "--plot", picture, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "take " in result.stdout
    assert picture.read_bytes()[:8] == PNG
    held = json.loads(written.read_text())
    assert {one["method"] for one in held["choices"]} == {"none", "ngram", "suffix"}
    assert len(held["settings"]["prompts"]) == 2
    run = ["generate", tiny_model, "one two", "--max-tokens", 8, "--temperature", 0, "--threads", 1]
    followed = paceline(*run, "--plan", written)
    assert followed.exit_code == 0, followed.output
    assert followed.stdout == paceline(*run, "--method", "none").stdout
    elsewhere = paceline(*run[:-1], 2, "--plan", written)
    assert elsewhere.exit_code == 2
    assert "threads 1, and here it is 2; make one for here: paceline plan MODEL --json" in elsewhere.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompts", "none.jsonl"], "no prompt file 'none.jsonl'"),
        (["--set", "humanevil"], "did you mean 'humaneval'"),
        (["--set", "gsm8k", "--prompts", "x.jsonl"], "--prompts and --set were both given"),
        (["--num-prompts", "2", "--batch", "3"], "--batch 3 and 2 prompts"),
        (["--plot", "plan.jpg"], "ends in .png"),
        (["--json", "/no/such/folder/plan.json"], "there is no folder"),
        (["--json", "/etc/hostname"], "exists and is no plan; it is left as it is"),
        (["--methods", "sufix"], "did you mean 'suffix'"),
        (["--methods", "draft_model"], "needs the draft model"),
    ],
)
def test_wrong_use_is_told_before_a_model_is_loaded(options: list[str], words: str) -> None:
    result = paceline("plan", "no/such/model", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "loading" not in result.stderr


def test_an_empty_file_has_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    result = paceline("plan", "no/such/model", "--prompts", tmp_path / "none.jsonl")
    assert result.exit_code == 2
    assert "prompts" in result.stderr
