// An editor whose completions come from the server that this page came from, and from no other.

const ALTERNATIVES = 5; // the most that OpenAI's completions give for a token
const UNSURE = 0.5;
const MISSING = "–";

const $ = (id) => document.getElementById(id);
const code = $("code");
const view = $("view");
const scroll = $("scroll");
const card = $("card");

let key = ""; // in this variable only: never in storage, a cookie or an address
let suggestion = null; // what is asked for, or shown and not yet accepted
let tabLeaves = false;

// ---- the server ----

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Error(`the server cannot be reached (${error.message}); see whether it still runs`);
  }
  if (response.ok) return response;
  if (response.status === 401) {
    const refused = key !== "";
    askForKey();
    throw new Error(refused ? "the server refused this API key" : "the server wants an API key");
  }
  throw new Error(await reason(response));
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return `${error.message ?? error} (${response.status})`;
  } catch {
    return `${text.slice(0, 200) || response.statusText} (${response.status})`;
  }
}

// The objects in a stream of server-sent events, each in one `data:` line.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    const lines = (rest + next.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
  throw new Error("the answer broke off before its end; ask again");
}

function askForKey() {
  $("key-form").hidden = false;
  $("key").focus();
}

async function showFacts() {
  const read = async (path) => (await call(path)).json();
  const [models, props] = await Promise.allSettled([read("v1/models"), read("props")]);
  for (const { reason: failure } of [models, props]) if (failure) showError(failure.message);
  const names = (models.value?.data ?? []).map((model) => model.id);
  $("model").replaceChildren(...names.map((name) => new Option(name, name)));
  const context = props.value?.default_generation_settings?.n_ctx;
  $("context").textContent = context ? `${context.toLocaleString("en")} tokens` : MISSING;
  $("slots").textContent = props.value?.total_slots ?? MISSING;
}

// ---- a completion ----

function body(before, after) {
  const request = {
    model: $("model").value || undefined,
    prompt: before,
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    heal: true, // a cursor is often within what the model knows as one token
    logprobs: ALTERNATIVES,
    stream: true,
    stream_options: { include_usage: true },
  };
  // Blank lines at a file's end are no context: what comes before them is simply continued.
  if (after.trim()) request.suffix = after;
  return JSON.stringify(request);
}

async function ask() {
  if (suggestion) return;
  if (![$("max-tokens"), $("temperature")].every((input) => input.reportValidity())) return;
  const at = code.selectionEnd;
  code.setSelectionRange(at, at);
  const mine = {
    at, control: new AbortController(), text: "", tokens: 0, waiting: [],
    asked: performance.now(), first: null, last: null, usage: null, reason: null, running: true,
  };
  suggestion = mine;
  showError("");
  showFigures(mine);
  draw();
  try {
    const { signal } = mine.control;
    const sent = body(code.value.slice(0, at), code.value.slice(at));
    const response = await call("v1/completions", { method: "POST", body: sent, signal });
    for await (const chunk of events(response.body)) take(mine, chunk);
    mine.running = false;
    if (suggestion === mine) finish(mine);
  } catch (error) {
    mine.running = false;
    mine.control.abort();
    if (suggestion !== mine) return; // it was dropped or accepted: no failure
    showError(error.message);
    if (mine.text) finish(mine);
    else drop("Nothing came");
  }
}

function take(mine, chunk) {
  if (suggestion !== mine) return;
  if (chunk.error) throw new Error(chunk.error.message ?? chunk.error);
  mine.usage = chunk.usage ?? mine.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const scores = choice.logprobs;
  (scores?.tokens ?? []).forEach((text, i) => {
    const others = scores.top_logprobs?.[i] ?? {};
    mine.waiting.push({ text, p: Math.exp(scores.token_logprobs[i]), others });
    mine.tokens += 1;
  });
  mine.reason = choice.finish_reason ?? mine.reason;
  if (choice.text) {
    mine.last = performance.now();
    mine.first ??= mine.last;
    show(mine, choice.text);
  }
  showFigures(mine);
}

