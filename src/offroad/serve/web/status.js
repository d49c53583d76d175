// The Status tab: what the server does now, how memory is divided, and the plan. Nodes stay and their texts change, so
// that neither the focus nor what is unfolded is lost while it is looked at each second.

import { getJson } from "./api.js";
import { $, bytes, count, duration, el } from "./dom.js";

// Parts of the bars: key, label, tone. What is free is grey.
const MEMORY = [
  ["weights", "Weights", 0],
  ["kv", "KV cache", 1],
  ["states", "Recurrent states", 2],
  ["graphs", "Graphs", 3],
  ["workspace", "Workspace", 4],
  ["tables", "Tables", 5],
  ["headroom", "Left over", 6],
];
const BLOCKS = [
  ["used", "Used", 0],
  ["cached", "Cached", 1],
  ["free", "Free", 6],
];
const CACHED =
  "Cached blocks hold prefixes that later prompts may begin with; they are given up when space is needed.";
const rate = value => value.toFixed(value < 100 ? 1 : 0);
const share = value => (value === null ? "none yet" : `${(100 * value).toFixed(1)}%`);

// A bar of parts, with a legend that says the same in words.
class Bar {
  constructor(name, parts) {
    this.parts = parts.map(([key, label, tone]) => {
      const value = el("dd"),
        piece = el("span", { class: `piece tone${tone}` });
      return { key, label, value, piece, entry: el("div", {}, el("dt", { class: `tone${tone}` }, label), value) };
    });
    this.name = name;
    this.bar = el("div", { class: "bar", role: "img" }, ...this.parts.map(part => part.piece));
    this.node = el("div", {}, this.bar, el("dl", { class: "legend" }, ...this.parts.map(part => part.entry)));
  }

  // `values` by key; `write` makes a text of one.
  show(values, write) {
    const sum = this.parts.reduce((total, { key }) => total + Math.max(0, values[key]), 0) || 1;
    for (const { key, value, piece, entry } of this.parts) {
      const part = Math.max(0, values[key]) / sum;
      piece.style.flexGrow = part;
      piece.hidden = part === 0;
      entry.hidden = values[key] === 0;
      value.textContent = `${write(values[key])} (${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%)`;
    }
    const told = this.parts.filter(part => values[part.key]).map(part => `${part.label} ${write(values[part.key])}`);
    this.bar.setAttribute("aria-label", `${this.name}: ${told.join(", ") || "nothing"}`);
  }
}

// Names and values; `show` sets the values of those that are there and adds the others.
class Facts {
  constructor(className = "facts-list") {
    this.node = el("dl", { class: className });
    this.values = new Map();
  }

  show(entries) {
    for (const [name, text] of Object.entries(entries)) {
      if (!this.values.has(name)) {
        const value = el("dd");
        this.values.set(name, value);
        this.node.append(el("div", {}, el("dt", {}, name), value));
      }
      const value = this.values.get(name);
      if (value.textContent !== text) value.textContent = text;
    }
  }
}

const section = (title, ...nodes) => el("section", {}, el("h2", {}, title), ...nodes);

class View {
  constructor() {
    this.problem = el("p", { class: "problem", hidden: true });
    this.server = new Facts();
    this.rates = new Facts("tiles");
    this.memory = new Bar("Memory", MEMORY);
    this.memoryNote = el("p", { class: "facts" });
    this.blocks = new Bar("KV blocks", BLOCKS);
    this.blocksNote = el("p", { class: "facts" });
    this.requestsNote = el("p", { class: "facts" });
    this.rows = el("tbody");
    const names = ["Request", "State", "Age", "Prompt", "Cached", "Generated"];
    const head = el("thead", {}, el("tr", {}, ...names.map(name => el("th", { scope: "col" }, name))));
    this.table = el(
      "div",
      { class: "wide", tabindex: 0, role: "group", "aria-label": "Requests" },
      el("table", {}, head, this.rows),
    );
    this.plan = el("div", { id: "plan" }, el("p", {}, "There is a plan once the engine is loaded."));
    const raw = ["status", "plan", "metrics"].map(name => el("a", { href: name }, `/${name}`));
    $("status").replaceChildren(
      this.problem,
      section("Server", this.server.node),
      section("Now", this.rates.node),
      section("Requests", this.requestsNote, this.table),
      section("KV cache", this.blocks.node, this.blocksNote),
      section("Memory as planned", this.memory.node, this.memoryNote),
      section("Plan", this.plan),
      el("p", { class: "raw" }, "As data: ", ...raw.flatMap(link => [link, " "])),
    );
  }

  show(status) {
    this.#showServer(status);
    this.#showRates(status);
    this.#showRequests(status.requests);
    const { kv_blocks: blocks, memory } = status;
    this.blocks.show(blocks, value => count(value, "block"));
    this.blocksNote.textContent = blocks.tokens_per_block
      ? `${count(blocks.total, "block")} of ${blocks.tokens_per_block} tokens. ${CACHED}`
      : "";
    this.memory.node.hidden = memory === null;
    if (memory === null) return;
    this.memory.show(Object.fromEntries(MEMORY.map(([key]) => [key, memory[`${key}_bytes`]])), bytes);
    const [budget, total] = [bytes(memory.budget_bytes), bytes(memory.total_bytes)];
    this.memoryNote.textContent = `${budget} may be used of the device's ${total}.`;
  }

