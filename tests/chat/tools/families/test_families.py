"""Do we read what each family of models writes, and tell the families by their templates?"""

from __future__ import annotations

import json
import re

import pytest

from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.output.parts import ParsedOutput, join_parts
from afterglow.chat.tools import TOOL_FAMILIES, detect_family, render_tools_as_text
from support.tool_outputs import RECORDED, TOOLS, Recorded


def answer(recorded: Recorded) -> ParsedOutput:
    reader = TOOL_FAMILIES[recorded.family].create_parser(TOOLS)
    return join_parts(reader.feed(recorded.raw) + reader.finish())


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_an_answer_is_read_as_its_model_meant_it(recorded: Recorded) -> None:
    read = answer(recorded)
    assert read.text == recorded.text
    assert read.reasoning == recorded.reasoning
    assert tuple((call.name, call.arguments) for call in read.tool_calls) == recorded.calls


@pytest.mark.parametrize(
    "recorded", [one for one in RECORDED if "broken" not in one.what and "not JSON" not in one.what], ids=str
)
def test_the_arguments_of_a_whole_call_are_an_object(recorded: Recorded) -> None:
    for call in answer(recorded).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


def test_every_family_was_recorded() -> None:
    assert {recorded.family for recorded in RECORDED} == set(TOOL_FAMILIES)


def test_calls_have_ids_of_their_own() -> None:
    (first, second) = answer(
        next(one for one in RECORDED if one.what == "several" and one.family == "hermes")
    ).tool_calls
    assert first.id != second.id
    assert re.fullmatch(r"call_[0-9a-f]{24}", first.id)


def test_ids_come_from_the_callers_factory() -> None:
    reader = TOOL_FAMILIES["hermes"].create_parser(TOOLS, new_id=iter(["a", "b"]).__next__)
    parts = reader.feed('<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call>')
    assert [call.id for call in join_parts(parts).tool_calls] == ["a", "b"]


def test_mistral_gets_ids_of_nine_letters_and_digits() -> None:
    for family in ("mistral", "mistral-named", "mistral-ids"):
        reader = TOOL_FAMILIES[family].create_parser(TOOLS)
        (call,) = join_parts(reader.feed('[TOOL_CALLS][{"name": "now", "arguments": {}}]')).tool_calls
        assert re.fullmatch(r"[a-zA-Z0-9]{9}", call.id)


@pytest.mark.parametrize(
    ("family", "raw", "id"),
    [
        ("mistral-ids", "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}", "abcdef123"),
        (
            "kimi",
            "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "functions.now:3",
        ),
    ],
)
def test_an_id_that_the_model_wrote_is_kept(family: str, raw: str, id: str) -> None:
    reader = TOOL_FAMILIES[family].create_parser(TOOLS)
    (call,) = join_parts(reader.feed(raw) + reader.finish()).tool_calls
    assert (call.name, call.id) == ("now", id)


TEMPLATES = [
    ("{{ messages[0].content }}", "generic"),
    ("{{ 'I have no tools but <tool_call>' }}", "generic"),
    ("{% if tools %}Call them somehow.{% endif %}", "generic"),
    ("{% for call in message.tool_calls %}<tool_call>{% endfor %}", "generic"),  # it never says what can be called
    ('{% if tools %}<tool_call>{"name": …, "arguments": …}</tool_call>', "hermes"),
    ("{% if tools %}<tool_call>\n<function=f>\n<parameter=x>", "qwen-coder"),
    ("{% if tools %}<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>", "glm"),
    ('{% if tools %}{"name": function name, "parameters": dictionary of arguments}', "llama"),
    ("{% if tools %}[func_name1(params_name1=params_value1)]", "pythonic"),
    ("{% if tools %}[TOOL_CALLS][", "mistral"),
    ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]", "mistral-named"),
    ("{% if tools %}[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]", "mistral-ids"),
    ("{% set available_tools = tools %}<|tool_call|>", "granite"),
    ("{% if tools %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json", "deepseek"),  # noqa: RUF001
    ("{% if tools %}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "deepseek-named"),  # noqa: RUF001
    ("{% if tools %}<|tool_call>call:f{", "gemma"),
    ("{% if tools %}<start_function_call>call:f{", "function-gemma"),
    ("{% if tools %}```tool_code", "tool-code"),
    ("{% if tools %}<|channel|>commentary to=functions.f<|message|>", "harmony"),
    ("{% if tools %}<|tool_calls_section_begin|><|tool_call_argument_begin|>", "kimi"),
    ("{% if tools %}<seed:tool_call><function=f>", "seed"),
    ('{% if tools %}<minimax:tool_call><invoke name="f">', "minimax"),
    ("{% if tools %}<TOOLCALL>[", "nemotron"),
    ("{% if tools %}<tool_calls>[", "apriel"),
    ("{% if tools %}<|tool_call_start|>[", "lfm"),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_a_family_is_told_by_the_template(template: str, name: str) -> None:
    assert detect_family(template).name == name


def test_without_a_template_the_family_is_generic() -> None:
    assert detect_family(None).name == "generic"


def test_a_conversation_is_written_for_templates_that_know_no_tools() -> None:
    conversation = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Weather?"),
        Message(role="assistant", content="Let me look.", tool_calls=(ToolCall(id="1", name="now", arguments="{}"),)),
        Message(role="tool", content="12:00", tool_call_id="1"),
        Message(role="tool", content="rain", tool_call_id="2"),
    ]
    system, user, assistant, results = render_tools_as_text(conversation, TOOLS)
    assert system.content.startswith("Be brief.\n\n")
    assert all(f'"name": "{tool.name}"' in system.content for tool in TOOLS)
    assert user == conversation[1]
    assert assistant.content == 'Let me look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert assistant.tool_calls == ()
    assert results == Message(
        role="user", content="<tool_response>\n12:00\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    )


def test_what_is_written_for_the_model_is_read_from_it() -> None:
    call = ToolCall(id="1", name="search", arguments='{"query": "</tool_call>"}')
    (message,) = render_tools_as_text([Message(role="assistant", tool_calls=(call,))], ())
    reader = TOOL_FAMILIES["generic"].create_parser(TOOLS, new_id=lambda: "1")
    assert join_parts(reader.feed(message.content) + reader.finish()).tool_calls == (call,)


def test_a_system_message_is_added_where_there_is_none() -> None:
    system, user = render_tools_as_text([Message(role="user", content="Hi")], TOOLS)
    assert (system.role, user.content) == ("system", "Hi")


def test_without_tools_nothing_is_described() -> None:
    conversation = [Message(role="user", content="Hi")]
    assert render_tools_as_text(conversation, ()) == conversation
