"""SPiRe's network against its formulas, one token after another; what starts as the target's; refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from foretoken.core.errors import ConfigError
from foretoken.heads.base import WindowPositions, build_head
from foretoken.heads.spire import SpireConfig, SpireHead, evenly_spaced
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.parts import TargetParts, target_parts
from foretoken.training.objectives import head_config
from foretoken.training.teacher import Teacher

SAME = {"rtol": 1e-9, "atol": 1e-9}
S, K = 14, 4


def target_of(architecture: str = "llama", **changes: Any) -> LoadedModel:
    return wrap_model(tiny_model(architecture, dtype=torch.float64, **changes), name=architecture)


def head_of(target: LoadedModel, *, is_random: bool = True, **sizes: Any) -> tuple[SpireHead, TargetParts]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build_head(head_config("spire", target, {"num_steps": K, **sizes}), dtype=torch.float64)
        assert isinstance(head, SpireHead)
        parts = target_parts(target)
        head.initialize(parts)
        if is_random:
            for parameter in head.parameters():
                torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return head, parts


def text_and_features(target: LoadedModel, config: SpireConfig) -> tuple[Tensor, Tensor]:
    text = torch.randint(3, target.vocab_size, (2, S), generator=torch.Generator().manual_seed(4))
    read = Teacher(target, config.taps).read_features(text)
    return text, read[..., : len(config.taps) * config.hidden_size]


def turned(x: Tensor, position: int, config: SpireConfig) -> Tensor:
    """(heads, Dh), rotated by the definition."""
    size = config.layer.head_dim
    angles = position * config.layer.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def normed(x: Tensor, weight: Tensor, config: SpireConfig) -> Tensor:
    return rms_norm(x, x.shape, weight, config.layer.rms_norm_eps)


class Slow:
    """Drafts of one text after position `begin`, token by token, by the formulas of the module."""

    def __init__(self, head: SpireHead, parts: TargetParts, tokens: Tensor, features: Tensor) -> None:
        self.head, self.parts, self.tokens, self.features = head, parts, tokens, features

    def row(self, states: list[Tensor], position: int) -> tuple[Tensor, Tensor]:
        """The (Hk, Dh) key and value of a memory."""
        config = self.head.config
        own = self.head.memory
        assert own is not None
        shares = own.mix.exp() / own.mix.exp().sum()
        memory = torch.stack([w * h for w, h in zip(shares, states, strict=True)]).sum(0)
        x = normed(memory, own.norm, config)
        by_head = (-1, config.layer.head_dim)
        return turned(own.k_proj(x).view(by_head), position, config), own.v_proj(x).view(by_head)

    def token(self, token: Tensor, position: int, rows: dict[int, tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The states of a token that sees the memories within sight."""
        config = self.head.config
        seen = [at for at in sorted(rows) if at < config.sinks or position - at < config.window]
        x = self.parts.embed(token)
        states = [x]
        for layer in self.head._blocks():
            assert layer.input_norm is not None
            query = layer.q_proj(normed(x, layer.input_norm, config)).view(-1, config.layer.head_dim)
            query = turned(query, position, config)
            group = config.layer.num_attention_heads // config.layer.num_key_value_heads
            mixed = []
            for number, of_head in enumerate(query):
                keys = torch.stack([rows[at][0][number // group] for at in seen])
                values = torch.stack([rows[at][1][number // group] for at in seen])
                mixed.append((keys @ of_head / config.layer.head_dim**0.5).softmax(0) @ values)
            x = x + layer.o_proj(torch.cat(mixed))
            inner = normed(x, layer.post_attention_norm, config)
            x = x + layer.down_proj(silu(layer.gate_proj(inner)) * layer.up_proj(inner))
            states.append(x)
        return states

    def steps(self, begin: int) -> list[Tensor]:
        """The outputs of the steps of the draft after position `begin`."""
        config, outputs, rows = self.head.config, [], {}
        for at in range(begin + 1):
            kept = list(self.features[at].view(config.num_layers, -1))
            rows[at] = self.row([self.parts.embed(self.tokens[at]), *kept], at)
        for at in range(begin + 1, min(begin + 1 + K, S)):
            states = self.token(self.tokens[at], at, rows)
            rows[at] = self.row(states, at)
            assert self.parts.final_norm is not None
            outputs.append(self.parts.final_norm(states[-1]))
        return outputs


@pytest.mark.parametrize(
    "sizes",
    [{}, {"window": 3, "sinks": 1}, {"window": 2, "sinks": 0}, {"num_layers": 1, "window": 5}, {"num_layers": 3}],
)
@torch.no_grad()
def test_training_computes_the_formulas(sizes: dict[str, Any]) -> None:
    """All drafts at once, and those of every third position alone, as each draft token by token."""
    target = target_of()
    head, parts = head_of(target, **sizes)
    text, features = text_and_features(target, head.config)
    whole = list(head.unrolled(features, text, parts))
    followed = list(head.unrolled(features, text, parts, starts=slice(1, None, 3)))
    assert len(whole) == K
    for row in range(len(text)):
        slow = Slow(head, parts, text[row], features[row])
        for begin in range(S - 1):
            for step, expected in enumerate(slow.steps(begin)):
                torch.testing.assert_close(whole[step][row, begin], expected, **SAME)
                if begin % 3 == 1 and step:
                    torch.testing.assert_close(followed[step][row, begin // 3], expected, **SAME)


@pytest.mark.parametrize("has_feedback", [True, False])
@torch.no_grad()
def test_tokens_out_of_sight_do_not_matter(has_feedback: bool) -> None:
    """One block, so that nothing is handed on: another token at position 4 shows at 5 to 8 and nowhere else."""
    target = target_of()
    head, parts = head_of(target, num_layers=1, sinks=2, window=5, has_feedback=has_feedback)
    text, features = text_and_features(target, head.config)
    changed, moved = text.clone(), features.clone()
    changed[:, 4] = (changed[:, 4] + 1) % target.vocab_size
    moved[:, 4] += 1.0
    before, after = (next(iter(head.unrolled(f, t, parts))) for f, t in ((features, text), (moved, changed)))
    differs = [begin + 1 for begin in range(S - 1) if not torch.equal(before[:, begin], after[:, begin])]
    assert differs == [4, 5, 6, 7, 8]
    changed, moved = text.clone(), features.clone()
    changed[:, 1], moved[:, 1] = (changed[:, 1] + 1) % target.vocab_size, moved[:, 1] + 1.0
    after = next(iter(head.unrolled(moved, changed, parts)))  # a sink
    assert not any(torch.equal(before[:, begin], after[:, begin]) for begin in range(1, S - 1))


@torch.no_grad()
def test_offset_positions_turn_alone() -> None:
    """Sight goes by the place in the window; equal offsets of all tokens change nothing, later ones do."""
    target = target_of(max_position_embeddings=500)
    head, parts = head_of(target, sinks=2, window=5)
    text, features = text_and_features(target, head.config)
    plain, all_moved, apart = (
        list(head.unrolled(features, text, parts, WindowPositions(torch.full((2, 1), anchor), torch.full((2, 1), 90))))
        if anchor is not None
        else list(head.unrolled(features, text, parts))
        for anchor in (None, 0, 2)
    )
    for step in range(K):
        torch.testing.assert_close(plain[step], all_moved[step], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(plain[0][:, 4:], apart[0][:, 4:], rtol=1e-3)


@torch.no_grad()
def test_all_blocks_without_feedback_are_the_target() -> None:
    """Pruned by nothing and with a window over the whole text, the draft is the target."""
    target = target_of()
    head, parts = head_of(target, is_random=False, num_layers=3, window=100, has_feedback=False)
    text = text_and_features(target, head.config)[0]
    logits = tiny_model("llama", dtype=torch.float64)(text).logits
    for step, hidden in enumerate(head.unrolled(torch.empty(0), text, parts)):
        drafted = head.draft_logits(step, hidden, parts)[:, : S - 1 - step]
        # transformers turns by angles in float32
        torch.testing.assert_close(drafted, logits[:, step + 1 :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_feedback", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_pruned_blocks_begin_as_the_targets_bit_for_bit(architecture: str, has_feedback: bool) -> None:
    target = target_of(architecture)
    head, _ = head_of(target, is_random=False, num_layers=2, has_feedback=has_feedback)
    assert head.config.kept_layers == (0, 2)
    names = {"input_norm": "input_layernorm.weight", "post_attention_norm": "post_attention_layernorm.weight"}
    weights = dict(target.module.named_parameters())
    for own, kept in zip(head.layers, head.config.kept_layers, strict=True):
        copied = own.state_dict()
        assert ("k_proj.weight" in copied) == (not has_feedback)
        for key, tensor in copied.items():
            part = "mlp" if key.startswith(("gate", "up", "down")) else "self_attn"
            assert torch.equal(tensor, weights[f"model.layers.{kept}.{names.get(key, f'{part}.{key}')}"]), key
    if has_feedback:
        assert head.memory is not None
        assert torch.equal(head.memory.norm, weights["model.layers.0.input_layernorm.weight"])
        assert torch.equal(head.memory.v_proj.weight, weights["model.layers.0.self_attn.v_proj.weight"])
        assert torch.equal(head.memory.k_proj.weight, weights["model.layers.0.self_attn.k_proj.weight"])


def test_fresh_blocks_are_not_the_targets() -> None:
    head, _ = head_of(target_of("gpt2"), is_random=False, num_layers=2, is_pruned=False)
    assert all(not layer.o_proj.weight.any() for layer in head._blocks())


def test_only_the_draft_learns() -> None:
    target = target_of()
    head, _ = head_of(target)
    parts = target_parts(target, dtype=torch.float64)
    text, features = text_and_features(target, head.config)
    loss = torch.zeros((), dtype=torch.float64)
    for step, hidden in enumerate(head.unrolled(features, text, parts)):
        loss = loss + head.draft_logits(step, hidden, parts).square().mean()
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in target.module.parameters())


def test_gradients_flow_through_drafted_memories_unless_detached() -> None:
    """A draft's second step reaches its first token through the memory alone."""
    target = target_of()
    head, parts = head_of(target)
    text, features = text_and_features(target, head.config)
    embedded: list[Tensor] = []

    def embed(tokens: Tensor) -> Tensor:
        embedded.append(parts.embed(tokens).detach().requires_grad_())
        return embedded[-1]

    for is_detached in (False, True):
        embedded.clear()
        outputs = list(head.unrolled(features, text, replace(parts, embed=embed), is_detached=is_detached))
        committed, first, second, *_ = torch.autograd.grad(outputs[1][:, 5].sum(), embedded, allow_unused=True)
        assert committed[:, :6].any()
        assert second[:, 5].any()
        assert (first is not None) == (not is_detached)


@pytest.mark.parametrize(
    ("layers", "kept", "expected"), [(12, 2, (0, 11)), (12, 3, (0, 6, 11)), (12, 4, (0, 4, 7, 11)), (5, 1, (0,))]
)
def test_kept_blocks_are_evenly_spaced(layers: int, kept: int, expected: tuple[int, ...]) -> None:
    assert evenly_spaced(layers, kept) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 4}, "num_layers is 4, and the target has 3 blocks"),
        ({"kept_layers": [0, 3]}, "Expected 2 ascending numbers from 0 to 2"),
        ({"kept_layers": [1, 1]}, "Expected 2 ascending numbers from 0 to 2"),
        ({"window": 1}, "window"),
        ({"num_layers": "many"}, "num_layers"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        head_config("spire", target_of(), sizes)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "qwen3"])
def test_blocks_that_are_no_llamas_are_not_copied(architecture: str) -> None:
    with pytest.raises(ConfigError, match="is_pruned=false"):
        head_of(target_of(architecture))
