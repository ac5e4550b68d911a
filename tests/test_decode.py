"""The loop: for every drafter and tree the text of plain decoding, and plain decoding the text of no cache at all."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from oracles import ARCHS, VOCAB, Answer, Known, Spy, answer, assert_close, decode, prompt_of, walk
from torch import Tensor

import paceline.decode
import paceline.prefix
from paceline.decode import Request
from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.ngram import Ngram
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.sampling import SamplingParams
from paceline.testing import ScriptedTree
from paceline.tree import Drawn, Rider, TokenTree

LENGTHS = (1, 2, 3, 17)
PROMPTS = [prompt_of(length) for length in LENGTHS]

# Every setting alone and in pairs; the numbers are chosen so that each changes the text of the tiny model.
SETTINGS: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 4,
    "top_p": 0.7,
    "min_p": 0.2,
    "presence_penalty": 9.0,
    "frequency_penalty": 5.0,
    "repetition_penalty": 1.8,
    "logit_bias": {3: 6.0, 17: -math.inf, 40: 4.0},
}
EDITS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
SAMPLED = {"temperature": 1.0, "seed": 11}


def known(prompts: list[list[int]], max_new: int, arch: str = "llama", limit: int = 256, **settings: Any) -> Known:
    return Known(prompts, [answer(prompt, max_new, arch, limit=limit, **settings) for prompt in prompts])


def wide(k: Known, depth: int) -> ScriptedTree:
    """The right path hidden last among wrong siblings at every depth."""

    def script(ids: list[int]) -> list[list[int]]:
        right = k.coming(ids).ids[:depth]
        wrong = [[*right[:at], (token + 1 + i) % VOCAB] for at, token in enumerate(right) for i in range(2)]
        return [*wrong, right]

    return ScriptedTree(script)


DRAFTERS: dict[str, Callable[[Known, int], Drafter[Any]]] = {
    "oracle": lambda k, depth: k.oracle(depth),
    "anti": lambda k, depth: k.anti(depth),
    "mix": lambda k, depth: k.mix(depth),
    "script": lambda k, depth: ScriptedTree(lambda ids: [[5] * depth, [ids[-1]] * depth]),
    "ngram": lambda k, depth: Ngram(),
    "wild": lambda k, depth: k.wild(depth, 3 * depth),
    "wide": wide,
}


def texts(rows: list[Request]) -> list[list[int]]:
    return [row.output_ids for row in rows]


def expected(k: Known, max_new: int) -> list[list[int]]:
    return [answer.ids[:max_new] for answer in k.answers]


# -- same text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("settings", [{}, {**SAMPLED, "temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_plain_decoding_is_the_reference(arch: str, settings: dict[str, Any]) -> None:
    prompts = [prompt_of(1), prompt_of(17)]
    k = known(prompts, 12, arch, **settings)
    assert texts(decode(oracles.target(arch), prompts, max_tokens=12, **settings)) == expected(k, 12)
    assert texts(decode(oracles.target(arch), prompts[1:], max_tokens=12, **settings)) == expected(k, 12)[1:]


SWEEP = [
    *itertools.product(("oracle", "mix", "wild", "wide"), ("greedy",), range(1, 9)),
    *itertools.product(("anti", "script", "ngram"), ("greedy",), (1, 2, 5, 8)),
    *itertools.product(DRAFTERS, ("sampled",), (1, 3, 8)),
]


@pytest.mark.parametrize(("drafter", "mode", "K"), SWEEP)
def test_every_drafter_and_depth_gives_the_same_text(drafter: str, mode: str, K: int) -> None:
    settings: dict[str, Any] = SAMPLED if mode == "sampled" else {}
    k = known(PROMPTS, 24, **settings)
    rows = decode(oracles.target(), PROMPTS, DRAFTERS[drafter](k, K), depth=K, budget=95, max_tokens=13, **settings)
    assert texts(rows) == expected(k, 13)
    accepted = [row.stats.num_accepted_tokens for row in rows]
    if drafter in ("oracle", "wide"):
        # K guesses and the target's own token per pass; what is left at the end is drafted one shorter
        assert all(row.stats.num_target_passes == -(-13 // (K + 1)) for row in rows)
    elif drafter in ("mix", "wild") and not (drafter == "mix" and K == 1):
        assert min(accepted) > 0
    elif drafter == "anti":
        assert accepted == [0, 0, 0, 0]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_drafters_and_settings_of_their_own(rows: int, seed: int) -> None:
    """Each row of a batch: other prompt, drafter, settings, length."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "top_k": 5, "seed": 6},
        {"temperature": 0.0, "repetition_penalty": 1.5},
    ]
    order = list(range(4))
    random.Random(seed).shuffle(order)
    prompts, settings = [PROMPTS[i] for i in order[:rows]], [settings[i] for i in order[:rows]]
    answers = [answer(prompt, 30, **own) for prompt, own in zip(prompts, settings, strict=True)]
    k = Known(prompts, answers)
    drafters = [k.mix(4), Ngram(), k.wild(5, 12, seed), k.oracle(3)][:rows]
    lengths = [7, 20, 1, 13][:rows]
    made = decode(
        oracles.target(),
        prompts,
        drafters,
        settings=[{**own, "max_tokens": n} for own, n in zip(settings, lengths, strict=True)],
    )
    assert texts(made) == [a.ids[:n] for a, n in zip(answers, lengths, strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_random_trees(seed: int) -> None:
    """Wide and deep, tokens repeated among siblings and at several depths, sometimes more than is asked for."""
    rng = random.Random(seed)
    settings: dict[str, Any] = SAMPLED if seed % 2 else {}
    k = known(PROMPTS, 34, **settings)
    depth, nodes, budget = rng.randrange(1, 9), rng.randrange(2, 40), rng.choice([3, 10, 23, 39])
    rows = decode(
        oracles.target(), PROMPTS, k.wild(depth, nodes, seed), depth=8, budget=budget, max_tokens=20, **settings
    )
    assert texts(rows) == expected(k, 20)


@pytest.mark.parametrize(
    "names", [c for n in (1, 2) for c in itertools.combinations(SETTINGS, n)], ids=lambda names: "+".join(names)
)
def test_settings_alone_and_in_pairs(names: tuple[str, ...]) -> None:
    settings = {"temperature": 1.0, "seed": 7, **{name: SETTINGS[name] for name in names}}
    prompts = [prompt_of(2), prompt_of(17)][-3 + len(names) :]
    k = known(prompts, 20, **settings)
    for drafter in ("none", "mix", "wild") if len(names) == 1 else ("wild",):
        drafts = DRAFTERS[drafter](k, 5) if drafter != "none" else None
        rows = decode(oracles.target(), prompts, drafts, depth=5, max_tokens=14, **settings)
        assert texts(rows) == expected(k, 14)
    if len(names) == 1:
        assert expected(k, 14) != expected(known(prompts, 20, temperature=1.0, seed=7), 14)


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("drafter", ["oracle", "mix", "wild"])
def test_greedy_with_edited_logits(name: str, drafter: str) -> None:
    settings = {name: SETTINGS[name]}
    prompts = [prompt_of(3), prompt_of(17)]
    k = known(prompts, 24, **settings)
    assert expected(k, 16) != expected(known(prompts, 24), 16)
    rows = decode(oracles.target(), prompts, DRAFTERS[drafter](k, 6), depth=6, max_tokens=16, **settings)
    assert texts(rows) == expected(k, 16)


@pytest.mark.parametrize("drafter", ["unbiased", "ngram"])
def test_vllm_42744_a_banned_token_never_appears(drafter: str) -> None:
    prompt = prompt_of(17)
    free = known([prompt], 30)
    banned = max(set(free.answers[0].ids[:20]), key=free.answers[0].ids[:20].count)
    k = known([prompt], 30, logit_bias={banned: -100.0})
    unbiased = ScriptedTree(lambda ids: [free.answers[0].ids[len(ids) - len(prompt) :][:5]])
    drafts: Drafter[Any] = unbiased if drafter == "unbiased" else Ngram()
    (row,) = decode(oracles.target(), [prompt], drafts, max_tokens=20, logit_bias={banned: -100.0})
    assert banned not in row.output_ids
    assert row.output_ids == k.answers[0].ids[:20]


def test_a_huge_presence_penalty_lets_nothing_repeat() -> None:
    prompt = prompt_of(5)
    script = ScriptedTree(lambda ids: [[7] * 6])
    (row,) = decode(oracles.target(), [prompt], script, max_tokens=20, presence_penalty=1e9, logit_bias={7: 50.0})
    assert row.output_ids[0] == 7
    assert len(set(row.output_ids)) == 20
    assert row.stats.num_accepted_tokens == 1


# -- every architecture, windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["wild", "mix"])
def test_every_architecture(arch: str, settings: dict[str, Any], drafter: str) -> None:
    prompts = [prompt_of(2), prompt_of(23)]
    k = known(prompts, 30, arch, **settings)
    rows = decode(oracles.target(arch), prompts, DRAFTERS[drafter](k, 5), depth=5, max_tokens=14, **settings)
    assert texts(rows) == expected(k, 14)
    assert min(row.stats.num_accepted_tokens for row in rows) > 0


@pytest.mark.parametrize("arch", ["mistral", "gemma3"])
@pytest.mark.parametrize("length", [1, 3, 5, 6, 7, 40])
def test_mlxlm_1914_rollback_across_the_windows_edge(arch: str, length: int) -> None:
    """Blocks longer than the window, rejected at every place, on both sides of the window's first full turn."""
    prompts = [prompt_of(length)]
    k = known(prompts, 30, arch)
    for drafter in (k.accepting([0, 3, 8, 1, 5], 8), k.wild(8, 20, length), k.anti(8)):
        request = oracles.requests(oracles.target(arch), prompts, drafter, max_tokens=18)[0]
        for cache in walk(oracles.target(arch), request):
            assert cache.lengths == [len(request.ids) - 1]
            assert all(k.shape[0] == v.shape[0] == 1 for k, v in cache._kv)
        assert request.output_ids == k.answers[0].ids[:18]


def test_prompts_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.prefix, "CHUNK", 16)
    for length in (16, 17, 18, 33, 50):
        prompts, spy = [prompt_of(length), prompt_of(2)], Spy(oracles.target("gemma3"))
        k = known(prompts, 12, "gemma3")
        assert texts(decode(spy, prompts, k.mix(3), max_tokens=12)) == expected(k, 12)
        reading = [len(rows[0]) for rows in spy.tokens[: math.ceil((length - 1) / 16)]]
        assert reading == [16] * ((length - 1) // 16) + [(length - 1) % 16] * ((length - 1) % 16 > 0)


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["block", "standard"])
@pytest.mark.parametrize("drafter", ["oracle", "anti", "mix", "wild", "wide", "ngram"])
def test_greedy_text_is_the_same_under_every_rule(rule: str, drafter: str) -> None:
    k = known(PROMPTS, 34)
    rows = decode(oracles.target(), PROMPTS, DRAFTERS[drafter](k, 4), depth=4, budget=23, rule=rule, max_tokens=20)
    assert texts(rows) == expected(k, 20)


@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
@pytest.mark.parametrize("drawn", [Drawn.IID, Drawn.DISTINCT])
@pytest.mark.parametrize("law", ["random", "NaN", "zero"])
def test_greedy_text_whatever_q_says(rule: str, drawn: Drawn, law: str) -> None:
    """A draft law that is NaN or empty is no proposal; any other changes nothing at temperature 0."""
    k = known(PROMPTS[2:], 34)

    def script(ids: list[int]) -> TokenTree:
        coming = k.coming(ids)
        right, wrong = coming.ids[:3], coming.worst[:3]
        q = torch.softmax(torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(len(ids))), 1)
        q = {"random": q, "NaN": q * math.nan, "zero": q * 0}[law]
        tokens = torch.tensor([ids[-1], wrong[0], right[0], wrong[1], right[1], right[2], wrong[2]])
        return TokenTree(tokens, torch.tensor([-1, 0, 0, 2, 2, 4, 4]), drawn, q)

    rows = decode(oracles.target(), PROMPTS[2:], ScriptedTree(script), rule=rule, max_tokens=20)
    assert texts(rows) == expected(k, 20)
    useful = rule == "coupled" or law == "random"
    assert all((row.stats.num_accepted_tokens > 0) == useful for row in rows)


