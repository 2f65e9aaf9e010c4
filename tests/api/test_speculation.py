"""C14 through the public face: speculation that is seen in usage and changes no token."""

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

CYCLE = models.CYCLE.decode()
SMALL = {"context": 512, "sequences": 2, "threads": 1}


def load(name: str, length: int | str = 3, **options: object) -> afterglow.Model:
    drafters = options.pop("drafters", None)
    settings = EngineSettings(speculation=length, drafters=drafters)
    return afterglow.load(models.get_path(name), engine=settings, **SMALL | options)


def answer(model: afterglow.Model, **options: object) -> afterglow.Completion:
    return model.complete((CYCLE * 2)[:40], max_tokens=60, **options)


def test_c14_what_was_said_before_is_guessed_without_being_asked_for():
    with load("successor-attention", "off") as plain, load("successor-attention") as model:
        expected, found = answer(plain), answer(model)
    assert found.text == expected.text
    assert expected.usage.draft_tokens == 0
    assert found.usage.accepted_tokens == found.usage.draft_tokens > 30


@pytest.mark.parametrize("draft", ["mtp", "attention", "hybrid"])
def test_c14_heads_and_second_models_guess_where_they_are_asked_to(draft):
    name = "successor-mtp"
    other = draft if draft == "mtp" else models.get_path(f"successor-{draft}")
    drafters = ("mtp",) if draft == "mtp" else ("draft",)
    with load(name, "off") as plain, load(name, 3, draft=other, drafters=drafters) as model:
        expected, found = answer(plain), answer(model)
        again = model.chat([{"role": "user", "content": "hello"}], max_tokens=12)
        model.deactivate()
        model.activate()
        assert answer(model).text == expected.text
    assert found.text == expected.text
    assert found.usage.accepted_tokens == found.usage.draft_tokens > 30
    assert again.usage.draft_tokens > 0


def test_c14_on_token_is_called_once_for_each_accepted_token_and_several_answers_guess_each():
    seen: list[object] = []
    with load("successor-attention") as model:
        found = answer(model, n=3, temperature=3.0, seed=7, on_token=seen.append)
    with load("successor-attention", "off") as plain:
        expected = answer(plain, n=3, temperature=3.0, seed=7)
    assert [choice.text for choice in found.choices] == [choice.text for choice in expected.choices]
    assert len(seen) == len(found.choices[0].tokens)
    assert all(usage.accepted_tokens > 0 for usage in found.usages)


def test_c14_structured_output_and_stops_hold_with_guesses():
    with load("successor-attention") as model, load("successor-attention", "off") as plain:
        stopped = answer(model, stop=["xyz"])
        assert (stopped.text, stopped.choices[0].stop_reason) == (answer(plain, stop=["xyz"]).text, "xyz")
        assert stopped.usage.accepted_tokens > 0


def test_c14_no_draft_a_wrong_draft_and_memory_that_cannot_go_back_are_three_typed_errors():
    before = len(list_open_handles())
    with pytest.raises(ModelNotFound):
        load("attention", draft="no such model")
    with pytest.raises(UnsupportedOption, match="draft"):
        load("attention", drafters=("draft",))
    with pytest.raises(UnsupportedOption, match="neither drop wrong guesses nor go back"):
        Engine(FakeBackend("recurrent", can_replay=False), EngineSettings(speculation=3))
    with pytest.raises(UnsupportedOperation, match="heads"):
        load("attention", draft="mtp")
    assert len(list_open_handles()) == before


@pytest.mark.parametrize("name", ["successor-recurrent", "successor-hybrid"])
def test_c14_memory_without_snapshots_guesses_with_replay(name):
    with load(name, "off") as plain, load(name, "auto") as model:
        assert answer(model).text == answer(plain).text
    with load("successor-recurrent", 4) as model:
        found = answer(model, temperature=6.0, seed=3, n=3)
        assert model._get_host().call(get_counters)["replayed"] > 0
    assert sum(usage.accepted_tokens for usage in found.usages) > 0


def test_a_draft_of_another_vocabulary_names_the_first_token_that_differs(smollm2):
    with pytest.raises(InvalidArgument, match=r"draft.*tokens and the model"):
        load("attention", draft=smollm2)
    assert not list_open_handles()


def test_the_line_about_an_answer_tells_of_guesses_where_there_were_some():
    with load("successor-attention") as model, load("successor-attention", "off") as plain:
        turn = model.chat([{"role": "user", "content": CYCLE * 3}], max_tokens=40)
        silent = plain.chat([{"role": "user", "content": CYCLE * 3}], max_tokens=40)
    assert f", drafted {turn.usage.draft_tokens}, accepted {turn.usage.accepted_tokens}" in format_statistics(turn)
    assert turn.usage.accepted_tokens > 20
    assert "drafted" not in format_statistics(silent)


def test_auto_is_the_default():
    assert EngineSettings().speculation == "auto"
    assert EngineSettings().drafters is None
