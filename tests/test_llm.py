"""What users hold: shapes of answers, refusals before any work, seeds, streams."""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from oracles import named
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import LLM, BadRequest, RequestOutput, SamplingParams, UnsupportedModel
from paceline.draft import SpeculativeConfig
from paceline.draft.base import NoDraft
from paceline.output import Piece
from paceline.testing import ScriptedTree

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
NGRAM = {"method": "ngram"}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, threads=1)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tokenizer: Any) -> Callable[..., list[int]]:
    """Prompt and settings -> ids, by the unmodified model without a cache."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager", dtype=torch.float32).eval()

    def ids_of(prompt: Any, max_new: int = 12, **settings: Any) -> list[int]:
        ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        return oracles.reference(model, ids, max_new, SamplingParams(**{"temperature": 0.0, **settings})).ids

    return ids_of


@pytest.fixture
def forwards(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the target's passes, for tests that must not see any."""
    widths: list[int] = []
    inner = llm.target.forward

    def counted(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append(tokens.shape[1])
        return inner(tokens, *args, **kwargs)

    monkeypatch.setattr(llm.target, "forward", counted)
    return widths


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["def add(a, b):", [3, 4, 5]])
def test_one_prompt_is_a_list_of_one(llm: LLM, tokenizer: Any, reference: Any, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY)
    assert isinstance(output, RequestOutput)
    assert output.token_ids == reference(prompt)
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert output.prompt_token_ids == (tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt)
    assert output.usage == {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": 12}
    assert (output.finish_reason, output.stop_reason, output.error) == ("length", None, None)
    assert len(output.from_draft) == 12
    assert output.stats.num_target_passes + output.stats.num_accepted_tokens == 12


def test_prompts_and_settings_in_order(llm: LLM, reference: Any) -> None:
    prompts = ["the quick", [5], "def add(a, b):\n    return", [7, 8, 9, 7, 8]]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 12, 1, 7)]
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [reference(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [reference(p) for p in prompts]


def test_more_prompts_than_rows(tiny_model: Path, llm: LLM) -> None:
    few = LLM(tiny_model, max_num_seqs=2, threads=1)
    prompts = [[i, i + 1, i] for i in range(3, 8)]
    assert [o.token_ids for o in few.generate(prompts, GREEDY)] == [o.token_ids for o in llm.generate(prompts, GREEDY)]


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    with pytest.raises(BadRequest, match="the prompt is empty"):
        llm.stream([], GREEDY)


def test_defaults_are_sampling_up_to_the_context(tiny_model: Path) -> None:
    short = LLM(tiny_model, max_model_len=20, threads=1)
    (output,) = short.generate([3, 4, 5, 6])
    assert len(output.token_ids) == 16
    assert output.finish_reason == "length"
    with pytest.raises(BadRequest, match="21 tokens, the context holds 20"):
        short.generate([3] * 21)
    with pytest.raises(BadRequest, match=r"max_model_len=5000 was given; the model's context is 1024"):
        LLM(tiny_model, max_model_len=5000, threads=1)


def test_mlxlm_1591_zero_tokens(llm: LLM, forwards: list[int]) -> None:
    for config in (None, NGRAM):
        none = SamplingParams(max_tokens=0)
        (output,) = llm.generate("the", none, speculative_config=config)
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        pieces = list(llm.stream("the", none, speculative_config=config))
        assert "".join(piece.text for piece in pieces) == ""
        assert [piece.finish_reason for piece in pieces] == ["length"]
    assert not forwards


def test_chat_is_generate_behind_the_template(llm: LLM, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "add two numbers"}]
    text = "<|im_start|>user\nadd two numbers<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat_ids(messages) == tokenizer(text).input_ids
    output = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == tokenizer(text).input_ids
    assert output.token_ids == llm.generate(text, GREEDY)[0].token_ids


def test_a_model_without_a_template_says_so(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    bare = AutoTokenizer.from_pretrained(tiny_model)
    bare.chat_template = None
    with pytest.raises(BadRequest, match="Qwen2ForCausalLM has no chat template; give the whole prompt to generate"):
        LLM.of(model, bare).chat([{"role": "user", "content": "hi"}])


def test_half_characters_are_refused_wherever_text_is_given(llm: LLM) -> None:
    for call in (
        lambda: llm.generate(["a\ud800b"], GREEDY),
        lambda: llm.generate(["the"], SamplingParams(max_tokens=3, bad_words=["a\ud800b"])),
        lambda: llm.chat([{"role": "user", "content": "a\ud800b"}], GREEDY),
        lambda: llm.chat([{"role": "a\ud800b", "content": "hello"}], GREEDY),
    ):
        with pytest.raises(BadRequest, match="is no text"):
            call()


# -- speculative_config ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"method": "none"},
        NGRAM,
        {"method": "auto"},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_draft_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": 1},
        {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_draft_tokens": 5},
        {"method": "ngram", "rejection_sample_method": "standard"},
        {"method": "ngram", "rejection_sample_method": "block"},
        SpeculativeConfig(method=ScriptedTree(lambda ids: [[1, 2], [3]])),
    ],
    ids=named,
)
def test_every_setting_of_a_call_gives_the_same_greedy_text(llm: LLM, reference: Any, config: Any) -> None:
    prompt = [4, 5, 6, 7, 4, 5, 6]
    (output,) = llm.generate(prompt, GREEDY, speculative_config=config)
    assert output.token_ids == reference(prompt)


def test_a_call_drafts_as_deep_as_it_says(llm: LLM, forwards: list[int]) -> None:
    """A depth of the call overrides the model's, and K = 0 is plain decoding: passes of one row, no drafted token."""
    everything = ScriptedTree(lambda ids: [[5] * 30])
    for depth in (1, 5):
        forwards.clear()
        config = {"method": everything, "num_speculative_tokens": depth}
        llm.generate([3, 4], SamplingParams(temperature=0.0, max_tokens=20), speculative_config=config)
        assert max(forwards) == 1 + depth
    forwards.clear()
    (plain,) = llm.generate([3, 4], GREEDY, speculative_config={**NGRAM, "num_speculative_tokens": 0})
    assert set(forwards) == {1}
    assert plain.stats.num_draft_tokens == 0
    assert plain.stats.draft_acceptance_rate is None


def test_the_models_own_setting_holds_when_a_call_has_none(tiny_model: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    plain = LLM.of(model, tokenizer, None)
    repeating = [4, 4, 4, 4, 4]
    assert plain.generate(repeating, GREEDY)[0].stats.num_draft_tokens == 0
    assert plain.generate(repeating, GREEDY, speculative_config=NGRAM)[0].stats.num_draft_tokens > 0
    assert plain.generate(repeating, GREEDY)[0].stats.num_draft_tokens == 0
    assert plain.generate(repeating, GREEDY, speculative_config={"method": "auto"})[0].stats.num_draft_tokens > 0


def test_transformers_28759_nothing_of_the_caller_is_changed(llm: LLM) -> None:
    config, params = {"method": "ngram", "num_speculative_tokens": 3}, SamplingParams(temperature=0.0, max_tokens=5)
    prompt, before = [3, 4, 3, 4], llm.target.model.generation_config.to_dict()
    llm.generate([prompt], [params], speculative_config=config)
    assert config == {"method": "ngram", "num_speculative_tokens": 3}
    assert prompt == [3, 4, 3, 4]
    assert params == SamplingParams(temperature=0.0, max_tokens=5)
    assert llm.target.model.generation_config.to_dict() == before


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([5] * 1025, "1025 tokens, the context holds 1024"),
        ([[3, True]], "text or a list of token ids"),
        ([[10**6]], "the vocabulary has ids 0 to"),
        ([[-1]], "the vocabulary has ids 0 to"),
        (["", []], "the prompt is empty"),
        (["half \ud83d of one"], "surrogates not allowed"),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_bad_prompts_are_refused_before_any_work(
    llm: LLM, forwards: list[int], prompt: Any, words: str, how: str
) -> None:
    if how == "stream":
        prompt = prompt[-1] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
    with pytest.raises(BadRequest, match=words) as refusal:
        list(getattr(llm, how)(prompt, GREEDY))
    assert isinstance(refusal.value, ValueError)
    assert not forwards


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([10**6], "the vocabulary has ids 0 to"),
        ("", "the prompt is empty"),
        ("half \ud83d of one", "surrogates not allowed"),
        ([5] * 1025, "1025 tokens, the context holds 1024"),
    ],
    ids=ascii,
)
def test_a_bad_prompt_among_good_ones_fails_alone(llm: LLM, reference: Any, bad: Any, words: str) -> None:
    good, failed, last = llm.generate(["the quick", bad, [7, 8, 9]], GREEDY)
    assert (failed.finish_reason, failed.token_ids, failed.text) == ("error", [], "")
    assert words in (failed.error or "")
    assert (good.token_ids, last.token_ids) == (reference("the quick"), reference([7, 8, 9]))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "ngrams"}, "no method 'ngrams'; did you mean 'ngram'"),
        ({"method": "eagle"}, "method 'eagle' needs the head: add"),
        ({"methods": "ngram"}, "no key 'methods'; did you mean 'method'"),
        ({"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        (
            {"tree_top_k": 3},
            "tree_top_k is for method 'draft_model' or 'early_exit' or 'medusa' or 'eagle' or 'eagle3', which is none",
        ),
        ({"method": "draft_model"}, "'draft_model' needs the draft model"),
        ({"method": "draft_model", "model": "x", "tree_top_k": 0}, "tree_top_k=0 was given; a whole number from 1 up"),
        ({"method": "draft_model", "model": "x", "tree_depth": 2, "num_speculative_tokens": 3}, "give one"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"num_draft_tokens": -5}, "num_draft_tokens=-5"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "1 <= min <= max"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "1 <= min <= max"),
        ({"rejection_sample_method": "blocks"}, "did you mean 'block'"),
        ({"method": "draft_model", "model": [5]}, "a name, a path or a model object is needed"),
        ({"method": "suffix", "corpus": "a\0b"}, "cannot open the corpus"),
        ({"method": "suffix", "corpus": "a\ud800b"}, "cannot open the corpus"),
    ],
    ids=named,
)
def test_bad_configs_are_refused_by_calls_and_by_loading(
    llm: LLM, tiny_model: Path, forwards: list[int], config: Any, words: str
) -> None:
    for call in (
        lambda: llm.generate("the", GREEDY, speculative_config=config),
        lambda: llm.stream("the", GREEDY, speculative_config=config),
        lambda: LLM(tiny_model, config, threads=1),
    ):
        with pytest.raises(BadRequest, match=words):
            call()
    assert not forwards


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([GREEDY] * 3, "3 SamplingParams for 2 prompts"),
        ([], "0 SamplingParams for 2 prompts"),
        (SamplingParams(logit_bias={999: 1.0}), "the vocabulary has ids 0 to"),
        (SamplingParams(stop_token_ids=[999]), "the vocabulary has ids 0 to"),
    ],
    ids=["three", "none", "bias", "stop"],
)
def test_bad_params_are_refused_before_any_work(llm: LLM, forwards: list[int], params: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        llm.generate(["the", "fox"], params)
    assert not forwards


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": math.nan},
        {"min_p": -1},
        {"top_k": -2},
        {"top_k": 1.5},
        {"presence_penalty": math.nan},
        {"repetition_penalty": 0.0},
        {"max_tokens": -1},
        {"max_tokens": 2.5},
        {"seed": 1.5},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": [1]},
        {"stop_token_ids": "12"},
        {"stop_token_ids": [-1]},
        {"temprature": 1.0},
    ],
    ids=named,
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(**settings)
    name = next(iter(settings))
    assert ("temperature" if name == "temprature" else name) in str(refusal.value)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "hi"}]], ids=str)
