"""Checks of a target, and of a head's weights and predictions, each with a verdict, a cause and a remedy.

Letters: B texts, S positions, E hidden size, K heads, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.errors import ModelError
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import Head, HeadConfig, StepHeadConfig, build_head
from foretoken.models.generic import run_plain
from foretoken.models.parts import TargetParts, target_parts
from foretoken.runner.runner import Runner
from foretoken.training.doctor.readings import (
    BLOCK_AFTER,
    BLOCK_BEFORE,
    EARLIER,
    IN_PLACE,
    LATER,
    MOVED_BLOCKS,
    NORMED_TWICE,
    PRE_NORM,
    SURE,
    Agreement,
)
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from foretoken.core.passes import Tap
    from foretoken.models.loaded import LoadedModel

Verdict = Literal["ok", "warning", "fault", "not decided", "skipped"]
_LARGEST = 1e4  # of a weight or logit; a choice, far above trained ones: damaged ones reach the limits of their dtype
_KEPT, _KEPT_ELSEWHERE = 0.85, 0.3  # of the stored acceptance, on other prompts too; choices: 0.57 for chats on code
_FEWEST = 4  # prompts from which a spread is known; a choice
_PROBE_LEN = 64  # tokens; a choice: long enough for every position shift that is looked for


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    `verdict` is "ok", "fault" for a certain loss of acceptance, "warning" for a possible one, "not decided" where the
    prompts are too few to tell, or "skipped".
    """

    name: str
    verdict: Verdict
    value: Any  # the measured share or error, or names; None if there is nothing to show
    expected: str  # the expected value, in words
    message: str  # a sentence with the cause and the remedy of a fault


def _judged(name: str, value: Any, expected: str, *, fine: str, fault: str) -> Check:
    """Returns a fault if there is a message of one, else that all is fine."""
    return Check(name, "fault" if fault else "ok", value, expected, fault or fine)


def skipped(name: str, reason: str) -> Check:
    """Returns the result of a check that was not made."""
    return Check(name, "skipped", None, "", reason)


def _served_errors(target: LoadedModel, tokens: Tensor, taps: Sequence[Tap], runner: str) -> tuple[str, list[float]]:
    """Returns the name of the runner that serves the target, and the relative error of each tap against training."""
    ids = tokens[0, :_PROBE_LEN].tolist()
    read = Teacher(replace(target, stored=None), taps).read_features(tokens[:, : len(ids)])[0].float()
    serving = Runner(
        target.stored or target, num_slots=1, context_len=len(ids) + 1, max_nodes=8, taps=taps, runner=runner
    )  # fmt: skip
    served = serving.prefill(0, ids, 0)
    assert served is not None, "there are taps"
    pairs = zip(served.unbind(1), read.split(served.shape[-1], dim=1), strict=False)  # `final` comes after the taps
    return serving.name, [_relative_error(ours.float(), theirs) for ours, theirs in pairs]


def check_logits(target: LoadedModel, tokens: Tensor) -> Check:
    """Compares the LM head on the training feature with the target's own logits; tokens: (1, S) int64."""
    features = Teacher(replace(target, stored=None)).features(tokens)
    with torch.no_grad():
        ours = target_parts(target).lm_head(features)
    error = _relative_error(ours.float(), run_plain(target.module, tokens).logits.float())
    return _check_close(
        "target logits", error, replace(target, stored=None),
        "The LM head makes the target's own logits of the training feature.",
        "The LM head on the feature that heads are trained on does not give the target's logits: the feature is not "
        "what the LM head reads (taken before the final norm, or normed twice), or the logits are scaled or capped in "
        "a way that is not known. Do not train heads on this target; report its architecture.",
    )  # fmt: skip


def check_serving(target: LoadedModel, tokens: Tensor, runner: str) -> list[Check]:
    """Compares the feature of the serving runner with the training feature; tokens: (1, S) int64.

    Also reports the runner's self-test at load, which compares logits of a tree with those of its paths.
    """
    proof = "logits of every node as after its path alone"
    try:
        name, errors = _served_errors(target, tokens, ("final",), runner)
    except ModelError as err:
        fault = Check("tree logits", "fault", None, proof, f"The target cannot draft: {err}")
        return [fault, skipped("target served", "The target cannot be served.")]
    return [
        Check("tree logits", "ok", name, proof, f"The self-test of runner {name} passed."),
        _check_close(
            "target served", errors[0], target,
            "Serving reads the feature that training reads.",
            f"Runner {name} reads another feature than training does: heads are trained on one thing and "
            "served another. Draft with `--runner generic`, and report the architecture.",
        ),
    ]  # fmt: skip


