"""Public reports of speculative decoding going wrong, each against this package.

A test carries the report's name. Many stand in other files, beside the part they are about; `test_index` lists all.
"""

from typing import Any

import oracles
import pytest
import torch
from oracles import Known, Spy, Table, answer, decode, prompt_of
from test_draft_model import near

from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.target import HFTarget
from paceline.testing import ScriptedTree


@pytest.mark.parametrize("length", [1, 2, 3, 17])
@pytest.mark.parametrize("K", range(1, 9))
def test_transformers_30042(length: int, K: int) -> None:
    """Greedy text with a one-token prompt: the positions of a block did not go on where the cache ended."""
    prompt = prompt_of(length)
    k = Known([prompt], [answer(prompt, 26)])
    spy = Spy(oracles.target())
    (row,) = decode(spy, [prompt], k.mix(K), depth=K, max_tokens=16)
    assert row.output_ids == k.answers[0].ids[:16]
    for (positions,), (begin,) in zip(spy.positions, spy.begins, strict=True):
        assert positions == list(range(begin, begin + len(positions)))
    assert spy.begins[-1][0] == length + 16 - 1 - len(row.ids[spy.begins[-1][0] + 1 :])


@pytest.mark.parametrize("drafter", ["oracle", "anti", "wild"])
def test_mlxlm_1470_exact_ties(drafter: str) -> None:
    """Two tokens with the same logit everywhere: the lowest id, drafted or not."""
    prompt = prompt_of(9)
    favourite = answer(prompt, 20).ids[0]
    twin = 96 if favourite < 48 else 0
    models = [oracles.tiny("llama") for _ in range(2)]
    for model in models:
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head[twin] = head[favourite]
            embed = model.get_input_embeddings().weight
            embed[twin] = embed[favourite]  # the text goes on alike, so both would be right but for the rule
    expected = oracles.reference(models[0], prompt, 30)
    low, high = sorted((favourite, twin))
    assert low in expected.ids
    assert high not in expected.ids
    k = Known([prompt], [expected])
    drafts = {"oracle": k.oracle(4), "anti": ScriptedTree(lambda ids: [[high] * 4]), "wild": k.wild(4, 12)}[drafter]
    (row,) = decode(HFTarget(models[1]), [prompt], drafts, depth=4, max_tokens=20)
    assert row.output_ids == expected.ids[:20]


@pytest.mark.parametrize("name", ["script", "ngram", "tree"])
def test_mlxlm_1470_rounding_decides_near_ties_alone(name: str) -> None:
    """Every pass rounds in its own way: where the text parts from plain decoding the logits were as close as that."""
    rounding, passes, parted = 0.6, torch.Generator().manual_seed(1), 0

    def rounded(logits: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        logits += rounding * (2 * torch.rand(logits.shape, generator=passes, dtype=logits.dtype) - 1)

    for prompt in (prompt_of(5), prompt_of(17)):
        exact = answer(prompt, 40).ids
        drafts = {
            "script": ScriptedTree(lambda ids, p=prompt, e=exact: [e[len(ids) - len(p) :][:4], [ids[-1]] * 4]),
            "ngram": Ngram(),
            "tree": DraftModel(near()[0], tree_top_k=3, depth=3),
        }
        (row,) = decode(Spy(oracles.target(), rounded), [prompt], drafts[name], budget=9, max_tokens=24)
        logits = oracles.logits_of(oracles.plain(), row.ids)[len(prompt) - 1 : -1]
        lost = logits.amax(1) - logits[range(24), row.output_ids]
        assert float(lost.max()) <= 2 * rounding
        parted += int((lost > 0).sum())
        assert row.stats.num_accepted_tokens > 0
    assert parted > 0


@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
def test_openvino_2331(rule: str) -> None:
    """A looked-up token is no draw: it is kept as often as the target says it, here a quarter of the time."""
    table = Table([[0.25] * 4] * 4)
    (row,) = decode(table, [[0]], ScriptedTree(lambda ids: [[2]]), rule=rule, temperature=1.0, seed=5, max_tokens=150)
    shares = torch.bincount(torch.tensor(row.output_ids), minlength=4) / 150
    assert float((shares - 0.25).abs().max()) < 0.18  # five standard deviations; always kept would be 1 for id 2
    assert abs((row.stats.draft_acceptance_rate or 0) - 0.25) < 0.18
    assert all(torch.equal(logits, before) for logits, before in table.given)


@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
def test_vllm_6038_seeds_under_every_rule(rule: str) -> None:
    """Same seed, same text; other seed, other text; neighbours without a seed or without a draft change nothing."""
    table = Table([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
    moody = ScriptedTree(lambda ids: [[0, 1, 2]] if len(ids) % 2 else [])

    def texts(*seeds: int | None, drafter: Any = moody) -> list[list[int]]:
        rows = decode(
            table, [[1]] * len(seeds), drafter, rule=rule, temperature=1.0, max_tokens=20,
            settings=[{"seed": seed} for seed in seeds],
        )  # fmt: skip
        return [row.output_ids for row in rows]

    assert texts(7) == texts(7)
    assert texts(7) != texts(8)
    seven, _, nine = texts(7, None, 9)
    assert [seven] == texts(7)
    assert [nine] == texts(9)
    if rule == "coupled":
        assert texts(7) == texts(7, drafter=None) == texts(7, drafter=Ngram())


def test_lmdeploy_4671() -> None:
    """Rows end by their own stop ids alone, whatever their neighbours' are, and each equals its solo run."""
    prompts = [prompt_of(length) for length in (3, 7, 12, 5)]
    texts = [answer(prompt, 40, temperature=1.0, seed=4).ids for prompt in prompts]
    k = Known(prompts, [answer(prompt, 40, temperature=1.0, seed=4) for prompt in prompts])
    stops: list[list[int]] = [[texts[0][4]], [texts[1][9]], [], [texts[0][4], texts[3][6]]]
    settings = [{"stop_token_ids": stop} for stop in stops]
    drafters = [k.oracle(5), k.wild(4, 10), Ngram(), k.mix(3)]
    spy = Spy(oracles.target())
    rows = decode(spy, prompts, drafters, settings=settings, max_tokens=20, temperature=1.0, seed=4)
    for row, text, stop in zip(rows, texts, stops, strict=True):
        end = next((i + 1 for i, token in enumerate(text[:20]) if token in stop), 20)
        assert row.output_ids == text[:end]
        assert row.finish_reason == ("stop" if stop and end < 20 else "length")
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    for positions, begins in zip(spy.positions, spy.begins, strict=True):
        assert all(row[0] == begin for row, begin in zip(positions, begins, strict=True))
