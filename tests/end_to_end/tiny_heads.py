"""Draft heads for the tiny targets: trained for a moment on what plain decoding wrote, so that drafts get accepted."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from made_once import made_once
from tiny_models import tiny_model

from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import build_head
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.objective_base import Examples, accumulate, label_counts
from foretoken.training.objectives import head_config, objective_config
from foretoken.training.teacher import Teacher

# Name of the head to its method and sizes; Hydra with a prefix layer is Hydra++.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"num_heads": 3}),
    "hydra": ("hydra", {"num_heads": 3, "num_layers": 2, "prefix": None, "own_lm_head": True}),
    "hydra++": ("hydra", {"num_heads": 4, "num_layers": 2}),
    "mlp_speculator": ("mlp_speculator", {"num_heads": 3, "inner_dim": 48}),
    "eagle": ("eagle", {"num_steps": 4}),
    "hass": ("hass", {"num_steps": 4}),
    "eagle3": ("eagle3", {"num_steps": 4, "boundaries": [1, 3], "draft_vocab_size": 50}),
    "falcon": ("falcon", {"num_steps": 4}),
    "spire without feedback": ("spire", {"num_steps": 4, "sinks": 2, "window": 12, "has_feedback": False}),
    "spire": ("spire", {"num_steps": 4, "sinks": 2, "window": 12}),
}
STEP_HEADS = ("medusa", "hydra", "hydra++", "mlp_speculator")
_STEPS = dict.fromkeys(HEADS, 80) | {"spire": 40}  # whose steps take four times as long
_Text = tuple[int, ...]


def depth(name: str) -> int:
    """How many tokens deep a head drafts."""
    sizes = HEADS[name][1]
    return int(sizes.get("num_heads", sizes.get("num_steps")))


def head(
    name: str, architecture: str = "llama", *, steps: int | None = None, **options: Any
) -> Callable[[Any], dict[str, Any]]:
    """A drafter over a tiny head: references (prompt and plain output) to arguments of `LLM`.

    Args:
        name: A key of `HEADS`.
        architecture: Of the target.
        steps: Of training, other than the head's own; 0 leaves the weights random.
        options: Further keys of `speculative_config`.
    """

    def arguments(references: Sequence[Sequence[int]]) -> dict[str, Any]:
        directory = _trained(
            name, architecture, _STEPS[name] if steps is None else steps, tuple(tuple(text) for text in references)
        )
        method = "eagle" if name == "hass" else HEADS[name][0]
        return {"speculative_config": {"method": method, "model": str(directory), **options}}

    return arguments


@cache
def _trained(name: str, architecture: str, steps: int, texts: tuple[_Text, ...]) -> Path:
    """The directory of a head, which all processes of a run share."""
    key = repr((name, architecture, steps, texts))
    return made_once(f"{name}-head", key, lambda directory: _train(name, architecture, steps, texts, directory))


def _train(name: str, architecture: str, steps: int, texts: tuple[_Text, ...], directory: Path) -> None:
    """Trains a head and writes it."""
    method, sizes = HEADS[name]
    target = wrap_model(tiny_model(architecture), name=architecture)
    parts = target_parts(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build_head(head_config(method, target, sizes), dtype=torch.float32)
        if made.token_map is not None:  # what the texts hold, and then the lowest of the others
            words = sorted({token for text in texts for token in text})
            others = (token for token in range(target.vocab_size) if token not in words)
            made.token_map = torch.tensor(sorted([*words, *others][: len(made.token_map)]))
        made.initialize(parts)
        if not steps:
            for parameter in made.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        objective = objective_config(method, {"ce_weight": 1.0, "kl_weight": 0.2, "head_decay": 1.0})
        optimizer = torch.optim.AdamW(made.parameters(), lr=2e-2)
        longest = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        supervised = torch.tensor([[place < len(text) for place in range(longest)] for text in texts])
        features = Teacher(target, made.config.taps).read_features(tokens)
        examples = Examples(tokens, supervised, features, features).of_head(made.config)
        for _ in range(steps):
            accumulate(objective, made, examples, parts, counts=label_counts(supervised, objective.steps(made.config)))
            optimizer.step()
            optimizer.zero_grad()
    native.write_checkpoint(HeadCheckpoint.of_head(made, target=TargetFingerprint.of(target)), directory)
