// What the user sets. It lives in the tab's session storage: gone when the tab is closed, sent to this server alone.

import { $ } from "./dom.js";

const PLACE = "offroad.settings";
const NAMES = ["system", "temperature", "max_tokens", "thinking", "tools", "key"];

export const settings = Object.fromEntries(NAMES.map(name => [name, ""]));

function load() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(PLACE) ?? "{}");
    for (const name of NAMES) if (typeof stored[name] === "string") settings[name] = stored[name];
  } catch (error) {
    // Storage is off or holds something else: settings then live as long as the page.
  }
}

function store() {
  try {
    sessionStorage.setItem(PLACE, JSON.stringify(settings));
  } catch (error) {
    // As above.
  }
}

// The fields of a request that the settings make; empty ones are left out.
export function fields() {
  const body = {};
  if (settings.temperature) body.temperature = Number(settings.temperature);
  if (settings.max_tokens) body.max_tokens = Number(settings.max_tokens);
  if (settings.thinking) body.enable_thinking = settings.thinking === "on";
  if (settings.tools) body.tools = JSON.parse(settings.tools);
  return body;
}

// [field, words] for the first value that is none; null if all are good.
function wrong(values) {
  const temperature = Number(values.temperature),
    limit = Number(values.max_tokens);
  if (!(temperature >= 0 && temperature <= 2)) return ["temperature", "Temperature: a number from 0 to 2, or empty."];
  if (values.max_tokens && !(Number.isInteger(limit) && limit >= 1))
    return ["max_tokens", "Max tokens: a whole number from 1 on, or empty."];
  if (!/^[\x21-\x7e]*$/.test(values.key)) return ["key", "API key: letters, digits and signs without blanks."];
  try {
    if (values.tools && !Array.isArray(JSON.parse(values.tools))) throw new SyntaxError("not a list");
  } catch (error) {
    return ["tools", `Tools: a JSON list, or empty (${error.message}).`];
  }
  return null;
}

let changed = () => {};

// Opens the dialog, with the focus on a field; `then` is called when settings were saved.
export function openSettings(field = "system", then = () => {}) {
  for (const name of NAMES) $(`set-${name}`).value = settings[name];
  show(null);
  changed = then;
  $("settings").showModal();
  $(`set-${field}`).focus();
}

function show(error) {
  for (const name of NAMES) $(`set-${name}`).removeAttribute("aria-invalid");
  $("settings-error").textContent = error ? error[1] : "";
  if (!error) return;
  $(`set-${error[0]}`).setAttribute("aria-invalid", "true");
  $(`set-${error[0]}`).focus();
}

export function startSettings() {
  load();
  $("settings-open").addEventListener("click", () => openSettings());
  $("settings-cancel").addEventListener("click", () => $("settings").close());
  $("settings-form").addEventListener("submit", event => {
    event.preventDefault();
    const values = Object.fromEntries(NAMES.map(name => [name, $(`set-${name}`).value.trim()]));
    const error = wrong(values);
    show(error);
    if (error) return;
    Object.assign(settings, values);
    store();
    $("settings").close();
    changed();
    document.dispatchEvent(new Event("settings"));
  });
}
