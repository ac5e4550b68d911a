"""Generate with prompt lookup, and see how many tokens each pass over the model brought.

python examples/01_generate.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams

PROMPT = '''def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def subtract(a: int, b: int) -> int:
'''


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model, speculative_config={"method": "ngram"})
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=48)

    drafted = llm.generate([PROMPT], params)[0]
    plain = llm.generate([PROMPT], params, speculative_config=None)[0]

    print(drafted.text)
    print(f"\nsame text without speculation: {drafted.text == plain.text}")
    for name, out in (("ngram", drafted), ("plain", plain)):
        stats = out.stats
        print(f"{name}: {len(out.token_ids)} tokens in {stats.num_target_passes} passes", end=", ")
        print(f"{stats.mean_acceptance_length:.2f} tokens per pass")


if __name__ == "__main__":
    main(*sys.argv[1:2])
