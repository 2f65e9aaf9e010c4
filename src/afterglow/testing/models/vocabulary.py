"""Vocabulary of the tiny text models: byte-level BPE with a few merges, control tokens and a ChatML template."""

from __future__ import annotations

from itertools import count

from gguf import TokenType

from afterglow.testing.models.writer import ModelWriter

END_OF_TEXT_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN, PADDING_TOKEN = range(4)
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<start_of_image>",
    "<end_of_image>",
)
# "Ġ" is the printable form of a space. A merge may only join existing tokens.
MERGES = ("t h", "th e", "Ġ the", "i n", "in g", "e r", "a n", "an d", "Ġ and", "o u", "r e", "o n", "Ġ t", "Ġ w")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def get_byte_token(byte: int) -> int:
    """Return the token of one byte.

    >>> get_byte_token(0) == len(CONTROL_TOKENS)
    True
    """
    return len(CONTROL_TOKENS) + byte


def build_byte_alphabet() -> list[str]:
    """Return GPT-2's spelling of the 256 bytes: printable ones as they are, the others as characters from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _build_tokens() -> tuple[str, ...]:
    tokens = [*CONTROL_TOKENS, *build_byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    unused = -len(tokens) % 32  # matrix kernels and quantized blocks need multiples of 32 rows
    return (*tokens, *(f"<|unused_{number}|>" for number in range(unused)))


TOKENS = _build_tokens()
VOCABULARY_SIZE = len(TOKENS)


def write_tokenizer(writer: ModelWriter, size: int = VOCABULARY_SIZE) -> None:
    """Add the tokenizer's metadata. A larger `size` adds unused tokens."""
    normal = 256 + len(MERGES)
    unused = size - len(CONTROL_TOKENS) - normal
    tokens = (*TOKENS, *(f"<|unused_{number}|>" for number in range(VOCABULARY_SIZE, size)))
    kinds = [TokenType.CONTROL] * len(CONTROL_TOKENS) + [TokenType.NORMAL] * normal + [TokenType.UNUSED] * unused
    writer.add_metadata("tokenizer", {"chat_template": CHAT_TEMPLATE})
    writer.add_metadata(
        "tokenizer.ggml",
        {
            "model": "gpt2",
            # With "gpt-2" here llama.cpp would drop the space before a full stop when it detokenizes.
            "pre": "qwen2",
            "tokens": tokens,
            "token_type": [int(kind) for kind in kinds],
            "merges": MERGES,
            "bos_token_id": END_OF_TEXT_TOKEN,
            "eos_token_id": TURN_END_TOKEN,
            # Without this key, llama.cpp uses the first end-like token that its hash map yields.
            "eot_token_id": TURN_END_TOKEN,
            "padding_token_id": PADDING_TOKEN,
            "add_bos_token": False,
        },
    )