# -- where it ends -----------------------------------------------------------------------------------------------------


VARIED = {"temperature": 1.0, "seed": 3, "presence_penalty": 1000.0}
"""No token repeats, so each can be made the end."""


@pytest.fixture(scope="module")
def varied() -> Known:
    k = known([prompt_of(5)], 24, **VARIED)
    assert len(set(k.answers[0].ids)) == 24
    return k


@pytest.mark.parametrize(("drafter", "K"), [*(("oracle", K) for K in range(1, 11)), ("wild", 3), ("wild", 8)])
def test_transformers_47912_a_stop_inside_the_block(varied: Known, drafter: str, K: int) -> None:
    """An end at every index of the text, so at every index of the block: nothing behind it is kept or shown.

    The rows of one batch end at index 0 to 11, by an EOS or by a stop id of their own.
    """
    ids = varied.answers[0].ids
    ends = [{"stop_token_ids": [ids[i], 95]} if i % 2 else {"eos": [96, ids[i]]} for i in range(12)]
    rows = oracles.requests(
        oracles.target(), varied.prompts * 12, DRAFTERS[drafter](varied, K), depth=K, budget=23, settings=ends,
        max_tokens=20, **VARIED
    )  # fmt: skip
    for _ in paceline.decode.run(oracles.target(), rows):
        pass
    for i, row in enumerate(rows):
        assert row.output_ids == ids[: i + 1]
        assert (row.finish_reason, row.stop_reason) == ("stop", ids[i] if i % 2 else None)
        assert len(row.from_draft) == i + 1
        assert row.stats.num_accepted_tokens == sum(row.from_draft) <= row.stats.num_draft_tokens


