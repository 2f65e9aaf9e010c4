"""Multimodal projector (mmproj file): encodes images and audio to rows that the text model reads like token embeddings.

It measures and encodes media and computes row positions. It caches nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afterglow.errors import DecodeFailed, InvalidArgument, InvalidModel, ModelNotFound, UnsupportedMedia
from afterglow.llama.checks import check_integer
from afterglow.llama.gguf import probe
from afterglow.llama.gguf.fingerprint import compute_fingerprint
from afterglow.llama.handle import Handle
from afterglow.llama.library.loader import get_library
from afterglow.llama.model import LlamaModel
from afterglow.media.policy import Modality
from afterglow.media.resampling import count_resampled, resample
from afterglow.media.types import AudioData, ImageData, MediaData

TEXT_CHUNK, IMAGE_CHUNK = 0, 1  # mtmd's chunk types
BATCH_FULL, BATCH_INCOMPATIBLE = 2, 3  # mtmd's codes for a chunk that cannot be added to a batch
MAX_IMAGE_SIDE_PIXELS = 2**15  # larger images only cost memory: every projector scales them down
MIN_AUDIO_SECONDS = 0.1  # shorter audio is padded with silence: mtmd aborts on one sample, some families on more


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSettings:
    """Settings for loading a projector. The token limits apply to projectors with a variable number of tokens."""

    use_gpu: bool = False
    threads: int = 0  # 0: llama.cpp's default
    image_min_tokens: int | None = None  # per image; None: the projector's default
    image_max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_integer("threads", self.threads, 0, 512)
        for name in ("image_min_tokens", "image_max_tokens"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, 1, 65_536)
        if self.image_min_tokens and self.image_max_tokens and self.image_min_tokens > self.image_max_tokens:
            reason = f"{self.image_min_tokens} is more than `image_max_tokens`, {self.image_max_tokens}"
            raise InvalidArgument("image_min_tokens", reason)


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The properties of an image that determine its number of tokens."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class AudioLength:
    """The properties of audio that determine its number of tokens."""

    sample_rate: int
    sample_count: int


MediaSize: TypeAlias = ImageSize | AudioLength


def get_media_size(content: MediaData) -> MediaSize:
    """Return the properties of media that determine its number of tokens.

    >>> get_media_size(AudioData(sample_rate=16_000, samples=bytes(4 * 800)))
    AudioLength(sample_rate=16000, sample_count=800)
    """
    if isinstance(content, ImageData):
        return ImageSize(content.width, content.height)
    return AudioLength(content.sample_rate, len(content.samples) // 4)


@dataclass(frozen=True, slots=True)
class MediaChunk:
    """Rows that belong together: an image, a tile of an image, or a section of audio."""

    cells: int
    positions: int  # by how much the position of the following text advances; differs from `cells` with M-RoPE
    non_causal: bool  # its rows attend to one another, so they must be decoded together


MediaPlaceholder: TypeAlias = tuple[int | MediaChunk, ...]
"""Prompt entries of an image or of audio: its chunks, and the tokens that the model expects around them."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaEmbedding:
    """An encoded chunk: its rows and their position offsets from the first position of the chunk.

    `position_offsets` has four numbers per row: time, height, width, and an unused one. Without M-RoPE only the first
    is used.
    """

    rows: NDArray[np.float32]
    position_offsets: NDArray[np.int32]
    non_causal: bool

    def slice_rows(self, start: int, stop: int) -> MediaEmbedding:
        """Return rows [start, stop) as an embedding."""
        return MediaEmbedding(self.rows[start:stop], self.position_offsets[start:stop], self.non_causal)

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes + self.position_offsets.nbytes)


