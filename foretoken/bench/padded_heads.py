"""Pads draft heads for the cost twins of their targets: a table of rules and a change of sizes for each method."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretoken.bench.padding import NORM, READS, READS_LAST, SAME, WRITES, WRITES_LAST, Padding, Rule
from foretoken.core.errors import ConfigError
from foretoken.heads.falcon import NUM_LAYERS
from foretoken.heads.spire import SpireConfig
from foretoken.models.config import TWIN_KEY, TwinRecord

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
    from foretoken.heads.decoder_layer import LayerConfig

Rules = dict[str, Rule]


def padded_head(
    checkpoint: HeadCheckpoint, padding: Padding, record: TwinRecord, target: TargetFingerprint
) -> HeadCheckpoint:
    """Returns a head for the twin of its target, with the same drafts; raises `ConfigError` for one without a twin."""
    config: Any = checkpoint.config
    if config.method not in _METHODS:
        raise ConfigError(f"heads of method '{config.method}' have no twin. Expected others. Name them with --heads.")
    rules_of, sizes_of = _METHODS[config.method]
    rules = rules_of(config)
    weights = {}
    for key, tensor in checkpoint.weights.items():
        rule = rules[key] if key in rules else rules[re.sub(r"\.\d+\.", ".", key)]  # one rule for all numbers
        weights[key] = padding(tensor, rule).cpu()
    sizes = {"hidden_size": config.hidden_size * padding.factor, **sizes_of(config, padding.factor)}
    if isinstance(config, SpireConfig):
        sizes["target_layers"] = record.layers
    return replace(
        checkpoint,
        config=type(config).model_validate(config.model_dump() | sizes),
        weights=weights,
        target=target,
        notes={**checkpoint.notes, TWIN_KEY: record.values},
    )


def _medusa(_: Any) -> Rules:
    return {"weight": WRITES, "bias": WRITES_LAST, "lm_head": READS_LAST, "token_map": SAME}


def _hydra(config: Any) -> Rules:
    """As `_medusa`, but first blocks read several vectors side by side, and a decoder block may come before them."""
    rules: Rules = {
        "weight": WRITES,
        "bias": WRITES_LAST,
        "lm_heads.weight": READS_LAST,
        "lm_heads.bias": SAME,
        **{f"first.{part}.bias": WRITES_LAST for part in ("linear", "residual")},
        **_decoder_block("prefix"),
        "prefix.norm": NORM,
    }
    for head in range(config.num_heads):
        block = Rule(axes=(-2, -1), is_written=True, parts=head + 2)
        rules |= {f"first.{head}.{part}.weight": block for part in ("linear", "residual")}
    return rules


def _decoder_block(name: str, read_parts: int = 1) -> Rules:
    """Rules of a decoder block; read_parts: vectors side by side that its attention reads."""
    attention = ("q_proj", "k_proj", "v_proj")
    return {
        **{f"{name}.{part}.weight": Rule(axes=(-2, -1), parts=read_parts) for part in attention},
        **{f"{name}.{part}.bias": READS_LAST for part in attention},
        **{f"{name}.{part}.weight": READS for part in ("gate_proj", "up_proj")},
        **{f"{name}.{part}.weight": WRITES for part in ("o_proj", "down_proj")},
        **{f"{name}.{part}": NORM for part in ("input_norm", "side_norm", "post_attention_norm")},
    }


def _decoder_block_sizes(config: LayerConfig, factor: int) -> dict[str, Any]:
    """Sizes of a decoder block (attention heads keep their size), and the epsilon of all its norms."""
    sizes = config.model_dump()
    counts = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {
        **sizes,
        **{key: sizes[key] * factor for key in counts},
        "rms_norm_eps": sizes["rms_norm_eps"] / factor,
    }


def _eagle(_: Any) -> Rules:
    """A layer that fuses embedding and feature, and a decoder block; the target's LM head reads its output."""
    fused = {"fc.weight": Rule(axes=(-2, -1), is_written=True, parts=2), "fc.bias": WRITES_LAST}
    return {**fused, **_decoder_block("layer")}


def _eagle_sizes(config: Any, factor: int) -> dict[str, Any]:
    return {"layer": _decoder_block_sizes(config.layer, factor)}


def _eagle3(config: Any) -> Rules:
    """A layer that fuses the taps, a decoder block that reads the embedding beside the state, and an LM head.

    The twin's residual stream has the same numbers at every boundary, followed by zeros; its further blocks come last.
    So features are the target's, followed by zeros, at the same boundaries.
    """
    taps = len(config.boundaries)
    return {
        "fc.weight": Rule(axes=(-2, -1), is_written=True, parts=taps),
        "feature_norm": Rule(axes=(-1,), is_scaled_down=True, parts=taps),
        **dict.fromkeys(("feature_norms", "state_norm", "norm"), NORM),
        **_decoder_block("layer", read_parts=2),
        "lm_head.weight": READS_LAST,
        "embedding": WRITES_LAST,
        "token_map": SAME,
    }


def _eagle3_sizes(config: Any, factor: int) -> dict[str, Any]:
    width = config.draft_hidden_size
    return {**_eagle_sizes(config, factor), "draft_hidden_size": None if width is None else width * factor}


def _falcon(_: Any) -> Rules:
    """LSTM layers (new cells stay zero) and a decoder block; the target's LM head reads its output."""
    gates: Rules = {}
    for layer in range(NUM_LAYERS):
        for source, parts in (("ih", 1 if layer else 2), ("hh", 1)):
            gates[f"lstm.weights.weight_{source}_l{layer}"] = Rule(
                axes=(-2, -1), is_written=True, parts=parts, row_parts=4
            )
            gates[f"lstm.weights.bias_{source}_l{layer}"] = Rule(axes=(-1,), is_written=True, parts=4)
    return {**gates, **_decoder_block("layer")}


def _spire(_: Any) -> Rules:
    """Decoder blocks, and with feedback a norm and projections of memories; features as in `_eagle3`.

    The number of blocks stays, as `foretoken train spire` has two of any target. Kept blocks keep their numbers.
    """
    memory = {**_decoder_block("memory"), "memory.norm": NORM, "memory.mix": SAME}
    return {**_decoder_block("layers"), **memory}


def _mlp_speculator(config: Any) -> Rules:
    """A recurrence over sums that a norm reads.

    The scale of a token's embedding grows with the root of the inner width, so the embeddings shrink. A scaled feature
    grows by that root, so its projection shrinks.
    """
    rules = {
        "embeddings.weight": Rule(axes=(-1,), is_written=True, is_scaled_down=True),
        "projections.weight": WRITES,
        "lm_heads.weight": READS_LAST,
        "norms.weight": NORM,
        "norms.bias": WRITES_LAST,
    }
    first = Rule(axes=(-2, -1), is_written=True, is_scaled_down=config.scale_input)
    return rules | {"projections.0.weight": first}


_METHODS: dict[str, tuple[Callable[[Any], Rules], Callable[[Any, int], dict[str, Any]]]] = {
    "eagle": (_eagle, _eagle_sizes),
    "eagle3": (_eagle3, _eagle3_sizes),
    "falcon": (_falcon, _eagle_sizes),
    "medusa": (_medusa, lambda *_: {}),  # no size but the hidden size
    "spire": (_spire, _eagle_sizes),
    "hydra": (_hydra, lambda c, factor: {"prefix": _decoder_block_sizes(c.prefix, factor)} if c.prefix else {}),
    "mlp_speculator": (
        _mlp_speculator,
        lambda c, factor: {"inner_dim": c.inner_dim * factor, "rms_norm_eps": c.rms_norm_eps / factor},
    ),
}
