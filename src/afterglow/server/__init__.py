"""HTTP server with the APIs of OpenAI, Anthropic, Ollama and llama-server: schemas, routes, admission and limits.

Generation happens in `api` and below.
"""
