"""What a second turn costs: time to its first token with the first turn's keys and values, and without.

    python benchmarks/chat.py [MODEL] [--repeats 3] [--json FILE]

The first turn brings a page of context. Both LLMs hold the same weights and take turns; the second turn must fall by
the share of the prompt that is not read again. The text of both must agree, near-ties excepted.
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


def main() -> None:
    """Measure, print both times and the reused share, exit 1 when a difference is no near-tie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    llms = {reuse: LLM(args.model, reuse_prefix=reuse) for reuse in (True, False)}
    reference = load_model(llms[True].source)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    turns: list[dict[str, Any]] = []
    bugs = 0
    for repeat in range(args.repeats):
        prompt = load("long")[repeat % len(load("long"))]
        answers: dict[bool, list[list[int]]] = {True: [], False: []}
        history = prompt.messages()
        for turn in range(2):
            found = {}
            for reuse in (True, False) if repeat % 2 else (False, True):
                ids = llms[reuse].chat_ids(history)
                begun = time.perf_counter()
                with llms[reuse].stream(ids, params) as stream:
                    next(stream)
                    first = time.perf_counter() - begun
                    for _ in stream:
                        pass
                output = stream.output
                answers[reuse].append(output.token_ids)
                found[reuse] = (first, output)
            with_it, without = found[True][1], found[False][1]
            difference = judge(reference, with_it.prompt_token_ids, without.token_ids, with_it.token_ids, params)
            bugs += difference is not None and not difference.near_tie
            share = with_it.stats.num_cached_tokens / len(with_it.prompt_token_ids)
            turns.append(
                {
                    "turn": turn + 1,
                    "prompt_tokens": len(with_it.prompt_token_ids),
                    "reused_share": share,
                    "first_token_seconds": found[True][0],
                    "first_token_seconds_without": found[False][0],
                    "same_ids": difference is None,
                }
            )
            print(turns[-1], flush=True)
            # Both go on with the same history, so that the second turn is the same request twice.
            history = [*history, {"role": "assistant", "content": without.text}]
            history.append({"role": "user", "content": "Now say the same in one sentence."})
    second = [turn for turn in turns if turn["turn"] == 2]
    result = {
        "model": llms[True].source.name,
        "turns": turns,
        "median_reused_share": statistics.median(turn["reused_share"] for turn in second),
        "median_fall": statistics.median(
            1 - turn["first_token_seconds"] / turn["first_token_seconds_without"] for turn in second
        ),
        "bugs": bugs,
    }
    text = json.dumps(result)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    print(text)
    sys.exit(bugs > 0)


if __name__ == "__main__":
    main()
