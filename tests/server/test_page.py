"""The page in a real browser: text comes in its colours, two ways are compared, and nothing of a text is markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from served_app import served
from server.live_server import TEMPLATE, LiveServer

from foretoken import LLM, SamplingParams
from foretoken.engine.async_llm import AsyncLLM
from foretoken.server.app import ServerConfig, make_app
from foretoken.server.page import made_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = (
    "def f():\n    <img src=/stolen onerror=\"document.title='broken'\"><script>document.title='broken'</script>\n"
)
KEY = "the-key-of-this-test"
# What a person does, and what the page shows after each step; it ends by sending all of it.
PERSON = """
const idle = async () => { do await new Promise((done) => setTimeout(done, 30)); while (at("send").disabled); };
const seen = () => ({
  texts: [...at("talk").querySelectorAll("pre")].map((pre) => pre.textContent),
  drafted: [...at("talk").querySelectorAll("article:last-of-type .drafted")].map((each) => each.textContent),
  elements: [...new Set([...at("talk").querySelectorAll("*")].map((each) => each.tagName))].sort(),
  problem: at("problem").hidden ? null : at("problem").textContent, model: at("model").textContent,
  asks: !at("key-label").hidden, title: document.title, label: at("prompt-label").textContent,
  meter: ["rate", "length", "share", "gain"].map((id) => at(id).textContent),
});
(async () => {
  const all = {};
  await idle();
  at("prompt").value = given.prompt;
  at("max-tokens").value = 40;
  if (given.key) {
    all.refused = seen();
    at("key").value = given.key;
  }
  at("send").click();
  await idle();
  all.sent = seen();
  at("prompt").value = given.prompt;
  at("clear").click();
  at("compare").click();
  await idle();
  all.compared = seen();
  at("clear").click();
  at("max-tokens").value = 700;
  at("send").click();
  while (!at("talk").querySelector(".own, .drafted")) await new Promise((done) => setTimeout(done, 5));
  at("stop").click();
  await idle();
  all.stopped = seen();
  at("prompt").value = given.prompt;
  at("max-tokens").value = 10 ** 6;
  at("send").click();
  await idle();
  all.tooMany = seen();
  return all;
})().catch((error) => ({ error: error.stack }))
  .then((all) => fetch("/seen", { method: "POST", body: JSON.stringify(all) }));
"""


class Watched:
    """The application, whose page a script uses as a person would; what is asked for, and what the script saw."""

    def __init__(self, app: Any, given: dict[str, Any]) -> None:
        self.asked: list[str] = []
        self.seen: dict[str, Any] | None = None
        self._app, self._given = app, given

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        self.asked.append(path)
        if path == "/seen":
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            self.seen = json.loads(body)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return

        async def with_script(message: Any) -> None:
            if path == "/" and message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"content-length"]
                message = {**message, "headers": headers}
            if path == "/" and message["type"] == "http.response.body":
                page = message["body"].decode()
                (nonce,) = set(re.findall(r'nonce="([^"]+)"', page))
                given = json.dumps(self._given).replace("<", "\\u003c")
                script = f'<script nonce="{nonce}">const given = {given};{PERSON}</script>'
                message = {**message, "body": page.replace("</body>", script + "</body>").encode()}
            await send(message)

        await self._app(scope, receive, with_script if path == "/" else send)


def used(llm: LLM, given: dict[str, Any], profile: Path, **config: Any) -> tuple[Watched, LiveServer]:
    """A server whose page was used in the browser, and is over."""
    engine = AsyncLLM(llm)
    watched = Watched(make_app(engine, ServerConfig(names=["tinycode"], **config)), given)
    with served(watched) as url:
        browser = subprocess.Popen(
            [
                str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                "--no-first-run", "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}",
                "--remote-debugging-port=0", url + "/",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            end = time.monotonic() + 60
            while watched.seen is None:
                assert time.monotonic() < end, f"the page did not come to its end; asked: {watched.asked}"
                assert browser.poll() is None, "the browser ended"
                time.sleep(0.05)
        finally:
            browser.kill()
            browser.wait(30)
        server = LiveServer(url, engine)
        server.wait_until_idle()
    return watched, server


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("models/tinycode", speculative_config={"method": "ngram", "num_speculative_tokens": 6}, max_num_seqs=4)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on the path")
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_page_in_a_browser(is_chat: bool, llm: LLM, tmp_path: Path) -> None:
    config: dict[str, Any] = {"chat_template": TEMPLATE, "api_keys": [KEY]} if is_chat else {}
    watched, _ = used(llm, {"prompt": HOSTILE, "key": KEY if is_chat else None}, tmp_path, **config)
    seen = watched.seen
    assert seen is not None
    assert "error" not in seen, seen["error"]
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=40)
    prompt: Any = HOSTILE
    if is_chat:
        (prompt,) = llm.chat_prompts([{"role": "user", "content": HOSTILE}], chat_template=TEMPLATE)
        assert seen["refused"]["asks"]
        assert "API key" in seen["refused"]["problem"]
    text = llm.generate([prompt], params)[0].outputs[0].text
    sent, compared = seen["sent"], seen["compared"]
    assert sent["model"] == "tinycode · drafts by ngram"
    assert sent["label"] == ("Message" if is_chat else "Text to go on with")
    assert sent["texts"] == ([HOSTILE, text] if is_chat else [HOSTILE + text])
    assert sent["drafted"], "text repeats itself, and lookup drafts it"
    assert all(part in text for part in sent["drafted"])
    assert float(sent["meter"][0]) > 0
    assert float(sent["meter"][1]) > 1
    assert sent["meter"][2].endswith("%")
    assert compared["texts"][0] == compared["texts"][1] != ""
    assert compared["texts"][2] == "The texts are the same, character by character."
    assert compared["meter"][3].endswith("\N{MULTIPLICATION SIGN}")
    assert seen["stopped"]["problem"] is None
    assert seen["stopped"]["texts"][-1] != "", "what had come stays"
    assert "context" in seen["tooMany"]["problem"]
    for step in seen.values():
        assert step["title"] == "foretoken"
        assert set(step["elements"]) <= {"ARTICLE", "H2", "PRE", "SPAN"}
    assert set(watched.asked) <= {
        "", "/", "/seen", "/favicon.ico", "/v1/models", "/v1/completions", "/v1/chat/completions"
    }  # fmt: skip


def test_every_page_allows_its_own_script_alone() -> None:
    first, second = made_page(), made_page()
    nonces = [set(re.findall(r'nonce="([^"]+)"', page.text)) for page in (first, second)]
    assert all(len(each) == 1 for each in nonces)
    assert nonces[0] != nonces[1]
    policy = first.headers["Content-Security-Policy"]
    assert f"script-src 'nonce-{next(iter(nonces[0]))}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|eval\(|localStorage|document\.write", first.text)


def test_origins_make_up_the_text(speculative: LiveServer) -> None:
    body = {"model": "tinycode", "prompt": "class Queue:", "max_tokens": 60, "temperature": 0.0, "stream": True}
    answer = speculative.post("/v1/completions", json={**body, "return_token_origins": True, "n": 2})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    plain = speculative.post("/v1/completions", json={**body, "stream": False}).json()["choices"][0]["text"]
    for index in range(2):
        parts = [part for each in choices if each["index"] == index for part in each["token_origins"]]
        assert "".join(part["text"] for part in parts) == plain
        assert {part["is_drafted"] for part in parts} == {False, True}
    without = speculative.post("/v1/completions", json=body)
    assert "token_origins" not in without.text
