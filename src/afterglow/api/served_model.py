"""`ServedModel`: a model with its engine in a child process. This process loads only the vocabulary."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from afterglow.api.base import PromptInput, TextModel, needs_boundaries
from afterglow.api.load import (
    apply_disk_cache,
    build_engine_settings,
    build_engine_spec,
    read_chat_template,
    resolve_draft,
)
from afterglow.api.options import LoadOptions, check_options
from afterglow.chat.chat import Chat
from afterglow.chat.multimodal import MediaSupport
from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.build import EngineSpec
from afterglow.engine.host.process import EngineProcess
from afterglow.engine.host.remote_calls import (
    MAX_EMBEDDING_TOKENS,
    CacheContents,
    DecodedMediaInfo,
    EngineInfo,
    EngineStats,
)
from afterglow.engine.host.stream import EventStream
from afterglow.engine.inspect.difference import PrefixMiss, explain_miss
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.engine.types.media import EncodedMedia
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import AfterglowError, InvalidArgument, PromptTooLong, UnsupportedOption
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel, ModelInfo, ModelSettings
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.policy import INLINE_ONLY, MediaPolicy, Modality
from afterglow.version import __version__

ResultT = TypeVar("ResultT")


class ServedSettings:
    """Settings of a served model: arguments of `afterglow.load`, checked."""

    def __init__(
        self,
        *,
        media_policy: MediaPolicy = INLINE_ONLY,
        engine: EngineSettings | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        self.options = check_options(LoadOptions, options)
        self.media_policy = media_policy
        self.chat_template = read_chat_template(self.options["chat_template"])
        self.engine = build_engine_settings(engine, self.options | {"disk_cache": False}, options, label="")

    def build_spec(self, path: Path) -> EngineSpec:
        """Return the spec from which the child process builds the engine."""
        engine = apply_disk_cache(self.engine, str(path), self.options["disk_cache"])
        return build_engine_spec(path, self.options, engine, draft=resolve_draft(self.options["draft"], fetch=False))


class ServedModel(TextModel):
    """A model with its engine in a child process. A crash of the engine fails only the requests in flight.

    >>> from afterglow.testing import models
    >>> with ServedModel("tiny", models.get_path("successor-attention"), ServedSettings(context=256)) as model:
    ...     model.complete("abc", max_tokens=3).text
    'def'
    """

    def __init__(self, name: str, path: Path, settings: ServedSettings | None = None) -> None:
        super().__init__()
        self.name = name
        self.settings = settings or ServedSettings()
        self._scoring_lock = threading.Lock()  # there is one scoring context
        self._chat_lock = threading.Lock()
        self._chat: Chat | None = None
        with contextlib.ExitStack() as stack:
            self._model = stack.enter_context(LlamaModel.load(path, ModelSettings(vocab_only=True)))
            self._process = stack.enter_context(EngineProcess(self.settings.build_spec(path)))
            self.engine_info: EngineInfo = self.call(remote_calls.get_engine_info)
            if self.can_generate:
                stack.callback(self._close_chat)
                self._warm_up()
            stack.pop_all()

    def _warm_up(self) -> None:
        """Do slow one-time work now, so that the first request does not wait for it."""
        _ = self.fingerprint, self.vocabulary.eog_tokens
        with contextlib.suppress(AfterglowError):  # requests report template errors
            self.plan_chat("Hello")

    # --- properties

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the model."""
        return self._model.vocabulary

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return self.engine_info.model

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of one request, prompt and completion together."""
        return self.engine_info.cells

    @property
    def can_generate(self) -> bool:
        """Whether the model generates text; an embedding model does not."""
        return self.info.is_causal

    @property
    def restarts(self) -> int:
        """Number of restarts of the engine process."""
        return self._process.restarts

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs and its engine is built."""
        return self._process.is_ready

    @property
    def has_failed(self) -> bool:
        """Whether the engine process could not be restarted. The model must be loaded again."""
        return self._process.has_given_up

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies everything besides the request that determines output: version, native build and weights."""
        return f"afterglow-{__version__}-{get_library().build.split()[0]}-{self._model.fingerprint[:12]}"

    # --- requests

    def submit(self, request: Request, n: int = 1) -> list[EventStream]:
        """Start `n` choices of a request and return their event streams."""
        return self._submit_choices(request, n)

    def announce_request(self) -> Callable[[], None]:
        """Announce a request that is being prepared, so that others wait for it briefly and are batched with it.

        Call the returned function when the request is submitted or abandoned. Only the first call has an effect.
        """
        self._process.expect_requests(1)
        changes = [-1]

        def withdraw() -> None:
            with contextlib.suppress(IndexError):
                self._process.expect_requests(changes.pop())

        return withdraw

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read engine events in this event loop."""
        self._process.attach_event_loop(loop)

    def call(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> ResultT:
        """Run a function of a module on the engine and return its result."""
        return self._process.call(function)

    def get_cache_contents(self, salt: str = "") -> CacheContents:
        """Return the contents of the prefix cache. Entries of sequences with another salt are left out."""
        return self.call(functools.partial(remote_calls.get_cache_contents, salt=salt))

    def get_stats(self) -> EngineStats:
        """Return counters, tier usage and speculation results of the engine."""
        return self.call(remote_calls.get_engine_stats)

    def explain_miss(self, prompt: PromptInput, *, salt: str = "") -> PrefixMiss:
        """Like `explain`, with the entries of both sides after the divergence."""
        return self.call(functools.partial(explain_miss, request=self.build_request(prompt, salt=salt)))

    def check_prompt_length(self, tokens: Sequence[int]) -> None:
        """Raise `PromptTooLong` if a prompt does not fit into the context."""
        if len(tokens) > self.context_length:
            raise PromptTooLong(len(tokens), self.context_length)

    def score(self, tokens: Sequence[int], alternatives: int = 0) -> list[TokenLogprob]:
        """Return the log-probability of each token except the first, with the most likely alternatives.

        Long texts take several passes; other requests run between them.
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
                        text_length=len(tokens),
                    )
                )
        return scored

    @property
    def max_embedding_tokens(self) -> int:
        """Maximum number of tokens of a text for `embed`."""
        return min(self.settings.options["context"], self.info.trained_context_length, MAX_EMBEDDING_TOKENS)

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding of a text, normalized to length 1."""
        if not len(tokens):
            raise InvalidArgument("input", "must have at least one token")
        if len(tokens) > self.max_embedding_tokens:
            raise PromptTooLong(len(tokens), self.max_embedding_tokens)
        return self.call(functools.partial(remote_calls.embed, tokens=list(tokens), limit=self.max_embedding_tokens))

    def build_infill_prompt(self, before: str, after: str) -> list[int]:
        """Build a fill-in-the-middle prompt for the text between `before` and `after`.

        Raises `UnsupportedOption` if the model has no fill-in-the-middle tokens.
        """
        special = self.vocabulary.special_tokens
        prefix, suffix, middle = (special.get(name) for name in ("fim_pre", "fim_suf", "fim_mid"))
        if prefix is None or suffix is None or middle is None:
            raise UnsupportedOption("suffix", f"the model {self.name!r} has no fill-in-the-middle tokens")
        start = [special["bos"]] if self.vocabulary.adds_bos and "bos" in special else []
        return [*start, prefix, *self.tokenize(before), suffix, *self.tokenize(after), middle]

    def close(self) -> None:
        """Release everything. Running requests end with `Closed`. May be called twice."""
        self._process.close()
        self._close_chat()
        self._model.close()

    def restart(self) -> None:
        """Start a new engine process after `has_failed`. The vocabulary stays open: other threads may be using it."""
        process = EngineProcess(self.settings.build_spec(self._model.path))
        self._process.close()
        self._process = process
        self.engine_info = self.call(remote_calls.get_engine_info)

    def _close_chat(self) -> None:
        with self._chat_lock:
            if self._chat is not None:
                self._chat.close()
            self._chat = None

    # --- methods of `TextModel`

    def _get_host(self) -> EngineProcess:
        if not self.can_generate:
            raise InvalidArgument("model", f"{self.name!r} only computes embeddings")
        return self._process

    def _get_chat(self) -> Chat:
        with self._chat_lock:
            if self._chat is None:
                template = self.settings.chat_template or self._model.get_chat_template()
                boundaries = needs_boundaries(self.info.memory_kind, self.settings.engine)
                self._chat = Chat(
                    self.vocabulary,
                    template,
                    self.settings.media_policy,
                    self._get_media_support,
                    boundaries=boundaries,
                )
            return self._chat

    def _get_media_support(self) -> MediaSupport:
        return MediaSupport(
            kinds=self.engine_info.media,
            measure=self._media_measurer,
            decode=self._decode_media,
            unsupported_reason=self.engine_info.media_error,
            strip_unsupported=self.settings.options["strip_media"],
        )

    def _decode_media(
        self, modality: Modality, data: bytes, policy: MediaPolicy, *, source: str, detail: str
    ) -> EncodedMedia:
        """Have the engine process decode a file: decoded media never enters this process."""
        decode: Callable[[Engine], Future[DecodedMediaInfo]] = functools.partial(
            remote_calls.decode_media, modality=modality, data=data, policy=policy, source=source, detail=detail
        )
        info: DecodedMediaInfo = self.call(decode)  # type: ignore[arg-type]
        return EncodedMedia(
            modality=modality,
            data=data,
            detail=detail,
            policy=policy,
            size=info.size,
            digest=info.digest,
            nbytes=info.nbytes,
        )
