"""Self-test of `afterglow doctor`. Runs in a child process, because an incompatible library may crash it.

Prints one JSON object: the name of each check, and "ok" or the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models

PROMPT = "hello the world"
CONTEXT_SETTINGS = ContextSettings(cells=512, sequences=2, batch=64, outputs=8, threads=1)


def check_decode() -> None:
    """Check that a model with constructed weights generates the token known by construction."""
    with (
        LlamaModel.load(models.get_path("successor-attention"), trust=True) as model,
        LlamaContext(model, CONTEXT_SETTINGS) as context,
    ):
        tokens = model.vocabulary.tokenize(models.CYCLE.decode())
        token = decode_next_token(context, 0, tokens)
        assert token == models.get_successor(tokens[-1]), f"token {token} after {tokens[-1]}"


def check_trim() -> None:
    """Check that removing the end of a sequence and computing it again gives the same logits."""
    with (
        LlamaModel.load(models.get_path("attention"), trust=True) as model,
        LlamaContext(model, CONTEXT_SETTINGS) as context,
    ):
        tokens = model.vocabulary.tokenize(PROMPT)
        decode_next_token(context, 0, tokens)
        before = context.get_logits(len(tokens) - 1).copy()
        assert context.memory.remove(0, start=4), "the trim was rejected"
        decode_next_token(context, 0, tokens[4:], position=4)
        difference = float(np.abs(context.get_logits(len(tokens) - 5) - before).max())
        assert difference < 1e-3, f"logits differ by {difference:g}"


def check_state() -> None:
    """Check that a saved and restored sequence of a hybrid model continues exactly like the original."""
    with (
        LlamaModel.load(models.get_path("hybrid"), trust=True) as model,
        LlamaContext(model, CONTEXT_SETTINGS) as context,
    ):
        tokens = model.vocabulary.tokenize(PROMPT)
        decode_next_token(context, 0, tokens)
        context.state.load(1, context.state.save(0))
        rows = []
        for sequence in (0, 1):
            decode_next_token(context, sequence, [5], position=len(tokens))
            rows.append(context.get_logits(0).copy())
        assert np.array_equal(rows[0], rows[1]), "the restored sequence computes different logits"


def check_mtp() -> None:
    """Check that a multi-token-prediction head drafts the token known by construction."""
    with (
        LlamaModel.load(models.get_path("successor-mtp"), ModelSettings(mtp=True), trust=True) as model,
        LlamaContext(model, CONTEXT_SETTINGS) as target,
        LlamaContext(model, CONTEXT_SETTINGS, mtp_target=target) as heads,
    ):
        tokens = model.vocabulary.tokenize(models.CYCLE.decode())
        target.enable_hidden_states(every_row=True)
        heads.enable_hidden_states(every_row=False)
        decode_next_token(target, 0, tokens)
        heads.batch.add(tokens[-1:], position=len(tokens), sequence=0, outputs=1)
        assert heads.batch.hidden_states is not None
        heads.batch.hidden_states[0] = target.get_hidden_state(len(tokens) - 1)
        heads.decode()
        draft_token = int(heads.get_logits(0).argmax())
        assert draft_token == models.get_successor(tokens[-1]), f"the head drafts {draft_token} after {tokens[-1]}"


def decode_next_token(context: LlamaContext, sequence: int, tokens: list[int], position: int = 0) -> int:
    context.batch.clear()
    context.batch.add(tokens, position=position, sequence=sequence, outputs=1)
    context.decode()
    return int(context.get_logits(len(tokens) - 1).argmax())


CHECKS: dict[str, Callable[[], None]] = {
    "decode": check_decode,
    "trim": check_trim,
    "state round trip": check_state,
    "MTP": check_mtp,
}


def run_checks() -> dict[str, str]:
    """Run every check. Return "ok" or the error of each."""
    outcomes = {}
    for name, check in CHECKS.items():
        try:
            check()
            outcomes[name] = "ok"
        except Exception as error:  # any error belongs in the report
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes


if __name__ == "__main__":
    print(json.dumps(run_checks()))
