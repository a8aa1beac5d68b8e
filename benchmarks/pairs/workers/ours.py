"""foretoken, with the options of `LLM` that the settings name."""

import time
from typing import Any

from protocol import serve, settings

from foretoken import LLM, SamplingParams
from foretoken.core.backend import set_num_threads

_given = settings()
set_num_threads(2)
_llm = LLM(_given["target"], max_model_len=4096, **_given["options"])


def answer(prompt: list[int], tokens: int, temperature: float, top_p: float, seed: int) -> dict[str, Any]:
    """One request, from token ids to token ids."""
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=tokens, seed=seed)
    begin = time.perf_counter()
    output = _llm.generate([prompt], params, use_tqdm=False)[0]
    seconds = time.perf_counter() - begin
    found = output.metrics
    return {
        "ids": list(output.outputs[0].token_ids), "seconds": seconds, "steps": found.steps,
        "declined": found.num_declined, "draft_s": found.seconds.draft, "verify_s": found.seconds.verify,
    }  # fmt: skip


serve(answer)
