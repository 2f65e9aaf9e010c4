"""Usage in the OpenAI format."""

from __future__ import annotations

from afterglow.engine.types.request import Usage
from afterglow.server.openai.formatting import build_prediction_details


def test_prediction_details_sum_over_choices() -> None:
    first = Usage(generated_tokens=9, draft_tokens=5, accepted_tokens=3, draft_steps=2, speculation_seconds_saved=0.5)
    assert build_prediction_details(
        [first, Usage(generated_tokens=4, draft_tokens=2, draft_steps=1), Usage(generated_tokens=1)]
    ) == {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 4,
        "mean_draft_length": 2.33,
        "speculation_seconds_saved": 0.5,
    }
