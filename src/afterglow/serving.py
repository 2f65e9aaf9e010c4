"""A model for a service: its engine in a child process, and here only what text needs, the vocabulary."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from afterglow.answering import Answering, Promptable, needs_boundaries
from afterglow.chat.chat import Chat
from afterglow.chat.seeing import Sight
from afterglow.engine import services
from afterglow.engine.difference import Difference, difference
from afterglow.engine.engine import Engine
from afterglow.engine.process import EngineProcess
from afterglow.engine.recipe import Draft, LlamaEngine
from afterglow.engine.request import Request
from afterglow.engine.scoring import Scored
from afterglow.engine.services import Facts, Held, Numbers
from afterglow.engine.settings import EngineSettings
from afterglow.engine.stream import Stream
from afterglow.errors import AfterglowError, InvalidArgument, PromptTooLong, UnsupportedOption
from afterglow.llama.library import library
from afterglow.llama.model import Model, ModelInfo, ModelSettings
from afterglow.llama.vocabulary import Vocabulary
from afterglow.loading import kept, memory_for, recipe_for
from afterglow.media.policy import CLOSED, MediaPolicy
from afterglow.version import __version__

T = TypeVar("T")
LONGEST_EMBEDDED = 2048  # tokens of one text: all of them are computed at once, which takes room


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSettings:
    """How a model is served. `context` is how many tokens one request can hold, `sequences` how many run at once."""

    context: int = 4096
    sequences: int = 4
    gpu_layers: int | None = None  # None: as many as fit
    threads: int | None = None  # None: the processor's cores
    disk: bool | None = None  # keep what was computed on disk; None: unless AFTERGLOW_DISK says `off`
    chat_template: str | None = None  # takes the place of the model's own
    projector: Path | Literal[False] | None = None  # lets it see or hear; None: the only one beside the model's file
    media: MediaPolicy = CLOSED  # where pictures and sounds may come from
    strip_media: bool = False  # those that the model cannot take are left out with a warning, and not refused
    draft: Draft | None = None  # what guesses beside what was said before: "mtp", or the file of a smaller model
    engine: EngineSettings = field(default_factory=EngineSettings)

    def recipe(self, path: Path) -> LlamaEngine:
        """What makes the engine, in its process."""
        return recipe_for(
            path,
            ModelSettings(),
            memory_for(self.context, self.sequences, self.threads),
            kept(self.engine, str(path), self.disk),
            gpu_layers=self.gpu_layers,
            draft=self.draft,
            projector=self.projector,
        )


class ServedModel(Answering):
    """A model whose engine runs in a process of its own: its death costs the requests in flight and nothing else.

    >>> with ServedModel("tiny", tiny.path("successor-attention"), ServedSettings(context=256)) as model:
    ...     model.complete("abc", max_tokens=3).text
    'def'
    """

    def __init__(self, name: str, path: Path, settings: ServedSettings | None = None) -> None:
        super().__init__()
        self.name = name
        self.settings = settings or ServedSettings()
        self._model = Model.load(path, ModelSettings(vocabulary_only=True))
        self._scoring = threading.Lock()  # one sequence is kept for it
        self._building = threading.Lock()
        self._chat: Chat | None = None
        try:
            self._process = EngineProcess(self.settings.recipe(path))
        except BaseException:
            self._model.close()
            raise
        self.facts: Facts = self.call(services.facts)
        if self.generates:
            self._warm_up()

    def _warm_up(self) -> None:
        """Do what takes a while once: the first request should not wait for it."""
        _ = self.fingerprint, self.vocabulary.ends
        with contextlib.suppress(AfterglowError):  # who asks is told what is wrong with the template
            self.plan("Hello")

    # --- what it is

    @property
    def vocabulary(self) -> Vocabulary:
        return self._model.vocabulary

    @property
    def info(self) -> ModelInfo:
        """What the model is."""
        return self.facts.model

    @property
    def context_length(self) -> int:
        """Tokens that one request can hold, prompt and answer together."""
        return self.facts.cells

    @property
    def generates(self) -> bool:
        """Whether it continues texts; a model for embeddings does not."""
        return self.info.causal

    @property
    def restarts(self) -> int:
        """How often the engine's process had to be started again."""
        return self._process.restarts

    @property
    def alive(self) -> bool:
        """Whether there is an engine right now."""
        return self._process.pid is not None

    @functools.cached_property
    def fingerprint(self) -> str:
        """What decides about answers beside the request: our version, the native build and the weights."""
        return f"afterglow-{__version__}-{library().build.split()[0]}-{self._model.fingerprint[:12]}"

    # --- what else can be asked

    def submit(self, request: Request, n: int = 1) -> list[Stream]:
        """Begin `n` answers to a request; their events."""
        return self._submit_answers(request, n)

    def announce(self) -> Callable[[], None]:
        """Say that a request is being prepared; what this returns says, once, that it is there, or will not come."""
        self._process.expect(1)
        changes = [-1]

        def arrived() -> None:
            with contextlib.suppress(IndexError):
                self._process.expect(changes.pop())

        return arrived

    def listen_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which event loop will read the answers."""
        self._process.listen_in(loop)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of a module on the engine; waits for its answer."""
        return self._process.call(function)

    def held(self, salt: str = "") -> Held:
        """What the engine has in memory; of other salts only how much."""
        return self.call(functools.partial(services.held, salt=salt))

    def numbers(self) -> Numbers:
        """What the engine did so far, and what its tiers hold and did."""
        return self.call(services.numbers)

    def explain_difference(self, prompt: Promptable, *, salt: str = "") -> Difference:
        """`explain`, and the tokens on both sides of where the prompt parts from what is kept."""
        return self.call(functools.partial(difference, request=self.request(prompt, salt=salt)))

    def check_length(self, tokens: Sequence[int]) -> None:
        """`PromptTooLong` where a prompt can never fit."""
        if len(tokens) > self.context_length:
            raise PromptTooLong(len(tokens), self.context_length)

    def score(self, tokens: Sequence[int], alternatives: int = 0) -> list[Scored]:
        """How likely each token but the first is after those before it, with the likeliest ones there.

        Others are served between the passes.
        """
        self.check_length(tokens)
        step = self.facts.scoring_rows
        scored: list[Scored] = []
        with self._scoring:
            for start in range(0, len(tokens) - 1, step):
                rows = tokens[start : start + step + 1]
                scored += self.call(
                    functools.partial(
                        services.score, tokens=rows, position=start, count=len(rows) - 1, alternatives=alternatives
                    )
                )
            self.call(services.forget_scored)
        return scored

    @property
    def embedded_tokens(self) -> int:
        """The longest text that can be embedded, in tokens."""
        return min(self.settings.context, self.info.trained_context, LONGEST_EMBEDDED)

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """One text as a vector of length 1."""
        if not len(tokens):
            raise InvalidArgument("input", "must have at least one token")
        if len(tokens) > self.embedded_tokens:
            raise PromptTooLong(len(tokens), self.embedded_tokens)
        return self.call(functools.partial(services.embed, tokens=list(tokens), limit=self.embedded_tokens))

    def infill(self, before: str, after: str) -> list[int]:
        """A prompt for what stands between two texts; `UnsupportedOption` where the model was not trained for it."""
        special = self.vocabulary.special
        marks = [special.get(name) for name in ("fim_pre", "fim_suf", "fim_mid")]
        prefix, suffix, middle = marks
        if prefix is None or suffix is None or middle is None:
            raise UnsupportedOption("suffix", f"the model {self.name!r} has no tokens for filling in")
        start = [special["bos"]] if self.vocabulary.adds_bos and "bos" in special else []
        return [*start, prefix, *self.tokenize(before), suffix, *self.tokenize(after), middle]

    def close(self) -> None:
        """Give everything back; requests that run end with an error. Closing twice is allowed."""
        self._process.close()
        with self._building:
            if self._chat is not None:
                self._chat.close()
            self._chat = None
        self._model.close()

    # --- what `Answering` needs

    def _running(self) -> EngineProcess:
        if not self.generates:
            raise InvalidArgument("model", f"{self.name!r} only makes embeddings")
        return self._process

    def _talking(self) -> Chat:
        with self._building:
            if self._chat is None:
                template = self.settings.chat_template or self._model.chat_template()
                bounded = needs_boundaries(self.info.memory, self.settings.engine)
                self._chat = Chat(self.vocabulary, template, self.settings.media, self._sight, boundaries=bounded)
            return self._chat

    def _sight(self) -> Sight:
        return Sight(
            kinds=self.facts.media,
            measure=self._measuring,
            trouble=self.facts.media_trouble,
            strip=self.settings.strip_media,
        )
