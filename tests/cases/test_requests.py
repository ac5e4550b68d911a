"""Public reports about what a request gives back: log-probs, where it ends, how many tokens, whole characters."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import Known, Spy, answer, decode, prompt_of
from standins import GREEDY, VARIED, Says, drafter
from test_text import of_words
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from paceline import LLM, BadRequest, SamplingParams
from paceline.decode import run
from paceline.draft.model import DraftModel
from paceline.output import Stats, combined
from paceline.prefix import Prefixes
from paceline.target import HFTarget
from paceline.testing import ScriptedTree


def known(prompt: list[int], max_new: int = 40, **settings: Any) -> Known:
    return Known([prompt], [answer(prompt, max_new, **settings)])


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, threads=1, reuse_prefix=False)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Callable[..., list[int]]:
    """Prompt ids -> greedy ids, by the unmodified model without a cache."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()

    @functools.cache
    def ids_of(prompt: tuple[int, ...], max_new: int, eos: frozenset[int]) -> list[int]:
        return oracles.reference(model, prompt, max_new, eos=eos).ids

    return lambda prompt, max_new, eos=frozenset(): ids_of(tuple(prompt), max_new, eos)


# -- log-probs ---------------------------------------------------------------------------------------------------------

FILTERED = {"temperature": 0.7, "seed": 4, "top_k": 3, "presence_penalty": 1.5, "logit_bias": {5: 9.0}}


def same(found: dict[int, Any], raw: torch.Tensor, token: int, count: int) -> None:
    """The chosen token and the likeliest ones, each with its log-softmax."""
    assert set(found) == {token, *raw.topk(count).indices.tolist()}
    for i, one in found.items():
        assert one.logprob == pytest.approx(float(raw[i]), abs=1e-6)
        assert one.logprob < 0.0


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, GREEDY) for name in ("oracle", "mix", "tree")), ("wild", FILTERED), ("tree", FILTERED)],
    ids=str,
)
def test_llamacpp_27972_log_probs_of_drafted_tokens(name: str, settings: dict[str, Any]) -> None:
    """Accepted, corrected and bonus tokens have the log-softmax of the model's raw logits, as in plain decoding: before
    bias, penalties, temperature and filters."""
    prompt = prompt_of(9)
    k = known(prompt, **settings)
    asked = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 24, **settings}
    for rule in ("coupled", "standard") if settings is GREEDY and name == "mix" else ("coupled",):
        drafts = drafter(name, k, 4)
        (row,) = decode(oracles.target(), [prompt], drafts, depth=4, budget=12, rule=rule, **asked)
        assert row.output_ids == k.answers[0].ids[:24]
        assert len(row.logprobs) == 24
        for found, raw, token in zip(row.logprobs, k.answers[0].raw, row.output_ids, strict=False):
            same(found, raw, token, 3)
        accepted = row.stats.acceptance_histogram
        if name == "oracle":
            assert accepted == [0, 0, 0, 1, 4]  # a bonus token behind each full block
        elif name == "mix":
            assert min(accepted) > 0  # corrected behind 0, 1 and 2 accepted ones
    (plain,) = decode(oracles.target(), [prompt], **asked)
    assert row.prompt_logprobs == plain.prompt_logprobs
    first, *others = row.prompt_logprobs
    assert first is None
    raws = torch.log_softmax(oracles.logits_of(oracles.plain(), prompt), -1)
    for found, raw, token in zip(others, raws[:-1], prompt[1:], strict=True):
        assert found is not None
        same(found, raw, token, 2)


@pytest.mark.parametrize("name", ["oracle", "tree"])
def test_llamacpp_27972_as_many_log_probs_as_tokens(name: str) -> None:
    """Also when a stop or the limit falls inside a block."""
    prompt = prompt_of(5)
    k = known(prompt, 24, **VARIED)
    ids = k.answers[0].ids
    for count in (1, 4, 8):
        for end in ({"eos": [ids[count - 1]], "max_tokens": 20}, {"max_tokens": count}):
            (row,) = decode(oracles.target(), [prompt], drafter(name, k, 6), depth=6, logprobs=0, **end, **VARIED)
            assert [list(found) for found in row.logprobs] == [[token] for token in ids[:count]]


