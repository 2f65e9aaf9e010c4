"""What a request must be so that it can ever be served."""

from __future__ import annotations

from afterglow.engine.backend import Backend
from afterglow.engine.entries import Ids, Ledger, Media
from afterglow.engine.request import Request
from afterglow.errors import InvalidArgument, PromptTooLong, UnsupportedMedia


def check_servable(request: Request, ids: Ids, ledger: Ledger, backend: Backend) -> None:
    """A typed error where the request, whose entries are `ids`, cannot be served by this backend at any time."""
    limit, slots = backend.capabilities.cells, backend.capabilities.sequences
    request.check()
    if not len(ids):
        raise InvalidArgument("entries", "must be at least one")
    if (worst := int(ids.max())) >= backend.vocabulary:
        raise InvalidArgument("entries", f"must be tokens from 0 to {backend.vocabulary - 1}, not {worst}")
    if (cells := ledger.cells(ids)) > limit:
        raise PromptTooLong(cells, limit)
    for number in ids[ids < 0]:
        _check_media(request, ledger.media(int(number)), backend)
    if request.sequence is not None and not 0 <= request.sequence < slots:
        raise InvalidArgument("sequence", f"must be from 0 to {slots - 1}")


def _check_media(request: Request, media: Media, backend: Backend) -> None:
    capabilities, projector = backend.capabilities, backend.projector
    if not capabilities.media:
        raise UnsupportedMedia("entries", "this model takes no pictures and no sound, only text")
    most = min(capabilities.batch_cells, capabilities.ubatch_cells)
    if media.whole and media.cells > most:
        raise UnsupportedMedia(
            "entries",
            f"a picture of {media.cells} tokens has to be computed in one go, and {most} fit: load with more `ubatch`",
        )
    if projector is None:
        return
    part = request.contents.get(media.digest)
    if part is None:
        raise InvalidArgument("contents", "has nothing for one of the pictures among the entries")
    if part.digest(projector.key) != media.digest:
        raise InvalidArgument("contents", "has something else for one of the pictures: measure it with this projector")
