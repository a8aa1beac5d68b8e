"""Tiny random heads for a tiny random target, and what foretoken makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.bench.workload import load_prompts
from foretoken.core.errors import ConfigError
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetInfo, TargetWeights, with_dtype
from foretoken.formats.conversion import Reader, head_shapes
from foretoken.formats.registry import head_readers, read_head, write_head
from foretoken.heads.base import HeadConfig, StepHead
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.models.loading import load_model
from foretoken.models.parts import TargetParts, target_parts
from foretoken.models.smaller import unpacked_model
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

E, V, H = 16, 97, 4
BATCH, LENGTH = 2, 12
_WRITTEN = 48  # tokens of a real target
PREFIX = LayerConfig(num_attention_heads=H, num_key_value_heads=H, head_dim=E // H, intermediate_size=24)


@dataclass(frozen=True)
class GivenHead:
    """A trained head in float32, and what it reads of a text that its target writes."""

    name: str  # of its directory
    checkpoint: HeadCheckpoint
    features: Tensor  # (1, S, F E), as the target computes them where it is served
    tokens: Tensor  # (1, S)


@dataclass(frozen=True)
class Target:
    """A tiny Llama on disk and loaded, and what heads share with it."""

    directory: Path
    parts: TargetParts  # embedding and LM head
    target_info: TargetInfo  # as `foretoken convert --target` has it
    rope_scaling: dict[str, Any] | None
    given: GivenHead | None = None  # a head to compare instead of random ones

    @classmethod
    def loaded(cls, name: str, head: Path) -> Target:
        """A real one, and a head for it; name: of any target that foretoken loads, with a tokenizer."""
        served = load_model(name, dtype="float32", device="cpu")
        model = unpacked_model(served)
        weights = partial(TargetWeights.of_model, model)
        around = TargetInfo(fingerprint=TargetFingerprint.of(model), config=model.config, load=weights)
        _, checkpoint = read_head(head, target=around.fingerprint, base_config=around.config, weights=around.loaded)
        assert around.fingerprint is not None, "given above"
        checkpoint.check_target(around.fingerprint, what=str(head))
        tokens = _own_text(served, name)
        taps = checkpoint.config.taps
        features = Teacher(model, taps).read_features(tokens)[..., : len(taps) * checkpoint.config.hidden_size]
        given = GivenHead(head.name, with_dtype(checkpoint, torch.float32), features, tokens)
        return cls(Path(name), target_parts(model), around, None, given)

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


@torch.no_grad()
def _own_text(model: LoadedModel, name: str) -> Tensor:
    """(1, S) tokens: a prompt and what the target writes to it."""
    llm = LLM(model, tokenizer=name, max_num_seqs=1)
    (output,) = llm.generate(load_prompts(limit=1), SamplingParams(temperature=0.0, max_tokens=_WRITTEN))
    return torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])


def texts(target: Target | None = None) -> tuple[Tensor, Tensor]:
    """(B, S, E) features and (B, S) tokens; those of a given head where the target has one."""
    if target is not None and target.given is not None:
        return target.given.features, target.given.tokens
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(BATCH, LENGTH, E, generator=generator)
    return features, torch.randint(V, (BATCH, LENGTH), generator=generator)


@torch.no_grad()
def our_logits(head: HeadCheckpoint, target: Target) -> list[Tensor]:
    """(B, S - 1 - i, V) of head i, at the positions whose tokens are there."""
    features, tokens = texts(target)
    module = head.module()
    hidden = module.teacher_forced(features, tokens, target.parts)
    logits = [module.logits(index, each, target.parts) for index, each in enumerate(hidden)]
    return [each[:, : tokens.shape[1] - 1 - index] for index, each in enumerate(logits)]


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


def written(
    name: str, head: HeadCheckpoint, target: Target, directory: Path, **options: Any
) -> tuple[HeadCheckpoint, dict[str, Reader]]:
    """Writes a head; what foretoken reads back, and what it says of other readers, by program."""
    write_head(name, head, directory, target=target.target_info, **options)
    readers = head_readers(name, head, target=target.target_info, **options)
    back = read_head(directory, base_config=target.target_info.config, weights=target.target_info.load)[1]
    return back, {reader.program: reader for reader in readers}


def given_files(
    names: Iterable[str], program: str, target: Target, work: Path
) -> Iterator[tuple[str, HeadCheckpoint, bool]]:
    """Writes the given head in each format that holds it, if foretoken says whether a program reads it.

    Yields the format, after which the directory in `work` is named, what foretoken reads back, and what it says.
    """
    assert target.given is not None, "a head is given"
    for name in names:
        try:
            back, readers = written(name, target.given.checkpoint, target, work / name)
        except ConfigError:  # the format cannot hold it
            continue
        if program in readers:
            yield name, back, readers[program].reads


def written_pickle(
    name: str, head: HeadCheckpoint, target: Target, directory: Path, *, reader: str, is_refused: bool
) -> tuple[HeadCheckpoint, bool | None]:
    """Writes a head as the pickle that original code reads; made by hand where foretoken refuses to.

    Returns what foretoken reads back, and whether it says that `reader` reads it: None for a pickle that it refuses.
    """
    back, readers = written(name, head, target, directory, as_safetensors=is_refused)
    if not is_refused:
        return back, readers[reader].reads
    pickle = directory / f"{name}_lm_head.pt"
    torch.save(load_file(pickle.with_suffix(".safetensors")), pickle)
    return back, None
