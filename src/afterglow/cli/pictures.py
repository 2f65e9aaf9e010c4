"""Pictures that somebody names in a terminal, or drags into it: as the paths that terminals paste."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from afterglow.chat.content import attached
from afterglow.errors import InvalidMedia
from afterglow.media.contents import Picture
from afterglow.media.opening import CLOSED

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})
WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|[^\s\\])+""")
ESCAPED = re.compile(r"\\(.)")


def pictures_in(line: str) -> tuple[str, list[Path]]:
    """The pictures whose paths stand in a line, and the rest of it: quoted, with escaped spaces, or the whole line.

    >>> pictures_in("What is this? /no/such/file.png")
    ('What is this? /no/such/file.png', [])
    """
    if (whole := picture_at(line.strip())) is not None:
        return "", [whole]
    found: list[Path] = []

    def take(word: re.Match[str]) -> str:
        path = picture_at(unquoted(word[0]))
        if path is None:
            return word[0]
        found.append(path)
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


def picture_at(text: str) -> Path | None:
    """The picture file that a text names, if there is one."""
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    path = Path(text)
    try:
        path = path.expanduser()
        return path if path.suffix.lower() in ENDINGS and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # too long for a path, or of no user
        return None


def described(path: Path) -> str:
    """A picture in a few words; `InvalidMedia` where it cannot be read.

    >>> described(Path("/no/such/file.png"))
    Traceback (most recent call last):
    ...
    afterglow.errors.InvalidMedia: /no/such/file.png cannot be read: No such file or directory
    """
    (attachment,) = attached("image", [path])
    try:
        picture = attachment.opened(CLOSED)
    except InvalidMedia as error:
        raise InvalidMedia(str(path), error.reason) from None
    assert isinstance(picture, Picture)
    return f"{path.name}, {picture.width:,} by {picture.height:,} pixels"
