"""Detect what a file of data holds by its first bytes, and read it: text in pieces, rows one by one.

Text, JSON lines, JSON arrays and parquet are read, plain or packed by gzip. Any other file is refused by
name, with the command that converts it if there is one. JSON is not read by `datasets` or `pyarrow`, which
change values in silence: a text that looks like a time becomes a `datetime`, a 1 beside a 1.0 a float.

Only some rows are in memory at a time. Every value is exactly what the file holds, or the file is refused by
name and row.
"""

from __future__ import annotations

import codecs
import gzip
import importlib.util
import io
import json
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from zerodrift.errors import ConfigError, first_line, said
from zerodrift.files import opened

Row = dict[str, Any]

TEXT, LINES, ARRAY, PARQUET = "text", "JSON lines", "a JSON array", "parquet"

_PARQUET, _LINES, _TABLES = (".parquet", ".pq"), (".jsonl", ".ndjson"), (".csv", ".tsv")
OF_ROWS = (*_LINES, *_PARQUET, *_TABLES, ".arrow", ".feather")
"""Suffixes of files that hold rows, whatever lies beside them."""
_ANY = (".txt", ".text", "")
"""Suffixes that say nothing about the content."""
_GZIP = b"\x1f\x8b"
_HEAD = _PIECE = 1 << 16

_UNPACK, _SAVE, _EXTRACT = "Unpack it first.", "Save it as UTF-8.", "Leave it out, or extract its text."
_TO_PARQUET = "to_parquet('{0}.parquet')\"`."
_FROM_FEATHER = f"Run `python -c \"import pandas; pandas.read_feather('{{0}}').{_TO_PARQUET}"
_FROM_ARROW = f"Run `python -c \"import datasets; datasets.Dataset.from_file('{{0}}').{_TO_PARQUET}"
_FROM_TABLE = (
    "Run `python -c \"import pandas; pandas.read_csv('{0}', sep=None, engine='python', dtype=str, "
    "keep_default_na=False).to_json('{0}.jsonl', orient='records', lines=True)\"`."
)
_FROM_OBJECTS = "Run `jq -c . {0} > {0}l`, which writes a line for each object."
_REFUSED = (
    (b"version https://git-lfs", "a pointer of Git LFS", "Run `git lfs pull` where it was cloned."),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "Run `unzstd {0}`, or convert it to gzip."),
    (b"BZh", "a bzip2 file", "Run `bunzip2 {0}`, or convert it to gzip."),
    (b"\xfd7zXZ\0", "an xz file", "Run `unxz {0}`, or convert it to gzip."),
    (b"\x04\x22\x4d\x18", "an LZ4 file", "Run `unlz4 {0}`, or convert it to gzip."),
    (_GZIP, "a gzip file, packed once more", _UNPACK),
    (b"PK\x03\x04", "a ZIP archive, as DOCX, XLSX and EPUB are", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (codecs.BOM_UTF32_LE, "UTF-32", _SAVE),
    (codecs.BOM_UTF32_BE, "UTF-32", _SAVE),
    (codecs.BOM_UTF16_LE, "UTF-16", _SAVE),
    (codecs.BOM_UTF16_BE, "UTF-16", _SAVE),
    (b"ARROW1", "an Arrow file", _FROM_FEATHER),
    (b"\xff" * 4, "an Arrow stream, as `datasets` saves", _FROM_ARROW),
    (b"%PDF-", "a PDF", _EXTRACT),
    (b"{\\rtf", "an RTF document", _EXTRACT),
    (b"\x89PNG", "a PNG image", _EXTRACT),
    (b"\xff\xd8\xff", "a JPEG image", _EXTRACT),
    (b"GIF8", "a GIF image", _EXTRACT),
    (b"ORC", "an ORC file", _EXTRACT),
    (b"\x93NUMPY", "a NumPy array", _EXTRACT),
)
"""First bytes, name, and the way out; `{0}` is the file. Any other binary file is refused as no text."""


