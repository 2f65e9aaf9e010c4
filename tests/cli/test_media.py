"""Pictures and sounds in the terminal: named by a flag or a command, or dragged into a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afterglow.cli.media import extract_media_files
from afterglow.testing import models
from cli.test_main import run
from cli.test_repl import Terminal
from support.media_files import gradient, recorded, saved
from support.media_prompts import coloured, played

MODEL = str(models.get_path("successor-attention"))


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "a cat's.png"
    path.write_bytes(saved(gradient()))
    return path


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ("{path}", ""),
        ('"{path}"', ""),
        ("{escaped}", ""),
        ("{escaped} ", ""),
        ("{url}", ""),
        ("What is {escaped}?", None),
        ("What is {escaped} ?", "What is ?"),
        ('"{path}" What is this?', "What is this?"),
        ("Compare {escaped} with {escaped} now", "Compare with now"),
        ("{escaped}\nWhat is this?", "What is this?"),
    ],
)
def test_a_path_as_terminals_paste_it_is_a_picture(cat: Path, line: str, rest: str | None) -> None:
    escaped = str(cat).replace(" ", "\\ ").replace("'", "\\'")
    line = line.format(path=cat, escaped=escaped, url=cat.as_uri())
    if rest is None:
        assert extract_media_files(line) == (line, [])  # the name goes on with a question mark
    else:
        assert extract_media_files(line) == (rest, [("image", cat)] * max(1, line.count(escaped)))


def test_single_quotes_hold_a_path_together(tmp_path: Path) -> None:
    path = tmp_path / "two words.JPG"
    path.write_bytes(b"")
    assert extract_media_files(f"What is '{path}'") == ("What is", [("image", path)])


@pytest.mark.parametrize(
    "line",
    [
        "What is a cat.png?",
        "don't",
        "it's 5 o'clock",
        "C:\\nowhere\\cat.png",
        "/etc/passwd",
        "file:///etc/passwd",
        "~nobody-of-that-name/cat.png",
        "x" * 5000 + ".png",
        "\0.png",
        '"',
        "\\",
        "",
        "two  spaces   stay",
    ],
)
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert extract_media_files(line) == (line, [])


@pytest.fixture
def terminal(cat: Path) -> Iterator[Terminal]:
    terminal = Terminal("--image", str(cat))
    yield terminal
    assert terminal.end() == 0


def test_pictures_in_a_chat_are_said_in_a_line_and_refused_by_a_model_that_cannot_see(
    terminal: Terminal, cat: Path, tmp_path: Path
) -> None:
    assert "a picture: a cat's.png, 64 by 48 pixels" in "\n".join(terminal.lines)
    assert "this model takes no image" in terminal.say("What is this?")
    assert "12 tokens at" in terminal.say("And without?")  # the picture went with its question
    assert "a picture: a cat's.png, 64 by 48 pixels" in terminal.say(f'/image "{cat}"')
    assert "this model takes no image" in terminal.say("What is this?")
    shown = terminal.say(f'"{cat}" What is this?')
    assert "a picture: a cat's.png, 64 by 48 pixels" in shown
    assert "this model takes no image" in shown
    assert "write /image and a file" in terminal.say("/image")
    assert "No such file" in terminal.say(f"/image {tmp_path}/missing.png")
    (tmp_path / "text.png").write_text("no picture")
    assert "it is no PNG" in terminal.say(f"/image {tmp_path}/text.png")
    assert "there is no command /imag" in terminal.say(f"/imag {tmp_path}/text.png")
    assert "12 tokens at" in terminal.say("hello")


@pytest.fixture
def blue(tmp_path: Path) -> Path:
    path = tmp_path / "blue.png"
    shown = coloured("B")
    path.write_bytes(saved(Image.frombytes("RGB", (shown.width, shown.height), shown.pixels)))
    return path


COLOURS = str(models.get_path("colours"))
EYES = ("--projector", str(models.get_path("projector-colours")))


def test_a_model_that_sees_answers_about_pictures_wherever_they_are_named(blue: Path) -> None:
    for command in (("chat", COLOURS), ("run", "What is this?", "--model", COLOURS)):
        done = run(*command, *EYES, "--image", str(blue), question="What is this?")
        assert (done.returncode, done.stdout.strip()) == (0, "B"), done.stderr


def test_a_file_dragged_into_the_chat_is_seen(blue: Path) -> None:
    terminal = Terminal(*EYES, model=COLOURS)
    shown = terminal.say(f"{blue} What is this?")
    assert "a picture: blue.png, 40 by 30 pixels" in shown
    assert re.search(r"^B$", shown, re.MULTILINE)
    assert "a picture: blue.png" in terminal.say(str(blue))
    assert re.search(r"^B$", terminal.say("And this?"), re.MULTILINE)
    assert "user: [picture] And this?" in terminal.say("/history")
    assert terminal.end() == 0


def test_a_piped_question_and_a_run_take_pictures_and_say_what_is_wrong(cat: Path, tmp_path: Path) -> None:
    for command in (("chat", MODEL), ("run", "What is this?", "--model", MODEL)):
        done = run(*command, "--image", str(cat), question="What is this?")
        assert (done.returncode, done.stdout) == (1, "")
        assert "this model takes no image" in done.stderr
        missing = run(*command, "--image", str(tmp_path / "missing.png"), question="What is this?")
        assert missing.returncode == 1
        assert "missing.png cannot be read: No such file" in missing.stderr
    raw = run("run", "abc", "--model", MODEL, "--raw", "--image", str(cat))
    assert raw.returncode == 1
    assert "leave it or --raw out" in raw.stderr


NOTES = str(models.get_path("notes"))
EARS = ("--projector", str(models.get_path("projector-notes")))


@pytest.fixture
def bell(tmp_path: Path) -> Path:
    path = tmp_path / "a bell.mp3"
    path.write_bytes(recorded(np.frombuffer(played("A").samples, np.float32), format="MP3"))
    return path


def test_a_model_that_hears_answers_about_sounds_wherever_they_are_named(bell: Path) -> None:
    for command in (("chat", NOTES), ("run", "Which note is this?", "--model", NOTES)):
        done = run(*command, *EARS, "--audio", str(bell), question="Which note is this?")
        assert (done.returncode, done.stdout.strip()) == (0, "A"), done.stderr


def test_a_sound_dragged_into_the_chat_is_heard(bell: Path) -> None:
    terminal = Terminal(*EARS, "--audio", str(bell), model=NOTES)
    assert re.search(r"a sound: a bell.mp3, 0\.\d seconds", "\n".join(terminal.lines))
    assert re.search(r"^A$", terminal.say("Which note is this?"), re.MULTILINE)
    shown = terminal.say(f"'{bell}' Which note is this?")
    assert "a sound: a bell.mp3" in shown
    assert re.search(r"^A$", shown, re.MULTILINE)
    assert "a sound: a bell.mp3" in terminal.say(f"/audio {bell}")
    assert re.search(r"^A$", terminal.say("And this?"), re.MULTILINE)
    assert "user: [sound] And this?" in terminal.say("/history")
    assert "write /audio and a file" in terminal.say("/audio")
    assert "No such file" in terminal.say("/audio /no/such/file.wav")
    assert terminal.end() == 0


def test_sounds_that_cannot_be_taken_are_one_line(bell: Path, tmp_path: Path) -> None:
    deaf = run("run", "Which note is this?", "--model", MODEL, "--audio", str(bell))
    assert (deaf.returncode, deaf.stdout) == (1, "")
    assert "this model takes no audio" in deaf.stderr
    raw = run("run", "abc", "--model", MODEL, "--raw", "--audio", str(bell))
    assert raw.returncode == 1
    assert "leave it or --raw out" in raw.stderr
    missing = run("run", "abc", "--model", MODEL, "--audio", str(tmp_path / "missing.wav"))
    assert "missing.wav cannot be read: No such file" in missing.stderr


def test_pictures_and_sounds_of_one_line_are_told_apart(cat: Path, bell: Path) -> None:
    line = f"'{bell}' and " + str(cat).replace(" ", "\\ ").replace("'", "\\'")
    assert extract_media_files(line) == ("and", [("audio", bell), ("image", cat)])
