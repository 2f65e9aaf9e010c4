"""What a request must be so that it can ever be served."""

from __future__ import annotations

from afterglow.engine.types.backend import Backend
from afterglow.engine.types.entries import Entries, EntryInterner, Media
from afterglow.engine.types.request import Request
from afterglow.errors import InvalidArgument, PromptTooLong, UnsupportedMedia


def check_servable(request: Request, entries: Entries, interner: EntryInterner, backend: Backend) -> None:
    """A typed error where the request, whose entries are `ids`, cannot be served by this backend at any time."""
    limit, slots = backend.capabilities.cells_per_sequence, backend.capabilities.sequences
    request.check()
    if not len(entries):
        raise InvalidArgument("entries", "must be at least one")
    if (worst := int(entries.max())) >= backend.vocabulary_size:
        raise InvalidArgument("entries", f"must be tokens from 0 to {backend.vocabulary_size - 1}, not {worst}")
    if (cells := interner.count_cells(entries)) > limit:
        raise PromptTooLong(cells, limit)
    for number in entries[entries < 0]:
        _check_media(request, interner.get_media(int(number)), backend)
    if request.sequence is not None and not 0 <= request.sequence < slots:
        raise InvalidArgument("sequence", f"must be from 0 to {slots - 1}")


def _check_media(request: Request, media: Media, backend: Backend) -> None:
    capabilities, projector = backend.capabilities, backend.projector
    if not capabilities.media:
        raise UnsupportedMedia("entries", "this model takes no pictures and no sound, only text")
    most = min(capabilities.batch_cells, capabilities.ubatch_cells)
    if media.non_causal and media.cells > most:
        raise UnsupportedMedia(
            "entries",
            f"a picture of {media.cells} tokens has to be computed in one go, and {most} fit: load with more `ubatch`",
        )
    if projector is None:
        return
    part = request.media.get(media.digest)
    if part is None:
        raise InvalidArgument("media", "has nothing for one of the pictures among the entries")
    if part.compute_digest(projector.key) != media.digest:
        raise InvalidArgument("media", "has something else for one of the pictures: measure it with this projector")
