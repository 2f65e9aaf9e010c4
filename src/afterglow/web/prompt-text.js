// The text of a cached prefix as a conversation. Pure.
//
// The text shows the control tokens of the chat template. Common templates are recognised by them; the caller then asks
// the server to render the messages again and compares, so a wrong reading is never used.

const FORMATS = [
  { turn: /<\|im_start\|>(\w+)\n([\s\S]*?)(<\|im_end\|>\n?|$)/g, names: {} },
  { turn: /<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n([\s\S]*?)(<\|eot_id\|>|$)/g, names: {} },
  { turn: /<start_of_turn>(\w+)\n([\s\S]*?)(<end_of_turn>\n?|$)/g, names: { model: "assistant" } },
  { turn: /<\|(system|user|assistant)\|>\n([\s\S]*?)(<\|end\|>\n?|<\/s>\n?|$)/g, names: {} },
];
const ROLES = new Set(["system", "user", "assistant"]);

/** Return the complete messages of a prompt and its unfinished last one, or null if the format is unknown. */
export function parsePrompt(text) {
  for (const { turn, names } of FORMATS) {
    const turns = [...text.matchAll(turn)].map(([, role, content, end]) => ({ role: names[role] ?? role, content, isComplete: end !== "" }));
    if (!turns.length || !turns.every(({ role }) => ROLES.has(role))) continue;
    const last = turns.at(-1).isComplete ? null : turns.pop();
    return {
      messages: turns.map(({ role, content }) => ({ role, content })),
      rest: last && { role: last.role, content: last.content },
    };
  }
  return null;
}

/** Whether a rendered conversation, or null, is the same text as far as both go. Some templates leave the BOS token out. */
export function isSamePrompt(text, rendered) {
  if (rendered === null) return false;
  return [text, text.replace(/^<[^<>\s]+>/, "")].some((prompt) => prompt.startsWith(rendered) || rendered.startsWith(prompt));
}
