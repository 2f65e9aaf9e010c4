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
from afterglow.llama.checks import check_integer
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.media.resampling import count_resampled, resample
from afterglow.media.types import AudioData, ImageData, MediaData

Modality: TypeAlias = Literal["image", "audio"]
TEXT_CHUNK, IMAGE_CHUNK = 0, 1  # mtmd's numbers of what a chunk is
BATCH_FULL, BATCH_INCOMPATIBLE = 2, 3  # why a chunk does not go into a batch
MAX_IMAGE_SIDE_PIXELS = 2**15  # pixels; larger ones only cost memory, every projector shrinks them
MIN_AUDIO_SECONDS = (
    0.1  # seconds; shorter sounds are filled up with silence: mtmd aborts on one sample, some families on more
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSettings:
    """How to load a projector. The tokens of a picture are bounded where the projector can vary them."""

    use_gpu: bool = False
    threads: int = 0  # 0: llama.cpp's default
    image_min_tokens: int | None = None  # of one picture; None: the projector's own
    image_max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_integer("threads", self.threads, 0, 512)
        for name in ("image_min_tokens", "image_max_tokens"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, 1, 65_536)
        if self.image_min_tokens and self.image_max_tokens and self.image_min_tokens > self.image_max_tokens:
            raise InvalidArgument(
                "image_min_tokens", f"{self.image_min_tokens} is more than `image_max_tokens`, {self.image_max_tokens}"
            )


@dataclass(frozen=True, slots=True)
class ImageSize:
    """All of a picture that decides how much room it takes."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class AudioLength:
    """All of a sound that decides how much room it takes."""

    sample_rate: int
    sample_count: int  # of samples


MediaSize: TypeAlias = ImageSize | AudioLength


def get_media_size(content: MediaData) -> MediaSize:
    """What of a content decides how much room it takes.

    >>> measurable(Sound(rate=16_000, samples=bytes(4 * 800)))
    Length(rate=16000, count=800)
    """
    if isinstance(content, ImageData):
        return ImageSize(content.width, content.height)
    return AudioLength(content.sample_rate, len(content.samples) // 4)


@dataclass(frozen=True, slots=True)
class MediaChunk:
    """Rows that belong together: a picture, a tile of one, a stretch of sound."""

    cells: int
    positions: int  # steps that the text behind it is further; with M-RoPE another number than cells
    non_causal: bool  # its rows see one another, so they have to be computed in one go


MediaPlaceholder: TypeAlias = tuple[int | MediaChunk, ...]
"""What stands in the prompt for a picture or a sound: its pieces, and the tokens that the model wants around them."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaEmbedding:
    """An encoded piece: its rows, and for each where it stands, counted from the piece's first position.

    `offsets` has four numbers for a row: time, height, width, and one that is not used. Without M-RoPE the first
    counts.
    """

    rows: NDArray[np.float32]
    position_offsets: NDArray[np.int32]
    non_causal: bool

    def slice_rows(self, start: int, stop: int) -> MediaEmbedding:
        """Some of its rows."""
        return MediaEmbedding(self.rows[start:stop], self.position_offsets[start:stop], self.non_causal)

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + self.position_offsets.nbytes)


