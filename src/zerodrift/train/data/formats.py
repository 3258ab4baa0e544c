"""What a file is, by what is in it, and the rows or the text that it holds.

JSON, JSON lines and CSV are read here and not by `datasets`, which changes values in silence: `NA` in a CSV
becomes None and `007` a 7, a text that looks like a time a `datetime`, a 1 beside a 1.0 a float, and a key
that a row lacks a None. Parquet and Arrow are read with `pyarrow`, as `datasets` does.

Invariant: every value is the one in the file, in the file's order, or the file is refused by name and row.
Of a file of rows no more is in memory than some rows.
"""

from __future__ import annotations

import codecs
import csv
import importlib.util
import io
import itertools
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from zerodrift.errors import ConfigError, first_line, several
from zerodrift.train.data import json_rows
from zerodrift.train.data.json_rows import Row
from zerodrift.train.data.texts import not_text, readable, without_zeros
from zerodrift.train.data.unpacked import SUFFIXES, packed, unpacked

TEXT, LINES, JSON, ARRAY = "text", "JSON lines", "JSON", "a JSON array"
CSV, PARQUET, ARROW = "CSV", "parquet", "Arrow"

OF_ROWS = (".jsonl", ".ndjson", ".parquet", ".pq", ".arrow", ".feather", ".csv", ".tsv")
"""Suffixes of files that hold rows, whatever lies beside them."""
_COLUMNS = {".parquet": PARQUET, ".pq": PARQUET, ".arrow": ARROW, ".feather": ARROW}
_TABLES = (".csv", ".tsv")
_LINES = (".jsonl", ".ndjson")
_JSON = (*_LINES, ".json")
_ANY = (".txt", ".text", "")
"""Suffixes that say nothing of what is in a file."""

_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of an Arrow stream."""
_HEAD = _PIECE = 1 << 16
_FIELD = 1 << 30
"""Characters of a CSV field at most; Python's default is shorter than a document."""


def suffix_of(file: Path) -> str:
    """The suffix that says what is in it, in small letters: `.jsonl` of `a.jsonl.gz`."""
    inner = Path(file.stem) if file.suffix.lower() in SUFFIXES else file
    return inner.suffix.lower()


def format_of(file: Path) -> str:
    """What a file is. One that can be neither text nor rows is refused by name."""
    with readable(file), unpacked(file) as stream:
        head = stream.read(_HEAD)
    return _format(file, suffix_of(file), head)


def _format(file: Path, suffix: str, head: bytes) -> str:
    if head.startswith(b"PAR1"):
        return PARQUET
    wanted = _COLUMNS.get(suffix)
    if head.startswith(b"ARROW1") or (head.startswith(b"\xff" * 4) and (wanted == ARROW or not suffix)):
        return ARROW
    other = _other(head)
    if wanted is not None:
        raise ConfigError(str(file), f"must be {wanted}", got=other or _looks(head))
    if other:
        raise ConfigError(str(file), "must be text or rows of data", got=other, do=_do(other))
    start = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if suffix in (*_JSON, *_TABLES) and start[:1] == b"<":
        got, todo = "a page of HTML or XML", "It may be an error that a server sent: fetch the file again."
        raise ConfigError(str(file), "must be rows of data", got=got, do=todo)
    if suffix in _TABLES:
        return CSV
    if suffix in _JSON or (suffix in _ANY and _is_rows(start)):
        if start[:1] == b"[" and not (suffix in _LINES and _is_one_line(start, list)):
            return ARRAY
        return LINES if suffix in _LINES or _is_one_line(start) else JSON
    return TEXT


def _is_rows(start: bytes) -> bool:
    """Whether a file of any name begins with a JSON object, by itself or as the first of an array."""
    if start[:1] == b"[":
        start = start[1:].lstrip()
        return start[:1] == b"{" and start[1:].lstrip()[:1] == b'"'
    return start[:1] == b"{" and start[1:].lstrip()[:1] == b'"' and _is_one_line(start)


def _is_one_line(start: bytes, kind: type = dict) -> bool:
    """Whether the first line is an object by itself, or an array that another line follows; an object that
    is longer than what is looked at may be."""
    line, end, rest = start.partition(b"\n")
    if kind is dict and not end and len(start) > _HEAD // 2:
        return True
    try:
        return isinstance(json.loads(line), kind) and (kind is dict or bool(rest.strip()))
    except (ValueError, RecursionError):
        return False


