"""A projector (an mmproj file): pictures and sounds as rows that the text model reads like embedded tokens.

It measures, encodes and says where rows stand. It keeps nothing that it encoded.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import DecodeFailed, InvalidArgument, InvalidModel, ModelNotFound, UnsupportedMedia
from afterglow.llama import probe
from afterglow.llama.arguments import integer
from afterglow.llama.fingerprint import fingerprint
from afterglow.llama.handle import Handle
from afterglow.llama.library import library
from afterglow.llama.model import Model
from afterglow.media.contents import Content, Picture, Sound
from afterglow.media.resampling import resampled, resampled_count

MediaKind: TypeAlias = Literal["image", "audio"]
TEXT, IMAGE = 0, 1  # mtmd's numbers of what a chunk is
FULL, INCOMPATIBLE = 2, 3  # why a chunk does not go into a batch
SIDE = 2**15  # pixels; larger ones only cost memory, every projector shrinks them
SHORTEST = 0.1  # seconds; shorter sounds are filled up with silence: mtmd aborts on one sample, some families on more


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSettings:
    """How to load a projector. The tokens of a picture are bounded where the projector can vary them."""

    gpu: bool = False
    threads: int = 0  # 0: llama.cpp's default
    min_tokens: int | None = None  # of one picture; None: the projector's own
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        integer("threads", self.threads, 0, 512)
        for name in ("min_tokens", "max_tokens"):
            if (value := getattr(self, name)) is not None:
                integer(name, value, 1, 65_536)
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise InvalidArgument("min_tokens", f"{self.min_tokens} is more than `max_tokens`, {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Shape:
    """All of a picture that decides how much room it takes."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Length:
    """All of a sound that decides how much room it takes."""

    rate: int
    count: int  # of samples


Measurable: TypeAlias = Shape | Length


def measurable(content: Content) -> Measurable:
    """What of a content decides how much room it takes.

    >>> measurable(Sound(rate=16_000, samples=bytes(4 * 800)))
    Length(rate=16000, count=800)
    """
    if isinstance(content, Picture):
        return Shape(content.width, content.height)
    return Length(content.rate, len(content.samples) // 4)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that belong together: a picture, a tile of one, a stretch of sound."""

    cells: int
    positions: int  # steps that the text behind it is further; with M-RoPE another number than cells
    whole: bool  # its rows see one another, so they have to be computed in one go


Measured: TypeAlias = tuple[int | Piece, ...]
"""What stands in the prompt for a picture or a sound: its pieces, and the tokens that the model wants around them."""


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """An encoded piece: its rows, and for each where it stands, counted from the piece's first position.

    `offsets` has four numbers for a row: time, height, width, and one that is not used. Without M-RoPE the first
    counts.
    """

    rows: NDArray[np.float32]
    offsets: NDArray[np.int32]
    whole: bool

    def cut(self, start: int, stop: int) -> Embedding:
        """Some of its rows."""
        return Embedding(self.rows[start:stop], self.offsets[start:stop], self.whole)

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + self.offsets.nbytes)


