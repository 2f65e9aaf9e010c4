// The prefix tree as an SVG icicle with a card about the node under the pointer or the focus.

import { h, replace, svg } from "./dom.js";
import { cleanPrefix, formatAge, formatBytes, formatCount, formatSeconds } from "./format.js";
import { chooseMarks, getNeighbour, layoutTree } from "./tree-layout.js";

const AXIS_HEIGHT = 22;
const MIN_TEXT_WIDTH = 44;
const MIN_TEXT_HEIGHT = 13;
const CHARACTER_WIDTH = 6.4;
const TIER_NAMES = { device: "device", ram: "RAM", disk: "disk", checkpoint: "checkpoint only" };
const TREE_KEYS = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home"]);

/** Dispatches "select" with a node or null, and "drawn" with the milliseconds of the drawing. */
export class TreeView extends HTMLElement {
  #tree = { nodes: [] };
  #focus = null; // node to which the view is zoomed
  #selected = null;
  #canvas = svg("svg", { class: "icicle", role: "tree", "aria-label": "Prefix tree", tabindex: "0" });
  #path = h("nav", { class: "zoom", "aria-label": "Zoom" });
  #height = 380; // of the rows, if they fit
  #isPressed = false; // a node that is drawn again while it is pressed is not clicked
  #isStale = false;

