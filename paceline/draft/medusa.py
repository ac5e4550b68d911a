"""Medusa: small heads on the target's last hidden state guess what comes behind its next token (Cai et al. 2024).

    head i   h ← h + SiLU(W h + b) for each of its blocks, then a vocabulary matrix: a law for the token i + 2 places on

h is the state behind the token before the pending one, after the final norm: what the pending token itself was read
from. So head 0 guesses the token behind the pending one, and all heads see the same h: the candidates for a place do
not depend on the guesses above it, and every node of a depth has the same ones below it. (arXiv 2401.10774)

Nothing of the published *typical acceptance* is here: it changes the law of the text. Trees are verified as all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from paceline.draft.base import Ask, Drafter, Forecast, Step
from paceline.draft.best_first import Growing, grow
from paceline.draft.costs import Costs
from paceline.draft.hits import Hits
from paceline.draft.losses import USUAL, Batch, Mix, judge, places_among, within
from paceline.draft.model import RULES, is_greedy, usable
from paceline.draft.modules import Borrower, Linear, scored, unembedding
from paceline.errors import BadLogits, BadRequest, IncompatibleDrafter, check_whole, nearest
from paceline.formats import Head
from paceline.formats.head import MedusaSettings
from paceline.tree import TokenTree

SIBLINGS = 10
"""Candidates of a head where their number is left open: as many as the published trees use."""
LEAST = 0.005
"""A guess that is less likely to be kept is not worth a place in a pass."""


class Heads(Borrower):
    """The heads alone: from the target's last hidden states to laws over the ids that they score.

    Args:
        head: as `read_head` found it. Where dtypes and devices agree, its tensors are the parameters, not copies.
        target: whose vocabulary matrix heads without one of their own use.
        dtype: of the weights; None is as they are.
    """

    def __init__(self, head: Head, target: Any, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(head.settings, MedusaSettings):
            raise BadRequest(f"a head of kind {head.kind!r} was given; Medusa heads are needed")
        self.settings, self._target = head.settings, [target]  # in a list, so that it is no part of this module
        given = {name: t.to(dtype=dtype) if t.is_floating_point() else t for name, t in head.tensors.items()}
        self.blocks = nn.ModuleList()
        for i in range(self.settings.num_heads):
            blocks = nn.ModuleList()
            for j in range(self.settings.num_layers):
                weight, bias = given[f"heads.{i}.layers.{j}.weight"], given.get(f"heads.{i}.layers.{j}.bias")
                blocks.append(Linear(weight, bias))
            self.blocks.append(blocks)
        self.matrices = nn.ModuleList()
        if self.settings.lm_head == "own":
            self.matrices.extend(Linear(given[f"heads.{i}.lm_head.weight"]) for i in range(self.settings.num_heads))
        elif self.settings.lm_head == "shared":
            self.matrices.append(Linear(given["lm_head.weight"]))
        ids = head.target_ids
        self.ids: Int64[Tensor, Vd] | None
        self.register_buffer("ids", ids, persistent=False)
        self._rows: list[Any] = []
        if not len(self.matrices):  # in a list, so that the target's rows are no part of this module either
            self._rows.append(partial(scored, target) if ids is None else unembedding(target, ids))
        self.num_ids = self.settings.draft_vocab_size

    @property
    def num_heads(self) -> int:
        """K."""
        return self.settings.num_heads

    def forward(self, hidden: Float[Tensor, "*B H"], count: int | None = None) -> Float[Tensor, "*B K Vd"]:
        """Logits of the first `count` heads, all of them if None, over the ids that the heads score."""
        numbers = range(self.num_heads if count is None else count)
        if self.settings.lm_head == "own":
            return torch.stack([self.score(i, hidden) for i in numbers], dim=-2)
        together = torch.stack([self._state(i, hidden) for i in numbers], dim=-2)
        return self._product(0, together)

    def score(self, i: int, hidden: Float[Tensor, "*B H"]) -> Float[Tensor, "*B Vd"]:
        """Logits of one head."""
        return self._product(i if self.settings.lm_head == "own" else 0, self._state(i, hidden))

    def _state(self, i: int, hidden: Tensor) -> Tensor:
        blocks: Any = self.blocks[i]
        for block in blocks:
            hidden = hidden.to(block.weight.dtype)
            hidden = hidden + functional.silu(block(hidden))
        return hidden

    def _product(self, which: int, states: Tensor) -> Tensor:
        if self._rows:
            found: Tensor = self._rows[0](states.to(self.target.dtype))
        else:
            found = self.matrices[which](states)
        return found

    def weight_bytes(self, count: int) -> int:
        """Bytes of weights that the first `count` heads read, borrowed ones too."""
        own = sum(p.nbytes for blocks in list(self.blocks)[:count] for p in blocks.parameters())
        if self._rows:
            layer = self.target.model.get_output_embeddings()
            return own + int(layer.weight.nbytes * self.settings.draft_vocab_size / layer.weight.shape[0])
        matrices = list(self.matrices)[: count if self.settings.lm_head == "own" else 1]
        return own + sum(p.nbytes for matrix in matrices for p in matrix.parameters())


class Guess(NamedTuple):
    """A candidate of a head."""

    token: int
    share: float
    """P(kept | all above is kept)."""


@dataclass(eq=False)
class Trunk:
    """What is remembered of one sequence."""

    hidden: Float[Tensor, "H"] | None = None
    """The state that the pending token was read from; None behind a prompt of one token."""
    hits: list[Hits] = field(default_factory=list)
    """What became of the guesses of each head."""
    proposed: list[list[Guess]] = field(default_factory=list)
    is_greedy: bool | None = None


class Medusa(Drafter[Trunk]):
    """Drafts with Medusa heads.

    Args:
        head: as `paceline.formats.read_head` gives it.
        tree_top_k: candidates of a head; None is 10.
        depth: deepest draft; None is as many tokens as there are heads.
        choices: a fixed tree: paths of ranks, `[0, 2]` being the third candidate of head 1 below the best one of head
            0. None grows the best tree by what became of the guesses so far.
        rule: the verification rule to draft for.
        costs: what passes of the target cost; what the heads cost of one is worked out.
    """

    costs: Costs

    def __init__(
        self,
        head: Head,
        *,
        tree_top_k: int | None = None,
        depth: int | None = None,
        choices: Sequence[Sequence[int]] | None = None,
        rule: str = "coupled",
        costs: Costs | None = None,
    ) -> None:
        for name, value in (("tree_top_k", tree_top_k), ("depth", depth)):
            if value is not None:
                check_whole(name, value, 1)
        if rule not in RULES:
            raise BadRequest(f"no rule {rule!r}{nearest(rule, RULES)}; choose from {RULES}")
        self.head, self.rule, self.costs = head, rule, costs or Costs()
        self.tree_top_k, self.depth = tree_top_k or SIBLINGS, depth
        self.choices = None if choices is None else checked_choices(choices)
        self.heads: Heads | None = None
        self._shares: list[float] = []
        """Cost of the first so many heads, in passes of the target."""

    def bind(self, target: Any) -> None:
        """Takes the target's last hidden state, and its vocabulary matrix where the heads have none."""
        settings = self.head.settings
        assert isinstance(settings, MedusaSettings), "checked with the head"
        check_layered(target)
        if settings.hidden_size != target.hidden_size:
            raise IncompatibleDrafter(
                f"the heads read states of {settings.hidden_size} values, the target has {target.hidden_size}; they "
                f"were trained for another model{_named(self.head)}"
            )
        ids = self.head.target_ids
        largest = int(ids.max()) if ids is not None else settings.draft_vocab_size - 1
        if largest >= target.vocab_size:
            raise IncompatibleDrafter(
                f"the heads score id {largest}, the target has ids 0 to {target.vocab_size - 1}; they were trained for "
                f"another model{_named(self.head)}"
            )
        self.taps = (int(target.num_layers),)
        self._vocab_size = int(target.vocab_size)
        self.heads = Heads(self.head, target, target.dtype).to(target.device)
        for parameter in self.heads.parameters():
            parameter.requires_grad_(False)
        self._shares = [
            self.heads.weight_bytes(count) / target.weight_bytes for count in range(1, 1 + settings.num_heads)
        ]

    def begin(self, prompt: Step) -> Trunk:
        """The state behind the last token read."""
        state = Trunk(hits=[Hits() for _ in range(self._num_heads)])
        self._take(state, prompt)
        return state

    def forecast(self, state: Trunk, ask: Ask) -> Forecast:
        """By what was kept of this text's guesses so far."""
        best, kept, tokens = Forecast(0.0, 0, 0.0), 1.0, 0.0
        costs, top = self.costs.shared(ask.rows), 0.0
        for deep in range(1, self._depth(state, ask) + 1):
            kept *= state.hits[deep - 1].alpha
            tokens += kept
            cost = self._shares[deep - 1]  # the weights are read once for all rows
            rate = (1.0 + tokens) / (costs.verify(1 + deep) + cost)
            if rate > top:
                best, top = Forecast(tokens, deep, cost), rate
        return best

    def propose(self, states: list[Trunk], asks: list[Ask]) -> list[TokenTree]:
        """A tree per sequence; all rows go through the heads together."""
        assert self.heads is not None, "a drafter is bound before it drafts"
        depths = [self._depth(state, ask) for state, ask in zip(states, asks, strict=True)]
        wanted = [i for i, depth in enumerate(depths) if depth]
        trees = [TokenTree.root(ask.pending) for ask in asks]
        if not wanted:
            return trees
        hidden = torch.stack([state.hidden for i in wanted if (state := states[i]).hidden is not None])
        with torch.inference_mode():
            logits = self.heads(hidden, max(depths))
        for row, i in enumerate(wanted):
            trees[i] = self._tree(states[i], asks[i], logits[row, : depths[i]])
        return trees

    def observe(self, states: list[Trunk], steps: list[Step]) -> None:
        """Note which guesses came true, verified or not, and the state that the next ones are made from."""
        for state, step in zip(states, steps, strict=True):
            for hits, guesses, token in zip(state.hits, state.proposed, step.following, strict=False):
                if guesses:
                    best = guesses[0]
                    hits.learn([(best.share, best.token == token)], 1, 1)
            state.proposed = []
            self._take(state, step)

    def _take(self, state: Trunk, step: Step) -> None:
        if step.hidden is not None and len(step.hidden):
            state.hidden = step.hidden[-1]

    @property
    def _num_heads(self) -> int:
        assert isinstance(self.head.settings, MedusaSettings)
        return self.head.settings.num_heads

    def _depth(self, state: Trunk, ask: Ask) -> int:
        if state.hidden is None:
            return 0
        most = self._num_heads if self.depth is None else min(self.depth, self._num_heads)
        if self.choices is not None:
            most = min(most, max(map(len, self.choices)))
        return max(0, min(most, ask.depth, ask.budget))

    def _tree(self, state: Trunk, ask: Ask, logits: Float[Tensor, "K Vd"]) -> TokenTree:
        if state.is_greedy is None:
            state.is_greedy = is_greedy(ask, self._vocab_size)
        state.proposed, above = [], list[int]()
        for deep, row in enumerate(logits, 1):
            guesses = self._guesses(state, ask, row, deep, above)
            state.proposed.append(guesses)
            if not guesses:
                break
            above.append(guesses[0].token)
        return self._grown(ask, state.proposed) if self.choices is None else self._fixed(ask, state.proposed)

    def _guesses(self, state: Trunk, ask: Ask, row: Tensor, deep: int, above: list[int]) -> list[Guess]:
        """The candidates of a head, best first, behind the best ones of the heads before it."""
        whole = usable(self._on_target_ids(row))
        if whole is None:
            return []
        count = self.tree_top_k
        try:
            if self.rule == "coupled":
                found = ask.top(whole, above, ask.position + deep, min(count + 1, whole.shape[0]))
            else:  # what is drawn later must not be guessed with noise that has nothing to do with it
                best = ask.law(whole, above).topk(min(count + 1, whole.shape[0]))
                found = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        except BadLogits:
            return []
        greedy = bool(state.is_greedy) or self.rule != "coupled"
        shares = state.hits[deep - 1].shares([key for _, key in found], count, greedy)
        return [Guess(token, share) for (token, _), share in zip(found, shares, strict=False) if share > 0.0]

    def _on_target_ids(self, row: Float[Tensor, "Vd"]) -> Float[Tensor, "V"]:
        """A head's logits where the target has the ids; no others."""
        assert self.heads is not None
        if self.heads.ids is None and row.shape[0] == self._vocab_size:
            return row
        whole = row.new_full((self._vocab_size,), -torch.inf)
        if self.heads.ids is None:
            whole[: row.shape[0]] = row
        else:
            whole[self.heads.ids] = row
        return whole

    def _grown(self, ask: Ask, guesses: list[list[Guess]]) -> TokenTree:
        """The best tree: what may follow a node are the candidates of the head for its depth."""

        def ways(tree: Growing, node: int) -> list[Guess]:
            return guesses[tree.depths[node]]

        return grow(ask, ways, depth=len(guesses), least=LEAST, costs=self.costs)

    def _fixed(self, ask: Ask, guesses: list[list[Guess]]) -> TokenTree:
        """The tree that was asked for, as far as heads have said something."""
        assert self.choices is not None
        tokens, parents, scores = [ask.pending], [-1], [1.0]
        place: dict[tuple[int, ...], int] = {(): 0}
        for path in self.choices:
            deep, rank, above = len(path), path[-1], path[:-1]
            if above not in place or deep > len(guesses) or rank >= len(guesses[deep - 1]) or len(tokens) > ask.budget:
                continue
            guess = guesses[deep - 1][rank]
            place[path] = len(tokens)
            tokens.append(guess.token)
            parents.append(place[above])
            scores.append(scores[place[above]] * guess.share)
        return TokenTree(torch.tensor(tokens), torch.tensor(parents), score=torch.tensor(scores))

    def loss(self, batch: Batch, *, mix: Mix = USUAL, decay: float = 0.8) -> tuple[Tensor, dict[str, float]]:
        """What texts say about the heads, to be made small: head i is held against the token i + 2 places on.

        Places where the target's likeliest token is none of the ids that the heads score do not count.

        Args:
            mix: how laws are compared.
            decay: weight of a head over the one before.

        Returns:
            The weighted sum over the places of all heads by the number of head 0's, and for each head i sums over its
            places: `places_i`, their number; `learnt_i`, with those that did not count; `right_i`, where its best guess
            is the target's; `kept_i`, of its guesses that would be kept under sampling.
        """
        assert self.heads is not None, "a drafter is bound before it is trained"
        heads, end = self.heads, batch.tokens.shape[1] - 1
        known = within(batch, heads.ids, heads.target.unembed)
        total, notes, places = batch.last.new_zeros((), dtype=torch.float32), dict[str, float](), 0
        for i in range(min(self._num_heads, end - 1)):
            counts = batch.learn[:, 2 + i :] & known[:, 1 + i : end]
            token = places_among(batch.tokens[:, 2 + i :][counts], heads.ids)
            states, last = batch.hidden[:, : end - 1 - i][counts], batch.last[:, 1 + i : end][counts]
            found = judge(mix, states, partial(heads.score, i), last, heads.teach, token, heads.num_ids)
            places = places or found.number
            total = total + decay**i * found.loss
            notes |= found.notes(i, batch.learn[:, 2 + i :])
        return total / max(1, places), notes


