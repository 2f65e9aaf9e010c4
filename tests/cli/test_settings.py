"""Settings: flags override the environment, the environment the file, the file the defaults. No key is ignored."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from afterglow import paths, registry
from afterglow.cli import open_model, serve, settings
from afterglow.cli.commands import app, load_command
from afterglow.cli.serve import parse_drafts
from afterglow.cli.settings import (
    Settings,
    apply_ollama_definition,
    load_command_settings,
    load_settings,
    parse_reasoning,
)
from afterglow.errors import InvalidArgument
from afterglow.registry import OllamaDefinition
from afterglow.server.settings import hash_api_key
from afterglow.testing import models
from support.commands import run_in_process


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text("")
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(path))
    return path


def test_what_ollama_stores_with_a_model_applies_unless_it_is_set(file, monkeypatch):
    definition = OllamaDefinition(path=Path("model"), system="from Ollama", parameters={"num_predict": 5})
    monkeypatch.setattr(registry, "read_ollama_definition", lambda name: definition)
    settings = apply_ollama_definition(load_settings())
    assert (settings.system, settings.generation_options["max_tokens"]) == ("from Ollama", 5)
    file.write_text("max_tokens = 7\n")
    settings = apply_ollama_definition(load_settings(system="given"))
    assert (settings.system, settings.generation_options["max_tokens"]) == ("given", 7)


def test_flags_override_the_environment_the_file_and_the_defaults(file, monkeypatch):
    assert load_settings().load_options["context"] is None
    file.write_text("context = 1000\nmax_tokens = 7\nsystem = 'from the file'\n")
    assert load_settings().load_options["context"] == 1000
    monkeypatch.setenv("AFTERGLOW_CONTEXT", "2000")
    assert load_settings().load_options["context"] == 2000
    assert load_settings(context=3000).load_options["context"] == 3000
    assert (load_settings().generation_options["max_tokens"], load_settings().system) == (7, "from the file")


def test_an_unknown_key_in_the_file_is_an_error_with_a_suggestion(file):
    file.write_text("contxt = 1000\n")
    with pytest.raises(InvalidArgument, match=r"contxt` is not a setting; did you mean 'context'"):
        load_settings()


def test_an_unknown_environment_variable_is_an_error_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("AFTERGLOW_TEMPRATURE", "1")
    with pytest.raises(InvalidArgument, match=r"TEMPRATURE` is not a setting; did you mean 'AFTERGLOW_TEMPERATURE'"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("context = 0", "context` must be greater than or equal to 1, not 0"),
        ("context = 'many'", "context` must be a valid integer, not 'many'"),
        ("temperature = -1", "temperature` must be greater than or equal to 0, not -1"),
        ("seed = 1.5", "seed` must be a valid integer, not 1.5"),
        ("split_mode = 'rows'", "split_mode` must be 'none', 'layer' or 'row', not 'rows'"),
        ("chat_template = 3", "chat_template` must be a path, not 3"),
        ("server = 3", "server` must be a valid dictionary"),
        ("ram_cache_bytes = '3XB'", "ram_cache_bytes` must be a number of bytes, perhaps with a unit: 4GiB, not '3XB'"),
        ("[server]\nmedia_directory = '/none'", "server.media_directory` must be an existing directory, not '/none'"),
        ("[server]\nmedia_directory = '~nobody2/a'", "server.media_directory` must be an existing directory, not '~n"),
        ("[server]\nport = 'x'", "server.port` must be a valid integer, not 'x'"),
        ("[server]\nprot = 1", "server.prot` is not a setting; did you mean 'port'?"),
    ],
)
def test_an_error_in_the_file_names_the_file_the_key_and_what_is_valid(file, text, message):
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(f"`{file}: {message}")):
        load_settings()


def test_an_error_names_the_wrong_value_once(file):
    file.write_text("[server]\naliases = ['a', 'b=c']")
    with pytest.raises(InvalidArgument) as caught:
        load_settings()
    assert str(caught.value).endswith("server.aliases` must be PATTERN=MODEL, not 'a'")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AFTERGLOW_CONTEXT", "many", "` must be a valid integer, not 'many'"),
        ("AFTERGLOW_TENSOR_SPLIT", "3,x", "` [1] must be a valid number, not 'x'"),
        ("AFTERGLOW_SERVER_PORT", "-1", "` must be greater than or equal to 0, not '-1'"),
        ("AFTERGLOW_SERVER_PRT", "1", "` is not a setting; did you mean 'AFTERGLOW_SERVER_PORT'?"),
    ],
)
def test_an_error_in_a_variable_names_the_variable(file, monkeypatch, variable, value, message):
    file.write_text("context = 512\n[server]\nport = 1\n")
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidArgument, match=re.escape(f"`{variable}{message}")):
        load_settings()


def test_an_error_in_a_flag_names_the_flag(monkeypatch):
    monkeypatch.setenv("AFTERGLOW_SPLIT_MODE", "layer")
    result = CliRunner().invoke(app, ["serve", "--split-mode", "rows"])
    assert str(result.exception) == "`--split-mode` must be 'none', 'layer' or 'row', not 'rows'"
    result = CliRunner().invoke(app, ["serve", "--stall-seconds", "0"])
    assert str(result.exception) == "`--stall-seconds` must be greater than 0, not 0.0"
    result = CliRunner().invoke(app, ["serve", "--lazy-load", "--media-directory", "/none"])
    assert str(result.exception) == "`--media-directory` must be an existing directory, not '/none'"
    result = CliRunner().invoke(app, ["serve", "--media-host", "example.com", "--media-host", "https://x.y"])
    reason = "must be hostnames such as example.com or *.example.com, not 'https://x.y'"
    assert str(result.exception) == f"`--media-host` {reason}"
    result = CliRunner().invoke(app, ["serve", "--contxt", "512"])
    assert (result.exit_code, "--context" in result.output) == (2, True)


def test_an_error_never_shows_an_api_key(file):
    file.write_text("[server]\napi_keys = ['sha256:secret']\n")
    with pytest.raises(InvalidArgument, match="64 lower-case hexadecimal digits") as caught:
        load_settings()
    assert "secret" not in str(caught.value)


def test_lists_in_variables_are_separated_by_commas(monkeypatch, tmp_path):
    (tmp_path / "keys").write_text("c\n")
    monkeypatch.setenv("AFTERGLOW_SERVER_API_KEYS", "a,b")
    monkeypatch.setenv("AFTERGLOW_SERVER_API_KEY_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AFTERGLOW_SERVER_ALLOW_HOSTS", "x.example,y.example")
    server = load_settings().server
    assert server.api_keys == tuple(map(hash_api_key, "abc"))
    assert server.allow_hosts == ("x.example", "y.example")


def test_sizes_may_have_a_unit(file, monkeypatch):
    file.write_text("disk_cache_bytes = '3GiB'\n")
    monkeypatch.setenv("AFTERGLOW_SERVER_MAX_BODY_BYTES", "2MiB")
    settings = load_settings(ram_cache_bytes="5MiB")
    assert settings.load_options["disk_cache_bytes"] == 3 * 1024**3
    assert settings.load_options["ram_cache_bytes"] == 5 * 1024**2
    assert settings.server.max_body_bytes == 2 * 1024**2


def test_an_invalid_or_missing_file_is_an_error(file, monkeypatch):
    file.write_text("= 1")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_settings()
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(file) + "x")
    with pytest.raises(InvalidArgument, match="does not exist"):
        load_settings()


def test_the_page_of_the_settings_is_up_to_date():
    root = Path(__file__).parents[2]
    page = runpy.run_path(str(root / "scripts" / "write_settings_page.py"))["build_page"]()
    assert (root / "docs" / "settings.md").read_text() == page, "run `make docs`"


@pytest.mark.native
def test_a_command_uses_the_file(file):
    file.write_text(f"model = '{models.get_path('successor-attention')}'\nmax_tokens = 3\n")
    assert len(run_in_process("chat", stdin="hello").stdout.strip("\n")) == 3
    assert len(run_in_process("chat", "--max-tokens", "5", stdin="hello").stdout.strip("\n")) == 5


def test_every_setting_is_passed_on(monkeypatch, tmp_path):
    """Each setting reaches the model, the engine or the generation options."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    settings = load_settings(
        context=512,
        sequences=3,
        threads=1,
        gpu_layers=0,
        chat_template=template,
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        repeat_penalty=1.5,
        seed=3,
        max_tokens=9,
        reasoning="off",
        pin_system_prompts=True,
        disk_cache_bytes="3GiB",
        ram_cache_bytes="5MiB",
        max_token_gap=0.5,
        speculation=4,
        projector=tmp_path / "mmproj.gguf",
        strip_media=True,
        adapters=["style=style.gguf@0.8"],
        lora="style@0.5",
    )
    load_options: dict[str, Any] = {}
    monkeypatch.setattr(open_model, "load", lambda path, **options: load_options.update(options))
    monkeypatch.setattr(open_model, "resolve_or_pull", lambda name: name)
    open_model.open_model(settings, Console(stderr=True))
    expected = {"context": 512, "sequences": 3, "threads": 1, "gpu_layers": 0}
    expected |= {"projector": tmp_path / "mmproj.gguf", "strip_media": True, "chat_template": template}
    expected |= {"adapters": {"style": ("style.gguf", 0.8)}}
    expected |= {"disk_cache_bytes": 3 * 1024**3, "ram_cache_bytes": 5 * 1024**2}
    expected |= {"pin_system_prompts": True, "max_token_gap": 0.5, "speculation": 4}
    assert {name: load_options[name] for name in expected} == expected
    monkeypatch.setattr(serve, "load", lambda path, **options: load_options.update(served=options))
    serve.build_model_registry({"tiny": models.get_path("attention")}, settings).get_slot("tiny").served.open_model()
    served = load_options["served"]
    assert {name: served[name] for name in expected} == expected
    sampling = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "repeat_penalty": 1.5}
    assert load_options["sampling_defaults"] == served["sampling_defaults"] == sampling
    generation = {"max_tokens": 9, "seed": 3, "reasoning": False, "lora": [("style", 0.5)], "overflow": "shift"}
    assert settings.generation_options == generation


