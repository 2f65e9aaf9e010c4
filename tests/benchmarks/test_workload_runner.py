"""Workloads run against real servers with a tiny model. Tokens are counted, nothing is timed."""

from __future__ import annotations

import json

import hybrid
import pytest
from measures import MEASURED_IDEAL
from peers import Afterglow, IdealLlamaServer, LlamaServer, ServerSize, start_peers
from workload_runner import AGENT_TEMPLATE, PromptTokenizer, WorkloadRunner
from workloads import WORKLOADS

from afterglow.llama.model import LlamaModel, ModelSettings
from agents import Bench

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "tiny-hybrid.gguf"
    hybrid.write(file, hybrid.TINY_DECODER)
    return file


@pytest.fixture(scope="module")
def tokenizer(path):
    with LlamaModel.load(path, ModelSettings(vocab_only=True)) as model:
        prompt_tokenizer = PromptTokenizer(model)
        yield prompt_tokenizer
        prompt_tokenizer.close()


@pytest.fixture(scope="module")
def runner(path, tokenizer):
    eog_tokens = tokenizer.vocabulary.eog_tokens
    size = ServerSize(model=path, threads=1, slots=9, context=2048, eog_tokens=eog_tokens)
    with start_peers(size, (Afterglow,)) as (peer,):
        yield WorkloadRunner(peer, tokenizer)


@pytest.mark.parametrize("letter", "abcdefghi")
def test_hardly_any_token_is_computed_twice(runner, letter):
    run = runner.run(WORKLOADS[letter](f"test {letter}", True))
    computed = sum(reply.computed_tokens for reply in run.replies)
    needed = sum(reply.needed_tokens for reply in run.replies)
    # The ideal cache computes the last token of a repeated prompt; with stored logits nothing is computed.
    assert 0.99 * needed <= computed <= 1.05 * needed
    assert sum(reply.prompt_tokens for reply in run.replies) > computed or letter in "fg"  # there were prefix hits
    for reply in run.replies:
        assert reply.chunk_times
        if reply.ask.schema is None:
            assert len(reply.text.split()) == reply.ask.answer  # each token is a word


def test_the_server_with_an_ideal_cache_computes_the_needed_tokens_and_no_others(path, tokenizer):
    size = ServerSize(model=path, threads=1, slots=9, context=2048)
    with start_peers(size, (IdealLlamaServer,)) as (peer,):
        runner = WorkloadRunner(peer, tokenizer)
        for letter in MEASURED_IDEAL:
            replies = runner.run(WORKLOADS[letter](f"test {letter}", True)).replies
            assert [reply.computed_tokens for reply in replies] == [reply.needed_tokens for reply in replies]


def test_native_calls_and_reasoning_are_computed_once(path, tokenizer):
    size = ServerSize(model=path, threads=1, slots=2, context=8192, template=AGENT_TEMPLATE)
    with start_peers(size, (Afterglow,)) as (peer,):
        run = WorkloadRunner(peer, tokenizer).run(WORKLOADS["k"]("test k", True))
    assert all(reply.calls and reply.reasoning for reply in run.replies)
    computed = sum(reply.computed_tokens for reply in run.replies)
    assert computed <= 1.02 * sum(reply.needed_tokens for reply in run.replies)


def test_prompts_are_as_long_as_the_server_reports(runner, tokenizer):
    run = runner.run(WORKLOADS["a"]("lengths", True))
    messages = WORKLOADS["a"]("lengths", True).steps[0].says
    assert run.replies[0].prompt_tokens == len(tokenizer.tokenize_prompt(messages))


def test_a_workload_with_images_is_skipped_without_a_projector(path):
    bench = Bench("hybrid", path, quick=True, threads=1, pairs=1)
    images, text = (WORKLOADS[letter]("example", True) for letter in "ja")
    assert bench._get_skip_reason(images) == "no projector for this model"
    assert bench._get_skip_reason(text) == ""
    bench.get_projector_path = lambda: path
    assert bench._get_skip_reason(images) == ""


def test_both_servers_run_the_same_prompts(path):
    bench = Bench("hybrid", path, quick=True, threads=1, pairs=2)
    (result, skipped) = bench.run("cj")
    assert list(result.runs) == [Afterglow.name, LlamaServer.name]
    ours, theirs = result.runs[Afterglow.name], result.runs[LlamaServer.name]
    assert len(ours) == len(theirs) == 2
    for our_run, their_run in zip(ours, theirs, strict=True):
        assert our_run["needed"] == their_run["needed"]
        assert our_run["computed"] < their_run["computed"]
    assert skipped.skipped  # there is no projector for this model
    assert json.dumps(result.get_medians(Afterglow.name))
