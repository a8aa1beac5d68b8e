"""What programs that repeat a module, drop biases or rotate by their own rules make of files written here.

The classes below lay heads out as the original code does, one block object repeated, and load leniently as it does.
`benchmarks/interop` compares with the original code itself.
"""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_hostile_files import HEADS
from tiny_heads import (
    LINEAR,
    E,
    V,
    hydra,
    logits,
    medusa,
    numbers,
    random_head,
    round_trip,
    target_info,
    target_weights,
)
from torch import Tensor, nn

from foretoken.core.errors import ConfigError
from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo
from foretoken.formats.conversion import Reader
from foretoken.formats.registry import head_readers, known_formats, read_head, write_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=4, head_dim=2, intermediate_size=6, rms_norm_eps=1e-5)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


def speculator(**changes: object) -> MlpSpeculatorConfig:
    return MlpSpeculatorConfig(**{"hidden_size": E, "vocab_size": V, "inner_dim": 6, **changes})


class Block(nn.Module):
    """x + silu(W x + b), or R x + c + silu(W x + b) of several inputs."""

    def __init__(self, inputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * E, E)
        self.res_connection = nn.Linear(inputs * E, E) if inputs > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return result


def of_one_block(config: MedusaConfig) -> nn.Module:
    """Medusa heads whose blocks are one object."""
    heads = (
        nn.Sequential(*[Block()] * config.num_layers, nn.Linear(E, V, bias=False)) for _ in range(config.num_heads)
    )
    return nn.ModuleList(heads)


class OfOneBlock(nn.Module):
    """Hydra heads whose further blocks are one object."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(Block(head + 2), *[Block()] * (config.num_layers - 1)) for head in range(config.num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(E, V) for _ in range(config.num_heads))


def loaded(module: nn.Module, path: Path) -> nn.Module:
    """The module with a pickle's tensors, as far as their names fit."""
    module.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return module.double().requires_grad_(requires_grad=False)


def inputs(head: int) -> Tensor:
    """(2, 9, (head + 2) E) what Hydra's head reads of the text of `logits`; the feature alone for -1."""
    tokens = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(3))
    embedded = [target_weights(torch.float64).embedding[tokens.roll(-(i + 1), dims=1)] for i in range(head + 1)]
    return torch.cat([numbers(2, 9, E, seed=4).double(), *embedded], dim=-1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_layers", [0, 1, 2, 4])
def test_medusa_is_the_same_network_where_blocks_are_one_object(tmp_path: Path, num_layers: int, tied: bool) -> None:
    head = random_head(medusa(num_layers=num_layers, tied_blocks=tied))
    if num_layers > 1 and not tied:
        with pytest.raises(ConfigError, match=rf"the {num_layers} blocks of each head differ.* tied_blocks=true"):
            write_head("medusa", head, tmp_path / "out")
        assert not list(tmp_path.iterdir())
        return
    write_head("medusa", head, tmp_path)
    theirs = loaded(of_one_block(head.config), tmp_path / "medusa_lm_head.pt")  # type: ignore[arg-type]
    for ours, module in zip(logits(head), theirs.children(), strict=True):
        torch.testing.assert_close(module(inputs(-1)), ours)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_hydra_is_the_same_network_where_blocks_are_one_object(tmp_path: Path, num_layers: int, tied: bool) -> None:
    head = random_head(hydra(num_layers=num_layers, tied_blocks=tied))
    if num_layers > 2 and not tied:
        for prefix in (None, PREFIX):
            apart = random_head(hydra(num_layers=num_layers, prefix=prefix))
            with pytest.raises(ConfigError, match=rf"the {num_layers - 1} blocks after the first .* tied_blocks=true"):
                write_head("hydra", apart, tmp_path / "out")
        assert not list(tmp_path.iterdir())
        return
    write_head("hydra", head, tmp_path)
    theirs = loaded(OfOneBlock(head.config), tmp_path / "hydra_lm_head.pt")  # type: ignore[arg-type]
    parts = zip(theirs.hydra_mlp, theirs.hydra_lm_head, strict=True)  # type: ignore[arg-type]
    for index, ((mlp, lm_head), ours) in enumerate(zip(parts, logits(head), strict=True)):
        torch.testing.assert_close(lm_head(mlp(inputs(index))), ours)


def test_untied_blocks_with_equal_numbers_are_written(tmp_path: Path) -> None:
    """What counts is what others compute."""
    head = random_head(medusa(num_layers=2))
    for kind in ("weight", "bias"):
        head.weights[kind][:, 1] = head.weights[kind][:, 0]
    write_head("medusa", head, tmp_path)
    head.weights["bias"][1, 1, 0] += 1
    with pytest.raises(ConfigError, match="blocks of each head differ"):
        write_head("medusa", head, tmp_path)


def test_medusa_v2_takes_no_blocks_that_differ_in_any_file(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2, own_lm_head=False))
    for as_safetensors in (True, False):
        with pytest.raises(ConfigError, match="no program reads that from format 'medusa_v2'"):
            write_head("medusa_v2", head, tmp_path / "out", as_safetensors=as_safetensors)


