"""Self-speculation: the target's first layers draft for all of them.

    draft    the pending token through layers 0 … E-1, then final norm and head: a guess; that one through them, …
    verify   what no layer has seen yet through layers 0 … E-1, then everything through E … L-1

The drafter has no cache of its own. It stages its tokens in the target's, where the first layers find them, and hands
the states behind layer E-1 on with the tree (`TokenTree.read`), so that no layer reads a token twice.

How good the guesses are is up to the model. LayerSkip (Elhoushi et al., 2404.16710) trains models for it and exits
after a quarter of the layers. Other models say little before their last layers: there the drafter learns from its own
outcomes that guesses do not pay (`forecast`), and then it is seldom asked.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.base import Ask, Drafter, Forecast, Step
from paceline.draft.costs import Costs
from paceline.draft.hits import Hits
from paceline.draft.model import RULES, SIBLINGS, is_greedy, usable
from paceline.draft.sketch import Growth, Sketch
from paceline.errors import BadRequest, IncompatibleDrafter, check_whole, nearest
from paceline.target import Seen
from paceline.tree import Read, TokenTree

MOST = 16
"""Deepest draft where the depth is left to what is accepted."""
MOST_TOKENS = 16
"""Tokens of all rows together that a pass is made for."""
PART = 0.5
"""The part of the layers that draft where nothing is said."""


class Layered(Protocol):
    """A target that can run its first layers alone, and go on from there."""

    vocab_size: int
    num_layers: int

    def share(self, num_layers: int) -> float:
        """The part of a pass that its first layers and its head make up."""

    def forward(
        self,
        tokens: Int64[Tensor, "B N"],
        offsets: Int64[Tensor, "B N"],
        mask: Bool[Tensor, "B N S_N"],
        cache: KVCache,
        *,
        layers: tuple[int, int],
    ) -> Seen:
        """See `HFTarget.forward`."""


@dataclass(eq=False)
class Going:
    """What is remembered of one sequence."""

    hits: Hits = field(default_factory=Hits)
    sketch: Sketch | None = None
    """What was proposed last and is not observed yet."""
    is_greedy: bool | None = None


class EarlyExit(Drafter[Going]):
    """Drafts with the first layers of the target, its final norm and its head.

    Args:
        exit_layer: E, how many layers draft; None is half of them.
        tree_top_k: children per node; 1 drafts a chain. None is 3 under `coupled`, else a chain.
        depth: deepest draft, grown level by level. None drafts on while another pass brings more for its time.
        rule: the verification rule to draft for.
        costs: what passes of the target cost by their tokens; what the first layers cost of it is worked out.
    """

    costs: Costs

    def __init__(
        self,
        exit_layer: int | None = None,
        *,
        tree_top_k: int | None = None,
        depth: int | None = None,
        rule: str = "coupled",
        costs: Costs | None = None,
    ) -> None:
        for name, value in (("exit_layer", exit_layer), ("tree_top_k", tree_top_k), ("depth", depth)):
            if value is not None:
                check_whole(name, value, 1)
        if rule not in RULES:
            raise BadRequest(f"no rule {rule!r}{nearest(rule, RULES)}; choose from {RULES}")
        self.exit_layer, self.depth, self.rule, self.costs = exit_layer or 0, depth, rule, costs or Costs()
        self._asked, self._target_costs = exit_layer, self.costs
        self.tree_top_k = tree_top_k or (SIBLINGS if rule == "coupled" else 1)
        self._target: Layered | None = None

    def bind(self, target: Any) -> None:
        """Sees that the target can run its layers apart at such a layer, and works out what the first ones cost."""
        if not hasattr(target, "num_layers"):
            raise IncompatibleDrafter(
                f"early_exit runs the target's first layers, and {type(target).__name__} has no layers to run apart"
            )
        count = target.num_layers
        exit_layer = self._asked or max(1, round(PART * count))
        if not 1 <= exit_layer < count:
            raise IncompatibleDrafter(
                f"exit_layer={exit_layer} was given; the model has {count} layers: 1 to {count - 1}"
            )
        _try(target, exit_layer)
        self.exit_layer, self._target = exit_layer, target
        share = target.share(exit_layer)
        passes = self._target_costs.target
        self.costs = Costs(passes, tuple((n, cost * share) for n, cost in passes))

    def begin(self, prompt: Step) -> Going:
        """Nothing to read: the target has."""
        return Going()

    def forecast(self, state: Going, ask: Ask) -> Forecast:
        """By what was kept of earlier drafts of this text: the depth at which a chain brings the most for its time."""
        return state.hits.forecast(self.costs.shared(ask.rows), self._depth(ask))

    def propose(self, states: list[Going], asks: list[Ask]) -> list[TokenTree]:
        """A tree per sequence, all of them grown side by side in the target's own cache."""
        assert self._target is not None, "a drafter is bound before it drafts"
        cache = asks[0].cache
        if cache is None:
            raise IncompatibleDrafter("early_exit drafts in the target's cache, and was asked without one")
        seen: list[Tensor] = []
        for state, ask in zip(states, asks, strict=True):
            depth = self._depth(ask)
            state.sketch = self._sketch(state, ask, depth) if depth else None
        growing = [(s.sketch, ask.row) for s, ask in zip(states, asks, strict=True) if s.sketch is not None]
        before = cache.staged
        while growing:
            growing = self._grow(cache, growing, seen)
        trees = []
        for state, ask in zip(states, asks, strict=True):
            tree = TokenTree.root(ask.pending) if state.sketch is None else state.sketch.tree()
            if state.sketch is not None and not before:
                behind = torch.cat([part[ask.row] for part in seen])
                read = Read(self.exit_layer, state.sketch.read_slots(), behind)
                tree = TokenTree(tree.tokens, tree.parents, tree.drawn, tree.q, tree.score, read=read)
            trees.append(tree)
        return trees

    def observe(self, states: list[Going], steps: list[Step]) -> None:
        """Learn what was kept."""
        for state, step in zip(states, steps, strict=True):
            sketch, state.sketch = state.sketch, None
            if sketch is not None and step.tokens[:1] == [sketch.ask.pending]:
                state.hits.learn(sketch.outcomes(step.following), max(sketch.depths), sketch.passes)

    def _depth(self, ask: Ask) -> int:
        return max(0, min(MOST if self.depth is None else self.depth, ask.depth, ask.budget))

    def _sketch(self, state: Going, ask: Ask, depth: int) -> Sketch:
        assert self._target is not None
        if state.is_greedy is None:
            state.is_greedy = is_greedy(ask, self._target.vocab_size)
        greedy, draws = bool(state.is_greedy), self.rule != "coupled"
        fixed = self.depth is not None or (draws and not greedy)
        if self.depth is None and fixed:
            # Where tokens are drawn the depth is settled before any of them.
            depth = min(depth, max(1, self.forecast(state, ask).nodes))
        growth = Growth(depth, self.tree_top_k, fixed, draws, greedy)
        return Sketch(ask._replace(ahead=None), [ask.pending], growth, state.hits, self.costs.shared(ask.rows))

    def _grow(self, cache: KVCache, growing: list[tuple[Sketch, int]], seen: list[Tensor]) -> list[tuple[Sketch, int]]:
        """One pass of the first layers over what the sketches want to read next; those that wanted something."""
        assert self._target is not None
        staged = cache.staged
        plans = [(sketch, row, sketch.plan(staged, MOST_TOKENS // cache.rows)) for sketch, row in growing]
        width = max(len(places) for _, _, places in plans)
        if width == 0:
            return []
        tokens = torch.zeros(cache.rows, width, dtype=torch.int64)
        offsets = torch.zeros_like(tokens)
        mask = torch.zeros(cache.rows, width, staged + width, dtype=torch.bool)
        mask[:, :, staged:] = torch.eye(width, dtype=torch.bool)
        for _, row, places in plans:
            for i, place in enumerate(places):
                tokens[row, i], offsets[row, i] = place.token, place.offset
                mask[row, i, list(place.above)] = True
        found = self._target.forward(tokens, offsets, mask, cache, layers=(0, self.exit_layer))
        assert found.hidden is not None
        seen.append(found.hidden)
        for sketch, row, places in plans:
            if places:
                sketch.learn(len(places), [usable(found.logits[row, i]) for i in range(len(places))])
        return [(sketch, row) for sketch, row, places in plans if places]


def _try(target: Any, exit_layer: int) -> None:
    """Whether layers run apart come to what they come to together, on a few tokens; models are not all alike inside."""
    tokens, offsets = torch.tensor([[1, 2, 3]]) % target.vocab_size, torch.arange(3)[None]
    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None]
    whole = target.forward(tokens, offsets, causal, target.new_cache(1, 3)).logits
    cache = target.new_cache(1, 3)
    first = target.forward(tokens, offsets, causal, cache, layers=(0, exit_layer)).hidden
    cache.unstage()
    apart = target.forward(tokens, offsets, causal, cache, layers=(exit_layer, target.num_layers), states=first).logits
    error = cast(Tensor, (whole - apart).abs().max())
    if not error <= 0.01 * whole.abs().max():
        raise IncompatibleDrafter(
            f"early_exit needs layers that can be run apart; in {type(target.model).__name__} logits then differ by "
            f"{float(error):.3g}"
        )
