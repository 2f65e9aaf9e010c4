"""The self-test of `doctor`: run in a child process, because a library that does not fit may end it.

Prints one JSON object: the name of each check and "ok", or what was wrong.
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
    """A model whose next token is known by construction says it."""
    with (
        LlamaModel.load(models.get_path("successor-attention"), trust=True) as model,
        LlamaContext(model, CONTEXT_SETTINGS) as context,
    ):
        tokens = model.vocabulary.tokenize(models.CYCLE.decode())
        answer = decode_next_token(context, 0, tokens)
        assert answer == models.get_successor(tokens[-1]), f"token {answer} after {tokens[-1]}"


def check_trim() -> None:
    """Forgetting the end of a sequence and computing it again gives the same numbers."""
    with (
        LlamaModel.load(models.get_path("attention"), trust=True) as model,
        LlamaContext(model, CONTEXT_SETTINGS) as context,
    ):
        tokens = model.vocabulary.tokenize(PROMPT)
        decode_next_token(context, 0, tokens)
        before = context.get_logits(len(tokens) - 1).copy()
        assert context.memory.remove(0, start=4), "a trim was refused"
        decode_next_token(context, 0, tokens[4:], position=4)
        difference = float(np.abs(context.get_logits(len(tokens) - 5) - before).max())
        assert difference < 1e-3, f"logits moved by {difference:g}"


def check_state() -> None:
    """A saved and loaded sequence, on a hybrid model, continues exactly like the one it came from."""
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
        assert np.array_equal(rows[0], rows[1]), "the restored sequence computes other numbers"


def check_mtp() -> None:
    """The draft of a multi-token-prediction head, known by construction, comes out."""
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
        draft = int(heads.get_logits(0).argmax())
        assert draft == models.get_successor(tokens[-1]), f"the head drafts {draft} after {tokens[-1]}"


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
    """Every check's outcome, in words."""
    outcome = {}
    for name, check in CHECKS.items():
        try:
            check()
            outcome[name] = "ok"
        except Exception as error:  # the report is the point: whatever went wrong belongs in it
            outcome[name] = f"{type(error).__name__}: {error}"
    return outcome


if __name__ == "__main__":
    print(json.dumps(run_checks()))
