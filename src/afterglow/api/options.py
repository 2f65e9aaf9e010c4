"""Options of `load` and of requests, each declared once with its type, limits, default and description.

The keywords of the Python API, the flags of the commands, the environment variables, the settings file and
docs/settings.md are generated from these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_type_hints

import numpy as np
import psutil
import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from afterglow.chat.prompt import TruncationPolicy
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.llama.checks import INT32_MAX
from afterglow.llama.library.cpu import list_usable_cores
from afterglow.llama.model import ModelSettings, SplitMode
from afterglow.llama.sampling import Sampling
from afterglow.llama.settings import CacheType, ContextSettings, RopeScaling

BYTE_SIZE = pydantic.TypeAdapter(pydantic.ByteSize)
BYTES_MESSAGE = "must be a number of bytes, perhaps with a unit: 4GiB"
MESSAGES = {"path_type": "must be a path", "byte_size": BYTES_MESSAGE, "byte_size_unit": BYTES_MESSAGE}  # by error type
MESSAGE_NOISE = re.compile(r"^Value error, |, (unable to parse|got a) .*")  # in messages of pydantic
UNPLANNED_OPTIONS = {"context": 4096, "sequences": 4, "cache_type_k": "f16", "cache_type_v": "f16", "kv_unified": False}
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
ADAPTER_SCALE = re.compile(r"(.+)@(-?[0-9]+(?:\.[0-9]+)?)")
RerankerKind: TypeAlias = Literal["classifier", "generative"]
OptionsT = TypeVar("OptionsT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def parse_list(value: Any) -> Any:
    """Return text as a list: items separated by commas, or a JSON list, as in environment variables.

    >>> parse_list("3,1"), parse_list('["a,b", "c"]')
    (['3', '1'], ['a,b', 'c'])
    """
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return value.split(",")
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("must be a JSON list if it starts with `[`, or items separated by commas") from None


def parse_bytes(value: Any) -> Any:
    """Return a size with a unit as a number of bytes; other values unchanged.

    >>> parse_bytes("4KiB")
    4096
    """
    return int(BYTE_SIZE.validate_python(value)) if isinstance(value, str) else value


def parse_adapters(value: Any) -> Any:
    """Return adapters as paths and scales by name. Text is NAME=PATH, or NAME=PATH@SCALE, separated by commas.

    >>> parse_adapters({"style": "style.gguf", "formal": ("formal.gguf", 0.5)})
    {'style': ('style.gguf', 1.0), 'formal': ('formal.gguf', 0.5)}
    >>> parse_adapters("style=style.gguf@0.8")
    {'style': ('style.gguf', 0.8)}
    """
    items = parse_list(value)
    if isinstance(items, list | tuple):
        parts = [str(item).partition("=") for item in items]
        if wrong := next((name for name, equals, path in parts if not (name and equals and path)), None):
            raise ValueError(f"must be NAME=PATH or NAME=PATH@SCALE, not {wrong!r}")
        items = {name.strip(): path.strip() for name, _, path in parts}
    if not isinstance(items, Mapping):
        return value
    adapters: dict[Any, Any] = {}
    for name, source in items.items():
        if not ADAPTER_NAME.fullmatch(str(name)):
            raise ValueError(f"has the name {name!r}; names are letters, digits, `.`, `_` and `-`")
        if isinstance(source, str | os.PathLike):
            match = ADAPTER_SCALE.fullmatch(os.fspath(source))
            adapters[name] = (match[1], float(match[2])) if match else (os.fspath(source), 1.0)
        elif isinstance(source, list | tuple) and len(source) == 2 and isinstance(source[0], str | os.PathLike):
            adapters[name] = os.fspath(source[0]), source[1]
        else:
            raise ValueError(f"must have a path, or a path and a scale, for {name!r}, not {source!r}")
    return adapters


def parse_lora(value: Any) -> Any:
    """Return adapters that are given as text, NAME or NAME@SCALE separated by commas, as names and pairs.

    >>> parse_lora("style,formal@0.5"), parse_lora(["style"])
    (['style', ('formal', 0.5)], ['style'])
    """
    if not isinstance(value, str):
        return value
    matches = [(part, ADAPTER_SCALE.fullmatch(part)) for part in parse_list(value)]
    return [(match[1], float(match[2])) if match else part for part, match in matches]


def _option(default: object, description: str, *, ge: float | None = None, le: float | None = None) -> Any:
    """Return the default, description and limits of an option, as metadata of its type."""
    return pydantic.Field(default=default, description=description, ge=ge, le=le)


ByteCount = Annotated[int, pydantic.BeforeValidator(parse_bytes)]


# --- load


class ContextOptions(TypedDict, total=False):
    """Options of weights and context."""

    context: Annotated[
        int | None,
        _option(
            None,
            "Maximum number of tokens of one request, prompt and completion together. Default: chosen by fit, up to "
            "the trained length.",
            ge=1,
            le=2**31 // 256,
        ),
    ]
    sequences: Annotated[
        int | None,
        _option(
            None,
            "Number of requests that run at the same time, and of conversations that stay in the KV cache. Default: "
            "chosen by fit, 4 if they fit.",
            ge=1,
            le=255,
        ),
    ]
    threads: Annotated[
        int | None, _option(None, "Number of CPU threads. Default: one per physical core.", ge=1, le=512)
    ]
    gpu_layers: Annotated[
        int | None,
        _option(None, "Number of layers on the GPU; -1: all. Default: as many as fit, if there is a GPU.", ge=-1),
    ]
    cpu_moe_layers: Annotated[
        int | None,
        _option(
            None,
            "Number of first layers whose experts stay in RAM, for mixture-of-experts models. Default: chosen by fit, "
            "as few as possible.",
            ge=0,
            le=512,
        ),
    ]
    split_mode: Annotated[
        SplitMode,
        _option("layer", "How several GPUs share the model: `layer`, `row` or `none` (only `main_gpu` is used)."),
    ]
    tensor_split: Annotated[
        Sequence[float],
        pydantic.BeforeValidator(parse_list),
        _option((), "Share of each GPU, e.g. 3 and 1. Default: by free memory."),
    ]
    main_gpu: Annotated[int, _option(0, "Number of the GPU that computes what is not split.", ge=0, le=255)]
    mmap: Annotated[bool, _option(True, "Map the model file into memory instead of reading it.")]
    mlock: Annotated[bool, _option(False, "Keep the model in RAM; it is never swapped out.")]
    batch: Annotated[
        int | None,
        _option(
            None, "Maximum rows of one decode: tokens of all requests together. Default: 512, or 16,384 on a GPU.", ge=1
        ),
    ]
    ubatch: Annotated[
        int | None,
        _option(
            None,
            "Maximum rows computed at once, at most `batch`. An image of a model with non-causal image attention "
            "must fit into it. Default: 512, or 2,048 on a GPU if the buffers fit.",
            ge=1,
        ),
    ]
    cache_type_k: Annotated[
        CacheType | None,
        _option(
            None, "Data type of the keys in the KV cache. Default: chosen by fit, `f16`, or `q8_0` if memory is short."
        ),
    ]
    cache_type_v: Annotated[
        CacheType | None,
        _option(
            None,
            "Data type of the values in the KV cache. Quantized types need flash attention. Default: chosen by fit, "
            "as `cache_type_k`.",
        ),
    ]
    flash_attention: Annotated[
        bool | None, _option(None, "Flash attention. Default: true if the model and the device support it.")
    ]
    kv_unified: Annotated[
        bool | None,
        _option(
            None,
            "Share `context` cells of the KV cache among all sequences, instead of as many for each. Default: chosen "
            "by fit, true if there is not enough memory for each.",
        ),
    ]
    swa_full: Annotated[
        bool,
        _option(
            False,
            "Keep all cells of sliding-window layers, not only the window. It takes more memory, and prompts can "
            "continue from any position without a checkpoint.",
        ),
    ]
    pooling: Annotated[
        Literal["model", "mean", "cls", "last"],
        _option(
            "model",
            "How the vectors of the tokens of a text become its embedding: their `mean`, that of the first (`cls`) or "
            "the `last` token. `model`: as in the model file, or the mean if it defines none.",
        ),
    ]
    rope_scaling: Annotated[
        RopeScaling,
        _option("model", "RoPE scaling: `none`, `linear`, `yarn` or `longrope`. `model`: as in the model file."),
    ]
    rope_freq_base: Annotated[float, _option(0.0, "RoPE base frequency. 0: from the model file.", ge=0)]
    rope_freq_scale: Annotated[
        float,
        _option(0.0, "RoPE frequency scale, e.g. 0.25 for 4 times the trained context. 0: from the model file.", ge=0),
    ]
    yarn_orig_ctx: Annotated[int, _option(0, "Trained context length for YaRN. 0: from the model file.", ge=0)]
    yarn_ext_factor: Annotated[
        float | None,
        _option(None, "YaRN extrapolation mix; 0 is full interpolation. Default: from the model file.", ge=0),
    ]
    yarn_attn_factor: Annotated[
        float | None,
        _option(
            None, "YaRN scale of the attention; needs a `yarn_ext_factor` of 0. Default: from the model file.", ge=0
        ),
    ]
    yarn_beta_fast: Annotated[
        float | None, _option(None, "YaRN correction limit for high frequencies. Default: from the model file.", ge=0)
    ]
    yarn_beta_slow: Annotated[
        float | None, _option(None, "YaRN correction limit for low frequencies. Default: from the model file.", ge=0)
    ]


class LoadOptions(ContextOptions, total=False):
    """Options of `afterglow.load` that a settings file can express.

    >>> small: LoadOptions = {"context": 512, "sequences": 1}
    >>> with afterglow.load("smollm2", **small) as other:
    ...     other.context_length
    512
    """

    replicas: Annotated[
        int,
        _option(
            1,
            "Number of engine processes of the model, each with its own KV cache and RAM prefix cache. They share the "
            "disk prefix cache, and each request goes to the one that is expected to respond first. For `serve`, and "
            'in Python with `host="process"`; other commands use one.',
            ge=1,
            le=64,
        ),
    ]
    disk_cache: Annotated[
        bool | None,
        _option(
            None,
            "Store computed prefixes on disk, so that they outlive the process. Needs a RAM prefix cache. Default: "
            "true, unless the environment variable AFTERGLOW_DISK_CACHE is `off`.",
        ),
    ]
    disk_cache_bytes: Annotated[
        ByteCount,
        _option(10 * 1024**3, "Size of the disk prefix cache of all models.", ge=0),
    ]
    shared_cache: Annotated[
        str | None,
        _option(
            None,
            "URL of an object store that several machines share as the slowest tier of the prefix cache, such as "
            "s3://bucket/path, or a directory. Credentials come from the environment. Needs the extra `store`. "
            "Default: none.",
        ),
    ]
    shared_cache_key_file: Annotated[
        str | os.PathLike[str] | None,
        _option(
            None,
            "File with a key of 64 hexadecimal digits: objects in the store are encrypted and authenticated with it. "
            "Default: not encrypted.",
        ),
    ]
    ram_cache_bytes: Annotated[
        ByteCount | None,
        _option(
            None,
            "Size of the RAM prefix cache. 0: nothing is stored, neither in RAM nor on disk. Default: chosen by fit, a "
            "quarter of the free memory, at most 2 GiB.",
            ge=0,
        ),
    ]
    pin_system_prompts: Annotated[bool, _option(False, "Never evict system prompts and tools from the prefix cache.")]
    max_token_gap: Annotated[
        float,
        _option(
            0.2, "Target for the time between two tokens of a response while other prompts prefill, in seconds.", ge=0
        ),
    ]
    deterministic: Annotated[
        bool,
        _option(False, "Bit-identical output regardless of load and cache contents; slower with concurrent requests."),
    ]
    draft: Annotated[
        str | os.PathLike[str] | None,
        _option(
            None,
            "Drafter for speculative decoding beside the n-gram drafter, used if it is faster: `mtp` for the MTP "
            "heads of the model, or the name or path of a smaller model with the same vocabulary.",
        ),
    ]
    speculation: Annotated[
        Literal["auto", "off"] | int,
        _option(
            "auto", "Draft length: `auto` (as long as it pays on this machine), `off`, or a fixed number of tokens."
        ),
    ]
    chat_template: Annotated[
        str | os.PathLike[str] | None,
        _option(
            None,
            "Jinja chat template that replaces the one of the model: a file; in Python, a `Path` or the template "
            "itself as text.",
        ),
    ]
    projector: Annotated[
        str | os.PathLike[str] | Literal[False] | None,
        _option(
            None,
            "Projector file for image and audio input; false: none. If it cannot be used, text still works. Default: "
            "the only `*mmproj*.gguf` in the directory of the model.",
        ),
    ]
    adapters: Annotated[
        Mapping[str, tuple[str, float]],
        pydantic.BeforeValidator(parse_adapters),
        _option(
            {},
            "LoRA adapters that requests can use, by name: a GGUF file for each, or a file and the default scale. As "
            "text: NAME=PATH or NAME=PATH@SCALE. Default: none.",
        ),
    ]
    replay: Annotated[
        bool,
        _option(
            True,
            "Keep the sampled tokens of responses, in RAM and beside the disk cache, so that later turns of a "
            "conversation contain exactly these tokens and are prefix hits.",
        ),
    ]
    strip_media: Annotated[
        bool,
        _option(False, "Drop images and audio that the model does not accept, with a warning, instead of an error."),
    ]
    shorten_embeddings: Annotated[
        bool | None,
        _option(
            None,
            "Whether embeddings may be shortened to the `dimensions` of a request: the model was trained for it "
            "(Matryoshka). Default: true for models whose name or tags say so.",
        ),
    ]
    reranker: Annotated[
        RerankerKind | None,
        _option(
            None,
            "How the model ranks documents: `classifier` (the score of its classification head) or `generative` (the "
            "probabilities of yes and no). Default: `classifier` if the model file has such a head.",
        ),
    ]


# --- requests


class SamplingOptions(TypedDict, total=False):
    """Sampling options of one generation, and of `load(…, sampling_defaults=…)`. `Sampling` has all parameters.

    >>> model.sampling_defaults.sampling.temperature
    0.8
    >>> careful: SamplingOptions = {"temperature": 0.3, "top_k": 20}
    >>> with afterglow.load("smollm2", context=512, sampling_defaults=careful) as other:
    ...     other.sampling_defaults.sampling.temperature
    0.3
    """

    temperature: Annotated[
        float | None,
        _option(
            None,
            "Sampling temperature; 0 always chooses the most likely token. Default: from the model file, else 0.8. "
            "`complete` and `stream` of Python: 0.",
            ge=0,
            le=100,
        ),
    ]
    top_k: Annotated[
        int | None,
        _option(
            None,
            "Sample from the k most likely tokens; 0: from all. Default: from the model file, else 40.",
            ge=0,
            le=INT32_MAX,
        ),
    ]
    top_p: Annotated[
        float | None,
        _option(
            None,
            "Sample from the most likely tokens that together have this probability; 1: from all. Default: from the "
            "model file, else 0.95.",
            ge=0,
            le=1,
        ),
    ]
    min_p: Annotated[
        float | None,
        _option(
            None,
            "Sample from tokens with at least this fraction of the probability of the most likely one; 0: from all. "
            "Default: from the model file, else 0.05.",
            ge=0,
            le=1,
        ),
    ]
    repeat_penalty: Annotated[
        float | None,
        _option(
            None,
            "Divides the logits of the last 64 tokens, e.g. by 1.1; 1: off. Default: from the model file, else 1.",
            ge=1e-6,
            le=1e6,
        ),
    ]


class GenerationOptions(SamplingOptions, total=False):
    """Options of one generation: sampling, limits and use of the cache.

    >>> short: GenerationOptions = {"max_tokens": 5, "temperature": 0.0}
    >>> len(model.complete("Once upon a time", **short).tokens)
    5
    """

    max_tokens: Annotated[
        int | None,
        _option(
            None,
            "Maximum number of generated tokens. Default: until an end token or until the context is full.",
            ge=0,
        ),
    ]
    min_tokens: Annotated[
        int, _option(0, "End tokens are forbidden until this many tokens are generated.", ge=0, le=INT32_MAX)
    ]
    seed: Annotated[
        int | None, _option(None, "Makes sampling repeatable. Default: a new random seed for each request.")
    ]
    sampling: Annotated[
        pydantic.InstanceOf[Sampling] | None,
        _option(
            None,
            "All sampling parameters, instead of the options `temperature` to `repeat_penalty` and of the defaults of "
            "the model. `seed` replaces its seed.",
        ),
    ]
    stop: Annotated[
        list[str] | tuple[str, ...], _option((), "Strings that end the text. They are not part of the result.")
    ]
    logprobs: Annotated[
        int | None,
        _option(
            None,
            "Number of alternatives to return with the logprob of each token. Default: no logprobs.",
            ge=0,
            le=1000,
        ),
    ]
    sequence: Annotated[
        int | None, _option(None, "Number of the KV cache sequence to use. Default: the engine chooses.", ge=0)
    ]
    boundaries: Annotated[
        list[int] | tuple[int, ...] | frozenset[int],
        _option(
            (),
            "Prompt lengths at which a later prompt may diverge from this one; the engine takes checkpoints there. "
            "Chat prompts have their message boundaries already.",
        ),
    ]
    priority: Annotated[
        int,
        _option(0, "Requests with a higher priority go first; below 0: background work, which gives way to others."),
    ]
    deadline: Annotated[
        float | None,
        _option(None, "Seconds after which generation ends with what there is, with finish reason `deadline`.", ge=0),
    ]
    use_prefix_cache: Annotated[bool, _option(True, "Whether cached prefixes may be used.")]
    ignore_eos: Annotated[bool, _option(False, "Continue after end tokens.")]
    overflow: Annotated[
        TruncationPolicy,
        _option(
            "refuse",
            "Policy for a prompt that exceeds the context: `refuse` (`PromptTooLong`), `shift` (drop the oldest "
            "turns of a chat, or the start of a prompt), `truncate_middle`, or `compact` (the model summarizes the "
            "old messages of a chat first). All but `refuse` also leave space for the response: `max_tokens`, or a "
            "quarter of the context. `truncation` of the result says what was dropped or summarized.",
        ),
    ]
    lora: Annotated[
        list[str | tuple[str, float]] | tuple[str | tuple[str, float], ...] | dict[str, float],
        pydantic.BeforeValidator(parse_lora),
        _option(
            (),
            "LoRA adapters to use, of those that were declared at load: names, each with its default scale or in a "
            'pair with a scale, e.g. `["style", ("formal", 0.5)]`, or a dictionary of scales. As text: NAME or '
            "NAME@SCALE, separated by commas. Default: none, the base model.",
        ),
    ]
    salt: Annotated[
        str, _option("", "Cache salt, e.g. of a tenant. Requests with different salts never share cached state.")
    ]


class PromptOptions(TypedDict, total=False):
    """Options that change the prompt of a chat or constrain its response.

    >>> yes_or_no: PromptOptions = {"response_format": {"type": "choice", "choices": ["yes", "no"]}}
    >>> model.chat("Is snow black?", temperature=0, **yes_or_no).text
    'no'
    """

    tool_choice: Annotated[
        str | Mapping[str, Any] | None,
        _option(
            None,
            "`none`, `auto`, `required`, or the dictionary that names a function. Default: `auto` if there are tools.",
        ),
    ]
    parallel_tool_calls: Annotated[bool, _option(True, "Whether one response may contain several tool calls.")]
    response_format: Annotated[
        object,
        _option(
            None,
            "The format of OpenAI; its name, `text` or `json_object`; or "
            '`{"type": "regex", "pattern": …}`, `{"type": "choice", "choices": […]}`, '
            '`{"type": "grammar", "grammar": …, "syntax": "lark" or "gbnf"}`; or a type, e.g. a pydantic class, '
            "which also parses the response.",
        ),
    ]
    reasoning: Annotated[
        bool | int | str | None,
        _option(
            None,
            "Whether to reason (true or false), a reasoning budget in tokens, or an effort, e.g. `low`. Default: as "
            "in the chat template.",
        ),
    ]
    chat_template: Annotated[
        str | None,
        _option(None, "Jinja chat template of this request, as text. Default: the one of the model."),
    ]
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, _option(None, "Additional variables for the template.")]
    replay: Annotated[
        bool,
        _option(
            True,
            "Use the tokens that the model sampled for its earlier messages, if the conversation contains them "
            "unchanged, and keep those of the response for later turns.",
        ),
    ]


class ChatGenerationOptions(GenerationOptions, PromptOptions, total=False):
    """Options of one response of a chat: those of `PromptOptions` and `GenerationOptions`.

    >>> brief: ChatGenerationOptions = {"max_tokens": 3, "reasoning": False}
    >>> model.chat("What is 2+2?", **brief).finish_reason
    'length'
    """


# --- declarations


@functools.cache
def get_fields(declaration: type) -> dict[str, FieldInfo]:
    """Return the declared options by name, with type, limits, default and description.

    >>> get_fields(LoadOptions)["mmap"].default
    True
    """
    hints = get_type_hints(declaration, include_extras=True)
    return {name: FieldInfo.from_annotation(hint) for name, hint in hints.items()}


def format_default(name: str, field: FieldInfo) -> str:
    """Return the default of an option as text; empty if it has none or if its description says it.

    >>> format_default("disk_cache_bytes", get_fields(LoadOptions)["disk_cache_bytes"])
    '10GiB'
    """
    default = field.default
    if default in (None, (), "", {}) or "default" in (field.description or "").lower():
        return ""
    if isinstance(default, bool):
        return "true" if default else "false"
    if name.endswith("_bytes"):
        return pydantic.ByteSize(default).human_readable().replace(".0", "")
    return f"{default:g}" if isinstance(default, float) else str(default)


def describe_option(name: str, field: FieldInfo) -> str:
    """Return the description of an option with its default.

    >>> describe_option("mlock", get_fields(LoadOptions)["mlock"])
    'Keep the model in RAM; it is never swapped out. Default: false.'
    """
    default = format_default(name, field).removesuffix(".")
    return f"{field.description or ''} {f'Default: {default}.' if default else ''}".strip()


def document_options(declaration: type) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that appends the declared options to a docstring, for `help()` and notebooks."""

    def decorate(function: FunctionT) -> FunctionT:
        text = _describe_options(declaration)
        function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    Options:\n{text}\n    "
        return function

    return decorate


