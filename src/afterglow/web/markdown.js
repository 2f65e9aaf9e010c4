// Markdown to a tree of plain objects. Pure: `render.js` builds DOM nodes from it.
//
// Blocks: paragraph, heading, code, list, quote, table, rule. Inlines: text, strong, em, del, code, link, break. HTML has
// no meaning: it stays text. Text that is still streaming parses as if it ended here; an open code fence is a code block.

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>[ ]?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TASK = /^\[([ xX])\][ \t]+/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const SAFE_PROTOCOLS = ["http:", "https:", "mailto:"];
const BARE_URL = /^https?:\/\/[^\s<>"'`]+/;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const MAX_DEPTH = 24; // of quotes and lists inside each other
const MAX_LINK = 2048; // characters of the text or the address of a link
const MAX_OPENERS = 64; // delimiters that an end of emphasis looks back at

/** Parse a text into blocks. Each has its `source`, by which a renderer recognises blocks that did not change. */
export function parseMarkdown(text) {
  return parseBlocks(text.replace(/\r\n?/g, "\n").replaceAll("\0", "\uFFFD").split("\n"), 0);
}

/** Return an address if its protocol is safe, else null. */
export function sanitizeUrl(address) {
  try {
    const url = new URL(address);
    return SAFE_PROTOCOLS.includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative addresses lead nowhere
  }
}

// --- blocks

function parseBlocks(lines, depth) {
  const blocks = [];
  for (let index = 0; index < lines.length; ) {
    if (!lines[index].trim()) {
      index += 1;
      continue;
    }
    const [block, end] = parseBlock(lines, index, depth);
    block.source = lines.slice(index, end).join("\n");
    blocks.push(block);
    index = end;
  }
  return blocks;
}

function parseBlock(lines, start, depth) {
  const line = lines[start];
  if (FENCE.test(line)) return parseFence(lines, start);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, inlines: parseInlines(heading[2] ?? "") }, start + 1];
  if (RULE.test(line)) return [{ type: "rule" }, start + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return parseQuote(lines, start, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return parseList(lines, start, depth);
  if (isTableStart(lines, start)) return parseTable(lines, start);
  return parseParagraph(lines, start);
}

function parseFence(lines, start) {
  const [, indent, fence, info] = FENCE.exec(lines[start]);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
  const strip = new RegExp(`^ {0,${indent.length}}`);
  let end = start + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const isClosed = end < lines.length;
  const text = lines.slice(start + 1, end).map((line) => line.replace(strip, "")).join("\n");
  return [{ type: "code", language: info.trim().split(/\s/, 1)[0], text, isClosed }, isClosed ? end + 1 : end];
}

function parseQuote(lines, start, depth) {
  let end = start;
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || isParagraphLine(lines[end]))) end += 1;
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function parseList(lines, start, depth) {
  const [, , marker] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(marker);
  const kind = isOrdered ? marker.at(-1) : marker;
  const list = { type: "list", isOrdered, start: isOrdered ? parseInt(marker, 10) : null, items: [] };
  let index = start;
  while (index < lines.length) {
    const match = ITEM.exec(lines[index]);
    if (!match || RULE.test(lines[index])) break;
    if ((/\d/.test(match[2]) ? match[2].at(-1) : match[2]) !== kind) break;
    const [item, end] = parseItem(lines, index, match, depth);
    list.items.push(item);
    index = end;
    while (index < lines.length && !lines[index].trim() && ITEM.test(lines[index + 1] ?? "")) index += 1;
  }
  return [list, index];
}

function parseItem(lines, start, match, depth) {
  const padding = match[3].length > 4 || !match[3] ? 1 : match[3].length;
  const width = match[1].length + match[2].length + padding;
  const indent = " ".repeat(width);
  const inner = [lines[start].slice(Math.min(width, lines[start].length))];
  let end = start + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (!line.trim()) {
      let next = end + 1;
      while (next < lines.length && !lines[next].trim()) next += 1;
      if (next === lines.length || !lines[next].startsWith(indent)) break;
      inner.push("");
    } else if (line.startsWith(indent)) {
      inner.push(line.slice(width));
    } else if (inner.at(-1).trim() && isParagraphLine(line)) {
      inner.push(line.trimStart());
    } else {
      break;
    }
  }
  const task = TASK.exec(inner[0]);
  if (task) inner[0] = inner[0].slice(task[0].length);
  return [{ isDone: task ? task[1] !== " " : null, blocks: parseBlocks(inner, depth + 1) }, end];
}

