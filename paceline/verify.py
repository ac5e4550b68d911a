"""Which drafted tokens the target itself would have written, and the token it writes after them.

Three rules, all pure functions of (p, tree, draws, position) and all in float64:

    coupled    the target's own token at each node, made from the position's noise; needs no q; the default
    block      block verification on chains, traversal verification on trees: keeps the most of an independent draft
    standard   token by token, sibling by sibling: the textbook rule

Whatever the tree holds, the emitted text follows the target's law exactly: under `coupled` it is even the same text
as without any tree. What `block` and `standard` need for that is a truthful label and a truthful q.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from paceline.errors import IncompatibleDrafter
from paceline.laws import Law
from paceline.tree import Drawn, TokenTree


class Verdict(NamedTuple):
    """What one walk decided: everything that is emitted, kept and counted follows from it."""

    path: list[int]
    """The accepted nodes below the root, in order; may be empty."""
    token: int
    """The token the target writes after the path."""


@runtime_checkable
class Chances(Protocol):
    """What the rules draw with; `sampling.Draws` is one, and a test can be one that walks through every outcome."""

    def choose(self, law: Law, position: int) -> int: ...
    def accept(self, probability: float) -> bool: ...
    def pick(self, law: Float64[Tensor, "V"]) -> int: ...


Rule = Callable[[Callable[[int], Law], TokenTree, Chances, int], Verdict]
"""`p(node)` is the target's law after a node, asked when the walk gets there and not before; `position` is the
position of the token that follows the root."""


def coupled(p: Callable[[int], Law], tree: TokenTree, draws: Chances, position: int) -> Verdict:
    """The tokens that plain decoding would emit with the same noise, as far as the tree has foreseen them.

    At each node x = argmax(log p + g[t]) is the target's token (Gumbel-max); if a child carries it, the walk goes on
    there. Daliri, Musco and Suresh (2408.07978); for several siblings Rowan et al. (2506.05632).
    """
    path: list[int] = []
    node = 0
    while True:
        token = draws.choose(p(node), position + len(path))
        child = _child(tree, node, token)
        if child is None:
            return Verdict(path, token)
        path.append(child)
        node = child


def standard(p: Callable[[int], Law], tree: TokenTree, draws: Chances, position: int) -> Verdict:
    """Tokens by rejection sampling, one sibling after the other, down the tree.

    A sibling x drawn from q is kept with probability min(1, p(x)/q(x)); else p becomes norm((p - q)+), and without
    replacement q loses x. When none is kept the token comes from what p has become. Children chosen without chance
    are met by a draw y ~ p. Leviathan et al. 2023, section 2.3; Chen et al. 2023; for siblings SpecInfer and Sequoia.
    """
    needs_q(tree)
    path: list[int] = []
    while True:
        node = path[-1] if path else 0
        law = p(node).probs()
        child, token = _match(law, tree, draws, node) if tree.drawn is Drawn.FIXED else _reject(law, tree, draws, node)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def block(p: Callable[[int], Law], tree: TokenTree, draws: Chances, position: int) -> Verdict:
    """Tokens by block verification: leaves are tested first, and what an early token lacks a later one may make up.

    keep(node, a), where a is the share of the node's draws that the target wants (1 at the root):

        for each child x, in drawn order
            keep(x, min(1, a P(x)/Q(x))), and stop if it is kept
            S = sum (a P - Q)+ ;  P = (a P - Q)+ / S ;  a = S / (S + 1 - a) ;  without replacement Q loses x
        with probability a keep the path to this node and emit y ~ P, else it is not kept

    On a chain this is block verification (Sun et al., 2403.10444), which keeps the most tokens that any rule can
    without changing later laws, and never fewer than `standard`; on trees traversal verification (Weng et al.,
    2505.12398). Children chosen without chance have Q = one-hot: a subtree is then kept with probability a P(x),
    which is what drawing y ~ P and looking for it gives, without reading laws that a mismatch makes pointless.
    """
    if tree.drawn is Drawn.FIXED:
        return standard(p, tree, draws, position)
    needs_q(tree)

    def keep(node: int, share: float) -> Verdict | None:
        if share <= 0.0:
            return None  # never asks for a law that cannot matter
        law = p(node).probs()
        q = _draft_law(tree, node, law)
        for child in tree.children[node]:
            token = tree.ids[child]
            if q is None or float(q[token]) <= 0.0:
                continue  # not a draw from q: passed over
            kept = keep(child, min(1.0, share * float(law[token] / q[token])))
            if kept is not None:
                return Verdict([child, *kept.path], kept.token)
            law, share = _left(law, q, share)
            q = _without(q, token, tree.drawn)
        return Verdict([], draws.pick(law)) if draws.accept(share) else None

    verdict = keep(0, 1.0)
    assert verdict is not None, "the root's share is 1"
    return verdict


RULES: dict[str, Rule] = {"coupled": coupled, "block": block, "standard": standard}
"""The values of `rejection_sample_method`."""


def needs_q(tree: TokenTree) -> None:
    """Refuses a tree that says its tokens were drawn from q and does not bring q."""
    if tree.drawn is not Drawn.FIXED and tree.q is None and tree.num_nodes > 1:
        raise IncompatibleDrafter(
            f"the drafter says its tokens are drawn {tree.drawn.name} and gives no q; this rule needs the law they "
            "were drawn from: set rejection_sample_method='coupled', or let the drafter fill TokenTree.q"
        )


def _child(tree: TokenTree, node: int, token: int) -> int | None:
    """The first child of a node that carries a token."""
    return next((child for child in tree.children[node] if tree.ids[child] == token), None)


def _match(law: Float64[Tensor, "V"], tree: TokenTree, draws: Chances, node: int) -> tuple[int | None, int]:
    """Draws the target's token and looks whether a child carries it: exact for any children chosen without chance."""
    token = draws.pick(law)
    return _child(tree, node, token), token


