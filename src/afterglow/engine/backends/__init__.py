"""Implementations of the `Backend` protocol."""