# -- the end of the text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "K"), [*(("oracle", K) for K in range(1, 10)), ("wild", 6), ("chain", 4), ("tree", 3)]
)
def test_transformers_47912_two_ends_and_an_end_of_the_targets_own(name: str, K: int) -> None:
    """The first of two end ids that comes ends the text and what is streamed, drafted or the target's own."""
    prompt = prompt_of(5)
    k = known(prompt, 30, **VARIED)
    ids = k.answers[0].ids
    ends = {6: [ids[9], ids[6]], K: [ids[K], 96], 0: [ids[K], ids[0]]}
    settings = [{"eos": both} for both in ends.values()]
    drafts = drafter(name, k, K)
    options = {"depth": K, "budget": 30, "max_tokens": 20, **VARIED}
    rows = oracles.requests(oracles.target(), [prompt] * len(ends), drafts, settings=settings, **options)
    shown: list[list[int]] = [[] for _ in rows]
    for row in run(oracles.target(), rows):
        one = next(i for i, other in enumerate(rows) if other is row)
        shown[one] += row.output_ids[len(shown[one]) :]
    for row, pieces, index in zip(rows, shown, ends, strict=True):
        assert pieces == row.output_ids == ids[: index + 1]
        assert (row.finish_reason, row.stop_reason) == ("stop", None)
        if name == "oracle" and index == K:
            assert row.from_draft == [True] * K + [False]  # the bonus token was the end


@pytest.mark.parametrize(("name", "K", "index"), [("oracle", 1, 2), ("oracle", 8, 6), ("wild", 6, 2), ("tree", 3, 6)])
def test_transformers_47912_the_next_turn_reads_on_behind_the_end(name: str, K: int, index: int) -> None:
    """Nothing behind the end was kept: a turn that goes on just like the dropped draft finds the shown text alone."""
    prompt = prompt_of(21)
    k = known(prompt, 24, **VARIED)
    ids = k.answers[0].ids
    prefixes, spy = Prefixes(), Spy(oracles.target())
    (first,) = oracles.requests(spy, [prompt], drafter(name, k, K), depth=K, eos=[ids[index]], max_tokens=20, **VARIED)
    list(run(spy, [first], prefixes=prefixes))
    assert first.ids == [*prompt, *ids[: index + 1]]
    turn = [*first.ids, *ids[index + 1 : index + 5], 9]
    known_turn = known(turn, 20)
    (second,) = oracles.requests(spy, [turn], drafter(name, known_turn, K), depth=K, max_tokens=12)
    passes = len(spy.positions)
    list(run(spy, [second], prefixes=prefixes))
    assert second.stats.num_cached_tokens == len(first.ids) - 1
    assert spy.positions[passes][0][0] == len(first.ids) - 1
    assert second.output_ids == known_turn.answers[0].ids[:12]


def test_transformers_47912_turns_through_the_library(tiny_model: Path, tiny_draft: Path, reference: Any) -> None:
    prompt = list(range(3, 20))
    ids = reference(prompt, 12)
    end = next(i for i in range(4, 12) if ids[i] not in ids[:i])
    for config in ({"method": "ngram"}, {"method": "draft_model", "model": str(tiny_draft), "tree_top_k": 2}):
        llm = LLM(tiny_model, config, threads=1)
        llm.eos_ids = frozenset({ids[end], 319})
        (first,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12))
        assert (first.token_ids, first.finish_reason) == (ids[: end + 1], "stop")
        turn = [*prompt, *first.token_ids, *ids[end + 1 :], 7]
        (second,) = llm.generate(turn, SamplingParams(temperature=0.0, max_tokens=12))
        assert second.stats.num_cached_tokens == len(prompt) + end
        assert second.token_ids == reference(turn, 12, llm.eos_ids)


# -- stop strings ------------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopSTOPQ"


@functools.cache
def speller() -> LLM:
    """A model whose tokenizer has one token per letter."""
    from tokenizers import decoders

    tokenizer = of_words(["<s>", *dict.fromkeys(LETTERS)], decoders.Fuse(), bos_token="<s>")
    return LLM.of(oracles.tiny("llama", vocab_size=len(tokenizer)), tokenizer, reuse_prefix=False)


