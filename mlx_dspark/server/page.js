"use strict";
// Talks to the same interface as every other client; the field "dspark" asks for a description of each round.
// Text of the model reaches the page through textContent only.

const SHOWN_ROUNDS = 60;
const LOOK_EVERY_MS = 2000;
const at = (id) => document.getElementById(id);

const state = {
  model: null, chat: false, messages: [],
  running: null, drawing: false, rounds: [], count: 0, accepted: 0, verified: 0,
};

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function note(text) {
  at("note").textContent = text;
}

async function refusal(response) {
  if (response.status === 401) at("key-row").hidden = false;
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function findModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await refusal(response));
  const card = (await response.json()).data[0];
  state.model = card.id;
  state.chat = card.dspark.chat;
  at("model").textContent = card.id;
  at("text").placeholder = state.chat ? "Write a message" : "This model has no chat template: it continues your text";
}

async function look() {
  if (document.hidden || state.model === null) return;
  const response = await fetch("metrics", { headers: headers() });
  if (!response.ok) return;
  const found = {};
  for (const line of (await response.text()).split("\n")) {
    const words = line.split(" ");
    if (!line.startsWith("#") && words.length === 2) found[words[0].replace("mlx_dspark_", "")] = Number(words[1]);
  }
  const show = (id, name, digits) => {
    at(id).textContent = name in found ? found[name].toFixed(digits) : "–";
  };
  show("active", "active_requests", 0);
  show("waiting", "waiting_requests", 0);
  show("server-tau", "tau", 2);
  show("server-rows", "rows_per_request", 2);
  show("speed", "tokens_per_second", 1);
}

function paragraph(kind, text = "") {
  const article = document.createElement("article");
  article.className = kind;
  article.textContent = text;
  at("talk").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function addToken(place, text, kind) {
  if (!text) return;
  const span = document.createElement(kind === "rejected" ? "del" : "span");
  span.className = kind;
  span.textContent = text;
  place.append(span);
}

// Accepted drafts, then what was rejected, then the target's own token.
function showRound(place, round) {
  const kept = round.tokens.filter(([, accepted]) => accepted);
  const own = round.tokens.filter(([, accepted]) => !accepted);
  for (const [text] of kept) addToken(place, text, "draft");
  if (round.rejected?.length) addToken(place, round.rejected.join(""), "rejected");
  for (const [text] of own) addToken(place, text, "own");
}

function countRound(round) {
  if (!round.rows) return; // the prefill is no round, nor is text that was held back until the end
  state.count += 1;
  state.accepted += round.accepted;
  state.verified += round.verified;
  state.rounds = [...state.rounds, round].slice(-SHOWN_ROUNDS);
}

// Rounds come faster than a screen can show them: everything but the text is drawn once a frame.
function drawSoon(place) {
  if (state.drawing) return;
  state.drawing = true;
  requestAnimationFrame(() => {
    state.drawing = false;
    const round = state.rounds.at(-1);
    if (round) {
      at("tau").textContent = round.tau === null ? "–" : round.tau.toFixed(2);
      at("rounds").textContent = String(state.count);
      at("rows").textContent = String(round.rows);
      at("accepted").textContent = `${state.accepted} of ${state.verified}`;
      at("reason").textContent = `${round.policy}: ${round.reason}`;
      drawBars();
    }
    place.scrollIntoView({ block: "end" });
  });
}

function drawBars() {
  const rounds = state.rounds;
  const most = Math.max(...rounds.map((round) => round.rows), 1);
  const step = 240 / SHOWN_ROUNDS;
  const bars = rounds.flatMap((round, i) => {
    const bar = (kind, from, rows) => {
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      rect.setAttribute("class", kind);
      rect.setAttribute("x", String(i * step));
      rect.setAttribute("width", String(step * 0.8));
      rect.setAttribute("y", String(80 - ((from + rows) * 80) / most));
      rect.setAttribute("height", String((rows * 80) / most));
      return rect;
    };
    const committed = Math.min(round.accepted + 1, round.rows);
    return [bar("kept", 0, committed), bar("lost", committed, round.rows - committed)];
  });
  at("bars").replaceChildren(...bars);
}

// The data of each server-sent event, up to [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

function request(text) {
  const common = {
    model: state.model, stream: true, dspark: true,
    temperature: Number(at("temperature").value), max_tokens: Number(at("max-tokens").value),
  };
  return state.chat
    ? ["v1/chat/completions", { ...common, messages: [...state.messages, { role: "user", content: text }] }]
    : ["v1/completions", { ...common, prompt: text }];
}

async function answer(text, place) {
  const [path, body] = request(text);
  const response = await fetch(path, {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal: state.running.signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  let said = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices.length ? (event.choices[0].delta ?? { content: event.choices[0].text }) : {};
    said += delta.content ?? "";
    if (!event.dspark || !event.dspark.tokens) continue;
    const thought = delta.reasoning_content && !delta.content;
    const part = document.createElement("span");
    part.className = thought ? "thought" : "round";
    showRound(part, event.dspark);
    place.append(part);
    countRound(event.dspark);
    drawSoon(place);
  }
  return said;
}

async function send(event) {
  event.preventDefault();
  const text = at("text").value;
  if (!text || state.running) return;
  state.running = new AbortController();
  Object.assign(state, { rounds: [], count: 0, accepted: 0, verified: 0 });
  at("send").disabled = true;
  at("stop").disabled = false;
  note("");
  let place = null;
  try {
    if (state.model === null) await findModel();
    paragraph("asked", text);
    place = paragraph("answer");
    const said = await answer(text, place);
    if (state.chat) state.messages.push({ role: "user", content: text }, { role: "assistant", content: said });
    at("text").value = "";
  } catch (error) {
    if (error.name === "AbortError") note("stopped; this turn is not part of the conversation");
    else if (place) paragraph("failed", error.message);
    else note(error.message);
  }
  place?.setAttribute("data-done", "");
  state.running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  look().catch(() => {});
}

at("ask").addEventListener("submit", send);
at("stop").addEventListener("click", () => state.running?.abort());
at("clear").addEventListener("click", () => {
  state.running?.abort();
  state.messages = [];
  at("talk").replaceChildren();
  note("");
});
at("show-rejected").addEventListener("change", (event) => {
  at("talk").classList.toggle("show-rejected", event.target.checked);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) at("ask").requestSubmit();
});
at("key").addEventListener("change", () => findModel().then(() => note("")).catch((error) => note(error.message)));
findModel().then(look).catch((error) => note(error.message));
setInterval(() => look().catch(() => {}), LOOK_EVERY_MS);
