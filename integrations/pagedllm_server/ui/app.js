// The page of pagedllm's server: a chat, and a live view of the engine.
// It talks to the server it came from and to nobody else.
"use strict";

const element = (id) => document.getElementById(id);
const root = new URL("..", location.href);
const history = [];
const SECONDS_SHOWN = 120;
let conversation = [];
let running = null;
let before = null;

function headers() {
  const key = element("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// -- chat -----------------------------------------------------------------------------

function show(role, text) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const thought = document.createElement("span");
  thought.className = "thought";
  const words = document.createElement("span");
  words.textContent = text;
  const note = document.createElement("span");
  note.className = "note";
  box.append(thought, words, note);
  element("messages").append(box);
  follow(true);
  return { box, thought, words, note };
}

function follow(always) {
  const list = element("messages");
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  if (always || near) list.scrollTop = list.scrollHeight;
}

function sampling() {
  const found = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    const text = element(name).value.trim();
    if (text !== "") found[name] = Number(text);
  }
  return found;
}

function busy(controller) {
  running = controller;
  element("send").disabled = controller !== null;
  element("stop").disabled = controller === null;
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  show("user", text);
  const system = element("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const shown = show("assistant", "");
  const controller = new AbortController();
  busy(controller);
  const answer = { text: "", reason: "stopped", tokens: null, begin: performance.now(), first: null };
  try {
    const response = await fetch(new URL("v1/chat/completions", root), {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        messages, ...sampling(), stream: true, stream_options: { include_usage: true },
      }),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await read(response.body, (chunk) => take(chunk, answer, shown));
  } catch (error) {
    if (error.name !== "AbortError") {
      shown.box.classList.add("error");
      shown.words.textContent += error.message;
      answer.reason = "error";
    }
  } finally {
    busy(null);
  }
  if (answer.reason !== "error") conversation.push({ role: "assistant", content: answer.text });
  else conversation.pop();
  shown.note.textContent = summary(answer);
  follow(false);
}

function take(chunk, answer, shown) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
  for (const choice of chunk.choices) {
    const delta = choice.delta;
    if ((delta.content || delta.reasoning_content) && answer.first === null) {
      answer.first = performance.now();
    }
    if (delta.reasoning_content) shown.thought.textContent += delta.reasoning_content;
    if (delta.content) {
      answer.text += delta.content;
      shown.words.textContent = answer.text;
    }
    if (choice.finish_reason) answer.reason = choice.finish_reason;
  }
  follow(false);
}

function summary(answer) {
  const parts = [answer.reason];
  if (answer.first !== null) parts.push(`first token ${Math.round(answer.first - answer.begin)} ms`);
  if (answer.tokens > 1 && answer.first !== null) {
    const seconds = (performance.now() - answer.first) / 1000;
    parts.push(`${answer.tokens} tokens, ${((answer.tokens - 1) / seconds).toFixed(1)} tok/s`);
  }
  return parts.join(" · ");
}

async function read(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") take(JSON.parse(data));
    }
  }
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("input").value.trim();
  if (!text || running) return;
  element("input").value = "";
  send(text);
});
element("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    element("form").requestSubmit();
  }
});
element("stop").addEventListener("click", () => running && running.abort());
element("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation = [];
  element("messages").replaceChildren();
  element("input").focus();
});

// -- the engine -----------------------------------------------------------------------

async function poll() {
  try {
    const response = await fetch(new URL("stats", root), { headers: headers() });
    element("key-label").hidden = response.status !== 401 && element("key").value === "";
    if (response.status === 401) say("an API key is needed", true);
    else {
      const stats = await response.json();
      if (stats.pages) {  // else there is no engine now
        const pages = await fetch(new URL("stats/pages", root), { headers: headers() });
        map = pages.ok ? await pages.json() : null;
      }
      draw(stats);
      if (map) drawMap();
    }
  } catch {
    say("the server does not answer", true);
    before = null;
  }
  setTimeout(poll, 1000);
}

function say(text, bad) {
  element("state").textContent = text;
  element("state").classList.toggle("bad", bad);
}

