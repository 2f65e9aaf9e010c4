"""Asking a model for text, wherever its engine runs: prompts and conversations in, answers out."""

from __future__ import annotations

import functools
import itertools
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from afterglow.api.generate import collect_choice, stream_text, stream_text_async
from afterglow.api.outputs import Completion
from afterglow.api.prompts import MediaMeasurer, PromptPart, build_mixed_entries, is_mixed_prompt
from afterglow.chat.chat import Chat, ChatOptions, ChatPlan
from afterglow.chat.messages import Message, MessageLike
from afterglow.chat.prompt import ChatPrompt
from afterglow.chat.response import ChatResponse, ChatStream
from afterglow.chat.tools.tool import ToolLike
from afterglow.closeable import Closeable
from afterglow.engine.engine import Engine
from afterglow.engine.host.stream import EventStream
from afterglow.engine.kvcache.explain import Explanation
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.media import MediaPart
from afterglow.engine.types.request import Request
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.checks import check_integer
from afterglow.llama.sampling import Sampling
from afterglow.llama.vocabulary import Vocabulary

GREEDY = Sampling(temperature=0)
PromptInput: TypeAlias = str | Sequence[int] | Sequence[PromptPart] | ChatPrompt
ChatInput: TypeAlias = str | Sequence[MessageLike]
EntrySequence: TypeAlias = Sequence[Entry] | NDArray[np.int64]
CHAT_OPTION_NAMES = frozenset(ChatOptions.__dataclass_fields__)
T = TypeVar("T")


def needs_boundaries(memory_kind: str, settings: EngineSettings) -> bool:
    """Whether it helps to know where messages end: memory of attention can go on anywhere."""
    return memory_kind != "attention" or settings.pin_system_prompts


class Host(Protocol):
    """Where an engine runs: `EngineThread` or `EngineProcess`."""

    def submit(self, request: Request) -> EventStream: ...
    def submit_together(self, requests: Sequence[Request]) -> list[EventStream]: ...
    def call(self, function: Callable[[Engine], T]) -> T: ...


