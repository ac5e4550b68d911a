"""The real 0.5B model in bfloat16: what rounding could spoil and the width-invariant forward does not let it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.cache import KVCache
from paceline.certify.run import Named, Size, _Work
from paceline.draft import SpeculativeConfig
from paceline.draft.base import Ask
from paceline.draft.ngram import Ngram
from paceline.target import HFTarget
from paceline.tree import TokenTree, stack

pytestmark = pytest.mark.real

CODE = '''def mean(values):
    """The arithmetic mean."""
    return sum(values) / len(values)


def variance(values):
    """The mean squared distance from the mean."""
    m = mean(values)
    return sum((v - m) ** 2 for v in values) / len(values)


'''
PROMPTS = [
    CODE + "def deviation(values):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Question: What is 17 times 23?\nAnswer: Let us think step by step. 17 times 20 is 340, and 17 times 3 is",
    "The old lighthouse keeper climbed the stairs slowly, because",
]
NGRAM = {"method": "ngram"}


@pytest.fixture(scope="module")
def llm(model_05b: Path) -> LLM:
    return LLM(model_05b, dtype="bfloat16")


@pytest.fixture(scope="module")
def target(llm: LLM) -> HFTarget:
    """The model's target, where the kernel promises the same bits at every width."""
    if llm.target.kernel.width < 24:
        pytest.skip(f"no promise on this machine: {llm.target.kernel.note or llm.target.kernel.name}")
    return llm.target


@pytest.fixture(scope="module")
def text(llm: LLM) -> list[int]:
    ids = list(llm.tokenizer(CODE * 12 + PROMPTS[0]).input_ids)
    assert len(ids) > 536
    return ids


def read(target: HFTarget, cache: KVCache, ids: Sequence[int], width: int) -> Tensor:
    """[len(ids), V]: the ids as chains of this width, each committed before the next."""
    found = []
    for begin in range(0, len(ids), width):
        part = list(ids[begin : begin + width])
        tree = stack([TokenTree.chain(part[0], part[1:])])
        found.append(target.forward(tree.tokens, tree.offsets, tree.mask, cache).logits[0])
        cache.commit([range(len(part))])
    return torch.cat(found)


def prompt_cache(target: HFTarget, ids: Sequence[int]) -> KVCache:
    cache = target.new_cache(1, len(ids) + 64)
    target.forward(torch.tensor([list(ids)]), torch.arange(len(ids))[None], None, cache, logits=False)
    cache.commit([range(len(ids))])
    return cache


@pytest.mark.parametrize("length", [40, 504])  # before, and across, a whole multiple of 512 keys
def test_a_chain_gives_the_same_bits_at_every_width(target: HFTarget, text: list[int], length: int) -> None:
    cache = prompt_cache(target, text[:length])
    block = text[length : length + 24]
    alone = read(target, cache, block, 1)
    for width in (2, 8, 24):
        cache.truncate(0, length)
        wide = read(target, cache, block, width)
        assert torch.equal(wide, alone), f"width {width}: {int((wide != alone).any(1).sum())} of 24 rows differ"
    assert len(alone.argmax(1).unique()) > 5  # the block says something


def test_rows_of_a_batch_give_the_bits_of_a_lone_row(target: HFTarget, text: list[int]) -> None:
    """Rows of 40, 300 and 700 tokens with blocks of 8: each as alone, one token at a time."""
    lengths = [40, 300, 560]
    alone = [read(target, prompt_cache(target, text[:n]), text[n : n + 8], 1) for n in lengths]
    cache = KVCache.join([prompt_cache(target, text[:n]) for n in lengths])
    trees = stack([TokenTree.chain(text[n], text[n + 1 : n + 8]) for n in lengths])
    seen = target.forward(trees.tokens, trees.offsets, trees.mask, cache).logits
    for row in range(3):
        assert torch.equal(seen[row], alone[row])


