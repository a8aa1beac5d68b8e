"""llama.cpp through llama-cpp-python's low-level calls: plain decoding and passes of chosen width."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.workers.converted import converted_path
from benchmarks.rivals.workers.gguf_file import write_gguf
from benchmarks.rivals.workers.serve import ChunkClock, median_seconds, serve

# Of the KV cache. With bfloat16 weights llama.cpp's own default, equally wide and with the faster kernels.
_CACHE_TYPES = {"bfloat16": llama_cpp.GGML_TYPE_F16, "float32": llama_cpp.GGML_TYPE_F32}
_BATCH_TOKENS = 512  # llama.cpp's default micro-batch


class LlamaCpp:
    """One context with one sequence; flash attention as llama.cpp chooses, or off.

    On CPUs it is the slower kind for narrow passes and the faster for wide ones.

    Options are fields of `llama_context_params`.
    """

    def load(self, request: LoadRequest) -> Loaded:
        """Converts the weights unless that was done before, and loads them."""
        path = converted_path(request.cache_dir, request.model, request.dtype, ".gguf")
        if not path.exists():
            write_gguf(Path(request.model), path, request.dtype)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}. Its log says why.")
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx = request.max_len
        params.n_batch = params.n_ubatch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = request.threads
        params.type_k = params.type_v = _CACHE_TYPES[request.dtype]
        if request.mode == "no_flash":
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        for key, value in request.options.items():
            if not hasattr(params, key):
                raise ValueError(f"llama_context_params has no field '{key}'.")
            setattr(params, key, value)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context. Its log says why.")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(max(_BATCH_TOKENS, request.max_width), 0, 1)
        cache = "f16" if params.type_k == llama_cpp.GGML_TYPE_F16 else f"ggml type {params.type_k}"
        return Loaded(
            versions={"llama-cpp-python": version("llama-cpp-python")},
            can_forward=True,
            notes=[f"llama.cpp keeps keys and values in {cache}"] if request.dtype == "bfloat16" else [],
        )

    def generate(self, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Generation:
        """Prompt in batches, then token by token; tokens are chosen by numpy."""
        llama_cpp.llama_memory_clear(self._memory, False)
        clock = ChunkClock()
        random = np.random.default_rng(seed)
        for start in range(0, len(prompt_ids), _BATCH_TOKENS):
            self._decode(prompt_ids[start : start + _BATCH_TOKENS], start, all_logits=False)
        tokens = [self._next_token(temperature, random)]
        clock.add(1)
        while len(tokens) < max_tokens:
            self._decode(tokens[-1:], len(prompt_ids) + len(tokens) - 1, all_logits=False)
            tokens.append(self._next_token(temperature, random))
            clock.add(1)
        return clock.finish(tokens)

    def forward(self, width: int, context: int, repeats: int) -> float:
        """`llama_decode` of a batch with logits for every token; its rows are removed afterwards."""
        llama_cpp.llama_memory_clear(self._memory, False)
        for start in range(0, context, _BATCH_TOKENS):
            self._decode([1] * min(_BATCH_TOKENS, context - start), start, all_logits=False)
        return median_seconds(
            lambda: self._decode([1] * width, context, all_logits=True),
            repeats,
            undo=lambda: llama_cpp.llama_memory_seq_rm(self._memory, 0, context, -1),
        )

    def _decode(self, tokens: list[int], start: int, *, all_logits: bool) -> None:
        """One pass; logits for the last token or for all."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == len(tokens) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens at {start} returned {status}.")
        # Logits are computed asynchronously where a backend can; asking for them waits.
        llama_cpp.llama_get_logits_ith(self._context, -1)

    def _next_token(self, temperature: float, random: np.random.Generator) -> int:
        """The argmax of the last logits, of noisy ones where tokens are sampled (Gumbel-max)."""
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        row = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab_size)).contents
        scores: Any = np.frombuffer(row, dtype=np.float32)
        if temperature > 0:
            scores = scores / temperature + random.gumbel(size=scores.size)
        return int(scores.argmax())


if __name__ == "__main__":
    serve(LlamaCpp())
