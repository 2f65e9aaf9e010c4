"""`Model`: a loaded model with its engine in a thread of this process."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afterglow.api.base import TextModel, needs_boundaries
from afterglow.api.outputs import Score
from afterglow.chat.chat import Chat
from afterglow.chat.multimodal import MediaSupport
from afterglow.engine.host import remote_calls
from afterglow.engine.host.build import DraftSource, build_engine
from afterglow.engine.host.lifecycle import Lifecycle, LoadState
from afterglow.engine.host.remote_calls import MAX_EMBEDDING_TOKENS
from afterglow.engine.host.thread import EngineThread
from afterglow.engine.inspect import snapshots
from afterglow.engine.kvcache.sequence import SavedSequence
from afterglow.engine.sampling import logprobs as scoring
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import Closed, InvalidArgument, PromptTooLong
from afterglow.llama.library.devices import list_devices
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import ModelInfo, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import INLINE_ONLY, MediaPolicy

RANK_POOLING = "4"  # pooling type of rerankers in the metadata of a model
CAPABILITIES = frozenset(
    {
        *("audio", "chat_template", "embeddings", "generation", "gpu", "grammar", "hidden_state", "image", "infill"),
        *(
            "kv_cache",
            "log_probs",
            "lora_adapters",
            "mtp",
            "multi_sequence",
            "partial_state",
            "prompt_caching",
            "raw_completion",
        ),
        *("sliding_window", "speculative_decoding", "streaming", "tokenizer", "trim", "vision"),
    }
)
"""All names of capabilities. `kv_cache` and `hidden_state` are the kinds of memory: hybrid models have both. `trim` is
whether a sequence can be cut at any position, `partial_state` whether checkpoints are needed for that. `vision` is what
other engines call `image`."""


class Model(TextModel):
    """A model that generates text. Create it with `afterglow.load`; close it, or use it in a `with` statement.

    Any number of threads and asyncio tasks may use a model at the same time. Their requests are batched, and every
    prompt starts from the longest cached prefix.

    `chat` answers conversations, `complete` and `stream` continue prompts, `logprobs` scores text, `embed` returns a
    vector.

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
        self.restarts = 0  # engines started after a crash
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
        """Current load state. Reading it never blocks.

        It is `CRASHED` after the engine crashed. The next request starts a new engine; `restarts` counts them.
        """
        engine = self._engine
        return LoadState.CRASHED if engine is not None and engine.has_crashed else self._lifecycle.state

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
        """Names of the capabilities of this model with its settings on this machine; `CAPABILITIES` lists all names."""
        model, info, projector = self._lifecycle.model, self.info, self._lifecycle.projector
        modalities = frozenset[str]() if projector is None else projector.modalities
        settings, generates = self._engine_settings, info.is_causal
        supported = {
            "audio": "audio" in modalities,
            "chat_template": model.get_chat_template() is not None,
            "embeddings": model.metadata.get(f"{info.architecture}.pooling_type") != RANK_POOLING,
            "generation": generates,
            "gpu": any("gpu" in device.kind for device in list_devices()),
            "grammar": generates,
            "hidden_state": info.memory_kind in ("recurrent", "hybrid"),
            "image": "image" in modalities,
            "infill": "fim_pre" in model.vocabulary.special_tokens,
            "kv_cache": generates and info.memory_kind != "recurrent",
            "log_probs": generates,
            "lora_adapters": False,  # only contexts of the low-level API apply adapters
            "mtp": info.mtp_layer_count > 0 and get_library().supports_mtp,
            "multi_sequence": generates and self._lifecycle.context_settings.sequences > 1,
            "partial_state": info.memory_kind != "attention",
            "prompt_caching": generates,
            "raw_completion": generates,
            "sliding_window": info.sliding_window > 0,
            "speculative_decoding": generates and settings.speculation != "off" and not settings.deterministic,
            "streaming": generates,
            "tokenizer": info.vocabulary_size > 0,
            "trim": generates and info.memory_kind == "attention",
            "vision": "image" in modalities,
        }
        assert supported.keys() == CAPABILITIES
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
        """Return whether `capability` is one of `capabilities`. An unknown name raises `InvalidArgument`.

        >>> model.supports("kv_cache"), model.supports("vision")
        (True, False)
        """
        if capability not in CAPABILITIES:
            raise InvalidArgument("capability", f"must be one of {', '.join(sorted(CAPABILITIES))}, not {capability!r}")
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

    # --- embeddings

    @property
    def max_embedding_tokens(self) -> int:
        """Maximum number of tokens of a text for `embed`."""
        settings = self._lifecycle.context_settings
        return min(settings.cells // settings.sequences, self.info.trained_context_length, MAX_EMBEDDING_TOKENS)

    def embed(self, text: str | Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding of a text or of tokens, normalized to length 1.

        Models that generate text are pooled by the mean of their tokens. Raises `PromptTooLong` for a text of more than
        `max_embedding_tokens`.

        >>> cat, dog, car = (model.embed(text) for text in ("a cat", "a dog", "the engine of a car"))
        >>> bool(cat @ dog > cat @ car)
        True
        """
        tokens = [int(token) for token in self._tokenize_prompt(text)]
        if not tokens:
            raise InvalidArgument("text", "must have at least one token")
        if len(tokens) > (limit := self.max_embedding_tokens):
            raise PromptTooLong(len(tokens), limit)
        return self._get_engine().call(functools.partial(remote_calls.embed, tokens=tokens, limit=limit))

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
        """COLD, WARM or CRASHED → ACTIVE: load the weights onto the device and start the engine."""
        with self._transition_lock:
            if self.state is LoadState.CRASHED:
                return self._restart_engine()
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
        context, projector = self._lifecycle.context, self._lifecycle.projector
        settings, draft = self._engine_settings, self._draft
        self._engine = EngineThread(lambda: build_engine(context, settings, draft=draft, projector=projector))

    def _restart_engine(self) -> None:
        """Replace the crashed engine and its context. The caller holds the transition lock.

        Until then, and if it fails, the state stays CRASHED, so that the next request tries again.
        """
        assert self._engine is not None
        self._engine.close()
        if self._lifecycle.state is LoadState.ACTIVE:
            self._lifecycle.replace_context()
        else:  # an earlier attempt failed
            self._lifecycle.activate()
        self._start_engine()
        self.restarts += 1

    def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        with self._chat_lock:
            self._close_chat()

    def _get_engine(self) -> EngineThread:
        if self.state is LoadState.CRASHED:
            with self._transition_lock:
                if self.state is LoadState.CRASHED:  # otherwise another thread restarted it
                    self._restart_engine()
        assert self._lifecycle.context  # raises WrongState or Closed if there is none
        if (engine := self._engine) is None:  # another thread is unloading or closing the model
            raise Closed("model")
        return engine

    def _get_host(self) -> EngineThread:
        engine = self._get_engine()
        if not self.info.is_causal:
            raise InvalidArgument("prompt", "cannot be continued: this model only computes embeddings")
        return engine

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
