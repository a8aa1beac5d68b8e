"""GGUF files of models with recurrent layers: logits and text are those of transformers' model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from models.gguf_files import add_tokens
from models.gguf_hybrid_files import write_hybrid
from models.test_gguf import SMALL, refusal, same_logits, told
from tiny_models import random_model, tiny_config
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.formats.registry import holds_head, holds_own_head, read_head
from foretoken.models.describe import describe_gguf
from foretoken.models.loading import load_model
from foretoken.models.stored.gguf import open_gguf
from foretoken.models.stored.gguf_file import read_gguf
from models import gguf_hybrid_files

_TYPES = ["linear_attention", "full_attention", "linear_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_EXPERTS = {
    "head_dim": 16, "rope_parameters": _ROPE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
_MAMBA = {"mamba_d_head": 16}
_GRANITE = _MAMBA | {
    "shared_intermediate_size": 32, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}  # fmt: skip
_FALCON = _MAMBA | {
    "mamba_d_ssm": 128, "head_dim": 32, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [0.9, 1.1],
    "mamba_norm_before_gate": False,
}  # fmt: skip
_NEMOTRON = {"mamba_head_dim": 16, "num_hidden_layers": 4, "head_dim": 32}
_PLAIN_EXPERTS = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
_MAMBA1 = {"time_step_rank": 32, "intermediate_size": 128, "use_bias": False}
_JAMBA = {"mamba_dt_rank": 32}
_LENGTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2 tied": ("lfm2", {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True, "conv_L_cache": 4}),
    "lfm2 of wide heads": ("lfm2", {"block_auto_adjust_ff_dim": False, "head_dim": 32}),
    "qwen35": ("qwen3_5", {"head_dim": 16, "rope_parameters": _ROPE}),
    "qwen35 of one head of values for each of keys": (
        "qwen3_5", {"head_dim": 16, "linear_num_key_heads": 4, "tie_word_embeddings": True, "rope_parameters": _ROPE},
    ),
    "qwen35 of six heads": (
        "qwen3_5", {
            "head_dim": 32, "linear_num_value_heads": 6, "num_hidden_layers": 4, "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"], "rope_parameters": _ROPE,
        },
    ),
    "qwen35 with experts": ("qwen3_5_moe", _EXPERTS),
    "qwen3next": ("qwen3_next", _EXPERTS),
    "qwen3next of three values for each key": ("qwen3_next", _EXPERTS | {
        "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True,
    }),
    # llama.cpp scales experts by nothing else.
    "lfm2moe": (
        "lfm2_moe", {"moe_intermediate_size": 32, "tie_word_embeddings": True, "routed_scaling_factor": 1.0},
    ),
    "granite with experts": ("granitemoehybrid", _GRANITE | {"intermediate_size": 32}),
    "granite without experts": (
        "granitemoehybrid", _GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 32},
    ),
    "granite that rotates": ("granitemoehybrid", _GRANITE | {"position_embedding_type": "rope"}),
    "bamba": ("bamba", _MAMBA),
    "bamba that rotates whole heads": ("bamba", _MAMBA | {"rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}}),
    "falcon-h1": ("falcon_h1", _FALCON),
    "falcon-h1 without norms": ("falcon_h1", _FALCON | {"mamba_rms_norm": False, "mamba_conv_bias": False}),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h with experts": ("nemotron_h_moe", _NEMOTRON | _PLAIN_EXPERTS),
    "nemotron_h with experts of a latent size": (
        "nemotron_h_moe", _NEMOTRON | _PLAIN_EXPERTS | {"moe_latent_size": 32, "norm_topk_prob": False},
    ),
    "nemotron_h with groups of experts": (
        "nemotron_h_moe", _NEMOTRON | _PLAIN_EXPERTS | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "mamba": ("mamba", _MAMBA1),
    "mamba tied": ("mamba", _MAMBA1 | {"tie_word_embeddings": True, "use_conv_bias": False, "conv_kernel": 3}),
    "falcon mamba": ("falcon_mamba", _MAMBA1),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 32, "use_bias": False}),
    "mamba2 with biases": ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 1, "use_conv_bias": False}),
    "jamba": ("jamba", _JAMBA),
    "jamba of one attention layer": ("jamba", _JAMBA | {"attn_layer_period": 8, "mamba_conv_bias": False}),
    "jamba without experts": (
        "jamba", _JAMBA | {"num_hidden_layers": 4, "num_experts": 1, "num_experts_per_tok": 1},
    ),
}  # fmt: skip
_TOLD = [name for name in MODELS if name.startswith(("lfm2 ", "qwen35")) or name == "lfm2"]
_TOLD.remove("qwen35 with experts")  # has an inner size of its own


def written(path: Path, name: str, matrices: Type | Callable[[str], Type] = Type.F32, **options: Any) -> Any:
    """Writes the file of a random model; gives the model that the file stands for."""
    architecture, changes = MODELS[name]
    model = random_model(tiny_config(architecture, **SMALL | changes))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("A_log", "dt_bias")):
                weight.copy_(torch.randn_like(weight))
    values = {"attention.key_length": 32} if name.endswith("wide heads") else {}
    return write_hybrid(path, model, matrices=matrices, **{"values": values} | options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("type_", [Type.F32, Type.F16, Type.Q8_0])
def test_logits_are_those_of_transformers(path: Path, name: str, type_: Type) -> None:
    model = written(path, name, type_)
    same_logits(path, model)


@pytest.mark.parametrize("name", _TOLD)
def test_configurations_are_those_of_transformers(path: Path, name: str) -> None:
    model = written(path, name)
    config = open_gguf(path).config
    config.tie_word_embeddings = model.config.tie_word_embeddings
    assert _told(config) == _told(model.config)


def _told(config: Any) -> dict[str, Any]:
    """What files say of a configuration."""
    rope = {key: each for key, each in config.rope_parameters.items() if not key.startswith("mrope")}
    unsaid = ("rope_parameters", "block_multiple_of")
    return {key: each for key, each in told(config).items() if key not in unsaid} | {"rope": rope}


def with_tokens(writer: GGUFWriter) -> None:
    add_tokens(writer, [f"t{each}" for each in range(67)])


@pytest.mark.parametrize("name", [name for name in _TOLD if "wide" not in name])
def test_transformers_reads_the_same_model(path: Path, name: str) -> None:
    written(path, name, Type.Q8_0, adds=[with_tokens])
    same_logits(path, AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32), 1e-4)


@pytest.mark.parametrize("type_", [Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.MXFP4])
def test_matrices_with_moved_rows_and_columns_stay_in_integers(path: Path, type_: Type) -> None:
    """Blocks of 256 weights hold columns of four heads, those of 32 weights columns of two heads."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "linear_num_value_heads": 16, "linear_key_head_dim": 16}
    model = random_model(tiny_config("qwen3_5", **sizes, head_dim=64, rope_parameters=_ROPE))
    write_hybrid(path, model, matrices=type_)
    stored, weights = open_gguf(path), model.state_dict()
    parts = [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")]
    assert stored.linears >= {f"model.layers.0.{part}" for part in parts}
    for linear in stored.linears:
        assert torch.equal(stored.matrix(linear, torch.float32).dequantized(), weights[f"{linear}.weight"]), linear
    same_logits(path, model)


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
@pytest.mark.parametrize("type_", [Type.F16, Type.Q8_0])
def test_queries_keys_and_values_may_be_joined(path: Path, name: str, type_: Type) -> None:
    """Queries of Qwen3.5 come with gates, and its recurrent layers have a tensor of the same name."""
    same_logits(path, written(path, name, type_, joined={"attn_qkv": ("attn_q", "attn_k", "attn_v")}))


def test_gate_and_up_that_transformers_joins_stay_in_integers(path: Path) -> None:
    linear = "model.layers.0.shared_mlp.input_linear"
    same_logits(path, written(path, "granite with experts", Type.Q8_0))
    assert linear in open_gguf(path).linears
    model = written(path, "granite with experts", lambda name: Type.Q4_0 if "gate_shexp" in name else Type.Q8_0)
    same_logits(path, model)
    assert linear not in open_gguf(path).linears


@pytest.mark.parametrize(("sizes", "type_"), [(16, Type.Q8_0), (16, Type.Q4_K), (8, Type.Q8_0)])
def test_rows_of_queries_values_and_gates_stay_in_integers_in_whole_panels(path: Path, sizes: int, type_: Type) -> None:
    """The kernels' panels have 16 rows; where a head of keys has 8, the matrix is dense."""
    heads = {"linear_key_head_dim": sizes, "linear_value_head_dim": 16, "linear_num_value_heads": 6}
    model = random_model(tiny_config("qwen3_next", **SMALL | _EXPERTS | heads | {"hidden_size": 256}))
    write_hybrid(
        path, model, matrices=lambda name: type_ if name.endswith(("qkv.weight", "attn_gate.weight")) else Type.Q8_0
    )
    stored, linear = open_gguf(path), "model.layers.0.linear_attn.in_proj_qkvz"
    weight = model.get_submodule(linear).weight
    if sizes == 16:
        assert torch.equal(stored.matrix(linear, torch.float32).dequantized(), weight)
    else:
        assert linear not in stored.linears
        assert torch.equal(stored.dense(torch.float32)[f"{linear}.weight"], weight)
    same_logits(path, model)


@pytest.mark.parametrize("type_", [Type.F32, Type.Q8_0])
def test_older_files_have_queries_values_and_gates_as_transformers(
    path: Path, type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_hybrid_files._OWN_NAMES, "in_proj_qkvz.weight", ("ssm_in.weight",))
    monkeypatch.setattr(gguf_hybrid_files, "_apart", lambda weight, config: [weight])
    model = written(path, "qwen3next", type_)
    assert "blk.0.ssm_in.weight" in read_gguf(path).tensors
    same_logits(path, model)


@pytest.mark.parametrize(
    "name",
    [
        "lfm2", "qwen35", "qwen35 with experts", "qwen3next", "lfm2moe", "granite with experts", "bamba", "falcon-h1",
        "nemotron_h", "nemotron_h with experts", "mamba", "mamba2", "jamba",
    ],
)  # fmt: skip
def test_text_with_drafts_is_the_files_models(path: Path, name: str) -> None:
    model, prompt = written(path, name, Type.Q8_0), [5, 6, 7, 8, 5, 6]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    llm = LLM(load_model(path, dtype="float32"), speculative_config=config, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_recurrent_layers_may_be_named_one_by_one(path: Path) -> None:
    model = random_model(tiny_config("qwen3_5", **SMALL | {
        "head_dim": 16, "num_hidden_layers": 4, "layer_types": ["full_attention", *_TYPES], "rope_parameters": _ROPE,
    }))  # fmt: skip
    write_hybrid(path, model, matrices=Type.Q8_0, values={"attention.recurrent_layers": [False, True, False, True]})
    assert open_gguf(path).config.layer_types == model.config.layer_types
    same_logits(path, model)


@pytest.mark.parametrize("name", ["qwen35", "qwen35 with experts"])
def test_layers_for_further_tokens_are_a_head(path: Path, name: str) -> None:
    """The model is read without them. Their block has attention, and tensors of its own."""
    model = written(path, name, Type.Q8_0)
    config, (architecture, changes) = model.config, MODELS[name]
    longer = random_model(tiny_config(architecture, **SMALL | changes | {
        "num_hidden_layers": 4, "layer_types": [*_TYPES, "full_attention"],
    }))  # fmt: skip
    own = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head_norm": (64,)}
    made = {name: torch.randn(shape).numpy() for name, shape in own.items()}

    def add_own(writer: GGUFWriter) -> None:
        for part, values in made.items():
            writer.add_tensor(f"blk.3.nextn.{part}.weight", values)

    longer.load_state_dict(model.state_dict(), strict=False)
    values = {
        "nextn_predict_layers": 1, "block_count": 4, "attention.recurrent_layers": [True, False, True, False],
    }  # fmt: skip
    write_hybrid(path, longer, matrices=Type.Q8_0, values=values, adds=[add_own])
    assert open_gguf(path).config.layer_types == config.layer_types
    same_logits(path, model)
    assert holds_own_head(path, "mtp")
    told = describe_gguf(path)
    assert (told["own_head"], told["layers"]) == ("mtp", 3)
    assert not holds_head(path)
    head: Any = read_head(path)[1].module()
    ours = zip((head.fc.weight, head.embedding_norm, head.feature_norm, head.norm), made.items(), strict=True)
    for found, (part, stored) in ours:
        torch.testing.assert_close(found, torch.from_numpy(stored) - float(part != "eh_proj"))
    x, block = torch.randn(1, 5, 64), longer.model.layers[3]
    positions = longer.model.rotary_emb(x, torch.arange(5).unsqueeze(0))
    mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    theirs = block(x, position_embeddings=positions, attention_mask=mask)
    torch.testing.assert_close(head.layer(x), theirs, rtol=1e-4, atol=1e-5)
    prompts, params = [[5, 6, 7], [9] * 12], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    configs: list[Any] = [None, {"method": "mtp", "num_speculative_tokens": 2, "control": "fixed"}]
    plain, drafted = (LLM(str(path), speculative_config=each).generate(prompts, params) for each in configs)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert drafted[0].metrics.num_drafted > 0


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"ffn_gate_exps": (64,), "ffn_up_exps": (4, 32, 64)}, "gate_up_proj [64] instead of [4, 2, 32, 64]"),
        ({"ffn_gate_exps": (4, 32, 64), "ffn_up_exps": (64,)}, "gate_up_proj [4, 2, 16, 64] instead of"),
        ({"ffn_gate_exps": (4, 32, 64), "ffn_up_exps": (4, 16, 64)}, "gate_up_proj [4, 2, 16, 64] instead of"),
        ({"ffn_gate_exps": (4, 32, 64), "ffn_gate_inp_shexp": (3, 64)}, "gate.weight [3, 64] instead of [1, 64]"),
    ],
)
def test_wrong_shapes_of_a_head_are_named(path: Path, tensors: dict[str, tuple[int, ...]], part: str) -> None:
    def add(writer: GGUFWriter) -> None:
        for name, shape in ({"nextn.eh_proj": (64, 128)} | tensors).items():
            writer.add_tensor(f"blk.3.{name}.weight", torch.zeros(shape).numpy())

    values = {"nextn_predict_layers": 1, "block_count": 4, "attention.recurrent_layers": [True, False, True, False]}
    written(path, "qwen35 with experts", values=values, adds=[add])
    assert part in refusal(path, read_head)


