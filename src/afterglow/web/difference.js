// Two texts around their first difference, cut into the parts that are equal and those that are not. Pure.

/** Split a text into words with the white space before them. */
export function splitWords(text) {
  return text.match(/\s*\S+|\s+$/g) ?? [];
}

const MAX_WORDS = 600; // of each side; the table of the comparison is this squared

/** Compare two texts. Returns for each a list of `{text, isEqual}`. */
export function compareTexts(one, other) {
  const [a, b] = [splitWords(one), splitWords(other)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const middle = alignWords(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const build = (words, flags) => joinParts([
    ...words.slice(0, start).map((text) => ({ text, isEqual: true })),
    ...words.slice(start, words.length - end).map((text, index) => ({ text, isEqual: flags[index] })),
    ...words.slice(words.length - end).map((text) => ({ text, isEqual: true })),
  ]);
  return [build(a, middle[0]), build(b, middle[1])];
}

/** Longest common subsequence of two lists of words, as flags. */
function alignWords(a, b) {
  const flags = [a.map(() => false), b.map(() => false)];
  if (a.length > MAX_WORDS || b.length > MAX_WORDS) return flags;
  const lengths = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      flags[0][i] = flags[1][j] = true;
      i += 1;
      j += 1;
    } else if (lengths[i + 1][j] >= lengths[i][j + 1]) i += 1;
    else j += 1;
  }
  return flags;
}

function joinParts(parts) {
  const joined = [];
  for (const part of parts) {
    if (joined.at(-1)?.isEqual === part.isEqual) joined.at(-1).text += part.text;
    else joined.push({ ...part });
  }
  return joined;
}
