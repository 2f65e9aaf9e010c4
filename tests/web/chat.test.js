// The controller of a conversation, with a server of recorded responses.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Api, ApiError } from "../../src/afterglow/web/api.js";
import { Chat, describeGeneration } from "../../src/afterglow/web/chat.js";
import { EventParser } from "../../src/afterglow/web/sse.js";
import { openStorage } from "../../src/afterglow/web/storage.js";

/** A server that stores conversations and answers chats with given chunks. */
class RecordedServer {
  requests = [];
  chunks = [{ choices: [{ delta: { content: "Hello" } }] }, { choices: [{ delta: {}, finish_reason: "stop" }] }, { choices: [], usage: { prompt_tokens: 9, completion_tokens: 2, prompt_tokens_details: { cached_tokens: 4 } } }];
  failure = null;

  fetch = async (path, { method, body, signal, headers, keepalive }) => {
    if (keepalive && Buffer.byteLength(body) > 65_536) throw new TypeError("Failed to fetch"); // as browsers do
    const request = { path, method, body: body && JSON.parse(body), headers, keepalive };
    this.requests.push(request);
    if (path === "/v1/chat/completions") return this.#stream(signal);
    return Response.json({ id: "c1", title: request.body?.title ?? "", leaf: null, settings: request.body?.settings ?? {}, messages: [] });
  };

  get puts() {
    return this.requests.filter(({ method }) => method === "PUT");
  }