def test_bad_messages_are_refused(llm: LLM, forwards: list[int], messages: Any) -> None:
    with pytest.raises(BadRequest, match=r"messages are .*a list of"):
        llm.chat(messages, GREEDY)
    assert not forwards


WRONG_TYPES: list[tuple[str, Any, str]] = [
    *(("prompts", prompt, "token ids") for prompt in (7, None, [None], [[3, "x"]], [[3.0]], ["a", 3], b"ab", {"a": 1})),
    *(("config", {"method": method}, "method is") for method in (3, None, ["ngram"])),
    *(("config", {"num_speculative_tokens": n}, "a whole number from 0 up") for n in (2.0, "3")),
    ("config", {"num_draft_tokens": None}, "num_draft_tokens=None"),
    *(("config", {"rejection_sample_method": m}, "no rejection_sample_method") for m in (["block"], None)),
    *(("config", config, "a dict such as") for config in ("ngram", 3, True, [("method", "ngram")])),
    ("config", {3: 4}, "no key 3"),
    *(("params", p, "SamplingParams, or a list of them") for p in ({"temperature": 0.0}, [None], ["x"], 3)),
    *(("messages", m, "a list of {'role'") for m in (["hi"], "hi", None)),
    *(("limits", {"threads": t}, "a whole number from 1 up") for t in (1.5, "2", True)),
    ("limits", {"max_num_seqs": None}, "max_num_seqs=None"),
]


