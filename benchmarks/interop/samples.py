"""Tiny random heads for a tiny random target, and what foretoken makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken import SamplingParams
from foretoken.drafters.base import DraftContext, TargetHandle
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetInfo
from foretoken.formats.conversion import head_shapes
from foretoken.formats.registry import head_readers, read_head, write_head
from foretoken.heads.base import StepHead
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.models.loading import load_model
from foretoken.models.parts import target_parts
from foretoken.runner.costs import CostCurve
from foretoken.sampling.batch import SamplingBatch, SamplingRequest

if TYPE_CHECKING:
    from pathlib import Path

    from foretoken.formats.conversion import Reader
    from foretoken.heads.base import HeadConfig
    from foretoken.models.parts import TargetParts

E, V, H = 16, 97, 4
BATCH, LENGTH = 2, 12
PREFIX = LayerConfig(num_attention_heads=H, num_key_value_heads=H, head_dim=E // H, intermediate_size=24)


@dataclass(frozen=True)
class Target:
    """A tiny Llama on disk and loaded, and what heads share with it.

    Attributes:
        directory: Where it lies.
        parts: Embedding and LM head.
        target_info: As `foretoken convert --target` has them.
        rope_scaling: Its rotary scaling, or None.
    """

    directory: Path
    parts: TargetParts
    target_info: TargetInfo
    rope_scaling: dict[str, Any] | None

    @classmethod
    def made(
        cls,
        directory: Path,
        rope_scaling: dict[str, Any] | None = None,
        *,
        hidden_size: int = E,
        vocab_size: int = V,
        num_layers: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> Target:
        """A random one; dtype: of its stored weights."""
        torch.manual_seed(1)
        rope = {"rope_theta": 10000.0, **(rope_scaling or {"rope_type": "default"})}
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=24, num_hidden_layers=num_layers,
            num_attention_heads=H, max_position_embeddings=64, rope_parameters=rope, tie_word_embeddings=False,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        model.to(dtype).save_pretrained(directory)
        loaded = load_model(str(directory), dtype="float32", device="cpu")
        return cls(directory, target_parts(loaded), TargetInfo.of_directory(str(directory)), rope_scaling)


def random_head(config: HeadConfig, target: Target) -> HeadCheckpoint:
    """A head with random weights in every place."""
    generator = torch.Generator().manual_seed(7)
    weights = {key: 0.5 * torch.randn(shape, generator=generator) for key, shape in head_shapes(config).items()}
    if "token_map" in weights:
        weights["token_map"] = torch.randperm(V, generator=generator)[: len(weights["token_map"])]
    fingerprint = TargetFingerprint(name=str(target.directory), hidden_size=E, vocab_size=V)
    return HeadCheckpoint(config=config, weights=weights, target=fingerprint)


def texts() -> tuple[Tensor, Tensor]:
    """(B, S, E) features and (B, S) tokens."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(BATCH, LENGTH, E, generator=generator)
    return features, torch.randint(V, (BATCH, LENGTH), generator=generator)


@torch.no_grad()
def our_logits(head: HeadCheckpoint, target: Target) -> list[Tensor]:
    """(B, S - 1 - i, V) of head i, at the positions whose tokens are there."""
    features, tokens = texts()
    module = head.module()
    hidden = module.teacher_forced(features, tokens, target.parts)
    logits = [module.logits(index, each, target.parts) for index, each in enumerate(hidden)]
    return [each[:, : LENGTH - 1 - index] for index, each in enumerate(logits)]


@torch.no_grad()
def our_chain(head: HeadCheckpoint, target: Target, roots: Tensor) -> list[Tensor]:
    """(B, V) probabilities of each step of a greedy chain from the first feature of each text; roots: (B,)."""
    module, tokens = head.module(), roots
    assert isinstance(module, StepHead), "chains are those of the MLP speculator"
    state, probs = module.encode(texts()[0][:, 0]), []
    for index in range(head.config.steps):
        state, hidden = module.step(index, state, tokens, target.parts)
        probs.append(module.logits(index, hidden, target.parts).softmax(-1))
        tokens = probs[-1].argmax(-1)
    return probs


def drafting_handle(model: Any, vocab_size: int = V) -> TargetHandle:
    """What drafters are told of a target that is not run; model: loaded, or None where nothing is shared with it."""
    return TargetHandle(
        name="target", vocab_size=vocab_size, context_len=64, num_slots=1, device=torch.device("cpu"),
        dtype=torch.float32, runner="auto", tokenizer=None, model=model, run=mock.Mock(),
        target_runner=None,
        measured_costs=lambda: CostCurve((1, 16), (1.0, 2.0)),
    )  # fmt: skip


def greedy_context(text: list[int], vocab_size: int = V) -> DraftContext:
    """What drafters are told of one greedy request, whose drafts may be as long and wide as they come."""
    request = SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)
    return DraftContext(
        slots=[0], tokens=[text], max_depth=[16], max_nodes=[512], is_coupled=[False],
        sampling=SamplingBatch.build([request], vocab_size),
    )  # fmt: skip


def written(
    name: str, head: HeadCheckpoint, target: Target, directory: Path, **options: Any
) -> tuple[HeadCheckpoint, dict[str, Reader]]:
    """Writes a head; what foretoken reads back, and what it says of other readers, by program."""
    write_head(name, head, directory, target=target.target_info, **options)
    readers = head_readers(name, head, target=target.target_info, **options)
    back = read_head(directory, base_config=target.target_info.config, weights=target.target_info.load)[1]
    return back, {reader.program: reader for reader in readers}


def written_pickle(
    name: str, head: HeadCheckpoint, target: Target, directory: Path, *, reader: str, is_refused: bool
) -> tuple[HeadCheckpoint, bool | None]:
    """Writes a head as the pickle that original code reads; made by hand where foretoken refuses to.

    Returns:
        What foretoken reads back, and whether it says that `reader` reads it: None for a pickle that it refuses.
    """
    back, readers = written(name, head, target, directory, as_safetensors=is_refused)
    if not is_refused:
        return back, readers[reader].reads
    pickle = directory / f"{name}_lm_head.pt"
    torch.save(load_file(pickle.with_suffix(".safetensors")), pickle)
    return back, None
