"""Validation of the media policy."""

from __future__ import annotations

import pytest

from afterglow.errors import InvalidArgument
from afterglow.media.policy import MediaPolicy


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_pixels": -1}, {"fetch_timeout_seconds": 0}, {"max_redirects": -1}]
)
def test_invalid_limits_and_hosts_are_rejected(options):
    with pytest.raises(InvalidArgument):
        MediaPolicy(**options)
    with pytest.raises(InvalidArgument, match="list of hostnames"):
        MediaPolicy(allowed_hosts="example.com")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_hosts", None),
        ("allowed_hosts", (1,)),
        ("allowed_hosts", 5),
        ("allowed_directory", 5),
        ("allowed_directory", "~nosuchuser/media"),
        ("allowed_directory", "/nonexistent"),
        ("max_bytes", "5"),
        ("max_audio_seconds", None),
        ("fetch_timeout_seconds", float("nan")),
        ("max_redirects", "3"),
        ("max_redirects", 1.5),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected_by_its_name(name, value):
    with pytest.raises(InvalidArgument, match=f"`{name}` "):
        MediaPolicy(**{name: value})
