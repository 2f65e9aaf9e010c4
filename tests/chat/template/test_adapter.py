"""Messages are adapted to the capabilities of each template, and no content is lost."""

from __future__ import annotations

import pytest

from afterglow.chat.messages import parse_messages
from afterglow.chat.template.adapter import iter_fallbacks
from afterglow.chat.template.capabilities import TemplateCapabilities, ToolCallFormat
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.errors import InvalidTemplate

pytestmark = pytest.mark.slow  # each template starts a process

CALL = {"id": "call_12345678", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}
TOOL_MESSAGES = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_12345678", "content": "there"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALLS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} EXPRESSION>{% endfor %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def render(source: str, messages, **options) -> str:
    with ChatTemplate(source) as template:
        return template.render(parse_messages(messages), **options)


def get_capabilities(source: str) -> TemplateCapabilities:
    with ChatTemplate(source) as template:
        return template.get_capabilities()


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '{"place": "here"}'),  # an object
        ("{{ c.function.arguments.place }}", "here"),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "place=here"),
        ("{{ '' + c.function.arguments }}", '{"place": "here"}'),  # text: an object cannot be concatenated
        ("{{ c.function.arguments }}", '{"place": "here"}'),  # text: an object would be rendered as a Python dictionary
        ("{{ c.function.arguments if c.function.arguments is string else 'x' * 3 }}", '{"place": "here"}'),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_requires(expression, text):
    assert (
        render(CALLS_TEMPLATE.replace("EXPRESSION", expression), TOOL_MESSAGES)
        == f"[user]Where?[assistant]<look {text}>[tool]there"
    )


def test_arguments_that_are_not_json_are_passed_as_text():
    call = {**CALL, "function": {"name": "look", "arguments": '{"place": '}}
    source = CALLS_TEMPLATE.replace("EXPRESSION", "{{ c.function.arguments | tojson }}")
    assert '<look "{\\"place\\": ">' in render(source, [TOOL_MESSAGES[0], {**TOOL_MESSAGES[1], "tool_calls": [call]}])


def test_content_is_none_with_tool_calls_if_the_template_requires_it():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}<{{ c.function.name + c.function.arguments }}>{% endfor %}"
        "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    assert get_capabilities(source).tool_call_format == ToolCallFormat(arguments_as_text=True, empty_content=None)
    assert render(source, TOOL_MESSAGES) == '[user]Where?<look{"place": "here"}>[tool]there'
    with_content = [TOOL_MESSAGES[0], {**TOOL_MESSAGES[1], "content": "I look."}, TOOL_MESSAGES[2]]
    assert render(source, with_content) == '[user]Where?[assistant]I look.<look{"place": "here"}>[tool]there'


def test_content_is_empty_text_with_tool_calls_otherwise():
    calls = "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}"
    source = "{% for m in messages %}{{ m.content | trim }}" + calls + "{% endfor %}"
    assert "None" not in render(source, TOOL_MESSAGES)


def test_content_is_a_list_of_parts_if_the_template_iterates_over_it():
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    assert get_capabilities(source).requires_typed_content
    assert render(source, [("system", "Be brief."), ("user", "Hello")]) == "[system]Be brief.[user]Hello"


def test_content_is_text_if_the_template_supports_both():
    source = (
        "{% for m in messages %}{% if m.content is string %}text {% else %}parts {% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, [("user", "Hello")]) == "text Hello"


def test_unsupported_tool_calls_and_results_become_text():
    source = "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    call = '{"name": "look", "arguments": {"place": "here"}}'
    assert render(source, TOOL_MESSAGES) == f"[user]Where?[assistant]{call}[user]there"


def test_tool_results_become_user_messages_if_the_template_rejects_them():
    source = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}<{{ c | tojson }}>{% endfor %}{% endfor %}"
    )
    text = render(source, TOOL_MESSAGES)
    assert text.endswith("[user]there")
    assert '"arguments": {"place": "here"}' in text


def test_consecutive_user_messages_are_merged_if_roles_must_alternate():
    assert render(ALTERNATING, [("user", "a"), ("user", "b"), ("assistant", "c")]) == "[user]a\n\nb[assistant]c"


def test_consecutive_user_messages_stay_separate_otherwise():
    assert render(PLAIN, [("user", "a"), ("user", "b")]) == "[user]a[user]b"


