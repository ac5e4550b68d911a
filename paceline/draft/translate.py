"""A draft model whose tokenizer is not the target's.

The target's ids are the text, always: nothing that was emitted is ever read again as text. The draft model is told
that text in its own ids, and what it guesses comes back in one of two ways:

    shared   q is restricted to the tokens that both have, renormalised, and asked about at the *target's* ids, where
             the noise is. A drafted token is a token of the target; trees, rules and laws are those of any draft model.
    text     where little is shared: the draft model writes on greedily, its text is spelt by the target's tokenizer,
             and what comes of that is a chain like one that was looked up.

(TLI and SLEM of Timor et al. 2025, 2502.05202.) The draft's view of a text only grows:

    the prompt            spelt by the draft's tokenizer, as a whole, between special tokens
    what is kept          a shared token as its counterpart, text mode's guesses as they were drafted, the rest spelt
    special tokens        the draft's of the same name; left out where it has none
    half a character      waits until it is whole; until then nothing is guessed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.draft.base import Ask, Drafter, Forecast, Step
from paceline.draft.costs import Costs
from paceline.draft.model import DraftModel, Reading
from paceline.draft.pieces import Dictionary, unfinished
from paceline.draft.tuning import TEXT
from paceline.sampling import Sampler, SamplingParams
from paceline.target import Target
from paceline.tree import TokenTree

LEAST_SHARED = 0.8
"""The share of a text's tokens that both must have for the draft to keep to these."""
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
    drafted: list[int] = field(default_factory=list)
    """What the draft model wrote last, in its own ids; text mode only."""


class Translated(Drafter[Tale]):
    """Drafts with a causal model whose token ids mean other words than the target's.

    Args:
        model: the draft model.
        words: which ids of the two tokenizers stand for the same.
        tree_top_k, depth, rule, reuse_prefix, costs: as for `DraftModel`; in text mode drafts are greedy chains.
        least_shared: from which share of common tokens in an English and Python text on the mode is `shared`.
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
        self.words = words
        self.is_shared = words.share(TEXT) >= least_shared
        self.inner = DraftModel(
            model,
            tree_top_k=tree_top_k if self.is_shared else 1,
            depth=depth,
            rule=rule if self.is_shared else "coupled",
            reuse_prefix=reuse_prefix,
            costs=costs,
        )
        self._size = model.vocab_size
        self._pace = 1.0 if self.is_shared else words.pace(TEXT)
        """The target's tokens for one of the draft's."""
        self._writer = Sampler(SamplingParams(temperature=0.0), self._size, [])
        """Text mode's settings: the request's are about ids that the draft does not have."""
        self._pair(len(words.target.values))

    @property
    def mode(self) -> str:
        """`shared` or `text`."""
        return "shared" if self.is_shared else "text"

    def bind(self, target: Any) -> None:
        """Takes note of the target's vocabulary: ids of either tokenizer that its model does not have are left out."""
        self._pair(int(target.vocab_size))

    def begin(self, prompt: Step) -> Tale:
        """Takes note of the prompt's first chunk; it is told when all of it is there, so that no chunk cuts a word."""
        return Tale(list(prompt.tokens))

    def propose(self, states: list[Tale], asks: list[Ask]) -> list[TokenTree]:
        """The draft model's trees, in the target's ids."""
        trees = [TokenTree.root(ask.pending) for ask in asks]
        ready = [
            (i, tale, ask) for i, (tale, ask) in enumerate(zip(states, asks, strict=True)) if self._tell(tale, ask)
        ]
        readings = [tale.reading for _, tale, _ in ready if tale.reading is not None]
        drafted = self.inner.propose(readings, [self._asked(tale, ask) for _, tale, ask in ready])
        for (i, tale, ask), tree in zip(ready, drafted, strict=True):
            trees[i] = self._renamed(tree, ask) if self.is_shared else self._spelt(tale, tree, ask)
        return trees

    def observe(self, states: list[Tale], steps: list[Step]) -> None:
        """Tell the draft model what was kept. Before it was asked anything, the text is only noted."""
        readings, told = [], []
        for tale, step in zip(states, steps, strict=True):
            if tale.reading is None:
                tale.untold += step.tokens
            elif not tale.reading.is_closed:
                kept, size = self._kept(tale, step.following)
                view = [*tale.tail, *kept, *self._told(tale, step.following, size, self.is_shared)]
                tale.tail, tale.drafted = view[-1:], []
                readings.append(tale.reading)
                told.append(Step(view[:-1], view[1:]))
        self.inner.observe(readings, told)

    def forecast(self, state: Tale, ask: Ask) -> Forecast:
        """What the draft model's would come to."""
        if not self._tell(state, ask):
            return Forecast(0.0, 0, 0.0)
        assert state.reading is not None
        found = self.inner.forecast(state.reading, self._asked(state, ask))
        return found._replace(tokens=found.tokens * self._pace, nodes=round(found.nodes * self._pace))

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
            tale.reading.is_greedy = None if self.is_shared else True
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
        text, size = b"", 0
        for token in following if tale.drafted else ():
            value = self.words.target.value(token)
            if value is None:
                break
            text += value
        kept = []
        for token in tale.drafted:
            value = self.words.draft.value(token)
            if not value or not text.startswith(value, size):
                break
            kept.append(token)
            size += len(value)
        return kept, size

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
        if not self.is_shared:
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
        return found if found and self.words.draft.value(found[0][0]) else []

    def _spelt(self, tale: Tale, tree: TokenTree, ask: Ask) -> TokenTree:
        """Text mode's tree: the guessed text in the target's pieces, as far as they say it byte for byte."""
        tale.drafted = tree.ids[1:]
        values = [self.words.draft.value(token) or b"" for token in tale.drafted]
        text = _whole(b"".join(values))
        pieces = self.words.target.behind(text, tale.recent.decode(errors="ignore")) or []
        ends = list(accumulate(len(self.words.target.value(piece) or b"") for piece in pieces))
        told = list(accumulate(map(len, values)))
        given = [1.0] * tree.num_nodes if tree.score is None else tree.score.tolist()
        # A piece is right if the text is, up to its end.
        scores = [given[1 + next(i for i, size in enumerate(told) if size >= end)] for end in ends]
        scores[-1:] = [score * LAST for score in scores[-1:]]
        known = next((i for i, piece in enumerate(pieces) if piece >= self._place.shape[0]), len(pieces))
        count = min(known, ask.depth, ask.budget)
        chain = TokenTree.chain(ask.pending, pieces[:count])
        return TokenTree(chain.tokens, chain.parents, score=torch.tensor([1.0, *scores[:count]]))


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
