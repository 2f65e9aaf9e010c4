// The input of a conversation: text, files by picker, paste and drop, send and stop.

import { getKind, readAttachment } from "./attachments.js";
import { h, iconButton, replace } from "./dom.js";
import * as icons from "./icons.js";
import { buildFile } from "./message-view.js";

/** Dispatches "send" with `{text, files}`, "stop", and "problem" with a text. */
export class Composer extends HTMLElement {
  #files = [];
  #reading = Promise.resolve(); // files that are not in the list yet
  #list = h("div", { class: "files" });
  #input = h("textarea", { id: "composer-text", rows: 1, placeholder: "Write a message", "aria-label": "Message", onkeydown: (event) => this.#onKey(event), oninput: () => this.#resize() });
  #picker = h("input", { type: "file", multiple: true, hidden: true, "aria-hidden": "true", onchange: () => this.#pick() });
  #send = iconButton(icons.SEND, "Send (Enter)", () => this.#submit(), { class: "send", id: "send" });
  #stop = iconButton(icons.STOP, "Stop (Escape)", () => this.dispatchEvent(new Event("stop")), { class: "send stop", id: "stop", hidden: true });

  connectedCallback() {
    if (this.firstChild) return;
    const attach = iconButton(icons.CLIP, "Attach files", () => this.#picker.click(), { id: "attach" });
    this.append(this.#list, h("div", { class: "composer-row" }, attach, this.#picker, this.#input, this.#send, this.#stop));
    this.#input.addEventListener("paste", (event) => this.#onPaste(event));
    for (const name of ["dragover", "drop", "dragleave"]) this.addEventListener(name, (event) => this.#onDrag(event));
    this.#showFiles();
  }

  get text() {
    return this.#input.value;
  }

  set text(value) {
    this.#input.value = value;
    this.#resize();
  }

  /** The kinds of the attached files, to compare with what a model accepts. */
  get kinds() {
    return new Set(this.#files.map(({ part }) => getKind(part)));
  }

  set isBusy(value) {
    this.#send.hidden = value;
    this.#stop.hidden = !value;
  }

  focus() {
    this.#input.focus();
  }

  clear() {
    this.text = "";
    this.#files = [];
    this.#showFiles();
  }

  /** Put back what could not be sent, unless there is a new text. */
  restore(text, files) {
    if (this.text || this.#files.length) return;
    this.text = text;
    this.#files = files;
    this.#showFiles();
  }

  addFiles(files) {
    this.#reading = this.#reading.then(() => this.#readFiles(files));
  }

  async #readFiles(files) {
    for (const file of files) {
      try {
        this.#files = [...this.#files, await readAttachment(file)];
      } catch (error) {
        this.dispatchEvent(new CustomEvent("problem", { detail: error.message }));
      }
    }
    this.#showFiles();
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#submit();
    }
  }

  async #submit() {
    await this.#reading;
    const text = this.text.trim();
    if (!this.#send.hidden && (text || this.#files.length)) {
      this.dispatchEvent(new CustomEvent("send", { detail: { text, files: this.#files } }));
    }
  }

  #pick() {
    this.addFiles([...this.#picker.files]);
    this.#picker.value = "";
  }

  /** Take pasted files, but not the picture that office programs put beside a formatted text. */
  #onPaste(event) {
    const { types, files } = event.clipboardData;
    if (!["text/plain", "text/html"].every((type) => types.includes(type))) this.#takeFiles(event, files);
  }

  #takeFiles(event, files) {
    if (!files.length) return;
    event.preventDefault();
    this.addFiles([...files]);
  }

  #onDrag(event) {
    if (!event.dataTransfer.types.includes("Files")) return; // the browser moves text itself
    event.preventDefault();
    this.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop") this.#takeFiles(event, event.dataTransfer.files);
  }

  #showFiles() {
    this.#list.hidden = !this.#files.length;
    replace(this.#list, this.#files.map(({ name, part }, index) => buildFile(name, part, () => {
      this.#files = this.#files.toSpliced(index, 1);
      this.#showFiles();
    })));
  }

  #resize() {
    this.#input.style.height = "auto";
    this.#input.style.height = `${Math.min(this.#input.scrollHeight, window.innerHeight * 0.4)}px`;
  }
}

customElements.define("ag-composer", Composer);
