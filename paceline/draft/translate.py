"""A draft model whose tokenizer is not the target's.

The target's ids are the text, always: nothing that was emitted is ever read again as text. The draft model is told
that text in its own ids, and what it guesses comes back in one of two ways, chosen anew in every step:

    shared   q is restricted to the tokens that both have, renormalised, and asked about at the *target's* ids, where
             the noise is. A drafted token is a token of the target; trees, rules and laws are those of any draft model.
    text     where less of the recent text is shared: the draft model writes on by what it finds likeliest, and each
             path of that is spelt by the target's tokenizer. What comes of it is a tree like one that was looked up.

(TLI and SLEM of Timor et al. 2025, 2502.05202.) The draft's view of a text only grows:

    the prompt            spelt by the draft's tokenizer, as a whole, between special tokens
    what is kept          a shared token as its counterpart, text mode's guesses as they were drafted, the rest spelt
    special tokens        the draft's of the same name; left out where it has none
    half a character      waits until it is whole; until then nothing is guessed
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.draft.base import Ask, Drafter, Forecast, Step
from paceline.draft.costs import Costs
from paceline.draft.model import DraftModel, Reading, is_greedy
from paceline.draft.pieces import Dictionary, unfinished
from paceline.draft.tuning import TEXT
from paceline.sampling import Sampler, SamplingParams
from paceline.target import Target
from paceline.tree import TokenTree

LEAST_SHARED = 0.95
"""The share of recent tokens that both must have for the draft to keep to these."""
PRIOR = 16.0
"""Tokens of an English and Python text that a text starts with in that share."""
RECENT = 0.98
"""What a token before counts of the present one in that share: about fifty tokens are remembered."""
CONTEXT = 64
"""Bytes of the text that guessed text is spelt behind: a few words, so that the first piece begins as it would."""
LAST = 0.9
"""The last piece of a guessed text may be the beginning of a longer one: what its score counts. Where texts of Gemma's
tokens were spelt by Qwen's, it stayed as it was in 78% of code, and in 97% of other texts."""


@dataclass(eq=False)
class Tale:
    """How far one text has been told to the draft model."""

    untold: list[int]
    """The target's ids so far, until the text is first asked about."""
    reading: Reading | None = None
    """The draft model's state of it; none until then."""
    tail: list[int] = field(default_factory=list)
    """The last of the draft's ids of this text: the one that is pending there."""
    held: bytes = b""
    """Text that is not told yet, because it ends inside a character."""
    recent: bytes = b""
    """The end of the text."""
    shared: float = 0.0
    """Of its tokens, those that the draft has too; and all of them. Both count the recent ones most."""
    seen: float = 0.0
    is_greedy: bool | None = None
    """Whether the request takes the likeliest token; None until that was asked."""
    by_text: bool = False
    """The way that was taken last."""
    drafted: TokenTree | None = None
    """What the draft model wrote last, in its own ids; in text mode only."""


