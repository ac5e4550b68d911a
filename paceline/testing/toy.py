"""A target and a drafter with tables for weights: small enough for every outcome to be counted."""

import random
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.base import Ask, Drafter, Step
from paceline.errors import BadRequest
from paceline.kernels import Kernel
from paceline.target import Seen, visible_slots
from paceline.tree import Drawn, TokenTree

TableLaw = Callable[[tuple[int, ...]], Sequence[float]]
"""A whole text, prompt included -> the probabilities of the token that follows it."""


class ToyTarget:
    """A `Target` whose law is a table, and which reads its text from the cache as a model does.

    It keeps token ids for keys and positions for values. A slot's context is what the mask and the cache show it, so
    a stale slot, a sibling in sight or a wrong position changes the law just as it would change a model's; a context
    that no text has (a position missing or held twice) gives NaN. Hidden states are the logits themselves: `embed` is
    one-hot, `unembed` the identity, and `hidden_size` the vocabulary.

    Args:
        law: whole text -> probabilities of the next token; or a square table whose row i is the law after token i.
        vocab_size: of a function; a table says it itself.
        max_positions: the context.

    Raises:
        BadRequest: rows that are no probabilities over the vocabulary.
    """

    def __init__(
        self, law: TableLaw | Sequence[Sequence[float]], vocab_size: int | None = None, *, max_positions: int = 4096
    ) -> None:
        if not callable(law):
            rows = [list(row) for row in law]
            law, vocab_size = (lambda text: rows[text[-1]]), len(rows)
        if vocab_size is None:
            raise BadRequest("the law is a function; give vocab_size, the number of probabilities it returns")
        self._law, self.vocab_size, self.hidden_size = law, vocab_size, vocab_size
        self.max_positions, self.kernel = max_positions, Kernel("table")
        self._logits: dict[tuple[int, ...], Float[Tensor, V]] = {}

    @classmethod
    def random(cls, vocab_size: int, seed: int = 0, *, zeros: bool = False, max_positions: int = 4096) -> "ToyTarget":
        """A different random law after every text; with `zeros` one token of each is impossible."""
        return cls(random_law(vocab_size, seed, zeros=zeros), vocab_size, max_positions=max_positions)

    def law(self, text: Sequence[int]) -> Float[Tensor, "V"]:
        """The table's own word on what follows a text, in float64: what outputs are compared with."""
        return self._row(tuple(text)).exp()

    def new_cache(self, rows: int, size: int) -> KVCache:
        """See `Target`."""
        return KVCache(rows, self.max_positions, min(size, self.max_positions))

    def forward(
        self,
        tokens: Int64[Tensor, "B N"],
        offsets: Int64[Tensor, "B N"],
        mask: Bool[Tensor, "B N S_N"] | None,
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        logits: bool = True,
    ) -> Seen:
        """See `Target`."""
        cache.start(offsets)
        lengths = torch.tensor(cache.lengths)[:, None]
        positions = lengths + offsets
        ids, places = cache.update(tokens[:, None, :, None].double(), positions[:, None, :, None].double(), 0)
        seen = visible_slots(lengths, offsets, mask, cache)
        cache.finish()
        found = torch.full((*tokens.shape, self.vocab_size), torch.nan, dtype=torch.float64)
        texts: list[list[tuple[int, ...] | None]] = []
        for row, slots in enumerate(seen.tolist()):
            texts.append([])
            row_ids, row_places = ids[row, 0, :, 0].tolist(), places[row, 0, :, 0].tolist()
            for slot, (visible, position) in enumerate(zip(slots, positions[row].tolist(), strict=True)):
                context = sorted((row_places[at], row_ids[at]) for at, shown in enumerate(visible) if shown)
                is_text = [place for place, _ in context] == list(range(position + 1))
                text = tuple(int(token) for _, token in context) if is_text else None
                texts[row].append(text)
                if text is not None:
                    found[row, slot] = self._row(text)
        hidden = self._states(texts, found, tuple(taps)) if taps else None
        return Seen(found if logits else found[:, :0], hidden)

    def _states(
        self, texts: list[list[tuple[int, ...] | None]], found: Float[Tensor, "B N V"], taps: tuple[int, ...]
    ) -> Float[Tensor, "B N TH"]:
        """The hidden states behind whole texts, of which some slots have none; `found` has their logits."""
        return torch.cat([found] * len(taps), dim=-1)

    def embed(self, tokens: Int64[Tensor, "..."]) -> Float[Tensor, "... V"]:
        """See `Target`: one-hot rows."""
        return torch.nn.functional.one_hot(tokens, self.vocab_size).double()

    def unembed(self, hidden: Float[Tensor, "... V"]) -> Float[Tensor, "... V"]:
        """See `Target`: the hidden states are the logits."""
        return hidden

    def _row(self, text: tuple[int, ...]) -> Float[Tensor, "V"]:
        row = self._logits.get(text)
        if row is None:
            given = self._law(text)
            row = self._logits[text] = self._checked(torch.as_tensor(given, dtype=torch.float64), text).log()
        return row

    def _checked(self, law: Tensor, text: tuple[int, ...]) -> Tensor:
        total = float(law.sum()) if law.shape == (self.vocab_size,) else float("nan")
        if not (abs(total - 1.0) < 1e-9 and float(law.min()) >= 0.0):
            raise BadRequest(
                f"the law after {list(text)} is {law.tolist()}; {self.vocab_size} probabilities with sum 1 are needed"
            )
        return law / total


