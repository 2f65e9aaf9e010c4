"""The native llama.cpp library: finding it, checking it and opening it."""
