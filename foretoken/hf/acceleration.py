"""`foretoken.hf.accelerate`: makes a transformers model's own `generate` speculative, and puts it back."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.core.checks import shown
from foretoken.core.errors import BuiltPerProcess, ConfigError, ModelError, RequestError, foreign_errors_as
from foretoken.core.records import GenerationMetrics
from foretoken.drafters.draft_model import DraftModelDrafter, Options
from foretoken.entrypoints.llm import LLM
from foretoken.hf.generate_request import Unserved, read_request, set_argument, set_field
from foretoken.models.borrowed import foreign_call, model_structure
from foretoken.models.loading import wrap_model

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from foretoken.core.results import StreamChunk
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.drafters.base import Drafter, TargetHandle
    from foretoken.entrypoints.requests import Request
    from foretoken.models.loaded import LoadedModel


_log = logging.getLogger(__name__)
NAME = "generate"
_Answer = TypeVar("_Answer")


class Acceleration(BuiltPerProcess):
    """The handle of an accelerated model; as a context manager it undoes the acceleration at the end of the block.

    Attributes:
        is_released: Whether the acceleration was undone.
        last: Counts and seconds of the last call that the engine served, over all its rows: tokens per pass
            (`mean_acceptance_length`), `num_drafted`, `num_accepted`, `tokens_per_second` of a row, and `speedup` over
            plain decoding where the engine has measured that. None before the first call.
    """

    def __init__(self, model: Any, make: Callable[[], LLM]) -> None:
        """Makes the engine; `make` builds an engine over the model in its present state."""
        self.model, self._make, self._lock = model, make, threading.Lock()
        self._llm: LLM | None = make()
        self._structure = model_structure(model)
        self.last: GenerationMetrics | None = None
        self.is_released = False

    @property
    def llm(self) -> LLM:
        """The engine; built anew after a part of the model was replaced, or after a nested acceleration ended."""
        with self._lock:
            structure = model_structure(self.model)
            if self._llm is None or structure != self._structure:
                self._llm = None  # frees its memory before the next engine is built
                self._llm, self._structure = self._make(), structure
            return self._llm

    def rest(self) -> None:
        """Frees the engine and its memory; the next call builds it anew."""
        self._llm = None

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Generator[StreamChunk]:
        """Yields tokens as they come; raises `RequestError` for a request that cannot be served."""
        llm = self.llm
        requests = llm.shared.requests.read(prompts, params)
        return self._counted(llm.chunks(requests), requests)

    def _counted(self, chunks: Generator[StreamChunk], requests: list[Request]) -> Generator[StreamChunk]:
        """Yields the chunks; sets `last` at the end, also when the caller stops early."""
        try:
            with closing(chunks):
                yield from chunks
        finally:
            self.last = GenerationMetrics.total(each.metrics for request in requests for each in request.sequences)

    def release(self) -> None:
        """Undoes this acceleration; the enclosing acceleration serves again, else the model's own `generate`."""
        self.is_released = True
        _uncover(self.model)

    def __repr__(self) -> str:
        llm = self._llm
        drafters = "no engine" if llm is None else ", ".join(drafter.name for drafter in llm.drafters)
        return f"<Acceleration of {type(self.model).__name__} with {drafters}; last call: {_summary(self.last)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _summary(metrics: GenerationMetrics | None) -> str:
    if metrics is None:
        return "none yet"
    speed = "plain decoding not measured" if metrics.speedup is None else f"{metrics.speedup:.2f}x plain decoding"
    return (
        f"{metrics.mean_acceptance_length:.2f} tokens a pass, {metrics.num_accepted} of {metrics.num_drafted} drafted "
        f"tokens accepted, {metrics.tokens_per_second:.1f} tokens/s a row, {speed}"
    )


