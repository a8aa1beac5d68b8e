"""The frozen target as a teacher: computes its features of training tokens, or reads them from disk.

A target that is stored in integers computes them as it verifies, by a runner on its integers: heads learn from the
features that they will draft from, and passes of two threads take a third of the time of the unpacked weights in torch.

Letters: B sequences, S positions, E hidden size, F taps.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.passes import Pass, Tap
from foretoken.files.atomic_files import new_file
from foretoken.models.forward_pass import ForwardPass, running
from foretoken.models.generic import own_attention, place_taps
from foretoken.runner.runner import Runner

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

_SAMPLED = 4096  # values of each weight in the hash of a target; a choice: finds other weights, reads little
_log = logging.getLogger(__name__)


class Teacher:
    """Computes the target's features at every position of texts."""

    def __init__(self, model: LoadedModel, taps: Sequence[Tap] = ("final",)) -> None:
        """Prepares a teacher; raises `ModelError` when a tap cannot be read."""
        self._model, self._taps = model, taps
        self._runner: Runner | None = None  # of a target in integers, for the largest batch so far
        if tuple(taps) != ("final",):
            place_taps(model.module, model.num_layers, taps)

    def read_features(self, tokens: Tensor) -> Tensor:
        """Returns the features that a head reads and learns from, for (B, S) int64 tokens.

        They are (B, S, F E) in the target's dtype, the taps side by side, followed by `final` unless it is the last
        tap.
        """
        if self._model.stored is not None:
            taps = self._taps if self._taps[-1] == "final" else (*self._taps, "final")
            return self._verified(self._model.stored, tokens, taps)
        with running(ForwardPass(layout=None)) as forward_pass:
            final = self.features(tokens)
        parts = [final if tap == "final" else forward_pass.features[tap] for tap in self._taps]
        if self._taps[-1] != "final":
            parts.append(final)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def features(self, tokens: Tensor) -> Tensor:
        """Returns the feature `final`, the output of the target's last norm and input of its LM head, without a graph.

        Takes (B, S) int64 tokens; returns (B, S, E) in the target's dtype.
        """
        if self._model.stored is not None:
            size = int(self._model.config.hidden_size)
            return self.read_features(tokens)[..., -size:]
        backbone: Any = self._model.backbone
        with own_attention(self._model.module, "sdpa"), torch.no_grad():
            output = backbone(input_ids=tokens.to(self._model.device), use_cache=False)
        features: Tensor = output.last_hidden_state
        return features

    def _verified(self, stored: LoadedModel, tokens: Tensor, taps: Sequence[Tap]) -> Tensor:
        """Returns (B, S, F E) features from a pass of prompts on the KV cache of the runner that serves the target."""
        batch, length = tokens.shape
        runner = self._runner
        if runner is None or runner.cache.num_slots < batch or runner.context_len < length:
            self._runner = None  # frees its cache first
            self._runner = runner = Runner(stored, num_slots=batch, context_len=length, max_nodes=1, taps=taps)
        work = Pass.of_chains(
            tokens.tolist(), slots=range(batch), prefix_lens=[0] * batch, device=stored.device, has_last_logits=False
        )
        with torch.inference_mode():
            features = runner.run(work).features
        assert features is not None, "it has taps"
        return features.flatten(1).view(batch, length, -1).to(self._model.dtype, copy=True)

    def digest(self) -> str:
        """Returns a hash of a sample of every weight, which any training of the target changes."""
        found = hashlib.sha256()
        for name, parameter in sorted(self._model.module.named_parameters()):
            sample = parameter.detach().flatten()[:_SAMPLED].to("cpu", torch.float32)
            found.update(name.encode() + sample.numpy().tobytes())
        return found.hexdigest()


class FeatureCache:
    """Features of training windows on disk, up to a bounded size; others are computed every time.

    Entries lie in a directory named by everything that they depend on besides the window's tokens. Heads with the same
    taps that are trained on the same windows share them, and so do epochs that repeat their windows.
    """

    def __init__(self, directory: Path, *, key: str, max_bytes: int) -> None:
        """Opens a cache of at most `max_bytes`; key: all that the features depend on besides tokens."""
        self._directory = directory / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._directory.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._size = sum(path.stat().st_size for path in self._directory.glob("*.safetensors"))

    def get(self, name: str) -> Tensor | None:
        """Returns an entry, or None if it is missing or damaged."""
        try:
            return load_file(self._directory / f"{name}.safetensors")["features"]
        except (OSError, SafetensorError, KeyError):
            return None

    def put(self, name: str, features: Tensor) -> None:
        """Stores an entry if there is room; it appears whole or not at all."""
        size = features.numel() * features.itemsize
        if self._size + size > self._max_bytes:
            return
        try:
            with new_file(self._directory / f"{name}.safetensors") as new:
                save_file({"features": features.detach().cpu().contiguous()}, new)
            self._size += size
        except (OSError, SafetensorError) as err:  # a full disk: continue without
            _log.warning("no more features are kept in '%s', but computed every time: %s", self._directory, err)
            self._max_bytes = 0
