"use strict";

const SAMPLING = [ // name in a request, label, step, least, most
  ["temperature", "Temperature", 0.05, 0, 5],
  ["top_k", "Top k", 1, -1, 1000],
  ["top_p", "Top p", 0.05, 0, 1],
  ["min_p", "Min p", 0.01, 0, 1],
  ["repeat_penalty", "Repeat penalty", 0.05, 0.05, 5],
  ["presence_penalty", "Presence penalty", 0.1, -5, 5],
  ["frequency_penalty", "Frequency penalty", 0.1, -5, 5],
  ["max_tokens", "Most tokens", 1, -1, 1000000],
  ["seed", "Seed", 1, -1, 4294967294],
];

const $ = (id) => document.getElementById(id);
const [messagesBox, input, scroller, dialog] = ["messages", "input", "scroller", "settings"].map($);

// Storage may be switched off: the page then forgets, and works.
function stored(area, name, value) {
  try {
    if (value === undefined) return JSON.parse(window[area].getItem(`lfmfast.${name}`));
    window[area].setItem(`lfmfast.${name}`, JSON.stringify(value));
  } catch { /* nothing to do */ }
  return null;
}

const settings = {system: "", theme: "", sampling: {}, ...stored("localStorage", "settings")};
const messages = []; // {role, content, thoughts, calls, note, facts, failure, view}
let running = null; // {controller, message} while an answer comes
let nCtx = 0;
let defaults = {};

// -- the server -------------------------------------------------------------------------------------------------------

function showState(state, text) {
  $("state").dataset.state = state;
  setText($("state"), text);
}

// Ask for the model until it is there: it may still be loading, and the server may start again.
let retry = 0;
async function connect() {
  clearTimeout(retry);
  try {
    const props = await (await ask("props")).json();
    const generation = props.default_generation_settings || {};
    defaults = {...generation, ...generation.params};
    defaults.max_tokens ??= defaults.n_predict;
    nCtx = generation.n_ctx || 0;
    const file = (props.model_path || "").split(/[\\/]/).at(-1).replace(/\.gguf$/i, "");
    $("model").textContent = props.model_alias || file || "lfmfast";
    document.title = `${$("model").textContent} · lfmfast`;
    for (const [name] of SAMPLING) {
      const value = defaults[name];
      const isOpen = (name === "seed" || name === "max_tokens") && (value < 0 || value >= 4294967295);
      $(`s-${name}`).placeholder = value === undefined || value === null ? "" : isOpen ? (name === "seed" ? "random" : "no limit")
        : String(Math.round(value * 1e4) / 1e4);
    }
    showState("ready", "ready");
    showContext();
  } catch (error) {
    if (error.status === 401) {
      showState("bad", "needs an API key");
      return;
    }
    showState(error.status === 503 ? "wait" : "bad", error.status === 503 ? "loading the model" : "not reachable");
    retry = setTimeout(connect, 1000);
  }
}

function requestBody() {
  // Which past thoughts the model sees is for its template to say.
  const history = messages.filter((one) => one.role === "user" || one.content)
    .map(({role, content, thoughts}) => ({role, content, ...(thoughts && {reasoning_content: thoughts})}));
  if (settings.system.trim()) history.unshift({role: "system", content: settings.system});
  const body = {
    messages: history, stream: true, stream_options: {include_usage: true}, timings_per_token: true, return_progress: true,
    ...settings.sampling,
  };
  if (history.at(-1).role === "assistant") body.continue_final_message = true;
  return body;
}

// -- an answer --------------------------------------------------------------------------------------------------------

