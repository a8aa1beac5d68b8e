"""OpenVINO GenAI over a directory that its exporter made: plain, prompt lookup, or with a draft model.

    optimum-cli export openvino --model DIRECTORY --task text-generation-with-past --weight-format int4 EXPORTED

`options` are properties of the device, such as `{"INFERENCE_PRECISION_HINT": "bf16"}`.
"""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import serve, settings

_given = settings()
_scheduler: Any = openvino_genai.SchedulerConfig()
_scheduler.max_num_batched_tokens = 4096  # a prompt in one pass, as in GenAI's own latency setting
_scheduler.enable_prefix_caching = False  # a repeated prompt costs what a new one costs
_arguments: dict[str, Any] = {"scheduler_config": _scheduler}
if _given["draft"]:
    _arguments["draft_model"] = openvino_genai.draft_model(_given["draft"], "CPU", INFERENCE_NUM_THREADS=2)
if _given["lookup"]:
    _arguments["prompt_lookup"] = True
_properties = {"INFERENCE_NUM_THREADS": 2, "PERFORMANCE_HINT": "LATENCY"} | _given["options"]
_pipeline: Any = openvino_genai.LLMPipeline(_given["target"], "CPU", **_properties, **_arguments)
_config: Any = _pipeline.get_generation_config()
if _given["draft"] or _given["lookup"]:
    _config.num_assistant_tokens = 5  # as in OpenVINO's own examples
if _given["lookup"]:
    _config.max_ngram_size = 3


def answer(prompt: list[int], tokens: int, temperature: float, top_p: float, seed: int) -> dict[str, Any]:
    """One request, from token ids to token ids; GenAI's own metrics count the passes, the first one is the prompt's."""
    _config.max_new_tokens, _config.do_sample = tokens, temperature > 0
    if _config.do_sample:
        _config.temperature, _config.top_p, _config.top_k, _config.rng_seed = temperature, top_p, 1 << 20, seed
    begin = time.perf_counter()
    result = _pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), _config)
    seconds = time.perf_counter() - begin
    passes = len(result.perf_metrics.raw_metrics.m_new_token_times)
    return {"ids": list(result.tokens[0]), "seconds": seconds, "steps": passes - 1}


serve(answer)