LOAD_FLAGS = {"context": 512, "threads": 2, "gpu_layers": 1}
CHAT_FLAGS = {"chat_template": Path("template"), "projector": "mmproj", "strip_media": True}
SAMPLING_FLAGS = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "repeat_penalty": 1.5}
GENERATION_FLAGS = {"system": "Be brief.", "max_tokens": 9, "seed": 3, "reasoning": "low"} | SAMPLING_FLAGS
SERVER_FLAGS = {
    "stall_seconds": 3.0,
    "max_buffered_tokens": 5,
    "max_queue": 2,
    "lazy_load": True,
    "shutdown_seconds": 1.0,
    "host": "::1",
    "port": 0,
}
MEDIA_FLAGS = {"media_directory": Path(__file__).parent, "max_media_bytes": 7, "max_image_pixels": 8}


def to_arguments(flags: dict[str, object]) -> list[str]:
    """Return flags as command line arguments."""
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items()]
    return [text for flag, value in pairs for text in ([flag] if value is True else [flag, str(value)])]


@pytest.mark.parametrize(
    ("name", "arguments", "flags"),
    [
        ("chat", ["--no-markdown", "--no-stats", "small"], LOAD_FLAGS | CHAT_FLAGS | GENERATION_FLAGS),
        ("run", ["--model", "small", "Why?"], LOAD_FLAGS | CHAT_FLAGS | GENERATION_FLAGS),
        ("perplexity", ["--model", "small", "text.txt"], LOAD_FLAGS),
        ("explain", ["--model", "small", "prompt.txt"], {"chat_template": Path("template")}),
    ],
)
def test_every_flag_of_a_command_sets_its_setting(name, arguments, flags):
    context = load_command(name).make_context(name, [*to_arguments(flags), *arguments])
    settings = load_command_settings(context)
    expected = flags | {"model": "small"} | ({"markdown": False, "stats": False} if name == "chat" else {})
    assert {name: getattr(settings, name) for name in expected} == expected


