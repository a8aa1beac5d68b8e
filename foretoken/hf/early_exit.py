"""Ends passes of a transformers model after some of its blocks: final norm and LM head follow at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ModelError, PassError
from foretoken.hf.parts import target_parts
from foretoken.hf.plugin import ForwardPass, current_pass
from foretoken.hf.taps import find_blocks, find_final_norm, first_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from foretoken.hf.loading import LoadedModel


class _ExitError(Exception):
    """Carries (1, M, D), what the last block that runs gives, out of the model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class EarlyExit:
    """Hooks on the blocks of a model, and what stands behind the last one."""

    def __init__(self, model: LoadedModel) -> None:
        """Places the hooks.

        Raises:
            ModelError: When the blocks or the final norm cannot be told.
        """
        self._model = model
        blocks = find_blocks(model.module, model.num_layers)
        self._norm, self._lm_head = find_final_norm(model.module, blocks), target_parts(model).lm_head
        for index, block in enumerate(blocks):
            block.register_forward_hook(_exit_after(index + 1))

    def logits(self, arguments: dict[str, Any], forward_pass: ForwardPass, rows: Tensor | None) -> Tensor | None:
        """What the model says after the first `ForwardPass.num_layers` blocks, while that pass is the current one.

        Args:
            arguments: Of the model's forward.
            forward_pass: The pass.
            rows: (R,) int64, the tokens asked for; None for keys and values alone.

        Returns:
            (R, V), or None without rows.

        Raises:
            PassError: When the model has fewer blocks.
        """
        wanted = forward_pass.num_layers
        if wanted is None or wanted > self._model.num_layers:
            raise PassError(f"the pass goes through {wanted} blocks, of which there are {self._model.num_layers}.")
        try:
            self._model.backbone(**arguments)
        except _ExitError as end:
            return None if rows is None else self._lm_head(self._norm(end.hidden[0][rows]))
        raise ModelError(f"{type(self._model.module).__name__} does not run its blocks one after another.")


def _exit_after(number: int) -> Callable[[Any, Any, Any], None]:
    """A hook on the block that is the `number`-th, from 1 on."""

    def hook(module: Any, args: Any, output: Any) -> None:
        del module, args
        forward_pass = current_pass()
        if forward_pass is not None and forward_pass.num_layers == number:
            raise _ExitError(first_output(output))

    return hook
