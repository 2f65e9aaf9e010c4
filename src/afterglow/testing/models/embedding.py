"""Embedding model and cross-encoder: bert with a small WordPiece vocabulary. They generate no text."""

from __future__ import annotations

import string
from pathlib import Path

from gguf import PoolingType, TokenType

from afterglow.testing.models.writer import ModelWriter

CONTEXT_LENGTH_TOKENS = 512  # positions are a table, and real bert models have no more
EMBEDDING_LENGTH, LAYERS, HEADS, FEED_FORWARD_LENGTH = 64, 2, 4, 128
BLOCK_GAIN = 0.25  # small, so that the vector depends mostly on the words themselves

_CONTROL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PADDING, _UNKNOWN, _START, _SEPARATOR, _MASK = range(len(_CONTROL_TOKENS))
# With fewer than 104 tokens llama.cpp warns that its default control tokens do not exist.
_WORDS = (
    *("the", "of", "to", "and", "in", "is", "on", "sat", "ran", "hello"),
    *("cat", "dog", "mat", "king", "queen", "man", "woman", "world", "river", "sun"),
)
_CHARACTERS = string.ascii_lowercase + string.digits + ".,!?-"
# The start of a word has a prefix, its continuation does not; llama.cpp aborts if two tokens are equal.
TOKENS = (*_CONTROL_TOKENS, *(f"\u2581{start}" for start in (*_WORDS, *_CHARACTERS)), *_CHARACTERS)


def _write_metadata(writer: ModelWriter, pooling: PoolingType) -> None:
    kinds = [TokenType.CONTROL] * len(_CONTROL_TOKENS) + [TokenType.NORMAL] * (len(TOKENS) - len(_CONTROL_TOKENS))
    writer.add_metadata(
        "tokenizer.ggml",
        {
            "model": "bert",
            "pre": "default",
            "tokens": TOKENS,
            "token_type": [int(kind) for kind in kinds],
            "token_type_count": 2,
            "padding_token_id": _PADDING,
            "unknown_token_id": _UNKNOWN,
            "bos_token_id": _START,
            "cls_token_id": _START,
            "eos_token_id": _SEPARATOR,
            "seperator_token_id": _SEPARATOR,  # llama.cpp's spelling
            "mask_token_id": _MASK,
        },
    )
    writer.add_metadata(
        "bert",
        {
            "vocab_size": len(TOKENS),
            "context_length": CONTEXT_LENGTH_TOKENS,
            "embedding_length": EMBEDDING_LENGTH,
            "block_count": LAYERS,
            "feed_forward_length": FEED_FORWARD_LENGTH,
            "attention.head_count": HEADS,
            "attention.layer_norm_epsilon": 1e-12,
            "attention.causal": False,
            "pooling_type": int(pooling),
        },
    )


def write_embedding_model(path: Path) -> None:
    """Write a random encoder; texts with common words have closer embeddings than texts without."""
    _write_encoder(path, seed=7, pooling=PoolingType.MEAN)


def write_cross_encoder(path: Path) -> None:
    """Write a random encoder with a classifier head: it scores a pair of texts by one number."""
    _write_encoder(path, seed=16, pooling=PoolingType.RANK)


def _write_encoder(path: Path, *, seed: int, pooling: PoolingType) -> None:
    with ModelWriter(path, "bert", seed=seed) as writer:
        _write_metadata(writer, pooling)
        if pooling == PoolingType.RANK:
            writer.add_linear("cls", EMBEDDING_LENGTH, EMBEDDING_LENGTH)
            writer.add_linear("cls.output", 1, EMBEDDING_LENGTH)
        writer.add_noise("token_embd.weight", len(TOKENS), EMBEDDING_LENGTH, scale=1.0, half=True)
        writer.add_noise("token_types.weight", 2, EMBEDDING_LENGTH, scale=0.1)
        writer.add_noise("position_embd.weight", CONTEXT_LENGTH_TOKENS, EMBEDDING_LENGTH, scale=0.1)
        writer.add_norm("token_embd_norm", EMBEDDING_LENGTH)
        for layer in range(LAYERS):
            block = f"blk.{layer}"
            for name in ("attn_q", "attn_k", "attn_v"):
                writer.add_linear(f"{block}.{name}", EMBEDDING_LENGTH, EMBEDDING_LENGTH)
            writer.add_linear(f"{block}.attn_output", EMBEDDING_LENGTH, EMBEDDING_LENGTH, gain=BLOCK_GAIN)
            writer.add_linear(f"{block}.ffn_up", FEED_FORWARD_LENGTH, EMBEDDING_LENGTH)
            writer.add_linear(f"{block}.ffn_down", EMBEDDING_LENGTH, FEED_FORWARD_LENGTH, gain=BLOCK_GAIN)
            writer.add_norm(f"{block}.attn_output_norm", EMBEDDING_LENGTH)
            writer.add_norm(f"{block}.layer_output_norm", EMBEDDING_LENGTH)
