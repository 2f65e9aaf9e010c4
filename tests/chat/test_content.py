"""Pictures and sounds are read where they stand, and refused by a model that cannot take them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import afterglow
from afterglow import MediaPolicy
from afterglow.api.conversation import Conversation, build_user_message
from afterglow.chat.content import build_attachments, load_attachments
from afterglow.chat.messages import Message, parse_messages, to_openai_message
from afterglow.errors import InvalidArgument, InvalidMedia, MediaRefused, UnsupportedMedia, UnsupportedOption
from afterglow.media.identity import fnv1a
from afterglow.testing import models
from support.media_files import gradient, saved

PICTURE = "data:image/png;base64,aGVsbG8="


def test_openai_s_and_anthropic_s_pictures_are_read_with_their_place():
    (message,) = parse_messages(
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
        ("audio", "data:audio/wav;base64,UklGRg==", 13),
    ]


def test_a_model_that_cannot_see_refuses_a_picture_by_its_message():
    talk = [
        ("system", "Be brief."),
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]},
    ]
    with (
        afterglow.load(models.get_path("attention"), context=256) as model,
        pytest.raises(UnsupportedMedia, match=r"messages\[1\]\.content"),
    ):
        model.chat(talk)


def read(*parts: dict[str, Any]) -> Message:
    (message,) = parse_messages([{"role": "user", "content": list(parts)}])
    return message


def test_the_responses_parts_are_read():
    picture = {"type": "input_image", "image_url": PICTURE, "detail": "original"}
    message = read({"type": "input_text", "text": "Look: "}, picture)
    assert message.content == "Look: "
    assert [(one.source, one.detail) for one in message.attachments] == [(PICTURE, "high")]


def test_anthropic_s_addresses_are_read():
    url = "https://example.com/cat.png"
    message = read({"type": "image", "source": {"type": "url", "url": url}, "cache_control": {"type": "ephemeral"}})
    assert message.attachments[0].source == url


@pytest.mark.parametrize(("detail", "read_as"), [(None, "auto"), ("auto", "auto"), ("low", "low"), ("high", "high")])
def test_the_detail_is_read(detail, read_as):
    part = {"type": "image_url", "image_url": {"url": PICTURE, "detail": detail}}
    assert read(part).attachments[0].detail == read_as


def test_low_detail_is_what_is_seen():
    uri = "data:image/png;base64," + base64.b64encode(saved(gradient(1000, 10))).decode()
    low, high = (
        read({"type": "image_url", "image_url": {"url": uri, "detail": detail}}).attachments[0]
        for detail in ("low", "high")
    )
    assert (low.load(MediaPolicy()).width, high.load(MediaPolicy()).width) == (512, 1000)


def test_c6_an_id_is_read_and_is_that_of_the_bytes():
    data = saved(gradient())
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    right = read({"type": "image_url", "image_url": {"url": uri}, "id": fnv1a(data).upper()}).attachments[0]
    assert right.id == fnv1a(data)
    assert right.load(MediaPolicy()).width == 64
    wrong = read({"type": "image_url", "image_url": {"url": uri}, "id": "0123456789abcdef"}).attachments[0]
    with pytest.raises(InvalidArgument, match="0123456789abcdef is not that"):
        wrong.load(MediaPolicy())


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ("text", ""),
        ({"type": "video_url"}, ".type"),
        ({"type": ["image_url"]}, ".type"),
        ({"type": "image_url"}, ".image_url.url"),
        ({"type": "image_url", "image_url": 7}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": PICTURE, "detail": "medium"}}, ".image_url.detail"),
        ({"type": "image_url", "image_url": {"url": PICTURE, "detail": []}}, ".image_url.detail"),
        ({"type": "image_url", "image_url": PICTURE, "size": 7}, ".size"),
        ({"type": "image_url", "image_url": PICTURE, "id": "xyz"}, ".id"),
        ({"type": "input_image", "image_url": {"url": PICTURE}}, ".image_url"),
        ({"type": "image"}, ".source"),
        ({"type": "image", "source": {"type": "text", "data": "x"}}, ".source.type"),
        ({"type": "image", "source": {"type": "base64", "data": "x"}}, ".source.media_type"),
        ({"type": "image", "source": {"type": "base64", "media_type": "text/html", "data": "x"}}, ".source.media_type"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, ".source.data"),
        ({"type": "input_audio"}, ".input_audio"),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "ogg"}}, ".input_audio.format"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, ".input_audio.data"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused_by_its_place(part, where):
    with pytest.raises(InvalidArgument) as caught:
        parse_messages([{"role": "user", "content": [part]}])
    assert caught.value.name == f"messages[0].content[0]{where}" or not where


@pytest.mark.parametrize(
    "part",
    [{"type": "input_image", "file_id": "file_1"}, {"type": "image", "source": {"type": "file", "file_id": "1"}}],
)
def test_files_that_are_kept_elsewhere_are_refused(part):
    with pytest.raises(UnsupportedOption, match="no files are kept here"):
        read(part)


def test_what_was_read_is_written_so_that_it_is_read_again():
    message = read(
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}, "id": "0" * 16},
        {"type": "text", "text": "this, and "},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}},
        {"type": "image_url", "image_url": PICTURE},
    )
    assert parse_messages([to_openai_message(message)]) == [message]
    assert to_openai_message(message)["content"][3] == {
        "type": "input_audio",
        "input_audio": {"data": "UklGRg==", "format": "mp3"},
    }


def test_a_conversation_is_asked_about_pictures_and_remembers_them(tmp_path):
    """A file is read when it is asked about: what happens to it later changes nothing that was said."""
    path = tmp_path / "cat.png"
    path.write_bytes(saved(gradient()))
    asked = build_user_message("What is this?", [path, PICTURE, saved(gradient(8, 8))])
    path.unlink()
    assert [one.load(MediaPolicy()).width for one in (asked.attachments[0], asked.attachments[2])] == [64, 8]
    assert asked.attachments[1].source == PICTURE
    with pytest.raises(InvalidMedia, match=r"cat\.png cannot be read: No such file"):
        build_user_message("And now?", [path])
    talk = Conversation(None, messages=[asked])  # type: ignore[arg-type]
    talk.save(tmp_path / "talk.json")
    talk.load(tmp_path / "talk.json")
    assert talk.messages == [asked]
    talk.edit(0, "Why?")
    assert talk.messages[0].attachments == asked.attachments


def test_what_load_is_told_about_media_is_what_holds(tmp_path):
    (tmp_path / "cat.png").write_bytes(saved(gradient()))
    talk = [{"role": "user", "content": [{"type": "image_url", "image_url": "cat.png"}]}]
    sight = {"context": 256, "projector": models.get_path("projector-llava")}
    with afterglow.load(
        models.get_path("attention"), media_policy=MediaPolicy(allowed_directory=tmp_path), **sight
    ) as model:
        (message,) = model.load_media(talk)
        assert message.attachments[0].source.width == 64
        with pytest.raises(MediaRefused):
            model.load_media([{"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1/"}]}])
    with afterglow.load(models.get_path("attention"), **sight) as model, pytest.raises(MediaRefused):
        model.load_media(talk)


def test_many_small_files_that_are_much_to_see_are_refused():
    """A picture of one colour is a few hundred bytes of file, and megabytes to whoever looks at it."""
    file = saved(Image.new("RGB", (1000, 1000)), compress_level=9)
    assert len(file) < 10_000
    attachments = build_attachments("image", [file] * 4)
    assert len(load_attachments(attachments, MediaPolicy(max_decoded_bytes=12_000_000))) == 4
    with pytest.raises(InvalidMedia, match="more than 11,999,999 bytes: show fewer"):
        load_attachments(attachments, MediaPolicy(max_decoded_bytes=11_999_999))


def test_a_policy_says_what_is_wrong_with_it(tmp_path):
    for options in ({"allowed_hosts": ("https://example.com/",)}, {"allowed_hosts": ("",)}):
        with pytest.raises(InvalidArgument, match="is no host"):
            MediaPolicy(**options)
    with pytest.raises(InvalidArgument, match="is no directory"):
        MediaPolicy(allowed_directory=Path(tmp_path / "nowhere"))