def check_taps(target: LoadedModel, tokens: Tensor, taps: Sequence[Tap], runner: str) -> Check:
    """Compares a head's taps in the serving runner with those in training; tokens: (1, S) int64.

    Each tap is compared by itself: features of deep blocks are many times larger than those of the first ones.
    """
    try:
        used, errors = _served_errors(target, tokens, taps, runner)
    except ModelError as err:
        return Check("taps served", "fault", None, "the same features in training and serving", str(err))
    worst = max(range(len(errors)), key=errors.__getitem__)
    return _check_close(
        "taps served", errors[worst], target,
        f"Serving reads the taps that training reads, {', '.join(map(str, taps))}.",
        f"Runner {used} reads tap {taps[worst]} elsewhere than training does: heads are trained on "
        "one thing and served another. Draft with `--runner generic`, and report the architecture.",
    )  # fmt: skip


def check_fit(
    checkpoint: HeadCheckpoint, fingerprint: TargetFingerprint, *, what: str, allow_other_target: bool
) -> Check:
    """Compares hidden size, vocabulary and fingerprint; what: names the head."""
    own = checkpoint.target or TargetFingerprint(
        hidden_size=checkpoint.config.hidden_size, vocab_size=checkpoint.config.vocab_size
    )
    differences = own.differences(fingerprint)
    name, expected = "head fits", "sizes and weights of this target"
    if not differences:
        known = "weights" if own.weights else "sizes (its format tells no more)"
        return Check(name, "ok", [], expected, f"The {known} agree.")
    is_same_size = (own.hidden_size, own.vocab_size) == (fingerprint.hidden_size, fingerprint.vocab_size)
    verdict: Verdict = "warning" if is_same_size and allow_other_target else "fault"
    message = (
        f"head '{what}' was trained for another target ({own.name or 'not named'}): it has "
        f"{', '.join(differences)}. Name that target, or train a head for this one."
    )
    return Check(name, verdict, differences, expected, message)


def check_values(checkpoint: HeadCheckpoint, untrained: set[str]) -> Check:
    """Checks that tensors are finite, not zero and not huge; untrained: parts that training starts at zero."""
    found = []
    for part, tensors in _parts(checkpoint.weights, _num_heads(checkpoint.config)).items():
        for key, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                found.append(f"{key} holds numbers that are not finite")
            elif float(tensor.abs().max()) > _LARGEST:
                found.append(f"{key} reaches {float(tensor.abs().max()):.1e}")
            elif tensor.dim() > 1 and part not in untrained and not bool(tensor.any()):
                found.append(f"{key} is zero everywhere")
    cause = f"{'; '.join(found)}: training broke off badly, or a conversion lost it. Train or convert it again."
    return _judged(
        "head values", found, f"finite, not all zero, at most {_LARGEST:.0e}",
        fine="Every tensor is finite, of sensible size and not empty.", fault=cause if found else "",
    )  # fmt: skip


def check_trained(checkpoint: HeadCheckpoint, parts: TargetParts) -> tuple[Check, set[str]]:
    """Compares the weights with those that training starts from; also returns the parts that are equal."""
    settings = checkpoint.notes.get("settings")
    seed = settings["train"]["seed"] if isinstance(settings, dict) and "train" in settings else 0
    fresh = fresh_head(checkpoint.config, parts, seed=seed, token_map=checkpoint.weights.get("token_map"))
    reference = {key: value.to(checkpoint.weights[key].dtype).cpu() for key, value in fresh.state_dict().items()}
    num_heads = _num_heads(checkpoint.config)
    ours, theirs = _parts(checkpoint.weights, num_heads), _parts(reference, num_heads)
    same = {
        part for part, tensors in ours.items()
        if all(torch.equal(tensor.cpu(), theirs[part][key]) for key, tensor in tensors.items())
    }  # fmt: skip
    who = "the head" if len(same) == len(ours) else ", ".join(sorted(same))
    cause = (
        f"{who} still has the weights that training starts from: it was never trained, its checkpoint was not loaded, "
        "or a conversion lost it. Train it, or convert it again."
    )
    check = _judged(
        "head trained", sorted(same), "unlike fresh weights", fault=cause if same else "",
        fine="Its weights are not those that training starts from.",
    )  # fmt: skip
    return check, same


