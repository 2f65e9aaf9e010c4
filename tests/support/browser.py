"""Chromium for tests of the web page."""

from __future__ import annotations

import os
import shutil

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MISSING = "no chromium: the tests of the web page in a browser are left out; `make browser` installs it"


def is_browser_required() -> bool:
    """Whether the tests must not be left out."""
    return os.environ.get("CI", "").lower() in ("1", "true")
