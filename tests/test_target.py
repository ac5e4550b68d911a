"""The forward over trees against the unmodified model, read path by path without a cache."""

import random
from collections.abc import Sequence
from typing import Any

import oracles
import pytest
import torch
import transformers
from oracles import ARCHS, VOCAB, assert_close, float64_softmax, logits_of, prompt_of
from torch import Tensor

import paceline.target
from paceline.cache import KVCache
from paceline.draft.modules import scored, unembedding
from paceline.errors import UnsupportedModel
from paceline.target import HFTarget
from paceline.tree import Rider, TokenTree, stack

CHAIN = [5, 6, 7, 8, 9]
SHAPES: dict[str, list[int]] = {
    "root": [-1],
    "chain": [-1, 0, 1, 2, 3, 4],
    "star": [-1, 0, 0, 0, 0, 0],
    "bushy": [-1, 0, 0, 1, 1, 2, 3, 3, 6, 8, 5],
}


def a_tree(parents: Sequence[int], seed: int = 0, score: bool = False) -> TokenTree:
    rng = random.Random(seed)
    tokens = [rng.randrange(VOCAB) for _ in parents]
    scores = torch.tensor([rng.random() for _ in parents]) if score else None
    return TokenTree(torch.tensor(tokens), torch.tensor(list(parents)), score=scores)


def random_parents(num_nodes: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [-1, *(rng.randrange(node) for node in range(1, num_nodes))]


def committed(target: HFTarget, prompts: Sequence[Sequence[int]]) -> KVCache:
    """A cache in which each row holds a prompt."""
    caches = []
    for prompt in prompts:
        cache = target.new_cache(1, 0)
        if prompt:
            target.forward(torch.tensor([list(prompt)]), torch.arange(len(prompt))[None], None, cache, logits=False)
            cache.commit([range(len(prompt))])
        caches.append(cache)
    return KVCache.join(caches)


def assert_paths(arch: str, prompts: Sequence[Sequence[int]], trees: Sequence[TokenTree], stride: int = 1) -> None:
    """Every node's (every `stride`-th node's) logits are those of the plain model at the end of prompt + path."""
    target, model = oracles.target(arch), oracles.plain(arch)
    stacked = stack(list(trees))
    seen = target.forward(stacked.tokens, stacked.offsets, stacked.mask, committed(target, prompts))
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        for node in range(0, tree.num_nodes, stride):
            path = [tree.ids[n] for n in tree.path(node)]
            assert_close(seen.logits[row, stacked.slots[row][node]], logits_of(model, [*prompt, *path])[-1])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_equals_its_paths(arch: str, shape: str) -> None:
    assert_paths(arch, [prompt_of(9)], [a_tree(SHAPES[shape])])


@pytest.mark.parametrize("arch", ARCHS)
def test_slots_by_score_change_nothing(arch: str) -> None:
    tree = a_tree(SHAPES["bushy"], score=True)
    assert tree.slot_order != list(range(tree.num_nodes))
    assert_paths(arch, [prompt_of(5)], [tree])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 6, 7, 30])  # on both sides of the windows of 4 and 6
def test_any_prefix_length(arch: str, length: int) -> None:
    assert_paths(arch, [prompt_of(length)], [a_tree(SHAPES["chain"], seed=length)])


@pytest.mark.parametrize("arch", ARCHS)
def test_ragged_rows(arch: str) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((3, 17, 0, 8))]
    trees = [a_tree(SHAPES[shape], seed) for seed, shape in enumerate(("bushy", "root", "star", "chain"))]
    assert_paths(arch, prompts, trees)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("num_nodes", [63, 64, 65, 90])  # folding ends at 64
@pytest.mark.parametrize("rows", [1, 2])
def test_wide_trees(arch: str, num_nodes: int, rows: int) -> None:
    prompts = [prompt_of(5 + 4 * row, row) for row in range(rows)]
    assert_paths(arch, prompts, [a_tree(random_parents(num_nodes - row, row), row) for row in range(rows)], stride=4)


