"""Medusa and EAGLE against forwards written from the formulas, without caches; texts against plain decoding."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_oracles import Reference, eagle, eagle3, medusa, medusa_forward
from oracles import answer, decode, plain, prompt_of, target
from torch import Tensor

from paceline.draft.base import Ask, Drafter
from paceline.draft.compose import Compose
from paceline.draft.costs import TILES
from paceline.draft.eagle import Eagle, Unrolled, unrolled_mask
from paceline.draft.losses import Batch, Mix
from paceline.draft.medusa import Heads, Medusa, checked_choices
from paceline.draft.ngram import Ngram
from paceline.draft.suffix import Suffix
from paceline.errors import BadRequest, IncompatibleDrafter
from paceline.formats import Head
from paceline.target import HFTarget
from paceline.testing import check_drafter
from paceline.tree import TokenTree

MODES = pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "top_p": 0.95}], ids=["greedy", "sampled"]
)


def width() -> int:
    return target().hidden_size


def size() -> int:
    return target().vocab_size


EAGLES: dict[str, Callable[[], Head]] = {
    "eagle": lambda: eagle(width(), size()),
    "eagle without bias": lambda: eagle(width(), size(), fc_bias=False),
    "eagle3": lambda: eagle3(width(), size()),
    "eagle3 some ids": lambda: eagle3(width(), size(), ids=torch.arange(1, size(), 2)),
    "eagle3 norm before residual": lambda: eagle3(width(), size(), norm_before_residual=True),
    "eagle3 norm output": lambda: eagle3(width(), size(), norm_output=True),
    "eagle3 norm before fc": lambda: eagle3(width(), size(), norm_before_fc=True),
    "eagle3 fc norm": lambda: eagle3(width(), size(), fc_norm=True),
    "eagle3 other theta": lambda: eagle3(width(), size(), rope_theta=500.0),
}
EACH = pytest.mark.parametrize("name", EAGLES)


def bound(drafter: Drafter[Any]) -> Any:
    drafter.bind(target())
    return drafter


def hidden_states(ids: list[int]) -> list[Tensor]:
    """The model's own, behind each token of a text: a tuple entry per layer, [T, H] each."""
    with torch.no_grad():
        out = plain()(torch.tensor([ids]), output_hidden_states=True)
    return [state[0] for state in out.hidden_states]


def reference(head: Head) -> Reference:
    model = plain()
    return Reference(head, model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach())


def pairs_of(head: Head, drafter: Any, ids: list[int]) -> list[tuple[Tensor, int]]:
    """(state behind token i, token i + 1) of a text, by the model without a cache."""
    states, own = hidden_states(ids[:-1]), reference(head)
    tapped = torch.cat([states[tap] for tap in drafter.taps], dim=-1)
    return [(own.fuse(tapped[i]), ids[i + 1]) for i in range(len(ids) - 1)]


# -- forwards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("lm_head", ["own", "shared", "target"])
def test_medusa_heads_are_their_formula(layers: int, lm_head: str) -> None:
    head = medusa(width(), size(), 3, layers, lm_head=lm_head)
    matrix = plain().get_output_embeddings().weight.detach()
    states = torch.randn(5, width(), dtype=torch.float64)
    heads = Heads(head, target())
    found = heads(states)
    wanted = torch.stack([medusa_forward(head, state, matrix) for state in states])
    assert found.shape == (5, 3, size())
    assert torch.allclose(found, wanted, rtol=0, atol=1e-10)
    assert torch.equal(heads(states, 2), found[:, :2])


@EACH
def test_eagle_reads_pairs_as_its_formula_does(name: str) -> None:
    """A whole text at once through the network, pair by pair through the reference."""
    head = EAGLES[name]()
    drafter = bound(Eagle(head))
    ids = prompt_of(12)
    pairs = pairs_of(head, drafter, ids)
    own = reference(head)
    wanted = torch.stack(own.states(pairs))
    states = torch.stack([state for state, _ in pairs])[None]
    tokens = torch.tensor([[token for _, token in pairs]])
    count = len(pairs)
    found = drafter.network.read(
        tokens, states, torch.arange(count)[None], torch.ones(count, count, dtype=torch.bool).tril()[None], Unrolled()
    )[0]
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-4)
    logits = drafter.network.score(found)
    assert torch.allclose(logits, torch.stack([own.logits(state) for state in wanted]), rtol=1e-5, atol=1e-4)


