"""EAGLE-3 heads of their authors and of SpecForge; files from outside are written by hand."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_eagles import (
    IS_DRAFTED,
    LAYER,
    LAYERS,
    LLAMA,
    OFFSETS,
    TARGET,
    TOKENS,
    VD,
    eagle,
    eagle3,
    eagle3_shapes,
    restate,
    write_eagle3,
)
from tiny_heads import (
    LINEAR,
    LLAMA3,
    E,
    V,
    assert_one_error_names,
    assert_same,
    assert_same_logits,
    logits,
    numbers,
    random_head,
    round_trip,
    shapes_of,
    target_weights,
)
from torch.nn.functional import rms_norm, silu

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats import conversion
from foretoken.formats.checkpoint import TargetInfo, TargetWeights
from foretoken.formats.conversion import EAGLE_CODE
from foretoken.formats.eagle3 import LAYER_IDS
from foretoken.formats.registry import head_readers, read_head, write_head

AROUND = TargetInfo(config=TARGET)
OFFICIAL = LLAMA | {"draft_vocab_size": VD}
SPECFORGE = OFFICIAL | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "rope_theta": 10000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
}
CONFIGS = {
    "official": eagle3(),
    "whole vocabulary": eagle3(draft_vocab_size=None, num_steps=3),
    "two other taps": eagle3(boundaries=(1, 12)),
    "own embedding": eagle3(own_embedding=True),
    "narrower": eagle3(draft_hidden_size=6, own_embedding=True, layer=LAYER.model_copy(update={"head_dim": 2})),
    "norm of each tap": eagle3(fc_norms=True),
    "biased, scaled": eagle3(layer=LAYER.model_copy(update={"attention_bias": True, "rope_scaling": LLAMA3})),
}
VARIANTS = {"norm_before_residual": True, "norm_before_fc": True, "feeds_normed": True}


@pytest.mark.parametrize("as_safetensors", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path: Path, name: str, as_safetensors: bool) -> None:
    head = random_head(CONFIGS[name], dtype=torch.bfloat16)
    assert_same(head, round_trip("eagle3", head, tmp_path, as_safetensors=as_safetensors))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_published_names(tmp_path: Path, file: str, prefix: str) -> None:
    shapes = {prefix + key: shape for key, shape in eagle3_shapes().items()}
    tensors = write_eagle3(tmp_path / "head", shapes, OFFICIAL)
    if file.endswith("bin"):
        (tmp_path / "head" / "model.safetensors").unlink()
        torch.save(tensors, tmp_path / "head" / file)
    name, head = read_head(tmp_path / "head", base_config=TARGET)
    assert (name, head.config) == ("eagle3", eagle3())
    for ours, theirs in (
        ("layer.side_norm", "midlayer.input_layernorm.weight"),
        ("layer.input_norm", "midlayer.hidden_norm.weight"),
        ("layer.post_attention_norm", "midlayer.post_attention_layernorm.weight"),
        ("layer.q_proj.weight", "midlayer.self_attn.q_proj.weight"),
        ("norm", "norm.weight"),
    ):
        assert torch.equal(head.weights[ours], tensors[prefix + theirs]), ours
    assert head.weights["token_map"].tolist() == TOKENS
    write_head("eagle3", head, tmp_path / "again", target=AROUND, as_safetensors=True)
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == {key.removeprefix("model.") for key in tensors}
    assert torch.equal(written["d2t"], OFFSETS)
    assert torch.equal(written["t2d"], IS_DRAFTED)
    assert (written["d2t"].dtype, written["t2d"].dtype) == (torch.int64, torch.bool)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["eagle_config"] == SPECFORGE["eagle_config"]
    assert config["draft_vocab_size"] == VD
    assert "norm_output" not in config  # servers of EAGLE-3.1 would take it for another network
    assert_same(head, read_head(tmp_path / "again")[1])


def test_it_computes_what_the_tensors_say(tmp_path: Path) -> None:
    """The first step by hand: attention reads [norm(embedding); norm(state)], and the residual is the state."""
    tensors = {key: part.double() for key, part in write_eagle3(tmp_path, eagle3_shapes(), SPECFORGE).items()}
    tokens = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(3))
    embedded = target_weights(torch.float64).embedding[tokens.roll(-1, dims=1)][:, 0]  # position 0 sees itself alone
    state = numbers(2, 9, 3 * E, seed=4).double()[:, 0] @ tensors["fc.weight"].T

    def norm(x: torch.Tensor, key: str) -> torch.Tensor:
        return rms_norm(x, (E,), tensors[key], 1e-5)

    read = [norm(embedded, "midlayer.input_layernorm.weight"), norm(state, "midlayer.hidden_norm.weight")]
    value = torch.cat(read, dim=-1) @ tensors["midlayer.self_attn.v_proj.weight"].T
    x = state + torch.cat([value, value], dim=-1) @ tensors["midlayer.self_attn.o_proj.weight"].T
    inner = norm(x, "midlayer.post_attention_layernorm.weight")
    gate, up, down = (tensors[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    x = x + (silu(inner @ gate.T) * (inner @ up.T)) @ down.T
    found = logits(read_head(tmp_path)[1])[0][:, 0]
    torch.testing.assert_close(found[:, TOKENS], norm(x, "norm.weight") @ tensors["lm_head.weight"].T)
    assert torch.isneginf(found).sum() == 2 * (V - VD)


def test_taps_that_a_file_does_not_name_are_the_authors(tmp_path: Path) -> None:
    write_eagle3(tmp_path, eagle3_shapes(), OFFICIAL)
    with pytest.raises(ModelError, match=r"does not name the layers it reads: .* Pass --target DIR"):
        read_head(tmp_path)
    assert read_head(tmp_path, base_config=TARGET)[1].config.boundaries == (2, LAYERS // 2, LAYERS - 3)
    TARGET.num_hidden_layers = 6  # 2, 3 and 3
    try:
        with pytest.raises(ModelError, match=r"of 6 blocks its authors' code reads \[2, 3\]. Expected eagle_aux"):
            read_head(tmp_path, base_config=TARGET)
    finally:
        TARGET.num_hidden_layers = LAYERS


def test_layer_ids_of_specforge_are_one_below(tmp_path: Path) -> None:
    """SpecForge names layers by their output, others the boundary behind it; what is written is what was read."""
    write_eagle3(tmp_path / "specforge", eagle3_shapes(), SPECFORGE)
    head = read_head(tmp_path / "specforge")[1]
    assert head.config == eagle3()
    write_eagle3(tmp_path / "outside", eagle3_shapes(), OFFICIAL | {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]})
    assert_same_logits(head, read_head(tmp_path / "outside")[1])
    write_head("eagle3", head, tmp_path / "again")
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert stored["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    write_head("speculators", replace(head, target=random_head(eagle()).target), tmp_path / "speculators")
    assert json.loads((tmp_path / "speculators" / "config.json").read_text())[
        "eagle_aux_hidden_state_layer_ids"
    ] == [2, 6, 9]  # fmt: skip
    assert read_head(tmp_path / "speculators")[1].config == head.config


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([-2, 5, 8], r"reads boundaries \[-1, 6, 9\] of its target. Expected them in 0..12"),
        ([1, 5, 12], r"reads boundaries \[2, 6, 13\] of its target. Expected them in 0..12"),
        ([1, 5.5, 8], r"is \[1, 5.5, 8\]. Expected integers"),
        ("158", "is '158'. Expected integers"),
        ([True, 5, 8], r"Expected integers"),
    ],
)
def test_taps_that_are_none(tmp_path: Path, ids: Any, message: str) -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": ids}
    write_eagle3(tmp_path, eagle3_shapes(), OFFICIAL | {"eagle_config": nested})
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path, base_config=TARGET)


def test_an_embedding_is_kept_where_it_is_not_the_targets(tmp_path: Path) -> None:
    tensors = write_eagle3(tmp_path, eagle3_shapes() | {"embed_tokens.weight": (V, E)}, SPECFORGE)
    assert read_head(tmp_path)[1].config.own_embedding  # nothing to compare it with
    assert read_head(tmp_path, weights=target_weights)[1].config.own_embedding
    same = TargetWeights(lm_head=numbers(V, E), embedding=tensors["embed_tokens.weight"])
    head = read_head(tmp_path, weights=lambda: same)[1]
    assert head.config == eagle3()
    own = read_head(tmp_path)[1]
    write_head("eagle3", own, tmp_path / "again")
    assert_same(own, read_head(tmp_path / "again", weights=lambda: same)[1])  # our files say it


def test_another_width_than_the_targets(tmp_path: Path) -> None:
    config = SPECFORGE | {"target_hidden_size": 12}
    shapes = eagle3_shapes(target=12)
    write_eagle3(tmp_path, shapes, config)
    assert_one_error_names(tmp_path, "missing: embed_tokens.weight")
    write_eagle3(tmp_path, shapes | {"embed_tokens.weight": (V, E)}, config)
    head = read_head(tmp_path)[1]
    assert head.config == eagle3(hidden_size=12, draft_hidden_size=E, own_embedding=True)


def test_the_whole_vocabulary(tmp_path: Path) -> None:
    """Maps of zeros say nothing; others of that size would be passed over elsewhere."""
    shapes, config = eagle3_shapes() | {"lm_head.weight": (V, E)}, SPECFORGE | {"draft_vocab_size": V}
    zeros = torch.zeros(V, dtype=torch.int64)
    write_eagle3(tmp_path / "plain", shapes, config, d2t=None, t2d=None)
    write_eagle3(tmp_path / "zeros", shapes, config, d2t=zeros, t2d=torch.ones(V, dtype=torch.bool))
    for name in ("plain", "zeros"):
        assert read_head(tmp_path / name)[1].config == eagle3(draft_vocab_size=None)
    turned = torch.tensor([V - 1 - 2 * index for index in range(V)])
    write_eagle3(tmp_path / "turned", shapes, config, d2t=turned, t2d=torch.ones(V, dtype=torch.bool))
    with pytest.raises(ModelError, match=r"d2t of .* reorders the whole vocabulary"):
        read_head(tmp_path / "turned")
    head = random_head(eagle3(draft_vocab_size=V))
    write_head("eagle3", head, tmp_path / "sorted", as_safetensors=True)
    assert not {"d2t", "t2d"} & shapes_of(tmp_path / "sorted" / "model.safetensors").keys()
    for ours, theirs in zip(logits(head), logits(read_head(tmp_path / "sorted")[1]), strict=True):
        torch.testing.assert_close(theirs, ours)  # rows in another order are added up in another order


BIG = torch.iinfo(torch.int64).max


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": torch.tensor([1, 1, 3, 6, 9])}, "d2t of .* is 9 at 4, and the target has 13 tokens"),
        ({"d2t": torch.tensor([-1, 1, 3, 6, 8])}, "d2t of .* is -1 at 0"),
        ({"d2t": torch.tensor([1, BIG, 3, 6, 8])}, f"d2t of .* is {BIG} at 1"),
        ({"d2t": torch.tensor([1, 1, -BIG - 1, 6, 8])}, "d2t of .* at 2"),
        ({"d2t": torch.tensor(TOKENS), "t2d": None}, "d2t of .* is 12 at 4"),  # the tokens themselves
        ({"d2t": torch.tensor([1, 0, 3, 6, 8])}, "maps several drafted tokens to 1"),
        ({"d2t": torch.zeros(VD, dtype=torch.int64)}, "t2d and d2t of .* name different tokens"),
        ({"t2d": torch.ones(V, dtype=torch.bool)}, "name different tokens. Expected the same 5"),
        ({"d2t": OFFSETS.float()}, "d2t of .* holds torch.float32. Expected integers"),
        ({"d2t": OFFSETS[:4]}, r"d2t \[4\] instead of \[5\]"),
        ({"t2d": IS_DRAFTED.reshape(1, V)}, r"t2d \[1, 13\] instead of"),
        ({"d2t": None}, "has 5 rows for 13 tokens, and d2t is missing"),
        ({"d2t": None, "t2d": None}, "has 5 rows for 13 tokens, and d2t is missing"),
    ],
)
def test_hostile_maps(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    write_eagle3(tmp_path, eagle3_shapes(), SPECFORGE, **tensors)
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path)


def test_a_map_without_its_mask(tmp_path: Path) -> None:
    """Servers pass over the mask, and the map need not be sorted."""
    write_eagle3(tmp_path, eagle3_shapes(), SPECFORGE, t2d=None, d2t=torch.tensor([12, 0, 0, 0, 0]))
    assert read_head(tmp_path)[1].weights["token_map"].tolist() == [12, 1, 2, 3, 4]


def test_what_norm_output_means_depends_on_the_origin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_eagle3(tmp_path, eagle3_shapes(), SPECFORGE | {"norm_output": True})
    assert not read_head(tmp_path)[1].config.feeds_normed
    assert "norm_output is taken as SpecForge means it" in caplog.text
    restate(tmp_path, norm_output=False)
    with pytest.raises(ModelError, match="norm_output false: its LM head reads what is before the norm"):
        read_head(tmp_path)
    write_eagle3(tmp_path, eagle3_shapes(), OFFICIAL | {"norm_output": True})
    assert read_head(tmp_path, base_config=TARGET)[1].config == eagle3(feeds_normed=True)
    assert "norm_output is taken as EAGLE-3.1 means it" in caplog.text


@pytest.mark.parametrize(
    ("tensors", "config", "change"),
    [
        ({"fc_norm.0.weight": (E,), "fc_norm.1.weight": (E,), "fc_norm.2.weight": (E,)}, {}, {"fc_norms": True}),
        ({"input_norm.weight": (3 * E,)}, {"norm_before_fc": True}, {"norm_before_fc": True}),
        ({}, {"norm_before_residual": True}, {"norm_before_residual": True}),
        (
            {"midlayer.self_attn.q_proj.bias": (8,), "midlayer.self_attn.k_proj.bias": (4,),
             "midlayer.self_attn.v_proj.bias": (4,)},
            {"qkv_bias": True},
            {"layer": LAYER.model_copy(update={"attention_bias": True})},
        ),
    ],
)  # fmt: skip
def test_variants(tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], change: dict[str, Any]) -> None:
    found = write_eagle3(tmp_path, eagle3_shapes() | tensors, SPECFORGE | config)
    head = read_head(tmp_path)[1]
    assert head.config == eagle3(**change)
    if "fc_norms" in change:
        assert torch.equal(head.weights["feature_norms"][1], found["fc_norm.1.weight"])
    if "norm_before_residual" in change:
        assert torch.equal(head.weights["state_norm"], found["midlayer.hidden_norm.weight"])


def test_options_without_their_tensors(tmp_path: Path) -> None:
    write_eagle3(tmp_path, eagle3_shapes(), SPECFORGE | {"fc_norm": True})
    assert_one_error_names(tmp_path, "missing: fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight")
    write_eagle3(tmp_path, eagle3_shapes() | {"input_norm.weight": (3 * E,)}, SPECFORGE | {"norm_before_fc": False})
    assert_one_error_names(tmp_path, "unexpected: input_norm.weight")
    restate(tmp_path, norm_before_fc="yes")
    assert_one_error_names(tmp_path, "norm_before_fc of", "is 'yes'. Expected true or false")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads the target's last feature alone"),
        ({"draft_vocab_size": 7}, "draft_vocab_size of .* is 7, and its LM head has 5 rows"),
        ({"num_hidden_layers": 2}, "has 2 decoder layers"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 2048}, "sliding window of 2048 tokens"),
        ({"logit_scale": 0.5}, "logit_scale 0.5. Expected 1"),
    ],
)
def test_what_is_computed_otherwise_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_eagle3(tmp_path, eagle3_shapes(), SPECFORGE | config)
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_networks_that_its_programs_do_not_know_are_not_written(tmp_path: Path, variant: str) -> None:
    with pytest.raises(ConfigError, match=f"the head has {variant}, .* Convert to 'speculators'"):
        write_head("eagle3", random_head(eagle3(**{variant: True})), tmp_path)
    with pytest.raises(ConfigError, match="boundary 0"):
        write_head("eagle3", random_head(eagle3(boundaries=(0, 6, 9))), tmp_path)
    assert not list(tmp_path.iterdir())


def test_who_reads_it() -> None:
    def said(name: str, target: TargetInfo = AROUND) -> dict[str, bool]:
        head = random_head(CONFIGS[name], target=None)
        return {reader.program: reader.reads for reader in head_readers("eagle3", head, target=target)}

    everybody = dict.fromkeys(("foretoken", EAGLE_CODE, conversion.SPECFORGE, "SGLang", "vLLM"), True)
    assert said("official") == everybody
    assert said("official", TargetInfo())["vLLM"]  # which reads the boundaries
    assert said("two other taps") == dict.fromkeys(everybody, False) | {"foretoken": True, "vLLM": True}
    assert not said("norm of each tap")[EAGLE_CODE]
    assert not said("biased, scaled")["vLLM"]


@pytest.mark.parametrize(
    ("changes", "official", "others"),
    [
        ({"attention_bias": True}, "its attention has no biases, and it drops", "its attention has no biases, and it"),
        ({"rope_scaling": LLAMA3}, "it does not know rotary scaling 'llama3' and stops", None),
        ({"rope_scaling": LINEAR}, None, None),
        ({"rope_scaling": LINEAR, "rope_theta": 5e5}, "it scales rotations of base 10000 alone", None),
        ({"rope_theta": 5e5}, None, None),
        ({"num_attention_heads": 4}, "it cuts 8 into heads evenly", None),
    ],
)
def test_who_reads_which_attention(changes: dict[str, Any], official: str | None, others: str | None) -> None:
    """As `benchmarks/interop` found of the original code, and of SGLang's, and reading found of vLLM's."""
    head = random_head(eagle3(layer=LAYER.model_copy(update=changes)), target=None)
    found = {reader.program: reader for reader in head_readers("eagle3", head, target=AROUND)}
    for program, reason in (
        (EAGLE_CODE, official),
        *((each, others) for each in (conversion.SPECFORGE, "SGLang", "vLLM")),
    ):
        assert found[program].reads == (reason is None), program
        assert found[program].how.startswith(reason or ""), program


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({"own_embedding": True}, False),
        ({"own_embedding": True, "draft_hidden_size": 4}, True),
        ({"fc_norms": True}, True),
        ({"boundaries": (2, 5)}, True),
    ],
)
def test_what_sglang_reads(changes: dict[str, Any], reads: bool) -> None:
    """As `benchmarks/interop` found of SGLang 0.5.23."""
    head = random_head(eagle3(**changes), target=None)
    found = {reader.program: reader for reader in head_readers("eagle3", head, target=AROUND)}["SGLang"]
    assert found.reads == reads
    assert ("the head's embedding" in found.how) == (not reads)


def test_taps_that_are_fewer_in_small_targets() -> None:
    """Of five blocks the authors' three taps are one, and the layer that fuses is as wide as three there."""
    small = SimpleNamespace(**{**vars(TARGET), "num_hidden_layers": 5})
    head = random_head(eagle3(boundaries=(2,)), target=None)
    found = {reader.program: reader for reader in head_readers("eagle3", head, target=TargetInfo(config=small))}
    assert not found[EAGLE_CODE].reads
    assert found[EAGLE_CODE].how == "it fuses three taps without norms"


