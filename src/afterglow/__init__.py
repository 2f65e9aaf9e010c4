"""afterglow: a local-first LLM inference engine on llama.cpp. No token is computed twice."""

from afterglow.version import __version__

__all__ = ["__version__"]
