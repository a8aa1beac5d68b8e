"""llama.cpp or its fork ik_llama.cpp, by the interface for C: greedy, plain or with drafts that this file verifies.

Drafts are those of a draft model, at most `length` tokens or until a probability falls below `floor`, or with `ngram`
the tokens after the last place of the text that has the same `ngram` tokens.
"""

import ctypes
import statistics
import time
from typing import Any

import numpy as np
from protocol import serve, settings

try:
    import llama_cpp as api
except ImportError:
    import ik_llama_cpp._ctypes_api as api

    _remove = api._lib.llama_kv_cache_seq_rm
    _remove.argtypes, _remove.restype = [ctypes.c_void_p, *[ctypes.c_int32] * 3], ctypes.c_bool

_given = settings()
api.llama_backend_init()


class Text:
    """A model and the text in its KV cache."""

    def __init__(self, path: str) -> None:
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        wanted = api.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch, wanted.n_threads, wanted.n_threads_batch = 4096, 512, 512, 2, 2
        if _given.get("is_exact"):
            wanted.type_k = wanted.type_v = api.GGML_TYPE_F32
            wanted.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = api.llama_init_from_model(self.model, wanted)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.ids: list[int] = []

    def feed(self, ids: list[int], logits: int = 1) -> None:
        """Reads tokens; the last ones get logits."""
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            batch = api.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, len(self.ids) + i, 1, 0
                batch.logits[i] = start + i >= len(ids) - logits
            assert api.llama_decode(self.context, batch) == 0
            api.llama_batch_free(batch)
            self.ids += part

    def crop(self, length: int) -> None:
        """Forgets what follows the first `length` tokens."""
        if length < len(self.ids):
            kept = self.ids[:length]
            if not hasattr(api, "llama_memory_seq_rm"):
                _remove(self.context, 0, length, -1)
            elif not api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, length, -1):
                api.llama_memory_clear(api.llama_get_memory(self.context), True)  # recurrent states go as a whole
                self.ids = []
                self.feed(kept)
            self.ids = kept

    def logits(self, index: int) -> Any:
        """(V,) float32 of the last pass."""
        row = api.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))

    def follow(self, ids: list[int]) -> None:
        """Reads what is new of a text."""
        same = next((i for i, (a, b) in enumerate(zip(self.ids, ids, strict=False)) if a != b), None)
        same = min(len(self.ids), len(ids)) if same is None else same
        self.crop(min(same, len(ids) - 1))
        self.feed(ids[len(self.ids) :])

    def ends(self, token: int) -> bool:
        """Whether a token ends a text."""
        if hasattr(api, "llama_vocab_is_eog"):
            return bool(api.llama_vocab_is_eog(api.llama_model_get_vocab(self.model), token))
        return bool(api.llama_token_is_eog(self.model, token))


_target = Text(_given["target"])
_draft = Text(_given["draft"]) if _given["draft"] else None


def _drafted(ids: list[int], most: int, floor: float) -> list[int]:
    assert _draft is not None, "the request names a length"
    _draft.follow(ids)
    found: list[int] = []
    while len(found) < most:
        row = _draft.logits(-1)
        token = int(row.argmax())
        if floor and 1 / np.exp(row - row[token]).sum() < floor:
            break
        found.append(token)
        if len(found) < most:
            _draft.feed([token])
    return found


def _looked_up(ids: list[int], most: int, ngram: int) -> list[int]:
    wanted = ids[-ngram:]
    for start in range(len(ids) - ngram - 1, -1, -1):
        if ids[start : start + ngram] == wanted:
            return ids[start + ngram : start + ngram + most]
    return []


def answer(
    prompt: list[int], tokens: int, length: int = 0, floor: float = 0.0, ngram: int = 0, **_: Any
) -> dict[str, Any]:
    """One greedy request, from token ids to token ids; without what samples."""
    _target.crop(0)
    if _draft:
        _draft.crop(0)
    begin = time.perf_counter()
    _target.feed(prompt)
    ids, steps = [int(_target.logits(-1).argmax())], 0
    while len(ids) < tokens and not _target.ends(ids[-1]):
        most = min(length, tokens - len(ids) - 1)
        guesses = [] if most < 1 else _looked_up(prompt + ids, most, ngram) if ngram else None
        guesses = _drafted(prompt + ids, most, floor) if guesses is None else guesses
        start, steps = len(_target.ids), steps + 1
        _target.feed([ids[-1], *guesses], logits=1 + len(guesses))
        kept = 0
        for i in range(len(guesses) + 1):
            ids.append(int(_target.logits(i).argmax()))
            kept = i + 1
            if i == len(guesses) or ids[-1] != guesses[i] or _target.ends(ids[-1]):
                break
        _target.crop(start + kept)
    return {"ids": ids, "seconds": time.perf_counter() - begin, "steps": steps}


def time_passes(rows: int, tokens: int, count: int, *, grows: bool = False) -> dict[str, float]:
    """Median seconds of passes behind some rows of the cache; logits of all tokens up to 64, else of the last one.

    `grows`: whether each pass goes on where the last one ended, for recurrent states, which cannot be set back.
    """
    text = [(37 * i + 5) % 5000 % _target.vocab_size for i in range(max(rows, tokens))]
    _target.follow(text[:rows]) if rows else _target.crop(0)
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        _target.feed(text[:tokens], logits=tokens if tokens <= 64 else 1)
        _target.logits(-1)
        taken.append(time.perf_counter() - begin)
        if not grows:
            _target.crop(rows)
    if grows:
        _target.crop(0)
    return {"seconds": statistics.median(taken)}


def write_logits(ids: list[int], file: str) -> dict[str, Any]:
    """Writes the logits at all positions of a text, (N, V) float32 in numpy's format."""
    _target.crop(0)
    _target.feed(ids, logits=len(ids))
    np.save(file, np.stack([_target.logits(i) for i in range(len(ids))]))
    return {}


def _answer(**request: Any) -> dict[str, Any]:
    if "rows" in request:
        return time_passes(**request)
    return write_logits(**request) if "file" in request else answer(**request)


serve(_answer)
