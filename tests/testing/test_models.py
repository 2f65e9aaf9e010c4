"""llama.cpp loads every tiny model, and each behaves as constructed.

Calls llama.cpp natively: tests the files, not the binding.
"""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt
import pytest

from afterglow.errors import ModelNotFound
from afterglow.llama.library.declarations import DECLARATIONS
from afterglow.testing import models
from afterglow.testing.models import constructed, vocabulary

pytestmark = pytest.mark.native

MTP_MODELS = ["attention-mtp", "window-chained", "window-chained-short", "hybrid-mtp"]
RANDOM_MODELS = ["attention", "draft", "window", "recurrent", "hybrid", *MTP_MODELS]
ADAPTERS = {"adapter": "attention"} | {
    f"adapter-{kind}-{suffix}": kind
    for kind in ("attention", "window", "recurrent", "hybrid")
    for suffix in ("a", "b", "c", "activated")
}
SUCCESSORS = [name for name in models.list_names() if name.startswith("successor-")]
TEXT_MODELS = [*RANDOM_MODELS, *SUCCESSORS]

PROJECTORS = {"projector-llava": "attention", "projector-gemma3": "window", "projector-qwen": "hybrid"}

FloatArray = npt.NDArray[np.float32]
ffi = cffi.FFI()
ffi.cdef(DECLARATIONS)


@ffi.callback("void(enum ggml_log_level, const char *, void *)")
def silence(level: int, text: Any, data: Any) -> None:
    """Discard llama.cpp's log."""


@pytest.fixture(scope="module")
def lib() -> Iterator[Any]:
    specification = importlib.util.find_spec("xllamacpp")
    assert specification is not None
    assert specification.origin is not None
    library = ffi.dlopen(str(Path(specification.origin).parent / "xllamacpp.abi3.so"))
    callback, data = ffi.new("ggml_log_callback *"), ffi.new("void **")
    library.llama_log_get(callback, data)
    library.llama_log_set(silence, ffi.NULL)
    library.llama_backend_init()
    yield library
    library.llama_log_set(callback[0], data[0])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


class Session:
    """One model and one context."""

    def __init__(self, lib: Any, path: Path, stack: ExitStack, **options: Any) -> None:
        self.lib = lib
        loading = lib.llama_model_default_params()
        loading.load_mtp = True  # not the default; an MTP context of a model without its head aborts
        self.model = lib.llama_model_load_from_file(str(path).encode(), loading)
        assert self.model != ffi.NULL
        stack.callback(lib.llama_model_free, self.model)
        parameters = lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 512, 1, 1
        parameters.swa_full = False  # the default keeps cells that left the window
        for name, value in options.items():
            setattr(parameters, name, value)
        self.context = lib.llama_init_from_model(self.model, parameters)
        assert self.context != ffi.NULL
        stack.callback(lib.llama_free, self.context)
        self.vocabulary = lib.llama_model_get_vocab(self.model)

    def tokenize(self, text: bytes) -> list[int]:
        tokens = ffi.new("llama_token[]", len(text) + 2)
        count = self.lib.llama_tokenize(self.vocabulary, text, len(text), tokens, len(tokens), True, True)
        return list(tokens[0:count])

    def detokenize(self, tokens: list[int]) -> bytes:
        text = ffi.new("char[]", 1024)
        count = self.lib.llama_detokenize(self.vocabulary, tokens, len(tokens), text, len(text), False, True)
        return bytes(ffi.buffer(text, count))

    def decode(self, tokens: list[int]) -> FloatArray:
        """Append tokens; return the logits after the last."""
        buffer = ffi.new("llama_token[]", tokens)
        assert self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(buffer, len(tokens))) == 0
        return self.array(self.lib.llama_get_logits_ith(self.context, -1), vocabulary.VOCABULARY_SIZE)

    def draft_after(self, token: int, position: int, state: FloatArray) -> int:
        """Return the token that the MTP head drafts."""
        batch = self.lib.llama_batch_ext_init(self.context)
        row = self.lib.llama_batch_ext_add_token(batch, 0, token)
        data = ffi.from_buffer("float[]", state)
        assert self.lib.llama_batch_ext_set_embd_state(batch, row, (data, 1, len(state)))
        assert self.lib.llama_batch_ext_set_pos(batch, row, ffi.new("llama_pos[]", [position]))
        assert self.lib.llama_batch_ext_set_output_logits(batch, row, True)
        assert self.lib.llama_process(self.context, self.lib.LLAMA_PROCESS_TYPE_DECODE, batch) == 0
        self.lib.llama_batch_ext_free(batch)
        return int(self.array(self.lib.llama_get_logits_ith(self.context, -1), vocabulary.VOCABULARY_SIZE).argmax())

    @staticmethod
    def array(numbers: Any, count: int) -> FloatArray:
        assert numbers != ffi.NULL
        return np.frombuffer(ffi.buffer(numbers, 4 * count), np.float32).copy()

    def save_state(self) -> bytes:
        """Return the state of the sequence."""
        size = self.lib.llama_state_seq_get_size(self.context, 0)
        data = ffi.new("uint8_t[]", size)
        assert self.lib.llama_state_seq_get_data(self.context, data, size, 0) == size
        return bytes(ffi.buffer(data))


