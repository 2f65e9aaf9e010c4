// One open conversation: sends, streams, stops, branches and saves. No DOM: `chat-view.js` shows it.

import { ApiError } from "./api.js";
import { addDelta, buildContent, buildRequest, getFiles, getNewestLeaf, getPath, getSiblings, getText, isEmpty, putMessage } from "./conversation.js";
import { firstLine } from "./format.js";

const SAVE_SECONDS = 2; // between saves of a response that is streaming

/** Dispatches "change" when the conversation changed, "stream" when text arrived, and "saved" when its head changed. */
export class Chat extends EventTarget {
  conversation = buildEmpty();
  generation = null; // the response that is streaming
  #api;
  #clock;
  #wanted = null; // id of the conversation that was chosen last
  #visits = 0; // conversations that were started or opened
  #saves = Promise.resolve(); // the last one in the queue

  constructor(api, clock = () => performance.now() / 1000) {
    super();
    this.#api = api;
    this.#clock = clock;
  }

  get path() {
    return getPath(this.conversation.messages, this.conversation.leaf);
  }

  get settings() {
    return this.conversation.settings;
  }

  /** Start a conversation. It is stored with its first message. */
  start(settings = {}) {
    this.#wanted = null;
    this.#leave();
    this.conversation = buildEmpty(settings);
    this.#change();
  }

  /** Open a conversation, unless another one is chosen while it loads. */
  async open(id) {
    this.#wanted = id;
    if (this.conversation.id === id) return;
    this.#leave();
    let conversation;
    try {
      conversation = await this.#api.get(`/conversations/${encodeURIComponent(id)}`);
    } catch (error) {
      if (this.#wanted === id) throw error;
    }
    if (this.#wanted !== id) return;
    this.conversation = conversation;
    this.#change();
  }

  async changeSettings(settings) {
    this.conversation = { ...this.conversation, settings };
    this.#change();
    if (this.conversation.id) await this.#patch({ settings });
  }

  async rename(title) {
    this.conversation = { ...this.conversation, title };
    if (this.conversation.id) await this.#patch({ title });
    this.#change();
  }

  /** Send a user message after the current leaf, and stream the response. */
  async send(text, files, model) {
    const { content, files: names } = buildContent(text, files);
    await this.#add({ role: "user", content }, this.conversation.leaf, names ? { files: names } : {});
    await this.generate(model);
  }

  /** Send results of tool calls, and stream the response. */
  async sendResults(results, model) {
    for (const { id, content } of results) await this.#add({ role: "tool", tool_call_id: id, content }, this.conversation.leaf);
    await this.generate(model);
  }

  /** Send another text instead of a user message: a branch beside it. Its files stay. */
  async edit(id, text, model) {
    const before = this.#get(id);
    const { content, files: kept } = buildContent(text, getFiles(before));
    await this.#add({ role: "user", content }, before.parent, kept ? { files: kept } : {});
    await this.generate(model);
  }

  /** Generate another response instead of one: a branch beside it. */
  async regenerate(id, model) {
    const { parent } = this.#get(id);
    this.conversation = { ...this.conversation, leaf: parent };
    await this.generate(model);
  }

  /** Show the branch at the offset from a message: -1 is the one before it. */
  async switchBranch(id, offset) {
    const siblings = getSiblings(this.conversation.messages, id);
    const sibling = siblings[siblings.findIndex((other) => other.id === id) + offset];
    if (sibling) await this.select(getNewestLeaf(this.conversation.messages, sibling.id));
  }

  async select(leaf) {
    this.conversation = { ...this.conversation, leaf };
    this.#change();
    await this.#patch({ leaf });
  }

  async deleteMessage(id) {
    const visit = this.#visits;
    const address = `${this.#address}/messages/${id}`;
    const conversation = await this.#queue(() => this.#api.delete(address));
    if (this.#visits !== visit) return;
    this.conversation = conversation;
    this.#change();
  }

  /** Stream a response to the current leaf. */
  async generate(model) {
    const node = { id: createId(), parent: this.conversation.leaf, message: { role: "assistant", content: "" }, info: { model, state: "partial" }, created: Date.now() / 1000 };
    await this.#stream(node, model);
  }

  /** Continue the response at the current leaf, which ended early. */
  async continueResponse(model) {
    const before = this.#get(this.conversation.leaf);
    await this.#stream({ ...before, info: { model, state: "partial" } }, model);
  }

  async #stream(node, model) {
    const request = buildRequest(getPath([...this.conversation.messages, node], node.id), this.settings, model);
    const generation = { id: node.id, abort: new AbortController(), started: this.#clock(), first: null, last: null, tokens: 0, progress: null, saved: this.#clock() };
    this.#showNode(node);
    this.generation = generation;
    this.#change();
    const conversation = this.conversation.id;
    try {
      const onResponse = (response) => { node.info = { ...node.info, request: response.headers.get("x-request-id") ?? undefined }; };
      for await (const chunk of this.#api.stream("POST", "/v1/chat/completions", request, generation.abort.signal, onResponse)) {
        this.#read(chunk, generation);
      }
      if (!node.info.finish_reason) throw new Error("the stream ended early");
      this.#finish(generation, { state: "complete" });
    } catch (error) {
      const isStopped = generation.abort.signal.aborted;
      this.#finish(generation, isStopped ? { state: "stopped" } : { state: "failed", error: describe(error) });
    }
    if (this.conversation.id === conversation) await this.#saveResponse(node.id);
    this.#change();
  }

  /** Stop the response, in its prefill or later. What was generated stays. */
  stop() {
    this.generation?.abort.abort();
  }

  /** Save a response that is streaming, when it is no longer shown. */
  saveOnExit() {
    if (this.generation && !isEmpty(this.#get(this.generation.id).message)) this.#put(this.#get(this.generation.id), { keepalive: true }).catch(() => {});
  }

  /** Stop the response and save what there is, before another conversation is shown. */
  #leave() {
    this.#visits += 1;
    this.saveOnExit();
    this.stop();
  }

  #read(chunk, generation) {
    const now = this.#clock();
    const node = this.#get(generation.id);
    if (!node) return; // another conversation is open
    if (chunk.prompt_progress) generation.progress = chunk.prompt_progress;
    if (chunk.usage) {
      node.info = {
        ...node.info,
        prompt_tokens: chunk.usage.prompt_tokens,
        cached_tokens: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
        generated_tokens: chunk.usage.completion_tokens,
      };
    }
    const [choice] = chunk.choices ?? [];
    if (choice?.finish_reason) node.info = { ...node.info, finish_reason: choice.finish_reason };
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      generation.first ??= now;
      generation.last = now;
      generation.tokens = chunk.timings?.predicted_n ?? generation.tokens + 1; // a chunk may have several tokens, e.g. those of an emoji
      node.message = addDelta(node.message, delta);
      if (now - generation.saved > SAVE_SECONDS) {
        generation.saved = now;
        this.#put(node).catch(() => {}); // the last save reports errors
      }
    }
    this.dispatchEvent(new Event("stream"));
  }

  #finish(generation, info) {
    if (this.generation === generation) this.generation = null; // another conversation may be streaming by now
    const node = this.#get(generation.id);
    if (!node) return;
    const prefill = (generation.first ?? this.#clock()) - generation.started;
    const decode = generation.first === null ? 0 : generation.last - generation.first;
    const tokens = node.info.generated_tokens ?? generation.tokens;
    const { progress } = generation;
    const prompt = progress && generation.first !== null ? { prompt_tokens: progress.total, cached_tokens: progress.cache } : {}; // a stopped response has no usage
    node.info = { ...prompt, ...node.info, ...info, generated_tokens: tokens, prefill_seconds: round(prefill), decode_seconds: round(decode) };
  }

  async #saveResponse(id) {
    try {
      await this.#put(this.#get(id));
    } catch (error) {
      this.dispatchEvent(new CustomEvent("problem", { detail: `The response is not saved: ${describe(error)}` }));
    }
  }

  /** Add a message to the tree, on the server first: what is not saved is not sent to the model. */
  async #add(message, parent, info = {}) {
    const visit = this.#visits;
    if (!this.conversation.id) {
      const title = firstLine(getText({ message, info }) || info.files?.[0]?.name || "New conversation");
      const created = await this.#api.post("/conversations", { title, settings: this.settings });
      this.#checkVisit(visit);
      this.conversation = { ...created, messages: this.conversation.messages };
    }
    const node = { id: createId(), parent, message, info, created: Date.now() / 1000 };
    await this.#put(node);
    this.#checkVisit(visit);
    this.#showNode(node);
    this.#change();
  }

