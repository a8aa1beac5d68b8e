"""Attention inside transformers: the registered function, and adapters of architectures that do not call it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from pairwise import slow_products
from plain_model import FLOAT32_TOLERANCE, PlainModel
from tiny_models import WINDOW, random_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from tree_decoding import MAX_NODES, decode, path_error

from foretoken import LLM, SamplingParams
from foretoken.attention.layout import AttentionLayout, reference_attention
from foretoken.core.errors import ModelError
from foretoken.core.passes import Pass
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.models import plugin
from foretoken.models.forward_pass import ATTENTION_NAME, ForwardPass, current_pass, running
from foretoken.models.loading import load_model, wrap_model
from foretoken.models.plugin import as_transformers_cache
from foretoken.runner.runner import Runner

HEADS, WIDTH, LENGTH = 2, 4, 5


def attend(module: dict[str, Any], **arguments: Any) -> tuple[torch.Tensor, ForwardPass]:
    """A prompt of five tokens through the registered function, with scores large enough to tell scales apart."""
    generator = torch.Generator().manual_seed(0)
    states = 2 * torch.randn(3, 1, HEADS, LENGTH, WIDTH, generator=generator)
    layout = AttentionLayout(Pass.of_chains([[0] * LENGTH], slots=[0], prefix_lens=[0]))
    with running(ForwardPass(layout=layout)) as forward_pass:
        function = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
        output, weights = function(
            SimpleNamespace(**module), *states, arguments.pop("attention_mask", None), **arguments
        )
    assert weights is None
    return output[0], forward_pass


def expected(*, scale: float, window: int | None = None, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = 2 * torch.randn(3, HEADS, LENGTH, WIDTH, generator=generator)
    back = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    mask = (back >= 0) & (back < (window or LENGTH))
    return reference_attention(query, key, value, mask, scale=scale, **options).transpose(0, 1)


@pytest.mark.parametrize(
    ("module", "arguments", "window"),
    [
        ({}, {}, None),
        ({"sliding_window": 3}, {}, 3),  # held by the layer only
        ({}, {"sliding_window": 3}, 3),
        ({"sliding_window": 2}, {"sliding_window": 3}, 3),
        ({"sliding_window": 2}, {"sliding_window": None}, None),  # a full layer of a model that slides elsewhere
    ],
)
def test_window(module: dict[str, Any], arguments: dict[str, Any], window: int | None) -> None:
    output, forward_pass = attend({"layer_idx": 7, **module}, **arguments)
    torch.testing.assert_close(output, expected(scale=0.5, window=window))  # 0.5 is 1 / sqrt(4), the default
    assert forward_pass.windows == {7: window}


def test_scale_cap_and_sinks() -> None:
    sinks = torch.tensor([0.5, -1.0])
    output, _ = attend({}, scaling=0.3, softcap=2.0, s_aux=sinks)
    torch.testing.assert_close(output, expected(scale=0.3, softcap=2.0, sinks=sinks))


def test_layers_without_an_index_are_counted() -> None:
    layout = AttentionLayout(Pass.of_chains([[0]], slots=[0], prefix_lens=[0]))
    one = torch.ones(1, 1, 1, 1)
    with running(ForwardPass(layout=layout)) as forward_pass:
        for _ in range(3):
            ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](SimpleNamespace(sliding_window=9), one, one, one, None)
    assert forward_pass.windows == {0: 9, 1: 9, 2: 9}


@pytest.mark.parametrize("name", ["attention_mask", "position_bias", "block_indices"])
def test_what_a_tree_would_lose_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=rf"hands {name} to attention, which foretoken cannot apply to a token tree"):
        attend({}, **{name: torch.zeros(1, 1, LENGTH, LENGTH)})


def test_what_models_merely_hand_on_is_not() -> None:
    output, _ = attend({}, position_ids=torch.arange(LENGTH), dropout=0.0, is_causal=True, use_cache=True, indices=None)
    torch.testing.assert_close(output, expected(scale=0.5))


def test_passes_nest_and_end() -> None:
    layout = AttentionLayout(Pass.of_chains([[0]], slots=[0], prefix_lens=[0]))
    assert current_pass() is None
    with running(ForwardPass(layout=layout)) as outer:
        with running(ForwardPass(layout=layout)) as inner:
            assert current_pass() is inner
        assert current_pass() is outer
        with pytest.raises(ZeroDivisionError), running(ForwardPass(layout=layout)):
            raise ZeroDivisionError
        assert current_pass() is outer
    assert current_pass() is None


def test_the_cache_is_written_only_inside_a_pass() -> None:
    store = SlotCache([LayerShape(1, 1, 1)], num_slots=1, capacity=4, dtype=torch.float32, device=torch.device("cpu"))
    cache = as_transformers_cache(store)
    one = torch.ones(1, 1, 1, 1)
    with pytest.raises(AssertionError, match="only inside a pass"):
        cache.update(one, one, 0)
    layout = AttentionLayout(Pass.of_chains([[0]], slots=[0], prefix_lens=[2]))
    with running(ForwardPass(layout=layout)):
        keys, values = cache.update(one, -one, 0)
    assert keys.flatten().tolist() == [0, 0, 1, 0]
    assert values.flatten().tolist() == [0, 0, -1, 0]


_IDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.25}
_SIZES = {"vocab_size": 67, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 96, **_IDS}
_GPT: dict[str, Any] = {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, **_IDS}
ADAPTED: dict[str, Callable[[], Any]] = {
    "falcon": lambda: hf.FalconConfig(**_SIZES, num_hidden_layers=2),
    "falcon without shared keys": lambda: hf.FalconConfig(
        **_SIZES, num_hidden_layers=2, multi_query=False, parallel_attn=False, bias=True
    ),
    "falcon 40b": lambda: hf.FalconConfig(**_SIZES, num_hidden_layers=2, new_decoder_architecture=True, num_kv_heads=2),
    "gptj": lambda: hf.GPTJConfig(**_GPT, rotary_dim=4),
    "codegen": lambda: hf.CodeGenConfig(**_GPT, rotary_dim=4),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=67,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=96,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        **_IDS,
    ),
    # Attends through the plug-in, and takes a view of what it gives: a batch of trees used to crash.
    "jetmoe": lambda: hf.JetMoeConfig(
        vocab_size=67,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=48,
        max_position_embeddings=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_IDS,
    ),
}


def runner(architecture: str, dtype: torch.dtype = torch.float32) -> Runner:
    model = wrap_model(random_model(ADAPTED[architecture](), dtype=dtype), name=architecture)
    return Runner(model, num_slots=4, max_nodes=MAX_NODES)


def has_attention(architecture: str, attention: str) -> bool:
    """Whether transformers has it."""
    return attention == "eager" or not architecture.startswith(("gpt", "codegen"))


@pytest.mark.parametrize("architecture", ADAPTED)
def test_nodes_equal_their_paths(architecture: str) -> None:
    plain = PlainModel(random_model(ADAPTED[architecture]()))
    assert path_error(plain, decode(runner(architecture), rounds=3)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("architecture", [name for name in ADAPTED if name != "jetmoe"])
def test_other_dtypes_pass_the_self_test(architecture: str, dtype: torch.dtype) -> None:
    assert runner(architecture, dtype).name == "generic"


@pytest.mark.parametrize(
    ("architecture", "attention"), slow_products(list(ADAPTED), ["eager", "sdpa"], each=1, allowed=has_attention)
)
def test_the_text_is_the_models_own(architecture: str, attention: str, tmp_path: Path) -> None:
    module = random_model(ADAPTED[architecture]())
    module.save_pretrained(tmp_path)
    module = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
    ids = torch.tensor([[5, 9, 3]])
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    expected = module.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 3:].tolist()
    for model in (module, load_model(tmp_path)):
        llm = LLM(model, speculative_config={"method": "ngram"})
        outputs = llm.generate([[5, 9, 3], [7, 8, 7, 8, 7]], SamplingParams(temperature=0.0, max_tokens=8))
        assert outputs[0].outputs[0].token_ids == expected
    assert module.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 3:].tolist() == expected


@pytest.mark.parametrize("architecture", [name for name in ADAPTED if name != "jetmoe"])
def test_control_a_wrong_adapter_is_refused(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test stands behind the adapters: a lost scale, or no adapter at all."""
    whole = plugin.tree_attention

    def other_scale(*args: Any, scale: float, **options: Any) -> Any:
        return whole(*args, scale=2.0 * scale, **options)

    monkeypatch.setattr(plugin, "tree_attention", other_scale)
    with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
        runner(architecture)
    monkeypatch.setattr("foretoken.models.plugin.adapt_attention", lambda module: False)
    with pytest.raises(ModelError, match="ignores the attention plug-in"):
        runner(architecture)
