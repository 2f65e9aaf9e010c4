"""Terminal output: markdown blocks that are complete."""

from __future__ import annotations

import pytest

from afterglow.cli.display import find_complete_blocks_end


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("a\n\n- b\n\nc", "a\n\n- b\n\n"),
    ],
)
def test_a_block_is_complete_if_further_text_cannot_change_it(text: str, complete: str) -> None:
    assert text[: find_complete_blocks_end(text)] == complete
