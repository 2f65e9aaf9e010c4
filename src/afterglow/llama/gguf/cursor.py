"""Reads a file forward without trusting it: no length is believed before the file's size and a limit confirm it.

Reads rather than maps, so that a file that shrinks meanwhile is an error and not a dead process.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, NoReturn

from afterglow.errors import InvalidModel

# Bounds on work, several times what the largest real models have: llama.cpp reads arrays element by element.
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_STRINGS = 1_500_000
MAX_NUMBERS = 8_000_000
READ_CHUNK_BYTES = 1024 * 1024

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """A place in a file. Loads as much of it as the header needs and never looks behind its end."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self.path, self.size, self.position = path, size, 0
        self.strings_left, self.numbers_left = MAX_STRINGS, MAX_NUMBERS  # in all arrays together
        self.data = bytearray()
        self._file = file

    def fail(self, reason: str) -> NoReturn:
        raise InvalidModel(str(self.path), reason)

    def load_until(self, end: int, label: str) -> None:
        """Make the bytes before `end` readable."""
        if end > self.size:
            self.fail(f"{label} at byte {self.position:,} needs {end:,} bytes of file, the file has {self.size:,}")
        if end > MAX_HEADER_BYTES:
            self.fail(f"{label} makes the header {end:,} bytes long, over the limit of {MAX_HEADER_BYTES:,}")
        while len(self.data) < end:
            chunk = self._file.read(max(READ_CHUNK_BYTES, end - len(self.data)))
            if not chunk:
                self.fail(f"the file ended at byte {len(self.data):,} while it was read")
            self.data += chunk

    def count_elements(self, count: int, strings: bool, label: str) -> None:
        """Account for an array's elements."""
        if strings:
            self.strings_left -= count
        else:
            self.numbers_left -= count
        if self.strings_left < 0 or self.numbers_left < 0:
            limit = MAX_STRINGS if strings else MAX_NUMBERS
            self.fail(f"{label} has {count:,} elements, all arrays together may have {limit:,} of this kind")

    def read_bytes(self, count: int, label: str) -> bytes:
        end = self.position + count
        if end > len(self.data):
            self.load_until(end, label)
        taken = bytes(self.data[self.position : end])
        self.position = end
        return taken

    def read_integer(self, format: struct.Struct, label: str) -> int:
        value: int = format.unpack(self.read_bytes(format.size, label))[0]
        return value

    def read_string(self, label: str, limit: int) -> bytes:
        place = self.position
        length = self.read_integer(U64, label)
        room = self.size - self.position
        if length > room:
            self.fail(f"{label} at byte {place:,} claims a length of {length:,} bytes, the file has {room:,} more")
        if length > limit:
            self.fail(f"{label} at byte {place:,} is {length:,} bytes long, the limit is {limit:,}")
        return self.read_bytes(length, label)

    def read_name(self, label: str, limit: int) -> str:
        """A key or tensor name. llama.cpp compares them up to a zero byte, so one inside could hide a second name."""
        place = self.position
        raw = self.read_string(label, limit)
        if not raw or b"\0" in raw:
            self.fail(f"{label} at byte {place:,} is {'empty' if not raw else 'not text: it has a zero byte'}")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{label} at byte {place:,} is not text: {raw[:32]!r}")
