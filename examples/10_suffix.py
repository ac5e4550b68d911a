"""Copy what the text has said before: an edit of a function costs a fraction of the passes.

python examples/10_suffix.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams

PROMPT = """Rename the argument `a` to `left` and `b` to `right`. Answer with the whole function, nothing else.

```python
def merge(a: list[int], b: list[int]) -> list[int]:
    merged = []
    while a and b:
        merged.append(a.pop(0) if a[0] <= b[0] else b.pop(0))
    return merged + a + b
```"""


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model, speculative_config={"method": "suffix"})
    params = SamplingParams(temperature=0, max_tokens=96)
    fast = llm.chat([{"role": "user", "content": PROMPT}], params)
    plain = llm.chat([{"role": "user", "content": PROMPT}], params, speculative_config=None)
    print(fast.text)
    passes = fast.stats.num_target_passes, plain.stats.num_target_passes
    print(f"{passes[0]} passes instead of {passes[1]}, same text: {fast.text == plain.text}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
