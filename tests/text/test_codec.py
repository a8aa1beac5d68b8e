"""Tokenizers that callers bring: whatever they give, it is served or refused in a sentence."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.tiny_llms import tokenizer
from held_calls import HeldCalls
from tiny_models import VOCAB_SIZE, tiny_model
from transformers import AutoTokenizer

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, RequestError
from foretoken.text.codec import Codec, longest_token_bytes

LONGEST_S = 60
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


class Bare:
    """No more than what a tokenizer has to have: no length, no vocabulary, no attributes."""

    def __init__(self, *, ids: Any = None, text: Any = None) -> None:
        self._ids, self._text = ids, text

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return self._ids(text) if callable(self._ids) else tokenizer()(text) if self._ids is None else self._ids

    def decode(self, tokens: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True) -> Any:
        return tokenizer().decode(tokens, skip_special_tokens=skip_special_tokens) if self._text is None else self._text


class WithVocabulary(Bare):
    def __init__(self, vocabulary: Any) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def get_vocab(self) -> Any:
        if isinstance(self._vocabulary, Exception):
            raise self._vocabulary
        return self._vocabulary


def test_text_is_decoded_while_another_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine decodes what it writes; it must not wait for a long text of some client."""
    own = AutoTokenizer.from_pretrained("models/tinycode")
    codec, expected = Codec(own, len(own)), own("def main():")["input_ids"]
    held = HeldCalls(monkeypatch, type(own), "__call__")
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(codec.encode, "def main():", "the text")
        with held:
            assert codec.decode([5, 6])
        assert encoding.result() == expected


def test_truncation_of_a_tokenizer_is_switched_off() -> None:
    own = AutoTokenizer.from_pretrained("models/tinycode")
    own.backend_tokenizer.enable_truncation(2)
    assert len(Codec(own, len(own)).encode("def main(): return 1", "the text")) > 2


def test_two_methods_are_enough() -> None:
    module = tiny_model("llama")
    expected, got = (
        LLM(module, tokenizer=each).generate("abc", SamplingParams(temperature=0.0, max_tokens=6, stop=["?"]))[0]
        for each in (tokenizer(), Bare())
    )
    assert got.outputs == expected.outputs
    assert got.prompt_token_ids == expected.prompt_token_ids


@pytest.mark.parametrize("container", [tuple, np.array, torch.tensor], ids=lambda kind: kind.__name__)
def test_ids_in_any_flat_container(container: Any) -> None:
    codec = Codec(Bare(ids={"input_ids": container([5, 6])}), VOCAB_SIZE)
    assert codec.encode("x", "the prompt") == [5, 6]


def fails(text: str) -> Any:
    raise IndexError("of its own")


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ({"ids": [5]}, "cannot encode the prompt: KeyError: .*input_ids"),
        ([5, 6], "cannot encode the prompt: TypeError"),
        (None.__class__, "cannot encode the prompt: TypeError"),
        (fails, "cannot encode the prompt: IndexError: of its own"),
        ({"input_ids": None}, "as input_ids of the prompt is None"),
        ({"input_ids": "56"}, "as input_ids of the prompt is '56'"),
        ({"input_ids": [[5, 6]]}, r"as input_ids of the prompt is \[\[5, 6\]\]. Expected a flat list of token ids"),
        ({"input_ids": torch.tensor([[5, 6]])}, r"as input_ids of the prompt is \[\[5, 6\]\]"),
        ({"input_ids": torch.tensor(5)}, "as input_ids of the prompt is 5"),
        ({"input_ids": [5, 6.0]}, r"the prompt holds token id 6.0"),
        ({"input_ids": [5, True]}, r"the prompt holds token id True"),
        ({"input_ids": [5, VOCAB_SIZE]}, f"the prompt holds token id {VOCAB_SIZE}"),
        ({"input_ids": []}, "the prompt is empty"),
    ],
)
def test_encodings_that_are_none(ids: Any, sentence: str) -> None:
    llm = LLM(tiny_model("llama"), tokenizer=Bare(ids=ids))
    with pytest.raises(RequestError, match=sentence):
        llm.generate("x", PARAMS)
    if "empty" not in sentence:
        with pytest.raises(RequestError, match=sentence.replace("the prompt", "bad_words")):
            llm.generate([5], SamplingParams(bad_words=["x"]))
    assert llm._engine.has_work is False


