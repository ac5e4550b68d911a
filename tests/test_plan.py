"""Plans: a replay counts what a live run counts; costs, choices and intervals on clocks that are made up; bad input."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import decode, prompt_of, target
from test_draft_model import near

from paceline import LLM, BadRequest, SamplingParams
from paceline import decode as decoding
from paceline.draft import SpeculativeConfig
from paceline.draft.base import Drafter
from paceline.draft.compose import Compose
from paceline.draft.costs import TILES, Costs
from paceline.draft.early_exit import EarlyExit
from paceline.draft.lookahead import Lookahead
from paceline.draft.model import DraftModel
from paceline.draft.ngram import Ngram
from paceline.draft.planned import place
from paceline.draft.planned import read as read_plan
from paceline.draft.recycle import Recycle
from paceline.draft.suffix import Suffix
from paceline.plan import curve as curves
from paceline.plan import make_plan, search
from paceline.plan.replay import Pass, Replay, can_replay, watched
from paceline.plan.search import _turns

GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}


# -- replays -----------------------------------------------------------------------------------------------------------


def made() -> dict[str, Callable[[], Drafter[Any]]]:
    draft, _ = near()
    return {
        "ngram": Ngram,
        "suffix": Suffix,
        "draft model": lambda: DraftModel(draft, reuse_prefix=False),
        "compose": lambda: Compose(
            [Suffix(costs=TILES), DraftModel(draft, reuse_prefix=False, costs=TILES)], costs=TILES
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", made())
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("costs", [None, TILES], ids=["all", "budget"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_replay_counts_what_a_run_counts(name: str, settings: dict[str, Any], costs: Costs | None, rows: int) -> None:
    """The same passes, as wide, with the same guesses kept; and not one pass over the model."""
    prompts = [prompt_of(length) for length in (4, 9, 30)][:rows]
    model = target()

    def bound() -> Drafter[Any]:
        drafter = made()[name]()
        drafter.bind(model)
        return drafter

    with watched(model) as passes:
        live = decode(model, prompts, bound(), costs=costs, max_tokens=60, **settings)
    replay = Replay(model, [row.ids for row in live])
    with watched(model) as none:
        again = decode(replay, prompts, bound(), costs=costs, max_tokens=60, **settings)
    assert not none
    assert replay.passes == passes
    for one, other in zip(live, again, strict=True):
        assert other.output_ids == one.output_ids
        assert other.stats.acceptance_histogram == one.stats.acceptance_histogram
        assert other.stats.drafted_per_position == one.stats.drafted_per_position
        assert other.finish_reason == one.finish_reason


def test_a_text_that_ends_by_itself_ends_in_its_replay() -> None:
    model = target()
    (free,) = decode(model, [prompt_of(9)], max_tokens=20)
    end = free.output_ids[11]
    (live,) = decode(model, [prompt_of(9)], max_tokens=20, eos=[end])
    (again,) = decode(Replay(model, [live.ids]), [prompt_of(9)], Ngram(), max_tokens=20, eos=[end])
    assert live.finish_reason == again.finish_reason == "stop"
    assert again.output_ids == live.output_ids


def test_what_looks_into_the_target_is_not_replayed() -> None:
    draft, _ = near()
    assert all(can_replay(one) for one in (Ngram(), Suffix(), DraftModel(draft), Compose([Suffix(), Ngram()])))
    for one in (Recycle(), Lookahead(3, 3, 3), EarlyExit(1), Compose([Suffix(), Recycle()])):
        assert not can_replay(one)


# -- what passes cost --------------------------------------------------------------------------------------------------


class Clocked:
    """A target whose passes take what a function of their tokens says, by a clock that it moves itself."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.seconds, self.now, self.turn = seconds, 0.0, 0
        self.inner = target()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, tokens: Any, *rest: Any, **more: Any) -> Any:
        self.turn += 1
        self.now += self.seconds(tokens.shape[0] * tokens.shape[1], self.turn)
        return self.inner.forward(tokens, *rest, **more)

    def clock(self) -> float:
        return self.now


