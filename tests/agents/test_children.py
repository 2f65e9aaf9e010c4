"""Children, branches, marks and rewinds: they cost only their new tokens, and never exceed the rights of the parent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

import afterglow
from afterglow.agents import Agent, Forked, Limits, Outcome, Permissions, Question, Role, Run, Spent, effect
from afterglow.agents.limits import share_limits
from afterglow.agents.permissions import Decision
from afterglow.api.model import Model
from afterglow.errors import InvalidArgument, UnsupportedOperation
from afterglow.testing import models
from afterglow.testing.script import script_answers, write_call

pytestmark = pytest.mark.native
KINDS = ("attention", "window", "recurrent", "hybrid")
LETTERS = {"type": "regex", "pattern": "[a-z ]{8,16}"}  # random bytes are no text
CHILDREN = 8


@effect("read")
def look(place: str) -> str:
    """Look at a place."""
    return f"{place}: a door"


@effect("write")
def save(text: str) -> str:
    """Save a text."""
    return "saved"


@effect("external")
def send(text: str) -> str:
    """Send a text."""
    return "sent"


TOOLS = (look, save, send)
ALLOW = Permissions(write="allow", external="allow")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with afterglow.load(models.get_path("attention"), context=8192, sequences=4, threads=1) as loaded:
        yield loaded


def play(model: Model, answers: list[str], coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine while the model writes given answers."""
    with script_answers(model, answers):
        return asyncio.run(coroutine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "length", [pytest.param(600, id="600 tokens"), pytest.param(8000, id="8000 tokens", marks=pytest.mark.full)]
)
def test_children_compute_exactly_the_sum_of_their_new_tokens(kind: str, length: int) -> None:
    async def fan_out(agent: Agent) -> tuple[Run, Spent, list[Outcome]]:
        run = agent.start("Go.")
        parent = (await run).spent
        return run, parent, await run.fork(tasks, allow={"read"})

    tasks = [f"{number} Check this." for number in range(CHILDREN)]
    with afterglow.load(models.get_path(kind), context=length + 2500, sequences=CHILDREN + 2, threads=2) as model:
        options = {"temperature": 1.0, "seed": 1, "max_tokens": 24, "response_format": LETTERS, "tool_choice": "none"}
        options["overflow"] = "refuse"  # no summary: the prompts nearly fill the context
        run, parent, outcomes = asyncio.run(fan_out(Agent(model, "x" * length, tools=TOOLS, **options)))  # type: ignore[arg-type]
        assert parent.computed > length
        held = parent.computed + parent.generated - 1  # the last token was sampled and not decoded
        tools = [tool.tool for tool in run._tools.values()]
        prompts = [len(model.plan_chat([*run.messages, ("user", task)], tools=tools).prompt.tokens) for task in tasks]
        new = [length - held for length in prompts]
        computed = [outcome.spent.computed for outcome in outcomes]
        # Children that arrive together may also compute the common start of their messages once.
        assert all(0 < few <= all_new for few, all_new in zip(computed, new, strict=True))
        shared = len(model.tokenize("<|im_start|>user\n", special=True)) + 8
        assert sum(computed) >= sum(new) - shared * (CHILDREN - 1)
        assert run.spent.computed == parent.computed + sum(computed)


def list_calls(store_run: Agent, outcomes: list[Outcome]) -> list[str]:
    """Return the names of all calls that runs made."""
    names = []
    for outcome in outcomes:
        for row in store_run.store.read(outcome.run_id):
            if row.kind == "message":
                names += [call["function"]["name"] for call in row.body["message"].get("tool_calls", ())]
    return names


