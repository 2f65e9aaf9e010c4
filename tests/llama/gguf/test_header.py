"""Does the reader of GGUF headers agree with the format, and does it refuse, in words, whatever does not?"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from afterglow.errors import InvalidModel
from afterglow.llama.gguf.cursor import Cursor
from afterglow.llama.gguf.formats import TENSOR_TYPES, ValueType
from afterglow.llama.gguf.header import GGUFHeader, MetadataValue, StringArray, read_header
from afterglow.llama.library.loader import get_library
from afterglow.testing import models
from support.gguf_document import Document, Entry, Weights, parse

Refused = Callable[[Document | bytes], str]


@pytest.fixture
def document() -> Document:
    return parse(models.get_path("draft").read_bytes())


@pytest.fixture
def refused(tmp_path: Path) -> Refused:
    """Write a file that must be refused, and return the reason."""

    def refuse(content: Document | bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(content if isinstance(content, bytes) else content.write())
        with pytest.raises(InvalidModel) as caught:
            read_header(path)
        assert caught.value.path == str(path)
        return caught.value.reason

    return refuse


def accepted(document: Document, directory: Path) -> GGUFHeader:
    path = directory / "good.gguf"
    path.write_bytes(document.write())
    return read_header(path)


def plain(value: MetadataValue) -> object:
    if isinstance(value, StringArray):
        return [value[index] for index in range(len(value))]
    return value.tolist() if isinstance(value, np.ndarray) else value


def with_field(document: Document, name: str, value: int) -> bytes:
    """The file with one count or length replaced, and nothing moved."""
    data = bytearray(document.write())
    struct.pack_into("<Q", data, document.fields[name][0], value)
    return bytes(data)


@pytest.mark.parametrize("name", models.list_names())
def test_the_header_agrees_with_the_gguf_package(name: str) -> None:
    header, reader = read_header(models.get_path(name)), gguf.GGUFReader(models.get_path(name))
    assert [(one.name, list(one.shape), one.nbytes) for one in header.tensors] == [
        (one.name, one.shape.tolist(), int(one.n_bytes)) for one in reader.tensors
    ]
    assert [header.data_start + one.offset for one in header.tensors] == [one.data_offset for one in reader.tensors]
    assert {key: plain(value) for key, value in header.metadata.items()} == {
        key: reader.fields[key].contents() for key in header.metadata
    }


def test_tensor_types_are_those_of_the_library() -> None:
    symbols = get_library().symbols
    for number in range(64):
        if number in TENSOR_TYPES:
            _, block, size = TENSOR_TYPES[number]
            assert (symbols.ggml_blck_size(number), symbols.ggml_type_size(number)) == (block, size)
        elif number <= max(TENSOR_TYPES):
            assert symbols.ggml_blck_size(number) == 0  # withdrawn


def test_values_of_every_type_are_read(document: Document, tmp_path: Path) -> None:
    for kind in ValueType:
        if kind not in (ValueType.ARRAY, ValueType.STRING):
            document.entries.append(Entry(b"one." + kind.name.encode(), kind, False, [1]))
            document.entries.append(Entry(b"many." + kind.name.encode(), kind, True, [1, 0, 1]))
    header = accepted(document, tmp_path)
    assert all(header.metadata[key] == 1 for key in header.metadata if key.startswith("one."))
    assert all(list(header.metadata[key]) == [1, 0, 1] for key in header.metadata if key.startswith("many."))
    assert header.metadata["one.BOOL"] is True
    assert header.value_types["many.INT16"] is ValueType.INT16


def test_a_string_ends_at_a_zero_byte_as_in_llama_cpp(document: Document, tmp_path: Path) -> None:
    document.entries.append(Entry(b"words", ValueType.STRING, True, [b"one\0two", b"", b"\xff"]))
    words = accepted(document, tmp_path).metadata["words"]
    assert isinstance(words, StringArray)
    assert [words[0], words[1], words[-1]] == ["one", "", "\ufffd"]
    assert list(words.iter_raw()) == [b"one", b"", b"\xff"]


def test_a_file_without_tensors_is_read(document: Document, tmp_path: Path) -> None:
    document.weights = []
    assert accepted(document, tmp_path).tensors == ()


def test_a_larger_alignment_is_honoured(document: Document, tmp_path: Path) -> None:
    document.entries.append(Entry(b"general.alignment", ValueType.UINT32, False, [4096]))
    document.alignment = 4096
    assert accepted(document, tmp_path).data_start % 4096 == 0


def test_a_vocabulary_of_a_quarter_million_takes_well_under_a_second(document: Document, tmp_path: Path) -> None:
    document.entries.append(Entry(b"words", ValueType.STRING, True, [b"word %d" % number for number in range(262_144)]))
    document.entries.append(Entry(b"pairs", ValueType.STRING, True, [b"a b%d" % number for number in range(514_906)]))
    before = os.times().user
    assert len(accepted(document, tmp_path).metadata) > 2
    assert os.times().user - before < 2  # with the writing of it


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="No such file"):
        read_header(tmp_path / "absent.gguf")
    with pytest.raises(InvalidModel, match="not a regular file"):
        read_header(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InvalidModel, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"", "the file has 0"),
        (b"GG", "the file has 2"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file: it begins with b'PK"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "GGUF version 1;"),
        (b"GGUF" + struct.pack("<I", 4) + bytes(40), "GGUF version 4;"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims 1,152,921,504,606,846,976 tensors, the file has only 24"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "claims 18,446,744,073,709,551,615 keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5000) + bytes(100_000), "5,000 keys, the limit is 4,096"),
        (b"GGUF" + struct.pack("<IQQ", 3, 9000, 0) + bytes(300_000), "9,000 tensors, the limit is 8,192"),
    ],
)
def test_a_bad_beginning_is_refused(start: bytes, reason: str, refused: Refused) -> None:
    assert reason in refused(start)


def test_every_truncation_is_refused(document: Document, refused: Refused) -> None:
    whole = document.write()
    for size in [*range(0, document.header_size, 97), *range(document.header_size, len(whole) - 32, 9973)]:
        assert refused(whole[:size])


def test_a_key_longer_than_the_file_is_refused_with_its_place(document: Document, refused: Refused) -> None:
    name = f"length of the key {document.entries[3].key!r}"
    data = with_field(document, name, 2**32 - 1)
    place = document.fields[name][0]
    left = len(data) - place - 8
    assert (
        refused(data) == f"key 3 at byte {place:,} claims a length of 4,294,967,295 bytes, the file has {left:,} more"
    )


def test_an_array_longer_than_the_file_is_refused(document: Document, refused: Refused) -> None:
    assert "claims 1,099,511,627,776 elements" in refused(
        with_field(document, "count of b'tokenizer.ggml.tokens'", 2**40)
    )


def test_a_string_of_an_array_longer_than_the_file_is_refused(document: Document, refused: Refused) -> None:
    reason = refused(with_field(document, "string length in b'tokenizer.ggml.tokens'", 2**63))
    assert reason.startswith("string 0 of the value of 'tokenizer.ggml.tokens' at byte")


def test_an_array_that_would_take_llama_cpp_minutes_is_refused(document: Document, refused: Refused) -> None:
    data = with_field(document, "count of b'tokenizer.ggml.tokens'", 2_000_000) + bytes(16_000_000)
    assert "2,000,000 elements, all arrays together may have 1,500,000" in refused(data)


def test_a_header_that_is_most_of_a_large_file_is_refused(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_field(document, "string length in b'general.architecture'", 2**26))
    os.truncate(path, 2**27)  # takes no room: what lies behind the end was never written
    with pytest.raises(InvalidModel, match="bytes long, over the limit of 67,108,864"):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    cursor = Cursor(tmp_path / "model.gguf", io.BytesIO(b"GGUF"), size=100)
    with pytest.raises(InvalidModel, match="the file ended at byte 4 while it was read"):
        cursor.read_bytes(8, "the version")


def test_an_unknown_value_type_is_refused(document: Document, refused: Refused) -> None:
    document.entries.append(Entry(b"odd", ValueType.UINT32, False, [7]))
    data = document.write()
    assert "has the unknown type 99" in refused(data.replace(b"odd\4\0\0\0", b"odd\x63\0\0\0"))


def test_an_array_of_arrays_is_refused(document: Document, refused: Refused) -> None:
    document.entries.append(Entry(b"nested", ValueType.UINT32, True, [7]))
    assert "array of arrays" in refused(document.write().replace(b"nested\x09\0\0\0\4", b"nested\x09\0\0\0\x09"))


@pytest.mark.parametrize(
    ("key", "reason"),
    [(b"", "is empty"), (b"general.name\0x", "zero byte"), (b"\xff\xfe", "not text"), (b"k" * 2000, "1,024")],
)
def test_a_key_that_is_no_name_is_refused(key: bytes, reason: str, document: Document, refused: Refused) -> None:
    document.entries.append(Entry(key, ValueType.UINT32, False, [7]))
    assert reason in refused(document)


def test_a_repeated_key_is_refused(document: Document, refused: Refused) -> None:
    document.entries.append(document.entries[0])
    assert "is 'general.architecture' for a second time" in refused(document)


@pytest.mark.parametrize("alignment", [0, 3, 33, 2**32 - 1])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int, document: Document, refused: Refused) -> None:
    document.entries.append(Entry(b"general.alignment", ValueType.UINT32, False, [alignment]))
    assert "not a power of two" in refused(document)


def test_an_alignment_of_another_type_is_refused(document: Document, refused: Refused) -> None:
    document.entries.append(Entry(b"general.alignment", ValueType.UINT64, False, [32]))
    assert "general.alignment is not a 32-bit number" in refused(document)


def test_tensors_that_llama_cpp_cannot_map_are_refused(document: Document, refused: Refused) -> None:
    document.entries.append(Entry(b"general.alignment", ValueType.UINT32, False, [1]))
    document.alignment = 1
    document.weights.insert(0, Weights(b"odd", [1], 24, b"x"))
    assert "not at a multiple of 32" in refused(document)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": b"x" * 64}, "is 64 bytes long, the limit is 63"),
        ({"name": b""}, "is empty"),
        ({"name": b"output_norm.weight"}, "for a second time"),
        ({"shape": [1] * 5}, "claims 5 dimensions"),
        ({"shape": [0, 4]}, "impossible shape [0, 4]"),
        ({"shape": [2**62, 4]}, "impossible shape"),
        ({"kind": 4}, "unknown type 4"),
        ({"kind": 2**31}, "unknown type 2,147,483,648"),
        ({"kind": 12}, "rows of 32 elements, Q4_K needs a multiple of 256"),
        ({"offset": 32}, "has offset 32, the one before it ends at"),
        ({"shape": [2**40]}, "the file has"),
    ],
)
def test_an_impossible_tensor_is_refused(
    change: dict[str, object], reason: str, document: Document, refused: Refused
) -> None:
    document.weights.append(Weights(b"extra", [32], 0, bytes(128)))
    vars(document.weights[-1]).update(change)
    assert reason in refused(document)


def test_tensor_data_outside_the_file_is_refused_as_incomplete(document: Document, refused: Refused) -> None:
    assert "it is incomplete" in refused(document.write()[:-40])