def check_layered(target: Any) -> None:
    """Passes when a target has layers whose states a head can read.

    Raises:
        IncompatibleDrafter: it has none, as tables have not.
    """
    if not hasattr(target, "num_layers"):
        raise IncompatibleDrafter(
            f"a head reads the states behind a model's layers, and {type(target).__name__} has none"
        )


def checked_choices(choices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The paths of a fixed tree, shortest first.

    Raises:
        BadRequest: no paths, a path that is no list of ranks, twice the same one, or one without the one above it.
    """
    try:
        paths = [tuple(path) for path in choices]
    except TypeError:
        raise BadRequest(
            f"medusa_choices is {choices!r}; a list of paths such as [[0], [0, 0], [1]] is needed"
        ) from None
    bad = [p for p in paths if not p or not all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in p)]
    if not paths or bad:
        what = f"the path {list(bad[0])}" if bad else "no path"
        raise BadRequest(f"medusa_choices has {what}; paths of ranks from 0 on, such as [[0], [0, 0], [1]], are needed")
    known = {(), *paths}
    if len(known) <= len(paths):
        raise BadRequest("medusa_choices has a path twice; each node of a tree stands in it once")
    for path in paths:
        if path[:-1] not in known:
            raise BadRequest(f"medusa_choices has the path {list(path)}, and not {list(path[:-1])} above it; add that")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _named(head: Head) -> str:
    return f" ({head.base_model})" if head.base_model else ""
