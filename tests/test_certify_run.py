"""`certify` from end to end on tiny models: what is sound comes out lossless, and what is planted is found, and where.

Faults that only a real forward shows are planted behind the proofs on small targets, which are then taken from before:
a test of the greedy layer should not pass because another layer saw the fault first.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import config as shape_checks
from oracles import logits_of, reference, tiny
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

import paceline.llm
from paceline import LLM, Drafter, SamplingParams
from paceline.cache import KVCache
from paceline.certify import Certificate, Layer, certify
from paceline.certify import run as certify_run
from paceline.certify.run import SAMPLED, SIZES, Named, Size, likeliest_texts
from paceline.cli import app
from paceline.draft.compose import Compose
from paceline.draft.model import DraftModel
from paceline.draft.sketch import Sketch
from paceline.errors import BadRequest, IncompatibleDrafter, PacelineError
from paceline.sampling import Law, Sampler
from paceline.testing import Report, check_rule, rules
from paceline.tree import Drawn, TokenTree
from paceline.verify import RULES, Verdict, coupled, needs_q, standard

pytestmark = pytest.mark.slow
LAYERS = ["rule", "drafter", "greedy", "sampled", "joint law", "acceptance"]
TEXTS = [
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "the quick brown fox jumps over the quick brown",
    "fox dog fox dog fox",
    "return b + a",
]
SMALL = Size(num_prompts=2, max_tokens=20, num_samples=12, num_openings=1, own_length=2)
TREE = {"tree_top_k": 3, "tree_depth": 3}
Prove = Callable[[str], None]


@pytest.fixture(autouse=True)
def _small_and_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every mode does little, and annotations are unchecked, as users run the package."""
    for mode in SIZES:
        monkeypatch.setitem(SIZES, mode, SMALL)
    few = list(rules.cases(quick=True))[::6]  # `test_testing` and `test_planted` run them all
    monkeypatch.setattr(rules, "cases", lambda quick: few)
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


def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(made(tokenizer), tokenizer, tmp_path_factory.mktemp("certify") / "target")


@pytest.fixture(scope="session")
def draft(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's weights disturbed: guesses are often right and often wrong."""
    return saved(disturbed(tokenizer, 0.02), tokenizer, tmp_path_factory.mktemp("certify") / "draft")


def disturbed(tokenizer: PreTrainedTokenizerBase, scale: float) -> PreTrainedModel:
    model, noise = made(tokenizer), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=noise, dtype=weight.dtype))
    return model


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, {"method": "none"}, threads=1)


def prompts(llm: LLM) -> list[Named]:
    return [Named(f"text {i}", list(llm.tokenizer(text).input_ids)) for i, text in enumerate(TEXTS)]


def drafting(draft: Path, rule: str = "coupled", **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "rejection_sample_method": rule, **more}


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
def proved_before(monkeypatch: pytest.MonkeyPatch) -> Prove:
    """Called with a rule before anything is planted: its layer then answers from before."""

    def prove(rule: str) -> None:
        report = sound(rule)
        monkeypatch.setattr(certify_run, "check_rule", lambda name, quick: report if name == rule else None)

    return prove


# -- what is sound -----------------------------------------------------------------------------------------------------


def test_ngram_is_lossless_layer_by_layer(llm: LLM, folder: Path, proved_before: Prove) -> None:
    proved_before("coupled")
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


