"""A draft model with another tokenizer: pieces of text, the two ways of guessing, and a text that is never changed.

The tokenizers are trained here: byte-level ones, those of sentencepiece with byte tokens, one that lowers letters, one
with pieces of words. Texts are compared with the loop without a cache, laws by counting every outcome.
"""

import functools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import GREEDY, Spy, decode, reference, requests, tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline import LLM
from paceline.decode import run
from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.compose import Compose
from paceline.draft.pieces import Dictionary, Pieces, unfinished
from paceline.draft.suffix import Suffix
from paceline.draft.translate import LEAST_SHARED, Translated
from paceline.draft.tuning import TEXT, tune
from paceline.errors import IncompatibleDrafter
from paceline.prefix import CHUNK
from paceline.sampling import Sampler, SamplingParams
from paceline.target import HFTarget
from paceline.testing import ToyTarget, check_drafter, exact_law
from paceline.tree import Drawn, TokenTree

STORY = [
    "The harbour was quiet when the boat came in, and the lamp at its end had gone out.\n",
    "She took the letter from her coat and read it once more; nobody stood on the pier.\n",
    "A train leaves at 9:40 and travels 150 km. The second train is 30 minutes faster than the first.\n",
]
CODE = [
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n",
    "for name, value in sorted(found.items()):\n    if value is None:\n        raise ValueError(name)\n",
    "class Reader:\n    def __init__(self, path: str) -> None:\n        self.path = path\n",
]
WILD = "naïve café — 東京 \U0001f600\U0001f680 ﬁ ½ e\u0301 \u200b\ta  b\r\n\n"
PLAIN, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 5}
MODES = pytest.mark.parametrize("settings", [PLAIN, SAMPLED], ids=["greedy", "sampled"])
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


# -- tokenizers --------------------------------------------------------------------------------------------------------


