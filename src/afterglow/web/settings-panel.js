// Settings of a conversation: system prompt, sampling, tools.

import { h, iconButton, replace } from "./dom.js";
import * as icons from "./icons.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, max: 200, step: 1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "repeat_penalty", label: "Repeat penalty", min: 0.5, max: 2, step: 0.01 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.05 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.05 },
  { name: "max_tokens", label: "Maximum tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];
const EFFORTS = ["", "none", "low", "medium", "high"];

/** Dispatches "settings" with the settings, and "problem" with a text. */
export class SettingsPanel extends HTMLElement {
  #settings = {};
  #defaults = {};

  /** Show the settings of a conversation and the sampling defaults of its model. */
  show(settings, defaults) {
    this.#settings = settings;
    this.#defaults = defaults ?? {};
    const close = iconButton(icons.CLOSE, "Close", () => { this.hidden = true; });
    replace(this,
      h("div", { class: "panel-head" }, h("h2", {}, "Settings of this conversation"), close),
      this.#buildSystem(),
      h("fieldset", {}, h("legend", {}, "Sampling"), FIELDS.map((field) => this.#buildField(field)), this.#buildEffort()),
      this.#buildTools());
  }

  #buildSystem() {
    const input = h("textarea", { rows: 5, value: this.#settings.system ?? "", placeholder: "None", onchange: () => this.#change({ system: input.value || undefined }) });
    return h("label", { class: "field wide" }, h("span", {}, "System prompt"), input);
  }

  #buildField({ name, label, ...limits }) {
    const input = h("input", { type: "number", name, inputmode: "decimal", ...limits, value: this.#settings.sampling?.[name] ?? "", placeholder: formatDefault(this.#defaults[name]) });
    input.addEventListener("change", () => {
      const isBetweenSteps = limits.step < 1 && input.validity.stepMismatch; // the steps of a fraction are those of the arrows
      if (!isBetweenSteps && !input.reportValidity()) return;
      this.#changeSampling(name, input.value === "" ? undefined : Number(input.value));
    });
    return h("label", { class: "field" }, h("span", {}, label), input);
  }

  #buildEffort() {
    const select = h("select", { name: "reasoning_effort", onchange: () => this.#changeSampling("reasoning_effort", select.value || undefined) },
      EFFORTS.map((effort) => h("option", { value: effort }, effort || "auto")));
    select.value = this.#settings.sampling?.reasoning_effort ?? "";
    return h("label", { class: "field" }, h("span", {}, "Reasoning"), select);
  }

  #buildTools() {
    const text = this.#settings.tools?.length ? JSON.stringify(this.#settings.tools, null, 2) : "";
    const input = h("textarea", { rows: 5, name: "tools", class: "mono", value: text, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": "…"}}]' });
    input.addEventListener("change", () => {
      try {
        const tools = input.value.trim() ? JSON.parse(input.value) : undefined;
        if (tools !== undefined && !Array.isArray(tools)) throw new SyntaxError("a list is needed");
        this.#change({ tools });
      } catch (error) {
        this.dispatchEvent(new CustomEvent("problem", { detail: `The tools are not JSON: ${error.message}` }));
      }
    });
    const help = h("small", {}, "Functions in OpenAI's format. You write the results of the calls.");
    return h("label", { class: "field wide" }, h("span", {}, "Tools"), input, help);
  }

  #changeSampling(name, value) {
    this.#change({ sampling: omitUndefined({ ...this.#settings.sampling, [name]: value }) });
  }

  #change(changes) {
    this.#settings = omitUndefined({ ...this.#settings, ...changes });
    this.dispatchEvent(new CustomEvent("settings", { detail: this.#settings }));
  }
}

function formatDefault(field) {
  return field === undefined ? "default" : String(Math.round(field.value * 1e4) / 1e4);
}

function omitUndefined(object) {
  return Object.fromEntries(Object.entries(object).filter(([, value]) => value !== undefined));
}

customElements.define("ag-settings", SettingsPanel);
