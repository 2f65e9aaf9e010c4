"""Embeddings of texts: windows of long texts, shortened vectors, and the calls that compute many texts per decode."""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.engine.engine import Engine
from afterglow.engine.pooling import PooledTexts, Purpose, pool_in_slices
from afterglow.errors import Cancelled, InvalidArgument, PromptTooLong, UnsupportedOption

LongTextPolicy: TypeAlias = Literal["refuse", "window"]
TokenList: TypeAlias = Sequence[int]
# Names of models that were trained so that the first dimensions of a vector are a smaller vector. Files rarely say so.
MATRYOSHKA_NAMES = re.compile(
    r"nomic.embed.text.v1\.5|nomic.embed.text.v2|embedding.?gemma|qwen3.(vl.)?embedding|mxbai.embed.large"
    r"|jina.embeddings.v[3-9]|snowflake.arctic.embed.(m.v1\.5|[ml].v2)|matryoshka",
    re.IGNORECASE,
)
MAX_CALL_TEXTS = 256  # sent to the engine at once: a call that has not time for all of them is repeated
MAX_CACHED_BYTES = 16 * 1024**2  # of the vectors of a model
CACHED_VECTOR_BYTES = 300  # of a cached vector in RAM, beside its tokens and values
VectorKey: TypeAlias = tuple[Purpose, str, bytes]  # with the salt and the tokens
NAME_KEYS = ("general.name", "general.basename", "general.tags")


class CallableHost(Protocol):
    """The part of an engine host that runs functions on its engine."""

    def call(self, function: Callable[[Engine], PooledTexts]) -> PooledTexts: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """Vectors of texts, one row each, normalized to length 1.

    `token_counts` has the tokens of each text, `windows` the number of windows of each: several if it was too long for
    the model. `computed_tokens` is less than the sum of the tokens if texts are equal, share a prefix, or
    were computed before.

    >>> result = model.embed_texts(["a cat", "a dog"])
    >>> result.vectors.shape == (2, model.info.embedding_length), result.windows
    (True, (1, 1))
    """

    vectors: NDArray[np.float32]
    token_counts: tuple[int, ...]
    windows: tuple[int, ...]
    computed_tokens: int


class VectorCache:
    """Pooled vectors of the texts that were used last. Threads may share it."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._vectors: OrderedDict[VectorKey, NDArray[np.float32]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def find(self, keys: Sequence[VectorKey]) -> list[NDArray[np.float32] | None]:
        """Return the vector of each key; None if it is not cached."""
        with self._lock:
            for key in keys:
                if key in self._vectors:
                    self._vectors.move_to_end(key)
            return [self._vectors.get(key) for key in keys]

    def add(self, key: VectorKey, vector: NDArray[np.float32]) -> None:
        """Keep a vector, and evict the least recently used ones."""
        with self._lock:
            if key in self._vectors:
                return
            self._vectors[key] = vector
            self._nbytes += count_bytes(key, vector)
            while self._nbytes > self._max_bytes:
                self._nbytes -= count_bytes(*self._vectors.popitem(last=False))

    def clear(self) -> None:
        """Remove all vectors."""
        with self._lock:
            self._vectors.clear()
            self._nbytes = 0


def count_bytes(key: VectorKey, vector: NDArray[np.float32]) -> int:
    """Return the bytes of a cached vector in RAM."""
    return CACHED_VECTOR_BYTES + len(key[2]) + vector.nbytes


def supports_shorter_vectors(metadata: Mapping[str, str]) -> bool:
    """Return whether the metadata name a model whose vectors can be shortened (Matryoshka representations).

    >>> supports_shorter_vectors({"general.name": "Nomic Embed Text v1.5"}), supports_shorter_vectors({})
    (True, False)
    """
    return any(MATRYOSHKA_NAMES.search(metadata.get(key, "")) for key in NAME_KEYS)


def normalize(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows with length 1. A row of zeros stays as it is.

    >>> normalize(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)).round(1).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: NDArray[np.float32] = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
    return scaled


def find_common_prefix(texts: Sequence[TokenList]) -> int:
    """Return how many leading tokens all texts share. The last token of the shortest text is not counted.

    >>> find_common_prefix([[1, 2, 3, 4], [1, 2, 9], [1, 2]])
    1
    """
    if len(texts) < 2:
        return 0
    first, last = min(map(tuple, texts)), max(map(tuple, texts))  # the texts between them share what these two share
    shortest = min(map(len, texts)) - 1
    return next((index for index in range(shortest) if first[index] != last[index]), shortest)


def split_windows(tokens: TokenList, limit: int, control_tokens: frozenset[int]) -> list[list[int]]:
    """Return a text as windows of at most `limit` tokens that are equally long, give or take one.

    A control token at the start and at the end of the text is repeated in every window.

    >>> split_windows([1, 10, 11, 12, 13, 14, 2], 5, frozenset({1, 2}))
    [[1, 10, 11, 12, 2], [1, 13, 14, 2]]
    """
    tokens = list(tokens)
    if len(tokens) <= limit:
        return [tokens]
    start = tokens[:1] if tokens[0] in control_tokens else []
    end = tokens[-1:] if tokens[-1] in control_tokens else []
    body = tokens[len(start) : len(tokens) - len(end)]
    room = limit - len(start) - len(end)
    if room < 1:
        raise InvalidArgument("long_text", f"cannot be windows of {limit} tokens: the control tokens fill them")
    count = math.ceil(len(body) / room)
    cuts = [-(-index * len(body) // count) for index in range(count + 1)]
    return [[*start, *body[low:high], *end] for low, high in itertools.pairwise(cuts)]


def shorten_vectors(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Return the first dimensions of each vector, normalized to length 1 again.

    >>> shorten_vectors(np.array([[3.0, 4.0, 12.0]], np.float32), 2).round(1).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """
    return vectors if dimensions >= vectors.shape[-1] else normalize(vectors[..., :dimensions])


