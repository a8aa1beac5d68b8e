"""Trains a whole language model as the draft model of a frozen target (DistillSpec).

The loss is a weighted sum of divergences between the target's and the draft model's distributions of the next token, a
mean over the labels of the batch. The acceptance rate is 1 minus the expected total variation.

Source: Zhou et al. 2023 (arXiv 2310.08461), sections 4 and A.1; on-policy text after Agarwal et al. 2023 (2306.13649).

Letters: B sequences, S positions, M labels, V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from foretoken.core.errors import ConfigError
from foretoken.core.token_ids import tokenizer_sha
from foretoken.models.generic import own_attention
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import load_model, load_tokenizer
from foretoken.models.parts import target_parts
from foretoken.models.smaller import fresh_model, kept_layers, pruned_model, unpacked_model
from foretoken.training.draft_text import Distillation, DraftWriter, MixedText, Writer, written_windows
from foretoken.training.losses import distances, target_rows
from foretoken.training.objective_base import HeadSums, portion_rows
from foretoken.training.run_state import weights_sha
from foretoken.training.teacher import Teacher
from foretoken.training.trainer import Processes, StepReport, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from foretoken.training.evaluation import EvaluationConfig
    from foretoken.training.trainer import Batches, MicroBatch, TrainConfig

CHAIN = 5  # tokens of the chains in evaluations; DistillSpec's gamma is 3 to 7
_PROMPT_SHARE = 0.25  # of a window, in evaluations; a choice


class Student(NamedTuple):
    """A draft model before its training, and where it comes from, JSON-ready."""

    model: LoadedModel
    origin: dict[str, Any]


def new_student(
    target: LoadedModel, tokenizer: Any, *, init: str | None, sizes: Mapping[str, Any], seed: int
) -> Student:
    """Returns the draft model that a training begins with, in float32 on the target's device.

    `init` names a model with the target's tokenizer. Otherwise `sizes` with `num_layers` alone keeps that many of the
    target's layers; further sizes, by their names in `config.json`, make a model with random weights.

    Raises:
        ConfigError: If neither is given, the tokenizer is another one, or sizes do not fit.
        ModelError: If the model `init` cannot be loaded.
    """
    if init is not None:
        model = unpacked_model(load_model(init, dtype="float32", device=str(target.device)))
        own = load_tokenizer(init)
        if own is None or tokenizer_sha(own) != tokenizer_sha(tokenizer):
            raise ConfigError(
                f"--init '{init}' has another tokenizer than '{target.name}'. Expected the same one, so that a draft "
                "model learns the target's tokens. Begin from another model, or from --set num_layers=N."
            )
        if getattr(model.config, "quantization_config", None) is not None:
            raise ConfigError(f"--init '{init}' is quantized, so its weights cannot learn. Expected another model.")
        return Student(model, {"init": weights_sha(model.module.state_dict())})
    named = {"num_hidden_layers" if key == "num_layers" else key: value for key, value in sizes.items()}
    if not named:
        raise ConfigError(
            "a draft model needs a beginning. Expected --init MODEL, --set num_layers=N for N of the target's layers, "
            "or sizes of a new model, as --set num_layers=2 --set hidden_size=256."
        )
    if named.keys() == {"num_hidden_layers"}:
        count = named["num_hidden_layers"]
        if type(count) is not int:
            raise ConfigError(f"num_layers is {count!r}. Expected a number of layers.")
        layers = kept_layers(target.num_layers, count)
        return Student(pruned_model(target, layers), {"target_layers": layers})
    return Student(fresh_model(target, named, seed=seed), {"sizes": named})


class ModelTrainer(Trainer):
    """A draft model in training."""

    def __init__(
        self,
        student: LoadedModel,
        target: LoadedModel,
        objective: Distillation,
        config: TrainConfig,
        batches: Batches,
        *,
        processes: Processes | None = None,
    ) -> None:
        """Prepares a run at step 0; trains the module of `student` in place. Without written text `batches` are all."""
        self.student, self._objective = student, objective
        student.module.requires_grad_(requires_grad=True)
        self._parts, self._target_parts = target_parts(student), target_parts(target, dtype=config.compute_dtype)
        self.vocab_size = min(student.vocab_size, target.vocab_size)  # they may be padded differently
        self._text: MixedText | None = None
        if objective.on_policy or objective.teacher:
            shape = {"batch_size": config.batch_size, "length": config.length}
            at_once = config.batch_size * objective.refresh_steps
            self._text = batches = MixedText(
                batches, objective,
                DraftWriter(student, dtype=config.compute_dtype, length=config.length, at_once=at_once),
                Writer(target, length=config.length, at_once=at_once), **shape,
            )  # fmt: skip
        teacher, size = Teacher(target), config.micro_batch_size or config.batch_size

        def features(_: int, tokens: Tensor) -> Tensor:
            return torch.cat([teacher.features(part).float() for part in tokens.split(size)])

        super().__init__(config, batches, features, processes=processes)

    @property
    def written(self) -> tuple[int, float]:
        """Tokens of written text so far, and the seconds that writing took."""
        tokens, seconds = (0, 0.0) if self._text is None else self._text.written.tolist()
        return int(tokens), seconds

    @override
    def _trained(self) -> nn.Module:
        parts = nn.ModuleDict({"model": self.student.module})
        if self._text is not None:
            parts["text"] = self._text
        return parts

    @override
    def _counts(self, supervised: Tensor) -> Tensor:
        return supervised[:, 1:].sum().double().reshape(1)

    @override
    def _weights(self, step: int) -> list[float]:
        return [1.0]

    @override
    def _train_step(self) -> StepReport:
        before = self.written
        report = super()._train_step()
        tokens, seconds = (after - earlier for after, earlier in zip(self.written, before, strict=True))
        return replace(report, written_tokens_per_s=tokens / seconds) if tokens else report

    @override
    def _backward(self, step: int, batch: MicroBatch, counts: Tensor) -> HeadSums:
        """See `Trainer`; the draft model reads the windows at `positions`, the target at their own."""
        tokens, supervised, features, positions = batch
        row, place = supervised[:, 1:].nonzero().unbind(1)
        places = positions.of(torch.arange(tokens.shape[1], device=tokens.device))
        read = read_features(self.student, tokens, places)[row, place]
        given, labels = features[row, place], tokens[row, place + 1]
        grad = torch.zeros_like(read)
        loss = matches = torch.zeros((), dtype=torch.float64, device=tokens.device)
        scale, temperature = 1 / float(counts.clamp_min(1)), self._objective.target_temperature
        for part in portions(len(read), self.vocab_size, tokens.device):
            hidden = read[part].detach().requires_grad_()
            logits = self._parts.lm_head(hidden)[:, : self.vocab_size]
            with torch.no_grad():
                wanted = self._target_parts.lm_head(given[part])[:, : self.vocab_size] / temperature
            target = target_rows(wanted)
            found = distances(logits.detach(), target, labels[part], self._objective.distance_weights, scale=scale)
            logits.backward(found.grad)
            assert hidden.grad is not None, "the LM head reads it"
            grad[part] = hidden.grad
            loss, matches = loss + found.loss.double().sum(), matches + (found.best == target.best).sum()
        read.backward(grad)
        count = torch.tensor([len(read)], dtype=torch.float64, device=tokens.device)
        return HeadSums(loss.reshape(1), matches.reshape(1), count)


def read_features(model: LoadedModel, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Returns (B, S, E) outputs of a model's last norm with their graph, for (B, S) int64 tokens.

    positions: (B, S) or (1, S) int64; None for 0, 1, 2, …
    """
    backbone: Any = model.backbone
    # The mask says that each row is one text: without it transformers takes a jump of the positions for a new one.
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": torch.ones_like(tokens)}
    with own_attention(model.module, "sdpa"):
        features: Tensor = backbone(**inputs, use_cache=False).last_hidden_state
    return features


