"""Prompts that a program writes by hand: texts, tokens, pictures and sounds in one list, as the engine's entries."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.remote_calls import MediaMeasurement
from afterglow.engine.multimodal.encoder_cache import MediaEntry, build_media_entries
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import MediaPart
from afterglow.errors import InvalidArgument
from afterglow.llama.projector import MediaPlaceholder, MediaSize, get_media_size
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.types import AudioData, ImageData, MediaData

T = TypeVar("T")
PromptPart: TypeAlias = str | int | MediaData
MAX_CACHED_MEASUREMENTS = 256  # shapes of pictures and lengths of sounds


class MediaMeasurer:
    """Asks the engine how much room pictures and sounds take. Only their shapes and lengths travel, and each once."""

    def __init__(self, call: Callable[[Callable[[Engine], MediaMeasurement]], MediaMeasurement]) -> None:
        self._call = call
        self._cache: OrderedDict[MediaSize, tuple[bytes, MediaPlaceholder]] = OrderedDict()

    def __call__(self, media: Sequence[MediaData]) -> list[list[MediaEntry]]:
        """What stands in a prompt for each."""
        return [
            build_media_entries(content, measured, key)
            for content in media
            for key, measured in [self._measure(content)]
        ]

    def _measure(self, content: MediaData) -> tuple[bytes, MediaPlaceholder]:
        asked = get_media_size(content)
        if (known := self._cache.get(asked)) is not None:
            return known
        measures = self._call(functools.partial(remote_calls.measure_media, media=[asked]))
        found = self._cache[asked] = measures.projector_key, measures.measured[0]
        while len(self._cache) > MAX_CACHED_MEASUREMENTS:
            self._cache.popitem(last=False)
        return found


def is_mixed_prompt(prompt: Any) -> bool:
    """Whether a prompt is a list that has more in it than tokens."""
    return isinstance(prompt, list | tuple) and any(isinstance(item, str | ImageData | AudioData) for item in prompt)


def build_mixed_entries(
    parts: Sequence[PromptPart], vocabulary: Vocabulary, measure: MediaMeasurer
) -> tuple[list[Entry], dict[bytes, MediaPart]]:
    """A prompt out of texts, tokens, pictures and sounds, and what the pictures and sounds are.

    Texts are tokenized one by one; the first item, where it is a text, begins as the model's prompts do.
    """
    entries: list[Entry] = []
    contents: dict[bytes, MediaPart] = {}
    for index, item in enumerate(parts):
        if isinstance(item, ImageData | AudioData):
            for entry, part in measure([item])[0]:
                entries.append(entry)
                if isinstance(entry, Media) and part is not None:
                    contents[entry.digest] = part
        elif isinstance(item, str):
            entries += vocabulary.tokenize(item, add_special=index == 0)
        elif isinstance(item, int):
            entries += vocabulary.check_tokens([item]).tolist()
        else:
            raise InvalidArgument("prompt", f"may have texts, tokens, pictures and sounds in it, not {item!r}")
    return entries, contents
