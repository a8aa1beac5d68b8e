"""Medusa-2: trains the target's backbone with the heads, so that its features predict further tokens better.

The target changes: the result is a new target with heads, and its own text is the new reference. The loss is
L_LM + lambda(step) * sum_i decay^i L_i. L_LM keeps the backbone at its task: cross-entropy with the text, or, for
self-distillation, KL(original || new). lambda rises from 0 in a single run, or is constant for heads that were trained
before.

Source: Cai et al. 2024 (arXiv 2401.10774), sections 2.2.2 and 2.3.2.

Letters: B sequences, S positions, E hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from typing_extensions import override

from foretoken.core.errors import ConfigError
from foretoken.models.parts import target_parts
from foretoken.training.losses import LossWeights, TargetRows, distances, target_rows
from foretoken.training.objective_base import Examples, HeadSums, Objective, accumulate, label_counts
from foretoken.training.trainer import Batches, Processes, TrainConfig, Trainer, parameter_groups

if TYPE_CHECKING:
    from foretoken.heads.base import Head
    from foretoken.models.loaded import LoadedModel

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class JointConfig(BaseModel):
    """Settings of the backbone's training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # "lora": low-rank adapters on every projection and an untied LM head; "full": all weights.
    backbone: Literal["lora", "full"] = "lora"
    head_weight: float = Field(default=0.2, gt=0)  # largest lambda
    head_warmup: Literal["constant", "linear", "sine"] = "constant"  # rise of lambda
    warmup_part: float = Field(default=1.0, gt=0, le=1)  # part of the steps until lambda is largest
    rate_factor: float = Field(default=0.25, gt=0)  # learning rate of the backbone as a part of the heads'
    self_distillation: bool = True  # towards the original's distributions instead of the text
    lora_rank: int = Field(default=32, ge=1)
    lora_alpha: int = Field(default=16, ge=1)  # scale of the adapters times the rank
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)  # before the adapters in training

    def weight(self, step: int, num_steps: int) -> float:
        """Returns the heads' weight in a step, counted from 0."""
        progress = min((step + 1) / (self.warmup_part * num_steps), 1.0)
        shape = {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}
        return self.head_weight * shape[self.head_warmup]


