// The served models and which of them is used. Asks the server every few seconds while the page is visible.

const POLL_SECONDS = 3;
const MODEL_NAME = "afterglow-model";

/** Dispatches "models" when the list changed, and "connection" when the server came or went. */
export class Session extends EventTarget {
  models = [];
  isOnline = true;
  needsKey = false;
  #api;
  #storage;
  #chosen; // of this tab: another one may choose another model
  #text = "";

  constructor(api, storage) {
    super();
    this.#api = api;
    this.#storage = storage;
    this.#chosen = storage.getItem(MODEL_NAME);
    api.addEventListener("offline", () => this.#setOnline(false));
    api.addEventListener("online", () => this.#setOnline(true));
    api.addEventListener("unauthorized", () => {
      this.needsKey = true;
      this.dispatchEvent(new Event("connection"));
    });
  }

  /** Name of the model for new requests. */
  get model() {
    const generating = this.models.filter(canChat);
    return (generating.find(({ id }) => id === this.#chosen) ?? generating[0])?.id ?? null;
  }

  set model(name) {
    this.#chosen = name;
    this.#storage.setItem(MODEL_NAME, name);
    this.dispatchEvent(new Event("models"));
  }

  get card() {
    return this.models.find(({ id }) => id === this.model) ?? null;
  }

  async refresh() {
    const { data } = await this.#api.get("/v1/models");
    this.needsKey = false;
    const text = JSON.stringify(data);
    if (text === this.#text) return;
    this.#text = text;
    this.models = data;
    this.dispatchEvent(new Event("models"));
  }

  watch() {
    setInterval(() => {
      if (document.visibilityState === "visible" && !this.needsKey) this.refresh().catch(() => {});
    }, 1000 * POLL_SECONDS);
  }

  async load(name) {
    await this.#api.post("/models/load", { model: name });
    await this.refresh();
  }

  async unload(name) {
    await this.#api.post("/models/unload", { model: name });
    await this.refresh();
  }

  #setOnline(isOnline) {
    if (isOnline === this.isOnline) return;
    this.isOnline = isOnline;
    this.dispatchEvent(new Event("connection"));
  }
}

/** Whether a model can chat. One that was never loaded has no capabilities yet. */
export function canChat(card) {
  return !card.capabilities.length || card.capabilities.includes("chat");
}
