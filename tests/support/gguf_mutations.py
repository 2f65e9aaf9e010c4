"""An endless seeded stream of damaged copies of a GGUF file.

Some copies are damaged blindly. Most are parsed, changed in one place and serialized consistently, because only those
pass the reader and reach the code behind it.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from afterglow.llama.gguf.formats import ValueType
from support.gguf_document import Document, MetadataEntry, parse_document
from support.gguf_tensor_mutations import HUGE_NUMBERS, change_tensor

NUMBERS = (0, 1, 2, 3, 5, 31, 64, 255, 1023, 4096, 65_537, 10**6, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
FLOATS = (0.0, -0.0, -1.0, 1e-30, 1e30, 3e38, math.inf, -math.inf, math.nan)
ALIGNMENTS = (0, 1, 2, 3, 4, 8, 16, 33, 48, 64, 128, 4096, 2**20, 2**31, 2**32 - 1)
ARCHITECTURES = (
    b"llama qwen35 qwen3moe gemma3 gemma3n mamba mamba2 bert t5 rwkv7 falcon-h1 phi3 clip grok deepseek2".split()
)
TEXTS = (
    b"", b"\0", b"x" * 100_000, b"\xff\xfe", "é▁".encode(), b"default", b"gpt2", b"llama", b"bert", b"t5", b"rwkv",
    b"none", b"no_vocab", b"plamo2", b"gemma4", b"whitespace", b"hybriddna", b"test", b"qwen2", b"llama-bpe", b"yarn",
    b"longrope", b"adapter", b"mmproj", b"model", b"{% for x in range(10**9) %}x{% endfor %}", *ARCHITECTURES,
)  # fmt: skip
# Keys that llama.cpp reads and that few files have; those in ARCHITECTURE_KEYS have the architecture as a prefix.
ARCHITECTURE_KEYS = (
    "vocab_size", "context_length", "embedding_length", "embedding_length_out", "embedding_length_per_layer_input",
    "block_count", "leading_dense_block_count", "feed_forward_length", "expert_feed_forward_length", "expert_count",
    "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
    "expert_gating_func", "experts_per_group", "moe_every_n_layers", "nextn_predict_layers", "n_deepstack_layers",
    "deepstack_mapping", "pooling_type", "decoder_block_count", "token_shift_count", "interleave_moe_layer_step",
    "full_attention_interval", "num_loops", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.shared_kv_layers", "attention.recurrent_layers",
    "attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa",
    "attention.relative_buckets_count", "attention.q_lora_rank", "attention.kv_lora_rank",
    "attention.group_norm_groups", "attention.temperature_length", "rope.dimension_count",
    "rope.dimension_count_swa", "rope.dimension_sections", "rope.scaling.original_context_length",
    "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "wkv.head_size",
    "shortconv.l_cache", "dense_2_feat_in", "dense_2_feat_out", "kda.head_dim", "hyper_connection.count",
    "hyper_connection.sinkhorn_iterations", "target_hidden_size", "classifier.pooling_type",
)  # fmt: skip
GENERAL_KEYS = (
    "tokenizer.ggml.token_type_count", "tokenizer.ggml.suppress_tokens", "tokenizer.ggml.add_bos_token",
    "general.alignment", "tokenizer.ggml.add_eos_token", "general.file_type", "general.quantization_version",
    "split.count", "split.no",
)  # fmt: skip

Mutation = Callable[[Document, Random], str]


def generate_mutations(original: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield (description, damaged file) endlessly; the same seed gives the same stream."""
    random = Random(seed)
    original_document = parse_document(original)
    intact = original_document.to_bytes()
    for number in itertools.count():
        if number % 4 == 0:
            mutate = random.choice(BLIND_MUTATIONS)
            description, damaged = mutate(intact, original_document, random)
        else:
            document = copy_document(original_document)
            steps = random.choices(STRUCTURED_MUTATIONS, k=random.choice((1, 1, 1, 2, 3)))
            description = "; ".join(step(document, random) for step in steps)
            damaged = document.to_bytes()
        yield f"{number}: {description}", damaged


def copy_document(document: Document) -> Document:
    entries = [replace(entry, values=list(entry.values)) for entry in document.entries]
    tensors = [replace(tensor, shape=list(tensor.shape)) for tensor in document.tensors]
    return Document(document.version, entries, tensors, document.alignment)


# Blind mutations.


