"""Volatile spans of system prompts: what is recognised, and that the rest is a prefix hit."""

from __future__ import annotations

import time
from typing import Any

import pytest

from afterglow.chat.messages import Message
from afterglow.server.volatile import RULES, move_volatile_spans
from support.server_process import ServerProcess

BILLING = "x-anthropic-billing-header: cc_version=2.1.42.a1b; cc_entrypoint=cli; cch=0{};"
GIT_STATUS = (
    "gitStatus: A snapshot.\nCurrent branch: main\n\nStatus:\n M a.py\n\nRecent commits:\n1a2b3c4 Add {}\n5d6e7f8 Fix\n"
)


def move(content: str) -> tuple[str, dict[str, int]]:
    system = Message(role="system", content=content)
    messages, _, hits = move_volatile_spans([system, Message(role="user", content="Hi")])
    assert messages[1].content == "Hi"
    return messages[0].content, dict(hits)


@pytest.mark.parametrize("separator", ["\n", "\n\n", ""])
def test_a_billing_line_is_dropped_and_the_prompt_stays(separator: str) -> None:
    expected = ("You are an agent. x=1; y=2", {"billing_header": 1})
    assert move(f"{BILLING.format('1')}{separator}{expected[0]}") == expected
    assert move(f"cch=12ab;{separator}{expected[0]}") == expected


@pytest.mark.parametrize(
    "line",
    [
        "Today's date: 2026-11-17",
        "Today's date is Tuesday, November 17, 2026.",
        "  - Current date: 2026-11-17T09:00:00",
        "The current date and time is 17 Nov 2026 09:00",
        "Current time: 9:00",
    ],
)
def test_a_line_with_a_date_moves_to_the_end(line: str) -> None:
    assert move(f"<env>\nPlatform: linux\n{line}\n</env>\nBe brief.") == (
        f"<env>\nPlatform: linux\n</env>\nBe brief.\n\n{line}",
        {"date": 1},
    )


@pytest.mark.parametrize(
    "block",
    [
        GIT_STATUS.format("x"),
        "Git status:\n M a.py\n?? b.py\n",
        "<git_status>\nM a.py\n</git_status>\n",
    ],
)
def test_a_git_status_moves_to_the_end(block: str) -> None:
    assert move(f"Before.\n{block}After.") == (f"Before.\nAfter.\n\n{block.strip()}", {"git_status": 1})


@pytest.mark.parametrize(
    "content",
    [
        "Say today's date is unknown if asked.",
        "If the user asks for the current date: look it up.",
        "Run git status: it shows changes.",
        "a=1; b=2;\nBe brief.",
        "Be brief.\nx-anthropic-billing-header: cch=1;",
        "",
    ],
)
def test_other_text_is_not_changed(content: str) -> None:
    assert move(content) == (content, {})


def test_spans_move_behind_all_system_messages_and_text_of_users_never_changes() -> None:
    date = "Today's date: 2026-11-17"
    system = [Message(role="system", content=f"{date}\nOne."), Message(role="system", content="Two.")]
    rest = [Message(role="user", content=date), Message(role="system", content=date)]
    messages, _, hits = move_volatile_spans([*system, *rest])
    assert [message.content for message in messages] == ["One.", f"Two.\n\n{date}", date, date]
    assert hits == {"date": 1}


def test_many_tags_without_an_end_take_linear_time() -> None:
    content = "<git_status>\n" * 30_000  # it took a minute when each tag was searched for its end in all the others
    started = time.process_time()
    assert not move_volatile_spans([Message(role="system", content=content)]).hits
    assert time.process_time() - started < 5


def test_moving_twice_changes_nothing_more() -> None:
    once, _ = move(f"Today's date: 2026-11-17\nBefore.\n{GIT_STATUS.format('x')}After.")
    assert move(once)[0] == once


@pytest.mark.native
@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_prompts_that_differ_in_a_volatile_span_share_everything_before_it(server: ServerProcess, rule: str) -> None:
    spans = {"billing_header": BILLING + "\n", "date": "Today's date: 2026-11-1{}\n", "git_status": GIT_STATUS}
    rest = f"These are the rules of an agent about {rule}. " * 8

    rest_tokens = len(server.post("/tokenize", {"model": "tiny", "content": rest}).json()["tokens"])

    def send(number: int) -> dict[str, Any]:
        messages = [{"role": "system", "content": spans[rule].format(number) + rest}, {"role": "user", "content": "a"}]
        return dict(server.chat(messages=messages, max_tokens=1)["usage"])

    metric = f'afterglow_volatile_spans_total{{rule="{rule}"}}'
    before = server.get_metric(metric)
    send(1)
    usage = send(2)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= rest_tokens
    assert server.get_metric(metric) == before + 2
    messages = [{"role": "system", "content": spans[rule].format(3) + rest}, {"role": "user", "content": "a"}]
    explained = server.post("/cache/explain", {"model": "tiny", "messages": messages}).json()
    assert explained["reused_tokens"] >= rest_tokens
