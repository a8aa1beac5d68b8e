"""The processes of a training: this one alone, or those that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from foretoken.core.errors import ConfigError
from foretoken.training.trainer import OneProcess, Processes

if TYPE_CHECKING:
    from torch import Tensor


class _Launched:
    """Processes that were started together."""

    def __init__(self) -> None:
        try:
            from accelerate import PartialState
        except ImportError as err:
            raise ConfigError(
                "training in several processes needs accelerate. Run in foretoken's repository: pip install '.[train]'."
            ) from err
        # Without this setting, accelerate would treat processes of torchrun without an accelerator as single ones: each
        # would train alone and write into the same directory.
        wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        state = PartialState(cpu=wants_cpu or not torch.accelerator.is_available())
        self.num_processes, self.process_index = state.num_processes, state.process_index

    def sum(self, tensor: Tensor) -> Tensor:
        from accelerate.utils import reduce

        total: Tensor = reduce(tensor, reduction="sum")
        return total


def training_processes() -> Processes:
    """Returns the processes of this run.

    Raises:
        ConfigError: When several were started and accelerate is not installed.
    """
    return _Launched() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else OneProcess()
