// The prefix cache: tree of a model, the node under the pointer, actions on it, and the requests below.

import { describe } from "./chat.js";
import { h, icon, replace } from "./dom.js";
import { cleanPrefix, formatBytes, formatCount, formatSeconds } from "./format.js";
import * as icons from "./icons.js";
import { applyEvent } from "./live.js";
import { isSamePrompt, parsePrompt } from "./prompt-text.js";
import { download } from "./sidebar.js";
import { listFacts } from "./tree-view.js";
import "./requests-view.js";

const MAX_NODES = 2000;
const POLL_SECONDS = 2; // besides events
const SETTLE_SECONDS = 0.15; // between an event and the next look at the tree
const RETRY_SECONDS = 2; // after the stream of events ended
const TIERS = [["device", "Device"], ["ram", "RAM"], ["disk", "Disk"], ["checkpoint", "Checkpoint only"]];
const LIST_EVENTS = new Set(["admitted", "finished", "failed"]); // the list has more about them than the event
const QUIET_EVENTS = new Set(["progress", "decoding", "first_token"]); // they do not change the tree

/** Dispatches "continue" with `{messages, rest, isFork}`, "text" with the text of a prefix, and "problem". */
export class CacheView extends HTMLElement {
  #api;
  #session;
  #tree = null;
  #requests = [];
  #selected = null;
  #isActive = false;
  #watching = null; // AbortController while the view is shown
  #dirty = 0;
  #looks = 0; // at the tree: number of the last one that was asked for
  #shownLook = 0;
  #isLooking = false;
  #hasNewRequests = false;
  #frame = 0;
  #totals = h("p", { class: "totals", "aria-live": "polite" });
  #legend = h("ul", { class: "legend", "aria-label": "Colours" }, TIERS.map(([tier, name]) => h("li", {}, h("span", { class: `swatch tier-${tier}` }), name)));
  #view = h("ag-tree");
  #card = h("aside", { class: "card", "aria-live": "polite" });
  #actions = null; // buttons of the selected node in the card
  #requestsView = h("ag-requests");

