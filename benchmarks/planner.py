"""Does the planner know? What it predicts beside what is measured, and what it chooses beside the best of a sweep.

    python benchmarks/planner.py [MODEL] [DRAFT_MODEL] [--json FILE]     plan and measure (an hour), then the tables
    python benchmarks/planner.py --table FILE                            the tables of a result, in Markdown

For each kind of text a plan is made on its first prompts. Then twelve of its choices, the best of every method among
them, answer these prompts beside plain decoding, in turns, each with the plan's own costs. A run that was cut short
goes on where it stopped.
"""

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import paceline.llm
from paceline import LLM, SamplingParams, TokenTree
from paceline.bench import prompts
from paceline.bench.measure import Contender, Method, environment, measure
from paceline.bench.records import Settings, Sidecar, fingerprint
from paceline.bench.summary import summarise
from paceline.draft.base import Ask, Drafter, Step
from paceline.files import write_atomically
from paceline.plan import make_plan
from paceline.plan.report import name as named
from paceline.progress import stages

SETS = {"humaneval": "code", "gsm8k": "maths", "mt-bench:writing": "writing", "long": "summaries"}
SWEEP = {"ngram": 2, "suffix": 3, "draft_model": 3, "compose": 2, "recycle": 1, "auto": 1}
"""How many settings of each method: those that the plan holds to be best."""
METHODS = ("ngram", "suffix", "draft_model", "compose")
"""Methods whose prediction is held against what they bring."""


class Wrong(Drafter[None]):
    """Always wrong: it guesses an id that no text has, and is as sure as can be."""

    def begin(self, prompt: Step) -> None:
        """Nothing to remember."""

    def propose(self, states: list[None], asks: list[Ask]) -> list[TokenTree]:
        """A chain as long as it may be."""
        return [TokenTree.chain(ask.pending, [7] * min(ask.depth, ask.budget)) for ask in asks]

    def observe(self, states: list[None], steps: list[Step]) -> None:
        """Nothing to learn."""


def main() -> None:
    """Plan, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    parser.add_argument("draft_model", nargs="?", default="qwen2.5-coder-0.5b-instruct-q4_k_m")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, default=Path("planner.json"))
    parser.add_argument("--sets", default=",".join(SETS), help="with commas")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    llm = LLM(args.model, speculative_config=None, reuse_prefix=False)
    paceline.llm.MOST_DRAFTERS = 64  # else those of a long sweep are made anew in turns
    found = []
    for name in args.sets.split(","):
        part = args.json.with_name(f"{args.json.stem}-{name.partition(':')[0]}.json")
        if not part.exists():
            part.write_text(json.dumps(one_set(llm, name, part, args)) + "\n", encoding="utf-8")
        found.append(json.loads(part.read_text(encoding="utf-8")))
    part = args.json.with_name(f"{args.json.stem}-adversarial.json")
    if not part.exists():
        part.write_text(json.dumps(adversarial(llm, part, args)) + "\n", encoding="utf-8")
    whole = {"sets": found, "adversarial": json.loads(part.read_text(encoding="utf-8"))}
    write_atomically(args.json, json.dumps(whole, indent=1) + "\n")
    print(tables(whole))


def one_set(llm: LLM, name: str, part: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The plan of a set, and its choices as they were measured."""
    chosen = [replace(one, turns=one.turns[:1]) for one in prompts.load(name)[: args.num_prompts]]
    path = part.with_suffix(".plan")
    if not path.exists():
        ids = [llm.chat_ids(one.messages()) for one in chosen]
        with stages() as progress:
            make_plan(llm, ids, draft_model=args.draft_model, max_tokens=args.max_tokens, progress=progress).write(path)
    plan = json.loads(path.read_text(encoding="utf-8"))
    methods: dict[str, dict[str, Any]] = {"none": {"method": "none"}}
    labels = {}
    for i in picked(plan):
        own = part.with_suffix(f".{i}.plan")
        own.write_text(json.dumps(plan | {"chosen": i}), encoding="utf-8")
        labels[str(i)] = plan["choices"][i]
        methods[str(i)] = {"method": "auto", "plan": str(own)}
    result = run(llm, name, chosen, methods, part, args)
    for i in labels:
        part.with_suffix(f".{i}.plan").unlink()
    return {"set": name, "plan": plan, "result": result}


def picked(plan: dict[str, Any]) -> list[int]:
    """The choices of the sweep, and the chosen one."""
    choices, count = plan["choices"], dict(SWEEP)
    found = [] if choices[plan["chosen"]]["method"] == "none" else [plan["chosen"]]
    for i in found:
        count[choices[i]["method"]] = count.get(choices[i]["method"], 1) - 1
    for i, one in enumerate(choices):
        if i not in found and count.get(one["method"], 0) > 0:
            count[one["method"]] -= 1
            found.append(i)
    return sorted(found)


