"""Answer many prompts: rows with settings of their own, several samples of one, and one that cannot be answered.

python examples/06_many_prompts.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    # Four rows run at once; a row that ends makes room for the next prompt.
    llm = LLM(model, max_num_seqs=4)
    prompts = [f"{i} + {i} =" for i in range(10)] + [""]
    params = [SamplingParams(temperature=0, max_tokens=4 + i) for i in range(len(prompts))]
    outs = llm.generate(prompts, params, progress=True)
    for prompt, out in zip(prompts, outs, strict=True):
        print(f"{prompt!r}: {out.error or out.text!r}")
    print(f"{sum(out.finish_reason == 'error' for out in outs)} of {len(outs)} failed")

    out = llm.generate(["The best colour is"], SamplingParams(n=3, seed=5, max_tokens=6))[0]
    for i, sample in enumerate(out.samples):
        print(f"sample {i}: {sample.text!r}")
    reused = sum(sample.stats.num_cached_tokens for sample in out.samples)
    print(f"the prompt was read once: {reused == 2 * (len(out.prompt_token_ids) - 1)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
