"""The inference engine: KV cache, scheduling, sampling and speculative decoding. No chat messages, text or network."""
