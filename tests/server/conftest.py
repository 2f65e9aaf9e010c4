"""Servers that many tests share: tiny models whose next token is known, and one that people run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from afterglow.testing import models as tiny
from afterglow.testing.models import constructed, vocabulary
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.writer import ModelWriter
from support.server_process import ServerProcess

THINKING = vocabulary.CHAT_TEMPLATE.replace(
    "assistant\n{%", "assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{%"
)


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that follows the cycle, whose template opens a thought, and which has tokens for filling in."""
    path = tmp_path_factory.mktemp("models") / "thinker.gguf"
    describe = vocabulary.write_tokenizer

    def with_infill(writer: ModelWriter) -> None:
        describe(writer)
        marks = {"fim_pre_token_id": 4, "fim_suf_token_id": 5, "fim_mid_token_id": 6}
        writer.add_metadata("tokenizer.ggml", marks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHAT_TEMPLATE", THINKING)
        patch.setattr(vocabulary, "write_tokenizer", with_infill)
        constructed.write_successor_model(path, Llama())
    return path


@pytest.fixture(scope="session")
def server(caches_of_our_own: None, thinker: Path) -> Iterator[ServerProcess]:
    """A server with tiny models, for tests that leave it as it was."""
    models = [
        f"tiny={tiny.get_path('successor-attention')}",
        f"hybrid={tiny.get_path('successor-hybrid')}",
        f"vectors={tiny.get_path('embedding')}",
        f"thinker={thinker}",
    ]
    running = ServerProcess(*models, "--context", "2048", "--sequences", "8")
    yield running
    running.end()


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Iterator[ServerProcess]:
    """A server with the model that people run."""
    running = ServerProcess(f"smollm2={smollm2}", "--context", "1024", "--sequences", "4")
    yield running
    running.end()