def portions(count: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Yields slices of `count` rows, each small enough for its logits."""
    size = portion_rows(vocab_size, device)
    for begin in range(0, count, size):
        yield slice(begin, begin + size)


def evaluator(
    evaluation: EvaluationConfig, trainer: ModelTrainer, target: LoadedModel, config: TrainConfig
) -> Callable[[], dict[str, Any]]:
    """Returns a function that measures the draft model in training on what the target writes to held-out prompts.

    The prompts are the first parts of the held-out windows. The function returns fields of `StepReport`. It draws no
    random number. Raises `ConfigError` if the texts are too short for a chain.
    """
    greedy, sampled = (
        written_windows(
            Writer(target, length=evaluation.tokens.shape[1], at_once=len(evaluation.tokens)), evaluation.tokens,
            torch.ones_like(evaluation.supervised), range(len(evaluation.tokens)), temperature=temperature,
            prompt_share=_PROMPT_SHARE,
        )
        for temperature in (0.0, 1.0)
    )  # fmt: skip
    starts = greedy[1][:, 1:].unfold(1, CHAIN, 1).all(-1)
    if not bool(starts.any()):
        raise ConfigError(
            f"no text of the target has {CHAIN} tokens in a row. Expected longer windows. Raise --length, or pass "
            "--eval-every 0."
        )
    student, width = trainer.student, trainer.vocab_size
    lm_head = target_parts(student).lm_head

    @torch.no_grad()
    def measured() -> dict[str, Any]:
        student.module.eval()
        device = target.device
        with torch.autocast(device.type, torch.bfloat16, enabled=config.compute_dtype == torch.bfloat16):
            tokens, is_label = (each.to(device) for each in greedy)
            features = read_features(student, tokens)[:, :-1].flatten(0, 1)
            parts = portions(len(features), width, device)
            best = torch.cat([lm_head(features[part])[:, :width].argmax(1) for part in parts])
            is_right = best.view(len(tokens), -1) == tokens[:, 1:]
            first = float(is_right[is_label[:, 1:]].double().mean())
            runs = is_right.unfold(1, CHAIN, 1)[starts.to(device)].cumprod(-1)
            shares = runs.double().mean(0).tolist()
        _, drawn = acceptance_rates(student, target, *sampled, dtype=config.compute_dtype)
        return {
            "held_out_acceptance": shares,
            "held_out_tau": 1.0 + sum(shares),
            "held_out_alpha": [first, drawn],
        }

    return measured


@torch.no_grad()
def acceptance_rates(
    student: LoadedModel, target: LoadedModel, tokens: Tensor, is_label: Tensor, *, dtype: torch.dtype
) -> tuple[float, float]:
    """Returns the acceptance rates of a draft model behind given text, at temperatures 0 and 1.

    At 0 the rate is the share of labels at which both models have the same most probable token, at 1 the mean of
    `sum(min(p, q))`: expected values, so texts need not be drawn anew.

    Args:
        tokens: (B, S) int64.
        is_label: (B, S) bool, at least one behind the first column.
        dtype: Of GEMMs, by autocast, and of the target's LM head.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), corollary 3.6.
    """
    student.module.eval()
    device, width = target.device, min(student.vocab_size, target.vocab_size)
    tokens, is_label = tokens.to(device), is_label.to(device)
    target_head, lm_head = target_parts(target, dtype=dtype).lm_head, target_parts(student).lm_head
    row, place = is_label[:, 1:].nonzero().unbind(1)
    same, overlap = torch.zeros((2,), dtype=torch.float64, device=device).unbind()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        features = read_features(student, tokens)[row, place]
        given = Teacher(target).features(tokens)[row, place].float()
        for part in portions(len(features), width, device):
            p = target_head(given[part])[:, :width].float().softmax(1)
            q = lm_head(features[part])[:, :width].float().softmax(1)
            same += (p.argmax(1) == q.argmax(1)).sum()
            overlap += torch.minimum(p, q).sum().double()
    return float(same) / len(features), float(overlap) / len(features)
