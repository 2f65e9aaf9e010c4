"""Media files named in a chat line, or dragged into the terminal, which pastes their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from afterglow.chat.content import build_attachments
from afterglow.errors import InvalidMedia
from afterglow.media.policy import INLINE_ONLY, Modality
from afterglow.media.types import AudioData, ImageData

MODALITY_BY_SUFFIX: dict[str, Modality] = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"), "image"),
    **dict.fromkeys((".wav", ".mp3", ".flac"), "audio"),
}
MediaFile: TypeAlias = tuple[Modality, Path]
WORD_PATTERN = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|[^\s\\])+""")
ESCAPE_PATTERN = re.compile(r"\\(.)")


def extract_media_files(line: str) -> tuple[str, list[MediaFile]]:
    """Extract media files from a line: quoted paths, paths with escaped spaces, or the whole line as one path.

    Returns the rest of the line and the files.

    >>> extract_media_files("What is this? /no/such/file.png")
    ('What is this? /no/such/file.png', [])
    """
    if (file := find_media_file(line.strip())) is not None:
        return "", [file]
    files: list[MediaFile] = []

    def extract(word: re.Match[str]) -> str:
        file = find_media_file(unquote_word(word[0]))
        if file is None:
            return word[0]
        files.append(file)
        return ""

    rest = WORD_PATTERN.sub(extract, line)
    return (re.sub(r" {2,}", " ", rest).strip() if files else line), files


def unquote_word(word: str) -> str:
    """Remove the quotes or escapes of a word, like a shell.

    >>> unquote_word(r"a\\ cat.png"), unquote_word("'a cat.png'")
    ('a cat.png', 'a cat.png')
    """
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    return ESCAPE_PATTERN.sub(r"\1", word)


def find_media_file(text: str) -> MediaFile | None:
    """Return the existing media file that a text names; None if there is none."""
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    path = Path(text)
    try:
        path = path.expanduser()
        kind = MODALITY_BY_SUFFIX.get(path.suffix.lower())
        return (kind, path) if kind is not None and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # the path is too long, or names an unknown user
        return None


def describe_media(kind: Modality, path: Path) -> str:
    """Describe a media file in one line; `InvalidMedia` if it cannot be read.

    >>> describe_media("image", Path("/no/such/file.png"))
    Traceback (most recent call last):
    ...
    afterglow.errors.InvalidMedia: /no/such/file.png cannot be read: No such file or directory
    """
    (attachment,) = build_attachments(kind, [path])
    try:
        media = attachment.load(INLINE_ONLY)
    except InvalidMedia as error:
        raise InvalidMedia(str(path), error.reason) from None
    if isinstance(media, ImageData):
        return f"image: {path.name}, {media.width:,} by {media.height:,} pixels"
    assert isinstance(media, AudioData)
    return f"audio: {path.name}, {media.seconds:,.1f} seconds"