// A token need not be a piece of text (half a character, text held back that may be a stop
// string): where the two do not match, the text is one piece with all of its tokens.
function show(mine, text) {
  const tokens = mine.waiting;
  mine.waiting = [];
  mine.text += text;
  const matched = tokens.map((token) => token.text).join("") === text;
  const shown = matched
    ? tokens.map((token) => pieceOf(token.text, [token]))
    : [pieceOf(text, tokens)];
  $("ghost").append(...shown);
  showLines();
  const below = $("ghost").getBoundingClientRect().bottom - scroll.getBoundingClientRect().bottom;
  scroll.scrollTop += Math.max(below + 12, 0);
  setBusy();
}

function pieceOf(text, tokens) {
  const piece = document.createElement("span");
  piece.className = "token";
  piece.textContent = text;
  piece.tokens = tokens;
  if (!tokens.length) piece.classList.add("unscored");
  else {
    const p = Math.min(...tokens.map((token) => token.p));
    piece.dataset.p = p.toFixed(3);
    piece.style.setProperty("--p", p);
    piece.classList.toggle("unsure", p < UNSURE);
  }
  return piece;
}

function finish(mine) {
  if (!mine.text) {
    drop("Nothing to add: the model ends here");
    return;
  }
  showFigures(mine); // what was used is told last
  const why = { length: "at max tokens", stop: "ended by the model" }[mine.reason] ?? "broken off";
  setBusy();
  $("status").textContent = `${counted(mine)} tokens, ${why}`;
  $("said").textContent = `Suggestion: ${mine.text} — Tab accepts, Escape drops it.`;
}

function accept() {
  if (!suggestion?.text) return;
  const { text, at, control } = suggestion;
  control.abort(); // what was not yet shown was not accepted
  suggestion = null;
  draw();
  code.focus();
  code.setSelectionRange(at, at);
  insert(text);
  $("status").textContent = `Accepted ${text.length.toLocaleString("en")} characters`;
  $("said").textContent = "Accepted";
}

function drop(why = "Dropped") {
  if (!suggestion) return;
  suggestion.control.abort();
  suggestion = null;
  draw();
  $("status").textContent = why;
  $("said").textContent = "";
}

function insert(text) {
  // The one way that the browser's undo knows of; where it is gone, undo is lost, not the text.
  if (document.execCommand("insertText", false, text)) return;
  code.setRangeText(text, code.selectionStart, code.selectionEnd, "end");
  draw();
}

// ---- what is seen ----

function draw() {
  const at = suggestion ? suggestion.at : code.value.length;
  const ghost = document.createElement("span");
  ghost.id = "ghost";
  // The blank keeps a last empty line's height, and room for the cursor.
  view.replaceChildren(code.value.slice(0, at), ghost, `${code.value.slice(at)} `);
  hideCard();
  showLines();
  setBusy();
}

function showLines() {
  const count = view.textContent.split("\n").length;
  $("lines").textContent = Array.from({ length: count }, (_, i) => i + 1).join("\n");
}

function setBusy() {
  const { classList } = document.body;
  classList.toggle("working", Boolean(suggestion?.running));
  classList.toggle("suggesting", Boolean(suggestion?.text));
  $("ask").disabled = Boolean(suggestion);
  $("accept").disabled = !suggestion?.text;
  $("drop").disabled = !suggestion;
  if (suggestion?.running) $("status").textContent = suggestion.text ? "Writing" : "Waiting";
}

const counted = (mine) => mine.usage?.completion_tokens ?? mine.tokens;

