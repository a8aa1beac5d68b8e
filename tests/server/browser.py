"""A headless Chromium that tests drive over a pipe, by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 60
# The browser reads commands from descriptor 3 and writes to 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Tab:
    """One page, and what it asked for.

    Attributes:
        asked: URLs of all its requests.
        complaints: What its console and its content security policy reported.
    """

    def __init__(self, read: int, write: int) -> None:
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self._read, self._write, self._buffer, self._number = read, write, b"", 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, a promise's where it is one."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Returns once an expression is true; fails after a minute."""
        end = time.monotonic() + _SECONDS
        while not self.run(script):
            assert time.monotonic() < end, f"{script} stays false: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Loads a page."""
        self.asked.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def text(self, name: str) -> str:
        """The text of the element with an id."""
        return str(self.run(f"document.getElementById({name!r}).textContent"))

    def fill(self, name: str, value: str) -> None:
        """Puts a value into a field."""
        self.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")

    def click(self, name: str) -> None:
        """Clicks the element with an id."""
        self.run(f"document.getElementById({name!r}).click()")

    def press(self, key: str, *, control: bool = False, shift: bool = False) -> None:
        """Presses a key, as a keyboard does."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
                modifiers=2 * control + 8 * shift, **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )  # fmt: skip

    def picture(self, path: Path) -> None:
        """Saves what the page looks like as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _next(self) -> dict[str, Any]:
        """The next message of the browser."""
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        """Keeps what an event tells."""
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A browser until the end of the block; profile: an empty directory."""
    commands, results = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [
            sys.executable, "-c", _START, str(commands[0]), str(results[1]), str(BROWSER), "--headless", "--no-sandbox",
            "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", "--window-size=1100,900", f"--user-data-dir={profile}",
        ],
        pass_fds=(commands[0], results[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(commands[0])
    os.close(results[1])
    try:
        tab = Tab(results[0], commands[1])
        yield tab
        tab._session = None
        tab.call("Browser.close")
    finally:
        os.close(commands[1])
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(results[0])
