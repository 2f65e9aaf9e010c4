"""Detects the tool family of a model from the source of its chat template."""

from __future__ import annotations

from afterglow.chat.template.capabilities import reads_variable
from afterglow.chat.tools.families.deepseek_kimi import DEEPSEEK, DEEPSEEK_NAMED, KIMI
from afterglow.chat.tools.families.gemma import FUNCTION_GEMMA, GEMMA
from afterglow.chat.tools.families.harmony import HARMONY
from afterglow.chat.tools.families.hermes import (
    APRIEL,
    COHERE,
    FIREFUNCTION,
    GENERIC,
    GIGACHAT,
    GIGACHAT_ROLE,
    GRANITE,
    HERMES,
    NEMOTRON,
)
from afterglow.chat.tools.families.llama import LLAMA
from afterglow.chat.tools.families.minimax_m3 import MINIMAX_M3
from afterglow.chat.tools.families.mistral import MISTRAL, MISTRAL_IDS, MISTRAL_NAMED
from afterglow.chat.tools.families.named_json import APERTUS, FUNCTIONARY, FUNCTIONARY_TAGS
from afterglow.chat.tools.families.pythonic import LFM, PYTHONIC, TOOL_CODE
from afterglow.chat.tools.families.xml import (
    DEEPSEEK_DSML,
    DEEPSEEK_DSML_CALLS,
    GLM,
    KIMI_K3,
    MINICPM,
    MINIMAX,
    QWEN_CODER,
    SEED,
)
from afterglow.chat.tools.family import ToolFamily

# The first line whose texts all occur in the template decides. More specific lines come first: several families share
# `<tool_call>` and differ only in the text inside it.
TEMPLATE_MARKERS: tuple[tuple[tuple[str, ...], ToolFamily], ...] = (
    (("<|channel|>", "<|message|>", "to="), HARMONY),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>call:",), GEMMA),
    (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), KIMI),
    (("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), KIMI_K3),
    (("｜DSML｜", "function_calls>"), DEEPSEEK_DSML),  # noqa: RUF001
    (("｜DSML｜", "tool_calls>"), DEEPSEEK_DSML_CALLS),  # noqa: RUF001
    (("<｜tool▁call▁begin｜>", "```json"), DEEPSEEK),  # noqa: RUF001 - full-width bars of the model's vocabulary
    (("<｜tool▁call▁begin｜>",), DEEPSEEK_NAMED),  # noqa: RUF001
    (("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), MISTRAL_IDS),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<seed:tool_call>", "<function="), SEED),
    (("<minimax:tool_call>", "<invoke name="), MINIMAX),
    (("]<]minimax[>[", "<invoke name="), MINIMAX_M3),
    (("<invoke name=",), GENERIC),  # same tag names in an unsupported format
    (("<tool_calls>[",), APRIEL),
    (("<tool_call>", "<function=", "<parameter="), QWEN_CODER),
    (("<tool_call>", "<arg_key>", "<arg_value>"), GLM),
    (("<TOOLCALL>[",), NEMOTRON),
    (("<|START_ACTION|>", "tool_name"), COHERE),
    (("<|tools_prefix|>", "<|tools_suffix|>"), APERTUS),
    (("<|function_call|>",), GIGACHAT),
    (("<|message_sep|>", "<|role_sep|>", "function call"), GIGACHAT_ROLE),
    (('<function name="', '<param name="', "<![CDATA["), MINICPM),
    ((">>>all", ">>>${recipient}"), FUNCTIONARY),
    (("functools[",), FIREFUNCTION),
    (("<|tool_call|>",), GRANITE),
    (("<tool_call>",), HERMES),
    (("<function=", "</function>"), FUNCTIONARY_TAGS),
    (("<|tool_call_start|>",), LFM),
    (("List of tools: <|tool_list_start|>",), LFM),
    (("List of tools: [",), LFM),
    (("```tool_code",), TOOL_CODE),
    (("[func_name1(params_name1=",), PYTHONIC),
    (('"name": function name, "parameters": dictionary',), LLAMA),
)
TOOL_FAMILIES = {family.name: family for family in (GENERIC, *(family for _, family in TEMPLATE_MARKERS))}


def detect_family(template: str | None) -> ToolFamily:
    """Return the family of a template; `generic` if it has no tools or an unsupported call format.

    The template of a generic model gets no tools: `render_tools_as_text` describes them in the system message. So do
    the instructions of a family whose template writes calls but never lists the tools.

    >>> detect_family("{{ messages[0].content }}").name
    'generic'
    """
    if template is None:
        return GENERIC
    lists_tools = reads_variable(template, "tools") or reads_variable(template, "functions")
    for texts, family in TEMPLATE_MARKERS:
        if all(text in template for text in texts):
            return family if lists_tools or family.instructions else GENERIC
    return GENERIC
