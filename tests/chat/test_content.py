"""Message content: OpenAI and Anthropic parts, attachments, and their errors."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from afterglow import ImageData, MediaPolicy
from afterglow.agents.conversation import Conversation, build_user_message
from afterglow.chat.content import build_attachments, load_attachments
from afterglow.chat.messages import Message, parse_messages, to_openai_message
from afterglow.errors import InvalidArgument, InvalidMedia, MediaRefused, UnsupportedMedia, UnsupportedOption
from afterglow.media.identity import fnv1a
from afterglow.testing import models
from support.greedy import load_greedy
from support.media_files import encode_image, gradient

IMAGE_URI = "data:image/png;base64,aGVsbG8="


def test_openai_and_anthropic_media_parts_are_parsed_with_their_offset():
    (message,) = parse_messages(
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is "},
                    {"type": "image_url", "image_url": {"url": IMAGE_URI}},
                    {"type": "text", "text": "this?"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}},
                    {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
                ],
            }
        ]
    )
    assert message.content == "What is this?"
    assert [(item.kind, item.source, item.offset) for item in message.attachments] == [
        ("image", IMAGE_URI, 8),
        ("image", IMAGE_URI, 13),
        ("audio", "data:audio/wav;base64,UklGRg==", 13),
    ]


@pytest.mark.native
def test_unsupported_media_is_an_error_that_names_the_message():
    messages = [
        ("system", "Be brief."),
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE_URI}}]},
    ]
    with (
        load_greedy(models.get_path("attention"), context=256) as model,
        pytest.raises(UnsupportedMedia, match=r"messages\[1\]\.content"),
    ):
        model.chat(messages)


def parse(*parts: dict[str, Any]) -> Message:
    (message,) = parse_messages([{"role": "user", "content": list(parts)}])
    return message


def test_parts_of_the_responses_api_are_parsed():
    image = {"type": "input_image", "image_url": IMAGE_URI, "detail": "original"}
    message = parse({"type": "input_text", "text": "Look: "}, image)
    assert message.content == "Look: "
    assert [(item.source, item.detail) for item in message.attachments] == [(IMAGE_URI, "high")]


def test_anthropic_url_sources_are_parsed():
    url = "https://example.com/cat.png"
    message = parse({"type": "image", "source": {"type": "url", "url": url}, "cache_control": {"type": "ephemeral"}})
    assert message.attachments[0].source == url


@pytest.mark.parametrize(("detail", "parsed"), [(None, "auto"), ("auto", "auto"), ("low", "low"), ("high", "high")])
def test_the_image_detail_is_parsed(detail, parsed):
    part = {"type": "image_url", "image_url": {"url": IMAGE_URI, "detail": detail}}
    assert parse(part).attachments[0].detail == parsed


def test_low_detail_limits_the_image_size():
    uri = "data:image/png;base64," + base64.b64encode(encode_image(gradient(1000, 10))).decode()
    low, high = (
        parse({"type": "image_url", "image_url": {"url": uri, "detail": detail}}).attachments[0]
        for detail in ("low", "high")
    )
    assert (low.load(MediaPolicy()).width, high.load(MediaPolicy()).width) == (512, 1000)


def test_c6_an_id_must_match_the_bytes():
    data = encode_image(gradient())
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    right = parse({"type": "image_url", "image_url": {"url": uri}, "id": fnv1a(data).upper()}).attachments[0]
    assert right.id == fnv1a(data)
    assert right.load(MediaPolicy()).width == 64
    wrong = parse({"type": "image_url", "image_url": {"url": uri}, "id": "0123456789abcdef"}).attachments[0]
    with pytest.raises(InvalidArgument, match="0123456789abcdef does not match"):
        wrong.load(MediaPolicy())


def test_a_decoded_image_with_an_id_can_be_written_and_read_again() -> None:
    """The file that is written has other bytes than the one that the id belongs to."""
    image = ImageData(width=1, height=1, pixels=b"rgb")
    message = parse({"type": "image", "image": image, "id": "0123456789abcdef"})
    [again] = parse_messages([to_openai_message(message)])
    assert again.attachments[0].load(MediaPolicy()) == image


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ("text", ""),
        ({"type": "video_url"}, ".type"),
        ({"type": ["image_url"]}, ".type"),
        ({"type": "image_url"}, ".image_url.url"),
        ({"type": "image_url", "image_url": 7}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": IMAGE_URI, "detail": "medium"}}, ".image_url.detail"),
        ({"type": "image_url", "image_url": {"url": IMAGE_URI, "detail": []}}, ".image_url.detail"),
        ({"type": "image_url", "image_url": IMAGE_URI, "size": 7}, ".size"),
        ({"type": "image_url", "image_url": IMAGE_URI, "size": 7, 5: 7}, ".5"),
        ({"type": "image_url", "image_url": IMAGE_URI, "id": "xyz"}, ".id"),
        ({"type": "input_image", "image_url": {"url": IMAGE_URI}}, ".image_url"),
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
def test_an_invalid_part_is_an_error_that_names_the_field(part, where):
    with pytest.raises(InvalidArgument) as caught:
        parse_messages([{"role": "user", "content": [part]}])
    assert caught.value.name == f"messages[0].content[0]{where}" or not where


@pytest.mark.parametrize(
    ("images", "name"),
    [([5], "images[0]"), ([IMAGE_URI, None], "images[1]"), ("a.png", "images"), (b"a", "images"), (5, "images")],
)
def test_invalid_images_are_refused_by_name(images: Any, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_user_message("What is this?", images)
    assert caught.value.name == name
    with pytest.raises(InvalidArgument) as caught:
        build_user_message("What is this?", audio=images)
    assert caught.value.name == name.replace("images", "audio")


def test_a_path_below_the_home_of_an_unknown_user_is_an_error_that_names_it() -> None:
    with pytest.raises(InvalidMedia, match=r"~nouser123/a\.png cannot be read"):
        build_attachments("image", [Path("~nouser123/a.png")])


@pytest.mark.parametrize(
    "part",
    [{"type": "input_image", "file_id": "file_1"}, {"type": "image", "source": {"type": "file", "file_id": "1"}}],
)
def test_file_ids_are_rejected(part):
    with pytest.raises(UnsupportedOption, match="file storage is not supported"):
        parse(part)


def test_openai_messages_round_trip():
    message = parse(
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": IMAGE_URI, "detail": "low"}, "id": "0" * 16},
        {"type": "text", "text": "this, and "},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}},
        {"type": "image_url", "image_url": IMAGE_URI},
    )
    assert parse_messages([to_openai_message(message)]) == [message]
    assert to_openai_message(message)["content"][3] == {
        "type": "input_audio",
        "input_audio": {"data": "UklGRg==", "format": "mp3"},
    }


def test_a_conversation_saves_the_images_of_a_message(tmp_path):
    """A file is read when the message is built: later changes of the file have no effect."""
    path = tmp_path / "cat.png"
    path.write_bytes(encode_image(gradient()))
    message = build_user_message("What is this?", [path, IMAGE_URI, encode_image(gradient(8, 8))])
    path.unlink()
    assert [item.load(MediaPolicy()).width for item in (message.attachments[0], message.attachments[2])] == [64, 8]
    assert message.attachments[1].source == IMAGE_URI
    with pytest.raises(InvalidMedia, match=r"cat\.png cannot be read: No such file"):
        build_user_message("And now?", [path])
    conversation = Conversation(None, messages=[message])  # type: ignore[arg-type]
    conversation.save(tmp_path / "conversation.json")
    conversation.load(tmp_path / "conversation.json")
    assert conversation.messages == [message]
    conversation.edit(0, "Why?")
    assert conversation.messages[0].attachments == message.attachments


@pytest.mark.native
def test_the_media_policy_of_load_is_applied(tmp_path):
    (tmp_path / "cat.png").write_bytes(encode_image(gradient()))
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": "cat.png"}]}]
    options = {"context": 256, "projector": models.get_path("projector-llava")}
    policy = MediaPolicy(allowed_directory=tmp_path)
    with load_greedy(models.get_path("attention"), media_policy=policy, **options) as model:
        (message,) = model.load_media(messages)
        assert message.attachments[0].source.width == 64
        with pytest.raises(MediaRefused):
            model.load_media([{"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1/"}]}])
    with load_greedy(models.get_path("attention"), **options) as model, pytest.raises(MediaRefused):
        model.load_media(messages)


def test_the_decoded_size_of_all_media_is_limited():
    """An image of one color has a few hundred bytes encoded and megabytes decoded."""
    file = encode_image(Image.new("RGB", (1000, 1000)), compress_level=9)
    assert len(file) < 10_000
    attachments = build_attachments("image", [file] * 4)
    assert len(load_attachments(attachments, MediaPolicy(max_decoded_bytes=12_000_000))) == 4
    with pytest.raises(InvalidMedia, match="more than 11,999,999 bytes decoded: send fewer"):
        load_attachments(attachments, MediaPolicy(max_decoded_bytes=11_999_999))


def test_an_invalid_media_policy_is_rejected(tmp_path):
    for options in ({"allowed_hosts": ("https://example.com/",)}, {"allowed_hosts": ("",)}):
        with pytest.raises(InvalidArgument, match="must be hostnames"):
            MediaPolicy(**options)
    with pytest.raises(InvalidArgument, match="must be an existing directory"):
        MediaPolicy(allowed_directory=Path(tmp_path / "nowhere"))
