"""Titles and colours of methods: the same wherever they are shown, told apart from each other."""

from __future__ import annotations

from foretoken.bench.plots import look_of


def test_titles_say_who_drafts_and_how() -> None:
    methods = ["hass", "hass:dynamic", "ngram+hass", "ngram+hass:dynamic", "ngram+other", "suffix"]
    assert [look_of(method, methods).title for method in methods] == [
        "HASS", "HASS, dynamic trees", "prompt lookup + HASS", "prompt lookup + HASS, dynamic trees", "ngram+other",
        "suffix",
    ]  # fmt: skip


def test_dynamic_trees_have_their_methods_colour_and_a_marker_of_their_own() -> None:
    own, dynamic = (look_of(method, ["hass", "hass:dynamic"]) for method in ("hass", "hass:dynamic"))
    assert (own.light, own.dark) == (dynamic.light, dynamic.dark)
    assert own.marker != dynamic.marker


def test_every_method_has_a_look_whatever_its_trees_are() -> None:
    methods = ["eagle", "eagle:tree", "eagle:dynamic", "eagle:chain", "suffix", "suffix:x", "early_exit:dynamic"]
    looks = [look_of(method, methods) for method in methods]
    assert len(set(looks)) == len(methods)
    assert len({look.light for look in looks[:4]}) == 1
    assert len({look.marker for look in looks[:4]}) == 4


def test_several_drafters_are_told_apart() -> None:
    methods = ["hass:dynamic", "ngram+hass", "ngram+draft_model", "suffix"]
    assert len({look_of(method, methods).light for method in methods}) == len(methods)
