"""Compressed files as the bytes in them: gzip, bzip2, xz and zstd, told by their first bytes.

Python's own readers take what follows a damaged second part for the end. Here a file is read to its last
byte, and what is not of a part is an error. zstd comes with `pyarrow`.

Invariant: what is read is all that was packed, or an error. Where a format holds no checksum, as zstd may,
damage that unpacks shows no more than it would in plain text.
"""

from __future__ import annotations

import bz2
import importlib.util
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from zerodrift.errors import ConfigError
from zerodrift.files import opened

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")

_MAGIC: tuple[tuple[bytes, str, Callable[[], Any] | None], ...] = (
    (b"\x1f\x8b", "gzip", lambda: zlib.decompressobj(31)),
    (b"BZh", "bzip2", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\0", "xz", lzma.LZMADecompressor),
    (b"\x28\xb5\x2f\xfd", "zstd", None),
)
_PIECE = 1 << 16


def packed(first: bytes) -> str:
    """How a file that begins so is compressed; `""` where it is not."""
    return next((name for magic, name, _ in _MAGIC if first.startswith(magic)), "")


def unpacked(file: Path) -> BinaryIO:
    """A file's bytes, unpacked where it is compressed."""
    stream = opened(file)
    first = stream.read(6)
    stream.seek(0)
    for magic, name, make in _MAGIC:
        if first.startswith(magic):
            return _zstd(file, stream) if make is None else io.BufferedReader(_Parts(stream, name, make))
    return stream


def _zstd(file: Path, stream: BinaryIO) -> BinaryIO:
    if importlib.util.find_spec("pyarrow") is None:
        must, todo = "`pyarrow` must be installed to read zstd", "Run `pip install 'zerodrift[hf]'`."
        raise ConfigError(str(file), must, got="no such package", do=todo)
    from pyarrow import CompressedInputStream

    return io.BufferedReader(_Arrow(CompressedInputStream(stream, "zstd")))


class _Arrow(io.RawIOBase):
    """A stream of `pyarrow` as one of Python's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._inner.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()


class _Parts(io.RawIOBase):
    """One compressed part after the other."""

    def __init__(self, stream: BinaryIO, name: str, make: Callable[[], Any]) -> None:
        self._stream, self._name, self._make = stream, name, make
        self._part = make()
        self._read = b""
        """Of the file, not yet unpacked."""
        self._held = b""
        """Unpacked, not yet asked for."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            if self._part.eof:
                self._read = self._part.unused_data or self._read
                if not self._read and not (piece := self._stream.read(_PIECE)):
                    return 0
                self._read = (self._read or piece).lstrip(b"\0")  # what fills up a block
                if not self._read:
                    continue
                self._part = self._make()
            elif not self._read:
                self._read = self._stream.read(_PIECE)
                if not self._read:
                    raise OSError(f"a {self._name} file that ends early")
            piece, self._read = self._read, b""
            try:
                self._held = self._part.decompress(piece)
            except (zlib.error, lzma.LZMAError, ValueError, EOFError, OSError) as error:
                raise OSError(f"a damaged {self._name} file ({error})") from None
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
