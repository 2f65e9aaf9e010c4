"""afterglow: a local-first LLM inference engine on llama.cpp. No token is computed twice."""

from afterglow.completion import Choice, Completion, Score
from afterglow.engine.lifecycle import Stage
from afterglow.engine.settings import EngineSettings
from afterglow.errors import AfterglowError
from afterglow.llama.sampling import Sampling
from afterglow.loading import load
from afterglow.model import Model
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
