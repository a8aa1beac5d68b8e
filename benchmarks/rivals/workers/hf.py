"""Hugging Face transformers: `generate`, prompt lookup and assisted generation, eager, with its defaults."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.workers.serve import ChunkClock, median_seconds, serve

_LOOKUP_TOKENS = 10  # what transformers' own documentation uses


class ClockStreamer(BaseStreamer):
    """Hands chunks to the clock; the first call has the prompt."""

    def __init__(self, clock: ChunkClock) -> None:
        self._clock, self._had_prompt = clock, False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then each pass's tokens."""
        if self._had_prompt:
            self._clock.add(value.numel())
        self._had_prompt = True

    def end(self) -> None:
        """Nothing is left to flush."""


class HuggingFace:
    """The target as transformers runs it.

    Options are `generate`'s keyword arguments.
    """

    def load(self, request: LoadRequest) -> Loaded:
        """Loads the model with the attention that transformers chooses."""
        torch.set_num_threads(request.threads)
        self._model = _load(request.model, request.dtype)
        self._arguments: dict[str, Any] = {}
        if request.mode == "prompt_lookup":
            self._arguments["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        if request.mode == "assisted":
            assert request.draft_model is not None, "the comparison gives assisted generation a draft model"
            self._arguments["assistant_model"] = _load(request.draft_model, request.dtype)
        self._arguments |= request.options
        return Loaded(
            versions={name: version(name) for name in ("transformers", "torch")},
            can_forward=request.mode == "generate",
            model_bytes=self._model.get_memory_footprint(),
        )

    def generate(self, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Generation:
        """Decodes with `generate`; a streamer tells when tokens come."""
        clock = ChunkClock()
        ids = torch.tensor([prompt_ids])
        how: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            torch.manual_seed(seed)
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}  # top_k is 50 by default
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                streamer=ClockStreamer(clock),
                **{**how, **self._arguments},
            )
        return clock.finish(output[0, len(prompt_ids) :].tolist())

    def forward(self, width: int, context: int, repeats: int) -> float:
        """A pass over a `DynamicCache`, cropped back after each."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(torch.ones(1, context, dtype=torch.int64), past_key_values=cache, logits_to_keep=1)
            return median_seconds(
                lambda: self._model(torch.tensor([[1] * width]), past_key_values=cache),
                repeats,
                undo=lambda: cache.crop(-width),
            )


def _load(model: str, dtype: str) -> Any:
    """A model that never stops early."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    loaded.eval()
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded


if __name__ == "__main__":
    serve(HuggingFace())
