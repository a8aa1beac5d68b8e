"""Nonsense in a configuration or in a tensor's shape: a head, or one of our errors; never another exception."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from pairwise import slow_products
from safetensors.torch import load_file, save_file
from test_hydra import HYDRA_HEADS
from tiny_eagles import eagle, eagle3
from tiny_heads import E, V, medusa, random_head

from foretoken.core.errors import ForetokenError
from foretoken.formats.registry import known_formats, read_head, write_head
from foretoken.heads.base import HeadConfig
from foretoken.heads.falcon import FalconConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

MEDUSA = medusa()
HEADS = {
    "native": MEDUSA,
    "medusa": MEDUSA,
    "medusa_v2": MEDUSA.model_copy(update={"own_lm_head": False}),
    "vllm_medusa": MEDUSA.model_copy(update={"draft_vocab_size": 5}),
    "hydra": HYDRA_HEADS,
    "tensorrt_llm": HYDRA_HEADS,
    "mlp_speculator": MlpSpeculatorConfig(hidden_size=E, vocab_size=V, inner_dim=6),
    "eagle": eagle(),
    "falcon": FalconConfig(hidden_size=E, vocab_size=V, layer=eagle().layer),
    "eagle3": eagle3(fc_norms=True, own_embedding=True),
    "speculators": eagle3(norm_before_fc=True, own_embedding=True),
}
NONSENSE = (None, "x", "7", "base", "prefix_layer", -1, 0, 1.5, 10**12, True, [], [[1]], {}, {"a": []})
SHARES = 5  # of all nonsense: a number without a factor of how much there is


def test_every_format_that_is_written_is_tested() -> None:
    assert set(HEADS) == set(known_formats(writable=True))


def written(name: str, config: HeadConfig, directory: Path) -> None:
    write_head(name, random_head(config), directory, as_safetensors=True)
    read_head(directory)


@pytest.mark.parametrize(("name", "share"), slow_products(list(HEADS), range(SHARES), each=1))
def test_values_of_config_json(tmp_path: Path, name: str, share: int) -> None:
    """Every value is some of the nonsense, which is other nonsense for the next value and in the other shares."""
    written(name, HEADS[name], tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    for extra in ("original_lm_head", "logit_scale", "quantization", "grounded_heads", "hidden_state_offset", "medusa"):
        whole.setdefault(extra, None) if extra != "grounded_heads" else whole.setdefault(extra, True)
    refused = 0
    for key, value in list(product(whole, NONSENSE))[share::SHARES]:
        path.write_text(json.dumps(whole | {key: value}))
        try:
            read_head(tmp_path)
        except ForetokenError:
            refused += 1
    assert refused or name == "medusa"  # all that it says is said by its tensors too


@pytest.mark.parametrize(("name", "config"), HEADS.items())
def test_a_file_with_nothing_right_is_refused_in_few_words(tmp_path: Path, name: str, config: HeadConfig) -> None:
    written(name, config, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    whole = load_file(path)
    save_file({f"{key}{i}": tensor.clone() for key, tensor in whole.items() for i in ("", *range(40))}, path)
    with pytest.raises(ForetokenError) as error:
        read_head(tmp_path)
    assert len(str(error.value)) - len(str(path)) < 700


@pytest.mark.parametrize(("name", "config"), HEADS.items())
def test_shapes(tmp_path: Path, name: str, config: HeadConfig) -> None:
    written(name, config, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    whole = load_file(path)
    for key, tensor in whole.items():
        for shape in ((), (0,), (3,), (0, 0), (3, 5), (1, 1, 1)):
            if shape == tuple(tensor.shape):
                continue
            save_file(whole | {key: torch.zeros(shape, dtype=tensor.dtype)}, path)
            with pytest.raises(ForetokenError):
                read_head(tmp_path)
        save_file({other: whole[other] for other in whole if other != key}, path)
        try:
            read_head(tmp_path)
        except ForetokenError:
            continue
        # Tied weights are there several times, and the mask of drafted tokens says what their map says.
        assert name == "mlp_speculator" or key == "t2d", key
