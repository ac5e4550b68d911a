"""A drafter of your own: guess that each token is followed by what followed it the last time.

A drafter only ever proposes. Whatever it says, the text stays the model's own; a bad one costs time, not truth.

    python examples/03_write_a_drafter.py [MODEL]
"""

import sys

from paceline import LLM, Drafter, SamplingParams, TokenTree
from paceline.draft.base import Ask, Step

PROMPT = "one two three four five six seven eight nine ten\n" * 2 + "one two"

Successors = dict[int, int]
"""The state of one sequence: for every token seen, the token that came after it."""


class LastSuccessor(Drafter[Successors]):
    """Follows the last known successor of each token, up to ``depth`` tokens ahead."""

    def __init__(self, depth: int = 4) -> None:
        self.depth = depth

    def begin(self, prompt: Step) -> Successors:
        return dict(zip(prompt.tokens, prompt.following))

    def propose(self, states: list[Successors], asks: list[Ask]) -> list[TokenTree]:
        return [TokenTree.chain(ask.pending, self._follow(state, ask)) for state, ask in zip(states, asks)]

    def observe(self, states: list[Successors], steps: list[Step]) -> None:
        for state, step in zip(states, steps):
            state.update(zip(step.tokens, step.following))

    def _follow(self, state: Successors, ask: Ask) -> list[int]:
        token, guesses = ask.pending, list[int]()
        while token in state and len(guesses) < min(self.depth, ask.budget):
            token = state[token]
            guesses.append(token)
        return guesses


def main(model: str = "qwen2.5-coder-0.5b-instruct-q4_k_m") -> None:
    llm = LLM(model, speculative_config={"method": LastSuccessor()})
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=48)

    mine = llm.generate([PROMPT], params)[0]
    plain = llm.generate([PROMPT], params, speculative_config=None)[0]

    print(mine.text)
    print(f"\nsame text without speculation: {mine.text == plain.text}")
    print(f"{mine.stats.num_target_passes} passes instead of {plain.stats.num_target_passes}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
