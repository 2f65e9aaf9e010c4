"""From logits to tokens: a request's own sampler draws after each row, for as long as draw and guess agree."""

from __future__ import annotations

import contextlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.backend import Backend
from afterglow.engine.job import Job
from afterglow.engine.replay import Replay
from afterglow.engine.request import Event, Reason, Request, Token
from afterglow.engine.scoring import likeliest, log_probabilities
from afterglow.errors import AfterglowError

Ending: TypeAlias = tuple[Reason, bytes | int | None]


def continue_answer(job: Job, backend: Backend, span: int, row: int, events: list[Event]) -> Ending | None:
    """Draw after `row`, the last known entry, and then after each guess behind it; what ended the answer, if it did.

    The draw is always what is kept, so guesses save time and change nothing. The first one that differs from its guess
    is the last: the rows behind it were computed for another text.
    """
    request = job.request
    for guess in (*job.draft, None):
        logits = backend.logits(span, row)
        token = choose(job, logits)
        job.generated.append(token)
        events.append(Token(request.id, token) if request.logprobs is None else _scored(request, token, logits))
        job.accepted += token == guess
        ending = _ending(job, backend, token)
        if ending is not None or token != guess:
            return ending
        row += 1
    return None


def drop_wrong(job: Job, replay: Replay | None = None) -> bool:
    """Take the wrong guesses out of memory, with `replay` all of them. False: it could not be done, and memory is empty
    now."""
    assert job.sequence is not None
    sequence, keep = job.sequence, job.known - 1
    if len(sequence) <= keep:
        return True
    if sequence.resumable(keep):
        sequence.truncate(keep)
        return True
    with contextlib.suppress(AfterglowError):  # a state that does not load
        if replay is not None and replay.undo(job):
            return True
    job.guessing.barred = True
    sequence.clear()
    return False


def choose(job: Job, logits: NDArray[np.float32]) -> int:
    """The next token, by the job's sampler and by what leads it; both move on with it."""
    return job.sampler.take(logits) if job.guide is None else job.guide.take(job.sampler, logits)


def _scored(request: Request, token: int, logits: NDArray[np.float32]) -> Token:
    values = log_probabilities(logits)
    return Token(request.id, token, float(values[token]), likeliest(values, request.logprobs or 0))


def _ending(job: Job, backend: Backend, token: int) -> Ending | None:
    request = job.request
    if token in request.stop_tokens or (token in backend.ends and not request.ignore_ends):
        return "stop", token
    if job.stops is not None and (stop := job.stops.feed(backend.piece(token))) is not None:
        return "stop", stop
    if job.guide is not None and job.guide.ended:
        return "stop", None
    if len(job.generated) == request.max_tokens:
        return "length", None
    if job.full:  # the token has no cell to go to
        return "length", None
    return None