def target(scaling: dict[str, object] | None) -> TargetInfo:
    """A target with a rotary scaling."""
    rope = {"rope_type": "default", "rope_theta": 1e6} if scaling is None else {"rope_theta": 1e6, **scaling}
    return TargetInfo(config=SimpleNamespace(rope_parameters=rope, max_position_embeddings=128))


@pytest.mark.parametrize(
    ("own", "theirs", "is_same"),
    [
        (None, None, True),
        (LINEAR, LINEAR, True),
        (LINEAR, None, False),
        (None, LINEAR, False),
        (LINEAR, {**LINEAR, "factor": 2.0}, False),
        (None, {"rope_type": "dynamic", "factor": 2.0}, False),
        (None, YARN, True),  # there the original code stops
        (YARN, YARN, False),
    ],
)
def test_the_original_decoder_block_rotates_by_the_target(
    tmp_path: Path, own: dict[str, object] | None, theirs: dict[str, object] | None, is_same: bool
) -> None:
    head = random_head(hydra(prefix=PREFIX.model_copy(update={"rope_scaling": own})))
    write_head("hydra", head, tmp_path / "safetensors", target=target(theirs), as_safetensors=True)
    assert read_head(tmp_path / "safetensors")[1].config == head.config
    if is_same:
        write_head("hydra", head, tmp_path / "out", target=target(theirs))
        return
    with pytest.raises(ConfigError, match=r"has rotary scaling .* takes the target's"):
        write_head("hydra", head, tmp_path / "out", target=target(theirs))


def test_the_original_decoder_block_has_one_base(tmp_path: Path) -> None:
    head = random_head(hydra(prefix=PREFIX.model_copy(update={"rope_theta": 5e5})))
    with pytest.raises(ConfigError, match=r"rope_theta 500000, and zankner/Hydra.* always with 10000"):
        write_head("hydra", head, tmp_path)


def said(name: str, head: HeadCheckpoint, **options: object) -> dict[str, Reader]:
    return {reader.program: reader for reader in head_readers(name, head, **options)}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", known_formats(writable=True))
def test_every_format_says_who_reads_it(name: str) -> None:
    readers = head_readers(name, random_head(HEADS[name]))
    assert readers[0].program == "foretoken"
    assert (len(readers) > 1) == (name != "native")
    assert all(str(reader).startswith(("read by ", "not read by ")) and reader.how for reader in readers)
    assert len({reader.program for reader in readers}) == len(readers)


