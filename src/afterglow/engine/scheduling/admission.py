"""Admission checks: rejects requests that the backend can never serve."""

from __future__ import annotations

from afterglow.engine.types.backend import Backend
from afterglow.engine.types.entries import Entries, EntryInterner, Media
from afterglow.engine.types.request import Request
from afterglow.errors import InvalidArgument, PromptTooLong, UnsupportedMedia


def check_servable(request: Request, entries: Entries, interner: EntryInterner, backend: Backend) -> None:
    """Raise a typed error if this backend can never serve the request; `entries` are its interned entries."""
    max_cells, slots = backend.capabilities.cells_per_sequence, backend.capabilities.sequences
    request.check()
    if not len(entries):
        raise InvalidArgument("entries", "must be at least one")
    if (largest := int(entries.max())) >= backend.vocabulary_size:
        raise InvalidArgument("entries", f"must be tokens from 0 to {backend.vocabulary_size - 1}, not {largest}")
    for token in request.logprob_tokens:
        if not 0 <= token < backend.vocabulary_size:
            raise InvalidArgument("logprob_tokens", f"must be from 0 to {backend.vocabulary_size - 1}, not {token}")
    if (cells := interner.count_cells(entries)) > max_cells:
        raise PromptTooLong(cells, max_cells)
    for media_id in entries[entries < 0]:
        _check_media(request, interner.get_media(int(media_id)), backend)
    if request.sequence is not None and not 0 <= request.sequence < slots:
        raise InvalidArgument("sequence", f"must be from 0 to {slots - 1}")


def _check_media(request: Request, media: Media, backend: Backend) -> None:
    capabilities, projector = backend.capabilities, backend.projector
    if not capabilities.media:
        raise UnsupportedMedia("entries", "this model takes no images and no audio, only text")
    max_cells = min(capabilities.batch_cells, capabilities.ubatch_cells)
    if media.non_causal and media.cells > max_cells:
        raise UnsupportedMedia(
            "entries",
            f"an image of {media.cells} tokens must be computed in one ubatch of at most {max_cells}: "
            "load with a larger `ubatch`",
        )
    if projector is None:
        return
    part = request.media.get(media.digest)
    if part is None:
        raise InvalidArgument("media", "has no content for a media entry of the prompt")
    if part.compute_digest(projector.key) != media.digest:
        raise InvalidArgument("media", "has different content for a media entry: measure it with this projector")
