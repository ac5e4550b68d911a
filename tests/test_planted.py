"""Bugs that speculative decoders have had, planted one by one: the suites of `paceline.testing` must name each.

Where a bug fits into the package's own code it is put there: a few words of the real source are replaced. The others
are rules and drafters as an author might hand them in. Every suite also runs once on what has no bug.
"""

import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import config as shape_checks
from oracles import tiny
from test_verify import chain_rule
from torch import Tensor

import paceline.decode as decode
import paceline.target
import paceline.testing.targets
import paceline.testing.toy
import paceline.tree
import paceline.verify as verify
from paceline import Drafter, SamplingParams, TokenTree
from paceline.cache import KVCache
from paceline.decode import Request, run
from paceline.draft.base import Ask, Step
from paceline.draws import Draws
from paceline.sampling import Sampler
from paceline.target import HFTarget
from paceline.testing import (
    Report,
    ToyDrafter,
    ToyTarget,
    check_drafter,
    check_rule,
    check_target,
    random_law,
)
from paceline.tree import Drawn
from paceline.verify import RULES


def edited(real: Callable[..., Any], *changes: tuple[str, str]) -> Any:
    """A function of the package with a few words of its source replaced, each of which must stand there once."""
    real = inspect.unwrap(real)
    source: str = getattr(real, "source", None) or textwrap.dedent(inspect.getsource(real))
    for old, new in changes:
        assert source.count(old) == 1, f"{real.__qualname__} holds {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(source, real.__globals__, made)
    made[real.__name__].source = source
    return made[real.__name__]


@pytest.fixture
def at_full_speed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without shape checks on every call; other tests make the same calls with them.

    Functions inside of functions would still be fitted with their checks anew in every call, so the two that matter
    are read once more from their source.
    """
    shape_checks.update("jaxtyping_disable", True)
    monkeypatch.setattr(decode, "_verify", edited(decode._verify))
    monkeypatch.setitem(RULES, "block", edited(verify.block))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    shape_checks.update("jaxtyping_disable", False)


pytestmark = pytest.mark.usefixtures("at_full_speed")


BINDS = "it binds to the target"


class Bug(NamedTuple):
    """A bug, how it is put where, and what must see it."""

    name: str
    suite: Callable[[], Report]
    seen_by: set[str]
    """Checks that must fail, by the beginnings of their names."""
    places: tuple[tuple[Any, str], ...] = ()
    """(module or class, name) of the real function; nothing where the bug is handed to the suite."""
    changes: tuple[tuple[str, str], ...] = ()


def plant(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the changed function in all of its places."""
    if bug.places:
        place, name = bug.places[0]
        planted = edited(getattr(place, name), *bug.changes)
        for place, name in bug.places:
            monkeypatch.setattr(place, name, planted)
        if name in RULES:
            monkeypatch.setitem(RULES, name, planted)


def only(monkeypatch: pytest.MonkeyPatch, *wanted: str) -> None:
    """Let the suites do these checks alone, known by the beginnings of their names: the others cost time."""
    real = Report.run

    def chosen(report: Report, name: str, check: Callable[[], str | None]) -> None:
        if name.startswith((BINDS, *wanted)):
            real(report, name, check)

    monkeypatch.setattr(Report, "run", chosen)