class Projector(Handle):
    """An mmproj file in memory, beside the model that it was made for; closed with it.

    `measure` is for any thread. Encoding takes its turn: mtmd encodes one batch at a time.

    >>> with Projector.load(model, Path("mmproj.gguf")) as projector:
    ...     projector.measure(Shape(640, 480))
    ...     ((embedding,),) = projector.encode([picture])
    """

    def __init__(self, pointer: Any, model: LlamaModel, path: Path, settings: ProjectorSettings) -> None:
        super().__init__("projector", pointer, parent=model)
        self._library = get_library()
        symbols = self._library.symbols
        self.model = model
        self.path = path
        self.settings = settings
        kinds: dict[Modality, bool] = {
            "image": symbols.mtmd_support_vision(pointer),
            "audio": symbols.mtmd_support_audio(pointer),
        }
        self.modalities: frozenset[Modality] = frozenset(kind for kind, can in kinds.items() if can)
        self.sample_rate: int = max(0, symbols.mtmd_get_audio_sample_rate(pointer))
        self._min_samples = int(MIN_AUDIO_SECONDS * self.sample_rate)  # samples
        self.uses_mrope = bool(symbols.mtmd_decode_use_mrope(pointer))
        self.embedding_width: int = symbols.llama_model_n_embd_inp(model.pointer)
        # Everything that shapes what comes out, beside the content. The model's file is in the keys of its states.
        parts = (self._library.build, compute_fingerprint(path), settings.image_min_tokens, settings.image_max_tokens)
        self.key = hashlib.sha256(repr(parts).encode()).digest()
        self.encoded_count = 0  # pictures and sounds so far
        self._encode_lock = threading.RLock()

    @classmethod
    def load(
        cls, model: LlamaModel, path: Path, settings: ProjectorSettings | None = None, *, trust: bool = False
    ) -> Projector:
        """Load a projector for `model`. One never seen with it is tried in a child process first, unless `trust`."""
        path, settings, opened = Path(path), settings or ProjectorSettings(), get_library()
        if not path.is_file():
            raise ModelNotFound(str(path), "there is no such projector file")
        if not trust:
            probe.ensure_safe(model.path, path)
        parameters = opened.symbols.mtmd_context_params_default()
        parameters.use_gpu = settings.use_gpu
        parameters.warmup = False
        parameters.print_timings = False
        parameters.n_threads = settings.threads or parameters.n_threads
        parameters.image_min_tokens = settings.image_min_tokens or -1
        parameters.image_max_tokens = settings.image_max_tokens or -1
        opened.log_bridge.take_error("")
        pointer = opened.symbols.mtmd_init_from_file(str(path).encode(), model.pointer, parameters)
        if pointer == opened.ffi.NULL:
            raise InvalidModel(str(path), opened.log_bridge.take_error("mtmd refused this projector without a word"))
        return cls(pointer, model, path, settings)

    def measure(self, content: MediaData | MediaSize) -> MediaPlaceholder:
        """What will stand in a prompt for this, without encoding it."""
        asked = get_media_size(content) if isinstance(content, MediaData) else content
        with self._open_bitmap(asked) as bitmap, self._tokenize_bitmap(bitmap) as chunks:
            measured: list[int | MediaChunk] = []
            for chunk in chunks:
                measured += (
                    self._read_tokens(chunk) if self._get_chunk_type(chunk) == TEXT_CHUNK else [self._read_chunk(chunk)]
                )
        return tuple(measured)

    def encode(self, contents: Sequence[MediaData]) -> list[list[MediaEmbedding]]:
        """The pieces of each, as rows; several at once, as many as mtmd takes together."""
        with self._encode_lock, ExitStack() as stack:
            groups: list[list[Any]] = []
            for content in contents:
                bitmap = stack.enter_context(self._open_bitmap(content))
                chunks = stack.enter_context(self._tokenize_bitmap(bitmap))
                groups.append([chunk for chunk in chunks if self._get_chunk_type(chunk) != TEXT_CHUNK])
            embeddings = iter(self._encode_chunks([chunk for group in groups for chunk in group]))
            self.encoded_count += len(contents)
            return [[next(embeddings) for _ in group] for group in groups]

    def close(self) -> None:
        """Free the projector, after an encoding that runs."""
        with self._encode_lock:
            super().close()

    def _free(self, pointer: Any) -> None:
        self._library.symbols.mtmd_free(pointer)

    # --- encoding

    def _encode_chunks(self, chunks: list[Any]) -> list[MediaEmbedding]:
        symbols = self._library.symbols
        done: list[MediaEmbedding] = []
        while len(done) < len(chunks):
            batch = symbols.mtmd_batch_init(self.pointer)
            try:
                taken = self._fill_batch(batch, chunks[len(done) :])
                self._check_code(symbols.mtmd_batch_encode(batch))
                done += [
                    self._read_embedding(chunk, symbols.mtmd_batch_get_output_embd(batch, chunk)) for chunk in taken
                ]
            finally:
                symbols.mtmd_batch_free(batch)
        return done

    def _fill_batch(self, batch: Any, chunks: list[Any]) -> list[Any]:
        """Add as many of the chunks as go together; at least one."""
        taken: list[Any] = []
        for chunk in chunks:
            code = self._library.symbols.mtmd_batch_add_chunk(batch, chunk)
            if code in (BATCH_FULL, BATCH_INCOMPATIBLE) and taken:
                break
            self._check_code(code)
            taken.append(chunk)
        return taken

    def _check_code(self, code: int) -> None:
        if code != 0:
            raise DecodeFailed(code, self._library.log_bridge.take_error("mtmd did not encode it and gave no reason"))

    def _read_embedding(self, chunk: Any, pointer: Any) -> MediaEmbedding:
        piece = self._read_chunk(chunk)
        if pointer == self._library.ffi.NULL:
            raise DecodeFailed(-1, "mtmd encoded a picture and gave nothing out")
        size = piece.cells * self.embedding_width * 4
        rows = np.frombuffer(self._library.ffi.buffer(pointer, size), dtype=np.float32).copy()
        return MediaEmbedding(
            rows.reshape(piece.cells, self.embedding_width),
            self._read_position_offsets(chunk, piece.cells),
            piece.non_causal,
        )

    def _read_position_offsets(self, chunk: Any, cells: int) -> NDArray[np.int32]:
        if self._get_chunk_type(chunk) != IMAGE_CHUNK or not self.uses_mrope:
            return np.repeat(np.arange(cells, dtype=np.int32)[:, None], 4, axis=1)
        image = self._library.symbols.mtmd_input_chunk_get_tokens_image(chunk)
        where = self._library.symbols.mtmd_image_tokens_get_decoder_pos
        places = [where(image, 0, row) for row in range(cells)]
        return np.array([(place.t, place.y, place.x, place.z) for place in places], dtype=np.int32)

    # --- what mtmd makes of a content

    @contextmanager
    def _open_bitmap(self, content: MediaData | MediaSize) -> Iterator[Any]:
        self._check_supported(content)
        ffi, symbols = self._library.ffi, self._library.symbols
        if isinstance(content, AudioData):
            samples = self._resample(content)
            bitmap = symbols.mtmd_bitmap_init_from_audio(len(samples), ffi.from_buffer("float[]", samples))
        elif isinstance(content, AudioLength):
            bitmap = symbols.mtmd_bitmap_init_from_audio(self._count_samples(content), ffi.NULL)
        else:
            pixels = ffi.from_buffer(content.pixels) if isinstance(content, ImageData) else ffi.NULL
            bitmap = symbols.mtmd_bitmap_init(content.width, content.height, pixels)
        try:
            yield bitmap
        finally:
            symbols.mtmd_bitmap_free(bitmap)

    def _check_supported(self, content: MediaData | MediaSize) -> None:
        kind: Modality = "audio" if isinstance(content, AudioData | AudioLength) else "image"
        if kind not in self.modalities:
            able = " and ".join(sorted(self.modalities)) or "nothing"
            raise UnsupportedMedia("content", f"the projector {self.path.name} takes {able}, not {kind}")
        if isinstance(content, ImageData | ImageSize) and max(content.width, content.height) > MAX_IMAGE_SIDE_PIXELS:
            size = f"{content.width} by {content.height}"
            raise UnsupportedMedia(
                "content", f"a picture of {size} is too large, the limit is {MAX_IMAGE_SIDE_PIXELS} on a side"
            )

    def _resample(self, audio: AudioData) -> NDArray[np.float32]:
        """A sound as the projector hears it: at its rate, and not too short."""
        samples = np.frombuffer(resample(audio, self.sample_rate).samples, np.float32)
        return np.pad(samples, (0, max(0, self._min_samples - len(samples))))

    def _count_samples(self, length: AudioLength) -> int:
        """How many samples the projector hears of a sound of this length."""
        return max(self._min_samples, count_resampled(length.sample_count, length.sample_rate, self.sample_rate))

    @contextmanager
    def _tokenize_bitmap(self, bitmap: Any) -> Iterator[list[Any]]:
        """What stands for it in a prompt, as mtmd has it."""
        ffi, symbols = self._library.ffi, self._library.symbols
        chunks = symbols.mtmd_input_chunks_init()
        try:
            marker = symbols.mtmd_get_marker(self.pointer)
            text = ffi.new("mtmd_input_text *", (marker, len(ffi.string(marker)), False, True))
            code = symbols.mtmd_tokenize(self.pointer, chunks, text, ffi.new("mtmd_bitmap *[]", [bitmap]), 1)
            if code != 0:
                raise UnsupportedMedia(
                    "content", self._library.log_bridge.take_error(f"mtmd refused it with code {code}")
                )
            yield [symbols.mtmd_input_chunks_get(chunks, row) for row in range(symbols.mtmd_input_chunks_size(chunks))]
        finally:
            symbols.mtmd_input_chunks_free(chunks)

    def _get_chunk_type(self, chunk: Any) -> int:
        return int(self._library.symbols.mtmd_input_chunk_get_type(chunk))

    def _read_tokens(self, chunk: Any) -> list[int | MediaChunk]:
        count = self._library.ffi.new("size_t *")
        tokens = self._library.symbols.mtmd_input_chunk_get_tokens_text(chunk, count)
        return [int(tokens[row]) for row in range(count[0])]

    def _read_chunk(self, chunk: Any) -> MediaChunk:
        symbols = self._library.symbols
        return MediaChunk(
            cells=symbols.mtmd_input_chunk_get_n_tokens(chunk),
            positions=symbols.mtmd_input_chunk_get_n_pos(chunk),
            non_causal=bool(symbols.mtmd_decode_use_non_causal(self.pointer, chunk)),
        )
