"""Public API: `load`, `Model`, `Conversation` and the values they return."""
