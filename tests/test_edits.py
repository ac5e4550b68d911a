"""Settings that look at the text before a token: against the processors of `transformers`, on every way through it."""

import itertools
import math
import random
from typing import Any

import oracles
import pytest
import torch
from oracles import VOCAB, logits_of, plain, processors, prompt_of, reference
from transformers import LogitsProcessor, LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper
from transformers.generation import logits_process

from paceline.errors import BadLogits, BadRequest
from paceline.sampling import Law, Sampler, SamplingParams

SIZE = 12
ENDS = frozenset({2, 7})
EDITS: dict[str, Any] = {
    "logit_bias": {3: 1.5, 5: -math.inf},
    "repetition_penalty": 1.4,
    "presence_penalty": 0.6,
    "frequency_penalty": -0.3,
    "no_repeat_ngram_size": 2,
    "bad_words": [[4], [1, 6], [9, 3, 8], [0, 0], "long", [2]],
    "allowed_token_ids": [0, 1, 2, 3, 6, 8, 9, 11],
    "min_tokens": 9,
}
WORDS = {"long": [[1, 3], [10]], "x": [[VOCAB - 1]]}


def dense(law: Law) -> torch.Tensor:
    out = torch.full((law.vocab_size,), -math.inf, dtype=law.logits.dtype)
    out[slice(None) if law.ids is None else law.ids] = law.logits
    return out


def by_transformers(params: SamplingParams, row: torch.Tensor, prompt: list[int], after: list[int]) -> torch.Tensor:
    scores = row[None].clone()
    for processor in processors(params, len(prompt), ENDS, WORDS.__getitem__):
        scores = processor(torch.tensor([[*prompt, *after]]), scores)
    return scores[0]


def check_along_a_text(params: SamplingParams, pick: random.Random, few: int = SIZE) -> None:
    """Texts of few different tokens repeat a lot; what is emitted comes in pieces, as from accepted drafts."""
    prompt = [pick.randrange(few) for _ in range(pick.randrange(1, 9))]
    text = [pick.randrange(few) for _ in range(10)]
    sampler = Sampler(params, SIZE, prompt, ends=ENDS, encode=WORDS.__getitem__)
    generator, done = torch.Generator().manual_seed(pick.randrange(2**31)), 0
    while done < len(text):
        for drafted in range(min(3, len(text) - done) + 1):
            path = text[done : done + drafted]
            row = torch.randn(SIZE, dtype=torch.float64, generator=generator)
            before = row.clone()
            want = by_transformers(params, row, prompt, [*text[:done], *path])
            if bool((want == -math.inf).all()):
                with pytest.raises(BadLogits, match=r"removed all of them; loosen one"):
                    sampler.law(row, path)
                assert sampler.top(row, path, 5, 3) == []
                continue
            got = dense(sampler.law(row, path))
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(sampler.log_law(row, path), want.log_softmax(0), rtol=1e-12, atol=1e-12)
            assert torch.equal(row, before)
        step = pick.randrange(1, 4)
        sampler.extend(text[done : done + step])
        done += step


@pytest.mark.parametrize("name", EDITS)
def test_every_setting_alone_is_that_of_transformers(name: str) -> None:
    pick = random.Random(name)
    for trial in range(12):
        check_along_a_text(SamplingParams(**{name: EDITS[name]}), pick, 3 if trial % 2 else SIZE)


@pytest.mark.parametrize("names", list(itertools.combinations(EDITS, 2)), ids=" and ".join)
def test_every_pair_of_settings_is_that_of_transformers(names: tuple[str, str]) -> None:
    pick = random.Random(str(names))
    for trial in range(3):
        check_along_a_text(SamplingParams(**{name: EDITS[name] for name in names}), pick, 3 if trial % 2 else SIZE)


def test_all_settings_together_are_those_of_transformers() -> None:
    pick = random.Random(1)
    for _ in range(12):
        check_along_a_text(SamplingParams(**EDITS, temperature=0.7, top_k=6, min_p=0.01), pick)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_n_grams_of_every_size_are_those_of_transformers(size: int) -> None:
    pick = random.Random(size)
    for trial in range(12):
        check_along_a_text(SamplingParams(no_repeat_ngram_size=size), pick, (2, 4, SIZE)[trial % 3])


def test_an_end_among_the_bad_words_is_banned_like_any_other() -> None:
    """transformers would drop it."""
    sampler = Sampler(SamplingParams(bad_words=[[2]]), SIZE, [0], ends=ENDS)
    assert dense(sampler.law(torch.zeros(SIZE)))[2] == -math.inf