def test_tool_results_and_user_messages_are_merged_if_roles_must_alternate():
    messages = [*TOOL_MESSAGES, {"role": "user", "content": "And?"}]
    assert render(ALTERNATING, messages).endswith("[user]there\n\nAnd?")


def test_a_conversation_that_cannot_alternate_raises_the_error_of_the_template():
    with pytest.raises(InvalidTemplate, match="must alternate"):
        render(ALTERNATING, [("assistant", "a"), ("user", "b")])


def test_late_system_messages_are_merged_at_the_start():
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    messages = [("system", "a"), ("user", "b"), ("system", "c"), ("user", "d")]
    assert render(source, messages) == "[system]a\n\nc[user]b[user]d"


def test_unsupported_system_messages_are_merged_into_the_first_user_message():
    source = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert render(source, [("system", "Be brief."), ("user", "Hello")]) == "[user]Be brief.\n\nHello"


def test_unsupported_developer_messages_become_system_messages():
    messages = [("developer", "Be brief."), ("user", "Hello")]
    assert render(PLAIN, messages) == "[system]Be brief.[user]Hello"
    supporting = PLAIN + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert render(supporting, messages) == "[developer]Be brief.[user]Hello!"


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning", "thought"])
def test_reasoning_is_passed_in_the_field_that_the_template_reads(field):
    source = "{% for m in messages %}{% if m.FIELD %}({{ m.FIELD }}){% endif %}{{ m.content }}{% endfor %}"
    source = source.replace("FIELD", field)
    messages = [("user", "a"), {"role": "assistant", "content": "b", "reasoning_content": "because"}]
    assert render(source, messages) == "a(because)b"


def test_reasoning_is_passed_as_a_content_part_if_the_template_reads_it_there():
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}({{ p.thinking }}){% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    messages = [("user", "a"), {"role": "assistant", "content": "b", "reasoning_content": "because"}]
    assert render(source, messages) == "a(because)b"


def test_missing_reasoning_is_passed_as_empty_text_if_the_template_requires_it():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.reasoning_content is not defined %}"
        "{{ raise_exception('no reasoning') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, [("user", "a"), ("assistant", "b"), ("user", "c")]) == "abc"


def test_tool_call_ids_are_shortened_if_the_template_requires_it():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
        "{% endif %}<{{ c.id }} {{ c.function.arguments | tojson }}>{% endfor %}{{ m.tool_call_id }}{{ m.content }}"
        "{% endfor %}"
    )
    text = render(source, TOOL_MESSAGES)
    identifier = text.split("<")[1].split(" ")[0]
    assert len(identifier) == 9
    assert text.endswith(f"{identifier}there")


def test_tools_are_passed_unchanged_and_none_without_tools():
    assert render("{{ messages[0].content }}{{ tools | tojson }}", [("user", "a")], tools=TOOLS).startswith('a[{"type"')
    assert render("{{ messages[0].content }}{{ tools }} {{ documents }}", [("user", "a")]) == "aNone None"
    assert render("{{ messages[0].content }}{{ enable_thinking is defined }}", [("user", "a")]) == "aFalse"


def test_tools_are_undefined_if_the_template_does_not_support_none():
    assert render("{{ messages[0].content }}{% for tool in tools %}{{ tool }}{% endfor %}", [("user", "a")]) == "a"


@pytest.mark.parametrize("source", [PLAIN, "{{ tools }}{{ messages[0].content }}"])
def test_tool_support_is_detected(source):
    assert get_capabilities(source).supports_tools == ("tools" in source)


def test_a_template_may_modify_its_own_lists_but_not_its_input():
    source = (
        "{% set texts = [] %}{% for m in messages %}{% set _ = texts.append(m.content) %}{% endfor %}"
        "{{ texts | join(',') }}"
    )
    assert render(source, [("user", "a"), ("assistant", "b")]) == "a,b"
    with pytest.raises(InvalidTemplate, match="unsafe"):
        render("{{ messages.append(1) }}", [("user", "a")])


def test_no_fallback_is_repeated():
    messages = parse_messages([("system", "a"), ("user", "b"), ("user", "c"), *TOOL_MESSAGES])
    fallbacks = list(iter_fallbacks(messages))
    assert len(fallbacks) == len({repr(fallback) for fallback in fallbacks})
    assert messages not in fallbacks
