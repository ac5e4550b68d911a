"""The command line: what it prints where, its exit codes, and what a reader sees of speculation."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import ByteTokenizer, FakeLLM
from rich.console import Console
from typer.testing import CliRunner, Result

from paceline import errors, options, progress, show
from paceline.bench.measure import Watched
from paceline.cli import app
from paceline.output import Piece, RequestOutput, Stats


class Loaded:
    """Stands where ``paceline.llm`` is, and remembers how the model was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm = FakeLLM()
        self.asked: tuple[Any, ...] = ()
        self.params: Any = None
        module = ModuleType("paceline.llm")
        module.LLM = self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "paceline.llm", module)

    def __call__(self, model: str, speculative_config: Any = "default", **choices: Any) -> FakeLLM:
        self.asked = (model, speculative_config, choices)
        whole = self.llm.stream

        def stream(prompt: Any, params: Any, **rest: Any) -> Any:
            self.params = params
            return whole(prompt, params, **rest)

        self.llm.stream = stream  # type: ignore[method-assign]
        return self.llm


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    return Loaded(monkeypatch)


def paceline(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate_streams_the_text_and_nothing_else(loaded: Loaded) -> None:
    result = paceline("generate", "m", "hello")
    assert result.exit_code == 0
    assert result.stdout == "one two three four five six\n"
    assert "loading m" in result.stderr


def test_generate_json_is_the_documented_object(loaded: Loaded) -> None:
    result = paceline("generate", "m", "hello", "--json", "--max-tokens", "4", "--seed", "5")
    answer = json.loads(result.stdout)
    assert list(answer) == ["text", "token_ids", "finish_reason", "stop_reason", "usage", "seed", "stats"]
    assert answer["text"] == "one "
    assert answer["token_ids"] == list(b"one ")
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4}
    assert answer["seed"] == 5
    assert answer["stats"]["num_target_passes"] == 2
    assert result.stdout.count("\n") == 1


