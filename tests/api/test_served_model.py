"""A model that is served has done before the first request what takes a while once."""

from __future__ import annotations

import psutil

from afterglow.api.served_model import ServedModel, ServedSettings
from afterglow.testing import models


def test_the_process_that_renders_templates_runs_before_anybody_asks():
    with ServedModel(
        "tiny", models.get_path("attention"), ServedSettings(context=256, threads=1, disk_cache=False)
    ) as model:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        model.plan_chat("Hello")
        after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after == before


def test_a_template_that_cannot_be_rendered_does_not_keep_a_model_from_being_served():
    settings = ServedSettings(context=256, threads=1, disk_cache=False, chat_template="{{ raise_exception('no') }}")
    with ServedModel("tiny", models.get_path("successor-attention"), settings) as model:
        assert model.complete("abc", max_tokens=3, temperature=0).text == "def"
