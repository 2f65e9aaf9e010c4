"""Wrong arguments of the Python API raise `InvalidArgument`, which names the argument."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import afterglow
from afterglow import Conversation, Message, ToolCall
from afterglow.agents.execution import call_tool
from afterglow.errors import AfterglowError, InvalidArgument
from afterglow.testing import models
from afterglow.testing.script import script_answers, write_call

pytestmark = pytest.mark.native
PATH = models.get_path("successor-attention")
EVIL = "__import__('os').environ.update(EVALUATED='yes') or int"


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with afterglow.load(PATH, context=4096, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([PATH], {"threads": 0}, "`threads` must be greater than or equal to 1, not 0"),
        ([PATH], {"threads": "2"}, "`threads` must be a valid integer, not '2'"),
        ([PATH], {"chat_template": "template.jinja"}, "`chat_template` has no variable.*pass a `Path` to read a file"),
        ([None], {}, "`model` must be a name or a path, not None"),
        ([b"smollm2"], {}, "`model` must be a name or a path, not b'smollm2'"),
    ],
)
def test_a_wrong_argument_of_load_is_named(arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        afterglow.load(*arguments, **options)


WRONG_CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "bytes as a prompt": (lambda model: model.complete(b"abc"), "`prompt` must be text or a list of tokens, not bytes"),
    "no prompt": (lambda model: model.complete(None), "`prompt` must be text or a list of tokens, not NoneType"),
    "bytes to stream": (lambda model: model.stream(b"abc"), "`prompt` must be text"),
    "bytes to embed": (lambda model: model.embed(b"abc"), "`text` must be text or a list of tokens, not bytes"),
    "bytes to score": (lambda model: model.logprobs(b"abc"), "`text` must be text"),
    "a token that does not exist to score": (
        lambda model: model.score([1, 10**9]),
        r"`tokens` must be from 0 to \d+, not 1000000000",
    ),
    "a negative token to score": (lambda model: model.score([1, -5]), r"`tokens` must be from 0 to \d+, not -5"),
    "text to score as tokens": (lambda model: model.score("abc"), "`tokens` must be a flat list of integers"),
    "fractions to score": (lambda model: model.score([1.5, 2.5]), "`tokens` must be a flat list of integers"),
    "text as the first token to score": (
        lambda model: model.score([1, 2], first="1"),
        "`first` must be an integer, not '1'",
    ),
    "a negative number of alternatives": (
        lambda model: model.score([1, 2], -1),
        "`alternatives` must be from 0 to 1000, not -1",
    ),
    "bytes to tokenize": (lambda model: model.tokenize(b"abc"), "`text` must be text, not bytes"),
    "text as a temperature": (
        lambda model: model.complete("abc", temperature="0.5"),
        "`temperature` must be a valid number, not '0.5'",
    ),
    "text as top_k": (lambda model: model.chat("abc", top_k="5"), "`top_k` must be a valid integer, not '5'"),
    "an unknown role": (
        lambda model: model.chat([("usr", "x")]),
        r"`messages\[0\].role` is 'usr', which is not a role; did you mean 'user'\?",
    ),
    "a role like no other": (
        lambda model: model.chat([{"role": "x", "content": "x"}]),
        r"`messages\[0\].role` is 'x', which is not a role; the roles are system, developer, user, assistant, tool",
    ),
    "the role of a message": (
        lambda model: model.chat([("user", "x"), Message(role="bot", content="x")]),
        r"`messages\[1\].role` is 'bot'",
    ),
    "no content": (lambda model: model.chat([{"role": "user"}]), r"`messages\[0\].content` is missing"),
    "content None": (
        lambda model: model.chat([{"role": "assistant", "content": None}]),
        r"`messages\[0\].content` is missing",
    ),
    "content of a message": (
        lambda model: model.chat([Message(role="user", content=None)]),  # type: ignore[arg-type]
        r"`messages\[0\].content` must be text, not NoneType",
    ),
    "nothing to ask": (lambda model: Conversation(model).ask(None), "`text` must be text, not NoneType"),  # type: ignore[arg-type]
    "bytes as a system prompt": (
        lambda model: Conversation(model, system=b"x"),  # type: ignore[arg-type]
        "`system` must be text, not bytes",
    ),
}


@pytest.mark.parametrize("number", [99, -1])
def test_a_snapshot_is_not_restored_into_a_sequence_that_does_not_exist(model: Any, number: int) -> None:
    model.complete("abc", max_tokens=1)
    model.snapshot("abc")
    with pytest.raises(InvalidArgument, match=f"`sequence` must be from 0 to 3, not {number}"):
        model.restore("abc", number)


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_argument_is_named(model: Any, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call(model)


def test_an_assistant_message_with_tool_calls_needs_no_content(model: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "There."},
    ]
    assert model.chat(messages, max_tokens=3).text == "abc"


@pytest.mark.parametrize("value", [EVIL, list[EVIL], "int", "json", ""], ids=["text", "list", "type", "name", "empty"])  # type: ignore[valid-type]
def test_text_in_a_response_format_is_never_evaluated(model: Any, value: object) -> None:
    with pytest.raises(InvalidArgument, match="`response_format`"):
        model.chat("hello", response_format=value, max_tokens=3)
    assert "EVALUATED" not in os.environ


def test_a_response_format_may_be_the_name_of_a_format(model: Any) -> None:
    assert model.chat("hello", response_format="text", max_tokens=3).text == "abc"
    assert model.chat("hello", response_format="json_object", max_tokens=3).text.startswith("{")


def fail(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


def test_a_tool_that_raises_is_logged_with_its_traceback(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    answers = [write_call("fail", path="/no/such/file"), "I could not read it."]
    with script_answers(model, answers), caplog.at_level(logging.INFO, logger="afterglow"):
        conversation = Conversation(model, tools=[fail])
        assert conversation.ask("Read it.").text == "I could not read it."
        assert "No such file" in conversation.messages[-2].content
        (record,) = caplog.records
        assert (record.levelname, "the tool fail raised" in record.getMessage()) == ("ERROR", True)
        assert "FileNotFoundError" in caplog.text
        wrong = ToolCall(id="1", name="fail", arguments='{"file": "x"}')  # the model's mistake, not the tool's
        assert call_tool(conversation.tools[0], wrong).startswith("error: ")
        assert caplog.records[-1].levelname == "INFO"


@pytest.mark.parametrize(
    ("salt", "message"), [("\ud800", "an unpaired surrogate"), (5, "`salt` must be"), (None, "`salt` must be")]
)
def test_a_salt_that_cannot_be_encoded_is_refused_everywhere(model: Any, salt: Any, message: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: model.complete("abc", salt=salt),
        lambda: model.chat("abc", salt=salt),
        lambda: model.apply_chat_template("abc", salt=salt),
        lambda: model.explain("abc", salt=salt),
        lambda: model.explain_miss("abc", salt=salt),
        lambda: model.pin("abc", salt=salt),
        lambda: model.unpin("abc", salt=salt),
        lambda: model.score([20, 21, 22], salt=salt),
        lambda: model.get_tree(salt=salt),
        lambda: model.get_cache_contents(salt=salt),
        lambda: model.find_prefix("x", salt=salt),
        lambda: model.embed_texts(["abc"], salt=salt),
        lambda: model.rerank("abc", ["abc"], salt=salt),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert model.complete("abc", max_tokens=1).text == "d"


def test_unpaired_surrogates_in_grammars_and_messages_are_refused(model: Any) -> None:
    for value in ({"type": "regex", "pattern": "\ud800"}, {"type": "grammar", "grammar": 'start: "\ud800"'}):
        with pytest.raises(InvalidArgument, match="an unpaired surrogate"):
            model.chat("abc", response_format=value)
    with pytest.raises(AfterglowError, match="an unpaired surrogate"):
        model.chat("abc\ud800")


def test_variables_of_the_template_that_are_not_json_are_refused(model: Any) -> None:
    with pytest.raises(InvalidArgument, match="`chat_template_kwargs` must be values of JSON"):
        model.chat("abc", chat_template_kwargs={"path": Path("x")})