def adversarial(llm: LLM, part: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Random words to go on from, and a drafter that is always wrong, which nobody warns of."""
    chance = random.Random(0)
    words = [llm.tokenizer.decode([chance.randrange(1000, 100_000)]).strip() for _ in range(4000)]
    words = [word for word in words if word.isascii() and word.isalpha()]
    texts = [" ".join(chance.sample(words, 60)) for _ in range(2 * args.num_prompts)]
    ask = "Go on with forty more random words, none of them twice:\n"
    chosen = [prompts.Prompt(f"random {i}", (ask + text,)) for i, text in enumerate(texts)]
    path = part.with_suffix(".plan")
    if not path.exists():
        ids = [llm.chat_ids(one.messages()) for one in chosen[: args.num_prompts]]
        with stages() as progress:
            make_plan(llm, ids, draft_model=args.draft_model, max_tokens=args.max_tokens, progress=progress).write(path)
    auto = {"method": "auto", "plan": str(path)}
    methods = {"none": {"method": "none"}, "auto": {"method": "auto"}, "auto with the plan": auto}
    drafters = ["suffix", {"method": "draft_model", "model": args.draft_model}]
    methods["suffix and draft_model, no plan"] = {"method": "compose", "drafters": drafters}
    methods["always wrong"] = {"method": Wrong()}
    llm.generate(llm.chat_ids([{"role": "user", "content": "Hello"}]), SamplingParams(max_tokens=4))
    result = run(llm, "random words", chosen, methods, part, args)
    seconds: dict[str, dict[str, float]] = {}
    for record in result.pop("records"):
        seconds.setdefault(record["contender"], {})[record["prompt"]] = record["seconds"]
    pairs = {
        method: statistics.median(seconds["none"][prompt] / own[prompt] for prompt in own)
        for method, own in seconds.items()
    }
    return {"result": result, "plan": json.loads(path.read_text(encoding="utf-8")), "paired_medians": pairs}


def run(
    llm: LLM, name: str, chosen: list[prompts.Prompt], methods: dict[str, Any], part: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Everybody answers every prompt."""
    settings = Settings(
        model=args.model,
        methods={
            key: {"method": "always wrong"} if key == "always wrong" else config for key, config in methods.items()
        },
        set=name,
        prompts=tuple(one.id for one in chosen),
        prompts_sha256=fingerprint([[one.context, one.turns] for one in chosen]),
        max_tokens=args.max_tokens,
        warmup=0,
    )
    contenders: list[Contender] = [Method(llm, key, config, settings) for key, config in methods.items()]
    machine = environment(llm)
    header = {"settings": settings.to_dict(), "environment": {k: v for k, v in machine.items() if k != "date"}}
    sidecar = Sidecar(part, header)
    records, resumed = measure(contenders, chosen, settings, llm.chat_ids, sidecar=sidecar)
    result = summarise(records, settings, machine | {"resumed_records": resumed})
    sidecar.remove()
    return result | {"records": [{"contender": r.contender, "prompt": r.prompt, "seconds": r.seconds} for r in records]}


def tables(whole: dict[str, Any]) -> str:
    """Predicted beside measured, and chosen beside best."""
    lines = ["| text | method | predicted | measured | off by |", "|---|---|---|---|---|"]
    choices = ["| text | chosen | measured | best of the sweep | measured | chosen/best |", "|---|---|---|---|---|---|"]
    near = total = 0
    for one in whole["sets"]:
        plan, text = one["plan"], SETS[one["set"]]
        speed = {run["method"]: run["speedup"] for run in one["result"]["runs"]}
        for method in METHODS:
            i = next(i for i, choice in enumerate(plan["choices"]) if choice["method"] == method)
            predicted, measured = plan["choices"][i]["predicted_speedup"], speed[str(i)]
            near, total = near + (abs(predicted / measured - 1.0) <= 0.15), total + 1
            off = predicted / measured - 1.0
            lines.append(f"| {text} | {label(plan, i)} | {predicted:.2f}x | {measured:.2f}x | {off:+.0%} |")
        swept = {int(key): value for key, value in speed.items() if key != "none"}
        best = max(swept, key=lambda i: swept[i])
        mine = swept.get(plan["chosen"], 1.0)
        choices.append(
            f"| {text} | {label(plan, plan['chosen'])} | {mine:.2f}x | {label(plan, best)} | {swept[best]:.2f}x | "
            f"{mine / swept[best]:.2f} |"
        )
    medians = ", ".join(f"{name} {value:.3f}" for name, value in whole["adversarial"]["paired_medians"].items())
    return "\n".join([*lines, "", f"{near} of {total} within 15%", "", *choices, "", f"Random words: {medians}"])


def label(plan: dict[str, Any], i: int) -> str:
    """A choice in words."""
    from paceline.plan import Choice

    held = plan["choices"][i] | {"predicted_ci95": tuple(plan["choices"][i]["predicted_ci95"])}
    return f"`{named(Choice(**held))}`"


if __name__ == "__main__":
    main()
