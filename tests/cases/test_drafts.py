"""Public reports about drafters: their laws, caches and vocabularies, what they remember and what they cost."""

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
import transformers
from oracles import VOCAB, Known, Spy, Table, answer, decode, prompt_of
from standins import GREEDY, SAMPLED
from test_draft_model import Watched, near, twin
from test_target import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline.prefix
from paceline import LLM, SamplingParams
from paceline.decode import prefill, run
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.errors import PacelineError, UnsupportedModel
from paceline.prefix import Prefixes
from paceline.target import HFTarget
from paceline.testing import ScriptedTree
from paceline.tree import TokenTree, stack

MODES = pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
RULES = ("coupled", "block", "standard")


# -- positions and attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "K"), [(1, 4), (2, 1), (17, 4)])
def test_transformers_30042_with_a_draft_model(length: int, K: int) -> None:
    """Both models read every block at the positions that follow what their caches hold."""
    prompt = prompt_of(length)
    spies = target, draft = Spy(oracles.target()), Spy(near()[0])
    (row,) = decode(target, [prompt], DraftModel(draft, depth=K, tree_top_k=1), depth=K, max_tokens=24)
    assert row.output_ids == answer(prompt, 24).ids
    assert row.stats.num_accepted_tokens > 0
    for (positions,), (begin,) in zip(target.positions, target.begins, strict=True):
        assert positions == list(range(begin, begin + len(positions)))
    for spy in spies:
        text: dict[int, int] = {}
        for (positions,), (tokens,) in zip(spy.positions, spy.tokens, strict=True):
            text |= dict(zip(positions, tokens, strict=True))
        # What was read last at each position is the text, up to where the last guesses begin.
        assert [text[at] for at in range(len(row.ids) - K - 2)] == row.ids[: len(row.ids) - K - 2]


@pytest.mark.parametrize("seed", range(6))
def test_eagle_183_siblings_do_not_see_each_other(seed: int) -> None:
    """Whatever the tree, the logits of a node are those of its own path, read alone by the unmodified model."""
    prompt = prompt_of(9, seed)
    wild = Known([prompt], [answer(prompt, 12)]).wild(4, 14, seed)
    request = oracles.requests(oracles.target(), [prompt], wild)[0]
    cache = prefill(oracles.target(), request)
    tree = wild._tree(prompt)
    stacked = stack([tree])
    seen = oracles.target().forward(stacked.tokens, stacked.offsets, stacked.mask, cache).logits[0]
    for node in range(tree.num_nodes):
        path = [tree.ids[above] for above in tree.path(node)[1:]]
        alone = oracles.logits_of(oracles.plain(), [*prompt, *path])[-1]
        oracles.assert_close(seen[stacked.slots[0][node]], alone)


# -- laws --------------------------------------------------------------------------------------------------------------


def is_law(ids: list[int], law: list[float]) -> None:
    """How often each token came, within four standard deviations."""
    shares = torch.bincount(torch.tensor(ids), minlength=len(law)) / len(ids)
    wanted = torch.tensor(law)
    assert ((shares - wanted).abs() <= 4 * (wanted * (1 - wanted) / len(ids)).sqrt()).all()


P, LAST_TWO = [0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 3 / 7, 4 / 7]
QUARTIC = [[share**0.25 for share in P], [0.2, 0.2, 0.35, 0.25]]
"""At a temperature of 1/4 the first is P, and the second far from what it is at 1."""


