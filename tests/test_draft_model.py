"""The draft model against the loop without a cache, its own weights as target, closed forms and laws."""

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracles import (
    VOCAB,
    Spy,
    Table,
    answer,
    decode,
    logits_of,
    plain,
    prompt_of,
    reference,
    requests,
    target,
    tiny,
)
from torch import Tensor
from transformers import PreTrainedModel

from paceline.decode import Request, run
from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.model import CHUNK, DraftModel
from paceline.draft.vocabulary import check_vocabularies
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.sampling import Draws, Law, Sampler, SamplingParams
from paceline.target import HFTarget
from paceline.tree import Drawn, TokenTree
from paceline.verify import RULES

PROMPTS = [prompt_of(length) for length in (1, 2, 3, 17)]
WIDE = 240
"""A budget that cuts no tree of these tests, also when four rows share it."""
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 5}
MODES = pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@functools.cache
def other(arch: str = "llama") -> HFTarget:
    """A model that often disagrees with the target."""
    return HFTarget(tiny(arch, 1, num_hidden_layers=1))


@functools.cache
def near(scale: float = 0.02) -> tuple[HFTarget, PreTrainedModel]:
    """The target's weights with noise added, as a draft and for the oracle."""

    def made() -> PreTrainedModel:
        model, generator = tiny("llama"), torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        return model

    return HFTarget(made()), made()


@functools.cache
def twin(arch: str = "llama", limit: int = 256) -> HFTarget:
    """The target's own weights in a model of their own."""
    return HFTarget(tiny(arch, 0, max_position_embeddings=limit))


class Watched(Drafter[Any]):
    """A draft model that is watched: what it proposes, what is kept of it, and whether its cache is in step.

    `change(round, tree)` may replace a proposal before the target sees it; a round is one sequence's.
    """

    def __init__(self, inner: DraftModel, change: Callable[[int, TokenTree], TokenTree] | None = None) -> None:
        self.inner, self.change = inner, change
        self.log: list[tuple[int, int, TokenTree, int]] = []
        """(number of the sequence, position of the pending token, tree, accepted nodes) of every round."""
        self.sizes: dict[Any, int] = {}
        """Committed tokens of each text."""
        self.rounds: Counter[Any] = Counter()
        self.open: dict[Any, tuple[int, TokenTree]] = {}

    def begin(self, prompt: Step) -> Any:
        state = self.inner.begin(prompt)
        self.sizes[state] = len(prompt.tokens)
        self.check(state)
        return state

    def propose(self, states: list[Any], asks: list[Ask]) -> list[TokenTree]:
        trees = self.inner.propose(states, asks)
        for i, (state, ask) in enumerate(zip(states, asks, strict=True)):
            assert trees[i].num_nodes - 1 <= ask.budget
            assert max(trees[i].depth) <= ask.depth
            self.check(state)
            self.rounds[state] += 1
            if self.change is not None:
                trees[i] = self.change(self.rounds[state], trees[i])
            self.open[state] = (ask.position, trees[i])
        return trees

    def observe(self, states: list[Any], steps: list[Step]) -> None:
        self.inner.observe(states, steps)
        for state, step in zip(states, steps, strict=True):
            self.sizes[state] += len(step.tokens)
            self.check(state)
            if state in self.open:
                position, tree = self.open.pop(state)
                self.log.append((list(self.sizes).index(state), position, tree, len(step.tokens) - 1))

    def end(self, state: Any) -> None:
        self.inner.end(state)

    def check(self, state: Any) -> None:
        """The documented invariant, for each sequence that is still read."""
        if not state.is_closed:
            assert self.inner.num_read(state) + len(state.unread) == self.sizes[state]

    @property
    def trees(self) -> list[tuple[int, TokenTree, int]]:
        """(position of the pending token, tree, accepted nodes) of every round."""
        return [entry[1:] for entry in self.log]

    @property
    def descended(self) -> list[bool]:
        """For each round, whether the target went down to the deepest drafted level."""
        return [accepted == max(tree.depth) for _, tree, accepted in self.trees]


def texts(rows: Sequence[Request]) -> list[list[int]]:
    return [row.output_ids for row in rows]


def expected(prompts: Sequence[Sequence[int]], max_new: int, settings: dict[str, Any]) -> list[list[int]]:
    return [answer(prompt, max_new, **settings).ids for prompt in prompts]


