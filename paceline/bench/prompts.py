"""Prompt sets to measure on: four that ship with the package, and files of your own. Imports nothing heavy."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest, nearest

Message = dict[str, str]
"""One chat message: its ``role`` and its ``content``."""

DATA = Path(__file__).parent / "data"
SETS = {"humaneval": "humaneval.jsonl", "gsm8k": "gsm8k.jsonl", "mt-bench": "mt_bench.jsonl", "long": "long.jsonl"}
KEYS = ("prompt", "messages", "turns")

COMPLETE = (
    "Complete the following Python function. Answer with the whole function, signature and docstring included, "
    "in one code block.\n\n```python\n{prompt}\n```"
)
"""How a HumanEval function is asked for, through the chat template."""


@dataclass(frozen=True)
class Prompt:
    """What is said to the model: the user's turns, one after the other, after whatever came before them."""

    id: str
    turns: tuple[str, ...]
    category: str = ""
    context: tuple[tuple[str, str], ...] = ()
    """Messages before the first turn as (role, content): a system prompt, or a conversation so far."""

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """The conversation up to the turn that comes after ``answers``, ready for a chat template.

        Without answers this is the first turn; with the model's answer to it, the second; and so on.
        """
        if len(answers) >= len(self.turns):
            raise BadRequest(f"{self.id} has {len(self.turns)} turn(s); {len(answers)} are answered already")
        said = [*self.context]
        for turn, answer in zip(self.turns, answers, strict=False):
            said += [("user", turn), ("assistant", answer)]
        said.append(("user", self.turns[len(answers)]))
        return [{"role": role, "content": content} for role, content in said]


def load(name_or_path: str | Path) -> list[Prompt]:
    """The prompts of a set, or of a JSONL file, in file order.

    Sets: ``humaneval``, ``gsm8k``, ``mt-bench``, ``long``; ``SET:CATEGORY`` keeps one category (``mt-bench:writing``).
    A file has one object per line with ``prompt`` (text), ``turns`` (list of texts) or ``messages`` (role and content,
    a user's last), and if wanted ``id`` and ``category``.
    """
    given = str(name_or_path)
    if Path(given).is_file():
        return _read(Path(given))
    name, _, category = given.partition(":")
    if name not in SETS:
        if given.endswith((".jsonl", ".json")) or "/" in given:
            raise BadRequest(f"no prompt file {given!r}; a file has one JSON object per line with {_either(KEYS)}")
        raise BadRequest(f"unknown prompt set {name!r}{nearest(name, SETS)} (sets: {', '.join(SETS)}; or FILE.jsonl)")
    prompts = _read(DATA / SETS[name])
    if name == "humaneval":
        prompts = [replace(p, turns=(COMPLETE.replace("{prompt}", p.turns[0].strip("\n")),)) for p in prompts]
    if not category:
        return prompts
    known = sorted({prompt.category for prompt in prompts})
    if category not in known:
        hint = f"{nearest(category, known)} (categories: {', '.join(known)})"
        raise BadRequest(f"prompt set {name!r} has no category {category!r}{hint}")
    return [prompt for prompt in prompts if prompt.category == category]


def _read(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(): a text may hold other line separators
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path} is not UTF-8 text: {error}") from None
    prompts = [_parse(line, f"{path}:{n}", n) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BadRequest(f"{path} holds no prompts; each line is a JSON object with {_either(KEYS)}")
    return prompts


def _parse(line: str, where: str, number: int) -> Prompt:
    """One line of a prompt file, with its place in every complaint."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRequest(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRequest(f"{where}: a {type(row).__name__} where an object with {_either(KEYS)} is needed")
    given = [key for key in KEYS if key in row]
    if len(given) != 1:
        raise BadRequest(f"{where}: needs exactly one of {_either(KEYS)}; has {', '.join(map(repr, row)) or 'none'}")
    turns, context = _READERS[given[0]](row[given[0]], where)
    return Prompt(
        id=str(row.get("id", number)),
        turns=turns,
        category=str(row.get("category", "")),
        context=context,
    )


_Said = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


def _from_prompt(value: Any, where: str) -> _Said:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where}: 'prompt' must be a text that is not empty")
    return (value,), ()


def _from_turns(value: Any, where: str) -> _Said:
    if not isinstance(value, list) or not value or not all(isinstance(turn, str) and turn for turn in value):
        raise BadRequest(f"{where}: 'turns' must be a list of texts, at least one, none empty")
    return tuple(value), ()


def _from_messages(value: Any, where: str) -> _Said:
    """The last message is the turn; all before it are context."""
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{where}: 'messages' must be a list of objects with 'role' and 'content', at least one")
    for i, message in enumerate(value):
        texts = [message.get("role"), message.get("content")] if isinstance(message, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise BadRequest(f"{where}: message {i + 1} needs 'role' and 'content', both texts")
    said = tuple((message["role"], message["content"]) for message in value)
    if said[-1][0] != "user":
        raise BadRequest(f"{where}: the last message must be the user's; it is from {said[-1][0]!r}")
    return (said[-1][1],), said[:-1]


_READERS: dict[str, Callable[[Any, str], _Said]] = {
    "prompt": _from_prompt,
    "turns": _from_turns,
    "messages": _from_messages,
}


def _either(keys: Sequence[str]) -> str:
    return f"{', '.join(map(repr, keys[:-1]))} or {keys[-1]!r}"