def test_every_node_of_a_tree_gives_the_bits_of_a_chain(target: HFTarget, text: list[int]) -> None:
    """Siblings and cousins lie between a node and those it sees; its keys are summed in plain decoding's order."""
    cache = prompt_cache(target, text[:100])
    path = text[100:108]
    others = [[*path[:at], (path[at] + 1) % 1000, 11] for at in range(1, 8)]
    tree = TokenTree.from_paths(path[0], [path[1:], *(other[1:] for other in others)])
    trees = stack([tree])
    seen = target.forward(trees.tokens, trees.offsets, trees.mask, cache).logits[0]
    for ids in (path, *others):
        cache.truncate(0, 100)
        alone = read(target, cache, ids, 1)
        node = next(n for n in range(tree.num_nodes) if [tree.ids[i] for i in tree.path(n)] == ids)
        assert torch.equal(seen[[trees.slots[0][n] for n in tree.path(node)]], alone)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_copy_in_four_bits_is_a_good_draft(llm: LLM, target: HFTarget, model_05b: Path, temperature: float) -> None:
    """The model drafts for itself, in 4 bits, beside look-ups: nearly all it says is kept, and no text changes."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=24)
    plain = [llm.generate(prompt, params, speculative_config=None)[0] for prompt in PROMPTS]
    draft = {"method": "draft_model", "model": str(model_05b), "draft_dtype": "int4", "num_speculative_tokens": 3}
    for config in (draft | {"tree_top_k": 1}, {"method": "compose", "drafters": ["suffix", draft]}):
        fast = [llm.generate(prompt, params, speculative_config=config)[0] for prompt in PROMPTS]
        assert [output.token_ids for output in fast] == [output.token_ids for output in plain]
        passes = sum(output.stats.num_target_passes for output in fast)
        assert sum(len(output.token_ids) for output in fast) / passes > 2.5  # 4 would be every guess


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ngram_writes_what_plain_decoding_writes(llm: LLM, target: HFTarget, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=24)
    plain = [llm.generate(prompt, params, speculative_config=None)[0] for prompt in PROMPTS]
    fast = [llm.generate(prompt, params, speculative_config=NGRAM)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in fast] == [output.token_ids for output in plain]
    assert [output.text for output in fast] == [output.text for output in plain]
    assert sum(output.stats.num_accepted_tokens for output in fast) > 10
    # one batch of all four, speculation on: within the promised width, so the same again
    shallow = {**NGRAM, "num_speculative_tokens": min(15, target.kernel.width // 4 - 1)}
    batch = llm.generate(PROMPTS, params, speculative_config=shallow)
    assert [output.token_ids for output in batch] == [output.token_ids for output in plain]
    if temperature == 0.0:
        assert "return" in plain[0].text  # it is the real model, which completes a function
    else:
        assert len({tuple(output.token_ids) for output in plain}) == 4


def test_same_seed_same_text_and_another_seed_another(llm: LLM) -> None:
    def ids(seed: int) -> list[int]:
        (output,) = llm.generate(PROMPTS[3], SamplingParams(seed=seed, max_tokens=12), speculative_config=NGRAM)
        return output.token_ids

    assert ids(1) == ids(1) != ids(2)


# -- what `certify` must find ------------------------------------------------------------------------------------------


class Branching(Ngram):
    """What `Ngram` proposes as the second branch of a tree, whose first branch is something else."""

    def propose(self, states: list[Any], asks: list[Ask]) -> list[TokenTree]:
        trees = []
        for tree, ask in zip(super().propose(states, asks), asks, strict=True):
            right = tree.ids[1 : 1 + ask.depth]
            wrong = [(token + 1) % 1000 for token in right[:4]]
            trees.append(TokenTree.from_paths(ask.pending, [wrong, right] if right else []))
        return trees


def stale_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last kept position keeps the keys and values of the guess behind it, which was rejected."""
    commit = KVCache.commit

    def planted(self: KVCache, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            last = self.lengths[row] + path[-1] if len(path) else -1
            if len(path) > 1 and path[-1] + 1 < self.staged:
                for pair in self._kv:
                    for buffer in pair:
                        buffer[row, :, last] = buffer[row, :, last + 1]
        commit(self, paths)

    monkeypatch.setattr(KVCache, "commit", planted)


def sibling_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node of a tree sees all nodes before it, as if the tree were a chain."""

    def planted(self: TokenTree) -> Tensor:
        return torch.ones(self.num_nodes, self.num_nodes, dtype=torch.bool).tril()

    monkeypatch.setattr(TokenTree, "ancestors", property(planted))


@pytest.mark.parametrize("plant", [None, stale_slot, sibling_leak])
def test_certify_finds_what_is_planted_in_the_real_model(
    llm: LLM, target: HFTarget, plant: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = Size(num_prompts=2, max_tokens=40, num_samples=16, num_openings=1, own_length=2)
    prompts = [Named(str(i), list(llm.tokenizer(PROMPTS[i]).input_ids)) for i in (0, 1)]
    work = _Work(llm, SpeculativeConfig(method=Branching()), prompts, size, "quick", None, False)
    if plant is not None:
        plant(monkeypatch)
    layers = [work.greedy(), work.sampled()]
    kept = sum(output.stats.num_accepted_tokens for output in work.outputs)
    if plant is None:
        assert all(layer.verdict in ("lossless", "near_ties_only") for layer in layers), layers
        assert kept > 20
    else:
        assert "bug" in [layer.verdict for layer in layers], layers
        worst = next(one.difference for one in work.parted if not one.difference.near_tie)
        assert worst.floor < 1.0  # and the logits lie further apart than that, or the noise does
