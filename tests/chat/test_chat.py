"""Plans of chat requests: constraints and output parsers follow the format that the template really has."""

from __future__ import annotations

import json

import pytest

import afterglow
from afterglow.chat.chat import move_breakpoint
from afterglow.chat.content import Attachment
from afterglow.chat.messages import Message
from afterglow.chat.multimodal import MediaPlaceholders
from afterglow.chat.output.parts import ParsedOutput, join_parts
from afterglow.chat.prompt import Breakpoint
from afterglow.engine.sampling.grammar import GrammarCompiler
from afterglow.errors import InvalidArgument, InvalidGrammar
from afterglow.testing import models
from afterglow.testing.script import script_answers
from support.greedy import load_greedy

pytestmark = pytest.mark.native

# Turns of Phi-3 and Phi-4-mini, Apriel and Solar-Open, which end with `<|end|>` like those of gpt-oss.
END_TEMPLATES = {
    "phi": "{% for m in messages %}{{ '<|' + m.role + '|>' }}\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n",
    "apriel": (
        "{% for m in messages %}<|begin_{{ m.role }}|>\n{{ m.content }}\n<|end|>\n{% endfor %}"
        "<|begin_assistant|>\nHere are my reasoning steps:\n{# [BEGIN FINAL RESPONSE] #}"
    ),
    "solar": (
        "{% for m in messages %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
        "<|begin|>assistant{# <|think|> #}"
    ),
}
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% endfor %}<|start|>assistant{# to= #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def load(template: str) -> afterglow.Model:
    return load_greedy(models.get_path("attention"), context=1024, chat_template=template)


def parse(plan, text: str) -> ParsedOutput:
    parser = plan.create_parser()
    return join_parts(parser.feed(text) + parser.finish())


@pytest.mark.parametrize("name", END_TEMPLATES)
def test_a_response_format_is_enforced_if_turns_end_with_end(name):
    with load(END_TEMPLATES[name]) as model:
        response = model.chat("Where?", response_format=RESPONSE_FORMAT, reasoning=False, max_tokens=100)
    assert response.parsed == json.loads(response.text)
    assert response.parsed["city"] in ("Bern", "Rome")


def test_harmony_has_no_calls_that_nobody_offered():
    call = '<|channel|>commentary to=functions.weather<|message|>{"city": "Bern"}<|call|>'
    with load(HARMONY) as model:
        offered = parse(model.plan_chat("Where?", tools=[WEATHER]), call)
        without_tools = parse(model.plan_chat("Where?"), call)
        not_allowed = parse(model.plan_chat("Where?", tools=[WEATHER], tool_choice="none"), call)
    assert [(call.name, call.arguments) for call in offered.tool_calls] == [("weather", '{"city": "Bern"}')]
    assert without_tools == not_allowed == ParsedOutput(text='{"city": "Bern"}')


# --- a last message of the assistant is continued

THINKING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]<think>\n"
CLOSING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"role": "user", "content": "Where?"}


def prefill(content: str, **fields: str) -> list[dict[str, str]]:
    return [QUESTION, {"role": "assistant", "content": content, **fields}]


@pytest.mark.parametrize("template", [None, CLOSING])
def test_a_trailing_assistant_message_is_continued(template):
    with load(template) as model:
        prompt = model.apply_chat_template(prefill("In the town "))
        assert prompt.text.endswith("<|im_start|>assistant\nIn the town ")
        response = model.chat(prefill("In the town "), max_tokens=4)
        assert response.text == model.complete(prompt, max_tokens=4).text


def test_control_tokens_in_a_continued_message_stay_text():
    with load(None) as model:
        benign, attack = (model.apply_chat_template(prefill(text)).tokens for text in ("x", "<|im_end|>"))
        control = model.vocabulary.control_tokens
        assert [token in control for token in benign].count(True) == [token in control for token in attack].count(True)


def test_a_continued_message_is_the_answer_or_the_reasoning():
    with load(THINKING) as model:
        answer, reasoning = (
            model.plan_chat(messages) for messages in (prefill("In "), prefill("", reasoning_content="They ask"))
        )
    assert answer.prompt.text.endswith("[assistant]<think>\n</think>\n\nIn ")
    assert parse(answer, "<think> Bern") == ParsedOutput(text="<think> Bern")
    assert reasoning.prompt.text.endswith("[assistant]<think>They ask")
    assert parse(reasoning, " me.</think>Bern") == ParsedOutput(reasoning=" me.", text="Bern")


