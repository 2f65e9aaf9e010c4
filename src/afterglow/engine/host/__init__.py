"""Hosts: an engine in a thread or in a child process."""
