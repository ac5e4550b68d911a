"""Training heads: data against a model without a cache, losses against sums, runs cut short against whole ones."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.draft import losses
from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.losses import Batch, Mix, judge, places_among
from paceline.draft.medusa import Heads
from paceline.draft.self_check import DoubtfulHead
from paceline.errors import BadRequest, PacelineError
from paceline.formats import read_head, with_own, write_head
from paceline.kernels.machine import identity
from paceline.train import Recipe, loop, train
from paceline.train import data as texts_of
from paceline.train.data import HELD_OUT, Folder, Plan, Seen, Texts, batches, commonest, users_turn
from paceline.train.fresh import fresh, taps_of
from paceline.train.world import World
from paceline.tree import TokenTree

SMALL: dict[str, Any] = {
    "num_samples": 6,
    "max_tokens": 20,
    "max_question_tokens": 8,
    "group_size": 3,
    "num_rows": 2,
    "held_out": 2,
    "epochs": 2,
    "batch_tokens": 64,
    "accumulate": 2,
    "draft_vocab_size": 200,
    "intermediate_size": 48,
}


def recipe(method: str = "eagle3", **more: Any) -> Recipe:
    layers = {"layer_ids": (0, 2, 3)} if method == "eagle3" else {}
    return Recipe(**{"method": method, "model": "tiny", **layers, **SMALL, **more})


@pytest.fixture(scope="session")
def deep_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four layers, in float64, so that what is equal is equal to the last bit."""
    folder = tmp_path_factory.mktemp("models") / "deep"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(config).to(torch.float64).eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(8.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 0}))
    return folder


@pytest.fixture(scope="module")
def llm(deep_model: Path) -> LLM:
    return LLM(deep_model, None, threads=1)


# -- losses ------------------------------------------------------------------------------------------------------------


def some_laws(places: int = 7, ids: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(places, ids, generator=noise, dtype=torch.float64) * 2 for _ in range(2))
    return logits, teacher.softmax(-1), torch.randint(0, ids, (places,), generator=noise)


def test_losses_are_what_their_formulas_say() -> None:
    logits, law, token = some_laws()
    for place in range(len(token)):
        p, weights = law[place].tolist(), [math.exp(x) for x in logits[place].tolist()]
        q = [w / sum(weights) for w in weights]
        kept = sum(map(min, p, q))
        wanted = {
            "cross_entropy": -math.log(q[int(token[place])]),
            "kl": sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
            "acceptance": 1 - kept,
            "likelihood": -math.log(kept),
        }
        for name, value in wanted.items():
            found = Mix.read(name).of(logits, law, token)
            assert float(found[place]) == pytest.approx(value, rel=1e-12)
        both = Mix.read("kl:0.25, acceptance:2").of(logits, law, token)
        assert float(both[place]) == pytest.approx(0.25 * wanted["kl"] + 2 * wanted["acceptance"], rel=1e-12)


def test_a_token_that_the_head_has_no_id_for_adds_no_cross_entropy() -> None:
    logits, law, token = some_laws()
    token[2] = -100
    assert float(Mix.read("cross_entropy").of(logits, law, token)[2]) == 0.0
    assert float(Mix.read("kl").of(logits, law, token)[2]) > 0.0


@pytest.mark.parametrize("text", ["", "kl,kl", "kl:0", "kl:x", "kl:-1", "kl:inf", "tv", "kl;acceptance"])
def test_losses_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest):
        Mix.read(text)


def test_a_loss_is_spelt_as_it_was_read() -> None:
    assert str(Mix.read("kl:0.5,acceptance")) == "kl:0.5,acceptance"
    with pytest.raises(BadRequest, match="did you mean 'likelihood'"):
        Mix.read("likelyhood")


