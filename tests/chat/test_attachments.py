"""Pictures and sounds are read where they stand, and refused by a model that cannot take them."""

from __future__ import annotations

import pytest

import afterglow
from afterglow import tiny
from afterglow.chat.messages import messages
from afterglow.errors import UnsupportedMedia

PICTURE = "data:image/png;base64,aGVsbG8="


def test_openai_s_and_anthropic_s_pictures_are_read_with_their_place():
    (message,) = messages(
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is "},
                    {"type": "image_url", "image_url": {"url": PICTURE}},
                    {"type": "text", "text": "this?"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}},
                    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
                ],
            }
        ]
    )
    assert message.content == "What is this?"
    assert [(one.kind, one.source, one.offset) for one in message.attachments] == [
        ("image", PICTURE, 8),
        ("image", PICTURE, 13),
        ("audio", "UklGRg==", 13),
    ]


def test_a_model_that_cannot_see_refuses_a_picture_by_its_message():
    talk = [
        ("system", "Be brief."),
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]},
    ]
    with (
        afterglow.load(tiny.path("attention"), context=256) as model,
        pytest.raises(UnsupportedMedia, match=r"messages\[1\]\.content"),
    ):
        model.chat(talk)
