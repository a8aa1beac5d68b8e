"""Greedy decoding by vLLM on a CPU, run by the Python that vLLM is installed in: a request in JSON, an answer in JSON.

    python vllm_generate.py REQUEST.json ANSWER.json

The request has `model`, `prompts` (lists of token ids), `max_tokens` and `speculative_config` (or null). The answer has
`texts` (lists of token ids), `version`, and of a drafter `num_drafts` and `accepted_at_depth`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def main(request_path: str, answer_path: str) -> None:
    """Answers one request."""
    os.environ.update(_SETTINGS)
    from vllm import LLM, SamplingParams  # reads the settings when it is imported

    request: dict[str, Any] = json.loads(Path(request_path).read_text(encoding="utf-8"))
    engine: Any = LLM(
        request["model"],
        dtype="float32",
        max_num_seqs=1,
        max_model_len=request["max_model_len"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=request["speculative_config"],
    )
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], params)
    counted = {
        metric.name: getattr(metric, "values", None) or getattr(metric, "value", None)
        for metric in engine.get_metrics()
    }
    answer = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "version": version("vllm-cpu"),
        "num_drafts": counted.get(_DRAFTS),
        "accepted_at_depth": counted.get(_ACCEPTED),
    }
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
