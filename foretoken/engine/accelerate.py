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
from foretoken.engine.llm import LLM
from foretoken.hf.accelerated_generate import NAME, AcceleratedGenerate
from foretoken.hf.generate_request import EngineLimits
from foretoken.hf.loading import wrap_model
from foretoken.hf.model_changes import model_structure

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from foretoken.core.results import StreamChunk
    from foretoken.drafters.base import Drafter, TargetHandle
    from foretoken.engine.requests import Request
    from foretoken.hf.generate_request import GenerateRequest
    from foretoken.hf.loading import LoadedModel


class Acceleration(BuiltPerProcess):
    """What `accelerate` did to a model; as a context manager it undoes that at the end of the block.

    Attributes:
        model: The accelerated model.
        is_released: Whether it was undone.
        last: Counts and seconds of the last call that the engine served, over all its rows: tokens per pass
            (`mean_acceptance_length`), `num_drafted`, `num_accepted`, `tokens_per_second` of a row, and `speedup` over
            plain decoding where the engine has measured that. None before the first call.
    """

    def __init__(self, model: Any, make: Callable[[], LLM]) -> None:
        """Makes the engine; make: over the model as it is when it is called."""
        self.model, self._make, self._lock = model, make, threading.Lock()
        self._llm: LLM | None = make()
        self._structure = model_structure(model)
        self.last: GenerationMetrics | None = None
        self.is_released = False

    @property
    def llm(self) -> LLM:
        """The engine; another one after something of the model was replaced, or another acceleration has ended."""
        with self._lock:
            structure = model_structure(self.model)
            if self._llm is None or structure != self._structure:
                self._llm = None  # whose memory the next one may need
                self._llm, self._structure = self._make(), structure
            return self._llm

    def rest(self) -> None:
        """Gives up the engine and its memory until the next call."""
        self._llm = None

    def limits(self) -> EngineLimits:
        """What the engine can take."""
        target = self.llm.target
        return EngineLimits(context_len=target.context_len, eos_ids=target.model.eos_ids)

    def stream(self, request: GenerateRequest) -> Generator[StreamChunk]:
        """Tokens as they come; raises `RequestError` when the request cannot be served."""
        llm = self.llm
        requests = llm.shared.requests.read(request.prompts, request.params)
        return self._counted(llm.chunks(requests), requests)

    def _counted(self, chunks: Generator[StreamChunk], requests: list[Request]) -> Generator[StreamChunk]:
        """Passes chunks on; at the end, also an early one, `last` says what the requests took."""
        try:
            with closing(chunks):
                yield from chunks
        finally:
            self.last = GenerationMetrics.total(each.metrics for request in requests for each in request.sequences)

    def release(self) -> None:
        """Undoes this acceleration: an earlier one that still holds serves again, else the model's own `generate`."""
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
    """What a call achieved, in a line."""
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

    Greedy output is what transformers writes, token for token, as far as both compute the same logits: where two
    tokens score nearly the same, their rounding decides, as it does between any two ways to compute one model. Sampled
    output has the distribution of transformers' warpers. Its random numbers are the engine's own, which
    `torch.manual_seed` and `transformers.set_seed` do not touch: pass `seed=N` here for calls that repeat themselves
    in their order.

    Calls that ask for something else (beam search, logits processors, scores, `inputs_embeds`, docs/dropins.md names
    all) are served by transformers as before, and the log says why, once for each reason. So are calls in training
    mode or under autocast.

    The model keeps its weights, which the engine shares, and everything else; `copy.deepcopy`, pickling, `state_dict`
    and `save_pretrained` are what they were, and copies have their own `generate`. Weights and buffers that are
    written to are noticed, but for writes through `.data`. After weights or modules were replaced, or a setting of one
    (an epsilon), the next call makes the engine anew. Models with forward hooks, or with a `forward` that was
    replaced, are served by transformers.

    Accelerations of one model may be nested: the last one serves, and its end gives the model back to the one before,
    whose engine rests meanwhile.

    Args:
        model: A transformers causal LM in memory.
        drafter: What `speculative_config` of `LLM` is ("ngram", "ngram+hass", a directory, a mapping), a smaller
            transformers causal LM with the same vocabulary, or a function that makes a drafter of your own. Heads and
            draft models are looked for beside the directory that the model was loaded from.
        tokenizer: For stop strings, and for drafters that read text.
        arguments: Further arguments of `LLM`: `seed`, `max_num_seqs`, `max_model_len`, `runner`, ...

    Returns:
        A context manager; `release(model)`, or its own `release()`, undoes what was done as well. Its `llm` is the
        engine, with `llm.get_metrics()`. Its `last` and its repr tell acceptance and speed-up of the last call.

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
    given = {"generation_config": "vllm", **given, **arguments}  # transformers has made its own of every request
    acceleration = Acceleration(model, lambda: LLM(model, **given))
    setattr(model, NAME, AcceleratedGenerate(model, acceleration, tokenizer))
    return acceleration


def release(model: Any) -> None:
    """Undoes all accelerations of a model; does nothing to others."""
    standing = vars(model).get(NAME)
    while isinstance(standing, AcceleratedGenerate):
        standing.engine.release()
        standing = standing.beneath


def _uncover(model: Any) -> None:
    """Takes accelerations that were released off a model, down to one that holds, or to its own `generate`."""
    standing = vars(model).get(NAME)
    while isinstance(standing, AcceleratedGenerate) and standing.engine.is_released:
        delattr(model, NAME)
        if getattr(model, NAME) != standing.beneath:  # it was set on the model before
            setattr(model, NAME, standing.beneath)
        standing = standing.beneath


def _drafter_arguments(drafter: Any) -> dict[str, Any]:
    """Arguments of `LLM` for any form of a drafter."""
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
    """Makes a drafter of a smaller model in memory."""

    def load(target: TargetHandle) -> LoadedModel:
        draft = wrap_model(module, name=type(module).__name__)
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the drafter has {draft.vocab_size} tokens and the model {target.vocab_size}. Expected the same "
                "vocabulary. Pass the draft model's directory with vocab_match in a speculative_config."
            )
        return draft

    return lambda: DraftModelDrafter(Options(method="draft_model"), load)
