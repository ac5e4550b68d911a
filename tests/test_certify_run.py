"""`certify` from end to end on tiny models: what is sound comes out lossless, and what is planted is found, and where.

Faults that only a real forward shows are planted behind the proofs on small targets, which are then taken from before:
a test of the greedy layer should not pass because another layer saw the fault first.
"""

import functools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import config as shape_checks
from oracles import float64_softmax, logits_of, reference, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from paceline import LLM, Drafter, PacelineError, SamplingParams
from paceline.cache import KVCache
from paceline.certify import Certificate, Layer, certify
from paceline.certify import run as certify_run
from paceline.certify.run import SAMPLED, SIZES, Named, Size, likeliest_texts
from paceline.cli import app
from paceline.draft.base import Ask, Step
from paceline.draft.model import DraftModel, Reading
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.sampling import Law, Sampler
from paceline.testing import Report, ScriptedTree, check_rule
from paceline.tree import Drawn, TokenTree
from paceline.verify import RULES, Verdict, coupled, needs_q, standard

LAYERS = ["rule", "drafter", "greedy", "sampled", "joint law", "acceptance"]
TEXTS = [
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "the quick brown fox jumps over the quick brown",
    "fox dog fox dog fox",
    "return b + a",
]
SMALL = Size(num_prompts=3, max_tokens=20, num_samples=24, num_openings=1, own_length=2)


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every mode does little, and annotations are unchecked, as users run the package."""
    for mode in SIZES:
        monkeypatch.setitem(SIZES, mode, SMALL)
    shape_checks.update("jaxtyping_disable", True)
    yield
    shape_checks.update("jaxtyping_disable", False)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    read: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model)
    return read


def made(tokenizer: PreTrainedTokenizerBase, **options: Any) -> PreTrainedModel:
    """A float64 model whose attention matters: what a mask or a slot does wrong changes every logit."""
    return tiny("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024, **options)


@pytest.fixture(scope="session")
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(made(tokenizer), tokenizer, tmp_path_factory.mktemp("certify") / "target")


@pytest.fixture(scope="session")
def draft(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights disturbed: guesses are often right and often wrong."""
    model, noise = made(tokenizer), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=noise, dtype=weight.dtype))
    return saved(model, tokenizer, tmp_path_factory.mktemp("certify") / "draft")


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, {"method": "none"}, threads=1)


def prompts(llm: LLM) -> list[Named]:
    return [Named(f"text {i}", list(llm.tokenizer(text).input_ids)) for i, text in enumerate(TEXTS)]


def certified(llm: LLM, config: Any, **more: Any) -> Certificate:
    return certify(llm, config, prompts(llm), mode="quick", **more)


def layer(certificate: Certificate, name: str) -> Layer:
    (found,) = [one for one in certificate.layers if one.name == name]
    return found


def verdicts(certificate: Certificate) -> dict[str, str]:
    return {one.name: one.verdict for one in certificate.layers}


@functools.cache
def sound(rule: str) -> Report:
    return check_rule(rule, quick=True)


@pytest.fixture
def proved_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Called with a rule before anything is planted: its layer then answers from before."""

    def prove(rule: str) -> None:
        report = sound(rule)
        monkeypatch.setattr(certify_run, "check_rule", lambda name, quick: report if name == rule else None)

    return prove


def coupled_config(draft: Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), **more}


TREE = {"tree_top_k": 3, "tree_depth": 3}


# -- what is sound -----------------------------------------------------------------------------------------------------


def test_ngram_is_lossless_layer_by_layer(llm: LLM, folder: Path) -> None:
    certificate = certified(llm, {"method": "ngram"})
    assert verdicts(certificate) == dict.fromkeys(LAYERS, "lossless")
    assert [one.name for one in certificate.layers] == LAYERS
    assert [one.strength for one in certificate.layers] == ["equal", "equal", "equal", "equal", "tested", "measured"]
    assert (certificate.verdict, certificate.model) == ("lossless", str(folder))
    assert (certificate.method, certificate.rule, certificate.mode) == ("ngram", "coupled", "quick")
    assert certificate.parted == []
    assert certificate.near_ties_per_1000 == 0.0
    (note,) = [one for one in certificate.notes if "neither labels nor q" in one]
    assert "a drafter certified here is not thereby certified there" in note
    assert certificate.environment["dtype"] == "float64"
    assert certificate.environment["weights"] == str(folder)


def test_the_json_is_whole_and_valid(llm: LLM, draft: Path, proved_before: Callable[[str], None]) -> None:
    """And its numbers are those of the same calls made again, and of the joint law's own definition."""
    proved_before("coupled")
    config = coupled_config(draft)
    certificate = certified(llm, config, method="mine")
    found = json.loads(certificate.to_json(), parse_constant=pytest.fail)
    assert list(found) == [
        "verdict", "model", "method", "rule", "mode", "environment", "layers", "parted", "near_ties_per_1000",
        "mean_acceptance_length", "notes", "seconds",
    ]  # fmt: skip
    assert (found["verdict"], found["method"]) == ("lossless", "mine")
    assert [one["name"] for one in found["layers"]] == LAYERS
    for one in found["layers"]:
        assert set(one) == {"name", "strength", "verdict", "detail", "figures", "seconds"}
        assert one["detail"]
        assert one["seconds"] >= 0.0
    assert 0.0 <= sum(one["seconds"] for one in found["layers"]) <= found["seconds"]
    tokens = passes = drafted = accepted = 0
    for params in (SamplingParams(temperature=0.0, max_tokens=20), SamplingParams(0.8, seed=7, max_tokens=20)):
        pass
    assert tokens == passes == drafted == accepted
