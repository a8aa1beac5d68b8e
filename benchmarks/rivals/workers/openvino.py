"""OpenVINO GenAI on CPU: plain decoding, prompt lookup and a draft model; raw infer requests for single passes."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.workers.converted import converted_path
from benchmarks.rivals.workers.serve import ChunkClock, median_seconds, serve

if TYPE_CHECKING:
    from pathlib import Path

_SHORT_NAMES = {"bfloat16": "bf16", "float32": "f32"}
_ASSISTANT_TOKENS = 5  # OpenVINO's own examples
_LOOKUP_NGRAM = 3


class OpenVino:
    """GenAI's pipeline over an exported model.

    Options are device properties, `num_assistant_tokens` and `max_ngram_size` excepted, which go to the generation
    configuration.
    """

    def load(self, request: LoadRequest) -> Loaded:
        """Exports the weights unless that was done before, and compiles them."""
        self._dtype, options = request.dtype, dict(request.options)
        self._folder = _exported(request.model, request)
        self._properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": request.threads,
            "INFERENCE_PRECISION_HINT": _SHORT_NAMES[request.dtype],
            "KV_CACHE_PRECISION": _SHORT_NAMES[request.dtype],  # u8 unless told otherwise
            "PERFORMANCE_HINT": "LATENCY",
        }
        config: Any = openvino_genai.GenerationConfig()
        config.ignore_eos = True
        if request.mode != "plain":
            config.num_assistant_tokens = options.pop("num_assistant_tokens", _ASSISTANT_TOKENS)
        if request.mode == "prompt_lookup":
            config.max_ngram_size = options.pop("max_ngram_size", _LOOKUP_NGRAM)
        self._config = config
        self._properties |= options
        self._pipeline = openvino_genai.LLMPipeline(str(self._folder), "CPU", **self._properties, **self._how(request))
        self._request: Any = None
        return Loaded(
            versions={name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")},
            can_forward=request.mode == "plain",
        )

    def generate(self, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Generation:
        """Decodes; GenAI's own metrics tell when tokens came."""
        config = self._config
        config.max_new_tokens, config.do_sample = max_tokens, temperature > 0
        if config.do_sample:
            config.temperature, config.rng_seed, config.top_p = temperature, seed, 1.0
        clock = ChunkClock()
        result = self._pipeline.generate(openvino.Tensor(np.array([prompt_ids], dtype=np.int64)), config)
        tokens = list(result.tokens[0])
        raw = result.perf_metrics.raw_metrics
        for milliseconds, num_tokens in zip(raw.m_new_token_times, raw.m_batch_sizes, strict=True):
            clock.add(num_tokens, at=milliseconds / 1000)
        return clock.finish(tokens)

    def forward(self, width: int, context: int, repeats: int) -> float:
        """The exported stateful model itself, outside of GenAI; its state is set back after each pass."""
        if self._request is None:
            model = openvino.Core().read_model(self._folder / "openvino_model.xml")
            self._request = openvino.compile_model(model, "CPU", self._properties).create_infer_request()
        request = self._request

        def run(width: int, context: int) -> None:
            request.infer(_inputs(width, context), share_inputs=True, share_outputs=True)

        request.reset_state()
        run(context, 0)
        states = [(state, openvino.Tensor(np.copy(state.state.data))) for state in request.query_state()]

        def undo() -> None:
            for state, saved in states:
                state.state = saved

        return median_seconds(lambda: run(width, context), repeats, undo=undo)

    def _how(self, request: LoadRequest) -> dict[str, Any]:
        """What a pipeline is told about its mode."""
        scheduler: Any = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = request.max_len + 1  # a prompt in one pass, as GenAI's own latency setting
        scheduler.enable_prefix_caching = False  # a repeated prompt is to cost what a new one costs
        # A scheduler asks for paged attention; the other backend has neither.
        is_paged = self._properties.get("ATTENTION_BACKEND") != "SDPA"
        arguments: dict[str, Any] = {"scheduler_config": scheduler} if is_paged else {}
        if request.mode == "prompt_lookup":
            arguments["prompt_lookup"] = True
        if request.mode == "draft_model":
            assert request.draft_model is not None, "the comparison gives this mode a draft model"
            folder = _exported(request.draft_model, request)
            arguments["draft_model"] = openvino_genai.draft_model(str(folder), "CPU", **self._properties)
        return arguments


def _inputs(width: int, context: int) -> dict[str, Any]:
    """Inputs of a pass over `width` tokens behind `context` cached ones."""
    return {
        "input_ids": np.ones((1, width), dtype=np.int64),
        "attention_mask": np.ones((1, context + width), dtype=np.int64),
        "position_ids": np.arange(context, context + width, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }


def _exported(model: str, request: LoadRequest) -> Path:
    """The model in OpenVINO's format, weights in the precision asked for, made once; with its tokenizer."""
    folder = converted_path(request.cache_dir, model, request.dtype, "-openvino")
    if folder.exists():
        return folder
    import openvino_tokenizers  # exporting takes seconds to import and happens once
    import torch
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    temporary = folder.with_suffix(".tmp")
    exported = OVModelForCausalLM.from_pretrained(
        model, export=True, compile=False, load_in_8bit=False, torch_dtype=getattr(torch, request.dtype)
    )
    exported.save_pretrained(temporary)
    converted = openvino_tokenizers.convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for kind, part in zip(("tokenizer", "detokenizer"), converted, strict=True):
        openvino.save_model(part, temporary / f"openvino_{kind}.xml")
    temporary.rename(folder)
    return folder


if __name__ == "__main__":
    serve(OpenVino())
