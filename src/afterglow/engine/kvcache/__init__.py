"""Prefix cache: the KV cache of the sequences, the tiers behind it, and the plan by which a prompt reuses them."""
