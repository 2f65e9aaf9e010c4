"""Pictures and sounds as plain values, and the ways they come in. Knows nothing of models."""