async function answer(message) {
  const controller = new AbortController();
  running = {controller, message};
  Object.assign(message, {isOpen: true, note: "", failure: "", facts: {}, progress: ""});
  const body = requestBody();
  const began = performance.now();
  const before = message.content.length;
  let finish = null;
  let isWhole = false;
  setRunning(true);
  say("Answering.");
  draw(message);
  try {
    const response = await ask("v1/chat/completions", {method: "POST", body: JSON.stringify(body), signal: controller.signal});
    for await (const event of events(response)) {
      if (event === null) {
        isWhole = true;
        continue;
      }
      if (event.error) throw new ServerError(event.error.code, event.error.message || "The server reports an error.");
      const {facts} = message;
      const progress = event.prompt_progress;
      if (progress?.total > progress?.processed) {
        message.progress = `Reading the prompt, ${Math.floor((100 * progress.processed) / progress.total)} %`;
      }
      if (event.timings) facts.timings = event.timings;
      if (event.usage) facts.usage = event.usage;
      const choice = event.choices?.[0];
      const {content, reasoning_content: thought, tool_calls: calls = []} = choice?.delta || {};
      if (thought && !message.thoughts) say("Thinking.");
      if (thought) message.thoughts += thought;
      if (content) message.content += content;
      for (const {index, function: {name = "", arguments: piece = ""}} of calls) {
        message.calls[index] = {name: name || message.calls[index].name, text: (message.calls[index]?.text || "") + piece};
      }
      if (content || thought || calls.length) facts.firstMs ??= performance.now() - began;
      finish = choice?.finish_reason || finish;
      drawSoon(message);
    }
    if (!finish && !isWhole) throw new ServerError(0, "The connection ended before the answer did.");
    if (finish === "length") message.note = "Cut off at the token limit";
  } catch (error) {
    if (controller.signal.aborted) message.note = "Stopped";
    else message.failure = error.message || String(error);
    if (error.status === 401) askForKey();
    if (error.status === 0 || error.status === 503) connect();
  }
  running = null;
  message.isOpen = false;
  setRunning(false);
  if (!messages.includes(message)) return; // a new chat has begun
  draw(message);
  drawLast();
  remember();
  showContext(message.facts.usage);
  say(message.failure ? `Error: ${message.failure}` : `${message.note}. ${spoken(message, before)}`);
}

// What a screen reader says of an answer: its text without the marks.
function spoken(message, from) {
  const whole = message.view.text.innerText.trim();
  return from ? message.content.slice(from) : whole;
}

function say(text) {
  $("said").textContent = text.replace(/^\. /, "");
}

function setRunning(isRunning) {
  const hadFocus = document.activeElement === (isRunning ? $("send") : $("stop"));
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  messagesBox.setAttribute("aria-busy", String(isRunning));
  if (hadFocus) input.focus();
  fitInput();
}

function send(text) {
  if (running || !text.trim()) return;
  add({role: "user", content: text});
  const reply = add({role: "assistant", content: ""});
  remember();
  toEnd();
  answer(reply);
}

const stop = () => running?.controller.abort();

// -- drawing ----------------------------------------------------------------------------------------------------------

function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

function button(text, action, label = "") {
  const node = make("button", "", text);
  node.type = "button";
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", action);
  return node;
}

function add(values) {
  const message = {thoughts: "", calls: [], note: "", failure: "", facts: {}, progress: "", ...values};
  const box = make("li", `message ${message.role}`);
  const body = make("div", message.role === "user" ? "body" : "body markdown-box");
  box.append(make("h2", "unseen", message.role === "user" ? "You" : "Answer"), body);
  message.view = {box, body, tools: make("div", "tools")};
  if (message.role === "user") {
    body.textContent = message.content;
    body.dir = "auto";
  } else {
    const thoughts = make("details", "thoughts");
    thoughts.append(make("summary", "", "Thoughts"), make("div", "markdown"));
    message.view.thoughts = thoughts;
    message.view.wait = make("p", "wait");
    message.view.text = make("div", "markdown");
    message.view.text.dir = "auto";
    message.view.failure = make("div", "failure");
    body.append(thoughts, message.view.wait, message.view.text, message.view.failure);
  }
  box.append(message.view.tools);
  messages.push(message);
  messagesBox.append(box);
  $("empty").hidden = true;
  draw(message);
  return message;
}

