"""The command line: ``paceline pull``, ``generate`` and ``bench``.

Everything heavy is imported inside the commands, so that ``paceline --help`` answers at once.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from paceline import options
from paceline.bench.measure import Engine, forward_in_use
from paceline.bench.prompts import Prompt
from paceline.bench.records import Settings
from paceline.errors import BadRequest, IncompatibleDrafter, ModelNotFound, PacelineError, UnsupportedModel
from paceline.options import LOAD, Debug, Model, given, listed, speculation
from paceline.output import RequestOutput

DONE, FAILED, WRONG_USE = 0, 1, 2
Request = str | list[int]


class Commands(TyperGroup):
    """The commands, with every failure told in one or two lines on standard error and by the exit code."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Run one command line and exit: 0 done, 1 a check failed, 2 wrong use, 130 interrupted."""
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            code = super().main(arguments, *rest, **extra) or DONE
        except BrokenPipeError:  # the reader of our output left: nothing more to say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = FAILED
        except Exception as error:
            if "--debug" in arguments:
                raise
            code = told(error)
        sys.exit(code)


class Bench(TyperGroup):
    """``bench MODEL`` beside ``bench compare A B``: what is not the word compare goes to the measuring command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command that was meant."""
        return super().parse_args(ctx, args if args[:1] in (["compare"], ["run"]) else ["run", *args])


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    help="Lossless speculative decoding: the same text, sooner.",
)
bench_app = typer.Typer(cls=Bench, help="Measure methods side by side, or compare two results.")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """The ``paceline`` command."""
    app()


def told(error: Exception) -> int:
    """Say what went wrong and return the exit code."""
    usage = getattr(error, "format_message", None)  # what typer raises for a wrong option or argument
    if usage is not None:
        close = getattr(error, "possibilities", None)
        text = str(getattr(error, "message", "") if close else usage()).rstrip(".")
        if text:  # there is none where help was printed instead
            note(text + (f"; did you mean {close[0]}?" if close else "" if text.endswith("?") else help_hint(error)))
        return WRONG_USE
    if isinstance(error, PacelineError):
        note(str(error))
        wrong_use = isinstance(error, BadRequest | ModelNotFound | UnsupportedModel | IncompatibleDrafter)
        return WRONG_USE if wrong_use else FAILED
    note(f"unexpected {type(error).__name__}: {error}\nRun it again with --debug to see the traceback.")
    return FAILED


def help_hint(error: Exception) -> str:
    """Where the command that was misused explains itself."""
    context = getattr(error, "ctx", None)
    return f"; see {context.command_path} --help" if context else ""


