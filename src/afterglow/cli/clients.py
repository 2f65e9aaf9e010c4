"""Coding agents that `afterglow launch` can start: what each needs to use this server. No I/O.

Settings are environment variables, arguments and files of our own, so that the user's configuration of a client is
neither read nor changed by us.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from afterglow.errors import InvalidArgument

NO_KEY = "none"  # clients refuse to start without a key, and a server without keys ignores it
KEY_VARIABLE = "LOCAL_MODEL_API_KEY"  # not AFTERGLOW_…: `afterglow` refuses unknown variables with that prefix
MAX_OUTPUT_FRACTION = 1 / 4  # of the context, for a response
TIMEOUT_MILLISECONDS = 3_600_000  # the first prompt on a CPU may take many minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A served model."""

    url: str
    model: str
    context_tokens: int
    api_key: str | None = None
    directory: Path  # for files of the client that are ours

    @property
    def key(self) -> str:
        """API key, or a placeholder."""
        return self.api_key or NO_KEY

    @property
    def max_output_tokens(self) -> int:
        """Longest response that a client should request."""
        return int(self.context_tokens * MAX_OUTPUT_FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a client needs for one endpoint."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # before those of the user
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A coding agent."""

    name: str
    title: str
    install: str  # command
    min_context_tokens: int  # its first prompt, and room to work
    needs_tools: bool = True
    build_setup: Callable[[Endpoint], Setup]


def _build_claude(endpoint: Endpoint) -> Setup:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
    return Setup(
        environment={
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.key,
            "ANTHROPIC_API_KEY": "",  # one in the environment of the user would be sent as well
            **{f"ANTHROPIC_{name}": endpoint.model for name in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_output_tokens),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.context_tokens),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # the first line of the system prompt, which may change
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(TIMEOUT_MILLISECONDS),
        }
    )


def _build_codex(endpoint: Endpoint) -> Setup:
    provider = "model_providers.afterglow"
    settings: dict[str, str | int | bool] = {
        "model": endpoint.model,
        "model_provider": "afterglow",
        "model_context_window": endpoint.context_tokens,
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        f"{provider}.name": "afterglow",
        f"{provider}.base_url": f"{endpoint.url}/v1",
        f"{provider}.env_key": KEY_VARIABLE,
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": TIMEOUT_MILLISECONDS,
    }
    # A JSON string, number or boolean is also a TOML value.
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    arguments = tuple(part for override in overrides for part in ("-c", override))
    return Setup(environment={KEY_VARIABLE: endpoint.key}, arguments=arguments)


def _build_opencode(endpoint: Endpoint) -> Setup:
    limit = {"context": endpoint.context_tokens, "output": endpoint.max_output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "afterglow",
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.key, "timeout": False},
        "models": {endpoint.model: {"name": endpoint.model, "limit": limit}},
    }
    model = f"afterglow/{endpoint.model}"
    configuration = {
        "provider": {"afterglow": provider},
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
    }
    return Setup(
        environment={
            "OPENCODE_CONFIG_CONTENT": json.dumps(configuration),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def _build_aider(endpoint: Endpoint) -> Setup:
    model = f"openai/{endpoint.model}"
    metadata = {
        "max_input_tokens": endpoint.context_tokens,
        "max_output_tokens": endpoint.max_output_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    file = endpoint.directory / "aider.model.metadata.json"
    return Setup(
        environment={
            "OPENAI_API_BASE": f"{endpoint.url}/v1",
            "OPENAI_API_KEY": endpoint.key,
            "AIDER_MODEL": model,
            "AIDER_WEAK_MODEL": model,
            "AIDER_MODEL_METADATA_FILE": str(file),
            "AIDER_TIMEOUT": str(TIMEOUT_MILLISECONDS // 1000),
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_ANALYTICS": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
        },
        files={file: json.dumps({model: metadata}, indent=2) + "\n"},
    )


def _build_crush(endpoint: Endpoint) -> Setup:
    model = {
        "id": endpoint.model,
        "name": endpoint.model,
        "context_window": endpoint.context_tokens,
        "default_max_tokens": endpoint.max_output_tokens,
    }
    provider = {
        "name": "afterglow",
        "type": "openai-compat",
        "base_url": f"{endpoint.url}/v1",
        "api_key": endpoint.key,
        "models": [model],
    }
    selected = {"provider": "afterglow", "model": endpoint.model}
    configuration = {
        "$schema": "https://charm.land/crush.json",
        "providers": {"afterglow": provider},
        "models": {"large": selected, "small": selected},
        "options": {"disable_provider_auto_update": True, "disable_metrics": True},
    }
    file = endpoint.directory / "crush.json"
    return Setup(
        environment={"CRUSH_GLOBAL_CONFIG": str(endpoint.directory), "CRUSH_DISABLE_METRICS": "1"},
        files={file: json.dumps(configuration, indent=2) + "\n"},
    )


# First prompts in tokens of SmolLM2: Claude Code 11,759, Codex 8,820, OpenCode 7,615; and about as much again to work.
CLIENTS = {
    client.name: client
    for client in (
        Client(
            name="claude",
            title="Claude Code",
            install="npm install -g @anthropic-ai/claude-code",
            min_context_tokens=32_768,
            build_setup=_build_claude,
        ),
        Client(
            name="codex",
            title="Codex",
            install="npm install -g @openai/codex",
            min_context_tokens=16_384,
            build_setup=_build_codex,
        ),
        Client(
            name="opencode",
            title="OpenCode",
            install="npm install -g opencode-ai",
            min_context_tokens=16_384,
            build_setup=_build_opencode,
        ),
        Client(
            name="aider",
            title="aider",
            install="python -m pip install aider-install && aider-install",
            min_context_tokens=8_192,
            needs_tools=False,
            build_setup=_build_aider,
        ),
        Client(
            name="crush",
            title="Crush",
            install="npm install -g @charmland/crush",
            min_context_tokens=16_384,
            build_setup=_build_crush,
        ),
    )
}


def get_client(name: str) -> Client:
    """Return a client by its name.

    >>> get_client("codex").title
    'Codex'
    """
    if name not in CLIENTS:
        raise InvalidArgument("CLIENT", f"must be one of {', '.join(CLIENTS)}, not {name!r}")
    return CLIENTS[name]
