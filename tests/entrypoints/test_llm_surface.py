"""`LLM`: forms of prompts, what comes back, and errors that leave the engine as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from drafters.adversarial import AdversarialDrafter, Options
from end_to_end.tiny_llms import drafters, llm, target, tokenizer
from tiny_models import CONTEXT_LEN, EOS_ID, VOCAB_SIZE

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.errors import ConfigError, ForetokenError, RequestError
from foretoken.drafters.base import DraftRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
TEXT = "the abc"


@pytest.fixture(scope="module")
def engine() -> LLM:
    """One engine that survives every error below."""
    return llm(drafters()["draft tree"](None), max_num_seqs=3)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    """Token ids of every first completion."""
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        (TEXT, 1),
        ({"prompt": TEXT}, 1),
        ("ids", 1),
        ({"prompt_token_ids": "ids"}, 1),
        ([TEXT, "ids", {"prompt": TEXT}, {"prompt_token_ids": "ids"}, {"prompt": "x", "prompt_token_ids": "ids"}], 5),
        ((TEXT, TEXT), 2),
        ("tuple of ids", 1),
        ("tensor", 1),
        ("batch tensor", 2),
        ("array", 1),
        ([], 0),
    ],
)
def test_prompts_in_every_form(engine: LLM, prompts: Any, count: int) -> None:
    ids = tokenizer()(TEXT)["input_ids"]
    forms = {
        "ids": ids, "tuple of ids": tuple(ids), "tensor": torch.tensor(ids), "batch tensor": torch.tensor([ids, ids]),
        "array": np.array(ids),
    }  # fmt: skip

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(part) for key, part in value.items()}
        return [fill(part) for part in value] if isinstance(value, list) else forms.get(value, value)

    outputs = engine.generate(fill(prompts), GREEDY)
    want = llm({}).generate([ids], GREEDY)[0]
    assert len(outputs) == len({output.request_id for output in outputs}) == count
    for output in outputs:
        assert output.finished
        assert output.prompt_token_ids == ids
        assert output.outputs[0] == want.outputs[0]


def test_the_prompt_comes_back_as_it_was_given(engine: LLM) -> None:
    """Text as written, though the tokenizer may add or lose something; None for ids, as in vLLM."""
    outputs = engine.generate(["Straße abc", [4, 5], {"prompt": "ab", "prompt_token_ids": [6]}], GREEDY)
    assert [output.prompt for output in outputs] == ["Straße abc", None, "ab"]
    assert LLM(target()).generate([4, 5], GREEDY)[0].prompt is None


class Listener(AdversarialDrafter):
    """A drafter that proposes nothing and keeps what it is told of requests."""

    def __init__(self) -> None:
        super().__init__(Options(method="listener", behaviour="empty"))
        self.heard: list[DraftRequest] = []

    def begin(self, slot: int, request: DraftRequest) -> None:
        self.heard.append(request)


def test_predictions_and_salts_reach_drafters_and_change_no_text() -> None:
    ids = tokenizer()(TEXT)["input_ids"]
    prompts = [
        {"prompt": TEXT, "prediction": "he abc", "cache_salt": "mine"},
        {"prompt_token_ids": ids, "prediction": torch.tensor(ids)},
        {"prompt_token_ids": ids, "prediction": np.array(ids), "cache_salt": None},
        {"prompt": TEXT, "prediction": [*ids] * 3, "cache_salt": "é" * 1024},
        {"prompt": TEXT, "prediction": None},
        TEXT,
    ]
    longest = {"prompt": TEXT, "prediction": (5,) * CONTEXT_LEN}
    listener = Listener()
    outputs = llm({"drafter": lambda: listener}).generate([*prompts, longest], replace(GREEDY, n=2))
    want = llm({}).generate(ids, replace(GREEDY, n=2))[0]
    assert all(output.outputs == want.outputs for output in outputs)
    words = tokenizer()("he abc")["input_ids"]
    told = [words, ids, ids, [*ids] * 3, None, None, [5] * CONTEXT_LEN]
    assert [heard.prediction for heard in listener.heard] == [each for each in told for _ in range(2)]
    salts = ["mine", None, None, "é" * 1024, None, None, None]
    assert [heard.cache_salt for heard in listener.heard] == [each for each in salts for _ in range(2)]
    assert all(heard.prompt == ids for heard in listener.heard)


def test_params_for_all_or_for_each(engine: LLM) -> None:
    each = [replace(GREEDY, max_tokens=n) for n in (1, 4)]
    assert [len(ids) for ids in texts(engine.generate([[5], [5]], each))] == [1, 4]
    assert len(engine.generate([5], None)[0].outputs[0].token_ids) <= 16, "vLLM's defaults"


MISTAKES: list[tuple[Any, Any, str]] = [
    ([[]], GREEDY, "the prompt is empty. Expected at least one token."),
    ("", GREEDY, "the prompt is empty"),
    ([[5], {"prompt_token_ids": []}], GREEDY, "the prompt is empty"),
    ([5, VOCAB_SIZE], GREEDY, "the prompt holds token id 67. Expected integers in 0..66."),
    ([5, -1], GREEDY, "the prompt holds token id -1"),
    ([[5, 1.5]], GREEDY, "the prompt holds token id 1.5"),
    ([[5, "a"]], GREEDY, "the prompt holds token id 'a'"),
    ([True, 5], GREEDY, "the prompt holds token id True"),
    ([5, False], GREEDY, "the prompt holds token id False"),
    (np.array([True, False]), GREEDY, "the prompt holds token id True"),
    (torch.tensor([[True]]), GREEDY, "the prompt holds token id True"),
    ([np.array([1.0, 2.0])], GREEDY, "the prompt holds token id 1.0"),
    ([5, None], GREEDY, "the prompt holds token id None"),
    ([[5, [6]]], GREEDY, r"the prompt holds token id \[6\]"),
    ([5, 2**70], GREEDY, "the prompt holds token id 1180591620717411303424"),
    ([5, 10**5000], GREEDY, "the prompt holds token id an integer of"),
    (b"abc", GREEDY, "the prompts are bytes. Expected text"),
    ([b"abc"], GREEDY, "a prompt is bytes. Expected text"),
    ([bytearray(b"abc")], GREEDY, "a prompt is bytearray"),
    ({5, 6}, GREEDY, "the prompts are set"),
    (iter([5, 6]), GREEDY, "the prompts are list_iterator"),
    (torch.tensor(5), GREEDY, "the prompts are int"),
    ("half \ud83d", GREEDY, "the prompt holds a lone surrogate"),
    ({"prompt": 5}, GREEDY, "a prompt is int"),
    ({"prompt": None}, GREEDY, "Expected 'prompt' or 'prompt_token_ids'"),
    ({"prompt": "a", "multi_modal_data": 1}, GREEDY, "the prompt has multi_modal_data, which is not supported"),
    ({"prompt": "a", "multi_modal": 1}, GREEDY, r"the prompt has the keys \['prompt', 'multi_modal'\]"),
    ({"prediction": "a"}, GREEDY, r"the prompt has the keys \['prediction'\]. Expected 'prompt' or"),
    ({"prompt": "a", "prediction": ""}, GREEDY, "the prediction is empty. Expected at least one token. Leave it out."),
    ({"prompt": "a", "prediction": []}, GREEDY, "the prediction is empty"),
    ({"prompt": "a", "prediction": 5}, GREEDY, "the prediction is int. Expected text or a list of token ids."),
    ({"prompt": "a", "prediction": b"a"}, GREEDY, "the prediction is bytes"),
    ({"prompt": "a", "prediction": True}, GREEDY, "the prediction is bool"),
    ({"prompt": "a", "prediction": {"content": "a"}}, GREEDY, "the prediction is dict"),
    ({"prompt": "a", "prediction": [5, VOCAB_SIZE]}, GREEDY, "the prediction holds token id 67. Expected integers in"),
    ({"prompt": "a", "prediction": [-1]}, GREEDY, "the prediction holds token id -1"),
    ({"prompt": "a", "prediction": [5, True]}, GREEDY, "the prediction holds token id True"),
    ({"prompt": "a", "prediction": [[5]]}, GREEDY, r"the prediction holds token id \[5\]"),
    ({"prompt": "a", "prediction": np.ones((2, 2))}, GREEDY, "the prediction holds token id"),
    ({"prompt": "a", "prediction": torch.tensor(5)}, GREEDY, "the prediction is int"),
    ({"prompt": "a", "prediction": "half \ud83d"}, GREEDY, "the prediction holds a lone surrogate"),
    (
        {"prompt": "a", "prediction": [5] * (CONTEXT_LEN + 1)},
        GREEDY,
        "the prediction has 97 tokens. Expected at most 96, the context length. Shorten it.",
    ),
    ({"prompt": "a", "cache_salt": ""}, GREEDY, "cache_salt has 0 characters. Expected 1 to 1024, or None."),
    ({"prompt": "a", "cache_salt": "s" * 1025}, GREEDY, "cache_salt has 1025 characters"),
    ({"prompt": "a", "cache_salt": 5}, GREEDY, "cache_salt is 5. Expected text."),
    ({"prompt": "a", "cache_salt": b"a"}, GREEDY, "cache_salt is b'a'. Expected text."),
    ({"prompt": "a", "cache_salt": "\ud800"}, GREEDY, "cache_salt holds a lone surrogate"),
    ({"input_ids": 5}, GREEDY, "input_ids are 5. Expected token ids"),
    ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, GREEDY, "attention_mask has another shape than input_ids"),
    ({"input_ids": [[True]]}, GREEDY, "the prompt holds token id True"),
    ([5], {"temperature": 0}, r"sampling_params is \{'temperature': 0\}. Expected SamplingParams"),
    ([5], 0.8, "sampling_params is 0.8"),
    ([[5]], [{}], r"an entry of sampling_params is \{\}"),
    ([5] * CONTEXT_LEN, GREEDY, "prompt 0 has 96 tokens. Expected at most 95, one less than the context"),
    ([[5], [5] * 200], GREEDY, "prompt 1 has 200 tokens"),
    ({"text": "abc"}, GREEDY, r"the prompt has the keys \['text'\]. Expected 'prompt' or 'prompt_token_ids'"),
    (None, GREEDY, "the prompts are NoneType. Expected text, token ids"),
    (7, GREEDY, "the prompts are int"),
    ([None], GREEDY, "a prompt is NoneType. Expected text"),
    ([[5], [6]], [GREEDY] * 3, "2 prompts came with 3 sampling parameters. Expected as many."),
    ([[5], [6]], [GREEDY], "2 prompts came with 1 sampling parameters"),
    ([5], replace(GREEDY, logit_bias={VOCAB_SIZE: 1.0}), "logit_bias or stop_token_ids holds token id 67"),
    ([5], replace(GREEDY, stop_token_ids=[99]), "logit_bias or stop_token_ids holds token id 99"),
    ([5], replace(GREEDY, bad_words=[[3, 99]]), "bad_words holds token id 99"),
    ([5], replace(GREEDY, bad_words=["日"]), "the tokenizer has no token for '日' of bad_words. Pass token ids."),
]


@pytest.mark.parametrize(("prompts", "params", "sentence"), MISTAKES)
def test_mistakes_generate_nothing_and_break_nothing(engine: LLM, prompts: Any, params: Any, sentence: str) -> None:
    before = texts(engine.generate([[5], [6]], GREEDY))
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match=sentence):
            call(prompts, params)
        assert not engine._engine.has_work
    assert texts(engine.generate([[5], [6]], GREEDY)) == before


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ("abc", GREEDY, "the prompt is text but the model has no tokenizer. Pass token ids."),
        (
            {"prompt_token_ids": [5], "prediction": "abc"},
            GREEDY,
            "the prediction is text but the model has no tokenizer",
        ),
        ([5], replace(GREEDY, stop=["x"]), "stop holds text but the model has no tokenizer. Use stop_token_ids."),
        ([5], replace(GREEDY, bad_words=["x"]), "bad_words holds text but the model has no tokenizer"),
    ],
)
def test_without_a_tokenizer_text_is_refused(prompt: Any, params: SamplingParams, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        LLM(target()).generate(prompt, params)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0. Expected at least 1"),
        ({"max_num_seqs": 1.5}, "max_num_seqs is 1.5. Expected an integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True. Expected an integer"),
        ({"max_num_seqs": "8"}, "max_num_seqs is '8'. Expected an integer"),
        ({"max_num_seqs": 10**12}, "max_num_seqs is 1000000000000. Expected at least 1 and at most 65536."),
        ({"max_model_len": 3}, "max_model_len is 3. Expected at least 8."),
        ({"max_model_len": "96"}, "max_model_len is '96'. Expected an integer"),
        ({"seed": "4"}, "seed is '4'. Expected an integer"),
        ({"dtype": 32}, "dtype is 32. Expected a name"),
        ({"device": 3}, "device is 3. Expected a name such as 'cpu'"),
        ({"runner": ["lean"]}, r"runner is \['lean'\]. Expected text"),
        ({"runner": "\ud800"}, "runner holds a lone surrogate"),
        ({"drafter": 3}, "drafter is 3. Expected a function"),
        ({"allow_unknown_ids": "no"}, "allow_unknown_ids is 'no'. Expected True or False"),
        ({"speculative_config": 5}, "speculative_config is 5. Expected for example"),
        ({"speculative_config": '{"method": ngram}'}, "speculative_config is not valid JSON"),
        ({"speculative_config": "ngra" * 9999}, r"speculative method 'ngra.*… \(str\) does not exist"),
        ({"speculative_config": "\ud800"}, "speculative_config holds a lone surrogate"),
        ({"max_model_len": CONTEXT_LEN + 1}, "max_model_len is 97, but 'LlamaForCausalLM' has a context of 96 tokens"),
        ({"max_model_len": 10**30}, "has a context of 96 tokens. Expected at most that"),
        ({"on_step": 5}, "on_step is 5. Expected a function"),
        ({"trust_drafter": "yes"}, "trust_drafter is 'yes'. Expected True or False"),
        ({"max_num_seq": 4}, r"LLM has no argument 'max_num_seq'\. Did you mean 'max_num_seqs'\?"),
        ({"n_gpu_layers": 4}, r"LLM has no argument 'n_gpu_layers'\."),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size = 2 is not supported\. The model runs on one device"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size = True is not supported"),
        ({"gpu_memory_utilization": 1.2}, r"gpu_memory_utilization is 1\.2\. Expected above 0 and at most 1"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization is True. Expected a number"),
        ({"trust_remote_code": "yes"}, "trust_remote_code = 'yes' is not supported. Code that comes with a model"),
        ({"runner": "pooling"}, "runner 'pooling' does not exist"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching is 'yes'. Expected True or False"),
        ({"quantization": "awq"}, "quantization is 'awq'. Expected int4 or int8"),
        ({"revision": "v1"}, r"revision is 'v1', but model is in memory\. Expected a hub id\. Leave it out\."),
        ({"tokenizer_revision": "v1"}, "tokenizer_revision is 'v1', but tokenizer is in memory"),
        ({"revision": 5}, "revision is 5. Expected text"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens = 5 is not supported. Pass speculative_config="),
        ({"torch_dtype": torch.float32}, "torch_dtype = of type dtype is not supported. Pass it as 'dtype'"),
        ({"speculative_config": "[" * 100_000}, "speculative_config is not valid JSON"),
        ({"speculative_config": "[1]"}, r"speculative_config is \[1\]"),
        ({"speculative_config": {5: "ngram"}}, r"speculative_config is \{5: 'ngram'\}"),
    ],
)
def test_engines_that_cannot_work_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        llm({}, module=target(), **arguments)
    assert isinstance(error.value, ForetokenError)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "block_size": 16, "enforce_eager": True},
        {"trust_remote_code": False, "quantization_config": None, "code_revision": None, "tokenizer_mode": "auto"},
        {"swap_space": 4, "cpu_offload_gb": 0, "load_format": "auto"},
        {"distributed_executor_backend": None, "enable_chunked_prefill": True, "disable_log_stats": True},
    ],
)
def test_arguments_of_vllm_that_ask_for_nothing(arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "foretoken"):
        assert texts(llm({}, **arguments).generate([5], GREEDY)) == texts(llm({}).generate([5], GREEDY))
    for name in arguments:
        assert f"vLLM's {name} = " in caplog.text


class BytesPath:
    """A path that is no text."""

    def __fspath__(self) -> bytes:
        return b"/models/x"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("a" * 5000, r"model is 'a{50,}… \(str\), which no file can be called: File name too long"),
        ("a/" * 5000, "which no file can be called: File name too long"),
        ("a\nb", r"model is 'a\\nb', which has a line break\. Expected a path, or a hub id\."),
        ("a\0b", r"model is 'a\\x00b', which no file can be called: embedded null byte"),
        ("a\ud800", "model holds a lone surrogate"),
        (b"/models/x", "model is b'/models/x'. Expected a directory"),
        (BytesPath(), "model is b'/models/x'. Expected text"),
    ],
)
def test_paths_that_are_none(path: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        LLM(path)
    assert str(error.value).isprintable()
    with pytest.raises(ConfigError, match="tokenizer"):
        LLM(target(), tokenizer=path)


def test_a_drafter_is_looked_for_beside_a_name_of_any_length(tmp_path: Path) -> None:
    """The target's name may be as long as names can be: what is beside it has none."""
    directory = tmp_path / ("a" * 250)
    target("llama", torch.float32).save_pretrained(directory)
    with pytest.raises(ConfigError, match=r"draft_model needs a draft model\. There is no"):
        LLM(directory, speculative_config={"method": "draft_model"})


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_names_of_drafters_that_no_file_can_have(name: str) -> None:
    for method in ("draft_model", "medusa"):
        with pytest.raises(ForetokenError) as error:
            llm({"speculative_config": {"method": method, "model": name}})
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("given", [3, True, b"x", {}, len])
def test_what_is_no_tokenizer_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer is .* Expected a transformers tokenizer, or a directory"):
        LLM(target(), tokenizer=given)


