"""A served model does slow one-time work when it is loaded, not in the first request."""

from __future__ import annotations

import psutil
import pytest

from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.testing import models

pytestmark = pytest.mark.native


def test_the_template_process_is_started_when_the_model_is_loaded() -> None:
    settings = ServedSettings(context=256, threads=1, disk_cache=False)
    with ServedModel("tiny", models.get_path("attention"), settings) as model:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        model.plan_chat("Hello")
        after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before


def test_a_model_with_an_invalid_chat_template_is_still_served() -> None:
    settings = ServedSettings(context=256, threads=1, disk_cache=False, chat_template="{{ raise_exception('no') }}")
    with ServedModel("tiny", models.get_path("successor-attention"), settings) as model:
        assert model.complete("abc", max_tokens=3, temperature=0).text == "def"
