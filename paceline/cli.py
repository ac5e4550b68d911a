"""The command line: ``paceline pull``, ``generate``, ``chat``, ``plan``, ``certify``,
``bench``, ``train``, ``inspect`` and ``corpus``.

Everything heavy is imported inside the commands, so that ``paceline --help`` answers at once.
"""

import json
import math
import os
import sys
import warnings
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
from paceline.errors import (
    BadRequest,
    IncompatibleDrafter,
    ModelNotFound,
    PacelineError,
    UnsupportedModel,
)
from paceline.options import (
    BATCH,
    LOAD,
    ONE_TEXT,
    REUSE,
    SAMPLING,
    SETTINGS,
    SPECULATION,
    Debug,
    FromModel,
    Model,
    given,
    listed,
    speculation,
    takes,
)
from paceline.output import Logprob, RequestOutput

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
corpus_app = typer.Typer(no_args_is_help=True, help="Your own text, as a file that method suffix copies from.")
app.add_typer(corpus_app, name="corpus")


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
@takes(SAMPLING, SPECULATION, LOAD, BATCH, REUSE)
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="text, @FILE, or - for standard input", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="FILE.jsonl, objects with prompt or messages, or FILE.txt, a text a line", show_default=False
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="send the prompt through the chat template")] = False,
    show: Annotated[bool, typer.Option("--show", help="colour what was guessed, then print the step table")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="first without speculation, then with; implies --show")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per prompt and nothing else")] = False,
    from_model: FromModel = False,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Write on from PROMPT and stream the text."""
    values, config = options.sampling_values(asked), speculation(asked)
    check_generate(prompt, prompts, show or compare, as_json, values)
    text = "" if prompt is None else options.prompt_text(prompt)
    rows = options.prompts_in(prompts) if prompts else []
    choices = given(asked, [*LOAD, *BATCH, *REUSE])
    if compare:
        config = {"method": "auto"} | config
        choices["reuse_prefix"] = False  # both runs read the prompt
        if config["method"] == "none":
            raise BadRequest("--compare holds a method against plain decoding; give one, such as --method ngram")
    from paceline.sampling import SamplingParams

    params = SamplingParams(**values)
    llm = load(model, config, choices, debug)
    if from_model:
        params = SamplingParams.from_model(llm, **values)
        if (show or compare) and params.n > 1:
            raise BadRequest(f"the model's own settings ask for {params.n} texts; --show and --compare need -n 1")
    if prompts:
        raise typer.Exit(answer_file(llm, rows, params, chat, as_json))
    request = llm.chat_ids([{"role": "user", "content": text.strip()}]) if chat else text
    shown = compare_runs if compare else show_run if show else print_samples if params.n > 1 else stream_text
    raise typer.Exit((print_json if as_json else shown)(llm, request, params, config))


def check_generate(
    prompt: str | None, prompts: Path | None, shown: bool, as_json: bool, values: dict[str, Any]
) -> None:
    """Refuse options of ``generate`` that do not go together, before anything is loaded."""
    if prompt is None and prompts is None:
        raise BadRequest("Missing argument 'PROMPT'; see paceline generate --help (--prompts FILE takes many)")
    if prompt is not None and prompts is not None:
        raise BadRequest("PROMPT and --prompts were both given; leave one out")
    if as_json and shown:
        raise BadRequest("--json prints one object and nothing else; leave out --show and --compare")
    if shown and (prompts is not None or values.get("n", 1) != 1):
        raise BadRequest("--show and --compare follow one text; leave out --prompts and -n")
    for name in ("logprobs", "prompt_logprobs"):
        if name in values and not as_json:
            raise BadRequest(f"--{name.replace('_', '-')} is printed as JSON only; add --json")


@app.command()
@takes(ONE_TEXT, SPECULATION, LOAD, REUSE)
def chat(
    model: Model,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="what the model is told first: text or @FILE", show_default=False)
    ] = "",
    from_model: FromModel = False,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Talk with MODEL in the terminal; /help there lists the commands.

    Lines that are piped in are answered one after the other; standard output then carries the answers alone.
    """
    values, config = options.sampling_values(asked), speculation(asked)
    from paceline.chat import Chat
    from paceline.sampling import SamplingParams

    SamplingParams(**values)
    text = options.prompt_text(system) if system.startswith("@") else system
    llm = load(model, config, given(asked, [*LOAD, *REUSE]), debug)
    raise typer.Exit(Chat(llm, values, config, system=text, from_model=from_model, debug=debug).run())


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
    with warnings.catch_warnings():
        warnings.showwarning = _telling(warnings.showwarning)
        llm: Engine = LLM(model, **choices)
    note(f"{llm.source.note or llm.source.name}; {forward_in_use(llm.target.kernel)}")
    return llm