function isTableStart(lines, start) {
  const rule = lines[start + 1];
  return lines[start].includes("|") && rule !== undefined && rule.includes("-") && TABLE_RULE.test(rule) &&
    splitRow(lines[start]).length === splitRow(rule).length;
}

function parseTable(lines, start) {
  const head = splitRow(lines[start]);
  const align = splitRow(lines[start + 1]).map((cell) => {
    const [isLeft, isRight] = [cell.startsWith(":"), cell.endsWith(":")];
    return isLeft && isRight ? "center" : isRight ? "right" : isLeft ? "left" : null;
  });
  let end = start + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  const rows = lines.slice(start + 2, end).map((line) => {
    const cells = splitRow(line);
    return head.map((_, column) => parseInlines(cells[column] ?? ""));
  });
  return [{ type: "table", align, head: head.map((cell) => parseInlines(cell)), rows }, end];
}

function splitRow(line) {
  const cells = [""];
  const text = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  for (let index = 0; index < text.length; index += 1) {
    if (text[index] === "\\" && text[index + 1] === "|") {
      cells[cells.length - 1] += "|";
      index += 1;
    } else if (text[index] === "|") cells.push("");
    else cells[cells.length - 1] += text[index];
  }
  return cells.map((cell) => cell.trim());
}

function parseParagraph(lines, start) {
  let end = start + 1;
  while (end < lines.length && isParagraphLine(lines[end]) && !isTableStart(lines, end)) end += 1;
  const text = lines.slice(start, end).map((line) => line.trimStart()).join("\n").trimEnd();
  return [{ type: "paragraph", inlines: parseInlines(text) }, end];
}

function isParagraphLine(line) {
  return line.trim() && !FENCE.test(line) && !HEADING.test(line) && !RULE.test(line) && !QUOTE.test(line) && !ITEM.test(line);
}

// --- inlines

/** Parse the inlines of a paragraph. */
export function parseInlines(text) {
  const nodes = [];
  const addText = (value) => {
    const last = nodes.at(-1);
    if (last?.type === "text") last.text += value;
    else if (value) nodes.push({ type: "text", text: value });
  };
  let index = 0;
  while (index < text.length) {
    const found = readInline(text, index);
    if (found) {
      const [node, end] = found;
      if (node.type === "text") addText(node.text);
      else nodes.push(node);
      index = end;
    } else {
      addText(text[index]);
      index += 1;
    }
  }
  return resolveEmphasis(nodes);
}

function readInline(text, index) {
  switch (text[index]) {
    case "\\":
      if (text[index + 1] === "\n") return [{ type: "break" }, index + 2];
      if (ESCAPABLE.test(text[index + 1] ?? "")) return [{ type: "text", text: text[index + 1] }, index + 2];
      return null;
    case "\n":
      return [{ type: "break" }, index + 1]; // models write lines that are meant as lines
    case "`":
      return readCode(text, index);
    case "<":
      return readAutolink(text, index);
    case "!":
      return text[index + 1] === "[" ? readLink(text, index + 1) : null;
    case "[":
      return readLink(text, index);
    case "h":
      return readBareUrl(text, index);
    case "*":
    case "_":
    case "~":
      return readDelimiter(text, index);
    default:
      return null;
  }
}

function readCode(text, index) {
  const run = /^`+/.exec(text.slice(index, index + 32))[0];
  for (let end = text.indexOf(run, index + run.length); end >= 0; ) {
    let after = end;
    while (text[after] === "`") after += 1;
    if (after - end === run.length) {
      const inner = text.slice(index + run.length, end).replaceAll("\n", " ");
      const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
      return [{ type: "code", text: isPadded ? inner.slice(1, -1) : inner }, after];
    }
    end = text.indexOf(run, after);
  }
  return [{ type: "text", text: run }, index + run.length];
}

