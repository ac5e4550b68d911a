"""Suffix look-up: what followed the longest suffix of the text that has occurred before, and what else may follow.

    … x a b c d e …… y a b c d f …… z a b c     longest match "a b c": it was followed by d, both times
                                                drafted behind it: d ─┬─ f …   (last time)
                                                                      └─ e …   (the time before)

An automaton over the prompt and the output knows every string of the text (see `automaton`), so a match may be of any
length, and a draft goes on by matching what it has drafted itself: a text that repeats is continued for ever.

The draft is a tree, grown best node first. A guess is worth the product of the shares on its path, and the share of a
token x after a context (the matched suffix and what was drafted so far) is

    hit(context) · (how often x followed it, the last one counted `RECENT` more) / (the same, over all that followed)

where hit is how often the token was among those that followed, in contexts of this length and kind; what is left over
goes to the next shorter context in the same way, for tokens that the longer ones have not seen. hit starts from what
was measured on other texts and learns from this one: every pass tells which guesses were right. So a text that copies
gets a deep chain, and one that does not gets a few likely tokens side by side.

A corpus is the text of others, so the same match in it says less: its contexts have chances of their own, and contexts
of both are asked in the order of these chances.

Oliaro et al. (SuffixDecoding, 2411.04975) grow such trees by counts alone; SAM-Decoding matches by the automaton.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.draft.automaton import OVERLAP, Automaton, Store
from paceline.draft.base import Ask, Drafter, Step
from paceline.draft.best_first import Growing, grow
from paceline.draft.corpus import DEPTH, Continuations, Corpus
from paceline.draft.costs import Costs
from paceline.errors import BadRequest, check_whole
from paceline.tree import TokenTree

LENGTHS = (1, 2, 3, 4, 6, 9, 17)
"""Contexts are told apart by their length: 1, 2, 3, 4 to 5, 6 to 8, 9 to 16, and 17 tokens or more."""
HITS = (
    (0.33, 0.50, 0.41), (0.50, 0.65, 0.40), (0.59, 0.68, 0.39), (0.64, 0.76, 0.45),
    (0.75, 0.85, 0.50), (0.89, 0.86, 0.50), (0.985, 0.92, 0.50),
)  # fmt: skip
"""Measured: how often the longest context knew the token, if it was seen once, more often with one follower, or with
several."""
LATER_HITS = ((0.21, 0.31), (0.30, 0.29), (0.25, 0.30), (0.32, 0.35), (0.40, 0.40), (0.40, 0.40), (0.40, 0.40))
"""The same of shorter contexts, where all longer ones have failed: with one new follower, or with several."""
CORPUS_HITS = (
    (0.07, 0.35, 0.24), (0.20, 0.44, 0.30), (0.23, 0.57, 0.30), (0.33, 0.65, 0.35),
    (0.38, 0.70, 0.40), (0.48, 0.74, 0.42), (0.75, 0.88, 0.50),
)  # fmt: skip
"""Measured of contexts in a corpus, which is the text of others: if seen less than `OFTEN` times, or more often with
one follower in at least half of the places, or with several."""
CORPUS_LATER_HITS = (
    (0.04, 0.12, 0.09), (0.07, 0.28, 0.15), (0.09, 0.30, 0.15), (0.16, 0.40, 0.20),
    (0.24, 0.44, 0.23), (0.36, 0.40, 0.25), (0.36, 0.40, 0.25),
)  # fmt: skip
"""The same where all better contexts have failed."""
OFTEN = 5
"""Places of a corpus from which on counts say something."""
FIRST_HITS = tuple(hit for table in (HITS, CORPUS_HITS) for row in table for hit in row)
"""All of those for longest contexts, one after the other: the cells that a text learns its own values of."""
SEVERAL = 2
"""The last column of the tables: no follower stands out."""
PRIOR = 8.0
"""Tests that the measured shares stand for in a new text."""
MEMORY = 0.95
"""What a test before counts of the present one."""
WEIGHT = 5.0
"""Misses, and expected ones, that a new text starts with: how fast all chances follow its luck."""
LEAST, MOST = 0.05, 1.0
"""How far they follow it: what a miss is worth at least and at most."""
CONTEXTS = 4
"""Contexts of one node that are asked, the longest ones first; as many of a corpus."""
FOLLOWERS = 8
"""Followers of one context that are considered, the most recent ones."""
RECENT = 1.0
"""What having followed last counts, in occurrences."""


class Place(NamedTuple):
    """A string of `length` tokens, the longest suffix of a path that an automaton knows."""

    automaton: "Automaton | Continuations"
    state: int
    length: int


class Context(NamedTuple):
    """What followed a string."""

    ways: list[tuple[int, int]]
    """Tokens and how often, those that no better context knows."""
    row: int
    """Of its length, see `LENGTHS`."""
    is_corpus: bool

    @property
    def kind(self) -> int:
        """Which column of `HITS`, or of `CORPUS_HITS`, it belongs to."""
        first = self.ways[0][1]
        if not self.is_corpus:
            return SEVERAL if len(self.ways) > 1 else int(first > 1)
        total = sum(count for _, count in self.ways)
        return 0 if total < OFTEN else 1 if 2 * first >= total else SEVERAL

    @property
    def cell(self) -> int:
        """Where its kind stands in `FIRST_HITS`."""
        return 3 * (self.row + self.is_corpus * len(LENGTHS)) + self.kind


class Guess(NamedTuple):
    token: int
    share: float
    """Of its parent's."""


