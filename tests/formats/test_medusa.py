"""Medusa heads as published, in all layouts, and as vLLM reads them: names written by hand, and exact round trips."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_heads import (
    E,
    V,
    assert_same,
    assert_same_logits,
    linear,
    medusa,
    numbers,
    random_head,
    round_trip,
    shapes_of,
    target_info,
    target_weights,
    write_files,
)

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.checkpoint import TargetInfo
from foretoken.formats.registry import read_head, write_head

OFFICIAL = {
    **linear("0.0.linear", E, E),
    **linear("0.1.linear", E, E),
    "0.2.weight": (V, E),
    **linear("1.0.linear", E, E),
    **linear("1.1.linear", E, E),
    "1.2.weight": (V, E),
}
COUNTS = {"base_model_name_or_path": "lmsys/some-7b", "medusa_num_heads": 2, "medusa_num_layers": 2}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("num_layers", "tied", "as_safetensors"),
    [
        (0, False, True), (0, False, False), (1, False, True), (1, False, False), (3, True, True), (3, True, False),
        (3, False, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(
    tmp_path: Path, num_layers: int, tied: bool, has_bias: bool, as_safetensors: bool, dtype: torch.dtype
) -> None:
    head = random_head(medusa(num_layers=num_layers, tied_blocks=tied, has_bias=has_bias), dtype=dtype)
    assert_same(head, round_trip("medusa", head, tmp_path, as_safetensors=as_safetensors))


@pytest.mark.parametrize(("num_layers", "tied"), [(1, False), (2, True)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_round_trip_without_lm_heads(tmp_path: Path, num_layers: int, tied: bool, has_bias: bool) -> None:
    head = random_head(medusa(num_layers=num_layers, tied_blocks=tied, has_bias=has_bias, own_lm_head=False))
    assert_same(head, round_trip("medusa_v2", head, tmp_path))


def test_what_has_no_place_in_a_foreign_config_survives(tmp_path: Path) -> None:
    more = {"acceptance": [[0.5, 0.2], [0.25, 0.1], [0.1, 0.0]], "choices": [[0], [0, 0], [1]], "notes": {"steps": 7}}
    back = round_trip("medusa", random_head(medusa(num_heads=3), **more), tmp_path)
    assert (back.acceptance, back.choices, back.notes) == tuple(more.values())


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_published_names(tmp_path: Path, file: str) -> None:
    tensors = write_files(tmp_path / "head", OFFICIAL, COUNTS, file=file)
    name, head = read_head(tmp_path / "head")
    assert name == "medusa"
    assert head.config == medusa(num_layers=2)
    assert head.target is not None
    assert head.target.name == "lmsys/some-7b"
    assert torch.equal(head.weights["weight"][1, 0], tensors["1.0.linear.weight"])
    assert torch.equal(head.weights["bias"][0, 1], tensors["0.1.linear.bias"])
    assert torch.equal(head.weights["lm_head"][1], tensors["1.2.weight"])
    write_head("medusa", head, tmp_path / "again", as_safetensors=True)
    assert shapes_of(tmp_path / "again" / "medusa_lm_head.safetensors") == OFFICIAL
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert COUNTS.items() <= config.items()


def test_v2_names(tmp_path: Path) -> None:
    blocks = linear("0.0.linear", E, E) | linear("1.0.linear", E, E)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
    write_files(tmp_path / "head", blocks, config, file="medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=r"does not tell its vocabulary, as its heads share .* --target"):
        read_head(tmp_path / "head")
    head = read_head(tmp_path / "head", base_config=type("Config", (), {"vocab_size": V}))[1]
    assert head.config == medusa(own_lm_head=False)
    write_head("medusa_v2", head, tmp_path / "again", as_safetensors=True)
    assert shapes_of(tmp_path / "again" / "medusa_lm_head.safetensors") == blocks
    assert json.loads((tmp_path / "again" / "config.json").read_text())["version"] == "2"
    assert read_head(tmp_path / "again")[1].config == head.config


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_heads_inside_a_whole_model(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    model = {
        "model.embed_tokens.weight": (V, E),
        "model.layers.0.self_attn.q_proj.weight": (E, E),
        "lm_head.weight": (V, E),
    }
    counts = COUNTS if prefix == "medusa_head." else {"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 1}}
    tensors = write_files(tmp_path, model | {prefix + key: shape for key, shape in OFFICIAL.items()}, counts)
    name, head = read_head(tmp_path)
    assert (name, head.config) == ("medusa", medusa(num_layers=2))
    assert torch.equal(head.weights["lm_head"][0], tensors[prefix + "0.2.weight"])
    assert ("num_medusa_layers 1, the tensors say 2" in caplog.text) == (prefix == "medusa_heads.")


def test_gorgon_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {}
    for head in ("0._orig_mod.", "1._orig_mod."):
        shapes |= {head + "norm.weight": (E,), head + "blocks.0.linear.weight": (E, E), head + "lm_head.weight": (V, E)}
    tensors = write_files(tmp_path, shapes)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"step": 3, "loss": 1.0, "heads_state_dict": tensors, "config": {}}, tmp_path / "medusa_heads_latest.pt")
    norm = tensors["0._orig_mod.norm.weight"]
    name, head = read_head(tmp_path, weights=lambda: target_weights(norm=norm))
    assert (name, head.config) == ("gorgon", medusa(has_bias=False))
    assert torch.equal(head.weights["weight"][1, 0], tensors["1._orig_mod.blocks.0.linear.weight"])
    assert "1.norm.weight is not the target's last norm" in caplog.text
    assert " 0.norm.weight" not in caplog.text
    assert_same_logits(head, round_trip("medusa", head, tmp_path / "out"))
    with pytest.raises(ConfigError, match="cannot be written in format 'gorgon'"):
        write_head("gorgon", head, tmp_path / "no")


def test_config_that_says_two_where_there_are_five_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {}
    for head in range(5):
        shapes |= linear(f"{head}.0.linear", E, E) | {f"{head}.1.weight": (V, E)}
    write_files(tmp_path, shapes, {"medusa_num_heads": 2, "medusa_num_layers": 1}, file="medusa_lm_head.pt")
    with caplog.at_level(logging.WARNING):
        assert read_head(tmp_path)[1].config.num_heads == 5
    assert "medusa_num_heads 2, the tensors say 5" in caplog.text
    assert "medusa_num_layers" not in caplog.text


def test_equal_blocks_are_tied_and_said_so(tmp_path: Path) -> None:
    """One head whose blocks differ keeps all apart."""
    tensors = write_files(tmp_path / "a", OFFICIAL)
    for head in (0, 1):
        for kind in ("weight", "bias"):
            tensors[f"{head}.1.linear.{kind}"] = tensors[f"{head}.0.linear.{kind}"]  # shared memory, as upstream saves
    torch.save(tensors, tmp_path / "a" / "medusa_lm_head.pt")
    (tmp_path / "a" / "model.safetensors").unlink()
    assert read_head(tmp_path / "a")[1].config == medusa(num_layers=2, tied_blocks=True)
    tensors["1.1.linear.bias"] = tensors["1.1.linear.bias"] + 1
    torch.save(tensors, tmp_path / "a" / "medusa_lm_head.pt")
    assert read_head(tmp_path / "a")[1].config == medusa(num_layers=2)


def test_untied_blocks_that_happen_to_be_equal_stay_apart_in_our_files(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2))
    for kind in ("weight", "bias"):
        head.weights[kind].zero_()
    assert_same(head, round_trip("medusa", head, tmp_path))


def test_numbers_of_absurd_size_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, OFFICIAL | {"9999.0.linear.weight": (E, E)})
    with pytest.raises(ModelError, match="numbers 10000 heads"):
        read_head(tmp_path)


def test_shared_lm_head_is_copied_only_from_the_target(tmp_path: Path) -> None:
    head = random_head(medusa(own_lm_head=False))
    for around in (None, TargetInfo(), target_info(is_plain=False), target_info(lm_head_bias=torch.ones(V))):
        with pytest.raises(ConfigError, match="share the target's LM head"):
            write_head("medusa", head, tmp_path / "no", target=around)
    assert not (tmp_path / "no").exists()
    write_head("medusa", head, tmp_path / "yes", target=target_info())
    back = read_head(tmp_path / "yes")[1]
    assert back.config == medusa()
    assert torch.equal(back.weights["lm_head"][1], target_weights().lm_head)


@pytest.mark.parametrize("name", ["hydra", "mlp_speculator"])
def test_heads_of_other_methods_do_not_fit(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot hold a head of method 'medusa'"):
        write_head(name, random_head(medusa()), tmp_path)


def test_what_a_format_has_no_room_for(tmp_path: Path) -> None:
    partial = random_head(medusa(draft_vocab_size=5))
    for name in ("medusa", "tensorrt_llm"):
        with pytest.raises(ConfigError, match="LM heads over part of the vocabulary"):
            write_head(name, partial, tmp_path)
    with pytest.raises(ConfigError, match="holds blocks and no LM heads"):
        write_head("medusa_v2", random_head(medusa()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_target_is_an_error(tmp_path: Path) -> None:
    head = random_head(medusa())
    write_head("medusa", head, tmp_path)
    assert head.target is not None
    other = head.target.model_copy(update={"vocab_size": V + 1})
    with pytest.raises(ConfigError, match=f"vocab_size {V} instead of {V + 1}"):
        read_head(tmp_path, target=other)


BLOCKS = {f"blocks.{head}.layers.0.weight": (E, E) for head in (0, 1)}
BIASES = {f"blocks.{head}.layers.0.bias": (E,) for head in (0, 1)}
LM_HEADS = {f"lm_heads.{head}.weight": (V, E) for head in (0, 1)}
VLLM_CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": E,
    "vocab_size": V,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "max_paths": 64,
    "topk": 10,
    "truncated_vocab_size": None,
}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_layers", "tied"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("drafted", [None, 5])
def test_round_trip_of_vllms(tmp_path: Path, num_layers: int, tied: bool, has_bias: bool, drafted: int | None) -> None:
    config = medusa(num_layers=num_layers, tied_blocks=tied, has_bias=has_bias, draft_vocab_size=drafted)
    head = random_head(config)
    assert_same(head, round_trip("vllm_medusa", head, tmp_path))
    stored = json.loads((tmp_path / "one" / "config.json").read_text())
    assert (stored["medusa_fc_bias"], stored["truncated_vocab_size"]) == (has_bias, drafted)


def test_round_trip_of_vllms_without_blocks(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=0))
    assert_same(head, round_trip("vllm_medusa", head, tmp_path))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("has_bias", [True, False])
def test_names_of_vllm(tmp_path: Path, prefix: str, has_bias: bool) -> None:
    shapes = BLOCKS | (BIASES if has_bias else {}) | LM_HEADS
    named = {prefix + key: shape for key, shape in shapes.items()}
    tensors = write_files(tmp_path / "head", named, VLLM_CONFIG | {"medusa_fc_bias": has_bias})
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("vllm_medusa", medusa(has_bias=has_bias))
    assert torch.equal(head.weights["weight"][1, 0], tensors[prefix + "blocks.1.layers.0.weight"])
    assert torch.equal(head.weights["lm_head"][1], tensors[prefix + "lm_heads.1.weight"])
    write_head("vllm_medusa", head, tmp_path / "again")
    assert shapes_of(tmp_path / "again" / "model.safetensors") == shapes
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    expected = {**VLLM_CONFIG, "medusa_fc_bias": has_bias, "original_lm_head": False, "torch_dtype": "float32"}
    assert {key: stored[key] for key in expected} == expected


def test_biases_that_vllm_would_drop_are_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, BLOCKS | BIASES | LM_HEADS, VLLM_CONFIG | {"num_heads": 5})
    assert read_head(tmp_path)[1].config == medusa()
    assert "has biases, which vLLM drops" in caplog.text
    assert "num_heads 5, the tensors say 2" in caplog.text


def test_biases_that_the_config_promises_must_be_there(tmp_path: Path) -> None:
    write_files(tmp_path, BLOCKS | LM_HEADS, VLLM_CONFIG | {"medusa_fc_bias": True})
    with pytest.raises(ModelError, match=r"missing: blocks.0.layers.0.bias, blocks.1.layers.0.bias"):
        read_head(tmp_path)


@pytest.mark.parametrize("key", ["lm_head.weight", "lm_heads.0.weight"])
def test_an_lm_head_for_all_of_vllms(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """The target's is shared; another one becomes each head's own; an unknown one is taken for the target's."""
    tensors = write_files(tmp_path, BLOCKS | {key: (V, E)}, VLLM_CONFIG | {"original_lm_head": True})
    shared = medusa(own_lm_head=False, has_bias=False)
    assert read_head(tmp_path)[1].config == shared
    assert "taken to be the target's" in caplog.text
    other = read_head(tmp_path, weights=target_weights)[1]
    assert other.config == medusa(has_bias=False)
    assert all(torch.equal(part, tensors[key]) for part in other.weights["lm_head"])
    head = random_head(shared)
    assert_same(head, round_trip("vllm_medusa", head, tmp_path / "out", target=target_info()))
    assert shapes_of(tmp_path / "out" / "one" / "model.safetensors") == BLOCKS | {"lm_head.weight": (V, E)}
    with pytest.raises(ConfigError, match="share the target's LM head"):
        write_head("vllm_medusa", head, tmp_path / "no")