@functools.cache
def _describe_options(declaration: type) -> str:
    options = [f"        {name}: {describe_option(name, field)}" for name, field in get_fields(declaration).items()]
    return "\n".join(textwrap.fill(option, 120, subsequent_indent=" " * 12) for option in options)


# --- checks


@functools.cache
def _get_adapter(declaration: type) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(declaration)


def check_options(declaration: type[OptionsT], values: Mapping[str, Any], *, others: Iterable[str] = ()) -> OptionsT:
    """Check options against their declaration and return all of them, with defaults for those not given.

    Types are strict: no text is parsed to a number. `others` are the names of further keywords, for suggestions.

    >>> check_options(LoadOptions, {"context": 512})["swa_full"]
    False
    >>> check_options(LoadOptions, {"contxt": 512})
    Traceback (most recent call last):
    afterglow.errors.InvalidArgument: `contxt` is not an option; did you mean 'context'?
    """
    kind: type = declaration
    known = get_fields(kind)
    for name in values:
        if name not in known:
            names = [other for other in (*known, *others) if other != name]
            raise InvalidArgument(name, f"is not an option; {suggest_name(name, names)}")
    adapter: pydantic.TypeAdapter[OptionsT] = _get_adapter(kind)
    try:
        return adapter.validate_python(values, strict=True)
    except pydantic.ValidationError as error:
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
        if any(plain[name] is not value for name, value in values.items()):  # numbers of numpy are numbers
            return check_options(declaration, plain)
        details = error.errors(include_url=False)
        raise InvalidArgument(str(details[0]["loc"][0]), describe_errors(details)) from None


