"use strict";
// Asks this server for text and shows what its streams tell. Text only ever becomes text nodes.
(() => {
  const find = (id) => document.getElementById(id);
  const element = (name, classes, text) => {
    const made = document.createElement(name);
    if (classes) made.className = classes;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const seconds = (ms) => (ms < 1000 ? Math.round(ms) + " ms" : (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + " s");
  class Problem extends Error {} // what the user is told

  const SPEED = "speed beside plain decoding";
  const STREAMED = { stream: true, stream_options: { continuous_usage_stats: true }, return_token_origins: true, spec_decode_metrics: "summary" };

  const EXAMPLES = { // by whether the model has a chat template; the first repeats itself, which suits drafts
    true: [
      ["Write a table", "Write an HTML table of the planets with their distance from the sun."],
      ["Edit code", "Rename the variable total to amount in this code:\n\ndef price(items):\n    total = 0\n    for item in items:\n        total = total + item.price * item.count\n    return total"],
      ["Ask a question", "Why is the sky blue?"],
    ],
    false: [
      ["Go on with data", '[\n  {"name": "Anna", "age": 31, "city": "Rome"},\n  {"name": "Ben", "age": 27, "city": "Oslo"},\n'],
      ["Write a class", "class Queue:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self"],
      ["Write a function", "def read_config(path):\n"],
    ],
  };

  let model = null; // what /v1/models tells
  let messages = []; // of the conversation
  let running = null; // ends what is under way
  const colours = new Map(); // of drafters, and of several that proposed a token together, as in the report

  // ---- the server ----

  async function ask(path, body, signal) {
    const key = find("key").value.trim();
    if (!/^[\x21-\x7e]*$/.test(key)) throw new Problem("The API key has other than ASCII characters. Check it.");
    const headers = key ? { Authorization: "Bearer " + key } : {};
    if (body) headers["Content-Type"] = "application/json";
    const request = { method: body ? "POST" : "GET", headers, signal, cache: "no-store", credentials: "omit", redirect: "error" };
    let answer;
    try {
      answer = await fetch(path, body ? { ...request, body: JSON.stringify(body) } : request);
    } catch (error) {
      if (signal && signal.aborted) throw error;
      throw new Problem("The server cannot be reached. Is it still running?");
    }
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    const message = told && told.error && typeof told.error.message === "string" ? told.error.message : "The server answered with status " + answer.status + ".";
    if (answer.status === 401) {
      find("key-form").hidden = false;
      find("key").focus();
      throw new Problem(key ? "The server does not know this API key. Enter another one." : "The server asks for an API key. Enter one above.");
    }
    const wait = answer.headers.get("Retry-After");
    throw new Problem(message + (wait ? " Try again in " + wait + (wait === "1" ? " second." : " seconds.") : ""));
  }

  async function* events(answer, signal) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal.aborted) throw error;
        throw new Problem("The connection to the server broke off.");
      }
      if (part.done) throw new Problem("The answer ended before it was complete.");
      const pieces = (rest + part.value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const data = piece.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  }

  // ---- one answer ----

  const figuresOf = (run) => {
    const took = run.last - run.first;
    return {
      rate: took > 0 ? ((run.tokens - run.tokensFirst) * 1000 / took).toFixed(1) : "–",
      tau: run.tau === null ? "–" : run.tau.toFixed(2),
      share: run.tokens ? Math.round(100 * run.accepted / run.tokens) + " %" : "–",
      first: run.first === null ? "–" : seconds(run.first - run.begin),
    };
  };

  function showFigures(run) {
    for (const [name, value] of Object.entries(figuresOf(run))) find(name).textContent = value;
  }

  function lookOf(drafters) {
    const name = drafters.join(" and ");
    if (!colours.has(name)) {
      colours.set(name, "tok drafted o" + (colours.size % 8 + 1));
      find("legend").lastElementChild.before(element("span", colours.get(name), "drafted by " + name), " ");
    }
    return colours.get(name);
  }

  function tokenOf(part) {
    const isDrafted = part.drafters.length > 0;
    const token = element("span", isDrafted ? lookOf(part.drafters) : "tok own", part.text);
    token.title = isDrafted ? "drafted by " + part.drafters.join(" and ") + ", accepted" : "the target’s own";
    return token;
  }

  async function generate(fields, box, signal) {
    const run = { text: "", tokens: 0, tokensFirst: 0, accepted: 0, drafted: 0, tau: null, begin: performance.now(), first: null, last: null, reason: null };
    const log = find("log");
    const path = model.has_chat_template ? "v1/chat/completions" : "v1/completions";
    const answer = await ask(path, { ...fields, ...STREAMED }, signal);
    for await (const event of events(answer, signal)) {
      if (event.error) throw new Problem(event.error.message);
      const told = event.metrics && event.metrics.speculative_decoding;
      if (told) [run.tau, run.drafted] = [told.mean_acceptance_length, told.num_draft_tokens];
      for (const choice of event.choices) {
        const parts = choice.token_origins;
        if (!parts) continue; // begins a message
        run.last = performance.now();
        run.tokens = event.usage.completion_tokens;
        run.accepted += parts.filter((part) => part.is_drafted).length;
        if (run.first === null) [run.first, run.tokensFirst] = [run.last, run.tokens];
        if (run.tokens > run.accepted) run.tau = run.tokens / (run.tokens - run.accepted); // every pass ends with a token of the target's own
        if (choice.finish_reason) run.reason = choice.finish_reason;
        const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        for (const part of parts) {
          run.text += part.text;
          box.append(tokenOf(part));
        }
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      }
      if (box.isConnected) showFigures(run);
    }
    run.end = performance.now();
    return run;
  }

  // ---- turns ----

  const fieldsOf = (prompt) => {
    const fields = { model: model.id, temperature: find("temperature").valueAsNumber, max_tokens: find("max-tokens").valueAsNumber };
    if (find("seed").value) fields.seed = find("seed").valueAsNumber;
    if (find("top-p").value) fields.top_p = find("top-p").valueAsNumber;
    if (!find("speculate").checked) fields.speculative = { enabled: false };
    if (!model.has_chat_template) return { ...fields, prompt };
    const system = find("system").value.trim() ? [{ role: "system", content: find("system").value }] : [];
    return { ...fields, messages: [...system, ...messages, { role: "user", content: prompt }] };
  };

  function turn(place, heading, text) {
    const made = element("article", "turn"), box = element("div", "text");
    box.dir = "auto";
    made.append(element("h2", "", heading), box);
    if (text) box.append(element("span", "given", text));
    place.append(made);
    find("log").scrollTop = find("log").scrollHeight;
    return box;
  }

  function showPrompt(prompt) {
    if (model.has_chat_template) turn(find("log"), "You", prompt);
  }

  const before = (prompt) => (model.has_chat_template ? "" : prompt); // a completion goes on with its prompt
  const ended = (run) => run.tokens + " tokens in " + seconds(run.end - run.begin) + (run.reason === "length" ? "; stopped at the limit of tokens" : "");

  function remember(prompt, run) {
    if (model.has_chat_template) messages.push({ role: "user", content: prompt }, { role: "assistant", content: run.text });
  }

  async function send(prompt, signal) {
    const fields = fieldsOf(prompt);
    showPrompt(prompt);
    const run = await generate(fields, turn(find("log"), "Answer", before(prompt)), signal);
    remember(prompt, run);
    return "Done: " + ended(run) + ".";
  }

  const random = (limit) => crypto.getRandomValues(new Uint32Array(1))[0] % limit;

  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b), half = sorted.length / 2;
    return (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
  };

  // One request is measured against noise of the machine and a cold start: pairs in both orders, plain first in one and
  // last in the next. A pair's ratio is that of whole requests.
  const PAIRS = 4, FEWEST_PAIRS = 2, MOST_MS = 30000; // no pair is begun after that time, once both orders were run

  async function runPairs(fields, place, before, signal) {
    const pairs = [], begin = performance.now();
    while (pairs.length < FEWEST_PAIRS || (pairs.length < PAIRS && performance.now() - begin < MOST_MS)) {
      const pair = {};
      for (const isSpeculative of pairs.length % 2 ? [true, false] : [false, true]) {
        const name = isSpeculative ? "With speculation" : "Without speculation";
        find("status").textContent = name + ", " + (pairs.length + 1) + " of at most " + PAIRS + " …";
        // A salt of its own: no run reads on from another's prompt, nor drafts from what it wrote.
        const own = { speculative: { enabled: isSpeculative }, cache_salt: "compare " + random(2 ** 32) + " " + random(2 ** 32) };
        const box = pairs.length ? element("div") : turn(place, name, before);
        pair[isSpeculative ? "drafted" : "plain"] = await generate({ ...fields, ...own }, box, signal);
      }
      pairs.push(pair);
    }
    return pairs;
  }

  function verdictOf(pairs) {
    const runs = pairs.flatMap((pair) => [pair.plain, pair.drafted]), isSame = runs.every((run) => run.text === runs[0].text);
    const text = isSame ? "The text is the same." : "The texts differ" + (model.is_lossless ? "." : ", as they may: this acceptance rule is not lossless.");
    const ms = (name) => median(pairs.map((pair) => pair[name].end - pair[name].begin));
    const ratios = pairs.map((pair) => (pair.plain.end - pair.plain.begin) / (pair.drafted.end - pair.drafted.begin));
    const low = Math.min(...ratios), high = Math.max(...ratios);
    if (!pairs.some((pair) => pair.drafted.drafted)) {
      return { isSame, text: text + " No drafts: the engine did not expect any to pay, so both are plain decoding.", speedup: "no drafts", spread: "" };
    }
    const spread = low.toFixed(2) + " to " + high.toFixed(2) + " in " + pairs.length + " pairs", speedup = median(ratios).toFixed(2) + "×";
    const times = seconds(ms("drafted")) + " instead of " + seconds(ms("plain")) + ", " + speedup + " the speed (" + spread + ")";
    const isClear = low > 1 || high < 1;
    return { isSame, text: text + " " + times + (isClear ? "." : ": no difference that these runs can tell from noise."), speedup, spread };
  }

  async function compare(prompt, signal) {
    if (find("temperature").valueAsNumber > 0 && !find("seed").value) find("seed").value = random(1e6);
    const fields = fieldsOf(prompt), place = element("div", "pair");
    showPrompt(prompt);
    find("log").append(place);
    const pairs = await runPairs(fields, place, before(prompt), signal), verdict = verdictOf(pairs);
    showFigures(pairs[0].drafted);
    find("speedup").textContent = verdict.speedup;
    find("spread").textContent = SPEED + (verdict.spread ? ", " + verdict.spread : "");
    find("log").append(element("p", "verdict " + (verdict.isSame ? "same" : "other"), verdict.text));
    find("log").scrollTop = find("log").scrollHeight;
    remember(prompt, pairs[0].drafted);
    return "Done. " + verdict.text;
  }

  // ---- the form ----

  function setRunning(controller) {
    running = controller;
    find("log").setAttribute("aria-busy", String(Boolean(running)));
    find("send").disabled = Boolean(running);
    find("compare").disabled = Boolean(running) || !model || !model.drafters.length;
    find("stop").disabled = !running;
    find("clear").disabled = Boolean(running);
    find("examples").hidden = !model || find("log").childElementCount > 0;
  }

  function exampleOf([name, prompt]) {
    const button = element("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => {
      find("prompt").value = prompt;
      find("prompt").focus();
    });
    return button;
  }

  async function begin(work) {
    if (running || !find("form").reportValidity()) return;
    const prompt = find("prompt").value, controller = new AbortController(), numTurns = find("log").childElementCount;
    find("problem").textContent = "";
    find("status").textContent = "Writing …";
    setRunning(controller);
    try {
      if (!model) await load();
      const told = await work(prompt, controller.signal);
      find("status").textContent = told;
      if (model.has_chat_template && find("prompt").value === prompt) find("prompt").value = "";
    } catch (error) {
      const made = [...find("log").children].slice(numTurns);
      if (!made.some((each) => each.querySelector(".tok"))) made.forEach((each) => each.remove()); // nothing came
      find("status").textContent = controller.signal.aborted ? "Stopped." : "";
      if (!controller.signal.aborted) find("problem").textContent = error instanceof Problem ? error.message : "This page failed: " + error.message;
    } finally {
      setRunning(null);
      if (document.activeElement === document.body) find("prompt").focus();
    }
  }

  async function load() {
    const told = await (await ask("v1/models")).json();
    model = told.data[0];
    document.title = model.id + " · foretoken";
    find("model").textContent = model.id;
    const drafters = "drafts by " + model.drafters.join(" + ") + (model.is_lossless ? ", lossless" : ", not lossless");
    find("about").textContent = (model.drafters.length ? drafters : "no drafter (serve with -s to have one)") + ", context of " + model.max_model_len + " tokens";
    model.drafters.forEach((name) => lookOf([name]));
    find("system-box").hidden = !model.has_chat_template;
    find("prompt-label").textContent = model.has_chat_template ? "Message" : "Prompt, which the model goes on with";
    find("max-tokens").max = model.max_model_len - 1;
    find("speculate").checked = find("speculate").checked && model.drafters.length > 0;
    find("speculate").disabled = !model.drafters.length;
    find("examples").replaceChildren("Try: ", ...EXAMPLES[Boolean(model.has_chat_template)].map(exampleOf));
    find("problem").textContent = "";
    find("key-form").hidden = true;
    setRunning(running);
  }

  const tryToLoad = () => load().catch((error) => { find("problem").textContent = error.message; });

  find("form").addEventListener("submit", (event) => { event.preventDefault(); begin(send); });
  find("compare").addEventListener("click", () => begin(compare));
  find("stop").addEventListener("click", () => running && running.abort());
  find("clear").addEventListener("click", () => {
    messages = [];
    find("log").replaceChildren();
    for (const id of ["status", "problem"]) find(id).textContent = "";
    for (const id of ["rate", "tau", "share", "first", "speedup"]) find(id).textContent = "–";
    find("spread").textContent = SPEED;
    setRunning(null);
    find("prompt").focus();
  });
  find("key-form").addEventListener("submit", (event) => { event.preventDefault(); find("prompt").focus(); tryToLoad(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== find("prompt")) return;
    event.preventDefault();
    begin(send);
  });
  setRunning(null);
  tryToLoad();
})();
