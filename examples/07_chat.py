"""A chat of two turns: the second one reads only what is new.

python examples/07_chat.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model)
    params = SamplingParams(temperature=0, max_tokens=32)
    messages = [{"role": "user", "content": "Name three prime numbers."}]
    for question in ("And three more?", None):
        out = llm.chat(messages, params)
        read = len(out.prompt_token_ids) - out.stats.num_cached_tokens
        print(f"{out.text!r}\n  {len(out.prompt_token_ids)} prompt tokens, {read} of them read")
        messages += [{"role": "assistant", "content": out.text}, {"role": "user", "content": question}]


if __name__ == "__main__":
    main(*sys.argv[1:2])
