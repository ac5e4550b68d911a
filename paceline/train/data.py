"""Texts to learn from, with what the target thought while it wrote or read them.

A group of texts is made together and written as one file, whole or not at all; a group that was begun and not finished
is begun again. Groups know nothing of each other, so they can be made in any order and by several processes, and the
same recipe gives the same files. What is nearly the same in two groups is dropped when they are read.

    tokens [N], learn [N], best [N]   ids of all texts one behind the other, which of them are learnt, and the id that
                                      the target held likeliest behind each (-1 where nobody asked)
    lengths [n]                       of the texts
    states.{k} [N, H]                 the target's hidden state k behind each token (the last one of a text is zeros)
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.decode import run
from paceline.draft import SpeculativeConfig
from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.costs import Costs
from paceline.draft.losses import Batch
from paceline.errors import BadRequest, CorruptWeights, PacelineError
from paceline.files import whole, write_atomically
from paceline.kernels.machine import identity
from paceline.progress import human
from paceline.sampling import SamplingParams
from paceline.train.recipe import Recipe, seed_of
from paceline.tree import TokenTree

HELD_OUT = "held-out"
LOCK = "lock"
SHINGLE = 3
"""Words that are compared together when texts are held against each other."""
ALIKE = 0.6
"""Part of their shingles that two texts share which are nearly the same."""
FIELDS = (
    "",
    "The user will describe a Python function, with its arguments and what it must return, and ask for the code.",
    "The user will pose a word problem of school mathematics with several numbers in it.",
    "The user will ask for a short text about something in particular: a story, an email, a review or a poem.",
    "The user will show some code and ask to explain it, to extend it, or to find what is wrong with it.",
    "The user will ask a question about history, geography, science, society or the arts.",
    "The user will give a paragraph of a few sentences and ask for a summary, or ask questions about it.",
    "The user will ask for advice about work, travel, health, learning or everyday life.",
    "The user will ask how to do something with a computer: a command, a library, a query or a design.",
    "The user will pose a puzzle, a proof or a calculation and ask for each step.",
    "The user will give a sentence or two and ask for them in another language, or in another style.",
    "The user will ask to extract, sort, compare or reformat data that they give.",
)
"""What questions are about, in turn, as a system message says it; the first one is whatever the template says itself. A
model that is asked for nothing in particular speaks of itself."""
PLACE = "\u2983words\u2984"
"""Stands where a user's words go in a chat template."""


# -- what is asked -----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A text before the target has seen it."""

    ids: list[int]
    learn: list[bool] | None
    """Which of the ids are learnt; None where the target is to write an answer, which is."""
    question: str
    """In words, to find others that are nearly the same."""