  #checkVisit(visit) {
    if (this.#visits !== visit) throw new ApiError(0, "the message was not sent: another conversation was opened");
  }

  async #put(node, options) {
    const address = `${this.#address}/messages/${node.id}`;
    const body = { parent: node.parent, message: node.message, info: node.info };
    const save = () => this.#api.put(address, body, options);
    const head = await (options?.keepalive ? save() : this.#queue(save)); // a page that ends cannot wait
    this.dispatchEvent(new CustomEvent("saved", { detail: head }));
  }

  async #patch(changes) {
    const address = this.#address;
    const head = await this.#queue(() => this.#api.patch(address, changes));
    this.dispatchEvent(new CustomEvent("saved", { detail: head }));
  }

  /** Save after the saves before it: on two connections an older one could arrive last. */
  #queue(save) {
    const result = this.#saves.then(save);
    this.#saves = result.catch(() => {});
    return result;
  }

  #showNode(node) {
    this.conversation = { ...this.conversation, messages: putMessage(this.conversation.messages, node), leaf: node.id };
  }

  #get(id) {
    return this.conversation.messages.find((message) => message.id === id);
  }

  get #address() {
    return `/conversations/${encodeURIComponent(this.conversation.id)}`;
  }

  #change() {
    this.dispatchEvent(new Event("change"));
  }
}

/** Live numbers of a generation: phase, tokens per second. */
export function describeGeneration(generation, now) {
  if (generation.first !== null) {
    const seconds = now - generation.first;
    return { phase: "decoding", tokens: generation.tokens, rate: seconds > 0.2 ? (generation.tokens - 1) / seconds : null };
  }
  const { progress } = generation;
  if (!progress) return { phase: "queued", seconds: now - generation.started };
  return { phase: "prefill", done: progress.processed, total: progress.total, cached: progress.cache, secondsLeft: progress.seconds_left };
}

export function describe(error) {
  return error instanceof ApiError ? error.message : "the connection to the server was lost";
}

function buildEmpty(settings = {}) {
  return { id: null, title: "", leaf: null, settings, messages: [] };
}

function createId() {
  return crypto.randomUUID().replaceAll("-", "");
}

function round(seconds) {
  return Math.round(seconds * 1000) / 1000;
}