  #showServer({ state, reason, loading, version, models, uptime_seconds: uptime, engine }) {
    const loaded = loading ? ` (${loading.phase}, ${Math.round(100 * loading.fraction)}%)` : "";
    const entries = {
      State: state + loaded + (reason ? `: ${reason}` : ""),
      Model: models.join(", "),
      Version: version,
      Uptime: duration(uptime),
    };
    if (engine.device !== null) {
      entries.Device = `${engine.device}, ${engine.dtype}`;
      entries.Context = count(engine.max_model_len, "token");
      entries.Sequences = `up to ${engine.max_num_seqs} at a time`;
    }
    entries["Engine restarts"] = String(engine.restarts);
    this.server.show(entries);
  }

  #showRates({ rates, totals }) {
    this.rates.show({
      "Decode, tokens/s": rate(rates.decode_tokens_per_second),
      "Prefill, tokens/s": rate(rates.prefill_tokens_per_second),
      "Prompt from cache": share(rates.prefix_cache_hit_rate),
      "Drafts accepted": share(rates.draft_acceptance),
      "Generated in all": totals.generated_tokens.toLocaleString("en"),
    });
  }

  #showRequests({ running_sequences: running, waiting_sequences: waiting, sequences, unlisted }) {
    const more = unlisted ? `; ${unlisted} more are not listed` : "";
    this.requestsNote.textContent = `${running} running, ${waiting} waiting${more}.`;
    this.table.hidden = !sequences.length;
    this.rows.replaceChildren(
      ...sequences.map(entry => {
        const state =
          entry.state === "prefill"
            ? `prefill ${Math.floor((100 * entry.computed_tokens) / entry.prompt_tokens)}%`
            : entry.state;
        const texts = [
          state,
          duration(entry.age_seconds),
          entry.prompt_tokens,
          entry.cached_tokens,
          entry.generated_tokens,
        ];
        const name = entry.index ? `${entry.id} (${entry.index})` : entry.id;
        return el("tr", {}, el("th", { scope: "row" }, name), ...texts.map(text => el("td", {}, String(text))));
      }),
    );
  }
}

let view = null,
  planned = null;

export function showStatus(status, problem) {
  view ??= new View();
  view.problem.hidden = problem === null;
  if (problem) view.problem.textContent = `${problem.message} ${problem.detail ?? ""} What follows is from before.`;
  if (status) view.show(status);
}

// { state, text } for the line in the page's head.
export function stateLine(status, problem) {
  if (problem) return { state: problem.status === 401 ? "key" : "failed", text: problem.message };
  const [model] = status.models,
    { loading } = status;
  switch (status.state) {
    case "ready":
      return { state: "ready", text: model };
    case "loading":
      return {
        state: "loading",
        text: `${model}: loading${loading ? `, ${loading.phase} ${Math.round(100 * loading.fraction)}%` : ""}`,
      };
    case "draining":
      return { state: "draining", text: `${model}: shutting down` };
    default:
      return { state: "failed", text: `${model}: the engine has ended` };
  }
}

// Shows the plan once; again if the engine has another one.
export async function showPlan(fingerprint) {
  if (planned === fingerprint) return;
  try {
    const plan = await getJson("plan");
    planned = fingerprint;
    view.plan.replaceChildren(...planNodes(plan));
  } catch (error) {
    view.plan.replaceChildren(el("p", { class: "problem" }, `${error.message} ${error.detail ?? ""}`));
  }
}

function planNodes(plan) {
  const facts = new Facts();
  facts.show(planFacts(plan));
  const groups = new Map();
  for (const cell of plan.cells ?? []) {
    const title = /^\d/.test(cell.layers) ? `Layers ${cell.layers}` : `Outside layers (${cell.layers})`;
    groups.set(title, [...(groups.get(title) ?? []), cell]);
  }
  const notes = plan.notes?.length
    ? [el("h3", {}, "Notes"), el("ul", {}, ...plan.notes.map(note => el("li", {}, note)))]
    : [];
  const cells = [...groups].flatMap(([title, group]) => [el("h3", {}, title), ...group.map(cellNode)]);
  return [facts.node, ...notes, ...cells];
}

function planFacts(plan) {
  const { bound_tokens_per_second: bound, graphs, memory } = plan;
  const entries = {
    Family: plan.family,
    Types: `${plan.dtype}, KV cache ${plan.kv_dtype}`,
    Step: `up to ${count(plan.chunk ?? 0, "token")}, ${plan.depth} in flight`,
    "A token takes": memory ? `${bytes(plan.kv_bytes_per_token)} of KV cache` : undefined,
    Drafts: plan.k ? `up to ${plan.k} a step` : "none",
    Graphs: graphs
      ? graphs.rows?.length
        ? `steps of up to ${graphs.rows.at(-1)} rows`
        : `none: ${graphs.reason}`
      : undefined,
    "At best": bound
      ? `${rate(bound.decode)} tokens/s for one sequence, ${rate(bound.decode_all)} for ${plan.max_num_seqs}`
      : undefined,
    Fingerprint: plan.fingerprint,
  };
  return Object.fromEntries(Object.entries(entries).filter(([, text]) => text !== undefined));
}

// One row of the plan; why, and what was refused, unfolds.
function cellNode({ op, phase, kernel, layout, reason, sizes, refused }) {
  const refusals = Object.entries(refused);
  const head = el(
    "summary",
    {},
    el("span", { class: "op" }, `${op}.${phase}`),
    " ",
    el("code", {}, kernel ?? "no kernel"),
    layout ? ` ${layout}` : "",
    refusals.length ? el("span", { class: "facts" }, ` ${refusals.length} refused`) : "",
  );
  const shape = Object.entries(sizes)
    .map(([name, value]) => `${name} ${value}`)
    .join(", ");
  return el(
    "details",
    { class: "cell" },
    head,
    el("p", {}, reason),
    shape ? el("p", { class: "facts" }, shape) : null,
    refusals.length
      ? el("ul", {}, ...refusals.map(([name, why]) => el("li", {}, el("code", {}, name), `: ${why}`)))
      : null,
  );
}
