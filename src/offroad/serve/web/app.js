// The frame of the page: tabs, and what the server is doing, in a line.

import { getJson } from "./api.js";
import { showEnd, startChat } from "./chat.js";
import { $ } from "./dom.js";
import { startSettings } from "./settings.js";
import { showPlan, showStatus, stateLine } from "./status.js";

const EVERY = 1000,
  EVERY_UNTIL_READY = 2000,
  EVERY_IN_CHAT = 30000,
  PATIENCE = 8000; // milliseconds
const tabs = ["chat", "status"];
let shown = "chat",
  timer = 0;

function show(name, focus = false) {
  shown = name;
  for (const tab of tabs) {
    const chosen = tab === name;
    $(tab).hidden = !chosen;
    $(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${tab}`).tabIndex = chosen ? 0 : -1;
  }
  if (focus) $(`tab-${name}`).focus();
  if (name === "chat") showEnd();
  look();
}

function startTabs() {
  for (const [i, tab] of tabs.entries()) {
    $(`tab-${tab}`).addEventListener("click", () => show(tab));
    $(`tab-${tab}`).addEventListener("keydown", event => {
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(tabs[(to + tabs.length) % tabs.length], true);
    });
  }
}

// Asks how the server is, and again after a while; nobody asks while the page is hidden.
async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  let status = null,
    problem = null;
  try {
    status = await getJson("status", { signal: AbortSignal.timeout(PATIENCE) });
  } catch (error) {
    problem = error;
  }
  const line = stateLine(status, problem);
  if ($("state").textContent !== line.text) $("state").textContent = line.text;
  $("state").dataset.state = line.state;
  if (shown === "status") {
    showStatus(status, problem);
    if (status?.engine.plan_fingerprint) await showPlan(status.engine.plan_fingerprint);
  }
  clearTimeout(timer);
  timer = setTimeout(look, shown === "status" ? EVERY : line.state === "ready" ? EVERY_IN_CHAT : EVERY_UNTIL_READY);
}

startSettings();
startChat();
startTabs();
document.addEventListener("visibilitychange", look);
document.addEventListener("settings", look);
look();
$("text").focus();
