"""MLP speculators as IBM publishes them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_heads import E, V, assert_same, random_head, round_trip, shapes_of, write_files

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.registry import read_head, write_head
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

D = 6
NAMES = {
    "speculator.emb.0.weight": (V, D),
    "speculator.emb.1.weight": (V, D),
    "speculator.emb.2.weight": (V, D),
    "speculator.proj.0.weight": (D, E),
    "speculator.proj.1.weight": (D, D),
    "speculator.proj.2.weight": (D, D),
    "speculator.head.0.weight": (V, D),
    "speculator.head.1.weight": (V, D),
    "speculator.head.2.weight": (V, D),
    "speculator.ln.0.weight": (D,),
    "speculator.ln.0.bias": (D,),
    "speculator.ln.1.weight": (D,),
    "speculator.ln.1.bias": (D,),
    "speculator.ln.2.weight": (D,),
    "speculator.ln.2.bias": (D,),
}
REDUCED = (  # what TGI reads of a tied one
    "speculator.emb.0.weight",
    "speculator.proj.0.weight",
    "speculator.proj.1.weight",
    "speculator.head.0.weight",
    "speculator.ln.0.weight",
    "speculator.ln.0.bias",
)
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "vocab_size": V,
    "emb_dim": E,
    "inner_dim": D,
    "n_predict": 3,
    "top_k_tokens_per_head": [5, 3, 2],
    "n_candidates": 5,
    "tie_weights": False,
    "scale_input": False,
}


def speculator(**changes: object) -> MlpSpeculatorConfig:
    sizes = {"hidden_size": E, "vocab_size": V, "inner_dim": D, "tie_weights": False, "scale_input": False}
    return MlpSpeculatorConfig(**{**sizes, "top_k": (5, 3, 2), **changes})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("stages", "top_k"), [(1, (4,)), (3, None), (5, (4, 3, 2, 2, 2))])
def test_round_trip(tmp_path: Path, tied: bool, scaled: bool, stages: int, top_k: tuple[int, ...] | None) -> None:
    head = random_head(
        speculator(num_heads=stages, tie_weights=tied, scale_input=scaled, top_k=top_k, num_candidates=4)
    )
    assert_same(head, round_trip("mlp_speculator", head, tmp_path))
    stored = json.loads((tmp_path / "one" / "config.json").read_text())
    assert len(stored["top_k_tokens_per_head"]) == stages


@pytest.mark.parametrize("prefix", ["speculator.", ""])
def test_names(tmp_path: Path, prefix: str) -> None:
    shapes = {key.replace("speculator.", prefix): shape for key, shape in NAMES.items()}
    tensors = write_files(tmp_path / "head", shapes, CONFIG)
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("mlp_speculator", speculator())
    assert torch.equal(head.weights["projections.2.weight"], tensors[prefix + "proj.2.weight"])
    assert torch.equal(head.weights["norms.1.bias"], tensors[prefix + "ln.1.bias"])
    write_head("mlp_speculator", head, tmp_path / "again")
    assert shapes_of(tmp_path / "again" / "model.safetensors") == NAMES
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert CONFIG.items() <= stored.items()


def test_early_configs(tmp_path: Path) -> None:
    """`hidden_size` for `emb_dim`, no `tie_weights`, no `scale_input`."""
    config = {key: value for key, value in CONFIG.items() if key not in ("emb_dim", "tie_weights", "scale_input")}
    write_files(tmp_path, NAMES, config | {"hidden_size": E})
    assert read_head(tmp_path)[1].config == speculator()


def test_tied_files_hold_any_of_the_repeated(tmp_path: Path) -> None:
    config = CONFIG | {"tie_weights": True, "scale_input": True}
    tensors = write_files(tmp_path / "a", {key: NAMES[key] for key in REDUCED}, config)
    head = read_head(tmp_path / "a")[1]
    assert head.config == speculator(tie_weights=True, scale_input=True)
    write_head("mlp_speculator", head, tmp_path / "full")
    assert shapes_of(tmp_path / "full" / "model.safetensors") == NAMES
    assert_same(head, read_head(tmp_path / "full")[1])

    moved = {key.replace("emb.0", "emb.2").replace("proj.1", "proj.2"): part for key, part in tensors.items()}
    save_file(moved, tmp_path / "a" / "model.safetensors")
    assert_same(head, read_head(tmp_path / "a")[1])

    save_file(
        tensors | {"speculator.emb.1.weight": tensors["speculator.emb.0.weight"] + 1},
        tmp_path / "a" / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"'speculator.emb.0.weight' and 'speculator.emb.1.weight' of .* differ"):
        read_head(tmp_path / "a")

    del tensors["speculator.head.0.weight"]
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: speculator.head.0.weight, speculator.head.1.weight"):
        read_head(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_predict": None}, "does not give n_predict"),
        ({"n_predict": 100000, "top_k_tokens_per_head": None}, "num_heads 100000. Expected at most 64"),
        ({"top_k_tokens_per_head": [5, 3]}, "top_k has 2 entries"),
        ({"vocab_size": "many"}, "does not fit its tensors"),
    ],
)
def test_bad_configs(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_files(tmp_path, NAMES, CONFIG | change)
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path)


def test_another_epsilon_has_no_place_in_the_file(tmp_path: Path) -> None:
    """Readers of the format know one epsilon, and would compute something else without a word."""
    config = MlpSpeculatorConfig(hidden_size=E, vocab_size=V, inner_dim=D, rms_norm_eps=1e-5)
    with pytest.raises(ConfigError, match=r"rms_norm_eps 1e-05, and readers of format 'mlp_speculator' take 1e-06"):
        write_head("mlp_speculator", random_head(config), tmp_path)
