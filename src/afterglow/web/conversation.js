// A conversation as a tree of messages with a current leaf. Pure functions on plain values.

/** Return the messages from the root to a message. */
export function getPath(messages, leaf) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const path = [];
  for (let id = leaf; byId.has(id) && path.length <= messages.length; id = byId.get(id).parent) path.push(byId.get(id));
  return path.reverse();
}

/** Return the messages with the same parent, oldest first: the branches at this place. */
export function getSiblings(messages, id) {
  const parent = messages.find((message) => message.id === id)?.parent ?? null;
  return messages.filter((message) => message.parent === parent);
}

/** Follow the newest child from a message to a leaf. */
export function getNewestLeaf(messages, id) {
  const newestChild = new Map(messages.map((message) => [message.parent, message.id]));
  let leaf = id;
  for (let steps = 0; newestChild.has(leaf) && steps <= messages.length; steps += 1) leaf = newestChild.get(leaf);
  return leaf;
}

/** Return a copy of the messages with one added or replaced. */
export function putMessage(messages, message) {
  const index = messages.findIndex(({ id }) => id === message.id);
  return index < 0 ? [...messages, message] : messages.with(index, message);
}

/** Build the body of a chat completion request from the path and the settings of a conversation. */
export function buildRequest(path, settings, model) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = path.filter(({ message }) => !isEmpty(message)).map(({ message }) => message);
  return {
    model,
    messages: [...system, ...messages],
    ...(settings.sampling ?? {}),
    ...(settings.tools?.length ? { tools: settings.tools } : {}),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    timings_per_token: true,
  };
}

/** Whether a message has nothing that could be sent, such as a response that was stopped in its prefill. */
export function isEmpty(message) {
  return message.role === "assistant" && !message.content && !message.reasoning_content && !message.tool_calls?.length;
}

/** Add the delta of a stream chunk to an assistant message and return the new message. */
export function addDelta(message, delta) {
  const next = { ...message };
  if (delta.content) next.content = (message.content ?? "") + delta.content;
  if (delta.reasoning_content) next.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  if (delta.tool_calls) next.tool_calls = delta.tool_calls.reduce(addCallDelta, [...(message.tool_calls ?? [])]);
  return next;
}

function addCallDelta(calls, delta) {
  const call = calls[delta.index] ?? { id: "", type: "function", function: { name: "", arguments: "" } };
  calls[delta.index] = {
    id: delta.id ?? call.id,
    type: "function",
    function: {
      name: delta.function?.name ?? call.function.name,
      arguments: call.function.arguments + (delta.function?.arguments ?? ""),
    },
  };
  return calls;
}

/** The calls of the last assistant message of a path that have no result yet. */
export function getOpenCalls(path) {
  const results = new Set();
  for (const { message } of path.toReversed()) {
    if (message.role === "tool") results.add(message.tool_call_id);
    else return (message.tool_calls ?? []).filter((call) => !results.has(call.id));
  }
  return [];
}

/** The text of a message, without files. */
export function getText(node) {
  const { content } = node.message;
  if (typeof content === "string") return content;
  const fileParts = new Set((node.info?.files ?? []).map(({ part }) => part));
  return (content ?? [])
    .filter((part, index) => part.type === "text" && !fileParts.has(index))
    .map((part) => part.text)
    .join("\n\n");
}

/** The files of a message: `{name, part}` with the content part. */
export function getFiles(node) {
  const { content } = node.message;
  if (!Array.isArray(content)) return [];
  const names = new Map((node.info?.files ?? []).map(({ name, part }) => [part, name]));
  return content
    .map((part, index) => ({ part, name: names.get(index) }))
    .filter(({ part, name }) => part.type !== "text" || name !== undefined)
    .map(({ part, name }) => ({ part, name: name ?? (part.type === "image_url" ? "image" : "audio") }));
}

/** Build the content and file list of a user message from its text and files. */
export function buildContent(text, files) {
  if (!files.length) return { content: text, files: undefined };
  const parts = files.map(({ part }) => part);
  const content = text ? [...parts, { type: "text", text }] : parts;
  return { content, files: files.map(({ name }, part) => ({ name: name.slice(0, 512), part })) };
}
