"""The binding: native handles, numbers and bytes. It knows llama.cpp and has no policy."""