@pytest.mark.parametrize("K", [1, 4, 10])
def test_the_cache_holds_the_text_without_its_last_token(varied: Known, K: int) -> None:
    """After every step, the last one included, wherever the end falls."""
    ids = varied.answers[0].ids
    for i in range(9):
        (row,) = oracles.requests(
            oracles.target(), varied.prompts, varied.oracle(K), depth=K, eos=[ids[i]], max_tokens=20, **VARIED
        )
        for cache in walk(oracles.target(), row):
            assert cache.lengths == [len(row.ids) - 1]
            assert cache.staged == 0
        assert row.output_ids == ids[: i + 1]


def test_a_stop_at_the_limit_is_a_stop(varied: Known) -> None:
    ids = varied.answers[0].ids
    limits = [{"eos": [ids[n - 1]], "max_tokens": n} for n in range(1, 8)]
    rows = decode(oracles.target(), varied.prompts * 7, varied.oracle(4), depth=4, settings=limits, **VARIED)
    assert [(row.output_ids, row.finish_reason) for row in rows] == [(ids[:n], "stop") for n in range(1, 8)]


@pytest.mark.parametrize(
    ("drafter", "K"),
    [*itertools.product(("oracle", "mix"), range(1, 9)), *itertools.product(("anti", "ngram"), (1, 4, 8))],
)
def test_transformers_46993_exactly_as_many_tokens_as_asked(drafter: str, K: int) -> None:
    """max_tokens 0 to 12, as the rows of one batch that shrinks while it runs."""
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    k = known([prompt], 30)
    prompts, shown = [prompt] * 13, [0] * 13
    rows = oracles.requests(
        oracles.target(), prompts, DRAFTERS[drafter](k, K), depth=K, settings=[{"max_tokens": n} for n in range(13)]
    )
    for row in paceline.decode.run(oracles.target(), rows):
        n = rows.index(row)
        assert len(row.output_ids) > shown[n] or n == 0
        shown[n] = len(row.output_ids)
    assert shown == list(range(13))
    for n, row in enumerate(rows):
        assert row.output_ids == k.answers[0].ids[:n]
        assert row.finish_reason == "length"


