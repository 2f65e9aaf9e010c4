// Files to content parts of a message: images, audio, and text files.

const MAX_TEXT_BYTES = 1024 * 1024;
const AUDIO_FORMATS = { "audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3" };

/** Read a file. Raises an error with a reason if it cannot be attached. */
export async function readAttachment(file) {
  if (file.type.startsWith("image/")) {
    return { name: file.name || "image", part: { type: "image_url", image_url: { url: await readDataUrl(file) } } };
  }
  if (file.type.startsWith("audio/")) {
    const format = AUDIO_FORMATS[file.type];
    if (!format) throw new Error(`${file.name}: only WAV and MP3 audio can be attached`);
    const data = (await readDataUrl(file)).split(",", 2)[1];
    return { name: file.name || "audio", part: { type: "input_audio", input_audio: { data, format } } };
  }
  if (file.size > MAX_TEXT_BYTES) throw new Error(`${file.name}: a text file may have at most 1 MiB`);
  const text = decodeText(await file.arrayBuffer());
  if (text === null) throw new Error(`${file.name}: is neither an image, audio nor text`);
  return { name: file.name, part: { type: "text", text: formatFile(file.name, text) } };
}

/** A text file as a part of a prompt: its name, and its content in a fence that the content cannot close. */
export function formatFile(name, text) {
  const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${name}\n${fence}\n${text}\n${fence}`;
}

/** Kind of a content part: image, audio or text. */
export function getKind(part) {
  return { image_url: "image", input_audio: "audio" }[part.type] ?? "text";
}

function decodeText(buffer) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(buffer);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function readDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: cannot be read`));
    reader.readAsDataURL(file);
  });
}
