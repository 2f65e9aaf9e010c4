"""One run of an agent: acts as `decide` says, writes a row before and after every action, and yields events."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack, cast

import pydantic

from afterglow.agents.events import (
    AgentEvent,
    Calling,
    Compacted,
    Decided,
    Finished,
    Forked,
    Outcome,
    Question,
    Result,
    Said,
    Thought,
)
from afterglow.agents.execution import execute_call, has_event_loop
from afterglow.agents.limits import (
    DEFAULT_LIMITS,
    SHARED_AMONG_CHILDREN,
    Limits,
    Spent,
    find_reached_limit,
    find_remaining,
    share_limits,
)
from afterglow.agents.loop import Ask, Execute, Finish, Generate, Policy, RunState, ToolResult, Verdict, decide
from afterglow.agents.permissions import Decision, select_names
from afterglow.agents.resources import AgentResources
from afterglow.agents.store import Row
from afterglow.agents.toolbox import AgentTool, run_in_thread
from afterglow.api.options import ChatGenerationOptions
from afterglow.chat.constraints.response_format import forbid_additional_properties
from afterglow.chat.content import check_text
from afterglow.chat.messages import Message, ToolCall, parse_messages, to_openai_message
from afterglow.chat.output.parts import ReasoningDelta, TextDelta
from afterglow.chat.output.response import ChatResponse
from afterglow.chat.tools.tool import Tool
from afterglow.errors import AfterglowError, InvalidArgument, UnsupportedOperation
from afterglow.llama.checks import check_integer

LAST_ANSWER_TOKENS = 1024  # after a limit
LAST_ANSWER_SECONDS = 120.0
STOP_NOTICE = "Stop here: {reason}. Answer now, in words, with what you know so far. No more tools can be called."
CUT_REASONS = {"length": "max_tokens or the end of the context", "deadline": "its deadline"}
DELEGATE = "delegate"  # name of the tool that gives a task to a role


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What a run is given: its task, its rights, and its place below other runs."""

    task: str
    history: Sequence[Message]
    allow: Collection[str] | None = None  # names of tools; None: all tools of the agent
    limits: Limits = DEFAULT_LIMITS
    options: Mapping[str, Any] | None = None
    output: Mapping[str, Any] | None = None  # JSON schema of the answer
    parent: str | None = None
    roles: tuple[str, ...] = ()  # of this run and those above it


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the history of a run, to which `Run.rewind` returns.

    >>> Mark("before the patch", 3).name
    'before the patch'
    """

    name: str
    position: int


class Run:
    """A run of an agent. `async for` yields its events, `await` its outcome; both may be repeated after `say`,
    `rewind` or an answer.

    >>> agent = Agent(model, "You are a helpful assistant.", temperature=0)
    >>> agent.start("What is 2+2?").wait().status
    'answered'
    """

    def __init__(
        self, agent: AgentResources, spec: RunSpec, *, id: str | None = None, parse: Callable[[str], Any] | None = None
    ) -> None:
        self.agent = agent
        self.spec = spec
        self.id = id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self.outcome: Outcome | None = None
        self.failure: AfterglowError | None = None  # that ended a child
        self._parse = parse
        self._state = RunState(messages=list(spec.history))
        self._tools: dict[str, AgentTool] = {}
        self._policy: Policy | None = None
        self._resumed_from: Mapping[str, Any] | None = None  # first row of a restored run
        self._last_row = 0  # id in the store of the newest row of the run
        self._given_answers: Mapping[str, Decision] = {}
        self._unwritten: list[tuple[str, Mapping[str, Any]]] = []  # rows of a run that was not opened yet
        self._running: set[str] = set()  # calls
        self._running_children: list[Run] = []
        self._epoch = 0  # counts changes of the history from outside
        self._active: AsyncGenerator[AgentEvent, None] | None = None
        self._leaving: asyncio.Future[None] | None = None
        self._new_events: list[AgentEvent] = []

    @property
    def messages(self) -> list[Message]:
        """The history: messages of the system, the user, the model and the tools."""
        return list(self._state.messages)

    @property
    def spent(self) -> Spent:
        """What the run and its children have spent."""
        return self._state.spent

    # --- the loop

    async def __aiter__(self) -> AsyncGenerator[AgentEvent, None]:
        await self._leave()
        self._active = events = self._iterate()
        try:
            async for event in events:
                yield event
        finally:
            if self._active is events:
                await self._leave()

    async def _leave(self) -> None:
        """End what an earlier loop that was left still does: generate, or execute calls."""
        if self._active is not None:
            self._leaving, self._active = asyncio.ensure_future(self._active.aclose()), None
        if self._leaving is not None and not self._leaving.done():
            await asyncio.shield(self._leaving)

    async def _iterate(self) -> AsyncGenerator[AgentEvent, None]:
        await self._open()
        assert self._policy is not None
        while True:
            match decide(self._state, self._policy):
                case Generate() as step:
                    events = self._generate(step)
                case Execute() as step:
                    events = self._execute(step)
                case Ask() as step:
                    events = self._ask(step)
                case Finish() as step:
                    yield self._finish(step)
                    return
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
            while self._new_events:
                yield self._new_events.pop(0)

    def __await__(self) -> Generator[Any, None, Outcome]:
        return self._drive().__await__()

    async def _drive(self) -> Outcome:
        async for _ in self:
            pass
        assert self.outcome is not None
        return self.outcome

    def wait(self) -> Outcome:
        """Run to the end and return the outcome, for programs without an event loop."""

        async def drive() -> Outcome:
            async with self.agent:
                return await self

        if has_event_loop():
            raise UnsupportedOperation("wait", "an event loop runs in this thread, e.g. of a notebook: `await` the run")
        return asyncio.run(drive())

    # --- steps

    async def _generate(self, step: Generate) -> AsyncGenerator[AgentEvent, None]:
        """Let the model write a message, and record it with what it cost."""
        epoch, started = self._epoch, time.monotonic()
        if step.stopping and not self._state.stopping:
            notice = Message(role="user", content=STOP_NOTICE.format(reason=step.stopping))
            self._write(("message", {"message": to_openai_message(notice), "stopping": step.stopping}))
        options = self._build_options(step)
        tools = [tool.tool for tool in self._tools.values()]
        stream = await self.agent.endpoint.start(self._state.messages, tools, options)
        try:
            async for part in stream:
                match part:
                    case TextDelta(text):
                        yield Said(text)
                    case ReasoningDelta(text):
                        yield Thought(text)
                if self._epoch != epoch:
                    break
        except BaseException:
            stream.cancel()
            raise
        if self._epoch != epoch:  # the run was rewound meanwhile, or has another message
            stream.cancel()
            return
        self._record_response(stream.response, time.monotonic() - started)
        if stream.response.truncation is not None:
            yield Compacted(stream.response.truncation)
        for call in self._state.pending:
            yield Calling(call)

    def _record_response(self, response: ChatResponse, seconds: float) -> None:
        spent = measure_response(response, seconds)
        message, stopping = response.message, self._state.stopping
        if response.finish_reason in ("length", "deadline"):
            assert self._policy is not None
            if not self._state.stopping and find_reached_limit(self._policy.limits, self._state.spent.add(spent)):
                return self._write(("spent", {"spent": asdict(spent)}))  # the last answer follows
            message = replace(message, tool_calls=())  # they are incomplete
            stopping = stopping or f"the answer is incomplete: it reached {CUT_REASONS[response.finish_reason]}"
        self._write(("message", {"message": to_openai_message(message), "spent": asdict(spent), "stopping": stopping}))

    async def _execute(self, step: Execute) -> AsyncGenerator[AgentEvent, None]:
        """Execute the allowed calls concurrently. Their intents are on disk before the first one starts."""
        assert self._policy is not None
        denied = [verdict for verdict in step.verdicts if verdict.decision != "allow"]
        allowed = [verdict for verdict in step.verdicts if verdict.decision == "allow"]
        denials = [(verdict, ToolResult(verdict.status, format_denial(verdict))) for verdict in denied]
        for verdict in step.verdicts:
            yield Decided(verdict.call, verdict.decision, verdict.reason)
        self._write(
            *(("intent", {"call": asdict(verdict.call), "reason": verdict.reason}) for verdict in allowed),
            *(("result", build_result(verdict.call, result, Spent())) for verdict, result in denials),
        )
        for verdict, result in denials:
            yield Result(verdict.call, result.text, result.status)
        tasks = [asyncio.create_task(self._execute_one(verdict)) for verdict in allowed]
        self._running = {verdict.call.id for verdict in allowed}
        try:
            for done in asyncio.as_completed(tasks):
                call, result, seconds = await done
                self._running.discard(call.id)
                seconds = 0.0 if call.name == DELEGATE else seconds  # those of its child are counted
                self._write(("result", build_result(call, result, Spent(calls=1, seconds=seconds))))
                yield Result(call, result.text, result.status)
        finally:
            self._running = set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _execute_one(self, verdict: Verdict) -> tuple[ToolCall, ToolResult, float]:
        assert self._policy is not None
        remaining = find_remaining(self._policy.limits, self._state.spent).seconds
        seconds = self.agent.call_seconds if remaining is None else min(self.agent.call_seconds, remaining)
        call, started = verdict.call, time.monotonic()
        result = await execute_call(self._tools[call.name], call, seconds=seconds, attempt=verdict.attempt)
        return call, result, time.monotonic() - started

    async def _ask(self, step: Ask) -> AsyncGenerator[AgentEvent, None]:
        """Ask the person about each call. Without an answer the run will wait."""
        assert self._policy is not None
        for verdict in step.verdicts:
            yield Decided(verdict.call, "ask", verdict.reason)
            answer = await self.agent.ask_person(self._build_question(verdict))
            if answer is None:
                self._state.unanswered.add(verdict.call.id)
            else:
                self._write(("answered", {"call": verdict.call.id, "decision": answer}))

    def _finish(self, step: Finish) -> Finished:
        last = self._state.messages[-1]
        text = last.content if last.role == "assistant" else ""
        output = None
        if self._parse is not None and step.status == "answered":
            try:
                output = self._parse(text)
            except ValueError as error:  # the answer reached a limit of tokens
                step = Finish("stopped", f"the answer is incomplete: {str(error).partition(chr(10))[0]}")
        self.outcome = Outcome(
            run_id=self.id,
            status=step.status,
            text=text,
            output=output,
            reason=step.reason,
            waiting=tuple(map(self._build_question, step.verdicts)),
            spent=self._state.spent,
        )
        waiting = [verdict.call.id for verdict in step.verdicts]
        self._write(("finished", {"status": step.status, "reason": step.reason, "waiting": waiting}))
        return Finished(self.outcome)

    def _build_question(self, verdict: Verdict) -> Question:
        return Question(self.id, verdict.call, self._tools[verdict.call.name].effect, verdict.reason)

    def _build_options(self, step: Generate) -> ChatGenerationOptions:
        """Return the options of the next message: rights as `tool_choice`, limits as tokens and deadline."""
        assert self._policy is not None
        options = cast(ChatGenerationOptions, {**self.agent.options, **(self.spec.options or {})})
        remaining = find_remaining(self._policy.limits, self._state.spent)
        tokens = LAST_ANSWER_TOKENS if step.stopping else remaining.generated
        seconds = LAST_ANSWER_SECONDS if step.stopping else remaining.seconds
        if tokens is not None:
            options["max_tokens"] = min(tokens, options.get("max_tokens") or tokens)
        if seconds is not None:
            options["deadline"] = min(seconds, options.get("deadline") or seconds)
        if step.stopping:
            options["tool_choice"] = "none"
        elif set(self._policy.allowed) != set(self._tools) and options.get("tool_choice") != "none":
            mode = "required" if options.get("tool_choice") == "required" else "auto"
            options["tool_choice"] = build_tool_choice(sorted(self._policy.allowed), mode)
        if self.spec.output is not None and not step.stopping:
            options["response_format"] = build_response_format(self.spec.output)
        return options

    # --- rows

    async def _open(self) -> None:
        """Connect the tools, and write the first row of a run, or that it continues."""
        tools = [*await self.agent.open_tools()]
        if self.agent.roles:
            if any(tool.tool.name == DELEGATE for tool in tools):
                raise InvalidArgument("tools", f"must not have the name {DELEGATE!r} if there are roles")
            tools.append(build_delegate_tool(self))
        self._tools = {tool.tool.name: tool for tool in tools}
        if self._policy is not None:
            self._state.unanswered.clear()
            self._write(*[("resumed", {})] if self.outcome is not None else [])
        elif self._resumed_from is None:
            self._append([("started", self._describe_start()), *self._unwritten])
        else:
            self._check_tools(self._resumed_from)
            answers = [("answered", {"call": id, "decision": answer}) for id, answer in self._given_answers.items()]
            self._append([("resumed", {}), *answers, *self._unwritten])
            self._state.answers |= self._given_answers
        self._policy = self._build_policy()

    def _build_policy(self) -> Policy:
        permissions, effects = self.agent.permissions, {name: tool.effect for name, tool in self._tools.items()}
        names = effects.keys() if self.spec.allow is None else effects.keys() & self.spec.allow
        return Policy(
            tools={name: tool.tool for name, tool in self._tools.items()},
            effects=effects,
            allowed={name for name in names if permissions.find_decision(name, effects[name])[0] != "deny"},
            permissions=permissions,
            limits=self.spec.limits,
            delegate=DELEGATE if self.agent.roles else "",
        )

    def _describe_start(self) -> dict[str, Any]:
        """Return the body of the first row: what is needed to restore the run."""
        spec, permissions = self.spec, self.agent.permissions
        return {
            "task": spec.task,
            "history": [to_openai_message(message) for message in spec.history],
            "tools": [tool.tool.definition for tool in self._tools.values()],
            "effects": {name: tool.effect for name, tool in self._tools.items()},
            "allow": None if spec.allow is None else sorted(spec.allow),
            "limits": asdict(spec.limits),
            "permissions": {**asdict(permissions), "rules": dict(permissions.rules)},
            "options": describe_options(spec.options or {}),
            "output": spec.output,
            "parent": spec.parent,
            "roles": list(spec.roles),
            "model": self.agent.endpoint.fingerprint,
        }

    def _check_tools(self, started: Mapping[str, Any]) -> None:
        """Other tools would be another prompt, and calls of the history would have no tool."""
        before = sorted(tool["function"]["name"] for tool in started["tools"])
        if before != (now := sorted(self._tools)):
            raise InvalidArgument("tools", f"must be those of the run, {', '.join(before)}, not {', '.join(now)}")

    def _write(self, *rows: tuple[str, Mapping[str, Any]]) -> None:
        """Write rows in one transaction, then apply them to the state. Those of a run that is not open yet wait."""
        if self._policy is None:
            self._unwritten += rows
        elif rows:
            self._append(rows)
        for kind, body in rows:
            apply_row(self._state, kind, body)

    def _append(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._last_row = self.agent.store.append(self.id, rows, after=self._last_row)

    # --- the history

    def say(self, text: str) -> None:
        """Add a message of the user. The run continues with it. An answer that is being written is dropped."""
        if self._state.pending:
            raise UnsupportedOperation("say", "calls have no results yet: continue the run first")
        message = Message(role="user", content=check_text(text, "text"))
        self._write(("message", {"message": to_openai_message(message), "stopping": ""}))
        self._epoch += 1

    def mark(self, name: str = "") -> Mark:
        """Remember the end of the history, to return to it with `rewind`. A mark survives a restart."""
        name = check_text(name, "name") or f"mark {len(self._state.marks) + 1}"
        mark = Mark(name, self._state.settled_length)
        self._write(("mark", asdict(mark)))
        return mark

    @property
    def marks(self) -> dict[str, Mark]:
        """Marks by name, those of a resumed run included."""
        return {name: Mark(name, position) for name, (position, _) in self._state.marks.items()}

    def rewind(self, mark: Mark | str, *, note: str = "", effects: str = "refuse") -> None:
        """Return to a mark: the history after it is dropped, and its prefix is cached exactly.

        `note` is told to the model. Nothing that calls did is undone. If calls with effects came after the mark, also
        of children, the rewind is refused, unless `effects` is `keep`: then a message tells the model which calls were
        executed.
        """
        if effects not in ("refuse", "keep"):
            raise InvalidArgument("effects", f"must be 'refuse' or 'keep', not {effects!r}")
        check_text(note, "note")
        position = mark.position if isinstance(mark, Mark) else self._find_mark(mark).position
        if self._running:
            raise UnsupportedOperation("rewind", f"{len(self._running)} calls are running: wait for their results")
        if position > len(self._state.messages):
            raise InvalidArgument("mark", "is after the end of the history: the run was rewound before it")
        state = self._state
        left = [call for id, call in state.intents.items() if state.positions[id] >= position]
        kept = [call for call in left if self._get_effect(call.name) != "read"]
        name = mark.name if isinstance(mark, Mark) else mark
        known, children = state.marks.get(name, (None, 0))
        children = children if known == position else 0
        kept += self._find_effects(state.children[children:])
        if kept and effects == "refuse":
            raise UnsupportedOperation(
                "rewind", f"{format_calls(kept)} had effects, which stay: effects='keep' rewinds and tells the model"
            )
        notice = [note] if note else []
        if kept:
            notice.append(f"These calls were executed and are not undone: {format_calls(kept)}.")
        rows: list[tuple[str, Mapping[str, Any]]] = [
            ("rewind", {"position": position, "children": children, "note": note, "effects": effects})
        ]
        if notice:
            message = Message(role="user", content="\n".join(notice))
            rows.append(("message", {"message": to_openai_message(message), "stopping": ""}))
        self._write(*rows)
        self._epoch += 1

    def _find_mark(self, name: str) -> Mark:
        if name not in self._state.marks:
            names = ", ".join(self._state.marks) or "none"
            raise InvalidArgument("mark", f"there is no mark {name!r}; the marks are: {names}")
        return self.marks[name]

    def _get_effect(self, name: str) -> str:
        if name in self._tools:
            return self._tools[name].effect
        before: Mapping[str, str] = (self._resumed_from or {}).get("effects", {})
        return before.get(name, "external")

    def _find_effects(self, children: Sequence[str]) -> list[ToolCall]:
        """Return the calls with effects that children, and children of them, have made."""
        found: list[ToolCall] = []
        pending = list(children)
        while pending:
            for row in self.agent.store.read(pending.pop(0), missing_ok=True):
                if row.kind == "intent" and self._get_effect(row.body["call"]["name"]) != "read":
                    found.append(ToolCall(**row.body["call"]))
                elif row.kind == "forked":
                    pending += row.body["children"]
        return found

    # --- children

    async def fork(
        self,
        tasks: Sequence[str],
        *,
        allow: Collection[str] | None = None,
        output: Any = None,
        role: str | None = None,
        limits: Limits | None = None,
        **options: Unpack[ChatGenerationOptions],
    ) -> list[Outcome]:
        """Give tasks to children, which run concurrently, and return their outcomes in the order of the tasks.

        A child has the system prompt, the tools and the history of this run, so that only its task is computed. Its
        rights are narrowed while it generates: to `allow`, a set of effects, names and patterns, and to those of this
        run and of its `role`. The tokens and calls that this run has left are divided among the children.
        """
        if isinstance(tasks, str) or not isinstance(tasks, Sequence):
            raise InvalidArgument("tasks", f"must be a list of texts, not {tasks!r}")
        for index, task in enumerate(tasks):
            check_text(task, f"tasks[{index}]")
        await self._open_quietly()
        children = [
            self._build_child(task, len(tasks), allow=allow, output=output, role=role, limits=limits, options=options)
            for task in tasks
        ]
        return await self._run_children(children)

    async def _give_task(self, task: str, role: str) -> Outcome:
        """Give a task to a role, for a call of the model. All such calls of its message share what is left."""
        calls = [call for call in self._state.pending if call.name == DELEGATE]
        count = max(1, len(calls) - len(self._running_children))
        (outcome,) = await self._run_children([self._build_child(task, count, role=role, options={})])
        return outcome

    async def branches(
        self,
        count: int,
        *,
        accept: Callable[[Outcome], bool | Awaitable[bool]] | None = None,
        output: Any = None,
        **options: Unpack[ChatGenerationOptions],
    ) -> Outcome | None:
        """Continue this run in several ways at once, and return the first outcome that `accept` accepts.

        The others are cancelled then. None: no outcome is accepted. `Agent.resume(outcome.run_id)` continues the
        accepted one. Without `accept`, the first answer is accepted. A seed is increased by one per branch.
        """
        if check_integer("count", count) < 1:
            raise InvalidArgument("count", f"must be at least 1, not {count}")
        await self._open_quietly()
        length = max(
            (index + 1 for index, message in enumerate(self._state.messages) if message.role in ("user", "tool"))
        )
        children = []
        seed_option = options.get("seed", self.agent.options.get("seed"))
        for number in range(count):
            seed = {} if seed_option is None else {"seed": seed_option + number}
            child = self._build_child(
                "", count, history=self._state.messages[:length], output=output, options={**options, **seed}
            )
            children.append(child)
        self._announce(children)
        tasks = {asyncio.create_task(child._drive_safely()): child for child in children}
        try:
            for done in asyncio.as_completed(tasks):
                outcome = await done
                if await is_accepted(accept, outcome):
                    return outcome
        finally:
            await self._end_children(tasks, "another branch was accepted")
        if all(child.failure is not None for child in children):
            raise children[0].failure  # type: ignore[misc]
        return None

    async def _run_children(self, children: Sequence[Run]) -> list[Outcome]:
        self._announce(children)
        tasks = {asyncio.create_task(child._drive_safely()): child for child in children}
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await self._end_children(tasks, "the run above it was cancelled")

    async def _end_children(self, tasks: Mapping[asyncio.Task[Outcome], Run], reason: str) -> None:
        """Cancel the children that still run, and count what all of them spent."""
        for task, child in tasks.items():
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                child._write(("finished", {"status": "cancelled", "reason": reason}))
        self._charge(list(tasks.values()))

    async def _drive_safely(self) -> Outcome:
        """Run to the end. An error is an outcome: it must not end the siblings."""
        try:
            return await self._drive()
        except AfterglowError as error:
            self.failure = error
            self._write(("finished", {"status": "failed", "reason": str(error)}))
            return Outcome(run_id=self.id, status="failed", reason=str(error), spent=self.spent)

    def _build_child(
        self,
        task: str,
        count: int,
        *,
        allow: Collection[str] | None = None,
        output: Any = None,
        role: str | None = None,
        limits: Limits | None = None,
        options: Mapping[str, Any],
        history: Sequence[Message] | None = None,
    ) -> Run:
        """Build one of `count` children. It can never do or spend more than this run."""
        assert self._policy is not None
        if self._policy.limits.depth == 0:
            raise UnsupportedOperation("fork", "the limit of the depth of children is reached")
        roles, given = self.spec.roles, self.agent.get_role(role)
        if role in roles:
            raise UnsupportedOperation("fork", f"the role {role} is above itself: {' → '.join((*roles, str(role)))}")
        effects, rights = self._policy.effects, frozenset(self._policy.allowed)
        for narrower in (allow, None if given is None else given.allow):
            if narrower is not None:
                rights &= select_names(narrower, effects)
        if history is None:
            content = task if given is None else f"{given.instructions}\n\n{task}"
            settled = self._state.messages[: self._state.settled_length]
            history = [*settled, Message(role="user", content=content)]
        schema, parse = build_output(output)
        spec = RunSpec(
            task=task or self.spec.task,
            history=history,
            allow=rights,
            limits=share_limits(self._policy.limits, self._state.spent.add(self._count_lent()), count, limits),
            options={**(self.spec.options or {}), **(given.options if given else {}), **options},
            output=schema,
            parent=self.id,
            roles=(*roles, role) if role else roles,
        )
        return Run(self.agent, spec, parse=parse)

    def _count_lent(self) -> Spent:
        """Return what the children that run now may spend, and the calls that have no results yet."""
        limits = [child.spec.limits for child in self._running_children]
        lent = Spent(**{name: sum(getattr(limit, name) or 0 for limit in limits) for name in SHARED_AMONG_CHILDREN})
        return lent.add(Spent(calls=len(self._running)))

    def _announce(self, children: Sequence[Run]) -> None:
        self._running_children += children
        ids = tuple(child.id for child in children)
        self._write(("forked", {"children": ids}))
        self._new_events.append(Forked(ids))

    def _charge(self, children: Sequence[Run]) -> None:
        """Count what the children spent. They ran side by side, so that rounds and seconds are those of the longest."""
        if not children:
            return
        self._running_children = [child for child in self._running_children if child not in children]
        spents = [child.spent for child in children]
        total = Spent(
            **{name: sum(getattr(spent, name) for spent in spents) for name in SHARED_AMONG_CHILDREN},
            seconds=max(spent.seconds for spent in spents),
        )
        self._write(("spent", {"spent": asdict(total)}))

    async def _open_quietly(self) -> None:
        """Open a run that was not iterated yet."""
        if self._policy is None:
            await self._open()

    @classmethod
    def restore(cls, agent: AgentResources, rows: Sequence[Row], answers: Mapping[str, Decision], output: Any) -> Run:
        """Rebuild a run from its rows."""
        started = rows[0].body
        if rows[0].kind != "started":
            raise InvalidArgument("run", f"{rows[0].run} begins with a row of the kind {rows[0].kind}")
        schema, parse = build_output(output if output is not None else started["output"])
        spec = RunSpec(
            task=started["task"],
            history=parse_messages(started["history"]),
            allow=started["allow"],
            limits=Limits(**started["limits"]),
            options=started["options"],
            output=schema,
            parent=started["parent"],
            roles=tuple(started["roles"]),
        )
        run = cls(agent, spec, id=rows[0].run, parse=parse)
        for row in rows[1:]:
            apply_row(run._state, row.kind, row.body)
        run._resumed_from, run._given_answers = started, dict(answers)
        run._last_row = rows[-1].id
        pending = {call.id for call in run._state.pending}
        for id, answer in answers.items():
            if id not in pending:
                raise InvalidArgument("answers", f"the run waits for no call {id!r}; it waits for {sorted(pending)}")
            if answer not in ("allow", "deny"):
                raise InvalidArgument("answers", f"must be 'allow' or 'deny', not {answer!r}")
        return run

    def __repr__(self) -> str:
        status = "open" if self.outcome is None else self.outcome.status
        return f"<Run {self.id} {status}, {len(self._state.messages)} messages>"


# --- rows and values


def apply_row(state: RunState, kind: str, body: Mapping[str, Any]) -> None:
    """Change the state as a row says. The rows of a run give its state, now and after a restart."""
    spent = Spent(**body["spent"]) if "spent" in body else Spent()
    match kind:
        case "message":
            (message,) = parse_messages([body["message"]])
            state.add_message(message, spent)
            state.stopping = body.get("stopping", state.stopping)
        case "intent":
            state.add_intent(ToolCall(**body["call"]))
        case "result":
            state.add_result(body["call"], ToolResult(body["status"], body["text"]), spent)
        case "answered":
            state.answers[body["call"]] = body["decision"]
        case "spent":
            state.spent = state.spent.add(spent)
        case "forked":
            state.children += body["children"]
        case "mark":
            state.marks[body["name"]] = body["position"], len(state.children)
        case "rewind":
            state.truncate(body["position"], body.get("children", 0))


def build_result(call: ToolCall, result: ToolResult, spent: Spent) -> dict[str, Any]:
    """Return the body of a result row."""
    return {"call": call.id, "status": result.status, "text": result.text, "spent": asdict(spent)}


def measure_response(response: ChatResponse, seconds: float) -> Spent:
    """Return what a response cost, with the summary that was written for it."""
    usage, truncation = response.usage, response.truncation
    computed, generated = usage.prompt_tokens - usage.cached_tokens, usage.generated_tokens
    if truncation is not None and truncation.compaction is not None:
        computed += truncation.compaction.computed_tokens
        generated += truncation.compaction.generated_tokens
    return Spent(rounds=1, computed=computed, generated=generated, seconds=seconds)


def format_denial(verdict: Verdict) -> str:
    """Return the result of a call that is not executed."""
    return verdict.reason if verdict.status == "repeated" else f"error: {verdict.reason}"


def format_calls(calls: Sequence[ToolCall]) -> str:
    """Return calls as text.

    >>> format_calls([ToolCall(id="1", name="save", arguments='{"a": 1}')])
    'save({"a": 1})'
    """
    return ", ".join(f"{call.name}({call.arguments})" for call in calls)


def build_tool_choice(names: Sequence[str], mode: str = "auto") -> str | dict[str, Any]:
    """Return the tool choice that allows only some tools. The prompt stays the same.

    >>> build_tool_choice([])
    'none'
    """
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}} if tools else "none"


def build_output(output: Any) -> tuple[Mapping[str, Any] | None, Callable[[str], Any] | None]:
    """Return the JSON schema of an answer and the function that parses it. `output` is a type or a schema."""
    if output is None:
        return None, None
    if isinstance(output, Mapping):
        return output, pydantic.TypeAdapter(Any).validate_json
    try:
        adapter = pydantic.TypeAdapter(output)
        return forbid_additional_properties(adapter.json_schema()), adapter.validate_json
    except Exception as error:  # hooks of the type may raise anything
        raise InvalidArgument("output", f"must be a type with a JSON schema: {error}") from None


def build_response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response format that enforces a schema."""
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": dict(schema), "strict": True}}


