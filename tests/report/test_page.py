"""The page of a report: complete, self-contained, and closed to whatever stands in tokens, names and files."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.hostile_traces import TEXTS, write_hostile_trace

from foretoken.core.errors import ConfigError
from foretoken.report.page import embedded, read_run, render
from foretoken.report.trace_file import read_trace, tree_of


class Page(HTMLParser):
    """Elements with their attributes, and the text inside some of them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data


def page_of(run: Path) -> Page:
    return Page(render(read_run(run)))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    write_hostile_trace(tmp_path / "a.jsonl")
    html = render(read_run(tmp_path / "a.jsonl"))
    page = Page(html)
    assert len(page.scripts) == 2  # the data of one trace, and our own
    assert "img" not in [tag for tag, _ in page.elements]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", html)
    assert TEXTS[0] in page.text
    assert TEXTS[1] in page.text
    assert r"\u202eesrever\u2066" in page.text
    assert r"\x1b[31m\x00\x07" in page.text
    assert "{{ 7 * 7 }}" in page.text
    shown = json.loads(page.scripts[0])["iterations"]
    assert [entry["tree"]["text"][0] for entry in shown[:2]] == TEXTS[:2]
    assert page.scripts[0].isascii()
    assert not re.search("[<>&]", page.scripts[0])


@pytest.mark.parametrize("text", [*TEXTS, "\ud800", "</SCRIPT >", "<!--"])
def test_embedded_json_is_the_value_and_no_markup(text: str) -> None:
    markup = str(embedded({"text": text}))
    assert json.loads(markup) == {"text": text}
    assert markup.isascii()
    assert not set(markup) & set("<>&")


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    write_hostile_trace(tmp_path / "a.jsonl")
    (tmp_path / "tau.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    (tmp_path / "tau-dark.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page = page_of(tmp_path)
    links = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in {"src", "href", "srcset", "action", "data", "poster"}
    ]
    assert len(links) == 2  # the picture for light and dark pages
    assert all(link is not None and link.startswith("data:image/svg+xml;base64,") for link in links)
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-")


def test_every_token_and_iteration_is_there(tmp_path: Path) -> None:
    write_hostile_trace(tmp_path / "a.jsonl", num_iterations=12)
    trace, page = read_trace(tmp_path / "a.jsonl"), page_of(tmp_path / "a.jsonl")
    tokens = [attributes for _, attributes in page.elements if "data-i" in attributes]
    assert [int(attributes["data-i"] or 0) for attributes in tokens] == [n for n in range(12) for _ in range(2)]
    assert [attributes["class"] for attributes in tokens[:2]] == ["tok o1", "tok o0"]
    assert "".join(trace.end.parts) == trace.end.text
    shown = json.loads(page.scripts[0])["iterations"]
    assert shown[8]["tree"]["why"] == {"2": f"the target would write “{TEXTS[0]}” (p = 0.50); this node had p = 0.02"}
    assert shown[8]["tree"]["draft"] == [None, 0.607, 0.607]
    assert "2.00" in page.text  # tokens a pass
    assert tree_of(trace.iterations[0].tree).path == [1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_proposed", "told"),
    [
        (None, "Drafted nodes: 3 verified, 1 accepted"),
        (3, "Drafted nodes: 3 verified, 1 accepted"),
        (2, "2 proposed, 3 verified, 1 accepted (1 or more added by a lookup below another drafter's draft)"),
        (5, "5 proposed, 3 verified, 1 accepted (the others were proposed twice, or not expected to pay)"),
    ],
)
def test_more_or_fewer_nodes_than_were_proposed(num_proposed: int | None, told: str, tmp_path: Path) -> None:
    write_hostile_trace(tmp_path / "a.jsonl", num_iterations=1, depth=2, num_proposed=num_proposed)
    [iteration] = json.loads(page_of(tmp_path / "a.jsonl").scripts[0])["iterations"]
    assert iteration["drafts"].endswith(told)


def test_tokens_that_a_grammar_forced_were_not_proposed(tmp_path: Path) -> None:
    write_hostile_trace(tmp_path / "a.jsonl", num_iterations=1, depth=2, num_proposed=2)
    text = (tmp_path / "a.jsonl").read_text().replace('["<b>drafter</b>"]], "probes"', '["grammar"]], "probes"')
    (tmp_path / "a.jsonl").write_text(text)
    [iteration] = json.loads(page_of(tmp_path / "a.jsonl").scripts[0])["iterations"]
    assert iteration["drafts"].endswith("2 proposed, 3 verified, 1 accepted (1 forced by the grammar)")


def test_acceptance_has_its_counts(tmp_path: Path) -> None:
    write_hostile_trace(tmp_path / "a.jsonl", num_iterations=12, depth=2)
    [trace] = read_run(tmp_path / "a.jsonl").traces
    assert trace.acceptance == [(1.0, "12 of 12"), (0.0, "0 of 12")]
    assert "12 of 12" in page_of(tmp_path / "a.jsonl").text
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text().replace('"drafted_at_depth"', '"unknown"'))  # of an earlier version
    assert read_run(path).traces[0].acceptance == [(1.0, ""), (0.0, "")]


def test_results_of_a_sweep(tmp_path: Path) -> None:
    points = [
        {"name": "slow", "tau": 1.5, "tokens_per_s": {"median": 10.0}, "serving": {"batch_size": 1}},
        {"name": "<b>fast</b>", "tau": 2.25, "tokens_per_s": {"median": 20.0}, "serving": {"batch_size": 4}},
    ]
    lines = [
        {"conditions": {}},
        *[{"key": str(i), "result": point} for i, point in enumerate(points)],
        {"refused": "x"},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [sweep] = read_run(tmp_path).sweeps
    assert sweep.headings == ["point", "batch", "tau", "tokens/s"]
    assert sweep.rows == [["<b>fast</b>", "4", "2.25", "20.0"], ["slow", "1", "1.50", "10.0"]]
    assert "<b>fast</b>" in page_of(tmp_path).text


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda lines: lines[:1], "has 1 lines"),
        (lambda lines: [lines[0], "{", *lines[2:]], "line 2 of"),
        (lambda lines: [lines[0].replace('"version": 1', '"version": 9'), *lines[1:]], "version 9"),
        (lambda lines: lines[:-1], "no end of a trace"),
        (lambda lines: [line.replace('"parents": [-1, 0', '"parents": [-1, 2') for line in lines], "those of a tree"),
        (lambda lines: [line.replace('"path": [1]', '"path": [7]') for line in lines], "nodes that are not there"),
        (lambda lines: [line.replace('"depths": [0, ', '"depths": [') for line in lines], "depths has 2 entries for 3"),
        (lambda lines: [lines[0], *lines[2:]], "parts of text"),
        (lambda lines: ["[" * 100_000, *lines[1:]], "line 1 of"),
    ],
)
def test_damage_is_named(damage: object, part: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_hostile_trace(path, num_iterations=2)
    path.write_text("\n".join(damage(path.read_text().splitlines())))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_run(path)


def test_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds no trace"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="there is no"):
        read_run(tmp_path / "none")
