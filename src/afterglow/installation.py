"""How this copy of afterglow was installed, for messages that say how to add an optional dependency."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from urllib.parse import urlsplit

DISTRIBUTION = "afterglow-llm"


def has_pip() -> bool:
    """Whether pip is installed for this Python. A virtual environment of uv has none.

    >>> isinstance(has_pip(), bool)
    True
    """
    return importlib.util.find_spec("pip") is not None


def format_install_command(extra: str) -> str:
    """Return the command that installs an extra of afterglow into this environment.

    >>> format_install_command("hub").split()[-1].endswith("[hub]'")
    True
    """
    clone = find_clone()
    requirement = f"'{DISTRIBUTION}[{extra}]'" if clone is None else f"--editable {shlex.quote(f'{clone}[{extra}]')}"
    python = shlex.quote(sys.executable)
    if has_pip():
        return f"{python} -m pip install {requirement}"
    return f"uv pip install --python {python} {requirement}"


def find_clone() -> str | None:
    """Return the directory of the repository if it is installed in place, as `make setup` does; None for a wheel.

    >>> find_clone() is None or find_clone().startswith("/")
    True
    """
    from importlib import metadata
    from urllib.request import url2pathname

    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(text) if text else {}
    is_editable = origin.get("dir_info", {}).get("editable", False)
    return url2pathname(urlsplit(origin["url"]).path) if is_editable else None