Load = Callable[..., AbstractContextManager[Session]]


@pytest.fixture
def load(lib: Any, directory: Path) -> Load:
    @contextmanager
    def session(name: str, **options: Any) -> Iterator[Session]:
        with ExitStack() as stack:
            yield Session(lib, models.get_path(name, directory), stack, **options)

    return session


def test_all_documented_models_exist() -> None:
    pairs = {"colors", "projector-colors", "notes", "projector-notes"}
    audio = {"projector-wave", "projector-ultravox", "projector-both"}
    rerankers = {"reranker", "reranker-causal"}
    assert set(models.list_names()) == {
        *TEXT_MODELS,
        *PROJECTORS,
        *pairs,
        *audio,
        *rerankers,
        "embedding",
        *ADAPTERS,
        "experts",
    }
    assert len(SUCCESSORS) == 8


def test_an_unknown_name_raises_model_not_found() -> None:
    with pytest.raises(ModelNotFound, match="successor-window"):
        models.get_path("gigantic")


@pytest.mark.parametrize("name", models.list_names())
def test_a_model_is_byte_identical_in_every_directory(name: str, tmp_path: Path) -> None:
    first, second = (models.get_path(name, tmp_path / place) for place in ("here", "there"))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert [file.name for file in first.parent.iterdir()] == [first.name]


def test_an_existing_model_is_not_written_again(tmp_path: Path) -> None:
    written = models.get_path("draft", tmp_path).stat()
    assert models.get_path("draft", tmp_path).stat() == written


def test_the_environment_sets_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_CACHE", str(tmp_path))
    assert models.get_path("draft").parent == tmp_path / "tiny"
    for module in (models, constructed, vocabulary):
        assert doctest.testmod(module).failed == 0


def test_concurrent_processes_write_one_valid_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from afterglow.testing import models; "
        "models.get_path('window', Path(sys.argv[1]))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "race")]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]
    (written,) = (tmp_path / "race").iterdir()
    assert written.read_bytes() == models.get_path("window", tmp_path).read_bytes()


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_model_decodes_to_finite_logits(name: str, load: Load) -> None:
    with load(name) as session:
        logits = session.decode(session.tokenize(b"<|im_start|>user\nWhere is the cat?<|im_end|>\n"))
        assert np.isfinite(logits).all()
        assert len(np.unique(logits)) > 0.99 * len(logits)
        assert session.lib.llama_model_n_ctx_train(session.model) == 4096


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_model_has_the_memory_kind_of_its_name(name: str, load: Load) -> None:
    with load(name) as session:
        lib, model = session.lib, session.model
        assert lib.llama_model_is_recurrent(model) == ("recurrent" in name)
        assert lib.llama_model_is_hybrid(model) == ("hybrid" in name or "successor-mtp" in name)
        assert lib.llama_model_n_swa(model) == (32 if "window" in name or "chained" in name else 0)
        assert lib.llama_model_n_layer_nextn(model) == ("mtp" in name or "headed" in name) + 2 * ("chained" in name)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_all_text_models_tokenize_every_byte_alike(name: str, load: Load) -> None:
    with load(name) as session:
        for byte in range(256):
            assert session.detokenize([vocabulary.get_byte_token(byte)]) == bytes([byte])
        text = "Naïve: \x01 \t\n 日本語 🙂 .".encode()
        assert session.detokenize(session.tokenize(text)) == text
        assert session.tokenize(b"<|im_start|>the") == [vocabulary.TURN_START_TOKEN, vocabulary.TOKENS.index("the")]
        assert session.lib.llama_vocab_n_tokens(session.vocabulary) == vocabulary.VOCABULARY_SIZE
        assert session.lib.llama_vocab_eot(session.vocabulary) == vocabulary.TURN_END_TOKEN
        assert vocabulary.VOCABULARY_SIZE % 32 == 0


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_the_first_token_of_a_long_prompt_affects_a_random_model(name: str, load: Load) -> None:
    prompt = compute_logits(load, name, b"a" + b"The cat sat on the mat. " * 5)
    other = compute_logits(load, name, b"b" + b"The cat sat on the mat. " * 5)
    assert np.abs(prompt - other).max() > 0.01


