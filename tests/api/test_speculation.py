"""C14: speculative decoding through the public API shows in usage and changes no token."""

from __future__ import annotations

import pytest

import afterglow
from afterglow.cli.display import format_statistics
from afterglow.engine.engine import Engine
from afterglow.engine.host.remote_calls import get_counters
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument, ModelNotFound, UnsupportedOperation, UnsupportedOption
from afterglow.llama.handle import list_open_handles
from afterglow.testing import FakeBackend, models

pytestmark = pytest.mark.native
CYCLE = models.CYCLE.decode()
SMALL = {"context": 512, "sequences": 2, "threads": 1}


def load(name: str, speculation: int | str = 3, **options: object) -> afterglow.Model:
    drafters = options.pop("drafters", None)
    settings = EngineSettings(speculation=speculation, drafters=drafters)
    return afterglow.load(models.get_path(name), engine=settings, **SMALL | options)


def complete(model: afterglow.Model, **options: object) -> afterglow.Completion:
    return model.complete((CYCLE * 2)[:40], max_tokens=60, **options)


def test_c14_the_ngram_drafter_is_on_by_default():
    with load("successor-attention", "off") as plain, load("successor-attention") as model:
        expected, completion = complete(plain), complete(model)
    assert completion.text == expected.text
    assert expected.usage.draft_tokens == 0
    assert completion.usage.accepted_tokens == completion.usage.draft_tokens > 30


@pytest.mark.parametrize("draft", ["mtp", "attention", "hybrid"])
def test_c14_mtp_heads_and_draft_models_draft_if_given(draft):
    name = "successor-mtp"
    source = draft if draft == "mtp" else models.get_path(f"successor-{draft}")
    drafters = ("mtp",) if draft == "mtp" else ("draft",)
    with load(name, "off") as plain, load(name, 3, draft=source, drafters=drafters) as model:
        expected, completion = complete(plain), complete(model)
        response = model.chat([{"role": "user", "content": "hello"}], max_tokens=12)
        model.deactivate()
        model.activate()
        assert complete(model).text == expected.text
    assert completion.text == expected.text
    assert completion.usage.accepted_tokens == completion.usage.draft_tokens > 30
    assert response.usage.draft_tokens > 0


def test_c14_on_token_is_called_once_per_token_and_every_choice_drafts():
    tokens: list[object] = []
    with load("successor-attention") as model:
        completion = complete(model, n=3, temperature=3.0, seed=7, on_token=tokens.append)
    with load("successor-attention", "off") as plain:
        expected = complete(plain, n=3, temperature=3.0, seed=7)
    assert [choice.text for choice in completion.choices] == [choice.text for choice in expected.choices]
    assert len(tokens) == len(completion.choices[0].tokens)
    assert all(usage.accepted_tokens > 0 for usage in completion.usages)


def test_c14_stop_strings_hold_with_drafts():
    with load("successor-attention") as model, load("successor-attention", "off") as plain:
        stopped = complete(model, stop=["xyz"])
        assert (stopped.text, stopped.choices[0].stop_reason) == (complete(plain, stop=["xyz"]).text, "xyz")
        assert stopped.usage.accepted_tokens > 0


def test_c14_missing_drafters_and_missing_rollback_are_typed_errors():
    before = len(list_open_handles())
    with pytest.raises(ModelNotFound):
        load("attention", draft="no such model")
    with pytest.raises(UnsupportedOption, match="draft"):
        load("attention", drafters=("draft",))
    with pytest.raises(UnsupportedOption, match="neither drop rejected draft tokens nor restore a state"):
        Engine(FakeBackend("recurrent", can_replay=False), EngineSettings(speculation=3))
    with pytest.raises(UnsupportedOperation, match="heads"):
        load("attention", draft="mtp")
    assert len(list_open_handles()) == before


@pytest.mark.parametrize("name", ["successor-recurrent", "successor-hybrid"])
def test_c14_recurrent_memory_without_snapshots_drafts_with_replay(name):
    with load(name, "off") as plain, load(name, "auto") as model:
        assert complete(model).text == complete(plain).text
    with load("successor-recurrent", 4) as model:
        completion = complete(model, temperature=6.0, seed=3, n=3)
        assert model._get_host().call(get_counters)["replayed_entries"] > 0
    assert sum(usage.accepted_tokens for usage in completion.usages) > 0


@pytest.mark.model
def test_a_draft_model_with_another_vocabulary_is_rejected(smollm2, list_own_handles):
    with pytest.raises(InvalidArgument, match=r"draft.*tokens and the model"):
        load("attention", draft=smollm2)
    assert not list_own_handles()


def test_the_statistics_line_shows_draft_tokens_if_there_are_any():
    with load("successor-attention") as model, load("successor-attention", "off") as plain:
        with_drafts = model.chat([{"role": "user", "content": CYCLE * 3}], max_tokens=40)
        without_drafts = plain.chat([{"role": "user", "content": CYCLE * 3}], max_tokens=40)
    assert (
        f", drafted {with_drafts.usage.draft_tokens}, accepted {with_drafts.usage.accepted_tokens}"
        in format_statistics(with_drafts)
    )
    assert with_drafts.usage.accepted_tokens > 20
    assert "drafted" not in format_statistics(without_drafts)


def test_speculation_is_auto_by_default():
    assert EngineSettings().speculation == "auto"
    assert EngineSettings().drafters is None
