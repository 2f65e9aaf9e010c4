"""Reranking over HTTP, in the shapes of Cohere and Jina."""
