"""What vLLM's `LLM` has besides `generate`: chat, metrics, prompt log-probabilities, allowed tokens, its scripts."""

import argparse
import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
from end_to_end.tiny_llms import drafters, llm, tokenizer
from tiny_models import EOS_ID, VOCAB_SIZE

from foretoken import LLM, AsyncLLM, EngineArgs, EngineStopped, SamplingParams
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.results import Counter, Gauge, Vector
from foretoken.inputs import TextPrompt, TokensPrompt
from foretoken.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    "{% if tools %}{{ tools[0]['name'] }}{% endif %}{% if add_generation_prompt %}bot {% endif %}"
)
TALK = [{"role": "user", "content": "hi there"}, {"role": "bot", "content": "a"}, {"role": "user", "content": "go on"}]


@pytest.fixture(scope="module")
def engine() -> LLM:
    return llm(drafters()["draft tree"](None), max_num_seqs=3)


def test_metrics_count_what_outputs_say_of_drafts() -> None:
    engine = LLM("models/tinycode", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    outputs = engine.generate(
        ["def read_config(path):\n", "class Queue:", "for index in range("], replace(GREEDY, max_tokens=32)
    )
    own = [output.metrics for output in outputs]
    found: dict[str, Any] = {each.name.removeprefix("vllm:spec_decode_"): each for each in engine.get_metrics()}
    assert found["num_draft_tokens"].value == sum(each.num_drafted for each in own) > 0
    assert found["num_accepted_tokens"].value == sum(each.num_accepted for each in own) > 0
    positions = found["num_accepted_tokens_per_pos"]
    assert isinstance(positions, Vector)
    assert positions.values == [sum(each.accepted_at_depth[depth] for each in own) for depth in (1, 2, 3)]
    assert isinstance(found["num_drafts"], Counter)
    assert positions.values[0] <= found["num_drafts"].value <= sum(each.steps for each in own)


def test_metrics_count_requests_and_tokens() -> None:
    engine = llm({})
    engine.generate([[5, 6, 7], [8]], replace(GREEDY, n=2, ignore_eos=True))
    found = {(each.name, each.labels.get("finished_reason")): each for each in engine.get_metrics()}
    names = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:spec_decode_num_drafts")
    assert [found[name, None].value for name in names] == [8, 32, 0]
    assert found["vllm:request_success", "length"].value == 4
    running = found["vllm:num_requests_running", None]
    assert isinstance(running, Gauge)
    assert (running.value, running.labels["model_name"]) == (0, "LlamaForCausalLM")
    chunks = engine.stream([[5, 6]] * 9, GREEDY)
    next(chunks)
    busy = {each.name: each for each in engine.get_metrics()}
    assert [busy[f"vllm:num_requests_{what}"].value for what in ("running", "waiting")] == [8, 1]
    chunks.close()


def test_chat_is_generate_of_the_rendered_text(engine: LLM) -> None:
    (output,) = engine.chat(TALK, GREEDY, chat_template=TEMPLATE)
    assert output.prompt == "<s>user hi there\n<s>bot a\n<s>user go on\nbot "
    assert output.prompt_token_ids == tokenizer()(output.prompt, add_special_tokens=False)["input_ids"]
    same = engine.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY)[0]
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    several = engine.chat([TALK[:1], TALK], [GREEDY, GREEDY], use_tqdm=False, chat_template=TEMPLATE)
    assert several[0].prompt == "<s>user hi there\nbot "
    assert several[1].outputs[0].text == output.outputs[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]}]
    (joined,) = engine.chat(
        parts, GREEDY, chat_template=TEMPLATE, add_generation_prompt=False, tools=[{"name": "find"}],
        chat_template_content_format="auto", lora_request=None, chat_template_kwargs={"unused": 1},
    )  # fmt: skip
    assert joined.prompt == "<s>user hi\nthere\nfind"
    (going_on,) = engine.chat(
        TALK[:2], GREEDY, chat_template=TEMPLATE, add_generation_prompt=False, continue_final_message=True
    )
    assert going_on.prompt == "<s>user hi there\n<s>bot a"


