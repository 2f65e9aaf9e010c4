// Live requests, and the finished ones with what they reused and why not more.

import { describe } from "./chat.js";
import { compareTexts } from "./difference.js";
import { gauge, h, iconButton, replace } from "./dom.js";
import { formatAge, formatCount, formatPrefill, formatRate, formatReuse, formatSeconds } from "./format.js";
import * as icons from "./icons.js";
import { isLive } from "./live.js";

const SHOWN = 100; // finished requests, until more are asked for

export class RequestsView extends HTMLElement {
  #api;
  #requests = [];
  #shown = SHOWN;
  #rows = []; // the finished requests in the list
  #live = h("div", { class: "live-requests", "aria-live": "polite" });
  #finished = h("ul", { class: "finished-requests" });
  #dialog = h("dialog", { class: "difference", "aria-label": "Difference" });

  setUp(api) {
    this.#api = api;
    this.append(h("h2", {}, "Now"), this.#live, h("h2", {}, "Finished"), this.#finished, this.#dialog);
    return this;
  }

  show(requests) {
    this.#requests = requests;
    const live = requests.filter(isLive);
    const finished = requests.filter((request) => !isLive(request));
    replace(this.#live, live.length ? live.map(buildLive) : h("p", { class: "empty" }, "Nothing is running."));
    this.#showFinished(finished);
  }

  /** Build the list again only if it has changed: a button that is removed while it is pressed is not clicked. */
  #showFinished(finished) {
    const isSame = finished.length === this.#rows.length && finished.every((request, index) => request === this.#rows[index]);
    if (isSame && this.#finished.firstChild) return this.#updateAges();
    this.#rows = finished;
    replace(this.#finished, finished.slice(0, this.#shown).map((request) => this.#buildFinished(request)));
    if (!finished.length) replace(this.#finished, h("li", { class: "empty" }, "No requests yet."));
    if (finished.length > this.#shown) this.#finished.append(h("li", {}, h("button", { type: "button", class: "quiet", onclick: () => this.#showMore() }, `Show ${formatCount(finished.length - this.#shown)} more`)));
  }

  #updateAges() {
    const ages = this.#finished.querySelectorAll(".age");
    for (const [index, age] of ages.entries()) age.textContent = formatAge(Date.now() / 1000 - this.#rows[index].created);
  }

  #showMore() {
    this.#shown += 10 * SHOWN;
    this.#rows = [];
    this.show(this.#requests);
  }

  #buildFinished(request) {
    const why = request.has_difference && h("button", { type: "button", class: "quiet why", onclick: () => this.open(request.id) }, "Compare both texts");
    const saved = request.seconds_saved > 0.05 ? ` · saved ${formatSeconds(request.seconds_saved)}` : "";
    const rate = request.tokens_per_second > 0 ? ` · ${formatRate(request.tokens_per_second)}` : "";
    const tier = request.tier && request.tier !== "none" ? h("span", { class: `chip tier-${request.tier}` }, request.tier === "ram" ? "RAM" : request.tier) : null;
    const state = request.state === "finished" ? null : h("span", { class: "chip state-chip" }, request.state);
    return h("li", { class: `request state-${request.state}`, "data-request": request.id },
      h("div", { class: "request-head" }, h("span", { class: "first-words" }, request.first_words || "no text"), tier, state, h("span", { class: "age" }, formatAge(Date.now() / 1000 - request.created))),
      buildReuseBar(request),
      h("div", { class: "request-text" }, formatOutcome(request), h("span", { class: "numbers" }, `${formatCount(request.generated_tokens)} generated${rate}${saved}`), why));
  }

  /** Show both texts around the first difference of a request. */
  async open(id) {
    try {
      const request = await this.#api.get(`/requests/${encodeURIComponent(id)}`);
      replace(this.#dialog, ...this.#buildDifference(request));
      if (!this.closest("[hidden]")) this.#dialog.showModal();
    } catch (error) {
      this.dispatchEvent(new CustomEvent("problem", { detail: describe(error), bubbles: true }));
    }
  }

  /** Close the dialog with this view: one that is not shown still blocks the page. */
  close() {
    this.#dialog.close();
  }

  #buildDifference(request) {
    const close = iconButton(icons.CLOSE, "Close", () => this.#dialog.close());
    const { difference } = request;
    if (!difference) return [h("div", { class: "panel-head" }, h("h2", {}, formatOutcome(request)), close), h("p", {}, "No cached text differs from this prompt.")];
    const [cached, prompt] = compareTexts(difference.cached_text, difference.prompt_text);
    const side = (title, parts) => h("section", {}, h("h3", {}, title), h("pre", { tabindex: "0" }, parts.map(({ text, isEqual }) => (isEqual ? text : h("mark", {}, text)))));
    return [
      h("div", { class: "panel-head" }, h("h2", {}, formatOutcome(request)), close),
      h("p", {}, `The texts differ at token ${formatCount(difference.position)}: ${difference.cause}`),
      h("div", { class: "sides" }, side("In the cache", cached), side("In this prompt", prompt)),
    ];
  }
}

/** What a request reused and why not more. The server writes the sentence when the prompt is planned. */
export function formatOutcome(request) {
  return request.reason || `${formatReuse(request.cached_tokens, request.prompt_tokens)}; computed ${formatCount(request.prompt_tokens - request.cached_tokens)}`;
}

/** State of a live request in a few words. */
export function formatLive(request) {
  if (request.state === "prefill") return formatPrefill(request.prefill_done ?? 0, request.prompt_tokens);
  if (request.state === "decoding") return request.tokens_per_second ? formatRate(request.tokens_per_second) : "decoding";
  return "queued";
}

function buildLive(request) {
  const share = request.state === "decoding" ? 1 : request.prompt_tokens ? (request.prefill_done ?? 0) / request.prompt_tokens : 0;
  return h("div", { class: "live-request", "data-request": request.id, "data-state": request.state },
    h("span", { class: "pulse" }),
    h("span", { class: "first-words" }, request.first_words || request.model || "request"),
    gauge(share, "Prefill", "progressbar"),
    h("span", { class: "numbers" }, formatLive(request)));
}

function buildReuseBar(request) {
  const share = request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : 0;
  return gauge(share, "From the cache");
}

customElements.define("ag-requests", RequestsView);