# -- the text ----------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("K", range(1, 7))
@pytest.mark.parametrize("top_k", [1, 3])
def test_the_text_is_the_reference(top_k: int, K: int, settings: dict[str, Any]) -> None:
    drafter = Watched(DraftModel(other(), tree_top_k=top_k, depth=K))
    rows = decode(target(), PROMPTS, drafter, max_tokens=9, depth=K, budget=4 * K, **settings)
    assert texts(rows) == expected(PROMPTS, 9, settings)


@MODES
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_text_of_a_row_alone_is_the_reference(top_k: int, prompt: list[int], settings: dict[str, Any]) -> None:
    drafter = Watched(DraftModel(near()[0], tree_top_k=top_k, depth=4))
    (row,) = decode(target(), [prompt], drafter, max_tokens=24, **settings)
    assert row.output_ids == answer(prompt, 24, **settings).ids


@pytest.mark.parametrize("rule", ["block", "standard"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_greedy_text_under_every_rule(rule: str, top_k: int) -> None:
    drafter = Watched(DraftModel(near()[0], tree_top_k=top_k, rule=rule))
    rows = decode(target(), PROMPTS, drafter, max_tokens=16, rule=rule)
    assert texts(rows) == expected(PROMPTS, 16, GREEDY)
    assert all(tree.drawn is Drawn.FIXED and tree.q is None for _, tree, _ in drafter.trees)
    assert sum(accepted for *_, accepted in drafter.trees) > 10  # top-k trees, not one-hot draws


@pytest.mark.parametrize("arch", ["gpt2", "gemma3", "mistral", "phi"])
def test_other_architectures_draft(arch: str) -> None:
    for settings in (GREEDY, SAMPLED):
        drafter = Watched(DraftModel(HFTarget(tiny(arch, 0)), tree_top_k=2, depth=4))
        rows = decode(target(arch), PROMPTS, drafter, max_tokens=20, budget=WIDE, **settings)
        wanted = [answer(prompt, 20, arch=arch, **settings).ids for prompt in PROMPTS]
        assert texts(rows) == wanted
        assert all(drafter.descended)


def test_settings_act_on_the_draft_too() -> None:
    settings = {**SAMPLED, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {5: -50.0}}
    drafter = Watched(DraftModel(twin()))
    rows = decode(target(), PROMPTS, drafter, max_tokens=24, **settings)
    assert texts(rows) == expected(PROMPTS, 24, settings)
    assert all(drafter.descended)


# -- the cache in step: a draft with the target's own weights is always right ------------------------------------------


@MODES
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[3:], PROMPTS], ids=["one token", "one row", "four rows"])
@pytest.mark.parametrize(("top_k", "depth"), [(1, 1), (1, 5), (2, 3), (3, 4)])
def test_eagle_336_every_draft_of_a_twin_is_kept(
    top_k: int, depth: int, prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    drafter = Watched(DraftModel(twin(), tree_top_k=top_k, depth=depth))
    rows = decode(target(), prompts, drafter, max_tokens=40, depth=depth, budget=WIDE, **settings)
    assert texts(rows) == expected(prompts, 40, settings)
    assert all(drafter.descended)
    deepest = Counter(max(tree.depth) for _, tree, _ in drafter.trees)
    assert deepest[depth] >= len(prompts) * (40 // (depth + 1) - 1)


@MODES
@pytest.mark.parametrize("budget", [2, 5, 8])
def test_a_twin_goes_down_to_a_leaf_in_a_small_tree(budget: int, settings: dict[str, Any]) -> None:
    drafter = Watched(DraftModel(twin(), tree_top_k=3))
    decode(target(), PROMPTS[3:], drafter, max_tokens=40, budget=budget, **settings)
    assert len(drafter.trees) > 5
    for _, tree, accepted in drafter.trees:
        best = [0]
        while tree.children[best[-1]]:
            best.append(tree.children[best[-1]][0])
        assert accepted == len(best) - 1


@MODES
@pytest.mark.parametrize("prompts", [PROMPTS[3:], PROMPTS], ids=["one row", "four rows"])
def test_eagle_336_a_spoilt_proposal_leaves_nothing_behind(prompts: list[list[int]], settings: dict[str, Any]) -> None:
    def spoil(turn: int, tree: TokenTree) -> TokenTree:
        if turn % 3 or tree.num_nodes < 3:
            return tree
        tokens = tree.tokens.clone()
        tokens[2] = (tokens[2] + 1) % VOCAB
        return TokenTree(tokens, tree.parents, score=tree.score)

    drafter = Watched(DraftModel(twin(), tree_top_k=1), spoil)
    rows = decode(target(), prompts, drafter, max_tokens=60, **settings)
    assert texts(rows) == expected(prompts, 60, settings)
    kept = [(accepted, tree.num_nodes - 1) for _, tree, accepted in drafter.trees]
    spoilt = [pair for pair in kept if pair[0] < pair[1]]
    assert len(spoilt) >= 3 * len(prompts)
    assert all(accepted == 1 for accepted, _ in spoilt)


def test_a_proposal_costs_one_pass_for_each_level_whatever_the_number_of_rows() -> None:
    spy = Spy(twin())
    inner = DraftModel(spy, tree_top_k=2, depth=4)
    drafter = Watched(inner)
    decode(target(), PROMPTS, drafter, max_tokens=25, budget=WIDE, **GREEDY)
    prompts_read = sum(len(prompt) > 1 for prompt in PROMPTS)
    assert len(spy.tokens) == prompts_read + 5 * 4  # 25 tokens are 5 full rounds of 4 guesses and one more token


# -- what is drawn, and how likely it is -------------------------------------------------------------------------------


def asked(params: SamplingParams, prompt: list[int], budget: int, depth: int) -> Ask:
    sampler = Sampler(params, VOCAB, prompt)
    return Ask(prompt[-1], len(prompt) - 1, budget, depth, sampler.log_law, sampler.top, sampler.draws)


def proposed(drafter: DraftModel, params: SamplingParams, prompt: list[int], budget: int, depth: int) -> TokenTree:
    state = drafter.begin(Step(prompt[:-1], prompt[1:]))
    (tree,) = drafter.propose([state], [asked(params, prompt, budget, depth)])
    drafter.end(state)
    return tree


def laws(model: PreTrainedModel, prompt: list[int], tree: TokenTree, node: int) -> Tensor:
    """The unmodified model's probabilities after a node."""
    path = [tree.ids[n] for n in tree.path(node)[1:]]
    return torch.softmax(logits_of(model, [*prompt, *path])[-1], 0)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_greedy_trees_are_the_likeliest_continuations(top_k: int) -> None:
    draft, model = near()
    prompt = PROMPTS[3]
    tree = proposed(DraftModel(draft, tree_top_k=top_k, depth=3), SamplingParams(temperature=0.0), prompt, 100, 3)
    assert tree.drawn is Drawn.FIXED
    assert max(tree.depth) == 3
    assert tree.score is not None
    for node, kids in enumerate(tree.children):
        if kids:
            law = laws(model, prompt, tree, node)
            assert [tree.ids[kid] for kid in kids] == law.topk(top_k).indices.tolist()
            for rank, kid in enumerate(kids):
                q = float(law[tree.ids[kid]])
                share = 1 - (1 - q) ** 1.3 if rank == 0 else q  # measured: the likeliest hits more often than q says
                assert float(tree.score[kid]) == pytest.approx(float(tree.score[node]) * share, rel=1e-5)
    # The best of each level were read on, the path of best children among them.
    for depth in (1, 2):
        level = [node for node, deep in enumerate(tree.depth) if deep == depth]
        inner = [node for node in level if tree.children[node]]
        assert len(inner) == min(top_k, len(level))
        ranked = sorted(level, key=lambda node: -float(tree.score[node]))
        assert set(ranked[: top_k - 1]) <= set(inner)


@pytest.mark.parametrize("budget", [1, 4, 9, 15])
def test_the_best_nodes_by_score_are_kept(budget: int) -> None:
    prompt, drafter = PROMPTS[3], DraftModel(near()[0], tree_top_k=3, depth=4)
    params = SamplingParams(temperature=0.0)
    whole, small = (proposed(drafter, params, prompt, size, 4) for size in (200, budget))
    paths = {
        tuple(tree.ids[n] for n in tree.path(node)): float(tree.score[node])
        for tree in (whole,)
        for node in range(1, tree.num_nodes)
        if tree.score is not None
    }
    kept = {tuple(small.ids[n] for n in small.path(node)) for node in range(1, small.num_nodes)}
    assert kept == set(sorted(paths, key=lambda path: -paths[path])[:budget])


def test_coupled_siblings_are_the_best_by_law_and_noise() -> None:
    draft, model = near()
    prompt, params = PROMPTS[3], SamplingParams(temperature=0.7, seed=11)
    tree = proposed(DraftModel(draft, tree_top_k=3, depth=3), params, prompt, 100, 3)
    assert tree.drawn is Drawn.FIXED
    for node, kids in enumerate(tree.children):
        if kids:
            noise = Draws(11).noise(len(prompt) + tree.depth[node], vocab_size=VOCAB)
            path = [tree.ids[n] for n in tree.path(node)[1:]]
            keys = torch.log_softmax(logits_of(model, [*prompt, *path])[-1] / 0.7, 0) + noise
            assert [tree.ids[kid] for kid in kids] == keys.topk(3).indices.tolist()


@pytest.mark.parametrize(("top_k", "drawn"), [(1, Drawn.IID), (3, Drawn.DISTINCT)])
@pytest.mark.parametrize("rule", ["block", "standard"])
def test_q_is_the_drafts_law(rule: str, top_k: int, drawn: Drawn) -> None:
    draft, model = near()
    prompt, drafter = PROMPTS[3], DraftModel(draft, tree_top_k=top_k, depth=3, rule=rule)
    shapes = set()
    for seed in range(6):
        tree = proposed(drafter, SamplingParams(seed=seed), prompt, 12, 3)
        assert tree.drawn is drawn
        assert tree.q is not None
        assert tree.q.dtype == torch.float32
        for node, kids in enumerate(tree.children):
            if kids:
                assert (tree.q[node] - laws(model, prompt, tree, node)).abs().max() < 1e-6
        shapes.add(tuple(tree.parents.tolist()))
    assert len(shapes) == 1  # nothing that was drawn has a say in the shape


def match(p: Tensor, q: Tensor) -> float:
    """P(argmax(log p + g) = argmax(log q + g)) = sum over x of 1 / sum over y of max(p_y/p_x, q_y/q_x)."""
    ratio = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return float((1.0 / ratio.sum(1)).sum())


@pytest.mark.slow
def test_acceptance_is_the_closed_form() -> None:
    draft, model = near()
    prompts = [prompt_of(5, seed) for seed in range(16)]
    settings = [{"seed": 100 + i} for i in range(len(prompts))]
    drafter = Watched(DraftModel(draft, depth=1))
    rows = decode(target(), prompts, drafter, depth=1, max_tokens=240, temperature=1.0, settings=settings)
    tested, hits, mean, variance, uncoupled = 0, 0, 0.0, 0.0, 0.0
    for i, row in enumerate(rows):
        p, q = (torch.softmax(logits_of(m, row.ids[:-1]), -1) for m in (plain(), model))
        for number, position, tree, accepted in drafter.log:
            if number == i and tree.num_nodes > 1:
                chance = match(p[position], q[position])
                tested, hits = tested + 1, hits + accepted
                mean, variance = mean + chance, variance + chance * (1 - chance)
                uncoupled += float((p[position] * q[position]).sum())
    assert tested > 2000
    assert 0.4 < mean / tested < 0.9
    assert abs(hits - mean) < 4 * math.sqrt(variance)
    assert mean - uncoupled > 20 * math.sqrt(variance)  # what a draft without the position's noise would reach


# -- the rules that need q ---------------------------------------------------------------------------------------------

P = [[0.50, 0.30, 0.15, 0.05], [0.10, 0.20, 0.30, 0.40], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.60, 0.30]]
Q = [[0.20, 0.20, 0.30, 0.30], [0.40, 0.30, 0.20, 0.10], [0.70, 0.10, 0.00, 0.20], [0.00, 0.50, 0.50, 0.00]]


def outcomes(rule: str, top_k: int, depth: int, budget: int, total: int) -> list[list[int]]:
    """What one pass writes behind token 0, for `total` seeds."""
    drafter = DraftModel(Table(Q), tree_top_k=top_k, depth=depth, rule=rule)
    logits, found = torch.tensor(P, dtype=torch.float64).log(), []

    def law(logits: Tensor, path: Sequence[int]) -> Tensor:
        return torch.log_softmax(logits, -1)

    def top(logits: Tensor, path: Sequence[int], position: int, k: int) -> list[tuple[int, float]]:
        return [(0, float(position))]  # keys that change with the position: a request that samples

    for first in range(0, total, 500):
        draws = [Draws(seed) for seed in range(first, first + 500)]
        states = [drafter.begin(Step([], [])) for _ in draws]
        trees = drafter.propose(states, [Ask(0, 0, budget, depth, law, top, d) for d in draws])
        for state in reversed(states):
            drafter.end(state)
        for tree, d in zip(trees, draws, strict=True):
            assert max(tree.depth) == depth or top_k > 1
            verdict = RULES[rule](lambda node, tree=tree: Law(None, logits[tree.ids[node]], 4), tree, d, 1)
            found.append([*(tree.ids[node] for node in verdict.path), verdict.token])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "top_k", "budget"), [("standard", 1, 2), ("standard", 2, 6), ("block", 1, 2), ("block", 3, 5)]
)
def test_the_law_is_exact_under_the_rules_that_need_q(rule: str, top_k: int, budget: int) -> None:
    total, rng = 3000, random.Random(1)
    found: Counter[tuple[int, ...]] = Counter()
    kept = 0
    for ids in outcomes(rule, top_k, 2, budget, total):
        kept += len(ids) - 1
        while len(ids) < 3:  # what the next pass would write
            ids.append(rng.choices(range(4), P[ids[-1]])[0])
        found[tuple(ids)] += 1
    assert kept > total / 2
    for width in (1, 2, 3):
        for path in itertools.product(range(4), repeat=width):
            chance = math.prod(P[a][b] for a, b in itertools.pairwise((0, *path)))
            count = sum(n for ids, n in found.items() if ids[:width] == path)
            assert abs(count - total * chance) < 5 * math.sqrt(total * chance * (1 - chance)), path


