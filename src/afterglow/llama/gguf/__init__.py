"""GGUF files: header, safety inspection, trial load, fingerprint and memory estimate."""
