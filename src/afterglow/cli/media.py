"""Pictures and sounds that somebody names in a terminal, or drags into it: as the paths that terminals paste."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from afterglow.chat.content import build_attachments
from afterglow.errors import InvalidMedia
from afterglow.media.policy import INLINE_ONLY, Modality
from afterglow.media.types import ImageData

MODALITY_BY_SUFFIX: dict[str, Modality] = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"), "image"),
    **dict.fromkeys((".wav", ".mp3", ".flac"), "audio"),
}
MODALITY_LABELS: dict[Modality, str] = {"image": "picture", "audio": "sound"}  # for people
MediaFile: TypeAlias = tuple[Modality, Path]
WORD_PATTERN = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|[^\s\\])+""")
ESCAPE_PATTERN = re.compile(r"\\(.)")


def extract_media_files(line: str) -> tuple[str, list[MediaFile]]:
    """The pictures and sounds whose paths stand in a line, and the rest of it: quoted, with escaped spaces, or the
    whole line.

    >>> files_in("What is this? /no/such/file.png")
    ('What is this? /no/such/file.png', [])
    """
    if (whole := find_media_file(line.strip())) is not None:
        return "", [whole]
    found: list[MediaFile] = []

    def take(word: re.Match[str]) -> str:
        named = find_media_file(unquote_word(word[0]))
        if named is None:
            return word[0]
        found.append(named)
        return ""

    rest = WORD_PATTERN.sub(take, line)
    return (re.sub(r" {2,}", " ", rest).strip() if found else line), found


def unquote_word(word: str) -> str:
    """A word as a shell would read it.

    >>> unquoted(r"a\\ cat.png"), unquoted("'a cat.png'")
    ('a cat.png', 'a cat.png')
    """
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    return ESCAPE_PATTERN.sub(r"\1", word)


def find_media_file(text: str) -> MediaFile | None:
    """The picture or sound file that a text names, if there is one."""
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    path = Path(text)
    try:
        path = path.expanduser()
        kind = MODALITY_BY_SUFFIX.get(path.suffix.lower())
        return (kind, path) if kind is not None and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, or of no user
        return None


def group_by_modality(files: Sequence[MediaFile]) -> dict[str, list[Path]]:
    """Files as a conversation takes them.

    >>> by_kind([("audio", Path("bell.wav"))])
    {'images': [], 'audio': [PosixPath('bell.wav')]}
    """
    return {
        "images": [path for kind, path in files if kind == "image"],
        "audio": [path for kind, path in files if kind == "audio"],
    }


def describe_media(kind: Modality, path: Path) -> str:
    """A picture or a sound in a few words; `InvalidMedia` where it cannot be read.

    >>> described("image", Path("/no/such/file.png"))
    Traceback (most recent call last):
    ...
    afterglow.errors.InvalidMedia: /no/such/file.png cannot be read: No such file or directory
    """
    (attachment,) = build_attachments(kind, [path])
    try:
        content = attachment.load(INLINE_ONLY)
    except InvalidMedia as error:
        raise InvalidMedia(str(path), error.reason) from None
    if isinstance(content, ImageData):
        return f"a picture: {path.name}, {content.width:,} by {content.height:,} pixels"
    return f"a sound: {path.name}, {content.seconds:,.1f} seconds"
