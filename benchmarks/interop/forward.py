"""Runs draft networks of SGLang or vLLM in a process of its own: a head a line of standard input, an answer a line.

    python -m benchmarks.interop.forward sglang

Kernels that are compiled for GPUs, and torchvision, are replaced by objects that do nothing. Attention over a cache is
replaced by attention over the text itself, and vLLM's engine by the few values that networks ask for. Configuration,
classes, loading and arithmetic are theirs.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

_NOT_NEEDED = ("sgl_kernel", "torchvision")


class _Absent(MetaPathFinder, Loader):
    """Finds modules that are not needed."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        is_absent = fullname.split(".")[0] in _NOT_NEEDED
        return ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def _sglang_classes() -> tuple[Any, Any]:
    """Imports both classes of draft networks, for one process on a CPU."""
    import transformers.image_utils  # noqa: F401 - it asks for torchvision before there seems to be one

    sys.meta_path.insert(0, _Absent())
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    runtime_context.get_context().override_server_args(device="cpu", attention_backend="torch_native").install()
    parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/meet", 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    ranks = {name: 0 for name in runtime_context._parallel_fields() if name.endswith("_rank")}
    runtime_context.get_parallel().override_permanently(**ranks)
    RadixAttention.forward = lambda self, q, k, v, *_, **__: attention(q, k, v, self.head_dim, self.scaling)
    return LlamaForCausalLMEagle, LlamaForCausalLMEagle3


def attention(q: Any, k: Any, v: Any, head_dim: int, scaling: float) -> Any:
    """(S, H Dh) over the text that is fed."""
    query, key, value = (each.view(len(each), -1, head_dim).transpose(0, 1) for each in (q, k, v))
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return mixed.transpose(0, 1).flatten(1)


@torch.no_grad()
def _sglang_answer(classes: tuple[Any, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Loads a head and feeds it; (B, S, W) of EAGLE-1, (B, S, Vd) logits of EAGLE-3."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from transformers import LlamaConfig

    given = torch.load(asked["inputs"], weights_only=True)
    network = classes[asked["is_eagle3"]](LlamaConfig.from_pretrained(asked["place"]))
    for weight in network.parameters():
        weight.fill_(torch.nan)
    network.load_weights(iter(given["weights"].items()))
    # As its workers do: the target's embedding takes the place of the head's, its LM head that of a head without one.
    embedding = network.model.embed_tokens.weight
    if embedding.shape[1] == given["embedding"].shape[1]:
        embedding[: len(given["embedding"])] = given["embedding"]
    outputs = []
    for features, tokens in zip(given["features"], given["tokens"], strict=True):
        batch = SimpleNamespace(
            spec_info=SimpleNamespace(hidden_states=features), mm_input_embeds=None, forward_mode=ForwardMode.DECODE,
            residual_stream=None, can_run_tbo=False,
        )  # fmt: skip
        found = network.model(tokens, torch.arange(len(tokens)), batch)
        outputs.append(found[0] @ network.lm_head.weight.T if asked["is_eagle3"] else found)
    hot = network.get_hot_token_id() if asked["is_eagle3"] else None
    return {"outputs": torch.stack(outputs), "token_map": hot}


class _Attention(nn.Module):
    def __init__(self, num_heads: int, head_size: int, scale: float, **_: Any) -> None:  # noqa: ARG002 - its signature
        super().__init__()
        self._head_size, self._scale = head_size, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, self._head_size, self._scale)


def _vllm_engine() -> Any:
    """An engine's configuration for one process on a CPU."""
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import llama

    compilation: Any = CompilationConfig(mode=0, custom_ops=["none"])
    engine = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=compilation)
    with set_current_vllm_config(engine):
        parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/meet", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
    llama.Attention = _Attention
    return engine


@torch.no_grad()
def _vllm_answer(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Loads a head and feeds it; (B, S, W) of EAGLE-1, (B, S, Vd) logits of EAGLE-3."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsEagle3
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    given = torch.load(asked["inputs"], weights_only=True)
    config: Any = get_config(asked["place"], trust_remote_code=False)
    if not isinstance(config, SpeculatorsConfig):
        config = EAGLEConfig(config, method="eagle3" if asked["is_eagle3"] else "eagle", model_type="eagle")
    drafts = SimpleNamespace(hf_config=config, quantization=None)
    target = SimpleNamespace(
        dtype=torch.float32, head_dtype=torch.float32, get_num_layers=lambda _: 1,
        get_total_num_hidden_layers=lambda: 1, get_vocab_size=lambda: len(given["embedding"]),
    )  # fmt: skip
    engine.speculative_config = SimpleNamespace(draft_model_config=drafts, parallel_drafting=False)
    engine.model_config = target
    with set_current_vllm_config(engine):
        network: Any = ModelRegistry._try_load_model_cls(config.architectures[0])(vllm_config=engine)
    for weight in network.parameters():
        weight.fill_(torch.nan if weight.is_floating_point() else 0)
    network.load_weights(iter(given["weights"].items()))
    if not network.has_own_embed_tokens:  # as its workers do
        network.model.embed_tokens.weight.data = given["embedding"]
    outputs = []
    for features, tokens in zip(given["features"], given["tokens"], strict=True):
        state = network.combine_hidden_states(features) if asked["is_eagle3"] else features
        outputs.append(network(tokens, torch.arange(len(tokens)), state)[0])
    found, tokens, taps = torch.stack(outputs), None, None
    if asked["is_eagle3"]:
        model = SimpleNamespace(model=SimpleNamespace(layers=range(asked["num_layers"])))
        own = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(model)
        taps = list(get_eagle3_aux_layers_from_config(engine.speculative_config) or own)
        offsets = network.draft_id_to_target_id
        tokens = None if offsets is None else torch.arange(len(offsets)) + offsets
        logits = network.compute_logits(found.flatten(0, 1)).unflatten(0, found.shape[:2])
        found = logits if tokens is None else logits[..., tokens]
    return {"outputs": found, "token_map": tokens, "boundaries": taps}


def serve(prepare: Callable[[], Any], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Answers with what was prepared until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print
    prepared = prepare()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            torch.save(answer(prepared, asked), asked["output"])
            said = ""
        except Exception as err:  # noqa: BLE001 - the answer is that it stops
            said = f"{type(err).__name__}: {err}"
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    serve(*{"sglang": (_sglang_classes, _sglang_answer), "vllm": (_vllm_engine, _vllm_answer)}[sys.argv[1]])
