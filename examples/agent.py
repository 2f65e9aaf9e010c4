"""An agent with a tool, permissions and limits: events, children that share its prompt, a mark and a rewind."""

import asyncio
from typing import Literal

import pydantic

import afterglow
from afterglow.agents import Agent, Finished, Limits, Permissions, Result, Said, effect

NOTES = {"parser.py": "reads numbers as text", "server.py": "closes every connection", "store.py": "writes twice"}


@effect("read")
def read_note(file: Literal["parser.py", "server.py", "store.py"]) -> str:
    """Read the note about a file."""
    return NOTES[file]


class Finding(pydantic.BaseModel):
    """Answer of a child."""

    file: Literal["parser.py", "server.py", "store.py"]
    is_broken: bool


async def main() -> None:
    with afterglow.load("smollm2", fetch=True) as model:
        agent = Agent(
            model,
            "You are a careful engineer. Read the notes with the tool, then answer in one sentence.",
            tools=[read_note],
            permissions=Permissions(write="ask", external="deny"),
            limits=Limits(rounds=3, generated=3000),
            temperature=0,
            max_tokens=100,
            parallel_tool_calls=False,
        )
        async with agent:
            run = agent.start("What is wrong with store.py?")
            async for event in run:
                match event:
                    case Said(text):
                        print(text, end="", flush=True)
                    case Result(call, text):
                        print(f"[{call.name}({call.arguments}) = {text}]")
                    case Finished(outcome):
                        print(f"\n{outcome.status}, {outcome.spent.computed} tokens computed")

            before = run.mark("before the children")
            outcomes = await run.fork([f"Is {file} broken?" for file in NOTES], allow=set(), output=Finding)
            for outcome in outcomes:
                print(outcome.output or outcome.reason, f"({outcome.spent.computed} tokens computed)")

            run.rewind(before, note="Now answer for parser.py.")
            print((await run).text)


asyncio.run(main())
