"""Where an attachment's bytes come from, as its source says; and the ids that callers give."""

from __future__ import annotations

import base64
import contextlib
import random
import threading
import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import InvalidArgument, InvalidMedia, RequestError
from afterglow.media import load
from afterglow.media.identity import fnv1a, normalize_id
from afterglow.media.load import MediaPolicy, load_media, load_media_bytes
from afterglow.media.types import AudioData, ImageData
from support.media_files import gradient, recorded, saved, tone

PNG = saved(gradient(6, 4))
TEXT = base64.b64encode(PNG).decode()
URI = f"data:image/png;base64,{TEXT}"


@pytest.mark.parametrize(
    "source",
    [
        URI,
        TEXT,
        f"DATA:IMAGE/PNG;BASE64,{TEXT}",
        f"data:image/jpeg;base64,{TEXT}",  # the bytes are believed, not the type
        f"data:;base64,{TEXT}",
        f"data:image/png;charset=x;base64,{TEXT}",
        f"data:image/png;base64,{TEXT[:40]}\n{TEXT[40:]}\n",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(PNG).decode()}",
        f"data:image/png;base64,{urllib.parse.quote(TEXT)}",
        f"data:image/png,{urllib.parse.quote(PNG)}",
    ],
)
def test_data_in_the_message_is_a_picture_however_it_is_written(source):
    picture = load_media("image", source)
    assert isinstance(picture, ImageData)
    assert (picture.width, picture.height) == (6, 4)


@pytest.mark.parametrize("format", ["WAV", "MP3", "FLAC"])
def test_a_sound_is_read_from_data_and_from_base64_alone(format):
    text = base64.b64encode(recorded(tone(), format=format)).decode()
    for source in (text, f"data:audio/{format.lower()};base64,{text}"):
        assert isinstance(load_media("audio", source), AudioData)


@pytest.mark.parametrize(
    "source",
    [
        "data:",
        "data:image/png",
        "data:,",
        "data:image/png;base64,",
        "data:image/png;base64,====",
        "data:image/png;base64,AAA!",
        "data:image/png;base64,A",
        "data:image/png;base64,ÄÖÜ",
        "data:image/png;base64;base64",
        "data:text/html,<script>alert(1)</script>",
        "data:image/svg+xml,<svg/>",
        "data:image/png;base64,http://169.254.169.254/",
        f"data:image/png,{TEXT}",
    ],
)
def test_data_that_is_no_picture_is_a_refusal(source):
    with pytest.raises(InvalidMedia):
        load_media("image", source)


def test_damaged_base64_is_said_and_what_is_too_long_is_not_unpacked(monkeypatch):
    for text in ("AAA!", "A", "AAAA=AAA", "http://169.254.169.254/"):
        with pytest.raises(InvalidMedia, match="base64 is damaged"):
            load_media_bytes("image", f"data:image/png;base64,{text}")

    def unpacked(*_, **__):
        raise AssertionError("it was")

    monkeypatch.setattr(load.base64, "b64decode", unpacked)
    with pytest.raises(InvalidMedia, match="more than 1,000 bytes"):
        load_media_bytes("image", "data:;base64," + "A" * 4000, MediaPolicy(max_bytes=1000))


def test_a_picture_is_no_sound_and_a_sound_no_picture():
    with pytest.raises(InvalidMedia, match="no WAV, MP3 or FLAC"):
        load_media("audio", URI)
    with pytest.raises(InvalidMedia, match="no PNG, JPEG"):
        load_media("image", "data:;base64," + base64.b64encode(recorded(tone())).decode())


def test_more_than_the_limit_is_refused_before_it_is_unpacked():
    policy = MediaPolicy(max_bytes=1000)
    for source in ("data:;base64," + "A" * 4000, "data:," + "a" * 1001, "data:," + "a" * 4000):
        with pytest.raises(InvalidMedia, match="more than 1,000 bytes"):
            load_media_bytes("image", source, policy)
    assert len(load_media_bytes("image", "data:," + "a" * 1000, policy)) == 1000


def test_errors_do_not_repeat_the_data():
    with pytest.raises(InvalidMedia) as caught:
        load_media("image", "data:image/png;base64," + "AAAA" * 10_000)
    assert len(str(caught.value)) < 200


@settings(max_examples=300, deadline=None)
@given(
    st.text(max_size=60), st.sampled_from(["data:", "data:image/png;base64,", "data:,", "", "http://", "file:", "//"])
)
def test_any_source_is_a_content_or_a_refusal(text, start):
    for kind in ("image", "audio"):
        with contextlib.suppress(RequestError):
            assert load_media(kind, start + text).digest


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_come_through_a_data_uri_as_they_are(data):
    assert load_media_bytes("image", "data:x/y;base64," + base64.b64encode(data).decode()) == data
    assert load_media_bytes("image", "data:x/y," + urllib.parse.quote_from_bytes(data)) == data


def test_few_are_decoded_at_once(monkeypatch):
    inside, most, lock = 0, 0, threading.Lock()
    real = load.decode_image

    def counted(*values, **options):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        try:
            threading.Event().wait(0.02)
            return real(*values, **options)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr(load, "picture_of", counted)
    threads = [threading.Thread(target=load_media, args=("image", URI)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


# --- ids


@pytest.mark.parametrize(
    ("data", "id"),
    [(b"", "cbf29ce484222325"), (b"a", "af63dc4c8601ec8c"), (b"foobar", "85944171f73967e8")],
)
def test_c6_the_id_of_bytes_is_fnv_1a(data, id):
    assert fnv1a(data) == id


def by_definition(data: bytes) -> str:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_c6_the_hash_is_what_its_definition_says(data):
    assert fnv1a(data) == by_definition(data)


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 200_000])
def test_c6_the_hash_of_much_data_is_what_its_definition_says(length):
    data = random.Random(length).randbytes(length)
    assert fnv1a(data) == by_definition(data)


def test_c6_an_id_is_accepted_where_it_is_that_of_the_bytes():
    id = fnv1a(PNG)
    assert load_media("image", URI, id=id) == load_media("image", URI, id=id.upper())
    with pytest.raises(InvalidArgument, match=f"{id}"):
        load_media("image", URI, id="0" * 16)


@pytest.mark.parametrize("id", ["", "abc", "g" * 16, "0" * 15, "0" * 17, "0" * 16 + "\n", "0x" + "0" * 14, "é" * 16, 7])
def test_c18_an_id_of_another_shape_is_refused(id):
    with pytest.raises(InvalidArgument, match="16 hexadecimal digits"):
        normalize_id(id)


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_pixels": -1}, {"fetch_seconds": 0}, {"max_redirects": -1}])
def test_a_policy_without_sense_is_refused(options):
    with pytest.raises(InvalidArgument):
        MediaPolicy(**options)
    with pytest.raises(InvalidArgument, match="list of names"):
        MediaPolicy(allowed_hosts="example.com")
