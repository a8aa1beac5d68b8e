"""Turns measurements of a head into verdicts, each with a name, a cause and a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.training.doctor.checks import Check, Verdict, skipped
from foretoken.training.doctor.readings import (
    BLOCK_AFTER,
    BLOCK_BEFORE,
    EARLIER,
    IN_PLACE,
    LATER,
    MOVED_BLOCKS,
    NORMED_TWICE,
    PRE_NORM,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Tap
    from foretoken.training.doctor.drafting import DraftingFigures
    from foretoken.training.doctor.readings import Agreement

_LABELS = "head i has to learn token t + 2 + i from feature t."


def check_agreement(agreement: Agreement) -> list[Check]:
    """Checks the feature, the labels, that heads beat a constant guess, and that agreement falls with depth."""
    knowledge = check_knowledge(agreement)
    if agreement.lagging:
        reason = "The head has learnt too little to tell."
        return [skipped("feature", reason), skipped("labels", reason), knowledge, skipped("depth", reason)]
    labels = check_labels(agreement)
    if labels.verdict == "fault":
        depth = skipped("depth", "The labels are off.")
    elif agreement.reads_tokens:  # later heads read more tokens: on repetitive texts they are right more often
        depth = skipped("depth", "Heads that read the tokens before theirs may be better the deeper they are.")
    else:
        depth = check_depth(agreement)
    return [check_feature(agreement), labels, knowledge, depth]


def check_feature(agreement: Agreement) -> Check:
    """Checks that the served feature suits the head better than features that are confused with it."""
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
        BLOCK_BEFORE: _other_blocks(agreement.taps, BLOCK_BEFORE),
        BLOCK_AFTER: _other_blocks(agreement.taps, BLOCK_AFTER),
    }
    scores = {name: round(agreement.score(name), 4) for name in agreement.table}
    is_final = tuple(agreement.taps) == ("final",)
    where = "the output of the final norm" if is_final else f"taps {_listed(agreement.taps)}"
    message = f"What drafting reads, {where}, suits the head best."
    if best != IN_PLACE:
        message = (
            f"{advice[best][0].upper()}{advice[best][1:]}: mean agreement is {scores[best]:.3f} with that reading and "
            f"{scores[IN_PLACE]:.3f} with the one that drafting has."
        )
    return Check(
        name="feature", verdict="ok" if best == IN_PLACE else "fault", value=scores,
        expected=f"best with {where}, give or take {agreement.margin:.3f}", message=message,
    )  # fmt: skip


def _other_blocks(taps: Sequence[Tap], reading: str) -> str:
    """Returns the sentence about a head that fits taps one block off."""
    by = MOVED_BLOCKS[reading]
    meant = _listed([tap if tap == "final" else tap + by for tap in taps])
    cause = (
        "a boundary was taken for a block counted from 0, and raised by one"
        if by < 0
        else "a block counted from 0 was taken for a boundary, and not raised by one"
    )
    return (
        f"the taps are those of the block {'before' if by < 0 else 'after'}: this head was trained on {meant}, and its "
        f"configuration says {_listed(taps)}; as a rule {cause}. Set them to {meant}, or convert the head again"
    )


def _listed(taps: Sequence[Tap]) -> str:
    return ", ".join(map(str, taps))


def check_labels(agreement: Agreement) -> Check:
    """Checks that head i predicts token t + 2 + i, and not a neighbouring token."""
    shifts, table = agreement.best_shifts, agreement.table[agreement.best_reading]
    value = [[round(share, 4) for share in row] for row in table]
    expected = "each head best at shift 0 (columns: 0, -1, 1, 2)"
    if all(shift == 0 for shift in shifts):
        message = "Every head answers for the token that it is asked for."
        return Check(name="labels", verdict="ok", value=value, expected=expected, message=message)
    wrong = [_answers(index, shift) for index, shift in enumerate(shifts) if shift]
    same = f"its labels are shifted by {_shifted(shifts[0])}" if len(set(shifts)) == 1 else _mixed(shifts)
    message = f"{'; '.join(wrong)}: {same}. {_LABELS[0].upper()}{_LABELS[1:]}"
    return Check(name="labels", verdict="fault", value=value, expected=expected, message=message)


def check_knowledge(agreement: Agreement) -> Check:
    """Checks that heads have learnt their own tokens, and that the first one beats a constant guess."""
    rows = agreement.table[agreement.best_reading]
    best, guess = max(rows[0]), agreement.most_frequent
    wanted = guess + min(agreement.margin, (1 - guess) / 4)
    message = "The first head knows more than which token is most frequent."
    if agreement.lagging:
        best = rows[agreement.lagging[0]][0]
        message = _undertrained(agreement)
    elif best < wanted:
        message = (
            "Undertrained or unrelated: heads predict the same whatever the text, or something unrelated to it. Head 0 "
            f"is right at {best:.3f} of the positions, and always saying the most frequent token at {guess:.3f}. They "
            "are random, hardly trained, trained on other text, or made for another target. Look at the training loss, "
            "and train longer."
        )
    is_fault = bool(agreement.lagging) or best < wanted
    return Check(
        name="knowledge", verdict="fault" if is_fault else "ok", value=best, expected=f"at least {wanted:.3f}",
        message=message,
    )  # fmt: skip


def _undertrained(agreement: Agreement) -> str:
    """Returns the sentence about heads that have not learnt their own tokens yet."""
    reading = agreement.best_reading
    said, own = agreement.next_token[reading], [row[0] for row in agreement.table[reading]]
    lagging = "; ".join(f"head {i}: {said[i]:.3f} and {own[i]:.3f}" for i in agreement.lagging)
    advice = "Train longer, and look at the training loss."
    if min(said) > 0.9:
        advice = "Train it. If it was trained long, its labels were not shifted at all: " + _LABELS
    elif len(own) == 1:
        advice = (
            "Train longer. If it was trained long, its labels are shifted by one token less than needed: " + _LABELS
        )
    return (
        "Undertrained: the target's own next token, which fresh heads predict, is still predicted more often than the "
        f"token that the head is asked for (shares of positions: {lagging}). {advice}"
    )


def check_depth(agreement: Agreement) -> Check:
    """Checks that agreement falls with depth: tokens farther away are harder to guess."""
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


def check_drafting(drafting: DraftingFigures) -> Check:
    """Checks that the engine accepts the head's predictions on the text."""
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
            "head fed the text predicts at the same positions. Likely causes: features of the wrong position are kept "
            "when a path is committed, the head's own cache or positions are off, or dtypes are too narrow. Try "
            "`--runner generic` and `--dtype float32`, and report what changes."
        )
    shares = [[round(share, 4) for share in row] for row in (drafting.accepted, drafting.expected)]
    return Check(
        name="drafting", verdict=verdict, value={"accepted": shares[0], "passes": drafting.num_passes},
        expected=f"accepted by depth {shares[1]}", message=message,
    )  # fmt: skip


def _answers(index: int, shift: int) -> str:
    """Says which token a head predicts."""
    return f"head {index} looks like head {index + shift}" if index + shift >= 0 else (
        f"head {index} says the target's own next token"
    )  # fmt: skip


def _shifted(shift: int) -> str:
    tokens = "one token" if abs(shift) == 1 else f"{abs(shift)} tokens"
    return f"{tokens} {'more' if shift > 0 else 'less'} than they should be"


def _mixed(shifts: Sequence[int]) -> str:
    """Says what shifts mean that differ between heads."""
    asked = [index + shift for index, shift in enumerate(shifts)]
    if sorted(asked) == list(range(len(shifts))):
        return "the heads are in another order than they were trained in; a conversion mixed them up"
    return "the labels of these heads were shifted differently from the others'"
