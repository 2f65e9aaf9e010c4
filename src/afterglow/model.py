"""The public face: `Model`. Text begins and ends here; computing happens in the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from afterglow.answering import Answering, needs_boundaries
from afterglow.chat.chat import Chat
from afterglow.chat.seeing import Sight
from afterglow.completion import Score
from afterglow.engine import scoring, snapshots
from afterglow.engine.lifecycle import Lifecycle, Stage
from afterglow.engine.recipe import Draft, make_engine
from afterglow.engine.sequence import Saved
from afterglow.engine.settings import EngineSettings
from afterglow.engine.thread import EngineThread
from afterglow.errors import InvalidArgument
from afterglow.llama.devices import devices
from afterglow.llama.library import library
from afterglow.llama.model import ModelInfo, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import CLOSED, MediaPolicy


class Model(Answering):
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
        draft: Draft | None = None,
        media: MediaPolicy = CLOSED,
        *,
        strip_media: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self._lifecycle = lifecycle
        self._engine_settings = settings
        self._chat_template = chat_template
        self._draft = draft
        self._media = media
        self._strip_media = strip_media
        self._engine: EngineThread | None = None
        self._lock = threading.Lock()  # over transitions
        self._scoring = threading.Lock()  # one sequence is kept for it
        self._snapshots: dict[str, Saved] = {}
        self._building = threading.Lock()
        self._chat: tuple[object, Chat] | None = None
        if lifecycle.stage is Stage.ACTIVE:
            self._start()

    # --- what it is

    @property
    def state(self) -> Stage:
        """`cold`, `warm` or `active`; readable from any thread without waiting."""
        return self._lifecycle.stage

    @property
    def is_loaded(self) -> bool:
        return self.state is not Stage.COLD

    @property
    def is_active(self) -> bool:
        return self.state is Stage.ACTIVE

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
        return f"llama.cpp {library().build}"

    @property
    def capabilities(self) -> frozenset[str]:
        """What this model can do here. See `supports`."""
        model, info = self._lifecycle.model, self.info
        answers = {
            "generation": info.causal,
            "embeddings": True,
            "kv_cache": info.memory != "recurrent",
            "hidden_state": info.memory in ("recurrent", "hybrid"),
            "trim": info.memory == "attention",
            "partial_state": info.memory != "attention",
            "sliding_window": info.window > 0,
            "mtp": info.mtp_layers > 0 and library().mtp,
            "chat_template": model.chat_template() is not None,
            "infill": "fim_pre" in model.vocabulary.special,
            "image": self._lifecycle.projector is not None and "image" in self._lifecycle.projector.kinds,
            "audio": self._lifecycle.projector is not None and "audio" in self._lifecycle.projector.kinds,
            "gpu": any("gpu" in device.kind for device in devices()),
        }
        return frozenset(name for name, answer in answers.items() if answer)

    @property
    def media_trouble(self) -> str:
        """Why pictures and sound are refused, where a projector is there that cannot be used; else empty."""
        return self._lifecycle.projector_trouble

    @property
    def chat_template(self) -> str | None:
        """The template that conversations are written with; None: there is none, and ChatML is used."""
        return self._chat_template or self._lifecycle.model.chat_template()

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
        tokens = self._prompt(text)
        engine, context = self._running(), self._lifecycle.context
        sequence = context.sequences - 1  # the engine leaves this one alone
        with self._scoring:
            values, windows = scoring.logprobs(
                context, sequence, tokens, run=lambda work: engine.call(lambda _: work())
            )
        return Score(tokens=tuple(int(token) for token in tokens), values=tuple(values), windows=windows)

    def perplexity(self, text: str | Sequence[int]) -> float:
        """exp of the mean negative log-probability: 1 is certainty, the vocabulary's size is a blind guess.

        >>> model.perplexity("The cat sat on the mat.") < model.perplexity("Mat the the cat on sat.")
        True
        """
        return self.logprobs(text).perplexity

    # --- what is in memory

    def fork(self, sequence: int | None = None) -> int:
        """Copy an idle sequence, the last used where none is named; the copy's number, to be given to `complete`."""
        return self._running().call(
            lambda engine: snapshots.fork(engine, snapshots.latest(engine) if sequence is None else sequence)
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
        self._snapshots[name] = self._running().call(
            lambda engine: snapshots.take(engine, snapshots.latest(engine) if sequence is None else sequence)
        )

    def restore(self, name: str, sequence: int | None = None) -> int:
        """Put a snapshot back into memory; the next request that begins like it uses it. The sequence's number."""
        snapshot = self._named(name)
        return self._running().call(lambda engine: snapshots.put(engine, snapshot, sequence))

    def save_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file."""
        snapshots.write(self._named(name), Path(path))

    def load_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read a snapshot from a file; `InvalidState` where it is damaged or of another model, once restored."""
        self._snapshots[name] = snapshots.read(Path(path))

    def forget(self, sequence: int | None = None) -> None:
        """Clear an idle sequence, or all of memory."""
        self._running().call(lambda engine: snapshots.clear(engine, sequence))

    # --- states

    def warm(self) -> None:
        """COLD → WARM: weights in RAM."""
        with self._lock:
            self._lifecycle.warm()

    def activate(self) -> None:
        """COLD or WARM → ACTIVE: ready to compute."""
        with self._lock:
            self._lifecycle.activate()
            self._start()

    def deactivate(self) -> None:
        """ACTIVE → WARM: the context and the GPU are given back."""
        with self._lock:
            self._lifecycle.require("deactivate", Stage.ACTIVE)
            self._stop()
            self._lifecycle.deactivate()

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: everything is given back; `activate` brings it back."""
        with self._lock:
            self._lifecycle.require("unload", Stage.WARM, Stage.ACTIVE)
            self._stop()
            self._lifecycle.unload()

    def close(self) -> None:
        """Give everything back for good; requests that run end with an error."""
        with self._lock:
            self._stop()
            self._lifecycle.close()

    # --- the engine behind it

    def _start(self) -> None:
        if not self.info.causal:
            return
        context, projector = self._lifecycle.context, self._lifecycle.projector
        settings, draft = self._engine_settings, self._draft
        sequences = context.sequences - 1  # the last is for scoring
        self._engine = EngineThread(
            lambda: make_engine(context, settings, draft=draft, sequences=sequences, projector=projector)
        )

    def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        with self._building:
            self._stop_talking()

    def _running(self) -> EngineThread:
        assert self._lifecycle.context  # WrongState or Closed where there is none
        if self._engine is None:
            raise InvalidArgument("prompt", "cannot be continued: this model only makes embeddings")
        return self._engine

    def _talking(self) -> Chat:
        """How this model talks; it goes with the weights."""
        model = self._lifecycle.model
        with self._building:
            if self._chat is None or self._chat[0] is not model:
                self._stop_talking()
                bounded = needs_boundaries(model.info.memory, self._engine_settings)
                self._chat = (
                    model,
                    Chat(model.vocabulary, self.chat_template, self._media, self._sight, boundaries=bounded),
                )
            return self._chat[1]

    def _sight(self) -> Sight:
        projector = self._lifecycle.projector
        return Sight(
            kinds=frozenset() if projector is None else projector.kinds,
            measure=self._measuring,
            trouble=self._lifecycle.projector_trouble,
            strip=self._strip_media,
        )

    def _stop_talking(self) -> None:
        if self._chat is not None:
            self._chat[1].close()
        self._chat = None

    def _named(self, name: str) -> Saved:
        if name not in self._snapshots:
            raise InvalidArgument("name", f"there is no snapshot called {name!r}")
        return self._snapshots[name]
