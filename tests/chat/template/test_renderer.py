"""Chat templates are rendered like in transformers; errors have the reason and line. Also parses messages."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from afterglow.chat.messages import Message, parse_messages, to_template_message
from afterglow.chat.template import renderer
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.errors import InvalidArgument, InvalidTemplate

pytestmark = pytest.mark.slow  # each template starts a process

CONVERSATION = parse_messages([("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Bye")])


def render(source: str | None, conversation=CONVERSATION, **options) -> str:
    with ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}) as template:
        return template.render(conversation, **options)


def test_c20_a_model_without_a_template_uses_chatml():
    assert render(None, CONVERSATION[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_like_in_transformers():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    assert render(source) == "Be brief.\nHello\nHi\nBye\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[1]['content'] }}{{ eos_token }}", "<s>Hello</s>"),
        ("{{ {'ä': [1, None]} | tojson }}", '{"ä": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        (
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }} {% endfor %}",
            "system user ",
        ),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ thinking }}", "yes"),
        ("{{ tools is none }}", "True"),
    ],
)
def test_functions_and_variables_of_transformers_are_available(source, expected):
    assert render(source, chat_template_kwargs={"thinking": "yes"}) == expected


def test_c20_unsupported_system_messages_are_merged_into_the_first_user_message():
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    assert render(source) == "[user] Be brief.\n\nHello\n[assistant] Hi\n[user] Bye\n"


def test_c20_an_error_has_the_reason_and_line_of_the_template():
    with pytest.raises(InvalidTemplate) as caught:
        render("line one\n{{ raise_exception('roles must alternate') }}")
    assert (caught.value.reason, caught.value.line) == ("roles must alternate", 2)


def test_a_syntax_error_has_its_line():
    with pytest.raises(InvalidTemplate) as caught:
        render("one\ntwo\n{% for %}")
    assert caught.value.line == 3


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
def test_a_template_works_again_after_a_timeout(monkeypatch):
    with ChatTemplate("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}fine") as template:
        assert template.render([Message(role="user", content="x")]) == "fine"
        monkeypatch.setattr(renderer, "RENDER_CPU_SECONDS", 0.5)
        with pytest.raises(InvalidTemplate, match="exceeded the limit"):
            template.render([Message(role="user", content="loop")])
        monkeypatch.setattr(renderer, "RENDER_CPU_SECONDS", 5.0)
        assert template.render([Message(role="user", content="x")]) == "fine"


def test_a_busy_machine_does_not_end_a_rendering(monkeypatch):
    """The limit is CPU time: a child that gets no core for a while is not at fault."""
    monkeypatch.setattr(renderer, "RENDER_CPU_SECONDS", 0.5)
    with ChatTemplate("{{ messages[0].content }}") as template, ThreadPoolExecutor(1) as pool:
        assert template.render([Message(role="user", content="x")]) == "x"
        os.kill(template._child.pid, signal.SIGSTOP)
        result = pool.submit(template.render, [Message(role="user", content="late")])
        time.sleep(1.5)
        assert not result.done()
        os.kill(template._child.pid, signal.SIGCONT)
        assert result.result() == "late"


def test_a_child_that_never_replies_is_replaced(monkeypatch):
    monkeypatch.setattr(renderer, "RENDER_WALL_SECONDS", 1.0)
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.render([Message(role="user", content="x")]) == "x"
        os.kill(template._child.pid, signal.SIGSTOP)
        with pytest.raises(InvalidTemplate, match="exceeded the limit"):
            template.render([Message(role="user", content="late")])
        monkeypatch.undo()
        assert template.render([Message(role="user", content="x")]) == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_child_that_died_is_replaced_without_an_error(number):
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.render([Message(role="user", content="x")]) == "x"
        os.kill(template._child.pid, number)
        template._child.wait()
        assert template.render([Message(role="user", content="y")]) == "y"


def test_a_child_that_always_dies_is_an_error(monkeypatch, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("input()")
    monkeypatch.setattr(renderer, "CHILD_PROGRAM", script)
    with ChatTemplate("{{ messages[0].content }}") as template, pytest.raises(InvalidTemplate, match="died twice"):
        template.render([Message(role="user", content="x")])


def test_the_next_template_uses_a_child_that_was_started_in_advance():
    renderer.prestart_child()
    renderer.prestart_child()  # there is one already
    ((_, spare),) = renderer._spare_children
    with ChatTemplate("{{ messages[0].content }}") as template, ChatTemplate(None) as other:
        assert template.render([Message(role="user", content="x")]) == "x"
        other.render([Message(role="user", content="x")])
        assert template._child is spare
        assert other._child is not spare


def test_signals_of_the_terminal_do_not_reach_the_child():
    with ChatTemplate(None) as template:
        template.render([Message(role="user", content="x")])
        assert os.getsid(template._child.pid) != os.getsid(0)


def test_openai_messages_are_parsed():
    (message,) = parse_messages(
        [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "reasoning_content": "hm",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            }
        ]
    )
    assert (message.content, message.reasoning) == ("ab", "hm")
    assert to_template_message(message)["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([], "messages"),
        ("text", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "colour": "red"}], "messages[0].colour"),
        ([{"role": "user", "content": [{"type": "video"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url.url"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].source"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].input_audio"),
        ([("user", "x"), {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0]"),
    ],
)
def test_an_invalid_message_is_an_error_that_names_the_field(value, where):
    with pytest.raises(InvalidArgument) as caught:
        parse_messages(value)
    assert caught.value.name == where


NOON = datetime.datetime(2026, 3, 5, 12, 0)
# As in the templates of Llama 3.1 and 3.3, and of firefunction-v2.
LLAMA = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}Today: {{ date_string }}"
FIREFUNCTION = "{{ functions + ' Today is ' + datetime + '. ' }}{{ messages[0].content }}"


def test_templates_get_the_date():
    with ChatTemplate(LLAMA, clock=lambda: NOON) as template:
        assert template.render(CONVERSATION) == "Today: 05 Mar 2026"
        assert template.render(CONVERSATION, chat_template_kwargs={"date_string": "1 May"}) == "Today: 1 May"


def test_a_template_that_reads_functions_gets_the_tools_as_json():
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with ChatTemplate(FIREFUNCTION, clock=lambda: NOON) as template:
        assert template.get_capabilities().supports_tools
        assert template.render(CONVERSATION) == "[] Today is Mar 05 2026. Be brief."
        text, _, _ = template.render(CONVERSATION, tools=[tool]).partition(" Today")
    assert json.loads(text) == [tool["function"]]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<think>{% if not enable_thinking %}</think>{% endif %}", "<think>"),  # QwQ, R1-Distill, Command R7B
        ("<think>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}", "<think>"),
        ("<think>{% if not enable_thinking | default(false) %}</think>{% endif %}", "<think></think>"),
    ],
)
def test_a_template_that_expects_enable_thinking_lets_the_model_reason(source, expected):
    assert render(source) == expected
    assert render(source, chat_template_kwargs={"enable_thinking": False}) == "<think></think>"


def test_every_string_of_the_client_is_escaped():
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ extra | tojson }}{{ bos_token }}"
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": '{"a": "\\u0061"}'}}
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "a", "tool_calls": [call], "name": "a"}]
    tools = [{"type": "function", "function": {"name": "a", "parameters": {"a": ["a"]}}}]
    text = render(
        source, parse_messages(messages), tools=tools, chat_template_kwargs={"extra": {"a": ["a"]}}, escape=str.upper
    )
    assert '"a"' not in text
    assert text.count('"A"') == 12
    assert text.endswith("<s>")


def test_conversations_that_are_rendered_together_are_rejected_one_by_one():
    source = "{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[-1].content }}"
    conversations = [
        (parse_messages([("user", "one")]), []),
        ([], []),
        (parse_messages([("system", "a"), ("user", "b")]), []),  # its system message is moved to the user's
        (parse_messages([("user", "two")]), []),
    ]
    with ChatTemplate(source) as template:
        first, none, moved, last = template.render_others(conversations)
        assert (first, none, last) == ("one", None, "two")
        assert moved == template.render(conversations[2][0])
        assert moved is not None
        assert "a" in moved
