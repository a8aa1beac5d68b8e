"""Cost twins: the same logits bit for bit at another size, the same drafts of every head, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken.bench.cost_twin import TwinPart, TwinPlan, check_twin, make_twin, make_twin_in_memory
from foretoken.bench.padded_heads import _METHODS, padded_head
from foretoken.bench.padding import PaddedModel, Padding, growth, open_model
from foretoken.core.errors import ConfigError, ForetokenError, ModelError
from foretoken.core.passes import Pass
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.conversion import head_shapes
from foretoken.formats.registry import read_head
from foretoken.heads import head_methods
from foretoken.heads.base import HeadConfig
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config
from foretoken.heads.falcon import FalconConfig
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig
from foretoken.heads.spire import SpireConfig
from foretoken.models.config import TwinRecord
from foretoken.models.loading import fill_model, load_model
from foretoken.models.parts import TargetParts
from foretoken.runner.runner import Runner

E, FACTOR = 32, 4
TEXT = [[3, 41, 5, 9, 26, 53, 58, 9, 7, 9], [3, 23, 8, 46, 26]]
SIZES: dict[str, Any] = {"hidden_size": E, "vocab_size": VOCAB_SIZE}
PREFIX = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24)
BIASED = PREFIX.model_copy(update={"attention_bias": True})
HEADS: dict[str, HeadConfig] = {
    "medusa": MedusaConfig(**SIZES, num_heads=3, num_layers=2, own_lm_head=True),
    "medusa-small": MedusaConfig(**SIZES, num_heads=2, num_layers=1, own_lm_head=True, draft_vocab_size=20),
    "medusa-shared": MedusaConfig(**SIZES, num_heads=3, num_layers=2, has_bias=False, tied_blocks=True),
    "hydra": HydraConfig(**SIZES, num_heads=3, num_layers=1, own_lm_head=True),
    "hydra++": HydraConfig(**SIZES, num_heads=3, num_layers=3, prefix=PREFIX),
    "mlp_speculator": MlpSpeculatorConfig(**SIZES, num_heads=3, inner_dim=16),
    "mlp_speculator-apart": MlpSpeculatorConfig(
        **SIZES, num_heads=3, inner_dim=16, tie_weights=False, scale_input=False
    ),
    "eagle": EagleConfig(**SIZES, layer=PREFIX),
    "eagle-bare": EagleConfig(**SIZES, has_bias=False, layer=BIASED),
    "eagle3": Eagle3Config(**SIZES, layer=PREFIX, boundaries=(1, 2, 3), draft_vocab_size=20),
    "eagle3-speculators": Eagle3Config(
        **SIZES, layer=PREFIX, boundaries=(0, 2, 3), norm_before_residual=True, norm_before_fc=True, feeds_normed=True
    ),
    "falcon": FalconConfig(**SIZES, layer=PREFIX, num_steps=4),
    "falcon-per-position": FalconConfig(
        **SIZES, layer=BIASED, block=3, num_steps=6, lstm_mode="per_position", has_bias=False
    ),
    "eagle3-narrow": Eagle3Config(
        **SIZES, layer=BIASED, boundaries=(1, 3), draft_hidden_size=16, own_embedding=True, fc_norms=True
    ),
    "spire": SpireConfig(**SIZES, layer=BIASED, target_layers=3, num_steps=3, sinks=1, window=3),
    "spire_alone": SpireConfig(**SIZES, layer=PREFIX, target_layers=3, sinks=1, window=3, has_feedback=False),
}


def small(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A tiny target on disk."""
    tiny_model(architecture, **changes).save_pretrained(path)
    return path


def random_head(config: HeadConfig, dtype: torch.dtype = torch.float32, **more: Any) -> HeadCheckpoint:
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator).mul(0.3).to(dtype) for name, shape in head_shapes(config).items()
    }
    if "token_map" in weights:
        weights["token_map"] = torch.randperm(VOCAB_SIZE, generator=generator)[: len(weights["token_map"])].sort()[0]
    return HeadCheckpoint(config=config, weights=weights, **more)


def made(model: Path, out: Path, **more: Any) -> list[TwinPart]:
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": E * FACTOR, **more}
    return make_twin(TwinPlan(model=model, out=out, **sizes))


