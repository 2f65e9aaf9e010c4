"""The policy `compact`: which messages a summary replaces, in which pieces it is written, and when it is used again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afterglow.chat.chat import ChatPlan
from afterglow.chat.compaction import (
    HEADER,
    Compactor,
    SummaryTask,
    WrittenSummary,
    compact_plan,
    list_cuts,
)
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.prompt import ChatPrompt, Compaction
from afterglow.chat.summaries import SqliteSummaries, SummaryStore
from afterglow.engine.types.request import Usage
from afterglow.errors import Cancelled, EngineCrashed, PromptTooLong

CONTEXT = 4000  # of which 500 are for a summary
SYSTEM = Message(role="system", content="s" * 100)


def build_plan(messages: list[Message], reasoning_off: bool = False) -> ChatPlan:
    """Build a plan with one entry for each character of the messages."""
    text = "".join(message.content for message in messages)
    prompt = ChatPrompt(entries=tuple(map(ord, text)), boundaries=frozenset(), text=text)
    unused: Any = None
    return ChatPlan(
        chat=unused,
        prompt=prompt,
        tools=(),
        tool_choice=unused,
        starts_in="turn",
        prefill=None,
        constraint=None,
        reasoning_budget=None,
        parse=None,
    )


def build_turns(count: int, length: int = 100) -> list[Message]:
    """Build a system message and turns of two messages each; the last turn has only its question."""
    texts = [f"{number:02}{name}".ljust(length, name) for number in range(count) for name in "qa"]
    roles = ["user", "assistant"] * count
    return [SYSTEM, *(Message(role=role, content=text) for role, text in zip(roles, texts, strict=True))][:-1]


class Writer:
    """Writes summaries and keeps their tasks."""

    def __init__(self, text: Callable[[int], str] = lambda number: f"summary {number}.") -> None:
        self.tasks: list[SummaryTask] = []
        self._text = text

    def __call__(self, task: SummaryTask) -> WrittenSummary:
        self.tasks.append(task)
        text = self._text(len(self.tasks))
        usage = Usage(prompt_tokens=task.plan.prompt.cells, cached_tokens=10, generated_tokens=7)
        return WrittenSummary(text, usage, "" if text else "the model wrote an empty summary")


def compact(
    messages: list[Message],
    store: SummaryStore,
    write: Callable[[SummaryTask], WrittenSummary],
    *,
    salt: str = "",
    max_tokens: int | None = 100,
    build_summary_plan: Callable[[list[Message], bool], ChatPlan] = build_plan,
) -> ChatPlan:
    compactor = Compactor(
        messages=messages,
        build_plan=build_plan,
        build_summary_plan=build_summary_plan,
        context=CONTEXT,
        max_tokens=max_tokens,
    )
    return compact_plan(compactor, store, salt, write)


def get_compaction(plan: ChatPlan) -> Compaction:
    assert plan.truncation is not None
    assert plan.truncation.compaction is not None
    return plan.truncation.compaction


def test_a_conversation_with_space_left_is_not_summarized() -> None:
    write = Writer()
    plan = compact(build_turns(14), SummaryStore("m"), write)
    assert (plan.prompt.cells, plan.truncation, write.tasks) == (2800, None, [])


def test_a_summary_is_written_while_the_history_still_fits_with_the_instruction() -> None:
    write = Writer()
    messages = build_turns(16)  # 3,200 of 4,000: one summary and its instruction still fit
    plan = compact(messages, SummaryStore("m"), write)
    (task,) = write.tasks
    assert task.plan.prompt.cells + task.max_tokens <= CONTEXT
    assert task.plan.prompt.text.startswith("".join(message.content for message in messages[: 1 + task.cut]))
    assert "Write only the summary" in task.plan.prompt.text
    assert plan.prompt.text.startswith(f"{SYSTEM.content}{HEADER}summary 1.")
    assert plan.prompt.text.endswith("".join(message.content for message in messages[1 + task.cut :]))


def test_the_report_names_the_messages_the_tokens_and_the_summary() -> None:
    plan = compact(build_turns(16), SummaryStore("m"), write := Writer())
    assert plan.truncation is not None
    assert plan.truncation.report == {
        "policy": "compact",
        "summarized_messages": write.tasks[0].cut,
        "tokens_before": 3200,
        "tokens_after": plan.prompt.cells,
        "summary": "summary 1.",
        "summaries_written": 1,
        "computed_tokens": write.tasks[0].plan.prompt.cells - 10,
        "generated_tokens": 7,
    }


def test_later_turns_use_the_same_summary_and_continue_its_prompt() -> None:
    store, write = SummaryStore("m"), Writer()
    texts = [compact(build_turns(count), store, write).prompt.text for count in range(16, 21)]
    assert len(write.tasks) == 1
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_the_next_summary_covers_the_one_before() -> None:
    store, write = SummaryStore("m"), Writer()
    count = next(count for count in range(16, 60) if compact(build_turns(count), store, write) and write.tasks[1:])
    first, second = write.tasks
    assert second.cut > first.cut
    assert second.plan.prompt.text.startswith(f"{SYSTEM.content}{HEADER}summary 1.")
    assert get_compaction(compact(build_turns(count), store, write)).summary == "summary 2."


def test_an_edited_old_message_needs_another_summary() -> None:
    store, write = SummaryStore("m"), Writer()
    compact(build_turns(16), store, write)
    edited = build_turns(16)
    edited[2] = Message(role="assistant", content="e" * 100)
    compact(edited, store, write)
    assert len(write.tasks) == 2


def test_a_summary_is_found_only_with_its_salt() -> None:
    store, write = SummaryStore("m"), Writer()
    compact(build_turns(16), store, write, salt="one")
    compact(build_turns(16), store, write, salt="two")
    assert len(write.tasks) == 2


def test_a_history_that_exceeds_the_context_is_summarized_in_pieces() -> None:
    write = Writer()
    plan = compact(build_turns(100), SummaryStore("m"), write)
    assert len(write.tasks) > 4
    assert all(task.plan.prompt.cells + task.max_tokens <= CONTEXT for task in write.tasks)
    assert plan.prompt.cells <= CONTEXT - 1000
    assert get_compaction(plan).summaries_written == len(write.tasks)
    assert get_compaction(plan).summary == f"summary {len(write.tasks)}."


def build_agent_turn(rounds: int) -> list[Message]:
    """Build one question and rounds of a tool call with two results."""
    calls = (ToolCall(id="a", name="look", arguments="{}"), ToolCall(id="b", name="look", arguments="{}"))
    steps = [Message(role="assistant", content="c" * 100, tool_calls=calls)]
    steps += [Message(role="tool", content=id * 100, tool_call_id=id) for id in "ab"]
    return [SYSTEM, Message(role="user", content="QUESTION"), *(steps * rounds)]


def test_a_turn_of_many_tool_calls_is_divided_between_them_and_keeps_its_question() -> None:
    messages = build_agent_turn(12)
    plan = compact(messages, SummaryStore("m"), write := Writer())
    cut = write.tasks[0].cut
    assert (cut - 1) % 3 == 0  # after both results
    assert plan.prompt.text.startswith(f"{SYSTEM.content}{HEADER}summary 1.QUESTION" + "c" * 100)
    later = compact([*messages, Message(role="user", content="x")], store := SummaryStore("m"), Writer()).prompt.text
    assert later == compact([*messages, Message(role="user", content="x")], store, Writer()).prompt.text
    assert "QUESTION" in later


def test_tool_calls_are_never_separated_from_their_results() -> None:
    roles = ["user", "assistant", "tool", "user", "tool", "assistant", "user"]
    assert list_cuts([Message(role=role, content="") for role in roles]) == [5, 6]


def test_an_empty_summary_falls_back_to_shift_and_says_so() -> None:
    plan = compact(build_turns(20), SummaryStore("m"), Writer(lambda number: ""))
    assert plan.truncation is not None
    assert plan.truncation.report["policy"] == "shift"
    assert plan.truncation.report["fallback"] == "the model wrote an empty summary"
    assert plan.truncation.dropped_messages > 0


def fail(error: Exception) -> Callable[[SummaryTask], WrittenSummary]:
    def write(task: SummaryTask) -> WrittenSummary:
        raise error

    return write


def test_a_failed_engine_falls_back_to_shift_but_a_cancelled_request_does_not() -> None:
    plan = compact(build_turns(16), SummaryStore("m"), fail(EngineCrashed("killed")))
    assert plan.truncation is not None
    assert "killed" in plan.truncation.fallback
    with pytest.raises(Cancelled):
        compact(build_turns(16), SummaryStore("m"), fail(Cancelled("stop")))


def test_a_question_longer_than_the_context_is_refused() -> None:
    with pytest.raises(PromptTooLong):
        compact([*build_turns(3)[:-1], Message(role="user", content="x" * 4100)], SummaryStore("m"), Writer())


def test_a_question_that_leaves_little_space_is_still_answered() -> None:
    messages = [*build_turns(8)[:-1], Message(role="user", content="x" * 3400)]
    plan = compact(messages, SummaryStore("m"), Writer())
    assert plan.prompt.cells < CONTEXT
    assert get_compaction(plan).summarized_messages == 14


def test_reasoning_stays_on_if_the_template_writes_it_into_the_system_prompt() -> None:
    def build_summary_plan(messages: list[Message], reasoning_off: bool) -> ChatPlan:
        first = Message(role="system", content="no thinking ") if reasoning_off else None
        return build_plan([*([first] if first else []), *messages])

    compact(build_turns(16), SummaryStore("m"), write := Writer(), build_summary_plan=build_summary_plan)
    (task,) = write.tasks
    assert task.plan.prompt.text.startswith(SYSTEM.content)
    assert task.max_tokens > 500  # space to reason in
    compact(build_turns(16), SummaryStore("m"), write := Writer())
    assert write.tasks[0].max_tokens == 500


# --- the store


def test_summaries_survive_a_restart_and_a_clear_removes_them(tmp_path: Path) -> None:
    keys: list[bytes] = []
    for expected in (0, 1):
        store = SummaryStore("m", disk=SqliteSummaries(tmp_path, "m"))
        keys = store.compute_keys(build_turns(3), "salt")
        assert len(store.find(keys)) == expected
        store.add(keys[2], "text")
        store.close()
    store.clear()
    assert SummaryStore("m", disk=SqliteSummaries(tmp_path, "m")).find(keys) == {}


def test_the_first_of_two_summaries_of_the_same_messages_is_used() -> None:
    store = SummaryStore("m")
    assert store.add(b"key", "first") == "first"
    assert store.add(b"key", "second") == "first"


def test_the_least_recently_used_summary_is_evicted_first() -> None:
    store = SummaryStore("m", max_bytes=1000)
    for key in (b"a", b"b", b"c"):
        store.add(key, "x" * 100)
        store.touch(b"a")
    assert list(store.find([b"a", b"b", b"c"])) == [0, 2]


def test_reasoning_and_call_ids_do_not_change_what_a_summary_covers() -> None:
    store = SummaryStore("m")
    messages = [
        Message(
            role="assistant", content="x", reasoning=reasoning, tool_calls=(ToolCall(id=id, name="f", arguments=a),)
        )
        for reasoning, id, a in ((None, "1", '{"a":1}'), ("long", "2", '{"a": 1}'))
    ]
    assert store.compute_keys(messages[:1], "") == store.compute_keys(messages[1:], "")
