"""Heads by name and folder: settings, the look at a head when it is loaded, `inspect`, plans."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_oracles import eagle, eagle3, medusa
from oracles import decode, prompt_of, tiny
from typer.testing import CliRunner

from paceline import LLM, BadRequest, SamplingParams
from paceline.certify import certify
from paceline.certify import run as certify_run
from paceline.cli import app
from paceline.draft import SpeculativeConfig
from paceline.draft.eagle import Eagle
from paceline.draft.losses import Batch
from paceline.draft.medusa import Medusa
from paceline.draft.self_check import DoubtfulHead, self_check
from paceline.errors import IncompatibleDrafter, ModelNotFound
from paceline.formats import Head, with_own, write_head
from paceline.plan import make_plan
from paceline.target import HFTarget

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, seed=3)
TEXT = "one two three one two"


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, None, threads=1, reuse_prefix=False)


@pytest.fixture(scope="module")
def folders(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each kind of head, of random weights."""
    hidden, vocab = llm.target.hidden_size, llm.target.vocab_size
    third = eagle3(hidden, vocab, ids=torch.arange(0, vocab, 2), layer_ids=(0, 1))
    heads = {
        "medusa": (medusa(hidden, vocab), "medusa"),
        "eagle": (eagle(hidden, vocab), "eagle"),
        "eagle3": (with_own(third, embed_tokens=llm.target.model.get_input_embeddings().weight), "speculators"),
    }
    root = tmp_path_factory.mktemp("heads")
    for kind, (head, layout) in heads.items():
        write_head(head, root / kind, layout)  # type: ignore[arg-type]
    return {kind: str(root / kind) for kind in heads}


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
@pytest.mark.filterwarnings("ignore:the head guesses")
def test_a_folder_is_all_it_takes(llm: LLM, folders: dict[str, str], kind: str) -> None:
    for params in (GREEDY, SAMPLED):
        (plain,) = llm.generate(TEXT, params)
        for config in (
            {"method": kind, "model": folders[kind]},
            {"method": "compose", "drafters": ["suffix", {"method": kind, "model": folders[kind]}]},
        ):
            (fast,) = llm.generate(TEXT, params, speculative_config=config)
            assert fast.token_ids == plain.token_ids
            assert fast.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"method": "eagle3"}, BadRequest, "method 'eagle3' needs the head"),
        ({"method": "medusa", "model": 5}, BadRequest, "the folder of a head"),
        ({"method": "eagle", "model": "no/such/head"}, ModelNotFound, "no/such/head"),
        ({"method": "medusa", "model": "x", "medusa_choices": [[0, 0]]}, BadRequest, "above it"),
        (
            {"method": "eagle", "model": "x", "medusa_choices": [[0]]},
            BadRequest,
            "medusa_choices is for method 'medusa'",
        ),
        ({"method": "eagle", "model": "x", "draft_dtype": "int4"}, BadRequest, "draft_dtype is for method"),
    ],
)
def test_what_heads_cannot_be_given(llm: LLM, config: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        llm.generate(TEXT, GREEDY, speculative_config=config)


@pytest.mark.filterwarnings("ignore:the head guesses")
def test_the_right_method_is_named(llm: LLM, folders: dict[str, str]) -> None:
    with pytest.raises(IncompatibleDrafter, match="the head is one for method 'eagle3', and the method is 'medusa'"):
        llm.generate(TEXT, GREEDY, speculative_config={"method": "medusa", "model": folders["eagle3"]})


@pytest.mark.filterwarnings("ignore:the head guesses")
def test_a_fixed_tree_is_what_is_verified(llm: LLM, folders: dict[str, str]) -> None:
    choices = [[0], [1], [2], [0, 0]]
    config = {"method": "medusa", "model": folders["medusa"], "medusa_choices": choices}
    (out,) = llm.generate(TEXT, GREEDY, speculative_config=config)
    assert len(out.stats.drafted_per_position) <= 2
    assert SpeculativeConfig.read(config).medusa_choices == ((0,), (1,), (2,), (0, 0))


# -- the look at a head ------------------------------------------------------------------------------------------------


def deep() -> HFTarget:
    return HFTarget(tiny("llama", num_hidden_layers=6))


def test_layers_counted_the_other_way_are_noticed() -> None:
    """A head that was taught on the states that enter layers 1, 2 and 4, said to read those that leave them."""
    model = deep()
    ids = prompt_of(120)
    drafter: Any = Eagle(eagle3(model.hidden_size, model.vocab_size, layer_ids=(1, 2, 4), seed=1))
    drafter.bind(model)
    trained_on(model, drafter, ids)
    right = self_check(model, drafter, ids)
    assert right.right > 0.8
    assert right.warning is None
    wrong = Eagle(moved(drafter, (2, 3, 5)))
    wrong.bind(model)
    seen = self_check(model, wrong, ids)
    assert seen.right < 0.5 * right.right
    assert seen.shifted[-1] == pytest.approx(right.right)
    assert seen.warning is not None
    assert "counts layers the other way" in seen.warning


def moved(drafter: Any, layer_ids: tuple[int, ...]) -> Head:
    """The head with what it has learned, saying that it reads other layers."""
    network, head = drafter.network, drafter.head
    tensors = dict(head.tensors) | {"fc.weight": network.fc.weight.data, "lm_head.weight": network.lm_head.weight.data}
    tensors |= {"norm.weight": network.norm.weight.data, "layers.0.hidden_norm.weight": network.hidden_norm.weight.data}
    layer = network.layers[0]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"layers.0.self_attn.{name}.weight"] = getattr(layer.attention, name).weight.data
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"layers.0.mlp.{name}.weight"] = getattr(layer, name).weight.data
    tensors["layers.0.input_layernorm.weight"] = layer.before_attention.weight.data
    tensors["layers.0.post_attention_layernorm.weight"] = layer.before_mlp.weight.data
    return replace(head, tensors=tensors, settings=replace(head.settings, layer_ids=layer_ids))


