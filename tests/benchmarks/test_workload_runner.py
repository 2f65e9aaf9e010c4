"""Workloads played against real servers with a tiny model: not timed, but counted."""

from __future__ import annotations

import json

import hybrid
import pytest
from agents import Bench
from peers import Afterglow, LlamaServer, Shape, started
from playing import Player, Reader
from workloads import WORKLOADS

from afterglow.llama.model import LlamaModel, ModelSettings


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "talking.gguf"
    hybrid.write(file, hybrid.TINY)
    return file


@pytest.fixture(scope="module")
def reader(path):
    with LlamaModel.load(path, ModelSettings(vocab_only=True)) as model:
        reading = Reader(model)
        yield reading
        reading.close()


@pytest.fixture(scope="module")
def player(path, reader):
    shape = Shape(model=path, threads=1, slots=9, context=2048, ends=reader.vocabulary.ends)
    with started(shape, (Afterglow,)) as (peer,):
        yield Player(peer, reader)


@pytest.mark.parametrize("letter", "abcdefghi")
def test_hardly_a_token_is_computed_twice(player, letter):
    workload = WORKLOADS[letter](f"test {letter}", True)
    played = player.play(workload)
    computed, needed = (sum(getattr(one, what) for one in played.replies) for what in ("computed", "needed"))
    assert needed <= computed <= 1.05 * needed
    assert sum(reply.prompt for reply in played.replies) > computed or letter in "fg"  # and something was reused
    for reply in played.replies:
        assert reply.times
        if reply.ask.schema is None:
            assert len(reply.text.split()) == reply.ask.answer  # each token is a word


def test_prompts_are_as_long_as_the_server_says(player, reader):
    played = player.play(WORKLOADS["a"]("lengths", True))
    assert played.replies[0].prompt == len(reader.prompt(WORKLOADS["a"]("lengths", True).steps[0].says))


def test_both_servers_are_compared_on_the_same_prompts(path):
    bench = Bench("hybrid", path, quick=True, threads=1, pairs=2)
    (result, skipped) = bench.results("cj")
    assert list(result.runs) == [Afterglow.name, LlamaServer.name]
    ours, theirs = result.runs[Afterglow.name], result.runs[LlamaServer.name]
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert one["needed"] == other["needed"]
        assert one["computed"] < other["computed"]
    assert skipped.skipped  # with the reason: nothing lets this model see
    assert json.dumps(result.medians(Afterglow.name))