@pytest.mark.slow
def test_block_keeps_no_less_than_standard() -> None:
    kept = {rule: sum(len(ids) - 1 for ids in outcomes(rule, 1, 4, 4, 1000)) for rule in ("standard", "block")}
    assert kept["block"] > 1.02 * kept["standard"]


def test_a_token_that_q_lacks_is_never_drawn() -> None:
    drafter = DraftModel(Table(Q), tree_top_k=4, depth=3, rule="block")
    for seed in range(50):
        state = drafter.begin(Step([], []))
        sampler = Sampler(SamplingParams(seed=seed), 4, [3])
        ask = Ask(3, 0, 20, 3, sampler.log_law, sampler.top, sampler.draws)
        (tree,) = drafter.propose([state], [ask])
        drafter.end(state)
        assert all(Q[tree.ids[parent]][tree.ids[node]] > 0 for node, parent in _edges(tree))
        assert {tree.ids[kid] for kid in tree.children[0]} == {1, 2}


def _edges(tree: TokenTree) -> list[tuple[int, int]]:
    return list(enumerate(tree.parents.tolist()))[1:]


# -- vocabularies ------------------------------------------------------------------------------------------------------


@functools.cache
def padded(vocab: int, seed: int = 0) -> tuple[PreTrainedModel, HFTarget]:
    return tiny("llama", seed, vocab_size=vocab), HFTarget(tiny("llama", seed, vocab_size=vocab))