def as_a_user(folder: str) -> dict[str, Any]:
    """Runs without the test run's own type checks (which come first, and draw from Python's generator): what users get.

    The answers to wrong types, and whether calls leave the global generators alone.
    """
    model = LLM(folder, threads=1)
    calls: dict[str, Callable[[Any], Any]] = {
        "prompts": lambda given: model.generate(given, GREEDY),
        "config": lambda given: model.generate([3], GREEDY, speculative_config=given),
        "params": lambda given: model.generate([[3]], given),
        "messages": lambda given: model.chat(given, GREEDY),
        "limits": lambda given: LLM(folder, **given),
    }
    answers = []
    for what, given, _ in WRONG_TYPES:
        try:
            answers.append(f"accepted: {calls[what](given)!r}")
        except BadRequest as error:
            answers.append(str(error))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    same = []
    for config in (None, NGRAM, {**NGRAM, "rejection_sample_method": "block"}):
        for seed in (None, 5):
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()
            model.generate([[5, 5, 5], [6]], SamplingParams(max_tokens=6, seed=seed), speculative_config=config)
            after = torch.get_rng_state(), random.getstate(), np.random.get_state()
            same += [torch.equal(before[0], after[0]), before[1] == after[1], str(before[2]) == str(after[2])]
    both = [model.generate(ids, GREEDY)[0].token_ids for ids in ([3, 4, 5], list(np.array([3, 4, 5])))]
    return {"answers": answers, "same": same, "numpy": both}