class Projector(Handle):
    """An mmproj file in memory, beside the model that it was made for; closed with it.

    `measure` is for any thread. Encoding takes its turn: mtmd encodes one batch at a time.

    >>> with Projector.load(model, Path("mmproj.gguf")) as projector:
    ...     projector.measure(Shape(640, 480))
    ...     ((embedding,),) = projector.encode([picture])
    """

    def __init__(self, pointer: Any, model: Model, path: Path, settings: ProjectorSettings) -> None:
        super().__init__("projector", pointer, parent=model)
        self._library = library()
        symbols = self._library.symbols
        self.model = model
        self.path = path
        self.settings = settings
        kinds: dict[MediaKind, bool] = {
            "image": symbols.mtmd_support_vision(pointer),
            "audio": symbols.mtmd_support_audio(pointer),
        }
        self.kinds: frozenset[MediaKind] = frozenset(kind for kind, can in kinds.items() if can)
        self.sample_rate: int = max(0, symbols.mtmd_get_audio_sample_rate(pointer))
        self._shortest = int(SHORTEST * self.sample_rate)  # samples
        self.mrope = bool(symbols.mtmd_decode_use_mrope(pointer))
        self.width: int = symbols.llama_model_n_embd_inp(model.pointer)
        # Everything that shapes what comes out, beside the content. The model's file is in the keys of its states.
        parts = (self._library.build, fingerprint(path), settings.min_tokens, settings.max_tokens)
        self.key = hashlib.sha256(repr(parts).encode()).digest()
        self.encodes = 0  # pictures and sounds so far
        self._using = threading.RLock()

    @classmethod
    def load(
        cls, model: Model, path: Path, settings: ProjectorSettings | None = None, *, trust: bool = False
    ) -> Projector:
        """Load a projector for `model`. One never seen with it is tried in a child process first, unless `trust`."""
        path, settings, opened = Path(path), settings or ProjectorSettings(), library()
        if not path.is_file():
            raise ModelNotFound(str(path), "there is no such projector file")
        if not trust:
            probe.ensure_safe(model.path, path)
        parameters = opened.symbols.mtmd_context_params_default()
        parameters.use_gpu = settings.gpu
        parameters.warmup = False
        parameters.print_timings = False
        parameters.n_threads = settings.threads or parameters.n_threads
        parameters.image_min_tokens = settings.min_tokens or -1
        parameters.image_max_tokens = settings.max_tokens or -1
        opened.log.take_error("")
        pointer = opened.symbols.mtmd_init_from_file(str(path).encode(), model.pointer, parameters)
        if pointer == opened.ffi.NULL:
            raise InvalidModel(str(path), opened.log.take_error("mtmd refused this projector without a word"))
        return cls(pointer, model, path, settings)

    def measure(self, content: Content | Measurable) -> Measured:
        """What will stand in a prompt for this, without encoding it."""
        asked = measurable(content) if isinstance(content, Content) else content
        with self._bitmap(asked) as bitmap, self._chunks(bitmap) as chunks:
            measured: list[int | Piece] = []
            for chunk in chunks:
                measured += self._tokens(chunk) if self._kind(chunk) == TEXT else [self._piece(chunk)]
        return tuple(measured)

    def encode(self, contents: Sequence[Content]) -> list[list[Embedding]]:
        """The pieces of each, as rows; several at once, as many as mtmd takes together."""
        with self._using, ExitStack() as stack:
            groups: list[list[Any]] = []
            for content in contents:
                bitmap = stack.enter_context(self._bitmap(content))
                chunks = stack.enter_context(self._chunks(bitmap))
                groups.append([chunk for chunk in chunks if self._kind(chunk) != TEXT])
            embeddings = iter(self._encode([chunk for group in groups for chunk in group]))
            self.encodes += len(contents)
            return [[next(embeddings) for _ in group] for group in groups]

    def close(self) -> None:
        """Free the projector, after an encoding that runs."""
        with self._using:
            super().close()

    def _free(self, pointer: Any) -> None:
        self._library.symbols.mtmd_free(pointer)

    # --- encoding

    def _encode(self, chunks: list[Any]) -> list[Embedding]:
        symbols = self._library.symbols
        done: list[Embedding] = []
        while len(done) < len(chunks):
            batch = symbols.mtmd_batch_init(self.pointer)
            try:
                taken = self._fill(batch, chunks[len(done) :])
                self._checked(symbols.mtmd_batch_encode(batch))
                done += [self._embedding(chunk, symbols.mtmd_batch_get_output_embd(batch, chunk)) for chunk in taken]
            finally:
                symbols.mtmd_batch_free(batch)
        return done

    def _fill(self, batch: Any, chunks: list[Any]) -> list[Any]:
        """Add as many of the chunks as go together; at least one."""
        taken: list[Any] = []
        for chunk in chunks:
            code = self._library.symbols.mtmd_batch_add_chunk(batch, chunk)
            if code in (FULL, INCOMPATIBLE) and taken:
                break
            self._checked(code)
            taken.append(chunk)
        return taken

    def _checked(self, code: int) -> None:
        if code != 0:
            raise DecodeFailed(code, self._library.log.take_error("mtmd did not encode it and gave no reason"))

    def _embedding(self, chunk: Any, pointer: Any) -> Embedding:
        piece = self._piece(chunk)
        if pointer == self._library.ffi.NULL:
            raise DecodeFailed(-1, "mtmd encoded a picture and gave nothing out")
        size = piece.cells * self.width * 4
        rows = np.frombuffer(self._library.ffi.buffer(pointer, size), dtype=np.float32).copy()
        return Embedding(rows.reshape(piece.cells, self.width), self._offsets(chunk, piece.cells), piece.whole)

    def _offsets(self, chunk: Any, cells: int) -> NDArray[np.int32]:
        if self._kind(chunk) != IMAGE or not self.mrope:
            return np.repeat(np.arange(cells, dtype=np.int32)[:, None], 4, axis=1)
        image = self._library.symbols.mtmd_input_chunk_get_tokens_image(chunk)
        where = self._library.symbols.mtmd_image_tokens_get_decoder_pos
        places = [where(image, 0, row) for row in range(cells)]
        return np.array([(place.t, place.y, place.x, place.z) for place in places], dtype=np.int32)

    # --- what mtmd makes of a content

    @contextmanager
    def _bitmap(self, content: Content | Measurable) -> Iterator[Any]:
        self._check(content)
        ffi, symbols = self._library.ffi, self._library.symbols
        if isinstance(content, Sound):
            samples = self._samples(content)
            bitmap = symbols.mtmd_bitmap_init_from_audio(len(samples), ffi.from_buffer("float[]", samples))
        elif isinstance(content, Length):
            bitmap = symbols.mtmd_bitmap_init_from_audio(self._count(content), ffi.NULL)
        else:
            pixels = ffi.from_buffer(content.pixels) if isinstance(content, Picture) else ffi.NULL
            bitmap = symbols.mtmd_bitmap_init(content.width, content.height, pixels)
        try:
            yield bitmap
        finally:
            symbols.mtmd_bitmap_free(bitmap)

    def _check(self, content: Content | Measurable) -> None:
        kind: MediaKind = "audio" if isinstance(content, Sound | Length) else "image"
        if kind not in self.kinds:
            able = " and ".join(sorted(self.kinds)) or "nothing"
            raise UnsupportedMedia("content", f"the projector {self.path.name} takes {able}, not {kind}")
        if isinstance(content, Picture | Shape) and max(content.width, content.height) > SIDE:
            size = f"{content.width} by {content.height}"
            raise UnsupportedMedia("content", f"a picture of {size} is too large, the limit is {SIDE} on a side")

    def _samples(self, sound: Sound) -> NDArray[np.float32]:
        """A sound as the projector hears it: at its rate, and not too short."""
        samples = np.frombuffer(resampled(sound, self.sample_rate).samples, np.float32)
        return np.pad(samples, (0, max(0, self._shortest - len(samples))))

    def _count(self, length: Length) -> int:
        """How many samples the projector hears of a sound of this length."""
        return max(self._shortest, resampled_count(length.count, length.rate, self.sample_rate))

    @contextmanager
    def _chunks(self, bitmap: Any) -> Iterator[list[Any]]:
        """What stands for it in a prompt, as mtmd has it."""
        ffi, symbols = self._library.ffi, self._library.symbols
        chunks = symbols.mtmd_input_chunks_init()
        try:
            marker = symbols.mtmd_get_marker(self.pointer)
            text = ffi.new("mtmd_input_text *", (marker, len(ffi.string(marker)), False, True))
            code = symbols.mtmd_tokenize(self.pointer, chunks, text, ffi.new("mtmd_bitmap *[]", [bitmap]), 1)
            if code != 0:
                raise UnsupportedMedia("content", self._library.log.take_error(f"mtmd refused it with code {code}"))
            yield [symbols.mtmd_input_chunks_get(chunks, row) for row in range(symbols.mtmd_input_chunks_size(chunks))]
        finally:
            symbols.mtmd_input_chunks_free(chunks)

    def _kind(self, chunk: Any) -> int:
        return int(self._library.symbols.mtmd_input_chunk_get_type(chunk))

    def _tokens(self, chunk: Any) -> list[int | Piece]:
        count = self._library.ffi.new("size_t *")
        tokens = self._library.symbols.mtmd_input_chunk_get_tokens_text(chunk, count)
        return [int(tokens[row]) for row in range(count[0])]

    def _piece(self, chunk: Any) -> Piece:
        symbols = self._library.symbols
        return Piece(
            cells=symbols.mtmd_input_chunk_get_n_tokens(chunk),
            positions=symbols.mtmd_input_chunk_get_n_pos(chunk),
            whole=bool(symbols.mtmd_decode_use_non_causal(self.pointer, chunk)),
        )
