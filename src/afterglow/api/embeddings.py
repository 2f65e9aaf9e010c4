"""Embeddings of texts: windows of long texts, shortened vectors, and the calls that compute many texts per decode."""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
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
NAME_KEYS = ("general.name", "general.basename", "general.tags")


class CallableHost(Protocol):
    """The part of an engine host that runs functions on its engine."""

    def call(self, function: Callable[[Engine], PooledTexts]) -> PooledTexts: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """Vectors of texts, one row each, normalized to length 1.

    `token_counts` has the tokens of each text, `windows` the number of windows of each: several if it was too long for
    the model. `computed_tokens` is less than the sum of the tokens if texts are equal or share a prefix.

    >>> result = model.embed_texts(["a cat", "a dog"])
    >>> result.vectors.shape == (2, model.info.embedding_length), result.windows
    (True, (1, 1))
    """

    vectors: NDArray[np.float32]
    token_counts: tuple[int, ...]
    windows: tuple[int, ...]
    computed_tokens: int


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
    salt: str = "",
    cancel: threading.Event | None = None,
) -> tuple[list[NDArray[np.float32]], int]:
    """Return the pooled vector of each text, and the number of computed tokens.

    Equal texts are computed once. The engine serves other requests between the calls of the host.
    """
    unique = list(dict.fromkeys(tuple(text) for text in texts))
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
    by_text = dict(zip(unique, vectors, strict=True))
    return [by_text[tuple(text)] for text in texts], rows


def embed_tokens(
    host: CallableHost,
    texts: Sequence[TokenList],
    *,
    limit: int,
    control_tokens: frozenset[int],
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
    pooled, rows = pool_all(host, "embedding", pieces, salt=salt, cancel=cancel)
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
