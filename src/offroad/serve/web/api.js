// Calls of the server's API: the key, errors in words, and events of a stream.

import { settings } from "./settings.js";

// What went wrong, in words. `status` is HTTP's (0: the server was not reached), `again` seconds until a retry may
// help.
export class Problem extends Error {
  constructor(message, { status = 0, detail = "", again = null } = {}) {
    super(message);
    Object.assign(this, { status, detail, again });
  }
}

const WORDS = {
  400: "The server cannot do what was asked.",
  401: "The server wants an API key.",
  403: "The server does not allow that from this page.",
  404: "The server does not know that.",
  413: "The conversation is too large for the server.",
  429: "The server is busy: too many requests wait.",
  500: "The server has made an error.",
  503: "The server cannot answer now.",
  504: "The answer took longer than the server allows.",
};

// A response that is good, or a Problem.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      headers,
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached.", {
      detail: "Is it still running, and is this device still connected to it?",
    });
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const { status } = response;
  let detail = "";
  try {
    const { error, reason } = await response.json();
    detail = error?.message ?? reason ?? "";
  } catch (error) {
    detail = response.statusText; // a proxy's page, perhaps
  }
  let words = WORDS[status] ?? `The server answered with status ${status}.`;
  if (status === 401 && settings.key) words = "The server does not accept this API key.";
  const again = parseInt(response.headers.get("Retry-After") ?? "", 10);
  return new Problem(words, { status, detail, again: Number.isNaN(again) ? null : again });
}

export const getJson = async (path, options) => (await call(path, options)).json();

// The chunks of a streamed answer. Throws a Problem for an error event, and if the stream ends before it was all told.
export async function* stream(path, body, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      piece = { done: true };
    }
    if (piece.done)
      throw new Problem("The connection was lost in the middle of the answer.", {
        detail: "What had come is kept above.",
      });
    const events = (rest + piece.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a ping
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error)
        throw new Problem("The answer has ended with an error.", { status: 200, detail: chunk.error.message });
      yield chunk;
    }
  }
}
