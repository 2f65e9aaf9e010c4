"""Split models are loaded by their first file; the error names a missing file."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from afterglow.errors import InvalidModel
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.contexts import decode_tokens, max_difference, random_tokens

pytestmark = pytest.mark.native

SMALL = ContextSettings(cells=256, batch=64, threads=1)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The tiny attention model, split into several files."""
    reader = gguf.GGUFReader(models.get_path("attention"))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=10)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("*.gguf"))


def test_a_split_model_computes_the_same_logits(parts):
    assert len(parts) > 2
    with LlamaModel.load(models.get_path("attention")) as whole, LlamaModel.load(parts[0]) as split:
        with LlamaContext(whole, SMALL) as expected, LlamaContext(split, SMALL) as actual:
            assert (
                max_difference(
                    decode_tokens(expected, 0, random_tokens(20)), decode_tokens(actual, 0, random_tokens(20))
                )
                == 0.0
            )
        assert split.info.parameter_count == whole.info.parameter_count


def test_the_error_names_a_missing_part(parts):
    parts[1].unlink()
    with pytest.raises(InvalidModel, match=f"{parts[1].name} is missing"):
        LlamaModel.load(parts[0])


def test_loading_a_later_part_is_rejected(parts):
    with pytest.raises(InvalidModel, match="name the first part"):
        LlamaModel.load(parts[1])


def test_a_damaged_later_part_is_rejected(parts):
    parts[1].write_bytes(parts[1].read_bytes()[:200])
    with pytest.raises(InvalidModel):
        LlamaModel.load(parts[0])
