"""Arguments of vLLM's `LLM` that this one does not have: ignored where they ask for nothing that is missing here."""

from __future__ import annotations

import logging
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_log = logging.getLogger(__name__)


class OtherArgument(NamedTuple):
    """An argument of vLLM's: which values ask for nothing, and what there is instead of the others."""

    asks_for_nothing: Callable[[Any], bool]
    instead: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    """Whether a value is one of some, None included; 1 and True are apart."""
    return lambda value: value is None or any(type(value) is type(each) and value == each for each in values)


def _is_boolean(value: Any) -> bool:
    """Whether a value is a switch, whichever way it stands."""
    return value is None or isinstance(value, bool)


def _is_ample(value: Any) -> bool:
    """Whether a share of memory leaves room for the half of the free memory that the KV cache may take."""
    return value is None or (isinstance(value, Real) and not isinstance(value, bool) and 0.5 <= float(value) <= 1.0)


_ONE_DEVICE = "The model runs on one device, named by 'device'. Leave it out."
_CACHE = "The KV cache takes what max_num_seqs and max_model_len need, at most kv_cache_memory_bytes. Set these."
_DRAFTER = "Pass speculative_config={'method': NAME, 'model': DIR, 'num_speculative_tokens': K}."
_NO_REMOTE = "Code that comes with a model is never run. Leave it out."
_CHUNKS = "Prompts are always fed in chunks; max_num_batched_tokens bounds them. Leave it out."
_SAFETENSORS = "Models are loaded from safetensors. Leave it out."

OTHER_ARGUMENTS = {
    "tensor_parallel_size": OtherArgument(_one_of(1), _ONE_DEVICE),
    "pipeline_parallel_size": OtherArgument(_one_of(1), _ONE_DEVICE),
    "data_parallel_size": OtherArgument(_one_of(1), _ONE_DEVICE),
    "distributed_executor_backend": OtherArgument(_one_of("uni"), _ONE_DEVICE),
    "disable_custom_all_reduce": OtherArgument(_is_boolean, _ONE_DEVICE),
    "device_map": OtherArgument(_one_of(), _ONE_DEVICE),
    "gpu_memory_utilization": OtherArgument(_is_ample, _CACHE),
    "num_gpu_blocks_override": OtherArgument(_one_of(), _CACHE),
    "block_size": OtherArgument(_one_of(8, 16, 32, 64, 128), _CACHE),
    "swap_space": OtherArgument(_one_of(0, 0.0, 4, 4.0), _CACHE),
    "cpu_offload_gb": OtherArgument(_one_of(0, 0.0), "Weights stay on the device. Leave it out."),
    "kv_cache_dtype": OtherArgument(_one_of("auto"), "The KV cache has the model's dtype. Set 'dtype'."),
    "enable_chunked_prefill": OtherArgument(_one_of(True), _CHUNKS),
    "quantization": OtherArgument(_one_of(), "A quantised checkpoint is loaded as its config.json says. Leave it out."),
    "load_format": OtherArgument(_one_of("auto", "safetensors"), _SAFETENSORS),
    "config_format": OtherArgument(_one_of("auto", "hf"), _SAFETENSORS),
    "trust_remote_code": OtherArgument(_one_of(False), _NO_REMOTE),
    "allow_deprecated_quantization": OtherArgument(_one_of(False), "Leave it out."),
    "hf_overrides": OtherArgument(_one_of(), "Change the model's config.json, or pass a transformers model in memory."),
    "hf_token": OtherArgument(_one_of(), "Set HF_TOKEN in the environment."),
    "download_dir": OtherArgument(_one_of(), "Set HF_HOME in the environment."),
    "code_revision": OtherArgument(_one_of(), _NO_REMOTE),
    "tokenizer_mode": OtherArgument(_one_of("auto"), "Pass a tokenizer that transformers loaded as 'tokenizer'."),
    "skip_tokenizer_init": OtherArgument(_one_of(False), "Prompts may be token ids, with a tokenizer or without."),
    "enforce_eager": OtherArgument(_is_boolean, "Choose 'runner'."),
    "compilation_config": OtherArgument(_one_of(), "Choose 'runner'."),
    "attention_backend": OtherArgument(_one_of(), "Choose 'runner'."),
    "async_scheduling": OtherArgument(_is_boolean, "Leave it out."),
    "disable_log_stats": OtherArgument(_is_boolean, "Pass a function as 'on_step' to see every iteration."),
    "generation_config": OtherArgument(_one_of("vllm"), "Sampling is what SamplingParams say. Leave it out."),
    "override_generation_config": OtherArgument(_one_of(), "Sampling is what SamplingParams say. Leave it out."),
    "enable_lora": OtherArgument(_one_of(False), "Merge the adapter into the model first."),
    "limit_mm_per_prompt": OtherArgument(_one_of(), "Prompts are text. Leave it out."),
    "logits_processors": OtherArgument(_one_of(), "Use logit_bias, bad_words and penalties of SamplingParams."),
    "speculative_model": OtherArgument(_one_of(), _DRAFTER),
    "num_speculative_tokens": OtherArgument(_one_of(), _DRAFTER),
    "torch_dtype": OtherArgument(_one_of(), "Pass it as 'dtype'."),
}


def check_other_arguments(others: Mapping[str, Any], known: Iterable[str]) -> None:
    """Looks at the arguments that `LLM` was given and does not have.

    Args:
        others: Their names and values.
        known: The names that `LLM` has.

    Raises:
        ConfigError: For a name that neither it nor vLLM's knows, with the nearest one, and for a value that asks for
            what there is not, with what there is instead.
    """
    for name, value in others.items():
        if name not in OTHER_ARGUMENTS:
            raise ConfigError(f"LLM has no argument {shown(name)}. {nearest_name_hint(name, known)}")
        if not OTHER_ARGUMENTS[name].asks_for_nothing(value):
            raise ConfigError(f"{name} = {shown(value)} is not supported. {OTHER_ARGUMENTS[name].instead}")
        _log.debug("vLLM's argument %s = %s asks for nothing that there is not and is ignored", name, shown(value))
