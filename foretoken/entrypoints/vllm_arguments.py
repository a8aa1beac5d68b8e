"""Names of vLLM that do not exist here: ignored at neutral values, else refused.

They are arguments of `LLM`, options of `vllm serve`, and keys of `speculative_config`.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, nearest_name_hint

_log = logging.getLogger(__name__)


class NeutralValues(NamedTuple):
    """The values of an argument that change nothing, in words for docs/dropins.md; None is always one of them."""

    words: str
    has: Callable[[Any], bool]


class OtherArgument(NamedTuple):
    """An argument of vLLM: its neutral values, and advice for all other values."""

    taken: NeutralValues
    instead: str

    @property
    def is_switch(self) -> bool:
        """Whether the argument is a boolean, so that its option takes no value."""
        return self.taken.has(True) or self.taken.has(False)

    def check(self, told: str, value: Any) -> None:
        """Raises `ConfigError` for a value that is not neutral; told: the argument as the user wrote it."""
        if value is not None and not self.taken.has(value):
            raise ConfigError(f"{told} is not supported. {self.instead}")
        _log.debug("vLLM's %s has a neutral value and is ignored", told)


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Decides whether a value is among `values`; 1 and True differ."""
    return any(type(value) is type(each) and value == each for each in values)


def _one_of(*values: Any) -> NeutralValues:
    return NeutralValues(", ".join(f"`{value!r}`" for value in (*values, None)), lambda value: is_one_of(value, values))


def _any(words: str, *kinds: type) -> NeutralValues:
    return NeutralValues(
        words, lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    )


_NOTHING, _OFF, _ONE, _EMPTY = _one_of(), _one_of(False), _one_of(1), _one_of({})
_EITHER = _one_of(True, False)
_NUMBER, _MAPPING = _any("any number, as `1`", Real), _any("any mapping, as `{'image': 5}`", dict)
_TEXT = _any("any text, as `'auto'`", str)
_UP_TO_1024 = NeutralValues("`0` to `1024`", lambda value: type(value) is int and 0 <= value <= 1024)


def _group(instead: str, **taken: NeutralValues) -> dict[str, OtherArgument]:
    return {name: OtherArgument(each, instead) for name, each in taken.items()}


