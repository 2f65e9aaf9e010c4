"""Encoder cache for images and audio, in RAM and in files."""
