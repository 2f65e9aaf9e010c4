"""afterglow: LLM inference on your own machine, on llama.cpp, with a prefix cache that outlives the process.

    import afterglow

    with afterglow.load("smollm2", fetch=True) as model:
        print(model.chat("What is the capital of France?").text)

`load` returns a `Model`. `Conversation` keeps a message history. `LoadOptions`, `GenerationOptions` and `PromptOptions`
are the keywords of `load`, `Model.complete` and `Model.chat`; `Sampling` and `EngineSettings` are values among them.
All errors derive from `AfterglowError`.
"""

from afterglow.api.conversation import Conversation
from afterglow.api.load import load
from afterglow.api.model import Model
from afterglow.api.options import ChatGenerationOptions, GenerationOptions, LoadOptions, PromptOptions, SamplingOptions
from afterglow.api.outputs import Choice, Completion, Score
from afterglow.api.sampling_defaults import SamplingDefaults
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.output.parts import ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.output.response import ChatResponse, ChatStream
from afterglow.chat.tools.tool import Tool
from afterglow.engine.host.lifecycle import LoadState
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError
from afterglow.llama.sampling import Sampling
from afterglow.media.policy import MediaPolicy
from afterglow.media.types import AudioData, ImageData
from afterglow.version import __version__

__all__ = [
    "AfterglowError",
    "AudioData",
    "ChatGenerationOptions",
    "ChatResponse",
    "ChatStream",
    "Choice",
    "Completion",
    "Conversation",
    "EngineSettings",
    "GenerationOptions",
    "ImageData",
    "LoadOptions",
    "LoadState",
    "MediaPolicy",
    "Message",
    "Model",
    "PromptOptions",
    "ReasoningDelta",
    "Sampling",
    "SamplingDefaults",
    "SamplingOptions",
    "Score",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "__version__",
    "load",
]
