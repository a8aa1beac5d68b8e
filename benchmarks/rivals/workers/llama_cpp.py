"""llama.cpp through llama-cpp-python's low-level calls: plain and speculative decoding, and passes of chosen width.

Speculation is what the package offers: its prompt lookup, and its interface for draft models, which a second model in
llama.cpp implements here. As in the package, drafted tokens are accepted while the target chooses the same ones.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.workers.converted import converted_path, stored_bytes
from benchmarks.rivals.workers.gguf_file import write_gguf
from benchmarks.rivals.workers.serve import ChunkClock, median_seconds, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the KV cache. With bfloat16 weights llama.cpp's own default, equally wide and with the faster kernels.
_CACHE_TYPES = {"bfloat16": llama_cpp.GGML_TYPE_F16, "float32": llama_cpp.GGML_TYPE_F32}
_FILE_TYPES = {
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
_BATCH_TOKENS = 512  # llama.cpp's default micro-batch
# Shorter drafts than the package's 10, and no flash attention: on CPUs wide passes gain less than they cost.
_DRAFT_TOKENS = 3


class CachedSequence:
    """A model in llama.cpp, and one sequence of tokens in its cache."""

    def __init__(self, path: Path, request: LoadRequest, options: dict[str, Any]) -> None:
        """Loads a file.

        Args:
            path: GGUF.
            request: Threads, lengths and dtype.
            options: Fields of `llama_context_params`.
        """
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}. Its log says why.")
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx = request.max_len
        params.n_batch = params.n_ubatch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = request.threads
        params.type_k = params.type_v = _CACHE_TYPES[request.dtype]
        for key, value in options.items():
            if not hasattr(params, key):
                raise ValueError(f"llama_context_params has no field '{key}'.")
            setattr(params, key, value)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context. Its log says why.")
        self.cache_type = "f16" if params.type_k == llama_cpp.GGML_TYPE_F16 else f"ggml type {params.type_k}"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(max(_BATCH_TOKENS, request.max_width), 0, 1)
        self._len = 0

    def feed(self, tokens: Sequence[int], *, all_logits: bool = False) -> None:
        """One pass over tokens that follow those in the cache; logits for the last of them or for all."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self._len + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == len(tokens) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens at {self._len} returned {status}.")
        self._len += len(tokens)
        # Logits are computed asynchronously where a backend can; asking for them waits.
        llama_cpp.llama_get_logits_ith(self._context, -1)

    def feed_prompt(self, tokens: Sequence[int]) -> None:
        """The same in batches, with logits for the last token."""
        for start in range(0, len(tokens), _BATCH_TOKENS):
            self.feed(tokens[start : start + _BATCH_TOKENS])

    def crop(self, length: int) -> None:
        """Removes all but the first tokens from the cache."""
        if length < self._len:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
            self._len = length

    def logits(self, index: int = -1) -> Any:
        """(V,) float32 of a token of the last pass that got logits; valid until the next pass."""
        found = llama_cpp.llama_get_logits_ith(self._context, index)
        row = ctypes.cast(found, ctypes.POINTER(ctypes.c_float * self._vocab_size)).contents
        return np.frombuffer(row, dtype=np.float32)


class DraftModel(LlamaDraftModel):
    """Drafts the most probable tokens of a smaller model, which keeps its own cache from call to call."""

    def __init__(self, model: CachedSequence, num_pred_tokens: int) -> None:
        self._model, self._num_pred_tokens = model, num_pred_tokens
        self._seen: list[int] = []

    def begin(self, prompt_ids: list[int]) -> None:
        """Reads a prompt."""
        self._model.crop(0)
        self._model.feed_prompt(prompt_ids)
        self._seen = list(prompt_ids)

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        """Tokens to follow all those before; those that it has seen need not be fed again."""
        old, new = np.array(self._seen, dtype=input_ids.dtype), input_ids[: len(self._seen)]
        differs = np.flatnonzero(old[: len(new)] != new)
        kept = min(int(differs[0]) if len(differs) else len(new), len(input_ids) - 1)
        self._model.crop(kept)
        self._model.feed_prompt(input_ids[kept:].tolist())
        self._seen = input_ids.tolist()
        drafted = [int(self._model.logits().argmax())]
        while len(drafted) < self._num_pred_tokens:
            self._model.feed(drafted[-1:])
            self._seen.append(drafted[-1])
            drafted.append(int(self._model.logits().argmax()))
        return np.array(drafted, dtype=np.intc)