@pytest.mark.parametrize("K", [1, 2, 3, 5, 8])
def test_exllamav2_274_the_end_of_the_context(K: int) -> None:
    """Prompts of 56 to 64 tokens in a context of 64: the text of plain decoding, and no position of 64 or more."""
    prompts = [prompt_of(length) for length in range(56, 65)]
    k = known(prompts, 8, limit=64)
    for drafter in (k.oracle(K), k.wild(K, 3 * K), Ngram()):
        spy = Spy(oracles.target(limit=64))
        rows = decode(spy, prompts, drafter, depth=K, max_tokens=100)
        assert texts(rows) == [a.ids[: 64 - len(p)] for p, a in zip(prompts, k.answers, strict=True)]
        assert {row.finish_reason for row in rows} == {"length"}
        assert spy.furthest < 64
    spy = Spy(oracles.target(limit=64))
    with pytest.raises(BadRequest, match="65 tokens, the context holds 64"):
        decode(spy, [*prompts, prompt_of(65)], k.oracle(K), depth=K)
    assert not spy.positions
    (row,) = decode(spy, prompts[:1], k.oracle(K), depth=K)  # without max_tokens: the room that is left
    assert len(row.output_ids) == 8


# -- values that are not numbers ---------------------------------------------------------------------------------------


