"""The grid of a sweep: how axes are written, what their product is, and what methods refuse of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.grid import Serving, expand, joined_axes, parse_axis, read_grid
from foretoken.core.errors import ConfigError

TARGET = "no-such-directory"  # ngram needs none


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("method=medusa,hydra", "method", ["medusa", "hydra"]),
        ("num_speculative_tokens=2,null, 8", "num_speculative_tokens", [2, None, 8]),
        ("pruning.path_probability=0,0.01", "pruning.path_probability", [0, 0.01]),
        ('tree=chain,{"widths": [3, 2]},[[0],[0,0]]', "tree", ["chain", {"widths": [3, 2]}, [[0], [0, 0]]]),
        (r'a="x,\"[",true', "a", ['x,"[', True]),
        ("model=C:/a=b", "model", ["C:/a=b"]),
    ],
)
def test_axes_of_the_command_line(text: str, key: str, values: list[Any]) -> None:
    assert parse_axis(text) == (key, values)


@pytest.mark.parametrize("text", ["max_nodes", "=1", "max_nodes=", " =2"])
def test_what_is_no_axis(text: str) -> None:
    with pytest.raises(ConfigError, match="not of the form KEY=VALUE,VALUE"):
        parse_axis(text)


TOML = """
method = ["ngram"]
num_speculative_tokens = 4
tree = ["chain", {widths = [2, 1]}]
[pruning]
path_probability = [0, 0.5]
deeper.still = true
"""
AXES = {
    "method": ["ngram"], "num_speculative_tokens": [4], "tree": ["chain", {"widths": [2, 1]}],
    "pruning.path_probability": [0, 0.5], "pruning.deeper.still": [True],
}  # fmt: skip


def test_axes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(TOML)
    assert read_grid(tmp_path / "grid.toml") == AXES
    nested = {key: value for key, value in AXES.items() if "." not in key}
    inner = {"path_probability": [0, 0.5], "deeper": {"still": True}}
    (tmp_path / "grid.json").write_text(json.dumps({**nested, "pruning": inner}))
    assert read_grid(tmp_path / "grid.json") == AXES


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.toml", "x = [", "not valid JSON or TOML"),
        ("a.json", "x = 1", "not valid JSON or TOML"),
        ("a.json", "[1]", "holds no axes"),
        ("a.json", "{}", "holds no axes"),
        ("b.json", None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_grid(tmp_path: Path, name: str, text: str | None, part: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_grid(tmp_path / name)


def test_the_product_in_order() -> None:
    axes = {
        "temperature": [0, 0.8, 0.0], "setup": ["ngram:prompt_lookup_max=3", {"method": "ngram"}],
        "num_speculative_tokens": [2, 4], "max_nodes": [8], "batch_size": [1, 3],
    }  # fmt: skip
    points, refused = expand(axes, TARGET)
    assert not refused
    assert len({point.key for point in points}) == len(points) == 2 * 2 * 2 * 2  # 0 and 0.0 are one temperature
    assert [point.serving for point in points[::4]] == [
        Serving(batch_size=size, temperature=temperature) for temperature in (0.0, 0.8) for size in (1, 3)
    ]
    assert [point.setup.name for point in points[:4]] == [
        f"{base} num_speculative_tokens={depth}" for base in ("ngram prompt_lookup_max=3", "ngram") for depth in (2, 4)
    ]
    assert points[1].setup.config == {
        "method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 4, "max_nodes": 8
    }  # fmt: skip
    assert points[1].changes == {"num_speculative_tokens": 4, "max_nodes": 8}
    json.dumps([point.as_dict() for point in points])


def test_dotted_keys_nest_and_names_tell_points_apart() -> None:
    axes = {"method": ["ngram"], "pruning.path": [0, 1], "other.path": [2, 3], "pruning.token": ["a", "b"]}
    _, refused = expand(axes, TARGET)  # ngram has no such keys: that is another test's matter
    assert len({each.point.setup.name for each in refused}) == len(refused) == 8
    assert refused[-1].point.setup.config == {
        "method": "ngram", "pruning": {"path": 1, "token": "b"}, "other": {"path": 3}
    }  # fmt: skip
    assert refused[-1].point.setup.name == "ngram pruning.path=1 other.path=3 token=b"
    same = [{"method": "ngram", "prompt_lookup_min": 1}, {"prompt_lookup_min": 1, "method": "ngram"}]
    assert len(expand({"setup": same}, TARGET)[0]) == 1, "equal drafters are measured once"


def test_what_a_method_refuses_is_named_once_and_the_rest_goes_on() -> None:
    axes = {"method": ["ngram", "ngrm", "medusa"], "num_speculative_tokens": [2, 0], "batch_size": [1, 2]}
    points, refused = expand(axes, TARGET)
    assert [point.setup.config for point in points] == [{"method": "ngram", "num_speculative_tokens": 2}] * 2
    reasons = {each.point.setup.name: each.reason for each in refused}
    assert len(reasons) == len(refused) == 5, "not again for every batch size"
    assert "greater than or equal to 1" in reasons["ngram num_speculative_tokens=0"]
    assert "Did you mean 'ngram'?" in reasons["ngrm num_speculative_tokens=2"]
    assert "There is no 'no-such-directory-medusa'" in reasons["medusa num_speculative_tokens=2"]
    assert not expand({"setup": ["oracle"]}, TARGET)[1], "its references come from plain decoding"


@pytest.mark.parametrize(
    ("axes", "part"),
    [
        ({"max_nodes": [8]}, "no drafter is swept"),
        ({"setup": ["plain"]}, "'plain' drafts nothing to sweep"),
        ({"setup": ["ngram:max_nodes=4"], "max_nodes": [8]}, "'max_nodes' is set by a drafter and swept too"),
        ({"setup": ["ngram"], "method": ["ngram"]}, "'method' is set by a drafter and swept too"),
        ({"setup": ["ngram:chain"], "tree.widths": [1]}, "'tree.widths' is swept, but 'tree' is 'chain'"),
        ({"method": ["ngram"], "batch_size": [0]}, "batch_size is 0. Expected at least 1"),
        ({"method": ["ngram"], "batch_size": [True]}, "batch_size is True. Expected an integer"),
        ({"method": ["ngram"], "temperature": ["hot"]}, "temperature is 'hot'. Expected a number"),
        ({"method": ["ngram"], "dtype": [4]}, "dtype is 4. Expected text"),
    ],
)
def test_axes_that_fit_no_point(axes: dict[str, list[Any]], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        expand(axes, TARGET)


def test_axes_come_from_one_place_each() -> None:
    assert joined_axes({"a": [1]}, {}, {"b": [2, 3]}) == {"a": [1], "b": [2, 3]}
    with pytest.raises(ConfigError, match="'a' is swept twice"):
        joined_axes({"a": [1]}, {"a": [2]})
    with pytest.raises(ConfigError, match="'a' has no values"):
        joined_axes({"a": []})