def test_the_tokenizers_own_template(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.get_tokenizer(), "chat_template", TEMPLATE)
    assert engine.chat(TALK[:1], GREEDY)[0].prompt == "<s>user hi there\nbot "


CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ m.content or '-' }}{{ c.arguments | tojson }}", '-{"x": 1}'),  # Qwen's, Llama 3's
        ("{% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %}", "x=1"),  # Qwen3-Coder's
        ("{{ 'args: ' + c.arguments }}", 'args: {"x": 1}'),  # DeepSeek's, of V3
        ("{{ m['content'] + 'args: ' + c.arguments }}", 'args: {"x": 1}'),  # of V3.1
        ("{% for part in m.content %}{% endfor %}{{ c.arguments.x }}", "1"),  # Llama 4's
    ],
)
def test_calls_reach_templates_as_they_take_them(template: str, expected: str, engine: LLM) -> None:
    whole = "{% for m in messages if 'tool_calls' in m %}{% set c = m.tool_calls[0].function %}" + template
    arguments: list[Any] = ['{"x": 1}', {"x": 1}]
    for given in arguments:
        call = {**CALL, "function": {**CALL["function"], "arguments": given}}
        talk = [*TALK[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]
        (prompt,) = engine.chat_prompts(talk, chat_template=whole + "{% endfor %}")
        assert prompt["prompt"] == expected
    plain = [{**message, "tool_calls": none} for none in (None, []) for message in TALK]
    (prompt,) = engine.chat_prompts(plain, chat_template=whole + "{% endfor %}#", add_generation_prompt=False)
    assert prompt["prompt"] == "#", "messages without calls are not taken for such with calls"
    with pytest.raises(RequestError, match=r"refuses the conversation: .*concatenate"):
        engine.chat_prompts(talk, chat_template="{{ 'a' + 1 }}")


@pytest.mark.parametrize(
    ("messages", "form", "sentence"),
    [
        (TALK, {"chat_template": None}, "the tokenizer has no chat template: .* Pass chat_template=TEXT"),
        (TALK, {"chat_template": "{{ 1 / 0 }}"}, "the chat template refuses the conversation: division by zero"),
        (TALK, {"chat_template": "{% for"}, "the chat template refuses the conversation: "),
        (TALK, {"chat_template": 5}, "chat_template is 5. Expected text"),
        (TALK, {"continue_final_message": True}, "exclude each other"),
        (TALK, {"add_generation_promt": True}, "chat has no argument .* Did you mean 'add_generation_prompt'"),
        (TALK, {"lora_request": 1}, "lora_request = 1 is not supported"),
        ("hello", {}, "messages are 'hello'. Expected a list of messages"),
        ([], {}, "Expected a list of messages"),
        ([TALK, []], {}, "a conversation is empty"),
        ([{"content": "hi"}], {}, "a message is .*Expected .'role'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "the content of a message is .*Expected text"),
        ([{"role": "user", "content": 7}], {}, "the content of a message is 7"),
    ],
)
def test_what_is_no_conversation_is_refused(engine: LLM, messages: Any, form: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        engine.chat(messages, GREEDY, **{"chat_template": TEMPLATE, **form})


def test_chat_without_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"no tokenizer that knows chat templates\. Pass one"):
        LLM(llm({}).target.model).chat(TALK, GREEDY, chat_template=TEMPLATE)


@pytest.mark.parametrize("length", [1, 2, 40])
def test_prompt_logprobs_are_those_of_the_same_tokens_as_output(engine: LLM, length: int) -> None:
    """Of a prompt and what followed it, in one pass or in several, beside requests that ask for none."""
    prompt = [3 + (7 * i) % (VOCAB_SIZE - 3) for i in range(length)]
    first = engine.generate(prompt, replace(GREEDY, logprobs=3))[0].outputs[0]
    longer = [*prompt, *first.token_ids]
    scored = replace(GREEDY, max_tokens=2, prompt_logprobs=3, n=2)
    for chunk in (512, 3):
        engine.target.prefill_chunk = chunk
        output, other = engine.generate([longer, longer[::-1]], [scored, GREEDY])
        assert other.prompt_logprobs is None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert [next(iter(each or {}), None) for each in output.prompt_logprobs[1:]] == longer[1:]
        for ours, theirs in zip(output.prompt_logprobs[length:], first.logprobs or (), strict=True):
            assert ours is not None
            assert list(ours) == list(theirs)
            assert [(p.rank, p.decoded_token) for p in ours.values()] == [
                (p.rank, p.decoded_token) for p in theirs.values()
            ]
            assert [p.logprob for p in ours.values()] == pytest.approx([p.logprob for p in theirs.values()], abs=1e-6)
        assert (
            output.outputs[0].token_ids
            == engine.generate(longer, replace(scored, prompt_logprobs=None))[0].outputs[0].token_ids
        )


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=30)])
def test_only_allowed_tokens_are_generated(engine: LLM, params: SamplingParams) -> None:
    allowed = [EOS_ID, 9, 12, 30, 41]
    (output,) = engine.generate([5, 9, 3], replace(params, allowed_token_ids=allowed))
    assert set(output.outputs[0].token_ids) <= set(allowed)
    assert len(output.outputs[0].token_ids) > 2
    other = engine.generate([5, 9, 3], params)[0].outputs[0].token_ids
    assert not set(other) <= set(allowed)


