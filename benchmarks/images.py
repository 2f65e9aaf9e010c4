"""Images in the prefix cache: cost of a second question about an image, and of an image late in a conversation.

The first question encodes the image and prefills its rows. The second must encode nothing and prefill only its own
tokens. An image after a conversation of 2,000 tokens must cost what the image costs, not what the conversation does.
Runs on an attention model and on a hybrid one (M-RoPE), with projectors of random weights. llama-server of the same
build is printed beside it.

    python benchmarks/images.py [--quick]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from PIL import Image
from report import Row, print_report

import afterglow
from afterglow.api.model import Model
from afterglow.api.outputs import Completion
from afterglow.media.types import ImageData
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.decoder import write_random_model
from afterglow.testing.models.hybrid import Qwen35
from afterglow.testing.models.projector import ProjectorSize, write_llava, write_qwen

ATTENTION = Llama(embedding_length=512, layers=8, heads=8, kv_heads=4, feed_forward_length=1536)
HYBRID = Qwen35(
    embedding_length=512, layers=8, full_attention_interval=4, heads=8, kv_heads=2, head_size=64,
    feed_forward_length=1536, state_size=64, state_key_heads=4, state_heads=8,
)  # fmt: skip
PROJECTOR = ProjectorSize(
    embedding_length=128, feed_forward_length=512, heads=4, layers=6, image_pixels=64, text_embedding_length=512
)
MAX_LATE_IMAGE_SHARE = 0.10  # of computing the whole prompt
QUESTION_TOKENS = 12
EXTRA_ROWS = 3  # tokens around an image, and the last token of an answer


def random_tokens(length: int, seed: int) -> list[int]:
    """Return random tokens that every model has."""
    return [int(token) for token in np.random.default_rng(seed).integers(20, 250, length)]


def random_image(seed: int, side: int = 64) -> ImageData:
    pixels = np.random.default_rng(seed).integers(0, 256, 3 * side * side, dtype=np.uint8)
    return ImageData(side, side, pixels.tobytes())


def get_counters(model: Model) -> tuple[int, int]:
    """Return the number of computed rows and of encoded images."""
    return model._get_host().call(lambda engine: (engine.counters.rows, engine.counters.encoded_media))


def measure_first_token(model: Model, prompt: list[Any], *boundaries: int) -> tuple[float, Completion, int, int]:
    """Return the seconds to the first token, the completion, and the rows and images computed for it.

    `boundaries` are the ends of messages.
    """
    rows_before, encoded_before = get_counters(model)
    started = time.perf_counter()
    completion = model.complete(prompt, max_tokens=1, ignore_eos=True, boundaries=boundaries)
    seconds = time.perf_counter() - started
    rows, encoded = get_counters(model)
    return seconds, completion, rows - rows_before, encoded - encoded_before


def measure_second_question(name: str, model: Model) -> list[Row]:
    """Measure two questions about one image."""
    prompt: list[Any] = [*random_tokens(40, 1), random_image(1), *random_tokens(QUESTION_TOKENS, 2)]
    first, completion, first_rows, first_encoded = measure_first_token(model, prompt)
    followup = [*prompt, *completion.tokens, *random_tokens(QUESTION_TOKENS, 3)]
    second, _, second_rows, second_encoded = measure_first_token(model, followup)
    new_rows = QUESTION_TOKENS + len(completion.tokens)
    assert (first_encoded, second_encoded) == (1, 0), "the second question encoded an image"
    assert second_rows == new_rows, f"computed {second_rows} rows, of which {new_rows} are new"
    note = f"{first_rows} rows, 1 encoded; then {second_rows} rows, 0 encoded"
    return [
        Row(f"{name}: first question about an image", first, "s"),
        Row(f"{name}: second question", second, "s", second / first, None, note),
    ]


def measure_late_image(name: str, model: Model, length: int) -> list[Row]:
    """Measure an image after a long conversation, with the conversation cached and without."""
    conversation = random_tokens(length, 5)
    measure_first_token(model, conversation)
    runs = []
    for seed in (11, 12, 13):
        prompt = [*conversation, random_image(seed), *random_tokens(QUESTION_TOKENS, seed)]
        seconds, completion, rows, encoded = measure_first_token(model, prompt, length)
        assert encoded == 1
        runs.append((rows, seconds))
    rows, warm = min(runs)  # on a hybrid model, there is a checkpoint at the boundary after the second run
    new_rows = completion.usage.media_tokens + QUESTION_TOKENS + EXTRA_ROWS
    assert rows <= new_rows, f"computed {rows} rows, of which {new_rows} are new"
    model.clear_cache()
    prompt = [*conversation, random_image(20), *random_tokens(QUESTION_TOKENS, 20)]
    cold, _, cold_rows, _ = measure_first_token(model, prompt)
    share = warm / cold
    return [
        Row(f"{name}: image and {length:,} tokens, cold", cold, "s", None, None, f"{cold_rows:,} rows"),
        Row(f"{name}: image after {length:,} tokens", warm, "s", share, MAX_LATE_IMAGE_SHARE, f"{rows:,} rows"),
    ]


def measure_other_position(name: str, model: Model) -> Row:
    """Measure the same image at another position: its rows are computed again, but it is not encoded again."""
    image = random_image(30)
    first, *_ = measure_first_token(model, [*random_tokens(30, 31), image, *random_tokens(QUESTION_TOKENS, 32)])
    prompt = [*random_tokens(30, 33), image, *random_tokens(QUESTION_TOKENS, 34)]
    second, _, _, encoded = measure_first_token(model, prompt)
    assert encoded == 0
    return Row(f"{name}: same image at another position", second, "s", second / first, None, "0 encoded")


def measure_llama_server(name: str, path: Path, projector: Path, length: int) -> list[Row]:
    """Measure the same questions with llama-server."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.mmproj.path = str(path), str(projector)
    settings.mmproj_use_gpu = False
    settings.warmup, settings.fit_params, settings.verbosity = True, False, 1
    settings.n_ctx, settings.n_parallel = length + 1024, 1
    settings.cpuparams.n_threads = 1
    server = xllamacpp.Server(settings)
    with urllib.request.urlopen(f"{server.listening_address}/props") as response:
        marker = json.load(response)["media_marker"]

    def measure(prompt: str, *images: ImageData) -> float:
        content = {"prompt_string": prompt, "multimodal_data": [encode_png(image) for image in images]}
        body = {"prompt": content, "n_predict": 1, "cache_prompt": True, "ignore_eos": True}
        url = f"{server.listening_address}/completion"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        started = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            response.read()
        return time.perf_counter() - started

    def text(count: int, seed: int) -> str:
        return "".join(np.random.default_rng(seed).choice(list("bcdfgjklmpqsvxz"), count))

    # Text follows each image: llama-server of this build aborts if a prompt ends with an image.
    measure(text(40, 1) + marker + text(5, 8), random_image(40))
    prompt = text(40, 2) + marker + text(QUESTION_TOKENS, 3)
    first, second = measure(prompt, random_image(1)), measure(prompt + text(QUESTION_TOKENS, 4), random_image(1))
    conversation = text(length, 5)
    measure(conversation)
    late = (measure(conversation + marker + text(QUESTION_TOKENS, seed), random_image(seed)) for seed in (11, 12, 13))
    warm = min(late)
    cold = measure(text(length, 6) + marker + text(QUESTION_TOKENS, 7), random_image(20))
    return [
        Row(f"{name}: llama-server, second question", second, "s", second / first, None, f"first {first:.3f} s"),
        Row(f"{name}: llama-server, after {length:,} tokens", warm, "s", warm / cold, None, f"cold {cold:.3f} s"),
    ]


