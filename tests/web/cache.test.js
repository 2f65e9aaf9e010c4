// Layout of the prefix tree, live requests, differences and prompts as conversations.

import assert from "node:assert/strict";
import { test } from "node:test";

import { compareTexts } from "../../src/afterglow/web/difference.js";
import { cleanPrefix, firstLine, formatAge, formatBytes, formatPrefill, formatRate, formatSeconds } from "../../src/afterglow/web/format.js";
import { applyEvent, isLive } from "../../src/afterglow/web/live.js";
import { isSamePrompt, parsePrompt } from "../../src/afterglow/web/prompt-text.js";
import { buildForest, chooseMarks, getNeighbour, getTier, layoutTree } from "../../src/afterglow/web/tree-layout.js";

const node = (id, parent, start, end, tiers = { device: end - start }) => ({
  id, parent, start, end, text: id, tiers: { device: 0, ram: 0, disk: 0, checkpoint: 0, ...tiers }, bytes: { ram: 0, disk: 0 }, checkpoints: [],
  pinned: false, hits: 0, sharers: 1, last_used_seconds_ago: 0, seconds_saved: 0, requests: [], sequence: null, folded: 0,
});
const NODES = [node("root", null, 0, 600), node("a", "root", 600, 800), node("b", "root", 600, 1000), node("b1", "b", 1000, 1200), node("b2", "b", 1000, 1100)];

function buildLargeTree(count) {
  const nodes = [node("n0", null, 0, 512)];
  for (let index = 1; index < count; index += 1) {
    const parent = nodes[(index * 7919) % Math.max(1, Math.floor(nodes.length / 3) + 1)];
    nodes.push(node(`n${index}`, parent.id, parent.end, parent.end + 16 + ((index * 104_729) % 400)));
  }
  return nodes;
}

test("width is tokens and height is the number of branches", () => {
  const { rectangles, rowHeight } = layoutTree(NODES, { width: 1200, height: 400 });
  const byId = new Map(rectangles.map((rectangle) => [rectangle.node.id, rectangle]));
  assert.deepEqual([byId.get("root").x, byId.get("root").width, byId.get("root").height], [0, 600, 3 * rowHeight]);
  assert.deepEqual([byId.get("b").x, byId.get("b").width, byId.get("b").height], [600, 400, 2 * rowHeight]);
  assert.equal(byId.get("b1").y, byId.get("b").y);
});

test("rectangles of a layout do not overlap, and children lie within the rows of their parents", () => {
  const { rectangles } = layoutTree(NODES, { width: 1000, height: 300 });
  for (const [index, one] of rectangles.entries()) {
    for (const other of rectangles.slice(index + 1)) {
      const isApart = one.x + one.width <= other.x + 0.01 || other.x + other.width <= one.x + 0.01 || one.y + one.height <= other.y + 0.01 || other.y + other.height <= one.y + 0.01;
      assert.ok(isApart, `${one.node.id} ${other.node.id}`);
    }
  }
});

test("a zoomed view starts at its node", () => {
  const { rectangles, start } = layoutTree(NODES, { width: 600, height: 300, focus: "b" });
  assert.deepEqual([start, rectangles.map(({ node: { id } }) => id).sort()], [600, ["b", "b1", "b2"]]);
});

test("what is too small is drawn together, and every node counts once", () => {
  const nodes = buildLargeTree(10_000);
  const { rectangles } = layoutTree(nodes, { width: 900, height: 420 });
  assert.ok(rectangles.length < 4000, String(rectangles.length));
  const drawn = rectangles.reduce((sum, { hidden }) => sum + (hidden || 1), 0);
  assert.equal(drawn, nodes.length);
});

test("a tree with a missing parent or a single node is drawn", () => {
  assert.equal(layoutTree([node("a", "gone", 100, 200)], { width: 100, height: 100 }).rectangles.length, 1);
  assert.equal(layoutTree([], { width: 100, height: 100 }).rectangles.length, 0);
});

test("a deep tree needs no deep recursion", () => {
  const nodes = Array.from({ length: 20_000 }, (_, index) => node(`n${index}`, index ? `n${index - 1}` : null, index, index + 1));
  assert.equal(buildForest(nodes).roots[0].end, 20_000);
  assert.ok(layoutTree(nodes, { width: 500, height: 100 }).rectangles.length > 0);
});

test("the colour is the fastest tier that covers the range", () => {
  assert.equal(getTier(node("a", null, 0, 10, { device: 10, disk: 10 })), "device");
  assert.equal(getTier(node("a", null, 0, 10, { device: 4, disk: 10 })), "disk");
  assert.equal(getTier(node("a", null, 0, 10, { ram: 4, checkpoint: 1 })), "ram");
});

test("arrow keys walk the tree", () => {
  const go = (id, key) => getNeighbour(NODES, id, key)?.id ?? null;
  assert.deepEqual([go(null, "ArrowDown"), go("root", "ArrowRight"), go("b", "ArrowDown"), go("a", "ArrowLeft"), go("root", "ArrowLeft")], ["root", "b", "a", "root", null]);
});

