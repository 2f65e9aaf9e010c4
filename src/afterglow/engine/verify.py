"""Sampling and verification: samples after each row of a decode for as long as the samples equal the draft tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.sampling.logprobs import find_top_logprobs, log_softmax
from afterglow.engine.scheduling.job import RunningJob
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.types.backend import Backend
from afterglow.engine.types.request import EngineEvent, FinishCause, Token
from afterglow.errors import AfterglowError, UnsupportedOperation

GetLogits: TypeAlias = Callable[[int], NDArray[np.float32]]
NO_LOGITS = np.empty(0, np.float32)


def sample_and_verify(
    running: RunningJob,
    backend: Backend,
    get_logits: GetLogits,
    events: list[EngineEvent],
    first_token: int | AfterglowError | None = None,
) -> FinishCause | None:
    """Sample after the last known entry and after each draft token behind it. Return the finish cause, if any.

    `get_logits` returns the logits after the last known entry (0) and after the draft tokens (1 and on). `first_token`
    is the token after the last known entry, if it was sampled already.

    The sampled token is always the one that is output, so drafts save time and change no token. Sampling stops at the
    first token that differs from its draft: the rows after it were computed for another text.
    """
    job = running.job
    request = job.request
    needs_logprobs = request.needs_logprobs
    for index, draft_token in enumerate((*running.draft, None)):
        token = None if index else first_token
        logits = get_logits(index) if token is None or needs_logprobs else NO_LOGITS
        if token is None:
            token = sample_token(running, logits)
        elif isinstance(token, AfterglowError):
            raise token
        job.generated.append(token)
        if not needs_logprobs:
            events.append(Token(request.id, token))
        else:
            logprobs = log_softmax(logits)
            chosen = tuple((other, float(logprobs[other])) for other in request.logprob_tokens)
            alternatives = find_top_logprobs(logits, logprobs, request.logprobs or 0) + chosen
            events.append(Token(request.id, token, float(logprobs[token]), alternatives))
        finish_cause = _find_finish_cause(running, backend, token)
        if draft_token is None:
            return finish_cause
        job.accepted_token_count += token == draft_token
        if finish_cause is not None or token != draft_token:
            return finish_cause
    raise AssertionError("sampling ends after the last row")


def append_forced(running: RunningJob, backend: Backend, events: list[EngineEvent]) -> FinishCause | None:
    """Append the tokens that the grammar forces next, without computing or sampling each. Return the finish cause.

    The next decode computes them together. If they end the completion, it ends after that decode, so that the next
    turn finds them in the KV cache. With log-probabilities, every token needs logits, so none is appended.
    """
    job = running.job
    constraint = job.token_constraint
    if constraint is None or job.request.needs_logprobs:
        return None
    free_cells = max(0, running.free_cells)
    for token in constraint.find_forced_tokens()[:free_cells]:
        constraint.accept_forced(job.sampler, token)
        job.generated.append(token)
        running.forced_entries += 1
        events.append(Token(job.request.id, token))
        if (finish_cause := _find_finish_cause(running, backend, token)) is not None:
            if running.forced_entries == 1:  # only the newest token is not computed, as after any other token
                return finish_cause
            job.finish_cause = finish_cause
            return None
    return None


def drop_rejected(running: RunningJob, rollback: Rollback | None = None) -> bool:
    """Remove rejected draft tokens from the KV cache; with `rollback`, all draft tokens.

    Return False if that was not possible. The job's sequence is empty then, and the job drafts no more.
    """
    sequence, length = running.sequence, running.job.known_length - 1
    if len(sequence) <= length:
        return True
    with contextlib.suppress(UnsupportedOperation):  # the KV cache refused
        if sequence.can_resume_at(length):
            sequence.truncate(length)
            return True
    with contextlib.suppress(AfterglowError):  # the saved state does not load
        if rollback is not None and rollback.restore(running):
            return True
    running.job.draft_stats.disabled = True
    sequence.clear()
    return False


def sample_token(running: RunningJob, logits: NDArray[np.float32]) -> int:
    """Sample the next token under the job's token constraint. Advances the sampler and the constraint."""
    job = running.job
    if job.token_constraint is None:
        return job.sampler.sample_and_accept(logits)
    return job.token_constraint.sample(job.sampler, logits)


def _find_finish_cause(running: RunningJob, backend: Backend, token: int) -> FinishCause | None:
    job, request = running.job, running.job.request
    if request.ends_with(token, backend.eog_tokens):
        return "stop", token
    if job.stop_matcher is not None and (stop := job.stop_matcher.feed(backend.token_to_piece(token))) is not None:
        return "stop", stop
    if job.token_constraint is not None and job.token_constraint.is_finished:
        return "stop", None
    if job.indent_matcher is not None and job.indent_matcher.feed(backend.token_to_piece(token)) is not None:
        return "length", None
    if job.has_line_deadline_passed and b"\n" in backend.token_to_piece(token):
        return "deadline", None
    if len(job.generated) == request.max_tokens or running.is_full:  # full: there is no cell for the token
        return "length", None
    return None
