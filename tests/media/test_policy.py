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