@pytest.mark.parametrize("arch", ARCHS)
def test_staging_accumulates(arch: str) -> None:
    """A tree read level by level, in three forwards without a commit, equals its paths."""
    prompts = [prompt_of(4), prompt_of(11)]
    trees = [a_tree([-1, 0, 0, 1, 1, 2, 3, 3, 4, 5], seed) for seed in range(2)]
    target, model = oracles.target(arch), oracles.plain(arch)
    cache = committed(target, prompts)
    stacked = stack(trees)
    assert stacked.slots[0] == stacked.slots[1]
    order = [stacked.slots[0].index(slot) for slot in range(10)]  # the nodes, in slot order
    found = []
    for begin, end in ((0, 1), (1, 4), (4, 10)):
        assert cache.staged == begin
        mask = stacked.mask[:, begin:end, :end]
        seen = target.forward(stacked.tokens[:, begin:end], stacked.offsets[:, begin:end], mask, cache)
        found.append(seen.logits)
    logits = torch.cat(found, dim=1)
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        for slot, node in enumerate(order):
            path = [tree.ids[n] for n in tree.path(node)]
            assert_close(logits[row, slot], logits_of(model, [*prompt, *path])[-1])


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_unstaged_slots_leave_no_trace(arch: str) -> None:
    target, model, prompt = oracles.target(arch), oracles.plain(arch), prompt_of(6)
    cache = committed(target, [prompt])
    first, dropped, second = a_tree(SHAPES["chain"][:3], 1), a_tree(SHAPES["chain"][:3], 2), a_tree([-1, 0], 3)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()[None]
    target.forward(first.tokens[None], torch.arange(3)[None], mask, cache)
    behind = torch.cat([torch.ones(1, 3, 3, dtype=torch.bool), mask], dim=2)
    target.forward(dropped.tokens[None], torch.arange(3, 6)[None], behind, cache)
    cache.unstage(3)
    last = torch.cat([torch.ones(1, 2, 3, dtype=torch.bool), mask[:, :2, :2]], dim=2)
    seen = target.forward(second.tokens[None], torch.arange(3, 5)[None], last, cache)
    assert_close(seen.logits[0], logits_of(model, [*prompt, *first.ids, *second.ids])[-2:])


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_riders_share_the_pass_and_change_nothing(arch: str) -> None:
    """Riders read what their mask says; the tree's own logits are those without riders."""
    prompt, base = prompt_of(7), a_tree([-1, 0, 0, 1])
    tokens, offsets = torch.tensor([21, 22, 23]), torch.tensor([2, 3, 1])
    # rider 0 stands behind node 1, rider 1 behind rider 0, rider 2 behind the root
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    tree = TokenTree(base.tokens, base.parents, rider=Rider(tokens, offsets, mask))
    target, model = oracles.target(arch), oracles.plain(arch)
    prompts = [prompt, prompt_of(3)]
    stacked = stack([tree, a_tree(SHAPES["star"])])
    seen = target.forward(stacked.tokens, stacked.offsets, stacked.mask, committed(target, prompts)).logits[0]
    for node in range(4):
        path = [base.ids[n] for n in base.path(node)]
        assert_close(seen[stacked.slots[0][node]], logits_of(model, [*prompt, *path])[-1])
    behind = [[base.ids[0], base.ids[1], 21], [base.ids[0], base.ids[1], 21, 22], [base.ids[0], 23]]
    for rider, path in enumerate(behind):
        assert_close(seen[4 + rider], logits_of(model, [*prompt, *path])[-1])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("piece", [7, 64, 65, 200])
def test_long_prompt_in_pieces(arch: str, piece: int) -> None:
    """Reading 200 tokens in pieces gives the logits of one piece, whichever of the two attention layouts serves it."""
    prompt, target = prompt_of(200), oracles.target(arch)
    cache, found = target.new_cache(1, 0), []
    for begin in range(0, 200, piece):
        part = prompt[begin : begin + piece]
        found.append(target.forward(torch.tensor([part]), torch.arange(len(part))[None], None, cache).logits[0])
        cache.commit([range(len(part))])
    assert_close(torch.cat(found), logits_of(oracles.plain(arch), prompt))


def test_causal_pieces_without_commit() -> None:
    """mask=None is causal behind what is staged, too, in rows of different lengths."""
    prompts, target, model = [prompt_of(3), prompt_of(9)], oracles.target("mistral"), oracles.plain("mistral")
    cache = committed(target, prompts)
    more = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
    first = target.forward(more[:, :3], torch.arange(3).repeat(2, 1), None, cache).logits
    second = target.forward(more[:, 3:], torch.arange(3, 5).repeat(2, 1), None, cache).logits
    for row, prompt in enumerate(prompts):
        expected = logits_of(model, [*prompt, *more[row].tolist()])[-5:]
        assert_close(torch.cat([first[row], second[row]]), expected)