def read_jsonl(path: Path, llm: Any, recipe: Recipe) -> list[Source]:
    """The texts of a file.

    Raises:
        BadRequest: the file cannot be read or is empty, or some lines are of no use: their numbers and the reasons.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read the data {path}: {error}; a JSONL file in UTF-8 is needed") from error
    found, bad = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_source(json.loads(line), llm, recipe))
        except json.JSONDecodeError as error:
            bad.append(f"line {number}: no JSON ({error.msg} at column {error.colno})")
        except Exception as error:  # chat templates and tokenizers have their own ways to refuse
            bad.append(f"line {number}: {error or type(error).__name__}")
    if bad:
        more = f"\n  and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise BadRequest(
            f"{len(bad)} of {len(found) + len(bad)} texts in {path} are of no use; correct them or take them out:\n  "
            + "\n  ".join(bad[:10])
            + more
        )
    if not found:
        raise BadRequest(f'{path} holds no texts; lines such as {{"messages": [...]}} or {{"text": "..."}} are needed')
    return found


def _source(value: Any, llm: Any, recipe: Recipe) -> Source:
    if not isinstance(value, dict) or not ("messages" in value or "text" in value):
        raise BadRequest("an object with messages or text is needed")
    if "messages" not in value:
        return _plain(value["text"], llm, recipe)
    messages = value["messages"]
    roles = [m.get("role") if isinstance(m, dict) else None for m in messages] if isinstance(messages, list) else []
    if (
        not roles
        or not all(isinstance(r, str) for r in roles)
        or not all(isinstance(m.get("content"), str) for m in messages)
    ):
        raise BadRequest("messages are no list of objects with role and content")
    question = " ".join(m["content"] for m in messages if m["role"] == "user")
    if recipe.answers == "given":
        ids, learn = _spans(messages, llm)
        return Source(_short(ids, llm, 1), learn, question)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the target answers in its own words
    if not any(m["role"] == "user" for m in messages):
        raise BadRequest("there is no user's message to answer")
    return Source(_short(llm.chat_ids(messages), llm, recipe.max_tokens), None, question)


def _plain(text: Any, llm: Any, recipe: Recipe) -> Source:
    if not isinstance(text, str) or not text.strip():
        raise BadRequest("text is empty or no string")
    if recipe.answers == "target":
        raise BadRequest("text has no question that the target could answer; learn it as it is (answers given)")
    ids = list(llm.tokenizer(text).input_ids)
    if len(ids) < 3:
        raise BadRequest(f"the text has {len(ids)} tokens; three or more are needed to learn from")
    return Source(_short(ids, llm, 1), [False] + [True] * (len(ids) - 1), text)


def _spans(messages: Sequence[dict[str, str]], llm: Any) -> tuple[list[int], list[bool]]:
    """A whole conversation, and which of its tokens the assistant wrote."""
    if not llm.tokenizer.chat_template:
        raise BadRequest(f"{llm.source.name} has no chat template; give text")

    def ids_of(count: int, prompt: bool) -> list[int]:
        found = llm.tokenizer.apply_chat_template(
            list(messages[:count]), add_generation_prompt=prompt, return_dict=False
        )
        return list(found)

    ids = ids_of(len(messages), prompt=False)
    learn = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not i:
            continue
        begin, end = ids_of(i, prompt=True), ids_of(i + 1, prompt=False)
        if ids[: len(begin)] == begin and ids[: len(end)] == end:  # some templates show earlier turns otherwise
            learn[len(begin) : len(end)] = [True] * (len(end) - len(begin))
    if not any(learn):
        raise BadRequest("there is no answer to learn: no assistant's message")
    return ids, learn


def _short(ids: list[int], llm: Any, more: int) -> list[int]:
    if len(ids) + more > llm.max_model_len:
        raise BadRequest(f"it has {len(ids)} tokens and {more} are to come; the context holds {llm.max_model_len}")
    return ids


def users_turn(llm: Any, field: str = "") -> list[int] | None:
    """What a chat template puts before a user's words; None without a template.

    Args:
        field: what the user asks about, in a system message where the template has room for one.
    """
    tokenizer = llm.tokenizer
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "system", "content": field}] * bool(field) + [{"role": "user", "content": PLACE}]
    try:
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    except Exception:  # the template's own way to say that it knows no system message
        if not field:
            raise
        return users_turn(llm)
    before, found, _ = shown.partition(PLACE)
    if not found:
        raise BadRequest(
            f"the chat template of {llm.source.name} does not show the user's words; give questions with --data FILE"
        )
    return list(tokenizer(before, add_special_tokens=False).input_ids)


# -- the target writes -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Record:
    """What the target thought of one text."""

    states: list[Tensor] = field(default_factory=list)
    best: list[int] = field(default_factory=list)


class Recorder(Drafter[Record]):
    """Guesses nothing, and keeps the target's states.

    Args:
        taps: which ones.
        prompts: keep the ids that it held likeliest behind tokens of the prompt, too.
    """

    def __init__(self, taps: Sequence[int], prompts: bool) -> None:
        self.taps = tuple(taps)
        self.reads_logits = not prompts
        self.top_scored, self.scores_prompt = int(prompts), prompts

    def begin(self, prompt: Step) -> Record:
        """The prompt's first chunk."""
        record = Record()
        self._take(record, prompt)
        return record

    def propose(self, states: list[Record], asks: list[Ask]) -> list[TokenTree]:
        """The pending token alone."""
        return [TokenTree.root(ask.pending) for ask in asks]

    def observe(self, states: list[Record], steps: list[Step]) -> None:
        """What was committed."""
        for record, step in zip(states, steps, strict=True):
            self._take(record, step)

    def _take(self, record: Record, step: Step) -> None:
        if not step.tokens:
            return
        assert step.hidden is not None, "the loop brings the states that were tapped"
        record.states.append(step.hidden.detach().cpu())
        if step.logits is not None:
            record.best += step.logits.argmax(-1).tolist()
        elif step.scored is not None:
            record.best += step.scored.top[: len(step.tokens), 0].tolist()
        else:
            record.best += [-1] * len(step.tokens)


