"""Three classes of fields: honoured, hints, refused; and other names of fields."""

from __future__ import annotations

import logging
from typing import Any

import pydantic
import pytest

from afterglow.server.errors import validation_to_api_error
from afterglow.server.logs import RequestRecord, start_record
from afterglow.server.schema.base import StrictModel, hint, same_as, supports_only


class Part(StrictModel):
    text: str
    cache_control: Any = hint("it is cached anyway", name="parts.cache_control")


class Body(StrictModel):
    parts: list[Part]
    max_tokens: int | None = pydantic.Field(None, ge=0)
    n_predict: int | None = same_as("max_tokens")
    tier: str | None = hint("there is one tier", "auto")
    beams: int | None = supports_only(1, reason="there is no beam search")


def parse(record: RequestRecord, **fields: Any) -> Body:
    return Body.model_validate({"parts": [{"text": "a"}], **fields})


def get_error(**fields: Any) -> str:
    body = {"parts": [{"text": "a"}], **fields}
    with pytest.raises(pydantic.ValidationError) as raised:
        Body.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in raised.value.errors()]
    return validation_to_api_error(errors, body).message


def test_hints_are_recorded_with_their_nested_names() -> None:
    record = start_record("POST", "/nested")
    cached = {"text": "a", "cache_control": {"type": "ephemeral"}}
    assert parse(record, parts=[cached, cached], tier="flex").tier == "flex"
    assert record.headers == {"x-afterglow-ignored": "parts.cache_control, tier"}


def test_what_is_done_anyway_is_no_hint() -> None:
    record = start_record("POST", "/usual")
    parse(record, tier="auto", beams=1)
    parse(record, tier=None)
    assert record.headers == {}


def test_a_hint_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "afterglow.server"):
        for _ in range(3):
            parse(start_record("POST", "/logged"), tier="flex")
    assert [record.getMessage() for record in caplog.records] == ["/logged: `tier` has no effect here"]


def test_a_strict_server_refuses_hints() -> None:
    record = start_record("POST", "/strict", refuses_hints=True)
    assert get_error(tier="flex") == '`tier` must be "auto": there is one tier'
    assert get_error(parts=[{"text": "a", "cache_control": 1}]) == (
        "`parts[0].cache_control` is not supported: it is cached anyway"
    )
    assert record.headers == {}


def test_another_name_of_a_field_sets_it() -> None:
    record = start_record("POST", "/synonyms")
    assert parse(record, n_predict=3).max_tokens == 3
    assert parse(record, n_predict=3, max_tokens=3).max_tokens == 3
    assert parse(record, n_predict=None, max_tokens=3).max_tokens == 3
    assert get_error(n_predict=3, max_tokens=4) == "`n_predict` is another name of `max_tokens`: set one of them"


def test_an_unknown_field_is_refused_with_the_nearest_one() -> None:
    assert get_error(max_token=3) == "`max_token` is not a field of this request; did you mean `max_tokens`?"
    assert get_error(parts=[{"txt": "a"}]) == "`parts[0].txt` is not a field of this request; did you mean `text`?"
    assert get_error(zzz=3) == "`zzz` is not a field of this request"


def test_a_restricted_field_is_refused_with_its_reason() -> None:
    assert get_error(beams=4) == "`beams` must be 1: there is no beam search"
