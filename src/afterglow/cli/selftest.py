"""The self-test of `doctor`: run in a child process, because a library that does not fit may end it.

Prints one JSON object: the name of each check and "ok", or what was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from afterglow import tiny
from afterglow.llama.context import Context
from afterglow.llama.model import Model, ModelSettings
from afterglow.llama.settings import ContextSettings

PROMPT = "hello the world"
SMALL = ContextSettings(cells=512, sequences=2, batch=64, outputs=8, threads=1)


def check_decode() -> None:
    """A model whose next token is known by construction says it."""
    with Model.load(tiny.path("successor-attention"), trust=True) as model, Context(model, SMALL) as context:
        tokens = model.vocabulary.tokenize(tiny.CYCLE.decode())
        answer = next_token(context, 0, tokens)
        assert answer == tiny.successor_of(tokens[-1]), f"token {answer} after {tokens[-1]}"


def check_trim() -> None:
    """Forgetting the end of a sequence and computing it again gives the same numbers."""
    with Model.load(tiny.path("attention"), trust=True) as model, Context(model, SMALL) as context:
        tokens = model.vocabulary.tokenize(PROMPT)
        next_token(context, 0, tokens)
        before = context.logits(len(tokens) - 1).copy()
        assert context.memory.remove(0, start=4), "a trim was refused"
        next_token(context, 0, tokens[4:], position=4)
        difference = float(np.abs(context.logits(len(tokens) - 5) - before).max())
        assert difference < 1e-3, f"logits moved by {difference:g}"


def check_state() -> None:
    """A saved and loaded sequence, on a hybrid model, continues exactly like the one it came from."""
    with Model.load(tiny.path("hybrid"), trust=True) as model, Context(model, SMALL) as context:
        tokens = model.vocabulary.tokenize(PROMPT)
        next_token(context, 0, tokens)
        context.state.load(1, context.state.save(0))
        rows = []
        for sequence in (0, 1):
            next_token(context, sequence, [5], position=len(tokens))
            rows.append(context.logits(0).copy())
        assert np.array_equal(rows[0], rows[1]), "the restored sequence computes other numbers"


def check_mtp() -> None:
    """The draft of a multi-token-prediction head, known by construction, comes out."""
    with (
        Model.load(tiny.path("successor-mtp"), ModelSettings(mtp=True), trust=True) as model,
        Context(model, SMALL) as target,
        Context(model, SMALL, mtp_of=target) as heads,
    ):
        tokens = model.vocabulary.tokenize(tiny.CYCLE.decode())
        target.keep_hidden(every_row=True)
        heads.keep_hidden(every_row=False)
        next_token(target, 0, tokens)
        heads.batch.add(tokens[-1:], position=len(tokens), sequence=0, outputs=1)
        assert heads.batch.hidden is not None
        heads.batch.hidden[0] = target.hidden(len(tokens) - 1)
        heads.decode()
        draft = int(heads.logits(0).argmax())
        assert draft == tiny.successor_of(tokens[-1]), f"the head drafts {draft} after {tokens[-1]}"


def next_token(context: Context, sequence: int, tokens: list[int], position: int = 0) -> int:
    context.batch.clear()
    context.batch.add(tokens, position=position, sequence=sequence, outputs=1)
    context.decode()
    return int(context.logits(len(tokens) - 1).argmax())


CHECKS: dict[str, Callable[[], None]] = {
    "decode": check_decode,
    "trim": check_trim,
    "state round trip": check_state,
    "MTP": check_mtp,
}


def run() -> dict[str, str]:
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
    print(json.dumps(run()))
