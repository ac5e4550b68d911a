"""Settings: what is refused and in which words, and what a model's own file is taken to say."""

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracles import tiny
from transformers import GenerationConfig, LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper

from paceline.errors import BadRequest, ModelNotFound
from paceline.params import SamplingParams

# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'; a number"),
        ({"temperature": True}, "temperature is True; a number"),
        ({"top_p": 0.0}, "top_p is 0.0; a finite number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2; -1 or more"),
        ({"top_k": 2.0}, "top_k is 2.0; a whole number"),
        ({"top_k": True}, "top_k is True; a whole number"),
        ({"min_p": -0.1}, "min_p is -0.1; a finite number of at least 0 and at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; a finite number is needed"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; a finite number above 0"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] is nan"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\] is inf; a finite number, or -inf"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias holds '1'; token ids are whole numbers"),
        ({"logit_bias": [1]}, "a mapping from token id"),
        ({"stop_token_ids": "12"}, "a list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"max_tokens": -1}, "max_tokens is -1; 0 or more"),
        ({"max_tokens": 1.0}, "a whole number"),
        ({"seed": 1.5}, "seed is 1.5; a whole number"),
        ({"temprature": 1.0}, "unknown sampling setting 'temprature'; did you mean 'temperature'"),
        ({"max_new_tokens": 5}, "did you mean 'max_tokens'"),
        ({"ignore_eso": True}, "did you mean 'ignore_eos'"),
        ({"n": 0}, "n is 0; 1 or more"),
        ({"n": True}, "n is True; a whole number"),
        ({"stop": 5}, "stop is 5; a list of strings"),
        ({"stop": ""}, "stop holds ''; strings of at least one character"),
        ({"stop": ["a", ""]}, "stop holds ''"),
        ({"stop": ["a", 3]}, "stop holds 3"),
        ({"stop": b"ab"}, "stop is b'ab'"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1; True or False"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes'; True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None; True or False"),
        ({"min_tokens": -1}, "min_tokens is -1; 0 or more"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens, 4"),
        ({"bad_words": "word"}, "bad_words is 'word'; a list of strings or of lists of token ids"),
        ({"bad_words": [""]}, "bad_words holds ''"),
        ({"bad_words": [[]]}, "a list without token ids"),
        ({"bad_words": [5]}, r"bad_words holds 5; strings or lists of token ids are needed, such as \[\[5\]\]"),
        ({"bad_words": [[1, -2]]}, "bad_words holds -2; token ids are whole numbers"),
        ({"bad_words": [[1.5]]}, "bad_words holds 1.5"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty, which leaves no token"),
        ({"allowed_token_ids": 3}, "allowed_token_ids is 3; a list of token ids"),
        ({"allowed_token_ids": ["3"]}, "allowed_token_ids holds '3'"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1; 0 or more"),
        ({"no_repeat_ngram_size": 2.0}, "no_repeat_ngram_size is 2.0; a whole number"),
        ({"logprobs": -2}, "logprobs is -2; -1 or more"),
        ({"logprobs": True}, "logprobs is True; a whole number"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs is 1.5; a whole number"),
        ({"logits_processors": max}, "logits_processors is <built-in function max>; a list of functions"),
        ({"logits_processors": [3]}, "logits_processors holds 3; a transformers.LogitsProcessor object or a function"),
        ({"logits_processors": [TopKLogitsWarper]}, "TopKLogitsWarper'>; a transformers.LogitsProcessor object"),
    ],
)
def test_impossible_settings_are_refused_in_words(given: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        SamplingParams(**given)  # type: ignore[arg-type]


def test_settings_without_names_are_refused() -> None:
    with pytest.raises(BadRequest, match="without a name"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_settings_at_their_edges_are_taken() -> None:
    params = SamplingParams(
        temperature=0, top_k=-1, top_p=1, min_p=1, logit_bias={3: -math.inf, 4: 1}, max_tokens=0, seed=-1
    )
    assert params.is_greedy
    assert params.seed == 2**64 - 1
    assert params.logit_bias == {3: -math.inf, 4: 1.0}
    assert SamplingParams(seed=2**64 + 5).seed == 5
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=2e-5).is_greedy
    assert SamplingParams(presence_penalty=1e9).presence_penalty == 1e9
    assert pickle.loads(pickle.dumps(params)) == params
    assert replace(params, top_k=5).top_k == 5
    with pytest.raises(BadRequest):
        replace(params, top_p=2.0)


def test_settings_are_stored_as_plain_values() -> None:
    params = SamplingParams(
        stop="end", bad_words=["word", [3, 4], (5,)], allowed_token_ids=[7, 8], logprobs=0, prompt_logprobs=-1
    )
    assert params.stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert params.bad_words == ("word", (3, 4), (5,))
    assert params.allowed_token_ids == (7, 8)
    assert (params.logprobs, params.prompt_logprobs) == (0, -1)
    assert hash(params) == hash(replace(params, stop=["end"]))
    assert replace(params, n=3) != params
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_list_of_processors_is_taken_apart() -> None:
    first, second = TopKLogitsWarper(3), MinPLogitsWarper(0.1)
    assert SamplingParams(logits_processors=LogitsProcessorList([first, second])).logits_processors == (first, second)
    assert SamplingParams(logits_processors=[LogitsProcessorList([first])]).logits_processors == ([first],)


def test_defaults_are_those_of_vllm() -> None:
    """Published in its documentation; but for max_tokens, 16 there, and lists, None there."""
    params = SamplingParams()
    expected = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "ignore_eos": False, "min_tokens": 0, "logprobs": None,
        "prompt_logprobs": None, "include_stop_str_in_output": False, "skip_special_tokens": True, "logit_bias": None,
        "allowed_token_ids": None,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.stop == params.stop_token_ids == params.bad_words == params.logits_processors == ()


# -- what a model's file recommends ------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a generation_config.json that says this."""

    def write(**content: Any) -> Path:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "5.0.0"}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "num_return_sequences": 2}, {"top_k": 50, "n": 2}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1}, {"temperature": 1.0, "top_k": 0, "min_p": 0.1}),
        (
            {"max_new_tokens": 30, "min_new_tokens": 4, "no_repeat_ngram_size": 3},
            {"temperature": 0.0, "max_tokens": 30, "min_tokens": 4, "no_repeat_ngram_size": 3},
        ),
        (
            {"bad_words_ids": [[5], [6, 7], [2]], "eos_token_id": 2},  # transformers drops a banned end id
            {"temperature": 0.0, "bad_words": ((5,), (6, 7))},
        ),
        (
            {"sequence_bias": [[[5], 1.5], [[6], -2.0]], "suppress_tokens": [7, 6]},
            {"temperature": 0.0, "logit_bias": {5: 1.5, 6: -math.inf, 7: -math.inf}},
        ),
        ({"stop_strings": ["END"]}, {"temperature": 0.0, "stop": ("END",), "include_stop_str_in_output": True}),
        ({"stop_strings": "END"}, {"temperature": 0.0, "stop": ("END",), "include_stop_str_in_output": True}),
        ({"presence_penalty": 1.5}, {"temperature": 0.0, "presence_penalty": 1.5}),
        # set, and without effect on the text
        (
            {
                "num_beams": 1,
                "typical_p": 0.5,
                "top_h": 0.4,
                "length_penalty": 2.0,
                "guidance_scale": 1.0,
                "use_cache": True,
            },
            {"temperature": 0.0},
        ),
        ({"do_sample": True, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}, {"top_k": 50}),
    ],
)
def test_a_model_recommends_what_its_file_says(
    model: Callable[..., Path], content: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert SamplingParams.from_model(model(**content)) == SamplingParams(**expected)


def test_the_default_top_k_is_that_of_transformers() -> None:
    defaults = GenerationConfig._get_default_generation_params()
    assert SamplingParams.from_model(GenerationConfig(do_sample=True)).top_k == defaults["top_k"]
    for name in ("temperature", "top_p", "repetition_penalty", "no_repeat_ngram_size"):
        assert getattr(SamplingParams(), name) == defaults[name]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"num_beams": 4}, "num_beams 4"),
        ({"num_beam_groups": 2}, "num_beam_groups 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha 0.6"),
        ({"dola_layers": "low"}, "dola_layers 'low'"),
        ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty 1.2"),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size 3"),
        ({"guidance_scale": 1.5}, "guidance_scale 1.5"),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id 0"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id 2"),
        ({"begin_suppress_tokens": [1]}, r"begin_suppress_tokens \[1\]"),
        ({"exponential_decay_length_penalty": [5, 1.1]}, "exponential_decay_length_penalty"),
        ({"remove_invalid_values": True}, "remove_invalid_values True"),
        ({"watermarking_config": {"bias": 2.0}}, "watermarking_config"),
        ({"token_healing": True}, "token_healing True"),
        ({"max_time": 3.0}, "max_time 3.0"),
        ({"do_sample": True, "typical_p": 0.9}, "typical_p 0.9"),
        ({"do_sample": True, "epsilon_cutoff": 0.1}, "epsilon_cutoff 0.1"),
        ({"do_sample": True, "eta_cutoff": 0.1, "top_h": 0.5}, "eta_cutoff 0.1, top_h 0.5"),
        ({"sequence_bias": [[[5, 6], 1.5]]}, r"a sequence_bias for \[5, 6\]"),
        ({"max_length": 4096}, "max_length 4096, which counts the prompt too; .*: max_tokens=..."),
        ({"min_length": 10}, "min_length 10, .*: min_tokens=..."),
    ],
)
def test_a_recommendation_that_would_be_lost_is_refused_by_name(
    model: Callable[..., Path], content: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadRequest, match=named):
        SamplingParams.from_model(model(**content))


