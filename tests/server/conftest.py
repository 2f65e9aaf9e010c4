"""Server processes that many tests share: with tiny models of known output, and with SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow.server.logs import start_record
from afterglow.testing import models
from afterglow.testing.models import constructed, vocabulary
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.writer import ModelWriter
from support.server_process import ServerProcess

# A test sets the samplers that it is about; the defaults would hide a high temperature.
NO_SAMPLERS = ("--temperature", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0")
REASONING_TEMPLATE = vocabulary.CHAT_TEMPLATE.replace(
    "assistant\n{%", "assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{%"
)


@pytest.fixture(autouse=True)
def request_record() -> None:
    """A record of its own for each test: outside a server, that of the test before would go on."""
    start_record("", "")


@pytest.fixture(scope="session")
def reasoning_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that follows the cycle, with infill tokens and a template that opens a reasoning block."""
    path = tmp_path_factory.mktemp("models") / "reasoning.gguf"
    write_tokenizer = vocabulary.write_tokenizer

    def write_tokenizer_with_infill(writer: ModelWriter) -> None:
        write_tokenizer(writer)
        infill_tokens = {"fim_pre_token_id": 4, "fim_suf_token_id": 5, "fim_mid_token_id": 6}
        writer.add_metadata("tokenizer.ggml", infill_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHAT_TEMPLATE", REASONING_TEMPLATE)
        patch.setattr(vocabulary, "write_tokenizer", write_tokenizer_with_infill)
        constructed.write_successor_model(path, Llama())
    return path


@pytest.fixture(scope="session")
def server(caches_of_our_own: None, reasoning_model: Path) -> Iterator[ServerProcess]:
    """A server with tiny models, for tests that leave it unchanged."""
    arguments = [
        f"tiny={models.get_path('successor-attention')}",
        f"hybrid={models.get_path('successor-hybrid')}",
        f"vectors={models.get_path('embedding')}",
        f"reasoning={reasoning_model}",
    ]
    process = ServerProcess(*arguments, "--context", "2048", "--sequences", "8", *NO_SAMPLERS)
    yield process
    process.stop()


@pytest.fixture(scope="session")
def smollm2_server(smollm2: Path) -> Iterator[ServerProcess]:
    """A server with SmolLM2."""
    process = ServerProcess(f"smollm2={smollm2}", "--context", "1024", "--sequences", "4")
    yield process
    process.stop()
