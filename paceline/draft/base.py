"""The whole plug-in contract: a drafter guesses, the target decides, and nothing a drafter does can change the text.

A drafter keeps one state per sequence, made by `begin`, handed back to every call. Each step of the loop is

    propose   what may come after the pending token: a tree rooted there
    (the target reads the tree, the rule keeps what the target itself would have written)
    observe   what was kept

Weights live in the drafter, text lives in the states; the two never mix, so one drafter serves many sequences.

For authors who use the rules `block` or `standard`: a node may be added, dropped or cut short because of what was
drawn *above* it, never because of its own drawn value or a sibling's. Under `coupled` any choice is harmless.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jaxtyping import Float, Int64
from torch import Tensor

from paceline.cache import KVCache
from paceline.draft.costs import Costs
from paceline.sampling import Draws
from paceline.tree import TokenTree

S = TypeVar("S")
"""What a drafter remembers of one sequence."""


class Ask(NamedTuple):
    """What one sequence wants from its drafter this step."""

    pending: int
    """The last emitted token: the root of the tree to propose."""
    position: int
    """Its absolute position; a node at depth d stands at position + d."""
    budget: int
    """Most nodes worth verifying, the root not counted; more are cut."""
    depth: int
    """Deepest node worth drafting: tokens and context left, and the configured length; deeper ones are cut."""
    law: Callable[[Float[Tensor, "*B V"], Sequence[int]], Float[Tensor, "*B V"]]
    """(a drafter's logits, drafted ids above) -> log-law under the request's own sampling settings. Like `top`, it
    leaves out `logits_processors`, which are called for decided positions alone."""
    top: Callable[[Float[Tensor, "V"], Sequence[int], int, int], list[tuple[int, float]]]
    """(a drafter's logits at a node, drafted ids above, position of its children, k) -> the k best candidates, each
    with its key: log-law plus the noise of that position when sampling (the first is then the target's own choice
    wherever both laws agree), the log-law when greedy; tokens that the settings removed come last."""
    draws: Draws
    """The request's randomness: `noise(position)` for coupled drafts, `draft(law)` and `distinct(law, k)` for
    independent ones."""
    left: int = 1
    """Tokens that may still be written."""
    ahead: Callable[[Sequence[int], int], list[tuple[int, float]]] | None = None
    """In a composition, what look-ups expect: (drafted ids below the pending token, count) -> the next ids, each with
    the probability that it and all before it are right. A costly drafter may read them along to save passes."""
    cache: KVCache | None = None
    """The target's own cache, for a drafter that runs the target's first layers: what it stages there is read on from,
    if its tree says so (`TokenTree.read`), and else dropped."""
    row: int = 0
    """The sequence's row in it."""
    rows: int = 1
    """How many sequences the target's pass is shared by (`Costs.shared`)."""


class Step(NamedTuple):
    """What one sequence's cache just gained: a chunk of the prompt, or a pass's root and accepted nodes."""

    tokens: list[int]
    """The A tokens that were committed; A is 0 when the prompt is one token long."""
    following: list[int]
    """For each, the token that follows it in the text; the last one is the new pending token."""
    logits: Float[Tensor, "A V"] | None = None
    """The target's raw logits after each; only of passes, and only for drafters with `reads_logits`."""
    hidden: Float[Tensor, "A TH"] | None = None
    """The tapped hidden states of each, side by side; None without taps."""
    rider_logits: Float[Tensor, "M V"] | None = None
    """Raw logits at the tree's rider tokens, when it carried some."""
    scored: "Scored | None" = None
    """All that the target read and what it would write next; only for drafters with `top_scored`."""


class Scored(NamedTuple):
    """Every token that the target read in a pass, rejected guesses included, with its best ids behind each."""

    tokens: list[int]
    """The N nodes of the tree, root first, or the tokens of a chunk of the prompt."""
    parents: list[int]
    """The node above each; -1 for the first one."""
    top: Int64[Tensor, "N k"]
    """The ids with the highest raw logits after each, best first."""
    values: Float[Tensor, "N k"]
    """Their raw logits, in float32."""


class Forecast(NamedTuple):
    """What a costly proposal is expected to come to; see `Drafter.forecast`."""

    tokens: float
    """Guesses kept."""
    nodes: int
    """Guesses to verify."""
    cost: float
    """Of drafting, in single passes of the target."""
    once: float = 0.0
    """What must be spent before the first guess, such as to read a text: paid now, of use to every later pass."""


class Drafter(ABC, Generic[S]):
    """Guesses what the target will write next. Subclass it, and pass an instance as `method`."""

    taps: tuple[int, ...] = ()
    """Which of the target's `hidden_states` (as `transformers` counts them) `Step.hidden` carries; () costs nothing."""
    reads_logits: bool = False
    """Whether `Step.logits` is wanted; it copies a vocabulary-wide row per kept token."""
    top_scored: int = 0
    """How many ids `Step.scored` is to bring for each token that the target reads in a pass; 0 costs nothing."""
    scores_prompt: bool = False
    """Whether the chunks of the prompt are to bring `Step.scored` too: logits of the whole prompt are computed then,
    and no part of it is taken from earlier requests."""

    costs: Costs | None = None
    """What passes cost, where the drafter knows better than what is usual; how much is verified goes by it."""

    def bind(self, target: Any) -> None:
        """Called once per target before any work: check vocabulary and width, borrow embeddings.

        Raises:
            IncompatibleDrafter: when it does not fit.
        """

    @abstractmethod
    def begin(self, prompt: Step) -> S:
        """The state of a new sequence, from its prompt's first chunk; `observe` brings the other chunks."""

    @abstractmethod
    def propose(self, states: list[S], asks: list[Ask]) -> list[TokenTree]:
        """One tree per sequence, rooted at its pending token; `TokenTree.root(ask.pending)` when there is no guess."""

    @abstractmethod
    def observe(self, states: list[S], steps: list[Step]) -> None:
        """Learn what was kept, once after every pass and every further chunk of the prompt."""

    def ahead(self, state: S, pending: int, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Look-ups only: at most `count` ids expected behind the text, the pending token and guesses that follow it.

        Each comes with the probability that it and all before it are right. Costs next to nothing and changes nothing.
        """
        return []

    def forecast(self, state: S, ask: Ask) -> "Forecast | None":
        """What a proposal is likely to bring and to cost; None where it costs next to nothing. Must be cheap itself."""
        return None

    def end(self, state: S) -> None:
        """The sequence has ended or was given up, also by an error: free what its state holds outside of itself."""


class NoDraft(Drafter[None]):
    """Plain decoding through the same loop: the baseline, and what others are compared with."""

    def begin(self, prompt: Step) -> None:
        """Nothing to remember."""

    def propose(self, states: list[None], asks: list[Ask]) -> list[TokenTree]:
        """The pending token alone."""
        return [TokenTree.root(ask.pending) for ask in asks]

    def observe(self, states: list[None], steps: list[Step]) -> None:
        """Nothing to learn."""
