"""An agent of smolagents on an afterglow server: `python smolagents_program.py URL MODEL TOOL_CHOICE`."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def look(place: str) -> str:
    """Look at a place.

    Args:
        place: The place.
    """
    print(f"look {place}")
    return "a door"


model = OpenAIServerModel(sys.argv[2], api_base=f"{sys.argv[1]}/v1", api_key="none", tool_choice=sys.argv[3])
agent = ToolCallingAgent(tools=[look], model=model, verbosity_level=0, max_steps=3)
print(agent.run("Where is the door?"))