function draw(stats) {
  element("model").textContent = stats.model;
  const restarts = stats.restarts ? `, restarted ${stats.restarts} times` : "";
  say(stats.problem || `ready${restarts}`, Boolean(stats.problem));
  if (!stats.pages) return;
  const now = performance.now();
  if (before && stats.generated_tokens >= before.tokens) {
    const rate = (1000 * (stats.generated_tokens - before.tokens)) / (now - before.now);
    element("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
    history.push(rate);
    if (history.length > SECONDS_SHOWN) history.shift();
  }
  before = { tokens: stats.generated_tokens, now };
  element("running").textContent = stats.running;
  element("waiting").textContent = stats.waiting;
  const milliseconds = (value) => (value === null ? "–" : `${value.toFixed(1)} ms`);
  element("ttft").textContent = milliseconds(stats.ttft_ms);
  element("itl").textContent = milliseconds(stats.itl_ms);
  const queries = stats.prefix_queries;
  element("hits").textContent = queries ? `${Math.round((100 * stats.prefix_hits) / queries)} %` : "–";
  drawHistory();
  drawLegend(stats.pages, stats.fragmentation_percent);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

function drawHistory() {
  const canvas = element("history");
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const top = Math.max(1, ...history);
  const step = canvas.width / SECONDS_SHOWN;
  pen.fillStyle = colour("--free");
  pen.fillRect(0, canvas.height - 2, canvas.width, 2);
  pen.fillStyle = colour("--accent");
  history.forEach((rate, index) => {
    const height = (rate / top) * (canvas.height - 4);
    const x = canvas.width - (history.length - index) * step;
    pen.fillRect(x, canvas.height - 2 - height, Math.max(1, step - 1), height);
  });
}

const STATES = ["free", "cached", "used", "shared"];
let map = null;

// A cell is a page, or several in a row that show the busiest one's state.
function drawMap() {
  const canvas = element("pages");
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const cells = map.cells.length;
  let columns = 1;
  while (Math.ceil(cells / columns) * (canvas.width / columns) > canvas.height) columns += 1;
  map.columns = columns;
  map.size = Math.min(canvas.width / columns, 16);
  const gap = map.size > 6 ? 2 : 1;
  const colours = STATES.map((state) => colour(`--${state}`));
  for (let cell = 0; cell < cells; cell += 1) {
    const row = Math.floor(cell / columns);
    pen.fillStyle = colours[map.cells[cell]];
    pen.fillRect((cell % columns) * map.size, row * map.size, map.size - gap, map.size - gap);
  }
}

function drawLegend(pages, fragmentation) {
  const total = pages.used + pages.cached + pages.free;
  const shared = map && map.pages_per_cell === 1 ? map.cells.split("3").length - 1 : 0;
  const counts = { used: pages.used - shared, shared, cached: pages.cached, free: pages.free };
  const legend = element("legend");
  legend.replaceChildren();
  for (const [state, count] of Object.entries(counts)) {
    if (state === "shared" && !count) continue;
    const mark = document.createElement("i");
    mark.className = state;
    const entry = document.createElement("span");
    entry.append(mark, `${state} ${count}`);
    legend.append(entry, " ");
  }
  const cell = map && map.pages_per_cell > 1 ? `; a cell is ${map.pages_per_cell} of them` : "";
  const room = fragmentation ? `; ${fragmentation.toFixed(0)} % of the used ones' room is empty` : "";
  legend.append(`of ${total} pages of ${pages.size} tokens${cell}${room}`);
}

element("pages").addEventListener("mousemove", (event) => {
  if (!map || !map.size) return;
  const canvas = element("pages");
  const scale = canvas.width / canvas.clientWidth;
  const column = Math.floor((event.offsetX * scale) / map.size);
  const cell = Math.floor((event.offsetY * scale) / map.size) * map.columns + column;
  const inside = column < map.columns && cell < map.cells.length;
  const first = cell * map.pages_per_cell;
  const last = Math.min(first + map.pages_per_cell, map.pages) - 1;
  const which = first === last ? `page ${first}` : `pages ${first} to ${last}`;
  canvas.title = inside ? `${which}: ${STATES[map.cells[cell]]}` : "";
});

poll();
