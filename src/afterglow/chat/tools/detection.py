"""Detects the tool family of a model from the source of its chat template."""

from __future__ import annotations

from afterglow.chat.template.capabilities import reads_variable
from afterglow.chat.tools.families import (
    deepseek_kimi,
    gemma,
    harmony,
    hermes,
    llama,
    minimax_m3,
    mistral,
    named_json,
    pythonic,
    xml,
)
from afterglow.chat.tools.family import ToolFamily

# The first line whose texts all occur in the template decides. More specific lines come first: several families share
# `<tool_call>` and differ only in the text inside it.
TEMPLATE_MARKERS: tuple[tuple[tuple[str, ...], ToolFamily], ...] = (
    (("<|channel|>", "<|message|>", "to="), harmony.HARMONY),
    (("<start_function_call>",), gemma.FUNCTION_GEMMA),
    (("<|tool_call>call:",), gemma.GEMMA),
    (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), deepseek_kimi.KIMI),
    (("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), xml.KIMI_K3),
    (("｜DSML｜", "function_calls>"), xml.DEEPSEEK_DSML),  # noqa: RUF001 - full-width bars of the model's vocabulary
    (("｜DSML｜", "tool_calls>"), xml.DEEPSEEK_DSML_CALLS),  # noqa: RUF001
    (("<｜tool▁call▁begin｜>", "```json"), deepseek_kimi.DEEPSEEK),  # noqa: RUF001
    (("<｜tool▁call▁begin｜>",), deepseek_kimi.DEEPSEEK_NAMED),  # noqa: RUF001
    (("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), mistral.MISTRAL_IDS),
    (("[TOOL_CALLS]", "[ARGS]"), mistral.MISTRAL_NAMED),
    (("[TOOL_CALLS]",), mistral.MISTRAL),
    (("<seed:tool_call>", "<function="), xml.SEED),
    (("<minimax:tool_call>", "<invoke name="), xml.MINIMAX),
    (("]<]minimax[>[", "<invoke name="), minimax_m3.MINIMAX_M3),
    (("<invoke name=",), hermes.GENERIC),  # same tag names in an unsupported format
    (("<tool_calls>[",), hermes.APRIEL),
    (("<tool_call>", "<function=", "<parameter="), xml.QWEN_CODER),
    (("<tool_call>", "<arg_key>", "<arg_value>"), xml.GLM),
    (("<TOOLCALL>[",), hermes.NEMOTRON),
    (("<|START_ACTION|>", "tool_name"), hermes.COHERE),
    (("<|tools_prefix|>", "<|tools_suffix|>"), named_json.APERTUS),
    (("<|function_call|>",), hermes.GIGACHAT),
    (("<|message_sep|>", "<|role_sep|>", "function call"), hermes.GIGACHAT_ROLE),
    (('<function name="', '<param name="', "<![CDATA["), xml.MINICPM),
    ((">>>all", ">>>${recipient}"), named_json.FUNCTIONARY),
    (("functools[",), hermes.FIREFUNCTION),
    (("<|tool_call|>",), hermes.GRANITE),
    (("<tool_call>",), hermes.HERMES),
    (("<function=", "</function>"), named_json.FUNCTIONARY_TAGS),
    (("<|tool_call_start|>",), pythonic.LFM),
    (("List of tools: <|tool_list_start|>",), pythonic.LFM),
    (("List of tools: [",), pythonic.LFM),
    (("```tool_code",), pythonic.TOOL_CODE),
    (("[func_name1(params_name1=",), pythonic.PYTHONIC),
    (('"name": function name, "parameters": dictionary',), llama.LLAMA),
)
TOOL_FAMILIES = {family.name: family for family in (hermes.GENERIC, *(family for _, family in TEMPLATE_MARKERS))}


def detect_family(template: str | None) -> ToolFamily:
    """Return the family of a template; `generic` if it has no tools or an unsupported call format.

    The template of a generic model gets no tools: `render_tools_as_text` describes them in the system message. So do
    the instructions of a family whose template writes calls but never lists the tools.

    >>> detect_family("{{ messages[0].content }}").name
    'generic'
    """
    if template is None:
        return hermes.GENERIC
    lists_tools = reads_variable(template, "tools") or reads_variable(template, "functions")
    for texts, family in TEMPLATE_MARKERS:
        if all(text in template for text in texts):
            return family if lists_tools or family.instructions else hermes.GENERIC
    return hermes.GENERIC
