"""What a sweep keeps: lines that come back, fronts of known points, and the table of data."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sweep_points import made_up, many, point_of

from foretoken.bench.grid import Refused, Serving
from foretoken.bench.sweep import RESULTS, SweepResults, fronts, pareto_front, write_parquet
from foretoken.core.errors import ConfigError


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    kept, every = SweepResults(tmp_path, {"seed": 0}), many()
    for result in every:
        kept.add(point_of(result), result)
    refused = Refused(point_of(replace(every[0], name="other")), "it has no trees")
    kept.refuse(refused)
    kept.refuse(refused)
    for again in (kept, SweepResults(tmp_path, {"seed": 0}), SweepResults(tmp_path)):
        assert again.points == every
        assert again.refused == {"other": "it has no trees"}
        assert all(again.holds(point_of(result)) for result in every)
        assert not again.holds(point_of(replace(every[0], serving=Serving(temperature=0.5))))
    lines = (tmp_path / RESULTS).read_text().splitlines()
    assert len(lines) == 1 + len(every) + 1, "a refusal is written once"
    panels = kept.by_serving()
    assert list(panels) == [Serving(), Serving(batch_size=4)]
    rates = [result.tokens_per_s.median for result in panels[Serving()]]
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(ConfigError, match=r"seed 0, and seed is 1 now.*Choose another directory"):
        SweepResults(tmp_path, {"seed": 1})


@pytest.mark.parametrize("line", [{"key": "k"}, {"key": "k", "result": {"name": "n"}}, {"key": "k", "result": 4}])
def test_lines_of_something_else_are_refused(tmp_path: Path, line: object) -> None:
    SweepResults(tmp_path, {})
    with (tmp_path / RESULTS).open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="has a line that is not a point of a sweep"):
        SweepResults(tmp_path)


def test_fronts_of_known_points() -> None:
    points = [
        made_up("a", 4, 2.0, 30), made_up("b", 8, 3.0, 25), made_up("c", 8, 2.5, 40), made_up("d", 16, 3.0, 50),
        made_up("e", 2, 1.1, 10),
    ]  # fmt: skip
    assert fronts(points) == {"tau": [4, 0, 1], "tokens/s": [4, 0, 2, 3]}


def test_a_table_of_data_comes_back(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    trees = ["chain", {"widths": [2, 1]}, None]
    rows = [{**result.as_columns(), "tree": tree} for result, tree in zip(many(), trees * 10, strict=True)]
    rows[0]["changes.num_speculative_tokens"] = 1.5  # a column of integers and one other number
    (path,) = write_parquet(rows, tmp_path, {"seed": 0, "target": {"vocab_size": 4}})
    table = parquet.read_table(path)
    assert json.loads(table.schema.metadata[b"foretoken"]) == {"seed": 0, "target": {"vocab_size": 4}}
    columns = {name for row in rows for name in row}
    assert set(table.column_names) == columns
    assert {"tokens_per_s.median", "shares.draft", "changes.pruning.path_probability", "serving.dtype"} <= columns
    for row, back in zip(rows, table.to_pylist(), strict=True):
        for name in columns - {"tree"}:
            assert back[name] == row.get(name), name
        assert (None if back["tree"] is None else json.loads(back["tree"])) == row["tree"]
    assert str(table.schema.field("num_texts").type) == "int64"
    assert str(table.schema.field("acceptance_by_depth").type) == "list<element: double>"


def test_a_library_that_is_missing_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs the package 'pyarrow'.*pip install '\.\[report\]'"):
        write_parquet([{"a": 1}], tmp_path, {})
    assert not list(tmp_path.iterdir())


_NUMBER = st.integers(0, 4).map(float) | st.floats(-1e6, 1e6)  # few values, so that points tie


def slow_front(points: list[tuple[float, float]]) -> set[int]:
    """Points that no other one beats."""

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    return {i for i, own in enumerate(points) if not any(beats(other, own) for other in points)}


@given(st.lists(st.tuples(_NUMBER, _NUMBER), max_size=12))
@example([(1.0, 2.0), (1.0, 2.0), (1.0, 1.0), (2.0, 2.0), (0.0, 1.0)])
@example([(0.0, 0.0), (-0.0, 0.0)])
def test_a_front_against_its_definition(points: list[tuple[float, float]]) -> None:
    front = pareto_front(points)
    assert len(front) == len(set(front))
    assert set(front) == slow_front(points)
    assert [points[index] for index in front] == sorted(points[index] for index in front)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_without_an_order_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        pareto_front([(0.0, 1.0), (number, 1.0)])
