"""Prove a drafter lossless, and see a lying one caught: every outcome is counted, and none is sampled.

Both drafters below guess from how often each token followed the pending one. The second takes the likeliest token and
still says that it was drawn. Under the default rule that changes nothing; under the others it changes the text.

    python examples/09_certify_a_drafter.py [MODEL]

With a MODEL the first drafter is certified on it as well, as `paceline certify MODEL --plugin` would.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from paceline import LLM, Drafter, TokenTree
from paceline.certify import certify
from paceline.certify.run import Named
from paceline.draft.base import Ask, Step
from paceline.testing import ToyTarget, check_drafter, exact_law
from paceline.tree import Drawn

PROMPTS = {
    "counting": "one two three four five six seven\n" * 2 + "one two",
    "code": "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
}


class Followers(Drafter[list[int]]):
    """Draws one guess from the tokens that have followed the pending one in this text, and says what it drew from."""

    def bind(self, target: Any) -> None:
        self.vocab_size = target.vocab_size

    def begin(self, prompt: Step) -> list[int]:
        return list(prompt.tokens)

    def observe(self, states: list[list[int]], steps: list[Step]) -> None:
        for text, step in zip(states, steps):
            text += step.tokens

    def propose(self, states: list[list[int]], asks: list[Ask]) -> list[TokenTree]:
        return [self._tree(text, ask) for text, ask in zip(states, asks)]

    def _tree(self, text: list[int], ask: Ask) -> TokenTree:
        counts = torch.zeros(self.vocab_size, dtype=torch.float64)
        for before, after in zip(text, [*text[1:], ask.pending]):
            counts[after] += before == ask.pending
        if not counts.any():
            return TokenTree.root(ask.pending)
        q = ask.law(counts.log(), ()).exp()  # under the request's own temperature and filters
        guess = self._guess(q, ask)
        return TokenTree(torch.tensor([ask.pending, guess]), torch.tensor([-1, 0]), Drawn.IID, torch.stack([q, q]))

    def _guess(self, q: Tensor, ask: Ask) -> int:
        return ask.draws.draft(q)


class Likeliest(Followers):
    """Takes the likeliest of them, and says that it was drawn: a slip that has been published more than once."""

    def _guess(self, q: Tensor, ask: Ask) -> int:
        return int(q.argmax())


def main(model: str | None = None) -> None:
    for drafter in (Followers, Likeliest):
        report = check_drafter(drafter)
        print(f"{drafter.__name__}: {len(report.failed)} of {len(report.checks)} checks failed")
        for check in report.checks:
            if not check.passed:
                print(f"  {check.name}: {check.detail}")
    print(f"Likeliest under coupled: {len(check_drafter(Likeliest, rules=('coupled',)).failed)} checks failed")

    toy, lying = ToyTarget.random(3, seed=1), Likeliest()
    lying.bind(toy)
    found = exact_law(toy, lying, "standard", length=3, prompt=[0, 1, 0, 1, 2, 0])
    text, probability, expected = found.worst
    print(f"{found.num_outcomes} outcomes, total variation {found.total_variation:.4f}", end="; ")
    print(f"{list(text)} has probability {probability:.4f} and should have {expected:.4f}")

    if model is not None:
        llm = LLM(model)
        prompts = [Named(name, list(llm.tokenizer(text).input_ids)) for name, text in PROMPTS.items()]
        certificate = certify(llm, {"method": Followers()}, prompts, mode="quick", progress=True)
        for layer in certificate.layers:
            print(f"{layer.name}: {layer.verdict} ({layer.strength}). {layer.detail}")
        print(f"verdict: {certificate.verdict}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
