"""Random EAGLE and MTP heads for a tiny target, their drafters, and what the head itself says of a committed text."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from drafters.drafting_contexts import attached, begin
from made_once import new_folder
from tiny_models import tiny_model
from torch import Tensor

from foretoken.drafters.base import Committed
from foretoken.drafters.head_drafter import HeadDrafter
from foretoken.drafters.heads import AutoregressiveDrafter
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.registry import read_head
from foretoken.heads.base import AutoregressiveHead, UnrolledHead, build_head
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.objectives import head_config
from foretoken.training.teacher import Teacher

E = 32  # hidden size of the target
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {"boundaries": [1, 2, 3], "draft_vocab_size": 50}),
    "eagle3 normed": ("eagle3", {"boundaries": [0, 3], "norm_before_residual": True, "feeds_normed": True}),
    "mtp": ("mtp", {}),
    "eagle3 narrow": ("eagle3", {"boundaries": [2], "draft_hidden_size": 24, "own_embedding": True}),
}
NARROW = {"target_layers": 3, "sinks": 2, "window": 6}
SPIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "spire": ("spire", NARROW),
    "spire, one block": ("spire", {**NARROW, "num_layers": 1, "sinks": 0}),
    "spire, wide": ("spire", {"num_layers": 3, "window": 500}),
    "spire, no feedback": ("spire", {**NARROW, "has_feedback": False}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain", "num_speculative_tokens": 5},
    "static": {"tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]},
    "gapped": {"tree": [[1], [3], [1, 0], [1, 2], [1, 2, 1]]},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 4, "tree_top_k": 3, "max_nodes": 12},
    "narrow dynamic": {"tree": "dynamic", "num_speculative_tokens": 6, "tree_top_k": 4, "max_nodes": 8},
}


@cache
def target() -> LoadedModel:
    """Whose features are fed."""
    return wrap_model(tiny_model("llama"), name="llama")


@cache
def directory(kind: str, seed: int = 0) -> Path:
    """A random head."""
    method, sizes = (KINDS | SPIRES)[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = build_head(head_config(method, target(), {"num_steps": 6, **sizes}), dtype=torch.float32)
        for parameter in head.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            else:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        if head.token_map is not None:
            head.token_map = torch.randperm(target().vocab_size)[: len(head.token_map)].sort()[0]
    path = new_folder("autoregressive")
    native.write_checkpoint(HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target())), path)
    return path


def drafter(kind: str, changes: Mapping[str, Any] | None = None, **options: Any) -> AutoregressiveDrafter:
    """Attached to the target, with the weights as they are stored unless told otherwise; changes: of the handle."""
    options = {"method": KINDS[kind][0], "model": str(directory(kind)), "quantization": "none", **options}
    made = create_drafter(drafter_options(options), target())
    assert isinstance(made, AutoregressiveDrafter)
    attached(made, **{"model": target(), "vocab_size": target().vocab_size, **(changes or {})})
    made._whole_drafts = (
        None  # the loop over levels, which tests/drafters/test_whole_drafts.py compares with the native call
    )
    return made


class Texts:
    """Committed texts by slot, and the target's features of them, which drafters are told of."""

    def __init__(self, kind: str) -> None:
        _, checkpoint = read_head(directory(kind))
        head = checkpoint.module()
        assert isinstance(head, UnrolledHead)
        self.head, self.parts = head, target_parts(target())
        self._teacher, self._num_taps = Teacher(_fresh_target(), head.config.taps), len(head.config.taps)
        self.texts: dict[int, list[int]] = {}
        self._told: dict[int, int] = {}

    def begin(self, made: Sequence[HeadDrafter], slot: int, prompt: Sequence[int]) -> None:
        """A sequence begins in a slot of some drafters; nothing of it is committed yet."""
        self.texts[slot], self._told[slot] = list(prompt), 0
        for each in made:
            begin(each, slot, prompt)

    def features(self, text: Sequence[int]) -> Tensor:
        """(S, F, E)."""
        features: Tensor = self._teacher.read_features(torch.tensor([list(text)]))[0]
        return features[:, : self._num_taps * E].unflatten(1, (self._num_taps, E))

    def commit(self, made: Sequence[HeadDrafter], slots: Sequence[int], *, most: int = 10_000) -> None:
        """Tells drafters of the positions before the roots that they do not know, at most so many of each slot."""
        starts = [self._told[slot] for slot in slots]
        ends = [
            min(start + most, len(self.texts[slot]) - 1) for slot, start in zip(slots, starts, strict=True)
        ]  # fmt: skip
        spans = [each for each in zip(slots, starts, ends, strict=True) if each[1] < each[2]]
        if not spans:
            return
        features = [self.features(self.texts[slot][:-1])[start:end] for slot, start, end in spans]
        told = Committed(
            slots=[slot for slot, _, _ in spans],
            starts=[start for _, start, _ in spans],
            tokens=[self.texts[slot][start:end] for slot, start, end in spans],
            features=torch.cat(features),
        )
        for each in made:
            each.commit(told)
        self._told.update({slot: end for slot, _, end in spans})

    @torch.no_grad()
    def rows(self, slot: int) -> tuple[Tensor, Tensor]:
        """(S - 1, Hk, Dh) keys and values of all committed pairs, by the head's own pass over the whole text."""
        text, head = self.texts[slot], self.head
        assert isinstance(head, AutoregressiveHead)
        states = head.initial_state(self.features(text[:-1]).flatten(1).unsqueeze(0))
        inputs, side = head.paired(states, head.embed(torch.tensor([text[1:]]), self.parts))
        heads = head.layer.projected(inputs, torch.arange(len(text) - 1).unsqueeze(0), side)
        return heads.key[0], heads.value[0]

    @torch.no_grad()
    def log_probs(self, slot: int, path: Sequence[int], temperature: float) -> Tensor:
        """(D, V), of D tokens that follow the root one after another, by the steps that training unrolls."""
        text = self.texts[slot]
        at = slice(len(text) - 2, len(text) - 1)  # the draft begins behind the last committed pair
        tokens = torch.tensor([[*text, *path]])
        features = self.features(text).flatten(1)
        features = torch.nn.functional.pad(features, (0, 0, 0, len(path))).unsqueeze(0)
        steps = zip(range(len(path)), self.head.unrolled(features, tokens, self.parts, starts=at), strict=False)
        logits = [self.head.logits(i, hidden[0, at if i == 0 else 0], self.parts).view(-1) for i, hidden in steps]
        return (torch.stack(logits) / temperature).log_softmax(-1)


def _fresh_target() -> LoadedModel:
    """A copy that may carry the hooks of a teacher's taps."""
    return wrap_model(tiny_model("llama"), name="llama")


def stored_rows(made: AutoregressiveDrafter, slot: int, length: int) -> tuple[Tensor, Tensor]:
    """(length, Hk, Dh) keys and values in the drafter's cache."""
    cache = made._stack.cache
    return cache.keys[0][slot, :, :length].transpose(0, 1), cache.values[0][slot, :, :length].transpose(0, 1)


def poison(made: AutoregressiveDrafter) -> None:
    """NaN in all rows that are no committed pairs."""
    features: Any = made._features
    for slot, fed in enumerate(features._fed):
        made._stack.cache.poison(slot, fed)