function readAutolink(text, index) {
  const match = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(text.slice(index, index + 2048));
  const href = match && sanitizeUrl(match[1]);
  return href ? [{ type: "link", href, inlines: [{ type: "text", text: match[1] }] }, index + match[0].length] : null;
}

function readBareUrl(text, index) {
  if (index && /[\w/]/.test(text[index - 1])) return null;
  const match = BARE_URL.exec(text.slice(index, index + 2048));
  if (!match) return null;
  const shown = match[0].replace(/[.,:;!?*_~]+$/, "").replace(/\)+$/, (end) => (match[0].includes("(") ? end : ""));
  const href = sanitizeUrl(shown);
  return href ? [{ type: "link", href, inlines: [{ type: "text", text: shown }] }, index + shown.length] : null;
}

function readLink(text, index) {
  let depth = 0;
  let end = index;
  for (; end < text.length && end - index < MAX_LINK; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") depth += 1;
    else if (text[end] === "]" && (depth -= 1) === 0) break;
  }
  if (text[end] !== "]" || text[end + 1] !== "(") return null;
  const target = /^\(\s*<?([^\s<>]*?)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(readParentheses(text, end + 1));
  if (!target) return null;
  const href = sanitizeUrl(target[1]);
  const inlines = parseInlines(text.slice(index + 1, end));
  const after = end + 1 + target[0].length;
  return href ? [{ type: "link", href, inlines }, after] : [{ type: "text", text: text.slice(index, after) }, after];
}

function readParentheses(text, index) {
  let depth = 0;
  for (let end = index; end < text.length && end - index < MAX_LINK; end += 1) {
    if (text[end] === "(") depth += 1;
    else if (text[end] === ")" && (depth -= 1) === 0) return text.slice(index, end + 1);
    else if (text[end] === "\n") return "";
  }
  return "";
}

function readDelimiter(text, index) {
  const character = text[index];
  let end = index;
  while (text[end] === character) end += 1;
  const [before, after] = [text[index - 1] ?? " ", text[end] ?? " "];
  const isWordInside = character === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
  const count = end - index;
  const canBeUsed = !isWordInside && (character !== "~" || count === 2);
  return [{ type: "delimiter", character, count, canOpen: canBeUsed && /\S/.test(after), canClose: canBeUsed && /\S/.test(before) }, end];
}

function resolveEmphasis(nodes) {
  const done = [];
  for (const node of nodes) {
    if (node.type === "delimiter" && node.canClose) closeEmphasis(done, node);
    if (node.type !== "delimiter" || node.count) done.push(node);
  }
  return mergeText(done);
}

function closeEmphasis(done, closer) {
  let seen = 0;
  for (let index = done.length - 1; index >= 0 && closer.count && seen < MAX_OPENERS; index -= 1) {
    const opener = done[index];
    if (opener.type !== "delimiter") continue;
    seen += 1;
    if (opener.character !== closer.character || !opener.canOpen || !opener.count) continue;
    const used = opener.count >= 2 && closer.count >= 2 ? 2 : 1;
    const inlines = mergeText(done.splice(index + 1));
    if (!inlines.length) return;
    const type = closer.character === "~" ? "del" : used === 2 ? "strong" : "em";
    opener.count -= used;
    closer.count -= used;
    if (!opener.count) done.pop();
    done.push({ type, inlines });
    index = done.length; // the rest of the closer may close an opener further out
  }
}

function mergeText(nodes) {
  const merged = [];
  for (const node of nodes) {
    const text = node.type === "delimiter" ? node.character.repeat(node.count) : node.type === "text" ? node.text : null;
    if (text === null) merged.push(node);
    else if (merged.at(-1)?.type === "text") merged.at(-1).text += text;
    else merged.push({ type: "text", text });
  }
  return merged;
}
