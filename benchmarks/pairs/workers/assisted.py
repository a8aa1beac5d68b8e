"""transformers' `generate` on the unpacked weights of the same file in bfloat16, plain or assisted.

`options` are those of `generate`, such as `{"prompt_lookup_num_tokens": 10}`; with a draft model it is the assistant.
"""

import time
from typing import Any

import torch
from protocol import serve, settings

from foretoken.entrypoints.model_arguments import load_target

_given = settings()
torch.set_num_threads(2)
_target, _tokenizer = load_target(_given["target"], dtype="bfloat16", device="cpu", unpacks=True)
_model: Any = _target.module
_model.set_attn_implementation("sdpa")
_options = dict(_given["options"])
if _given["draft"]:
    _assistant: Any = load_target(_given["draft"], dtype="bfloat16", device="cpu", unpacks=True)[0].module
    _assistant.set_attn_implementation("sdpa")
    _options["assistant_model"] = _assistant


def answer(prompt: list[int], tokens: int, temperature: float, top_p: float, seed: int) -> dict[str, Any]:
    """One request, from token ids to token ids; passes are counted."""
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    torch.manual_seed(seed)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handle = _model.register_forward_hook(count)
    begin = time.perf_counter()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = _model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, use_cache=True,
            **({"do_sample": False} | sampling), **_options,
        )  # fmt: skip
    seconds = time.perf_counter() - begin
    handle.remove()
    # The first pass of assisted generation verifies candidates too; it gives one token more than a plain one.
    return {"ids": found[0, len(prompt) :].tolist(), "seconds": seconds, "steps": passes if _options else passes - 1}


serve(answer)