def test_min_tokens_counts_emitted_text_and_path_and_not_the_prompt() -> None:
    sampler = Sampler(SamplingParams(min_tokens=3), SIZE, [0] * 10, ends=ENDS | {500})
    sampler.extend([2])

    def banned(path: list[int]) -> set[int]:
        return set((dense(sampler.law(torch.zeros(SIZE), path)) == -math.inf).nonzero().flatten().tolist())

    assert banned([]) == banned([5]) == ENDS
    assert banned([5, 7]) == set()
    sampler.extend([5, 6])
    assert banned([]) == set()


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_of_texts_with_many_different_tokens(name: str) -> None:
    """Counts grow with the number of different tokens: a text of 300, emitted singly and in blocks."""
    size, chance = 400, random.Random(1)
    params = SamplingParams(**{name: 1.2, "temperature": 1.0})
    sampler, text = Sampler(params, size, [0, 1]), list[int]()
    while len(text) < 300:
        block = [chance.randrange(size) for _ in range(1 + len(text) % 3)]
        sampler.extend(block)
        text += block
    row = torch.randn(size, dtype=torch.float64)
    (processor,) = processors(params, 2)
    expected = processor(torch.tensor([[0, 1, *text]]), row[None].clone())[0]
    assert len(set(text)) > 200
    assert torch.allclose(sampler.law(row).log_probs(), torch.log_softmax(expected, 0), atol=1e-12)


def test_banned_words_need_a_tokenizer_that_knows_them() -> None:
    with pytest.raises(BadRequest, match=r"bad_words holds 'long', and there is no tokenizer to read it with; give"):
        Sampler(SamplingParams(bad_words=["long"]), SIZE, [0])
    for nothing in ([], [[]], [[1], []]):
        with pytest.raises(BadRequest, match="bad_words holds 'long', which is no token to this tokenizer"):
            Sampler(SamplingParams(bad_words=["long"]), SIZE, [0], encode=lambda _, found=nothing: found)
    with pytest.raises(BadRequest, match=f"bad_words holds token id {VOCAB - 1}; the vocabulary has ids 0 to 11"):
        Sampler(SamplingParams(bad_words=["x"]), SIZE, [0], encode=WORDS.__getitem__)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the model's own row is -inf everywhere; check the weights and the dtype"),
        (
            {"allowed_token_ids": [4, 5], "no_repeat_ngram_size": 1},
            "no_repeat_ngram_size and allowed_token_ids removed all of them; loosen one",
        ),
        (
            {"min_tokens": 3, "allowed_token_ids": [2, 4, 7], "bad_words": [[5, 4]]},
            "reached: bad_words, allowed_token_ids and min_tokens removed all of them",
        ),
        ({"logit_bias": dict.fromkeys(range(SIZE), -math.inf)}, "reached: logit_bias removed all of them"),
        (
            {"bad_words": [[i] for i in range(SIZE)], "top_k": 2, "logit_bias": {3: 1.0}},
            "reached: bad_words removed all",
        ),
        ({"min_tokens": 3, "allowed_token_ids": [2, 7]}, "allowed_token_ids and min_tokens removed all of them"),
        ({"min_tokens": 3, "allowed_token_ids": [2, 7], "bad_words": [[3, 1]]}, "reached: allowed_token_ids and min_"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whoever_leaves_no_token_is_named(settings: dict[str, Any], words: str, temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, **settings), SIZE, [0], ends=ENDS)
    row = torch.zeros(SIZE) if settings else torch.full((SIZE,), -math.inf)
    with pytest.raises(BadLogits, match="no token is left at a position that was reached: ") as error:
        sampler.law(row, [4, 5])
    assert words in str(error.value)


def test_bans_do_not_hide_nan() -> None:
    row = torch.zeros(SIZE)
    row[5] = math.nan
    for settings in ({"bad_words": [[5]]}, {"allowed_token_ids": [1]}, {"no_repeat_ngram_size": 1}, {"min_tokens": 2}):
        sampler = Sampler(SamplingParams(**settings), SIZE, [5], ends=frozenset({5}))  # type: ignore[arg-type]
        with pytest.raises(BadLogits, match="NaN"):
            sampler.law(row)


def test_settings_that_are_off_leave_the_row_alone() -> None:
    """Not even copied: the law of plain sampling is the row itself."""
    row = torch.linspace(-2, 2, SIZE)
    sampler = Sampler(SamplingParams(), SIZE, [0], ends=ENDS, encode=WORDS.__getitem__)
    assert sampler.law(row).logits.data_ptr() == row.data_ptr()