test("marks of the axis are round numbers", () => {
  assert.deepEqual(chooseMarks(0, 1000, 5), [0, 200, 400, 600, 800]);
  assert.deepEqual(chooseMarks(630, 1400, 4), [800, 1000, 1200]);
  assert.deepEqual(chooseMarks(0, 3, 10), [0, 1, 2]);
});

test("events move a request from queued to finished", () => {
  const events = [
    { type: "admitted", request: "r", model: "m", time: 1, prompt_tokens: 8412 },
    { type: "plan", request: "r", reused: 3000, computed: 5412, tier: "ram", reason: "a date changed" },
    { type: "progress", request: "r", done: 3120, total: 8412 },
    { type: "first_token", request: "r" },
    { type: "decoding", request: "r", generated: 5, tokens_per_second: 41 },
  ];
  let requests = [];
  const states = events.map((event) => (requests = applyEvent(requests, event))[0].state);
  assert.deepEqual(states, ["queued", "prefill", "prefill", "decoding", "decoding"]);
  assert.deepEqual([requests[0].prefill_done, requests[0].tokens_per_second, isLive(requests[0])], [3120, 41, true]);
  [requests[0]] = applyEvent(requests, { type: "finished", request: "r", finish_reason: "stop", generated_tokens: 6 });
  assert.deepEqual([requests[0].state, requests[0].generated_tokens, isLive(requests[0])], ["finished", 6, false]);
});

test("events without a request or of an unknown one change nothing", () => {
  const requests = [];
  for (const event of [{ type: "stored", entries: 64 }, { type: "progress", request: "x" }, { type: "future", request: "x" }]) assert.equal(applyEvent(requests, event), requests);
});

test("two texts are compared word by word", () => {
  const [cached, prompt] = compareTexts("Today is Monday, be kind.", "Today is Tuesday, be kind.");
  assert.deepEqual(cached, [{ text: "Today is", isEqual: true }, { text: " Monday,", isEqual: false }, { text: " be kind.", isEqual: true }]);
  assert.equal(prompt.map(({ text }) => text).join(""), "Today is Tuesday, be kind.");
  assert.deepEqual(compareTexts("", ""), [[], []]);
});

test("a prompt is read back as a conversation with its unfinished end", () => {
  const text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHel";
  assert.deepEqual(parsePrompt(text), { messages: [{ role: "system", content: "Be kind." }, { role: "user", content: "Hi" }], rest: { role: "assistant", content: "Hel" } });
  assert.equal(parsePrompt("<start_of_turn>model\nHi<end_of_turn>\n").messages[0].role, "assistant");
  assert.equal(parsePrompt("just text"), null);
});

test("a rendered prompt is compared as far as both go", () => {
  assert.ok(isSamePrompt("abc", "abcdef"));
  assert.ok(!isSamePrompt("abx", "abcdef"));
  assert.ok(isSamePrompt("<s><|user|>\nHi", "<|user|>\nHi</s>\n"));
  assert.ok(!isSamePrompt("<s><|user|>\nHo", "<|user|>\nHi</s>\n"));
  assert.ok(!isSamePrompt("abc", null));
});

test("numbers are written for people", () => {
  assert.deepEqual([formatSeconds(0.042), formatSeconds(3.14), formatSeconds(75), formatSeconds(7260)], ["42 ms", "3.1 s", "1 min 15 s", "2 h 1 min"]);
  assert.deepEqual([formatBytes(1023), formatBytes(1024 ** 2 - 1), formatBytes(1024 ** 3 - 1)], ["1023 B", "1.0 MiB", "1.0 GiB"]);
  assert.deepEqual([formatBytes(12), formatBytes(1536), formatBytes(3 * 1024 ** 3)], ["12 B", "1.5 KiB", "3.0 GiB"]);
  assert.deepEqual([formatAge(3), formatAge(300), formatAge(90_000)], ["just now", "5 min ago", "1 d ago"]);
  assert.deepEqual([formatRate(41.2), formatRate(4.127)], ["41 tok/s", "4.1 tok/s"]);
  assert.equal(formatPrefill(3120, 8412, 3), "prefill 3,120 of 8,412 · 3.0 s left");
});

test("a title ends with a whole character", () => {
  for (let length = 50; length < 62; length += 1) assert.ok(firstLine(`${"x".repeat(length)}😀😀 and more text`).isWellFormed());
  assert.equal(firstLine(`${"x".repeat(57)}😀 and more`), `${"x".repeat(57)}😀…`);
  assert.equal(firstLine(`${"x".repeat(58)}😀 and more`), `${"x".repeat(58)}…`);
});

test("the first words of a prefix are shown without control tokens", () => {
  assert.equal(cleanPrefix("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user Hi"), "system: Be kind. user: Hi");
  assert.equal(cleanPrefix("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi"), "user: Hi");
  assert.equal(cleanPrefix("if a < b | c > d"), "if a < b | c > d");
});
