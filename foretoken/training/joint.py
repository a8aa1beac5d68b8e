"""Medusa-2: trains the target's backbone along with the heads, so that its features predict further tokens better.

The target changes: what comes out is a new target with heads, and its own text is from then on the reference. Its loss
is L_LM + lambda(step) * sum_i decay^i L_i, where L_LM keeps the backbone at its task: cross-entropy with the text, or,
for self-distillation, KL(original || new). lambda rises from 0 in a single run, or is constant when heads trained
before are the beginning.

Source: Cai et al. 2024 (arXiv 2401.10774), sections 2.2.2 and 2.3.2.

Letters: B sequences, S positions, E hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ConfigError
from foretoken.models.parts import target_parts
from foretoken.training.losses import LossWeights, TargetRows, distances, target_rows
from foretoken.training.objectives.base import Examples, HeadSums, accumulate
from foretoken.training.trainer import Trainer, parameter_groups

if TYPE_CHECKING:
    from foretoken.heads.base import Head
    from foretoken.models.loading import LoadedModel
    from foretoken.training.config import JointConfig, TrainConfig
    from foretoken.training.objectives.base import Objective
    from foretoken.training.trainer import Batches, Processes

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
        """Prepares a run at step 0; the target's weights will change.

        Args:
            head: With the weights to begin from.
            target: In float32; its module is adapted in place.
            objective: What the heads learn.
            config: How.
            batches: From what.
            joint: How the backbone learns along.
            processes: Others that train along; None for none.

        Raises:
            ConfigError: When adapters are asked for and peft is not installed, or the head reads other features than
                the last one.
        """
        if head.config.taps != ("final",):
            raise ConfigError(
                f"a {head.config.method} head cannot be trained together with its target. Expected a head that reads "
                "the last feature alone. Leave --joint out."
            )
        self._joint, self._device = joint, target.device
        # Only what is compared with the original's distributions needs the original.
        needs_copy = joint.self_distillation and joint.backbone == "full"
        self._original = copy.deepcopy(target.module).requires_grad_(requires_grad=False) if needs_copy else None
        target.module.set_attn_implementation("sdpa")  # type: ignore[operator]
        if self._original is not None:
            self._original.set_attn_implementation("sdpa")  # type: ignore[operator]
        self._target = target
        self._adapted: Any = _with_adapters(target, joint) if joint.backbone == "lora" else target.module
        if joint.backbone == "full":
            self._adapted.requires_grad_(requires_grad=True)
        super().__init__(
            head, target_parts(target), objective, config, batches, lambda _, tokens: tokens, processes=processes
        )

    def merged_target(self) -> Any:
        """The transformers model with what it learned in its own weights; training is over."""
        if self._joint.backbone == "lora":
            self._adapted = self._adapted.merge_and_unload()
        self._adapted.requires_grad_(requires_grad=False)
        return self._adapted.eval()

    def _trained(self) -> nn.Module:
        """Adapters or backbone, and the head; see `Trainer`."""
        return _Trained(self.head, self._adapted)

    def _groups(self) -> list[dict[str, Any]]:
        """See `Trainer`: the backbone learns more slowly."""
        decay = self._config.weight_decay
        return [*parameter_groups(self.head, decay), *parameter_groups(self._adapted, decay, self._joint.rate_factor)]

    def _counts(self, supervised: Tensor) -> Tensor:
        """(K + 1,): the heads' and, last, the backbone's own."""
        return torch.cat([super()._counts(supervised), supervised[:, 1:].sum().double().reshape(1)])

    def _divisors(self, counts: Tensor) -> Tensor:
        """(K + 1); see `Trainer`."""
        return torch.cat([super()._divisors(counts[:-1]), counts[-1:]])

    def _weights(self, step: int) -> list[float]:
        """(K + 1) weights; see `Trainer`."""
        weight = self._joint.weight(step, self._config.schedule.num_steps)
        return [*(weight * part for part in super()._weights(step)), 1.0]

    def _learn(self, step: int, tokens: Tensor, supervised: Tensor, features: Tensor, counts: Tensor) -> HeadSums:
        """See `Trainer`; features are not used: the backbone's own have a gradient."""
        del features
        backbone = self._target.backbone
        output: Any = backbone(input_ids=tokens, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        leaf = hidden.detach().requires_grad_()
        own = self._own_loss(leaf, tokens, supervised, float(counts[-1].clamp_min(1)))
        num_steps = self._config.schedule.num_steps
        weight = self._joint.weight(step, num_steps)
        examples = Examples(tokens, supervised, leaf, leaf, step / num_steps)
        sums = accumulate(self._objective, self.head, examples, self._parts, counts=counts[:-1], weight=weight)
        hidden.backward(leaf.grad)
        return HeadSums(*(torch.cat(pair) for pair in zip((sums.loss, sums.matches, sums.count), own, strict=True)))

    def _own_loss(
        self, features: Tensor, tokens: Tensor, supervised: Tensor, count: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Backward of L_LM down to the features; (1,) loss, matches with the text, and positions."""
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
        """(B, S, V) logits of the target as it was."""
        is_copy = self._original is not None
        model: Any = self._original if is_copy else self._adapted
        was_training = model.training
        model.eval()
        with nullcontext() if is_copy else model.disable_adapter():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        model.train(was_training)
        return logits


class _Trained(nn.Module):
    """Head and backbone side by side; only what is trained is saved."""

    def __init__(self, head: nn.Module, backbone: nn.Module) -> None:
        super().__init__()
        self.head, self.backbone = head, backbone

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The trainable tensors."""
        trainable = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        whole = super().state_dict(*args, **kwargs)
        return {key: value for key, value in whole.items() if key in trainable}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Restores the trainable tensors."""
        if strict and set(state_dict) != set(self.state_dict()):
            raise KeyError(f"tensors differ in {sorted(set(state_dict) ^ set(self.state_dict()))[0]}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def _with_adapters(target: LoadedModel, joint: JointConfig) -> Any:
    """The model with adapters on its projections, and on its LM head unless that embeds tokens too.

    Raises:
        ConfigError: When peft is not installed, or the model has no projections of the known names.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as err:
        raise ConfigError(
            "low-rank adapters need peft. Run in foretoken's repository: pip install '.[train]'."
        ) from err
    module: Any = target.module
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
