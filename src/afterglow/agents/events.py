"""Events of a run, and its outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from afterglow.agents.limits import NOTHING_SPENT, Spent
from afterglow.agents.permissions import Decision, Effect
from afterglow.chat.messages import ToolCall
from afterglow.chat.prompt import Truncation

ResultStatus: TypeAlias = Literal["ok", "error", "invalid", "denied", "repeated"]


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning.

    >>> Thought("Hm").text
    'Hm'
    """

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the model's text.

    >>> Said("Hello").text
    'Hello'
    """

    text: str


@dataclass(frozen=True, slots=True)
class Calling:
    """The model called a tool. Nothing is decided yet.

    >>> Calling(ToolCall(id="1", name="look", arguments="{}")).call.name
    'look'
    """

    call: ToolCall


@dataclass(frozen=True, slots=True)
class Decided:
    """A call is executed or denied, or a person has to answer. `reason` is the rule, the effect or the person.

    >>> Decided(ToolCall(id="1", name="look", arguments="{}"), "allow", "the effect read").decision
    'allow'
    """

    call: ToolCall
    decision: Decision
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call, as the model gets it.

    >>> Result(ToolCall(id="1", name="look", arguments="{}"), "a door", "ok").text
    'a door'
    """

    call: ToolCall
    text: str
    status: ResultStatus


@dataclass(frozen=True, slots=True)
class Compacted:
    """The history does not fit the context: a summary took the place of its old messages in the prompt, or they were
    left out. The history itself stays whole.

    >>> Compacted(Truncation(policy="shift", dropped_messages=2)).truncation.dropped_messages
    2
    """

    truncation: Truncation


@dataclass(frozen=True, slots=True)
class Forked:
    """Children of the run were started.

    >>> Forked(("a", "b")).children
    ('a', 'b')
    """

    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The run ended, or waits for a person.

    >>> Finished(Outcome(run_id="a", status="answered", text="42")).outcome.text
    '42'
    """

    outcome: Outcome


AgentEvent: TypeAlias = Thought | Said | Calling | Decided | Result | Compacted | Forked | Finished


@dataclass(frozen=True, slots=True)
class Question:
    """A call that a person has to allow: `ask` gets it, and `Outcome.waiting` holds those without an answer.

    The arguments are valid, and the call is executed exactly as it is shown.

    >>> Question("run", ToolCall(id="1", name="save", arguments='{"text": "x"}'), "write", "the effect write").effect
    'write'
    """

    run_id: str
    call: ToolCall
    effect: Effect
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    `answered`: the model answered. `stopped`: a limit was reached; `text` is the last answer and `reason` the limit.
    It may be that of one message, e.g. `max_tokens`; then `text` is incomplete.
    `waiting`: a person has to allow the calls of `waiting`; `Agent.resume` continues. `failed`: an error, in `reason`.
    `cancelled`: the run was ended from outside.

    >>> bool(Outcome(run_id="a", status="stopped", text="…", reason="the limit of 2 rounds is reached"))
    False
    """

    run_id: str
    status: Literal["answered", "stopped", "waiting", "failed", "cancelled"]
    text: str = ""
    output: Any = None  # the answer as the type that was asked for
    reason: str = ""
    waiting: tuple[Question, ...] = ()
    spent: Spent = NOTHING_SPENT

    def __bool__(self) -> bool:
        return self.status == "answered"