def test_changes_win(model: Callable[..., Path]) -> None:
    folder = model(do_sample=True, temperature=0.7, top_k=20, logit_bias=None, suppress_tokens=[1], max_length=99)
    params = SamplingParams.from_model(folder, temperature=0.2, logit_bias={5: 1.0}, seed=3, max_tokens=None)
    assert params == SamplingParams(temperature=0.2, top_k=20, logit_bias={5: 1.0}, seed=3)
    # a temperature turns sampling on and off, as do_sample does
    folder = model(temperature=0.7, top_p=0.9, typical_p=0.5)
    with pytest.raises(BadRequest, match=r"typical_p 0\.5"):
        SamplingParams.from_model(folder, temperature=0.4)
    assert SamplingParams.from_model(model(do_sample=True, typical_p=0.5), temperature=0).is_greedy
    assert SamplingParams.from_model(model(top_p=0.9), temperature=0.4) == SamplingParams(
        temperature=0.4, top_p=0.9, top_k=50
    )
    with pytest.raises(BadRequest, match="unknown sampling setting 'temprature'"):
        SamplingParams.from_model(folder, temprature=0.4)
    with pytest.raises(BadRequest, match="min_tokens is 4, more than max_tokens, 2"):
        SamplingParams.from_model(model(min_new_tokens=4), max_tokens=2)


def test_everything_that_stands_for_a_model_is_taken(model: Callable[..., Path]) -> None:
    folder = model(do_sample=True, top_p=0.5)
    expected = SamplingParams(top_k=50, top_p=0.5)
    config = GenerationConfig.from_pretrained(folder)
    loaded = tiny("llama")
    loaded.generation_config = config
    for one in (folder, str(folder), config, loaded, SimpleNamespace(generation_config=config)):
        assert SamplingParams.from_model(one) == expected
    for nothing in (None, 5, SimpleNamespace(generation_config=None), object()):
        with pytest.raises(BadRequest, match="has no generation_config; an LLM, a transformers model"):
            SamplingParams.from_model(nothing)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no generation_config.json that can be read"):
        SamplingParams.from_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelNotFound, match="not a valid JSON"):
        SamplingParams.from_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": -1}')
    with pytest.raises(BadRequest, match="is not valid: `max_new_tokens` must be greater than 0"):
        SamplingParams.from_model(tmp_path)
