"""Facts about the target for formats: sizes that head files leave out, tensors that they repeat."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from foretoken.core.errors import ConfigError
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.models.config_checks import check_model_files
from foretoken.models.loading import load_config, load_model
from foretoken.models.parts import target_parts
from foretoken.models.placement import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from foretoken.models.loading import LoadedModel

_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWeights:
    """Tensors of the target that other formats copy.

    Attributes:
        lm_head: (V, E).
        lm_head_bias: (V,), or None.
        embedding: (V, E), rows as stored.
        norm: (E,), of the final norm, or None if it is not found.
        is_plain: Whether logits are LM head times feature plus bias, neither scaled nor capped.
        is_embedding_plain: Whether embeddings are the stored rows, not scaled.
    """

    lm_head: Tensor
    embedding: Tensor
    lm_head_bias: Tensor | None = None
    norm: Tensor | None = None
    is_plain: bool = True
    is_embedding_plain: bool = True

    @classmethod
    def of(cls, model: LoadedModel) -> TargetWeights:
        """Returns the tensors of a loaded target, not copied."""
        module: Any = model.module
        parts, head = target_parts(model), module.get_output_embeddings()
        norm = next((getattr(model.backbone, name) for name in _FINAL_NORMS if hasattr(model.backbone, name)), None)
        with torch.no_grad():
            probe = parts.lm_head_weight[:4] * 100  # large enough for any cap to show
            plain = linear(probe, parts.lm_head_weight, head.bias)
            is_plain = torch.allclose(parts.lm_head(probe).double(), plain.double(), rtol=1e-2)
            embedding = module.get_input_embeddings().weight.detach()
            first = torch.arange(min(4, len(embedding)), device=embedding.device)
            is_embedding_plain = torch.equal(parts.embed(first), embedding[first])
        return cls(
            lm_head=parts.lm_head_weight,
            lm_head_bias=None if head.bias is None else head.bias.detach(),
            embedding=embedding,
            norm=None if norm is None else norm.weight.detach(),
            is_plain=is_plain,
            is_embedding_plain=is_embedding_plain,
        )


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """The known facts about the target; every part may be missing.

    Attributes:
        fingerprint: Identifies the target.
        config: Its transformers text configuration.
        load: Returns its weights; called once, and only by formats that need them.
    """

    fingerprint: TargetFingerprint | None = None
    config: Any | None = None
    load: Callable[[], TargetWeights] | None = None

    @classmethod
    def of_directory(cls, name: str) -> TargetInfo:
        """Returns the facts about a model directory without loading it; raises `ModelError` if it is no model."""
        check_model_files(name)
        config = load_config(name).get_text_config()
        stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
        fingerprint = TargetFingerprint(
            name=name,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
        )
        dtype = stored if stored in DTYPES else "float32"
        return cls(
            fingerprint=fingerprint,
            config=config,
            load=lambda: TargetWeights.of(load_model(name, dtype=dtype, device="cpu")),
        )

    @cached_property
    def weights(self) -> TargetWeights | None:
        """The target's weights, or None without `load`."""
        return None if self.load is None else self.load()

    def loaded(self) -> TargetWeights:
        """Returns the target's weights, loaded once; raises `ConfigError` without `load`."""
        if self.weights is None:
            raise ConfigError("the target's weights are needed. Pass --target.")
        return self.weights

    @property
    def vocab_size(self) -> int | None:
        """Width of the target's logits, or None."""
        if self.fingerprint is not None:
            return self.fingerprint.vocab_size
        size = getattr(self.config, "vocab_size", None)
        return None if size is None else int(size)

    @property
    def num_layers(self) -> int | None:
        """Number of the target's blocks, or None."""
        if self.fingerprint is not None and self.fingerprint.num_layers is not None:
            return self.fingerprint.num_layers
        number = getattr(self.config, "num_hidden_layers", None)
        return None if number is None else int(number)

    def copy_of_lm_head(self, what: str, *, with_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the target's LM head and bias, for a format with an LM head in each head.

        Args:
            what: The format, for messages.
            with_bias: Whether the format can hold a bias.

        Raises:
            ConfigError: If the target is missing, or a copy would compute other logits.
        """
        weights = self.weights
        if weights is None:
            raise ConfigError(
                f"the heads share the target's LM head, and {what} keeps a copy of it in each head. Pass --target."
            )
        if not weights.is_plain or (weights.lm_head_bias is not None and not with_bias):
            raise ConfigError(
                f"the heads share the target's LM head, which has a bias, a scale or a cap that {what} cannot express. "
                "Expected a plain LM head. Keep the head in another format."
            )
        return weights.lm_head, weights.lm_head_bias