function showFigures(mine) {
  const seconds = (mine.last - mine.first) / 1000;
  const { usage } = mine;
  const figures = {
    first: mine.first === null ? MISSING : `${Math.round(mine.first - mine.asked)} ms`,
    rate: seconds > 0 ? `${((mine.tokens - 1) / seconds).toFixed(1)} tok/s` : MISSING,
    count: counted(mine) || MISSING,
    prompt: usage ? `${usage.prompt_tokens.toLocaleString("en")} tokens` : MISSING,
    cached: usage ? (usage.prompt_tokens_details?.cached_tokens ?? 0).toLocaleString("en") : MISSING,
  };
  for (const [id, text] of Object.entries(figures)) $(id).textContent = text;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

const percent = (p) => `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`;

function showCard(piece) {
  hideCard();
  if (!piece.tokens.length) return;
  card.replaceChildren(...piece.tokens.map(choices));
  card.hidden = false;
  piece.classList.add("looked-at");
  const place = piece.getClientRects()[0];
  const below = place.bottom + 6;
  const top = below + card.offsetHeight < innerHeight ? below : place.top - card.offsetHeight - 6;
  card.style.top = `${Math.max(top, 0)}px`;
  card.style.left = `${Math.max(Math.min(place.left, innerWidth - card.offsetWidth - 8), 0)}px`;
}

// The chosen token and the likeliest others, likeliest first.
function choices(token) {
  const all = new Map(Object.entries(token.others).map(([text, score]) => [text, Math.exp(score)]));
  all.set(token.text, token.p);
  const list = document.createElement("div");
  list.className = "choices";
  for (const [text, p] of [...all].sort((a, b) => b[1] - a[1])) {
    const row = document.createElement("div");
    row.className = text === token.text ? "choice chosen" : "choice";
    row.style.setProperty("--p", p);
    for (const shown of [JSON.stringify(text).slice(1, -1), percent(p)]) {
      row.append(Object.assign(document.createElement("span"), { textContent: shown }));
    }
    list.append(row);
  }
  return list;
}

function hideCard() {
  card.hidden = true;
  for (const piece of view.querySelectorAll(".looked-at")) piece.classList.remove("looked-at");
}

function lookAtNext(step) {
  const all = [...$("ghost").children];
  if (!all.length) return;
  const now = all.findIndex((piece) => piece.classList.contains("looked-at"));
  const next = now < 0 ? (step > 0 ? 0 : all.length - 1) : now + step;
  const piece = all[Math.min(Math.max(next, 0), all.length - 1)];
  showCard(piece);
  const rows = [...card.querySelectorAll(".choice")];
  $("said").textContent = rows.map((row) => [...row.children].map((c) => c.textContent).join(" "))
    .join(", ");
}

// ---- what is done ----

code.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const plain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey;
  const leaving = tabLeaves;
  if (!["Shift", "Control", "Alt", "Meta"].includes(event.key)) tabLeaves = false;
  if (plain && event.key === "Tab" && !leaving) {
    event.preventDefault();
    if (suggestion) accept();
    else ask();
  } else if (plain && event.key === "Escape") {
    event.preventDefault();
    if (suggestion) drop();
    else if (!$("error").hidden) showError("");
    else {
      tabLeaves = true;
      $("status").textContent = "Tab now leaves the editor";
    }
  } else if (plain && event.key === "Enter") {
    const line = code.value.slice(0, code.selectionStart).split("\n").pop();
    event.preventDefault();
    insert(`\n${line.match(/^[ \t]*/)[0]}`);
  } else if (suggestion && event.altKey && ["ArrowDown", "ArrowUp"].includes(event.key)) {
    event.preventDefault();
    lookAtNext(event.key === "ArrowDown" ? 1 : -1);
  }
});
code.addEventListener("input", () => (suggestion ? drop() : draw()));
code.addEventListener("mousedown", (event) => {
  if (!suggestion?.text) return;
  event.preventDefault(); // the text below is not where it is drawn: this click only drops
  drop();
});
document.addEventListener("selectionchange", () => {
  const { at } = suggestion ?? {};
  if (suggestion && (code.selectionStart !== at || code.selectionEnd !== at)) drop();
});
view.addEventListener("mouseover", ({ target }) => {
  if (target.classList.contains("token")) showCard(target);
});
view.addEventListener("mouseout", hideCard);
view.addEventListener("mousedown", (event) => event.preventDefault()); // the cursor stays
view.addEventListener("click", accept);
$("ask").addEventListener("click", () => { code.focus(); ask(); });
$("accept").addEventListener("click", accept);
$("drop").addEventListener("click", () => { drop(); code.focus(); });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  $("key").value = "";
  $("key-form").hidden = true;
  showError("");
  code.focus();
  showFacts();
});

code.setSelectionRange(code.value.length, code.value.length);
draw();
showFacts();
