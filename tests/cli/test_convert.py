"""`foretoken convert` and `foretoken inspect` on heads: what they print, and that errors leave nothing behind."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_line import MODEL, ROOT, assert_refused, output_of, report_of
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from foretoken.formats import files, native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.conversion import head_shapes
from foretoken.formats.registry import known_formats, read_head
from foretoken.heads.base import HeadConfig
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

MEDUSA = MedusaConfig(hidden_size=8, vocab_size=13, num_heads=4, num_layers=1, own_lm_head=True)
HYDRA = HydraConfig(
    hidden_size=8,
    vocab_size=13,
    num_heads=3,
    num_layers=4,
    tied_blocks=True,
    own_lm_head=True,
    prefix=LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=2, intermediate_size=12),
)
SPECULATOR = MlpSpeculatorConfig(hidden_size=8, vocab_size=13, inner_dim=6)


def written(path: Path, config: HeadConfig, **more: object) -> HeadCheckpoint:
    """A random head in our own format."""
    generator = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=generator) for key, shape in head_shapes(config).items()}
    target = TargetFingerprint(name="some/target", hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    checkpoint = HeadCheckpoint(config=config, weights=weights, target=target, **more)  # type: ignore[arg-type]
    native.write_checkpoint(checkpoint, path)
    return checkpoint


def assert_equal(one: HeadCheckpoint, other: HeadCheckpoint) -> None:
    assert other.config == one.config
    assert all(torch.equal(other.weights[key], tensor) for key, tensor in one.weights.items())


@pytest.mark.parametrize(
    ("config", "to", "options"),
    [
        (MEDUSA, "medusa", ["--safetensors"]),
        (MEDUSA, "vllm-medusa", []),
        (MEDUSA, "tensorrt_llm", ["--tp_size", "4", "--num_medusa_heads", "4"]),
        (HYDRA, "hydra", ["--num_hydra_heads", "3", "--num_hydra_layers", "4"]),
        (HYDRA, "tensorrt_llm", ["--tp-size", "2"]),
        (SPECULATOR, "mlp_speculator", []),
    ],
)
def test_there_and_back(tmp_path: Path, config: HeadConfig, to: str, options: list[str]) -> None:
    head = written(tmp_path / "head", config)
    text = output_of("convert", str(tmp_path / "head"), str(tmp_path / "out"), "--to", to, *options)
    assert "(native) ->" in text
    assert config.method in text
    report = report_of("convert", str(tmp_path / "out"), str(tmp_path / "back"))
    assert (report["source_format"], report["format"]) == (to.replace("-", "_"), "native")
    assert_equal(head, read_head(tmp_path / "back")[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "head", "out"]


def test_fewer_heads_and_another_dtype(tmp_path: Path) -> None:
    head = written(tmp_path / "head", MEDUSA, acceptance=[[0.5], [0.3], [0.2], [0.1]], choices=[[0], [0, 0, 0], [1]])
    options = ["--fixed_num_medusa_heads", "2", "--dtype", "bfloat16"]
    output_of("convert", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "medusa", *options)
    cut = read_head(tmp_path / "out")[1]
    assert cut.config == MEDUSA.model_copy(update={"num_heads": 2})
    assert torch.equal(cut.weights["lm_head"], head.weights["lm_head"][:2].bfloat16())
    assert (cut.acceptance, cut.choices) == ([[0.5], [0.3]], [[0], [1]])

    written(tmp_path / "hydra", HYDRA)
    output_of("convert", str(tmp_path / "hydra"), str(tmp_path / "one"), "--num-hydra-heads", "1")
    assert read_head(tmp_path / "one")[1].config.num_heads == 1


@pytest.mark.parametrize(
    ("config", "options", "parts"),
    [
        (MEDUSA, ["--to", "medsua"], ("in format 'medsua'", "Did you mean 'medusa'?")),
        (MEDUSA, ["--to", "gorgon"], ("cannot be written in format 'gorgon'",)),
        (MEDUSA, ["--to", "hydra"], ("cannot hold a head of method 'medusa'",)),
        (MEDUSA, ["--to", "medusa", "--num_medusa_heads", "5"], ("5 heads are asked for. Expected 1 to 4",)),
        (MEDUSA, ["--to", "medusa", "--num_medusa_layers", "2"], ("2 layers are asked for", "have 1")),
        (MEDUSA, ["--to", "medusa", "--num_hydra_heads", "2"], ("holds a head of method 'medusa'",)),
        (MEDUSA, ["--to", "medusa", "--dtype", "float12"], ("dtype 'float12' does not exist here", "float16")),
        (MEDUSA, ["--to", "medusa", "--tp-size", "2"], ("tp_size is 2. Expected 1",)),
        (MEDUSA, ["--to", "tensorrt_llm", "--tp-size", "3"], ("tp_size is 3. Expected a divisor of 8",)),
        (MEDUSA, ["--to", "medusa", "--target", "models/tinycod"], ("Did you mean 'models/tinycode'?",)),
        (MEDUSA.model_copy(update={"own_lm_head": False}), ["--to", "medusa"], ("LM head", "Pass --target")),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_errors_leave_the_output_alone(
    tmp_path: Path, config: HeadConfig, options: list[str], parts: tuple[str, ...], force: bool
) -> None:
    written(tmp_path / "head", config)
    if force:
        written(tmp_path / "out", SPECULATOR)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = ["convert", str(tmp_path / "head"), str(tmp_path / "out"), *options, *(["--force"] if force else [])]
    assert_refused(parts, *arguments)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert (tmp_path / "out").exists() == force


def test_nothing_is_written_over(tmp_path: Path) -> None:
    written(tmp_path / "head", MEDUSA)
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["convert", str(tmp_path / "head"), str(out), "--to", "medusa"]
    output_of(*arguments)  # an empty directory is nothing
    assert_refused(("is not empty", "Pass --force"), *arguments)
    output_of(*arguments[:-1], "vllm_medusa", "--force")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    (out / "precious").mkdir()
    assert_refused("is not a directory of a head alone", *arguments, "--force")
    assert (out / "precious").is_dir()
    file = tmp_path / "file"
    file.touch()
    assert_refused("is not a directory", "convert", str(tmp_path / "head"), str(file), "--force")


def test_a_head_may_replace_itself(tmp_path: Path) -> None:
    head = written(tmp_path / "head", MEDUSA)
    output_of("convert", str(tmp_path / "head"), str(tmp_path / "head"), "--to", "medusa", "--force")
    name, back = read_head(tmp_path / "head")
    assert name == "medusa"
    assert_equal(head, back)


def test_lm_head_and_embedding_come_from_the_target(tmp_path: Path) -> None:
    tensors = load_file(ROOT / MODEL / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].float()
    lm_head = tensors.get("lm_head.weight", embedding).float()
    vocab, width = lm_head.shape
    written(tmp_path / "head", HydraConfig(hidden_size=width, vocab_size=vocab, num_heads=1, num_layers=1))
    arguments = ["convert", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "hydra", "--target", MODEL]
    output_of(*arguments)
    stored = torch.load(tmp_path / "out" / "hydra_lm_head.pt", weights_only=True)
    assert torch.equal(stored["hydra_lm_head.0.weight"], lm_head)
    assert torch.equal(stored["input_embed_fn.weight"], embedding)
    written(tmp_path / "other", MEDUSA)
    other = ["convert", str(tmp_path / "other"), str(tmp_path / "m"), "--to", "medusa"]
    output_of(*other)
    assert_refused("hidden_size 8", "convert", str(tmp_path / "m"), str(tmp_path / "no"), "--target", MODEL)


def test_sources_that_are_no_heads(tmp_path: Path) -> None:
    assert_refused("is a model and holds no draft head", "convert", MODEL, str(tmp_path / "out"))
    assert_refused("there is no head", "convert", str(tmp_path / "none"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_inspect_of_a_head(tmp_path: Path) -> None:
    written(tmp_path / "head", HYDRA, acceptance=[[0.5], [0.25], [0.125]])
    output_of("convert", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "tensorrt_llm", "--dtype", "float16")
    facts = report_of("inspect", str(tmp_path / "out"))
    expected = {
        "format": "tensorrt_llm",
        "method": "hydra",
        "heads": 3,
        "layers": 4,
        "hidden_size": 8,
        "vocabulary": 13,
        "lm_head": "own",
        "tied_blocks": True,
        "dtypes": ["float16"],
        "target": {"name": "some/target", "hidden_size": 8, "vocab_size": 13},
        "acceptance": [[0.5], [0.25], [0.125]],
    }
    assert {key: facts[key] for key in expected} == expected
    assert facts["weight_bytes"] == 2 * facts["parameters"]
    text = output_of("inspect", str(tmp_path / "head"))
    assert "hydra" in text
    assert "native" in text


def test_inspect_verify(tmp_path: Path) -> None:
    """0: in order; 1: readable and suspicious; 2: cannot be read."""
    head = written(tmp_path / "head", MEDUSA)
    text = output_of("inspect", str(tmp_path / "head"), "--verify")
    assert "no findings" in text
    assert "lm_head  [4, 13, 8]  float32" in text
    head.weights["weight"].zero_()
    native.write_checkpoint(head, tmp_path / "head")
    facts = report_of("inspect", str(tmp_path / "head"), "--verify", code=1)
    assert facts["findings"] == ["weight is zero everywhere"]
    head.weights["weight"][0] = float("nan")
    native.write_checkpoint(head, tmp_path / "head")
    assert_refused("not finite: weight", "inspect", str(tmp_path / "head"), "--verify")


def test_inspect_verify_of_a_target(tmp_path: Path) -> None:
    assert "no findings" in output_of("inspect", MODEL, "--verify")
    weights = load_file(ROOT / MODEL / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    shutil.copytree(ROOT / MODEL, tmp_path / "model")
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    facts = report_of("inspect", str(tmp_path / "model"), "--verify", code=1)
    assert facts["findings"] == ["model.norm.weight holds 1 numbers that are not finite"]
    output_of("inspect", str(tmp_path / "model"))


def test_inspect_verify_reports_what_readers_warn_about(tmp_path: Path) -> None:
    written(tmp_path / "head", MEDUSA)
    output_of("convert", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "medusa")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 2}))
    told = output_of("inspect", str(tmp_path / "out"), "--verify", code=1)
    assert "medusa_num_heads 2, the tensors say 4" in told
    output_of("inspect", str(tmp_path / "out"))


def test_inspect_of_damaged_heads(tmp_path: Path) -> None:
    written(tmp_path / "head", MEDUSA)
    for to, file in (("medusa", "medusa_lm_head.pt"), ("vllm_medusa", "model.safetensors")):
        output_of("convert", str(tmp_path / "head"), str(tmp_path / to), "--to", to)
        whole = (tmp_path / to / file).read_bytes()
        (tmp_path / to / file).write_bytes(whole[: len(whole) // 2])
        assert_refused(f"{file} is damaged", "inspect", str(tmp_path / to))


def test_help_names_the_formats() -> None:
    text = output_of("convert", "--help")
    assert all(name in text for name in known_formats(writable=True)), text
    assert "torch" in sys.modules


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    written(tmp_path / "head", MEDUSA)
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    sentence = f"'{out}' cannot be written: Not a directory. Nothing was changed there."
    assert_refused(sentence, "convert", str(tmp_path / "head"), str(out), "--to", "medusa")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "head"]


def test_a_source_on_the_hub(tmp_path: Path) -> None:
    written(tmp_path / "head", MEDUSA)
    with mock.patch.object(files, "snapshot_download", return_value=str(tmp_path / "head")) as download:
        output_of("convert", "some/head", str(tmp_path / "out"), "--to", "medusa", "--revision", "v1")
    assert download.call_args.kwargs["revision"] == "v1"
    assert read_head(tmp_path / "out")[0] == "medusa"
    assert_refused("Leave it out", "convert", str(tmp_path / "head"), str(tmp_path / "no"), "--revision", "v1")


def test_convert_says_who_reads_the_result(tmp_path: Path) -> None:
    written(tmp_path / "head", MEDUSA)
    arguments = ["convert", str(tmp_path / "head")]
    text = output_of(*arguments, str(tmp_path / "a"), "--to", "medusa")
    assert "\n  read by FasterDecoding/Medusa: MedusaModel.from_pretrained, which builds 5 heads" in text
    assert "\n  not read by TGI 3.3: it opens safetensors alone" in text
    report = report_of(*arguments, str(tmp_path / "b"), "--to", "medusa", "--safetensors")
    assert {reader["program"]: reader["reads"] for reader in report["readers"]} == {
        "foretoken": True,
        "FasterDecoding/Medusa": False,
        "TGI 3.3": True,
        "vLLM 0.32": True,
        "TensorRT-LLM": True,
    }
    assert all(reader["how"] for reader in report["readers"])


def test_eagle_through_every_format(tmp_path: Path) -> None:
    """From ours to each layout and back; `inspect` says of each what it is, taps by boundary."""
    layer = LayerConfig(num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=6)
    head = written(
        tmp_path / "native",
        Eagle3Config(hidden_size=8, vocab_size=13, boundaries=(2, 6, 9), draft_vocab_size=5, layer=layer),
    )
    head = replace(head, weights={**head.weights, "token_map": torch.tensor([1, 2, 5, 9, 12])})
    native.write_checkpoint(head, tmp_path / "native")
    facts = report_of("inspect", str(tmp_path / "native"))
    before = "native"
    for to in ("eagle3", "speculators", "eagle3", "native"):
        out = tmp_path / f"{before}-{to}"
        output_of("convert", str(tmp_path / before), str(out), "--to", to)
        found = report_of("inspect", str(out))
        assert found == facts | {"directory": str(out), "format": to}
        before = out.name
    assert_equal(head, read_head(tmp_path / before)[1])
    wanted = {"method": "eagle3", "taps": [2, 6, 9], "drafted_vocabulary": 5, "lm_head": "own"}
    assert (wanted | {"embedding": "the target's"}).items() <= facts.items()
    assert facts["target"]["name"] == "some/target"
    assert "taps" in output_of("inspect", str(tmp_path / "native"))
    written(tmp_path / "first", EagleConfig(hidden_size=8, vocab_size=13, layer=layer))
    output_of("convert", str(tmp_path / "first"), str(tmp_path / "eagle"), "--to", "eagle")
    found = report_of("inspect", str(tmp_path / "eagle"))
    wanted = {"format": "eagle", "method": "eagle", "taps": ["final"], "lm_head": "the target's"}
    assert wanted.items() <= found.items()
    assert_refused("method 'eagle'", "convert", str(tmp_path / "eagle"), str(tmp_path / "no"), "--to", "eagle3")


def test_blocks_that_others_hold_to_be_one_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "head", MEDUSA.model_copy(update={"num_layers": 2}))
    arguments = ["convert", str(tmp_path / "head"), str(tmp_path / "out")]
    assert_refused(("the 2 blocks of each head differ", "tied_blocks=true"), *arguments, "--to", "medusa")
    assert not (tmp_path / "out").exists()
    assert "not read by FasterDecoding/Medusa" in output_of(*arguments, "--to", "medusa", "--safetensors")


@pytest.mark.parametrize("what", ["a target", "somebody's files", "a head and a text", "a head and a folder", "a link"])
def test_force_replaces_heads_and_nothing_else(tmp_path: Path, what: str) -> None:
    """A model, or any directory with a config.json, was deleted without a word."""
    written(tmp_path / "head", MEDUSA)
    out = tmp_path / "out"
    match what:
        case "a target":
            tiny_model("llama").save_pretrained(out)
        case "somebody's files":
            out.mkdir()
            (out / "config.json").write_text('{"my": "app"}')
        case "a link":
            written(tmp_path / "elsewhere", MEDUSA)
            out.symlink_to(tmp_path / "elsewhere")
        case _:
            written(out, MEDUSA)
            (out / "thesis.tex").write_text("years") if what.endswith("text") else (out / "logs").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    sentence = "is not a directory" if what == "a link" else "is not a directory of a head alone"
    assert_refused(sentence, "convert", str(tmp_path / "head"), str(out), "--to", "native", "--force")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert out.is_symlink() == (what == "a link")
