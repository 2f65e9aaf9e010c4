"""Prompts of /infill, token for token as llama-server builds them."""

from __future__ import annotations

from afterglow.api.model import Model
from afterglow.server.llamacpp.errors import not_supported_error
from afterglow.server.llamacpp.schema import LlamaInfillRequest

PROJECT_NAME, FILE_NAME, EXTRA_FILE_NAME = "myproject", "filename", "tmp"
FILE_SEPARATOR = "\n\n--- snippet ---\n\n"  # if the model has no token for it
# llama-server cuts the text around the gap to its batch, by default of this size. The batch of afterglow is smaller and
# limits no prompt.
MAX_LOCAL_TOKENS = 2048
RESERVED_TOKENS = 128  # for the output, if the server has no maximum; llama-server leaves none


def build_infill_prompt(model: Model, body: LlamaInfillRequest, max_tokens: int | None) -> list[int]:
    """Build the fill-in-the-middle prompt of a body: other files, text before the gap with `prompt`, text after it.

    The text around the gap is cut to a batch, three quarters before the gap, and the files to the rest of the context.
    `max_tokens` is the default of the server: every request must reserve as much, or the files would be cut elsewhere
    and their prefix would not be found in the cache.
    """
    special = model.vocabulary.special_tokens
    missing = [name for name in ("fim_pre", "fim_suf", "fim_mid") if name not in special]
    if missing:
        raise not_supported_error(f"infill is not supported by {model.name!r}: it has no token {', '.join(missing)}")
    context = model.context_length
    reserved = 2 * min(max_tokens or RESERVED_TOKENS, context // 4)
    quarter = min(MAX_LOCAL_TOKENS, context - reserved) // 4
    prompt = model.tokenize(body.prompt or "", special=True)
    before = take_last(model.tokenize(body.input_prefix), 3 * quarter)
    after = model.tokenize(body.input_suffix)[: max(0, quarter - 2 - len(prompt))]
    files = take_last(build_file_tokens(model, body), context - reserved - 4 * quarter)
    bos = [special["bos"]] if model.vocabulary.adds_bos and "bos" in special else []  # behind the files
    return [*files, *bos, special["fim_pre"], *before, *prompt, special["fim_suf"], *after, special["fim_mid"]]


def build_file_tokens(model: Model, body: LlamaInfillRequest) -> list[int]:
    """Return the tokens of the project, its other files, and the head of the file with the gap."""
    special, tokens = model.vocabulary.special_tokens, []
    if "fim_rep" in special:
        tokens += [special["fim_rep"], *model.tokenize(f"{PROJECT_NAME}\n")]

    def build_head(name: str) -> list[int]:
        return [special["fim_sep"], *model.tokenize(f"{name}\n")]

    has_separator = "fim_sep" in special
    for file in body.input_extra or ():
        name = EXTRA_FILE_NAME if file.filename is None else file.filename
        tokens += build_head(name) if has_separator else model.tokenize(FILE_SEPARATOR)
        tokens += model.tokenize(file.text)
    return tokens + (build_head(FILE_NAME) if has_separator else [])


def take_last(tokens: list[int], count: int) -> list[int]:
    """Return the last tokens, at most `count`.

    >>> take_last([1, 2, 3], 2), take_last([1, 2, 3], 0)
    ([2, 3], [])
    """
    return tokens[max(0, len(tokens) - count) :]
