"""Token recycling against the loop without a cache, and its table against the laws of a target that is a table."""

import math
import random
from typing import Any

import pytest
import torch
from oracles import VOCAB, Spy, Table, answer, decode, prompt_of, target
from torch import Tensor

from paceline.draft.base import Scored, Step
from paceline.draft.compose import Compose
from paceline.draft.recycle import FOLLOWED, Recycle
from paceline.draft.suffix import Suffix
from paceline.errors import BadRequest
from paceline.testing import check_drafter

PROMPTS = [prompt_of(length) for length in (1, 2, 9, 40)]
MODES = pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)


def markov(seed: int = 0) -> Table:
    """A target that looks at the last token alone, with a peaked law behind each."""
    rng = random.Random(seed)
    rows = [[rng.random() ** 20 + 1e-6 for _ in range(VOCAB)] for _ in range(VOCAB)]
    return Table([[p / sum(row) for p in row] for row in rows])


@MODES
@pytest.mark.parametrize("scored", [False, True])
def test_the_text_is_the_reference(scored: bool, settings: dict[str, Any]) -> None:
    rows = decode(target(), PROMPTS, Recycle(score_prompt=scored), max_tokens=30, **settings)
    assert [row.output_ids for row in rows] == [answer(p, 30, **settings).ids for p in PROMPTS]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("scored", [False, True])
def test_every_check_passes(scored: bool) -> None:
    assert check_drafter(lambda: Recycle(score_prompt=scored)).verify().mean_acceptance_length > 1.0


def test_a_prompt_tells_what_the_target_would_have_written() -> None:
    """Every token stands in the prompt once, in an order the target would never choose; its own chain is known."""
    table = markov()
    best = table.logits.argmax(-1).tolist()
    prompt = random.Random(5).sample(range(VOCAB), VOCAB)
    (row,) = decode(table, [prompt], Recycle(score_prompt=True), max_tokens=60)
    expected = [best[prompt[-1]]]
    while len(expected) < 60:
        expected.append(best[expected[-1]])
    assert row.output_ids == expected
    assert row.stats.mean_acceptance_length > 3.0  # with the prompt's own order alone it is 1


def test_what_rejected_guesses_were_followed_by_is_kept() -> None:
    """Behind every token that a pass read the table holds the target's own ids, whether the token was kept or not."""
    table = markov(1)
    read: set[int] = set()

    class Watched(Recycle):
        def observe(self, states: Any, steps: list[Step]) -> None:
            super().observe(states, steps)
            scored = steps[0].scored
            assert scored is not None
            read.update(scored.tokens)
            kept = set(steps[0].tokens)
            for token in set(scored.tokens) - kept:
                assert states[0].singles[token].tokens == table.logits[token].topk(8).indices.tolist()

    (row,) = decode(table, [[1, 2, 3, 4, 5, 6]], Watched(), max_tokens=30, temperature=1.0, seed=1)
    assert len(read - set(row.output_ids)) > 10  # there were rejected ones


def test_an_entry_of_the_text_has_what_followed_in_the_first_place() -> None:
    drafter = Recycle(width=2)
    values = torch.tensor([[1.0, 0.0]])
    share = math.exp(1) / (math.exp(1) + 1)
    table = drafter.begin(Step([5], [9], scored=Scored([5], [-1], torch.tensor([[7, 8]]), values)))
    entry = table.singles[5]
    assert entry.tokens == [9, 7, 8]
    assert entry.shares == pytest.approx([FOLLOWED, (1 - FOLLOWED) * share, (1 - FOLLOWED) * (1 - share)])
    table = drafter.begin(Step([5], [8], scored=Scored([5], [-1], torch.tensor([[7, 8]]), values)))
    assert table.singles[5].tokens == [8, 7]
    assert sum(table.singles[5].shares) == pytest.approx(1.0)


def test_a_pair_is_asked_before_a_single_token() -> None:
    drafter = Recycle()
    table = drafter.begin(Step([], []))
    for tokens in ([1, 2, 3], [9, 2, 4]):  # 2 was followed by 4 last, but by 3 behind 1
        drafter.observe([table], [Step(tokens[:-1], tokens[1:])])
    assert [token for token, _ in table.ways(1, 2)] == [3, 4]
    assert [token for token, _ in table.ways(9, 2)] == [4]
    assert [token for token, _ in table.ways(None, 2)] == [4]
    assert sum(chance for _, chance in table.ways(1, 2)) < 1.0


def test_chances_follow_what_is_kept() -> None:
    def chance(text: list[int]) -> float:
        drafter = Recycle()
        table = drafter.begin(Step([1], [1]))
        for token in text:
            table.is_drafted = True
            drafter.observe([table], [Step([1], [token])])
            table.last = 1
        return table.hits[0] / table.tests[0]

    assert chance([1] * 30) > 0.88
    assert chance(list(range(2, 32))) < 0.4


def test_rows_that_are_no_law_are_left_out() -> None:
    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        logits[:, 1:] = math.nan  # all but the pending token's row

    prompt = prompt_of(1)
    (row,) = decode(Spy(target(), spoil), [prompt], Recycle(), max_tokens=12)
    assert row.output_ids == answer(prompt, 12).ids[: len(row.output_ids)]
    assert len(row.output_ids) > 0


def test_in_a_composition_each_member_gets_its_own_width() -> None:
    narrow, wide = Recycle(width=2), Recycle(width=5)
    seen: list[int] = []
    for one in (narrow, wide):
        one._take = lambda table, step, own=one._take: (  # type: ignore[method-assign,misc]
            seen.append(step.scored.top.shape[1]) if step.scored else None,
            own(table, step),
        )
    prompt = prompt_of(12)
    (row,) = decode(target(), [prompt], Compose([narrow, Suffix(), wide]), max_tokens=10)
    assert row.output_ids == answer(prompt, 10).ids
    assert set(seen) == {2, 5}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("width", [0, -1, 1.5, True])
def test_impossible_widths_are_refused(width: Any) -> None:
    with pytest.raises(BadRequest, match="width"):
        Recycle(width=width)