def stairs(tokens: int, turn: int = 0) -> float:
    return 0.1 * (1.0 if tokens <= 11 else 1.5 if tokens <= 40 else 3.0)


def test_a_staircase_is_found_to_the_token() -> None:
    machine = Clocked(stairs)
    found, _ = curves.measure(machine, prompt_of(20), clock=machine.clock)
    curve = dict(found.curve)
    assert {11, 12, 40, 41} <= set(curve)
    assert all(seconds == pytest.approx(stairs(n)) for n, seconds in curve.items())
    assert found.noise < 1e-9
    assert len(found.seconds) == curves.LEAST_TURNS
    assert len(curve) <= curves.MOST_POINTS
    assert found.cost[0] == (1, 1.0)
    assert Costs(target=found.cost).verify(40) == pytest.approx(1.5)


def test_a_machine_that_drifts_gives_the_same_ratios() -> None:
    """Twice as slow every hundred passes: all widths of a turn share it."""
    machine = Clocked(lambda tokens, turn: stairs(tokens) * (1.0 + turn / 100))
    found, _ = curves.measure(machine, prompt_of(20), clock=machine.clock)
    ratio = dict(zip(found.widths, (float(x) for x in sorted(found.ratios().mean(0))), strict=True))
    assert ratio[40] == pytest.approx(1.5, rel=0.15)
    assert ratio[64] == pytest.approx(3.0, rel=0.15)


def test_a_noisy_machine_is_timed_longer_and_told() -> None:
    chance = torch.Generator().manual_seed(0)

    def noisy(tokens: int, turn: int) -> float:
        return stairs(tokens) * math.exp(0.6 * float(torch.randn((), generator=chance)))

    machine = Clocked(noisy)
    found, _ = curves.measure(machine, prompt_of(20), clock=machine.clock)
    assert len(found.seconds) == curves.MOST_TURNS
    assert found.noise > curves.TOLERANCE


def test_rows_are_timed_side_by_side() -> None:
    machine = Clocked(stairs)
    found, _ = curves.measure(machine, prompt_of(20), rows=8, clock=machine.clock)
    assert found.widths[0] == 1
    assert max(found.widths) == 8
    assert found.cost[:2] == ((1, 1.0), (8, 1.0))
    assert Costs(target=found.cost).shared(8).verify(5) == pytest.approx(stairs(40) / stairs(8))


def test_a_curve_to_draft_by_never_falls() -> None:
    """By brute force over all ways to cut it into blocks of means, and untouched where it rises anyway."""
    chance = torch.Generator().manual_seed(1)
    assert curves.rising([1.0, 1.0, 2.0, 5.0]) == [1.0, 1.0, 2.0, 5.0]
    for _ in range(20):
        values = (1 + torch.rand(6, generator=chance)).tolist()
        best = math.inf
        for cuts in range(2**5):
            edges = [0, *(i + 1 for i in range(5) if cuts >> i & 1), 6]
            means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
            if means == sorted(means):
                found = [mean for mean, (a, b) in zip(means, pairwise(edges), strict=True) for _ in range(b - a)]
                best = min(best, sum((x - y) ** 2 for x, y in zip(values, found, strict=True)))
        rising = curves.rising(values)
        assert all(a <= b + 1e-12 for a, b in pairwise(rising))
        assert sum((x - y) ** 2 for x, y in zip(values, rising, strict=True)) == pytest.approx(best)


def test_the_interval_of_a_median() -> None:
    assert curves.interval([1.0] * 9) == 0.0
    wide, narrow = (curves.interval([1.0 + scale * (i % 5 - 2) for i in range(25)]) for scale in (0.2, 0.02))
    assert wide == pytest.approx(10 * narrow, rel=0.2)


def test_turns_end_as_rows_do() -> None:
    assert _turns([3, 1]) == [Pass(2, 1), Pass(1, 1), Pass(1, 1)]
    assert _turns([]) == []


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, None, threads=1, reuse_prefix=False)


PROMPTS = ["one two three one two three one two", "the end of the end of the"]


@pytest.fixture(scope="module")
def ids(llm: LLM) -> list[list[int]]:
    return [list(llm.tokenizer(text).input_ids) for text in PROMPTS]


