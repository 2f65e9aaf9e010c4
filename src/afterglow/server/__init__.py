"""OpenAI-compatible HTTP server: schemas, routes, admission and limits. Generation happens in `api` and below."""