def must_see(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check that is named fails."""
    plant(bug, monkeypatch)
    only(monkeypatch, *bug.seen_by)
    report = bug.suite()
    missed = {name for name in bug.seen_by if not any(failed.startswith(name) for failed in report.failed)}
    assert not missed, f"{missed} did not fail:\n{report}"


def named(bug: Bug) -> str:
    return bug.name


# -- rules -------------------------------------------------------------------------------------------------------------


def under(rule: Any) -> Callable[[], Report]:
    return lambda: check_rule(rule, quick=True)


def stops_at_first_failure(p: Any, tree: TokenTree, draws: Any, position: int) -> verify.Verdict:
    """The paper's block verification, read from the front; chains only, the real rule elsewhere."""
    is_chain = tree.is_chain and tree.drawn is Drawn.IID and tree.q is not None and tree.q.shape[1] == p(0).vocab_size
    return (STOPPING if is_chain else RULES["block"])(p, tree, draws, position)


STOPPING = chain_rule(stop_early=True)
IID, DISTINCT, FIXED = "drawn independently", "drawn without replacement", "fixed"
ONCE = "no chance is used twice"
EDGES = "nothing impossible at the edges of chance"

RULE_BUGS = [
    Bug(
        "the token after a rejection is drawn from p, not from the residual",
        under("standard"),
        {f"chain of 1 {IID}", f"two siblings {IID}", "a draft with a smaller vocabulary"},
        ((verify, "_left"),),
        (("return left / mass,", "return law,"),),
    ),
    Bug(
        "the residual goes through a softmax",
        under("standard"),
        {f"chain of 1 {IID}", f"chain of 3 {IID}"},
        ((verify, "_left"),),
        (("return left / mass,", "return left.softmax(0),"),),
    ),
    Bug(
        "the last token always comes from p",
        under("block"),
        {f"chain of 1 {IID}", f"chain of 2 {IID}"},
        ((verify, "block"),),
        (("draws.pick(law)", "draws.pick(p(node).probs())"),),
    ),
    Bug("block stops at the first node that is not kept", under(stops_at_first_failure), {f"chain of 3 {IID}"}),
    Bug(
        "block: h = w, the share is not lowered by what the children took",
        under("block"),
        {f"chain of 2 {IID}", f"chain of 3 {IID}"},
        ((verify, "_left"),),
        (("mass / (mass + (1.0 - share))", "share"),),
    ),
    Bug(
        "block: the ordinary residual (p - q)+ in place of (a p - q)+",
        under("block"),
        {f"chain of 3 {IID}"},
        ((verify, "_left"),),
        (("return left / mass,", "left, mass_of = (law - q).clamp(min=0.0), mass\n    return left / left.sum(),"),),
    ),
    Bug(
        "siblings: q is not made to sum to 1 again",
        under("standard"),
        {f"three siblings {DISTINCT}"},
        ((verify, "_without"),),
        (("return rest / mass if", "return rest if"),),
    ),
    Bug(
        "siblings drawn without replacement are tested as if q still held the first",
        under("block"),
        {f"two siblings {DISTINCT}"},
        ((verify, "_without"),),
        (("drawn is not Drawn.DISTINCT", "True"),),
    ),
    Bug(
        "a refused point mass is left in p",
        under("standard"),
        {f"two siblings {FIXED}", f"three siblings {FIXED}"},
        ((verify, "_match"),),
        (
            (
                "    token = draws.pick(law)\n",
                "    for child in tree.children[node]:\n"
                "        if draws.accept(float(law[tree.ids[child]])):\n"
                "            return child, tree.ids[child]\n"
                "    token = draws.pick(law)\n    return None, token\n",
            ),
        ),
    ),
    Bug(
        "accepts where the uniform number equals p/q, so 0 accepts what is impossible",
        under("standard"),
        {EDGES},
        ((Draws, "accept"),),
        (('self._uniform("accept") < probability', 'self._uniform("accept") <= probability'),),
    ),
    Bug(
        "the coupled rule asks for the noise of the root's position at every node",
        under("coupled"),
        {"the ids of plain sampling"},
        ((verify, "coupled"),),
        (("position + len(path)", "position"),),
    ),
    Bug(
        "every position has the same noise",
        under("coupled"),
        {ONCE},
        ((Draws, "_scored"),),
        (('self._keys("noise", position)', 'self._keys("noise", 0)'),),
    ),
    Bug(
        "rows with different seeds have the same noise",
        under("coupled"),
        {ONCE},
        ((Draws, "_digest"),),
        (("self.seed, self.sample, first", "0, self.sample, first"),),
    ),
    Bug(
        "all samples of a prompt have the same noise",
        under("coupled"),
        {ONCE},
        ((Request, "_make_sampler"),),
        (("Draws(self.seed, self.sample)", "Draws(self.seed)"),),
    ),
    Bug(
        "what is drafted anew is tested with the uniform numbers of the pass before",
        under("block"),
        {ONCE},
        ((Draws, "next_pass"),),
        (("self._pass += 1", "pass"),),
    ),
    Bug(
        "the number that drew a guess also decides about it",
        under("standard"),
        {ONCE},
        ((Draws, "_digest"),),
        (("person=purpose.encode()", 'person=b"draws"'),),
    ),
]


@pytest.mark.parametrize("rule", RULES)
def test_rules_pass_without_a_bug(rule: str) -> None:
    check_rule(rule, quick=True).verify()


@pytest.mark.parametrize("bug", RULE_BUGS, ids=named)
def test_rule_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    must_see(bug, monkeypatch)


def test_the_front_to_back_rule_is_right_without_its_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "STOPPING", chain_rule())
    only(monkeypatch, "chain of")
    check_rule(stops_at_first_failure, quick=True).verify()