def encode_png(image: ImageData) -> str:
    file = io.BytesIO()
    Image.frombytes("RGB", (image.width, image.height), image.pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def measure_all(quick: bool) -> list[Row]:
    length, rows = 2000, []
    with tempfile.TemporaryDirectory(prefix="afterglow-images-") as directory:
        root = Path(directory)
        write_random_model(root / "attention.gguf", ATTENTION, seed=1)
        write_llava(root / "attention-projector.gguf", PROJECTOR)
        write_random_model(root / "hybrid.gguf", HYBRID, seed=5)
        write_qwen(root / "hybrid-projector.gguf", PROJECTOR)
        for name in ("attention", "hybrid"):
            path, projector = root / f"{name}.gguf", root / f"{name}-projector.gguf"
            with afterglow.load(path, projector=projector, context=length + 1024, sequences=2, threads=1) as model:
                warm_up: list[Any] = [*random_tokens(20, 50), random_image(50), *random_tokens(5, 51)]
                measure_first_token(model, warm_up)
                rows += measure_second_question(name, model)
                rows += measure_late_image(name, model, length)
                rows.append(measure_other_position(name, model))
            if not quick or name == "attention":
                rows += measure_llama_server(name, path, projector, length)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="llama-server on one model only, the same bars")
    arguments = parser.parse_args()
    os.environ["AFTERGLOW_DISK_CACHE"] = "off"
    return print_report("images", measure_all(arguments.quick))


if __name__ == "__main__":
    sys.exit(main())