def test_every_flag_of_serve_sets_its_setting(monkeypatch, tmp_path):
    served: list[tuple[dict[str, str], Settings]] = []
    monkeypatch.setattr(serve, "serve_models", lambda *all, opens_page: served.append(all))
    (tmp_path / "keys").write_text("c\n\nd\n")
    repeated = ["--api-key", "a", "--api-key", "b", "--allow-origin", "o", "--media-host", "h", "--draft", "mtp"]
    repeated += ["--draft", "big=small", "--api-key-file", str(tmp_path / "keys"), "--allow-host", "n"]
    repeated += ["--alias", "gpt-*=big", "--alias", "o3=other"]
    flags = (
        LOAD_FLAGS
        | CHAT_FLAGS
        | SAMPLING_FLAGS
        | {"sequences": 3, "pin_system_prompts": True, "max_token_gap": 0.5, "deterministic": True}
        | {"ram_cache_bytes": 5, "disk_cache_bytes": 7, "speculation": 4}
    )
    server_flags = SERVER_FLAGS | MEDIA_FLAGS
    arguments = [*to_arguments(flags | server_flags), *repeated, "big=large", "/x/other.gguf"]
    CliRunner().invoke(app, ["serve", *arguments])
    served_models, settings = served[0]
    assert served_models == {"big": "large", "other": "/x/other.gguf"}
    assert {name: getattr(settings, name) for name in flags} == flags
    assert {name: getattr(settings.server, name) for name in server_flags} == server_flags
    assert settings.draft == "mtp,big=small"
    assert settings.server.api_keys == tuple(map(hash_api_key, "abcd"))
    server = settings.server
    assert (server.allow_hosts, server.allow_origins, server.media_hosts) == (("n",), ("o",), ("h",))
    assert server.aliases == ("gpt-*=big", "o3=other")