def _telling(usual: Any) -> Any:
    """A way to show warnings that says those about heads as notes, all others as usual."""
    from paceline.draft.self_check import DoubtfulHead

    def show(text: Warning | str, kind: type[Warning], *rest: Any) -> None:
        if issubclass(kind, DoubtfulHead):
            note(str(text))
        else:
            usual(text, kind, *rest)

    return show


def checked(output: RequestOutput) -> RequestOutput:
    """``output``, unless the request failed."""
    if output.finish_reason == "error":
        raise PacelineError(output.error or "the request failed and did not say why")
    return output


def print_json(llm: Engine, request: Request, params: Any, config: dict[str, Any]) -> int:
    """Generate, and print the answer as one JSON object."""
    out = llm.generate([request], params)[0]
    if not out.others:
        checked(out)
    print(as_line(out, llm.tokenizer))
    for sample in out.samples:
        checked(sample)
    return DONE


def as_line(output: RequestOutput, tokenizer: Any, **more: Any) -> str:
    """An answer as one line of JSON, after whatever else is given."""
    answer = more | record(output, tokenizer)
    if output.others:
        answer["samples"] = [record(sample, tokenizer) for sample in output.samples]
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [logprob_entries(position, tokenizer) for position in output.prompt_logprobs]
    return json.dumps(answer, ensure_ascii=False)


def record(output: RequestOutput, tokenizer: Any) -> dict[str, Any]:
    """The public fields of one text, ready for JSON."""
    names = ("text", "token_ids", "finish_reason", "stop_reason", "usage", "seed")
    fields = {name: getattr(output, name) for name in names} | {"stats": output.stats.to_dict()}
    if output.error is not None:
        fields["error"] = output.error
    if output.logprobs is not None:
        fields["logprobs"] = [logprob_entries(position, tokenizer) for position in output.logprobs]
    return fields


def logprob_entries(position: dict[int, Logprob] | None, tokenizer: Any) -> list[dict[str, Any]] | None:
    """One position's log-probabilities; None where nothing came before. JSON has no infinity: that is null."""
    if position is None:
        return None
    return [
        {
            "id": token,
            "token": tokenizer.decode([token], skip_special_tokens=False),
            "logprob": one.logprob if math.isfinite(one.logprob) else None,
            "rank": one.rank,
        }
        for token, one in position.items()
    ]


def answer_file(llm: Engine, rows: list[dict[str, Any]], params: Any, chat: bool, as_json: bool) -> int:
    """Answer every prompt of a file, with a progress bar; exit 1 if any of them failed."""
    requests = [
        llm.chat_ids(row["messages"])
        if "messages" in row
        else llm.chat_ids([{"role": "user", "content": row["prompt"].strip()}])
        if chat
        else row["prompt"]
        for row in rows
    ]
    generate: Any = llm.generate
    outputs: list[RequestOutput] = generate(requests, params, progress=True)
    failed = 0
    for number, (row, out) in enumerate(zip(rows, outputs, strict=True), 1):
        failed += any(sample.finish_reason == "error" for sample in out.samples)
        if as_json:
            print(as_line(out, llm.tokenizer, **{key: row[key] for key in ("id",) if key in row}))
        else:
            print_texts(out, f"prompt {row.get('id', number)}")
    if failed:
        note(f"{failed} of {len(rows)} prompts failed" + ("; each says why in its error" if as_json else ""))
    return FAILED if failed else DONE


