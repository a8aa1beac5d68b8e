"""Stop strings against a search of the whole text, and what may be shown before one is ruled out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.text.codec import StopStrings

CHUNKS = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def brute_force(text: str, num_new: int, stops: list[str]) -> tuple[int, str] | None:
    """Every place of every stop string that ends among the last `num_new` characters; the earliest start wins."""
    found = [
        (start, stop)
        for stop in stops
        for start in range(len(text))
        if text[start:].startswith(stop) and start + len(stop) > len(text) - num_new
    ]
    return min(found, key=lambda place: place[0], default=None)


@given(chunks=CHUNKS, stops=STOPS, keep=st.booleans())
def test_against_brute_force(chunks: list[str], stops: list[str], keep: bool) -> None:
    """Text comes in pieces of any size, as tokens do."""
    searching, text = StopStrings(stops, keep=keep), ""
    shown = 0
    for chunk in chunks:
        shown = max(shown, searching.showable(text))
        text += chunk
        found, expected = searching.find(text, len(chunk)), brute_force(text, len(chunk), stops)
        if expected is None:
            assert found is None
            assert not any(stop in text for stop in stops)
            continue
        start, _ = expected
        assert found is not None
        matched, end = found
        assert text[start:].startswith(matched)
        assert end == start + (len(matched) if keep else 0)
        assert shown <= start, "text that a stop string takes back was shown already"
        if not keep:
            assert not any(other in text[:end] for other in stops)
        return
    assert shown <= len(text)


def test_of_two_that_begin_together_the_first_in_the_list_counts() -> None:
    assert StopStrings(["ab", "abc"], keep=False).find("xabc", 3) == ("ab", 1)
    assert StopStrings(["abc", "ab"], keep=True).find("xabc", 3) == ("abc", 4)


@pytest.mark.parametrize(("stops", "shown"), [([], 6), (["x"], 6), (["xyz", "a"], 4), (["0123456789"], 0)])
def test_held_back_text_is_as_long_as_a_stop_string_less_one(stops: list[str], shown: int) -> None:
    assert StopStrings(stops, keep=False).showable("abcdef") == shown
