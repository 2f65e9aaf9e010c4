// DOM construction. Text becomes text nodes: no string is ever parsed as markup.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

/** Create an element. Attributes starting with "on" are listeners, null and false ones are left out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

/** Create an icon of the sprite in icons.js. */
export function icon(path) {
  const shape = svg("path", { d: path });
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, shape);
}

/** Create a button with an icon, whose label is read aloud and shown as a tooltip. */
export function iconButton(path, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: "icon-button", title: label, "aria-label": label, onclick, ...attributes }, icon(path));
}

/** Create a thin bar that is filled to a share between 0 and 1. */
export function gauge(share, label, role = "meter") {
  const fill = h("span");
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  const percent = Math.round(100 * share);
  return h("span", { class: "gauge", role, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent, "aria-valuetext": `${percent} percent` }, fill);
}

/** Replace the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter(isNode));
  return element;
}

/** Replace the children from the first that differs. An element that is inserted again loses its scroll position and its focus. */
export function replaceEnd(element, children) {
  const before = [...element.children];
  const same = before.findIndex((child, index) => child !== children[index]);
  const kept = same < 0 ? before.length : same;
  for (const child of before.slice(kept)) child.remove();
  element.append(...children.slice(kept));
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter(isNode)); // strings become text nodes
  return element;
}

function isNode(child) {
  return child !== null && child !== undefined && child !== false;
}
