// The conversation: what is sent, the answer as it streams, stop, retry and edit.

import { Problem, stream } from "./api.js";
import { $, button, duration, say } from "./dom.js";
import { fields, openSettings, settings } from "./settings.js";
import { AnswerTurn, facts, userTurn } from "./turns.js";

const SPOKEN_AT_MOST = 1000; // characters
const IDLE_SHARE = 3; // of the time that drawing takes
// Turns in order: { role: "user" | "tool", message, node } and { role: "assistant", message, view, node }.
const turns = [];
let running = null,
  follow = true;

// The messages to send. A turn of the user that got no answer is left out, since templates want turns to alternate.
function messages() {
  const said = turns.filter(turn => turn.message);
  const sent = said.filter((turn, i) => turn.role !== "user" || said[i + 1]?.role !== "user");
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return [...system, ...sent.map(turn => turn.message)];
}

function add(turn) {
  turns.push(turn);
  $("empty").hidden = true;
  $("log").append(turn.node);
}

// Removes the turns from `turn` on.
function cut(turn) {
  for (const { node } of turns.splice(turns.indexOf(turn))) node?.remove();
}

// Shows the end of the conversation, unless the reader has gone up in it.
export function showEnd() {
  if (follow) $("log").scrollTop = $("log").scrollHeight;
}

function ask(text) {
  const turn = { role: "user", message: { role: "user", content: text } };
  turn.node = userTurn(text, "You", changed => {
    stop();
    cut(turn);
    ask(changed);
    $("text").focus();
  });
  add(turn);
  answer();
}

export function stop() {
  running?.abort();
  busy(null);
}

function busy(control) {
  running = control;
  $("send").textContent = control ? "Stop" : "Send";
}

// What has come of an answer.
function take(said, chunk) {
  said.timings = chunk.timings ?? said.timings;
  for (const { delta, finish_reason: finish } of chunk.choices) {
    said.reasoning += delta.reasoning_content ?? "";
    said.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) {
      said.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" };
      said.calls[call.index].arguments += call.function.arguments ?? "";
    }
    said.finish = finish ?? said.finish;
  }
}

function messageOf({ reasoning, content, calls }) {
  if (!reasoning && !content && !calls.length) return null;
  const message = { role: "assistant", content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls.length) {
    message.tool_calls = calls.map(call => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

// Draws what has come, at most once a frame; what takes long to draw is drawn so rarely that the page stays free.
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.timer = this.frame = this.after = 0;
    this.waits = false;
  }

  soon() {
    if (this.waits) return;
    this.waits = true;
    const onframe = () => {
      this.frame = requestAnimationFrame(() => this.now());
    };
    this.timer = setTimeout(onframe, Math.max(0, this.after - performance.now()));
  }

  now() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.waits = false;
    const began = performance.now();
    this.draw();
    this.after = performance.now() + IDLE_SHARE * (performance.now() - began);
  }
}

async function answer() {
  const control = new AbortController(),
    began = performance.now();
  const said = { reasoning: "", content: "", calls: [], finish: null, timings: null };
  const turn = { role: "assistant", message: null };
  turn.view = new AnswerTurn(() => retry(turn));
  turn.node = turn.view.node;
  const body = { messages: messages(), stream: true, stream_options: { include_usage: true }, ...fields() };
  add(turn);
  busy(control);
  follow = true;
  showEnd();
  const drawing = new Drawing(() => {
    turn.view.update(said, !said.content && !said.calls.length);
    if (said.reasoning || said.content || said.calls.length) turn.view.facts.textContent = "";
    showEnd();
  });
  const waiting = setInterval(() => {
    if (!said.reasoning && !said.content)
      turn.view.facts.textContent = `reading the prompt, ${duration((performance.now() - began) / 1000)}`;
  }, 500);
  let error = null;
  try {
    for await (const chunk of stream("v1/chat/completions", body, control.signal)) {
      take(said, chunk);
      drawing.soon();
    }
  } catch (caught) {
    error = caught;
  }
  clearInterval(waiting);
  drawing.now();
  finish(turn, said, error);
  if (running === control) busy(null);
  showEnd();
}

function finish(turn, said, error) {
  turn.message = messageOf(said);
  const stopped = error?.name === "AbortError";
  turn.view.finish(stopped ? "stopped" : facts(said.timings, said.finish));
  if (error && !stopped) fail(turn, error);
  else say(stopped ? "Stopped." : spoken(said));
  if (!error && said.finish === "tool_calls") turn.view.askResults(texts => giveResults(said.calls, texts));
}

function spoken({ content, calls }) {
  const text =
    content.length > SPOKEN_AT_MOST
      ? `${content.slice(0, SPOKEN_AT_MOST)} … The whole answer is in the conversation.`
      : content;
  return [text, ...calls.map(call => `Calls ${call.name}.`)].join(" ").trim() || "The answer is empty.";
}

function giveResults(calls, texts) {
  calls.forEach((call, i) => {
    const node = userTurn(texts[i], `Result of ${call.name}`);
    add({ role: "tool", message: { role: "tool", tool_call_id: call.id, content: texts[i] }, node });
  });
  $("text").focus();
  answer();
}

function fail(turn, error) {
  const known =
    error instanceof Problem ? error : new Problem("The page has made an error.", { detail: String(error) });
  const again = button("Retry", () => retry(turn));
  const key = known.status === 401 ? [button("Enter a key", () => openSettings("key", () => retry(turn)))] : [];
  const wait = known.again ? ` It may work again in ${known.again} s.` : "";
  turn.view.fail({ message: known.message, detail: known.detail + wait }, [...key, again]);
}

// Asks again for the answer of a turn; what came after it goes.
function retry(turn) {
  if (!turns.includes(turn)) return;
  stop();
  cut(turn);
  answer();
  $("text").focus();
}

function grow() {
  const area = $("text");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

export function startChat() {
  $("composer").addEventListener("submit", event => {
    event.preventDefault();
    if (running) {
      stop();
      return;
    }
    const text = $("text").value.trim();
    if (!text) return;
    $("text").value = "";
    grow();
    ask(text);
  });
  $("log").addEventListener("scroll", () => {
    const log = $("log");
    if (log.clientHeight) follow = log.scrollHeight - log.scrollTop - log.clientHeight < 100;
  });
  $("text").addEventListener("input", grow);
  $("text").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) $("composer").requestSubmit();
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && running && !$("chat").hidden && !$("settings").open) stop();
  });
  $("clear").addEventListener("click", () => {
    stop();
    if (turns.length) cut(turns[0]);
    $("empty").hidden = false;
    $("text").focus();
  });
}
