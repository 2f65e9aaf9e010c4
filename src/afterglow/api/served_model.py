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

from afterglow.api.base import PromptInput, TextModel, needs_boundaries
from afterglow.api.load import apply_disk_cache, build_context_settings, build_engine_spec
from afterglow.chat.chat import Chat
from afterglow.chat.multimodal import MediaSupport
from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.build import DraftSource, EngineSpec
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.remote_calls import CacheContents, EngineInfo, EngineStats
from afterglow.engine.host.stream import EventStream
from afterglow.engine.inspect.difference import PrefixMiss, explain_miss
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError, InvalidArgument, PromptTooLong, UnsupportedOption
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelInfo, ModelSettings
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import INLINE_ONLY, MediaPolicy
from afterglow.version import __version__

T = TypeVar("T")
MAX_EMBEDDING_TOKENS = 2048  # tokens of one text: all of them are computed at once, which takes room


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSettings:
    """How a model is served. `context` is how many tokens one request can hold, `sequences` how many run at once."""

    context: int = 4096
    sequences: int = 4
    gpu_layers: int | None = None  # None: as many as fit
    threads: int | None = None  # None: the processor's cores
    disk_cache: bool | None = None  # keep what was computed on disk; None: unless AFTERGLOW_DISK_CACHE says `off`
    chat_template: str | None = None  # takes the place of the model's own
    projector: Path | Literal[False] | None = None  # lets it see or hear; None: the only one beside the model's file
    media_policy: MediaPolicy = INLINE_ONLY  # where pictures and sounds may come from
    strip_media: bool = False  # those that the model cannot take are left out with a warning, and not refused
    draft: DraftSource | None = None  # what guesses beside what was said before: "mtp", or the file of a smaller model
    engine: EngineSettings = field(default_factory=EngineSettings)

    def build_spec(self, path: Path) -> EngineSpec:
        """What makes the engine, in its process."""
        return build_engine_spec(
            path,
            ModelSettings(),
            build_context_settings(self.context, self.sequences, self.threads),
            apply_disk_cache(self.engine, str(path), self.disk_cache),
            gpu_layers=self.gpu_layers,
            draft=self.draft,
            projector=self.projector,
        )