def test_a_single_allowed_token_has_probability_one() -> None:
    (output,) = llm({}).generate([5], SamplingParams(temperature=1.0, allowed_token_ids=[7], max_tokens=4, logprobs=0))
    assert output.outputs[0].token_ids == [7] * 4
    value = (output.outputs[0].logprobs or [{}])[0][7].logprob
    assert math.isfinite(value)
    assert value < 0, "log-probabilities are the model's, before processors"


def test_allowed_tokens_beyond_the_vocabulary_are_refused(engine: LLM) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        engine.generate([5], SamplingParams(allowed_token_ids=[VOCAB_SIZE]))


def test_arguments_are_put_together_before_the_engine_is_made() -> None:
    args = EngineArgs(model="models/tinycode", max_model_len=64, tensor_parallel_size=1)
    assert (args.max_model_len, args.seed, args.tensor_parallel_size, args.swap_space) == (64, None, 1, None)
    assert vars(args) == {"model": "models/tinycode", "max_model_len": 64, "tensor_parallel_size": 1}
    assert repr(args) == "EngineArgs(max_model_len=64, tensor_parallel_size=1, model='models/tinycode')"
    for engine in (LLM.from_engine_args(args), LLM(**vars(args))):
        assert engine.target.context_len == 64
    with pytest.raises(ConfigError, match=r"EngineArgs has no argument 'max_modl_len'\. Did you mean 'max_model_len'"):
        EngineArgs(model="models/tinycode", max_modl_len=64)
    for wrong in (5, None, "models/tinycode", argparse.Namespace(seed=1)):
        with pytest.raises(ConfigError, match=r"engine_args is .* Expected EngineArgs\(model=DIRECTORY, \.\.\.\)\."):
            LLM.from_engine_args(wrong)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="'EngineArgs' object has no attribute 'max_modl_len'"):
        _ = args.max_modl_len


def test_arguments_come_from_a_command_line() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    line = ["--model", "models/tinycode", "--max-model-len", "64", "--no-enable-prefix-caching", "--enforce-eager"]
    line += ["--max-tokens", "4", "--speculative-config", '{"method": "ngram"}', "--gpu-memory-utilization", "0.9"]
    given = parser.parse_args(line)
    args = EngineArgs.from_cli_args(given)
    assert vars(args) == {
        "model": "models/tinycode", "max_model_len": 64, "enable_prefix_caching": False, "enforce_eager": True,
        "speculative_config": '{"method": "ngram"}', "gpu_memory_utilization": 0.9,
    }  # fmt: skip
    engine = LLM.from_engine_args(args)
    assert [drafter.name for drafter in engine.drafters] == ["ngram"]
    with pytest.raises(ConfigError, match="there is no model among the arguments"):
        EngineArgs.from_cli_args(argparse.Namespace(max_tokens=4))