@pytest.fixture
def machine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], None]:
    """Let passes over the model take what is said, and all else no time at all."""
    now, cost = 0.0, (lambda tokens: 1.0)
    forward = llm.target.forward

    def timed(tokens: Any, *rest: Any, **more: Any) -> Any:
        nonlocal now
        now += cost(tokens.numel())
        return forward(tokens, *rest, **more)

    def use(said: Callable[[int], float]) -> None:
        nonlocal cost
        cost = said

    monkeypatch.setattr(llm.target, "forward", timed)
    for module in (decoding, search):
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    return use


def test_a_plan_holds_what_a_reader_needs(llm: LLM, ids: list[list[int]], tmp_path: Path) -> None:
    stages: list[str] = []
    plan = make_plan(
        llm, ids, max_tokens=24, verify=True, methods=["ngram", "suffix"], progress=lambda *told: stages.append(told[0])
    )
    assert {"writing plain answers", "timing passes", "verifying"} <= set(stages)
    assert {one.method for one in plan.choices} == {"none", "ngram", "suffix"}
    speeds = [one.predicted_speedup for one in plan.choices]
    assert speeds == sorted(speeds, reverse=True)
    plain = next(one for one in plan.choices if one.method == "none")
    assert plain.predicted_speedup == pytest.approx(1.0)
    assert plain.tokens_per_pass == pytest.approx(1.0)
    assert plain.measured_speedup == pytest.approx(1.0)
    assert all(one.predicted_ci95[0] <= one.predicted_speedup <= one.predicted_ci95[1] for one in plan.choices)
    assert sum(one.measured_speedup is not None for one in plan.choices) == 3
    assert plan.bandwidth > 1e8
    assert plan.floor_seconds > llm.target.weight_bytes / plan.bandwidth
    path = tmp_path / "plan.json"
    plan.write(path)
    held = json.loads(path.read_text())
    assert held["kind"] == "paceline plan"
    assert held["choices"][held["chosen"]]["config"] == plan.choice.config
    assert held["machine"] == place(llm.target)


def test_free_passes_are_used_and_dear_ones_are_not(
    llm: LLM, ids: list[list[int]], machine: Callable[[Callable[[int], float]], None]
) -> None:
    """The model is random, so few guesses land: worth it where a pass of 64 costs what one of 1 costs, else not."""
    machine(lambda n: 50.0)
    free = make_plan(llm, ids, max_tokens=32, methods=["suffix"])
    best = max(one.tokens_per_pass for one in free.choices)
    assert free.choice.tokens_per_pass >= 0.99 * best > 1.05
    machine(lambda n: 50.0 * n)
    dear = make_plan(llm, ids, max_tokens=32, methods=["suffix"])
    assert dear.choice.method == "none"
    assert dear.reason.startswith("do not speculate here: the best of ")


def test_sizes_end_where_the_curve_steps_up(
    llm: LLM, ids: list[list[int]], machine: Callable[[Callable[[int], float]], None]
) -> None:
    machine(lambda n: 1.0 if n <= 11 else 2.0 if n <= 32 else 5.0)
    plan = make_plan(llm, ids, max_tokens=16, methods=["ngram"])
    assert {one.num_draft_tokens for one in plan.choices} == {0, 10, 23, 31}


def test_rows_change_the_answer(
    llm: LLM, ids: list[list[int]], machine: Callable[[Callable[[int], float]], None]
) -> None:
    """On a machine that is flat to 11 tokens, guesses are free for one row and not for eight."""
    machine(lambda n: 1.0 + max(0, n - 11))
    one = make_plan(llm, ids, max_tokens=32, methods=["suffix"])
    eight = make_plan(llm, ids * 4, max_tokens=32, methods=["suffix"], batch=8)
    assert one.choice.method == "suffix"
    assert max(c.num_draft_tokens for c in eight.choices) == 3
    assert eight.choice.predicted_speedup < one.choice.predicted_speedup


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_predicted_is_what_comes(
    llm: LLM, ids: list[list[int]], machine: Callable[[Callable[[int], float]], None], batch: int, temperature: float
) -> None:
    """Where nothing but passes takes time, runs take to the second what replays said, on any curve."""
    machine(lambda n: 3.0 if n <= 5 else 3.5 if n <= 12 else 6.0 + n / 10)
    plan = make_plan(llm, ids, max_tokens=32, batch=batch, temperature=temperature, verify=True)
    run = [one for one in plan.choices if one.measured_speedup is not None]
    assert len(run) >= 4
    for one in run:
        if one.method != "early_exit":  # its passes through the first layers are passes too on this clock
            slack = 1e-6 if batch == 1 else 0.01  # a last row alone has widths between those that were timed
            assert one.measured_speedup == pytest.approx(one.predicted_speedup, rel=slack), one.method


