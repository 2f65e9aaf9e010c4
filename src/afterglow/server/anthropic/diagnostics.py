"""The field `diagnostics` of a message: why the prompt was not reused further."""

from __future__ import annotations

from typing import Any

from afterglow.api.model import Model
from afterglow.chat.miss_reasons import MissReason, find_last_role
from afterglow.chat.prompt import ChatPrompt
from afterglow.server.adapters import Lora
from afterglow.server.explain import ExplainedMiss, explain_prompt_miss

REUSED_REASONS: frozenset[MissReason] = frozenset({"repeated", "fully reused", "continuation"})
UNAVAILABLE_REASONS: frozenset[MissReason] = frozenset(
    {"evicted", "no checkpoint", "window moved", "deterministic grid"}
)
CHANGED_TYPES: dict[MissReason, str] = {
    "tools changed": "tools_changed",
    "tools reordered": "tools_changed",
    "system prompt": "system_changed",
}


def diagnose(model: Model, prompt: ChatPrompt, salt: str, lora: Lora) -> dict[str, Any] | None:
    """Build `diagnostics` for a prompt that was not submitted yet; None if all that is cached is reused. Blocking."""
    explained = explain_prompt_miss(model, prompt, salt, lora)
    if explained.report.reason in REUSED_REASONS:
        return None
    miss_type, missed = classify(explained), explained.miss.cached_length - explained.miss.explanation.reused_entries
    reason: dict[str, Any] = {"type": miss_type}
    if miss_type.endswith("_changed"):
        reason["cache_missed_input_tokens"] = max(0, missed)
    return {"cache_miss_reason": reason}


def classify(explained: ExplainedMiss) -> str:
    """Return Anthropic's type of a miss."""
    reason = explained.report.reason
    if reason == "not cached":
        return "previous_message_not_found"
    if reason in UNAVAILABLE_REASONS:
        return "unavailable"
    is_system = find_last_role(explained.shared_text) in (None, "system")
    return CHANGED_TYPES.get(reason, "system_changed" if is_system else "messages_changed")