def print_samples(llm: Engine, request: Request, params: Any, config: dict[str, Any]) -> int:
    """Generate several texts for one prompt, and print each under a heading; exit 1 if one of them failed."""
    out = llm.generate([request], params)[0]
    print_texts(out)
    return FAILED if any(sample.finish_reason == "error" for sample in out.samples) else DONE


def print_texts(output: RequestOutput, title: str = "") -> None:
    """Every sample of an answer under its heading; what went wrong goes to standard error."""
    from rich.console import Console

    from paceline.show import heading, visible

    clean = visible if sys.stdout.isatty() else str
    for i, sample in enumerate(output.samples, 1):
        name = f"sample {i} of {len(output.samples)}" if output.others else ""
        full = ", ".join(part for part in (title, name) if part)
        Console(highlight=False).print(heading(full))
        print(clean(sample.text), end="" if sample.text.endswith("\n") else "\n", flush=True)
        if sample.finish_reason == "error":
            note(f"{full}: {sample.error or 'it failed and did not say why'}")


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
    console.print(show.legend(console), show.step_table(run, console, str(config.get("method", "auto"))), sep="\n")
    return DONE


def compare_runs(llm: Engine, request: Request, params: Any, config: dict[str, Any]) -> int:
    """Generate without and with speculation from one seed; exit 1 if a rule that promises equal ids gives others."""
    from rich.console import Console

    from paceline import show
    from paceline.bench.measure import Watched, watch

    console = Console(highlight=False)
    note("warming up ...")
    few = min(8, params.max_tokens or 8)
    short = replace(params, max_tokens=few, min_tokens=min(few, params.min_tokens))
    llm.generate([request], short, speculative_config=config)

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
    console.print(show.legend(console), "", show.step_table(fast, console, str(config["method"])), "", sep="\n")
    console.print(show.comparison(plain, fast, str(config["method"]), llm.tokenizer, params.is_greedy))
    exact = params.is_greedy or config.get("rejection_sample_method", "coupled") == "coupled"
    return FAILED if exact and plain.output.token_ids != fast.output.token_ids else DONE


