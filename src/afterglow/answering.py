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

from afterglow.answers import gather, texts, texts_async
from afterglow.chat.chat import Chat, ChatOptions, ChatPlan
from afterglow.chat.messages import Message, Writable
from afterglow.chat.prompt import Prompt
from afterglow.chat.reply import Turn, TurnStream
from afterglow.chat.tools.tool import Offered
from afterglow.closing import Closing
from afterglow.completion import Completion
from afterglow.engine.engine import Engine
from afterglow.engine.entries import Entry
from afterglow.engine.explanation import Explanation
from afterglow.engine.pictures import Part
from afterglow.engine.request import Request
from afterglow.engine.settings import EngineSettings
from afterglow.engine.stream import Stream
from afterglow.errors import InvalidArgument
from afterglow.llama.arguments import integer
from afterglow.llama.sampling import Sampling
from afterglow.llama.vocabulary import Vocabulary
from afterglow.prompting import Item, Measuring, is_mixed, mixed_entries

GREEDY = Sampling(temperature=0)
Promptable: TypeAlias = str | Sequence[int] | Sequence[Item] | Prompt
Talk: TypeAlias = str | Sequence[Writable]
Entries: TypeAlias = Sequence[Entry] | NDArray[np.int64]
CHAT_OPTIONS = frozenset(ChatOptions.__dataclass_fields__)
T = TypeVar("T")


def needs_boundaries(memory: str, settings: EngineSettings) -> bool:
    """Whether it helps to know where messages end: memory of attention can go on anywhere."""
    return memory != "attention" or settings.pin_system


class Host(Protocol):
    """Where an engine runs: `EngineThread` or `EngineProcess`."""

    def submit(self, request: Request) -> Stream: ...
    def submit_together(self, requests: Sequence[Request]) -> list[Stream]: ...
    def call(self, function: Callable[[Engine], T]) -> T: ...