def trained_on(model: HFTarget, drafter: Any, ids: list[int]) -> None:
    """Teach a head one text by heart, with the model's own states."""
    cache = model.new_cache(1, len(ids))
    taps = sorted({*drafter.taps, model.num_layers})
    seen = model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], None, cache, taps)
    assert seen.hidden is not None
    states = dict(zip(taps, seen.hidden.clone().chunk(len(taps), dim=-1), strict=True))
    tapped = torch.cat([states[tap] for tap in drafter.taps], dim=-1)
    module = drafter.network if isinstance(drafter, Eagle) else drafter.heads
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(300):
        optimiser.zero_grad()
        last = states[model.num_layers]
        batch = Batch(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), tapped, last)
        once = {"steps": 1} if isinstance(drafter, Eagle) else {}
        drafter.loss(batch, **once)[0].backward()
        optimiser.step()
    for parameter in parameters:
        parameter.requires_grad_(False)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_a_head_of_another_model_is_noticed(llm: LLM, folders: dict[str, str], kind: str, tiny_model: Path) -> None:
    fresh = LLM(tiny_model, None, threads=1)
    with pytest.warns(DoubtfulHead, match="where the commonest one alone would be right"):
        fresh.generate(TEXT, GREEDY, speculative_config={"method": kind, "model": folders[kind]})
    with warnings.catch_warnings():
        warnings.simplefilter("error", DoubtfulHead)  # once is enough
        fresh.generate(TEXT, GREEDY, speculative_config={"method": kind, "model": folders[kind], "tree_top_k": 2})


def test_a_medusa_head_that_knows_its_model_is_let_in() -> None:
    model = deep()
    (written,) = decode(model, [prompt_of(9)], max_tokens=110)
    ids = written.ids
    drafter: Any = Medusa(medusa(model.hidden_size, model.vocab_size, 2, seed=1))
    drafter.bind(model)
    before = self_check(model, drafter, ids)
    trained_on(model, drafter, ids)
    after = self_check(model, drafter, ids)
    assert before.right < 0.2
    assert after.right > 0.8
    assert after.shifted == {}
    assert before.num_places == len(ids) - 2


# -- inspect -----------------------------------------------------------------------------------------------------------


def paceline(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_inspect_says_what_a_head_holds(folders: dict[str, str], tiny_model: Path) -> None:
    result = paceline("inspect", folders["eagle3"], "--target", tiny_model)
    assert result.exit_code == 0, result.output
    assert "EAGLE-3 in the layout speculators" in result.stdout
    assert "fits" in result.stdout
    held = json.loads(paceline("inspect", folders["medusa"], "--target", tiny_model, "--json").stdout)
    assert held["kind"] == "medusa"
    assert held["fits"] is True


def test_inspect_says_what_does_not_fit(tmp_path: Path, tiny_model: Path) -> None:
    write_head(medusa(24, 99), tmp_path / "other", "medusa")
    result = paceline("inspect", tmp_path / "other", "--target", tiny_model)
    assert result.exit_code == 1
    assert "does not fit: the head is for a target with hidden_size 24" in result.stdout
    held = json.loads(paceline("inspect", tmp_path / "other", "--target", tiny_model, "--json").stdout)
    assert held["fits"] is False


def test_inspect_of_nothing(tmp_path: Path) -> None:
    result = paceline("inspect", tmp_path / "no-such-head")
    assert result.exit_code == 2
    assert "no-such-head" in result.stderr


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the head guesses")
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_heads_are_planned_by_replay(llm: LLM, folders: dict[str, str], kind: str) -> None:
    ids = [list(llm.tokenizer(text).input_ids) for text in (TEXT, "the end of the end")]
    plan = make_plan(llm, ids, methods=[kind], draft_model=folders[kind], max_tokens=16)
    own = [one for one in plan.choices if one.method == kind]
    assert own
    assert all(one.source == "replayed" for one in own)
    config = own[0].config
    outputs = [
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=16, seed=i), speculative_config=config)[0]
        for i, prompt in enumerate(ids)
    ]
    assert len(outputs) == 2


# -- certificates ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the head guesses")
@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_heads_are_certified(
    llm: LLM, folders: dict[str, str], kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer that applies, trees at both temperatures; on the model's own laws where q takes part."""
    for mode in certify_run.SIZES:
        size = certify_run.Size(num_prompts=2, max_tokens=20, num_samples=12, num_openings=1, own_length=2)
        monkeypatch.setitem(certify_run.SIZES, mode, size)
    config = {"method": kind, "model": folders[kind], "rejection_sample_method": rule}
    asked = [certify_run.Named(text, list(llm.tokenizer(text).input_ids)) for text in (TEXT, "fox dog fox dog fox")]
    certificate = certify(llm, config, asked, mode="quick")
    assert certificate.verdict == "lossless", certificate.to_json()
    own = next(layer for layer in certificate.layers if layer.name == "drafter")
    assert own.verdict == ("skipped" if rule == "coupled" else "lossless")
