"""The Ollama API: bodies, model names, conversion to generation requests, and newline-delimited JSON."""
