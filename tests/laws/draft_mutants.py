"""Planted bugs in guessing ahead. See mutants.py."""

from __future__ import annotations

import dataclasses

from afterglow.engine import engine, verify
from afterglow.engine.kvcache.sequence import Sequence
from afterglow.engine.sampling.token_constraints import TokenConstraint
from afterglow.engine.speculation.rollback import Rollback
from afterglow.engine.speculation.speculator import Speculator
from afterglow.testing import FakeBackend
from laws import test_speculation_on_the_fake as laws
from laws.mutants import mutant, wrapped


@mutant(
    "guesses are accepted blindly",
    laws.test_speculation_changes_no_token,
    laws.test_what_is_drawn_is_distributed_as_without_guesses,
)
def _(put):
    def choose(job, logits):
        drawn = original(job, logits)
        done = len(job.generated) - (len(job.sequence) - len(job.prompt) - len(job.draft))
        return job.draft[done] if job.draft and done < len(job.draft) else drawn

    original = verify.sample_token
    put(verify, "sample_token", choose)


@mutant("a guess is accepted where it is likely enough", laws.test_what_is_drawn_is_distributed_as_without_guesses)
def _(put):
    def choose(job, logits):
        done = len(job.generated) - (len(job.sequence) - len(job.prompt) - len(job.draft))
        if job.draft and done < len(job.draft) and logits[job.draft[done]] > logits.max() - 1:
            job.sampler.sample(logits)
            job.sampler.accept(job.draft[done])
            return job.draft[done]
        return original(job, logits)

    original = verify.sample_token
    put(verify, "sample_token", choose)


@mutant("one entry too many is rolled back", laws.test_speculation_changes_no_token)
def _(put):
    def truncate(original, self, length):
        original(self, length - 1 if self.busy and self.resumable(length - 1) else length)
        self.entry_buffer.truncate(len(self))

    wrapped(Sequence, "truncate", truncate)(put)


@mutant("memory is rolled back too far and the record is not", laws.test_speculation_changes_no_token)
def _(put):
    def truncate(original, self, slot, position):
        deeper = position - 1 if position > 1 and self.resumable(slot, position - 1) else position
        original(self, slot, deeper)
        self._memory[slot].position = position

    wrapped(FakeBackend, "truncate", truncate)(put)


@mutant("a wrong guess stays in memory", laws.test_speculation_changes_no_token)
def _(put):
    def drop_wrong(job, replay=None):
        wrong = len(job.sequence) - (job.known_length - 1)
        if wrong > 0:
            job.sequence._set_length(job.known_length - 1)
        return True

    put(engine, "drop_wrong", drop_wrong)


@mutant("the sampler accepts wrong guesses", laws.test_the_sampler_s_state_moves_with_kept_tokens_only)
def _(put):
    def continue_answer(job, backend, span, row, events):
        before = len(job.generated)
        ending = original(job, backend, span, row, events)
        for guess in job.draft[len(job.generated) - before :]:
            job.sampler.accept(guess)
        return ending

    original = engine.sample_and_verify
    put(engine, "continue_answer", continue_answer)


@mutant("the sampler draws after wrong guesses", laws.test_speculation_changes_no_token)
def _(put):
    def continue_answer(job, backend, span, row, events):
        before = len(job.generated)
        ending = original(job, backend, span, row, events)
        for further in range(len(job.generated) - before, len(job.draft) + 1):
            job.sampler.sample(backend.logits(span, row + further))
        return ending

    original = engine.sample_and_verify
    put(engine, "continue_answer", continue_answer)


@mutant("the logits are those of the row behind", laws.test_speculation_changes_no_token)
def _(put):
    def continue_answer(job, backend, span, row, events):
        return original(job, backend, span, row + bool(job.draft), events)

    original = engine.sample_and_verify
    put(engine, "continue_answer", continue_answer)


@mutant("what the grammar forbids is computed", laws.test_a_grammar_is_kept_and_what_it_forbids_is_never_computed)
def _(put):
    put(TokenConstraint, "count_allowed", lambda self, tokens: len(tokens))


@mutant("guesses run over the end of the answer", laws.test_stops_and_limits_hold_in_the_middle_of_right_guesses)
def _(put):
    def ending(job, backend, token):
        found = original(job, backend, token)
        return None if job.known_length - 1 < len(job.sequence) else found

    original = verify._find_finish_cause
    put(verify, "_find_finish_cause", ending)


@mutant("more is guessed than can be taken back", laws.test_memory_that_cannot_go_back_is_never_asked_to)
def _(put):
    put(Speculator, "_get_max_length", lambda self, job, spare: min(spare, 16))


@mutant("the deterministic mode guesses", laws.test_the_deterministic_mode_does_not_guess)
def _(put):
    def make(original, self, settings, capabilities, costs, drafters, replay=None):
        original(self, settings, capabilities, costs, drafters, replay)
        self._drafters = list(drafters)

    def schedule(original, self):
        self.speculator.offer([job for job in self._running if job.is_decoding], [])
        return original(self)

    wrapped(Speculator, "__init__", make)(put)
    wrapped(engine.Engine, "_schedule", schedule)(put)


# --- going back to a saved state


@mutant("what was right is not computed again", laws.test_replay_changes_no_token)
def _(put):
    def undo(original, self, job):
        found = original(self, job)
        if found:
            job.sequence.append_decoded(job.generated[-1 - job.entries_to_recompute : -1])
            job.entries_to_recompute = 0
        return found

    wrapped(Rollback, "restore", undo)(put)


@mutant("the state is saved after the guesses", laws.test_replay_changes_no_token)
def _(put):
    def undo(original, self, job):
        self._before = {
            one: dataclasses.replace(before, state=self._backend.save(one.sequence.number, "partial"))
            for one, before in self._before.items()
        }
        return original(self, job)

    wrapped(Rollback, "restore", undo)(put)


@mutant("the state of another job is put back", laws.test_replay_changes_no_token)
def _(put):
    def undo(original, self, job):
        others = [before for one, before in self._before.items() if one is not job]
        if others:
            self._before[job] = dataclasses.replace(self._before[job], state=others[0].state)
        return original(self, job)

    wrapped(Rollback, "restore", undo)(put)


@mutant("what is replayed is not counted", laws.test_replay_changes_no_token)
def _(put):
    def measure(original, self, spans, tokens, replayed, seconds):
        original(self, spans, tokens, 0, seconds)

    wrapped(engine.Engine, "_record_timing", measure)(put)
