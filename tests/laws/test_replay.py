"""Laws of replay, over all tool families and all published templates.

After a client's round trip the next prompt has exactly the sampled tokens. After any change of a message it is the
rendered prompt, token for token.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from afterglow.chat import replay as replay_module
from afterglow.chat.chat import Chat, ChatOptions, ChatPlan
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.output.parts import OutputPart, join_parts
from afterglow.chat.prompt import ReplayMiss
from afterglow.chat.replay import Replayer, ReplayStore
from afterglow.chat.tools.detection import TOOL_FAMILIES, detect_family
from afterglow.chat.tools.tool import Tool
from afterglow.engine.types.request import Finished, Usage
from afterglow.errors import InvalidTemplate
from support import fetched
from support.template_vocabulary import TemplateVocabulary
from support.tool_outputs import RECORDED_OUTPUTS
from support.tool_records import TOOLS

pytestmark = pytest.mark.native

SYSTEM = Message(role="system", content="Be brief.")
QUESTION = Message(role="user", content="How are you?")
CASES = ("one call", "several calls", "text before", "only text", "on one line", "answer", "prose", "nested", "unicode")
CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ '<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '' }}{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if tools %}{{ tools | length }}{% endif -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

# Templates of the families that have no published one.
TURNS = """{%- if tools %}{{ tools | length }}{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}CALLS<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
PYTHON_CALL = (
    "{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
)
OWN_TEMPLATES = {
    "function-gemma": TURNS.replace(
        "CALLS",
        "{% for call in message.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}{{ '{' }}"
        "{%- for key, value in call.function.arguments.items() %}{{ key }}:"
        "{{ '<escape>' + value + '<escape>' if value is string else value | tojson }}{{ ',' if not loop.last }}"
        "{%- endfor %}{{ '}' }}<end_function_call>{% endfor %}",
    ),
    "pythonic": "{#- [func_name1(params_name1=params_value1)] -#}"
    + TURNS.replace(
        "CALLS",
        f"{{% if message.tool_calls %}}[{{% for call in message.tool_calls %}}{PYTHON_CALL}"
        "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
    ),
    "tool-code": TURNS.replace(
        "CALLS",
        "{% if message.tool_calls %}```tool_code\n{% for call in message.tool_calls %}"
        f"{PYTHON_CALL}\n{{% endfor %}}```{{% endif %}}",
    ),
}
# Templates that never render an answer as the model generated it, and why.
CHANGING_TEMPLATES = {
    "Apriel-1.6-15b-Thinker-fixed": "drops reasoning",
    "CohereForAI-c4ai-command-r-plus-tool_use": "writes instructions after the last message",
    "IFM-K2-Horizon": "writes reasoning tags of its own",
    "NVIDIA-Nemotron-Nano-v2": "drops reasoning",
    "Qwen-QwQ-32B": "drops reasoning",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "drops reasoning",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "drops reasoning",
    "deepseek-ai-DeepSeek-V3.2": "drops the open reasoning tag",
    "google-gemma-4-31B-it": "drops the empty reasoning before an answer",
    "google-gemma-4-31B-it-interleaved": "drops the empty reasoning before an answer",
    "google-translategemma-4b-it": "accepts no plain messages",
    "llama-cpp-deepseek-r1": "drops reasoning",
    "mistralai-Mistral-Nemo-Instruct-2407": "moves the system message to the last question",
    "muse-glimmer": "writes a recipient before the answer",
}
# Further answers that a template changes: it drops or moves the text beside calls, or reasoning that an answer follows.
CHANGED_CASES = {
    ("GLM-4.7-Flash", "prose"),
    ("LFM2-8B-A1B", "several calls"),
    ("LFM2.5-8B-A1B", "several calls"),
    ("LFM2.5-Instruct", "several calls"),
    ("MiniMax-M2", "prose"),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "prose"),
    ("Qwen3.5-4B", "prose"),
    ("StepFun3.5-Flash", "prose"),
    ("llm-jp-llm-jp-4.1-8b-thinking", "answer"),
    ("llm-jp-llm-jp-4.1-8b-thinking", "one call"),
    ("openai-gpt-oss-120b", "answer"),
    ("openai-gpt-oss-120b", "several calls"),
    *((f"NousResearch-Hermes-{name}-tool_use", "text before") for name in ("2-Pro-Llama-3-8B", "3-Llama-3.1-8B")),
    *((f"meta-llama-Llama-{name}-Instruct", "text before") for name in ("3.1-8B", "3.2-3B", "3.3-70B")),
}


