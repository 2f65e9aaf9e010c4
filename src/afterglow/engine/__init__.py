"""The engine: what is in memory and how it gets there. Knows no messages, no text and no I/O."""