def says(said: str, most: int, stop: list[str], script: Callable[[str, int], list[str]], K: int, **more: Any) -> Any:
    """An answer spelled letter by letter, streamed with drafts that are written as strings; the pieces and the whole.

    `script` is given the text so far and K.
    """
    llm = speller()
    tokenizer = llm.tokenizer
    spelled = tokenizer.convert_tokens_to_ids
    llm.target = Says(spelled(list(said)), 2, len(tokenizer))  # type: ignore[assignment]

    def drafts(ids: list[int]) -> list[list[int]]:
        return [spelled(list(path)) for path in script(tokenizer.decode(ids[2:]), K)]

    stream = llm.stream(
        [1, 2],
        SamplingParams(temperature=0.0, max_tokens=most, stop=stop, **more),
        speculative_config={"method": ScriptedTree(drafts), "num_speculative_tokens": K},
    )
    return list(stream), stream.output


TEXT = "abcSTOPdefghijklmnop"


@pytest.mark.parametrize("K", range(13))
@pytest.mark.parametrize(
    ("said", "stop", "found", "left"),
    [
        (TEXT, ["STOP"], "STOP", "abc"),
        (TEXT, ["STOP", "cS"], "cS", "ab"),  # the earlier end, though listed later
        (TEXT, ["cSTOPd", "TO"], "TO", "abcS"),  # the earlier end, though it begins later
        (TEXT, ["S"], "S", "abc"),
        (TEXT, ["a"], "a", ""),
        ("abSTSTOPcdefghijklmno", ["STOP"], "STOP", "abST"),
        (TEXT, ["STOPS"], None, TEXT),
    ],
)
def test_sglang_23802_through_the_loop(K: int, said: str, stop: list[str], found: str | None, left: str) -> None:
    """A stop string anywhere in a block, or across two: the same end for every size of block, and none of it shown."""
    ids = len(said) if found is None else said.index(found) + len(found)
    pieces, output = says(said, len(said), stop, lambda text, K: [said[len(text) :][:K]], K)
    assert output.text == "".join(piece.text for piece in pieces) == left
    assert len(output.token_ids) == len(output.from_draft) == sum(len(piece.token_ids) for piece in pieces) == ids
    assert (output.finish_reason, output.stop_reason) == ("length" if found is None else "stop", found)
    assert output.stats.num_target_passes == -(-ids // (K + 1))


@pytest.mark.parametrize("K", [1, 4, 8])
def test_sglang_23802_a_stop_string_in_a_rejected_draft_ends_nothing(K: int) -> None:
    """Beside the right path, in front of it and behind its end."""
    said = "abcdefghijklmnop"

    def script(text: str, K: int) -> list[str]:
        right = said[len(text) :][:K]
        return ["STOP"[:K], right[:2] + "STOP", right[:-1] + "QSTOP"]

    pieces, output = says(said, len(said), ["STOP", "Q"], script, K)
    assert output.text == "".join(piece.text for piece in pieces) == said
    assert output.finish_reason == "length"


@pytest.mark.parametrize("K", range(6))
def test_sglang_23802_a_stop_string_inside_one_token(llm: LLM, tokenizer: Any, K: int, monkeypatch: Any) -> None:
    text = "def add(a, b):\n    return a + b\n"
    ids = tokenizer(text).input_ids
    at = next(i for i, token in enumerate(ids) if ")" in tokenizer.decode([token]))
    assert len(tokenizer.decode([ids[at]])) > 1
    monkeypatch.setattr(llm, "target", Says(ids, 1, len(tokenizer)))
    script = ScriptedTree(lambda so_far: [ids[len(so_far) - 1 :][:K]])
    for include, left in ((False, "def add(a, b"), (True, "def add(a, b)")):
        params = SamplingParams(temperature=0.0, max_tokens=30, stop=[")"], include_stop_str_in_output=include)
        (output,) = llm.generate([5], params, speculative_config={"method": script, "num_speculative_tokens": K})
        assert (output.text, output.stop_reason, output.token_ids) == (left, ")", ids[: at + 1])


# -- as many tokens as asked for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "K"), [("ngram", 1), ("ngram", 3), ("ngram", 8), ("draft_model", 1), ("draft_model", 5)]
)
def test_transformers_46993_usage_and_stream(llm: LLM, tiny_draft: Path, reference: Any, method: str, K: int) -> None:
    """The ids, the usage and what was streamed agree for every limit, and the figures count what was emitted."""
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method == "draft_model":
        config |= {"model": str(tiny_draft), "tree_top_k": 1 + K % 2}
    for max_new in (1, 2, 3, 5, 8, 12):
        stream = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=max_new), speculative_config=config)
        shown = [token for piece in stream for token in piece.token_ids]
        output = stream.output
        assert shown == output.token_ids == reference(prompt, 12)[:max_new]
        assert output.usage == {"prompt_tokens": 10, "completion_tokens": max_new}
        assert output.finish_reason == "length"
        assert output.stats.num_accepted_tokens + output.stats.num_target_passes == max_new
        assert len(output.from_draft) == max_new