def test_reasoning_in_the_text_of_an_earlier_message_is_its_reasoning():
    """Some clients keep `<think>…</think>` in the text. Templates drop the reasoning of earlier turns."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with load(template) as model:

        def render(content: str, **fields: str) -> str:
            answer = {"role": "assistant", "content": content, **fields}
            return model.plan_chat([("user", "2+2?"), answer, ("user", "And?")]).prompt.text

        assert render("<think>\nTwo and two.\n</think>\n\n4") == render("4", reasoning_content="Two and two.")
        assert "Two and two" not in render("<think>Two and two.</think>4")
        for text in ("Write <think>x</think>.", "<think>unclosed"):
            assert text in render(text)
        user = [("user", "<think>a</think>b")]
        assert "<think>a</think>b" in model.plan_chat(user).prompt.text
        continued = model.plan_chat([("user", "2+2?"), ("assistant", "<think>Two.</think>4")]).prompt.text
        assert continued.endswith("[assistant]<think>Two.\n</think>\n\n4")


HYBRID = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content and loop.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "hybrid", "opening"),
    [
        ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n", "\n</think>\n\n"),
        ("<think></think>The", "<think>\n\n</think>\n\nThe", "\n</think>\n\nThe"),
        ("<think>\nTwo.\n</think>\n\n", "<think>\nTwo.\n</think>\n\n", "Two.\n</think>\n\n"),
        ("<think>\nLet me", "<think>\nLet me", "Let me"),
        ("<think>", "<think>\n", ""),
    ],
)
def test_a_continued_message_may_contain_its_reasoning_in_tags(content, hybrid, opening):
    """Clients begin answers with an empty reasoning, so that the model does not reason."""
    for template, written in ((HYBRID, hybrid), (THINKING, opening)):
        with load(template) as model:
            plan = model.plan_chat(prefill(content))
        assert plan.prompt.text.endswith("[assistant]" + ("<think>" if template is THINKING else "") + written)
        is_closed = "</think>" in content
        assert parse(plan, "Bern") == (ParsedOutput(text="Bern") if is_closed else ParsedOutput(reasoning="Bern"))


def test_reasoning_without_its_start_tag_is_reasoning_if_the_template_writes_the_tag():
    """Servers without a parser for reasoning return the text after the start tag, and their clients send it back."""
    text = "Two and two.\n</think>\n\nFour"
    question = [("user", "2+2?"), ("assistant", text), ("user", "And?")]
    opens = THINKING.replace("{{ m.content }}", "{{ m.content }}{% if m.reasoning_content %}<hidden>{% endif %}")
    with load(opens) as model:
        assert "[assistant]Four<hidden>[user]And?" in model.plan_chat(question).prompt.text
        mention = model.plan_chat([("user", "?"), ("assistant", "It ends with </think>."), ("user", "And?")])
    with load(HYBRID) as model:
        assert text in model.plan_chat(question).prompt.text
    assert "<hidden>" in mention.prompt.text  # as the templates of these models read it


def test_continued_reasoning_needs_a_prompt_with_reasoning():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}" + (
        "[assistant]{{ '<think>\\n' if enable_thinking else '</think>' }}"
    )
    with load(template) as model:
        texts = [
            model.plan_chat(prefill("", reasoning_content="They ask"), reasoning=reasoning).prompt.text
            for reasoning in (None, True)
        ]
        answer = model.plan_chat(prefill("In ")).prompt.text
    assert texts == ["[user]Where?\n[assistant]<think>\nThey ask"] * 2
    assert answer == "[user]Where?\n[assistant]</think>In "


def test_a_continued_message_is_the_beginning_of_the_response_format():
    with load(None) as model:
        response = model.chat(prefill('{"city": "Ro'), response_format=RESPONSE_FORMAT, max_tokens=50)
        assert response.text.startswith("me")
        assert response.parsed == {"city": "Rome"}
        with pytest.raises(InvalidGrammar, match="begins with"):
            model.chat(prefill("The city"), response_format=RESPONSE_FORMAT, max_tokens=50)


def test_a_continued_message_can_end_with_a_call():
    with load(None) as model:
        options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
        response = model.chat(prefill("Let me see. "), **options)
    assert response.text == ""
    assert {call.name for call in response.tool_calls} == {"weather"}


def test_a_continued_answer_of_harmony_begins_with_any_text():
    with load(HARMONY) as model:
        plan = model.plan_chat(prefill("You are a helpful"))
    assert parse(plan, " assistant to=all") == ParsedOutput(text=" assistant to=all")


def test_complete_tool_calls_are_not_continued():
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    with load(None) as model:
        text = model.apply_chat_template([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]).text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


# --- tools of a template that renders calls but not the tools

DEEPSEEK = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}<｜tool▁call▁begin｜>"  # noqa: RUF001
    "{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}{% endfor %}"  # noqa: RUF001
)


def test_the_format_of_calls_is_described_if_the_template_does_not_render_tools():
    with load(DEEPSEEK) as model:
        plan = model.plan_chat("Where?", tools=[WEATHER])
    assert plan.prompt.text.startswith("[system]You can call these tools.")
    assert '"name": "weather"' in plan.prompt.text
    assert "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>the tool's name<｜tool▁sep｜>" in plan.prompt.text  # noqa: RUF001
    (call,) = parse(plan, '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bern"}<｜tool▁call▁end｜>').tool_calls  # noqa: RUF001
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')


def find_town(name: str) -> str:
    """Find a town."""
    return name


FUNCTIONARY = "{{ tools | tojson }}>>>${recipient} >>>all{% for m in messages %}{{ m.content }}{% endfor %}>>>"


def test_calls_of_functionary_are_constrained_at_the_start_and_after_text():
    with load(FUNCTIONARY) as model:
        constraint = model.plan_chat("Where?", tools=[find_town]).constraint
        matcher = GrammarCompiler(model.vocabulary).compile(constraint)
        for text in ("find_town\n", "all\nIn >>> print(1)\n>>>find_town\n"):
            matcher = GrammarCompiler(model.vocabulary).compile(constraint)
            for token in model.tokenize(text):
                assert matcher.get_allowed_tokens() is None
                matcher.accept(token)
            allowed = {model.vocabulary.token_to_piece(int(token))[:1] for token in matcher.get_allowed_tokens()}
            assert allowed <= {b"{", b" ", b"\n", b"\t"}
        with script_answers(model, ["all\nLet me see.\n>>>find_town\n" + '{"name": "Bern"}']):
            response = model.chat("Where?", tools=[find_town])
    assert response.text == "Let me see."
    assert response.tool_calls[0].arguments == '{"name": "Bern"}'


def test_the_recipient_of_functionary_is_not_part_of_the_text_without_tools():
    with load(FUNCTIONARY) as model:
        assert parse(model.plan_chat("Where?"), "all\nIn Bern.").text == "In Bern."
        response = model.chat("Where?", response_format=RESPONSE_FORMAT, max_tokens=100)
    assert response.parsed == json.loads(response.text)


# A tool is rendered before the system prompt, as by Llama; a system prompt before the tools is the other common order.
TOOL_TEMPLATES = {
    "tools first": (
        "{% if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <tool_call> #}"
    ),
    "system first": (
        "<|im_start|>system\n{{ messages[0].content }}"
        "{% if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>{% endif %}<|im_end|>\n"
        "{% for m in messages[1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <tool_call> #}"
    ),
}


@pytest.mark.parametrize("template", TOOL_TEMPLATES)
def test_a_breakpoint_is_where_a_prompt_diverges_if_what_follows_changes(template):
    other_tool = {"type": "function", "function": {"name": "maps", "parameters": SCHEMA}}
    messages = [("system", "Be brief."), ("user", "one two"), ("assistant", "three"), ("user", "four")]
    breakpoints = [
        Breakpoint(tools=1),
        Breakpoint(tools=2),
        Breakpoint(message=0),
        Breakpoint(message=1, offset=3, retention_seconds=300.0),
        Breakpoint(message=3),
    ]
    with load(TOOL_TEMPLATES[template]) as model:
        prompt = model.plan_chat(messages, tools=[WEATHER, other_tool], breakpoints=breakpoints).prompt
        texts = [
            model.detokenize(prompt.entries[: breakpoint.length], special=True) for breakpoint in prompt.breakpoints
        ]
        request = model.build_request(prompt)
    assert texts[0].endswith('"required": ["city"], "additionalProperties": false}}}')
    assert "maps" not in texts[0]
    assert texts[1].count("additionalProperties") == 2
    assert texts[1].endswith("}}}")
    assert texts[2].endswith("<|im_start|>user\n")
    assert texts[3].endswith("<|im_start|>user\none")
    assert texts[4].endswith("four<|im_end|>\n")
    assert request.boundaries == {breakpoint.length for breakpoint in prompt.breakpoints}
    assert request.retained == ((prompt.breakpoints[3].length, 300.0),)


def test_breakpoints_are_found_around_media():
    messages = [Message(role="user", content="abcd", attachments=(picture(2), picture(2), picture(4)))]
    placeholders = MediaPlaceholders("\ue000", ((), (), ()))
    moved = [
        move_breakpoint(Breakpoint(message=0, offset=offset, attachments=count), messages, placeholders).offset
        for offset, count in ((2, 0), (2, 1), (2, 2), (4, 2), (4, 3))
    ]
    content = "ab\ue0000\ue000\ue0001\ue000cd\ue0002\ue000"
    assert [content[:offset] for offset in moved] == [
        "ab",
        "ab\ue0000\ue000",
        "ab\ue0000\ue000\ue0001\ue000",
        "ab\ue0000\ue000\ue0001\ue000cd",
        content,
    ]


def picture(offset: int) -> Attachment:
    return Attachment(kind="image", source="cat.png", offset=offset)


def test_variables_of_the_template_do_not_replace_the_messages():
    with (
        load(None) as model,
        pytest.raises(InvalidArgument, match="`chat_template_kwargs` must not contain `messages`"),
    ):
        model.chat("hi", chat_template_kwargs={"messages": []})
