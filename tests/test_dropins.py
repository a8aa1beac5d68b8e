"""docs/dropins.md names every argument and field of transformers and vLLM, and the code does what the page says."""

import ast
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import llm, target, tokenizer
from transformers import GenerationConfig, GenerationMixin

from foretoken import LLM, RequestOutputKind, SamplingParams
from foretoken.core.errors import ForetokenError
from foretoken.hf.generate_request import ARGUMENTS, FIELDS, set_argument, set_field

ROOT = Path(__file__).parents[1]
# A value that asks for something, for fields whose type matters.
VALUES: dict[str, Any] = {"num_beams": 4, "num_beam_groups": 2, "guidance_scale": 2.0}


def test_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "dropins.md").read_text(encoding="utf-8")
    page = runpy.run_path(str(ROOT / ".ci" / "make_dropins.py"))["page"]()
    assert written == page, "docs/dropins.md is stale. Run `python .ci/make_dropins.py` and commit the result."


def test_every_field_and_argument_of_the_installed_transformers_is_listed() -> None:
    known = set(GenerationConfig().to_dict())
    assert len(known) > 50
    assert not known - FIELDS.keys()
    signature = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert len(signature) > 8
    assert not signature - ARGUMENTS.keys()


def config(**values: Any) -> GenerationConfig:
    """A configuration whose values nobody checks."""
    made = GenerationConfig()
    for name, value in {**made._get_default_generation_params(), **values}.items():
        setattr(made, name, value)
    return made


def test_defaults_ask_for_nothing() -> None:
    assert set_field(config()) is None
    assert set_argument(dict.fromkeys(ARGUMENTS)) is None


@pytest.mark.parametrize("name", [name for name, each in FIELDS.items() if each.how == "by transformers"])
def test_fields_that_are_left_to_transformers_are_noticed(name: str) -> None:
    assert set_field(config(**{name: VALUES.get(name, 3)})) == name
    for value in FIELDS[name].neutral:
        assert set_field(config(**{name: value})) is None


def test_fields_that_work_or_do_nothing_are_not() -> None:
    values = {name: 3 for name, each in FIELDS.items() if each.how != "by transformers"}
    assert set_field(config(**values)) is None


def test_fields_of_later_releases_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationConfig, "to_dict", lambda self: {"from_the_future": None, "top_k": None})
    assert set_field(config(from_the_future=1)) == "from_the_future"
    assert set_field(config()) is None
    assert set_argument({"inputs": 1, "from_the_future": 1}) == "from_the_future"


# Of vLLM 0.33: the arguments of `LLM`, and the fields of `SamplingParams` that a caller sets.
LLM_OF_VLLM = """
    model runner convert tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code allowed_local_media_path
    allowed_media_domains tensor_parallel_size dtype quantization revision tokenizer_revision chat_template seed
    gpu_memory_utilization cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_params
    enforce_eager enable_return_routed_experts return_sampling_mask disable_custom_all_reduce hf_token hf_overrides
    mm_processor_kwargs pooler_config structured_outputs_config profiler_config attention_config kv_cache_memory_bytes
    compilation_config quantization_config logits_processors spec_method spec_model spec_tokens
"""
FIELDS_OF_VLLM = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
    ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
    logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length structured_outputs
    logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
    repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""
# Values that work, for what the page says works.
WORKING_ARGUMENTS: dict[str, Any] = {
    "model": None, "speculative_config": {"method": "ngram"}, "dtype": "float32", "quantization": "int8",
    "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 32, "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 1 << 24, "kv_cache_dtype": "int8",
    "gpu_memory_utilization": 0.4,
    "seed": 0, "tokenizer": None, "revision": None, "tokenizer_revision": None, "runner": "generate",
    "generation_config": "vllm", "override_generation_config": {"top_k": 5},
}  # fmt: skip
WORKING_FIELDS: dict[str, Any] = {
    "n": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {5: 1.0}, "bad_words": [[7]],
    "allowed_token_ids": [5, 6, 7], "min_tokens": 1, "max_tokens": 3, "stop": ["x"], "stop_token_ids": [5],
    "ignore_eos": True, "include_stop_str_in_output": True, "seed": 3, "logprobs": 2, "prompt_logprobs": 2,
    "skip_special_tokens": False, "structured_outputs": {"regex": "[ab]+"}, "output_kind": RequestOutputKind.DELTA,
}  # fmt: skip


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """By name what the page says of the names in one of its tables."""
    page = (ROOT / "docs" / "dropins.md").read_text(encoding="utf-8")
    table = page.split(f"| {heading} | | |\n|---|---|---|\n")[1].split("\n\n")[0]
    parts = [re.fullmatch(r"\| `(\w+)` \| (.*?) \|(?: (.*))? \|", line) for line in table.splitlines()]
    return {found[1]: (found[2], found[3] or "") for found in parts if found}


