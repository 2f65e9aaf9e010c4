// List of the stored conversations: search, rename, delete, export, import.

import { describe } from "./chat.js";
import { h, icon, iconButton, replace } from "./dom.js";
import { firstLine, formatAge } from "./format.js";
import * as icons from "./icons.js";

const EXPORT_FORMAT = { format: "afterglow-conversations", version: 1 };

/** Dispatches "open" with an id, "new", and "problem" with a text. */
export class Sidebar extends HTMLElement {
  #api;
  #conversations = [];
  #current = null;
  #isEditing = false; // a row has an input or a question: the list is not built again
  #shown = null; // what the rows show; null: other things
  #refreshes = 0;
  #search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.#show() });
  #list = h("ul", { class: "conversations" });
  #picker = h("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-hidden": "true", id: "import-file", onchange: () => this.#import() });

  setUp(api) {
    this.#api = api;
    const create = h("button", { type: "button", class: "new", id: "new-chat", onclick: () => this.dispatchEvent(new Event("new")) }, icon(icons.PLUS), "New conversation");
    const foot = h("div", { class: "sidebar-foot" },
      h("button", { type: "button", class: "quiet", onclick: () => this.#exportAll() }, icon(icons.DOWNLOAD), "Export all"),
      h("button", { type: "button", class: "quiet", onclick: () => this.#picker.click() }, icon(icons.UPLOAD), "Import"), this.#picker);
    this.append(create, this.#search, this.#list, foot);
    return this;
  }

  get current() {
    return this.#current;
  }

  set current(id) {
    this.#current = id;
    this.#isEditing = false;
    this.#show();
  }

  async refresh() {
    const number = ++this.#refreshes;
    const { conversations } = await this.#api.get("/conversations");
    if (number < this.#refreshes) return; // a newer list is on its way
    this.#conversations = conversations;
    this.#show();
  }

  #show() {
    if (this.#isEditing) return;
    const words = this.#search.value.trim().toLowerCase();
    const shown = this.#conversations.filter(({ title }) => title.toLowerCase().includes(words));
    const rows = JSON.stringify([this.#current, words, shown.map(({ id, title, updated }) => [id, title, formatRowAge(updated)])]);
    if (rows === this.#shown) return; // a row that is built again loses the focus, and a click that is under way
    this.#shown = rows;
    replace(this.#list, shown.map((conversation) => this.#buildRow(conversation)));
    if (!shown.length) replace(this.#list, h("li", { class: "empty" }, words ? "Nothing found." : "No conversations yet."));
  }

  #buildRow(conversation) {
    const { id, title, updated } = conversation;
    const isCurrent = id === this.#current;
    const open = h("button", { type: "button", class: "conversation", "aria-current": isCurrent && "true", onclick: () => this.dispatchEvent(new CustomEvent("open", { detail: id })) },
      h("span", { class: "title" }, title || "Untitled"), h("span", { class: "age" }, formatRowAge(updated)));
    const row = h("li", { class: isCurrent && "current" }, open, h("span", { class: "row-actions" },
      iconButton(icons.EDIT, `Rename ${title}`, () => this.#rename(row, conversation)),
      iconButton(icons.DOWNLOAD, `Export ${title}`, () => this.#exportOne(id)),
      iconButton(icons.TRASH, `Delete ${title}`, () => this.#confirmDelete(row, conversation))));
    return row;
  }

  #startEditing() {
    this.#isEditing = true;
    this.#shown = null;
  }

  #rename(row, { id, title }) {
    const input = h("input", { type: "text", value: title, maxlength: 200, "aria-label": "Title" });
    let isDone = false;
    const finish = (isKept) => {
      if (isDone) return;
      isDone = true;
      this.#isEditing = false;
      const next = input.value.trim();
      if (isKept && next && next !== title) this.#run(this.#api.patch(`/conversations/${id}`, { title: next }).then(() => this.refresh()).finally(() => this.#show()));
      else this.#show();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) finish(true);
      if (event.key === "Escape") finish(false);
    });
    input.addEventListener("blur", () => finish(true));
    this.#startEditing();
    replace(row, input);
    input.select();
  }

  #confirmDelete(row, { id, title }) {
    const answer = (work) => () => {
      this.#isEditing = false;
      this.#run(work());
    };
    const remove = h("button", { type: "button", class: "small danger", onclick: answer(() => this.#delete(id)) }, "Delete");
    const cancel = h("button", { type: "button", class: "small", onclick: answer(async () => this.#show()) }, "Keep");
    this.#startEditing();
    replace(row, h("span", { class: "confirm" }, h("span", {}, `Delete “${firstLine(title, 30)}”?`), remove, cancel));
    remove.focus();
  }

  async #delete(id) {
    await this.#api.delete(`/conversations/${id}`);
    await this.refresh();
    if (id === this.#current) this.dispatchEvent(new Event("new"));
  }

  async #exportOne(id) {
    await this.#run(this.#api.get(`/conversations/${id}`).then((conversation) => {
      download(`${firstLine(conversation.title, 40) || "conversation"}.json`, { ...EXPORT_FORMAT, conversations: [conversation] });
    }));
  }

  async #exportAll() {
    await this.#run(this.#api.get("/conversations/export").then((document) => download("conversations.json", document)));
  }

  /** Import a file, one conversation per request: each may be as large as a request. */
  async #import() {
    const [file] = this.#picker.files;
    this.#picker.value = "";
    await this.#run(file.text().then(async (text) => {
      const { conversations, ...format } = JSON.parse(text);
      for (const conversation of conversations) await this.#api.post("/conversations/import", { ...format, conversations: [conversation] });
    }).finally(() => this.refresh()));
  }

  #run(promise) {
    return promise.catch((error) => {
      const text = error instanceof SyntaxError || error instanceof TypeError ? "The file is not an export of conversations." : describe(error);
      this.dispatchEvent(new CustomEvent("problem", { detail: text, bubbles: true }));
    });
  }
}

function formatRowAge(updated) {
  return formatAge(Date.now() / 1000 - updated);
}

/** Save a value as a JSON file, or a blob as it is. */
export function download(name, value) {
  const blob = value instanceof Blob ? value : new Blob([JSON.stringify(value, null, 1)], { type: "application/json" });
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name.replaceAll(/[\\/:*?"<>|]/g, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

customElements.define("ag-sidebar", Sidebar);
