"""`foretoken.hf.accelerate`: makes a transformers model's own `generate` speculative, and puts it back."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self

import torch

from foretoken.core.checks import shown
from foretoken.core.errors import BuiltPerProcess, ConfigError
from foretoken.core.results import GenerationMetrics
from foretoken.drafters.draft_model import DraftModelDrafter, Options
from foretoken.entrypoints.llm import LLM
from foretoken.hf.generate import NAME, AcceleratedGenerate
from foretoken.hf.generate_request import EngineLimits
from foretoken.models.loading import wrap_model
from foretoken.models.model_changes import model_structure

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from foretoken.core.results import StreamChunk
    from foretoken.drafters.base import Drafter, TargetHandle
    from foretoken.entrypoints.requests import Request
    from foretoken.hf.generate_request import GenerateRequest
    from foretoken.models.loading import LoadedModel


class Acceleration(BuiltPerProcess):
    """The handle of an accelerated model; as a context manager it undoes the acceleration at the end of the block.

    Attributes:
        model: The accelerated model.
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

    def limits(self) -> EngineLimits:
        """Returns the bounds of the engine."""
        target = self.llm.target
        return EngineLimits(context_len=target.context_len, eos_ids=target.model.eos_ids)

    def stream(self, request: GenerateRequest) -> Generator[StreamChunk]:
        """Yields tokens as they come; raises `RequestError` for a request that cannot be served."""
        llm = self.llm
        requests = llm.shared.requests.read(request.prompts, request.params)
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
    standing = vars(model).get(NAME)
    if isinstance(standing, AcceleratedGenerate):
        standing.engine.rest()
    given: dict[str, Any] = {"allow_unknown_ids": True, "tokenizer": tokenizer, **_drafter_arguments(drafter)}
    given = {"generation_config": "vllm", **given, **arguments}  # transformers fills in sampling defaults
    acceleration = Acceleration(model, lambda: LLM(model, **given))
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