def wrapped(tokenizer: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@functools.cache
def byte_level(corpus: str = "story", size: int = 330, lower: bool = False) -> PreTrainedTokenizerFast:
    """As GPT-2 and Qwen have it; `<|end|>` is special, `<tool>` is text."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Lowercase() if lower else None
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((STORY if corpus == "story" else CODE) * 4, trainer)
    bpe.add_tokens([AddedToken("<tool>", special=False)])
    return wrapped(bpe, eos_token="<|end|>")


@functools.cache
def sentencepiece(corpus: str = "story", size: int = 400, decoder: str = "sequence") -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: `▁` for a space, bytes for what has no token, and `<s>` in front of every text."""
    text = [line.replace(" ", "▁") for line in (STORY if corpus == "story" else CODE)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(text * 4, trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    made = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *BYTES, *made["vocab"]]
    merges = [tuple(pair) for pair in made["merges"]]
    bpe = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    if decoder == "sequence":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        bpe.decoder = decoders.Sequence(parts)
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    bpe.add_special_tokens(["<unk>", "<s>", "</s>"])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrapped(bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def words_of(corpus: str = "story") -> PreTrainedTokenizerFast:
    """As BERT has it: pieces of words, and spaces that nobody knows of."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.Lowercase()
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    pieces.train_from_iterator(STORY if corpus == "story" else CODE, trainer)
    return wrapped(pieces, unk_token="[UNK]")


def letters(names: Sequence[str], merges: Sequence[tuple[str, str]] = (), bos: str | None = None) -> Any:
    """A tokenizer with these tokens and no others."""
    bpe = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    bpe.decoder = decoders.Fuse()
    if bos is not None:
        bpe.add_special_tokens([bos])
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
        )
    return wrapped(bpe)


def relabelled(tokenizer: PreTrainedTokenizerFast, order: list[int]) -> PreTrainedTokenizerFast:
    """The same tokenizer with id `order[i]` for id i."""
    held = json.loads(tokenizer.backend_tokenizer.to_str())
    held["model"]["vocab"] = {name: order[i] for name, i in tokenizer.get_vocab().items()}
    for entry in held["added_tokens"]:
        entry["id"] = order[entry["id"]]
    held["added_tokens"].sort(key=lambda entry: entry["id"])
    return wrapped(Tokenizer.from_str(json.dumps(held)), eos_token=tokenizer.eos_token)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": byte_level,
    "code": lambda: byte_level("code", 420),
    "lower": lambda: byte_level("story", 330, True),
    "pieces": sentencepiece,
    "metaspace": lambda: sentencepiece("code", 380, "metaspace"),
}
FAITHFUL = [name for name in KINDS if name != "lower"]


def scribble(rng: random.Random, length: int) -> str:
    """Words, code, and characters of every length in bytes."""
    parts = [*" ".join(STORY + CODE).split(" "), " ", "  ", "\n", "\t", "<|end|>", "</s>", "<tool>", *WILD]
    text = "".join(rng.choice(parts) + rng.choice(["", " "]) for _ in range(length))
    return text + "".join(chr(rng.choice([rng.randrange(32, 0xD800), rng.randrange(0x10000, 0x20000)])) for _ in "ab")


# -- what ids stand for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAITHFUL)
def test_the_bytes_of_a_text_are_those_of_its_tokens(kind: str) -> None:
    pieces, rng = Pieces(KINDS[kind](), "target"), random.Random(kind)
    for length in range(60):
        text = scribble(rng, length % 12).lstrip(" ")  # metaspace adds no space to one that is there
        said = b"".join(pieces.value(i) or b"" for i in pieces.encode(text)).decode()
        assert said.removeprefix(" " if pieces.drops_space else "") == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_token_are_what_the_tokenizer_decodes_it_to(kind: str) -> None:
    tokenizer = KINDS[kind]()
    pieces = Pieces(tokenizer, "target")
    anchor = tokenizer.encode("at", add_special_tokens=False)
    before = tokenizer.decode(anchor)
    checked = 0
    for i in range(len(tokenizer)):
        value = pieces.value(i)
        if i in tokenizer.added_tokens_decoder and tokenizer.added_tokens_decoder[i].special:
            assert value is None
            continue
        assert value is not None
        found = tokenizer.decode([*anchor, i], clean_up_tokenization_spaces=False)
        assert found.startswith(before)
        assert found[len(before) :] == value.decode(errors="replace")
        checked += 1
    assert checked >= 320


@pytest.mark.parametrize("kind", FAITHFUL)
def test_any_bytes_can_be_spelt(kind: str) -> None:
    pieces, rng = Pieces(KINDS[kind](), "draft"), random.Random(kind)
    for length in range(60):
        data = scribble(rng, 6).encode()
        begin = rng.randrange(len(data))
        data = data[begin : begin + length] + bytes(rng.randrange(256) for _ in range(length % 3))
        ids = pieces.spell(data)
        assert b"".join(pieces.value(i) or b"" for i in ids) == data
        assert not {i for i in ids if pieces.value(i) is None}


@pytest.mark.parametrize("kind", FAITHFUL)
def test_a_text_behind_another_one_is_spelt_as_inside_of_it(kind: str) -> None:
    """The boundary of two words is kept by every tokenizer here: the ids are then those of the whole text."""
    pieces = Pieces(KINDS[kind](), "target")
    before, text = "The harbour was", " quiet when the boat came"
    whole = pieces.encode(before + text)
    found = pieces.behind(text, before)
    assert found is not None
    assert whole[-len(found) :] == found
    assert b"".join(pieces.value(i) or b"" for i in found) == text.encode()


def test_a_tokenizer_that_changes_text_says_so() -> None:
    pieces = Pieces(byte_level(lower=True), "target")
    assert pieces.behind("the boat", "in ") is not None
    assert pieces.behind("The boat", "in ") is None


def test_unfinished_characters() -> None:
    for char in "a", "é", "東", "\U0001f600":
        data = b"x" + char.encode()
        for cut in range(1, len(data)):
            assert unfinished(data[: cut + 1]) == (cut if cut < len(data) - 1 else 0)
    assert unfinished(b"") == unfinished(b"\x80\x80") == unfinished("東".encode()[1:]) == unfinished(b"\xff") == 0


@pytest.mark.parametrize("theirs", FAITHFUL)
@pytest.mark.parametrize("ours", FAITHFUL)
def test_counterparts_stand_for_the_same(ours: str, theirs: str) -> None:
    words = Dictionary.of(KINDS[ours](), KINDS[theirs]())
    target, draft = words.target, words.draft
    assert len(set(words.to_draft.values())) == len(words.to_draft)
    assert {theirs: ours for ours, theirs in words.to_draft.items()} == words.to_target
    for i, other in words.to_draft.items():
        assert target.values[i] == draft.values[other]
        if target.values[i] is None:
            assert target.names[i] == draft.names[other]
    both = {value for value in target.values if value} & {value for value in draft.values if value}
    assert both == {target.values[i] for i in words.to_draft if target.values[i]}
    if ours == theirs:
        assert words.is_same
        assert words.to_draft == {i: i for i in range(len(target.values))}
    else:
        assert not words.is_same


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(IncompatibleDrafter, match=r"draft's tokenizer .*WordPiece.*own family"):
        Dictionary.of(byte_level(), words_of())
    with pytest.raises(IncompatibleDrafter, match=r"target's tokenizer .*WordPiece"):
        Dictionary.of(words_of(), byte_level())
    bare = Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(IncompatibleDrafter, match="no decoder"):
        Dictionary.of(byte_level(), wrapped(bare))


# -- laws, every outcome counted ---------------------------------------------------------------------------------------


def toy(mode: str, rule: str = "coupled", top_k: int | None = None, depth: int | None = 3) -> Translated:
    """A draft for the toy targets, whose ids 0 to 6 are the letters a to g; the draft has no `d` but others."""
    if mode == "shared":
        names, merges = ["x", "g", "e", "f", "c", "b", "a", "y"], []
    else:
        names, merges = ["g", "ab", "e", "f", "d", "c", "b", "a", "ba", "ca"], [("a", "b"), ("b", "a"), ("c", "a")]
    words = Dictionary.of(letters("abcdefg"), letters(names, merges))
    least = 0.0 if mode == "shared" else 2.0
    model = ToyTarget.random(len(names), 9)
    return Translated(model, words, tree_top_k=top_k, depth=depth, rule=rule, least_shared=least)


@pytest.mark.parametrize(("rule", "top_k"), [("block", 1), ("block", 2), ("standard", 1), ("standard", 2)])
def test_shared_drafts_keep_the_law(rule: str, top_k: int) -> None:
    drafter, target = toy("shared", rule, top_k, depth=2), ToyTarget.random(3, 5)
    drafter.bind(target)
    for params in (SamplingParams(), SamplingParams(top_k=2, repetition_penalty=1.5)):
        found = exact_law(target, drafter, rule, 2, prompt=[0, 1, 2], params=params, depth=2, budget=top_k + 1)
        assert found.total_variation < 1e-12
        assert found.num_outcomes > 5
        assert found.tokens_per_pass > 1.1


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_drafts_of_text_keep_the_law(rule: str) -> None:
    drafter, target = toy("text", rule), ToyTarget.random(3, 5)
    drafter.bind(target)
    found = exact_law(target, drafter, rule, 3, prompt=[0, 1, 2])
    assert found.total_variation < 1e-12
    assert found.num_outcomes == 27
    assert found.tokens_per_pass > 1.05


@pytest.mark.usefixtures("unchecked")
def test_the_contract_of_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With texts that go from one way to the other and back."""
    drafter, ways = toy("shared", "coupled", 2, depth=2), []
    drafter.least_shared = 0.85
    for name in ("_spelt", "_renamed"):
        way = getattr(drafter, name)
        monkeypatch.setattr(drafter, name, lambda *given, way=way: (ways.append(way.__name__), way(*given))[1])
    report = check_drafter(drafter, rules=["coupled"])
    report.verify()
    assert report.mean_acceptance_length is not None
    assert report.mean_acceptance_length > 1.05
    assert min(ways.count("_spelt"), ways.count("_renamed")) > 20


def test_q_is_the_drafts_law_over_what_both_have() -> None:
    """Renormalised by hand, and with a filter that counts the target's tokens."""
    drafter = toy("shared", "block", 2)
    names, model = "xgefcbay", ToyTarget.random(8, 9)
    target = ToyTarget.random(7, 1)
    drafter.bind(target)
    for params in (
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=3),
        SamplingParams(seed=1, logit_bias={0: 2.0}),
    ):
        prompt = [0, 2, 1]
        state = drafter.begin(Step(prompt[:-1], prompt[1:]))
        (tree,) = drafter.propose([state], [asked(params, 7, prompt)])
        assert tree.drawn is Drawn.DISTINCT
        assert tree.q is not None
        assert tree.num_nodes > 3
        for node, kids in enumerate(tree.children):
            if kids:
                text = [names.index("abcdefg"[i]) for i in [*prompt[:-1], *(tree.ids[n] for n in tree.path(node))]]
                logits = model.law(text).log()
                row = torch.tensor([float(logits[names.index(c)]) if c in names else -torch.inf for c in "abcdefg"])
                wanted = Sampler(params, 7, prompt).law(row.double(), [tree.ids[n] for n in tree.path(node)[1:]])
                assert torch.allclose(tree.q[node].double(), wanted.probs(), atol=1e-6)
                assert float(tree.q[node][3]) == 0.0
                assert all(float(tree.q[node][tree.ids[kid]]) > 0.0 for kid in kids)
        drafter.end(state)


def asked(params: SamplingParams, size: int, prompt: list[int], depth: int = 3, budget: int = 12) -> Ask:
    sampler = Sampler(params, size, prompt)
    return Ask(prompt[-1], len(prompt) - 1, budget, depth, sampler.log_law, sampler.top, sampler.draws)


# -- whole texts -------------------------------------------------------------------------------------------------------


class Watched(Drafter[Any]):
    """A translated draft that is watched: what it tells the draft model, and what becomes of its trees."""

    def __init__(self, inner: Translated) -> None:
        self.inner, self.texts, self.log = inner, {}, []
        self.open: dict[int, TokenTree] = {}

    def bind(self, target: Any) -> None:
        self.inner.bind(target)

    def begin(self, prompt: Step) -> Any:
        state = self.inner.begin(prompt)
        self.texts[id(state)] = [*prompt.tokens]
        return state

    def propose(self, states: list[Any], asks: list[Ask]) -> list[TokenTree]:
        trees = self.inner.propose(states, asks)
        for state, ask, tree in zip(states, asks, trees, strict=True):
            assert tree.num_nodes - 1 <= ask.budget
            assert max(tree.depth) <= ask.depth
            self.check(state, [*self.texts[id(state)], ask.pending])
            self.open[id(state)] = tree
        return trees

    def observe(self, states: list[Any], steps: list[Step]) -> None:
        self.inner.observe(states, steps)
        for state, step in zip(states, steps, strict=True):
            self.texts[id(state)] += step.tokens
            if id(state) in self.open:
                self.log.append((self.open.pop(id(state)), len(step.following) - 1))
                self.check(state, [*self.texts[id(state)], step.following[-1]])

    def end(self, state: Any) -> None:
        self.inner.end(state)

    def check(self, state: Any, ids: list[int]) -> None:
        """What was told is the text, byte for byte; the draft model's cache has read no more than that."""
        reading, words = state.reading, self.inner.words
        if reading is None or reading.is_closed:
            return
        told = [*reading.text, *state.tail]
        assert self.inner.inner.num_read(reading) + len(reading.unread) == len(reading.text)
        opening = words.draft.opening
        assert told[: len(opening)] == opening
        assert not set(opening) & set(told[len(opening) :])
        text = b"".join(words.target.value(i) or b"" for i in ids)
        said = b"".join(words.draft.value(i) or b"" for i in told) + state.held
        strip = [b" " if pieces.drops_space else b"" for pieces in (words.target, words.draft)]
        assert not self.inner_is_faithful or said.removeprefix(strip[1]) == text.removeprefix(strip[0])

    inner_is_faithful = True

    @property
    def kept(self) -> int:
        return sum(accepted for _, accepted in self.log)

    @property
    def descended(self) -> list[bool]:
        return [accepted == max(tree.depth) for tree, accepted in self.log]


@functools.cache
def model_for(kind: str, seed: int = 0, limit: int = 256) -> HFTarget:
    return HFTarget(tiny("llama", seed, vocab_size=len(KINDS[kind]()), max_position_embeddings=limit))


@functools.cache
def plain_for(kind: str) -> PreTrainedModel:
    return tiny("llama", 0, vocab_size=len(KINDS[kind]()))


PROMPTS = ["T", "The harbour was quiet", "for name, 東京 \U0001f600 <tool>"]


def prompts_for(kind: str) -> list[list[int]]:
    return [list(KINDS[kind]()(prompt).input_ids) for prompt in PROMPTS]


@functools.cache
def wanted(kind: str, frozen: tuple[tuple[str, Any], ...], length: int) -> list[list[int]]:
    return [reference(plain_for(kind), p, length, SamplingParams(**dict(frozen))).ids for p in prompts_for(kind)]


def made(ours: str, theirs: str, least: float = LEAST_SHARED, **options: Any) -> Translated:
    words = Dictionary.of(KINDS[ours](), KINDS[theirs]())
    drafter = Translated(model_for(theirs, 1), words, least_shared=least, **options)
    drafter.bind(model_for(ours))
    return drafter


@pytest.mark.parametrize(
    ("ours", "theirs", "least", "settings"),
    [
        ("bytes", "code", 0.0, SAMPLED),
        ("bytes", "pieces", 2.0, SAMPLED),
        ("pieces", "code", 0.0, PLAIN),
        ("pieces", "bytes", 2.0, PLAIN),
        ("metaspace", "pieces", 0.0, SAMPLED),
        ("metaspace", "bytes", 2.0, PLAIN),
        ("code", "lower", 0.0, SAMPLED),
        ("lower", "code", 2.0, PLAIN),
    ],
)
def test_the_text_is_the_reference(ours: str, theirs: str, least: float, settings: dict[str, Any]) -> None:
    drafter = Watched(made(ours, theirs, least, depth=3, tree_top_k=2))
    drafter.inner_is_faithful = "lower" not in (ours, theirs)
    rows = decode(model_for(ours), prompts_for(ours), drafter, max_tokens=10, **settings)
    assert [row.output_ids for row in rows] == wanted(ours, tuple(settings.items()), 10)
    assert any(tree.num_nodes > 1 for tree, _ in drafter.log)


@pytest.mark.parametrize("rule", ["block", "standard"])
@pytest.mark.parametrize("least", [0.0, 2.0], ids=["shared", "text"])
def test_greedy_text_under_every_rule(least: float, rule: str) -> None:
    drafter = Watched(made("bytes", "pieces", least, rule=rule))
    rows = decode(model_for("bytes"), prompts_for("bytes"), drafter, max_tokens=10, rule=rule)
    assert [row.output_ids for row in rows] == wanted("bytes", (("temperature", 0.0),), 10)
    assert all(tree.drawn is Drawn.FIXED and tree.q is None for tree, _ in drafter.log)


@functools.cache
def twin(seed: int = 0) -> tuple[HFTarget, Dictionary]:
    """The target's own weights and tokenizer, with other numbers for the ids."""
    size = len(byte_level())
    order = random.Random(seed).sample(range(size), size)
    model, where = tiny("llama", 0, vocab_size=size), torch.tensor(order)
    with torch.no_grad():
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            table[where] = table.clone()
    return HFTarget(model), Dictionary.of(byte_level(), relabelled(byte_level(), order))


@MODES
@pytest.mark.parametrize(("top_k", "depth"), [(1, 5), (3, 3)])
def test_a_relabelled_twin_is_always_right(top_k: int, depth: int, settings: dict[str, Any]) -> None:
    model, words = twin()
    inner = Translated(model, words, tree_top_k=top_k, depth=depth)
    inner.bind(model_for("bytes"))
    assert words.share(TEXT) == 1.0
    assert not words.is_same
    drafter = Watched(inner)
    settings = {**settings, "repetition_penalty": 1.2, "logit_bias": {40: 1.0}}
    rows = decode(model_for("bytes"), prompts_for("bytes"), drafter, max_tokens=24, budget=240, depth=depth, **settings)
    params = SamplingParams(**settings)
    assert [row.output_ids for row in rows] == [
        reference(plain_for("bytes"), prompt, 24, params).ids for prompt in prompts_for("bytes")
    ]
    assert all(drafter.descended)
    assert sum(max(tree.depth) == depth for tree, _ in drafter.log) >= 3 * (24 // (depth + 1) - 1)


def test_a_guess_that_was_kept_is_not_read_again() -> None:
    """A chain of five that is kept whole leaves its last guess and the target's own token to read, and no more."""
    model, words = twin()
    spy = Spy(model)
    drafter = Translated(spy, words, tree_top_k=1, depth=5)
    drafter.bind(model_for("bytes"))
    decode(model_for("bytes"), prompts_for("bytes")[1:2], drafter, max_tokens=31, depth=5)
    widths = [len(rows[0]) for rows in spy.tokens]
    assert widths[1:] == [1, 1, 1, 1, 1, *[2, 1, 1, 1, 1] * 4][: len(widths) - 1]


def test_text_that_was_guessed_stays_as_it_was_drafted() -> None:
    """A draft that writes "a" and "b" where its tokenizer writes "ab": what was read is not spelt anew."""
    names = ["ab", *"abc"]
    words = Dictionary.of(letters("abc"), letters(names, [("a", "b")]))
    likely = {"ab": "c", "a": "b", "b": "c", "c": "a"}
    rows = [[0.97 if other == likely[name] else 0.01 for other in names] for name in names]
    drafter = Translated(ToyTarget(rows), words, tree_top_k=2, depth=4, least_shared=2.0)
    ids = words.target.encode("abcab")
    state = drafter.begin(Step(ids[:-1], ids[1:]))
    (tree,) = drafter.propose([state], [asked(GREEDY, 3, ids, depth=6)])
    node = 0
    for letter in "cab":
        (node,) = [kid for kid in tree.children[node] if "abc"[tree.ids[kid]] == letter]
    drafter.observe([state], [Step([ids[-1], *words.target.encode("cab")], words.target.encode("cabb"))])
    told = [names[i] for i in [*state.reading.text, *state.tail]]
    assert told == ["ab", "c", "ab", "c", "a", "b", "b"]
    assert drafter.inner.num_read(state.reading) == 6


# -- text that is known by heart ---------------------------------------------------------------------------------------


def by_heart(kind: str, text: str) -> ToyTarget:
    """A model that writes this text on, whatever pieces it was given, as its tokenizer spells the rest."""
    pieces = Pieces(KINDS[kind](), "target")
    data = text.encode()

    def law(ids: tuple[int, ...]) -> list[float]:
        said = b"".join(pieces.value(i) or b"" for i in ids)
        said = said.removeprefix(b" ") if pieces.drops_space else said
        rest = data[len(said) : len(said) + 40] if data.startswith(said) else b""
        coming = pieces.behind(rest.decode(errors="ignore"), said[-20:].decode(errors="ignore")) if rest else None
        size = len(pieces.values)
        law = [0.001 / (size - 1)] * size
        law[coming[0] if coming else 5] = 0.999
        return law

    return ToyTarget(law, len(pieces.values))


@pytest.mark.parametrize("least", [0.0, 2.0], ids=["shared", "text"])
@pytest.mark.parametrize(("ours", "theirs"), [("bytes", "pieces"), ("pieces", "code"), ("code", "bytes")])
def test_a_draft_that_knows_the_text_is_nearly_always_right(ours: str, theirs: str, least: float) -> None:
    text = STORY[0] + CODE[0] + "naïve café, 東京 and more. " + STORY[1] + STORY[2]
    words = Dictionary.of(KINDS[ours](), KINDS[theirs]())
    drafter = Watched(Translated(by_heart(theirs, text), words, tree_top_k=1, depth=8, least_shared=least))
    target = by_heart(ours, text)
    drafter.bind(target)
    prompt = list(KINDS[ours]()(text[:15]).input_ids)
    (row,) = decode(target, [prompt], drafter, max_tokens=60)
    whole = KINDS[ours]()(text).input_ids
    assert row.ids == whole[: len(row.ids)]
    tested = row.stats.num_draft_tokens
    if least:
        assert row.stats.num_accepted_tokens >= 0.75 * tested
        assert row.stats.mean_acceptance_length > 3.5
    else:  # the draft writes the text in its own pieces, and those that the target lacks are lost
        assert row.stats.mean_acceptance_length > 1.3


# -- the prompt, the cache, the end ------------------------------------------------------------------------------------


def text_of(drafter: Translated, state: Any) -> str:
    told = [*state.reading.text, *state.tail]
    return b"".join(drafter.words.draft.value(i) or b"" for i in told).decode()


@pytest.mark.parametrize("least", [0.0, 2.0], ids=["shared", "text"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_chunks_that_cut_words_and_characters_lose_nothing(size: int, least: float) -> None:
    text = "The harbour \U0001f600\U0001f680 was 東京 quiet"
    ids = list(byte_level()(text).input_ids)
    drafter = made("bytes", "pieces", least, depth=2)
    chunks = [ids[:-1][i : i + size] for i in range(0, len(ids) - 1, size)]
    state = drafter.begin(Step(chunks[0], ids[1 : len(chunks[0]) + 1]))
    at = len(chunks[0])
    for chunk in chunks[1:]:
        drafter.observe([state], [Step(chunk, ids[at + 1 : at + 1 + len(chunk)])])
        at += len(chunk)
    drafter.propose([state], [asked(GREEDY, len(byte_level()), ids)])
    assert [*state.reading.text, *state.tail] == list(sentencepiece()(text).input_ids)  # its own way of spelling it


@pytest.mark.parametrize("least", [0.0, 2.0], ids=["shared", "text"])
def test_a_long_prompt_is_read_in_chunks(least: float) -> None:
    text = "".join(scribble(random.Random(3), 12) for _ in range(30)) + STORY[0]
    ids = list(byte_level()(text).input_ids)
    assert len(ids) > CHUNK + 200
    target = HFTarget(tiny("llama", 0, vocab_size=len(byte_level()), max_position_embeddings=4096))
    words = Dictionary.of(byte_level(), byte_level("code", 420))
    draft = HFTarget(tiny("llama", 1, vocab_size=len(byte_level("code", 420)), max_position_embeddings=4096))
    drafter = Watched(Translated(draft, words, depth=3, least_shared=least))
    (row,) = decode(target, [ids], drafter, max_tokens=6)
    model = tiny("llama", 0, vocab_size=len(byte_level()), max_position_embeddings=4096)
    assert row.output_ids == reference(model, ids, 6).ids
    assert drafter.log


@pytest.mark.parametrize("least", [0.0, 2.0], ids=["shared", "text"])
def test_special_tokens_of_the_prompt(least: float) -> None:
    """One that the draft has by the same name is told; others are left out, and their names in a text are text."""
    ours, theirs = byte_level(), byte_level("code", 420)
    held = json.loads(theirs.backend_tokenizer.to_str())
    for entry in held["added_tokens"]:
        entry["content"] = entry["content"].replace("<|turn|>", "<|other|>")
    held["model"]["vocab"]["<|other|>"] = held["model"]["vocab"].pop("<|turn|>")
    theirs = wrapped(Tokenizer.from_str(json.dumps(held)))
    words = Dictionary.of(ours, theirs)
    drafter = Translated(model_for("code", 1), words, least_shared=least, depth=2)
    drafter.bind(model_for("bytes"))
    end, turn = ours.convert_tokens_to_ids(["<|end|>", "<|turn|>"])
    ids = [turn, *words.target.encode("the boat <|other|>"), end, turn, *words.target.encode(" came")]
    state = drafter.begin(Step(ids[:-1], ids[1:]))
    drafter.propose([state], [asked(GREEDY, len(ours), ids)])
    told = [*state.reading.text, *state.tail]
    special = {i for i, value in enumerate(words.draft.values) if value is None}
    assert [i for i in told if i in special] == [theirs.convert_tokens_to_ids("<|end|>")]
    assert text_of(drafter, state) == "the boat <|other|> came"


def test_half_a_character_waits() -> None:
    """Spelt when it is whole; nothing is guessed until then, and what never becomes one is told as bytes."""
    drafter = made("bytes", "pieces", 2.0, depth=2)
    ids = drafter.words.target.encode("a \U0001f600 b")
    sizes = []
    state = drafter.begin(Step(ids[:1], ids[1:2]))
    for i in range(1, len(ids)):
        (tree,) = drafter.propose([state], [asked(GREEDY, len(byte_level()), ids[: i + 1])])
        text = b"".join(drafter.words.target.value(t) or b"" for t in ids[: i + 1])
        assert state.held == text[len(text) - unfinished(text) :]
        sizes.append((bool(state.held), tree.num_nodes > 1))
        drafter.observe([state], [Step([ids[i]], ids[i + 1 : i + 2] or [5])])
    assert (True, False) in sizes
    assert (False, True) in sizes
    assert (True, True) not in sizes
    (bad,) = [i for i, value in enumerate(drafter.words.target.values) if value == b"\xf0"]
    (letter,) = [i for i, value in enumerate(drafter.words.target.values) if value == b"a"]
    drafter.observe([state], [Step([5], [bad])])
    drafter.observe([state], [Step([bad], [letter])])
    told = drafter.words.draft
    assert [told.names[i] for i in [*state.reading.text, *state.tail]][-2:] == ["<0xF0>", "a"]


@MODES
@pytest.mark.parametrize("least", [0.0, 2.0], ids=["shared", "text"])
def test_a_shorter_draft_context(least: float, settings: dict[str, Any]) -> None:
    words = Dictionary.of(byte_level(), byte_level("code", 420))
    spy = Spy(model_for("code", 1, 24))
    drafter = Watched(Translated(spy, words, depth=2, tree_top_k=1, least_shared=least))
    rows = decode(model_for("bytes"), prompts_for("bytes")[1:], drafter, max_tokens=24, **settings)
    assert [row.output_ids for row in rows] == wanted("bytes", tuple(settings.items()), 24)[1:]
    assert spy.furthest == 23
    assert drafter.inner.inner._pool is None


def test_the_end_frees_what_was_read() -> None:
    for least in (0.0, 2.0):
        drafter = made("bytes", "code", least)
        rows = requests(model_for("bytes"), prompts_for("bytes"), drafter, max_tokens=20)
        steps = run(model_for("bytes"), rows)
        for _ in range(6):
            next(steps)
        assert drafter.inner._pool is not None
        steps.close()  # given up
        assert drafter.inner._pool is None
        assert not drafter.inner._rows


@MODES
def test_rows_come_and_go(settings: dict[str, Any]) -> None:
    prompts = [list(byte_level()(scribble(random.Random(i), 1 + i)).input_ids) for i in range(5)]
    for least in (0.0, 2.0):
        rows = requests(
            model_for("bytes"),
            prompts,
            Watched(made("bytes", "pieces", least)),
            max_tokens=9,
            settings=[{**settings, "max_tokens": 2 + 5 * i % 9} for i in range(5)],
        )
        for _ in run(model_for("bytes"), rows, max_rows=3):
            pass
        params = [SamplingParams(**settings)] * 5
        expected = [reference(plain_for("bytes"), p, 2 + 5 * i % 9, params[i]).ids for i, p in enumerate(prompts)]
        assert [row.output_ids for row in rows] == expected


@MODES
@pytest.mark.parametrize("least", [0.0, 2.0], ids=["shared", "text"])
def test_beside_a_look_up(least: float, settings: dict[str, Any]) -> None:
    """What a look-up expects is read along in shared mode: a twin's guesses stay right."""
    model, words = twin()
    draft = Translated(model, words, least_shared=least)
    both = Compose([Suffix(), draft])
    both.bind(model_for("bytes"))
    prompts = [list(byte_level()(text * 2).input_ids) for text in (CODE[0], STORY[1], "ab ab ab ab")]
    rows = decode(model_for("bytes"), prompts, both, max_tokens=20, **settings)
    params = SamplingParams(**settings)
    assert [row.output_ids for row in rows] == [reference(plain_for("bytes"), p, 20, params).ids for p in prompts]
    assert sum(row.stats.num_accepted_tokens for row in rows) > (30 if least == 0.0 else 3)


# -- any text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_fuzz(seed: int) -> None:
    """Random kinds, texts, settings and ways: the text is the reference, and what is told is the text."""
    rng = random.Random(seed)
    ours, theirs = rng.sample(sorted(KINDS), 2)
    least, rule = rng.choice([0.0, 2.0]), rng.choice(["coupled", "coupled", "block", "standard"])
    drafter = Watched(made(ours, theirs, least, rule=rule, tree_top_k=rng.choice([1, 2, None])))
    drafter.inner_is_faithful = "lower" not in (ours, theirs)
    tokenizer = KINDS[ours]()
    prompts = [list(tokenizer(scribble(rng, rng.randrange(1, 9))).input_ids) for _ in range(3)]
    prompts[1] = [rng.randrange(len(tokenizer)) for _ in range(9)]  # no text that anyone wrote
    settings: dict[str, Any] = {"temperature": 0.0}
    if rule == "coupled":
        settings = rng.choice(
            [
                {"temperature": 1.3, "seed": seed},
                {"temperature": 1.0, "seed": seed, "top_p": 0.8, "presence_penalty": 0.7},
                settings,
            ]
        )
    rows = decode(model_for(ours), prompts, drafter, max_tokens=10, rule=rule, depth=rng.choice([2, 6, 23]), **settings)
    params = SamplingParams(**settings)
    assert [row.output_ids for row in rows] == [reference(plain_for(ours), p, 10, params).ids for p in prompts]


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5, 6])
def test_transformers_46124_letters_and_pairs_of_letters(K: int) -> None:
    """One start token, positions of the draft's own, spaces that stay, and no piece that becomes another one."""
    chars = "ab c.\n"
    words = Dictionary.of(letters(chars), letters(["<s>", "ab", *chars, "  "], [("a", "b"), (" ", " ")], bos="<s>"))
    size = len(words.draft.values)
    for least in (0.0, 2.0):
        spy = Spy(HFTarget(tiny("llama", 2, vocab_size=size)))
        drafter = Watched(Translated(spy, words, depth=K, least_shared=least))
        target = HFTarget(tiny("llama", 0, vocab_size=len(chars)))
        prompt = words.target.encode(" ab  c. a\nb")
        drafter.bind(target)
        (row,) = decode(target, [prompt], drafter, max_tokens=9, depth=K)
        assert row.output_ids == reference(tiny("llama", 0, vocab_size=len(chars)), prompt, 9).ids
        assert sum(token == 0 for rows in spy.tokens for token in rows[0]) == 1
        for begin, positions in zip(spy.begins, spy.positions, strict=True):
            assert min(positions[0]) >= begin[0]
        assert drafter.log


# -- through the library -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model and its tokenizer for each kind, as users have them."""
    found = {}
    for kind in KINDS | {"words": words_of}:
        folder = found[kind] = tmp_path_factory.mktemp("drafts") / kind
        tokenizer = {**KINDS, "words": words_of}[kind]()
        model = tiny("llama", kind != "bytes", torch.float32, vocab_size=len(tokenizer))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found


@pytest.mark.parametrize("theirs", ["code", "pieces"])
def test_a_draft_of_another_family(folders: dict[str, Path], theirs: str) -> None:
    llm = LLM(folders["bytes"], None, threads=1)
    config = {"method": "draft_model", "model": str(folders[theirs])}
    for params in (SamplingParams(temperature=0.0, max_tokens=16), SamplingParams(seed=3, max_tokens=16)):
        (plain,) = llm.generate("The harbour was", params)
        for given in (config, {"model": str(folders[theirs])}):
            (fast,) = llm.generate("The harbour was", params, speculative_config=given)
            assert fast.token_ids == plain.token_ids
    assert [type(one) for one in llm._drafters.values()].count(Translated) == 1
    assert fast.stats.num_draft_tokens > 0
    assert len(llm._drafts) == 1


def test_a_draft_whose_tokens_are_no_text_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(IncompatibleDrafter, match="WordPiece"):
        LLM(folders["bytes"], {"method": "draft_model", "model": str(folders["words"])}, threads=1)


def test_a_foreign_draft_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Costs are those of passes over its own tokens, and no laws over different ids are compared."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr("paceline.draft.tuning.SMALL", 0)
    fed: list[int] = []
    target, draft = (
        HFTarget(tiny("llama", 0, torch.float32, vocab_size=len(one()), max_position_embeddings=1024))
        for one in (KINDS["bytes"], KINDS["pieces"])
    )
    draft.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed.append(int(given[0].max())))
    ids, own = (KINDS[kind]().encode(TEXT, add_special_tokens=False) for kind in ("bytes", "pieces"))
    tuning = tune(target, draft, ids, own)
    assert tuning is not None
    assert [variant.bits for variant in tuning.variants] == [16]
    assert tuning.variants[0].overlap == pytest.approx(0.6, abs=1e-5)
    assert tuning.costs.draft[0][1] > 0.0
    assert max(fed) == max(own)
    assert tune(target, draft, ids, own) == tuning