@app.command()
@takes(SPECULATION, LOAD)
def certify(
    model: Model,
    plugin: Annotated[
        str, typer.Option(metavar="MODULE:CLASS", help="a drafter of your own instead of --method", show_default=False)
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="two minutes for a small model")] = False,
    full: Annotated[bool, typer.Option("--full", help="more prompts, longer texts, many samples")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="a JSONL file of prompts to write on, instead of those that come along")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the certificate as JSON")] = None,
    html: Annotated[Path | None, typer.Option(help="write it as a page with plots")] = None,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Is what a method writes on MODEL the model's own? Prints what was proved, how strongly, and what differs.

    Exit 1 if it is not. A difference is a near-tie if rounding on this machine can make it, else a bug.
    """
    from rich.console import Console

    config = speculation(asked)
    if quick and full:
        raise BadRequest("--quick and --full were both given; leave one out")
    if bool(plugin) == ("method" in config or "model" in config):
        raise BadRequest("one method is needed: --method NAME, --draft-model MODEL, or --plugin MODULE:CLASS")
    if config.get("method") == "none":
        raise BadRequest("plain decoding is what others are compared with; name a method, such as --method ngram")
    for path in (json_file, html):
        if path and not path.absolute().parent.is_dir():
            raise BadRequest(f"{path}: there is no folder {path.absolute().parent}")
    drafter = {"method": options.plugin(plugin)} if plugin else {}
    chosen = certify_prompts(prompts)
    llm: Any = load(model, config | drafter, given(asked, LOAD), debug)
    from paceline.certify import certify as run_certify
    from paceline.certify.page import write_page
    from paceline.certify.report import table
    from paceline.certify.run import Named
    from paceline.files import write_atomically

    templated = bool(llm.tokenizer.chat_template)
    texts = [prompt.messages() for prompt in chosen]
    asked_ids = [
        Named(prompt.id, llm.chat_ids(said) if templated else list(llm.tokenizer(said[-1]["content"]).input_ids))
        for prompt, said in zip(chosen, texts, strict=True)
    ]
    mode: Any = "quick" if quick else "full" if full else "standard"
    certificate = run_certify(llm, config | drafter, asked_ids, mode=mode, method=plugin or None, progress=True)
    console = Console(highlight=False)
    console.print(table(certificate, console))
    if json_file:
        write_atomically(json_file, certificate.to_json() + "\n")
    if html:
        write_page(html, certificate)
        note(f"the page is in {html}")
    raise typer.Exit(FAILED if certificate.verdict == "bug" else DONE)


def certify_prompts(path: Path | None) -> list[Prompt]:
    """The prompts of a file, or code, questions and sums in turn, so that any number of the first ones is a mixture."""
    from paceline.bench import prompts

    if path:
        return prompts.load(path)
    sets = [prompts.load(name) for name in ("humaneval", "mt-bench", "gsm8k")]
    return [prompt for together in zip(*sets, strict=False) for prompt in together]


@app.command()
@takes(LOAD)
def plan(
    model: Model,
    draft_model: Annotated[
        str, typer.Option(metavar="MODEL", help="a smaller model that may draft", show_default=False)
    ] = "",
    methods: Annotated[str, typer.Option(help="consider only these, with commas", show_default=False)] = "",
    prompts: Annotated[Path | None, typer.Option(help="a JSONL file of your prompts", show_default=False)] = None,
    set_name: Annotated[
        str, typer.Option("--set", help="humaneval, gsm8k, mt-bench, long, or SET:CATEGORY; else a mixture")
    ] = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="how many, from the beginning")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="prompt i is sampled with seed + i")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="prompts answered side by side")] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="run the best choices, and show what they bring")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the plan, for --plan FILE and {'plan': FILE}")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="write a picture of it, FILE.png")] = None,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Measure this machine and your prompts for a few minutes, and say how to decode MODEL on it, or not to speculate.

    The plan is followed by: paceline generate MODEL PROMPT --plan FILE
    """
    from rich.console import Console

    from paceline.plan.record import check_output

    if prompts and set_name:
        raise BadRequest("--prompts and --set were both given; leave one out")
    chosen = plan_prompts(prompts, set_name, num_prompts)
    if batch > len(chosen):
        raise BadRequest(f"--batch {batch} and {len(chosen)} prompts; give --num-prompts {batch} or more of them")
    if json_file:
        check_output(json_file)
    if plot:
        from paceline.plan.report import check_plot

        check_plot(plot)
    from paceline.plan.search import check_methods

    check_methods(listed(methods) or None, draft_model or None)
    choices = given(asked, LOAD) | {"reuse_prefix": False, "max_num_seqs": batch}
    llm: Any = load(model, {"method": "none"}, choices, debug)
    from paceline.plan import make_plan, report
    from paceline.progress import stages

    templated = bool(llm.tokenizer.chat_template)
    texts = [prompt.messages() for prompt in chosen]
    ids = [llm.chat_ids(said) if templated else list(llm.tokenizer(said[-1]["content"]).input_ids) for said in texts]
    with stages() as progress:
        found = make_plan(
            llm,
            ids,
            draft_model=draft_model or None,
            methods=listed(methods) or None,
            temperature=temperature,
            batch=batch,
            max_tokens=max_tokens,
            seed=seed,
            verify=verify,
            names=[prompt.id for prompt in chosen],
            progress=progress,
        )
    console = Console(highlight=False)
    console.print(report.table(found, console))
    if plot:
        report.plot(found, plot)
        note(f"the picture is in {plot}")
    if json_file:
        found.write(json_file)
        note(f"the plan is in {json_file}; follow it with --plan {json_file}")