@MODES
@pytest.mark.parametrize(("rule", "top_k"), [("coupled", 1), ("coupled", 3), ("block", 2)])
def test_vllm_13849_a_smaller_draft_vocabulary(rule: str, top_k: int, settings: dict[str, Any]) -> None:
    model, big = padded(100)
    spy = Spy(padded(96, 1)[1])
    drafter = Watched(DraftModel(spy, tree_top_k=top_k, rule=rule))
    drafter.inner.bind(big)
    prompts = [prompt_of(5), [1, 98, 2, 3], prompt_of(9), [97]]
    rows = decode(big, prompts, drafter, rule=rule, max_tokens=24, **settings)
    if rule == "coupled" or settings is GREEDY:
        params = SamplingParams(**settings)
        assert texts(rows) == [reference(model, prompt, 24, params).ids for prompt in prompts]
    assert max(max(max(row) for row in rows) for rows in spy.tokens) < 96
    assert any(tree.num_nodes > 1 for _, tree, _ in drafter.trees)
    for row, prompt in zip(rows, prompts, strict=True):
        foreign = next((i for i, token in enumerate(row.ids[:-1]) if token >= 96), len(row.ids))
        drafted = [i for i, flag in enumerate(row.from_draft, len(prompt)) if flag]
        assert all(i <= foreign for i in drafted)