@EACH
def test_a_draft_with_the_cache_is_the_draft_without_one(name: str) -> None:
    """Every proposal of a run, prompt chunk or not, kept or rejected: the reference drafts from the text alone."""
    head = EAGLES[name]()
    drafter = bound(Eagle(head, tree_top_k=1, depth=3))
    seen: list[tuple[int, list[int]]] = []
    propose = drafter.propose

    def noted(states: Any, asks: list[Ask]) -> list[TokenTree]:
        trees = propose(states, asks)
        seen.append((asks[0].position, trees[0].ids))
        return trees

    drafter.propose = noted
    (row,) = decode(target(), [prompt_of(9)], drafter, max_tokens=25)
    assert row.output_ids == answer(prompt_of(9), 25).ids
    assert len(seen) > 10
    own = reference(head)
    for position, ids in seen:
        text = row.ids[: position + 1]
        assert ids[0] == text[-1]
        assert ids[1:] == own.chain(pairs_of(head, drafter, text), len(ids) - 1)


def test_medusa_drafts_from_the_state_before_the_pending_token() -> None:
    head = medusa(width(), size(), 3)
    drafter = bound(Medusa(head, tree_top_k=1))
    seen: list[tuple[int, list[int]]] = []
    propose = drafter.propose

    def noted(states: Any, asks: list[Ask]) -> list[TokenTree]:
        trees = propose(states, asks)
        seen.append((asks[0].position, trees[0].ids))
        return trees

    drafter.propose = noted
    (row,) = decode(target(), [prompt_of(9)], drafter, max_tokens=25)
    assert row.output_ids == answer(prompt_of(9), 25).ids
    drafted = 0
    for position, ids in seen:
        last = hidden_states(row.ids[:position])[-1][-1]  # behind the token before the pending one
        best = medusa_forward(head, last).argmax(-1).tolist()
        assert ids[1:] == best[: len(ids) - 1]
        drafted += len(ids) - 1
    assert drafted > 10


# -- texts -------------------------------------------------------------------------------------------------------------


