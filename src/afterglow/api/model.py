"""The public face: `Model`. Text begins and ends here; computing happens in the engine."""

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
    """A model ready for use. Make one with `afterglow.load`; close it, or use it in a `with`.

    Any number of threads and asyncio tasks may use it at once: their requests share the decodes, and every prompt
    begins from whatever is in memory already.

    >>> model.complete("The capital of France is", max_tokens=2).text
    ' Paris.'
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
        self._transition_lock = threading.Lock()  # over transitions
        self._scoring_lock = threading.Lock()  # one sequence is kept for it
        self._snapshots: dict[str, SavedSequence] = {}
        self._chat_lock = threading.Lock()
        self._chat: tuple[object, Chat] | None = None
        if lifecycle.state is LoadState.ACTIVE:
            self._start_engine()

    # --- what it is

    @property
    def state(self) -> LoadState:
        """`cold`, `warm` or `active`; readable from any thread without waiting."""
        return self._lifecycle.state

    @property
    def is_loaded(self) -> bool:
        return self.state is not LoadState.COLD

    @property
    def is_active(self) -> bool:
        return self.state is LoadState.ACTIVE

    @property
    def info(self) -> ModelInfo:
        """What the model is: architecture, size, kind of memory, …"""
        return self._lifecycle.model.info

    @property
    def settings(self) -> tuple[ModelSettings, ContextSettings]:
        """How it was, or will be, loaded."""
        return self._lifecycle.model_settings, self._lifecycle.context_settings

    @property
    def context_length(self) -> int:
        """Tokens that one request can hold, prompt and answer together."""
        return self._lifecycle.context.cells_per_sequence

    @property
    def backend(self) -> str:
        """The native library that computes, and its build."""
        return f"llama.cpp {get_library().build}"

    @property
    def capabilities(self) -> frozenset[str]:
        """What this model can do here. See `supports`."""
        model, info = self._lifecycle.model, self.info
        answers = {
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
        return frozenset(name for name, answer in answers.items() if answer)

    @property
    def media_error(self) -> str:
        """Why pictures and sound are refused, where a projector is there that cannot be used; else empty."""
        return self._lifecycle.projector_error

    @property
    def chat_template(self) -> str | None:
        """The template that conversations are written with; None: there is none, and ChatML is used."""
        return self._chat_template or self._lifecycle.model.get_chat_template()

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens."""
        return self._lifecycle.model.vocabulary

    def supports(self, capability: str) -> bool:
        """Whether `capability` is among `capabilities`.

        >>> model.supports("kv_cache")
        True
        """
        return capability in self.capabilities

    # --- how likely a text is

    def logprobs(self, text: str | Sequence[int]) -> Score:
        """How likely the model finds each token of `text` but the first. Text begins as the model's prompts do."""
        tokens = self._tokenize_prompt(text)
        engine, context = self._get_host(), self._lifecycle.context
        sequence = context.sequences - 1  # the engine leaves this one alone
        with self._scoring_lock:
            values, windows = scoring.compute_logprobs(
                context, sequence, tokens, run=lambda work: engine.call(lambda _: work())
            )
        return Score(tokens=tuple(int(token) for token in tokens), logprobs=tuple(values), windows=windows)

    def perplexity(self, text: str | Sequence[int]) -> float:
        """exp of the mean negative log-probability: 1 is certainty, the vocabulary's size is a blind guess.

        >>> model.perplexity("The cat sat on the mat.") < model.perplexity("Mat the the cat on sat.")
        True
        """
        return self.logprobs(text).perplexity

    # --- what is in memory

    def fork(self, sequence: int | None = None) -> int:
        """Copy an idle sequence, the last used where none is named; the copy's number, to be given to `complete`."""
        return self._get_host().call(
            lambda engine: snapshots.fork(engine, snapshots.find_latest(engine) if sequence is None else sequence)
        )

    def snapshot(self, name: str, sequence: int | None = None) -> None:
        """Keep what an idle sequence holds, the last used where none is named, under a name.

        >>> answer = model.complete("A long story that is worth keeping:", max_tokens=1)
        >>> model.snapshot("story")
        >>> model.forget()
        >>> number = model.restore("story")
        >>> model.complete("A long story that is worth keeping:", max_tokens=1).usage.cached
        7
        """
        self._snapshots[name] = self._get_host().call(
            lambda engine: snapshots.save(engine, snapshots.find_latest(engine) if sequence is None else sequence)
        )

    def restore(self, name: str, sequence: int | None = None) -> int:
        """Put a snapshot back into memory; the next request that begins like it uses it. The sequence's number."""
        snapshot = self._find_snapshot(name)
        return self._get_host().call(lambda engine: snapshots.load(engine, snapshot, sequence))

    def save_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file."""
        snapshots.write_file(self._find_snapshot(name), Path(path))

    def load_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read a snapshot from a file; `InvalidState` where it is damaged or of another model, once restored."""
        self._snapshots[name] = snapshots.read_file(Path(path))

    def clear_cache(self, sequence: int | None = None) -> None:
        """Clear an idle sequence, or all of memory."""
        self._get_host().call(lambda engine: snapshots.clear(engine, sequence))

    # --- states

    def warm(self) -> None:
        """COLD → WARM: weights in RAM."""
        with self._transition_lock:
            self._lifecycle.warm()

    def activate(self) -> None:
        """COLD or WARM → ACTIVE: ready to compute."""
        with self._transition_lock:
            self._lifecycle.activate()
            self._start_engine()

    def deactivate(self) -> None:
        """ACTIVE → WARM: the context and the GPU are given back."""
        with self._transition_lock:
            self._lifecycle.require("deactivate", LoadState.ACTIVE)
            self._stop_engine()
            self._lifecycle.deactivate()

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: everything is given back; `activate` brings it back."""
        with self._transition_lock:
            self._lifecycle.require("unload", LoadState.WARM, LoadState.ACTIVE)
            self._stop_engine()
            self._lifecycle.unload()

    def close(self) -> None:
        """Give everything back for good; requests that run end with an error."""
        with self._transition_lock:
            self._stop_engine()
            self._lifecycle.close()

    # --- the engine behind it

    def _start_engine(self) -> None:
        if not self.info.is_causal:
            return
        context, projector = self._lifecycle.context, self._lifecycle.projector
        settings, draft = self._engine_settings, self._draft
        sequences = context.sequences - 1  # the last is for scoring
        self._engine = EngineThread(
            lambda: build_engine(context, settings, draft=draft, sequences=sequences, projector=projector)
        )

    def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        with self._chat_lock:
            self._close_chat()

    def _get_host(self) -> EngineThread:
        assert self._lifecycle.context  # WrongState or Closed where there is none
        if self._engine is None:
            raise InvalidArgument("prompt", "cannot be continued: this model only makes embeddings")
        return self._engine

    def _get_chat(self) -> Chat:
        """How this model talks; it goes with the weights."""
        model = self._lifecycle.model
        with self._chat_lock:
            if self._chat is None or self._chat[0] is not model:
                self._close_chat()
                bounded = needs_boundaries(model.info.memory_kind, self._engine_settings)
                self._chat = (
                    model,
                    Chat(
                        model.vocabulary,
                        self.chat_template,
                        self._media_policy,
                        self._get_media_support,
                        boundaries=bounded,
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