def test_every_method_is_considered_without_a_word(llm: LLM, ids: list[list[int]]) -> None:
    plan = make_plan(llm, ids, max_tokens=12)
    assert {one.method for one in plan.choices} >= {"none", "ngram", "suffix", "recycle", "lookahead", "early_exit"}
    assert all(one.tokens_per_pass >= 1.0 - 1e-9 for one in plan.choices)


def test_a_draft_model_is_planned_with(llm: LLM, ids: list[list[int]], tiny_model: Path) -> None:
    """The model drafts for itself: nearly all guesses land."""
    plan = make_plan(llm, ids, max_tokens=24, methods=["draft_model", "compose"], draft_model=str(tiny_model))
    best = max(plan.choices, key=lambda one: one.tokens_per_pass)
    assert best.tokens_per_pass > 3.0
    depths = {one.num_speculative_tokens for one in plan.choices if one.method == "draft_model"}
    assert depths == {None, 2, 4, 8}
    assert 0.0 < best.draft_share < 1.0


# -- following a plan --------------------------------------------------------------------------------------------------


@pytest.fixture
def written(llm: LLM, ids: list[list[int]], tmp_path: Path, machine: Any) -> Path:
    machine(lambda n: 100.0 if n <= 11 else 150.0)
    plan = make_plan(llm, ids, max_tokens=32, methods=["suffix"])
    assert plan.choice.method == "suffix"
    plan.write(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_auto_follows_a_plan(llm: LLM, ids: list[list[int]], written: Path) -> None:
    """The chosen method with the measured costs, and the passes that the plan had counted."""
    plan = json.loads(written.read_text())
    config = SpeculativeConfig.read({"method": "auto", "plan": str(written)})
    assert config.method == "suffix"
    assert config.num_draft_tokens == plan["choices"][plan["chosen"]]["num_draft_tokens"]
    params = [SamplingParams(temperature=0.0, max_tokens=32, seed=i) for i in range(2)]
    plain = llm.generate(ids, params, speculative_config=None)
    outputs = [
        llm.generate([prompt], own, speculative_config={"method": "auto", "plan": str(written)})[0]
        for prompt, own in zip(ids, params, strict=True)
    ]
    assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
    passes = sum(one.stats.num_target_passes for one in outputs)
    tokens = sum(len(one.token_ids) for one in outputs)
    assert tokens / passes == pytest.approx(plan["choices"][plan["chosen"]]["tokens_per_pass"])


def test_a_plan_is_capped_by_what_stands_beside_it(written: Path) -> None:
    auto = {"method": "auto", "plan": str(written)}
    assert SpeculativeConfig.read(auto | {"num_draft_tokens": 3}).num_draft_tokens == 3
    assert SpeculativeConfig.read(auto | {"num_speculative_tokens": 2}).depth == 2
    with pytest.raises(BadRequest, match="window_size given beside plan"):
        SpeculativeConfig.read(auto | {"window_size": 3})
    with pytest.raises(BadRequest, match="plan says what method auto is to do; the method is 'ngram'"):
        SpeculativeConfig.read({"method": "ngram", "plan": str(written)})


@pytest.mark.parametrize("what", ["threads", "processor", "torch", "kernel", "paceline"])
def test_a_plan_of_another_place_is_refused(llm: LLM, written: Path, what: str) -> None:
    held = json.loads(written.read_text())
    held["machine"][what] = "another"
    written.write_text(json.dumps(held))
    with pytest.raises(BadRequest, match=f"{what} 'another', and here it is .*paceline plan MODEL --json"):
        llm.generate("one two", speculative_config={"method": "auto", "plan": str(written)})


def test_a_plan_of_another_model_is_refused(written: Path, tiny_model: Path, llm: LLM) -> None:
    held = json.loads(written.read_text())
    held["machine"]["model"] = "0" * 24
    written.write_text(json.dumps(held))
    with pytest.raises(BadRequest, match="with another model"):
        llm.generate("one two", speculative_config={"method": "auto", "plan": str(written)})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[1]", "it is something else"),
        ('{"kind": "paceline plan", "format": 99}', "its format is 99"),
        ('{"kind": "paceline plan", "format": 1}', "'choices' is missing"),
        ('{"kind": "paceline plan", "format": 1, "choices": [], "chosen": 0}', "list index out of range"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadRequest, match=f"is not a plan of this version .*{why}.*paceline plan MODEL"):
        read_plan(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held.update(machine={}), "paceline None, and here it is"),
        (lambda held: held["choices"][held["chosen"]]["config"].update(method="suffx"), "suffx"),
        (lambda held: held["choices"][held["chosen"]]["config"].update(surprise=1), "has the key 'surprise'"),
        (lambda held: held["choices"][held["chosen"]]["config"].pop("method"), "has no method"),
        (lambda held: held.update(rows=10**30), "its cost curve is none"),
        (lambda held: held.update(cost_curve=[[1, float("nan")]]), "its cost curve is none"),
    ],
)
def test_a_damaged_plan_is_refused(llm: LLM, written: Path, change: Callable[[Any], Any], words: str) -> None:
    held = json.loads(written.read_text())
    change(held)
    written.write_text(json.dumps(held))
    with pytest.raises(BadRequest, match=words):
        llm.generate("one two", speculative_config={"method": "auto", "plan": str(written)})


