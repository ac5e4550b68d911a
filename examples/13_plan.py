"""Ask before speculating: what a pass costs here, what a drafter brings on these prompts, what to expect.

python examples/13_plan.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.plan import make_plan

PROMPTS = [
    "Write the numbers from 1 to 20, one on each line.",
    "Name five rivers and five cities, as two lists.",
]


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model, speculative_config=None, reuse_prefix=False)
    ids = [llm.chat_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    plan = make_plan(llm, ids, methods=["ngram", "suffix"], max_tokens=32)
    for choice in plan.choices:
        print(f"{choice.method:8} {choice.num_draft_tokens:3} nodes: {choice.predicted_speedup:.2f}x expected")
    print(f"take {plan.choice.method}: {plan.reason}")

    path = Path(tempfile.mkdtemp()) / "plan.json"
    plan.write(path)
    params = SamplingParams(temperature=0, max_tokens=32)
    planned = llm.generate(ids, params, speculative_config={"method": "auto", "plan": str(path)})
    plain = llm.generate(ids, params, speculative_config=None)
    print("same text:", [one.text for one in planned] == [one.text for one in plain])


if __name__ == "__main__":
    main(*sys.argv[1:2])
