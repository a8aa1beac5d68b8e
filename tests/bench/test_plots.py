"""Pictures of a sweep: what is drawn where, read back from the figures and the files; titles and colours of methods."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from sweep_points import made_up, many

from foretoken.bench.grid import Serving
from foretoken.bench.plots import CHARTS, DARK, LIGHT, Series, draw, lines_of, look_of, write_plots
from foretoken.bench.sweep import PointResult, pareto_front
from foretoken.core.errors import ConfigError

TAU, SPEED = CHARTS


def panels() -> dict[Serving, list[PointResult]]:
    found: dict[Serving, list[PointResult]] = {}
    for result in many():
        found.setdefault(result.serving, []).append(result)
    return found


def test_lines_go_along_the_key_that_sizes_trees_most_finely() -> None:
    lines = lines_of(many())
    assert {key: len(names) for key, names in lines.items()} == {
        (Series("medusa", "path_probability=0"), "num_speculative_tokens=2"): 3,
        (Series("medusa", "path_probability=0"), "num_speculative_tokens=4"): 3,
        (Series("medusa", "path_probability=0.05"), "num_speculative_tokens=2"): 3,
        (Series("medusa", "path_probability=0.05"), "num_speculative_tokens=4"): 3,
        (Series("ngram", "a<b&c"), ""): 3,
    }
    thresholds = [
        None,
        {"path_probability": 0.01},
        {"path_probability": 0.1},
        {"path_probability": 0.1, "entropy": 0.3},
    ]
    pruned = lines_of([made_up("hydra", 9, 2.0, name=str(each), changes={"pruning": each}) for each in thresholds])
    assert {key.variant: len(names) for (key, _), names in pruned.items()} == {
        "pruning=null": 1, "pruning=path_probability": 2, "pruning=path_probability+entropy": 1,
    }  # fmt: skip
    alone = lines_of([made_up("hydra", nodes, 2.0) for nodes in (2, 4)])
    assert list(alone) == [(Series("hydra", ""), "")]


@pytest.mark.parametrize(
    ("chart", "theme"),
    [
        pytest.param(chart, theme, marks=() if (chart is SPEED) == (theme is DARK) else pytest.mark.slow)
        for chart in CHARTS
        for theme in (LIGHT, DARK)
    ],
)
def test_every_point_and_the_front_are_drawn_and_nothing_overlaps(chart, theme) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("matplotlib")
    figure = draw(chart, panels(), theme, "a model, a machine")
    figure.draw_without_rendering()
    assert [axes.get_title("left") for axes in figure.axes] == ["batch size 1, greedy", "batch size 4, greedy"]
    for axes, results in zip(figure.axes, panels().values(), strict=True):
        wanted = {(result.nodes, chart.value(result)) for result in results}
        drawn = {line.get_label(): set(zip(*line.get_data(), strict=True)) for line in axes.lines}
        points = set[tuple[float, float]]()
        for line in axes.lines:
            if line.get_label() not in ("Pareto front of both axes", "plain decoding"):
                points |= set(zip(*line.get_data(), strict=True))
        assert points == wanted
        every = sorted(wanted)
        assert drawn["Pareto front of both axes"] == {every[index] for index in pareto_front(every)}
        assert ("plain decoding" in drawn) == (chart is SPEED)
        low, high = axes.get_xlim()
        assert all(low < nodes < high for nodes, _ in wanted)
        assert "nodes a target pass" in axes.get_xlabel()
        assert "tokens" in axes.get_ylabel()
    (legend,) = figure.legends
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(legend.get_window_extent().overlaps(box) for box in boxes), "the legend covers data"
    assert not boxes[0].overlaps(boxes[1])
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert not legend.get_window_extent().overlaps(figure._suptitle.get_window_extent())


def test_files_of_both_pages_can_be_read_and_stay_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = {Serving(): panels()[Serving()]}
    files = write_plots(one, tmp_path, "a model")
    assert sorted(path.name for path in files) == sorted(path.name for path in tmp_path.iterdir()) == [
        "nodes-tau-dark.svg", "nodes-tau.png", "nodes-tau.svg",
        "nodes-tokens-dark.svg", "nodes-tokens.png", "nodes-tokens.svg",
    ]  # fmt: skip
    first = {path.name: path.read_bytes() for path in files}
    for name, data in first.items():
        if name.endswith(".png"):
            assert data.startswith(b"\x89PNG")
            continue
        root = ET.fromstring(data)
        assert root.tag.endswith("svg")
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 30
        assert (DARK.page if "dark" in name else LIGHT.page).encode() in data
    write_plots(one, tmp_path, "a model")
    assert first == {path.name: path.read_bytes() for path in files}  # no date, no random ids


def test_one_point_that_drafts_nothing() -> None:
    pytest.importorskip("matplotlib")
    figure = draw(SPEED, {Serving(): [made_up("hydra", 0.0, 1.0)]}, LIGHT, "a model")
    assert figure.axes[0].get_xlim() == (0.0, 1.0)


def test_without_matplotlib_it_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"need the package 'matplotlib'.*pip install '\.\[report\]'"):
        write_plots(panels(), tmp_path, "a model")


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
