"""The loop: what a run does next, by its state and its policy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from afterglow.agents.limits import Limits, Spent, find_reached_limit
from afterglow.agents.loop import Ask, Execute, Finish, Generate, Policy, RunState, ToolResult, decide
from afterglow.agents.permissions import Effect, Permissions
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidArgument

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EFFECTS: dict[str, Effect] = {"look": "read", "save": "write", "send": "external"}
TOOLS = {name: Tool(name=name, parameters=INTEGER) for name in EFFECTS}


def build_policy(**options: object) -> Policy:
    return Policy(**{"tools": TOOLS, "effects": EFFECTS, "allowed": set(TOOLS), **options})  # type: ignore[arg-type]


def build_call(name: str, id: str = "1", a: object = 1) -> ToolCall:
    return ToolCall(id=id, name=name, arguments=f'{{"a": {a}}}')


def build_state(*calls: ToolCall) -> RunState:
    return RunState([Message(role="user", content="Go."), Message(role="assistant", tool_calls=calls)])


def test_a_task_is_generated_and_an_answer_finishes() -> None:
    state = RunState([Message(role="user", content="Go.")])
    assert decide(state, build_policy()) == Generate()
    state.add_message(Message(role="assistant", content="Done."))
    assert decide(state, build_policy()) == Finish("answered")


@pytest.mark.parametrize(
    ("name", "decision"), [("look", "allow"), ("save", "ask"), ("send", "deny")], ids=["read", "write", "external"]
)
def test_the_effect_of_a_tool_decides(name: str, decision: str) -> None:
    step = decide(build_state(build_call(name)), build_policy(permissions=Permissions(external="deny")))
    assert isinstance(step, Ask if decision == "ask" else Execute)
    assert step.verdicts[0].decision == decision


def test_allowed_calls_run_before_a_person_is_asked_and_without_an_answer_the_run_waits() -> None:
    state, policy = (
        build_state(build_call("look", "1"), build_call("save", "2")),
        build_policy(permissions=Permissions()),
    )
    step = decide(state, policy)
    assert isinstance(step, Execute)
    assert [verdict.call.id for verdict in step.verdicts] == ["1"]
    state.add_result("1", ToolResult("ok", "seen"))
    assert isinstance(decide(state, policy), Ask)
    state.unanswered.add("2")
    step = decide(state, policy)
    assert isinstance(step, Finish)
    assert step.status == "waiting"
    state.answers["2"] = "allow"
    step = decide(state, policy)
    assert isinstance(step, Execute)
    assert step.verdicts[0].decision == "allow"


def test_arguments_are_checked_before_a_person_is_asked() -> None:
    step = decide(build_state(build_call("save", a='"x"')), build_policy(permissions=Permissions()))
    assert isinstance(step, Execute)
    assert (step.verdicts[0].decision, step.verdicts[0].status) == ("deny", "invalid")
    assert "`a` must be of the type integer" in step.verdicts[0].reason


def test_a_call_outside_the_rights_is_denied_whatever_the_permissions_say() -> None:
    step = decide(build_state(build_call("save")), build_policy(allowed={"look"}))
    assert isinstance(step, Execute)
    assert (step.verdicts[0].decision, step.verdicts[0].status) == ("deny", "denied")


def test_a_tool_that_does_not_exist_is_an_error_that_names_the_others() -> None:
    step = decide(build_state(build_call("fly")), build_policy())
    assert isinstance(step, Execute)
    assert "look, save, send" in step.verdicts[0].reason


def test_an_interrupted_read_runs_again_and_an_interrupted_write_asks() -> None:
    for name, kind in (("look", Execute), ("save", Ask)):
        state, call = build_state(build_call(name)), build_call(name)
        state.answers[call.id] = "allow"  # was used for the interrupted execution
        state.add_intent(call)
        assert isinstance(decide(state, build_policy()), kind)


def repeat(state: RunState, name: str, id: str, result: ToolResult) -> None:
    state.add_message(Message(role="assistant", tool_calls=(build_call(name, id),)))
    state.add_intent(build_call(name, id))
    state.add_result(id, result)


def test_an_identical_call_is_answered_once_and_then_the_run_stops() -> None:
    state, policy = RunState([Message(role="user", content="Go.")]), build_policy(limits=Limits(repeats=3))
    repeat(state, "look", "1", ToolResult("ok", "a door"))
    state.add_message(Message(role="assistant", tool_calls=(build_call("look", "2"),)))
    step = decide(state, policy)
    assert isinstance(step, Execute)
    assert (step.verdicts[0].status, "a door" in step.verdicts[0].reason) == ("repeated", True)
    state.add_result("2", ToolResult("repeated", "…"))
    assert decide(state, policy) == Generate()
    state.add_message(Message(role="assistant", tool_calls=(build_call("look", "3"),)))
    state.add_result("3", ToolResult("repeated", "…"))
    assert decide(state, policy) == Generate("the limit of 3 repeats is reached")


def test_a_call_that_failed_may_be_repeated_and_knows_its_attempt() -> None:
    state = RunState([Message(role="user", content="Go.")])
    repeat(state, "look", "1", ToolResult("error", "error: no"))
    state.add_message(Message(role="assistant", tool_calls=(build_call("look", "2"),)))
    step = decide(state, build_policy())
    assert isinstance(step, Execute)
    assert (step.verdicts[0].decision, step.verdicts[0].attempt) == ("allow", 2)


def test_a_read_after_a_write_is_no_repetition() -> None:
    state = RunState([Message(role="user", content="Go.")])
    repeat(state, "look", "1", ToolResult("ok", "a door"))
    repeat(state, "save", "2", ToolResult("ok", "saved"))
    state.add_message(Message(role="assistant", tool_calls=(build_call("look", "3"),)))
    step = decide(state, build_policy())
    assert isinstance(step, Execute)
    assert step.verdicts[0].decision == "allow"


@pytest.mark.parametrize("name", ["rounds", "computed", "generated", "seconds", "calls"])
def test_every_limit_leads_to_a_last_answer_and_the_reason(name: str) -> None:
    state = RunState([Message(role="user", content="Go.")], spent=Spent(**{name: 5}))
    step = decide(state, build_policy(limits=Limits(**{name: 5})))
    assert step == Generate(f"the limit of 5 {name} is reached")
    state.stopping = step.stopping
    state.add_message(Message(role="assistant", content="So far so good."))
    assert decide(state, build_policy()) == Finish("stopped", f"the limit of 5 {name} is reached")


def test_calls_beyond_the_limit_are_denied_in_one_message_too() -> None:
    calls = [build_call("look", str(number), number) for number in range(5)]
    step = decide(build_state(*calls), build_policy(limits=Limits(calls=3)))
    assert isinstance(step, Execute)
    assert [verdict.decision for verdict in step.verdicts] == ["allow"] * 3 + ["deny"] * 2


def test_identical_calls_of_one_message_are_executed_once() -> None:
    state = build_state(build_call("look", "1"), build_call("look", "2"))
    step = decide(state, build_policy())
    assert isinstance(step, Execute)
    assert [verdict.call.id for verdict in step.verdicts] == ["1"]
    state.add_intent(build_call("look", "1"))
    state.add_result("1", ToolResult("ok", "a door"))
    step = decide(state, build_policy())
    assert isinstance(step, Execute)
    assert step.verdicts[0].status == "repeated"


@pytest.mark.parametrize("name", ["rounds", "computed", "generated", "calls", "repeats", "depth"])
@pytest.mark.parametrize("value", [-1, 2.5, math.inf, math.nan, True, "3"])
def test_a_limit_that_is_no_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"`limits.{name}` must be an integer of at least 0 or None"):
        Limits(**{name: value})


def test_a_limit_of_seconds_is_a_number_and_large_limits_are_told_exactly() -> None:
    with pytest.raises(InvalidArgument, match=r"`limits.seconds` must be a number"):
        Limits(seconds=math.nan)
    assert find_reached_limit(Limits(seconds=1.5), Spent(seconds=2.0)) == "the limit of 1.5 seconds is reached"
    reached = find_reached_limit(Limits(computed=1_234_567), Spent(computed=1_234_567))
    assert reached == "the limit of 1,234,567 computed is reached"
