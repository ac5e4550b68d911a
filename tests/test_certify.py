"""The near-tie judge, against ties and bugs planted where the answer is known."""

import pytest
import torch
from oracles import tiny

from paceline.certify import differences, floor, judge, reachable
from paceline.sampling import Sampler, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
V = 8


def logits(**values: float) -> torch.Tensor:
    row = torch.full((V,), -5.0, dtype=torch.float64)
    for name, value in values.items():
        row[int(name[1:])] = value
    return row


def can(row: torch.Tensor, size: float, token: int, params: SamplingParams = GREEDY, position: int = 1) -> bool:
    return reachable(row, size, token, Sampler(params, V, [0]), (), position)


def test_a_gap_inside_twice_the_floor_is_reachable_and_outside_is_not() -> None:
    row = logits(t2=1.0, t5=0.7)
    assert can(row, 0.16, 5)
    assert not can(row, 0.14, 5)
    assert can(row, 0.0, 2)
    assert not can(row, 2.9, 7)


def test_settings_shift_what_is_near() -> None:
    row = logits(t2=1.0, t5=0.0)
    assert not can(row, 0.1, 5)
    assert can(row, 0.1, 5, SamplingParams(temperature=0.0, logit_bias={5: 0.95}))


def test_a_token_outside_the_filter_is_not_reachable_by_noise_alone() -> None:
    row = logits(t2=3.0, t5=1.0, t6=0.0)
    for seed in range(50):
        assert not can(row, 0.1, 6, SamplingParams(temperature=1.0, top_k=2, seed=seed))


def test_the_winner_may_fall_to_a_filter() -> None:
    """Top-p keeps 2 and 5 by a hair; with a little more mass on 2 the nucleus loses 5, which had the best noise."""
    row = logits(t2=2.0, t5=1.0)
    mass = float(torch.softmax(row, 0)[2])
    for seed in range(200):
        params = SamplingParams(temperature=1.0, top_p=mass + 1e-4, seed=seed)
        sampler = Sampler(params, V, [0])
        if sampler.draws.choose(sampler.law(row), 1) == 5:
            assert can(row, 0.01, 2, params)
            assert not can(row, 1e-7, 2, params)
            return
    pytest.fail("no seed chose the second token")


def test_judge_calls_a_planted_change_a_bug_and_equal_texts_nothing() -> None:
    model = tiny("llama")
    prompt = [5, 6, 7]
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6, eos_token_id=None)[
            0, 3:
        ].tolist()
    assert judge(model, prompt, ids, ids, GREEDY) is None
    wrong = [*ids[:2], (ids[2] + 1) % 97, *ids[3:]]
    found = judge(model, prompt, ids, wrong, GREEDY)
    assert found is not None
    assert found.index == 2
    assert not found.near_tie
    assert found.floor < 1e-9
    short = judge(model, prompt, ids, ids[:3], GREEDY)
    assert short is not None
    assert short.got == -1
    assert not short.near_tie


def test_judge_calls_an_exact_tie_near() -> None:
    """Two equal rows of the vocabulary product tie; a run that took the other of them parts by nothing."""
    model = tiny("llama")
    prompt = [5, 6, 7]
    best = int(floor(model, prompt)[0].argmax())
    twin = (best + 1) % 97
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    found = judge(model, prompt, [min(best, twin)], [max(best, twin)], GREEDY)
    assert found is not None
    assert found.logit_expected == found.logit_got
    # In float64 the floor is about 1e-15, and the tie is exact: only a floor above zero can break it.
    assert found.near_tie == (found.floor > 0)


def test_differences_go_on_behind_each() -> None:
    model = tiny("llama")
    expected = [1, 2, 3, 4, 5, 6]
    calls: list[list[int]] = []

    def generate(prompt: list[int], most: int) -> list[int]:
        calls.append(prompt)
        out = expected[len(prompt) - 1 :][:most]
        wrong = {1: 0, 2: 2}.get(len(prompt))
        return [9 if i == wrong else token for i, token in enumerate(out)]

    found = list(differences(model, generate, [0], expected, GREEDY))
    assert [d.index for d in found] == [0, 2]
    assert calls == [[0], [0, 1], [0, 1, 2, 3, 4]]
