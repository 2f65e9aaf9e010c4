// Layout of the prefix tree as a horizontal icicle. Pure functions.
//
// The width of a rectangle is its tokens, its height the conversations that share it. So its area is the prefill that
// those conversations would need without the cache.

const TIERS = ["device", "ram", "disk", "checkpoint"]; // the fastest first
const MAX_ROW_HEIGHT = 34;
const READABLE_ROW_HEIGHT = 18;
const MAX_SCREENS = 3; // of scrolling before rows become thinner than readable
const MIN_VISIBLE = 2; // pixels; smaller rectangles are drawn together

/** Return the nodes with their children and their number of leaves, as a forest. */
export function buildForest(nodes) {
  const items = new Map(nodes.map((node) => [node.id, { node, children: [], parent: null, leaves: 0, end: node.end }]));
  const roots = [];
  for (const item of items.values()) {
    const parent = items.get(item.node.parent);
    if (parent && parent !== item) {
      parent.children.push(item);
      item.parent = parent;
    } else roots.push(item);
  }
  const order = [];
  for (const stack = [...roots]; stack.length; ) {
    const item = stack.pop();
    order.push(item);
    stack.push(...item.children);
  }
  for (const item of order.reverse()) {
    item.leaves = item.children.reduce((sum, child) => sum + child.leaves, 0) || 1;
    item.leaves += item.node.folded && item.children.length === 0 ? Math.max(0, item.node.sharers - 1) : 0;
    item.end = item.children.reduce((end, child) => Math.max(end, child.end), item.node.end);
    item.children.sort((a, b) => b.leaves - a.leaves || a.node.last_used_seconds_ago - b.node.last_used_seconds_ago);
  }
  return { roots: roots.sort((a, b) => b.leaves - a.leaves), items };
}

/** Place the forest, or the part below `focus`, into `width` pixels and rows that suit `height` pixels. */
export function layoutTree(nodes, { width, height, focus = null }) {
  const { roots, items } = buildForest(nodes);
  const focused = items.get(focus);
  const shown = focused ? [focused] : roots;
  const leaves = shown.reduce((sum, item) => sum + item.leaves, 0);
  const start = focused ? focused.node.start : 0;
  const end = shown.reduce((most, item) => Math.max(most, item.end), start + 1);
  const rowHeight = chooseRowHeight(leaves, height);
  const scale = width / (end - start);
  const rectangles = [];
  const stack = [];
  let top = 0;
  for (const item of shown) {
    stack.push([item, top]);
    top += item.leaves * rowHeight;
  }
  for (stack.reverse(); stack.length; ) {
    const [item, y] = stack.pop();
    const x = (item.node.start - start) * scale;
    const size = { x, y, width: Math.max(1, (item.node.end - item.node.start) * scale), height: item.leaves * rowHeight };
    rectangles.push({ ...size, node: item.node, hidden: 0, tier: getTier(item.node), depth: getDepth(item) });
    placeChildren(item, { y, rowHeight, scale, start, rectangles, stack });
  }
  return { rectangles, height: Math.max(top, rowHeight), rowHeight, start, end, scale };
}

function placeChildren(item, { y, rowHeight, scale, start, rectangles, stack }) {
  let hidden = [];
  let top = y;
  const later = [];
  const flush = () => {
    if (!hidden.length) return;
    const leaves = hidden.reduce((sum, child) => sum + child.leaves, 0);
    const end = Math.max(...hidden.map((child) => child.end));
    const size = { x: (item.node.end - start) * scale, y: top, width: Math.max(1, (end - item.node.end) * scale), height: leaves * rowHeight };
    rectangles.push({ ...size, node: hidden[0].node, hidden: hidden.reduce((sum, child) => sum + countNodes(child), 0), tier: getTier(hidden[0].node), depth: 0 });
    top += leaves * rowHeight;
    hidden = [];
  };
  for (const child of item.children) {
    if (child.leaves * rowHeight < MIN_VISIBLE || (child.end - child.node.start) * scale < MIN_VISIBLE) {
      hidden.push(child);
      if (hidden.reduce((sum, other) => sum + other.leaves, 0) * rowHeight >= MIN_VISIBLE) flush();
      continue;
    }
    flush();
    later.push([child, top]);
    top += child.leaves * rowHeight;
  }
  flush();
  stack.push(...later.reverse());
}

function chooseRowHeight(leaves, height) {
  const fitting = height / Math.max(1, leaves);
  if (fitting >= READABLE_ROW_HEIGHT) return Math.min(fitting, MAX_ROW_HEIGHT);
  return Math.min(READABLE_ROW_HEIGHT, fitting * MAX_SCREENS);
}

function countNodes(item) {
  let count = 0;
  for (const stack = [item]; stack.length; count += 1) stack.push(...stack.pop().children);
  return count;
}

function getDepth(item) {
  let depth = 1;
  for (let parent = item.parent; parent; parent = parent.parent) depth += 1;
  return depth;
}

/** The fastest tier that covers the whole range of a node; if none does, the one that covers most. */
export function getTier(node) {
  const length = node.end - node.start;
  const covering = TIERS.find((tier) => (node.tiers[tier] ?? 0) >= length && length > 0);
  if (covering) return covering;
  return TIERS.reduce((best, tier) => ((node.tiers[tier] ?? 0) > (node.tiers[best] ?? 0) ? tier : best), "device");
}

/** The neighbour of a node for an arrow key: parent, first child, or the next or previous sibling. */
export function getNeighbour(nodes, id, key) {
  const { roots, items } = buildForest(nodes);
  const item = items.get(id);
  if (!item) return roots[0]?.node ?? null;
  const siblings = item.parent ? item.parent.children : roots;
  const index = siblings.indexOf(item);
  const neighbours = {
    ArrowLeft: item.parent,
    ArrowRight: item.children[0],
    ArrowDown: siblings[index + 1] ?? item.parent?.parent?.children[item.parent.parent.children.indexOf(item.parent) + 1],
    ArrowUp: siblings[index - 1],
    Home: roots[0],
  };
  return neighbours[key]?.node ?? null;
}

/** Positions for the marks of the token axis: about `count` of them, at round numbers. */
export function chooseMarks(start, end, count) {
  const rough = (end - start) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) ?? 10 * power);
  const marks = [];
  for (let mark = Math.ceil(start / step) * step; mark < end; mark += step) marks.push(mark);
  return marks;
}