# -- logits_processors -------------------------------------------------------------------------------------------------


class Seen(LogitsProcessor):
    """Notes what it is given, and spoils it in place."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], torch.dtype]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.dtype == torch.long
        assert scores.shape == (1, SIZE)
        self.calls.append((input_ids.tolist(), scores.dtype))
        result = scores + 1.0
        scores.fill_(math.nan)
        return result


def test_processors_see_the_text_and_get_a_copy_of_the_edited_row() -> None:
    ours, seen = [], Seen()

    def spoil(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        ours.append((list(ids), logits.clone()))
        ids.clear()
        logits[3] = 9.0
        return logits

    params = SamplingParams(logits_processors=[spoil, seen, spoil], bad_words=[[1]], temperature=0.5)
    sampler = Sampler(params, SIZE, [5, 6])
    sampler.extend([7])
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        ours.clear()
        row = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).to(kind)
        before = row.clone()
        law = sampler.law(row, [8, 9])
        assert torch.equal(row, before)
        precise = torch.float64 if kind == torch.float64 else torch.float32
        want = row.to(precise)
        want[1] = -math.inf
        assert [ids for ids, _ in ours] == [[5, 6, 7, 8, 9]] * 2
        assert torch.equal(ours[0][1], want)
        want[3] = 9.0
        assert torch.equal(ours[1][1], want + 1)
        want += 1
        want[3] = 9.0
        assert torch.equal(dense(law), want / 0.5)
        assert seen.calls.pop() == ([[5, 6, 7, 8, 9]], precise)


def test_plain_sampling_with_a_processor_leaves_the_models_row_alone() -> None:
    """Nothing else makes a copy here, and the processor keeps its own tensor."""
    own = torch.zeros(SIZE)

    def spoil(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits.fill_(-1.0)
        return own.copy_(logits)

    row = torch.linspace(-2, 2, SIZE)
    before = row.clone()
    law = Sampler(SamplingParams(logits_processors=[spoil, spoil]), SIZE, [0]).law(row)
    own.fill_(5.0)
    assert torch.equal(row, before)
    assert torch.equal(law.logits, torch.full((SIZE,), -1.0))


def test_drafters_do_not_call_processors() -> None:
    def broken(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called")

    sampler = Sampler(SamplingParams(logits_processors=[broken], seed=1), SIZE, [0])
    row = torch.linspace(-2, 2, SIZE)
    plain_one = Sampler(SamplingParams(seed=1), SIZE, [0])
    assert sampler.top(row, [1], 3, 4) == plain_one.top(row, [1], 3, 4)
    assert torch.equal(sampler.log_law(row, [1]), plain_one.log_law(row, [1]))
    with pytest.raises(AssertionError, match="called"):  # its own exception, unchanged
        sampler.law(row)


class Named(LogitsProcessor):
    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.result


def named(ids: list[int], logits: torch.Tensor) -> Any:
    return RESULTS.pop()


RESULTS: list[Any] = []
NAN = torch.full((SIZE,), math.nan)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned NoneType; a tensor of numbers of shape"),
        ([0.0] * SIZE, "returned list; a tensor of numbers of shape"),
        (torch.zeros(SIZE, dtype=torch.int64), "returned a tensor of torch.int64; a tensor of numbers of shape"),
        (torch.zeros(SIZE + 1), r"returned shape \[(1, )?13\]; a tensor of numbers of shape \[(1, )?12\] is needed"),
        (torch.zeros(1, 1, SIZE), r"returned shape \[1, 1(, 1)?, 12\]"),
        (NAN, "returned NaN, and numbers are needed"),
        (
            torch.full((SIZE,), -math.inf),
            "no token is left at a position that was reached: logits processor .* removed",
        ),
    ],
)
def test_what_a_processor_must_not_return(result: Any, words: str) -> None:
    RESULTS.append(result)
    with pytest.raises(BadLogits, match=words) as plain_one:
        Sampler(SamplingParams(logits_processors=[named]), SIZE, [0]).law(torch.zeros(SIZE))
    assert "logits processor named " in str(plain_one.value)
    rows = result[None] if isinstance(result, torch.Tensor) else result
    with pytest.raises(BadLogits, match=words) as of_transformers:
        Sampler(SamplingParams(logits_processors=[Named(rows)]), SIZE, [0]).law(torch.zeros(SIZE))
    assert "logits processor Named " in str(of_transformers.value)


def test_nan_of_the_model_is_not_blamed_on_a_processor() -> None:
    def unchanged(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    with pytest.raises(BadLogits, match="the logits hold NaN at a position that was reached"):
        Sampler(SamplingParams(logits_processors=[unchanged]), SIZE, [0]).law(NAN)
    repaired = SamplingParams(logits_processors=[unchanged, logits_process.InfNanRemoveLogitsProcessor()])
    assert torch.equal(Sampler(repaired, SIZE, [0]).law(NAN).logits, torch.zeros(SIZE))
    empty = SamplingParams(logits_processors=[unchanged], allowed_token_ids=[3], bad_words=[[3]])
    with pytest.raises(BadLogits, match="bad_words and allowed_token_ids removed all of them"):
        Sampler(empty, SIZE, [0]).law(torch.zeros(SIZE))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_processors_of_transformers_mean_the_same_here(settings: dict[str, Any]) -> None:
    lists = [
        [logits_process.NoRepeatNGramLogitsProcessor(2)],
        [LogitsProcessorList([TopKLogitsWarper(5), MinPLogitsWarper(0.05)])],
        [logits_process.SuppressTokensLogitsProcessor([1, 2]), logits_process.MinLengthLogitsProcessor(9, [3])],
    ]
    pick = random.Random(2)
    for one in lists:
        for _ in range(4):
            params = SamplingParams(logits_processors=one, **settings)
            prompt, path = [[pick.randrange(SIZE) for _ in range(6)] for _ in range(2)]
            row = torch.tensor([pick.gauss() for _ in range(SIZE)], dtype=torch.float64)
            got = dense(Sampler(params, SIZE, prompt).law(row, path))
            torch.testing.assert_close(got, by_transformers(params, row, prompt, path), rtol=1e-12, atol=1e-12)


# -- whole texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "top_k": 40}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words": ["x", [3], [5, 5]], "no_repeat_ngram_size": 1},
        {"allowed_token_ids": [3, 5, 8, 13, 21, 34, 55], "no_repeat_ngram_size": 2, "frequency_penalty": 0.5},
        {"min_tokens": 12, "stop_token_ids": list(range(0, VOCAB, 2))},
        {"min_tokens": 5, "ignore_eos": True, "stop_token_ids": [4]},
        {
            "logits_processors": [
                logits_process.NoRepeatNGramLogitsProcessor(1),
                lambda ids, logits: logits / (1 + len(ids) % 3),
            ]
        },
    ],
    ids=lambda settings: " and ".join(settings),
)
def test_texts_are_those_of_the_loop_without_a_cache(settings: dict[str, Any], sampling: dict[str, Any]) -> None:
    """The model's own logits, a text that ends at its stops, and the random draws: as the loop decides them."""
    params, prompt, eos = SamplingParams(**settings, **sampling), prompt_of(9), frozenset(range(1, VOCAB, 9))
    answer = reference(plain(), prompt, 20, params, eos, encode=WORDS.__getitem__)
    ends = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
    sampler = Sampler(params, VOCAB, prompt, ends=ends, encode=WORDS.__getitem__)
    ids: list[int] = []
    for token, law, raw in zip(answer.ids, answer.laws, answer.raw, strict=True):
        logits = logits_of(plain(), [*prompt, *ids])[-1]
        torch.testing.assert_close(torch.log_softmax(logits, 0), raw)
        found = sampler.law(logits)
        assert sampler.draws.choose(found, len(prompt) + len(ids)) == token
        if not params.is_greedy:
            torch.testing.assert_close(found.probs(), law.softmax(0))
        sampler.extend([token])
        ids.append(token)
    assert len(ids) == 20 or ids[-1] in ends
    assert not ends & set(ids[: params.min_tokens])
    if params.ignore_eos:
        assert eos & set(ids)


def test_the_remembered_reference_keeps_its_settings() -> None:
    settings: dict[str, Any] = {"bad_words": [[1, 2], [3, 4]], "logit_bias": {5: 1.0}, "allowed_token_ids": [1, 2, 5]}
    found = oracles.answer([1, 2], 4, eos=[7], **settings)
    assert found is oracles.answer([1, 2], 4, eos=[7], **settings)
    assert found.ids == reference(plain(), [1, 2], 4, SamplingParams(temperature=0.0, **settings), [7]).ids
    assert len(found.raw) == len(found.ids)