class Translated(Drafter[Tale]):
    """Drafts with a causal model whose token ids mean other words than the target's.

    Args:
        model: the draft model.
        words: which ids of the two tokenizers stand for the same.
        tree_top_k, depth, rule, reuse_prefix, costs: as for `DraftModel`.
        least_shared: from which share of the recent tokens on guesses are tokens of both; 0 is always, 2 is never.
    """

    def __init__(
        self,
        model: Target,
        words: Dictionary,
        *,
        tree_top_k: int | None = None,
        depth: int | None = None,
        rule: str = "coupled",
        reuse_prefix: bool = True,
        costs: Costs | None = None,
        least_shared: float = LEAST_SHARED,
    ) -> None:
        self.words, self.least_shared = words, least_shared
        self.inner = DraftModel(
            model, tree_top_k=tree_top_k, depth=depth, rule=rule, reuse_prefix=reuse_prefix, costs=costs
        )
        self._size = model.vocab_size
        self._usual = words.share(TEXT)
        self._writer = Sampler(SamplingParams(temperature=0.0), self._size, [])
        """Text mode's settings: the request's are about ids that the draft does not have."""
        self._pair(len(words.target.values))

    def bind(self, target: Any) -> None:
        """Takes note of the target's vocabulary: ids of either tokenizer that its model does not have are left out."""
        self._pair(int(target.vocab_size))

    def begin(self, prompt: Step) -> Tale:
        """Takes note of the prompt's first chunk; it is told when all of it is there, so that no chunk cuts a word."""
        return Tale(list(prompt.tokens), shared=self._usual * PRIOR, seen=PRIOR)

    def propose(self, states: list[Tale], asks: list[Ask]) -> list[TokenTree]:
        """The draft model's trees, in the target's ids."""
        trees = [TokenTree.root(ask.pending) for ask in asks]
        ready = [
            (i, tale, ask) for i, (tale, ask) in enumerate(zip(states, asks, strict=True)) if self._tell(tale, ask)
        ]
        readings = [tale.reading for _, tale, _ in ready if tale.reading is not None]
        drafted = self.inner.propose(readings, [self._asked(tale, ask) for _, tale, ask in ready])
        for (i, tale, ask), tree in zip(ready, drafted, strict=True):
            trees[i] = self._spelt(tale, tree, ask) if tale.by_text else self._renamed(tree, ask)
        return trees

    def observe(self, states: list[Tale], steps: list[Step]) -> None:
        """Tell the draft model what was kept. Before it was asked anything, the text is only noted."""
        readings, told = [], []
        for tale, step in zip(states, steps, strict=True):
            if tale.reading is None:
                tale.untold += step.tokens
            elif not tale.reading.is_closed:
                kept, size = self._kept(tale, step.following)
                view = [*tale.tail, *kept, *self._told(tale, step.following, size, not tale.by_text)]
                tale.tail, tale.drafted = view[-1:], None
                readings.append(tale.reading)
                told.append(Step(view[:-1], view[1:]))
        self.inner.observe(readings, told)

    def forecast(self, state: Tale, ask: Ask) -> Forecast:
        """What the draft model's would come to."""
        if not self._tell(state, ask):
            return Forecast(0.0, 0, 0.0)
        assert state.reading is not None
        return self.inner.forecast(state.reading, self._asked(state, ask))

    def end(self, state: Tale) -> None:
        """Free what the draft model holds of the text."""
        if state.reading is not None:
            self.inner.end(state.reading)

    # -- the target's text in the draft's ids ------------------------------------------------------------------

    def _tell(self, tale: Tale, ask: Ask) -> bool:
        """Whether something can be guessed: the draft model knows the text up to the pending token, and has room."""
        if tale.reading is None:
            ids = [*tale.untold, ask.pending]
            told, opening = self._told(tale, ids, opens=True), self.words.draft.opening
            view = told if opening == told[: len(opening)] else [*opening, *told]
            if not view:
                tale.held = tale.recent = b""  # all of it is told again when there is more
                return False
            tale.untold, tale.tail = [], view[-1:]
            tale.reading = self.inner.begin(Step(view[:-1], view[1:]))
            tale.is_greedy = is_greedy(ask, self._place.shape[0])
        tale.by_text = tale.shared < self.least_shared * tale.seen
        # What is likeliest is taken in text mode whatever the request: nothing is drawn, and keys are log-laws.
        tale.reading.is_greedy = tale.by_text or tale.is_greedy
        return not tale.held and not tale.reading.is_closed

    def _told(
        self, tale: Tale, ids: Sequence[int], skip: int = 0, one_by_one: bool = False, opens: bool = False
    ) -> list[int]:
        """The draft's ids for tokens that follow what has been told.

        Args:
            skip: bytes at their beginning that have been told.
            one_by_one: shared tokens stay what they are; else the whole text is spelt anew.
            opens: the text begins with them.
        """
        told: list[int] = []
        run = tale.held
        for token in ids:
            value, other = self.words.target.value(token), self._to_draft.get(token)
            tale.recent = b"" if value is None else (tale.recent + value)[-CONTEXT:]
            if value is not None:
                tale.shared, tale.seen = RECENT * tale.shared + (other is not None), RECENT * tale.seen + 1.0
            if value is not None and skip:
                value, skip = value[skip:], max(0, skip - len(value))
            if value is not None and not (one_by_one and other is not None and not unfinished(run)):
                run += value
                continue
            told += self._words(run, opens)
            opens = opens and not run
            run = b""
            told += [] if other is None else [other]
        size = len(run) - unfinished(run)
        tale.held = run[size:]
        return told + self._words(run[:size], opens)

    def _words(self, text: bytes, opens: bool) -> list[int]:
        """The draft's ids of some text; a space that the target puts in front of a whole text is none of it."""
        if opens and self.words.target.drops_space:
            text = text.removeprefix(b" ")
        return self.words.draft.spell(text, opens=opens)

    def _kept(self, tale: Tale, following: Sequence[int]) -> tuple[list[int], int]:
        """Text mode's guesses that have become text, and their bytes: they stay the ids that were drafted and read."""
        tree, best = tale.drafted, (0, 0)
        if tree is None:
            return [], 0
        values = [self.words.target.value(token) for token in following]
        text = b"".join(value for value in takewhile(lambda value: value is not None, values) if value)
        ends = [0]
        """Bytes of the text up to a node; -1 where it says something else."""
        for node, parent in enumerate(tree.parents.tolist()[1:], 1):
            value = self.words.draft.value(tree.ids[node])
            is_kept = value is not None and ends[parent] >= 0 and text.startswith(value, ends[parent])
            ends.append(ends[parent] + len(value) if is_kept and value is not None else -1)
            best = max(best, (ends[node], node))
        size, node = best
        return [tree.ids[one] for one in tree.path(node)[1:]], size

    # -- the draft's guesses in the target's ids ---------------------------------------------------------------

    def _pair(self, size: int) -> None:
        """Note which ids of target and draft belong together, of those that both models have."""
        pairs = [(ours, theirs) for ours, theirs in self.words.to_draft.items() if ours < size and theirs < self._size]
        self._to_draft, self._to_target = dict(pairs), {theirs: ours for ours, theirs in pairs}
        self._ours, self._theirs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
        # For each id of the target the draft's, and one beyond its ids where it has none.
        self._place = torch.full((size,), self._size, dtype=torch.int64)
        self._place[self._ours] = self._theirs

    def _asked(self, tale: Tale, ask: Ask) -> Ask:
        """The request as the draft model sees it: its ids, and the target's settings and noise behind them."""
        pending = tale.tail[-1]
        if tale.by_text:
            return ask._replace(pending=pending, law=self._writer.log_law, top=self._likeliest, ahead=None)
        seen = _Seen(self, ask)
        return ask._replace(
            pending=pending, law=seen.law, top=seen.top, ahead=None if ask.ahead is None else seen.ahead
        )

    def _at_target(self, logits: Float[Tensor, "*B V"]) -> Float[Tensor, "*B W"]:
        """A draft's row over the target's ids, -inf where it has no such token."""
        missing = logits.new_full((*logits.shape[:-1], self._size + 1 - logits.shape[-1]), float("-inf"))
        return torch.cat([logits, missing], dim=-1)[..., self._place.to(logits.device)]

    def _scored(self, width: int) -> tuple[Tensor, Tensor]:
        """Target's and draft's ids of the pairs that a row of this width speaks about."""
        known = self._theirs < width
        return self._ours[known], self._theirs[known]

    def _renamed_path(self, path: Sequence[int]) -> list[int]:
        return [self._to_target[token] for token in path]

    def _renamed(self, tree: TokenTree, ask: Ask) -> TokenTree:
        """Shared mode's tree: every node is a token of both."""
        q = None
        if tree.q is not None:
            ours, theirs = self._scored(tree.q.shape[-1])
            q = tree.q.new_zeros(tree.num_nodes, self._place.shape[0])
            q[:, ours] = tree.q[:, theirs]
        tokens = torch.tensor([ask.pending, *self._renamed_path(tree.ids[1:])])
        return TokenTree(tokens, tree.parents, tree.drawn, q, tree.score)

    def _likeliest(
        self, logits: Float[Tensor, "V"], path: Sequence[int], position: int, k: int
    ) -> list[tuple[int, float]]:
        """Text mode's guesses: what the draft finds likeliest, and nothing where that is no text."""
        found = self._writer.top(logits, path, position, k)
        texts = [pair for pair in found if self.words.draft.value(pair[0])]
        return texts if texts[:1] == found[:1] else []

    def _spelt(self, tale: Tale, tree: TokenTree, ask: Ask) -> TokenTree:
        """Text mode's tree: each guessed path in the target's pieces, if they say it byte for byte."""
        tale.drafted = tree
        before = tale.recent.decode(errors="ignore")
        given = [1.0] * tree.num_nodes if tree.score is None else tree.score.tolist()
        tokens, parents, depths, scores = [ask.pending], [-1], [0], [1.0]
        place: dict[tuple[int, int], int] = {}
        for leaf in (node for node, kids in enumerate(tree.children) if not kids):
            path = tree.path(leaf)[1:]
            values = [self.words.draft.value(tree.ids[node]) or b"" for node in path]
            told = list(accumulate(map(len, values)))
            pieces = self.words.target.behind(_whole(b"".join(values)), before) or []
            at = end = 0
            for number, piece in enumerate(pieces, 1):
                if piece >= self._place.shape[0] or depths[at] == ask.depth:
                    break
                end += len(self.words.target.value(piece) or b"")
                # A piece is right if the text is, up to its end.
                score = given[path[bisect_left(told, end)]] * (LAST if number == len(pieces) else 1.0)
                known = place.setdefault((at, piece), len(tokens))
                if known == len(tokens):
                    tokens.append(piece)
                    parents.append(at)
                    depths.append(depths[at] + 1)
                    scores.append(score)
                at, scores[known] = known, max(scores[known], score)
        ranked = sorted(range(1, len(tokens)), key=lambda node: -scores[node])  # stable: the parent wins
        kept = [0, *sorted(ranked[: ask.budget])]
        new = {node: i for i, node in enumerate(kept)}
        return TokenTree(
            torch.tensor([tokens[node] for node in kept]),
            torch.tensor([-1, *(new[parents[node]] for node in kept[1:])]),
            score=torch.tensor([scores[node] for node in kept]),
        )


