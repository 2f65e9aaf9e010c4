// The served models with their state: choose one, load or unload it.

import { describe } from "./chat.js";
import { h, iconButton, replace } from "./dom.js";
import { formatBytes, formatCount } from "./format.js";
import * as icons from "./icons.js";
import { canChat } from "./session.js";

export class ModelPicker extends HTMLElement {
  #session;
  #details = h("details", { class: "model-picker" });
  #busy = new Set();
  #shown = null; // what the menu shows

  setUp(session) {
    this.#session = session;
    this.append(this.#details);
    session.addEventListener("models", () => this.#show());
    session.addEventListener("connection", () => this.#show());
    document.addEventListener("click", (event) => { if (!event.composedPath().includes(this)) this.#details.open = false; }); // a row that was clicked may be gone
    this.addEventListener("keydown", (event) => { if (event.key === "Escape") this.#details.open = false; });
    this.#show();
    return this;
  }

  #show() {
    const { card, models, isOnline } = this.#session;
    const state = !isOnline ? "offline" : (card?.state ?? "not loaded");
    const name = card?.id ?? "no model";
    const rows = models.map(({ id, state: own, loaded, bytes, context_length: length, capabilities }) => [id, own, loaded, bytes, length, capabilities]);
    const shown = JSON.stringify([name, state, rows, [...this.#busy]]);
    if (shown === this.#shown) return; // a button that is built again loses the focus, and a click that is under way
    this.#shown = shown;
    const summary = h("summary", { "aria-label": `Model ${name}, ${state}` }, h("span", { class: "state", "data-state": state }), h("span", { class: "model-name" }, name), h("span", { class: "state-name" }, state));
    replace(this.#details, summary, h("ul", { class: "models" }, models.map((model) => this.#buildRow(model))));
  }

  #buildRow(card) {
    const isLoaded = card.loaded;
    const isBusy = this.#busy.has(card.id) || ["loading", "unloading"].includes(card.state);
    const total = Object.values(card.bytes).reduce((sum, bytes) => sum + bytes, 0);
    const facts = [card.state, total && formatBytes(total), card.context_length && `${formatCount(card.context_length)} tokens`].filter(Boolean);
    const choose = h("button", { type: "button", class: "choose", disabled: !canChat(card), "aria-pressed": String(card.id === this.#session.model), onclick: () => this.#choose(card) },
      h("span", { class: "state", "data-state": card.state }), h("span", { class: "model-name" }, card.id), h("small", {}, facts.join(" · ")));
    const label = isLoaded ? `Unload ${card.id}` : `Load ${card.id}`;
    const power = iconButton(icons.POWER, label, () => this.#toggle(card), { disabled: isBusy });
    return h("li", { class: isLoaded && "loaded" }, choose, power);
  }

  #choose(card) {
    this.#details.open = false;
    this.#session.model = card.id;
  }

  async #toggle(card) {
    this.#busy.add(card.id);
    this.#show();
    try {
      await (card.loaded ? this.#session.unload(card.id) : this.#session.load(card.id));
    } catch (error) {
      this.dispatchEvent(new CustomEvent("problem", { detail: describe(error), bubbles: true }));
    }
    this.#busy.delete(card.id);
    this.#show();
  }
}

customElements.define("ag-model-picker", ModelPicker);