# -- degenerate limits -------------------------------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [{"method": "ngram"}, {"method": "draft_model"}]


@pytest.fixture(params=CONFIGS, ids=lambda config: config["method"])
def config(request: pytest.FixtureRequest, tiny_draft: Path) -> dict[str, Any]:
    given = dict(request.param)
    return {**given, "model": str(tiny_draft)} if given["method"] == "draft_model" else given


def test_mlxlm_1591_depths_of_none_one_and_more_than_there_is_to_say(
    llm: LLM, reference: Any, config: dict[str, Any]
) -> None:
    prompt = [4, 5, 6, 4, 5, 6, 4]
    for K, max_new in itertools.product((0, 1, 50), (0, 1, 2, 7)):
        (output,) = llm.generate(
            prompt,
            SamplingParams(temperature=0.0, max_tokens=max_new),
            speculative_config={**config, "num_speculative_tokens": K},
        )
        assert (output.token_ids, output.finish_reason) == (reference(prompt, 7)[:max_new], "length")
        assert (output.stats.num_draft_tokens > 0) == (K > 0 and max_new > 1)


@pytest.mark.parametrize("bad", [-1, -8])
def test_mlxlm_1591_negative_limits_are_refused(llm: LLM, config: dict[str, Any], bad: int) -> None:
    for setting in ("num_speculative_tokens", "num_draft_tokens"):
        with pytest.raises(ValueError, match=f"{setting}={bad} was given"):
            llm.generate([3], speculative_config={**config, setting: bad})
    with pytest.raises(ValueError, match=f"max_tokens is {bad}; 0 or more"):
        SamplingParams(max_tokens=bad)


def test_mlxlm_1591_no_limit_runs_to_the_end_of_text_or_of_the_context(
    tiny_model: Path, reference: Any, config: dict[str, Any]
) -> None:
    prompt = [4, 5, 6, 4, 5]
    short = LLM(tiny_model, config, max_model_len=40, threads=1)
    ids = reference(prompt, 35)
    (output,) = short.generate(prompt, SamplingParams(temperature=0.0))
    assert (output.token_ids, output.finish_reason) == (ids, "length")
    end = next(i for i in range(5, 35) if ids[i] not in ids[:i])
    short.eos_ids = frozenset({ids[end]})
    (output,) = short.generate(prompt, SamplingParams(temperature=0.0))
    assert (output.token_ids, output.finish_reason) == (ids[: end + 1], "stop")