class _Seen:
    """Shared mode's view of a request: asked in the draft's ids, answered by the target's."""

    def __init__(self, drafter: Translated, ask: Ask) -> None:
        self._drafter, self._ask = drafter, ask

    def law(self, logits: Float[Tensor, "*B V"], path: Sequence[int]) -> Float[Tensor, "*B V"]:
        """See `Ask`."""
        log_law = self._ask.law(self._drafter._at_target(logits), self._drafter._renamed_path(path))
        found = log_law.new_full(logits.shape, float("-inf"))
        ours, theirs = self._drafter._scored(logits.shape[-1])
        found[..., theirs] = log_law[..., ours]
        return found

    def top(self, logits: Float[Tensor, "V"], path: Sequence[int], position: int, k: int) -> list[tuple[int, float]]:
        """See `Ask`."""
        drafter = self._drafter
        found = self._ask.top(drafter._at_target(logits), drafter._renamed_path(path), position, k)
        return [(drafter._to_draft[token], key) for token, key in found]

    def ahead(self, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """See `Ask`: as far as the draft has the tokens, too."""
        assert self._ask.ahead is not None
        known = self._drafter._to_draft
        expected = self._ask.ahead(self._drafter._renamed_path(path), count)
        return [(known[token], chance) for token, chance in takewhile(lambda pair: pair[0] in known, expected)]


def _whole(data: bytes) -> str:
    """The text up to the first bytes that are no character, or not yet."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
