"""Hosts: an engine in a thread of this process or in a child process."""
