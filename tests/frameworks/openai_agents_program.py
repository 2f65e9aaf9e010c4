"""An agent of openai-agents on an afterglow server: `python openai_agents_program.py URL MODEL`."""

import sys

from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")


@function_tool
def look(place: str) -> str:
    """Look at a place."""
    print(f"look {place}")
    return "a door"


model = OpenAIChatCompletionsModel(model=sys.argv[2], openai_client=client)
agent = Agent(name="engineer", instructions="You are careful.", model=model, tools=[look])
print(Runner.run_sync(agent, "Where is the door?").final_output)
