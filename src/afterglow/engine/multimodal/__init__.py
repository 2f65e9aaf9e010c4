"""Encoder cache for images and audio."""
