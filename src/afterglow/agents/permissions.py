"""Permissions of tool calls: by the effect of a tool, and by rules for names. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from afterglow.errors import InvalidArgument

Effect: TypeAlias = Literal["read", "write", "external"]
Decision: TypeAlias = Literal["allow", "ask", "deny"]
EFFECTS: tuple[Effect, ...] = get_args(Effect)
DECISIONS: tuple[Decision, ...] = get_args(Decision)
STRICTEST_FIRST: tuple[Decision, ...] = ("deny", "ask", "allow")
WILDCARD = re.compile(r"[*?]|\[!?\]?[^\]]*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What happens to a call: it is executed, a person is asked, or it is denied.

    `read`, `write` and `external` are for the effect of a tool. `rules` are for names and patterns of names and come
    first: of the rules that match, the name counts, then the pattern with the most literal characters, and of equal
    ones the strictest.

    >>> permissions = Permissions(write="allow", rules={"git.*": "ask", "git.push*": "deny"})
    >>> permissions.find_decision("git.push", "write")
    ('deny', 'the rule git.push*')
    >>> permissions.find_decision("save", "write")
    ('allow', 'the effect write')
    """

    read: Decision = "allow"
    write: Decision = "ask"
    external: Decision = "ask"
    rules: Mapping[str, Decision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise InvalidArgument("permissions.rules", f"must be decisions by name or pattern, not {self.rules!r}")
        values: dict[str, Decision] = {effect: getattr(self, effect) for effect in EFFECTS}
        values |= {f"rules[{pattern!r}]": decision for pattern, decision in self.rules.items()}
        for name, decision in values.items():
            if decision not in DECISIONS:
                raise InvalidArgument(f"permissions.{name}", f"must be one of {', '.join(DECISIONS)}, not {decision!r}")

    def find_decision(self, name: str, effect: Effect) -> tuple[Decision, str]:
        """Return the decision for a tool, and what it follows from."""
        matching = [pattern for pattern in self.rules if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            decision: Decision = getattr(self, effect)
            return decision, f"the effect {effect}"
        pattern = min(
            matching, key=lambda rule: (rule != name, -count_literals(rule), STRICTEST_FIRST.index(self.rules[rule]))
        )
        return self.rules[pattern], f"the rule {pattern}"


DEFAULT_PERMISSIONS = Permissions()
ALLOW_ALL = Permissions(read="allow", write="allow", external="allow")


def count_literals(pattern: str) -> int:
    """Return the number of characters of a pattern that are no wildcards.

    >>> count_literals("git.push*"), count_literals("git.[a-z]*")
    (8, 4)
    """
    return len(WILDCARD.sub("", pattern))


def select_names(allow: Collection[str], effects: Mapping[str, Effect]) -> frozenset[str]:
    """Return the tools that `allow` names: by effect, by name or by a pattern of names. `effects` is by name.

    >>> sorted(select_names({"read", "git.*"}, {"look": "read", "git.push": "external", "save": "write"}))
    ['git.push', 'look']
    """
    if isinstance(allow, str):
        raise InvalidArgument("allow", f"must be a set of effects and names, not the text {allow!r}")
    tools = ", ".join(sorted(effects)) or "there are none"
    for word in allow:
        if word not in EFFECTS and not any(fnmatch.fnmatchcase(name, word) for name in effects):
            raise InvalidArgument(
                "allow",
                f"{word!r} is neither an effect ({', '.join(EFFECTS)}) nor matches a tool: {tools}",
            )
    return frozenset(
        name
        for name, effect in effects.items()
        if any(
            word == effect or fnmatch.fnmatchcase(name, word) for word in allow if word not in EFFECTS or word == effect
        )
    )
