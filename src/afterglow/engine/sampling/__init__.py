"""Token constraints, stop sequences and log-probabilities."""
