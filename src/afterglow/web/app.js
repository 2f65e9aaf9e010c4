// The page: navigation, API key, theme, and what connects the views.

import { Api } from "./api.js";
import { Chat, describe } from "./chat.js";
import { h, icon, iconButton, replace } from "./dom.js";
import { firstLine } from "./format.js";
import * as icons from "./icons.js";
import { Session } from "./session.js";
import { openStorage } from "./storage.js";
import "./cache-view.js";
import "./chat-view.js";
import "./model-picker.js";
import "./sidebar.js";
import "./text-dialog.js";
import "./tree-view.js";

const THEME_NAME = "afterglow-theme";
const THEMES = ["auto", "light", "dark"];
const PROBLEM_SECONDS = 8;
const pageStorage = openStorage(() => localStorage);

class App extends HTMLElement {
  #api = new Api(openStorage(() => sessionStorage), (...request) => fetch(...request));
  #session = new Session(this.#api, pageStorage);
  #chat = new Chat(this.#api);
  #chatView = h("ag-chat", { id: "chat" });
  #cacheView = h("ag-cache", { id: "cache", hidden: true });
  #sidebar = h("ag-sidebar", { id: "sidebar", "aria-label": "Conversations" });
  #textDialog = h("ag-text-dialog");
  #problem = h("div", { class: "toast", role: "alert", hidden: true });
  #connection = h("div", { class: "banner", role: "status", hidden: true });
  #keyDialog = h("dialog", { class: "key-dialog", "aria-label": "API key" });
  #timer = 0;
  #refresh = 0;