@pytest.mark.parametrize(
    "count", [pytest.param(20, id="20 calls"), pytest.param(10_000, id="10000 calls", marks=pytest.mark.full)]
)
def test_no_call_of_a_child_at_temperature_2_is_outside_its_rights(count: int) -> None:
    executed: list[str] = []

    def build_tool(name: str) -> Any:
        def pick() -> str:
            executed.append(name)
            return "ok"

        pick.__name__, pick.__doc__ = name, "Pick."
        return effect("read" if name.startswith("read") else "write")(pick)

    async def call() -> list[Outcome]:
        run = agent.start("Go.")
        await run
        outcomes: list[Outcome] = []
        while len(executed) < count:
            assert len(outcomes) < 100 + 4 * count
            tasks = [f"{len(outcomes) + number} Call." for number in range(4)]
            outcomes += await run.fork(tasks, allow={"read"}, limits=calls, max_tokens=80, tool_choice="required")
        return outcomes

    names = ["read_one", "write_one", "read_two", "write_two"]
    limits = Limits(rounds=None, calls=None, repeats=None)
    calls = Limits(rounds=5, calls=None, repeats=None)
    options = {"temperature": 2.0, "max_tokens": 8, "parallel_tool_calls": False}
    # Flash attention takes five times as long on a processor for heads of 16 values.
    with afterglow.load(
        models.get_path("attention"), context=8192, sequences=4, threads=1, flash_attention=False
    ) as model:
        agent = Agent(model, tools=[*map(build_tool, names)], permissions=ALLOW, limits=limits, **options)  # type: ignore[arg-type]
        outcomes = asyncio.run(call())
    assert set(executed) == {"read_one", "read_two"}
    assert set(list_calls(agent, outcomes)) == {"read_one", "read_two"}


def test_a_tool_with_the_name_of_an_effect_does_not_widen_or_narrow_the_rights_of_a_child(model: Model) -> None:
    @effect("write")
    def write(text: str) -> str:
        """Write a text."""
        return "written"

    def read(text: str) -> str:
        """Read a text: without a declaration its effect is external."""
        return "read"

    async def fan_out(allow: set[str]) -> Outcome:
        run = Agent(model, tools=[write, save, read], permissions=ALLOW).start("Go.")
        (outcome,) = await run.fork(["Check this."], allow=allow)
        return outcome

    refused = play(model, [write_call("save", text="x"), "Done."], fan_out({"writ*"}))
    assert "not allowed" in refused.reason  # the grammar excludes the call
    assert play(model, [write_call("read", text="x"), "Done."], fan_out({"external"})).status == "answered"


def test_a_child_cannot_write_a_call_that_its_parent_may_not_make(model: Model) -> None:
    async def descend() -> list[Outcome]:
        run = Agent(model, tools=TOOLS, permissions=ALLOW).start("Go.")
        await run
        (outcome,) = await run.fork(["Look."], allow={"read"})
        return await run.agent.resume(outcome.run_id).fork(["Save."], allow={"read", "write"})

    (outcome,) = play(model, ["Yes.", "Seen.", write_call("save", text="x")], descend())
    assert outcome.status == "failed"
    assert "is not allowed" in outcome.reason  # the scripted model insists on a token that the grammar excludes


def test_the_limits_of_children_are_shares_of_what_the_parent_has_left() -> None:
    parent = Limits(rounds=30, generated=1000, computed=None, calls=10, seconds=60, depth=2)
    share = share_limits(parent, Spent(rounds=5, generated=200, calls=2, seconds=10), 4, Limits(rounds=50, calls=50))
    assert (share.rounds, share.generated, share.calls, share.seconds, share.depth) == (25, 200, 2, 50, 1)
    assert share.computed is None


def test_the_depth_of_children_is_limited(model: Model) -> None:
    async def descend() -> None:
        run = Agent(model, limits=Limits(depth=1)).start("Go.")
        await run
        (outcome,) = await run.fork(["Deeper."])
        await run.agent.resume(outcome.run_id).fork(["Deeper."])

    with pytest.raises(UnsupportedOperation, match="depth"):
        play(model, ["One.", "Two."], descend())


def test_without_a_limit_of_the_depth_children_have_none_either(model: Model) -> None:
    run = Agent(model, limits=Limits(depth=None)).start("Go.")
    (outcome,) = play(model, ["Done."], run.fork(["Check this."]))
    assert outcome.status == "answered"
    assert run.agent.store.read(outcome.run_id)[0].body["limits"]["depth"] is None


def test_children_are_events_of_the_parent_and_runs_of_the_store(model: Model) -> None:
    async def fork() -> tuple[Run, list[Outcome], list[Any]]:
        run = Agent(model).start("Go.")
        await run
        outcomes = await run.fork(["One."])
        run.say("And?")
        return run, outcomes, [event async for event in run]

    run, outcomes, events = play(model, ["Yes.", "Child.", "Fine."], fork())
    assert [event.children for event in events if isinstance(event, Forked)] == [(outcomes[0].run_id,)]
    (summary, _) = run.agent.store.list_runs()
    assert (summary.id, summary.parent) == (outcomes[0].run_id, run.id)