class ServedModel(TextModel):
    """A model whose engine runs in a process of its own: its death costs the requests in flight and nothing else.

    >>> with ServedModel("tiny", tiny.path("successor-attention"), ServedSettings(context=256)) as model:
    ...     model.complete("abc", max_tokens=3).text
    'def'
    """

    def __init__(self, name: str, path: Path, settings: ServedSettings | None = None) -> None:
        super().__init__()
        self.name = name
        self.settings = settings or ServedSettings()
        self._model = LlamaModel.load(path, ModelSettings(vocab_only=True))
        self._scoring_lock = threading.Lock()  # one sequence is kept for it
        self._chat_lock = threading.Lock()
        self._chat: Chat | None = None
        try:
            self._process = EngineProcess(self.settings.build_spec(path))
        except BaseException:
            self._model.close()
            raise
        self.engine_info: EngineInfo = self.call(remote_calls.get_engine_info)
        if self.can_generate:
            self._warm_up()

    def _warm_up(self) -> None:
        """Do what takes a while once: the first request should not wait for it."""
        _ = self.fingerprint, self.vocabulary.eog_tokens
        with contextlib.suppress(AfterglowError):  # who asks is told what is wrong with the template
            self.plan_chat("Hello")

    # --- what it is

    @property
    def vocabulary(self) -> Vocabulary:
        return self._model.vocabulary

    @property
    def info(self) -> ModelInfo:
        """What the model is."""
        return self.engine_info.model

    @property
    def context_length(self) -> int:
        """Tokens that one request can hold, prompt and answer together."""
        return self.engine_info.cells

    @property
    def can_generate(self) -> bool:
        """Whether it continues texts; a model for embeddings does not."""
        return self.info.is_causal

    @property
    def restarts(self) -> int:
        """How often the engine's process had to be started again."""
        return self._process.restarts

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine right now."""
        return self._process.pid is not None

    @functools.cached_property
    def fingerprint(self) -> str:
        """What decides about answers beside the request: our version, the native build and the weights."""
        return f"afterglow-{__version__}-{get_library().build.split()[0]}-{self._model.fingerprint[:12]}"

    # --- what else can be asked

    def submit(self, request: Request, n: int = 1) -> list[EventStream]:
        """Begin `n` answers to a request; their events."""
        return self._submit_choices(request, n)

    def announce_request(self) -> Callable[[], None]:
        """Say that a request is being prepared; what this returns says, once, that it is there, or will not come."""
        self._process.expect_requests(1)
        changes = [-1]

        def arrived() -> None:
            with contextlib.suppress(IndexError):
                self._process.expect_requests(changes.pop())

        return arrived

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which event loop will read the answers."""
        self._process.attach_event_loop(loop)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of a module on the engine; waits for its answer."""
        return self._process.call(function)

    def get_cache_contents(self, salt: str = "") -> CacheContents:
        """What the engine has in memory; of other salts only how much."""
        return self.call(functools.partial(remote_calls.get_cache_contents, salt=salt))

    def get_stats(self) -> EngineStats:
        """What the engine did so far, and what its tiers hold and did."""
        return self.call(remote_calls.get_engine_stats)

    def explain_miss(self, prompt: PromptInput, *, salt: str = "") -> PrefixMiss:
        """`explain`, and the tokens on both sides of where the prompt parts from what is kept."""
        return self.call(functools.partial(explain_miss, request=self.build_request(prompt, salt=salt)))

    def check_prompt_length(self, tokens: Sequence[int]) -> None:
        """`PromptTooLong` where a prompt can never fit."""
        if len(tokens) > self.context_length:
            raise PromptTooLong(len(tokens), self.context_length)

    def score(self, tokens: Sequence[int], alternatives: int = 0) -> list[TokenLogprob]:
        """How likely each token but the first is after those before it, with the likeliest ones there.

        Others are served between the passes.
        """
        self.check_prompt_length(tokens)
        step = self.engine_info.max_scoring_tokens
        scored: list[TokenLogprob] = []
        with self._scoring_lock:
            for start in range(0, len(tokens) - 1, step):
                rows = tokens[start : start + step + 1]
                scored += self.call(
                    functools.partial(
                        remote_calls.run_scoring,
                        tokens=rows,
                        position=start,
                        count=len(rows) - 1,
                        alternatives=alternatives,
                    )
                )
            self.call(remote_calls.clear_scoring_sequence)
        return scored

    @property
    def max_embedding_tokens(self) -> int:
        """The longest text that can be embedded, in tokens."""
        return min(self.settings.context, self.info.trained_context_length, MAX_EMBEDDING_TOKENS)

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """One text as a vector of length 1."""
        if not len(tokens):
            raise InvalidArgument("input", "must have at least one token")
        if len(tokens) > self.max_embedding_tokens:
            raise PromptTooLong(len(tokens), self.max_embedding_tokens)
        return self.call(functools.partial(remote_calls.embed, tokens=list(tokens), limit=self.max_embedding_tokens))

    def build_infill_prompt(self, before: str, after: str) -> list[int]:
        """A prompt for what stands between two texts; `UnsupportedOption` where the model was not trained for it."""
        special = self.vocabulary.special_tokens
        marks = [special.get(name) for name in ("fim_pre", "fim_suf", "fim_mid")]
        prefix, suffix, middle = marks
        if prefix is None or suffix is None or middle is None:
            raise UnsupportedOption("suffix", f"the model {self.name!r} has no tokens for filling in")
        start = [special["bos"]] if self.vocabulary.adds_bos and "bos" in special else []
        return [*start, prefix, *self.tokenize(before), suffix, *self.tokenize(after), middle]

    def close(self) -> None:
        """Give everything back; requests that run end with an error. Closing twice is allowed."""
        self._process.close()
        with self._chat_lock:
            if self._chat is not None:
                self._chat.close()
            self._chat = None
        self._model.close()

    # --- what `Answering` needs

    def _get_host(self) -> EngineProcess:
        if not self.can_generate:
            raise InvalidArgument("model", f"{self.name!r} only makes embeddings")
        return self._process

    def _get_chat(self) -> Chat:
        with self._chat_lock:
            if self._chat is None:
                template = self.settings.chat_template or self._model.get_chat_template()
                bounded = needs_boundaries(self.info.memory_kind, self.settings.engine)
                self._chat = Chat(
                    self.vocabulary, template, self.settings.media_policy, self._get_media_support, boundaries=bounded
                )
            return self._chat

    def _get_media_support(self) -> MediaSupport:
        return MediaSupport(
            kinds=self.engine_info.media,
            measure=self._media_measurer,
            unsupported_reason=self.engine_info.media_error,
            strip_unsupported=self.settings.strip_media,
        )