def ignored(words: str) -> list[Any]:
    """The values in code font among what the page says is ignored."""
    return [set() if each == "set()" else ast.literal_eval(each) for each in re.findall("`([^`]*)`", words)]


def test_every_argument_and_field_of_vllm_is_listed() -> None:
    assert set(LLM_OF_VLLM.split()) <= rows("argument of `LLM`").keys()
    assert set(FIELDS_OF_VLLM.split()) <= rows("field of `SamplingParams`").keys()


def test_arguments_of_llm_do_what_the_page_says() -> None:
    """All values that the page calls ignored are taken, several arguments at once; another one is refused with it."""
    table = rows("argument of `LLM`")
    others = {name: ignored(what) for name, (what, _) in table.items() if what.startswith("ignored: ")}
    assert {name for name, (what, _) in table.items() if what == "works"} == WORKING_ARGUMENTS.keys()
    assert len(others) + len(WORKING_ARGUMENTS) == len(table) > 80
    expected = llm({}, max_num_seqs=2).generate([5, 6])[0].outputs[0].token_ids
    assert len(expected) > 0
    for round_ in range(max(map(len, others.values()))):
        given = {name: values[min(round_, len(values) - 1)] for name, values in others.items()}
        assert llm({}, max_num_seqs=2, **given).tokenizer is not None
    for name in others:
        with pytest.raises(ForetokenError) as error:
            LLM("no/such-model", **{name: object()})
        assert str(error.value) == f"{name} = of type object is not supported. {table[name][1]}"


def test_arguments_of_llm_that_work() -> None:
    module = target("llama", torch.float32)
    working = {**WORKING_ARGUMENTS, "model": module, "tokenizer": tokenizer()}
    engine = LLM(**working)
    assert engine.target.context_len == 64
    assert [drafter.name for drafter in engine.drafters] == ["ngram"]
    for name in working:
        with pytest.raises(ForetokenError, match=rf"\b{name}\b"):
            LLM(**{**working, name: 3.5})


@pytest.fixture(scope="module")
def engine() -> LLM:
    return llm({}, max_num_seqs=2)


def test_fields_of_sampling_params_do_what_the_page_says(engine: LLM) -> None:
    table = rows("field of `SamplingParams`")
    others = {name: ignored(what) for name, (what, _) in table.items() if what.startswith("ignored: ")}
    assert {name for name, (what, _) in table.items() if what == "works"} == WORKING_FIELDS.keys()
    assert len(others) + len(WORKING_FIELDS) == len(table)
    for name, value in WORKING_FIELDS.items():
        params = SamplingParams(**{name: value})
        assert engine.generate("a b", params)[0].outputs[0].finish_reason in ("stop", "length")
        with pytest.raises(ForetokenError, match=name):
            SamplingParams(**{name: object()})
    for name, values in others.items():
        assert None in values
        for value in values:
            assert SamplingParams(**{name: value}) == SamplingParams()
        with pytest.raises(ForetokenError) as error:
            SamplingParams(**{name: object()})
        assert str(error.value) == f"{name} = of type object is not supported. {table[name][1]}"


@pytest.mark.parametrize("heading", ["argument of `LLM.generate`", "argument of `LLM.chat`"])
def test_arguments_of_calls_do_what_the_page_says(heading: str, engine: LLM) -> None:
    table, call = rows(heading), engine.chat if "chat" in heading else engine.generate
    given: list[Any] = [[{"role": "user", "content": "a b"}]] if call == engine.chat else ["a b"]
    form: dict[str, Any] = {"chat_template": "{{ messages[0].content }}"} if call == engine.chat else {}
    expected = call(given, **form)[0].outputs[0].token_ids
    for name, (what, instead) in table.items():
        if what == "works":
            continue
        for value in ignored(what):
            assert len(call(given, **form, **{name: value})) == 1
        with pytest.raises(ForetokenError) as error:
            call(given, **form, **{name: object()})
        assert str(error.value) == f"{name} = of type object is not supported. {instead}"
    assert expected
    with pytest.raises(ForetokenError, match=r"has no argument 'prioritat'\."):
        call(given, **form, prioritat=1)
