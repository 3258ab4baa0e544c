"""Read the rows of JSON, JSON lines, CSV, parquet and Arrow files, each value exactly as it is in the file.

JSON and CSV are not read by `datasets` or `pyarrow`, which change values silently: `NA` in a CSV becomes
None, `007` becomes 7, a text that looks like a time becomes a `datetime`, and a 1 beside a 1.0 becomes a
float.

A few rows are in memory at a time, except for a JSON array. A row that cannot be read is refused by its
place.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from zerodrift.errors import ConfigError, first_line, several
from zerodrift.train.data import formats
from zerodrift.train.data.formats import not_utf8, stream_of, type_name, without_zeros

Row = dict[str, Any]

_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_LARGEST_CELL = 1 << 30
"""Characters. Python's default limit is shorter than a document."""
_QUOTE = "Put a cell in quotes if it holds a quote (doubled), a line end or a delimiter."


def read_rows(file: Path, holds: str) -> Generator[tuple[int, Row]]:
    """Yield each row with the number of its line, or of the row in formats without lines."""
    with stream_of(file) as stream:
        if holds in (formats.PARQUET, formats.ARROW):
            yield from enumerate(_columns(stream, file, holds), 1)
        elif holds == formats.LINES:
            yield from _lines(stream, file)
        elif holds == formats.CSV:
            yield from _table(stream, file)
        else:
            yield from _json(stream, file, holds == formats.ARRAY)


def _lines(stream: BinaryIO, file: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(stream, 1):
        where = f"{file}:{number}"
        if (text := _decoded(line, where)).strip():
            yield number, _object(_parsed(text, where, "A line is one object.", is_line=True), where)


def _json(stream: BinaryIO, file: Path, is_array: bool) -> Iterator[tuple[int, Row]]:
    """Yield the objects of an array, or the only object of a file, which is read whole."""
    todo = "" if is_array else f"Run `jq -c . {file} > {file.stem}.jsonl`: a line for each object."
    value = _parsed(_decoded(stream.read(), str(file)), str(file), todo)
    for number, row in enumerate(value if is_array else [value], 1):
        yield number, _object(row, f"{file}: row {number:,}")


def _block(pairs: list[tuple[str, Any]]) -> Row:
    block = dict(pairs)
    if len(block) < len(pairs):
        raise ValueError(f"a key twice in {', '.join(repr(key) for key, _ in pairs[:8])}")
    return block


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(where, "must be a JSON object", got=type_name(value))
    return value


def _decoded(written: bytes, where: str) -> str:
    try:
        return written.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(error, where) from None


def _parsed(text: str, where: str, todo: str, is_line: bool = False) -> Any:
    """Parse one JSON value. `todo` is for any fault of a line, and for a second value in a file."""
    try:
        return json.loads(text, object_pairs_hook=_block)
    except json.JSONDecodeError as error:
        is_more = error.msg == "Extra data"
        place = f"{'' if is_line else f'line {error.lineno:,}, '}column {error.colno:,}"
        got = f"{error.msg.removesuffix(' at')} at {place}"
        got = f"more behind the first value, from {place} on" if is_more else got
        raise ConfigError(where, "must be JSON", got=got, do=todo if is_line or is_more else "") from None
    except (ValueError, RecursionError) as error:
        must = "must be JSON of ordinary depth and numbers, each key once"
        raise ConfigError(where, must, got=first_line(error)) from None


def _table(stream: BinaryIO, file: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(_LARGEST_CELL)
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    try:
        first = lines.readline()
        plain = "".join(first.split('"')[::2])  # the part that is not quoted shows the delimiter
        marks = ("\t", ",", ";", "|") if formats.suffix_of(file) == ".tsv" else (",", "\t", ";", "|")
        delimiter = next((mark for mark in marks if mark in plain), ",")
        reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
        names = next(reader, None) or []
        if not any(name.strip() for name in names):
            raise ConfigError(str(file), "must begin with a line of column names", got="nothing")
        _require_once(names, f"{file}:1")
        for cells in filter(None, reader):
            where = f"{file}:{reader.line_num}"
            if len(cells) != len(names):
                must = f"must have {several(len(names), 'cell')}, as the first line has"
                raise ConfigError(where, must, got=len(cells), do=_QUOTE)
            cells = [without_zeros(cell, where) for cell in cells]
            yield reader.line_num, dict(zip(names, cells, strict=True))
    except UnicodeDecodeError as error:
        raise not_utf8(error, str(file)) from None
    except csv.Error as error:
        where = f"{file}:{reader.line_num}"
        raise ConfigError(where, "must be CSV", got=first_line(error), do=_QUOTE) from None
    finally:
        lines.detach()


def _require_once(names: list[str], where: str) -> None:
    """Refuse a column that comes twice: the last would hide the others."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        got = ", ".join(f"`{name}`" for name in twice) + " twice"
        raise ConfigError(where, "must name each column once", got=got)


def _columns(stream: BinaryIO, file: Path, holds: str) -> Iterator[Row]:
    formats.require_pyarrow(file, holds)
    from pyarrow import ArrowException

    # A compressed stream cannot seek.
    whole = stream if stream.seekable() and not hasattr(stream, "fileobj") else io.BytesIO(stream.read())
    try:
        for batch in _batches(whole, file, holds):
            _require_once(batch.schema.names, str(file))
            for start in range(0, batch.num_rows, 1024):
                for row in batch.slice(start, 1024).to_pylist():
                    yield {key: _without_nulls(value) for key, value in row.items()}
    except (ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"must be {holds}", got=first_line(error)) from None


def _batches(stream: BinaryIO, file: Path, holds: str) -> Iterator[Any]:
    from pyarrow import ipc, parquet

    if holds == formats.PARQUET:
        with parquet.ParquetFile(stream, page_checksum_verification=True) as table:
            _require_once(table.schema_arrow.names, str(file))
            yield from table.iter_batches(batch_size=1024)
        return
    if stream.read(6) == b"ARROW1":
        with ipc.open_file(stream) as table:
            yield from map(table.get_batch, range(table.num_record_batches))
        return
    stream.seek(-len(_ARROW_END), io.SEEK_END)
    if stream.read() != _ARROW_END:  # the reader would take a cut file that ends with a batch
        raise OSError("an Arrow file that ends early")
    stream.seek(0)
    with ipc.open_stream(stream) as batches:
        yield from batches


def _without_nulls(value: Any) -> Any:
    """Drop null keys of inner blocks: a column of blocks has the keys of all rows, null where a row lacks
    one."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
