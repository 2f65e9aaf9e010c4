"""Roles of children: name, instructions, sampling and allowed tools, in Markdown files with front matter.

---
name: reviewer
description: Finds mistakes in a patch.
allow: [read]
temperature: 0.2
---
You review patches. Name the file and the line of every mistake.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from afterglow.api.options import ChatGenerationOptions, SamplingOptions, check_options
from afterglow.errors import InvalidArgument

FENCE = "---"
ROLE_FIELDS = ("name", "description", "allow", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A named role of a child. `allow` is None for all tools of the parent.

    >>> parse_role("---\\nname: reviewer\\nallow: [read]\\n---\\nYou review patches.", "reviewer.md").allow
    ('read',)
    """

    name: str
    instructions: str
    description: str = ""
    allow: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # sampling and `max_tokens`


def parse_role(text: str, where: str) -> Role:
    """Parse a Markdown file with front matter. `where` names it in errors, and is the default of its name."""
    head, fence, body = text.removeprefix("\ufeff").lstrip().removeprefix(FENCE).partition(f"\n{FENCE}")
    if not text.removeprefix("\ufeff").lstrip().startswith(FENCE) or not fence:
        raise InvalidArgument("roles", f"{where} must begin with front matter between two lines of {FENCE}")
    try:
        fields = yaml.safe_load(head) or {}
    except yaml.YAMLError as error:
        raise InvalidArgument("roles", f"the front matter of {where} is not YAML: {error}") from None
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise InvalidArgument("roles", f"the front matter of {where} must be fields with values")
    allow = fields.get("allow")
    if allow is not None and not (isinstance(allow, list) and all(isinstance(word, str) for word in allow)):
        raise InvalidArgument("roles", f"`allow` of {where} must be a list of effects and tools, not {allow!r}")
    options = {key: value for key, value in fields.items() if key not in ROLE_FIELDS}
    limit = {"max_tokens": fields["max_tokens"]} if "max_tokens" in fields else {}
    try:
        check_options(SamplingOptions, options, others=ROLE_FIELDS)
        check_options(ChatGenerationOptions, limit)
    except InvalidArgument as error:
        raise InvalidArgument("roles", f"{where}: {error}") from None
    return Role(
        name=str(fields.get("name") or Path(where).stem),
        description=str(fields.get("description", "")),
        instructions=body.strip(),
        allow=None if allow is None else tuple(allow),
        options={**options, **limit},
    )


def read_role(path: Path) -> Role:
    """Read the role of a Markdown file."""
    try:
        return parse_role(path.read_text("utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("roles", f"{path} cannot be read: {error}") from None


def load_roles(source: str | os.PathLike[str] | Sequence[Role]) -> dict[str, Role]:
    """Return roles by name: given ones, or those of the Markdown files of a directory."""
    if isinstance(source, str | os.PathLike):
        directory = Path(source)
        if not directory.is_dir():
            raise InvalidArgument("roles", f"{directory} is not a directory")
        source = [read_role(path) for path in sorted(directory.glob("*.md"))]
    roles: dict[str, Role] = {}
    for role in source:
        if not isinstance(role, Role):
            raise InvalidArgument("roles", f"must be a directory or a list of Role(…), not of {role!r}")
        if role.name in roles:
            raise InvalidArgument("roles", f"{role.name!r} is the name of two roles")
        roles[role.name] = role
    return roles
