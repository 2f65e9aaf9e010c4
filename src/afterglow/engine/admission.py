"""What a request must be so that it can ever be served."""

from __future__ import annotations

from afterglow.engine.backend import Backend
from afterglow.engine.entries import Ids, Ledger
from afterglow.engine.request import Request
from afterglow.errors import InvalidArgument, PromptTooLong


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
    if request.sequence is not None and not 0 <= request.sequence < slots:
        raise InvalidArgument("sequence", f"must be from 0 to {slots - 1}")
