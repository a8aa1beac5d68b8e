"""Medusa heads as published, in all layouts: names written by hand here, and exact round trips."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from tiny_heads import (
    E,
    V,
    assert_one_error_names,
    assert_same,
    assert_same_logits,
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
from foretoken.heads.medusa import MedusaConfig

OFFICIAL = {
    "0.0.linear.weight": (E, E),
    "0.0.linear.bias": (E,),
    "0.1.linear.weight": (E, E),
    "0.1.linear.bias": (E,),
    "0.2.weight": (V, E),
    "1.0.linear.weight": (E, E),
    "1.0.linear.bias": (E,),
    "1.1.linear.weight": (E, E),
    "1.1.linear.bias": (E,),
    "1.2.weight": (V, E),
}
COUNTS = {"base_model_name_or_path": "lmsys/some-7b", "medusa_num_heads": 2, "medusa_num_layers": 2}


def medusa(**changes: object) -> MedusaConfig:
    return MedusaConfig(**{"hidden_size": E, "vocab_size": V, "num_heads": 3, "own_lm_head": True, **changes})


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
    back = round_trip("medusa", random_head(medusa(), **more), tmp_path)
    assert (back.acceptance, back.choices, back.notes) == tuple(more.values())


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_published_names(tmp_path: Path, file: str) -> None:
    tensors = write_files(tmp_path / "head", OFFICIAL, COUNTS, file=file)
    name, head = read_head(tmp_path / "head")
    assert name == "medusa"
    assert head.config == medusa(num_heads=2, num_layers=2)
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
    blocks = {
        "0.0.linear.weight": (E, E),
        "0.0.linear.bias": (E,),
        "1.0.linear.weight": (E, E),
        "1.0.linear.bias": (E,),
    }
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
    write_files(tmp_path / "head", blocks, config, file="medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=r"does not tell its vocabulary, as its heads share .* --target"):
        read_head(tmp_path / "head")
    head = read_head(tmp_path / "head", base_config=type("Config", (), {"vocab_size": V}))[1]
    assert head.config == medusa(num_heads=2, own_lm_head=False)
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
    assert (name, head.config) == ("medusa", medusa(num_heads=2, num_layers=2))
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
    assert (name, head.config) == ("gorgon", medusa(num_heads=2, has_bias=False))
    assert torch.equal(head.weights["weight"][1, 0], tensors["1._orig_mod.blocks.0.linear.weight"])
    assert "1.norm.weight is not the target's last norm" in caplog.text
    assert " 0.norm.weight" not in caplog.text
    assert_same_logits(head, round_trip("medusa", head, tmp_path / "out"))
    with pytest.raises(ConfigError, match="cannot be written in format 'gorgon'"):
        write_head("gorgon", head, tmp_path / "no")


def test_config_that_says_two_where_there_are_five_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {}
    for head in range(5):
        shapes |= {f"{head}.0.linear.weight": (E, E), f"{head}.0.linear.bias": (E,), f"{head}.1.weight": (V, E)}
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
    assert read_head(tmp_path / "a")[1].config == medusa(num_heads=2, num_layers=2, tied_blocks=True)
    tensors["1.1.linear.bias"] = tensors["1.1.linear.bias"] + 1
    torch.save(tensors, tmp_path / "a" / "medusa_lm_head.pt")
    assert read_head(tmp_path / "a")[1].config == medusa(num_heads=2, num_layers=2)


def test_untied_blocks_that_happen_to_be_equal_stay_apart_in_our_files(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2))
    for kind in ("weight", "bias"):
        head.weights[kind].zero_()
    assert_same(head, round_trip("medusa", head, tmp_path))


def test_one_error_names_everything(tmp_path: Path) -> None:
    shapes = OFFICIAL | {"2.0.linear.weights": (E, E), "0.1.linear.weight": (E, E + 1)}
    del shapes["1.0.linear.bias"]
    write_files(tmp_path, shapes, COUNTS)
    assert_one_error_names(
        tmp_path,
        "missing: 1.0.linear.bias;",
        "unexpected: 2.0.linear.weights;",
        "0.1.linear.weight [8, 9] instead of",
    )


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
    assert torch.equal(back.weights["lm_head"][2], target_weights().lm_head)


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