def test_aliases_are_a_table_of_the_file_or_a_list(file, monkeypatch):
    file.write_text("[server.aliases]\n'claude-*' = 'small'\no3 = 'big'\n")
    assert load_settings().server.aliases == ("claude-*=small", "o3=big")
    monkeypatch.setenv("AFTERGLOW_SERVER_ALIASES", "gpt-*=small,o3=big")
    assert load_settings().server.aliases == ("gpt-*=small", "o3=big")
    monkeypatch.setenv("AFTERGLOW_SERVER_ALIASES", "gpt-*")
    with pytest.raises(InvalidArgument, match=r"AFTERGLOW_SERVER_ALIASES.*PATTERN=MODEL, not 'gpt-\*'"):
        load_settings()


def test_absent_flags_do_not_override_the_file(file, monkeypatch):
    served: list[tuple[dict[str, str], Settings]] = []
    monkeypatch.setattr(serve, "serve_models", lambda *all, opens_page: served.append(all))
    file.write_text("model = 'small'\ndraft = 'mtp'\n[server]\nport = 9\napi_keys = ['a']\nmedia_hosts = ['h']\n")
    CliRunner().invoke(app, ["serve"])
    served_models, settings = served[0]
    assert (served_models, settings.draft) == ({"small": "small"}, "mtp")
    keys = (hash_api_key("a"),)
    assert (settings.server.port, settings.server.api_keys, settings.server.media_hosts) == (9, keys, ("h",))


@pytest.mark.native
def test_the_system_prompt_changes_the_response(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    model = str(models.get_path("successor-attention"))
    command = ("chat", model, "--max-tokens", "3", "--chat-template", str(template))
    first = run_in_process(*command, "--system", "a", stdin="x")
    second = run_in_process(*command, "--system", "b", stdin="x")
    assert first.stdout != second.stdout


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("on", True), ("off", False), ("64", 64), ("low", "low"), ("²", "²"), ("٣", "٣"), (None, None)],
)
def test_the_reasoning_flag_is_parsed(value, meaning):
    assert parse_reasoning(value) == meaning


@pytest.mark.native
@pytest.mark.parametrize("value", ["²", "9" * 5000])
def test_a_reasoning_flag_that_only_looks_like_a_number_is_an_error(value):
    result = run_in_process("run", str(models.get_path("attention")), "x", "--reasoning", value, "--context", "64")
    assert result.returncode == 1
    assert "`reasoning` must be" in result.stderr


@pytest.mark.native
def test_a_missing_chat_template_is_an_error():
    model = str(models.get_path("attention"))
    result = run_in_process("chat", model, "--chat-template", "/nowhere.jinja", stdin="x")
    assert result.returncode == 1
    assert "/nowhere.jinja cannot be read" in result.stderr


@pytest.mark.native
def test_a_drafter_applies_to_all_models_or_to_the_named_one():
    small = models.get_path("draft")
    assert parse_drafts(f"mtp,one={small}", ["one", "two"]) == {"one": small, "two": "mtp"}
    assert parse_drafts(str(small), ["one"]) == {"one": small}
    assert parse_drafts(None, ["one"]) == {}
    with pytest.raises(InvalidArgument, match=r"'other' is not served; the models are one"):
        parse_drafts("other=mtp", ["one"])


@pytest.mark.native
def test_projector_and_strip_media_apply_to_a_command(tmp_path):
    Image.new("RGB", (40, 30), (230, 20, 20)).save(tmp_path / "red.png")
    model, projector = str(models.get_path("colors")), str(models.get_path("projector-colors"))
    image = ("--image", str(tmp_path / "red.png"))
    result = run_in_process("chat", model, "--projector", projector, *image, stdin="What colour is this?")
    assert result.stdout.strip() == "R"
    unsupported = run_in_process("chat", model, *image, stdin="What colour is this?")
    assert unsupported.returncode == 1
    assert "does not support image input" in unsupported.stderr
    stripped = run_in_process("chat", model, "--strip-media", *image, stdin="What colour is this?")
    assert stripped.stdout.strip() == "N"


@pytest.mark.parametrize("variable", ["AFTERGLOW_SETTINGS", "AFTERGLOW_CACHE", "AFTERGLOW_DATA"])
def test_the_home_directory_of_an_unknown_user_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "~nobody_here/afterglow")
    places = {
        "AFTERGLOW_SETTINGS": settings.get_settings_path,
        "AFTERGLOW_CACHE": lambda: paths.get_cache_directory("models"),
        "AFTERGLOW_DATA": lambda: paths.get_data_directory("agents"),
    }
    with pytest.raises(InvalidArgument, match=f"`{variable}` names ~nobody_here/afterglow, but there is no such user"):
        places[variable]()
