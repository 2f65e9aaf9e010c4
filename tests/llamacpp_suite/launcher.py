"""Program that llama.cpp's server tests start instead of llama-server: `launcher.py PEER FLAG…`.

It replaces every model by SmolLM2, or by the tiny reranker of `afterglow.testing` if the server is to rank, and starts
llama-server or afterglow with the flags. An unknown flag ends it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

MODEL_VARIABLE = "LLAMA_SUITE_MODEL"  # path of the model that replaces all others
RERANKER_VARIABLE = "LLAMA_SUITE_RERANKER"  # path of the model that replaces rerankers
PEERS = {  # modules that start them
    "llama-server": "llamacpp_suite.llama_server",
    "afterglow": "llamacpp_suite.afterglow_server",
}
# Flags of llama-server that its tests use, by the type of their value.
MODELS = ("--model", "--model-url", "--hf-repo", "--hf-file", "--mmproj-url")  # replaced by SmolLM2
TEXTS = (
    *("--model-draft", "--hf-repo-draft", "--models-dir", "--models-preset", "--alias", "--tags", "--api-key"),
    *("--pooling", "--slot-save-path", "--media-path", "--cors-origins", "--chat-template", "--chat-template-file"),
    *("--reasoning", "--reasoning-format", "--spec-type", "--spec-synth-rates"),
    *("--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json"),
)
SHORT_TEXTS = {
    "-fa": "flash_attn",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-ctkd": "cache_type_k_draft",
}
NUMBERS = (
    *("--ctx-size", "--parallel", "--batch-size", "--ubatch-size", "--threads", "--n-predict", "--n-gpu-layers"),
    *("--cache-ram", "--sleep-idle-seconds", "--models-max", "--spec-draft-n-min", "--spec-draft-n-max"),
    *("--grp-attn-n", "--grp-attn-w"),
)
SWITCHES = (
    *("--offline", "--cont-batching", "--embedding", "--reranking", "--metrics", "--kv-unified", "--swa-full"),
    *("--context-shift", "--verbose", "--no-mmproj", "--ui-mcp-proxy", "--backend_sampling"),
)
ON_OFF = ("--slots", "--jinja", "--ui", "--models-autoload", "--cache-idle-slots")  # and `--no-…`


def build_parser() -> argparse.ArgumentParser:
    """Return a parser of the flags."""
    parser = argparse.ArgumentParser(prog="launcher", allow_abbrev=False)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--spec-synth-len", type=float)
    parser.add_argument("--lora", action="append")
    for flag in (*MODELS, *TEXTS):
        parser.add_argument(flag)
    for flag, name in SHORT_TEXTS.items():
        parser.add_argument(flag, dest=name)
    for flag in NUMBERS:
        parser.add_argument(flag, type=int)
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true", default=None)
    for flag in ON_OFF:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
    return parser


def main() -> None:
    """Start the peer with the flags of the command line."""
    flags = build_parser().parse_args()
    if not any((flags.model, flags.model_url, flags.hf_repo)):
        raise SystemExit("launcher: a router without a model is not part of this comparison")
    sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder
    model = Path(os.environ[RERANKER_VARIABLE if flags.reranking else MODEL_VARIABLE])
    importlib.import_module(PEERS[flags.peer]).serve(flags, model)


if __name__ == "__main__":
    main()
