"""Names of models, where they come from, and where they are on this machine."""

from afterglow.registry.catalogue import CATALOGUE, DEFAULT, Entry, HubFile, Source, WheelFile, parse
from afterglow.registry.foreign import LocalModel, discover
from afterglow.registry.staging import Progress
from afterglow.registry.store import installed, models_directory, pull, removable, remove, resolve

__all__ = [
    "CATALOGUE",
    "DEFAULT",
    "Entry",
    "HubFile",
    "LocalModel",
    "Progress",
    "Source",
    "WheelFile",
    "discover",
    "installed",
    "models_directory",
    "parse",
    "pull",
    "removable",
    "remove",
    "resolve",
]
