// Requests of the server, kept up to date by its events. Pure: events in, a new list out.

const LIVE_STATES = new Set(["queued", "prefill", "decoding"]);
const MAX_REQUESTS = 1000;

/** Apply an event of /events to the list of /requests, newest first. Returns the same list if nothing changed. */
export function applyEvent(requests, event) {
  if (!event.request) return requests;
  const index = requests.findIndex(({ id }) => id === event.request);
  if (index < 0) return event.type === "admitted" ? [buildRequest(event), ...requests].slice(0, MAX_REQUESTS) : requests;
  const change = CHANGES[event.type];
  return change ? requests.with(index, { ...requests[index], ...change(event, requests[index]) }) : requests;
}

/** Whether a request is queued, in its prefill or decoding. */
export function isLive(request) {
  return LIVE_STATES.has(request.state);
}

const CHANGES = {
  plan: ({ reused, computed, tier, reason }) => ({
    state: "prefill", cached_tokens: reused, computed_tokens: computed, prefill_done: reused, tier, reason,
  }),
  progress: ({ done, total }) => ({ state: "prefill", prefill_done: done, prompt_tokens: total }),
  first_token: () => ({ state: "decoding" }),
  decoding: ({ generated, tokens_per_second }) => ({ state: "decoding", generated_tokens: generated, tokens_per_second }),
  finished: (event, request) => ({
    state: "finished",
    prompt_tokens: event.prompt_tokens ?? request.prompt_tokens,
    cached_tokens: event.cached_tokens ?? request.cached_tokens,
    generated_tokens: event.generated_tokens ?? request.generated_tokens,
  }),
  failed: ({ error }) => ({ state: error === "cancelled" ? "cancelled" : "failed", error }),
};

function buildRequest(event) {
  return {
    id: event.request, model: event.model, state: "queued", created: event.time, prompt_tokens: event.prompt_tokens ?? 0,
    cached_tokens: 0, computed_tokens: 0, generated_tokens: 0, prefill_done: 0, tokens_per_second: 0, tier: null, reason: "",
    first_words: event.first_words ?? "", seconds_saved: 0, has_difference: false,
  };
}
