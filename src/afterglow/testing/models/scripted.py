"""Models that play a script, by construction: after k tool results they write the k-th answer of the script.

The chat template is of the Hermes family and ends the prompt with a token that says how many tool results there are.
The answers are chains of tokens of their own, and the logits depend on the last token only: each token is followed by
the next one of its chain, and any other token by the end of the turn. Prompts of any text are short enough for tests
with real clients: the vocabulary has the merges of `merges.txt`, which were trained on the documentation of afterglow.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from gguf import TokenType

from afterglow.errors import InvalidArgument
from afterglow.testing.models.attention import Llama
from afterglow.testing.models.vocabulary import build_byte_alphabet
from afterglow.testing.models.writer import FloatArray, ModelWriter, draw_noise

CONTEXT_LENGTH_TOKENS = 131_072
NEXT_TOKEN_LOGIT = 64.0
MIN_MARGIN_LOGIT = 24.0  # to the second most likely token: it is sampled at any temperature
MIN_PIECE_CHARACTERS = 3
CALL_PATTERN = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
STRING_PATTERN = re.compile(r': "((?:[^"\\]|\\.)*)"')
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_OF_TEXT_TOKEN, _, TURN_END_TOKEN, PADDING_TOKEN = range(len(CONTROL_TOKENS))
_DECODER = Llama(embedding_length=128, layers=1, heads=1, kv_heads=1, feed_forward_length=32)
_SEED = 13

# The answer is chosen by the token before it, so it stands before answers in the history as well.
CHAT_TEMPLATE = """\
{%- set state = namespace(results=0) -%}
{%- set last_step = LAST_STEP -%}
{%- macro start_answer() -%}
<|im_start|>assistant
{% if tools %}<|step_{{ [state.results, last_step] | min }}|>{% else %}<|no_tools|>{% endif %}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

Return a call as a JSON object within <tool_call></tool_call> tags. The functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ start_answer() }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if message.content or not loop.first %}
{% endif -%}
<tool_call>
{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% elif message.role == 'tool' -%}
{%- set state.results = state.results + 1 -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ start_answer() }}{% endif -%}
"""


def write_scripted_model(path: Path, answers: Sequence[str], *, answer_without_tools: str = "Done.") -> None:
    """Write a model that plays a script.

    `answers`: after how many tool results each is written; the last one also after more. `answer_without_tools`: what
    it writes if a request has no tools, such as a request for the title of a conversation.
    """
    scripts = {"<|no_tools|>": answer_without_tools}
    scripts |= {f"<|step_{number}|>": answer for number, answer in enumerate(answers)}
    merges = resources.files(__package__).joinpath("merges.txt").read_text("utf-8").splitlines()
    alphabet = build_byte_alphabet()
    base = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    used = set(base)
    chains = [_split_answer(answer, alphabet, used) for answer in scripts.values()]
    control = [*CONTROL_TOKENS, *scripts]
    tokens = [*control, *base, *(piece for chain in chains for piece in chain)]
    kinds = [TokenType.CONTROL] * len(control) + [TokenType.NORMAL] * (len(tokens) - len(control))
    unused = -len(tokens) % 32  # matrix kernels need multiples of 32 rows
    tokens += [f"<|unused_{number}|>" for number in range(unused)]
    kinds += [TokenType.UNUSED] * unused
    with ModelWriter(path, _DECODER.architecture, seed=_SEED) as writer:
        _write_metadata(writer, tokens, kinds, merges, last_step=len(answers) - 1)
        _write_tensors(writer, len(tokens), _find_successors(chains, first=len(control) + len(base)))


def _split_answer(answer: str, alphabet: Sequence[str], used: set[str]) -> list[str]:
    """Split a text into the tokens of its chain, in GPT-2's spelling. No token may occur twice in a vocabulary."""
    spelled = ["".join(alphabet[byte] for byte in character.encode()) for character in answer]
    ends = _find_free_positions(answer)

    def split(start: int) -> list[str] | None:
        if start == len(spelled):
            return []
        for end in ends[bisect_left(ends, start + MIN_PIECE_CHARACTERS) :]:
            piece = "".join(spelled[start:end])
            if piece not in used:
                used.add(piece)
                if (rest := split(end)) is not None:
                    return [piece, *rest]
                used.remove(piece)
        return None

    if (pieces := split(0)) is None:
        raise InvalidArgument("answers", f"must not be short and equal, but contains {answer!r} again")
    return pieces


