"""Tool-call formats of model families."""
