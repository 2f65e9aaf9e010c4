"""Prompts as engine entries: mixed prompts of text, tokens, images and audio, and prompts that were truncated."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.chat.prompt import Truncation
from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.remote_calls import MediaMeasurement
from afterglow.engine.multimodal.encoder_cache import MediaEntry, build_media_entries
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.media import EncodedMedia, MediaContent, MediaPart
from afterglow.errors import InvalidArgument
from afterglow.llama.projector import MediaPlaceholder, MediaSize, get_media_size
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.types import AudioData, ImageData, MediaData

EntrySequence: TypeAlias = Sequence[Entry] | NDArray[np.int64]
PromptPart: TypeAlias = str | int | MediaData
MAX_CACHED_MEASUREMENTS = 256  # distinct image sizes and audio lengths


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """Entries and media of a prompt, possibly truncated, and what was dropped."""

    entries: EntrySequence
    media: Mapping[bytes, MediaPart]
    truncation: Truncation | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of a prompt without media."""
        return [int(entry) for entry in self.entries]  # type: ignore[arg-type]


class MediaMeasurer:
    """Asks the engine how many cells images and audio take. Sends only their sizes, and each size only once."""

    def __init__(self, call: Callable[[Callable[[Engine], MediaMeasurement]], MediaMeasurement]) -> None:
        self._call = call
        self._cache: OrderedDict[MediaSize, tuple[bytes, MediaPlaceholder]] = OrderedDict()

    def __call__(self, media: Sequence[MediaContent]) -> list[list[MediaEntry]]:
        """Return the prompt entries of each image or audio clip."""
        return [
            build_media_entries(content, placeholder, projector_key)
            for content in media
            for projector_key, placeholder in [self._measure(content)]
        ]

    def _measure(self, content: MediaContent) -> tuple[bytes, MediaPlaceholder]:
        size = content.size if isinstance(content, EncodedMedia) else get_media_size(content)
        if (cached := self._cache.get(size)) is not None:
            return cached
        measurement = self._call(functools.partial(remote_calls.measure_media, media=[size]))
        result = self._cache[size] = measurement.projector_key, measurement.measured[0]
        while len(self._cache) > MAX_CACHED_MEASUREMENTS:
            self._cache.popitem(last=False)
        return result


def is_mixed_prompt(prompt: Any) -> bool:
    """Return whether a prompt is a list with anything other than tokens."""
    return isinstance(prompt, list | tuple) and any(isinstance(part, str | ImageData | AudioData) for part in prompt)


def build_mixed_entries(
    parts: Sequence[PromptPart], vocabulary: Vocabulary, measure: MediaMeasurer
) -> tuple[list[Entry], dict[bytes, MediaPart]]:
    """Return the entries of a mixed prompt, and its media by digest.

    Each text is tokenized on its own. If the first part is text, it gets the special tokens that start a prompt.
    """
    entries: list[Entry] = []
    media: dict[bytes, MediaPart] = {}
    for index, part in enumerate(parts):
        if isinstance(part, ImageData | AudioData):
            for entry, media_part in measure([part])[0]:
                entries.append(entry)
                if isinstance(entry, Media) and media_part is not None:
                    media[entry.digest] = media_part
        elif isinstance(part, str):
            entries += vocabulary.tokenize(part, add_special=index == 0)
        elif isinstance(part, int):
            entries += vocabulary.check_tokens([part]).tolist()
        else:
            raise InvalidArgument("prompt", f"may contain text, tokens, images and audio, not {part!r}")
    return entries, media
