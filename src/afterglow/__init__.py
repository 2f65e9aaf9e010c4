"""afterglow: a local-first LLM inference engine on llama.cpp. No token is computed twice."""

from afterglow.engine.lifecycle import Stage
from afterglow.errors import AfterglowError
from afterglow.model import Completion, Model, Score, load
from afterglow.version import __version__

__all__ = ["AfterglowError", "Completion", "Model", "Score", "Stage", "__version__", "load"]