class JointTrainer(Trainer):
    """A head and its target in training."""

    def __init__(
        self,
        head: Head,
        target: LoadedModel,
        objective: Objective,
        config: TrainConfig,
        batches: Batches,
        joint: JointConfig,
        *,
        processes: Processes | None = None,
    ) -> None:
        """Prepares a run at step 0, see `Trainer`; adapts the module of `target`, in float32, in place.

        Raises `ConfigError` when adapters need peft and it is missing, or the head reads other features than the last.
        """
        if head.config.taps != ("final",):
            raise ConfigError(
                f"a {head.config.method} head cannot be trained together with its target. Expected a head that reads "
                "the last feature alone. Leave --joint out."
            )
        self._joint, self._target = joint, target
        module: Any = target.module
        module.set_attn_implementation("sdpa")
        # Only self-distillation needs the original, and adapters can be switched off.
        needs_copy = joint.self_distillation and joint.backbone == "full"
        self._original = copy.deepcopy(module).requires_grad_(requires_grad=False) if needs_copy else None
        if joint.backbone == "lora":
            self._adapted: Any = _with_adapters(module, joint)
        else:
            self._adapted = module.requires_grad_(requires_grad=True)
        decay = config.weight_decay
        self.head, self._parts, self._objective = head, target_parts(target), objective
        super().__init__(
            _Trained(head, self._adapted), config, batches,
            lambda _, tokens: tokens,  # features come with the pass that learns, and change
            processes=processes,
            groups=[*parameter_groups(head, decay), *parameter_groups(self._adapted, decay, joint.rate_factor)],
        )  # fmt: skip

    def merged_target(self) -> Any:
        """Returns the transformers model with its adapters merged; ends the training."""
        if self._joint.backbone == "lora":
            self._adapted = self._adapted.merge_and_unload()
        self._adapted.requires_grad_(requires_grad=False)
        return self._adapted.eval()

    @override
    def _counts(self, supervised: Tensor) -> Tensor:
        """Returns (K + 1,): the heads' positions and, last, the backbone's."""
        heads = label_counts(supervised, self._objective.steps(self.head.config))
        return torch.cat([heads, supervised[:, 1:].sum().double().reshape(1)])

    @override
    def _divisors(self, counts: Tensor) -> Tensor:
        return torch.cat([self._objective.divisors(counts[:-1]), counts[-1:]])

    @override
    def _weights(self, step: int) -> list[float]:
        weight = self._joint.weight(step, self._config.schedule.num_steps)
        return [*(weight * part for part in self._objective.step_weights(self.head.config)), 1.0]

    @override
    def _backward(self, step: int, batch: Examples, counts: Tensor) -> HeadSums:
        """See `Trainer`; ignores `features`, since the backbone's own have a gradient."""
        backbone = self._target.backbone
        output: Any = backbone(input_ids=batch.tokens, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        leaf = hidden.detach().requires_grad_()
        own = self._own_loss(leaf, batch.tokens, batch.supervised, float(counts[-1].clamp_min(1)))
        weight = self._joint.weight(step, self._config.schedule.num_steps)
        examples = replace(batch, features=leaf, final=leaf)
        sums = accumulate(self._objective, self.head, examples, self._parts, counts=counts[:-1], weight=weight)
        hidden.backward(leaf.grad)
        return HeadSums(*(torch.cat(pair) for pair in zip((sums.loss, sums.matches, sums.count), own, strict=True)))

    def _own_loss(
        self, features: Tensor, tokens: Tensor, supervised: Tensor, count: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward pass of L_LM down to the features; returns (1,) loss, matches with the text, and positions."""
        where = supervised[:, 1:].nonzero()
        sequence, position = where.unbind(1)
        logits = self._parts.lm_head(features[sequence, position])
        labels = tokens[sequence, position + 1]
        if self._joint.self_distillation:
            with torch.no_grad():
                target = target_rows(self._original_logits(tokens)[sequence, position])
            weights = LossWeights(kl=1.0)
        else:
            target, weights = TargetRows(labels), LossWeights(token=1.0)
        found = distances(logits.detach(), target, labels, weights, scale=1 / count)
        logits.backward(found.grad)
        matches = (found.best == labels).sum().double()
        total = found.loss.double().sum()
        return total.reshape(1), matches.reshape(1), torch.tensor([float(len(where))], dtype=torch.float64)

    def _original_logits(self, tokens: Tensor) -> Tensor:
        """Returns (B, S, V) logits of the original target."""
        is_copy = self._original is not None
        model: Any = self._original if is_copy else self._adapted
        was_training = model.training
        model.eval()
        with nullcontext() if is_copy else model.disable_adapter():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        model.train(was_training)
        return logits


class _Trained(nn.Module):
    """Head and backbone together; only trained tensors are saved."""

    def __init__(self, head: nn.Module, backbone: nn.Module) -> None:
        super().__init__()
        self.head, self.backbone = head, backbone

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        trainable = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        whole = super().state_dict(*args, **kwargs)
        return {key: value for key, value in whole.items() if key in trainable}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if strict and set(state_dict) != set(self.state_dict()):
            raise KeyError(f"tensors differ in {sorted(set(state_dict) ^ set(self.state_dict()))[0]}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def _with_adapters(module: Any, joint: JointConfig) -> Any:
    """Adds adapters to the projections, and to an untied LM head."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as err:
        raise ConfigError(
            "low-rank adapters need peft. Run in foretoken's repository: pip install '.[train]'."
        ) from err
    names = {name.rsplit(".", 1)[-1] for name, _ in module.named_modules()}
    found = [name for name in _PROJECTIONS if name in names]
    if not found:
        raise ConfigError(
            f"{type(module).__name__} has none of the projections {', '.join(_PROJECTIONS)}. Expected one of them for "
            "adapters. Train with backbone 'full'."
        )
    if module.get_output_embeddings().weight is not module.get_input_embeddings().weight:
        found.append("lm_head")
    config = LoraConfig(
        r=joint.lora_rank, lora_alpha=joint.lora_alpha, lora_dropout=joint.lora_dropout, target_modules=found
    )
    return get_peft_model(module, config)
