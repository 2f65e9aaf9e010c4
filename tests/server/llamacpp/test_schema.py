"""Classes of the fields of /completion: each field of llama-server is honoured, refused by name, or a hint."""

from __future__ import annotations

import re
from typing import Any

import pydantic
import pytest

from afterglow.server.llamacpp.schema import LlamaCompletionRequest
from afterglow.server.logs import get_record, start_record
from afterglow.server.schema.base import get_rule
from support.fetched import LLAMA_CPP, fetch_files

REFUSED: dict[str, Any] = {
    "post_sampling_probs": True,
    "min_keep": 3,
    "adaptive_target": 0.5,
    "grammar_lazy": True,
    "grammar_triggers": [{}],
    "preserved_tokens": [1],
    "reasoning_budget_tokens": 5,
    "echo": True,
    "continue_final_message": True,
}
HINTS: dict[str, Any] = {
    "t_max_prompt_ms": 500,
    "n_discard": 5,
    "n_cache_reuse": 256,
    "sse_ping_interval": 3,
    "backend_sampling": True,
    "adaptive_decay": 0.5,
    "verbose": True,
    "stream_options": {"include_usage": True},
    "reasoning_format": "deepseek",
    "reasoning_control": True,
    "reasoning_budget_start_tag": "<think>",
    "reasoning_budget_end_tags": ["</think>"],
    "reasoning_budget_message": "Time is up.",
    **{f"speculative.{name}": 3 for name in ("n_min", "n_max", "p_min", "type")},
    **{f"speculative.ngram_{name}": 3 for name in ("size_n", "size_m", "min_hits")},
}


def validate(**fields: Any) -> LlamaCompletionRequest:
    start_record("POST", "")
    return LlamaCompletionRequest.model_validate({"prompt": "abc", **fields})


def test_every_refused_field_and_every_hint_is_in_a_table() -> None:
    rules = {field.alias or name: get_rule(field) for name, field in LlamaCompletionRequest.model_fields.items()}
    restricted = {name: rule for name, rule in rules.items() if rule is not None and "only" in rule}
    assert {name for name, rule in restricted.items() if "hint" in rule} == set(HINTS)
    assert {name for name, rule in restricted.items() if "hint" not in rule} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_response_is_refused(name: str) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        validate(**{name: REFUSED[name]})
    (error,) = raised.value.errors()
    assert (error["type"], error["loc"]) == ("unsupported_parameter", (name,))


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_is_accepted_and_named(name: str) -> None:
    validate(**{name: HINTS[name]})
    assert get_record().ignored_fields == [name]


@pytest.mark.native
def test_every_field_of_llama_server_is_declared() -> None:
    (source,) = fetch_files(LLAMA_CPP, "*/llama.cpp/tools/server/server-schema.cpp")
    declarations = re.compile(r'^ +add\(\(new field_\w+\("([^"]+)"', re.MULTILINE)
    documented = set(declarations.findall(source.read_text(encoding="utf-8")))
    declared = {field.alias or name for name, field in LlamaCompletionRequest.model_fields.items()}
    assert len(documented) > 50
    assert documented - declared == set()


@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "top_k", "seed", "id_slot", "n_probs", "mirostat"])
def test_an_integer_may_be_written_as_a_float(name: str) -> None:
    value = getattr(LlamaCompletionRequest.model_validate({"prompt": "a", name: 2.0, "temperature": 1.0}), name)
    assert (value, type(value)) == (2, int)
    for other in (2.5, "2"):
        with pytest.raises(pydantic.ValidationError):
            LlamaCompletionRequest.model_validate({"prompt": "a", name: other})
