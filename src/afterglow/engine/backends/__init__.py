"""Backends behind the engine's Backend protocol."""