class Guesses(NamedTuple):
    """What may follow one node."""

    all: list[Guess]
    cell: int
    """Which hits and tests the longest context belongs to."""
    num_first: int
    """How many of the guesses, the first ones, come from it."""
    hit: float
    """The chance that it knows the token, before this text's own luck."""


@dataclass(eq=False)
class Text:
    """One sequence: its tokens with the pending one, what came of its drafts, and the one that is not observed yet."""

    ids: list[int] = field(default_factory=list)
    automaton: Automaton = field(default_factory=Automaton)
    hits: list[float] = field(default_factory=lambda: [PRIOR * hit for hit in FIRST_HITS])
    tests: list[float] = field(default_factory=lambda: [PRIOR for _ in FIRST_HITS])
    missed: float = WEIGHT
    expected: float = WEIGHT
    """Tests of all contexts together: how many went wrong, and how many should have."""
    guesses: dict[int, Guesses] = field(default_factory=dict)
    """Of the nodes whose children were thought about."""
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    """(parent, token) -> node."""
    copied: tuple[int, Continuations] | None = None
    """What a corpus knows behind the first so many tokens."""

    def chance(self, hit: float) -> float:
        """A chance as it is in this text: one that copies misses less often than others, wherever it may stand."""
        return 1.0 - (1.0 - hit) * min(max(self.missed / self.expected, LEAST), MOST)

    def hit(self, context: Context, is_later: bool) -> float:
        """How often such a context knows the token, by itself or where better ones have failed."""
        if is_later:
            if context.is_corpus:
                return CORPUS_LATER_HITS[context.row][context.kind]
            return LATER_HITS[context.row][context.kind == SEVERAL]
        return self.hits[context.cell] / self.tests[context.cell]

    def add(self, tokens: list[int]) -> None:
        """Lengthen the text."""
        for token in tokens:
            self.automaton.add(token)
        self.ids += tokens

    def learn(self, kept: list[int]) -> None:
        """Compare the last draft with what was kept: every node on the way was a test of its longest context."""
        node: int | None = 0
        for token in kept:
            if node is None or node not in self.guesses:
                break
            guesses = self.guesses[node]
            if guesses.all:
                cell = guesses.cell
                is_hit = any(guess.token == token for guess in guesses.all[: guesses.num_first])
                self.hits[cell] = MEMORY * self.hits[cell] + (1 - MEMORY) * PRIOR * FIRST_HITS[cell] + is_hit
                self.tests[cell] = MEMORY * self.tests[cell] + (1 - MEMORY) * PRIOR + 1
                self.missed = MEMORY * self.missed + (1 - MEMORY) * WEIGHT + (not is_hit)
                self.expected = MEMORY * self.expected + (1 - MEMORY) * WEIGHT + 1.0 - guesses.hit
            node = self.nodes.get((node, token))
        self.guesses, self.nodes = {}, {}


