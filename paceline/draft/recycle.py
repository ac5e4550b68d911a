"""Token recycling: what the target would have written behind a token the last time it read it.

Every pass of the target tells what could follow each token that it read, in rejected guesses too. All of that is
usually thrown away; here the best few ids behind each are kept in a table, and a draft follows the table:

    pass reads   the ── cat ─┬─ sat        table    the  → cat dog man …
                             └─ ran                 cat  → sat was is …
                                                    sat  → on down …        (read, though it was rejected)
    draft        cat ─┬─ sat ─┬─ on
                      │       └─ down …
                      └─ was …

The table has two kinds of entries: behind a pair of tokens, which is asked first, and behind a single one. A newer
entry replaces the older one. What did follow a token of the text stands first in its entry.

A guess is worth the product of the shares on its path: how often an entry of this kind holds the token at all, measured
on other texts and learned in this one, times the target's own law among the entry's ids.

Luo et al. (Token Recycling, 2408.08696) keep single tokens in one table for all requests, and follow it in a fixed
tree of 80 nodes. Here a table belongs to one sequence, so nothing passes from one request to another; the prompt's
own pairs begin it, and the tree grows best node first within the budget.
"""

import math
from dataclasses import dataclass, field

import torch

from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.best_first import Growing, grow
from paceline.draft.costs import Costs
from paceline.errors import check_whole
from paceline.tree import TokenTree

HITS = (0.72, 0.45)
"""Measured: how often an entry holds the next token, behind a pair and behind a single token."""
PRIOR = 8.0
"""Tests that the measured shares stand for in a new text."""
MEMORY = 0.95
"""What a test before counts of the present one."""
FOLLOWED = 0.5
"""The share of an entry that goes to what did follow in the text."""
LEAST = 0.005
"""Least expected acceptance of a node."""


@dataclass(frozen=True)
class Entry:
    """What may follow, best first."""

    tokens: list[int]
    shares: list[float]
    """Adding up to 1."""


@dataclass(eq=False)
class Table:
    """The entries of one sequence, and what came of its guesses."""

    last: int | None = None
    """The token before the pending one."""
    pairs: dict[tuple[int, int], Entry] = field(default_factory=dict)
    singles: dict[int, Entry] = field(default_factory=dict)
    hits: list[float] = field(default_factory=lambda: [PRIOR * hit for hit in HITS])
    tests: list[float] = field(default_factory=lambda: [PRIOR for _ in HITS])
    is_drafted: bool = False
    """Whether something was proposed that is not observed yet."""

    def ways(self, above: int | None, token: int) -> list[tuple[int, float]]:
        """(token, chance) of what may follow `token` behind `above`: the pair's entry, then what only the other has."""
        found: list[tuple[int, float]] = []
        left = 1.0
        seen: set[int] = set()
        for kind, entry in self._entries(above, token):
            hit = left * self.hits[kind] / self.tests[kind]
            new = [(one, share) for one, share in zip(entry.tokens, entry.shares, strict=True) if one not in seen]
            found += [(one, hit * share) for one, share in new]
            seen.update(one for one, _ in new)
            left -= hit
        return found

    def learn(self, above: int | None, token: int, following: int) -> None:
        """Note whether the first entry that a guess would be taken from holds what did follow."""
        for kind, entry in self._entries(above, token):
            is_hit = following in entry.tokens
            self.hits[kind] = MEMORY * self.hits[kind] + (1 - MEMORY) * PRIOR * HITS[kind] + is_hit
            self.tests[kind] = MEMORY * self.tests[kind] + (1 - MEMORY) * PRIOR + 1
            if is_hit:
                break

    def put(self, above: int | None, token: int, entry: Entry) -> None:
        """What may follow from now on."""
        if above is not None:
            self.pairs[above, token] = entry
        self.singles[token] = entry

    def _entries(self, above: int | None, token: int) -> list[tuple[int, Entry]]:
        pair = None if above is None else self.pairs.get((above, token))
        single = self.singles.get(token)
        found = [] if pair is None else [(0, pair)]
        return found if single is None or single is pair else [*found, (1, single)]


class Recycle(Drafter[Table]):
    """Drafts what the target itself had in mind.

    Args:
        width: ids that are kept behind each token.
        score_prompt: compute what the target would have written behind every token of the prompt, too. On maths it
            brought 0.07 tokens per pass, elsewhere next to nothing, and it costs the vocabulary product for all of
            the prompt: about a seventh of reading it with a model of 1.5 billion weights.
        costs: what passes of the target cost by their tokens; nodes that are not worth their part of it are left out.
    """

    costs: Costs

    def __init__(self, *, width: int = 8, score_prompt: bool = False, costs: Costs | None = None) -> None:
        check_whole("width", width, 1)
        self.top_scored, self.scores_prompt, self.costs = width, score_prompt, costs or Costs()

    def begin(self, prompt: Step) -> Table:
        """A table of what the prompt's first chunk brought."""
        table = Table()
        self._take(table, prompt)
        return table

    def propose(self, states: list[Table], asks: list[Ask]) -> list[TokenTree]:
        """A tree per sequence, the likeliest nodes first, each with its expected acceptance."""
        return [self._grow(table, ask) for table, ask in zip(states, asks, strict=True)]

    def observe(self, states: list[Table], steps: list[Step]) -> None:
        """Keep what the target would have written, and note how good the table was."""
        for table, step in zip(states, steps, strict=True):
            if table.is_drafted:  # not a chunk of the prompt, which somebody else wrote
                above = table.last
                for token, following in zip(step.tokens, step.following, strict=True):
                    table.learn(above, token, following)
                    above = token
            table.is_drafted = False
            self._take(table, step)

    def _take(self, table: Table, step: Step) -> None:
        before = table.last
        behind: dict[tuple[int | None, int], Entry] = {}
        if step.scored is not None:
            tokens, parents = step.scored.tokens, step.scored.parents
            shares = torch.softmax(step.scored.values, -1).tolist()
            for i, ids in enumerate(step.scored.top.tolist()):
                above = before if parents[i] < 0 else tokens[parents[i]]
                if all(map(math.isfinite, shares[i])):  # else the target has no law there
                    behind[above, tokens[i]] = Entry(ids, shares[i])
            for (above, token), entry in behind.items():
                table.put(above, token, entry)
        above = before
        for token, following in zip(step.tokens, step.following, strict=True):
            # After the guesses, so that what became text is the newer entry.
            table.put(above, token, _with(following, behind.get((above, token))))
            above = token
        table.last = above

    def _grow(self, table: Table, ask: Ask) -> TokenTree:
        table.is_drafted = True

        def ways(tree: Growing, node: int) -> list[tuple[int, float]]:
            above = tree.tokens[tree.parents[node]] if node else table.last
            return table.ways(above, tree.tokens[node])

        return grow(ask, ways, depth=ask.depth, least=LEAST, costs=self.costs)


def _with(following: int, entry: Entry | None) -> Entry:
    """An entry with what did follow in the first place."""
    if entry is None:
        return Entry([following], [1.0])
    others = [(token, share) for token, share in zip(entry.tokens, entry.shares, strict=True) if token != following]
    own = 1.0 - sum(share for _, share in others)
    rest = 1.0 - FOLLOWED
    return Entry([following, *(t for t, _ in others)], [rest * own + FOLLOWED, *(rest * s for _, s in others)])
