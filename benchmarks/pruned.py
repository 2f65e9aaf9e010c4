"""A model of fewer layers, made of one that people run: what a smaller draft model of the same vocabulary is."""

from __future__ import annotations

from pathlib import Path

import gguf


def prune(source: Path, target: Path, layers: int) -> None:
    """Write the model with its last layer and the first ones, `layers` in all; everything else stays as it is."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    count = reader.fields[f"{architecture}.block_count"].contents()
    kept = {f"blk.{old}.": f"blk.{new}." for new, old in enumerate([*range(layers - 1), count - 1])}
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = layers if name == f"{architecture}.block_count" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        block = tensor.name[: tensor.name.index(".", 4) + 1] if tensor.name.startswith("blk.") else ""
        if not block or block in kept:
            name = tensor.name.replace(block, kept[block], 1) if block else tensor.name
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
