"""`Model`: a model and its engine, in a thread of this process or in a child process."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias, Unpack, cast, overload

import numpy as np
from numpy.typing import NDArray

from afterglow.api.adapters import LoraInput, resolve_lora
from afterglow.api.chat_cache import ChatCache
from afterglow.api.embeddings import (
    Embeddings,
    LongTextPolicy,
    VectorCache,
    check_dimensions,
    embed_tokens,
    find_common_prefix,
    pool_all,
    supports_shorter_vectors,
)
from afterglow.api.fit import FitPlan
from afterglow.api.options import (
    ChatGenerationOptions,
    GenerationOptions,
    PromptOptions,
    RerankerKind,
    SamplingOptions,
    check_options,
    check_salt,
    document_options,
    get_fields,
    select_options,
)
from afterglow.api.outputs import Choice, Completion, Score
from afterglow.api.prompts import (
    EntrySequence,
    FittedPrompt,
    MediaMeasurer,
    PromptPart,
    build_mixed_entries,
    is_mixed_prompt,
)
from afterglow.api.rerank import (
    DEFAULT_INSTRUCTION,
    RankTemplate,
    Reranking,
    build_messages,
    build_ranking,
    compare_answers,
    find_answer_tokens,
    to_score,
    tokenize_pair,
)
from afterglow.api.sampling_defaults import SamplingDefaults, build_sampling_defaults
from afterglow.api.transcription import (
    DEFAULT_WINDOW_SECONDS,
    INSTRUCTIONS,
    Transcription,
    TranscriptionTask,
    build_transcription,
    compute_max_tokens,
)
from afterglow.api.transcription import build_messages as build_transcription_messages
from afterglow.chat.chat import Chat, ChatOptions, ChatPlan
from afterglow.chat.compaction import BuildPlan, Compactor, SummaryTask, WrittenSummary, compact_plan
from afterglow.chat.content import check_text
from afterglow.chat.messages import Message, MessageLike
from afterglow.chat.multimodal import MediaSupport
from afterglow.chat.output.parts import OutputFormat, TextDelta
from afterglow.chat.output.reasoning import detect_reasoning_format
from afterglow.chat.output.response import ChatResponse, ChatStream
from afterglow.chat.prompt import Breakpoint, ChatPrompt, Truncation, TruncationPolicy
from afterglow.chat.replay import ReplayStore
from afterglow.chat.replay_disk import SqliteReplays
from afterglow.chat.summaries import SqliteSummaries, SummaryStore
from afterglow.chat.tools.tool import ToolLike
from afterglow.chat.truncation import count_bos, fit_entries, fit_plan
from afterglow.closeable import Closeable
from afterglow.engine.engine import Engine
from afterglow.engine.host import remote_calls
from afterglow.engine.host.base import EngineHost
from afterglow.engine.host.lifecycle import Lifecycle, LoadState, ProcessLifecycle
from afterglow.engine.host.merge import merge_contents, merge_forget_reports, merge_stats
from afterglow.engine.host.remote_calls import AudioWindow, CacheContents, DecodedMediaInfo, EngineInfo, EngineStats
from afterglow.engine.inspect import cache, difference, snapshots, tree
from afterglow.engine.inspect.archive import export_archive
from afterglow.engine.inspect.difference import PrefixMiss
from afterglow.engine.inspect.tree import MAX_TREE_NODES, CachedPrefix, PackedTree, PrefixTree, StoredFiles
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.kvcache.prefix_cache import CLOSE_TIMEOUT_SECONDS, ForgetReport
from afterglow.engine.kvcache.sequence import SavedSequence
from afterglow.engine.pooling import MAX_POOLED_TOKENS
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.engine.scoring import plan_windows, score_text
from afterglow.engine.types.adapters import Adapter, AdapterSet, resolve_adapters
from afterglow.engine.types.cache_events import CacheEventPage
from afterglow.engine.types.counters import StoreReport
from afterglow.engine.types.media import EncodedMedia, MediaPart
from afterglow.engine.types.request import Request, RetainedPrefix
from afterglow.errors import InvalidArgument, PromptTooLong, UnsupportedOperation, UnsupportedOption
from afterglow.llama.checks import check_float, check_integer
from afterglow.llama.library.devices import list_devices
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import ModelInfo, ModelSettings
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.llama.vocabulary import Vocabulary
from afterglow.media.data_uri import encode_audio
from afterglow.media.load import decode_media
from afterglow.media.policy import INLINE_ONLY, MediaPolicy, Modality
from afterglow.media.types import AudioData
from afterglow.version import __version__

GREEDY = Sampling(temperature=0)
DRAW_OPTIONS: tuple[Literal["temperature", "top_k", "top_p", "min_p"], ...] = ("temperature", "top_k", "top_p", "min_p")
PromptInput: TypeAlias = str | Sequence[int] | Sequence[PromptPart] | ChatPrompt | FittedPrompt
ChatInput: TypeAlias = str | Sequence[MessageLike]
MAX_ALTERNATIVES = 1000  # of a scored token, as for `logprobs` of a request
RANK_POOLING = "4"  # pooling type of rerankers in the metadata of a model
CAPABILITIES = frozenset((
    "audio", "chat_template", "embeddings", "generation", "gpu", "grammar", "hidden_state", "image", "infill",
    "kv_cache", "log_probs", "lora_adapters", "mtp", "multi_sequence", "partial_state", "prompt_caching",
    "raw_completion", "rerank", "sliding_window", "speculative_decoding", "streaming", "tokenizer", "trim", "vision",
))  # fmt: skip
"""All names of capabilities. `kv_cache` and `hidden_state` are the kinds of memory: hybrid models have both. `trim` is
whether a sequence can be cut at any position, `partial_state` whether checkpoints are needed for that. `vision` is what
other engines call `image`."""


class Model(Closeable):
    """A model that generates text. Create it with `afterglow.load`; close it, or use it in a `with` statement.

    Any number of threads and asyncio tasks may use a model at the same time. Their requests are batched, and every
    prompt starts from the longest cached prefix.

    `chat` answers conversations, `complete` and `stream` continue prompts, `logprobs` scores text, `embed` returns a
    vector. They are the same for every host of the engine: with `load(…, host="process")` the engine runs in a child
    process, and a crash of the engine only fails the requests in flight.

    >>> model.complete("The capital of France is", max_tokens=2).text
    ' Paris.'
    >>> model.chat("What is 2+2?", temperature=0).text
    'The answer to this classic math problem is 4.'
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        name: str,
        *,
        chat_template: str | None = None,
        media_policy: MediaPolicy = INLINE_ONLY,
        strip_media: bool = False,
        replay: bool = True,
        ollama_parameters: Mapping[str, object] | None = None,
        default_lora: Sequence[str] = (),
        sampling_defaults: SamplingOptions | None = None,
        shorten_embeddings: bool | None = None,
        reranker: RerankerKind | None = None,
        fit: FitPlan | None = None,
    ) -> None:
        self.name = name
        self.fit = fit
        """Options that were chosen for the free memory, with reasons and bytes. None if the model was built by hand."""
        self._lifecycle = lifecycle
        self._chat_template = chat_template
        self._media_policy = media_policy
        self._strip_media = strip_media
        self._has_replay = replay
        self._ollama_parameters = ollama_parameters
        self._default_lora = default_lora
        self._sampling_settings = sampling_defaults
        self._shorten_embeddings = shorten_embeddings
        self._reranker = reranker
        self._request_ids = itertools.count()
        self._media_measurer = MediaMeasurer(lambda measure: lifecycle.get_host().call(measure))
        self._scoring_lock = threading.Lock()  # there is one scoring context
        self._snapshots: dict[str, SavedSequence] = {}
        self._vectors = VectorCache()  # of texts that were embedded or ranked
        self._chats = ChatCache()
        self._finalizer = weakref.finalize(self, release_in_background, lifecycle, self._chats)
        self._finalizer.atexit = False  # the hosts close themselves at exit

    # --- properties

    @property
    def state(self) -> LoadState:
        """Current load state. Reading it never blocks.

        It is `CRASHED` after the engine crashed. The next request starts a new engine; `restarts` counts them.
        """
        return self._lifecycle.state

    @property
    def restarts(self) -> int:
        """Number of engines started after a crash."""
        return self._lifecycle.restarts

    @property
    def needs_restart(self) -> bool:
        """Whether the engine crashed and does not restart by itself. The next request, or `activate`, starts one."""
        return self._lifecycle.needs_restart

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are loaded."""
        return self.state is not LoadState.COLD

    @property
    def is_active(self) -> bool:
        """Whether the model can generate."""
        return self.state is LoadState.ACTIVE

    @property
    def has_engine(self) -> bool:
        """Whether the model has an engine, which may have crashed."""
        return self.state in (LoadState.ACTIVE, LoadState.CRASHED)

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: architecture, size, kind of memory, …

        >>> model.info.architecture, model.info.memory_kind
        ('llama', 'attention')
        """
        return self._lifecycle.model_info

    @property
    def settings(self) -> tuple[ModelSettings, ContextSettings]:
        """Settings with which the model is loaded."""
        return self._lifecycle.spec.model_settings, self._lifecycle.spec.context_settings

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of one request, prompt and completion together."""
        return self.engine_info.cells

    @property
    def engine_info(self) -> EngineInfo:
        """Limits of the engine and what it found out about the model."""
        return self._lifecycle.info

    @property
    def can_generate(self) -> bool:
        """Whether the model generates text. An embedding model does not."""
        return self.info.is_causal

    @property
    def can_reason(self) -> bool:
        """Whether the chat template of the model supports reasoning.

        >>> model.can_reason
        False
        """
        return detect_reasoning_format(self.chat_template) is not None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies everything besides the request that determines output: version, native build and weights."""
        return f"afterglow-{__version__}-{get_library().build.split()[0]}-{self._lifecycle.model.fingerprint[:12]}"

    @functools.cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling of `chat` without sampling options, and the source of each value.

        >>> model.sampling_defaults.describe()["top_k"]
        (40, 'default')
        """
        settings = self._lifecycle.spec.context_settings
        return build_sampling_defaults(
            self._lifecycle.model.metadata,
            self._ollama_parameters,
            self._sampling_settings,
            context_length=settings.cells_per_sequence,
        )

    @property
    def backend(self) -> str:
        """Name and build of the native library."""
        return f"llama.cpp {get_library().build}"

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of the capabilities of this model with its settings on this machine; `CAPABILITIES` lists all names."""
        model, info, modalities = self._lifecycle.model, self.info, self._modalities
        settings, generates, memory_kind = self._lifecycle.spec.engine_settings, info.is_causal, self._memory_kind
        keeps_window = memory_kind == "window" and self._lifecycle.spec.context_settings.swa_full
        supported = {
            "audio": "audio" in modalities,
            "chat_template": model.get_chat_template() is not None,
            "embeddings": not self._has_rank_head,
            "generation": generates,
            "gpu": any("gpu" in device.kind for device in list_devices()),
            "grammar": generates,
            "hidden_state": memory_kind in ("recurrent", "hybrid"),
            "image": "image" in modalities,
            "infill": "fim_pre" in model.vocabulary.special_tokens,
            "kv_cache": generates and memory_kind != "recurrent",
            "log_probs": generates,
            "lora_adapters": generates and bool(self.adapters),
            "mtp": info.mtp_layer_count > 0 and get_library().supports_mtp,
            "multi_sequence": generates and self._lifecycle.spec.context_settings.sequences > 1,
            "partial_state": memory_kind != "attention",
            "prompt_caching": generates,
            "raw_completion": generates,
            "rerank": self._has_rank_head or generates,
            "sliding_window": info.sliding_window > 0,
            "speculative_decoding": generates and settings.speculation != "off" and not settings.deterministic,
            "streaming": generates,
            "tokenizer": info.vocabulary_size > 0,
            "trim": generates and (memory_kind == "attention" or keeps_window),
            "vision": "image" in modalities,
        }
        assert supported.keys() == CAPABILITIES
        return frozenset(name for name, is_supported in supported.items() if is_supported)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """LoRA adapters that requests can use, in the order of their declaration in `load(…, adapters=…)`.

        >>> model.adapters
        ()
        """
        return self._lifecycle.spec.adapters

    @property
    def media_error(self) -> str:
        """Why the projector cannot be used, so that images and audio are rejected; empty if there is no error."""
        return self.engine_info.media_error if self.has_engine else ""

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

    # --- tokens

    def tokenize(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Return the tokens of `text`.

        With `special`, control tokens written in the text are parsed; otherwise they stay text. With `bos`, the result
        starts with the tokens that the model puts at the start of a prompt.

        >>> len(model.tokenize("<|im_start|>")), len(model.tokenize("<|im_start|>", special=True))
        (7, 1)
        """
        return self.vocabulary.tokenize(check_text(text, "text"), parse_special=special, add_special=bos)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `tokens`. Incomplete UTF-8 characters become U+FFFD.

        >>> model.detokenize(model.tokenize("naïve"))
        'naïve'
        """
        return self.vocabulary.detokenize(tokens, special=special).decode("utf-8", "replace")

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of `text`, without the tokens at the start of a prompt.

        >>> model.count_tokens("How many tokens is this?")
        6
        """
        return len(self.tokenize(text))

    # --- chat

    @overload
    def chat(
        self,
        messages: ChatInput,
        *,
        tools: Sequence[ToolLike] = (),
        stream: Literal[False] = False,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[ChatGenerationOptions],
    ) -> ChatResponse: ...
    @overload
    def chat(
        self,
        messages: ChatInput,
        *,
        tools: Sequence[ToolLike] = (),
        stream: Literal[True],
        n: Literal[1] = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[ChatGenerationOptions],
    ) -> ChatStream: ...
    @document_options(ChatGenerationOptions)
    def chat(
        self,
        messages: ChatInput,
        *,
        tools: Sequence[ToolLike] = (),
        stream: bool = False,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[ChatGenerationOptions],
    ) -> ChatResponse | ChatStream:
        """Generate the assistant's response to a conversation.

        Args:
            messages: The question as text, or a list of (role, text) pairs, `Message` objects or OpenAI message
                dictionaries. The response continues a last message of the assistant.
            tools: OpenAI tool dictionaries, or Python functions with type hints.
            stream: Return a `ChatStream` that yields parts of the response as they are generated.
            n: Number of responses. They share one prefill; all but the first are in `ChatResponse.alternatives`.
            on_token: Called with each token of the first response; for a stream, when it is read.
            cancel: Setting this event stops the request and raises `Cancelled`, for a stream in its reader.
            options: Options of the prompt and of generation: see `ChatGenerationOptions`. Sampling options that are not
                given are `sampling_defaults`.

        >>> model.chat("What is 2+2?", temperature=0).text
        'The answer to this classic math problem is 4.'
        >>> model.chat("Is snow black?", response_format={"type": "choice", "choices": ["yes", "no"]}, seed=1).text
        'no'
        >>> model.chat("List two numbers.", response_format=list[int], temperature=0).parsed
        [1, 2]
        """
        if stream and n != 1:
            raise InvalidArgument("n", f"must be 1 for a stream, not {n}")
        streams = self.submit_chat(messages, tools=tools, n=n, on_token=on_token, cancel=cancel, **options)
        if stream:
            return streams[0]
        first, *others = collect_responses(streams)
        return replace(first, alternatives=tuple(others))

    async def chat_async(
        self,
        messages: ChatInput,
        *,
        tools: Sequence[ToolLike] = (),
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[ChatGenerationOptions],
    ) -> ChatResponse:
        """Asyncio version of `chat`. To stream, use `async for part in model.chat(…, stream=True)`.

        >>> asyncio.run(model.chat_async("What is 2+2?", temperature=0)).text
        'The answer to this classic math problem is 4.'
        """
        submit = functools.partial(
            self.submit_chat, messages, tools=tools, n=n, on_token=on_token, cancel=cancel, **options
        )
        # Only `compact` generates before it returns.
        streams = await asyncio.to_thread(submit) if options.get("overflow") == "compact" else submit()
        try:
            first, *others = [await chat_stream.result_async() for chat_stream in streams]
        except BaseException:
            for chat_stream in streams:
                chat_stream.cancel()
            raise
        return replace(first, alternatives=tuple(others))

    def submit_chat(
        self,
        messages: ChatInput,
        *,
        tools: Sequence[ToolLike] = (),
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[ChatGenerationOptions],
    ) -> list[ChatStream]:
        """Start `n` responses that share one prefill and return their streams. Options as for `chat`."""
        checked = check_options(ChatGenerationOptions, options, others=("tools", "stream", "n", "on_token", "cancel"))
        prompt_options = select_options(PromptOptions, checked)
        started = time.monotonic()
        plan = self._plan_fitted_chat(messages, tools, checked, prompt_options, cancel)
        generation_options = select_options(GenerationOptions, options)
        if checked["overflow"] == "compact":
            shorten_deadline(generation_options, time.monotonic() - started)
        generation_options["overflow"] = "refuse"  # the plan fits
        generation_options["sampling"] = resolve_sampling(self.sampling_defaults.sampling, checked)
        for name in get_fields(SamplingOptions):
            generation_options.pop(name, None)  # type: ignore[misc]
        request = plan.apply_to(self.build_request(plan.prompt, **generation_options))
        return self.start(request, plan.output_format, checked["stop"], n=n, on_token=on_token, cancel=cancel)

    @document_options(PromptOptions)
    def plan_chat(
        self,
        messages: ChatInput,
        *,
        tools: Sequence[ToolLike] = (),
        salt: str = "",
        breakpoints: Sequence[Breakpoint] = (),
        **options: Unpack[PromptOptions],
    ) -> ChatPlan:
        """Render a conversation with the chat template of the model, and prepare its token constraints.

        Args:
            messages: As for `chat`.
            tools: As for `chat`.
            salt: That of the request: only messages that were generated with it are replayed.
            breakpoints: Positions up to which later prompts are likely to be the same. They are boundaries of the
                prompt, and those with a retention are pinned for that time.
            options: See `PromptOptions`.
        """
        checked = check_options(PromptOptions, options, others=("tools", "salt", "breakpoints"))
        return self._get_chat(checked["chat_template"]).plan(
            to_messages(messages),
            ChatOptions(
                tools=tools,
                tool_choice=checked["tool_choice"],
                parallel_tool_calls=checked["parallel_tool_calls"],
                response_format=checked["response_format"],
                reasoning=checked["reasoning"],
                chat_template_kwargs=checked["chat_template_kwargs"] or {},
                replay=checked["replay"],
                salt=check_salt(salt),
                breakpoints=breakpoints,
            ),
        )

    def _plan_fitted_chat(
        self,
        messages: ChatInput,
        tools: Sequence[ToolLike],
        generation_options: GenerationOptions,
        options: PromptOptions,
        cancel: threading.Event | None,
    ) -> ChatPlan:
        """Plan a chat that fits by the overflow policy. With `refuse`, the engine rejects a prompt too long."""
        salt, overflow = generation_options["salt"], generation_options["overflow"]
        if overflow == "refuse":
            return self.plan_chat(messages, tools=tools, salt=salt, **options)
        loaded = self.load_media(to_messages(messages))
        build_plan: BuildPlan = lambda remaining: self.plan_chat(remaining, tools=tools, salt=salt, **options)  # noqa: E731
        if overflow == "compact":
            return self.plan_compacted_chat(loaded, build_plan, tools, generation_options, options, cancel)
        max_tokens = generation_options["max_tokens"]
        return fit_plan(loaded, build_plan, overflow, context=self.context_length, max_tokens=max_tokens)

    def plan_compacted_chat(
        self,
        messages: Sequence[Message],
        build_plan: BuildPlan,
        tools: Sequence[ToolLike],
        generation_options: GenerationOptions,
        options: PromptOptions,
        cancel: threading.Event | None = None,
    ) -> ChatPlan:
        """Plan a chat by the overflow policy `compact`: summaries that the prompt needs are generated first. Blocking.

        `build_plan` plans the messages that are left. Salt, priority, deadline and use of the prefix cache of a summary
        are those of `generation_options`.
        """
        salt, chat = generation_options["salt"], self._get_chat()

        def build_summary_plan(remaining: list[Message], reasoning_off: bool) -> ChatPlan:
            summary_options: PromptOptions = {**options, "tool_choice": "none", "response_format": None}
            if reasoning_off:
                summary_options["reasoning"] = False
            plan = self.plan_chat(remaining, tools=tools, salt=salt, **summary_options)
            return replace(plan, place=None)  # no later prompt contains a summary as an answer

        def write(task: SummaryTask) -> WrittenSummary:
            kept: GenerationOptions = {"max_tokens": task.max_tokens, "sampling": GREEDY, "salt": salt}
            for name in ("priority", "deadline", "use_prefix_cache"):
                if name in generation_options:
                    kept[name] = generation_options[name]
            request = task.plan.apply_to(self.build_request(task.plan.prompt, **kept))
            (response,) = collect_responses(self.start(request, task.plan.output_format, cancel=cancel))
            text = response.text.strip()
            failure = "" if text else "the model wrote an empty summary"
            if response.finish_reason == "deadline":
                failure = "the deadline passed before the summary was complete"
            return WrittenSummary(text, response.usage, failure)

        compactor = Compactor(
            messages=messages,
            build_plan=build_plan,
            build_summary_plan=build_summary_plan,
            context=self.context_length,
            max_tokens=generation_options.get("max_tokens"),
        )
        return compact_plan(compactor, chat.summary_store, salt, write)

    def load_media(self, messages: Sequence[MessageLike]) -> list[Message]:
        """Return the messages with their images and audio fetched and decoded."""
        return self._get_chat().load_media(messages)

    @document_options(PromptOptions)
    def apply_chat_template(
        self, messages: ChatInput, *, tools: Sequence[ToolLike] = (), salt: str = "", **options: Unpack[PromptOptions]
    ) -> ChatPrompt:
        """Render a conversation with the chat template of the model, as a prompt for `complete` or `stream`.

        The prompt ends where the response of the assistant starts. Control tokens written in messages stay text.

        >>> prompt = model.apply_chat_template("What is 2+2?")
        >>> model.complete(prompt, max_tokens=20).text
        'The answer to this classic math problem is 4.'
        """
        return self.plan_chat(messages, tools=tools, salt=salt, **options).prompt

    # --- completion

    @document_options(GenerationOptions)
    def complete(
        self,
        prompt: PromptInput,
        *,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Continue a prompt, with the most likely tokens unless a sampling option is given.

        With `temperature`, `top_k`, `top_p` or `min_p`, the options that are not given are `sampling_defaults`.

        Args:
            prompt: Text, tokens, a list that mixes text, tokens, `ImageData` and `AudioData`, or the result of
                `apply_chat_template`.
            n: Number of completions. They share one prefill.
            on_token: Called with each token of the first completion.
            cancel: Setting this event stops the request and raises `Cancelled`.
            options: See `GenerationOptions`.

        >>> completion = model.complete("Once upon a time", max_tokens=5, n=2, temperature=0.8, seed=1)
        >>> [len(choice.tokens) for choice in completion.choices]
        [5, 5]
        """
        responses = collect_responses(self._submit_prompt(prompt, options, n=n, on_token=on_token, cancel=cancel))
        return Completion(
            choices=tuple(map(Choice.from_response, responses)),
            usages=tuple(response.usage for response in responses),
            truncation=responses[0].truncation,
        )

    def stream(
        self,
        prompt: PromptInput,
        *,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[str]:
        """Continue a prompt like `complete`, and yield text as it is generated. Closing the iterator cancels it.

        >>> list(model.stream("One, two, three,", max_tokens=2))
        [' four', ',']
        """
        (stream,) = self._submit_prompt(prompt, options, on_token=on_token, cancel=cancel)
        return (part.text for part in stream if isinstance(part, TextDelta))

    def stream_async(
        self,
        prompt: PromptInput,
        *,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncIterator[str]:
        """Asyncio version of `stream`.

        >>> async def shout():
        ...     return [text.upper() async for text in model.stream_async("One, two, three,", max_tokens=2)]
        >>> asyncio.run(shout())
        [' FOUR', ',']
        """
        (stream,) = self._submit_prompt(prompt, options, on_token=on_token, cancel=cancel)
        return (part.text async for part in stream if isinstance(part, TextDelta))

    def _submit_prompt(
        self,
        prompt: PromptInput,
        options: GenerationOptions,
        *,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[ChatStream]:
        """Start `n` completions that share one prefill and return their streams, which consist of text only."""
        checked = check_options(GenerationOptions, options, others=("n", "on_token", "cancel"))
        truncation = None
        if checked["overflow"] != "refuse":  # otherwise the engine rejects a prompt too long
            prompt = self.fit_prompt(prompt, checked["overflow"], checked["max_tokens"])
            truncation, checked["overflow"] = prompt.truncation, "refuse"
        request, output_format = self.build_request(prompt, **checked), self.build_text_format(truncation)
        return self.start(request, output_format, checked["stop"], n=n, on_token=on_token, cancel=cancel)

    def build_request(self, prompt: PromptInput, **options: Unpack[GenerationOptions]) -> Request:
        """Build the engine request for a prompt. Prompt and options as for `complete`."""
        checked = check_options(GenerationOptions, options)
        if checked["overflow"] != "refuse":
            prompt = self.fit_prompt(prompt, checked["overflow"], checked["max_tokens"])
        entries, media = self._build_entries(prompt)
        breakpoints = prompt.breakpoints if isinstance(prompt, ChatPrompt) else ()
        return Request(
            id=str(next(self._request_ids)),
            entries=entries,
            media=media,
            sampling=resolve_sampling(self._choose_base_sampling(checked), checked),
            max_tokens=checked["max_tokens"],
            min_tokens=checked["min_tokens"],
            stop=encode_stops(checked["stop"]),
            logprobs=checked["logprobs"],
            sequence=checked["sequence"],
            boundaries=frozenset(checked["boundaries"])
            | (prompt.boundaries if isinstance(prompt, ChatPrompt) else frozenset())
            | {breakpoint.length for breakpoint in breakpoints},
            retained=tuple(
                RetainedPrefix(breakpoint.length, breakpoint.retention_seconds)
                for breakpoint in breakpoints
                if breakpoint.retention_seconds is not None
            ),
            system_length=prompt.system_length if isinstance(prompt, ChatPrompt) else 0,
            priority=checked["priority"],
            deadline=checked["deadline"],
            use_prefix_cache=checked["use_prefix_cache"],
            ignore_eos=checked["ignore_eos"],
            salt=check_salt(checked["salt"]),
            adapters=self._resolve_lora(checked["lora"]),
        )

    def _resolve_lora(self, lora: LoraInput) -> AdapterSet:
        """Return the adapters of a request. One that names none has those that belong to the model."""
        return resolve_lora(lora or self._default_lora, self.adapters, self.name)

    def _choose_base_sampling(self, options: GenerationOptions) -> Sampling:
        """Return the sampling of a completion before its options: greedy, unless an option asks for a draw."""
        draws = options["temperature"] != 0 and any(options[name] is not None for name in DRAW_OPTIONS)
        return self.sampling_defaults.sampling if draws else GREEDY

    def build_infill_prompt(self, before: str, after: str) -> list[int]:
        """Build a fill-in-the-middle prompt for the text between `before` and `after`.

        Raises `UnsupportedOption` if the model has no fill-in-the-middle tokens.
        """
        special = self.vocabulary.special_tokens
        prefix, suffix, middle = (special.get(name) for name in ("fim_pre", "fim_suf", "fim_mid"))
        if prefix is None or suffix is None or middle is None:
            raise UnsupportedOption("suffix", f"the model {self.name!r} has no fill-in-the-middle tokens")
        bos = [special["bos"]] if self.vocabulary.adds_bos and "bos" in special else []
        return [*bos, prefix, *self.tokenize(before), suffix, *self.tokenize(after), middle]

    def explain(self, prompt: PromptInput, *, salt: str = "", lora: LoraInput = ()) -> Explanation:
        """Explain how much of a prompt is a prefix hit now, where it diverges from the cache, and why it misses.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> model.explain("The rain in Portugal").shared_entries
        3
        """
        request = self._build_lookup(prompt, salt, lora)
        explanations = self._get_host().call_each(functools.partial(Engine.explain, request=request))
        return max(explanations, key=lambda explanation: explanation.reused_entries)

    def _build_lookup(self, prompt: PromptInput, salt: str, lora: LoraInput) -> Request:
        """Build a request that is only looked up in the prefix cache."""
        request = self.build_request(prompt, salt=salt)
        return replace(request, adapters=self._resolve_lora(lora))

    # --- prefix cache

    def pin(
        self,
        prompt: PromptInput,
        *,
        salt: str = "",
        lora: LoraInput = (),
        retention_seconds: float | None = None,
    ) -> None:
        """Pin a prefix, e.g. a system prompt: it is never evicted, whether it is cached now or later.

        It is pinned for requests with this `salt` and these adapters (`lora`).

        With `retention_seconds`, the pin expires that time after the last request that used the prefix. Such pins are
        few (64), and give way to other pins.

        Raises `InvalidArgument` if pins would take more than half of the RAM budget or it is 0, and `PromptTooLong` if
        the prefix does not fit into the context. On disk, a pinned prefix stays pinned for the next start.

        >>> model.pin("You are a helpful assistant.")
        >>> model.unpin("You are a helpful assistant.")
        True
        """
        seconds = math.inf if retention_seconds is None else check_float("retention_seconds", retention_seconds, 0)
        entries, adapters = self._build_entries(prompt)[0], self._resolve_lora(lora)
        pin = functools.partial(
            cache.pin, entries=entries, salt=check_salt(salt), retention_seconds=seconds, adapters=adapters
        )
        self._get_host().call_each(pin)

    def unpin(self, prompt: PromptInput, *, salt: str = "", lora: LoraInput = ()) -> bool:
        """Remove a pin, so that the prefix can be evicted again; return False if exactly this prefix is not pinned.

        >>> model.unpin("This was never pinned.")
        False
        """
        entries, adapters = self._build_entries(prompt)[0], self._resolve_lora(lora)
        unpin = functools.partial(cache.unpin, entries=entries, salt=check_salt(salt), adapters=adapters)
        return any(self._get_host().call_each(unpin))

    def clear_cache(self, sequence: int | None = None) -> None:
        """Clear one idle sequence, or the prefix cache in all tiers with pinned prefixes and the files of this model.

        Sequences in use are not cleared. Pins stay: a pinned prefix is pinned again when it is computed again. The
        vectors of embedded texts are removed, too.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> model.clear_cache()
        >>> model.complete("The rain in Spain", max_tokens=1).usage.cached_tokens
        0
        """
        if sequence is not None:
            self._get_host().call_on_sequence(snapshots.clear, sequence)
            return
        host = self._lifecycle.get_host()
        self._vectors.clear()
        if self.can_generate:
            host.call_each(snapshots.clear)
            self._get_chat().forget_answers()

    def get_cache_contents(self, salt: str = "") -> CacheContents:
        """Return the sequences, checkpoints and tiers of the prefix cache. Entries with another salt are left out.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> max(sequence.tokens for sequence in model.get_cache_contents().sequences) >= 4
        True
        """
        host, salt = self._lifecycle.get_host(), check_salt(salt)
        return merge_contents(host.call_each(functools.partial(remote_calls.get_cache_contents, salt=salt)))

    @overload
    def get_tree(self, *, salt: str = "", max_nodes: int = MAX_TREE_NODES, since: None = None) -> PrefixTree: ...
    @overload
    def get_tree(self, *, salt: str = "", max_nodes: int = MAX_TREE_NODES, since: int) -> PrefixTree | None: ...
    def get_tree(
        self, *, salt: str = "", max_nodes: int = MAX_TREE_NODES, since: int | None = None
    ) -> PrefixTree | None:
        """Return the cached prefixes of a salt as a tree: where each one lies, who shares it, and its checkpoints.

        Beyond `max_nodes`, the least recently used branches are folded into the nodes above them. `since` is the
        version of an earlier tree: the result is None if nothing has changed. The tree is built while the engine waits
        for llama.cpp or for requests.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> any(node.sequence is not None and node.end >= 4 for node in model.get_tree().nodes)
        True
        """
        check_integer("max_nodes", max_nodes, 1, 100_000)
        get_tree: Callable[[Engine], Future[PackedTree] | None] = functools.partial(
            tree.get_tree, salt=check_salt(salt), max_nodes=max_nodes, since=since
        )
        packed: PackedTree | None = self._lifecycle.get_host().call(get_tree)  # type: ignore[arg-type]
        return None if packed is None else packed.unpack()

    def find_prefix(self, id: str, *, salt: str = "") -> CachedPrefix | None:
        """Return the entries up to the end of a node of `get_tree`; None if there is no such node any more.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> node = next(node for node in model.get_tree().nodes if node.sequence is not None)
        >>> len(model.find_prefix(node.id).entries) == node.end
        True
        """
        find: Callable[[Engine], Future[CachedPrefix | None]] = functools.partial(
            tree.find_prefix, id=id, salt=check_salt(salt)
        )
        return self._lifecycle.get_host().call(find)  # type: ignore[arg-type]

    def pin_prefix(self, prefix: CachedPrefix) -> None:
        """Pin a prefix of `find_prefix`, as `pin` does."""
        self._lifecycle.get_host().call_each(functools.partial(tree.pin_prefix, prefix=prefix))

    def unpin_prefix(self, prefix: CachedPrefix) -> bool:
        """Remove the pin on exactly this prefix of `find_prefix`; return False if there is none."""
        return any(self._lifecycle.get_host().call_each(functools.partial(tree.unpin_prefix, prefix=prefix)))

    def forget_prefix(self, prefix: CachedPrefix) -> ForgetReport:
        """Remove a node of `get_tree` and all nodes below it from all tiers, with their pins.

        What lies before the node stays. Sequences of running requests stay, too.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> node = next(node for node in model.get_tree().nodes if node.sequence is not None)
        >>> model.forget_prefix(model.find_prefix(node.id)).sequences > 0
        True
        """
        forget = functools.partial(tree.forget_prefix, prefix=prefix)
        return merge_forget_reports(self._lifecycle.get_host().call_each(forget))

    def export_prefix(self, prefix: CachedPrefix, path: str | os.PathLike[str]) -> int:
        """Write the files of a prefix to a new archive for `afterglow cache import`; return their number.

        Raises `UnsupportedOperation` if the model has no disk cache.
        """
        store: Callable[[Engine], Future[StoredFiles]] = functools.partial(tree.store_prefix, prefix=prefix)
        files: StoredFiles = self._lifecycle.get_host().call(store)  # type: ignore[arg-type]
        return export_archive(files.directory, Path(path), [files.model], files.names)

    def get_stats(self) -> EngineStats:
        """Return counters, tier usage and speculation results of the engine since its start.

        >>> model.get_stats().counters["decodes"] > 0
        True
        """
        return merge_stats(self._lifecycle.get_host().call_each(remote_calls.get_engine_stats))

    def get_cache_events(self, after: int = 0) -> CacheEventPage:
        """Return what the prefix cache stored, loaded and evicted after the event with this number.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> page = model.get_cache_events()
        >>> page.last_number >= len(page.events)
        True
        """
        return self._lifecycle.get_host().call(functools.partial(cache.get_cache_events, after=after))

    def explain_miss(self, prompt: PromptInput, *, salt: str = "", lora: LoraInput = ()) -> PrefixMiss:
        """Like `explain`, with the entries of both sides after the divergence."""
        request = self._build_lookup(prompt, salt, lora)
        misses = self._get_host().call_each(functools.partial(difference.explain_miss, request=request))
        return max(misses, key=lambda miss: miss.common_length)

    # --- scoring

    def logprobs(self, text: str | Sequence[int]) -> Score:
        """Return the log-probability of each token of a text except the first.

        `text` may also be tokens. Text gets the special tokens that start a prompt. A text longer than the context is
        scored in windows that overlap by half. A text that begins like the one before computes only the rest.

        >>> score = model.logprobs("The capital of France is Paris")
        >>> len(score.logprobs)
        5
        """
        tokens = [int(token) for token in self._tokenize_prompt(text, "text")]
        if len(tokens) < 2:
            raise InvalidArgument("tokens", f"must be at least 2 to score one, not {len(tokens)}")
        windows = plan_windows(len(tokens), self.context_length)
        values = [
            logprob
            for window in windows
            for logprob, _ in self.score(tokens[window.start : window.stop], first=window.score_start - window.start)
        ]
        return Score(tokens=tuple(tokens), logprobs=tuple(values), windows=len(windows))

    def score(
        self, tokens: Sequence[int], alternatives: int = 0, *, first: int = 1, lora: LoraInput = (), salt: str = ""
    ) -> list[TokenLogprob]:
        """Return the log-probability of each token from index `first` on, with the most likely alternatives.

        A long text takes several decodes; other requests run between them. Texts with the same `salt` share a prefix.

        >>> [round(logprob, 1) for logprob, _ in model.score(model.tokenize("One, two, three"))]
        [-2.4, -7.6, -3.3, -1.4]
        """
        entries = self.vocabulary.check_tokens(tokens).tolist()
        check_integer("first", first, 0)
        check_integer("alternatives", alternatives, 0, MAX_ALTERNATIVES)
        self._check_length(entries, self.context_length)
        adapters = {adapter.name: adapter for adapter in self.adapters}
        requested = self._resolve_lora(lora)
        active, _ = resolve_adapters(requested, adapters, np.asarray(entries, dtype=np.int64))
        score = functools.partial(
            score_text, tokens=entries, first=first, alternatives=alternatives, adapters=active, salt=check_salt(salt)
        )
        host = self._get_host().select()
        with self._scoring_lock:
            while (scores := host.call(score)) is None:
                pass
        return scores

    def perplexity(self, text: str | Sequence[int]) -> float:
        """Return the perplexity of a text: 1 is certainty, the size of the vocabulary is a uniform distribution.

        >>> model.perplexity("The cat sat on the mat.") < model.perplexity("Mat the the cat on sat.")
        True
        """
        return self.logprobs(text).perplexity

    # --- embeddings

    @property
    def max_embedding_tokens(self) -> int:
        """Maximum number of tokens of a text for `embed`, unless it is embedded in windows."""
        settings = self._lifecycle.spec.context_settings
        return min(settings.cells_per_sequence, self.info.trained_context_length, MAX_POOLED_TOKENS)

    @functools.cached_property
    def can_shorten_embeddings(self) -> bool:
        """Whether embeddings can have fewer `dimensions`: by the option `shorten_embeddings`, or the name of the model.

        >>> model.can_shorten_embeddings
        False
        """
        if self._shorten_embeddings is not None:
            return self._shorten_embeddings
        return supports_shorter_vectors(self._lifecycle.model.metadata)

    def embed(
        self,
        text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        long_text: LongTextPolicy = "refuse",
    ) -> NDArray[np.float32]:
        """Return the embedding of a text, or a matrix with one row per text. Vectors are normalized to length 1.

        Models that generate text are pooled by the mean of their tokens.

        Args:
            text: A text or its tokens, or a list of texts or of token lists. Many texts at once are faster than one
                after the other.
            dimensions: Shorten the vectors to this length. Raises `UnsupportedOption` unless `can_shorten_embeddings`.
            long_text: For a text of more than `max_embedding_tokens`: "refuse" raises `PromptTooLong`, "window" returns
                the mean over windows, weighted by their tokens.

        >>> cat, dog, car = model.embed(["a cat", "a dog", "the engine of a car"])
        >>> bool(cat @ dog > cat @ car)
        True
        """
        is_list = is_text_list(text)
        texts = cast(Sequence[Sequence[int]], text if is_list else [text])
        vectors = self.embed_texts(texts, dimensions=dimensions, long_text=long_text).vectors
        return vectors if is_list else cast(NDArray[np.float32], vectors[0])

    def embed_texts(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        long_text: LongTextPolicy = "refuse",
        salt: str = "",
        cancel: threading.Event | None = None,
    ) -> Embeddings:
        """Embed texts like `embed`; return the vectors with the number of tokens and windows of each text.

        Texts with the same `salt` share a computed prefix. Setting `cancel` raises `Cancelled`.

        >>> result = model.embed_texts(["search: a cat", "search: a dog"])
        >>> result.token_counts, result.computed_tokens
        ((4, 4), 5)
        """
        if dimensions is not None:
            width = self.engine_info.embedding_width
            check_integer("dimensions", dimensions)
            check_dimensions(dimensions, width, can_shorten=self.can_shorten_embeddings, name=self.name)
        if not len(texts):
            raise InvalidArgument("texts", "must not be empty")
        return embed_tokens(
            self._lifecycle.get_host().select(),  # models that cannot generate can embed
            [self._tokenize_prompt(text, "text").tolist() for text in texts],
            limit=self.max_embedding_tokens,
            control_tokens=frozenset(self.vocabulary.control_tokens),
            cache=self._vectors,
            long_text=long_text,
            dimensions=dimensions,
            salt=check_salt(salt),
            cancel=cancel,
        )

    # --- reranking

    @functools.cached_property
    def reranker_kind(self) -> RerankerKind:
        """How this model ranks documents: by the option `reranker`, or by the file of the model.

        Raises `UnsupportedOption` if it cannot.

        >>> model.reranker_kind
        'generative'
        """
        kind = self._reranker or ("classifier" if self._has_rank_head else "generative")
        if kind == "classifier" and not self._has_rank_head:
            raise UnsupportedOption("reranker", f"the model {self.name!r} has no classifier head")
        if kind == "generative" and not self.can_generate:
            raise UnsupportedOption("model", f"{self.name!r} has no classifier head and generates no text: cannot rank")
        return kind

    @property
    def _has_rank_head(self) -> bool:
        return self._lifecycle.model.metadata.get(f"{self.info.architecture}.pooling_type") == RANK_POOLING

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        max_document_tokens: int | None = None,
        salt: str = "",
        cancel: threading.Event | None = None,
    ) -> Reranking:
        """Score documents by their relevance for a query, from 0 to 1, and return them with the most relevant first.

        A reranker with a classifier head computes many documents per decode. Any other model that generates text is
        asked whether the document is relevant: the score is the probability of yes against no, and the prompt before
        the document is prefilled once.

        Args:
            query: The question.
            documents: Texts to score.
            top_n: Return only this many.
            instruction: What makes a document relevant, for generative rerankers without a template of their own.
            max_document_tokens: Cut longer documents. Default: a pair that is too long raises `PromptTooLong`.
            salt: Cached prefixes are shared only with requests of the same salt.
            cancel: Setting this event raises `Cancelled`.

        >>> ranking = model.rerank("What do cats eat?", ["The engine is loud.", "Cats eat mice."])
        >>> sorted(document.index for document in ranking.results)
        [0, 1]
        """
        kind = self.reranker_kind
        check_salt(salt)
        if top_n is not None:
            check_integer("top_n", top_n, 1)
        if isinstance(documents, str) or not len(documents):
            raise InvalidArgument("documents", "must be a list with at least one text")
        texts = [self._cut_document(document, max_document_tokens) for document in documents]
        prompts = self._build_rank_prompts(check_text(query, "query"), texts, instruction, kind)
        if kind == "classifier":
            for prompt in prompts:
                self._check_length(prompt, self.max_embedding_tokens)
            host = self._lifecycle.get_host().select()
            outputs, computed = pool_all(host, "rank", prompts, cache=self._vectors, salt=salt, cancel=cancel)
            scores = [to_score(output, self.info.architecture) for output in outputs]
        else:
            scores, computed = self._score_answers(prompts, salt, cancel)
        total = sum(map(len, prompts))
        return build_ranking(documents, scores, top_n, prompt_tokens=total, computed_tokens=computed)

    def _cut_document(self, document: str, max_tokens: int | None) -> str:
        tokens = self.tokenize(check_text(document, "documents"))
        if max_tokens is None or len(tokens) <= check_integer("max_document_tokens", max_tokens, 1):
            return document
        return self.detokenize(tokens[:max_tokens])

    def _build_rank_prompts(
        self, query: str, documents: Sequence[str], instruction: str | None, kind: RerankerKind
    ) -> list[list[int]]:
        """Tokenize the prompt of each document: the template of the file, a pair, or a question of a conversation."""
        template = self._lifecycle.model.get_chat_template("rerank")
        if instruction is not None and (template is not None or kind == "classifier"):
            raise UnsupportedOption("instruction", f"the prompt of {self.name!r} has none")
        if template is not None:
            parsed = RankTemplate(template, self.vocabulary)
            return [parsed.tokenize(query=query, document=document) for document in documents]
        if kind == "classifier":
            return [tokenize_pair(query, document, self.vocabulary) for document in documents]
        return self._build_questions(query, documents, instruction or DEFAULT_INSTRUCTION)

    def _build_questions(self, query: str, documents: Sequence[str], instruction: str) -> list[list[int]]:
        """Tokenize the question about each document. The chat template is rendered once, with placeholders."""

        def plan(query: str, document: str, instruction: str) -> ChatPrompt:
            messages = build_messages(query, document, instruction)
            return self.plan_chat(messages, reasoning=False if self.can_reason else None).prompt

        rendered = plan("{query}", "{document}", "{instruction}")
        bare = RankTemplate(rendered.text, self.vocabulary).tokenize()
        start = rendered.tokens[: max(0, len(rendered.tokens) - len(bare))]  # the BOS token, if it is not in the text
        template = RankTemplate(rendered.text, self.vocabulary, start)
        if tuple(template.tokenize()) == rendered.tokens:
            return [
                template.tokenize(query=query, document=document, instruction=instruction) for document in documents
            ]
        return [list(plan(query, document, instruction).tokens) for document in documents]

    def _score_answers(
        self, prompts: Sequence[list[int]], salt: str, cancel: threading.Event | None
    ) -> tuple[list[float], int]:
        """Return the probability of yes after each prompt, and the number of computed tokens."""
        unique = list(dict.fromkeys(map(tuple, prompts)))
        has_template = self._lifecycle.model.get_chat_template("rerank") is not None
        yes, no = find_answer_tokens(self.vocabulary, any_case=not has_template)
        boundaries = frozenset({find_common_prefix(unique)} - {0})
        requests = [
            replace(
                self.build_request(list(prompt), max_tokens=1, salt=salt),
                boundaries=boundaries,
                logprob_tokens=(*yes, *no),
            )
            for prompt in unique
        ]
        responses = self._run_bounded(requests, self.build_text_format(None), cancel)
        scores = {
            prompt: compare_answers(dict(response.tokens[0].alternatives), yes, no)
            for prompt, response in zip(unique, responses, strict=True)
        }
        computed = sum(response.usage.prompt_tokens - response.usage.cached_tokens for response in responses)
        return [scores[tuple(prompt)] for prompt in prompts], computed

    def _run_bounded(
        self, requests: Sequence[Request], output_format: OutputFormat, cancel: threading.Event | None
    ) -> list[ChatResponse]:
        """Run the requests of one call, at most one per sequence at a time, and return the responses in their order.

        So they do not fill the queue of the engine: other requests get their turn in between. If one fails, its error
        is raised and the others are cancelled.
        """
        waiting, running = deque(requests), deque[ChatStream]()
        responses: list[ChatResponse] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.engine_info.sequences:
                    running += self.start(waiting.popleft(), output_format, cancel=cancel)
                responses.append(running[0].result())
                running.popleft()
        finally:
            for stream in running:
                stream.cancel()
        return responses

    # --- transcription

    def transcribe(
        self,
        audio: AudioData | bytes | os.PathLike[str],
        *,
        task: TranscriptionTask = "transcribe",
        language: str | None = None,
        prompt: str | None = None,
        temperature: float = 0.0,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
    ) -> Transcription:
        """Transcribe a recording with a model that has an audio projector.

        A long recording is cut into windows where it is quiet. Each window is a segment of the result. Models report no
        times inside a window.

        Args:
            audio: Samples, an audio file (WAV, MP3 or FLAC) as bytes, or its path.
            task: "transcribe", or "translate" into English.
            language: Language of the speech, e.g. "German" or "de".
            prompt: Context for the model, e.g. names that occur.
            temperature: Sampling temperature. 0: the most likely tokens.
            window_seconds: Maximum length of a window.

        >>> from afterglow import AudioData
        >>> model.transcribe(AudioData(sample_rate=16_000, samples=bytes(64_000)))
        Traceback (most recent call last):
        afterglow.errors.UnsupportedMedia: `file` cannot be used: this model accepts no audio
        """
        if isinstance(audio, AudioData):
            audio = encode_audio(audio)
        windows = self.split_audio(audio if isinstance(audio, bytes) else Path(audio).read_bytes(), window_seconds)
        return self.transcribe_windows(windows, task=task, language=language, prompt=prompt, temperature=temperature)

    def split_audio(self, data: bytes, window_seconds: float = DEFAULT_WINDOW_SECONDS) -> tuple[AudioWindow, ...]:
        """Cut an audio file into windows for `transcribe_windows`, where it is quiet."""
        check_float("window_seconds", window_seconds, 1)
        split: Callable[[Engine], Future[tuple[AudioWindow, ...]]] = functools.partial(
            remote_calls.split_audio,
            data=data,
            policy=self._media_policy,
            source="the file",
            window_seconds=window_seconds,
        )
        return self._get_host().call(split)

    def transcribe_windows(
        self,
        windows: Sequence[AudioWindow],
        *,
        task: TranscriptionTask = "transcribe",
        language: str | None = None,
        prompt: str | None = None,
        temperature: float = 0.0,
        salt: str = "",
        cancel: threading.Event | None = None,
    ) -> Transcription:
        """Transcribe the windows of a recording: see `transcribe`. Setting `cancel` raises `Cancelled`."""
        if task not in INSTRUCTIONS:
            raise InvalidArgument("task", f"must be one of {', '.join(INSTRUCTIONS)}, not {task!r}")
        plans = [
            self.plan_chat(
                build_transcription_messages(window, task, language, prompt),
                salt=salt,
                reasoning=False if self.can_reason else None,
                replay=False,
            )
            for window in windows
        ]
        requests = [
            plan.apply_to(
                self.build_request(
                    plan.prompt, temperature=temperature, max_tokens=compute_max_tokens(window), logprobs=0, salt=salt
                )
            )
            for plan, window in zip(plans, windows, strict=True)
        ]
        responses = self._run_bounded(requests, plans[0].output_format, cancel)
        return build_transcription(windows, responses)

    # --- snapshots

    def fork(self, sequence: int | None = None) -> int:
        """Copy an idle sequence of the KV cache and return the number of the copy, for `complete(…, sequence=…)`.

        `sequence` None copies the most recently used one.
        """
        number, offset = self._get_host().call_on_sequence(snapshots.fork, sequence)
        return offset + number

    def snapshot(self, name: str, sequence: int | None = None) -> None:
        """Save the state of an idle sequence under a name. `sequence` None saves the most recently used one.

        >>> completion = model.complete("A long story that is worth keeping:", max_tokens=1)
        >>> model.snapshot("story")
        >>> model.clear_cache()
        >>> sequence = model.restore("story")
        >>> model.complete("A long story that is worth keeping:", max_tokens=1).usage.cached_tokens
        7
        """
        self._snapshots[name], _ = self._get_host().call_on_sequence(snapshots.save, sequence)

    def restore(self, name: str, sequence: int | None = None) -> int:
        """Load a snapshot into the KV cache, as a prefix for later requests, and return the number of its sequence."""
        return self._load_sequence(self._find_snapshot(name), sequence)

    def _find_snapshot(self, name: str) -> SavedSequence:
        if name not in self._snapshots:
            raise InvalidArgument("name", f"there is no snapshot called {name!r}")
        return self._snapshots[name]

    def _load_sequence(self, saved: SavedSequence, sequence: int | None) -> int:
        load = functools.partial(snapshots.load, snapshot=saved)
        number, offset = self._get_host().call_on_sequence(load, sequence)
        return offset + number

    def save_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file. Snapshots with media cannot be written."""
        snapshots.write_file(self._find_snapshot(name), Path(path))

    def load_snapshot(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read a snapshot from a file.

        Raises `InvalidState` if the file is damaged. If it is of another model, `restore` raises it.
        """
        self._snapshots[name] = snapshots.read_file(Path(path))

    def save_sequence(self, path: str | os.PathLike[str], sequence: int | None = None) -> int:
        """Write the state of an idle sequence to a file, and return its number of tokens.

        `sequence` None writes the most recently used one. Sequences with media cannot be written.

        >>> completion = model.complete("A long story that is worth keeping:", max_tokens=1)
        >>> tokens = model.save_sequence("story.bin")
        >>> model.clear_cache()
        >>> model.load_sequence("story.bin") == tokens
        True
        >>> model.complete("A long story that is worth keeping:", max_tokens=1).usage.cached_tokens
        7
        """
        saved, _ = self._get_host().call_on_sequence(snapshots.save, sequence)
        snapshots.write_file(saved, Path(path))
        return len(saved.entries)

    def load_sequence(self, path: str | os.PathLike[str], sequence: int | None = None) -> int:
        """Load a file of `save_sequence` into the KV cache, and return its number of tokens.

        `sequence` None replaces the least valuable one. Raises `InvalidState` if the file is damaged or of another
        model.
        """
        saved = snapshots.read_file(Path(path))
        self._load_sequence(saved, sequence)
        return len(saved.entries)

    # --- load states

    def warm(self) -> None:
        """COLD → WARM: load the weights into RAM; with a process host, into the page cache of the operating system."""
        self._lifecycle.warm()

    def activate(self) -> None:
        """COLD, WARM or CRASHED → ACTIVE: load the weights onto the device and start the engine."""
        self._lifecycle.activate()

    def deactivate(self, store_timeout: float = CLOSE_TIMEOUT_SECONDS) -> StoreReport | None:
        """ACTIVE → WARM: stop the engine and release the context and GPU memory.

        The engine writes its prefix cache to disk first, for at most `store_timeout` seconds. Returns what it wrote, or
        None if it had crashed.
        """
        self._lifecycle.require("deactivate", LoadState.ACTIVE)
        self._chats.close()
        return self._lifecycle.deactivate(store_timeout)

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: release everything. `activate` loads the model again."""
        self._lifecycle.require("unload", LoadState.WARM, LoadState.ACTIVE)
        self._chats.close()
        self._vectors.clear()
        self._lifecycle.unload()

    def close(self) -> None:
        """Release everything permanently. Running requests end with `Closed`. May be called twice.

        A model that is not closed is released when it is garbage collected. In a fork of the process that loaded the
        model, this has no effect.
        """
        if self._lifecycle.owner.is_current:
            self._finalizer.detach()
            self._lifecycle.close()
            self._chats.close()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOperation(
            "pickling or copying a model", "its weights and engine belong to one process: call `load` in the other one"
        )

    def __repr__(self) -> str:
        return f"<Model {self.name!r} {self.state}>"

    # --- requests

    def start(
        self,
        request: Request,
        output_format: OutputFormat,
        stop: Sequence[str] = (),
        *,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[ChatStream]:
        """Start `n` choices of a request, which share one prefill, and return their streams."""
        if on_token is not None and not callable(on_token):
            raise InvalidArgument("on_token", f"must be a function of a token, not {on_token!r}")
        if cancel is not None and not hasattr(cancel, "is_set"):
            raise InvalidArgument("cancel", f"must be an event such as threading.Event, not {cancel!r}")
        requests = [self._derive_request(request, index) for index in range(check_integer("n", n, 1, 128))]
        return [
            ChatStream(stream, output_format, stop, on_token=None if index else on_token, cancel=cancel, owner=self)
            for index, stream in enumerate(self._get_host().submit_together(requests))
        ]

    def build_text_format(self, truncation: Truncation | None) -> OutputFormat:
        """Return the output format of a completion: everything is text."""
        return OutputFormat(functools.partial(self.vocabulary.token_to_piece, special=False), truncation=truncation)

    def attach_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the events of a child process in this event loop, which wakes one thread less per token."""
        self._lifecycle.get_host().attach_event_loop(loop)

    def _derive_request(self, request: Request, index: int) -> Request:
        """Return the request of choice `index`: the same prompt with another id and seed."""
        if index == 0:
            return request
        seed = request.sampling.seed
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
        return replace(request, id=str(next(self._request_ids)), sampling=sampling)

    @staticmethod
    def _check_length(tokens: Sequence[int], limit: int) -> None:
        if len(tokens) > limit:
            raise PromptTooLong(len(tokens), limit)

    def fit_prompt(
        self,
        prompt: PromptInput,
        overflow: TruncationPolicy = "refuse",
        max_tokens: int | None = None,
        *,
        keep_start: int | None = None,
        keep_end: int = 0,
    ) -> FittedPrompt:
        """Tokenize a prompt and truncate it by the overflow policy.

        The first `keep_start` entries (default: the BOS token) and the last `keep_end` are never dropped. Raises
        `PromptTooLong` if the prompt does not fit into the context.
        """
        if isinstance(prompt, ChatPrompt) and overflow != "refuse":
            raise InvalidArgument("overflow", "cannot shorten a rendered conversation: pass its messages to `chat`")
        entries, media = self._build_entries(prompt)
        fitted, truncation = fit_entries(
            list(entries),
            overflow,
            context=self.context_length,
            max_tokens=max_tokens,
            keep_start=count_bos(list(entries[:1]), self.vocabulary) if keep_start is None else keep_start,
            keep_end=keep_end,
        )
        return FittedPrompt(entries if truncation is None else fitted, media, truncation)

    def tokenize_prompt(self, prompt: PromptInput) -> FittedPrompt:
        """Tokenize a prompt once, for several uses. It is not truncated."""
        return FittedPrompt(*self._build_entries(prompt))

    def _build_entries(self, prompt: PromptInput) -> tuple[EntrySequence, Mapping[bytes, MediaPart]]:
        """Return the entries of a prompt, and its media by digest."""
        entries: EntrySequence
        media: Mapping[bytes, MediaPart] = {}
        if isinstance(prompt, FittedPrompt) or (isinstance(prompt, ChatPrompt) and prompt.media):
            entries, media = prompt.entries, prompt.media
        elif is_mixed_prompt(prompt):
            entries, media = build_mixed_entries(prompt, self.vocabulary, self._media_measurer)  # type: ignore[arg-type]
        else:
            entries = self._tokenize_prompt(prompt).astype(np.int64)
        if not len(entries):
            raise InvalidArgument("prompt", "must have at least one token")
        return entries, media

    def _tokenize_prompt(self, prompt: PromptInput, name: str = "prompt") -> NDArray[np.int32]:
        """Return the tokens of a prompt of text or tokens. `name` is that of the argument, for errors."""
        if isinstance(prompt, ChatPrompt):
            prompt = prompt.tokens
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence | np.ndarray):
            raise InvalidArgument(name, f"must be text or a list of tokens, not {type(prompt).__name__}")
        tokens = self.tokenize(prompt, bos=True) if isinstance(prompt, str) else prompt
        return self.vocabulary.check_tokens(tokens)  # type: ignore[arg-type]

    # --- chat and media

    def _get_host(self) -> EngineHost:
        host = self._lifecycle.get_host()
        if not self.info.is_causal:
            raise InvalidArgument("model", f"{self.name!r} only computes embeddings")
        return host

    def _get_chat(self, template: str | None = None) -> Chat:
        """Return the chat of the loaded weights, with another template if one is given; a reload creates a new one."""
        build = functools.partial(self._build_chat, template)
        return self._chats.get(self._lifecycle.model, build, template)

    def _build_chat(self, template: str | None) -> Chat:
        reference = weakref.ref(self)  # a chat must not keep its model alive

        def get_media_support() -> MediaSupport:
            model = reference()
            assert model is not None, "a chat is only used by its model"
            return model._get_media_support()

        return Chat(
            self.vocabulary,
            self.chat_template if template is None else template,
            self._media_policy,
            get_media_support,
            boundaries=self._needs_boundaries,
            replay_store=self._open_replay_store() if self._has_replay and template is None else None,
            summary_store=self._open_summary_store() if template is None else None,
        )

    def _open_replay_store(self) -> ReplayStore | None:
        """Return the store of generated messages, beside the disk tier if there is one. None without a cache."""
        settings, fingerprint = self._lifecycle.spec.engine_settings, self._lifecycle.model.fingerprint
        if settings.ram_cache_bytes == 0:
            return None
        directory = settings.disk_cache_directory
        return ReplayStore(fingerprint, disk=None if directory is None else SqliteReplays(directory, fingerprint))

    def _open_summary_store(self) -> SummaryStore:
        """Return the store of summaries, beside the disk tier if there is one."""
        fingerprint, directory = (
            self._lifecycle.model.fingerprint,
            self._lifecycle.spec.engine_settings.disk_cache_directory,
        )
        return SummaryStore(fingerprint, disk=None if directory is None else SqliteSummaries(directory, fingerprint))

    @property
    def _needs_boundaries(self) -> bool:
        """Whether the engine uses message boundaries. Attention memory can continue from any position without."""
        return self._memory_kind != "attention" or self._lifecycle.spec.engine_settings.pin_system_prompts

    @property
    def _memory_kind(self) -> str:
        """Kind of memory: as probed by the engine, or as the weights say before there is one."""
        return self.engine_info.memory if self.has_engine else self._lifecycle.model_info.memory_kind

    def _get_media_support(self) -> MediaSupport:
        return MediaSupport(
            kinds=self._modalities,
            measure=self._media_measurer,
            decode=self._decode_in_child if isinstance(self._lifecycle, ProcessLifecycle) else decode_media,
            unsupported_reason=self.media_error,
            strip_unsupported=self._strip_media,
        )

    @property
    def _modalities(self) -> frozenset[Modality]:
        return self.engine_info.media if self.has_engine else frozenset()

    def _decode_in_child(
        self, modality: Modality, data: bytes, policy: MediaPolicy, *, source: str, detail: str
    ) -> EncodedMedia:
        """Have the engine process decode a file: decoded media never enters this process."""
        decode: Callable[[Engine], Future[DecodedMediaInfo]] = functools.partial(
            remote_calls.decode_media, modality=modality, data=data, policy=policy, source=source, detail=detail
        )
        info: DecodedMediaInfo = self._get_host().call(decode)  # type: ignore[arg-type]
        return EncodedMedia(
            modality=modality,
            data=data,
            detail=detail,
            policy=policy,
            size=info.size,
            digest=info.digest,
            nbytes=info.nbytes,
        )


def release_in_background(lifecycle: Lifecycle, chats: ChatCache) -> None:
    """Release a model that was garbage collected without `close`.

    It runs in a thread of its own: garbage collection happens in any thread, even in that of the engine, and closing
    waits for the engine.
    """

    def release() -> None:
        lifecycle.close()
        chats.close()

    if lifecycle.owner.is_current:
        threading.Thread(target=release, name="afterglow-release").start()


def to_messages(messages: ChatInput) -> Sequence[MessageLike]:
    """Return the messages of a conversation; a text is one message of the user."""
    return [("user", messages)] if isinstance(messages, str) else messages


def is_text_list(value: object) -> bool:
    """Return whether a value is a list of texts or token lists, and not one text or its tokens.

    >>> is_text_list(["a", "b"]), is_text_list([[1], [2, 3]]), is_text_list([1, 2]), is_text_list("a")
    (True, True, False, False)
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not len(value):
        return isinstance(value, np.ndarray) and value.ndim == 2
    return not isinstance(value[0], int | np.integer)


def collect_responses(streams: Sequence[ChatStream]) -> list[ChatResponse]:
    """Wait for all choices and return them. If one fails, the others are cancelled."""
    try:
        return [stream.result() for stream in streams]
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise


def shorten_deadline(options: GenerationOptions, seconds: float) -> None:
    """Subtract the time that a request has taken already from its deadline.

    >>> options: GenerationOptions = {"deadline": 2.0}
    >>> shorten_deadline(options, 0.5)
    >>> options["deadline"]
    1.5
    """
    deadline = options.get("deadline")
    if deadline is not None:
        options["deadline"] = max(0.0, deadline - seconds)


def resolve_sampling(defaults: Sampling, options: GenerationOptions) -> Sampling:
    """Return the sampling of a request: its `sampling`, or the defaults with the options that are given.

    >>> resolve_sampling(Sampling(), check_options(GenerationOptions, {"top_k": 5, "seed": 3})).top_k
    5
    """
    sampling = options["sampling"]
    values = {name: value for name in get_fields(SamplingOptions) if (value := options.get(name)) is not None}
    if sampling is not None and values:
        name = next(iter(values))
        raise InvalidArgument(name, f"must not be given beside `sampling`, whose {name} is {getattr(sampling, name)}")
    if options["seed"] is not None:
        values["seed"] = options["seed"]
    return replace(sampling or defaults, **values) if values else sampling or defaults  # type: ignore[arg-type]


def encode_stops(stop: Sequence[str]) -> tuple[bytes, ...]:
    """Return stop strings as the bytes that the engine matches.

    >>> encode_stops(["END"])
    (b'END',)
    """
    if isinstance(stop, str | bytes) or not all(isinstance(text, str) and text for text in stop):
        raise InvalidArgument("stop", "must be a list of non-empty strings")
    try:
        return tuple(text.encode() for text in stop)
    except UnicodeEncodeError:
        raise InvalidArgument("stop", "must not contain an unpaired surrogate: no model can generate it") from None
