"""Every sampling parameter under every method: equal to the loop without a cache, and the table that says so.

The table is written to docs/data/parameters.json by this very run, so the documentation shows what was compared.
"""

import json
import math
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, PreTrainedModel

import paceline
from paceline import LLM, RequestOutput, SamplingParams
from paceline.draft.model import DraftModel
from paceline.target import HFTarget

pytestmark = pytest.mark.slow

TABLE = Path(__file__).parents[1] / "docs" / "data" / "parameters.json"
MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "seed": 21}}
METHODS = ("none", "ngram", "draft_model chain", "draft_model tree")
ROWS = (1, 4)
COLUMNS = [f"{mode} {method} {rows}" for mode in MODES for method in METHODS for rows in ROWS]
LENGTH = 16
PROMPTS = ["def add(a, b):\n    return", "the", "the quick brown fox jumps over the quick", "x = 1\n"]


class Wary(LogitsProcessor):
    """Keeps a state: refuses to be called for a text that does not continue the last one by exactly one token.

    It bans whatever id came up a third time, and 7 once 9 has been written.
    """

    def __init__(self) -> None:
        self.text: list[int] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = input_ids[0].tolist()
        assert self.text is None or text[:-1] == self.text, "a position was left out, seen twice, or given up later"
        self.text = text
        worn = [token for token, count in Counter(text).items() if count > 2]
        return scores.index_fill(1, torch.tensor([*worn, 7] if 9 in text else worn, dtype=torch.int64), -math.inf)