def accelerate(
    model: Any,
    drafter: str | os.PathLike[str] | Mapping[str, Any] | torch.nn.Module | Callable[[], Drafter] = "ngram",
    tokenizer: Any = None,
    **arguments: Any,
) -> Acceleration:
    """Makes `model.generate(...)` speculative: the same arguments, results, streamers and stopping criteria.

    Greedy output is that of transformers, token for token. The two may differ only where two tokens score nearly the
    same, because the logits are rounded differently. Sampled output has the distribution of transformers' warpers. The
    engine has its own random numbers, which `torch.manual_seed` and `transformers.set_seed` do not change: pass
    `seed=N` here to repeat a series of calls.

    transformers still serves calls with beam search, logits processors, scores or `inputs_embeds` (docs/dropins.md
    lists all), calls in training mode and calls under autocast. The log gives each reason once.

    The engine shares the model's weights. `copy.deepcopy`, pickling, `state_dict` and `save_pretrained` work as
    before; copies have their own `generate`. The engine detects writes to weights and buffers, except through `.data`.
    After weights, modules or settings (such as an epsilon) were replaced, the next call builds the engine anew.
    transformers serves models with forward hooks or a replaced `forward`.

    Accelerations of one model may be nested. The innermost one serves; at its end the enclosing one serves again.

    Args:
        model: A transformers causal LM in memory.
        drafter: A `speculative_config` as `LLM` takes it ("ngram", "ngram+hass", a directory, a mapping), a smaller
            transformers causal LM with the same vocabulary, or a function that makes a drafter of your own. Heads and
            draft models are looked for beside the directory that the model was loaded from.
        tokenizer: For stop strings, and for drafters that read text.
        arguments: Further arguments of `LLM`: `seed`, `max_num_seqs`, `max_model_len`, `runner`, ...

    Returns:
        A handle and context manager; its `release()` and `release(model)` undo the acceleration too. `llm` is the
        engine, with `llm.get_metrics()`. `last` and the repr give acceptance and speed-up of the last call.

    Raises:
        ConfigError: When drafter or arguments do not fit.
        ModelError: When the model cannot be served.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, NAME):
        raise ConfigError(f"model is {shown(model)}. Expected a transformers causal LM in memory.")
    if isinstance(standing := vars(model).get(NAME), AcceleratedGenerate):
        standing.engine.rest()
    given: dict[str, Any] = {"allow_unknown_ids": True, "tokenizer": tokenizer, **_drafter_arguments(drafter)}
    given = {"generation_config": "vllm", **given, **arguments}  # transformers fills in sampling defaults
    acceleration = Acceleration(model, lambda: LLM(model, **given))
    if acceleration.llm.acceptance == "synthetic":
        raise ConfigError("accelerate keeps the output of generate, which synthetic acceptance does not. Use LLM.")
    setattr(model, NAME, AcceleratedGenerate(model, acceleration, tokenizer))
    return acceleration


def release(model: Any) -> None:
    """Undoes all accelerations of a model; does nothing if there are none."""
    standing = vars(model).get(NAME)
    while isinstance(standing, AcceleratedGenerate):
        standing.engine.release()
        standing = standing.beneath


def _uncover(model: Any) -> None:
    """Removes the released accelerations at the top of a model, down to an active one or its own `generate`."""
    standing = vars(model).get(NAME)
    while isinstance(standing, AcceleratedGenerate) and standing.engine.is_released:
        delattr(model, NAME)
        if getattr(model, NAME) != standing.beneath:  # an instance attribute, not the class's method
            setattr(model, NAME, standing.beneath)
        standing = standing.beneath


def _drafter_arguments(drafter: Any) -> dict[str, Any]:
    if isinstance(drafter, torch.nn.Module):
        return {"drafter": _drafts_with(drafter), "trust_drafter": True}
    if isinstance(drafter, str | os.PathLike | Mapping):
        return {"speculative_config": drafter}
    if callable(drafter):
        return {"drafter": drafter}
    raise ConfigError(
        f"drafter is {shown(drafter)}. Expected a speculative_config as LLM takes it, such as 'ngram+hass' or a "
        "directory, a transformers causal LM, or a function that makes a drafter."
    )


def _drafts_with(module: torch.nn.Module) -> Callable[[], Drafter]:
    def load(target: TargetHandle) -> LoadedModel:
        draft = wrap_model(module, name=type(module).__name__)
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the drafter has {draft.vocab_size} tokens and the model {target.vocab_size}. Expected the same "
                "vocabulary. Pass the draft model's directory with vocab_match in a speculative_config."
            )
        return draft

    return lambda: DraftModelDrafter(Options(method="draft_model"), load)


class AcceleratedGenerate:
    """Stands in for a model's `generate`; `beneath` is what it replaced, transformers' own or another acceleration.

    A copied or unpickled model has transformers' own.
    """

    def __init__(self, model: Any, engine: Acceleration, tokenizer: Any) -> None:
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
            self._warn_once(str(reason))
            return self.original(*args, **kwargs)
        return self.original(**{**given, **more, **changes, "custom_generate": self._decoder(given.get("streamer"))})

    def _changes(self, given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
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
        inputs = {name: value for name, value in more.items() if name not in ("tokenizer", "trust_remote_code")}
        with foreign_errors_as(Unserved, lambda _: "transformers refuses its arguments"):
            prepared: tuple[GenerationConfig, dict[str, Any]] = self._model._prepare_generation_config(config, **inputs)
        return prepared

    def _decoder(self, streamer: Any) -> Callable[..., Any]:
        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            try:
                target = self._asked(lambda: self.engine.llm.target)
                mask = model_kwargs.get("attention_mask")
                request = read_request(input_ids, mask, stopping_criteria, generation_config, target)
                chunks = self._asked(partial(self.engine.stream, *request))
            except Unserved as reason:
                self._warn_once(str(reason))
                return type(model)._sample(
                    model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                    generation_config=generation_config, streamer=streamer, **model_kwargs,
                )  # fmt: skip
            with closing(chunks):
                return replay(chunks, input_ids, stopping_criteria, generation_config, streamer)

        return decode

    @staticmethod
    def _asked(ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except (RequestError, ModelError, ConfigError) as err:
            raise Unserved(str(err)) from err

    def _warn_once(self, reason: str) -> None:
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
            _take_chunk(chunks, waiting)
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


def _take_chunk(chunks: Iterator[StreamChunk], waiting: list[deque[int]]) -> None:
    chunk = next(chunks, None)
    if chunk is None or chunk.finish_reason in ("error", "abort"):
        reason = "it was ended." if chunk is None or chunk.error is None else chunk.error
        raise RequestError(
            f"the engine could not go on with a row of generate(): {reason} Expected tokens. Call "
            "foretoken.hf.release(model) for transformers' own decoding."
        )
    waiting[chunk.prompt_index].extend(chunk.token_ids)
