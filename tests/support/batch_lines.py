"""Lines of batches, and helpers that run a batch with OpenAI's client."""

from __future__ import annotations

import json
import random
import string
from typing import TYPE_CHECKING, Any

from support.server_process import wait_until

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

CHAT = "/v1/chat/completions"


def build_line(custom_id: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    """Return a line; by default a chat of few tokens."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    if url == CHAT and "messages" not in fields:
        body["messages"] = [{"role": "user", "content": custom_id}]
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **fields}}


def build_shuffled_lines(lines: int, systems: int, system_words: int = 60) -> list[dict[str, Any]]:
    """Return chats over a number of system prompts, with questions that share no more than letters, shuffled."""
    draw = random.Random(1)
    questions = ["".join(draw.choices(string.ascii_lowercase, k=12)) for _ in range(lines)]
    prompts = [
        f"{lines} lines, system {n} " + " ".join(f"w{n}{word}" for word in range(system_words)) for n in range(systems)
    ]
    built = [
        build_line(
            f"line-{number}",
            max_tokens=1,  # so that decodes have rows of prompts only
            messages=[
                {"role": "system", "content": prompts[number % systems]},
                {"role": "user", "content": questions[number]},
            ],
        )
        for number in range(lines)
    ]
    draw.shuffle(built)
    return built


def encode_lines(lines: list[Any]) -> bytes:
    """Return lines as a file. A text is a line as it is."""
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()


def start_batch(client: openai.OpenAI, lines: list[Any], endpoint: str = CHAT, **options: Any) -> Batch:
    """Upload lines and create a batch."""
    file = client.files.create(file=("in.jsonl", encode_lines(lines)), purpose="batch")
    window = options.pop("completion_window", "24h")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **options)  # type: ignore[arg-type]


def wait_for_end(client: openai.OpenAI, id: str) -> Batch:
    """Wait until a batch has ended and return it."""
    final = ("completed", "failed", "expired", "cancelled")
    assert wait_until(240, lambda: client.batches.retrieve(id).status in final), client.batches.retrieve(id)
    return client.batches.retrieve(id)


def read_results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output file; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