@pytest.mark.parametrize(
    ("rule", "settings", "target", "draft", "law", "rate"),
    [
        ("standard", {}, P, LAST_TWO, P, 0.3),  # the draft's own top 2
        ("standard", {"top_k": 2}, P, P[::-1], [4 / 7, 3 / 7, 0.0, 0.0], 0.0),  # disjoint: nothing can be kept
        ("block", {"temperature": 0.25}, *QUARTIC, P, 0.444),
    ],
    ids=str,
)
def test_transformers_47932_through_the_loop(
    rule: str, settings: dict[str, Any], target: list[float], draft: list[float], law: list[float], rate: float
) -> None:
    """The q of a draft model is what its guesses were drawn from: its law under the request's own settings."""
    drafter = DraftModel(Table([draft] * 4), depth=1, rule=rule)
    wanted = {"temperature": 1.0, "seed": 8, "max_tokens": 100 if rate == 0.0 else 200, **settings}
    (row,) = decode(Table([target] * 4), [[0]], drafter, depth=1, rule=rule, **wanted)
    is_law(row.output_ids, law)
    # What can be kept is the mass that both laws share.
    assert row.stats.draft_acceptance_rate == pytest.approx(rate, abs=0.12)


MARKOV = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]


def test_eagle_183_through_the_loop() -> None:
    """Children that were picked and not drawn, one of them twice, two levels deep: every step keeps its exact law."""
    parents = torch.tensor([-1, 0, 0, 0, 1, 1, 2, 2])
    script = ScriptedTree(lambda ids: TokenTree(torch.tensor([ids[-1], 0, 1, 0, 0, 1, 2, 2]), parents))
    (row,) = decode(Table(MARKOV), [[0]], script, rule="standard", temperature=1.0, seed=6, max_tokens=500)
    assert row.stats.acceptance_histogram[2] > 30
    for last, law in enumerate(MARKOV):
        following = [b for a, b in itertools.pairwise(row.output_ids) if a == last]
        assert len(following) > 40
        is_law(following, law)


@pytest.mark.parametrize(("rule", "top_k"), [("coupled", 2), ("block", 1)])
def test_vllm_6038_a_mixed_batch_with_a_draft_model(rule: str, top_k: int) -> None:
    """Rows 0 and 2 of [seed 7, no seed, seed 9] are their solo runs, whoever shares the draft's passes; the global
    generator is left alone."""
    prompts = [prompt_of(5), prompt_of(2), prompt_of(17)]
    before = torch.get_rng_state()

    def texts(members: list[int], max_rows: int | None = None) -> list[list[int]]:
        drafter = DraftModel(near()[0], tree_top_k=top_k, depth=3, rule=rule)
        settings = [{"seed": (7, None, 9)[i]} for i in members]
        rows = oracles.requests(
            oracles.target(), [prompts[i] for i in members], drafter, depth=3, budget=6, rule=rule,
            settings=settings, temperature=1.0, max_tokens=10,
        )  # fmt: skip
        list(run(oracles.target(), rows, max_rows=max_rows))
        return [row.output_ids for row in rows]

    alone = [texts([0])[0], texts([2])[0]]
    first, _, last = texts([0, 1, 2], max_rows=2 if rule == "block" else None)
    assert [first, last] == alone
    assert texts([1]) != texts([1])
    if rule == "coupled":
        assert alone == [answer(prompts[i], 10, temperature=1.0, seed=seed).ids for i, seed in ((0, 7), (2, 9))]
    assert torch.equal(torch.get_rng_state(), before)


