"""Prompts that a program writes by hand: texts, tokens, pictures and sounds in one list, as the engine's entries."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from afterglow.engine import services
from afterglow.engine.engine import Engine
from afterglow.engine.entries import Entry, Media
from afterglow.engine.pictures import Part, Seen, entries_of
from afterglow.engine.services import Measures
from afterglow.errors import InvalidArgument
from afterglow.llama.projector import Measurable, Measured, measurable
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.contents import Content, Picture, Sound

T = TypeVar("T")
Item: TypeAlias = str | int | Content
REMEMBERED = 256  # shapes of pictures and lengths of sounds


class Measuring:
    """Asks the engine how much room pictures and sounds take. Only their shapes and lengths travel, and each once."""

    def __init__(self, call: Callable[[Callable[[Engine], Measures]], Measures]) -> None:
        self._call = call
        self._known: OrderedDict[Measurable, tuple[bytes, Measured]] = OrderedDict()

    def __call__(self, contents: Sequence[Content]) -> list[list[Seen]]:
        """What stands in a prompt for each."""
        return [entries_of(content, measured, key) for content in contents for key, measured in [self._one(content)]]

    def _one(self, content: Content) -> tuple[bytes, Measured]:
        asked = measurable(content)
        if (known := self._known.get(asked)) is not None:
            return known
        measures = self._call(functools.partial(services.measure, contents=[asked]))
        found = self._known[asked] = measures.key, measures.measured[0]
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found


def is_mixed(prompt: Any) -> bool:
    """Whether a prompt is a list that has more in it than tokens."""
    return isinstance(prompt, list | tuple) and any(isinstance(item, str | Picture | Sound) for item in prompt)


def mixed_entries(
    items: Sequence[Item], vocabulary: Vocabulary, measure: Measuring
) -> tuple[list[Entry], dict[bytes, Part]]:
    """A prompt out of texts, tokens, pictures and sounds, and what the pictures and sounds are.

    Texts are tokenized one by one; the first item, where it is a text, begins as the model's prompts do.
    """
    entries: list[Entry] = []
    contents: dict[bytes, Part] = {}
    for index, item in enumerate(items):
        if isinstance(item, Picture | Sound):
            for entry, part in measure([item])[0]:
                entries.append(entry)
                if isinstance(entry, Media) and part is not None:
                    contents[entry.digest] = part
        elif isinstance(item, str):
            entries += vocabulary.tokenize(item, bos=index == 0)
        elif isinstance(item, int):
            entries += vocabulary.check_all([item]).tolist()
        else:
            raise InvalidArgument("prompt", f"may have texts, tokens, pictures and sounds in it, not {item!r}")
    return entries, contents
