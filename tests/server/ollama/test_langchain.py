"""langchain-ollama against a server with tiny models and with SmolLM2."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolCall, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

from support.server_process import CYCLE, ServerProcess

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to LangSmith."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")


@tool
def pick(letter: str) -> str:
    """Pick a letter."""
    return letter


@pytest.fixture
def chat(server: ServerProcess) -> Iterator[ChatOllama]:
    model = ChatOllama(
        model="tiny",
        base_url=server.url,
        temperature=0,
        num_predict=8,
        repeat_penalty=1.0,
        keep_alive=-1,
        validate_model_on_init=True,
    )
    yield model
    model._client._client.close()


def test_a_chat_model_answers_and_reports_its_usage(chat: ChatOllama) -> None:
    answer = chat.invoke([SystemMessage("be brief"), HumanMessage("hello")])
    assert answer.content == CYCLE[:8]
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["done_reason"] == "length"


def test_a_chat_model_streams(chat: ChatOllama) -> None:
    assert "".join(str(chunk.content) for chunk in chat.stream("hello")) == CYCLE[:8]

    async def collect() -> str:
        async with chat._async_client._client:
            return "".join([str(chunk.content) async for chunk in chat.astream("hello")])

    assert asyncio.run(collect()) == CYCLE[:8]


def test_tools_and_their_results_are_accepted(chat: ChatOllama) -> None:
    call = ToolCall(name="pick", args={"letter": "a"}, id="1")
    messages = [HumanMessage("hello"), AIMessage("", tool_calls=[call]), ToolMessage("a", tool_call_id="1")]
    assert chat.bind_tools([pick]).invoke(messages).content == CYCLE[:8]


class Choice(pydantic.BaseModel):
    a: int = pydantic.Field(ge=1, le=1)


def test_structured_output_is_parsed(chat: ChatOllama) -> None:
    structured = chat.with_structured_output(Choice, method="json_schema")
    assert structured.invoke("hello", options={"num_predict": 40, "temperature": 0}) == Choice(a=1)


def test_reasoning_is_separate(server: ServerProcess) -> None:
    model = ChatOllama(model="reasoning", base_url=server.url, temperature=0, num_predict=8, reasoning=True)
    answer = model.invoke("hello")
    assert (answer.content, answer.additional_kwargs["reasoning_content"]) == ("", CYCLE[:8])
    model._client._client.close()


def test_a_text_model_completes(server: ServerProcess) -> None:
    model = OllamaLLM(model="tiny", base_url=server.url, temperature=0, num_predict=8)
    assert model.invoke("hello") == CYCLE[:8]
    assert "".join(model.stream("hello")) == CYCLE[:8]
    model._client._client.close()


def test_documents_are_embedded(server: ServerProcess) -> None:
    embeddings = OllamaEmbeddings(model="vectors", base_url=server.url)
    first, second = embeddings.embed_documents(["hello", "there"])
    assert len(first) == len(second) == 64
    assert embeddings.embed_query("hello") == pytest.approx(first, abs=1e-5)
    embeddings._client._client.close()
