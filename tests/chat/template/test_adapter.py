"""Conversations reach templates in the form that each of them takes, and nothing that was said is lost."""

from __future__ import annotations

import pytest

from afterglow.chat.messages import parse_messages
from afterglow.chat.template.adapter import iter_fallbacks
from afterglow.chat.template.capabilities import TemplateCapabilities, ToolCallFormat
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.errors import InvalidTemplate

CALL = {"id": "call_12345678", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}
CALLED = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_12345678", "content": "there"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} WRITTEN>{% endfor %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def render(source: str, turns, **options) -> str:
    with ChatTemplate(source) as template:
        return template.render(parse_messages(turns), **options)


def habits(source: str) -> TemplateCapabilities:
    with ChatTemplate(source) as template:
        return template.get_capabilities()


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '{"place": "here"}'),  # an object
        ("{{ c.function.arguments.place }}", "here"),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "place=here"),
        ("{{ '' + c.function.arguments }}", '{"place": "here"}'),  # text: an object cannot be added
        ("{{ c.function.arguments }}", '{"place": "here"}'),  # text: an object would be written as Python does
        ("{{ c.function.arguments if c.function.arguments is string else 'x' * 3 }}", '{"place": "here"}'),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_reads_them(written, text):
    assert render(CALLS.replace("WRITTEN", written), CALLED) == f"[user]Where?[assistant]<look {text}>[tool]there"


def test_arguments_that_are_no_json_reach_the_template_as_they_are():
    call = {**CALL, "function": {"name": "look", "arguments": '{"place": '}}
    source = CALLS.replace("WRITTEN", "{{ c.function.arguments | tojson }}")
    assert '<look "{\\"place\\": ">' in render(source, [CALLED[0], {**CALLED[1], "tool_calls": [call]}])


def test_content_is_none_beside_calls_where_the_template_asks_for_that():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}<{{ c.function.name + c.function.arguments }}>{% endfor %}"
        "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    assert habits(source).tool_call_format == ToolCallFormat(arguments_as_text=True, empty_content=None)
    assert render(source, CALLED) == '[user]Where?<look{"place": "here"}>[tool]there'
    speaking = [CALLED[0], {**CALLED[1], "content": "I look."}, CALLED[2]]
    assert render(source, speaking) == '[user]Where?[assistant]I look.<look{"place": "here"}>[tool]there'


def test_content_is_empty_text_beside_calls_otherwise():
    calls = "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}"
    source = "{% for m in messages %}{{ m.content | trim }}" + calls + "{% endfor %}"
    assert "None" not in render(source, CALLED)


def test_content_is_a_list_of_parts_where_the_template_iterates_over_it():
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endfor %}"
    )
    assert habits(source).requires_typed_content
    assert render(source, [("system", "Be brief."), ("user", "Hello")]) == "[system]Be brief.[user]Hello"


def test_content_stays_text_where_the_template_takes_both():
    source = (
        "{% for m in messages %}{% if m.content is string %}text {% else %}parts {% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, [("user", "Hello")]) == "text Hello"


def test_calls_and_results_that_a_template_does_not_show_are_written_as_text():
    source = "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    call = '{"name": "look", "arguments": {"place": "here"}}'
    assert render(source, CALLED) == f"[user]Where?[assistant]{call}[user]there"


def test_results_are_what_the_user_says_where_the_template_refuses_tool_messages():
    source = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}<{{ c | tojson }}>{% endfor %}{% endfor %}"
    )
    text = render(source, CALLED)
    assert text.endswith("[user]there")
    assert '"arguments": {"place": "here"}' in text


def test_questions_in_a_row_become_one_where_roles_must_alternate():
    assert render(ALTERNATING, [("user", "a"), ("user", "b"), ("assistant", "c")]) == "[user]a\n\nb[assistant]c"


def test_questions_in_a_row_stay_apart_where_they_may():
    assert render(PLAIN, [("user", "a"), ("user", "b")]) == "[user]a[user]b"


def test_results_and_questions_become_one_where_roles_must_alternate():
    turns = [*CALLED, {"role": "user", "content": "And?"}]
    assert render(ALTERNATING, turns).endswith("[user]there\n\nAnd?")