def test_an_impossible_token_is_written_when_the_uniform_number_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through a real run: token 0 has probability 0, is drafted, and the uniform number is exactly 0."""

    def text() -> list[int]:
        never, always = [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]
        request = Request(
            [1], SamplingParams(max_tokens=6, seed=1), ToyDrafter(lambda _: always, (-1, 0)), 3, 99, rule="standard"
        )
        for _ in run(ToyTarget(lambda _: never, 3), [request]):
            pass
        return request.output_ids

    monkeypatch.setattr(Draws, "_uniform", lambda self, purpose: 0.0)
    assert 0 not in text()
    (bug,) = (bug for bug in RULE_BUGS if (Draws, "accept") in bug.places)
    plant(bug, monkeypatch)
    assert 0 in text()


def chi_square(rule: str, count: int) -> tuple[float, int]:
    """Four tokens of real runs with seeds 0, 1, 2, … against the target's law: the statistic and its cells less 1."""
    target, drafter = ToyTarget.random(2, 3), ToyDrafter(random_law(2, 8), (-1, 0))
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        request = Request([0], SamplingParams(max_tokens=4, seed=seed), drafter, 2, 99, rule=rule)
        for _ in run(target, [request]):
            pass
        found[tuple(request.output_ids)] += 1
    total = 0.0
    for text in product(range(2), repeat=4):
        expected = count * math.prod(float(target.law((0, *text[:at]))[text[at]]) for at in range(4))
        total += (found[text] - expected) ** 2 / expected
    return total, 2**4 - 1


def test_a_uniform_number_used_twice_changes_the_law_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger of `check_rule` refuses it at sight; this is the harm it does, and that sound draws do none."""
    statistic, cells = chi_square("block", 500)
    assert statistic < cells + 4 * math.sqrt(2 * cells)
    (bug,) = (bug for bug in RULE_BUGS if (Draws, "next_pass") in bug.places)
    plant(bug, monkeypatch)
    statistic, cells = chi_square("block", 500)
    assert statistic > cells + 20 * math.sqrt(2 * cells)


def test_passes_that_are_not_counted_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `next_pass` that does nothing at all leaves the indices running, so every number is still used once."""
    monkeypatch.setattr(Draws, "next_pass", lambda self: None)
    only(monkeypatch, ONCE)
    check_rule("block", quick=True).verify()
    statistic, cells = chi_square("block", 500)
    assert statistic < cells + 4 * math.sqrt(2 * cells)


# -- drafters ----------------------------------------------------------------------------------------------------------


