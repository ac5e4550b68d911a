"""Early exit against the loop without a cache, layers run apart against `transformers`' own hidden states."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracles import ARCHS, GREEDY, VOCAB, answer, decode, float64_softmax, plain, prompt_of, reference, target, tiny
from test_draft_model import near
from torch import nn

from paceline.draft.base import NoDraft
from paceline.draft.compose import Compose
from paceline.draft.costs import Costs
from paceline.draft.early_exit import EarlyExit
from paceline.draft.model import DraftModel
from paceline.draft.suffix import Suffix
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.layers import decoder_layers
from paceline.target import HFTarget
from paceline.testing import ToyTarget, check_drafter
from paceline.tree import TokenTree, stack

PROMPTS = [prompt_of(length) for length in (1, 2, 9, 30)]
MODES = pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
FREE = Costs(target=((1, 1.0), (64, 1.05)))


def silent(layers: int = 4, exit_layer: int = 2) -> HFTarget:
    """A model whose layers from `exit_layer` on add nothing: the exit says what the whole model says."""
    model = tiny("llama", num_hidden_layers=layers)
    with torch.no_grad():
        for layer in list(model.model.layers)[exit_layer:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return HFTarget(model)


@contextmanager
def counted(model: HFTarget) -> Iterator[list[Counter[str]]]:
    """How many tokens each layer reads, of passes over trees and of others."""
    counts = [Counter[str]() for _ in range(model.num_layers)]

    def hook(number: int) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
            counts[number]["tokens"] += args[0].shape[1]

        return count

    handles = [
        layer.register_forward_hook(hook(i), with_kwargs=True) for i, layer in enumerate(decoder_layers(model.model))
    ]
    yield counts
    for handle in handles:
        handle.remove()


def bound(drafter: EarlyExit, model: HFTarget) -> EarlyExit:
    drafter.bind(model)
    return drafter


# -- layers run apart --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_layers_apart_are_the_layers_together(arch: str) -> None:
    model, prompt = target(arch), prompt_of(9)
    tree = TokenTree.from_paths(5, [[7, 9], [7, 4], [8]])
    one = stack([tree])

    def read() -> Any:
        cache = model.new_cache(1, 16)
        model.forward(torch.tensor([prompt]), torch.arange(9)[None], None, cache, logits=False)
        cache.commit([range(9)])
        return cache

    whole = model.forward(one.tokens, one.offsets, one.mask, read()).logits
    for exit_layer in range(1, model.num_layers):
        cache = read()
        first = model.forward(one.tokens, one.offsets, one.mask, cache, layers=(0, exit_layer))
        assert cache.staged == tree.num_nodes
        cache.unstage()
        rest = model.forward(
            one.tokens, one.offsets, one.mask, cache, layers=(exit_layer, model.num_layers), states=first.hidden
        )
        torch.testing.assert_close(rest.logits, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi"])
def test_an_exit_is_norm_and_head_on_the_hidden_states(arch: str) -> None:
    model, own, prompt = target(arch), plain(arch), torch.tensor([prompt_of(9)])
    with float64_softmax(), torch.no_grad():
        states = own(prompt, output_hidden_states=True, use_cache=False).hidden_states[1]
        base: Any = own.model
        norm = getattr(base, "norm", None) or base.final_layernorm
        expected = own.get_output_embeddings()(norm(states))
    cache = model.new_cache(1, 16)
    found = model.forward(prompt, torch.arange(9)[None], None, cache, layers=(0, 1))
    torch.testing.assert_close(found.hidden, states, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.logits, expected, rtol=1e-9, atol=1e-9)


def test_an_error_inside_leaves_the_model_whole() -> None:
    model = silent()
    before = list(decoder_layers(model.model))
    with pytest.raises(Exception, match=r".*"):
        model.forward(torch.tensor([[VOCAB + 5]]), torch.tensor([[0]]), None, model.new_cache(1, 4), layers=(0, 2))
    assert list(decoder_layers(model.model)) == before


# -- the text ----------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("depth", [None, 4])
def test_the_text_is_the_reference(depth: int | None, top_k: int, arch: str, settings: dict[str, Any]) -> None:
    drafter = bound(EarlyExit(1, tree_top_k=top_k, depth=depth), target(arch))
    rows = decode(target(arch), PROMPTS, drafter, max_tokens=24, **settings)
    assert [row.output_ids for row in rows] == [answer(p, 24, arch, **settings).ids for p in PROMPTS]


@MODES
def test_an_exit_that_says_what_the_model_says_descends_to_the_deepest_level(settings: dict[str, Any]) -> None:
    model = silent()
    drafter = bound(EarlyExit(2, tree_top_k=1, depth=5, costs=FREE), model)
    plainly = decode(model, [prompt_of(9)], NoDraft(), max_tokens=36, **settings)
    (row,) = decode(model, [prompt_of(9)], drafter, max_tokens=36, **settings)
    assert row.output_ids == plainly[0].output_ids
    assert (row.stats.num_target_passes, row.stats.num_accepted_tokens) == (6, 30)


@MODES
def test_no_layer_reads_a_token_twice(settings: dict[str, Any]) -> None:
    model = silent(5, 3)
    drafter = bound(EarlyExit(3, tree_top_k=2, depth=4), model)
    with counted(model) as counts:
        (row,) = decode(model, [prompt_of(12)], drafter, max_tokens=24, **settings)
    read = [count["tokens"] for count in counts]
    assert len(set(read)) == 1
    assert read[0] == 11 + row.stats.num_target_passes + row.stats.num_draft_tokens


@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
@pytest.mark.parametrize("depth", [None, 3])
def test_rows_with_other_drafters_beside(depth: int | None, rule: str) -> None:
    """Rows that began in the first layers, rows that did not, rows of a second exit: one pass, all texts right."""
    model = tiny("llama", num_hidden_layers=4)
    whole, own = HFTarget(model), tiny("llama", num_hidden_layers=4)
    exits = [bound(EarlyExit(e, depth=depth, rule=rule, tree_top_k=2), whole) for e in (2, 2, 3)]
    drafters = [exits[0], NoDraft(), exits[0], Suffix(), DraftModel(near()[0], rule=rule)]
    prompts = [prompt_of(n) for n in (9, 5, 12, 20, 7)]
    expected = [reference(own, p, 16, GREEDY).ids for p in prompts]
    assert [row.output_ids for row in decode(whole, prompts, drafters, max_tokens=16, rule=rule)] == expected
    drafters[1], drafters[3] = exits[1], exits[2]
    assert [row.output_ids for row in decode(whole, prompts, drafters, max_tokens=16, rule=rule)] == expected


@MODES
def test_in_a_composition(settings: dict[str, Any]) -> None:
    model = silent()
    prompt = prompt_of(30)
    plainly = decode(model, [prompt], NoDraft(), max_tokens=40, **settings)
    early = EarlyExit(2, costs=FREE)
    compose = Compose([Suffix(), early], costs=FREE)
    compose.bind(model)
    (row,) = decode(model, [prompt], compose, max_tokens=40, **settings)
    assert row.output_ids == plainly[0].output_ids
    assert row.stats.mean_acceptance_length > 1.5


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
def test_every_check_passes(rule: str) -> None:
    model = HFTarget(tiny("llama", vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=2))
    prompts = [[1, 2, 3], [4, 0, 4, 0, 4], [2]]
    check_drafter(lambda: EarlyExit(1, rule=rule), model, prompts=prompts, rules=(rule,)).verify()


# -- what pays ---------------------------------------------------------------------------------------------------------


def test_an_exit_that_never_hits_is_soon_left_alone() -> None:
    """A model whose first half knows nothing: what is drafted falls to next to nothing."""
    rows = decode(target(), [prompt_of(9)], bound(EarlyExit(1), target()), max_tokens=120, costs=Costs())
    stats = rows[0].stats
    assert stats.num_accepted_tokens < 0.5 * stats.num_target_passes
    assert stats.num_draft_tokens < stats.num_target_passes


def test_costs_are_the_share_of_the_weights() -> None:
    model = silent(4, 2)
    drafter = EarlyExit(1, costs=Costs(target=((1, 1.0), (32, 1.5))))
    drafter.bind(model)
    layer = sum(p.numel() for p in decoder_layers(model.model)[0].parameters())
    head = model.model.lm_head.weight.numel()
    norm = model.model.model.norm.weight.numel()
    assert drafter.costs.guess(1) == pytest.approx((layer + head) / (4 * layer + head + norm))
    assert drafter.costs.guess(32) == pytest.approx(1.5 * drafter.costs.guess(1))


@pytest.mark.parametrize(("exit_layer", "needed"), [(4, "1 to 3"), (9, "1 to 3")])
def test_layers_out_of_range_are_refused(exit_layer: int, needed: str) -> None:
    with pytest.raises(IncompatibleDrafter, match=f"exit_layer={exit_layer}.*{needed}"):
        EarlyExit(exit_layer).bind(silent())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "settings", [{"exit_layer": 0}, {"exit_layer": -1}, {"exit_layer": 1.5}, {"depth": 0}, {"rule": "blok"}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(settings))):
        EarlyExit(**settings)


def test_a_target_without_layers_is_refused() -> None:
    with pytest.raises(IncompatibleDrafter, match="ToyTarget has no layers"):
        EarlyExit().bind(ToyTarget.random(3))


def test_a_model_whose_layers_do_not_come_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that keeps something from an early layer for a late one is found out by trying."""
    model = silent(4, 4)
    layers: list[Any] = list(decoder_layers(model.model))
    kept: list[torch.Tensor] = []
    embed, first, last = model.model.model.embed_tokens, layers[0].forward, layers[3].forward
    own = embed.forward
    monkeypatch.setattr(embed, "forward", lambda ids: kept.clear() or own(ids))
    monkeypatch.setattr(layers[0], "forward", lambda x, *a, **k: kept.append(x) or first(x, *a, **k))
    monkeypatch.setattr(layers[3], "forward", lambda x, *a, **k: last(x + (kept.pop() if kept else 0.0), *a, **k))
    with pytest.raises(IncompatibleDrafter, match="run apart"):
        EarlyExit(2).bind(model)
