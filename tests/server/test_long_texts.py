"""No message ends the server: a pre-tokenizer that recurses per character gets texts that would overflow its stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from afterglow.llama.gguf.formats import ValueType
from afterglow.testing import models
from support.gguf_document import parse_document
from support.server_process import ServerProcess

pytestmark = pytest.mark.native


def test_no_message_ends_the_server(tmp_path: Path) -> None:
    document = parse_document(models.get_path("successor-attention").read_bytes())
    document.set("tokenizer.ggml.pre", ValueType.STRING, b"gpt-4o")
    path = tmp_path / "recursive.gguf"
    path.write_bytes(document.to_bytes())
    server = ServerProcess(f"tiny={path}", "--context", "512", "--sequences", "1")
    try:
        expected = server.chat("abc")
        assert expected["status"] == 200
        for text, code in (("a" * 24_000, "context_length_exceeded"), ("a" * 10**6, "invalid_value")):
            error = server.chat(text)["error"]
            assert (error["param"], error["code"]) == ("messages", code)
            response = server.post("/v1/completions", {"model": "tiny", "prompt": text})
            assert response.status_code == 400
            assert (response.json()["error"]["param"], response.json()["error"]["code"]) == ("prompt", code)
        assert "has a line of 1,000,000 characters, at most 524,288" in error["message"]
        assert server.chat("abc")["choices"] == expected["choices"]
        assert server.process.poll() is None
    finally:
        server.stop()
