"""Let look-ups and a draft model work together: at every step the guesses that bring the most tokens for their time.

python examples/11_compose.py [MODEL] [DRAFT_MODEL]
"""

import sys

from paceline import LLM, SamplingParams

PROMPTS = {
    "repeats": "Write this list again, with the numbers doubled: 1 apple, 2 pears, 3 plums, 4 figs, 5 dates.",
    "repeats nothing": "Write a short story about a lighthouse.",
}


def main(
    model: str = "qwen2.5-coder-1.5b-instruct-q4_k_m", draft_model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m"
) -> None:
    llm = LLM(model, speculative_config=None)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=32)
    configs = {
        "suffix": {"method": "suffix"},
        "draft_model": {"method": "draft_model", "model": draft_model},
        "both": {"method": "compose", "drafters": ["suffix", {"method": "draft_model", "model": draft_model}]},
    }
    for name, prompt in PROMPTS.items():
        ids = llm.chat_ids([{"role": "user", "content": prompt}])
        plain = llm.generate([ids], params)[0]
        for method, config in configs.items():
            out = llm.generate([ids], params, speculative_config=config)[0]
            length, seconds = out.stats.mean_acceptance_length, out.stats.time["draft"]
            same = out.token_ids == plain.token_ids
            print(f"{name}, {method}: {length:.2f} tokens per pass, {seconds:.2f} s of drafting, same text: {same}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