def check_dimensions(dimensions: int, width: int, *, can_shorten: bool, name: str) -> None:
    """Raise if vectors of this many dimensions cannot be had from a model of `width` dimensions."""
    if not 1 <= dimensions <= width:
        raise InvalidArgument("dimensions", f"must be from 1 to {width:,}, not {dimensions:,}")
    if dimensions < width and not can_shorten:
        reason = f"the embeddings of {name!r} have {width:,}, and nothing says that the model was trained for fewer"
        raise UnsupportedOption("dimensions", f"{reason}; if it was, load it with `shorten_embeddings`")


def pool_all(
    host: CallableHost,
    purpose: Purpose,
    texts: Sequence[TokenList],
    *,
    cache: VectorCache,
    salt: str = "",
    cancel: threading.Event | None = None,
) -> tuple[list[NDArray[np.float32]], int]:
    """Return the pooled vector of each text, and the number of computed tokens.

    Equal texts are computed once, and texts in the cache not at all. The engine serves other requests between the calls
    of the host.
    """
    keys: list[VectorKey] = [(purpose, salt, np.asarray(text, np.int32).tobytes()) for text in texts]
    known = {key: vector for key, vector in zip(keys, cache.find(keys), strict=True) if vector is not None}
    missing = {key: tuple(text) for key, text in zip(keys, texts, strict=True) if key not in known}
    unique = list(missing.values())
    prefix_length = find_common_prefix(unique)
    prefix = unique[0][:prefix_length] if unique else ()
    suffixes = [text[prefix_length:] for text in unique]
    vectors: list[NDArray[np.float32]] = []
    rows = 0
    while len(vectors) < len(suffixes):
        if cancel is not None and cancel.is_set():
            raise Cancelled("the texts were cancelled")
        remaining = suffixes[len(vectors) : len(vectors) + MAX_CALL_TEXTS]
        pooled = host.call(
            functools.partial(pool_in_slices, purpose=purpose, prefix=prefix, texts=remaining, salt=salt)
        )
        vectors += pooled.vectors
        rows += pooled.rows
    for key, vector in zip(missing, vectors, strict=True):
        cache.add(key, vector)
        known[key] = vector
    return [known[key] for key in keys], rows


def embed_tokens(
    host: CallableHost,
    texts: Sequence[TokenList],
    *,
    limit: int,
    control_tokens: frozenset[int],
    cache: VectorCache,
    long_text: LongTextPolicy = "refuse",
    dimensions: int | None = None,
    salt: str = "",
    cancel: threading.Event | None = None,
) -> Embeddings:
    """Embed tokenized texts. The vector of a text in windows is their mean, weighted by their tokens."""
    if long_text not in ("refuse", "window"):
        raise InvalidArgument("long_text", f'must be "refuse" or "window", not {long_text!r}')
    for text in texts:
        if not len(text):
            raise InvalidArgument("text", "must have at least one token")
        if len(text) > limit and long_text == "refuse":
            raise PromptTooLong(len(text), limit)
    windows = [split_windows(text, limit, control_tokens) for text in texts]
    pieces = [window for text in windows for window in text]
    pooled, rows = pool_all(host, "embedding", pieces, cache=cache, salt=salt, cancel=cancel)
    vectors, position = [], 0
    for group in windows:
        own = normalize(np.stack(pooled[position : position + len(group)]))
        weights = np.array([len(window) for window in group], np.float32)
        vectors.append(own[0] if len(group) == 1 else normalize(weights @ own))
        position += len(group)
    matrix = np.stack(vectors)
    return Embeddings(
        vectors=matrix if dimensions is None else shorten_vectors(matrix, dimensions),
        token_counts=tuple(map(len, texts)),
        windows=tuple(map(len, windows)),
        computed_tokens=rows,
    )
