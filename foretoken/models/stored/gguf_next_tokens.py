"""The layers of a GGUF file that predict further tokens: a head in the file of its target, as `mtp.*` of checkpoints.

Source: `_Qwen35MtpMixin` of ggml-org/llama.cpp, conversion/qwen.py. What this conversion did to values is undone.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foretoken.models.stored.gguf import key_of, restored
from foretoken.models.stored.gguf_config import BLOCK, Settings, read_settings
from foretoken.models.stored.gguf_file import read_gguf

_EXPERTS = re.compile(r"(.*\.experts)\.(gate|up|down)_proj\.weight")  # all of a layer
_OUTER = {  # tensors of a layer that checkpoints have outside of layers
    "nextn.eh_proj.weight": "mtp.fc.weight", "nextn.shared_head_norm.weight": "mtp.norm.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight", "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FurtherTokens:
    """The layers behind the last one of a GGUF file, which predict further tokens.

    Attributes:
        settings: Of the whole file.
        names: The file's tensors by their names in checkpoints of transformers; gate and up of experts are two.
    """

    settings: Settings
    names: dict[str, tuple[str, ...]]

    @classmethod
    def of_file(cls, path: Path) -> Self | None:
        """Returns the layers of a file, None without any; raises `ModelError` as `read_settings`."""
        file = read_gguf(path)
        settings, names = read_settings(file), dict[str, tuple[str, ...]]()
        last = settings.fields["num_hidden_layers"]
        for name in file.tensors:
            match = BLOCK.fullmatch(name)
            if match is None or int(match[1]) < last:
                continue
            key = _OUTER.get(match[2]) or key_of(name, settings.architecture) or name
            key = key.replace(f"model.layers.{match[1]}.", f"mtp.layers.{int(match[1]) - last}.")
            if experts := _EXPERTS.fullmatch(key):
                key = f"{experts[1]}.{'down_proj' if experts[2] == 'down' else 'gate_up_proj'}"
            names[key] = (*names.get(key, ()), name)
        return cls(settings=settings._replace(file=file), names=names) if names else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors of `names`."""
        return {key: self._shape(key) for key in self.names}

    def _shape(self, key: str) -> tuple[int, ...]:
        first, *others = (self.settings.file.tensors[name].shape for name in self.names[key])
        if key.endswith(".shared_expert_gate.weight") and len(first) == 1:
            return 1, *first
        if others and len(first) > 1 and others == [first]:  # gate and up
            return first[0], 2 * first[1], *first[2:]
        return first

    def tensor(self, key: str) -> Tensor:
        """Reads a tensor, in float32 if it is stored in integers."""
        parts = [restored(self.settings, name) for name in sorted(self.names[key])]  # gate before up
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].view(self.shapes[key])