@pytest.mark.parametrize("text", [b"x", 5, ["x"]], ids=str)
def test_decodings_that_are_no_text(text: Any) -> None:
    llm = LLM(tiny_model("llama"), tokenizer=Bare(text=text))
    for prompt in ("x", [5]):
        output = llm.generate(prompt, PARAMS)[0].outputs[0]
        assert output.finish_reason == "error"
        assert re.search(r"what the tokenizer decodes is .* Expected text\.", str(output.error))


def test_a_decoder_with_other_parameters() -> None:
    class Other(Bare):
        def decode(self, tokens: Any) -> str:  # type: ignore[override]
            return ""

    output = LLM(tiny_model("llama"), tokenizer=Other()).generate([5], PARAMS)[0].outputs[0]
    assert output.finish_reason == "error"
    assert re.search(r"cannot decode token ids: TypeError: .*skip_special_tokens", str(output.error))


@pytest.mark.parametrize(
    ("vocabulary", "sentence"),
    [
        ({"a": "5"}, "is '5'"),
        ({"a": 5, "b": None}, "is None"),
        ({"a": 5.0}, "is 5.0"),
        ({"a": [5]}, r"is \[5\]"),
        (["a"], "fails: AttributeError"),
        (None, "fails: AttributeError"),
        (RuntimeError("not today"), "fails: RuntimeError: not today"),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_vocabularies_that_are_none(vocabulary: Any, sentence: str, drafter: str | None) -> None:
    config = None if drafter is None else {"method": drafter}
    with pytest.raises(
        ConfigError, match=f"get_vocab of the tokenizer {sentence}.* Expected a mapping of tokens to ids"
    ):
        LLM(tiny_model("llama"), tokenizer=WithVocabulary(vocabulary), speculative_config=config)


def test_ids_of_numpy_are_ids() -> None:
    llm = LLM(tiny_model("llama"), tokenizer=WithVocabulary({str(i): np.int64(i) for i in range(VOCAB_SIZE)}))
    assert llm.generate("abc", PARAMS)[0].outputs[0].finish_reason != "error"


def test_what_tokens_add() -> None:
    codec = Codec(tokenizer(), VOCAB_SIZE)
    ids = tokenizer()("ab€")["input_ids"]
    assert [codec.added(token, skip_special_tokens=True) for token in ids] == ["a", "b", None, None, None]
    assert codec.added(2, skip_special_tokens=True) is None
    assert codec.added(2, skip_special_tokens=False) == "</s>"


def test_text_of_too_many_tokens_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLM("models/tinycode", max_model_len=64)
    longest = longest_token_bytes(engine.tokenizer)
    assert longest is not None
    text = "x" * (64 * longest + 1)
    chat = {"chat_template": "{{ messages[0].content }}"}
    params = SamplingParams(temperature=0.0, max_tokens=2)
    monkeypatch.setattr(Codec, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    told = f"has {len(text)} bytes, which are more than {{}} tokens of at most {longest} bytes. Expected at most {{}} "
    less, whole = told.format(63, 63) + "tokens, one less than the context length.", told.format(64, 64)
    for message, call in {
        f"the prompt {less}": lambda: engine.generate(text, params),
        f"the conversation {less}": lambda: engine.chat([{"role": "user", "content": text}], params, **chat),
        f"the prediction {whole}": lambda: engine.generate({"prompt_token_ids": [5], "prediction": text}, params),
    }.items():
        with pytest.raises(RequestError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("has_bound", [True, False])
def test_text_within_the_bound_is_counted(has_bound: bool) -> None:
    """So is all text for tokenizers that tell nothing about their tokens."""
    tokens = AutoTokenizer.from_pretrained("models/tinycode")
    llm = LLM("models/tinycode", max_model_len=64, tokenizer=tokens if has_bound else Wrapped(tokens))
    with pytest.raises(RequestError, match=r"prompt 0 has \d+ tokens\. Expected at most 63, one less"):
        llm.generate("def f(x):\n" * (20 if has_bound else 2000), PARAMS)


class Wrapped:
    """Any tokenizer of the caller's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, text: str, **options: Any) -> Any:
        return self._inner(text, **options)

    def decode(self, tokens: Any, **options: Any) -> Any:
        return self._inner.decode(tokens, **options)
