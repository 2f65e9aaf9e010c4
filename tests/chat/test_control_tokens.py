"""Client text never becomes a control token, wherever a template writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.chat.control_tokens import ControlTokenEscaper
from afterglow.chat.messages import Message, parse_messages
from afterglow.chat.multimodal import find_unused_character
from afterglow.chat.prompt import PromptBuilder
from afterglow.chat.template.renderer import ChatTemplate
from afterglow.errors import InvalidTemplate
from support import fetched
from support.conversations import CONVERSATIONS, SPECIAL_TOKENS, TEMPLATE_KWARGS
from support.template_vocabulary import TemplateVocabulary

SEPARATOR = "\ue000"
TEMPLATE_NAMES = list(json.loads((Path(__file__).parents[1] / "data" / "templates.json").read_text())["templates"])
TOKENS = ("<|end|>", "<|im_start|>", "<|im_end|>", "</s>", "<s>", "[INST]", "]~b]", "<tool_call>")
ESCAPER = ControlTokenEscaper(TOKENS, "{{ message.role | upper }}{{ '<|' + message['role'] + '|>' }}")
pieces = st.lists(st.sampled_from([*TOKENS, *"<|>s/[]~b", "end", "im", "_", "user", " ", "\n", "x"]), max_size=6)


SURROUNDINGS = [
    (token[:end], token[start:])
    for token in TOKENS
    for end in range(len(token))
    for start in range(end, len(token) + 1)
]


def contains_token(text: str) -> bool:
    return any(token in text for token in TOKENS)


@given(st.text() | pieces.map("".join), st.sampled_from(SURROUNDINGS))
def test_escaped_text_is_no_control_token_beside_any_other_text(text, around):
    before, after = around
    escaped = ESCAPER.escape(text.replace(SEPARATOR, ""), SEPARATOR)
    assert escaped.replace(SEPARATOR, "") == text.replace(SEPARATOR, "")
    for candidate in (escaped, escaped.strip(), escaped.upper(), escaped.lower()):
        assert not contains_token(candidate)
        if candidate and not contains_token(before + after):
            assert not contains_token(before + candidate + after)


def test_two_escaped_texts_are_no_control_token_together():
    assert not contains_token("".join(ESCAPER.escape(text, SEPARATOR) for text in ("<|im_", "end|>")))


def test_roles_and_words_of_the_template_are_not_changed():
    """Templates compare values with these words, and form control tokens with them: `'<|' + message.role + '|>'`."""
    escaper = ControlTokenEscaper(["<|user|>", "<|content|>", "<|end|>"], "{% if m.role == 'content' %}{{ m.end }}")
    for word in ("user", "content", "role", "end"):
        assert escaper.escape(word, SEPARATOR) == word
    assert ControlTokenEscaper(["<|end|>"], "{{ m.role }}").escape("end", SEPARATOR) == SEPARATOR + "end"


def test_text_without_control_tokens_is_not_changed():
    text = "For a < b | c > d, write `<b>a</b>`; 'it\\'s' [1] {2} </div>"
    assert ESCAPER.escape(text, SEPARATOR) == text


def build_attacks(control_texts: list[str]) -> list[str]:
    """Build texts that would be control tokens if they were not escaped."""
    whole = "x " + " y ".join([*control_texts, *map(str.upper, control_texts)]) + " z"
    # A template that removes `</think>` from a message joins the text around it.
    divided = " ".join(f"{text[:2]}</think>{text[2:]}" for text in control_texts if text != "</think>")
    return [whole, divided, "<|", "|>", "end", "<", ">", "tool_call"]


def replace_client_text(value: object, text: str) -> object:
    """Replace every text of a conversation that a client chooses; ids stay different."""
    if isinstance(value, list):
        return [replace_client_text(item, text) for item in value]
    if not isinstance(value, dict):
        return value
    replaced: dict[str, object] = {}
    for key, item in value.items():
        if key in ("role", "type") or not item:
            replaced[key] = item
        elif key == "arguments":
            replaced[key] = json.dumps(
                {text: text, "nested": [{text: text}]}
            )  # ASCII: `\u003c` becomes `<` when parsed
        elif isinstance(item, str):
            replaced[key] = item if key in ("id", "tool_call_id") else text
        else:
            replaced[key] = replace_client_text(item, text)
    return replaced


def build_tool(text: str) -> dict[str, object]:
    place = {"type": "string", "description": text, "enum": [text, "b"], "title": text, "default": text}
    nested = {"type": "object", "properties": {text: place}, "required": [text], "description": text}
    parameters = {
        "type": "object",
        "properties": {text: place, "nested": nested, "list": {"type": "array", "items": place}},
        "required": [text],
    }
    return {"type": "function", "function": {"name": text, "description": text, "parameters": parameters}}


@pytest.mark.native
@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_no_client_text_becomes_a_control_token_in_a_published_template(name):
    source = fetched.fetch_chat_templates()[name].read_text(encoding="utf-8")
    vocabulary = TemplateVocabulary(source)
    attacks = build_attacks(list(vocabulary.control_tokens_by_text))
    with ChatTemplate(source, SPECIAL_TOKENS) as template:
        builder = PromptBuilder(vocabulary, template, boundaries=False)

        def find_control_tokens(conversation: str, text: str) -> list[str]:
            messages, uses_tools = CONVERSATIONS[conversation]
            rendered = builder.render(
                parse_messages(replace_client_text(messages, text)),
                tools=[build_tool(text)] if uses_tools else (),
                chat_template_kwargs={**TEMPLATE_KWARGS, "date_string": text, "datetime": text, "functions": text},
            )
            return vocabulary.get_control_tokens(builder.build(rendered).tokens)

        for conversation in ("several turns", "two calls and then a turn", "reasoning before a call"):
            try:
                expected = find_control_tokens(conversation, "harmless")
            except InvalidTemplate:
                continue
            for attack in attacks:
                assert find_control_tokens(conversation, attack) == expected, attack


def test_the_stand_in_vocabulary_finds_the_control_tokens_of_a_template():
    texts = "<|im_end|> <｜User｜> <|turn> <turn|> <tool_call> </think> [INST] ]~b] [e~[ ]~!b[ ]<]minimax[>["  # noqa: RUF001
    assert set(TemplateVocabulary(texts).control_tokens_by_text) >= set(texts.split())


@pytest.mark.parametrize("expression", ["tool | string", "tool | tojson", "tool | tojson(ensure_ascii=True)"])
def test_separators_that_a_template_spells_are_not_in_the_prompt(expression):
    source = f"{{% for tool in tools %}}{{{{ {expression} }}}}{{% endfor %}}<|im_end|>"
    vocabulary = TemplateVocabulary(source)
    tool = build_tool("end")
    with ChatTemplate(source, SPECIAL_TOKENS) as template:
        builder = PromptBuilder(vocabulary, template, boundaries=False)
        rendered = builder.render(parse_messages([("user", "x")]), tools=[tool])
        prompt = builder.build(rendered)
    plain = vocabulary.tokenize(prompt.text.removesuffix("<|im_end|>"))
    assert ControlTokenEscaper(vocabulary.control_tokens_by_text, source).escape("end", SEPARATOR) != "end"
    assert "ue000" not in prompt.text
    assert list(prompt.tokens)[: len(plain)] == plain


SORTED_NAMES = "{% for name, value in tools[0].p | dictsort %}{{ name }} {% endfor %}<|im_end|>"
SORTED_LIST = "{{ tools[0].p | list | sort | join(' ') }} <|im_end|>"
LOOKUP = "{{ tools[0].p[tools[0].ref.split('/')[-1]] }} {{ 'im' in tools[0].p }} {{ tools[0].p.get('im') }}<|im_end|>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SORTED_NAMES, "Ab im zoo <|im_end|>"),
        (SORTED_LIST, "Ab im zoo <|im_end|>"),
        (LOOKUP, "2 True 2<|im_end|>"),
    ],
)
def test_escaped_names_keep_their_order_and_are_found(source, expected):
    escaper = ControlTokenEscaper(TemplateVocabulary(source).control_tokens_by_text, "")
    assert escaper.escape("im", SEPARATOR) != "im"
    with ChatTemplate(source.replace("'im'", "'i' + 'm'"), SPECIAL_TOKENS) as template:
        builder = PromptBuilder(TemplateVocabulary(source), template, boundaries=False)
        rendered = builder.render(
            parse_messages([("user", "x")]), tools=[{"p": {"zoo": 1, "im": 2, "Ab": 3}, "ref": "#/$defs/im"}]
        )
        prompt = builder.build(rendered)
    assert prompt.text == expected


def test_a_continued_message_keeps_private_use_characters():
    source = "{{ messages[0].content }}<|im_end|>"
    with ChatTemplate(source, SPECIAL_TOKENS) as template:
        builder = PromptBuilder(TemplateVocabulary(source), template, boundaries=False)
        rendered = builder.render(
            parse_messages([("user", "x")]),
            prefill=Message(role="assistant", content="a\ue000b"),
            continuation=lambda text, escape: escape("a\ue000b"),
        )
        prompt = builder.build(rendered)
    assert prompt.text == "x<|im_end|>a\ue000b"


def test_a_separator_that_the_client_spells_is_not_used():
    assert find_unused_character([], "a", {"b": ["\\ue000"]}) == "\ue001"
    assert find_unused_character([], "\ue000") == "\ue001"


def test_a_control_token_of_one_character_does_not_hang_the_escaping():
    assert ControlTokenEscaper(["~", "<|a|>"], "").escape("a ~ <|a|>", SEPARATOR).replace(SEPARATOR, "") == "a ~ <|a|>"
