"""The public face: `Model`. Text begins and ends here; computing happens in the engine."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.answers import gather, texts, texts_async
from afterglow.chat.messages import Writable
from afterglow.chat.messages import messages as read_messages
from afterglow.chat.prompt import Prompt, PromptBuilder
from afterglow.chat.template import ChatTemplate
from afterglow.closing import Closing
from afterglow.completion import Completion, Score
from afterglow.engine import scoring, snapshots
from afterglow.engine.engine import Engine
from afterglow.engine.lifecycle import Lifecycle, Stage
from afterglow.engine.llama import LlamaBackend
from afterglow.engine.memory import Explanation
from afterglow.engine.request import Request
from afterglow.engine.sequence import Saved
from afterglow.engine.settings import EngineSettings
from afterglow.engine.stream import Stream
from afterglow.engine.thread import EngineThread
from afterglow.errors import InvalidArgument
from afterglow.llama.arguments import integer
from afterglow.llama.devices import devices
from afterglow.llama.library import library
from afterglow.llama.model import ModelInfo, ModelSettings
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings

GREEDY = Sampling(temperature=0)
Promptable: TypeAlias = str | Sequence[int] | Prompt


class Model(Closing):
    """A model ready for use. Make one with `afterglow.load`; close it, or use it in a `with`.

    Any number of threads and asyncio tasks may use it at once: their requests share the decodes, and every prompt
    begins from whatever is in memory already.

    >>> model.complete("The capital of France is", max_tokens=2).text
    ' Paris.'
    """

    def __init__(self, lifecycle: Lifecycle, name: str, settings: EngineSettings) -> None:
        self.name = name
        self._lifecycle = lifecycle
        self._engine_settings = settings
        self._engine: EngineThread | None = None
        self._lock = threading.Lock()  # over transitions
        self._scoring = threading.Lock()  # one sequence is kept for it
        self._numbers = itertools.count()
        self._snapshots: dict[str, Saved] = {}
        self._building = threading.Lock()
        self._prompts: tuple[object, ChatTemplate, PromptBuilder] | None = None
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
            "gpu": any("gpu" in device.kind for device in devices()),
        }
        return frozenset(name for name, answer in answers.items() if answer)

    def supports(self, capability: str) -> bool:
        """Whether `capability` is among `capabilities`.

        >>> model.supports("kv_cache")
        True
        """
        return capability in self.capabilities

    # --- tokens

    def tokenize(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """The token ids of `text`. Control tokens written in it stay text unless `special`."""
        return self._lifecycle.model.vocabulary.tokenize(text, special=special, bos=bos)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of `tokens`; half characters become U+FFFD.

        >>> model.detokenize(model.tokenize("naïve"))
        'naïve'
        """
        return self._lifecycle.model.vocabulary.detokenize(tokens, special=special).decode("utf-8", "replace")

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` is, without the ones a prompt begins with."""
        return len(self.tokenize(text))

    def chat_prompt(
        self,
        messages: Sequence[Writable],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation as the model's own template writes it, ready for the assistant's answer.

        Messages are (role, text) pairs or OpenAI's dictionaries. Control tokens that somebody wrote in them stay
        text. `arguments` go to the template (`enable_thinking`, …). The result goes into `complete` or `stream`.

        >>> messages = [("system", "You are a helpful assistant."), ("user", "What is the capital of France?")]
        >>> prompt = model.chat_prompt(messages)
        >>> model.complete(prompt, max_tokens=20).text
        'The capital of France is Paris.'
        """
        return self._builder().build(read_messages(messages), tools=tools, arguments=arguments)

    # --- answers

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
        integer("n", n, 1, 128)
        request = self.request(prompt, **options)
        streams = self._running().submit_together([self._numbered(request, index) for index in range(n)])
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
        return texts(self._submit(self.request(prompt, **options)), self._piece, options.get("stop", ()))

    def stream_async(self, prompt: Promptable, **options: Any) -> AsyncIterator[str]:
        """The same for asyncio.

        >>> async def shout():
        ...     return [piece.upper() async for piece in model.stream_async("One, two, three,", max_tokens=2)]
        >>> asyncio.run(shout())
        [' FOUR', ',']
        """
        return texts_async(self._submit(self.request(prompt, **options)), self._piece, options.get("stop", ()))

    def request(
        self,
        prompt: Promptable,
        *,
        max_tokens: int = 128,
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
    ) -> Request:
        """What is asked of the engine, out of text or tokens.

        `temperature` 0 takes the most likely token; `sampling` has every other way to choose. `logprobs` is the
        number of alternatives to report. `sequence` names the slot of memory to use. `boundaries` are prompt
        lengths at which a later prompt may part from this one. `deadline` is in seconds: what there is by then is
        the answer.
        """
        if not self.info.causal:
            raise InvalidArgument("prompt", "cannot be continued: this model only makes embeddings")
        tokens = self._prompt(prompt)
        if not len(tokens):
            raise InvalidArgument("prompt", "must have at least one token")
        chosen = sampling or (replace(GREEDY, temperature=temperature) if temperature else GREEDY)
        return Request(
            id=str(next(self._numbers)),
            entries=tokens.astype(np.int64),
            sampling=chosen if seed is None else replace(chosen, seed=seed),
            max_tokens=integer("max_tokens", max_tokens, 0),
            stop=tuple(text.encode() for text in stop),
            logprobs=None if logprobs is None else integer("logprobs", logprobs, 0, 1000),
            sequence=sequence,
            boundaries=frozenset(boundaries) | (prompt.boundaries if isinstance(prompt, Prompt) else frozenset()),
            priority=priority,
            deadline=deadline,
            reuse=reuse,
        )

    def explain(self, prompt: Promptable) -> Explanation:
        """What of this prompt is in memory now, where it parts from it, and why not more could be reused.

        >>> answer = model.complete("The rain in Spain", max_tokens=1)
        >>> model.explain("The rain in Portugal").shared
        3
        """
        request = self.request(prompt)
        return self._running().call(lambda engine: engine.explain(request))

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
        values = self.logprobs(text).values
        return math.exp(-math.fsum(values) / len(values))

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
        context = self._lifecycle.context
        backend = LlamaBackend(context, sequences=context.sequences - 1)
        self._engine = EngineThread(lambda: Engine(backend, self._engine_settings))

    def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        with self._building:
            self._drop_builder()

    def _running(self) -> EngineThread:
        assert self._lifecycle.context  # WrongState or Closed where there is none
        if self._engine is None:
            raise InvalidArgument("prompt", "cannot be continued: this model only makes embeddings")
        return self._engine

    def _submit(self, request: Request) -> Stream:
        return self._running().submit(request)

    def _numbered(self, request: Request, index: int) -> Request:
        """The request for answer `index`: the same prompt with another draw."""
        if index == 0:
            return request
        seed = request.sampling.seed
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
        return replace(request, id=str(next(self._numbers)), sampling=sampling)

    def _piece(self, token: int) -> bytes:
        return self._lifecycle.model.vocabulary.piece(token, special=False)

    def _prompt(self, prompt: Promptable) -> NDArray[np.int32]:
        vocabulary = self._lifecycle.model.vocabulary
        if isinstance(prompt, Prompt):
            prompt = prompt.tokens
        return vocabulary.check_all(self.tokenize(prompt, bos=True) if isinstance(prompt, str) else prompt)

    def _builder(self) -> PromptBuilder:
        """What renders and tokenizes conversations; it goes with the weights."""
        model = self._lifecycle.model
        with self._building:
            if self._prompts is None or self._prompts[0] is not model:
                self._drop_builder()
                vocabulary = model.vocabulary
                special = {f"{name}_token": vocabulary.text(token) for name, token in vocabulary.special.items()}
                template = ChatTemplate(model.chat_template(), special)
                self._prompts = model, template, PromptBuilder(vocabulary, template)
            return self._prompts[2]

    def _drop_builder(self) -> None:
        if self._prompts is not None:
            self._prompts[1].close()
        self._prompts = None

    def _named(self, name: str) -> Saved:
        if name not in self._snapshots:
            raise InvalidArgument("name", f"there is no snapshot called {name!r}")
        return self._snapshots[name]
