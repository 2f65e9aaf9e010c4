"""Disk tier of the prefix cache: files, their index, the writer thread and the prefetcher."""