def _reject(law: Float64[Tensor, "V"], tree: TokenTree, draws: Chances, node: int) -> tuple[int | None, int]:
    """Tests children drawn from q in their order; the kept one, or none and a token from what is left of the law."""
    q = _draft_law(tree, node, law)
    for child in tree.children[node]:
        token = tree.ids[child]
        if q is None or float(q[token]) <= 0.0:
            continue  # not a draw from q: passed over
        if draws.accept(min(1.0, float(law[token] / q[token]))):
            return child, token
        law, _ = _left(law, q, 1.0)
        q = _without(q, token, tree.drawn)
    return None, draws.pick(law)


def _left(law: Float64[Tensor, "V"], q: Float64[Tensor, "V"], share: float) -> tuple[Float64[Tensor, "V"], float]:
    """What the target still wants after a draw from q was not kept: its law, and its share of such cases."""
    left = (share * law - q).clamp_(min=0.0)
    mass = float(left.sum())
    if mass <= 0.0:
        # p = q and still not kept has probability 0; rounding can get here, and p itself is then the best answer
        return law, 1.0 if share >= 1.0 else 0.0
    return left / mass, mass / (mass + (1.0 - share))  # this order: a share of 1 stays 1


def _draft_law(tree: TokenTree, node: int, law: Float64[Tensor, "V"]) -> Float64[Tensor, "V"] | None:
    """q at a node in float64, summing to 1 over the target's vocabulary; none where it is no law (NaN, no mass)."""
    if tree.q is None or not tree.children[node]:
        return None
    row = tree.q[node].to(law)
    if row.shape[0] > law.shape[0]:
        raise IncompatibleDrafter(
            f"q speaks about {row.shape[0]} tokens and the target has {law.shape[0]}; cut q to the target's vocabulary"
        )
    mass = float(row.sum())
    if not 0.0 < mass < float("inf") or float(row.min()) < 0.0:
        return None
    return torch.cat([row, row.new_zeros(law.shape[0] - row.shape[0])]) / mass


def _without(q: Float64[Tensor, "V"], token: int, drawn: Drawn) -> Float64[Tensor, "V"] | None:
    """The law of the next sibling: q again, or q without the token just drawn, made to sum to 1."""
    if drawn is not Drawn.DISTINCT:
        return q
    rest = q.clone()
    rest[token] = 0.0
    mass = float(rest.sum())
    return rest / mass if mass > 0.0 else None
