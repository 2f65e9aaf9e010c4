"""Loading media from data URIs and base64 text; checking client ids."""

from __future__ import annotations

import base64
import contextlib
import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import InvalidArgument, InvalidMedia, RequestError
from afterglow.media import load
from afterglow.media.identity import fnv1a
from afterglow.media.load import load_media, load_media_bytes
from afterglow.media.policy import MediaPolicy
from afterglow.media.types import AudioData, ImageData
from support.media_files import encode_audio, encode_image, gradient, sine_wave

PNG = encode_image(gradient(6, 4))
TEXT = base64.b64encode(PNG).decode()
URI = f"data:image/png;base64,{TEXT}"


@pytest.mark.parametrize(
    "source",
    [
        URI,
        TEXT,
        f"DATA:IMAGE/PNG;BASE64,{TEXT}",
        f"data:image/jpeg;base64,{TEXT}",  # the bytes decide, not the type
        f"data:;base64,{TEXT}",
        f"data:image/png;charset=x;base64,{TEXT}",
        f"data:image/png;base64,{TEXT[:40]}\n{TEXT[40:]}\n",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(PNG).decode()}",
        f"data:image/png;base64,{urllib.parse.quote(TEXT)}",
        f"data:image/png,{urllib.parse.quote(PNG)}",
    ],
)
def test_inline_data_is_decoded_in_every_notation(source):
    image = load_media("image", source)
    assert isinstance(image, ImageData)
    assert (image.width, image.height) == (6, 4)


@pytest.mark.parametrize("format", ["WAV", "MP3", "FLAC"])
def test_audio_is_decoded_from_a_data_uri_and_from_plain_base64(format):
    text = base64.b64encode(encode_audio(sine_wave(), format=format)).decode()
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
def test_inline_data_that_is_not_an_image_is_rejected(source):
    with pytest.raises(InvalidMedia):
        load_media("image", source)


def test_invalid_base64_is_reported_and_too_long_base64_is_not_decoded(monkeypatch):
    for text in ("AAA!", "A", "AAAA=AAA", "http://169.254.169.254/"):
        with pytest.raises(InvalidMedia, match="base64 is invalid"):
            load_media_bytes("image", f"data:image/png;base64,{text}")

    def fail(*_, **__):
        raise AssertionError("the data was decoded")

    monkeypatch.setattr(load.base64, "b64decode", fail)
    with pytest.raises(InvalidMedia, match="limit of 1,000 bytes"):
        load_media_bytes("image", "data:;base64," + "A" * 4000, MediaPolicy(max_bytes=1000))


def test_an_image_is_not_accepted_as_audio_nor_audio_as_an_image():
    with pytest.raises(InvalidMedia, match="not a WAV, MP3 or FLAC"):
        load_media("audio", URI)
    with pytest.raises(InvalidMedia, match="not a PNG, JPEG"):
        load_media("image", "data:;base64," + base64.b64encode(encode_audio(sine_wave())).decode())


def test_data_over_the_size_limit_is_rejected():
    policy = MediaPolicy(max_bytes=1000)
    for source in ("data:;base64," + "A" * 4000, "data:," + "a" * 1001, "data:," + "a" * 4000):
        with pytest.raises(InvalidMedia, match="limit of 1,000 bytes"):
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
def test_any_source_loads_or_raises_a_request_error(text, start):
    for modality in ("image", "audio"):
        with contextlib.suppress(RequestError):
            assert load_media(modality, start + text).digest


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_survive_a_data_uri(data):
    assert load_media_bytes("image", "data:x/y;base64," + base64.b64encode(data).decode()) == data
    assert load_media_bytes("image", "data:x/y," + urllib.parse.quote_from_bytes(data)) == data


def test_c6_an_id_is_accepted_only_if_it_matches_the_bytes():
    id = fnv1a(PNG)
    assert load_media("image", URI, id=id) == load_media("image", URI, id=id.upper())
    with pytest.raises(InvalidArgument, match=f"{id}"):
        load_media("image", URI, id="0" * 16)
