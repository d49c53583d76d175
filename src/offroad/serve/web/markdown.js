// A small part of Markdown as DOM nodes: paragraphs, headings, code, bold, italics, lists, quotes, tables, rules.
// Every piece of text becomes a text node. Links and images stay text, so an answer can make the browser load nothing.

import { copyButton, el } from "./dom.js";

const FENCE = /^(\s*)(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^\s*([-*_])(?:\s*\1){2,}\s*$/;
const DASHES = /^[\s|:-]+$/;
const DEEPEST = 6;

const blank = line => !line.trim();
const begins = line =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || line.startsWith(">");
const cells = line =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split("|")
    .map(cell => cell.trim());
const isTable = (line, next) =>
  line.includes("|") && next !== undefined && next.includes("-") && next.includes("|") && DASHES.test(next);

// The blocks of a text, in order: { kind, raw, ... }. Their raw parts together are the text.
export function blocks(text) {
  const lines = text.split("\n"),
    found = [];
  let i = 0;
  while (i < lines.length) {
    const from = i,
      block = read(lines, i);
    i = block.end;
    while (i < lines.length && blank(lines[i]) && block.kind !== "code") i++; // blank lines belong to the block above
    block.raw = lines.slice(from, i).join("\n") + (i < lines.length ? "\n" : "");
    found.push(block);
  }
  return found;
}

function read(lines, i) {
  const line = lines[i];
  let match;
  if ((match = FENCE.exec(line))) return readCode(lines, i, match);
  if ((match = HEADING.exec(line))) return { kind: "heading", level: match[1].length, text: match[2], end: i + 1 };
  if (RULE.test(line)) return { kind: "rule", end: i + 1 };
  if (ITEM.test(line)) return readList(lines, i);
  if (line.startsWith(">")) return readQuote(lines, i);
  if (isTable(line, lines[i + 1])) return readTable(lines, i);
  let end = i + 1;
  while (end < lines.length && !blank(lines[end]) && !begins(lines[end]) && !isTable(lines[end], lines[end + 1])) end++;
  return { kind: "paragraph", text: lines.slice(i, end).join("\n").trim(), end };
}

function readCode(lines, i, [, indent, fence, language]) {
  const body = [];
  for (let end = i + 1; end < lines.length; end++) {
    const bare = lines[end].trim();
    if (bare.length >= fence.length && bare === fence[0].repeat(bare.length))
      return { kind: "code", language, text: body.join("\n"), end: end + 1 };
    body.push(lines[end].startsWith(indent) ? lines[end].slice(indent.length) : lines[end].trimStart());
  }
  return { kind: "code", language, text: body.join("\n"), end: lines.length };
}

function readQuote(lines, i) {
  let end = i;
  while (end < lines.length && lines[end].startsWith(">")) end++;
  return {
    kind: "quote",
    text: lines
      .slice(i, end)
      .map(line => line.replace(/^> ?/, ""))
      .join("\n"),
    end,
  };
}

function readTable(lines, i) {
  const rows = [cells(lines[i])];
  let end = i + 2;
  for (; end < lines.length && lines[end].includes("|") && !blank(lines[end]); end++) rows.push(cells(lines[end]));
  return { kind: "table", rows, end };
}

// Items with their depth; a line that begins none belongs to the last one.
function readList(lines, i) {
  const items = [],
    indents = [];
  let end = i;
  for (; end < lines.length; end++) {
    const line = lines[end],
      match = ITEM.exec(line);
    if (match && !RULE.test(line)) {
      const indent = match[1].length;
      while (indents.length && indent < indents.at(-1)) indents.pop();
      if (!indents.length || indent >= indents.at(-1) + 2) indents.push(indent);
      const digits = parseInt(match[2], 10),
        number = Number.isNaN(digits) ? null : digits;
      if (indents.length === 1 && items.length && (number === null) !== (items[0].number === null)) break;
      items.push({ depth: indents.length - 1, number, text: match[3] });
    } else if (blank(line)) {
      const next = lines.slice(end + 1, end + 3).find(other => !blank(other));
      if (next === undefined || !(ITEM.test(next) || (/^\s{2,}/.test(next) && !FENCE.test(next)))) break;
    } else if (begins(line)) break;
    else items.at(-1).text += "\n" + line.trim();
  }
  return { kind: "list", items, end };
}

// Bold, italics and code in a line. Each mark's missing end is looked for once, so the time is linear in the text.
export function inline(text, depth = 0) {
  const nodes = [],
    missing = new Set();
  let plain = 0,
    i = 0;
  const put = (until, after, tag, children) => {
    if (until > plain) nodes.push(document.createTextNode(text.slice(plain, until)));
    nodes.push(el(tag, {}, ...children));
    plain = i = after;
  };
  while (i < text.length) {
    const char = text[i];
    if (char === "\\" && /[\\`*_]/.test(text[i + 1] ?? "")) {
      nodes.push(document.createTextNode(text.slice(plain, i)));
      plain = i + 1;
      i += 2;
      continue;
    }
    const mark =
      char === "`" ? /^`+/.exec(text.slice(i, i + 16))[0] : text.startsWith("**", i) ? "**" : char === "*" ? "*" : "";
    if (!mark) {
      i++;
      continue;
    }
    const begin = i + mark.length,
      end = missing.has(mark) ? -1 : text.indexOf(mark, begin);
    if (end < 0) missing.add(mark);
    const inside = text.slice(begin, Math.max(begin, end));
    if (end < 0 || !inside.trim()) i = begin;
    else if (char === "`") put(i, end + mark.length, "code", [inside.trim()]);
    else if (depth >= DEEPEST || /^\s|\s$/.test(inside)) i = begin;
    else put(i, end + mark.length, mark === "**" ? "strong" : "em", inline(inside, depth + 1));
  }
  if (plain < text.length) nodes.push(document.createTextNode(text.slice(plain)));
  return nodes;
}

function list(items) {
  const root = { depth: -1, children: null },
    open = [root];
  const make = item =>
    el(item.number === null ? "ul" : "ol", { start: item.number !== null && item.number !== 1 ? item.number : null });
  for (const item of items) {
    while (open.at(-1).depth >= item.depth) open.pop();
    const parent = open.at(-1),
      tag = item.number === null ? "UL" : "OL";
    if (parent.children?.tagName !== tag) {
      parent.children = make(item);
      parent.node?.append(parent.children);
    }
    const node = el("li", {}, ...inline(item.text));
    parent.children.append(node);
    open.push({ depth: item.depth, node, children: null });
  }
  return root.children;
}

function table([head, ...rows]) {
  const row = (tag, texts) =>
    el("tr", {}, ...texts.map(text => el(tag, tag === "th" ? { scope: "col" } : {}, ...inline(text))));
  const made = el(
    "table",
    {},
    el("thead", {}, row("th", head)),
    el("tbody", {}, ...rows.map(texts => row("td", texts))),
  );
  return el("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Table" }, made);
}

function code(block) {
  const text = document.createTextNode(block.text),
    name = block.language || "code";
  const pre = el("pre", { tabindex: 0, role: "group", "aria-label": `Code: ${name}` }, el("code", {}, text));
  const head = el(
    "div",
    { class: "code-head" },
    el("span", {}, name),
    copyButton(() => text.data, `code: ${name}`),
  );
  return Object.assign(el("div", { class: "code" }, head, pre), { text });
}

// The node of one block.
export function node(block, depth = 0) {
  switch (block.kind) {
    case "code":
      return code(block);
    case "heading":
      return el(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text));
    case "rule":
      return el("hr");
    case "list":
      return list(block.items);
    case "table":
      return table(block.rows);
    case "quote":
      if (depth >= DEEPEST) return el("blockquote", {}, block.text);
      return el("blockquote", {}, ...blocks(block.text).map(inner => node(inner, depth + 1)));
    default:
      return el("p", {}, ...inline(block.text));
  }
}

// Shows a text that grows. Blocks above the last two cannot change any more and are not looked at again.
export class Writer {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.settled = 0;
    this.shown = [];
  }

  // `text` begins with what was shown before.
  update(text) {
    if (text === this.text) return;
    this.text = text;
    const found = blocks(text.slice(this.settled));
    found.forEach((block, i) => this.#show(block, i));
    while (this.shown.length > found.length) this.shown.pop().node.remove();
    while (this.shown.length > 2) this.settled += this.shown.shift().raw.length;
  }

  #show(block, i) {
    const old = this.shown[i];
    if (old && old.kind === block.kind && old.raw === block.raw) return;
    if (
      old &&
      old.kind === "code" &&
      block.kind === "code" &&
      old.language === block.language &&
      block.text.startsWith(old.text)
    ) {
      old.node.text.appendData(block.text.slice(old.text.length));
      this.shown[i] = { ...block, node: old.node };
      return;
    }
    const made = node(block);
    if (old) old.node.replaceWith(made);
    else this.element.append(made);
    this.shown[i] = { ...block, node: made };
  }
}
