"""Binding to llama.cpp: native handles, numbers and bytes. Contains no policy."""