# -- hidden states, embeddings, and what else the protocol has ---------------------------------------------------------


@torch.inference_mode()
def hidden_of(model: Any, ids: Sequence[int]) -> tuple[Tensor, ...]:
    with float64_softmax():
        return model(torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("arch", ARCHS)
def test_taps_are_the_hidden_states_of_transformers(arch: str) -> None:
    prompt, tree, taps = prompt_of(8), a_tree(SHAPES["bushy"]), (0, 2, 1)
    target, model = oracles.target(arch), oracles.plain(arch)
    stacked = stack([tree])
    seen = target.forward(stacked.tokens, stacked.offsets, stacked.mask, committed(target, [prompt]), taps)
    assert seen.hidden is not None
    for node in range(tree.num_nodes):
        states = hidden_of(model, [*prompt, *(tree.ids[n] for n in tree.path(node))])
        expected = torch.cat([states[tap][0, -1] for tap in taps])
        assert_close(seen.hidden[0, stacked.slots[0][node]], expected)


def test_no_taps_and_no_logits_cost_nothing() -> None:
    target = oracles.target()
    cache = target.new_cache(1, 0)
    seen = target.forward(torch.tensor([CHAIN]), torch.arange(5)[None], None, cache, logits=False)
    assert seen.hidden is None
    assert seen.logits.shape[1] == 0
    assert cache.staged == 5


@pytest.mark.parametrize("arch", ["llama", "phi"])
def test_embed_and_unembed(arch: str) -> None:
    target, model = oracles.target(arch), oracles.plain(arch)
    states = hidden_of(model, CHAIN)
    assert_close(target.embed(torch.tensor(CHAIN)), states[0][0])
    assert_close(target.unembed(states[-1][0]), logits_of(model, CHAIN))  # the last state is behind the norm


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("Granite", {"logits_scaling": 8.0}),
        ("Cohere", {"logit_scale": 0.0625}),
        ("Gemma2", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": None, "head_dim": 12}),
    ],
)
def test_logits_are_finished_as_the_family_does(kind: str, own: dict[str, Any]) -> None:
    """What heads and their training take for the target's law is the target's law."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=oracles.VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None, **own,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        out = made(torch.tensor([CHAIN]), output_hidden_states=True)
    last, wanted = out.hidden_states[-1][0], out.logits[0]
    target = HFTarget(made)
    assert torch.allclose(target.unembed(last), wanted, rtol=1e-6, atol=1e-8)
    some = torch.tensor([3, 5, 8])
    assert torch.allclose(unembedding(target, some)(last), wanted[:, some], rtol=1e-6, atol=1e-8)
    last = last.clone().requires_grad_(True)
    assert torch.allclose(scored(target, last), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("arch", ARCHS)
def test_measures(arch: str) -> None:
    target = oracles.target(arch)
    assert (target.vocab_size, target.hidden_size, target.max_positions) == (VOCAB, 48, 256)
    assert target.dtype == torch.float64
    parameters = dict(target.model.named_parameters())
    embedding = target.model.get_input_embeddings().weight
    assert target.weight_bytes == sum(p.nbytes for p in parameters.values()) - embedding.nbytes
    assert not any(p.requires_grad for p in parameters.values())


def test_weight_bytes_of_tied_embeddings() -> None:
    model = oracles.tiny("llama", tie_word_embeddings=True)
    assert HFTarget(model).weight_bytes == sum(p.nbytes for p in model.parameters())


# -- models that do not look like the seven ----------------------------------------------------------------------------


def other_model(name: str) -> Any:
    """Shapes that the seven do not have: one K/V head, heads wider than hidden, values narrower than keys, a norm."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    } | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    config: Any = {
        "one K/V head": lambda: transformers.LlamaConfig(**sizes, num_key_value_heads=1),
        "wide heads": lambda: transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=20),
        "values narrower than keys": lambda: transformers.MiniCPM3Config(**sizes, num_key_value_heads=4, **latent),
        "windows without layer types": lambda: transformers.Starcoder2Config(
            **sizes, num_key_value_heads=2, sliding_window=5
        ),
        "linear scaling of logits": lambda: transformers.GraniteConfig(
            **sizes, num_key_value_heads=2, attention_multiplier=0.3, logits_scaling=2.0
        ),
    }[name]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return made.double().eval()