def logits(path: Path, decoder: str, dtype: str) -> torch.Tensor:
    """Over both texts, in one pass."""
    runner = Runner(load_model(path, dtype=dtype, device="cpu"), num_slots=2, max_nodes=1, runner=decoder)
    work = Pass.of_chains(TEXT, slots=[0, 1], prefix_lens=[0, 0])
    found = runner.run(replace(work, logit_rows=torch.arange(work.num_tokens))).logits
    assert found is not None
    return found


def in_turn(*names: str) -> list[Any]:
    """All names and fills; by default each name with one of the fills in turn."""
    return [
        pytest.param(name, fill, marks=() if (number + is_random) % 2 else pytest.mark.slow)
        for number, name in enumerate(names)
        for is_random, fill in enumerate(("zeros", "random"))
    ]


@pytest.mark.parametrize(("architecture", "fill"), in_turn("llama", "llama_tied", "mistral", "qwen2", "qwen3"))
def test_logits_are_those_of_the_small_model(tmp_path: Path, architecture: str, fill: Any) -> None:
    model = small(tmp_path / "small", architecture)
    [part] = made(model, tmp_path / "twin", num_layers=5, fill=fill)
    twin = load_model(part.path, device="cpu")
    foreseen = PaddedModel(small=open_model(model), factor=4, num_layers=5, dtype=None)
    assert foreseen.num_bytes == 4 * part.num_parameters
    assert (twin.num_layers, twin.config.hidden_size, twin.config.intermediate_size) == (5, 128, 192)
    assert (twin.config.num_attention_heads, twin.config.num_key_value_heads) == (16, 8)
    assert part.num_parameters == sum(tensor.numel() for tensor in twin.module.parameters())
    assert twin.cost_twin == TwinRecord(of="small", layers=5, hidden_size=128)
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(logits(model, "lean-native", dtype), logits(part.path, "lean-native", dtype)), dtype
    # The BLAS below the generic decoder chooses by a row's length in which order it is summed.
    ours, theirs = (logits(path, "generic", "float64") for path in (model, part.path))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1, 4, 16])
def test_any_power_of_four(tmp_path: Path, factor: int) -> None:
    model = small(tmp_path / "small", rms_norm_eps=1e-3)  # large enough that a wrong one shows
    made(model, tmp_path / "twin", num_layers=3, hidden_size=E * factor)
    assert torch.equal(logits(model, "lean-native", "float32"), logits(tmp_path / "twin", "lean-native", "float32"))