def test_an_llm_gives_up_what_it_holds_at_the_end_of_its_block() -> None:
    with llm({}) as engine:
        (output,) = engine.generate([5, 6], GREEDY)
        model = weakref.ref(engine.target.model.module)
        rows = weakref.ref(engine.target.cache)
        stream = engine.stream([5, 6], GREEDY)
        next(stream)
    assert output.outputs[0].token_ids
    assert model() is not None, "the test's own, which other tests use"
    del stream
    gc.collect()
    assert rows() is None
    for call in (
        lambda: engine.generate([5]),
        lambda: engine.stream([5]),
        engine.get_metrics,
        lambda: AsyncLLM(engine),
    ):
        with pytest.raises(EngineStopped, match=r"this LLM was closed at the end of its with block\. .* Make another"):
            call()
    assert not hasattr(engine, "_repr_html_")
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generates'"):
        _ = llm({}).generates


def test_parameters_may_change_between_calls_and_not_within_one(engine: LLM) -> None:
    """As vLLM's scripts do, which take parameters and assign to their fields."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={9: 1.0})
    stream = engine.stream([5, 6], params)
    params.max_tokens = 2
    assert sum(len(chunk.token_ids) for chunk in stream) == 4
    assert len(engine.generate([5, 6], params)[0].outputs[0].token_ids) == 2
    copied = params.clone()
    params.max_tokens, params.logit_bias[9] = 3, 2.0  # type: ignore[index]
    assert (copied.max_tokens, dict(copied.logit_bias)) == (2, {9: 1.0})
    params.max_tokens = -1
    with pytest.raises(RequestError, match="max_tokens is -1"):
        engine.generate([5], params)
    with pytest.raises(AttributeError):
        params.max_token = 4  # type: ignore[attr-defined]


def test_parameters_of_a_request_any_of_which_may_be_none() -> None:
    given = {
        "n": None,
        "top_p": None,
        "top_k": None,
        "stop": None,
        "seed": None,
        "temperature": 0.5,
        "detokenize": True,
    }
    assert SamplingParams.from_optional(**given) == SamplingParams(temperature=0.5)
    biased = SamplingParams.from_optional(logit_bias={"7": 500.0, 8: -101, "9": 1.5})
    assert biased.logit_bias == {7: 100.0, 8: -100.0, 9: 1.5}
    for bias, sentence in (({"x": 1.0}, "token id of logit_bias is 'x'"), ({5: "y"}, "is 'y'"), (3, "logit_bias is 3")):
        with pytest.raises(RequestError, match=sentence):
            SamplingParams.from_optional(logit_bias=bias)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="is nan"):
        SamplingParams.from_optional(logit_bias={5: math.nan})


def test_prompts_in_vllms_types(engine: LLM) -> None:
    ids = engine.encode("a b")
    prompts: list[Any] = [TextPrompt(prompt="a b"), TokensPrompt(prompt_token_ids=ids)]
    prompts += [{"prompt": "a b", "multi_modal_data": None, "mm_processor_kwargs": {}}]
    outputs = engine.generate(prompts, GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    with pytest.raises(RequestError, match="the prompt has multi_modal_data, which is not supported"):
        engine.generate({"prompt": "a b", "multi_modal_data": {"image": 1}}, GREEDY)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_new_parts_are_given_where_new_parts_are_asked_for(kind: RequestOutputKind, engine: LLM) -> None:
    params = replace(GREEDY, output_kind=kind)
    expected = engine.generate([5, 6], GREEDY)[0].outputs[0].token_ids
    assert engine.generate([5, 6], params)[0].outputs[0].token_ids == expected
    if kind == RequestOutputKind.DELTA:
        assert [token for chunk in engine.stream([5, 6], params) for token in chunk.token_ids] == expected
        return
    with pytest.raises(RequestError, match=rf"output_kind is {kind.name}, but stream gives new parts\. Expected DELTA"):
        engine.stream([5, 6], params)
