"""Mutants of speculative decoding. See mutants.py."""

from __future__ import annotations

import dataclasses

from afterglow.engine import engine, verify
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.sampling.token_constraints import TokenConstraint
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.speculation.speculator import Speculator
from afterglow.engine.types.counters import EngineCounters
from afterglow.testing import FakeBackend
from laws import test_speculation_on_fake as laws
from laws.mutants import mutant, wrap


@mutant(
    "draft tokens are accepted without verification",
    laws.test_speculation_changes_no_token,
    laws.test_speculation_preserves_the_sampling_distribution,
)
def _(put):
    def sample_token(running, logits):
        sampled = original(running, logits)
        index = len(running.job.generated) - (len(running.sequence) - len(running.job.prompt) - len(running.draft))
        return running.draft[index] if running.draft and index < len(running.draft) else sampled

    original = verify.sample_token
    put(verify, "sample_token", sample_token)


@mutant("a draft token is accepted if it is likely enough", laws.test_speculation_preserves_the_sampling_distribution)
def _(put):
    def sample_token(running, logits):
        index = len(running.job.generated) - (len(running.sequence) - len(running.job.prompt) - len(running.draft))
        if running.draft and index < len(running.draft) and logits[running.draft[index]] > logits.max() - 1:
            running.job.sampler.sample(logits)
            running.job.sampler.accept(running.draft[index])
            return running.draft[index]
        return original(running, logits)

    original = verify.sample_token
    put(verify, "sample_token", sample_token)


@mutant("one entry too many is rolled back", laws.test_speculation_changes_no_token)
def _(put):
    def truncate(original, self, length):
        original(self, length - 1 if self.busy and self.can_resume_at(length - 1) else length)
        self.entry_buffer.truncate(len(self))

    wrap(Sequence, "truncate", truncate)(put)


@mutant("the KV cache is rolled back too far and the recorded entries are not", laws.test_speculation_changes_no_token)
def _(put):
    def truncate(original, self, seq_id, position):
        earlier = position - 1 if position > 1 and self.can_resume_at(seq_id, position - 1) else position
        original(self, seq_id, earlier)
        self._kv_caches[seq_id].position = position

    wrap(FakeBackend, "truncate", truncate)(put)


@mutant("a rejected draft token stays in the KV cache", laws.test_speculation_changes_no_token)
def _(put):
    def drop_rejected(running, rollback=None):
        rejected = len(running.sequence) - (running.job.known_length - 1)
        if rejected > 0:
            running.sequence._set_length(running.job.known_length - 1)
        return True

    put(engine, "drop_rejected", drop_rejected)


@mutant("the sampler accepts rejected draft tokens", laws.test_the_sampler_advances_with_accepted_tokens_only)
def _(put):
    def sample_and_verify(running, backend, span, row, events):
        before = len(running.job.generated)
        finish_cause = original(running, backend, span, row, events)
        for token in running.draft[len(running.job.generated) - before :]:
            running.job.sampler.accept(token)
        return finish_cause

    original = engine.sample_and_verify
    put(engine, "sample_and_verify", sample_and_verify)


@mutant("the sampler samples after rejected draft tokens", laws.test_speculation_changes_no_token)
def _(put):
    def sample_and_verify(running, backend, get_logits, events, first_token=None):
        before = len(running.job.generated)
        finish_cause = original(running, backend, get_logits, events, first_token)
        for index in range(len(running.job.generated) - before, len(running.draft) + 1):
            running.job.sampler.sample(get_logits(index))
        return finish_cause

    original = engine.sample_and_verify
    put(engine, "sample_and_verify", sample_and_verify)


@mutant("the logits of the next row are used", laws.test_speculation_changes_no_token)
def _(put):
    def sample_and_verify(running, backend, get_logits, events, first_token=None):
        def get_next(index):
            return get_logits(min(index + 1, len(running.draft)))

        return original(running, backend, get_next, events)

    original = engine.sample_and_verify
    put(engine, "sample_and_verify", sample_and_verify)


@mutant(
    "draft tokens that the grammar forbids are computed",
    laws.test_a_grammar_holds_and_forbidden_draft_tokens_are_not_computed,
)
def _(put):
    put(TokenConstraint, "count_allowed", lambda self, tokens: len(tokens))


@mutant("drafts continue after the end of the completion", laws.test_stops_and_limits_apply_inside_accepted_drafts)
def _(put):
    def find_finish_cause(running, backend, token):
        finish_cause = original(running, backend, token)
        return None if running.job.known_length - 1 < len(running.sequence) else finish_cause

    original = verify._find_finish_cause
    put(verify, "_find_finish_cause", find_finish_cause)


@mutant("more tokens are drafted than can be rolled back", laws.test_drafts_are_limited_to_what_can_be_rolled_back)
def _(put):
    put(Speculator, "_get_max_length", lambda self, running, spare_rows: min(spare_rows, 16))


@mutant("deterministic mode speculates", laws.test_deterministic_mode_does_not_speculate)
def _(put):
    def init(original, self, settings, capabilities, cost_model, drafters, rollback=None):
        fixed = dataclasses.replace(settings, deterministic=False, speculation=4)  # "auto" may decide not to draft
        original(self, fixed, capabilities, cost_model, drafters, rollback)

    def schedule(original, self):
        self.speculator.propose_drafts([running for running in self._running if running.is_decoding], [])
        return original(self)

    wrap(Speculator, "__init__", init)(put)
    wrap(engine.Engine, "_schedule", schedule)(put)


# --- rollback to a saved state


@mutant("accepted tokens are not computed again", laws.test_replay_changes_no_token)
def _(put):
    def restore(original, self, running):
        restored = original(self, running)
        if restored:
            running.sequence.append_decoded(running.job.generated[-1 - running.entries_to_recompute : -1])
            running.entries_to_recompute = 0
        return restored

    wrap(Rollback, "restore", restore)(put)


@mutant("the state is saved after the draft", laws.test_replay_changes_no_token)
def _(put):
    def restore(original, self, running):
        self._saved_states = {
            other: dataclasses.replace(saved, state=self._backend.save(other.sequence.seq_id, "partial"))
            for other, saved in self._saved_states.items()
        }
        return original(self, running)

    wrap(Rollback, "restore", restore)(put)


@mutant("the state of another job is restored", laws.test_replay_changes_no_token)
def _(put):
    def restore(original, self, running):
        others = [saved for other, saved in self._saved_states.items() if other is not running]
        if others:
            self._saved_states[running] = dataclasses.replace(self._saved_states[running], state=others[0].state)
        return original(self, running)

    wrap(Rollback, "restore", restore)(put)


@mutant("replayed entries are not counted", laws.test_replay_changes_no_token)
def _(put):
    wrap(EngineCounters, "record_decode", lambda original, self, spans, replayed: original(self, spans, 0))(put)