def test_what_a_file_leaves_out_is_as_llama_cpp_takes_it(path: Path) -> None:
    written(path, "qwen35 of six heads", values={"full_attention_interval": None})
    assert open_gguf(path).config.layer_types == [*["linear_attention"] * 3, "full_attention"]
    written(path, "lfm2", values={"attention.head_count_kv": 2})  # of all layers
    assert "blk.2.shortconv.in_proj.weight is not used" in refusal(path)


@pytest.mark.parametrize(
    ("name", "values", "part"),
    [
        ("lfm2", {"shortconv.l_cache": None}, "lacks lfm2.shortconv.l_cache."),
        ("lfm2", {"shortconv.l_cache": 4}, "blk.0.shortconv.conv.weight is [64, 3] instead of [64, 4]"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "has [0, 2] as lfm2.attention.head_count_kv. Expected 3 numbers"),
        ("lfm2", {"attention.head_count_kv": [1, 2, 0]}, "has [1, 2, 0] as lfm2.attention.head_count_kv. Expected"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0]}, "one positive number and 0 for layers without attention"),
        ("lfm2", {"attention.head_count_kv": [0, -2, 0]}, "has [0, -2, 0] as lfm2.attention.head_count_kv"),
        ("lfm2", {"attention.sliding_window": 8}, "has lfm2.attention.sliding_window, which may change the model"),
        ("qwen35", {"attention.head_count_kv": [0, 2, 0]}, "Expected the same positive number for all layers"),
        ("qwen35", {"rope.dimension_sections": None}, "lacks qwen35.rope.dimension_sections."),
        ("qwen35", {"rope.dimension_sections": [3, 1, 0, 0]}, "Expected sections of three axes for all pairs"),
        ("qwen35", {"rope.dimension_sections": [0, 0, 0, 4]}, "Expected sections of three axes for all pairs"),
        ("qwen35", {_LENGTHS[2]: 1 << 28}, "rotates 268435456 of 16 numbers of a head. Expected an even number"),
        ("qwen35", {_LENGTHS[2]: 18}, "rotates 18 of 16 numbers of a head. Expected an even number"),
        ("qwen35", {_LENGTHS[2]: 7}, "rotates 7 of 16 numbers of a head. Expected an even number"),
        (
            "qwen35", {"rope.dimension_sections": [1 << 28] * 3, **dict.fromkeys(_LENGTHS, 1 << 28)},
            "blk.1.attn_k.weight is [32, 64] instead of [536870912, 64]",
        ),
        ("qwen35", {"attention.recurrent_layers": [True, False]}, "recurrent_layers. Expected 3 booleans"),
        ("qwen35", {"attention.recurrent_layers": [1, 0, 1]}, "recurrent_layers. Expected 3 booleans"),
        ("qwen35", {"attention.recurrent_layers": [True] * 3}, "blk.1.attn_v.weight is not used"),
        ("qwen35", {"ssm.group_count": 3}, "has 3 heads of keys, 4 of values and 64 numbers in these"),
        ("qwen35", {"full_attention_interval": 3}, "blk.1.attn_v.weight is not used"),
        *((name, {f"ssm.{key}": None}, f"lacks {name}.ssm.{key}.") for name in ("qwen35", "nemotron_h") for key in (
            "conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size",
        )),
        ("qwen3next", {"rope.dimension_sections": [3, 3, 2]}, "has qwen3next.rope.dimension_sections, which may"),
        ("qwen3next", {"ssm.group_count": 3}, "has 3 heads of keys, 4 of values and"),
        ("qwen3next", {"ssm.time_step_rank": 8}, "blk.0.ssm_ba.weight is [8, 64] instead of [16, 64]"),
        ("qwen3next", {"ssm.state_size": 32}, "blk.0.attn_qkv.weight is"),
        ("qwen3next", {"ssm.state_size": 1 << 28}, "blk.0.attn_qkv.weight is [96, 64] instead of ["),
        ("qwen3next", {"expert_count": 1 << 28}, "ffn_down_exps.weight is [4, 64, 32] instead of [268435456, 64, 32]"),
        ("qwen3next", {"expert_count": 0}, "has no experts. Expected some"),
        ("qwen35 with experts", {"expert_shared_feed_forward_length": None}, "lacks qwen35moe.expert_shared_feed"),
        ("lfm2moe", {"expert_gating_func": 1}, "does not take experts by sigmoid. Expected expert_gating_func 2."),
        ("lfm2moe", {"leading_dense_block_count": 2}, "blk.1.exp_probs_b.bias is not used"),
        ("granite with experts", {"expert_shared_feed_forward_length": None}, "lacks granitehybrid.expert_shared_fe"),
        ("granite with experts", {"expert_count": 0}, "do not fit its settings"),
        ("granite with experts", {"ssm.inner_size": 96}, "has 96 as granitehybrid.ssm.inner_size. Expected a multiple"),
        ("granite with experts", {"ssm.group_count": 3}, "has 128 as granitehybrid.ssm.inner_size. Expected a mul"),
        ("nemotron_h", {"feed_forward_length": [0, 96, 96, 0]}, "has [0, 96, 96, 0] as nemotron_h.feed_forward_length"),
        ("nemotron_h", {"feed_forward_length": 96}, "has 96 as nemotron_h.feed_forward_length. Expected 4 numbers"),
        *((name, {"ssm.inner_size": 96}, f"has 96 as {name}.ssm.inner_size. Expected a multiple of") for name in (
            "mamba", "mamba2", "jamba",
        )),
        *((name, {"ssm.state_size": 1 << 28}, "instead of") for name in ("mamba", "mamba2", "jamba")),
        ("mamba", {"ssm.time_step_rank": None}, "lacks mamba.ssm.time_step_rank."),
        ("mamba", {"ssm.time_step_rank": 16}, "blk.0.ssm_dt.weight is [128, 32] instead of [128, 16]"),
        ("mamba2", {"ssm.group_count": 3}, "has 128 as mamba2.ssm.inner_size. Expected a multiple of 4 heads, of 3 gr"),
        ("jamba", {"attention.head_count_kv": [0, 2, 2]}, "layers of the kind 'attn' at"),
        ("jamba", {"expert_count": 1 << 28}, "instead of [268435456, "),
        ("jamba", {"expert_count": 0}, "has no experts. Expected some"),
        ("nemotron_h", {"expert_count": 4}, "is a mixture of experts. Expected a dense model"),
        ("nemotron_h with experts", {"expert_count": 0}, "has no experts. Expected some"),
        ("nemotron_h with experts", {"expert_count": 1 << 28}, "exp_probs_b.bias is [4] instead of [268435456]"),
        ("nemotron_h with experts", {"expert_used_count": 5}, "takes 5 of 4 experts. Expected at most all"),
        ("nemotron_h with experts", {"expert_group_count": 3}, "has 4 experts in 3 groups, and takes 1 of these. Exp"),
        ("nemotron_h with experts", {"expert_group_count": 4}, "has 4 experts in 4 groups, and takes 1 of these. Exp"),
        ("nemotron_h with experts", {"expert_group_used_count": 2}, "has 4 experts in 1 groups, and takes 2 of these"),
        ("nemotron_h with experts", {"expert_weights_norm": 1}, "has 1 as nemotron_h_moe.expert_weights_norm"),
        ("nemotron_h with experts", {"expert_shared_feed_forward_length": None}, "lacks nemotron_h_moe.expert_shared"),
        ("nemotron_h with experts", {"moe_latent_size": 16}, "fc1_latent_proj.weight is missing"),
        ("nemotron_h with experts", {"moe_latent_size": 0}, "has 0 as nemotron_h_moe.moe_latent_size"),
        ("nemotron_h", {"attention.layer_norm_epsilon": None}, "lacks nemotron_h.attention.layer_norm_epsilon."),
    ],
)  # fmt: skip
def test_settings_that_are_refused(path: Path, name: str, values: dict[str, Any], part: str) -> None:
    written(path, name, values=values)
    assert part in refusal(path)