  #stream(signal) {
    if (this.failure) return Response.json({ error: { message: this.failure, code: "engine_crashed" } }, { status: 503 });
    const { chunks } = this;
    const encoder = new TextEncoder();
    const body = new ReadableStream({
      start(controller) {
        signal.addEventListener("abort", () => setTimeout(() => controller.error(signal.reason), 20)); // not at once, as in a network
        for (const chunk of chunks) if (chunk !== "wait") controller.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\n\n`));
        if (!chunks.includes("wait")) controller.close();
      },
    });
    return new Response(body);
  }
}

function start() {
  const server = new RecordedServer();
  const storage = { getItem: () => "secret", setItem: () => {}, removeItem: () => {} };
  const chat = new Chat(new Api(storage, server.fetch));
  return { server, chat };
}

test("a message is stored, sent, and its response stored", async () => {
  const { server, chat } = start();
  await chat.send("Hi", [], "tiny");
  assert.deepEqual(server.requests.map(({ method, path }) => `${method} ${path.replace(/[0-9a-f]{32}/, "ID")}`), ["POST /conversations", "PUT /conversations/c1/messages/ID", "POST /v1/chat/completions", "PUT /conversations/c1/messages/ID"]);
  const [question, answer] = chat.path;
  assert.deepEqual([question.message.content, answer.message.content, answer.parent], ["Hi", "Hello", question.id]);
  assert.deepEqual([answer.info.state, answer.info.cached_tokens, answer.info.prompt_tokens, answer.info.finish_reason], ["complete", 4, 9, "stop"]);
  assert.ok(server.requests.every(({ headers }) => headers.Authorization === "Bearer secret"));
});

test("an edit and a regeneration make siblings, and the old branches stay", async () => {
  const { chat } = start();
  await chat.send("one", [], "tiny");
  const [question, answer] = chat.path;
  await chat.regenerate(answer.id, "tiny");
  assert.equal(chat.path[1].parent, question.id);
  await chat.edit(question.id, "two", "tiny");
  assert.deepEqual(chat.path.map(({ message }) => message.content), ["two", "Hello"]);
  assert.equal(chat.conversation.messages.length, 5);
  await chat.switchBranch(chat.path[0].id, -1);
  assert.equal(chat.path[0].message.content, "one");
});

test("stop ends a response in its prefill", async () => {
  const { server, chat } = start();
  server.chunks = [{ choices: [{ delta: { role: "assistant", content: "" } }], prompt_progress: { total: 100, cache: 20, processed: 40, seconds_left: 3 } }, "wait"];
  const done = chat.send("long", [], "tiny");
  await new Promise((resolve) => chat.addEventListener("stream", resolve, { once: true }));
  const state = describeGeneration(chat.generation, 0);
  assert.deepEqual([state.phase, state.done, state.total, state.secondsLeft], ["prefill", 40, 100, 3]);
  chat.stop();
  await done;
  assert.deepEqual([chat.generation, chat.path[1].info.state, chat.path[1].message.content], [null, "stopped", ""]);
});

test("a response that is stopped while it is decoded has the tokens of its prompt", async () => {
  const { server, chat } = start();
  server.chunks = [{ choices: [], prompt_progress: { total: 100, cache: 20, processed: 100, seconds_left: 0 } }, { choices: [{ delta: { content: "Hel" } }] }, "wait"];
  const done = chat.send("long", [], "tiny");
  while (!chat.generation?.tokens) await new Promise((resolve) => setTimeout(resolve, 1));
  chat.stop();
  await done;
  const { info } = chat.path[1];
  assert.deepEqual([info.state, info.prompt_tokens, info.cached_tokens, info.generated_tokens], ["stopped", 100, 20, 1]);
});

test("the tokens of a stopped response are those of the server, not its chunks", async () => {
  const { server, chat } = start();
  server.chunks = [{ choices: [{ delta: { content: "😀" } }], timings: { predicted_n: 3 } }, { choices: [{ delta: { content: "🎉" } }], timings: { predicted_n: 6 } }, "wait"];
  const done = chat.send("long", [], "tiny");
  while (chat.path[1]?.message.content !== "😀🎉") await new Promise((resolve) => setTimeout(resolve, 1));
  assert.equal(server.requests.find(({ path }) => path === "/v1/chat/completions").body.timings_per_token, true);
  chat.stop();
  await done;
  assert.equal(chat.path[1].info.generated_tokens, 6);
});

test("leaving a conversation saves and stops its response, and not that of the next one", async () => {
  const { server, chat } = start();
  server.chunks = [{ choices: [{ delta: { content: "Hel" } }] }, "wait"];
  const first = chat.send("one", [], "tiny");
  await new Promise((resolve) => chat.addEventListener("stream", resolve, { once: true }));
  chat.start();
  assert.equal(server.puts.at(-1).body.message.content, "Hel");
  const second = chat.send("two", [], "tiny");
  await new Promise((resolve) => chat.addEventListener("stream", resolve, { once: true }));
  await first;
  assert.notEqual(chat.generation, null);
  assert.deepEqual(chat.path.map(({ message }) => message.content), ["two", "Hel"]);
  chat.stop();
  await second;
});

test("leaving a conversation saves a long response, too", async () => {
  const { server, chat } = start();
  server.chunks = [{ choices: [{ delta: { content: "é".repeat(40_000) } }] }, "wait"];
  const sent = chat.send("one", [], "tiny");
  await new Promise((resolve) => chat.addEventListener("stream", resolve, { once: true }));
  chat.start();
  await sent;
  const { keepalive, body } = server.puts.at(-1);
  assert.deepEqual([Boolean(keepalive), body.message.content.length], [false, 40_000]);
});

test("of two conversations that load at once, the one that was chosen last is shown", async () => {
  const { server, chat } = start();
  const responses = new Map();
  server.fetch = (path) => new Promise((resolve) => { responses.set(path, resolve); });
  const chatOfTwo = new Chat(new Api({ getItem: () => "" }, server.fetch));
  const opened = [chatOfTwo.open("slow"), chatOfTwo.open("fast")];
  for (const id of ["fast", "slow"]) responses.get(`/conversations/${id}`)(Response.json({ id, leaf: null, settings: {}, messages: [] }));
  await Promise.all(opened);
  assert.equal(chatOfTwo.conversation.id, "fast");
  const late = chat.open("slow");
  chat.start();
  await late;
  assert.equal(chat.conversation.id, null);
});

test("a message is not added to a conversation that is opened meanwhile", async () => {
  const { chat } = start();
  const sent = chat.send("Hi", [], "tiny");
  chat.start();
  await assert.rejects(sent, /another conversation was opened/);
  assert.deepEqual([chat.conversation.id, chat.conversation.messages], [null, []]);
});

test("saves reach the server in order, also if one takes long", async () => {
  const { server, chat } = start();
  await chat.send("Hi", [], "tiny");
  const finished = [];
  const slow = async (path, init) => {
    const { leaf } = JSON.parse(init.body);
    await new Promise((resolve) => setTimeout(resolve, leaf === "a" ? 50 : 0));
    finished.push(leaf);
    return server.fetch(path, init);
  };
  const later = new Chat(new Api({ getItem: () => "" }, slow));
  later.conversation = chat.conversation;
  await Promise.all([later.select("a"), later.select("b")]);
  assert.deepEqual(finished, ["a", "b"]);
});

test("a failed request keeps the question and says why", async () => {
  const { server, chat } = start();
  server.failure = "the engine crashed";
  await chat.send("Hi", [], "tiny");
  assert.deepEqual([chat.path[1].info.state, chat.path[1].info.error], ["failed", "the engine crashed"]);
  server.failure = null;
  await chat.regenerate(chat.path[1].id, "tiny");
  assert.equal(chat.path[1].message.content, "Hello");
});

test("a response that ended early is continued in place", async () => {
  const { server, chat } = start();
  await chat.send("Hi", [], "tiny");
  await chat.continueResponse("tiny");
  assert.equal(chat.path[1].message.content, "HelloHello");
  assert.equal(server.requests.findLast(({ path }) => path === "/v1/chat/completions").body.messages.at(-1).role, "assistant");
  assert.equal(chat.conversation.messages.length, 2);
});

test("an error event of a stream is an error", async () => {
  const { server, chat } = start();
  server.chunks = [{ choices: [{ delta: { content: "He" } }] }, { error: { message: "out of memory", code: "engine_error" } }];
  await chat.send("Hi", [], "tiny");
  assert.deepEqual([chat.path[1].message.content, chat.path[1].info.error], ["He", "out of memory"]);
});

test("a stream that ends without a finish reason is a lost connection", async () => {
  const { server, chat } = start();
  server.chunks = [{ choices: [{ delta: { content: "Half of the" } }] }];
  await chat.send("Hi", [], "tiny");
  assert.deepEqual([chat.path[1].message.content, chat.path[1].info.state, chat.path[1].info.error], ["Half of the", "failed", "the connection to the server was lost"]);
});

test("a key of any characters can be sent in a header", async () => {
  const headers = [];
  const api = new Api({ getItem: () => "cle\u0301\u200b" }, async (path, init) => { headers.push(new Headers(init.headers)); return Response.json({}); });
  await api.get("/v1/models");
  assert.equal(Buffer.from(headers[0].get("authorization"), "latin1").toString(), "Bearer cle\u0301\u200b");
});

test("a server that is gone is an error with status 0", async () => {
  const api = new Api({ getItem: () => null }, async () => { throw new TypeError("failed"); });
  await assert.rejects(api.get("/health"), (error) => error instanceof ApiError && error.status === 0);
});

test("events may be cut anywhere", () => {
  const source = ": ping\n\nid: 4\ndata: {\"a\":1}\n\ndata: x\r\ndata: y\r\n\r\n";
  for (let cut = 0; cut <= source.length; cut += 1) {
    const parser = new EventParser();
    const events = [...parser.push(source.slice(0, cut)), ...parser.push(source.slice(cut))];
    assert.deepEqual(events, ['{"a":1}', "x\ny"], String(cut));
  }
});

test("values last as long as the page if the browser blocks or fills its storage", () => {
  const full = { setItem: () => { throw new Error("QuotaExceededError"); } };
  for (const getStorage of [() => { throw new Error("SecurityError"); }, () => full, () => null]) {
    const storage = openStorage(getStorage);
    assert.equal(storage.getItem("a"), null);
    storage.setItem("a", 5);
    assert.equal(storage.getItem("a"), "5");
    storage.removeItem("a");
    assert.equal(storage.getItem("a"), null);
  }
  const values = new Map();
  const real = { setItem: (name, value) => values.set(name, value), removeItem: (name) => values.delete(name) };
  assert.equal(openStorage(() => real), real);
  assert.equal(values.size, 0);
});
