"""Examines a target and a head: runs all checks in order and collects their verdicts.

Checks go from the target to the head's weights, the head's predictions, and the engine's drafts. If an early check
fails, later ones are skipped, since their results would mislead.

Letters: B texts, S positions, E hidden size, K heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.bench.workload import Workload
from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import ForetokenError, ModelError, RequestError
from foretoken.entrypoints.llm import LLM
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetWeights
from foretoken.formats.registry import read_head
from foretoken.models.parts import TargetParts, target_parts
from foretoken.text.codec import Codec
from foretoken.text.prompts import ChatFormat, chat_prompts
from foretoken.training.doctor.checks import (
    Check,
    Verdict,
    check_acceptance,
    check_agreement,
    check_fit,
    check_logits,
    check_serving,
    check_taps,
    check_template,
    check_trained,
    check_values,
    fresh_head,
    skipped,
)
from foretoken.training.doctor.readings import (
    AT_ONCE,
    IN_PLACE,
    Case,
    Texts,
    compare,
    greedy,
    greedy_texts,
    predictions,
    read_features,
    target_choices,
)
from foretoken.training.evaluation import TEMPERATURES, guesses_of, target_texts
from foretoken.training.objectives import head_config, objective_config
from foretoken.training.teacher import Teacher
from foretoken.training.trainer import Batches, HeadTrainer, train_config

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.core.results import RequestOutput
    from foretoken.heads.base import Head, HeadConfig
    from foretoken.models.loaded import LoadedModel

_STEPS, _WINDOWS, _LENGTH = 100, 2, 16  # a choice: a method that works learns two windows by heart in so many steps


def examine_training(
    target: LoadedModel,
    config: HeadConfig,
    texts: Texts,
    *,
    data: Batches | None = None,
    token_map: Tensor | None = None,
) -> list[Check]:
    """Checks that a fresh head has the right starting point, and that a few steps on one batch lower its loss.

    Trains on `texts` without `data`. For `token_map` see `fresh_head`.
    """
    parts = target_parts(target, dtype=torch.float32)

    def fresh(seed: int) -> Head:
        return fresh_head(config, parts, seed=seed, token_map=token_map)

    return [_check_start(target, fresh, parts, texts), _check_learning(target, fresh, parts, texts, data)]


def _check_start(target: LoadedModel, fresh: Callable[[int], Head], parts: TargetParts, texts: Texts) -> Check:
    config = fresh(0).config
    features = read_features(target, texts.tokens, config.taps)[IN_PLACE]
    one, other = (predictions(fresh(seed), parts, features, texts) for seed in (0, 1))
    if not torch.equal(one, other):
        return skipped("fresh head", f"A fresh {config.method} head is random.")
    where = texts.judged(last=config.steps)
    choices = target_choices(target, texts)
    share = min(float((row == choices)[where].float().mean()) for row in one)
    message = "Every fresh head predicts the target's own next token."
    if share < 0.99:
        message = (
            "A fresh head does not say the target's own next token, though it only hands the feature on to the LM "
            "head: the feature is not what the LM head reads, or the LM head is not the target's. Look at the checks "
            "of the target above; do not train yet."
        )
    verdict: Verdict = "ok" if share >= 0.99 else "warning" if share >= 0.5 else "fault"
    return Check("fresh head", verdict, share, "at least 0.99 of the positions", message)


def _check_learning(
    target: LoadedModel, fresh: Callable[[int], Head], parts: TargetParts, texts: Texts, data: Batches | None
) -> Check:
    """Checks that 100 steps on one small batch lower the loss."""
    tokens, supervised = _training_batch(texts, data)
    head = fresh(0)
    features = Teacher(target, head.config.taps).read_features(tokens).float()
    settings = train_config({
        "schedule": {"num_steps": _STEPS, "warmup_steps": 10}, "batch_size": len(tokens),
        "length": tokens.shape[1],
    })  # fmt: skip
    # Without noise: for short windows EAGLE's noise would exceed the features themselves.
    objective = objective_config(head.config.method, {"noise": 0.0})
    name, expected = "learning", "below 0.9 times the first loss"
    trainer = HeadTrainer(head, parts, objective, settings, OneBatch(tokens, supervised), lambda *_: features)
    try:
        losses = [report.loss for report in trainer.steps()]
    except ModelError as err:
        return Check(name, "fault", None, expected, str(err))
    has_learnt = losses[-1] < 0.9 * losses[0]
    message = f"The loss goes from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps on one batch"
    if not has_learnt:
        message += (
            ": the head learns nothing even by heart. Expected it to fall clearly. Features may not be finite, or "
            "the rate may be too low"
        )
    return Check(name, "ok" if has_learnt else "fault", [losses[0], losses[-1]], expected, f"{message}.")


@dataclass(frozen=True, slots=True)
class OneBatch:
    """The same (B, S) tokens and flags at every step; see `Batches`."""

    tokens: Tensor
    supervised: Tensor

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the batch."""
        del step, batch_size, length, seed
        return self.tokens, self.supervised


