"""Every pre-tokenizer of llama.cpp, and texts made to overflow its stack or to take it hours.

Run as `python pre_tokenizers.py CHARACTERS BYTES NAME...`: tokenizes a text of each shape, of at most that size, and
prints a line for each: name, shape, number of tokens or error, CPU seconds. A crash ends the output.
"""

from __future__ import annotations

import string
import sys
import tempfile
import time
from pathlib import Path

from afterglow.errors import InvalidArgument
from afterglow.llama.gguf.formats import ValueType
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.testing import models
from support.gguf_document import Document, parse_document

PRE_TOKENIZERS = (
    "a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe", "codeshell", "cohere2moe",
    "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3", "default", "exaone",
    "exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "glm5",
    "gpt-2", "gpt-4o", "gpt3-finnish", "granite-docling", "granite-embed-multi-311m", "granite-embed-multi-97m",
    "grok-2", "hunyuan", "hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de", "jina-es", "jina-v1-en",
    "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm", "k2-horizon", "kanana2", "kimi-k2",
    "kormo", "laguna", "lfm2", "llada-moe", "llama-bpe", "llama-v3", "llama3", "llama4", "megrez", "mellum",
    "mellum2", "midm-2.0", "minerva-7b", "minicpm5", "minimax-m2", "mmbert", "modern-bert", "mpt", "olmo", "phi-2",
    "pixtral", "poro-chat", "qwen2", "qwen35", "refact", "roberta-bpe", "sarvam-moe", "seed-coder", "smaug-bpe",
    "smollm", "solar-open", "spark2_5", "stablelm2", "starcoder", "superbpe", "talkie", "tekken", "tiny_aya",
    "trillion", "ufakzeka", "viking", "whitespace", "youtu",
)  # fmt: skip
# One of each group with the same patterns, of those that use std::regex.
RECURSIVE = (
    "gpt-4o", "tekken", "deepseek-v3", "deepseek-llm", "exaone-moe", "bloom", "superbpe", "whitespace", "youtu",
)  # fmt: skip

SHAPES = {
    "letter": "a",
    "spaces": " ",
    "digits": "1",
    "emoji": "\N{GRINNING FACE}",
    "combining marks": "\N{COMBINING ACUTE ACCENT}",
    "CJK": "\N{CJK UNIFIED IDEOGRAPH-8A9E}",
    "words": "a ",
    "punctuation": "!",
    "slashes": "\n/",
}


def build_document(pre_tokenizer: str) -> Document:
    """Return a file with the tiny vocabulary and no weights."""
    document = parse_document(models.get_path("attention").read_bytes())
    document.tensors = []
    document.set("tokenizer.ggml.pre", ValueType.STRING, pre_tokenizer.encode())
    if pre_tokenizer == "whitespace":
        document.set("tokenizer.ggml.model", ValueType.STRING, b"whitespace")
    return document


def build_spm_document(user_defined: str) -> Document:
    """Return a file with a vocabulary of SentencePiece, which puts a space before every text, and no weights."""
    document = build_document("default")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *string.ascii_lowercase]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 27, 4]
    document.set("tokenizer.ggml.model", ValueType.STRING, b"llama")
    document.set("tokenizer.ggml.tokens", ValueType.STRING, *(text.encode() for text in [*tokens, user_defined]))
    document.set("tokenizer.ggml.scores", ValueType.FLOAT32, *[0.0] * len(kinds))
    document.set("tokenizer.ggml.token_type", ValueType.INT32, *kinds)
    return document


def load_vocabulary(document: Document, directory: Path) -> LlamaModel:
    path = directory / "vocabulary.gguf"
    path.write_bytes(document.to_bytes())
    return LlamaModel.load(path, ModelSettings(vocab_only=True), trust=True)


def build_text(shape: str, characters: int, nbytes: int) -> str:
    unit = SHAPES[shape]
    return unit * (min(characters, nbytes * len(unit) // len(unit.encode())) // len(unit))


def main(characters: int, nbytes: int, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            with load_vocabulary(build_document(name), Path(directory)) as model:
                for shape in SHAPES:
                    text, started = build_text(shape, characters, nbytes), time.process_time()
                    try:
                        outcome = str(len(model.vocabulary.tokenize(text)))
                    except InvalidArgument as error:
                        outcome = str(error)
                    print(f"{name}\t{shape}\t{outcome}\t{time.process_time() - started:.3f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
