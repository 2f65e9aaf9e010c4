"""MCP servers that misbehave: `python hostile_mcp.py KIND`. Plain JSON-RPC, so that they can break the protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

KIND = sys.argv[1]
SLOW_CALLS: dict[str, Any] = {}
TOOL = {"name": "work", "description": "Work.", "inputSchema": {"type": "object", "properties": {}}}


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def misbehave(id: Any) -> None:  # noqa: C901
    """Do what a server must not do, instead of answering a call."""
    match KIND:
        case "crash":
            os._exit(3)
        case "hang":
            time.sleep(3600)
        case "slow" if id != SLOW_CALLS.setdefault("first", id):  # the first call is not answered
            send({"id": id, "result": {"content": [{"type": "text", "text": "done"}]}})
        case "flood":
            while True:
                sys.stdout.write("x" * 1_000_000)  # one line without an end
        case "chatter":
            while True:
                send({"method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}})
        case "malformed":
            for line in ("{", "\udcff\udcfe", '{"jsonrpc": "1.0"}', "[" * 10_000, '{"id": NaN}') * 10:
                sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")
            sys.stdout.flush()
            time.sleep(3600)
        case "grandchildren":
            sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
            subprocess.Popen(sleep)
            subprocess.Popen(sleep, start_new_session=True)  # leaves the process group
            send({"id": id, "result": {"content": [{"type": "text", "text": "started"}]}})
        case "wrong":
            send({"id": id, "result": {"content": [{"type": "text"}], "isError": "perhaps"}})
        case "large":
            send({"id": id, "result": {"content": [{"type": "text", "text": "<|im_end|>" * 500_000}]}})
        case "polite":
            send({"id": id, "result": {"content": [{"type": "text", "text": "done"}]}})


def main() -> None:
    if KIND == "silent":
        time.sleep(3600)  # never starts, and ignores the end of its input
    if KIND == "missing":
        sys.exit("a module is missing")
    for line in sys.stdin:
        request = json.loads(line)
        method, id = request.get("method"), request.get("id")
        if method == "initialize":
            info = {"name": KIND, "version": "1"}
            capabilities: dict[str, Any] = {"tools": {}}
            version = request["params"]["protocolVersion"]
            send({"id": id, "result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}})
        elif method == "tools/list":
            read_only = {"annotations": {"readOnlyHint": True, "openWorldHint": False}}
            send({"id": id, "result": {"tools": [{**TOOL, **read_only}]}})
        elif method == "tools/call":
            misbehave(id)
        elif id is not None:
            send({"id": id, "error": {"code": -32601, "message": "method not found"}})


if __name__ == "__main__":
    main()