@MODES
@pytest.mark.parametrize(("rule", "top_k"), [("coupled", 1), ("coupled", 3), ("standard", 2)])
def test_vllm_13849_a_larger_draft_vocabulary(rule: str, top_k: int, settings: dict[str, Any]) -> None:
    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        logits[..., 100:] += 50.0

    model, small = padded(100)
    spy = Spy(padded(104, 1)[1], spoil)
    drafter = Watched(DraftModel(spy, tree_top_k=top_k, rule=rule))
    drafter.inner.bind(small)
    prompts = [prompt_of(5), prompt_of(9)]
    rows = decode(small, prompts, drafter, rule=rule, max_tokens=18, **settings)
    if rule == "coupled" or settings is GREEDY:
        params = SamplingParams(**settings)
        assert texts(rows) == [reference(model, prompt, 18, params).ids for prompt in prompts]
    assert max(max(max(row) for row in rows) for rows in spy.tokens) < 100
    assert all(max(tree.ids) < 100 and tree.num_nodes > 1 for _, tree, _ in drafter.trees[:-4])


class Words:
    """A tokenizer as far as its vocabulary goes."""

    def __init__(self, words: Sequence[str], eos: int | None = None, **more: int) -> None:
        self.vocab = {word: i for i, word in enumerate(words)} | more
        if eos is not None:
            self.eos_token_id = eos

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Words("abcd"), Words("abcd")),
        (Words("abcd"), Words("ab")),
        (Words("ab", eos=1), Words(["a", "b", "<pad>", "<extra>"], eos=1)),
        (Words("ab", eos=1), Words("ab")),
        (Words("ab", z=5), Words("ab", z=5, y=6)),
    ],
)
def test_vocabularies_that_fit(ours: Words, theirs: Words) -> None:
    check_vocabularies(ours, theirs)
    check_vocabularies(theirs, ours)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (Words("abcd"), Words("abxd"), "id 2 is 'c' for the target and 'x' for the draft.*own family"),
        (Words("abc"), Words("bac"), "id 0 is 'a' for the target and 'b'"),
        (Words("ab", z=5), Words("abc", z=5), "id 2 is no token for the target and 'c'"),
        (Words("abc", eos=1), Words("abc", eos=2), r"end with id 1 \('b'\) for the target and with id 2 \('c'\)"),
        (Words(""), Words("abc"), "0 and 3 tokens"),
    ],
)
def test_vllm_13849_vocabularies_that_do_not_fit(ours: Words, theirs: Words, words: str) -> None:
    with pytest.raises(IncompatibleDrafter, match=words):
        check_vocabularies(ours, theirs)


