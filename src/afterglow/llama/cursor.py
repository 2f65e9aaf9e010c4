"""Reads a file forward without trusting it: no length is believed before the file's size and a limit confirm it.

Reads rather than maps, so that a file that shrinks meanwhile is an error and not a dead process.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, NoReturn

from afterglow.errors import InvalidModel

# Bounds on work, several times what the largest real models have: llama.cpp reads arrays element by element.
HEADER_BYTES = 64 * 1024 * 1024
STRINGS = 1_500_000
NUMBERS = 8_000_000
CHUNK = 1024 * 1024

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """A place in a file. Loads as much of it as the header needs and never looks behind its end."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self.path, self.size, self.position = path, size, 0
        self.strings_left, self.numbers_left = STRINGS, NUMBERS  # in all arrays together
        self.data = bytearray()
        self._file = file

    def fail(self, reason: str) -> NoReturn:
        raise InvalidModel(str(self.path), reason)

    def load(self, end: int, what: str) -> None:
        """Make the bytes before `end` readable."""
        if end > self.size:
            self.fail(f"{what} at byte {self.position:,} needs {end:,} bytes of file, the file has {self.size:,}")
        if end > HEADER_BYTES:
            self.fail(f"{what} makes the header {end:,} bytes long, over the limit of {HEADER_BYTES:,}")
        while len(self.data) < end:
            chunk = self._file.read(max(CHUNK, end - len(self.data)))
            if not chunk:
                self.fail(f"the file ended at byte {len(self.data):,} while it was read")
            self.data += chunk

    def spend(self, count: int, strings: bool, what: str) -> None:
        """Account for an array's elements."""
        if strings:
            self.strings_left -= count
        else:
            self.numbers_left -= count
        if self.strings_left < 0 or self.numbers_left < 0:
            limit = STRINGS if strings else NUMBERS
            self.fail(f"{what} has {count:,} elements, all arrays together may have {limit:,} of this kind")

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self.data):
            self.load(end, what)
        taken = bytes(self.data[self.position : end])
        self.position = end
        return taken

    def number(self, layout: struct.Struct, what: str) -> int:
        value: int = layout.unpack(self.take(layout.size, what))[0]
        return value

    def string(self, what: str, limit: int) -> bytes:
        place = self.position
        length = self.number(U64, what)
        room = self.size - self.position
        if length > room:
            self.fail(f"{what} at byte {place:,} claims a length of {length:,} bytes, the file has {room:,} more")
        if length > limit:
            self.fail(f"{what} at byte {place:,} is {length:,} bytes long, the limit is {limit:,}")
        return self.take(length, what)

    def name(self, what: str, limit: int) -> str:
        """A key or tensor name. llama.cpp compares them up to a zero byte, so one inside could hide a second name."""
        place = self.position
        raw = self.string(what, limit)
        if not raw or b"\0" in raw:
            self.fail(f"{what} at byte {place:,} is {'empty' if not raw else 'not text: it has a zero byte'}")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {place:,} is not text: {raw[:32]!r}")
