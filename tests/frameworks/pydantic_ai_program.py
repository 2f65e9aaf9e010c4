"""An agent of pydantic-ai on an afterglow server: `python pydantic_ai_program.py URL MODEL`."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
agent = Agent(OpenAIChatModel(sys.argv[2], provider=provider), system_prompt="You are careful.")


@agent.tool_plain
def look(place: str) -> str:
    """Look at a place."""
    print(f"look {place}")
    return "a door"


print(agent.run_sync("Where is the door?").output)