# -- the end of the draft's context ------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_exllamav2_274_a_shorter_draft_context(top_k: int, arch: str, settings: dict[str, Any]) -> None:
    name = "n_positions" if arch == "gpt2" else "max_position_embeddings"
    spy = Spy(HFTarget(tiny(arch, 1, **{name: 64})))
    drafter = Watched(DraftModel(spy, tree_top_k=top_k))
    prompts = [prompt_of(length) for length in (30, 55, 63, 64, 100)]
    made = requests(target(arch), prompts, drafter, max_tokens=40, **settings)
    for i, _ in enumerate(run(target(arch), made)):
        del i
        assert all(len(state.unread) <= 6 for state in drafter.sizes)
    assert texts(made) == [answer(prompt, 40, arch=arch, **settings).ids for prompt in prompts]
    assert spy.furthest == 63
    deepest = {position + max(tree.depth) for position, tree, _ in drafter.trees if tree.num_nodes > 1}
    assert max(deepest) == 64  # the last guess is made at position 63 and needs none of its own
    assert all(tree.num_nodes == 1 for position, tree, _ in drafter.trees if position >= 64)


@MODES
def test_exllamav2_274_a_twin_is_right_up_to_its_last_position(settings: dict[str, Any]) -> None:
    drafter = Watched(DraftModel(twin(limit=64), depth=5, tree_top_k=1))
    decode(target(), [prompt_of(30)], drafter, max_tokens=60, **settings)
    assert all(drafter.descended)
    assert max(position + max(tree.depth) for position, tree, _ in drafter.trees if tree.num_nodes > 1) == 64


# -- what is not a number ----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(("top_k", "rule"), [(1, "coupled"), (3, "coupled"), (1, "block"), (3, "standard")])
def test_eagle_69_bad_logits_of_the_draft(top_k: int, rule: str, value: float, settings: dict[str, Any]) -> None:
    bad = {20, 21, 30}

    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        for position in bad:
            logits[positions == position] = value

    drafter = Watched(DraftModel(Spy(twin(), spoil), tree_top_k=top_k, rule=rule))
    rows = decode(target(), [PROMPTS[3], prompt_of(5)], drafter, max_tokens=40, rule=rule, budget=WIDE, **settings)
    if rule == "coupled" or settings is GREEDY:
        assert texts(rows) == expected([PROMPTS[3], prompt_of(5)], 40, settings)
        assert all(drafter.descended)
    assert any(tree.num_nodes == 1 for position, tree, _ in drafter.trees if position in bad)
    for position, tree, _ in drafter.trees:
        assert all(position + tree.depth[parent] not in bad for _, parent in _edges(tree))


