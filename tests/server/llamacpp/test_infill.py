"""Prompts of /infill for models with other special tokens, on a vocabulary whose tokens are characters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from afterglow.server.llamacpp.infill import build_infill_prompt
from afterglow.server.llamacpp.schema import LlamaInfillRequest

GAP = {"fim_pre": ord("P"), "fim_suf": ord("S"), "fim_mid": ord("M")}
PROJECT = {"fim_rep": ord("R"), "fim_sep": ord("F")}


def build(special: dict[str, int], context: int = 32768, max_tokens: int | None = None, **fields: Any) -> str:
    """Build the prompt of a body and return it as text."""
    vocabulary = SimpleNamespace(special_tokens=special, adds_bos="bos" in special)
    model: Any = SimpleNamespace(
        name="coder",
        vocabulary=vocabulary,
        context_length=context,
        tokenize=lambda text, special=False: [ord(character) for character in text],
    )
    body = LlamaInfillRequest.model_validate({"input_prefix": "abc", "input_suffix": "xyz", **fields})
    return "".join(map(chr, build_infill_prompt(model, body, max_tokens)))


def test_every_prompt_names_a_project_and_a_file_if_the_model_has_tokens_for_them() -> None:
    assert build(GAP | PROJECT) == "Rmyproject\nFfilename\nPabcSxyzM"
    files = [{"text": "one", "filename": "a.py"}, {"text": "two"}]
    start = "Rmyproject\nFa.py\noneFtmp\ntwoFfilename\n"
    assert build(GAP | PROJECT, input_extra=files, prompt="jk") == f"{start}PabcjkSxyzM"


def test_files_are_separated_by_text_if_the_model_has_no_token_for_them() -> None:
    separator = "\n\n--- snippet ---\n\n"
    files = [{"text": "one", "filename": "a.py"}, {"text": "two"}]
    assert build(GAP, input_extra=files) == f"{separator}one{separator}twoPabcSxyzM"


def test_the_bos_token_is_behind_the_files() -> None:
    assert build(GAP | {"fim_rep": ord("R"), "bos": ord("B")}) == "Rmyproject\nBPabcSxyzM"


def test_three_quarters_of_a_batch_are_before_the_gap() -> None:
    prompt = build(GAP, input_prefix="ab" * 4000, input_suffix="xy" * 4000, prompt="jk")
    before, after = prompt.removeprefix("P").split("S")
    assert before == "ab" * 768 + "jk"
    assert after == "xy" * 254 + "M"


def test_files_fill_the_context_that_no_output_needs() -> None:
    files = [{"text": "d" * 9000}]
    assert build(GAP, 4096, 500, input_extra=files).count("d") == 4096 - 2048 - 2 * 500
    short = build(GAP, 4096, input_extra=files)
    assert short.count("d") == 4096 - 2048 - 2 * 128
    assert build(GAP, 4096, input_extra=files, n_predict=0) == short  # a request that only fills the cache
