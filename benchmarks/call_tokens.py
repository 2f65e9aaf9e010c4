"""Tokens of constrained JSON: median tokens of a required tool call and of a JSON answer, beside llama-server.

    python benchmarks/call_tokens.py [--requests 30] [--temperature 1.0] [--threads N]

Prints one row per server, and the ratios, which must not exceed 1 by more than 2 %. The values have fixed lengths, so
that the numbers of tokens differ by white space only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
from peers import Chunk, Peer, ServerSize, start_peers

from afterglow import registry

LIMIT = 1.02
SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 10, "maximum": 99},
        "y": {"type": "boolean"},
        "name": {"enum": ["alpha", "beta"]},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3, "maxItems": 3},
    },
    "required": ["x", "y", "name", "tags"],
    "additionalProperties": False,
}
CALL: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "report", "description": "Report.", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
ANSWER = {"response_format": {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA}}}


def count_tokens(peer: Peer, fields: dict[str, Any], requests: int, temperature: float) -> list[int]:
    """Return the generated tokens of the requests whose JSON conforms to the schema. Others have another length."""
    messages = [{"role": "user", "content": "Report one item."}]
    counts = []
    for seed in range(requests):
        body = {"messages": messages, "max_tokens": 300, "temperature": temperature, "seed": seed, **fields}
        chunks = list(peer.chat(body))
        if conforms(chunks):
            counts.append(max(chunk.generated_tokens for chunk in chunks))
    return counts


def conforms(chunks: Sequence[Chunk]) -> bool:
    """Return whether the arguments of the call, or else the text, conform to the schema."""
    calls = [call for chunk in chunks for call in chunk.delta.get("tool_calls") or ()]
    arguments = [call["function"].get("arguments") or "" for call in calls]
    try:
        jsonschema.validate(json.loads("".join(arguments or [chunk.text for chunk in chunks])), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> int:
    """Count the tokens of both servers and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    model = registry.resolve("smollm2", fetch=True)
    medians: dict[str, dict[str, float]] = {}
    with start_peers(ServerSize(model=model, threads=arguments.threads, slots=1, context=2048)) as peers:
        for peer in peers:
            medians[peer.name] = {}
            for kind, fields in (("call", CALL), ("answer", ANSWER)):
                counts = count_tokens(peer, fields, arguments.requests, arguments.temperature)
                conforming = f"{len(counts)} of {arguments.requests} conform to the schema"
                if counts:
                    medians[peer.name][kind] = statistics.median(counts)
                    print(f"{peer.name:14} {kind:7} {medians[peer.name][kind]:6.1f} tokens, {conforming}", flush=True)
                else:
                    print(f"{peer.name:14} {kind:7}      - tokens, {conforming}", flush=True)
    kinds = medians["afterglow"].keys() & medians["llama-server"].keys()
    ratios = {kind: medians["afterglow"][kind] / medians["llama-server"][kind] for kind in kinds}
    print(json.dumps({"medians": medians, "ratios": ratios}))
    return int(max(ratios.values(), default=0) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
