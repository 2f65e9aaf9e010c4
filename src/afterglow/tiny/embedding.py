"""A model that turns a text into one vector: bert, with a small WordPiece vocabulary of its own.

It knows the architecture's settings and tensors. It generates nothing and keeps no memory.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gguf import PoolingType, TokenType

from afterglow.tiny.writer import Writer

CONTEXT_LENGTH = 512  # positions are a table here, and real models of the kind have no more
WIDTH, LAYERS, HEADS, INNER = 64, 2, 4, 128
QUIET = 0.25  # what the blocks add, beside the words themselves: mostly the words make the vector

_CONTROL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PADDING, _UNKNOWN, _START, _SEPARATOR, _MASK = range(len(_CONTROL))
# With fewer than 104 tokens llama.cpp warns that its default control tokens do not exist.
_WORDS = (
    *("the", "of", "to", "and", "in", "is", "on", "sat", "ran", "hello"),
    *("cat", "dog", "mat", "king", "queen", "man", "woman", "world", "river", "sun"),
)
_CHARACTERS = string.ascii_lowercase + string.digits + ".,!?-"
# The start of a word is marked, its continuation is not; llama.cpp aborts where two tokens read the same.
TOKENS = (*_CONTROL, *(f"\u2581{start}" for start in (*_WORDS, *_CHARACTERS)), *_CHARACTERS)


def _describe(writer: Writer) -> None:
    kinds = [TokenType.CONTROL] * len(_CONTROL) + [TokenType.NORMAL] * (len(TOKENS) - len(_CONTROL))
    writer.settings(
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
            "seperator_token_id": _SEPARATOR,  # spelt as llama.cpp spells it
            "mask_token_id": _MASK,
        },
    )
    writer.settings(
        "bert",
        {
            "vocab_size": len(TOKENS),
            "context_length": CONTEXT_LENGTH,
            "embedding_length": WIDTH,
            "block_count": LAYERS,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.layer_norm_epsilon": 1e-12,
            "attention.causal": False,
            "pooling_type": int(PoolingType.MEAN),
        },
    )


def write_embedding(path: Path, *, seed: int) -> None:
    """Write a random encoder; texts that share words come out closer than texts that do not."""
    with Writer(path, "bert", seed=seed) as writer:
        _describe(writer)
        writer.noise("token_embd.weight", len(TOKENS), WIDTH, scale=1.0, half=True)
        writer.noise("token_types.weight", 2, WIDTH, scale=0.1)
        writer.noise("position_embd.weight", CONTEXT_LENGTH, WIDTH, scale=0.1)
        writer.norm("token_embd_norm", WIDTH)
        for layer in range(LAYERS):
            block = f"blk.{layer}"
            for name in ("attn_q", "attn_k", "attn_v"):
                writer.linear(f"{block}.{name}", WIDTH, WIDTH)
            writer.linear(f"{block}.attn_output", WIDTH, WIDTH, gain=QUIET)
            writer.linear(f"{block}.ffn_up", INNER, WIDTH)
            writer.linear(f"{block}.ffn_down", WIDTH, INNER, gain=QUIET)
            writer.norm(f"{block}.attn_output_norm", WIDTH)
            writer.norm(f"{block}.layer_output_norm", WIDTH)


RECIPES: dict[str, Callable[[Path], None]] = {"embedding": partial(write_embedding, seed=7)}