def describe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are JSON values, for a row. The others are those of the agent."""
    described = {}
    for name, value in options.items():
        with contextlib.suppress(TypeError, ValueError):
            described[name] = json.loads(json.dumps(value))
    return described


async def is_accepted(accept: Callable[[Outcome], bool | Awaitable[bool]] | None, outcome: Outcome) -> bool:
    """Return whether an outcome is an answer that the caller accepts. A plain function runs in a thread."""
    if not outcome or accept is None:
        return bool(outcome)
    accepted = accept(outcome) if inspect.iscoroutinefunction(accept) else await run_in_thread(lambda: accept(outcome))
    return bool(await accepted if inspect.isawaitable(accepted) else accepted)


def build_delegate_tool(run: Run) -> AgentTool:
    """Build the tool with which the model gives a task to a role."""
    roles = run.agent.roles
    about = "; ".join(f"{role.name}: {role.description}" for role in roles.values())

    async def execute(arguments: str) -> Any:
        values = pydantic.TypeAdapter(dict[str, str]).validate_json(arguments)
        outcome = await run._give_task(values["task"], values["role"])
        if outcome.status == "failed":
            raise RuntimeError(outcome.reason)
        return outcome.text if outcome else f"{outcome.status}: {outcome.reason} {outcome.text}".strip()

    properties = {
        "role": {"type": "string", "enum": list(roles), "description": about},
        "task": {"type": "string", "description": "The task, complete with all that is needed to do it."},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return AgentTool(
        Tool(name=DELEGATE, description="Give a task to a specialist.", parameters=schema), "read", execute
    )