def suffix_of(file: Path) -> str:
    """Return the lower-case suffix that names the content: `.jsonl` for `a.jsonl.gz`."""
    packed = (".gz", ".zst", ".bz2", ".xz")
    return (Path(file.stem) if file.suffix.lower() in packed else file).suffix.lower()


def format_of(file: Path) -> str:
    """Return the format of a file, or refuse one that is neither text nor rows."""
    with stream_of(file) as stream:
        head = stream.read(_HEAD)
    suffix = suffix_of(file)
    if head.startswith(b"PAR1"):
        return PARQUET
    known = ((name, todo.format(file)) for magic, name, todo in _REFUSED if head.startswith(magic))
    other, todo = next(known, ("a TAR archive", _UNPACK) if head[257:262] == b"ustar" else ("", ""))
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    page = "a page of HTML or XML" if start[:1] == b"<" else ""
    begins = f"a file that begins with {head[:16]!r}" if head else "nothing"
    if suffix in _PARQUET:
        raise ConfigError(str(file), "must be parquet", got=other or page or begins, do=todo)
    if other:
        raise ConfigError(str(file), "must be text or rows of data", got=other, do=todo)
    if page and suffix in (*_LINES, ".json", *_TABLES):
        todo = "It may be an error that a server sent: fetch the file again."
        raise ConfigError(str(file), "must be rows of data", got=page, do=todo)
    must = "must be JSON lines, a JSON array or parquet"
    if suffix in _TABLES:
        raise ConfigError(str(file), must, got="a table of text", do=_FROM_TABLE.format(file))
    if suffix not in (*_LINES, ".json") and not (suffix in _ANY and _is_rows(start)):
        return TEXT
    if start[:1] == b"[" and not (suffix in _LINES and _is_one_line(start, list)):
        return ARRAY
    if suffix not in _LINES and not _is_one_line(start):
        got = "objects on several lines" if start[:1] == b"{" else begins
        raise ConfigError(str(file), must, got=got, do=_FROM_OBJECTS.format(file))
    return LINES


def _is_rows(start: bytes) -> bool:
    """Return True if a file of any name begins with a JSON object, alone or as the first of an array."""
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
    """Open a file for reading, decompressed if it is gzip."""
    with readable(file), opened(file) as stream:
        is_packed = stream.read(2) == _GZIP
        stream.seek(0)
        if not is_packed:
            yield stream
            return
        with gzip.GzipFile(fileobj=stream) as unpacked:
            yield cast(BinaryIO, unpacked)


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
                raise _not_utf8(error, str(file), start) from None
            if not characters:
                decoded = decoded.removeprefix("\ufeff")
            if "\0" in decoded:
                got = f"a zero at character {characters + decoded.index(chr(0)):,}"
                todo = "It is binary, or UTF-16: leave it out, or save it as UTF-8."
                raise ConfigError(str(file), "must be text", got=got, do=todo)
            yield newlines.decode(decoded, final=not piece)
            characters += len(decoded)
            if not piece:
                return


def _not_utf8(error: UnicodeDecodeError, where: str, before: int = 0) -> ConfigError:
    """Return the refusal of bytes that are not UTF-8; `before` counts the bytes in front of them."""
    got = f"byte 0x{error.object[error.start]:02x} at offset {before + error.start:,}"
    return ConfigError(where, "must be UTF-8 text", got=got, do="Leave it out, or save it as UTF-8.")