_OTHERS = (
    (b"version https://git-lfs", "a pointer of Git LFS"),
    (b"%PDF-", "a PDF"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"PK\x03\x04", "a ZIP archive, as DOCX, XLSX and EPUB are"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a", "a RAR archive"),
    (b"\x04\x22\x4d\x18", "an LZ4 file"),
    (b"{\\rtf", "an RTF document"),
    (b"\xd0\xcf\x11\xe0", "an Office document"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"FEA1", "a Feather file of version 1"),
    (b"ORC", "an ORC file"),
    (b"Obj\x01", "an Avro file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x7fELF", "a program"),
    (b"OggS", "an Ogg file"),
    (b"fLaC", "a FLAC file"),
)


def _other(head: bytes) -> str:
    """What a file is that is no text; `""` where it may be."""
    if name := next((name for magic, name in _OTHERS if head.startswith(magic)), ""):
        return name
    if inside := packed(head):
        return f"a {inside} file, packed once more"
    if head.startswith(b"RIFF") and head[8:12] in (b"WEBP", b"WAVE", b"AVI "):
        return f"a {head[8:12].decode().strip()} file"
    if head[257:262] == b"ustar":
        return "a TAR archive"
    if head[4:8] == b"ftyp":
        return "an MP4 file"
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    return ""


def _do(other: str) -> str:
    if other.startswith("a pointer"):
        return "Run `git lfs pull` where it was cloned."
    if other.startswith("UTF"):
        return "Save it as UTF-8."
    if any(word in other for word in ("archive", "packed", "LZ4")):
        return "Unpack it first."
    return "Leave it out, or take its text out of it."


def _looks(head: bytes) -> str:
    if not head:
        return "nothing"
    if head.lstrip()[:1] == b"<":
        return "a page of HTML or XML"
    return f"a file that begins with {head[:16]!r}"


# --- text -----------------------------------------------------------------------------------------------


def text(file: Path) -> Iterator[str]:
    """A text file, piece by piece; the ends of its lines become those of Unix."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    ends = io.IncrementalNewlineDecoder(None, translate=True)
    read = told = 0
    """Bytes and characters."""
    with readable(file), unpacked(file) as stream:
        while True:
            piece = stream.read(_PIECE)
            waiting = len(decoder.getstate()[0])
            start = read - waiting
            read += len(piece)
            try:
                made = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                raise not_text(error, str(file), start) from None
            if not told:
                made = made.removeprefix("\ufeff")
            yield ends.decode(without_zeros(made, str(file), told), final=not piece)
            told += len(made)
            if not piece:
                return


# --- rows -----------------------------------------------------------------------------------------------


def rows(file: Path, kind: str) -> Generator[tuple[int, Row]]:
    """Rows with the number that a person would look for: of a line, or of a row where lines say nothing."""
    if kind in (PARQUET, ARROW):
        yield from enumerate(_columns(file, kind), 1)
        return
    with readable(file), unpacked(file) as stream:
        if kind == LINES:
            yield from json_rows.lines(stream, file)
        elif kind == CSV:
            yield from _table(stream, file)
        else:
            yield from json_rows.values(stream, file, array=kind == ARRAY)


def _table(stream: BinaryIO, file: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(_FIELD)
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        first = lines.readline()
        mark = _between(first, suffix_of(file))
        reader = csv.reader(itertools.chain([first], lines), delimiter=mark, strict=True)
        names = next(reader, None)
        _require_names(names, file)
        for cells in reader:
            if not cells:
                continue
            where = f"{file}:{reader.line_num}"
            if len(cells) != len(names or ()):
                must = f"must have {several(len(names or ()), 'cell')}, as the first line has"
                raise ConfigError(where, must, got=len(cells))
            yield (
                reader.line_num,
                {name: without_zeros(cell, where) for name, cell in zip(names or (), cells, strict=True)},
            )
    except UnicodeDecodeError as error:
        raise not_text(error, str(file)) from None
    except csv.Error as error:
        where = f"{file}:{reader.line_num}"
        raise ConfigError(where, "must be CSV", got=first_line(error), do=_QUOTES) from None
    finally:
        lines.detach()


_QUOTES = "A cell stands in quotes if it holds one, which is doubled, a line's end, or what is between cells."


def _between(first: str, suffix: str) -> str:
    """What stands between the cells of a line, as its names show where they are not in quotes."""
    plain = "".join(first.split('"')[::2])
    if suffix == ".tsv" and "\t" in plain:
        return "\t"
    return next((mark for mark in (",", "\t", ";", "|") if mark in plain), ",")


def _require_names(names: list[str] | None, file: Path) -> None:
    """That the first line can be names of columns."""
    if not names or not any(name.strip() for name in names):
        raise ConfigError(str(file), "must begin with a line of column names", got="nothing")
    _require_once(names, f"{file}:1")


def _require_once(names: list[str], where: str) -> None:
    """That a row has each column once: the last would hide the others."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        got = ", ".join(f"`{name}`" for name in twice) + " twice"
        raise ConfigError(where, "must name each column once", got=got)


def _columns(file: Path, kind: str) -> Iterator[Row]:
    if importlib.util.find_spec("pyarrow") is None:
        must = f"`pyarrow` must be installed to read {kind}"
        todo = "Run `pip install 'zerodrift[hf]'`."
        raise ConfigError(str(file), must, got="no such package", do=todo)
    from pyarrow import ArrowException, ipc, parquet

    try:
        with readable(file), unpacked(file) as stream:
            if kind == PARQUET:
                # A file that is compressed as a whole has no places to go to.
                whole = stream if stream.seekable() else io.BytesIO(stream.read())
                with parquet.ParquetFile(whole, page_checksum_verification=True) as read:
                    _require_once(read.schema_arrow.names, str(file))
                    for batch in read.iter_batches(batch_size=1024):
                        yield from map(_without_nothing, batch.to_pylist())
            else:
                for batch in _record_batches(ipc, stream):
                    _require_once(batch.schema.names, str(file))
                    for start in range(0, batch.num_rows, 1024):
                        yield from map(_without_nothing, batch.slice(start, 1024).to_pylist())
    except (ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"must be {kind}", got=first_line(error)) from None


def _record_batches(ipc: Any, stream: BinaryIO) -> Iterator[Any]:
    if not stream.seekable():
        stream = io.BytesIO(stream.read())
    if stream.read(6) == b"ARROW1":
        with ipc.open_file(stream) as read:
            for number in range(read.num_record_batches):
                yield read.get_batch(number)
        return
    stream.seek(-len(_END), io.SEEK_END)
    if stream.read() != _END:  # the reader takes whatever ends with a batch
        raise OSError("an Arrow file that ends early")
    stream.seek(0)
    with ipc.open_stream(stream) as read:
        yield from read


def _without_nothing(row: Row) -> Row:
    """A row whose inner blocks have no keys of nothing: a column of blocks has the keys of all rows, and what
    a row does not have is null there."""
    return {key: _pruned(value) for key, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value