@pytest.fixture(scope="module")
def users_run(tiny_model: Path) -> dict[str, Any]:
    code = "import json, sys, test_llm; print(json.dumps(test_llm.as_a_user(sys.argv[1])))"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run([sys.executable, "-c", code, tiny_model], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("case", range(len(WRONG_TYPES)), ids=[f"{what}={given}" for what, given, _ in WRONG_TYPES])
def test_wrong_types_are_refused_with_words(users_run: dict[str, Any], case: int) -> None:
    assert WRONG_TYPES[case][2] in users_run["answers"][case]


def test_global_generators_are_left_alone(users_run: dict[str, Any]) -> None:
    assert users_run["same"] == [True] * 18


def test_ids_may_be_numpy_integers(users_run: dict[str, Any], reference: Any) -> None:
    assert users_run["numpy"] == [reference([3, 4, 5])] * 2


@pytest.mark.parametrize("options", [{"max_model_len": 0}, {"max_num_seqs": 0}, {"threads": 0}])
def test_bad_limits_are_refused(tiny_model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=f"{next(iter(options))}=.*a whole number from 1 up"):
        LLM(tiny_model, **options)


# -- randomness --------------------------------------------------------------------------------------------------------


def test_vllm_6038_seeds_repeat_and_differ(llm: LLM, reference: Any) -> None:
    def ids(seed: int | None, prompt: Any = (5, 6, 5), **config: Any) -> list[int]:
        (output,) = llm.generate(
            list(prompt), SamplingParams(max_tokens=12, seed=seed), speculative_config=config or None
        )
        return output.token_ids

    assert ids(1) == ids(1) == ids(1, method="ngram") == reference([5, 6, 5], temperature=1.0, seed=1)
    assert ids(1) != ids(2)
    assert ids(None) != ids(None)
    # the batch [7, none, 9]: seeded rows equal their solo runs
    prompts = [[5, 6, 5], [7, 8], [9, 9, 9, 9]]
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (7, None, 9)]
    outputs = llm.generate(prompts, params, speculative_config=NGRAM)
    assert outputs[0].token_ids == ids(7)
    assert outputs[2].token_ids == ids(9, [9, 9, 9, 9])
    # the seed that was drawn repeats the text
    assert outputs[0].seed == 7
    assert outputs[1].token_ids == ids(outputs[1].seed, [7, 8])