class Answering(Closing):
    """Everything that takes text and gives text. A subclass says where the engine and the vocabulary are."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._measuring = Measuring(lambda measure: self._running().call(measure))

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The model's tokens."""

    @abstractmethod
    def _running(self) -> Host:
        """The engine; raises where there is none."""

    @abstractmethod
    def _talking(self) -> Chat:
        """How this model talks."""

    # --- tokens

    def tokenize(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """The token ids of `text`. Control tokens written in it stay text unless `special`."""
        return self.vocabulary.tokenize(text, special=special, bos=bos)

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
    def chat(self, messages: Talk, *, stream: Literal[False] = False, **options: Any) -> Turn: ...
    @overload
    def chat(self, messages: Talk, *, stream: Literal[True], **options: Any) -> TurnStream: ...
    def chat(
        self,
        messages: Talk,
        *,
        stream: bool = False,
        n: int = 1,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Turn | TurnStream:
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
        streams = self.begin(messages, n=n, **options)
        if stream:
            return streams[0]
        try:
            first, *others = [one.result(cancel) for one in streams]
        except BaseException:
            for one in streams:
                one.cancel()
            raise
        return replace(first, others=tuple(others))

    async def chat_async(self, messages: Talk, *, n: int = 1, **options: Any) -> Turn:
        """The same for asyncio. (A stream is for both: `async for part in model.chat(…, stream=True)`.)

        >>> asyncio.run(model.chat_async("What is 2+2?")).text
        'The answer to this classic math problem is 4.'
        """
        streams = self.begin(messages, n=n, **options)
        try:
            first, *others = [await one.result_async() for one in streams]
        except BaseException:
            for one in streams:
                one.cancel()
            raise
        return replace(first, others=tuple(others))

    def begin(self, messages: Talk, *, n: int = 1, **options: Any) -> list[TurnStream]:
        """Begin `n` answers to a conversation that share one prompt; their streams."""
        chat_options = {name: options.pop(name) for name in CHAT_OPTIONS & options.keys()}
        return self.start(self.plan(messages, **chat_options), n=n, **options)

    def start(self, plan: ChatPlan, *, n: int = 1, **options: Any) -> list[TurnStream]:
        """Begin `n` answers to a plan; the options are those of `request`."""
        options.setdefault("max_tokens", None)
        request = plan.lead(self.request(plan.prompt, **options))
        streams = self._submit_answers(request, n)
        return [TurnStream(stream, plan, options.get("stop", ())) for stream in streams]

    def plan(
        self,
        messages: Talk,
        *,
        tools: Sequence[Offered] = (),
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        reasoning: bool | int | str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> ChatPlan:
        """A conversation as the model's own template writes it, with what leads the answer.

        `tools` are OpenAI's dictionaries or functions with type hints; `tool_choice` is `none`, `auto`, `required` or
        names a function. `response_format` is OpenAI's, or `{"type": "regex", "pattern": …}`, `{"type": "choice",
        "choices": […]}`, `{"type": "grammar", "grammar": …, "syntax": "lark" or "gbnf"}`, or a type such as a pydantic
        class. `reasoning` is on, off, a number of tokens, or an effort. `arguments` go to the template.
        """
        written: Sequence[Writable] = [("user", messages)] if isinstance(messages, str) else messages
        chat_options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            reasoning=reasoning,
            arguments=arguments or {},
        )
        return self._talking().plan(written, chat_options)

    def bring(self, messages: Sequence[Writable]) -> list[Message]:
        """The messages with their pictures and sounds opened, so that nothing is fetched or decoded any more."""
        return self._talking().bring(messages)

    def chat_prompt(self, messages: Talk, **options: Any) -> Prompt:
        """A conversation as the model's own template writes it, ready for the assistant's answer.

        Control tokens that somebody wrote in the messages stay text. The options are those of `plan`. The result
        goes into `complete` or `stream`.

        >>> prompt = model.chat_prompt("What is 2+2?")
        >>> model.complete(prompt, max_tokens=20).text
        'The answer to this classic math problem is 4.'
        """
        return self.plan(messages, **options).prompt

    # --- prompts

    def complete(
        self,
        prompt: Promptable,
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
        streams = self._submit_answers(self.request(prompt, **options), n)
        stops = options.get("stop", ())
        try:
            first = gather(streams[0], self._piece, stops, on_token, cancel)
            others = [gather(stream, self._piece, stops, None, cancel) for stream in streams[1:]]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        choices, usages = zip(first, *others, strict=True)
        return Completion(choices=choices, usages=usages)

    def stream(self, prompt: Promptable, **options: Any) -> Iterator[str]:
        """Continue `prompt` like `complete`, yielding text as it comes. Abandoning the iterator stops the work.

        >>> list(model.stream("One, two, three,", max_tokens=2))
        [' four', ',']
        """
        return texts(self._running().submit(self.request(prompt, **options)), self._piece, options.get("stop", ()))

    def stream_async(self, prompt: Promptable, **options: Any) -> AsyncIterator[str]:
        """The same for asyncio.

        >>> async def shout():
        ...     return [piece.upper() async for piece in model.stream_async("One, two, three,", max_tokens=2)]
        >>> asyncio.run(shout())
        [' FOUR', ',']
        """
        stream = self._running().submit(self.request(prompt, **options))
        return texts_async(stream, self._piece, options.get("stop", ()))

    def request(
        self,
        prompt: Promptable,
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
        reuse: bool = True,
        ignore_ends: bool = False,
        salt: str = "",
    ) -> Request:
        """What is asked of the engine, out of text, tokens, or a list of texts, tokens, pictures and sounds.

        `max_tokens` None goes on until the model ends or the context does. `temperature` 0 takes the most likely
        token; `sampling` has every other way to choose. `logprobs` is the number of alternatives to report.
        `sequence` names the slot of memory to use. `boundaries` are prompt lengths at which a later prompt may part
        from this one. `deadline` is in seconds: what there is by then is the answer. `ignore_ends` goes on after
        the model's own end tokens. Requests with different `salt`s share nothing that was computed.
        """
        entries, contents = self._entries(prompt)
        return Request(
            id=str(next(self._numbers)),
            entries=entries,
            contents=contents,
            sampling=sampling_of(sampling, temperature, seed),
            max_tokens=None if max_tokens is None else integer("max_tokens", max_tokens, 0),
            stop=stop_bytes(stop),
            logprobs=None if logprobs is None else integer("logprobs", logprobs, 0, 1000),
            sequence=sequence,
            boundaries=frozenset(boundaries) | (prompt.boundaries if isinstance(prompt, Prompt) else frozenset()),
            system=prompt.system if isinstance(prompt, Prompt) else 0,
            priority=priority,
            deadline=deadline,
            reuse=reuse,
            ignore_ends=ignore_ends,
            salt=salt,
        )

    def explain(self, prompt: Promptable, *, salt: str = "") -> Explanation:
        """What of this prompt is in memory now, where it parts from it, and why not more could be reused.

        >>> answer = model.complete("The rain in Spain", max_tokens=1)
        >>> model.explain("The rain in Portugal").shared
        3
        """
        return self._running().call(functools.partial(Engine.explain, request=self.request(prompt, salt=salt)))

    # --- how requests are made

    def _submit_answers(self, request: Request, n: int) -> list[Stream]:
        requests = [self._numbered(request, index) for index in range(integer("n", n, 1, 128))]
        return self._running().submit_together(requests)

    def _numbered(self, request: Request, index: int) -> Request:
        """The request for answer `index`: the same prompt with another draw."""
        if index == 0:
            return request
        seed = request.sampling.seed
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
        return replace(request, id=str(next(self._numbers)), sampling=sampling)

    def _piece(self, token: int) -> bytes:
        return self.vocabulary.piece(token, special=False)

    def _entries(self, prompt: Promptable) -> tuple[Entries, Mapping[bytes, Part]]:
        """What a prompt is to the engine, and what its pictures and sounds hold."""
        entries: Entries
        contents: Mapping[bytes, Part] = {}
        if isinstance(prompt, Prompt) and prompt.contents:
            entries, contents = prompt.entries, prompt.contents
        elif is_mixed(prompt):
            entries, contents = mixed_entries(prompt, self.vocabulary, self._measuring)  # type: ignore[arg-type]
        else:
            entries = self._prompt(prompt).astype(np.int64)
        if not len(entries):
            raise InvalidArgument("prompt", "must have at least one token")
        return entries, contents

    def _prompt(self, prompt: Promptable) -> NDArray[np.int32]:
        """A prompt that is text or tokens."""
        if isinstance(prompt, Prompt):
            prompt = prompt.tokens
        tokens = self.tokenize(prompt, bos=True) if isinstance(prompt, str) else prompt
        return self.vocabulary.check_all(tokens)  # type: ignore[arg-type]


def sampling_of(sampling: Sampling | None, temperature: float, seed: int | None) -> Sampling:
    """How tokens are chosen: as `sampling` says, or by the temperature alone; with the seed where there is one.

    >>> sampling_of(None, temperature=0.5, seed=3).seed
    3
    """
    chosen = sampling or (replace(GREEDY, temperature=temperature) if temperature else GREEDY)
    return chosen if seed is None else replace(chosen, seed=seed)


def stop_bytes(stop: Sequence[str]) -> tuple[bytes, ...]:
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
