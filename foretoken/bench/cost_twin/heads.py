"""Pads draft heads for a cost twin: one table of rules and one change of sizes a method; see `padding`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretoken.bench.cost_twin.padding import Rule
from foretoken.core.errors import ConfigError
from foretoken.hf.twin_record import KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from foretoken.bench.cost_twin.padding import Padding
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
    from foretoken.hf.twin_record import TwinRecord

    Rules = Mapping[str, Rule]

_BOTH, _LAST = (-2, -1), (-1,)
_LM_HEAD, _SAME = Rule(axes=_LAST), Rule()
_BLOCK, _BLOCK_BIAS = Rule(axes=_BOTH, is_written=True), Rule(axes=_LAST, is_written=True)
_NORM = Rule(axes=_LAST, is_scaled_down=True)


def check_method(method: str, what: str) -> None:
    """Raises `ConfigError` when heads of a method cannot be padded; what: names the head."""
    if method not in _METHODS:
        raise ConfigError(
            f"'{what}' is a head of method '{method}', which cannot be padded. Expected one of "
            f"{', '.join(sorted(_METHODS))}. Name the heads that you want."
        )


def padded_head(
    checkpoint: HeadCheckpoint, padding: Padding, record: TwinRecord, target: TargetFingerprint
) -> HeadCheckpoint:
    """A head for the twin of its target, with the same drafts.

    Args:
        checkpoint: The head, of a method that can be padded.
        padding: That of the target.
        record: Of the target's twin.
        target: The twin.
    """
    config: Any = checkpoint.config
    rules_of, sizes_of = _METHODS[config.method]
    rules = rules_of(config)
    weights = {key: padding(tensor, _rule(rules, key)).cpu() for key, tensor in checkpoint.weights.items()}
    sizes = {"hidden_size": config.hidden_size * padding.factor, **sizes_of(config, padding.factor)}
    return replace(
        checkpoint,
        config=type(config).model_validate(config.model_dump() | sizes),
        weights=weights,
        target=target,
        notes={**checkpoint.notes, KEY: record.model_dump(mode="json")},
    )


def _rule(rules: Rules, key: str) -> Rule:
    """Of a tensor, whose name stands there with its number left out."""
    return rules[re.sub(r"\.\d+\.", ".", key)] if key not in rules else rules[key]


def _medusa(config: Any) -> Rules:
    """Residual blocks on the feature, then LM heads."""
    del config
    return {"weight": _BLOCK, "bias": _BLOCK_BIAS, "lm_head": _LM_HEAD, "token_map": _SAME}


def _hydra(config: Any) -> Rules:
    """The same, with first blocks that read several vectors side by side, and perhaps a decoder block before them."""
    rules: dict[str, Rule] = {
        "weight": _BLOCK,
        "bias": _BLOCK_BIAS,
        "lm_heads.weight": _LM_HEAD,
        "lm_heads.bias": _SAME,
        **{f"first.{part}.bias": _BLOCK_BIAS for part in ("linear", "residual")},
        **{
            f"prefix.{part}.weight": Rule(axes=_BOTH) for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        },
        **{f"prefix.{part}.weight": _BLOCK for part in ("o_proj", "down_proj")},
        **{f"prefix.{part}": _NORM for part in ("input_norm", "post_attention_norm", "norm")},
    }
    for head in range(config.num_heads):
        block = Rule(axes=_BOTH, is_written=True, parts=head + 2)
        rules |= {f"first.{head}.{part}.weight": block for part in ("linear", "residual")}
    return rules


def _hydra_sizes(config: Any, factor: int) -> dict[str, Any]:
    """Those of the decoder block, whose heads keep their size."""
    if config.prefix is None:
        return {}
    block = config.prefix.model_dump()
    counts = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    block |= {key: block[key] * factor for key in counts}
    return {"prefix": block | {"rms_norm_eps": block["rms_norm_eps"] / factor}}


def _mlp_speculator(config: Any) -> Rules:
    """A recurrence whose states are sums that a norm reads.

    What scales a token's embedding grows with the root of the inner width, so the embeddings shrink; a scaled feature
    comes out larger by that root, so its projection shrinks.
    """
    rules = {
        "embeddings.weight": Rule(axes=_LAST, is_written=True, is_scaled_down=True),
        "projections.weight": Rule(axes=_BOTH, is_written=True),
        "lm_heads.weight": _LM_HEAD,
        "norms.weight": _NORM,
        "norms.bias": Rule(axes=_LAST, is_written=True),
    }
    first = Rule(axes=_BOTH, is_written=True, is_scaled_down=config.scale_input)
    return rules | {"projections.0.weight": first}


def _mlp_speculator_sizes(config: Any, factor: int) -> dict[str, Any]:
    """Its own width, and the epsilon of what it norms."""
    return {"inner_dim": config.inner_dim * factor, "rms_norm_eps": config.rms_norm_eps / factor}


_METHODS: dict[str, tuple[Callable[[Any], Rules], Callable[[Any, int], dict[str, Any]]]] = {
    "medusa": (_medusa, lambda config, factor: {}),  # noqa: ARG005 - no size but the hidden one
    "hydra": (_hydra, _hydra_sizes),
    "mlp_speculator": (_mlp_speculator, _mlp_speculator_sizes),
}
