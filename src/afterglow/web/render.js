// Markdown blocks to DOM nodes. Blocks whose source did not change keep their nodes while a message streams.

import { h, replace } from "./dom.js";
import { parseMarkdown } from "./markdown.js";

const sources = new WeakMap(); // element to the sources of its blocks

/** Show a markdown text in an element. */
export function renderMarkdown(element, text) {
  const before = sources.get(element) ?? [];
  const blocks = parseMarkdown(text);
  let same = 0;
  while (same < before.length && same < blocks.length && before[same] === blocks[same].source) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map(renderBlock));
  sources.set(element, blocks.map((block) => block.source));
}

function renderBlock(block) {
  switch (block.type) {
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, {}, renderInlines(block.inlines));
    case "code":
      return renderCode(block);
    case "list":
      return renderList(block);
    case "quote":
      return h("blockquote", {}, block.blocks.map(renderBlock));
    case "table":
      return renderTable(block);
    case "rule":
      return h("hr");
    default:
      return h("p", {}, renderInlines(block.inlines));
  }
}

function renderCode(block) {
  const code = h("code", {}, block.text);
  const copy = copyButton(() => block.text);
  const bar = h("div", { class: "code-bar" }, h("span", {}, block.language || "text"), copy);
  return h("div", { class: "code-block" }, bar, h("pre", { tabindex: "0" }, code));
}

function renderList(block) {
  const items = block.items.map((item) => {
    const isShort = item.blocks.length === 1 || (item.blocks.length === 2 && item.blocks[1].type === "list");
    const [first, ...rest] = item.blocks;
    const content = isShort && first?.type === "paragraph"
      ? [renderInlines(first.inlines), rest.map(renderBlock)]
      : item.blocks.map(renderBlock);
    const box = item.isDone === null ? null : h("input", { type: "checkbox", disabled: true, checked: item.isDone, "aria-label": "task" });
    return h("li", { class: box && "task" }, box, content);
  });
  return h(block.isOrdered ? "ol" : "ul", { start: block.start !== 1 && block.start }, items);
}

function renderTable(block) {
  const build = (tag) => (inlines, column) => h(tag, { class: block.align[column] && `align-${block.align[column]}` }, renderInlines(inlines));
  const head = h("thead", {}, h("tr", {}, block.head.map(build("th"))));
  const body = h("tbody", {}, block.rows.map((row) => h("tr", {}, row.map(build("td")))));
  return h("div", { class: "table-scroll", tabindex: "0" }, h("table", {}, head, body));
}

function renderInlines(inlines) {
  return inlines.map((node) => {
    switch (node.type) {
      case "text":
        return node.text;
      case "code":
        return h("code", {}, node.text);
      case "break":
        return h("br");
      case "link":
        return h("a", { href: node.href, target: "_blank", rel: "noopener noreferrer" }, renderInlines(node.inlines));
      default:
        return h(node.type, {}, renderInlines(node.inlines)); // strong, em, del
    }
  });
}

/** A button that copies a text and says so. */
export function copyButton(getText) {
  const button = h("button", { type: "button", class: "copy", onclick: copy }, "Copy");
  async function copy() {
    let label = "Copied";
    try {
      await navigator.clipboard.writeText(getText());
    } catch {
      label = "Not allowed"; // the clipboard needs a secure context: loopback or HTTPS
    }
    replace(button, label);
    setTimeout(() => replace(button, "Copy"), 1500);
  }
  return button;
}
