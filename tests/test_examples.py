"""Every example runs as its docstring says, on a model folder of 100 KB and without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, model: Path, *more: Path) -> str:
    """What the example prints. It starts in the model's folder, so that it cannot lean on the repository's."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, (model, *more))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=model, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate(tiny_model: Path) -> None:
    out = run("01_generate.py", tiny_model)
    assert "same text without speculation: True" in out
    (drafted, passes), (tokens, plain) = re.findall(r"(\d+) tokens in (\d+) passes", out)
    assert drafted == tokens == plain == "48"  # one pass for each token without speculation
    assert int(passes) <= 48


def test_stream(tiny_model: Path) -> None:
    out = run("02_stream.py", tiny_model)
    guessed, tokens = map(int, re.findall(r"(\d+) of (\d+) tokens were guessed", out)[0])
    assert 0 <= guessed <= tokens == 48


def test_write_a_drafter(tiny_model: Path) -> None:
    out = run("03_write_a_drafter.py", tiny_model)
    assert "same text without speculation: True" in out
    mine, plain = map(int, re.findall(r"(\d+) passes instead of (\d+)", out)[0])
    assert mine <= plain == 48


def test_stops_and_logprobs(tiny_model: Path) -> None:
    out = run("04_stops_and_logprobs.py", tiny_model)
    assert re.search(r"ended by '.+' \(stop\): True", out)
    ((logprobs, tokens),) = re.findall(r"(\d+) log-probs for (\d+) tokens", out)
    assert logprobs == tokens
    assert out.count("rank 1;") == int(tokens)  # greedy


def test_logits_processor(tiny_model: Path) -> None:
    out = run("05_logits_processor.py", tiny_model)
    assert out.count("40 calls for 40 tokens") == 2
    assert "no token more than 2 times; same text: True" in out


def test_many_prompts(tiny_model: Path) -> None:
    out = run("06_many_prompts.py", tiny_model)
    assert "'': 'the prompt is empty; at least one token is needed'" in out
    assert "1 of 11 failed" in out
    assert out.count("sample ") == 3
    assert "the prompt was read once: True" in out


def test_chat(tiny_model: Path) -> None:
    out = run("07_chat.py", tiny_model)
    (first, read), (second, new) = [map(int, found) for found in re.findall(r"(\d+) prompt tokens, (\d+) of", out)]
    assert first == read
    assert new < second - first  # all that the first turn read is known


def test_draft_model(tiny_model: Path) -> None:
    out = run("08_draft_model.py", tiny_model, tiny_model)
    # with the model itself as its draft every guess is right: three and the model's own, but for the last pass
    assert "chain: 4.00 tokens per pass, same text: True" in out
    assert "tree: 4.00 tokens per pass, same text: True" in out


def test_certify_a_drafter(tiny_model: Path) -> None:
    out = run("09_certify_a_drafter.py", tiny_model)
    assert "Followers: 0 of 16 checks failed" in out
    assert "Likeliest: 2 of 16 checks failed" in out
    assert "[0, 1, 0] has probability 0.5472 and should have 0.3648" in out


def test_suffix(tiny_model: Path) -> None:
    out = run("10_suffix.py", tiny_model)
    passes, plain, same = re.findall(r"(\d+) passes instead of (\d+), same text: (\w+)", out)[-1]
    assert int(passes) < int(plain) == 96
    assert same == "True"


def test_compose(tiny_model: Path) -> None:
    out = run("11_compose.py", tiny_model, tiny_model)
    lines = re.findall(r"(suffix|draft_model|both): ([\d.]+) tokens per pass, .* same text: True", out)
    assert [name for name, _ in lines] == ["suffix", "draft_model", "both"] * 2
    assert all(float(length) > 2 for name, length in lines if name != "suffix")


def test_corpus(tiny_model: Path) -> None:
    out = run("12_corpus.py", tiny_model)
    ((tokens, files),) = re.findall(r"(\d+) tokens of (\d+) files", out)
    assert int(tokens) > 3000
    assert int(files) == len([path for path in EXAMPLES.iterdir() if path.is_file()])
    ((passes, without),) = re.findall(r"(\d+) passes with the corpus, (\d+) without", out)
    assert 0 < int(passes) <= 64
    assert 0 < int(without) <= 64
    assert "same text without speculation: True" in out


def test_plan(tiny_model: Path) -> None:
    out = run("13_plan.py", tiny_model)
    expected = re.findall(r"(none|ngram|suffix) +(\d+) nodes: [\d.]+x expected", out)
    assert {name for name, _ in expected} == {"none", "ngram", "suffix"}
    assert re.search(r"^take (none|ngram|suffix): ", out, re.M)
    assert "same text: True" in out


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    missing = [path.name for path in EXAMPLES.glob("*.py") if f'run("{path.name}"' not in source]
    assert not missing


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_says_how_to_run_it(path: Path) -> None:
    assert f"python examples/{path.name} [MODEL]" in path.read_text(encoding="utf-8").split('"""')[1]
