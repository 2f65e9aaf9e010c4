"""Prefix cache: what is computed, where it is stored, how a prompt reuses it."""
