"""Route /v1/completions: how prompts are shortened to the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import afterglow
from afterglow.errors import PromptTooLong
from afterglow.server.installed import RequestDefaults
from afterglow.server.openai.completions import fit_prompt
from afterglow.server.openai.schema.completions import CompletionRequest
from support.server_process import ServerProcess

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def model(reasoning_model: Path) -> Iterator[afterglow.Model]:
    with afterglow.load(reasoning_model, host="process", context=256, sequences=1, threads=1) as model:
        yield model


def build_body(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "x", "overflow": "shift", **fields})


def test_shift_keeps_the_bos_token(model: afterglow.Model) -> None:
    bos = model.vocabulary.special_tokens["bos"]
    text = [30 + n % 200 for n in range(300)]
    prompt = fit_prompt(model, build_body(max_tokens=16), [bos, *text], RequestDefaults())
    assert list(prompt.tokens) == [bos, *text[61:]]
    assert prompt.truncation is not None
    assert prompt.truncation.dropped_tokens == 61


def test_shift_of_an_infill_prompt_drops_only_the_start_of_the_text_before_the_gap(model: afterglow.Model) -> None:
    special = model.vocabulary.special_tokens
    prompt = fit_prompt(model, build_body(max_tokens=16, suffix="y" * 20), "ab" * 200, RequestDefaults())
    tokens = list(prompt.tokens)
    assert tokens[0] == special["fim_pre"]
    assert tokens[-22:] == [special["fim_suf"], *model.tokenize("y" * 20), special["fim_mid"]]
    assert len(tokens) == 240
    with pytest.raises(PromptTooLong):
        fit_prompt(model, build_body(max_tokens=16, suffix="y" * 300), "ab", RequestDefaults())


def test_offsets_count_the_characters_of_the_text_of_which_a_token_may_be_a_part(server: ServerProcess) -> None:
    fields = {"echo": True, "logprobs": 0, "guided_choice": ["😀c"], "max_tokens": 5, "prompt": "aéb", "model": "tiny"}
    [choice] = server.complete(**fields)["choices"]
    assert choice["text"] == "aéb😀c"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4]
    events = server.collect_events("/v1/completions", fields)
    tables = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    assert [offset for table in tables if table for offset in table["text_offset"]] == [0, 1, 1, 2, 3, 3, 3, 3, 4]


def test_offsets_of_a_stream_count_the_text_that_may_begin_a_stop_text(server: ServerProcess) -> None:
    fields = {"logprobs": 0, "stop": ["efz"], "max_tokens": 5, "prompt": "abc", "model": "tiny", "temperature": 0}
    tables = [event["choices"][0]["logprobs"] for event in server.collect_events("/v1/completions", fields)]
    assert [offset for table in tables if table for offset in table["text_offset"]] == [0, 1, 2, 3, 4]