def test_a_person_is_asked_by_children_in_one_event_loop_after_the_other(model: Model) -> None:
    def ask(question: Question) -> Decision:
        time.sleep(0.1)  # the other child has to wait
        return "allow"

    async def fork() -> list[Outcome]:
        return await agent.start("Go.").fork(["Save a.", "Save b."])

    agent, calls = Agent(model, tools=TOOLS, ask=ask), [write_call("save", text=text) for text in "ab"]
    for _ in range(2):
        outcomes = play(model, [*calls, "Saved.", "Saved."], fork())
        assert [outcome.text for outcome in outcomes] == ["Saved.", "Saved."]


def test_a_child_that_fails_leaves_its_siblings(model: Model) -> None:
    async def fork() -> list[Outcome]:
        run = Agent(model, max_tokens=16).start("Go.")
        await run
        return await run.fork(["x" * 20_000, "Fine."])

    outcomes = asyncio.run(fork())
    assert outcomes[0].status == "failed"
    assert "cells" in outcomes[0].reason
    assert outcomes[1].status != "failed"


def test_wrong_tasks_and_counts_of_children_are_named(model: Model) -> None:
    run = Agent(model).start("Go.")
    for tasks, name in (("Read it.", "tasks"), (5, "tasks"), (["Read it.", 5], r"tasks\[1\]")):
        with pytest.raises(InvalidArgument, match=f"`{name}` must be"):
            asyncio.run(run.fork(tasks))  # type: ignore[arg-type]
    for count in (0, -1, "2"):
        with pytest.raises(InvalidArgument, match="`count` must be"):
            asyncio.run(run.branches(count))  # type: ignore[arg-type]


def test_the_first_accepted_branch_wins_and_the_others_are_cancelled(model: Model) -> None:
    async def branch() -> tuple[Run, Outcome | None]:
        run = Agent(model, "x" * 400).start("Go.")
        return run, await run.branches(3, accept=lambda outcome: outcome.text == "Good.", temperature=0.8)

    answers = ["Bad.", "Good.", "x" * 2000]
    run, best = play(model, answers, branch())
    assert best is not None
    assert best.text == "Good."
    statuses = sorted(summary.status for summary in run.agent.store.list_runs() if summary.parent)
    assert statuses == ["answered", "answered", "cancelled"]
    prompt = len(model.plan_chat(run.messages).prompt.tokens)
    assert run.spent.computed < 2 * prompt  # the three branches share one prefill


def test_no_branch_is_returned_if_none_is_accepted(model: Model) -> None:
    run = Agent(model).start("Go.")
    assert play(model, ["A.", "B."], run.branches(2, accept=lambda outcome: False)) is None


def test_a_branch_that_fails_leaves_the_others(model: Model) -> None:
    run = Agent(model, tools=TOOLS, permissions=Permissions(write="deny")).start("Go.")
    best = play(model, [write_call("save", text="x"), "Good." * 60], run.branches(2))
    assert best is not None
    assert best.text == "Good." * 60
    assert sorted(summary.status for summary in run.agent.store.list_runs() if summary.parent) == ["answered", "failed"]


# --- marks and rewinds


async def rewind(run: Run, **options: Any) -> None:
    mark = run.mark("before")
    run.say("Go.")
    await run
    run.rewind(mark, **options)


def test_a_rewind_returns_to_the_exact_prefix(model: Model) -> None:
    async def go() -> tuple[Run, Spent]:
        run = Agent(model, "x" * 400, tools=TOOLS).start("Go.")
        await run
        await rewind(run, note="Approach A failed.")
        before = run.spent
        await run
        return run, before

    run, before = play(model, ["Hello.", "Approach A.", "Approach B."], go())
    contents = [message.content for message in run.messages if message.role != "system"]
    assert contents == ["Go.", "Hello.", "Approach A failed.", "Approach B."]
    note = len(
        model.tokenize("\n<|im_start|>user\nApproach A failed.<|im_end|>\n<|im_start|>assistant\n", special=True)
    )
    assert run.spent.computed - before.computed <= note + 1


def test_a_rewind_across_effects_is_refused_unless_they_are_kept_and_told(model: Model) -> None:
    async def go(**options: Any) -> Run:
        run = Agent(model, tools=TOOLS, permissions=ALLOW).start("Hi.")
        await run
        await rewind(run, **options)
        return run

    answers = ["Hello.", write_call("save", text="a"), "Done."]
    with pytest.raises(UnsupportedOperation, match=r'save\(\{"text": "a"\}\) had effects'):
        play(model, answers, go())
    run = play(model, answers, go(effects="keep", note="Other way."))
    assert run.messages[-1].content == (
        'Other way.\nThese calls were executed and are not undone: save({"text": "a"}).'
    )