// Models that think aloud write <think>...</think> first.
function parts(message) {
  const match = message.thoughts ? null : /^\s*<think>([^]*?)(?:<\/think>([^]*)|$)/.exec(message.content);
  return match ? [match[1], match[2] || ""] : [message.thoughts, message.content];
}

// What is unchanged is left alone: a screen reader would say it again.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A call of a function as a code block, whatever is in it.
function fenced(text) {
  const fence = "`".repeat(Math.max(2, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length)) + 1);
  return `\n\n${fence}call\n${text}\n${fence}\n`;
}

function draw(message) {
  if (message.role === "user") {
    message.view.tools.replaceChildren(
      button("Copy", (event) => copy(message.content, event.target), "Copy your message"), button("Edit", () => edit(message), "Edit your message"));
    return;
  }
  const isAtEnd = atEnd();
  const {view} = message;
  const [thoughts, said] = parts(message);
  const text = said + message.calls.map(({name, text: values}) => fenced(`${name}(${values})`)).join("");
  const isWaiting = message.isOpen && !text.trim();
  view.thoughts.hidden = !thoughts.trim();
  view.thoughts.classList.toggle("wait", isWaiting);
  if (thoughts.trim()) showMarkdown(view.thoughts.lastElementChild, thoughts.trim());
  setText(view.thoughts.firstElementChild, isWaiting ? "Thinking" : "Thoughts");
  showMarkdown(view.text, text);
  view.wait.hidden = !isWaiting || !view.thoughts.hidden;
  setText(view.wait, message.progress || "Waiting for the first token");
  view.failure.hidden = !message.failure;
  view.failure.replaceChildren(...(message.failure ? [make("p", "", message.failure), button("Try again", () => again(message))] : []));
  drawTools(message);
  if (isAtEnd) toEnd();
}

