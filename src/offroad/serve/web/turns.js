// How the turns of a conversation look: what the user said, answers with thoughts and calls, and what went wrong.

import { button, copyButton, count, el } from "./dom.js";
import { Writer } from "./markdown.js";

// A heading for those who go from turn to turn by ear.
const title = text => el("h2", { class: "unseen" }, text);

// A turn of the user; `onedit` is called with the new text, where it may be changed.
export function userTurn(text, label, onedit = null) {
  const body = el("div", { class: "said" }, text);
  const actions = el("div", { class: "actions" });
  const node = el("article", { class: "turn user", "aria-label": label }, title(label), body, actions);
  actions.append(copyButton(() => text, "the message"));
  if (onedit) actions.prepend(editButton(text, body, actions, onedit));
  else node.prepend(el("p", { class: "facts" }, label));
  return node;
}

function editButton(text, body, actions, onedit) {
  const edit = button("Edit", () => {
    const area = el("textarea", { "aria-label": "Edit the message", rows: Math.min(12, text.split("\n").length + 1) });
    area.value = text;
    const close = () => {
      form.replaceWith(body);
      actions.hidden = false;
      edit.focus();
    };
    const save = event => {
      event.preventDefault();
      if (area.value.trim()) onedit(area.value.trim());
    };
    const form = el(
      "form",
      { class: "edit", onsubmit: save },
      area,
      el("div", { class: "actions" }, el("button", {}, "Send again"), button("Cancel", close)),
    );
    area.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    body.replaceWith(form);
    actions.hidden = true;
    area.focus();
  });
  return edit;
}

// One call of a tool, whose arguments grow.
class CallView {
  constructor(id, name) {
    this.id = id;
    this.name = name;
    this.code = el("code");
    this.node = el(
      "div",
      { class: "call", role: "group", "aria-label": `Call of ${name}` },
      el(
        "div",
        { class: "code-head" },
        el("span", {}, `calls ${name}`),
        copyButton(() => this.code.textContent, "the arguments"),
      ),
      el("pre", { tabindex: 0, role: "group", "aria-label": "Arguments" }, this.code),
    );
  }

  show(text) {
    this.code.textContent = pretty(text);
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch (error) {
    return text; // it is not complete yet, or no JSON
  }
}

// An answer that grows.
export class AnswerTurn {
  constructor(onretry) {
    this.thoughts = el("div", { class: "said" });
    this.title = el("summary", {}, "Thoughts");
    this.folded = el("details", { class: "thoughts", hidden: true }, this.title, this.thoughts);
    this.content = el("div", { class: "said markdown" });
    this.calls = [];
    this.callList = el("div", { class: "calls" });
    this.facts = el("p", { class: "facts" });
    this.problem = el("div", { class: "problem", role: "alert", hidden: true });
    this.writer = new Writer(this.content);
    this.actions = el(
      "div",
      { class: "actions", hidden: true },
      copyButton(() => this.writer.text, "the answer"),
      button("Retry", onretry, { class: "retry" }),
    );
    this.node = el(
      "article",
      { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" },
      title("Answer"),
      this.folded,
      this.content,
      this.callList,
      this.facts,
      this.problem,
      this.actions,
    );
  }

  update({ reasoning, content, calls }, thinking) {
    if (reasoning) {
      const text = this.thoughts.firstChild ?? this.thoughts.appendChild(document.createTextNode(""));
      text.appendData(reasoning.slice(text.length));
      this.folded.hidden = false;
      this.title.textContent = thinking ? "Thinking…" : "Thoughts";
    }
    this.writer.update(content);
    calls.forEach((call, i) => {
      this.calls[i] ??= new CallView(call.id, call.name);
      if (!this.calls[i].node.isConnected) this.callList.append(this.calls[i].node);
      this.calls[i].show(call.arguments);
    });
  }

  finish(facts) {
    this.node.setAttribute("aria-busy", "false");
    this.title.textContent = "Thoughts";
    this.facts.textContent = facts;
    this.actions.hidden = false;
  }

  // Asks for what the called functions give; `onresults` is called with a text for each.
  askResults(onresults) {
    const areas = this.calls.map(call =>
      el("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }),
    );
    const form = el(
      "form",
      {
        class: "edit",
        onsubmit: event => {
          event.preventDefault();
          form.remove();
          onresults(areas.map(area => area.value));
        },
      },
      ...areas,
      el("div", { class: "actions" }, el("button", {}, areas.length === 1 ? "Send the result" : "Send the results")),
    );
    this.callList.append(form);
    areas[0].focus();
  }

  fail(error, buttons) {
    this.problem.hidden = false;
    this.problem.replaceChildren(
      el("strong", {}, error.message),
      el("p", {}, error.detail ?? ""),
      el("div", { class: "actions" }, ...buttons),
    );
  }
}

// A line on an answer: tokens, speed, where the prompt came from, drafts, and why it ended.
export function facts(timings, finish) {
  const parts = [];
  if (timings) {
    const { predicted_n, predicted_per_second, prompt_ms, prompt_n, cached_n, draft_n, draft_n_accepted } = timings;
    parts.push(count(predicted_n, "token"));
    if (predicted_per_second) parts.push(`${predicted_per_second.toFixed(1)} tokens/s`);
    parts.push(`first after ${prompt_ms < 1000 ? `${prompt_ms.toFixed(0)} ms` : `${(prompt_ms / 1000).toFixed(1)} s`}`);
    parts.push(`prompt ${prompt_n} run + ${cached_n} cached`);
    if (draft_n) parts.push(`${draft_n_accepted} of ${draft_n} drafts accepted`);
  }
  if (finish === "length") parts.push("cut at the limit of tokens");
  return parts.join(" · ");
}
