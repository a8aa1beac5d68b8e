"""Following a text against a search of the whole of it, after every token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafters.prediction import FollowedText

TOKENS = st.lists(st.integers(0, 2), max_size=60)


class Slow:
    """The same by going through the whole text for every token."""

    def __init__(self, text: list[int], shortest: int, longest: int) -> None:
        self.text, self.shortest, self.longest = text, shortest, longest
        self.place = self.num_lost = 0

    def expected(self) -> int | None:
        place = self.place + self.num_lost
        return place if self.num_lost <= 4 and place < len(self.text) else None

    def matches(self, output: list[int]) -> list[int]:
        """All ends of matches of `shortest` tokens, of these the eight nearest on each side, best first."""
        lengths = {end: self.match_len(output, end) for end in range(len(self.text) + 1)}
        ends = [end for end, length in lengths.items() if length >= self.shortest]
        ahead = sorted(end for end in ends if end >= self.place)[:8]
        before = sorted((end for end in ends if end < self.place), reverse=True)[:8]
        rank = {end: index for index, end in enumerate([*ahead, *before])}
        return sorted(rank, key=lambda end: (-lengths[end], rank[end]))

    def match_len(self, output: list[int], end: int) -> int:
        longest = min(self.longest, len(output), end)
        return max(n for n in range(longest + 1) if self.text[end - n : end] == output[len(output) - n :])

    def add(self, output: list[int]) -> None:
        """The output has one more token."""
        expected = self.expected()
        if expected is not None and self.text[expected] == output[-1]:
            self.place, self.num_lost = expected + 1, 0
            return
        self.num_lost += 1
        found = self.matches(output)
        if found:
            self.place, self.num_lost = found[0], 0

    def places(self, output: list[int]) -> list[int]:
        wanted = [self.expected(), *self.matches(output)]
        return list(dict.fromkeys(place for place in wanted if place is not None and place < len(self.text)))


@given(
    text=TOKENS, prompt=TOKENS, output=TOKENS, copied=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    shortest=st.integers(1, 3), more=st.integers(0, 4), steps=st.lists(st.integers(0, 7)),
)  # fmt: skip
def test_places_are_those_of_a_search(
    text: list[int], prompt: list[int], output: list[int], copied: tuple[int, int], shortest: int, more: int,
    steps: list[int],
) -> None:  # fmt: skip
    """However the output grew: one token at a time, or by accepted paths of any length."""
    begin, at = copied
    output = [*output[:at], *text[begin:], *output[at:]]
    followed, slow = (
        FollowedText(text, shortest=shortest, longest=shortest + more),
        Slow(text, shortest, shortest + more),
    )
    ends = {min(sum(steps[:count]), len(output)) for count in range(len(steps) + 1)} | {len(output)}
    for size in range(len(output) + 1):
        if size:
            slow.add(output[:size])
        if size in ends:
            tokens = [*prompt, *output[:size]]
            for _ in range(2):  # a proposal may be thrown away
                followed.follow(tokens, len(prompt))
                assert list(followed.places(tokens, len(prompt))) == slow.places(output[:size])


def after(text: list[int], output: list[int], shortest: int = 2) -> list[int]:
    """What the text says next at the likeliest place."""
    followed = FollowedText(text, shortest=shortest, longest=16)
    followed.follow(output)
    return text[next(followed.places(output), len(text)) :]


def test_changes_of_every_kind() -> None:
    text = list(range(10, 40))
    assert after(text, []) == text
    assert after(text, text[:7]) == text[7:]
    assert after(text, [*text[:7], 99]) == text[8:], "one token replaced by another"
    assert after(text, [*text[:7], 99, 98, text[9]]) == text[10:], "two of them"
    assert after(text, [*text[:7], *range(80, 90), *text[7:9]]) == text[9:], "ten put in"
    assert after(text, [*text[:7], *text[20:22]]) == text[22:], "thirteen left out"
    assert after(text, [*text[:7], *text[3:5]]) == text[5:], "a part of it again"
    assert after(text, [*text[:7], *range(80, 90)]) == [], "text of its own"
    assert after(text, text) == [], "its end"
    assert after([5], []) == [5]


def test_of_equal_lines_the_nearest_ahead() -> None:
    """A text of many equal lines: the place moves on, and once at its end goes back by one line at most."""
    line = [1, 2, 3, 4]
    text, output = line * 6, [*line * 2, 9, 1, 2]
    assert after(text, output) == text[10:]
    changed = [1, 2, 9, 4]
    for num_lines in range(1, 30):
        assert len(after(text, changed * num_lines)) <= max(len(line) * (6 - num_lines), len(line))


def test_looking_for_a_place_is_bounded() -> None:
    """Among thousands of matches sixteen are looked at."""
    compared = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    text = [Counted(7)] * 5000
    followed = FollowedText(text, shortest=2, longest=16)
    output = [7] * 100 + [9] + [7] * 2
    followed.follow(output[:-1])
    compared = 0
    followed.follow(output)
    list(followed.places(output))
    assert 16 < compared < 3 * 16 * 16
