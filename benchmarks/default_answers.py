"""Ten questions with the default sampling, over HTTP and with `afterglow run`: which answers contain the right word.

    python benchmarks/default_answers.py [--model smollm2] [--max-tokens 300]

Prints one row per question. It has no bar: sampled answers differ from run to run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

AFTERGLOW = [sys.executable, "-m", "afterglow.cli.main"]
URL_PATTERN = re.compile(rb"at (http://\S+)")
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is 2+2?": "4",
    "What color is the sky on a clear day?": "blue",
    "Name the largest planet of the solar system.": "Jupiter",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What do bees make?": "honey",
    "How many days does a week have?": "seven|7",
    "What is the opposite of hot?": "cold",
    "In which country is Tokyo?": "Japan",
    "What is the chemical formula of water?": "H2O|H₂O",
}


@contextmanager
def run_server(model: str) -> Iterator[str]:
    """Run a server on a free port and yield its URL."""
    command = [*AFTERGLOW, "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        try:
            url = next(match[1].decode() for line in process.stderr if (match := URL_PATTERN.search(line)))
            yield url
        finally:
            process.terminate()
            process.stderr.read()


def ask_server(url: str, question: str, max_tokens: int) -> str:
    """Ask over HTTP with no field but the limit."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def ask_terminal(model: str, question: str, max_tokens: int) -> str:
    """Ask with `afterglow run` and no flag but the limit."""
    command = [*AFTERGLOW, "run", "--model", model, "--max-tokens", str(max_tokens), question]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Ask all questions and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=300)
    arguments = parser.parse_args()
    right = {"http": 0, "run": 0}
    words = {"http": 0, "run": 0}
    with run_server(arguments.model) as url:
        for question, expected in QUESTIONS.items():
            answers = {
                "http": ask_server(url, question, arguments.max_tokens),
                "run": ask_terminal(arguments.model, question, arguments.max_tokens),
            }
            for form, answer in answers.items():
                is_right = re.search(rf"\b({expected})\b", answer, re.IGNORECASE) is not None
                right[form] += is_right
                words[form] += len(answer.split())
                verdict = "right" if is_right else "wrong"
                start = textwrap.shorten(answer, 100)
                print(f"{question:45} {form:5} {verdict:6} {len(answer.split()):4} words  {start}", flush=True)
    print(json.dumps({"right": right, "words": words, "questions": len(QUESTIONS)}))


if __name__ == "__main__":
    main()
