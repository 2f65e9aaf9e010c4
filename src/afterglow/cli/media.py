"""Pictures and sounds that somebody names in a terminal, or drags into it: as the paths that terminals paste."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from afterglow.chat.content import attached
from afterglow.errors import InvalidMedia
from afterglow.media.contents import Picture
from afterglow.media.opening import CLOSED
from afterglow.media.policy import Kind

ENDINGS: dict[str, Kind] = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"), "image"),
    **dict.fromkeys((".wav", ".mp3", ".flac"), "audio"),
}
WORDS: dict[Kind, str] = {"image": "picture", "audio": "sound"}  # for people
Named: TypeAlias = tuple[Kind, Path]
WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|[^\s\\])+""")
ESCAPED = re.compile(r"\\(.)")


def files_in(line: str) -> tuple[str, list[Named]]:
    """The pictures and sounds whose paths stand in a line, and the rest of it: quoted, with escaped spaces, or the
    whole line.

    >>> files_in("What is this? /no/such/file.png")
    ('What is this? /no/such/file.png', [])
    """
    if (whole := file_at(line.strip())) is not None:
        return "", [whole]
    found: list[Named] = []

    def take(word: re.Match[str]) -> str:
        named = file_at(unquoted(word[0]))
        if named is None:
            return word[0]
        found.append(named)
        return ""

    rest = WORD.sub(take, line)
    return (re.sub(r" {2,}", " ", rest).strip() if found else line), found


def unquoted(word: str) -> str:
    """A word as a shell would read it.

    >>> unquoted(r"a\\ cat.png"), unquoted("'a cat.png'")
    ('a cat.png', 'a cat.png')
    """
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    return ESCAPED.sub(r"\1", word)


def file_at(text: str) -> Named | None:
    """The picture or sound file that a text names, if there is one."""
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    path = Path(text)
    try:
        path = path.expanduser()
        kind = ENDINGS.get(path.suffix.lower())
        return (kind, path) if kind is not None and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, or of no user
        return None


def by_kind(named: Sequence[Named]) -> dict[str, list[Path]]:
    """Files as a conversation takes them.

    >>> by_kind([("audio", Path("bell.wav"))])
    {'images': [], 'audio': [PosixPath('bell.wav')]}
    """
    return {
        "images": [path for kind, path in named if kind == "image"],
        "audio": [path for kind, path in named if kind == "audio"],
    }


def described(kind: Kind, path: Path) -> str:
    """A picture or a sound in a few words; `InvalidMedia` where it cannot be read.

    >>> described("image", Path("/no/such/file.png"))
    Traceback (most recent call last):
    ...
    afterglow.errors.InvalidMedia: /no/such/file.png cannot be read: No such file or directory
    """
    (attachment,) = attached(kind, [path])
    try:
        content = attachment.opened(CLOSED)
    except InvalidMedia as error:
        raise InvalidMedia(str(path), error.reason) from None
    if isinstance(content, Picture):
        return f"a picture: {path.name}, {content.width:,} by {content.height:,} pixels"
    return f"a sound: {path.name}, {content.seconds:,.1f} seconds"
