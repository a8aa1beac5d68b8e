"""foretoken itself: plain decoding, the n-gram drafter, a draft model and heads, through the public `LLM`."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.workers.serve import ChunkClock, median_seconds, serve
from foretoken import LLM, SamplingParams, __version__
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import TargetReads

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.drafters.base import Committed, DraftContext, DraftRequest, TargetHandle


# A draft model is rounded to as many bits as the target.
_DRAFT_QUANTIZATIONS = {"int8": "int8", "w8a8": "int8", "int4": "int4", "w4a8": "int4"}


class WideDrafter:
    """Asks for a target that verifies wide trees, and never drafts: for timing passes alone."""

    name = "wide"

    def __init__(self, max_nodes: int) -> None:
        self.reads = TargetReads()
        self.nodes_by_depth = (1, max_nodes)

    def attach(self, target: TargetHandle) -> None:
        """Needs nothing."""

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Keeps nothing."""

    def propose(self, context: DraftContext) -> TokenTree:
        """Roots only."""
        return TokenTree.from_rows([TreeRow([root], [-1]) for root in context.roots])

    def commit(self, committed: Committed) -> None:
        """Keeps nothing."""

    def release(self, slot: int) -> None:
        """Holds nothing."""


class Foretoken:
    """The engine of this repository.

    Options are `LLM`'s keyword arguments; `speculative_config` is merged into the mode's own.
    """

    def load(self, request: LoadRequest) -> Loaded:
        """Makes the `LLM`."""
        torch.set_num_threads(request.threads)
        known = [name for name in inspect.signature(LLM).parameters if name != "model"]
        unknown = sorted(set(request.options) - set(known))
        if unknown:
            raise ValueError(f"LLM takes no {', '.join(unknown)}. Expected options among {', '.join(known)}.")
        options = dict(request.options)
        speculative: Any = dict(options.pop("speculative_config", {}))
        if "+" in request.mode:  # several drafters in one tree
            if speculative:
                raise ValueError(f"{request.mode} takes no speculative_config. Expected none beside several drafters.")
            speculative = request.mode
        elif request.mode != "plain":
            speculative["method"] = request.mode
        if request.mode == "draft_model":
            speculative.setdefault("model", request.draft_model)
            if request.weights is not None:
                speculative.setdefault("quantization", _DRAFT_QUANTIZATIONS[request.weights])
        self._request = request
        self._arguments: dict[str, Any] = {
            "dtype": request.dtype,
            "quantization": request.weights,
            "device": "cpu",
            "max_num_seqs": 1,
            "max_model_len": request.max_len,
            "enable_prefix_caching": False,  # a repeated prompt is to cost what a new one costs
            **options,
        }
        self._clock = ChunkClock()
        self._llm = LLM(
            request.model, speculative_config=speculative or None, on_step=self._note_step, **self._arguments
        )
        self._wide: Any = None
        return Loaded(
            versions={"foretoken": __version__} | {name: version(name) for name in ("torch", "transformers")},
            can_forward=request.mode == "plain",
            model_bytes=_memory_bytes(self._llm.target.model.module),
            notes=[f"foretoken's runner is {self._llm.target.name}"],
        )

    def generate(self, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Generation:
        """Decodes with `LLM.generate`; one iteration is one chunk and one target pass."""
        self._clock = ChunkClock()
        params = SamplingParams(
            temperature=temperature, seed=seed if temperature else None, max_tokens=max_tokens, ignore_eos=True
        )
        output = self._llm.generate(prompt_ids, params)[0]
        return self._clock.finish(list(output.outputs[0].token_ids))

    def forward(self, width: int, context: int, repeats: int) -> float:
        """`target.verify` of a chain; nothing is committed, so there is nothing to undo."""
        target = self._wide_target()
        target.prefill(0, [1] * context, 0)
        chain = TokenTree.from_rows([TreeRow([1] * width, list(range(-1, width - 1)))])
        return median_seconds(lambda: target.verify([0], [context], chain), repeats)

    def _wide_target(self) -> Any:
        """A target prepared for the widest pass, sharing the weights of the first; made once."""
        if self._wide is None:
            nodes = self._request.max_width

            def create() -> WideDrafter:
                return WideDrafter(nodes)

            arguments = {key: value for key, value in self._arguments.items() if key not in ("dtype", "device")}
            self._wide = LLM(self._llm.target.model, drafter=create, **arguments).target
        return self._wide

    def _note_step(self, record: StepRecord) -> None:
        """Counts an iteration's tokens."""
        self._clock.add(sum(step.num_emitted for step in record.sequences))


def _memory_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's tensors; shared ones count once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


if __name__ == "__main__":
    serve(Foretoken())
