"""Reads and writes EAGLE-3 heads in the layout of their authors, SpecForge and SGLang: `fc`, `midlayer`, `lm_head`.

Files number taps in two ways. `eagle_config.eagle_aux_hidden_state_layer_ids`, from SpecForge, holds layers: the
boundary is one more than the layer. The same key outside `eagle_config` holds boundaries. The authors' files hold
neither: their code reads the boundaries 2, L // 2 and L - 3 of L blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats import conversion, eagle
from foretoken.formats.conversion import EAGLE_CODE, SGLANG, SPECFORGE, VLLM_EAGLE, Format, Place, Reader, WriteOptions
from foretoken.formats.eagle import BIASES, EMBEDDING, IS_DRAFTED, LM_HEAD, OFFSETS
from foretoken.formats.files import HeadFiles, Weights, save
from foretoken.heads.eagle3 import Eagle3Config

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3_table(config: Eagle3Config, *, layer: str) -> dict[str, Place]:
    """Returns the place of every tensor of an EAGLE-3 head, without the map of drafted tokens, by the file's key."""
    places = conversion.layer_table(layer, "layer", has_bias=config.layer.attention_bias)
    places["fc.weight"] = Place("fc.weight")
    places["norm.weight"] = Place("norm")
    places[LM_HEAD] = Place("lm_head.weight")
    places[f"{layer}.input_layernorm.weight"] = Place("layer.side_norm")
    hidden_norm = "state_norm" if config.norm_before_residual else "layer.input_norm"
    places[f"{layer}.hidden_norm.weight"] = Place(hidden_norm)
    if config.own_embedding:
        places[EMBEDDING] = Place("embedding")
    if config.norm_before_fc:
        places["input_norm.weight"] = Place("feature_norm")
    if config.fc_norms:
        places |= {f"fc_norm.{i}.weight": Place("feature_norms", (i,)) for i in range(len(config.boundaries))}
    return places


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
    """Reads the network of a file; raises as `Format.read`.

    Args:
        weights: The file's tensors under the authors' names, except the block's.
        target: Its number of blocks gives unnamed taps; its embedding tells whether the file repeats it.
        boundaries: The taps, or None if the file does not name them.
        variant: Options of `Eagle3Config` that tensors do not tell.
    """
    name, shapes, config = weights.name, weights.shapes, files.config
    width = eagle.width_of(weights, stated, "fc.weight")
    hidden = config.get("target_hidden_size") or width
    if not isinstance(hidden, int) or hidden < 1:
        raise ModelError(f"target_hidden_size of '{name}' is {shown(hidden)}. Expected a size.")
    if boundaries is None:
        boundaries = _unstated_boundaries(name, (*shapes.get("fc.weight", ()), 0, 0)[1] // hidden, target)
    _check_boundaries(name, boundaries, target)
    vocab_size = eagle.vocabulary(weights, stated, target, keys=(IS_DRAFTED, EMBEDDING))
    rows = eagle.rows_of(shapes, LM_HEAD)
    tokens = _token_map(weights, config, rows, vocab_size)
    is_own, is_shared = _embedding(weights, config, target, is_narrower=width != hidden)
    sizes = conversion.make_config(
        Eagle3Config,
        name,
        hidden_size=hidden,
        vocab_size=vocab_size,
        boundaries=tuple(boundaries),
        layer=eagle.layer_config(weights, layer, stated, width=width),
        draft_hidden_size=None if width == hidden else width,
        draft_vocab_size=None if tokens is None else rows,
        own_embedding=is_own,
        norm_before_fc=flag(name, config, "norm_before_fc", default="input_norm.weight" in shapes),
        fc_norms=flag(name, config, "fc_norm", default="fc_norm.0.weight" in shapes),
        **variant,
    )
    ignored = [key for key in (OFFSETS, IS_DRAFTED) if key in shapes]
    extra = {EMBEDDING: (vocab_size, width)} if is_shared else None
    tensors = conversion.read_tensors(weights, eagle3_table(sizes, layer=layer), sizes, ignored=ignored, extra=extra)
    if tokens is not None:
        tensors["token_map"] = tokens
    return sizes, tensors


def eagle3_tensors(checkpoint: HeadCheckpoint, *, layer: str) -> dict[str, Tensor]:
    """Returns a head's tensors under the authors' names; the block is called `layer`."""
    sizes = cast("Eagle3Config", checkpoint.config)
    tensors = conversion.scatter(checkpoint.weights, eagle3_table(sizes, layer=layer))
    if sizes.draft_vocab_size is not None:
        tensors |= eagle.map_tensors(checkpoint.weights["token_map"], sizes.vocab_size)
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


def _token_map(weights: Weights, config: Mapping[str, Any], rows: int | None, vocab_size: int) -> Tensor | None:
    """Returns (Vd,), the token of each row of the LM head, or None if the rows are all tokens in order."""
    name, shapes = weights.name, weights.shapes
    if config.get("draft_vocab_size") not in (None, rows):
        raise ModelError(
            f"draft_vocab_size of '{name}' is {shown(config['draft_vocab_size'])}, and its LM head has {rows} rows. "
            "Expected the same."
        )
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
    tokens = eagle.tokens_of(name, found[OFFSETS], found.get(IS_DRAFTED), vocab_size=vocab_size)
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
    said = conversion.own_entry(config, "own_embedding")
    if EMBEDDING not in weights.shapes:
        return is_narrower or said is True, False
    if is_narrower or said is True or target.weights is None:
        is_shared = said is False and not is_narrower
    else:
        repeated = conversion.is_targets(weights.fetch([EMBEDDING])[EMBEDDING], target.weights.embedding)
        is_shared = repeated and target.weights.is_embedding_plain
    return not is_shared, is_shared


_CLASS = "LlamaForCausalLMEagle3"
_MID_LAYER = re.compile(r"(?:model\.)?midlayer\..*")
_FIRST_LAYER = re.compile(r"(?:model\.)?layers\.0\..*")
_MARKS = re.compile(r"(?:model\.)?(d2t|layers\.0\.hidden_norm\.weight)")


def _recognises(files: HeadFiles) -> bool:
    weights = files.weights
    if "fc.weight" not in weights.shapes and "model.fc.weight" not in weights.shapes:
        return False
    is_marked = bool(weights.matches(_MARKS)) or "draft_vocab_size" in files.config
    return bool(weights.matches(_MID_LAYER)) or (is_marked and bool(weights.matches(_FIRST_LAYER)))


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, config, name = eagle.without_prefix(files), files.config, str(files.path)
    nested = config.get("eagle_config")
    of_specforge = nested if isinstance(nested, dict) else {}
    if of_specforge.get("use_aux_hidden_state", True) is not True:
        raise ModelError(f"'{name}' reads the target's last feature alone. Expected an EAGLE-3 head with several taps.")
    ids = of_specforge.get(LAYER_IDS)
    outer = boundaries_of(name, config.get(LAYER_IDS))
    stated = outer if ids is None else boundaries_of(name, ids, shift=1)
    if None not in (stated, outer) and stated != outer:
        conversion.warn(
            name,
            f"its taps are boundaries {stated} by eagle_config, as SGLang reads them, and {outer} outside of it, as "
            "vLLM does; the first are taken",
        )
    layer = "midlayer" if weights.matches(_MID_LAYER) else "layers.0"
    steps = conversion.own_entry(config, "num_steps")
    is_specforge = bool(of_specforge) or config.get("architectures") == [_CLASS]
    sizes, tensors = read_eagle3(
        files, weights, config, target, layer=layer, boundaries=stated,
        norm_before_residual=flag(name, config, "norm_before_residual"),
        feeds_normed=_feeds_normed(name, config, is_specforge=is_specforge),
        **({} if steps is None else {"num_steps": steps}),
    )  # fmt: skip
    if not is_specforge and steps is None:
        eagle.warn_of_base(name, sizes.layer)
    return conversion.finished(files, sizes, tensors, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    checkpoint = with_plain_vocabulary(checkpoint)
    sizes = cast("Eagle3Config", checkpoint.config)
    _refuse_variants(sizes)
    tensors = eagle3_tensors(checkpoint, layer="midlayer")
    config = {
        "architectures": [_CLASS],
        **eagle.stated_layer(sizes.layer, width=sizes.width, vocab_size=sizes.vocab_size, target=options.target),
        "draft_vocab_size": sizes.draft_vocab_size or sizes.vocab_size,
        **({} if sizes.width == sizes.hidden_size else {"target_hidden_size": sizes.hidden_size}),
        "qkv_bias": sizes.layer.attention_bias,
        "fc_norm": sizes.fc_norms,
        LAYER_IDS: list(sizes.boundaries),  # which vLLM reads; SGLang reads the layers
        "eagle_config": {LAYER_IDS: [boundary - 1 for boundary in sizes.boundaries], "use_aux_hidden_state": True},
        "torch_dtype": conversion.dtype_name(tensors["fc.weight"].dtype),
        **conversion.target_name(checkpoint),
        **conversion.own_entries(checkpoint, num_steps=sizes.num_steps, own_embedding=sizes.own_embedding),
    }
    save(directory, eagle.weights_file(options), tensors, config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    sizes = cast("Eagle3Config", checkpoint.config)
    layer, layers = sizes.layer, options.target.num_layers or (checkpoint.target and checkpoint.target.num_layers)
    own = None if not layers else default_boundaries(layers)
    taps = "" if own is not None else ", of a target whose 2, L // 2 and L - 3 are its taps"
    how = f"EaModel.from_pretrained with ea_model_path of this directory{taps}"
    official = Reader.unless(_misread(sizes, own), EAGLE_CODE, how)
    biases = BIASES if layer.attention_bias else None
    reason = biases or (None if len(sizes.boundaries) == 3 else "it fuses three taps")
    specforge = Reader.unless(reason, SPECFORGE, "LlamaForCausalLMEagle3.from_pretrained, to train it on")
    reason = biases
    if sizes.own_embedding and sizes.width == sizes.hidden_size:
        reason = "it replaces the head's embedding by the target's"
    elif sizes.boundaries[0] != 2:
        reason = "it takes layer ids that do not begin with 1 for boundaries; convert to 'speculators'"
    how = "--speculative-algorithm EAGLE3 with --speculative-draft-model-path of this directory"
    sglang = Reader.unless(reason, SGLANG, how)
    reason = biases and f"{BIASES}: config.json denies them, for with them it would expect one behind o_proj"
    vllm = Reader.unless(reason, VLLM_EAGLE, "speculative_config with method 'eagle3' named; a chain")
    return [official, specforge, sglang, vllm]


def _misread(sizes: Eagle3Config, own: list[int] | None) -> str | None:
    """Returns why the authors' code computes a head wrongly, or None; own: that code's taps for the target."""
    if sizes.fc_norms or len(sizes.boundaries) != 3:
        return "it fuses three taps without norms"
    if own is not None and tuple(own) != sizes.boundaries:
        return f"it reads boundaries {own} of this target, whatever the file says"
    return BIASES if sizes.layer.attention_bias else eagle.misread_block(sizes.layer, width=sizes.width)


def _feeds_normed(name: str, config: Mapping[str, Any], *, is_specforge: bool) -> bool:
    """Decides what `norm_output` means, which depends on the program that wrote the file."""
    says = config.get("norm_output")
    is_on = flag(name, config, "norm_output", default=is_specforge)
    if is_specforge:
        if not is_on:
            raise ModelError(
                f"'{name}' has norm_output false: its LM head reads what is before the norm. Expected true."
            )
        if says is not None and conversion.own_entry(config, "num_steps") is None:
            conversion.warn(
                name,
                "norm_output is taken as SpecForge means it, for the LM head alone; in EAGLE-3.1 the next step would "
                "read the normed output as well",
            )
        return False
    if is_on:
        conversion.warn(name, "norm_output is taken as EAGLE-3.1 means it: the next step reads the normed output")
    return is_on


def _refuse_variants(sizes: Eagle3Config) -> None:
    words = {
        "norm_before_residual": sizes.norm_before_residual,
        "norm_before_fc": sizes.norm_before_fc,
        "feeds_normed": sizes.feeds_normed,
    }
    found = [word for word, is_on in words.items() if is_on]
    if found:
        raise ConfigError(
            f"the head has {', '.join(found)}, and programs that read format 'eagle3' compute it without. Convert to "
            "'speculators' or 'native'."
        )
    if 0 in sizes.boundaries:
        raise ConfigError(
            "the head reads the target's embeddings, boundary 0, and format 'eagle3' names the layer whose output is "
            "read. Convert to 'speculators' or 'native'."
        )


FORMATS = (Format("eagle3", _recognises, _read_head, ("eagle3",), _write_head, _readers),)
