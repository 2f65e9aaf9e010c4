// Numbers as text. Pure functions.

const GROUPED = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 8412 -> "8,412". */
export function formatCount(value) {
  return GROUPED.format(value ?? 0);
}

/** 1536 -> "1.5 KiB". */
export function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1023.5 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** 0.42 -> "0.4 s", 75 -> "1 min 15 s", 7300 -> "2 h 1 min". */
export function formatSeconds(seconds) {
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const minutes = Math.floor((seconds + 0.5) / 60);
  if (minutes < 60) return join(minutes, "min", Math.round(seconds - 60 * minutes), "s");
  return join(Math.floor(minutes / 60), "h", minutes % 60, "min");
}

/** How long ago something happened: "just now", "5 min ago", "3 d ago". */
export function formatAge(seconds) {
  if (seconds < 45) return "just now";
  if (seconds < 3570) return `${Math.max(1, Math.round(seconds / 60))} min ago`;
  if (seconds < 86_400) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86_400)} d ago`;
}

/** 41.27 -> "41 tok/s", 4.127 -> "4.1 tok/s". */
export function formatRate(tokensPerSecond) {
  return `${tokensPerSecond >= 10 ? Math.round(tokensPerSecond) : tokensPerSecond.toFixed(1)} tok/s`;
}

/** What a finished request reused: "reused 8,390 of 8,412". */
export function formatReuse(cached, prompt) {
  return `reused ${formatCount(cached)} of ${formatCount(prompt)}`;
}

/** Progress of a prefill: "prefill 3,120 of 8,412 · 3 s left". */
export function formatPrefill(done, total, secondsLeft) {
  const left = secondsLeft === null || secondsLeft === undefined ? "" : ` · ${formatSeconds(secondsLeft)} left`;
  return `prefill ${formatCount(done)} of ${formatCount(total)}${left}`;
}

/** The first line of a text, for titles. */
export function firstLine(text, length = 60) {
  const line = text.trim().split("\n", 1)[0].trim();
  return line.length > length ? `${line.slice(0, length - 1).replace(/\p{Cs}$/u, "").trimEnd()}…` : line; // no half of a character
}

/** First words of a prefix without control tokens: "<|im_start|>user Hi" -> "user: Hi". */
export function cleanPrefix(text) {
  return text
    .replaceAll(/(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>)(\w+)(?:<\|end_header_id\|>)?\s*/g, "$1: ")
    .replaceAll(/<\|[\w ]+\|>|<(?:end_of_turn|bos|s|\/s)>/g, " ")
    .replaceAll(/\s+/g, " ")
    .trim();
}

function join(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}