function drawTools(message) {
  const {view, facts} = message;
  const texts = [];
  const {timings, usage, firstMs} = facts;
  if (message.note) texts.push(message.note);
  if (timings?.predicted_n) texts.push(count(timings.predicted_n, "token"));
  if (timings?.predicted_per_second && timings.predicted_n > 1) texts.push(`${round(timings.predicted_per_second)} tokens/s`);
  if (firstMs && !message.isOpen) texts.push(`first after ${round(firstMs / 1000)} s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached && !message.isOpen) texts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  const shown = make("span", "facts", texts.join(" · "));
  if (message.isOpen) {
    view.tools.replaceChildren(shown);
    return;
  }
  const isLast = messages.at(-1) === message;
  const tools = [button("Copy", (event) => copy(parts(message)[1].trim(), event.target), "Copy the answer")];
  if (isLast) tools.push(button("Regenerate", () => again(message)));
  if (isLast && message.note && message.content) tools.push(button("Continue", () => answer(message)));
  view.tools.replaceChildren(...(message.content || message.thoughts || message.calls.length || !message.failure ? tools : []), shown);
}

// Earlier answers lose the buttons that only the last one has.
function drawLast() {
  for (const message of messages.slice(-3)) if (message.role === "assistant" && !message.isOpen) drawTools(message);
}

let isDue = false;
function drawSoon(message) {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (message.isOpen) draw(message);
  });
}

const round = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));
const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function showContext(usage) {
  const used = usage ? `${usage.total_tokens} of ` : "";
  $("context").textContent = nCtx ? `${used}${nCtx} tokens of context${used && " used"}` : "";
}

const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

// -- what buttons do --------------------------------------------------------------------------------------------------

function again(message) {
  if (running) return;
  Object.assign(message, {content: "", thoughts: "", calls: []});
  input.focus({preventScroll: true});
  answer(message);
}

function cutFrom(message) {
  for (const one of messages.splice(messages.indexOf(message))) one.view.box.remove();
  $("empty").hidden = messages.length > 0;
  drawLast();
  remember();
}

function edit(message) {
  stop();
  cutFrom(message);
  input.value = message.content;
  fitInput();
  input.focus();
}

async function copy(text, from) {
  let isDone = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not allowed, or no HTTPS
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    isDone = document.execCommand("copy");
    area.remove();
    from.focus();
  }
  const old = from.dataset.text || (from.dataset.text = from.textContent);
  from.textContent = isDone ? "Copied" : "Can't copy";
  say(from.textContent);
  setTimeout(() => Object.assign(from, {textContent: old}), 1500);
}

function remember() {
  stored("sessionStorage", "messages", messages.map(({role, content, thoughts, calls, note, facts, failure}) =>
    ({role, content, thoughts, calls, note, facts, failure})));
}

function askForKey() {
  if (!dialog.open) dialog.showModal();
  $("key").focus();
}

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  $("send").disabled = !input.value.trim();
}

// -- settings ---------------------------------------------------------------------------------------------------------

function buildSampling() {
  for (const [name, title, step, least, most] of SAMPLING) {
    const label = make("label", "", title);
    const field = make("input");
    const problem = make("span", "invalid");
    Object.assign(field, {id: `s-${name}`, type: "number", step: Number.isInteger(step) ? step : "any", min: least, max: most});
    field.inputMode = least < 0 ? "text" : Number.isInteger(step) ? "numeric" : "decimal";
    field.setAttribute("aria-describedby", "sampling-hint");
    field.value = settings.sampling[name] ?? "";
    problem.setAttribute("role", "alert");
    field.addEventListener("input", () => {
      problem.textContent = field.validationMessage;
      if (field.value && field.validity.valid) settings.sampling[name] = Number(field.value);
      else delete settings.sampling[name];
      stored("localStorage", "settings", settings);
    });
    label.append(field, problem);
    $("sampling").append(label);
  }
}

const applyTheme = () => Object.assign(document.documentElement.dataset, {theme: settings.theme});

for (const name of ["system", "theme"]) {
  $(name).value = settings[name];
  $(name).addEventListener("input", () => {
    settings[name] = $(name).value;
    stored("localStorage", "settings", settings);
    applyTheme();
  });
}
$("key").value = stored("sessionStorage", "key") || "";
$("key").addEventListener("change", () => {
  stored("sessionStorage", "key", $("key").value);
  connect();
});
$("reset").addEventListener("click", () => {
  for (const [name] of SAMPLING) {
    $(`s-${name}`).value = "";
    $(`s-${name}`).dispatchEvent(new Event("input"));
  }
});
$("open-settings").addEventListener("click", () => dialog.showModal());
dialog.addEventListener("click", (event) => { // the backdrop belongs to the dialog; so do clicks beside it
  const edge = dialog.getBoundingClientRect();
  if (event.target === dialog && event.clientX < edge.left) dialog.close();
});
dialog.addEventListener("keydown", (event) => { // Enter in a field must not close it unseen
  if (event.key === "Enter" && event.target.localName === "input") event.preventDefault();
});

// -- keys and clicks --------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const text = input.value;
  if (!text.trim()) return;
  input.value = "";
  fitInput();
  if (matchMedia("(pointer: fine)").matches) input.focus();
  send(text);
});
input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !dialog.open) {
    event.preventDefault();
    stop();
  }
});
$("new").addEventListener("click", () => {
  stop();
  if (messages.length) cutFrom(messages[0]);
  showContext();
  input.focus();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    input.focus();
    send(example.textContent);
  });
}
messagesBox.addEventListener("click", (event) => {
  const from = event.target.closest("button[data-copy]");
  if (from) copy(from.closest(".code").querySelector("pre").textContent, from);
});
scroller.addEventListener("scroll", () => {
  $("to-end").hidden = atEnd();
});
$("to-end").addEventListener("click", () => {
  toEnd();
  input.focus({preventScroll: true});
});

applyTheme();
buildSampling();
for (const message of stored("sessionStorage", "messages") || []) add(message);
drawLast();
toEnd();
fitInput();
connect();