@pytest.mark.parametrize(
    "name",
    [
        "one K/V head",
        "wide heads",
        "values narrower than keys",
        "windows without layer types",
        "linear scaling of logits",
    ],
)
def test_other_shapes(name: str) -> None:
    target, model, prompt = HFTarget(other_model(name)), other_model(name), prompt_of(9)
    tree = a_tree(SHAPES["bushy"])
    stacked = stack([tree])
    seen = target.forward(stacked.tokens, stacked.offsets, stacked.mask, committed(target, [prompt]))
    for node in range(tree.num_nodes):
        path = [tree.ids[n] for n in tree.path(node)]
        assert_close(seen.logits[0, stacked.slots[0][node]], logits_of(model, [*prompt, *path])[-1])


# -- refusals ----------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def refused(name: str) -> Any:
    """A small model of a kind that cannot verify a tree."""
    t = transformers
    heads = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng():
        return {
            "mamba": lambda: t.MambaForCausalLM(
                t.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
            ),
            "jamba": lambda: t.JambaForCausalLM(
                t.JambaConfig(**heads, mamba_dt_rank=4, mamba_d_state=4, use_mamba_kernels=False, num_experts=2)
            ),
            "qwen3_next": lambda: t.Qwen3NextForCausalLM(
                t.Qwen3NextConfig(**heads, head_dim=8, num_experts=2, moe_intermediate_size=16)
            ),
            "rwkv": lambda: t.RwkvForCausalLM(t.RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)),
            "llama4": lambda: t.Llama4ForCausalLM(t.Llama4TextConfig(**heads, head_dim=8, intermediate_size_mlp=32)),
            "t5": lambda: t.T5ForConditionalGeneration(
                t.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
            ),
            "bart": lambda: t.BartForCausalLM(
                t.BartConfig(
                    vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32
                )
            ),
            "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)),
            "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**heads, head_dim=8)),
            "gpt_oss": lambda: t.GptOssForCausalLM(t.GptOssConfig(**heads, head_dim=8, num_local_experts=2)),
        }[name]()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mamba", ("MambaForCausalLM", "linear_attention layers")),
        ("jamba", ("JambaForCausalLM", "linear_attention layers")),
        ("qwen3_next", ("Qwen3NextForCausalLM", "linear_attention layers")),
        ("rwkv", ("RwkvForCausalLM", "recurrent layers")),
        ("llama4", ("Llama4ForCausalLM", "chunked_attention layers")),
        ("t5", ("T5ForConditionalGeneration", "encoder-decoder")),
        ("bart", ("BartForCausalLM", "counts positions by itself")),
        ("bloom", ("BloomForCausalLM", "attention code of its own")),
        ("gemma2", ("Gemma2ForCausalLM", "attn_logit_softcapping")),
        ("gpt_oss", ("GptOssForCausalLM", "attention sinks")),
    ],
)
def test_refusals_name_the_model_and_the_reason(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        HFTarget(refused(name))
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_attention_kernels_without_a_mask_are_refused(implementation: str) -> None:
    model = oracles.tiny("llama")
    model.config._attn_implementation = implementation  # as a checkpoint loaded with it says
    with pytest.raises(UnsupportedModel, match=f"{implementation}.*load it with 'sdpa'"):
        HFTarget(model)


# -- the trial of model types that no test knows -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_trusts_what_reads_trees_right(
    arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding of bfloat16 is no reason to refuse a model."""
    monkeypatch.setattr(paceline.target, "TESTED", set())
    HFTarget(oracles.tiny(arch, dtype=dtype))


@pytest.mark.parametrize("fault", ["siblings see each other", "positions count slots", "the prefix is hidden"])
def test_the_trial_refuses_what_does_not(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = paceline.target.visible_slots

    def wrong(lengths: Tensor, offsets: Tensor, mask: Tensor | None, cache: KVCache) -> Tensor:
        seen = right(lengths, offsets, None if fault == "siblings see each other" else mask, cache)
        if fault == "the prefix is hidden" and mask is not None:
            seen[:, :, :3] = False
        return seen

    class Counting(HFTarget):
        def forward(self, tokens: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> Any:
            where = torch.arange(offsets.shape[1])[None] if fault == "positions count slots" else offsets
            return super().forward(tokens, where, *args, **kwargs)

    monkeypatch.setattr(paceline.target, "TESTED", set())
    monkeypatch.setattr(paceline.target, "visible_slots", wrong)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: logits of a small tree differ"):
        Counting(oracles.tiny("llama"))
