"""The figures of a request, worked out by hand."""

import math
from typing import Any

import oracles
import pytest
import torch
from oracles import Known, answer, decode, prompt_of

from paceline.decode import Request, prefill, step
from paceline.draft.ngram import Ngram
from paceline.output import Stats
from paceline.testing import ScriptedTree
from paceline.tree import TokenTree

PROMPT = prompt_of(6)
VARIED = {"temperature": 1.0, "seed": 3, "presence_penalty": 1000.0}
"""No token repeats."""


def known(**settings: Any) -> Known:
    return Known([PROMPT], [answer(PROMPT, 40, **settings)])


def after(num_steps: int, drafter: Any, **options: Any) -> Request:
    """A request after some steps, with more to say."""
    (row,) = oracles.requests(oracles.target(), [PROMPT], drafter, **options)
    cache = prefill(oracles.target(), row)
    for _ in range(num_steps):
        step(oracles.target(), cache, [row])
    return row


def test_sglang_11572_four_drafted_and_4_0_2_accepted() -> None:
    row = after(3, known().accepting([4, 0, 2], 4), depth=4)
    stats = row.stats
    assert len(row.output_ids) == 9
    assert (stats.num_target_passes, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 12, 6)
    assert stats.draft_acceptance_rate == 0.5
    assert stats.mean_acceptance_length == 3.0
    assert stats.acceptance_histogram == [1, 0, 1, 0, 1]
    assert stats.acceptance_per_position == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    # tested: 3 passes at depth 1, then the 2 that accepted it, then the 2 that accepted two, then the one with three
    assert stats.acceptance_per_position_conditional == [2 / 3, 1.0, 1 / 2, 1.0]
    assert row.from_draft == [True] * 4 + [False, False] + [True] * 2 + [False]


@pytest.mark.parametrize(
    ("end", "ids", "drafted", "accepted", "histogram"),
    [
        (1, 2, 2, 2, [0, 0, 1]),  # two of four right ones stand before the cut
        (3, 4, 4, 4, [0, 0, 0, 0, 1]),  # the last drafted token is the end: the target's own one falls away
        (4, 5, 4, 4, [0, 0, 0, 0, 1]),  # the target's own token is the end
        (6, 7, 6, 6, [0, 0, 1, 0, 1]),  # in the second pass
    ],
)
def test_a_pass_cut_by_a_stop_counts_what_lies_before_it(
    end: int, ids: int, drafted: int, accepted: int, histogram: list[int]
) -> None:
    k = known(**VARIED)
    stop = k.answers[0].ids[end]
    (row,) = decode(oracles.target(), [PROMPT], k.oracle(4), depth=4, eos=[stop], max_tokens=30, **VARIED)
    stats = row.stats
    if end == 6:
        accepted = drafted = 4 + 2
    assert len(row.output_ids) == ids
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (drafted, accepted)
    assert stats.acceptance_histogram == histogram
    assert stats.draft_acceptance_rate == 1.0


def test_a_rejection_before_the_stop_is_a_rejection() -> None:
    """Two of four are right and the target's own third token is the end: nothing was cut."""
    k = known(**VARIED)
    stop = k.answers[0].ids[2]
    (row,) = decode(oracles.target(), [PROMPT], k.accepting([2], 4), depth=4, eos=[stop], max_tokens=30, **VARIED)
    assert (row.stats.num_draft_tokens, row.stats.num_accepted_tokens) == (4, 2)
    assert row.stats.draft_acceptance_rate == 0.5
    assert row.from_draft == [True, True, False]


def test_the_limit_shortens_the_draft_and_not_the_figures() -> None:
    """7 tokens, 4 drafted: a full pass of 5, then one of 1 + 1."""
    (row,) = decode(oracles.target(), [PROMPT], known().oracle(4), depth=4, max_tokens=7)
    assert (row.stats.num_target_passes, row.stats.num_draft_tokens, row.stats.num_accepted_tokens) == (2, 5, 5)
    assert row.stats.acceptance_per_position == [1.0, 1 / 2, 1 / 2, 1 / 2]
    assert row.stats.acceptance_per_position_conditional == [1.0, 1.0, 1.0, 1.0]