class LlamaCpp:
    """One context with one sequence; flash attention as llama.cpp chooses in mode "plain", else off.

    On CPUs it is the slower kind for passes of a few tokens and the faster for a prompt.

    Options are fields of `llama_context_params`, `num_pred_tokens` and `max_ngram_size` excepted, which go to drafters.
    """

    def load(self, request: LoadRequest) -> Loaded:
        """Converts the weights unless that was done before, and loads them."""
        options = dict(request.options)
        drafting = {key: options.pop(key) for key in ("num_pred_tokens", "max_ngram_size") if key in options}
        if request.mode != "plain":
            options.setdefault("flash_attn_type", llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        llama_cpp.llama_backend_init()
        path = _converted(request.model, request)
        self._target = CachedSequence(path, request, options)
        self._drafter: LlamaDraftModel | None = None
        self._ids = np.zeros(request.max_len, dtype=np.intc)
        notes = [f"llama.cpp keeps keys and values in {self._target.cache_type}"] if request.dtype == "bfloat16" else []
        draft_path = None
        if request.mode == "prompt_lookup":
            lookup = LlamaPromptLookupDecoding(**{"num_pred_tokens": _DRAFT_TOKENS, "max_ngram_size": 3} | drafting)
            self._drafter = lookup
            notes.append(
                f"llama.cpp's prompt lookup drafts {lookup.num_pred_tokens} tokens after at most "
                f"{lookup.max_ngram_size} that match"
            )
        if request.mode == "draft_model":
            assert request.draft_model is not None, "the comparison gives this mode a draft model"
            draft_path = _converted(request.draft_model, request)
            count = drafting.get("num_pred_tokens", _DRAFT_TOKENS)
            self._drafter = DraftModel(CachedSequence(draft_path, request, options), count)
            notes.append(f"llama.cpp's draft model drafts {count} tokens, driven from Python")
        return Loaded(
            versions={"llama-cpp-python": version("llama-cpp-python")},
            can_forward=self._drafter is None,
            model_bytes=stored_bytes(path),
            draft_bytes=stored_bytes(draft_path) if draft_path else None,
            notes=notes,
        )

    def generate(self, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Generation:
        """Prompt in batches, then token by token or draft by draft; tokens are chosen by numpy."""
        target, random = self._target, np.random.default_rng(seed)
        target.crop(0)
        clock = ChunkClock()
        if isinstance(self._drafter, DraftModel):
            self._drafter.begin(prompt_ids)
        target.feed_prompt(prompt_ids)
        tokens = [_chosen(target.logits(), temperature, random)]
        clock.add(1)
        start = len(prompt_ids)
        self._ids[:start] = prompt_ids
        while len(tokens) < max_tokens:
            end = start + len(tokens)
            self._ids[end - 1] = tokens[-1]
            drafted = self._draft(end, most=max_tokens - len(tokens) - 1)
            target.feed([tokens[-1], *drafted], all_logits=True)
            new = [_chosen(target.logits(0), temperature, random)]
            while len(new) <= len(drafted) and new[-1] == drafted[len(new) - 1]:
                new.append(_chosen(target.logits(len(new)), temperature, random))
            self._ids[end : end + len(new)] = new
            target.crop(end + len(new) - 1)
            tokens += new
            clock.add(len(new))
        return clock.finish(tokens)

    def forward(self, width: int, context: int, repeats: int) -> float:
        """`llama_decode` of a batch with logits for every token; its rows are removed afterwards."""
        target = self._target
        target.crop(0)
        target.feed_prompt([1] * context)
        return median_seconds(
            lambda: target.feed([1] * width, all_logits=True), repeats, undo=lambda: target.crop(context)
        )

    def _draft(self, length: int, most: int) -> list[int]:
        """At most so many tokens to follow the first `length` ids of the text."""
        if self._drafter is None or most < 1:
            return []
        return [int(token) for token in self._drafter(self._ids[:length])[:most]]


def _chosen(logits: Any, temperature: float, random: np.random.Generator) -> int:
    """The argmax of logits, of noisy ones where tokens are sampled (Gumbel-max)."""
    if temperature > 0:
        logits = logits / temperature + random.gumbel(size=logits.size)
    return int(logits.argmax())


def _converted(model: str, request: LoadRequest) -> Path:
    """The model as GGUF, made once: in the dtype asked for, or rounded from that by llama.cpp's own quantizer."""
    path = converted_path(request.cache_dir, model, request.dtype, ".gguf")
    if not path.exists():
        write_gguf(Path(model), path, request.dtype)
    if request.weights is None:
        return path
    recipe = f"llama-cpp-python {version('llama-cpp-python')}"
    rounded = converted_path(request.cache_dir, model, request.weights, ".gguf", recipe)
    if not rounded.exists():
        params: Any = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = _FILE_TYPES[request.weights], request.threads
        temporary = rounded.with_suffix(".tmp")
        status = llama_cpp.llama_model_quantize(str(path).encode(), str(temporary).encode(), ctypes.byref(params))
        if status != 0:
            raise ValueError(
                f"llama_model_quantize of {path} to {request.weights} returned {status}. Its log says why."
            )
        temporary.replace(rounded)
    return rounded


if __name__ == "__main__":
    serve(LlamaCpp())
