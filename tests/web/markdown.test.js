// Markdown becomes a tree of plain objects; HTML and unsafe addresses stay text.

import assert from "node:assert/strict";
import { test } from "node:test";

import { parseInlines, parseMarkdown, sanitizeUrl } from "../../src/afterglow/web/markdown.js";

const text = (value) => ({ type: "text", text: value });
const types = (source) => parseMarkdown(source).map(({ type }) => type);
const strip = (blocks) => blocks.map(({ source, ...block }) => block);

test("a document has its blocks in order", () => {
  const source = "# Title\n\nText\n\n- one\n- two\n\n1. first\n\n> quote\n\n---\n\n| a | b |\n|---|:-:|\n| 1 | 2 |\n\n```js\ncode\n```";
  assert.deepEqual(types(source), ["heading", "paragraph", "list", "list", "quote", "rule", "table", "code"]);
});

test("html stays text", () => {
  const source = '<img src=x onerror="alert(1)"> <script>alert(1)</script>';
  assert.deepEqual(strip(parseMarkdown(source)), [{ type: "paragraph", inlines: [text(source)] }]);
});

test("a code fence that is still streaming is a code block", () => {
  const [block] = parseMarkdown("```python\nprint('a')");
  assert.deepEqual([block.type, block.language, block.text, block.isClosed], ["code", "python", "print('a')", false]);
});

test("a code block keeps its text, also fences inside it", () => {
  const [block] = parseMarkdown("````\n```\n  a < b\n```\n````");
  assert.equal(block.text, "```\n  a < b\n```");
});

test("emphasis nests and unmatched delimiters stay text", () => {
  assert.deepEqual(parseInlines("**a *b* c**"), [{ type: "strong", inlines: [text("a "), { type: "em", inlines: [text("b")] }, text(" c")] }]);
  assert.deepEqual(parseInlines("***x***"), [{ type: "em", inlines: [{ type: "strong", inlines: [text("x")] }] }]);
  assert.deepEqual(parseInlines("2 * 3 * 4 and **open"), [text("2 * 3 * 4 and **open")]);
  assert.deepEqual(parseInlines("snake_case_name"), [text("snake_case_name")]);
  assert.deepEqual(parseInlines("~~gone~~"), [{ type: "del", inlines: [text("gone")] }]);
});

test("code spans protect their text", () => {
  assert.deepEqual(parseInlines("`**a**` and ``b ` c``"), [{ type: "code", text: "**a**" }, text(" and "), { type: "code", text: "b ` c" }]);
  assert.deepEqual(parseInlines("an open `tick"), [text("an open `tick")]);
});

test("links have safe protocols only", () => {
  assert.deepEqual(parseInlines("[a](https://example.com/x)"), [{ type: "link", href: "https://example.com/x", inlines: [text("a")] }]);
  for (const address of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", " javascript:x", "/relative", "//host"]) {
    assert.equal(sanitizeUrl(address), null, address);
    assert.ok(parseInlines(`[a](${address})`).every(({ type }) => type === "text"), address);
  }
});

test("an image is a link: the page loads nothing from other hosts", () => {
  assert.deepEqual(parseInlines("![a](https://example.com/a.png)"), [{ type: "link", href: "https://example.com/a.png", inlines: [text("a")] }]);
});

test("bare addresses are links without the punctuation after them", () => {
  const nodes = parseInlines("see https://example.com/a_b, or (https://example.com/c).");
  assert.deepEqual(nodes.filter(({ type }) => type === "link").map(({ href }) => href), ["https://example.com/a_b", "https://example.com/c"]);
});

test("lists nest, have tasks and start numbers", () => {
  const [list] = parseMarkdown("3. a\n   - b\n     - c\n4. [x] d");
  assert.deepEqual([list.isOrdered, list.start, list.items.length], [true, 3, 2]);
  assert.equal(list.items[0].blocks[1].items[0].blocks[1].type, "list");
  assert.equal(list.items[1].isDone, true);
});

test("a table has as many cells in each row as in its head", () => {
  const [table] = parseMarkdown("a | b\n--|--:\n1 | 2 | 3\n4\\|5 |");
  assert.deepEqual(table.align, [null, "right"]);
  assert.deepEqual(table.rows, [[[text("1")], [text("2")]], [[text("4|5")], []]]);
});

test("every prefix of a document parses, and unchanged blocks have the same source", () => {
  const source = "# A\n\npara *em* [l](https://x.org)\n\n- a\n  - b\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nx\n```\n\n> q\n\nend";
  const whole = parseMarkdown(source);
  for (let length = 0; length <= source.length; length += 1) {
    const blocks = parseMarkdown(source.slice(0, length));
    for (const [index, block] of blocks.slice(0, -1).entries()) assert.equal(block.source, whole[index].source);
  }
});

test("hostile text parses in linear time", () => {
  for (const piece of ["*", "_a", "[", "`", "> ", "- ", "![](", "<", "|", "**a ", "(", "https://a(", "~~"]) {
    parseMarkdown(piece.repeat(20_000)); // quadratic would run into the time limit of the test
  }
});
