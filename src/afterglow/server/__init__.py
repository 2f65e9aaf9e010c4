"""HTTP server with the APIs of OpenAI, Anthropic and Ollama: schemas, routes, admission and limits.

Generation happens in `api` and below.
"""