def test_the_json_is_whole_and_valid(
    llm: LLM, draft: Path, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its numbers are those of the same texts written again, every guess verified."""
    proved_before("coupled")
    certificate = certified(llm, drafting(draft), method="mine")
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
    assert sum(one["seconds"] for one in found["layers"]) <= found["seconds"]
    monkeypatch.setattr(llm, "verify_all", True)
    outputs = [
        llm.generate([prompt.ids], SamplingParams(max_tokens=20, **how), speculative_config=drafting(draft))[0]
        for greedy, how in ((True, {"temperature": 0.0}), (False, {"temperature": SAMPLED, "seed": 7}))
        for i, prompt in enumerate(prompts(llm)[: SMALL.num_prompts])
        for how in [how if greedy or i % 2 == 0 else how | {"top_p": 0.9}]
    ]
    tokens, passes = sum(len(o.token_ids) for o in outputs), sum(o.stats.num_target_passes for o in outputs)
    assert found["mean_acceptance_length"] == pytest.approx(tokens / passes)
    figures = found["layers"][5]["figures"]
    assert figures["drafted"] == sum(o.stats.num_draft_tokens for o in outputs)
    assert figures["accepted"] == sum(o.stats.num_accepted_tokens for o in outputs) > 0
    assert figures["mean_acceptance_length"] == found["mean_acceptance_length"]
    texts = [one for name in (2, 3) for one in found["layers"][name]["figures"]["prompts"]]
    assert [(one["name"], one["tokens"], one["equal_tokens"]) for one in texts] == [
        (f"text {i % SMALL.num_prompts}", len(o.token_ids), len(o.token_ids)) for i, o in enumerate(outputs)
    ]
    (context,) = found["layers"][4]["figures"]["contexts"]
    assert context["n"] == sum(one["count"] for one in context["outcomes"]) == SMALL.num_samples
    assert sum(one["expected"] for one in context["outcomes"]) == pytest.approx(1.0)
    assert len(found["layers"][4]["figures"]["log10_e"]) == SMALL.num_samples + 1


def test_a_method_left_to_the_library_is_proved_as_the_one_it_is(
    llm: LLM, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved_before("coupled")
    checked: list[Any] = []

    def check(drafter: Any, rules: Any) -> Report:
        checked.append((type(drafter), rules))
        return Report("taken on trust")

    monkeypatch.setattr(certify_run, "check_drafter", check)
    assert layer(certified(llm, {"method": "auto"}), "drafter").verdict == "lossless"
    assert checked == [(Compose, ("coupled",))]


def test_draft_trees_are_lossless(llm: LLM, draft: Path, proved_before: Prove) -> None:
    proved_before("coupled")
    certificate = certified(llm, drafting(draft, **TREE))
    assert verdicts(certificate) == dict.fromkeys(LAYERS, "lossless") | {"drafter": "skipped"}
    assert layer(certificate, "acceptance").strength == "tested"
    assert certificate.mean_acceptance_length is not None
    assert certificate.mean_acceptance_length > 1.2


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_a_draft_model_is_proved_on_the_models_own_laws(
    llm: LLM,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    rule: str,
    proved_before: Prove,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft is close to the target, so that the two likeliest tokens of both meet and guesses are kept too."""
    proved_before(rule)
    draft = saved(disturbed(tokenizer, 0.004), tokenizer, tmp_path / "close")
    monkeypatch.setitem(SIZES, "quick", SMALL._replace(num_openings=2))
    certificate = certified(llm, drafting(draft, rule, **({} if rule == "block" else {"tree_top_k": 2})))
    rule_layer = layer(certificate, "rule")
    assert rule_layer.strength == "proved"
    assert max(case["total_variation"] for case in rule_layer.figures["cases"]) < 1e-12
    assert verdicts(certificate) == dict.fromkeys(LAYERS, "lossless") | {"sampled": "skipped"}
    assert certificate.verdict == "lossless"
    assert certificate.notes == []  # the note on labels is for the rule that needs none
    drafter = layer(certificate, "drafter")
    assert drafter.strength == "proved"
    assert "own laws" in drafter.detail
    assert len(drafter.figures["cases"]) == 2
    for case in drafter.figures["cases"]:
        assert case["total_variation"] < 1e-9
        assert 0.0 < case["accepted"] <= 1.0
    greedy = layer(certificate, "greedy")
    assert greedy.detail.endswith("T=0: all ids equal.")
    for prompt, one in zip(prompts(llm), greedy.figures["prompts"], strict=False):
        params = SamplingParams(temperature=0.0)
        assert one["equal_tokens"] == one["tokens"] == len(expected(llm, prompt, params))
    assert certificate.near_ties_per_1000 == 0.0


def expected(llm: LLM, prompt: Named, params: SamplingParams) -> list[int]:
    """The text by a loop that shares nothing with the package."""
    return reference(made_once(llm.tokenizer), prompt.ids, SMALL.max_tokens, params, llm.eos_ids).ids


@functools.cache
def made_once(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return made(tokenizer)


# -- drafters that lie -------------------------------------------------------------------------------------------------

LIAR = """
import torch
from paceline import Drafter, Drawn, TokenTree


class Liar(Drafter):  # says that every guess was drawn from a flat law, and makes the same one each time
    def bind(self, target):
        self.size = target.vocab_size

    def begin(self, prompt):
        return None

    def propose(self, states, asks):
        q = torch.full((2, self.size), 1 / self.size)
        return [TokenTree(torch.tensor([ask.pending, 1]), torch.tensor([-1, 0]), Drawn.IID, q) for ask in asks]

    def observe(self, states, steps):
        pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of prompts and a module; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "liars", raising=False)
    (tmp_path / "liars.py").write_text(LIAR)
    rows = [json.dumps({"id": f"q{i}", "prompt": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["certify", *arguments, "--quick", "--threads", "1"])


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_a_lying_plugin_is_caught_by_the_exact_law(here: Path, folder: Path, rule: str, proved_before: Prove) -> None:
    proved_before(rule)
    result = run(
        str(folder), "--plugin", "liars:Liar", "--rejection-sample-method", rule, "--prompts", "p.jsonl", "--json",
        "c.json", "--html", "c.html",
    )  # fmt: skip
    assert result.exit_code == 1, result.stderr
    assert result.stdout.startswith("bug: ")
    found = json.loads((here / "c.json").read_text(), parse_constant=pytest.fail)
    assert (found["verdict"], found["method"], found["rule"]) == ("bug", "liars:Liar", rule)
    drafter = found["layers"][1]
    assert (drafter["name"], drafter["strength"], drafter["verdict"]) == ("drafter", "proved", "bug")
    assert f"truthful under {rule}: the exact law: the emitted law is" in drafter["detail"]
    assert max(case["total_variation"] for case in drafter["figures"]["cases"]) > 0.01
    assert {one["name"] for one in found["layers"] if one["verdict"] == "bug"} <= {"drafter", "joint law"}
    page = (here / "c.html").read_text()
    assert "liars:Liar" in page
    assert "bug" in page


def test_the_same_plugin_can_do_no_harm_under_coupled(here: Path, folder: Path, proved_before: Prove) -> None:
    proved_before("coupled")
    result = run(str(folder), "--plugin", "liars:Liar", "--prompts", "p.jsonl", "--json", "c.json")
    assert result.exit_code == 0, result.stderr
    found = json.loads((here / "c.json").read_text())
    assert found["verdict"] == "lossless"
    assert found["layers"][1]["verdict"] == "lossless"
    assert any("what a drafter says about itself cannot matter" in note for note in found["notes"])
    assert found["near_ties_per_1000"] == 0.0


class Own(Drafter[None]):
    """A drafter for one vocabulary: draws one of two tokens from q, and reports q or another law."""

    def __init__(self, size: int, pair: list[int], lies: bool = False) -> None:
        self.size, self.pair, self.lies = size, pair, lies

    def bind(self, target: Any) -> None:
        if target.vocab_size != self.size:
            raise IncompatibleDrafter(f"the target has {target.vocab_size} tokens; {self.size} are needed")

    def begin(self, prompt: Any) -> None:
        return None

    def observe(self, states: Any, steps: Any) -> None:
        pass

    def propose(self, states: Any, asks: Any) -> list[TokenTree]:
        return [self.tree(ask) for ask in asks]

    def tree(self, ask: Any) -> TokenTree:
        q, said = torch.zeros(2, 2, self.size, dtype=torch.float64)
        q[0, self.pair] = torch.tensor([0.7, 0.3], dtype=torch.float64)
        said[0, self.pair] = torch.tensor([0.3, 0.7], dtype=torch.float64)
        tokens = torch.tensor([ask.pending, ask.draws.draft(q[0])])
        return TokenTree(tokens, torch.tensor([-1, 0]), Drawn.IID, said if self.lies else q)


def likely(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The two likeliest tokens where the joint law's first opening ends."""
    ids: list[int] = (
        logits_of(made_once(tokenizer), tokenizer(certify_run.OPENINGS[0]).input_ids)[-1].topk(2).indices.tolist()
    )
    return ids


@pytest.mark.parametrize("lies", [False, True])
def test_a_drafter_for_this_vocabulary_alone_is_judged_on_the_models_own_laws(
    llm: LLM, tokenizer: PreTrainedTokenizerBase, lies: bool, proved_before: Prove
) -> None:
    proved_before("block")
    config = {"method": Own(len(tokenizer), likely(tokenizer), lies), "rejection_sample_method": "block"}
    drafter = layer(certified(llm, config), "drafter")
    assert drafter.strength == "proved"
    assert "own laws" in drafter.detail
    assert drafter.verdict == ("bug" if lies else "lossless")
    assert ("label or q is not true" in drafter.detail) == lies
    (case,) = drafter.figures["cases"]
    assert case["accepted"] > 0.0
    assert case["total_variation"] > 0.01 if lies else case["total_variation"] < 1e-9


def test_under_coupled_a_drafter_for_this_vocabulary_alone_is_tested_by_its_texts(
    llm: LLM, proved_before: Prove
) -> None:
    proved_before("coupled")
    certificate = certified(llm, {"method": Own(len(llm.tokenizer), [5, 6], lies=True)})
    assert verdicts(certificate) == dict.fromkeys(LAYERS, "lossless") | {"drafter": "skipped"}
    assert (certificate.method, certificate.verdict) == ("Own", "lossless")


def test_a_drafter_with_a_mind_of_its_own_is_a_bug_and_no_crash(llm: LLM, proved_before: Prove) -> None:
    """It drafts every other time it is asked, whatever the text: its laws cannot be enumerated, for it has none."""

    class Moody(Own):
        asked = 0

        def tree(self, ask: Any) -> TokenTree:
            self.asked += 1
            return super().tree(ask) if self.asked % 2 else TokenTree.root(ask.pending)

    proved_before("standard")
    config = {"method": Moody(len(llm.tokenizer), [5, 6]), "rejection_sample_method": "standard"}
    drafter = layer(certified(llm, config), "drafter")
    assert drafter.verdict == "bug"
    assert "depends on something besides the text and the draws" in drafter.detail


# -- faults that only a forward shows ----------------------------------------------------------------------------------


def stale(commit: Callable[[KVCache, Any], None], keeps_more: bool) -> Callable[[KVCache, Any], None]:
    """A commit that leaves something of a rejected guess behind."""

    def planted(self: KVCache, paths: Any) -> None:
        if not keeps_more:
            commit(self, [range(len(path)) for path in paths])
            return
        extra = [0 < len(path) < self.staged for path in paths]
        commit(self, paths)
        self.lengths = [length + more for length, more in zip(self.lengths, extra, strict=True)]

    return planted


def assert_judged_a_bug(certificate: Certificate, *layers: str) -> None:
    """These layers found it by themselves, and the judge put no difference down to rounding."""
    assert certificate.verdict == "bug"
    assert verdicts(certificate)["rule"] == "lossless"
    for name in layers:
        found = layer(certificate, name)
        assert found.verdict == "bug", found.detail
        assert " 0 of them near-ties" in found.detail
        assert any(one["parted"] and one["equal_tokens"] < one["tokens"] for one in found.figures["prompts"])
    assert len(certificate.parted) >= len(layers)
    for one in certificate.parted:
        d = one.difference
        assert not d.near_tie
        assert d.floor < 1e-6 < abs(d.logit_expected - d.logit_got)
    assert certificate.near_ties_per_1000 == 0.0


@pytest.mark.parametrize("method", ["a tree keeps the wrong slots", "a chain keeps a rejected slot"])
def test_a_stale_slot_is_a_bug(
    llm: LLM, draft: Path, method: str, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved_before("coupled")
    is_tree = "tree" in method
    if not is_tree:
        monkeypatch.setattr(certify_run, "check_drafter", lambda *_, **__: Report("taken on trust"))
    monkeypatch.setattr(KVCache, "commit", stale(KVCache.commit, not is_tree))
    certificate = certified(llm, drafting(draft, **TREE) if is_tree else {"method": "ngram"})
    assert_judged_a_bug(certificate, "greedy", "sampled")


def test_a_sibling_in_sight_is_a_bug(
    llm: LLM, draft: Path, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node sees all nodes before it, which on a chain are its ancestors and on a tree are not."""
    proved_before("coupled")
    causal = property(lambda tree: torch.ones(tree.num_nodes, tree.num_nodes, dtype=torch.bool).tril())
    monkeypatch.setattr(TokenTree, "ancestors", causal)
    assert_judged_a_bug(certified(llm, drafting(draft, **TREE)), "greedy", "sampled")
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompt = prompts(llm)[0]
    (chain,) = llm.generate([prompt.ids], params, speculative_config=drafting(draft, tree_top_k=1))
    assert chain.token_ids == expected(llm, prompt, params)


# -- faults of rules and settings --------------------------------------------------------------------------------------


def resamples_from_p(p: Any, tree: TokenTree, draws: Any, position: int) -> Verdict:
    """The textbook rule but for one thing: after a rejection it draws from p, not from what is left of it."""
    if tree.drawn is Drawn.FIXED:
        return standard(p, tree, draws, position)
    needs_q(tree)
    path: list[int] = []
    while True:
        node = path[-1] if path else 0
        law = p(node).probs()
        q = law if tree.q is None else tree.q[node].double()
        for child in tree.children[node]:
            if draws.accept(min(1.0, float(law[tree.ids[child]] / q[tree.ids[child]]))):
                path.append(child)
                break
        else:
            return Verdict(path, draws.pick(law))


def test_a_rule_that_resamples_from_p_is_a_bug(llm: LLM, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "standard", resamples_from_p)
    certificate = certified(llm, drafting(draft, "standard"))
    rule, drafter = layer(certificate, "rule"), layer(certificate, "drafter")
    assert (rule.strength, rule.verdict, certificate.verdict) == ("proved", "bug", "bug")
    assert "the emitted law is" in rule.detail
    fixed = [case["total_variation"] for case in rule.figures["cases"] if "fixed" in case["name"]]
    assert max(fixed) < 1e-12  # what was left right is found right
    assert max(case["total_variation"] for case in rule.figures["cases"]) > 0.01
    assert drafter.verdict == "bug"
    assert layer(certificate, "greedy").verdict == "lossless"


def test_typical_acceptance_is_a_bug(llm: LLM, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess that the target finds likely enough is kept, whatever the noise says."""

    def typical(p: Any, tree: TokenTree, draws: Any, position: int) -> Verdict:
        path: list[int] = []
        while True:
            node = path[-1] if path else 0
            law = p(node)
            probs = law.probs()
            kept = next((child for child in tree.children[node] if float(probs[tree.ids[child]]) > 0.2), None)
            if kept is None:
                return Verdict(path, draws.choose(law, position + len(path)))
            path.append(kept)

    monkeypatch.setitem(RULES, "coupled", typical)
    found = verdicts(certified(llm, drafting(draft)))
    assert (found["rule"], found["sampled"], found["greedy"]) == ("bug", "bug", "lossless")


def test_a_temperature_that_the_bonus_token_lacks_is_a_bug(
    llm: LLM, draft: Path, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token behind a draft that was kept whole comes from the law at temperature 1."""

    def planted(p: Any, tree: TokenTree, draws: Any, position: int) -> Verdict:
        def law(node: int) -> Law:
            found = p(node)
            if not node or tree.children[node] or found.logits.shape[0] == 1:
                return found
            return found._replace(logits=found.logits * SAMPLED)

        return coupled(law, tree, draws, position)

    proved_before("coupled")
    monkeypatch.setitem(RULES, "coupled", planted)
    monkeypatch.setitem(SIZES, "quick", SMALL._replace(num_prompts=4, max_tokens=24))
    certificate = certified(llm, drafting(draft, num_speculative_tokens=1))
    assert layer(certificate, "greedy").verdict == "lossless"
    assert_judged_a_bug(certificate, "sampled")
    assert {one.temperature for one in certificate.parted} == {SAMPLED}


def with_other_settings_at_nodes(**settings: Any) -> Callable[..., Law]:
    law = Sampler.law

    def planted(self: Sampler, logits: Tensor, path: Any = ()) -> Law:
        if not path or self.params.is_greedy:
            return law(self, logits, path)
        params, self.params = self.params, replace(self.params, **settings)
        try:
            return law(self, logits, path)
        finally:
            self.params = params

    return planted


def test_a_temperature_that_drafted_nodes_lack_is_a_bug(
    llm: LLM, draft: Path, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved_before("coupled")
    monkeypatch.setattr(Sampler, "law", with_other_settings_at_nodes(temperature=1.0))
    monkeypatch.setitem(SIZES, "quick", SMALL._replace(num_prompts=3))
    certificate = certified(llm, drafting(draft))
    assert layer(certificate, "greedy").verdict == "lossless"
    assert_judged_a_bug(certificate, "sampled")


def test_filters_that_drafted_nodes_lack_are_a_bug(llm: LLM, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts that are compared on the model have no filters; those on small targets do."""
    monkeypatch.setattr(Sampler, "law", with_other_settings_at_nodes(top_k=0, top_p=1.0))
    certificate = certified(llm, drafting(draft))
    assert layer(certificate, "rule").verdict == "bug"
    assert certificate.verdict == "bug"


# -- a draft model that reads something else ---------------------------------------------------------------------------


def no_rollback(sketch: Sketch, tokens: list[int]) -> list[int]:
    """All that was staged is kept."""
    return [place.slot for place in sketch.places]


def one_behind(observe: Callable[..., None]) -> Callable[..., None]:
    """Each pass loses a position: what comes next is read one place too early."""

    def planted(self: DraftModel, states: Any, steps: Any) -> None:
        observe(self, states, steps)
        for state in states:
            if state.row is not None and self._pool is not None:
                self._pool.truncate(state.row, self._pool.lengths[state.row] - 1)

    return planted


@pytest.mark.parametrize("fault", ["none", "no rollback", "one behind"])
def test_a_draft_model_that_reads_something_else_is_a_bug_of_the_acceptance(
    llm: LLM, draft: Path, fault: str, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text shows it; an independent reading of the draft model does."""
    proved_before("coupled")
    monkeypatch.setitem(SIZES, "quick", SMALL._replace(num_prompts=4, max_tokens=24))
    if fault == "no rollback":
        monkeypatch.setattr(Sketch, "kept_slots", no_rollback)
    if fault == "one behind":
        monkeypatch.setattr(DraftModel, "observe", one_behind(DraftModel.observe))
    certificate = certified(llm, drafting(draft, num_speculative_tokens=3))
    acceptance = layer(certificate, "acceptance")
    assert acceptance.strength == "tested"
    assert acceptance.verdict == ("lossless" if fault == "none" else "bug"), acceptance.detail
    assert ("does not read what it should" in acceptance.detail) == (fault != "none")
    assert certificate.verdict == acceptance.verdict
    assert layer(certificate, "greedy").verdict == layer(certificate, "sampled").verdict == "lossless"
    assert certificate.parted == []


def test_guesses_that_are_never_kept_are_noted(llm: LLM, proved_before: Prove) -> None:
    class Wrong(Own):
        def tree(self, ask: Any) -> TokenTree:
            return TokenTree.chain(ask.pending, [self.size - 1] * 3)

    proved_before("coupled")
    certificate = certified(llm, {"method": Wrong(len(llm.tokenizer), [5, 6])})
    assert certificate.verdict == "lossless"
    assert certificate.mean_acceptance_length == 1.0
    assert any("guesses was kept" in note for note in certificate.notes)


# -- no verdict --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def broken(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one weight that is not a number."""
    model = made(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[7, 3] = math.nan
    return saved(model, tokenizer, tmp_path_factory.mktemp("certify") / "nan")


@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_a_model_that_computes_nan_gets_an_error_and_no_verdict(
    broken: Path, draft: Path, rule: str, proved_before: Prove
) -> None:
    proved_before(rule)
    llm = LLM(broken, threads=1)
    with pytest.raises(PacelineError, match="the logits hold NaN at a position that was reached"):
        certified(llm, drafting(draft, rule))


def test_a_model_that_computes_nan_is_told_on_the_command_line(
    here: Path, broken: Path, draft: Path, proved_before: Prove
) -> None:
    proved_before("coupled")
    result = run(
        str(broken), "--method", "draft_model", "--draft-model", str(draft), "--prompts", "p.jsonl", "--json", "c.json"
    )
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "paceline: a text failed: position" in result.stderr
    assert "the logits hold NaN" in result.stderr
    assert not (here / "c.json").exists()


def test_what_cannot_be_certified_is_refused(llm: LLM) -> None:
    for config in ({"method": "none"}, {"method": "ngram", "num_speculative_tokens": 0}):
        with pytest.raises(BadRequest, match="plain decoding is what others are compared with"):
            certified(llm, config)
    with pytest.raises(BadRequest, match="no prompts to write on"):
        certify(llm, {"method": "ngram"}, [], mode="quick")


# -- rounding ----------------------------------------------------------------------------------------------------------


def rounding(model: PreTrainedModel, size: float = 0.2) -> PreTrainedModel:
    """A machine whose forward adds its numbers in another order for every width above one token."""

    def hook(_: Any, args: Any, given: Any, out: Any) -> Any:
        width = (args[0] if args else given["input_ids"]).shape[1]
        if width > 1 and out.logits.numel():
            chance = torch.Generator().manual_seed(width)
            out.logits = out.logits + size * (2 * torch.rand(out.logits.shape[-1], generator=chance) - 1)
        return out

    model.register_forward_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize("floor", ["measured", "none"])
def test_rounding_makes_near_ties_and_only_where_this_machine_rounds(
    tokenizer: PreTrainedTokenizerBase, draft: Path, floor: str, proved_before: Prove
) -> None:
    """The same differences are bugs where the unmodified forward has no such rounding to put them down to."""
    proved_before("coupled")
    size, rounds = 0.2, floor == "measured"
    exact = made(tokenizer, dtype=torch.float32)
    llm = LLM.of(rounding(made(tokenizer, dtype=torch.float32)), tokenizer)
    own = rounding(made(tokenizer, dtype=torch.float32)) if rounds else exact
    certificate = certified(llm, drafting(draft, num_speculative_tokens=4), reference=own)
    plain = {
        (prompt.name, params.temperature): (prompt.ids, reference(exact, prompt.ids, 20, params, llm.eos_ids).ids)
        for i, prompt in enumerate(prompts(llm)[: SMALL.num_prompts])
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=SAMPLED, seed=7, top_p=0.9 if i % 2 else 1.0),
        )
    }
    verdict = "near_ties_only" if rounds else "bug"
    assert certificate.verdict == verdict
    assert {layer(certificate, name).verdict for name in ("greedy", "sampled")} == {verdict}
    tokens = sum(len(ids) for _, ids in plain.values())
    assert certificate.near_ties_per_1000 == (1000 * len(certificate.parted) / tokens if rounds else 0.0)
    places = [(one.prompt, one.temperature, one.difference.index) for one in certificate.parted]
    assert len(set(places)) == len(places) > len({place[:2] for place in places})  # some texts part more than once
    for one in certificate.parted:
        prompt, ids = plain[one.prompt, one.temperature]
        d, begin = one.difference, max(0, one.difference.index - 12)
        assert d.expected == ids[d.index] != d.got
        logits = logits_of(exact, [*prompt, *ids[: d.index]])[-1]
        assert d.logit_expected == pytest.approx(float(logits[d.expected]), abs=1e-4)
        assert d.logit_got == pytest.approx(float(logits[d.got]), abs=1e-4)
        if one.temperature == 0.0:
            assert 0.0 <= d.logit_expected - d.logit_got <= 2 * size
        assert d.near_tie == rounds
        assert size / 2 < d.floor <= size + 1e-4 if rounds else d.floor < 1e-4
        assert one.expected == tokenizer.decode(ids[begin : d.index + 8])
        assert one.got.startswith(str(tokenizer.decode([*ids[begin : d.index], d.got])).rstrip("\ufffd"))


def test_near_ties_are_no_failure_on_the_command_line(
    here: Path, folder: Path, draft: Path, proved_before: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = certify_run.load_model

    def rounds(*args: Any, **rest: Any) -> PreTrainedModel:
        return rounding(load(*args, **rest))

    proved_before("coupled")
    monkeypatch.setattr(paceline.llm, "load_model", rounds)
    monkeypatch.setattr(certify_run, "load_model", rounds)
    result = run(
        str(folder), "--method", "draft_model", "--draft-model", str(draft), "--dtype", "float32", "--prompts",
        "p.jsonl", "--json", "c.json",
    )  # fmt: skip
    found = json.loads((here / "c.json").read_text())
    assert result.exit_code == 0, result.stdout
    assert result.stdout.startswith("near-ties only: ")
    assert found["verdict"] == "near_ties_only"
    assert found["near_ties_per_1000"] > 0
    assert found["parted"]


def test_a_difference_of_a_model_given_as_an_object_needs_a_reference(
    tokenizer: PreTrainedTokenizerBase, draft: Path, proved_before: Prove
) -> None:
    proved_before("coupled")
    llm = LLM.of(rounding(made(tokenizer)), tokenizer)
    with pytest.raises(BadRequest, match=r"give certify\(reference=\) an unmodified copy of it"):
        certified(llm, drafting(draft))


# -- the cells of the joint law ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_likeliest_texts_have_the_probabilities_that_transformers_gives(
    llm: LLM, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> None:
    prompt = prompts(llm)[1].ids
    found = likeliest_texts(llm, prompt, SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True))
    assert len(found) == 12
    assert {len(text) for text in found} == {3}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert 0.0 < sum(found.values()) <= 1.0
    for text, share in found.items():
        assert share == pytest.approx(probability(made_once(tokenizer), prompt, text, temperature), rel=1e-9)
    first = logits_of(made_once(tokenizer), prompt)[-1]
    assert int(first.argmax()) in {text[0] for text in found}


def probability(model: PreTrainedModel, prompt: list[int], text: tuple[int, ...], temperature: float = 1.0) -> float:
    """Of a text behind a prompt, by one forward of `transformers` and the chain rule."""
    logs = torch.log_softmax(logits_of(model, [*prompt, *text]).double() / temperature, -1)
    return math.exp(sum(float(logs[len(prompt) - 1 + i, token]) for i, token in enumerate(text)))


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_likeliest_texts_of_a_model_whose_logits_lie_far_from_zero(
    tokenizer: PreTrainedTokenizerBase, shift: float
) -> None:
    """Only differences of logits mean anything; exp of what float32 holds may be 0 or infinite."""
    models = [tiny("phi", vocab_size=len(tokenizer), dtype=torch.float32) for _ in range(2)]
    with torch.no_grad():
        models[0].lm_head.bias += shift
    llm = LLM.of(models[0], tokenizer)
    prompt = prompts(llm)[1].ids
    for text, share in likeliest_texts(llm, prompt, SamplingParams(max_tokens=3, ignore_eos=True)).items():
        assert share == pytest.approx(probability(models[1], prompt, text), rel=1e-3)
