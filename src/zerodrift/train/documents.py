"""Documents out of files: text, JSON lines and parquet, in folders, by name or by glob.

A text file is one document, a row of the others is one. Order is that of the sorted paths, so it is the
same on every machine; which documents are held out is decided by what is in them, so it is the same
whatever else is there. Tokens and blocks are `pack.py`'s affair.

Invariant: every named file is read or refused by name; nothing that was asked for is skipped in silence, and
no character of a document is one that was made up for what could not be read.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerodrift.errors import ConfigError, Problems, first_line, said
from zerodrift.files import kind as odd
from zerodrift.files import opened
from zerodrift.train import chat
from zerodrift.train.job import Data

ROWS = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
MAPS = (".npy", ".bin")
TEXT = (
    *(".txt", ".md", ".rst", ".text", ".html", ".tex", ".csv"),
    *(".py", ".c", ".h", ".cpp", ".cc", ".hpp", ".cu", ".rs", ".go", ".js", ".ts", ".java", ".sh", ".json"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text or one conversation."""

    text: str = ""
    messages: tuple[chat.Message, ...] = ()
    """Of a conversation."""

    def share(self, seed: int) -> float:
        """A number in [0, 1) that depends on what is in it and on the seed."""
        digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little"))
        for part in (self.text, *(text for turn in self.messages for text in turn.values())):
            digest.update(part.encode() + b"\0")
        return int.from_bytes(digest.digest(), "little") / 2**64


def find(written: str | Sequence[str], pattern: str, where: str) -> list[Path]:
    """The files that a key names, sorted, each once."""
    problems = Problems()
    paths: dict[Path, None] = {}
    for text in [written] if isinstance(written, str) else written:
        try:
            files, must = _named(text, pattern)
        except (OSError, RuntimeError, ValueError) as error:  # a name too long, a home that is not there
            files, must = [], f"must name files that are there ({first_line(error)[-80:]})"
        if not files:
            problems.add(where, must, got=repr(text))
        paths |= dict.fromkeys(files)
    problems.raise_as(ConfigError)
    return sorted(paths)


def _named(text: str, pattern: str) -> tuple[list[Path], str]:
    """The files of one path or glob, and what must hold where there are none."""
    if not text:
        return [], "must name files"
    path = Path(text).expanduser()
    if path.is_dir():
        what = f"files that match {pattern!r}" if pattern else "files of a known kind"
        return _inside(path, pattern), f"must name folders with {what}"
    files = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    other = odd(path)
    must = f"must name files, not {other}" if other else "must name files that are there"
    return [file for file in files if file.is_file()], must


def _inside(folder: Path, pattern: str) -> list[Path]:
    known = (*ROWS, *PARQUET, *TEXT)
    files = [
        path
        for path in folder.rglob(pattern or "*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if pattern:
        return files
    plain = [path for path in files if path.suffix in known]
    return plain or [path for path in files if path.suffix in MAPS]


def format_of(files: Sequence[Path], data: Data) -> str:
    """What `auto` means: by suffix, and for rows by the first of them."""
    if data.format != "auto":
        return data.format
    maps = [file.suffix in MAPS for file in files]
    if all(maps):
        return "tokens"
    if any(maps):
        mixed = files[maps.index(True)]
        must, todo = "must not mix token maps with other files", "Name one kind, or set `data.format`."
        raise ConfigError("data.train", must, got=str(mixed), do=todo)
    rows = next((file for file in files if file.suffix in (*ROWS, *PARQUET)), None)
    first = next(_rows(rows), (0, {}))[1] if rows is not None else {}
    return "chat" if chat.is_conversation(first, data.messages) and data.field not in first else "text"


def documents(files: Sequence[Path], data: Data, kind: str) -> Iterator[Document]:
    """Every document, in order."""
    for file in files:
        if file.suffix in (*ROWS, *PARQUET):
            for number, row in _rows(file):
                yield _document(row, data, kind, f"{file}:{number}")
        elif kind == "chat":
            must = "must be JSONL or parquet, with a conversation per row"
            raise ConfigError(str(file), must, got=f"a {file.suffix or 'nameless'} file")
        else:
            yield Document(_text(file))


def _document(row: dict[str, Any], data: Data, kind: str, where: str) -> Document:
    if kind == "chat":
        messages = chat.conversation(row, data.messages, where)
        if data.loss_on == "answers" and not any(turn["role"] == chat.ASSISTANT for turn in messages):
            got = ", ".join(sorted({repr(turn["role"]) for turn in messages}))
            must = f"must have a turn of the role {chat.ASSISTANT!r}, which is what is learned"
            raise ConfigError(where, must, got=got, do="`data.loss_on: everything` learns all turns.")
        return Document(messages=tuple(messages))
    text = row.get(data.field)
    if not isinstance(text, str):
        got = f"{type(text).__name__}" if data.field in row else ", ".join(f"`{key}`" for key in row)
        todo = "Name the key in `data.field`."
        raise ConfigError(where, f"must have a text in `{data.field}`", got=got, do=todo)
    return Document(chat.unicode(text, f"{where}: {data.field}"))


# --- reading ------------------------------------------------------------------------------------------


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """What the system says no to is an error that names the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(str(file), "must be readable", got=error.strerror or said(error)) from None


def _text(file: Path) -> str:
    """A text file in full; the ends of its lines become those of Unix."""
    with readable(file), opened(file) as stream:
        data = stream.read()
    text = _decoded(data, str(file))
    if "\0" in text:
        got = f"a zero at character {text.index(chr(0)):,}"
        todo = "It is binary, or UTF-16: leave it out, or save it as UTF-8."
        raise ConfigError(str(file), "must be text", got=got, do=todo)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes, where: str) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(where, "must be UTF-8 text", got="UTF-16", do="Save it as UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start:,}"
        if data.startswith(b"\x1f\x8b"):
            got = "a gzip file"
        todo = "Unpack it first." if got == "a gzip file" else "Leave it out, or save it as UTF-8."
        raise ConfigError(where, "must be UTF-8 text", got=got, do=todo) from None


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows with the number that a person would look for."""
    if file.suffix in PARQUET:
        yield from enumerate(_parquet(file), 1)
        return
    with readable(file), opened(file) as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            text = _decoded(line, where)
            if not text.strip():
                continue
            try:
                row = json.loads(text, object_pairs_hook=_block)
            except json.JSONDecodeError as error:
                what = f"{error.msg} at column {error.colno}"
                raise ConfigError(where, "must be JSON", got=what) from None
            except (ValueError, RecursionError) as error:
                must = "must be JSON of ordinary depth and numbers, each key once"
                raise ConfigError(where, must, got=first_line(error)) from None
            if not isinstance(row, dict):
                raise ConfigError(where, "must be a JSON object", got=type(row).__name__)
            yield number, row


def _block(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    block = dict(pairs)
    if len(block) < len(pairs):
        raise ValueError(f"a key twice in {', '.join(repr(key) for key, _ in pairs[:8])}")
    return block


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    # What `datasets` itself reads parquet with, and what it brings along: batch by batch, without a copy
    # of the file in a cache.
    if importlib.util.find_spec("pyarrow") is None:
        must, todo = "`datasets` must be installed to read parquet", "Run `pip install 'zerodrift[hf]'`."
        raise ConfigError(str(file), must, got="no such package", do=todo)
    from pyarrow import ArrowException, parquet

    try:
        with (
            readable(file),
            opened(file) as stream,
            parquet.ParquetFile(stream, page_checksum_verification=True) as read,
        ):
            for batch in read.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(str(file), "must be parquet", got=first_line(error)) from None
