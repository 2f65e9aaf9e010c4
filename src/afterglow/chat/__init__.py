"""Chat: messages to prompts, and generated tokens to responses. Knows nothing of KV caches and scheduling."""