class Text(NamedTuple):
    """A text with the target's states, as it is stored."""

    ids: list[int]
    learn: list[bool]
    best: list[int]
    states: Tensor
    """[T, taps · H]"""
    question: str


def _write(
    llm: Any, prompts: Sequence[list[int]], params: Sequence[SamplingParams], drafter: Drafter[Any], rows: int
) -> list[Any]:
    """The requests after their ends, each with what the drafter kept of it in `kept`."""
    requests = llm.requests(list(prompts), list(params), SpeculativeConfig(method="none"), drafter, Costs())
    kept: dict[int, Any] = {}
    for row in run(llm.target, requests, max_rows=rows):
        if row.finish_reason is not None:
            kept[id(row)] = row.state
    return [(request, kept.get(id(request))) for request in requests]


def ask_oneself(llm: Any, recipe: Recipe, group: str, count: int) -> list[Source]:
    """Questions that the target writes in the user's place; what is nearly the same as an earlier one is dropped."""
    from paceline.draft.base import NoDraft

    seeds = [seed_of(recipe.seed, group, i, "question") for i in range(count)]
    begins = [users_turn(llm, FIELDS[i % len(FIELDS)]) for i in range(count)]
    if begins[0] is None:  # a model that only goes on with texts does so from a token of any kind
        start = llm.tokenizer.bos_token_id
        first = [] if start is None else [start]
        return [Source([*first, seed % llm.target.vocab_size], None, "") for seed in seeds]
    prompts = [begin or [i for i in (llm.tokenizer.bos_token_id,) if i is not None] for begin in begins]
    limit = min(recipe.max_question_tokens, llm.max_model_len - max(map(len, prompts)) - 1)
    if not all(prompts) or limit < 1:
        what = "leaves no room for a question" if all(prompts) else "puts nothing before the user's words"
        raise BadRequest(f"the chat template of {llm.source.name} {what}; give questions with --data FILE")
    params = [SamplingParams(temperature=0.8, top_p=0.9, max_tokens=limit, seed=seed) for seed in seeds]
    found = _write(llm, prompts, params, NoDraft(), recipe.num_rows)
    texts = [llm.tokenizer.decode(row.output_ids, skip_special_tokens=True).strip() for row, _ in found]
    seen, sources = Seen(), []
    for text in texts:
        if text and seen.is_new(text):
            ids = llm.chat_ids([{"role": "user", "content": text}])
            if len(ids) + 2 <= llm.max_model_len:
                sources.append(Source(ids, None, text))
    return sources


