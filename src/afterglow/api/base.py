"""Base class of `Model` and `ServedModel`: prompts and conversations in, text out, independent of the host."""

from __future__ import annotations

import functools
import itertools
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from afterglow.api.generate import collect_choice, stream_text, stream_text_async
from afterglow.api.outputs import Completion
from afterglow.api.prompts import (
    EntrySequence,
    FittedPrompt,
    MediaMeasurer,
    PromptPart,
    build_mixed_entries,
    is_mixed_prompt,
)
from afterglow.chat.chat import Chat, ChatOptions, ChatPlan
from afterglow.chat.messages import Message, MessageLike
from afterglow.chat.prompt import ChatPrompt, TruncationPolicy
from afterglow.chat.response import ChatResponse, ChatStream
from afterglow.chat.tools.tool import ToolLike
from afterglow.chat.truncation import check_policy, count_bos, fit_entries, fit_plan
from afterglow.closeable import Closeable
from afterglow.engine.engine import Engine
from afterglow.engine.host.stream import EventStream
from afterglow.engine.inspect import cache
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.types.media import MediaPart
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_integer
from afterglow.llama.sampling import Sampling
from afterglow.llama.vocabulary import Vocabulary

GREEDY = Sampling(temperature=0)
PromptInput: TypeAlias = str | Sequence[int] | Sequence[PromptPart] | ChatPrompt | FittedPrompt
ChatInput: TypeAlias = str | Sequence[MessageLike]
DEFAULT_MAX_TOKENS = 128  # of a completion
CHAT_OPTION_NAMES = frozenset(ChatOptions.__dataclass_fields__)
ResultT = TypeVar("ResultT")


def needs_boundaries(memory_kind: str, settings: EngineSettings) -> bool:
    """Return whether the engine uses message boundaries. Attention memory can continue from any position without."""
    return memory_kind != "attention" or settings.pin_system_prompts


class Host(Protocol):
    """Runs an engine: `EngineThread` or `EngineProcess`."""

    def submit(self, request: Request) -> EventStream: ...
    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]: ...
    def call(self, function: Callable[[Engine], ResultT | Future[ResultT]]) -> ResultT: ...


