"""Documents out of files: a text, a row with a text, a row with a conversation.

Which files there are is `find.py`'s affair, what is in one is `formats.py`'s, and tokens are `pack.py`'s.
Order is that of the files and their rows; which documents are held out is decided by what is in them, so it
is the same whatever else is there.

Invariant: every row of every file is a document, is counted with the reason for which it is none, or is
refused by its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerodrift.errors import ConfigError
from zerodrift.train.data import conversation as chat
from zerodrift.train.data import formats, texts
from zerodrift.train.data.conversation import Conversation
from zerodrift.train.data.files import MAPS
from zerodrift.train.data.json_rows import Row
from zerodrift.train.loop.job import Data

COLUMNS = ("content", "document", "body", "article", "story", "passage", "code")
"""What a column of texts is called where it is not `text`."""
PIECE = 1 << 16
"""Characters of a text at a time."""
NO_ANSWER, EMPTY = "without a turn of the assistant to learn", "empty"
"""Why a document is left out."""
SILENT = "with an answer of nothing, which is not learned"
"""What is noted of a document."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text or one conversation."""

    text: str = ""
    talk: Conversation | None = None
    given: int = 0
    """Characters at the start of the text that are there to be continued, and not learned."""
    where: str = ""
    """Its file, and row."""
    file: Path | None = None
    """Of a text file, which may be larger than memory: its text is read where it is needed."""

    def share(self, seed: int) -> float:
        """A number in [0, 1) that depends on what is in it and on the seed."""
        return self.number(seed) / 2**64

    def number(self, seed: int) -> int:
        """The same as 64 bits: documents of one number say the same."""
        digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little"))
        for piece in self.pieces():
            digest.update(piece.encode())
        digest.update(b"\0")
        for part in (_part(turn[key]) for turn in self._turns for key in turn):
            digest.update(part.encode() + b"\0")
        return int.from_bytes(digest.digest(), "little")

    def pieces(self) -> Iterator[str]:
        """Its text, a part of it at a time."""
        if self.file is not None:
            yield from formats.text(self.file)
        for at in range(0, len(self.text), PIECE):
            yield self.text[at : at + PIECE]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it but spaces."""
        return self.talk is None and not any(piece.strip() for piece in self.pieces())

    @property
    def _turns(self) -> Sequence[Mapping[str, Any]]:
        return self.talk.messages if self.talk is not None else ()


def _part(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


@dataclass
class Seen:
    """What was met in the files of one part."""

    documents: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    """What documents were made of, in words, with how many."""
    left: Counter[str] = field(default_factory=Counter)
    """Reasons for which documents were left out, with how many."""
    noted: Counter[str] = field(default_factory=Counter)
    """What may not be as it was meant, with how many documents."""
    unread: dict[str, None] = field(default_factory=dict)
    """Columns of rows that are not read, and not empty."""

    def leave_unread(self, row: Row, read: Collection[str]) -> None:
        self.unread |= dict.fromkeys(key for key in row if key not in read and chat.says(row[key]))


def kind_of(files: Sequence[Path], data: Data) -> str:
    """What `data.format: auto` means: `text`, `chat` or `tokens`, by the files and the first row."""
    if data.format != "auto":
        return "text" if data.format == "files" else data.format
    maps = [file.suffix.lower() in MAPS for file in files]
    if all(maps):
        return "tokens"
    if any(maps):
        mixed = files[maps.index(True)]
        must, todo = "must not mix token maps with other files", "Name one kind, or set `data.format`."
        raise ConfigError("data.train", must, got=str(mixed), do=todo)
    for file in files:
        kind = formats.format_of(file)
        if kind == formats.TEXT:
            continue
        with contextlib.closing(formats.rows(file, kind)) as rows:
            number, row = next(rows, (0, None))
        if row is not None:
            return _kind_of_row(row, data, f"{file}:{number}")
    return "text"


def _kind_of_row(row: Row, data: Data, where: str) -> str:
    if data.field and (data.field in row or len(data.sets()) == 1):
        return "text"
    if not chat.is_conversation(row, data.messages):
        return "text"
    pair = chat.pair_columns(row)
    if "text" in row and chat.turns_column(row, data.messages) is None:
        if pair is None:
            return "text"
        must, got = "must be a text or a conversation", f"`text` beside `{pair[0]}` and `{pair[1]}`"
        raise ConfigError(where, must, got=got, do="Set `data.format: text`, or `data.format: chat`.")
    return "chat"


def documents(files: Sequence[Path], data: Data, kind: str, seen: Seen) -> Iterator[Document]:
    """Every document, in order. What they are is added to `seen`."""
    if kind == "chat" and data.field and len(data.sets()) == 1:
        must, todo = "must not be given where rows are conversations", "Name their column in `data.messages`."
        raise ConfigError("data.field", must, got=repr(data.field), do=todo)
    columns: tuple[str, ...] = ()
    for file in files:
        holds = formats.TEXT if data.format == "files" else formats.format_of(file)
        if holds == formats.TEXT:
            if kind == "chat":
                must = "must be rows of conversations: JSON, JSON lines, CSV, parquet or Arrow"
                raise ConfigError(str(file), must, got="a text")
            found = Document(where=str(file), file=file)
            yield from _counted(found, "a text per file", seen)
            continue
        for number, row in formats.rows(file, holds):
            where = f"{file}:{number}"
            if kind == "chat":
                yield from _conversation(row, data, where, seen)
                continue
            columns = columns or _columns(row, data.field, where)
            yield from _of_text(row, columns, where, seen)


def _counted(document: Document, form: str, seen: Seen) -> Iterator[Document]:
    seen.documents += 1
    seen.forms[form] += 1
    if document.is_empty:
        seen.left[EMPTY] += 1
    else:
        yield document


def _conversation(row: Row, data: Data, where: str, seen: Seen) -> Iterator[Document]:
    talk = chat.conversation(row, data.messages, where)
    _require_no_label(row, talk.columns, where)
    seen.leave_unread(row, talk.columns)
    if talk.silent:
        seen.noted[SILENT] += 1
    if data.loss_on == "answers" and not talk.answers:
        seen.documents += 1
        seen.left[NO_ANSWER] += 1
        return
    yield from _counted(Document(talk=talk, where=where), talk.form, seen)


# --- texts of rows --------------------------------------------------------------------------------------

CONTINUED = ("prompt", "completion")
"""Columns of a text to be continued, and of its continuation."""


def _columns(row: Row, field: str, where: str) -> tuple[str, ...]:
    """The columns of rows that have the text: the one that is named, `text`, a text and its continuation, or
    the only one."""
    if field:
        return (field,)
    if "text" in row:
        return ("text",)
    if row.keys() >= set(CONTINUED):
        _require_no_label(row, CONTINUED, where)
        return CONTINUED
    if row.keys() >= {"chosen", "rejected"}:
        raise _preferences("`chosen` and `rejected`", where)
    texts = [key for key, held in row.items() if isinstance(held, str)]
    known = texts if len(texts) == 1 else [key for key in COLUMNS if key in texts]
    if len(known) != 1 or known[0] in chat.ASKED:
        got = ", ".join(f"`{key}`" for key in row) or "nothing"
        raise ConfigError(where, "must have a text in `text`, or in one column", got=got, do=_way_out(row))
    return (known[0],)


def _of_text(row: Row, columns: tuple[str, ...], where: str, seen: Seen) -> Iterator[Document]:
    for column in columns:
        if not isinstance(row.get(column), str):
            there = column in row
            got = texts.kind(row[column]) if there else ", ".join(f"`{key}`" for key in row) or "nothing"
            raise ConfigError(where, f"must have a text in `{column}`", got=got, do=_way_out(row))
    seen.leave_unread(row, columns)
    parts = [chat.text_of(row, column, where) for column in columns]
    given = len(parts[0]) if len(parts) > 1 else 0
    form = "`prompt` continued by `completion`" if given else f"`{columns[-1]}` of rows"
    yield from _counted(Document("".join(parts), given=given, where=where), form, seen)


def _way_out(row: Row) -> str:
    """What can be done about a row without a text, by what it has instead."""
    for key, held in row.items():
        first = held[0] if isinstance(held, list) and held else None
        if isinstance(first, Mapping) and first.keys() & {"role", "from"}:
            return f"If its conversation is in `{key}`, set `data.messages: {key}`."
        if isinstance(first, Mapping):
            return f"A row is an object by itself: make a file of what is in `{key}`."
        if isinstance(first, int):
            return "Token numbers are read from maps, `.npy` or `.bin`; a text is named by `data.field`."
        if isinstance(first, str):
            return "A row is an object by itself, with one text: make a row of each."
    return "Name the column in `data.field`."


def _require_no_label(row: Row, read: Collection[str], where: str) -> None:
    """That a completion is not one of those that are marked as good or bad, as KTO's are."""
    label = row.get("label")
    if "completion" in read and (isinstance(label, bool) or str(label).lower() in ("true", "false")):
        raise _preferences("`completion` with a `label` of true or false", where)


def _preferences(got: str, where: str) -> ConfigError:
    must, todo = "must be texts or conversations", "TRL trains on preferences: see docs/migrating.md."
    return ConfigError(where, must, got=f"preferences: {got}", do=todo)
