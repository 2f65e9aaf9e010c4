// The chat: messages of the current path, composer, settings, context meter.

import { describe } from "./chat.js";
import { getOpenCalls, getText } from "./conversation.js";
import { gauge, h, iconButton, replace, replaceEnd } from "./dom.js";
import { formatCount } from "./format.js";
import * as icons from "./icons.js";
import { MessageView } from "./message-view.js";
import "./composer.js";
import "./settings-panel.js";

const MIN_DELAY_MS = 33; // between two looks at a stream
const NEARLY_FULL = 0.85; // of the context
const NEAR_END_PIXELS = 80; // a reader this near to the end follows the stream

/** Dispatches "problem" with a text. */
export class ChatView extends HTMLElement {
  #session;
  #chat;
  #messages = h("div", { class: "messages", role: "log", "aria-label": "Conversation" });
  #results = h("form", { class: "results", hidden: true });
  #composer = h("ag-composer");
  #settings = h("ag-settings", { hidden: true });
  #context = h("span", { class: "context", title: "Tokens of this conversation in the context" });
  #welcome = h("div", { class: "welcome" });
  #actions = {
    edit: (view) => this.#edit(view),
    regenerate: (node) => this.#generate(() => this.#chat.regenerate(node.id, this.#session.model)),
    continue: () => this.#generate(() => this.#chat.continueResponse(this.#session.model)),
    remove: (node) => this.#run(this.#chat.deleteMessage(node.id)),
    switchBranch: (node, offset) => this.#run(this.#chat.switchBranch(node.id, offset)),
  };
  #isSending = false;
  #pending = 0;
  #delay = MIN_DELAY_MS;
  #timer = 0;

  setUp(session, chat) {
    this.#session = session;
    this.#chat = chat;
    const tune = iconButton(icons.TUNE, "Settings of this conversation", () => this.#toggleSettings(), { id: "settings" });
    const bar = h("div", { class: "chat-bar" }, this.#context, tune);
    const scroll = h("div", { class: "scroll", tabindex: "-1" }, this.#welcome, this.#messages, this.#results);
    this.append(h("div", { class: "chat-main" }, bar, scroll, this.#composer), this.#settings);
    chat.addEventListener("change", () => this.#show());
    chat.addEventListener("stream", () => this.#schedule());
    session.addEventListener("models", () => this.#showModel());
    this.#composer.addEventListener("send", (event) => this.#send(event.detail));
    this.#composer.addEventListener("stop", () => chat.stop());
    for (const part of [this.#composer, this.#settings]) part.addEventListener("problem", (event) => this.#report(event.detail));
    this.#settings.addEventListener("settings", (event) => this.#run(chat.changeSettings({ ...event.detail, model: chat.settings.model })));
    this.addEventListener("keydown", (event) => { if (event.key === "Escape") chat.stop(); });
    this.#show();
    return this;
  }

  focusComposer(text = null) {
    if (text !== null) this.#composer.text = text;
    this.#composer.focus();
  }

  // --- actions

  #send({ text, files }) {
    const missing = this.#findMissingKind();
    if (missing) return this.#report(`${this.#session.model} does not accept ${missing}.`);
    return this.#generate(async () => {
      this.#composer.clear();
      try {
        await this.#chat.send(text, files, this.#session.model);
      } catch (error) {
        this.#composer.restore(text, files);
        throw error;
      }
    });
  }

  /** Run work that ends in a response, unless one is on its way: a second click does nothing. */
  async #generate(work) {
    if (this.#chat.generation || this.#isSending) return;
    this.#isSending = true;
    await this.#run(work());
    this.#isSending = false;
  }

  #findMissingKind() {
    const accepted = this.#session.card?.capabilities ?? [];
    return this.#session.card?.loaded ? [...this.#composer.kinds].find((kind) => kind !== "text" && !accepted.includes(kind)) : null;
  }

  #edit(view) {
    const before = getText(view.node);
    const input = h("textarea", { class: "edit", value: before, "aria-label": "Edit the message", rows: Math.min(12, before.split("\n").length + 1) });
    const cancel = () => view.setUp(this.#chat, view.node, this.#actions);
    const save = () => (input.value.trim() ? this.#generate(() => this.#chat.edit(view.node.id, input.value.trim(), this.#session.model)) : undefined);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    const buttons = h("div", { class: "edit-buttons" },
      h("button", { type: "button", class: "small", onclick: cancel }, "Cancel"),
      h("button", { type: "button", class: "small primary", onclick: save }, "Send as a new branch"));
    replace(view, h("div", { class: "message-head" }, "Edit"), input, buttons);
    input.focus();
  }

  #run(promise) {
    return promise.catch((error) => this.#report(describe(error)));
  }

  #report(text) {
    this.dispatchEvent(new CustomEvent("problem", { detail: text, bubbles: true }));
  }

  #toggleSettings() {
    this.#settings.hidden = !this.#settings.hidden;
    this.#showSettings();
  }

  // --- showing

  #show() {
    const isAtEnd = this.#isAtEnd();
    const { path } = this.#chat;
    const before = new Map([...this.#messages.children].map((view) => [view.dataset.id, view]));
    const views = path.map((node) => {
      const view = before.get(node.id);
      if (!view) return new MessageView().setUp(this.#chat, node, this.#actions);
      view.update(node);
      return view;
    });
    replaceEnd(this.#messages, views);
    this.#showWelcome(path);
    this.#showResults(path);
    this.#composer.isBusy = this.#chat.generation !== null;
    this.#showModel();
    this.#watchGeneration();
    if (isAtEnd || path.at(-1)?.message.role === "user") this.#scrollToEnd();
  }

  /** Show text that arrived soon, and the longer that takes, the less often. */
  #schedule() {
    this.#pending ||= setTimeout(() => {
      this.#pending = 0;
      const started = performance.now();
      const isAtEnd = this.#isAtEnd();
      const node = this.#chat.path.at(-1);
      const view = this.#messages.lastElementChild;
      if (node && view?.dataset.id === node.id) view.update(node);
      this.#showContext();
      if (isAtEnd) this.#scrollToEnd();
      this.#delay = Math.max(MIN_DELAY_MS, 4 * (performance.now() - started));
    }, this.#delay);
  }

  /** Update seconds and rates between chunks. */
  #watchGeneration() {
    clearInterval(this.#timer);
    if (this.#chat.generation) this.#timer = setInterval(() => this.#messages.lastElementChild?.updateStatus(), 500);
  }

  #showWelcome(path) {
    this.#welcome.hidden = path.length > 0;
    replace(this.#welcome,
      h("h1", {}, "What shall we compute once?"),
      h("p", {}, "Ask anything. Every prefix that was computed stays in the cache, and a new branch costs only its new tokens."),
      h("p", {}, h("a", { href: "#/cache" }, "See what is cached")));
  }

  #showResults(path) {
    const calls = this.#chat.generation ? [] : getOpenCalls(path);
    const ids = calls.map(({ id }) => id).join(" ");
    if (ids === this.#results.dataset.calls) return; // what is being written stays
    this.#results.dataset.calls = ids;
    this.#results.hidden = !calls.length;
    if (!calls.length) return void replace(this.#results);
    const inputs = calls.map((call) => h("textarea", { rows: 2, class: "mono", "aria-label": `Result of ${call.function.name}` }));
    const rows = calls.map((call, index) => h("label", { class: "field wide" }, h("span", {}, `Result of ${call.function.name}`), inputs[index]));
    const send = h("button", { type: "button", class: "small primary", onclick: () => this.#generate(() => this.#chat.sendResults(calls.map(({ id }, index) => ({ id, content: inputs[index].value })), this.#session.model)) }, "Send the results");
    replace(this.#results, rows, send);
  }

  #showModel() {
    this.#showContext();
    const shown = `${this.#chat.conversation.id} ${this.#session.model}`; // not at every change: an input may have the focus
    if (!this.#settings.hidden && shown !== this.#settings.dataset.shown) this.#showSettings();
  }

  #showSettings() {
    this.#settings.dataset.shown = `${this.#chat.conversation.id} ${this.#session.model}`;
    this.#settings.show(this.#chat.settings, this.#session.card?.sampling);
  }

  #showContext() {
    const limit = this.#session.card?.context_length;
    const last = this.#chat.path.findLast(({ info }) => info?.prompt_tokens);
    const live = this.#chat.generation;
    const known = last ? last.info.prompt_tokens + (last.info.generated_tokens ?? 0) : 0;
    const used = live?.progress ? live.progress.total + live.tokens : known;
    this.#context.classList.toggle("nearly-full", used > NEARLY_FULL * limit);
    replace(this.#context, limit ? [gauge(used / limit, "Used part of the context"), `${formatCount(used)} of ${formatCount(limit)} tokens`] : []);
  }

  #isAtEnd() {
    const scroll = this.#messages.parentElement;
    return !scroll || scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END_PIXELS;
  }

  #scrollToEnd() {
    const scroll = this.#messages.parentElement;
    scroll.scrollTop = scroll.scrollHeight;
  }
}

customElements.define("ag-chat", ChatView);