def nan_at(position: int, value: float = math.nan) -> Callable[[Tensor, Tensor, Tensor], None]:
    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        logits[positions == position] = value

    return spoil


@pytest.mark.parametrize("drafter", ["none", "oracle", "mix", "wild", "wide"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_eagle_69_bad_logits_end_the_request_where_they_are_reached(
    drafter: str, value: float, settings: dict[str, Any]
) -> None:
    """Bad values at the j-th place of the text, hence at every node of a block: that position is named, no token of it
    is emitted, and what comes before is the reference."""
    prompt = prompt_of(5)
    k = known([prompt], 34, **settings)
    for j in range(7):
        drafts = DRAFTERS[drafter](k, 4) if drafter != "none" else None
        spy = Spy(oracles.target(), nan_at(4 + j, value))
        (row,) = oracles.requests(spy, [prompt], drafts, depth=4, budget=23, max_tokens=20, **settings)
        for cache in walk(spy, row):
            assert cache.lengths == [max(len(row.ids) - 1, 4)]
        assert row.output_ids == k.answers[0].ids[:j]
        assert row.finish_reason == "error"
        assert row.error is not None
        assert row.error.startswith(f"position {5 + j}: ")


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_bad_logits_under_the_other_rules(rule: str) -> None:
    """No token of the pass is emitted: these rules decide only at its end."""
    prompt = prompt_of(5)
    k = known([prompt], 34)
    (row,) = decode(Spy(oracles.target(), nan_at(12)), [prompt], k.oracle(4), depth=4, rule=rule, max_tokens=20)
    assert row.finish_reason == "error"
    assert row.output_ids == k.answers[0].ids[: len(row.output_ids)]
    assert len(row.output_ids) in (5, 8)


@pytest.mark.parametrize("drafter", ["anti", "mix", "wild", "wide"])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_bad_logits_that_are_not_reached_have_no_effect(drafter: str, settings: dict[str, Any]) -> None:
    """Every node that is not on the text's own path is NaN, in rejected branches and behind rejections alike."""
    prompt = prompt_of(5)
    k = known([prompt], 34, **settings)
    text, spoilt = [*prompt, *k.answers[0].ids], 0

    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        nonlocal spoilt
        for slot, (position, token) in enumerate(zip(positions[0].tolist(), tokens[0].tolist())):
            if text[position] != token:
                logits[0, slot] = math.nan
                spoilt += 1

    spy = Spy(oracles.target(), spoil)
    (row,) = decode(spy, [prompt], DRAFTERS[drafter](k, 4), depth=4, budget=23, max_tokens=20, **settings)
    assert row.output_ids == k.answers[0].ids[:20]
    assert row.error is None
    assert spoilt > 5


def test_bad_logits_behind_a_stop_have_no_effect(varied: Known) -> None:
    ids = varied.answers[0].ids
    for j in range(5):
        spy = Spy(oracles.target(), nan_at(4 + j))
        rows = decode(
            spy, varied.prompts * 4, varied.oracle(6), depth=6, settings=[{"eos": [ids[i]]} for i in range(4)],
            max_tokens=20, **VARIED
        )  # fmt: skip
        for i, row in enumerate(rows):
            if j <= i:
                assert (row.output_ids, row.finish_reason) == (ids[:j], "error")
            else:
                assert (row.output_ids, row.finish_reason, row.error) == (ids[: i + 1], "stop", None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_infinite_logit_is_that_token(temperature: float) -> None:
    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        logits[..., 33] = math.inf

    (row,) = decode(
        Spy(oracles.target(), spoil), [[1, 2]], ScriptedTree(lambda ids: [[33] * 4]), max_tokens=9,
        temperature=temperature,
    )  # fmt: skip
    assert row.output_ids == [33] * 9


def test_other_rows_go_on() -> None:
    """Row 1 breaks in the first pass; the others equal their solo runs."""
    k = known(PROMPTS, 34)
    passes = 0

    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes == 1:
            logits[1] = math.nan

    rows = decode(Spy(oracles.target(), spoil), PROMPTS, k.mix(4), depth=4, max_tokens=20)
    assert [row.finish_reason for row in rows] == ["length", "error", "length", "length"]
    assert texts(rows) == [ids if i != 1 else [] for i, ids in enumerate(expected(k, 20))]


def test_a_prompt_that_breaks_the_model() -> None:
    """Its own request says so, with the positions; others in the batch are not touched."""
    target = oracles.HFTarget(oracles.tiny("llama"))
    with torch.no_grad():
        target.model.get_input_embeddings().weight[13] = math.nan
    prompts = [[1, 13, 2, 3], PROMPTS[3]]
    k = known(PROMPTS[3:], 34)
    rows = decode(target, prompts, k.mix(4), depth=4, max_tokens=10)
    assert (rows[0].finish_reason, rows[0].output_ids) == ("error", [])
    assert rows[0].error is not None
    assert "prompt positions 0 to 2" in rows[0].error
    assert rows[1].output_ids == k.answers[0].ids[:10]


# -- what drafters are told and held to --------------------------------------------------------------------------------


class Recorder(ScriptedTree):
    """Keeps every step it is told of."""

    def __init__(self, script: Any, taps: tuple[int, ...] = (), reads_logits: bool = False) -> None:
        super().__init__(script)
        self.taps, self.reads_logits = taps, reads_logits
        self.steps: list[Step] = []
        self.asks: list[Ask] = []

    def begin(self, prompt: Step) -> list[int]:
        self.steps.append(prompt)
        return super().begin(prompt)

    def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
        self.asks += asks
        return super().propose(states, asks)

    def observe(self, states: list[list[int]], steps: list[Step]) -> None:
        self.steps += steps
        super().observe(states, steps)


@pytest.mark.parametrize("taps", [(), (2,), (2, 0, 1)])
def test_drafters_see_exactly_what_was_kept(taps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, what follows them, logits and tapped states of prompt chunks and passes, as the plain model has them."""
    monkeypatch.setattr(paceline.prefix, "CHUNK", 16)
    prompt = prompt_of(40)
    k = known([prompt], 40)
    recorder = Recorder(k.wild(4, 12).script, taps, reads_logits=True)
    other = Recorder(k.mix(2).script, (1,))
    rows = decode(oracles.target(), [prompt, prompt], [recorder, other], max_tokens=20)
    ids = rows[0].ids
    assert len(recorder.steps) == 3 + rows[0].stats.num_target_passes
    assert [token for step in recorder.steps for token in step.tokens] == ids[:-1]
    assert [token for step in recorder.steps for token in step.following] == ids[1:]
    with torch.inference_mode(), oracles.float64_softmax():
        out = oracles.plain()(torch.tensor([ids[:-1]]), use_cache=False, output_hidden_states=True)
    passes = recorder.steps[3:]
    logits = torch.cat([step.logits for step in passes if step.logits is not None])
    assert_close(logits, out.logits[0, -len(logits) :])
    assert len(logits) == len(ids) - 40
    for one, wanted in ((recorder, taps), (other, (1,))):
        hidden = [step.hidden for step in one.steps]
        if not wanted:
            assert hidden == [None] * len(hidden)
            continue
        assert_close(torch.cat(hidden), torch.cat([out.hidden_states[tap][0] for tap in wanted], dim=-1))  # type: ignore[arg-type]
    assert all(step.logits is None for step in other.steps)


def test_one_token_prompts_begin_with_nothing() -> None:
    recorder = Recorder(lambda ids: [], (1,))
    (row,) = decode(oracles.target(), [[5]], recorder, max_tokens=3)
    assert (recorder.steps[0].tokens, recorder.steps[0].following, recorder.steps[0].hidden) == ([], [], None)
    assert [token for step in recorder.steps for token in step.tokens] == row.ids[:-1]


def test_riders_come_back() -> None:
    prompt = prompt_of(6)
    k = known([prompt], 20)

    def script(ids: list[int]) -> TokenTree:
        base = TokenTree.chain(ids[-1], k.coming(ids).worst[:2])
        rider = Rider(
            torch.tensor([50, 51]), torch.tensor([1, 2]), torch.tensor([[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]) > 0
        )
        return TokenTree(base.tokens, base.parents, rider=rider)

    recorder = Recorder(script)
    (row,) = decode(oracles.target(), [prompt], recorder, max_tokens=6)
    assert row.output_ids == k.answers[0].ids[:6]
    for i, step in enumerate(recorder.steps[1:-1]):
        assert step.rider_logits is not None
        text = row.ids[: 6 + i]
        assert_close(step.rider_logits, oracles.logits_of(oracles.plain(), [*text, 50, 51])[-2:])


def test_asks_say_what_is_worth_drafting() -> None:
    prompt = prompt_of(5)
    k = known([prompt], 20)
    recorder = Recorder(k.accepting([1, 0], 3).script)
    (row,) = decode(oracles.target(), [prompt], recorder, depth=3, budget=9, max_tokens=8)
    done = [0, 2, 3, 5, 6]
    assert [(ask.position, ask.pending) for ask in recorder.asks] == [(4 + n, row.ids[4 + n]) for n in done]
    assert [(ask.depth, ask.budget) for ask in recorder.asks] == [(3, 9), (3, 9), (3, 9), (2, 9), (1, 9)]
    assert row.stats.num_target_passes == 6 - (row.output_ids[6:8] == k.coming(row.ids[:11]).ids[:2])


@pytest.mark.parametrize(("depth", "budget"), [(3, 23), (8, 5), (1, 1), (0, 5), (5, 0)])
def test_trees_beyond_depth_and_budget_are_cut(depth: int, budget: int) -> None:
    k = known([prompt_of(5)], 40)
    for drafter in (k.wild(9, 40), k.oracle(12)):
        spy = Spy(oracles.target())
        (row,) = decode(spy, [prompt_of(5)], drafter, depth=depth, budget=budget, max_tokens=20)
        assert row.output_ids == k.answers[0].ids[:20]
        passes = spy.positions[1:]
        assert max(len(rows[0]) for rows in passes) <= 1 + (budget if depth else 0)
        assert max(max(rows[0]) - rows[0][0] for rows in passes) <= (depth if budget else 0)
        assert len(row.stats.acceptance_histogram) - 1 <= min(depth, budget)


def with_rider(token: int, offset: int) -> TokenTree:
    rider = Rider(torch.tensor([token]), torch.tensor([offset]), torch.tensor([[True, False, True]]))
    return TokenTree(torch.tensor([9, 3]), torch.tensor([-1, 0]), rider=rider)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (TokenTree.root(1), "rooted its tree at id 1; the pending token is 9"),
        (TokenTree.chain(9, [4, VOCAB]), f"drafted id {VOCAB}; the target has ids 0 to {VOCAB - 1}"),
        (TokenTree.chain(9, [4, 10**6]), "drafted id 1000000"),
        (with_rider(VOCAB, 1), f"rider id {VOCAB}; the target has ids 0 to {VOCAB - 1}"),
        (with_rider(3, -2), "riders at positions -1 to -1; the context has 0 to 255"),
        (with_rider(3, 255), "riders at positions 256 to 256"),
    ],
)
def test_vllm_13849_trees_that_do_not_fit_are_refused(tree: TokenTree, words: str) -> None:
    spy = Spy(oracles.target())
    with pytest.raises(IncompatibleDrafter, match=words):
        decode(spy, [[5, 9]], ScriptedTree(lambda ids: tree), max_tokens=5)
    assert all(token < VOCAB for rows in spy.tokens for row in rows for token in row)


@pytest.mark.parametrize("proposed", [None, [None], [[4]]])
def test_what_is_no_tree_is_refused(proposed: Any) -> None:
    drafter = ScriptedTree(lambda ids: [])
    drafter.propose = lambda states, asks: proposed  # type: ignore[method-assign]
    with pytest.raises(IncompatibleDrafter, match=r"propose returned .*; a list of TokenTree is needed"):
        decode(oracles.target(), [[5, 9]], drafter, max_tokens=5)


def test_a_drafter_that_loses_a_row_is_refused() -> None:
    class Forgetful(ScriptedTree):
        def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
            return super().propose(states, asks)[:-1]

    with pytest.raises(IncompatibleDrafter, match=r"Forgetful\.propose returned 1 trees for 2 sequences"):
        decode(oracles.target(), [[1], [2]], Forgetful(lambda ids: []), max_tokens=5)


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [3, 10**9]])
def test_prompts_with_foreign_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(BadRequest, match=f"the vocabulary has ids 0 to {VOCAB - 1}"):
        Request(ids, SamplingParams(), Ngram(), vocab_size=VOCAB, max_positions=64)


def test_scripts_that_know_the_answer_notice_a_wrong_text() -> None:
    """The oracle drafters fail loudly, so a test through them cannot pass on a wrong text."""
    k = Known([[1, 2]], [Answer([3, 4], [5, 6], [])])
    assert k.coming([1, 2, 3]).ids == [4]
    with pytest.raises(AssertionError, match="left the reference"):
        k.coming([1, 2, 4])
