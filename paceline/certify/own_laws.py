"""A model's own next-token laws as a table, so that what speculation makes of them can be counted exactly."""

from collections.abc import Sequence

import torch
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
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def law(self, text: Sequence[int]) -> Float[Tensor, "V"]:
        """See `ToyTarget`; raw logits may lie anywhere, so they are made a law by softmax."""
        return self._row(tuple(text)).double().softmax(-1)

    def _row(self, text: tuple[int, ...]) -> Float[Tensor, "V"]:
        if text not in self._logits:
            self._logits[text] = read(self.target, text)
        return self._logits[text]

    def _states(
        self, texts: list[list[tuple[int, ...] | None]], found: Float[Tensor, "B N V"], taps: tuple[int, ...]
    ) -> Float[Tensor, "B N TH"]:
        """The model's own; a text that is read gives those of all its beginnings."""
        width = self.target.hidden_size * len(taps)
        states = torch.full((*found.shape[:2], width), torch.nan, dtype=self.target.dtype)
        places = [
            (text, row, slot) for row, own in enumerate(texts) for slot, text in enumerate(own) if text is not None
        ]
        for text, row, slot in sorted(places, key=lambda place: -len(place[0])):
            if (taps, text) not in self._known:
                size, cache = len(text), self.target.new_cache(1, len(text))
                seen = self.target.forward(
                    torch.tensor([text]), torch.arange(size)[None], None, cache, taps, logits=False
                )
                assert seen.hidden is not None
                for end in range(size):
                    self._known.setdefault((taps, text[: end + 1]), seen.hidden[0, end])
            states[row, slot] = self._known[taps, text]
        return states
