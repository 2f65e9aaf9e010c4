"""One precedence: flags, then the environment, then the file, then the defaults; and no key is ever ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from afterglow.cli import open_model, serve
from afterglow.cli.chat import build_generation_options, parse_reasoning
from afterglow.cli.main import app
from afterglow.cli.serve import build_served_settings, parse_drafts
from afterglow.cli.settings import Settings, load_command_settings, load_settings
from afterglow.engine.types.settings import EngineSettings
from afterglow.errors import InvalidArgument
from afterglow.testing import models as tiny
from cli.test_main import run


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text("")
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(path))
    return path


def test_flags_come_before_the_environment_before_the_file_before_the_defaults(file, monkeypatch):
    assert load_settings().context == 4096
    file.write_text("context = 1000\nmax_tokens = 7\nsystem = 'from the file'\n")
    assert load_settings().context == 1000
    monkeypatch.setenv("AFTERGLOW_CONTEXT", "2000")
    assert load_settings().context == 2000
    assert load_settings(context=3000).context == 3000
    assert (load_settings().max_tokens, load_settings().system) == (7, "from the file")


def test_an_unknown_key_of_the_file_is_an_error_with_a_suggestion(file):
    file.write_text("contxt = 1000\n")
    with pytest.raises(InvalidArgument, match=r"contxt` is not a setting; did you mean 'context'"):
        load_settings()


def test_an_unknown_variable_is_an_error_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("AFTERGLOW_TEMPRATURE", "1")
    with pytest.raises(InvalidArgument, match=r"did you mean 'temperature'"):
        load_settings()


@pytest.mark.parametrize("text", ["context = 1", "context = 'many'", "temperature = -1", "seed = 1.5"])
def test_a_value_that_cannot_be_is_refused_by_its_name(file, text):
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=text.split()[0]):
        load_settings()


def test_a_file_that_is_no_toml_or_not_there_is_said(file, monkeypatch):
    file.write_text("= 1")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_settings()
    monkeypatch.setenv("AFTERGLOW_SETTINGS", str(file) + "x")
    with pytest.raises(InvalidArgument, match="is not there"):
        load_settings()


def test_every_setting_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    for name in Settings.model_fields:
        assert f"`{name}`" in text, name


def test_a_command_obeys_the_file(file):
    file.write_text(f"model = '{tiny.get_path('successor-attention')}'\nmax_tokens = 3\n")
    done = run("chat", question="hello")
    assert len(done.stdout.strip("\n")) == 3
    assert len(run("chat", "--max-tokens", "5", question="hello").stdout.strip("\n")) == 5


def test_the_commands_hand_every_setting_on(monkeypatch, tmp_path):
    """What is in the settings arrives at the model, at the answer, or at the page that shows it."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    chosen = load_settings(
        context=512,
        sequences=3,
        threads=1,
        gpu_layers=0,
        chat_template=template,
        temperature=0.5,
        seed=3,
        max_tokens=9,
        reasoning="off",
        pin_system=True,
        disk_bytes="3GiB",
        ram_bytes="5MiB",
        gap=0.5,
        speculation=4,
        deterministic=True,
        projector=tmp_path / "mmproj.gguf",
        strip_media=True,
    )
    told: dict[str, object] = {}
    monkeypatch.setattr(open_model, "load", lambda path, **options: told.update(options))
    monkeypatch.setattr(open_model, "resolve_or_pull", lambda name: name)
    open_model.open_model(chosen, Console(stderr=True))
    expected = {"context": 512, "sequences": 3, "threads": 1, "gpu_layers": 0}
    expected |= {"projector": tmp_path / "mmproj.gguf", "strip_media": True}
    assert {name: told[name] for name in expected} == expected
    assert told["chat_template"] == "{{ messages[0].content }}"
    sizes = {"disk_bytes": 3 * 1024**3, "ram_bytes": 5 * 1024**2}
    engine = EngineSettings(pin_system_prompts=True, max_token_gap=0.5, speculation=4, deterministic=True, **sizes)
    assert told["engine"] == build_served_settings(chosen).engine == engine
    assert build_served_settings(chosen).projector == tmp_path / "mmproj.gguf"
    assert build_served_settings(chosen).strip_media
    assert build_served_settings(load_settings()).engine == EngineSettings()
    assert build_generation_options(chosen) == {"max_tokens": 9, "temperature": 0.5, "seed": 3, "reasoning": False}


LOADING = {"context": 512, "threads": 2, "gpu_layers": 1}
TALKING = {"chat_template": Path("template"), "projector": Path("mmproj"), "strip_media": True}
ASKING = {"system": "Be brief.", "max_tokens": 9, "temperature": 0.5, "seed": 3, "reasoning": "low"}
SERVING = {"queue": 2, "lazy": True, "shutdown_seconds": 1.0, "host": "::1", "port": 0}
MEDIA = {"media_directory": Path("pictures"), "max_media_bytes": 7, "max_pixels": 8}


def written(flags: dict[str, object]) -> list[str]:
    """Flags as they are typed."""
    words = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items()]
    return [text for flag, value in words for text in ([flag] if value is True else [flag, str(value)])]


