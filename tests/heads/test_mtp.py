"""Heads for multi-token prediction of Qwen3.5 and Qwen3-Next: against transformers' blocks, from the target's files."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command_line import assert_refused, output_of, report_of
from end_to_end.same_text import assert_same_text
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding

from foretoken import LLM, SamplingParams
from foretoken.cli.plan import _setups
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.passes import Pass
from foretoken.decoder.block_stack import BlockStack
from foretoken.entrypoints.config import parse_speculative_config
from foretoken.entrypoints.drafter_files import what_lies_at
from foretoken.formats import native
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.formats.registry import holds_head, read_head, write_head
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.teacher import Teacher

PROMPTS = [[5], [7, 8, 9] * 4, [40, 3, 12, 9, 61, 17], list(range(3, 20))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ARCHITECTURES: dict[str, Any] = {
    "qwen3_5": (Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding),
    "qwen3_5_moe": (Qwen3_5MoeDecoderLayer, Qwen3_5TextRotaryEmbedding),
    "qwen3_next": (Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding),
}
PARAMS = [GREEDY] * 4 + [SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)] * 4


class Reference(nn.Module):
    """As the files have it; its block is that of transformers."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        config, (block, rotary) = tiny_model(architecture).config, ARCHITECTURES[architecture]
        config._attn_implementation = "eager"
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([block(config, config.layer_types.index("full_attention"))])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            Qwen3_5RMSNorm(width, config.rms_norm_eps) for _ in range(3)
        )
        self.rotary = rotary(config)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """(1, T, W), the next states of pairs at positions 0 to T - 1."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], dim=-1)
        length = both.shape[1]
        positions = torch.arange(length).unsqueeze(0)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        x = self.fc(both)
        x = self.layers[0](x, position_embeddings=self.rotary(x, positions), attention_mask=mask)
        return self.norm(x)


@cache
def reference(architecture: str = "qwen3_5") -> Reference:
    torch.manual_seed(3)
    made = Reference(architecture)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(std=0.3 if "norm" in name else 0.2)
    return made.eval()


def save(directory: Path, module: Reference, architecture: str = "qwen3_5", **more: Tensor) -> Path:
    """A checkpoint of the target, with the head's tensors in a file of their own."""
    tiny_model(architecture).save_pretrained(directory)
    tensors = {f"mtp.{name}": part.detach().clone() for name, part in module.named_parameters()}
    save_file(tensors | more, directory / "mtp.safetensors")
    return directory


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return save(tmp_path / "target", reference())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_step_equals_the_blocks_of_transformers(architecture: str, tmp_path: Path) -> None:
    """The first step of all positions, and the later ones of each draft, which read the head's own states."""
    head = read_head(save(tmp_path, reference(architecture), architecture))[1].module()
    parts = target_parts(wrap_model(tiny_model(architecture), name="tiny"))
    block = reference(architecture)
    tokens = torch.arange(3, 15).unsqueeze(0)
    features = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = list(head.teacher_forced(features, tokens, parts))
        embedded = parts.embed(tokens.roll(-1, 1))
        assert len(found) == 7
        torch.testing.assert_close(found[0][:, :-1], block(embedded, features)[:, :-1], rtol=1e-4, atol=1e-4)
        for begin in (1, 4, 6):
            states, own = features[:, : begin + 1], embedded[:, : begin + 1]
            for step in range(4):
                state = block(own, states)[:, -1:]
                torch.testing.assert_close(found[step][:, begin : begin + 1], state, rtol=1e-4, atol=1e-4)
                states = torch.cat([states, state], dim=1)
                own = torch.cat([own, embedded[:, begin + step + 1 : begin + step + 2]], dim=1)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_block_in_drafts_is_that_of_training(architecture: str, tmp_path: Path, backend: Any) -> None:
    layer: Any = read_head(save(tmp_path, reference(architecture), architecture))[1].module().layer
    stack = BlockStack(layer.as_blocks(32), num_slots=1, num_positions=32, capacity=32, backend=backend)
    inputs = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    work = Pass.of_chains([[0] * 9], slots=[0], prefix_lens=[0])
    expected = layer(inputs.unsqueeze(0))[0]
    torch.testing.assert_close(stack.run(inputs, work).float(), expected.detach(), rtol=1e-4, atol=1e-4)