def drafters() -> dict[str, Callable[[], Drafter[Any]]]:
    made: dict[str, Callable[[], Drafter[Any]]] = {
        name: lambda name=name: Eagle(EAGLES[name]())  # type: ignore[misc]
        for name in ("eagle", "eagle3", "eagle3 some ids")
    }
    made["eagle3 levels"] = lambda: Eagle(EAGLES["eagle3"](), tree_top_k=3, depth=3)
    made["medusa"] = lambda: Medusa(medusa(width(), size(), 3))
    made["medusa choices"] = lambda: Medusa(medusa(width(), size(), 3), choices=[[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    made["medusa on the target's matrix"] = lambda: Medusa(medusa(width(), size(), 2, lm_head="target"))
    made["compose"] = lambda: Compose([Suffix(), Eagle(EAGLES["eagle3"](), costs=TILES)], costs=TILES)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters())
@MODES
@pytest.mark.parametrize("budget", [None, TILES], ids=["all", "budget"])
def test_texts_are_plain_decodings_own(name: str, settings: dict[str, Any], budget: Any) -> None:
    prompts = [prompt_of(length) for length in (1, 2, 9, 30)]
    for chosen in ([prompts[0]], [prompts[2]], prompts):
        rows = decode(target(), chosen, bound(drafters()[name]()), costs=budget, max_tokens=30, **settings)
        for prompt, row in zip(chosen, rows, strict=True):
            assert row.output_ids == answer(prompt, 30, **settings).ids
            assert row.stats.num_draft_tokens > 0 or budget is not None


@pytest.mark.parametrize("rule", ["coupled", "block", "standard"])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
@pytest.mark.slow
def test_every_check_passes(kind: str, rule: str) -> None:
    model = HFTarget(small())
    hidden, vocab = model.hidden_size, model.vocab_size
    made: dict[str, Callable[[], Drafter[Any]]] = {
        "medusa": lambda: Medusa(medusa(hidden, vocab, 2), tree_top_k=2, rule=rule),
        "eagle": lambda: Eagle(eagle(hidden, vocab), depth=2, rule=rule),
        "eagle3": lambda: Eagle(eagle3(hidden, vocab, ids=torch.tensor([0, 2, 3, 4])), depth=2, rule=rule),
    }
    prompts = [[1, 2, 3], [4, 0, 4, 0, 4], [2]]
    check_drafter(made[kind], model, prompts=prompts, rules=(rule,)).verify()


def small() -> Any:
    from oracles import tiny

    return tiny("llama", vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=2)


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle3", "eagle3 some ids", "eagle3 norm output", "eagle3 norm before residual"])
def test_an_unrolled_step_is_a_draft(name: str) -> None:
    """Step s at place t: true pairs up to t - s, then s guesses that are the text's own tokens, read one by one."""
    head = EAGLES[name]()
    drafter = bound(Eagle(head))
    ids = prompt_of(9)
    pairs, own = pairs_of(head, drafter, ids), reference(head)
    count = len(pairs)
    states = torch.stack([state for state, _ in pairs])[None]
    following = torch.tensor([[token for _, token in pairs]])
    seen = Unrolled()
    for step in range(4):
        out = drafter._step(states, following, seen, step)
        for at in range(step, count):
            text = pairs[: at - step + 1]
            for behind in range(at - step + 1, at + 1):
                text = [*text, (own.fed_back(own.states(text)[-1]), pairs[behind][1])]
            assert torch.allclose(out[0, at], own.states(text)[-1], rtol=1e-5, atol=1e-4)
        states = torch.nn.functional.pad(drafter.network.fed_back(out)[:, :-1], (0, 0, 1, 0))


def test_the_mask_of_the_first_step_is_causal() -> None:
    assert torch.equal(unrolled_mask(5, 0), torch.ones(5, 5, dtype=torch.bool).tril())
    assert unrolled_mask(5, 2).shape == (5, 15)
    assert unrolled_mask(5, 2)[4].nonzero().flatten().tolist() == [0, 1, 2, 5 + 3, 10 + 4]


def trained(drafter: Any, texts: list[list[int]], steps: int, rate: float, unrolled: dict[str, int]) -> Any:
    """A drafter after some steps on a few texts, at a rate that falls along a cosine."""
    module = drafter.network if isinstance(drafter, Eagle) else drafter.heads
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(parameters, lr=rate)
    tokens = torch.tensor(texts)
    states = [hidden_states(text) for text in texts]
    tapped = torch.stack([torch.cat([own[tap] for tap in drafter.taps], dim=-1) for own in states])
    last = torch.stack([own[-1] for own in states])
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), tapped, last)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        drafter.loss(batch, **unrolled)[0].backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimiser.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_a_head_that_knows_a_page_by_heart_drafts_it(kind: str) -> None:
    """On a page where looking up says next to nothing; at temperature 0, as a tree, and beside others."""
    prompt = prompt_of(9)
    page = [*prompt, *answer(prompt, 80, temperature=1.0, seed=5).ids]
    made: dict[str, Callable[[], Drafter[Any]]] = {
        "medusa": lambda: Medusa(medusa(width(), size(), 5, seed=1)),
        "eagle": lambda: Eagle(eagle(width(), size(), seed=1), depth=6, tree_top_k=2),
        "eagle3": lambda: Eagle(eagle3(width(), size(), seed=1), depth=6, tree_top_k=2),
    }
    # EAGLE-1 as published learns one step alone; unrolled over its own states it learns to go on from them.
    options: dict[str, Any] = {"steps": 800, "rate": 5e-3} if kind == "eagle" else {"steps": 400, "rate": 4e-3}
    unrolled = {"eagle": {"steps": 6}}.get(kind, {})
    drafter = trained(bound(made[kind]()), [page], **options, unrolled=unrolled)
    sampled = {"temperature": 1.0, "seed": 5}
    (looked,) = decode(target(), [prompt], Ngram(), max_tokens=80, **sampled)
    (row,) = decode(target(), [prompt], drafter, max_tokens=80, **sampled)
    assert row.ids == looked.ids == page
    assert looked.stats.mean_acceptance_length < 1.5
    assert row.stats.mean_acceptance_length > 4.0


