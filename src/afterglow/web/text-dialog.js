// A cached prefix that is no chat: its text can be changed at the end and continued as it is.

import { describe } from "./chat.js";
import { h, iconButton, replace } from "./dom.js";
import * as icons from "./icons.js";

export class TextDialog extends HTMLElement {
  #api;
  #session;
  #abort = null;
  #input = h("textarea", { rows: 16, class: "mono", "aria-label": "Text", spellcheck: "false" });
  #run = h("button", { type: "button", class: "small primary", onclick: () => (this.#abort ? this.#abort.abort() : this.#generate()) }, "Continue");
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #dialog = h("dialog", { "aria-label": "Continue a text" });

  setUp(api, session) {
    this.#api = api;
    this.#session = session;
    const close = iconButton(icons.CLOSE, "Close", () => this.#dialog.close());
    const help = h("p", {}, "This prefix is not a whole conversation. The model continues the text as it is.");
    this.#dialog.append(h("div", { class: "panel-head" }, h("h2", {}, "Continue from here"), close), help, this.#input, this.#problem, h("div", { class: "edit-buttons" }, this.#run));
    this.#dialog.addEventListener("close", () => this.#abort?.abort());
    this.append(this.#dialog);
    return this;
  }

  open(text) {
    this.#input.value = text;
    this.#problem.hidden = true;
    this.#dialog.showModal();
    this.#input.setSelectionRange(text.length, text.length);
    this.#input.scrollTop = this.#input.scrollHeight;
  }

  async #generate() {
    const abort = new AbortController();
    this.#abort = abort;
    this.#problem.hidden = true;
    replace(this.#run, "Stop");
    try {
      const { model } = this.#session;
      const { tokens } = await this.#api.post("/tokenize", { model, content: this.#input.value, parse_special: true }, { signal: abort.signal });
      const body = { model, prompt: tokens, stream: true }; // tokens: control tokens in a text prompt stay text
      for await (const { choices } of this.#api.stream("POST", "/v1/completions", body, abort.signal)) {
        this.#input.value += choices[0]?.text ?? "";
        this.#input.scrollTop = this.#input.scrollHeight;
      }
    } catch (error) {
      this.#problem.hidden = abort.signal.aborted;
      replace(this.#problem, describe(error));
    }
    this.#abort = null;
    replace(this.#run, "Continue");
  }
}

customElements.define("ag-text-dialog", TextDialog);
