"""Trains a whole language model as the draft model of a frozen target (DistillSpec).

The loss is a weighted sum of divergences between the target's and the draft model's distributions of the next token, a
mean over the labels of the batch. The acceptance rate is 1 minus the expected total variation.

The text is fixed data, text that the target writes, and text that the draft model writes (on policy). A written text
begins with the prompt of a window of the fixed data. The windows of several steps are written together. The text lies
in buffers, which a checkpoint of the run includes. A resumed run therefore trains on the same bits.

Source: Zhou et al. 2023 (arXiv 2310.08461), sections 4 and A.1; on-policy text after Agarwal et al. 2023 (2306.13649).

Letters: B windows of a batch, S positions, K steps that share a call, M labels, V vocabulary, E hidden size.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from foretoken.core.backend import has_triton_kernels, integers_on
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.passes import Pass, TokenChoice
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_ids import tokenizer_sha
from foretoken.decoder.slot_cache import affordable_rows
from foretoken.models.generic import own_attention
from foretoken.models.loading import load_model, load_tokenizer, wrap_model
from foretoken.models.parts import target_parts
from foretoken.models.smaller import fresh_model, kept_layers, pruned_model, unpacked_model, with_attention
from foretoken.runner.decoders import layer_shapes
from foretoken.runner.runner import Runner
from foretoken.runner.self_test import NUM_ROWS
from foretoken.sampling.noise import KeyedNoise, Purpose, derive_seed
from foretoken.training.losses import distances, target_rows
from foretoken.training.objective_base import Divergences, Examples, HeadSums, portions
from foretoken.training.run_state import weights_sha
from foretoken.training.teacher import Teacher
from foretoken.training.trainer import Batches, Processes, StepReport, TrainConfig, Trainer

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

_AT_ONCE = 512  # texts decoded together; a choice: wide passes, and a bound of the KV cache
_PROMPT_TOKENS = 4096  # of a pass; a choice
_GOLDEN = (math.sqrt(5) - 1) / 2


class Distillation(Divergences):
    """Weights of the distances, and the origin of the text."""

    on_policy: float = Field(default=0.0, ge=0, le=1)  # share of batches with text of the draft model
    teacher: float = Field(default=0.0, ge=0, le=1)  # share of batches with text of the target; the rest is the data
    temperature: float = Field(default=1.0, ge=0, le=2)  # of written text; 0 for greedy decoding
    refresh_steps: int = Field(default=16, ge=1)  # between new texts, by the draft model's weights at that time
    prompt_share: float = Field(default=0.25, gt=0, lt=1)  # part of a window that is the prompt of a written text
    supervise_all: bool = False  # whether prompts of written text count as labels too
    # Temperature of the target's distribution that the draft model learns; below 1 for greedy decoding.
    target_temperature: float = Field(default=1.0, gt=0, le=2)

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.on_policy + self.teacher > 1:
            raise ValueError("on_policy and teacher are shares of the batches. Expected a sum of at most 1")
        return self

    def author(self, step: int) -> str | None:
        """Returns who writes the batch of a step: "draft" or "target"; None for the data.

        Multiples of the golden ratio spread each share evenly over the steps.
        """
        place = (step + 1) * _GOLDEN % 1.0
        if place < self.on_policy:
            return "draft"
        return "target" if place < self.on_policy + self.teacher else None


class Writer:
    """Continues prompts with a model in memory, in large batches.

    The passes are those of the engine's runner, without the engine: texts of one length need no scheduler, and a small
    model on a GPU would wait for its bookkeeping.
    """

    def __init__(self, model: LoadedModel, *, length: int, at_once: int) -> None:
        """Prepares texts of at most `length` tokens, prompt included; the KV cache is made with the first text."""
        self._model, self._length, self._at_once = model, length, min(at_once, _AT_ONCE)
        self.vocab_size = model.vocab_size

    @cached_property
    def _runner(self) -> Runner:
        model = self._model
        rows = affordable_rows(layer_shapes(model), dtype=model.dtype, device=model.device)
        slots = max(1, min(self._at_once, rows // (self._length + NUM_ROWS)))
        return Runner(model, num_slots=slots, context_len=self._length, max_nodes=1)

    @torch.no_grad()
    def write(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float) -> list[list[int]]:
        """Returns the continuation of each prompt, up to the end-of-sequence token or `length` tokens in all.

        The text of a seed is the one that `LLM` gives it, up to rounding. Raises `ModelError` if logits are not finite.
        """
        self._runner.follow_weights()
        slots, texts = self._runner.cache.num_slots, []
        for begin in range(0, len(prompts), slots):
            part = slice(begin, begin + slots)
            texts += self._written(prompts[part], seeds[part], temperature)
        return texts

    def _written(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float) -> list[list[int]]:
        device = self._runner.device
        self._read([prompt[:-1] for prompt in prompts])
        texts = [list(prompt) for prompt in prompts]
        scale = SamplingParams(temperature=temperature).inverse_temperature
        scales = torch.full((len(prompts),), scale, device=device)
        keys = integers_on(list(seeds), device)
        rows = [row for row, text in enumerate(texts) if len(text) < self._length]
        while rows:
            work = Pass.of_chains(
                [texts[row][-1:] for row in rows], slots=rows, prefix_lens=[len(texts[row]) - 1 for row in rows],
                device=device, has_last_logits=True,
            )  # fmt: skip
            index = integers_on(rows, device)
            choice = TokenChoice(inverse_temperature=scales[index], seeds=keys[index])
            chosen = self._chosen(replace(work, choice=choice, has_features=False), choice).tolist()
            if min(chosen) < 0:
                raise ModelError(f"'{self._model.name}' gives logits that are not finite. Expected numbers.")
            for row, token in zip(rows, chosen, strict=True):
                texts[row].append(token)
            rows = [row for row in rows if len(texts[row]) < self._length and texts[row][-1] not in self._model.eos_ids]
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def _read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Writes the KV rows of prompts."""
        waiting: list[tuple[int, Sequence[int]]] = []
        for slot, prompt in enumerate(prompts):
            if prompt:
                waiting.append((slot, prompt))
            if waiting and (slot + 1 == len(prompts) or sum(len(each) for _, each in waiting) >= _PROMPT_TOKENS):
                chains = [each for _, each in waiting]
                self._runner.run(
                    Pass.of_chains(
                        chains, slots=[slot for slot, _ in waiting], prefix_lens=[0] * len(chains),
                        device=self._runner.device,
                    )
                )  # fmt: skip
                waiting = []

    def _chosen(self, work: Pass, choice: TokenChoice) -> Tensor:
        """Returns the (R,) int64 tokens after a pass."""
        output = self._runner.run(work)
        if output.chosen is not None:
            return output.chosen
        assert output.logits is not None, "the pass asks for them"
        after = work.positions + 1
        if has_triton_kernels(self._runner.device):
            from foretoken.sampling.triton_choice import chosen_tokens

            logits = output.logits.unsqueeze(1)
            return chosen_tokens(logits, choice.inverse_temperature, choice.seeds, after.unsqueeze(1)).tokens[:, 0]
        noise = KeyedNoise(choice.seeds).gumbel(after, Purpose.TARGET, output.logits.shape[1])
        scale = choice.inverse_temperature.unsqueeze(1)
        return torch.where(scale > 0, output.logits * scale + noise, output.logits).argmax(1)


