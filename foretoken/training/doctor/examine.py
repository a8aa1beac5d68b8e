"""Guard rails: why a trained head would not draft, found before anybody measures a disappointing speed.

Checks go from the target to the head's weights, to what the head says, to what the engine makes of it. Where an early
one fails, later ones are skipped: their answers would mislead.

Letters: B texts, S positions, E hidden size, K heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.errors import ForetokenError
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.formats.registry import read_head
from foretoken.formats.surroundings import TargetWeights
from foretoken.target.parts import target_parts
from foretoken.training.config import head_config
from foretoken.training.doctor.checks import (
    Check,
    Verdict,
    check_fit,
    check_logits,
    check_serving,
    check_trained,
    check_values,
    skipped,
)
from foretoken.training.doctor.drafting import Drafting, draft
from foretoken.training.doctor.readings import (
    EARLIER,
    IN_PLACE,
    LATER,
    NORMED_TWICE,
    PRE_NORM,
    Agreement,
    Texts,
    greedy_texts,
    measure,
    predictions,
    read_features,
)
from foretoken.training.doctor.trial import examine_training

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.target.loading import LoadedModel
    from foretoken.training.trainer import Batches

_OF_THE_HEAD = ("head trained", "head values", "feature", "labels", "knowledge", "depth", "drafting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What to examine, and how.

    Attributes:
        head: Directory of a trained head, or None before there is one.
        method: Of a head to be trained, or None.
        train_check: Whether to try training with the trained head's sizes too.
        prompts: Texts that the target goes on with; held out from training.
        max_tokens: Tokens it writes after each.
        data: Training data for the trial; the texts when None.
        runner: See `LLM`.
        allow_other_target: Whether a head for another target of the same sizes is examined all the same.
    """

    head: Path | None = None
    method: str | None = None
    train_check: bool = False
    prompts: Sequence[str]
    max_tokens: int = 64
    data: Batches | None = None
    runner: str = "auto"
    allow_other_target: bool = False


def examine(target: LoadedModel, tokenizer: Any, what: Examination) -> list[Check]:
    """Makes all checks that the case allows. Nothing is written.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        what: The case.

    Raises:
        RequestError: When the prompts are too short to say anything.
        ConfigError: For a method that does not exist.
    """
    # A fresh head's sizes are looked up first: a method that does not exist should not cost a run of the target.
    config = None if what.method is None else head_config(what.method, target, {})
    texts = greedy_texts(target, tokenizer, what.prompts, max_tokens=what.max_tokens, runner=what.runner)
    probe = torch.tensor([list(texts.texts[0])], device=target.device)
    checks = [check_logits(target, probe), *check_serving(target, probe, what.runner)]
    if what.head is not None:
        found, checkpoint = _examine_head(target, tokenizer, what.head, texts, what)
        checks += found
        if what.train_check and config is None:
            if checkpoint is None:
                checks += _skip("The head's sizes are not known to fit.", "fresh head", "learning")
            else:
                config = checkpoint.config
    if config is not None:
        checks += examine_training(target, config, texts, data=what.data)
    return checks


