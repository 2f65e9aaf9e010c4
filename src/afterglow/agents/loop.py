"""The loop of a run: its state, which follows from its rows, and the decision what to do next. Pure.

One decision per step: generate a message, execute calls, ask a person, or finish. `Run` and `Conversation` act.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from afterglow.agents.events import ResultStatus
from afterglow.agents.limits import DEFAULT_LIMITS, NOTHING_SPENT, Limits, Spent, find_reached_limit
from afterglow.agents.permissions import ALLOW_ALL, Decision, Effect, Permissions
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.tools.enforcement import find_violation
from afterglow.chat.tools.tool import Tool

# --- state


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one call."""

    status: ResultStatus
    text: str


@dataclass(slots=True)
class RunState:
    """Everything that is known about a run. `Run` changes it only by the rows that it writes."""

    messages: list[Message] = field(default_factory=list)
    # Results of the last message's calls, by call id; empty when all calls have one.
    results: dict[str, ToolResult] = field(default_factory=dict)
    intents: dict[str, ToolCall] = field(default_factory=dict)  # executed calls of this history, by id
    positions: dict[str, int] = field(default_factory=dict)  # index of the message with the call
    answers: dict[str, Decision] = field(default_factory=dict)  # of the person, by call
    # Calls about which a person was asked without an answer; not stored.
    unanswered: set[str] = field(default_factory=set)
    finished_calls: dict[str, ToolResult] = field(default_factory=dict)  # of this history, by id
    children: list[str] = field(default_factory=list)  # runs that this history started
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)  # number of messages and of children, by name
    spent: Spent = NOTHING_SPENT
    stopping: str = ""  # the limit after which the last answer follows

    @property
    def pending(self) -> list[ToolCall]:
        """Calls of the last message that have no result yet."""
        last = self.messages[-1] if self.messages else None
        return [] if last is None else [call for call in last.tool_calls if call.id not in self.results]

    @property
    def settled_length(self) -> int:
        """Number of messages without a last one whose calls have no results yet."""
        return len(self.messages) - bool(self.messages and self.messages[-1].tool_calls)

    def add_message(self, message: Message, spent: Spent = NOTHING_SPENT) -> None:
        """Add a message of the user or of the model."""
        self.messages.append(message)
        self.spent = self.spent.add(spent)

    def add_intent(self, call: ToolCall) -> None:
        """Note that a call is about to be executed. An answer of the person is used up."""
        self.intents[call.id] = call
        self.positions[call.id] = len(self.messages) - 1
        self.answers.pop(call.id, None)

    def add_result(self, id: str, result: ToolResult, spent: Spent = NOTHING_SPENT) -> None:
        """Add the result of a call. After the last one, all become messages in the order of the calls."""
        self.results[id] = self.finished_calls[id] = result
        self.spent = self.spent.add(spent)
        if not self.pending:
            self.messages += [
                Message(role="tool", name=call.name, tool_call_id=call.id, content=self.results[call.id].text)
                for call in self.messages[-1].tool_calls
            ]
            self.results = {}

    def truncate(self, length: int, children: int) -> None:
        """Keep the first messages and children, and only what belongs to them. What was spent stays spent."""
        self.messages, self.results, self.answers, self.stopping = self.messages[:length], {}, {}, ""
        self.children = self.children[:children]
        kept = {call.id for message in self.messages for call in message.tool_calls}
        for calls in (self.intents, self.positions, self.finished_calls):
            for id in [id for id in calls if id not in kept]:
                del calls[id]
        self.marks = {name: mark for name, mark in self.marks.items() if mark[0] <= length and mark[1] <= children}


