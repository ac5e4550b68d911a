"""A model's own next-token laws as a table, so that what speculation makes of them can be counted exactly."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from paceline.target import HFTarget
from paceline.testing.exact import read
from paceline.testing.toy import ToyTarget


class OwnLaws(ToyTarget):
    """Answers with the raw logits that a model gives for a text read plainly: no tree, each text once.

    Prompts and drafts are read from the cache and the mask as any `ToyTarget` reads them. With settings that leave few
    tokens (`top_k=2`), `exact_law` enumerates a real drafter on a real model.
    """

    def __init__(self, target: HFTarget) -> None:
        super().__init__(lambda text: (), target.vocab_size, max_positions=target.max_positions)
        self.target = target

    def law(self, text: Sequence[int]) -> Float[Tensor, "V"]:
        """See `ToyTarget`; raw logits may lie anywhere, so they are made a law by softmax."""
        return self._row(tuple(text)).double().softmax(-1)

    def _row(self, text: tuple[int, ...]) -> Float[Tensor, "V"]:
        if text not in self._logits:
            self._logits[text] = read(self.target, text)
        return self._logits[text]