def select_options(declaration: type[OptionsT], options: Mapping[str, object]) -> OptionsT:
    """Return the options that belong to a declaration.

    >>> select_options(PromptOptions, {"max_tokens": 5, "reasoning": False})
    {'reasoning': False}
    """
    names: type = declaration
    return cast(OptionsT, {name: value for name, value in options.items() if name in get_fields(names)})


def check_salt(salt: str) -> str:
    """Return a cache salt; raise `InvalidArgument` if it is no text, or cannot be encoded.

    >>> check_salt("tenant")
    'tenant'
    """
    if not isinstance(salt, str):
        raise InvalidArgument("salt", f"must be text, not {salt!r}")
    if any("\ud800" <= character <= "\udfff" for character in salt):
        raise InvalidArgument("salt", "must not contain an unpaired surrogate")
    return salt


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint to the nearest known name.

    >>> suggest_name("temprature", ["seed", "temperature"])
    "did you mean 'temperature'?"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"valid names are {', '.join(names)}"


def describe_errors(errors: Sequence[ErrorDetails], depth: int = 1, *, show_value: bool = True) -> str:
    """Describe why the first invalid value is invalid. A union type has one error per alternative.

    `depth` is the number of leading parts of a location that name the value.
    """

    def get_indices(error: ErrorDetails) -> list[int]:
        return [part for part in error["loc"][depth:] if isinstance(part, int)]

    same = [error for error in errors if error["loc"][:depth] == errors[0]["loc"][:depth]]
    inner = max(same, key=lambda error: len(get_indices(error)))  # an item of a list, if one is invalid
    messages = [
        MESSAGES.get(error["type"]) or MESSAGE_NOISE.sub("", error["msg"])
        for error in same
        if get_indices(error) == get_indices(inner)
    ]
    reasons = " or ".join(dict.fromkeys(messages)).replace("Input should", "must").replace("or must be", "or")
    place = "".join(f"[{index}] " for index in get_indices(inner))
    names_value = ", not " in reasons  # messages of our own name the wrong item
    value = f", not {textwrap.shorten(repr(inner['input']), 80)}" if show_value and not names_value else ""
    return f"{place}{reasons}{value}"