@pytest.mark.parametrize(
    ("name", "tensor", "part"),
    [
        ("lfm2", "token_embd_norm.weight", "model.embedding_norm.weight is missing"),
        ("granite with experts", "blk.0.ffn_up_shexp.weight", "model.layers.0.shared_mlp.up_proj.weight is missing"),
        ("falcon-h1", "blk.0.ffn_norm", "model.layers.0.pre_ff_layernorm.weight is missing"),
        ("nemotron_h with experts", "blk.2.ffn_up_exps.weight", "mixer.experts.up_proj.weight is missing"),
        ("nemotron_h with experts", "blk.2.exp_probs_b.bias", "mixer.gate.e_score_correction_bias is missing"),
        ("mamba", "blk.0.ssm_x.weight", "backbone.layers.0.mixer.x_proj.weight is missing"),
        ("mamba2", "blk.0.ssm_norm.weight", "backbone.layers.0.mixer.norm.weight is missing"),
        ("jamba", "blk.0.ssm_b_norm.weight", "model.layers.0.mamba.b_layernorm.weight is missing"),
        ("nemotron_h", "blk.0.ssm_d", "model.layers.0.mixer.D is missing"),
        ("qwen3next", "blk.0.attn_gate.weight", "model.layers.0.linear_attn.in_proj_z.weight is missing"),
        ("qwen3next", "blk.0.ssm_ba.weight", "model.layers.0.linear_attn.in_proj_ba.weight is missing"),
        ("lfm2", "blk.0.shortconv.conv.weight", "model.layers.0.conv.conv.weight is missing"),
        ("qwen35", "blk.0.ssm_a", "model.layers.0.linear_attn.A_log is missing"),
        ("qwen35", "blk.2.ssm_dt.bias", "model.layers.2.linear_attn.dt_bias is missing"),
    ],
)
def test_missing_tensors_are_named(path: Path, name: str, tensor: str, part: str) -> None:
    written(path, name, leave_out=[tensor])
    assert part in refusal(path)


def test_rates_of_decay_are_negative_in_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config("qwen3_5", **SMALL | MODELS["qwen35"][1]))
    monkeypatch.setattr("models.gguf_hybrid_files._computed", lambda key, weight, config: weight)
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.fill_(0.5)
    write_hybrid(path, model, matrices=Type.F32)
    assert "blk.0.ssm_a of" in refusal(path, lambda path: open_gguf(path).dense(torch.float32))