class DraftWriter(Writer):
    """Writes with the present weights of a model in training."""

    def __init__(self, model: LoadedModel, *, dtype: torch.dtype, length: int, at_once: int) -> None:
        """Copies the model; dtype: of the copy."""
        self._trained: Any = model.module
        copied = wrap_model(copy.deepcopy(model.module).to(dtype), name=model.name)
        super().__init__(copied, length=length, at_once=at_once)

    @torch.no_grad()
    def follow(self) -> None:
        """Copies the present weights; the next text is written with them."""
        for own, trained in zip(self._model.module.parameters(), self._trained.parameters(), strict=True):
            own.copy_(trained)


def written_windows(
    writer: Writer,
    tokens: Tensor,
    supervised: Tensor,
    seeds: Sequence[int],
    *,
    temperature: float,
    prompt_share: float,
    supervise_all: bool = False,
) -> tuple[Tensor, Tensor]:
    """Replaces the later part of windows by what a model writes.

    Takes and returns (N, S) int64 tokens and (N, S) bool labels; `seeds` are N. A prompt ends before the first label
    from `prompt_share` of its window on. After an end-of-sequence token a window keeps the data, which is no label. The
    new labels are the written tokens, and with `supervise_all` the prompt's labels.
    """
    length = tokens.shape[1]
    first = min(max(round(prompt_share * length), 1), length - 1)
    later = supervised[:, first:]
    cuts = (first + later.int().argmax(1)).tolist()  # argmax of no label is 0
    prompts = [row[:cut] for row, cut in zip(tokens.tolist(), cuts, strict=True)]
    tokens, is_label = tokens.clone(), supervised & supervise_all
    for row, (cut, text) in enumerate(zip(cuts, writer.write(prompts, seeds, temperature=temperature), strict=True)):
        tokens[row, cut : cut + len(text)] = torch.tensor(text)
        is_label[row, cut:] = False
        is_label[row, cut : cut + len(text)] = True
    return tokens, is_label


