"""afterglow: a local-first LLM inference engine on llama.cpp. No token is computed twice."""

from afterglow.completion import Choice, Completion, Score
from afterglow.engine.engine import EngineSettings
from afterglow.engine.lifecycle import Stage
from afterglow.errors import AfterglowError
from afterglow.llama.sampling import Sampling
from afterglow.model import Model, load
from afterglow.version import __version__

__all__ = [
    "AfterglowError",
    "Choice",
    "Completion",
    "EngineSettings",
    "Model",
    "Sampling",
    "Score",
    "Stage",
    "__version__",
    "load",
]
