"""Hybrid model with 109 million parameters and random weights that generates plain words.

Recurrent and attention layers alternate as in qwen35, with the shapes of a real model of that size in 4 bits. The
answers are meaningless but consist only of words of the vocabulary. They tokenize back to the same tokens, and no
answer ends by itself. The file is written once, in about twenty seconds, and cached.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from benchmark_models import QuantizedWriter, get_cached_file
from gguf import TokenType
from synthetic_inputs import WORDS

from afterglow.testing.models import vocabulary
from afterglow.testing.models.hybrid import Qwen35
from afterglow.testing.models.projector import ProjectorSize, write_qwen
from afterglow.testing.models.writer import ModelWriter, draw_noise

CONTEXT_LENGTH_TOKENS = 32_768
SPACE = "Ġ"  # a space in byte-level vocabularies
DECODER = Qwen35(
    embedding_length=768, layers=13, full_attention_interval=4, heads=6, kv_heads=2, head_size=128,
    feed_forward_length=2304, state_size=128, state_key_heads=6, state_heads=6,
)  # fmt: skip
TINY_DECODER = Qwen35()  # for tests: written in milliseconds
PROJECTOR = ProjectorSize(
    embedding_length=256, feed_forward_length=512, heads=4, layers=4, text_embedding_length=DECODER.embedding_length
)


def build_merges() -> list[str]:
    """Return merges that build each word letter by letter from its space, and then each role from its first letter."""
    merges: dict[str, None] = {}
    for start, words in ((SPACE, WORDS), ("", ("system", "user", "assistant"))):
        for word in words:
            letters = start + word
            for length in range(2, len(letters) + 1):
                merges.setdefault(f"{letters[: length - 1]} {letters[length - 1]}")
    return list(merges)


def build_tokens() -> tuple[list[str], list[int]]:
    """Return the texts of all tokens, and the tokens that the model may generate."""
    texts = [
        *vocabulary.CONTROL_TOKENS,
        *vocabulary.build_byte_alphabet(),
        *(merge.replace(" ", "") for merge in build_merges()),
    ]
    texts += [f"<|unused_{number}|>" for number in range(-len(texts) % 32)]
    words = {SPACE + word for word in WORDS}
    return texts, [number for number, text in enumerate(texts) if text in words]


def get_path(decoder: Qwen35 = DECODER) -> Path:
    """Return the file of the model. If it does not exist yet, write it."""
    name = f"talking-hybrid-{decoder.embedding_length}x{decoder.layers}"
    return get_cached_file(name, lambda file: write(file, decoder))


def get_projector_path() -> Path:
    """Return the file of an image projector with random weights. If it does not exist yet, write it."""
    name = f"talking-hybrid-{DECODER.embedding_length}-sees"
    return get_cached_file(name, lambda file: write_qwen(file, PROJECTOR, max_pixels=256 * 256))


def write(file: Path, decoder: Qwen35) -> None:
    """Write the model."""
    texts, allowed = build_tokens()
    width = decoder.embedding_length
    with QuantizedWriter(file, decoder.architecture, seed=9) as writer:
        writer.kind = gguf.GGMLQuantizationType.Q4_0
        write_tokenizer(writer, texts)
        sizes = {"context_length": CONTEXT_LENGTH_TOKENS, "embedding_length": width, "vocab_size": len(texts)}
        writer.add_metadata(decoder.architecture, {**sizes, **decoder.build_metadata()})
        writer.add_noise("token_embd.weight", len(texts), width, scale=1.0, half=True)
        writer.add_constant("output_norm.weight", 1.0, width)
        # Tokens without a row have a logit of 0, and the best of a thousand words is always above 0.
        output = np.zeros((len(texts), width), np.float32)
        output[allowed] = draw_noise(9, "output", len(allowed), width, scale=width**-0.5)
        writer.add_tensor("output.weight", output, half=True)
        decoder.write_blocks(writer, gain=1.0)


def write_tokenizer(writer: ModelWriter, texts: list[str]) -> None:
    """Write the metadata of the tokenizer."""
    merges = build_merges()
    kinds = [TokenType.CONTROL] * len(vocabulary.CONTROL_TOKENS) + [TokenType.NORMAL] * (256 + len(merges))
    kinds += [TokenType.UNUSED] * (len(texts) - len(kinds))
    writer.add_metadata("tokenizer", {"chat_template": vocabulary.CHAT_TEMPLATE})
    writer.add_metadata(
        "tokenizer.ggml",
        {
            "model": "gpt2",
            "pre": "qwen2",
            "tokens": texts,
            "token_type": [int(kind) for kind in kinds],
            "merges": merges,
            "bos_token_id": vocabulary.END_OF_TEXT_TOKEN,
            "eos_token_id": vocabulary.TURN_END_TOKEN,
            "eot_token_id": vocabulary.TURN_END_TOKEN,
            "padding_token_id": vocabulary.PADDING_TOKEN,
            "add_bos_token": False,
        },
    )
