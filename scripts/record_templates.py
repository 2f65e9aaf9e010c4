"""Records what llama.cpp's own template engine makes of real templates, for tests/chat/test_real_templates.py.

    .venv/bin/python scripts/record_templates.py

Each conversation of tests/chat/conversations.py is rendered three times: by us, by llama.cpp's engine with the
template alone, and by llama.cpp with its special treatment of some families. Only the hash, the length and the last
characters of a rendering go to tests/data/templates.json. Where we agree with neither, ours is recorded with the
reason from NOTES; a difference without a reason is not recorded.
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
from afterglow.testing import models as tiny  # noqa: E402
from support import conversations, fetched  # noqa: E402

END = 40  # characters that are kept to show where a rendering went wrong

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
    "fireworks-ai-llama-3-firefunction-v2": "wants the variable `functions`; Jinja refuses to add what is undefined",
    "google-translategemma-4b-it": "wants language codes in every message; llama.cpp makes them up",
}


def server(source: str, alone: bool) -> xllamacpp.Server:
    """llama.cpp's server with this template; `alone`: without its special treatment of families."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(tiny.get_path("attention"))
    settings.use_jinja, settings.chat_template = True, source
    settings.force_pure_content_parser = alone
    settings.warmup, settings.fit_params, settings.verbosity = False, False, 1
    settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 512, 1, 1
    return xllamacpp.Server(settings)


def theirs(serving: xllamacpp.Server, turns: list[dict[str, Any]], tools: bool) -> str | None:
    body: dict[str, Any] = {"messages": turns, "chat_template_kwargs": conversations.ARGUMENTS}
    if tools:
        body["tools"] = conversations.TOOLS
    request = urllib.request.Request(
        f"{serving.listening_address}/apply-template", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["prompt"])
    except urllib.error.HTTPError as error:
        error.close()
        return None


def ours(template: ChatTemplate, turns: list[dict[str, Any]], tools: bool) -> str | None:
    offered = conversations.TOOLS if tools else ()
    try:
        return template.render(parse_messages(turns), tools=offered, chat_template_kwargs=conversations.ARGUMENTS)
    except InvalidTemplate:
        return None


def record(name: str, own: str | None, alone: str | None, treated: str | None) -> dict[str, Any]:
    written: dict[str, Any] = {"refused": True}
    if own is not None:
        written = {"sha256": hashlib.sha256(own.encode()).hexdigest(), "length": len(own), "end": own[-END:]}
    if own == alone:
        return written
    if own == treated:
        return {**written, "treated": True}
    if name not in NOTES:
        sys.exit(f"{name}: we and llama.cpp differ, and NOTES has no reason")
    return {**written, "note": NOTES[name]}


def main() -> None:
    now = datetime.datetime.now().replace(microsecond=0)
    recorded: dict[str, Any] = {"now": now.isoformat(), "templates": {}}
    for name, path in fetched.chat_templates().items():
        source = path.read_text(encoding="utf-8")
        alone, treated = server(source, True), server(source, False)
        with ChatTemplate(source, conversations.TOKENS, clock=lambda: now) as template:
            recorded["templates"][name] = {
                told: record(name, ours(template, *case), theirs(alone, *case), theirs(treated, *case))
                for told, case in conversations.CONVERSATIONS.items()
            }
    text = json.dumps(recorded, indent=1, ensure_ascii=False)
    (TESTS / "data" / "templates.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
