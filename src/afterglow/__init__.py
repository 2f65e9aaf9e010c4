"""afterglow: a local-first LLM inference engine on llama.cpp. No token is computed twice."""

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.parts import CallPart, Reasoning, Text
from afterglow.chat.reply import Turn, TurnStream
from afterglow.chat.tools.tool import Tool
from afterglow.completion import Choice, Completion, Score
from afterglow.conversation import Conversation
from afterglow.engine.lifecycle import Stage
from afterglow.engine.settings import EngineSettings
from afterglow.errors import AfterglowError
from afterglow.llama.sampling import Sampling
from afterglow.loading import load
from afterglow.media.contents import Picture, Sound
from afterglow.media.policy import MediaPolicy
from afterglow.model import Model
from afterglow.version import __version__

__all__ = [
    "AfterglowError",
    "CallPart",
    "Choice",
    "Completion",
    "Conversation",
    "EngineSettings",
    "MediaPolicy",
    "Message",
    "Model",
    "Picture",
    "Reasoning",
    "Sampling",
    "Score",
    "Sound",
    "Stage",
    "Text",
    "Tool",
    "ToolCall",
    "Turn",
    "TurnStream",
    "__version__",
    "load",
]
