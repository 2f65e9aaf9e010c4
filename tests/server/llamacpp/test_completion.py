"""/completion, /infill and /embedding of the llama-server API, with an HTTP client on a server with tiny models."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from afterglow.testing.models import vocabulary
from support.server_process import CYCLE, ServerProcess

pytestmark = pytest.mark.native


def complete(server: ServerProcess, prompt: Any = "abc", **fields: Any) -> Any:
    """Return the result of /completion, greedy by default."""
    body = {"model": "tiny", "prompt": prompt, "n_predict": 4, "temperature": 0}
    response = server.post("/completion", {**body, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refuse(server: ServerProcess, path: str = "/completion", **fields: Any) -> dict[str, Any]:
    """Return the error of a request with status 400."""
    response = server.post(path, {"model": "tiny", "prompt": "abc", **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_completion_has_the_fields_of_llama_server(server: ServerProcess) -> None:
    result = complete(server, "abc", stop=["f"], return_tokens=True, cache_salt="fields")
    assert (result["content"], result["stop"], result["stop_type"], result["stopping_word"]) == (
        "de",
        True,
        "word",
        "f",
    )
    assert (result["index"], result["prompt"], result["model"]) == (0, "abc", "tiny")
    assert (result["has_new_line"], result["truncated"]) == (False, False)
    assert result["tokens"][:2] == [vocabulary.get_byte_token(ord(letter)) for letter in "de"]
    assert result["generation_settings"]["n_predict"] == 4
    assert result["generation_settings"]["temperature"] == 0
    timings = result["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == result["tokens_evaluated"]
    assert timings["predicted_n"] == result["tokens_predicted"]
    assert timings["prompt_ms"] > 0


def test_a_stream_adds_up_to_the_whole_completion(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "abc", "n_predict": 6, "temperature": 0}
    *chunks, end = server.collect_events("/completions", body)
    assert "".join(chunk["content"] for chunk in chunks) + end["content"] == complete(server, n_predict=6)["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * 6
    assert all(len(chunk["tokens"]) == 1 for chunk in chunks)
    assert (end["stop"], end["stop_type"], end["timings"]["predicted_n"]) == (True, "limit", 6)


def test_the_last_event_of_a_stream_has_the_text_that_was_held_back(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "abc", "n_predict": 4, "temperature": 0, "stop": ["g!"]}
    *chunks, end = server.collect_events("/completion", body)
    assert [chunk["content"] for chunk in chunks] == ["d", "e", "f", ""]  # g may be the start of the stop string
    assert end["content"] == "g"


def test_prompts_of_text_tokens_and_objects_are_the_same(server: ServerProcess) -> None:
    tokens = server.post("/tokenize", {"model": "tiny", "content": "abc", "add_special": True}).json()["tokens"]
    prompts = ["abc", tokens, [*tokens[:-1], "c"], {"prompt_string": "abc"}]
    results = complete(server, prompts)
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert {result["content"] for result in results} == {"defg"}
    assert complete(server, [*tokens[:-1], "c"])["content"] == "defg"  # a list with a token is one prompt


def test_probabilities_of_tokens(server: ServerProcess) -> None:
    probabilities = complete(server, n_probs=3)["completion_probabilities"]
    assert [entry["token"] for entry in probabilities] == list("defg")
    for entry in probabilities:
        assert entry["bytes"] == list(entry["token"].encode())
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["id"] == entry["id"]
        assert entry["logprob"] <= 0
    *chunks, _ = server.collect_events("/completion", {"model": "tiny", "prompt": "abc", "n_predict": 2, "n_probs": 1})
    assert [len(chunk["completion_probabilities"]) for chunk in chunks] == [1, 1]


def test_a_grammar_and_a_schema_constrain_the_output(server: ServerProcess) -> None:
    assert complete(server, grammar='root ::= "x"{3}')["content"] == "xxx"
    assert complete(server, json_schema={"const": 42}, n_predict=8)["content"] == "42"
    assert refuse(server, grammar="root ::= (")["type"] == "invalid_request_error"
    assert refuse(server, grammar='root ::= "a"', json_schema={})["param"] == "json_schema"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", "root ::= ("),
        ("grammar", 'root ::= "a" missing'),
        ("grammar", "root ::= [" + "a" * 2_000_000),
        ("json_schema", {"type": "string", "pattern": "("}),
        ("json_schema", {"type": "number", "multipleOf": "two"}),
        ("n_cmpl", 1000),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_field_of_the_body(server: ServerProcess, name: str, value: Any, stream: bool) -> None:
    error = refuse(server, stream=stream, **{name: value})
    assert error["param"] == name
    assert "response_format" not in error["message"]


def test_cache_prompt_decides_whether_the_prefix_is_computed_again(server: ServerProcess) -> None:
    prompt = "the prefix that this test alone has " * 4
    first, second = complete(server, prompt), complete(server, prompt)
    assert first["timings"]["cache_n"] < second["timings"]["cache_n"]
    assert second["timings"]["prompt_n"] == 0
    assert complete(server, prompt, cache_prompt=False)["timings"]["cache_n"] == 0


def test_objects_have_only_the_properties_that_the_schema_names(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    bias = {"}": -50}  # the object goes on if it can
    assert json.loads(complete(server, json_schema=schema, logit_bias=bias, n_predict=40)["content"]) == {"a": 1}


def test_id_slot_chooses_the_sequence(server: ServerProcess) -> None:
    prompt = "a prompt of a length that nothing else has" * 3
    evaluated = complete(server, prompt, id_slot=5, n_predict=1)["tokens_evaluated"]
    slots = server.http.get("/slots", params={"model": "tiny"}).json()
    assert [slot["id"] for slot in slots] == list(range(8))
    assert slots[5]["n_prompt_tokens"] == evaluated
    assert not any(slot["is_processing"] for slot in slots)
    assert complete(server, prompt, n_predict=1)["id_slot"] == 5  # where it is cached
    assert "must be from -1 to 7, not 8" in refuse(server, id_slot=8)["message"]


def test_progress_and_timings_of_a_stream(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "x" * 600, "n_predict": 2, "return_progress": True, "timings_per_token": True}
    events = server.collect_events("/completion", {**body, "cache_prompt": False})
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[0]["processed"] == progress[0]["cache"] == 0
    assert progress[-1]["processed"] == progress[-1]["total"] >= 600
    assert [event["timings"]["predicted_n"] for event in events if event.get("tokens")] == [1, 2]
    assert events[0]["timings"]["prompt_ms"] == 0


def test_response_fields_select_what_is_returned(server: ServerProcess) -> None:
    fields = ["content", "generation_settings/n_predict", "absent"]
    assert complete(server, response_fields=fields) == {"content": "defg", "generation_settings/n_predict": 4}


@pytest.mark.parametrize("bias", [{"d": False}, [["d", False]], [["d", -100]], "token"])
def test_logit_bias_takes_tokens_and_texts(server: ServerProcess, bias: Any) -> None:
    token = vocabulary.get_byte_token(ord("d"))
    result = complete(server, logit_bias=[[token, False]] if bias == "token" else bias, n_predict=1)
    assert result["content"] != "d"
    assert result["generation_settings"]["logit_bias"] == [{"token": token, "bias": None}]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
@pytest.mark.parametrize("bias", [{"9" * 5000: 1}, {"0" * 5000: 1}, {"5": 10**400}])
def test_huge_numbers_in_logit_bias_are_refused(server: ServerProcess, path: str, bias: Any) -> None:
    response = server.post(path, {"model": "tiny", "prompt": "abc", "logit_bias": bias})
    assert response.status_code == 400
    assert "`logit_bias" in response.text


def test_a_negative_temperature_selects_the_most_likely_token(server: ServerProcess) -> None:
    likely = {"logit_bias": [[vocabulary.get_byte_token(ord("~")), 23.9]]}  # as likely as the right letter
    results = [complete(server, temperature=-1, seed=seed, **likely) for seed in range(4)]
    assert len({result["content"] for result in results}) == 1
    assert results[0]["generation_settings"]["temperature"] == 0


def test_digits_in_a_pair_of_logit_bias_are_text(server: ServerProcess) -> None:
    five = vocabulary.get_byte_token(ord("5"))
    assert complete(server, logit_bias=[["5", 100]])["content"] == "5555"
    assert complete(server, logit_bias={str(five): 100})["content"] == "5555"
    assert complete(server, logit_bias=[[five, 100]])["content"] == "5555"


def test_ignored_end_tokens_are_listed_as_forbidden(server: ServerProcess) -> None:
    biases = complete(server, ignore_eos=True)["generation_settings"]["logit_bias"]
    assert biases
    assert all(entry["bias"] is None for entry in biases)


def test_several_completions_of_a_prompt(server: ServerProcess) -> None:
    assert [result["index"] for result in complete(server, n_cmpl=2)] == [0, 1]


def test_a_full_context_truncates_the_completion(server: ServerProcess) -> None:
    result = complete(server, "a" * 2000, n_predict=-1, ignore_eos=True)
    assert (result["truncated"], result["stop_type"]) == (True, "limit")


def test_errors_have_the_form_of_llama_server(server: ServerProcess) -> None:
    error = refuse(server, prompt="a" * 3000)
    assert (error["type"], error["code"], error["n_ctx"]) == ("exceed_context_size_error", 400, 2048)
    assert error["n_prompt_tokens"] >= 3000
    assert "exceeds the available context size" in error["message"]
    assert refuse(server, prompt=[])["param"] == "prompt"
    assert "did you mean `n_predict`" in refuse(server, n_predicts=3)["message"]
    assert "has 'best', which is not one of penalties, dry" in refuse(server, samplers=["top_k", "best"])["message"]


def test_hints_are_named_in_a_header(server: ServerProcess) -> None:
    response = server.post("/completion", {"model": "tiny", "prompt": "abc", "n_predict": 1, "speculative.n_max": 3})
    assert response.headers["x-afterglow-ignored"] == "speculative.n_max"


def test_infill_puts_the_prompt_between_the_prefix_and_the_suffix(server: ServerProcess) -> None:
    body = {"model": "reasoning", "input_prefix": "abc", "input_suffix": "xyz", "n_predict": 3, "temperature": 0}
    result = server.post("/infill", {**body, "prompt": "jk"}).json()
    assert result["prompt"] == "<|vision_start|>abcjk<|vision_end|>xyz<|image_pad|>"  # prefix, suffix, middle
    assert result["content"] == CYCLE[:3]  # the output after an infill token
    assert server.post("/infill", {**body, "model": "tiny"}).status_code == 501
    assert server.post("/infill", {**body, "input_extra": [{"filename": "a.py"}]}).status_code == 400


def test_an_infill_of_long_texts_is_cut_to_the_context(server: ServerProcess) -> None:
    body = {"model": "reasoning", "input_prefix": "a" * 3000 + "b", "input_suffix": "y" + "z" * 3000, "n_predict": 3}
    response = server.post("/infill", {**body, "input_extra": [{"text": "d" * 5000}]})
    assert response.status_code == 200, response.text
    before, after = response.json()["prompt"].split("<|vision_end|>")
    assert before.endswith("ab")
    assert after.startswith("yz")
    assert 1500 < response.json()["tokens_evaluated"] < 2048


# What llama.vim sends for a completion, and to fill the cache.
EDITOR = {
    "id_slot": 0, "input_prefix": "ab", "input_suffix": "xyz", "prompt": "c", "n_predict": 6, "stop": [], "n_indent": 4,
    "input_extra": [{"text": "one", "time": [3, 4], "filename": "a.py"}], "top_k": 40, "top_p": 0.9, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached"],
}  # fmt: skip
WARMUP = {**EDITOR, "n_predict": 0, "samplers": [], "temperature": 0.0, "response_fields": [""], "t_max_predict_ms": 1}


def test_requests_of_editors_are_answered(server: ServerProcess) -> None:
    warmup = server.post("/infill", {**WARMUP, "model": "reasoning"})
    assert (warmup.status_code, warmup.json()) == (200, {})
    response = server.post("/infill", {**EDITOR, "model": "reasoning"})
    assert response.status_code == 200, response.text
    assert response.json().keys() == set(EDITOR["response_fields"])
    assert response.json()["content"] == CYCLE[:6]
    assert set(response.headers["x-afterglow-ignored"].split(", ")) == {"t_max_prompt_ms", "input_extra.time"}


def test_samplers_are_reported_as_they_were_applied(server: ServerProcess) -> None:
    hot = {"temperature": 50, "top_k": 1, "ignore_eos": True}
    assert complete(server, samplers=["topk", "temp"], **hot)["content"] == "defg"
    assert complete(server, samplers="tp", **hot)["content"] != "defg"  # without top-k
    params = server.http.get("/props", params={"model": "tiny"}).json()["default_generation_settings"]["params"]
    reported = complete(server, samplers=params["samplers"])["generation_settings"]["samplers"]
    assert reported == params["samplers"]
    assert complete(server, samplers="kti", top_k=5)["generation_settings"]["samplers"] == [
        "top_k",
        "temperature",
        "infill",
    ]


def test_a_line_with_less_indentation_ends_the_completion(server: ServerProcess) -> None:
    grammar = r'root ::= "x:\n    y\n  z" [a-z]*'
    result = complete(server, grammar=grammar, n_predict=40, n_indent=4)
    assert (result["content"], result["stop_type"], result["truncated"]) == ("x:\n    y\n  ", "limit", False)
    assert complete(server, grammar=grammar, n_predict=20, n_indent=2)["content"].startswith("x:\n    y\n  z")


def test_after_t_max_predict_ms_the_next_line_end_ends_the_completion(server: ServerProcess) -> None:
    grammar = r'root ::= ([a-z] [a-z] "\n")+'
    result = complete(server, grammar=grammar, n_predict=300, t_max_predict_ms=1)
    assert result["content"].endswith("\n")
    assert (result["stop_type"], result["truncated"]) == ("limit", False)
    assert result["tokens_predicted"] < 100
    assert complete(server, grammar=grammar, n_predict=30, t_max_predict_ms=60_000)["tokens_predicted"] == 30


def test_embeddings_have_the_requested_norm(server: ServerProcess) -> None:
    (single,) = server.post("/embedding", {"model": "vectors", "content": "abc"}).json()
    vector = np.array(single["embedding"][0])
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    both = server.post("/embeddings", {"model": "vectors", "input": ["abc", "abd"], "embd_normalize": 1}).json()
    assert [entry["index"] for entry in both] == [0, 1]
    assert np.abs(both[0]["embedding"][0]).sum() == pytest.approx(1, abs=1e-5)
    assert np.array(both[0]["embedding"][0]) @ vector > 0
    assert server.post("/embedding", {"model": "vectors"}).status_code == 400
    for norm in (2000, 2**31 - 1):  # the largest component decides
        (entry,) = server.post("/embedding", {"model": "vectors", "content": "abc", "embd_normalize": norm}).json()
        assert np.abs(entry["embedding"][0]).max() == pytest.approx(1, abs=1e-2)
    huge = server.post("/embedding", {"model": "vectors", "content": "abc", "embd_normalize": 10**400})
    assert (huge.status_code, "embd_normalize" in huge.json()["error"]["message"]) == (400, True)


def test_the_cycle_goes_on(server: ServerProcess) -> None:
    assert complete(server, "abc", n_predict=8)["content"] == CYCLE[3:11]