def test_a_prompt_with_many_keys_is_refused_in_one_line(engine: LLM) -> None:
    with pytest.raises(RequestError, match=r"the prompt has the keys \[0, 1, 2, 3, …\]. Expected") as error:
        engine.generate(dict.fromkeys(range(5000)))
    assert len(str(error.value)) < 140


def test_the_context_limit_is_exact() -> None:
    """A prompt one below the limit gives one token, also when drafts would go on."""
    for name in ("none", "oracle [3, 0, 5]", "draft itself", "random wide"):
        engine = llm(drafters()[name]([[5] * 9 + [1, 2, 3]]), max_model_len=10)
        output = engine.generate([5] * 9, SamplingParams(temperature=0.0, max_tokens=None))[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
        assert len(engine.generate([5], SamplingParams(temperature=0.0, max_tokens=50))[0].outputs[0].token_ids) == 9


def test_logprobs_of_more_tokens_than_there_are() -> None:
    output = llm({}).generate([5], replace(GREEDY, logprobs=1000))[0].outputs[0]
    assert output.logprobs is not None
    for token, scores in zip(output.token_ids, output.logprobs, strict=True):
        assert len(scores) == VOCAB_SIZE
        assert sum(np.exp([score.logprob for score in scores.values()])) == pytest.approx(1.0, abs=1e-5)
        assert scores[token].logprob == max(score.logprob for score in scores.values())
        assert sorted(score.rank for score in scores.values()) == list(range(1, VOCAB_SIZE + 1))
        assert scores[token].decoded_token == tokenizer().decode([token])
    assert output.cumulative_logprob == sum(
        s[t].logprob for t, s in zip(output.token_ids, output.logprobs, strict=True)
    )


def test_text_ends_before_a_stop_token_unless_it_is_kept() -> None:
    plain = llm({}).generate([5], GREEDY)[0].outputs[0]
    stop = plain.token_ids[2]
    for keep in (False, True):
        params = replace(GREEDY, stop_token_ids=[stop], include_stop_str_in_output=keep)
        output = llm({}).generate([5], params)[0].outputs[0]
        assert output.token_ids == plain.token_ids[:3]
        assert output.text == tokenizer().decode(plain.token_ids[: 3 if keep else 2])
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_ignored_end_of_sequence_may_still_be_a_stop_token() -> None:
    bias = {EOS_ID: 100.0}
    ended = llm({}).generate([5], replace(GREEDY, logit_bias=bias))[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([EOS_ID], "stop", None)
    ignored = llm({}).generate([5], replace(GREEDY, logit_bias=bias, ignore_eos=True))[0].outputs[0]
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS_ID] * 6, "length")
    stopped = llm({}).generate([5], replace(GREEDY, logit_bias=bias, ignore_eos=True, stop_token_ids=[EOS_ID]))[0]
    assert (stopped.outputs[0].token_ids, stopped.outputs[0].stop_reason) == ([EOS_ID], EOS_ID)


