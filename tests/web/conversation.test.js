// A conversation is a tree: paths, branches and what is sent to the model.

import assert from "node:assert/strict";
import { test } from "node:test";

import { formatFile } from "../../src/afterglow/web/attachments.js";
import { addDelta, buildContent, buildRequest, getFiles, getNewestLeaf, getOpenCalls, getPath, getSiblings, getText, putMessage } from "../../src/afterglow/web/conversation.js";

const say = (id, parent, role, content) => ({ id, parent, message: { role, content }, info: {} });
const MESSAGES = [say("a", null, "user", "one"), say("b", "a", "assistant", "two"), say("c", "a", "assistant", "three"), say("d", "c", "user", "four"), say("e", null, "user", "other")];
const ids = (messages) => messages.map(({ id }) => id);

test("a path leads from the root to the leaf", () => {
  assert.deepEqual(ids(getPath(MESSAGES, "d")), ["a", "c", "d"]);
  assert.deepEqual(getPath(MESSAGES, null), []);
});

test("siblings are the branches at one place", () => {
  assert.deepEqual(ids(getSiblings(MESSAGES, "b")), ["b", "c"]);
  assert.deepEqual(ids(getSiblings(MESSAGES, "a")), ["a", "e"]);
});

test("a branch is shown to its newest leaf", () => {
  assert.equal(getNewestLeaf(MESSAGES, "a"), "d");
  assert.equal(getNewestLeaf(MESSAGES, "b"), "b");
});

test("a damaged tree with a cycle ends", () => {
  const cycle = [say("a", "b", "user", "x"), say("b", "a", "assistant", "y")];
  assert.ok(getPath(cycle, "a").length <= 3);
  assert.ok(["a", "b"].includes(getNewestLeaf(cycle, "a")));
});

test("a message is added or replaced", () => {
  assert.equal(putMessage(MESSAGES, say("f", "d", "assistant", "x")).length, 6);
  assert.equal(putMessage(MESSAGES, say("b", "a", "assistant", "new"))[1].message.content, "new");
});

test("a request has the system prompt, the path and the sampling, and no empty response", () => {
  const path = [...getPath(MESSAGES, "a"), say("x", "a", "assistant", "")];
  const request = buildRequest(path, { system: "Be brief.", sampling: { temperature: 0 }, tools: [] }, "tiny");
  assert.deepEqual(request.messages, [{ role: "system", content: "Be brief." }, { role: "user", content: "one" }]);
  assert.deepEqual([request.model, request.temperature, request.tools, request.return_progress], ["tiny", 0, undefined, true]);
});

test("deltas add up to text, thoughts and tool calls", () => {
  const deltas = [
    { reasoning_content: "hm" }, { content: "a" }, { content: "b" },
    { tool_calls: [{ index: 0, id: "1", function: { name: "f", arguments: '{"x"' } }] },
    { tool_calls: [{ index: 0, function: { arguments: ": 1}" } }, { index: 1, id: "2", function: { name: "g", arguments: "" } }] },
  ];
  const message = deltas.reduce(addDelta, { role: "assistant", content: "" });
  assert.deepEqual([message.content, message.reasoning_content], ["ab", "hm"]);
  assert.deepEqual(message.tool_calls.map(({ id, function: { name, arguments: text } }) => [id, name, text]), [["1", "f", '{"x": 1}'], ["2", "g", ""]]);
});

test("calls without a result are open", () => {
  const call = (id) => ({ id, type: "function", function: { name: "f", arguments: "{}" } });
  const asking = { id: "b", parent: "a", message: { role: "assistant", content: "", tool_calls: [call("1"), call("2")] } };
  const result = { id: "c", parent: "b", message: { role: "tool", tool_call_id: "1", content: "x" } };
  assert.deepEqual(getOpenCalls([asking, result]).map(({ id }) => id), ["2"]);
  assert.deepEqual(getOpenCalls([asking, result, say("d", "c", "user", "x")]), []);
});

test("files are content parts with a name, and the text is what remains", () => {
  const file = { name: "notes.txt", part: { type: "text", text: "notes" } };
  const { content, files } = buildContent("question", [file]);
  const node = { message: { role: "user", content }, info: { files } };
  assert.equal(getText(node), "question");
  assert.deepEqual(getFiles(node), [{ part: file.part, name: "notes.txt" }]);
  assert.equal(buildContent("only text", []).content, "only text");
});

test("the fence of a text file cannot be closed by its text", () => {
  assert.equal(formatFile("a.md", "```\nx\n```"), "a.md\n````\n```\nx\n```\n````");
  assert.ok(formatFile("schema.sql", "`a`\n".repeat(250_000)).endsWith("\n```"));
});