def random_law(vocab_size: int, seed: int = 0, *, zeros: bool = False) -> TableLaw:
    """A random law after every text, the same whoever asks; with `zeros` one token of each is impossible."""
    rows: dict[tuple[int, ...], Sequence[float]] = {}

    def law(text: tuple[int, ...]) -> Sequence[float]:
        if text not in rows:
            chance = random.Random(f"{seed} {text}")
            row = [chance.random() ** 2 + 1e-3 for _ in range(vocab_size)]
            if zeros and vocab_size > 1:
                row[chance.randrange(vocab_size)] = 0.0
            rows[text] = [share / sum(row) for share in row]
        return rows[text]

    return law


CHAIN = (-1, 0, 1, 2)
"""The shape of a chain of three: the parent of each node."""


class ToyDrafter(Drafter[list[int]]):
    """A drafter with a table for a model: it fills trees of one shape with tokens drawn from q.

    Args:
        law: whole text -> q, of any width up to the target's vocabulary.
        shape: the parent of each node, -1 for the root: `(-1, 0, 1)` is a chain of two, `(-1, 0, 0)` two siblings.
        drawn: how siblings are chosen; FIXED takes the likeliest.
        grow: (drafted path, its node's depth) -> whether the node gets children; it sees what was drawn above and
            nothing else, so any function of it keeps the drafts lawful. None grows the whole shape.
        says: another law to report as q: a lie, for tests of tests.
    """

    def __init__(
        self,
        law: TableLaw,
        shape: Sequence[int] = CHAIN,
        drawn: Drawn = Drawn.IID,
        *,
        grow: Callable[[tuple[int, ...]], bool] | None = None,
        says: TableLaw | None = None,
    ) -> None:
        self.law, self.shape, self.drawn, self.grow, self.says = law, tuple(shape), drawn, grow, says or law

    def begin(self, prompt: Step) -> list[int]:
        """The state is the committed text."""
        return list(prompt.tokens)

    def observe(self, states: list[list[int]], steps: list[Step]) -> None:
        """The text grows."""
        for text, step in zip(states, steps, strict=True):
            text += step.tokens

    def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
        """A tree per text, drawn anew."""
        return [self._tree(text, ask) for text, ask in zip(states, asks, strict=True)]

    def _tree(self, text: list[int], ask: Ask) -> TokenTree:
        tokens, parents, paths, place = [ask.pending], [-1], [(*text, ask.pending)], {0: 0}
        reported: list[list[float]] = [[]]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.shape):
            children.setdefault(parent, []).append(node)
        for parent in range(len(self.shape)):  # parents come before children, so one pass in order fills all
            if parent not in place or parent not in children:
                continue
            above = paths[place[parent]]
            if self.grow is not None and not self.grow(above[len(text) + 1 :]):
                continue
            q = torch.as_tensor(self.law(above), dtype=torch.float64)
            reported[place[parent]] = list(self.says(above))
            for node, token in zip(children[parent], self._choose(q, len(children[parent]), ask), strict=False):
                place[node] = len(tokens)
                tokens.append(token)
                parents.append(place[parent])
                paths.append((*above, token))
                reported.append([])
        width = max(len(row) for row in reported)
        rows = [row + [0.0] * (width - len(row)) for row in reported]
        q_rows = None if self.drawn is Drawn.FIXED or len(tokens) == 1 else torch.tensor(rows, dtype=torch.float64)
        return TokenTree(torch.tensor(tokens), torch.tensor(parents), self.drawn, q_rows)

    def _choose(self, q: Float[Tensor, "V"], count: int, ask: Ask) -> list[int]:
        if self.drawn is Drawn.IID:
            return [ask.draws.draft(q) for _ in range(count)]
        if self.drawn is Drawn.DISTINCT:
            return ask.draws.distinct(q, count)
        best: list[int] = q.topk(min(count, q.shape[0])).indices.tolist()
        return best
