"""Save the state of a long prompt in a file, and continue from it with another model object or process."""

import sys
import tempfile
from pathlib import Path

import afterglow

TEXT = "It was a bright day in the harbour, and the boats were coming in one after the other. " * 12
path = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "harbour.state"

with afterglow.load("smollm2", fetch=True, context=2048) as model:
    first = model.complete(TEXT, max_tokens=1)
    model.snapshot("harbour")
    model.save_snapshot("harbour", path)
    computed = first.usage.prompt_tokens - first.usage.cached_tokens
    print(f"computed {computed} tokens, saved {path.stat().st_size:,} bytes")

with afterglow.load("smollm2", context=2048) as model:
    model.load_snapshot("harbour", path)
    model.restore("harbour")
    completion = model.complete(TEXT + "In the evening", max_tokens=16)
    print(f"computed {completion.usage.prompt_tokens - completion.usage.cached_tokens} tokens:{completion.text}")
