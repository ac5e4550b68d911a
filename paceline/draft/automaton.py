"""Every string that occurs in a growing text, told apart by where it ends: the suffix automaton, with counts.

A state stands for all strings that end at exactly the same places of the text, so what may follow one of them may
follow each. Its link leads to the longest suffix that also ends elsewhere:

    text  a b c a b d a b      end of text  "abcabdab"  ->  "ab"  ->  (nothing)
                               followers of "ab", most recent first: d (once), c (once)

One token makes at most two states and on average at most three transitions, so it costs the same at any length of
the text (Blumer et al. 1985). The counts keep to that: of the suffixes of the text only the `REACH` longest are
counted up and put in order. Counts grow strictly from a suffix to the next shorter one, so a suffix that is passed
over has been seen at least `REACH` times already. Hence

    counts up to `REACH` are exact, larger ones are lower bounds,
    and the order of followers is exact in states that are counted exactly.
"""

from collections.abc import Sequence
from itertools import islice

REACH = 32
"""Suffixes of the text that every new token counts up."""
OVERLAP = 32
"""Longest match that is looked for in stored texts, and what is stored again where the beginning of a text is known."""
STORED_TOKENS = 131_072
"""Tokens of stored texts held at most: some 60 MB."""
BETWEEN = -1
"""Stands between two stored texts; no token."""


class Automaton:
    """The strings of one text; state 0 is the empty string.

    The four lists have an entry for each state, and plain integers everywhere: about 450 bytes per token of
    ordinary text.
    """

    __slots__ = ("count", "end", "length", "link", "next")

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        """The state behind each token that may follow; the token that followed last stands last."""
        self.link: list[int] = [-1]
        """The state of the longest suffix that ends at more places; -1 for the empty string."""
        self.length: list[int] = [0]
        """Tokens in the longest string of a state."""
        self.count: list[int] = [0]
        """At how many places the strings of a state end, as far as they are counted; 0 for the empty string."""
        self.end = 0
        """The state of the whole text."""

    def add(self, token: int) -> None:
        """Lengthen the text by one token."""
        following, link, length, count = self.next, self.link, self.length, self.count
        suffix = self.end
        whole = self.end = len(following)
        following.append({})
        link.append(0)
        length.append(length[suffix] + 1)
        count.append(0)
        while suffix >= 0 and token not in following[suffix]:
            following[suffix][token] = whole
            suffix = link[suffix]
        if suffix >= 0:
            link[whole] = self._known(suffix, token)
        self._count(suffix, token, whole)

    def match(self) -> tuple[int, int]:
        """The longest suffix of the text that occurs before the end too, as state and length; (0, 0) if none does."""
        state = max(self.link[self.end], 0)
        return state, self.length[state]

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The longest suffix of `tokens` that occurs in the text."""
        state = length = 0
        for token in tokens:
            state, length = self.step(state, length, token)
        return state, length

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (a string of `length` tokens in `state`, then `token`) that occurs in the text."""
        following, link = self.next, self.link
        while token not in following[state]:
            state = link[state]
            if state < 0:
                return 0, 0
            length = self.length[state]
        return following[state][token], length + 1

    def shorten(self, state: int, length: int, most: int) -> tuple[int, int]:
        """The suffix with at most `most` tokens of a string in `state` that is one token longer at most."""
        if state and self.length[self.link[state]] >= most:
            state = self.link[state]
        return state, min(length, most)

    def followers(self, state: int, most: int) -> list[tuple[int, int]]:
        """Tokens that followed the strings of a state and how often, the most recent one first, `most` at most."""
        count = self.count
        return [(token, count[behind]) for token, behind in islice(reversed(self.next[state].items()), most)]

    def _known(self, suffix: int, token: int) -> int:
        """The state of (the longest string in `suffix`, then `token`), which occurs; split off where it must be."""
        following, link, length = self.next, self.link, self.length
        old = following[suffix][token]
        if length[old] == length[suffix] + 1:
            return old
        # The longer strings of that state do not end here, the shorter ones do: from now on they differ.
        split = len(following)
        following.append(dict(following[old]))
        link.append(link[old])
        length.append(length[suffix] + 1)
        self.count.append(self.count[old])
        link[old] = split
        while suffix >= 0 and following[suffix].get(token) == old:
            following[suffix][token] = split
            suffix = link[suffix]
        return split

    def _count(self, suffix: int, token: int, whole: int) -> None:
        """Count the suffixes of the text, and let `token` be the last to have followed those before it."""
        following, link, count = self.next, self.link, self.count
        for _ in range(REACH):
            if suffix <= 0:  # the followers of the empty string are never asked for
                break
            followers = following[suffix]
            if len(followers) > 1:
                followers[token] = followers.pop(token)
            suffix = link[suffix]
        for _ in range(REACH):
            if whole == 0:
                break
            count[whole] += 1
            whole = link[whole]


class Store:
    """Texts of earlier requests, in two generations: when the newer one is full, the older one is dropped.

    So between half of `most` texts and all of them are held, the latest ones, and at most `STORED_TOKENS` tokens. The
    beginning of a text is not stored twice if every match in it can be found already: so a chat's next turn begins.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.generations = [Automaton()]
        """The newer one first."""
        self.num_texts = 0
        """In the newer generation."""

    def put(self, ids: list[int]) -> None:
        """Keep a text; of one that is longer than a generation, the end."""
        newer = self.generations[0]
        state = length = 0
        for known, token in enumerate(ids):
            state, length = newer.step(state, length, token)
            if length < min(known + 1, OVERLAP):
                break
        else:
            return
        kinds = min(self.most, 2)
        room = STORED_TOKENS // kinds
        begin = max(0, len(ids) - room + 1)
        new = ids[max(begin, known - OVERLAP) :]
        if self.num_texts >= max(1, self.most // 2) or newer.length[newer.end] + 1 + len(new) > room:
            newer, new = Automaton(), ids[begin:]
            self.generations = [newer, *self.generations][:kinds]
            self.num_texts = 0
        for token in (BETWEEN, *new):
            newer.add(token)
        self.num_texts += 1
