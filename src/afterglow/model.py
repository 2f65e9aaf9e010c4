"""The public face: `load()` and `Model`. Text begins and ends here; computing happens in the engine."""

from __future__ import annotations

import codecs
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from afterglow import registry
from afterglow.engine import greedy, scoring
from afterglow.engine.lifecycle import Lifecycle, LoadHook, Stage
from afterglow.errors import InvalidArgument
from afterglow.llama.arguments import integer
from afterglow.llama.devices import devices, free_memory
from afterglow.llama.footprint import layers_that_fit
from afterglow.llama.header import read_header
from afterglow.llama.library import library
from afterglow.llama.model import ModelInfo, ModelSettings, Progress
from afterglow.llama.probe import ensure_safe
from afterglow.llama.settings import CacheType, ContextSettings

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer. `finish` is `stop` where the model ended it, `length` where a limit did."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`values[i]` is the log-probability of `tokens[i + 1]` after everything before it.

    Tokens beyond the context length are scored in overlapping windows; `windows` says how many there were.
    """

    tokens: tuple[int, ...]
    values: tuple[float, ...]
    windows: int


class Model:
    """A model ready for use. Make one with `afterglow.load`; close it, or use it in a `with`.

    >>> import afterglow
    >>> with afterglow.load("smollm2") as model:
    ...     print(model.complete("The capital of France is", max_tokens=8).text)
    """

    def __init__(self, lifecycle: Lifecycle, name: str) -> None:
        self.name = name
        self._lifecycle = lifecycle
        self._lock = threading.Lock()  # a context serves one caller at a time

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
        recurrent = info.memory in ("recurrent", "hybrid")
        answers = {
            "generation": info.causal,
            "embeddings": True,
            "kv_cache": info.memory != "recurrent",
            "hidden_state": recurrent,
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

    def tokenize(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """The token ids of `text`. Control tokens written in it stay text unless `special`."""
        return self._lifecycle.model.vocabulary.tokenize(text, special=special, bos=bos)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of `tokens`; half characters become U+FFFD."""
        return self._lifecycle.model.vocabulary.detokenize(tokens, special=special).decode("utf-8", "replace")

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` is, without the ones a prompt begins with."""
        return len(self.tokenize(text))

    def complete(self, prompt: str | Sequence[int], *, max_tokens: int = 128) -> Completion:
        """Continue `prompt` with the most likely tokens."""
        tokens = self._prompt(prompt)
        answer = tuple(self._generate(tokens, max_tokens))
        ended = bool(answer) and answer[-1] in self._lifecycle.model.vocabulary.ends
        return Completion(
            text=self.detokenize(answer),
            tokens=answer,
            finish="stop" if ended else "length",
            prompt_tokens=len(tokens),
        )

    def stream(self, prompt: str | Sequence[int], *, max_tokens: int = 128) -> Iterator[str]:
        """Continue `prompt` like `complete`, yielding text as it comes. Abandoning the iterator stops the work."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        vocabulary = self._lifecycle.model.vocabulary
        for token in self._generate(self._prompt(prompt), max_tokens):
            if text := decoder.decode(vocabulary.piece(token, special=False)):
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def logprobs(self, text: str | Sequence[int]) -> Score:
        """How likely the model finds each token of `text` but the first. Text begins as the model's prompts do."""
        tokens = self._prompt(text)
        with self._lock:
            values, windows = scoring.logprobs(self._lifecycle.context, SCORING, tokens)
        return Score(tokens=tuple(int(token) for token in tokens), values=tuple(values), windows=windows)

    def perplexity(self, text: str | Sequence[int]) -> float:
        """exp of the mean negative log-probability: 1 is certainty, the vocabulary's size is a blind guess."""
        values = self.logprobs(text).values
        return math.exp(-math.fsum(values) / len(values))

    def chat_prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The tokens of a conversation of (role, text) pairs, ready for the assistant's answer."""
        model = self._lifecycle.model
        return model.vocabulary.tokenize(model.format_chat(messages), special=True, bos=True)

    def warm(self) -> None:
        """COLD → WARM: weights in RAM."""
        self._lifecycle.warm()

    def activate(self) -> None:
        """COLD or WARM → ACTIVE: ready to compute."""
        self._lifecycle.activate()

    def deactivate(self) -> None:
        """ACTIVE → WARM: the context and the GPU are given back."""
        with self._lock:
            self._lifecycle.deactivate()

    def unload(self) -> None:
        """WARM or ACTIVE → COLD: everything is given back; `activate` brings it back."""
        with self._lock:
            self._lifecycle.unload()

    def close(self) -> None:
        """Give everything back for good."""
        with self._lock:
            self._lifecycle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prompt(self, prompt: str | Sequence[int]) -> NDArray[np.int32]:
        vocabulary = self._lifecycle.model.vocabulary
        return vocabulary.check_all(self.tokenize(prompt, bos=True) if isinstance(prompt, str) else prompt)

    def _generate(self, prompt: NDArray[np.int32], max_tokens: int) -> Iterator[int]:
        integer("max_tokens", max_tokens, 0)
        if not self.info.causal:
            raise InvalidArgument("prompt", "cannot be continued: this model only makes embeddings")
        with self._lock:
            yield from greedy.generate(self._lifecycle.context, GENERATING, prompt, max_tokens)


GENERATING, SCORING = 0, 1  # the sequences of the context, so that scoring never disturbs an answer


def load(
    model: str | os.PathLike[str],
    *,
    context: int = 4096,
    gpu_layers: int | None = None,
    threads: int | None = None,
    key_type: CacheType = "f16",
    value_type: CacheType = "f16",
    flash_attention: bool | None = None,
    mmap: bool = True,
    mlock: bool = False,
    state: Stage | str = Stage.ACTIVE,
    fetch: bool = False,
    progress: Progress | None = None,
    hooks: Sequence[LoadHook] = (),
) -> Model:
    """Load a model by name (`afterglow models` lists them) or by path.

    `context` is how many tokens one request can hold. `gpu_layers` None puts as many layers on a GPU as fit, if
    there is one. With `fetch`, a known model that is not here yet is downloaded.

    >>> with afterglow.load("smollm2", context=2048) as model:
    ...     model.count_tokens("How many tokens is this?")
    6
    """
    path = registry.resolve(Path(model) if isinstance(model, os.PathLike) else model, fetch=fetch)
    ensure_safe(path)
    context_settings = ContextSettings(
        cells=2 * integer("context", context, 1),
        sequences=2,
        threads=usable_cores() if threads is None else threads,
        key_type=key_type,
        value_type=value_type,
        flash_attention=flash_attention,
    )
    layers = fitting_layers(path, context_settings) if gpu_layers is None else gpu_layers
    model_settings = ModelSettings(gpu_layers=layers, mmap=mmap, mlock=mlock)
    lifecycle = Lifecycle(path, model_settings, context_settings, hooks=hooks)
    match Stage(state):
        case Stage.WARM:
            lifecycle.warm(progress)
        case Stage.ACTIVE:
            lifecycle.activate(progress)
    return Model(lifecycle, str(model))


def usable_cores() -> int:
    """Cores this process may use; hyper-threads only slow matrix products down, so they do not count."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def fitting_layers(path: Path, settings: ContextSettings) -> int:
    """How many layers to put on the GPUs of this machine; 0 where there is none."""
    free = free_memory(gpu=True)
    return layers_that_fit(read_header(path), settings, free) if free else 0
