// HTTP client of the server. The API key is kept for this browser tab only.

import { readEvents } from "./sse.js";

const KEY_NAME = "afterglow-api-key";
const MAX_KEEPALIVE_BYTES = 60_000; // browsers refuse 64 KiB and more

/** An error response of the server, or `status` 0 if it cannot be reached. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api extends EventTarget {
  #storage;
  #fetch;

  constructor(storage, fetch) {
    super();
    this.#storage = storage;
    this.#fetch = fetch;
  }

  get key() {
    return this.#storage.getItem(KEY_NAME) ?? "";
  }

  set key(value) {
    if (value) this.#storage.setItem(KEY_NAME, value);
    else this.#storage.removeItem(KEY_NAME);
  }

  get(path, options) {
    return this.#requestJson("GET", path, undefined, options);
  }

  post(path, body, options) {
    return this.#requestJson("POST", path, body, options);
  }

  put(path, body, options) {
    return this.#requestJson("PUT", path, body, options);
  }

  patch(path, body) {
    return this.#requestJson("PATCH", path, body);
  }

  delete(path) {
    return this.#requestJson("DELETE", path);
  }

  /** Send a request and return the response. Raises `ApiError` for every status but 2xx and 304. */
  async request(method, path, body, { signal, keepalive } = {}) {
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    if (this.key) headers.Authorization = `Bearer ${encodeHeader(this.key)}`;
    const text = body === undefined ? undefined : JSON.stringify(body);
    const isSmall = keepalive && new Blob([text]).size < MAX_KEEPALIVE_BYTES;
    const init = { method, headers, signal, keepalive: isSmall, body: text };
    let response;
    try {
      response = await this.#fetch(path, init);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.dispatchEvent(new Event("offline"));
      throw new ApiError(0, "the server cannot be reached");
    }
    this.dispatchEvent(new Event("online"));
    if (response.ok || response.status === 304) return response;
    if (response.status === 401) this.dispatchEvent(new Event("unauthorized"));
    const error = await readError(response);
    throw new ApiError(response.status, error.message, error.code);
  }

  /** Yield the JSON of the events of a stream. An error event raises `ApiError`. */
  async *stream(method, path, body, signal, onResponse = () => {}) {
    const response = await this.request(method, path, body, { signal });
    onResponse(response);
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error?.message) throw new ApiError(500, value.error.message, value.error.code);
      yield value;
    }
  }

  async #requestJson(method, path, body, options) {
    const response = await this.request(method, path, body, options);
    return response.status === 304 ? null : response.json();
  }
}

/** A text as its bytes in UTF-8: a browser refuses to send other characters in a header. */
function encodeHeader(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

async function readError(response) {
  const fallback = { message: `the server responded with status ${response.status}`, code: null };
  try {
    const { error } = await response.json();
    return typeof error?.message === "string" ? error : fallback;
  } catch {
    return fallback;
  }
}
