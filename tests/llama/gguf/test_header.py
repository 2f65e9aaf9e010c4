"""The GGUF header reader matches the format and rejects everything else with a reason."""

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
from afterglow.llama.gguf.formats import TENSOR_TYPES, ValueType
from afterglow.llama.gguf.header import Cursor, GGUFHeader, MetadataValue, StringArray, read_header
from afterglow.llama.library.loader import get_library
from afterglow.testing import models
from support.gguf_document import Document, MetadataEntry, TensorData, parse_document

GetRejection = Callable[[Document | bytes], str]


@pytest.fixture
def document() -> Document:
    return parse_document(models.get_path("draft").read_bytes())


@pytest.fixture
def get_rejection(tmp_path: Path) -> GetRejection:
    """Return a function that writes a file, checks that it is rejected and returns the reason."""

    def write_and_read(content: Document | bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(content if isinstance(content, bytes) else content.to_bytes())
        with pytest.raises(InvalidModel) as caught:
            read_header(path)
        assert caught.value.path == str(path)
        return caught.value.reason

    return write_and_read


def read_document(document: Document, directory: Path) -> GGUFHeader:
    path = directory / "good.gguf"
    path.write_bytes(document.to_bytes())
    return read_header(path)


def to_plain(value: MetadataValue) -> object:
    if isinstance(value, StringArray):
        return [value[index] for index in range(len(value))]
    return value.tolist() if isinstance(value, np.ndarray) else value


def replace_field(document: Document, name: str, value: int) -> bytes:
    """Return the file with one count or length replaced in place."""
    data = bytearray(document.to_bytes())
    struct.pack_into("<Q", data, document.fields[name][0], value)
    return bytes(data)


@pytest.mark.parametrize("name", models.list_names())
def test_the_header_matches_the_gguf_package(name: str) -> None:
    header, reader = read_header(models.get_path(name)), gguf.GGUFReader(models.get_path(name))
    assert [(tensor.name, list(tensor.shape), tensor.nbytes) for tensor in header.tensors] == [
        (tensor.name, tensor.shape.tolist(), int(tensor.n_bytes)) for tensor in reader.tensors
    ]
    offsets = [header.data_start + tensor.offset for tensor in header.tensors]
    assert offsets == [tensor.data_offset for tensor in reader.tensors]
    assert {key: to_plain(value) for key, value in header.metadata.items()} == {
        key: reader.fields[key].contents() for key in header.metadata
    }


@pytest.mark.native
def test_tensor_types_match_the_library() -> None:
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
            document.entries.append(MetadataEntry(b"one." + kind.name.encode(), kind, False, [1]))
            document.entries.append(MetadataEntry(b"many." + kind.name.encode(), kind, True, [1, 0, 1]))
    header = read_document(document, tmp_path)
    assert all(header.metadata[key] == 1 for key in header.metadata if key.startswith("one."))
    assert all(list(header.metadata[key]) == [1, 0, 1] for key in header.metadata if key.startswith("many."))
    assert header.metadata["one.BOOL"] is True
    assert header.value_types["many.INT16"] is ValueType.INT16


def test_a_string_ends_at_a_zero_byte_as_in_llama_cpp(document: Document, tmp_path: Path) -> None:
    document.entries.append(MetadataEntry(b"words", ValueType.STRING, True, [b"one\0two", b"", b"\xff"]))
    words = read_document(document, tmp_path).metadata["words"]
    assert isinstance(words, StringArray)
    assert [words[0], words[1], words[-1]] == ["one", "", "\ufffd"]
    assert list(words.iter_raw()) == [b"one", b"", b"\xff"]


def test_a_file_without_tensors_is_read(document: Document, tmp_path: Path) -> None:
    document.tensors = []
    assert read_document(document, tmp_path).tensors == ()


def test_a_larger_alignment_is_applied(document: Document, tmp_path: Path) -> None:
    document.entries.append(MetadataEntry(b"general.alignment", ValueType.UINT32, False, [4096]))
    document.alignment = 4096
    assert read_document(document, tmp_path).data_start % 4096 == 0


@pytest.mark.slow
def test_a_vocabulary_of_262144_tokens_is_read_quickly(document: Document, tmp_path: Path) -> None:
    document.entries.append(
        MetadataEntry(b"words", ValueType.STRING, True, [b"word %d" % number for number in range(262_144)])
    )
    document.entries.append(
        MetadataEntry(b"pairs", ValueType.STRING, True, [b"a b%d" % number for number in range(514_906)])
    )
    before = os.times().user
    assert len(read_document(document, tmp_path).metadata) > 2
    assert os.times().user - before < 2  # includes writing the file


def test_a_missing_file_and_a_folder_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="No such file"):
        read_header(tmp_path / "absent.gguf")
    with pytest.raises(InvalidModel, match="not a regular file"):
        read_header(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_rejected_without_waiting_for_its_writer(tmp_path: Path) -> None:
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
def test_an_invalid_file_start_is_rejected(start: bytes, reason: str, get_rejection: GetRejection) -> None:
    assert reason in get_rejection(start)


def test_every_truncation_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    data = document.to_bytes()
    for size in [*range(0, document.header_size, 97), *range(document.header_size, len(data) - 32, 9973)]:
        assert get_rejection(data[:size])


def test_a_key_longer_than_the_file_is_rejected_with_its_offset(
    document: Document, get_rejection: GetRejection
) -> None:
    name = f"length of the key {document.entries[3].key!r}"
    data = replace_field(document, name, 2**32 - 1)
    offset = document.fields[name][0]
    remaining = len(data) - offset - 8
    assert (
        get_rejection(data)
        == f"key 3 at byte {offset:,} claims a length of 4,294,967,295 bytes, the file has {remaining:,} more"
    )


def test_an_array_longer_than_the_file_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    assert "claims 1,099,511,627,776 elements" in get_rejection(
        replace_field(document, "count of b'tokenizer.ggml.tokens'", 2**40)
    )


def test_an_array_string_longer_than_the_file_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    reason = get_rejection(replace_field(document, "string length in b'tokenizer.ggml.tokens'", 2**63))
    assert reason.startswith("string 0 of the value of 'tokenizer.ggml.tokens' at byte")


def test_an_array_over_the_element_limit_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    data = replace_field(document, "count of b'tokenizer.ggml.tokens'", 2_000_000) + bytes(16_000_000)
    assert "2,000,000 elements, all arrays together may have 1,500,000" in get_rejection(data)


def test_a_header_over_the_size_limit_is_rejected(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(replace_field(document, "string length in b'general.architecture'", 2**26))
    os.truncate(path, 2**27)  # a sparse file
    with pytest.raises(InvalidModel, match="bytes long, over the limit of 67,108,864"):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_rejected(tmp_path: Path) -> None:
    cursor = Cursor(tmp_path / "model.gguf", io.BytesIO(b"GGUF"), size=100)
    with pytest.raises(InvalidModel, match="the file ended at byte 4 while it was read"):
        cursor.read_bytes(8, "the version")


def test_an_unknown_value_type_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    document.entries.append(MetadataEntry(b"odd", ValueType.UINT32, False, [7]))
    data = document.to_bytes()
    assert "has the unknown type 99" in get_rejection(data.replace(b"odd\4\0\0\0", b"odd\x63\0\0\0"))


def test_an_array_of_arrays_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    document.entries.append(MetadataEntry(b"nested", ValueType.UINT32, True, [7]))
    assert "array of arrays" in get_rejection(
        document.to_bytes().replace(b"nested\x09\0\0\0\4", b"nested\x09\0\0\0\x09")
    )


@pytest.mark.parametrize(
    ("key", "reason"),
    [(b"", "is empty"), (b"general.name\0x", "zero byte"), (b"\xff\xfe", "not text"), (b"k" * 2000, "1,024")],
)
def test_an_invalid_key_is_rejected(key: bytes, reason: str, document: Document, get_rejection: GetRejection) -> None:
    document.entries.append(MetadataEntry(key, ValueType.UINT32, False, [7]))
    assert reason in get_rejection(document)


def test_a_duplicate_key_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    document.entries.append(document.entries[0])
    assert "is 'general.architecture' for a second time" in get_rejection(document)


@pytest.mark.parametrize("alignment", [0, 3, 33, 2**32 - 1])
def test_an_alignment_that_is_not_a_power_of_two_is_rejected(
    alignment: int, document: Document, get_rejection: GetRejection
) -> None:
    document.entries.append(MetadataEntry(b"general.alignment", ValueType.UINT32, False, [alignment]))
    assert "not a power of two" in get_rejection(document)


def test_an_alignment_of_the_wrong_type_is_rejected(document: Document, get_rejection: GetRejection) -> None:
    document.entries.append(MetadataEntry(b"general.alignment", ValueType.UINT64, False, [32]))
    assert "general.alignment is not a 32-bit number" in get_rejection(document)


def test_unaligned_tensors_are_rejected(document: Document, get_rejection: GetRejection) -> None:
    document.entries.append(MetadataEntry(b"general.alignment", ValueType.UINT32, False, [1]))
    document.alignment = 1
    document.tensors.insert(0, TensorData(b"odd", [1], 24, b"x"))
    assert "not at a multiple of 32" in get_rejection(document)


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
def test_an_invalid_tensor_is_rejected(
    change: dict[str, object], reason: str, document: Document, get_rejection: GetRejection
) -> None:
    document.tensors.append(TensorData(b"extra", [32], 0, bytes(128)))
    vars(document.tensors[-1]).update(change)
    assert reason in get_rejection(document)


def test_tensor_data_outside_the_file_is_rejected_as_incomplete(
    document: Document, get_rejection: GetRejection
) -> None:
    assert "it is incomplete" in get_rejection(document.to_bytes()[:-40])
