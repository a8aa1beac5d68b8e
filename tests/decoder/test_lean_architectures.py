"""The lean decoders over architectures other than Llama's, against the generic one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from decoder.lean_models import LEAN, TOLERANCE, assert_exact, assert_like_generic, runner
from pairwise import slow_products
from tiny_models import CONTEXT_LEN, LEAN_ARCHITECTURES, random_model, tiny_config, tiny_model
from torch import Tensor, nn
from tree_decoding import SLOTS, decode

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

pytestmark = pytest.mark.native

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "short_factor": [1.0, 3.0],
    "long_factor": [9.0, 9.0], "original_max_position_embeddings": 64,
}  # fmt: skip
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}
PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

# What published checkpoints of these architectures differ in, each where it could be lost.
VARIANTS: dict[str, Any] = {
    "phi3": tiny_config("phi3"),
    "phi3 turned in part": tiny_config("phi3", rope_parameters=PARTLY, sliding_window=None),
    "phi3 longrope": tiny_config(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64, sliding_window=None
    ),
    "gemma2": tiny_config("gemma2"),
    "gemma3": tiny_config("gemma3"),
    "gemma3 two rotations": tiny_config("gemma3", rope_parameters=BY_KIND, final_logit_softcapping=3.0),
    "gemma3 tied": tiny_config("gemma3", tie_word_embeddings=True, attention_bias=True),
    "smollm3": tiny_config("smollm3"),
    "smollm3 sliding": tiny_config("smollm3", use_sliding_window=True, sliding_window=6, attention_bias=True),
    "olmo2": tiny_config("olmo2"),
    "olmo2 odd sizes": tiny_config(
        "olmo2", hidden_size=36, num_attention_heads=6, num_key_value_heads=3, intermediate_size=101
    ),
    "olmo3": hf.Olmo3Config(
        **tiny_config("olmo2").to_dict()
        | {
            "model_type": "olmo3",
            "sliding_window": 6,
            "rope_parameters": BY_KIND,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    ),
    "starcoder2": tiny_config("starcoder2"),
    "starcoder2 gelu": tiny_config("starcoder2", hidden_act="gelu", use_bias=False, sliding_window=None),
    "llama gelu": tiny_config("llama", hidden_act="gelu"),
    "mixtral": tiny_config("mixtral", sliding_window=6),
    "qwen3_moe": tiny_config("qwen3_moe"),
    "qwen3_moe as the router says": tiny_config("qwen3_moe", norm_topk_prob=False),
    "qwen3_moe some dense": tiny_config("qwen3_moe", mlp_only_layers=[1]),
    "qwen3_moe many experts": tiny_config(
        "qwen3_moe", num_experts=19, num_experts_per_tok=5, moe_intermediate_size=24, hidden_size=40
    ),
    "qwen3_moe all experts": tiny_config("qwen3_moe", num_experts_per_tok=4),
}
NEW = [name for name in LEAN_ARCHITECTURES if name in VARIANTS]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", LEAN)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_generic_runners(variant: str, kind: str) -> None:
    assert_like_generic(VARIANTS[variant], kind)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    slow_products([name for name in NEW if name not in ("mixtral", "qwen3_moe")], LEAN, each=1),
)
def test_no_further_from_the_truth_than_the_generic_runner(architecture: str, kind: str) -> None:
    """In bfloat16 two correct forwards differ visibly; float64 tells which is nearer. (Not of experts: one token that
    goes to another one outweighs all roundings.)"""
    config = VARIANTS[architecture]
    exact = wrap_model(random_model(config, dtype=torch.bfloat16).double(), name="exact")
    truth = decode(Runner(exact, num_slots=4, max_nodes=12, runner="generic"))
    errors = {}
    for k in (kind, "generic"):
        done = decode(runner(config, k, torch.bfloat16, max_nodes=12))
        errors[k] = max(
            float((a.logits(row) - b.logits(row)).norm() / b.logits(row).norm())
            for a, b in zip(done, truth, strict=True)
            for row in range(len(SLOTS))
        )
    assert errors[kind] <= 1.3 * errors["generic"] + 1e-6


@pytest.mark.parametrize(
    ("variant", "dtype"),
    slow_products([*NEW, "olmo2 odd sizes", "qwen3_moe many experts", "starcoder2 gelu"], DTYPES, each=1),
)
def test_native_arithmetic_does_not_depend_on_company(variant: str, dtype: torch.dtype) -> None:
    assert_exact(runner(VARIANTS[variant], "lean-native", dtype, max_nodes=40))


@pytest.mark.parametrize(("architecture", "kind"), slow_products(NEW, LEAN, each=1))
def test_greedy_text_with_trees_is_the_generic_runners(architecture: str, kind: str) -> None:
    module, prompts = tiny_model(architecture), [[7, 8, 9] * 3, [40, 3, 12, 9, 61, 17]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = LLM(module, runner="generic").generate(prompts, params)
    config = {"method": "ngram", "tree": "tree", "prompt_lookup_min": 1}
    ours = LLM(module, runner=kind, speculative_config=config, max_num_seqs=2).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.parametrize(
    ("architecture", "dtype", "place"), slow_products(LEAN_ARCHITECTURES, DTYPES, range(3), each=1)
)
def test_decoders_of_one_model_do_not_disturb_each_other(architecture: str, dtype: torch.dtype, place: int) -> None:
    """One loaded model, one of three orders: each decoder gives what it gives alone, and that is right.

    Half of the orders in each dtype: of both halves each decoder is the first once, and the next after each other one,
    as all run twice.
    """
    tree = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])])
    kinds = (*LEAN, "generic")

    def logits(model: Any, kind: str) -> Tensor:
        found = Runner(model, num_slots=1, runner=kind).verify([0], [0], tree).logits
        assert found is not None
        return found

    def loaded() -> Any:
        return replace(wrap_model(tiny_model(architecture, dtype=dtype), name="tiny"), is_borrowed=False)

    alone = {kind: logits(loaded(), kind) for kind in kinds}
    tolerance = TOLERANCE if dtype == torch.float32 else 0.1  # another matrix gives 0.5 and more
    for kind in LEAN:
        assert (alone[kind] - alone["generic"]).abs().max() <= tolerance * alone["generic"].abs().max()
    by_sign = {torch.float32: (0, 3, 4), torch.bfloat16: (1, 2, 5)}  # even and odd permutations
    order = list(itertools.permutations(kinds))[by_sign[dtype][place]]
    model = loaded()
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    for kind in (*order, *order):
        assert torch.equal(logits(model, kind), alone[kind])
    assert all(torch.equal(before[key], value) for key, value in model.module.state_dict().items())


def test_weights_that_are_fused_already_are_joined_where_they_are() -> None:
    """In float64 nothing is packed: Phi-3's projections are the memory of the stock decoder's."""
    model = replace(wrap_model(tiny_model("phi3", dtype=torch.float64), name="tiny"), is_borrowed=False)
    made: Any = Runner(model, num_slots=1, runner="lean-stock")
    layer: Any = model.backbone.layers[1]  # type: ignore[index]
    fused = made.decoder._blocks._layers[1]
    assert fused.query_key_value._weight.data_ptr() == layer.self_attn.qkv_proj.weight.data_ptr()
    assert fused.mlp._up._weight.data_ptr() == layer.mlp.gate_up_proj.weight.data_ptr()


def test_longrope_never_leaves_its_short_frequencies() -> None:
    """They are the same at every length only up to the original one, where the context ends."""
    made = runner(VARIANTS["phi3 longrope"], "lean-native")
    assert made.context_len == made.last_position + 1 == 64 < CONTEXT_LEN


class TestWhatIsLeftToTheGenericRunner:
    @staticmethod
    def foreign() -> dict[str, nn.Module]:
        router, experts, fused = tiny_model("qwen3_moe"), tiny_model("mixtral"), tiny_model("phi3")
        router.model.layers[1].mlp.gate.register_forward_hook(lambda *event: event[2])
        moe = experts.model.layers[0].mlp
        moe.experts = type("Own", (type(moe.experts),), {"__module__": "elsewhere"})(experts.config)
        fused.model.layers[2].mlp.gate_up_proj = nn.Sequential(fused.model.layers[2].mlp.gate_up_proj)
        return {
            "model.layers.1.mlp.gate has a forward hook": router,
            "mlp.experts (Own) is not a plain linear layer": experts,
            "gate_up_proj (Sequential) is not a plain linear layer": fused,
            "with bidirectional attention": tiny_model("gemma3", use_bidirectional_attention=True),
        }

    @pytest.mark.parametrize("reason", list(foreign()))
    def test_it_is_named(self, reason: str) -> None:
        model = wrap_model(self.foreign()[reason], name="foreign")
        with pytest.raises(ModelError, match=r"runner 'lean' cannot run 'foreign'") as caught:
            Runner(model, num_slots=1, runner="lean")
        assert reason in str(caught.value)
