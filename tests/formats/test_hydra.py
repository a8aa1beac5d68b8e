"""Hydra and Hydra++ heads as published."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_eagles import layer
from tiny_heads import (
    LINEAR,
    LLAMA3,
    E,
    V,
    assert_same,
    hydra,
    linear,
    logits,
    random_head,
    round_trip,
    shapes_of,
    target_info,
    target_weights,
    write_files,
)

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.checkpoint import TargetInfo, TargetWeights
from foretoken.formats.registry import read_head, write_head
from foretoken.heads.decoder_layer import LayerConfig

PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=2, intermediate_size=6, rms_norm_eps=1e-5)
BASE = SimpleNamespace(
    num_attention_heads=4, num_key_value_heads=2, head_dim=2, hidden_size=E, rms_norm_eps=1e-5, vocab_size=V
)

# Two heads of two blocks; the second head reads one token more.
PLAIN = {
    "input_embed_fn.weight": (V, E),
    **linear("hydra_mlp.0.0.linear", E, 2 * E),
    **linear("hydra_mlp.0.0.res_connection", E, 2 * E),
    **linear("hydra_mlp.0.1.linear", E, E),
    **linear("hydra_mlp.1.0.linear", E, 3 * E),
    **linear("hydra_mlp.1.0.res_connection", E, 3 * E),
    **linear("hydra_mlp.1.1.linear", E, E),
    **linear("hydra_lm_head.0", V, E),
    **linear("hydra_lm_head.1", V, E),
}
# One head of four blocks behind a decoder block.
WITH_PREFIX = {
    "prefix_embeding_layer.embed_tokens.weight": (V, E),
    "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": (1,),
    **layer("prefix_embeding_layer.layers.0", E),
    "prefix_embeding_layer.layers.0.input_layernorm.weight": (E,),
    "prefix_embeding_layer.norm.weight": (E,),
    "input_embed_fn.weight": (V, E),
    **linear("hydra_mlp.0.1.linear", E, 2 * E),
    **linear("hydra_mlp.0.1.res_connection", E, 2 * E),
    **linear("hydra_mlp.0.3.linear", E, E),
    **linear("hydra_mlp.0.5.linear", E, E),
    **linear("hydra_mlp.0.7.linear", E, E),
    **linear("hydra_lm_head.0.1", V, E),
}
UNUSED = {
    "prefix_embeding_layer.embed_tokens.weight",
    "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq",
    "input_embed_fn.weight",
}
CONFIG = {
    "base_model_name_or_path": "lmsys/some-7b",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_head_arch": "mlp",
    "hydra_num_heads": 2,
    "hydra_num_layers": 2,
}
CONFIG_PREFIX = {**CONFIG, "hydra_head_arch": "prefix-mlp", "hydra_num_heads": 1, "hydra_num_layers": 4}


HYDRA_HEADS = hydra(prefix=PREFIX)


@pytest.mark.parametrize("prefix", [None, PREFIX, PREFIX.model_copy(update={"rope_scaling": LINEAR})])
@pytest.mark.parametrize(("num_layers", "tied"), [(1, False), (2, False), (4, True)])
@pytest.mark.parametrize("as_safetensors", [True, False])
def test_round_trip(
    tmp_path: Path, prefix: LayerConfig | None, num_layers: int, tied: bool, as_safetensors: bool
) -> None:
    head = random_head(hydra(num_heads=3, num_layers=num_layers, tied_blocks=tied, prefix=prefix))
    assert_same(head, round_trip("hydra", head, tmp_path, as_safetensors=as_safetensors))


@pytest.mark.parametrize("change", [{}, {"rope_theta": 500000.0}, {"rope_scaling": LLAMA3}])
def test_round_trip_of_what_the_original_code_cannot_compute(tmp_path: Path, change: dict[str, object]) -> None:
    head = random_head(hydra(num_layers=4, prefix=PREFIX.model_copy(update=change)))
    assert_same(head, round_trip("hydra", head, tmp_path, as_safetensors=True))


def test_published_names(tmp_path: Path) -> None:
    tensors = write_files(tmp_path / "head", PLAIN, CONFIG, file="hydra_lm_head.pt")
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("hydra", hydra())
    assert torch.equal(head.weights["first.1.residual.weight"], tensors["hydra_mlp.1.0.res_connection.weight"])
    assert torch.equal(head.weights["bias"][1, 0], tensors["hydra_mlp.1.1.linear.bias"])
    assert torch.equal(head.weights["lm_heads.1.bias"], tensors["hydra_lm_head.1.bias"])
    write_head("hydra", head, tmp_path / "again", target=target_info())
    assert shapes_of(tmp_path / "again" / "hydra_lm_head.pt") == PLAIN
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert CONFIG.items() <= config.items()


@pytest.mark.parametrize("spelling", ["prefix_embeding_layer", "prefix_embedding_layer"])
def test_published_names_with_prefix(tmp_path: Path, spelling: str) -> None:
    shapes = {key.replace("prefix_embeding_layer", spelling): shape for key, shape in WITH_PREFIX.items()}
    tensors = write_files(tmp_path / "head", shapes, CONFIG_PREFIX, file="hydra_lm_head.pt")
    with pytest.raises(ModelError, match=r"does not say num_attention_heads, .*rms_norm_eps .* Pass --target"):
        read_head(tmp_path / "head")
    name, head = read_head(tmp_path / "head", base_config=BASE)
    assert (name, head.config) == ("hydra", hydra(num_heads=1, num_layers=4, prefix=PREFIX))
    assert torch.equal(head.weights["weight"][0, 2], tensors["hydra_mlp.0.7.linear.weight"])
    key = f"{spelling}.layers.0.post_attention_layernorm.weight"
    assert torch.equal(head.weights["prefix.post_attention_norm"], tensors[key])
    write_head("hydra", head, tmp_path / "again", as_safetensors=True)
    found = shapes_of(tmp_path / "again" / "hydra_lm_head.safetensors")
    assert found == {key: shape for key, shape in WITH_PREFIX.items() if key not in UNUSED}
    assert_same(head, read_head(tmp_path / "again")[1])  # the sizes are in its config.json now
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert CONFIG_PREFIX.items() <= config.items()


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, {"rope_type": "dynamic", "factor": 2.0}])
def test_rotations_that_the_file_leaves_out_are_the_targets(tmp_path: Path, scaling: dict[str, object] | None) -> None:
    """The original code takes its base never and its scaling always, and knows not all of them."""
    base = SimpleNamespace(**vars(BASE), rope_parameters={"rope_type": "default", "rope_theta": 1e6, **(scaling or {})})
    write_files(tmp_path, WITH_PREFIX, CONFIG_PREFIX, file="hydra_lm_head.pt")
    if scaling in (None, LINEAR):
        prefix = PREFIX.model_copy(update={"rope_scaling": scaling})
        assert read_head(tmp_path, base_config=base)[1].config == hydra(num_heads=1, num_layers=4, prefix=prefix)
        return
    with pytest.raises(ModelError, match=r"does not say how its prefix layer rotates: .* 'prefix_rope_scaling'"):
        read_head(tmp_path, base_config=base)
    for stated in (None, LLAMA3):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG_PREFIX | {"prefix_rope_scaling": stated}))
        assert read_head(tmp_path, base_config=base)[1].config.prefix.rope_scaling == stated


def test_equal_blocks_are_tied(tmp_path: Path) -> None:
    tensors = write_files(tmp_path, WITH_PREFIX, CONFIG_PREFIX, file="hydra_lm_head.pt")
    for index in (5, 7):
        for kind in ("weight", "bias"):
            tensors[f"hydra_mlp.0.{index}.linear.{kind}"] = tensors[f"hydra_mlp.0.3.linear.{kind}"]
    torch.save(tensors, tmp_path / "hydra_lm_head.pt")
    head = read_head(tmp_path, base_config=BASE)[1]
    assert head.config == hydra(num_heads=1, num_layers=4, prefix=PREFIX, tied_blocks=True)
    assert head.weights["weight"].shape == (1, 1, E, E)


def test_embedding_is_compared_with_the_targets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = write_files(tmp_path, PLAIN, CONFIG, file="hydra_lm_head.pt")
    embedding = tensors["input_embed_fn.weight"]
    same = TargetWeights(lm_head=embedding, embedding=embedding)
    read_head(tmp_path, weights=lambda: same)
    assert not caplog.text
    read_head(tmp_path, weights=target_weights)
    assert "input_embed_fn.weight is not the target's embedding" in caplog.text


def test_counts_in_the_config_only_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, PLAIN, CONFIG | {"hydra_num_heads": 4}, file="hydra_lm_head.pt")
    assert read_head(tmp_path)[1].config.num_heads == 2
    assert "hydra_num_heads 4, the tensors say 2" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grounded_heads": False}, "are not grounded"),
        ({"hydra_head_arch": "eagle-attn"}, "'eagle-attn'. Expected 'mlp' or 'prefix-mlp'"),
        ({"hydra_head_arch": "cross-attn"}, "'cross-attn'"),
        ({"hidden_state_offset": 1}, "1 layers below the last"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_files(tmp_path, PLAIN, CONFIG | change, file="hydra_lm_head.pt")
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path)


def test_shared_lm_head_is_copied_with_its_bias(tmp_path: Path) -> None:
    head = random_head(hydra(own_lm_head=False))
    for around in (TargetInfo(), target_info(is_plain=False)):
        with pytest.raises(ConfigError, match="share the target's LM head"):
            write_head("hydra", head, tmp_path / "no", target=around)
    write_head("hydra", head, tmp_path / "plain", target=target_info())
    for ours, theirs in zip(logits(head), logits(read_head(tmp_path / "plain")[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # one LM head is float32, the test's float64
    write_head("hydra", head, tmp_path / "biased", target=target_info(lm_head_bias=torch.ones(V)))
    assert torch.equal(read_head(tmp_path / "biased")[1].weights["lm_heads.1.bias"], torch.ones(V))