def plan_prompts(path: Path | None, name: str, count: int) -> list[Prompt]:
    """The first prompts of a file or a set, or code, sums, stories and summaries in turn."""
    from paceline.bench import prompts

    if path or name:
        return prompts.load(path or name)[:count]
    sets = [prompts.load(each) for each in ("humaneval", "gsm8k", "mt-bench:writing", "long")]
    return [prompt for together in zip(*sets, strict=False) for prompt in together][:count]


@bench_app.command("run", hidden=True)
@takes(SETTINGS, LOAD)
def bench(
    model: Model,
    methods: Annotated[str, typer.Option(help="with commas; none is always measured")] = "none,ngram",
    peers: Annotated[str, typer.Option(help="transformers, transformers-lookup-10, transformers-lookup-23")] = "",
    set_name: Annotated[
        str, typer.Option("--set", help="humaneval, gsm8k, mt-bench, long, or SET:CATEGORY")
    ] = "humaneval",
    prompts: Annotated[Path | None, typer.Option(help="a JSONL file of prompts instead of a set")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="how many, spread evenly over the set")] = 10,
    first: Annotated[bool, typer.Option("--first", help="the first prompts of the set instead of a spread")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="two or more also measure the machine's drift")] = 2,
    warmup: Annotated[int, typer.Option(min=0, help="prompts answered before measuring")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="result file; a run cut short goes on")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="most per turn", rich_help_panel="Sampling")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy", rich_help_panel="Sampling")] = 0.0,
    seed: Annotated[int, typer.Option(help="prompt i is sampled with seed + i", rich_help_panel="Sampling")] = 0,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Measure methods and peers on MODEL, interleaved prompt by prompt; the last line printed is JSON.

    Two results are compared with: paceline bench compare A.json B.json
    """
    from paceline.bench import peers as others
    from paceline.bench.records import fingerprint

    others.check(listed(peers))
    chosen = choose(prompts or set_name, num_prompts, first)
    names = ["none", *(name for name in listed(methods) if name != "none")]
    settings = Settings(
        model=model,
        methods=configs(names, speculation(asked)),
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


def configs(names: list[str], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each method's config: what was given, without the keys that are for other methods."""
    from paceline.draft import OWNERS as OF_METHODS

    owners_of = OF_METHODS | {"plan": ("auto",)}
    uses = {"auto": {"suffix", "recycle", "draft_model"}, "compose": {"compose"}}
    if "compose" in names:
        uses["compose"] |= {one if isinstance(one, str) else one["method"] for one in given.get("drafters", ())}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = {"method": name}
        if name != "none":
            own = uses.get(name, {name})
            mine = {k: v for k, v in given.items() if k != "method"}
            found[name] |= {k: v for k, v in mine.items() if set(owners_of.get(k, (name,))) & (own | {name})}
    unused = [key for key in given if key in owners_of and not any(key in config for config in found.values())]
    if unused:
        owners = ", ".join(sorted({owner for key in unused for owner in owners_of[key]}))
        raise BadRequest(f"{', '.join(unused)} given, but no method uses it; add {owners} to --methods")
    return found


