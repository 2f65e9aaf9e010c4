"""`Model`: a loaded model with its engine in a thread of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from afterglow.api.base import TextModel, needs_boundaries
from afterglow.api.outputs import Score
from afterglow.chat.chat import Chat
from afterglow.chat.multimodal import MediaSupport
from afterglow.engine.host.build import DraftSource, build_engine
from afterglow.engine.host.lifecycle import Lifecycle, LoadState
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.inspect import snapshots
from afterglow.engine.kvcache.sequence import SavedSequence
from afterglow.engine.sampling import logprobs as scoring
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.library.devices import list_devices
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import ModelInfo, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import INLINE_ONLY, MediaPolicy


class Model(TextModel):
    """A model that generates text. Create it with `afterglow.load`; close it, or use it in a `with` statement.

    Any number of threads and asyncio tasks may use a model at the same time. Their requests are batched, and every
    prompt starts from the longest cached prefix.

    `chat` answers conversations, `complete` and `stream` continue prompts, `logprobs` scores text.

    >>> model.complete("The capital of France is", max_tokens=2).text
    ' Paris.'
    >>> model.chat("What is 2+2?").text
    'The answer to this classic math problem is 4.'
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        name: str,
        settings: EngineSettings,
        chat_template: str | None = None,
        draft: DraftSource | None = None,
        media_policy: MediaPolicy = INLINE_ONLY,
        *,
        strip_media: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self._lifecycle = lifecycle
        self._engine_settings = settings
        self._chat_template = chat_template
        self._draft = draft
        self._media_policy = media_policy
        self._strip_media = strip_media
        self._engine: EngineThread | None = None
        self._transition_lock = threading.Lock()
        self._scoring_lock = threading.Lock()  # there is one scoring context
        self._snapshots: dict[str, SavedSequence] = {}
        self._chat_lock = threading.Lock()
        self._chat: tuple[object, Chat] | None = None
        if lifecycle.state is LoadState.ACTIVE:
            self._start_engine()

    # --- properties

    @property
    def state(self) -> LoadState:
        """Current load state. Reading it never blocks."""
        return self._lifecycle.state

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are loaded."""
        return self.state is not LoadState.COLD

    @property
    def is_active(self) -> bool:
        """Whether the model can generate."""
        return self.state is LoadState.ACTIVE

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: architecture, size, kind of memory, …

        >>> model.info.architecture, model.info.memory_kind
        ('llama', 'attention')
        """
        return self._lifecycle.model.info

    @property
    def settings(self) -> tuple[ModelSettings, ContextSettings]:
        """Settings with which the model is loaded."""
        return self._lifecycle.model_settings, self._lifecycle.context_settings

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of one request, prompt and completion together."""
        return self._lifecycle.context.cells_per_sequence

    @property
    def backend(self) -> str:
        """Name and build of the native library."""
        return f"llama.cpp {get_library().build}"

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of the capabilities of this model on this machine.

        The names are `generation`, `embeddings`, `kv_cache`, `hidden_state`, `trim`, `partial_state`, `sliding_window`,
        `mtp`, `chat_template`, `infill`, `image`, `audio` and `gpu`.
        """
        model, info = self._lifecycle.model, self.info
        supported = {
            "generation": info.is_causal,
            "embeddings": True,
            "kv_cache": info.memory_kind != "recurrent",
            "hidden_state": info.memory_kind in ("recurrent", "hybrid"),
            "trim": info.memory_kind == "attention",
            "partial_state": info.memory_kind != "attention",
            "sliding_window": info.sliding_window > 0,
            "mtp": info.mtp_layer_count > 0 and get_library().supports_mtp,
            "chat_template": model.get_chat_template() is not None,
            "infill": "fim_pre" in model.vocabulary.special_tokens,
            "image": self._lifecycle.projector is not None and "image" in self._lifecycle.projector.modalities,
            "audio": self._lifecycle.projector is not None and "audio" in self._lifecycle.projector.modalities,
            "gpu": any("gpu" in device.kind for device in list_devices()),
        }
        return frozenset(name for name, is_supported in supported.items() if is_supported)

    @property
    def media_error(self) -> str:
        """Why the projector cannot be used, so that images and audio are rejected; empty if there is no error."""
        return self._lifecycle.projector_error

    @property
    def chat_template(self) -> str | None:
        """Chat template. None: the model has none, and ChatML is used."""
        return self._chat_template or self._lifecycle.model.get_chat_template()

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the model."""
        return self._lifecycle.model.vocabulary

    def supports(self, capability: str) -> bool:
        """Return whether `capability` is one of `capabilities`.

        >>> model.supports("kv_cache")
        True
        """
        return capability in self.capabilities

    # --- scoring

    def logprobs(self, text: str | Sequence[int]) -> Score:
        """Return the log-probability of each token of a text except the first.

        `text` may also be tokens. Text gets the special tokens that start a prompt.

        >>> score = model.logprobs("The capital of France is Paris")
        >>> len(score.logprobs)
        5
        """
        tokens = self._tokenize_prompt(text)
        engine, context = self._get_host(), self._lifecycle.context
        with self._scoring_lock:
            values, windows = scoring.compute_logprobs(context, tokens, run=lambda task: engine.call(lambda _: task()))
        return Score(tokens=tuple(int(token) for token in tokens), logprobs=tuple(values), windows=windows)

    def perplexity(self, text: str | Sequence[int]) -> float:
        """Return the perplexity of a text: 1 is certainty, the size of the vocabulary is a uniform distribution.

        >>> model.perplexity("The cat sat on the mat.") < model.perplexity("Mat the the cat on sat.")
        True
        """
        return self.logprobs(text).perplexity

    # --- snapshots

    def fork(self, sequence: int | None = None) -> int:
        """Copy an idle sequence of the KV cache and return the number of the copy, for `complete(…, sequence=…)`.

        `sequence` None copies the most recently used one.
        """
        return self._get_host().call(
            lambda engine: snapshots.fork(engine, snapshots.find_latest(engine) if sequence is None else sequence)
        )

    def snapshot(self, name: str, sequence: int | None = None) -> None:
        """Save the state of an idle sequence under a name. `sequence` None saves the most recently used one.

        >>> completion = model.complete("A long story that is worth keeping:", max_tokens=1)
        >>> model.snapshot("story")
        >>> model.clear_cache()
        >>> sequence = model.restore("story")
        >>> model.complete("A long story that is worth keeping:", max_tokens=1).usage.cached_tokens
        7
        """
        self._snapshots[name] = self._get_host().call(
            lambda engine: snapshots.save(engine, snapshots.find_latest(engine) if sequence is None else sequence)
        )

    def restore(self, name: str, sequence: int | None = None) -> int:
        """Load a snapshot into the KV cache, as a prefix for later requests, and return the number of its sequence."""
        snapshot = self._find_snapshot(name)
        return self._get_host().call(lambda engine: snapshots.load(engine, snapshot, sequence))

    def save_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file. Snapshots with media cannot be written."""
        snapshots.write_file(self._find_snapshot(name), Path(path))

    def load_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read a snapshot from a file.

        Raises `InvalidState` if the file is damaged. If it is of another model, `restore` raises it.
        """
        self._snapshots[name] = snapshots.read_file(Path(path))

    def clear_cache(self, sequence: int | None = None) -> None:
        """Clear an idle sequence, or the whole prefix cache in all tiers if `sequence` is None."""
        self._get_host().call(lambda engine: snapshots.clear(engine, sequence))

    # --- load states

    def warm(self) -> None:
        """COLD → WARM: load the weights into RAM."""
        with self._transition_lock:
            self._lifecycle.warm()

    def activate(self) -> None:
        """COLD or WARM → ACTIVE: load the weights onto the device and start the engine."""
        with self._transition_lock:
            self._lifecycle.activate()
            self._start_engine()

    def deactivate(self) -> None:
        """ACTIVE → WARM: stop the engine and release the context and GPU memory."""
        with self._transition_lock:
            self._lifecycle.require("deactivate", LoadState.ACTIVE)
            self._stop_engine()
            self._lifecycle.deactivate()

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: release everything. `activate` loads the model again."""
        with self._transition_lock:
            self._lifecycle.require("unload", LoadState.WARM, LoadState.ACTIVE)
            self._stop_engine()
            self._lifecycle.unload()

    def close(self) -> None:
        """Release everything permanently. Running requests end with `Closed`."""
        with self._transition_lock:
            self._stop_engine()
            self._lifecycle.close()

    # --- engine

    def _start_engine(self) -> None:
        if not self.info.is_causal:
            return
        context, projector = self._lifecycle.context, self._lifecycle.projector
        settings, draft = self._engine_settings, self._draft
        self._engine = EngineThread(lambda: build_engine(context, settings, draft=draft, projector=projector))

    def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        with self._chat_lock:
            self._close_chat()

    def _get_host(self) -> EngineThread:
        assert self._lifecycle.context  # raises WrongState or Closed if there is none
        if self._engine is None:
            raise InvalidArgument("prompt", "cannot be continued: this model only computes embeddings")
        return self._engine

    def _get_chat(self) -> Chat:
        """Return the chat of the loaded weights; a reload creates a new one."""
        model = self._lifecycle.model
        with self._chat_lock:
            if self._chat is None or self._chat[0] is not model:
                self._close_chat()
                boundaries = needs_boundaries(model.info.memory_kind, self._engine_settings)
                self._chat = (
                    model,
                    Chat(
                        model.vocabulary,
                        self.chat_template,
                        self._media_policy,
                        self._get_media_support,
                        boundaries=boundaries,
                    ),
                )
            return self._chat[1]

    def _get_media_support(self) -> MediaSupport:
        projector = self._lifecycle.projector
        return MediaSupport(
            kinds=frozenset() if projector is None else projector.modalities,
            measure=self._media_measurer,
            unsupported_reason=self._lifecycle.projector_error,
            strip_unsupported=self._strip_media,
        )

    def _close_chat(self) -> None:
        if self._chat is not None:
            self._chat[1].close()
        self._chat = None

    def _find_snapshot(self, name: str) -> SavedSequence:
        if name not in self._snapshots:
            raise InvalidArgument("name", f"there is no snapshot called {name!r}")
        return self._snapshots[name]