class MixedText(nn.Module):
    """Batches of fixed and of written text, see `foretoken.training.trainer.Batches`.

    Every process writes the whole batch. `tokens` and `supervised`, (K, B, S), are the windows of the K steps of a
    block, (); `written`, (2,) float64, counts tokens and seconds of writing.
    """

    tokens: Tensor
    supervised: Tensor
    block: Tensor
    written: Tensor

    def __init__(
        self,
        fixed: Batches,
        objective: Distillation,
        draft: DraftWriter,
        target: Writer,
        *,
        batch_size: int,
        length: int,
    ) -> None:
        super().__init__()
        self._fixed, self._objective, self._draft, self._target = fixed, objective, draft, target
        self._vocab_size = min(draft.vocab_size, target.vocab_size)
        shape = (objective.refresh_steps, batch_size, length)
        self.register_buffer("tokens", torch.zeros(shape, dtype=torch.int64))
        self.register_buffer("supervised", torch.zeros(shape, dtype=torch.bool))
        self.register_buffer("block", torch.tensor(-1))
        self.register_buffer("written", torch.zeros(2, dtype=torch.float64))

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the batch of a step; writes the text of its block if the buffers hold another block."""
        if self._objective.author(step) is None:
            return self._fixed.batch(step, batch_size=batch_size, length=length, seed=seed)
        block, place = divmod(step, len(self.tokens))
        if int(self.block) != block:
            self._write(block, batch_size=batch_size, length=length, seed=seed)
        return self.tokens[place].clone(), self.supervised[place].clone()

    def _write(self, block: int, *, batch_size: int, length: int, seed: int) -> None:
        begin = time.perf_counter()
        steps = range(block * len(self.tokens), (block + 1) * len(self.tokens))
        self._draft.follow()
        for name, writer in (("draft", self._draft), ("target", self._target)):
            own = [step for step in steps if self._objective.author(step) == name]
            if not own:
                continue
            batches = [self._fixed.batch(step, batch_size=batch_size, length=length, seed=seed) for step in own]
            tokens, supervised = (torch.cat(parts) for parts in zip(*batches, strict=True))
            seeds = [derive_seed(seed, -1 - step * batch_size - row) for step in own for row in range(batch_size)]
            tokens, supervised = written_windows(
                writer, tokens, supervised, seeds, temperature=self._objective.temperature,
                prompt_share=self._objective.prompt_share, supervise_all=self._objective.supervise_all,
            )  # fmt: skip
            places = torch.tensor([step - steps[0] for step in own])
            # A model with more rows of padding in its vocabulary may draw one that the other model does not have.
            self.tokens[places] = tokens.view(-1, batch_size, length).clamp_max(self._vocab_size - 1)
            self.supervised[places] = supervised.view(-1, batch_size, length)
            self.written[0] += int(supervised.sum())
        self.written[1] += time.perf_counter() - begin
        self.block.fill_(block)


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
        layers = with_attention(kept_layers(target.num_layers, count), target.config)
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
        parts = nn.ModuleDict({"model": student.module})
        if objective.on_policy or objective.teacher:
            at_once = config.batch_size * objective.refresh_steps
            self._text = parts["text"] = batches = MixedText(
                batches, objective,
                DraftWriter(student, dtype=config.compute_dtype, length=config.length, at_once=at_once),
                Writer(target, length=config.length, at_once=at_once),
                batch_size=config.batch_size, length=config.length,
            )  # fmt: skip
        teacher, size = Teacher(target), config.micro_batch_size or config.batch_size

        def features(_: int, tokens: Tensor) -> Tensor:
            return torch.cat([teacher.features(part).float() for part in tokens.split(size)])

        super().__init__(parts, config, batches, features, processes=processes)

    @property
    def written(self) -> tuple[int, float]:
        """Tokens of written text so far, and the seconds that writing took."""
        tokens, seconds = (0, 0.0) if self._text is None else self._text.written.tolist()
        return int(tokens), seconds

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
    def _backward(self, step: int, batch: Examples, counts: Tensor) -> HeadSums:
        """See `Trainer`; the draft model reads the windows at `positions`, the target at their own."""
        tokens = batch.tokens
        row, place = batch.supervised[:, 1:].nonzero().unbind(1)
        positions = batch.positions.of(torch.arange(tokens.shape[1], device=tokens.device))
        read = read_features(self.student, tokens, positions)[row, place]
        given, labels = batch.final[row, place], tokens[row, place + 1]
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
