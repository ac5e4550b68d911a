"""How much do rows help? Tokens per second of 1, 2, 4 and 8 rows, with and without speculation, in one run.

    python benchmarks/rows.py [MODEL] [--draft-model MODEL] [--max-tokens 48] [--repeats 2] [--json FILE]

Every number of rows answers the same eight prompts (half code, half free text), all methods taking turns; reading the
prompts is included. A row's ids must be those of its solo run: where they differ, the near-tie rule judges.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.prompts import load
from paceline.certify import judge
from paceline.models import load_model

ROWS = (1, 2, 4, 8)


def main() -> None:
    """Measure, print a line per method and number of rows, exit 1 when a difference is no near-tie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    parser.add_argument("--draft-model")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    methods: dict[str, dict[str, Any]] = {"none": {"method": "none"}, "ngram": {"method": "ngram"}}
    if args.draft_model:
        methods["draft_model"] = {"method": "draft_model", "model": args.draft_model}
    llm = LLM(args.model, methods["none"], reuse_prefix=False)
    prompts = [llm.chat_ids(p.messages()) for p in [*load("humaneval")[:4], *load("mt-bench:writing")[:4]]]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    seconds: dict[tuple[str, int], list[float]] = {}
    lengths: dict[tuple[str, int], float] = {}
    solo: list[list[int]] = []
    differing, bugs, tokens = 0, 0, 0
    reference = load_model(llm.source)
    llm.generate(prompts[:1], params)
    for repeat in range(args.repeats):
        for rows in ROWS:
            for name in [*methods][repeat % len(methods) :] + [*methods][: repeat % len(methods)]:
                begun, outputs = time.perf_counter(), []
                for start in range(0, len(prompts), rows):
                    outputs += llm.generate(prompts[start : start + rows], params, speculative_config=methods[name])
                spent = time.perf_counter() - begun
                seconds.setdefault((name, rows), []).append(spent)
                ids = [output.token_ids for output in outputs]
                solo = solo or ids
                tokens = sum(map(len, ids))
                passes = sum(output.stats.num_target_passes for output in outputs)
                lengths[name, rows] = tokens / passes
                for prompt, one, other in zip(prompts, solo, ids, strict=True):
                    found = judge(reference, prompt, one, other, params)
                    differing += found is not None
                    bugs += found is not None and not found.near_tie
                print(
                    f"{name:12} {rows} rows: {tokens / spent:6.1f} tokens/s, {lengths[name, rows]:.2f} per pass",
                    flush=True,
                )
    base = statistics.median(seconds["none", 1])
    result = {
        "model": llm.source.name,
        "kernel": llm.target.kernel.name,
        "prompts": len(prompts),
        "tokens": tokens,
        "repeats": args.repeats,
        "rows_whose_ids_differ_from_the_first_solo_run": differing,
        "bugs": bugs,
        "measured": [
            {
                "method": name,
                "rows": rows,
                "tokens_per_second": tokens / statistics.median(spent),
                "against_none_alone": base / statistics.median(spent),
                "tokens_per_pass": lengths[name, rows],
            }
            for (name, rows), spent in seconds.items()
        ],
    }
    text = json.dumps(result)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    print(text)
    sys.exit(bugs > 0)


if __name__ == "__main__":
    main()
