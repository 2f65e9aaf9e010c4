"""Speculative decoding: drafters, draft length, and rollback of rejected draft tokens."""