def test_laws_made_a_few_at_a_time_give_the_same_sums_and_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(3)
    states = torch.randn(9, 5, generator=noise, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(13, 5, generator=noise, dtype=torch.float64, requires_grad=True)
    last, own = (torch.randn(*shape, generator=noise, dtype=torch.float64) for shape in ((9, 6), (13, 6)))
    token = torch.randint(0, 13, (9,), generator=noise)
    mix = Mix.read("kl,likelihood:0.5")
    whole = mix.of(states @ matrix.T, (last @ own.T).softmax(-1), token).sum()
    wanted = torch.autograd.grad(whole, [states, matrix])
    monkeypatch.setattr(losses, "AT_ONCE", 2 * 13)
    found = judge(mix, states, lambda x: x @ matrix.T, last, lambda x: x @ own.T, token, 13)
    assert float(found.loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-12)
    for a, b in zip(torch.autograd.grad(found.loss, [states, matrix]), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    q, p = (states @ matrix.T).softmax(-1), (last @ own.T).softmax(-1)
    assert found.number == 9
    assert found.right == int((q.argmax(-1) == p.argmax(-1)).sum())
    assert found.overlap == pytest.approx(float(torch.minimum(p, q).sum().detach()), rel=1e-12)


def test_places_among_ids() -> None:
    ids = torch.tensor([7, 2, 30])
    assert places_among(torch.tensor([[2, 30], [7, 5]]), ids).tolist() == [[1, 2], [0, -100]]
    assert places_among(torch.tensor([5]), None).tolist() == [5]


# -- data --------------------------------------------------------------------------------------------------------------


def made(llm: LLM, folder: Path, own: Recipe, taps: tuple[int, ...] = (0, 2, 4)) -> tuple[Plan, Texts]:
    plan = Plan.of(llm, own, taps)
    home = Folder(folder)
    home.open(own, taps, llm.target)
    assert texts_of.make_all(llm, plan, home, plan.names, lambda *_: None, lambda: False)
    return plan, Texts(folder, plan.names)


def test_texts_hold_what_the_model_thinks_of_them(llm: LLM, deep_model: Path, tmp_path: Path) -> None:
    """States, likeliest ids and what is learnt, by `transformers` without a cache."""
    own = recipe()
    _, texts = made(llm, tmp_path, own)
    model = AutoModelForCausalLM.from_pretrained(deep_model, attn_implementation="eager").eval()
    assert len(texts) >= 4
    checked = 0
    for number in range(len(texts)):
        batch = texts.batch([number], (0, 2), 4)
        ids = batch.tokens[0]
        with torch.no_grad():
            out = model(ids[None], output_hidden_states=True)
        size = len(ids) - 1
        wanted = torch.cat([out.hidden_states[0][0], out.hidden_states[2][0]], dim=-1)
        assert torch.allclose(batch.hidden[0, :size], wanted[:size], rtol=1e-5, atol=1e-5)
        assert torch.allclose(batch.last[0, :size], out.hidden_states[4][0, :size], rtol=1e-5, atol=1e-5)
        learnt = batch.learn[0].nonzero().flatten().tolist()
        assert learnt == list(range(learnt[0], len(ids)))  # the answer, to its end
        prompt = texts.prompt(number)
        assert prompt == ids[: learnt[0]].tolist()
        shown = llm.tokenizer.decode(prompt)
        assert texts.questions[number] in shown
        assert shown.rstrip().endswith("assistant")
        assert batch.best is not None
        for at in learnt:
            assert int(batch.best[0, at - 1]) == int(out.logits[0, at - 1].argmax())
            checked += 1
    assert checked > 40


def test_the_held_out_answers_are_greedy(llm: LLM, tmp_path: Path) -> None:
    own = recipe()
    made(llm, tmp_path, own)
    held = Texts(tmp_path, [HELD_OUT])
    (answer, *_) = llm.generate([held.prompt(0)], SamplingParams(temperature=0.0, max_tokens=own.max_tokens))
    batch = held.batch([0], (0,), 4)
    assert batch.tokens[0, len(held.prompt(0)) :].tolist() == answer.token_ids


def test_the_same_recipe_gives_the_same_files(llm: LLM, tmp_path: Path) -> None:
    own = recipe()
    plan, _ = made(llm, tmp_path / "a", own)
    for name in reversed(plan.names):  # in whatever order
        (tmp_path / "b").mkdir(exist_ok=True)
        plan.make(llm, name, tmp_path / "b")
    for name in plan.names:
        file = f"{name}.safetensors"
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    other, _ = made(llm, tmp_path / "c", recipe(seed=1))
    assert (tmp_path / "a" / "group-00000.safetensors").read_bytes() != (
        tmp_path / "c" / "group-00000.safetensors"
    ).read_bytes()
    assert other.names == plan.names == (HELD_OUT, "group-00000", "group-00001")


def test_the_users_turn_ends_where_the_words_begin(llm: LLM) -> None:
    begin = users_turn(llm)
    assert begin is not None
    whole = llm.chat_ids([{"role": "user", "content": "add two numbers"}])
    assert whole[: len(begin)] == begin
    assert llm.tokenizer.decode(whole[len(begin) :]).startswith("add two numbers")


def test_texts_that_are_nearly_the_same() -> None:
    seen = Seen()
    assert seen.is_new("Write a function that adds two numbers and returns the sum.")
    assert not seen.is_new("write a function that adds two numbers, and returns the sum!")
    assert not seen.is_new("Please write a function that adds two numbers and returns the sum")
    assert seen.is_new("Write a function that sorts a list of names by their last letter.")
    assert seen.is_new("hi")
    assert not seen.is_new("Hi!")
    assert seen.is_new("...")
    assert not seen.is_new("...")


def test_the_commonest_ids() -> None:
    counts = Counter({5: 3, 9: 7, 2: 3, 30: 1})
    assert commonest(counts, 3, [], 40).tolist() == [2, 5, 9]
    assert commonest(counts, 3, [17], 40).tolist() == [2, 9, 17]
    assert commonest(counts, 6, [], 40).tolist() == [0, 1, 2, 5, 9, 30]


def test_an_epoch_reads_every_text_once() -> None:
    lengths = [7, 30, 12, 5, 64, 100, 9, 33, 33, 8]
    orders = []
    for epoch in range(3):
        found = batches(lengths, 70, 0, epoch)
        assert sorted(i for numbers in found for i in numbers) == list(range(len(lengths)))
        assert all(len(n) == 1 or len(n) * max(lengths[i] for i in n) <= 70 for n in found)
        assert found == batches(lengths, 70, 0, epoch)
        orders.append(found)
    assert orders[0] != orders[1] != orders[2]


CHAT = [{"role": "user", "content": "hello fox"}, {"role": "assistant", "content": "the quick dog"}]


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


def test_given_conversations_are_learnt_where_the_assistant_speaks(llm: LLM, deep_model: Path, tmp_path: Path) -> None:
    file = lines(tmp_path / "d.jsonl", {"messages": CHAT}, {"messages": [*CHAT, *CHAT]}, {"text": "the fox jumps over"})
    own = recipe(data=str(file), answers="given", num_samples=2, held_out=1)
    _, texts = made(llm, tmp_path / "w", own)
    assert len(texts) == 3
    model = AutoModelForCausalLM.from_pretrained(deep_model, attn_implementation="eager").eval()
    spoken = []
    for number in range(3):
        batch = texts.batch([number], (0, 2), 4)
        ids, learn = batch.tokens[0], batch.learn[0]
        spoken.append(llm.tokenizer.decode(ids[learn]))
        with torch.no_grad():
            out = model(ids[None], output_hidden_states=True)
        size = len(ids) - 1
        assert torch.allclose(batch.last[0, :size], out.hidden_states[4][0, :size], rtol=1e-5, atol=1e-5)
        assert batch.best is not None
        assert batch.best[0, :size].tolist() == out.logits[0, :size].argmax(-1).tolist()
    assert sorted(text.count("the quick dog") for text in spoken) == [0, 1, 2]
    assert all("hello" not in text for text in spoken)


def test_conversations_that_the_target_answers_lose_their_own_answer(llm: LLM, tmp_path: Path) -> None:
    file = lines(tmp_path / "d.jsonl", {"messages": CHAT}, {"messages": [*CHAT, CHAT[0]]})
    _, texts = made(llm, tmp_path / "w", recipe(data=str(file), num_samples=1, held_out=1))
    prompts = sorted((llm.tokenizer.decode(texts.prompt(i)) for i in range(2)), key=len)
    assert "quick dog" not in prompts[0]
    assert "quick dog" in prompts[1]  # an earlier turn


@pytest.mark.parametrize(
    ("answers", "values", "words"),
    [
        ("target", [], "holds no texts"),
        ("target", ["{oops", {"messages": CHAT}], r"1 of 2 texts .*\n  line 1: no JSON"),
        ("target", [{"messages": CHAT}, {"prompt": "x"}], "line 2: an object with messages or text"),
        ("target", [{"text": "a fox"}], "line 1: text has no question that the target could answer"),
        ("target", [{"messages": []}], "line 1: messages are no list"),
        ("target", [{"messages": [{"role": "system", "content": "x"}]}], "no user's message"),
        ("given", [{"messages": CHAT[:1]}], "line 1: there is no answer to learn"),
        ("given", [{"text": "  "}], "line 1: text is empty"),
        ("given", [{"text": "a"}], "line 1: the text has 1 tokens"),
        ("given", [{"text": "a fox " * 400}], "line 1: it has .* the context holds 512"),
        ("given", [{"text": "one text alone"}], "holds one text; two are the least"),
    ],
)
def test_data_of_no_use(llm: LLM, tmp_path: Path, answers: Any, values: list[Any], words: str) -> None:
    file = lines(tmp_path / "d.jsonl", *values)
    with pytest.raises(BadRequest, match=words):
        train(llm, recipe(data=str(file), answers=answers), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_a_head_from_nothing_to_its_folder(llm: LLM, deep_model: Path, tmp_path: Path, method: str) -> None:
    said: list[str] = []
    found = train(llm, recipe(method), tmp_path / "head", say=said.append)
    assert found.is_finished
    assert found.epochs == 2
    head = read_head(tmp_path / "head")
    assert head.kind == method
    notes = [json.loads(line) for line in (tmp_path / "head" / "metrics.jsonl").read_text().splitlines()]
    assert [note["epoch"] for note in notes if "acceptance_length" in note] == [0, 1, 2]
    assert (tmp_path / "head" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert "tiny" in (tmp_path / "head" / "README.md").read_text()
    other = LLM(deep_model, None, threads=1)
    config = {"method": method, "model": str(tmp_path / "head")}
    for params in (SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(seed=3, max_tokens=12)):
        plain = other.generate("the quick fox", params)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DoubtfulHead)  # it has seen a page
            assert other.generate("the quick fox", params, speculative_config=config)[0].token_ids == plain.token_ids
    again = train(llm, recipe(method), tmp_path / "head")  # nothing is left to do
    assert (again.is_finished, again.epochs) == (True, 2)


def child(deep_model: Path, folder: Path, *, stop: str = "") -> "subprocess.Popen[bytes]":
    """A training in a process of its own, which says each stage and can be killed there."""
    code = f"""
import sys
from pathlib import Path
from paceline import LLM
from paceline.train import Recipe, train
llm = LLM({str(deep_model)!r}, None, threads=1)
recipe = Recipe(**{recipe().to_dict()!r})
def progress(stage, done, total):
    print(stage, done, flush=True)
train(llm, recipe, Path({str(folder)!r}), progress=progress)
print("END", flush=True)
"""
    environment = os.environ | {"PACELINE_SHAPE_CHECKS": "off"}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)


def killed_at(process: "subprocess.Popen[bytes]", line: str) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if said.decode().strip() == line:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL, f"it ended before {line!r}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "work" / "checkpoint.safetensors")


@pytest.mark.slow
def test_a_training_that_was_killed_ends_as_one_that_was_not(
    deep_model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    process = child(deep_model, whole)
    assert process.wait() == 0
    for line in ("making data 2", "training 3", "measuring 0"):
        killed_at(child(deep_model, cut), line)
    process = child(deep_model, cut)
    out, _ = process.communicate()
    assert out.decode().splitlines()[-1] == "END"
    mine, other = weights(whole), weights(cut)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    for name in ("config.json", "model.safetensors", "metrics.jsonl"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name
    assert len((whole / "metrics.jsonl").read_text().splitlines()) > 4


def test_a_training_asked_to_stop_goes_on_later(llm: LLM, tmp_path: Path) -> None:
    found = train(llm, recipe(), tmp_path / "a", minutes=0.0)
    assert not found.is_finished
    assert not list((tmp_path / "a" / "work" / "data").glob("group*"))
    ticks = []

    def late(stage: str, done: int, total: int) -> None:
        ticks.append(stage)

    assert train(llm, recipe(), tmp_path / "a", progress=late).is_finished
    train(llm, recipe(), tmp_path / "b")
    mine, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert {"making data", "training", "measuring"} == set(ticks)


def test_another_recipe_in_the_same_folder_is_refused(llm: LLM, tmp_path: Path) -> None:
    train(llm, recipe(), tmp_path / "a", minutes=0.0)
    with pytest.raises(BadRequest, match="seed is 0 there, 1 was given"):
        train(llm, recipe(seed=1), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("years of work")
    with pytest.raises(BadRequest, match=r"holds other things \(thesis.txt\)"):
        train(llm, recipe(), tmp_path / "b")
    assert (tmp_path / "b" / "thesis.txt").read_text() == "years of work"


def test_two_trainers_in_one_folder(llm: LLM, tmp_path: Path) -> None:
    with loop._lock(tmp_path / "a" / "work", World()), pytest.raises(BadRequest, match="another training runs"):
        train(llm, recipe(), tmp_path / "a")


def test_nobody_elses_files_are_touched(llm: LLM, tmp_path: Path) -> None:
    """Folders that hold something else are refused as they are, names that look like ours included."""
    theirs = {".notes.20261130": "precious", "work/lock": "mine", "about.json": '{"my": "site"}'}
    for which in ("out", "data"):
        for name, text in theirs.items():
            (tmp_path / which / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / which / name).write_text(text)
    with pytest.raises(BadRequest, match="holds other things"):
        train(llm, recipe(), tmp_path / "out")
    with pytest.raises(BadRequest, match=r"holds other things|says nothing that can be read"):
        train(llm, recipe(), tmp_path / "new", data_folder=tmp_path / "data")
    for which in ("out", "data"):
        for name, text in theirs.items():
            assert (tmp_path / which / name).read_text() == text


def test_a_head_to_begin_with_is_read_before_the_data_are_made(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="no-such-head"):
        train(llm, recipe(init=str(tmp_path / "no-such-head")), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_groups_whose_recipe_is_lost_are_nobodys(llm: LLM, tmp_path: Path) -> None:
    train(llm, recipe(), tmp_path / "a", data_folder=tmp_path / "data")
    (tmp_path / "data" / "about.json").unlink()
    with pytest.raises(BadRequest, match=r"no about\.json beside them"):
        train(llm, recipe(seed=9), tmp_path / "b", data_folder=tmp_path / "data")


def test_a_checkpoint_is_of_its_recipe(llm: LLM, tmp_path: Path) -> None:
    train(llm, recipe(), tmp_path / "a")
    for file in (tmp_path / "a").iterdir():
        if file.is_file():
            file.unlink()
    with pytest.raises(BadRequest, match="is of a training by another recipe"):
        train(llm, recipe(loss="acceptance"), tmp_path / "a")


def test_two_trainers_cannot_make_data_in_one_folder(llm: LLM, tmp_path: Path) -> None:
    with loop._lock(tmp_path / "data", World()), pytest.raises(BadRequest, match="another training runs"):
        train(llm, recipe(), tmp_path / "a", data_folder=tmp_path / "data")


def test_a_model_with_other_weights_is_another_model(llm: LLM) -> None:
    before = identity(llm.target)
    weight = llm.target.model.model.layers[2].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.add_(0.01)
    assert identity(llm.target) != before
    with torch.no_grad():
        weight.copy_(kept)
    assert identity(llm.target) == before


def test_data_serve_several_heads(llm: LLM, tmp_path: Path) -> None:
    data = tmp_path / "data"
    train(llm, recipe("eagle3"), tmp_path / "a", data_folder=data)
    times = {path: path.stat().st_mtime_ns for path in data.glob("*.safetensors")}
    train(llm, recipe("medusa"), tmp_path / "b", data_folder=data)
    assert times == {path: path.stat().st_mtime_ns for path in data.glob("*.safetensors")}
    with pytest.raises(BadRequest, match="the target's states"):
        train(llm, recipe("eagle3", layer_ids=(0, 1, 3)), tmp_path / "c", data_folder=data)
    with pytest.raises(BadRequest, match="data of another recipe"):
        train(llm, recipe("eagle3", max_tokens=21), tmp_path / "d", data_folder=data)


def test_a_full_disk_loses_nothing(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]
    usual = texts_of.save_file

    def full(*args: Any, **more: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            usual(*args, **more)
            raise OSError(errno.ENOSPC, "No space left on device")
        usual(*args, **more)

    monkeypatch.setattr(texts_of, "save_file", full)
    with pytest.raises(PacelineError, match="make room and run the same command again"):
        train(llm, recipe(), tmp_path / "a")
    there = sorted(path.name for path in (tmp_path / "a" / "work" / "data").iterdir())
    assert there == ["about.json", "held-out.safetensors"]
    monkeypatch.setattr(loop, "save_file", full)
    count[0] = 2 - 3  # two more groups, then the checkpoint
    with pytest.raises(PacelineError, match=r"cannot write .*checkpoint"):
        train(llm, recipe(), tmp_path / "a")
    monkeypatch.undo()
    assert train(llm, recipe(), tmp_path / "a").is_finished
    train(llm, recipe(), tmp_path / "b")
    mine, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_too_little_room_is_said_before_work(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "room", lambda path: 1000)
    with pytest.raises(BadRequest, match="and 1 kB are free"):
        train(llm, recipe(), tmp_path / "a")
    assert not list((tmp_path / "a" / "work" / "data").glob("*.safetensors"))


def broken(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """A loss that is no number in some steps."""
    from paceline.draft.eagle import Eagle

    usual, count = Eagle.loss, [0]

    def loss(self: Any, batch: Batch, **more: Any) -> Any:
        value, notes = usual(self, batch, **more)
        if torch.is_grad_enabled():
            count[0] += 1
            value = value * (math.nan if bad(count[0]) else 1.0)
        return value, notes

    monkeypatch.setattr(Eagle, "loss", loss)


def test_a_step_without_numbers_is_left_out(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda n: n == 2)
    said: list[str] = []
    assert train(llm, recipe(), tmp_path / "a", say=said.append).is_finished
    assert sum("the step is left out" in text for text in said) == 1
    assert all(bool(torch.isfinite(t).all()) for t in weights(tmp_path / "a").values())


def test_a_training_without_numbers_gives_up(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda n: True)
    with pytest.raises(PacelineError, match="10 steps in a row are no numbers"):
        train(llm, recipe(epochs=20), tmp_path / "a")


def test_a_damaged_group_or_checkpoint_is_named(llm: LLM, tmp_path: Path) -> None:
    train(llm, recipe(), tmp_path / "a")
    group = tmp_path / "a" / "work" / "data" / "group-00000.safetensors"
    whole = group.read_bytes()
    group.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PacelineError, match="is no group of texts"):
        train(llm, recipe(), tmp_path / "a")
    group.write_bytes(whole)
    checkpoint = tmp_path / "a" / "work" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(PacelineError, match="cannot be read"):
        train(llm, recipe(), tmp_path / "a")


@pytest.mark.slow
def test_two_processes_train_the_head_of_one(deep_model: Path, tmp_path: Path) -> None:
    """Through `accelerate`, as its launcher starts them; sums differ in their order alone."""
    code = tmp_path / "both.py"
    code.write_text(
        f"""
import sys
from pathlib import Path
from paceline import LLM
from paceline.train import Recipe, train
from paceline.train.world import World
assert World().size == int(sys.argv[2])
llm = LLM({str(deep_model)!r}, None, threads=1, device="cpu")
train(llm, Recipe(**{recipe().to_dict()!r}), Path(sys.argv[1]))
"""
    )
    environment = os.environ | {"PACELINE_SHAPE_CHECKS": "off", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, code, tmp_path / "one", "1"], check=True, env=environment)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, code, tmp_path / "two", "2"], check=True, env=environment | {"ACCELERATE_USE_CPU": "true"})
    mine, other = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert mine.keys() == other.keys()
    for name in mine:
        assert torch.allclose(mine[name].double(), other[name].double(), rtol=1e-7, atol=1e-9), name
    for name in ("group-00000", "group-00001", HELD_OUT):
        files = [tmp_path / which / "work" / "data" / f"{name}.safetensors" for which in ("one", "two")]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.fixture(scope="session")
def taught_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learnt a language: each word is followed by one of two."""
    folder = tmp_path_factory.mktemp("models") / "taught"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
            eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        model = Qwen2ForCausalLM(config)
        follow = torch.randint(3, len(tokenizer), (16, 2))
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(200):
            ids = torch.randint(3, len(tokenizer), (16, 1))
            while ids.shape[1] < 48:
                choice = follow[ids[:, -1] % 16]
                ids = torch.cat([ids, choice.gather(1, (torch.rand(16, 1) < 0.8).long())], dim=1)
            loss = functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 0}))
    return folder


class FirstGuesses(Drafter[Any]):
    """Notes the best first guess of a drafter at every token, and never has one verified: a pass for each token."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.taps = inner, inner.taps
        self.right = self.number = 0

    def begin(self, prompt: Step) -> list[Any]:
        return [self.inner.begin(prompt), None]

    def propose(self, states: list[Any], asks: list[Ask]) -> list[TokenTree]:
        trees = self.inner.propose([state[0] for state in states], asks)
        for state, tree in zip(states, trees, strict=True):
            state[1] = tree.ids[1] if tree.num_nodes > 1 else -1
        return [TokenTree.root(ask.pending) for ask in asks]

    def observe(self, states: list[Any], steps: list[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            if state[1] is not None:
                self.right += state[1] == step.following[0]
                self.number += 1
            state[1] = None  # for a text's last token nobody is asked
        self.inner.observe([state[0] for state in states], steps)

    def end(self, state: list[Any]) -> None:
        self.inner.end(state[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_what_is_read_is_what_is_drafted(taught_model: Path, tmp_path: Path, method: str) -> None:
    """Above chance, and the same share of right first guesses in training and in decoding."""
    llm = LLM(taught_model, None, threads=1)
    own = recipe(
        method, num_samples=60, max_tokens=60, max_question_tokens=24, temperature=1.0, group_size=60, num_rows=60,
        held_out=12, epochs=3, accumulate=1, batch_tokens=256, draft_vocab_size=300, learning_rate=5e-3, num_heads=2,
    )  # fmt: skip
    train(llm, own, tmp_path / "a")
    notes = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    epochs = [note for note in notes if "acceptance_length" in note]
    best = max(epochs, key=lambda note: note["acceptance_length"])
    assert epochs[0]["acceptance_length"] < 1.5 < 2.5 < best["acceptance_length"]
    assert best["held_out"]["right_0"] > 0.9 > 0.1 > epochs[0]["held_out"]["right_0"]
    held = Texts(tmp_path / "a" / "work" / "data", [HELD_OUT])
    drafter = loop.chain_of(read_head(tmp_path / "a"))
    drafter.bind(llm.target)
    first = FirstGuesses(drafter)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    prompts = [held.prompt(i) for i in range(len(held))]
    llm.generate(prompts, params, speculative_config={"method": first, "num_speculative_tokens": 4})
    assert first.number > 300
    assert first.right / first.number == pytest.approx(best["held_out"]["right_0"], abs=0.005)


# -- heads -------------------------------------------------------------------------------------------------------------


def test_fresh_medusa_heads_say_what_the_target_says(llm: LLM) -> None:
    own = recipe("medusa")
    ids = torch.arange(3, 203)
    head = fresh(own, llm.target, ids, torch.float64)
    drafter, parameters = loop.learner(head, llm.target, torch.float64)
    states = torch.randn(4, 32, dtype=torch.float64)
    wanted = llm.target.unembed(states)[:, ids]
    for i in range(own.num_heads):
        assert torch.allclose(drafter.heads.score(i, states), wanted)  # type: ignore[union-attr]
    assert set(parameters) == {n for n, t in head.tensors.items() if t.is_floating_point()}


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_training_moves_the_heads_own_tensors(llm: LLM, method: str) -> None:
    own = recipe(method)
    ids = None if method == "eagle" else torch.arange(0, 200)
    head = fresh(own, llm.target, ids, torch.float64)
    _, parameters = loop.learner(head, llm.target, torch.float64)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(1.0)
    again = fresh(own, llm.target, ids, torch.float64)
    for name in parameters:
        assert torch.allclose(head.tensors[name], again.tensors[name] + 1.0)


@pytest.mark.parametrize(
    ("method", "layout"),
    [("medusa", "vllm-medusa"), ("eagle", "eagle"), ("eagle3", "eagle"), ("eagle3", "speculators")],
)
def test_trained_heads_are_written_and_read_again(llm: LLM, tmp_path: Path, method: str, layout: Any) -> None:
    ids = None if method == "eagle" else torch.arange(0, 200)
    head = fresh(recipe(method), llm.target, ids, torch.float32)
    if layout == "speculators":
        with pytest.raises(BadRequest, match="no embedding of its own"):
            write_head(head, tmp_path / "head", layout)
        head = with_own(head, embed_tokens=llm.target.model.get_input_embeddings().weight)
    write_head(head, tmp_path / "head", layout)
    again = read_head(tmp_path / "head")
    assert again.settings == head.settings
    assert all(torch.equal(again.tensors[name], t) for name, t in head.tensors.items())


def test_taps(llm: LLM) -> None:
    assert taps_of(recipe("medusa"), llm.target) == taps_of(recipe("eagle"), llm.target) == (4,)
    assert taps_of(recipe("eagle3"), llm.target) == (0, 2, 3)
    with pytest.raises(BadRequest, match=r"layer_ids=\[0, 2, 4\]"):
        taps_of(recipe("eagle3", layer_ids=(0, 2, 4)), llm.target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "egle"}, "did you mean 'eagle'"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"epochs": True}, "epochs=True"),
        ({"seed": -1}, "seed=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"answers": "mine"}, "answers='mine'"),
        ({"loss": "kl:"}, None),
        ({"loss": "k1"}, "no loss 'k1'"),
        ({"method": "medusa", "layer_ids": (1, 2, 3)}, "only an EAGLE-3 head"),
        ({"draft_vocab_size": 1}, "draft_vocab_size=1"),
    ],
)
def test_recipes_that_are_refused(change: dict[str, Any], words: str | None) -> None:
    if words is None:
        recipe(**change)
        return
    with pytest.raises(BadRequest, match=words):
        recipe(**change)


def test_a_recipe_is_written_and_read(tmp_path: Path) -> None:
    own = recipe()
    own.write(tmp_path / "recipe.json")
    assert Recipe.read(tmp_path / "recipe.json") == own
    assert own.different(replace(own, seed=4, clip=0.25)) == [
        "seed is 4 there, 0 was given",
        "clip is 0.25 there, 0.5 was given",
    ]
    (tmp_path / "recipe.json").write_text('{"method": "eagle3", "surprise": 1}')
    with pytest.raises(BadRequest, match="is no recipe of a training"):
        Recipe.read(tmp_path / "recipe.json")


# -- the command -------------------------------------------------------------------------------------------------------


def paceline(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


ORDER = [
    "--layer-ids", "0,2,3", "--num-samples", "4", "--max-tokens", "12", "--epochs", "1", "--batch-tokens", "64",
    "--draft-vocab-size", "200", "--intermediate-size", "48", "--threads", "1",
]  # fmt: skip


def test_the_command_trains_and_goes_on(deep_model: Path, tmp_path: Path) -> None:
    order = ["train", "eagle3", deep_model, "-o", tmp_path / "head", *ORDER]
    first = paceline(*order, "--minutes", "0")
    assert first.exit_code == 0, first.output
    assert "the same command goes on" in first.stdout
    whole = paceline(*order)
    assert whole.exit_code == 0, whole.output
    assert "tokens per pass; use it with --method eagle3 --draft-model" in whole.stdout
    assert read_head(tmp_path / "head").kind == "eagle3"
    other = paceline(*order, "--loss", "acceptance")
    assert other.exit_code == 2
    assert "loss is 'kl' there, 'acceptance' was given" in " ".join(other.stderr.split())


def test_a_dry_run_says_what_it_takes_and_does_nothing(deep_model: Path, tmp_path: Path) -> None:
    result = paceline("train", "eagle3", deep_model, "-o", tmp_path / "head", *ORDER, "--dry-run")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "head").exists()
    for words in ("20 texts of at most", "on disk", "million weights", "1 epochs of", "upper bounds"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--data", "no-such.jsonl"], "there is no such file"),
        (["--layer-ids", "a,b"], "whole numbers with commas"),
        (["--loss", "k1"], "no loss 'k1'"),
        (["--answers", "mine"], "answers='mine'"),
    ],
)
def test_the_command_refuses_before_it_loads(deep_model: Path, tmp_path: Path, more: list[str], words: str) -> None:
    result = paceline("train", "eagle3", deep_model, "-o", tmp_path / "head", *more)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "loading" not in result.stderr
    assert not (tmp_path / "head").exists()


def test_a_borrowed_matrix_is_brought_along(llm: LLM, tmp_path: Path) -> None:
    """For engines that do not borrow: the same guesses, from a matrix of its own."""
    ids = torch.arange(3, 203)
    borrowed = fresh(recipe("medusa"), llm.target, ids, torch.float64)
    weight = llm.target.model.get_output_embeddings().weight
    write_head(with_own(borrowed, lm_head=weight), tmp_path / "head", "vllm-medusa")
    again = read_head(tmp_path / "head")
    states = torch.randn(4, 32, dtype=torch.float64)
    assert torch.allclose(Heads(again, llm.target)(states), Heads(borrowed, llm.target)(states))
    assert not any("cannot load it" in note for note in again.notes)
    with pytest.raises(BadRequest, match="borrows none"):
        with_own(again, lm_head=weight)
    with pytest.raises(BadRequest, match=r"lm_head of \[302, 32\] was given"):
        with_own(borrowed, lm_head=weight[1:])
