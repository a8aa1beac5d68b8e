"""Reads the network of EAGLE-3 files of all layouts: sizes, taps, the map of drafted tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError
from foretoken.formats.eagle_names import (
    EMBEDDING,
    IS_DRAFTED,
    LM_HEAD,
    OFFSETS,
    eagle3_table,
    is_targets,
    layer_config,
    map_tensors,
    rows_of,
    tokens_of,
    vocabulary,
    width_of,
)
from foretoken.formats.mapping import make_config, read_tensors, scatter
from foretoken.formats.saving import own_entry
from foretoken.heads.eagle3 import Eagle3Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.formats.files import HeadFiles, Weights
    from foretoken.formats.target_info import TargetInfo

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def read_eagle3(
    files: HeadFiles,
    weights: Weights,
    stated: Mapping[str, Any],
    target: TargetInfo,
    *,
    layer: str,
    boundaries: list[int] | None,
    **variant: Any,
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """Reads the network of a file.

    Args:
        files: The checkpoint.
        weights: Its tensors under the authors' names, except the block's.
        stated: The configuration of a Llama.
        target: See `eagle3.read`.
        layer: Name of the block.
        boundaries: The taps, or None if the file does not name them.
        variant: Options of `Eagle3Config` that tensors do not tell.

    Raises:
        ModelError: See `eagle3.read`.
    """
    name, shapes, config = weights.name, weights.shapes, files.config
    width = width_of(weights, stated, "fc.weight")
    hidden = config.get("target_hidden_size") or width
    if not isinstance(hidden, int) or hidden < 1:
        raise ModelError(f"target_hidden_size of '{name}' is {shown(hidden)}. Expected a size.")
    if boundaries is None:
        boundaries = _unstated_boundaries(name, (*shapes.get("fc.weight", ()), 0, 0)[1] // hidden, target)
    _check_boundaries(name, boundaries, target)
    vocab_size = vocabulary(weights, stated, target, keys=(IS_DRAFTED, EMBEDDING))
    rows = rows_of(shapes, LM_HEAD)
    if config.get("draft_vocab_size") not in (None, rows):
        raise ModelError(
            f"draft_vocab_size of '{name}' is {shown(config['draft_vocab_size'])}, and its LM head has {rows} rows. "
            "Expected the same."
        )
    tokens = _token_map(weights, rows, vocab_size)
    is_own, is_shared = _embedding(weights, config, target, is_narrower=width != hidden)
    sizes: Eagle3Config = make_config(
        Eagle3Config,
        name,
        hidden_size=hidden,
        vocab_size=vocab_size,
        boundaries=tuple(boundaries),
        layer=layer_config(weights, layer, stated, width=width),
        draft_hidden_size=None if width == hidden else width,
        draft_vocab_size=None if tokens is None else rows,
        own_embedding=is_own,
        norm_before_fc=flag(name, config, "norm_before_fc", default="input_norm.weight" in shapes),
        fc_norms=flag(name, config, "fc_norm", default="fc_norm.0.weight" in shapes),
        **variant,
    )
    ignored = [key for key in (OFFSETS, IS_DRAFTED) if key in shapes]
    extra = {EMBEDDING: (vocab_size, width)} if is_shared else None
    tensors = read_tensors(weights, eagle3_table(sizes, layer=layer), sizes, ignored=ignored, extra=extra)
    if tokens is not None:
        tensors["token_map"] = tokens
    return sizes, tensors


def eagle3_tensors(checkpoint: HeadCheckpoint, *, layer: str) -> dict[str, Tensor]:
    """Returns a head's tensors under the authors' names; the block is called `layer`."""
    sizes = checkpoint.config
    assert isinstance(sizes, Eagle3Config), "the caller looks"
    tensors = scatter(checkpoint.weights, eagle3_table(sizes, layer=layer))
    if sizes.draft_vocab_size is not None:
        tensors |= map_tensors(checkpoint.weights["token_map"], sizes.vocab_size)
    return tensors


def with_plain_vocabulary(checkpoint: HeadCheckpoint) -> HeadCheckpoint:
    """Removes a map that covers the whole vocabulary, by reordering rows: programs ignore maps of that size."""
    sizes: Any = checkpoint.config
    if sizes.draft_vocab_size != sizes.vocab_size:
        return checkpoint
    weights = dict(checkpoint.weights)
    tokens = weights.pop("token_map")
    weights["lm_head.weight"] = weights["lm_head.weight"][tokens.argsort()]
    return replace(checkpoint, config=sizes.model_copy(update={"draft_vocab_size": None}), weights=weights)


def boundaries_of(name: str, ids: Any, *, shift: int = 0) -> list[int] | None:
    """Returns layer ids plus `shift`, None without ids; raises `ModelError` unless they are integers."""
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ModelError(f"{LAYER_IDS} of '{name}' is {shown(ids)}. Expected integers.")
    return [one + shift for one in ids]


def default_boundaries(num_layers: int) -> list[int]:
    """Returns the authors' taps for a number of blocks, ascending; fewer than three below seven blocks."""
    return sorted({2, num_layers // 2, num_layers - 3})


def flag(name: str, config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Returns a boolean of a configuration; raises `ModelError` for other types."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{key} of '{name}' is {shown(value)}. Expected true or false.")
    return default if value is None else value


def _unstated_boundaries(name: str, num_taps: int, target: TargetInfo) -> list[int]:
    """Returns the taps of the authors' code; raises `ModelError` if the target does not fit them."""
    if target.num_layers is None:
        raise ModelError(
            f"'{name}' is an EAGLE-3 head that does not name the layers it reads: they follow from how many its target "
            "has. Pass --target DIR."
        )
    found = default_boundaries(target.num_layers)
    if len(found) != num_taps or min(found) < 0:
        raise ModelError(
            f"'{name}' reads {num_taps} taps and does not name them, and of {target.num_layers} blocks its authors' "
            f"code reads {found}. Expected {LAYER_IDS} in its config.json."
        )
    return found


def _check_boundaries(name: str, boundaries: list[int], target: TargetInfo) -> None:
    layers = target.num_layers
    wrong = [one for one in boundaries if one < 0 or (layers is not None and one > layers)]
    if wrong:
        last = "the number of its blocks" if layers is None else layers
        raise ModelError(f"'{name}' reads boundaries {boundaries} of its target. Expected them in 0..{last}.")


def _token_map(weights: Weights, rows: int | None, vocab_size: int) -> Tensor | None:
    """Returns (Vd,), the token of each row of the LM head, or None if the rows are all tokens in order."""
    name, shapes = weights.name, weights.shapes
    if OFFSETS not in shapes:
        if rows is not None and rows < vocab_size:
            raise ModelError(
                f"the LM head of '{name}' has {rows} rows for {vocab_size} tokens, and {OFFSETS} is missing, which "
                "tells them apart. Copy or convert it again."
            )
        return None
    wanted = {OFFSETS: (rows,), IS_DRAFTED: (vocab_size,)}
    wrong = [f"{key} {list(shapes[key])} instead of {list(shape)}" for key, shape in wanted.items()
             if shapes.get(key, shape) != shape]  # fmt: skip
    if wrong:
        raise ModelError(
            f"'{name}' has {', '.join(wrong)}. Expected a number for each row of its LM head and each token."
        )
    found = weights.fetch([key for key in wanted if key in shapes])
    tokens = tokens_of(name, found[OFFSETS], found.get(IS_DRAFTED), vocab_size=vocab_size)
    if rows != vocab_size:
        return tokens
    if not bool((found[OFFSETS] == 0).all()):
        raise ModelError(
            f"{OFFSETS} of '{name}' reorders the whole vocabulary, which some programs pass over. Expected zeros."
        )
    return None


def _embedding(
    weights: Weights, config: Mapping[str, Any], target: TargetInfo, *, is_narrower: bool
) -> tuple[bool, bool]:
    """Decides whether the head keeps its own embedding; drops a copy of the target's embedding."""
    said = own_entry(config, "own_embedding")
    if EMBEDDING not in weights.shapes:
        return is_narrower or said is True, False
    if is_narrower or said is True or target.weights is None:
        is_shared = said is False and not is_narrower
    else:
        repeated = is_targets(weights.fetch([EMBEDDING])[EMBEDDING], target.weights.embedding)
        is_shared = repeated and target.weights.is_embedding_plain
    return not is_shared, is_shared
