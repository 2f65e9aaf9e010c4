"""Overflow policy `compact`: a summary that the model writes replaces the old messages of a conversation.

The prompt of a summary is the conversation up to a cut, followed by an instruction. It continues what the prefix cache
holds, so the old messages are not prefilled again. `Compactor` decides; `compact_plan` acts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from afterglow.chat.chat import ChatPlan
from afterglow.chat.messages import SYSTEM_ROLES, Message
from afterglow.chat.prompt import Compaction, Truncation, count_common_prefix, count_system_messages
from afterglow.chat.summaries import SummaryStore
from afterglow.chat.truncation import compute_prompt_limit, fit_plan
from afterglow.engine.types.request import Usage
from afterglow.errors import AfterglowError, Cancelled, Closed

MAX_SUMMARY_TOKENS = 1024  # an eighth of the context, at most this
REASONING_FACTOR = 4  # a summary may take so many times its tokens if the model must reason before it
INSTRUCTION = """\
The conversation is about to exceed the context. Write a summary that replaces all messages above. Keep what is \
needed to continue: requests of the user, decisions, facts, names, numbers, paths, results of tools, and open work. \
Do not answer and do not call tools. Write only the summary, in at most {words} words."""
HEADER = "Summary of the conversation so far, which replaces its earlier messages:\n\n"

BuildPlan: TypeAlias = Callable[[list[Message]], ChatPlan]
BuildSummaryPlan: TypeAlias = Callable[[list[Message], bool], ChatPlan]  # the flag: whether reasoning is off


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryTask:
    """A summary to write: of the first `cut` messages after the system messages."""

    cut: int
    plan: ChatPlan
    max_tokens: int


@dataclass(frozen=True, slots=True)
class WrittenSummary:
    """Text of a summary, the tokens that it took, and why it cannot be used if it failed."""

    text: str
    usage: Usage
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Compactor:
    """Decides for one conversation which summary to write next, and which prompt to use in the end."""

    messages: Sequence[Message]
    build_plan: BuildPlan
    build_summary_plan: BuildSummaryPlan
    context: int
    max_tokens: int | None
    system_count: int = field(init=False)
    cuts: Sequence[int] = field(init=False)
    full_plan: ChatPlan = field(init=False)  # of all messages

    def __post_init__(self) -> None:
        object.__setattr__(self, "system_count", count_system_messages(self.messages))
        object.__setattr__(self, "cuts", list_cuts(self.history))
        object.__setattr__(self, "full_plan", self.build_plan(list(self.messages)))

    @property
    def history(self) -> Sequence[Message]:
        """Messages after the system messages."""
        return self.messages[self.system_count :]

    @property
    def summary_tokens(self) -> int:
        """Maximum number of tokens of a summary."""
        return max(1, min(MAX_SUMMARY_TOKENS, self.context // 8))

    @property
    def instruction(self) -> Message:
        """Last message of the prompt of a summary."""
        return Message(role="user", content=INSTRUCTION.format(words=max(10, self.summary_tokens * 2 // 3)))

    @property
    def limit(self) -> int:
        """Maximum cells of a prompt: beside the response, the instruction and the summary must fit after it."""
        return min(compute_prompt_limit(self.context, self.max_tokens), self.context - 2 * self.summary_tokens)

    def decide(self, summaries: Mapping[int, str]) -> ChatPlan | SummaryTask | None:
        """Return a plan that fits, or the summary to write next. None: neither exists.

        `summaries` are those that are known, by their cuts. The one that covers most is used.
        """
        if self.full_plan.prompt.cells <= self.limit:
            return self.full_plan
        base = max((cut for cut in summaries if cut in self.cuts), default=0)
        current = self.build_compacted(base, summaries[base]) if base else self.full_plan
        if base and current.prompt.cells <= self.limit:
            return current
        task = self._choose_task(base, summaries.get(base), current)
        # A prompt that cannot be shortened any more may take the space of the response.
        return current if task is None and current.prompt.cells <= self.context else task

    def build_compacted(self, cut: int, summary: str) -> ChatPlan:
        """Plan the prompt with a summary of the messages before a cut."""
        kept = self._list_kept(cut)
        plan = self.build_plan([*self.messages[: self.system_count], build_summary_message(summary), *kept])
        before, after = self.full_plan.prompt.cells, plan.prompt.cells
        compaction = Compaction(summarized_messages=cut, tokens_before=before, tokens_after=after, summary=summary)
        return replace(plan, truncation=Truncation(policy="compact", compaction=compaction))

    def _list_kept(self, cut: int) -> list[Message]:
        """Return the messages after a cut. If it divides a turn, its question comes first."""
        history = self.history
        questions = [index for index in range(cut) if history[index].role == "user"]
        divides_turn = bool(questions) and history[cut].role != "user"
        return [*([history[questions[-1]]] if divides_turn else []), *history[cut:]]

    def _choose_task(self, base: int, summary: str | None, current: ChatPlan) -> SummaryTask | None:
        """Return the next summary: it leaves half of the limit free, unless its own prompt would exceed the context."""
        later = [cut for cut in self.cuts if cut > base]

        def leaves_space(cut: int) -> bool:
            return self.build_compacted(cut, "").prompt.cells + self.summary_tokens <= self.limit // 2

        def exceeds_context(cut: int) -> bool:
            prompt = self.build_summary_plan(self._list_summarized(base, summary, cut), True).prompt
            return prompt.cells + self.summary_tokens > self.context

        smallest = bisect.bisect_left(later, True, key=leaves_space)
        candidates = later[: smallest + 1]
        count = bisect.bisect_left(candidates, True, key=exceeds_context)
        if not count:
            return None
        cut = candidates[count - 1]
        messages = self._list_summarized(base, summary, cut)
        # Some templates write whether to reason into the system prompt: use the prompt that continues the cached one.
        without_reasoning, as_before = (self.build_summary_plan(messages, off) for off in (True, False))
        warm = current.prompt.entries
        lengths = [count_common_prefix(plan.prompt.entries, warm) for plan in (without_reasoning, as_before)]
        reasons = lengths[1] > lengths[0]
        plan = as_before if reasons else without_reasoning
        free = self.context - plan.prompt.cells
        max_tokens = min(self.summary_tokens * (REASONING_FACTOR if reasons else 1), max(1, free))
        return SummaryTask(cut=cut, plan=plan, max_tokens=max_tokens)

    def _list_summarized(self, base: int, summary: str | None, cut: int) -> list[Message]:
        """Return the prompt of a summary: an earlier summary, the messages from it to the cut, and the instruction."""
        system, history = self.messages[: self.system_count], self.history
        if summary is None:
            return [*system, *history[:cut], self.instruction]
        kept = self._list_kept(base)
        end = len(kept) - (len(history) - cut)
        return [*system, build_summary_message(summary), *kept[:end], self.instruction]


def list_cuts(history: Sequence[Message]) -> list[int]:
    """Return the positions at which a history may be divided, in order.

    Tool results stay with their calls, and a question that is not answered stays with what follows.

    >>> roles = ("user", "assistant", "tool", "assistant", "user")
    >>> list_cuts([Message(role=role, content="") for role in roles])
    [3, 4]
    """
    cuts = []
    for cut in range(1, len(history)):
        following = next((message.role for message in history[cut:] if message.role != "user"), None)
        if following != "tool" and history[cut - 1].role not in ("user", *SYSTEM_ROLES):
            cuts.append(cut)
    return cuts


def build_summary_message(summary: str) -> Message:
    """Build the message that replaces the summarised ones."""
    return Message(role="user", content=HEADER + summary)


def compact_plan(
    compactor: Compactor, store: SummaryStore, salt: str, write: Callable[[SummaryTask], WrittenSummary]
) -> ChatPlan:
    """Return a plan that fits, after its summaries are written or found. `ChatPlan.truncation` reports it.

    A history that is too long for one summary is summarised in pieces: each summary covers the one before. If a summary
    fails, the oldest turns are dropped as with `shift`, and the report says why.
    """
    keys: list[bytes] = []
    written: list[WrittenSummary] = []
    summaries: dict[int, str] = {}
    try:
        decision = compactor.decide(summaries)
        while not isinstance(decision, ChatPlan):
            if not keys:
                keys = store.compute_keys(compactor.history, salt)
                summaries |= store.find(keys)
            elif decision is None:
                return shift_plan(compactor, "no part of the conversation can be summarized")
            else:
                summary = write(decision)
                if summary.failure:
                    return shift_plan(compactor, summary.failure)
                written.append(summary)
                summaries[decision.cut] = store.add(keys[decision.cut], summary.text)
            decision = compactor.decide(summaries)
    except (Cancelled, Closed):
        raise
    except AfterglowError as error:
        return shift_plan(compactor, str(error))
    if decision.truncation is None or decision.truncation.compaction is None:
        return decision
    compaction = decision.truncation.compaction
    store.touch(keys[compaction.summarized_messages])
    usages = [summary.usage for summary in written]
    report = replace(
        compaction,
        summaries_written=len(written),
        computed_tokens=sum(usage.prompt_tokens - usage.cached_tokens for usage in usages),
        generated_tokens=sum(usage.generated_tokens for usage in usages),
    )
    return replace(decision, truncation=replace(decision.truncation, compaction=report))


def shift_plan(compactor: Compactor, reason: str) -> ChatPlan:
    """Drop the oldest turns instead, and report why."""
    plan = fit_plan(
        compactor.messages,
        compactor.build_plan,
        "shift",
        context=compactor.context,
        max_tokens=compactor.max_tokens,
    )
    truncation = plan.truncation or Truncation(policy="shift")
    return replace(plan, truncation=replace(truncation, fallback=reason))
