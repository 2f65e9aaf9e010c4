"""Bodies of the OpenAI routes, and their conversion to messages and options."""
