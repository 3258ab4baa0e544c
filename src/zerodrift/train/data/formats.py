"""Detect the format of a file by its suffix and first bytes, and read text, gzip and zstd streams.

`rows` reads rows. The error for a file that is neither text nor rows says how to convert it.
"""

from __future__ import annotations

import codecs
import gzip
import importlib.util
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from zerodrift.errors import ConfigError, said
from zerodrift.files import opened

TEXT, LINES, JSON, ARRAY = "text", "JSON lines", "JSON", "a JSON array"
CSV, PARQUET, ARROW = "CSV", "parquet", "Arrow"

OF_ROWS = (".jsonl", ".ndjson", ".parquet", ".pq", ".arrow", ".feather", ".csv", ".tsv")
"""Suffixes of files that hold rows, whatever lies beside them."""
_COLUMNS = {".parquet": PARQUET, ".pq": PARQUET, ".arrow": ARROW, ".feather": ARROW}
_TABLES, _LINES = (".csv", ".tsv"), (".jsonl", ".ndjson")
_JSON = (*_LINES, ".json")
_ANY = (".txt", ".text", "")
"""Suffixes that say nothing about the content."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_HEAD = _PIECE = 1 << 16

_UNPACK, _SAVE, _EXTRACT = "Unpack it first.", "Save it as UTF-8.", "Leave it out, or extract its text."
_REFUSED = (
    (b"version https://git-lfs", "a pointer of Git LFS", "Run `git lfs pull` where it was cloned."),
    (b"BZh", "a bzip2 file", "Run `bunzip2 {}`, or convert it to gzip or zstd."),
    (b"\xfd7zXZ\0", "an xz file", "Run `unxz {}`, or convert it to gzip or zstd."),
    (b"\x04\x22\x4d\x18", "an LZ4 file", "Run `unlz4 {}`, or convert it to gzip or zstd."),
    (_GZIP, "a gzip file, packed once more", _UNPACK),
    (_ZSTD, "a zstd file, packed once more", _UNPACK),
    (b"PK\x03\x04", "a ZIP archive, as DOCX, XLSX and EPUB are", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (codecs.BOM_UTF32_LE, "UTF-32", _SAVE),
    (codecs.BOM_UTF32_BE, "UTF-32", _SAVE),
    (codecs.BOM_UTF16_LE, "UTF-16", _SAVE),
    (codecs.BOM_UTF16_BE, "UTF-16", _SAVE),
    (b"%PDF-", "a PDF", _EXTRACT),
    (b"{\\rtf", "an RTF document", _EXTRACT),
    (b"\x89PNG", "a PNG image", _EXTRACT),
    (b"\xff\xd8\xff", "a JPEG image", _EXTRACT),
    (b"GIF8", "a GIF image", _EXTRACT),
    (b"ORC", "an ORC file", _EXTRACT),
    (b"\x93NUMPY", "a NumPy array", _EXTRACT),
)
"""First bytes, name, and what to do; `{}` is the file. Any other binary file is refused as no text."""


def suffix_of(file: Path) -> str:
    """Return the lower-case suffix that names the content: `.jsonl` for `a.jsonl.gz`."""
    inner = Path(file.stem) if file.suffix.lower() in _COMPRESSED else file
    return inner.suffix.lower()


def format_of(file: Path) -> str:
    """Return the format of a file, or refuse one that is neither text nor rows."""
    with stream_of(file) as stream:
        head = stream.read(_HEAD)
    suffix = suffix_of(file)
    if head.startswith(b"PAR1"):
        return PARQUET
    wanted = _COLUMNS.get(suffix)
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff" * 4) and (wanted == ARROW or not suffix)):
        return ARROW
    known = ((name, todo.format(file)) for magic, name, todo in _REFUSED if head.startswith(magic))
    other, todo = next(known, ("a TAR archive", _UNPACK) if head[257:262] == b"ustar" else ("", ""))
    if wanted is not None:
        start = f"a file that begins with {head[:16]!r}" if head else "nothing"
        page = "a page of HTML or XML" if head.lstrip()[:1] == b"<" else ""
        raise ConfigError(str(file), f"must be {wanted}", got=other or page or start, do=todo)
    if other:
        raise ConfigError(str(file), "must be text or rows of data", got=other, do=todo)
    start_of_text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if suffix in (*_JSON, *_TABLES) and start_of_text[:1] == b"<":
        got, todo = "a page of HTML or XML", "It may be an error that a server sent: fetch the file again."
        raise ConfigError(str(file), "must be rows of data", got=got, do=todo)
    if suffix in _TABLES:
        return CSV
    if suffix not in _JSON and not (suffix in _ANY and _is_rows(start_of_text)):
        return TEXT
    if start_of_text[:1] == b"[" and not (suffix in _LINES and _is_one_line(start_of_text, list)):
        return ARRAY
    return LINES if suffix in _LINES or _is_one_line(start_of_text) else JSON


def _is_rows(start: bytes) -> bool:
    """Return True if a file begins with a JSON object, on a line or in an array."""
    inner = start[1:].lstrip() if start[:1] == b"[" else start
    is_object = inner[:1] == b"{" and inner[1:].lstrip()[:1] == b'"'
    return is_object and (start[:1] == b"[" or _is_one_line(start))


def _is_one_line(start: bytes, kind: type = dict) -> bool:
    """Return True if the first line is a whole object, or an array that another line follows.

    An object longer than the part that is read counts as one line.
    """
    line, end, rest = start.partition(b"\n")
    if kind is dict and not end and len(start) > _HEAD // 2:
        return True
    try:
        return isinstance(json.loads(line), kind) and (kind is dict or bool(rest.strip()))
    except (ValueError, RecursionError):
        return False


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn errors of the system and of decompression into one that names the file."""
    try:
        yield
    except EOFError:
        raise ConfigError(str(file), "must be readable", got="a gzip file that ends early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(str(file), "must be readable", got=f"a damaged gzip file ({error})") from None
    except OSError as error:
        raise ConfigError(str(file), "must be readable", got=error.strerror or said(error)) from None


@contextmanager
def stream_of(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if it is gzip or zstd."""
    with readable(file), opened(file) as stream:
        first = stream.read(4)
        stream.seek(0)
        if first.startswith(_GZIP):
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield cast(BinaryIO, unpacked)
        elif first == _ZSTD:
            require_pyarrow(file, "zstd")
            from pyarrow import CompressedInputStream

            with io.BufferedReader(CompressedInputStream(stream, "zstd")) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield stream


def require_pyarrow(file: Path, what: str) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        must, todo = f"`pyarrow` must be installed to read {what}", "Run `pip install 'zerodrift[hf]'`."
        raise ConfigError(str(file), must, got="no such package", do=todo)


def read_text(file: Path) -> Iterator[str]:
    """Yield a text file piece by piece, with Unix line ends and without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    bytes_read = characters = 0
    with stream_of(file) as stream:
        while True:
            piece = stream.read(_PIECE)
            start = bytes_read - len(decoder.getstate()[0])
            bytes_read += len(piece)
            try:
                decoded = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                raise not_utf8(error, str(file), start) from None
            if not characters:
                decoded = decoded.removeprefix("\ufeff")
            yield newlines.decode(without_zeros(decoded, str(file), characters), final=not piece)
            characters += len(decoded)
            if not piece:
                return


def not_utf8(error: UnicodeDecodeError, where: str, before: int = 0) -> ConfigError:
    """Return the refusal of bytes that are not UTF-8; `before` counts the bytes in front of them."""
    got = f"byte 0x{error.object[error.start]:02x} at offset {before + error.start:,}"
    return ConfigError(where, "must be UTF-8 text", got=got, do="Leave it out, or save it as UTF-8.")


def without_zeros(text: str, where: str, before: int = 0) -> str:
    """Return the text, or refuse it for a zero character, which binary files are full of."""
    if "\0" in text:
        got = f"a zero at character {before + text.index(chr(0)):,}"
        todo = "It is binary, or UTF-16: leave it out, or save it as UTF-8."
        raise ConfigError(where, "must be text", got=got, do=todo)
    return text


def type_name(value: Any) -> str:
    """Name the type of a value in the words of files, not of Python."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    if value is None:
        return "null"
    if isinstance(value, list) and not value:
        return "an empty list"
    return "a block of keys" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)
