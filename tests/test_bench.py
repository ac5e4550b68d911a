"""The benchmark's figures against values worked out by hand, with answers and seconds scripted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, FakeLLM
from rich.console import Console

from paceline.bench import peers, report
from paceline.bench.measure import Answer, Method, environment, first_difference, measure, watch
from paceline.bench.peers import Peer, stops_only, until_stop
from paceline.bench.prompts import Prompt
from paceline.bench.records import Record, Settings, Sidecar, differences, whole_rounds
from paceline.bench.summary import interval, ratio_of_means, speed, summarise, within
from paceline.errors import BadRequest, PacelineError
from paceline.files import write_atomically
from paceline.output import Stats, combined

METHODS = {"none": {"method": "none"}, "ngram": {"method": "ngram"}}
PROMPTS = [Prompt("a", ("say a",)), Prompt("b", ("say b", "and again"))]
SETTINGS = Settings("fake", METHODS, set="made-up", prompts=("a", "b"), repeats=2, max_tokens=6, warmup=0)


def run(llm: FakeLLM, settings: Settings = SETTINGS, **options: Any) -> list[Record]:
    contenders = [Method(llm, name, config, settings, llm.clock) for name, config in settings.methods.items()]
    prompts = [p for p in PROMPTS if p.id in settings.prompts]
    return measure(contenders, prompts, settings, llm.chat_ids, **options)[0]


def record(contender: str, prompt: str, tokens: int, seconds: float, repeat: int = 0, **changes: Any) -> Record:
    ids = list(range(tokens))
    return replace(Record(contender, repeat, prompt, ids, seconds, tokens, None, None, None, None), **changes)


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_contenders_are_interleaved_and_their_order_rotates() -> None:
    llm = FakeLLM("abcdef")
    records = run(llm)
    assert [(r.repeat, r.prompt, r.contender) for r in records] == [
        (0, "a", "none"), (0, "a", "ngram"), (0, "b", "ngram"), (0, "b", "none"),
        (1, "a", "none"), (1, "a", "ngram"), (1, "b", "ngram"), (1, "b", "none"),
    ]  # fmt: skip


def test_every_contender_samples_a_prompt_with_the_same_seed() -> None:
    llm = FakeLLM("abcdef")
    run(llm, replace(SETTINGS, seed=40))
    assert {seed for _, seed in llm.requests} == {40, 41}
    assert sorted(llm.requests[:2]) == [("ngram", 40), ("none", 40)]


def test_warm_up_answers_are_not_recorded() -> None:
    llm = FakeLLM("abcdef")
    assert len(run(llm, replace(SETTINGS, warmup=1))) == 8
    assert llm.calls["none"] == 2 * 3 + 1  # three turns in each repeat, and the warm-up's


def test_later_turns_see_the_contenders_own_answers() -> None:
    llm = FakeLLM(answers={"none": "plain", "ngram": "other"})
    seen: list[str] = []
    whole = llm.chat_ids
    llm.chat_ids = lambda messages: seen.append("|".join(m["content"] for m in messages)) or whole(messages)  # type: ignore[func-returns-value]
    run(llm, replace(SETTINGS, repeats=1))
    assert seen.count("say b|plain|and again") == seen.count("say b|other|and again") == 1


def test_a_record_adds_up_its_turns() -> None:
    llm = FakeLLM("abcdef", seconds={"none": 0.5}, prefill=2.0)
    both = next(r for r in run(llm) if r.contender == "none" and r.prompt == "b")
    assert (len(both.token_ids), both.seconds, both.passes, both.prefill_seconds) == (12, 10.0, 12, 4.0)
    assert both.first_token_seconds == 2.5
    assert both.tokens_per_second == 1.2
    assert both.stats is not None
    assert both.stats["time"]["target"] == 6.0


def test_printing_is_not_timed() -> None:
    llm = FakeLLM("abc", seconds={"none": 1.0})

    def slow_reader(*_: Any) -> None:
        llm.clock.now += 100

    from paceline.sampling import SamplingParams

    def begin() -> Any:
        llm.clock.now += 0.5  # what is done before the first piece is asked for counts
        return llm.stream("x", SamplingParams(max_tokens=3, seed=0), speculative_config={"method": "none"})

    run = watch(begin, slow_reader, llm.clock)
    assert (run.seconds, run.first_seconds) == (3.5, 1.5)


def test_progress_tells_the_time_left() -> None:
    ticks: list[tuple[int, int, float | None]] = []
    run(FakeLLM("abcdef"), replace(SETTINGS, prompts=("a",)), progress=lambda *tick: ticks.append(tick))
    # plain: 6 passes of a second; ngram: 2
    assert ticks == [(1, 4, None), (2, 4, 8.0), (3, 4, 6.0), (4, 4, 0.0)]


def test_a_failed_request_ends_the_run() -> None:
    llm = FakeLLM("abc")
    whole = llm.stream

    def broken(*args: Any, **options: Any) -> Any:
        stream = whole(*args, **options)
        stream._output.finish_reason, stream._output.error = "error", "the law is NaN at position 7"
        return stream

    llm.stream = broken  # type: ignore[method-assign]
    with pytest.raises(PacelineError, match="method 'none' failed: the law is NaN at position 7"):
        run(llm)


# -- the figures -------------------------------------------------------------------------------------------------------


def test_speed_up_is_the_ratio_of_mean_speeds() -> None:
    settings = replace(SETTINGS, repeats=1)
    base = [record("none", "a", 10, 10.0), record("none", "b", 30, 10.0)]  # 1 and 3 tokens/s
    ours = [record("ngram", "a", 10, 5.0), record("ngram", "b", 30, 6.0)]  # 2 and 5 tokens/s
    figures = speed(ours, base, settings)
    assert figures["tokens_per_second"] == 3.5
    assert figures["speedup"] == 3.5 / 2
    assert figures["speedup_mean_of_ratios"] == pytest.approx((2 + 5 / 3) / 2)
    assert figures["speedup_total_time"] == pytest.approx(20 / 11)
    assert figures["tokens_per_second_by_prompt"] == [2.0, 5.0]


def test_repeats_of_a_prompt_are_pooled() -> None:
    ours = [record("none", "a", 10, 5.0), record("none", "a", 10, 15.0, repeat=1), record("none", "b", 4, 4.0)]
    assert speed(ours, ours, SETTINGS)["tokens_per_second_by_prompt"] == [1.0, 1.0]


def test_decode_speed_leaves_the_prompt_out() -> None:
    ours = [record("none", "a", 10, 6.0, prefill_seconds=1.0), record("none", "b", 10, 6.0, prefill_seconds=1.0)]
    assert speed(ours, ours, SETTINGS)["decode_tokens_per_second"] == 2.0
    assert speed([*ours, record("none", "b", 1, 1.0)], ours, SETTINGS)["decode_tokens_per_second"] is None


def test_interval_draws_the_same_prompts_for_both_sides() -> None:
    base = [1.0, 2.0, 4.0, 8.0]
    assert interval([[3 * x for x in base]], [base]) == pytest.approx([3.0, 3.0])  # paired: no spread at all


def test_interval_of_two_prompts_is_all_their_mixtures() -> None:
    # Two prompts have four equally likely resamples, with ratios 1, 2, 2 and 3: the tails are the extremes.
    assert interval([[1.0, 3.0]], [[1.0, 1.0]]) == [1.0, 3.0]


def test_interval_needs_two_prompts() -> None:
    assert interval([[1.0]], [[1.0]]) is None


def test_ratio_of_means_multiplies_several_ratios() -> None:
    assert ratio_of_means([[2.0, 4.0], [5.0]], [[1.0, 1.0], [3.0]]) == 5.0
    assert ratio_of_means([[1.0]], [[0.0]]) is None


def test_summary_of_a_scripted_run() -> None:
    llm = FakeLLM("abcdef", seconds={"none": 1.0, "ngram": 1.5}, prefill=1.0)
    result = summarise(run(llm), SETTINGS, environment(llm))
    none, ngram = result["runs"]
    # Prompt a: 6 tokens in 1 + 6 s and in 1 + 2 * 1.5 s; prompt b is the same twice over.
    assert none["tokens_per_second"] == pytest.approx(6 / 7)
    assert ngram["speedup"] == pytest.approx(7 / 4)
    assert ngram["speedup_ci95"] == pytest.approx([7 / 4, 7 / 4])
    assert ngram["target_passes"] == 2 * 3 * 2
    assert (none["mean_acceptance_length"], ngram["mean_acceptance_length"]) == (1.0, 3.0)
    assert ngram["acceptance_per_position"] == [1.0, 1.0]
    assert ngram["time_share"]["target"] == pytest.approx(3 / 4)
    assert ngram["share_outside_forwards"] == 0.0
    assert ngram["gigabytes_per_second"] == pytest.approx(1 / 1.5)  # a pass reads 1 GB in 1.5 s
    assert ngram["decode_tokens_per_second"] == pytest.approx(2.0)
    assert ngram["seconds_to_first_token"] == 2.5
    assert ngram["outputs_identical"] is True
    assert ngram["repeatable"] is True
    assert result["drift"] == {"none_tokens_per_second_by_repeat": pytest.approx([6 / 7, 6 / 7]), "spread": 1.0}


def test_result_has_the_documented_shape() -> None:
    llm = FakeLLM("abcdef")
    result = json.loads(json.dumps(summarise(run(llm), SETTINGS, environment(llm))))
    assert set(result) == {"environment", "settings", "drift", "runs"}
    promised = {
        "method", "set", "temperature", "tokens_per_second", "speedup", "speedup_ci95", "mean_acceptance_length",
        "target_passes", "outputs_identical", "near_ties_per_1000", "share_outside_forwards", "peak_rss_mb",
    }  # fmt: skip
    assert all(promised <= set(run) for run in result["runs"])
    assert {"torch", "transformers", "python", "cpu", "threads", "kernel", "model_source", "date"} <= set(
        result["environment"]
    )
    assert result["settings"]["prompts"] == ["a", "b"]


def test_differing_texts_are_counted_and_located() -> None:
    llm = FakeLLM(answers={"none": "abcdef", "ngram": "abcxef"})
    result = summarise(run(llm), SETTINGS, {})
    ngram = result["runs"][1]
    assert ngram["outputs_identical"] is False
    assert ngram["num_different"] == 2
    assert ngram["first_differences"] == {"a": 3, "b": 3}
    assert result["runs"][0]["outputs_identical"] is True


@pytest.mark.parametrize(
    ("one", "two", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0)]
)
def test_first_difference(one: list[int], two: list[int], at: int | None) -> None:
    assert first_difference(one, two) == first_difference(two, one) == at


def test_drift_flags_speed_ups_that_it_could_explain() -> None:
    # The machine is 1.25x slower in the second repeat, for everybody; ngram is 1.2x faster throughout.
    slower = lambda pace: lambda call: pace if call < 3 else pace * 1.25  # noqa: E731
    llm = FakeLLM("abcdef", seconds={"none": slower(1.0), "ngram": slower(2.5)})
    result = summarise(run(llm), SETTINGS, {})
    assert result["drift"]["spread"] == pytest.approx(1.25)
    assert result["runs"][1]["speedup"] == pytest.approx(1.2)
    assert result["runs"][1]["within_drift"] is True
    assert result["runs"][0]["within_drift"] is None
    assert "no further from 1 than that drift" in "\n".join(report.footnotes(result))


@pytest.mark.parametrize(
    ("speedup", "spread", "flag"),
    [(1.2, 1.25, True), (1.3, 1.25, False), (0.9, 1.25, True), (0.75, 1.25, False), (1.2, None, None)],
)
def test_within_drift(speedup: float, spread: float | None, flag: bool | None) -> None:
    assert within(speedup, spread) is flag


def test_one_repeat_measures_no_drift() -> None:
    settings = replace(SETTINGS, repeats=1)
    result = summarise(run(FakeLLM("abcdef"), settings), settings, {})
    assert result["drift"]["spread"] is None
    assert result["runs"][1]["within_drift"] is None


def test_statistics_of_several_requests_add_up() -> None:
    one, two = Stats(), Stats()
    one.record(3, 3, 1)
    two.record(5, 2, 2)
    two.record(0, 0, 0)
    both = combined([one, two])
    assert both.tested_per_position == [2, 2, 0]
    assert set(both.time) == set(one.time)
    assert both.acceptance_histogram == [1, 1, 1]
    assert both.drafted_per_position == [2, 2, 1]
    assert (both.num_target_passes, both.num_draft_tokens, both.num_accepted_tokens) == (3, 8, 3)


# -- going on after an interruption ------------------------------------------------------------------------------------


HEADER = {"settings": SETTINGS.to_dict(), "environment": {"kernel": "k"}}


def interrupted(path: Path, after: int) -> list[Record]:
    """A run that was stopped after some requests."""
    llm = FakeLLM("abcdef")

    def stop(done: int, *_: Any) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llm, sidecar=Sidecar(path, HEADER), progress=stop)
    return [Record(**json.loads(line)) for line in Sidecar(path, HEADER).path.read_text().splitlines()[1:]]


def without_memory(records: list[Record]) -> list[Record]:
    return [replace(r, peak_rss_mb=None) for r in records]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    kept = interrupted(tmp_path / "r.json", 5)
    assert len(kept) == 5
    llm = FakeLLM("abcdef", clock=FakeClock())
    contenders = [Method(llm, name, config, SETTINGS, llm.clock) for name, config in METHODS.items()]
    records, resumed = measure(
        contenders, PROMPTS, SETTINGS, llm.chat_ids, sidecar=Sidecar(tmp_path / "r.json", HEADER)
    )
    assert resumed == 4  # the fifth request's round was not finished, so it is answered again by all
    assert len(llm.requests) == 2 + 4
    assert without_memory(records) == without_memory(run(FakeLLM("abcdef")))
    assert len(Sidecar(tmp_path / "r.json", HEADER).path.read_text().splitlines()) == 1 + 8


def test_a_line_cut_short_is_measured_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "r.json", 4)
    path = Sidecar(tmp_path / "r.json", HEADER).path
    path.write_text(path.read_text()[:-30])
    assert len(Sidecar(tmp_path / "r.json", HEADER).resume(["none", "ngram"])) == 2


def test_records_of_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    interrupted(tmp_path / "r.json", 4)
    other = {"settings": replace(SETTINGS, max_tokens=7).to_dict(), "environment": {"kernel": "other"}}
    with pytest.raises(
        BadRequest, match=r"environment.kernel was \"k\", now \"other\"; settings.max_tokens was 6, now 7"
    ):
        Sidecar(tmp_path / "r.json", other).resume(["none", "ngram"])


def test_whole_rounds_keeps_only_finished_ones() -> None:
    kept = [record("none", "a", 1, 1.0), record("ngram", "a", 1, 1.0)]
    assert whole_rounds([*kept, record("none", "b", 1, 1.0)], ["none", "ngram"]) == kept


def test_atomic_writing_leaves_no_scratch_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x.json", "1")
    write_atomically(tmp_path / "x.json", "2")
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "2"


def test_differences_name_leaves() -> None:
    assert differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}}) == [
        "a.c was 2, now 4",
        "d was 3, now null",
    ]


# -- tables ------------------------------------------------------------------------------------------------------------


def printed(renderable: Any) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_table_fits_80_columns_and_says_what_differs() -> None:
    llm = FakeLLM(answers={"none": "abcdef", "ngram": "abcxef"})
    result = summarise(run(llm), SETTINGS, environment(llm))
    result["runs"].append(result["runs"][1] | {"method": "transformers-lookup-23", "time_share": None})
    text = printed(report.table(result))
    assert "2 differ" in text
    assert "ngram parts from 'none' at token 3 of a" in text
    assert "…" not in text


def result(ngram: float, **changes: Any) -> dict[str, Any]:
    """A result in which ngram has the given pace."""
    llm = FakeLLM("abcdef", seconds={"ngram": ngram})
    settings = replace(SETTINGS, **changes)
    return summarise(run(llm, settings), settings, {"torch": "2"})


def test_compare_gives_ratios_of_speeds_and_of_speed_ups() -> None:
    rows = list(report.compared(result(1.0), result(0.5), paired=True))
    assert [row["method"] for row in rows] == ["none", "ngram"]
    assert rows[0]["tokens_per_second"] == 1.0
    assert rows[1]["tokens_per_second"] == pytest.approx(2.0)
    assert rows[1]["speedup"] == pytest.approx(2.0)
    assert rows[1]["speedup_ci95"] == pytest.approx([2.0, 2.0])


def test_drift_between_two_results_cancels_in_speed_ups() -> None:
    slow = result(1.0)
    for one in slow["runs"]:  # the whole machine at half its speed
        one["tokens_per_second_by_prompt"] = [x / 2 for x in one["tokens_per_second_by_prompt"]]
    row = list(report.compared(slow, result(1.0), paired=True))[1]
    assert row["tokens_per_second"] == pytest.approx(2.0)
    assert row["speedup"] == pytest.approx(1.0)


def test_compare_refuses_other_settings_unless_forced() -> None:
    a, b = result(1.0), result(1.0, max_tokens=5)
    with pytest.raises(BadRequest, match="the settings differ: max_tokens was 6, now 5"):
        report.compare(a, b)
    assert "settings differ: max_tokens" in printed(report.compare(a, b, force=True))


def test_compare_takes_the_contenders_both_have() -> None:
    a, b = result(1.0), result(1.0, methods={"none": {"method": "none"}})
    text = printed(report.compare(a, b))
    assert "only in A: ngram" in text


def test_compare_refuses_a_method_with_other_options() -> None:
    changed = METHODS | {"ngram": {"method": "ngram", "prompt_lookup_max": 3}}
    with pytest.raises(BadRequest, match=r"methods.ngram.prompt_lookup_max was null, now 3"):
        report.compare(result(1.0), result(1.0, methods=changed))


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(BadRequest, match="is no bench result"):
        report.read(tmp_path / "x.json")
    with pytest.raises(BadRequest, match="cannot read"):
        report.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "time left unknown yet"),
        (20.0, "about 20 s left"),
        (600.0, "about 10 min left"),
        (7200.0, "about 2.0 h left"),
    ],
)
def test_duration(seconds: float | None, words: str) -> None:
    assert report.duration(seconds) == words


# -- peers -------------------------------------------------------------------------------------------------------------


def test_unknown_peers_are_refused_with_the_nearest() -> None:
    with pytest.raises(BadRequest, match=r"unknown peer 'transfomers'; did you mean 'transformers'\?"):
        peers.check(["transfomers"])


def test_ids_after_the_end_do_not_count() -> None:
    assert until_stop([5, 6, 2, 7], 2) == [5, 6, 2]
    assert until_stop([5, 6, 2, 7], [9, 6]) == [5, 6]
    assert until_stop([5, 6], None) == [5, 6]


@pytest.fixture(scope="module")
def random_model() -> Any:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, eos_token_id=3,
            )
        ).eval()  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=[3, 4], repetition_penalty=1.3, top_k=5, do_sample=True)
    stops_only(model, [3, 4])
    return model


def peer_answer(model: Any, name: str, **changes: Any) -> Answer:
    settings = replace(SETTINGS, max_tokens=24, **changes)
    return Peer(name, model, FakeLLM().tokenizer, settings).answer([5, 6, 7, 5, 6, 7, 5, 6], seed=1)


def test_peers_write_what_greedy_decoding_writes(random_model: Any) -> None:
    import torch

    ids = [5, 6, 7, 5, 6, 7, 5, 6]
    with torch.inference_mode():
        for _ in range(24):
            ids.append(int(random_model(torch.tensor([ids])).logits[0, -1].argmax()))
    for name in peers.PEERS:
        answer = peer_answer(random_model, name)
        assert answer.token_ids == ids[8:]
        assert answer.text == FakeLLM().tokenizer.decode(ids[8:])
        assert answer.seconds > 0
    assert peer_answer(random_model, "transformers").passes == 24
    assert peer_answer(random_model, "transformers-lookup-10").passes < 24


def test_peers_load_their_own_copy_in_the_asked_dtype(tiny_model: Path) -> None:
    from paceline.models import resolve

    llm = FakeLLM()
    llm.source = resolve(tiny_model)  # type: ignore[assignment]
    assert peers.load([], llm, SETTINGS) == []
    one, two = peers.load(["transformers", "transformers-lookup-10"], llm, replace(SETTINGS, load={"dtype": "float32"}))
    assert one.model is two.model
    assert one.answer([5, 6, 7, 5, 6], seed=0).token_ids == two.answer([5, 6, 7, 5, 6], seed=0).token_ids


def test_peers_sample_by_seed_and_leave_the_global_generator_alone(random_model: Any) -> None:
    import torch

    before = torch.get_rng_state()
    one = peer_answer(random_model, "transformers", temperature=1.0)
    assert one.token_ids == peer_answer(random_model, "transformers", temperature=1.0).token_ids
    assert one.token_ids != peer_answer(random_model, "transformers").token_ids
    assert torch.equal(torch.get_rng_state(), before)


def test_peers_stop_at_any_end_id(random_model: Any) -> None:
    whole = peer_answer(random_model, "transformers").token_ids
    random_model.generation_config.eos_token_id = [whole[5]]
    try:
        assert {len(peer_answer(random_model, name).token_ids) for name in peers.PEERS} == {whole.index(whole[5]) + 1}
    finally:
        random_model.generation_config.eos_token_id = [3, 4]


def test_peers_in_a_run_give_speeds_and_passes_only(random_model: Any) -> None:
    settings = replace(SETTINGS, peers=("transformers",), prompts=("a",), repeats=1)
    llm = FakeLLM("abcdef")
    llm.chat_ids = lambda messages: [5, 6, 7]  # type: ignore[method-assign,assignment]
    ours = [Method(llm, name, config, settings, llm.clock) for name, config in METHODS.items()]
    peer = Peer("transformers", random_model, llm.tokenizer, settings)
    records, _ = measure([*ours, peer], PROMPTS[:1], settings, llm.chat_ids)
    run = summarise(records, settings, {"weight_bytes": 1})["runs"][-1]
    assert run["method"] == "transformers"
    assert (run["target_passes"], run["mean_acceptance_length"]) == (6, 1.0)
    assert run["gigabytes_per_second"] is None
    assert run["outputs_identical"] is False
    assert run["note"] == "peers' forwards round differently"


def test_sampling_peers_are_not_held_to_the_same_text() -> None:
    settings = replace(SETTINGS, peers=("transformers",), temperature=1.0, repeats=1)
    records = [record(name, p, 5, 1.0) for name in ("none", "ngram", "transformers") for p in "ab"]
    runs = summarise(records, settings, {})["runs"]
    assert [run["outputs_identical"] for run in runs] == [True, True, None]
