"""1,000 embeddings in one request against one request for each text, on tiny models and on SmolLM2, with equal vectors.

Both are measured on the same server over one connection, in alternating parts. The texts are short, as queries of a
search are; in a second run they share an instruction, as models for retrieval expect it. A causal model computes the
instruction once.

The last rows are what llama.cpp itself gains, without a server: the processor time of one decode for each text against
decodes of up to 32, 128 and 512 rows, of the same texts. A CPU whose cores are busy with the rows of one text gains
little from more rows; what a batch saves there is the overhead of the requests. On a GPU the elapsed time is measured.

    python benchmarks/embeddings.py [--quick] [--threads N] [--only embedding,attention,smollm2]
    AFTERGLOW_LIBLLAMA=DIRECTORY python benchmarks/embeddings.py --gpu --only smollm2
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers import Afterglow, ServerSize
from report import Row, print_report
from synthetic_inputs import random_text

from afterglow import registry
from afterglow.engine.pooling import PoolingContext, group_texts
from afterglow.llama.context import LlamaContext
from afterglow.llama.model import LlamaModel, ModelSettings
from afterglow.llama.settings import ContextSettings
from afterglow.testing import models

MAX_SHARE = 0.25  # of the time of single requests
MIN_COSINE = 0.9999
INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
PARTS = 4
TEXT_WORDS = (3, 12)
MODELS = ("embedding", "attention", "smollm2")
DECODE_ROWS = (32, 128, 512)  # of the measurement without a server


def build_texts(count: int, prefix: str) -> list[str]:
    """Return different texts of a few words."""
    low, high = TEXT_WORDS
    return [prefix + random_text(f"embedding {number}", low + number % (high - low)) for number in range(count)]


def embed(connection: http.client.HTTPConnection, texts: list[str]) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """Send one request; return the vectors and the usage."""
    body = json.dumps({"model": "model", "input": texts, "encoding_format": "base64"})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    response = json.loads(connection.getresponse().read())
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), np.float32) for item in response["data"]]
    return np.stack(vectors), response["usage"]


def clear(connection: http.client.HTTPConnection) -> None:
    """Clear the vectors, so that the same texts are computed again."""
    connection.request("POST", "/cache/clear", "{}", {"Content-Type": "application/json"})
    connection.getresponse().read()


def get_model_path(name: str) -> Path:
    """Return the file of a model."""
    return registry.pull("smollm2") if name == "smollm2" else models.get_path(name)


def measure_library(name: str, count: int, threads: int, gpu_layers: int) -> list[Row]:
    """Compute the texts in llama.cpp, one decode each and many per decode; return the times, the shortest of three."""
    clock = time.perf_counter if gpu_layers else time.process_time
    with LlamaModel.load(get_model_path(name), ModelSettings(gpu_layers=gpu_layers)) as model:
        target = LlamaContext(model, ContextSettings(cells=512, threads=threads))
        texts = [model.vocabulary.tokenize(text) for text in build_texts(count, "")]
        longest = max(map(len, texts))

        def time_decodes(rows: int, groups: Sequence[Sequence[Sequence[int]]]) -> float:
            with PoolingContext(target, "embedding", max(rows, longest)) as context:
                context.pool((), texts[:1])
                times = []
                for _ in range(3):
                    started = clock()
                    for group in groups:
                        context.pool((), group)
                    times.append(clock() - started)
            return min(times)

        single = time_decodes(longest, [[text] for text in texts])
        together = {rows: time_decodes(rows, group_texts(texts, rows, len(texts))) for rows in DECODE_ROWS}
    return [
        Row(f"{name}: llama.cpp alone, one by one", single, "s"),
        *(
            Row(
                f"{name}: llama.cpp alone, up to {rows} rows",
                seconds,
                "s",
                share=seconds / single,
                note=f"{single / seconds:.2f} times as fast",
            )
            for rows, seconds in together.items()
        ),
    ]


def measure(name: str, count: int, prefix: str, threads: int, gpu_layers: int) -> list[Row]:
    """Embed the texts one by one and together; return the times and the smallest cosine."""
    path = get_model_path(name)
    texts = build_texts(count, prefix)
    size = -(-count // PARTS)
    single_seconds, batch_seconds, cosine, computed, tokens = 0.0, 0.0, 1.0, 0, 0
    with tempfile.TemporaryDirectory(prefix="afterglow-embeddings-") as folder:
        server = Afterglow(
            ServerSize(model=path, threads=threads, slots=4, context=512, gpu_layers=gpu_layers), Path(folder)
        )
        server.start()
        try:
            connection = http.client.HTTPConnection(server.host, server.port, timeout=900)
            embed(connection, texts[:2])  # creates the context
            for part in (texts[start : start + size] for start in range(0, count, size)):
                started = time.perf_counter()
                single = np.concatenate([embed(connection, [text])[0] for text in part])
                single_seconds += time.perf_counter() - started
                clear(connection)
                started = time.perf_counter()
                batch, usage = embed(connection, part)
                batch_seconds += time.perf_counter() - started
                cosine = min(cosine, float((single * batch).sum(axis=1).min()))
                computed, tokens = computed + usage["computed_tokens"], tokens + usage["total_tokens"]
            connection.close()
        finally:
            server.stop()
    label = f"{name}{', with an instruction' if prefix else ''}"
    note = f"{single_seconds / batch_seconds:.1f} times as fast; {computed:,} of {tokens:,} tokens computed"
    return [
        Row(f"{label}: {count:,} texts one by one", single_seconds, "s"),
        Row(
            f"{label}: {count:,} texts together",
            batch_seconds,
            "s",
            share=batch_seconds / single_seconds,
            bar=MAX_SHARE,
            note=note,
            full=True,  # a hundred texts are too few: fixed costs of a request decide
        ),
        Row(f"{label}: 1 - smallest cosine", 1 - cosine, "", bar=1 - MIN_COSINE),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 texts instead of 1,000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--gpu", action="store_true", help="all layers on the GPU")
    arguments = parser.parse_args()
    sizes = {"threads": arguments.threads, "gpu_layers": -1 if arguments.gpu else 0}
    count = 100 if arguments.quick else 1000
    rows = [
        row
        for name in arguments.only.split(",")
        for prefix in ("", INSTRUCTION)
        for row in measure(name, count, prefix, **sizes)
    ]
    rows += [row for name in arguments.only.split(",") for row in measure_library(name, count, **sizes)]
    return print_report("embeddings", rows, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
