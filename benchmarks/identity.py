"""Is the text the same? Every method against plain decoding on a real model, in the model's own dtype.

    python benchmarks/identity.py [MODEL] [--num-prompts 20] [--max-tokens 64] [--json FILE]

Chains: ids of `ngram`, one prompt at a time, and of plain decoding, eight rows at a time, greedy and at temperature
0.8 with a seed; they must be equal.
Trees: the accepted path lies *behind* another branch in every pass (the case where the CPU forward is not bit-exact);
each difference is judged by the near-tie rule, and generation goes on behind it, so that the rate is per token.
"""

import argparse
import json
import sys

from paceline import LLM, SamplingParams
from paceline.bench.prompts import load
from paceline.certify import Difference, differences
from paceline.models import load_model
from paceline.testing import ScriptedTree

WRONG = 6
"""Nodes of the wrong branch that lies first in the slots."""


def main() -> None:
    """Compare, print what differs, exit 1 when a chain differs or a difference is no near-tie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json")
    args = parser.parse_args()
    llm = LLM(args.model)
    reference = load_model(llm.source)
    half = args.num_prompts // 2
    prompts = [*load("humaneval")[: args.num_prompts - half], *load("mt-bench")[:half]]
    result = {"model": llm.source.name, "note": llm.source.note, "kernel": llm.target.kernel.name, "settings": []}
    failed = False
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=args.max_tokens)
        tokens, chains, found = 0, 0, list[Difference]()
        asked = [llm.chat_ids(prompt.messages()) for prompt in prompts]
        # Plain decoding takes eight rows at a time: that a row's ids do not depend on its neighbours is tried as well.
        plains = [out.token_ids for out in llm.generate(asked, params, speculative_config=None)]
        for i, (ids, plain) in enumerate(zip(asked, plains, strict=True)):
            ngram = llm.generate([ids], params, speculative_config={"method": "ngram"})[0].token_ids
            here = list(differences(reference, behind_a_branch(llm, ids, plain, params), ids, plain, params))
            tokens, chains, found = tokens + len(plain), chains + (plain == ngram), found + here
            print(f"T={temperature} {i + 1}/{len(prompts)} ngram {'equal' if plain == ngram else 'DIFFERS'},", end=" ")
            print(f"tree: {len(here)} of {len(plain)} tokens differ", *map(describe, here), flush=True)
        bugs = sum(not d.near_tie for d in found)
        failed |= chains < len(prompts) or bugs > 0
        result["settings"].append(
            {
                "temperature": temperature,
                "tokens": tokens,
                "prompts": len(prompts),
                "ngram_equal": chains,
                "tree_differing_per_1000": 1000 * len(found) / tokens,
                "near_ties": len(found) - bugs,
                "bugs": bugs,
            }
        )
    text = json.dumps(result)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    print(text)
    sys.exit(int(failed))


def behind_a_branch(llm: LLM, ids: list[int], expected: list[int], params: SamplingParams):  # type: ignore[no-untyped-def]
    """Generate with trees whose second branch holds the expected text and whose first one holds something else."""

    def script(text: list[int]) -> list[list[int]]:
        right = expected[len(text) - len(ids) :][:16]
        wrong = [(token + 1) % 1000 for token in right[:WRONG]]
        return [wrong, right] if right else []

    config = {"method": ScriptedTree(script)}

    def generate(prompt: list[int], most: int) -> list[int]:
        shorter = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=most)
        return llm.generate([prompt], shorter, speculative_config=config)[0].token_ids

    return generate


def describe(d: Difference) -> str:
    """One difference in a line."""
    verdict = "near-tie" if d.near_tie else "BUG"
    return (
        f"[{d.index}: {d.expected} {d.logit_expected:.3f} / {d.got} {d.logit_got:.3f}, floor {d.floor:.3f}: {verdict}]"
    )


if __name__ == "__main__":
    main()
