"""The `generate` of an accelerated model: transformers' own, with another decoding loop where an engine can serve.

transformers still reads the arguments, fills in defaults, checks, pads and warns; `custom_generate` is its hook for the
decoding loop.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import deque
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.core.errors import ConfigError, ModelError, RequestError, foreign_errors_as
from foretoken.hf.generate_request import EngineLimits, GenerateRequest, Unserved, read_request, set_argument, set_field
from foretoken.models.model_changes import foreign_call

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch import nn
    from transformers import GenerationConfig

    from foretoken.core.results import StreamChunk


def replay(
    chunks: Iterator[StreamChunk],
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Returns the result of `generate` for tokens of an engine.

    Args:
        chunks: Chunks of B sequences; `prompt_index` is the row.
        input_ids: (B, T) int64, the prompts with their padding.
        criteria: All stopping criteria.
        config: As `read_request` takes it.
        streamer: Gets the tokens, one of each row at a time; None for no streamer.

    Raises:
        RequestError: When the engine could not finish a row.
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
    """Adds the next tokens of the engine to the waiting ones."""
    chunk = next(chunks, None)
    if chunk is None or chunk.finish_reason in ("error", "abort"):
        reason = "it was ended." if chunk is None or chunk.error is None else chunk.error
        raise RequestError(
            f"the engine could not go on with a row of generate(): {reason} Expected tokens. Call "
            "foretoken.hf.release(model) for transformers' own decoding."
        )
    waiting[chunk.prompt_index].extend(chunk.token_ids)


_log = logging.getLogger(__name__)
NAME = "generate"
_Answer = TypeVar("_Answer")


class GenerateEngine(Protocol):
    """An engine that serves `generate`."""

    is_released: bool

    def rest(self) -> None:
        """Frees the engine's memory until the next call."""
        ...

    def release(self) -> None:
        """Undoes the acceleration."""
        ...

    def limits(self) -> EngineLimits:
        """Returns the limits of the engine for the present model."""
        ...

    def stream(self, request: GenerateRequest) -> Generator[StreamChunk]:
        """Yields chunks; raises `RequestError` before the first if it cannot serve the request."""
        ...


class AcceleratedGenerate:
    """Replaces a model's `generate`; a copied or unpickled model has the original one.

    Attributes:
        beneath: The replaced bound method: transformers' own, or an enclosing acceleration.
        original: transformers' own bound method.
        engine: Serves the calls.
    """

    def __init__(self, model: Any, engine: GenerateEngine, tokenizer: Any) -> None:
        self.beneath: Callable[..., Any] = getattr(model, NAME)
        self.original: Callable[..., Any] = getattr(self.beneath, "original", self.beneath)
        self._model, self.engine, self._tokenizer = model, engine, tokenizer
        self._told: set[str] = set()
        functools.update_wrapper(self, self.original)

    def __reduce__(self) -> Any:
        """Returns the original method of the model's copy."""
        return getattr, (self._model, NAME)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers' `generate`."""
        try:
            given = inspect.signature(self.original).bind(*args, **kwargs).arguments
        except TypeError:
            return self.original(*args, **kwargs)  # raises transformers' own error
        more = given.pop("kwargs", {})
        try:
            changes = self._changes(given, more)
        except Unserved as reason:
            self._tell(str(reason))
            return self.original(*args, **kwargs)
        return self.original(**{**given, **more, **changes, "custom_generate": self._decoder(given.get("streamer"))})

    def _changes(self, given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments that the hook changes; raises `Unserved` if transformers has to serve the call."""
        _check_state(self._model)
        tokenizer = more.get("tokenizer") or self._tokenizer
        config, others = self._prepared(given.get("generation_config"), more)
        argument = set_argument({**given, **others})
        if argument is not None:
            raise Unserved(f"the argument {argument} is transformers' own")
        field = set_field(config)
        if field is not None:
            raise Unserved(f"{field} is transformers' own")
        if config.stop_strings is None or tokenizer is None:
            return {}
        # The hook would lose the tokenizer, so the criterion that transformers makes with it is made here.
        criteria = StoppingCriteriaList(given.get("stopping_criteria") or ())
        if not any(type(each) is StopStringCriteria for each in criteria):
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
        return {"stopping_criteria": criteria, "stop_strings": None}

    def _prepared(
        self, config: GenerationConfig | None, more: dict[str, Any]
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Returns the full configuration and the other keywords; raises `Unserved` if transformers refuses them."""
        inputs = {name: value for name, value in more.items() if name not in ("tokenizer", "trust_remote_code")}
        with foreign_errors_as(Unserved, lambda _: "transformers refuses its arguments"):
            prepared: tuple[GenerationConfig, dict[str, Any]] = self._model._prepare_generation_config(config, **inputs)
        return prepared

    def _decoder(self, streamer: Any) -> Callable[..., Any]:
        """Returns the replacement of the decoding loop; transformers calls it with prepared arguments."""

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            try:
                request = read_request(
                    input_ids, model_kwargs.get("attention_mask"), stopping_criteria, generation_config,
                    self._asked(self.engine.limits),
                )  # fmt: skip
                chunks = self._asked(partial(self.engine.stream, request))
            except Unserved as reason:
                self._tell(str(reason))
                return type(model)._sample(
                    model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                    generation_config=generation_config, streamer=streamer, **model_kwargs,
                )  # fmt: skip
            with closing(chunks):
                return replay(chunks, input_ids, stopping_criteria, generation_config, streamer)

        return decode

    @staticmethod
    def _asked(ask: Callable[[], _Answer]) -> _Answer:
        """Calls the engine; raises `Unserved` if it cannot serve the request or the present model."""
        try:
            return ask()
        except (RequestError, ModelError, ConfigError) as err:
            raise Unserved(str(err)) from err

    def _tell(self, reason: str) -> None:
        """Logs once for each reason why transformers serves a call."""
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("generate() is served by transformers, without speculation: %s", reason.rstrip("."))


def _check_state(model: nn.Module) -> None:
    """Raises `Unserved` if a mode or hook changes what the model computes, but not what the engine computes."""
    if model.training:
        raise Unserved("the model is in training mode; model.eval() ends it")
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        raise Unserved("autocast is on")
    call = foreign_call(model)
    if call is not None:  # the hook would see other passes than those of transformers
        raise Unserved(call)