@pytest.mark.parametrize(("name", "fill"), in_turn(*HEADS))
def test_every_head_says_the_same_of_padded_features(name: str, fill: Any) -> None:
    """In float64, with features, embeddings and LM head that end in zeros."""
    head = random_head(HEADS[name], torch.float64, acceptance=[[0.5, 0.25], [0.5], [0.5]], choices=[[0], [1]])
    record = TwinRecord(of="small", layers=4, hidden_size=E * FACTOR)
    target = TargetFingerprint(hidden_size=E * FACTOR, vocab_size=VOCAB_SIZE)
    twin = padded_head(head, Padding(FACTOR, fill, torch.Generator().manual_seed(2)), record, target)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(2, 7, len(head.config.taps), E, generator=generator, dtype=torch.float64)
    embedding = torch.randn(VOCAB_SIZE, E, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCAB_SIZE, (2, 7), generator=generator)

    def said(checkpoint: HeadCheckpoint, width: int) -> list[torch.Tensor]:
        rows = torch.nn.functional.pad(embedding, (0, width - E))
        parts = TargetParts(
            embed=lambda ids: rows[ids], lm_head=lambda x: x @ rows.T, lm_head_weight=rows, final_norm=torch.tanh
        )
        module, fed = checkpoint.module(), torch.nn.functional.pad(features, (0, width - E)).flatten(2)
        with torch.no_grad():
            return [
                module.logits(index, hidden, parts)
                for index, hidden in enumerate(module.teacher_forced(fed, tokens, parts))
            ]

    for ours, theirs in zip(said(head, E), said(twin, E * FACTOR), strict=True):
        # BLAS may sum longer rows otherwise; logits of heads that feed on what they say become large.
        within = 1e-13 * max(1.0, float(ours[ours.isfinite()].abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=within)
    assert (twin.acceptance, twin.choices, twin.target) == (head.acceptance, head.choices, target)
    assert twin.notes["cost_twin"] == {"of": "small", "layers": 4, "hidden_size": 128}
    blocks = [key for key, part in head.weights.items() if part.dim() > 1 and part.shape[-1] % 16 == 0]
    assert all(twin.weights[key].shape[-1] == FACTOR * head.weights[key].shape[-1] for key in blocks)


def test_every_method_can_be_padded() -> None:
    """But heads of multi-token prediction: their targets have recurrent layers, and only attention is padded."""
    assert sorted([*_METHODS, "mtp"]) == head_methods()


def test_spire_reads_the_same_blocks_of_a_deeper_target() -> None:
    head = random_head(HEADS["spire"])
    record = TwinRecord(of="small", layers=9, hidden_size=E * FACTOR)
    target = TargetFingerprint(hidden_size=E * FACTOR, vocab_size=VOCAB_SIZE)
    config = padded_head(head, Padding(FACTOR, "zeros", torch.Generator()), record, target).config
    assert isinstance(config, SpireConfig)
    assert (config.target_layers, config.num_layers, config.kept_layers) == (9, 2, (0, 2))
    assert config.taps == head.config.taps


@pytest.fixture(scope="module")
def with_drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a draft model and a head of each method beside it."""
    model = small(tmp_path_factory.mktemp("drafters") / "small")
    small(model.with_name("small-draft"), seed=1, hidden_size=16, num_hidden_layers=2, head_dim=8)
    target = TargetFingerprint.of(load_model(model, device="cpu"))
    for name in ("medusa-small", "hydra++", "mlp_speculator", "eagle", "eagle3", "falcon", "spire", "spire_alone"):
        native.write_checkpoint(random_head(HEADS[name], target=target), model.with_name(f"small-{name.split('-')[0]}"))
    return model


@pytest.fixture
def parts(with_drafters: Path, tmp_path: Path) -> list[TwinPart]:
    return made(with_drafters, tmp_path / "twin", num_layers=6)


def test_drafters_lie_beside_the_twin_and_propose_the_same(parts: list[TwinPart]) -> None:
    assert [(part.role, part.path.name) for part in parts] == [
        ("target", "twin"), ("draft_model", "twin-draft"), ("eagle", "twin-eagle"), ("eagle3", "twin-eagle3"),
        ("falcon", "twin-falcon"), ("hydra", "twin-hydra++"), ("medusa", "twin-medusa"),
        ("mlp_speculator", "twin-mlp_speculator"), ("spire", "twin-spire"), ("spire", "twin-spire_alone"),
    ]  # fmt: skip
    draft = load_model(parts[1].path, device="cpu")
    assert (draft.num_layers, draft.config.hidden_size, draft.config.head_dim) == (4, 64, 8)  # twice as deep, as 6 of 3
    checks = check_twin(parts, TEXT, max_tokens=8)
    assert [check.what for check in checks] == [
        "logits", "greedy text", "logits", "greedy text", "drafts of small-draft", "drafts of small-eagle",
        "drafts of small-eagle3", "drafts of small-falcon",
        "drafts of small-hydra++", "drafts of small-medusa", "drafts of small-mlp_speculator",
        "drafts of small-spire", "drafts of small-spire_alone",
    ]  # fmt: skip
    assert all(check.is_same and check.num_compared for check in checks), checks
    assert {check.difference for check in checks} == {0.0, None}


def test_what_differs_is_found(parts: list[TwinPart]) -> None:
    """An epsilon that was not divided shows in the logits, one wrong number of a head in its drafts."""
    target, of = parts[0], {part.role: part for part in parts}
    spoiled = (("hydra", "prefix.down_proj.weight"), ("eagle3", "fc.weight"))
    for method, key in spoiled:
        head = read_head(of[method].path)[1]
        head.weights[key][0, 0] += 8.0
        native.write_checkpoint(head, of[method].path)
    checks = check_twin([target, *(of[role] for role in ("medusa", "hydra", "eagle3"))], TEXT, max_tokens=8)
    different_drafts = [check.what for check in checks if not check.is_same]
    assert different_drafts == ["drafts of small-hydra++", "drafts of small-eagle3"]
    config = json.loads((target.path / "config.json").read_text())
    (target.path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    different = check_twin(parts[:1], TEXT, max_tokens=8)[0]
    assert not different.is_same
    assert different.difference
    assert different.difference > 0


def test_the_draft_model_may_keep_its_size_or_be_left_out(with_drafters: Path, tmp_path: Path) -> None:
    kept = made(with_drafters, tmp_path / "twin", heads=[], draft_model="keep")[1]
    assert (kept.role, kept.num_parameters) == ("draft_model", 9904)
    source = load_file(with_drafters.with_name("small-draft") / "model.safetensors")
    assert all(torch.equal(load_file(kept.path / "model.safetensors")[key], part) for key, part in source.items())
    assert [part.role for part in made(with_drafters, tmp_path / "t", heads=[], draft_model="none")] == ["target"]


def test_random_filling_is_random_and_writes_nothing(tmp_path: Path) -> None:
    model = small(tmp_path / "small")
    made(model, tmp_path / "twin", fill="random")
    tensors = load_file(tmp_path / "twin" / "model.safetensors")
    for key, part in load_file(model / "model.safetensors").items():
        padded = tensors[key].clone()
        padded[tuple(slice(size) for size in part.shape)] = 0
        is_written = key.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight"))
        assert (padded == 0).all() if is_written else (padded != 0).float().mean() > 0.7, key
    # Faint numbers stand in place of zeros, so that no two matrices are equal; text is as with zeros.
    assert 0 < tensors["model.layers.3.mlp.down_proj.weight"].abs().max() < 1e-28
    assert tensors["model.layers.3.mlp.up_proj.weight"].all()
    matrices = [each for key, each in tensors.items() if each.dim() == 2]
    for i, one in enumerate(matrices):
        assert not any(torch.equal(one, other) for other in matrices[:i])
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(logits(model, "lean-native", dtype), logits(tmp_path / "twin", "lean-native", dtype))


def test_large_twins_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(tmp_path / "small")
    [whole] = made(model, tmp_path / "whole")
    monkeypatch.setattr("foretoken.bench.padding._SHARD_SIZE", 100_000)
    [part] = made(model, tmp_path / "twin")
    assert len(list(part.path.glob("*.safetensors"))) == 6
    assert part.num_parameters == whole.num_parameters
    assert torch.equal(logits(whole.path, "generic", "float32"), logits(part.path, "generic", "float32"))


def refused(model: Path, out: Path, error: type[ForetokenError] = ConfigError, **more: Any) -> str:
    """The message; nothing may be written."""
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(error) as found:
        made(model, out, **more)
    assert sorted(out.parent.rglob("*")) == before
    return str(found.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden size 64 is not the 32 of '{model}' times a power of four. Expected one of 32, "),
        ({"hidden_size": 96}, "times a power of four"),
        ({"hidden_size": 16}, "times a power of four"),
        ({"num_layers": 2}, "2 layers are asked for, and '{model}' has 3, which are all needed. Expected at least 3."),
        ({"dtype": torch.bfloat16}, "bfloat16 cannot hold the weights of '{model}' exactly, which are float32."),
        ({"heads": [Path("nowhere")]}, "there is no head 'nowhere'"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = small(tmp_path / "small")
    assert message.format(model=model) in refused(model, tmp_path / "out" / "twin", ForetokenError, **changes)


def changed_config(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("architecture", "spoil", "message"),
    [
        ("gemma2", None, "is a 'gemma2', which cannot be padded. Expected weights that are not quantized, of one of"),
        ("llama", lambda m: changed_config(m, quantization_config={"quant_method": "fp8"}), "is a quantized 'llama'"),
        ("llama", lambda m: changed_config(m, intermediate_size=40), "gate_proj.weight [48, 32] instead of [40, 32]"),
        ("llama", lambda m: changed_config(m, cost_twin={"of": "x"}), "'layers' of 'cost_twin'"),
        (
            "llama",
            lambda m: changed_config(m, cost_twin={"of": "x", "layers": 3, "hidden_size": 32}),
            "is a cost twin 3 x 32 of x already. Expected a trained model. Make the twin of 'x'.",
        ),
        (
            "llama",
            lambda m: save_file({"model.layers.0.self_attn.sinks": torch.zeros(4)}, m / "more.safetensors"),
            "has a tensor 'model.layers.0.self_attn.sinks' that cannot be padded",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_padded_are_refused(
    tmp_path: Path, architecture: str, spoil: Callable[[Path], None] | None, message: str
) -> None:
    model = small(tmp_path / "small", architecture)
    if spoil is not None:
        spoil(model)
    assert message in refused(model, tmp_path / "out" / "twin", ModelError)


def test_a_head_of_another_target_is_refused(with_drafters: Path, tmp_path: Path) -> None:
    head = random_head(HEADS["medusa"], target=TargetFingerprint(name="o", hidden_size=E, vocab_size=9))
    native.write_checkpoint(head, tmp_path / "head")
    assert "was trained for 'o'" in refused(with_drafters, tmp_path / "twin", heads=[tmp_path / "head"])
    twice = [with_drafters.with_name("small-medusa")] * 2
    assert "two drafters would be written" in refused(with_drafters, tmp_path / "twin", heads=twice)


def test_only_twins_are_replaced(with_drafters: Path, tmp_path: Path) -> None:
    out = tmp_path / "twin"
    made(with_drafters, out)
    made(with_drafters, out, num_layers=3)  # its drafters, which are twins, too
    assert load_model(out, device="cpu").num_layers == 3
    (out / "notes.md").write_text("mine")
    assert "no cost twin that could be replaced: it holds 'notes.md'" in refused(with_drafters, out)
    (out / "notes.md").unlink()
    native.write_checkpoint(random_head(HEADS["medusa"]), out.with_name("twin-medusa"), replaces=True)
    assert "twin-medusa' is not empty, and no cost twin" in refused(with_drafters, out)
    assert "is not empty, and no cost twin" in refused(with_drafters, with_drafters)
    (tmp_path / "file").touch()
    assert "is no directory" in refused(with_drafters, tmp_path / "file")
    (tmp_path / "link").symlink_to(out)
    assert "is no directory" in refused(with_drafters, tmp_path / "link")


@pytest.mark.parametrize(
    ("sizes", "factor"),
    [((256, 256), 1), ((256, 1024), 4), ((160, 2560), 16), ((256, 512), None), ((256, 768), None), ((4, 1), None)],
)  # fmt: skip
def test_growth(sizes: tuple[int, int], factor: int | None) -> None:
    assert growth(*sizes) == factor


@pytest.mark.parametrize(("architecture", "fill"), in_turn("llama", "llama_tied"))
def test_a_twin_in_memory_is_the_one_of_files(tmp_path: Path, architecture: str, fill: Any) -> None:
    """The same weights, a head and a draft model that fit, and no file of weights of the target."""
    model = small(tmp_path / "small", architecture)
    small(tmp_path / "small-draft", architecture)
    head = random_head(HEADS["medusa-shared"], target=TargetFingerprint.of(load_model(model, device="cpu")))
    native.write_checkpoint(head, tmp_path / "small-medusa")
    of_files = {part.role: part.path for part in made(model, tmp_path / "files", fill=fill)}
    plan = TwinPlan(model=model, out=tmp_path / "memory", num_layers=4, hidden_size=E * FACTOR, fill=fill)
    twin, written = make_twin_in_memory(plan), load_model(of_files["target"], device="cpu")
    assert (twin.cost_twin, twin.eos_ids, twin.dtype) == (written.cost_twin, written.eos_ids, written.dtype)
    theirs = dict(written.module.named_parameters())
    for key, parameter in twin.module.named_parameters():
        assert torch.equal(parameter, theirs.pop(key)), key
    assert not theirs
    assert not list((tmp_path / "memory").glob("*.safetensors"))
    _, found = read_head(tmp_path / "memory-medusa", target=TargetFingerprint.of(twin), base_config=twin.config)
    _, wanted = read_head(of_files["medusa"], target=TargetFingerprint.of(written), base_config=written.config)
    assert found.target == replace_name(wanted.target, str(tmp_path / "memory"))
    assert all(torch.equal(found.weights[key], tensor) for key, tensor in wanted.weights.items())
    draft, draft_of_files = (
        load_model(path, device="cpu") for path in (tmp_path / "memory-draft", of_files["draft_model"])
    )
    for ours, other in zip(draft.module.parameters(), draft_of_files.module.parameters(), strict=True):
        assert torch.equal(ours, other)


def replace_name(target: TargetFingerprint | None, name: str) -> TargetFingerprint:
    assert target is not None
    return target.model_copy(update={"name": name})


def test_weights_in_memory_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = small(tmp_path / "small")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"missing: model.layers.0.mlp.up_proj.weight; wrong shape: model.norm.weight"):
        fill_model(str(model), weights.items(), device=torch.device("cpu"))
