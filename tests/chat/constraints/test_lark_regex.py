"""Lark grammars as regular expressions match the same texts."""

from __future__ import annotations

import functools
import re

import pytest

from afterglow.chat.constraints.lark_regex import convert_lark
from afterglow.errors import InvalidGrammar
from support.patches import PATCH_GRAMMAR, parse_patch

PATCH = """\
*** Begin Patch
*** Add File: a "new" file.py
+print("\\n")
*** Delete File: old
*** Update File: b.py
*** Move to: c.py
@@ def f():
 same
-old
+new
@@
+more
*** End of File
*** End Patch"""
ARITHMETIC = """
start: sum
?sum: product (("+" | "-") product)*
?product: atom | product "*" atom
?atom: NUMBER | "-" atom | "(" sum ")"
%import common.NUMBER
%import common.WS -> SPACE
%ignore SPACE
"""


@functools.cache
def compile_lark(grammar: str) -> re.Pattern[str]:
    return re.compile(convert_lark(grammar))


def matches(grammar: str, text: str) -> bool:
    return compile_lark(grammar).fullmatch(text) is not None


def test_the_patch_grammar_matches_patches_and_nothing_else() -> None:
    assert [operation for operation, _ in parse_patch(PATCH)] == ["add", "delete", "update"]
    assert matches(PATCH_GRAMMAR, PATCH)
    assert matches(PATCH_GRAMMAR, PATCH + "\n")
    for damaged in (
        PATCH + "x",
        PATCH.replace("@@ def f():\n", ""),
        PATCH.replace('+print("\\n")\n', ""),
        PATCH.replace("*** Begin", "** Begin"),
        PATCH.replace("File: old", "File: "),
    ):
        assert not matches(PATCH_GRAMMAR, damaged)
        with pytest.raises(ValueError, match="must"):
            parse_patch(damaged)


@pytest.mark.parametrize("text", ["1", "1+2*3", " 1 + ( 2.5 * -3 ) ", "((1))", "1*2*3*4*5*6*7*8*9", "(((1)))"])
def test_recursion_matches_texts_of_the_grammar(text: str) -> None:
    assert matches(ARITHMETIC, text)


@pytest.mark.parametrize("text", ["", "1+", "(1", "1 2", "1)*(2", "((1)"])
def test_recursion_matches_only_texts_of_the_grammar(text: str) -> None:
    assert not matches(ARITHMETIC, text)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a" | start "," "a"', "a,a,a,a,a,a,a,a,a,a", "a,"),
        ('start: "a" ("," start)?', "a,a,a,a,a,a,a,a,a,a", "a,"),
        ('start: start "+" start | "n"', "n+n+n+n+n+n+n+n+n+n", "n+"),
        ('start: "-" start | start "!" | "n"', "--n!!", "n-"),
        ('start: "say"i " " /[a-c]{2}|x\\/y/ [Z]~1..2\nZ.2: "z".."z"', "SAY x/yz", "say abc"),
        ('start: A B{2}\n    | "c" -> other\nA: "\\"" "\\x41"\nB: /./i', '"Axy', "cc"),
        ("start: (\n  /a/\n  /b/ # both\n)*", "abab", "aba"),
        ("%import common (INT, LF)\nstart: INT LF _X\n_X: /x/s", "12\nx", "12x"),
        ('start: "" | "."', ".", "a"),
    ],
)
def test_notation(grammar: str, good: str, bad: str) -> None:
    assert matches(grammar, good)
    assert not matches(grammar, bad)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('begin: "a"', "no rule `start`"),
        ("start: missing", "missing is not defined"),
        ('start: "a"\nstart: "b"', "defined twice"),
        ("start: %json {}", "%json"),
        ('start[lazy]: "a"', "attributes"),
        ('start: "a" @other', "@other"),
        ("%import python.NAME\nstart: NAME", "only `common`"),
        ("%import common.NOTHING\nstart: NOTHING", "common.NOTHING"),
        ('start: "a', '"a'),
        ('start: "ab".."c"', "two characters"),
        ('start: "(" start ")"', "no text matches"),
        ('start: ("a"', "is expected"),
        ('start: "a"~' + "9" * 5000, "more than 9 digits"),
        ("start: " + "\n".join(f"r{i} r{i}\nr{i}: " for i in range(30)) + f'"{"a" * 2000}"', "characters"),
    ],
)
def test_errors_name_the_cause(grammar: str, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(message)):
        convert_lark(grammar)