def answered(llm: Any, recipe: Recipe, group: str, sources: Sequence[Source], taps: Sequence[int]) -> list[Text]:
    """Sources as the target answered or read them; those that it broke on are left out.

    Held-out questions are answered greedily, as they are when drafting is measured: both look at the same text then.
    """
    written = all(source.learn is None for source in sources)
    params = [
        SamplingParams(
            temperature=0.0 if group == HELD_OUT else recipe.temperature,
            max_tokens=min(recipe.max_tokens, llm.max_model_len - len(source.ids)) if source.learn is None else 1,
            seed=seed_of(recipe.seed, group, i, "answer"),
        )
        for i, source in enumerate(sources)
    ]
    recorder = Recorder(taps, prompts=not written)
    texts = []
    found = _write(llm, [source.ids for source in sources], params, recorder, recipe.num_rows)
    for source, (row, record) in zip(sources, found, strict=True):
        if record is None or row.finish_reason == "error":
            continue
        ids, learn = source.ids, source.learn
        if learn is None:
            ids, learn = row.ids, [False] * len(source.ids) + [True] * len(row.output_ids)
        size = len(ids) - 1
        states = torch.cat(record.states)[:size]
        if len(ids) < 3 or len(states) < size:
            continue
        padded = torch.cat([states, states.new_zeros(1, states.shape[1])])
        record.states.clear()
        texts.append(Text(ids, learn, [*record.best[:size], -1], padded, source.question))
    return texts


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The groups of a recipe: names, and what each holds before the target sees it."""

    recipe: Recipe
    names: tuple[str, ...]
    """The held-out one first."""
    taps: tuple[int, ...]
    sources: dict[str, list[Source]] | None
    """None where the target asks itself."""
    around: int = 2
    """Tokens that a chat template puts around a question."""
    context: int = 1 << 30
    """Most tokens of a text."""

    @classmethod
    def of(cls, llm: Any, recipe: Recipe, taps: Sequence[int]) -> "Plan":
        """Which groups there are.

        Raises:
            BadRequest: the file of data is of no use, or has too few texts to keep some apart.
        """

        def named(count: int) -> tuple[str, ...]:
            return (HELD_OUT, *(f"group-{i:05}" for i in range(-(-count // recipe.group_size))))

        if recipe.data == "self":
            around = len(llm.chat_ids([{"role": "user", "content": "?"}])) if llm.tokenizer.chat_template else 2
            return cls(recipe, named(recipe.num_samples), tuple(taps), None, around, llm.max_model_len)
        found = read_jsonl(Path(recipe.data), llm, recipe)
        generator = torch.Generator().manual_seed(seed_of(recipe.seed, "file"))
        order = torch.randperm(len(found), generator=generator).tolist()
        kept = min(recipe.held_out, len(found) // 2)
        if not kept:
            raise BadRequest(f"{recipe.data} holds one text; two are the least, one of them to measure drafting on")
        chosen = [found[i] for i in order[: kept + recipe.num_samples]]
        names = named(len(chosen) - kept)
        sources = {HELD_OUT: chosen[:kept]}
        for i, name in enumerate(names[1:]):
            begin = kept + i * recipe.group_size
            sources[name] = chosen[begin : begin + recipe.group_size]
        return cls(recipe, names, tuple(taps), sources)

    def count(self, name: str) -> int:
        """Texts that a group is begun with."""
        if self.sources is not None:
            return len(self.sources[name])
        if name == HELD_OUT:
            return self.recipe.held_out
        begin = self.names[1:].index(name) * self.recipe.group_size
        return min(self.recipe.group_size, self.recipe.num_samples - begin)

    @property
    def most_tokens(self) -> int:
        """Tokens of all texts, were each as long as it may be."""
        if self.sources is not None:
            more = 0 if self.recipe.answers == "given" else self.recipe.max_tokens
            return sum(len(source.ids) + more for own in self.sources.values() for source in own)
        longest = self.around + self.recipe.max_question_tokens + self.recipe.max_tokens
        return (self.recipe.num_samples + self.recipe.held_out) * min(longest, self.context)

    def make(self, llm: Any, name: str, folder: Path) -> int:
        """Make a group and write it; how many texts it came to.

        Raises:
            PacelineError: it cannot be written; what was there before is as it was.
        """
        sources = ask_oneself(llm, self.recipe, name, self.count(name)) if self.sources is None else self.sources[name]
        texts = answered(llm, self.recipe, name, sources, self.taps)
        save(folder / f"{name}.safetensors", texts, self.taps)
        return len(texts)


def save(path: Path, texts: Sequence[Text], taps: Sequence[int]) -> None:
    """One file of texts."""
    width = texts[0].states.shape[1] // len(taps) if texts else 0
    tensors = {
        "tokens": torch.tensor([i for text in texts for i in text.ids], dtype=torch.int32),
        "learn": torch.tensor([flag for text in texts for flag in text.learn], dtype=torch.bool),
        "best": torch.tensor([i for text in texts for i in text.best], dtype=torch.int32),
        "lengths": torch.tensor([len(text.ids) for text in texts], dtype=torch.int64),
    }
    for i, tap in enumerate(taps):
        parts = [text.states[:, i * width : (i + 1) * width] for text in texts]
        tensors[f"states.{tap}"] = torch.cat(parts).contiguous() if parts else torch.zeros(0, 0)
    about = {"questions": json.dumps([text.question for text in texts])}
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with whole(path) as file:
            save_file(tensors, file.name, metadata=about)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free
        raise PacelineError(
            f"cannot write {path} ({human(size)}, {human(free)} are free): {error}; what was made before is kept: make "
            "room and run the same command again"
        ) from error


class Folder:
    """Where groups lie, and what they were made for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, recipe: Recipe, taps: Sequence[int], target: Any) -> tuple[int, ...]:
        """Begin the folder, or go on with one for the same data; which states it has.

        Raises:
            BadRequest: it holds data of another recipe, or lacks some of these states.
        """
        about = self.path / "about.json"
        wanted = {"key": recipe.data_key(), "taps": sorted(taps), "target": identity(target)}
        self.path.mkdir(parents=True, exist_ok=True)
        groups = [file.name for file in self.path.glob("*.safetensors")]
        others = [
            f.name for f in self.path.iterdir() if f.name not in (*groups, "about.json", LOCK) and f.name[0] != "."
        ]
        if others or (groups and not about.exists()):
            what = (
                f"other things ({', '.join(sorted(others)[:4])})" if others else "groups, and no about.json beside them"
            )
            raise BadRequest(f"{self.path} holds {what}; give a new folder for the data")
        if not about.exists():
            write_atomically(about, json.dumps(wanted) + "\n")
            return tuple(sorted(taps))
        try:
            known = json.loads(about.read_text(encoding="utf-8"))
            key, model, there = known["key"], known["target"], tuple(known["taps"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequest(f"{about} says nothing that can be read; take another folder for the data") from error
        if not groups and known != wanted:  # nothing was made yet
            write_atomically(about, json.dumps(wanted) + "\n")
            return tuple(sorted(taps))
        if key != wanted["key"]:
            raise BadRequest(
                f"{self.path} holds data of another recipe (model, questions, lengths, temperature or seed differ); "
                "take another folder for the data, or that recipe"
            )
        if model != wanted["target"]:
            raise BadRequest(
                f"the data in {self.path} were made with another model, or with this one in another dtype; take "
                "another folder for the data, or that model"
            )
        if not set(taps) <= set(there):
            raise BadRequest(
                f"the data in {self.path} have the target's states {list(there)}, and {sorted(taps)} are needed; take "
                "another folder for the data"
            )
        return there

    def has(self, name: str) -> bool:
        """Whether a group is there, whole."""
        return (self.path / f"{name}.safetensors").exists()


# -- reading -----------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a text lies."""

    file: int
    begin: int
    length: int


class Texts:
    """Texts of some groups, mapped into memory."""

    def __init__(self, folder: Path, names: Sequence[str], seen: "Seen | None" = None) -> None:
        self.places: list[Place] = []
        self.questions: list[str] = []
        self.num_dropped, self._files, self._small = 0, list[Any](), list[dict[str, Tensor]]()
        for i, name in enumerate(names):
            path = folder / f"{name}.safetensors"
            try:
                file: Any = safe_open(path, "pt")
                self._files.append(file)
                questions = json.loads((file.metadata() or {})["questions"])
                small = {key: file.get_tensor(key) for key in ("tokens", "learn", "best", "lengths")}
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                raise CorruptWeights(
                    f"{path} is no group of texts ({error}); delete it to have it made again"
                ) from error
            self._small.append(small)
            begin = 0
            for question, length in zip(questions, small["lengths"].tolist(), strict=True):
                if seen is None or not question or seen.is_new(question):
                    self.places.append(Place(i, begin, length))
                    self.questions.append(question)
                else:
                    self.num_dropped += 1
                begin += length

    def __len__(self) -> int:
        return len(self.places)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [place.length for place in self.places]

    def prompt(self, number: int) -> list[int]:
        """A text up to the first token that is learnt."""
        small, (_, begin, length) = self._small[self.places[number].file], self.places[number]
        first = int(small["learn"][begin : begin + length].int().argmax())
        return [int(token) for token in small["tokens"][begin : begin + max(1, first)]]

    def counts(self) -> Counter[int]:
        """How often each id is learnt."""
        found: Counter[int] = Counter()
        for small, own in self._by_file():
            for place in own:
                part = slice(place.begin, place.begin + place.length)
                found.update(small["tokens"][part][small["learn"][part]].tolist())
        return found

    @property
    def num_learnt(self) -> int:
        """Tokens that are learnt."""
        return sum(self.counts().values())

    def _by_file(self) -> Iterable[tuple[dict[str, Tensor], list[Place]]]:
        for i, small in enumerate(self._small):
            yield small, [place for place in self.places if place.file == i]

    def batch(self, numbers: Sequence[int], taps: Sequence[int], last: int, device: Any = "cpu") -> Batch:
        """Some texts side by side, shorter ones padded.

        Args:
            taps: the states that the head reads.
            last: the state that the target's laws are made of.
        """
        places = [self.places[i] for i in numbers]
        shape = len(places), max(place.length for place in places)
        tokens, best = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1, dtype=torch.int64)
        learn = torch.zeros(shape, dtype=torch.bool)
        states: dict[int, Tensor] = {}
        for row, place in enumerate(places):
            small, part = self._small[place.file], slice(place.begin, place.begin + place.length)
            tokens[row, : place.length] = small["tokens"][part]
            best[row, : place.length] = small["best"][part]
            learn[row, : place.length] = small["learn"][part]
            for tap in {*taps, last}:
                own = self._files[place.file].get_slice(f"states.{tap}")[part]
                states.setdefault(tap, own.new_zeros(*shape, own.shape[-1]))[row, : place.length] = own
        hidden = torch.cat([states[tap] for tap in taps], dim=-1)
        found = Batch(tokens, learn, hidden, states[last], best)
        return Batch(*(part.to(device) for part in found if part is not None))


class Seen:
    """Texts so far, to find those that are nearly the same: most of their runs of three words are."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._with: dict[tuple[str, ...], list[int]] = {}

    def is_new(self, text: str) -> bool:
        """Whether no text so far is nearly the same; it is one of them from then on."""
        words = re.findall(r"\w+", text.lower()) or [text]
        size = min(SHINGLE, len(words))
        own = {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
        common = Counter(number for shingle in own for number in self._with.get(shingle, ()))
        for number, shared in common.items():
            if shared >= ALIKE * (len(own) + self._sizes[number] - shared):
                return False
        for shingle in own:
            self._with.setdefault(shingle, []).append(len(self._sizes))
        self._sizes.append(len(own))
        return True


def commonest(counts: Counter[int], size: int, always: Iterable[int], vocab_size: int) -> Int64[Tensor, "Vd"]:
    """The ids that a head is to score: some that must be there, then the commonest, then the lowest; ascending."""
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    found = dict.fromkeys([*(i for i in always if 0 <= i < vocab_size), *ranked])
    chosen = list(found)[:size]
    if len(chosen) < size:
        chosen += [i for i in range(vocab_size) if i not in found][: size - len(chosen)]
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def batches(lengths: Sequence[int], most_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The texts of an epoch in a new order, in batches of at most so many tokens with their padding (one at least).

    Texts of about the same length go together, for little padding.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, "order", epoch))
    noise = torch.rand(len(lengths), generator=generator).tolist()
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] * (0.9 + 0.2 * noise[i]))
    found: list[list[int]] = []
    for i in order:
        if found and max(lengths[i], *(lengths[j] for j in found[-1])) * (len(found[-1]) + 1) <= most_tokens:
            found[-1].append(i)
        else:
            found.append([i])
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


Tick = Callable[[str, int, int], None]


def make_all(llm: Any, plan: Plan, folder: Folder, mine: Sequence[str], tick: Tick, until: Callable[[], bool]) -> bool:
    """Make the groups that are not there yet; False if `until` said to stop before the last one."""
    for name in mine:
        if folder.has(name):
            continue
        if until():
            return False
        plan.make(llm, name, folder.path)
        tick("making data", sum(folder.has(one) for one in plan.names), len(plan.names))
    return True


def room(path: Path) -> int:
    """Free bytes where a folder is or will be."""
    while not path.exists():
        path = path.parent
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return 1 << 62