def test_linear_scaling_in_words_of_the_authors_code(tmp_path: Path) -> None:
    """Which takes two keys, `type` and a factor that is no integer, and stops at anything else."""
    head = random_head(eagle3(layer=LAYER.model_copy(update={"rope_scaling": {**LINEAR, "factor": 4}})))
    assert round_trip("eagle3", head, tmp_path).config == head.config
    stored = json.loads((tmp_path / "one" / "config.json").read_text())["rope_scaling"]
    assert (stored, type(stored["factor"])) == ({"type": "linear", "factor": 4.0}, float)


def test_a_base_that_the_authors_code_passes_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside linear scaling; SpecForge takes both."""
    scaled = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500000}
    for name, stated in (("official", OFFICIAL), ("specforge", SPECFORGE)):
        write_eagle3(tmp_path / name, eagle3_shapes(), stated | scaled)
        caplog.clear()
        read_head(tmp_path / name, base_config=TARGET)
        warned = "rope_theta is 500000 here; beside rope_scaling EAGLE's own code takes 10000" in caplog.text
        assert warned == (name == "official")


def test_taps_that_are_stated_twice_and_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_head("eagle3", random_head(eagle3()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert read_head(tmp_path)[1].config.boundaries == tuple(config[LAYER_IDS])  # type: ignore[union-attr]
    assert not caplog.records
    (tmp_path / "config.json").write_text(json.dumps(config | {LAYER_IDS: [2, 7, 9]}))
    nested = config["eagle_config"][LAYER_IDS]
    assert read_head(tmp_path)[1].config.boundaries == tuple(one + 1 for one in nested)  # type: ignore[union-attr]
    assert "as SGLang reads them, and [2, 7, 9] outside of it, as vLLM does" in caplog.text
