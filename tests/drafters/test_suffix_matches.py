"""What followed the end of a text in suffix trees, against searching the plain texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from suffix_texts import DEPTH, TOKENS, children_by_hand, occurrences, open_matches, pool_matches

from foretoken.drafters.suffix_tree import SuffixMatches


def check_matches(matches: SuffixMatches, texts: list[list[int]], tokens: list[int], least: int) -> None:
    """Every length has the matches that the texts have, and each goes on as they do."""
    lengths = range(1, min(len(tokens), DEPTH - 1) + 1)
    known = [length for length in lengths if len(occurrences(texts, tokens[-length:])) >= least]
    assert matches.longest == max(known, default=0)
    for length in lengths:
        match = matches.match(length)
        assert (match is not None) == (length in known)
        run = tokens[-length:]
        while match is not None:
            assert match.count == len(occurrences(texts, run))
            following = matches.following(match, 0.0)
            by_hand = children_by_hand(texts, run) if len(run) < DEPTH else []
            assert [(token, longer.count) for token, longer in following] == by_hand
            first = matches.most_frequent(match, 0.0)
            assert (first and first[0]) == (by_hand[0][0] if by_hand else None)
            forced = list(matches.run(match, 3) or [])
            assert len(forced) <= 3
            for number, start in occurrences(texts, run) if forced else ():
                assert texts[number][start + len(run) : start + len(run) + len(forced)] == forced
            if not following:
                break
            token, match = following[len(run) % len(following)]
            run = [*run, token]


@given(tokens=TOKENS)
def test_a_growing_text_knows_all_it_holds(tokens: list[int]) -> None:
    check_matches(open_matches(tokens), [tokens], tokens, least=2)


@given(outputs=st.lists(TOKENS, max_size=4), tokens=TOKENS)
def test_a_pool_knows_all_that_was_written(outputs: list[list[int]], tokens: list[int]) -> None:
    check_matches(pool_matches(outputs, tokens), outputs, tokens, least=1)
