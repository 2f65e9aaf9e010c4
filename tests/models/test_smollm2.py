"""SmolLM2-135M-Instruct, fetched from its package: completion, info, perplexity, footprint, sampling."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

import afterglow
from afterglow.llama import candidates, sampler
from afterglow.llama.context import LlamaContext
from afterglow.llama.sampler import SamplerChain
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import ContextSettings
from afterglow.llama.top_logits import TOP_COUNT, TopLogits

pytestmark = pytest.mark.model
RIVER = Path(__file__).parents[1] / "data" / "river.txt"


def test_smollm2_answers_a_question(model: afterglow.Model) -> None:
    prompt = model.apply_chat_template(
        [("system", "You are a helpful assistant."), ("user", "What is the capital of France?")]
    )
    answer = model.complete(prompt, max_tokens=16)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_smollm2_reports_its_info(model: afterglow.Model) -> None:
    assert model.info.architecture == "llama"
    assert model.info.parameter_count == 134_515_008
    assert model.info.memory_kind == "attention"
    assert model.supports("chat_template")


@pytest.mark.parametrize("length", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_c16_perplexity_equals_that_of_the_raw_logits_in_float64(smollm2: Path, length: int) -> None:
    with afterglow.load(smollm2, context=2048, sequences=1) as model:
        tokens = model.tokenize(RIVER.read_text())[:length]
        assert len(tokens) == length
        perplexity = model.perplexity(tokens)
        assert perplexity == pytest.approx(compute_perplexity(model, tokens), rel=1e-3)
    assert 5 < perplexity < 60


def compute_perplexity(model: afterglow.Model, tokens: list[int]) -> float:
    """Compute perplexity from raw logits in float64, in the batches of scoring: other batches change it by 0.13 %."""
    total = 0.0
    with LlamaContext(model._lifecycle.model, ContextSettings(cells=2048)) as context:
        for start in range(0, len(tokens) - 1, context.max_outputs):
            chunk = tokens[start : min(start + context.max_outputs, len(tokens) - 1)]
            context.batch.clear()
            context.batch.add(chunk, position=start, sequence=0, outputs=len(chunk))
            context.decode()
            rows = np.stack([context.get_logits(row) for row in range(len(chunk))]).astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            targets = tokens[start + 1 : start + 1 + len(chunk)]
            total += float((rows[np.arange(len(chunk)), targets] - np.log(np.exp(rows).sum(axis=1))).sum())
    return float(np.exp(-total / (len(tokens) - 1)))


def test_the_estimated_footprint_is_what_llama_cpp_allocates(model: afterglow.Model) -> None:
    settings = model.settings[1]
    footprint = model._lifecycle.model.estimate_footprint(settings)
    assert (
        footprint.kv_cache_bytes == 30 * 2 * 3 * 64 * 2 * settings.cells
    )  # layers, keys and values, heads, width, f16
    assert footprint.weight_bytes == model.info.nbytes


def test_c15_the_shortlist_samples_the_same_tokens(model: afterglow.Model, monkeypatch) -> None:
    native = model._lifecycle.context.model
    generator = np.random.default_rng(3)
    rows = [generator.normal(0, 4, native.vocabulary.size).astype(np.float32) for _ in range(40)]
    allowed = np.flatnonzero(generator.random(native.vocabulary.size) < 0.5)
    settings = [{}, {"top_k": 200, "temperature": 2.0}, {"top_p": 1.0, "min_p": 0.0, "typical_p": 0.9}]

    def sample_all() -> tuple[list[int], list[int]]:
        tokens, sizes = [], []
        for options in settings:
            with SamplerChain(native, Sampling(seed=5, **options)) as chain:
                for row in rows:
                    tokens += [chain.sample_and_accept(row), chain.sample_and_accept(row, allowed)]
                    sizes.append(len(chain._candidates))
        return tokens, sizes

    tokens, sizes = sample_all()
    monkeypatch.setattr(sampler, "build_shortlists", lambda rows, _: [None] * len(rows))
    full_tokens, full_sizes = sample_all()
    assert tokens == full_tokens
    assert len(set(tokens)) > 50
    assert max(sizes) < min(full_sizes)
    assert sorted(sizes)[len(sizes) // 3] < 0.2 * min(full_sizes)


@pytest.mark.parametrize("threads", [1, 3])
def test_c15_rows_sampled_together_give_the_tokens_of_rows_sampled_alone(
    model: afterglow.Model, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    native = model._lifecycle.model
    generator = np.random.default_rng(4)
    options = [
        {"temperature": 0}, {"temperature": 0}, {}, {}, {"top_k": 100}, {"top_k": 0}, {"mirostat": 2},
        {"temperature": 0, "logit_bias": {7: 3.0}}, {"presence_penalty": 1.0}, {"temperature": 1.5, "top_p": 1.0},
        {"samplers": ("top_k", "infill")}, {"samplers": ("min_p", "top_k")}, {"samplers": (), "temperature": 0},
    ]  # fmt: skip
    monkeypatch.setattr(candidates, "count_threads", lambda: threads)
    monkeypatch.setattr(candidates, "MIN_LOGITS_PER_THREAD", native.vocabulary.size)
    parts = []
    run_parallel = candidates.run_parallel
    monkeypatch.setattr(
        candidates, "run_parallel", lambda f, ranges: parts.append(len(ranges)) or run_parallel(f, ranges)
    )
    with contextlib.ExitStack() as stack:
        alone, together = (
            [stack.enter_context(SamplerChain(native, Sampling(**{"seed": 5, **option}))) for option in options]
            for _ in range(2)
        )
        for step in range(12):
            logits = generator.normal(0, 4, (len(options) + 1, native.vocabulary.size)).astype(np.float32)
            logits[3, :9] = logits[3].max()  # equal logits
            if step % 3 == 0:
                logits[4, 5:60] = np.nan
            tokens = sampler.sample_rows([*together, None], logits)
            assert tokens == [*map(SamplerChain.sample_and_accept, alone, logits), None]
    assert parts == ([threads] * 12 if threads > 1 else [])


def test_c15_tokens_sampled_from_top_logits_are_those_sampled_from_all(
    model: afterglow.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = model._lifecycle.model
    options = [
        {"temperature": 0}, {"temperature": 0}, {}, {}, {"top_k": 20, "temperature": 1.5}, {"top_k": 0},
        {"top_k": TOP_COUNT}, {"mirostat": 2}, {"presence_penalty": 1.0}, {"temperature": 0, "logit_bias": {7: 3.0}},
        {"top_p": 1.0, "min_p": 0.0}, {"samplers": ("top_k", "infill")}, {"samplers": ("min_p", "top_k")},
    ]  # fmt: skip
    host_rows = []
    reduce_part = candidates._reduce_part
    monkeypatch.setattr(
        candidates, "_reduce_part", lambda modes, rows: host_rows.append(modes) or reduce_part(modes, rows)
    )
    generator = np.random.default_rng(6)
    with contextlib.ExitStack() as stack:
        alone, together = (
            [stack.enter_context(SamplerChain(native, Sampling(**{"seed": 5, **option}))) for option in options]
            for _ in range(2)
        )
        for step in range(12):
            logits = generator.normal(0, 4, (len(options), native.vocabulary.size)).astype(np.float32)
            logits[1] = step  # all are equal
            logits[2, :9] = logits[2].max()
            logits[3, 20:140] = logits[3].max()  # more equal logits than there are top logits
            tokens = np.argpartition(logits, -TOP_COUNT)[:, -TOP_COUNT:].astype(np.int32)
            top = TopLogits(tokens, np.take_along_axis(logits, tokens, 1))
            expected = [chain.sample_and_accept(row) for chain, row in zip(alone, logits, strict=True)]
            assert sampler.sample_rows(together, logits, top) == expected
            greedy = TopLogits(logits.argmax(axis=1)[:, None].astype(np.int32), logits.max(axis=1)[:, None])
            assert (
                sampler.sample_rows(together[:2], logits[:2], TopLogits(greedy.tokens[:2], greedy.values[:2]))
                == (expected[:2])
            )
    assert host_rows == [[0], [40], [TOP_COUNT]] * 12  # equal logits, and as many candidates as top logits