def test_no_file_no_plan(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="No such file or directory; make one"):
        SpeculativeConfig.read({"plan": str(tmp_path / "none.json")})
    with pytest.raises(BadRequest, match="the path of a plan file is needed"):
        SpeculativeConfig.read({"plan": 5})


def test_nothing_but_a_plan_is_overwritten(llm: LLM, ids: list[list[int]], tmp_path: Path, written: Path) -> None:
    plan = make_plan(llm, ids, max_tokens=12, methods=["ngram"])
    for text in ("a letter", '{"kind": "a letter"}'):
        path = tmp_path / "letter.json"
        path.write_text(text)
        with pytest.raises(BadRequest, match="exists and is no plan; it is left as it is"):
            plan.write(path)
        assert path.read_text() == text
    plan.write(written)
    with pytest.raises(BadRequest, match="is a folder"):
        plan.write(tmp_path)
    with pytest.raises(BadRequest, match="there is no folder"):
        plan.write(tmp_path / "no" / "plan.json")


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "there are no prompts to plan for"),
        ([[1]], {}, "prompt 1 has 1 token"),
        ([[1, 2]], {"max_tokens": 10_000}, "the context holds"),
        ([[1, 2]], {"max_tokens": 2}, "the answers have 2 tokens, too few to measure with"),
        ([[1, 2]], {"max_tokens": 0}, "max_tokens=0 was given"),
        ([[1, 2]], {"batch": 2}, "batch=2 and 1 prompts"),
        ([[1, 2]] * 9, {"batch": 9}, "raise max_num_seqs"),
        ([[1, 2]], {"methods": ["draft_model"]}, "needs the draft model"),
        ([[1, 2]], {"methods": ["compose"]}, "give the draft model"),
        ([[1, 2]], {"methods": ["sufix"]}, "did you mean 'suffix'"),
    ],
)
def test_what_cannot_be_planned(llm: LLM, prompts: list[list[int]], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        make_plan(llm, prompts, **options)


def test_a_plan_needs_every_prompt_read(tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="reuse_prefix=False"):
        make_plan(LLM(tiny_model, None, threads=1), [[1, 2, 3]])
