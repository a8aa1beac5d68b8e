"""Conversations and completions: no double BOS, and labels on what the assistant writes, id for id."""

import logging

import pytest
from data_tokenizers import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    MASK_TEMPLATE,
    NEWLINE,
    PREFIX_TEMPLATE,
    REWRITING_TEMPLATE,
    SYSTEM,
    USER,
    letter_tokenizer,
    letters,
)

from foretoken.core.errors import ConfigError
from foretoken.text.prompt_rows import Message
from foretoken.training.data.corpus import Record
from foretoken.training.data.documents import DISAGREES, NO_ASSISTANT, NO_COMPLETION, REFUSED, ChatEncoder, Encoder
from foretoken.training.data.packed import Document


def chat(*turns: str) -> list[Message]:
    """Turns as "user hi"."""
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in turns]


def encoded(template: str, *turns: str) -> Document | str:
    (document,) = ChatEncoder(letter_tokenizer(template)).documents([chat(*turns)])
    return document


CONVERSATION = ("system be", "user hi", "assistant yo", "user hi", "assistant hi", "user left out")


def test_prefixes_supervise_assistant_turns_only() -> None:
    document = encoded(PREFIX_TEMPLATE, *CONVERSATION)
    assert isinstance(document, Document)
    assert document.tokens == [
        BOS, SYSTEM, 11, 14, END, NEWLINE, USER, 17, 18, END, NEWLINE, ASSISTANT, 34, 24, EOS, NEWLINE,
        USER, 17, 18, END, NEWLINE, ASSISTANT, 17, 18, EOS, NEWLINE,
    ]  # fmt: skip
    # The same words of the user are no labels; the newline after EOS is the template's.
    assert document.supervised == [False] * 12 + [True] * 3 + [False] * 7 + [True] * 3 + [False]


def test_generation_mask_of_the_template() -> None:
    document = encoded(MASK_TEMPLATE, "user hi", "assistant yo", "user hi", "assistant hi", "user left out")
    assert isinstance(document, Document)
    assert document.tokens == [
        BOS, USER, 17, 18, END, ASSISTANT, 34, 24, EOS, USER, 17, 18, END, ASSISTANT, 17, 18, EOS,
    ]  # fmt: skip
    assert document.supervised == [False] * 6 + [True] * 3 + [False] * 5 + [True] * 3


def test_one_bos_though_the_tokenizer_adds_one_to_text() -> None:
    tokenizer = letter_tokenizer(PREFIX_TEMPLATE)
    assert tokenizer("hi")["input_ids"][0] == BOS
    (document,) = ChatEncoder(tokenizer).documents([chat("user hi", "assistant yo")])
    assert isinstance(document, Document)
    assert list(document.tokens).count(BOS) == 1


def test_rewritten_turns_are_no_labels(caplog: pytest.LogCaptureFixture) -> None:
    encoder = ChatEncoder(letter_tokenizer(REWRITING_TEMPLATE))
    turns = ("user a", "assistant x-b", "user c", "assistant y-d")
    with caplog.at_level(logging.WARNING):
        first, second = encoder.documents([chat(*turns), chat(*turns)])
    assert isinstance(first, Document)
    assert first == second
    assert first.tokens == [BOS, USER, 10, END, ASSISTANT, 11, EOS, USER, 12, END, ASSISTANT, 34, 38, 13, EOS]
    # The first answer was "x-b" when it was given: only the last is surely what the assistant writes there.
    assert first.supervised == [False] * 11 + [True] * 4
    assert len(caplog.records) == 1
    assert DISAGREES in caplog.text


def test_conversations_that_teach_nothing() -> None:
    assert encoded(PREFIX_TEMPLATE, "user hi") == NO_ASSISTANT
    assert encoded(MASK_TEMPLATE, "user hi") == NO_ASSISTANT
    assert encoded("{{ raise_exception('no') }}", "user hi", "assistant yo") == REFUSED
    assert encoded("{% generation %}{% endgeneration %}{{ raise_exception('no') }}", "assistant yo") == REFUSED
    assert encoded("{{ messages | length }}", "user hi", "assistant yo", "user hi", "assistant yo") == DISAGREES


def test_one_refused_conversation_does_not_shift_the_others() -> None:
    template = PREFIX_TEMPLATE + "{% if messages[0].content == 'bad' %}{{ raise_exception('bad') }}{% endif %}"
    encoder = ChatEncoder(letter_tokenizer(template))
    good = chat("user hi", "assistant yo")
    results = encoder.documents([good, chat("user bad", "assistant a"), chat("user hi"), good])
    assert results[0] == results[3]
    assert isinstance(results[0], Document)
    assert results[1:3] == [REFUSED, NO_ASSISTANT]


def test_no_template() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatEncoder(letter_tokenizer())


def test_prompts_end_where_the_assistant_answers() -> None:
    encoder = ChatEncoder(letter_tokenizer(PREFIX_TEMPLATE))
    turns = chat("user a", "assistant b", "user c", "assistant d")
    short = [BOS, USER, 10, END, NEWLINE, ASSISTANT]
    assert encoder.prompt(turns, 100) == [*short, 11, EOS, NEWLINE, USER, 12, END, NEWLINE, ASSISTANT]
    assert encoder.prompt(turns, 13) == short  # the later turn leaves no room
    assert encoder.prompt(turns, 5) == "prompts too long for the context"
    assert encoder.prompt(chat("assistant b"), 100) == "conversations without a user turn"


def test_records_of_all_forms_keep_their_order() -> None:
    encoder = Encoder(letter_tokenizer(PREFIX_TEMPLATE))
    records = [
        Record(where="0", prompt="ab", text="cd"),
        Record(where="1", messages=tuple(chat("user hi"))),
        Record(where="2", text="ef"),
        Record(where="3", prompt="gone"),
        Record(where="4", messages=tuple(chat("user hi", "assistant yo"))),
        Record(where="5", prompt="g", text="h"),
    ]
    found = {record.where: document for record, document in encoder.documents(records)}
    assert list(found) == ["0", "2", "4", "5"]
    assert found["0"] == Document([BOS, *letters("abcd")], [False, False, False, True, True])
    assert found["2"] == Document([BOS, *letters("ef")])
    assert found["4"].tokens[:4] == [BOS, USER, 17, 18]
    assert found["5"] == Document([BOS, *letters("gh")], [False, False, True])
    assert dict(encoder.skipped) == {NO_ASSISTANT: 1, NO_COMPLETION: 1}


def test_batches_do_not_change_documents() -> None:
    encoder = Encoder(letter_tokenizer())
    records = [Record(where=str(i), text=chr(97 + i % 26) * (1 + i % 3)) for i in range(600)]
    documents = [document for _, document in encoder.documents(records)]
    assert documents == [Document([BOS, *letters(record.text)]) for record in records]


def test_an_answer_that_nobody_asked_for_is_no_label(caplog: pytest.LogCaptureFixture) -> None:
    document = encoded(PREFIX_TEMPLATE, "assistant a", "user b", "assistant c")
    assert isinstance(document, Document)
    assert document.tokens == [BOS, ASSISTANT, 10, EOS, NEWLINE, USER, 11, END, NEWLINE, ASSISTANT, 12, EOS, NEWLINE]
    assert document.supervised == [False] * 10 + [True, True, False]
    assert not caplog.records