def test_a_row_whose_drafter_is_silent_at_times_equals_its_solo_run(llm: LLM, reference: Any) -> None:
    moody = ScriptedTree(lambda ids: [[5, 6]] if len(ids) % 3 else [])
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (3, 4)]
    outputs = llm.generate([[5, 6, 5], [7]], params, speculative_config={"method": moody})
    assert outputs[0].token_ids == reference([5, 6, 5], temperature=1.0, seed=3)
    assert outputs[1].token_ids == reference([7], temperature=1.0, seed=4)


@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
def test_same_seed_same_text_under_every_rule(llm: LLM, rule: str) -> None:
    config = {"method": "ngram", "rejection_sample_method": rule}
    params = SamplingParams(max_tokens=20, seed=12)
    runs = [llm.generate([4, 5, 4, 5, 4], params, speculative_config=config)[0].token_ids for _ in range(2)]
    assert runs[0] == runs[1]


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, NGRAM, {"method": ScriptedTree(lambda ids: [[7, 8, 9], [10]])}], ids=named)
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"seed": 4}], ids=str)
def test_streams_say_what_generate_says(llm: LLM, config: Any, settings: dict[str, Any]) -> None:
    prompt, params = [4, 5, 6, 4, 5], SamplingParams(max_tokens=40, **settings)
    (whole,) = llm.generate(prompt, params, speculative_config=config)
    stream = llm.stream(prompt, params, speculative_config=config)
    pieces = list(stream)
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.output.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids == stream.output.token_ids
    assert [flag for piece in pieces for flag in piece.from_draft] == whole.from_draft
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert list(stream) == []
    assert all(piece.token_ids for piece in pieces)
    assert len(pieces) == whole.stats.num_target_passes


def test_llamacpp_20_a_stream_closed_early(llm: LLM, reference: Any, forwards: list[int]) -> None:
    prompt = [4, 5, 6, 4, 5]
    for taken in range(1, 6):
        stream = llm.stream(prompt, GREEDY, speculative_config=NGRAM)
        shown = [token for _ in range(taken) for token in next(stream).token_ids]
        stream.close()
        done = len(forwards)
        assert next(stream, None) is None
        assert len(forwards) == done  # nothing is computed any more
        assert shown == reference(prompt)[: len(shown)] == stream.output.token_ids
        assert stream.output.finish_reason == "abort"
        assert llm.generate(prompt, GREEDY)[0].token_ids == reference(prompt)


