"""Models that play a script: the answers follow the tool results, with real sampling, grammars and prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

import afterglow
from afterglow import Conversation
from afterglow.errors import InvalidArgument
from afterglow.testing.models.scripted import write_scripted_model
from afterglow.testing.script import write_call

pytestmark = pytest.mark.native


def read(path: str) -> str:
    """Read a file."""
    return f'The sky in {path} is "blue".'


def edit(path: str, old: str, new: str = "") -> str:
    """Edit a file."""
    return "Done."


SCRIPT = [
    "I will read it. " + write_call("read", path='/tmp/a "b".txt'),
    write_call("edit", path="/tmp/a", old='blue "\\n', new="grün") + "\n" + write_call("read", path="/tmp/b"),
    "The sky is green.",
]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_the_answers_follow_the_tool_results(tmp_path: Path, temperature: float) -> None:
    write_scripted_model(tmp_path / "agent.gguf", [SCRIPT[0], SCRIPT[1], "Unused.", SCRIPT[2]])
    with afterglow.load(tmp_path / "agent.gguf", context=4096) as model:
        conversation = Conversation(model, tools=[read, edit])
        assert conversation.ask("Make the sky green.", temperature=temperature).text == SCRIPT[2]
        roles = [message.role for message in conversation.messages]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
        assert [call.name for call in conversation.messages[3].tool_calls] == ["edit", "read"]
        usage = conversation.last_response.usage
        assert usage.replayed_tokens > 0
        assert not usage.replay_misses
        assert usage.cached_tokens > 300  # all but the last tool results
        assert model.chat("Name this conversation.").text == "Done."


def test_long_prompts_of_any_text_have_fewer_tokens_than_half_of_their_characters(tmp_path: Path) -> None:
    write_scripted_model(tmp_path / "agent.gguf", ["Yes."])
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    with afterglow.load(tmp_path / "agent.gguf", context=512) as model:
        assert model.detokenize(model.tokenize(text)) == text
        assert len(model.tokenize(text)) < len(text) / 2


def test_a_model_is_small_and_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_scripted_model(tmp_path / name, SCRIPT)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").stat().st_size < 1_000_000


def test_answers_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'Yes' again"):
        write_scripted_model(tmp_path / "agent.gguf", ["Yes", "Yes"])