def _find_free_positions(answer: str) -> list[int]:
    """Return the positions where a token may end: outside of calls, and inside the string arguments of calls.

    The other text of a call follows from the definition of the tool. If a token started there, the grammar of the
    tools would replace it by the one of the tokenizer.
    """
    positions = set(range(1, len(answer) + 1))
    for call in CALL_PATTERN.finditer(answer):
        positions -= set(range(call.start(1) + 1, call.end()))
        for value in [*STRING_PATTERN.finditer(answer, *call.span(1))][1:]:  # the first one is the name of the tool
            positions |= {end for end in range(value.start(1) + 1, value.end(1)) if answer[end - 1] != "\\"}
    return sorted(positions)


def _find_successors(chains: Sequence[Sequence[str]], first: int) -> dict[int, int]:
    """Return the token after each token that starts or continues a chain."""
    successors = {}
    for number, chain in enumerate(chains):
        previous = len(CONTROL_TOKENS) + number
        for token in range(first, first + len(chain)):
            successors[previous] = previous = token
        first += len(chain)
    return successors


def _write_metadata(
    writer: ModelWriter, tokens: Sequence[str], kinds: Sequence[TokenType], merges: Sequence[str], *, last_step: int
) -> None:
    writer.add_metadata("tokenizer", {"chat_template": CHAT_TEMPLATE.replace("LAST_STEP", str(last_step))})
    writer.add_metadata(
        "tokenizer.ggml",
        {
            "model": "gpt2",
            "pre": "qwen2",
            "tokens": tokens,
            "token_type": [int(kind) for kind in kinds],
            "merges": merges,
            "bos_token_id": END_OF_TEXT_TOKEN,
            "eos_token_id": TURN_END_TOKEN,
            "eot_token_id": TURN_END_TOKEN,
            "padding_token_id": PADDING_TOKEN,
            "add_bos_token": False,
        },
    )
    sizes = {
        "context_length": CONTEXT_LENGTH_TOKENS,
        "embedding_length": _DECODER.embedding_length,
        "vocab_size": len(tokens),
    }
    writer.add_metadata(_DECODER.architecture, {**sizes, **_DECODER.build_metadata()})


def _write_tensors(writer: ModelWriter, size: int, successors: dict[int, int]) -> None:
    embedding, output = _build_tables(size, successors)
    writer.add_tensor("token_embd.weight", embedding, half=True)
    writer.add_constant("output_norm.weight", 1.0, _DECODER.embedding_length)
    writer.add_tensor("output.weight", output, half=True)
    _DECODER.write_blocks(writer, gain=0.0)  # they add nothing


def _build_tables(size: int, successors: dict[int, int]) -> tuple[FloatArray, FloatArray]:
    """Return a row per token of the embedding and of the output: a token responds to the direction of the one before.

    Tokens without a successor share a direction, to which the end of a turn responds.
    """
    width = _DECODER.embedding_length
    directions = np.sign(draw_noise(_SEED, "directions", len(successors) + 1, width, scale=1.0))
    embedding = np.tile(directions[-1], (size, 1)) + draw_noise(_SEED, "tokens", size, width, scale=0.05)
    output = draw_noise(_SEED, "output", size, width, scale=0.01)
    embedding[list(successors)] = directions[:-1]
    gain = np.float32(NEXT_TOKEN_LOGIT / width)
    output[list(successors.values())] += directions[:-1] * gain
    output[TURN_END_TOKEN] += directions[-1] * gain
    best = np.sort(embedding @ output.T, axis=1)[:, -2:]
    assert np.all(best[:, 1] - best[:, 0] > MIN_MARGIN_LOGIT), "the script is too long for the width of the model"
    return embedding, output
