"""A hybrid model of 109 million parameters with random weights that says plain words.

Recurrent and attention layers take turns, as in qwen35, with the shapes of a real model of that size in 4 bits. Its
answers mean nothing, but they are words of the vocabulary and nothing else: what is said is read back as the same
tokens, and no answer ends by itself. Written once, in about twenty seconds, and kept in the cache.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
from constructed import QuantizedWriter
from gguf import TokenType
from words import WORDS

from afterglow.paths import get_cache_directory
from afterglow.testing.models import vocabulary
from afterglow.testing.models.hybrid import Qwen35
from afterglow.testing.models.projector import ProjectorSize, write_qwen
from afterglow.testing.models.writer import ModelWriter, draw_noise

CONTEXT_LENGTH = 32_768
SPACE = "Ġ"  # how byte-level vocabularies write it
DECODER = Qwen35(
    embedding_length=768, layers=13, full_attention_interval=4, heads=6, kv_heads=2, head_size=128, feed_forward_length=2304, state_size=128,
    state_key_heads=6, state_heads=6,
)  # fmt: skip
TINY = Qwen35()  # the same for tests, in milliseconds


def merges() -> list[str]:
    """Every word grows letter by letter from its space; roles from their first letter, after everything else."""
    grown: dict[str, None] = {}
    for start, words in ((SPACE, WORDS), ("", ("system", "user", "assistant"))):
        for word in words:
            letters = start + word
            for length in range(2, len(letters) + 1):
                grown.setdefault(f"{letters[: length - 1]} {letters[length - 1]}")
    return list(grown)


def tokens() -> tuple[list[str], list[int]]:
    """The texts of all tokens, and which of them the model may say."""
    texts = [
        *vocabulary.CONTROL_TOKENS,
        *vocabulary._build_byte_alphabet(),
        *(merge.replace(" ", "") for merge in merges()),
    ]
    texts += [f"<|unused_{number}|>" for number in range(-len(texts) % 32)]
    words = {SPACE + word for word in WORDS}
    return texts, [number for number, text in enumerate(texts) if text in words]


def path(decoder: Qwen35 = DECODER) -> Path:
    """The model's file; written where it is not there yet."""
    file = get_cache_directory("benchmarks") / f"talking-hybrid-{decoder.embedding_length}x{decoder.layers}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        write(unfinished, decoder)
        os.replace(unfinished, file)
    return file


def projector() -> Path:
    """Lets the model see; its numbers mean nothing. Written where it is not there yet."""
    width = DECODER.embedding_length
    file = get_cache_directory("benchmarks") / f"talking-hybrid-{width}-sees.gguf"
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        write_qwen(
            unfinished,
            ProjectorSize(
                embedding_length=256, feed_forward_length=512, heads=4, layers=4, text_embedding_length=width
            ),
            max_pixels=256 * 256,
        )
        os.replace(unfinished, file)
    return file


def write(file: Path, decoder: Qwen35) -> None:
    """Write the model."""
    texts, sayable = tokens()
    with QuantizedWriter(file, decoder.architecture, seed=9) as writer:
        writer.kind = gguf.GGMLQuantizationType.Q4_0
        describe(writer, texts)
        sizes = {
            "context_length": CONTEXT_LENGTH,
            "embedding_length": decoder.embedding_length,
            "vocab_size": len(texts),
        }
        writer.add_metadata(decoder.architecture, {**sizes, **decoder.build_metadata()})
        writer.add_noise("token_embd.weight", len(texts), decoder.embedding_length, scale=1.0, half=True)
        writer.add_constant("output_norm.weight", 1.0, decoder.embedding_length)
        output = np.zeros((len(texts), decoder.embedding_length), np.float32)
        # What has no row of its own has a logit of 0, which the best of a thousand words always exceeds.
        output[sayable] = draw_noise(
            9, "output", len(sayable), decoder.embedding_length, scale=decoder.embedding_length**-0.5
        )
        writer.add_tensor("output.weight", output, half=True)
        decoder.write_blocks(writer, gain=1.0)


def describe(writer: ModelWriter, texts: list[str]) -> None:
    """Add the tokenizer's settings."""
    control, grown = len(vocabulary.CONTROL_TOKENS), len(merges())
    kinds = [TokenType.CONTROL] * control + [TokenType.NORMAL] * (256 + grown)
    kinds += [TokenType.UNUSED] * (len(texts) - len(kinds))
    writer.add_metadata("tokenizer", {"chat_template": vocabulary.CHAT_TEMPLATE})
    writer.add_metadata(
        "tokenizer.ggml",
        {
            "model": "gpt2",
            "pre": "qwen2",
            "tokens": texts,
            "token_type": [int(kind) for kind in kinds],
            "merges": merges(),
            "bos_token_id": vocabulary.END_OF_TEXT_TOKEN,
            "eos_token_id": vocabulary.TURN_END_TOKEN,
            "eot_token_id": vocabulary.TURN_END_TOKEN,
            "padding_token_id": vocabulary.PADDING_TOKEN,
            "add_bos_token": False,
        },
    )
