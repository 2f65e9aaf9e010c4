// One message: text, files, reasoning, tool calls and what it cost.

import { getKind } from "./attachments.js";
import { describeGeneration } from "./chat.js";
import { getFiles, getSiblings, getText } from "./conversation.js";
import { gauge, h, icon, iconButton, replace } from "./dom.js";
import { formatCount, formatPrefill, formatRate, formatReuse, formatSeconds } from "./format.js";
import * as icons from "./icons.js";
import { copyButton, renderMarkdown } from "./render.js";

const ROLE_NAMES = { user: "You", assistant: "Model", tool: "Tool result", system: "System" };

export class MessageView extends HTMLElement {
  #chat;
  #node;
  #actions;
  #text = h("div", { class: "text" });
  #reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), h("div", { class: "reasoning-text" }));
  #calls = h("div", { class: "calls" });
  #status = h("div", { class: "message-status" });
  #footer = h("div", { class: "message-footer" });
  #callTexts = "";

  /** `actions`: edit, regenerate, continue, remove, switchBranch. */
  setUp(chat, node, actions) {
    this.#chat = chat;
    this.#actions = actions;
    this.#node = node;
    this.dataset.role = node.message.role;
    this.dataset.id = node.id;
    this.setAttribute("role", "article");
    this.setAttribute("aria-label", ROLE_NAMES[node.message.role]);
    const author = node.message.role === "assistant" ? node.info?.model || ROLE_NAMES.assistant : ROLE_NAMES[node.message.role];
    const head = h("div", { class: "message-head" }, author);
    replace(this, head, this.#buildFiles(), this.#reasoning, this.#text, this.#calls, this.#status, this.#footer);
    this.update(node);
    return this;
  }

  get node() {
    return this.#node;
  }

  /** Show the current text of the message. */
  update(node) {
    this.#node = node;
    const { message } = node;
    const text = getText(node);
    if (message.role === "assistant") renderMarkdown(this.#text, text);
    else replace(this.#text, text);
    this.#text.classList.toggle("plain", message.role !== "assistant");
    this.#updateThoughts(message, text);
    this.#updateCalls(message);
    this.updateStatus();
  }

  /** Show the progress of a response that is streaming, or what a finished one cost. */
  updateStatus() {
    const generation = this.#chat.generation?.id === this.#node.id ? this.#chat.generation : null;
    this.classList.toggle("streaming", generation !== null);
    this.setAttribute("aria-busy", String(generation !== null));
    if (generation) {
      replace(this.#status, ...this.#buildProgress(generation));
      replace(this.#footer);
    } else {
      replace(this.#status, this.#buildProblem());
      replace(this.#footer, ...this.#buildFooter());
    }
  }

  #updateThoughts(message, text) {
    const reasoning = message.reasoning_content ?? "";
    this.#reasoning.hidden = !reasoning;
    if (!reasoning) return;
    const isThinking = this.#chat.generation?.id === this.#node.id && !text;
    this.#reasoning.firstChild.textContent = isThinking ? "Thinking…" : "Reasoning";
    this.#reasoning.lastChild.textContent = reasoning;
  }

  #updateCalls(message) {
    const texts = JSON.stringify(message.tool_calls ?? []);
    if (texts === this.#callTexts) return;
    this.#callTexts = texts;
    replace(this.#calls, ...(message.tool_calls ?? []).filter(Boolean).map(buildCall));
  }

  #buildFiles() {
    const files = getFiles(this.#node);
    return files.length ? h("div", { class: "files" }, files.map(({ name, part }) => buildFile(name, part))) : null;
  }

  #buildProgress(generation) {
    const state = describeGeneration(generation, performance.now() / 1000);
    if (state.phase === "decoding") {
      return [h("span", { class: "pulse" }), h("span", {}, `${formatCount(state.tokens)} tokens${state.rate === null ? "" : ` · ${formatRate(state.rate)}`}`)];
    }
    if (state.phase === "queued") return [h("span", { class: "pulse" }), h("span", {}, "waiting")];
    const bar = gauge(state.total ? state.done / state.total : 0, "Prefill", "progressbar");
    const cached = state.cached ? ` · ${formatCount(state.cached)} from the cache` : "";
    return [bar, h("span", {}, formatPrefill(state.done, state.total, state.secondsLeft) + cached)];
  }

  #buildProblem() {
    const { info } = this.#node;
    if (info?.state === "failed") {
      const retry = h("button", { type: "button", class: "small", onclick: () => this.#actions.regenerate(this.#node) }, "Try again");
      return h("div", { class: "problem", role: "alert" }, h("span", {}, info.error ?? "the request failed"), retry);
    }
    const notes = { stopped: "Stopped.", partial: "This response was interrupted." };
    const note = notes[info?.state] ?? (info?.finish_reason === "length" ? "Ended at the token limit." : null);
    if (!note || this.#node.message.role !== "assistant") return null;
    const isLast = this.#chat.conversation.leaf === this.#node.id && getText(this.#node);
    return h("div", { class: "note" }, note, isLast && h("button", { type: "button", class: "small", onclick: () => this.#actions.continue(this.#node) }, "Continue"));
  }

  #buildFooter() {
    const { message, info } = this.#node;
    const { edit, regenerate, remove } = this.#actions;
    const isBusy = this.#chat.generation !== null;
    const buttons = [
      message.role === "assistant" && iconButton(icons.RETRY, "Regenerate", () => regenerate(this.#node), { disabled: isBusy }),
      message.role === "user" && iconButton(icons.EDIT, "Edit: a new branch", () => edit(this), { disabled: isBusy }),
      getText(this.#node) && copyButton(() => getText(this.#node)),
      iconButton(icons.TRASH, "Delete this message and what follows", () => remove(this.#node), { disabled: isBusy }),
    ];
    return [this.#buildSwitch(isBusy), ...buttons, buildCost(message, info)].filter(Boolean);
  }

  #buildSwitch(isBusy) {
    const siblings = getSiblings(this.#chat.conversation.messages, this.#node.id);
    if (siblings.length < 2) return null;
    const index = siblings.findIndex(({ id }) => id === this.#node.id);
    const go = (offset) => () => this.#actions.switchBranch(this.#node, offset);
    return h("span", { class: "branches", role: "group", "aria-label": "Branches" },
      iconButton(icons.LEFT, "Previous branch", go(-1), { disabled: isBusy || index === 0 }),
      h("span", { class: "branch-number" }, `${index + 1}/${siblings.length}`),
      iconButton(icons.RIGHT, "Next branch", go(1), { disabled: isBusy || index === siblings.length - 1 }));
  }
}

function buildCost(message, info) {
  if (message.role !== "assistant" || !info?.prompt_tokens) return null;
  const computed = info.prompt_tokens - info.cached_tokens;
  const rate = info.decode_seconds > 0 && info.generated_tokens > 1 ? ` · ${formatRate((info.generated_tokens - 1) / info.decode_seconds)}` : "";
  const text = `${formatReuse(info.cached_tokens, info.prompt_tokens)}, computed ${formatCount(computed)}${rate}`;
  const details = `${formatCount(info.generated_tokens ?? 0)} tokens generated; first token after ${formatSeconds(info.prefill_seconds ?? 0)}`;
  const share = info.cached_tokens / info.prompt_tokens;
  const bar = gauge(share, "Share of the prompt from the cache");
  return h("a", { class: "cost", href: info.request ? `#/cache/${encodeURIComponent(info.request)}` : "#/cache", title: details }, bar, text);
}

function buildCall(call) {
  const name = h("span", { class: "call-name" }, call.function.name);
  return h("details", { class: "call", open: true }, h("summary", {}, "Tool call ", name), h("pre", {}, formatArguments(call.function.arguments)));
}

function formatArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still streaming
  }
}

/** A file of a message or of the composer. */
export function buildFile(name, part, onRemove = null) {
  const remove = onRemove && iconButton(icons.CLOSE, `Remove ${name}`, onRemove);
  const label = h("span", { class: "file-name" }, name);
  switch (getKind(part)) {
    case "image": {
      const image = h("img", { src: safeImage(part.image_url.url), alt: name });
      return h("figure", { class: "file image" }, image, h("figcaption", {}, label, remove));
    }
    case "audio": {
      const player = h("audio", { controls: true, src: `data:audio/${part.input_audio.format};base64,${part.input_audio.data}` });
      return h("figure", { class: "file audio" }, player, h("figcaption", {}, label, remove));
    }
    default:
      return h("details", { class: "file text" }, h("summary", {}, icon(icons.FILE), label, remove), h("pre", {}, part.text));
  }
}

function safeImage(url) {
  return url.startsWith("data:image/") ? url : null; // other addresses are not loaded by the page
}

customElements.define("ag-message", MessageView);
