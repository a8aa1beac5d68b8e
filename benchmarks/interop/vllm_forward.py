"""Runs vLLM's draft networks in a process of its own, as `sglang_forward` does SGLang's.

Configuration, classes, layers, loading and arithmetic are vLLM's, without its compiled kernels. Attention over a cache
is replaced by attention over the text itself, and the engine's configuration by the few values that networks ask for.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.interop.sglang_forward import attention, serve


class _Attention(nn.Module):
    def __init__(self, num_heads: int, head_size: int, scale: float, **_: Any) -> None:  # noqa: ARG002 - its signature
        super().__init__()
        self._head_size, self._scale = head_size, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, self._head_size, self._scale)


def _engine() -> Any:
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
def _answer(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
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


if __name__ == "__main__":
    serve(_engine, _answer)
