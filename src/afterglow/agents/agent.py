"""`Agent`: a model with a system prompt, tools, permissions and limits. It starts runs and resumes them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

from afterglow.agents.limits import DEFAULT_LIMITS, Limits
from afterglow.agents.permissions import DEFAULT_PERMISSIONS, Decision, Permissions
from afterglow.agents.remote import RemoteEndpoint
from afterglow.agents.resources import CALL_SECONDS, AgentResources, AskFunction
from afterglow.agents.roles import Role
from afterglow.agents.run import Run, RunSpec, build_output
from afterglow.agents.store import RunStore
from afterglow.agents.toolbox import AgentToolLike
from afterglow.api.options import ChatGenerationOptions, check_options
from afterglow.chat.content import check_text
from afterglow.chat.messages import Message


class Agent(AgentResources):
    """A model that works on tasks with tools.

    Args:
        model: A loaded model, or another endpoint; `connect` builds one for a server.
        system: Text of the system message. It is the same for children.
        tools: Python functions, declared with `effect`, and MCP servers, `mcp(…)`.
        permissions: What happens to a call, by effect and by rules.
        limits: Limits of each run.
        ask: Function that asks a person about a call and returns `allow`, `deny` or None, e.g. `terminal`. Without
            it, or without an answer, a run ends as waiting and is resumed later.
        store: Path of the SQLite file of runs. Default: in memory.
        roles: Roles of children, or the directory of their Markdown files. With roles, the model gets the tool
            `delegate`.
        call_seconds: Time limit of one call.
        options: Options of `Model.chat` for every message, e.g. `temperature=0`.

    >>> agent = Agent(model, "You are a helpful assistant.", temperature=0)
    >>> agent.start("What is the capital of France?").wait().text
    'The capital of France is Paris.'
    """

    @classmethod
    def connect(
        cls,
        url: str,
        system: str = "",
        *,
        model: str | None = None,
        api_key: str | None = None,
        tools: Sequence[AgentToolLike] = (),
        permissions: Permissions = DEFAULT_PERMISSIONS,
        limits: Limits = DEFAULT_LIMITS,
        ask: AskFunction | None = None,
        store: str | os.PathLike[str] | RunStore | None = None,
        roles: str | os.PathLike[str] | Sequence[Role] = (),
        call_seconds: float = CALL_SECONDS,
        **options: Unpack[ChatGenerationOptions],
    ) -> Self:
        """Return an agent that generates with a running afterglow server. Tools run in this process.

        Forks, rewinds and resumed runs cost what the prefix cache of the server does not hold.

        >>> Agent.connect("http://localhost:8080", model="smollm2").endpoint.fingerprint
        'http://localhost:8080 smollm2'
        """
        return cls(
            RemoteEndpoint(url, model, api_key),
            system,
            tools=tools,
            permissions=permissions,
            limits=limits,
            ask=ask,
            store=store,
            roles=roles,
            call_seconds=call_seconds,
            **options,
        )

    def start(self, task: str, *, output: Any = None, **options: Unpack[ChatGenerationOptions]) -> Run:
        """Return a new run of a task. It does nothing until it is iterated or awaited.

        `output` is a type, e.g. a pydantic class: the answer is constrained to its schema and parsed. `options`
        override those of the agent.

        >>> run = Agent(model, temperature=0).start("List two numbers.", output=list[int])
        >>> run.wait().output
        [1, 2]
        """
        check_options(ChatGenerationOptions, options, others=("output",))
        schema, parse = build_output(output)
        system = [Message(role="system", content=self.system)] if self.system else []
        history = [*system, Message(role="user", content=check_text(task, "task"))]
        spec = RunSpec(task=task, history=history, limits=self.limits, options=options, output=schema)
        return Run(self, spec, parse=parse)

    def resume(self, run_id: str, answers: Mapping[str, Decision] | None = None, *, output: Any = None) -> Run:
        """Return a run of the store, also of an earlier process, to continue it.

        `answers` allow or deny the calls that the run waits for, by their id. The history is replayed exactly, so that
        the prefix cache holds it: on disk too, if the model has a disk cache.
        """
        return Run.restore(self, self.store.read(run_id), answers or {}, output)
