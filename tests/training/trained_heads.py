"""A tiny target on disk, heads that were quickly trained on its own texts, and ways to train them wrongly."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB_SIZE, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.doctor.checks import fresh_head
from foretoken.training.doctor.examine import OneBatch
from foretoken.training.doctor.readings import IN_PLACE, Texts, greedy_texts, read_features
from foretoken.training.objectives import head_config, objective_config
from foretoken.training.teacher import Teacher
from foretoken.training.trainer import HeadTrainer, train_config

MAX_TOKENS = 40
PROMPTS = [" ".join(f"t{(7 * i + 13 * j * j + 5) % VOCAB_SIZE}" for j in range(6 + i % 3)) for i in range(24)]
SIZES: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3, "own_lm_head": True},
    "hydra": {"num_heads": 2, "num_layers": 1, "own_lm_head": True, "prefix": None},
    "mlp_speculator": {"num_heads": 2, "inner_dim": 64, "tie_weights": False},
    "eagle": {"num_steps": 3},
    "eagle3": {"num_steps": 3, "boundaries": [1, 2]},
    "mtp": {"num_steps": 3},
}
STEPS = {"eagle": 100, "eagle3": 100, "mtp": 100}


@cache
def tokenizer() -> Any:
    """Words t0, t1, …, one token each."""
    inner = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="t1", eos_token="t2", unk_token="t3")


@cache
def target(seed: int = 0) -> LoadedModel:
    """The target; its final norm weighs dimensions so differently that a feature before it is another one."""
    module = tiny_model("llama", seed=seed)
    with torch.no_grad():
        norm = module.model.norm.weight
        norm.copy_(torch.randn(norm.shape, generator=torch.Generator().manual_seed(seed + 50)).mul(1.2).exp())
    return wrap_model(module, name=f"tiny-{seed}")


@cache
def texts(seed: int = 0) -> Texts:
    """What the target writes."""
    return greedy_texts(target(seed), tokenizer(), PROMPTS, max_tokens=MAX_TOKENS, runner="generic")


def right_feature(readings: dict[str, Tensor]) -> Tensor:
    """The one that drafting reads."""
    return readings[IN_PLACE]


def trained(
    method: str = "medusa",
    *,
    seed: int = 0,
    feature: Callable[[dict[str, Tensor]], Tensor] = right_feature,
    late: int = 0,
    steps: int | None = None,
) -> HeadCheckpoint:
    """A head that learnt the target's texts by heart, the text alone being its label.

    Args:
        method: Which head.
        seed: Of the target.
        feature: Which reading of the feature to train on.
        late: Labels are that many tokens later than they should be.
        steps: Optimiser steps; None for those of `STEPS`.
    """
    steps = STEPS.get(method, 120) if steps is None else steps
    loaded = target(seed)
    shortest = min(map(len, texts(seed).texts))
    tokens = torch.tensor([list(text[-shortest:]) for text in texts(seed).texts])
    parts = target_parts(loaded, dtype=torch.float32)
    head = fresh_head(head_config(method, loaded, SIZES[method]), parts, seed=0)
    features = feature(read_features(loaded, tokens, head.config.taps))
    if head.config.taps != ("final",):  # what is learned stands behind what is read
        features = torch.cat([features, Teacher(loaded).features(tokens)], dim=-1)
    config = train_config({
        "schedule": {"peak": 1e-2, "num_steps": steps, "warmup_steps": 10}, "batch_size": len(tokens),
        "length": shortest,
    })  # fmt: skip
    objective = objective_config(method, {
        "ce_weight": 1.0, "kl_weight": 0.0, "head_decay": 1.0, "feature_weight": 0.0, "noise": 0.0,
    })  # fmt: skip
    # Medusa heads read no tokens, so for them texts that lie later are labels that lie later, and nothing else.
    windows = tokens.roll(-late, dims=1)[:, : shortest - 3]
    batch = OneBatch(windows, torch.ones_like(windows, dtype=torch.bool))
    for _ in HeadTrainer(head, parts, objective, config, batch, lambda *_: features[:, : shortest - 3]).steps():
        pass
    return HeadCheckpoint.of_head(head, target=TargetFingerprint.of(loaded))


good = cache(trained)  # not to be changed


def write_target(directory: Path, seed: int = 0) -> Path:
    """The target as a directory."""
    module: Any = target(seed).module
    module.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