@dataclass(frozen=True)
class Answer:
    """A generated answer: the plan of its prompt, its tokens without the end token, and the message of the client."""

    plan: ChatPlan
    tokens: tuple[int, ...]
    message: Message


class Conversation:
    """Plays a server and its client without a model: the output texts are given."""

    def __init__(self, template: str, store: ReplayStore) -> None:
        self.vocabulary = TemplateVocabulary(template)
        self.chat = Chat(self.vocabulary, template, replay_store=store, boundaries=False)  # type: ignore[arg-type]

    def plan(self, messages: Sequence[Message], **options: Any) -> ChatPlan:
        return self.chat.plan(messages, ChatOptions(**{"tools": TOOLS, **options}))

    def generate(
        self, messages: Sequence[Message], output: str, *, finish: str = "stop", ends: bool = True, **options: Any
    ) -> Answer:
        """Play one answer. `ends`: whether the model generates its end token."""
        plan = self.plan(messages, **options)
        if plan.starts_in == "reasoning":
            assert self.chat.reasoning_format is not None
            output = f"Hm.{self.chat.reasoning_format.forced_ending}{output}"
        tokens = self.vocabulary.tokenize_output(output, self.chat._visible_control_tokens)
        parser, parts = plan.create_parser(), list[OutputPart]()
        for token in tokens:
            parts += parser.feed(self.chat.piece(token).decode())
        parts += parser.finish(truncated=finish != "stop")
        record = plan.output_format.record
        assert record is not None
        end = [self.vocabulary.end_token] if finish == "stop" and ends else []
        record([*tokens, *end], parts, Finished("1", finish, Usage()))  # type: ignore[arg-type]
        joined = join_parts(parts)
        message = Message(
            role="assistant",
            content=joined.text,
            reasoning=joined.reasoning or None,
            tool_calls=tuple(replace(call, arguments=reserialize(call.arguments)) for call in joined.tool_calls),
        )
        return Answer(plan, tuple(tokens), message)

    def close(self) -> None:
        self.chat.close()


