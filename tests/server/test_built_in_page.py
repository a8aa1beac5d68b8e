"""The page at / in a real browser: what it shows is what the API gives, and text that is hostile stays text."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from served_app import served
from server.browser import BROWSER, Tab, browser
from server.live_server import LiveServer, live_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foretoken import LLM, SamplingParams
from foretoken.server.app import page_response

KEY = "the-key"
CODE = "class Queue:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self"
HOSTILE = "</span><script>window.owned=1</script><img src=/stolen onerror=window.owned=1>&lt;\u202e<b onclick='x'>"
# What is shown of the last answer, and its parts that were drafted.
SHOWN = "[...document.querySelectorAll('.text')].at(-1).textContent"
DRAFTED = "[...[...document.querySelectorAll('.text')].at(-1).querySelectorAll('.drafted')].map(e => e.textContent)"

# Of every element with text of its own, how much lighter its text is than what it stands on, or the other way round.
CONTRASTS = """(() => {
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parsed = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (e) => {
    const c = parsed(getComputedStyle(e).backgroundColor);
    return c.length === 3 || c[3] ? c.slice(0, 3) : ground(e.parentElement);
  };
  const told = {};
  for (const e of document.querySelectorAll("body *")) {
    const hasText = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasText || !e.checkVisibility() || e.disabled) continue;
    const [a, b] = [light(parsed(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
    const name = [e.tagName, e.className, e.id, e.textContent.slice(0, 12)].join(" ");
    told[name] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return told;
})()"""


def in_browser(test: Any) -> Any:
    """A test that drives the browser."""
    reason = "needs chromium, chromium-browser or google-chrome on the path"
    return pytest.mark.slow(pytest.mark.skipif(BROWSER is None, reason=reason)(test))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def tab(chromium: Tab) -> Iterator[Tab]:
    """After each test: the page asked nobody but its own server, and nothing was blocked or failed in it."""
    yield chromium
    origin = chromium.run("location.origin")
    assert [url for url in chromium.asked if not url.startswith((origin + "/", "data:image/svg+xml,"))] == []
    assert [text for text in chromium.complaints if "status of 4" not in text] == []


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    """A server without a chat template that asks for a key, and serves one request at a time."""
    llm = LLM("models/tinycode", speculative_config={"method": "ngram", "num_speculative_tokens": 6}, max_num_seqs=1)
    with live_server(llm, max_waiting_requests=0, api_keys=[KEY]) as server:
        yield server


def ask(tab: Tab, prompt: str, **settings: Any) -> None:
    """Fills in the form."""
    tab.fill("prompt", prompt)
    for name, value in settings.items():
        tab.fill(name.replace("_", "-"), str(value))


def is_over(tab: Tab) -> None:
    """Waits for the end of whatever was begun."""
    tab.wait_for("document.getElementById('log').getAttribute('aria-busy') === 'false'")


def send(tab: Tab, prompt: str, *, button: str = "send", **settings: Any) -> None:
    """Fills in the form, sends it, and waits for the end."""
    ask(tab, prompt, **settings)
    tab.click(button)
    is_over(tab)


def unlock(tab: Tab, server: LiveServer) -> None:
    """Opens the page of a server that asks for a key, and gives the key."""
    tab.open(server.url)
    tab.fill("key", KEY)
    tab.run("document.getElementById('key-form').requestSubmit()")
    tab.wait_for("document.getElementById('model').textContent === 'tinycode'")


def chat(server: LiveServer, messages: list[dict[str, str]], **more: Any) -> str:
    """What the API answers."""
    body = {"messages": messages, "temperature": 0.0, "max_tokens": 60, **more}
    return str(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def test_the_page_is_closed(plain: LiveServer) -> None:
    answer = plain.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "connect-src 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", answer.text), "the page has an address"
    sinks = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|localStorage|sessionStorage|cookie"
    assert re.findall(sinks, answer.text) == []
    assert plain.get("/v1/models").json()["data"][0]["has_chat_template"] is True


@in_browser
def test_a_conversation_is_what_the_api_writes(tab: Tab, speculative: LiveServer) -> None:
    tab.open(speculative.url)
    tab.wait_for("document.getElementById('model').textContent === 'tinycode'")
    assert "drafts by ngram, lossless" in tab.text("about")
    assert not tab.run("document.getElementById('key-form').checkVisibility()")
    said: list[dict[str, str]] = []
    for prompt in ("class Queue:\n    def push(self, item):\n        self.items", "class Stack:"):
        ask(tab, prompt, max_tokens=60)
        tab.run("document.getElementById('prompt').focus()")
        tab.press("Enter", control=prompt.startswith("class Queue"))
        is_over(tab)
        said.append({"role": "user", "content": prompt})
        expected = chat(speculative, said)
        assert tab.run(SHOWN) == expected
        assert tab.text("status").startswith("Done: 60 tokens in ")
        assert tab.text("problem") == ""
        said.append({"role": "assistant", "content": expected})
    assert tab.run("document.getElementById('prompt').value") == ""
    assert len(expected) > 60


@in_browser
def test_three_examples_fill_in_the_prompt(tab: Tab, speculative: LiveServer, guarded: LiveServer) -> None:
    """They suit a model with and without a chat template, and make room for answers."""
    names = "[...document.querySelectorAll('#examples button')].map((each) => each.textContent)"
    is_shown = "document.getElementById('examples').checkVisibility()"
    value = "document.getElementById('prompt').value"
    tab.open(speculative.url)
    tab.wait_for(is_shown)
    assert tab.run(names) == ["Write a table", "Edit code", "Ask a question"]
    tab.run("document.querySelectorAll('#examples button')[1].click()")
    assert tab.run(value).startswith("Rename the variable total to amount in this code:\n\ndef price(items):\n")
    assert tab.run("document.activeElement.id") == "prompt"
    assert tab.run("document.querySelectorAll('.turn').length") == 0, "nothing is sent yet"
    tab.fill("max-tokens", "4")
    tab.press("Enter")
    is_over(tab)
    assert not tab.run(is_shown)
    tab.click("clear")
    assert tab.run(is_shown)
    tab.open(guarded.url)
    tab.wait_for("document.getElementById('key-form').checkVisibility()")
    tab.fill("key", KEY)
    tab.run("document.querySelector('#key-form button').click()")
    tab.wait_for(is_shown)
    assert tab.run(names) == ["Go on with data", "Write a class", "Write a function"]


@in_browser
def test_enter_sends_and_shift_enter_begins_a_line(tab: Tab, speculative: LiveServer) -> None:
    tab.open(speculative.url)
    ask(tab, "x = 1", max_tokens=10)
    tab.run("document.getElementById('prompt').focus()")
    tab.press("Enter", shift=True)
    assert tab.run("document.getElementById('prompt').value") == "x = 1\n"
    composing = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true})"
    assert tab.run(f"document.getElementById('prompt').dispatchEvent({composing})"), "Enter ends a composed character"
    assert tab.run("document.querySelectorAll('.turn').length") == 0
    tab.press("Enter")
    is_over(tab)
    assert tab.run(SHOWN) == chat(speculative, [{"role": "user", "content": "x = 1\n"}], max_tokens=10)


@in_browser
def test_a_system_prompt_and_top_p(tab: Tab, speculative: LiveServer, guarded: LiveServer) -> None:
    said = [{"role": "system", "content": "Write a queue."}]
    tab.open(speculative.url)
    tab.wait_for("document.getElementById('system').checkVisibility()")
    tab.fill("system", "Write a queue.")
    for prompt in ("class Queue:", "class Stack:"):
        send(tab, prompt, max_tokens=30, temperature=0.9, seed=5, top_p=0.6)
        said.append({"role": "user", "content": prompt})
        expected = chat(speculative, said, max_tokens=30, temperature=0.9, seed=5, top_p=0.6)
        assert tab.run(SHOWN) == expected
        said.append({"role": "assistant", "content": expected})
    assert expected != chat(speculative, said[:-1], max_tokens=30, temperature=0.9, seed=5), "top_p changes the text"
    unlock(tab, guarded)
    assert not tab.run("document.getElementById('system').checkVisibility()"), "there is no chat template"


@in_browser
def test_tokens_are_marked_by_who_proposed_them(tab: Tab, speculative: LiveServer) -> None:
    tab.open(speculative.url)
    send(tab, CODE, max_tokens=80)
    body = {
        "messages": [{"role": "user", "content": CODE}], "temperature": 0.0, "max_tokens": 80, "stream": True,
        "return_token_origins": True,
    }  # fmt: skip
    lines = speculative.post("/v1/chat/completions", body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [part for chunk in chunks for part in chunk["choices"][0].get("token_origins", [])]
    shown = "[...document.querySelectorAll('.text .tok')].map(e => e.textContent)"
    assert tab.run(shown) == [part["text"] for part in parts]
    drafted = tab.run(DRAFTED)
    assert len(drafted) > 5
    assert tab.run("document.querySelectorAll('.text .own').length") > 5
    assert tab.run("document.querySelector('.text .drafted').title") == "drafted by ngram, accepted"
    look = "(e => [e.backgroundColor, e.textDecorationStyle])(getComputedStyle(document.querySelector('.text .{}')))"
    by_draft, own = (tab.run(look.format(name)) for name in ("drafted", "own"))
    assert by_draft[0] != own[0]
    assert (by_draft[1], own[1]) == ("solid", "dotted"), "not by colour alone"
    assert float(tab.text("rate")) > 0
    assert 1 < float(tab.text("tau")) < 8
    assert re.fullmatch(r"\d+ %", tab.text("share"))
    assert re.fullmatch(r"\d+ ms|\d+\.\d+ s", tab.text("first"))


@in_browser
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}, {"temperature": 0.8}])
def test_compare_says_that_the_text_is_the_same(settings: dict[str, Any], tab: Tab, speculative: LiveServer) -> None:
    tab.open(speculative.url)
    send(tab, CODE, max_tokens=60, **settings, button="compare")
    plain, drafted = tab.run("[...document.querySelectorAll('.pair .text')].map(e => e.textContent)")
    more = dict(settings)
    if settings["temperature"]:
        more["seed"] = int(tab.run("document.getElementById('seed').value"))
    assert plain == drafted == chat(speculative, [{"role": "user", "content": CODE}], **more)
    assert tab.run("document.querySelector('.verdict').className") == "verdict same"
    assert tab.text("status").startswith("Done. The text is the same.")
    assert re.fullmatch(r"\d+\.\d\d\u00d7|no drafts", tab.text("speedup"))
    of_each = tab.run("[...document.querySelectorAll('.pair .text')].map(e => e.querySelectorAll('.drafted').length)")
    assert of_each[0] == 0


@in_browser
def test_without_speculation_all_tokens_are_the_targets_own(tab: Tab, speculative: LiveServer) -> None:
    tab.open(speculative.url)
    tab.click("speculate")
    send(tab, CODE, max_tokens=40)
    assert tab.run(SHOWN) == chat(speculative, [{"role": "user", "content": CODE}], max_tokens=40)
    assert tab.run(DRAFTED) == []
    assert (tab.text("tau"), tab.text("share")) == ("1.00", "0 %")


@in_browser
@pytest.mark.parametrize("is_key", [False, True])
def test_stop_ends_the_request(is_key: bool, tab: Tab, speculative: LiveServer) -> None:
    tab.open(speculative.url)
    ask(tab, "class Queue:", max_tokens=900)
    tab.click("send")
    tab.wait_for("document.querySelectorAll('.text .tok').length > 3")
    tab.press("Escape") if is_key else tab.click("stop")
    is_over(tab)
    assert tab.text("status") == "Stopped."
    assert tab.text("problem") == ""
    assert 0 < tab.run("document.querySelectorAll('.text .tok').length") < 800
    speculative.wait_until_idle()
    send(tab, CODE, max_tokens=10)
    assert tab.run(SHOWN) == chat(speculative, [{"role": "user", "content": CODE}], max_tokens=10)


@in_browser
def test_a_server_with_a_key_and_without_a_template(tab: Tab, guarded: LiveServer) -> None:
    tab.open(guarded.url)
    tab.wait_for("document.getElementById('key-form').checkVisibility()")
    assert tab.text("problem") == "The server asks for an API key. Enter one above."
    for key, told in (("wrong", "The server does not know this API key."), ("schlüssel", "other than ASCII")):
        tab.fill("key", key)
        tab.click("send")  # nothing is sent without a prompt
        tab.run("document.getElementById('key-form').requestSubmit()")
        tab.wait_for(f"document.getElementById('problem').textContent.includes({told!r})")
    tab.fill("key", KEY)
    tab.run("document.getElementById('key-form').requestSubmit()")
    tab.wait_for("document.getElementById('model').textContent === 'tinycode'")
    assert tab.text("problem") == ""
    prompt = f'TEXT = "{HOSTILE}"\n{CODE}'
    send(tab, prompt, max_tokens=30)
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0.0}
    expected = guarded.post("/v1/completions", body, headers=headers).json()["choices"][0]["text"]
    assert tab.run(SHOWN) == prompt + expected
    assert tab.run("window.owned === undefined && !document.querySelector('.text img, .text script, .text b')")
    assert tab.run("[localStorage.length, sessionStorage.length, document.cookie, location.href]") == [
        0, 0, "", guarded.url + "/",
    ]  # fmt: skip
    tab.open(guarded.url)
    tab.wait_for("document.getElementById('key-form').checkVisibility()")
    assert tab.run("document.getElementById('key').value") == "", "the key is gone with the page"


@in_browser
def test_errors_of_the_server_are_told(tab: Tab, guarded: LiveServer) -> None:
    unlock(tab, guarded)
    send(tab, "class Queue:", max_tokens=1023)
    assert "more together than the context of 1024 tokens" in tab.text("problem")
    assert tab.run("document.getElementById('log').childElementCount") == 0
    assert tab.run("document.getElementById('prompt').value") == "class Queue:"
    busy = guarded.engine.submit("class Queue:", SamplingParams(max_tokens=1000, ignore_eos=True))
    send(tab, "class Queue:", max_tokens=10)
    busy.abort()
    assert re.search(r"wait.* Try again in \d+ seconds?\.$", tab.text("problem"))
    guarded.wait_until_idle()
    tab.click("send")
    is_over(tab)
    assert tab.text("problem") == ""
    assert tab.text("status").startswith("Done: 10 tokens")


def made_up_app(answer: str, *, name: str = HOSTILE, asked: list[Any] | None = None) -> Starlette:
    """The page beside a server that gives every request one stream; name: its model's and drafter's; asked: gets what
    requests ask for.
    """
    card = {
        "id": name, "drafters": [name], "is_lossless": True, "has_chat_template": True, "max_model_len": 1024,
    }  # fmt: skip

    def page(_: Request) -> Response:
        return page_response()

    def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def chats(request: Request) -> Response:
        if asked is not None:
            asked.append(await request.json())
        return Response(answer, media_type="text/event-stream")

    return Starlette(
        routes=[Route("/", page), Route("/v1/models", models), Route("/v1/chat/completions", chats, methods=["POST"])]
    )


def chunk(**choice: Any) -> str:
    """A chunk of a stream with one choice."""
    body = {"choices": [{"finish_reason": None, **choice}], "usage": {"completion_tokens": 2}}
    return f"data: {json.dumps(body)}\n\n"


@in_browser
def test_hostile_text_is_inert(tab: Tab) -> None:
    parts = [
        {"text": HOSTILE, "is_drafted": True, "drafters": [HOSTILE]},
        {"text": HOSTILE, "is_drafted": False, "drafters": []},
    ]
    stream = chunk(delta={"content": ""}) + chunk(delta={"content": 2 * HOSTILE}, token_origins=parts)
    stream += f"data: {json.dumps({'error': {'message': HOSTILE}})}\n\n"
    with served(made_up_app(stream)) as url:
        tab.open(url)
        tab.wait_for("document.getElementById('about').textContent !== ''")
        send(tab, HOSTILE)
        texts = tab.run("[...document.querySelectorAll('.text')].map(e => e.textContent)")
        assert texts == [HOSTILE, 2 * HOSTILE]
        assert tab.text("problem") == tab.text("model") == HOSTILE
        assert f"drafts by {HOSTILE}" in tab.text("about")
        assert tab.run("document.querySelector('.text .drafted').title") == f"drafted by {HOSTILE}, accepted"
        assert tab.run("window.owned === undefined")
        assert tab.run("document.querySelectorAll('script').length") == 1
        assert tab.run("document.querySelectorAll('img, b').length") == 0
        assert not any("stolen" in asked for asked in tab.asked)


@in_browser
def test_drafters_are_told_apart(tab: Tab) -> None:
    of = (["ngram"], ["hydra"], [], ["ngram", "hydra"], ["hydra"])
    parts = [{"text": f"t{i} ", "is_drafted": bool(by), "drafters": by} for i, by in enumerate(of)]
    stream = chunk(delta={"content": "t"}, token_origins=parts) + "data: [DONE]\n\n"
    with served(made_up_app(stream, name="ngram")) as url:
        tab.open(url)
        send(tab, "x")
        looks = tab.run(
            "[...document.querySelectorAll('.text .tok')].map(e => getComputedStyle(e)).map(e => "
            "[e.backgroundColor, e.textDecorationColor, e.textDecorationStyle].join())"
        )
        assert looks[1] == looks[4]
        assert len(set(looks)) == 4
        assert looks[2].startswith("rgba(0, 0, 0, 0),"), "the target's own has no colour, as in a report"
        legend = tab.run("[...document.querySelectorAll('#legend .tok')].map(e => e.textContent)")
        assert legend[:-1] == ["drafted by ngram", "drafted by hydra", "drafted by ngram and hydra"]
        assert tab.run("[...document.querySelectorAll('#legend .tok')].map(e => e.className)")[0] == "tok drafted o1"


@in_browser
@pytest.mark.parametrize("num_drafted", [0, 9])
def test_compare_runs_both_orders_and_credits_drafts_alone(tab: Tab, num_drafted: int) -> None:
    part = {"text": "x", "is_drafted": bool(num_drafted), "drafters": ["ngram"] * bool(num_drafted)}
    metrics = {"speculative_decoding": {"mean_acceptance_length": 1.5, "num_draft_tokens": num_drafted}}
    end = f"data: {json.dumps({'choices': [], 'metrics': metrics})}\n\ndata: [DONE]\n\n"
    asked: list[Any] = []
    with served(made_up_app(chunk(delta={"content": "x"}, token_origins=[part]) + end, name="m", asked=asked)) as url:
        tab.open(url)
        send(tab, "x", button="compare")
        orders = [body["speculative"]["enabled"] for body in asked]
        assert orders == [False, True, True, False, False, True, True, False]
        assert len({body["cache_salt"] for body in asked}) == 8, "no run reads on from another's prompt"
        assert tab.run("document.querySelectorAll('.pair .text').length") == 2
        verdict = tab.run("document.querySelector('.verdict').textContent")
        if num_drafted:
            times = r"\d+ ms instead of \d+ ms, (\d+\.\d\d)\u00d7 the speed \((\d+\.\d\d) to (\d+\.\d\d) in 4 pairs\)"
            found = re.search(times, verdict)
            assert found is not None, verdict
            speedup, low, high = map(float, found.groups())
            assert low <= speedup <= high
            assert tab.text("speedup") == f"{found[1]}\u00d7"
            assert tab.text("spread") == f"speed beside plain decoding, {found[2]} to {found[3]} in 4 pairs"
            assert ("no difference" in verdict) == (low <= 1 <= high) or 1.0 in (low, high)
        else:
            assert "No drafts: the engine did not expect any to pay" in verdict
            assert "\u00d7" not in verdict
            assert tab.text("speedup") == "no drafts"


@in_browser
def test_the_policy_stops_what_the_page_would_never_do(chromium: Tab, plain: LiveServer) -> None:
    """Were a script to get in all the same, it could neither ask other servers nor make markup of text."""
    chromium.open(plain.url)
    blocked = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'blocked')"
    assert chromium.run(blocked) == "blocked"
    assert any("Content Security Policy" in text for text in chromium.complaints)
    markup = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch { return 'blocked'; } })()"
    assert chromium.run(markup) == "blocked"


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_is_legible_and_named(theme: str, tab: Tab, speculative: LiveServer) -> None:
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.open(speculative.url)
    send(tab, CODE, max_tokens=40)
    contrasts = tab.run(CONTRASTS)
    assert len(contrasts) > 20
    assert min(contrasts.values()) >= 4.5, contrasts  # WCAG 2.2, AA
    fields = "[...document.querySelectorAll('input, textarea')]"
    assert tab.run(f"{fields}.filter(e => !e.labels.length).map(e => e.id)") == []
    assert tab.run("document.documentElement.lang") == "en"
    tab.run("document.getElementById('prompt').focus()")
    reached = []
    for _ in range(8):
        reached.append(tab.run("document.activeElement.id"))
        tab.press("Tab")
    assert reached == ["prompt", "temperature", "top-p", "max-tokens", "seed", "speculate", "send", "compare"]
    tab.call("Emulation.setEmulatedMedia", features=[])


@in_browser
def test_nothing_is_wider_than_a_narrow_screen(tab: Tab, speculative: LiveServer) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=320, height=700, deviceScaleFactor=1, mobile=False)
    tab.open(speculative.url)
    send(tab, "x" * 300, max_tokens=40, button="compare")
    assert tab.run("document.documentElement.scrollWidth") <= 320
    tab.call("Emulation.clearDeviceMetricsOverride")
