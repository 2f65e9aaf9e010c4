"""Permissions: the most specific rule wins, and of equal ones the strictest."""

from __future__ import annotations

import pytest

from afterglow.agents.permissions import Permissions, select_names
from afterglow.errors import InvalidArgument


@pytest.mark.parametrize(
    ("name", "decision"),
    [("git.push", "deny"), ("git.push_tags", "deny"), ("git.log", "allow"), ("git.add", "ask"), ("other", "ask")],
)
def test_the_most_specific_rule_wins(name: str, decision: str) -> None:
    rules = {"*": "ask", "git.*": "ask", "git.log": "allow", "git.push*": "deny"}
    assert Permissions(external="allow", rules=rules).find_decision(name, "external")[0] == decision  # type: ignore[arg-type]


def test_of_equally_specific_rules_deny_wins_over_ask_and_ask_over_allow() -> None:
    assert Permissions(rules={"a*": "allow", "*a": "deny"}).find_decision("aa", "read")[0] == "deny"
    assert Permissions(rules={"a*": "allow", "*a": "ask"}).find_decision("aa", "read")[0] == "ask"


def test_a_name_is_more_specific_than_a_pattern() -> None:
    rules = {"git.push*": "deny", "git.push": "allow"}
    assert Permissions(rules=rules).find_decision("git.push", "write")[0] == "allow"  # type: ignore[arg-type]


def test_a_set_of_characters_is_less_specific_than_a_character() -> None:
    rules = {"git.[abcdefghijklmnopqrstuvwxyz]ush*": "allow", "git.push*": "deny"}
    assert Permissions(rules=rules).find_decision("git.push_all", "write")[0] == "deny"  # type: ignore[arg-type]


def test_the_effect_counts_without_a_rule() -> None:
    permissions = Permissions(read="allow", write="ask", external="deny", rules={"other": "allow"})
    assert [permissions.find_decision("x", effect)[0] for effect in ("read", "write", "external")] == [
        *("allow", "ask", "deny")
    ]


def test_an_unknown_decision_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"permissions\.write"):
        Permissions(write="maybe")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"rules\['x'\]"):
        Permissions(rules={"x": "yes"})  # type: ignore[dict-item]


def test_rights_are_named_by_effect_name_and_pattern() -> None:
    effects = {"look": "read", "save": "write", "git.log": "external"}
    assert select_names({"read"}, effects) == {"look"}  # type: ignore[arg-type]
    assert select_names({"save", "git.*"}, effects) == {"save", "git.log"}  # type: ignore[arg-type]
    assert select_names(set(), effects) == frozenset()  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="'fly' is neither an effect"):
        select_names({"fly"}, effects)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not the text"):
        select_names("read", effects)  # type: ignore[arg-type]