def choose(name: str | Path, count: int, first: bool = False) -> list[Prompt]:
    """``count`` prompts of a set, spread evenly over it, or its first ones."""
    from paceline.bench import prompts

    known = prompts.load(name)
    if len({p.id for p in known}) < len(known):
        raise BadRequest(f"{name} uses an id twice; records are kept by id, so each prompt needs its own")
    count = min(count, len(known))
    return known[:count] if first else [known[i * len(known) // count] for i in range(count)]


def run_bench(settings: Settings, prompts: list[Prompt], json_file: Path | None, debug: bool) -> None:
    """Load, measure, write, and print the table and the JSON line."""
    from rich.console import Console

    from paceline.bench import peers, report
    from paceline.bench.measure import BASELINE, Contender, Method, check_room, environment, measure
    from paceline.bench.records import Sidecar
    from paceline.bench.summary import summarise
    from paceline.draft import SpeculativeConfig
    from paceline.files import write_atomically

    if json_file and not json_file.absolute().parent.is_dir():
        raise BadRequest(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
    for config in settings.methods.values():
        SpeculativeConfig.read(config)
    # Every contender reads every prompt itself, whoever has read it before.
    llm = load(settings.model, {"method": BASELINE}, {"reuse_prefix": False} | settings.load, debug)
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


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="the folder of a head, or its weights file")],
    target: Annotated[
        str, typer.Option(metavar="MODEL", help="the model that it is to draft for", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    debug: Debug = False,
) -> None:
    """Say what a draft head holds, and whether it fits a model; exit 1 if it does not.

    Only the model's config and tokenizer are read. What the head guesses is looked at when it is loaded.
    """
    from paceline import formats

    head = formats.read_head(path)
    about = formats.describe(head)
    doubts: list[str] = []
    misfit = ""
    if target:
        try:
            doubts = fitting(head, target)
        except IncompatibleDrafter as error:
            misfit = str(error)
        about |= {"target": target, "fits": not misfit, "doubts": [misfit] if misfit else doubts}
    if as_json:
        print(json.dumps(about))
    else:
        print(formats.description(head))
        if target:
            print(f"target       {target}: " + (f"does not fit: {misfit}" if misfit else "fits"))
        for doubt in doubts:
            print(f"doubt        {doubt}")
    raise typer.Exit(FAILED if misfit else DONE)


def fitting(head: Any, model: str) -> list[str]:
    """What is doubtful about a head for a model, of which no weights are read."""
    from transformers import AutoConfig

    from paceline import formats
    from paceline.models import load_tokenizer, resolve

    source = resolve(model, progress=True)
    config = AutoConfig.from_pretrained(source.path, local_files_only=True, trust_remote_code=False).get_text_config()
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return formats.check_fits(
        head,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        rope_theta=rope.get("rope_theta"),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        model=source.name,
        tokenizer=load_tokenizer(source),
    )


@app.command()
@takes(LOAD)
def train(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="medusa, eagle or eagle3")],
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="where the head goes; again to go on")],
    data: Annotated[str, typer.Option(help="self: the model writes it; or a JSONL file of messages or text")] = "self",
    answers: Annotated[str, typer.Option(help="of a file: target (written anew) or given")] = "target",
    data_folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where the data lie, for several heads", show_default=False)
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="questions that are asked, or taken from the file")] = 1000,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="of the answers")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="of everything")] = 0,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    loss: Annotated[
        str, typer.Option(help="cross_entropy, kl, acceptance, likelihood, or kl:0.5,acceptance:0.5")
    ] = "kl",
    learning_rate: Annotated[
        float | None, typer.Option(min=1e-9, help="highest, after the warm-up", show_default=False)
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=8, help="that go through the head together")] = 2048,
    accumulate: Annotated[int, typer.Option(min=1, help="such batches to a step")] = 2,
    draft_vocab_size: Annotated[int, typer.Option(min=2, help="ids that the head scores, the commonest ones")] = 8192,
    num_heads: Annotated[int, typer.Option(min=1, help="medusa: how many")] = 4,
    intermediate_size: Annotated[
        int | None, typer.Option(min=2, help="eagle: width of its MLP; else the model's", show_default=False)
    ] = None,
    layer_ids: Annotated[
        str, typer.Option(metavar="A,B,C", help="eagle3: hidden states that it reads", show_default=False)
    ] = "",
    unroll: Annotated[
        int | None, typer.Option(min=1, help="eagle: steps over its own states; 3 for eagle3", show_default=False)
    ] = None,
    init: Annotated[Path | None, typer.Option(metavar="DIR", help="a head to go on from", show_default=False)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="stop after so long; the same command goes on", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what it will take, and do nothing")] = False,
    debug: Debug = False,
    **asked: Any,
) -> None:
    """Train a draft head for MODEL on this machine: the model writes the texts that it learns from.

    Give the same command again to go on with a training that was stopped or killed.
    """
    from paceline.train.recipe import Recipe

    if data != "self" and not Path(data).is_file():
        raise BadRequest(f"--data {data}: there is no such file; give a JSONL file, or self")
    recipe = Recipe(
        method=method,
        model=model,
        data=data,
        answers=answers,
        num_samples=num_samples,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        epochs=epochs,
        loss=loss,
        learning_rate=-1.0 if learning_rate is None else learning_rate,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        draft_vocab_size=draft_vocab_size,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        layer_ids=numbers(layer_ids) if layer_ids else None,
        steps=unroll or -1,
        init=None if init is None else str(init),
    )
    choices = {"reuse_prefix": False} | own_device() | given(asked, LOAD)
    llm: Any = load(model, {"method": "none"}, choices, debug)
    from paceline.progress import stages
    from paceline.train import train as run_training
    from paceline.train.estimate import estimate

    if dry_run:
        print(estimate(llm, recipe))
        return
    try:
        with stages() as progress:
            found = run_training(
                llm, recipe, output, data_folder=data_folder, minutes=minutes, progress=progress, say=note
            )
    except KeyboardInterrupt:
        note("stopped; the same command goes on from the last group of texts, or the last checkpoint")
        raise
    length = "" if found.acceptance_length is None else f", {found.acceptance_length:.2f} tokens per pass"
    if not found.is_finished:
        print(f"{output}: stopped after {found.epochs} epochs{length}; the same command goes on")
        return
    print(f"{output}: {found.epochs} epochs{length}; use it with --method {method} --draft-model {output}")