def test_what_a_tokenizer_returns_is_a_prompt(engine: LLM) -> None:
    """Rows are padded on either side; the mask tells what is real."""
    texts_in = ["the abc", "abc"]
    want = texts(engine.generate(texts_in, GREEDY))
    encoding = tokenizer()
    for side in ("left", "right"):
        for kind in ("pt", "np", None):
            encoding.padding_side = side
            assert texts(engine.generate(encoding(texts_in, padding=True, return_tensors=kind), GREEDY)) == want
    assert texts(engine.generate(encoding("the abc"), GREEDY)) == want[:1]
    assert texts(engine.generate({"input_ids": [[5], [6, 7]]}, GREEDY)) == texts(engine.generate([[5], [6, 7]], GREEDY))


def test_numpy_integers_are_token_ids(engine: LLM) -> None:
    want = texts(engine.generate([5, 6], GREEDY))
    assert texts(engine.generate([np.int32(5), np.uint8(6)], GREEDY)) == want
    assert texts(engine.generate([torch.tensor([5, 6], dtype=torch.int16)], GREEDY)) == want


def test_a_seed_of_numpy_is_a_seed() -> None:
    params = SamplingParams(max_tokens=12)
    assert texts(llm({}, seed=np.int64(4)).generate([5], params)) == texts(llm({}, seed=4).generate([5], params))