OTHER_ARGUMENTS = {
    **_group(
        "The model runs on one device, named by 'device'. Leave it out.",
        tensor_parallel_size=_ONE, pipeline_parallel_size=_ONE, data_parallel_size=_ONE,
        prefill_context_parallel_size=_ONE, decode_context_parallel_size=_ONE, nnodes=_ONE,
        distributed_executor_backend=_one_of("uni"), enable_expert_parallel=_OFF, worker_cls=_one_of("auto"),
        disable_custom_all_reduce=_EITHER, max_parallel_loading_workers=_NOTHING, ray_workers_use_nsight=_OFF,
        device_map=_NOTHING,
    ),
    **_group(
        "The KV cache takes what max_num_seqs and max_model_len need, at most kv_cache_memory_bytes. Set these.",
        num_gpu_blocks_override=_NOTHING, block_size=_one_of(8, 16, 32, 64, 128),
        swap_space=_one_of(0, 0.0, 4, 4.0),
    ),
    **_group(
        "Weights and the KV cache stay on the device. Leave it out.",
        cpu_offload_gb=_one_of(0, 0.0), cpu_offload_params=_one_of(set()), offload_group_size=_one_of(0),
        offload_num_in_group=_ONE, offload_prefetch_step=_ONE, offload_params=_one_of(set()),
        kv_offloading_size=_NOTHING, kv_transfer_config=_NOTHING, enable_sleep_mode=_OFF,
    ),
    **_group("A KV cache in int8 has a scale for each row. Leave it out.", calculate_kv_scales=_OFF),
    **_group(
        "Prompts are always fed in chunks; max_num_batched_tokens bounds them. Leave it out.",
        enable_chunked_prefill=_EITHER, disable_chunked_mm_input=_EITHER, max_num_partial_prefills=_ONE,
        long_prefill_token_threshold=_one_of(0), max_num_scheduled_tokens=_NOTHING,
    ),
    **_group("Requests are served in the order in which they come. Leave it out.", scheduling_policy=_one_of("fcfs")),
    **_group(
        "A quantized checkpoint is loaded as its config.json says. Leave it out.",
        quantization_config=_NOTHING, allow_deprecated_quantization=_OFF,
    ),
    **_group(
        "Models are loaded from safetensors or a GGUF file, as their names say. Leave it out.",
        load_format=_one_of("auto", "safetensors", "gguf"), config_format=_one_of("auto", "hf"),
        model_impl=_one_of("auto"), model_loader_extra_config=_EMPTY,
        ignore_patterns=_one_of([], "original/**/*"), use_tqdm_on_load=_EITHER,
    ),
    **_group(
        "Code that comes with a model is never run. Leave it out.",
        trust_remote_code=_EITHER, code_revision=_NOTHING,
    ),
    **_group(
        "Change the model's config.json, or pass a transformers model in memory.",
        hf_overrides=_EMPTY, rope_scaling=_EMPTY, rope_theta=_NOTHING, disable_sliding_window=_OFF,
    ),
    **_group(
        "Name the file as the model: LLM('FOLDER/FILE.gguf'), or LLM('owner/name:Q4_K_M') for the hub.",
        gguf_file=_NOTHING,
    ),
    **_group("Set HF_TOKEN in the environment.", hf_token=_NOTHING),
    **_group("Set HF_HOME in the environment.", download_dir=_NOTHING),
    **_group("Pass a tokenizer that transformers loaded as 'tokenizer'.", tokenizer_mode=_one_of("auto", "hf")),
    **_group("Prompts may be token ids, with a tokenizer or without.", skip_tokenizer_init=_OFF),
    **_group(
        "Choose 'runner'.",
        enforce_eager=_EITHER, compilation_config=_EMPTY, max_seq_len_to_capture=_NUMBER, attention_backend=_NOTHING,
        attention_config=_NOTHING, optimization_level=_NUMBER, performance_mode=_TEXT,
    ),
    **_group(
        "It changes speed alone, and there is no such choice here. Leave it out.",
        async_scheduling=_EITHER, disable_async_output_proc=_EITHER, disable_cascade_attn=_EITHER,
        use_v2_block_manager=_EITHER, num_scheduler_steps=_NUMBER, prefix_caching_hash_algo=_TEXT,
    ),
    **_group(
        "Pass a function as 'on_step' to see every iteration.",
        disable_log_stats=_EITHER, profiler_config=_NOTHING, otlp_traces_endpoint=_NOTHING,
        per_request_spec_decode_metrics=_one_of("none", "summary", "detailed"),
    ),
    **_group(
        "A request may ask for 1024, of the model's own distribution. Leave it out.",
        max_logprobs=_UP_TO_1024, logprobs_mode=_one_of("raw_logprobs"),
    ),
    **_group(
        "llguidance compiles grammars. Leave it out.",
        structured_outputs_config=_EMPTY, guided_decoding_backend=_one_of("auto", "guidance"),
    ),
    **_group(
        "Models generate text. Leave it out.",
        task=_one_of("auto", "generate"), convert=_one_of("auto", "none"), pooler_config=_NOTHING,
        override_pooler_config=_NOTHING,
    ),
    **_group(
        "Prompts are text or token ids. Leave it out.",
        limit_mm_per_prompt=_MAPPING, mm_processor_kwargs=_EMPTY, mm_processor_cache_gb=_NUMBER,
        allowed_local_media_path=_one_of(""), allowed_media_domains=_one_of([]), skip_mm_profiling=_EITHER,
        disable_mm_preprocessor_cache=_EITHER, enable_mm_embeds=_OFF, enable_prompt_embeds=_OFF,
    ),
    **_group(
        "Merge the adapter into the model first.",
        enable_lora=_OFF, max_loras=_NUMBER, max_lora_rank=_NUMBER, max_cpu_loras=_NUMBER, fully_sharded_loras=_EITHER,
    ),
    **_group("Pass chat_template to LLM.chat.", chat_template=_NOTHING),
    **_group("Metrics name the model by its directory. Leave it out.", served_model_name=_NOTHING),
    **_group("Outputs have no such field. Leave it out.", enable_return_routed_experts=_OFF, return_sampling_mask=_OFF),
    **_group("Use logit_bias, bad_words and penalties of SamplingParams.", logits_processors=_NOTHING),
    **_group("No plug-in reads it. Leave it out.", additional_config=_EMPTY),
    **_group(
        "Pass speculative_config={'method': NAME, 'model': DIR, 'num_speculative_tokens': K}.",
        speculative_model=_NOTHING, num_speculative_tokens=_NOTHING, spec_method=_NOTHING, spec_model=_NOTHING,
        spec_tokens=_NOTHING,
    ),
    **_group("Pass it as 'dtype'.", torch_dtype=_NOTHING),
}  # fmt: skip
_OTHER_OPTIONS = OTHER_ARGUMENTS | {
    **_group(
        "Pages of --allowed-origins may send every header, and no cookies. Leave it out.",
        allow_credentials=_OFF, allowed_headers=_one_of(["*"]), allowed_methods=_one_of(["*"]),
    ),
    **_group(
        "Everybody on this machine can read command lines. Pass --api-key-file, or set FORETOKEN_API_KEY.",
        api_key=_NOTHING,
    ),
    **_group("One process serves. For several see num_fronts in docs/server.md.", api_server_count=_ONE),
    **_group("Templates get text. Leave it out.", chat_template_content_format=_one_of("auto", "string")),
    **_group(
        "Leave it out.",
        disable_fastapi_docs=_EITHER, disable_frontend_multiprocessing=_EITHER, enable_auto_tool_choice=_EITHER,
        enable_prompt_tokens_details=_EITHER,
    ),
    **_group(
        "The log says what went wrong, and no text of requests. Leave it out.",
        disable_log_requests=_EITHER, disable_uvicorn_access_log=_EITHER, enable_log_requests=_OFF,
        max_log_len=_any("any", int, str), uvicorn_log_level=_TEXT,
    ),
    **_group("Clients ask with stream_options.include_usage.", enable_force_include_usage=_OFF),
    **_group("Merge the adapter into the model first.", lora_modules=_NOTHING),
    **_group(
        "Put a reverse proxy before the server.",
        enable_ssl_refresh=_OFF, middleware=_NOTHING, root_path=_one_of(""), ssl_ca_certs=_NOTHING,
        ssl_certfile=_NOTHING, ssl_keyfile=_NOTHING,
    ),
    **_group("Answers come from the assistant. Leave it out.", response_role=_one_of("assistant")),
}  # fmt: skip
OTHER_KEYS = _group(  # of `speculative_config`
    "Leave it out.",
    draft_tensor_parallel_size=_ONE, max_model_len=_NOTHING, code_revision=_NOTHING, parallel_drafting=_OFF,
    enable_adaptive_verification=_EITHER, enforce_eager=_EITHER, disable_padded_drafter_batch=_EITHER,
)  # fmt: skip
_SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-q": "--quantization",
}  # fmt: skip


def check_other_arguments(others: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises `ConfigError` for arguments that neither `LLM` nor vLLM has (with the nearest), and unsupported values."""
    for name, value in others.items():
        if name not in OTHER_ARGUMENTS:
            raise ConfigError(f"LLM has no argument {shown(name)}. {nearest_name_hint(name, known)}")
        OTHER_ARGUMENTS[name].check(f"{name} = {shown(value)}", value)


def without_other_options(given: Iterable[str], own: Collection[str]) -> list[str]:
    """Returns a command line without vLLM's other options; raises `ConfigError` as `check_other_arguments` does.

    As in vLLM, `--max_num_seqs` is read as `--max-num-seqs`. `own` are the options of the command.
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
            value = read_option(text if equals else next(rest, ""))
            told = f"{option} {shown(value)}"
        other.check(told, value)
    return kept


def read_option(text: str) -> Any:
    """Returns the value of an option: parsed as JSON, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