def type_name(value: Any) -> str:
    """Name the type of a value in the words of files, not of Python."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    if value is None:
        return "null"
    if isinstance(value, list) and not value:
        return "an empty list"
    return "a block of keys" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


# --- rows -----------------------------------------------------------------------------------------------


def read_rows(file: Path, holds: str) -> Generator[tuple[int, Row]]:
    """Yield rows with the number to look for: of the line, or of the row where lines say nothing."""
    with stream_of(file) as stream:
        if holds == PARQUET:
            yield from enumerate(_parquet(stream, file), 1)
        elif holds == LINES:
            yield from _lines(stream, file)
        else:
            yield from _ArrayReader(stream, file).rows()


def _lines(stream: BinaryIO, file: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(stream, 1):
        where = f"{file}:{number}"
        try:
            written = line.decode("utf-8-sig")
            if written.strip():
                yield number, _object(json.loads(written, object_pairs_hook=_block), where)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, where) from None
        except json.JSONDecodeError as error:
            fault = _fault(error, f"column {error.colno:,}")
            raise _not_json(where, fault, "A line is one object.") from None
        except (ValueError, RecursionError) as error:
            raise _unusual_json(where, error) from None


class _ArrayReader:
    """Reads the objects of a JSON array one by one."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._stream = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        self._file = str(file)
        self._text, self._at, self._ended = "", 0, False
        self._decoder = json.JSONDecoder(object_pairs_hook=_block)

    def rows(self) -> Iterator[tuple[int, Row]]:
        self._take("[")
        number, ending = 0, self._take("]") if self._peek() == "]" else ""
        while ending != "]":
            number += 1
            where = f"{self._file}: row {number:,}"
            yield number, _object(self._value(where), where)
            ending = self._take("],", where)
        if found := self._peek():
            raise _not_json(self._file, f"{found!r} after the end")
        self._stream.detach()

    def _read(self, size: int) -> bool:
        """Read more; return False at the end of the file."""
        if self._ended:
            return False
        try:
            piece = self._stream.read(size)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, self._file) from None
        self._ended = not piece
        self._text, self._at = self._text[self._at :] + piece, 0
        return True

    def _peek(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._read(_PIECE):
                return ""

    def _take(self, wanted: str, where: str = "") -> str:
        found = self._peek()
        if not found or found not in wanted:
            got = f"{found!r} for {' or '.join(map(repr, wanted))}" if found else "an end in the middle"
            raise _not_json(where or self._file, got)
        self._at += 1
        return found

    def _value(self, where: str) -> Any:
        size = _PIECE
        self._peek()
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                size *= 2
                if not self._read(size):  # what is not read yet might complete the value
                    raise _not_json(where, _fault(error, f"character {error.pos - self._at:,}")) from None
            except (ValueError, RecursionError) as error:
                raise _unusual_json(where, error) from None


def _block(pairs: list[tuple[str, Any]]) -> Row:
    block = dict(pairs)
    if len(block) < len(pairs):
        raise ValueError(f"a key twice in {', '.join(repr(key) for key, _ in pairs[:8])}")
    return block


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(where, "must be a JSON object", got=type_name(value))
    return value


def _fault(error: json.JSONDecodeError, place: str) -> str:
    if error.msg == "Extra data":
        return f"more behind the first value, from {place} on"
    return f"{error.msg.removesuffix(' at')} at {place}"


def _not_json(where: str, got: str, do: str = "") -> ConfigError:
    return ConfigError(where, "must be JSON", got=got, do=do)


def _unusual_json(where: str, error: BaseException) -> ConfigError:
    must = "must be JSON of ordinary depth and numbers, each key once"
    return ConfigError(where, must, got=first_line(error))


def _parquet(stream: BinaryIO, file: Path) -> Iterator[Row]:
    if importlib.util.find_spec("pyarrow") is None:
        must, todo = "`pyarrow` must be installed to read parquet", "Run `pip install 'zerodrift[hf]'`."
        raise ConfigError(str(file), must, got="no such package", do=todo)
    from pyarrow import ArrowException, parquet

    # A compressed stream cannot seek.
    whole = io.BytesIO(stream.read()) if isinstance(stream, gzip.GzipFile) else stream
    try:
        with parquet.ParquetFile(whole, page_checksum_verification=True) as table:
            names = table.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                got = ", ".join(f"`{name}`" for name in twice) + " twice"
                raise ConfigError(str(file), "must name each column once", got=got)
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield {key: _without_nulls(value) for key, value in row.items()}
    except (ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(str(file), "must be parquet", got=first_line(error)) from None


def _without_nulls(value: Any) -> Any:
    """Drop null keys of inner blocks: a column of blocks has the keys of all rows, null where a row lacks
    one."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
