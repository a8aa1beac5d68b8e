"""Compares a cost twin with its original: logits over text, greedy text, and every drafter's drafts.

Drafters draft with weights as they are stored. In int8 the inputs of a twin's matrices are rounded in other groups
than those of its original, so a draft may differ now and then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foretoken.bench.cost_twin.make import TARGET, TwinPart
from foretoken.bench.workload import no_progress
from foretoken.core.passes import Pass
from foretoken.core.sampling_params import SamplingParams
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.entrypoints.llm import LLM
from foretoken.formats.describe import native_facts
from foretoken.models.loading import LoadedModel, load_model
from foretoken.runner.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.token_tree import TokenTree
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle

# Parameters; a choice: a larger twin in float32 would not fit into memory beside the rest.
_WIDEST_FLOAT32 = 1_000_000_000
_WIDTHS = [3, 2, 1]  # of every drafter's tree: further candidates must be the same too
# Of the largest logit, where sums have another order; the bounds of `NEAR_TIE` in `bench/verify.py`.
_SAME_WITHIN = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}


class TwinCheck(NamedTuple):
    """One comparison of a twin with its original.

    Attributes:
        what: "logits", "greedy text", or the name of the compared drafter.
        num_compared: Positions with logits, output tokens, or drafted nodes.
        difference: Largest difference of two logits; None for text and drafts.
        is_same: Whether the twin does the same as the original.
    """

    what: str
    dtype: str
    decoder: str
    num_compared: int
    difference: float | None
    is_same: bool


def check_twin(
    parts: Sequence[TwinPart],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 24,
    on_progress: Callable[[int, int], None] = no_progress,
) -> list[TwinCheck]:
    """Runs original and twin on a CPU, each on the decoder that serves there.

    On an exact decoder logits must be equal bit for bit. Other decoders may sum a longer row in another order: logits
    must then agree to rounding.

    Args:
        parts: The result of `make_twin`.
        prompts: Token ids of real text.
        on_progress: Called with comparisons done and comparisons in all.
    """
    target = next(part for part in parts if part.role == TARGET)
    drafters = [part for part in parts if part.role != TARGET]
    dtypes = ["bfloat16"] if target.num_parameters > _WIDEST_FLOAT32 else ["float32", "bfloat16"]
    total = len(dtypes) * 2 + len(drafters)
    checks: list[TwinCheck] = []
    for dtype in dtypes:
        pair = [load_model(str(path), dtype=dtype, device="cpu") for path in (target.source, target.path)]
        checks.append(_logits(pair, prompts))
        on_progress(len(checks), total)
        checks.append(_decoded(pair, prompts, None, max_tokens))
        on_progress(len(checks), total)
        for part in drafters if dtype == dtypes[-1] else ():
            checks.append(_decoded(pair, prompts, part, max_tokens))
            on_progress(len(checks), total)
    return checks


def _logits(pair: Sequence[LoadedModel], prompts: Sequence[Sequence[int]]) -> TwinCheck:
    difference, largest = 0.0, 0.0
    runners = [Runner(model, num_slots=1, context_len=max(map(len, prompts)), max_nodes=1) for model in pair]
    for prompt in prompts:
        work = Pass.of_chains([list(prompt)], slots=[0], prefix_lens=[0])
        work = replace(work, logit_rows=torch.arange(len(prompt)))
        ours, theirs = (runner.run(work).logits for runner in runners)
        assert ours is not None, "all rows are asked for"
        assert theirs is not None, "all rows are asked for"
        difference = max(difference, float((ours - theirs).abs().max()))
        largest = max(largest, float(ours.abs().max()))
    is_exact = all(runner.is_exact for runner in runners)
    tolerance = 0.0 if is_exact else _SAME_WITHIN[pair[0].dtype] * largest
    return TwinCheck(
        what="logits",
        dtype=_name(pair[0]),
        decoder=runners[1].name,
        num_compared=sum(map(len, prompts)),
        difference=difference,
        is_same=difference <= tolerance,
    )


def _decoded(
    pair: Sequence[LoadedModel], prompts: Sequence[Sequence[int]], part: TwinPart | None, max_tokens: int
) -> TwinCheck:
    """Compares greedy text, and a drafter's drafts if `part` has a drafter."""
    texts, drafts = [], []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index, model in enumerate(pair):
        seen: list[Any] = []
        make = None
        if part is not None:
            make = _maker(part, part.path if index else part.source, model, seen)
        llm = LLM(
            model, drafter=make, trust_drafter=make is not None, max_num_seqs=1,
            max_model_len=min(model.context_len, max(map(len, prompts)) + max_tokens),
        )  # fmt: skip
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
        texts.append([output.outputs[0].token_ids for output in outputs])
        drafts.append(seen)
    num_tokens = sum(map(len, texts[0]))
    num_nodes = sum(len(tokens) - 1 for tokens, _ in drafts[0])
    return TwinCheck(
        what="greedy text" if part is None else f"drafts of {part.source.name}",
        dtype=_name(pair[0]),
        decoder=llm.target.name,
        num_compared=num_tokens if part is None else num_nodes,
        difference=None,
        is_same=texts[0] == texts[1] and drafts[0] == drafts[1] and bool(num_tokens if part is None else num_nodes),
    )


def _maker(part: TwinPart, path: Any, model: LoadedModel, seen: list[Any]) -> Callable[[], Drafter]:
    facts = native_facts(part.path)  # None for a draft model
    widths = _WIDTHS if facts is None else _WIDTHS[: facts.get("heads")]
    options = drafter_options(
        {"method": part.role, "model": str(path), "tree": {"widths": widths}, "quantization": "none"}
    )
    return lambda: _Listening(create_drafter(options, model), seen)


class _Listening:
    """A drafter that keeps the tokens and parents of every tree that another drafter proposes."""

    def __init__(self, drafter: Drafter, seen: list[Any]) -> None:
        self._drafter, self._seen = drafter, seen
        self.name, self.reads = drafter.name, drafter.reads

    @property
    def nodes_by_depth(self) -> Sequence[int]:
        return self._drafter.nodes_by_depth

    def attach(self, target: TargetHandle) -> None:
        self._drafter.attach(target)

    def begin(self, slot: int, request: DraftRequest) -> None:
        self._drafter.begin(slot, request)

    def propose(self, context: DraftContext) -> TokenTree:
        tree = self._drafter.propose(context)
        self._seen.extend(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))
        return tree

    def commit(self, committed: Committed) -> None:
        self._drafter.commit(committed)

    def release(self, slot: int) -> None:
        self._drafter.release(slot)


def _name(model: LoadedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