# --- settings of weights, context and engine


def select_fields(
    kind: type[ModelSettings | ContextSettings | EngineSettings], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in options.items() if name in names}


def build_model_settings(options: ContextOptions) -> ModelSettings:
    """Return the settings of the weights, without GPU layers if their number is not set."""
    values = select_fields(ModelSettings, options)
    layers = {"gpu_layers": options["gpu_layers"] or 0, "cpu_moe_layers": options["cpu_moe_layers"] or 0}
    return ModelSettings(**values | layers | {"tensor_split": tuple(options["tensor_split"])})


def build_context_settings(options: ContextOptions) -> ContextSettings:
    """Return context settings for `sequences` requests of `context` tokens each, which share them if `kv_unified`.

    `plan_fit` chooses the options that are None; without a plan they have the values of `UNPLANNED_OPTIONS`.

    >>> build_context_settings(check_options(ContextOptions, {"context": 1024, "sequences": 3})).cells
    3072
    """
    unset = {name: value for name, value in UNPLANNED_OPTIONS.items() if options.get(name) is None}
    options = cast(ContextOptions, {**options, **unset})
    context, sequences = cast(int, options["context"]), cast(int, options["sequences"])
    defaults, batch, ubatch, threads = ContextSettings(), options["batch"], options["ubatch"], options["threads"]
    if batch is not None and ubatch is not None and ubatch > batch:
        raise InvalidArgument("ubatch", f"is {ubatch}, but must be at most `batch`, {batch}")
    values = select_fields(ContextSettings, options) | {
        "cells": context if options["kv_unified"] else sequences * context,
        "outputs": max(64, sequences),
        "threads": count_usable_cores() if threads is None else threads,
        "batch": max(defaults.batch, ubatch or 0) if batch is None else batch,
        "ubatch": defaults.ubatch if ubatch is None else ubatch,
    }
    return ContextSettings(**values)


def count_usable_cores() -> int:
    """Return the number of physical cores this process may use. Hyper-threads would slow matrix products down."""
    allowed = len(list_usable_cores())
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