def test_a_rewind_across_reads_needs_nothing(model: Model) -> None:
    async def go() -> Run:
        run = Agent(model, tools=TOOLS).start("Hi.")
        await run
        await rewind(run)
        return run

    run = play(model, ["Hello.", write_call("look", place="a"), "Done."], go())
    assert [message.content for message in run.messages] == ["Hi.", "Hello."]


def test_a_rewind_across_effects_of_children_is_refused_unless_they_are_kept_and_told(model: Model) -> None:
    async def go(**options: Any) -> Run:
        run = Agent(model, tools=TOOLS, permissions=ALLOW).start("Hi.")
        await run
        await run.fork(["Save."])
        mark = run.mark()
        run.rewind(mark)  # the child wrote before the mark
        await run.fork(["Save again."])
        run = run.agent.resume(run.id)  # type: ignore[attr-defined]  # as after a restart
        run.rewind(mark.name, **options)
        run.rewind(mark.name)
        return run

    answers = ["Hello.", write_call("save", text="a"), "Done.", write_call("save", text="b"), "Done."]
    with pytest.raises(UnsupportedOperation, match=r'^[^a]*rewind[^a]*save\(\{"text": "b"\}\) had effects'):
        play(model, answers, go())
    run = play(model, answers, go(effects="keep"))
    assert run.messages[-1].content == "Hello."


def test_a_rewind_across_reads_needs_nothing_after_a_restart(model: Model) -> None:
    async def go() -> Run:
        run = Agent(model, tools=TOOLS).start("Hi.")
        await run
        run.mark("before")
        run.say("Go.")
        await run
        return run

    run = play(model, ["Hello.", write_call("look", place="a"), "Done."], go())
    resumed = run.agent.resume(run.id)  # type: ignore[attr-defined]
    resumed.rewind("before")
    assert [message.content for message in resumed.messages] == ["Hi.", "Hello."]


def test_a_mark_survives_a_restart_and_an_unknown_one_is_an_error(model: Model) -> None:
    run = Agent(model).start("Hi.")
    play(model, ["Hello."], run._drive())
    run.mark("here")
    resumed = run.agent.resume(run.id)  # type: ignore[attr-defined]
    resumed.rewind("here", note="Again.")
    assert [message.content for message in resumed.messages] == ["Hi.", "Hello.", "Again."]
    with pytest.raises(InvalidArgument, match="the marks are: here"):
        resumed.rewind("there")


# --- roles


ROLES = [
    Role(name="reader", instructions="You read.", description="reads", allow=("read",)),
    Role(name="writer", instructions="You write.", description="writes"),
]


def test_the_model_delegates_to_a_role_with_its_rights_and_instructions(model: Model) -> None:
    run = Agent(model, tools=TOOLS, permissions=ALLOW, roles=ROLES).start("Go.")
    answers = [write_call("delegate", role="reader", task="Find it."), "It is here.", "Found."]
    assert play(model, answers, run._drive()).text == "Found."
    assert next(message.content for message in run.messages if message.role == "tool") == "It is here."
    child = next(summary for summary in run.agent.store.list_runs() if summary.parent == run.id)
    started = run.agent.store.read(child.id)[0].body
    assert started["history"][-1]["content"] == "You read.\n\nFind it."
    assert started["allow"] == ["delegate", "look"]


def test_a_tool_with_the_name_of_the_tool_for_roles_is_refused(model: Model) -> None:
    def delegate(task: str) -> str:
        """Give a task to a colleague."""
        return task

    with pytest.raises(InvalidArgument, match="must not have the name 'delegate'"):
        play(model, ["Done."], Agent(model, tools=[delegate], roles=ROLES).start("Go.")._drive())


def test_a_task_of_a_role_that_failed_is_an_error_and_may_be_given_again(model: Model) -> None:
    delegate = write_call("delegate", role="reader", task="Find it.")
    forbidden = write_call("look", place="a")  # there is no such tool
    roles = [Role(name="reader", instructions="You read.", options={"response_format": LETTERS})]
    run = Agent(model, roles=roles).start("Go.")
    play(model, [delegate, forbidden, delegate, "the letters", "Found."], run._drive())
    first, second = [message.content for message in run.messages if message.role == "tool"]
    assert "is not allowed" in first
    assert first.startswith("error: ")
    assert second == "the letters"