class Projector(Handle):
    """A loaded mmproj file. It belongs to a model and is closed with it.

    `measure` is thread-safe. `encode` calls are serialized: mtmd encodes one batch at a time.

    >>> with Projector.load(model, Path("mmproj.gguf")) as projector:
    ...     plan = projector.measure(ImageSize(640, 480))
    ...     ((embedding,),) = projector.encode([image])
    """

    def __init__(self, pointer: Any, model: LlamaModel, path: Path, settings: ProjectorSettings) -> None:
        self._library = get_library()
        symbols = self._library.symbols
        super().__init__("projector", pointer, symbols.mtmd_free, parent=model)
        self.model = model
        self.path = path
        self.settings = settings
        support: dict[Modality, bool] = {
            "image": symbols.mtmd_support_vision(pointer),
            "audio": symbols.mtmd_support_audio(pointer),
        }
        self.modalities: frozenset[Modality] = frozenset(modality for modality, has in support.items() if has)
        self.sample_rate: int = max(0, symbols.mtmd_get_audio_sample_rate(pointer))
        self._min_samples = int(MIN_AUDIO_SECONDS * self.sample_rate)
        self.uses_mrope = bool(symbols.mtmd_decode_use_mrope(pointer))
        self.embedding_width: int = symbols.llama_model_n_embd_inp(model.pointer)
        # Everything that affects the embeddings, except the media itself. The state keys contain the model's file.
        parts = (self._library.build, compute_fingerprint(path), settings.image_min_tokens, settings.image_max_tokens)
        self.key = hashlib.sha256(repr(parts).encode()).digest()
        self.encoded_count = 0  # encoded images and audio clips
        self._encode_lock = threading.RLock()

    @classmethod
    def load(
        cls, model: LlamaModel, path: Path, settings: ProjectorSettings | None = None, *, trust: bool = False
    ) -> Projector:
        """Load a projector for `model`. A new pair is first loaded in a child process, unless `trust` is set."""
        path, settings, library = Path(path), settings or ProjectorSettings(), get_library()
        if not path.is_file():
            raise ModelNotFound(str(path), "there is no such projector file")
        if not trust:
            probe.ensure_safe(model.path, path)
        parameters = library.symbols.mtmd_context_params_default()
        parameters.use_gpu = settings.use_gpu
        parameters.warmup = False
        parameters.print_timings = False
        parameters.n_threads = settings.threads or parameters.n_threads
        parameters.image_min_tokens = settings.image_min_tokens or -1
        parameters.image_max_tokens = settings.image_max_tokens or -1
        library.log_bridge.take_error("")
        pointer = library.symbols.mtmd_init_from_file(str(path).encode(), model.pointer, parameters)
        if pointer == library.ffi.NULL:
            reason = library.log_bridge.take_error("mtmd rejected this projector and gave no reason")
            raise InvalidModel(str(path), reason)
        return cls(pointer, model, path, settings)

    def measure(self, content: MediaData | MediaSize) -> MediaPlaceholder:
        """Return the prompt entries of this media without encoding it."""
        size = get_media_size(content) if isinstance(content, MediaData) else content
        with self._open_bitmap(size) as bitmap, self._tokenize_bitmap(bitmap) as chunks:
            placeholder: list[int | MediaChunk] = []
            for chunk in chunks:
                is_text = self._get_chunk_type(chunk) == TEXT_CHUNK
                placeholder += self._read_tokens(chunk) if is_text else [self._read_chunk(chunk)]
        return tuple(placeholder)

    def encode(self, contents: Sequence[MediaData]) -> list[list[MediaEmbedding]]:
        """Encode media to the embeddings of its chunks, in batches as large as mtmd allows."""
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
        """Free the projector; waits for a running `encode`."""
        with self._encode_lock:
            super().close()

    # --- encoding

    def _encode_chunks(self, chunks: list[Any]) -> list[MediaEmbedding]:
        symbols = self._library.symbols
        embeddings: list[MediaEmbedding] = []
        while len(embeddings) < len(chunks):
            batch = symbols.mtmd_batch_init(self.pointer)
            try:
                added: list[Any] = []
                for chunk in chunks[len(embeddings) :]:  # as many as the batch accepts, at least one
                    code = symbols.mtmd_batch_add_chunk(batch, chunk)
                    if code in (BATCH_FULL, BATCH_INCOMPATIBLE) and added:
                        break
                    self._check_code(code)
                    added.append(chunk)
                self._check_code(symbols.mtmd_batch_encode(batch))
                embeddings += [self._read_embedding(batch, chunk) for chunk in added]
            finally:
                symbols.mtmd_batch_free(batch)
        return embeddings

    def _check_code(self, code: int) -> None:
        if code != 0:
            raise DecodeFailed(code, self._library.log_bridge.take_error("mtmd failed to encode and gave no reason"))

    def _read_embedding(self, batch: Any, chunk: Any) -> MediaEmbedding:
        media_chunk = self._read_chunk(chunk)
        pointer = self._library.symbols.mtmd_batch_get_output_embd(batch, chunk)
        if pointer == self._library.ffi.NULL:
            raise DecodeFailed(-1, "mtmd encoded a chunk and returned no embedding")
        size = media_chunk.cells * self.embedding_width * 4
        floats = np.frombuffer(self._library.ffi.buffer(pointer, size), dtype=np.float32).copy()
        rows = floats.reshape(media_chunk.cells, self.embedding_width)
        return MediaEmbedding(rows, self._read_position_offsets(chunk, media_chunk.cells), media_chunk.non_causal)

    def _read_position_offsets(self, chunk: Any, cells: int) -> NDArray[np.int32]:
        if self._get_chunk_type(chunk) != IMAGE_CHUNK or not self.uses_mrope:
            return np.repeat(np.arange(cells, dtype=np.int32)[:, None], 4, axis=1)
        image = self._library.symbols.mtmd_input_chunk_get_tokens_image(chunk)
        get_position = self._library.symbols.mtmd_image_tokens_get_decoder_pos
        positions = [get_position(image, 0, row) for row in range(cells)]
        return np.array([(position.t, position.y, position.x, position.z) for position in positions], dtype=np.int32)

    # --- media as mtmd bitmaps and chunks

    @contextmanager
    def _open_bitmap(self, content: MediaData | MediaSize) -> Iterator[Any]:
        self._check_supported(content)
        ffi, symbols = self._library.ffi, self._library.symbols
        if isinstance(content, AudioData):
            samples = np.frombuffer(resample(content, self.sample_rate).samples, np.float32)
            samples = np.pad(samples, (0, max(0, self._min_samples - len(samples))))
            bitmap = symbols.mtmd_bitmap_init_from_audio(len(samples), ffi.from_buffer("float[]", samples))
        elif isinstance(content, AudioLength):
            count = count_resampled(content.sample_count, content.sample_rate, self.sample_rate)
            bitmap = symbols.mtmd_bitmap_init_from_audio(max(count, self._min_samples), ffi.NULL)
        else:
            pixels = ffi.from_buffer(content.pixels) if isinstance(content, ImageData) else ffi.NULL
            bitmap = symbols.mtmd_bitmap_init(content.width, content.height, pixels)
        try:
            yield bitmap
        finally:
            symbols.mtmd_bitmap_free(bitmap)

    def _check_supported(self, content: MediaData | MediaSize) -> None:
        modality: Modality = "audio" if isinstance(content, AudioData | AudioLength) else "image"
        if modality not in self.modalities:
            supported = " and ".join(sorted(self.modalities)) or "nothing"
            raise UnsupportedMedia("content", f"the projector {self.path.name} supports {supported}, not {modality}")
        if isinstance(content, ImageData | ImageSize) and max(content.width, content.height) > MAX_IMAGE_SIDE_PIXELS:
            size = f"an image of {content.width} by {content.height} pixels"
            raise UnsupportedMedia("content", f"{size} is too large, the limit is {MAX_IMAGE_SIDE_PIXELS} per side")

    @contextmanager
    def _tokenize_bitmap(self, bitmap: Any) -> Iterator[list[Any]]:
        """Yield mtmd's chunks of a prompt that consists of this bitmap."""
        ffi, symbols = self._library.ffi, self._library.symbols
        chunks = symbols.mtmd_input_chunks_init()
        try:
            marker = symbols.mtmd_get_marker(self.pointer)
            text = ffi.new("mtmd_input_text *", (marker, len(ffi.string(marker)), False, True))
            code = symbols.mtmd_tokenize(self.pointer, chunks, text, ffi.new("mtmd_bitmap *[]", [bitmap]), 1)
            if code != 0:
                reason = self._library.log_bridge.take_error(f"mtmd rejected it with code {code}")
                raise UnsupportedMedia("content", reason)
            count = symbols.mtmd_input_chunks_size(chunks)
            yield [symbols.mtmd_input_chunks_get(chunks, index) for index in range(count)]
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
