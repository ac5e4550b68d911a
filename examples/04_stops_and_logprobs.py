"""End a text at a stop string, and look at how sure the model was of each token.

python examples/04_stops_and_logprobs.py [MODEL]
"""

import math
import sys

from paceline import LLM, SamplingParams

PROMPT = "Count: one, two, three, one, two, three, one, two, three,"


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model, speculative_config={"method": "ngram"})
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=2)
    free = llm.generate([PROMPT], params)[0]

    # The stop string may begin or end in the middle of a token; the text ends right before it.
    stop = free.text[len(free.text) // 2 :][:3]
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=2, stop=[stop])
    out = llm.generate([PROMPT], params)[0]
    print(f"text: {out.text!r}")
    print(f"ended by {out.stop_reason!r} ({out.finish_reason}): {free.text.startswith(out.text + stop)}")

    print(f"{len(out.logprobs)} log-probs for {len(out.token_ids)} tokens:")
    for token, found in zip(out.token_ids, out.logprobs, strict=True):
        chosen = found[token]
        others = ", ".join(repr(one.decoded_token) for i, one in found.items() if i != token)
        print(f"  {chosen.decoded_token!r}: {math.exp(chosen.logprob):.1%}, rank {chosen.rank}; or {others}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