# -- the draft's own cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "depth", "settings"), [(1, 5, GREEDY), (3, 3, SAMPLED)], ids=lambda one: str(one)[:14]
)
def test_eagle_336_prompts_that_begin_alike(
    top_k: int, depth: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target need not read again the draft knows all the same: a twin stays right for a prompt that shares 32
    tokens, for the next turn and for the same prompt once more, also behind one whose client left in mid block."""
    monkeypatch.setattr(paceline.prefix, "CHUNK", 16)
    shared, prefixes = prompt_of(32, 1), Prefixes()
    drafter = Watched(DraftModel(twin(), tree_top_k=top_k, depth=depth))
    texts, cached = [[*shared, *prompt_of(9, 2)], [*shared, *prompt_of(7, 3)]], []
    for prompt in texts:
        left = oracles.requests(
            oracles.target(), [[*prompt[:-2], 8]], drafter, depth=depth, budget=40, max_tokens=20, **settings
        )
        leaving = run(oracles.target(), left, prefixes=prefixes)
        next(leaving)
        next(leaving)
        leaving.close()
        row = oracles.requests(oracles.target(), [prompt], drafter, depth=depth, budget=40, max_tokens=20, **settings)[
            0
        ]
        list(run(oracles.target(), [row], prefixes=prefixes))
        assert row.output_ids == answer(prompt, 20, **settings).ids
        cached.append(row.stats.num_cached_tokens)
        if len(texts) < 4:
            texts.append([*row.ids, 5] if len(texts) == 2 else texts[1])
    assert cached == [32, 32, len(texts[0]) + 19, len(texts[1]) - 1]
    assert all(drafter.descended)
    assert len(drafter.trees) >= 4 * 3


def test_eagle_336_turns_through_the_library(tiny_model: Path) -> None:
    """A model that drafts for itself: every guess of the second turn is kept, as in the first."""
    config = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 4, "tree_top_k": 1}
    llm = LLM(tiny_model, config, threads=1)
    params, prompt = SamplingParams(temperature=0.0, max_tokens=20), list(range(3, 43))
    for turn in range(3):
        (output,) = llm.generate(prompt, params)
        assert output.stats.draft_acceptance_rate == 1.0
        assert output.stats.mean_acceptance_length > 3.0  # a model that is unsure is not verified to its full depth
        assert (output.stats.num_cached_tokens > 0) == (turn > 0)
        prompt = [*prompt, *output.token_ids, 7, 8]


# -- one call after the other ------------------------------------------------------------------------------------------


def figures(stats: Any) -> dict[str, Any]:
    return {name: value for name, value in stats.to_dict().items() if name not in ("time", "num_cached_tokens")}


@pytest.mark.parametrize(
    ("rule", "settings"),
    [("coupled", SAMPLED), ("standard", SAMPLED)],
    ids=lambda one: str(one)[:14],
)
def test_llamacpp_27852_the_same_call_three_times(rule: str, settings: dict[str, Any]) -> None:
    """Same ids, same figures: neither a long request in between nor the depth it came to drafts at changes a thing."""
    drafter = DraftModel(near()[0], rule=rule)
    short, long = prompt_of(9, 2), prompt_of(60, 1)

    def call(prompt: list[int], drafter: DraftModel = drafter) -> tuple[list[int], dict[str, Any]]:
        (row,) = decode(oracles.target(), [prompt], drafter, rule=rule, max_tokens=14, **settings)
        return row.output_ids, figures(row.stats)

    first = call(short, DraftModel(near()[0], rule=rule))
    assert [call(short), call(short), call(short)] == [first] * 3
    call(long)
    assert call(short) == first
    assert first[1]["num_draft_tokens"] > 0


def test_llamacpp_27852_calls_of_the_library(tiny_model: Path, tiny_draft: Path) -> None:
    """The third call is the first one; what the caller gave, and both models' own settings, are as they were."""
    draft = AutoModelForCausalLM.from_pretrained(tiny_draft)
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 5, "tree_top_k": 2}
    llm = LLM(tiny_model, threads=1)
    models = (llm.target.model, draft)
    params = SamplingParams(seed=3, max_tokens=20, logit_bias={5: 1.0})
    prompts = [[4, 5, 6, 4, 5], [9, 8]]
    given = (params, prompts, [model.generation_config.to_dict() for model in models], dict(config))
    before = copy.deepcopy(given[:3]), dict(config)
    runs = [llm.generate(prompts, params, speculative_config=config) for _ in range(3)]
    seen = [[(output.token_ids, figures(output.stats)) for output in outputs] for outputs in runs]
    assert seen[0] == seen[1] == seen[2]
    after = (params, prompts, [model.generation_config.to_dict() for model in models])
    assert (after, config) == before


