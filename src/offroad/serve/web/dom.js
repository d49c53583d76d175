// Elements and small helpers. Text is put in as text: nothing in this page parses HTML.

export const $ = id => document.getElementById(id);

// An element with attributes ("on..." ones are listeners; null, undefined and false are left out) and children.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

// Says something to screen readers alone.
export function say(text) {
  $("live").textContent = text;
}

// Copies text, also where the page is not in a secure context and browsers have no clipboard to offer.
export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser does not let this page copy");
}

// A button that copies what `text` gives, and says whether it did.
export function copyButton(text, what) {
  const made = button(
    "Copy",
    async () => {
      const focused = document.activeElement;
      let said = "Copied";
      try {
        await copy(text());
      } catch (error) {
        said = "Not copied";
      }
      focused?.focus();
      made.textContent = said;
      say(said);
      setTimeout(() => {
        made.textContent = "Copy";
      }, 1500);
    },
    { "aria-label": `Copy ${what}` },
  );
  return made;
}

export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.max(0, Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, Math.abs(number))) / 10)));
  const value = number / 1024 ** power;
  return `${value.toFixed(power === 0 || Math.abs(value) >= 100 ? 0 : 1)} ${units[power]}`;
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const parts = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ];
  const first = parts.findIndex(([size]) => seconds >= size);
  const [size, unit] = parts[first],
    rest = seconds % size;
  const [below, small] = parts[first + 1] ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit} ${Math.floor(rest / below)} ${small}`;
}
