"""Public reports about settings and rules that held for some tokens of an answer only: drafted ones escaped them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from oracles import Known, Table, answer, decode, prompt_of, walk
from standins import DRAFTERS, GREEDY, SAMPLED, VARIED, drafter
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from paceline import LLM, BadRequest, SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.ngram import Ngram
from paceline.testing import ScriptedTree

PROMPT = prompt_of(17)
MODES = pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


# -- settings ----------------------------------------------------------------------------------------------------------


def free_text(mode: str) -> list[int]:
    """What is written without any setting or rule."""
    return answer(PROMPT, 30, **(GREEDY if mode == "greedy" else SAMPLED)).ids


def changes(ids: list[int]) -> dict[str, dict[str, Any]]:
    """For each setting a value that changes a text which was written without it."""
    return {
        "temperature": {"temperature": 3.0},
        "top_k": {"top_k": 1},
        "top_p": {"top_p": 0.2},
        "min_p": {"min_p": 0.9},
        "presence_penalty": {"presence_penalty": 30.0},
        "frequency_penalty": {"frequency_penalty": 9.0},
        "repetition_penalty": {"repetition_penalty": 2.5},
        "logit_bias": {"logit_bias": {ids[1]: -100.0, 40: 4.0}},
        "bad_words": {"bad_words": [[ids[2]], [ids[4], ids[5]]]},
        "allowed_token_ids": {"allowed_token_ids": list(range(0, 97, 2))},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "min_tokens": {"min_tokens": 8, "stop_token_ids": ids[1:3]},
    }


@pytest.mark.parametrize("name", changes(list(range(6))))
def test_vllm_42744_every_setting_holds_for_drafted_tokens(name: str) -> None:
    """The draft is the text without the setting, in whole blocks; what comes is the text with it."""
    mode = "sampled" if name in ("temperature", "top_k", "top_p", "min_p") else "greedy"
    free = free_text(mode)
    settings = {**(GREEDY if mode == "greedy" else SAMPLED), **changes(free)[name]}
    known = answer(PROMPT, 20, **settings)
    expected = known.ids
    assert expected != free[: len(expected)]
    unset = ScriptedTree(lambda ids: [free[len(ids) - len(PROMPT) :][:5], [ids[-1]] * 5, ids[-6:]])
    both = Known([PROMPT], [known])
    beside = ScriptedTree(lambda ids: [unset.script(ids)[0], both.coming(ids).ids[:5]])  # type: ignore[index]
    for drafts in (unset, beside):
        for rule in ("coupled", "standard") if mode == "greedy" and drafts is beside else ("coupled",):
            (row,) = decode(
                oracles.target(), [PROMPT], drafts, depth=5, budget=10, rule=rule, max_tokens=20, **settings
            )
            assert row.output_ids == expected
    assert row.stats.num_accepted_tokens > len(expected) // 2


# -- structured output -------------------------------------------------------------------------------------------------

DIGITS, END = range(10, 20), 7


class FiveDigits(LogitsProcessor):
    """A rule with a state that follows the text token by token: five digits, then the end."""

    def __init__(self, num_prompt: int, digits: Any = DIGITS, end: int = END) -> None:
        self.num_prompt, self.digits, self.end = num_prompt, set(digits), end
        self.output: list[int] = []
        """What the state has been through."""
        self.count = 0

    def advance(self, token: int) -> None:
        assert token in (self.digits if self.count < 5 else {self.end}), "an illegal token became text"
        self.output.append(token)
        self.count = (self.count + 1) % 6

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[0].tolist()[self.num_prompt :]
        new = output[len(self.output) :]
        assert output == [*self.output, *new], "a token that was read has been given up"
        assert len(new) == (len(output) > 0), "a position was left out, or seen twice"
        for token in new:
            self.advance(token)
        legal = self.digits if self.count < 5 else {self.end}
        banned = [token not in legal for token in range(scores.shape[1])]
        return scores.masked_fill(torch.tensor([banned]), -torch.inf)


def ruled(settings: dict[str, Any], prompt: list[int] = PROMPT) -> Known:
    own = {**settings, "logits_processors": [FiveDigits(len(prompt))]}
    return Known([prompt], [answer(prompt, 20, eos=[END], **own)])


def letters(mode: str, K: int) -> ScriptedTree:
    """The run without a rule, which writes what the rule forbids."""
    free = free_text(mode)
    assert set(free[:6]) - set(DIGITS)
    return ScriptedTree(lambda ids: [free[len(ids) - len(PROMPT) :][:K]])


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "K"),
    [*(("letters", K) for K in (1, 4, 8)), *(("oracle", K) for K in (2, 5)), *((n, 4) for n in DRAFTERS[1:])],
)
def test_lmdeploy_4551_five_digits_and_the_end(name: str, K: int, mode: str) -> None:
    """Whatever is drafted; after every pass the rule has been through the committed text and through nothing else."""
    settings = GREEDY if mode == "greedy" else SAMPLED
    k = ruled(settings)
    expected = k.answers[0].ids
    assert (len(expected), expected[-1], set(expected[:-1]) <= set(DIGITS)) == (6, END, True)
    for rule in ("coupled", "standard") if name == "letters" else ("coupled",):
        own = FiveDigits(len(PROMPT))
        drafts: Drafter[Any] = letters(mode, K) if name == "letters" else drafter(name, k, K)
        (row,) = oracles.requests(
            oracles.target(), [PROMPT], drafts, depth=K, budget=3 * K, rule=rule, eos=[END],
            logits_processors=[own], max_tokens=20, **settings,
        )  # fmt: skip
        for cache in walk(oracles.target(), row):
            assert own.output == row.output_ids[:-1]
            assert cache.lengths == [len(row.ids) - 1]
        assert (row.finish_reason, row.output_ids[-1], len(row.output_ids)) == ("stop", END, 6)
        assert set(row.output_ids[:-1]) <= set(DIGITS)
        if rule == "coupled" or mode == "greedy":
            assert row.output_ids == expected
        if name == "oracle":
            assert row.stats.num_target_passes == -(-6 // (K + 1))  # what is legal and right is kept, the end too


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_lmdeploy_4551_the_law_is_the_masked_one(rule: str) -> None:
    """Digits 0 to 3 have half of the mass; behind five digits 7 alone is legal, and a draft of it is always kept."""
    table = Table([[0.2, 0.15, 0.1, 0.05, 0.2, 0.1, 0.1, 0.1]] * 8)
    script = ScriptedTree(lambda ids: [[7], [0, 4], [4, 5]] if len(ids) % 6 == 0 else [[4], [1, 1, 1], [7]])
    (row,) = decode(
        table, [[0]], script, rule=rule, depth=3, temperature=1.0, seed=2, max_tokens=240,
        logits_processors=[FiveDigits(1, range(4), 7)],
    )  # fmt: skip
    ids = torch.tensor(row.output_ids).view(-1, 6)
    assert (ids[:, 5] == 7).all()
    shares = torch.bincount(ids[:, :5].flatten(), minlength=8) / ids[:, :5].numel()
    wanted = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0])
    assert float((shares - wanted).abs().max()) < 4 * 0.5 / 200**0.5
    assert shares[4:].sum() == 0
    # Wherever a pass began in front of the seventh token it was drafted, and one of one is kept.
    drafted = torch.tensor(row.from_draft).view(-1, 6)[:, 5]
    assert drafted.sum() > 15
    behind_a_pass = ~torch.tensor(row.from_draft).view(-1, 6)[:, 4]
    assert drafted[:-1][behind_a_pass[:-1]].all()  # the very last token is not worth a draft


class Switch(LogitsProcessor):
    """Digits only, from the token behind a marker on; it reads every token once."""

    def __init__(self, marker: int) -> None:
        self.marker, self.on, self.read = marker, False, len(PROMPT)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        text = input_ids[0].tolist()
        self.on |= self.marker in text[self.read :]
        self.read = len(text)
        banned = [self.on and token not in DIGITS for token in range(scores.shape[1])]
        return scores.masked_fill(torch.tensor([banned]), -torch.inf)


@functools.cache
def switched(marker: int) -> list[int]:
    """The text under the rule."""
    return answer(PROMPT, 14, logits_processors=[Switch(marker)], **VARIED).ids


@pytest.mark.parametrize("K", [2, 5, 8])
def test_lmdeploy_4551_a_rule_switched_on_in_mid_block(K: int) -> None:
    """A marker at every place of the block: the rule holds from the very next token."""
    free = answer(PROMPT, 30, **VARIED).ids
    unruled = ScriptedTree(lambda ids: [free[len(ids) - len(PROMPT) :][:K]])
    plain: Callable[[list[int], torch.Tensor], torch.Tensor]
    places = [at for at in range(9) if free[at + 1] not in DIGITS][::2]
    assert len(places) > 2
    for at in places:
        expected = switched(free[at])
        assert expected[: at + 1] == free[: at + 1]
        assert set(expected[at + 1 :]) <= set(DIGITS)

        def plain(ids: list[int], logits: torch.Tensor, at: int = at) -> torch.Tensor:
            banned = [free[at] in ids[len(PROMPT) :] and token not in DIGITS for token in range(len(logits))]
            return logits.masked_fill(torch.tensor(banned), -torch.inf)

        for processor in (Switch(free[at]), plain) if K == 5 else (Switch(free[at]),):
            (row,) = decode(
                oracles.target(), [PROMPT], unruled, depth=K, max_tokens=14, logits_processors=[processor], **VARIED
            )
            assert row.output_ids == expected
            assert row.stats.num_accepted_tokens >= at + 1 - -(-(at + 1) // (K + 1))


def test_lmdeploy_4551_a_rule_that_could_not_hold_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"rejection_sample_method='block'.*use 'coupled' or 'standard'"):
        decode(oracles.target(), [PROMPT], Ngram(), rule="block", logits_processors=[FiveDigits(len(PROMPT))])


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"seed": 4}], ids=str)
def test_lmdeploy_4551_through_the_library(tiny_model: Path, tiny_draft: Path, settings: dict[str, Any]) -> None:
    """Rows of one call, each with a copy of the rule, its own state, and the text of plain decoding."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()
    digits, end = tokenizer.convert_tokens_to_ids(list("0123456789")), tokenizer.eos_token_id
    assert None not in digits
    llm = LLM(tiny_model, threads=1, max_num_seqs=2)
    llm.eos_ids = frozenset({end})
    prompts = [[4, 5, 6], [7, 8, 7]]

    def params() -> SamplingParams:
        return SamplingParams(max_tokens=20, n=2, logits_processors=[FiveDigits(3, digits, end)], **settings)

    wanted = [
        [oracles.reference(model, prompt, 20, params(), [end], sample=sample).ids for sample in range(2)]
        for prompt in prompts
    ]
    for config in (None, {"method": "ngram"}, {"method": "draft_model", "model": str(tiny_draft), "tree_top_k": 3}):
        outputs = llm.generate(prompts, params(), speculative_config=config)
        assert [[sample.token_ids for sample in output.samples] for output in outputs] == wanted
        assert all(len(output.text) == 5 and output.text.isdigit() for output in outputs)
        assert {output.finish_reason for output in outputs} == {"stop"}
