"""Which drafter when: drafters that need no training, side by side on four kinds of text, greedy and sampled.

    python benchmarks/drafters.py [MODEL] [DRAFT_MODEL] [--json FILE]      measure (half an hour), then the table
    python benchmarks/drafters.py --methods none,recycle,lookahead         other ones
    python benchmarks/drafters.py --table FILE                             the table of a result, in Markdown

The first prompts of each set are asked through the chat template, one turn each, EOS honoured. All contenders answer a
prompt before the next one, in an order that rotates; speeds include the reading of the prompt. A run that was cut short
goes on where it stopped.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import LLM
from paceline.bench import peers, prompts
from paceline.bench.measure import Contender, Method, environment, measure
from paceline.bench.records import Settings, Sidecar, fingerprint
from paceline.bench.summary import summarise
from paceline.files import write_atomically
from paceline.progress import meter

SETS = {"humaneval": "code", "gsm8k": "maths", "mt-bench:writing": "writing", "long": "summaries"}
TEMPERATURES = (0.0, 0.8)
METHODS = "none,ngram,suffix,draft_model,compose"
OTHERS: dict[str, dict[str, Any]] = {
    "draft_model gemma": {"method": "draft_model", "model": "gemma-3-270m-q4_k_m"},
    "lookahead 7-5-7": {
        "method": "lookahead",
        "window_size": 7,
        "ngram_size": 5,
        "guess_set_size": 7,
        "num_draft_tokens": 28,
    },
}
"""Settings that have a name of their own here."""
PEERS = "transformers"


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    parser.add_argument("draft_model", nargs="?", default="qwen2.5-coder-0.5b-instruct-q4_k_m")
    parser.add_argument("--methods", default=METHODS, help=f"with commas; also {', '.join(OTHERS)}")
    parser.add_argument("--corpus", help="for a method named 'suffix corpus'")
    parser.add_argument("--peers", default=PEERS, help="with commas; '' for none")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, default=Path("drafters.json"))
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    llm = LLM(args.model, speculative_config=None, reuse_prefix=False)
    configs = {name: OTHERS.get(name, {"method": name}) for name in args.methods.split(",")}
    for name, more in (("draft_model", {}), ("compose", {"drafters": ["suffix", "draft_model"]})):
        if name in configs:
            configs[name] = configs[name] | more | {"model": args.draft_model}
    if "suffix corpus" in configs:
        configs["suffix corpus"] = {"method": "suffix", "corpus": args.corpus}
    results = []
    others: list[peers.Peer] = []
    warm = False
    rounds = [(name, temperature) for name in SETS for temperature in args.temperatures]
    with meter("measuring", len(rounds), True, unit="sets") as tick:
        for done, (name, temperature) in enumerate(rounds):
            tick(done)
            part = args.json.with_name(f"{args.json.stem}-{name.partition(':')[0]}-{temperature}.json")
            if not part.exists():
                chosen = [replace(one, turns=one.turns[:1]) for one in prompts.load(name)[: args.num_prompts]]
                settings = Settings(
                    model=args.model,
                    methods=configs,
                    peers=tuple(filter(None, args.peers.split(","))),
                    set=name,
                    prompts=tuple(one.id for one in chosen),
                    prompts_sha256=fingerprint([[one.context, one.turns] for one in chosen]),
                    max_tokens=args.max_tokens,
                    temperature=temperature,
                    warmup=0,
                )
                if not warm:
                    others, warm = peers.load(settings.peers, llm, settings), True
                    warm_up(llm, configs, others)
                run(llm, others, settings, chosen, part)
            results.append(json.loads(part.read_text(encoding="utf-8")))
        tick(len(rounds))
    few = {str(key[1:]): draft.few for key, (draft, _) in llm._drafts.items()}
    costs = {key: one and [one.bits, one.vocab_size] for key, one in few.items()}
    whole = {"results": results, "draft_model": {"model": args.draft_model, "bits_and_ids": costs}}
    write_atomically(args.json, json.dumps(whole, indent=1) + "\n")
    print(table(whole))


def warm_up(llm: LLM, configs: dict[str, dict[str, Any]], others: list[peers.Peer]) -> None:
    """A few tokens by everybody: weights are mapped, kernels built, passes measured."""
    ids = llm.chat_ids([{"role": "user", "content": "Count to five."}])
    settings = Settings(model="", methods=configs, max_tokens=8)
    for name, config in configs.items():
        Method(llm, name, config, settings).answer(ids, 0)
    for peer in others:
        replace(peer, settings=settings).answer(ids, 0)


def run(llm: LLM, others: list[peers.Peer], settings: Settings, chosen: list[prompts.Prompt], path: Path) -> None:
    """One set at one temperature."""
    contenders: list[Contender] = [Method(llm, name, config, settings) for name, config in settings.methods.items()]
    contenders += [replace(peer, settings=settings) for peer in others]
    machine = environment(llm)
    header = {"settings": settings.to_dict(), "environment": {k: v for k, v in machine.items() if k != "date"}}
    sidecar = Sidecar(path, header)
    records, resumed = measure(contenders, chosen, settings, llm.chat_ids, sidecar=sidecar)
    result = summarise(records, settings, machine | {"resumed_records": resumed})
    write_atomically(path, json.dumps(result) + "\n")
    sidecar.remove()


def table(whole: dict[str, Any]) -> str:
    """A row per kind of text, temperature and method."""
    lines = [
        "| text | T | method | tokens/s | against `transformers` | against `none` | tokens per pass | kept by depth | "
        "time: prompt, draft, target | same ids |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in whole["results"]:
        plain = {run["method"]: run["tokens_per_second"] for run in result["runs"]}.get("transformers")
        for one in result["runs"]:
            share = one.get("time_share") or {}
            depths = (one.get("acceptance_per_position") or [])[:4]
            ratio = f"{one['tokens_per_second'] / plain:.2f}x" if plain else "-"
            times = [share.get(name) for name in ("prefill", "draft", "target")]
            lines.append(
                f"| {SETS[one['set']]} | {one['temperature']:g} | `{one['method']}` | {one['tokens_per_second']:.1f} | "
                f"{ratio} | {one['speedup']:.2f}x | "
                f"{one['mean_acceptance_length'] or 1:.2f} | {' '.join(f'{x:.2f}' for x in depths) or '-'} | "
                f"{' '.join('-' if x is None else f'{x:.0%}' for x in times)} | "
                f"{_identity(one)} |"
            )
    return "\n".join(lines)


def _identity(one: dict[str, Any]) -> str:
    if one["outputs_identical"] is None:
        return "-"
    return "all" if one["outputs_identical"] else f"{one['num_different']} differ"


if __name__ == "__main__":
    main()
