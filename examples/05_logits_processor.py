"""Steer the model with a logits processor that keeps a state; speculation calls it for kept positions alone.

python examples/05_logits_processor.py [MODEL]
"""

import sys

import torch
from transformers import LogitsProcessor

from paceline import LLM, SamplingParams

PROMPT = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"


class NoTokenMoreThanTwice(LogitsProcessor):
    """Bans a token once it was written twice. It counts as it goes, so it must see every token once, in order."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt, self.counts, self.calls = num_prompt, {}, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if input_ids.shape[1] > self.num_prompt:
            last = int(input_ids[0, -1])
            self.counts[last] = self.counts.get(last, 0) + 1
        worn = [token for token, count in self.counts.items() if count >= 2]
        return scores.index_fill(1, torch.tensor(worn, dtype=torch.int64), -torch.inf)


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model)
    ids = list(llm.tokenizer(PROMPT).input_ids)
    outs = {}
    for method in ("ngram", "none"):
        processor = NoTokenMoreThanTwice(len(ids))
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logits_processors=[processor])
        outs[method] = out = llm.generate([ids], params, speculative_config={"method": method})[0]
        print(f"{method}: {processor.calls} calls for {len(out.token_ids)} tokens", end=", ")
        print(f"{out.stats.num_target_passes} passes")
    most = max(outs["ngram"].token_ids.count(token) for token in outs["ngram"].token_ids)
    print(f"no token more than {most} times; same text: {outs['ngram'].text == outs['none'].text}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