def test_prompt_from_standard_input_and_from_a_file(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("read me\n")
    answer = json.loads(paceline("generate", "m", "-", "--json", stdin="six by").stdout)
    assert answer["usage"]["prompt_tokens"] == 6
    answer = json.loads(paceline("generate", "m", f"@{tmp_path}/p.txt", "--json").stdout)
    assert answer["usage"]["prompt_tokens"] == 8  # a raw prompt keeps its last line break
    answer = json.loads(paceline("generate", "m", f"@{tmp_path}/p.txt", "--json", "--chat").stdout)
    assert answer["usage"]["prompt_tokens"] == 7


def test_options_reach_the_library_under_the_same_names(loaded: Loaded) -> None:
    paceline(
        "generate", "m", "x", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1",
        "--presence-penalty", "0.1", "--frequency-penalty", "0.2", "--repetition-penalty", "1.1",
        "--logit-bias", "12=-5", "--logit-bias", '{"13": 2}', "--stop-token-ids", "1,2", "--stop-token-ids", "3",
        "--max-tokens", "9", "--seed", "4", "--method", "ngram", "--num-draft-tokens", "8", "--prompt-lookup-max", "4",
        "--speculative-config", '{"prompt_lookup_max": 3, "prompt_lookup_min": 2}',
        "--dtype", "float32", "--threads", "2", "--max-model-len", "64", "--device", "cpu",
    )  # fmt: skip
    params, expected = loaded.params, {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "logit_bias": {12: -5.0, 13: 2.0}, "stop_token_ids": [1, 2, 3], "max_tokens": 9,
        "seed": 4,
    }  # fmt: skip
    got = {name: getattr(params, name) for name in expected}
    got["stop_token_ids"] = list(got["stop_token_ids"])
    assert got == expected
    model, config, choices = loaded.asked
    assert model == "m"
    assert config == {"method": "ngram", "num_draft_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert choices == {"dtype": "float32", "threads": 2, "max_model_len": 64, "device": "cpu"}


def test_further_sampling_options_reach_the_library(loaded: Loaded) -> None:
    result = paceline(
        "generate", "m", "x", "-n", "2", "--json", "--stop", r"\n\tend\\n", "--stop", "fin", "--bad-words", "no",
        "--bad-words", r"a\n", "--allowed-token-ids", "1,2", "--allowed-token-ids", "3", "--ignore-eos",
        "--include-stop-str-in-output", "--min-tokens", "2", "--no-repeat-ngram-size", "3", "--logprobs", "2",
        "--prompt-logprobs", "0", "--no-skip-special-tokens",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    params, expected = loaded.llm.params[0], {
        "n": 2, "stop": ["\n\tend\\n", "fin"], "bad_words": ["no", r"a\n"], "allowed_token_ids": [1, 2, 3],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2, "no_repeat_ngram_size": 3,
        "logprobs": 2, "prompt_logprobs": 0, "skip_special_tokens": False,
    }  # fmt: skip
    got = {name: getattr(params, name) for name in expected}
    for name in ("stop", "bad_words"):
        got[name] = list(got[name])
    got["allowed_token_ids"] = sorted(got["allowed_token_ids"])
    assert got == expected


def test_a_draft_model_and_how_the_model_runs(loaded: Loaded) -> None:
    paceline(
        "generate", "m", "x", "--method", "draft_model", "--draft-model", "small", "--tree-top-k", "2",
        "--tree-depth", "3", "--max-num-seqs", "4", "--no-reuse-prefix",
    )  # fmt: skip
    model, config, choices = loaded.asked
    assert model == "m"
    assert config == {"method": "draft_model", "model": "small", "tree_top_k": 2, "tree_depth": 3}
    assert choices == {"max_num_seqs": 4, "reuse_prefix": False}


def test_every_setting_has_an_option_but_the_one_that_is_code() -> None:
    from paceline.draft import SpeculativeConfig
    from paceline.sampling import SamplingParams

    assert {field.name for field in fields(SamplingParams)} - set(options.SAMPLING) == {"logits_processors"}
    keys = {"model" if name == "draft_model" else name for name in options.SPECULATION}
    assert {field.name for field in fields(SpeculativeConfig) if field.init} == keys - {"speculative_config"}


def test_samples_are_printed_under_headings(loaded: Loaded) -> None:
    result = paceline("generate", "m", "x", "-n", "2")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.strip("─ ") for line in lines] == [
        "sample 1 of 2", "one two three four five six", "sample 2 of 2", "one two three four five six (2)",
    ]  # fmt: skip


def test_samples_and_log_probabilities_as_json(loaded: Loaded) -> None:
    loaded.llm.answer = "é"
    result = paceline("generate", "m", "xy", "-n", "2", "--json", "--logprobs", "1", "--prompt-logprobs", "0")
    answer = json.loads(result.stdout, parse_constant=pytest.fail)  # no NaN and no Infinity: they are not JSON
    assert [sample["text"] for sample in answer["samples"]] == ["é", "é (2)"]
    assert answer["samples"][0]["token_ids"] == answer["token_ids"] == [0xC3, 0xA9]
    assert answer["logprobs"] == [
        [
            {"id": 0xC3, "token": "\ufffd", "logprob": -0.5, "rank": 1},
            {"id": 7, "token": "\a", "logprob": None, "rank": 2},
        ],
        [
            {"id": 0xA9, "token": "\ufffd", "logprob": -0.5, "rank": 1},
            {"id": 7, "token": "\a", "logprob": None, "rank": 2},
        ],
    ]
    assert len(answer["samples"][1]["logprobs"]) == len(answer["samples"][1]["token_ids"])
    assert answer["prompt_logprobs"] == [None, [{"id": ord("y"), "token": "y", "logprob": -2.0, "rank": 3}]]
    assert "prompt_logprobs" not in answer["samples"][0]
    alone = json.loads(paceline("generate", "m", "xy", "--json").stdout)
    assert not {"samples", "logprobs", "prompt_logprobs", "error"} & set(alone)


def test_the_model_may_give_the_sampling_values(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.sampling import SamplingParams

    def from_model(cls: Any, llm: Any, **given: Any) -> Any:
        assert llm is loaded.llm
        return cls(**{"temperature": 0.25, "top_k": 9} | given)

    monkeypatch.setattr(SamplingParams, "from_model", classmethod(from_model), raising=False)
    result = paceline("generate", "m", "x", "--from-model", "--top-k", "3")
    assert result.exit_code == 0, result.stderr
    assert (loaded.params.temperature, loaded.params.top_k) == (0.25, 3)


# -- many prompts ------------------------------------------------------------------------------------------------------


def test_a_file_of_prompts_is_answered_line_by_line(loaded: Loaded, tmp_path: Path) -> None:
    rows = [{"prompt": "abc "}, {"id": 7, "messages": [{"role": "user", "content": "de"}]}, {"prompt": "bad"}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    loaded.llm.errors["bad"] = "the law is NaN at position 7"
    result = paceline("generate", "m", "--prompts", str(path), "--json")
    assert result.exit_code == 1
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [4, 2, 3]
    assert [answer.get("id") for answer in answers] == [None, 7, None]
    assert [answer.get("error") for answer in answers] == [None, None, "the law is NaN at position 7"]
    assert [answer["finish_reason"] for answer in answers] == ["stop", "stop", "error"]
    assert "1 of 3 prompts failed" in result.stderr
    assert loaded.llm.progress == [True]
    loaded.llm.errors.clear()
    chat = paceline("generate", "m", "--prompts", str(path), "--json", "--chat")
    assert chat.exit_code == 0
    assert json.loads(chat.stdout.splitlines()[0])["usage"]["prompt_tokens"] == 3  # as one message, without the blank


def test_a_text_file_has_a_prompt_on_each_line(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"first\r\n\nbad\nthird")
    loaded.llm.errors["bad"] = "no room"
    result = paceline("generate", "m", "--prompts", str(tmp_path / "p.txt"), "-n", "2", "--max-tokens", "3")
    assert result.exit_code == 1
    lines = [line.strip("─ ") for line in result.stdout.splitlines()]
    assert lines[:5] == ["prompt 1, sample 1 of 2", "one", "prompt 1, sample 2 of 2", "one", "prompt 2, sample 1 of 2"]
    assert "paceline: prompt 2, sample 1 of 2: no room" in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "p.jsonl:2: not JSON"),
        ("3", "p.jsonl:2: an object with either 'prompt' or 'messages' is needed"),
        ('{"prompt": "a", "messages": []}', "p.jsonl:2: an object with either"),
        ('{"prompt": ""}', "p.jsonl:2: 'prompt' must be a text that is not empty"),
        ('{"messages": ["hello"]}', "p.jsonl:2: 'messages' must be a list of objects"),
        ('{"prompt": "a", "temperature": 0}', "p.jsonl:2: 'temperature' is no key of a prompt"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_loaded(loaded: Loaded, tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    result = paceline("generate", "m", "--prompts", str(tmp_path / "p.jsonl"))
    assert result.exit_code == 2
    assert words in result.stderr
    assert loaded.asked == ()


def test_options_not_given_are_not_passed_on(loaded: Loaded) -> None:
    paceline("generate", "m", "x")
    assert loaded.asked == ("m", "default", {})


def test_every_sampling_option_is_a_sampling_parameter() -> None:
    from paceline.sampling import SamplingParams

    assert set(options.SAMPLING) <= {field.name for field in fields(SamplingParams)}


def test_show_prints_the_text_and_the_step_table(loaded: Loaded) -> None:
    loaded.llm.answer = "abcdefgh"
    result = paceline("generate", "m", "x", "--show")
    assert result.exit_code == 0
    assert result.stdout.startswith("abcdefgh\n")
    assert "8 in 3 target passes, 3.00 tokens per pass" in " ".join(result.stdout.split())
    assert "method auto" in " ".join(result.stdout.split())
    assert "6 drafted, 6 accepted (100%)" in result.stdout
    assert "\x1b" not in result.stdout  # no colours in a pipe
    assert "not guessed" not in result.stdout  # and so no legend


def test_compare_runs_both_with_one_seed_and_finds_them_identical(loaded: Loaded) -> None:
    result = paceline("generate", "m", "x", "--compare", "--temperature", "1")
    assert result.exit_code == 0
    assert [method for method, _ in loaded.llm.requests] == ["auto", "none", "auto"]  # the first warms up
    assert loaded.llm.requests[1:] == [("none", None), ("auto", 77)]
    assert "Identical: 27 of 27 token ids, seed 77." in result.stdout
    assert result.stdout.count("one two three four five six\n") == 2


def test_compare_fails_where_the_promise_of_equal_text_is_broken(loaded: Loaded) -> None:
    loaded.llm.answers = {"none": "abcdef", "auto": "abcxef"}
    result = paceline("generate", "m", "x", "--compare", "--temperature", "1")
    assert result.exit_code == 1
    text = " ".join(result.stdout.replace("│", " ").split())
    assert "The first 3 ids agree; then plain has 'd' (id 100), the other has 'x' (id 120); seed 77." in text
    assert "the texts differ" in text


def test_compare_allows_other_text_under_a_rule_that_keeps_the_law_only(loaded: Loaded) -> None:
    loaded.llm.answers = {"none": "abc", "auto": "abd"}
    sampled = ["generate", "m", "x", "--compare", "--rejection-sample-method", "block", "--temperature"]
    assert paceline(*sampled, "1").exit_code == 0
    assert paceline(*sampled, "0").exit_code == 1


def test_an_error_of_the_request_is_told(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loaded.llm.stream

    def broken(*args: Any, **rest: Any) -> Any:
        stream = whole(*args, **rest)
        stream._output.finish_reason, stream._output.error = "error", "the law is NaN at position 7"
        return stream

    monkeypatch.setattr(loaded.llm, "stream", broken)
    for flags in ([], ["--json"], ["--show"]):
        result = paceline("generate", "m", "x", *flags)
        assert result.exit_code == 1
        assert "paceline: the law is NaN at position 7" in result.stderr


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "m", "x", "--temprature", "1"], "No such option: --temprature; did you mean --temperature?"),
        (["genrate", "m"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["generate", "m"], "Missing argument 'PROMPT'; see"),
        (["generate", "m", "x", "--top-k", "few"], "Invalid value for '--top-k'"),
        (["generate", "m", "x", "--prompts", "p.txt"], "PROMPT and --prompts were both given"),
        (["generate", "m", "--prompts", "p.csv"], "FILE.jsonl, an object a line, or FILE.txt"),
        (["generate", "m", "--prompts", "none.txt"], "cannot read the prompts of 'none.txt': No such file"),
        (["generate", "m", "--prompts", "p.txt", "--show"], "--show and --compare follow one text"),
        (["generate", "m", "x", "-n", "2", "--compare"], "--show and --compare follow one text"),
        (["generate", "m", "x", "--logprobs", "2"], "--logprobs is printed as JSON only; add --json"),
        (["generate", "m", "x", "--allowed-token-ids", "a"], "--allowed-token-ids needs whole numbers, not 'a'"),
        (
            ["bench", "m", "--draft-model", "small"],
            "model given, but no method uses it; add draft_model, eagle",
        ),
        (["bench", "m", "--method", "ngram"], "No such option: --method"),
        (["generate", "m", "x", "--json", "--show"], "--json prints one object and nothing else"),
        (["generate", "m", "@no-such-file"], "cannot read the prompt file 'no-such-file': No such file"),
        (["generate", "m", "x", "--logit-bias", "5"], "--logit-bias '5' is neither ID=VALUE"),
        (["generate", "m", "x", "--stop-token-ids", "a"], "--stop-token-ids needs whole numbers, not 'a'"),
        (["generate", "m", "x", "--speculative-config", "{"], "--speculative-config '{' is not JSON"),
        (["generate", "m", "x", "--speculative-config", "3"], "--speculative-config needs a JSON object, not '3'"),
        (["generate", "m", "x", "--compare", "--method", "none"], "--compare holds a method against plain decoding"),
        (["bench", "m", "--peers", "transfomers"], "unknown peer 'transfomers'; did you mean 'transformers'?"),
        (["bench", "m", "--set", "humanevl"], "unknown prompt set 'humanevl'; did you mean 'humaneval'?"),
        (["bench", "m", "--json", "no/such/folder/x.json"], "there is no folder"),
        (["bench"], "Missing argument 'MODEL'"),
        (["bench", "compare", "a.json"], "Missing argument 'B'"),
    ],
)
def test_wrong_use_is_told_in_a_line_or_two(arguments: list[str], words: str) -> None:
    result = paceline(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("paceline: ")
    assert words in result.stderr
    assert result.stderr.count("\n") <= 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BadRequest("b"), 2),
        (errors.ModelNotFound("m"), 2),
        (errors.UnsupportedModel("u"), 2),
        (errors.CorruptWeights("c"), 1),
        (errors.CacheFull("f"), 1),
        (RuntimeError("a bug"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(loaded.llm, "stream", fail)
    result = paceline("generate", "m", "x")
    assert result.exit_code == code
    assert "Traceback" not in result.stderr
    if isinstance(error, RuntimeError):
        assert "unexpected RuntimeError: a bug" in result.stderr
        assert "--debug" in result.stderr


def test_debug_lets_the_error_through(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise errors.CacheFull("no room")

    monkeypatch.setattr(loaded.llm, "stream", fail)
    assert isinstance(paceline("generate", "m", "x", "--debug").exception, errors.CacheFull)


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from paceline.cli import main
sys.argv = ["paceline", "--help"]
try:
    main()
finally:
    heavy = {"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules)
    assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for command in ("pull", "generate", "chat", "bench"):
        assert command in result.stdout


def test_module_runs_as_a_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "paceline", "generate", "--nonsense"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "No such option: --nonsense" in result.stderr


def test_help_without_arguments() -> None:
    result = paceline()
    assert result.exit_code == 2
    assert "generate" in result.stdout + result.stderr


def test_only_the_commands_of_this_version_are_there() -> None:
    text = paceline("--help").stdout
    assert not [name for name in ("serve",) if f" {name} " in text]


def test_pull_prints_the_path_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("paceline.models")
    module.pull = lambda name: tmp_path / name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.models", module)
    import paceline as package

    monkeypatch.setattr(package, "models", module, raising=False)
    assert paceline("pull", "small").stdout.splitlines()[-1] == str(tmp_path / "small")


# -- bench -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"question {i}"}) + "\n" for i in range(4)))
    return path


def test_bench_ends_with_json_and_writes_the_same(loaded: Loaded, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    result = paceline("bench", "m", "--prompts", str(questions), "--num-prompts", "2", "--json", str(out))
    assert result.exit_code == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert last == json.loads(out.read_text())
    assert [run["method"] for run in last["runs"]] == ["none", "ngram"]
    assert last["settings"]["prompts"] == ["q0", "q2"]  # spread over the file
    assert last["settings"]["temperature"] == 0.0
    assert last["environment"]["resumed_records"] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.jsonl", "r.json"]
    assert "m on" in result.stdout.splitlines()[0]


def test_bench_passes_options_to_methods_but_not_to_none(loaded: Loaded, questions: Path) -> None:
    result = paceline("bench", "m", "--prompts", str(questions), "--methods", "ngram", "--prompt-lookup-max", "3")
    settings = json.loads(result.stdout.splitlines()[-1])["settings"]
    assert settings["methods"] == {"none": {"method": "none"}, "ngram": {"method": "ngram", "prompt_lookup_max": 3}}


def test_bench_gives_the_draft_model_to_its_method_alone(loaded: Loaded, questions: Path) -> None:
    loaded.llm.seconds["draft_model"] = 1.0
    result = paceline(
        "bench", "m", "--prompts", str(questions), "--methods", "ngram,draft_model", "--draft-model", "small",
        "--tree-top-k", "2", "--num-draft-tokens", "8",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["settings"]["methods"] == {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "num_draft_tokens": 8},
        "draft_model": {"method": "draft_model", "num_draft_tokens": 8, "model": "small", "tree_top_k": 2},
    }


def test_bench_and_compare_let_every_run_read_its_prompt(loaded: Loaded, questions: Path) -> None:
    paceline("bench", "m", "--prompts", str(questions))
    assert loaded.asked[2] == {"reuse_prefix": False}
    paceline("generate", "m", "x", "--compare", "--min-tokens", "12")
    assert loaded.asked[2] == {"reuse_prefix": False}
    assert [(params.min_tokens, params.max_tokens) for params in loaded.llm.params[-3:]] == [
        (8, 8),
        (12, None),
        (12, None),
    ]


def test_bench_goes_on_after_an_interruption(
    loaded: Loaded, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loaded.llm.stream

    def interrupted(*args: Any, **rest: Any) -> Any:
        if len(loaded.llm.requests) == 7:
            raise KeyboardInterrupt
        return whole(*args, **rest)

    arguments = ["bench", "m", "--prompts", str(questions), "--json", str(tmp_path / "r.json"), "--warmup", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(loaded.llm, "stream", interrupted)
        assert paceline(*arguments).exit_code == 130
    assert not (tmp_path / "r.json").exists()
    refused = paceline(*arguments, "--max-tokens", "5")
    assert refused.exit_code == 2
    assert "settings.max_tokens was 128, now 5" in refused.stderr
    result = json.loads(paceline(*arguments).stdout.splitlines()[-1])
    assert result["environment"]["resumed_records"] == 6
    assert len(loaded.llm.requests) == 7 + 10
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_bench_compare(loaded: Loaded, questions: Path, tmp_path: Path) -> None:
    for name in "ab":
        loaded.llm = FakeLLM()
        paceline("bench", "m", "--prompts", str(questions), "--json", str(tmp_path / f"{name}.json"))
    result = paceline("bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert result.exit_code == 0, result.stderr
    assert sum(line.startswith("ngram ") for line in result.stdout.splitlines()) == 2  # its speed and its speed-up


def test_bench_refuses_prompts_that_fill_the_context_before_it_starts(loaded: Loaded, questions: Path) -> None:
    loaded.llm.max_model_len = 20
    result = paceline("bench", "m", "--prompts", str(questions), "--max-tokens", "11")
    assert result.exit_code == 2
    assert "prompt q0 and its answers may take 21 tokens, the context holds 20" in result.stderr
    assert loaded.llm.requests == []


def test_prompts_need_ids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n')
    result = paceline("bench", "m", "--prompts", str(tmp_path / "q.jsonl"))
    assert result.exit_code == 2
    assert "uses an id twice" in result.stderr


# -- on a real, tiny model ---------------------------------------------------------------------------------------------


def test_compare_on_a_model(tiny_model: Path) -> None:
    result = paceline("generate", str(tiny_model), "def add(a, b):", "--compare", "--max-tokens", "24", "--seed", "1")
    assert result.exit_code == 0, result.stderr
    assert "Identical: 24 of 24 token ids, seed 1." in result.stdout


def test_bench_on_a_model_with_peers(tiny_model: Path, questions: Path) -> None:
    result = paceline(
        "bench", str(tiny_model), "--prompts", str(questions), "--num-prompts", "2", "--max-tokens", "8",
        "--peers", "transformers,transformers-lookup-10", "--repeats", "1", "--dtype", "float32", "--warmup", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout.splitlines()[-1])["runs"]
    assert [run["method"] for run in runs] == ["none", "ngram", "transformers", "transformers-lookup-10"]
    assert {run["tokens"] for run in runs} == {16}
    assert all(run["outputs_identical"] for run in runs)


def test_settings_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    for command in (
        ["generate", str(tmp_path), "x", "--method", "ngrm"],
        ["bench", str(tmp_path), "--methods", "ngrm"],
    ):
        result = paceline(*command)
        assert result.exit_code == 2
        assert "no method 'ngrm'; did you mean 'ngram'?" in result.stderr


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_counts_what_it_is_told_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 10.0, 30.0, 32.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress.meter("generating", 500, True, unit="prompts") as tick:
        for done in (12, 100, 125, 400, 500):
            tick(done)
    assert capsys.readouterr().err.splitlines() == [
        "paceline: generating: 12 of 500 prompts, about 407 s left",  # 10 s / 12 * 488
        "paceline: generating: 125 of 500 prompts, about 90 s left",  # 30 s / 125 * 375
        "paceline: generating: 400 of 500 prompts, about 8 s left",
        "paceline: generating: 500 of 500 prompts",
    ]


def test_progress_counts_bytes_from_where_a_download_was_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 5.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress.meter("fetching", 2000, True) as tick:
        for done in (1000, 1500, 2000):
            tick(done)
    assert capsys.readouterr().err.splitlines() == [
        "paceline: fetching: 1 kB of 2 kB",
        "paceline: fetching: 2 kB of 2 kB, about 5 s left",
        "paceline: fetching: 2 kB of 2 kB",
    ]


# -- colours -----------------------------------------------------------------------------------------------------------


def coloured(*pieces: Piece) -> list[tuple[str, str]]:
    colours = show.Colours(ByteTokenizer())
    return [segment for piece in pieces for segment in colours.feed(piece)]


def piece(text: str, flags: str, ids: bytes | None = None) -> Piece:
    """A piece whose flags are spelled ``d`` for drafted and ``.`` for the target's own."""
    return Piece(text, list(text.encode() if ids is None else ids), [flag == "d" for flag in flags])


def test_kinds_of_tokens() -> None:
    assert coloured(piece("a", "."), piece("bcd", "dd."), piece("e", ".")) == [
        ("a", "plain"),
        ("bc", "accepted"),
        ("d", "corrected"),
        ("e", "plain"),
    ]


def test_a_rejected_draft_is_told_from_none() -> None:
    colours = show.Colours(ByteTokenizer())
    assert colours.feed(piece("a", "."), tested=True) == [("a", "corrected")]
    assert colours.feed(piece("b", "."), tested=False) == [("b", "plain")]


def test_a_draft_may_end_in_one_piece_and_its_correction_come_in_the_next() -> None:
    assert coloured(piece("ab", "dd"), piece("c", ".")) == [("ab", "accepted"), ("c", "corrected")]


def test_a_character_split_over_ids_takes_the_colour_of_its_last() -> None:
    assert coloured(piece("né", "..d")) == [("n", "plain"), ("é", "accepted")]


def test_a_character_split_over_pieces_is_printed_once() -> None:
    euro = "€".encode()
    assert coloured(
        Piece("", list(euro[:1]), [False]),
        Piece("", list(euro[1:2]), [True]),
        Piece("€!", [euro[2], 33], [True, False]),
    ) == [("€", "accepted"), ("!", "corrected")]


def test_the_stream_decides_what_is_printed_whatever_the_ids_say() -> None:
    # A stop string cuts text whose ids were emitted, and a final flush may spell out broken bytes.
    assert coloured(piece("ab", "d.", b"abcd")) == [("a", "accepted"), ("b", "corrected")]
    assert "".join(text for text, _ in coloured(Piece("", [0xE2], [False]), Piece("\ufffd", [], []))) == "\ufffd"


def terminal(width: int = 20, **options: Any) -> Console:
    return Console(width=width, force_terminal=True, record=True, file=open("/dev/null", "w"), _environ={}, **options)


def flowed(*parts: str, width: int = 20) -> str:
    console = terminal(width)
    flow = show.Flow(console)
    for part in parts:
        flow.put(part)
    flow.close()
    return console.export_text(styles=False)


def test_lines_break_between_words_on_a_terminal() -> None:
    assert flowed("one two thr", "ee four fi", "ve six") == "one two three four \nfive six\n"


def test_line_breaks_of_the_text_stay() -> None:
    assert flowed("def f():\n    return 1\n") == "def f():\n    return 1\n"


def test_wide_characters_count_twice() -> None:
    assert flowed("日本語日本語", width=8) == "日本語日\n本語\n"


def test_a_model_cannot_steer_the_terminal() -> None:
    assert show.visible("a\x1b[2Jb\tc\n\x9b") == "a␛[2Jb\tc\n?"
    assert "\x1b[2J" not in flowed("a\x1b[2Jb")


def test_text_passes_unchanged_where_there_is_no_terminal() -> None:
    console = Console(width=10, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    flow = show.Flow(console)
    flow.put("a long line of words, wider than ten")
    flow.close()
    assert console.export_text() == "a long line of words, wider than ten\n"


def test_tokens_per_pass() -> None:
    assert show.tokens_per_pass([False, True, True, False, False, True]) == [1, 3, 1, 1]
    assert show.tokens_per_pass([]) == []


def watched() -> Watched:
    stats = Stats()
    for drafted, accepted in [(16, 16), (16, 3), (4, 0), (0, 0)]:
        stats.record(drafted, drafted, accepted)
    stats.time |= {"prefill": 1.0, "draft": 0.1, "target": 6.0, "verify": 0.4, "other": 0.0}
    flags = [True] * 16 + [False] + [True] * 3 + [False, False, False]
    output = RequestOutput([1] * 9, "", [7] * 23, "length", from_draft=flags, stats=stats)
    return Watched(output, 8.0, 1.5)


@pytest.mark.parametrize("console", [terminal(80), terminal(80, no_color=True)])
def test_step_table_fits_80_columns_and_adds_up(console: Console) -> None:
    console.print(show.step_table(watched(), console), show.legend(console))
    text = console.export_text(styles=False)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = " ".join(text.split())
    assert "23 in 4 target passes, 5.75 tokens per pass" in words
    assert "ended by the limit of its length" in words
    assert "2.9 tokens/s, 3.3 once the prompt was read (9 tokens)" in words
    assert "36 drafted, 19 accepted (53%)" in words
    assert "2 accepted guesses, 1 rejected all, 1 had none to test" in words
    assert "prefill 12% draft 1% target 75% verify 5% other 6%" in words
    assert "█▂▁▁" in words
    assert ("not guessed" in words) is not console.no_color


def test_acceptance_rows_hold_both_readings() -> None:
    console = terminal(80)
    console.print(show.acceptance(watched().output.stats, console))
    rows = {line.split()[0]: line.split() for line in console.export_text().splitlines()[1:]}
    assert list(rows) == ["1", "2", "3", "4", "5", "6", "7", "8", "10", "12", "16"]
    assert (rows["4"][1], rows["4"][3], rows["4"][-1]) == ("3", "0.33", "0.50")


@pytest.mark.parametrize(
    ("parted", "speedup", "accepted", "words"),
    [
        (None, 3.7, 9, "same text, 3.7x the speed"),
        (None, 1.01, 9, "same text, 1.01x: no help on this prompt"),
        (None, 1.2, 0, "same text, 1.20x: no help on this prompt"),
        (3, 3.7, 9, "the texts differ"),
    ],
)
def test_headline(parted: int | None, speedup: float, accepted: int, words: str) -> None:
    assert show.headline(parted, speedup, accepted).plain.strip() == words


@pytest.mark.parametrize(
    ("reason", "stop", "error", "words"),
    [
        ("stop", None, None, "by its own end"),
        ("stop", "END", None, "by the stop 'END'"),
        ("stop", 7, None, "by the stop 7"),
        ("length", None, None, "by the limit of its length"),
        ("abort", None, None, "by being stopped"),
        ("error", None, "the law is NaN", "the law is NaN"),
    ],
)
def test_why_a_text_ended(reason: Any, stop: Any, error: str | None, words: str) -> None:
    assert show.ending(RequestOutput([1], "", [7], reason, stop_reason=stop, error=error)) == words


def test_plain_decoding_has_a_short_table() -> None:
    run = watched()
    run.output.stats = Stats(num_target_passes=23)
    console = terminal(80)
    console.print(show.step_table(run, console))
    assert "none were made" in console.export_text()


def test_a_console_without_unicode_gets_plain_characters() -> None:
    console = Console(width=80, file=open("/dev/null", "w", encoding="ascii"), record=True)  # noqa: SIM115
    console.print(show.step_table(watched(), console))
    assert console.export_text().isascii()


# -- certify -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules that hold drafters, good and bad, and a file of prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = {
        "fine": "from paceline.draft.ngram import Ngram\nnumber = 3\nready = Ngram(2)\n",
        "raising": "class Picky:\n    def __init__(self):\n        raise OSError('no weights here')\n",
        "needy": "from paceline.draft.ngram import Ngram\nclass Needy(Ngram):\n    def __init__(self, size): pass\n",
        "torn": "def half(:\n",
        "failing": "1 / 0\n",
    }
    for name, text in modules.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)
    rows = [{"id": "sum", "prompt": "def add(a, b):"}, {"id": "fox", "prompt": "the quick brown fox jumps"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    return tmp_path


NGRAM = ["--method", "ngram"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*NGRAM, "--quick", "--full"], "--quick and --full were both given; leave one out"),
        ([], "one method is needed: --method NAME, --draft-model MODEL, or --plugin MODULE:CLASS"),
        ([*NGRAM, "--plugin", "fine:Ngram"], "one method is needed"),
        (["--draft-model", "small", "--plugin", "fine:Ngram"], "one method is needed"),
        ([*NGRAM, "--json", "no/such/c.json"], "no/such/c.json: there is no folder"),
        ([*NGRAM, "--html", "no/such/c.html"], "no/such/c.html: there is no folder"),
        (["--plugin", "fine"], "--plugin 'fine': MODULE:CLASS is needed, such as my_drafters:LastSuccessor"),
        (["--plugin", "absent_module:Drafter"], "--plugin 'absent_module:Drafter': No module named 'absent_module'"),
        (["--plugin", "fine:Absent"], "--plugin 'fine:Absent': module 'fine' has no attribute 'Absent'"),
        (["--plugin", "fine:number"], "--plugin 'fine:number' gives int; a paceline.Drafter is needed"),
        (["--plugin", "pathlib:Path"], "a paceline.Drafter is needed"),
        (["--plugin", "raising:Picky"], "--plugin 'raising:Picky': Picky() raised OSError: no weights here"),
        (["--plugin", "needy:Needy"], "give a class that is made without arguments, or an instance"),
        (["--plugin", "torn:Half"], "--plugin 'torn:Half': importing torn raised SyntaxError"),
        (["--plugin", "failing:Half"], "--plugin 'failing:Half': importing failing raised ZeroDivisionError"),
        ([*NGRAM, "--prompts", "absent.jsonl"], "no prompt file 'absent.jsonl'"),
        ([*NGRAM, "--prompts", "bad.jsonl"], "bad.jsonl:2: needs exactly one of 'prompt', 'messages' or 'turns'"),
        ([*NGRAM, "--promts", "p.jsonl"], "No such option: --promts; did you mean --prompts?"),
    ],
)
def test_certify_refuses_wrong_use_before_it_loads(
    loaded: Loaded, workplace: Path, arguments: list[str], words: str
) -> None:
    result = paceline("certify", "m", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("paceline: ")
    assert words in result.stderr
    assert result.stderr.count("\n") <= 2
    assert "Traceback" not in result.stderr
    assert loaded.asked == ()


@pytest.mark.parametrize("spelling", ["fine:Ngram", "fine:ready"])
def test_a_plugin_is_a_class_or_an_instance_from_this_folder(workplace: Path, spelling: str) -> None:
    from paceline.draft.ngram import Ngram

    assert isinstance(options.plugin(spelling), Ngram)


def test_certify_explains_itself() -> None:
    result = paceline("certify", "--help")
    assert result.exit_code == 0
    text = " ".join(result.stdout.replace("│", " ").split())
    for word in ("--method", "--draft-model", "--plugin", "--quick", "--full", "--prompts", "--json", "--html"):
        assert word in text
    assert "Exit 1 if it is not." in text
    assert "certify" in paceline("--help").stdout


@pytest.fixture
def small_certify(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certification that does little, and takes the proofs on small targets on trust."""
    from paceline.certify import run
    from paceline.testing import Report

    for mode in run.SIZES:
        monkeypatch.setitem(run.SIZES, mode, run.Size(2, 8, 8, 1, 2))
    monkeypatch.setattr(run, "check_rule", lambda *_, **__: Report("rule"))
    monkeypatch.setattr(run, "check_drafter", lambda *_, **__: Report("drafter"))


def certify_tiny(model: Path, *arguments: str) -> Result:
    return paceline("certify", str(model), "--dtype", "float64", "--threads", "1", *arguments)


def test_certify_prints_and_writes_what_it_found(small_certify: None, workplace: Path, tiny_model: Path) -> None:
    result = certify_tiny(
        tiny_model, *NGRAM, "--quick", "--prompts", "p.jsonl", "--json", "c.json", "--html", "c.html"
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("lossless: every check passed")
    assert "the page is in c.html" in result.stderr
    found = json.loads((workplace / "c.json").read_text(), parse_constant=pytest.fail)
    assert (found["verdict"], found["method"], found["mode"]) == ("lossless", "ngram", "quick")
    assert [one["name"] for one in found["layers"][2]["figures"]["prompts"]] == ["sum", "fox"]
    assert found["environment"]["dtype"] == "float64"
    page = (workplace / "c.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "lossless" in page
    assert [path.name for path in workplace.iterdir() if path.name.startswith(".c.")] == []  # nothing half written


@pytest.mark.parametrize(("flags", "mode"), [(["--quick"], "quick"), ([], "standard"), (["--full"], "full")])
def test_certify_modes_and_the_prompts_that_come_along(
    small_certify: None, workplace: Path, tiny_model: Path, flags: list[str], mode: str
) -> None:
    result = certify_tiny(tiny_model, "--plugin", "fine:ready", *flags, "--json", "c.json")
    assert result.exit_code == 0, result.stderr
    found = json.loads((workplace / "c.json").read_text())
    assert (found["mode"], found["method"]) == (mode, "fine:ready")
    code, question = [one["name"] for one in found["layers"][2]["figures"]["prompts"]]
    assert code.startswith("HumanEval")
    assert not question.startswith("HumanEval")


def test_certify_fails_where_there_is_a_bug(
    small_certify: None, workplace: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text with speculation is one token off from the third on."""
    from paceline.llm import LLM

    generate = LLM.generate

    def off(self: Any, prompts: Any, params: Any, *, speculative_config: Any) -> Any:
        outputs = generate(self, prompts, params, speculative_config=speculative_config)
        if speculative_config != {"method": "none"}:
            for output in outputs:
                output.token_ids[2:3] = [(token + 1) % 300 for token in output.token_ids[2:3]]
        return outputs

    monkeypatch.setattr(LLM, "generate", off)
    result = certify_tiny(tiny_model, *NGRAM, "--prompts", "p.jsonl", "--json", "c.json")
    assert result.exit_code == 1
    assert result.stdout.startswith("bug: speculation with ngram changes what")
    found = json.loads((workplace / "c.json").read_text())
    assert found["verdict"] == "bug"
    assert {one["verdict"] for one in found["layers"] if one["name"] in ("greedy", "sampled")} == {"bug"}
    assert found["parted"][0]["difference"]["index"] == 2


def test_certify_has_nothing_to_say_about_plain_decoding(workplace: Path, tiny_model: Path) -> None:
    for how in (["--method", "none"], [*NGRAM, "--num-speculative-tokens", "0"]):
        result = certify_tiny(tiny_model, *how, "--prompts", "p.jsonl", "--json", "c.json")
        assert result.exit_code == 2
        assert "plain decoding is what others are compared with; name a method" in result.stderr
        assert result.stdout == ""
        assert not (workplace / "c.json").exists()
