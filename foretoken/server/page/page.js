"use strict";

const at = (id) => document.getElementById(id);
let card = { id: null, drafters: [], has_chat_template: false };
let messages = [];
let running = null; // the AbortController of the request that runs

function headers() {
  const key = at("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failed(answer) {
  let told = `The server answered ${answer.status}.`;
  try {
    told = (await answer.json()).error.message;
  } catch {
    // not JSON: the status has to do
  }
  if (answer.status === 401) {
    at("key-label").hidden = false;
    at("key").focus();
  }
  const wait = answer.headers.get("Retry-After");
  return new Error(wait ? `${told} Try again in ${wait} s.` : told);
}

async function load() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (!answer.ok) throw await failed(answer);
  card = (await answer.json()).data[0];
  const drafters = card.drafters.length ? `drafts by ${card.drafters.join(" + ")}` : "no drafter";
  at("model").textContent = `${card.id} · ${drafters}${card.is_lossless ? "" : " · lossy"}`;
  at("prompt-label").textContent = card.has_chat_template ? "Message" : "Text to go on with";
}

function show(title, text, kind) {
  const article = document.createElement("article");
  const heading = document.createElement("h2");
  const body = document.createElement("pre");
  heading.textContent = title;
  article.append(heading, body);
  at("talk").append(article);
  if (text) add(body, text, kind);
  return body;
}

function add(body, text, kind) {
  const last = body.lastElementChild;
  if (last && last.className === kind) {
    last.textContent += text;
  } else {
    const part = document.createElement("span");
    part.className = kind;
    part.textContent = text; // never markup
    body.append(part);
  }
  at("talk").scrollTop = at("talk").scrollHeight;
}

function asked(text, speculative) {
  const body = {
    stream: true, stream_options: { include_usage: true }, spec_decode_metrics: "summary", return_token_origins: true,
    max_tokens: Number(at("max-tokens").value), temperature: Number(at("temperature").value),
    seed: Number(at("seed").value), speculative: { enabled: speculative },
  };
  if (!card.has_chat_template) return ["/v1/completions", { ...body, prompt: text }];
  return ["/v1/chat/completions", { ...body, messages: [...messages, { role: "user", content: text }] }];
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.slice(line.indexOf("data: ") + 6);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Streams one answer into `body`; what it brought and how fast.
async function generate(text, speculative, body) {
  const [path, content] = asked(text, speculative);
  running = new AbortController();
  at("stop").disabled = false;
  const run = { text: "", tokens: 0, drafted: 0, rate: 0, length: null };
  const answer = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(content),
    signal: running.signal,
  });
  if (!answer.ok) throw await failed(answer);
  let first = null;
  let counted = 0;
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    const now = performance.now();
    for (const part of event.choices.flatMap((choice) => choice.token_origins ?? [])) {
      add(body, part.text, part.is_drafted ? "drafted" : "own");
      run.text += part.text;
      run.tokens += 1;
      run.drafted += part.is_drafted;
    }
    if (run.tokens && first === null) [first, counted] = [now, run.tokens];
    if (first !== null && now > first && run.tokens > counted) run.rate = (1000 * (run.tokens - counted)) / (now - first);
    if (event.metrics?.speculative_decoding) run.length = event.metrics.speculative_decoding.mean_acceptance_length;
    meter(run);
  }
  return run;
}

function meter(run) {
  at("rate").textContent = run.rate ? run.rate.toFixed(0) : "–";
  at("length").textContent = run.length ? run.length.toFixed(2) : "–";
  at("share").textContent = run.tokens ? `${Math.round((100 * run.drafted) / run.tokens)} %` : "–";
}

async function work(job) {
  at("problem").hidden = true;
  for (const id of ["send", "compare", "clear"]) at(id).disabled = true;
  try {
    if (card.id === null) await load();
    await job();
  } catch (error) {
    if (error.name !== "AbortError") {
      at("problem").textContent = error.message;
      at("problem").hidden = false;
    }
  } finally {
    running = null;
    for (const id of ["send", "compare", "clear"]) at(id).disabled = false;
    at("stop").disabled = true;
  }
}

async function send() {
  const text = at("prompt").value;
  let body;
  if (card.has_chat_template) {
    show("you", text, "prompt");
    body = show("model", "", "own");
  } else {
    body = show("completion", text, "prompt");
  }
  at("gain").textContent = "–";
  const run = await generate(text, at("speculative").checked, body);
  if (card.has_chat_template) {
    messages.push({ role: "user", content: text }, { role: "assistant", content: run.text });
    at("prompt").value = "";
  }
}

async function compare() {
  const text = at("prompt").value;
  at("gain").textContent = "…";
  await generate(text, false, document.createElement("pre")); // so that neither of the two reads the prompt first
  const plain = await generate(text, false, show("plain decoding", "", "own"));
  const drafted = await generate(text, true, show("speculative decoding", "", "own"));
  const isSame = plain.text === drafted.text;
  at("gain").textContent = plain.rate && drafted.rate ? `${(drafted.rate / plain.rate).toFixed(2)}×` : "–";
  show("compared", isSame ? "The texts are the same, character by character." : "The texts differ.", "prompt");
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  work(send);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
});
at("compare").addEventListener("click", () => {
  if (at("ask").reportValidity()) work(compare);
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  messages = [];
  at("talk").replaceChildren();
});
work(async () => {}); // to know the model
