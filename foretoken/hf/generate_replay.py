"""Tokens of several sequences, which come at different paces, handed out as transformers' own loop does: one a row.

Streamers and stopping criteria see what they see there, call by call, however many tokens a pass accepted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import GenerationConfig
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    from foretoken.core.results import StreamChunk


def replay(
    chunks: Iterator[StreamChunk],
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """What `generate` returns for tokens that an engine generates.

    Args:
        chunks: Of B sequences; `prompt_index` is the row.
        input_ids: (B, T) int64, the prompts with their padding.
        criteria: All that may end a row.
        config: As `read_request` takes it.
        streamer: Gets the tokens, one of each row at a time, or None.

    Raises:
        RequestError: When the engine could not go on with a row.
    """
    num_rows, device = input_ids.shape[0], input_ids.device
    pads_what_is_over = any(hasattr(each, "eos_token_id") for each in criteria)
    padding = config._pad_token_tensor
    pad = int(padding) if pads_what_is_over and padding is not None else 0
    waiting = [deque[int]() for _ in range(num_rows)]
    unfinished = torch.ones(num_rows, dtype=torch.bool, device=device)
    while bool(unfinished.any()):
        is_open = unfinished.tolist() if pads_what_is_over else [True] * num_rows
        while any(wanted and not tokens for wanted, tokens in zip(is_open, waiting, strict=True)):
            _take(chunks, waiting)
        column = [tokens.popleft() if wanted else pad for wanted, tokens in zip(is_open, waiting, strict=True)]
        tokens = torch.tensor(column, dtype=input_ids.dtype, device=device)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
        unfinished = unfinished & ~criteria(input_ids, None)
        if streamer is not None:
            streamer.put(tokens.cpu())
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return input_ids
    return GenerateDecoderOnlyOutput(sequences=input_ids)  # type: ignore[arg-type]  # their name for int64 tensors


def _take(chunks: Iterator[StreamChunk], waiting: list[deque[int]]) -> None:
    """Adds what an engine generated next to what waits to be handed out."""
    chunk = next(chunks, None)
    if chunk is None or chunk.finish_reason in ("error", "abort"):
        reason = "it was ended." if chunk is None or chunk.error is None else chunk.error
        raise RequestError(
            f"the engine could not go on with a row of generate(): {reason} Expected tokens. Call "
            "foretoken.hf.release(model) for transformers' own decoding."
        )
    waiting[chunk.prompt_index].extend(chunk.token_ids)
