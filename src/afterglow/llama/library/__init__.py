"""Finds and opens the native llama.cpp library."""
