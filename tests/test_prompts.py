"""Prompt sets: what ships is complete, what a user writes is read as written, and every slip names its line."""

import hashlib
import json
from pathlib import Path

import pytest

from paceline.bench.prompts import DATA, SETS, Prompt, load
from paceline.errors import BadRequest


def _file(folder: Path, *rows: object) -> Path:
    path = folder / "own.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_sets_are_complete() -> None:
    assert {name: len(load(name)) for name in SETS} == {"humaneval": 164, "gsm8k": 80, "mt-bench": 80, "long": 7}


@pytest.mark.parametrize("name", SETS)
def test_ids_are_unique_and_prompts_not_empty(name: str) -> None:
    prompts = load(name)
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(prompt.category and all(turn.strip() for turn in prompt.turns) for prompt in prompts)


# Known answers, read from the publishers' files: the first and the last line of each set, before any wrapping.
KNOWN = {
    "humaneval": ("HumanEval/0", "def has_close_elements(", "HumanEval/163", "def generate_integers(a, b):"),
    "gsm8k": ("gsm8k/401", "Jen decides to travel to 3 different countries.", "gsm8k/480", "out of 96 potatoes?"),
    "mt-bench": (
        "mt-bench/81",
        "Compose an engaging travel blog post",
        "mt-bench/160",
        "five award-winning documentary",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_first_and_last_prompt(name: str) -> None:
    first, opening, last, ending = KNOWN[name]
    prompts = load(name)
    assert (prompts[0].id, prompts[-1].id) == (first, last)
    assert opening in prompts[0].turns[0]
    assert ending in prompts[-1].turns[0]


def test_humaneval_is_asked_with_the_code_as_published() -> None:  # but for empty lines around it
    published = [
        json.loads(line)["prompt"] for line in (DATA / "humaneval.jsonl").read_text("utf-8").split("\n") if line
    ]
    for prompt, code in zip(load("humaneval"), published, strict=True):
        instruction, fence, asked = prompt.turns[0].partition("```python\n")
        assert instruction.startswith("Complete")
        assert (fence, asked) == ("```python\n", code.strip("\n") + "\n```")


def test_mt_bench_has_two_turns_and_eight_categories_of_ten() -> None:
    prompts = load("mt-bench")
    assert {len(prompt.turns) for prompt in prompts} == {2}
    names = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
    assert [prompt.category for prompt in prompts] == [name for name in names for _ in range(10)]
    assert load("mt-bench:writing") == prompts[:10]
    assert load("mt-bench:humanities") == prompts[70:]


def test_long_prompts_are_long() -> None:
    prompts = load("long")
    assert {prompt.category for prompt in prompts} == {"code", "prose"}
    assert all(5000 < len(prompt.turns[0]) < 12000 for prompt in prompts)


def test_every_set_names_its_source_and_licence() -> None:
    sources = (DATA / "SOURCES.md").read_text(encoding="utf-8")
    for file in SETS.values():
        assert f"`{file}`" in sources
        digest = hashlib.sha256((DATA / file).read_bytes()).hexdigest()
        assert digest[:16] in sources, f"{file} is not the file that SOURCES.md describes"
    for licence in DATA.glob("LICENSE.*"):
        assert f"`{licence.name}`" in sources


def test_messages_interleave_the_answers() -> None:
    prompt = Prompt("p", ("one", "two"), context=(("system", "be brief"),))
    assert prompt.messages() == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    assert [m["role"] for m in prompt.messages(["1"])] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in prompt.messages(["1"])] == ["be brief", "one", "1", "two"]
    with pytest.raises(BadRequest, match=r"p has 2 turn\(s\); 2 are answered"):
        prompt.messages(["1", "2"])


def test_own_file(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    path = _file(
        tmp_path,
        {"prompt": "Tell me {prompt}.", "id": 7, "category": "x"},
        "",
        {"turns": ["a", "b"], "note": "other keys are left alone"},
        {"messages": talk},
    )
    one, two, three = load(path)
    assert (one.id, one.turns, one.category) == ("7", ("Tell me {prompt}.",), "x")
    assert (two.id, two.turns, two.category) == ("3", ("a", "b"), "")  # without an id, the line's number
    assert three.messages() == talk
    assert load(str(path)) == [one, two, three]


def test_line_separators_inside_a_text_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\r\n', encoding="utf-8", newline="")
    assert load(path)[0].turns == ("a\u2028b\u0085c",)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"prompt": "a"', "not JSON"),
        ([1], "a list where an object with 'prompt', 'messages' or 'turns' is needed"),
        ({}, "needs exactly one of 'prompt', 'messages' or 'turns'; has none"),
        ({"text": "a"}, "needs exactly one of .*; has 'text'"),
        ({"prompt": "a", "turns": ["a"]}, "needs exactly one of"),
        ({"prompt": ""}, "'prompt' must be a text"),
        ({"prompt": 3}, "'prompt' must be a text"),
        ({"turns": []}, "'turns' must be a list of texts"),
        ({"turns": "abc"}, "'turns' must be a list of texts"),
        ({"turns": ["a", None]}, "'turns' must be a list of texts"),
        ({"messages": []}, "'messages' must be a list"),
        ({"messages": ["hi"]}, "message 1 needs 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "message 1 needs 'role' and 'content'"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the last message must be the user's; .*'assistant'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, complaint: str) -> None:
    path = _file(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(BadRequest, match=rf"own\.jsonl:2: {complaint}"):
        load(path)


def test_a_file_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="holds no prompts"):
        load(_file(tmp_path, "", "  "))
    (tmp_path / "own.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match="is not UTF-8"):
        load(tmp_path / "own.jsonl")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("humanevall", "unknown prompt set 'humanevall'; did you mean 'humaneval'?"),
        ("mtbench", "did you mean 'mt-bench'?"),
        ("zzz", r"unknown prompt set 'zzz' \(sets: humaneval, gsm8k, mt-bench, long; or FILE.jsonl\)"),
        ("mt-bench:writting", "has no category 'writting'; did you mean 'writing'?"),
        ("none.jsonl", "no prompt file 'none.jsonl'"),
        ("folder/none", "no prompt file 'folder/none'"),
    ],
)
def test_an_unknown_name_gets_a_hint(name: str, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint.replace("?", r"\?")):
        load(name)
