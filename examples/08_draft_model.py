"""Let a smaller model of the same family draft, as a chain and as a tree.

python examples/08_draft_model.py [MODEL] [DRAFT_MODEL]
"""

import sys

from paceline import LLM, SamplingParams

PROMPT = "Write a short story about a lighthouse."


def main(
    model: str = "qwen2.5-coder-1.5b-instruct-q4_k_m", draft_model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m"
) -> None:
    llm = LLM(model, speculative_config=None)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=32)
    prompt = llm.chat_ids([{"role": "user", "content": PROMPT}])
    plain = llm.generate([prompt], params)[0]
    print(plain.text)
    chain = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": 3}
    for name, config in (("chain", chain), ("tree", {**chain, "tree_top_k": 3})):
        out = llm.generate([prompt], params, speculative_config=config)[0]
        print(f"{name}: {out.stats.mean_acceptance_length:.2f} tokens per pass", end=", ")
        print(f"same text: {out.text == plain.text}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