def note(text: str) -> None:
    """A line for the reader that is no result, on standard error."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a named model or a hub id")], debug: Debug = False
) -> None:
    """Fetch weights; the last line printed is their path."""
    from paceline import models

    print(models.pull(name))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="text, @FILE, or - for standard input")],
    chat: Annotated[bool, typer.Option("--chat", help="send the prompt through the chat template")] = False,
    show: Annotated[bool, typer.Option("--show", help="colour what was guessed, then print the step table")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="first without speculation, then with; implies --show")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    repetition_penalty: options.RepetitionPenalty = None,
    logit_bias: options.LogitBias = None,
    stop_token_ids: options.StopTokenIds = None,
    max_tokens: options.MaxTokens = None,
    seed: options.Seed = None,
    method: options.MethodName = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    num_draft_tokens: options.NumDraftTokens = None,
    prompt_lookup_max: options.PromptLookupMax = None,
    prompt_lookup_min: options.PromptLookupMin = None,
    rejection_sample_method: options.RejectionSampleMethod = None,
    speculative_config: options.SpeculativeConfig = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    debug: Debug = False,
) -> None:
    """Write on from PROMPT and stream the text."""
    asked = locals()  # the options by name
    if as_json and (show or compare):
        raise BadRequest("--json prints one object and nothing else; leave out --show and --compare")
    values, config, text = options.sampling_values(asked), speculation(asked), prompt_text(prompt)
    if compare:
        config = {"method": "ngram"} | config
        if config["method"] == "none":
            raise BadRequest("--compare holds a method against plain decoding; give one, such as --method ngram")
    from paceline.sampling import SamplingParams

    params = SamplingParams(**values)
    llm = load(model, config, given(asked, LOAD), debug)
    request = llm.chat_ids([{"role": "user", "content": text.strip()}]) if chat else text
    run = print_json if as_json else compare_runs if compare else show_run if show else stream_text
    raise typer.Exit(run(llm, request, params, config))


def prompt_text(prompt: str) -> str:
    """The prompt itself, what ``@file`` holds, or standard input for ``-``."""
    if prompt == "-":
        return sys.stdin.read()
    if not prompt.startswith("@"):
        return prompt
    try:
        return Path(prompt[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRequest(f"cannot read the prompt file {prompt[1:]!r}: {reason}") from None


def load(model: str, config: dict[str, Any], choices: dict[str, Any], debug: bool) -> Engine:
    """The model, with a word on standard error before and after; without a config the library chooses the method."""
    note(f"loading {model} ...")
    import transformers

    from paceline.llm import LLM

    if not debug:
        quiet: Any = transformers.logging
        quiet.set_verbosity_error()
    if config:
        choices = {"speculative_config": config} | choices
    llm: Engine = LLM(model, **choices)
    note(f"{llm.source.note or llm.source.name}; {forward_in_use(llm.target.kernel)}")
    return llm


def checked(output: RequestOutput) -> RequestOutput:
    """``output``, unless the request failed."""
    if output.finish_reason == "error":
        raise PacelineError(output.error or "the request failed and did not say why")
    return output


def print_json(llm: Engine, request: Request, params: Any, config: dict[str, Any]) -> int:
    """Generate, and print the answer as one JSON object."""
    out = checked(llm.generate([request], params)[0])
    names = ("text", "token_ids", "finish_reason", "stop_reason", "usage", "seed")
    print(json.dumps({name: getattr(out, name) for name in names} | {"stats": out.stats.to_dict()}, ensure_ascii=False))
    return DONE


def stream_text(llm: Engine, request: Request, params: Any, config: dict[str, Any]) -> int:
    """Generate, and print the text as it comes; a file gets it unchanged, a terminal without control characters."""
    from paceline.show import visible

    clean = visible if sys.stdout.isatty() else str
    stream, text = llm.stream(request, params), ""
    for piece in stream:
        text = piece.text or text
        sys.stdout.write(clean(piece.text))
        sys.stdout.flush()
    print("" if text.endswith("\n") else "\n", end="")
    assert stream.output is not None, "a stream that ended carries its output"
    checked(stream.output)
    return DONE


def show_run(llm: Engine, request: Request, params: Any, config: dict[str, Any]) -> int:
    """Generate in colours, then print the legend and the step table."""
    from rich.console import Console

    from paceline import show
    from paceline.bench.measure import watch

    console = Console(highlight=False)
    put, close = show.printer(console, llm.tokenizer)
    run = watch(lambda: llm.stream(request, params), put)
    close()
    checked(run.output)
    console.print(show.legend(console), show.step_table(run, console), sep="\n")
    return DONE


def compare_runs(llm: Engine, request: Request, params: Any, config: dict[str, Any]) -> int:
    """Generate without and with speculation from one seed; exit 1 if a rule that promises equal ids gives others."""
    from rich.console import Console

    from paceline import show
    from paceline.bench.measure import Watched, watch

    console = Console(highlight=False)
    note("warming up ...")
    llm.generate([request], replace(params, max_tokens=min(8, params.max_tokens or 8)), speculative_config=config)

    def run(title: str, spec: dict[str, Any]) -> Watched:
        console.print(show.heading(title))
        put, close = show.printer(console, llm.tokenizer)
        watched = watch(lambda: llm.stream(request, params, speculative_config=spec), put)
        close()
        checked(watched.output)
        return watched

    plain = run("1  plain decoding, one token per pass", {"method": "none"})
    params = replace(params, seed=plain.output.seed)  # the one that was drawn, if none was given
    fast = run(f"2  the same request with {config['method']}", config)
    console.print(show.legend(console), "", show.step_table(fast, console), "", sep="\n")
    console.print(show.comparison(plain, fast, str(config["method"]), llm.tokenizer, params.is_greedy))
    exact = params.is_greedy or config.get("rejection_sample_method", "coupled") == "coupled"
    return FAILED if exact and plain.output.token_ids != fast.output.token_ids else DONE


@bench_app.command("run", hidden=True)
def bench(
    model: Model,
    methods: Annotated[str, typer.Option(help="with commas; none is always measured")] = "none,ngram",
    peers: Annotated[str, typer.Option(help="transformers, transformers-lookup-10, transformers-lookup-23")] = "",
    set_name: Annotated[
        str, typer.Option("--set", help="humaneval, gsm8k, mt-bench, long, or SET:CATEGORY")
    ] = "humaneval",
    prompts: Annotated[Path | None, typer.Option(help="a JSONL file of prompts instead of a set")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="how many, spread evenly over the set")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="two or more also measure the machine's drift")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="prompts answered before measuring")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="result file; a run cut short goes on")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="most per turn", rich_help_panel="Sampling")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy", rich_help_panel="Sampling")] = 0.0,
    seed: Annotated[int, typer.Option(help="prompt i is sampled with seed + i", rich_help_panel="Sampling")] = 0,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    num_draft_tokens: options.NumDraftTokens = None,
    prompt_lookup_max: options.PromptLookupMax = None,
    prompt_lookup_min: options.PromptLookupMin = None,
    rejection_sample_method: options.RejectionSampleMethod = None,
    speculative_config: options.SpeculativeConfig = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    debug: Debug = False,
) -> None:
    """Measure methods and peers on MODEL, interleaved prompt by prompt; the last line printed is JSON.

    Two results are compared with: paceline bench compare A.json B.json
    """
    asked = locals()  # the options by name
    from paceline.bench import peers as others
    from paceline.bench.records import fingerprint

    others.check(listed(peers))
    chosen = choose(prompts or set_name, num_prompts)
    names = ["none", *(name for name in listed(methods) if name != "none")]
    config = speculation(asked)
    settings = Settings(
        model=model,
        methods={name: (config if name != "none" else {}) | {"method": name} for name in names},
        peers=tuple(listed(peers)),
        set=str(prompts or set_name),
        prompts=tuple(p.id for p in chosen),
        prompts_sha256=fingerprint([[p.context, p.turns] for p in chosen]),
        repeats=repeats,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        warmup=warmup,
        load=given(asked, LOAD),
    )
    run_bench(settings, chosen, json_file, debug)


def choose(name: str | Path, count: int) -> list[Prompt]:
    """``count`` prompts of a set, spread evenly over it."""
    from paceline.bench import prompts

    known = prompts.load(name)
    if len({p.id for p in known}) < len(known):
        raise BadRequest(f"{name} uses an id twice; records are kept by id, so each prompt needs its own")
    count = min(count, len(known))
    return [known[i * len(known) // count] for i in range(count)]


def run_bench(settings: Settings, prompts: list[Prompt], json_file: Path | None, debug: bool) -> None:
    """Load, measure, write, and print the table and the JSON line."""
    from rich.console import Console

    from paceline.bench import peers, report
    from paceline.bench.measure import BASELINE, Contender, Method, check_room, environment, measure
    from paceline.bench.records import Sidecar, write_atomically
    from paceline.bench.summary import summarise
    from paceline.draft import SpeculativeConfig

    if json_file and not json_file.absolute().parent.is_dir():
        raise BadRequest(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
    for config in settings.methods.values():
        SpeculativeConfig.read(config)
    llm = load(settings.model, {"method": BASELINE}, settings.load, debug)
    check_room(llm, prompts, settings)
    contenders: list[Contender] = [Method(llm, name, config, settings) for name, config in settings.methods.items()]
    contenders += peers.load(settings.peers, llm, settings)
    machine = environment(llm)
    header = {"settings": settings.to_dict(), "environment": {k: v for k, v in machine.items() if k != "date"}}
    sidecar = Sidecar(json_file, header) if json_file else None
    with report.progress(Console(stderr=True)) as tick:
        records, resumed = measure(contenders, prompts, settings, llm.chat_ids, sidecar=sidecar, progress=tick)
    result = summarise(records, settings, machine | {"resumed_records": resumed})
    line = json.dumps(result)
    if json_file and sidecar:
        write_atomically(json_file, line + "\n")
        sidecar.remove()
    Console(highlight=False).print(report.table(result), "", sep="\n")
    if json_file and sys.stdout.isatty():
        note(f"the result is in {json_file}")  # a screenful of JSON would push the table away
    else:
        print(line)


@bench_app.command("compare")
def bench_compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="a result of bench --json")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another, held against A")],
    force: Annotated[bool, typer.Option("--force", help="compare although settings differ")] = False,
    debug: Debug = False,
) -> None:
    """Say how much faster B is than A, with intervals over the prompts both have."""
    from rich.console import Console

    from paceline.bench import report

    Console(highlight=False).print(report.compare(report.read(a), report.read(b), force))
