"""Explanation of prefix misses for several APIs: a prompt compared with the nearest cached prefix, as text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from afterglow.api.model import Model, PromptInput
from afterglow.chat.miss_reasons import MissReport, explain_miss
from afterglow.chat.multimodal import get_media_label
from afterglow.engine.inspect.difference import PrefixMiss
from afterglow.engine.kvcache.explain import Explanation, MissCause
from afterglow.engine.types.entries import Entry, Media
from afterglow.engine.types.request import PlannedPrefix
from afterglow.server.adapters import Lora
from afterglow.server.history import Difference


@dataclass(frozen=True, slots=True)
class ExplainedMiss:
    """A prompt, how it differs from the nearest cached prefix, and why."""

    entries: list[Entry]
    miss: PrefixMiss
    shared_text: str  # of the prompt and the cached prefix
    report: MissReport


def explain_prompt_miss(model: Model, prompt: PromptInput, salt: str, lora: Lora) -> ExplainedMiss:
    """Compare a prompt with the nearest cached prefix. Blocking."""
    entries = list(model.build_request(prompt).entries)
    miss = model.explain_miss(prompt, salt=salt, lora=lora)
    shared_text = format_entries(model, entries[: miss.common_length])
    report = explain_miss(
        miss.explanation,
        shared_text=shared_text,
        prompt_text=format_entries(model, entries[miss.common_length :]),
        cached_text=format_entries(model, miss.cached_entries),
    )
    return ExplainedMiss(entries, miss, shared_text, report)


def summarize_plan(model: Model, plan: PlannedPrefix, prompt_entries: int, difference: Difference) -> str:
    """Return one sentence: how much of a prompt was reused, and why the rest is computed. Blocking."""
    explanation = Explanation(
        prompt_entries=prompt_entries,
        reused_entries=plan.reused_entries,
        shared_entries=plan.shared_entries,
        next_prompt_entry=None,
        next_cached_entry=None,
        cause=cast(MissCause, plan.cause),
        evicted_entries=plan.evicted_entries,
    )
    head, before, prompt, cached = (
        format_entries(model, part.tolist())
        for part in (difference.head, difference.before, difference.prompt, difference.cached)
    )
    report = explain_miss(explanation, shared_text=head + before, prompt_text=prompt, cached_text=cached)
    return (
        f"reused {explanation.reused_entries:,} of {prompt_entries:,}; "
        f"computed {explanation.computed_entries:,} because: {report.summary}"
    )


def format_entries(model: Model, entries: Sequence[Entry]) -> str:
    """Format entries as text, with a label for each media entry. Entries of an engine encode media as negatives."""
    text, label = "", get_media_label(model.engine_info.media)
    for is_media, group in itertools.groupby(entries, key=lambda entry: isinstance(entry, Media) or entry < 0):
        run = list(group)
        text += label * len(run) if is_media else model.detokenize(run, special=True)  # type: ignore[arg-type]
    return text
