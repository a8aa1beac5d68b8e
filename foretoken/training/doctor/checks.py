"""Checks of a target and of a head's weights, each with a verdict and a sentence.

Letters: B texts, S positions, E hidden size, K heads, V vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.errors import ModelError
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import StepHeadConfig, build_head
from foretoken.models.parts import target_parts
from foretoken.models.taps import run_plain
from foretoken.runner.runner import Runner
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from foretoken.core.passes import Tap
    from foretoken.heads.base import Head, HeadConfig
    from foretoken.models.loading import LoadedModel
    from foretoken.models.parts import TargetParts

Verdict = Literal["ok", "warning", "fault", "skipped"]
_LARGEST = 1e4
_PROBE_LEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check.
        verdict: "ok", "fault" for a certain loss of acceptance, "warning" for a possible one, or "skipped".
        value: The measured share or error, or names; None if there is nothing to show.
        expected: The expected value, in words.
        message: A sentence with the cause and the remedy of a fault.
    """

    name: str
    verdict: Verdict
    value: Any
    expected: str
    message: str


def skipped(name: str, reason: str) -> Check:
    """Returns the result of a check that was not made."""
    return Check(name=name, verdict="skipped", value=None, expected="", message=reason)


def check_logits(target: LoadedModel, tokens: Tensor) -> Check:
    """Compares the LM head on the training feature with the target's own logits; tokens: (1, S) int64."""
    features = Teacher(target).features(tokens)
    with torch.no_grad():
        ours = target_parts(target).lm_head(features).float()
    error = _relative_error(ours, run_plain(target.module, tokens).logits.float())
    return _close(
        "target logits", error, target,
        "The LM head makes the target's own logits of the training feature.",
        "the LM head on the feature that heads are trained on does not give the target's logits: the feature is not "
        "what the LM head reads (taken before the final norm, or normed twice), or the logits are scaled or capped in "
        "a way that is not known. Do not train heads on this target; report its architecture.",
    )  # fmt: skip


def check_serving(target: LoadedModel, tokens: Tensor, runner: str) -> list[Check]:
    """Compares the feature of the serving runner with the training feature; tokens: (1, S) int64.

    Also reports the runner's self-test at load, which compares logits of a tree with those of its paths.
    """
    names = ("tree logits", "target served")
    ids = tokens[0, :_PROBE_LEN].tolist()
    try:
        serving = Runner(target, num_slots=1, context_len=len(ids) + 1, max_nodes=8, taps=("final",), runner=runner)
    except ModelError as err:
        proof = "logits of every node as after its path alone"
        return [
            Check(
                name=names[0], verdict="fault", value=None, expected=proof, message=f"The target cannot draft: {err}"
            ),
            skipped(names[1], "The target cannot be served."),
        ]
    served = serving.prefill(0, ids, 0)
    assert served is not None, "there is a tap"
    error = _relative_error(served[:, 0].float(), Teacher(target).features(tokens[:, : len(ids)])[0].float())
    return [
        Check(
            name=names[0], verdict="ok", value=serving.name, expected="logits of every node as after its path alone",
            message=f"The self-test of runner {serving.name} passed.",
        ),
        _close(
            names[1], error, target,
            "Serving reads the feature that training reads.",
            f"runner {serving.name} reads another feature than training does: heads are trained on one thing and "
            "served another. Draft with `--runner generic`, and report the architecture.",
        ),
    ]  # fmt: skip


def check_taps(target: LoadedModel, tokens: Tensor, taps: Sequence[Tap], runner: str) -> Check:
    """Compares a head's taps in the serving runner with those in training; tokens: (1, S) int64.

    Each tap is compared by itself: features of deep blocks are many times larger than those of the first ones.
    """
    name = "taps served"
    ids = tokens[0, :_PROBE_LEN].tolist()
    try:
        read = Teacher(target, taps).read(tokens[:, : len(ids)])[0].float()
        serving = Runner(target, num_slots=1, context_len=len(ids) + 1, max_nodes=8, taps=taps, runner=runner)
    except ModelError as err:
        expected = "the same features in training and serving"
        return Check(name=name, verdict="fault", value=None, expected=expected, message=str(err))
    served = serving.prefill(0, ids, 0)
    assert served is not None, "there are taps"
    pairs = zip(served.unbind(1), read.split(served.shape[-1], dim=1), strict=False)  # `final` comes after the taps
    errors = [_relative_error(ours.float(), theirs) for ours, theirs in pairs]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return _close(
        name, errors[worst], target,
        f"Serving reads the taps that training reads, {', '.join(map(str, taps))}.",
        f"runner {serving.name} reads tap {taps[worst]} from another place than training does: heads are trained on "
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
        return Check(name=name, verdict="ok", value=[], expected=expected, message=f"The {known} agree.")
    is_same_size = (own.hidden_size, own.vocab_size) == (fingerprint.hidden_size, fingerprint.vocab_size)
    return Check(
        name=name,
        verdict="warning" if is_same_size and allow_other_target else "fault",
        value=differences,
        expected=expected,
        message=f"head '{what}' was trained for another target ({own.name or 'not named'}): it has "
        f"{', '.join(differences)}. Name that target, or train a head for this one.",
    )


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
    message = "Every tensor is finite, of sensible size and not empty."
    if found:
        message = f"{'; '.join(found)}: training broke off badly, or a conversion lost it. Train or convert it again."
    return Check(
        name="head values", verdict="fault" if found else "ok", value=found,
        expected=f"finite, not all zero, at most {_LARGEST:.0e}", message=message,
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
    message = "Its weights are not those that training starts from."
    if same:
        who = "the head" if len(same) == len(ours) else ", ".join(sorted(same))
        message = (
            f"{who} still has the weights that training starts from: it was never trained, its checkpoint was not "
            "loaded, or a conversion lost it. Train it, or convert it again."
        )
    verdict: Verdict = "fault" if same else "ok"
    check = Check(
        name="head trained", verdict=verdict, value=sorted(same), expected="unlike fresh weights", message=message
    )
    return check, same


def fresh_head(config: HeadConfig, parts: TargetParts, *, seed: int, token_map: Tensor | None = None) -> Head:
    """Returns a head with training's initial weights, in float32 if the target is; keeps the state of the generator.

    Args:
        config: Sizes of the head.
        parts: The modules that the head shares with the target.
        seed: Seed of random weights.
        token_map: (Vd,) int64, the tokens of a draft vocabulary; None for the first ones, if the head needs one.
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
    """Returns the number of parallel heads, each of which may be damaged or untrained; 0 for one recurrent network."""
    return config.num_heads if isinstance(config, StepHeadConfig) else 0


def _parts(weights: Mapping[str, Tensor], num_heads: int) -> dict[str, dict[str, Tensor]]:
    """Returns floating-point tensors by head, stacked ones taken apart; "shared" for the rest."""
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


def _close(name: str, error: float, target: LoadedModel, fine: str, wrong: str) -> Check:
    """Returns the check that an error is within rounding, by the bounds of the runner's self-test."""
    bound = 2e-4 if target.dtype in (torch.float32, torch.float64) else 5e-2
    is_close = error <= bound  # False for NaN
    return Check(
        name=name, verdict="ok" if is_close else "fault", value=error, expected=f"relative error at most {bound:.0e}",
        message=fine if is_close else wrong[0].upper() + wrong[1:],
    )  # fmt: skip