def test_who_reads_medusa() -> None:
    pickled, plain = (said("medusa", random_head(medusa()), as_safetensors=flag) for flag in (False, True))
    assert pickled["FasterDecoding/Medusa"].reads
    assert "builds 5 heads and leaves the others at random" in pickled["FasterDecoding/Medusa"].how
    assert not plain["FasterDecoding/Medusa"].reads
    assert not pickled["TGI 3.3"].reads
    assert plain["TGI 3.3"].reads
    assert pickled["vLLM 0.32"].reads
    unnamed = said("medusa", random_head(medusa(), target=None))
    assert "set base_model_name_or_path" in unnamed["FasterDecoding/Medusa"].how
    assert "base_model_name_or_path" not in pickled["FasterDecoding/Medusa"].how


def test_vllm_reads_biases_of_the_published_layout(tmp_path: Path) -> None:
    for num_layers in (0, 1):
        write_head("medusa", random_head(medusa(num_layers=num_layers)), tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["medusa_fc_bias"] == (num_layers > 0)


def test_who_reads_a_token_map() -> None:
    assert said("vllm_medusa", random_head(medusa()))["vLLM 0.32"].reads
    cut = said("vllm_medusa", random_head(medusa(draft_vocab_size=5)))["vLLM 0.32"]
    assert not cut.reads
    assert "fails while loading" in cut.how


@pytest.mark.parametrize(("stages", "tied", "scaled"), list(product([1, 3], [True, False], [True, False])))
def test_who_reads_mlp_speculators(stages: int, tied: bool, scaled: bool) -> None:
    head = random_head(speculator(num_heads=stages, tie_weights=tied, scale_input=scaled))
    readers = said("mlp_speculator", head)
    assert readers["TGI 3.3"].reads == (tied and stages > 1)
    assert readers["TGI 2.0.3 to 2.2"].reads == (not scaled)
    assert not readers["vLLM 0.32"].reads


@pytest.mark.parametrize("tied", [True, False])
def test_one_stage_is_untied_for_others_and_itself_here(tmp_path: Path, tied: bool) -> None:
    head = random_head(speculator(num_heads=1, tie_weights=tied))
    assert round_trip("mlp_speculator", head, tmp_path).config == head.config
    stored = json.loads((tmp_path / "one" / "config.json").read_text())
    assert stored["tie_weights"] is False
    assert stored["base_model_name_or_path"] == "some/target"  # TGI loads the target by it
    del stored["foretoken"]
    (tmp_path / "one" / "config.json").write_text(json.dumps(stored))
    as_others_read = read_head(tmp_path / "one")[1].config
    assert as_others_read.model_copy(update={"top_k": None}) == head.config.model_copy(update={"tie_weights": False})


def test_who_reads_hydra() -> None:
    port = "the public Hydra port of TensorRT-LLM"
    for name in ("hydra", "tensorrt_llm"):
        assert said(name, random_head(hydra(prefix=PREFIX)))[port].reads
        assert not said(name, random_head(hydra()))[port].reads
    assert not said("tensorrt_llm", random_head(hydra(prefix=PREFIX)), tp_size=2)[port].reads
    official = said("hydra", random_head(hydra(prefix=PREFIX)), target=target(YARN))["zankner/Hydra"]
    assert not official.reads
    assert "does not know the target's rotary scaling 'yarn'" in official.how
    grouped = random_head(hydra(prefix=PREFIX.model_copy(update={"num_key_value_heads": 2})))
    assert not said("hydra", grouped)["zankner/Hydra"].reads


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("own_lm_head", [True, False])
@pytest.mark.parametrize("name", ["native", "medusa", "vllm_medusa", "tensorrt_llm"])
def test_heads_without_blocks(tmp_path: Path, name: str, own_lm_head: bool, has_bias: bool) -> None:
    """Heads that are LM heads alone come back, a shared one too; formats that know none keep copies."""
    head = random_head(medusa(num_layers=0, own_lm_head=own_lm_head, has_bias=has_bias))
    back = round_trip(name, head, tmp_path, target=target_info())
    assert all(torch.allclose(a, b) for a, b in zip(logits(head), logits(back), strict=True))
    is_shared = not own_lm_head and name in ("native", "vllm_medusa")
    assert back.config == head.config.model_copy(update={"own_lm_head": not is_shared})
