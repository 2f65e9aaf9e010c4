"""The API of llama-server: completion, infill, embedding, slots, properties, adapters and token counts."""
