"""`LlamaBackend`: many requests are sampled from the logits that the device found, with the same tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from afterglow.engine.backends.llama import LlamaBackend
from afterglow.engine.engine import Engine
from afterglow.engine.types.request import Request, Token
from afterglow.engine.types.settings import EngineSettings
from afterglow.llama import top_logits
from afterglow.llama.context import LlamaContext
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

    def record(self: top_logits.TopLogitsReducer, logits: np.ndarray) -> top_logits.TopLogits | None:
        top = read(self, logits)
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