def fresh_head(config: HeadConfig, parts: TargetParts, *, seed: int, token_map: Tensor | None = None) -> Head:
    """Returns a head with training's initial weights, in float32; keeps the state of the random generator.

    `token_map`, (Vd,) int64, has the tokens of a draft vocabulary; None for the first ones, if the head needs one.
    """
    device = parts.lm_head_weight.device
    with torch.random.fork_rng(devices=[device] if has_cuda_runtime(device) else []):
        torch.manual_seed(seed)
        head = build_head(config, device=device, dtype=torch.float32)
        if token_map is not None:
            head.token_map = token_map.to(device)
        head.initialize(parts)
    return head


def _num_heads(config: HeadConfig) -> int:
    return config.num_heads if isinstance(config, StepHeadConfig) else 0


def _parts(weights: Mapping[str, Tensor], num_heads: int) -> dict[str, dict[str, Tensor]]:
    numbered = {key: re.match(r"(\w+)\.(\d+)\.", key) for key in weights}
    counts: dict[str, set[str]] = {}
    for match in filter(None, numbered.values()):
        counts.setdefault(match[1], set()).add(match[2])
    found: dict[str, dict[str, Tensor]] = {}

    def own(key: str, tensor: Tensor) -> Iterator[tuple[str, str, Tensor]]:
        match = numbered[key]
        if match is None and num_heads and "." not in key and tensor.dim() > 1 and len(tensor) == num_heads:
            yield from ((f"head {i}", f"{key}[{i}]", tensor[i]) for i in range(num_heads))
        elif match is not None and len(counts[match[1]]) == num_heads:
            yield f"head {match[2]}", key, tensor
        else:
            yield "shared", key, tensor

    for key, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel():
            for part, name, piece in own(key, tensor):
                found.setdefault(part, {})[name] = piece
    return found


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the norm of the difference over the norm, without entries by which a model forbids tokens."""
    is_real = theirs > -_LARGEST
    return float((ours - theirs)[is_real].norm() / theirs[is_real].norm().clamp_min(1e-9))


def _check_close(name: str, error: float, target: LoadedModel, fine: str, wrong: str) -> Check:
    is_exact = (target.stored or target).dtype in (torch.float32, torch.float64)
    bound = 2e-4 if is_exact else 5e-2 if target.stored is None else 0.3  # a 0.5B in integers: 0.07 by bfloat16 alone
    # NaN is a fault too.
    return _judged(name, error, f"relative error at most {bound:.0e}", fine=fine, fault="" if error <= bound else wrong)


_LABELS = "head i has to learn token t + 2 + i from feature t."


def check_agreement(agreement: Agreement) -> list[Check]:
    """Checks the feature, the labels, that heads beat a constant guess, and that agreement falls with depth."""
    knowledge = _check_knowledge(agreement)
    if agreement.lagging:
        reason = "The head has learnt too little to tell."
        return [*(skipped(name, reason) for name in ("feature", "configuration", "labels")), knowledge,
                skipped("depth", reason)]  # fmt: skip
    labels = _check_labels(agreement)
    if labels.verdict == "fault":
        depth = skipped("depth", "The labels are off.")
    elif agreement.reads_tokens:  # later heads read more tokens: on repetitive texts they are right more often
        depth = skipped("depth", "Heads that read the tokens before theirs may be better the deeper they are.")
    else:
        depth = _check_depth(agreement)
    return [_check_feature(agreement), _check_configuration(agreement), labels, knowledge, depth]


def _check_feature(agreement: Agreement) -> Check:
    best = agreement.best_reading
    advice = {
        PRE_NORM: "This head was trained on pre-norm features, the input of the target's final norm. Train it on the "
        "norm's output, which is what drafting reads",
        NORMED_TWICE: "This head was trained on features that went through the final norm twice: `hidden_states[-1]` "
        "of transformers is normed already. Train it without the second norm",
        EARLIER: "This head was trained on features one position off: it wants the feature of the position before. "
        "Pair feature t with token t + 1 and label t + 2",
        LATER: "This head was trained on features one position off: it wants the feature of the position after, which "
        "drafting does not have yet. Pair feature t with token t + 1 and label t + 2",
        BLOCK_BEFORE: _other_blocks(agreement.taps, BLOCK_BEFORE),
        BLOCK_AFTER: _other_blocks(agreement.taps, BLOCK_AFTER),
    }
    scores = {name: round(agreement.score(name), 4) for name in agreement.table if name not in agreement.variants}
    listed = ", ".join(map(str, agreement.taps))
    where = "the output of the final norm" if listed == "final" else f"taps {listed}"
    fault = ""
    if best in advice:
        fault = (
            f"{advice[best]}: mean agreement is {scores[best]:.3f} with that reading and "
            f"{scores[IN_PLACE]:.3f} with the one that drafting has."
        )
    expected = f"best with {where}, give or take {agreement.margin:.3f}"
    if best == IN_PLACE and (needed := agreement.num_deciding_texts) is not None:
        message = (
            f"{agreement.num_texts} prompts do not tell the taps {listed} from those of the block before or "
            f"after. Pass --num-prompts {needed}."
        )
        return Check("feature", "not decided", scores, expected, message)
    fine = f"What drafting reads, {where}, suits the head best."
    return _judged("feature", scores, expected, fine=fine, fault=fault)


def check_acceptance(
    stored: float, hits: Sequence[tuple[int, int]], *, measured_on: str = "", prompts: str = ""
) -> Check:
    """Compares the first step with the acceptance that was stored with the head when it was trained.

    `stored` is P(the first candidate of the first step is the token); `hits` has for each prompt at how many positions
    it was, of how many. On other `prompts` than `measured_on`, if known (both are names), only much less is a fault.
    """
    num_hits, num_positions = map(sum, zip(*hits, strict=True))
    share, least = num_hits / num_positions, _KEPT * stored
    spread = sum((right - share * count) ** 2 for right, count in hits)  # positions of a prompt are alike
    error = math.sqrt(max(spread, share * (1 - share) * num_positions)) / num_positions
    value = {"stored": round(stored, 4), "found": round(share, 4), "give or take": round(2 * error, 4)}
    expected = f"at least {_KEPT:g} of what is stored, {least:.3f}"
    if abs(share - least) <= 2 * error or len(hits) < _FEWEST:
        needed = max(_FEWEST, math.ceil(len(hits) * (2 * error / max(abs(share - least), 0.02)) ** 2))
        message = f"{len(hits)} prompts do not tell whether the head lost acceptance. Pass --num-prompts {needed}."
        return Check("acceptance", "not decided", value, expected, message)
    is_other = measured_on not in ("", prompts)
    is_warning = is_other and share >= _KEPT_ELSEWHERE * stored
    verdict: Verdict = "ok" if share >= least else "warning" if is_warning else "fault"
    message = "The first step is accepted about as often as after its training."
    if share < least:
        message = f"The first step is right at {share:.3f} of the positions, and was at {stored:.3f} " + (
            f"on other prompts, '{measured_on}'. Pass --prompts like those to compare."
            if is_warning
            else "when the head was measured: its weights or configuration are not those that were trained (another LM "
            "head, parts in another order, another rotary layout), or these prompts are of another kind. Convert the "
            "head again, and compare on --prompts of its training."
        )
    return Check("acceptance", verdict, value, expected, message)


def _check_configuration(agreement: Agreement) -> Check:
    if not agreement.variants:
        return skipped("configuration", "No other configuration of this head is likely.")
    scores = {name: round(agreement.score(name), 4) for name in (IN_PLACE, *agreement.variants)}
    best = agreement.best_reading
    fault = ""
    if best in agreement.variants:
        fault = (
            f"With {best} the head is right more often: {agreement.variants[best]}. Mean agreement is "
            f"{scores[best]:.3f} with that and {scores[IN_PLACE]:.3f} as configured."
        )
    expected = f"no variant better by {SURE:g} standard deviations of the first step"
    return _judged("configuration", scores, expected, fine="The head's configuration suits it best.", fault=fault)


def check_template(shares: Mapping[str, float], num_positions: int) -> Check:
    """Checks that the head is right as often on the prompts as given as on prompts in the chat template.

    Args:
        shares: Positions at which the first step is right, the prompts as given first, then by form of the template.
        num_positions: The fewest positions of a form.
    """
    given, best = next(iter(shares)), max(shares, key=shares.__getitem__)
    margin = max(0.05, SURE * math.sqrt(0.5 / num_positions))
    is_other = shares[best] > shares[given] + margin
    message = "The head is right as often without the chat template as with it."
    if is_other:
        message = (
            f"The head was trained on other prompts: it is right at {shares[best]:.3f} of the positions after prompts "
            f"with {best}, and at {shares[given]:.3f} after prompts as given. Serve it with {best}, or train it on "
            "text like that of your requests."
        )
    value = {name: round(share, 4) for name, share in shares.items()}
    return Check("chat template", "warning" if is_other else "ok", value, f"none better by {margin:.3f}", message)


def _other_blocks(taps: Sequence[Tap], reading: str) -> str:
    by = MOVED_BLOCKS[reading]
    meant, said = (", ".join(str(tap if tap == "final" else tap + step) for tap in taps) for step in (by, 0))
    cause = (
        "a boundary was taken for a block counted from 0, and raised by one"
        if by < 0
        else "a block counted from 0 was taken for a boundary, and not raised by one"
    )
    return (
        f"The taps are those of the block {'before' if by < 0 else 'after'}: this head was trained on {meant}, and its "
        f"configuration says {said}; as a rule {cause}. Set them to {meant}, or convert the head again"
    )


def _check_labels(agreement: Agreement) -> Check:
    shifts, table = agreement.best_shifts, agreement.table[agreement.best_reading]
    value = [[round(share, 4) for share in row] for row in table]
    expected = "each head best at shift 0 (columns: 0, -1, 1, 2)"
    if all(shift == 0 for shift in shifts):
        return Check("labels", "ok", value, expected, "Every head answers for the token that it is asked for.")
    wrong = [_answers(index, shift) for index, shift in enumerate(shifts) if shift]
    cause = _mixed(shifts)
    if len(set(shifts)) == 1:
        tokens = "one token" if abs(shifts[0]) == 1 else f"{abs(shifts[0])} tokens"
        cause = f"its labels are shifted by {tokens} {'more' if shifts[0] > 0 else 'less'} than they should be"
    message = f"{'; '.join(wrong)}: {cause}. {_LABELS[0].upper()}{_LABELS[1:]}"
    return Check("labels", "fault", value, expected, message)


def _check_knowledge(agreement: Agreement) -> Check:
    rows = agreement.table[agreement.best_reading]
    best, guess = max(rows[0]), agreement.most_frequent
    wanted = guess + min(agreement.margin, (1 - guess) / 4)
    fault = ""
    if agreement.lagging:
        best = rows[agreement.lagging[0]][0]
        fault = _undertrained(agreement)
    elif best < wanted:
        fault = (
            "Undertrained or unrelated: heads predict the same whatever the text, or something unrelated to it. Head 0 "
            f"is right at {best:.3f} of the positions, and always saying the most frequent token at {guess:.3f}. They "
            "are random, hardly trained, trained on other text, or made for another target. Look at the training loss, "
            "and train longer."
        )
    fine = "The first head knows more than which token is most frequent."
    return _judged("knowledge", best, f"at least {wanted:.3f}", fine=fine, fault=fault)


def _undertrained(agreement: Agreement) -> str:
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


def _check_depth(agreement: Agreement) -> Check:
    """Checks that agreement falls with depth: tokens farther away are harder to guess."""
    shares = [max(row) for row in agreement.table[agreement.best_reading]]
    rises = [i for i in range(1, len(shares)) if shares[i] > shares[i - 1] + agreement.margin]
    cause = (
        f"{', '.join(f'head {i} is right more often than head {i - 1}' for i in rises)}: the earlier head was trained "
        "less, or was damaged by a conversion. Compare their losses, and train or convert again."
    )
    return _judged(
        "depth", [round(share, 4) for share in shares], f"no rise above {agreement.margin:.3f}",
        fine="Heads agree less the farther ahead they look.", fault=cause if rises else "",
    )  # fmt: skip


def _answers(index: int, shift: int) -> str:
    if index + shift < 0:
        return f"head {index} says the target's own next token"
    return f"head {index} looks like head {index + shift}"


def _mixed(shifts: Sequence[int]) -> str:
    asked = [index + shift for index, shift in enumerate(shifts)]
    if sorted(asked) == list(range(len(shifts))):
        return "the heads are in another order than they were trained in; a conversion mixed them up"
    return "the labels of these heads were shifted differently from the others'"
