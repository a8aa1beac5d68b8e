"""The page in a real browser: trees are drawn, text cannot break out, nothing is fetched."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from report.hostile_traces import TEXTS, write_hostile_trace

from foretoken.report.page import render
from foretoken.report.sources import read_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on the path"),
]


def dumped(address: str, profile: Path) -> str:
    """The page as the browser has it after its script ran."""
    return subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            f"--user-data-dir={profile}", "--window-size=1280,900", "--dump-dom", address,
        ],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip


def test_trees_are_drawn_and_nothing_is_fetched(tmp_path: Path) -> None:
    write_hostile_trace(tmp_path / "a.jsonl")
    (tmp_path / "p.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><image href='/stolen'/></svg>")
    page = render(read_run(tmp_path)).encode()
    asked: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/page" else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page if self.path == "/page" else b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        dom = dumped(f"http://127.0.0.1:{server.server_port}/page", tmp_path / "profile")
        server.shutdown()
        thread.join()
    assert set(asked) <= {"/page", "/favicon.ico"}  # browsers ask for the icon of a site by themselves
    assert asked.count("/page") == 1
    tree = dom.split('class="treebox"')[1].split('class="node"')[0]
    assert tree.count('data-node="') == 3
    assert "leaf o1 accepted" in tree
    assert "leaf o1 rejected" in tree
    assert "target 0.5" in tree
    assert "draft 0.61" in tree
    assert "Tested and not accepted" in dom
    assert f"<title>{tmp_path.name} · foretoken report</title>" in dom
    assert "document.title='broken'</script>" not in dom
    assert TEXTS[1] not in dom
