"""Documents out of files: text, JSON lines and parquet, in folders, by name or by glob.

A text file is one document, a row of the others is one. Order is that of the sorted paths, so it is the
same on every machine; which documents are held out is decided by what is in them, so it is the same
whatever else is there. Tokens and blocks are `pack.py`'s affair.

Invariant: every named file is read or refused by name; nothing that was asked for is skipped in silence.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerodrift.errors import ConfigError, Problem, Problems
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
            digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
        return int.from_bytes(digest.digest(), "little") / 2**64


def find(written: str | Sequence[str], pattern: str, where: str) -> list[Path]:
    """The files that a key names, sorted, each once."""
    problems = Problems()
    found: dict[Path, None] = {}
    for text in [written] if isinstance(written, str) else written:
        path = Path(text).expanduser()
        if path.is_dir():
            files = _inside(path, pattern)
            what = f"files that match {pattern!r}" if pattern else "files of a known kind"
            if not files:
                problems.add(where, f"must name folders with {what}", repr(text))
        else:
            files = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
            files = [file for file in files if file.is_file()]
            if not files:
                problems.add(where, "must name files that are there", repr(text))
        found |= dict.fromkeys(files)
    problems.raise_as(ConfigError)
    return sorted(found)


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
        raise ConfigError(str(Problem("data.train", must, str(mixed), todo)))
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
            raise ConfigError(str(Problem(str(file), must, f"a {file.suffix or 'nameless'} file")))
        else:
            yield Document(file.read_text(encoding="utf-8", errors="replace"))


def _document(row: dict[str, Any], data: Data, kind: str, where: str) -> Document:
    if kind == "chat":
        return Document(messages=tuple(chat.conversation(row, data.messages, where)))
    text = row.get(data.field)
    if not isinstance(text, str):
        got = f"{type(text).__name__}" if data.field in row else ", ".join(f"`{key}`" for key in row)
        todo = "Name the key in `data.field`."
        raise ConfigError(str(Problem(where, f"must have a text in `{data.field}`", got, todo)))
    return Document(text)


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows with the number that a person would look for."""
    if file.suffix in PARQUET:
        yield from enumerate(_parquet(file), 1)
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                what = f"{error.msg} at column {error.colno}"
                raise ConfigError(str(Problem(f"{file}:{number}", "must be JSON", what))) from None
            if not isinstance(row, dict):
                must = "must be a JSON object"
                raise ConfigError(str(Problem(f"{file}:{number}", must, type(row).__name__)))
            yield number, row


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    # What `datasets` itself reads parquet with, and what it brings along: batch by batch, without a copy
    # of the file in a cache.
    if importlib.util.find_spec("pyarrow") is None:
        must, todo = "`datasets` must be installed to read parquet", "pip install 'zerodrift[hf]'"
        raise ConfigError(str(Problem(str(file), must, "no such package", todo)))
    from pyarrow import ArrowInvalid, parquet

    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ConfigError(str(Problem(str(file), "must be parquet", str(error)))) from None