def test_transformers_28759_a_depth_reaches_the_draft() -> None:
    """A request for 5 guesses gets 5, whatever the calls before it got."""
    for K in (5, 2, 5):
        drafter = Watched(DraftModel(twin(), depth=K, tree_top_k=1))
        decode(oracles.target(), [prompt_of(5)], drafter, depth=K, max_tokens=24)
        assert {max(tree.depth) for _, tree, _ in drafter.trees[:-1]} == {K}


# -- vocabularies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "settings"), [(1, {"temperature": 0.0}), (3, {"seed": 3})], ids=str)
def test_vllm_13849_a_padded_draft_in_the_library(tiny_model: Path, top_k: int, settings: dict[str, Any]) -> None:
    """Padding that the draft finds likeliest of all is never proposed, fed to either model or emitted."""
    draft = AutoModelForCausalLM.from_pretrained(tiny_model)
    size = draft.config.vocab_size
    with torch.random.fork_rng():
        draft.resize_token_embeddings(size + 16, mean_resizing=False)
    fed: list[int] = []
    draft.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed.append(int(given[0].max())))
    bias = torch.cat([torch.zeros(size), torch.full((16,), 50.0)])
    draft.get_output_embeddings().register_forward_hook(lambda _, given, found: found + bias)
    llm = LLM(tiny_model, threads=1)
    params = SamplingParams(max_tokens=20, **settings)
    config = {"method": "draft_model", "model": draft, "tree_top_k": top_k}
    (fast,), (plain,) = (llm.generate([4, 5, 6], params, speculative_config=given) for given in (config, None))
    assert fast.token_ids == plain.token_ids
    assert max(fast.token_ids) < size
    assert 0 <= min(fed) <= max(fed) < size
    assert fast.stats.num_accepted_tokens > 10  # its own weights: but for the padding it is always right


def test_vllm_13849_other_words_are_translated_by_the_library(tiny_model: Path, tmp_path: Path) -> None:
    """Two ids that mean each other's words, and another end of text: the text and the guesses are as without."""
    words, ends = tmp_path / "words", tmp_path / "ends"
    shutil.copytree(tiny_model, words)
    file = words / "tokenizer.json"
    text = file.read_text()
    assert '"z":' in text
    file.write_text(text.replace('"z":', '"@@":').replace('"y":', '"z":').replace('"@@":', '"y":'))
    weights = AutoModelForCausalLM.from_pretrained(words)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    pair = tokenizer.convert_tokens_to_ids(["y", "z"])
    with torch.no_grad():
        for table in (weights.get_input_embeddings().weight, weights.get_output_embeddings().weight):
            table[pair] = table[pair[::-1]]
    weights.save_pretrained(words)
    shutil.copytree(tiny_model, ends)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(ends)
    llm = LLM(tiny_model, threads=1)
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, logit_bias={pair[0]: 4.0, pair[1]: 4.0})
    prompt = tokenizer("buzz lazy yy").input_ids
    (plain,) = llm.generate([prompt], params, speculative_config=None)
    assert {*pair} <= {*plain.token_ids}
    for folder in (words, ends):
        config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
        (fast,) = llm.generate([prompt], params, speculative_config=config)
        assert fast.token_ids == plain.token_ids
        assert fast.stats.num_accepted_tokens == 16  # its own weights: four passes, each kept whole


# -- models that are refused -------------------------------------------------------------------------------------------