def reserialize(arguments: str) -> str:
    """Parse and write arguments as a client does, with the keys in another order."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return json.dumps(dict(reversed(value.items())), separators=(",", ":")) if isinstance(value, dict) else arguments


def continue_after(answer: Answer) -> list[Message]:
    """Return the messages that follow an answer: tool results, or the next question."""
    calls = answer.message.tool_calls
    results = [Message(role="tool", tool_call_id=call.id, name=call.name, content="ok") for call in calls]
    return results or [Message(role="user", content="Go on.")]


@contextlib.contextmanager
def open_conversation(template: str) -> Iterator[Conversation]:
    with contextlib.closing(Conversation(template, ReplayStore("model"))) as conversation:
        yield conversation


def list_outputs(family: str) -> list[tuple[str, str]]:
    outputs = [(record.case, record.raw) for record in RECORDED_OUTPUTS if record.family == family]
    return [(case, raw) for case, raw in outputs if case in CASES]


def read_template(name: str) -> str:
    return OWN_TEMPLATES.get(name) or fetched.fetch_chat_templates()[name].read_text(encoding="utf-8")


def play(name: str) -> Iterator[tuple[str, Conversation, list[Message], Answer]]:
    """Yield the answers of a template, each in a conversation of its own."""
    with open_conversation(read_template(name)) as conversation:
        for number, (case, output) in enumerate(list_outputs(conversation.chat.tool_family.name)):
            messages = [SYSTEM, replace(QUESTION, content=f"Question {number}?")]
            try:
                yield case, conversation, messages, conversation.generate(messages, output)
            except InvalidTemplate:
                continue


TEMPLATE_NAMES = [*sorted(fetched.fetch_chat_templates()), *OWN_TEMPLATES]


def test_every_tool_family_has_a_template() -> None:
    assert {detect_family(read_template(name)).name for name in TEMPLATE_NAMES} == set(TOOL_FAMILIES)


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_the_prompt_after_a_round_trip_has_the_sampled_tokens(name: str) -> None:
    changes, replays = set(), 0
    for case, conversation, messages, answer in play(name):
        history = [*messages, answer.message, *continue_after(answer)]
        try:
            plan = conversation.plan(history)
        except InvalidTemplate:
            continue
        expected = (*answer.plan.prompt.tokens, *answer.tokens)
        if plan.prompt.tokens[: len(expected)] == expected:
            assert plan.prompt.replay.replayed_tokens == len(answer.tokens)
            replays += 1
        else:
            assert plan.prompt.tokens == conversation.plan(history, replay=False).prompt.tokens
            changes.add((name, case))
    if name in CHANGING_TEMPLATES:
        assert not replays
    else:
        assert replays
        assert changes == {(template, case) for template, case in CHANGED_CASES if template == name}


def change_arguments(call: ToolCall) -> ToolCall:
    return replace(call, arguments=json.dumps({**json.loads(call.arguments), "city": "Rome"}))


MUTATIONS: dict[str, tuple[Callable[[Message], Message], ReplayMiss]] = {
    "an argument": (
        lambda message: replace(message, tool_calls=tuple(map(change_arguments, message.tool_calls))),
        "arguments changed",
    ),
    "a name": (
        lambda message: replace(
            message, tool_calls=tuple(replace(call, name=f"{call.name}2") for call in message.tool_calls)
        ),
        "arguments changed",
    ),
    "the order of calls": (
        lambda message: replace(message, tool_calls=message.tool_calls[::-1]),
        "arguments changed",
    ),
    "one call less": (lambda message: replace(message, tool_calls=message.tool_calls[1:]), "arguments changed"),
    "text": (lambda message: replace(message, content=f"{message.content}!"), "message edited"),
    "white space": (lambda message: replace(message, content=f"{message.content} "), "message edited"),
    "reasoning": (lambda message: replace(message, reasoning=f"{message.reasoning}!"), "reasoning changed"),
    "no reasoning": (lambda message: replace(message, reasoning=None), "reasoning changed"),
}


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_the_prompt_after_a_change_is_the_rendered_one(name: str) -> None:
    for case, conversation, messages, answer in play(name):
        for mutation, (mutate, reason) in MUTATIONS.items():
            changed = mutate(answer.message)
            if changed == answer.message or (mutation == "white space" and not answer.message.content.strip()):
                continue
            history = [*messages, changed, *continue_after(replace(answer, message=changed))]
            try:
                plan, rendered = conversation.plan(history), conversation.plan(history, replay=False)
            except InvalidTemplate:
                continue
            assert plan.prompt.tokens == rendered.prompt.tokens, (case, mutation)
            assert plan.prompt.replay.misses[2] in (reason, "not generated here"), (case, mutation)


# --- a template that keeps everything


CALL = '<tool_call>{"name": "get_weather", "arguments": {"days": 2, "city": "Rome"}}</tool_call>'
CALLS = f'{CALL}<tool_call>{{"name": "now"}}</tool_call>'
OUTPUT = f"<think>I look.</think>Wait.{CALL}"


def test_every_turn_of_a_long_conversation_is_replayed() -> None:
    with open_conversation(CHATML) as conversation:
        messages, expected = [SYSTEM, QUESTION], 0
        for turn in range(6):
            answer = conversation.generate(messages, OUTPUT if turn % 2 else f"Answer {turn}.")
            assert answer.plan.prompt.replay.replayed_tokens == expected
            assert not answer.plan.prompt.replay.misses
            messages = [*messages, answer.message, *continue_after(answer)]
            expected += len(answer.tokens)


def test_a_changed_message_ends_the_replay_of_the_messages_after_it() -> None:
    with open_conversation(CHATML) as conversation:
        first = conversation.generate([QUESTION], "One.")
        messages = [QUESTION, first.message, *continue_after(first)]
        second = conversation.generate(messages, "Two.")
        history = [QUESTION, replace(first.message, content="Eins."), *messages[2:], second.message, QUESTION]
        plan = conversation.plan(history)
        assert plan.prompt.tokens == conversation.plan(history, replay=False).prompt.tokens
        assert plan.prompt.replay.misses == {1: "message edited", 3: "not generated here"}


@pytest.mark.parametrize("ids", [("", ""), ("x", "y")], ids=["dropped", "rewritten"])
def test_calls_are_matched_by_their_meaning_if_the_client_changes_their_ids(ids: tuple[str, str]) -> None:
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate([QUESTION], CALLS)
        calls = tuple(replace(call, id=id) for call, id in zip(answer.message.tool_calls, ids, strict=True))
        message = replace(answer.message, tool_calls=calls)
        plan = conversation.plan([QUESTION, message, *continue_after(replace(answer, message=message))])
        assert plan.prompt.replay.replayed_tokens == len(answer.tokens)


@pytest.mark.parametrize(("added", "replayed"), [(False, True), (True, False), (0, False)])
def test_an_argument_that_the_client_adds_is_no_change_if_it_is_the_default(added: object, replayed: bool) -> None:
    properties = {"file": {"type": "string"}, "all": {"type": "boolean", "default": False}}
    tool = Tool(name="edit", parameters={"type": "object", "properties": properties, "required": ["file"]})
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate(
            [QUESTION], '<tool_call>{"name": "edit", "arguments": {"file":"a"}}</tool_call>', tools=[tool]
        )
        calls = [replace(call, arguments=json.dumps({"file": "a", "all": added})) for call in answer.message.tool_calls]
        history = [QUESTION, replace(answer.message, tool_calls=tuple(calls)), *continue_after(answer)]
        plan = conversation.plan(history, tools=[tool])
        assert plan.prompt.replay.replayed_tokens == (len(answer.tokens) if replayed else 0)
        if not replayed:
            assert plan.prompt.tokens == conversation.plan(history, tools=[tool], replay=False).prompt.tokens


def test_call_ids_tell_answers_with_the_same_meaning_apart() -> None:
    with open_conversation(CHATML) as conversation:
        answers = [conversation.generate([QUESTION], output) for output in (OUTPUT, OUTPUT.replace(": ", ":"))]
        for answer in answers:
            plan = conversation.plan([QUESTION, answer.message, *continue_after(answer)])
            start = len(answer.plan.prompt.tokens)
            assert plan.prompt.tokens[start : start + len(answer.tokens)] == answer.tokens


def test_tenants_never_share_replays() -> None:
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate([QUESTION], OUTPUT, salt="one")
        history = [QUESTION, answer.message, *continue_after(answer)]
        rendered = conversation.plan(history, replay=False).prompt.tokens
        assert conversation.plan(history, salt="one").prompt.tokens != rendered
        assert conversation.plan(history, salt="two").prompt.tokens == rendered
        assert conversation.plan(history).prompt.tokens == rendered


@pytest.mark.parametrize(
    ("output", "finish"),
    [("<think>I loo", "length"), ('<tool_call>{"name": "get_weather", "argu', "length")],
    ids=["reasoning", "a call"],
)
def test_an_answer_that_ends_inside_a_part_is_not_replayed(output: str, finish: str) -> None:
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate([QUESTION], output, finish=finish)
        history = [QUESTION, answer.message, Message(role="user", content="Go on.")]
        assert conversation.plan(history).prompt.replay.replayed_tokens == 0


def test_an_answer_that_ends_at_the_token_limit_inside_text_is_replayed() -> None:
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate([QUESTION], "A long answer that e", finish="length")
        plan = conversation.plan([QUESTION, answer.message, QUESTION])
        assert plan.prompt.replay.replayed_tokens == len(answer.tokens)


def test_a_call_that_a_grammar_ends_without_an_end_token_is_replayed() -> None:
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate([QUESTION], OUTPUT, ends=False)
        plan = conversation.plan([QUESTION, answer.message, *continue_after(answer)])
        assert plan.prompt.replay.replayed_tokens == len(answer.tokens)


def test_text_of_another_place_is_not_replayed() -> None:
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate([QUESTION], "Fine.")
        plan = conversation.plan([SYSTEM, QUESTION, answer.message, QUESTION])
        assert plan.prompt.replay.replayed_tokens == 0
        assert plan.prompt.replay.misses == {2: "not generated here"}


def test_text_that_looks_like_a_call_is_not_replayed_as_one() -> None:
    with open_conversation(CHATML) as conversation:
        answer = conversation.generate([QUESTION], CALLS)
        history = [QUESTION, Message(role="assistant", content=CALLS), QUESTION]
        assert conversation.plan(history).prompt.tokens == conversation.plan(history, replay=False).prompt.tokens
        assert answer.message.tool_calls


# --- mutants: each law fails if the code is wrong


def accept_everything(self: Replayer, generated: object) -> None:
    return None


def test_the_laws_see_a_changed_message_that_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "_compare", accept_everything)
    monkeypatch.setattr(Replayer, "_has_same_parts", lambda *arguments: True)
    with pytest.raises(AssertionError):
        test_the_prompt_after_a_change_is_the_rendered_one("Qwen-Qwen2.5-7B-Instruct")
    with pytest.raises(AssertionError):
        test_a_changed_message_ends_the_replay_of_the_messages_after_it()


def test_the_laws_see_reasoning_that_the_template_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "_has_same_parts", lambda *arguments: True)
    with pytest.raises(AssertionError):
        test_the_prompt_after_a_round_trip_has_the_sampled_tokens("openai-gpt-oss-120b")


def test_the_laws_see_an_equal_message_that_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "describe_call", lambda call: call.arguments)
    with pytest.raises(AssertionError):
        test_the_prompt_after_a_round_trip_has_the_sampled_tokens("Qwen-Qwen2.5-7B-Instruct")


def test_the_laws_see_tenants_that_share_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayStore, "get_root", lambda self, salt: b"")
    with pytest.raises(AssertionError):
        test_tenants_never_share_replays()