def _examine_head(
    target: LoadedModel, tokenizer: Any, head: Path, texts: Texts, what: Examination
) -> tuple[list[Check], HeadCheckpoint | None]:
    """Loads a head strictly and examines it; gives it too where it could be loaded."""
    fingerprint = TargetFingerprint.of(target)
    try:
        _, checkpoint = read_head(
            head, target=fingerprint, base_config=target.config, weights=lambda: TargetWeights.of(target)
        )
    except ForetokenError as err:
        load = Check(
            name="head loads", verdict="fault", value=None, expected="every tensor of its sizes, and no other",
            message=str(err),
        )  # fmt: skip
        return [load, *_skip("The head cannot be loaded.", "head fits", *_OF_THE_HEAD)], None
    load = Check(
        name="head loads", verdict="ok", value=len(checkpoint.weights),
        expected="every tensor of its sizes, and no other", message="Every tensor is there, and no other.",
    )  # fmt: skip
    fit = check_fit(checkpoint, fingerprint, what=str(head), allow_other_target=what.allow_other_target)
    if fit.verdict == "fault":
        return [load, fit, *_skip("The head belongs to another target.", *_OF_THE_HEAD)], None
    parts = target_parts(target, dtype=torch.float32)
    trained, untrained = check_trained(checkpoint, parts)
    values = check_values(checkpoint, untrained)
    weights = [load, fit, trained, values]
    if "fault" in (trained.verdict, values.verdict):
        return [*weights, *_skip("The weights are not those of a trained head.", *_OF_THE_HEAD[2:])], checkpoint
    options = {"method": checkpoint.config.method, "model": str(head), "allow_other_target": what.allow_other_target}
    readings = read_features(target, texts.tokens)
    module = checkpoint.module(device=target.device, dtype=torch.float32)
    agreement = measure(module, parts, readings, texts)
    said = predictions(module, parts, readings[IN_PLACE], texts)
    try:
        drafting = check_drafting(draft(target, options, texts, said, tokenizer=tokenizer, runner=what.runner))
    except ForetokenError as err:
        drafting = Check(name="drafting", verdict="fault", value=None, expected="a drafter", message=str(err))
    return [*weights, *check_agreement(agreement), drafting], checkpoint


def check_agreement(agreement: Agreement) -> list[Check]:
    """What a head says teacher-forced: the right feature, the right labels, better than a guess, worse with depth."""
    labels = check_labels(agreement)
    if labels.verdict == "fault":
        depth = skipped("depth", "The labels are off.")
    elif agreement.reads_tokens:  # the later ones are told more: where texts repeat, they are right more often
        depth = skipped("depth", "Heads that read the tokens before theirs may be better the deeper they are.")
    else:
        depth = check_depth(agreement)
    return [check_feature(agreement), labels, check_knowledge(agreement), depth]


def check_feature(agreement: Agreement) -> Check:
    """Whether the feature as it is served suits the head better than features that are taken for it by mistake."""
    best = agreement.best_reading
    advice = {
        PRE_NORM: "this head was trained on pre-norm features, the input of the target's final norm. Train it on the "
        "norm's output, which is what drafting reads",
        NORMED_TWICE: "this head was trained on features that went through the final norm twice: `hidden_states[-1]` "
        "of transformers is normed already. Train it without the second norm",
        EARLIER: "this head was trained on features one position off: it wants the feature of the position before. "
        "Pair feature t with token t + 1 and label t + 2",
        LATER: "this head was trained on features one position off: it wants the feature of the position after, which "
        "drafting does not have yet. Pair feature t with token t + 1 and label t + 2",
    }
    scores = {name: round(agreement.score(name), 4) for name in agreement.table}
    message = "The feature that drafting reads suits the head best."
    if best != IN_PLACE:
        message = (
            f"{advice[best][0].upper()}{advice[best][1:]}: mean agreement is {scores[best]:.3f} with that reading and "
            f"{scores[IN_PLACE]:.3f} with the one that drafting has."
        )
    return Check(
        name="feature", verdict="ok" if best == IN_PLACE else "fault", value=scores,
        expected=f"best with the output of the final norm, give or take {agreement.margin:.3f}", message=message,
    )  # fmt: skip


def check_labels(agreement: Agreement) -> Check:
    """Whether head i answers for the token it is asked for, t + 2 + i, and not for a neighbour of it."""
    shifts, table = agreement.best_shifts, agreement.table[agreement.best_reading]
    value = [[round(share, 4) for share in row] for row in table]
    expected = "each head best at shift 0 (columns: 0, -1, 1, 2)"
    if all(shift == 0 for shift in shifts):
        message = "Every head answers for the token that it is asked for."
        return Check(name="labels", verdict="ok", value=value, expected=expected, message=message)
    if min(agreement.own_next) > 0.9 and shifts[0] == -1:
        message = (
            "Every head says the target's own next token, as untrained heads do: training did not reach it, or its "
            "labels were not shifted at all. Head i has to learn token t + 2 + i from feature t."
        )
    else:
        wrong = [_answers(index, shift) for index, shift in enumerate(shifts) if shift]
        same = f"its labels were shifted {_shifted(shifts[0])}" if len(set(shifts)) == 1 else _mixed(shifts)
        message = f"{'; '.join(wrong)}: {same}. Head i has to learn token t + 2 + i from feature t."
    return Check(name="labels", verdict="fault", value=value, expected=expected, message=message)