class Suffix(Drafter[Text]):
    """Copies from prompt and output, and if wanted from earlier requests.

    Args:
        max_depth: deepest draft, and most tokens of a context that are looked at; None sets no bound.
        cached_requests: how many finished texts (prompt and output, aborted ones too) are kept for later requests to
            copy from, wherever such a text has a longer match than their own. With 0 nothing passes from one request
            to another. With more, what is drafted depends on the requests before; what is emitted does not.
        corpus: text of the user's own to copy from, likewise: the path of a corpus file, or one that is open.
        min_score: least expected acceptance of a node. Where a pass has room, unlikely ones cost nothing.
        costs: what passes of the target cost by their tokens; nodes that are not worth their part of it are left out.
    """

    costs: Costs

    def __init__(
        self,
        *,
        max_depth: int | None = None,
        cached_requests: int = 0,
        corpus: "str | os.PathLike[str] | Corpus | None" = None,
        min_score: float = 0.005,
        costs: Costs | None = None,
    ) -> None:
        if max_depth is not None:
            check_whole("max_depth", max_depth, 1)
        check_whole("cached_requests", cached_requests, 0)
        if isinstance(min_score, bool) or not isinstance(min_score, int | float) or not 0.0 < min_score <= 1.0:
            raise BadRequest(f"min_score={min_score!r} was given; a number above 0 and up to 1 is needed")
        if not isinstance(corpus, str | os.PathLike | Corpus | None):
            raise BadRequest(f"corpus={corpus!r} was given; the path of a corpus file, or a Corpus, is needed")
        self.max_depth, self.min_score, self.costs = max_depth, float(min_score), costs or Costs()
        self._store = Store(cached_requests) if cached_requests else None
        self.corpus = corpus if corpus is None or isinstance(corpus, Corpus) else Corpus(corpus)
        self._vocab_size: int | None = None

    def bind(self, target: Any) -> None:
        """Takes note of the target's vocabulary: of stored texts, only ids that all targets have are proposed."""
        size = int(target.vocab_size)
        self._vocab_size = size if self._vocab_size is None else min(size, self._vocab_size)

    def begin(self, prompt: Step) -> Text:
        """Index the prompt's first chunk, and the token after it."""
        text = Text()
        text.add([*prompt.tokens[:1], *prompt.following])
        return text

    def propose(self, states: list[Text], asks: list[Ask]) -> list[TokenTree]:
        """A tree per sequence, the likeliest nodes first, each with its expected acceptance."""
        return [self._grow(text, ask) for text, ask in zip(states, asks, strict=True)]

    def observe(self, states: list[Text], steps: list[Step]) -> None:
        """Learn what came of the draft, and index what was kept."""
        for text, step in zip(states, steps, strict=True):
            text.learn(step.following)
            # The token before these, the pending one so far, is indexed already, but for a prompt of one token.
            text.add(step.following if text.ids else [*step.tokens[:1], *step.following])

    def ahead(self, state: Text, pending: int, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """The likeliest next token, the likeliest one behind it, and so on."""
        if not state.ids:
            return []
        places, chance, found = self._places(state), 1.0, list[tuple[int, float]]()
        for token in path:
            places = self._walk(places, token)
        while len(found) < count:
            guesses = self._guesses(state, places, self.min_score).all
            if not guesses:
                break
            best = max(guesses, key=lambda guess: guess.share)
            chance *= best.share
            found.append((best.token, chance))
            places = self._walk(places, best.token)
        return found

    def end(self, state: Text) -> None:
        """Hand the text to later requests, where they may copy from it."""
        if self._store is not None:
            self._store.put(state.ids)

    def _grow(self, text: Text, ask: Ask) -> TokenTree:
        if not text.ids:
            text.add([ask.pending])  # a prompt of one token
        deepest = ask.depth if self.max_depth is None else min(ask.depth, self.max_depth)
        places = {0: self._places(text)}
        text.guesses, text.nodes = {}, {}

        def ways(tree: Growing, node: int) -> list[Guess]:
            if node:
                text.nodes[tree.parents[node], tree.tokens[node]] = node
                places[node] = self._walk(places[tree.parents[node]], tree.tokens[node])
            guesses = text.guesses[node] = self._guesses(text, places[node], self.min_score / tree.scores[node])
            return guesses.all

        return grow(ask, ways, depth=deepest, least=self.min_score, costs=self.costs)

    def _places(self, text: Text) -> list[Place]:
        """Where the text stands: in its own automaton, in those of stored texts, and in the corpus."""
        own = text.automaton
        state, length = own.match()
        if self.max_depth is not None and length > self.max_depth:
            state, length = own.find(text.ids[-self.max_depth :])
        places = [Place(own, state, length)]
        if self._store is not None:
            tail = text.ids[-min(OVERLAP, self.max_depth or OVERLAP) :]
            places += [Place(stored, *stored.find(tail)) for stored in self._store.generations]
        if self.corpus is not None:
            if text.copied is None or text.copied[0] != len(text.ids):
                tail = text.ids[-min(DEPTH, self.max_depth or DEPTH) :]
                text.copied = len(text.ids), self.corpus.find(tail)
            copied = text.copied[1]
            places.append(Place(copied, *copied.match()))
        return places

    def _walk(self, places: list[Place], token: int) -> list[Place]:
        """Where a path stands one token on."""
        walked = []
        for automaton, state, length in places:
            state, length = automaton.step(state, length, token)
            if self.max_depth is not None:
                state, length = automaton.shorten(state, length, self.max_depth)
            walked.append(Place(automaton, state, length))
        return walked

    def _guesses(self, text: Text, places: list[Place], least: float) -> Guesses:
        """The tokens that may follow, those of the best context first, while what is left is worth `least`."""
        found: list[Guess] = []
        seen: set[int] = set()
        left, cell, num_first, known = 1.0, 0, 0, 0.0
        own = [place for place in places if not isinstance(place.automaton, Continuations)]
        sources = [self._known(text, own), self._known(text, places[len(own) :])]
        heads: list[Context | None] = [None, None]
        while left >= least:
            heads = [_unseen(head, source, seen) for head, source in zip(heads, sources, strict=True)]
            asked = [(text.hit(head, bool(seen)), head) for head in heads if head is not None]
            if not asked:
                break
            hit, best = asked[0] if len(asked) == 1 or asked[0][0] >= asked[1][0] else asked[1]
            if not seen:
                cell, num_first, known = best.cell, len(best.ways), hit
                hit = text.chance(known)
            recent = 0.0 if best.is_corpus else RECENT  # in a corpus the first is the most frequent one
            total = recent + sum(count for _, count in best.ways)
            for i, (token, count) in enumerate(best.ways):
                found.append(Guess(token, left * hit * (count + recent * (i == 0)) / total))
            seen.update(token for token, _ in best.ways)
            left *= 1.0 - hit
        return Guesses(found, cell, num_first, known)

    def _known(self, text: Text, places: list[Place]) -> Iterator[Context]:
        """The contexts of a path, with what followed them."""
        for automaton, state, length in _contexts(places):
            ways = automaton.followers(state, FOLLOWERS)
            if automaton is not text.automaton:
                ways = [way for way in ways if way[0] >= 0 and (self._vocab_size is None or way[0] < self._vocab_size)]
            yield Context(ways, _row(length), isinstance(automaton, Continuations))


def _unseen(head: Context | None, source: Iterator[Context], seen: set[int]) -> Context | None:
    """The first context from `head` on that knows tokens which were not seen, with these alone."""
    while True:
        if head is not None:
            ways = [way for way in head.ways if way[0] not in seen] if seen else head.ways
            if ways:
                return head if len(ways) == len(head.ways) else Context(ways, head.row, head.is_corpus)
        head = next(source, None)
        if head is None:
            return None


def _contexts(places: list[Place]) -> Iterator[Place]:
    """A path's suffixes that were seen before, the longest first; of equally long ones the own text's."""
    places = list(places)
    for _ in range(CONTEXTS if places else 0):
        i = max(range(len(places)), key=lambda i: places[i].length) if len(places) > 1 else 0
        automaton, state, length = places[i]
        if length == 0:
            break
        yield places[i]
        shorter = automaton.link[state]
        places[i] = Place(automaton, shorter, automaton.length[shorter])


def _row(length: int) -> int:
    """Which of `LENGTHS` a length belongs to."""
    return bisect_right(LENGTHS, length) - 1