def test_losses_are_cross_entropies() -> None:
    """Medusa's against sums written out; EAGLE's first step against the reference's laws."""
    head = medusa(width(), size(), 2)
    drafter = bound(Medusa(head))
    ids = prompt_of(8)
    states = hidden_states(ids)
    wanted = 0.0
    for i in range(2):
        rows = [medusa_forward(head, states[-1][t])[i].log_softmax(-1)[ids[t + 2 + i]] for t in range(8 - 2 - i)]
        wanted += 0.8**i * -float(torch.stack(rows).sum())
    batch = Batch(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), states[-1][None], states[-1][None])
    hard = Mix.read("cross_entropy")
    assert float(drafter.loss(batch, mix=hard)[0]) == pytest.approx(wanted / (8 - 2), rel=1e-6)

    head = eagle3(width(), size(), ids=torch.arange(1, size(), 2))
    own, drafter = reference(head), bound(Eagle(head))
    states = hidden_states(ids)
    tapped = torch.cat([states[tap] for tap in drafter.taps], dim=-1)
    given = own.states(pairs_of(head, drafter, ids))
    total, right, kept, count = 0.0, 0, 0.0, 0
    for t in range(len(ids) - 2):
        logits = plain().get_output_embeddings()(states[-1][t + 1]).detach()
        if int(logits.argmax()) % 2 == 0:
            continue  # no id of the head's
        law, found = logits[1::2].float().softmax(-1), own.logits(given[t]).float().softmax(-1)
        total += float((law * (law / found).log()).sum())
        right += int(law.argmax() == found.argmax())
        kept += float(torch.minimum(law, found).sum())
        count += 1
    batch = Batch(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), tapped[None], states[-1][None])
    loss, notes = drafter.loss(batch, steps=1)
    assert count > 0
    assert float(loss) == pytest.approx(total / count, rel=1e-5)
    wanted = {"places_0": count, "learnt_0": len(ids) - 2, "right_0": right, "kept_0": kept}
    assert notes == pytest.approx(wanted, rel=1e-5)


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Medusa(medusa(width() + 8, size())), "the heads read states of"),
        (lambda: Medusa(medusa(width(), size() + 1)), "the heads score id"),
        (lambda: Eagle(eagle3(2 * width(), size())), "the head reads states of"),
        (lambda: Eagle(eagle3(width(), size(), layer_ids=(0, 1, 99))), "the head reads what enters layer 99"),
        (lambda: Eagle(eagle3(width(), size(), ids=torch.tensor([0, 1, 10**6]))), "the head scores id 1000000"),
    ],
)
def test_heads_of_other_models_are_refused(made: Callable[[], Drafter[Any]], words: str) -> None:
    with pytest.raises(IncompatibleDrafter, match=words):
        bound(made())


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([], "has no path"),
        ([[]], r"has the path \[\]"),
        ([[0], [0]], "has a path twice"),
        ([[0, 0]], r"has the path \[0, 0\], and not \[0\] above it"),
        ([[-1]], r"has the path \[-1\]"),
    ],
)
def test_trees_that_are_none(choices: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        checked_choices(choices)


def test_the_wrong_kind_of_head_is_refused() -> None:
    with pytest.raises(BadRequest, match="Medusa heads are needed"):
        Heads(eagle(width(), size()), target())
    with pytest.raises(BadRequest, match="an EAGLE head is needed"):
        Eagle(medusa(width(), size()))
