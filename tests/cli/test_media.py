"""Media in the terminal: named by a flag or a command, or dragged into a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afterglow.cli.media import extract_media_files
from afterglow.testing import models
from support.commands import ChatTerminal, run_in_process
from support.media_files import encode_audio, encode_image, gradient
from support.media_prompts import color_image, note_audio

pytestmark = pytest.mark.native

MODEL = str(models.get_path("successor-attention"))


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    path = tmp_path / "a cat's.png"
    path.write_bytes(encode_image(gradient()))
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
def test_a_pasted_path_is_a_media_file(image_file: Path, line: str, rest: str | None) -> None:
    escaped = escape_path(image_file)
    line = line.format(path=image_file, escaped=escaped, url=image_file.as_uri())
    if rest is None:
        assert extract_media_files(line) == (line, [])  # the question mark is part of the word
    else:
        assert extract_media_files(line) == (rest, [("image", image_file)] * max(1, line.count(escaped)))


def escape_path(path: Path) -> str:
    return str(path).replace(" ", "\\ ").replace("'", "\\'")


def test_a_path_in_single_quotes_is_one_word(tmp_path: Path) -> None:
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
        "~no-such-user/cat.png",
        "x" * 5000 + ".png",
        "\0.png",
        '"',
        "\\",
        "",
        "two  spaces   stay",
    ],
)
def test_lines_without_media_files_are_unchanged(line: str) -> None:
    assert extract_media_files(line) == (line, [])


@pytest.fixture
def terminal(image_file: Path) -> Iterator[ChatTerminal]:
    terminal = ChatTerminal("--image", str(image_file))
    yield terminal
    assert terminal.exit() == 0


def test_chat_describes_attached_images_and_reports_a_model_without_image_support(
    terminal: ChatTerminal, image_file: Path, tmp_path: Path
) -> None:
    assert "image: a cat's.png, 64 by 48 pixels" in "\n".join(terminal.lines)
    assert "does not support image input" in terminal.send_line_unwrapped("What is this?")
    assert "12 tokens at" in terminal.send_line("And without?")  # the image belonged to the message before
    assert "image: a cat's.png, 64 by 48 pixels" in terminal.send_line(f'/image "{image_file}"')
    assert "does not support image input" in terminal.send_line_unwrapped("What is this?")
    screen = terminal.send_line_unwrapped(f'"{image_file}" What is this?')
    assert "image: a cat's.png, 64 by 48 pixels" in screen
    assert "does not support image input" in screen
    assert "usage: /image FILE" in terminal.send_line("/image")
    assert "No such file" in terminal.send_line(f"/image {tmp_path}/missing.png")
    (tmp_path / "text.png").write_text("not an image")
    assert "it is not a PNG" in terminal.send_line(f"/image {tmp_path}/text.png")
    assert "unknown command /imag" in terminal.send_line(f"/imag {tmp_path}/text.png")
    assert "12 tokens at" in terminal.send_line("hello")


@pytest.fixture
def blue_file(tmp_path: Path) -> Path:
    path = tmp_path / "blue.png"
    image = color_image("B")
    path.write_bytes(encode_image(Image.frombytes("RGB", (image.width, image.height), image.pixels)))
    return path


VISION_MODEL = str(models.get_path("colors"))
VISION_PROJECTOR = ("--projector", str(models.get_path("projector-colors")))


def test_the_image_flag_attaches_images(blue_file: Path) -> None:
    for command in (("chat", VISION_MODEL), ("run", "What is this?", "--model", VISION_MODEL)):
        result = run_in_process(*command, *VISION_PROJECTOR, "--image", str(blue_file), stdin="What is this?")
        assert (result.returncode, result.stdout.strip()) == (0, "B"), result.stderr


def test_a_file_dragged_into_the_chat_is_attached(blue_file: Path) -> None:
    terminal = ChatTerminal(*VISION_PROJECTOR, model=VISION_MODEL)
    screen = terminal.send_line(f"{blue_file} What is this?")
    assert "image: blue.png, 40 by 30 pixels" in screen
    assert re.search(r"^B$", screen, re.MULTILINE)
    assert "image: blue.png" in terminal.send_line(str(blue_file))
    assert re.search(r"^B$", terminal.send_line("And this?"), re.MULTILINE)
    assert "user: [image] And this?" in terminal.send_line("/history")
    assert terminal.exit() == 0


def test_image_errors_of_chat_and_run_are_reported(image_file: Path, tmp_path: Path) -> None:
    for command in (("chat", MODEL), ("run", "What is this?", "--model", MODEL)):
        result = run_in_process(*command, "--image", str(image_file), stdin="What is this?")
        assert (result.returncode, result.stdout) == (1, "")
        assert "does not support image input" in result.stderr
        missing = run_in_process(*command, "--image", "/nonexistent/missing.png", stdin="What is this?")
        assert missing.returncode == 1
        assert "missing.png cannot be read: No such file" in missing.stderr
    raw = run_in_process("run", "abc", "--model", MODEL, "--raw", "--image", str(image_file))
    assert raw.returncode == 1
    assert "cannot be used with --raw" in raw.stderr


AUDIO_MODEL = str(models.get_path("notes"))
AUDIO_PROJECTOR = ("--projector", str(models.get_path("projector-notes")))


@pytest.fixture
def audio_file(tmp_path: Path) -> Path:
    path = tmp_path / "a bell.mp3"
    path.write_bytes(encode_audio(np.frombuffer(note_audio("A").samples, np.float32), format="MP3"))
    return path


def test_the_audio_flag_attaches_audio(audio_file: Path) -> None:
    for command in (("chat", AUDIO_MODEL), ("run", "Which note is this?", "--model", AUDIO_MODEL)):
        result = run_in_process(*command, *AUDIO_PROJECTOR, "--audio", str(audio_file), stdin="Which note is this?")
        assert (result.returncode, result.stdout.strip()) == (0, "A"), result.stderr


def test_an_audio_file_dragged_into_the_chat_is_attached(audio_file: Path) -> None:
    terminal = ChatTerminal(*AUDIO_PROJECTOR, "--audio", str(audio_file), model=AUDIO_MODEL)
    assert re.search(r"audio: a bell.mp3, 0\.\d seconds", "\n".join(terminal.lines))
    assert re.search(r"^A$", terminal.send_line("Which note is this?"), re.MULTILINE)
    screen = terminal.send_line(f"'{audio_file}' Which note is this?")
    assert "audio: a bell.mp3" in screen
    assert re.search(r"^A$", screen, re.MULTILINE)
    assert "audio: a bell.mp3" in terminal.send_line(f"/audio {audio_file}")
    assert re.search(r"^A$", terminal.send_line("And this?"), re.MULTILINE)
    assert "user: [audio] And this?" in terminal.send_line("/history")
    assert "usage: /audio FILE" in terminal.send_line("/audio")
    assert "No such file" in terminal.send_line("/audio /no/such/file.wav")
    assert terminal.exit() == 0


def test_audio_errors_are_reported(audio_file: Path, tmp_path: Path) -> None:
    unsupported = run_in_process("run", "Which note is this?", "--model", MODEL, "--audio", str(audio_file))
    assert (unsupported.returncode, unsupported.stdout) == (1, "")
    assert "does not support audio input" in unsupported.stderr
    raw = run_in_process("run", "abc", "--model", MODEL, "--raw", "--audio", str(audio_file))
    assert raw.returncode == 1
    assert "cannot be used with --raw" in raw.stderr
    missing = run_in_process("run", "abc", "--model", MODEL, "--audio", "/nonexistent/missing.wav")
    assert "missing.wav cannot be read: No such file" in missing.stderr


def test_images_and_audio_in_one_line_are_distinguished(image_file: Path, audio_file: Path) -> None:
    line = f"'{audio_file}' and {escape_path(image_file)}"
    assert extract_media_files(line) == ("and", [("audio", audio_file), ("image", image_file)])