def flip_bits(intact: bytes, document: Document, random: Random) -> tuple[str, bytes]:
    count = random.choice((1, 1, 1, 2, 4, 16))
    out = bytearray(intact)
    offsets = [random.randrange(document.header_size) for _ in range(count)]
    for offset in offsets:
        out[offset] ^= 1 << random.randrange(8)
    return f"flip bits at {offsets}", bytes(out)


def overwrite_bytes(intact: bytes, document: Document, random: Random) -> tuple[str, bytes]:
    start, length = random.randrange(document.header_size), random.choice((1, 2, 4, 8, 64))
    filler = random.choice((b"\0" * length, b"\xff" * length, random.randbytes(length)))
    return f"overwrite {length} bytes at {start}", intact[:start] + filler + intact[start + length :]


def truncate(intact: bytes, document: Document, random: Random) -> tuple[str, bytes]:
    size = random.randrange(random.choice((32, document.header_size, len(intact))))
    return f"truncate to {size} bytes", intact[:size]


def change_field(intact: bytes, document: Document, random: Random) -> tuple[str, bytes]:
    name, offsets = random.choice(list(document.fields.items()))
    offset = random.choice(offsets)
    (old,) = struct.unpack_from("<Q", intact, offset)
    new = random.choice((*HUGE_NUMBERS, old + 1, max(old - 1, 0), 0, len(intact), len(intact) // 8)) % 2**64
    return f"{name} from {old} to {new}", intact[:offset] + struct.pack("<Q", new) + intact[offset + 8 :]


def damage_weights(intact: bytes, document: Document, random: Random) -> tuple[str, bytes]:
    out = bytearray(intact)
    for _ in range(random.choice((1, 100, 1000))):
        out[random.randrange(document.header_size, len(out))] ^= 1 << random.randrange(8)
    return "flip bits in the weights", bytes(out)


BLIND_MUTATIONS = (flip_bits, flip_bits, overwrite_bytes, truncate, change_field, change_field, damage_weights)


# Structured mutations.


def choose_entry(document: Document, random: Random, predicate: Callable[[MetadataEntry], bool]) -> MetadataEntry:
    candidates = [entry for entry in document.entries if predicate(entry)]
    return (
        random.choice(candidates or document.entries)
        if document.entries
        else MetadataEntry(b"", ValueType.UINT8, False, [0])
    )


def duplicate_key(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda _: True)
    suffix = random.choice((b"", b"", b"\0", b"\0x"))
    document.entries.insert(random.randrange(len(document.entries) + 1), replace(entry, key=entry.key + suffix))
    return f"duplicate {entry.key + suffix!r}"


def duplicate_string(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda entry: entry.array and entry.kind == ValueType.STRING)
    if entry.kind != ValueType.STRING or len(entry.values) < 2:
        return "nothing to duplicate"
    first, second = random.sample(range(len(entry.values)), 2)
    entry.values[second] = random.choice((entry.values[first], entry.values[first], b"", b"[EMPTY_3]"))
    return f"string {second} of {entry.key!r} is string {first}"


def change_strings(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda entry: entry.array and entry.kind == ValueType.STRING)
    if entry.kind != ValueType.STRING or not entry.values:
        return "no strings to change"
    count = random.choice((1, 1, 10, len(entry.values)))
    for index in random.choices(range(len(entry.values)), k=count):
        entry.values[index] = random.choice((random.randbytes(random.randrange(1, 9)), b"%d" % index, b"\0a", b"  "))
    return f"{count} strings of {entry.key!r} become noise"


def change_number(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda entry: not entry.array and entry.kind != ValueType.STRING)
    if entry.array or entry.kind == ValueType.STRING:
        return "no number to change"
    old = entry.values[0]
    near = (old + 1, old - 1, old * 2, old // 2) if isinstance(old, int) else ()
    set_numbers(entry, [random.choice(near + (FLOATS if isinstance(old, float) else NUMBERS))])
    return f"{entry.key!r} from {old} to {entry.values[0]}"


def change_numbers(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda entry: entry.array and entry.kind != ValueType.STRING)
    if not entry.array or entry.kind == ValueType.STRING or not entry.values:
        return "no array to change"
    pool: tuple[Any, ...] = FLOATS if isinstance(entry.values[0], float) else NUMBERS
    count = random.choice((1, 3, len(entry.values)))
    values = list(entry.values)
    for index in random.choices(range(len(values)), k=count):
        values[index] = random.choice(pool)
    set_numbers(entry, values)
    return f"{count} elements of {entry.key!r} change"


def change_text(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda entry: not entry.array and entry.kind == ValueType.STRING)
    if entry.kind != ValueType.STRING:
        return "no text to change"
    entry.values = [random.choice(TEXTS)]
    return f"{entry.key!r} becomes {entry.values[0][:20]!r}"


def change_architecture(document: Document, random: Random) -> str:
    """Rename the architecture and its keys, so that the code of another model reads this file."""
    entry, new = document.find("general.architecture"), random.choice(ARCHITECTURES)
    if entry is None or entry.kind != ValueType.STRING or entry.array:
        return "no architecture to change"
    old = entry.values[0]
    for item in document.entries:
        item.key = new + item.key[len(old) :] if item.key.startswith(old + b".") else item.key
    entry.values = [new]
    return f"architecture becomes {new!r}"


def change_type(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda _: True)
    kind = random.choice([kind for kind in ValueType if kind is not ValueType.ARRAY])
    was_text, old = entry.kind == ValueType.STRING, entry.values
    entry.kind = kind
    entry.array ^= random.random() < 0.3
    entry.values = old if entry.array else (old[:1] or [b"" if was_text else 0])
    if kind is ValueType.STRING:
        entry.values = [value if isinstance(value, bytes) else b"%d" % int(to_finite(value)) for value in entry.values]
    else:
        set_numbers(entry, [len(value) if isinstance(value, bytes) else value for value in entry.values])
    return f"{entry.key!r} is stored as {'array of ' if entry.array else ''}{kind.name}"


def change_length(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda entry: entry.array)
    if not entry.array:
        return "no array to resize"
    old = len(entry.values)
    entry.values = random.choice((entry.values[:-1], [], entry.values[:1], entry.values * 2, entry.values[: old // 2]))
    return f"{entry.key!r} has {len(entry.values)} elements, had {old}"


def remove_key(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda _: True)
    document.entries = [item for item in document.entries if item is not entry]
    return f"remove {entry.key!r}"


def add_key(document: Document, random: Random) -> str:
    architecture = document.find("general.architecture")
    prefix = architecture.values[0] if architecture and architecture.kind == ValueType.STRING else b"llama"
    key = random.choice(
        (*(prefix + b"." + name.encode() for name in ARCHITECTURE_KEYS), *(name.encode() for name in GENERAL_KEYS))
    )
    kind = ValueType.UINT16 if key.startswith(b"split") else random.choice((ValueType.UINT32, ValueType.INT32))
    entry = MetadataEntry(key, kind, random.random() < 0.2, [])
    set_numbers(entry, random.choices(NUMBERS, k=random.randrange(6) if entry.array else 1))
    document.entries = [item for item in document.entries if item.key != key] + [entry]
    return f"{key!r} is {entry.values}"


def change_special_token(document: Document, random: Random) -> str:
    entry = choose_entry(document, random, lambda entry: entry.key.endswith(b"_token_id"))
    if entry.kind == ValueType.STRING or entry.array:
        return "no special token"
    set_numbers(entry, [random.choice(NUMBERS)])
    return f"{entry.key!r} is {entry.values[0]}"


def change_alignment(document: Document, random: Random) -> str:
    alignment = random.choice(ALIGNMENTS)
    document.entries = [item for item in document.entries if item.key != b"general.alignment"]
    document.entries.append(MetadataEntry(b"general.alignment", ValueType.UINT32, False, [alignment]))
    if 0 < alignment <= 4096 and random.random() < 0.7:
        document.alignment = alignment
    return f"alignment {alignment}, laid out by {document.alignment}"


STRUCTURED_MUTATIONS: tuple[Mutation, ...] = (
    duplicate_key, duplicate_string, change_strings, change_number, change_number, change_number, change_numbers,
    change_text, change_architecture, change_type, change_length, remove_key, add_key, add_key, change_special_token,
    change_alignment, change_tensor, change_tensor,
)  # fmt: skip


def to_finite(number: float) -> float:
    return number if math.isfinite(number) else 0


def set_numbers(entry: MetadataEntry, values: list[Any]) -> None:
    """Store the values converted to the range of the entry's type."""
    name = ValueType(entry.kind).name
    if name.startswith("FLOAT"):
        entry.values = [value if isinstance(value, float) else float(min(value, 2**64)) for value in values]
        return
    bits = 8 if name == "BOOL" else int(name.lstrip("UINT"))
    offset = 0 if name[0] in "UB" else 2 ** (bits - 1)
    entry.values = [(int(to_finite(value)) + offset) % 2**bits - offset for value in values]