def test_files_with_a_head_are_a_model(files: Path, tmp_path: Path) -> None:
    """So they can be a target or a draft model; only the conversion reads their head."""
    assert not holds_head(files)
    tiny_model("qwen3_5").save_pretrained(tmp_path / "plain")
    found = what_lies_at(files)
    assert found is not None
    assert found.is_model
    name, checkpoint = read_head(files)
    assert (name, checkpoint.config.method) == ("mtp", "mtp")
    assert report_of("inspect", str(files))["own_head"] == "mtp"
    assert "own_head" not in report_of("inspect", str(tmp_path / "plain"))


@pytest.mark.parametrize("place", ["the target's files", "named", "beside"])
def test_a_head_is_found_in_the_targets_files_or_beside(files: Path, place: str) -> None:
    """A head beside the target, as `foretoken convert TARGET TARGET-mtp` leaves it, comes first."""
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    expected = files
    if place == "beside":
        expected = files.with_name("target-mtp")
        write_head("native", read_head(files)[1], expected)
    elif place == "named":
        config["model"] = str(files)
    assert parse_speculative_config(config, target=str(files)).options[0].model == str(expected)
    assert "mtp:chain" in _setups(None, str(files), must_exist=True)
    (output,) = LLM(str(files), speculative_config=config).generate([PROMPTS[1]], GREEDY)
    assert output.metrics.num_drafted > 0
    assert output.outputs[0].token_ids == plain("lean-native")[1].outputs[0].token_ids


def test_targets_without_a_head_are_named(tmp_path: Path) -> None:
    tiny_model("qwen3_5").save_pretrained(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"head\. The target's files hold none, and there is no '.*target-mtp'"):
        LLM(str(tmp_path / "target"), speculative_config={"method": "mtp"})
    with pytest.raises(ConfigError, match="is a model, and method 'mtp' needs a mtp head"):
        LLM(str(tmp_path / "target"), speculative_config={"method": "mtp", "model": str(tmp_path / "target")})


def test_damaged_heads_in_the_targets_files_are_named(files: Path, tmp_path: Path) -> None:
    """Not "there is no head": neither by the command that converts it nor by the method."""
    save_file({"mtp.fc.weight": torch.zeros(2)}, files / "mtp.safetensors")
    assert_refused("missing: mtp.layers.0.input_layernorm.weight", "convert", str(files), str(tmp_path / "out"))
    stored = (files / "mtp.safetensors").read_bytes()
    (files / "mtp.safetensors").write_bytes(stored[:-1])
    with pytest.raises(ModelError, match=r"mtp\.safetensors is damaged"):
        LLM(str(files), speculative_config={"method": "mtp"})
    assert not (tmp_path / "out").exists()


def test_a_file_with_a_head_is_a_head(files: Path) -> None:
    """A model is never named by a file of safetensors."""
    assert holds_head(files / "mtp.safetensors")
    (output,) = LLM(str(files), speculative_config={"method": "mtp", "model": str(files / "mtp.safetensors")}).generate(
        [PROMPTS[1]], GREEDY
    )
    assert output.outputs[0].token_ids == plain("lean-native")[1].outputs[0].token_ids


def test_heads_that_are_not_served_are_named(tmp_path: Path) -> None:
    for wrong, error in (
        ({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, "has several blocks"),
        ({"mtp.layers.0.mlp.experts.up_proj": torch.zeros(2, 2)}, "lacks 'shared_expert_intermediate_size'"),
        ({"mtp.other": torch.zeros(2)}, "unexpected"),
    ):
        with pytest.raises(ModelError, match=error):
            read_head(save(tmp_path / "wrong", reference(), **wrong))


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    """As Qwen3-Next has them; they are the same head. A native call drafts with it, and changes no text."""
    joined, apart = tmp_path / "joined", tmp_path / "apart"
    save(joined, reference("qwen3_5_moe"), "qwen3_5_moe")
    save(apart, reference("qwen3_5_moe"), "qwen3_5_moe")
    tensors, at = load_file(apart / "mtp.safetensors"), "mtp.layers.0.mlp.experts"
    gate_up, down = tensors.pop(f"{at}.gate_up_proj"), tensors.pop(f"{at}.down_proj")
    for expert, both in enumerate(gate_up):
        parts = {"gate_proj": both[: len(both) // 2], "up_proj": both[len(both) // 2 :], "down_proj": down[expert]}
        tensors |= {f"{at}.{expert}.{name}.weight": part.contiguous() for name, part in parts.items()}
    save_file(tensors, apart / "mtp.safetensors")
    ours, theirs = (read_head(place)[1].weights for place in (joined, apart))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    texts = []
    for config in (None, {"method": "mtp", "tree": "chain", "num_speculative_tokens": 2}):
        llm = LLM(str(apart), max_num_seqs=4, speculative_config=config)
        texts.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)])
    assert llm.drafters[0]._whole_drafts is not None
    assert texts[0] == texts[1]


