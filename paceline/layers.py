"""Some of a model's layers, run by the model's own code: up to a layer, and on from there with the kept states.

    layers 0 … E-1, then final norm and head     logits of an early exit, and the states behind layer E-1
    layers E … L-1 with those states             the whole model's logits; nothing is read twice

For the time of a pass the other layers are replaced by stand-ins, so positions, masks, rotary tables and whatever else
the model prepares per layer stay the model's business.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import UnsupportedModel


class _StandIn(nn.Module):
    """Takes a layer's place and gives back `states`, or what it was given where there are none.

    Models ask their layers for settings (the kind of attention, say), which are the replaced layer's.
    """

    def __init__(self, layer: nn.Module, states: Tensor | None = None) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that it is no submodule
        self.states = states
        self.given: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.given = hidden_states
        return hidden_states if self.states is None else self.states

    def __getattr__(self, name: str) -> Any:
        replaced: list[nn.Module] = self.__dict__["_layer"]
        return getattr(replaced[0], name)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's layers.

    Raises:
        UnsupportedModel: there is no such list, or more than one.
    """
    count = int(model.config.get_text_config().num_hidden_layers)
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} holds its {count} layers in {len(found)} lists; they cannot be run apart"
        )
    return found[0]


class Part:
    """What a pass over some layers left behind."""

    states: Tensor
    """[B, N, H]: behind the last layer that ran, before the final norm; where that is the model's last layer, nothing
    is noted."""


@contextmanager
def only(layers: nn.ModuleList, first: int, last: int, states: Tensor | None) -> Iterator[Part]:
    """Inside, the model runs its layers `first` to `last` - 1 alone.

    Args:
        states: [B, N, H] behind layer `first` - 1; needed unless `first` is 0.
    """
    own, part = list(layers), Part()
    skipped = {i: _StandIn(own[i], states if i < first else None) for i in range(len(own)) if not first <= i < last}
    try:
        for i, stand_in in skipped.items():
            layers[i] = stand_in
        yield part
        if last < len(own):
            given = skipped[last].given
            assert given is not None, "the model ran to its end"
            part.states = given
    finally:
        for i in skipped:
            layers[i] = own[i]