def test_a_stream_left_by_its_block_is_closed(llm: LLM, forwards: list[int]) -> None:
    with llm.stream([4, 5], GREEDY, speculative_config=None) as stream:
        next(stream)
    done = len(forwards)
    assert list(stream) == []
    assert len(forwards) == done
    unused = llm.stream([4, 5], GREEDY)
    unused.close()
    assert list(unused) == []
    assert unused.output.token_ids == []
    assert unused.output.finish_reason == "abort"


def test_two_streams_side_by_side(llm: LLM, reference: Any) -> None:
    """Their states are their own, though one drafter serves both."""
    streams = [llm.stream(prompt, GREEDY, speculative_config=NGRAM) for prompt in ([4, 5, 4, 5], [9, 9, 9])]
    texts: list[list[int]] = [[], []]
    running = [0, 1]
    while running:
        for i in list(running):
            piece = next(streams[i], None)
            if piece is None:
                running.remove(i)
            else:
                texts[i] += piece.token_ids
    assert texts == [reference([4, 5, 4, 5]), reference([9, 9, 9])]


def test_a_stop_in_a_stream(llm: LLM, reference: Any) -> None:
    ids = reference([4, 5, 6])
    end = ids[5]
    wanted = ids[: ids.index(end) + 1]
    stream = llm.stream([4, 5, 6], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[end]))
    pieces = list(stream)
    assert [token for piece in pieces for token in piece.token_ids] == wanted
    assert pieces[-1].finish_reason == "stop"
    assert stream.output.stop_reason == end


# -- an LLM around objects ---------------------------------------------------------------------------------------------


def test_of_wraps_a_loaded_model(tiny_model: Path, reference: Any) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(BadRequest, match="max_num_seqs=0"):
        LLM.of(model, tokenizer, max_num_seqs=0)
    wrapped = LLM.of(model, tokenizer, {"method": "ngram"}, max_model_len=30)
    assert wrapped.generate([3, 4, 3], GREEDY)[0].token_ids == reference([3, 4, 3])
    assert wrapped.source.name == "Qwen2ForCausalLM"
    with pytest.raises(BadRequest, match="31 tokens, the context holds 30"):
        wrapped.generate([3] * 31)


def test_mlxlm_846_recurrent_state_is_refused_before_the_first_token(tiny_model: Path) -> None:
    from test_target import refused

    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        LLM.of(refused("mamba"), AutoTokenizer.from_pretrained(tiny_model))


def test_the_end_of_text_comes_from_the_model(tiny_model: Path, reference: Any) -> None:
    """generation_config first, one id or several; then the config, then the tokenizer."""
    ids = reference([4, 5, 6])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for given in (ids[3], [ids[3], 319]):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.generation_config.eos_token_id = given
        (output,) = LLM.of(model, tokenizer).generate([4, 5, 6], GREEDY)
        assert output.token_ids == ids[: ids.index(ids[3]) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = ids[4]
    assert LLM.of(model, tokenizer).eos_ids == {ids[4]}
    model.config.eos_token_id = None
    assert LLM.of(model, tokenizer).eos_ids == {tokenizer.eos_token_id}
    tokenizer.eos_token = None
    bare = LLM.of(model, tokenizer, NGRAM)
    assert bare.eos_ids == frozenset()
    assert len(bare.generate([4, 4, 4], SamplingParams(temperature=0.0, max_tokens=15))[0].token_ids) == 15


def test_drafters_are_bound_once(tiny_model: Path) -> None:
    class Counted(ScriptedTree):
        bound = 0

        def bind(self, target: Any) -> None:
            self.bound += 1

    drafter = Counted(lambda ids: [])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    wrapped = LLM.of(model, tokenizer, {"method": drafter})
    for _ in range(3):
        wrapped.generate([3], GREEDY)
    wrapped.generate([3], GREEDY, speculative_config={"method": drafter})
    assert drafter.bound == 1
    assert isinstance(SpeculativeConfig.read(None).drafter(), NoDraft)