  connectedCallback() {
    if (this.firstChild) return;
    this.append(this.#path, h("div", { class: "icicle-scroll" }, this.#canvas));
    this.#canvas.addEventListener("click", (event) => this.#select(this.#find(event)));
    this.#canvas.addEventListener("dblclick", (event) => this.#zoom(this.#find(event)));
    this.#canvas.addEventListener("pointermove", (event) => this.#hover(this.#find(event)));
    this.#canvas.addEventListener("pointerleave", () => this.#hover(null));
    this.#canvas.addEventListener("pointerdown", () => { this.#isPressed = true; });
    for (const name of ["pointerup", "pointercancel", "blur"]) window.addEventListener(name, () => this.#release());
    this.#canvas.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.draw()).observe(this);
  }

  get selected() {
    return this.#selected;
  }

  get focused() {
    return this.#focus;
  }

  show(tree) {
    this.#tree = tree;
    const ids = new Set(tree.nodes.map(({ id }) => id));
    if (!ids.has(this.#focus)) this.#focus = null;
    if (this.#selected && !ids.has(this.#selected)) this.#select(null);
    this.draw();
  }

  zoom(id) {
    this.#focus = id;
    this.draw();
  }

  draw() {
    this.#isStale = this.#isPressed;
    if (this.#isPressed) return;
    const started = performance.now();
    const width = Math.max(280, this.clientWidth);
    const layout = layoutTree(this.#tree.nodes, { width, height: this.#height, focus: this.#focus });
    const marks = chooseMarks(layout.start, layout.end, width / 110);
    const height = layout.height + AXIS_HEIGHT;
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) this.#canvas.setAttribute(name, value);
    replace(this.#canvas, buildAxis(marks, layout, height), layout.rectangles.map((rectangle) => this.#buildNode(rectangle)));
    this.#showPath();
    this.dispatchEvent(new CustomEvent("drawn", { detail: { milliseconds: performance.now() - started, rectangles: layout.rectangles.length } }));
  }

  #buildNode({ node, tier, x, y, width, height, hidden, depth }) {
    const gap = height > 6 ? 1.5 : height > 3 ? 0.5 : 0;
    const box = { x: round(x), y: round(y + AXIS_HEIGHT), width: round(Math.max(1, width - (width > 6 ? 1.5 : 0))), height: round(Math.max(0.5, height - gap)) };
    const isSelected = node.id === this.#selected && !hidden;
    const classes = ["node", `tier-${tier}`, hidden && "hidden-nodes", isSelected && "selected", node.pinned && "pinned", node.requests?.length && "live"];
    const group = svg("g", { class: classes.filter(Boolean).join(" "), "data-id": node.id, "data-hidden": hidden || null, role: "treeitem", "aria-level": depth || null, "aria-selected": String(isSelected), "aria-label": hidden ? `${hidden} more` : describeNode(node) },
      svg("rect", { ...box, rx: height > 6 ? 3 : 0 }));
    const canHaveText = !hidden && box.width >= MIN_TEXT_WIDTH && box.height >= MIN_TEXT_HEIGHT;
    if (canHaveText) group.append(...buildLabel(node, box));
    if (!hidden && box.width >= 8 && box.height >= 8) group.append(...buildMarks(node, box));
    return group;
  }

  #showPath() {
    const byId = new Map(this.#tree.nodes.map((node) => [node.id, node]));
    const path = [];
    for (let node = byId.get(this.#focus); node; node = byId.get(node.parent)) path.unshift(node);
    this.#path.hidden = !path.length;
    const all = h("button", { type: "button", class: "quiet", onclick: () => this.zoom(null) }, "All");
    replace(this.#path, all, path.map((node) => h("button", { type: "button", class: "quiet", onclick: () => this.zoom(node.id) }, `› ${shorten(cleanPrefix(node.text), 24)}`)));
  }

  #release() {
    this.#isPressed = false;
    if (this.#isStale) setTimeout(() => this.draw()); // after the click
  }

  #find(event) {
    const group = event.target.closest?.("g.node");
    return group ? this.#tree.nodes.find(({ id }) => id === group.dataset.id) : null;
  }

  #select(node) {
    this.#selected = node?.id ?? null;
    this.#markSelected();
    this.dispatchEvent(new CustomEvent("select", { detail: node ?? null }));
  }

  #markSelected() {
    for (const group of this.#canvas.querySelectorAll("g.node")) {
      const isSelected = group.dataset.id === this.#selected && !group.dataset.hidden;
      group.classList.toggle("selected", isSelected);
      group.setAttribute("aria-selected", String(isSelected));
    }
  }

  #hover(node) {
    this.dispatchEvent(new CustomEvent("hover", { detail: node }));
  }

  #zoom(node) {
    if (node) this.zoom(node.id === this.#focus ? node.parent : node.id);
  }

  #onKey(event) {
    if (event.key === "Enter" && this.#selected) return this.zoom(this.#selected);
    if (event.key === "Escape") return this.#focus ? this.zoom(null) : this.#select(null);
    if (!TREE_KEYS.has(event.key)) return undefined;
    event.preventDefault();
    const neighbour = getNeighbour(this.#tree.nodes, this.#selected, event.key);
    if (neighbour) this.#select(neighbour);
    return undefined;
  }
}

/** One sentence about a node, for screen readers. */
export function describeNode(node) {
  const tiers = Object.keys(TIER_NAMES).filter((tier) => node.tiers[tier]).map((tier) => `${formatCount(node.tiers[tier])} in ${TIER_NAMES[tier]}`);
  return `${shorten(cleanPrefix(node.text), 60) || "no text"}: ${formatCount(node.end - node.start)} tokens, ${tiers.join(", ") || "not cached"}, ${node.sharers} conversations${node.pinned ? ", pinned" : ""}`;
}

/** Rows of the card about a node: pairs of a name and a text. */
export function listFacts(node) {
  const tiers = Object.entries(TIER_NAMES).filter(([tier]) => node.tiers[tier]).map(([tier, name]) => `${name} ${formatCount(node.tiers[tier])}`);
  const bytes = Object.entries(node.bytes ?? {}).filter(([, value]) => value).map(([tier, value]) => `${TIER_NAMES[tier]} ${formatBytes(value)}`);
  return [
    ["Tokens", `${formatCount(node.end - node.start)} (${formatCount(node.start)} to ${formatCount(node.end)})`],
    ["Lies in", tiers.join(", ") || "nowhere"],
    ["Size", bytes.join(", ")],
    ["Shared by", `${formatCount(node.sharers)} ${node.sharers === 1 ? "conversation" : "conversations"}`],
    ["Prefix hits", formatCount(node.hits)],
    ["Saved", formatSeconds(node.seconds_saved)],
    ["Last used", formatAge(node.last_used_seconds_ago)],
    ["Checkpoints", node.checkpoints?.length ? node.checkpoints.map(formatCount).join(", ") : ""],
    ["Slot", node.sequence === null || node.sequence === undefined ? "" : String(node.sequence)],
    ["Folded", node.folded ? `${formatCount(node.folded)} more nodes` : ""],
    ["Pinned", node.pinned ? "never evicted" : ""],
  ].filter(([, text]) => text);
}

function buildLabel(node, box) {
  const room = Math.floor((box.width - 12) / CHARACTER_WIDTH);
  const tokens = formatCount(node.end - node.start);
  const text = shorten(cleanPrefix(node.text), Math.max(3, room - (room > 24 ? tokens.length + 2 : 0)));
  const y = box.y + Math.min(box.height / 2, 60) + 3.5;
  const label = svg("text", { x: box.x + 6, y }, text);
  const count = room > 24 ? svg("text", { class: "count", x: box.x + box.width - 6, y, "text-anchor": "end" }, tokens) : null;
  return [label, count].filter(Boolean);
}

function buildMarks(node, box) {
  const scale = box.width / Math.max(1, node.end - node.start);
  const marks = (node.checkpoints ?? []).slice(0, 16).map((position) => svg("path", { class: "checkpoint", d: `M${round(box.x + (position - node.start) * scale)} ${box.y}v${Math.min(5, box.height)}` }));
  if (node.pinned) marks.push(svg("circle", { class: "pin", cx: box.x + box.width - 5, cy: box.y + 5, r: 2.5 }));
  return marks;
}

function buildAxis(marks, layout, height) {
  return svg("g", { class: "axis", "aria-hidden": "true" }, marks.map((mark) => {
    const x = round((mark - layout.start) * layout.scale);
    const text = formatCount(mark);
    const isLast = x + 4 + text.length * CHARACTER_WIDTH > (layout.end - layout.start) * layout.scale; // its label is on the left
    const label = svg("text", { x: isLast ? x - 4 : x + 4, y: 12, "text-anchor": isLast ? "end" : "start" }, text);
    return svg("g", {}, svg("path", { d: `M${x + 0.5} ${AXIS_HEIGHT - 5}V${height}` }), label);
  }));
}

function shorten(text, length) {
  return text.length > length ? `${text.slice(0, Math.max(1, length - 1))}…` : text;
}

function round(value) {
  return Math.round(value * 10) / 10;
}

customElements.define("ag-tree", TreeView);
