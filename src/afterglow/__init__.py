"""afterglow: LLM inference on your own machine, on llama.cpp, with a prefix cache that outlives the process.

    import afterglow

    with afterglow.load("smollm2", fetch=True) as model:
        print(model.chat("What is the capital of France?").text)

`load` returns a `Model`. `Conversation` keeps a message history. `LoadOptions`, `GenerationOptions` and `PromptOptions`
are the keywords of `load`, `Model.complete` and `Model.chat`; `Sampling` and `EngineSettings` are values among them.
All errors derive from `AfterglowError`.
"""

import importlib
from typing import TYPE_CHECKING

from afterglow.errors import AfterglowError
from afterglow.version import __version__

if TYPE_CHECKING:
    from afterglow.agents.conversation import Conversation
    from afterglow.api.embeddings import Embeddings
    from afterglow.api.load import load
    from afterglow.api.model import Model
    from afterglow.api.options import (
        ChatGenerationOptions,
        GenerationOptions,
        LoadOptions,
        PromptOptions,
        SamplingOptions,
    )
    from afterglow.api.outputs import Choice, Completion, Score
    from afterglow.api.rerank import RankedDocument, Reranking
    from afterglow.api.sampling_defaults import SamplingDefaults
    from afterglow.api.transcription import Transcription, TranscriptionSegment
    from afterglow.chat.messages import Message, ToolCall
    from afterglow.chat.output.parts import ReasoningDelta, TextDelta, ToolCallDelta
    from afterglow.chat.output.response import ChatResponse, ChatStream
    from afterglow.chat.tools.tool import Tool
    from afterglow.engine.host.lifecycle import LoadState
    from afterglow.engine.types.settings import EngineSettings
    from afterglow.llama.sampling import Sampling
    from afterglow.media.policy import MediaPolicy
    from afterglow.media.types import AudioData, ImageData

__all__ = [
    "AfterglowError",
    "AudioData",
    "ChatGenerationOptions",
    "ChatResponse",
    "ChatStream",
    "Choice",
    "Completion",
    "Conversation",
    "Embeddings",
    "EngineSettings",
    "GenerationOptions",
    "ImageData",
    "LoadOptions",
    "LoadState",
    "MediaPolicy",
    "Message",
    "Model",
    "PromptOptions",
    "RankedDocument",
    "ReasoningDelta",
    "Reranking",
    "Sampling",
    "SamplingDefaults",
    "SamplingOptions",
    "Score",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Transcription",
    "TranscriptionSegment",
    "__version__",
    "load",
]

# Imported on first use, so that `afterglow --version` and shell completion need not wait for numpy and pydantic.
_MODULES = {
    "AudioData": "afterglow.media.types",
    "ChatGenerationOptions": "afterglow.api.options",
    "ChatResponse": "afterglow.chat.output.response",
    "ChatStream": "afterglow.chat.output.response",
    "Choice": "afterglow.api.outputs",
    "Completion": "afterglow.api.outputs",
    "Conversation": "afterglow.agents.conversation",
    "Embeddings": "afterglow.api.embeddings",
    "EngineSettings": "afterglow.engine.types.settings",
    "GenerationOptions": "afterglow.api.options",
    "ImageData": "afterglow.media.types",
    "LoadOptions": "afterglow.api.options",
    "LoadState": "afterglow.engine.host.lifecycle",
    "MediaPolicy": "afterglow.media.policy",
    "Message": "afterglow.chat.messages",
    "Model": "afterglow.api.model",
    "PromptOptions": "afterglow.api.options",
    "RankedDocument": "afterglow.api.rerank",
    "ReasoningDelta": "afterglow.chat.output.parts",
    "Reranking": "afterglow.api.rerank",
    "Sampling": "afterglow.llama.sampling",
    "SamplingDefaults": "afterglow.api.sampling_defaults",
    "SamplingOptions": "afterglow.api.options",
    "Score": "afterglow.api.outputs",
    "TextDelta": "afterglow.chat.output.parts",
    "Tool": "afterglow.chat.tools.tool",
    "ToolCall": "afterglow.chat.messages",
    "ToolCallDelta": "afterglow.chat.output.parts",
    "Transcription": "afterglow.api.transcription",
    "TranscriptionSegment": "afterglow.api.transcription",
    "load": "afterglow.api.load",
}
_PACKAGES = ("agents", "api", "chat", "engine", "llama", "media", "registry", "server", "testing")


if not TYPE_CHECKING:  # a type checker must report unknown names

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            value: object = getattr(importlib.import_module(_MODULES[name]), name)
        elif name in _PACKAGES:
            value = importlib.import_module(f"afterglow.{name}")
        else:
            raise AttributeError(f"module 'afterglow' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
