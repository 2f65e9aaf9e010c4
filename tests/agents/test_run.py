"""Runs of an agent on a real engine, with a model that writes given answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

import afterglow
from afterglow.agents import (
    Agent,
    Calling,
    Compacted,
    Decided,
    Finished,
    Limits,
    Mark,
    Permissions,
    Question,
    Result,
    Run,
    RunStore,
    Said,
    effect,
)
from afterglow.agents.permissions import Decision
from afterglow.agents.toolbox import AgentToolLike
from afterglow.api.model import Model
from afterglow.errors import InvalidArgument, InvalidGrammar, InvalidState, PromptTooLong, UnsupportedOperation
from afterglow.testing import models
from afterglow.testing.script import script_answers, write_call

pytestmark = pytest.mark.native
ALLOW = Permissions(write="allow", external="allow")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with afterglow.load(models.get_path("attention"), context=8192, sequences=4, threads=1) as loaded:
        yield loaded


class Desk:
    """Tools that record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def tools(self) -> list[AgentToolLike]:
        @effect("read")
        def look(place: str) -> str:
            """Look at a place."""
            self.calls.append(f"look {place}")
            return f"{place}: a door"

        @effect("write")
        def save(text: str) -> str:
            """Save a text."""
            self.calls.append(f"save {text}")
            return "saved"

        @effect("external")
        async def send(text: str) -> str:
            """Send a text."""
            self.calls.append(f"send {text}")
            return "sent"

        return [look, save, send]


async def collect(run: Run) -> list[Any]:
    return [event async for event in run]


