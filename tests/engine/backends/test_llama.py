"""`LlamaBackend`: many requests are sampled from the logits that the device found or keeps, with the same tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from afterglow.engine.backends import logits_hold
from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.engine.types.request import Failed, Request, Token
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama import top_logits
from afterglow.llama.context import LlamaContext
from afterglow.llama.device_logits import DeviceLogits
from afterglow.llama.model import LlamaModel
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models
from support.contexts import MEMORY_KINDS, random_tokens

pytestmark = pytest.mark.native
GREEDY, DRAWN, PENALIZED = Sampling(temperature=0), Sampling(seed=3), Sampling(seed=4, presence_penalty=0.5)


def generate(context: LlamaContext, samplings: list[Sampling], speculation: int | str) -> dict[str, list[int]]:
    """Run requests of different lengths together; return their tokens."""
    engine = Engine(LlamaBackend(context), EngineSettings(speculation=speculation, ram_cache_bytes=0))
    for index, sampling in enumerate(samplings):
        engine.submit(
            Request(
                id=str(index), entries=random_tokens(20, seed=index), max_tokens=8 + 3 * index, ignore_eos=True,
                sampling=sampling, logprobs=0 if index == 2 else None,
            )
        )  # fmt: skip
    tokens: dict[str, list[int]] = defaultdict(list)
    while engine.is_busy:
        for event in engine.step():
            if isinstance(event, Token):
                tokens[event.request_id].append(event.token)
    engine.close()
    return tokens


@pytest.mark.parametrize("speculation", ["off", 2])
@pytest.mark.parametrize(
    "samplings", [[GREEDY] * 6, [DRAWN] * 6, [GREEDY, DRAWN, PENALIZED] * 2], ids=["greedy", "drawn", "mixed"]
)
@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_requests_get_the_same_tokens_from_the_logits_that_the_device_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, samplings: list[Sampling], speculation: int | str
) -> None:
    monkeypatch.setattr(top_logits, "MIN_SHORTLIST_CANDIDATES", top_logits.TOP_COUNT + 1)  # the vocabulary is tiny
    found: list[tuple[int, ...]] = []
    read = top_logits.TopLogitsReducer.read

    def record(self: top_logits.TopLogitsReducer, outputs: int) -> top_logits.TopLogits | None:
        top = read(self, outputs)
        found.extend([] if top is None else [top.tokens.shape])
        return top

    monkeypatch.setattr(top_logits.TopLogitsReducer, "read", record)
    results = []
    settings = ContextSettings(cells=6 * 256, sequences=6, batch=128, ubatch=128, outputs=32, threads=1)
    with LlamaModel.load(models.get_path(kind), trust=True) as model:
        for is_enabled in (False, True):
            with LlamaContext(model, settings) as context:
                if is_enabled:
                    context.enable_top_logits()
                results.append(generate(context, samplings, speculation))
    assert results[0] == results[1]
    assert {rows for rows, _ in found} >= {4, 5, 6}
    expected_width = 1 if all(sampling is GREEDY for sampling in samplings) else top_logits.TOP_COUNT
    assert expected_width in {width for _, width in found}


class HoldingBackend(LlamaBackend):
    """Leaves logits on the device, and counts the decodes whose logits stayed there."""

    held = unheld = 0

    def decode(self, spans) -> None:
        super().decode(spans)
        is_held = isinstance(self.context._logits, DeviceLogits)
        self.held, self.unheld = self.held + is_held, self.unheld + (not is_held)


def generate_in_turns(context: LlamaContext, backend: LlamaBackend, speculation: int | str) -> dict[str, list[int]]:
    """Start requests while others decode, so that prompts are computed beside answers; return all tokens."""
    engine = Engine(backend, EngineSettings(speculation=speculation, ram_cache_bytes=0))
    constraint = GrammarConstraint(grammar="start: /[a-z]{12}/")
    requests = [
        Request(
            id=str(index), entries=random_tokens(20 + 9 * index, seed=index), max_tokens=12 + 5 * (index % 4),
            ignore_eos=True, sampling=(GREEDY, PENALIZED)[index % 5 == 4], logprobs=0 if index == 6 else None,
            constraint=constraint if index == 9 else None,
        )
        for index in range(16)
    ]  # fmt: skip
    tokens: dict[str, list[int]] = defaultdict(list)
    for step in itertools.count():
        if step % 3 == 0 and requests:
            engine.submit(requests.pop(0))
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                tokens[event.request_id].append(event.token)
        if not (engine.is_busy or requests):
            break
    engine.close()
    return tokens


@pytest.mark.parametrize("speculation", ["off", 2])
@pytest.mark.parametrize("kind", ["attention", "window"])
def test_requests_get_the_same_tokens_from_logits_that_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, speculation: int | str
) -> None:
    monkeypatch.setattr(top_logits, "MIN_SHORTLIST_CANDIDATES", top_logits.TOP_COUNT + 1)
    limits = {"MIN_HELD_ROWS": 4, "MIN_LONG_ROWS": 40, "DECODES_BEFORE_HOLD": 2, "DECODES_BEFORE_RELEASE": 2}
    for name, value in {**limits, "DECODES_AFTER_DRAFTS": 4}.items():
        monkeypatch.setattr(logits_hold, name, value)
    settings = ContextSettings(cells=8 * 256, sequences=8, batch=128, ubatch=64, outputs=32, threads=1)
    with LlamaModel.load(models.get_path(kind), trust=True) as model:
        with LlamaContext(model, settings) as context:
            expected = generate_in_turns(context, LlamaBackend(context), speculation)
        with LlamaContext(model, settings) as context:
            context.enable_top_logits()
            backend = HoldingBackend(context)
            assert generate_in_turns(context, backend, speculation) == expected
    assert backend.held >= 5
    assert backend.unheld >= 5


def test_logits_are_held_while_many_rows_are_sampled_and_released_while_few_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top_logits, "MIN_SHORTLIST_CANDIDATES", top_logits.TOP_COUNT + 1)
    monkeypatch.setattr(logits_hold, "MIN_HELD_ROWS", 8)
    monkeypatch.setattr(logits_hold, "DECODES_BEFORE_RELEASE", 32)
    settings = ContextSettings(cells=8 * 256, sequences=8, batch=128, ubatch=64, outputs=32, threads=1)
    with LlamaModel.load(models.get_path("attention"), trust=True) as model, LlamaContext(model, settings) as context:
        context.enable_top_logits()
        engine = Engine(LlamaBackend(context), EngineSettings(speculation="off", ram_cache_bytes=0))
        for index in range(8):
            length = 200 if index == 0 else 60
            engine.submit(
                Request(id=str(index), entries=random_tokens(20, seed=index), max_tokens=length, ignore_eos=True)
            )
        was_holding = []
        while engine.is_busy:
            engine.step()
            was_holding.append(context.is_holding_logits)
        engine.close()
    assert not any(was_holding[:30])
    assert all(was_holding[40:60])
    assert not any(was_holding[120:])
