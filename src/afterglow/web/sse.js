// Server-sent events of a fetch response. EventSource cannot send an API key.

/** Incremental parser: text chunks to the data of events. */
export class EventParser {
  #rest = "";
  #data = [];

  /** Return the data of the events that a chunk completes. */
  push(chunk) {
    const lines = (this.#rest + chunk).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (!line.startsWith(":")) {
        this.#readField(line);
      }
    }
    return events;
  }

  #readField(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
  }
}

/** Yield the data of the events of a response body. */
export async function* readEvents(body) {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // ends the request on the server
  }
}