def own_device() -> dict[str, str]:
    """The GPU of this process where a launcher has started several; nothing elsewhere."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return {}
    import torch

    return {"device": f"cuda:{rank}"} if torch.cuda.device_count() > int(rank) else {}


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadRequest(f"{text!r} was given; whole numbers with commas are needed, such as 2,14,25") from error


@corpus_app.command("build")
def corpus_build(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="text files, and folders that hold some")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="X", help="the corpus file to write")],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="a corpus is for one tokenizer, the one of this model")
    ] = "qwen2.5-coder-0.5b-instruct-q4_k_m",
    debug: Debug = False,
) -> None:
    """Make a corpus of your own text that method suffix copies from: generate MODEL ... --corpus X.

    Hidden files below a folder, and files that are not UTF-8 text, are left out.
    """
    from paceline.draft import corpus_build as builder
    from paceline.models import load_tokenizer, resolve
    from paceline.progress import human, meter

    found = builder.find_files(files)
    builder.check_output(output)
    source = resolve(model, progress=True)
    note(f"{len(found.paths)} files, {human(found.num_bytes)}; ids of the tokenizer of {source.name}")
    tokenizer = load_tokenizer(source)
    with meter("building the corpus", found.num_bytes, True) as tick:
        corpus = builder.build(found, tokenizer, output, name=source.name, tick=tick)
    print(f"{output}: {described(corpus)}")


@corpus_app.command("info")
def corpus_info(
    path: Annotated[Path, typer.Argument(metavar="X", help="a corpus file")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    debug: Debug = False,
) -> None:
    """Say what a corpus holds, and for which tokenizer it is."""
    from dataclasses import asdict

    from paceline.draft.corpus import Corpus

    corpus = Corpus(path)
    if as_json:
        print(json.dumps(asdict(corpus.about) | {"num_bytes": corpus.num_bytes}))
        return
    about = corpus.about
    print(
        described(corpus),
        f"tokenizer of {about.tokenizer}: {about.vocab_size:,} ids, fingerprint {about.fingerprint[:12]}…",
        sep="\n",
    )


def described(corpus: Any) -> str:
    """What a corpus holds, in one line."""
    from paceline.progress import human

    about = corpus.about
    skipped = f", {about.num_skipped:,} files left out that are not UTF-8 text" if about.num_skipped else ""
    return (
        f"{about.num_tokens:,} tokens in {about.num_documents:,} documents ({human(about.text_bytes)} of text), "
        f"{human(corpus.num_bytes)} on disk{skipped}"
    )
