"""OpenAI-compatible generation routes: chat completions, completions, responses and embeddings."""