  setUp(api, session) {
    this.#api = api;
    this.#session = session;
    this.#requestsView.setUp(api);
    const head = h("div", { class: "cache-head" }, h("h1", {}, "What is cached"), this.#totals, this.#legend);
    this.append(head, h("div", { class: "cache-body" }, this.#view, this.#card), this.#requestsView);
    this.#view.addEventListener("select", (event) => this.#select(event.detail));
    this.#view.addEventListener("hover", (event) => this.#showCard(event.detail ?? this.#selected));
    document.addEventListener("visibilitychange", () => this.#follow());
    session.addEventListener("models", () => { if (this.#watching && this.#tree?.model !== session.model) this.#reload().catch(() => {}); });
    this.#showCard(null);
    return this;
  }

  set isActive(value) {
    this.#isActive = value;
    if (!value) this.#requestsView.close();
    this.#follow();
  }

  /** Look at the server while this view is shown, and only then. A browser opens few connections: hidden tabs need none. */
  #follow() {
    const isShown = this.#isActive && document.visibilityState === "visible";
    if (isShown === (this.#watching !== null)) return;
    this.#watching?.abort();
    this.#watching = isShown ? new AbortController() : null;
    if (isShown) this.#watch(this.#watching.signal);
  }

  /** Show what a request reused and where its prompt differs from the cache. */
  openRequest(id) {
    this.#requestsView.open(id);
  }

  async #watch(signal) {
    const poll = setInterval(() => { if (!this.#isLooking) this.#loadTree(); }, 1000 * POLL_SECONDS);
    signal.addEventListener("abort", () => clearInterval(poll));
    while (!signal.aborted) {
      try {
        const lastEvent = await this.#reload(); // the stream continues where the list of requests ends
        for await (const event of this.#api.stream("GET", `/events?after=${lastEvent}`, undefined, signal)) this.#onEvent(event);
      } catch (error) {
        if (!signal.aborted && error.status > 0 && error.status < 500) this.#report(error);
      }
      await new Promise((resolve) => setTimeout(resolve, 1000 * RETRY_SECONDS));
    }
  }

  async #reload() {
    this.#tree = null;
    const lastEvent = await this.#loadRequests();
    await this.#loadTree();
    return lastEvent;
  }

  async #loadTree() {
    const { model } = this.#session;
    if (!model || !this.#watching) return;
    const since = this.#tree?.model === model ? `&since=${this.#tree.version}` : "";
    const look = ++this.#looks;
    this.#isLooking = true;
    try {
      const tree = await this.#api.get(`/tree?model=${encodeURIComponent(model)}&max_nodes=${MAX_NODES}${since}`);
      if (!tree || model !== this.#session.model || look < this.#shownLook) return; // or a newer one is shown
      this.#shownLook = look;
      this.#tree = { ...tree, model }; // by the name of an adapter, the tree is that of its model
      this.#showTree();
    } catch (error) {
      if (error.status > 0 && error.status < 500) this.#report(error); // a restart of the engine shows in its state
    } finally {
      if (look === this.#looks) this.#isLooking = false;
    }
  }

  #onEvent(event) {
    if (event.type === "gap") return void this.#reload().catch(() => {}); // the next event or poll tries again
    const next = applyEvent(this.#requests, event);
    if (next !== this.#requests) {
      this.#requests = next;
      this.#frame ||= requestAnimationFrame(() => {
        this.#frame = 0;
        this.#requestsView.show(this.#requests);
      });
    }
    this.#hasNewRequests ||= LIST_EVENTS.has(event.type);
    if (!QUIET_EVENTS.has(event.type)) this.#dirty ||= setTimeout(() => this.#settle(), 1000 * SETTLE_SECONDS);
  }

  async #settle() {
    this.#dirty = 0;
    await this.#loadTree();
    if (!this.#hasNewRequests || !this.#watching) return;
    this.#hasNewRequests = false;
    await this.#run(() => this.#loadRequests());
  }

  async #loadRequests() {
    const { requests, last_event: lastEvent } = await this.#api.get("/requests?limit=1000");
    this.#requests = requests;
    this.#requestsView.show(this.#requests);
    return lastEvent;
  }

  #showTree() {
    const { nodes, total_nodes: total } = this.#tree;
    this.#view.show(this.#tree);
    this.#selected = nodes.find(({ id }) => id === this.#selected?.id) ?? null;
    this.#showCard(this.#selected);
    const sum = (count) => nodes.reduce((result, node) => result + count(node), 0);
    const tokens = sum((node) => node.end - node.start);
    const leaves = nodes.length - new Set(nodes.map(({ parent }) => parent).filter(Boolean)).size;
    const bytes = sum((node) => (node.bytes?.ram ?? 0) + (node.bytes?.disk ?? 0));
    const folded = total > nodes.length ? ` · ${formatCount(total - nodes.length)} nodes folded` : "";
    const saved = sum((node) => node.seconds_saved);
    const text = `${formatCount(leaves)} ${leaves === 1 ? "branch" : "branches"} · ${formatCount(tokens)} tokens${bytes ? ` · ${formatBytes(bytes)}` : ""}${saved > 0.05 ? ` · ${formatSeconds(saved)} of prefill saved` : ""}${folded}`;
    replace(this.#totals, nodes.length ? text : "Nothing is cached yet. Send a message and look again.");
  }

  #select(node) {
    this.#selected = node;
    this.#showCard(node);
  }

  #showCard(node) {
    this.#card.classList.toggle("empty", !node);
    if (!node) {
      this.#actions = null;
      replace(this.#card, h("p", {}, "Width is tokens, height is the number of conversations that share them. Select a prefix for its details; double-click or Enter zooms in, Escape zooms out."));
      return;
    }
    const facts = h("dl", {}, listFacts(node).map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
    const text = h("p", { class: "prefix-text" }, cleanPrefix(node.text) || "no text");
    const key = node.id === this.#selected?.id ? `${this.#session.model} ${node.id} ${node.pinned}` : null;
    if (key && this.#actions?.dataset.key === key) { // a button that is removed or moves while it is pressed is not clicked
      this.#actions.nextSibling.replaceWith(facts);
      return;
    }
    this.#actions = key && this.#buildActions(node, key);
    replace(this.#card, text, this.#actions, facts);
  }

  #buildActions(node, key) {
    const action = (path, label, run) => h("button", { type: "button", class: "quiet", onclick: () => this.#run(run) }, icon(path), label);
    return h("div", { class: "actions", "data-key": key },
      action(icons.PLAY, "Continue from here", () => this.#continue(node, false)),
      action(icons.FORK, "Fork", () => this.#continue(node, true)),
      action(icons.PIN, node.pinned ? "Unpin" : "Pin", () => this.#post(node.pinned ? "unpin" : "pin", node)),
      action(icons.DOWNLOAD, "Export", () => this.#export(node)),
      action(icons.TRASH, "Forget", () => this.#post("forget", node)));
  }

  async #post(action, node) {
    await this.#api.post(`/tree/${action}`, { model: this.#session.model, id: node.id });
    this.#tree = null;
    await this.#loadTree();
  }

  async #export(node) {
    const response = await this.#api.request("GET", `/tree/export?model=${encodeURIComponent(this.#session.model)}&id=${encodeURIComponent(node.id)}`);
    const name = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "")?.[1];
    download(name ?? `${this.#session.model}-${node.id.slice(0, 8)}.afterglow`, await response.blob());
  }

  /** Open the prefix as a conversation if the server renders its messages to the same text, else as text. */
  async #continue(node, isFork) {
    const { model } = this.#session;
    const { text } = await this.#api.get(`/tree/prompt?model=${encodeURIComponent(model)}&id=${encodeURIComponent(node.id)}`);
    const parsed = parsePrompt(text);
    if (parsed?.messages.length && isSamePrompt(text, await this.#render(model, parsed))) {
      this.dispatchEvent(new CustomEvent("continue", { detail: { ...parsed, isFork } }));
      return;
    }
    this.dispatchEvent(new CustomEvent("text", { detail: text }));
  }

  /** The messages of a prompt as the server renders them, or null if the template refuses them, e.g. without a question. */
  async #render(model, { messages, rest }) {
    try {
      const isAnswer = rest === null || rest.role === "assistant";
      return (await this.#api.post("/apply-template", { model, messages, add_generation_prompt: isAnswer })).prompt;
    } catch (error) {
      if (error.status !== 400) throw error;
      return null;
    }
  }

  #run(work) {
    return work().catch((error) => this.#report(error));
  }

  #report(error) {
    this.dispatchEvent(new CustomEvent("problem", { detail: describe(error), bubbles: true }));
  }
}

customElements.define("ag-cache", CacheView);
