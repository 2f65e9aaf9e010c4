"""Records how llama.cpp's own template engine renders real chat templates, for the tests of tests/chat/template.

    .venv/bin/python scripts/record_templates.py

Each conversation of tests/support/conversations.py is rendered three times: by afterglow, by llama.cpp's engine with
the template alone, and by llama.cpp with its special cases for some families. Only the hash, the length and the last
characters of a rendering go to tests/data/templates.json. If afterglow matches neither, its rendering is recorded with
the reason from NOTES; without a reason the script fails.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from afterglow.chat.messages import parse_messages  # noqa: E402
from afterglow.chat.template.renderer import ChatTemplate  # noqa: E402
from afterglow.errors import InvalidTemplate  # noqa: E402
from afterglow.testing import models  # noqa: E402
from support import conversations, fetched  # noqa: E402

END_CHARACTERS = 40  # recorded to show how a rendering differs

# The values go to tests/data/templates.json.
LOST = (
    "llama.cpp writes the conversation without the calls (and results) that this template does not show; we keep them"
)
NOTES = {
    "HuggingFaceTB-SmolLM3-3B": LOST,
    "LFM2-8B-A1B": LOST,
    "LFM2.5-Instruct": LOST,
    "ibm-granite-granite-3.3-2B-Instruct": LOST,
    "llama-cpp-rwkv-world": LOST,
    "microsoft-Phi-3.5-mini-instruct": LOST,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "calls are shown only beside content that is None; llama.cpp gives ''",
    "google-gemma-2-2b-it": "system text, calls and results are kept; llama.cpp joins with one line break, or refuses",
    "upstage-Solar-Open-100B": "reads `reasoning`; llama.cpp gives `reasoning_content` only",
    "meetkai-functionary-medium-v3.1": "adds to text marked safe, which Jinja escapes, in transformers too",
    "fireworks-ai-llama-3-firefunction-v2": (
        "wants the variable `functions`, which llama.cpp does not pass; it gets the tools as JSON"
    ),
    "google-translategemma-4b-it": "wants language codes in every message; llama.cpp makes them up",
}


def start_server(source: str, template_only: bool) -> xllamacpp.Server:
    """Start llama.cpp's server with this template; `template_only` disables its special cases for families."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(models.get_path("attention"))
    settings.use_jinja, settings.chat_template = True, source
    settings.force_pure_content_parser = template_only
    settings.warmup, settings.fit_params, settings.verbosity = False, False, 1
    settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 512, 1, 1
    return xllamacpp.Server(settings)


def render_with_llama_cpp(server: xllamacpp.Server, messages: list[dict[str, Any]], tools: bool) -> str | None:
    body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": conversations.TEMPLATE_KWARGS}
    if tools:
        body["tools"] = conversations.TOOLS
    request = urllib.request.Request(
        f"{server.listening_address}/apply-template", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return str(json.load(response)["prompt"])
    except urllib.error.HTTPError as error:
        error.close()
        return None


def render_with_afterglow(template: ChatTemplate, messages: list[dict[str, Any]], tools: bool) -> str | None:
    offered = conversations.TOOLS if tools else ()
    try:
        return template.render(
            parse_messages(messages), tools=offered, chat_template_kwargs=conversations.TEMPLATE_KWARGS
        )
    except InvalidTemplate:
        return None


def build_record(name: str, own: str | None, plain: str | None, special: str | None) -> dict[str, Any]:
    """Build the record of one rendering from those of afterglow, llama.cpp and llama.cpp with special cases."""
    record: dict[str, Any] = {"refused": True}
    if own is not None:
        digest = hashlib.sha256(own.encode()).hexdigest()
        record = {"sha256": digest, "length": len(own), "end": own[-END_CHARACTERS:]}
    if own == plain:
        return record
    if own == special:
        return {**record, "treated": True}
    if name not in NOTES:
        sys.exit(f"{name}: afterglow and llama.cpp differ, and NOTES has no reason")
    return {**record, "note": NOTES[name]}


def main() -> None:
    now = datetime.datetime.now().replace(microsecond=0)
    recorded: dict[str, Any] = {"now": now.isoformat(), "templates": {}}
    for name, path in fetched.fetch_chat_templates().items():
        source = path.read_text(encoding="utf-8")
        plain, special = start_server(source, True), start_server(source, False)
        with ChatTemplate(source, conversations.SPECIAL_TOKENS, clock=lambda: now) as template:
            recorded["templates"][name] = {
                label: build_record(
                    name,
                    render_with_afterglow(template, *case),
                    render_with_llama_cpp(plain, *case),
                    render_with_llama_cpp(special, *case),
                )
                for label, case in conversations.CONVERSATIONS.items()
            }
    text = json.dumps(recorded, indent=1, ensure_ascii=False)
    (TESTS / "data" / "templates.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
