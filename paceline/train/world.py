"""One process or several: who makes what, and sums over all of them.

Several processes come from a launcher that sets WORLD_SIZE, such as `accelerate launch -m paceline train …`; they share
the output folder.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch import Tensor

from paceline.errors import BadRequest

__all__ = ["World"]


class World:
    """This process among all that train the same head."""

    def __init__(self) -> None:
        self.size, self.rank = 1, 0
        self._accelerator: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return
        try:
            from accelerate import Accelerator
            from accelerate.utils import InitProcessGroupKwargs
        except ImportError as error:
            raise BadRequest(
                "several processes train together through accelerate, which is not installed: "
                "pip install 'paceline[train]'"
            ) from error
        # One of them may make data for hours while the others wait.
        kwargs = InitProcessGroupKwargs(timeout=timedelta(days=7))
        self._accelerator = Accelerator(kwargs_handlers=[kwargs])
        self.size, self.rank = self._accelerator.num_processes, self._accelerator.process_index

    @property
    def is_main(self) -> bool:
        """Whether this one writes, measures and speaks."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all have come so far."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor becomes the sum of its like in all processes."""
        if self._accelerator is not None:
            for tensor in tensors:
                tensor.copy_(self._accelerator.reduce(tensor, "sum"))

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        if self._accelerator is None:
            return flag
        import torch

        found = torch.tensor([float(flag)], device=self._accelerator.device)
        return bool(self._accelerator.reduce(found, "sum").item())
