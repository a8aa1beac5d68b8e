"""The page in a real browser: trees are drawn, text cannot break out, nothing is fetched, hidden or clipped."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from report.hostile_traces import TEXTS, write_hostile_trace
from server.browser import BROWSER, Tab, browser

from foretoken.report.page import read_run, render

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on the path"),
]
NUMBERS = "[...document.querySelectorAll('.number')].map(e => Number(e.textContent))"
# What is wider than its box, and what lies outside of the window.
HIDDEN = """(() => {
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility());
  const clips = (e) => getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
  const isOutside = (box) => box.width && (box.left < 0 || box.right > innerWidth);
  const hidden = shown.filter((e) => clips(e) || isOutside(e.getBoundingClientRect()));
  return hidden.map((e) => e.tagName + "." + e.className);
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(tab: Tab, run: Path) -> None:
    """Shows the report of a directory; the page is closed as any file is."""
    page = run.parent / "page.html"
    page.write_text(render(read_run(run)), encoding="utf-8")
    tab.open(page.as_uri())
    assert [url for url in tab.asked if not url.startswith("data:image/svg+xml")] == [page.as_uri()]
    assert tab.complaints == []


def test_trees_are_drawn_and_nothing_is_fetched(tab: Tab, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_hostile_trace(run / "a.jsonl")
    (run / "p.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><image href='/stolen'/></svg>")
    opened(tab, run)
    assert tab.run("document.querySelectorAll('.treebox [data-node]').length") == 3
    leaf = "document.querySelector('.treebox .leaf.o1.{}').textContent"
    assert tab.run(leaf.format("accepted")) == f"{TEXTS[1]}target 0.5 · draft 0.61".replace("0.5 ", "0.50 ")
    assert "target 0.02 · draft 0.61" in tab.run(leaf.format("rejected"))
    assert "Tested and not accepted" in tab.run("document.body.innerText")
    assert tab.run("document.title") == "run · foretoken report"
    assert tab.run("document.querySelectorAll('script:not([type])').length") == 1
    assert tab.run("document.querySelectorAll('main img').length") == 1, "the picture alone"


def test_arrow_keys_go_through_the_iterations(tab: Tab, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in "ab":
        write_hostile_trace(run / f"{name}.jsonl")
    opened(tab, run)
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.press(key)
    assert tab.run(NUMBERS) == [3, 1], "nothing has the focus: the trace in the window"
    tab.run("document.querySelectorAll('.treebox')[1].focus()")
    tab.press("ArrowRight")
    assert tab.run(NUMBERS) == [3, 2]
    tab.run("document.querySelectorAll('.leaf')[0].focus()")
    tab.press("ArrowRight")
    assert tab.run(NUMBERS) == [4, 2]
    tab.run("document.querySelector('input[type=range]').focus()")
    tab.press("ArrowRight")
    assert tab.run(NUMBERS) == [5, 2], "the slider moves by itself, once"


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_clipped_or_hidden(tab: Tab, tmp_path: Path, width: int) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_hostile_trace(run / "deep.jsonl", depth=16)
    write_hostile_trace(run / "wide.jsonl", width=12, depth=3)
    point = {
        "name": "eagle:dynamic tree_top_k=4 num_speculative_tokens=4 " * 3, "tau": 1.5, "nodes": 7.5,
        "tokens_per_s": {"median": 10.0}, "speed_up": {"median": 1.25}, "num_identical": 16, "num_texts": 16,
        "serving": {"batch_size": 1, "temperature": 0.8, "dtype": "bfloat16"},
    }  # fmt: skip
    (run / "results.jsonl").write_text(json.dumps({"key": "0", "result": point}) + "\n")
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    opened(tab, run)
    assert tab.run(HIDDEN) == []
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("[...document.querySelectorAll('.treebox')].map(e => e.querySelectorAll('[data-node]').length)") == [
        18, 14,
    ]  # fmt: skip
    assert tab.run("document.querySelectorAll('.treebox.outline').length") >= 1, "a chain of 16 is wider than its box"
    told = "document.querySelector('.points td:nth-child(5)')"
    heading = f"getComputedStyle({told}, '::before').content"
    assert tab.run(f"[{told}.textContent, {heading}]") == ["1.50", '"tau"' if width == 390 else "none"]
    tab.call("Emulation.clearDeviceMetricsOverride")
