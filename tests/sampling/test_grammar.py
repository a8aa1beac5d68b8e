"""Masks of grammars against languages that are written out: what may follow is what some text of the language has.

The vocabulary has all single bytes that the languages use, so that every text can be written.
"""

import re
from itertools import product

import pytest
import torch
from end_to_end.tiny_llms import PIECES, tokenizer
from tiny_models import EOS_ID, VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.core.errors import RequestError
from foretoken.grammars.compiling import Grammars
from foretoken.sampling.batch import History, NodeView
from foretoken.sampling.node_scores import GrammarMask, GrammarState

TEXTS = ["".join(letters) for n in range(1, 6) for letters in product("abth", repeat=n)]
LANGUAGES = {
    "(a|b){1,3}th?": lambda text: re.fullmatch("(a|b){1,3}th?", text) is not None,
    "a(ab)*|hth": lambda text: re.fullmatch("a(ab)*|hth", text) is not None,
    "[ab]h|t{2,5}": lambda text: re.fullmatch("[ab]h|t{2,5}", text) is not None,
}
BYTES = [b"" if isinstance(piece, str) else piece for piece in PIECES]


def state(params: SamplingParams) -> GrammarState:
    found = Grammars(tokenizer(), VOCAB_SIZE + 3, [EOS_ID]).state_of(params)
    assert found is not None
    return found


def regex(text: str, **keys: object) -> SamplingParams:
    return SamplingParams(structured_outputs={"regex": text}, **keys)


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_are_those_of_the_language(pattern: str) -> None:
    """Of texts of up to three bytes, however tokens split them; in one split alone where bytes are forced."""
    language = [text.encode() for text in TEXTS if LANGUAGES[pattern](text)]
    todo: list[tuple[bytes, GrammarState]] = [(b"", state(regex(pattern)))]
    num_checked = num_whole = 0
    while todo:
        text, at = todo.pop()
        expected = [bool(piece) and any(whole.startswith(text + piece) for whole in language) for piece in BYTES]
        expected[EOS_ID] = text in language
        expected += [False] * (VOCAB_SIZE + 3 - len(BYTES))
        if len(text) <= 3:  # the languages' longer texts are not written out
            if at.forced:
                assert expected[at.forced[0]]
                expected = [token == at.forced[0] for token in range(VOCAB_SIZE + 3)]
            assert at.allowed.tolist() == expected, text
            assert at.is_over == (expected == [token == EOS_ID for token in range(VOCAB_SIZE + 3)])
            num_checked, num_whole = num_checked + 1, num_whole + (text in language)
            for token, piece in enumerate(BYTES):
                following = at.after(token)
                assert (following is not None) == expected[token]
                if following is not None and token != EOS_ID:
                    todo.append((text + piece, following))
    assert num_checked > 5
    assert num_whole > 0


def test_forced_tokens_are_all_that_can_follow() -> None:
    root = state(regex("(a|b)(hing|bed)\n"))
    assert root.forced == []
    after = root.after_all([BYTES.index(b"a"), BYTES.index(b"h"), -1])
    assert after is not None
    assert b"".join(BYTES[token] for token in after.forced) == b"ing\n"
    whole = after.after_all(after.forced)
    assert whole is not None
    assert whole.is_over
    assert whole.forced == []
    assert root.after_all([BYTES.index(b"a"), BYTES.index(b"a"), BYTES.index(b"b")]) is None


def test_the_end_can_be_unwanted() -> None:
    """With `ignore_eos` texts go on while they can, unless the same token is asked for as a stop token."""
    letter = BYTES.index(b"a")
    for keys, may_end in (
        ({}, True), ({"ignore_eos": True}, False), ({"ignore_eos": True, "stop_token_ids": [EOS_ID]}, True),
    ):  # fmt: skip
        root = state(regex("a{1,2}", **keys))
        once, twice = root.after_all([letter]), root.after_all([letter, letter])
        assert once is not None
        assert twice is not None
        assert bool(once.allowed[EOS_ID]) is may_end
        assert (once.after(EOS_ID) is not None) is may_end
        assert not once.is_over
        assert twice.is_over


def test_the_mask_reads_the_path_of_each_row() -> None:
    """Rows with other grammars, without one, below forbidden nodes, and rows that were selected twice."""
    first, second = state(regex("a[bc]")), state(regex("t[he]"))
    a, b, c, t, th = (BYTES.index(piece) for piece in (b"a", b"b", b"c", b"t", b"th"))
    mask = GrammarMask([first, None, second]).select(torch.tensor([0, 0, 1, 2, 2]))
    paths = torch.tensor([[-1], [a], [a], [-1], [a]])
    num_output = torch.zeros(5, dtype=torch.int64)
    history = History(prompt_seen=None, output_counts=None, tail=paths[:, :0], num_output=num_output)
    logits = torch.arange(5.0 * (VOCAB_SIZE + 3)).view(5, -1)
    found = mask.apply(logits, NodeView(history, paths))
    ab = BYTES.index(b"ab")
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in found] == [
        [a, ab], [b, c], list(range(VOCAB_SIZE + 3)), [t, th], [],
    ]  # fmt: skip
    assert torch.equal(found[0, [a, ab]], logits[0, [a, ab]])


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"regex": "(a"}, "regex of structured_outputs does not compile"),
        ({"regex": "a*(?=b)"}, "does not compile"),
        ({"json": {"type": "nope"}}, "Invalid type: nope"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"regex": r"[^\x00-\U0010ffff]"}, "cannot be followed"),
        ({"regex": "a?{0}"}, "it matches the empty text alone"),
        ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "too deeply nested"),
    ],
)
def test_forms_that_cannot_be_followed_are_refused(asked: dict[str, object], part: str) -> None:
    with pytest.raises(RequestError) as caught:
        state(SamplingParams(structured_outputs=asked))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_forms_that_grow_too_large_are_given_up() -> None:
    """Within the limits of what is computed for one token, which the first texts of the form stay below."""
    root = state(regex("((a{100}){100}){100}b"))
    after = root.after(BYTES.index(b"a"))
    assert after is not None
    assert "too many expressions" in str(after.error)
    assert not after.allowed.any()
    assert not after.is_over
    assert after.forced == []


def test_what_a_grammar_needs_is_said() -> None:
    params = regex("a")
    with pytest.raises(RequestError, match="fast tokenizer"):
        Grammars(None, VOCAB_SIZE, [EOS_ID]).state_of(params)
    with pytest.raises(RequestError, match="fast tokenizer"):
        Grammars(object(), VOCAB_SIZE, [EOS_ID]).state_of(params)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install '\.\[serve\]'"):
        state(regex("a"))
    assert Grammars(tokenizer(), VOCAB_SIZE, [EOS_ID]).state_of(SamplingParams()) is None
