"""Disk tier of the prefix cache."""
