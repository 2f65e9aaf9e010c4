"""From logits to tokens: a request's own sampler draws after each row, for as long as draw and guess agree."""

from __future__ import annotations

import contextlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.sampling.logprobs import find_top_logprobs, log_softmax
from afterglow.engine.scheduling.job import Job
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.types.backend import Backend
from afterglow.engine.types.request import EngineEvent, FinishReason, Request, Token
from afterglow.errors import AfterglowError

FinishCause: TypeAlias = tuple[FinishReason, bytes | int | None]


def sample_and_verify(job: Job, backend: Backend, span: int, row: int, events: list[EngineEvent]) -> FinishCause | None:
    """Draw after `row`, the last known entry, and then after each guess behind it; what ended the answer, if it did.

    The draw is always what is kept, so guesses save time and change nothing. The first one that differs from its guess
    is the last: the rows behind it were computed for another text.
    """
    request = job.request
    for guess in (*job.draft, None):
        logits = backend.get_logits(span, row)
        token = sample_token(job, logits)
        job.generated.append(token)
        events.append(
            Token(request.id, token) if request.logprobs is None else _build_scored_token(request, token, logits)
        )
        job.accepted_token_count += token == guess
        ending = _find_finish_cause(job, backend, token)
        if ending is not None or token != guess:
            return ending
        row += 1
    return None


def drop_rejected(job: Job, replay: Rollback | None = None) -> bool:
    """Take the wrong guesses out of memory, with `replay` all of them. False: it could not be done, and memory is empty
    now."""
    assert job.sequence is not None
    sequence, keep = job.sequence, job.known_length - 1
    if len(sequence) <= keep:
        return True
    if sequence.can_resume_at(keep):
        sequence.truncate(keep)
        return True
    with contextlib.suppress(AfterglowError):  # a state that does not load
        if replay is not None and replay.restore(job):
            return True
    job.draft_stats.disabled = True
    sequence.clear()
    return False


def sample_token(job: Job, logits: NDArray[np.float32]) -> int:
    """The next token, by the job's sampler and by what leads it; both move on with it."""
    return (
        job.sampler.sample_and_accept(logits)
        if job.token_constraint is None
        else job.token_constraint.sample(job.sampler, logits)
    )


def _build_scored_token(request: Request, token: int, logits: NDArray[np.float32]) -> Token:
    values = log_softmax(logits)
    return Token(request.id, token, float(values[token]), find_top_logprobs(values, request.logprobs or 0))


def _find_finish_cause(job: Job, backend: Backend, token: int) -> FinishCause | None:
    request = job.request
    if token in request.stop_tokens or (token in backend.eog_tokens and not request.ignore_eos):
        return "stop", token
    if job.stop_matcher is not None and (stop := job.stop_matcher.feed(backend.token_to_piece(token))) is not None:
        return "stop", stop
    if job.token_constraint is not None and job.token_constraint.is_finished:
        return "stop", None
    if len(job.generated) == request.max_tokens:
        return "length", None
    if job.is_full:  # the token has no cell to go to
        return "length", None
    return None