def test_mlxlm_1591_without_an_end_id(tiny_model: Path, reference: Any, config: dict[str, Any]) -> None:
    """Neither the model nor its tokenizer has an end or a padding id, and look-ups match."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    for holder in (model.config, model.generation_config):
        holder.eos_token_id = holder.pad_token_id = None
    tokenizer.eos_token = tokenizer.pad_token = None
    if config["method"] == "draft_model":
        config["model"] = AutoModelForCausalLM.from_pretrained(config["model"])
    bare = LLM.of(model, tokenizer, config)
    assert bare.eos_ids == frozenset()
    outputs = bare.generate([[4, 4, 4], [5, 6, 5, 6]], SamplingParams(temperature=0.0, max_tokens=15))
    assert [output.token_ids for output in outputs] == [reference([4, 4, 4], 15), reference([5, 6, 5, 6], 15)]
    assert sum(output.stats.num_draft_tokens for output in outputs) > 0


# -- whole characters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", range(6))
def test_sglang_34740_through_the_loop(llm: LLM, tokenizer: Any, monkeypatch: Any, K: int) -> None:
    """Characters of several tokens, split by blocks in every way: no piece ends inside one, and nothing is lost."""
    ids = tokenizer("né 🎉🔥 漢字 ∑ done").input_ids
    monkeypatch.setattr(llm, "target", Says(ids, 1, len(tokenizer)))
    script = ScriptedTree(lambda so_far: [ids[len(so_far) - 1 :][: K - len(so_far) % 2], [5] * K])
    config = {"method": script, "num_speculative_tokens": K}
    for most in (*range(2, len(ids), 4), len(ids)):
        stream = llm.stream([5], SamplingParams(temperature=0.0, max_tokens=most), speculative_config=config)
        pieces = [piece.text for piece in stream]
        assert "".join(pieces) == stream.output.text == tokenizer.decode(ids[:most])
        assert "\ufffd" not in "".join(pieces[:-1])  # the limit alone may cut a character: then what there is is shown


def test_sglang_34740_a_bad_byte_in_a_stream(llm: LLM, tokenizer: Any, monkeypatch: Any) -> None:
    bad = tokenizer("é").input_ids[0]
    ids = [*tokenizer("x = ").input_ids, bad, *tokenizer("the quick brown fox " * 10).input_ids]
    monkeypatch.setattr(llm, "target", Says(ids, 1, len(tokenizer)))
    script = ScriptedTree(lambda so_far: [ids[len(so_far) - 1 :][:2]])
    stream = llm.stream(
        [5], SamplingParams(temperature=0.0, max_tokens=len(ids)), speculative_config={"method": script}
    )
    pieces = [piece.text for piece in stream]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(not piece for piece in pieces) <= 2


# -- the end of the context --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "K"), [(1, 2), (3, 8)])
def test_exllamav2_274_neither_model_reads_beyond_the_context(top_k: int, K: int) -> None:
    """Prompts of 56 to 64 tokens, target and draft with a context of 64: ids and reasons of plain decoding."""
    prompts = [prompt_of(length) for length in range(56, 65)]
    draft = Spy(HFTarget(oracles.tiny("llama", 0, max_position_embeddings=64)))
    inner = DraftModel(draft, tree_top_k=top_k, depth=K)
    for settings in ({"max_tokens": 100}, {}) if K == 2 else ({},):
        spy = Spy(oracles.target(limit=64))
        plain = decode(oracles.target(limit=64), prompts, **settings)
        for begin in range(0, 9, 3):
            rows = decode(spy, prompts[begin : begin + 3], inner, depth=K, **settings)
            for row, alone, prompt in zip(rows, plain[begin:], prompts[begin:]):
                assert row.output_ids == alone.output_ids == answer(prompt, 8, limit=64).ids[: 64 - len(prompt)]
                assert (row.finish_reason, row.error) == (alone.finish_reason, alone.error) == ("length", None)
        assert max(spy.furthest, draft.furthest) < 64
    read = len(spy.positions), len(draft.positions)
    with pytest.raises(BadRequest, match="65 tokens, the context holds 64"):
        decode(spy, [prompt_of(65)], inner, depth=K)
    assert (len(spy.positions), len(draft.positions)) == read


@pytest.mark.parametrize("limit", [64, 1024])
def test_exllamav2_274_through_the_library(
    tiny_model: Path, reference: Any, config: dict[str, Any], limit: int
) -> None:
    """A limit of the caller's, and the model's own: what is left of it is what plain decoding gets, and no more."""
    llm = LLM(tiny_model, config, max_model_len=limit, threads=1)
    for length in (limit - 7, limit - 1, limit):
        prompt = [3 + i % 50 for i in range(length)]
        for most in (None, 100) if limit == 64 else (None,):
            params = SamplingParams(temperature=0.0, max_tokens=most)
            (fast,), (plain,) = llm.generate(prompt, params), llm.generate(prompt, params, speculative_config=None)
            assert (fast.token_ids, fast.finish_reason) == (plain.token_ids, plain.finish_reason)
            assert (len(fast.token_ids), fast.finish_reason) == (limit - length, "length")
        if limit == 64:
            assert fast.token_ids == reference(prompt, limit - length)
    with pytest.raises(ValueError, match=f"{limit + 1} tokens, the context holds {limit}"):
        llm.generate([3] * (limit + 1))


# -- figures -----------------------------------------------------------------------------------------------------------


def test_sglang_11572_rates_are_pooled() -> None:
    """1 of 2 and 9 of 10 are 10 of 12, not the mean of two rates; without a draft there is no rate."""
    few, many, none = Stats(), Stats(), Stats()
    few.record(2, 2, 1)
    many.record(5, 5, 5)
    many.record(5, 5, 4)
    none.record(0, 0, 0)
    assert few.draft_acceptance_rate == 0.5
    assert many.draft_acceptance_rate == 0.9
    assert none.draft_acceptance_rate is None
    assert combined([few, many, none]).draft_acceptance_rate == 10 / 12
    assert combined([few, many, none]).mean_acceptance_length == 14 / 4
    assert combined([none]).draft_acceptance_rate is None