def test_what_is_no_progress_bar_is_refused(engine: LLM) -> None:
    with pytest.raises(RequestError, match=r"use_tqdm is 5\. Expected True, False"):
        engine.generate([5], GREEDY, use_tqdm=5)
    assert not engine._engine.has_work


def test_request_ids_are_unique_over_the_life_of_an_engine() -> None:
    engine = llm({})
    ids = [output.request_id for _ in range(3) for output in engine.generate([[5], [6]], GREEDY)]
    ids += list({chunk.request_id for chunk in engine.stream([[5], [6]], GREEDY)})
    assert len(set(ids)) == len(ids) == 8
    assert all(isinstance(request_id, str) for request_id in ids)


def test_a_progress_bar_counts_completions(capsys: pytest.CaptureFixture[str]) -> None:
    bars = []

    class Bar:
        def __init__(self, *, total: int, **_: Any) -> None:
            self.total, self.n = total, 0
            bars.append(self)

        def update(self, count: int) -> None:
            self.n += count

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    llm({}).generate([[5], [6]], replace(GREEDY, n=2), use_tqdm=Bar)
    assert [(bar.n, bar.total) for bar in bars] == [(4, 4)]
    llm({}).generate([[5], [6]], GREEDY, use_tqdm=True)
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_models_tokenizers_and_dtypes_in_the_forms_of_others(tmp_path: Path) -> None:
    target("llama", torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    want = texts(llm({}, module=target("llama", torch.float32)).generate(TEXT, GREEDY))
    for dtype in (torch.float32, "float", "float32", "auto"):
        made = LLM(tmp_path / "model", tokenizer=str(tmp_path / "tokenizer"), dtype=dtype, device=torch.device("cpu"))
        assert texts(made.generate(TEXT, GREEDY)) == want
    assert LLM(str(tmp_path / "model"), dtype="half").target.model.dtype is torch.float16
    for nonsense in (5, None, ["a"], object()):
        with pytest.raises(ConfigError, match="Expected a directory, a hub id, or a transformers causal LM"):
            LLM(nonsense)


@pytest.mark.parametrize("word", ["\n", " ", "b", " b", "\n\n"])
def test_bad_words_as_text(engine: LLM, word: str) -> None:
    """White space alone is a word too."""
    ids = tokenizer()(word, add_special_tokens=False)["input_ids"]
    params = replace(GREEDY, max_tokens=25, ignore_eos=True, logit_bias=dict.fromkeys(ids, 20.0))
    assert word.strip(" ") in engine.generate([5], params)[0].outputs[0].text
    assert word not in engine.generate([5], replace(params, bad_words=[word]))[0].outputs[0].text


def test_an_engines_seed_makes_its_requests_reproducible() -> None:
    params = SamplingParams(max_tokens=12, n=2)
    runs = [
        [c.token_ids for name in names for o in llm(drafters()[name](None), seed=4).generate([[5], [6]], params)
         for c in o.outputs]
        for names in (["none"], ["draft tree"])
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 4
    other = llm({}, seed=5).generate([[5], [6]], params)
    assert [c.token_ids for o in other for c in o.outputs] != runs[0]
    endless = replace(params, ignore_eos=True)
    unseeded = [texts(llm({}).generate([5], endless)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]
