"""What makes no drafter is refused when the engine is made, with one sentence that says why."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.tiny_llms import llm

import foretoken.drafters
from foretoken.core.errors import ConfigError, ForetokenError, ModelError
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import TargetReads


class Good:
    """A drafter that proposes nothing."""

    name, reads, nodes_by_depth = "good", TargetReads(), (1, 2)

    def attach(self, target: Any) -> None: ...

    def begin(self, slot: int, request: Any) -> None: ...

    def propose(self, context: Any) -> TokenTree:
        return TokenTree.roots(context.roots)

    def commit(self, committed: Any) -> None: ...

    def release(self, slot: int) -> None: ...


def with_value(name: str, value: Any) -> Good:
    """A drafter with another attribute."""
    return type("Other", (Good,), {name: value})()


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text either")


def raising(error: BaseException) -> Callable[[], Any]:
    """A function that makes nothing."""

    def make() -> Any:
        raise error

    return make


NOT_DRAFTERS: dict[str, tuple[Any, str]] = {
    "nothing": (None, r"made None without name, reads, nodes_by_depth, attach, begin, propose, commit, release\. Exp"),
    "a number": (5, "made 5 without name"),
    "a text": ("ngram", "made 'ngram' without name"),
    "no name": (type("X", (), {k: v for k, v in vars(Good).items() if k != "name"})(), "without name. Expected"),
    "no release": (type("X", (), {k: v for k, v in vars(Good).items() if k != "release"})(), "without release. Exp"),
    **{f"name {v!r}": (with_value("name", v), "name of the drafter of the drafter function (is|holds)")
       for v in (None, 5, b"good", "", "a\nb", "a" * 500, "\ud800")},
    **{f"reads {v!r}": (with_value("reads", v), "reads of the drafter of the drafter function is")
       for v in (None, ("final",), "final", {})},
    **{f"top_k {v!r}": (with_value("reads", TargetReads(top_k=v)), "top_k of the drafter of the drafter function is")
       for v in (None, -1, 2000, "3", True)},
    **{f"taps {v!r}": (with_value("reads", TargetReads(taps=v)), "taps of the drafter of the drafter function are")
       for v in (None, 3, "final", {1}, (-1,), ("last",), (True,), (1.0,), [None])},
    **{f"nodes {v!r}": (with_value("nodes_by_depth", v), "nodes_by_depth of the drafter of the drafter function is")
       for v in (None, "8", 8, (), (0,), (2,), (1, 513), (1, 2.0), (True, 2), (1, float("nan")), (1, 3, 2),
                 range(9**9))},
    **{f"{k} no method": (with_value(k, 7), f"{k} of the drafter of the drafter function is 7. Expected a method")
       for k in ("attach", "begin", "propose", "commit", "release")},
    "a name that raises": (with_value("name", property(lambda self: 1 / 0)), "raised ZeroDivisionError: division by z"),
}  # fmt: skip


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("case", NOT_DRAFTERS)
def test_what_is_no_drafter_is_refused(case: str, is_trusted: bool) -> None:
    made, sentence = NOT_DRAFTERS[case]
    if is_trusted and case == "a name that raises":
        pytest.skip("a trusted drafter's mistake is shown where it happened")
    with pytest.raises(ConfigError, match=sentence) as caught:
        llm({"drafter": lambda: made}, trust_drafter=is_trusted)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(5, "no weights"), r"OSError: \[Errno 5\] no weights"),
        (ValueError(), "ValueError: no message"),
        (ValueError("first\nsecond"), "ValueError: first. Expected"),
        (KeyError("a" * 10**6), "KeyError: 'aaa"),
        (UnprintableError(), "UnprintableError: its text cannot be shown, str.. raised ValueError"),
    ],
    ids=["errno", "empty", "lines", "long", "unprintable"],
)
def test_a_function_that_raises_is_named(error: Exception, words: str) -> None:
    with pytest.raises(ConfigError, match=f"the drafter function raised {words}") as caught:
        llm({"drafter": raising(error)})
    assert caught.value.__cause__ is error
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("error", [ConfigError("set 'model'."), ModelError("no such model.")])
def test_sentences_of_our_own_stay_as_they_are(error: ForetokenError) -> None:
    with pytest.raises(type(error)) as caught:
        llm({"drafter": raising(error)})
    assert caught.value is error


def test_what_ends_the_process_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        llm({"drafter": raising(KeyboardInterrupt())})


OPTIONS = "from foretoken.drafters.base import DrafterOptions\nclass Options(DrafterOptions):\n    pass\n"
FILES = {
    "": "the file of method 'third' is no drafter. Expected a class Options",
    OPTIONS: "the file of method 'third' is no drafter",
    "def create(options): ...": "the file of method 'third' is no drafter",
    "class Options: ...\ndef create(options): ...": "the file of method 'third' is no drafter",
    "Options = create = 5": "the file of method 'third' is no drafter",
    f"{OPTIONS}create = 5": "the file of method 'third' is no drafter",
    "import nothing_of_this_name": "the file of method 'third' cannot be imported: ModuleNotFoundError: No module",
    "def create(:": "the file of method 'third' cannot be imported: SyntaxError",
    "1 / 0": "the file of method 'third' cannot be imported: ZeroDivisionError",
    f"{OPTIONS}def create(options): ...": "method 'third' made None without name",
    f"{OPTIONS}def create(options): return options": "method 'third' made of type Options without name",
    f"{OPTIONS}def create(options): 1 / 0": "method 'third' raised ZeroDivisionError: division by zero",
    f"{OPTIONS}def create(): ...": "method 'third' raised TypeError: create",
}


@pytest.fixture
def third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the file of a method of somebody else's goes."""
    monkeypatch.setattr(foretoken.drafters, "__path__", [*foretoken.drafters.__path__, str(tmp_path)])
    yield tmp_path / "third.py"
    sys.modules.pop("foretoken.drafters.third", None)


@pytest.mark.parametrize("text", FILES)
def test_files_that_are_no_methods(text: str, third: Path) -> None:
    third.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=FILES[text]):
        llm({"speculative_config": {"method": "third"}})