def check_knowledge(agreement: Agreement) -> Check:
    """Whether the first head knows more than which token is most frequent."""
    best, guess = max(agreement.table[agreement.best_reading][0]), agreement.most_frequent
    wanted = guess + min(agreement.margin, (1 - guess) / 4)
    message = "The first head knows more than which token is most frequent."
    if best < wanted:
        message = (
            f"Heads say the same whatever the text, or something unrelated to it: head 0 is right at {best:.3f} of the "
            f"positions, and always saying the most frequent token at {guess:.3f}. They are random, hardly trained, "
            "trained on other text, or made for another target. Look at the training loss, and train longer."
        )
    return Check(
        name="knowledge", verdict="fault" if best < wanted else "ok", value=best, expected=f"at least {wanted:.3f}",
        message=message,
    )  # fmt: skip


def check_depth(agreement: Agreement) -> Check:
    """Whether agreement falls with depth: tokens farther away are harder to guess."""
    shares = [max(row) for row in agreement.table[agreement.best_reading]]
    rises = [i for i in range(1, len(shares)) if shares[i] > shares[i - 1] + agreement.margin]
    message = "Heads agree less the farther ahead they look."
    if rises:
        message = (
            f"{', '.join(f'head {i} is right more often than head {i - 1}' for i in rises)}: the earlier head was "
            "trained less, or was damaged by a conversion. Compare their losses, and train or convert again."
        )
    return Check(
        name="depth", verdict="fault" if rises else "ok", value=[round(share, 4) for share in shares],
        expected=f"no rise above {agreement.margin:.3f}", message=message,
    )  # fmt: skip


def check_drafting(drafting: Drafting) -> Check:
    """Whether the engine accepts what the head says when it is fed the text."""
    verdict: Verdict = "ok"
    message = "Drafting does what training did."
    if drafting.num_errors:
        verdict = "fault"
        message = (
            f"The drafter failed in {drafting.num_errors} passes and was ignored there. Run with logging to see why."
        )
    elif drafting.drop > 0.03:
        verdict = "fault" if drafting.drop > 0.15 else "warning"
        message = (
            f"Drafting does not do what training did: at some depth {drafting.drop:.3f} fewer passes accept than the "
            "head fed the text at the same positions says. Likely causes: features of the wrong position are kept when "
            "a path is committed, the head's own cache or positions are off, or dtypes are too narrow. Try "
            "`--runner generic` and `--dtype float32`, and report what changes."
        )
    shares = [[round(share, 4) for share in row] for row in (drafting.accepted, drafting.expected)]
    return Check(
        name="drafting", verdict=verdict, value={"accepted": shares[0], "passes": drafting.num_passes},
        expected=f"accepted by depth {shares[1]}", message=message,
    )  # fmt: skip


def _answers(index: int, shift: int) -> str:
    """For which token a head answers."""
    return f"head {index} looks like head {index + shift}" if index + shift >= 0 else (
        f"head {index} says the target's own next token"
    )  # fmt: skip


def _shifted(shift: int) -> str:
    """How labels were shifted."""
    times = "once" if abs(shift) == 1 else f"{abs(shift)} times"
    return f"{times} {'more' if shift > 0 else 'less'} than they should"


def _mixed(shifts: Sequence[int]) -> str:
    """What shifts that differ from head to head mean."""
    asked = [index + shift for index, shift in enumerate(shifts)]
    if sorted(asked) == list(range(len(shifts))):
        return "the heads are in another order than they were trained in; a conversion mixed them up"
    return "the labels of these heads were shifted differently from the others'"


def _skip(reason: str, *names: str) -> list[Check]:
    """Checks that are not made."""
    return [skipped(name, reason) for name in names]