def plain_function(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A callable that is no processor of transformers: pushes the successor of the last id."""
    logits[(ids[-1] + 1) % logits.shape[0]] += 2.0
    return logits


class World:
    """The model as it is, the same as an LLM, its tokenizer, and the drafters."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        size = {"vocab_size": len(self.tokenizer)}
        self.model = oracles.tiny("qwen2", **size)
        self.llm = LLM.of(oracles.tiny("qwen2", **size), self.tokenizer, max_num_seqs=4)
        self._answers: dict[Any, oracles.Answer] = {}
        self.eos = frozenset({self.tokenizer.eos_token_id})
        assert self.llm.eos_ids == self.eos
        self.configs: dict[str, Any] = {
            "none": None,
            "ngram": {"method": "ngram"},
            "draft_model chain": {"method": DraftModel(self._draft())},
            "draft_model tree": {"method": DraftModel(self._draft(), tree_top_k=3)},
        }

    def _draft(self) -> HFTarget:
        """The target with its weights disturbed, so that guesses are often right and often wrong."""
        model = oracles.tiny("qwen2", vocab_size=len(self.tokenizer))
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=noise, dtype=weight.dtype) * 0.15 * weight.std())
        return HFTarget(model)

    def settings(self, name: str, mode: str) -> dict[str, Any]:
        """A value for the parameter that changes the text where it can, or at least matters on the way."""
        chosen = MODES[mode]
        base = self.expected(self.tokenizer(PROMPTS[0]).input_ids, SamplingParams(**chosen), 0)
        sampled = chosen["temperature"] > 0.0
        text, ids = self.decode(base.ids), base.ids
        values: dict[str, Any] = {
            "temperature": {"temperature": 0.6} if sampled else {},
            "top_k": {"top_k": 4},
            "top_p": {"top_p": 0.7},
            "min_p": {"min_p": 0.2},
            "presence_penalty": {"presence_penalty": 9.0},
            "frequency_penalty": {"frequency_penalty": 5.0},
            "repetition_penalty": {"repetition_penalty": 1.8},
            "logit_bias": {"logit_bias": {ids[2]: -math.inf, 17: 6.0, 40: 4.0}},
            "bad_words": {"bad_words": [ids[3:4], ids[5:7], "add"]},
            "allowed_token_ids": {"allowed_token_ids": [*range(3, self.llm.target.vocab_size, 3), ids[1]]},
            "no_repeat_ngram_size": {
                "no_repeat_ngram_size": 2,
                "allowed_token_ids": [*ids[:3], *range(11, self.llm.target.vocab_size, 24)],
            },
            "stop": {"stop": [text[len(text) // 2 : len(text) // 2 + 3], "\n\n", "zzz"]},
            "include_stop_str_in_output": {"stop": [text[9:11]], "include_stop_str_in_output": True},
            "stop_token_ids": {"stop_token_ids": [ids[7]]},
            "ignore_eos": {"ignore_eos": True, "logit_bias": {self.tokenizer.eos_token_id: 30.0}, "top_k": 2},
            "min_tokens": {"min_tokens": 6, "logit_bias": {self.tokenizer.eos_token_id: 30.0}},
            "max_tokens": {"max_tokens": 5},
            "seed": {"seed": 2**63 + 5} if sampled else {},
            "n": {"n": 3, "max_tokens": 9},
            "logprobs": {"logprobs": 3},
            "prompt_logprobs": {"prompt_logprobs": 2},
            "logits_processors": {"logits_processors": [Wary(), plain_function]},
            "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {0: 20.0, 1: 20.0}},
        }
        return values[name]

    def expected(self, prompt: list[int], params: SamplingParams, sample: int) -> oracles.Answer:
        """The reference's answer, remembered: every method is held against the same one."""
        key = (tuple(prompt), re.sub(r" at 0x\w+", "", repr(params)), sample)
        if key not in self._answers:
            own = [Wary() if isinstance(p, Wary) else p for p in params.logits_processors]
            fresh = SamplingParams(**{**vars(params), "logits_processors": own})
            most = LENGTH if params.max_tokens is None else params.max_tokens
            self._answers[key] = oracles.reference(
                self.model, prompt, most, fresh, self.eos, encode=self.spell, sample=sample
            )
        return self._answers[key]

    def spell(self, word: str) -> list[list[int]]:
        """A banned word's tokens, bare and behind a space that is part of a token."""
        bare, spaced = (self.tokenizer.encode(word, add_special_tokens=False) for word in (word, " " + word))
        return [bare, spaced] if len(bare) == len(spaced) else [bare]

    def decode(self, ids: list[int], skip: bool = True) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


@pytest.fixture(scope="module")
def world(tiny_model: Path) -> World:
    return World(tiny_model)


def cut_at_stop(world: World, ids: list[int], params: SamplingParams) -> tuple[list[int], str, str | None]:
    """What is left of a text that no stop string ended yet: the token after which one is there, the text before it."""
    for count in range(1, len(ids) + 1):
        text = world.decode(ids[:count], params.skip_special_tokens).rstrip("\ufffd")
        begin = len(world.decode(ids[: params.min_tokens], params.skip_special_tokens)) if params.min_tokens else 0
        ends = [(text.find(stop, begin) + len(stop), -len(stop)) for stop in params.stop if stop in text[begin:]]
        if ends:
            end, size = min(ends)
            return ids[:count], text[: end if params.include_stop_str_in_output else end + size], text[end + size : end]
    return ids, "", None


def compare(world: World, output: RequestOutput, prompt: list[int], params: SamplingParams, sample: int) -> int:
    """Raises where an answer is not the reference's; gives the number of tokens compared."""
    model: PreTrainedModel = world.model
    expected = world.expected(prompt, params, sample)
    ids, text, stop = cut_at_stop(world, expected.ids, params)
    assert output.token_ids == ids
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else world.eos)}
    by_id = stop is None and ids[-1] in ends
    assert output.finish_reason == ("stop" if by_id or stop is not None else "length")
    assert output.stop_reason == (stop if stop is not None else ids[-1] if by_id and ids[-1] not in world.eos else None)
    if stop is None:
        shown = ids[:-1] if by_id and not params.include_stop_str_in_output else ids
        text = world.decode(shown, params.skip_special_tokens)
    assert output.text == text
    assert output.usage == {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    if params.logprobs is not None:
        assert output.logprobs is not None
        for found, raw, token in zip(output.logprobs, expected.raw, ids, strict=False):
            same_logprobs(found, raw, token, params.logprobs)
        assert len(output.logprobs) == len(ids)
    if params.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        raws = torch.log_softmax(oracles.logits_of(model, prompt), -1)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for one, raw, token in zip(output.prompt_logprobs[1:], raws, prompt[1:], strict=False):
            assert one is not None
            same_logprobs(one, raw, token, params.prompt_logprobs)
    return len(ids)


def same_logprobs(found: dict[int, Any], raw: torch.Tensor, token: int, count: int) -> None:
    best = raw.topk(count).indices.tolist()
    assert list(found) == list(dict.fromkeys([token, *best]))
    for i, one in found.items():
        assert abs(one.logprob - float(raw[i])) < 1e-9
        assert one.rank == int((raw > raw[i]).sum()) + 1
        assert one.decoded_token is not None


RESULTS: dict[str, dict[str, int | bool]] = {}
NAMES = [field.name for field in fields(SamplingParams)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_parameter(world: World, name: str, mode: str, method: str) -> None:
    for rows in ROWS:
        column, equal = f"{mode} {method} {rows}", 0
        RESULTS.setdefault(name, {})[column] = False
        params = SamplingParams(**{"max_tokens": LENGTH, **MODES[mode], **world.settings(name, mode)})
        outputs = world.llm.generate(PROMPTS[:rows], params, speculative_config=world.configs[method])
        for output, prompt in zip(outputs, PROMPTS, strict=False):
            assert output.finish_reason != "error", output.error
            assert len(output.samples) == params.n
            ids = world.tokenizer(prompt).input_ids
            for sample, one in enumerate(output.samples):
                equal += compare(world, one, ids, params, sample)
        RESULTS[name][column] = equal


def test_the_drafts_matter(world: World) -> None:
    """Guesses are right and wrong, so that what is compared above has been through both."""
    for method in METHODS[2:]:
        for mode in MODES.values():
            params = SamplingParams(max_tokens=40, **mode)
            outputs = world.llm.generate(PROMPTS, params, speculative_config=world.configs[method])
            rates = [output.stats.draft_acceptance_rate or 0.0 for output in outputs]
            assert 0.02 < sum(rates) / 4 < 0.98


def test_the_table_is_written() -> None:
    """Whole runs alone write it; the file is replaced at once or not at all."""
    if set(RESULTS) != set(NAMES) or any(set(row) != set(COLUMNS) for row in RESULTS.values()):
        pytest.skip("a selection was run: there is no whole table to write")
    rows = [{"parameter": name, **{column: RESULTS[name][column] for column in COLUMNS}} for name in NAMES]
    assert all(value for row in rows for value in row.values())
    table = {"paceline": paceline.__version__, "columns": COLUMNS, "rows": rows}
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    draft = TABLE.with_suffix(".tmp")
    draft.write_text(json.dumps(table, indent=1) + "\n")
    draft.replace(TABLE)
