"""What each coding agent needs: addresses, models, limits and switches; no request goes to another host."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from afterglow.cli.clients import CLIENTS, Endpoint, Setup, get_client
from afterglow.errors import InvalidArgument

ENDPOINT = Endpoint(
    url="http://127.0.0.1:9000",
    model="coder",
    context_tokens=65_536,
    api_key="secret",
    directory=Path("/data/launch"),
)


def build(name: str) -> Setup:
    return CLIENTS[name].build_setup(ENDPOINT)


def write(setup: Setup) -> str:
    """Return everything that a setup contains as one text."""
    return "\n".join([*setup.environment.values(), *setup.arguments, *setup.files.values()])


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_gets_the_address_the_model_and_the_key(name: str) -> None:
    text = write(build(name))
    assert all(part in text for part in ("http://127.0.0.1:9000", "coder", "secret", "65536"))
    hosts = set(re.findall(r"https?://([^/\"\s]+)", text)) - {"charm.land"}  # a schema, which is not fetched
    assert hosts == {"127.0.0.1:9000"}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_of_a_server_without_keys_gets_a_placeholder(name: str) -> None:
    endpoint = Endpoint(url="http://[::1]:1", model="m", context_tokens=65_536, directory=Path("/data"))
    assert "none" in write(CLIENTS[name].build_setup(endpoint))


@pytest.mark.parametrize("name", CLIENTS)
def test_files_are_in_a_directory_of_afterglow(name: str) -> None:
    assert all(path.parent == ENDPOINT.directory for path in build(name).files)


def test_claude_code_uses_one_model_for_everything_and_sends_no_changing_header() -> None:
    environment = build("claude").environment
    assert {value for key, value in environment.items() if key.endswith("MODEL")} == {"coder"}
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert environment["ANTHROPIC_API_KEY"] == ""
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"


def test_the_overrides_of_codex_are_toml() -> None:
    flags, overrides = build("codex").arguments[::2], build("codex").arguments[1::2]
    assert set(flags) == {"-c"}
    settings = tomllib.loads("\n".join(overrides))
    assert settings["model"] == "coder"
    assert settings["model_context_window"] == 65_536
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:9000/v1"
    assert build("codex").environment == {provider["env_key"]: "secret"}


def test_the_configurations_of_opencode_and_crush_are_json() -> None:
    opencode = json.loads(build("opencode").environment["OPENCODE_CONFIG_CONTENT"])
    assert opencode["model"] == opencode["small_model"] == "afterglow/coder"
    assert opencode["provider"]["afterglow"]["models"]["coder"]["limit"] == {"context": 65_536, "output": 16_384}
    (crush,) = map(json.loads, build("crush").files.values())
    assert crush["models"]["large"] == {"provider": "afterglow", "model": "coder"}
    assert crush["providers"]["afterglow"]["models"][0]["context_window"] == 65_536


def test_aider_knows_the_limits_of_the_model() -> None:
    setup = build("aider")
    ((path, text),) = setup.files.items()
    assert setup.environment["AIDER_MODEL_METADATA_FILE"] == str(path)
    assert json.loads(text)[setup.environment["AIDER_MODEL"]]["max_input_tokens"] == 65_536


def test_an_unknown_client_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="claude, codex, opencode, aider, crush, not 'clippy'"):
        get_client("clippy")
