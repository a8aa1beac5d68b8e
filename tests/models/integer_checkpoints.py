"""Writes small checkpoints of compressed-tensors, GPTQ and AWQ with random numbers, and says what their weights are."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Scheme:
    """How the linear layers of a checkpoint are stored."""

    method: str
    bits: int = 4
    group: int = 32  # 0: a row
    zeros: bool = False
    act_order: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def words(numbers: Tensor, bits: int) -> Tensor:
    """(R, C) without sign to (R, W) int32, lowest bits first."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).unflatten(1, (-1, each))
    packed = (padded << torch.arange(0, 32, bits)).sum(2)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def _less_one(packed: Tensor, bits: int) -> Tensor:
    """Zero points less one, as GPTQ stores them: whole words are subtracted, and 0 borrows from the next."""
    less = packed.long() - int("1" * 8 if bits == 4 else "01" * 4, 16)
    return (less << 32 >> 32).int()


def stored(scheme: Scheme, rows: int, cols: int, seed: int, inputs_seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a matrix, and its weights (rows, cols) in float32."""
    generator = torch.Generator().manual_seed(seed)
    bits, half, group = scheme.bits, 1 << scheme.bits - 1, scheme.group or cols
    groups = -(-cols // group)
    numbers = torch.randint(0, 1 << bits, (rows, cols), generator=generator)
    scales = ((torch.rand(rows, groups, generator=generator) + 0.5) * 0.1 / half).half()
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=generator) if scheme.zeros else None
    g_idx = torch.arange(cols) // group
    if scheme.act_order:  # layers with the same inputs sort them alike, as GPTQ does
        g_idx = g_idx[torch.randperm(cols, generator=torch.Generator().manual_seed(inputs_seed))]
    own_zeros = torch.full((rows, groups), half) if zeros is None else zeros
    weight = scales.float()[:, g_idx] * (numbers - own_zeros[:, g_idx]).float()
    if scheme.method == "awq":

        def interleaved(each: Tensor) -> Tensor:
            return each.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)

        return {
            "qweight": words(interleaved(numbers.T), bits), "qzeros": words(interleaved(own_zeros.T), bits),
            "scales": scales.T.contiguous(),
        }, weight  # fmt: skip
    if scheme.method == "gptq":
        return {
            "qweight": words(numbers, bits).T.contiguous(), "qzeros": _less_one(words(own_zeros.T, bits), bits),
            "scales": scales.T.contiguous(), "g_idx": g_idx.int(),
        }, weight  # fmt: skip
    tensors = {"weight_scale": scales.bfloat16() if scheme.settings.get("bfloat16_scales") else scales}
    weight = tensors["weight_scale"].float()[:, g_idx] * (numbers - own_zeros[:, g_idx]).float()
    if scheme.settings.get("format") == "int-quantized":
        tensors["weight"] = (numbers - half).to(torch.int8)
    else:
        tensors |= {"weight_packed": words(numbers, bits), "weight_shape": torch.tensor([rows, cols])}
    if zeros is not None:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if scheme.act_order:
        tensors["weight_g_idx"] = g_idx.int()
    return tensors, weight


def settings_of(scheme: Scheme) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint."""
    group = scheme.group or -1
    if scheme.method == "awq":
        return {"quant_method": "awq", "bits": scheme.bits, "group_size": group, "version": "gemm", "zero_point": True}
    if scheme.method == "gptq":
        return {
            "quant_method": "gptq", "bits": scheme.bits, "group_size": group, "desc_act": scheme.act_order,
            "sym": not scheme.zeros,
        }  # fmt: skip
    weights = {
        "num_bits": scheme.bits, "type": "int", "symmetric": not scheme.zeros, "dynamic": False,
        "strategy": "group" if scheme.group else "channel", "group_size": scheme.group or None,
        "actorder": "group" if scheme.act_order else None,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors", "format": scheme.settings.get("format", "pack-quantized"),
        "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights, "output_activations": None,
            "input_activations": inputs if scheme.settings.get("inputs") else None,
        }},
    }  # fmt: skip


def _with_rounded_inputs(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    scale = inputs[0].abs().amax(-1, keepdim=True) / 127
    return ((inputs[0] / scale).round() * scale,)


def _experts(module: nn.Module, config: Any, scheme: Scheme, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes the experts' weights out of the tensors of a model; gives their integers, named as in the checkpoint."""
    made: dict[str, Tensor] = {}
    for layer, block in enumerate(module.model.layers):  # type: ignore[arg-type, union-attr]
        experts: Any = getattr(block.mlp, "experts", None)
        for expert in range(0 if experts is None else len(experts.down_proj)):
            gate, up = experts.gate_up_proj.data[expert].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": experts.down_proj.data[expert]}
            for number, (part, dense) in enumerate(parts.items()):
                own, weight = stored(scheme, *dense.shape, 1000 * layer + 10 * expert + number, 0)
                dense.copy_(weight)
                name = expert_name(config.model_type, layer, expert, part)
                del tensors[f"{name}.weight"]
                made |= {f"{name}.{key}": each for key, each in own.items()}
    return made


def expert_name(model_type: str, layer: int, expert: int, part: str) -> str:
    """The name of a linear layer of an expert in checkpoints."""
    if model_type == "mixtral":
        letter = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
        return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{letter}"
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}"


def write(directory: Path, config: Any, scheme: Scheme) -> nn.Module:
    """Writes a checkpoint, and returns the model of its weights in float32."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    module.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors |= _experts(module, config, scheme, tensors)
    places = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",)
    for seed, (name, part) in enumerate(list(module.named_modules())):
        if type(part) is not nn.Linear or name == "lm_head":
            continue
        place = next(i for i, names in enumerate(places) if name.endswith(names))
        made, weight = stored(scheme, part.out_features, part.in_features, seed, place)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": each for key, each in made.items()}
        part.weight.data = weight
        if scheme.settings.get("inputs"):
            part.register_forward_pre_hook(_with_rounded_inputs)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((directory / "config.json").read_text()) | {"quantization_config": settings_of(scheme)}
    (directory / "config.json").write_text(json.dumps(values))
    return module


def small_config(kind: str = "llama", **fields: Any) -> Any:
    """A configuration with sizes that fill no whole panel, and groups that end early."""
    sizes = {
        "vocab_size": 96, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 128, "initializer_range": 0.2,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **sizes | fields)