class Drawing(Drafter[list[int]]):
    """One level of guesses, drawn from a table of its own under the request's settings; the bugs are its children."""

    drawn, width = Drawn.IID, 1

    def __init__(self) -> None:
        self.size = 0

    def bind(self, target: Any) -> None:
        self.size = target.vocab_size
        self.table = random_law(self.size, 11)

    def begin(self, prompt: Step) -> Any:
        return list(prompt.tokens)

    def observe(self, states: list[Any], steps: list[Step]) -> None:
        for text, step in zip(states, steps):
            text += step.tokens

    def propose(self, states: list[Any], asks: list[Ask]) -> list[TokenTree]:
        return [self.tree(text, ask) for text, ask in zip(states, asks)]

    def tree(self, text: list[int], ask: Ask) -> TokenTree:
        logits = torch.tensor(self.table((*text, ask.pending)), dtype=torch.float64).log()
        q = ask.law(logits, ()).exp()
        tokens = self.kept(q, self.draw(q, ask))
        rows = self.reported(logits, q).repeat(1 + len(tokens), 1)
        return TokenTree(torch.tensor([ask.pending, *tokens]), torch.tensor([-1] + [0] * len(tokens)), self.drawn, rows)

    def draw(self, q: Tensor, ask: Ask) -> list[int]:
        if self.drawn is Drawn.DISTINCT:
            return ask.draws.distinct(q, self.width)
        return [ask.draws.draft(q) for _ in range(self.width)]

    def reported(self, logits: Tensor, q: Tensor) -> Tensor:
        return q

    def kept(self, q: Tensor, tokens: list[int]) -> list[int]:
        return tokens


class Siblings(Drawing):
    drawn, width = Drawn.DISTINCT, 2


class RawLaw(Drawing):
    def reported(self, logits: Tensor, q: Tensor) -> Tensor:
        return logits.softmax(0)


class Likeliest(Drawing):
    def draw(self, q: Tensor, ask: Ask) -> list[int]:
        return [int(q.argmax())]


class DropsUnlikely(Drawing):
    def kept(self, q: Tensor, tokens: list[int]) -> list[int]:
        return [token for token in tokens if float(q[token]) > 0.3]


class CalledIID(Siblings):
    def tree(self, text: list[int], ask: Ask) -> TokenTree:
        tree = super().tree(text, ask)
        return TokenTree(tree.tokens, tree.parents, Drawn.IID, tree.q)


class CalledDistinct(Siblings):
    def draw(self, q: Tensor, ask: Ask) -> list[int]:
        return [ask.draws.draft(q) for _ in range(2)]


class Merged(CalledDistinct):
    """Two independent draws, a repeated one left out. Given that it is another one, the second follows q without the
    first, and that there is a second says nothing about which: this label is true."""

    def kept(self, q: Tensor, tokens: list[int]) -> list[int]:
        return list(dict.fromkeys(tokens))


class GlobalChance(Drawing):
    def draw(self, q: Tensor, ask: Ask) -> list[int]:
        return torch.multinomial(q, 1).tolist()


