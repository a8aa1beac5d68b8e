"""torch's thread-local state, kept out of the engine: what one caller has switched on must not reach other requests."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CPU = torch.device("cpu")


@contextmanager
def own_torch_state() -> Iterator[None]:
    """Without the caller's autocast, inference mode and default device, whichever of them is on.

    An iteration serves the requests of all threads in the thread of one of them. Under its autocast their logits would
    round differently, on its default device their tensors would lie elsewhere, and what is kept from one iteration to
    the next would be inference tensors, which nothing may write to outside inference mode.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != _CPU:
            stack.enter_context(_CPU)
        yield
