"""OpenVINO GenAI on CPU: plain decoding, prompt lookup, a draft model, EAGLE-3; infer requests for single passes."""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.workers.converted import converted_path, stored_bytes
from benchmarks.rivals.workers.serve import ChunkClock, median_seconds, serve

_SHORT_NAMES = {"bfloat16": "bf16", "float32": "f32"}
_ASSISTANT_TOKENS = 5  # OpenVINO's own examples
_LOOKUP_NGRAM = 3
# Arguments of `OVWeightQuantizationConfig`. The exporter's defaults: embedding and LM head stay in 8 bits beside int4.
_COMPRESSIONS: dict[str, dict[str, Any]] = {
    "int8_asym": {"bits": 8, "sym": False},
    "int4_asym": {"bits": 4, "sym": False, "group_size": 128, "ratio": 1.0, "group_size_fallback": "adjust"},
}
_MODEL = "openvino_model"


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
        arguments, draft_folder = self._how(request)
        self._pipeline = openvino_genai.LLMPipeline(str(self._folder), "CPU", **self._properties, **arguments)
        self._request: Any = None
        return Loaded(
            versions={name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")},
            can_forward=request.mode == "plain",
            model_bytes=stored_bytes(self._folder / f"{_MODEL}.bin"),
            draft_bytes=stored_bytes(draft_folder / f"{_MODEL}.bin") if draft_folder else None,
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
            model = openvino.Core().read_model(self._folder / f"{_MODEL}.xml")
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

    def _how(self, request: LoadRequest) -> tuple[dict[str, Any], Path | None]:
        """What a pipeline is told about its mode, and the folder of a draft model."""
        scheduler: Any = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = request.max_len + 1  # a prompt in one pass, as GenAI's own latency setting
        scheduler.enable_prefix_caching = False  # a repeated prompt is to cost what a new one costs
        # A scheduler asks for paged attention; the other backend has neither.
        is_paged = self._properties.get("ATTENTION_BACKEND") != "SDPA"
        arguments: dict[str, Any] = {"scheduler_config": scheduler} if is_paged else {}
        if request.mode == "prompt_lookup":
            arguments["prompt_lookup"] = True
        if request.mode not in ("draft_model", "eagle3"):
            return arguments, None
        assert request.draft_model is not None, "the comparison gives these modes a draft model or head"
        folder = _exported(request.draft_model, request, is_head=request.mode == "eagle3")
        arguments["draft_model"] = openvino_genai.draft_model(str(folder), "CPU", **self._properties)
        return arguments, folder


def _inputs(width: int, context: int) -> dict[str, Any]:
    """Inputs of a pass over `width` tokens behind `context` cached ones."""
    return {
        "input_ids": np.ones((1, width), dtype=np.int64),
        "attention_mask": np.ones((1, context + width), dtype=np.int64),
        "position_ids": np.arange(context, context + width, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, dtype=np.int32),
    }


def _exported(model: str, request: LoadRequest, *, is_head: bool = False) -> Path:
    """The model in OpenVINO's format, made once: in the precision asked for, or rounded by its own tools (nncf).

    Args:
        model: Directory of a model with tokenizer, or of an EAGLE-3 head.
        request: Precision, target and folder.
        is_head: Whether it is a head; its tokenizer is the target's.
    """
    settings = None if request.weights is None else _COMPRESSIONS[request.weights]
    recipe = "" if settings is None else json.dumps([settings, version("optimum-intel"), version("nncf")])
    folder = converted_path(request.cache_dir, model, request.weights or request.dtype, "-openvino", recipe)
    if folder.exists():
        return folder
    import openvino_tokenizers  # exporting takes seconds to import and happens once
    import torch
    from transformers import AutoTokenizer

    temporary = folder.with_suffix(".tmp")
    (_export_head if is_head else _export_model)(model, temporary, getattr(torch, request.dtype), settings)
    tokenizer = AutoTokenizer.from_pretrained(request.model if is_head else model)
    converted = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for kind, part in zip(("tokenizer", "detokenizer"), converted, strict=True):
        openvino.save_model(part, temporary / f"openvino_{kind}.xml")
    temporary.rename(folder)
    return folder


def _export_model(model: str, out: Path, dtype: Any, settings: dict[str, Any] | None) -> None:
    """Exports a model with weights in a torch dtype, or rounded."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    how: dict[str, Any] = {"load_in_8bit": False}
    if settings is not None:
        how = {"quantization_config": OVWeightQuantizationConfig(**settings)}
    exported = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, torch_dtype=dtype, **how)
    exported.save_pretrained(out)


def _export_head(head: str, out: Path, dtype: Any, settings: dict[str, Any] | None) -> None:
    """Exports an EAGLE-3 head in SpecForge's layout, and writes down which layers of the target it reads."""
    import nncf
    import torch
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVWeightQuantizationConfig
    from safetensors.torch import load_file, save_file

    config = json.loads((Path(head) / "config.json").read_text(encoding="utf-8"))
    weights = load_file(Path(head) / "model.safetensors")
    # Without these tables the exporter stores uninitialized memory. A head that has none drafts the whole vocabulary.
    weights.setdefault("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
    weights.setdefault("t2d", torch.ones(config["vocab_size"], dtype=torch.bool))
    with tempfile.TemporaryDirectory() as scratch:
        source, exported = Path(scratch) / "head", Path(scratch) / "exported"
        source.mkdir()
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
        (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        main_export(
            str(source),
            exported,
            task="text-generation-with-past",
            library_name="transformers",
            trust_remote_code=True,  # optimum-intel's own class of heads is remote code to transformers
            model_loading_kwargs={"dtype": dtype},
        )
        model = openvino.Core().read_model(exported / f"{_MODEL}.xml")
        if settings is not None:
            model = nncf.compress_weights(model, **OVWeightQuantizationConfig(**settings).to_nncf_dict())
        # GenAI reads layers 2, L // 2 and L - 3 unless the file says otherwise.
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        model.set_rt_info(" ".join(map(str, layers)), ["hidden_layers_list"])
        openvino.save_model(model, out / f"{_MODEL}.xml", compress_to_fp16=False)
        shutil.copy(exported / "config.json", out)


if __name__ == "__main__":
    serve(OpenVino())
