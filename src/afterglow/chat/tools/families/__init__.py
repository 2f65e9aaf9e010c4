"""Tool-call formats of the model families."""