class TextModel(Closeable):
    """Tokenizes, chats and completes. Subclasses provide the host of the engine and the vocabulary."""

    def __init__(self) -> None:
        self._request_ids = itertools.count()
        self._media_measurer = MediaMeasurer(lambda measure: self._get_host().call(measure))

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the model."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Maximum number of tokens of one request, prompt and completion together."""

    @abstractmethod
    def _get_host(self) -> Host:
        """Return the host of the engine. Raises if there is none."""

    @abstractmethod
    def _get_chat(self) -> Chat:
        """Return the chat template and parsers of the model."""

    # --- tokens

    def tokenize(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Return the tokens of `text`.

        With `special`, control tokens written in the text are parsed; otherwise they stay text. With `bos`, the result
        starts with the tokens that the model puts at the start of a prompt.

        >>> len(model.tokenize("<|im_start|>")), len(model.tokenize("<|im_start|>", special=True))
        (7, 1)
        """
        return self.vocabulary.tokenize(text, parse_special=special, add_special=bos)

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
    def chat(self, messages: ChatInput, *, stream: Literal[False] = False, **options: Any) -> ChatResponse: ...
    @overload
    def chat(self, messages: ChatInput, *, stream: Literal[True], **options: Any) -> ChatStream: ...
    def chat(
        self,
        messages: ChatInput,
        *,
        stream: bool = False,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> ChatResponse | ChatStream:
        """Generate the assistant's response to a conversation.

        Args:
            messages: The question as text, or a list of (role, text) pairs, `Message` objects or OpenAI message
                dictionaries. The response continues a last message of the assistant.
            stream: Return a `ChatStream` that yields parts of the response as they are generated.
            n: Number of responses. They share one prefill; all but the first are in `ChatResponse.alternatives`.
            on_token: Called with each token of the first response; for a stream, when it is read.
            cancel: Setting this event stops the request and raises `Cancelled`, for a stream in its reader.
            options: Options of `plan_chat` (`tools`, `tool_choice`, `response_format`, `reasoning`, …) and of
                `build_request` (`max_tokens`, `temperature`, `stop`, …). `max_tokens` has no limit by default.

        >>> model.chat("What is 2+2?").text
        'The answer to this classic math problem is 4.'
        >>> model.chat("Is snow black?", response_format={"type": "choice", "choices": ["yes", "no"]}).text
        'no'
        >>> model.chat("List two numbers.", response_format=list[int]).parsed
        [1, 2]
        """
        if stream and n != 1:
            raise InvalidArgument("n", f"must be 1 for a stream, not {n}")
        streams = self.submit_chat(messages, n=n, on_token=on_token, cancel=cancel, **options)
        if stream:
            return streams[0]
        try:
            first, *others = [chat_stream.result() for chat_stream in streams]
        except BaseException:
            for chat_stream in streams:
                chat_stream.cancel()
            raise
        return replace(first, alternatives=tuple(others))

    async def chat_async(self, messages: ChatInput, *, n: int = 1, **options: Any) -> ChatResponse:
        """Asyncio version of `chat`. To stream, use `async for part in model.chat(…, stream=True)`.

        >>> asyncio.run(model.chat_async("What is 2+2?")).text
        'The answer to this classic math problem is 4.'
        """
        streams = self.submit_chat(messages, n=n, **options)
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
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> list[ChatStream]:
        """Start `n` responses that share one prefill and return their streams. Options as for `chat`."""
        chat_options = {name: options.pop(name) for name in CHAT_OPTION_NAMES & options.keys()}
        overflow = check_policy(options.pop("overflow", "refuse"))
        plan = self._plan_fitted_chat(messages, overflow, options.get("max_tokens"), chat_options)
        return self.submit_plan(plan, n=n, on_token=on_token, cancel=cancel, **options)

    def submit_plan(
        self,
        plan: ChatPlan,
        *,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> list[ChatStream]:
        """Start `n` responses to a chat plan and return their streams. Options as for `chat` and `build_request`."""
        options.setdefault("max_tokens", None)
        request = plan.apply_to(self.build_request(plan.prompt, **options))
        streams = self._submit_choices(request, n)
        return [
            ChatStream(
                stream, plan.output_format, options.get("stop", ()), on_token=None if index else on_token, cancel=cancel
            )
            for index, stream in enumerate(streams)
        ]

    def plan_chat(
        self,
        messages: ChatInput,
        *,
        tools: Sequence[ToolLike] = (),
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        reasoning: bool | int | str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPlan:
        """Render a conversation with the chat template of the model, and prepare its token constraints.

        Args:
            messages: As for `chat`.
            tools: OpenAI tool dictionaries, or Python functions with type hints.
            tool_choice: `none`, `auto`, `required`, or the dictionary that names a function.
            parallel_tool_calls: Whether one response may contain several tool calls.
            response_format: The format of OpenAI; or `{"type": "regex", "pattern": …}`, `{"type": "choice",
                "choices": […]}`, `{"type": "grammar", "grammar": …, "syntax": "lark" or "gbnf"}`; or a type, e.g. a
                pydantic class, which also parses the response.
            reasoning: True, False, a reasoning budget in tokens, or an effort (e.g. "low").
            chat_template_kwargs: Additional variables for the template.
        """
        parsed: Sequence[MessageLike] = [("user", messages)] if isinstance(messages, str) else messages
        chat_options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            reasoning=reasoning,
            chat_template_kwargs=chat_template_kwargs or {},
        )
        return self._get_chat().plan(parsed, chat_options)

    def _plan_fitted_chat(
        self, messages: ChatInput, overflow: TruncationPolicy, max_tokens: int | None, options: Mapping[str, Any]
    ) -> ChatPlan:
        """Plan a chat and drop turns by the overflow policy. With `refuse`, the engine rejects a prompt too long."""
        if overflow == "refuse":
            return self.plan_chat(messages, **options)
        return fit_plan(
            self.load_media([("user", messages)] if isinstance(messages, str) else messages),
            lambda remaining: self.plan_chat(remaining, **options),
            overflow,
            context=self.context_length,
            max_tokens=max_tokens,
        )

    def load_media(self, messages: Sequence[MessageLike]) -> list[Message]:
        """Return the messages with their images and audio fetched and decoded."""
        return self._get_chat().load_media(messages)

    def apply_chat_template(self, messages: ChatInput, **options: Any) -> ChatPrompt:
        """Render a conversation with the chat template of the model, as a prompt for `complete` or `stream`.

        The prompt ends where the response of the assistant starts. Control tokens written in messages stay text.
        Options as for `plan_chat`.

        >>> prompt = model.apply_chat_template("What is 2+2?")
        >>> model.complete(prompt, max_tokens=20).text
        'The answer to this classic math problem is 4.'
        """
        return self.plan_chat(messages, **options).prompt

    # --- completion

    def complete(
        self,
        prompt: PromptInput,
        *,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Completion:
        """Continue a prompt.

        Args:
            prompt: Text, tokens, a list that mixes text, tokens, `ImageData` and `AudioData`, or the result of
                `apply_chat_template`.
            n: Number of completions. They share one prefill.
            on_token: Called with each token of the first completion.
            cancel: Setting this event stops the request and raises `Cancelled`.
            options: Options of `build_request`: `max_tokens`, `temperature`, `seed`, `stop`, `logprobs`, …

        >>> completion = model.complete("Once upon a time", max_tokens=5, n=2, temperature=0.8, seed=1)
        >>> [len(choice.tokens) for choice in completion.choices]
        [5, 5]
        """
        overflow = check_policy(options.pop("overflow", "refuse"))
        fitted = prompt
        if overflow != "refuse":  # the engine rejects a prompt too long
            fitted = self.fit_prompt(prompt, overflow, options.get("max_tokens", DEFAULT_MAX_TOKENS))
        streams = self._submit_choices(self.build_request(fitted, **options), n)
        stops = options.get("stop", ())
        try:
            first = collect_choice(streams[0], self._token_to_piece, stops, on_token, cancel)
            others = [collect_choice(stream, self._token_to_piece, stops, None, cancel) for stream in streams[1:]]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        choices, usages = zip(first, *others, strict=True)
        truncation = fitted.truncation if isinstance(fitted, FittedPrompt) else None
        return Completion(choices=choices, usages=usages, truncation=truncation)

    def stream(self, prompt: PromptInput, **options: Any) -> Iterator[str]:
        """Continue a prompt like `complete`, and yield text as it is generated. Closing the iterator cancels it.

        >>> list(model.stream("One, two, three,", max_tokens=2))
        [' four', ',']
        """
        return stream_text(
            self._get_host().submit(self.build_request(prompt, **options)),
            self._token_to_piece,
            options.get("stop", ()),
        )

    def stream_async(self, prompt: PromptInput, **options: Any) -> AsyncIterator[str]:
        """Asyncio version of `stream`.

        >>> async def shout():
        ...     return [text.upper() async for text in model.stream_async("One, two, three,", max_tokens=2)]
        >>> asyncio.run(shout())
        [' FOUR', ',']
        """
        stream = self._get_host().submit(self.build_request(prompt, **options))
        return stream_text_async(stream, self._token_to_piece, options.get("stop", ()))

    def build_request(
        self,
        prompt: PromptInput,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        temperature: float | None = None,
        seed: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        sequence: int | None = None,
        boundaries: Sequence[int] = (),
        priority: int = 0,
        deadline: float | None = None,
        use_prefix_cache: bool = True,
        ignore_eos: bool = False,
        overflow: TruncationPolicy = "refuse",
        salt: str = "",
    ) -> Request:
        """Build the engine request for a prompt. The options are also those of `complete`, `stream` and `chat`.

        Args:
            prompt: As for `complete`.
            max_tokens: Maximum number of generated tokens. None: until an end token or until the context is full.
            temperature: Sampling temperature. 0, the default, always chooses the most likely token.
            seed: Makes sampling repeatable. None: a new random seed for each request.
            sampling: All sampling parameters, including the temperature: `temperature` must not be given beside it.
                `seed` replaces its seed.
            stop: Strings that end the text. They are not part of the result.
            logprobs: Number of alternatives to return with the logprob of each token. None: no logprobs.
            sequence: Number of the KV cache sequence to use. None: the engine chooses.
            boundaries: Prompt lengths at which a later prompt may diverge from this one; the engine takes checkpoints
                there. Chat prompts have their message boundaries already.
            priority: Requests with a higher priority start first.
            deadline: Seconds after which generation ends with what there is, with finish reason `deadline`.
            use_prefix_cache: Whether cached prefixes may be used.
            ignore_eos: Continue after end tokens.
            overflow: Policy for a prompt that exceeds the context: `refuse` (`PromptTooLong`), `shift` (drop the oldest
                turns of a chat, or the start of a prompt) or `truncate_middle`. The latter two also leave space for the
                response: `max_tokens`, or a quarter of the context. `truncation` of the result says what was dropped.
            salt: Cache salt, e.g. of a tenant. Requests with different salts never share cached state.
        """
        if check_policy(overflow) != "refuse":
            prompt = self.fit_prompt(prompt, overflow, max_tokens)
        entries, media = self._build_entries(prompt)
        return Request(
            id=str(next(self._request_ids)),
            entries=entries,
            media=media,
            sampling=resolve_sampling(sampling, temperature, seed),
            max_tokens=None if max_tokens is None else check_integer("max_tokens", max_tokens, 0),
            stop=encode_stops(stop),
            logprobs=None if logprobs is None else check_integer("logprobs", logprobs, 0, 1000),
            sequence=sequence,
            boundaries=frozenset(boundaries) | (prompt.boundaries if isinstance(prompt, ChatPrompt) else frozenset()),
            system_length=prompt.system_length if isinstance(prompt, ChatPrompt) else 0,
            priority=priority,
            deadline=deadline,
            use_prefix_cache=use_prefix_cache,
            ignore_eos=ignore_eos,
            salt=salt,
        )

    def explain(self, prompt: PromptInput, *, salt: str = "") -> Explanation:
        """Explain how much of a prompt is a prefix hit now, where it diverges from the cache, and why it misses.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> model.explain("The rain in Portugal").shared_entries
        3
        """
        return self._get_host().call(functools.partial(Engine.explain, request=self.build_request(prompt, salt=salt)))

    # --- prefix cache

    def pin(self, prompt: PromptInput, *, salt: str = "") -> None:
        """Pin a prefix, e.g. a system prompt: it is never evicted, whether it is cached now or later.

        Raises `InvalidArgument` if pins would take more than half of the RAM budget, and `PromptTooLong` if the prefix
        does not fit into the context. On disk, a pinned prefix stays pinned for the next start.

        >>> model.pin("You are a helpful assistant.")
        >>> model.unpin("You are a helpful assistant.")
        True
        """
        self._get_host().call(functools.partial(cache.pin, entries=self._build_entries(prompt)[0], salt=salt))

    def unpin(self, prompt: PromptInput, *, salt: str = "") -> bool:
        """Remove a pin, so that the prefix can be evicted again; return False if exactly this prefix is not pinned.

        >>> model.unpin("This was never pinned.")
        False
        """
        return self._get_host().call(functools.partial(cache.unpin, entries=self._build_entries(prompt)[0], salt=salt))

    def clear_cache(self) -> None:
        """Clear the prefix cache in all tiers, including pinned prefixes and the files of this model on disk.

        Sequences in use are not cleared. Pins stay: a pinned prefix is pinned again when it is computed again.

        >>> completion = model.complete("The rain in Spain", max_tokens=1)
        >>> model.clear_cache()
        >>> model.complete("The rain in Spain", max_tokens=1).usage.cached_tokens
        0
        """
        self._get_host().call(cache.clear)

    # --- requests

    def _submit_choices(self, request: Request, n: int) -> list[EventStream]:
        requests = [self._derive_request(request, index) for index in range(check_integer("n", n, 1, 128))]
        return self._get_host().submit_together(requests)

    def _derive_request(self, request: Request, index: int) -> Request:
        """Return the request of choice `index`: the same prompt with another id and seed."""
        if index == 0:
            return request
        seed = request.sampling.seed
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
        return replace(request, id=str(next(self._request_ids)), sampling=sampling)

    def _token_to_piece(self, token: int) -> bytes:
        return self.vocabulary.token_to_piece(token, special=False)

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

    def _tokenize_prompt(self, prompt: PromptInput) -> NDArray[np.int32]:
        """Return the tokens of a prompt of text or tokens."""
        if isinstance(prompt, ChatPrompt):
            prompt = prompt.tokens
        tokens = self.tokenize(prompt, bos=True) if isinstance(prompt, str) else prompt
        return self.vocabulary.check_tokens(tokens)  # type: ignore[arg-type]


def resolve_sampling(sampling: Sampling | None, temperature: float | None, seed: int | None) -> Sampling:
    """Return `sampling`, or sampling with only a temperature if it is None; a given seed replaces its seed.

    >>> resolve_sampling(None, temperature=0.5, seed=3).seed
    3
    """
    if sampling is not None and temperature is not None:
        raise InvalidArgument(
            "temperature", f"must not be given beside `sampling`, whose temperature is {sampling.temperature}"
        )
    resolved = sampling or (replace(GREEDY, temperature=temperature) if temperature else GREEDY)
    return resolved if seed is None else replace(resolved, seed=seed)


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