def test_lm_heads_over_the_whole_vocabulary_are_cut_by_the_map(tmp_path: Path) -> None:
    kept = torch.tensor([4, 12, 0])
    tensors = write_files(tmp_path, BLOCKS | LM_HEADS, VLLM_CONFIG | {"truncated_vocab_size": 3})
    save_file(tensors | {"token_map": kept.int()}, tmp_path / "model.safetensors")
    head = read_head(tmp_path)[1]
    assert head.config == medusa(has_bias=False, draft_vocab_size=3)
    assert torch.equal(head.weights["token_map"], kept)
    assert torch.equal(head.weights["lm_head"][1], tensors["lm_heads.1.weight"][kept])
    for bad in ([4, 4, 0], [4, V, 0], [-1, 2, 3]):
        save_file(tensors | {"token_map": torch.tensor(bad)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=r"token_map of .* is no map. Expected different tokens in 0\.\.12"):
            read_head(tmp_path)
    save_file(
        tensors | {"lm_heads.0.weight": numbers(5, E), "lm_heads.1.weight": numbers(5, E), "token_map": kept},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"have 5 rows. Expected 3, as its token_map, or 13"):
        read_head(tmp_path)


def test_scaled_logits_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, BLOCKS | LM_HEADS, VLLM_CONFIG | {"logit_scale": 0.5})
    with pytest.raises(ModelError, match=r"scales its logits by 0.5"):
        read_head(tmp_path)


def test_published_names_become_vllm_names(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2, tied_blocks=True))
    write_head("medusa", head, tmp_path / "medusa")
    write_head("vllm_medusa", read_head(tmp_path / "medusa")[1], tmp_path / "vllm")
    assert_same_logits(head, read_head(tmp_path / "vllm")[1])