def seq2seq(name: str) -> Any:
    """A small encoder-decoder, or the decoder of one."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    t = transformers
    with torch.random.fork_rng():
        if name == "t5":
            return t.T5ForConditionalGeneration(
                t.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
            )
        if name == "bart":
            return t.BartForConditionalGeneration(t.BartConfig(**sizes, **heads, **ids))
        config = t.WhisperConfig(**sizes, **heads, **ids, num_mel_bins=8, max_source_positions=16)
        kind = t.WhisperForCausalLM if name == "whisper decoder" else t.WhisperForConditionalGeneration
        return kind(config)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "whisper decoder"])
def test_transformers_30611_encoder_decoders_are_refused(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """As target and as draft, as an object and as a folder, by name and before any forward."""
    model, tokenizer = seq2seq(name), AutoTokenizer.from_pretrained(tiny_model)
    model.register_forward_pre_hook(lambda *_: pytest.fail("it was run"))
    words = type(model).__name__ + (".*encoder-decoder.*decoder-only" if name != "whisper decoder" else "")
    llm = LLM(tiny_model, threads=1)
    for make in (
        lambda: HFTarget(model),
        lambda: LLM.of(model, tokenizer),
        lambda: LLM.of(llm.target.model, tokenizer, {"method": "draft_model", "model": model}),
        lambda: llm.generate([3], speculative_config={"method": "draft_model", "model": model}),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            make()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PacelineError):
        LLM(tmp_path, threads=1)
    with pytest.raises(PacelineError):
        LLM(tiny_model, {"method": "draft_model", "model": str(tmp_path)}, threads=1)


@pytest.mark.parametrize("name", ["mamba", "jamba", "rwkv"])
def test_mlxlm_846_a_recurrent_draft_is_refused(name: str, tiny_model: Path) -> None:
    """A state that cannot be rolled back does no more good in a draft; the layer kind is named, before any work."""
    with pytest.raises(
        UnsupportedModel, match=r"(linear_attention|recurrent) layers, whose state cannot be rolled back"
    ):
        LLM(tiny_model, {"method": "draft_model", "model": refused(name)}, threads=1)


# -- what it costs, counted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [4])
def test_vllm_16258_passes_of_both_models(K: int) -> None:
    """A draft that knows nothing: no more target passes than tokens, K passes of the draft for each, and each prompt is
    read once, however long it is."""
    wrong = tiny_other()
    for length in (5, 120):
        prompt, target, draft = prompt_of(length), Spy(oracles.target()), Spy(wrong)
        (row,) = decode(target, [prompt], DraftModel(draft, depth=K), depth=K, max_tokens=20)
        accepted = row.stats.num_accepted_tokens
        assert accepted <= 3
        assert len(target.tokens) - 1 == row.stats.num_target_passes == 20 - accepted
        assert len(draft.tokens) - 1 <= K * row.stats.num_target_passes
        assert max(len(tokens[0]) for tokens in target.tokens[1:]) <= K + 1
        read = [sum(len(tokens[0]) for tokens in spy.tokens[:1]) for spy in (target, draft)]
        assert read == [length - 1, length - 1]
        # Each position is read once, and guesses that were dropped are read over.
        assert sum(len(tokens[0]) for tokens in draft.tokens[1:]) <= 20 + K * row.stats.num_target_passes


def tiny_other() -> HFTarget:
    return HFTarget(oracles.tiny("llama", 1, num_hidden_layers=1))


@pytest.mark.parametrize("shortest", [1, 3])
def test_vllm_16258_nothing_to_look_up_costs_nothing(shortest: int) -> None:
    """Where the text repeats nothing the pass stays one token wide: exactly plain decoding's passes."""
    prompt, settings = list(range(40)), {"temperature": 1.0, "seed": 3, "presence_penalty": 1000.0}
    settings["logit_bias"] = dict.fromkeys(range(40), -1000.0)
    plain, spy = Spy(oracles.target()), Spy(oracles.target())
    (alone,) = decode(plain, [prompt], max_tokens=30, **settings)
    (row,) = decode(spy, [prompt], Ngram(5, shortest), max_tokens=30, **settings)
    assert row.output_ids == alone.output_ids
    assert spy.tokens == plain.tokens
    assert row.stats.draft_acceptance_rate is None