def test_trees_count_their_nodes() -> None:
    """A root with two children, the second right with a right and a wrong child: 4 nodes, 2 accepted, each pass."""
    k = known()

    def script(ids: list[int]) -> TokenTree:
        coming = k.coming(ids)
        tokens = [ids[-1], coming.worst[0], coming.ids[0], coming.worst[1], coming.ids[1]]
        return TokenTree(torch.tensor(tokens), torch.tensor([-1, 0, 0, 2, 2]))

    row = after(2, ScriptedTree(script))
    assert (row.stats.num_target_passes, row.stats.num_draft_tokens, row.stats.num_accepted_tokens) == (2, 8, 4)
    assert row.stats.mean_acceptance_length == 3.0
    assert row.stats.acceptance_per_position == [1.0, 1.0]


def test_no_draft_has_no_rate() -> None:
    for drafter in (None, ScriptedTree(lambda ids: [])):
        (row,) = decode(oracles.target(), [PROMPT], drafter, max_tokens=5)
        assert row.stats.num_target_passes == 5
        assert row.stats.draft_acceptance_rate is None
        assert row.stats.mean_acceptance_length == 1.0
        assert row.stats.acceptance_per_position == row.stats.acceptance_per_position_conditional == []
        assert row.stats.acceptance_histogram == [5]
        assert row.from_draft == [False] * 5


def test_vllm_16258_useless_drafts_cost_no_extra_pass_and_show() -> None:
    """200 tokens of which none was guessed: at most one target pass each, and figures that say so."""
    k = Known([[1]], [answer([1], 200)])
    (row,) = decode(oracles.target(), [[1]], k.anti(4), depth=4, max_tokens=200)
    assert len(row.output_ids) == row.stats.num_target_passes == 200
    assert row.stats.draft_acceptance_rate == 0.0
    assert row.stats.mean_acceptance_length == 1.0
    assert row.stats.acceptance_per_position == [0.0] * 4
    assert row.stats.acceptance_per_position_conditional == [0.0, None, None, None]


def test_rates_stay_between_none_and_all() -> None:
    prompts = [prompt_of(n) for n in (1, 4, 9)]
    k = Known(prompts, [answer(p, 40) for p in prompts])
    for drafter in (k.oracle(5), k.anti(3), k.mix(4), Ngram(), k.wild(5, 12)):
        for row in decode(oracles.target(), prompts, drafter, max_tokens=25):
            stats = row.stats
            emitted = len(row.output_ids)
            assert stats.num_accepted_tokens + stats.num_target_passes == emitted == 25
            assert stats.mean_acceptance_length == pytest.approx(emitted / stats.num_target_passes)
            assert sum(stats.acceptance_histogram) == stats.num_target_passes
            assert sum(a * n for a, n in enumerate(stats.acceptance_histogram)) == stats.num_accepted_tokens
            assert stats.draft_acceptance_rate is None or 0 <= stats.draft_acceptance_rate <= 1
            shares = stats.acceptance_per_position
            assert all(0 <= b <= a <= 1 for a, b in zip([1.0, *shares], shares, strict=False))
            assert all(c is None or 0 <= c <= 1 for c in stats.acceptance_per_position_conditional)
            assert row.from_draft.count(True) == stats.num_accepted_tokens


def test_rows_share_the_time_of_their_passes() -> None:
    k = Known([PROMPT], [answer(PROMPT, 40)])
    rows = decode(oracles.target(), [PROMPT, PROMPT], k.oracle(3), depth=3, max_tokens=9)
    for row in rows:
        assert set(row.stats.time) == {"prefill", "draft", "target", "verify", "other"}
        assert all(seconds >= 0 and math.isfinite(seconds) for seconds in row.stats.time.values())
    assert rows[0].stats.time["target"] == rows[1].stats.time["target"] > 0


def test_figures_as_data() -> None:
    stats = Stats()
    stats.record(3, 3, 2)
    stats.record(0, 0, 0)
    found = stats.to_dict()
    assert found["acceptance_histogram"] == [1, 0, 1]
    assert found["draft_acceptance_rate"] == 2 / 3
    assert found["acceptance_per_position"] == [1.0, 1.0, 0.0]
    assert found["acceptance_per_position_conditional"] == [1.0, 1.0, 0.0]
    assert found["mean_acceptance_length"] == 2.0