@pytest.mark.parametrize(
    ("name", "arguments", "flags"),
    [
        ("chat", ["--no-markdown", "--no-stats", "small"], LOADING | TALKING | ASKING),
        ("run", ["--model", "small", "Why?"], LOADING | TALKING | ASKING),
        ("perplexity", ["--model", "small", "text.txt"], LOADING),
        ("explain", ["--model", "small", "prompt.txt"], {"chat_template": Path("template")}),
    ],
)
def test_every_flag_of_a_command_becomes_its_setting(name, arguments, flags):
    chosen = load_command_settings(get_command(app).commands[name].make_context(name, [*written(flags), *arguments]))
    expected = flags | {"model": "small"} | ({"markdown": False, "stats": False} if name == "chat" else {})
    assert {name: getattr(chosen, name) for name in expected} == expected


def test_every_flag_of_serve_becomes_its_setting(monkeypatch, tmp_path):
    served: list[tuple[dict[str, str], Settings]] = []
    monkeypatch.setattr(serve, "serve_models", lambda *all: served.append(all))
    (tmp_path / "keys").write_text("c\n\nd\n")
    several = ["--api-key", "a", "--api-key", "b", "--allow-origin", "o", "--media-host", "h", "--draft", "mtp"]
    several += ["--draft", "big=small", "--api-key-file", str(tmp_path / "keys")]
    flags = (
        LOADING
        | TALKING
        | {"sequences": 3, "pin_system": True, "gap": 0.5, "deterministic": True, "ram_bytes": 5, "disk_bytes": 7}
        | {"speculation": 4}
    )
    CliRunner().invoke(app, ["serve", *written(flags | SERVING | MEDIA), *several, "big=large", "/x/other.gguf"])
    models, chosen = served[0]
    assert models == {"big": "large", "other": "/x/other.gguf"}
    assert {name: getattr(chosen, name) for name in flags} == flags
    assert {name: getattr(chosen.server, name) for name in SERVING | MEDIA} == SERVING | MEDIA
    assert chosen.draft == "mtp,big=small"
    assert chosen.server.api_keys == ("a", "b", "c", "d")
    assert (chosen.server.allow_origins, chosen.server.media_hosts) == (("o",), ("h",))


def test_flags_that_were_not_given_leave_the_file_its_word(file, monkeypatch):
    served: list[tuple[dict[str, str], Settings]] = []
    monkeypatch.setattr(serve, "serve_models", lambda *all: served.append(all))
    file.write_text("model = 'small'\ndraft = 'mtp'\n[server]\nport = 9\napi_keys = ['a']\nmedia_hosts = ['h']\n")
    CliRunner().invoke(app, ["serve"])
    models, chosen = served[0]
    assert (models, chosen.draft) == ({"small": "small"}, "mtp")
    assert (chosen.server.port, chosen.server.api_keys, chosen.server.media_hosts) == (9, ("a",), ("h",))


def test_a_system_prompt_and_plain_answers_are_obeyed(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    model = str(tiny.get_path("successor-attention"))
    first = run("chat", model, "--max-tokens", "3", "--chat-template", str(template), "--system", "a", question="x")
    other = run("chat", model, "--max-tokens", "3", "--chat-template", str(template), "--system", "b", question="x")
    assert first.stdout != other.stdout


@pytest.mark.parametrize(("value", "meaning"), [("on", True), ("off", False), ("64", 64), ("low", "low"), (None, None)])
def test_reasoning_is_written_as_people_do(value, meaning):
    assert parse_reasoning(value) == meaning


def test_a_chat_template_that_is_not_there_is_said():
    done = run("chat", str(tiny.get_path("attention")), "--chat-template", "/nowhere.jinja", question="x")
    assert done.returncode == 1
    assert "/nowhere.jinja cannot be read" in done.stderr


def test_a_draft_is_for_all_models_or_for_the_one_it_names():
    small = tiny.get_path("draft")
    assert parse_drafts(f"mtp,one={small}", ["one", "two"]) == {"one": small, "two": "mtp"}
    assert parse_drafts(str(small), ["one"]) == {"one": small}
    assert parse_drafts(None, ["one"]) == {}
    with pytest.raises(InvalidArgument, match=r"'other' is not served; there are one"):
        parse_drafts("other=mtp", ["one"])


def test_a_command_shows_a_picture_to_a_model_that_sees(tmp_path):
    Image.new("RGB", (40, 30), (230, 20, 20)).save(tmp_path / "red.png")
    model, projector = str(tiny.get_path("colours")), str(tiny.get_path("projector-colours"))
    picture = ("--image", str(tmp_path / "red.png"))
    done = run("chat", model, "--projector", projector, *picture, question="What colour is this?")
    assert done.stdout.strip() == "R"
    blind = run("chat", model, *picture, question="What colour is this?")
    assert blind.returncode == 1
    assert "takes no image" in blind.stderr
    stripped = run("chat", model, "--strip-media", *picture, question="What colour is this?")
    assert stripped.stdout.strip() == "N"