def test_a_single_nan_is_enough_and_an_infinite_logit_is_a_guess() -> None:
    def spoil(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        logits[..., 7] = math.nan

    tree = proposed(DraftModel(Spy(twin(), spoil)), SamplingParams(seed=1), PROMPTS[3], 5, 5)
    assert tree.num_nodes == 1

    def certain(logits: Tensor, positions: Tensor, tokens: Tensor) -> None:
        logits[..., 7] = math.inf

    for rule, params in itertools.product(
        ("coupled", "block"), (SamplingParams(seed=1), SamplingParams(temperature=0))
    ):
        tree = proposed(DraftModel(Spy(twin(), certain), rule=rule), params, PROMPTS[3], 5, 5)
        assert tree.num_nodes == 1 or tree.ids[1] == 7


@MODES
def test_nan_does_not_stay_in_the_cache(settings: dict[str, Any]) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[PROMPTS[3][4]] = math.nan
    drafter = Watched(DraftModel(HFTarget(model)))
    rows = decode(target(), PROMPTS, drafter, max_tokens=30, **settings)
    assert texts(rows) == expected(PROMPTS, 30, settings)
    sure = [tree for _, tree, _ in drafter.trees if tree.ids[0] != PROMPTS[3][4]]
    assert sum(tree.num_nodes > 1 for tree in sure) >= len(sure) - len(PROMPTS)  # the last pass has no room


# -- sequences that come and go ----------------------------------------------------------------------------------------


def test_llamacpp_20_rows_are_freed_when_they_end() -> None:
    inner = DraftModel(twin(), depth=3)
    for passes in range(6):
        running = run(target(), requests(target(), PROMPTS, Watched(inner), max_tokens=30))
        for _ in itertools.islice(running, passes * len(PROMPTS)):
            pass
        running.close()
        assert inner._pool is None
        assert inner._rows == []
    drafter = Watched(inner)
    lengths = [{"max_tokens": n} for n in (3, 30, 9, 20)]
    rows = decode(target(), PROMPTS, drafter, settings=lengths)
    assert texts(rows) == [answer(p, n["max_tokens"]).ids for p, n in zip(PROMPTS, lengths, strict=True)]
    assert all(drafter.descended)  # the rows that go on are not disturbed by those that leave
    assert inner._pool is None


def test_ending_in_the_middle_and_twice() -> None:
    inner = DraftModel(twin(), depth=2)
    params = SamplingParams(temperature=0.0)
    states = [inner.begin(Step(prompt[:-1], prompt[1:])) for prompt in PROMPTS]
    inner.end(states[0])  # never asked
    asks = [asked(params, prompt, 2, 2) for prompt in PROMPTS]
    inner.propose(states[1:], asks[1:])
    for _ in range(2):
        inner.end(states[2])  # between propose and observe
    assert [state.row for state in states] == [None, 0, None, 1]
    left = [1, 3]
    for i in left:
        ids = answer(PROMPTS[i], 3).ids
        inner.observe([states[i]], [Step([PROMPTS[i][-1], *ids[:2]], ids)])
        assert inner.num_read(states[i]) + len(states[i].unread) == len(PROMPTS[i]) + 2
    texts_now = [[*PROMPTS[i], *answer(PROMPTS[i], 3).ids] for i in left]
    trees = inner.propose([states[i] for i in left], [asked(params, text, 2, 2) for text in texts_now])
    assert [tree.ids[1:] for tree in trees] == [answer(PROMPTS[i], 5).ids[3:] for i in left]
    assert inner.propose([states[2]], [asks[2]])[0].num_nodes == 1
    inner.observe([states[2]], [Step([1], [2])])
    for state in states:
        inner.end(state)
    assert inner._pool is None


@MODES
def test_interleaved_streams_share_a_drafter(settings: dict[str, Any]) -> None:
    drafter = Watched(DraftModel(twin(), depth=3))
    first = requests(target(), PROMPTS[:2], drafter, max_tokens=30, **settings)
    second = requests(target(), PROMPTS[2:], drafter, max_tokens=24, **settings)
    running = [run(target(), first), run(target(), second)]
    for turn in itertools.cycle((0, 1, 1)):
        next(running[turn], None)
        if all(row.finish_reason for row in [*first, *second]):
            break
    for stream in running:
        stream.close()
    assert texts(first) == expected(PROMPTS[:2], 30, settings)
    assert texts(second) == expected(PROMPTS[2:], 24, settings)
    assert all(drafter.descended)


@MODES
def test_a_pass_that_breaks_off_leaves_nothing(settings: dict[str, Any]) -> None:
    class Breaks(Spy):
        fails = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().forward(*args, **kwargs)

    drafter, broken = Watched(DraftModel(twin(), depth=3)), Breaks(target())
    made = requests(target(), PROMPTS[:2], drafter, max_tokens=30, **settings)
    other_rows = requests(target(), PROMPTS[2:], drafter, max_tokens=30, **settings)
    lost, good = run(broken, other_rows), run(target(), made)
    for _ in range(2):
        next(lost)
        next(good)
    broken.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        list(lost)
    for _ in good:
        pass
    assert texts(made) == expected(PROMPTS[:2], 30, settings)
    assert all(drafter.descended)
    assert drafter.inner._pool is None


def test_a_proposal_may_be_asked_for_again() -> None:
    inner, params, prompt = DraftModel(twin(), tree_top_k=2, depth=3), SamplingParams(temperature=0.0), PROMPTS[3]
    state = inner.begin(Step(prompt[:-1], prompt[1:]))
    trees = [inner.propose([state], [asked(params, prompt, 9, 3)])[0] for _ in range(3)]
    assert all(torch.equal(tree.tokens, trees[0].tokens) for tree in trees)
    assert inner.num_read(state) == len(prompt) - 1
    inner.observe([state], [Step([], [])])  # nothing was kept, not even the root
    assert inner.num_read(state) == len(prompt) - 1


def test_reading_in_chunks_and_catching_up() -> None:
    model = tiny("llama", max_position_embeddings=2048)
    spy = Spy(HFTarget(tiny("llama", max_position_embeddings=2048)))
    inner, params = DraftModel(spy, depth=2), SamplingParams(temperature=0.0)
    text = prompt_of(1700)
    state = inner.begin(Step(text[:1100], text[1:1101]))
    assert spy.tokens == []  # a text is read when it is first asked about
    inner.propose([state], [asked(params, text[:1101], 2, 2)])
    assert [len(row[0]) for row in spy.tokens[:3]] == [CHUNK, CHUNK, 1100 - 2 * CHUNK]
    for token in range(1100, 1699):  # a long while without being asked
        inner.observe([state], [Step([text[token]], [text[token + 1]])])
        assert inner.num_read(state) + len(state.unread) == token + 1
    (tree,) = inner.propose([state], [asked(params, text, 2, 2)])
    assert max(len(row[0]) for row in spy.tokens) == CHUNK
    first = int(logits_of(model, text)[-1].argmax())
    assert tree.ids[1:] == [first, int(logits_of(model, [*text, first])[-1].argmax())]


# -- other dtypes, wrong use -------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("top_k", "rule"), [(1, "coupled"), (3, "coupled"), (1, "block"), (2, "block")])
def test_transformers_35099_a_draft_of_another_dtype(
    top_k: int, rule: str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    drafter = Watched(DraftModel(HFTarget(tiny("llama", dtype=dtype)), tree_top_k=top_k, rule=rule))
    rows = decode(target(), PROMPTS, drafter, rule=rule, max_tokens=20, **settings)
    if rule == "coupled" or settings is GREEDY:
        assert texts(rows) == expected(PROMPTS, 20, settings)
        assert sum(drafter.descended) > len(drafter.trees) / 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@MODES
@pytest.mark.parametrize(("top_k", "rule"), [(1, "coupled"), (3, "coupled"), (1, "block"), (2, "standard")])
def test_transformers_35099_a_draft_on_another_device(top_k: int, rule: str, settings: dict[str, Any]) -> None:
    drafter = Watched(DraftModel(HFTarget(tiny("llama").to("cuda")), tree_top_k=top_k, rule=rule))
    rows = decode(target(), PROMPTS, drafter, rule=rule, max_tokens=20, **settings)
    if rule == "coupled" or settings is GREEDY:
        assert texts(rows) == expected(PROMPTS, 20, settings)
        assert all(drafter.descended)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tree_top_k": 0}, "tree_top_k=0 was given; 1 or more"),
        ({"depth": 0}, "depth=0 was given"),
        ({"rule": "blok"}, "did you mean 'block'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        DraftModel(twin(), **settings)
