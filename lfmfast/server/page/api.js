"use strict";

// Asking the server, for chat.js.

class ServerError extends Error {
  constructor(status, text, type = "") {
    super(type === "exceed_context_size_error" ? `${text}. Edit your message, or begin a new chat.` : text);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = {"Content-Type": "application/json"};
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  let response;
  try {
    response = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server can't be reached. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ServerError(response.status, body.error?.message || `The server answered ${response.status} ${response.statusText}.`,
    body.error?.type);
}

// The objects of an event stream. Lines that begin with a colon only keep the connection awake.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") yield null;
      else yield JSON.parse(data);
    }
  }
}