def compute_logits(load: Load, name: str, prompt: bytes) -> FloatArray:
    with load(name) as session:
        return session.decode(session.tokenize(prompt))


def test_an_mtp_head_does_not_change_the_logits(load: Load) -> None:
    without_head, with_head = (compute_logits(load, name, b"The cat sat on") for name in ("hybrid", "hybrid-mtp"))
    assert np.array_equal(without_head, with_head)


@pytest.mark.parametrize("name", SUCCESSORS)
@pytest.mark.parametrize("prompt", [models.CYCLE[:5], b"<|im_start|>user\nHello?<|im_end|>\n"])
def test_a_successor_model_follows_its_cycle(name: str, prompt: bytes, load: Load) -> None:
    with load(name) as session:
        tokens = session.tokenize(prompt)
        for step in range(40):
            logits = session.decode(tokens if step == 0 else tokens[-1:])
            second, first = np.sort(logits)[-2:]
            assert first - second > 1.0
            tokens.append(int(logits.argmax()))
            assert tokens[-1] == models.get_successor(tokens[-2])
        start = models.CYCLE.index(prompt[-1] + 1) if prompt[-1] in models.CYCLE else 0
        assert session.detokenize(tokens[-40:]) == (models.CYCLE * 3)[start : start + 40]


def test_the_repeated_cycle_is_one_token_per_byte(load: Load) -> None:
    with load("successor-attention") as session:
        text = models.CYCLE * 3
        assert session.tokenize(text) == [vocabulary.get_byte_token(byte) for byte in text]


@pytest.mark.parametrize("name", SUCCESSORS)
def test_the_blocks_of_a_successor_model_fill_the_memory_and_add_nothing_to_the_logits(name: str, load: Load) -> None:
    states, logits = [], []
    for prompt in (b"abcdefgh", b"abcXefgh"):
        with load(name) as session:
            logits.append(session.decode(session.tokenize(prompt)))
            states.append(np.frombuffer(session.save_state(), np.uint8))
    assert np.array_equal(*logits)
    assert len(states[0]) == len(states[1])
    assert np.count_nonzero(states[0]) > len(states[0]) // 2
    assert np.count_nonzero(states[0] != states[1]) > 64


@pytest.mark.parametrize(("name", "accepted"), [("successor-mtp", 28), ("successor-mtp-75", 21)])
def test_an_mtp_head_drafts_the_documented_number_of_correct_tokens(
    name: str, accepted: int, load: Load, lib: Any
) -> None:
    with load(name, ctx_type=lib.LLAMA_CONTEXT_TYPE_MTP) as session:
        state = np.ones(constructed.EMBEDDING_LENGTH, np.float32)
        cycle = [vocabulary.get_byte_token(byte) for byte in models.CYCLE]
        drafts = [session.draft_after(token, position, state) for position, token in enumerate(cycle)]
    correct = {token: draft == models.get_successor(token) for token, draft in zip(cycle, drafts, strict=True)}
    assert sum(correct.values()) == accepted
    assert all(correct[token] or token in constructed.MISDRAFTED_TOKENS for token in cycle)