# --- policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a run may do: its tools with their effects, those that it may call, permissions and limits."""

    tools: Mapping[str, Tool]
    effects: Mapping[str, Effect]
    allowed: Collection[str]  # names; a child may have less than its parent
    permissions: Permissions = ALLOW_ALL
    limits: Limits = DEFAULT_LIMITS
    delegate: str = ""  # tool that starts children, which may call all allowed tools

    def may_have_effects(self, name: str) -> bool:
        """Return whether a call of a tool may change something, by itself or by children."""
        names = self.allowed if name == self.delegate else (name,)
        return any(self.effects.get(each, "read") != "read" for each in names)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to one call. `decision` of an invalid or repeated call is `deny`, with another status."""

    call: ToolCall
    decision: Decision
    reason: str
    status: ResultStatus = "ok"  # of the result that a denied call gets
    attempt: int = 1  # more after an identical call that failed


def judge_call(call: ToolCall, state: RunState, policy: Policy) -> Verdict:
    """Decide about one call. Arguments are checked first: a person is asked about valid calls only."""
    tool = policy.tools.get(call.name)
    if tool is None:
        names = ", ".join(sorted(policy.allowed)) or "none"
        return Verdict(call, "deny", f"there is no tool {call.name!r}; the tools are: {names}", "invalid")
    if call.name not in policy.allowed:
        return Verdict(call, "deny", f"{call.name} may not be called in this task", "denied")
    if (violation := find_violation(tool, call.arguments)) is not None:
        return Verdict(call, "deny", f"the arguments of {call.name} are invalid: {violation}", "invalid")
    if call.id not in state.intents and (earlier := find_repeated(call, state, policy)) is not None:
        return Verdict(call, "deny", f"this call was made before, with this result: {earlier.text}", "repeated")
    decision, reason = policy.permissions.find_decision(call.name, policy.effects[call.name])
    if decision == "deny":
        return Verdict(call, "deny", f"{call.name} is not permitted: {reason}", "denied")
    refusal = "the person refused this call"
    if call.id in state.intents and policy.may_have_effects(call.name):
        decision, reason = "ask", "the process ended during this call, and it may have been executed"
        refusal = f"{reason}; it is not repeated"
    if decision == "ask" and (answer := state.answers.get(call.id)) is not None:
        decision, reason = answer, "the person allowed it" if answer == "allow" else refusal
    return Verdict(call, decision, reason, "denied", max(1, count_repeats(call, state, policy)))


def find_repeated(call: ToolCall, state: RunState, policy: Policy) -> ToolResult | None:
    """Return the result of an identical earlier call, unless it failed or a call with an effect came in between."""
    if policy.limits.repeats is None:
        return None
    key = normalize_call(call)
    for id, earlier in reversed(state.intents.items()):
        if normalize_call(earlier) == key:
            result = state.finished_calls.get(id)
            return result if result is not None and result.status == "ok" else None
        if policy.may_have_effects(earlier.name):
            return None
    return None


def count_repeats(call: ToolCall, state: RunState, policy: Policy) -> int:
    """Return how often a call was made, itself included, since the last other call with an effect."""
    key, count = normalize_call(call), 0
    for earlier in reversed([call for message in state.messages for call in message.tool_calls]):
        if normalize_call(earlier) == key:
            count += 1
        elif policy.may_have_effects(earlier.name):
            break
    return count


def normalize_call(call: ToolCall) -> tuple[str, str]:
    """Return the name and arguments of a call, the same for all spellings of the arguments.

    >>> normalize_call(ToolCall(id="1", name="f", arguments='{"b": 1, "a": 2}'))
    ('f', '{"a": 2, "b": 1}')
    """
    try:
        return call.name, json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
    except ValueError:
        return call.name, call.arguments


# --- decision


@dataclass(frozen=True, slots=True)
class Generate:
    """Let the model write a message. With `stopping` it is the last one, without calls."""

    stopping: str = ""


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute or deny calls, all at once."""

    verdicts: Sequence[Verdict]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a person about calls."""

    verdicts: Sequence[Verdict]


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run, or let it wait for answers about calls."""

    status: Literal["answered", "stopped", "waiting"]
    reason: str = ""
    verdicts: Sequence[Verdict] = ()


Step: TypeAlias = Generate | Execute | Ask | Finish


def decide(state: RunState, policy: Policy) -> Step:
    """Return the next step of a run.

    >>> policy = Policy(tools={}, effects={}, allowed=())
    >>> decide(RunState([Message(role="user", content="Hello")]), policy)
    Generate(stopping='')
    >>> decide(RunState([Message(role="assistant", content="Hi!")]), policy)
    Finish(status='answered', reason='', verdicts=())
    """
    verdicts = [judge_call(call, state, policy) for call in state.pending]
    if decided := [verdict for verdict in verdicts if verdict.decision != "ask"]:
        return Execute(limit_calls(drop_repeats(decided), state.spent, policy.limits))
    if open_verdicts := [verdict for verdict in verdicts if verdict.call.id not in state.unanswered]:
        return Ask(open_verdicts)
    if verdicts:
        return Finish("waiting", "a person has to allow calls", verdicts)
    if state.messages[-1].role == "assistant":
        return Finish("stopped" if state.stopping else "answered", state.stopping)
    return Generate(state.stopping or find_stop(state, policy) or "")


def find_stop(state: RunState, policy: Policy) -> str | None:
    """Return why the next message must be the last one; None if it need not."""
    repeats = policy.limits.repeats
    last = next((message.tool_calls for message in reversed(state.messages) if message.role == "assistant"), ())
    is_after_calls = state.messages[-1].role == "tool" and repeats is not None
    if is_after_calls and any(count_repeats(call, state, policy) >= repeats for call in last):  # type: ignore[operator]
        return f"the limit of {repeats} repeats is reached"
    return find_reached_limit(policy.limits, state.spent)


def limit_calls(verdicts: Sequence[Verdict], spent: Spent, limits: Limits) -> list[Verdict]:
    """Deny the calls beyond the limit."""
    left = None if limits.calls is None else max(0, limits.calls - spent.calls)
    limited = []
    for verdict in verdicts:
        if verdict.decision == "allow" and left is not None:
            if left == 0:
                verdict = Verdict(verdict.call, "deny", f"the limit of {limits.calls} calls is reached", "denied")
            else:
                left -= 1
        limited.append(verdict)
    return limited


def drop_repeats(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Leave identical calls of one message to the next step, in which the first one has its result."""
    first: dict[tuple[str, str], Verdict] = {}
    for verdict in verdicts:
        first.setdefault(normalize_call(verdict.call), verdict)
    return list(first.values())