class OwnGenerator(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(0)

    def draw(self, q: Tensor, ask: Ask) -> list[int]:
        return torch.multinomial(q, 1, generator=self.chance).tolist()


class Sorted(Siblings):
    def kept(self, q: Tensor, tokens: list[int]) -> list[int]:
        return sorted(tokens, key=lambda token: -float(q[token]))


class LastSuccessor(Drafter[dict[int, int]]):
    """The drafter of the README."""

    def begin(self, prompt: Step) -> dict[int, int]:
        return dict(zip(prompt.tokens, prompt.following))

    def propose(self, states: list[dict[int, int]], asks: list[Ask]) -> list[TokenTree]:
        return [TokenTree.chain(ask.pending, self.follow(state, ask)) for state, ask in zip(states, asks)]

    def observe(self, states: list[dict[int, int]], steps: list[Step]) -> None:
        for state, step in zip(states, steps):
            state.update(zip(step.tokens, step.following))

    def follow(self, state: dict[int, int], ask: Ask) -> list[int]:
        token, guesses = ask.pending, list[int]()
        while token in state and len(guesses) < min(4, ask.budget):
            token = state[token]
            guesses.append(token)
        return guesses


class KeepsNumbers(LastSuccessor):
    """Its states hold numbers alone, which Python's garbage collector does not list."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def begin(self, prompt: Step) -> dict[int, int]:
        self.states.append(super().begin(prompt))
        return self.states[-1]


class KeepsTensors(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []

    def begin(self, prompt: Step) -> Any:
        self.states.append((super().begin(prompt), torch.tensor(prompt.tokens)))
        return self.states[-1][0]


class WritesIntoLogits(LastSuccessor):
    reads_logits = True
    value = 0.0

    def observe(self, states: list[dict[int, int]], steps: list[Step]) -> None:
        super().observe(states, steps)
        for step in steps:
            if step.logits is not None:
                step.logits[:, 0] = self.value


class WritesNaN(WritesIntoLogits):
    value = math.nan


class OneState(LastSuccessor):
    """One memory for all sequences. The target decides every token, so the text stays right; what is drafted, and with
    it how long a request takes, hangs on the requests before it."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}

    def begin(self, prompt: Step) -> dict[int, int]:
        self.memory.update(super().begin(prompt))
        return self.memory


class Renumbered(Drafter[list[int]]):
    """Knows the target's law, and numbers the tokens in its own way: draft id 0 is the target's last, and so on."""

    asks_by = "target"

    def bind(self, target: Any) -> None:
        self.target = target
        self.target_ids = torch.arange(target.vocab_size).flip(0)

    def begin(self, prompt: Step) -> list[int]:
        return list(prompt.tokens)

    def observe(self, states: list[list[int]], steps: list[Step]) -> None:
        for text, step in zip(states, steps):
            text += step.tokens

    def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
        return [TokenTree.chain(ask.pending, self.guesses(text, ask)) for text, ask in zip(states, asks)]

    def guesses(self, text: list[int], ask: Ask) -> list[int]:
        found: list[int] = []
        while len(found) < min(3, ask.depth):
            logits = self.target.law([*text, ask.pending, *found]).log()
            own = ask.law(logits, found)[self.target_ids]  # as its own head would give it
            ids = self.target_ids if self.asks_by == "target" else torch.arange(len(own))
            noise = ask.draws.noise(ask.position + len(found) + 1, ids)
            found.append(int(self.target_ids[int((own + noise).argmax())]))
        return found


class AsksByDraftId(Renumbered):
    asks_by = "draft"


class Foresees(Renumbered):
    """Two guesses, the second always right where the first is: all that a rule does below the root is tried."""

    def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
        return [TokenTree.chain(ask.pending, self.guesses(text, ask)[:2]) for text, ask in zip(states, asks)]


def drafting(drafter: Callable[[], Drafter[Any]], *rules: str, **more: Any) -> Callable[[], Report]:
    return lambda: check_drafter(drafter, rules=rules, **more)


EXACT, EXACT_BLOCK = "truthful under standard: the exact law", "truthful under block: the exact law"
LABELS, TWICE, LEFT = "labels that its trees can have", "the same call twice", "nothing stays behind"
SHOWN, SETTINGS = "what it is shown stays as it was", "coupled, with filters and penalties"

DRAFTER_BUGS = [
    Bug(
        "q is the raw law, drawn was under temperature and top-k",
        drafting(RawLaw, "block", "standard"),
        {EXACT, EXACT_BLOCK},
    ),
    Bug("the likeliest token, with a q that says it was drawn", drafting(Likeliest, "standard"), {EXACT}),
    Bug("a drawn token is dropped because it is unlikely", drafting(DropsUnlikely, "standard"), {EXACT}),
    Bug("drawn without replacement, labelled IID", drafting(CalledIID, "standard"), {EXACT}),
    Bug("drawn independently, labelled DISTINCT", drafting(CalledDistinct, "standard"), {LABELS, EXACT}),
    Bug(
        "draws from torch's global generator",
        drafting(GlobalChance, "standard"),
        {"nothing global is touched", TWICE, EXACT},
    ),
    Bug("draws from a generator of its own", drafting(OwnGenerator, "standard"), {TWICE, EXACT}),
    Bug("siblings sorted by probability after they were drawn", drafting(Sorted, "standard"), {EXACT}),
    Bug("states of plain numbers kept after their end", drafting(KeepsNumbers), {LEFT}),
    Bug("states with tensors kept after their end", drafting(KeepsTensors), {LEFT}),
    Bug("writes into Step.logits", drafting(WritesIntoLogits), {SHOWN}),
    Bug("writes NaN into Step.logits", drafting(WritesNaN), {SHOWN}),
    Bug("one state for all sequences", drafting(OneState, "standard"), {TWICE}),
]

LOOP_BUGS = [
    Bug(
        "penalties do not see the drafted path",
        drafting(Foresees, "coupled", "standard"),
        {SETTINGS, EXACT},
        ((Sampler, "_edited"),),
        (("edit(x, path)", "edit(x, ())"),),
    ),
    Bug(
        "filters and temperature are applied at the root alone",
        drafting(Foresees, "coupled", "standard"),
        {SETTINGS, EXACT},
        ((decode, "_verify"),),
        (
            (
                "return row.sampler.law(",
                "return Law(None, logits[slots[node]], row.vocab_size) if node else row.sampler.law(",
            ),
        ),
    ),
    Bug(
        "the bonus token after full acceptance comes from raw logits",
        drafting(Foresees, "coupled", "standard"),
        {SETTINGS, EXACT},
        ((decode, "_verify"),),
        (
            (
                "return row.sampler.law(",
                "if node and not tree.children[node]:\n"
                "            return Law(None, logits[slots[node]], row.vocab_size)\n"
                "        return row.sampler.law(",
            ),
        ),
    ),
    Bug(
        "the text goes on behind a stop that was drafted",
        drafting(Foresees, "coupled"),
        {"stops inside of a draft"},
        ((Request, "cut"),),
        (("if end is not None:", "if end is not None and i == len(ids) - 1:"),),
    ),
]


def test_drafters_pass_without_a_bug() -> None:
    check_drafter(Drawing).verify()


def test_noise_asked_with_target_ids_is_a_help(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "coupled, ", "it helps")
    check_drafter(Renumbered, rules=("coupled",), min_acceptance_length=2.2).verify()


@pytest.mark.parametrize(
    ("drafter", "rules"), [(Siblings, ("standard",)), (Merged, ("block",)), (Foresees, ("standard",))]
)
def test_what_the_bugs_were_put_into_is_right(
    drafter: type[Drafter[Any]], rules: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, EXACT, EXACT_BLOCK, LABELS, LEFT)
    check_drafter(drafter, rules=rules).verify()


@pytest.mark.parametrize("bug", DRAFTER_BUGS + LOOP_BUGS, ids=named)
def test_drafter_and_loop_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    must_see(bug, monkeypatch)


def test_noise_asked_with_draft_ids_shows_in_the_acceptance_length_alone() -> None:
    """The coupling is lost, and no token changes."""
    report = check_drafter(AsksByDraftId, rules=("coupled",), min_acceptance_length=2.2)
    assert len(report.checks) == 15
    assert report.failed == ["it helps"]


def test_one_state_for_all_sequences_shows_in_repeated_calls_alone() -> None:
    """Under `coupled`: the target decides every token, whatever is drafted."""
    assert check_drafter(OneState, rules=("coupled",)).failed == [TWICE]


# -- targets and the cache ---------------------------------------------------------------------------------------------


@cache
def tiny_target() -> HFTarget:
    return HFTarget(tiny("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16))


def toy_target() -> ToyTarget:
    return ToyTarget.random(7, 3)


VISIBLE = ((paceline.target, "visible_slots"), (paceline.testing.toy, "visible_slots"))
STACK = ((paceline.tree, "stack"), (decode, "stack"), (paceline.testing.targets, "stack"))
TREE, SIBLINGS, PADDING = "a tree reads as its paths", "siblings do not see each other", "padding is not seen"
ROLLBACK, LEAVE, RIDERS = "rollback", "rows that leave and join", "riders see what their mask says"


def reading(target: Callable[[], Any]) -> Callable[[], Report]:
    return lambda: check_target(target())


def of_both(name: str, seen_by: set[str], places: Any, *changes: tuple[str, str]) -> list[Bug]:
    return [
        Bug(f"{name} ({kind})", reading(target), seen_by, places, changes)
        for kind, target in (("table", toy_target), ("llama", tiny_target))
    ]


TARGET_BUGS = [
    Bug(
        "every position is one too far (table)",
        reading(toy_target),
        {"a text at once", TREE},
        ((ToyTarget, "forward"),),
        (("positions = lengths + offsets", "positions = lengths + offsets + 1"),),
    ),
    Bug(
        "positions are one too far in passes of several tokens (llama)",
        reading(tiny_target),
        {TREE, "positions go on"},
        ((HFTarget, "forward"),),
        (("position_ids=(lengths + offsets)", "position_ids=(lengths + offsets + (offsets.shape[1] > 1))"),),
    ),
    Bug(
        "a node's position is its slot, not its depth (llama)",
        reading(tiny_target),
        {TREE, "level after level"},
        ((HFTarget, "forward"),),
        (("position_ids=(lengths + offsets)", "position_ids=(lengths + torch.arange(offsets.shape[1]))"),),
    ),
    *of_both(
        "commit leaves the first slots where they are",
        {ROLLBACK, "rows of different lengths", "the whole loop"},
        ((KVCache, "commit"),),
        ("if list(path) != list(range(len(path))):", "if False:"),
    ),
    Bug(
        "commit keeps the slot beside the right one (table)",
        reading(toy_target),
        {ROLLBACK},
        ((KVCache, "commit"),),
        (("torch.tensor(path) + begin", "torch.tensor([*path[:-1], path[-1] - 1]) + begin"),),
    ),
    Bug(
        "commit counts everything that was staged (table)",
        reading(toy_target),
        {ROLLBACK, "rows of different lengths"},
        ((KVCache, "commit"),),
        (("self.lengths[row] += len(path)", "self.lengths[row] += self.staged"),),
    ),
    Bug(
        "what was staged stays staged after a commit (table)",
        reading(toy_target),
        {ROLLBACK},
        ((KVCache, "commit"),),
        (("self.unstage()", "pass"),),
    ),
    Bug(
        "truncate does not roll the length back (table)",
        reading(toy_target),
        {ROLLBACK},
        ((KVCache, "truncate"),),
        (("min(self.lengths[row], length)", "self.lengths[row]"),),
    ),
    *of_both(
        "siblings see each other",
        {TREE, SIBLINGS, "level after level"},
        VISIBLE,
        ("= mask[row]", "= torch.ones(width, span).tril(cache.staged).bool()"),
    ),
    Bug(
        "a node sees its later siblings (table)",
        reading(toy_target),
        {TREE, SIBLINGS},
        STACK,
        (("= tree.ancestors", "= torch.ones(tree.num_nodes, tree.num_nodes).bool()"),),
    ),
    *of_both(
        "padding is seen",
        {PADDING, "rows of different lengths"},
        STACK,
        ("torch.eye(width, dtype=torch.bool)", "torch.ones(width, width, dtype=torch.bool)"),
    ),
    Bug(
        "nodes see the riders (table)",
        reading(toy_target),
        {RIDERS},
        STACK,
        (
            (
                "mask[row, begin:end, begin:end] = ",
                "mask[row, where, begin:end] = True\n            mask[row, begin:end, begin:end] = ",
            ),
        ),
    ),
    *of_both(
        "keep takes the wrong rows' keys and values",
        {LEAVE},
        ((KVCache, "keep"),),
        ("index = torch.tensor(list(rows)", "index = torch.tensor(sorted(rows)"),
    ),
    Bug(
        "keep leaves the lengths in their old order (table)",
        reading(toy_target),
        {LEAVE},
        ((KVCache, "keep"),),
        (("for row in rows]\n    self.rows", "for row in sorted(rows)]\n    self.rows"),),
    ),
    Bug(
        "put writes into another row (table)",
        reading(toy_target),
        {LEAVE},
        ((KVCache, "put"),),
        (("buffer[row, :, :length]", "buffer[row - 1, :, :length]"),),
    ),
    Bug(
        "put leaves the length of the row that was there (table)",
        reading(toy_target),
        {LEAVE},
        ((KVCache, "put"),),
        (("self.lengths[row] = length", "pass"),),
    ),
]


@pytest.mark.parametrize("target", [toy_target, tiny_target])
def test_targets_pass_without_a_bug(target: Callable[[], Any]) -> None:
    check_target(target()).verify()


@pytest.mark.parametrize("bug", TARGET_BUGS, ids=named)
def test_target_and_cache_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    must_see(bug, monkeypatch)