def test_texts_with_common_words_have_close_embeddings(load: Load) -> None:
    with load("embedding", embeddings=True) as session:
        lib = session.lib

        def embed(text: bytes) -> FloatArray:
            tokens = ffi.new("llama_token[]", session.tokenize(text))
            assert lib.llama_decode(session.context, lib.llama_batch_get_one(tokens, len(tokens))) == 0
            vector = session.array(lib.llama_get_embeddings_seq(session.context, 0), 64)
            return vector / np.linalg.norm(vector)

        text, longer, changed, other = map(embed, (b"the cat sat", b"the cat sat on", b"the cat ran", b"queen world?"))
        assert np.isfinite(text).all()
        assert text @ longer > text @ changed > text @ other
        assert len(session.tokenize(b"the cat sat")) == 5  # with [CLS] and [SEP]


@pytest.mark.parametrize(("adapter_name", "name"), [("adapter", "successor-attention"), *ADAPTERS.items()])
def test_an_adapter_changes_the_logits_of_its_model(adapter_name: str, name: str, load: Load, directory: Path) -> None:
    plain = compute_logits(load, name, b"the cat")
    with load(name) as session:
        lib = session.lib
        adapter = lib.llama_adapter_lora_init(session.model, str(models.get_path(adapter_name, directory)).encode())
        assert adapter != ffi.NULL
        adapters, scales = ffi.new("struct llama_adapter_lora *[]", [adapter]), ffi.new("float[]", [1.0])
        assert lib.llama_set_adapters_lora(session.context, adapters, 1, scales) == 0
        adapted = session.decode(session.tokenize(b"the cat"))
    assert np.isfinite(adapted).all()
    assert np.abs(plain - adapted).max() > 0.5


@pytest.mark.parametrize(("name", "model"), PROJECTORS.items())
def test_a_projector_encodes_an_image_to_embeddings_of_its_model(
    name: str, model: str, load: Load, directory: Path
) -> None:
    with load(model) as session, ExitStack() as stack:
        lib = session.lib
        parameters = lib.mtmd_context_params_default()
        parameters.use_gpu, parameters.warmup, parameters.n_threads = False, False, 1
        projector = lib.mtmd_init_from_file(str(models.get_path(name, directory)).encode(), session.model, parameters)
        assert projector != ffi.NULL
        stack.callback(lib.mtmd_free, projector)
        assert lib.mtmd_decode_use_mrope(projector) == (name == "projector-qwen")
        dark, bright = (encode_image(session, projector, shade, name) for shade in (10, 240))
        assert np.isfinite(dark).all()
        assert np.abs(dark - bright).max() > 0.1


def encode_image(session: Session, projector: Any, shade: int, name: str) -> FloatArray:
    """Encode an image of one color, and check the positions of this projector type."""
    lib = session.lib
    with ExitStack() as stack:
        bitmap = lib.mtmd_bitmap_init(64, 48, bytes([shade, 128, 255 - shade]) * (64 * 48))
        stack.callback(lib.mtmd_bitmap_free, bitmap)
        chunks = lib.mtmd_input_chunks_init()
        stack.callback(lib.mtmd_input_chunks_free, chunks)
        text = ffi.new("char[]", b"See " + ffi.string(lib.mtmd_default_marker()) + b" here")
        input_text = ffi.new("mtmd_input_text *", (text, len(text) - 1, True, True))
        assert lib.mtmd_tokenize(projector, chunks, input_text, ffi.new("mtmd_bitmap *[]", [bitmap]), 1) == 0
        items = (lib.mtmd_input_chunks_get(chunks, row) for row in range(lib.mtmd_input_chunks_size(chunks)))
        (image,) = (chunk for chunk in items if lib.mtmd_input_chunk_get_type(chunk) == lib.MTMD_INPUT_CHUNK_TYPE_IMAGE)
        tokens, positions = lib.mtmd_input_chunk_get_n_tokens(image), lib.mtmd_input_chunk_get_n_pos(image)
        assert (positions < tokens) == (name == "projector-qwen")
        assert lib.mtmd_decode_use_non_causal(projector, image) == (name == "projector-gemma3")
        assert lib.mtmd_encode_chunk(projector, image) == 0
        return session.array(lib.mtmd_get_output_embd(projector), 64 * tokens)
