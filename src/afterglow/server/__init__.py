"""An OpenAI-compatible server: wire types, routes, limits. What they ask for happens in `serving` and below."""
