"""Arguments of vLLM's `LLM` and `vllm serve` that are missing here: ignored where they ask for nothing."""

from __future__ import annotations

import json
import logging
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_log = logging.getLogger(__name__)


class OtherArgument(NamedTuple):
    """An argument of vLLM's: which values ask for nothing, and what there is instead of the others."""

    asks_for_nothing: Callable[[Any], bool]
    instead: str

    @property
    def is_switch(self) -> bool:
        """Whether it is True or False, so that its option takes no value."""
        return self.asks_for_nothing(True) or self.asks_for_nothing(False)

    def check(self, told: str, value: Any) -> None:
        """Raises `ConfigError` where a value asks for what there is not; told: the argument as the user wrote it."""
        if not self.asks_for_nothing(value):
            raise ConfigError(f"{told} is not supported. {self.instead}")
        _log.debug("vLLM's %s asks for nothing that there is not and is ignored", told)


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
_LOGS = "The log says what went wrong, and no text of requests. Leave it out."
_PROXY = "Put a reverse proxy before the server."
_OTHER_OPTIONS = OTHER_ARGUMENTS | {
    "api_key": OtherArgument(
        _one_of(), "Everybody on this machine can read command lines. Pass --api-key-file, or set FORETOKEN_API_KEY."
    ),
    "api_server_count": OtherArgument(_one_of(1), "One process serves. For several see num_fronts in docs/server.md."),
    "chat_template_content_format": OtherArgument(_one_of("auto", "string"), "Templates get text. Leave it out."),
    "disable_fastapi_docs": OtherArgument(_is_boolean, "Leave it out."),
    "disable_frontend_multiprocessing": OtherArgument(_is_boolean, "Leave it out."),
    "disable_log_requests": OtherArgument(_is_boolean, _LOGS),
    "disable_uvicorn_access_log": OtherArgument(_is_boolean, _LOGS),
    "enable_auto_tool_choice": OtherArgument(_one_of(False), "The text of a call is not parsed. Leave it out."),
    "enable_force_include_usage": OtherArgument(_one_of(False), "Clients ask with stream_options.include_usage."),
    "enable_log_requests": OtherArgument(_one_of(False), _LOGS),
    "enable_prompt_tokens_details": OtherArgument(_is_boolean, "Leave it out."),
    "enable_ssl_refresh": OtherArgument(_one_of(False), _PROXY),
    "lora_modules": OtherArgument(_one_of(), "Merge the adapter into the model first."),
    "max_log_len": OtherArgument(lambda value: not isinstance(value, bool), _LOGS),
    "middleware": OtherArgument(_one_of(), _PROXY),
    "reasoning_parser": OtherArgument(_one_of(""), "The model's reasoning is part of its text. Leave it out."),
    "response_role": OtherArgument(_one_of("assistant"), "Answers come from the assistant. Leave it out."),
    "root_path": OtherArgument(_one_of(""), _PROXY),
    "ssl_ca_certs": OtherArgument(_one_of(), _PROXY),
    "ssl_certfile": OtherArgument(_one_of(), _PROXY),
    "ssl_keyfile": OtherArgument(_one_of(), _PROXY),
    "tool_call_parser": OtherArgument(_one_of(), "The text of a call is not parsed. Leave it out."),
    "uvicorn_log_level": OtherArgument(lambda value: isinstance(value, str), _LOGS),
}
_SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-q": "--quantization",
}  # fmt: skip


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
        OTHER_ARGUMENTS[name].check(f"{name} = {shown(value)}", value)


def without_other_options(given: Iterable[str], own: Collection[str]) -> list[str]:
    """A command line without the options that vLLM has and the command has not.

    Args:
        given: The command line. As vLLM does, `--max_num_seqs` is read as `--max-num-seqs`.
        own: The options of the command.

    Raises:
        ConfigError: Where `LLM` would raise it for the argument of that name.
    """
    kept: list[str] = []
    value: Any
    rest = iter(given)
    for word in rest:
        option, equals, text = word.partition("=")
        option = _SHORT.get(option, option.replace("_", "-") if option.startswith("--") else option)
        name, is_off = option.removeprefix("--").replace("-", "_"), False
        if name not in _OTHER_OPTIONS and name.startswith("no_"):
            name, is_off = name.removeprefix("no_"), True
        if option in own or not option.startswith("--") or name not in _OTHER_OPTIONS:
            kept.append(option + equals + text)
            if option == "--":
                kept += rest
            continue
        other, told, value = _OTHER_OPTIONS[name], option, not is_off
        if not other.is_switch:
            value = _read(text if equals else next(rest, ""))
            told = f"{option} {shown(value)}"
        other.check(told, value)
    return kept


def _read(text: str) -> Any:
    """The value of an option: JSON, or else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
