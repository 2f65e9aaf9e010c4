"""GGUF files: header, safety inspection, memory estimate."""