def test_a_conversation_that_cannot_alternate_is_refused_with_the_template_s_reason():
    with pytest.raises(InvalidTemplate, match="must alternate"):
        render(ALTERNATING, [("assistant", "a"), ("user", "b")])


def test_system_messages_that_come_late_become_one_at_the_beginning():
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    turns = [("system", "a"), ("user", "b"), ("system", "c"), ("user", "d")]
    assert render(source, turns) == "[system]a\n\nc[user]b[user]d"


def test_system_messages_that_a_template_passes_over_go_with_the_first_question():
    source = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert render(source, [("system", "Be brief."), ("user", "Hello")]) == "[user]Be brief.\n\nHello"


def test_developer_messages_are_system_messages_where_the_template_does_not_know_them():
    turns = [("developer", "Be brief."), ("user", "Hello")]
    assert render(PLAIN, turns) == "[system]Be brief.[user]Hello"
    knowing = PLAIN + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert render(knowing, turns) == "[developer]Be brief.[user]Hello!"


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning", "thought"])
def test_reasoning_comes_in_the_field_that_the_template_reads(field):
    source = "{% for m in messages %}{% if m.FIELD %}({{ m.FIELD }}){% endif %}{{ m.content }}{% endfor %}"
    source = source.replace("FIELD", field)
    turns = [("user", "a"), {"role": "assistant", "content": "b", "reasoning_content": "because"}]
    assert render(source, turns) == "a(because)b"


def test_reasoning_comes_as_a_part_of_the_content_where_the_template_reads_it_there():
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}({{ p.thinking }}){% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    turns = [("user", "a"), {"role": "assistant", "content": "b", "reasoning_content": "because"}]
    assert render(source, turns) == "a(because)b"


def test_a_template_that_wants_reasoning_everywhere_gets_it_empty():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.reasoning_content is not defined %}"
        "{{ raise_exception('no thoughts') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, [("user", "a"), ("assistant", "b"), ("user", "c")]) == "abc"


def test_identifiers_of_calls_are_shortened_for_templates_that_insist():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
        "{% endif %}<{{ c.id }} {{ c.function.arguments | tojson }}>{% endfor %}{{ m.tool_call_id }}{{ m.content }}"
        "{% endfor %}"
    )
    text = render(source, CALLED)
    identifier = text.split("<")[1].split(" ")[0]
    assert len(identifier) == 9
    assert text.endswith(f"{identifier}there")


def test_templates_get_tools_as_they_were_offered_and_none_where_there_are_none():
    assert render("{{ messages[0].content }}{{ tools | tojson }}", [("user", "a")], tools=TOOLS).startswith('a[{"type"')
    assert render("{{ messages[0].content }}{{ tools }} {{ documents }}", [("user", "a")]) == "aNone None"
    assert render("{{ messages[0].content }}{{ enable_thinking is defined }}", [("user", "a")]) == "aFalse"


def test_templates_that_cannot_bear_none_for_tools_get_nothing():
    assert render("{{ messages[0].content }}{% for tool in tools %}{{ tool }}{% endfor %}", [("user", "a")]) == "a"


@pytest.mark.parametrize("source", [PLAIN, "{{ tools }}{{ messages[0].content }}"])
def test_whether_a_template_shows_tools_can_be_asked(source):
    assert habits(source).supports_tools == ("tools" in source)


def test_a_template_may_keep_lists_of_its_own_but_not_change_what_it_is_given():
    own = (
        "{% set kept = [] %}{% for m in messages %}{% set _ = kept.append(m.content) %}{% endfor %}"
        "{{ kept | join(',') }}"
    )
    assert render(own, [("user", "a"), ("assistant", "b")]) == "a,b"
    with pytest.raises(InvalidTemplate, match="unsafe"):
        render("{{ messages.append(1) }}", [("user", "a")])


def test_no_way_is_tried_twice():
    turns = parse_messages([("system", "a"), ("user", "b"), ("user", "c"), *CALLED])
    ways = list(iter_fallbacks(turns))
    assert len(ways) == len({repr(way) for way in ways})
    assert turns not in ways
