"""Missing, unexpected and mis-shaped tensors: one error names all of them, in every format.

Tensors that other code would drop without a word, or leave at random, are no exception.
"""

from pathlib import Path
from typing import Any

import pytest
from test_eagle import FALCON, STATED
from test_eagle3 import SPECFORGE
from test_hydra import BASE, CONFIG_PREFIX, WITH_PREFIX
from test_medusa import BLOCKS, COUNTS, LM_HEADS, OFFICIAL, VLLM_CONFIG
from test_mlp_speculator import CONFIG as MLP_CONFIG
from test_mlp_speculator import NAMES
from test_speculators import CONFIG, SHAPES
from tiny_eagles import EAGLE, LLAMA, eagle3_shapes, write_eagle3
from tiny_heads import assert_one_error_names, write_files

# Shapes and configuration of a whole file; a tensor that is taken away, tensors that are added, one of another shape.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[str], str]] = {
    "medusa": (OFFICIAL, COUNTS, "1.0.linear.bias", ["2.0.linear.weights"], "0.1.linear.weight"),
    "vllm_medusa": (
        BLOCKS | LM_HEADS, VLLM_CONFIG, "blocks.1.layers.0.weight", ["blocks.0.layers.0.scale"], "lm_heads.1.weight"
    ),
    "hydra": (
        WITH_PREFIX, CONFIG_PREFIX, "prefix_embeding_layer.norm.weight", ["hydra_mlp.0.2.linear.weight"],
        "hydra_mlp.0.5.linear.weight",
    ),
    "mlp_speculator": (
        NAMES, MLP_CONFIG, "speculator.ln.2.bias", ["speculator.emb.3.weight"], "speculator.proj.1.weight"
    ),
    "eagle": (
        EAGLE, LLAMA, "layers.0.mlp.up_proj.weight", ["layers.0.input_layernorm.weight", "norm.weight"], "fc.weight"
    ),
    "falcon": (FALCON, STATED, "lstm.weight_hh_l0", ["layers.0.input_layernorm.weight"], "lstm.bias_hh_l1"),
    "eagle3": (
        eagle3_shapes(), SPECFORGE, "midlayer.mlp.up_proj.weight", ["fc.bias", "verifier_norm.weight"], "fc.weight"
    ),
    "speculators": (
        SHAPES, CONFIG | {"fc_norm": False}, "norm.weight", ["fc_norm.0.weight", "mask_hidden"],
        "layers.0.mlp.up_proj.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_one_error_names_everything(tmp_path: Path, name: str) -> None:
    shapes, config, missing, unexpected, wrong = FILES[name]
    shape = shapes[wrong]
    bad = (*shape[:-1], shape[-1] + 1)
    changed = shapes | {wrong: bad} | {key: shapes.get(key.removesuffix("s"), (8,)) for key in unexpected}
    del changed[missing]
    (write_eagle3 if "lm_head.weight" in shapes else write_files)(tmp_path, changed, config)
    assert_one_error_names(
        tmp_path, f"missing: {missing};", f"unexpected: {', '.join(unexpected)};",
        f"wrong shape: {wrong} {list(bad)} instead of {list(shape)}", base_config=BASE if name == "hydra" else None,
    )  # fmt: skip