def test_a_role_cannot_be_below_itself(model: Model) -> None:
    run = Agent(model, tools=TOOLS, roles=ROLES).start("Go.")
    delegate = write_call("delegate", role="reader", task="Find it.")
    play(model, [delegate, delegate, "I cannot.", "Well."], run._drive())
    child = next(summary for summary in run.agent.store.list_runs() if summary.parent == run.id)
    results = [row.body["text"] for row in run.agent.store.read(child.id) if row.kind == "result"]
    assert "reader is above itself: reader → reader" in results[0]


def test_a_rewind_across_effects_of_a_role_is_refused(model: Model) -> None:
    async def go() -> None:
        run = Agent(model, tools=TOOLS, permissions=ALLOW, roles=ROLES).start("Hi.")
        await run
        await rewind(run)

    delegate = write_call("delegate", role="writer", task="Save it.")
    with pytest.raises(UnsupportedOperation, match=r'save\(\{"text": "a"\}\) had effects'):
        play(model, ["Hello.", delegate, write_call("save", text="a"), "Saved.", "Done."], go())


def test_after_a_crash_a_task_of_a_role_that_may_write_is_not_given_again_without_a_question(model: Model) -> None:
    saved: list[str] = []

    async def go() -> Outcome:
        @effect("write")
        async def save(text: str) -> str:
            """Save a text."""
            saved.append(text)
            task.cancel()  # the process ends here
            return await asyncio.Future()

        agent = Agent(model, tools=[look, save], permissions=ALLOW, roles=ROLES)
        run = agent.start("Go.")
        task = asyncio.create_task(run._drive())
        await asyncio.gather(task, return_exceptions=True)
        return await agent.resume(run.id)

    delegate = write_call("delegate", role="writer", task="Save it.")
    outcome = play(model, [delegate, write_call("save", text="a"), write_call("save", text="a"), "Done."], go())
    assert saved == ["a"]
    assert outcome.status == "waiting"
    assert "may have been executed" in outcome.waiting[0].reason


def test_tasks_that_are_given_at_once_share_what_the_run_has_left(model: Model) -> None:
    run = Agent(model, tools=TOOLS, roles=ROLES, limits=Limits(generated=4000)).start("Go.")
    both = "\n".join(write_call("delegate", role=name, task="Find it.") for name in ("reader", "writer"))
    play(model, [both, "Here.", "There.", "Found."], run._drive())
    children = [summary.id for summary in run.agent.store.list_runs() if summary.parent == run.id]
    limits = [run.agent.store.read(child)[0].body["limits"]["generated"] for child in children]
    assert len(limits) == 2
    assert sum(limits) < 4000


def test_calls_that_give_tasks_to_roles_count_towards_the_limit_of_calls(model: Model) -> None:
    run = Agent(model, tools=TOOLS, roles=ROLES, limits=Limits(calls=4)).start("Go.")
    both = "\n".join(write_call("delegate", role=name, task="Find it.") for name in ("reader", "writer"))
    looks = "\n".join(write_call("look", place=place) for place in "ab")
    play(model, [both, looks, looks, "Here.", "There.", "Found."], run._drive())
    assert run.spent.calls == 4  # two of the run, and one of each child


def test_forks_at_the_same_time_share_what_the_run_has_left(model: Model) -> None:
    async def fork() -> Run:
        run = Agent(model, limits=Limits(generated=4000)).start("Go.")
        await run
        await asyncio.gather(run.fork(["One."], limits=Limits(generated=3000)), run.fork(["Two."]))
        return run

    run = play(model, ["Yes.", "One.", "Two."], fork())
    children = [summary.id for summary in run.agent.store.list_runs() if summary.parent == run.id]
    assert sum(run.agent.store.read(child)[0].body["limits"]["generated"] for child in children) < 4000


def test_the_seconds_of_a_role_count_once(model: Model) -> None:
    @effect("read")
    async def look(place: str) -> str:
        """Look at a place."""
        await asyncio.sleep(0.5)
        return "a door"

    run = Agent(model, tools=[look], roles=ROLES).start("Go.")
    started = time.monotonic()
    delegate = write_call("delegate", role="reader", task="Find it.")
    play(model, [delegate, write_call("look", place="a"), "Here.", "Found."], run._drive())
    assert 0.5 <= run.spent.seconds <= time.monotonic() - started
