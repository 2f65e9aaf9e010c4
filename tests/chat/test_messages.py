"""Messages: fields of OpenAI messages that change the prompt or are rejected."""

from __future__ import annotations

import pytest

from afterglow.chat.messages import parse_messages
from afterglow.errors import InvalidArgument


def test_the_refusal_of_an_assistant_message_is_its_text() -> None:
    refused, answered = parse_messages(
        [
            {"role": "assistant", "content": None, "refusal": "I cannot help with that."},
            {"role": "assistant", "content": "Paris.", "refusal": None},
        ]
    )
    assert (refused.content, answered.content) == ("I cannot help with that.", "Paris.")


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": "Yes.", "refusal": "No."}, {"role": "user", "refusal": "No."}]
)
def test_a_refusal_beside_content_or_of_another_role_is_rejected(message: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=r"messages\[0\].refusal"):
        parse_messages([message])
