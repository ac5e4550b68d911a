"""The contract of a target, checked by running it: a pass over a tree says what reading each path by itself says."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.cache import KVCache
from paceline.decode import Request, run
from paceline.sampling import Draws, SamplingParams
from paceline.target import Seen, Target
from paceline.testing.exact import PlainLaw, Violation
from paceline.testing.report import NotApplicable, Report
from paceline.testing.rules import random_tree
from paceline.testing.scripted import ScriptedTree
from paceline.tree import Rider, Stacked, TokenTree, stack

PREFIX = 9
"""Tokens before the tree in most checks."""


def check_target(target: Target, *, tolerance: float | None = None) -> Report:
    """Read trees, batches, chunks and rollbacks against one token at a time, and report what held.

        from paceline.testing import check_target
        check_target(HFTarget(model)).verify()  # raises a Violation that names every check that failed

    The reference is the target itself, reading one token per pass into a cache that never held anything else: that
    such a reading is the model's own is for you to compare with the model.

    Args:
        target: any `Target`.
        tolerance: largest difference of a logit that counts as equal; by default by dtype, from 1e-6 of the largest
            logit in float64 to 5% in bfloat16 (where several shapes of a product round differently).
    """
    report = Report(f"target {type(target).__name__}")
    suite = _Suite(target, tolerance)
    checks: list[tuple[str, Callable[[], str | None]]] = [
        ("shapes and sizes", suite.shapes),
        ("a text at once", suite.at_once),
        ("a tree reads as its paths", suite.tree),
        ("siblings do not see each other", suite.siblings),
        ("padding is not seen", suite.padding),
        ("riders see what their mask says, and are not seen", suite.riders),
        ("level after level", suite.levels),
        ("rollback: nothing of a rejected branch stays", suite.rollback),
        ("rows of different lengths", suite.ragged),
        ("rows that leave and join", suite.rows),
        ("a prefix that is taken over", suite.prefix),
        ("positions go on where the cache ends", suite.positions),
        ("taps", suite.taps),
        ("the whole loop: ids of plain decoding", suite.loop),
    ]
    for name, check in checks:
        report.run(name, check)
    return report


class _Suite:
    def __init__(self, target: Target, tolerance: float | None) -> None:
        self.target = target
        self.words = min(target.vocab_size, 64)
        chance = random.Random(1)
        self.text = [chance.randrange(self.words) for _ in range(24)]
        self.reference: dict[tuple[int, ...], Float[Tensor, V]] = {}
        first = self.alone(self.text[:2])
        scale = max([1.0, *first[first.isfinite()].abs().tolist()])
        by_dtype = {torch.float64: 1e-6, torch.float32: 1e-3}.get(first.dtype, 0.05)
        self.tolerance = by_dtype * scale if tolerance is None else tolerance
        self.exact = True
        """Whether all logits compared so far had the same bits."""

    # -- reading ---------------------------------------------------------------------------------------------------

    def cache(self, *texts: Sequence[int]) -> KVCache:
        """A cache that holds these texts, each read one token at a time into a cache of its own."""
        made = []
        for text in texts:
            cache = self.target.new_cache(1, len(text) + 1)
            for at, token in enumerate(text, start=1):
                seen = self.target.forward(torch.tensor([[token]]), torch.tensor([[0]]), None, cache)
                if tuple(text[:at]) not in self.reference:
                    self.reference[tuple(text[:at])] = seen.logits[0, 0].clone()
                cache.commit([[0]])
            made.append(cache)
        return KVCache.join(made)

    def alone(self, text: Sequence[int]) -> Float[Tensor, "V"]:
        """The row after a text that was read one token at a time."""
        key = tuple(text)
        if key not in self.reference:
            cache = self.cache(text[:-1])
            seen = self.target.forward(torch.tensor([[text[-1]]]), torch.tensor([[0]]), None, cache)
            self.reference[key] = seen.logits[0, 0].clone()
        return self.reference[key]

    def read(self, cache: KVCache, trees: list[TokenTree], taps: Sequence[int] = ()) -> tuple[Seen, Stacked]:
        """One pass over trees."""
        stacked = stack(trees)
        return self.target.forward(stacked.tokens, stacked.offsets, stacked.mask, cache, taps), stacked

    def same(self, what: str, found: Tensor, expected: Tensor) -> None:
        """Equal within the tolerance, infinities in the same places."""
        self.exact &= torch.equal(found, expected)
        gone = expected == -torch.inf
        if found.shape != expected.shape or not torch.equal(found == -torch.inf, gone):
            raise Violation(f"{what}: {found.flatten()[:4].tolist()} …, expected {expected.flatten()[:4].tolist()} …")
        distance = float((found - expected).masked_fill(gone, 0.0).abs().max())
        if not distance <= self.tolerance:
            raise Violation(f"{what}: a logit differs by {distance:.4g}, allowed are {self.tolerance:.3g}")

    def paths(self, text: Sequence[int], tree: TokenTree, logits: Tensor, slots: Sequence[int]) -> None:
        """Every node of a tree against its path."""
        for node in reversed(range(tree.num_nodes)):  # a reading of the whole path gives the rows on its way too
            path = [tree.ids[at] for at in tree.path(node)]
            self.same(
                f"node {node} of {tree.ids} under {tree.parents.tolist()}",
                logits[slots[node]],
                self.alone([*text, *path]),
            )

    def wild(self, seed: int) -> TokenTree:
        """A tree with siblings that repeat and branches of several depths."""
        chance = random.Random(seed)
        trees = (random_tree(chance, self.text[PREFIX], self.words) for _ in range(99))
        return next(tree for tree in trees if tree.num_nodes > 5 and not tree.is_chain)

    # -- checks ----------------------------------------------------------------------------------------------------

    def shapes(self) -> None:
        """What the attributes and tensors are."""
        target, cache = self.target, self.target.new_cache(2, 4)
        tokens = torch.tensor([[0, 1, 0], [1, 0, 1]])
        offsets = torch.arange(3).expand(2, 3)
        seen = target.forward(tokens, offsets, None, cache)
        if cache.staged != 3 or cache.lengths != [0, 0]:
            raise Violation(
                f"a pass of 3 tokens staged {cache.staged}, and lengths are {cache.lengths} before any commit"
            )
        if tuple(seen.logits.shape) != (2, 3, target.vocab_size):
            raise Violation(f"logits are {list(seen.logits.shape)}; [2, 3, {target.vocab_size}] is needed")
        if seen.hidden is not None:
            raise Violation("hidden states came although no tap was asked for")
        cache.unstage()
        none = target.forward(tokens, offsets, None, cache, logits=False)
        if none.logits.shape[1] != 0:
            raise Violation(f"logits=False gave logits {list(none.logits.shape)}; none were wanted")
        embedded = target.embed(torch.tensor([[0, 1]]))
        if tuple(embedded.shape) != (1, 2, target.hidden_size):
            raise Violation(f"embed gave {list(embedded.shape)}; [1, 2, {target.hidden_size}] is needed")
        if target.unembed(embedded).shape[-1] != target.vocab_size:
            raise Violation("unembed does not reach the vocabulary")

    def at_once(self) -> None:
        """Causal reading of a whole text."""
        cache, size = self.target.new_cache(1, 0), len(self.text)
        seen = self.target.forward(torch.tensor([self.text]), torch.arange(size)[None], None, cache)
        for end in (1, 2, PREFIX, size):
            self.same(f"{end} tokens at once", seen.logits[0, end - 1], self.alone(self.text[:end]))

    def tree(self) -> str:
        """Wild trees behind a prefix, and behind nothing."""
        for seed in range(3):
            for prefix in (self.text[:PREFIX], []):
                tree = self.wild(seed)
                seen, stacked = self.read(self.cache(prefix) if prefix else self.target.new_cache(1, 4), [tree])
                self.paths(prefix, tree, seen.logits[0], stacked.slots[0])
        return "bit for bit" if self.exact else "within rounding"

    def siblings(self) -> None:
        """One branch changes, the others stay: what came later, then what came before."""
        prefix, root = self.text[:PREFIX], self.text[PREFIX]
        branches = ([[1, 0], [0, 1]], [[1, 0], [0, 0]], [[1, 1], [0, 1]])
        trees = [TokenTree.from_paths(root, paths) for paths in branches]
        rows = [self.read(self.cache(prefix), [tree])[0].logits[0] for tree in trees]
        self.same("a branch before another that changed", rows[0][:3], rows[1][:3])
        self.same("a branch behind another that changed", rows[0][3:], rows[2][3:])

    def padding(self) -> None:
        """A narrow tree beside a wide one."""
        prefix, narrow, wide = self.text[:PREFIX], TokenTree.chain(self.text[PREFIX], [1]), self.wild(1)
        seen, stacked = self.read(self.cache(prefix, self.text[:4]), [narrow, wide])
        self.paths(prefix, narrow, seen.logits[0], stacked.slots[0])
        self.paths(self.text[:4], wide, seen.logits[1], stacked.slots[1])

    def riders(self) -> None:
        """Two riders: one that continues the root, one that continues the first rider."""
        prefix, root = self.text[:PREFIX], self.text[PREFIX]
        mask = torch.tensor([[True, False, True, False], [True, False, True, True]])
        rider = Rider(torch.tensor([1, 0]), torch.tensor([1, 2]), mask)
        tree = TokenTree(torch.tensor([root, 0]), torch.tensor([-1, 0]), rider=rider)
        seen, stacked = self.read(self.cache(prefix), [tree])
        self.paths(prefix, tree, seen.logits[0], stacked.slots[0])
        self.same("a rider", seen.logits[0, 2], self.alone([*prefix, root, 1]))
        self.same("a rider behind a rider", seen.logits[0, 3], self.alone([*prefix, root, 1, 0]))

    def levels(self) -> None:
        """The root, then its children, then theirs: staged slots add up; dropped ones are gone."""
        prefix, root = self.text[:PREFIX], self.text[PREFIX]
        cache = self.cache(prefix)
        self.target.forward(torch.tensor([[root]]), torch.tensor([[0]]), torch.tensor([[[True]]]), cache)
        two = torch.tensor([[[True, True, False], [True, False, True]]])
        seen = self.target.forward(torch.tensor([[0, 1]]), torch.tensor([[1, 1]]), two, cache)
        self.same("the second level", seen.logits[0, 1], self.alone([*prefix, root, 1]))
        below = torch.tensor([[[True, False, True, True]]])
        for token in (1, 0):  # the second time after the first was dropped
            seen = self.target.forward(torch.tensor([[token]]), torch.tensor([[2]]), below, cache)
            self.same("the third level", seen.logits[0, 0], self.alone([*prefix, root, 1, token]))
            cache.unstage(1)

    def rollback(self) -> None:
        """Commit one path of a wild tree, then read on: as if nothing else had been there."""
        prefix = self.text[:PREFIX]
        for seed in range(4):
            tree = self.wild(seed)
            deepest = tree.depth.index(max(tree.depth))
            for node in (0, deepest, tree.num_nodes - 1):
                cache = self.cache(prefix)
                _, stacked = self.read(cache, [tree])
                path = tree.path(node)
                cache.commit([[stacked.slots[0][at] for at in path]])
                kept = [*prefix, *(tree.ids[at] for at in path)]
                if cache.lengths != [len(kept)] or cache.staged:
                    raise Violation(
                        f"{len(kept)} tokens were kept, the cache says {cache.lengths}, staged {cache.staged}"
                    )
                after = TokenTree.from_paths(0, [[1, 0], [0]])
                seen, again = self.read(cache, [after])
                self.paths(kept, after, seen.logits[0], again.slots[0])
            cache = self.cache(self.text[: PREFIX + 3])
            cache.truncate(0, PREFIX)
            seen, stacked = self.read(cache, [tree])
            self.paths(prefix, tree, seen.logits[0], stacked.slots[0])

    def ragged(self) -> None:
        """Rows of lengths 1, 4 and 9 that keep paths of different lengths, twice over."""
        texts = [self.text[:1], self.text[:4], self.text[:PREFIX]]
        cache = self.cache(*texts)
        for turn in range(2):
            trees = [self.wild(3 * turn + row) for row in range(3)]
            seen, stacked = self.read(cache, trees)
            kept = [tree.path(row * (tree.num_nodes - 1) // 2) for row, tree in enumerate(trees)]
            for row, tree in enumerate(trees):
                self.paths(texts[row], tree, seen.logits[row], stacked.slots[row])
            cache.commit([[stacked.slots[row][node] for node in path] for row, path in enumerate(kept)])
            texts = [[*text, *(tree.ids[node] for node in path)] for text, tree, path in zip(texts, trees, kept)]

    def rows(self) -> None:
        """A row leaves, one takes an ended row's place, one joins: the others read on as before."""
        texts = [self.text[:3], self.text[:7], self.text[:5]]
        cache = self.cache(*texts)
        cache.keep([2, 0])
        cache.put(1, self.cache(self.text[:PREFIX]))
        cache = KVCache.join([cache, self.cache(self.text[:2])])
        now = [texts[2], self.text[:PREFIX], self.text[:2]]
        trees = [self.wild(row) for row in range(3)]
        seen, stacked = self.read(cache, trees)
        for row, tree in enumerate(trees):
            self.paths(now[row], tree, seen.logits[row], stacked.slots[row])

    def prefix(self) -> None:
        """The first positions of one row as the beginning of another."""
        source, size = self.cache(self.text), PREFIX
        cache = self.target.new_cache(1, 4)
        cache.load(source.copy_row(0, size), size)
        tree = self.wild(2)
        seen, stacked = self.read(cache, [tree])
        self.paths(self.text[:size], tree, seen.logits[0], stacked.slots[0])

    def positions(self) -> None:
        """The same tokens further on are another context: a target that counts from 0 again would not tell."""
        for begin in (1, 2, 17):
            cache = self.cache(self.text[:begin])
            chain = TokenTree.chain(self.text[begin], self.text[begin + 1 : begin + 4])
            seen, stacked = self.read(cache, [chain])
            self.paths(self.text[:begin], chain, seen.logits[0], stacked.slots[0])

    def taps(self) -> None:
        """Hidden states: their width, and that the last path of a tree has those of its own reading."""
        prefix, tree = self.text[:PREFIX], self.wild(0)
        for taps in ((0,), (0, 1)):
            seen, stacked = self.read(self.cache(prefix), [tree], taps)
            width = len(taps) * self.target.hidden_size
            if seen.hidden is None or tuple(seen.hidden.shape) != (1, tree.num_nodes, width):
                shape = None if seen.hidden is None else list(seen.hidden.shape)
                raise Violation(f"taps {taps} gave hidden states {shape}; [1, {tree.num_nodes}, {width}] is needed")
            node = tree.num_nodes - 1
            *before, last = [*prefix, *(tree.ids[at] for at in tree.path(node))]
            alone = self.target.forward(torch.tensor([[last]]), torch.tensor([[0]]), None, self.cache(before), taps)
            assert alone.hidden is not None
            self.same(f"taps {taps} of node {node}", seen.hidden[0, stacked.slots[0][node]], alone.hidden[0, 0])

    def loop(self) -> str:
        """Trees right and wrong through the real loop, greedy, two rows at a time."""
        if self.tolerance > 0.01:
            raise NotApplicable("rounding decides near-ties in this dtype; `paceline certify` judges them")
        chance = random.Random(4)
        kept = 0
        params = SamplingParams(temperature=0.0, max_tokens=8)
        prompts = [self.text[: 2 + i] for i in range(4)]
        plain = [PlainLaw(self.target, prompt, params).ids(Draws(0), 8) for prompt in prompts]
        texts = [[*prompt, *ids] for prompt, ids in zip(prompts, plain)]

        def script(ids: list[int]) -> TokenTree | list[list[int]]:
            """What comes, behind and between wrong guesses; now and then a wild tree."""
            coming = next((text[len(ids) : len(ids) + 3] for text in texts if text[: len(ids)] == ids), [])
            if not coming or chance.random() < 0.3:
                return random_tree(chance, ids[-1], min(self.words, 6))
            wrong = [chance.randrange(self.words) for _ in range(3)]
            return [wrong[:2], [*coming[:1], wrong[2]], coming]

        drafter: Any = ScriptedTree(script)
        requests = [
            Request(
                prompt, params, drafter, vocab_size=self.target.vocab_size,
                max_positions=self.target.max_positions, depth=5, budget=12,
            )
            for prompt in prompts
        ]  # fmt: skip
        for _ in run(self.target, requests, max_rows=2):
            pass
        for request, expected in zip(requests, plain):
            kept += request.stats.num_accepted_tokens
            if request.output_ids != expected:
                raise Violation(f"{request.output_ids} was emitted, plain decoding writes {expected} ({request.error})")
        return f"{len(requests)} texts equal, {kept} guesses kept"
