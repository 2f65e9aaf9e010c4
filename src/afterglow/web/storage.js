// Storage of the browser. Where it is blocked or full, values last as long as the page.

const PROBE_NAME = "afterglow-probe";

export function openStorage(getStorage) {
  try {
    const storage = getStorage();
    storage.setItem(PROBE_NAME, "1");
    storage.removeItem(PROBE_NAME);
    return storage;
  } catch {
    return new PageStorage();
  }
}

class PageStorage {
  #values = new Map();

  getItem(name) {
    return this.#values.get(name) ?? null;
  }

  setItem(name, value) {
    this.#values.set(name, String(value));
  }

  removeItem(name) {
    this.#values.delete(name);
  }
}