  connectedCallback() {
    applyTheme(pageStorage.getItem(THEME_NAME));
    const picker = h("ag-model-picker").setUp(this.#session);
    const tab = (path, name, address) => h("a", { href: address, class: "tab", "data-view": address }, icon(path), h("span", {}, name));
    const head = h("header", {},
      iconButton(icons.MENU, "Conversations", () => this.classList.toggle("sidebar-open"), { class: "icon-button menu" }),
      h("a", { href: "#/chat", class: "brand", "aria-label": "afterglow" }, h("span", { class: "sun", "aria-hidden": "true" }), "afterglow"),
      h("nav", { "aria-label": "Views" }, tab(icons.CHAT, "Chat", "#/chat"), tab(icons.TREE, "Cache", "#/cache")),
      picker,
      iconButton(icons.SUN, "Light, dark or as the system", () => changeTheme()));
    this.append(h("a", { href: "#composer-text", class: "skip", onclick: (event) => { event.preventDefault(); this.#chatView.focusComposer(); } }, "Skip to the message"), head, this.#connection,
      h("div", { class: "body" }, this.#sidebar.setUp(this.#api), h("main", {}, this.#chatView, this.#cacheView)), this.#problem, this.#keyDialog, this.#textDialog);
    this.#chatView.setUp(this.#session, this.#chat);
    this.#cacheView.setUp(this.#api, this.#session);
    this.#textDialog.setUp(this.#api, this.#session);
    this.#listen();
    this.#start();
    this.#session.watch();
  }

  #listen() {
    this.addEventListener("problem", (event) => this.#report(event.detail));
    this.#chat.addEventListener("problem", (event) => this.#report(event.detail));
    this.#chat.addEventListener("saved", () => this.#scheduleRefresh());
    this.#chat.addEventListener("change", () => this.#followChat());
    this.#sidebar.addEventListener("open", (event) => { location.hash = `#/chat/${event.detail}`; });
    this.#sidebar.addEventListener("new", () => this.#startConversation());
    this.#cacheView.addEventListener("continue", (event) => this.#continue(event.detail));
    this.#cacheView.addEventListener("text", (event) => this.#textDialog.open(event.detail));
    this.#session.addEventListener("connection", () => this.#showConnection());
    window.addEventListener("hashchange", () => this.#route());
    window.addEventListener("pagehide", () => this.#chat.saveOnExit());
    window.addEventListener("keydown", (event) => this.#onKey(event));
    this.addEventListener("click", (event) => { if (event.target.closest("main")) this.classList.remove("sidebar-open"); });
  }

  async #start() {
    try {
      await this.#session.refresh();
      await this.#sidebar.refresh();
      await this.#route();
    } catch (error) {
      if (error.status !== 401) this.#report(describe(error));
    }
    this.#chatView.focusComposer();
  }

  async #route() {
    const [, view, id] = location.hash.split("/");
    const isCache = view === "cache";
    this.#chatView.hidden = isCache;
    this.#cacheView.hidden = !isCache;
    this.#cacheView.isActive = isCache;
    this.classList.remove("sidebar-open");
    this.classList.toggle("shows-cache", isCache);
    for (const tab of this.querySelectorAll(".tab")) tab.ariaCurrent = tab.dataset.view === (isCache ? "#/cache" : "#/chat") ? "page" : null;
    if (isCache && id) this.#cacheView.openRequest(decodeURIComponent(id));
    if (isCache) return;
    if (!id) return this.#followChat();
    if (id === this.#chat.conversation.id) return;
    try {
      await this.#chat.open(decodeURIComponent(id));
    } catch (error) {
      this.#report(describe(error));
      this.#startConversation();
    }
  }

  #startConversation() {
    const { system, sampling, tools } = this.#chat.settings;
    this.#chat.start(JSON.parse(JSON.stringify({ system, sampling, tools })));
    location.hash = "#/chat";
    this.#chatView.focusComposer();
  }

  /** Keep the address and the list at the open conversation. */
  #followChat() {
    const { id } = this.#chat.conversation;
    if (this.#sidebar.current !== id) this.#sidebar.current = id;
    if (id && !location.hash.startsWith("#/cache") && location.hash !== `#/chat/${id}`) history.replaceState(null, "", `#/chat/${id}`);
  }

  #scheduleRefresh() {
    this.#refresh ||= setTimeout(() => {
      this.#refresh = 0;
      this.#sidebar.refresh().catch(() => {});
    }, 300);
  }

  /** Open the messages of a cached prefix as a conversation. A fork offers its last question for a change. */
  async #continue({ messages, rest, isFork }) {
    const [first] = messages;
    const system = first.role === "system" ? first.content : undefined;
    const turns = system === undefined ? messages : messages.slice(1);
    const partial = rest?.role === "assistant" && rest.content && !isFork ? [rest] : [];
    const forked = isFork ? turns.findLastIndex(({ role }) => role === "user") : -1;
    const kept = forked >= 0 ? turns.slice(0, forked) : [...turns, ...partial];
    const draft = forked >= 0 ? turns[forked].content : rest?.role === "user" ? rest.content : "";
    const nodes = kept.map((message, index) => ({ id: `m${index}`, parent: index ? `m${index - 1}` : null, message, info: {} }));
    const title = firstLine(turns.find(({ role }) => role === "user")?.content ?? system ?? "Continued");
    const settings = JSON.parse(JSON.stringify({ system }));
    try {
      if (nodes.length) {
        const { conversations } = await this.#api.post("/conversations/import", { conversations: [{ title, settings, messages: nodes }] });
        await this.#chat.open(conversations[0].id);
        this.#scheduleRefresh();
      } else this.#chat.start(settings);
      location.hash = this.#chat.conversation.id ? `#/chat/${this.#chat.conversation.id}` : "#/chat";
      this.#chatView.focusComposer(draft);
      const last = kept.at(-1);
      if (!draft && last?.role === "user") await this.#chat.generate(this.#session.model);
      if (partial.length) await this.#chat.continueResponse(this.#session.model);
    } catch (error) {
      this.#report(describe(error));
    }
  }

  #onKey(event) {
    const isShortcut = event.altKey && !event.ctrlKey && !event.metaKey;
    const isKey = (key, code) => isShortcut && (event.key.toLowerCase() === key || (event.code === code && !/^[a-z0-9]$/i.test(event.key))); // on macOS, Alt types other characters
    if (isKey("n", "KeyN")) this.#startConversation();
    else if (isKey("1", "Digit1")) location.hash = "#/chat";
    else if (isKey("2", "Digit2")) location.hash = "#/cache";
    else if (event.key === "Escape" && event.target === document.body && !this.#chatView.hidden) this.#chat.stop(); // the button that was clicked is gone
    else return;
    event.preventDefault();
  }

  #report(text) {
    replace(this.#problem, h("span", {}, text), iconButton(icons.CLOSE, "Close", () => { this.#problem.hidden = true; }));
    this.#problem.hidden = false;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => { this.#problem.hidden = true; }, 1000 * PROBLEM_SECONDS);
  }

  #showConnection() {
    const { isOnline, needsKey } = this.#session;
    this.#connection.hidden = isOnline;
    replace(this.#connection, "The server cannot be reached. Trying again…");
    if (isOnline && !needsKey) this.#scheduleRefresh(); // without a key, each refresh would ask for the next one
    if (needsKey && !this.#keyDialog.open) this.#askForKey();
  }

  #askForKey() {
    const input = h("input", { type: "password", id: "api-key", autocomplete: "off", "aria-label": "API key" });
    const form = h("form", { method: "dialog", onsubmit: () => this.#useKey(input.value) },
      h("h2", {}, icon(icons.KEY), "API key"), h("p", {}, "This server needs a key. It stays in this browser tab."), input, h("button", { class: "small primary", id: "use-key" }, "Use this key"));
    replace(this.#keyDialog, form);
    this.#keyDialog.showModal();
  }

  #useKey(key) {
    this.#api.key = key.trim();
    this.#session.needsKey = false;
    this.#start();
  }
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "auto";
}

function changeTheme() {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  pageStorage.setItem(THEME_NAME, next);
  applyTheme(next);
}

customElements.define("ag-app", App);