def play(model: Model, answers: list[str], coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine while the model writes given answers."""
    with script_answers(model, answers):
        return asyncio.run(coroutine)


def test_a_run_calls_tools_and_ends_with_the_answer(model: Model) -> None:
    desk = Desk()
    run = Agent(model, "Be careful.", tools=desk.tools).start("Where is the door?")
    events = play(model, [write_call("look", place="north"), "It is in the north."], collect(run))
    assert desk.calls == ["look north"]
    kinds = [type(event) for event in events]
    assert kinds[:3] == [Calling, Decided, Result]
    assert kinds[-1] is Finished
    assert "".join(event.text for event in events if isinstance(event, Said)) == "It is in the north."
    assert [message.role for message in run.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert run.messages[3].content == "north: a door"
    outcome = events[-1].outcome
    assert outcome
    assert (outcome.status, outcome.text) == ("answered", "It is in the north.")
    assert (outcome.spent.rounds, outcome.spent.calls) == (2, 1)


def test_the_second_message_computes_only_its_new_tokens(model: Model) -> None:
    run = Agent(model, "x" * 500, tools=Desk().tools).start("Where is the door?")
    play(model, [write_call("look", place="north"), "There."], collect(run))
    first = len(model.plan_chat(run.messages[:2], tools=[tool.tool for tool in run._tools.values()]).prompt.tokens)
    assert first > 500
    assert run.spent.computed < first + 150  # the result and the frames of two messages


def test_parallel_calls_run_concurrently_sync_functions_too(model: Model) -> None:
    barrier = threading.Barrier(2, timeout=60)

    @effect("read")
    def one() -> str:
        """One."""
        barrier.wait()  # passes only if the other one runs at the same time
        return "1"

    @effect("read")
    def two() -> str:
        """Two."""
        barrier.wait()
        return "2"

    run = Agent(model, tools=[one, two]).start("Go.")
    events = play(model, [f"{write_call('one')}\n{write_call('two')}", "Done."], collect(run))
    assert sorted(event.text for event in events if isinstance(event, Result)) == ["1", "2"]
    assert [message.content for message in run.messages if message.role == "tool"] == ["1", "2"]


def test_an_answer_of_a_type_is_enforced_and_parsed(model: Model) -> None:
    class Finding(pydantic.BaseModel):
        file: str
        line: int

    run = Agent(model, tools=Desk().tools).start("Where?", output=Finding)
    answers = [write_call("look", place="x"), '{"file": "a.py", "line": 3}']
    assert play(model, answers, run._drive()).output == Finding(file="a.py", line=3)
    with pytest.raises(InvalidGrammar, match="not allowed"):
        play(model, ["no json"], Agent(model).start("Where?", output=Finding)._drive())


def test_a_refused_call_is_an_error_for_the_model_and_is_never_executed(model: Model) -> None:
    desk = Desk()
    permissions = Permissions(external="deny", rules={"save": "deny"})
    agent = Agent(model, tools=desk.tools, permissions=permissions)

    # The grammar of the agent excludes what is denied, so that the model cannot even write such a call.
    with pytest.raises(InvalidGrammar, match="not allowed"):
        play(model, [write_call("send", text="x")], agent.start("Go.")._drive())
    assert desk.calls == []


def test_a_person_sees_the_exact_call_and_decides(model: Model) -> None:
    desk, seen = Desk(), []

    def ask(question: Question) -> Decision:
        seen.append((question.call.name, question.call.arguments, question.effect))
        return "deny" if "no" in question.call.arguments else "allow"

    agent = Agent(model, tools=desk.tools, permissions=Permissions(), ask=ask)
    answers = [write_call("save", text="yes"), write_call("save", text="no"), "Done."]
    events = play(model, answers, collect(agent.start("Go.")))
    assert seen == [("save", '{"text": "yes"}', "write"), ("save", '{"text": "no"}', "write")]
    assert desk.calls == ["save yes"]
    assert [event.status for event in events if isinstance(event, Result)] == ["ok", "denied"]


def test_without_an_answer_a_run_waits_and_continues_after_a_restart_without_prefill(
    model: Model, tmp_path: Path
) -> None:
    desk, path = Desk(), tmp_path / "runs.db"
    run = Agent(model, "x" * 300, tools=desk.tools, store=path).start("Go.")
    answers = [f"{write_call('look', place='n')}\n{write_call('save', text='a')}"]
    outcome = play(model, answers, run._drive())
    assert (outcome.status, [question.call.name for question in outcome.waiting]) == ("waiting", ["save"])
    assert desk.calls == ["look n"]  # what is allowed does not wait

    agent = Agent(model, "x" * 300, tools=desk.tools, store=path)
    resumed = agent.resume(run.id, {outcome.waiting[0].call.id: "allow"})
    assert resumed.messages == run.messages
    outcome = play(model, ["Done."], resumed._drive())
    assert outcome.text == "Done."
    assert desk.calls == ["look n", "save a"]
    assert resumed.spent.computed - run.spent.computed < 150  # two results; the prompt has more than 1,000 tokens


def test_answers_are_for_calls_that_wait(model: Model) -> None:
    agent = Agent(model, tools=Desk().tools)
    run = agent.start("Go.")
    play(model, [write_call("save", text="a")], run._drive())
    with pytest.raises(InvalidArgument, match="waits for no call 'x'"):
        agent.resume(run.id, {"x": "allow"})
    with pytest.raises(InvalidArgument, match="'allow' or 'deny'"):
        agent.resume(run.id, {run._state.pending[0].id: "yes"})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="must be those of the run, look, save, send, not look"):
        play(model, [], Agent(model, tools=Desk().tools[:1], store=agent.store).resume(run.id)._drive())


def test_a_run_with_other_tools_is_refused_each_time(model: Model) -> None:
    agent = Agent(model, tools=Desk().tools)
    run = agent.start("Go.")
    play(model, ["Done."], run._drive())
    resumed, rows = Agent(model, store=agent.store).resume(run.id), agent.store.read(run.id)
    resumed.say("More.")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="must be those of the run"):
            play(model, ["Done."], resumed._drive())
    assert agent.store.read(run.id) == rows


def test_a_run_that_was_marked_or_told_more_before_its_start_can_be_resumed(model: Model) -> None:
    agent = Agent(model)
    run = agent.start("Hello")
    run.mark("start")
    run.say("Who are you?")
    play(model, ["Me."], run._drive())
    assert [row.kind for row in agent.store.read(run.id)] == ["started", "mark", "message", "message", "finished"]
    resumed = agent.resume(run.id)
    assert resumed.messages == run.messages
    assert list(resumed.marks) == ["start"]


@pytest.mark.parametrize("text", [5, None, ["More."]])
def test_a_message_that_is_no_text_is_refused_and_not_written(model: Model, text: Any) -> None:
    agent = Agent(model)
    run = agent.start("Go.")
    play(model, ["Done."], run._drive())
    rows = agent.store.read(run.id)
    with pytest.raises(InvalidArgument, match="`text` must be text"):
        run.say(text)
    with pytest.raises(InvalidArgument, match="`name` must be text"):
        run.mark(text)
    with pytest.raises(InvalidArgument, match="`note` must be text"):
        run.rewind(Mark("start", 1), note=text)
    assert agent.store.read(run.id) == rows
    assert agent.resume(run.id).messages == run.messages


def test_a_run_is_resumed_with_its_options(model: Model) -> None:
    class Number(pydantic.BaseModel):
        number: int

    agent = Agent(model, max_tokens=5)
    formats: Any = {"type": "json", "schema": Number}
    run = agent.start("Go.", stop=("!", "?"), max_tokens=None, seed=3)
    play(model, ["A longer answer!"], run._drive())
    resumed = agent.resume(run.id)
    assert resumed.spec.options == {"stop": ["!", "?"], "max_tokens": None, "seed": 3}
    resumed.say("More.")
    assert play(model, ["Another answer?"], resumed._drive()).text == "Another answer"
    with pytest.raises(InvalidArgument):
        play(model, ["1"], agent.start("Go.", response_format=formats)._drive())


def test_a_run_that_is_continued_elsewhere_is_not_continued_twice(model: Model) -> None:
    """Otherwise both processes would make the call."""
    desk = Desk()
    agent = Agent(model, tools=desk.tools)
    waiting = play(model, [write_call("save", text="the report")], agent.start("Save it.")._drive())
    first, second = (agent.resume(waiting.run_id, {waiting.waiting[0].call.id: "allow"}) for _ in range(2))
    assert play(model, ["It is saved."], first._drive()).status == "answered"
    rows = agent.store.read(waiting.run_id)
    with pytest.raises(InvalidState, match=f"the run {waiting.run_id} is continued elsewhere"):
        play(model, ["It is saved."], second._drive())
    assert desk.calls == ["save the report"]
    assert agent.store.read(waiting.run_id) == rows
    third = agent.resume(waiting.run_id)
    third.say("Save nothing else.")
    assert play(model, ["Fine."], third._drive()).text == "Fine."


def test_a_limit_ends_a_run_with_a_last_answer_in_words_and_the_reason(model: Model) -> None:
    desk = Desk()
    run = Agent(model, tools=desk.tools, limits=Limits(rounds=2)).start("Go.")
    answers = [write_call("look", place="a"), write_call("look", place="b"), "That is all I know."]
    outcome = play(model, answers, run._drive())
    assert (outcome.status, outcome.text) == ("stopped", "That is all I know.")
    assert outcome.reason == "the limit of 2 rounds is reached"
    assert "limit of 2 rounds" in run.messages[-2].content


def test_an_answer_that_is_cut_is_no_answer_and_can_be_continued(model: Model) -> None:
    run = Agent(model, tools=Desk().tools, max_tokens=10).start("Go.")
    outcome = play(model, [write_call("look", place="a" * 40)], run._drive())
    assert (outcome.status, outcome.reason) == (
        "stopped",
        "the answer is incomplete: it reached max_tokens or the end of the context",
    )
    run.say("Answer briefly.")
    assert play(model, ["Yes."], run._drive()).status == "answered"


def test_the_limit_of_tokens_interrupts_a_message_and_leaves_room_for_the_last_answer(model: Model) -> None:
    run = Agent(model, tools=Desk().tools, limits=Limits(generated=20)).start("Go.")
    outcome = play(model, [write_call("look", place="a" * 40), "Too little."], run._drive())
    assert (outcome.status, outcome.text) == ("stopped", "Too little.")
    assert outcome.spent.generated <= 20 + len("Too little.") + 1
    assert not any(message.tool_calls for message in run.messages)


def test_a_tool_that_raises_hangs_or_disconnects_is_an_error_for_the_model(model: Model) -> None:
    attempts = []

    @effect("read")
    def crash() -> str:
        """Crash."""
        raise ValueError("no such thing")

    @effect("read")
    def hang() -> str:
        """Hang."""
        time.sleep(3600)
        return ""

    @effect("read")
    def flicker() -> str:
        """Fail once."""
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError("lost")
        return "there"

    run = Agent(model, tools=[crash, hang, flicker], call_seconds=0.2).start("Go.")
    calls = "\n".join(write_call(name) for name in ("crash", "hang", "flicker"))
    play(model, [calls, "Done."], run._drive())
    results = [message.content for message in run.messages if message.role == "tool"]
    assert results == [
        *("error: no such thing", "error: hang did not end within 0.2 seconds", "[after 2 attempts]\nthere")
    ]


def test_a_repeated_call_after_an_error_tells_its_attempt(model: Model) -> None:
    @effect("read")
    def crash() -> str:
        """Crash."""
        raise ValueError("no such thing")

    run = Agent(model, tools=[crash]).start("Go.")
    play(model, [write_call("crash"), write_call("crash"), "Done."], run._drive())
    results = [message.content for message in run.messages if message.role == "tool"]
    assert results == ["error: no such thing", "error in attempt 2: no such thing"]


def test_every_step_is_in_the_audit(model: Model, tmp_path: Path) -> None:
    with RunStore(tmp_path / "runs.db") as store:
        run = Agent(model, tools=Desk().tools, permissions=ALLOW, store=store).start("Go.")
        play(model, [write_call("save", text="a"), "Done."], run._drive())
        kinds = [row.kind for row in store.read(run.id)]
        assert kinds == ["started", "message", "intent", "result", "message", "finished"]
        assert store.verify().problem == ""
        (summary,) = store.list_runs()
        assert (summary.id, summary.task, summary.status) == (run.id, "Go.", "answered")


def test_a_run_continues_with_another_message_of_the_user(model: Model) -> None:
    run = Agent(model).start("Hello")
    assert play(model, ["Hi."], run._drive()).text == "Hi."
    run.say("And now?")
    assert play(model, ["Bye."], run._drive()).text == "Bye."
    assert [message.content for message in run.messages] == ["Hello", "Hi.", "And now?", "Bye."]


@pytest.mark.parametrize("moment", ["first part", "last part"])
def test_a_message_during_an_answer_is_answered_and_the_answer_is_dropped(model: Model, moment: str) -> None:
    async def interrupt() -> str:
        run, parts = Agent(model).start("Hello"), 0
        async for event in run:
            parts += isinstance(event, Said)
            if isinstance(event, Said) and parts == (1 if moment == "first part" else len("Hi.")):
                run.say("Who are you?")
        assert [message.content for message in run.messages] == ["Hello", "Who are you?", "Me."]
        return event.outcome.text  # type: ignore[union-attr]

    assert play(model, ["Hi.", "Me."], interrupt()) == "Me."


def test_waiting_in_an_event_loop_is_refused(model: Model) -> None:
    async def wait() -> None:
        Agent(model).start("Hello").wait()

    with pytest.raises(UnsupportedOperation, match="`await` the run"):
        asyncio.run(wait())


async def leave(run: Run, kind: type) -> None:
    async for event in run:
        if isinstance(event, kind):
            break


def test_an_answer_ends_with_the_loop_that_is_left(model: Model) -> None:
    async def count_decodes() -> int:
        run = Agent(model).start("Go.")
        await leave(run, Said)
        await asyncio.sleep(0.2)
        decodes = model.get_stats().counters["decodes"]
        await asyncio.sleep(0.3)
        return model.get_stats().counters["decodes"] - decodes

    assert play(model, ["x" * 4000], count_decodes()) == 0


@pytest.mark.parametrize("seconds", [0, 0.05, 0.5], ids=["at once", "while calls end", "later"])
def test_calls_end_with_the_loop_that_is_left_and_are_made_again(model: Model, seconds: float) -> None:
    ended: list[str] = []

    @effect("read")
    async def wait() -> str:
        """Wait."""
        try:
            await asyncio.sleep(0 if ended else 60)
        finally:
            await asyncio.sleep(0.2)  # a call may take a moment to end
            ended.append("wait")
        return "waited"

    async def leave_and_return() -> str:
        run = Agent(model, tools=[wait, *Desk().tools]).start("Go.")
        await leave(run, Result)
        await asyncio.sleep(seconds)
        return (await run).text

    calls = f"{write_call('wait')}\n{write_call('look', place='a')}"
    assert play(model, [calls, "Done."], asyncio.wait_for(leave_and_return(), 30)) == "Done."
    assert ended == ["wait", "wait"]


def test_a_program_may_end_in_a_loop_that_is_left(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    run = Agent(model, tools=Desk().tools).start("Go.")
    play(model, [write_call("look", place="a")], leave(run, Result))
    assert play(model, ["Done."], run._drive()).text == "Done."
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_loop_that_is_left_can_be_continued(model: Model) -> None:
    async def leave_and_return() -> str:
        run = Agent(model, tools=Desk().tools).start("Go.")
        async for event in run:
            if isinstance(event, Calling):
                break
        return (await run).text

    assert play(model, [write_call("look", place="a"), "Done."], leave_and_return()) == "Done."


@pytest.mark.parametrize("kind", ["attention", "window", "recurrent", "hybrid"])
def test_a_run_is_resumed_after_a_restart_of_the_engine_from_the_disk_cache(kind: str, tmp_path: Path) -> None:
    desk, options = Desk(), {"context": 4096, "sequences": 2, "threads": 1, "disk_cache": True}

    def build_agent(model: Model) -> Agent:
        return Agent(model, "x" * 600, tools=desk.tools, store=tmp_path / "runs.db")

    with afterglow.load(models.get_path(kind), **options) as model:  # type: ignore[arg-type]
        waiting = play(model, [write_call("save", text="a")], build_agent(model).start("Go.")._drive())
    with afterglow.load(models.get_path(kind), **options) as model:  # type: ignore[arg-type]
        run = build_agent(model).resume(waiting.run_id, {waiting.waiting[0].call.id: "allow"})
        outcome = play(model, ["Done."], run._drive())
    assert desk.calls == ["save a"]
    assert waiting.spent.computed > 1000
    block = 64  # what is stored ends at a block; recurrent states end at the last checkpoint
    assert outcome.spent.computed - waiting.spent.computed < 100 + 2 * block


def test_a_history_that_outgrows_the_context_is_compacted_in_the_prompt_only(model: Model) -> None:
    long = [f"{letter} is a letter. " * 200 for letter in "abc"]  # 3 x 3,600 tokens of 8,192
    summary = "We spoke about letters."
    run = Agent(model, "Be brief.").start(long[0])

    async def talk() -> list[Any]:
        events = await collect(run)
        for text in long[1:]:
            run.say(text)
            events += await collect(run)
        return events

    events = play(model, ["One.", "Two.", summary, "Three."], talk())
    (compacted,) = [event for event in events if isinstance(event, Compacted)]
    compaction = compacted.truncation.compaction
    assert compaction is not None
    assert compaction.summary == summary
    assert compaction.tokens_after < compaction.tokens_before
    assert [message.content for message in run.messages if message.role == "user"] == long
    assert run.messages[-1].content == "Three."
    assert run.spent.generated > sum(map(len, ("One.", "Two.", "Three."))) + len(summary)


def test_a_history_that_outgrows_the_context_fails_if_that_is_asked_for(model: Model) -> None:
    run = Agent(model, "Be brief.", overflow="refuse").start("x" * 9000)
    with pytest.raises(PromptTooLong):
        asyncio.run(collect(run))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model", "smollm2"),
        ("tools", print),
        ("tools", {"look": print}),
        ("permissions", {"read": "allow"}),
        ("limits", {"rounds": 3}),
        ("ask", "terminal"),
        ("roles", [{"name": "reader"}]),
        ("call_seconds", "5"),
        ("call_seconds", 0),
    ],
)
def test_a_wrong_argument_of_an_agent_is_named(model: Model, argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"`{argument}` must be"):
        Agent(**{"model": model, argument: value})


def test_rules_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"`permissions.rules` must be"):
        Permissions(rules=["git.*"])  # type: ignore[arg-type]
