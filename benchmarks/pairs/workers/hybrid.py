"""Single passes over a directory or GGUF file of a hybrid model: by a runner of foretoken, or by transformers itself.

`runner` is one of `foretoken.runner.runner.RUNNERS`, or "transformers". `processor` names a line of
`decoder/kernels/processors.txt` that the native kernels are compiled for; None for the best one.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from protocol import serve, settings
from transformers import AutoModelForCausalLM

from foretoken.core import backend
from foretoken.core.passes import Pass
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import library
from foretoken.models.loading import load_model
from foretoken.runner.runner import Runner
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.dynamic import DynamicShape, begin_expansion

_CHUNK = 512  # tokens of a prompt in one pass, as everywhere in foretoken and in llama.cpp
_LEAVES_OFF_S = 3.0  # no further pass of a request begins after so many seconds
_DEEPEST, _TOP_K = 7, 10  # of dynamic trees, as published for EAGLE-3
_PEAK = 8.0  # spread of the logits of made drafts: the best token has half of the probability, as in trained heads


class _Ours:
    """A runner; its slot holds the same text before and after a pass."""

    def __init__(self, target: str, runner: str, processor: str | None, *, rounds_inputs: bool) -> None:
        if processor is not None:
            lines = [each for each in library._fitting_processors() if each.name == processor]
            if not lines:
                raise SystemExit(f"this processor does not run {processor}")
            library._fitting_processors = lambda: lines
        model = load_model(target, dtype="bfloat16", device="cpu", rounds_inputs=rounds_inputs)
        self.runner = Runner(model, num_slots=1, context_len=2048, max_nodes=64, prefill_chunk=_CHUNK, runner=runner)
        self.name, self.length = self.runner.name, 0
        self._held: list[int] = []

    def begin(self, tokens: list[int]) -> None:
        """Reads a text unless the slot holds it."""
        if self._held != tokens:
            self.read(tokens)

    def read(self, tokens: list[int]) -> None:
        """Reads a text from its beginning, up to the logits after its last token."""
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK]
            is_last = start + _CHUNK >= len(tokens)
            self.runner.run(Pass.of_chains([part], slots=[0], prefix_lens=[start], has_last_logits=is_last))
        self._held, self.length = tokens, len(tokens)

    def run(self, shape: str, tokens: list[int]) -> None:
        """Verifies a tree behind the text."""
        self.runner.verify([0], [self.length], tree_of(shape, len(tokens), self.runner.vocab_size))

    def replay(self, tokens: list[int], accepted: int) -> tuple[float, float]:
        """Returns the seconds of a pass behind a root and accepted tokens, and the part for commit and replay of these.

        The same pass behind a single token, whose state is stored, has nothing to replay.
        """
        self._held = []
        self.run("chain", tokens[:1])
        self._commit(0)
        without_s = seconds(lambda: self.run("chain", tokens))
        commit_s = seconds(lambda: self._commit(accepted))
        whole_s = seconds(lambda: self.run("chain", tokens))
        return whole_s, commit_s + whole_s - without_s

    def _commit(self, accepted: int) -> None:
        self.runner.commit([0], [self.length], [range(1, accepted + 1)])
        self.length += 1 + accepted


class _Theirs:
    """A model of transformers with its own cache, which grows with every pass."""

    name = "transformers"

    def __init__(self, target: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._cache: Any = None

    def read(self, tokens: list[int]) -> None:
        """Reads a text from its beginning, up to the logits after its last token."""
        self._cache = None
        self.run("chain", tokens)

    begin = read

    def run(self, shape: str, tokens: list[int]) -> None:
        """Reads further tokens."""
        assert shape == "chain", "there are no trees"
        output = self._model(
            torch.tensor([tokens]), past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )  # fmt: skip
        self._cache = output.past_key_values


@cache
def tree_of(shape: str, count: int, vocab_size: int) -> TokenTree:
    """Returns a chain, a random tree, or the dynamic tree of a made draft; the same for the same arguments."""
    tokens, generator = _text(count), torch.Generator().manual_seed(count)
    if shape == "dynamic":
        request = SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)
        roots = torch.tensor(tokens[:1])
        draws = DraftDraws.build(SamplingBatch.build([request], vocab_size), [False], torch.zeros(1, dtype=torch.int64))
        expansion = begin_expansion(DynamicShape(top_k=_TOP_K, depth=_DEEPEST, max_nodes=count), roots, draws)
        for depth in expansion.levels():
            width = expansion.frontier(depth).tokens.shape[1]
            expansion.grow(depth, _PEAK * torch.randn(1, width, vocab_size, generator=generator))
        return expansion.finish([0], [_DEEPEST], tokens[:1])
    above = [int(torch.randint(node, (), generator=generator)) for node in range(1, count)]
    return TokenTree.from_rows([TreeRow(tokens, range(-1, count - 1) if shape == "chain" else [-1, *above])])


def seconds(work: Callable[[], None]) -> float:
    """Seconds of some work."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


_given = settings()
backend.set_num_threads(2)
_engine = (
    _Theirs(_given["target"])
    if _given["runner"] == "transformers"
    else _Ours(_given["target"], _given["runner"], _given["processor"], rounds_inputs=_given["rounds_inputs"])
)


def _text(count: int) -> list[int]:
    return [(37 * i + 5) % 5000 % _given["vocab_size"] for i in range(count)]


@torch.inference_mode()
def answer(shape: str, rows: int, tokens: int, count: int) -> dict[str, Any]:
    """Median seconds of passes of a shape behind a text of `rows` tokens; a "prompt" is the text itself.

    "replay N" is a chain behind N accepted tokens; `share` is what commit and replay take of it.
    """
    taken: list[float] = []
    shares: list[float] = []
    text, fed = _text(rows), _text(tokens)
    if shape != "prompt":
        _engine.begin(text)
    if shape in ("tree", "dynamic"):
        tree_of(shape, tokens, _given["vocab_size"])  # made before the clock starts
    while len(taken) < count and sum(taken) < _LEAVES_OFF_S:
        if shape == "prompt":
            taken.append(seconds(lambda: _engine.read(fed)))
        elif shape.startswith("replay"):
            assert isinstance(_engine, _Ours)
            whole, part = _engine.replay(fed, int(shape.partition(" ")[2]))
            taken.append(whole)
            shares.append(part / whole)
        else:
            taken.append(seconds(lambda: _engine.run(shape, fed)))
    return {
        "seconds": statistics.median(taken), "runner": _engine.name,
        "share": statistics.median(shares) if shares else None,
    }  # fmt: skip


serve(answer)