def _training_batch(texts: Texts, data: Batches | None) -> tuple[Tensor, Tensor]:
    """Returns (B, S) tokens and flags: of the data, or the ends of the texts."""
    if data is not None:
        return data.batch(0, batch_size=_WINDOWS, length=_LENGTH, seed=0)
    length = min(_LENGTH, *map(len, texts.texts))
    tokens = torch.tensor([list(text[-length:]) for text in texts.texts[:_WINDOWS]])
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


_LEAST_INT8 = 0.97  # a choice: int8 cost the 0.5B's HASS head nothing, and a fifth where `fc` was int8 too
_OF_THE_HEAD = (
    "head trained", "head values", "feature", "configuration", "labels", "knowledge", "depth", "drafting", "rounding",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The case to examine.

    `asked` returns the same prompts as the acceptance of heads is measured on them: conversations by the target's chat
    template. None for `prompts` as they are.
    """

    head: Path | None = None
    method: str | None = None
    train_check: bool = False  # whether to try training with the trained head's sizes too
    prompts: Sequence[str]  # texts that the target continues; held out from training
    asked: Callable[[], Workload] | None = None
    max_tokens: int = 64  # of each continuation
    data: Batches | None = None  # training data for the trial; None for the texts
    runner: str = "auto"
    allow_other_target: bool = False  # whether to accept a head for another target of the same sizes


def examine(
    target: LoadedModel, tokenizer: Any, what: Examination, on_stage: Callable[[str], None] = lambda _: None
) -> list[Check]:
    """Makes all checks that the case allows. Writes nothing. `on_stage` is told what begins, in a few words.

    Raises `RequestError` when the prompts are too short, `ConfigError` for an unknown method.
    """
    # First, since an unknown method must not cost a run of the target.
    config = None if what.method is None else head_config(what.method, target, {})
    on_stage(f"the target continues {len(what.prompts)} prompts")
    texts = greedy_texts(target, tokenizer, what.prompts, max_tokens=what.max_tokens, runner=what.runner)
    probe = torch.tensor([list(texts.texts[0])], device=target.device)
    on_stage("the target's logits")
    checks = [check_logits(target, probe), *check_serving(target, probe, what.runner)]
    token_map = None
    if config is not None and config.taps != ("final",):
        checks.append(check_taps(target, probe, config.taps, what.runner))
        if checks[-1].value is None:
            checks += _skip("The taps cannot be read.", "fresh head", "learning")
            config = None
    if what.head is not None:
        found, checkpoint = _examine_head(target, tokenizer, what.head, texts, what, on_stage)
        checks += found
        if what.train_check and what.method is None:
            if checkpoint is None:
                checks += _skip("The head's sizes are not known to fit.", "fresh head", "learning")
            else:
                config, token_map = checkpoint.config, checkpoint.weights.get("token_map")
    if config is not None:
        on_stage("training on one batch")
        checks += examine_training(target, config, texts, data=what.data, token_map=token_map)
    return checks


def _examine_head(
    target: LoadedModel, tokenizer: Any, head: Path, texts: Texts, what: Examination, on_stage: Callable[[str], None]
) -> tuple[list[Check], HeadCheckpoint | None]:
    fingerprint, whole = TargetFingerprint.of(target), "every tensor of its sizes, and no other"
    try:
        _, checkpoint = read_head(
            head, target=fingerprint, base_config=target.config, weights=lambda: TargetWeights.of_model(target)
        )
    except ForetokenError as err:
        load = Check("head loads", "fault", None, whole, str(err))
        return [load, *_skip("The head cannot be loaded.", "head fits", *_OF_THE_HEAD)], None
    load = Check("head loads", "ok", len(checkpoint.weights), whole, "Every tensor is there, and no other.")
    fit = check_fit(checkpoint, fingerprint, what=str(head), allow_other_target=what.allow_other_target)
    if fit.verdict == "fault":
        return [load, fit, *_skip("The head belongs to another target.", *_OF_THE_HEAD)], None
    parts = target_parts(target, dtype=torch.float32)
    trained, untrained = check_trained(checkpoint, parts)
    values = check_values(checkpoint, untrained)
    weights = [load, fit, trained, values]
    if "fault" in (trained.verdict, values.verdict):
        return [*weights, *_skip("The weights are not those of a trained head.", *_OF_THE_HEAD[2:])], checkpoint
    taps = checkpoint.config.taps
    if taps != ("final",):
        served = check_taps(target, texts.tokens[:1, : len(texts.texts[0])], taps, what.runner)
        weights.append(served)
        if served.value is None:
            return [*weights, *_skip("Its taps cannot be read.", *_OF_THE_HEAD[2:])], None
    options = {"method": checkpoint.config.method, "model": str(head), "allow_other_target": what.allow_other_target}
    on_stage("the head's predictions, with the right feature and with others")
    case, agreement = compare(checkpoint, target, texts)
    said = predictions(case.head, case.parts, case.features, texts)
    drafted = partial(_drafted, target, options, texts, said, tokenizer=tokenizer, runner=what.runner)
    try:
        on_stage("drafts in the engine, with the weights")
        exact = drafted()
        on_stage("drafts in the engine, with int8 copies")
        drafting = [check_drafting(exact), _check_int8(exact, target, drafted)]
    except ForetokenError as err:
        drafting = [Check("drafting", "fault", None, "a drafter", str(err)), *_skip("It drafts nothing.", "rounding")]
    on_stage("the chat template")
    templates = _check_templates(case, tokenizer, what)
    on_stage("acceptance, as training measures it")
    kept = _check_acceptance(case, tokenizer, what)
    return [*weights, *check_agreement(agreement), *kept, *templates, *drafting], checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingFigures:
    """The engine's acceptance, and the expected one from the head's predictions at the same positions."""

    accepted: Sequence[float]  # share of passes that accepted at least d drafted tokens, from d = 1
    expected: Sequence[float]  # the same, from the head with the text as input
    num_passes: int
    num_errors: int  # passes with a draft that was dropped because the drafter failed


def _drafted(
    target: LoadedModel, config: Mapping[str, Any], texts: Texts, said: Tensor, *, tokenizer: Any, runner: str,
    quantization: str = "none",
) -> DraftingFigures:  # fmt: skip
    """Drafts the continuations with chains in the engine, and compares pass by pass.

    `said` are the (K, B, S) predictions of the head with the right feature. With `quantization` "auto" drafts come from
    int8 copies where there are some. Raises `ForetokenError` when the head cannot be loaded as a drafter.
    """
    records: list[StepRecord] = []
    lengths = {len(text) - len(prompt) for prompt, text in zip(texts.prompts, texts.texts, strict=True)}
    shape = {"tree": "chain", "num_speculative_tokens": len(said), "quantization": quantization}
    llm = LLM(
        target.stored or target,
        speculative_config={**config, **shape},
        tokenizer=tokenizer,
        max_num_seqs=AT_ONCE,
        max_model_len=min(max(map(len, texts.texts)) + 1, target.context_len),
        runner=runner,
        on_step=records.append,
    )
    outputs = llm.generate([list(prompt) for prompt in texts.prompts], greedy(max(lengths)))
    rows = {output.request_id: row for row, output in enumerate(outputs)}
    accepted, expected = _by_depth(records, rows, _followed(outputs, texts), texts, said.tolist())
    passes = sum(not step.ends_prompt for record in records for step in record.sequences)
    errors = sum(record.draft_error is not None for record in records)
    return DraftingFigures(accepted=accepted, expected=expected, num_passes=passes, num_errors=errors)


def _followed(outputs: Sequence[RequestOutput], texts: Texts) -> list[int]:
    """Returns how far each text was repeated; less than all of it only if two tokens tie within rounding."""
    found = []
    for output, prompt, text in zip(outputs, texts.prompts, texts.texts, strict=True):
        pairs = zip(output.outputs[0].token_ids, text[len(prompt) :], strict=False)
        same = next((index for index, (got, want) in enumerate(pairs) if got != want), len(text) - len(prompt))
        found.append(len(prompt) + same)
    return found


def _by_depth(
    records: Sequence[StepRecord],
    rows: Mapping[str, int],
    followed: Sequence[int],
    texts: Texts,
    said: list[list[list[int]]],
) -> tuple[list[float], list[float]]:
    """Returns shares of passes by depth: accepted by the engine, and expected from predictions (K, B, S)."""
    accepted, expected, counts = ([0] * len(said) for _ in range(3))
    roots = [len(prompt) - 1 for prompt in texts.prompts]
    for record in records:
        for step in record.sequences:
            row = rows[step.request_id]
            root = roots[row]
            roots[row] += step.num_emitted
            depth = min(step.tree_depth, len(said))
            if root + depth >= followed[row]:
                continue
            hits = [said[d][row][root - 1] == texts.texts[row][root + 1 + d] for d in range(depth)]
            right = next((d for d, hit in enumerate(hits) if not hit), depth)
            for d in range(depth):
                counts[d] += 1
                accepted[d] += step.num_accepted > d
                expected[d] += right > d
    kept = [d for d, count in enumerate(counts) if count]
    return [accepted[d] / counts[d] for d in kept], [expected[d] / counts[d] for d in kept]


def check_drafting(drafting: DraftingFigures) -> Check:
    """Checks that the engine accepts the head's predictions on the text."""
    verdict: Verdict = "ok"
    message = "Drafting does what training did."
    drop = max((want - got for want, got in zip(drafting.expected, drafting.accepted, strict=True)), default=0.0)
    if drafting.num_errors:
        verdict = "fault"
        message = (
            f"The drafter failed in {drafting.num_errors} passes and was ignored there. Run with logging to see why."
        )
    elif drop > 0.03:
        verdict = "fault" if drop > 0.15 else "warning"
        message = (
            f"Drafting does not do what training did: at some depth {drop:.3f} fewer passes accept than the "
            "head fed the text predicts at the same positions. Likely causes: features of the wrong position are kept "
            "when a path is committed, the head's own cache or positions are off, or dtypes are too narrow. Try "
            "`--runner generic` and `--dtype float32`, and report what changes."
        )
    shares = [[round(share, 4) for share in row] for row in (drafting.accepted, drafting.expected)]
    value = {"accepted": shares[0], "passes": drafting.num_passes}
    return Check("drafting", verdict, value, f"accepted by depth {shares[1]}", message)


def _check_int8(exact: DraftingFigures, target: LoadedModel, drafted: Callable[..., DraftingFigures]) -> Check:
    """Compares drafts of the int8 copies, which CPUs draft with unless told otherwise, with those of the weights."""
    if not runs_cpu_kernels(target.device) or exact.num_errors:
        return skipped("rounding", "Drafts have no int8 copies here." if not exact.num_errors else "It cannot draft.")
    quantized = drafted(quantization="auto")
    tau, found = (round(1 + sum(each.accepted), 3) for each in (exact, quantized))
    share = found / tau
    message = "Drafts with int8 copies of the weights are as good as drafts with the weights."
    if share < _LEAST_INT8:
        message = (
            f"Chains of int8 copies bring {found:.2f} tokens a pass, those of the weights {tau:.2f}: a few weights or "
            'inputs are much larger than the others of their row. Draft with "quantization": "none", and report it.'
        )
    verdict: Verdict = "ok" if share >= _LEAST_INT8 else "warning" if share >= 0.9 else "fault"
    return Check(
        "rounding", verdict, {"int8": found, "weights": tau}, f"at least {_LEAST_INT8} of the weights'", message
    )


def _check_acceptance(case: Case, tokenizer: Any, what: Examination) -> list[Check]:
    """Measures the first step as training measures it, and compares it with what the head's files say."""
    stored = case.checkpoint.acceptance
    if not stored:
        return []
    workload = Workload(prompts=what.prompts, temperatures=TEMPERATURES, max_tokens=what.max_tokens)
    if what.asked is not None:
        workload = what.asked()
    head = case.checkpoint.module(device=case.target.device, dtype=torch.float32)
    guess, hits = guesses_of(head, case.target), [[0, 0] for _ in workload.prompts]
    for number, (_, num_prompt, text) in enumerate(target_texts(case.target, tokenizer, workload)):
        with torch.inference_mode():
            logits, labels = next(iter(guess(torch.tensor([text], device=case.target.device), num_prompt)))
        found = hits[number % len(hits)]
        found[0] += int((logits.argmax(1) == labels).sum())
        found[1] += len(labels)
    names = {"measured_on": str(case.checkpoint.notes.get("measured_on") or ""), "prompts": workload.source}
    return [check_acceptance(stored[0][0], [(right, count) for right, count in hits if count], **names)]


def _check_templates(case: Case, tokenizer: Any, what: Examination) -> list[Check]:
    """Tries the head on the prompts in the target's chat template, with and without thinking."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return []
    forms: dict[str, dict[str, Any]] = {"the chat template": {}}
    if "enable_thinking" in str(template):
        forms = {
            f"the chat template {how} thinking": {"enable_thinking": is_on}
            for how, is_on in (("with", True), ("without", False))
        }
    target, messages = case.target, [[{"role": "user", "content": prompt}] for prompt in what.prompts]
    codec, written = Codec(tokenizer, target.vocab_size), {"the prompts as given": case.texts}
    try:
        for name, variables in forms.items():
            form = ChatFormat(chat_template_kwargs=variables)
            chats = chat_prompts(messages, tokenizer, codec, form, target.context_len)
            prompts = [chat["prompt_token_ids"] for chat in chats]
            written[name] = greedy_texts(target, tokenizer, prompts, max_tokens=what.max_tokens, runner=what.runner)
    except RequestError as err:  # the template refuses the prompts, or they are too long for it
        return [skipped("chat template", str(err))]
    right = {}
    for name, texts in written.items():
        features = read_features(target, texts.tokens, case.head.config.taps)[IN_PLACE].to(case.features.dtype)
        said = predictions(case.head, case.parts, features, texts, num_steps=1)[0]
        right[name] = (said == target_choices(target, texts).roll(-1, dims=1))[texts.judged(last=1)].float()
    return [
        check_template(
            {name: float(each.mean()) for name, each in right.items()}, min(len(each) for each in right.values())
        )
    ]


def _skip(reason: str, *names: str) -> list[Check]:
    return [skipped(name, reason) for name in names]