class TextModel(Closeable):
    """Everything that takes text and gives text. A subclass says where the engine and the vocabulary are."""

    def __init__(self) -> None:
        self._request_ids = itertools.count()
        self._media_measurer = MediaMeasurer(lambda measure: self._get_host().call(measure))

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The model's tokens."""

    @abstractmethod
    def _get_host(self) -> Host:
        """The engine; raises where there is none."""

    @abstractmethod
    def _get_chat(self) -> Chat:
        """How this model talks."""

    # --- tokens

    def tokenize(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """The token ids of `text`. Control tokens written in it stay text unless `special`."""
        return self.vocabulary.tokenize(text, parse_special=special, add_special=bos)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of `tokens`; half characters become U+FFFD.

        >>> model.detokenize(model.tokenize("naïve"))
        'naïve'
        """
        return self.vocabulary.detokenize(tokens, special=special).decode("utf-8", "replace")

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` is, without the ones a prompt begins with."""
        return len(self.tokenize(text))

    # --- conversations

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
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> ChatResponse | ChatStream:
        """Answer a conversation: a text, (role, text) pairs, or OpenAI's dictionaries.

        The options are those of `plan` (`tools`, `tool_choice`, `response_format`, `reasoning`, …) and of `request`
        (`max_tokens`, `temperature`, `stop`, …). With `stream` the parts come as they are made.

        >>> model.chat("What is 2+2?").text
        'The answer to this classic math problem is 4.'
        >>> model.chat("Is snow black?", response_format={"type": "choice", "choices": ["yes", "no"]}).text
        'no'
        >>> model.chat("List two numbers.", response_format=list[int]).parsed
        [1, 2]
        """
        if stream and n != 1:
            raise InvalidArgument("n", f"must be 1 for a stream, not {n}")
        streams = self.submit_chat(messages, n=n, **options)
        if stream:
            return streams[0]
        try:
            first, *others = [one.result(cancel) for one in streams]
        except BaseException:
            for one in streams:
                one.cancel()
            raise
        return replace(first, alternatives=tuple(others))

    async def chat_async(self, messages: ChatInput, *, n: int = 1, **options: Any) -> ChatResponse:
        """The same for asyncio. (A stream is for both: `async for part in model.chat(…, stream=True)`.)

        >>> asyncio.run(model.chat_async("What is 2+2?")).text
        'The answer to this classic math problem is 4.'
        """
        streams = self.submit_chat(messages, n=n, **options)
        try:
            first, *others = [await one.result_async() for one in streams]
        except BaseException:
            for one in streams:
                one.cancel()
            raise
        return replace(first, alternatives=tuple(others))

    def submit_chat(self, messages: ChatInput, *, n: int = 1, **options: Any) -> list[ChatStream]:
        """Begin `n` answers to a conversation that share one prompt; their streams."""
        chat_options = {name: options.pop(name) for name in CHAT_OPTION_NAMES & options.keys()}
        return self.submit_plan(self.plan_chat(messages, **chat_options), n=n, **options)

    def submit_plan(self, plan: ChatPlan, *, n: int = 1, **options: Any) -> list[ChatStream]:
        """Begin `n` answers to a plan; the options are those of `request`."""
        options.setdefault("max_tokens", None)
        request = plan.apply_to(self.build_request(plan.prompt, **options))
        streams = self._submit_choices(request, n)
        return [ChatStream(stream, plan, options.get("stop", ())) for stream in streams]

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
        """A conversation as the model's own template writes it, with what leads the answer.

        `tools` are OpenAI's dictionaries or functions with type hints; `tool_choice` is `none`, `auto`, `required` or
        names a function. `response_format` is OpenAI's, or `{"type": "regex", "pattern": …}`, `{"type": "choice",
        "choices": […]}`, `{"type": "grammar", "grammar": …, "syntax": "lark" or "gbnf"}`, or a type such as a pydantic
        class. `reasoning` is on, off, a number of tokens, or an effort. `arguments` go to the template.
        """
        written: Sequence[MessageLike] = [("user", messages)] if isinstance(messages, str) else messages
        chat_options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            reasoning=reasoning,
            chat_template_kwargs=chat_template_kwargs or {},
        )
        return self._get_chat().plan(written, chat_options)

    def load_media(self, messages: Sequence[MessageLike]) -> list[Message]:
        """The messages with their pictures and sounds opened, so that nothing is fetched or decoded any more."""
        return self._get_chat().load_media(messages)

    def apply_chat_template(self, messages: ChatInput, **options: Any) -> ChatPrompt:
        """A conversation as the model's own template writes it, ready for the assistant's answer.

        Control tokens that somebody wrote in the messages stay text. The options are those of `plan`. The result
        goes into `complete` or `stream`.

        >>> prompt = model.chat_prompt("What is 2+2?")
        >>> model.complete(prompt, max_tokens=20).text
        'The answer to this classic math problem is 4.'
        """
        return self.plan_chat(messages, **options).prompt

    # --- prompts

    def complete(
        self,
        prompt: PromptInput,
        *,
        n: int = 1,
        on_token: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Completion:
        """Continue `prompt`; the options are those of `request`. `n` answers share one prompt.

        `on_token` is called once for each token of the first answer. Setting `cancel` ends the work at once and
        raises `Cancelled`.

        >>> answer = model.complete("Once upon a time", max_tokens=5, n=2, temperature=0.8, seed=1)
        >>> [len(choice.tokens) for choice in answer.choices]
        [5, 5]
        """
        streams = self._submit_choices(self.build_request(prompt, **options), n)
        stops = options.get("stop", ())
        try:
            first = collect_choice(streams[0], self._token_to_piece, stops, on_token, cancel)
            others = [collect_choice(stream, self._token_to_piece, stops, None, cancel) for stream in streams[1:]]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        choices, usages = zip(first, *others, strict=True)
        return Completion(choices=choices, usages=usages)

    def stream(self, prompt: PromptInput, **options: Any) -> Iterator[str]:
        """Continue `prompt` like `complete`, yielding text as it comes. Abandoning the iterator stops the work.

        >>> list(model.stream("One, two, three,", max_tokens=2))
        [' four', ',']
        """
        return stream_text(
            self._get_host().submit(self.build_request(prompt, **options)),
            self._token_to_piece,
            options.get("stop", ()),
        )

    def stream_async(self, prompt: PromptInput, **options: Any) -> AsyncIterator[str]:
        """The same for asyncio.

        >>> async def shout():
        ...     return [piece.upper() async for piece in model.stream_async("One, two, three,", max_tokens=2)]
        >>> asyncio.run(shout())
        [' FOUR', ',']
        """
        stream = self._get_host().submit(self.build_request(prompt, **options))
        return stream_text_async(stream, self._token_to_piece, options.get("stop", ()))

    def build_request(
        self,
        prompt: PromptInput,
        *,
        max_tokens: int | None = 128,
        temperature: float = 0.0,
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
        salt: str = "",
    ) -> Request:
        """What is asked of the engine, out of text, tokens, or a list of texts, tokens, pictures and sounds.

        `max_tokens` None goes on until the model ends or the context does. `temperature` 0 takes the most likely
        token; `sampling` has every other way to choose. `logprobs` is the number of alternatives to report.
        `sequence` names the slot of memory to use. `boundaries` are prompt lengths at which a later prompt may part
        from this one. `deadline` is in seconds: what there is by then is the answer. `ignore_ends` goes on after
        the model's own end tokens. Requests with different `salt`s share nothing that was computed.
        """
        entries, contents = self._build_entries(prompt)
        return Request(
            id=str(next(self._request_ids)),
            entries=entries,
            media=contents,
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
        """What of this prompt is in memory now, where it parts from it, and why not more could be reused.

        >>> answer = model.complete("The rain in Spain", max_tokens=1)
        >>> model.explain("The rain in Portugal").shared
        3
        """
        return self._get_host().call(functools.partial(Engine.explain, request=self.build_request(prompt, salt=salt)))

    # --- how requests are made

    def _submit_choices(self, request: Request, n: int) -> list[EventStream]:
        requests = [self._derive_request(request, index) for index in range(check_integer("n", n, 1, 128))]
        return self._get_host().submit_together(requests)

    def _derive_request(self, request: Request, index: int) -> Request:
        """The request for answer `index`: the same prompt with another draw."""
        if index == 0:
            return request
        seed = request.sampling.seed
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
        return replace(request, id=str(next(self._request_ids)), sampling=sampling)

    def _token_to_piece(self, token: int) -> bytes:
        return self.vocabulary.token_to_piece(token, special=False)

    def _build_entries(self, prompt: PromptInput) -> tuple[EntrySequence, Mapping[bytes, MediaPart]]:
        """What a prompt is to the engine, and what its pictures and sounds hold."""
        entries: EntrySequence
        contents: Mapping[bytes, MediaPart] = {}
        if isinstance(prompt, ChatPrompt) and prompt.media:
            entries, contents = prompt.entries, prompt.media
        elif is_mixed_prompt(prompt):
            entries, contents = build_mixed_entries(prompt, self.vocabulary, self._media_measurer)  # type: ignore[arg-type]
        else:
            entries = self._tokenize_prompt(prompt).astype(np.int64)
        if not len(entries):
            raise InvalidArgument("prompt", "must have at least one token")
        return entries, contents

    def _tokenize_prompt(self, prompt: PromptInput) -> NDArray[np.int32]:
        """A prompt that is text or tokens."""
        if isinstance(prompt, ChatPrompt):
            prompt = prompt.tokens
        tokens = self.tokenize(prompt, bos=True) if isinstance(prompt, str) else prompt
        return self.vocabulary.check_tokens(tokens)  # type: ignore[arg-type]


def resolve_sampling(sampling: Sampling | None, temperature: float, seed: int | None) -> Sampling:
    """How tokens are chosen: as `sampling` says, or by the temperature alone; with the seed where there is one.

    >>> sampling_of(None, temperature=0.5, seed=3).seed
    3
    """
    chosen = sampling or (replace(GREEDY, temperature=temperature) if temperature else GREEDY)
    return chosen if seed is None else replace(chosen, seed=seed)


def encode_stops(stop: Sequence[str]) -> tuple[bytes, ...]:
    """Stop texts as the engine matches them.

    >>> stop_bytes(["END"])
    (b'END',)
    """
    if isinstance(stop, str | bytes) or not all(isinstance(text, str) and text for text in stop):
        raise InvalidArgument("stop", "must be a list of texts that are not empty")
    try:
        return tuple(text.encode() for text in stop)
    except UnicodeEncodeError:
        raise InvalidArgument("stop", "must not contain half of a surrogate pair: no model can write it") from None