@cache
def plain(runner: str) -> Any:
    return LLM(tiny_model("qwen3_5"), max_num_seqs=1, runner=runner).generate([*PROMPTS, *PROMPTS], PARAMS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that has learned what plain decoding writes, in a directory of its own."""
    directory = tmp_path_factory.mktemp("mtp")
    target = wrap_model(tiny_model("qwen3_5"), name="qwen3_5")
    parts = target_parts(target)
    _, checkpoint = read_head(save(directory / "target", reference()), target=TargetFingerprint.of(target))
    head = checkpoint.module().requires_grad_(requires_grad=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    texts = [torch.tensor([[*each.prompt_token_ids, *each.outputs[0].token_ids]]) for each in plain("lean-native")[:4]]
    features = [Teacher(target, ("final",)).read_features(text).float() for text in texts]
    for _ in range(40):
        for text, read in zip(texts, features, strict=True):
            hidden = list(head.teacher_forced(read, text, parts))[:3]
            losses = [
                cross_entropy(head.draft_logits(step, each, parts)[0, : -2 - step], text[0, 2 + step :])
                for step, each in enumerate(hidden)
            ]
            sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    native.write_checkpoint(type(checkpoint).of_head(head, target=checkpoint.target), directory / "head")
    return directory / "head"


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_text_is_plain_decodings(trained: Path, tree: str) -> None:
    """Greedy and sampled requests in one batch, on both runners, with the same tokens a pass."""
    config = {"method": "mtp", "model": str(trained), "num_speculative_tokens": 3, "tree": tree}
    num_passes = []
    for runner in ("generic", "lean-native"):
        # All prompts are read in the first pass: how many a pass beside decoding reads depends on its seconds.
        llm = LLM(tiny_model("qwen3_5"), max_num_seqs=8, runner=runner, speculative_config=config)
        outputs = llm.generate([*PROMPTS, *PROMPTS], PARAMS)
        assert_same_text(outputs, plain(runner), [tree] * 8, tolerance=1e-4)
        assert all(each.metrics.draft_errors == 0 for each in outputs)
        num_passes.append([each.metrics.steps for each in outputs])
        assert sum(each.metrics.num_accepted for each in outputs[:4]) > sum(num_passes[-1][:4])  # two tokens a pass
    assert num_passes[0] == num_passes[1]


def test_heads_in_the_files_of_another_model_are_refused(files: Path, tmp_path: Path) -> None:
    """Of the same sizes, by its LM head; so is the head that `convert` wrote from these files."""
    output_of("convert", str(files), str(tmp_path / "converted"))
    for place in (files, tmp_path / "converted"):
        with pytest.raises(ConfigError, match=f"was trained for '{files}', not for .*: it has weights"):
            LLM(tiny_model("qwen3_5", seed=1), speculative_config={"method": "mtp", "model": str(place)})
    LLM(str(files), dtype="float16", speculative_config="mtp")  # float16 rounds an LM head otherwise


@pytest.mark.parametrize("is_indexed", [False, True])
def test_quantized_targets_keep_their_head(files: Path, tmp_path: Path, *, is_indexed: bool) -> None:
    """Also one in a file that transformers does not read; its matrices stay as they are, and vLLM is told so."""
    out = tmp_path / "out"
    if is_indexed:  # then other files do not count
        places = {key: path.name for path in files.glob("*.safetensors") for key in load_file(path)}
        (files / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        head = {key: torch.zeros_like(value) for key, value in load_file(files / "mtp.safetensors").items()}
        save_file(head, files / "old.safetensors")
    output_of("quantize", str(files), str(out), "--scheme", "W8A16", "--no-compare")
    kept, original = (read_head(place)[1].weights for place in (out, files))
    assert all(torch.equal(kept[key], original[key]) for key in kept.keys() | original.keys())
    assert "re:^mtp" in (out / "config.json").read_text()
    configs: list[Any] = [None, {"method": "mtp", "num_speculative_tokens": 2}]
    texts = [LLM(str(out), speculative_config=each).generate([PROMPTS[1]], GREEDY)[0] for each in configs]
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids
    assert texts[1].metrics.num_drafted > 0


def test_another_target_is_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match="was trained for"):
        LLM(tiny_model("llama"), speculative_config={"method": "mtp", "model": str(trained)})
